r"""Held-out loss at a held-out accuracy, by a line through trainings of the task that show both.

As a network learns, its cross entropy L falls about as a power of the share of wrong answers:

.. math:: \ln L = a + b \ln(1 - p)

with p the accuracy, and b near 1 where a wrong answer costs about the same at any accuracy. Level
and power differ between tasks and optimizers, so both are fitted to this task's own trainings with
one optimizer, by least squares.
The interval has the scatter of one more training around the line, the line's own error, which grows
away from the trainings' accuracies, and the error of the accuracy.

Overfitting breaks the line: the loss then rises at equal accuracy, as a network grows surer of what
it gets wrong. Trials are too short to show that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, hypot, log, sqrt
from statistics import fmean, linear_regression

from batchwright.prediction.accuracy.trainings import Observed
from batchwright.prediction.fit import WIDEST, student_t_975
from batchwright.records import Estimate

MIN_MARKS = 3
"""Fewest different accuracies of the trainings: two points show no scatter around their line."""
MAX_FACTOR = 10.0
"""Largest factor by which the line alone may be off, at 95 %, for a loss to count as known."""


@dataclass(frozen=True)
class LossLink:
    """The line through the trainings of one task with one optimizer, with its error."""

    intercept: float  # a: logarithm of the loss where all answers are wrong
    slope: float  # b: power of the share of wrong answers, above 0
    scatter: float  # standard deviation of ln L of a single training around the line
    marks: int  # number of trainings
    _center: float  # mean of their ln(1 - p)
    _spread: float  # sum of the squared distances from it
    _least: float  # smallest share of wrong answers that held-out images tell from none

    def at(self, accuracy: Estimate) -> Estimate | None:
        """Held-out loss of one more training that ends at an accuracy, a share.

        `None` if the line is off by more than `MAX_FACTOR` there.
        """
        shares = (accuracy.value, accuracy.low, accuracy.high)
        place, *ends = (_wrong(share, self._least) for share in shares)
        middle = self.intercept + self.slope * place
        error = self.scatter * student_t_975(self.marks - 2)
        off = error * sqrt(1 + 1 / self.marks + (place - self._center) ** 2 / self._spread)
        if off > log(MAX_FACTOR) or abs(middle) > WIDEST:
            return None
        # The error of the slope moves the loss as far as the accuracy may be off.
        up, down = (
            min(WIDEST, hypot(off, self.slope * away, error * away / sqrt(self._spread)))
            for away in (end - place for end in ends)
        )
        return Estimate(value=exp(middle), low=exp(middle - down), high=exp(middle + up))


def fit_loss(observed: Iterable[Observed], *, classes: float, held_out: int) -> LossLink | None:
    """The line through trainings of a task with one optimizer that kept their held-out loss.

    Trainings that ended at guessing are left out: there a loss may be anything from that of equal
    chances for all classes upwards.

    Args:
        observed: Trainings, with cross entropies of one kind.
        classes: Number of equally large classes with which guessing would be as accurate.
        held_out: Number of images that the predicted loss will be measured on.

    Returns:
        `None` with fewer than `MIN_MARKS` different accuracies, or if the loss does not fall with
        rising accuracy.
    """
    marks = [
        (_wrong(one.accuracy, 0.5 / one.held_out), log(one.loss))
        for one in observed
        if one.loss and one.loss > 0 and not one.guesses(classes)
    ]
    places, losses = [x for x, _ in marks], [y for _, y in marks]
    if len(set(places)) < MIN_MARKS:
        return None
    slope, intercept = linear_regression(places, losses)
    if slope <= 0:
        return None
    center = fmean(places)
    return LossLink(
        intercept=intercept,
        slope=slope,
        scatter=sqrt(sum((y - intercept - slope * x) ** 2 for x, y in marks) / (len(marks) - 2)),
        marks=len(marks),
        _center=center,
        _spread=sum((x - center) ** 2 for x in places),
        _least=0.5 / max(1, held_out),
    )


def _wrong(accuracy: float, least: float) -> float:
    """Logarithm of the share of wrong answers, which is no less than ``least``."""
    return log(max(least, 1 - accuracy))
