"""Tables for a terminal: of a profile, a check, a run, a comparison, a sweep and a schedule.

Each function returns a rich renderable for ``rich.console.Console().print``. Names from outside
pass through `printable`, and markup in them is not interpreted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import (
    Check,
    CheckPoint,
    Estimate,
    MemoryPoint,
    OutOfMemory,
    Profile,
    RateSchedule,
    RunSummary,
    SchedulePoint,
    Sweep,
)
from batchwright.records.text.formatting import (
    counted,
    duration,
    in_bytes,
    in_seconds,
    local_batches,
    number,
    size,
)
from batchwright.records.text.load_text import load_words
from batchwright.reporting.charts.chart import evenly
from batchwright.reporting.data.accounting import accounting_rows, worker_rows
from batchwright.reporting.data.comparison import RunComparison, comparison_rows
from batchwright.reporting.data.comparison import setting_rows as run_setting_rows
from batchwright.reporting.data.reading import (
    SIMULATED,
    accuracy,
    accuracy_words,
    compared_rows,
    held_out_loss,
    last_evaluated,
    measured_word,
    memory_measured,
    memory_note,
    simulated_word,
)
from batchwright.reporting.data.round_curves import round_facts, round_rows
from batchwright.reporting.data.schedule_words import fact_rows
from batchwright.reporting.data.sweep_curves import setting_head, setting_rows
from batchwright.reporting.render.terminal import facts, rows_below, stacked, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

EVENLY = 12
"""Evenly spaced rows of a schedule's table, besides those where something happens."""


# ----------------------------------------------------------------------------------- measurements


def profile_table(profile: Profile) -> RenderableType:
    """The measurements of `probe`: hardware, step times, memory, exchanges and gradient noise."""
    cluster, parts = profile.cluster, profile.memory_parts
    entries = [
        ("device", f"{cluster.device_name} ({cluster.device})"),
        ("workers", f"{cluster.workers}, {counted(cluster.threads, 'thread')} each"),
        ("memory per worker", size(cluster.memory_bytes)),
        ("gradient", size(profile.network.trained_bytes)),
    ]
    if parts is not None:
        named = ((name, getattr(parts, name)) for name in type(parts).model_fields)
        kept = ", ".join(f"{name} {size(count)}" for name, count in named if count)
        entries.append(("memory whatever the batch", kept))
    scale = profile.noise.noise_scale if profile.noise else None
    entries += [
        ("gradient noise scale", f"{number(scale)} samples" if scale else "below measurement"),
        ("measured in", duration(profile.probe_seconds)),
        *([("busy meanwhile", busy)] if (busy := load_words(profile.load)) else []),
    ]
    return stacked(
        facts(f"{profile.network.name} on {profile.data.name}", entries),
        table(
            "seconds per step of all workers at once (median of visits' means; quartiles of steps)",
            ["workers", "side", "local batch", "exchange", "step", "visits", "images / s"],
            (
                [
                    *(str(one.workers), f"{one.resolution} px", str(one.local_batch_size)),
                    number(one.sync_seconds) if one.workers > 1 else "-",
                    f"{number(one.step_seconds)} ({_ends(one.step_low, one.step_high)})",
                    str(len(one.visits) or 1),
                    number(one.workers * one.local_batch_size / one.step_seconds),
                ]
                for one in profile.steps
            ),
        ),
        table(
            "two batches side by side (median; range of the ratio)",
            ["workers", "side", "local batches", "large step", "small / large step", "visits"],
            (
                [
                    f"{one.large_workers} + {one.small_workers}",
                    f"{one.resolution} px",
                    f"{one.large_batch} and {one.small_batch}",
                    number(one.large_seconds),
                    f"{number(ratio)} ({_ends(min(ratios), max(ratios))})",
                    str(one.repeats),
                ]
                for one in profile.pairs
                for ratio in [one.small_seconds / one.large_seconds]
                for ratios in [one.ratios or (ratio,)]
            ),
        ),
        _memory(profile),
        table(
            "exchanges between workers (median; quartiles)",
            ["operation", "message", "workers", "seconds"],
            (
                [
                    *(one.operation, size(one.bytes), str(one.workers)),
                    f"{number(one.seconds)} ({_ends(one.low, one.high)})",
                ]
                for one in profile.collectives
            ),
        ),
        table(
            "network (median; quartiles)",
            ["between", "latency, ms", "MB/s"],
            (
                [
                    one.between,
                    f"{number(1e3 * one.latency)} "
                    f"({_ends(1e3 * one.latency_low, 1e3 * one.latency_high)})",
                    f"{number(one.bandwidth / 1e6)} "
                    f"({_ends(one.bandwidth_low / 1e6, one.bandwidth_high / 1e6)})",
                ]
                for one in profile.links
            ),
        ),
    )


def _ends(low: float, high: float) -> str:
    return f"{number(low)} to {number(high)}"


def _memory(profile: Profile) -> Table:
    peaks: list[tuple[MemoryPoint | OutOfMemory, str, str]] = [
        (one, size(one.peak_bytes), size(one.resident_bytes) if one.resident_bytes else "-")
        for one in profile.memory
    ]
    peaks += [(one, f"too little {one.short_of}", "-") for one in profile.out_of_memory]
    return table(
        "peak memory of one worker",
        ["workers", "side", "local batch", "tensors", "process"],
        (
            [str(one.workers), f"{one.resolution} px", str(one.local_batch_size), *sizes]
            for one, *sizes in peaks
        ),
    )


def check_table(check: Check) -> RenderableType:
    """Predicted and measured values of each point, in a table for each quantity."""
    quantities = {
        "step_seconds": "seconds per step",
        "peak_bytes": "peak memory of one worker, tensors",
        "resident_bytes": "peak memory of one worker, whole process",
    }
    columns = ["workers x batch, side", "predicted (95 %)", "measured", "error", ""]
    tables = [
        table(title, columns, (_checked(one) for one in check.points if one.quantity == quantity))
        for quantity, title in quantities.items()
    ]
    rounds = table(
        "rounds with two batch sizes, planned to end together",
        ["workers", "side", "local batch", "samples", "seconds", "difference"],
        (
            [
                str(getattr(one.pair, f"{whose}_workers")),
                f"{one.pair.resolution} px",
                str(getattr(one.pair, f"{whose}_batch")),
                f"{getattr(one, f'{whose}_samples'):,.0f}",
                number(getattr(one, f"{whose}_seconds")),
                difference,
            ]
            for one in check.rounds
            for whose, difference in (("large", ""), ("small", f"{100 * one.difference:+.1f} %"))
        ),
    )
    lost = ([_place(one), one.short_of] for one in check.out_of_memory)
    return stacked(
        *tables, rounds, table("steps that did not fit", [columns[0], "too little"], lost)
    )


def _checked(one: CheckPoint) -> list[str]:
    predicted = Estimate(value=one.predicted, low=one.low, high=one.high)
    seconds = one.quantity == "step_seconds"
    return [
        _place(one),
        in_seconds(predicted) if seconds else in_bytes(predicted),
        number(one.measured) if seconds else size(one.measured),
        f"{100 * one.error:+.1f} %",
        "inside" if one.inside else "outside",
    ]


def _place(one: CheckPoint | OutOfMemory) -> str:
    planned = ", planned" if isinstance(one, CheckPoint) and one.planned else ""
    return f"{one.workers} x {one.local_batch_size}, {one.resolution} px{planned}"


# ----------------------------------------------------------------------------------------- results


def summary_table(summary: RunSummary) -> RenderableType:
    """The results of a run: predicted and measured figures, accuracy, time, and workers."""
    head, *rows = compared_rows(summary)
    left = [0] if summary.simulated else [0, -1]
    compared = table(f"predicted and {measured_word(summary)}", head, rows, left=left)
    if summary.simulated:
        compared.caption = SIMULATED
    elif not memory_measured(summary):
        compared.caption = memory_note(summary)
    accuracies = table(
        "held-out accuracy",
        ["", "epoch", "accuracy", held_out_loss(summary.plan).removeprefix("held-out ")],
        (
            [
                word,
                f"{epoch.epoch + 1} of {summary.plan.epochs}" if epoch else "",
                accuracy(epoch),
                "" if epoch is None or epoch.val_loss is None else number(epoch.val_loss),
            ]
            for word, epoch in (("last", last_evaluated(summary)), ("best", summary.best_epoch))
        ),
    )
    accuracies.caption = accuracy_words(summary) or None
    clock = ", simulated time" * summary.simulated
    workers = [table(f"per worker{clock}", *_split(worker_rows(summary)))]
    if summary.rounds:
        workers = [
            facts("rounds with the parameter server", round_facts(summary)),
            table(f"rounds per worker{clock}", *_split(round_rows(summary))),
        ]
    return stacked(compared, accuracies, _time(summary), *workers)


def _split(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return rows[0], rows[1:]


def _time(summary: RunSummary) -> Table:
    *parts, whole = accounting_rows(summary)
    head = ["part", "time", "share"]
    made = table(f"where the {simulated_word(summary)}time went", head, parts, left=[0])
    made.add_section()
    rows_below(made, [whole])
    if summary.simulated:
        rows_below(made, [["computing it, real time", duration(summary.wall_seconds), ""]])
    return made


def comparison_table(comparison: RunComparison) -> RenderableType:
    """Several runs beside each other, and the means of those that differ in the seed alone."""
    return stacked(
        table(comparison.title, *_split(comparison_rows(comparison)), left=[0]),
        table("runs that differ in the seed alone", *_split(run_setting_rows(comparison))),
    )


def sweep_table(sweep: Sweep) -> RenderableType:
    """A row for each setting: means over its seeds, with standard errors."""
    title = "held-out accuracy, mean ± standard error over seeds"
    made = table(title, setting_head(sweep), setting_rows(sweep))
    return stacked(made, keys=len(sweep.keys))


# ------------------------------------------------------------------------- the rate over the epochs


def schedule_table(schedule: RateSchedule) -> RenderableType:
    """Rate, batch, warm-up and decay with their sources, and the rate over the epochs."""
    gains = any(row.most > 1 for row in schedule.rows)
    head = ["epochs", "samples", "step", "rate", *["at most"] * gains, "side", "batch", ""]
    rows = []
    for one in shown_points(schedule):
        row = schedule.rows[one.row]
        rows.append(
            [
                f"{one.epoch:.4g}",
                f"{one.samples:,}",
                "-" if one.step is None else f"{one.step:,}",
                f"{one.learning_rate:.4g}",
                *[f"{row.most * one.learning_rate:.4g}"] * gains,
                f"{row.resolution} px",
                local_batches(row.local_batch_sizes)
                if schedule.served
                else str(row.global_batch_size),
                one.what,
            ]
        )
    return stacked(
        facts(f"the learning rate of {schedule.name}", fact_rows(schedule)),
        table("by then, and from there on", head, rows, left=[-1]),
    )


def shown_points(schedule: RateSchedule) -> list[SchedulePoint]:
    """Points where something happens, and evenly spaced ones that are not close to these."""
    points = schedule.points
    marked = [one for one in points if one.what]
    apart = schedule.epochs / (2 * EVENLY)
    between = [
        points[index]
        for index in evenly(range(len(points)), EVENLY)
        if all(abs(points[index].epoch - one.epoch) >= apart for one in marked)
    ]
    return sorted([*marked, *between], key=lambda one: one.epoch)
