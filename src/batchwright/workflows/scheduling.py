"""The plan whose learning rate is to be shown: of a plan, a run, a profile, or a job.

What needs torch is imported inside: only a job needs it, for its data and network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchwright.errors import ArgumentError, FileError, JobError
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.planning.resolution import cycle_batches
from batchwright.records import DataFacts, Job, Plan, Profile, RunSummary
from batchwright.records.documents import change_job, read_one_of, texts_of
from batchwright.records.job import other_keys_come
from batchwright.records.text.problems import described
from batchwright.workflows.prepare_job import job_of, resolve, with_job
from batchwright.workflows.prices import priced_job

Source = Plan | Profile | RunSummary | Job | str | Path | None
"""A record, the path of its file, a run folder, the path of a job's YAML file, or no job at all."""


def plan_to_show(source: Source, keys: Mapping[str, Any], overrides: Iterable[str] = ()) -> Plan:
    """The plan of ``source``, or one made for it.

    Args:
        source: A plan or run is taken as it is; a profile is planned; a job is planned as it asks,
            without measuring, for which it needs a global batch.
        keys: Job keys to change; of a plan only those that do not change it.
        overrides: ``key=value`` texts, as on the command line.

    Raises:
        BatchwrightError: What is wrong, in one line.
    """
    overrides = texts_of(overrides)
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
    if path.is_dir():
        path = path / "plan.json"
        if not path.exists():
            raise FileError(f"{place} holds no plan.json: give the folder of a run, or a file")
    elif path.suffix.lower() in (".yaml", ".yml"):
        with other_keys_come():  # those of the command line
            return job_of(place, {})
    found = read_one_of(path, (Plan, Profile, RunSummary))
    assert isinstance(found, Plan | Profile | RunSummary)  # noqa: S101 - as asked for
    return found


def _plan_of_job(job: Job) -> Plan:
    """As for training without measuring; data and network are looked at here."""
    from batchwright.reporting.render.progress import steps
    from batchwright.workload.data.sources import open_data
    from batchwright.workload.task import build_network, network_facts

    with steps() as show:
        data = open_data(job, progress=show).facts
    job = resolve(job, data)
    _check_batch(job, data)
    side = data.side if job.resolutions == "auto" else max(job.resolutions)
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
    """The rate hangs on the batch, which `plan` chooses from measurements."""
    given = job.global_batch != "auto" or cycle_batches(job, data) is not None
    if given or (job.method_spec.served and isinstance(job.dual.large_batches, tuple)):
        return
    raise JobError(
        "global_batch=auto: the schedule of a job hangs on its batch, which the plan would choose: "
        "give global_batch=512, say, or a profile or plan instead of the job"
    )
