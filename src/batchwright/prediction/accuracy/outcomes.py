"""Reads finished runs: held-out accuracy against epochs, and which runs reached a target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, hypot, inf, log, sqrt
from statistics import fmean, median

from batchwright.records import RunSummary
from batchwright.records.job_fields import Scaling
from batchwright.records.text.formatting import counted

_MIN_SCATTER = 0.005  # least standard deviation of a held-out accuracy, a share


@dataclass(frozen=True)
class Run:
    """The course of a finished run."""

    batch: int  # global batch, in samples
    scaling: Scaling  # how the rate follows the batch
    # Pairs of finished epochs and held-out accuracy, from chance level at 0 epochs on.
    curve: tuple[tuple[float, float], ...]
    # Epochs to the target; `None` if it was not reached, or if there is none.
    to_target: float | None
    # Geometric mean of the gradient noise scale up to the target, in samples; `None` if not known.
    noise_scale: float | None
    held_out: int  # number of images that its accuracy was counted on

    @property
    def length(self) -> float:
        """Epochs up to the last evaluation."""
        return self.curve[-1][0]


@dataclass(frozen=True)
class Outcomes:
    """Which runs reached the target, by batch."""

    # Epochs to the target of the runs that reached it, of batches that mostly did.
    reached: Mapping[int, Sequence[float]]
    # Epochs of the runs that missed it: lower bounds of the epochs to the target.
    missed: Mapping[int, Sequence[float]]
    failed: frozenset[int]  # batches that mostly missed it
    note: str  # a note on the runs that missed it, in words; empty if there are none

    def misses(self, batch: int) -> bool:
        """Whether a batch failed, or is larger than one that failed above all that succeeded."""
        return batch in self.failed or batch >= _barred_from(self.reached, self.failed)


def epochs_to(run: RunSummary, target: float) -> float | None:
    """Epochs until a run's held-out accuracy first reached ``target``; `None` if it never did.

    Accuracy is interpolated between evaluations, and is at chance level at the start.
    """
    return _first_crossing(_accuracies(run), target)


def one_batch(run: RunSummary) -> bool:
    """Whether a run kept its global batch and was evaluated."""
    evaluated = any(epoch.top1 is not None for epoch in run.epochs)
    return evaluated and len({epoch.global_batch_size for epoch in run.epochs}) == 1


def read_run(run: RunSummary, target: float | None) -> Run:
    """The course of a run with one batch; ``target`` may be `None`."""
    curve = _accuracies(run)
    to_target = None if target is None else _first_crossing(curve, target)
    until = inf if to_target is None else to_target
    scales = [e.noise_scale for e in run.epochs if e.noise_scale and e.epoch < until]
    mean = exp(fmean(map(log, scales))) if scales else None
    batch = run.epochs[0].global_batch_size
    counts = [epoch.val_count for epoch in run.epochs if epoch.val_count]
    held_out = counts[-1] if counts else max(1, run.plan.data.val_samples)
    return Run(batch, run.plan.learning_rate.scaling, tuple(curve), to_target, mean, held_out)


def _accuracies(run: RunSummary) -> list[tuple[float, float]]:
    """Finished epochs and held-out accuracy, from chance level on; without classes that is 0."""
    measured = [(epoch.epoch + 1.0, epoch.top1) for epoch in run.epochs if epoch.top1 is not None]
    return [(0.0, run.plan.data.guessing), *measured]


def _first_crossing(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    for (e0, a0), (e1, a1) in pairwise(curve):
        if a1 >= target:
            return e1 if a0 >= target else e0 + (e1 - e0) * (target - a0) / (a1 - a0)
    return None


def outcomes_of(runs: Sequence[Run]) -> Outcomes:
    """Which runs reached the target, by batch.

    A run that missed it counts only if it is as long as the shortest run that reached it: with its
    batch, or with any batch if its own did not.
    """
    reached: dict[int, list[float]] = defaultdict(list)
    missed: dict[int, list[float]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.batch):
        if run.to_target is not None:
            reached[run.batch].append(run.to_target)
    least = min((epochs for group in reached.values() for epochs in group), default=inf)
    for run in sorted(runs, key=lambda run: run.batch):
        if run.to_target is None and run.length >= min(reached.get(run.batch, [least])):
            missed[run.batch].append(run.length)
    failed = frozenset(b for b in missed if len(missed[b]) > len(reached.get(b, ())))
    kept = {batch: epochs for batch, epochs in reached.items() if batch not in failed}
    barred = _barred_from(kept, failed)
    notes = []
    for batch, lengths in missed.items():
        ended = len(lengths) + len(reached.get(batch, ()))
        means = "counted as if it just had, so it may take more"
        if batch in failed:
            larger = " and larger ones are" if batch >= barred else " is"
            means = f"that batch{larger} ranked as never reaching it"
        notes.append(
            f"{len(lengths)} of {counted(ended, 'run')} with batch {batch} did not reach it in "
            f"{max(lengths):g} epochs: {means}"
        )
    return Outcomes(kept, dict(missed), failed, "; ".join(notes))


def _barred_from(reached: Iterable[int], failed: Iterable[int]) -> float:
    """The smallest failed batch above all that reached the target; infinite without one."""
    most = max(reached, default=0)
    return min((batch for batch in failed if batch > most), default=inf)


def smoothed(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The curve with a running median of three evaluations, as single epochs may dip."""
    middle = [
        (curve[i][0], median(accuracy for _, accuracy in curve[i - 1 : i + 2]))
        for i in range(1, len(curve) - 1)
    ]
    return [curve[0], *middle, curve[-1]]


def scatter_of(
    curve: Sequence[tuple[float, float]], smooth: Sequence[tuple[float, float]]
) -> float:
    """Robust standard deviation of the accuracy around its smoothed curve, a share."""
    misses = [abs(a - b) for (_, a), (_, b) in zip(curve[1:], smooth[1:], strict=True)]
    return hypot(1.4826 * median(misses), _MIN_SCATTER)


def accuracy_at(curve: Sequence[tuple[float, float]], epochs: float) -> float:
    """Accuracy after ``epochs``, interpolated; past the end, the last one."""
    for (e0, a0), (e1, a1) in pairwise(curve):
        if epochs <= e1:
            return a0 + (a1 - a0) * (max(epochs, e0) - e0) / (e1 - e0)
    return curve[-1][1]


def counting_error(accuracy: float, held_out: float) -> float:
    """Binomial standard error of an accuracy that is counted on ``held_out`` images, a share.

    An accuracy of 0 or 1 counts as half an image more, or less.
    """
    share = min(1 - 0.5 / held_out, max(0.5 / held_out, accuracy))
    return sqrt(share * (1 - share) / held_out)
