"""A worker's round with a parameter server, divided into steps of this worker alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from batchwright.distributed.tally import Tally
from batchwright.records import Plan, Stage
from batchwright.training.batches.batch_split import Division
from batchwright.training.batches.epoch_steps import EpochSteps, Shares
from batchwright.training.batches.sampler import Step, epoch_order, step_sizes
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.parameter_server.rounds import RoundAssignment, segments


class RoundSharing(Division):
    """Divides rounds into steps of this worker alone; arguments as for `Division`.

    A round goes through a stretch of an epoch, or of several. The state is that of this worker's
    steps; its ``step`` counts within the stretch in progress.

    Attributes:
        ticket: The round in progress; ``None`` before the first and after the last.
    """

    def __init__(self, plan: Plan, state: RunState, place: str, **how: Any) -> None:
        super().__init__(plan, state, place, **how)
        self.ticket: RoundAssignment | None = None
        self._orders: dict[int, Tensor] = {}  # of the last two epochs, which several rounds need
        self._done = self._index = 0

    @property
    def stage(self) -> Stage:
        """The plan's row of the round in progress, or of the one before."""
        return self._plan.stages[self._index]

    @property
    def position(self) -> tuple[float, Stage]:
        """Samples seen before the step, for the learning-rate schedule, and the plan's row."""
        assert self.ticket is not None  # noqa: S101 - there are steps only in a round
        return self.ticket.samples_seen(self._done), self.stage

    def begin(self, ticket: RoundAssignment) -> None:
        """Begin a round, maybe one that was begun before."""
        self.ticket, self._done, self._index = ticket, 0, ticket.stage

    def stand(self, epoch: int) -> None:
        """End the rounds; an epoch that has ended is to be evaluated."""
        self.ticket, self._index, self._state.epoch = None, self._plan.stage_of(epoch), epoch

    def stretches(self) -> Iterator[tuple[int, EpochSteps]]:
        """The round's stretches, as (epoch, steps); the state's step begins at 0 in each."""
        assert self.ticket is not None  # noqa: S101 - as above
        batch = self.ticket.batch or self.stage.local_batch_sizes[self.ticket.worker]
        for epoch, first, last in segments(self.ticket, self._samples):
            self._state.epoch, self._state.step = epoch, 0
            self.steps = EpochSteps(
                self.order(epoch),
                step_sizes(last - first, batch, workers=1, least=self.least),
                Shares(0, (batch,), self.micro_batch_size),
                start=first,
                ranks=(0,),
                least=self.least,
            )
            yield epoch, self.steps
        self.steps = None

    def order(self, epoch: int) -> Tensor:
        """Indices of all samples in the order of an epoch, int64 (samples,)."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            seed = self._plan.job.seed
            self._orders[epoch] = epoch_order(self._samples, epoch, seed, self._weights)
        return self._orders[epoch]

    def after_step(self, step: Step, tally: Tally) -> None:
        """Count a step's samples."""
        del tally
        self._done += step.samples

    def after_out_of_memory(self, tally: Tally) -> None:
        """Go on in smaller micro-batches, if memory ran out (and not compiling failed)."""
        if tally.notes[0].micro_batch >= self.micro_batch_size:
            return
        pixels = int(tally.notes[0].micro_batch) * self.stage.resolution**2
        self._state.micro_limits[self._place] = pixels
        steps, first = self.steps, self._state.step + 1 + self.asked_ahead
        if steps is not None and first < len(steps):
            sizes = steps.shares_at(first).local_batch_sizes
            steps.change(Shares(first, sizes, self.micro_batch_size))
