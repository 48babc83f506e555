"""Rows of the plan: what holds at each resolution, laid out over the epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from batchwright.algorithms.dual_batch import update_factor
from batchwright.errors import PlanError
from batchwright.planning.methods.groups import Groups, Pace, grouped, most_extra_time
from batchwright.planning.resolution import Schedule, per_resolution, preset_of
from batchwright.records import Estimate, Job, LearningRateRule, ServerRule, Stage

USUAL_EXTRA_TIME, MOST_EXTRA_TIME = 1.05, 1.2
"""Of a round, where the job leaves it open: the paper's smaller value, and as far as a deadline may
stretch it (the paper goes to 1.1)."""

_SHORTENINGS = 30  # of the extra time, until the deadline is kept

SMALL_PART = 0.75
"""Of the workers, with the small batch where the job leaves it open: the best in table 5 there."""

SMALL_ENOUGH = 0.5
"""Of the large batch, where a deadline decides how many workers have the small one."""

Level = Mapping[str, Any]
"""Fields of a `Stage` that hold at one resolution."""


def laid_out(
    job: Job, rule: LearningRateRule, levels: Sequence[Level], schedule: Schedule | None
) -> tuple[Stage, ...]:
    """The table: each sub-stage of the schedule with what holds at its resolution.

    Args:
        job: Resolved.
        rule: Its peak is the first stage's rate.
        levels: For each resolution of the schedule, low to high; one without a schedule.
        schedule: Stages and resolutions; `None`: one row over all epochs.
    """
    if schedule is None:
        (level,) = levels
        return (
            Stage(
                epochs=job.epochs,
                learning_rate=rule.peak,
                dropout=job.dropout,
                augmentation=job.augmentation,
                **level,
            ),
        )
    return tuple(
        Stage(
            epochs=part.epochs,
            learning_rate=rule.peak * schedule.rates[part.rate_stage],
            dropout=schedule.dropouts[part.level],
            augmentation=job.augmentation,
            augmentation_strength=schedule.strengths[part.level],
            rate_stage=part.rate_stage,
            **levels[part.level],
        )
        for part in schedule.parts
    )


# ------------------------------------------------------------------------------------ two groups


@dataclass(frozen=True)
class Served:
    """Both groups at each resolution, and what the server does with their models.

    Attributes:
        rule: For the plan's header.
        large_batches: At each resolution.
        groups: The same.
        why_time: Where the extra time comes from: ``asked``, ``usual``, ``deadline`` or ``least``.
    """

    rule: ServerRule
    large_batches: tuple[int, ...]
    groups: tuple[Groups, ...]
    why_time: str


def usual_small_workers(workers: int) -> int:
    """How many train with the small batch where nothing is asked; one worker makes no groups."""
    return max(1, floor(SMALL_PART * workers)) if workers > 1 else 0


def small_workers_of(job: Job, workers: int) -> int:
    """How many workers train with the small batch.

    Raises:
        PlanError: More than there are.
    """
    asked = job.dual.small_workers
    if asked == "auto":
        return usual_small_workers(workers)
    if asked > workers:
        raise PlanError(f"dual.small_workers={asked} of workers={workers}: give at most {workers}")
    return asked


def large_batches_of(
    job: Job,
    sides: Sequence[int],
    top: int,
    share: float,
    fitting: Callable[[int], int | None],
) -> tuple[tuple[int, ...], str]:
    """Local batch of a large-batch worker at each resolution, and where it comes from.

    Args:
        job: Resolved.
        sides: Resolutions, low to high.
        top: What `plain` would choose at the highest.
        share: Samples of one worker in a round with large batches alone.
        fitting: Most samples that fit the memory, by resolution; `None`: not known.

    Returns:
        The batches, and ``asked``, ``published``, ``memory`` (larger below the highest) or ``one``.

    Raises:
        PlanError: There are as many as neither resolutions nor one.
    """
    asked = job.dual.large_batches
    if asked != "auto":
        return per_resolution("dual.large_batches", asked, sides), "asked"
    most = max(top, floor(share / job.goal.least_steps))
    rooms, preset = [fitting(side) for side in sides], preset_of(job)
    suits = preset is not None and tuple(sides) == preset.resolutions
    if preset is not None and suits and job.global_batch == "auto":
        pairs = zip(preset.batches, rooms, strict=True)
        if all(batch <= most and (room is None or batch <= room) for batch, room in pairs):
            return preset.batches, "published"
    if not rooms[-1] or len(sides) == 1:
        return (top,) * len(sides), "one"
    grown = [max(top, min(most, top * (room or 0) // rooms[-1])) for room in rooms[:-1]]
    return (*grown, top), "memory"


def served_in_time(job: Job, pace: Pace, workers: int, **fixed: Any) -> Served:
    """Both groups, with as many small-batch workers as a deadline leaves time for.

    Where the job leaves the number open and the fixed time of a step differs from worker to worker:
    the number that makes the most updates in the time, as accuracy follows them. Else the usual.

    A short time makes the small batch of many workers nearly as large as the other. So where the
    job states a deadline and leaves the number open: as many of the usual part as have a batch of
    at most half the large one in that time, as all published ones of that part have.

    Args:
        job: Resolved.
        pace: How long steps take.
        workers: How many there are.
        fixed: As for `served`.

    Raises:
        PlanError: As for `served`.
    """
    usual = small_workers_of(job, workers)
    auto = job.dual.small_workers == "auto"
    if auto and pace.unlike:
        return _most_updates(job, pace, workers, **fixed)
    first = served(job, pace, small_workers=usual, **fixed)
    if not auto or job.goal.deadline is None:
        return first
    for count in range(usual, 0, -1):
        try:
            found = first if count == usual else served(job, pace, small_workers=count, **fixed)
        except PlanError:
            continue
        if (found.groups[-1].pair.small_batch or 0) <= SMALL_ENOUGH * found.large_batches[-1]:
            return found
    return first


def _most_updates(job: Job, pace: Pace, workers: int, **fixed: Any) -> Served:
    """Both groups, with the number of small-batch workers that makes the most updates."""
    best: Served | None = None
    for count in range(1, workers + 1):
        try:
            found = served(job, pace, small_workers=count, **fixed)
        except PlanError:
            if count == workers and best is None:
                raise
            continue
        if best is None or found.groups[-1].updates > best.groups[-1].updates:
            best = found
    assert best is not None  # noqa: S101 - the last one is there, or has raised
    return best


def served(
    job: Job,
    pace: Pace,
    *,
    sides: Sequence[int],
    large_batches: Sequence[int],
    samples: int,
    small_workers: int,
    epochs: Sequence[int],
    other_seconds: float,
) -> Served:
    """Both groups at each resolution.

    Args:
        job: Resolved.
        pace: How long steps take.
        sides: Resolutions, low to high.
        large_batches: Local batch of a large-batch worker at each.
        samples: Training samples of an epoch.
        small_workers: How many small-batch workers there are.
        epochs: Trained at each resolution.
        other_seconds: Of the whole training, evaluation that counts for the deadline.

    Raises:
        PlanError: No pair exists, or the deadline leaves no time.
    """
    levels = list(zip(sides, large_batches, strict=True))

    def groups_at(extra_time: float) -> tuple[Groups, ...]:
        return tuple(
            grouped(
                pace,
                side,
                large,
                small_workers=small_workers,
                extra_time=extra_time,
                samples=samples,
                exchange_steps=job.server.exchange_steps,
            )
            for side, large in levels
        )

    extra, why = 1.0, "one"
    if small_workers and job.dual.extra_time != "auto":
        extra, why = job.dual.extra_time, "asked"
    elif small_workers:
        extra, why = USUAL_EXTRA_TIME, "usual"
        if job.goal.deadline is not None:
            extra, why = MOST_EXTRA_TIME, "deadline"
        feasible = min(
            most_extra_time(pace, side, large, small_workers=small_workers, most=extra)
            for side, large in levels
        )
        if feasible < extra:
            extra, why = floor(1e4 * feasible) / 1e4, "least"
    groups = groups_at(extra)
    if job.goal.deadline is not None and why in ("deadline", "least"):
        allowed = job.goal.deadline - other_seconds
        highs = [pace.spread(side, large)[1] for side, large in levels]
        for _ in range(_SHORTENINGS):
            rounds = zip(epochs, groups, highs, strict=True)
            over = sum(n * one.round_seconds * high for n, one, high in rounds) / allowed
            if 0 < over <= 1 or extra == 1:
                break
            # A round is nearly in proportion to it: its last step is not a whole one.
            shorter = floor(1e4 * extra / over) / 1e4 if over > 0 else 1.0
            extra, why = max(1.0, min(shorter, extra - 1e-4)), "deadline"
            groups = groups_at(extra)
    return Served(_rule(job, small_workers, extra), tuple(large_batches), groups, why)


def _rule(job: Job, small_workers: int, extra_time: float) -> ServerRule:
    server = job.server
    return ServerRule(
        consistency=server.consistency,
        staleness=server.staleness if server.consistency == "ssp" else None,
        merge=server.merge,
        update_factor=server.update_factor,
        exchange_steps=server.exchange_steps,
        momentum=server.momentum,
        small_workers=small_workers,
        extra_time=extra_time,
    )


def served_level(
    groups: Groups,
    rule: ServerRule,
    side: int,
    *,
    micro_batch: int,
    ends: tuple[float, float],
    peak: Estimate | None,
) -> Level:
    """What holds at one resolution under a parameter server.

    Args:
        groups: Both groups.
        rule: How update factors are made.
        side: Resolution, in pixels.
        micro_batch: Most samples in one forward pass.
        ends: Of the interval of the round time as shares of it.
        peak: Peak bytes of a large-batch worker; `None` where nothing was measured.
    """
    small = rule.small_workers
    large = len(groups.samples) - small
    ratio = groups.samples_ratio(rule.exchange_steps)
    factor = update_factor(ratio, rule.update_factor) if large else 1.0
    seconds = groups.round_seconds
    return {
        "resolution": side,
        "local_batch_sizes": groups.local_batch_sizes,
        "micro_batch_size": micro_batch,
        "samples_per_round": groups.samples,
        "update_factors": (1.0,) * large + (factor,) * small,
        "sample_seconds": groups.sample_seconds,
        "step_seconds": groups.step_seconds,
        "predicted_epoch_seconds": Estimate(
            value=seconds, low=ends[0] * seconds, high=ends[1] * seconds
        ),
        "predicted_bytes": peak,
    }
