"""Engines that start a run's processes on other machines.

A command that names an engine, such as `batchwright run launch=slurm`, writes the job, or the plan,
into the run folder on a disk that all machines share. The engine then starts
`batchwright run --resume` on that folder in every process. The same command continues a run that
the engine starts again, after a preemption or a lost machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from batchwright.errors import BatchwrightError, JobError
from batchwright.records import Job, Plan, RunSummary
from batchwright.records.documents import change_job, load_job, read_record
from batchwright.records.job import check_job
from batchwright.records.registries.launchers import STARTED_BY
from batchwright.records.run_folder import read_summary, resuming_words
from batchwright.records.text.job_values import flattened, text_of
from batchwright.records.text.problems import to_stderr
from batchwright.storage.files import is_there, look_again
from batchwright.workflows.job_changes import refuse_unconfirmed_code


def hands_over(job: Job) -> bool:
    """Whether an engine has to start this job, and this process is not one that it has started."""
    return bool(job.launcher.submit) and os.environ.get(STARTED_BY) != job.launch


def refuse_to_hand_over(job: Job, verb: str) -> None:
    """Refuse a job with an engine for a verb that runs on this machine.

    Raises:
        JobError: The job names an engine.
    """
    if hands_over(job):
        raise JobError(
            f"launch={job.launch} is for run and train, and {verb} takes place here: leave it out, "
            f"or start `batchwright {verb} launch=local` by the engine itself"
        )


def check_engine(job: Job) -> None:
    """Refuse a job whose engine this machine lacks.

    Raises:
        JobError: As the launcher's `check` raises.
    """
    if job.launcher.check:
        resolve_name(job.launcher.check)(job)


def resumed_by_engine(
    folder: str | Path | None,
    keys: Mapping[str, Any],
    overrides: Sequence[str],
    **reporting: Any,
) -> RunSummary | None:
    """Have an engine resume a run; `None` if the run's job names no engine.

    Args:
        folder: The run folder.
        keys: Job keys to change.
        overrides: ``key=value`` texts that change more keys.
        **reporting: ``report_to``, ``follow_advice`` and ``trackers`` of `hand_over`.
    """
    if folder is None:
        return None
    place = Path(folder)
    plan = read_record(place / "plan.json", Plan) if is_there(place / "plan.json") else None
    if plan is None and not is_there(place / "job.yaml"):
        return None  # the caller will report what is missing
    kept = plan.job if plan is not None else load_job(place / "job.yaml")
    job = change_job(kept, keys, overrides)
    if not hands_over(job):
        return None
    refuse_unconfirmed_code(kept, keys, overrides)
    if plan is not None:
        job = with_workers(job, plan)
    texts = [f"{key}={text_of(key, value)}" for key, value in flattened(keys)]
    return hand_over(place, job, [*texts, *overrides], **reporting)


def with_workers(job: Job, plan: Plan) -> Job:
    """The job with the plan's number of workers, which the engine then starts.

    Slurm and Ray are asked for the cores that workers need by the plan, unless the job sets them.

    Raises:
        JobError: That number of workers does not suit the job's nodes or GPUs.
    """
    job = job.model_copy(update={"workers": plan.workers})
    lines = job.slurm.lines
    cores = plan.worker_cores
    if cores and not any(line.startswith("--cpus-per-") for line in lines):
        lines = (*lines, f"--cpus-per-task={cores}")
        job = job.model_copy(update={"slurm": job.slurm.model_copy(update={"lines": lines})})
    if cores and job.ray.cpus_per_worker == "auto":
        ray = job.ray.model_copy(update={"cpus_per_worker": float(cores)})
        job = job.model_copy(update={"ray": ray})
    check_job(job)
    return job


def hand_over(
    folder: Path,
    job: Job,
    overrides: Sequence[str] = (),
    *,
    report_to: str | None,
    follow_advice: bool,
    trackers: Sequence[str] = (),
) -> RunSummary:
    """Have the job's engine continue the run in a folder, and wait for its end.

    Args:
        folder: The run folder, which holds ``job.yaml`` or ``plan.json``. Only the engine's
            processes may write there meanwhile.
        job: The job, which names the engine and its resources.
        overrides: ``key=value`` texts for the engine's processes.
        report_to: Address of the service that the run reports to; ``None``: none.
        follow_advice: Whether the run follows that service's advice.
        trackers: Trackers that show the run.

    Returns:
        The run's summary.

    Raises:
        BatchwrightError: The run failed; the exit code is the run's own.
        Interrupted: The user stopped waiting; the run goes on.
    """
    ended = False
    with suppress(BatchwrightError):  # raised where there is no summary yet
        ended = read_record(folder / "summary.json", RunSummary).ended
    if not ended:
        check_engine(job)
        command = [sys.executable, "-m", "batchwright", *resuming_words(folder.resolve(), job)]
        reported = [] if report_to is None else ["--report-to", report_to]
        named = [part for word in trackers for part in ("--tracker", word)]
        command += [*reported, *["--follow-advice"] * follow_advice, *named, *overrides]
        resolve_name(job.launcher.submit)(folder, job, command)
        look_again(folder)
    return read_summary(folder)


def show_log_line(line: bytes) -> None:
    """Print a line of the engine's log on standard error, as long as that can be written."""
    with suppress(OSError):
        to_stderr(line.decode(errors="replace").rstrip("\n"))
