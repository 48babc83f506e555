"""A run that goes on: rate, resolution and batch over the epochs, and the workers now."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import EpochRecord, Plan, RateSchedule
from batchwright.records.text.formatting import number, percent
from batchwright.reporting.charts.stages import planned_chart, rate_chart, speed_chart
from batchwright.reporting.charts.workers import now_chart
from batchwright.reporting.data.live_run import RunLines, WorkerNow
from batchwright.reporting.data.plan_words import range_words
from batchwright.reporting.data.worker_curves import spread
from batchwright.reporting.pages import markup

_MOST_ROWS = 100  # of a table
_MOST_BARS = 16  # workers of a chart


def over_time_part(
    plan: Plan, schedule: RateSchedule, epochs: Sequence[EpochRecord], lines: RunLines
) -> str:
    """Learning rate, resolution and batches over the epochs: planned, and as trained.

    Args:
        plan: What is followed.
        schedule: Its rate over the epochs.
        epochs: Those that are finished.
        lines: What the run has told.
    """
    charts = [rate_chart(plan, schedule, epochs, lines)]
    for title, label, name, unit in (
        ("Global batch", "samples per step", "global_batch_size", "samples per step"),
        ("Resolution", "pixels", "resolution", "px"),
    ):
        planned = [float(getattr(stage, name)) for stage in plan.stages]
        trained = [(one.epoch, float(getattr(one, name))) for one in epochs]
        charts.append(planned_chart(plan, title, label, planned, trained, unit))
    table = _epochs_table(epochs)
    drawn = [markup.figure(one, table) for one in charts]
    if speed := speed_chart(plan, epochs, lines):
        timed = [one for one in epochs if one.training_seconds]
        kept = [timed[index] for index in spread(len(timed), _MOST_ROWS)]
        rows = [[str(one.epoch + 1), number(one.samples / one.training_seconds)] for one in kept]
        speeds = markup.table("Images per second", ["epoch", "images / s"], rows)
        drawn.append(markup.figure(speed, speeds))
    return markup.pairs(drawn)


def _epochs_table(epochs: Sequence[EpochRecord]) -> str:
    kept = [epochs[index] for index in spread(len(epochs), _MOST_ROWS)]
    more = f" ({len(kept)} of {len(epochs):,})" if len(kept) < len(epochs) else ""
    return markup.table(
        f"Rate, batches and resolution by epoch{more}",
        ["epoch", "learning rate at its end", "global batch", "local batch", "resolution"],
        [
            [
                str(one.epoch + 1),
                f"{one.learning_rate:.4g}",
                f"{one.global_batch_size:,}",
                range_words(w.local_batch_size for w in one.workers) if one.workers else "-",
                f"{one.resolution} px",
            ]
            for one in kept
        ],
    )


def workers_now_part(workers: Sequence[WorkerNow], clock: str = "") -> str:
    """The workers at the newest line: a bar of each one's step, and a table; empty without any.

    Args:
        workers: By rank.
        clock: ``simulated `` before seconds that are.
    """
    if not workers:
        return ""
    table = markup.table(
        f"Workers now, {clock}seconds per step",
        ["worker", "place", "local batch", "share", "compute (s)", "wait (s)"],
        [
            [
                str(one.rank),
                one.place or "-",
                f"{one.local_batch_size:,}",
                percent(one.share),
                markup.or_dash(one.compute_seconds),
                markup.or_dash(one.wait_seconds),
            ]
            for one in _shown(workers, _MOST_ROWS)
        ],
    )
    if all(one.compute_seconds is None for one in workers):
        return table
    chart = markup.figure(now_chart(_shown(workers, _MOST_BARS), clock), table)
    return markup.pair(chart, f"<div>{table}</div>")


def _shown(workers: Sequence[WorkerNow], most: int) -> list[WorkerNow]:
    """All workers; of many, evenly from the one that computes least to the one that does most."""
    ordered = sorted(workers, key=lambda one: (one.compute_seconds or 0.0, one.rank))
    kept = [ordered[index] for index in spread(len(ordered), most)]
    return sorted(kept, key=lambda one: one.rank)
