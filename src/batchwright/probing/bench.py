"""The measured training step, with the job's own data path, network, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer, buffer_bytes
from batchwright.distributed.tally import Tally
from batchwright.errors import JobError, TrainingError
from batchwright.probing.batches import Batch, Batches, RandomBatches
from batchwright.probing.replays import Replays
from batchwright.records import Job, MemoryParts, OptimizerName, Precision
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.training.batches.feeding import Feed
from batchwright.training.step.clock import clock_for
from batchwright.training.step.early_batches import NO_BATCHES, Early
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.updater import Updater
from batchwright.workload.data.sources import ImageData
from batchwright.workload.extras import in_words
from batchwright.workload.host import NARROW, autocast, dtype_of, is_out_of_memory
from batchwright.workload.loss import build_loss
from batchwright.workload.loss_scaling import LossScale
from batchwright.workload.passes.compilation import Compilation, compile_training
from batchwright.workload.passes.recomputation import recompute
from batchwright.workload.starting_weights import freeze, load_weights
from batchwright.workload.task import build_network, build_optimizer, set_training
from batchwright.workload.tensor_bytes import bytes_of, lasting_bytes

SMALLEST_BATCH = 2
"""Samples of the smallest step tried; batch normalization takes no fewer."""

Result = TypeVar("Result")


class StepResult(NamedTuple):
    """The result of trying a step."""

    # Whether there was memory for it on all workers; else the weights are as they were.
    fits: bool = True
    finite: bool = True  # whether the gradient was finite; else the weights are the starting ones
    stopped: bool = False  # whether a worker wants to stop after this step


class Steppable(Protocol):
    """Takes training steps to be timed and weighed: ours, or the user's own.

    Attributes:
        device: Device of the steps.
        group: The workers that take steps together now.
    """

    device: torch.device
    group: Group

    @property
    def first_steps(self) -> int:
        """Number of steps after a new supply whose times do not count, as they record graphs."""

    def step(self, *supplies: Callable[[], Any]) -> tuple[float, float]:
        """Take a step; seconds of computing, and of waiting for the exchange.

        Args:
            supplies: Each returns a micro-batch of the step.
        """

    def try_step(self, supply: Callable[[], Any]) -> bool:
        """Take a step if it fits into memory on all workers; else change nothing.

        Returns:
            Whether it fits.
        """

    def live_bytes(self) -> int:
        """Bytes of the tensors that are kept between two steps."""


class Bench:
    """Takes training steps as `Session` does, on any number of the workers.

    Args:
        job: A resolved job: its precision and resolutions are concrete.
        data: The job's data.
        group: The workers that take steps together, until `join` changes it.

    Attributes:
        network: The network in training mode, on the device.
        optimizer: The optimizer of the network's trained parameters.
        trained: The trained parameters.
        classes: Number of classes.
        train_samples: Samples of the training set.
        batches: Makes the batches of the steps.
        group: The workers that take steps together now.
        scale: The factor on losses.
        compilation: Whether the network is compiled.
        graphs: Whether passes of steps are replayed.
        broken_steps: Number of steps whose gradient was infinite or not a number.
    """

    def __init__(self, job: Job, data: ImageData, group: Group) -> None:
        self.job, self.device = job, group.device
        self.side, self.classes = max(sides_of(job)), len(data.facts.classes)
        self.train_samples = data.facts.train_samples
        self.network = self._network(self.classes).to(self.device)
        set_training(self.network)
        if job.activation_checkpointing == "on":
            self.recompute(on=True)
        self.graphs = Replays(self.network, job.goal.memory)
        self.compilation, self._compiles = Compilation(on=False), False
        self._failure_shared = False  # whether all workers of the group know that compiling failed
        self.broken_steps = 0
        if job.compile == "on":
            self.compile(on=True)
        if job.cuda_graphs == "on":
            self.graphs.switch(on=True)
        self.trained = [p for p in self.network.parameters() if p.requires_grad]
        usual = OPTIMIZERS[job.optimizer].rate  # `auto` measures with SGD
        rate = usual if job.learning_rate == "auto" else job.learning_rate
        self.optimizer = build_optimizer(self.network, job, rate)
        self._loss = build_loss(job, self.device)
        self._precision: Precision = "float32" if job.precision == "auto" else job.precision
        self.scale = LossScale.of(self._precision)
        self.batches = Batches(
            job,
            data,
            sides=sides_of(job),
            device=self.device,
            dtype=dtype_of(self._precision),
            rank=group.rank,
        )
        group.broadcast(self._weights())  # else each worker would start over with its own weights
        self._start = [t.detach().to("cpu", copy=True) for t in self._weights()]
        self._reducer: Reducer | None = None
        self._clock = clock_for(self.device)
        self._early: Early = NO_BATCHES
        # As in a training: see `training.running.Setup.per_tensor`.
        self._per_tensor = (
            job.clip_norm is not None or job.ags.factors != "off" or job.rate_scaling == "gain"
        )
        self.join(group)

    def recompute(self, *, on: bool) -> None:
        """Switch the recomputation of the network's blocks in the backward pass on or off."""
        recompute(self.network, on=on)

    def compile(self, *, on: bool) -> None:
        """Switch compiling on, as far as the network can be compiled, or off."""
        if on and not self._compiles:
            self.graphs.end()  # else the wrapper that replays passes would be compiled
            self.compilation, self._compiles = compile_training(self.network), True
        self.compilation.on = on

    def join(self, group: Group) -> None:
        """From now on take steps with the workers of ``group``, starting from equal weights."""
        if self._reducer is not None:
            self._reducer.close()
        self.group, self._failure_shared = group, False  # some workers may not know of a failure
        group.broadcast(self._weights())
        self.optimizer.state.clear()  # workers that have sat idle have an outdated state
        self._reducer = Reducer(self.trained, group, per_tensor=self._per_tensor)
        self._updater = self._update()
        self._take_first_step()

    def _take_first_step(self) -> None:
        """Take a step, so that the optimizer has its state when memory is measured."""
        side = min(sides_of(self.job))
        supply = self.supply(SMALLEST_BATCH, side)
        try:
            self.step(supply)
        except (RuntimeError, MemoryError, TrainingError) as error:
            if (short := shortage(error)) is None:
                raise
            raise JobError(
                f"{SMALLEST_BATCH} images at {side} px: a step takes more memory than there is: "
                f"choose a smaller network or resolution"
                f"{', or fewer workers' * (self.group.size > 1)} ({in_words(short)})"
            ) from error
        while self._precision in NARROW and not self.scale.good_steps and self.scale.scale > 1:
            self.step(supply)  # the scale was too large: the step before was left out

    def _update(self) -> Updater:
        return Updater(self.trained, self.optimizer, clip_norm=self.job.clip_norm)

    def _weights(self) -> tuple[Tensor, ...]:
        return (*self.network.parameters(), *self.network.buffers())

    def _network(self, classes: int) -> nn.Module:
        job = self.job
        network = build_network(
            job.network,
            classes=classes,
            side=self.side,
            dropout=job.dropout,
            seed=job.seed,
            arguments=job.network_args,
        )
        if job.weights:
            load_weights(network, job.weights)
        freeze(network, job.frozen)
        return network

    def supply(self, size: int, resolution: int) -> Callable[[], Batch]:
        """A function that makes a training batch of ``size`` samples each time it is called."""
        self.release()
        return self.batches.supply(size, resolution)

    def release(self) -> None:
        """Drop the memory that earlier steps hold, so that it is not weighed with later ones."""
        self._early.drop()
        self.graphs.forget()

    def stream(self, feed: Feed, sizes: Sequence[int], resolution: int) -> Iterator[Batch]:
        """Endless batches of random samples, whose sizes cycle through ``sizes``."""
        self.graphs.forget()
        return self.batches.stream(feed, sizes, resolution)

    @property
    def first_steps(self) -> int:
        """Number of steps after a `supply` or `stream` that record their passes."""
        return int(self.graphs.on)

    def close(self) -> None:
        """End the loader processes, and drop the recorded passes."""
        self.graphs.end()
        self.batches.close()

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch, in the job's precision."""
        return self.outputs_and_loss(batch)[1]

    def outputs_and_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The network's outputs (n, classes) for a batch, and its mean loss."""
        images, labels = batch
        with autocast(self._precision, self.device):
            outputs = self.network(images)
            return outputs, self._loss(outputs, labels)

    def step(self, *supplies: Callable[[], Batch]) -> tuple[float, float]:
        """One whole training step, of a micro-batch from each of ``supplies``.

        Returns:
            Seconds of input, forward, backward and update; and seconds of waiting for the part of
            the gradients' exchange that the backward pass did not hide.
        """
        meter, clock = EpochMeter(), self._clock
        clock.restart()
        share = 1 / (self.group.size * len(supplies))
        with self.graphs.as_trained():
            own = self._backward(supplies, [share] * len(supplies))
        self._set_rates(own)
        supply = supplies[0]
        if isinstance(supply, RandomBatches) and supply.made_on_gpu and not own.missing:
            self._early = supply
            supply.ask()
        clock.lap(meter, "compute")
        self._finish(own, share, meter)
        # On a GPU the update may still be running. It then counts in the time of the next step, as
        # the update before counts in this one; nothing waits for it, as in a training.
        clock.lap(meter, "compute")
        return meter.compute, meter.communication

    def try_step(self, supply: Callable[[], Batch]) -> bool:
        """Take a step if it fits into memory on all workers; else change nothing."""
        share = 1 / self.group.size
        with self.graphs.as_trained():
            own = self._backward_if_it_fits([supply], [share])
        self._set_rates(own)
        return self._finish(own, share).fits

    def train(
        self,
        supplies: Sequence[Callable[[], Batch]],
        shares: Sequence[float],
        stop: float = 0.0,
    ) -> StepResult:
        """One step of a training, if it fits, at the optimizer's present rates.

        Args:
            supplies: Each returns a micro-batch of this worker.
            shares: Share of each micro-batch in the step's samples over all workers.
            stop: 1 where this worker wants to stop after the step, else 0.
        """
        with self.graphs.as_trained():
            own = self._backward_if_it_fits(supplies, shares)
        return self._finish(replace(own, stop=stop), shares[-1])

    @contextmanager
    def training(self, optimizer: OptimizerName, rate: float) -> Iterator[torch.optim.Optimizer]:
        """Inside, the bench has its starting weights and a new optimizer.

        Afterwards it has the starting weights and its former optimizer again. After an error
        nothing is restored, as the worker ends.

        Raises:
            JobError: The network has nothing for this optimizer to do.
        """
        usual, updater = self.optimizer, self._updater
        self.optimizer = build_optimizer(self.network, self.job, rate, name=optimizer)
        self._updater = self._update()
        usual.state.clear()  # a training would not have a second state in memory
        self.scale = LossScale.of(self._precision)
        self.graphs.forget()
        self.start_over()
        yield self.optimizer
        self.optimizer, self._updater = usual, updater
        updater.clear()
        self._take_first_step()
        self.start_over()

    def _backward_if_it_fits(
        self, supplies: Sequence[Callable[[], Batch]], shares: Sequence[float]
    ) -> Tally:
        own = if_it_fits(partial(self._backward, supplies, shares))
        return own or Tally(weight=0.0, loss=0.0, missing=1.0)

    def _backward(self, supplies: Sequence[Callable[[], Batch]], shares: Sequence[float]) -> Tally:
        """Forward and backward passes of the micro-batches, weighted by their shares."""
        first: object = supplies[0]
        if self._early is not first:
            self._early.drop()
            self._early = NO_BATCHES
        weight = 0.0
        loss: float | Tensor = 0.0
        for place, (supply, share) in enumerate(zip(supplies, shares, strict=True)):
            last = place == len(shares) - 1
            if last:
                self._reduction.arm()
            batch = supply()
            mean = self._pass(batch, share)
            if mean is None:
                return Tally(weight=0.0, loss=0.0, missing=1.0)
            samples = len(batch[1])
            weight, loss = weight + samples, samples * mean + loss
            if not last:
                self._reduction.take(share)
        return Tally(weight=weight, loss=loss)

    def _pass(self, batch: Batch, share: float) -> Tensor | None:
        """Passes of a micro-batch; its mean loss on the device, `None` if the compiler failed."""
        loss = self.loss(batch)
        try:
            with torch.autocast(self.device.type, enabled=False):
                self.scale.scaled(loss, share).backward()
        except Exception as error:  # a backward pass is compiled at its first call
            if is_out_of_memory(error) or not self.compilation.gives_up(error):
                raise
            return None
        return loss.detach().double()

    def _set_rates(self, own: Tally) -> None:
        """Set the rates of a measured step, in proportion to its batch.

        The batch may be tiny, and at the base batch's rate the weights would soon be infinite.
        """
        share = min(1.0, own.weight * self.group.size / self.job.base_batch)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = share * parameters.setdefault("initial_lr", parameters["lr"])

    def _finish(self, own: Tally, share: float, meter: EpochMeter | None = None) -> StepResult:
        """Exchange and update, as `Session` does; adds the seconds of the exchange to ``meter``."""
        failed = bool(self.compilation.failure) and not self._failure_shared
        updater, scale, ahead = self._updater, self.scale, None
        narrow = self._precision in NARROW
        # Factors of 1 take as long as other factors, and change nothing.
        factors = None if self.job.ags.factors == "off" else torch.ones(len(self.trained))
        if not own.missing:
            weight = own.weight * self.group.size  # all workers have equally many samples here
            ahead = updater.ahead(weight, factors, self._early, self._clock, waits=narrow)
        tally = self._reduction.finish(replace(own, uncompiled=float(failed)), share, ahead)
        self._clock.lap(meter or EpochMeter(), "communication")
        if tally.uncompiled:
            self.share_failure(self.group)
            self._failure_shared = True
        if tally.missing:
            updater.clear()
            return StepResult(fits=False)
        norms = updater.rescale(tally, 1 / scale.scale)
        finite = tally.went_ahead or updater.apply(norms, factors)
        if narrow:
            self.scale = scale.after(good=finite)
        if not finite and scale.scale == 1:  # else only the scale was too large, and is halved
            self.broken_steps += 1
            self.start_over()
            self.optimizer.step()  # so that the optimizer has its state, as after any step
        updater.clear()
        return StepResult(finite=finite or scale.scale > 1, stopped=bool(tally.stop))

    def share_failure(self, group: Group) -> bool:
        """Compute uncompiled if compiling has failed on any worker of ``group``; whether it has."""
        reasons = group.gather(self.compilation.failure)
        self.compilation.failure = next(filter(None, reasons), "")
        return bool(self.compilation.failure)

    def start_over(self) -> None:
        """Restore the starting weights: a diverged network computes with NaN and never updates."""
        with torch.no_grad():
            for tensor, start in zip(self._weights(), self._start, strict=True):
                tensor.copy_(start)
            for parameter in self.trained:
                states = self.optimizer.state.get(parameter, {}).values()
                for value in (parameter.grad, *states):
                    if torch.is_tensor(value):
                        value.zero_()

    @property
    def _reduction(self) -> Reducer:
        assert self._reducer is not None  # noqa: S101 - `join` makes one
        return self._reducer

    def live_bytes(self) -> int:
        """Bytes of weights, buffers, optimizer state and reduction buffers between two steps."""
        return lasting_bytes(self.network, self.optimizer) + self._reduction.buffer_bytes

    def parts(self) -> MemoryParts:
        """Bytes that a step takes whatever the batch; the reduction's as with several workers."""
        states = self.optimizer.state.values()
        return MemoryParts(
            parameters=bytes_of(self.network.parameters()),
            buffers=bytes_of(self.network.buffers()),
            gradients=bytes_of(self.trained),
            optimizer=bytes_of(v for state in states for v in state.values() if torch.is_tensor(v)),
            reduction=buffer_bytes(self.trained, per_tensor=self._per_tensor),
        )


def sides_of(job: Job) -> tuple[int, ...]:
    """The resolutions of a resolved job, in pixels."""
    if job.resolutions == "auto":
        raise JobError("resolutions=auto must be resolved before measuring")
    return job.resolutions


def if_it_fits(work: Callable[[], Result]) -> Result | None:
    """The result of ``work``; `None` where memory runs out, in an update too."""
    try:
        return work()
    except (RuntimeError, MemoryError, TrainingError) as error:
        if shortage(error) is None:
            raise
    return None


def shortage(error: Exception) -> Exception | None:
    """The error that says that memory ran out: this one or, of an update, its cause; or `None`."""
    found = error.__cause__ if isinstance(error, TrainingError) else error
    return found if isinstance(found, Exception) and is_out_of_memory(found) else None
