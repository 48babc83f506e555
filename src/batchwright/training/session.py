"""The public handle: a user's own training loop, run as a plan says, in a few changed lines.

    with bw.Session(model, optimizer, dataset, plan="plan.json", run_folder="runs/a") as session:
        for epoch in session.epochs():
            for images, labels in session.batches():
                session.step(criterion(model(images), labels))
            session.evaluate(test_set, accuracy)

Start it with ``torchrun --nproc-per-node N script.py``, or as a plain script for one worker.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from batchwright.documents import read_record
from batchwright.errors import Interrupted, PlanError, TrainingError
from batchwright.group import Group, naming_the_lost
from batchwright.planning.learning_rate import rate_factor
from batchwright.records import Plan, Stage
from batchwright.reduction import Reducer, Tally, sqr_norms
from batchwright.training.evaluation import (
    Forward,
    Metric,
    evaluate,
    outputs_and_labels,
)
from batchwright.training.feeding import Batch, DatasetFeed, Feed, ImagePart, PipelineFeed
from batchwright.training.keeper import Keeper, RunState
from batchwright.training.meter import EpochMeter
from batchwright.training.recorder import Recorder
from batchwright.training.sampler import Step, epoch_order, epoch_steps, micro_batches
from batchwright.training.signals import StopRequest
from batchwright.workload.host import autocast, prepare_process, worker_threads
from batchwright.workload.pipeline import ImagePipeline

NOISE_DECAY = 0.98  # the noise scale looks back about 50 steps
MOST_BAD_STEPS = 20  # in a row, before a run with infinite gradients gives up


@dataclass
class _MicroBatch:
    """The micro-batch the user's loop works on now."""

    samples: int
    last: bool
    step: Step
    weight: float | None = None  # what its losses are means over, once there is one


class Session:
    """Feeds batches, exchanges gradients, updates, evaluates, records and checkpoints.

    The model is used as it is, never wrapped. The plan's rate is a factor on each parameter group's
    own initial rate: build the optimizer with the rate that holds at the plan's base batch.

    Args:
        model: On its device already. All workers start from rank 0's weights.
        optimizer: Of the model's parameters.
        dataset: Map-style data set, or an `ImagePipeline`.
        plan: What to do, or the path of its file.
        run_folder: Where metrics, checkpoints and the summary go; ``None`` keeps none.
        resume: Continue from ``run_folder``; after a restart by torchrun this happens by itself.
        clip_norm: Largest global gradient norm; ``None``: as the plan's job says.
        learning_rate: ``"mine"`` leaves the optimizer's rates alone.
        images: Where the image is in a tuple or dict batch (index or key), for resizing.
        resize: Resizes a whole batch instead: f(batch, resolution in pixels) -> batch.
        collate: As `torch.utils.data.DataLoader` takes it.
        loaders: Loader processes for a map-style data set.
        exit_on_stop: After a stop signal and its checkpoint, end the process with code 128 + the
            signal's number; ``False`` raises `Interrupted` instead.

    Attributes:
        plan: The plan that is followed.
        device: Where batches arrive.
        rank: This worker.
        world_size: Number of workers.

    Raises:
        PlanError: The plan is for another number of workers, other data or several resolutions
            that nothing resizes.
        FileError: The run folder holds a run already, or cannot be written.
        DataError: The data set can only be iterated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any] | ImagePipeline,
        *,
        plan: Plan | str | Path,
        run_folder: str | Path | None = None,
        resume: bool = False,
        clip_norm: float | None = None,
        learning_rate: Literal["plan", "mine"] = "plan",
        images: ImagePart | None = None,
        resize: Callable[[Batch, int], Batch] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 2,
        exit_on_stop: bool = True,
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else read_record(plan, Plan)
        self.model, self.optimizer = model, optimizer
        self.device = next(model.parameters()).device
        self._clip_norm = clip_norm or self.plan.job.clip_norm
        self._own_rates = learning_rate == "mine"
        self._exit_on_stop = exit_on_stop
        self._first_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._loading = {
            "images": images, "resize": resize, "collate": collate, "loaders": loaders
        }  # fmt: skip
        self._sides = [stage.resolution for stage in self.plan.stages]
        self._held_out: tuple[Dataset[Any] | ImagePipeline, Feed] | None = None
        prepare_process(worker_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self._group = Group(self.device, self.plan.job.timeout)
        self._stop = StopRequest()
        try:
            self._open(dataset, Path(run_folder) if run_folder else None, resume)
        except BaseException:
            self._close()
            raise

    def _open(
        self, dataset: Dataset[Any] | ImagePipeline, folder: Path | None, resume: bool
    ) -> None:
        self._feed = self._feed_of(dataset)
        self._check_plan()
        trained = _all_parameters(self.model, self.optimizer)
        self._share_first_weights(trained)
        self._reducer = Reducer(trained, self._group)
        self._least = 2 if any(isinstance(m, _BatchNorm) for m in self.model.modules()) else 1
        self._state = RunState()
        self._steps: list[Step] = []
        self._micro: _MicroBatch | None = None
        self._cast: torch.autocast | None = None
        self._tally: Tally | None = None
        self._weight = self._loss = 0.0
        self._bad_steps = 0
        self._mark = time.perf_counter()
        self._folder = folder
        self._recorder = Recorder(folder if self.rank == 0 else None, self.plan)
        self._keeper = Keeper(
            folder,
            self.plan,
            self.model,
            self.optimizer,
            self._group,
            self._recorder,
            self._feed.description(),
        )
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self._keeper.prepare(may_exist=resume or restarted)
        if resume or restarted:
            self._keeper.restore(self._state)
        rule = self.plan.learning_rate
        if self._own_rates and rule.peak != rule.base:
            warnings.warn(
                f"learning_rate='mine': the plan wanted {rule.peak / rule.base:.3g} times your "
                f"rate at global batch {self.stage.global_batch_size}",
                stacklevel=3,
            )

    # ------------------------------------------------------------------------------ the contract

    @property
    def rank(self) -> int:
        """This worker, from 0."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._group.size

    @property
    def stage(self) -> Stage:
        """The plan's row that the current epoch belongs to."""
        return self.plan.stages[self.plan.stage_of(min(self._state.epoch, self.plan.epochs - 1))]

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale so far, in samples; ``None`` with one worker or too few steps."""
        return self._state.noise.noise_scale

    def keep(self, name: str, thing: Any) -> None:
        """Put anything with a ``state_dict`` (an average of weights, a scaler) into checkpoints.

        On a resumed run its state is loaded at once.
        """
        self._keeper.keep(name, thing)

    def epochs(self) -> Iterator[int]:
        """The zero-based epochs that are left to train."""
        self._recorder.training_begins()
        while self._state.epoch < self.plan.epochs:
            epoch = self._state.epoch
            if self._state.meter.epoch != epoch or not self._state.step:
                self._state.meter = EpochMeter(epoch=epoch)
            shares = self.stage.local_batch_sizes
            self._steps = epoch_steps(len(self._feed), shares, self._least)
            yield epoch
            self._end_epoch()

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the current epoch, on the device, at the stage's resolution.

        Between a batch and its `step`, autocast is on if the plan computes in bfloat16.

        Raises:
            Interrupted: A stop signal came; a checkpoint was written.
            RuntimeError: A batch was taken without a `step` for the one before.
        """
        stage, epoch = self.stage, self._state.epoch
        upcoming = self._steps[self._state.step :]
        order = epoch_order(len(self._feed), epoch, self.plan.job.seed)
        parts = [self._parts(step, order, stage) for step in upcoming]
        fed = self._feed.training([p for part in parts for p in part], epoch, stage.resolution)
        self._mark = time.perf_counter()
        try:
            for step, step_parts in zip(upcoming, parts, strict=True):
                for index, indices in enumerate(step_parts):
                    batch = next(fed)
                    self._lap("input")
                    self._micro = _MicroBatch(
                        len(indices), last=index == len(step_parts) - 1, step=step
                    )
                    self._enter_autocast()
                    yield batch
                    self._leave_autocast()
                    if self._micro is not None:
                        raise RuntimeError(
                            "session.batches() was asked for the next batch before session.step() "
                            "was called for this one: call step(loss) once for each batch"
                        )
                self._after_step()
        finally:
            self._leave_autocast()

    def step(self, loss: Tensor | None = None, *, weight: float | None = None) -> bool:
        """Backward pass; after the step's last micro-batch also exchange, check, clip and update.

        Args:
            loss: Mean loss of the micro-batch's samples, a scalar; ``None`` if `backward` was
                called for all its parts.
            weight: What the loss is the mean over, if not the samples of the micro-batch (for
                example labelled pixels).

        Returns:
            Whether the weights were updated: not before the last micro-batch of a step, and not
            where a gradient was infinite or not a number.

        Raises:
            RuntimeError: No batch is open, or no parameter got a gradient.
            LostWorkerError: Another worker is gone.
            TrainingError: Gradients were not finite for many steps in a row.
        """
        micro = self._open_micro()
        if loss is not None:
            if micro.last:
                self._reducer.arm()
            self.backward(loss, weight=weight)
        self._leave_autocast()
        self._micro = None
        if not micro.last:
            return False
        return self._update(micro.step)

    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """One of several backward passes for the same micro-batch; then call `step` without loss.

        Args:
            loss: As for `step`; the parts' losses add up.
            weight: As for `step`, and the same for all parts.

        Raises:
            RuntimeError: No batch is open.
            ValueError: A part before had another weight.
        """
        micro = self._open_micro()
        mean_over = float(micro.samples if weight is None else weight)
        if micro.weight is None:
            micro.weight = mean_over
            self._weight += mean_over
        elif micro.weight != mean_over:
            raise ValueError(
                f"weight={mean_over:g} after weight={micro.weight:g}: the losses of one "
                "micro-batch must be means over the same weight to add up"
            )
        with torch.autocast(self.device.type, enabled=False):
            (loss * (mean_over / micro.step.samples)).backward()
        self._loss += float(loss.detach()) * mean_over

    def evaluate(
        self,
        dataset: Dataset[Any] | ImagePipeline,
        metric: Metric,
        *,
        forward: Forward = outputs_and_labels,
        batch_size: int | None = None,
    ) -> dict[str, float]:
        """Mean of a metric over a held-out set, each sample counted once over all workers.

        Stands outside the training clock. Batch normalization uses all workers' statistics.

        Args:
            dataset: Map-style, or an `ImagePipeline`.
            metric: f(outputs, labels) -> a value for each sample, shape (n,), or a dict of such;
                a bool tensor is taken as top-1 accuracy. The first decides which checkpoint is
                ``best`` (more is better).
            forward: f(model, batch) -> (outputs, labels), for batches other than such pairs.
            batch_size: Samples in one forward pass; unset: the stage's micro-batch, at least 256.

        Returns:
            The mean of each value, over all samples; the same on all workers.

        Raises:
            DataError: The data set is empty, or can only be iterated.
            ValueError: The metric gave something else than one value for each sample.
            Interrupted: A stop signal came; a checkpoint was written.
        """
        started = time.perf_counter()
        sums, count, stopped = evaluate(
            self.model,
            self._held_out_feed(dataset),
            metric,
            group=self._group,
            stop=self._stop,
            batch_size=batch_size or max(256, self.stage.micro_batch_size),
            resolution=None,
            forward=forward,
            autocast=self._autocast,
            share=self._share,
        )
        self._state.meter.evaluation += time.perf_counter() - started
        if stopped:
            self._stop_now()
        self._state.meter.scores, self._state.meter.score_count = sums, count
        return {name: value / count for name, value in sums.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._recorder.finish()
                self._group.barrier()  # nobody leaves before the summary is there
        finally:
            self._close()
        if isinstance(error, Interrupted) and self._exit_on_stop:
            if self.rank == 0:
                kept = f"; continue with resume=True in {self._folder}" if self._folder else ""
                print(f"batchwright: {error}{kept}", file=sys.stderr)  # noqa: T201 - the user's script has no other channel
            raise SystemExit(error.exit_code) from None

    # --------------------------------------------------------------------------------- the update

    def _update(self, step: Step) -> bool:
        parameters = self._reducer.parameters
        if all(p.grad is None for p in parameters):
            raise RuntimeError(
                "session.step() found no gradient: is the loss computed from the session's model, "
                "and is any parameter trained (requires_grad)?"
            )
        own = Tally(
            weight=self._weight,
            loss=self._loss,
            stop=float(self._stop.number),
            checkpoint=float(self.rank == 0 and self._keeper.due),
        )
        self._weight = self._loss = 0.0
        self._lap("compute")
        tally = self._reducer.finish(own, step.local_batch_sizes[self.rank] / step.samples)
        self._lap("communication")
        sqr_norm = self._rescale(step, tally)
        self._set_rates()
        updated = math.isfinite(sqr_norm) and tally.weight > 0
        if updated:
            self._clip(math.sqrt(sqr_norm))
            self.optimizer.step()
        for parameter in parameters:  # those that the optimizer does not have would add up
            parameter.grad = None
        self._count(step, tally, updated)
        self._lap("compute")
        return updated

    def _rescale(self, step: Step, tally: Tally) -> float:
        """Make the summed gradient the mean over the step's weight; returns |g|^2."""
        gradients = [p.grad for p in self._reducer.parameters if p.grad is not None]
        if tally.weight not in (0, step.samples):
            torch._foreach_mul_(gradients, step.samples / tally.weight)
        sqr_norm = float(sqr_norms(self._reducer.parameters).sum())
        if tally.local_sqr_norms is not None and tally.weight == step.samples:
            self._state.noise = self._state.noise.update(
                float(tally.local_sqr_norms.sum()),
                sqr_norm,
                parts=self.world_size,
                batch=step.samples,
                decay=NOISE_DECAY,
            )
        return sqr_norm

    def _clip(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            gradients = [p.grad for p in self._reducer.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self._clip_norm / norm)

    def _set_rates(self) -> None:
        rule = self.plan.learning_rate
        factor = rate_factor(
            self._state.samples_seen,
            rule=rule,
            samples_per_epoch=len(self._feed),
            epochs=self.plan.epochs,
        )
        if not self._own_rates:
            relative = factor * self.stage.learning_rate / rule.base
            for group, first in zip(self.optimizer.param_groups, self._first_rates, strict=True):
                group["lr"] = first * relative
        self._state.meter.rate = float(self.optimizer.param_groups[0]["lr"])

    def _count(self, step: Step, tally: Tally, updated: bool) -> None:
        meter = self._state.meter
        meter.steps += 1
        meter.skipped += not updated
        meter.samples += step.samples
        meter.local_samples += step.local_batch_sizes[self.rank]
        meter.weight += tally.weight
        meter.loss += tally.loss
        self._state.step += 1
        self._state.samples_seen += step.samples
        self._tally = tally
        self._bad_steps = 0 if updated else self._bad_steps + 1
        if self._bad_steps >= MOST_BAD_STEPS:
            raise TrainingError(
                f"gradients were infinite or not a number for {MOST_BAD_STEPS} steps in a row "
                f"(epoch {meter.epoch + 1}, step {meter.steps}): lower learning_rate, now "
                f"{meter.rate:.3g}, or set clip_norm"
            )

    def _after_step(self) -> None:
        """What all workers do together once the user's loop is done with a step."""
        tally, self._tally = self._tally, None
        self._recorder.step(self._state.meter, len(self._steps), self.stage.global_batch_size)
        if tally is not None and tally.stop:
            self._stop_now()
        if tally is not None and tally.checkpoint:
            self._checkpoint("last")

    def _open_micro(self) -> _MicroBatch:
        if self._micro is None:
            raise RuntimeError(
                "session.step() without a batch: call it once for each batch of session.batches()"
            )
        return self._micro

    def _parts(self, step: Step, order: Tensor, stage: Stage) -> list[Tensor]:
        """Indices of this worker's micro-batches in one step."""
        first, last = step.span(self.rank)
        sizes = micro_batches(last - first, stage.micro_batch_size)
        return list(order[first:last].split(sizes))

    def _lap(self, part: Literal["input", "compute", "communication"]) -> None:
        """Book the time since the last lap."""
        now = time.perf_counter()
        setattr(self._state.meter, part, getattr(self._state.meter, part) + now - self._mark)
        self._state.meter.training += now - self._mark
        self._mark = now

    def _autocast(self) -> torch.autocast:
        return autocast(self.plan.precision, self.device)

    def _enter_autocast(self) -> None:
        if self.plan.precision != "float32":
            self._cast = self._autocast()
            self._cast.__enter__()

    def _leave_autocast(self) -> None:
        if self._cast is not None:
            self._cast.__exit__(None, None, None)
            self._cast = None

    # ------------------------------------------------------------------- epochs and checkpoints

    def _end_epoch(self) -> None:
        if self._state.step < len(self._steps):
            raise RuntimeError(
                f"epoch {self._state.epoch + 1} ended after {self._state.step} of "
                f"{len(self._steps)} steps: go through all of session.batches()"
            )
        meter, state = self._state.meter, self._state
        stage = self._stage_at(meter.epoch)
        own = meter.worker_time(stage.local_batch_sizes[self.rank])
        record = meter.record(stage, self._group.gather(own), self.noise_scale)
        self._recorder.epochs.append(record)  # before the checkpoint, which must know of it
        state.epoch, state.step = state.epoch + 1, 0
        self._save_if_due()
        self._recorder.epoch(record.model_copy(update={"checkpoint_seconds": meter.checkpoint}))

    def _stage_at(self, epoch: int) -> Stage:
        return self.plan.stages[self.plan.stage_of(epoch)]

    def _save_if_due(self) -> None:
        """Write ``best`` where the score rose, ``last`` by the clock and at the end."""
        meter, state = self._state.meter, self._state
        if meter.scores:
            score = next(iter(meter.scores.values())) / meter.score_count
            if score > state.best_score:
                state.best_score = score
                self._checkpoint("best")
        if any(self._group.gather(self._keeper.due or state.epoch == self.plan.epochs)):
            self._checkpoint("last")

    @property
    def _share(self) -> float:
        """This worker's share of the samples, b_i / B."""
        return self.stage.local_batch_sizes[self.rank] / self.stage.global_batch_size

    def _checkpoint(self, name: str) -> None:
        self._state.meter.checkpoint += self._keeper.save(name, self._state, self._share)
        self._mark = time.perf_counter()

    def _stop_now(self) -> None:
        """All workers together: save and leave."""
        number = max(self._group.gather(self._stop.number))
        self._checkpoint("last")
        where = f"epoch {self._state.epoch + 1}, step {self._state.step}"
        raise Interrupted(number, f"stopped by signal {number} at {where}")

    # -------------------------------------------------------------------------------------- set-up

    def _held_out_feed(self, dataset: Dataset[Any] | ImagePipeline) -> Feed:
        """The feed of the last evaluated set is kept: its loader processes take time to start."""
        if self._held_out is None or self._held_out[0] is not dataset:
            self._held_out = dataset, self._feed_of(dataset)
        return self._held_out[1]

    def _feed_of(self, dataset: Dataset[Any] | ImagePipeline) -> Feed:
        if isinstance(dataset, ImagePipeline):
            return PipelineFeed(dataset)
        return DatasetFeed(
            dataset,
            device=self.device,
            seed=self.plan.job.seed,
            sides=self._sides,
            **self._loading,  # type: ignore[arg-type] # four keywords of this very call
        )

    def _check_plan(self) -> None:
        if self.plan.workers != self.world_size:
            raise PlanError(
                f"the plan is for {self.plan.workers} worker(s) and {self.world_size} are running: "
                f"start {self.plan.workers}, or plan again with workers={self.world_size}"
            )
        planned, found = self.plan.data.train_samples, len(self._feed)
        if planned != found:
            raise PlanError(
                f"the plan is for {planned} training samples and the data set has {found}: "
                "probe and plan again for this data"
            )

    def _share_first_weights(self, parameters: list[nn.Parameter]) -> None:
        if self.world_size > 1:
            with torch.no_grad(), naming_the_lost():
                for tensor in (*parameters, *self.model.buffers()):
                    dist.broadcast(tensor, src=0)

    def _close(self) -> None:
        if hasattr(self, "_reducer"):
            self._reducer.close()
        self._stop.close()
        self._group.close()


def _all_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's, in its order, then others that the optimizer has, such as a loss's own."""
    parameters = dict.fromkeys(model.parameters())
    for group in optimizer.param_groups:
        parameters.update(dict.fromkeys(group["params"]))
    return list(parameters)
