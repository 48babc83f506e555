r"""Progress per sample against the batch, and epochs to a target accuracy.

With the gradient noise scale :math:`\phi` in samples, the progress of a sample in a batch B over
that in the base batch :math:`B_0`, each at its best rate, is (Qiao et al., OSDI 2021, Pollux)

.. math:: E(B) = \frac{\phi + B_0}{\phi + B}

But the rate follows a rule, :math:`\eta \propto B^s`, and a step makes progress in proportion to
its rate until noise allows no more. So of two batches :math:`B_1 < B_2` a step of the larger makes

.. math:: g = \min\Big( \big(B_2 / B_1\big)^s,\ \frac{B_2}{B_1} \frac{\phi + B_1}{\phi + B_2} \Big)

times the progress, and epochs to a target go as :math:`B / g`. With linear scaling this is Pollux's
:math:`epochs(B) \propto \phi + B`; with square-root scaling mostly :math:`\sqrt B`, which is what
runs on digits show. Runs with two or more batches are better evidence than a noise scale; then the
form of the critical batch (McCandlish et al. 2018, arXiv 1812.06162) is fitted to them directly,

.. math:: epochs(B) = E_{min} (1 + x / x_{crit})

with x = B or, under square-root scaling, :math:`x = \sqrt B`. With three batches or more it is the
other one of the two if that predicts batches left out far better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, log, log2, sqrt
from statistics import fmean, stdev

from batchwright.prediction.accuracy.outcomes import (
    Outcomes,
    Run,
    accuracy_at,
    counting_error,
    one_batch,
    outcomes_of,
    read_run,
    scatter_of,
    smoothed,
)
from batchwright.prediction.fit import (
    Z_975,
    Line,
    fit_line,
    interval_in_ratio,
    leave_one_out,
    root_mean_square,
    student_t_975,
)
from batchwright.records import Estimate, GradientNoise, RunSummary
from batchwright.records.job_fields import Scaling
from batchwright.records.text.formatting import percent

PROBE_NOISE_ERROR = 0.7
"""Assumed standard error of the logarithm of a noise scale that was measured in the first steps: a
factor of 2. The sampling error comes on top.
"""

RUN_ERROR = 0.10
"""Assumed standard error of the epochs to a target from one seed to another, as a share."""

LAW_ERROR = 0.15
"""Assumed relative standard error of the epochs for each doubling away from the only batch that
ran.
"""

SEED_ERROR = 0.01
"""Least standard deviation of a held-out accuracy from seed to seed, besides the binomial error of
counting images: a few seeds may differ by less."""

FORM_ERROR = 0.05
"""Assumed relative standard error of the form of the law, which does not fall with more runs."""

EPOCHS_NOTE = "epochs to accuracy"
"""Beginning of the note on epochs to the target by runs."""

_POWER = {"linear": 1.0, "sqrt": 0.5, "gain": 1.0, "none": 0.0}  # a gain is linear at most
_FAR_BETTER = 0.5  # error at batches left out over that of the usual form
_MIN_DEGREES = 4  # fewest degrees of freedom that show the scatter between runs
_STEEPEST = 2  # largest power of the epochs with which the error rate falls, assumed


@dataclass(frozen=True)
class _Law:
    """Epochs to the target as a line in a power of the batch."""

    line: Line
    power: float

    def at(self, batch: int) -> float:
        return self.line.at(batch**self.power)

    def error(self, batch: int) -> float:
        """Half width of the 95 % interval of one more run, as a logarithm."""
        scatter, quantile = self._scatter()
        return quantile * scatter * hypot(1.0, self.line.own_error(batch**self.power))

    def ratio_error(self, first: int, second: int) -> float:
        """Relative standard error of the ratio of the epochs with two batches, by the law alone."""
        return self._scatter()[0] * self.line.ratio_error(first**self.power, second**self.power)

    def _scatter(self) -> tuple[float, float]:
        """Relative standard error of one run, and the factor that makes it a 95 % interval.

        The scales of the fit are the epochs themselves, so errors of the line are multiplied by it.
        """
        if self.line.degrees >= _MIN_DEGREES and self.line.relative_error is not None:
            scatter = hypot(self.line.relative_error, FORM_ERROR)
            return scatter, student_t_975(self.line.degrees)
        return max(RUN_ERROR, self.line.relative_error or 0.0), Z_975


@dataclass(frozen=True)
class ProgressModel:
    """Progress per sample and per epoch against the global batch."""

    # Gradient noise scale, in samples, with a 95 % interval; `None` if not known.
    noise_scale: Estimate | None
    notes: tuple[str, ...]  # where it comes from and what is missing, in words
    base_batch: int  # global batch whose progress per sample counts as 1
    scaling: Scaling  # how the rate follows the batch
    _law: _Law | None  # of two or more batches that reached the target
    # The only batch that reached the target, its epochs, and the half width of the 95 % interval of
    # the epochs of one more run, as a logarithm.
    _reference: tuple[int, float, float] | None
    _runs: tuple[Run, ...]
    _outcomes: Outcomes

    @property
    def by_runs(self) -> bool:
        """Whether runs were given."""
        return bool(self._runs)

    @property
    def tells_epochs(self) -> bool:
        """Whether some run reached the target."""
        return self._law is not None or self._reference is not None

    @property
    def missed(self) -> str:
        """Which runs missed the target, in words; empty if there are none that count."""
        return self._outcomes.note

    def misses_target(self, batch: int) -> bool:
        """Whether runs with ``batch`` missed the target, see `Outcomes.misses`."""
        return self._outcomes.misses(batch)

    def epochs(self, batch: int) -> Estimate | None:
        """Epochs to the target with ``batch``; `None` if not known, or if runs with it missed it.

        The interval is that of one more run.
        """
        if self.misses_target(batch):
            return None
        if self._law is not None:
            return interval_in_ratio(self._law.at(batch), self._law.error(batch))
        if self._reference is None:
            return None
        reference, epochs, off = self._reference
        ratio = self._epochs_ratio(reference, batch)
        return None if ratio is None else product(ratio, interval_in_ratio(epochs, off))

    def relative_epochs(self, batch: int) -> Estimate | None:
        """Epochs with ``batch`` over those with the base batch, at the rates of the rule.

        `None` if not known. Where the rate follows the batch linearly it is at most 1 / E(B).
        """
        return self._epochs_ratio(self.base_batch, batch)

    def compared_epochs(self, batch: int, other: int) -> Estimate | None:
        """Epochs with ``batch`` over those with ``other``, without the scatter of later runs.

        `None` if not known.
        """
        if self._law is None or batch == other:
            return self._epochs_ratio(other, batch)
        error = Z_975 * self._law.ratio_error(batch, other)
        return interval_in_ratio(self._law.at(batch) / self._law.at(other), error)

    def accuracy(self, batch: int, epochs: float, *, of_mean: bool = False) -> Estimate | None:
        """Held-out accuracy after ``epochs`` epochs with ``batch``, a share.

        It is the mean over the runs with the nearest batch, at the same progress; `None` without a
        run. Past the end of the runs it is their last accuracy, and the interval reaches up to the
        accuracy of an error rate that falls with the square of the epochs.

        Args:
            batch: Global batch, in samples.
            epochs: Number of epochs.
            of_mean: Whether the interval is that of the mean over the runs, by which recipes are
                compared, rather than that of one more run.
        """
        found = self._read_from(batch, epochs)
        if found is None:
            return None
        runs, ratio = found
        curves = [smoothed(run.curve) for run in runs]
        places = [epochs / r for r in (ratio.value, ratio.low, ratio.high)]
        values = [accuracy_at(curve, places[0]) for curve in curves]
        value, *ends = (fmean(accuracy_at(curve, place) for curve in curves) for place in places)
        length = runs[0].length
        if places[1] > length:
            ends.append(1 - (1 - max(ends)) * (length / places[1]) ** _STEEPEST)
        scatter = fmean(scatter_of(run.curve, c) for run, c in zip(runs, curves, strict=True))
        counting = counting_error(value, fmean(run.held_out for run in runs))
        error, quantile = between_runs(values, counting)
        # Scatter between epochs contains the error of counting, which is part of `error` already.
        beyond = sqrt(max(0.0, scatter**2 - counting**2))
        count = len(values)
        off = quantile * hypot(beyond, error * sqrt(1 + 1 / count))
        if of_mean:
            off, ends = quantile * hypot(beyond, error) / sqrt(count), []
        return Estimate(
            value=value,
            low=max(0.0, min((value, *ends)) - off),
            high=min(1.0, max((value, *ends)) + off),
        )

    def accuracy_until(self, batch: int, epochs: float) -> float | None:
        """Epochs with ``batch`` that the runs cover; `None` if they cover all of ``epochs``."""
        found = self._read_from(batch, epochs)
        if found is None:
            return None
        runs, ratio = found
        seen = runs[0].length * ratio.value
        return seen if seen < epochs else None

    def _read_from(self, batch: int, epochs: float) -> tuple[list[Run], Estimate] | None:
        """Runs to take an accuracy from, and epochs with ``batch`` over theirs; `None` without any.

        They are nearest in the sum of two distances, in doublings: of the batch, and of progress
        that is missing; more progress than wanted is no distance. Of equally near runs the shortest
        are taken, whose rate had fallen furthest by then.
        """
        ratios = {run.batch: self._epochs_ratio(run.batch, batch) for run in self._runs}
        known = [(run, ratio) for run in self._runs if (ratio := ratios[run.batch])]
        if not known:
            return None

        def away(one: tuple[Run, Estimate]) -> tuple[float, float]:
            run, ratio = one
            short = log2(epochs / (run.length * ratio.value))
            return abs(log2(run.batch / batch)) + max(0.0, short), run.length

        first, ratio = min(known, key=away)
        alike = (first.batch, first.length)
        return [run for run in self._runs if (run.batch, run.length) == alike], ratio

    def _epochs_ratio(self, base: int, batch: int) -> Estimate | None:
        """Epochs with ``batch`` over epochs with ``base`` for the same progress."""
        if base == batch:
            return Estimate(value=1, low=1, high=1)
        if self._law is not None:
            error = hypot(self._law.error(base), self._law.error(batch))
            return interval_in_ratio(self._law.at(batch) / self._law.at(base), error)
        smaller, larger = min(base, batch), max(base, batch)
        scale, power = self.noise_scale, _POWER[self.scaling]
        if scale is None and power == 1:
            return None
        # Progress of a sample in the larger batch over that in the smaller: value, high, low.
        worths = [1.0, 1.0, 1.0]
        if scale is not None:
            known = (scale.value, scale.high, scale.low)
            worths = [(phi + smaller) / (phi + larger) for phi in known]
        growth, least = larger / smaller, (larger / smaller) ** (1 - power)
        # Epochs grow by B / g of the larger batch, and by no more than the batch does.
        ends = [min(growth, max(least, 1 / worth)) for worth in worths]
        value, low, high = ends if batch == larger else (1 / ends[0], 1 / ends[2], 1 / ends[1])
        doubt = interval_in_ratio(1.0, Z_975 * LAW_ERROR * log2(growth))
        return product(Estimate(value=value, low=low, high=high), doubt)


def fit_progress(
    noise: GradientNoise | None,
    *,
    base_batch: int,
    target: float | None = None,
    runs: Sequence[RunSummary] = (),
    scaling: Scaling | None = None,
    notes: Sequence[str] = (),
) -> ProgressModel:
    """Model of progress.

    Args:
        noise: Gradient noise that the probe measured, early in training.
        base_batch: Global batch whose progress per sample counts as 1.
        target: Held-out accuracy to reach, a share; unset: no epochs are predicted.
        runs: Finished runs of the same task.
        scaling: How the rate follows the batch; unset: as in the runs, linear without any.
        notes: Notes on the runs, which come first among the model's notes.
    """
    usable = tuple(read_run(run, target) for run in runs if one_batch(run))
    notes = list(notes)
    if len(usable) < len(runs):
        notes.append("runs whose batch changed, or that were never evaluated, are left out")
    scale, whence = _noise_scale(noise, usable)
    notes.append(whence)
    rule = scaling or (usable[-1].scaling if usable else "linear")
    found = outcomes_of(usable)
    law = _fit_law(found, rule) if len(found.reached) > 1 else None
    if target is not None:
        notes.append(_epochs_note(target, usable, found, law, rule))
    reference = _reference(found) if len(found.reached) == 1 else None
    return ProgressModel(scale, tuple(notes), base_batch, rule, law, reference, usable, found)


def between_runs(values: Sequence[float], counting: float) -> tuple[float, float]:
    """Standard error of one run's accuracy, and the factor that makes it a 95 % interval.

    A few runs may be alike by chance. So with few runs the error is no less than that of counting
    images and of seeds together. It is an upper bound of the error by counting: runs are counted on
    the same images, some of which all runs get right, or wrong.

    Args:
        values: Accuracy of each run, a share.
        counting: Standard error by counting images, a share.
    """
    spread = stdev(values) if len(values) > 1 else 0.0
    if len(values) - 1 >= _MIN_DEGREES:
        return max(SEED_ERROR, spread), student_t_975(len(values) - 1)
    return max(spread, hypot(counting, SEED_ERROR)), Z_975


def _noise_scale(noise: GradientNoise | None, runs: Sequence[Run]) -> tuple[Estimate | None, str]:
    """The noise scale of the runs, or else that of the probe; and a note on its origin."""
    logs = [log(run.noise_scale) for run in runs if run.noise_scale]
    if logs:
        spread = stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
        estimate = interval_in_ratio(exp(fmean(logs)), Z_975 * max(spread, RUN_ERROR))
        return estimate, "noise scale: geometric mean along the runs given"
    if noise is None or noise.noise_scale is None:
        return None, "noise scale: no measurement tells it"
    error = hypot(PROBE_NOISE_ERROR, noise.relative_error or 0.0)
    return (
        interval_in_ratio(noise.noise_scale, Z_975 * error),
        "noise scale: from the first steps; it grows during training, so large batches are "
        "worth more than predicted",
    )


def _fit_law(found: Outcomes, scaling: Scaling) -> _Law:
    """The law in B, or with square-root scaling in its root; the other one if far better.

    Runs that missed the target and were longer than the law's epochs enter with their length.
    """
    reached, power = found.reached, 0.5 if scaling == "sqrt" else 1.0
    other = 1.5 - power
    # Runs scatter from seed to seed, so the usual form is kept unless the other is far better.
    if len(reached) > 2 and (
        _left_out_error(reached, other) < _FAR_BETTER * _left_out_error(reached, power)
    ):
        power = other
    law = _law_through(_pairs(reached), power)
    over = [(batch, length) for batch, length in _pairs(found.missed) if length > law.at(batch)]
    return _law_through([*_pairs(reached), *over], power) if over else law


def _pairs(groups: Mapping[int, Sequence[float]]) -> list[tuple[int, float]]:
    return [(batch, epochs) for batch, group in groups.items() for epochs in group]


def _law_through(pairs: Sequence[tuple[int, float]], power: float) -> _Law:
    return _Law(fit_line([b**power for b, _ in pairs], [epochs for _, epochs in pairs]), power)


def _left_out_error(reached: Mapping[int, Sequence[float]], power: float) -> float:
    means = [fmean(group) for group in reached.values()]
    return root_mean_square(leave_one_out([b**power for b in reached], means, means).line)


def _reference(found: Outcomes) -> tuple[int, float, float]:
    """Batch, mean epochs to the target and 95 % half width of one more run, where one batch ran.

    The half width is a logarithm. With many runs it stays that of a single run.
    """
    ((batch, reached),) = found.reached.items()
    epochs = [*reached, *found.missed.get(batch, ())]
    degrees = len(epochs) - 1
    spread = stdev(epochs) / fmean(epochs) if degrees else 0.0
    quantile = student_t_975(degrees) if degrees >= _MIN_DEGREES else Z_975
    off = quantile * max(RUN_ERROR, spread) * sqrt(1 + 1 / len(epochs))
    return batch, fmean(epochs), off


def _epochs_note(
    target: float,
    runs: Sequence[Run],
    found: Outcomes,
    law: _Law | None,
    scaling: Scaling,
) -> str:
    head = f"{EPOCHS_NOTE} {percent(target)}"
    more = f"; {found.note}" if found.note else ""
    if not found.reached:
        best = max((accuracy for run in runs for _, accuracy in run.curve[1:]), default=None)
        why = "no run was given"
        if best is not None:
            why = f"the runs given reached {percent(best)} at most"
        return f"{head}: not known, for {found.note or why}"
    if law is not None:
        form = "sqrt(B)" if law.power == 0.5 else "B"
        batches = ", ".join(map(str, found.reached))
        return f"{head}: E_min + k {form} through runs with batches {batches}{more}"
    return (
        f"{head}: from the run with batch {next(iter(found.reached))}, by {scaling} scaling of the "
        f"rate and the noise scale; a run with another batch would tell more{more}"
    )


def product(one: Estimate, other: Estimate) -> Estimate:
    """Product of two estimates with independent errors, which are taken as ratios."""
    value = one.value * other.value
    down = hypot(log(one.value / one.low), log(other.value / other.low))
    up = hypot(log(one.high / one.value), log(other.high / other.value))
    return Estimate(value=value, low=value * exp(-down), high=value * exp(up))
