"""The training step: backward passes, the exchange of gradients, the update, and what can go wrong.

`Session.step` calls `Stepper.step` once for each micro-batch. A step reads from there downwards:

    backward          the micro-batch's gradients, weighted by its samples
    _finish_step      after the last micro-batch:
        _exchange         gradients and figures summed over the workers, in one message
        _take_back        where memory ran out on any worker, all of them take the step again
        _update           check, scale and clip the gradients, step the optimizer
        _count            count the step
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer
from batchwright.distributed.tally import QueuedWork, Tally, WorkerNote
from batchwright.errors import BrokenStepError, Interrupted, NewPlan, TrainingError, one_line
from batchwright.records import Plan
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import described
from batchwright.training.batches.batch_split import Division
from batchwright.training.batches.sampler import Step
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.step.clock import StepClock, book_waiting
from batchwright.training.step.early_batches import NO_BATCHES, Early
from batchwright.training.step.epoch_totals import extend_range
from batchwright.training.step.gradient_scaling import Adaptation, Adaptive
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
_LEAST_SCALE = 256.0  # of a loss that `torch.amp.GradScaler` has scaled; it begins at 65,536

_NO_GRADIENT = (
    "session.step() found no gradient: is the loss computed from the session's model, without "
    "detach() or no_grad(), and is any parameter trained (requires_grad)?"
)

_OWN_BACKWARD = (
    "the loop has called backward() for this batch before session.step(), and such gradients are "
    "not weighed by the samples of all workers: leave that out and give step(loss), or call "
    "session.backward(part) for each part of the loss; zero_grad() drops gradients of other things"
)

Loss = Tensor | Callable[[], Tensor]
"""A mean loss, or a function that computes it: forward pass and all."""


class StepRequests(NamedTuple):
    """What a worker asks of the others, and compares with them, at the end of a step."""

    stop: bool = False
    """Whether this worker asks all of them to stop."""
    checkpoint: bool = False
    """Whether this worker asks for a checkpoint."""
    digest: float | Tensor = 0.0
    """Digest of its weights at steps where the workers compare them; see `weights_digest`."""


@dataclass
class _MicroBatch:
    """The micro-batch that the user's loop works on now.

    Attributes:
        samples: Its number of samples.
        last: Whether it is this worker's last micro-batch of the step.
        step: The step that it is a part of.
        weight: What its losses are means over; ``None`` until the first backward pass says so.
    """

    samples: int
    last: bool
    step: Step
    weight: float | None = None

    @property
    def share(self) -> float:
        """Its part of the step's weight, by which its gradients are multiplied; 0 without loss."""
        return (self.weight or 0.0) / self.step.samples


class Stepper:
    """Takes the steps of a run on one worker.

    Args:
        plan: The plan that is followed.
        group: The workers.
        state: How far the run is; steps and samples are counted on here.
        reducer: Sums gradients over micro-batches and workers.
        updater: Applies the summed gradients to the weights.
        rates: The learning-rate schedule.
        statistics: Running statistics of normalization layers, put back where a step fails.
        division: Which worker takes which samples; it learns from each step.
        clock: Books where the step's time goes.
        requests: Returns what this worker asks of the others at the step in progress.
        compilation: Whether the network is compiled.
        graphs: CUDA graphs from which the network's passes are replayed; ``None``: none are.
        resumes: Whether there are checkpoints from which a run that fails can be resumed.

    Attributes:
        tally: Summed figures of all workers for the last counted step.
        updated: Whether that step changed the weights, until whoever follows them clears it.
        repeat: Whether the last step must be taken again, because memory ran out or compiling
            failed on some worker.
        broken: Whether the last step has ended with an error, which may leave weights half updated.
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
        division: Division,
        clock: StepClock,
        requests: Callable[[], StepRequests],
        compilation: Compilation,
        graphs: CudaGraphs | None,
        *,
        resumes: bool,
    ) -> None:
        self._plan, self._group, self._state = plan, group, state
        self._reducer, self._updater, self._rates = reducer, updater, rates
        self._statistics, self._division = statistics, division
        self._clock, self._requests = clock, requests
        self._compilation, self._compile_failure_agreed = compilation, False
        self._graphs = graphs
        self._adaptive = Adaptive(plan, state, own_rates=rates.own)
        updater.follow(reducer.parameters)  # after a resume also what is frozen at the moment
        self._micro: _MicroBatch | None = None
        self._autocast, self._in_autocast = autocast(plan.precision, group.device), False
        self._narrow = plan.precision in NARROW  # so losses are scaled
        self._full_precision = torch.autocast(group.device.type, enabled=False)
        self._early = NO_BATCHES
        # This worker's figures of the step in progress, over the micro-batches so far.
        self._weight = 0.0
        self._loss: float | Tensor = 0.0  # sum of weight times mean loss
        self._failed = False  # its gradients are missing, by memory or by the compiler
        self._shortage = ""  # what was said where memory ran out; empty: it did not
        self._bad_steps = 0  # in a row
        self._unusual = False  # whether the last step was not as a device expects it
        self._warned_of_weights = self._warned_of_rates = False
        self._losses_seen = 0  # up to 2
        self._factor: Tensor | None = None  # by which the last one of these was multiplied last
        self.tally = Tally(0.0, 0.0)
        self.updated = self.repeat = self.broken = False
        self._resumes = resumes
        self._failure: tuple[str, BaseException] | None = None  # what has ended, and with what

    # ------------------------------------------------------------------- around the user's loop

    def open(self, samples: int, step: Step, *, last: bool) -> None:
        """Hand a micro-batch to the user's loop; autocast is on from here until its `step`.

        Args:
            samples: Its number of samples.
            step: The step that it is a part of.
            last: Whether it is this worker's last one of the step.
        """
        self._micro = _MicroBatch(samples, last, step)
        self._updater.clear()  # gradients that the loop has computed between two steps don't count
        self._statistics.keep()
        if self._plan.precision != "float32":
            self._autocast.__enter__()
            self._in_autocast = True

    @contextmanager
    def preparing(self, early: Early) -> Iterator[None]:
        """Inside, the next batch of ``early`` is made while the host waits for a step's figures."""
        self._early = early
        try:
            yield
        finally:
            self._early = NO_BATCHES

    def refuse_open(self) -> None:
        """Raise `RuntimeError` if `step` was not called for the micro-batch, or has failed."""
        self.refuse_failed()
        if self._micro is not None:
            raise RuntimeError(
                "session.batches() was asked for the next batch before session.step() "
                "was called for this one: call step(loss) once for each batch"
            )

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """An error inside, in which ``what`` ends half done, lets nothing go on after it.

        A stop is none: all workers have made it together.
        """
        try:
            yield
        except (Interrupted, NewPlan):
            raise
        except BaseException as error:
            self._failure = what, error
            raise

    @property
    def failed(self) -> bool:
        """Whether something has ended half done; see `failing`."""
        return self._failure is not None

    def refuse_failed(self) -> None:
        """Raise `RuntimeError` if the loop goes on after an error of `failing`.

        Samples would be left out, gradients counted twice, or other workers wait.
        """
        if self._failure is not None:
            what, error = self._failure
            then = ", and resume from the last checkpoint" if self._resumes else ""
            raise RuntimeError(
                f"{what} has ended with an error ({one_line(error)}) and may be half done, so the "
                f"training cannot go on: let it end the session{then}"
            ) from error

    def before_step(self) -> AbstractContextManager[None]:
        """Inside, the model is as before the step in progress, forward passes of it included."""
        return self._statistics.before_step()

    def take_back_open(self) -> None:
        """Put statistics back as they were before a step that the loop has begun and not ended."""
        self._statistics.end(updated=False)

    def leave_autocast(self) -> None:
        """Switch autocast off, if `open` has switched it on."""
        if self._in_autocast:
            self._autocast.__exit__(None, None, None)
            self._in_autocast = False

    # ------------------------------------------------------------------------------- the step

    def step(self, loss: Loss | None, weight: float | None) -> bool:
        """Backward pass and, at the end of a step, the update; see `Session.step`."""
        micro = self._opened()
        with self.failing("session.step()"):
            if loss is not None:
                if micro.last:  # from here on a bucket of gradients is sent once it is full
                    self._reducer.arm()
                self._backward(micro, loss, weight)
            elif micro.weight is None:
                self._refuse_own_backward()
            self.leave_autocast()
            self._micro = None
            if not (micro.last or self._failed):
                # Gradient accumulation: nothing is exchanged before the last micro-batch.
                self._reducer.take(micro.share)
                self._clock.lap(self._state.meter, "compute")  # or it would count as input
                return False
            if self._weight > 0 and not self._failed and self._reducer.empty:
                raise RuntimeError(_NO_GRADIENT)
            if not self._failed:
                self._early.ask()  # before the others are told how far ahead the feed was asked
            return self._finish_step(micro.step, micro.samples, micro.share)

    def step_without_samples(self, step: Step) -> None:
        """Take part in the exchange of a step of which this worker has no samples."""
        self._updater.clear()  # as in `open`
        with self.failing("a step"):
            self._finish_step(step, 0, 0.0)

    def backward(self, loss: Loss, weight: float | None) -> None:
        """A backward pass; see `Session.backward`."""
        micro = self._opened()
        with self.failing("session.backward()"):
            self._backward(micro, loss, weight)

    def _backward(self, micro: _MicroBatch, loss: Loss, weight: float | None) -> None:
        mean_over = float(micro.samples if weight is None else weight)
        if not 0 <= mean_over < math.inf:
            raise ValueError(
                f"weight={mean_over:g}: give what the loss is a mean over, a number from 0 on"
            )
        if micro.weight is None:
            self._refuse_own_backward()
            micro.weight = mean_over
            self._weight += mean_over
        elif micro.weight != mean_over:
            raise ValueError(
                f"weight={mean_over:g} after weight={micro.weight:g}: the losses of one "
                "micro-batch must be means over the same weight to add up"
            )
        if self._failed or not mean_over:
            return  # a mean over nothing has no gradient, and no value
        value: Tensor | None = None
        try:
            given = loss() if callable(loss) else loss
            _refuse_other_loss(given)
            if not given.requires_grad:
                raise RuntimeError(_NO_GRADIENT)
            self._warn_of_scaler(given)
            value = given  # from here on errors may be the compiler's
            if self._in_autocast:  # else 16-bit copies of weights outlive the pass in their layer
                torch.clear_autocast_cache()
            self._add_unfrozen()
            with self._full_precision:
                # Weighted by samples: b_i / B of the step's samples over all workers, so that the
                # sum of all gradients is that of the mean loss over the global batch, however
                # unequal the workers' batches are:  g = sum_i (b_i / B) g_i
                self._loss_scale.scaled(value, mean_over / micro.step.samples).backward()
            # The loss stays on the device: to read it here would make the host wait before the
            # gradients are on their way. It travels with them, see `Tally.loss`.
            mean_loss = value.detach().to(self._group.device, torch.float64).view(1)
            weighted = mean_loss * mean_over
            self._loss = weighted + self._loss if isinstance(self._loss, Tensor) else weighted
        except Exception as error:
            self._shortage = in_words(error) if is_out_of_memory(error) else ""
            # The backward pass is compiled when it first runs, and compilers raise any error.
            compiling = value is not None and not self._shortage
            if not (self._shortage or (compiling and self._compilation.gives_up(error))):
                raise
            if self._shortage and self._statistics.synchronized and self._group.size > 1:
                raise BrokenStepError(
                    f"{self._group.places[self._group.rank]} ran out of memory between exchanges "
                    "of SyncBatchNorm, in which the others wait for it: the step cannot be "
                    "repeated in smaller micro-batches; take a smaller batch or resolution, or "
                    f"batch normalization without exchanges ({in_words(error)})"
                ) from error
            self._failed = True  # the others wait in the exchange: tell them there
        if self._shortage and value is not None:
            release_graph(value)  # only here: until its traceback is gone the error holds it, too

    def _finish_step(self, step: Step, samples: int, share: float) -> bool:
        """Sum the gradients of a step and, unless something is wrong, step the optimizer.

        Args:
            step: The step.
            samples: Samples of this worker's last micro-batch.
            share: That micro-batch's part of the step's weight.

        Returns:
            Whether the weights were updated.
        """
        self.broken = True  # until it has ended well
        meter, updater = self._state.meter, self._updater
        self._add_unfrozen()
        self._clock.lap(meter, "compute")
        own = self._own_tally(samples)
        if own.missing:  # no gradients to give, but it takes part in the exchange: the others wait
            updater.clear()

        # Rate and gradient factors follow from the steps before alone: a factor that knew the
        # gradient that it multiplies would bend its direction.
        adaptation = self._adaptive.of_step(step.samples)
        self._rates.set(*self._division.position, adaptation.gain)
        self._warn_of_rates()

        # One message: loss, flags and norms of all workers ride behind the last gradients. While
        # the host waits for it, the device goes on with what needs no decision of the host.
        queued = None
        if not own.missing:
            waits = self._narrow or self._unusual
            queued = updater.ahead(
                step.samples, adaptation.factors, self._early, self._clock, waits=waits
            )
        tally = self._exchange(own, samples, share, queued)
        seconds = self._clock.lap(meter, "communication")
        book_waiting(meter, seconds, [n.seconds for n in tally.notes], self._group.rank)

        # Agree before acting: all workers hold the same tally here, so all of them repeat the step,
        # leave it out or update, and nobody is left alone in an exchange.
        if tally.uncompiled:
            self._go_on_uncompiled()
        self.repeat = tally.missing > 0
        if self.repeat:
            self._take_back(tally)
        else:
            self.updated = self._update(step, tally, adaptation.factors)
            self._count(step, tally, adaptation)
        self.broken = False
        return self.updated and not self.repeat

    def _take_back(self, tally: Tally) -> None:
        """Leave everything as it was before the step, which will be taken again."""
        self._updater.clear()
        self._early.drop()  # its memory is needed
        self._statistics.end(updated=False)
        self._state.meter.repeated += 1
        release_memory(self._group.device)
        self._division.after_out_of_memory(tally)

    def _update(self, step: Step, tally: Tally, factors: Tensor | None) -> bool:
        """Check, scale and clip the summed gradients, and step the optimizer.

        Returns:
            Whether the weights were updated.
        """
        # The summed gradient is divided by the loss scale and, where losses were means over
        # something other than samples (labelled pixels, say), by the weight they really had.
        per_weight = step.samples / tally.weight if tally.weight else 1.0
        scale = self._loss_scale
        norms = self._updater.rescale(tally, per_weight / scale.factor)
        if tally.local_sqr_norms is not None and scale.factor != 1:
            tally = replace(tally, local_sqr_norms=tally.local_sqr_norms / scale.factor**2)
        self._warn_of_weights(step, tally)
        self._adaptive.learn(tally, norms, batch=step.samples)

        # The update, unless the device has made it already or a gradient is not finite.
        updated = tally.went_ahead or (tally.weight > 0 and self._updater.apply(norms, factors))
        if updated:  # unusual weights, and tensors without a gradient, often come again
            self._unusual = not tally.whole or tally.weight != step.samples
        self._updater.clear()
        self._statistics.end(updated=updated)
        if self._narrow and tally.weight:
            self._state.loss_scale = scale.after(good=updated, weight=1 / per_weight)
        return updated

    def _count(self, step: Step, tally: Tally, adaptation: Adaptation) -> None:
        """Count the step, updated or not.

        Raises:
            TrainingError: It is one of many in a row whose gradients were not finite.
        """
        state, meter = self._state, self._state.meter
        if adaptation.factors is not None:
            meter.factors = extend_range(meter.factors, adaptation.factors.tolist())
        if self._adaptive.gaining:
            meter.gains = extend_range(meter.gains, [adaptation.gain])
        meter.rate = self._rates.now
        meter.steps += 1
        meter.skipped += not self.updated
        meter.samples += step.samples
        meter.local_samples += step.local_batch_sizes[self._group.rank]
        meter.weight += tally.weight
        meter.loss += float(tally.loss)
        state.step += 1
        state.steps += 1
        state.samples_seen += step.samples
        self.tally = tally
        # A step of weight 0 has no gradient: it is neither a good nor a bad one.
        self._bad_steps = 0 if self.updated else self._bad_steps + (tally.weight > 0)
        if self._bad_steps >= MAX_BAD_STEPS:
            exact = "" if self._plan.precision == "float32" else ", or give precision=float32"
            raise TrainingError(
                f"gradients were infinite or not a number for {MAX_BAD_STEPS} steps in a row "
                f"(epoch {meter.epoch + 1}, step {meter.steps}): lower learning_rate, now "
                f"{meter.rate:.3g}, or set clip_norm{exact}"
            )
        self._clock.lap(meter, "compute")
        self._division.after_step(step, tally)

    # --------------------------------------------------------------------------- parts of a step

    def _own_tally(self, samples: int) -> Tally:
        """This worker's figures of the step, which begin anew.

        Args:
            samples: Samples of the last micro-batch. Where memory ran out, this worker goes on
                with half as many at once.

        Raises:
            TrainingError: Memory ran out with the fewest samples that the worker can train on.
        """
        failed, shortage = self._failed, self._shortage
        weight, loss = (0.0, 0.0) if failed else (self._weight, self._loss)
        self._failed, self._shortage = False, ""
        self._weight, self._loss = 0.0, 0.0
        micro_batch = self._division.micro_batch_size
        if shortage:
            if self._graphs is not None and self._graphs.holds:
                self._graphs.give_up("memory ran out")
            if samples < 2 * self._division.least:
                raise TrainingError(
                    f"{self._group.places[self._group.rank]} has not enough memory for "
                    f"{counted(samples, 'sample')} at once: take a smaller network or resolution, "
                    f"or free memory ({shortage})"
                )
            micro_batch = samples // 2
        requests = self._requests()
        uncompiled = bool(self._compilation.failure) and not self._compile_failure_agreed
        seconds, ahead = self._clock.computed(), self._division.asked_ahead
        return Tally(
            weight=weight,
            loss=loss,
            stop=float(requests.stop),
            checkpoint=float(requests.checkpoint),
            missing=float(failed),
            uncompiled=float(uncompiled),
            note=WorkerNote(seconds, ahead, micro_batch, requests.digest),
        )

    def _exchange(self, own: Tally, samples: int, share: float, queued: QueuedWork | None) -> Tally:
        """Sum gradients and figures over all workers; see `Reducer.finish`.

        A device reports here what failed in passes that it had only queued before, so gradients
        may be wrong. One worker takes the step again, unless its device may have made the update
        with them. Several workers cannot: the others may hold the sums already.

        Raises:
            BrokenStepError: Memory ran out, and there are other workers or an update was queued.
        """
        try:
            return self._reducer.finish(own, 0.0 if own.missing else share, queued)
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
            self._failed, self._shortage = True, in_words(error)
        self._updater.clear()
        return self._reducer.finish(self._own_tally(samples), 0.0)

    @property
    def _loss_scale(self) -> LossScale:
        """The factor on the losses of the step in progress; 1 but in float16."""
        known = self._state.loss_scale if self._narrow else None
        return known or LossScale.of(self._plan.precision)

    def _refuse_own_backward(self) -> None:
        """Refuse gradients that came before the first backward pass of `_backward`.

        Those that the loop has set to zero again, as ``zero_grad(set_to_none=False)`` does after a
        pass for the input's gradient, are none.
        """
        found = [p.grad for p in self._reducer.parameters if p.grad is not None]
        if any(float(gradient.norm()) != 0 for gradient in found):
            raise RuntimeError(_OWN_BACKWARD)
        if found:
            self._updater.clear()

    def _opened(self) -> _MicroBatch:
        self.refuse_failed()
        if self._micro is None:
            raise RuntimeError(
                "session.step() without a batch: call it once for each batch of session.batches()"
            )
        return self._micro

    def _add_unfrozen(self) -> None:
        """Sum and update layers that were unfrozen since the last step as well."""
        if self._reducer.add_unfrozen():
            self._updater.follow(self._reducer.parameters)
        noise = self._state.tensors
        if noise is not None and len(noise.trace) != len(self._reducer.parameters):
            self._state.tensors = None  # it does not say which tensors it was measured for

    def _go_on_uncompiled(self) -> None:
        """Compiling has failed on some worker: all go on uncompiled, and a line says why.

        Raises:
            TrainingError: The job asks for compiling, whatever it saves.
        """
        reasons = self._group.gather(self._compilation.failure)
        rank, why = next((rank, why) for rank, why in enumerate(reasons) if why)
        self._compilation.failure, self._compile_failure_agreed = why, True
        what = f"the network cannot be compiled on {self._group.places[rank]} ({why})"
        if self._compilation.asked:
            raise TrainingError(
                f"compile=on: {what}: plan again with compile=auto, which then goes on as it is, "
                "or with compile=off"
            )
        if self._group.rank == 0:
            warnings.warn(f"{what}: all workers go on uncompiled", stacklevel=5)

    def _warn_of_rates(self) -> None:
        """Warn once of a rate that the loop or its scheduler sets: the plan's takes its place."""
        changed = self._rates.changed
        if self._warned_of_rates or changed is None or self._group.rank:
            return
        self._warned_of_rates = True
        warnings.warn(
            f"the loop, or a scheduler, has set the optimizer's rate to {changed:.3g}, and the "
            "plan sets it at each step: leave that out, or give learning_rate='mine'",
            stacklevel=5,
        )

    def _warn_of_scaler(self, loss: Tensor) -> None:
        """Warn where the first two losses were scaled: nobody divides the gradients by that factor.

        A scaler keeps it in one tensor; the sum of a mask, say, is another tensor each time.
        """
        if self._losses_seen == 2:
            return
        self._losses_seen += 1
        former, self._factor = self._factor, _factor_of(loss)
        if former is None or self._factor is None or not self._factor.is_set_to(former):
            return
        by = float(self._factor)
        if by >= _LEAST_SCALE and math.frexp(by)[0] == 0.5 and self._group.rank == 0:
            warnings.warn(
                f"session.step() got a loss times {by:,.0f}, as torch.amp.GradScaler scales it, "
                "and its gradients stay so large: leave the scaler out and give the loss itself, "
                "which precision=float16 scales by the same rules",
                stacklevel=5,
            )

    def _warn_of_weights(self, step: Step, tally: Tally) -> None:
        """Warn once that adaptive scaling learns nothing from losses not averaged over samples."""
        adapts = self._plan.ags is not None or self._adaptive.gaining
        if self._warned_of_weights or not adapts or tally.weight in (0, step.samples):
            return
        self._warned_of_weights = True
        if self._group.rank == 0:
            key = "scaling=gain" if self._plan.ags is None else f"ags.mode={self._plan.ags.mode}"
            warnings.warn(
                f"session.step(weight=...): a step's losses are means over {tally.weight:g}, not "
                f"over its {step.samples} samples, so {key} learns nothing from it, and from "
                "such steps alone it is plain training: give means over samples, or plan without",
                stacklevel=6,
            )


def _factor_of(loss: Tensor) -> Tensor | None:
    """The number in a tensor of float32 by which a loss was multiplied last; `None`: by none."""
    made_by = loss.grad_fn
    if made_by is None or made_by.name() != "MulBackward0":  # quotients save such a factor, too
        return None
    factor = getattr(made_by, "_saved_other", None)
    if not isinstance(factor, Tensor) or factor.dim() or factor.dtype != torch.float32:
        return None
    return factor


def _refuse_other_loss(value: object) -> None:
    """Raise `ValueError` for a loss that is no scalar tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"session.step() got {described(value)} for a loss: give it as the tensor that the "
            "criterion returns, or a function that returns this"
        )
    if value.numel() != 1:
        raise ValueError(
            f"session.step() got a loss of shape {tuple(value.shape)}: give one number, the mean "
            "over the micro-batch"
        )
