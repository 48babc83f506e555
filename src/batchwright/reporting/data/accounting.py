"""Where a run's time went: by part, by worker, and with the parts of the command around it."""

from __future__ import annotations

from statistics import fmean

from batchwright.records import RunSummary
from batchwright.records.text.formatting import duration, percent
from batchwright.reporting.data.worker_curves import (
    Part,
    WorkerCurve,
    recorded_parts,
    worker_curves,
)


def worker_rows(summary: RunSummary) -> list[list[str]]:
    """The workers over all epochs as table rows: the head, then a row for each.

    The local batch is that of the worker's last epoch. The last column is the processor time of
    loader processes, if there are any; it is not part of the other times.
    """
    curves = worker_curves(summary)
    loaded = any(one.loading_cpu_seconds for one in curves)
    parts = recorded_parts(summary)
    last = "exchange" if "wait" in parts else "exchange and wait"
    head = ["worker", "local batch", "samples", *parts[:-1], last]
    rows = [[*head, "loaders (CPU)"] if loaded else head]
    return rows + [
        [
            one.label,
            f"{one.epochs[-1].local_batch_size:,}",
            f"{one.samples:,}",
            *(duration(one.seconds(part)) for part in parts),
            *([duration(one.loading_cpu_seconds)] if loaded else []),
        ]
        for one in curves
    ]


def accounting(summary: RunSummary, worker: WorkerCurve | None = None) -> list[tuple[str, float]]:
    """How the wall time was spent, as (part, seconds); the parts sum to ``wall_seconds``.

    Input, compute, wait and communication are means over the workers in each epoch, or those of
    ``worker`` alone, and so is evaluation with a parameter server. ``wait`` is missing if the
    records count it as communication. ``other`` is the time that no clock measured, including
    epochs without the worker. If the measured parts exceed the wall time, which does not include
    epochs from before a resume, ``other`` is 0.

    For a simulated cluster the parts are those of its simulated training, which are never added to
    real seconds.
    """
    of_workers = [_mean_seconds(summary, part, worker) for part in recorded_parts(summary)]
    if summary.simulated:
        total = sum(epoch.training_seconds for epoch in summary.epochs)
        parts: list[tuple[str, float]] = list(zip(recorded_parts(summary), of_workers, strict=True))
        return [*parts, ("other", max(0.0, total - sum(of_workers)))]
    claims: list[tuple[str, float]] = [
        ("set-up", summary.setup_seconds),
        *zip(recorded_parts(summary), of_workers, strict=True),
        ("evaluation", evaluation_seconds(summary, worker)),
        ("checkpoints", sum(epoch.checkpoint_seconds for epoch in summary.epochs)),
    ]
    claimed = sum(seconds for _, seconds in claims)
    return [*claims, ("other", max(0.0, summary.wall_seconds - claimed))]


def evaluation_seconds(summary: RunSummary, worker: WorkerCurve | None = None) -> float:
    """Seconds of all evaluations, as a mean over the workers, or those of ``worker``.

    With a parameter server one worker evaluates, while the others go on or wait for it, which are
    parts of their own.
    """
    total = sum(epoch.evaluation_seconds for epoch in summary.epochs)
    if summary.plan.server is None:
        return total
    if worker is not None and summary.rounds:
        own = (one for one in summary.rounds if one.worker == worker.number)
        return sum(one.evaluation_seconds for one in own)
    return total / summary.plan.workers


def epochs_seconds(summary: RunSummary) -> float:
    """Seconds of the epochs: training, checkpoints and evaluation, as `evaluation_seconds`."""
    own = sum(one.training_seconds + one.checkpoint_seconds for one in summary.epochs)
    return own + evaluation_seconds(summary)


def whole_accounting(summary: RunSummary) -> list[tuple[str, float]]:
    """`accounting` with the parts of the command before and after training.

    For a resumed run these are the parts of the last command, and marked as such. For a simulated
    cluster the result is that of `accounting`.
    """
    parts = accounting(summary)
    if summary.simulated:
        return parts
    whose = " (last command)" if summary.resumed else ""
    before, after = (
        [(one.name + whose, one.seconds) for one in timed]
        for timed in (summary.before, summary.after)
    )
    return [*before, *parts, *after]


def accounting_rows(summary: RunSummary) -> list[list[str]]:
    """Part, time and share of `whole_accounting` as table rows; the last row is the sum."""
    parts = whole_accounting(summary)
    total = sum(seconds for _, seconds in parts)
    return [
        *([name, duration(s), percent(s / total if total else 0.0)] for name, s in parts),
        ["all", duration(total), ""],
    ]


def _mean_seconds(summary: RunSummary, part: Part, worker: WorkerCurve | None) -> float:
    if worker is not None:
        return worker.seconds(part)
    name = f"{part}_seconds"
    return sum(
        fmean(getattr(one, name) for one in epoch.workers)
        for epoch in summary.epochs
        if epoch.workers
    )
