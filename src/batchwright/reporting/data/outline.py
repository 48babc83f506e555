"""Cuts a plan down to what a page has room for, so that no plan takes long to draw.

A run may have a plan of thousands of stages, candidates or reasons. The time to draw them is at
least linear in their number, for some parts quadratic. So the plan is cut first; `outline_words`
says how much of it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchwright.records import Plan, Reason, Stage
from batchwright.records.base import sum_of
from batchwright.records.text.plan_text import planned_sizes
from batchwright.reporting.data.worker_curves import spread

MAXIMUM_ROWS = 200
MAXIMUM_CANDIDATES = 600
MAXIMUM_KNEES = 100
MAXIMUM_REASONS = 60
MAXIMUM_ALTERNATIVES = 20
LONGEST_TEXT = 2000
"""Most characters of a reason's text."""


def outlined(plan: Plan) -> Plan:
    """The plan itself, or one with fewer stages, candidates, knees and reasons.

    Many stages are divided into blocks of neighbours. From each block the stages with the lowest
    and with the highest resolution, batch and rate stay, in their order. They share the block's
    epochs and have the mean of its predicted seconds, so that sums are those of the whole plan.
    (Evenly spaced stages could show a cycle of resolutions as a constant one.)
    """
    reasons = tuple(_reason(one) for one in plan.reasons[:MAXIMUM_REASONS])
    changes: dict[str, object] = {"reasons": reasons} if reasons != plan.reasons else {}
    if len(plan.stages) > MAXIMUM_ROWS:
        changes["stages"] = tuple(_rows(plan.stages))
    if len(plan.considered) > MAXIMUM_CANDIDATES:
        # A third of the room each for chosen candidates, the frontier, and all candidates.
        sizes = planned_sizes(plan)
        chosen = [
            one
            for one in plan.considered
            if (one.workers, one.resolution, one.global_batch_size) in sizes
        ]
        frontier = [one for one in plan.considered if one.frontier]
        shown = {
            id(one)
            for ones in (chosen, frontier, plan.considered)
            for one in spread(ones, MAXIMUM_CANDIDATES // 3)
        }
        changes["considered"] = tuple(one for one in plan.considered if id(one) in shown)
    if len(plan.knees) > MAXIMUM_KNEES:
        changes["knees"] = tuple(spread(plan.knees, MAXIMUM_KNEES))
    return plan.model_copy(update=changes) if changes else plan


def outline_words(plan: Plan) -> str:
    """How much of a plan `outlined` keeps, in a few sentences; empty if it keeps all."""
    rows, notes = len(plan.stages), []
    if rows > MAXIMUM_ROWS:
        notes.append(
            f"Of {rows:,} stages {MAXIMUM_ROWS} are shown, numbered anew: of each "
            f"{round(2 * rows / MAXIMUM_ROWS)} neighbours those with the lowest and with the "
            "highest resolution, batch and rate, at the mean of their predicted seconds."
        )
    if len(plan.considered) > MAXIMUM_CANDIDATES:
        notes.append(
            f"Of {len(plan.considered):,} candidates at most {MAXIMUM_CANDIDATES} are shown."
        )
    if len(plan.reasons) > MAXIMUM_REASONS:
        notes.append(f"Of {len(plan.reasons):,} reasons the first {MAXIMUM_REASONS} are shown.")
    return " ".join([*notes, "All are in plan.json."]) if notes else ""


def _rows(stages: Sequence[Stage]) -> Iterator[Stage]:
    """The kept stages of many: at most two of each block."""
    blocks = MAXIMUM_ROWS // 2
    for at in range(blocks):
        block = stages[len(stages) * at // blocks : len(stages) * (at + 1) // blocks]
        sizes = [(one.resolution, one.global_batch_size, one.learning_rate) for one in block]
        first, last = sorted((sizes.index(min(sizes)), sizes.index(max(sizes))))
        epochs = sum(one.epochs for one in block)
        times = ((one.epochs, one.predicted_epoch_seconds) for one in block)
        seconds = sum_of(times, over=epochs)
        shares = [epochs - epochs // 2, epochs // 2] if first != last else [epochs]
        for row, share in zip((first, last), shares, strict=False):
            changes = {"epochs": share, "predicted_epoch_seconds": seconds}
            yield block[row].model_copy(update=changes)


def _reason(reason: Reason) -> Reason:
    """The reason with texts and alternatives cut to a readable length."""
    shortened: dict[str, object] = {
        name: f"{text[:LONGEST_TEXT]}…"
        for name in ("choice", "value", "why", "reference")
        if len(text := getattr(reason, name)) > LONGEST_TEXT
    }
    few = reason.alternatives[:MAXIMUM_ALTERNATIVES]
    kept = tuple(
        one
        if len(one.value) + len(one.loss) <= LONGEST_TEXT
        else one.model_copy(update={"value": one.value[:80], "loss": f"{one.loss[:LONGEST_TEXT]}…"})
        for one in few
    )
    if kept != reason.alternatives:
        shortened |= {"alternatives": kept}
    return reason.model_copy(update=shortened) if shortened else reason
