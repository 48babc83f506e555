"""Sweeps: cells planned once, run side by side, stopped, gone on with, gathered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import batchwright as bw
from batchwright.distributed.exit_reports import error_of
from batchwright.distributed.joining.gathering import Gathering
from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import (
    DeadlineReached,
    FileError,
    Interrupted,
    JobError,
    LostWorkerError,
    PlanError,
)
from batchwright.probing.commands import Compared
from batchwright.records import Job, Plan, Profile, Ray, RunSummary, Slurm, Sweep
from batchwright.records.documents import change_job, read_record, write_record
from batchwright.records.lines.line_files import line_text
from batchwright.records.lines.run_lines import note
from batchwright.records.run_folder import (
    CHECKPOINTED,
    has_checkpoint,
    read_summaries,
    resuming_command,
    telling_how_to_resume,
)
from batchwright.storage import locks
from batchwright.workflows.sweep import plans, runner, sharing, verb
from batchwright.workflows.sweep.grid import cells_of, read_grid
from batchwright.workflows.sweep.plans import Planner, needs_probe
from batchwright.workflows.sweep.runner import Runner, Watcher, run_folder_of, words_of
from batchwright.workflows.sweep.slots import Machine, Slots, width_of
from held_network import hold, release
from samples import make_epoch, make_job, make_plan, make_profile, make_summary

SHORT = {
    "epochs": 2,
    "global_batch": 512,
    "launch": "in-process",
    "device": "cpu",
    "precision": "float32",  # or each sweep would compare the formats
}


@pytest.fixture
def place(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells(job, **grid):
    keys = read_grid(job, grid)
    return keys, cells_of(job, keys, (0, 1))


# ------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, True),
        ({"global_batch": 64}, False),
        ({"method": "cyclic", "cycle": {"batches": (64, 64)}}, False),
        ({"global_batch": 64, "method": "dual-batch", "workers": 2}, True),
        ({"global_batch": 64, "launch": "virtual", "workers": 2}, True),
        (
            {
                "global_batch": 64,
                "launch": "virtual",
                "workers": 2,
                "method": "dual-batch",
                "virtual": {"sample_seconds": 1e-3, "step_seconds": 1e-2},
            },
            False,
        ),
    ],
)
def test_only_what_nobody_stated_is_measured(keys, wanted):
    assert needs_probe(Job(**keys)) is wanted


def test_a_setting_is_planned_once_and_each_seed_has_its_own_job(place, monkeypatch):
    made = []
    whole = plans.plan_without_profile
    monkeypatch.setattr(
        plans, "plan_without_profile", lambda *words: made.append(words) or whole(*words)
    )
    job = Job(global_batch=64, device="cpu", precision="float32")
    keys, found = cells(job, scaling="sqrt,linear")
    planner = Planner(keys)
    planner.prepare(found)
    assert len(made) == 2
    assert set(planner.plans) == {cell.name for cell in found}
    for cell in found:
        plan = planner.plans[cell.name]
        assert (plan.job.seed, plan.job.scaling) == (cell.seed, cell.values[0])
        assert (plan.workers, plan.job.launch, plan.precision) == (1, "in-process", "float32")
        assert width_of(plan) == 1


def test_large_batches_go_in_micro_batches(place):
    job = Job(global_batch=1024, micro_batch=100, device="cpu", precision="float32")
    keys, found = cells(job, epochs="2")
    planner = Planner(keys)
    planner.prepare(found)
    stage = planner.plans[found[0].name].stages[0]
    assert (stage.global_batch_size, stage.accumulation_steps) == (1024, 11)
    assert stage.micro_batch_size <= 100


def test_an_impossible_cell_is_named_before_anything_starts(place):
    for grid, said in (
        ({"global_batch": "64,99999"}, "setting global_batch=99999: .* is larger than the 1437"),
        ({"warmup_epochs": "0,9"}, "setting warmup_epochs=9: warmup_epochs=9 is longer than"),
        ({"network": "resnet8,resnet9"}, "setting network=resnet9: "),
    ):
        with pytest.raises((JobError, PlanError), match=said):
            bw.sweep(Job(global_batch=64, epochs=4), grid, out="a")
    with pytest.raises(FileError, match=r"there is no file none\.csv"):
        bw.sweep(Job(goal={"kinds": "none.csv"}), {"base_batch": "64,128"}, out="a")
    assert not Path("a").exists()


def test_cells_that_differ_in_planning_keys_share_a_probe(place, monkeypatch):
    probed = []

    def probe(job, folder, kept, progress):
        assert folder.is_dir()
        probed.append(job)
        profile = make_profile(job=job.model_copy(update={"precision": "float32"}))
        write_record(profile, kept)
        return profile

    monkeypatch.setattr("batchwright.probing.probe.probe", probe)
    job = Job(device="cpu", workers=2)
    keys, found = cells(job, scaling="sqrt,linear", momentum="0.5,0.9")
    made = []

    def make_one(profile, wanted):
        made.append(wanted)
        if wanted.scaling == "linear" and wanted.momentum == 0.5:
            raise PlanError("nothing fits")
        return make_plan(job=wanted)

    monkeypatch.setattr(plans, "make_plan", make_one)
    planner = Planner(keys)
    planner.prepare(found)
    assert not planner.plans
    planner.measure(found, place)
    assert [one.momentum for one in probed] == [0.5, 0.9]  # momentum is measured, scaling is not
    assert len(made) == 4
    assert len(planner.plans) == 6
    assert set(planner.errors.values()) == {"nothing fits"}
    Planner.prepare(again := Planner(keys), found)
    again.measure(found, place)
    assert len(probed) == 2, "profiles are kept"
    kept = sorted((place / "profiles").glob("*.json"))[0]
    write_record(read_record(kept, Profile).model_copy(update={"trials_open": True}), kept)
    Planner.prepare(again := Planner(keys), found)
    again.measure(found, place)
    assert len(probed) == 3, "one that was stopped in its trials is gone on with"


@pytest.mark.slow
def test_the_number_format_is_compared_once_at_the_largest_of_the_given_batches(place, monkeypatch):
    asked = []

    def compared(job, folder):
        assert folder.is_dir()
        asked.append((job.global_batch, job.workers))
        return Compared(precision="bfloat16", times=(), ratio=None)

    monkeypatch.setattr("batchwright.workload.host.computes_in_bfloat16", lambda device: True)
    monkeypatch.setattr("batchwright.probing.probe.compare_formats", compared)
    grid = {"global_batch": "32,128", "scaling": "sqrt,linear", "momentum": "0.5,0.9"}
    keys, found = cells(Job(device="cpu"), **grid)
    planner = Planner(keys)
    planner.prepare(found)
    assert not planner.plans
    planner.measure(found, place)
    assert asked == [(128, 1)]
    assert {plan.precision for plan in planner.plans.values()} == {"bfloat16"}
    assert set(planner.plans) == {cell.name for cell in found}
    keys, found = cells(Job(device="cpu"), **grid | {"global_batch": "32,128,512"})
    again = Planner(keys)
    again.prepare(found)
    again.measure(found, place)
    assert len(asked) == 1, "what was found is kept"
    next((place / "profiles").glob("format-*")).unlink()  # it had another name in earlier versions
    resumed = Planner(keys)
    resumed.plans |= {
        name: plan.model_copy(update={"precision": "float32"})
        for name, plan in planner.plans.items()
    }
    added = [cell for cell in found if cell.name not in resumed.plans]
    resumed.prepare(added)
    resumed.measure(added, place)
    assert len(asked) == 1, "added values get the format of the plans"
    assert {resumed.plans[cell.name].precision for cell in added} == {"float32"}
    asked.clear()
    monkeypatch.setattr("batchwright.workload.host.computes_in_bfloat16", lambda device: False)
    plain = Planner(keys)
    plain.prepare(found)
    assert not asked
    assert {plan.precision for plan in plain.plans.values()} == {"float32"}


# ----------------------------------------------------------------------------------------- running


class Seen:
    """A watcher that takes notes."""

    def __init__(self):
        self.began, self.states, self.errors, self.lines = [], {}, {}, []
        self.running = self.most = 0

    @property
    def watcher(self):
        return Watcher(self._began, lambda name, line: self.lines.append(line), self._ended)

    def _began(self, name, epochs):
        self.began.append(name)
        self.running += 1
        self.most = max(self.most, self.running)

    def _ended(self, name, state, error):
        self.states[name], self.errors[name] = state, error
        self.running -= 1


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Runs cells that are shell scripts, by name; returns what was seen and the stop signal."""

    def run(scripts, *, cores=2, while_running=None):
        job = make_job(workers=1, launch="in-process")
        keys = read_grid(job, {"epochs": list(range(1, len(scripts) + 1))})
        found = cells_of(job, keys, (0,))
        by_name = {cell.name: text for cell, text in zip(found, scripts, strict=True)}

        def command(folder, cell, plan, *, resumes):
            run_folder = run_folder_of(folder, cell)
            run_folder.mkdir(parents=True, exist_ok=True)
            script = f"cd {run_folder}; {by_name[cell.name]}"
            return ["-c", script, "sh", "--resume" if resumes else "new"]

        def start(module, words, *, environment, log):
            assert module == "batchwright.cli.verb_child"
            options = {"env": environment, "stdout": log, "stderr": log, "start_new_session": True}
            return subprocess.Popen(["/bin/sh", *words], stdin=subprocess.DEVNULL, **options)

        monkeypatch.setattr(runner, "words_of", command)
        monkeypatch.setattr(runner.fork_server, "start", start)
        seen = Seen()
        slots = Slots(Machine(cores), [1] * len(found), "auto")
        if while_running:
            threading.Thread(target=while_running, args=(seen,), daemon=True).start()
        plan = make_plan(job=job)
        with noting_signals() as noted:
            Runner(tmp_path, slots, seen.watcher).run(
                [(cell, plan) for cell in found], lambda: noted
            )
        return list(by_name), seen, next(iter(noted), 0)

    return run


GOOD = "echo done > summary.json"


def test_cells_run_in_order_and_never_more_than_there_are_cores(scripted):
    names, seen, stopped = scripted([f"sleep 0.1; {GOOD}"] * 5)
    assert (seen.began, stopped) == (names, 0)
    assert (seen.most, set(seen.states.values())) == (2, {"done"})


def test_a_cell_that_fails_is_told_by_its_line_and_ends_alone(scripted):
    names, seen, _ = scripted(
        ["echo started; echo 'error: no room' >&2; exit 2", GOOD, "kill -9 $$", "exit 0"]
    )
    assert [seen.states[name] for name in names] == ["failed", "done", "failed", "failed"]
    assert seen.errors[names[0]] == "no room"
    assert "it was killed by SIGKILL (out of memory?); its log is " in seen.errors[names[2]]
    assert seen.errors[names[3]] == "it ended without a word"


def test_cells_are_told_their_threads_and_who_started_them(scripted):
    names, seen, _ = scripted(
        [
            f"test $BATCHWRIGHT_THREADS = 3 "
            f"&& test $BATCHWRIGHT_VERB_PARENT = {os.getpid()} && {GOOD}"
        ],
        cores=3,
    )
    assert seen.states == {names[0]: "done"}


def test_what_a_cell_writes_is_handed_on_once(scripted):
    line = note("begun")
    _, seen, _ = scripted([f"echo '{line_text(line)}' > metrics.jsonl; sleep 0.3; {GOOD}"])
    assert seen.lines == [line]


def signal_when(number, *moments):
    """Sends this process a signal at each of the moments: once ``moment(seen)``."""

    def act(seen):
        for moment in moments:
            while not moment(seen):  # the test's own limit ends a wait for nothing
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    return act


def test_a_stop_signal_lets_cells_write_and_starts_no_more(scripted, tmp_path):
    trap = (
        "trap 'echo saved > checkpoint; exit 130' TERM; touch ready; while :; do sleep 0.05; done"
    )
    ready = signal_when(signal.SIGINT, lambda _: len(list(tmp_path.glob("cells/*/ready"))) == 2)
    names, seen, stopped = scripted([trap, trap, GOOD], while_running=ready)
    assert stopped == signal.SIGINT
    assert seen.began == names[:2]
    assert set(seen.states.values()) == {"stopped"}
    assert len(list(tmp_path.glob("cells/*/checkpoint"))) == 2


def test_a_second_signal_ends_cells_that_do_not_listen(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LAST_SECONDS", 1000.0)  # else it would be ended in any case
    deaf = "trap 'touch heard' TERM; touch ready; while :; do sleep 0.05; done"
    moments = (lambda _, n=n: any(tmp_path.glob(f"cells/*/{n}")) for n in ("ready", "heard"))
    ready = signal_when(signal.SIGTERM, *moments)
    _, seen, stopped = scripted([deaf], while_running=ready)
    assert (stopped, list(seen.states.values())) == (signal.SIGTERM, ["stopped"])


def test_a_removal_that_is_killed_leaves_no_checkpoint_to_go_on_from(
    scripted, tmp_path, monkeypatch
):
    """The run has lost its last.pt, which `checkpointed` tells, and has an older best.pt."""
    run = tmp_path / "cells" / "epochs=1,seed=0"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "best.pt").touch()
    (run / CHECKPOINTED).touch()
    remove = shutil.rmtree

    def killed(folder, **options):
        if folder == run:
            (run / CHECKPOINTED).unlink()
            raise KeyboardInterrupt
        remove(folder, **options)

    monkeypatch.setattr(runner.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        scripted([GOOD])
    monkeypatch.undo()
    assert not has_checkpoint(run)


def test_a_cell_goes_on_only_from_a_checkpoint(scripted, tmp_path):
    for name, kept in (("1", "epoch-1.pt"), ("2", "last.pt"), ("3", "best.pt")):
        folder = tmp_path / "cells" / f"epochs={name},seed=0"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / kept).touch()
        (folder / "old").touch()
    script = f'test "$1" = {{}} && test {{}} -e old && {GOOD}'
    goes_on = script.format("--resume", "")
    _, seen, _ = scripted([script.format("new", "!"), goes_on, goes_on])
    assert set(seen.states.values()) == {"done"}


def test_the_command_names_code_and_what_changed_since_the_plan(tmp_path):
    job = make_job(workers=1, network="mine:net", timeout=99.0)
    (cell, _) = cells(job, epochs="3")[1]
    plan = make_plan(job=cell.job.model_copy(update={"timeout": 20.0, "launch": "in-process"}))
    words = words_of(tmp_path, cell, plan, resumes=True)
    assert words[:2] == ["train", "--resume"]
    assert words[-2:] == ["timeout=99", "network=mine:net"]
    slurm, ray = Slurm(partition="a", lines=("--nodelist=n1,n2", "--exclusive")), Ray(min_workers=1)
    later = {"slurm": slurm, "ray": ray, "checkpoint_steps": None, "data_args": {"a": 1e-05}}
    later = replace(cell, job=cell.job.model_copy(update=later))
    early = plan.job.model_copy(update={"checkpoint_steps": 5, "checkpoint_seconds": 300.0})
    words = words_of(tmp_path, later, plan.model_copy(update={"job": early}), resumes=True)
    assert not [word for word in words if word.startswith("checkpoint_seconds")]  # as planned
    assert change_job(early, overrides=words[4:]) == later.job.model_copy(
        update={"checkpoint_seconds": 300.0, "launch": "in-process"}
    )
    fresh = words_of(tmp_path, cell, plan, resumes=False)
    assert fresh[1] == str(tmp_path / "plans" / f"{cell.name}.json")
    for deadline, word in ((90.0, "goal.deadline=90"), (None, "goal.deadline=null")):
        changed = {"goal": plan.job.goal.model_copy(update={"deadline": deadline})}
        later = replace(cell, job=plan.job.model_copy(update=changed))
        before = {"goal": plan.job.goal.model_copy(update={"deadline": 60.0})}
        timed = plan.model_copy(update={"job": plan.job.model_copy(update=before)})
        assert word in words_of(tmp_path, later, timed, resumes=True)


def test_the_last_error_is_the_one_that_counts(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("epoch 1\nerror: first\nerror: second\nTraceback\n")
    assert error_of(log, 1, "it") == "second"


# ------------------------------------------------------------------------------------- the verb


@pytest.fixture
def instantly(monkeypatch, undrawn):
    """Cells that are done at once, with an accuracy by their rate; the names of those that ran."""
    ran = []

    def run(self, todo, stops):
        for cell, plan in todo:
            ran.append(cell.name)
            self._watcher.began(cell.name, plan.epochs)
            if plan.learning_rate.base > 1:
                self._watcher.ended(cell.name, "failed", "every gradient is infinite")
                continue
            right = round(100 + 1000 * plan.learning_rate.base) + cell.seed
            epochs = tuple(make_epoch(at, val_correct=right) for at in range(plan.epochs))
            folder = run_folder_of(self._folder, cell)
            folder.mkdir(parents=True)
            summary = make_summary(plan=plan, epochs=epochs, profile=None)
            write_record(summary, folder / "summary.json")
            self._watcher.ended(cell.name, "done", "")

    monkeypatch.setattr(Runner, "run", run)
    return ran


def test_a_sweep_leaves_record_table_figures_and_page(place, instantly):
    found = bw.sweep(Job(**SHORT), {"learning_rate": [0.05, 0.1]}, seeds=2, out="a")
    assert [one.accuracy.value for one in found.settings] == pytest.approx(
        [150.5 / 360, 200.5 / 360]
    )
    assert read_record("a/sweep.json", Sweep) == found
    assert found.data.name == "digits"
    assert {path.name for path in Path("a").iterdir()} >= {
        *("sweep.csv", "sweep.html", "figures", "plans", "cells"),
    }
    assert sorted(path.name for path in Path("a/figures").iterdir()) == [
        *("accuracy_learning_rate.png", "curves_learning_rate.png"),
    ]
    plan = read_record("a/plans/learning_rate=0.05,seed=1.json", Plan)
    assert (plan.job.seed, plan.learning_rate.base) == (1, 0.05)


def test_what_may_not_be_meant_is_said_once_whatever_the_numbers(place, instantly, capsys):
    job = Job(**SHORT, optimizer="sgd", learning_rate=0.1)
    bw.sweep(job, {"base_batch": [128, 1024]}, seeds=2, out="a")
    doubts = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(doubts) == 1
    assert doubts[0].startswith("warning: base_batch=1024: global_batch=512 is below base_batch")
    assert "the same in" not in doubts[0]
    bw.sweep(job, {"global_batch": [64, 512]}, seeds=1, out="b")
    doubts = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(doubts) == 1
    assert doubts[0].startswith("warning: global_batch=64 is below base_batch=128")  # once
    bw.sweep(job, {"learning_rate": [0.1, 1e-3], "global_batch": [32, 64]}, seeds=2, out="c")
    (doubt,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert doubt.endswith("was found with; the same in 3 other settings")


def test_settings_that_take_different_optimizers_are_said_not_to_compare(place, instantly, capsys):
    job = Job(**SHORT | {"global_batch": 64, "epochs": 4})
    bw.sweep(job, {"scaling": ["sqrt", "linear"]}, seeds=1, out="a")
    said = capsys.readouterr().err
    assert "warning: optimizer=auto takes muon and sgd" in said
    assert "give optimizer=sgd to compare the rest alone" in said
    bw.sweep(job, {"scaling": ["sqrt", "linear"], "optimizer": ["sgd"]}, seeds=1, out="b")
    assert "optimizer=auto" not in capsys.readouterr().err


def test_settings_in_different_number_formats_are_said_not_to_compare(capsys):
    keys, found = cells(make_job(workers=1), momentum="0.5,0.9")
    formats = ("float32", "bfloat16", "float32", "bfloat16")
    made = {one.name: make_plan(precision=p) for one, p in zip(found, formats, strict=True)}
    verb._warn_of_settings([one.key for one in keys], found, made)
    said = capsys.readouterr().err
    assert said.startswith("warning: precision=auto takes bfloat16 and float32, by setting")
    verb._warn_of_settings(["precision"], found, made)
    assert not capsys.readouterr().err


def test_plans_learn_from_the_finished_runs_of_a_sweep(place, instantly):
    bw.sweep(Job(**SHORT), {"learning_rate": [0.05, 5.0]}, seeds=2, out="a")
    found = read_summaries("a")
    assert [one.plan.job.seed for one in found] == [0, 1]
    assert found[0].run_folder == "a/cells/learning_rate=0.05,seed=0"
    assert read_summaries(found[0].run_folder) == found[:1]
    bw.sweep(Job(**SHORT), {"learning_rate": [5.0]}, seeds=1, out="b b")
    with pytest.raises(FileError, match=r"in b b has finished yet.*sweep --resume --out 'b b'`"):
        read_summaries("b b")


def test_a_setting_that_diverged_with_other_seeds_is_said_to_be_judged_by_the_rest(
    place, instantly, capsys
):
    found = bw.sweep(Job(**SHORT), {"learning_rate": [0.05, 0.1, 5.0]}, seeds=2, out="a")
    capsys.readouterr()
    assert len(read_summaries("a")) == 4
    assert not capsys.readouterr().err  # of a setting all of whose runs failed no plan learns
    lost = found.cells[0].name
    cells = [
        cell.model_copy(update={"state": "failed"}) if cell.name == lost else cell
        for cell in found.cells
    ]
    write_record(found.model_copy(update={"cells": tuple(cells)}), "a/sweep.json")
    assert len(read_summaries("a")) == 3
    assert "warning: 1 run of the sweep in a failed where other seeds" in capsys.readouterr().err


def test_a_resumed_sweep_runs_only_what_is_missing_and_can_be_widened(place, instantly):
    job = Job(**SHORT)
    bw.sweep(job, {"learning_rate": [0.05, 5.0]}, seeds=1, out="a")
    assert instantly == ["learning_rate=0.05,seed=0", "learning_rate=5,seed=0"]
    instantly.clear()
    found = bw.sweep(None, {"learning_rate": "0.1"}, seeds=2, out="a", resume=True)
    assert instantly == [
        *("learning_rate=5,seed=0", "learning_rate=0.1,seed=0"),  # what failed is tried again
        *("learning_rate=0.05,seed=1", "learning_rate=5,seed=1", "learning_rate=0.1,seed=1"),
    ]
    assert [cell.state for cell in found.cells].count("failed") == 2
    assert found.failed[0].error == "every gradient is infinite"
    assert [one.done for one in found.settings] == [2, 0, 2]


def test_a_run_whose_checkpoints_are_gone_is_said_to_be_trained_anew(place, instantly, capsys):
    bw.sweep(Job(**SHORT), {"learning_rate": [5.0, 6.0]}, seeds=2, out="a")  # all of them fail
    runs = [Path("a/cells") / name for name in instantly]
    for run in runs[:4]:
        (run / "checkpoints").mkdir(parents=True)
    for run in (*runs[:2], runs[3]):
        (run / CHECKPOINTED).touch()
    (runs[0] / "checkpoints/last.pt").touch()
    (runs[3] / "checkpoints/best.pt").touch()  # which is older than what was lost
    capsys.readouterr()
    bw.sweep(out="a", resume=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "anew" in line]
    why = "no checkpoint to go on from is left in"
    assert said == [
        f"warning: {run.name.replace(',', ' ')}: {why} a/cells/{run.name}, so it is trained anew"
        for run in (runs[1], runs[3])
    ]


def test_a_resumed_sweep_keeps_its_job(place, instantly):
    bw.sweep(Job(**SHORT), {"scaling": ["sqrt"]}, seeds=1, out="a")
    with pytest.raises(JobError, match=r"epochs=3 differs from the sweep's 2"):
        bw.sweep(out="a", resume=True, epochs=3)
    with pytest.raises(JobError, match="this sweep is over scaling: epochs cannot join"):
        bw.sweep(None, {"epochs": [3]}, out="a", resume=True)
    with pytest.raises(JobError, match="resume takes the job from a"):
        bw.sweep(Job(), out="a", resume=True)
    with pytest.raises(FileError, match=r"a is not empty|exists and is not empty"):
        bw.sweep(Job(**SHORT), {"scaling": ["sqrt"]}, out="a")
    with pytest.raises(FileError, match="there is no folder b, so no run to resume"):
        bw.sweep(out="b", resume=True)
    (place / "b").mkdir()
    with pytest.raises(FileError, match=r"holds no sweep\.json"):
        bw.sweep(out="b", resume=True)
    assert bw.sweep(out="a", resume=True, timeout=50.0).job.timeout == 50
    with pytest.raises(JobError, match=r"^goal\.price=1\.0 differs from the sweep's None: begin"):
        bw.sweep(out="a", resume=True, goal={"price": 1.0})
    assert bw.sweep(out="a", resume=True, goal={"deadline": 60}).job.goal.deadline == 60
    assert read_record("a/sweep.json", Sweep).job.goal.deadline == 60


def test_a_sweep_that_was_moved_is_loaded_with_its_place_now(place, instantly):
    made = bw.sweep(Job(**SHORT), {"scaling": ["sqrt"]}, seeds=1, out="a")
    Path("a").rename("b")
    assert bw.load("b") == bw.load("b/sweep.json") == made.model_copy(update={"folder": "b"})
    made.save("copy.json")
    assert bw.load("copy.json") == made


def test_code_named_in_a_sweeps_file_is_run_only_if_named_again(place, instantly):
    bw.sweep(Job(**SHORT), {"scaling": ["sqrt"]}, seeds=1, out="a")
    text = Path("a/sweep.json").read_text().replace('"resnet8"', '"mine:net"')
    Path("a/sweep.json").write_text(text)
    with pytest.raises(PlanError, match="network=mine:net in a file would run code"):
        bw.sweep(out="a", resume=True)


@pytest.mark.parametrize(
    ("job", "grid", "words"),
    [
        ({}, {"epochs": [1, 2]}, []),
        ({"network": "mine:net", "loss": "mine:loss"}, {"epochs": [1]},
         ["network=mine:net", "loss=mine:loss"]),
        ({"loss": "mine:loss"}, {"network": ["resnet8", "mine:net"], "epochs": [1, 2]},
         ["--grid", "network=resnet8,mine:net", "loss=mine:loss"]),
    ],
)  # fmt: skip
def test_a_stopped_sweep_says_the_whole_command_that_goes_on(job, grid, words):
    job = Job(**job)
    swept = read_grid(job, grid)
    resumable = verb._resumable(Path("a"), job, swept, cells_of(job, swept, [0, 1]))
    with pytest.raises(Interrupted) as stopped, resumable:
        raise Interrupted(15, "stopped")
    first, _, found = str(stopped.value).partition(" --out a")
    assert first == "stopped; continue with `batchwright sweep --resume"
    assert sorted(found.removesuffix("`").split()) == sorted(words)


@pytest.fixture
def late(monkeypatch):
    """Cells that a deadline of 50 s ends at once."""

    def run(self, todo, stops):
        for cell, plan in todo:
            own = resuming_command(run_folder_of(self._folder, cell), plan.job)
            with pytest.raises(DeadlineReached) as end, telling_how_to_resume(own, deadline=50.0):
                raise DeadlineReached("goal.deadline=50 s was reached at epoch 1")
            self._watcher.ended(cell.name, "failed", str(end.value))

    monkeypatch.setattr(Runner, "run", run)


def test_a_cell_that_ends_by_its_deadline_says_the_sweeps_command(place, late):
    goal = {"deadline": 50}
    found = bw.sweep(Job(**SHORT, goal=goal), {"scaling": ["sqrt"]}, seeds=1, out="a a")
    assert found.failed[0].error == (
        "goal.deadline=50 s was reached at epoch 1; continue with "
        "`batchwright sweep --resume --out 'a a' goal.deadline=100`"
    )
    assert read_record("a a/sweep.json", Sweep) == found


def test_a_cell_whose_deadline_is_in_the_grid_keeps_its_own_command(place, late):
    """The sweep's command cannot change it."""
    found = bw.sweep(Job(**SHORT), {"goal.deadline": [50]}, seeds=1, out="a")
    (cell,) = found.failed
    own = f"batchwright run --resume --out a/cells/{cell.name} goal.deadline=100"
    assert cell.error.endswith(f"; continue with `{own}`")


def test_a_signal_that_unwinds_says_what_goes_on_and_a_programs_own_stays():
    with (
        pytest.raises(Interrupted, match=r"^stopped by SIGTERM; continue with `go on`") as stop,
        telling_how_to_resume("go on"),
    ):
        raise KeyboardInterrupt(15)
    assert stop.value.exit_code == 143
    with pytest.raises(KeyboardInterrupt, match=r"^$"), telling_how_to_resume("go on"):
        raise KeyboardInterrupt
    lost = LostWorkerError("gone")
    with pytest.raises(LostWorkerError, match=r"^gone$"), telling_how_to_resume("go on"):
        raise lost
    with (
        pytest.raises(LostWorkerError, match=r"^gone; continue with `go on`$"),
        telling_how_to_resume("go on", LostWorkerError),
    ):
        raise lost


@pytest.mark.parametrize("stops", [[], [15]], ids=["by itself", "during a stop"])
def test_what_a_lost_process_has_run_is_in_the_record(tmp_path, monkeypatch, stops):
    def answers(number, patience):
        raise LostWorkerError("gone")

    monkeypatch.setattr(Gathering, "current", SimpleNamespace(answers=answers))
    _, found = cells(Job(global_batch=64), learning_rate="0.1,0.2")
    for cell, summary in zip(found[:2], (True, False), strict=True):
        run_folder_of(tmp_path, cell).mkdir(parents=True)
        if summary:
            (run_folder_of(tmp_path, cell) / "summary.json").touch()
    seen = {}
    watcher = Watcher(None, None, ended=lambda name, state, _: seen.update({name: state}))
    with pytest.raises(LostWorkerError) if not stops else nullcontext():
        sharing.take_down(1, tmp_path, found, watcher, lambda: stops)
    assert seen == {found[0].name: "done", found[1].name: "stopped"}


def test_more_workers_than_a_process_of_a_launcher_has_cores_are_told(monkeypatch, capsys):
    plan = make_plan()
    monkeypatch.setattr(verb, "width_of", lambda _: 5)
    monkeypatch.setattr(verb, "own_machine", lambda _: Machine(2))
    verb._warn_of_crowding([plan])
    assert not capsys.readouterr().err  # a sweep in one process may do so without a word
    started = SimpleNamespace(by="torchrun", size=2)
    monkeypatch.setattr(verb, "joined", lambda: started)
    verb._warn_of_crowding([plan])
    said = "workers=5: a run starts 5 processes of its own, and each of the 2 that torchrun has"
    assert capsys.readouterr().err.startswith(f"warning: {said} started has 2 cores for them")
    monkeypatch.setattr(verb, "own_machine", lambda _: Machine(5))
    verb._warn_of_crowding([plan])
    assert not capsys.readouterr().err


def test_two_sweeps_do_not_share_a_folder(place, instantly):
    bw.sweep(Job(**SHORT), {"learning_rate": [0.05]}, seeds=1, out="a")
    with (
        locks.take(Path("a"), "another --out"),
        pytest.raises(FileError, match=r"^a is being written by this process already: .* --out$"),
    ):
        bw.sweep(resume=True, out="a")
    bw.sweep(resume=True, out="a")


def test_the_command_says_what_failed_and_exits_with_one(place, instantly, command):
    words = [f"{key}={value}" for key, value in SHORT.items()]
    code, out, err = command(
        "sweep", *words, "--grid", "learning_rate=0.05,5", "--seeds", "2", "--out", "a", "--json"
    )
    assert code == 1
    assert json.loads(out)["format"] == "batchwright-sweep/1"
    assert "best: learning_rate=0.05, 41.81 ± 0.14 %" in err
    assert err.splitlines()[-1] == (
        "error: 2 of 4 runs done, 2 failed: learning_rate=5 seed=0: every gradient is infinite; "
        "learning_rate=5 seed=1: every gradient is infinite"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a sweep needs something to vary"),
        (["--grid", "scaling=sqrt,sqrt"], "the grid repeats scaling=sqrt"),
        (["--grid", "scaling=sqrt", "--seeds", "0"], "seeds=0: a sweep needs one or more"),
        (["--grid", "scaling=sqrt", "--seeds", "abc"], "invalid value for '--seeds'"),
        (["--grid", "scaling=sqrt", "--at-once", "0"], "at_once=0 is no number of runs"),
        (["--grid", "scaling=sqrt", "--at-once", "999"], "at_once=999 runs of 1 worker need"),
        (["--grid", "scalings=sqrt"], "unknown job key 'scalings': did you mean 'scaling'?"),
    ],
)
def test_bad_words_are_refused_in_one_line_and_leave_nothing(place, command, words, said):
    code, out, err = command("sweep", "global_batch=64", "device=cpu", *words, "--out", "a")
    assert code == 2
    assert not out
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last
    assert not Path("a").exists()


# ------------------------------------------------------------------------------------- in earnest


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on_where_it_was(place, monkeypatch, forks):
    """Most steps of its second epoch, and all later ones, are held."""

    def stop():
        end = time.monotonic() + 500
        while time.monotonic() < end:
            for path in Path("a/cells").glob("*/metrics.jsonl"):
                if '"epoch"' in path.read_text():
                    os.kill(os.getpid(), signal.SIGINT)
                    return
            time.sleep(0.02)

    threading.Thread(target=stop, daemon=True).start()
    monkeypatch.setattr(sharing, "machine_for", lambda plans: Machine(1))
    network = "held_network:resnet"
    keys = {"epochs": 20, "global_batch": 256, "launch": "local", "network": network}
    hold(place, "a/cells", 0.5, after=8)
    how = f"1 run to go; continue with `batchwright sweep --resume --out a network={network}`"
    with pytest.raises(Interrupted, match=how) as end:
        bw.sweep(Job(**SHORT | keys), {"scaling": ["sqrt"]}, seeds=1, out="a")
    release(place)
    assert end.value.exit_code == 130
    assert read_record("a/sweep.json", Sweep).cells[0].state == "stopped"
    (cell,) = bw.sweep(out="a", resume=True, network=network).cells
    summary = read_record(f"a/cells/{cell.name}/summary.json", RunSummary)
    assert (summary.resumed, len(summary.epochs)) == (1, 20)
    assert summary.plan.job.launch == "in-process"
    assert cell.accuracy == summary.accuracy
    assert cell.accuracy > 0.4
