"""Candidates that are level with the chosen one: measurements cannot tell which is better.

A choice compares times, so the error of their ratio counts. Neither the error that all measurements
have in common nor the drift of later measurements is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import hypot, inf, log

from batchwright.planning.candidates.knees import KneeFit, saving
from batchwright.planning.candidates.table import Row
from batchwright.prediction.fit import Z_975
from batchwright.records import Estimate

_AS_MANY = Estimate(value=1, low=1, high=1)


def level_in_value(
    error: Callable[[Row], float],
    chosen: Row,
    rows: Iterable[Row],
    knees: Sequence[KneeFit],
    value: Callable[[Row], float],
    epochs: Callable[[Row], Estimate | None] = lambda _: None,
) -> tuple[Row, ...]:
    """Candidates whose value may be as small as the chosen one's.

    Args:
        error: Standard error of a candidate's time, as a share of it.
        chosen: The candidate with the least value.
        rows: Candidates within the limits.
        knees: The knee of each cluster.
        value: The value to minimize, in proportion to the candidate's time.
        epochs: Epochs of a candidate over those of the chosen one, where the value depends on them;
            `None` if not known.
    """
    lines = {knee.cluster: knee for knee in knees if knee.line is not None}
    found = []
    for row in rows:
        if row is chosen or value(row) in (0.0, inf):
            continue
        apart = log(value(row) / value(chosen))
        ratio = epochs(row) or _AS_MANY
        off = hypot(error(row), error(chosen))
        if row.cluster is chosen.cluster and row.cluster in lines:
            # Both times are on one line, so they are off together: only its fixed part matters.
            saves, doubt = saving(lines[row.cluster], min(row.batch, chosen.batch))
            off = abs(apart - log(ratio.value)) * doubt / saves if saves > 0 else off
        if apart <= hypot(Z_975 * off, log(ratio.value / ratio.low)):
            found.append(row)
    return tuple(found)


def level_batches(
    chosen: Row, rows: Sequence[Row], knee: KneeFit | None, gain: float
) -> tuple[Row, ...]:
    """Candidates of the chosen cluster that may be its knee.

    Args:
        chosen: The candidate at the knee, or nearest to it within the limits.
        rows: Candidates within the limits.
        knee: The cluster's knee; `None`: the cluster has one candidate.
        gain: Share of the time that doubling must save.
    """
    if knee is None:
        return ()
    own = [row for row in knee.rows if row in set(rows)]
    found = _first_at_most(own, [saving(knee, row.batch) for row in own], gain)
    return tuple(row for row in found if row is not chosen)


def level_sizes(
    error: Callable[[Row], float], chosen: Row, steps: Sequence[Row], gain: float
) -> tuple[Row, ...]:
    """Clusters, each at its best batch, that may be the smallest whose next size saves too little.

    Args:
        error: Standard error of a candidate's time, as a share of it.
        chosen: The chosen candidate.
        steps: Candidates by number of workers, one for each number.
        gain: Share of the time that the next size must save.
    """
    saves = []
    for row, larger in pairwise(steps):
        ratio = larger.seconds / row.seconds
        saves.append((1 - ratio, ratio * hypot(error(row), error(larger))))
    found = _first_at_most(steps, [*saves, (0.0, 0.0)], gain)
    return tuple(row for row in found if row is not chosen)


def _first_at_most(
    rows: Sequence[Row], saves: Sequence[tuple[float, float]], gain: float
) -> list[Row]:
    """Rows that may be the first from which going on saves at most ``gain``, a share.

    ``saves``: That share and its standard error. The last row is among them if it may be that no
    row does.
    """
    found = []
    for row, (share, error) in zip(rows, saves, strict=True):
        if share - Z_975 * error <= gain or row is rows[-1]:
            found.append(row)
        if share + Z_975 * error <= gain:
            break
    return found
