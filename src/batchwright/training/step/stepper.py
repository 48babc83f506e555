"""The training step: backward passes, the exchange of gradients, the update, and what can go wrong.

`Session.step` calls `Stepper.step`; from there it reads downwards to `Updater`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Ahead, Reducer, Tally, WorkerNote
from batchwright.errors import BrokenStepError, TrainingError
from batchwright.records import Plan
from batchwright.training.batches.batch_split import Division
from batchwright.training.batches.sampler import Step
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.step.clock import StepClock, book_waiting
from batchwright.training.step.early_batches import NO_BATCHES, Early
from batchwright.training.step.epoch_totals import met
from batchwright.training.step.gradient_scaling import Adaptive
from batchwright.training.step.normalization import Statistics
from batchwright.training.step.rates import Rates
from batchwright.training.step.released_graph import release_graph
from batchwright.training.step.updater import Updater
from batchwright.workload.extras import in_words
from batchwright.workload.host import NARROW, autocast, is_out_of_memory, release_memory
from batchwright.workload.loss_scaling import LossScale
from batchwright.workload.passes.compilation import Compilation
from batchwright.workload.passes.cuda_graphs import CudaGraphs

MAX_BAD_STEPS = 20  # in a row, before a run with infinite gradients gives up

_NO_GRADIENT = (
    "session.step() found no gradient: is the loss computed from the session's model, without "
    "detach() or no_grad(), and is any parameter trained (requires_grad)?"
)

Loss = Tensor | Callable[[], Tensor]
"""A mean loss, or a function that computes it: forward pass and all."""


class Wishes(NamedTuple):
    """What a worker tells the others at a step, besides its gradients."""

    stop: bool = False
    """Whether it asks to stop."""
    checkpoint: bool = False
    """Whether it asks for a checkpoint."""
    digest: float | Tensor = 0.0
    """Of its weights, at steps where the workers compare them; see `weights_digest`."""


@dataclass
class _MicroBatch:
    """The micro-batch the user's loop works on now."""

    samples: int
    last: bool
    step: Step
    weight: float | None = None  # what its losses are means over, once there is one

    @property
    def share(self) -> float:
        """Part of the step's weight that its gradients are multiplied by; 0 if it has none."""
        return (self.weight or 0.0) / self.step.samples


class Stepper:
    """Takes the steps of a run on one worker.

    Args:
        plan: What is followed.
        group: The workers.
        state: How far the run is; counted on here.
        reducer: Sums the gradients.
        updater: Applies them.
        rates: Those that it steps at.
        statistics: Of normalization, to be put back where a step changes nothing.
        sharing: Says who takes what, and learns from each step.
        clock: Books the time.
        wishes: What this worker tells the others at the next step.
        compilation: Whether the network computes compiled.
        graphs: Replays its passes; ``None``: they are taken as they are.

    Attributes:
        tally: Of the last step that was counted.
        updated: Whether that changed the weights.
        repeat: Whether the last step must be done again, because memory ran out somewhere, or a
            compiler failed.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        state: RunState,
        reducer: Reducer,
        updater: Updater,
        rates: Rates,
        statistics: Statistics,
        sharing: Division,
        clock: StepClock,
        wishes: Callable[[], Wishes],
        compilation: Compilation,
        graphs: CudaGraphs | None,
    ) -> None:
        self._plan, self._group, self._state = plan, group, state
        self._reducer, self._updater, self._rates = reducer, updater, rates
        self._statistics, self._sharing = statistics, sharing
        self._clock, self._wishes = clock, wishes
        self._compilation, self._failure_told = compilation, False
        self._graphs = graphs
        self._adaptive = Adaptive(plan, state, own_rates=rates.own)
        updater.follow(reducer.parameters)  # after a resume also what is frozen at the moment
        self._micro: _MicroBatch | None = None
        self._cast, self._casting = autocast(plan.precision, group.device), False
        self._uncast = torch.autocast(group.device.type, enabled=False)
        self._weight = 0.0
        self._loss: float | Tensor = 0.0
        self._out_of_memory = self._missing = False  # the latter whatever the cause
        self._bad_steps = 0
        self._odd = False  # whether the last step was not as a device expects it
        self._weights_told = False
        self.tally = Tally(0.0, 0.0)
        self.updated = self.repeat = False
        self._early = NO_BATCHES

    def open(self, samples: int, step: Step, *, last: bool) -> None:
        """A micro-batch is handed to the loop; autocast is on until its `step`."""
        self._micro = _MicroBatch(samples, last, step)
        self._updater.clear()  # what the loop has computed since the last step is no part of this
        self._statistics.keep()
        if self._plan.precision != "float32":
            self._cast.__enter__()
            self._casting = True

    @contextmanager
    def making(self, early: Early) -> Iterator[None]:
        """Inside, the next of these is made while the host waits for the figures of a step."""
        self._early = early
        try:
            yield
        finally:
            self._early = NO_BATCHES

    def refuse_open(self) -> None:
        """Raise `RuntimeError` if `step` was not called for the micro-batch."""
        if self._micro is not None:
            raise RuntimeError(
                "session.batches() was asked for the next batch before session.step() "
                "was called for this one: call step(loss) once for each batch"
            )

    def leave_autocast(self) -> None:
        """Autocast is off."""
        if self._casting:
            self._cast.__exit__(None, None, None)
            self._casting = False

    def backward(self, loss: Loss, weight: float | None) -> None:
        """A backward pass; see `Session.backward`."""
        micro = self._opened()
        mean_over = float(micro.samples if weight is None else weight)
        if micro.weight is None:
            micro.weight = mean_over
            self._weight += mean_over
        elif micro.weight != mean_over:
            raise ValueError(
                f"weight={mean_over:g} after weight={micro.weight:g}: the losses of one "
                "micro-batch must be means over the same weight to add up"
            )
        if self._missing or not mean_over:
            return  # a mean over nothing has no gradient, and no value
        value: Tensor | None = None
        try:
            value = loss() if callable(loss) else loss
            if not value.requires_grad:
                raise RuntimeError(_NO_GRADIENT)
            if self._casting:  # else 16-bit copies of weights outlive the pass through their layer
                torch.clear_autocast_cache()
            self._take_up()
            with self._uncast:
                # Weighted by samples: b_i / B of the step's samples over all workers, so that the
                # sum of all gradients is that of the mean loss over the global batch, however
                # unequal the shares are.
                self._scale.scaled(value, mean_over / micro.step.samples).backward()
            # Not looked at before the gradients are on their way: that waits for the device.
            told = value.detach().to(self._group.device, torch.float64).view(1)
            weighted = told * mean_over
            self._loss = weighted + self._loss if isinstance(self._loss, Tensor) else weighted
        except Exception as error:
            self._out_of_memory = is_out_of_memory(error)
            # A backward pass is compiled when it is due; what fails there may be of any class.
            late = value is not None and not self._out_of_memory
            if not (self._out_of_memory or (late and self._compilation.gives_up(error))):
                raise
            if self._out_of_memory and self._statistics.synchronized and self._group.size > 1:
                raise BrokenStepError(
                    f"{self._group.places[self._group.rank]} ran out of memory between exchanges "
                    "of SyncBatchNorm, in which the others wait for it: the step cannot be "
                    "repeated in smaller micro-batches; take a smaller batch or resolution, or "
                    f"batch normalization without exchanges ({in_words(error)})"
                ) from error
            self._missing = True
        if self._out_of_memory and value is not None:
            release_graph(value)  # only here: until its traceback is gone the error holds it, too

    def step(self, loss: Loss | None, weight: float | None) -> bool:
        """Backward pass and, at the end of a step, the update; see `Session.step`."""
        micro = self._opened()
        if loss is not None:
            if micro.last:
                self._reducer.arm()  # from here on a bucket of gradients is sent once it is full
            self.backward(loss, weight)
        self.leave_autocast()
        self._micro = None
        if not (micro.last or self._missing):
            self._reducer.take(micro.share)  # one of several micro-batches: they are added up here
            self._clock.lap(self._state.meter, "compute")  # or it would pass for input
            return False
        expected = self._weight > 0 and not self._missing
        if expected and self._reducer.empty:
            raise RuntimeError(_NO_GRADIENT)
        if not self._missing:
            self._early.ask()  # before the others are told what was asked for
        return self._exchange_and_update(micro.step, micro.samples, micro.share)

    def step_without_samples(self, step: Step) -> None:
        """Take part in a step of the others."""
        self._updater.clear()  # as in `open`
        self._exchange_and_update(step, 0, 0.0)

    def _exchange_and_update(self, step: Step, samples: int, share: float) -> bool:
        """Sum the gradients of a step and, unless something is wrong, step the optimizer.

        Args:
            step: Which one.
            samples: Of the last micro-batch.
            share: Its part of the step's weight.
        """
        state, meter, updater = self._state, self._state.meter, self._updater
        self._take_up()
        self._clock.lap(meter, "compute")
        own = self._own_tally(samples)
        if own.missing:  # it has no gradients to give, and takes part: the others wait
            updater.clear()

        # By what steps before have shown: a factor that knew its gradient would bend its direction.
        adaptation = self._adaptive.of_step(step.samples)
        self._rates.set(*self._sharing.position, adaptation.gain)
        narrow, factors = self._plan.precision in NARROW, adaptation.factors
        ahead = None
        if not own.missing:
            waits = narrow or self._odd
            ahead = updater.ahead(step.samples, factors, self._early, self._clock, waits=waits)
        # One message: what the workers have to tell each other rides behind the last gradients.
        tally = self._summed(own, samples, share, ahead)
        seconds = self._clock.lap(meter, "communication")
        book_waiting(meter, seconds, [n.seconds for n in tally.notes], self._group.rank)

        # Agree before acting: all workers hold the same tally here, so all of them repeat the step,
        # leave it out or update, and nobody is left alone in an exchange.
        if tally.uncompiled:
            self._go_on_uncompiled()
        self.repeat = tally.missing > 0
        if self.repeat:
            updater.clear()
            self._early.drop()  # its memory is wanted
            self._statistics.end(updated=False)
            meter.repeated += 1
            release_memory(self._group.device)
            self._sharing.after_out_of_memory(tally)
            return False

        # The losses may have been means over something else than samples, such as labelled pixels.
        factor = step.samples / tally.weight if tally.weight else 1.0
        scale = self._scale
        norms = updater.rescale(tally, factor / scale.scale)
        if tally.local_sqr_norms is not None and scale.scale != 1:
            tally = replace(tally, local_sqr_norms=tally.local_sqr_norms / scale.scale**2)
        self._warn_of_weights(step, tally)
        self._adaptive.learn(tally, norms, batch=step.samples)
        updated = tally.went_ahead or (tally.weight > 0 and updater.apply(norms, factors))
        if updated:  # such losses, and tensors without a gradient, often come again
            self._odd = not tally.whole or tally.weight != step.samples
        updater.clear()
        self._statistics.end(updated=updated)
        if narrow and tally.weight:
            state.loss_scale = scale.after(good=updated)

        if factors is not None:
            meter.factors = met(meter.factors, factors.tolist())
        if self._adaptive.gaining:
            meter.gains = met(meter.gains, [adaptation.gain])
        meter.rate = self._rates.now
        meter.steps += 1
        meter.skipped += not updated
        meter.samples += step.samples
        meter.local_samples += step.local_batch_sizes[self._group.rank]
        meter.weight += tally.weight
        meter.loss += float(tally.loss)
        state.step += 1
        state.steps += 1
        state.samples_seen += step.samples
        self.tally, self.updated = tally, updated
        # A step of weight 0 has no gradient: it is neither a good nor a bad one.
        self._bad_steps = 0 if updated else self._bad_steps + (tally.weight > 0)
        if self._bad_steps >= MAX_BAD_STEPS:
            exact = "" if self._plan.precision == "float32" else ", or give precision=float32"
            raise TrainingError(
                f"gradients were infinite or not a number for {MAX_BAD_STEPS} steps in a row "
                f"(epoch {meter.epoch + 1}, step {meter.steps}): lower learning_rate, now "
                f"{meter.rate:.3g}, or set clip_norm{exact}"
            )
        self._clock.lap(meter, "compute")
        self._sharing.after_step(step, tally)
        return updated

    def _summed(self, own: Tally, samples: int, share: float, ahead: Ahead | None) -> Tally:
        """The figures of all workers, whose gradients are summed; see `Reducer.finish`.

        Here a device tells of what it could not do before, so of gradients that may be wrong. One
        worker takes the step again, unless its device may have made the update with them. Several
        cannot: the others may hold the sums already.

        Raises:
            BrokenStepError: Memory ran out, and there are other workers or an update was queued.
        """
        try:
            return self._reducer.finish(own, 0.0 if own.missing else share, ahead)
        except (RuntimeError, MemoryError) as error:
            if own.missing or not is_out_of_memory(error):
                raise
            alone = self._group.size == 1
            if self._updater.begun or not alone:
                summing = "while gradients were summed over the workers, of whom others may have "
                where = "behind an update that may be made" if alone else f"{summing}the sums"
                raise BrokenStepError(
                    f"{self._group.places[self._group.rank]} ran out of memory {where} already: "
                    "the step cannot be repeated, and only the last checkpoint is whole "
                    f"({in_words(error)})"
                ) from error
        self._updater.clear()
        self._missing = self._out_of_memory = True
        return self._reducer.finish(self._own_tally(samples), 0.0)

    @property
    def _scale(self) -> LossScale:
        """What the losses of the step in progress are multiplied by."""
        known = self._state.loss_scale if self._plan.precision in NARROW else None
        return known or LossScale.of(self._plan.precision)

    def _opened(self) -> _MicroBatch:
        if self._micro is None:
            raise RuntimeError(
                "session.step() without a batch: call it once for each batch of session.batches()"
            )
        return self._micro

    def _go_on_uncompiled(self) -> None:
        """Some worker's compiler has failed: all go on as it does, and a line says why.

        Raises:
            TrainingError: The job asks for compiling, whatever it saves.
        """
        reasons = self._group.gather(self._compilation.failure)
        rank, why = next((rank, why) for rank, why in enumerate(reasons) if why)
        self._compilation.failure, self._failure_told = why, True
        what = f"the network cannot be compiled on {self._group.places[rank]} ({why})"
        if self._compilation.asked:
            raise TrainingError(
                f"compile=on: {what}: plan again with compile=auto, which then goes on as it is, "
                "or with compile=off"
            )
        if self._group.rank == 0:
            warnings.warn(f"{what}: all workers go on uncompiled", stacklevel=5)

    def _warn_of_weights(self, step: Step, tally: Tally) -> None:
        """Say once that losses which are no means over samples leave gradients as they are."""
        adapts = self._plan.ags is not None or self._adaptive.gaining
        if self._weights_told or not adapts or tally.weight in (0, step.samples):
            return
        self._weights_told = True
        if self._group.rank == 0:
            key = "scaling=gain" if self._plan.ags is None else f"ags.mode={self._plan.ags.mode}"
            warnings.warn(
                f"session.step(weight=...): a step's losses are means over {tally.weight:g}, not "
                f"over its {step.samples} samples, so {key} learns nothing from it, and from "
                "such steps alone it is plain training: give means over samples, or plan without",
                stacklevel=5,
            )

    def _take_up(self) -> None:
        """Sum and scale the gradients of layers, too, that were unfrozen since the last step."""
        if self._reducer.take_up():
            self._updater.follow(self._reducer.parameters)
        learnt = self._state.tensors
        if learnt is not None and len(learnt.trace) != len(self._reducer.parameters):
            self._state.tensors = None  # of which tensors it was, it does not say

    def _own_tally(self, samples: int) -> Tally:
        """What this worker sends along with its gradients; ``samples`` of the last micro-batch."""
        missing, failed, weight = self._missing, self._out_of_memory, self._weight
        loss: float | Tensor = self._loss
        self._missing = self._out_of_memory = False
        self._weight, self._loss = 0.0, 0.0
        micro_batch = self._sharing.micro_batch_size
        if missing:
            weight, loss = 0.0, 0.0
        if failed:
            if self._graphs is not None and self._graphs.holds:
                self._graphs.give_up("memory ran out")
            if samples < 2 * self._sharing.least:
                raise TrainingError(
                    f"{self._group.places[self._group.rank]} has not enough memory for {samples} "
                    "sample(s) at once: take a smaller network or resolution, or free memory"
                )
            micro_batch = samples // 2
        wishes = self._wishes()
        return Tally(
            weight=weight,
            loss=loss,
            stop=float(wishes.stop),
            checkpoint=float(wishes.checkpoint),
            missing=float(missing),
            uncompiled=float(bool(self._compilation.failure) and not self._failure_told),
            note=WorkerNote(
                self._clock.computed(), self._sharing.asked_ahead, micro_batch, wishes.digest
            ),
        )
