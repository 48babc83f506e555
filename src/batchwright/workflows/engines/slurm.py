"""Slurm: submits a run as a batch job, or finds it again, and follows it until it ends."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import (
    DeadlineReached,
    FileError,
    Interrupted,
    JobError,
    WorkerError,
    shortage,
)
from batchwright.records import Job
from batchwright.records.documents import write_text
from batchwright.records.run_folder import resuming_command
from batchwright.records.text.problems import to_stderr
from batchwright.storage.files import look_again, make_folder
from batchwright.storage.follow_lines import Tail
from batchwright.workflows.engines import show_log_line
from batchwright.workflows.engines.slurm_script import script

LOOK_SECONDS, LONGEST_SECONDS = 1.0, 15.0
"""Time between two questions to Slurm's controller: at first, and while nothing changes."""
_LOG_SECONDS = 0.2  # between two looks at the log
_ANSWER_SECONDS = 60.0  # longer than Slurm's own timeouts
_SILENT_SECONDS = 60.0  # for an answer about a job, before giving up
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
_GONE = "GONE"  # Slurm forgets a job some minutes after its end
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT", _GONE),
}
"""States of a job that has ended for good; in any other state, also unknown ones, it may run."""
_NEVER = {
    "AccountNotAllowed": "slurm.account",
    "BadConstraints": "nodes and slurm.lines",
    "InvalidAccount": "slurm.account",
    "PartitionConfig": "nodes, slurm.time, slurm.gpus_per_node and slurm.lines",
    "PartitionNodeLimit": "nodes",
    "PartitionTimeLimit": "slurm.time",
    "QOSNotAllowed": "slurm.lines",
}
"""Slurm's reasons for which a job would wait for ever, and the job keys to check."""
_HINTS = (
    (
        "account",
        "`sacctmgr show associations user=$USER` lists your accounts and where they may run: give "
        "slurm.account and slurm.partition",
    ),
    ("partition", "`sinfo` lists the partitions: give one as slurm.partition"),
    (
        "node",
        "`sinfo` lists the nodes: give fewer, or less of each (slurm.lines=--cpus-per-task=4)",
    ),
    ("generic resource", "`sinfo -o %G` lists what nodes have: look at slurm.gpus_per_node"),
    ("time limit", "`sinfo -o '%P %l'` lists the limits: give less as slurm.time"),
    (
        "contact",
        "`scontrol ping` tells whether the cluster's controller is up",
    ),
)


def check(job: Job) -> None:
    """Refuse a job on a machine without Slurm.

    Raises:
        JobError: There is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise JobError(
            f"launch={job.launch}: there is no sbatch on this machine's PATH: run it on a machine "
            "of the cluster, such as its login node; `batchwright export PLAN.json --as sbatch` "
            "writes a script to take there"
        )


def submit(folder: Path, job: Job, command: Sequence[str]) -> None:
    """Have Slurm run a command on the job's nodes, a task for each worker, and wait for its end.

    If an earlier Slurm job of this folder has not ended, that job is followed instead.

    Args:
        folder: The run folder, for the script, the Slurm job's number and logs.
        job: The job, with the resources to request.
        command: The command of each task.

    Raises:
        BatchwrightError: Slurm refuses the job, or the run failed; the exit code is the run's own.
        Interrupted: The user stopped waiting (Ctrl-C); the Slurm job goes on.
    """
    logs = folder.resolve() / "logs" / "slurm"
    make_folder(logs)
    kept = logs / "job"
    again = resuming_command(folder, job)
    number = _number_there(kept, again)
    found, stops = bool(number), list[int]()
    if not found:
        text = script(folder.resolve(), job, command)
        write_text(text, folder / "slurm.sh")
        with noting_signals() as stops:  # else a job might be there whose number nobody knows
            number = _sbatch(folder / "slurm.sh")
            _keep(number, kept)
    to_stderr(f"slurm job {number}{' is still there' * found}, log in {logs / f'{number}.log'}")
    if found and (left_out := _missing_keys(folder / "slurm.sh", job, command)):
        to_stderr(
            f"warning: slurm job {number} goes on as it was submitted, without "
            f"{' '.join(left_out)}: to change it, `scancel {number}`, then give this command again"
        )
    try:
        if stops:
            raise KeyboardInterrupt(stops[0])
        _follow(number, logs / f"{number}.log", again, from_end=found)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            stop.args[0] if stop.args else signal.SIGINT,
            f"slurm job {number} goes on by itself; come back to it with `{again}`, end it with "
            f"`scancel {number}`",
        ) from None


def _missing_keys(kept: Path, job: Job, command: Sequence[str]) -> list[str]:
    """``key=value`` words of the command that are not in the earlier command's script."""
    text = kept.read_text("utf-8") if kept.exists() else ""
    keys = [word for word in command if re.match(r"[a-z_.]+=", word)]
    return [
        word
        for word in keys
        if word.partition("=")[0] not in job.code_keys
        and not re.search(rf"(?<!\S){re.escape(shlex.quote(word))}(?!\S)", text)
    ]


def _number_there(kept: Path, again: str) -> str:
    """The number of the Slurm job that was submitted before; empty if there is none, or it ended.

    Raises:
        FileError: The file holds no number.
        JobError: Slurm does not answer. A second job might then write into the same folder.
    """
    if not kept.exists():
        return ""
    said = kept.read_bytes().strip()
    if not said.isdigit():
        raise FileError(
            f"{kept} holds no number of a Slurm job: if `squeue --me` lists none of this run, "
            "remove it, and give the command again"
        )
    number = said.decode()
    limit = time.monotonic() + _SILENT_SECONDS
    while not (facts := _facts(number)):
        if time.monotonic() > limit:
            raise JobError(
                f"slurm does not say whether job {number} is still there, so nothing is submitted: "
                f"give `{again}` again once `scontrol show job {number}` answers, or remove {kept} "
                "if the job is surely gone"
            )
        time.sleep(LOOK_SECONDS)
    return "" if facts["JobState"] in _ENDED else number


def _keep(number: str, kept: Path) -> None:
    """Write down the number of a new job, by which `--resume` finds it.

    Raises:
        FileError: The disk takes nothing. The job, which nobody would find again, is cancelled: the
            next command would submit another one for the same folder.
    """
    try:
        write_text(f"{number}\n", kept)
    except FileError as error:
        left = _cancel(number) or "was cancelled again"
        raise FileError(f"{error}; slurm job {number} {left}") from None


def _cancel(number: str) -> str:
    """Cancel a job that this command has submitted; returns why it is still there, if it is."""
    try:
        done = _run("scancel", number)
        if done.returncode == 0:
            return ""
        lines = done.stderr.splitlines() or ["scancel failed"]
        why = lines[-1].strip().removeprefix("scancel: error: ")
    except FileError as error:  # there is none, or it cannot be started
        why = str(error)
    how = f"try `scancel {number}` again, or ask whoever runs the cluster"
    return f"is still there ({why}; {how})"


def _sbatch(path: Path) -> str:
    """Submit a script and return the new job's number.

    Raises:
        JobError: Slurm refuses the job.
    """
    done = _run("sbatch", "--parsable", str(path), variables=_outside_of_a_job(os.environ))
    number = done.stdout.strip().partition(";")[0]
    if done.returncode == 0 and number.isdigit():
        return number
    said = f"{done.stderr}\n{done.stdout}".splitlines()
    lines = [re.sub(r"^sbatch: (error: |fatal: )?", "", one).strip() for one in said]
    why = next((line for line in reversed(lines) if line), "it said nothing")
    why = why.removeprefix("Batch job submission failed: ")
    hints = (hint for word, hint in _HINTS if word in why.lower())
    hint = next(hints, "read slurm.sh in the run folder, and try `sbatch` on it")
    raise JobError(f"slurm refuses the job: {why}; {hint}")


def _follow(number: str, log: Path, again: str, *, from_end: bool) -> None:
    """Show state and log until the job has ended.

    Raises:
        BatchwrightError: The job can never start, or ended badly.
    """
    tail: Tail[bytes] = Tail(log, bytes, from_end=from_end)
    pause, due, shown = LOOK_SECONDS, 0.0, ""
    while True:
        tail(show_log_line)
        if time.monotonic() >= due:
            facts = _facts(number)
            state = facts.get("JobState", "")
            words = _words(number, facts)
            pause = LOOK_SECONDS if words != shown else min(1.3 * pause, LONGEST_SECONDS)
            due = time.monotonic() + pause
            if words != shown:
                to_stderr(words)
                shown = words
            new = state == "PENDING" and facts.get("Restarts") == "0" and not from_end
            if new and (keys := _NEVER.get(facts.get("Reason", ""))):
                left = _cancel(number)
                what = f"and {left}" if left else "so it was cancelled"
                raise JobError(
                    f"slurm job {number} would wait for ever ({facts['Reason']}), {what}: look at "
                    f"{keys}; `sinfo` and `scontrol show partition` tell what there is"
                )
            if state in _ENDED:
                break
        time.sleep(_LOG_SECONDS)
    look_again(log.parent)
    tail(show_log_line)
    _raise_unless_well(number, facts, log, again)


def _words(number: str, facts: dict[str, str]) -> str:
    """A job's state in words."""
    if not facts:
        return (
            f"slurm job {number}: Slurm does not answer, it is asked again; the job goes on by "
            "itself, and `scontrol ping` tells whether the controller is up"
        )
    state, reason = facts.get("JobState", "").lower(), facts.get("Reason", "None")
    words = f"slurm job {number}: {state}"
    if state == "pending" and reason != "None":
        words += f" ({reason})"
    if state == "running":
        words += f" on {facts.get('NodeList')}"
    if (count := facts.get("Restarts", "0")) != "0":
        words += f", started again {count} x"
    return words


def _raise_unless_well(number: str, facts: dict[str, str], log: Path, again: str) -> None:
    """Raise the error of a Slurm job that ended badly, with its exit code; ``again`` continues."""
    state, given = facts["JobState"], facts.get("ExitCode", "0:0")
    code = int(given.partition(":")[0])
    if state == "COMPLETED" or state == _GONE:
        return
    if state == "CANCELLED":
        raise Interrupted(15, f"slurm job {number} was cancelled; continue with `{again}`")
    if code == DeadlineReached.exit_code:
        raise DeadlineReached(
            f"slurm job {number} has ended at goal.deadline, with a checkpoint; continue with "
            f"`{again}` and a later one"
        )
    left = f"its log is {log}"
    if not log.exists():
        left = f"it has left no log {log}"
        if state == "FAILED":  # 0:53, where a node cannot open it
            where = facts.get("NodeList", "its nodes")
            left += f": give --out a folder on a disk that all nodes ({where}) share with this one"
    shown = code if code or given.endswith(":0") else given
    error = WorkerError(
        f"slurm job {number} ended as {state}, exit code {shown}, {left}; continue with `{again}`"
    )
    error.exit_code = code or error.exit_code
    raise error


_FACT = re.compile(r"(?:^|\s)(JobState|Reason|Restarts|NodeList|ExitCode)=(\S*)")


def _facts(number: str) -> dict[str, str]:
    """Slurm's fields of a job, at least ``JobState``; empty if the controller does not answer."""
    done = _run("scontrol", "show", "job", "-o", number)
    if done.returncode == 0:
        facts = dict(_FACT.findall(done.stdout))
        return facts if facts.get("JobState") else {}
    return {"JobState": _GONE} if "Invalid job id" in done.stderr else {}


def _outside_of_a_job(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without those of the Slurm job that this command may run in.

    The new job would inherit them, and its `srun` would use them as its own settings.
    """
    inside = "SLURM_JOB_ID" in variables
    of_job = ("SLURM_", "SLURMD_", "SRUN_") if inside else ()
    return {
        name: value
        for name, value in variables.items()
        if name in _OF_THE_CLUSTER or not name.startswith(of_job)
    }


def _run(
    *words: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",  # a job's facts hold names of folders
            check=False,
            timeout=_ANSWER_SECONDS,
            env=variables,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
    except FileNotFoundError:
        raise FileError(f"there is no {words[0]} on this machine's PATH, beside sbatch") from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} did not answer")
    except OSError as error:
        if not shortage(error):
            raise FileError(
                f"{words[0]} cannot be started: {error.strerror}; look at its permissions, "
                f"{shutil.which(words[0], os.F_OK) or words[0]}"
            ) from None
        # A login node with many users may be short of processes for a moment: the job goes on.
        said = f"{words[0]} cannot be started: {error.strerror}"
        return subprocess.CompletedProcess(words, 1, "", said)
