"""A worker's round with a parameter server: its stretches of the epochs' orders, cut into steps."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from batchwright.distributed.reducer import Tally
from batchwright.records import Plan, Stage
from batchwright.training.batches.epoch_steps import EpochSteps, Shares
from batchwright.training.batches.sampler import Step, epoch_order, step_sizes
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.parameter_server.rounds import RoundAssignment, segments


class RoundSharing:
    """Divides a round into steps of this worker alone.

    Args:
        plan: Its table says batch and resolution.
        state: Of this worker's steps; its step is that of the stretch in progress.
        place: Where this worker computes.
        samples: Size of the data set.
        least: Fewest samples that a worker can train on.
        weights: How often each sample is drawn, (samples,); ``None``: once per epoch.

    Attributes:
        ticket: The round in progress; ``None`` before the first and after the last.
        least: As given.
    """

    def __init__(
        self,
        plan: Plan,
        state: RunState,
        place: str,
        *,
        samples: int,
        least: int,
        weights: Tensor | None,
    ) -> None:
        self.ticket: RoundAssignment | None = None
        self.least = least
        self._plan, self._state, self._place = plan, state, place
        self._samples, self._weights = samples, weights
        self._walk: EpochSteps | None = None
        self._orders: dict[int, Tensor] = {}  # of the last two epochs asked for: rounds share them
        self._done = self._index = 0

    @property
    def stage(self) -> Stage:
        """The plan's row of the round in progress, or of the one before."""
        return self._plan.stages[self._index]

    @property
    def through(self) -> bool:
        """Whether all samples of the round were trained on."""
        return self.ticket is not None and self._done == self.ticket.samples

    @property
    def micro_batch_size(self) -> int:
        """Most samples at once: as planned, or less where memory ran out, by the pixels."""
        planned, side = self.stage.micro_batch_size, self.stage.resolution
        pixels = self._state.micro_limits.get(self._place, planned * side**2)
        return max(self.least, min(planned, pixels // side**2))

    @property
    def asked_ahead(self) -> int:
        """Steps after the state's whose samples the feed has asked for."""
        return 0 if self._walk is None else self._walk.taken - self._state.step

    @property
    def position(self) -> tuple[float, Stage]:
        """What the learning rate takes for seen, and the plan's row."""
        assert self.ticket is not None  # noqa: S101 - there are steps only in a round
        return self.ticket.samples_seen(self._done), self.stage

    def begin(self, ticket: RoundAssignment) -> None:
        """Another round, or the same once more."""
        self.ticket, self._done, self._index = ticket, 0, ticket.stage

    def stand(self, epoch: int) -> None:
        """There is no round, and an epoch that has ended is to be evaluated."""
        self.ticket, self._index, self._state.epoch = None, self._plan.stage_of(epoch), epoch

    def walks(self) -> Iterator[tuple[int, EpochSteps]]:
        """The round's stretches, each as (epoch, way through it); the state begins each anew."""
        assert self.ticket is not None  # noqa: S101 - as above
        batch = self.stage.local_batch_sizes[self.ticket.worker]
        for epoch, first, last in segments(self.ticket, self._samples):
            self._state.epoch, self._state.step = epoch, 0
            self._walk = EpochSteps(
                self.order(epoch),
                step_sizes(last - first, batch, workers=1, least=self.least),
                Shares(0, (batch,), self.micro_batch_size),
                start=first,
                ranks=(0,),
                least=self.least,
            )
            yield epoch, self._walk
        self._walk = None

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
        """Go on in smaller micro-batches."""
        pixels = int(tally.notes[0].micro_batch) * self.stage.resolution**2
        self._state.micro_limits[self._place] = pixels
        walk, first = self._walk, self._state.step + 1 + self.asked_ahead
        if walk is not None and first < len(walk):
            sizes = walk.shares_at(first).local_batch_sizes
            walk.change(Shares(first, sizes, self.micro_batch_size))
