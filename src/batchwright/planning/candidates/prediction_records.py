"""What is predicted: records of candidates and of points that were not measured, and reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite, sqrt

from batchwright.errors import TOO_LITTLE_SHARED
from batchwright.planning.candidates.choice import Choice
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.local_batches import largest_shares
from batchwright.planning.candidates.objectives import pareto
from batchwright.planning.candidates.progress import FAR, Progress
from batchwright.planning.candidates.table import FAR_OFF, Row, Table, in_memory
from batchwright.planning.candidates.worker_types import WorkerType
from batchwright.planning.chosen import Chosen
from batchwright.prediction.accuracy.quality import product
from batchwright.prediction.cost import train_cost
from batchwright.records import Estimate, Goal, HeldOut, Job, Prediction, Reason, Source, Stage
from batchwright.records.text.formatting import between, counted, local_batches, percent, size

MAX_SHOWN = 200
"""More candidates than this are not listed one by one."""

_ASSUMED: Source = "assumed"
_PREDICTED: Source = "predicted"


def frontier(rows: Sequence[Row]) -> set[Row]:
    """Rows within the limits that none of the same resolution beats in time, cost and accuracy.

    Under `target-accuracy` these are time and cost to the target, and accuracy does not count.
    """
    found: set[Row] = set()
    for side in {row.resolution for row in rows}:
        allowed = [
            row
            for row in rows
            if row.resolution == side and not row.misses and isfinite(row.seconds)
        ]
        points = [
            (
                row.seconds,
                row.expense,
                0 if row.accuracy is None or row.target_seconds is not None else 1 - row.accuracy,
            )
            for row in allowed
        ]
        found |= {allowed[index] for index in pareto(points)}
    return found


def kept_rows(rows: Sequence[Row], knees: Sequence[KneeFit], choice: Choice) -> list[Row]:
    """Rows to list: all, or if they are many the frontier, the chosen cluster and the knees."""
    if len(rows) <= MAX_SHOWN:
        return list(rows)
    kept = frontier(rows) | {knee.row for knee in knees if knee.row} | {choice.row, choice.free}
    kept |= set(choice.sizes) | set(choice.others.values()) | set(choice.level)
    side = choice.row.resolution
    return [
        row
        for row in rows
        if row in kept or (row.cluster is choice.row.cluster and row.resolution == side)
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
    """Records of the rows that are kept; ``rows`` are all, for the frontier."""
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
    shares = largest_shares(row.cluster, row.totals)
    workers = row.cluster.workers
    members = [(kind, share) for (kind, _), share in zip(row.cluster.members, shares, strict=True)]
    cuts = [table.parts(row, kind, share)[0] for kind, share in members]
    peaks = [table.peak(row, kind, share) for kind, share in members]
    train = scaled(step, row.train_seconds)
    prices = [(count, kind.price or 0.0) for kind, count in row.cluster.members]
    return Prediction(
        workers=workers,
        kinds=row.cluster.kinds if named else (),
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
        accuracy=progress.reached(row.batch, row.epochs),
        train_seconds=train,
        cost=None if row.cost is None else train_cost(prices, train),
        extrapolated=any(
            kind.times.extrapolates(workers, row.resolution, micro)
            for (kind, _), micro in zip(row.cluster.members, cuts, strict=True)
        ),
        assumed=row.cluster.assumed,
        frontier=edge,
        level=level,
        refused="; ".join(miss.text for miss in row.misses),
    )


def _epochs(row: Row, progress: Progress) -> Estimate | None:
    """Epochs to the target, unless they are far beyond those stated."""
    found = progress.epochs_told(row.batch)
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


def scaled(step: Estimate, value: float) -> Estimate:
    """An interval around ``value`` as wide, relative to it, as that of the step time."""
    ratio = value / step.value
    return Estimate(value=value, low=step.low * ratio, high=step.high * ratio)


def held_out(kind: WorkerType) -> tuple[HeldOut, ...]:
    """Steps midway, on a logarithmic scale, between neighbouring measured batches.

    Of each measured number of workers and resolution, rounded to even batches.
    """
    measured: dict[tuple[int, int], set[int]] = {}
    memory = replace(kind.memory, extra=0)  # what is measured again are steps of a probe
    for point in kind.profile.steps:
        measured.setdefault((point.workers, point.resolution), set()).add(point.local_batch_size)
    return tuple(
        HeldOut(
            workers=workers,
            resolution=side,
            local_batch_size=batch,
            step_seconds=kind.times.predict(workers, side, [batch]),
            peak_bytes=memory.predict(side, batch, workers=workers),
            resident_bytes=memory.resident(side, batch, workers=workers),
        )
        for (workers, side), batches in sorted(measured.items())
        for batch in dict.fromkeys(
            2 * round(sqrt(low * high) / 2) for low, high in pairwise(sorted(batches))
        )
        if batch and batch not in batches
    )


# -------------------------------------------------------------------------------------- in words

_CORES_MAY_MOVE = (
    "In so short a step cores wait for each other's data, longer at times when the system, or the "
    "host of a virtual machine, runs them far apart: the interval is wider than what the probe saw."
)


def prediction_reasons(
    job: Job, row: Row, found: Prediction, stage: Stage
) -> tuple[Reason, tuple[Reason, ...], Reason]:
    """Reasons for the local batches, the memory and the time of the chosen row."""
    texts = [_described(row, index) for index in range(len(row.cluster.members))]
    if found.extrapolated:
        texts.append("Batch, resolution or workers lie outside what was measured.")
    parts = [stage.micro_batch_size] * stage.accumulation_steps
    if any(
        kind.times.cores_may_move(row.cluster.workers, row.resolution, parts)
        for kind, _ in row.cluster.members
    ):
        texts.append(_CORES_MAY_MOVE)
    one = found.epoch_seconds
    value = between(one, " s")
    source = _ASSUMED if found.assumed else _PREDICTED
    return (
        _local_batches(stage, row.cluster),
        _memory(row, found, job.goal),
        Chosen(value, " ".join(texts), source).reason("epoch time"),
    )


def _local_batches(stage: Stage, cluster: ClusterOption) -> Reason:
    """Equal shares, or equal times, in one go or accumulated."""
    shares, source = "Equal shares", _ASSUMED
    if len(cluster.members) > 1:
        shares = "Shares with which all kinds take equal time, within the memory of each"
        source = _PREDICTED
    how = "one pass"
    if stage.accumulation_steps > 1:
        how = (
            f"{stage.accumulation_steps} passes of at most {stage.micro_batch_size} images "
            "whose gradients are added up"
        )
    value = local_batches(stage.local_batch_sizes)
    return Chosen(f"{value} samples", f"{shares}, each in {how}.", source).reason("local batches")


def _memory(row: Row, found: Prediction, goal: Goal) -> tuple[Reason, Reason]:
    """The predicted peak against the limit, and the largest batch under it."""
    kind, _ = row.cluster.members[0]
    whose = "goal.memory" if goal.memory else "what the device has free for one worker"
    why = (
        f"At most {in_memory(found.peak_bytes.high)} predicted for {found.micro_batch_size} "
        f"images at once; the limit is {in_memory(kind.limit)}, {whose}."
    )
    peak = Chosen(
        f"{in_memory(found.peak_bytes.value)} per worker",
        " ".join([why, *map(_sentence, kind.memory.notes)]),
        _PREDICTED,
    )
    largest = [
        f"{kind.largest(row.cluster.workers, row.resolution)}"
        + (f" ({kind.name})" if len(row.cluster.members) > 1 else "")
        for kind, _ in row.cluster.members
    ]
    each = kind.memory.bytes_per_sample(row.resolution)
    why = (
        "Up to there the upper end of the predicted peak stays within the limit, or it is all the "
        f"data; an image takes {size(each) if each >= 1 else 'too little to be told'}."
    )
    bounds = dict.fromkeys(filter(None, (_lost(kind, row) for kind, _ in row.cluster.members)))
    most = Chosen(f"{', '.join(largest)} samples", " ".join([why, *bounds]), _PREDICTED)
    return peak.reason("memory"), most.reason("largest local batch")


def _lost(kind: WorkerType, row: Row) -> str:
    """What kept a probe from measuring one sample more than the largest batch; empty: nothing."""
    place = row.cluster.workers, row.resolution
    lost = kind.lost(*place)
    if lost is None or kind.largest(*place) < lost.local_batch_size - 1:
        return ""
    why = TOO_LITTLE_SHARED if lost.short_of == "shared memory" else "memory ran out"
    return f"At {lost.local_batch_size} images {why}."


def _described(row: Row, index: int) -> str:
    kind, count = row.cluster.members[index]
    whose = f"{kind.name}: " if len(row.cluster.members) > 1 else ""
    counts = [n for n in kind.measured if n <= row.cluster.workers] or [kind.measured[0]]
    side = min(
        kind.times.resolutions(counts[-1]), key=lambda side: (abs(side - row.resolution), side)
    )
    curve = kind.times.curve(counts[-1], side)
    measured = f"the {len(curve.batches)} measured batches"
    worst = f"{percent(curve.largest_miss)} away from one of them"
    how = (
        f"{whose}read off between {measured}, since no straight line fits them: the best one is "
        f"{worst}"
    )
    if curve.linear:
        how = (
            f"{whose}by the straight line that fits {measured} best; at its worst it is {worst}, "
            "which the interval allows for"
        )
    beyond = ""
    if curve.further is not None and row.totals[index] > curve.batches[-1] * count:
        beyond = curve.further.caveat
    return " ".join(map(_sentence, filter(None, [how, curve.caveat, beyond, *kind.times.notes])))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def extrapolations(cluster: ClusterOption, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """Which of a plan's steps are far larger or smaller than any that was measured there.

    Numbers of workers and resolutions that were not measured at all are told of elsewhere.
    """
    found: dict[tuple[int, str], Reason] = {}
    for stage in stages:
        first = 0
        for kind, count in cluster.members:
            sizes = stage.local_batch_sizes[first : first + count]
            first += count
            measured = kind.measured_batches(cluster.workers, stage.resolution)
            most, least = (min(end(sizes), stage.micro_batch_size) for end in (max, min))
            if measured and most >= FAR_OFF * max(measured):
                size, bound = most, f"at most {max(measured)}"
            elif measured and least <= min(measured) / FAR_OFF:
                size, bound = least, f"at least {min(measured)}"
            else:
                continue
            why = (
                f"Far from what was measured there, {bound} with "
                f"{counted(cluster.workers, 'worker')}: its time, and what is chosen by it, may "
                "be far off. Probe with a larger probe.budget."
            )
            value = f"{counted(size, 'image')} at once on a worker, at {stage.resolution} px"
            chosen = Chosen(value, why, _PREDICTED)
            found[stage.resolution, kind.name] = chosen.reason("extrapolation")
    return tuple(found.values())


def training_time(job: Job, found: Prediction) -> Reason:
    """The whole training and what it costs, against the limits."""
    time, cost = found.train_seconds, found.cost
    value = "" if time is None else between(time, " s")
    why = f"{counted(job.epochs, 'epoch')}, and the evaluations among them."
    if job.goal.deadline is not None:
        why += f" goal.deadline={job.goal.deadline:g} s holds for the upper end."
    if cost is not None:
        value += f", cost {between(cost)}"
    else:
        why += " No price was given, so no cost."
    if job.goal.max_cost is not None:
        why += f" goal.max_cost={job.goal.max_cost:g} holds for the upper end."
    return Chosen(value, why, _PREDICTED).reason("training time")
