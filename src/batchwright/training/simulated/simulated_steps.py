"""Simulated workers that sum their gradients at each step: `plain`, `dynamic-batch`, `cyclic`.

The run is that of real training with another clock and reducer: each worker's gradient is computed
in its turn, with its own buffers and random numbers, and they are summed in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from batchwright.algorithms.simulated_clock import Cluster, step_times
from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer, summed
from batchwright.distributed.tally import QueuedWork, Tally, WorkerNote
from batchwright.records import WorkerTime
from batchwright.training.all_reduce_run import AllReduceRun
from batchwright.training.batches.sampler import Step
from batchwright.training.running import Setup
from batchwright.training.simulated.simulated_workers import (
    Buffers,
    Randomness,
    SimulatedGroup,
    note_cluster,
)
from batchwright.training.step.clock import StepClock
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.micro_batches import Turns


class SimulatedAllReduce(AllReduceRun, Turns):
    """An `AllReduceRun` whose workers are all in this process, in simulated time.

    Args:
        setup: What is trained, and how; its group is this process alone.

    Raises:
        PlanError: Nothing says how long a step takes.
        JobError: The job names workers that the plan does not have.
        FileError: The run folder holds a run already, or cannot be written.
    """

    _clock: SimulatedClock
    _reducer: Gatherer

    def __init__(self, setup: Setup) -> None:
        plan, workers, device = setup.plan, setup.plan.workers, setup.group.device
        self._cluster, self._times = Cluster(plan.job, workers), step_times(plan)
        super().__init__(
            setup,
            workers=SimulatedGroup(device, workers),
            clock=SimulatedClock(workers),
            reducer=partial(Gatherer, workers=workers),
            turns=self,
        )
        note_cluster(self._recorder, workers)
        self._buffers = Buffers(setup.model, workers)
        self._randomness = Randomness(plan.job.seed, workers, device)
        size = sum(p.numel() * p.element_size() for p in self._reducer.parameters)
        self._exchange_seconds = self._cluster.all_reduce_seconds(size)
        self.keep("virtual", self)

    def finish(self) -> None:
        """Write the summary, which says that the seconds are simulated."""
        if self._checkpoints.misses(self.state.steps):
            self._keep_steps()
        self._checkpoints.settle()
        self._recorder.finish(simulated=True)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "buffers": self._buffers.state_dict(),
            "random": self._randomness.state_dict(),
            "clock": self._clock.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._buffers.load_state_dict(state["buffers"])
        self._randomness.load_state_dict(state["random"])
        self._clock.load_state_dict(state["clock"])

    @contextmanager
    def attempt(self, step: Step) -> Iterator[None]:
        """Advance the simulated clock by a step: slowest worker's computing and exchange."""
        rows = (*self._plan.stages, *self._plan.growth)
        times, now = self._times[rows.index(self.stage)], self._clock.now
        self._clock.begin(
            [
                worker.finish(now, times.work(size, worker.overhead)) - now
                for worker, size in zip(self._cluster.workers, step.local_batch_sizes, strict=True)
            ],
            self._exchange_seconds,
        )
        self._reducer.begin(self._clock.computing)
        yield
        self._clock.end(step.local_batch_sizes, counted=not self.stepper.repeat)

    @contextmanager
    def turn(self, rank: int, *, last: bool) -> Iterator[None]:
        """Inside, the network has the worker's own buffers, and its random numbers are drawn."""
        with self._buffers.of(rank), self._randomness.of(rank):
            yield
        if last:
            self._reducer.collect()

    def _begin_epoch(self) -> None:
        if self.state.meter.epoch != self.state.epoch or not self.state.step:
            self._clock.new_epoch()
        super()._begin_epoch()

    @property
    def _elapsed(self) -> float:
        return self._clock.now

    @property
    def _position(self) -> str:
        return f"{self._clock.now:.6g} simulated seconds"

    def _worker_times(self) -> list[WorkerTime]:
        return self._clock.worker_times(self._workers.places, self.state.meter.shares[-1][1])

    def _merge_buffers(self) -> None:
        self._buffers.merge(self.local_batch_sizes)


class Gatherer(Reducer):
    """Sums the gradients of workers that take turns in one process; stands in for a `Reducer`.

    Each worker's micro-batches are added up as a real one adds them, then the workers in rank
    order, and so are norms: the same bits as of a real exchange between two workers.

    Args:
        parameters: All parameters, in the model's order.
        group: The group of this process alone.
        workers: Number of simulated workers.
        how: More arguments of `Reducer`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, *, workers: int, **how: Any
    ) -> None:
        super().__init__(parameters, group, **how)
        self._workers = workers
        self._seconds: Sequence[float] = ()
        self._totals: list[Tensor | None] = []
        self._total_norms: Tensor | None = None
        self._total_parts = 0

    @property
    def empty(self) -> bool:
        """Whether no parameter has got a gradient in the step in progress."""
        return all(total is None for total in self._totals) and super().empty

    def begin(self, seconds: Sequence[float]) -> None:
        """Begin a step, for which each worker computes so many ``seconds``, in rank order."""
        self._seconds = seconds
        self._reset()
        self._totals, self._total_norms, self._total_parts = [], None, 0

    def collect(self) -> None:
        """Add a worker's gradients, which are all taken, to those of the workers before."""
        if self._norms is not None:
            norms, own = self._total_norms, self._norms.float()  # as a message holds them
            self._total_norms = own if norms is None else norms + own
        self._total_parts += self._parts
        if self._sums:
            self._totals = summed(self._totals, self._sums)
        self._reset()

    def finish(self, tally: Tally, share: float, queued: QueuedWork | None = None) -> Tally:
        """Put the sums of all workers' gradients into ``.grad``; see `Reducer.finish`."""
        notes = tuple(
            WorkerNote(seconds, tally.note.ahead, tally.note.micro_batch)
            for seconds in self._seconds
        )
        if tally.missing:
            return replace(tally, notes=notes)
        self.take(share)
        self.collect()
        for parameter, total in zip(self.parameters, self._totals, strict=True):
            parameter.grad = total
        parts = self._total_parts
        norms = self._total_norms if parts > 1 or self._workers > 1 else None
        tally = replace(tally, parts=parts, notes=notes)
        return self._read_norms(tally, norms, self._own_sqr_norms(), queued)


class SimulatedClock(StepClock):
    """Books simulated seconds where a `StepClock` books those of this process.

    Args:
        workers: Number of workers.

    Attributes:
        now: Simulated seconds of training, the step in progress included.
        computing: Seconds that each worker computes in the step in progress.
    """

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.now = 0.0
        self.computing: list[float] = [0.0] * workers
        self._exchange = 0.0
        self._laps: dict[str, float] = {}
        self._sums: dict[str, list[float]] = {}
        self.new_epoch()

    def new_epoch(self) -> None:
        """Set the workers' sums of the epoch to 0."""
        parts = ("compute", "wait", "communication", "samples")
        self._sums = {part: [0.0] * len(self.computing) for part in parts}

    def begin(self, computing: Sequence[float], exchange: float) -> None:
        """Begin a step: seconds of ``computing`` of each worker, and of ``exchange`` after them."""
        self.computing, self._exchange = list(computing), exchange
        self.now += max(computing) + exchange  # the step's end, by which workers ask to stop
        waits = max(computing) - computing[0]
        self._laps = {"compute": computing[0], "communication": waits + exchange}

    def end(self, samples: Sequence[int], *, counted: bool) -> None:
        """End the step; its ``samples`` by worker are ``counted`` unless it will be repeated."""
        slowest = max(self.computing)
        for rank, seconds in enumerate(self.computing):
            self._sums["compute"][rank] += seconds
            self._sums["wait"][rank] += slowest - seconds
            self._sums["communication"][rank] += self._exchange
            self._sums["samples"][rank] += samples[rank] * counted

    def worker_times(self, places: Sequence[str], sizes: Sequence[int]) -> list[WorkerTime]:
        """Times of each worker since the epoch began."""
        sums = self._sums
        return [
            WorkerTime(
                place=place,
                local_batch_size=sizes[rank],
                samples=int(sums["samples"][rank]),
                input_seconds=0.0,
                compute_seconds=sums["compute"][rank],
                wait_seconds=sums["wait"][rank],
                communication_seconds=sums["communication"][rank],
            )
            for rank, place in enumerate(places)
        ]

    def lap(self, meter: EpochMeter, part: Literal["input", "compute", "communication"]) -> float:
        """Book the seconds that a part of the step takes worker 0, once; returns them."""
        seconds = self._laps.pop(part, 0.0)
        setattr(meter, part, getattr(meter, part) + seconds)
        meter.training += seconds
        return seconds

    def computed(self) -> float:
        """Seconds that worker 0 computes in the step in progress."""
        return self.computing[0]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"now": self.now, "sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.now = state["now"]
        self._sums = {part: list(values) for part, values in state["sums"].items()}
