"""The job: what to train and on which data, with rules about keys that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, model_validator

from batchwright.errors import ArgumentError, JobError
from batchwright.records.base import html_table
from batchwright.records.job_fields import ALL_BUT_HEAD, JobFields
from batchwright.records.registries.data_sources import secret_in, source_of
from batchwright.records.registries.methods import METHODS
from batchwright.records.text.formatting import counted
from batchwright.records.text.job_keys import job_keys, job_problem

PASS_KEYS = ("activation_checkpointing", "compile", "cuda_graphs")
"""Job keys of how passes are computed. The probe decides their ``auto``, which is else ``off``."""

_OTHERS_COME = ContextVar("others_come", default=False)


@contextmanager
def other_keys_come() -> Iterator[None]:
    """Inside, jobs may be made whose keys contradict each other: more keys are still to come."""
    before = _OTHERS_COME.set(True)
    try:
        yield
    finally:
        _OTHERS_COME.reset(before)


class Job(JobFields):
    """What to train, and on which data. Every key that changes the result is here."""

    if not TYPE_CHECKING:  # a type checker takes the signature from the fields

        def __init__(self, *others: object, **keys: Any) -> None:
            if others:
                raise ArgumentError("a Job takes its keys by name, such as bw.Job(epochs=3)")
            try:
                super().__init__(**keys)
            except ValidationError as error:
                raise JobError(job_problem(error, job_keys(type(self)))) from None

        __init__.__pydantic_base_init__ = True  # so that pydantic does not call it for JSON

    def _changed(self) -> dict[str, Any]:
        return self.model_dump(exclude_defaults=True)

    def __repr_args__(self) -> list[tuple[str, Any]]:
        return list(self._changed().items())

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return html_table("Job", [(key, str(value)) for key, value in self._changed().items()])

    @model_validator(mode="after")
    def _keys_go_together(self) -> Job:
        if not _OTHERS_COME.get() and (conflict := conflict_in(self)):
            raise ValueError(conflict)
        return self


def check_job(job: Job) -> None:
    """Refuse a job whose keys contradict each other, after some of them were resolved.

    Raises:
        JobError: The first contradiction.
    """
    if conflict := conflict_in(job):
        raise JobError(conflict)


# ------------------------------------------------------------------ keys that contradict each other


def conflict_in(job: JobFields) -> str:
    """The first contradiction between keys of a job, in a line; empty if there is none.

    `workflows.prepare_job` checks what depends on the machine, the data or the network.
    """
    return next((line for rule in _RULES for line in rule(job)), "")


def method_keys(method: str = "auto") -> dict[str, tuple[str, ...]]:
    """Job keys that only some methods use, each with those methods: ours and ``method``."""
    specs = METHODS.own | ({} if method == "auto" else {method: METHODS[method]})
    takers = {
        key: tuple(name for name, one in specs.items() if one.takes(key))
        for key in sorted(job_keys(JobFields), key=lambda key: "." not in key)  # sections first
    }
    return {key: methods for key, methods in takers.items() if methods}


def _workers(job: JobFields) -> Iterator[str]:
    workers, launcher, small = job.workers, job.launcher, job.dual.small_workers
    if launcher.one_worker and workers not in ("auto", 1):
        yield f"workers={workers} with launch={job.launch}: that is one worker"
    if launcher.simulated and workers == "auto" and job.goal.max_workers is None:
        yield (
            f"launch={job.launch} needs to know how many workers to simulate: give workers=4, say, "
            "or goal.max_workers for the plan to choose"
        )
    if job.nodes > 1 and not launcher.takes_nodes:
        yield (
            f"nodes={job.nodes} with launch={job.launch}: only launch=slurm asks for machines; "
            "leave nodes out"
        )
    if workers == "auto":
        return
    if workers % job.nodes:
        yield f"workers={workers} are not the same number on each of nodes={job.nodes}"
    if workers < job.ray.min_workers:
        yield f"ray.min_workers={job.ray.min_workers} of workers={workers}: give at most {workers}"
    if job.slurm.gpus_per_node and workers > job.nodes * job.slurm.gpus_per_node:
        yield (
            f"workers={workers} with slurm.gpus_per_node={job.slurm.gpus_per_node} and "
            f"nodes={job.nodes}: give at most {job.nodes * job.slurm.gpus_per_node}"
        )
    if job.method_spec.takes("dual.small_workers") and small != "auto" and small > workers:
        yield f"dual.small_workers={small} of workers={workers}: give at most {workers}"
    if launcher.simulated:
        yield from job.virtual.conflicts(workers)


def groups_known(job: JobFields) -> bool:
    """Whether the job states the sizes of both groups and their time, for equally fast workers."""
    uneven = job.virtual.speeds or job.virtual.overheads
    known = "auto" not in (job.dual.small_workers, job.dual.extra_time, job.workers)
    return job.method_spec.takes("dual.extra_time") and known and not uneven


def _extra_time(job: JobFields) -> Iterator[str]:
    """An extra time that leaves small-batch workers no samples, whatever a step takes."""
    times = (job.virtual.sample_seconds, job.virtual.step_seconds)
    stated = job.launcher.simulated and None not in times  # then `prepare_job` checks more exactly
    if stated or not groups_known(job):
        return
    small, extra, count = int(job.dual.small_workers), float(job.dual.extra_time), int(job.workers)
    large = count - small
    if small and large and extra >= count / large:
        yield (
            f"dual.extra_time={extra:g} leaves no samples for the {small} of {count} workers that "
            f"have the small batch: give less than {count / large:.4g}, the workers over "
            "those with large batches"
        )


def _resolutions(job: JobFields) -> Iterator[str]:
    given, method = job.resolutions, job.method_spec
    if given != "auto" and (not given or list(given) != sorted(set(given))):
        yield (
            f"resolutions={','.join(map(str, given))}: give one or more rising sides in "
            "pixels, such as resolutions=24,32"
        )
    every = job.asked_resolutions
    if not every:
        return
    sides = every if method.cycles else every[-1:]
    of_method = [(key, sides) for key in _AT_EACH_RESOLUTION if method.takes(key)]
    of_cluster = [(key, every) for key in _STATED_TIMES if job.launcher.simulated]
    for key, sides in (*of_cluster, *of_method):
        values = attrgetter(key)(job)
        if isinstance(values, tuple) and len(values) not in (1, len(sides)):
            yield (
                f"{key}={','.join(map(str, values))}: {len(values)} values for "
                f"{counted(len(sides), 'resolution')}, {','.join(map(str, sides))} px: give one "
                "for each, or one for all"
            )
    batches = job.cycle.batches
    asked = method.takes("cycle.batches") and batches != "auto"
    if asked and job.global_batch not in ("auto", batches[-1]):
        yield (
            f"cycle.batches={','.join(map(str, batches))} says {batches[-1]} at {sides[-1]} "
            f"px, global_batch={job.global_batch} another: give one of them"
        )


_AT_EACH_RESOLUTION = (
    *("dual.large_batches", "cycle.batches", "cycle.shares", "cycle.dropouts", "cycle.strengths"),
)
_STATED_TIMES = ("virtual.sample_seconds", "virtual.step_seconds")


def _cycle(job: JobFields) -> Iterator[str]:
    cycle, sides, preset = job.cycle, job.asked_resolutions, job.preset
    if not job.method_spec.takes("cycle.order"):
        return
    if len(sides) == 1 and cycle.order != "fixed":
        yield (
            f"method={job.method} has one resolution, {sides[0]} px, so nothing to go through: "
            "probe with two or more, such as resolutions=24,32, or give cycle.order=fixed"
        )
    if cycle.keep and preset is None:
        yield (
            f"cycle.keep={','.join(cycle.keep)} keeps keys from cycle.preset, and there is none: "
            "give cycle.preset, or leave cycle.keep out"
        )
    lengths, rates = cycle.stage_epochs, cycle.stage_rates
    if lengths != "auto" and sum(lengths) != job.asked_epochs:
        yield (
            f"cycle.stage_epochs={','.join(map(str, lengths))} add up to {sum(lengths)}, not to "
            f"epochs={job.epochs}: give epochs={sum(lengths)}, or other stages"
        )
    lengths = preset.stage_epochs if preset and lengths == "auto" else lengths
    if rates != "auto" and lengths != "auto" and len(rates) != len(lengths):
        yield (
            f"cycle.stage_rates={','.join(map(str, rates))}: {len(rates)} rates for {len(lengths)} "
            "stages: give one for each of cycle.stage_epochs"
        )
    strengths = cycle.strengths
    if strengths != "auto" and {*strengths} != {1.0} and source_of(job.data).as_they_come:
        yield (
            f"cycle.strengths={','.join(f'{one:g}' for one in strengths)}: data={job.data} "
            "augments its images itself: leave cycle.strengths at auto"
        )


def _random_changes(job: JobFields) -> Iterator[str]:
    """Keys of random changes that nothing would follow."""
    usual = type(job).model_fields
    keys = ("crop_scale", "rotation", "zoom")
    given = {key: getattr(job, key) for key in keys if getattr(job, key) != usual[key].default}
    if source_of(job.data).as_they_come:
        for key, value in given.items():
            yield f"{key}={value:g}: data={job.data} augments its images itself: leave {key} out"
    elif "crop_scale" in given and job.augmentation != "resized-crop":
        yield (
            f"crop_scale={job.crop_scale:g} with augment={job.augment}: only resized crops have "
            "it: give augment=resized-crop, or leave crop_scale out"
        )


def is_normalization(values: Sequence[float]) -> bool:
    """Whether these are three means and three standard deviations, for pixels from 0 to 1."""
    right = len(values) == 6 and all(0 <= one <= 1 for one in values)
    return right and min(values[3:]) > 0


def _normalize(job: JobFields) -> Iterator[str]:
    given = job.normalize
    if isinstance(given, tuple) and not is_normalization(given):
        yield (
            f"normalize={as_written(given)}: give data, or six numbers for pixels from 0 to 1: the "
            "means of red, green and blue, then their standard deviations, each above 0"
        )
    if given != "auto" and source_of(job.data).as_they_come:
        yield (
            f"normalize={as_written(given)}: data={job.data} normalizes its images itself: leave "
            "normalize out"
        )


def _averaging(job: JobFields) -> Iterator[str]:
    """`dual.shares=published` weighs all workers' models by samples, so all must be there."""
    if not job.method_spec.takes("dual.shares") or job.dual.shares != "published":
        return
    if job.server.consistency != "bsp":
        yield (
            f"dual.shares=published with server.consistency={job.server.consistency}: it averages "
            "the models of all workers: give server.consistency=bsp, or leave dual.shares out"
        )
    if job.server.exchange_steps is not None:
        yield (
            f"dual.shares=published with server.exchange_steps={job.server.exchange_steps}: its "
            "rounds are an epoch together: leave server.exchange_steps out"
        )


def _address(job: JobFields) -> Iterator[str]:
    """A secret in the data's address: a job is written to its run folder and sent to services."""
    if problem := secret_in(job.data):
        yield problem


def _warmup(job: JobFields) -> Iterator[str]:
    asked, epochs = job.warmup_epochs, job.asked_epochs
    if asked != "auto" and asked > epochs:
        yield f"warmup_epochs={asked:g} is longer than epochs={epochs}: give at most {epochs}"


def _passes(job: JobFields) -> Iterator[str]:
    """Ways of computing passes that exclude each other."""
    if job.activation_checkpointing == "on" and job.batch_norm == "synchronized":
        yield (
            "activation_checkpointing=on with batch_norm=synchronized would exchange statistics "
            "once more in the backward pass: leave one of them out"
        )
    if job.batch_norm == "synchronized" and job.method_spec.served:
        yield (
            f"batch_norm=synchronized with method={job.method}: statistics are exchanged at each "
            "step, and its workers step for themselves; leave one of them out"
        )
    if job.batch_norm == "synchronized" and job.cycle.recalibrate:
        yield (
            f"cycle.recalibrate={job.cycle.recalibrate} with batch_norm=synchronized: each worker "
            "measures statistics on batches of its own number and sizes, and such layers would "
            "wait for the others in each; leave one of them out"
        )
    if job.compile == "on" and job.activation_checkpointing == "on":
        yield (
            "compile=on with activation_checkpointing=on: blocks that are computed again are not "
            "compiled; leave one of them out"
        )
    others = (("compile", "on"), ("activation_checkpointing", "on"), ("batch_norm", "synchronized"))
    for key, value in others:
        if job.cuda_graphs == "on" and getattr(job, key) == value:
            yield (
                f"cuda_graphs=on with {key}={value}: such passes are not replayed; leave one of "
                "them out"
            )


def _body_rate(job: JobFields) -> Iterator[str]:
    if job.body_rate != 1 and ALL_BUT_HEAD in job.frozen:
        yield (
            f"body_rate={job.body_rate:g} with frozen={ALL_BUT_HEAD}: only the last layer is "
            "trained; leave one of them out"
        )


def _average_weights(job: JobFields) -> Iterator[str]:
    if job.average_weights == "on" and not job.can_average:
        what = f"launch={job.launch}" if job.launcher.simulated else f"method={job.method}"
        yield (
            f"average_weights=on with {what}: only workers that exchange gradients average their "
            "weights; leave it out"
        )


def _bounds(job: JobFields) -> Iterator[str]:
    ags, least, most = job.ags, job.least_local_batch or 1, job.most_local_batch
    if ags.factors != "off" and ags.most != "auto" and ags.least > ags.most:
        yield f"ags.least={ags.least:g} is more than ags.most={ags.most:g}: give a smaller one"
    if job.method_spec.takes("least_local_batch") and most is not None and least > most:
        yield f"least_local_batch={least} is more than most_local_batch={most}: give a smaller one"


def _batch_growth(job: JobFields) -> Iterator[str]:
    """Keys that follow gradient noise, too: they make up for a batch that this one would change."""
    if job.batch_growth == "off":
        return
    others = {"ags.mode": job.ags.factors != "off", "scaling": job.rate_scaling == "gain"}
    for key, follows in others.items():
        if follows:
            yield (
                f"batch_growth={job.batch_growth} with {key}={attrgetter(key)(job)}: both follow "
                "the gradient noise; leave one of them out"
            )


def _open_method(job: JobFields) -> Iterator[str]:
    """Keys of particular methods where the plan chooses the method."""
    if job.method != "auto":
        return
    usual = JobFields()
    for key, methods in method_keys().items():
        value = attrgetter(key)(job)
        if value != attrgetter(key)(usual):
            yield (
                f"{key}={as_written(value)} is for method={' or '.join(methods)} and method=auto "
                f"leaves the method to the plan: give method={methods[0]}, or leave {key} out"
            )


def as_written(value: object) -> str:
    """A key's value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_RULES: tuple[Callable[[JobFields], Iterator[str]], ...] = (
    *(_address, _resolutions, _workers, _extra_time, _averaging, _warmup, _random_changes),
    *(_normalize, _passes, _average_weights, _bounds, _body_rate, _batch_growth),
    *(lambda job: job.goal.conflicts(), _open_method, _cycle),
)
