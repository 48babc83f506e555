"""Records of predictions: candidates, steps that were not measured, and the reasons for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite, sqrt

from batchwright.errors import TOO_LITTLE_SHARED
from batchwright.planning.candidates.choice import Choice
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.local_batches import shares_by_kind
from batchwright.planning.candidates.objectives.comparisons import pareto
from batchwright.planning.candidates.progress import FAR, Progress
from batchwright.planning.candidates.table import (
    FAR_OFF,
    SECONDS_PER_HOUR,
    Row,
    Table,
    in_memory,
)
from batchwright.planning.candidates.worker_types import WorkerType
from batchwright.planning.chosen import Chosen
from batchwright.prediction.accuracy.quality import product
from batchwright.records import Estimate, HeldOut, Job, Prediction, Reason, Source, Stage
from batchwright.records.text.formatting import (
    between,
    counted,
    local_batches,
    percent,
    sentence,
    size,
)

MAX_SHOWN = 200
"""Most candidates that a plan lists in full."""

_ASSUMED: Source = "assumed"
_PREDICTED: Source = "predicted"


def frontier(rows: Sequence[Row]) -> set[Row]:
    """Rows within the limits that are Pareto-optimal in time, cost and accuracy at a resolution.

    With `goal.objective=target-accuracy` time and cost are those to the target, and accuracy does
    not count.
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
    """Rows to list: all, or of more than `MAX_SHOWN` the frontier, the chosen cluster and knees."""
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
    """Records of the rows that are listed.

    Args:
        table: Predicts times and memory.
        rows: All rows, of which the frontier is taken.
        kept: Rows to list.
        choice: The choice.
        progress: What a batch means for progress.
        named: Whether workers are of named kinds.
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
    """The record of one row; ``edge``: whether it is on the frontier."""
    step = table.step_estimate(row)
    members = shares_by_kind(row.cluster, row.totals)
    shares = [share for _, share in members]
    workers = row.cluster.workers
    cuts = [table.micro_batch(row, kind, share) for kind, share in members]
    peaks = [table.peak(row, kind, share) for kind, share in members]
    train = scaled(step, row.train_seconds)
    epochs = progress.predicted_epochs(row.batch)
    per_second = (row.cluster.hourly or 0.0) / SECONDS_PER_HOUR  # every worker is paid for all
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
        epochs=epochs if epochs is not None and epochs.value <= FAR * progress.planned else None,
        trained_epochs=row.epochs if progress.chooses else None,
        target_seconds=_target(row, step, progress),
        accuracy=progress.reached(row.batch, row.epochs),
        train_seconds=train,
        cost=None if row.cost is None else train.mapped(lambda seconds: per_second * seconds),
        extrapolated=any(
            kind.times.extrapolates(workers, row.resolution, micro)
            for (kind, _), micro in zip(members, cuts, strict=True)
        ),
        assumed=row.cluster.assumed,
        frontier=edge,
        level=level,
        refused="; ".join(miss.text for miss in row.misses),
    )


def _target(row: Row, step: Estimate, progress: Progress) -> Estimate | None:
    """Seconds to the target, with the errors of the step time and of the epochs.

    Epochs that the plan chooses have no error.
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
    """Most samples in one pass that suit all kinds: the least of the shares that are cut."""
    limited = [cut for share, cut in zip(shares, cuts, strict=True) if cut < share]
    return min(limited) if limited else max(cuts)


def scaled(step: Estimate, value: float) -> Estimate:
    """``value`` with the interval of the step time, in proportion."""
    ratio = value / step.value
    return Estimate(value=value, low=step.low * ratio, high=step.high * ratio)


def held_out(kinds: Sequence[WorkerType]) -> tuple[HeldOut, ...]:
    """Predicted steps midway between neighbouring measured batches, to check predictions with.

    For each measured number of workers and resolution: the geometric means of neighbouring batches,
    rounded to even numbers. Of kinds measured together they are those of the slowest, else those of
    the first kind that was measured; empty without any.
    """
    own = [kind for kind in kinds if not kind.stated]
    if not own:
        return ()
    together = [kind for kind in own if kind.together]
    kind = max(together, key=lambda one: one.profile.kinds[0].pace, default=own[0])
    measured: dict[tuple[int, int], set[int]] = {}
    memory = replace(kind.memory, extra=0)  # `check` measures steps as a probe does
    for point in kind.profile.steps:
        measured.setdefault((point.workers, point.resolution), set()).add(point.local_batch_size)
    return tuple(
        HeldOut(
            workers=workers,
            resolution=side,
            local_batch_size=batch,
            step_seconds=kind.times.predict(workers, side, batch),
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
    "In so short a step cores wait for each other's data, and longer while the system, or the host "
    "of a virtual machine, runs them far apart. So the interval is wider than what the probe saw."
)


def prediction_reasons(
    table: Table, row: Row, found: Prediction, stage: Stage
) -> tuple[Reason, tuple[Reason, ...], Reason]:
    """Reasons for the local batches, the memory and the epoch time of the chosen row.

    Args:
        table: Predicts times and memory.
        row: The chosen row.
        found: Its record.
        stage: The stage of the plan that is made of it.
    """
    texts = [_described(row, index) for index in range(len(row.cluster.members))]
    if found.extrapolated:
        texts.append("Batch, resolution or workers lie outside what was measured.")
    step = row.cluster.workers, row.resolution, max(stage.local_batch_sizes)
    if any(
        kind.times.cores_may_move(*step, stage.accumulation_steps)
        for kind, _ in row.cluster.members
    ):
        texts.append(_CORES_MAY_MOVE)
    value = between(found.epoch_seconds, " s")
    source = _ASSUMED if found.assumed else _PREDICTED
    return (
        _local_batches(stage, row.cluster),
        _memory(table, row, found),
        Chosen(value, " ".join(texts), source).reason("epoch time"),
    )


def _local_batches(stage: Stage, cluster: ClusterOption) -> Reason:
    """The reason for the local batches: equal shares or equal times, in one pass or several."""
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


def _memory(table: Table, row: Row, found: Prediction) -> tuple[Reason, Reason]:
    """Reasons for the predicted peak against the limit, and for the largest batch that fits."""
    members, goal = shares_by_kind(row.cluster, row.totals), table.job.goal
    kind, _ = max(members, key=lambda one: table.peak(row, *one).high)  # whose peak is shown
    whose = "goal.memory" if goal.memory else "what the device has free for one worker"
    if any(one.memory for one in goal.kinds if one.kind == kind.name):
        whose = "the memory of goal.kinds"
    why = (
        f"At most {in_memory(found.peak_bytes.high)} predicted for {found.micro_batch_size} "
        f"images at once; the limit is {in_memory(kind.limit)}, {whose}."
    )
    peak = Chosen(
        f"{in_memory(found.peak_bytes.value)} per worker",
        " ".join([why, *map(sentence, kind.memory.notes)]),
        _PREDICTED,
    )
    largest = [
        f"{kind.largest(row.cluster.workers, row.resolution)}"
        + (f" ({kind.name})" if len(row.cluster.members) > 1 else "")
        for kind, _ in row.cluster.members
    ]
    each = row.cluster.members[0][0].memory.bytes_per_sample(row.resolution)
    why = (
        "The most whose predicted peak stays within the limit with the upper end of its interval, "
        f"or all the data; an image takes {size(each) if each >= 1 else 'too little to be told'}."
    )
    bounds = dict.fromkeys(filter(None, (_lost(kind, row) for kind, _ in row.cluster.members)))
    most = Chosen(f"{', '.join(largest)} samples", " ".join([why, *bounds]), _PREDICTED)
    return peak.reason("memory"), most.reason("largest local batch")


def _lost(kind: WorkerType, row: Row) -> str:
    """Why the largest batch is bounded by a failure of the probe, in a sentence; else empty."""
    place = row.cluster.workers, row.resolution
    lost = kind.lost(*place)
    if lost is None or kind.largest(*place) < lost.local_batch_size - 1:
        return ""
    why = TOO_LITTLE_SHARED if lost.short_of == "shared memory" else "memory ran out"
    return f"At {lost.local_batch_size} images {why}."


def _described(row: Row, index: int) -> str:
    """How the step time of one kind of worker was predicted, in sentences."""
    kind, count = row.cluster.members[index]
    whose = f"{kind.name}: " if len(row.cluster.members) > 1 else ""
    nearest = kind.times.nearest(row.cluster.workers)
    side = min(kind.times.resolutions(nearest), key=lambda one: (abs(one - row.resolution), one))
    curve = kind.times.curve(nearest, side)
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
    return " ".join(map(sentence, filter(None, [how, curve.caveat, beyond, *kind.times.notes])))


def extrapolations(cluster: ClusterOption, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """Reasons that warn of steps far larger or smaller than any measured with these workers.

    Numbers of workers and resolutions that were not measured at all have other reasons.
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
                f"That is far from what was measured there, {bound} with "
                f"{counted(cluster.workers, 'worker')}. So its predicted time, and what is chosen "
                "by it, may be far off: probe with a larger probe.budget."
            )
            value = f"{counted(size, 'image')} at once on a worker, at {stage.resolution} px"
            chosen = Chosen(value, why, _PREDICTED)
            found[stage.resolution, kind.name] = chosen.reason("extrapolation")
    return tuple(found.values())


def training_time(job: Job, found: Prediction) -> Reason:
    """The reason for the time and the cost of the whole training, against the limits."""
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
