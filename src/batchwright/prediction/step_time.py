r"""Seconds per training step against the local batch, the resolution and the number of workers.

Where it was measured, each number of workers and resolution has two curves over the batch
(`measured_curves`): the whole step S, and its computing C alone. Micro-batches exchange gradients
once, in the last:

.. math:: t = \sum_{j < n} C(m_j) + S(m_n)

Between two resolutions the time is linear in the pixels; between two measured numbers of workers,
linear in them. For more workers than measured, computing is that of the most measured, and the
exchange follows from a stated link (`collective.exchange_seconds`), overlapped as far as was
measured (`overlap.combine`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, hypot, log2
from typing import Protocol

from batchwright.errors import PlanError
from batchwright.prediction.collective import exchange_seconds, fit_collectives
from batchwright.prediction.contradictions import Key, key_of, place_of
from batchwright.prediction.curve import DOUBLING_ERROR, UNSEEN_BEND, Curve, fit_curve
from batchwright.prediction.drift import (
    HANDING_OVER,
    LATER_VISITS,
    Drift,
    level_error,
    load_deviation,
    median_share,
    point_seconds,
    pooled_skew,
    visit_deviation,
)
from batchwright.prediction.fit import (
    UNKNOWN_RELATIVE_ERROR,
    WIDEST,
    Z_975,
    between,
    student_t_975,
)
from batchwright.prediction.measured_curves import (
    MeasuredCurves,
    computing_seconds,
    measured_curves,
)
from batchwright.prediction.overlap import NO_OVERLAP, combine, fit_overlap
from batchwright.records import CollectiveTime, Estimate, Link, StepTime
from batchwright.records.text.formatting import counted, percent


class _Law(Protocol):
    """Seconds against the batch, measured or derived."""

    def at(self, batch: float) -> float: ...

    def standard_error(self, batch: float) -> float: ...

    def extrapolates(self, batch: float) -> bool: ...


@dataclass(frozen=True)
class _Blend:
    """A law between two others, or beyond them: ``first + share (second - first)``."""

    first: _Law  # the law at the smaller resolution or number of workers
    second: _Law  # the law at the larger one
    share: float  # 0 at the first, 1 at the second; outside of [0, 1] it extrapolates
    steepest: float  # largest ratio to the nearer end's time when it extrapolates
    beyond: float  # doublings beyond the nearer end; 0 between the two
    measured: bool  # whether a law between the two counts as measured

    def at(self, batch: float) -> float:
        first, second = self.first.at(batch), self.second.at(batch)
        value = first + self.share * (second - first)
        if self.share < 0:
            return min(max(value, first / self.steepest), first)
        if self.share > 1:
            return min(max(value, second), second * self.steepest)
        return value

    def standard_error(self, batch: float) -> float:
        value = self.at(batch)
        share = min(max(self.share, -1.0), 2.0)
        return hypot(
            (1 - share) * self.first.at(batch) * self.first.standard_error(batch) / value,
            share * self.second.at(batch) * self.second.standard_error(batch) / value,
            UNSEEN_BEND * max(0.0, 4 * self.share * (1 - self.share)),
            DOUBLING_ERROR * self.beyond,
        )

    def extrapolates(self, batch: float) -> bool:
        if not self.measured:
            return True
        return self.first.extrapolates(batch) or self.second.extrapolates(batch)


@dataclass(frozen=True)
class _Derived:
    """Measured computing, with an exchange by a stated link."""

    compute: _Law  # the law of computing
    exchange: float  # seconds of the exchange
    overlap: float  # gamma of `overlap.combine`

    def at(self, batch: float) -> float:
        return combine(self.compute.at(batch), self.exchange, self.overlap)

    def standard_error(self, batch: float) -> float:
        computing = self.compute.at(batch)
        # The whole exchange is uncertain: its time and its overlap are assumed.
        exposed = min(1.0, self.exchange / combine(computing, self.exchange, self.overlap))
        return hypot(self.compute.standard_error(batch), UNKNOWN_RELATIVE_ERROR * exposed)

    def extrapolates(self, batch: float) -> bool:  # noqa: ARG002 - the number of workers does
        return True


@dataclass(frozen=True)
class StepTimeModel:
    """Step times of one kind of worker."""

    workers: tuple[int, ...]  # measured numbers of workers, rising
    # Relative standard deviation of a visit around the point's long-run mean, beyond the scatter of
    # its steps, pooled over all points.
    drift: float
    # Gamma of `overlap.combine`, from 1 to 10; `None` if the data do not identify it.
    overlap: float | None
    notes: tuple[str, ...]  # what the data do not identify, in words
    _drifts: Mapping[int, Drift]  # by number of workers
    _levels: Mapping[int, float]  # error that all points have in common, by number of workers
    _skew: float
    # By workers and resolution: batches, and the relative standard deviation of visits to each.
    _scatter: Mapping[tuple[int, int], tuple[Sequence[int], Sequence[float]]]
    _whole: Mapping[tuple[int, int], Curve]
    _compute: Mapping[tuple[int, int], Curve]
    _gradient_bytes: int
    _link: Link | None
    _several_cores: bool  # whether cores share a step, see `drift.HANDING_OVER`
    # Least share of its cores that a worker gets beside other programs; 1 on a quiet machine.
    _least_share: float
    # By number of workers: longest wait of a step beside others, see `_longest_wait`.
    _waits: Mapping[int, float]
    _laws: dict[tuple[int, int], tuple[_Law, _Law]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _curves: dict[tuple[int, int], Curve] = field(default_factory=dict, compare=False, repr=False)

    def resolutions(self, workers: int) -> tuple[int, ...]:
        """Measured resolutions with so many workers or the nearest measured number, rising."""
        return self._resolutions[self.nearest(workers)]

    def curve(self, workers: int, resolution: int) -> Curve:
        """Seconds of the whole step, in one pass, against the local batch.

        Where it was not measured, it is a curve through the model's times at the batches of the
        nearest measured curve; a line stays a line unless an exchange overlaps.
        """
        key = (workers, resolution)
        if key not in self._curves and key in self._whole:
            self._curves[key] = self._whole[key]
        elif key not in self._curves:
            law, nearest = self._laws_of(workers, resolution)[0], self.nearest(workers)
            side = min(self._resolutions[nearest], key=lambda side: abs(side - resolution))
            batches = self._whole[nearest, side].batches
            self._curves[key] = fit_curve(
                batches,
                [law.at(batch) for batch in batches],
                [law.standard_error(batch) for batch in batches],
            )
        return self._curves[key]

    def seconds(
        self, workers: int, resolution: int, local_batch_size: int, passes: int = 1
    ) -> float:
        """Seconds per step, without interval.

        Args:
            workers: Number of workers that compute at the same time.
            resolution: Image side, in pixels.
            local_batch_size: Local batch of the busiest worker, in samples.
            passes: Micro-batches that it is cut into, as evenly as possible, the larger ones first.

        Raises:
            PlanError: Only one resolution was measured and another is asked for; or more workers
                than were measured, and no link is stated.
        """
        laws = self._laws.get((workers, resolution))
        whole, compute = laws or self._laws_of(workers, resolution)
        if passes == 1:
            return whole.at(local_batch_size)
        return _in_passes(whole, compute, local_batch_size, passes)

    def computing(
        self, workers: int, resolution: int, local_batch_size: int, passes: int = 1
    ) -> float:
        """Seconds of computing in a step, without exchange and without interval.

        More workers than were measured compute like the largest measured number. Arguments are
        those of `seconds`.

        Raises:
            PlanError: Only one resolution was measured and another is asked for.
        """
        _, compute = self._laws_of(min(workers, self.workers[-1]), resolution)
        return _in_passes(compute, compute, local_batch_size, passes)

    def predict(
        self, workers: int, resolution: int, local_batch_size: int, passes: int = 1
    ) -> Estimate:
        """Seconds per step, with a 95 % interval of a later measurement.

        A measurement is the median of `drift.LATER_VISITS` visits. Errors are ratios, and slow
        stretches are one-sided, so the interval reaches further up than down. Arguments and errors
        raised are those of `seconds`.
        """
        step = workers, resolution, local_batch_size, passes
        value = self.seconds(*step)
        # Lower bounds of the half widths: visits of a short probe may not show core migration, nor
        # how much others take at other times. Waits count upwards alone: undisturbed points decide
        # the value, and nothing makes a step that much quicker.
        moved, share = self._if_cores_move(*step), load_deviation(self._least_share)
        least = self._least(step, moved, share), self._least(step, moved, self._by_others(*step))
        pairs = zip(least, self._by_visits(*step), strict=True)
        down, up = (min(WIDEST, max(pair)) for pair in pairs)
        return Estimate(value=value, low=value * exp(-down), high=value * exp(up))

    def cores_may_move(
        self, workers: int, resolution: int, local_batch_size: int, passes: int = 1
    ) -> bool:
        """Whether `drift.HANDING_OVER` makes the interval wider than the visits do."""
        step = workers, resolution, local_batch_size, passes
        _, up = self._by_visits(*step)
        return self._least(step, self._if_cores_move(*step)) > up

    def _by_visits(
        self, workers: int, resolution: int, local_batch_size: int, passes: int
    ) -> tuple[float, float]:
        """Half widths of the interval, down and up, by the scatter of visits, as logarithms."""
        own = self.comparison_error(workers, resolution, local_batch_size, passes)
        known = hypot(own, self._levels[self.nearest(workers)])
        last = local_batch_size // passes
        later = self.visit_deviation(workers, resolution, last) * median_share(LATER_VISITS)
        degrees = self._drifts[self.nearest(workers)].degrees
        quantile = student_t_975(degrees) if degrees else Z_975
        down, up = (quantile * hypot(known, skew * later) for skew in (2 - self._skew, self._skew))
        return down, up

    def _if_cores_move(
        self, workers: int, resolution: int, local_batch_size: int, passes: int
    ) -> float:
        """Relative standard deviation of a step by `drift.HANDING_OVER` of its fixed time.

        The fixed time of a step is that of one image, in each pass.
        """
        if not self._several_cores:
            return 0.0
        whole, compute = self._laws_of(workers, resolution)
        fixed = whole.at(1) + (passes - 1) * compute.at(1)
        share = min(1.0, fixed / self.seconds(workers, resolution, local_batch_size, passes))
        return HANDING_OVER * share

    def _by_others(
        self, workers: int, resolution: int, local_batch_size: int, passes: int
    ) -> float:
        """Relative standard deviation of a step by other programs that come and go.

        Beside them a step takes longer than its share of the cores explains: at nearly every
        operation the threads of a worker wait for the one whose core is taken, so a short step may
        take many times as long. Every step is taken to wait as long as the longest one that was
        measured with so many workers.
        """
        if self._least_share == 1:
            return 0.0
        seconds = self.seconds(workers, resolution, local_batch_size, passes)
        beside = seconds / self._least_share + self._waits[self.nearest(workers)]
        return load_deviation(seconds / beside)

    def _least(self, step: tuple[int, int, int, int], *deviations: float) -> float:
        """Half width of the interval by deviations that no visits may show; 0 without any."""
        lasting = hypot(*deviations)
        return Z_975 * hypot(self.comparison_error(*step), lasting) if lasting else 0.0

    def comparison_error(
        self, workers: int, resolution: int, local_batch_size: int, passes: int = 1
    ) -> float:
        """Standard error of a step's time in a comparison with others, as a share of it.

        It contains neither the error that all measurements have in common, which cancels in a
        comparison, nor the drift of later measurements. Arguments and errors raised are those of
        `seconds`.
        """
        whole, compute = self._laws_of(workers, resolution)
        last = local_batch_size // passes
        own = whole.at(last) * whole.standard_error(last)
        for size, count in _earlier_passes(local_batch_size, passes):
            own += count * compute.at(size) * compute.standard_error(size)
        return own / self.seconds(workers, resolution, local_batch_size, passes)

    def standard_error(self, workers: int, resolution: int, local_batch_size: int) -> float:
        """Standard error of the whole step's curve, in one pass, as a share of it.

        It is the part that more measurements reduce: the scatter of the medians, the error that all
        have in common, and the bend between them. The drift of a later measurement is not in it.
        """
        whole, _ = self._laws_of(workers, resolution)
        return hypot(whole.standard_error(local_batch_size), self._levels[self.nearest(workers)])

    def visit_deviation(self, workers: int, resolution: int, micro_batch_size: int) -> float:
        """Relative standard deviation of one visit.

        Between measured batches it is interpolated; elsewhere it is that of the nearest one.
        """
        nearest = self.nearest(workers)
        sides = self._resolutions[nearest]
        side = min(sides, key=lambda side: abs(side - resolution))
        batches, errors = self._scatter[nearest, side]
        return between(batches, errors, min(max(micro_batch_size, batches[0]), batches[-1]))

    def extrapolates(self, workers: int, resolution: int, micro_batch_size: int) -> bool:
        """Whether batch, resolution or number of workers lie outside what was measured.

        A number of workers that was not measured counts as outside, even between measured ones.
        """
        return self._laws_of(workers, resolution)[0].extrapolates(micro_batch_size)

    def assumed(self, workers: int) -> bool:
        """Whether more workers than were measured together, so that the stated link counts."""
        return workers > self.workers[-1]

    def nearest(self, workers: int) -> int:
        """The largest measured number of workers up to ``workers``, else the smallest one."""
        return max((k for k in self.workers if k <= workers), default=self.workers[0])

    @cached_property
    def _resolutions(self) -> Mapping[int, tuple[int, ...]]:
        """Measured resolutions by number of workers, rising."""
        return {
            workers: tuple(sorted(side for count, side in self._whole if count == workers))
            for workers in self.workers
        }

    def _laws_of(self, workers: int, resolution: int) -> tuple[_Law, _Law]:
        """Laws of the whole step and of computing."""
        key = (workers, resolution)
        if key not in self._laws:
            self._laws[key] = self._make_laws(workers, resolution)
        return self._laws[key]

    def _make_laws(self, workers: int, resolution: int) -> tuple[_Law, _Law]:
        if workers in self.workers:
            whole = self._at_resolution(self._whole, workers, resolution)
            return whole, self._at_resolution(self._compute, workers, resolution)
        if workers > self.workers[-1]:
            compute = self._laws_of(self.workers[-1], resolution)[1]
            exchange = exchange_seconds(self._gradient_bytes, workers, self._link)
            return _Derived(compute, exchange, self.overlap or NO_OVERLAP), compute
        above = bisect_left(self.workers, workers)
        more = self.workers[above]
        fewer = self.workers[above - 1] if above else more
        share = (workers - fewer) / (more - fewer) if above else 0.0
        first, second = self._laws_of(fewer, resolution), self._laws_of(more, resolution)
        if not above and workers == 1:
            first = second = (first[1], first[1])  # one worker exchanges nothing
        doublings = 0.0 if above else log2(more / workers)
        return (
            _Blend(first[0], second[0], share, 1.0, doublings, measured=False),
            _Blend(first[1], second[1], share, 1.0, doublings, measured=False),
        )

    def _at_resolution(
        self, curves: Mapping[tuple[int, int], Curve], workers: int, resolution: int
    ) -> _Law:
        sides = self._resolutions[workers]
        if resolution in sides:
            return curves[workers, resolution]
        if len(sides) == 1:
            both = ",".join(map(str, sorted({sides[0], resolution})))
            raise PlanError(
                f"resolution {resolution}: only {sides[0]} was measured with "
                f"{counted(workers, 'worker')}; probe again with resolutions={both}"
            )
        right = min(max(bisect_left(sides, resolution), 1), len(sides) - 1)
        small, large = sides[right - 1], sides[right]
        nearest = min(max(resolution, small), large)
        ratio = max(resolution / nearest, nearest / resolution) ** 2
        return _Blend(
            curves[workers, small],
            curves[workers, large],
            (resolution**2 - small**2) / (large**2 - small**2),
            ratio,
            log2(ratio),
            measured=nearest == resolution,
        )


def fit_step_time(
    points: Sequence[StepTime],
    *,
    collectives: Sequence[CollectiveTime] = (),
    gradient_bytes: int = 0,
    link: Link | None = None,
    several_cores: bool = False,
    least_share: float = 1.0,
) -> StepTimeModel:
    """Model of measured steps, in any order.

    Args:
        points: Measured steps: at least two batches at some resolution and number of workers.
        collectives: Measured exchanges, by which the overlap is fitted.
        gradient_bytes: Bytes that workers exchange in a step.
        link: The stated network between workers that were not measured together.
        several_cores: Whether cores of a processor share a step, see `drift.HANDING_OVER`.
        least_share: Least share of its cores that a worker gets, see `drift.least_share`.

    Raises:
        PlanError: Too few points, or the same point twice.
    """
    fitted = measured_curves(tuple(points))
    overlap = _find_overlap(points, collectives, gradient_bytes, fitted.errors)
    groups, drifts = fitted.groups, fitted.drifts
    return StepTimeModel(
        workers=tuple(sorted({workers for workers, _ in groups})),
        drift=fitted.drift.share,
        overlap=overlap,
        notes=tuple(_notes(fitted, overlap, collectives)),
        _drifts=drifts,
        _levels={
            workers: level_error([p for p in points if p.workers == workers], drift.share)
            for workers, drift in drifts.items()
        },
        _skew=pooled_skew(points) if fitted.drift.degrees else 1.0,
        _scatter={
            key: (
                [point.local_batch_size for point in group],
                [visit_deviation(point, drifts[key[0]].share) for point in group],
            )
            for key, group in groups.items()
        },
        _whole=fitted.whole,
        _compute=fitted.compute,
        _gradient_bytes=gradient_bytes,
        _link=link,
        _several_cores=several_cores,
        _least_share=least_share,
        _waits={
            workers: _longest_wait([p for p in points if p.workers == workers], least_share)
            for workers in drifts
        },
    )


def _longest_wait(points: Sequence[StepTime], least_share: float) -> float:
    """Seconds by which a step beside others took longer than with the least share of the cores.

    The most of all points; 0 where none did.
    """
    waits = (
        point.beside_seconds - point_seconds(point) / least_share
        for point in points
        if point.beside_seconds is not None
    )
    return max([0.0, *waits])


def _in_passes(last: _Law, earlier: _Law, local_batch_size: int, passes: int) -> float:
    """Seconds of a step whose last pass follows one law and whose earlier ones follow another."""
    seconds = last.at(local_batch_size // passes)
    parts = _earlier_passes(local_batch_size, passes)
    return seconds + sum(count * earlier.at(size) for size, count in parts)


def _earlier_passes(local_batch_size: int, passes: int) -> list[tuple[int, int]]:
    """Sizes of all passes of a step but the last, in samples, with the number of each."""
    size, larger = divmod(local_batch_size, passes)
    return [(n, count) for n, count in ((size + 1, larger), (size, passes - 1 - larger)) if count]


def _find_overlap(
    points: Sequence[StepTime],
    collectives: Sequence[CollectiveTime],
    gradient_bytes: int,
    errors: Mapping[Key, float],
) -> float | None:
    together = [point for point in points if point.workers > 1]
    if not (together and collectives and gradient_bytes):
        return None
    model = fit_collectives(collectives)
    return fit_overlap(
        [
            (
                computing_seconds(point),
                model.seconds(gradient_bytes, point.workers),
                point_seconds(point),
                errors[key_of(point)],
            )
            for point in together
            if not model.assumed(point.workers)
        ]
    )


def _notes(
    fitted: MeasuredCurves, overlap: float | None, collectives: Sequence[CollectiveTime]
) -> list[str]:
    notes = [
        f"{place_of(large)} takes {point_seconds(large):.4g} s a step, but batch "
        f"{small.local_batch_size} takes {point_seconds(small):.4g} s: the smaller one was "
        "disturbed and counts for little; probe again while the machine is quiet"
        for small, large in fitted.doubtful
    ]
    if not fitted.drift.degrees:
        notes.append(
            f"too few points were visited twice to see how repeatable this machine is: a drift of "
            f"{percent(fitted.drift.share, 0)} is assumed"
        )
    if overlap is None and max(workers for workers, _ in fitted.groups) > 1:
        why = "the exchange is too short beside computing" if collectives else "none was timed"
        notes.append(
            f"how far the exchange of gradients overlaps with computing is not identified ({why}): "
            "none is assumed for more workers than measured"
        )
    for (workers, resolution), curve in fitted.whole.items():
        if curve.caveat:
            notes.append(f"resolution {resolution}, {counted(workers, 'worker')}: {curve.caveat}")
    return notes
