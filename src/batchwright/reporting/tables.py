"""Tables for a terminal: what was measured, what was decided, how it went.

Each function returns a rich renderable; print it with ``rich.console.Console().print``. Names from
outside pass through `printable`, and markup in them is not interpreted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import Plan, Profile, RunSummary
from batchwright.reporting.reading import (
    accounting,
    accuracy,
    comparisons,
    counted,
    duration,
    header_rows,
    in_seconds,
    is_chosen,
    last_evaluated,
    number,
    percent,
    printable,
    size,
    source,
    stage_rows,
    worker_totals,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def profile_table(profile: Profile) -> RenderableType:
    """What `probe` measured: hardware, step times, memory, all-reduce and gradient noise."""
    cluster, noise = profile.cluster, profile.noise
    facts = _facts(f"{profile.network.name} on {profile.data.name}")
    _row(facts, "device", f"{cluster.device_name} ({cluster.device})")
    _row(facts, "workers", f"{cluster.workers}, {counted(cluster.threads, 'thread')} each")
    _row(facts, "memory per worker", size(cluster.memory_bytes))
    _row(facts, "gradient", size(profile.network.trained_bytes))
    scale = noise.noise_scale if noise else None
    _row(
        facts, "gradient noise scale", f"{number(scale)} samples" if scale else "below measurement"
    )
    _row(facts, "measured in", duration(profile.probe_seconds))
    return _stack(facts, _step_times(profile), _memory(profile), _collectives(profile))


def plan_table(plan: Plan) -> RenderableType:
    """What `plan` decided, why, and what else it considered."""
    header = _facts(f"{plan.network.name} on {plan.data.name}")
    for word, value in header_rows(plan):
        _row(header, word, value)
    return _stack(header, _stages(plan), _reasons(plan), _candidates(plan))


def summary_table(summary: RunSummary) -> RenderableType:
    """How the run went: predicted against measured, accuracy, where the time went."""
    return _stack(_predicted(summary), _accuracies(summary), _time(summary), _workers(summary))


# ------------------------------------------------------------------------------------ the profile


def _step_times(profile: Profile) -> Table:
    table = _table(
        "seconds per step, all workers at once (median; quartiles)",
        ["side", "local batch", "compute", "exchange", "step", "images / s"],
    )
    for one in profile.steps:
        _row(
            table,
            f"{one.resolution} px",
            str(one.local_batch_size),
            number(one.compute_seconds),
            number(one.sync_seconds),
            f"{number(one.step_seconds)} ({number(one.step_low)} to {number(one.step_high)})",
            number(one.workers * one.local_batch_size / one.step_seconds),
        )
    return table


def _memory(profile: Profile) -> Table:
    table = _table("peak memory of one worker", ["side", "local batch", "tensors"])
    for one in profile.memory:
        _row(table, f"{one.resolution} px", str(one.local_batch_size), size(one.peak_bytes))
    return table


def _collectives(profile: Profile) -> Table:
    table = _table("all-reduce (median; quartiles)", ["message", "workers", "seconds"])
    for one in profile.collectives:
        seconds = f"{number(one.seconds)} ({number(one.low)} to {number(one.high)})"
        _row(table, size(one.bytes), str(one.workers), seconds)
    return table


# --------------------------------------------------------------------------------------- the plan


def _stages(plan: Plan) -> Table:
    (word, stages), *rows = stage_rows(plan)
    table = _table("the plan", [word, *stages])
    table.columns[0].justify = "left"
    for name, values in rows:
        _row(table, name, *values)
    return table


def _reasons(plan: Plan) -> Table:
    table = _table("why", ["choice", "reason, and where it comes from"])
    for column in table.columns:
        column.justify = "left"
    for one in plan.reasons:
        why = f"{one.why} [{source(one.source, one.reference)}]"
        _row(table, f"{one.choice}: {one.value}", why)
    return table


def _candidates(plan: Plan) -> Table:
    table = _table(
        "considered (per epoch of training, 95 % intervals)",
        ["", "global batch", "workers", "steps", "seconds", "peak memory"],
    )
    for one in plan.considered:
        chosen = is_chosen(plan, one)
        marks = (("chosen", chosen), ("extrapolated", one.extrapolated))
        _row(
            table,
            ", ".join(word for word, applies in marks if applies),
            f"{one.global_batch_size:,}",
            str(one.workers),
            f"{one.steps_per_epoch:,}",
            in_seconds(one.epoch_seconds),
            size(one.peak_bytes.value),
            style="bold" if chosen else None,
        )
    return table


# -------------------------------------------------------------------------------------- the run


def _predicted(summary: RunSummary) -> Table:
    table = _table(
        "seconds per epoch of training",
        ["stage", "predicted (95 %)", "measured (median)", "the prediction was"],
    )
    table.columns[-1].justify = "left"
    for one in comparisons(summary):
        measured = "not measured" if one.measured is None else number(one.measured)
        _row(
            table,
            str(one.stage),
            in_seconds(one.predicted),
            measured,
            one.verdict,
        )
    return table


def _accuracies(summary: RunSummary) -> Table:
    table = _table("held-out accuracy", ["", "epoch", "accuracy", "loss"])
    for word, epoch in (("last", last_evaluated(summary)), ("best", summary.best_epoch)):
        loss = "" if epoch is None or epoch.val_loss is None else number(epoch.val_loss)
        number_of = "" if epoch is None else f"{epoch.epoch + 1} of {summary.plan.epochs}"
        _row(table, word, number_of, accuracy(epoch), loss)
    return table


def _time(summary: RunSummary) -> Table:
    parts = accounting(summary)
    total = sum(seconds for _, seconds in parts)
    table = _table("where the time went", ["part", "time", "share"])
    table.columns[0].justify = "left"
    for name, seconds in parts:
        _row(table, name, duration(seconds), percent(seconds / total if total else 0.0))
    table.add_section()
    _row(table, "all", duration(total), "")
    return table


def _workers(summary: RunSummary) -> Table:
    table = _table(
        "per worker", ["worker", "local batch", "samples", "input", "compute", "exchange and wait"]
    )
    for one in worker_totals(summary):
        _row(
            table,
            str(one.rank),
            f"{one.local_batch_size:,}",
            f"{one.samples:,}",
            duration(one.input_seconds),
            duration(one.compute_seconds),
            duration(one.communication_seconds),
        )
    return table


# ------------------------------------------------------------------------------------------ rich


def _stack(*tables: Table) -> RenderableType:
    """The tables that have rows, one below the other."""
    from rich.console import Group

    return Group(*(table for table in tables if table.row_count))


def _table(title: str, columns: list[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=name == "seconds")
    return table


def _facts(title: str) -> Table:
    table = _table(title, ["", ""])
    table.show_header = False
    for column in table.columns:
        column.justify = "left"
    return table


def _row(table: Table, *cells: str, style: str | None = None) -> None:
    from rich.text import Text

    table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
