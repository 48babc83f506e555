"""Which worker takes which samples: the steps of each epoch, and shares that follow the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from batchwright.algorithms.balancer import Balancer
from batchwright.algorithms.partition import apportion
from batchwright.distributed.group import Group
from batchwright.distributed.tally import Tally
from batchwright.errors import PlanError
from batchwright.records import Plan, Stage
from batchwright.training.batches.epoch_steps import EpochSteps, Shares
from batchwright.training.batches.sampler import Step, epoch_order, step_sizes
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.recorder import Recorder


class Division(ABC):
    """Divides an epoch, or a round of one worker, into steps, and steps between the workers.

    Args:
        plan: Its rows give batch and resolution.
        state: How far the run is; limits of micro-batches in it are kept up to date.
        place: Host and device of this worker.
        samples: Size of the data set.
        least: Fewest samples that a worker can train on.
        weights: How often each sample is drawn, (samples,); ``None``: once per epoch.

    Attributes:
        steps: Steps of the epoch, or of the stretch of one, in progress; ``None`` between two.
        least: Fewest samples that a worker can train on.
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
        self.steps: EpochSteps | None = None
        self.least = least
        self._plan, self._state, self._place = plan, state, place
        self._samples, self._weights = samples, weights

    @property
    @abstractmethod
    def position(self) -> tuple[float, Stage]:
        """Samples seen before the step, for the learning-rate schedule, and the plan's row."""

    @abstractmethod
    def after_step(self, step: Step, tally: Tally) -> None:
        """Learn from a step's figures; the state counts the step already."""

    @abstractmethod
    def after_out_of_memory(self, tally: Tally) -> None:
        """Give workers that ran out of memory, if any did, smaller micro-batches."""

    @property
    def micro_batch_size(self) -> int:
        """Most samples that this worker puts through the network at once."""
        return self._micro_batch_of(self._place, self.position[1])

    @property
    def asked_ahead(self) -> int:
        """Steps after the state's whose samples this worker's feed was already asked for."""
        return 0 if self.steps is None else self.steps.taken - self._state.step

    def _micro_batch_of(self, place: str, stage: Stage) -> int:
        """Micro-batch size in a row: as planned, or as many pixels as fit since memory ran out."""
        planned, pixels = stage.micro_batch_size, stage.resolution**2
        limit = self._state.micro_limits.get(place, planned * pixels)
        return max(self.least, min(planned, limit // pixels))


class Sharing(Division):
    """Divides each step between the workers; all workers decide alike, from the same figures.

    Args:
        plan: Its rows give the first shares, its method says whether they change.
        group: The workers.
        state: How far the run is; shares, speeds and micro-batches in it are kept up to date.
        recorder: Takes lines about changes.
        together: Whether all workers have equally many micro-batches in a step.
        how: More arguments of `Division`.

    Raises:
        PlanError: A global batch is larger than the data set.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        state: RunState,
        recorder: Recorder,
        *,
        together: bool,
        **how: Any,
    ) -> None:
        super().__init__(plan, state, group.places[group.rank], **how)
        largest = max(stage.global_batch_size for stage in (*plan.stages, *plan.growth))
        if largest > self._samples:
            raise PlanError(
                f"the global batch of {largest} is larger than the {self._samples} training "
                f"samples: choose global_batch={self._samples} or less"
            )
        self._group, self._recorder, self._together = group, recorder, together
        self._balancer: Balancer | None = None
        self._recorded: tuple[int, ...] = ()  # local batches in the last line of the records
        # Whether what the state has of the workers is of these: others may have gone before them.
        self._alike = list(state.local_batch_sizes) == list(group.places)
        self._row = state.stage(plan, max(0, state.epoch - (not state.step)))
        if plan.method_spec.balancer and group.size > 1:
            self._balancer = resolve_name(plan.method_spec.balancer)(
                plan.job,
                group.places,
                least=self.least,
                speeds=state.speeds,
                fixed_samples=state.fixed_samples or state.stage(plan).fixed_samples,
            )
            if self._alike and state.balancing:
                self._balancer.load_state_dict(state.balancing)

    def keep(self) -> None:
        """Put into the state, before a checkpoint, what was watched of the workers' times.

        One worker watches nothing. What several left before may be of another row once they are
        back.
        """
        self._state.balancing = self._balancer.state_dict() if self._balancer is not None else {}

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """Samples per step of each worker, in rank order, as decided last."""
        own = self._state.local_batch_sizes
        sizes = tuple(own.get(place, 0) for place in self._group.places)
        if min(sizes) > 0 and sum(sizes) == self._state.stage(self._plan).global_batch_size:
            return sizes
        planned = self._state.stage(self._plan).local_batch_sizes
        if self._state.speeds and self._balancer is not None:  # as known from before
            return self._balancer.shares_of(sum(planned))
        if len(planned) == self._group.size:
            return planned
        return tuple(apportion([1.0] * self._group.size, sum(planned)))

    @property
    def position(self) -> tuple[float, Stage]:
        """Samples that all workers have seen, and the plan's row of the epoch in progress."""
        return self._state.samples_seen, self._state.stage(self._plan)

    def begin_epoch(self) -> EpochSteps:
        """The steps of the state's epoch, from the state's step on."""
        state, row = self._state, self._state.stage(self._plan)
        if row != self._row and self._balancer is not None:
            # Another row has another fixed cost of a step; the workers' relative speeds stay.
            self._balancer.forget_times(row.fixed_samples)
            state.fixed_samples = row.fixed_samples
        elif row.local_batch_sizes != self._row.local_batch_sizes:
            state.local_batch_sizes = {}  # of the row before, and may have the same sum
        self._row, sizes = row, self.local_batch_sizes
        done = state.samples_seen - state.epoch * self._samples
        state.local_batch_sizes = dict(zip(self._group.places, sizes, strict=True))
        # The sizes may have been decided, before a stop, for a later step or for the next epoch.
        noted = state.meter.shares
        if not (self._alike and noted and sum(noted[-1][1]) == sum(sizes)):
            state.meter.shares_from(state.step, sizes)
            noted = state.meter.shares
        (_, now), *later = noted[-1 - sum(first > state.step for first, _ in noted) :]
        left = self._samples - done
        self.steps = EpochSteps(
            epoch_order(self._samples, state.epoch, self._plan.job.seed, self._weights),
            step_sizes(left, sum(sizes), workers=len(sizes), least=self.least),
            Shares(state.step, now, self.micro_batch_size),
            start=done,
            ranks=self._group.here,
            least=self.least,
            together=self._together,
        )
        for first, own in later:
            self.steps.change(Shares(first, own, self.micro_batch_size))
        first, last = noted[-1]
        if self._balancer is not None and left and last != self._recorded:
            self._record(max(first, state.step), last, len(self.steps))
        return self.steps

    def end_epoch(self) -> None:
        """End the epoch, all of whose steps are done."""
        self.steps = None

    def after_step(self, step: Step, tally: Tally) -> None:
        """Learn from a step's figures; the state counts the step already."""
        if self._balancer is None or self.steps is None:
            return
        usual = step.samples == self._state.stage(self._plan).global_batch_size
        self._balancer.watch(
            step.local_batch_sizes,
            [note.seconds for note in tally.notes],
            usual=usual and self._state.meter.steps > 1,
        )
        wanted = self._balancer.look(epoch_ends=self._state.step == len(self.steps))
        self._state.speeds = self._balancer.speeds
        self._state.fixed_samples = self._balancer.fixed_samples
        if wanted is not None:
            self._state.local_batch_sizes = dict(zip(self._group.places, wanted, strict=True))
            self._change(wanted, self._state.step + _most_ahead(tally))

    def after_out_of_memory(self, tally: Tally) -> None:
        """Give workers that ran out of memory smaller micro-batches."""
        stage = self._state.stage(self._plan)
        for rank, (place, note) in enumerate(zip(self._group.places, tally.notes, strict=True)):
            if note.micro_batch < self._micro_batch_of(place, stage):
                self._state.micro_limits[place] = int(note.micro_batch) * stage.resolution**2
                self._recorder.note(
                    f"worker {rank} ({place}) ran out of memory: the step is done again, and its "
                    f"samples go on in micro-batches of at most {note.micro_batch:.0f}"
                )
        self._change(self.local_batch_sizes, self._state.step + 1 + _most_ahead(tally))

    def _change(self, sizes: tuple[int, ...], first: int) -> None:
        """Change the shares from step ``first`` on, which no worker's feed was asked for yet."""
        if self.steps is None or first >= len(self.steps):
            return  # the next epoch begins with them
        self.steps.change(Shares(first, sizes, self.micro_batch_size))
        meter = self._state.meter
        if sizes != meter.shares[-1][1]:
            meter.shares_from(first, sizes)
            self._record(first, sizes, len(self.steps))

    def _record(self, first: int, sizes: tuple[int, ...], steps: int) -> None:
        self._recorded = sizes
        epoch, places = self._state.epoch, self._group.places
        self._recorder.shares(epoch, first, steps, sizes, places, self._state.speeds)


def _most_ahead(tally: Tally) -> int:
    """Steps after the tally's whose samples some worker's feed was already asked for."""
    return int(max(note.ahead for note in tally.notes))
