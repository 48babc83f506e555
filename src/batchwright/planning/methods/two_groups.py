"""Two groups of workers at each resolution: their batches, numbers, round times and shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import Any

from batchwright.algorithms.dual_batch import update_factor
from batchwright.errors import PlanError
from batchwright.planning.chosen import Chosen
from batchwright.planning.methods.groups import (
    Groups,
    Pace,
    grouped,
    most_extra_time,
    shown_relative,
)
from batchwright.planning.resolution import per_resolution
from batchwright.records import Estimate, Job, ServerRule
from batchwright.records.registries.methods import PAPER

USUAL_EXTRA_TIME, MAX_EXTRA_TIME = 1.05, 1.2
"""Time of a round over that with large batches alone, where the job leaves it open: the smaller of
the paper's values, and the largest value with a deadline (the paper goes to 1.1)."""

SMALL_PART = 0.75
"""Share of the workers that get the small batch by default: the best in table 5 of the paper."""

SMALL_ENOUGH = 0.5
"""Largest small batch, as a share of the large one, where a deadline decides how many workers have
it."""

_MOST_BY_ONE = 20_000  # workers, where each is computed by itself
# Numbers of small-batch workers that are compared, each worker by worker, and between two of them.
_MOST_COUNTS = 100
_SHORTENINGS = 30  # most times that the extra time is shortened to keep a deadline

Level = Mapping[str, Any]
"""Fields of a `Stage` that hold at one resolution."""


@dataclass(frozen=True)
class Served:
    """Both groups of workers at each resolution, and the rule of the server."""

    rule: ServerRule  # the rule of the server, for the plan's header
    # Large local batch at each resolution, in samples, and the reason.
    large_batches: Chosen[tuple[int, ...]]
    groups: tuple[Groups, ...]  # both groups at each resolution, low to high
    small_workers: Chosen[int]  # number of workers with the small batch, and the reason
    extra_time: Chosen[float]  # time of a round over that with large batches alone, and the reason


def large_batches_of(
    job: Job,
    sides: Sequence[int],
    top: Chosen[int],
    share: float,
    fitting: Callable[[int], int | None],
) -> Chosen[tuple[int, ...]]:
    """Local batch of a large-batch worker at each resolution.

    Args:
        job: Resolved.
        sides: Resolutions, low to high, in pixels.
        top: The batch at the highest resolution, where the job leaves it open, and the reason.
        share: Samples of one worker in a round with large batches alone.
        fitting: resolution -> most samples in one pass that fit the memory; `None`: not known.
    """
    asked, usual = job.dual.large_batches, top.value
    if isinstance(asked, tuple):
        return Chosen(per_resolution(asked, sides), "Asked for.", "asked")
    rooms, preset = [fitting(side) for side in sides], job.preset
    if asked == "memory":
        return _largest_that_fit(job, sides, share, rooms)
    most = max(usual, floor(share / job.goal.least_steps))
    suits = preset is not None and tuple(sides) == preset.resolutions
    if preset is not None and suits and job.global_batch == "auto" and asked == "auto":
        pairs = zip(preset.batches, rooms, strict=True)
        if all(batch <= most and (room is None or batch <= room) for batch, room in pairs):
            why = "As published; it fits the memory and the samples of a round."
            return Chosen(preset.batches, why, "published", PAPER)
    if not rooms[-1] or len(sides) == 1:
        return Chosen((usual,) * len(sides), f"{top.why}{_NOT_THE_LARGEST}", top.source)
    grown = [max(usual, min(most, usual * (room or 0) // rooms[-1])) for room in rooms[:-1]]
    why = (
        f"{top.why} Lower resolutions have larger batches, by as much as more images fit the "
        f"memory, with at least goal.least_steps={job.goal.least_steps} steps a round."
        f"{_NOT_THE_LARGEST}"
    )
    return Chosen((*grown, usual), why, "predicted")


_NOT_THE_LARGEST = (
    " The paper takes the largest batch that fits (dual.large_batches=memory), which leaves a "
    "round few steps where the memory is large."
)


def _largest_that_fit(
    job: Job, sides: Sequence[int], share: float, rooms: Sequence[int | None]
) -> Chosen[tuple[int, ...]]:
    """As published: the largest batches that fit the memory and leave a round enough steps."""
    known = [room for room in rooms if room]
    if len(known) < len(rooms):
        raise PlanError(
            "dual.large_batches=memory: no memory was measured, so nothing tells what fits: probe "
            "first, give batches, such as dual.large_batches=512, or dual.large_batches=knee, "
            "which goes by time"
        )
    most = floor(share / job.goal.least_steps)
    why = f"The largest that fits the memory, as published: {at_each(known, sides)}."
    if max(known) > most:
        why += (
            f" A round has {share:.0f} samples for a worker, so goal.least_steps="
            f"{job.goal.least_steps} allows at most {most}."
        )
    if most < 1:
        raise PlanError(
            f"goal.least_steps={job.goal.least_steps}: a worker has {share:.0f} samples in a "
            "round, which leaves no batch: give fewer steps, or fewer workers"
        )
    return Chosen(tuple(min(room, most) for room in known), why, "predicted", PAPER)


def refuse_too_many(method: str, workers: int) -> None:
    """Refuse more workers than can be gone through one by one.

    Raises:
        PlanError: There are too many.
    """
    if workers > _MOST_BY_ONE:
        raise PlanError(
            f"workers={workers}: with method={method} each worker is computed by itself, which "
            f"would take too long: give {_MOST_BY_ONE} or less"
        )


def served_in_time(job: Job, pace: Pace, **fixed: Any) -> Served:
    """Both groups, with the number of small-batch workers chosen where the job leaves it open.

    Usually three quarters of the workers have the small batch. Where the fixed time of a step
    differs between workers, it is the number with the most updates in a round, as accuracy follows
    the updates. With a deadline, little extra time makes the small batch of many workers nearly as
    large as the other: then it is the largest number with a small batch of at most half the large
    one, as all published ones are.

    Args:
        job: Resolved.
        pace: How long steps take.
        fixed: Further arguments of `served`.

    Raises:
        PlanError: As for `served`.
    """

    def with_small(count: int, *why: Any) -> Served:
        return served(job, pace, small_workers=Chosen(count, *why), **fixed)

    asked, workers = job.dual.small_workers, len(pace.workers)
    if asked != "auto":
        return with_small(asked, "Asked for.", "asked")
    if workers == 1:
        return with_small(0, "One worker makes no two groups.", "assumed")
    if pace.unlike:
        return _most_updates(pace, with_small)
    usual = max(1, floor(SMALL_PART * workers))
    first = with_small(
        usual,
        "Three quarters of the workers, rounded down: in the paper's table 5 (CIFAR-100, four "
        "workers, single runs) three of four were most accurate, 70.6 % against 67.8 % with large "
        "batches alone at 1.05 times the time. Few, very small batches hurt in its authors' logs.",
        "published",
        PAPER,
    )

    def small_enough(found: Served) -> bool:
        small = found.groups[-1].pair.small_batch or 0
        return small <= SMALL_ENOUGH * found.large_batches.value[-1]

    if job.goal.deadline is None or small_enough(first):
        return first
    why = (
        "The most workers whose small batch, in the time that goal.deadline leaves, is at most "
        "half the large one; with three quarters of the workers it would be larger."
    )

    def largest(falling: range) -> Served | None:
        for count in falling:
            with suppress(PlanError):
                found = with_small(count, why, "predicted")
                if small_enough(found):
                    return found
        return None

    step = max(1, ceil((usual - 1) / _MOST_COUNTS))
    found = largest(range(usual - 1, 0, -step))
    below = found.small_workers.value if found else 0
    return largest(range(min(below + step, usual) - 1, below, -1)) or found or first


def _spaced(least: int, most: int) -> list[int]:
    """Numbers from ``least``, 1 or more, to ``most``: all, or up to `_MOST_COUNTS` in equal ratios.

    The best number is often one of the smallest, where the next one differs most from it.
    """
    if most - least < _MOST_COUNTS:
        return list(range(least, most + 1))
    ratio = (most / least) ** (1 / (_MOST_COUNTS - 1))
    return sorted({round(least * ratio**place) for place in range(_MOST_COUNTS)})


def _most_updates(pace: Pace, with_small: Callable[..., Served]) -> Served:
    """Both groups, with the number of small-batch workers that has the most updates in a round."""
    why = (
        "The number with the most updates a round in that time, as the fixed time of a step "
        f"differs from worker to worker ({shown_relative(pace.overheads)})."
    )
    workers = len(pace.workers)
    counts = _spaced(1, workers)
    if len(counts) < workers:
        why += f" Of {workers:,} numbers {len(counts)} were compared, and those around the best."

    def most(counts: Sequence[int], best: Served | None) -> Served | None:
        for count in counts:
            try:
                found = with_small(count, why, "predicted")
            except PlanError:
                if count == workers and best is None:
                    raise
                continue
            if best is None or found.groups[-1].updates > best.groups[-1].updates:
                best = found
        return best

    best = most(counts, None)
    assert best is not None  # noqa: S101 - some number had a pair, or the last one has raised
    at = counts.index(best.small_workers.value)
    around = [0, *counts, workers + 1][at : at + 3]
    near = [count for low, high in pairwise(around) for count in _spaced(low + 1, high - 1)]
    return most(near, best) or best


def served(
    job: Job,
    pace: Pace,
    *,
    sides: Sequence[int],
    large_batches: Chosen[tuple[int, ...]],
    samples: int,
    small_workers: Chosen[int],
    epochs: Sequence[int],
    allowed: float | None,
) -> Served:
    """Both groups at each resolution.

    Args:
        job: Resolved.
        pace: How long steps take.
        sides: Resolutions, low to high, in pixels.
        large_batches: Local batch of a large-batch worker at each resolution, and the reason.
        samples: Training samples of an epoch.
        small_workers: Number of small-batch workers, and the reason.
        epochs: Epochs at each resolution.
        allowed: Seconds that the deadline leaves for all rounds, the rest of the training and the
            loss of workers aside; `None` without a deadline.

    Raises:
        PlanError: No pair exists, or the deadline leaves no time.
    """
    levels = list(zip(sides, large_batches.value, strict=True))
    small, deadline = small_workers.value, job.goal.deadline

    def groups_at(extra_time: float) -> tuple[Groups, ...]:
        return tuple(
            grouped(
                pace,
                side,
                large,
                small_workers=small,
                extra_time=extra_time,
                samples=samples,
                exchange_steps=job.server.exchange_steps,
                rounding=job.dual.rounding,
            )
            for side, large in levels
        )

    why = (
        f"As much as goal.deadline={deadline or 0:g} s leaves at the upper end of the predicted "
        f"time, up to {MAX_EXTRA_TIME:g}."
    )
    by_deadline = Chosen(MAX_EXTRA_TIME, why, "predicted")
    extra = Chosen(1.0, "", "assumed")
    if small and job.dual.extra_time != "auto":
        extra = Chosen(job.dual.extra_time, "Asked for.", "asked")
    elif small:
        extra = by_deadline
        if deadline is None:
            why = "The smaller of the two values published."
            extra = Chosen(USUAL_EXTRA_TIME, why, "published", PAPER)
        feasible = min(
            most_extra_time(pace, side, large, small_workers=small, most=extra.value)
            for side, large in levels
        )
        if feasible < extra.value:
            why = "As much as leaves a small batch that can be trained on."
            extra = Chosen(floor(1e4 * feasible) / 1e4, why, "predicted")
    groups = groups_at(extra.value)
    if allowed is not None and extra.source == "predicted":
        highs = [pace.spread(side, large)[1] for side, large in levels]
        for _ in range(_SHORTENINGS):
            rounds = zip(epochs, groups, highs, strict=True)
            seconds = sum(n * one.round_seconds * high for n, one, high in rounds)
            if seconds <= allowed or extra.value == 1:
                break
            # A round is nearly in proportion to the extra time; its last step may be a smaller one.
            shorter = floor(1e4 * extra.value * max(0.0, allowed) / seconds) / 1e4
            shorter = max(1.0, min(shorter, extra.value - 1e-4))
            extra = by_deadline._replace(value=shorter)
            groups = groups_at(shorter)
    server = job.server
    rule = ServerRule(
        consistency=server.consistency,
        staleness=server.staleness if server.consistency == "ssp" else None,
        merge=server.merge,
        update_factor=server.update_factor,
        exchange_steps=server.exchange_steps,
        momentum=server.momentum,
        small_workers=small,
        extra_time=extra.value,
    )
    return Served(rule, large_batches, groups, small_workers, extra)


def served_level(
    groups: Groups,
    rule: ServerRule,
    side: int,
    *,
    micro_batch: int,
    ends: tuple[float, float],
    peak: Estimate | None,
) -> Level:
    """Fields of a stage at one resolution under a parameter server.

    Args:
        groups: Both groups of workers.
        rule: The rule of the server.
        side: Image side, in pixels.
        micro_batch: Most samples in one forward pass.
        ends: Ends of the interval of the round time, as shares of it.
        peak: Peak bytes of a large-batch worker; `None` where nothing was measured.
    """
    small, seconds = rule.small_workers, groups.round_seconds
    large = len(groups.samples) - small
    ratio = groups.samples_ratio(rule.exchange_steps)
    factor = update_factor(ratio, rule.update_factor) if large else 1.0
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


def at_each(batches: Sequence[int], sides: Sequence[int]) -> str:
    """Batches in words, by resolution where they differ."""
    if len(set(batches)) == 1:
        return f"{batches[0]} samples"
    return ", ".join(f"{n} at {side} px" for n, side in zip(batches, sides, strict=True))
