"""Engines that start a run's processes on other machines.

A command that names one, such as `batchwright run launch=slurm`, hands itself over: the run folder,
on a disk that all machines share, gets the job, or the plan, and the engine starts
`batchwright run --resume` on it in every process. So a run that is started again, after a
preemption or a lost machine, needs nothing else.
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
from batchwright.records.documents import change_job, flattened, load_job, read_record
from batchwright.records.job import as_written, check_job
from batchwright.records.registries.launchers import STARTED_BY
from batchwright.records.run_folder import read_summary, resuming_words
from batchwright.workflows.prepare_job import refuse_unconfirmed_code


def hands_over(job: Job) -> bool:
    """Whether a run of this job is an engine's to start, and this is none of its processes."""
    return bool(job.launcher.submit) and os.environ.get(STARTED_BY) != job.launch


def refuse_to_hand_over(job: Job, verb: str) -> None:
    """Refuse an engine for a verb that takes place here.

    Raises:
        JobError: The job names one.
    """
    if hands_over(job):
        raise JobError(
            f"launch={job.launch} is for run and train, and {verb} takes place here: leave it out, "
            f"or start `batchwright {verb} launch=local` by the engine itself"
        )


def resumed_by_engine(
    folder: str | Path | None,
    keys: Mapping[str, Any],
    overrides: Sequence[str],
    **telling: Any,
) -> RunSummary | None:
    """`hand_over` of a run to resume; `None` where that is not an engine's to do.

    Args:
        folder: The run folder.
        keys: Job keys to change.
        overrides: ``key=value`` texts that change more.
        **telling: Who is told of it, as `hand_over` takes it.
    """
    if folder is None:
        return None
    place = Path(folder)
    plan = read_record(place / "plan.json", Plan) if (place / "plan.json").exists() else None
    if plan is None and not (place / "job.yaml").exists():
        return None  # whoever resumes it here says what is missing
    kept = plan.job if plan is not None else load_job(place / "job.yaml")
    job = change_job(kept, keys, overrides)
    if not hands_over(job):
        return None
    refuse_unconfirmed_code(kept, keys, overrides)
    if plan is not None:
        job = with_workers(job, plan)
    texts = [f"{key}={as_written(value)}" for key, value in flattened(keys)]
    return hand_over(place, job, [*texts, *overrides], **telling)


def with_workers(job: Job, plan: Plan) -> Job:
    """The job with the plan's number of workers, for an engine to start as many.

    Slurm and Ray are asked for the cores that the plan says they need, unless the job says.

    Raises:
        JobError: Its nodes or GPUs cannot have them.
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
    """Have the job's engine go on with the run in a folder, and wait for its end.

    Args:
        folder: The run folder, which holds ``job.yaml`` or ``plan.json``. Nobody may write there
            meanwhile but the engine's processes.
        job: Says which engine, and what it is asked for.
        overrides: ``key=value`` texts that its processes are given.
        report_to: Address of the service that they report to; ``None``: none.
        follow_advice: Whether they follow its advice.
        trackers: That show the run.

    Returns:
        What happened.

    Raises:
        BatchwrightError: What is wrong, in one line; the exit code is the run's own.
        Interrupted: Somebody stopped waiting; the run goes on.
    """
    ended = False
    with suppress(BatchwrightError):  # there is no summary yet
        ended = read_record(folder / "summary.json", RunSummary).ended
    if not ended:
        command = [sys.executable, "-m", "batchwright", *resuming_words(folder.resolve(), job)]
        reported = [] if report_to is None else ["--report-to", report_to]
        named = [part for word in trackers for part in ("--tracker", word)]
        command += [*reported, *["--follow-advice"] * follow_advice, *named, *overrides]
        resolve_name(job.launcher.submit)(folder, job, command)
    return read_summary(folder)
