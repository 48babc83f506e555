"""The page's charts of a run, each with the table of numbers behind it."""

from __future__ import annotations

from batchwright.records import RunSummary
from batchwright.records.text.formatting import in_bytes, in_seconds, number, shares_between
from batchwright.records.text.plan_text import is_chosen, rivals
from batchwright.reporting.charts import run as charts
from batchwright.reporting.data.live_run import EpochNow
from batchwright.reporting.data.reading import (
    Comparison,
    accuracy,
    epoch_accuracies,
    simulated_word,
    training_clock,
    worker_rows,
)
from batchwright.reporting.pages import markup


def candidates_chart(summary: RunSummary) -> str:
    """Predicted seconds of the plan's own cluster, the measured point on top; or nothing."""
    chart = charts.candidates_chart(summary)
    if chart is None:
        return ""
    table = markup.table(
        "Candidates",
        ["global batch", "side", "workers", "steps", "s / step", "s / epoch", "peak memory", ""],
        [
            [
                f"{one.global_batch_size:,}",
                f"{one.resolution} px",
                str(one.workers),
                f"{one.steps_per_epoch:,}",
                in_seconds(one.step_seconds),
                in_seconds(one.epoch_seconds),
                in_bytes(one.peak_bytes),
                "chosen " * is_chosen(summary.plan, one) + "extrapolated" * one.extrapolated,
            ]
            for one in rivals(summary.plan)
        ],
    )
    return markup.figure(chart, table)


def epochs_chart(summary: RunSummary, now: EpochNow | None = None) -> str:
    """Measured seconds of each epoch over the predicted interval; empty without epochs.

    The one in progress, ``now``, is drawn as long as it would take at its pace so far.
    """
    chart = charts.epochs_chart(summary, now)
    if chart is None:
        return ""
    head = ["epoch", "steps", "skipped", f"{simulated_word(summary)}training", "evaluation"]
    table = markup.table(
        "Seconds of each epoch",
        [*head, "checkpoints", "learning rate"],
        [
            [
                str(epoch.epoch + 1),
                f"{epoch.steps:,}",
                f"{epoch.skipped_steps:,}",
                number(epoch.training_seconds),
                number(epoch.evaluation_seconds),
                number(epoch.checkpoint_seconds),
                f"{epoch.learning_rate:.4g}",
            ]
            for epoch in summary.epochs
        ],
    )
    return markup.figure(chart, table)


def learning_charts(summary: RunSummary) -> str:
    """Loss and held-out accuracy over the epochs; at least one was finished."""
    epochs, clock, word = summary.epochs, training_clock(summary), simulated_word(summary)
    told = epoch_accuracies(summary)
    head = ["epoch", f"training ({word}s)", "training loss", "held-out loss", "held-out accuracy"]
    table = markup.table(
        "Epochs",
        [*head, *(["predicted (95 %)", "the prediction was"] if told else [])],
        [
            [
                str(epoch.epoch + 1),
                number(seconds),
                markup.or_dash(epoch.train_loss),
                markup.or_dash(epoch.val_loss),
                accuracy(epoch),
                *(_predicted_cells(told.get(epoch.epoch)) if told else []),
            ]
            for epoch, seconds in zip(epochs, clock, strict=True)
        ],
    )
    loss, right = charts.learning_charts(summary)
    return markup.pair(markup.figure(loss, table), markup.figure(right, table))


def _predicted_cells(one: Comparison | None) -> list[str]:
    if one is None or one.predicted is None:
        return ["-", "-"]
    return [shares_between(one.predicted), one.verdict.replace("the 95 % interval", "the interval")]


def worker_chart(summary: RunSummary) -> str:
    """Where each worker's time went, a bar as long as the wall time for each."""
    head, *told = worker_rows(summary)
    table = markup.table(f"Workers{', simulated time' * summary.simulated}", head, told)
    return markup.figure(charts.time_chart(summary), table)
