"""What may change between a job as it was planned, or measured, and as a command asks for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batchwright.errors import PlanError
from batchwright.planning.candidates.learnt import TRAINED_KEYS
from batchwright.planning.validation import PLANNING_KEYS, as_measured, within_measured
from batchwright.records import Job, Plan, Profile
from batchwright.records.base import Keys
from batchwright.records.documents import change_job, read_record, record_of
from batchwright.records.job import as_written
from batchwright.records.text.job_values import plain, text_of
from batchwright.records.text.problems import to_stderr
from batchwright.workflows.prepare_job import data_facts

TRAINING_KEYS = (
    *("checkpoint_epochs", "checkpoint_seconds", "checkpoint_steps", "data", "data_args"),
    *("launch", "nodes", "port", "ray", "rebalance", "rebalance_steps"),
    *("restarts", "slurm", "timeout"),
)
"""Job keys that may change after planning; ``data`` only to another copy of the same images."""


def received(
    given: Plan | str | Path,
    keys: Mapping[str, Any],
    overrides: list[str],
    verb: str,
    resumed: Path | None = None,
) -> Plan:
    """The plan, given itself or by its file, with job keys changed that do not change the plan.

    Args:
        given: The verb's argument.
        keys: Job keys to change.
        overrides: ``key=value`` texts that change more keys.
        verb: The verb, for messages.
        resumed: The folder of the run that goes on by this plan.

    Raises:
        FileError: There is no such plan.
        JobError: A key or a value is wrong.
        PlanError: A key would change the plan, or the file names code that nobody has confirmed.
    """
    plan = record_of(given, Plan, verb)
    if plan is not given:
        refuse_unconfirmed_code(plan.job, keys, overrides)
    return with_job(plan, change_job(plan.job, keys, overrides), resumed)


def with_job(plan: Plan, job: Job, resumed: Path | None = None) -> Plan:
    """The plan with another job, which may differ in `TRAINING_KEYS` and `goal.deadline` only.

    ``resumed`` is the folder of the run that goes on by this plan, if one does.

    Raises:
        PlanError: The job differs in another key.
    """
    found = [*planned_differences(plan.job, job)]
    if found:
        key, planned, asked = found[0]
        what = "plan again with it"
        if resumed is not None:
            keys = {key: text_of(key, plain(asked)) for key, _, asked in found}
            them = "it" if len(found) == 1 else "them"
            what = f"resume without {them}, or train another run: `{_run_from(resumed, keys)}`"
        raise PlanError(
            f"{key}={as_written(asked)} differs from the plan's {key}={as_written(planned)}: "
            f"{what} (training itself takes {', '.join(TRAINING_KEYS)}, goal.deadline)"
        )
    return plan.model_copy(update={"job": job})


def _run_from(folder: Path, keys: Mapping[str, str]) -> str:
    """The command of another run of a run's job, from its weights where they fit and are meant."""
    weights, changes = folder / "checkpoints" / "last.pt", dict(keys)
    anew = ("network", "data", "resolutions", "seed", "weights")
    if weights.exists() and not any(key.startswith(anew) for key in keys):
        changes = {"weights": str(weights)} | changes
    words = (f"{key}={value}" for key, value in changes.items())
    return shlex.join(["batchwright", "run", str(folder / "job.yaml"), *words])


def refuse_another(given: Plan, kept: Plan, folder: str | Path) -> None:
    """Refuse to resume a run with a plan for another job, since the run's own plan is followed.

    Args:
        given: The plan that the user named.
        kept: The run's plan, which may have changed since for the same job.
        folder: The run folder.

    Raises:
        PlanError: The plans are for different jobs, or different images.
    """
    found = [*planned_differences(kept.job, given.job)]
    if kept.data.digest != given.data.digest:
        found.insert(0, ("data", kept.data.name, given.data.name))
    for key, own, other in found:
        raise PlanError(
            f"{folder} holds a run of another plan ({key}={as_written(own)}, and the plan given "
            f"has {key}={as_written(other)}): choose another run folder, or leave the plan out"
        )


def may_change(key: str) -> bool:
    """Whether a job key may change after planning: one of `TRAINING_KEYS`, or the deadline."""
    return key.partition(".")[0] in TRAINING_KEYS or key == "goal.deadline"


def planned_differences(before: Job, now: Job) -> Iterator[tuple[str, Any, Any]]:
    """Keys that may not change after planning in which two jobs differ, each with both values."""
    return (one for one in differences(before, now) if not may_change(one[0]))


def differences(before: Keys, now: Keys, section: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys, nested ones with dots, in which two jobs differ, each with both values."""
    for name in type(before).model_fields:
        key, old, new = f"{section}{name}", getattr(before, name), getattr(now, name)
        if old != new and isinstance(old, Keys) and isinstance(new, Keys):
            yield from differences(old, new, f"{key}.")
        elif old != new:
            yield key, old, new


def measured_before(folder: Path, job: Job) -> Profile | None:
    """The profile that a stopped run without a plan has kept, for the job as it is now.

    A line on stderr says how it is used. Its trials are marked open if more are wanted.

    Args:
        folder: The run folder.
        job: From `ready`. It may differ from the measured job in `probe.learning`, and in keys that
            change neither measurements nor trials.

    Returns:
        The profile; `None` if the run has not measured anything.

    Raises:
        PlanError: The job differs in other keys, or the images differ.
        FileError: The profile cannot be read.
    """
    path = folder / "profile.json"
    if not path.exists():
        to_stderr(f"{folder} has no profile yet: measuring from the beginning")
        return None
    profile = read_record(path, Profile)
    if data_facts(job).digest != profile.data.digest:
        raise PlanError(
            f"{path} was measured with other images than data={job.data} has now: begin a run of "
            "its own in another folder (--out)"
        )
    job, changed = as_measured(job, profile), []
    pretrained = job.weights or job.network_args.get("pretrained")
    if pretrained and profile.job.normalize == "auto" and isinstance(job.normalize, tuple):
        # Of an earlier version, which normalized by the training images whatever the weights.
        job = job.model_copy(update={"normalize": "auto"})
        to_stderr(f"{path} was measured with normalize=auto, which is kept")
    free = PLANNING_KEYS - {"workers", "resolutions"}
    # A run bounds `goal.max_workers` once all is measured. Until then the profile has the job's own
    # number: with another one a probe that was stopped would begin anew.
    known, asked = (within_measured(one, profile) for one in (profile.job, job))
    for key, before, now in differences(known, asked):
        if key.partition(".")[0] in free.difference(TRAINED_KEYS if profile.trials else ()):
            changed += [] if key == "goal.kinds" else [f"{key}={as_written(now)}"]
        elif key != "probe.learning":
            raise PlanError(
                f"{path} was measured with {key}={as_written(before)}, and "
                f"{key}={as_written(now)} is asked for: go on with it as it was, or begin a run "
                "of its own in another folder (--out)"
            )
    more = job.probe.learning != profile.job.probe.learning or profile.trials_open
    profile = profile.model_copy(update={"job": job, "trials_open": more})
    if not more:
        now_with = f", with {', '.join(changed)}" if changed else ""
        to_stderr(f"{path} has all that was measured: planning by it{now_with}")
    return profile


def refuse_unconfirmed_code(job: Job, keys: Iterable[str], overrides: Iterable[str]) -> None:
    """Refuse a file's job that names code to import, unless the caller repeats the name.

    Raises:
        PlanError: The job names code that is in neither ``keys`` nor ``overrides``.
    """
    named = {*keys, *(text.partition("=")[0].strip() for text in overrides)}
    for key in job.code_keys:
        if key not in named:
            name = getattr(job, key)
            raise PlanError(
                f"{key}={name} in a file would run code: repeat {shlex.quote(f'{key}={name}')} on "
                "the command line to allow it"
            )


def named_code(job: Job) -> dict[str, Any]:
    """The job's import strings by key, to confirm the same strings in a file's job."""
    return {key: getattr(job, key) for key in job.code_keys}
