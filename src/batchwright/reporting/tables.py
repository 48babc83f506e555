"""Tables for a terminal: what was measured, what was decided, how it went.

Each function returns a rich renderable; print it with ``rich.console.Console().print``. Names from
outside pass through `printable`, and markup in them is not interpreted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.records import (
    Check,
    CheckPoint,
    Estimate,
    OutOfMemory,
    Plan,
    Profile,
    RunSummary,
)
from batchwright.records.explaining import (
    candidate_words,
    cluster_words,
    is_chosen,
    kept_candidates,
)
from batchwright.records.words import (
    counted,
    duration,
    in_bytes,
    in_seconds,
    number,
    percent,
    printable,
    size,
    source,
)
from batchwright.reporting.plan_words import header_rows, stage_rows
from batchwright.reporting.reading import (
    accounting,
    accuracy,
    comparisons,
    last_evaluated,
    worker_rows,
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
    parts = profile.memory_parts
    if parts is not None:
        named = ((name, getattr(parts, name)) for name in type(parts).model_fields)
        kept = ", ".join(f"{name} {size(count)}" for name, count in named if count)
        _row(facts, "memory whatever the batch", kept)
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


def check_table(check: Check) -> RenderableType:
    """Predicted against measured, point by point, a table for each quantity."""
    tables = [_checked(check, quantity, title) for quantity, title in _QUANTITIES.items()]
    lost = _table("steps that did not fit", ["workers x batch, side"])
    for one in check.out_of_memory:
        _row(lost, _place(one))
    return _stack(*tables, lost)


_QUANTITIES = {
    "step_seconds": "seconds per step",
    "peak_bytes": "peak memory of one worker, tensors",
    "resident_bytes": "peak memory of one worker, whole process",
}


def _checked(check: Check, quantity: str, title: str) -> Table:
    columns = ["workers x batch, side", "predicted (95 %)", "measured", "error", ""]
    table = _table(title, columns)
    for one in check.points:
        if one.quantity != quantity:
            continue
        predicted = Estimate(value=one.predicted, low=one.low, high=one.high)
        seconds = quantity == "step_seconds"
        _row(
            table,
            _place(one),
            in_seconds(predicted) if seconds else in_bytes(predicted),
            number(one.measured) if seconds else size(one.measured),
            f"{100 * one.error:+.1f} %",
            "inside" if one.inside else "outside",
        )
    return table


def _place(one: CheckPoint | OutOfMemory) -> str:
    return f"{one.workers} x {one.local_batch_size}, {one.resolution} px"


def summary_table(summary: RunSummary) -> RenderableType:
    """How the run went: predicted against measured, accuracy, where the time went."""
    return _stack(_predicted(summary), _accuracies(summary), _time(summary), _workers(summary))


# ------------------------------------------------------------------------------------ the profile


def _step_times(profile: Profile) -> Table:
    table = _table(
        "seconds per step, all workers at once (median; quartiles)",
        ["workers", "side", "local batch", "exchange", "step", "visits", "images / s"],
    )
    for one in profile.steps:
        _row(
            table,
            str(one.workers),
            f"{one.resolution} px",
            str(one.local_batch_size),
            number(one.sync_seconds) if one.workers > 1 else "-",
            f"{number(one.step_seconds)} ({number(one.step_low)} to {number(one.step_high)})",
            str(len(one.visits) or 1),
            number(one.workers * one.local_batch_size / one.step_seconds),
        )
    return table


def _memory(profile: Profile) -> Table:
    table = _table(
        "peak memory of one worker", ["workers", "side", "local batch", "tensors", "process"]
    )
    for one in profile.memory:
        resident = size(one.resident_bytes) if one.resident_bytes else "-"
        place = (str(one.workers), f"{one.resolution} px", str(one.local_batch_size))
        _row(table, *place, size(one.peak_bytes), resident)
    for lost in profile.out_of_memory:
        place = (str(lost.workers), f"{lost.resolution} px", str(lost.local_batch_size))
        _row(table, *place, "did not fit", "-")
    return table


def _collectives(profile: Profile) -> Table:
    table = _table(
        "exchanges between workers (median; quartiles)",
        ["operation", "message", "workers", "seconds"],
    )
    for one in profile.collectives:
        seconds = f"{number(one.seconds)} ({number(one.low)} to {number(one.high)})"
        _row(table, one.operation, size(one.bytes), str(one.workers), seconds)
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
        ["", "global batch", "cluster", "side", "seconds", "peak memory"],
    )
    for one in kept_candidates(plan):
        _row(
            table,
            candidate_words(plan, one),
            f"{one.global_batch_size:,}",
            cluster_words(one.workers, one.kinds),
            f"{one.resolution} px",
            in_seconds(one.epoch_seconds),
            size(one.peak_bytes.value),
            style="bold" if is_chosen(plan, one) else None,
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
    head, *rows = worker_rows(summary)
    table = _table("per worker", head)
    for row in rows:
        _row(table, *row)
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
        table.add_column(name, justify="right", no_wrap=name in ("seconds", "step"))
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
