"""A run without a server: all workers take each step together, their gradients summed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer
from batchwright.errors import FileError, NewPlan, PlanError, TrainingError
from batchwright.records import Stage, WorkerTime
from batchwright.records.text.formatting import counted
from batchwright.training.batches.batch_split import Sharing, share_of
from batchwright.training.batches.feeding import Batch
from batchwright.training.batches.sampler import Step
from batchwright.training.checkpoints.checkpoint_manager import CheckpointManager, RunState
from batchwright.training.evaluate.evaluation import Evaluation
from batchwright.training.plan_switch import Advised
from batchwright.training.recorder import Recorder
from batchwright.training.running import Setup
from batchwright.training.session_checks import other_number
from batchwright.training.signals import stopped
from batchwright.training.step.clock import StepClock, clock_for
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.micro_batches import MicroBatches, Once, Turns
from batchwright.training.step.normalization import Statistics
from batchwright.training.step.stepper import Stepper, Wishes

DRIFT_STEPS = 100
"""Steps of an epoch after which the workers compare their weights: one pass over them."""

_ODD = -1640531527  # 2^32 over the golden ratio, as an int32: spreads a change over all bits
_PIECE = 2**20  # numbers of a tensor that are looked at together
_PRIME = 8388593  # the largest below 2^23


class AllReduceRun:
    """Epochs of steps that all workers take together, and the checkpoints between them.

    Simulated workers exchange four things, and nothing else of it.

    Args:
        setup: What is trained.
        workers: Who takes part; unset: each process of the setup's group is one.
        clock: Books the time; unset: that of this process.
        reducer: Makes what sums the gradients, as `Reducer` does.
        turns: Between the workers of this process.

    Attributes:
        stepper: Takes the steps.
        state: How far the run is.

    Raises:
        PlanError: The plan is for another number of workers, unless a run goes on.
        FileError: The run folder holds a run already, or cannot be written.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        workers: Group | None = None,
        clock: StepClock | None = None,
        reducer: Callable[..., Reducer] = Reducer,
        turns: Turns | None = None,
    ) -> None:
        self._setup, self._plan, self._group = setup, setup.plan, setup.group
        self._workers = workers or setup.group
        trained = setup.parameters
        self._rates = rates = setup.rates()  # before a checkpoint brings others
        self._group.share((*trained, *setup.model.buffers()))
        self.state, self._clock = RunState(), clock or clock_for(setup.group.device)
        self._recorder = Recorder(setup.folder if self.rank == 0 else None, self._plan)
        self._keeper = CheckpointManager(
            setup.folder,
            self._plan,
            setup.model,
            setup.optimizer,
            self._group,
            self._recorder,
            setup.feed.description(),
            setup.average,
        )
        try:
            self._keeper.prepare(may_exist=setup.resume)
            restored = setup.resume and self._keeper.restore(self.state)
            resizes = setup.resume and self._plan.job.launcher.resizes
            self._check_workers(goes_on=restored or setup.again or resizes)
        except BaseException:
            self._keeper.close()
            raise
        self._sharing = Sharing(
            self._plan,
            self._workers,
            self.state,
            self._recorder,
            together=setup.synchronized,
            samples=len(setup.feed),
            least=setup.least,
            weights=setup.sample_weights,
        )
        adviser = setup.folder if setup.follow_advice and self.rank == 0 else None
        self._advised = Advised(adviser, self._plan, self._recorder, setup.least)
        self._drifted = False
        self._reducer = reducer(
            trained,
            self._group,
            order=self.state.gradient_order,
            per_tensor=setup.per_tensor,
        )
        self.stepper = Stepper(
            self._plan,
            self._workers,
            self.state,
            self._reducer,
            setup.updater(trained),
            rates,
            Statistics(setup.model),
            self._sharing,
            self._clock,
            self._wishes,
            setup.compilation,
            setup.graphs,
        )
        self._passes = MicroBatches(
            setup.feed,
            self.stepper,
            self._sharing,
            self.state,
            self._clock,
            setup.peak_memory(self.state, self._clock, self._reducer),
            self._workers.here,
            turns,
        )
        self._batches: Once | None = None
        self._left = False  # whether the loop has ended before all epochs had

    @property
    def rank(self) -> int:
        """This worker, from 0."""
        return self._workers.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._workers.size

    @property
    def stage(self) -> Stage:
        """The plan's row that the current epoch belongs to."""
        return self.state.stage(self._plan)

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """Samples per step of each worker, in rank order, as they are now."""
        return self._sharing.local_batch_sizes

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale so far, in samples; ``None`` with one part or too few steps."""
        return self.state.noise.noise_scale

    @property
    def evaluation_due(self) -> bool:
        """Whether the epoch in progress is one of those after which the job evaluates."""
        return self._plan.evaluates_after(self.state.epoch)

    def keep(self, name: str, thing: Any) -> None:
        """Put a thing into checkpoints; on a resumed run its state is loaded at once."""
        self._keeper.keep(name, thing)

    def epochs(self) -> Iterator[int]:
        """The zero-based epochs that are left to train."""
        self._advised.finish()
        self._recorder.training_begins()
        while not self._over:
            if self._batches is None:  # else an earlier loop was left in the middle of this epoch
                self._begin_epoch()
            yield self.state.epoch
            self._end_epoch()
        if self._setup.average:
            self._setup.average.leave()

    @property
    def _over(self) -> bool:
        """Whether nothing is left to train; all workers have the same records of it."""
        return self.state.epoch >= self._plan.epochs or self._recorder.reached

    def batches(self) -> Iterator[Batch]:
        """The micro-batches that are left of the current epoch."""
        if self._batches is None:
            raise RuntimeError(
                "session.batches() outside of session.epochs(): loop over the epochs first"
            )
        yield from self._batches

    def evaluate(self, what: Evaluation) -> dict[str, float]:
        """Mean of each value over a held-out set, of which every worker takes its share."""
        started = time.perf_counter()
        self._merge_buffers()
        walk = self._sharing.walk
        sums, count, stopped = self._setup.evaluated(
            what,
            group=self._group,
            shares=self.local_batch_sizes,
            order=walk.order if walk is not None else None,
            epoch=self.state.epoch,
            between_epochs=walk is None or self.state.step == len(walk),
        )
        seconds = time.perf_counter() - started
        self.state.meter.evaluation += seconds
        self._clock.leave_out(seconds)
        if stopped:
            self._stop_now()
        self.state.meter.scores, self.state.meter.score_count = sums, count
        if walk is not None and self.state.step < len(walk):
            self._save_if_best()  # the epoch will end with other weights
        return {name: value / count for name, value in sums.items()}

    def finish(self) -> None:
        """Write the summary; nobody leaves before checkpoints and summary are there.

        A loop that is left behind the last step of an epoch, as early stopping does, has ended it.
        """
        walk = self._sharing.walk
        if self._batches is not None and walk is not None and self.state.step == len(walk):
            self._left = True
            self._end_epoch()
        self._recorder.finish()
        self._keeper.settle()

    def close(self) -> None:
        """Remove the hooks, and finish what is being written."""
        if self._batches is not None:
            self._batches.close()
        self._reducer.close()
        self._keeper.close()
        self._rates.close()

    # --------------------------------------------------------------------------------- after a step

    def _after_step(self, step: Step) -> None:
        """What all workers do together once the user's loop is done with a step."""
        self._keeper.check()
        walk, tally = self._sharing.walk, self.stepper.tally
        assert walk is not None  # noqa: S101 - `batches` has looked
        if self._setup.average and self.stepper.updated:
            self._setup.average.step(len(walk))
        self._recorder.step(self.state.meter, len(walk), step.local_batch_sizes, tally.notes)
        if len({note.digest for note in tally.notes}) > 1:
            self._even_out()
        if tally.stop:
            self._stop_now()
        if tally.checkpoint:
            self._merge_buffers()
            self._checkpoint("last")

    def _even_out(self) -> None:
        """All workers together: go on with worker 0's weights, since they are no longer the same.

        Each worker takes the same sums of gradients to the same weights, but processors of other
        kinds, and other numbers of threads, may round otherwise.
        """
        setup, device = self._setup, self._group.device
        if not self._group.gather(all_finite(setup.parameters))[0]:
            raise TrainingError(
                f"{self._group.places[0]} has weights that are infinite or not a number, other "
                f"workers do not (epoch {self.state.epoch + 1}, step {self.state.step}): does the "
                "loop change weights on one worker only? To go on, resume from the last checkpoint"
            )
        self._group.share(setup.parameters)
        if setup.average:
            self._group.share(setup.average.shared)
        moments = [
            value
            for parameter in setup.parameters
            for _, value in sorted(setup.optimizer.state.get(parameter, {}).items())
            if torch.is_tensor(value) and value.device == device
        ]
        shapes = self._group.gather([(value.shape, value.dtype) for value in moments])
        if all(theirs == shapes[0] for theirs in shapes):
            self._group.share(moments)
        if not self._drifted:
            self._recorder.note(
                f"the workers' weights were no longer the same at epoch {self.state.epoch + 1}, "
                f"step {self.state.step} (their processors may round differently, or the loop "
                "changes weights on some of them only): all go on with worker 0's, now and "
                "whenever this is found again"
            )
        self._drifted = True

    def _wishes(self) -> Wishes:
        """What this worker tells the others at the step in progress."""
        most = self._plan.job.goal.deadline
        time_is_up = self.rank == 0 and most is not None and self._elapsed > most
        compared = self._group.size > 1 and self.state.step % DRIFT_STEPS == 0
        return Wishes(
            stop=self._setup.stop.number > 0 or time_is_up,
            checkpoint=self._keeper.due(self.state.steps + 1),
            digest=weights_digest(self._setup.parameters) if compared else 0.0,
        )

    # ------------------------------------------------------------------- epochs and checkpoints

    def _begin_epoch(self) -> None:
        state = self.state
        if state.meter.epoch != state.epoch or not state.step:
            state.meter = EpochMeter(epoch=state.epoch)
        self._setup.settings.enter(self.stage)
        walk, resolution = self._sharing.begin_epoch(), self.stage.resolution
        steps = self._passes.through(walk, state.epoch, resolution, self._after_step)
        self._batches = Once(steps, self.stepper, self._clock)

    def _end_epoch(self) -> None:
        walk, meter, state = self._sharing.walk, self.state.meter, self.state
        if self._batches is not None:
            self._batches.refuse_failed()
        if walk is not None and state.step < len(walk):
            raise RuntimeError(
                f"epoch {state.epoch + 1} ended after {state.step} of {len(walk)} steps: "
                "go through all of session.batches()"
            )
        if self._batches is not None:
            self._batches.end()
        self._sharing.end_epoch()
        self._batches = None
        record = meter.record(self.stage, self._worker_times(), self.noise_scale)
        self._recorder.epochs.append(record)  # before the checkpoint, which must know of it
        self._merge_buffers()
        state.epoch, state.step = state.epoch + 1, 0
        new_plan = self._save_if_due()
        self._recorder.epoch(record.model_copy(update={"checkpoint_seconds": meter.checkpoint}))
        if not new_plan:
            return
        # All workers together: the checkpoint is there, the plan is replaced, and all leave.
        self._keeper.settle()
        problem = None
        if self.rank == 0:
            try:
                self._advised.take()
            except FileError as error:
                problem = str(error)
        problem = self._group.gather(problem)[0]
        if problem:
            raise FileError(problem)
        raise NewPlan(f"a new plan is followed from epoch {state.epoch + 1} on: go on with resume")

    def _save_if_due(self) -> bool:
        """Write ``best`` where the score rose, ``last`` when it is due, at the end and on advice.

        Returns:
            Whether another plan is to be followed from here on.
        """
        state = self.state
        self._save_if_best()
        wishes = self._group.gather(
            (
                self._keeper.due(state.steps) or self._over or self._left,
                self._advised.wanted(state.epoch) and not self._over,
            )
        )
        new_plan = any(new for _, new in wishes)
        if new_plan or any(due for due, _ in wishes):
            self._checkpoint("last")
        return new_plan

    def _save_if_best(self) -> None:
        """Write ``best`` if the last evaluation is the highest so far."""
        meter = self.state.meter
        if meter.scores and self.state.note_score(meter.scores, meter.score_count):
            self._checkpoint("best")

    def _checkpoint(self, name: str) -> None:
        share = share_of(self.local_batch_sizes, self.rank)
        self.state.gradient_order = self._reducer.order
        self.state.meter.checkpoint += self._keeper.save(name, self.state, share)
        self._clock.restart()

    def _stop_now(self) -> None:
        """All workers together: save and leave."""
        number = max(self._group.gather(self._setup.stop.number))
        self._merge_buffers()
        self._checkpoint("last")
        self._keeper.settle()
        where = f"at epoch {self.state.epoch + 1}, {self._position}"
        raise stopped(number, self._plan.job.goal.deadline, where)

    # ---------------------------------------------------------- what differs for simulated workers

    @property
    def _elapsed(self) -> float:
        """Seconds of the run so far, which ``goal.deadline`` bounds."""
        return self._recorder.wall_seconds

    @property
    def _position(self) -> str:
        """Where in its epoch the run is, in words."""
        return f"step {self.state.step}"

    def _worker_times(self) -> list[WorkerTime]:
        """Where each worker's time of the epoch went."""
        place, sizes = self._group.places[self.rank], self.state.meter.shares[-1][1]
        return self._group.gather(self.state.meter.worker_time(place, sizes[self.rank]))

    def _merge_buffers(self) -> None:
        """Before an evaluation or a checkpoint; each process has a model of its own here."""

    def _check_workers(self, *, goes_on: bool) -> None:
        """A run may go on with other workers than it began with; it begins as planned."""
        planned, found, least = self._plan.workers, self.world_size, self._setup.least
        if planned == found:
            return
        if not goes_on:
            raise other_number(planned, found)
        batch = min(stage.global_batch_size for stage in self._plan.stages)
        if batch < least * found:
            raise PlanError(
                f"the global batch of {batch} is too small for the {found} workers that are "
                f"running, each needs at least {least}: start fewer"
            )
        self._recorder.note(f"going on with {counted(found, 'worker')}, planned were {planned}")


def all_finite(parameters: Sequence[Tensor]) -> bool:
    """Whether no weight is infinite or not a number."""
    return all(bool(torch.isfinite(parameter.detach()).all()) for parameter in parameters)


def _mixed(bits: Tensor) -> Tensor:
    """A sum in which one number that is larger and one that is smaller do not cancel."""
    mixed = bits.to(torch.int32) * _ODD
    return (mixed ^ (mixed >> 15)).sum(dtype=torch.int64)


def weights_digest(parameters: Sequence[Tensor]) -> Tensor:
    """A number that almost surely differs where any bit of any weight does.

    Args:
        parameters: At least one, on one device.

    Returns:
        A whole number below 2^23, which float32 holds exactly: int64 () on their device.
    """
    whole = {1: torch.uint8, 2: torch.int16}
    sums = []
    for parameter in parameters:
        numbers = parameter.detach()
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
        bits = numbers.reshape(-1).view(whole.get(numbers.element_size(), torch.int32))
        # In pieces, which keep the memory small.
        sums += [_mixed(piece) for piece in bits.split(_PIECE)]
    places = torch.arange(1, 2 * len(sums), 2, device=sums[0].device)
    return (torch.stack(sums) * places).sum() % _PRIME
