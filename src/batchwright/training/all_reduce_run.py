"""A run without a server: all workers take each step together, their gradients summed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.algorithms.batch_growth import rows_in_reach
from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer
from batchwright.errors import ArgumentError, FileError, NewPlan, PlanError, TrainingError
from batchwright.records import Stage, WorkerTime
from batchwright.records.run_folder import BEST, KEPT, LAST
from batchwright.records.text.formatting import counted
from batchwright.training.batches.batch_split import Sharing
from batchwright.training.batches.feeding import Batch
from batchwright.training.batches.sampler import Step
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.evaluate.evaluation import Evaluation
from batchwright.training.plan_switch import PlanSwitch
from batchwright.training.recorder import Recorder
from batchwright.training.running import Setup
from batchwright.training.session_checks import other_number
from batchwright.training.signals import stopped
from batchwright.training.step.clock import StepClock, clock_for
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.micro_batches import EpochBatches, Turns
from batchwright.training.step.stepper import StepRequests

DRIFT_STEPS = 100
"""Steps of an epoch after which the workers compare their weights: one pass over them."""

_ODD = -1640531527  # 2^32 over the golden ratio, as an int32: spreads a change over all bits
_PIECE = 2**20  # numbers of a tensor that are looked at together
_PRIME = 8388593  # the largest below 2^23


class AllReduceRun:
    """Epochs of steps that all workers take together, with evaluations and checkpoints.

    Simulated workers run in this class as it is, with the last four arguments of their own.

    Args:
        setup: What is trained, and how.
        workers: The workers; unset: the processes of the setup's group.
        clock: Books the time; unset: a clock of this process.
        reducer: Makes the reducer that sums gradients over the workers; unset: `Reducer`.
        turns: How the workers of this process take turns with the network.

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
        reducer: Callable[..., Reducer] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._setup, self._plan, self._group = setup, setup.plan, setup.group
        self._workers = workers or setup.group
        trained = setup.parameters
        self._rates = setup.rates()  # before a checkpoint brings other rates
        self._group.broadcast((*trained, *setup.model.buffers()))
        self.state, self._clock = RunState(), clock or clock_for(setup.group.device)
        self._recorder = Recorder(setup.folder if self.rank == 0 else None, self._plan)
        self._checkpoints = setup.checkpoints(self._recorder)
        try:
            self._checkpoints.prepare(may_exist=setup.resume)
            restored = setup.resume and self._checkpoints.restore(self.state)
            if setup.again and not restored:
                self._recorder.note("begun anew: there was no checkpoint yet")
            resizes = setup.resume and self._plan.job.launcher.resizes
            self._check_workers(goes_on=restored or setup.again or resizes)
        except BaseException:
            self._checkpoints.close()
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
        switches_in = setup.folder if setup.follow_advice and self.rank == 0 else None
        self._plan_switch = PlanSwitch(switches_in, self._plan, self._recorder)
        self._drifted = self._unlike = False  # whether weights were found not to be the same
        self._compared = setup.own_buffers if self._group.size > 1 else []
        self._reducer = (reducer or Reducer)(
            trained,
            self._group,
            order=self.state.gradient_order,
            per_tensor=setup.per_tensor,
        )
        self.stepper, self._micro_batches = setup.step_loop(
            self._workers,
            self.state,
            self._sharing,
            self._reducer,
            self._rates,
            self._clock,
            requests=self._requests,
            turns=turns,
        )
        self._batches: EpochBatches | None = None
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
        """Put a thing's state into checkpoints; on a resumed run it is loaded at once."""
        self._checkpoints.keep(name, thing, self.state.steps)

    def epochs(self) -> Iterator[int]:
        """The zero-based epochs that are left to train."""
        self._recorder.training_begins()
        if self._done and any(self._group.gather(self._checkpoints.misses(self.state.steps))):
            self._keep_steps()  # gone on from `best`: before the model gets its average
        while not self._done:
            if self._batches is None:  # else an earlier loop was left in the middle of this epoch
                self._begin_epoch()
            yield self.state.epoch
            self._end_epoch()
        if self._setup.average:
            self._setup.average.leave()

    @property
    def _done(self) -> bool:
        """Whether nothing is left to train; all workers agree, from the same records."""
        return self.state.epoch >= self._plan.epochs or self._recorder.over

    def batches(self) -> Iterator[Batch]:
        """The micro-batches that are left of the current epoch."""
        if self._batches is None:
            raise RuntimeError(
                "session.batches() outside of session.epochs(): loop over the epochs first"
            )
        yield from self._batches

    def evaluate(self, what: Evaluation) -> dict[str, float]:
        """Mean of each value of a metric over a held-out set, shared out between the workers."""
        self.stepper.refuse_failed()
        with ExitStack() as stack:
            if self._group.size > 1:  # the others may wait in it for this worker
                stack.enter_context(self.stepper.failing("session.evaluate()"))
            stack.enter_context(self.stepper.before_step())
            return self._evaluate(what)

    def _evaluate(self, what: Evaluation) -> dict[str, float]:
        started = time.perf_counter()
        other = what.model is not self._setup.model
        self._group.announce("evaluates another model" if other else "evaluates")
        self._group.monitored_barrier()
        self._take_into_average()
        self._merge_buffers()
        if other:
            self._make_alike(what.model)
        steps = self._sharing.steps
        sums, count, stopped = self._setup.evaluated(
            what,
            group=self._group,
            shares=self.local_batch_sizes,
            order=steps.order if steps is not None else None,
            epoch=self.state.epoch,
            between_epochs=steps is None or self.state.step == len(steps),
        )
        self._warn_of_lateness()
        seconds = time.perf_counter() - started
        self.state.meter.evaluation += seconds
        self._clock.leave_out(seconds)
        if stopped:
            self._stop_now()
        self.state.meter.scores, self.state.meter.score_count = sums, count
        if steps is not None and self.state.step < len(steps):
            self._save_if_best()  # the epoch will end with other weights
        return {name: value / count for name, value in sums.items()}

    def _warn_of_lateness(self) -> None:
        """Warn of an evaluation after the last epoch, which has been recorded without one."""
        folder, epochs = self._recorder.folder, self._recorder.epochs
        if folder is None or self._sharing.steps is not None or not self._done:
            return
        if epochs and epochs[-1].val_count is None:
            warnings.warn(
                "session.evaluate() after the last epoch: the run's records do not have it; call "
                "it in the loop over session.epochs(), behind the batches",
                stacklevel=5,
            )

    def _make_alike(self, model: nn.Module) -> None:
        """Give all workers worker 0's weights of another model that they evaluate together.

        An average that was made before the session is of the weights that each worker began with.
        Weights that are the session's own, as in a compiled model, stay: training looks after them.

        Raises:
            ArgumentError: Their models are not of one kind.
        """
        group = self._group
        if group.size == 1:
            return
        own = {*self._setup.model.parameters()}
        weights = [one for one in model.parameters() if one not in own]
        there = [one.detach().to(group.device) for one in weights]
        layout = [(tuple(one.shape), str(one.dtype)) for one in there]
        everyone = group.gather((layout, int(weights_digest(there)) if there else 0))
        for rank, (layout, _) in enumerate(everyone):
            if layout != everyone[0][0]:
                raise ArgumentError(
                    f"model= of session.evaluate() has other weights on worker {rank} than on "
                    "worker 0: give all workers the same"
                )
        if len({digest for _, digest in everyone}) == 1:
            return
        group.broadcast(there)
        with torch.no_grad():
            for one, first in zip(weights, there, strict=True):
                one.data.copy_(first)
        if not self._unlike:
            self._recorder.note(
                "the weights of model= of session.evaluate() were not the same on all workers, as "
                "of an average that was made before the session: all go on with worker 0's, now "
                "and whenever this is found again"
            )
        self._unlike = True

    def finish(self) -> None:
        """Write the summary once all checkpoints are written; nobody leaves before it is there.

        A loop that is left behind the last step of an epoch, as early stopping does, has ended it.
        Of one that is left before, the whole steps are kept.

        Raises:
            RuntimeError: With several workers, the loop caught an error and was left.
        """
        if self._group.size > 1:
            self.stepper.refuse_failed()
        self._group.announce("has left the loop")
        self._group.monitored_barrier()
        steps = self._sharing.steps
        whole = steps is not None and self.state.step == len(steps) and not self.stepper.failed
        if self._batches is not None and whole:
            self._left = True
            self._end_epoch()
            if self._setup.average:
                self._setup.average.leave()
        elif any(self._group.gather(self._checkpoints.misses(self.state.steps))):
            if self.stepper.tally.stop:  # it came with the very last step
                self._stop_now()
            self._keep_steps()
        self._checkpoints.settle()
        self._recorder.finish()
        self._group.barrier()

    def close(self) -> None:
        """Remove the hooks, and finish what is being written."""
        if self._batches is not None:
            self._batches.close()
        self._reducer.close()
        self._checkpoints.close()
        self._rates.close()

    # --------------------------------------------------------------------------------- after a step

    def _after_step(self, step: Step) -> None:
        """Do what follows a step, all workers together, once the user's loop is done with it."""
        self._checkpoints.check()
        steps, tally = self._sharing.steps, self.stepper.tally
        assert steps is not None  # noqa: S101 - `batches` has looked
        self._take_into_average()
        self._recorder.step(self.state.meter, len(steps), step.local_batch_sizes, tally.notes)
        if len({note.digest for note in tally.notes}) > 1:
            self._broadcast_weights()
        if tally.stop:
            self._stop_now()
        if tally.checkpoint:
            self._keep_steps()

    def _take_into_average(self) -> None:
        """Take the weights into their average, once after each step that has changed them.

        An evaluation within the loop, which may end in a checkpoint, comes before `_after_step`.
        """
        steps = self._sharing.steps
        if self._setup.average and steps is not None and self.stepper.updated:
            self._setup.average.step(len(steps))
            self.stepper.updated = False

    def _warn_of_buffers(self) -> None:
        """Warn once of a buffer that each worker makes from its own samples, such as a codebook.

        DDP gives all workers worker 0's before each forward pass.
        """
        if not self._compared:
            return
        # Looked up each time, as a loop may put others in their place.
        there = dict(self._setup.model.named_buffers(remove_duplicate=False))
        found = (there.get(name) for name in self._compared)
        digests = [0 if one is None else int(weights_digest([one])) for one in found]
        pairs = zip(self._compared, *self._group.gather(digests), strict=True)
        name = next((name for name, *each in pairs if len(set(each)) > 1), None)
        if name is None:
            return
        self._compared = []
        if self.rank == 0:
            warnings.warn(
                f"the model's buffer {name} is no longer the same on all workers: each goes on "
                "with its own, and checkpoints have worker 0's; compute it from the samples of all "
                "workers (torch.distributed.all_reduce), or give all of them worker 0's after each "
                "step, as DDP does (torch.distributed.broadcast)",
                stacklevel=5,
            )

    def _broadcast_weights(self) -> None:
        """Go on with worker 0's weights, all workers together, where their weights have drifted.

        Each worker applies the same summed gradients to the same weights, but processors of other
        kinds, and other numbers of threads, may round differently.
        """
        setup, device = self._setup, self._group.device
        finite = all(bool(torch.isfinite(one.detach()).all()) for one in setup.parameters)
        if not self._group.gather(finite)[0]:
            raise TrainingError(
                f"{self._group.places[0]} has weights that are infinite or not a number, other "
                f"workers do not (epoch {self.state.epoch + 1}, step {self.state.step}): does the "
                "loop change weights on one worker only? To go on, resume from the last checkpoint"
            )
        self._group.broadcast(setup.parameters)
        if setup.average:
            self._group.broadcast(setup.average.shared)
        moments = [
            value
            for parameter in setup.parameters
            for _, value in sorted(setup.optimizer.state.get(parameter, {}).items())
            if torch.is_tensor(value) and value.device == device
        ]
        shapes = self._group.gather([(value.shape, value.dtype) for value in moments])
        if all(theirs == shapes[0] for theirs in shapes):
            self._group.broadcast(moments)
        if not self._drifted:
            self._recorder.note(
                f"the workers' weights were no longer the same at epoch {self.state.epoch + 1}, "
                f"step {self.state.step} (their processors may round differently, or the loop "
                "changes weights on some of them only): all go on with worker 0's, now and "
                "whenever this is found again"
            )
        self._drifted = True

    def _requests(self) -> StepRequests:
        """What this worker asks of the others at the step in progress, once in each."""
        self._group.announce("takes a step")
        most = self._plan.job.goal.deadline
        time_is_up = self.rank == 0 and most is not None and self._elapsed > most
        compared = self._group.size > 1 and self.state.step % DRIFT_STEPS == 0
        return StepRequests(
            stop=self._setup.stop.number > 0 or time_is_up,
            checkpoint=self._checkpoints.due(self.state.steps + 1),
            digest=weights_digest(self._setup.parameters) if compared else 0.0,
        )

    # ------------------------------------------------------------------- epochs and checkpoints

    def _begin_epoch(self) -> None:
        state = self.state
        if state.meter.epoch != state.epoch or not state.step:
            state.meter = EpochMeter(epoch=state.epoch)
        if not state.step:
            self._grow()
        self._setup.settings.enter(self.stage)
        steps, resolution = self._sharing.begin_epoch(), self.stage.resolution
        batches = self._micro_batches.through(steps, state.epoch, resolution, self._after_step)
        self._batches = EpochBatches(batches, self.stepper, self._clock)

    def _grow(self) -> None:
        """Begin an epoch with a larger batch if the gradient noise has grown; as worker 0 has it.

        Norms of gradients, and so the noise, may be rounded differently by other processors.
        """
        if not self._plan.growth:
            return
        known = [one.noise_scale for one in self._recorder.epochs if one.noise_scale]
        growth = self._group.gather(rows_in_reach(self._plan, known))[0]
        if growth == self.state.growth:
            return
        before = self.stage.global_batch_size
        self.state.growth = growth
        self._recorder.note(
            f"from epoch {self.state.epoch + 1} on the batch is {self.stage.global_batch_size}, "
            f"not {before}: the gradient noise scale has grown from {known[0]:,.0f} to "
            f"{max(known):,.0f} samples"
        )

    def _end_epoch(self) -> None:
        steps, meter, state = self._sharing.steps, self.state.meter, self.state
        if self._batches is not None:
            self._batches.refuse_failed()
        if steps is not None and state.step < len(steps):
            raise RuntimeError(
                f"epoch {state.epoch + 1} ended after {state.step} of {len(steps)} steps: "
                "go through all of session.batches()"
            )
        if self._batches is not None:
            self._batches.end()
        self._group.announce("ends an epoch")
        self._sharing.end_epoch()
        self._batches = None
        record = meter.record(self.stage, self._worker_times(), self.noise_scale)
        self._recorder.epochs.append(record)  # before the checkpoint, which must know of it
        self._warn_of_buffers()
        self._merge_buffers()
        state.epoch, state.step = state.epoch + 1, 0
        new_plan = self._save_if_due()
        self._recorder.epoch(record.model_copy(update={"checkpoint_seconds": meter.checkpoint}))
        if not new_plan:
            return
        # All workers together: the checkpoint is there, the plan is replaced, and all leave.
        self._checkpoints.settle()
        problem = None
        if self.rank == 0:
            try:
                self._plan_switch.take()
            except FileError as error:
                problem = str(error)
        problem = self._group.gather(problem)[0]
        if problem:
            raise FileError(problem)
        raise NewPlan(f"a new plan is followed from epoch {state.epoch + 1} on: go on with resume")

    def _save_if_due(self) -> bool:
        """Write ``best`` where the score rose; ``last`` when due, at the end and on advice.

        So is the checkpoint of an epoch that is to stay.

        Returns:
            Whether another plan is followed from here on.
        """
        state = self.state
        if self._plan.keeps_after(state.epoch - 1):
            self._checkpoints.settle()  # so that no more of them wait than memory has room for
            self._checkpoint(f"{KEPT}{state.epoch}")
        self._save_if_best()
        ends = self._done or self._left
        due = self._checkpoints.due(state.steps) or ends
        switches = self._plan_switch.wanted(state.epoch) and not ends
        answers = self._group.gather((due, switches))
        new_plan = any(new for _, new in answers)
        if new_plan or any(last for last, _ in answers):
            self._checkpoint(LAST)
        return new_plan

    def _save_if_best(self) -> None:
        """Write ``best`` if the last evaluation's score is the highest so far."""
        meter = self.state.meter
        if meter.scores and self.state.note_score(meter.scores, meter.score_count):
            self._checkpoint(BEST)

    def _checkpoint(self, name: str) -> None:
        sizes = self.local_batch_sizes
        share = sizes[self.rank] / sum(sizes)
        self.state.gradient_order = self._reducer.order
        self._sharing.keep()
        self.state.meter.checkpoint += self._checkpoints.save(name, self.state, share)
        self._clock.restart()

    def _keep_steps(self) -> None:
        """Write ``last`` with the steps so far, all workers together, once the average has them.

        Nothing of a step that is not over is in it. Where a step has ended with an error, weights
        may be half updated, and the checkpoint before stays.
        """
        if any(self._group.gather(self.stepper.broken)):
            return
        self.stepper.take_back_open()
        self._take_into_average()
        self._merge_buffers()
        self._checkpoint(LAST)

    def _stop_now(self) -> None:
        """Write a checkpoint, all workers together, and raise what ends the run."""
        number = max(self._group.gather(self._setup.stop.number))
        self._keep_steps()
        self._checkpoints.settle()
        where = f"at epoch {self.state.epoch + 1}, {self._position}"
        raise stopped(number, self._plan.job.goal.deadline, where)

    # ---------------------------------------------------------- what differs for simulated workers

    @property
    def _elapsed(self) -> float:
        """Seconds of the run so far, which ``goal.deadline`` bounds."""
        return self._recorder.wall_seconds

    @property
    def _position(self) -> str:
        """Position of the run in its epoch, in words."""
        return f"step {self.state.step}"

    def _worker_times(self) -> list[WorkerTime]:
        """Times of each worker in the epoch."""
        place, sizes = self._group.places[self.rank], self.state.meter.shares[-1][1]
        return self._group.gather(self.state.meter.worker_time(place, sizes[self.rank]))

    def _merge_buffers(self) -> None:
        """Hook before an evaluation or a checkpoint; only simulated workers share a model."""

    def _check_workers(self, *, goes_on: bool) -> None:
        """Refuse another number of workers than planned, unless a run goes on with them."""
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


def weights_digest(parameters: Sequence[Tensor]) -> Tensor:
    """A number that almost surely differs where any bit of any weight does.

    Args:
        parameters: One or more tensors, all on one device.

    Returns:
        A whole number below 2^23, which float32 holds exactly: int64 () on their device.
    """
    integers = {1: torch.uint8, 2: torch.int16}  # by bytes of a number; else int32
    sums = []
    for parameter in parameters:
        numbers = parameter.detach()
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
        bits = numbers.reshape(-1).view(integers.get(numbers.element_size(), torch.int32))
        for piece in bits.split(_PIECE):  # in pieces, which keep the memory small
            mixed = piece.to(torch.int32) * _ODD  # or a larger and a smaller number could cancel
            sums.append((mixed ^ (mixed >> 15)).sum(dtype=torch.int64))
    places = torch.arange(1, 2 * len(sums), 2, device=sums[0].device)
    return (torch.stack(sums) * places).sum() % _PRIME
