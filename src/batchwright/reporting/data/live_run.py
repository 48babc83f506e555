"""A run that goes on, as far as its lines tell: the records of a finished one, made from them.

What draws a finished run then draws one that goes on. The lines may come from anyone: what is not
there, not a number or not possible is left out, never guessed and never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pydantic import ValidationError

from batchwright.records import (
    EpochRecord,
    LocalBatches,
    Plan,
    Profile,
    RoundRecord,
    RunSummary,
    WorkerTime,
)

Line = Mapping[str, Any]

MOST_WORKERS = 4096  # of one line: a rank beyond is no rank

_SIZE = re.compile(r"batch/local/(\d{1,4})")


@dataclass(frozen=True)
class RunLines:
    """Lines of a run's metrics.jsonl, by kind, each kind in order.

    Attributes:
        epochs: Of kind ``epoch``.
        steps: Of kind ``step``; the newest is among them.
        shares: Of kind ``shares``.
        rounds: The newest of kind ``round``.
        notes: The newest of kind ``note``.
        stride: Every so many of the ``epoch`` lines is here.
    """

    epochs: Sequence[Line] = ()
    steps: Sequence[Line] = ()
    shares: Sequence[Line] = ()
    rounds: Sequence[Line] = ()
    notes: Sequence[Line] = ()
    stride: int = 1


@dataclass(frozen=True)
class WorkerNow:
    """A worker at the newest line: samples per step, and means of a step's seconds."""

    rank: int
    place: str
    local_batch_size: int
    share: float
    compute_seconds: float | None
    wait_seconds: float | None


@dataclass(frozen=True)
class EpochNow:
    """The epoch in progress.

    Attributes:
        epoch: Zero-based.
        step: Steps done in it; under a parameter server samples that were committed.
        steps: Of how many.
        seconds: Of training in it so far; 0 where nothing tells.
        unit: What is counted: ``step`` or ``sample``.
    """

    epoch: int
    step: int
    steps: int
    seconds: float
    unit: str = "step"

    @property
    def share(self) -> float:
        """How much of it is done, in [0, 1]."""
        return min(1.0, self.step / self.steps)

    @property
    def expected_seconds(self) -> float | None:
        """What the whole epoch would take at its pace so far; `None` before there is one."""
        return self.seconds / self.share if self.step and self.seconds else None


def summary_so_far(name: str, plan: Plan, profile: Profile | None, lines: RunLines) -> RunSummary:
    """The finished epochs as the summary of a run.

    Its wall time is that of these epochs: nothing tells how long the set-up took.

    Args:
        name: Stands for the run folder.
        plan: What is followed.
        profile: What it was made from, if known.
        lines: What the run has told.
    """
    epochs = _epochs(plan, lines)
    wall = sum(e.training_seconds + e.evaluation_seconds + e.checkpoint_seconds for e in epochs)
    return RunSummary(
        run_folder=name,
        plan=plan,
        profile=profile,
        epochs=tuple(epochs),
        setup_seconds=0.0,
        wall_seconds=wall,
        simulated=plan.job.launcher.simulated,
    )


def epoch_now(plan: Plan, lines: RunLines) -> EpochNow | None:
    """The epoch that the newest step or round is of; `None` between epochs, and without such."""
    if plan.server is not None:
        return _epoch_of_rounds(plan, lines)
    newest = _newest_step(lines)
    if newest is None:
        return None
    epoch, step, steps = (whole(newest, key) for key in ("epoch", "step", "steps"))
    if epoch is None or step is None or not steps or epoch >= plan.epochs:
        return None
    done = max((whole(line, "epoch") or 0 for line in lines.epochs), default=-1)
    if epoch <= done:
        return None
    return EpochNow(epoch, min(step, steps), steps, amount(newest, "time/train_s") or 0.0)


def _epoch_of_rounds(plan: Plan, lines: RunLines) -> EpochNow | None:
    newest: Line = next(reversed(lines.rounds), {})
    committed, samples = whole(newest, "committed"), plan.data.train_samples
    if committed is None or committed >= plan.epochs * samples:
        return None
    epoch, done = divmod(committed, samples)
    return EpochNow(epoch, done, samples, 0.0, "sample")


def workers_now(lines: RunLines) -> list[WorkerNow]:
    """The workers by the newest line that tells of them; none where nothing does."""
    newest = _newest_step(lines) or next(reversed(lines.epochs), None)
    if newest is None:
        return []
    told = sizes_of(newest)
    places = _places(lines.shares, len(told))
    total = sum(told) or 1
    return [
        WorkerNow(
            rank=rank,
            place=places.get(rank, ""),
            local_batch_size=batch,
            share=batch / total,
            compute_seconds=_of_step(newest, f"time/rank{rank}/compute_s"),
            wait_seconds=_of_step(newest, f"time/rank{rank}/wait_s"),
        )
        for rank, batch in enumerate(told)
    ]


def rounds_of(plan: Plan, lines: Iterable[Line]) -> list[RoundRecord]:
    """Lines of kind ``round`` as records."""
    found = []
    for line in lines:
        try:
            one = RoundRecord(
                worker=line["worker"],
                number=line["round"],
                epoch=line["epoch"],
                resolution=line["resolution"],
                local_batch_size=line["batch/local"],
                samples=line["samples"],
                steps=line["steps"],
                update_factor=line["factor"],
                loss=amount(line, "train/loss"),
                start=line["time/start_s"],
                compute_seconds=line["time/compute_s"],
                exchange_seconds=line["time/exchange_s"],
                wait_seconds=line["time/wait_s"],
                evaluation_seconds=line.get("time/eval_s", 0.0),
                lead=line.get("lead", 0),
            )
        except (KeyError, ValidationError):
            continue
        if one.worker < plan.workers and one.epoch < plan.epochs:
            found.append(one)
    return found


# ------------------------------------------------------------------------------------- one value


def amount(line: Line, key: str) -> float | None:
    """A finite number that is not negative; `None` for anything else."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and isfinite(value) and value >= 0 else None


def whole(line: Line, key: str) -> int | None:
    """A whole number that is not negative; `None` for anything else."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**53 else None


def sizes_of(line: Line) -> tuple[int, ...]:
    """The workers' local batches in rank order, up to the first rank that is missing."""
    told = {int(match[1]) for key in line if (match := _SIZE.fullmatch(key))}
    sizes: list[int] = []
    while len(sizes) in told and len(sizes) < MOST_WORKERS:
        size = whole(line, f"batch/local/{len(sizes)}")
        if size is None:
            break
        sizes.append(size)
    return tuple(sizes)


def _of_step(line: Line, key: str) -> float | None:
    """Seconds of a step; those of an epoch's line are not of one."""
    return amount(line, key) if line.get("kind") == "step" else None


def _newest_step(lines: RunLines) -> Line | None:
    return next(reversed(lines.steps), None)


def _places(shares: Sequence[Line], workers: int) -> dict[int, str]:
    """Host and device of each worker by the newest line of so many workers."""
    found: dict[int, str] = {}
    for line in shares:
        if len(sizes_of(line)) == workers:
            places = {rank: line.get(f"place/{rank}") for rank in range(workers)}
            found = {rank: place for rank, place in places.items() if isinstance(place, str)}
    return found


# ------------------------------------------------------------------------------------- the epochs


def _epochs(plan: Plan, lines: RunLines) -> list[EpochRecord]:
    """The finished epochs; of one that was told twice, as after a resume, the newest."""
    by_epoch: dict[int, Line] = {}
    for line in lines.epochs:
        epoch = whole(line, "epoch")
        if epoch is not None and epoch < plan.epochs:
            by_epoch[epoch] = line
    steps = _steps_by_epoch(lines)
    shares = _Shares(lines.shares)
    found = []
    for epoch, line in sorted(by_epoch.items()):
        try:
            found.append(_epoch(plan, epoch, line, steps.get(epoch), shares))
        except ValidationError:  # a batch of 0, and the like
            continue
    return found


def _epoch(plan: Plan, epoch: int, line: Line, steps: int | None, shares: _Shares) -> EpochRecord:
    stage = plan.stages[plan.stage_of(epoch)]
    batch = whole(line, "batch/global") or stage.global_batch_size
    seconds = amount(line, "time/epoch_s") or 0.0
    speed = amount(line, "throughput/samples_per_sec")
    samples = round(speed * seconds) if speed else plan.data.train_samples
    right, evaluated = _correct(plan, amount(line, "val/top1"))
    sizes = sizes_of(line)
    return EpochRecord(
        epoch=epoch,
        resolution=whole(line, "resolution") or stage.resolution,
        global_batch_size=batch,
        steps=steps or max(1, round(samples / batch)),
        skipped_steps=whole(line, "steps/skipped") or 0,
        samples=samples,
        learning_rate=amount(line, "lr") or 0.0,
        train_loss=_loss(line, "train/loss"),
        val_loss=_loss(line, "val/loss"),
        val_correct=right,
        val_count=evaluated,
        noise_scale=amount(line, "gns/simple") or None,
        gradient_norm=amount(line, "track/gradient_norm"),
        hessian_eigenvalue=_loss(line, "track/hessian"),
        training_seconds=seconds,
        evaluation_seconds=amount(line, "time/eval_s") or 0.0,
        checkpoint_seconds=amount(line, "time/checkpoint_s") or 0.0,
        repeated_steps=whole(line, "steps/repeated") or 0,
        workers=tuple(_worker(line, rank, sizes, samples, shares) for rank in range(len(sizes))),
        shares=shares.of(epoch, sizes),
    )


def _correct(plan: Plan, top1: float | None) -> tuple[int | None, int | None]:
    """How many held-out images a share means."""
    if top1 is None or top1 > 1 or not plan.data.val_samples:
        return None, None
    return round(top1 * plan.data.val_samples), plan.data.val_samples


def _loss(line: Line, key: str) -> float | None:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and isfinite(value) else None


def _worker(
    line: Line, rank: int, sizes: Sequence[int], samples: int, shares: _Shares
) -> WorkerTime:
    def seconds(part: str) -> float:
        return amount(line, f"time/rank{rank}/{part}_s") or 0.0

    return WorkerTime(
        place=shares.places(len(sizes)).get(rank, f"rank {rank}"),
        local_batch_size=max(1, sizes[rank]),
        samples=round(samples * sizes[rank] / (sum(sizes) or 1)),
        input_seconds=seconds("input"),
        compute_seconds=seconds("compute"),
        wait_seconds=seconds("wait"),
        communication_seconds=seconds("comm"),
        loading_cpu_seconds=seconds("loading_cpu"),
        peak_bytes=whole(line, f"memory/rank{rank}/peak_bytes") or None,
    )


def _steps_by_epoch(lines: RunLines) -> dict[int, int]:
    found = {}
    for line in (*lines.shares, *lines.steps):
        epoch, steps = whole(line, "epoch"), whole(line, "steps")
        if epoch is not None and steps:
            found[epoch] = steps
    return found


class _Shares:
    """The lines about local batches: what holds in an epoch began there or in one before."""

    def __init__(self, lines: Sequence[Line]) -> None:
        told = [
            (epoch, step, sizes)
            for line in lines
            if (epoch := whole(line, "epoch")) is not None
            and (step := whole(line, "step")) is not None
            and (sizes := sizes_of(line))
        ]
        self._told = sorted(told, key=lambda one: one[:2])
        self._lines = lines
        self._places: dict[int, dict[int, str]] = {}

    def places(self, workers: int) -> dict[int, str]:
        """Host and device by rank, where there are so many workers."""
        if workers not in self._places:
            self._places[workers] = _places(self._lines, workers)
        return self._places[workers]

    def of(self, epoch: int, sizes: Sequence[int]) -> tuple[LocalBatches, ...]:
        """The stretches of an epoch; none where no line told of as many workers before."""
        ones = [one for one in self._told if one[0] <= epoch and len(one[2]) == len(sizes)]
        before = [one for one in ones if one[:2] <= (epoch, 0)]
        inside = [one for one in ones if one[0] == epoch and one[1] > 0]
        if not before:
            return ()
        return (
            LocalBatches(step=0, sizes=before[-1][2]),
            *(LocalBatches(step=step, sizes=told) for _, step, told in inside),
        )
