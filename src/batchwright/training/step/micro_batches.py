"""The micro-batches of an epoch's steps in one process, handed to the user's loop in turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from batchwright.training.batches.batch_split import Division
from batchwright.training.batches.epoch_steps import EpochSteps
from batchwright.training.batches.feeding import Batch, Feed
from batchwright.training.batches.sampler import Step, micro_batches
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.step.clock import StepClock
from batchwright.training.step.early_batches import NO_BATCHES, Early
from batchwright.training.step.peak_memory import PeakMemory
from batchwright.training.step.stepper import Stepper


class EpochBatches:
    """Micro-batches that come once each, however many loops go through them one after the other.

    A loop that is left early leaves the rest to the next loop; nothing is fetched again.

    Args:
        batches: All micro-batches; goes on where the loop before has left it.
        stepper: Leaves autocast when a loop ends.
        clock: Does not count the time between two loops.
    """

    def __init__(
        self, batches: Generator[Batch, None, None], stepper: Stepper, clock: StepClock
    ) -> None:
        self._batches, self._stepper, self._clock = batches, stepper, clock
        self._in_a_loop = False
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.refuse_failed()
        if self._in_a_loop:
            raise RuntimeError(
                "session.batches() is still open in another loop of this epoch: end that one "
                "first, or go on with the iterator that it has"
            )
        self._in_a_loop = True
        self._clock.restart()
        try:
            while True:
                try:
                    batch = next(self._batches)
                except StopIteration:
                    return
                except Exception as error:
                    self._failure = error
                    raise
                yield batch
        finally:
            if self._in_a_loop:  # else autocast is on for a batch of the next epoch
                self._in_a_loop = False
                self._stepper.leave_autocast()

    def refuse_failed(self) -> None:
        """Raise `RuntimeError` if an error has ended batches or step, and the loop goes on."""
        self._stepper.refuse_failed()
        if self._failure is not None:
            raise RuntimeError(
                f"session.batches() has ended with an error, so the epoch cannot go on: "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def end(self) -> None:
        """Finish the last step, where the loop was left right after it."""
        next(self._batches, None)
        self._in_a_loop = False

    def close(self) -> None:
        """Let go of the batches and of what the feed has fetched ahead, also within a loop."""
        self._batches.close()
        self._stepper.leave_autocast()


class Turns:
    """How the workers of a process take turns with its network; a single worker needs no turns."""

    def attempt(self, step: Step) -> AbstractContextManager[Any]:
        """Context of all micro-batches of a step, entered again where the step is repeated."""
        del step
        return nullcontext()

    def turn(self, rank: int, *, last: bool) -> AbstractContextManager[Any]:
        """Context of one micro-batch of worker ``rank``, its ``last`` one of the step or not."""
        del rank, last
        return nullcontext()


class MicroBatches:
    """Yields the micro-batches of steps; the user's loop calls `Session.step` for each.

    Args:
        feed: Makes the batches.
        stepper: Takes the steps.
        division: Says how large a micro-batch may be.
        state: How far the run is.
        clock: Books the time.
        memory: Measures the peak memory of the steps.
        ranks: Ranks of the workers of this process.
        turns: How these workers take turns.
    """

    def __init__(
        self,
        feed: Feed,
        stepper: Stepper,
        division: Division,
        state: RunState,
        clock: StepClock,
        memory: PeakMemory,
        ranks: Sequence[int] = (0,),
        turns: Turns | None = None,
    ) -> None:
        self._feed, self._stepper, self._division = feed, stepper, division
        self._state, self._clock, self._memory = state, clock, memory
        self._ranks, self._turns = ranks, turns or Turns()

    def through(
        self, steps: EpochSteps, epoch: int, resolution: int, after_step: Callable[[Step], None]
    ) -> Generator[Batch, None, None]:
        """The micro-batches of all steps of an epoch, or of a stretch of it, that are left.

        Args:
            steps: The steps; the first one left is the state's.
            epoch: Zero-based epoch of the samples.
            resolution: Training image side, in pixels.
            after_step: Called once the user's loop is done with a step.
        """
        loading = self._feed.loading
        loaded = loading.totals.cpu_seconds
        batches: Iterator[Batch]
        early = NO_BATCHES
        if self._feed.makes_on_gpu(resolution):
            make = partial(self._feed.single, epoch=epoch, resolution=resolution)
            batches = early = Early(steps.ahead(), make)
        else:
            batches = self._feed.training(steps.ahead(), epoch, resolution)
        with self._memory.of_epoch(), self._stepper.preparing(early):
            while self._state.step < len(steps):
                index = self._state.step
                step = steps.step(index)
                with self._memory.of_step(self._division.position[1]):
                    source = self._from_feed(batches, steps.parts(index), epoch, resolution)
                    yield from self._attempt(step, source)
                    while self._stepper.repeat:  # memory ran out: in smaller micro-batches
                        smaller = steps.cut(step, self._division.micro_batch_size)
                        yield from self._attempt(step, self._fetched(smaller, epoch, resolution))
                if loading.loaders:  # without loader processes it is input
                    before, loaded = loaded, loading.totals.cpu_seconds
                    self._state.meter.loading += loaded - before
                after_step(step)

    def _from_feed(
        self, batches: Iterator[Batch], parts: list[tuple[int, Tensor]], epoch: int, resolution: int
    ) -> Iterator[tuple[int, int, Batch]]:
        """The micro-batches of a step, as (rank, samples, batch), as the feed prefetched them.

        A batch that the feed was asked for before memory ran out may be too large by now: its
        samples are fetched again, in smaller ones.
        """
        most, least = self._division.micro_batch_size, self._division.least
        for rank, part in parts:
            batch = next(batches)
            sizes = micro_batches(len(part), most, least)
            if len(sizes) == 1:
                yield rank, len(part), batch
            else:
                smaller = [(rank, piece) for piece in part.split(sizes)]
                yield from self._fetched(smaller, epoch, resolution)

    def _fetched(
        self, parts: list[tuple[int, Tensor]], epoch: int, resolution: int
    ) -> Iterator[tuple[int, int, Batch]]:
        """Micro-batches fetched here and now, as (rank, samples, batch)."""
        for rank, part in parts:
            yield rank, len(part), self._feed.single(part, epoch, resolution)

    def _attempt(self, step: Step, source: Iterator[tuple[int, int, Batch]]) -> Iterator[Batch]:
        """Yield the micro-batches of a step; the source is exhausted whether or not it fails."""
        stepper, left = self._stepper, {r: step.local_batch_sizes[r] for r in self._ranks}
        stepper.repeat = False
        with self._turns.attempt(step):
            if not any(left.values()):
                stepper.step_without_samples(step)
            for rank, samples, batch in source:
                if stepper.repeat:
                    continue  # memory ran out: the step will be repeated as a whole
                self._clock.lap(self._state.meter, "input")
                left[rank] -= samples
                with self._turns.turn(rank, last=not left[rank]):
                    stepper.open(samples, step, last=not any(left.values()))
                    yield batch
                    stepper.leave_autocast()
                    stepper.refuse_open()
