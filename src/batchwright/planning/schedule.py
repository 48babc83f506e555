"""A plan's learning rate against the epochs, for tables, figures and the first lines of a run.

batchwright schedule PLAN.json --figure rate.png
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, isclose

from batchwright.algorithms.batch_size import steps_per_epoch
from batchwright.algorithms.learning_rate import drops, raises_nothing, rate_factor, scaled_rate
from batchwright.planning.gradient_scaling import doubts as scaling_doubts
from batchwright.planning.gradient_scaling import largest_rate
from batchwright.planning.validation import least_local
from batchwright.records import Plan, RateSchedule, SchedulePoint, ScheduleRow
from batchwright.records.registries.optimizers import OPTIMIZERS

POINTS = 240
"""Points of a schedule, spread evenly; each change of the schedule adds some."""

_BEFORE = 1e-9  # share of all epochs: the distance of a point just before a change
_Sized = tuple[ScheduleRow, int]  # a row, and its global batch
_KEPT_REASONS = ("learning rate", "warm-up", "decay", "global batch", "stages", "preset")


def rate_schedule(plan: Plan) -> RateSchedule:
    """The learning rate of a plan against epochs.

    The points lie on a smooth curve. The rate of a step is the curve's at the samples that were
    seen before the step.
    """
    rule = plan.learning_rate
    rows, batch = _rows(plan), _top_batch(plan)
    sized = [(row, row.global_batch_size) for row in rows]  # a sum over all workers, made once
    meant = scaled_rate(rule.base, rule.base_batch, batch, rule.scaling)
    until = min(rule.warmup_epochs, float(plan.epochs))
    return RateSchedule(
        name=f"{plan.network.name} on {plan.data.name}",
        rule=rule,
        # The batch of the highest resolution, if the peak is the base rate scaled to that batch.
        scaled_to=batch if isclose(meant, rule.peak, rel_tol=1e-3) else None,
        served=plan.server is not None,
        ags=plan.ags,
        epochs=plan.epochs,
        samples_per_epoch=plan.data.train_samples,
        warmup_steps=_steps_before(sized, until, plan.data.train_samples),
        rows=rows,
        points=_points(plan, sized),
        reasons=tuple(one for one in plan.reasons if one.choice in _KEPT_REASONS),
        doubts=_doubts(plan),
    )


def _rows(plan: Plan) -> tuple[ScheduleRow, ...]:
    ends = list(accumulate(stage.epochs for stage in plan.stages))
    base, least = plan.learning_rate.base_batch, least_local(plan.network)
    found = []
    for stage, end in zip(plan.stages, ends, strict=True):
        batch, steps = stage.global_batch_size, None
        if plan.server is None:
            samples = plan.data.train_samples
            steps = max(1, steps_per_epoch(samples, batch, least * stage.workers)[0])
        gains = plan.learning_rate.scaling == "gain" and plan.server is None
        step = batch if plan.server is None else max(stage.local_batch_sizes)
        most_gain = max(1.0, batch / base) if gains else 1.0
        together = most_gain
        if plan.ags and OPTIMIZERS[plan.update].follows_gradients:
            together, _ = largest_rate(plan.ags, plan.learning_rate, 1.0, step)
        found.append(
            ScheduleRow(
                start=end - stage.epochs,
                end=end,
                rate_stage=stage.rate_stage,
                resolution=stage.resolution,
                local_batch_sizes=stage.local_batch_sizes,
                micro_batch_size=stage.micro_batch_size,
                steps_per_epoch=steps,
                most_gain=most_gain,
                most_factor=together / most_gain,
            )
        )
    return tuple(found)


def _top_batch(plan: Plan) -> int:
    """Samples of a step at the highest resolution; under a server, of a large-batch worker."""
    top = max(plan.stages, key=lambda stage: stage.resolution)
    return top.global_batch_size if plan.server is None else max(top.local_batch_sizes)


def _steps_before(rows: Sequence[_Sized], epoch: float, samples: int) -> int | None:
    """Number of updates that begin before ``epoch`` epochs have been seen; `None` with a server."""
    steps = 0
    for row, batch in rows:
        if row.steps_per_epoch is None:
            return None
        if epoch <= row.start:
            break
        whole, part = divmod(min(epoch, row.end) - row.start, 1)
        # Rounding may leave the quotient a little above a whole number of steps.
        begun = ceil(part * samples / batch - 1e-6)
        steps += int(whole) * row.steps_per_epoch + min(begun, row.steps_per_epoch)
    return steps


def _points(plan: Plan, rows: Sequence[_Sized]) -> tuple[SchedulePoint, ...]:
    happens, samples = _happens(plan, [row for row, _ in rows]), plan.data.train_samples
    found: list[SchedulePoint] = []
    for start, end in pairwise(sorted(happens)):
        row = next(at for at, (one, _) in enumerate(rows) if one.start <= start < one.end)
        first = _point(plan, rows, row, start, happens[start])
        if found and isclose(found[-1].learning_rate, first.learning_rate, rel_tol=1e-6):
            found.pop()  # the rate does not jump here, so one point is enough
        found.append(first)
        count = ceil(POINTS * (end - start) / plan.epochs)
        between = (start + (end - start) * n / count for n in range(1, count))
        found += [_point(plan, rows, row, epoch) for epoch in between]
        last = end if end == plan.epochs else max(end - _BEFORE * plan.epochs, start)
        step = _steps_before(rows, end, samples)
        place = {"epoch": end, "samples": round(end * samples), "step": step}
        found.append(_point(plan, rows, row, last).model_copy(update=place))
    found[-1] = found[-1].model_copy(update={"what": happens[float(plan.epochs)]})
    return tuple(found)


def _happens(plan: Plan, rows: Sequence[ScheduleRow]) -> dict[float, str]:
    """Changes of the schedule, in words, by the epochs after which they come."""
    rule, last = plan.learning_rate, float(plan.epochs)
    found: dict[float, list[str]] = {0.0: ["start"]}
    for before, row in pairwise(rows):
        words = found.setdefault(float(row.start), [])
        if row.rate_stage != before.rate_stage:
            words.append(f"stage {row.rate_stage + 1}")
        if row.resolution != before.resolution:
            words.append(f"{row.resolution} px")
        if not words:
            words.append("another batch")
    if 0 < rule.warmup_epochs <= last:
        top = "peak" if rule.decay == "one-cycle" else "end of warm-up"
        found.setdefault(rule.warmup_epochs, []).append(top)
    for place in drops(rule, plan.epochs):
        if place >= rule.warmup_epochs:  # earlier ones have no effect until the warm-up ends
            found.setdefault(place, []).append("a tenth")
    found.setdefault(last, []).append("end")
    return {epoch: ", ".join(words) for epoch, words in found.items()}


def _point(
    plan: Plan, rows: Sequence[_Sized], row: int, epoch: float, what: str = ""
) -> SchedulePoint:
    samples = plan.data.train_samples
    factor = rate_factor(
        epoch * samples, rule=plan.learning_rate, samples_per_epoch=samples, epochs=plan.epochs
    )
    return SchedulePoint(
        epoch=epoch,
        samples=round(epoch * samples),
        step=_steps_before(rows, epoch, samples),
        learning_rate=plan.stages[row].learning_rate * factor,
        row=row,
        what=what,
    )


def _doubts(plan: Plan) -> tuple[str, ...]:
    """Warnings about what the job asks for and may not mean; choices of the plan have reasons."""
    rule, job, served = plan.learning_rate, plan.job, plan.server is not None
    given = job.global_batch != "auto" or (served and isinstance(job.dual.large_batches, tuple))
    asked = given and job.learning_rate != "auto"  # otherwise the plan fits one to the other
    batch = _top_batch(plan)
    found = []
    if asked and batch < rule.base_batch and rule.scaling in ("linear", "sqrt"):
        what = f"a local batch of {batch}" if served else f"global_batch={batch}"
        found.append(
            f"{what} is below base_batch={rule.base_batch}: the rate is scaled down from "
            f"{rule.base:g} to {rule.peak:.3g}; give base_batch= the batch that "
            f"learning_rate={rule.base:g} was found with"
        )
    if rule.warmup_epochs > plan.epochs:  # a plan written by hand
        found.append(
            f"the warm-up of {rule.warmup_epochs:g} epochs does not end within the plan's "
            f"{plan.epochs}: the rate stays below {rule.peak:.3g}"
        )
    largest = max(stage.global_batch_size for stage in plan.stages)
    if rule.scaling == "gain" and largest <= rule.base_batch:
        found.append(
            f"scaling=gain has nothing to gain: the global batch {largest} is not above "
            f"base_batch={rule.base_batch}"
        )
    if raises_nothing(rule):
        found.append(
            f"warmup_epochs={rule.warmup_epochs:g} raises nothing: warm-up begins at the rate of "
            f"base_batch, {rule.base:g}, and with scaling={rule.scaling} the peak is no higher, so "
            f"the rate stays at {rule.peak:.3g} for so long; warmup_start=0.01 begins at a "
            "hundredth of it"
        )
    return (*found, *scaling_doubts(plan, least_local(plan.network)))
