r"""Progress: how much a sample is worth in a larger batch, and epochs to a target accuracy.

With the gradient noise scale :math:`\phi` in samples, a sample in a batch B is worth, against one
in the base batch :math:`B_0` and with the best rate for each (Qiao et al., OSDI 2021, Pollux),

.. math:: E(B) = \frac{\phi + B_0}{\phi + B}

But the rate follows a rule, :math:`\eta \propto B^s`, and a step makes progress in proportion to
its rate until noise allows no more. So of two batches :math:`B_1 < B_2` a step of the larger makes

.. math:: g = \min\Big( \big(B_2 / B_1\big)^s,\ \frac{B_2}{B_1} \frac{\phi + B_1}{\phi + B_2} \Big)

times the progress, and epochs to a target go as :math:`B / g`. With linear scaling this is Pollux's
:math:`epochs(B) \propto \phi + B`; with square-root scaling mostly :math:`\sqrt B`, which is what
runs on digits show. Runs of two or more batches tell more than any noise scale; then the form of
the critical batch (McCandlish et al. 2018, arXiv 1812.06162) is fitted to them directly,

.. math:: epochs(B) = E_{min} (1 + x / x_{crit})

with x = B or, under square-root scaling, :math:`x = \sqrt B`; from three batches on the other of
the two, if it predicts batches left out far better.
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

PROBE_NOISE_ERROR = 0.7
"""Assumed standard error of the logarithm of a noise scale from the first steps: a factor of 2. On
five workloads it was 0.5 to 2.2 times that of the first epoch; the samples' own error comes on top.
"""

RUN_ERROR = 0.10
"""Assumed standard error of the epochs to a target from one seed to another, as a share."""

LAW_ERROR = 0.15
"""Assumed standard error of the epochs for each doubling away from the only batch that ran; on
digits, batches 32 to 512 and accuracies of 80 to 95 %, they were 0.03 to 0.3 off per doubling.
"""

SEED_ERROR = 0.01
"""Least standard deviation of a held-out accuracy from seed to seed, beside what chance makes of
the images that are counted: few seeds may show less."""

FORM_ERROR = 0.05
"""Assumed standard error of the form of the law, which no number of runs mends."""

EPOCHS_NOTE = "epochs to accuracy"
"""How the note begins that says what runs tell of them."""

_POWER = {"linear": 1.0, "sqrt": 0.5, "gain": 1.0, "none": 0.0}  # a gain is linear at most
_FAR_BETTER = 0.5
_MIN_DEGREES = 4  # fewer show too little of the scatter between runs
_STEEPEST = 2  # power of the epochs that an error falls with at most, assumed; it ends an interval


@dataclass(frozen=True)
class _Law:
    """Epochs as a line in a power of the batch."""

    line: Line
    power: float

    def at(self, batch: int) -> float:
        return self.line.at(batch**self.power)

    def error(self, batch: int) -> float:
        """Half width of the 95 % interval, as a share."""
        scatter, quantile = self._scatter()
        return quantile * scatter * hypot(1.0, self.line.own_error(batch**self.power))

    def ratio_error(self, first: int, second: int) -> float:
        """Standard error of the ratio of the epochs with two batches, without a later run's own."""
        return self._scatter()[0] * self.line.ratio_error(first**self.power, second**self.power)

    def _scatter(self) -> tuple[float, float]:
        """Standard error of one run, as a share, and what times it makes a 95 % interval.

        The fit's scales are the epochs themselves, so its errors are per unit of this.
        """
        if self.line.degrees >= _MIN_DEGREES and self.line.relative_error is not None:
            scatter = hypot(self.line.relative_error, FORM_ERROR)
            return scatter, student_t_975(self.line.degrees)
        return max(RUN_ERROR, self.line.relative_error or 0.0), Z_975


@dataclass(frozen=True)
class ProgressModel:
    """Progress per sample and per epoch against the global batch."""

    noise_scale: Estimate | None  # in samples, with a 95 % interval; `None` if nothing tells it
    notes: tuple[str, ...]  # where it comes from and what is missing, in words
    base_batch: int  # batch whose progress per sample counts as 1
    scaling: Scaling  # how the rate follows the batch
    _law: _Law | None  # of two or more batches that reached the target
    # Of the only batch that reached the target: it, its epochs, and half the 95 % interval of those
    # of one more run, a logarithm.
    _reference: tuple[int, float, float] | None
    _runs: tuple[Run, ...]
    _outcomes: Outcomes

    @property
    def by_runs(self) -> bool:
        """Whether it rests on runs."""
        return bool(self._runs)

    @property
    def tells_epochs(self) -> bool:
        """Whether runs reached the target."""
        return self._law is not None or self._reference is not None

    @property
    def missed(self) -> str:
        """Which runs did not reach the target, in words; empty if none tells anything by that."""
        return self._outcomes.note

    def misses_target(self, batch: int) -> bool:
        """Whether runs with ``batch`` mostly missed it, or with one beyond all that reached it."""
        return self._outcomes.misses(batch)

    def epochs(self, batch: int) -> Estimate | None:
        """Epochs to the target with ``batch``; `None` if unknown, or if runs with it missed it.

        The interval is for what one more run takes.
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
        """Epochs with ``batch`` over those with the base batch, at the rate that the rule gives.

        `None` if unknown. Where the rate follows the batch linearly, 1 / E(B) at most.
        """
        return self._epochs_ratio(self.base_batch, batch)

    def compared_epochs(self, batch: int, other: int) -> Estimate | None:
        """Epochs with ``batch`` over those with ``other``, whatever later runs scatter.

        `None` if unknown.
        """
        if self._law is None or batch == other:
            return self._epochs_ratio(other, batch)
        error = Z_975 * self._law.ratio_error(batch, other)
        return interval_in_ratio(self._law.at(batch) / self._law.at(other), error)

    def accuracy(self, batch: int, epochs: float, *, of_mean: bool = False) -> Estimate | None:
        """Held-out accuracy after ``epochs`` epochs with ``batch``, a share.

        The mean over the runs with the nearest batch, read off where they had made the same
        progress; `None` without a run. Past their end it is the last, and the interval reaches up
        to where an error that falls with the square of the epochs would come. The interval is for
        what one more run will count; with ``of_mean`` it is what chance makes of their mean, by
        which recipes are compared.
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
        # Epochs are counted on few images as well: that part of their scatter is in `error`.
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
        """Epochs with ``batch`` that `accuracy` saw, where runs ended before; `None` if all."""
        found = self._read_from(batch, epochs)
        if found is None:
            return None
        runs, ratio = found
        seen = runs[0].length * ratio.value
        return seen if seen < epochs else None

    def _read_from(self, batch: int, epochs: float) -> tuple[list[Run], Estimate] | None:
        """Runs to read an accuracy off, and epochs with ``batch`` over theirs.

        Those nearest in batch and progress together, each counted in doublings; more progress than
        wanted counts for nothing, and of equally near ones the shortest are taken, whose rate had
        fallen furthest by then.
        """
        ratios = {run.batch: self._epochs_ratio(run.batch, batch) for run in self._runs}
        told = [(run, ratio) for run in self._runs if (ratio := ratios[run.batch])]
        if not told:
            return None

        def away(one: tuple[Run, Estimate]) -> tuple[float, float]:
            run, ratio = one
            short = log2(epochs / (run.length * ratio.value))
            return abs(log2(run.batch / batch)) + max(0.0, short), run.length

        first, ratio = min(told, key=away)
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
        worths = [1.0, 1.0, 1.0]  # of a sample in the larger batch, the highest before the lowest
        if scale is not None:
            known = (scale.value, scale.high, scale.low)
            worths = [(phi + smaller) / (phi + larger) for phi in known]
        growth, least = larger / smaller, (larger / smaller) ** (1 - power)
        # Epochs grow by the larger batch's B / g, and never by more than the batch does.
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
        noise: As the probe measured it, early in training.
        base_batch: Global batch whose progress per sample counts as 1.
        target: Held-out accuracy to reach, a share; unset: no epochs are predicted.
        runs: Finished runs of the same task; each is a reference.
        scaling: How the rate follows the batch; unset: as in the runs, linear without any.
        notes: What is to be said of the runs; comes first among the model's notes.
    """
    told = tuple(read_run(run, target) for run in runs if one_batch(run))
    notes = list(notes)
    if len(told) < len(runs):
        notes.append("runs whose batch changed, or that were never evaluated, are left out")
    scale, whence = _noise_scale(noise, told)
    notes.append(whence)
    rule = scaling or (told[-1].scaling if told else "linear")
    found = outcomes_of(told)
    law = _fit_law(found, rule) if len(found.reached) > 1 else None
    if target is not None:
        notes.append(_epochs_note(target, told, found, law, rule))
    reference = _reference(found) if len(found.reached) == 1 else None
    return ProgressModel(scale, tuple(notes), base_batch, rule, law, reference, told, found)


def between_runs(values: Sequence[float], counting: float) -> tuple[float, float]:
    """Standard error of one run's accuracy, and what times it makes a 95 % interval.

    Few runs may be alike by chance, and one tells nothing of it: then it is no less than chance
    makes of the images, ``counting``, and of seeds. That is the most that counting can make: runs
    are counted on the same images, of which some are right, or wrong, in all of them.
    """
    spread = stdev(values) if len(values) > 1 else 0.0
    if len(values) - 1 >= _MIN_DEGREES:
        return max(SEED_ERROR, spread), student_t_975(len(values) - 1)
    return max(spread, hypot(counting, SEED_ERROR)), Z_975


def _noise_scale(noise: GradientNoise | None, runs: Sequence[Run]) -> tuple[Estimate | None, str]:
    """The noise scale along runs, or else that of the probe; and a note on it."""
    logs = [log(run.noise_scale) for run in runs if run.noise_scale]
    if logs:
        spread = stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
        estimate = interval_in_ratio(exp(fmean(logs)), Z_975 * max(spread, RUN_ERROR))
        return estimate, "noise scale: geometric mean along the runs given"
    if noise is None or noise.noise_scale is None:
        return None, "noise scale: not known; the worth of a larger batch is not predicted"
    error = hypot(PROBE_NOISE_ERROR, noise.relative_error or 0.0)
    return (
        interval_in_ratio(noise.noise_scale, Z_975 * error),
        "noise scale: from the first steps; it grows during training, so large batches are "
        "worth more than predicted",
    )


def _fit_law(found: Outcomes, scaling: Scaling) -> _Law:
    """The line in B, or with square-root scaling in its root; the other if far better.

    A run that missed the target, and was longer than it says, pulls it up to its length.
    """
    reached, power = found.reached, 0.5 if scaling == "sqrt" else 1.0
    other = 1.5 - power
    # Runs scatter from seed to seed, so the rule's form gives way only to a far better one.
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
    """Batch, mean epochs to the target and how far off one more run may be, of one batch's runs.

    However many runs there are, the next one scatters as each of them did.
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
    head = f"{EPOCHS_NOTE} {target:.1%}"
    more = f"; {found.note}" if found.note else ""
    if not found.reached:
        best = max((accuracy for run in runs for _, accuracy in run.curve[1:]), default=None)
        why = "no run was given" if best is None else f"the runs given reached {best:.1%} at most"
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
    """Product of two with independent errors, taken as ratios."""
    value = one.value * other.value
    down = hypot(log(one.value / one.low), log(other.value / other.low))
    up = hypot(log(one.high / one.value), log(other.high / other.value))
    return Estimate(value=value, low=value * exp(-down), high=value * exp(up))
