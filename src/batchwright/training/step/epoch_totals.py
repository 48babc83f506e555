"""What an epoch adds up to, step by step, until it becomes an `EpochRecord`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from batchwright.records import EpochRecord, FactorRange, LocalBatches, Stage, WorkerTime
from batchwright.records.run import recorded_loss

OWN_PARTS = ("local_samples", "input", "compute", "wait", "communication", "loading", "peak")
"""Of one worker; the others are for all."""


@dataclass
class EpochMeter:
    """Sums over the steps of one epoch on one worker; seconds, samples, counts.

    ``training`` is wall time inside the steps, checkpoints aside; ``input``, ``compute``, ``wait``
    and ``communication`` are its parts on this worker; ``loading`` is processor time of its loader
    processes, which goes by beside them. ``peak`` is the most bytes that its tensors took, 0 if
    unknown. ``shares`` are the local batches over the
    epoch, as (first step, sizes by rank); ``factors`` and ``gains`` are what adaptive scaling
    multiplied gradients and rate by, as `met` keeps them.
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
        """What a worker that was not there before goes on with: the epoch, nothing of its own."""
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
        """From ``step`` on there are other local batches."""
        before = [one for one in self.shares if one[0] < step]
        if not before or before[-1][1] != sizes:
            before.append((step, sizes))
        self.shares = before

    def record(
        self, stage: Stage, workers: list[WorkerTime], noise_scale: float | None
    ) -> EpochRecord:
        """The finished epoch, from rank 0's view."""
        correct = self.scores.get("top1")
        loss = self.scores.get("loss")
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
            val_loss=recorded_loss(loss / self.score_count) if loss is not None else None,
            val_correct=round(correct) if correct is not None else None,
            val_count=self.score_count or None,
            noise_scale=noise_scale,
            **tracked_fields(self.scores, self.score_count),
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


def tracked_fields(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """The fields of a record that ``track`` fills in, out of the sums of an evaluation."""
    names = {"track/gradient_norm": "gradient_norm", "track/hessian": "hessian_eigenvalue"}
    return {field: sums[name] / count for name, field in names.items() if name in sums}


def met(before: Sequence[float], values: Sequence[float]) -> tuple[float, ...]:
    """(Steps, sum of their means, smallest, largest) of some numbers, with those of one more step.

    Args:
        before: The same of the steps before; empty for none.
        values: Of the step; at least one.
    """
    steps, total, least, most = before or (0, 0.0, math.inf, -math.inf)
    return (steps + 1, total + fmean(values), min(least, *values), max(most, *values))


def _range(met: Sequence[float]) -> FactorRange | None:
    if not met:
        return None
    steps, total, least, most = met
    return FactorRange(mean=total / steps, least=least, most=most)
