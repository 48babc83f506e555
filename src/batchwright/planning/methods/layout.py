"""Plans of several rows or two groups of workers: puts what a method lays out into the plan.

The cluster and the batch at the highest resolution are chosen as for `plain`. The registry names
the function that lays out the rows of a method, and `time_models` gives their times, measured or
stated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pkgutil import resolve_name

from batchwright.errors import PlanError
from batchwright.planning.candidates.progress import fewest_epochs
from batchwright.planning.candidates.table import SECONDS_PER_HOUR
from batchwright.planning.chosen import Chosen
from batchwright.planning.methods.time_models import Measured, Stated
from batchwright.planning.methods.two_groups import Level
from batchwright.planning.resolution import Schedule, cycle_batches
from batchwright.records import (
    DataFacts,
    Estimate,
    Job,
    LearningRateRule,
    Reason,
    ServerRule,
    Source,
    Stage,
)
from batchwright.records.text.formatting import between, counted, significant


@dataclass(frozen=True)
class Layout:
    """The stages of a plan, with its learning rate and the rule of its server."""

    stages: tuple[Stage, ...]  # the plan's table
    rule: LearningRateRule  # the learning rate
    reasons: tuple[Reason, ...] = ()  # reasons for what the method decides
    server: ServerRule | None = None  # the rule of the parameter server; `None` without one
    train_seconds: Estimate | None = None  # of the whole training; `None`: not known


def searched(job: Job, data: DataFacts) -> Job:
    """The job for which candidates are searched: with the global batch of the top resolution."""
    batches = cycle_batches(job, data)
    return job if batches is None else job.model_copy(update={"global_batch": batches.value[-1]})


def laid_out(
    job: Job, rule: LearningRateRule, levels: Sequence[Level], schedule: Schedule | None = None
) -> tuple[Stage, ...]:
    """The plan's table: a row for each sub-stage of the schedule, or one row without a schedule.

    Args:
        job: Resolved.
        rule: The learning rate.
        levels: Fields of a row at each resolution, low to high.
        schedule: The schedule of resolutions; `None`: one resolution throughout.
    """
    usual = {"dropout": job.dropout, "augmentation": job.augmentation}
    if schedule is None:
        (level,) = levels
        return (Stage(epochs=job.epochs, learning_rate=rule.peak, **usual, **level),)
    for rate in (rule.peak * one for one in schedule.rates):
        if not 0 < rate < inf:
            raise PlanError(
                f"a stage's rate comes to {rate:g}, with a first one of {rule.peak:g}: give "
                "another learning_rate, or other cycle.stage_rates"
            )
    return tuple(
        Stage(
            epochs=part.epochs,
            learning_rate=rule.peak * schedule.rates[part.rate_stage],
            augmentation_strength=schedule.strengths[part.level],
            rate_stage=part.rate_stage,
            **(usual | {"dropout": schedule.dropouts[part.level]}),
            **levels[part.level],
        )
        for part in schedule.parts
    )


def lay_out(job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...] = ()) -> Layout:
    """The plan's table, as the job's method lays it out, with all reasons.

    Args:
        job: Resolved, its workers settled.
        times: Step times, and what was chosen for `plain`.
        optimizer: The reason for the optimizer, if it is to stand beside the rate's.

    Raises:
        PlanError: No pair of batches exists, or a limit is missed.
    """
    made, total = _laid_out_by_method(job, times, optimizer)
    # All rows together may miss a deadline or a cost that `plain` keeps.
    misses = _misses(job, times, total)
    if misses:
        limit, text = next(iter(misses.items()))
        advice = ", or ".join([f"raise {limit}", *_kept_by(job, times, limit)])
        raise PlanError(f"method={job.method} {text}: {advice}")
    found = [*method_reason(job), *made.reasons]
    known = all(stage.predicted_epoch_seconds is not None for stage in made.stages)
    if known:
        simulated = " of the simulated clock" if job.launcher.simulated else ""
        epochs = counted(sum(stage.epochs for stage in made.stages), "epoch")
        why = f"{epochs}, without evaluations, whose time is not known."
        if times.measured:
            why = f"{epochs}, and the evaluations among them."
        if job.goal.deadline is not None:
            why += f" goal.deadline={job.goal.deadline:g} s holds for the upper end."
        value = between(total, f" s{simulated}")
        found.append(Chosen(value, why, "predicted").reason("training time"))
    found += times.losses.reasons(total) if total.value else ()
    reasons = (*found, *link_reason(job))
    return replace(made, reasons=reasons, train_seconds=total if known else None)


def _laid_out_by_method(
    job: Job, times: Measured | Stated, optimizer: tuple[Reason, ...] = ()
) -> tuple[Layout, Estimate]:
    """What the method lays out, and the seconds of the whole training, losses included."""
    made: Layout = resolve_name(job.method_spec.plan)(job, times, optimizer)
    other = times.other_seconds(job.epochs)
    rows = [(stage.epochs, stage.predicted_epoch_seconds) for stage in made.stages]
    ends = {
        end: other + sum(n * getattr(one, end) for n, one in rows if one is not None)
        for end in ("value", "low", "high")
    }
    return made, Estimate(**ends).mapped(times.losses.seconds)


def _misses(job: Job, times: Measured | Stated, total: Estimate) -> dict[str, str]:
    """The limits that a training of ``total`` seconds may miss, each with what it may take."""
    cost = (times.hourly or 0.0) * total.high / SECONDS_PER_HOUR
    found = {}
    for key, verb, value, unit in (
        ("deadline", "take", total.high, " s"),
        ("max_cost", "cost", cost, ""),
    ):
        most = getattr(job.goal, key)
        if most is not None and value > most:
            found[f"goal.{key}"] = f"may {verb} {significant(value, 4)}{unit}, goal.{key}={most:g}"
    return found


def _kept_by(job: Job, times: Measured | Stated, limit: str) -> Iterator[str]:
    """Changes of the job that keep a limit, in words: each change is laid out to check it."""

    def missed(**changes: object) -> bool:
        other = job.model_copy(update=changes)
        try:
            return limit in _misses(other, times, _laid_out_by_method(other, times)[1])
        except PlanError:
            return True

    by_epoch, fewest = job.cycle.model_copy(update={"stage_epochs": "auto"}), fewest_epochs(job)
    shorter = range(fewest, job.epochs)
    if fits := bisect_left(shorter, True, key=lambda n: missed(epochs=n, cycle=by_epoch)):
        evenly = " and cycle.stage_epochs=auto" * (job.method_spec.cycles and job.cycle != by_epoch)
        yield f"give epochs={shorter[fits - 1]}{' or less' * (fits > 1)}{evenly}"
    if not missed(dual=job.dual.model_copy(update={"extra_time": "auto"})):
        yield "leave dual.extra_time to the plan"


# -------------------------------------------------------------------------------------- in words


def method_reason(job: Job) -> tuple[Reason, ...]:
    """The reason that describes the method; empty for `plain`."""
    spec = job.method_spec
    why = resolve_name(spec.reason)(job) if spec.reason else spec.why
    if not why:
        return ()
    source: Source = "published" if spec.reference else "asked"
    return (Chosen(spec.name, f"Asked for. {why}", source, spec.reference).reason("method"),)


def link_reason(job: Job) -> tuple[Reason, ...]:
    """The reason for the link of a virtual cluster; empty elsewhere."""
    if not job.launcher.simulated or job.link.latency is None or job.link.bandwidth is None:
        return ()
    value = f"{1e3 * job.link.latency:g} ms and {job.link.bandwidth / 1e6:g} MB/s"
    why = (
        "Of the virtual cluster, whose times are simulated; unless link.latency and "
        "link.bandwidth say otherwise, Ethernet of 1 Gb/s as in the dual-batch paper."
    )
    return (Chosen(value, why, "assumed").reason("link"),)
