"""Records for what is kept: predictions of candidates, and of points that were not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite, sqrt

from batchwright.planning.candidates.choice import FAR, Choice, Progress, frontier
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.local_batches import largest_shares
from batchwright.planning.candidates.table import Row, Table
from batchwright.planning.candidates.worker_types import WorkerType
from batchwright.prediction.accuracy.quality import product
from batchwright.prediction.cost import train_cost
from batchwright.records import Estimate, HeldOut, Prediction

MOST_SHOWN = 200
"""More candidates than this are not listed one by one."""


def kept_rows(rows: Sequence[Row], bends: Sequence[KneeFit], choice: Choice) -> list[Row]:
    """Rows to list: all, or if they are many the frontier, the chosen cluster and the knees."""
    if len(rows) <= MOST_SHOWN:
        return list(rows)
    kept = frontier(rows) | {bend.row for bend in bends if bend.row} | {choice.row, choice.free}
    kept |= set(choice.sizes) | set(choice.others.values()) | set(choice.level)
    side = choice.row.resolution
    return [
        row for row in rows if row in kept or (row.mix is choice.row.mix and row.resolution == side)
    ]


def predictions(
    table: Table,
    rows: Sequence[Row],
    kept: Iterable[Row],
    choice: Choice,
    progress: Progress,
    *,
    named: bool,
) -> tuple[Prediction, ...]:
    """Records of the rows that are kept.

    Args:
        table: What they are judged by.
        rows: All candidates, for the frontier.
        kept: Those to turn into records, in order.
        choice: What was chosen of them.
        progress: What a batch means for progress.
        named: Whether to name the kinds of workers.
    """
    edge = frontier(rows)
    level = set(choice.level)
    return tuple(
        prediction(table, row, progress, named=named, edge=row in edge, level=row in level)
        for row in kept
    )


def prediction(
    table: Table, row: Row, progress: Progress, *, named: bool, edge: bool, level: bool = False
) -> Prediction:
    """The record of one row."""
    step = table.step_estimate(row)
    shares = largest_shares(row.mix, row.totals)
    workers = row.mix.workers
    cuts = [
        table.parts(row, kind, share)[0]
        for (kind, _), share in zip(row.mix.members, shares, strict=True)
    ]
    peaks = [
        table.peak(row, kind, share)
        for (kind, _), share in zip(row.mix.members, shares, strict=True)
    ]
    train = scaled(step, row.train_seconds)
    return Prediction(
        workers=workers,
        kinds=row.mix.kinds if named else (),
        global_batch_size=row.batch,
        local_batch_size=max(shares),
        micro_batch_size=micro_batch(shares, cuts),
        resolution=row.resolution,
        steps_per_epoch=row.steps,
        step_seconds=step,
        epoch_seconds=scaled(step, row.epoch_seconds),
        peak_bytes=max(peaks, key=lambda one: one.high),
        efficiency=progress.efficiency(row.batch),
        epochs=_epochs(row, progress),
        trained_epochs=row.epochs if progress.chooses else None,
        target_seconds=_target(row, step, progress),
        accuracy=progress.reached(row.batch),
        train_seconds=train,
        cost=_cost(row, train),
        extrapolated=any(
            kind.times.extrapolates(workers, row.resolution, micro)
            for (kind, _), micro in zip(row.mix.members, cuts, strict=True)
        ),
        assumed=row.mix.assumed,
        frontier=edge,
        level=level,
        refused="; ".join(miss.text for miss in row.misses),
    )


def _epochs(row: Row, progress: Progress) -> Estimate | None:
    """Epochs to the target, unless they are far beyond those stated."""
    found = progress.epochs(row.batch)
    return None if found is None or found.value > FAR * progress.planned else found


def _target(row: Row, step: Estimate, progress: Progress) -> Estimate | None:
    """Seconds to the target, as uncertain as the step time and the epochs together.

    Epochs that were chosen are certain.
    """
    if row.target_seconds is None or not isfinite(row.target_seconds):
        return None
    if progress.chooses:
        return scaled(step, row.target_seconds)
    epochs = progress.to_target(row.batch)
    if epochs is None:
        return None
    return product(scaled(step, row.epoch_seconds), epochs)


def micro_batch(shares: Sequence[int], cuts: Sequence[int]) -> int:
    """Most samples at once that suit all kinds: of those that are cut, the least."""
    limited = [cut for share, cut in zip(shares, cuts, strict=True) if cut < share]
    return min(limited) if limited else max(cuts)


def _cost(row: Row, train: Estimate) -> Estimate | None:
    if row.cost is None:
        return None
    return train_cost([(count, kind.price or 0.0) for kind, count in row.mix.members], train)


def scaled(step: Estimate, value: float) -> Estimate:
    """An interval around ``value`` as wide, relative to it, as that of the step time."""
    ratio = value / step.value
    return Estimate(value=value, low=step.low * ratio, high=step.high * ratio)


def held_out(kind: WorkerType) -> tuple[HeldOut, ...]:
    """Steps midway, on a logarithmic scale, between neighbouring measured batches.

    Of each measured number of workers and resolution, rounded to even batches.
    """
    measured: dict[tuple[int, int], set[int]] = {}
    for point in kind.profile.steps:
        measured.setdefault((point.workers, point.resolution), set()).add(point.local_batch_size)
    return tuple(
        _held_out(kind, workers, side, batch)
        for (workers, side), batches in sorted(measured.items())
        for batch in _midpoints(sorted(batches))
    )


def _midpoints(batches: Sequence[int]) -> list[int]:
    middles = [2 * round(sqrt(low * high) / 2) for low, high in pairwise(batches)]
    return [middle for middle in dict.fromkeys(middles) if middle and middle not in batches]


def _held_out(kind: WorkerType, workers: int, side: int, batch: int) -> HeldOut:
    return HeldOut(
        workers=workers,
        resolution=side,
        local_batch_size=batch,
        step_seconds=kind.times.predict(workers, side, [batch]),
        peak_bytes=kind.memory.predict(side, batch, workers=workers),
        resident_bytes=kind.memory.resident(side, batch, workers=workers),
    )
