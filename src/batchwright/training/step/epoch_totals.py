"""Sums over the steps of an epoch, until they become an `EpochRecord`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from batchwright.records import EpochRecord, FactorRange, LocalBatches, Stage, WorkerTime
from batchwright.records.run import recorded_loss

OWN_PARTS = ("local_samples", "input", "compute", "wait", "communication", "loading", "peak")
"""Fields of `EpochMeter` that are of one worker; the others are of all workers."""


@dataclass
class EpochMeter:
    """Sums over the steps of one epoch on one worker.

    Attributes:
        epoch: Zero-based.
        steps: Steps taken, those included whose update was skipped.
        skipped: Steps without an update, because a gradient was not finite.
        repeated: Steps taken again, because memory ran out or compiling failed.
        samples: Training samples of all workers.
        local_samples: Training samples of this worker.
        weight: Weight of the samples of all workers; their number unless the loop weighs them.
        loss: Sum of weight times mean loss, all workers.
        rate: Learning rate of the last step.
        input: Seconds that this worker waited for input.
        compute: Seconds that it computed: forward and backward passes, updates.
        wait: Seconds that it waited for slower workers.
        communication: Seconds of exchanging gradients, without ``wait``.
        loading: Processor seconds of its loader processes, beside all others.
        peak: Most bytes that its tensors took; 0 if unknown.
        training: Wall seconds inside the steps: input, compute, wait and communication together.
        evaluation: Wall seconds of evaluations.
        checkpoint: Wall seconds that checkpoints held training up.
        whole: Whether the meter has seen the epoch from its start, in one run.
        scores: Sums of the last evaluation over the held-out samples, by name.
        score_count: Number of held-out samples.
        shares: Local batches over the epoch, as (first step, sizes by rank).
        factors: Range of the factors on gradients, as `extend_range` keeps it.
        gains: Range of the measured factors on the rate, as `extend_range` keeps it.
    """

    epoch: int = 0
    steps: int = 0
    skipped: int = 0
    repeated: int = 0
    samples: int = 0
    local_samples: int = 0
    weight: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    input: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    loading: float = 0.0
    peak: int = 0
    training: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0
    whole: bool = True
    scores: dict[str, float] = field(default_factory=dict)
    score_count: int = 0
    shares: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    factors: tuple[float, ...] = ()
    gains: tuple[float, ...] = ()

    @property
    def mean_loss(self) -> float | None:
        """Mean training loss so far; ``None`` where it is not finite or nothing was seen."""
        mean = self.loss / self.weight if self.weight else math.nan
        return recorded_loss(mean)

    @property
    def samples_per_second(self) -> float:
        """Training samples of all workers per second so far."""
        return self.samples / self.training if self.training > 0 else 0.0

    def values(self) -> dict[str, Any]:
        """Plain values for a checkpoint; ``EpochMeter(**values)`` goes on, no longer whole."""
        return {**asdict(self), "whole": False}

    def for_a_newcomer(self) -> EpochMeter:
        """The meter of a worker that joins within the epoch: sums of all, none of its own."""
        return EpochMeter(**(self.values() | dict.fromkeys(OWN_PARTS, 0)))

    def worker_time(self, place: str, local_batch_size: int) -> WorkerTime:
        """This worker's own part of the record."""
        return WorkerTime(
            place=place,
            local_batch_size=local_batch_size,
            samples=self.local_samples,
            input_seconds=self.input,
            compute_seconds=self.compute,
            wait_seconds=self.wait,
            communication_seconds=self.communication,
            loading_cpu_seconds=self.loading,
            peak_bytes=self.peak or None,
        )

    def shares_from(self, step: int, sizes: tuple[int, ...]) -> None:
        """Note the local batches from ``step`` on: sizes by rank, in samples."""
        before = [share for share in self.shares if share[0] < step]
        if not before or before[-1][1] != sizes:
            before.append((step, sizes))
        self.shares = before

    def record(
        self, stage: Stage, workers: list[WorkerTime], noise_scale: float | None
    ) -> EpochRecord:
        """The finished epoch, from rank 0's view."""
        return EpochRecord(
            epoch=self.epoch,
            resolution=stage.resolution,
            global_batch_size=stage.global_batch_size,
            steps=self.steps,
            skipped_steps=self.skipped,
            repeated_steps=self.repeated,
            samples=self.samples,
            learning_rate=self.rate,
            train_loss=self.mean_loss,
            noise_scale=noise_scale,
            **held_out_fields(self.scores, self.score_count),
            gradient_factors=_range(self.factors),
            rate_gain=_range(self.gains),
            training_seconds=self.training,
            evaluation_seconds=self.evaluation,
            checkpoint_seconds=self.checkpoint,
            workers=tuple(workers),
            shares=tuple(
                LocalBatches(step=step, sizes=tuple(sizes)) for step, sizes in self.shares
            ),
            whole=self.whole,
        )


@dataclass
class BestScore:
    """Score of the best evaluation so far.

    Attributes:
        best_score: Highest score of an evaluation so far, as `score_of`.
        best_loss: Its held-out loss, which decides between equal scores; infinite: none. An
            earlier version's checkpoint has none, and its best epoch stays the best of equals.
        loss_as_score: Whether the best score may be a loss: an earlier version took the first value
            of a metric for its score, whatever its name, and the highest for the best.
    """

    best_score: float = -math.inf
    best_loss: float = math.inf
    loss_as_score: bool = False

    def note_score(self, sums: Mapping[str, float], count: int) -> bool:
        """Note an evaluation's score, as `score_of`; returns whether it is the best so far."""
        if self.loss_as_score and next(iter(sums)) == "loss":
            self.best_score, self.best_loss = -math.inf, math.inf
        self.loss_as_score = False
        score = score_of({name: value / count for name, value in sums.items()})
        better = is_better(score, (self.best_score, self.best_loss))
        if better:
            self.best_score, self.best_loss = score
        return better


def score_of(means: Mapping[str, float]) -> tuple[float, float]:
    """An evaluation's score, and the loss that decides between equal ones.

    The score is the first mean that is no ``loss``. Where that is the accuracy, the held-out loss
    decides, as in `RunSummary.best_epoch`; it is infinite if it is not finite, or if the score is
    another. Of a loss alone the lowest is the best.

    >>> score_of({"top1": 0.7, "loss": 0.9}), score_of({"value": 2.0, "loss": 0.9})
    ((0.7, 0.9), (2.0, inf))
    >>> score_of({"loss": 0.9, "top1": 0.7}), score_of({"loss": 0.9})
    ((0.7, 0.9), (-0.9, inf))
    >>> score_of({"top1": 0.7, "loss": math.nan})
    (0.7, inf)
    """
    name = next((one for one in means if one != "loss"), "loss")
    if name == "loss":
        return -means["loss"], math.inf
    loss = recorded_loss(means.get("loss", math.inf)) if name == "top1" else None
    return means[name], math.inf if loss is None else loss


def is_better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether an evaluation's `score_of` is above another's, or equal with the lower loss."""
    return one[0] > other[0] or (one[0] == other[0] and one[1] < other[1])


def held_out_fields(sums: Mapping[str, float], count: int) -> dict[str, Any]:
    """Fields of an epoch's record about an evaluation.

    Args:
        sums: Sums of its values over the held-out samples, by name: ``top1``, ``loss``, and those
            that the job's ``track`` asks for.
        count: Number of held-out samples.
    """
    loss, correct = sums.get("loss"), sums.get("top1")
    tracked = {"track/gradient_norm": "gradient_norm", "track/hessian": "hessian_eigenvalue"}
    return {
        "val_loss": recorded_loss(loss / count) if loss is not None else None,
        "val_correct": None if correct is None or not math.isfinite(correct) else round(correct),
        "val_count": count or None,
        **{field: sums[name] / count for name, field in tracked.items() if name in sums},
    }


def extend_range(before: Sequence[float], values: Sequence[float]) -> tuple[float, ...]:
    """Range of numbers over steps, extended by one step: (steps, sum of means, least, most).

    Args:
        before: Range of the steps before; empty for none.
        values: Numbers of the step; at least one.
    """
    steps, total, least, most = before or (0, 0.0, math.inf, -math.inf)
    return (steps + 1, total + fmean(values), min(least, *values), max(most, *values))


def _range(extended: Sequence[float]) -> FactorRange | None:
    if not extended:
        return None
    steps, total, least, most = extended
    return FactorRange(mean=total / steps, least=least, most=most)
