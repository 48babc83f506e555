"""A run as a job of Slurm: what it asks for, how it is followed, preempted and found again."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import batchwright as bw
from batchwright.errors import (
    BatchwrightError,
    DeadlineReached,
    FileError,
    Interrupted,
    JobError,
    WorkerError,
)
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job, Plan, RunSummary, Sweep
from batchwright.records.agent_rules import not_allowed
from batchwright.records.documents import change_job, read_record, write_record
from batchwright.records.registries.launchers import STARTED_BY
from batchwright.records.run_folder import write_inputs
from batchwright.workflows.engines import slurm as slurm_engine
from batchwright.workflows.engines import slurm_script
from batchwright.workflows.engines.slurm_script import body, notice, script, tasks_per_node
from batchwright.workflows.exports import EXPORTS, export
from batchwright.workflows.exports.target import Target
from batchwright.workflows.prepare_job import data_facts
from forked import forking
from forked_tasks import forking_tasks
from held_network import hold, release
from samples import make_job, make_network, make_plan, make_summary, with_keys
from slurm import Slurm, cluster, until

ASKED = {
    "launch": "slurm",
    "nodes": 2,
    "workers": 8,
    "slurm": {
        "partition": "gpu",
        "account": "vision",
        "time": "1-12",
        "gpus_per_node": 4,
        "lines": ["--cpus-per-task=8", "--constraint=a100"],
    },
}


# ------------------------------------------------------------------------------------- the script


def test_the_script_asks_for_what_the_job_says():
    text = script(Path("/disk/a run"), Job(**ASKED), ["batchwright", "run", "--out", "/disk/a run"])
    asked = re.findall(r"^#SBATCH --(\S+)", text, re.MULTILINE)
    assert {
        *("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "partition=gpu", "account=vision"),
        *("time=1-12", "requeue", "signal=USR1@120", "cpus-per-task=8", "constraint=a100"),
    } <= {*asked}
    assert "#SBATCH --output='/disk/a run/logs/slurm/%j.log'\n" in text
    assert "srun --kill-on-bad-exit=0 --wait=600 batchwright run --out '/disk/a run'\n" in text


def test_a_folders_name_is_neither_a_command_nor_a_pattern_of_slurms():
    with pytest.raises(JobError, match="has a line break or the like"):
        script(Path("/disk/a\ntouch b"), Job(launch="slurm"), ["true"])
    with pytest.raises(JobError, match="has a backslash, which Slurm drops: rename it"):
        script(Path("/disk/a\\b"), Job(launch="slurm"), ["true"])
    text = script(Path("/disk/100%j"), Job(launch="slurm"), ["true"])
    assert "#SBATCH --output=/disk/100%%j/logs/slurm/%j.log\n" in text


def test_the_script_leaves_out_what_the_job_leaves_open():
    text = script(Path("run"), Job(launch="slurm"), ["true"])
    assert not re.search("gpus|partition|account|time=", text)


@pytest.mark.parametrize(
    ("keys", "tasks"),
    [
        ({}, 1),
        ({"nodes": 3}, 1),
        ({"nodes": 2, "workers": 6}, 3),
        ({"slurm": {"gpus_per_node": 8}}, 8),
        ({"slurm": {"gpus_per_node": 8}, "workers": 2}, 2),
    ],
)
def test_a_node_has_a_task_for_each_worker_or_gpu(keys, tasks):
    assert tasks_per_node(Job(launch="slurm", **keys)) == tasks


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        *(("", 120), ("UNLIMITED", 120), ("60", 120), ("8", 120), ("4", 60), ("1:30", 22)),
        *(("00:02:00", 30), ("01:00:00", 120), ("1-0", 120), ("0-0:4", 60), ("1", 15)),
    ],
)
def test_the_notice_leaves_three_quarters_of_a_short_time_limit(limit, seconds):
    assert notice(limit) == seconds


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"nodes": 2}, "nodes=2 with launch=auto: only launch=slurm asks for machines; leave"),
        ({"launch": "slurm", "nodes": 2, "workers": 3}, "workers=3 are not the same number on"),
        ({**ASKED, "workers": 10}, "workers=10 with slurm.gpus_per_node=4 and nodes=2: give at m"),
        ({"slurm": {"time": "soon"}}, "slurm.time = 'soon': Slurm takes minutes, hours"),
        ({"slurm": {"lines": ["mem=3"]}}, "slurm.lines = 'mem=3': write options of sbatch"),
        ({"slurm": {"partition": "a b"}}, "job key slurm.partition = 'a b'"),
        ({"slurm": {"lines": ["rm -r /"]}}, "job key slurm.lines"),
        ({"slurm": {"lines": ["--mem=4G\nrm -r /"]}}, "job key slurm.lines"),
    ],
)
def test_keys_that_ask_for_the_impossible_are_refused(keys, said):
    with pytest.raises(JobError, match=re.escape(said)):
        Job(**keys)


def test_an_agent_submits_no_jobs():
    assert not_allowed((), Job(launch="slurm")).startswith("launch=slurm: an agent trains on its")


# ------------------------------------------------------------------------- a machine without Slurm


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes programs that are the only ones on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv(STARTED_BY, raising=False)

    def make(name: str, text: str) -> None:
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.mark.parametrize(("code", "starts"), [(137, 3), (130, 1), (129, 1), (2, 1), (0, 1)])
def test_the_script_starts_killed_tasks_again_and_no_interrupted_ones(
    programs, tmp_path, code, starts
):
    programs("srun", f"echo >> {tmp_path}/starts; exit {code}")
    done = subprocess.run(["/bin/bash", "-c", body("true", 2)], capture_output=True, check=False)
    assert done.returncode == code
    assert (tmp_path / "starts").read_text() == "\n" * starts


def test_without_sbatch_the_line_says_where_to_run_it(programs, tmp_path):
    line = "there is no sbatch on this machine's PATH: run it on a"
    with pytest.raises(JobError, match=line) as refused:
        bw.run(launch="slurm", run_folder=tmp_path / "run")
    plan = make_summary().plan.model_copy(update={"job": make_job(launch="slurm")})
    with pytest.raises(JobError, match=line):
        bw.train(plan, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (named,) = re.findall(r"--as (\w+)", str(refused.value))
    assert named in EXPORTS


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition "
            "combination specified",
            "slurm refuses the job: Invalid account or account/partition combination specified; "
            "`sacctmgr show associations user=$USER` lists your accounts and where they may run: "
            "give slurm.account",
        ),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller "
            "(connect failure)",
            "slurm refuses the job: Unable to contact slurm controller (connect failure); "
            "`scontrol ping` tells",
        ),
        ("", "slurm refuses the job: it said nothing; read slurm.sh in the run folder"),
    ],
)
def test_what_sbatch_refuses_is_told_in_a_line(programs, tmp_path, said, told):
    programs("sbatch", f"echo '{said}' >&2; exit 1")
    with pytest.raises(JobError, match=f"^{re.escape(told)}") as refused:
        bw.run(launch="slurm", run_folder=tmp_path / "run")
    assert refused.value.exit_code == 2


def test_a_job_inherits_nothing_of_the_one_that_it_is_submitted_in(programs, tmp_path, monkeypatch):
    programs("sbatch", f"export -p >{tmp_path}/variables; exit 1")
    names = ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SRUN_CPUS_PER_TASK")
    for name in (*names, "SLURM_CONF", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "7")
    with pytest.raises(JobError, match="slurm refuses the job"):
        bw.run(launch="slurm", run_folder=tmp_path / "run")
    given = (tmp_path / "variables").read_text("utf-8")
    assert not [name for name in names if name in given]
    assert "SLURM_CONF=" in given
    assert "SBATCH_PARTITION=" in given


def test_probe_and_check_are_not_handed_over():
    with pytest.raises(JobError, match="launch=slurm is for run and train, and probe takes place"):
        bw.probe(launch="slurm")


def test_a_finished_run_asks_slurm_for_nothing(programs, tmp_path, undrawn):
    summary = make_summary()
    job = make_job(launch="slurm")
    write_inputs(tmp_path, summary.plan.model_copy(update={"job": job}), None)
    write_record(summary, tmp_path / "summary.json")
    assert bw.run(run_folder=tmp_path, resume=True).epochs == summary.epochs


@pytest.mark.parametrize("again", [False, True])
def test_a_plan_is_given_its_workers(programs, tmp_path, again):
    programs("sbatch", "exit 1")
    plan = make_summary().plan
    plan = plan.model_copy(update={"job": make_job(launch="slurm", nodes=2, workers="auto")})
    assert plan.workers == 2
    folder = tmp_path / "run"
    if again:
        folder.mkdir()
        write_inputs(folder, plan, None)
    with pytest.raises(JobError, match="slurm refuses the job"):
        bw.train(None if again else plan, run_folder=folder, resume=again)
    asked = (folder / "slurm.sh").read_text("utf-8")
    assert "--nodes=2\n#SBATCH --ntasks-per-node=1\n" in asked
    with pytest.raises(JobError, match="workers=2 are not the same number on each of nodes=3"):
        bw.train(None if again else plan, run_folder=folder, resume=again, nodes=3)


def test_keys_from_python_reach_the_tasks_as_texts_that_they_read(programs, tmp_path):
    programs("sbatch", "exit 1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text("launch: slurm\nseed: 3\n", encoding="utf-8")
    keys = {"checkpoint_steps": None, "slurm": {"lines": ["--nodelist=a,b", "--exclusive"]}}
    with pytest.raises(JobError, match="slurm refuses the job"):
        bw.run(run_folder=tmp_path / "run", resume=True, **keys, timeout=30, weights="a b")
    command = re.search("srun --.*", (tmp_path / "run" / "slurm.sh").read_text("utf-8"))[0]
    words = [word for word in shlex.split(command)[1:] if re.match(r"[a-z_.]+=", word)]
    wanted = change_job(Job(launch="slurm", seed=3), {**keys, "timeout": 30, "weights": "a b"})
    assert change_job(Job(launch="slurm", seed=3), overrides=words) == wanted


def test_a_job_that_slurm_has_forgotten_is_no_job_to_follow(programs, tmp_path):
    programs("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    programs("sbatch", "echo 8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text("launch: slurm\n", encoding="utf-8")
    with pytest.raises(BatchwrightError, match=r"holds no summary\.json: no run has finished"):
        bw.run(run_folder=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "logs" / "slurm" / "job").read_text("utf-8") == "8\n"


@pytest.fixture
def submitted(programs, tmp_path, monkeypatch):
    """The folder of a run whose job, 7, was submitted; another would be 8."""
    monkeypatch.setattr(slurm_engine, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(slurm_engine, "LONGEST_SECONDS", 0.0)
    programs("sbatch", "echo 8")
    folder = tmp_path / "run"
    (folder / "logs" / "slurm").mkdir(parents=True)
    (folder / "logs" / "slurm" / "job").write_text("7\n", encoding="utf-8")
    (folder / "job.yaml").write_text("launch: slurm\n", encoding="utf-8")
    return folder


def answers(*answers: str) -> str:
    """A program that does this in turn, the last for ever."""
    cases = "\n".join(f"{number}) {one};;" for number, one in enumerate(answers[:-1]))
    return f"""at=$0.count; read n <$at 2>/dev/null || n=0; echo $((n + 1)) >$at
case $n in
{cases}
*) {answers[-1]};;
esac"""


SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


def facts(state: str, code: str = "0:0") -> str:
    return f"echo 'JobId=7 JobState={state} Reason=None Restarts=0 ExitCode={code} NodeList=n[1-2]'"


def test_a_controller_that_fails_once_is_asked_again(programs, submitted, capfd):
    programs("scontrol", answers(SILENT, facts("RUNNING"), SILENT, SILENT, facts("CANCELLED")))
    with pytest.raises(BatchwrightError, match="slurm job 7 was cancelled"):
        bw.run(run_folder=submitted, resume=True)
    said = capfd.readouterr().err
    assert "slurm job 7 is still there" in said
    assert said.count("slurm job 7: Slurm does not answer, it is asked again; the job goes on") == 1


def test_a_folder_with_a_name_in_another_encoding_does_not_end_the_wait(programs, submitted):
    ended = facts("CANCELLED").replace(
        "NodeList=n[1-2]'", "NodeList=n[1-2]'; printf 'WorkDir=/\\377'"
    )
    programs("scontrol", answers(facts("RUNNING"), ended))
    with pytest.raises(Interrupted, match="slurm job 7 was cancelled"):
        bw.run(run_folder=submitted, resume=True)


def test_a_silent_controller_has_no_second_job_submitted(programs, submitted, monkeypatch):
    programs("scontrol", SILENT)
    monkeypatch.setattr(slurm_engine, "_SILENT_SECONDS", 0.1)
    line = (
        "slurm does not say whether job 7 is still there, so nothing is submitted: give "
        "`batchwright run --resume --out "
    )
    with pytest.raises(JobError, match=f"^{re.escape(line)}"):
        bw.run(run_folder=submitted, resume=True)
    assert (submitted / "logs" / "slurm" / "job").read_text("utf-8") == "7\n"


def test_a_job_that_is_there_is_said_to_go_on_without_keys_that_come_later(
    programs, submitted, capfd
):
    kept = "srun batchwright run epochs=9 slurm.partition=others\n"
    (submitted / "slurm.sh").write_text(kept, encoding="utf-8")
    programs("scontrol", answers(facts("PENDING"), facts("CANCELLED")))
    with pytest.raises(BatchwrightError, match="slurm job 7 was cancelled"):
        bw.run(run_folder=submitted, resume=True, overrides=["epochs=9", "slurm.partition=other"])
    said = capfd.readouterr().err
    assert "job 7 goes on as it was submitted, without slurm.partition=other: to change" in said


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("", "slurm job 8 was cancelled again"),
        ("exit 1", "job 8 is still there (scancel failed; try `sca"),
    ],
)
def test_a_job_whose_number_the_disk_does_not_take_is_not_left_behind(
    programs, submitted, monkeypatch, then, said
):
    """The next command would submit another job, for the same folder."""
    (submitted / "logs" / "slurm" / "job").unlink()
    programs("scancel", f"echo $1 >{submitted}/cancelled; {then}")
    usual = slurm_engine.write_text

    def write_text(text, path):
        if path.name == "job":
            raise FileError(f"cannot write {path}: No space left on device")
        usual(text, path)

    monkeypatch.setattr(slurm_engine, "write_text", write_text)
    with pytest.raises(FileError, match=f"No space left on device; .*{re.escape(said)}"):
        bw.run(run_folder=submitted, resume=True)
    assert (submitted / "cancelled").read_text("utf-8") == "8\n"


@pytest.mark.parametrize(
    ("scancel", "why"),
    [
        (
            "echo 'scancel: error: Kill job error on job id 8: Access denied' >&2; exit 1",
            "Kill job error on job id 8: Access denied",
        ),
        ("", "scancel cannot be started: Permission denied; look at its permissions"),
    ],
    ids=["refused", "not executable"],
)
def test_a_job_that_scancel_does_not_end_is_told_in_the_line_of_what_went_wrong(
    programs, submitted, monkeypatch, tmp_path, scancel, why
):
    (submitted / "logs" / "slurm" / "job").unlink()
    programs("scancel", scancel)
    if not scancel:
        (tmp_path / "bin" / "scancel").chmod(0o644)
    programs("scontrol", facts("PENDING").replace("Reason=None", "Reason=PartitionTimeLimit"))
    how = "try `scancel 8` again, or ask whoever runs the cluster"
    left = f"is still there ({why}"
    line = f"slurm job 8 would wait for ever (PartitionTimeLimit), and {left}"
    with pytest.raises(JobError, match=f"^{re.escape(line)}.*; {re.escape(how)}"):
        bw.run(run_folder=submitted, resume=True)
    (submitted / "logs" / "slurm" / "job").unlink()
    usual = slurm_engine.write_text

    def write_text(text, path):
        if path.name == "job":
            raise FileError(f"cannot write {path}: No space left on device")
        usual(text, path)

    monkeypatch.setattr(slurm_engine, "write_text", write_text)
    with pytest.raises(FileError, match=re.escape(f"on device; slurm job 8 {left}")) as told:
        bw.run(run_folder=submitted, resume=True)
    assert told.value.exit_code == 2


@pytest.mark.parametrize("program", ["sbatch", "scontrol"])
def test_a_program_of_slurms_that_cannot_be_started_ends_the_command_in_a_line(
    programs, submitted, tmp_path, monkeypatch, program
):
    monkeypatch.setattr(slurm_engine, "check", lambda job: None)
    if program == "sbatch":
        (submitted / "logs" / "slurm" / "job").unlink()
    programs(program, "")
    (tmp_path / "bin" / program).chmod(0o644)
    line = f"{program} cannot be started: Permission denied; look at its permissions, {tmp_path}"
    with pytest.raises(FileError, match=f"^{re.escape(line)}"):
        bw.run(run_folder=submitted, resume=True)


def test_a_machine_that_is_short_of_processes_for_a_moment_ends_no_wait(
    programs, submitted, monkeypatch, capfd
):
    programs("scontrol", answers(facts("RUNNING"), facts("CANCELLED")))
    asked, usual = [], subprocess.run

    def run(words, **how):
        asked.append(words)
        if len(asked) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return usual(words, **how)

    monkeypatch.setattr(slurm_engine.subprocess, "run", run)
    with pytest.raises(Interrupted, match="slurm job 7 was cancelled"):
        bw.run(run_folder=submitted, resume=True)
    assert "slurm job 7: Slurm does not answer, it is asked again" in capfd.readouterr().err


def test_a_job_that_is_just_being_submitted_as_ctrl_c_comes_is_not_lost(
    programs, submitted, monkeypatch
):
    """Its number would be known to nobody, and the next command would submit another job."""
    (submitted / "logs" / "slurm" / "job").unlink()
    monkeypatch.setenv("US", str(os.getpid()))
    programs("sbatch", "kill -INT $US; /bin/sleep 0.2; echo 8")
    with pytest.raises((Interrupted, KeyboardInterrupt)) as stopped:
        bw.run(run_folder=submitted, resume=True)
    assert str(stopped.value).startswith("slurm job 8 goes on by itself; come back to it with `")
    assert (submitted / "logs" / "slurm" / "job").read_text("utf-8") == "8\n"


def test_a_summary_that_a_network_disk_shows_late_is_found(
    programs, submitted, monkeypatch, undrawn
):
    """Such a disk says for up to a minute that a file is missing, unless the folder is listed."""
    programs("scontrol", answers(facts("RUNNING"), facts("COMPLETED")))
    summary, late, listing = make_summary(), submitted / "late", os.scandir
    plan = summary.plan.model_copy(update={"job": make_job(launch="slurm")})
    write_inputs(submitted, plan, None)
    write_record(summary, late)

    def list_anew(folder="."):
        if Path(folder) == submitted and late.exists():
            late.rename(submitted / "summary.json")
        return listing(folder)

    monkeypatch.setattr(os, "scandir", list_anew)
    assert bw.run(run_folder=submitted, resume=True).epochs == summary.epochs


@pytest.mark.parametrize("state", ["RESV_DEL_HOLD", "REQUEUE_HOLD", "UNHEARD_OF"])
def test_a_job_that_may_run_yet_is_followed(programs, submitted, capfd, state):
    programs("scontrol", answers(facts(state), facts(state), facts("CANCELLED")))
    with pytest.raises(BatchwrightError, match="slurm job 7 was cancelled"):
        bw.run(run_folder=submitted, resume=True)
    assert f"slurm job 7: {state.lower()}\n" in capfd.readouterr().err


@pytest.mark.parametrize("held", [b"\xff\xfe7\n", b"seven\n", b""])
def test_a_jobs_number_that_is_none_is_refused_in_a_line(submitted, held):
    (submitted / "logs" / "slurm" / "job").write_bytes(held)
    with pytest.raises(FileError, match="logs/slurm/job holds no number of a Slurm job: if `squeu"):
        bw.run(run_folder=submitted, resume=True)


def test_the_end_at_the_goals_deadline_is_no_failure(programs, submitted):
    programs("scontrol", answers(facts("RUNNING"), facts("FAILED", "124:0")))
    line = (
        "slurm job 7 has ended at goal.deadline, with a checkpoint; continue with `batchwright run "
        f"--resume --out {submitted}` and a later one"
    )
    with pytest.raises(DeadlineReached, match=f"^{re.escape(line)}$"):
        bw.run(run_folder=submitted, resume=True)


def test_a_log_that_no_node_could_open_names_nodes_and_disk(programs, submitted):
    programs("scontrol", answers(facts("RUNNING"), facts("FAILED", "0:53")))
    line = (
        f"slurm job 7 ended as FAILED, exit code 0:53, it has left no log {submitted}/logs/slurm/"
        "7.log: give --out a folder on a disk that all nodes (n[1-2]) share with this one; continue"
    )
    with pytest.raises(WorkerError, match=f"^{re.escape(line)}") as ended:
        bw.run(run_folder=submitted, resume=True)
    assert ended.value.exit_code == 1


# ------------------------------------------------------------------------------------- real Slurm


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A cluster on which each task is a Python of its own."""
    with cluster(tmp_path_factory.mktemp("slurm")) as running, forking():
        yield running


@pytest.fixture(scope="module")
def slurm(whole: Slurm, tmp_path_factory):
    """The same cluster with tasks that are forked."""
    with forking_tasks(tmp_path_factory.mktemp("tasks") / "log") as more:
        paths = os.pathsep.join([more["PYTHONPATH"], whole.environment["PYTHONPATH"]])
        yield whole.with_variables({**more, "PYTHONPATH": paths})


KEYS = ("data=digits", "launch=slurm", "device=cpu", "workers=2", "nodes=2", "epochs=2")
PROBE = ("precision=float32", "probe.budget=0.3", "probe.learning=0")


NETWORK = "network=held_network:network"  # on each command line, as it is code


def number_in(folder: Path) -> str:
    path = folder / "logs" / "slurm" / "job"
    until(path.exists, "a job")
    return path.read_text("utf-8").strip()


@pytest.mark.slow
def test_a_run_is_submitted_and_followed_to_its_end(whole: Slurm, tmp_path):
    words = ("run", *KEYS, *PROBE, NETWORK, "slurm.time=10", "--out", "a run", "--json")
    out, err = (command := whole.batchwright(*words, folder=tmp_path)).communicate()
    assert command.returncode == 0, err
    assert re.search(r"slurm job \d+: running on n\[1-2\]\n", err)
    assert err.count("epoch 2/2: ") == err.count("\nper worker") == 1
    summary = read_record(tmp_path / "a run" / "summary.json", RunSummary)
    assert f'"test_accuracy": {summary.accuracy}' in out


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_run(slurm: Slurm, tmp_path):
    words = ("run", *with_keys(KEYS, "data=imagefolder:nowhere"), "--out", "run")
    _, err = (command := slurm.batchwright(*words, folder=tmp_path)).communicate()
    assert command.returncode == 2, err
    assert re.search(r"^error: .*nowhere", err, re.MULTILINE)
    assert re.search(r"error: slurm job \d+ ended as FAILED, exit code 2, its log is /", err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("slurm.partition=q", "Invalid partition name specified; `sinfo` lists the partitions"),
        ("nodes=5", r"would wait for ever \(Partition\w+\), so it was cancelled: look at nodes"),
        # Slurm gives one of two reasons, PartitionTimeLimit or PartitionConfig, by whether its
        # scheduler has looked at the job yet.
        ("slurm.time=100", r"so it was cancelled: look at (nodes, )?slurm\.time"),
        ("slurm.lines=--gpus=9", r"Invalid generic resource \(gres\) specification; `sinfo -o %G`"),
    ],
)
def test_what_slurm_cannot_give_is_refused_in_a_line(slurm: Slurm, tmp_path, asked, said):
    keys = with_keys(with_keys(KEYS, "nodes=1", "workers=auto"), asked)
    words = ("run", *keys, "--out", "run")
    _, err = (command := slurm.batchwright(*words, folder=tmp_path)).communicate()
    assert command.returncode == 2, err
    assert re.search(said, err.splitlines()[-1])
    assert not slurm.ask("squeue", "-h", "--states=pending,running")


@pytest.mark.slow
def test_sbatch_takes_the_scripts_that_are_exported(slurm: Slurm, tmp_path):
    """`--test-only` reads the options of a script and looks for nodes that have what they ask."""
    for hosts in (1, 2):
        path = tmp_path / f"{hosts}.sbatch"
        path.write_text(export(make_plan(), "sbatch", Target(hosts)), encoding="utf-8")
        done = slurm.call("sbatch", "--test-only", str(path))
        assert done.returncode == 0, done.stderr
        assert re.search(r"to start at .* on nodes n", done.stderr)
    impossible = path.read_text("utf-8").replace("--cpus-per-task=1", "--cpus-per-task=9")
    path.write_text(impossible, encoding="utf-8")
    assert slurm.call("sbatch", "--test-only", str(path)).returncode != 0


@pytest.mark.slow
def test_tasks_know_their_engine_where_a_site_exports_nothing(slurm: Slurm, tmp_path):
    """Else each would take itself for the command that submits, and wait for its own job."""
    (tmp_path / "logs" / "slurm").mkdir(parents=True)
    job = Job(launch="slurm", slurm={"lines": ["--export=NONE"]})
    shown = ["/bin/sh", "-c", f'echo "by $BATCHWRIGHT_ENGINE" >{tmp_path}/said']
    (tmp_path / "slurm.sh").write_text(script(tmp_path, job, shown), encoding="utf-8")
    slurm.ask("sbatch", "--wait", str(tmp_path / "slurm.sh"))
    assert (tmp_path / "said").read_text("utf-8") == "by slurm\n"


@pytest.mark.slow
def test_a_task_that_stands_still_is_killed_and_all_are_started_again(
    slurm: Slurm, tmp_path, monkeypatch
):
    """The other one has missed it, and has ended as after a loss; the job's limit is a minute."""
    monkeypatch.setattr(slurm_script, "STILL_SECONDS", 2)
    (tmp_path / "logs" / "slurm").mkdir(parents=True)
    job = Job(launch="slurm", workers=2, nodes=2, restarts=1, slurm={"time": "1"})
    said = f"{tmp_path}/said-$SLURM_PROCID"
    once = f"[ -e {said} ] && exit 0; touch {said}; [ $SLURM_PROCID = 0 ] && exit 1; kill -STOP $$"
    (tmp_path / "slurm.sh").write_text(script(tmp_path, job, ["/bin/sh", "-c", once]), "utf-8")
    done = slurm.call("sbatch", "--wait", str(tmp_path / "slurm.sh"))
    log = "".join(one.read_text("utf-8") for one in (tmp_path / "logs" / "slurm").glob("*.log"))
    assert done.returncode == 0, log
    assert KILLED in log


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_which_is_found_again_and_cancelled(slurm: Slurm, tmp_path):
    """A job of one node, whose only task is a run by itself."""
    alone = with_keys(KEYS, "nodes=1", "workers=1", "epochs=3000")
    words = ("run", *alone, *PROBE, NETWORK, "--out", "run")
    hold(tmp_path, "run/metrics.jsonl", 3)
    command = slurm.batchwright(*words, folder=tmp_path)
    number = number_in(tmp_path / "run")
    until((tmp_path / "run" / "metrics.jsonl").exists, "an epoch")
    command.send_signal(signal.SIGINT)
    _, err = command.communicate()
    assert command.returncode == 130, err
    assert err.splitlines()[-1] == (
        f"error: slurm job {number} goes on by itself; come back to it with `batchwright run "
        f"--resume --out run {NETWORK}`, end it with `scancel {number}`"
    )
    assert "stopped by" not in err
    command = slurm.batchwright("run", "--resume", "--out", "run", NETWORK, folder=tmp_path)
    until(lambda: f"slurm job {number} is still there, log in " in command.said()[1], "a line")
    slurm.ask("scancel", number)
    _, err = command.communicate()
    assert command.returncode == 143, err
    assert f"slurm job {number} was cancelled; continue with `batchwright run --resume" in err
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
    assert not slurm.ask("squeue", "-h", "--states=pending,running")


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, tmp_path_factory):
    """The folder of a run on two nodes, and of its plan."""
    folder = tmp_path_factory.mktemp("undisturbed")
    asked = {"nodes": 2, "workers": 2, "epochs": 6, "checkpoint_steps": 2}
    job = Job(launch="slurm", device="cpu", network=NETWORK.partition("=")[2], **asked)
    plan = plan_without_profile(job, data_facts(job), make_network(name=job.network))
    write_record(plan, folder / "plan.json")
    command = slurm.batchwright("train", "plan.json", NETWORK, "--out", "run", folder=folder)
    _, err = command.communicate()
    assert command.returncode == 0, err
    return folder


KILLED = "a task was killed (exit code 137): all are started again\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["USR2", "requeue", "killed"])
def test_a_preempted_run_ends_with_the_same_weights(slurm: Slurm, undisturbed, tmp_path, how):
    """A worker takes each signal by itself, and both come together again; USR1: the next test."""
    words = ("train", str(undisturbed / "plan.json"), NETWORK, "--out", "run")
    hold(tmp_path, "run/metrics.jsonl", 3)
    command = slurm.batchwright(*words, folder=tmp_path)
    number = number_in(tmp_path / "run")
    until((tmp_path / "run" / "metrics.jsonl").exists, "an epoch")
    if how == "killed":
        until((tmp_path / "run" / "checkpoints" / "last.pt").exists, "a checkpoint")
        slurm.ask("scancel", "--signal=KILL", f"{number}.0")
        until(lambda: KILLED in command.said()[1], "a line")
    elif how == "requeue":  # as Slurm does for a job of higher priority: TERM to all
        slurm.ask("scontrol", "requeue", number)
        slurm.start_again_at_once(number)
    else:
        slurm.ask("scancel", f"--signal={how}", number)
        slurm.start_again_at_once(number)
    release(tmp_path)
    _, err = command.communicate()
    assert command.returncode == 0, err
    assert (KILLED if how == "killed" else "started again 1 x\n") in err
    assert read_record(tmp_path / "run" / "summary.json", RunSummary).resumed == 1
    for name, value in weights(undisturbed / "run").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name


@pytest.mark.slow
def test_a_job_that_somebody_submits_by_hand_is_queued_again_and_goes_on(
    slurm: Slurm, undisturbed, tmp_path
):
    """The script that is exported, told to stop as its own time limit would."""
    plan = undisturbed / "plan.json"
    text = export(read_record(plan, Plan), "sbatch", Target(2, str(plan), str(tmp_path / "run")))
    shown, program = f"batchwright train {plan}", f"{sys.executable} -m batchwright train {plan}"
    assert shown in text
    (tmp_path / "train.sbatch").write_text(text.replace(shown, f"{program} {NETWORK}"), "utf-8")
    hold(tmp_path, "run/metrics.jsonl", 3)
    here = (f"--output={tmp_path}/log", f"--chdir={tmp_path}")
    number = slurm.ask("sbatch", "--parsable", *here, str(tmp_path / "train.sbatch")).strip()
    until((tmp_path / "run" / "metrics.jsonl").exists, "an epoch")
    slurm.ask("scancel", "--signal=USR1", number)
    slurm.start_again_at_once(number)
    release(tmp_path)
    until(lambda: not slurm.ask("squeue", "-h", "--states=pending,running,completing"), "its end")
    said = (tmp_path / "log").read_text("utf-8")
    assert "stopped by SIGUSR1: the job is queued again, to go on from there\n" in said
    assert read_record(tmp_path / "run" / "summary.json", RunSummary).resumed == 1, said
    for name, value in weights(undisturbed / "run").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name


SWEPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output=log
trap : TERM
srun --kill-on-bad-exit=0 --wait=0 {} -m batchwright sweep {} --out s
"""


@pytest.mark.slow
def test_a_sweep_whose_job_is_queued_again_goes_on(slurm: Slurm, tmp_path):
    """As Slurm does for a job of higher priority: TERM to all, and KILL soon."""
    hold(tmp_path, "s", 1)  # all steps: a run lasts until the other has begun, too
    words = (
        f"data=digits {NETWORK} global_batch=128 precision=float32 epochs=15 "
        "checkpoint_seconds=1000 probe.budget=0.3 probe.learning=0 "
        "--grid learning_rate=0.05,0.1 --seeds 1"
    )
    (tmp_path / "sweep.sbatch").write_text(SWEPT.format(sys.executable, words), "utf-8")
    at = f"--chdir={tmp_path}"
    number = slurm.ask("sbatch", "--parsable", at, str(tmp_path / "sweep.sbatch")).strip()
    cells = tmp_path / "s" / "cells"
    until(lambda: len([*cells.glob("*/metrics.jsonl")]) == 2, "two runs")
    slurm.ask("scontrol", "requeue", number)
    slurm.start_again_at_once(number)
    release(tmp_path)
    until(lambda: not slurm.ask("squeue", "-h", "--states=pending,running,completing"), "its end")
    said = (tmp_path / "log").read_text("utf-8")
    assert "stopped by SIGTERM with 2 runs to go; continue with `batchwright sweep" in said
    swept = read_record(tmp_path / "s" / "sweep.json", Sweep)
    assert [one.state for one in swept.cells] == ["done", "done"], said
    for cell in cells.iterdir():
        assert read_record(cell / "summary.json", RunSummary).resumed == 1


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["model"]
