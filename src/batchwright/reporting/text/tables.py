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
    Profile,
)
from batchwright.records.text.formatting import (
    counted,
    duration,
    in_bytes,
    in_seconds,
    number,
    size,
)
from batchwright.records.text.load_text import load_words
from batchwright.reporting.text.terminal import add, new_facts, new_table, stacked

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def profile_table(profile: Profile) -> RenderableType:
    """What `probe` measured: hardware, step times, memory, all-reduce and gradient noise."""
    cluster, noise = profile.cluster, profile.noise
    facts = new_facts(f"{profile.network.name} on {profile.data.name}")
    add(facts, "device", f"{cluster.device_name} ({cluster.device})")
    add(facts, "workers", f"{cluster.workers}, {counted(cluster.threads, 'thread')} each")
    add(facts, "memory per worker", size(cluster.memory_bytes))
    add(facts, "gradient", size(profile.network.trained_bytes))
    parts = profile.memory_parts
    if parts is not None:
        named = ((name, getattr(parts, name)) for name in type(parts).model_fields)
        kept = ", ".join(f"{name} {size(count)}" for name, count in named if count)
        add(facts, "memory whatever the batch", kept)
    scale = noise.noise_scale if noise else None
    add(facts, "gradient noise scale", f"{number(scale)} samples" if scale else "below measurement")
    add(facts, "measured in", duration(profile.probe_seconds))
    busy = load_words(profile.load)
    if busy:
        add(facts, "busy meanwhile", busy)
    return stacked(
        facts, _step_times(profile), _pairs(profile), _memory(profile), _collectives(profile)
    )


def check_table(check: Check) -> RenderableType:
    """Predicted against measured, point by point, a table for each quantity."""
    tables = [_checked(check, quantity, title) for quantity, title in _QUANTITIES.items()]
    lost = new_table("steps that did not fit", ["workers x batch, side"])
    for one in check.out_of_memory:
        add(lost, _place(one))
    return stacked(*tables, _rounds(check), lost)


_QUANTITIES = {
    "step_seconds": "seconds per step",
    "peak_bytes": "peak memory of one worker, tensors",
    "resident_bytes": "peak memory of one worker, whole process",
}


def _checked(check: Check, quantity: str, title: str) -> Table:
    columns = ["workers x batch, side", "predicted (95 %)", "measured", "error", ""]
    table = new_table(title, columns)
    for one in check.points:
        if one.quantity != quantity:
            continue
        predicted = Estimate(value=one.predicted, low=one.low, high=one.high)
        seconds = quantity == "step_seconds"
        add(
            table,
            _place(one),
            in_seconds(predicted) if seconds else in_bytes(predicted),
            number(one.measured) if seconds else size(one.measured),
            f"{100 * one.error:+.1f} %",
            "inside" if one.inside else "outside",
        )
    return table


def _rounds(check: Check) -> Table:
    table = new_table(
        "rounds with two batch sizes, planned to end together",
        ["workers", "side", "local batch", "samples", "seconds", "difference"],
    )
    for one in check.rounds:
        pair = one.pair
        side = f"{pair.resolution} px"
        add(
            table,
            *(str(pair.large_workers), side, str(pair.large_batch)),
            *(f"{one.large_samples:,.0f}", number(one.large_seconds), ""),
        )
        add(
            table,
            *(str(pair.small_workers), side, str(pair.small_batch)),
            *(f"{one.small_samples:,.0f}", number(one.small_seconds)),
            f"{100 * one.difference:+.1f} %",
        )
    return table


def _place(one: CheckPoint | OutOfMemory) -> str:
    planned = ", planned" if isinstance(one, CheckPoint) and one.planned else ""
    return f"{one.workers} x {one.local_batch_size}, {one.resolution} px{planned}"


# ------------------------------------------------------------------------------------ the profile


def _step_times(profile: Profile) -> Table:
    table = new_table(
        "seconds per step, all workers at once (median; quartiles)",
        ["workers", "side", "local batch", "exchange", "step", "visits", "images / s"],
    )
    for one in profile.steps:
        add(
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


def _pairs(profile: Profile) -> Table:
    table = new_table(
        "two batches side by side (median; range of the ratio)",
        ["workers", "side", "local batches", "large step", "small / large step", "visits"],
    )
    for one in profile.pairs:
        ratio = one.small_seconds / one.large_seconds
        low, high = min(one.ratios, default=ratio), max(one.ratios, default=ratio)
        add(
            table,
            f"{one.large_workers} + {one.small_workers}",
            f"{one.resolution} px",
            f"{one.large_batch} and {one.small_batch}",
            number(one.large_seconds),
            f"{number(ratio)} ({number(low)} to {number(high)})",
            str(one.repeats),
        )
    return table


def _memory(profile: Profile) -> Table:
    table = new_table(
        "peak memory of one worker", ["workers", "side", "local batch", "tensors", "process"]
    )
    for one in profile.memory:
        resident = size(one.resident_bytes) if one.resident_bytes else "-"
        place = (str(one.workers), f"{one.resolution} px", str(one.local_batch_size))
        add(table, *place, size(one.peak_bytes), resident)
    for lost in profile.out_of_memory:
        place = (str(lost.workers), f"{lost.resolution} px", str(lost.local_batch_size))
        add(table, *place, "did not fit", "-")
    return table


def _collectives(profile: Profile) -> Table:
    table = new_table(
        "exchanges between workers (median; quartiles)",
        ["operation", "message", "workers", "seconds"],
    )
    for one in profile.collectives:
        seconds = f"{number(one.seconds)} ({number(one.low)} to {number(one.high)})"
        add(table, one.operation, size(one.bytes), str(one.workers), seconds)
    return table
