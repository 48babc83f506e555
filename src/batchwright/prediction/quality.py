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
from itertools import pairwise
from math import exp, hypot, inf, log, log2, sqrt
from statistics import fmean, median, stdev
from typing import Literal

from batchwright.prediction.fit import (
    Line,
    fit_line,
    interval_in_ratio,
    leave_one_out,
    root_mean_square,
    student_t_975,
)
from batchwright.records import Estimate, GradientNoise, RunSummary

Scaling = Literal["linear", "sqrt", "gain", "none"]

PROBE_NOISE_ERROR = 0.7
"""Assumed standard error of the logarithm of a noise scale from the first steps: a factor of 2."""

RUN_ERROR = 0.10
"""Assumed standard error of the epochs to a target from one seed to another, as a share."""

LAW_ERROR = 0.15
"""Assumed standard error of the epochs for each doubling away from the only batch that ran; on
digits, batches 32 to 512 and accuracies of 80 to 95 %, they were 0.03 to 0.3 off per doubling.
"""

FORM_ERROR = 0.05
"""Assumed standard error of the form of the law, which no number of runs mends."""

_POWER = {"linear": 1.0, "sqrt": 0.5, "gain": 1.0, "none": 0.0}  # a gain is linear at most
_FAR_BETTER = 0.5
_LEAST_DEGREES = 4  # fewer show too little of the scatter between runs
_LEAST_SCATTER = 0.005  # of a held-out accuracy, a share
_Z_975 = 1.96


@dataclass(frozen=True)
class _Run:
    """What a run tells.

    Attributes:
        batch: Global batch.
        scaling: How the rate follows the batch.
        curve: Epochs done and held-out accuracy then, from chance level on.
        to_target: Epochs to the target; `None` if not reached or none given.
        noise_scale: Geometric mean up to the target, in samples; `None` if not known.
    """

    batch: int
    scaling: Scaling
    curve: tuple[tuple[float, float], ...]
    to_target: float | None
    noise_scale: float | None


@dataclass(frozen=True)
class _Law:
    """Epochs as a line in a power of the batch."""

    line: Line
    power: float

    def at(self, batch: int) -> float:
        return self.line.at(batch**self.power)

    def error(self, batch: int) -> float:
        """Half width of the 95 % interval, as a share."""
        own = self.line.own_error(batch**self.power)
        if self.line.degrees >= _LEAST_DEGREES and self.line.relative_error is not None:
            scatter = hypot(self.line.relative_error, FORM_ERROR)
            quantile = student_t_975(self.line.degrees)
        else:
            scatter = max(RUN_ERROR, self.line.relative_error or 0.0)
            quantile = _Z_975
        # The fit's scales are the epochs themselves, so its error is per unit of scatter.
        return quantile * scatter * hypot(1.0, own)


@dataclass(frozen=True)
class ProgressModel:
    """Progress per sample and per epoch against the global batch.

    Attributes:
        noise_scale: In samples, with a 95 % interval; `None` if nothing tells it.
        notes: Where it comes from and what is missing, in words.
        base_batch: Batch whose progress per sample counts as 1.
        scaling: How the rate follows the batch.
    """

    noise_scale: Estimate | None
    notes: tuple[str, ...]
    base_batch: int
    scaling: Scaling
    _law: _Law | None  # of two or more batches that reached the target
    _reference: tuple[int, float, float] | None  # batch, epochs, relative standard error
    _runs: tuple[_Run, ...]

    @property
    def tells_epochs(self) -> bool:
        """Whether a run reached the target."""
        return self._law is not None or self._reference is not None

    def efficiency(self, batch: int) -> Estimate | None:
        """Worth of a sample in ``batch`` against one in the base batch; `None` if unknown."""
        return self._worth(self.base_batch, batch)

    def epochs(self, batch: int) -> Estimate | None:
        """Epochs to the target with ``batch``; `None` without a run that reached it."""
        if self._law is not None:
            return interval_in_ratio(self._law.at(batch), self._law.error(batch))
        if self._reference is None:
            return None
        reference, epochs, error = self._reference
        ratio = self._epochs_ratio(reference, batch)
        return None if ratio is None else _product(ratio, interval_in_ratio(epochs, _Z_975 * error))

    def relative_epochs(self, batch: int) -> Estimate | None:
        """Epochs with ``batch`` over those with the base batch, at the rate that the rule gives.

        `None` if unknown. Other than 1 / `efficiency`, which has the best rate for each batch.
        """
        return self._epochs_ratio(self.base_batch, batch)

    def accuracy(self, batch: int, epochs: float) -> Estimate | None:
        """Held-out accuracy after ``epochs`` epochs with ``batch``, a share.

        Read off the run with the nearest batch, where it had made the same progress; `None`
        without a run.
        """
        if not self._runs:
            return None
        run = min(self._runs, key=lambda one: abs(log(one.batch / batch)))
        ratio = self._epochs_ratio(run.batch, batch)
        if ratio is None:
            return None
        smooth = _smoothed(run.curve)
        value, *ends = (_read(smooth, epochs / r) for r in (ratio.value, ratio.low, ratio.high))
        scatter = _Z_975 * _scatter(run.curve, smooth)
        return Estimate(
            value=value,
            low=max(0.0, min(value, *ends) - scatter),
            high=min(1.0, max(value, *ends) + scatter),
        )

    def _worth(self, base: int, batch: int) -> Estimate | None:
        if base == batch:
            return Estimate(value=1, low=1, high=1)
        scale = self.noise_scale
        if scale is None:
            return None
        value, *ends = ((s + base) / (s + batch) for s in (scale.value, scale.low, scale.high))
        return Estimate(value=value, low=min(ends), high=max(ends))

    def _epochs_ratio(self, base: int, batch: int) -> Estimate | None:
        """Epochs with ``batch`` over epochs with ``base`` for the same progress."""
        if base == batch:
            return Estimate(value=1, low=1, high=1)
        if self._law is not None:
            error = hypot(self._law.error(base), self._law.error(batch))
            return interval_in_ratio(self._law.at(batch) / self._law.at(base), error)
        smaller, larger = min(base, batch), max(base, batch)
        worth = self._worth(smaller, larger)
        if worth is None and _POWER[self.scaling] == 1:
            return None
        power = _POWER[self.scaling]
        growth, least = larger / smaller, (larger / smaller) ** (1 - power)
        # Epochs grow by the larger batch's B / g, and never by more than the batch does.
        ends = [
            min(growth, max(least, 1 / share))
            for share in ((worth.value, worth.high, worth.low) if worth else (1.0, 1.0, 1.0))
        ]
        value, low, high = ends if batch == larger else (1 / ends[0], 1 / ends[2], 1 / ends[1])
        doubt = interval_in_ratio(1.0, _Z_975 * LAW_ERROR * log2(growth))
        return _product(Estimate(value=value, low=low, high=high), doubt)


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
    told = tuple(_read_run(run, target) for run in runs if _one_batch(run))
    notes = list(notes)
    if len(told) < len(runs):
        notes.append("runs whose batch changed, or that were never evaluated, are left out")
    scale, whence = _noise_scale(noise, told)
    notes.append(whence)
    rule = scaling or (told[-1].scaling if told else "linear")
    reached = {
        batch: epochs
        for batch in sorted({run.batch for run in told})
        if (epochs := [r.to_target for r in told if r.batch == batch and r.to_target is not None])
    }
    law = _fit_law(reached, rule) if len(reached) > 1 else None
    if target is not None:
        notes.append(_epochs_note(target, told, reached, law, rule))
    reference = _reference(*next(iter(reached.items()))) if len(reached) == 1 else None
    return ProgressModel(scale, tuple(notes), base_batch, rule, law, reference, told)


def epochs_to(run: RunSummary, target: float) -> float | None:
    """Epochs until a run's held-out accuracy first reached ``target``; `None` if it never did.

    Between two evaluations in proportion, from chance level at the start.
    """
    return _first_crossing(_accuracies(run), target)


def _one_batch(run: RunSummary) -> bool:
    evaluated = any(epoch.top1 is not None for epoch in run.epochs)
    return evaluated and len({epoch.global_batch_size for epoch in run.epochs}) == 1


def _read_run(run: RunSummary, target: float | None) -> _Run:
    curve = _accuracies(run)
    to_target = None if target is None else _first_crossing(curve, target)
    until = inf if to_target is None else to_target
    scales = [e.noise_scale for e in run.epochs if e.noise_scale and e.epoch < until]
    mean = exp(fmean(map(log, scales))) if scales else None
    batch = run.epochs[0].global_batch_size
    return _Run(batch, run.plan.learning_rate.scaling, tuple(curve), to_target, mean)


def _accuracies(run: RunSummary) -> list[tuple[float, float]]:
    """Epochs done and held-out accuracy then, from chance level on."""
    chance = 1 / max(1, len(run.plan.data.classes))
    measured = [(epoch.epoch + 1.0, epoch.top1) for epoch in run.epochs if epoch.top1 is not None]
    return [(0.0, chance), *measured]


def _first_crossing(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    for (e0, a0), (e1, a1) in pairwise(curve):
        if a1 >= target:
            return e1 if a0 >= target else e0 + (e1 - e0) * (target - a0) / (a1 - a0)
    return None


def _noise_scale(noise: GradientNoise | None, runs: Sequence[_Run]) -> tuple[Estimate | None, str]:
    """The noise scale along runs, or else that of the probe; and a note on it."""
    logs = [log(run.noise_scale) for run in runs if run.noise_scale]
    if logs:
        spread = stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
        estimate = interval_in_ratio(exp(fmean(logs)), _Z_975 * max(spread, RUN_ERROR))
        return estimate, "noise scale: geometric mean along the runs given"
    if noise is None or noise.noise_scale is None:
        return None, "noise scale: not known; the worth of a larger batch is not predicted"
    error = PROBE_NOISE_ERROR if noise.relative_error is None else noise.relative_error
    return (
        interval_in_ratio(noise.noise_scale, _Z_975 * error),
        "noise scale: from the first steps; it grows during training, so large batches are "
        "worth more than predicted",
    )


def _fit_law(reached: Mapping[int, Sequence[float]], scaling: Scaling) -> _Law:
    """The line in B, or with square-root scaling in its root; the other if far better."""
    power = 0.5 if scaling == "sqrt" else 1.0
    other = 1.5 - power
    # Runs scatter from seed to seed, so the rule's form gives way only to a far better one.
    if len(reached) > 2 and (
        _left_out_error(reached, other) < _FAR_BETTER * _left_out_error(reached, power)
    ):
        power = other
    pairs = [(batch**power, epochs) for batch, group in reached.items() for epochs in group]
    return _Law(fit_line([x for x, _ in pairs], [epochs for _, epochs in pairs]), power)


def _left_out_error(reached: Mapping[int, Sequence[float]], power: float) -> float:
    means = [fmean(group) for group in reached.values()]
    return root_mean_square(leave_one_out([b**power for b in reached], means, means).line)


def _reference(batch: int, epochs: Sequence[float]) -> tuple[int, float, float]:
    """Batch, mean epochs to the target and their relative standard error, of one batch's runs."""
    error = RUN_ERROR
    if len(epochs) > 1:
        spread = stdev(epochs) / fmean(epochs)
        error = max(RUN_ERROR, spread) / sqrt(len(epochs))
    return batch, fmean(epochs), error


def _epochs_note(
    target: float,
    runs: Sequence[_Run],
    reached: Mapping[int, Sequence[float]],
    law: _Law | None,
    scaling: Scaling,
) -> str:
    head = f"epochs to accuracy {target:.1%}"
    if not reached:
        best = max((accuracy for run in runs for _, accuracy in run.curve[1:]), default=None)
        why = "no run was given" if best is None else f"the runs given reached {best:.1%} at most"
        return f"{head}: not known, for {why}"
    if law is not None:
        form = "sqrt(B)" if law.power == 0.5 else "B"
        batches = ", ".join(map(str, reached))
        return f"{head}: E_min + k {form} through runs with batches {batches}"
    return (
        f"{head}: from the run with batch {next(iter(reached))}, by {scaling} scaling of the rate "
        "and the noise scale; a run with another batch would tell more"
    )


def _product(one: Estimate, other: Estimate) -> Estimate:
    """Product of two with independent errors, taken as ratios."""
    value = one.value * other.value
    down = hypot(log(one.value / one.low), log(other.value / other.low))
    up = hypot(log(one.high / one.value), log(other.high / other.value))
    return Estimate(value=value, low=value * exp(-down), high=value * exp(up))


def _smoothed(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Running median of three: single epochs dip."""
    middle = [
        (curve[i][0], median(accuracy for _, accuracy in curve[i - 1 : i + 2]))
        for i in range(1, len(curve) - 1)
    ]
    return [curve[0], *middle, curve[-1]]


def _scatter(curve: Sequence[tuple[float, float]], smooth: Sequence[tuple[float, float]]) -> float:
    """Standard deviation of the accuracy about its smoothed course, robust, a share."""
    misses = [abs(a - b) for (_, a), (_, b) in zip(curve[1:], smooth[1:], strict=True)]
    return hypot(1.4826 * median(misses), _LEAST_SCATTER)


def _read(curve: Sequence[tuple[float, float]], epochs: float) -> float:
    """Accuracy after ``epochs``; past the end, the last."""
    for (e0, a0), (e1, a1) in pairwise(curve):
        if epochs <= e1:
            return a0 + (a1 - a0) * (max(epochs, e0) - e0) / (e1 - e0)
    return curve[-1][1]
