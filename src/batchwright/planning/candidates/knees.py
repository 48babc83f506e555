"""The knee of each cluster at each resolution: the batch whose doubling saves too little time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import hypot, inf, isfinite, log2

from batchwright.algorithms.batch_size import as_compared, knee_of_line, knee_point, kneedle
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.local_batches import shares_by_kind, split
from batchwright.planning.candidates.table import Row
from batchwright.planning.gradient_scaling import OF_NOISE
from batchwright.prediction.fit import Z_975
from batchwright.records import Knee

_HALVINGS = 12  # bisections, in the logarithm of the batch, that find an end of an interval


@dataclass(frozen=True)
class KneeFit:
    """A cluster's candidates at one resolution, and their knee."""

    # The candidates by rising batch, without a batch that the job alone asks for.
    rows: tuple[Row, ...]
    row: Row | None  # the candidate at the knee; `None` if every doubling saves enough time
    # Fixed seconds of a step, update included, and seconds per sample of the global batch, where
    # step times are a line up to twice the knee; else `None`.
    line: tuple[float, float] | None
    closed_form: float | None  # the knee by that line, in samples; `None` without a line
    # The knee by Kneedle over the same candidates, in samples; `None` if it finds none.
    kneedle: int | None
    # batch -> seconds that its optimizer's update takes more than the measured one.
    surplus: Callable[[float], float]

    @property
    def cluster(self) -> ClusterOption:
        """The workers."""
        return self.rows[0].cluster

    @property
    def resolution(self) -> int:
        """Image side, in pixels."""
        return self.rows[0].resolution

    def per_sample(self, batch: float) -> float:
        """Seconds of a step over its samples, for any global batch, candidate or not."""
        return _seconds_per_sample(self.rows, batch, self.surplus)

    @property
    def best(self) -> Row | None:
        """The candidate at the knee, or the nearest one within the limits; `None` if there is none.

        Without a knee it is the largest batch. A knee that misses a limit is replaced by the next
        larger batch within the limits, as that is quicker, or else by the largest one.
        """
        allowed = [row for row in self.rows if not row.misses]
        if not allowed or self.row is None:
            return allowed[-1] if allowed else None
        knee = self.row.batch
        return next((row for row in allowed if row.batch >= knee), allowed[-1])


def knee_fits_of(
    rows: Sequence[Row], doubling_gain: float, surplus: Callable[[ClusterOption, float], float]
) -> list[KneeFit]:
    """The knee of each cluster at each resolution.

    Args:
        rows: Candidates, sorted by `Row.order`.
        doubling_gain: Least share of the time that a doubling is to save, as in the goal.
        surplus: (cluster, batch) -> seconds that the update takes more than the measured one. The
            time of a row includes them; the models of its kinds of workers do not.
    """
    found = []
    for (_, cluster), group in groupby(rows, key=lambda row: (row.resolution, row.cluster)):
        candidates = tuple(row for row in group if not row.asked)
        if candidates:
            found.append(_knee_fit(candidates, doubling_gain, partial(surplus, cluster)))
    return found


def _knee_fit(rows: tuple[Row, ...], gain: float, surplus: Callable[[float], float]) -> KneeFit:
    cluster, side = rows[0].cluster, rows[0].resolution
    # Limits on the batch itself leave candidates out here; limits on time and cost come later.
    of_workers = {"least_local_batch", "most_local_batch"}
    bounds = {"goal.memory", "loaders", "goal.least_steps", *of_workers, *OF_NOISE}
    within = [row for row in rows if bounds.isdisjoint(miss.limit for miss in row.misses)]
    batches = [row.batch for row in within]
    line = line_of(cluster, side)
    closed_form = batch = None
    if line is not None:
        line = line[0] + surplus(rows[0].batch), line[1]
        closed_form = knee_of_line(*line, gain)
        batch = min((n for n in batches if n >= as_compared(closed_form)), default=None)
        below = [rows[0].batch, *(n for n in batches if batch is None or n <= batch)]
        updates = len({surplus(n) for one in below for n in (one, 2 * one)})
        # There is no single line where the optimizer changes on the way, or where the curve goes on
        # in the shape of another number of workers. Several kinds have unequal shares of the batch,
        # so their ends cannot be compared with it.
        ends = [kind.straight_to(cluster.workers, side) for kind, _ in cluster.members]
        straight = len(ends) == 1 and 2 * below[-1] <= ends[0] * cluster.workers
        if updates > 1 or not (min(ends) == inf or straight):
            line = closed_form = None
    if line is None:
        batch = knee_point(batches, lambda n: _seconds_per_sample(rows, n, surplus), gain)
    bent = None
    if within:
        bent = kneedle([log2(batch) for batch in batches], [row.per_sample for row in within])
    return KneeFit(
        rows=rows,
        row=next((row for row in rows if row.batch == batch), None),
        line=line,
        closed_form=closed_form if closed_form is not None and isfinite(closed_form) else None,
        kneedle=round(2**bent) if bent is not None else None,
        surplus=surplus,
    )


def line_of(cluster: ClusterOption, resolution: int) -> tuple[float, float] | None:
    r"""Fixed seconds of a step and seconds per sample of the global batch; `None` without a line.

    In a step of :math:`t` seconds the :math:`n_k` workers of kind :math:`k` go through
    :math:`n_k (t - \beta_k) / a_k` samples. All kinds together go through :math:`B = t S - R`
    with :math:`S = \sum n_k / a_k` and :math:`R = \sum n_k \beta_k / a_k`; so
    :math:`t = R / S + B / S`.
    """
    if any(kind.cuts(cluster.workers) for kind, _ in cluster.members):
        return None  # with several passes, time rises in steps
    workers, rate, behind = cluster.workers, 0.0, 0.0
    for kind, count in cluster.members:
        line = kind.line(workers, resolution)
        if line is None or line[1] <= 0:
            return line if len(cluster.members) == 1 else None
        fixed, slope = line
        rate += count / slope
        behind += count * fixed / slope
    return behind / rate, 1 / rate


def _seconds_per_sample(
    rows: Sequence[Row], batch: float, surplus: Callable[[float], float]
) -> float:
    """Seconds of a step over its samples: with the update that was measured, and the surplus."""
    cluster, side, more = rows[0].cluster, rows[0].resolution, surplus(batch) / batch
    if len(cluster.members) == 1:
        kind, workers = cluster.members[0]
        local = max(1, round(batch / workers))
        step = kind.seconds if kind.cuts(workers) else kind.seconds_at_once
        return step(workers, side, local) / (local * workers) + more
    right = next((i for i, row in enumerate(rows) if row.batch >= batch), None)
    if right is None or (right == 0 and rows[0].batch != batch):
        totals = split(cluster, side, max(round(batch), cluster.least)) or rows[-1].totals
        slowest = max(
            kind.seconds_at_once(cluster.workers, side, share)
            for kind, share in shares_by_kind(cluster, totals)
        )
        return slowest / sum(totals) + more
    if right == 0:
        return (rows[0].step_seconds - surplus(batch)) / batch + more
    first, last = rows[right - 1], rows[right]  # linear between neighbouring candidates
    share = (batch - first.batch) / (last.batch - first.batch)
    low, high = (row.step_seconds - surplus(row.batch) for row in (first, last))
    return (low + share * (high - low)) / batch + more


def knee_record(knee: KneeFit, doubling_gain: float, *, named: bool, ends: bool) -> Knee:
    """The knee as a record.

    Args:
        knee: The knee.
        doubling_gain: Least share of the time that a doubling is to save, as in the goal.
        named: Whether workers are of named kinds.
        ends: Whether to compute the interval of the knee.
    """
    low, high = _ends(knee, doubling_gain) if ends else (None, None)
    return Knee(
        workers=knee.cluster.workers,
        kinds=knee.cluster.kinds if named else (),
        resolution=knee.resolution,
        global_batch_size=knee.row.batch if knee.row else None,
        low=low,
        high=high,
        closed_form=knee.closed_form,
        kneedle=knee.kneedle,
    )


def _ends(knee: KneeFit, gain: float) -> tuple[float | None, float | None]:
    """The 95 % interval of the knee: where doubling saves ``gain`` plus or minus its error."""
    cut = any(kind.cuts(knee.cluster.workers) for kind, _ in knee.cluster.members)
    if knee.row is None or cut or len(knee.cluster.members) > 1:
        return None, None
    off = Z_975 * _saving_error(knee, knee.row.batch, gain)
    low, high = (_crossing(knee, share) for share in (gain + off, gain - off))
    if low is not None and knee.surplus(max(1.0, low)) > knee.surplus(knee.row.batch):
        return None, None  # the step time jumps at the knee, as the optimizer changes there
    return low, None if high is None or not isfinite(high) else high


def saving(knee: KneeFit, batch: int) -> tuple[float, float]:
    """Share of the time per sample that doubling ``batch`` saves, and its standard error."""
    saves = 1 - knee.per_sample(2 * batch) / knee.per_sample(batch)
    return saves, _saving_error(knee, batch, saves)


def _saving_error(knee: KneeFit, batch: int, saves: float) -> float:
    r"""Standard error of the share that doubling a batch saves.

    On a line the share is :math:`\beta / 2 t(b)`, so its error is that of both. Elsewhere the share
    is one minus a ratio of two step times, and its error is theirs; of several kinds of workers the
    largest error counts. The extra time of another optimizer's update is taken as exact.
    """
    side, workers = knee.resolution, knee.cluster.workers
    if len(knee.cluster.members) == 1:
        kind, _ = knee.cluster.members[0]
        local, more = max(kind.least, batch // workers), knee.surplus(batch)
        line = kind.fitted_line(workers, side)
        if knee.line is not None and line is not None and line.intercept > 0:
            parts = [(line.at(x) / (line.at(x) + more), line.own_error(x)) for x in (0, local)]
            return saves * hypot(*(share * error for share, error in parts))
    share = max(1, batch // workers)
    errors = [
        max(kind.times.comparison_error(workers, side, n) for kind, _ in knee.cluster.members)
        for n in (share, 2 * share)
    ]
    return (1 - saves) * hypot(*errors)


def _crossing(knee: KneeFit, gain: float) -> float | None:
    """Batch from which on doubling saves at most ``gain``, a share; `None` if no batch does.

    Where there is no line, it is no smaller than the smallest candidate.
    """
    if gain <= 0:
        return None
    if knee.line is not None:
        return knee_of_line(*knee.line, gain)

    def enough(batch: float) -> bool:
        return 1 - knee.per_sample(2 * batch) / knee.per_sample(batch) <= gain

    first = knee.rows[0].batch
    if enough(first):
        return first
    low, high = log2(first), log2(knee.rows[-1].batch) + 4
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(2**middle) else (middle, high)
    return 2**high
