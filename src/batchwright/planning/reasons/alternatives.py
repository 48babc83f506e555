"""What else could have been chosen, and what that would lose by prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from batchwright.planning.candidates.choice import Choice
from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.table import Row
from batchwright.records import Alternative

_LEAST_POINTS = 0.05  # hundredths of a share
_MOST_SIZES = 8  # of a long list of clusters, those nearest to the chosen one


def compared(other: Row, chosen: Row) -> str:
    """Time and cost of one candidate against another, as shares.

    Of all the job's epochs or, where that is the objective and runs do not speak against both,
    to the target accuracy.

    Example: ``12.3 % more time, 4.0 % less cost``.
    """
    if chosen.target_seconds is not None and not isfinite(chosen.seconds):
        other, chosen = (replace(row, target_seconds=None) for row in (other, chosen))
    aim = "" if chosen.target_seconds is None else " to the accuracy"
    if not isfinite(other.seconds):
        texts = ["not known to reach the accuracy"]
    else:
        texts = [share(other.seconds, chosen.seconds, f"time{aim}")]
        if other.cost is not None and chosen.cost is not None:
            texts.append(share(other.expense, chosen.expense, f"cost{aim}"))
        elif other.mix.workers != chosen.mix.workers:
            texts.append(share(other.expense, chosen.expense, f"worker-hours{aim}"))
    if chosen.target_seconds is None and None not in (other.accuracy, chosen.accuracy):
        texts.append(_points(other, chosen))
    if other.misses:
        texts.append("but " + " and ".join(miss.text for miss in other.misses))
    return ", ".join(texts)


def _points(other: Row, chosen: Row) -> str:
    apart = 100 * ((other.accuracy or 0.0) - (chosen.accuracy or 0.0))
    if abs(apart) < _LEAST_POINTS:
        return "the same accuracy"
    return f"{abs(apart):.1f} points {'more' if apart > 0 else 'less'} accuracy"


def share(other: float, chosen: float, what: str) -> str:
    """How much more of something another takes, in words."""
    change = other / chosen - 1
    if abs(change) < 0.0005:
        return f"the same {what}"
    return f"{abs(change):.1%} {'more' if change > 0 else 'less'} {what}"


def batches(chosen: Row, bend: KneeFit | None) -> tuple[Alternative, ...]:
    """The next smaller and larger batch of the same cluster, those beyond a limit too."""
    rows = bend.rows if bend else ()
    smaller = [row for row in rows if row.batch < chosen.batch][-1:]
    larger = [row for row in rows if row.batch > chosen.batch][:1]
    return tuple(
        Alternative(value=f"{row.batch} samples", loss=compared(row, chosen))
        for row in smaller + larger
    )


def sizes(choice: Choice, *, named: bool) -> tuple[Alternative, ...]:
    """Other clusters at their best batch, at most the few nearest in size."""
    others = [row for row in choice.sizes if row.mix is not choice.row.mix]
    near = sorted(others, key=lambda row: abs(row.mix.workers - choice.row.mix.workers))
    shown = set(near[:_MOST_SIZES])
    return tuple(
        Alternative(value=_named(row, named=named), loss=compared(row, choice.row))
        for row in others
        if row in shown
    )


def objectives(choice: Choice, *, named: bool) -> tuple[Alternative, ...]:
    """What the other objectives would choose."""
    return tuple(
        Alternative(
            value=f"{_named(row, named=named)} (goal.objective={name})",
            loss=compared(row, choice.row),
        )
        for name, row in sorted(choice.others.items())
    )


def resolutions(chosen: Row, rows: Sequence[Row]) -> tuple[Alternative, ...]:
    """The same workers and batch at the other resolutions."""
    return tuple(
        Alternative(value=f"{row.resolution} px", loss=compared(row, chosen))
        for row in rows
        if row.mix is chosen.mix
        and row.batch == chosen.batch
        and row.resolution != chosen.resolution
    )


def _named(row: Row, *, named: bool) -> str:
    workers = str(row.mix) if named else f"{row.mix.workers} worker(s)"
    return f"{workers}, global batch {row.batch}"
