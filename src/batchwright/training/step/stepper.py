"""The training step: backward passes, the exchange of gradients, the update, and what can go wrong.

`Session.step` calls `Stepper.step`; from there it reads downwards to the optimizer's own step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchwright.algorithms.learning_rate import rate_factor
from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Ahead, Reducer, Tally, WorkerNote
from batchwright.distributed.transports import nothing
from batchwright.errors import BrokenStepError, TrainingError
from batchwright.records import Plan, Stage
from batchwright.training.batches.batch_split import Division
from batchwright.training.batches.sampler import Step
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.step.clock import StepClock, book_waiting
from batchwright.training.step.epoch_totals import met
from batchwright.training.step.gradient_scaling import Adaptation, Adaptive, multiply
from batchwright.training.step.normalization import Statistics
from batchwright.workload.compilation import Compilation
from batchwright.workload.extras import in_words
from batchwright.workload.host import NARROW, autocast, is_out_of_memory, release_memory
from batchwright.workload.loss_scaling import LossScale
from batchwright.workload.optimizers import leaves_out_steps, unless

MAX_BAD_STEPS = 20  # in a row, before a run with infinite gradients gives up

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
        statistics: Of normalization, to be put back where a step changes nothing.
        sharing: Says who takes what, and learns from each step.
        clock: Books the time.
        wishes: What this worker tells the others at the next step.
        compilation: Whether the network computes compiled.

    Attributes:
        tally: Of the last step that was counted.
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
        statistics: Statistics,
        sharing: Division,
        clock: StepClock,
        wishes: Callable[[], Wishes],
        compilation: Compilation,
    ) -> None:
        self._plan, self._group, self._state = plan, group, state
        self._reducer, self._updater, self._sharing = reducer, updater, sharing
        self._statistics = statistics
        self._clock, self._wishes = clock, wishes
        self._compilation, self._failure_told = compilation, False
        self._adaptive = Adaptive(plan, state, own_rates=updater.own_rates)
        updater.follow(reducer.parameters)  # after a resume also what is frozen at the moment
        self._micro: _MicroBatch | None = None
        self._cast: torch.autocast | None = None
        self._weight = 0.0
        self._loss: float | Tensor = 0.0
        self._out_of_memory = self._missing = False  # the latter whatever the cause
        self._bad_steps = 0
        self._weights_told = False
        self.tally = Tally(0.0, 0.0)
        self.repeat = False
        self._meanwhile: Callable[[], None] = nothing

    def open(self, samples: int, step: Step, *, last: bool) -> None:
        """A micro-batch is handed to the loop; autocast is on until its `step`."""
        self._micro = _MicroBatch(samples, last, step)
        self._statistics.keep()
        if self._plan.precision != "float32":
            self._cast = autocast(self._plan.precision, self._group.device)
            self._cast.__enter__()

    @contextmanager
    def making(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Inside, this is called once all backward passes of a step are on their way."""
        self._meanwhile = meanwhile
        try:
            yield
        finally:
            self._meanwhile = nothing

    def refuse_open(self) -> None:
        """Raise `RuntimeError` if `step` was not called for the micro-batch."""
        if self._micro is not None:
            raise RuntimeError(
                "session.batches() was asked for the next batch before session.step() "
                "was called for this one: call step(loss) once for each batch"
            )

    def leave_autocast(self) -> None:
        """Autocast is off."""
        if self._cast is not None:
            self._cast.__exit__(None, None, None)
            self._cast = None

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
            self._take_up()
            with torch.autocast(self._group.device.type, enabled=False):
                # Weighted by samples: b_i / B of the step's samples over all workers, so that the
                # sum of all gradients is that of the mean loss over the global batch, however
                # unequal the shares are.
                self._scale.scaled(value, mean_over / micro.step.samples).backward()
            # Not looked at before the gradients are on their way: that waits for the device.
            told = value.detach().to(self._group.device, torch.float64).view(())
            weighted = told * mean_over
            self._loss = weighted + self._loss if isinstance(self._loss, Tensor) else weighted
        except Exception as error:
            self._out_of_memory = is_out_of_memory(error)
            # A backward pass is compiled when it is due; what fails there may be of any class.
            late = value is not None and not self._out_of_memory
            if not (self._out_of_memory or (late and self._compilation.gives_up(error))):
                raise
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
            raise RuntimeError(
                "session.step() found no gradient: is the loss computed from the session's model, "
                "and is any parameter trained (requires_grad)?"
            )
        if not self._missing:
            self._meanwhile()
        return self._exchange_and_update(micro.step, micro.samples, micro.share)

    def step_without_samples(self, step: Step) -> None:
        """Take part in a step of the others."""
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
        ahead = None
        if self._plan.precision not in NARROW and not own.missing:
            ahead = updater.ahead(*self._sharing.position, adaptation)
        # One message: what the workers have to tell each other rides behind the last gradients.
        tally = self._summed(
            own, samples, share, Ahead(step.samples, self._clock.passing(ahead)) if ahead else None
        )
        seconds = self._clock.lap(meter, "communication")
        book_waiting(meter, seconds, [n.seconds for n in tally.notes], self._group.rank)

        # Agree before acting: all workers hold the same tally here, so all of them repeat the step,
        # leave it out or update, and nobody is left alone in an exchange.
        if tally.uncompiled:
            self._go_on_uncompiled()
        self.repeat = tally.missing > 0
        if self.repeat:
            updater.clear()
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
        updated = tally.went_ahead or (
            tally.weight > 0 and updater.apply(norms, *self._sharing.position, adaptation)
        )
        if ahead and updated and not tally.went_ahead:
            updater.waits = True  # such losses, or tensors without a gradient, come again
        updater.clear()
        self._statistics.end(updated=updated)
        if self._plan.precision in NARROW and tally.weight:
            state.loss_scale = scale.after(good=updated)

        if adaptation.factors is not None:
            meter.factors = met(meter.factors, adaptation.factors.tolist())
        if self._adaptive.gaining:
            meter.gains = met(meter.gains, [adaptation.gain])
        meter.rate = updater.rate
        meter.steps += 1
        meter.skipped += not updated
        meter.samples += step.samples
        meter.local_samples += step.local_batch_sizes[self._group.rank]
        meter.weight += tally.weight
        meter.loss += float(tally.loss)
        state.step += 1
        state.steps += 1
        state.samples_seen += step.samples
        self.tally = tally
        # A step of weight 0 has no gradient: it is neither a good nor a bad one.
        self._bad_steps = 0 if updated else self._bad_steps + (tally.weight > 0)
        if self._bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(
                f"gradients were infinite or not a number for {MAX_BAD_STEPS} steps in a row "
                f"(epoch {meter.epoch + 1}, step {meter.steps}): lower learning_rate, now "
                f"{meter.rate:.3g}, or set clip_norm"
            )
        self._clock.lap(meter, "compute")
        self._sharing.after_step(step, tally)
        return updated

    def _summed(self, own: Tally, samples: int, share: float, ahead: Ahead | None) -> Tally:
        """The figures of all workers, whose gradients are summed; see `Reducer.finish`.

        Here a device tells of what it could not do before, so of gradients that may be wrong. One
        worker takes the step again. Several cannot: the others may hold the sums already.

        Raises:
            BrokenStepError: Memory ran out, and there are other workers.
        """
        try:
            return self._reducer.finish(own, 0.0 if own.missing else share, ahead)
        except (RuntimeError, MemoryError) as error:
            if own.missing or not is_out_of_memory(error):
                raise
            if self._group.size > 1:
                raise BrokenStepError(
                    f"{self._group.places[self._group.rank]} ran out of memory while gradients "
                    "were summed over the workers, of whom others may have the sums already: the "
                    "step cannot be repeated, and only the last checkpoint is whole "
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


class Updater:
    """Steps an optimizer.

    The plan's rate is a factor on each parameter group's own initial rate.

    Args:
        parameters: What is trained, whether the optimizer has it or not.
        optimizer: Of most of them.
        plan: Its learning rate rule is followed.
        first_rates: Of each of the optimizer's parameter groups, as its builder set it.
        clip_norm: Largest global gradient norm; ``None``: no limit.
        own_rates: Whether the optimizer's rates are left alone.
        samples_per_epoch: Size of the data set.

    Attributes:
        own_rates: Whether they are.
        waits: Whether no step is to be taken ahead of the host.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        first_rates: Sequence[float],
        clip_norm: float | None,
        own_rates: bool,
        samples_per_epoch: int,
    ) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._plan, self._clip_norm, self.own_rates = plan, clip_norm, own_rates
        self._samples_per_epoch = samples_per_epoch
        self._first_rates = first_rates
        self.waits = clip_norm is not None or parameters[0].device.type == "cpu"
        self.follow([p for p in parameters if p.requires_grad])

    @property
    def rate(self) -> float:
        """Of the optimizer's first parameter group, per step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def per_tensor(self) -> bool:
        """Whether weights come to depend on norms of gradients: by clipping, factors or the rate.

        Then a `Reducer` is to give those of single tensors. They sum to the same bits however
        tensors are put into buckets.
        """
        gaining = self._plan.learning_rate.scaling == "gain" and not self.own_rates
        return self._plan.ags is not None or self._clip_norm is not None or gaining

    def follow(self, trained: Sequence[nn.Parameter]) -> None:
        """From now on these of the parameters are those that a `Reducer` has."""
        self._trained = list(trained)
        self._known = -1  # entries of the optimizer's state, with one for each of these

    def rescale(self, tally: Tally, factor: float) -> Tensor:
        """Multiply all summed gradients.

        Args:
            tally: Of their sum.
            factor: By which they are multiplied.

        Returns:
            The squared norms after that, on the CPU, as `Tally.sqr_norms` has them.
        """
        assert tally.sqr_norms is not None  # noqa: S101 - every reducer gives them
        if factor != 1:
            torch._foreach_mul_(self._gradients(), factor)
        return tally.sqr_norms.cpu() * factor**2

    def ahead(
        self, samples_seen: float, stage: Stage, adaptation: Adaptation
    ) -> Callable[[Tensor], None] | None:
        """The update as the device can take it before the host knows anything of the gradients.

        Only where no number of the host's is needed for it, as clipping needs the norm, and the
        optimizer can be told to leave a step out. On the CPU there is no device to be kept busy.

        The arguments are those of `apply`.

        Returns:
            What `distributed.reducer.Ahead` takes; ``None``: `apply` is to be called.
        """
        # A first step makes the state, which SGD would leave unwritten if it left that one out.
        known = len(self._optimizer.state) == self._known
        if self.waits or adaptation.factors is not None or not known:
            return None
        if not leaves_out_steps(self._optimizer):
            return None

        def update(unusual: Tensor) -> None:
            self._set_rates(samples_seen, stage, adaptation.gain)
            with unless(self._optimizer, unusual):
                self._step()

        return update

    def apply(
        self,
        norms: Tensor,
        samples_seen: float,
        stage: Stage,
        adaptation: Adaptation,
    ) -> bool:
        """Set the rate and, where the gradient is finite, scale, clip and step.

        Args:
            norms: Squared norms of the gradients of what is trained, as `rescale` gives them: of
                each, (trained,), where the adaptation has factors.
            samples_seen: Training samples before this step, all workers.
            stage: The plan's row.
            adaptation: What rate and gradients are multiplied by, besides.

        Returns:
            Whether the weights were updated.

        Raises:
            RuntimeError: The optimizer has other parameter groups than it had.
        """
        self._set_rates(samples_seen, stage, adaptation.gain)
        norms, factors = norms.double(), adaptation.factors
        sqr_norm = float(norms.sum())
        if not math.isfinite(sqr_norm):
            return False
        if factors is not None:
            sqr_norm = float((factors.square() * norms).sum())
        norm, clip = math.sqrt(sqr_norm), 1.0
        if self._clip_norm is not None and norm > self._clip_norm:
            clip = self._clip_norm / norm
        if factors is not None:
            multiply([p.grad for p in self._trained], (clip * factors).tolist())
        elif clip != 1:
            torch._foreach_mul_(self._gradients(), clip)
        self._step()
        state = self._optimizer.state
        if len(state) != self._known:
            self._known = len(state) if all(p in state for p in self._trained) else -1
        return True

    def _step(self) -> None:
        """Step the optimizer; once more where memory ran out before it had changed anything.

        That is in its first step, which makes its state. Fused kernels leave no version behind; but
        Adam's raise each ``step`` before, and SGD notes its momentum only after.

        Raises:
            BrokenStepError: Some weights may be updated, and would be once more.
            TrainingError: There is no memory for the state.
        """
        state = self._optimizer.state
        before = None if state else [p._version for p in self._parameters]
        try:
            self._optimizer.step()
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            made = [one for entry in state.values() for one in entry.values()]
            begun = before != [p._version for p in self._parameters] or not (
                all("step" in entry for entry in state.values())
                and all(one._version == 0 for one in made if isinstance(one, Tensor))
            )
            if begun:
                raise BrokenStepError(
                    "memory ran out while the optimizer stepped, and some weights may be updated: "
                    "to repeat the step would update them twice, so only the last checkpoint is "
                    f"whole ({in_words(error)})"
                ) from error
        state.clear()  # an entry may be half made
        release_memory(self._parameters[0].device)
        try:
            self._optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"there is no memory for the optimizer's state ({in_words(error)}): take a smaller "
                "network or another optimizer, or free memory"
            ) from error

    def clear(self) -> None:
        """Drop all gradients, those too that the optimizer does not have."""
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained if p.grad is not None]

    def _set_rates(self, samples_seen: float, stage: Stage, gain: float) -> None:
        groups, before = len(self._optimizer.param_groups), len(self._first_rates)
        if groups != before:
            raise RuntimeError(
                f"the optimizer has {groups} parameter group(s) and had {before} when the session "
                "was made: give it all groups before, those of layers to be unfrozen later too; "
                "frozen ones just have no gradient"
            )
        if self.own_rates:
            return
        rule = self._plan.learning_rate
        factor = rate_factor(
            samples_seen,
            rule=rule,
            samples_per_epoch=self._samples_per_epoch,
            epochs=self._plan.epochs,
        )
        relative = gain * factor * stage.learning_rate / rule.base
        for group, first in zip(self._optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = first * relative


def release_graph(loss: Tensor) -> None:
    """Free what a failed backward pass still needs memory for; the loss keeps its value.

    The user's loop may hold the loss, or outputs that it was computed from, while the step is
    repeated, and with them all activations.
    """
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                    with suppress(RuntimeError):  # the backward pass has freed it already
                        # What the first function returns is kept in place of the tensor.
                        one.register_hooks(lambda _: None, _refuse_released)
    with suppress(RuntimeError):  # a view has no graph of its own to be cut off from
        loss.detach_()


def _refuse_released(_: None) -> Tensor:
    raise RuntimeError("memory ran out in the backward pass of this loss, so its graph was freed")
