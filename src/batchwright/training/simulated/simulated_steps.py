"""Virtual workers that sum their gradients at each step: plain, dynamic-batch, cyclic.

The steps are those of real training, taken by the same `Stepper`: each worker's gradient is
computed in its turn, with its own buffers and random numbers, and they are summed in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from batchwright.distributed.reducer import Reducer, Tally, WorkerNote, summed
from batchwright.records import WorkerTime
from batchwright.training.batches.batch_split import Sharing
from batchwright.training.batches.epoch_steps import EpochSteps
from batchwright.training.batches.feeding import Batch
from batchwright.training.batches.sampler import Step, micro_batches
from batchwright.training.simulated.simulated_run import VirtualRun
from batchwright.training.simulated.simulated_workers import Buffers, Randomness, VirtualGroup
from batchwright.training.step.clock import StepClock
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.normalization import Statistics
from batchwright.training.step.stepper import Stepper, Wishes


class VirtualSteps:
    """Trains as a plan without a parameter server says.

    Args:
        run: What it stands on; may be one that goes on.
    """

    def __init__(self, run: VirtualRun) -> None:
        self._run, plan, workers = run, run.plan, run.plan.workers
        self._group = VirtualGroup(run.device, workers)
        self._buffers = Buffers(run.task.network, workers)
        self._randomness = Randomness(plan.job.seed, workers, run.device)
        self._sharing = Sharing(
            plan,
            self._group,
            run.state,
            run.recorder,
            samples=run.samples,
            least=run.least,
            weights=run.task.sample_weights,
        )
        updater = run.updater(run.task.optimizer)
        self._reducer = Gatherer(run.parameters, workers, per_tensor=updater.per_tensor)
        self._clock = SimulatedClock(workers)
        self._stepper = Stepper(
            plan,
            self._group,
            run.state,
            self._reducer,
            updater,
            Statistics(run.task.network),
            self._sharing,
            self._clock,
            Wishes,
        )
        size = sum(p.numel() * p.element_size() for p in run.parameters)
        self._exchange_seconds = run.cluster.all_reduce_seconds(size)
        run.keeper.keep("virtual", self)

    def train(self) -> None:
        """From where the run is to its end."""
        run, state = self._run, self._run.state
        while not run.over:
            if state.meter.epoch != state.epoch or not state.step:
                state.meter = EpochMeter(epoch=state.epoch)
                self._clock.new_epoch()
            run.settings.enter(state.stage(run.plan))
            self._sharing.begin_epoch()
            self._steps()
            self._evaluate()
            self._end_epoch()

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

    # -------------------------------------------------------------------------------------- steps

    def _steps(self) -> None:
        run, state, walk = self._run, self._run.state, self._sharing.walk
        assert walk is not None  # noqa: S101 - the epoch has begun
        resolution = state.stage(run.plan).resolution
        fed = run.feed.training(self._ahead(walk), state.epoch, resolution)
        while state.step < len(walk):
            step, index = walk.step(state.step), state.step
            self._take(step, self._fed(fed, self._parts(walk, step, self._most_at(walk, index))))
            while self._stepper.repeat:
                most = self._sharing.micro_batch_size
                self._take(step, self._cut(self._parts(walk, step, most)))
            run.keeper.check()
            notes = self._stepper.tally.notes
            run.recorder.step(state.meter, len(walk), step.local_batch_sizes, notes)
            if run.stop_wished(self._clock.now):
                self._buffers.merge(self._sharing.local_batch_sizes)
                run.stop_if_asked(self._clock.now)

    def _take(self, step: Step, source: Iterator[tuple[int, int, Batch]]) -> None:
        """One step of all workers, or an attempt; all of the source is taken in any case."""
        run, stepper = self._run, self._stepper
        times = run.times[run.plan.stage_of(run.state.epoch)]
        self._clock.begin(
            [
                worker.finish(self._clock.now, times.work(size, worker.overhead)) - self._clock.now
                for worker, size in zip(run.cluster.workers, step.local_batch_sizes, strict=True)
            ],
            self._exchange_seconds,
        )
        self._reducer.begin(self._clock.computing)
        stepper.repeat = False
        left = list(step.local_batch_sizes)
        last = max(rank for rank, size in enumerate(left) if size)
        for rank, samples, (images, labels) in source:
            if stepper.repeat:
                continue  # memory ran out: the rest of the step is in vain
            left[rank] -= samples
            with self._buffers.of(rank), self._randomness.of(rank):
                stepper.open(samples, step, last=rank == last and not left[rank])
                stepper.step(partial(run.task.mean_loss, images, labels), None)
            if not left[rank] and rank != last and not stepper.repeat:
                self._reducer.collect()
        self._clock.end(step.local_batch_sizes, counted=not stepper.repeat)

    # ------------------------------------------------------------------------------ micro-batches

    def _parts(self, walk: EpochSteps, step: Step, most: int) -> list[tuple[int, Tensor]]:
        """(rank, indices) of all workers' micro-batches of a step, in rank order."""
        found = []
        for rank in range(self._group.size):
            first, last = step.span(rank)
            sizes = micro_batches(last - first, most, self._sharing.least)
            parts = walk.order[first:last].split(sizes) if sizes else ()
            found += [(rank, part) for part in parts]
        return found

    @staticmethod
    def _most_at(walk: EpochSteps, index: int) -> int:
        return walk.shares_at(index).micro_batch_size

    def _ahead(self, walk: EpochSteps) -> Iterator[Tensor]:
        """Micro-batches for the feed, which may ask for them long before they are trained on."""
        for index in range(self._run.state.step, len(walk)):
            walk.taken = index
            for _, part in self._parts(walk, walk.step(index), self._most_at(walk, index)):
                yield part

    def _fed(
        self, fed: Iterator[Batch], parts: Sequence[tuple[int, Tensor]]
    ) -> Iterator[tuple[int, int, Batch]]:
        """A step's micro-batches out of the feed, as (rank, samples, batch).

        One that the feed was asked for before memory ran out is cut again.
        """
        most = self._sharing.micro_batch_size
        for rank, part in parts:
            batch = next(fed)
            if len(part) <= most:
                yield rank, len(part), batch
            else:
                sizes = micro_batches(len(part), most, self._sharing.least)
                yield from self._cut([(rank, smaller) for smaller in part.split(sizes)])

    def _cut(self, parts: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, int, Batch]]:
        """The same, fetched here and now."""
        run = self._run
        resolution = run.state.stage(run.plan).resolution
        for rank, part in parts:
            yield rank, len(part), run.feed.single(part, run.state.epoch, resolution)

    # ---------------------------------------------------------------------------- ends of epochs

    def _evaluate(self) -> None:
        run, meter = self._run, self._run.state.meter
        if not run.evaluation_due(run.state.epoch):
            return
        shares = self._sharing.local_batch_sizes
        self._buffers.merge(shares)
        scores = run.evaluate(run.state.epoch, shares)
        if scores is None:
            run.stop_if_asked(self._clock.now)
        else:
            meter.scores, meter.score_count, seconds = scores
            meter.evaluation += seconds

    def _end_epoch(self) -> None:
        run, state, meter = self._run, self._run.state, self._run.state.meter
        self._sharing.end_epoch()
        workers = self._clock.worker_times(self._group.places, meter.shares[-1][1])
        record = meter.record(state.stage(run.plan), workers, state.noise.noise_scale)
        run.recorder.epochs.append(record)  # before the checkpoint, which must know of it
        shares = self._sharing.local_batch_sizes
        state.epoch, state.step = state.epoch + 1, 0
        self._buffers.merge(shares)
        if meter.scores and run.is_best(meter.scores, meter.score_count):
            meter.checkpoint += run.keeper.save("best", state, 1.0)
        if run.keeper.due(state.steps) or run.over:
            meter.checkpoint += run.keeper.save("last", state, 1.0)
        run.recorder.epoch(record.model_copy(update={"checkpoint_seconds": meter.checkpoint}))


class Gatherer(Reducer):
    """Sums the gradients of workers that take turns in one process; stands in for a `Reducer`.

    A worker's micro-batches are added up as it would add them, and then the workers in rank order,
    norms likewise, so that all comes out to the bits of a real exchange between two.

    Args:
        parameters: What is trained.
        workers: How many.
        per_tensor: As for `Reducer`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], workers: int, *, per_tensor: bool
    ) -> None:
        group = VirtualGroup(parameters[0].device, 1)
        super().__init__(parameters, group, per_tensor=per_tensor)
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
        """A step begins, for which the workers compute so long."""
        self._seconds = seconds
        self._drop()
        self._totals, self._total_norms, self._total_parts = [], None, 0

    def collect(self) -> None:
        """A worker's gradients are all taken: add them to those of the workers before."""
        if self._norms is not None:
            norms, own = self._total_norms, self._norms.float()  # as a message holds them
            self._total_norms = own if norms is None else norms + own
        self._total_parts += self._parts
        if self._sums:
            self._totals = summed(self._totals, self._sums)
        self._drop()

    def finish(self, tally: Tally, share: float) -> Tally:
        """Every parameter has the sum of all workers' gradients, the last one's included."""
        notes = tuple(
            WorkerNote(seconds, tally.note.ahead, tally.note.micro_batch)
            for seconds in self._seconds
        )
        if tally.out_of_memory:
            return replace(tally, notes=notes)
        self.take(share)
        self.collect()
        for parameter, total in zip(self.parameters, self._totals, strict=True):
            parameter.grad = total
        parts = self._total_parts
        norms = self._total_norms if parts > 1 or self._workers > 1 else None
        return replace(
            tally,
            parts=parts,
            local_sqr_norms=norms,
            sqr_norms=self._own_sqr_norms(),
            notes=notes,
        )


class SimulatedClock(StepClock):
    """Books simulated seconds where a `StepClock` books those of this process.

    Args:
        workers: How many.

    Attributes:
        now: Simulated seconds of training.
        computing: Seconds of each worker's part of the step in progress.
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
        """The workers' sums begin anew."""
        parts = ("compute", "wait", "communication", "samples")
        self._sums = {part: [0.0] * len(self.computing) for part in parts}

    def begin(self, computing: Sequence[float], exchange: float) -> None:
        """A step of so many seconds, by worker, and of exchanging after the slowest."""
        self.computing, self._exchange = list(computing), exchange
        waits = max(computing) - computing[0]
        self._laps = {"compute": computing[0], "communication": waits + exchange}

    def end(self, samples: Sequence[int], *, counted: bool) -> None:
        """The step is over; ``counted`` unless it will be done again."""
        slowest = max(self.computing)
        self.now += slowest + self._exchange
        for rank, seconds in enumerate(self.computing):
            self._sums["compute"][rank] += seconds
            self._sums["wait"][rank] += slowest - seconds
            self._sums["communication"][rank] += self._exchange
            self._sums["samples"][rank] += samples[rank] * counted

    def worker_times(self, places: Sequence[str], sizes: Sequence[int]) -> list[WorkerTime]:
        """Where each worker's time went since the epoch began."""
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
        """Book what the step's part takes rank 0, once; returns it, in seconds."""
        seconds = self._laps.pop(part, 0.0)
        setattr(meter, part, getattr(meter, part) + seconds)
        meter.training += seconds
        return seconds

    def computed(self) -> float:
        """Seconds that rank 0 computes in this step."""
        return self.computing[0]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"now": self.now, "sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.now = state["now"]
        self._sums = {part: list(values) for part, values in state["sums"].items()}
