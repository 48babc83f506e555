"""`schedule`: the learning rate of a plan, a run, a profile, or a job. Trains nothing.

Only a job needs torch, for its data and network; modules that need it are imported inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchwright.errors import ArgumentError, FileError, JobError
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.planning.resolution import cycle_batches
from batchwright.planning.schedule import rate_schedule
from batchwright.records import DataFacts, Job, Plan, Profile, RateSchedule, RunSummary
from batchwright.records.documents import change_job, read_one_of, texts_of
from batchwright.records.job import other_keys_come
from batchwright.records.text.problems import described
from batchwright.storage.files import is_folder, is_there
from batchwright.workflows.job_changes import with_job
from batchwright.workflows.prepare_job import data_facts, job_of, resolve, sides_of
from batchwright.workflows.prices import priced_job

Source = Plan | Profile | RunSummary | Job | str | Path | None
"""A record, the path of its file, a run folder, the path of a job's YAML file, or `None` for a job
of job keys alone."""


def schedule(source: Source = None, *, overrides: Iterable[str] = (), **keys: Any) -> RateSchedule:
    """The learning rate over the epochs of a plan, a run, a profile, or a job. Trains nothing.

    Args:
        source: A plan, profile, summary or job, the path of its file, or a run folder. A profile
            is planned first. A job needs its global batch; its data and network are opened.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; for a plan only those that do not change it.

    Returns:
        The rate's rule, its value at about 240 points, the plan's stages, and the sources of these.

    Raises:
        BatchwrightError: The source is wrong; the message is one line.
    """
    return rate_schedule(_plan_of(source, keys, texts_of(overrides)))


def _plan_of(source: Source, keys: Mapping[str, Any], overrides: list[str]) -> Plan:
    """The plan of a plan or run unchanged; one made from a profile; of a job, without measuring."""
    if source is not None and not isinstance(
        source, Plan | Profile | RunSummary | Job | str | Path
    ):
        raise ArgumentError(
            "schedule takes a plan, a profile, a summary, a job, or the path of one, not "
            f"{described(source)}"
        )
    if isinstance(source, str | Path):
        source = _read(source)
    if isinstance(source, RunSummary):
        source = source.plan
    if isinstance(source, Plan):
        return with_job(source, change_job(source.job, keys, overrides))
    if isinstance(source, Profile):
        return make_plan(source, priced_job([source], keys, overrides))
    return _plan_of_job(job_of(source, keys, overrides))


def _read(place: str | Path) -> Plan | Profile | RunSummary | Job:
    path = Path(place)
    if is_folder(path):
        path = path / "plan.json"
        if not is_there(path):
            raise FileError(f"{place} holds no plan.json: give the folder of a run, or a file")
    elif path.suffix.lower() in (".yaml", ".yml"):
        with other_keys_come():  # overrides of the command line
            return job_of(place, {})
    found = read_one_of(path, (Plan, Profile, RunSummary))
    assert isinstance(found, Plan | Profile | RunSummary)  # noqa: S101 - for the type checker
    return found


def _plan_of_job(job: Job) -> Plan:
    """The plan of a job without measurements; its data are opened and its network is built."""
    from batchwright.workload.task import build_network, network_facts

    data = data_facts(job)
    job = resolve(job, data)
    _check_batch(job, data)
    side = max(sides_of(job, data))
    network = build_network(
        job.network,
        classes=len(data.classes),
        side=side,
        seed=job.seed,
        arguments=job.network_args,
    )
    facts = network_facts(job.network, network, side, data.channels)
    return plan_without_profile(job, data, facts)


def _check_batch(job: Job, data: DataFacts) -> None:
    """Refuse a job without a batch, on which the rate depends: only a probe could choose it."""
    given = job.global_batch != "auto" or cycle_batches(job, data) is not None
    if given or (job.method_spec.served and isinstance(job.dual.large_batches, tuple)):
        return
    raise JobError(
        "global_batch=auto: the schedule of a job depends on its batch, which the plan would "
        "choose: give a batch, such as global_batch=512, or a profile or plan instead of the job"
    )
