"""The public handle: a user's own training loop, run as a plan says, in a few changed lines.

    with bw.Session(model, optimizer, dataset, plan="plan.json", run_folder="runs/a") as session:
        for epoch in session.epochs():
            for images, labels in session.batches():
                session.step(criterion(model(images), labels))
            session.evaluate(test_set, accuracy)

Start it with ``torchrun --nproc-per-node N script.py``, or as a plain script for one worker.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from batchwright.documents import read_record
from batchwright.errors import DeadlineReached, Interrupted, PlanError
from batchwright.group import Group
from batchwright.records import Plan, Stage
from batchwright.reduction import Reducer
from batchwright.training.clock import StepClock
from batchwright.training.evaluation import (
    Forward,
    Metric,
    evaluate,
    outputs_and_labels,
)
from batchwright.training.feeding import Batch, DatasetFeed, Feed, ImagePart, PipelineFeed
from batchwright.training.keeper import Keeper, RunState
from batchwright.training.meter import EpochMeter
from batchwright.training.recalibration import calibrating_batches, recalibrated
from batchwright.training.recorder import Recorder
from batchwright.training.sampler import Step, micro_batches
from batchwright.training.sharing import Sharing, share_of
from batchwright.training.signals import StopRequest
from batchwright.training.staging import StageSettings
from batchwright.training.stepper import Loss, Stepper
from batchwright.training.update import Updater
from batchwright.workload.host import (
    autocast,
    is_out_of_memory,
    prepare_process,
    worker_threads,
)
from batchwright.workload.pipeline import ImagePipeline


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
        sample_weights: How often each sample is drawn relative to the others, shape (samples,);
            drawn with replacement. ``None``: each exactly once per epoch.
        exit_on_stop: After a stop signal and its checkpoint, end the process with code 128 + the
            signal's number; ``False`` raises `Interrupted` instead.

    Attributes:
        plan: The plan that is followed.
        device: Where batches arrive.
        rank: This worker.
        world_size: Number of workers.

    Raises:
        PlanError: The plan is for another number of workers (unless a run goes on), other data or
            several resolutions that nothing resizes.
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
        sample_weights: Tensor | None = None,
        exit_on_stop: bool = True,
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else read_record(plan, Plan)
        self.model, self.optimizer = model, optimizer
        self.device = next(model.parameters()).device
        self._clip_norm = clip_norm or self.plan.job.clip_norm
        self._own_rates = learning_rate == "mine"
        self._exit_on_stop = exit_on_stop
        self._loading = {
            "images": images, "resize": resize, "collate": collate, "loaders": loaders
        }  # fmt: skip
        self._sides = [stage.resolution for stage in self.plan.stages]
        self._top = max(self.plan.stages, key=lambda stage: stage.resolution)
        self._held_out: tuple[Dataset[Any] | ImagePipeline, Feed] | None = None
        prepare_process(worker_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self._group = Group(self.device, self.plan.job.timeout)
        self._stop = StopRequest()
        try:
            folder = Path(run_folder) if run_folder else None
            self._open(dataset, folder, resume=resume, sample_weights=sample_weights)
        except BaseException:
            self._close()
            raise

    def _open(
        self,
        dataset: Dataset[Any] | ImagePipeline,
        folder: Path | None,
        *,
        resume: bool,
        sample_weights: Tensor | None,
    ) -> None:
        first_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._feed = self._feed_of(dataset)
        again = folder is not None and self._group.started_again(folder)
        going_on = resume or again
        self._check_data()
        self._settings = StageSettings(self.model, self._feed, self.plan)
        _refuse_synchronized_on_cpu(self.model, self.device)
        trained = _all_parameters(self.model, self.optimizer)
        self._group.share((*trained, *self.model.buffers()))
        self._folder, self._state, self._clock = folder, RunState(), StepClock()
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
        self._keeper.prepare(may_exist=going_on)
        if going_on:
            self._keeper.restore(self._state)
        least = 2 if any(isinstance(m, _BatchNorm) for m in self.model.modules()) else 1
        self._check_workers(least, going_on=going_on)
        self._sharing = Sharing(
            self.plan,
            self._group,
            self._state,
            self._recorder,
            samples=len(self._feed),
            least=least,
            weights=_checked_weights(sample_weights, len(self._feed)),
        )
        self._reducer = Reducer(trained, self._group)
        updater = Updater(
            self._reducer.parameters,
            self.optimizer,
            self.plan,
            first_rates=first_rates,
            clip_norm=self._clip_norm,
            own_rates=self._own_rates,
            samples_per_epoch=len(self._feed),
        )
        self._stepper = Stepper(
            self.plan,
            self._group,
            self._state,
            self._reducer,
            updater,
            self._sharing,
            self._clock,
            self._wishes,
        )
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
        return self._state.stage(self.plan)

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """Samples per step of each worker, in rank order, as they are now."""
        return self._sharing.local_batch_sizes

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
            self._settings.enter(self.stage)
            self._sharing.begin_epoch()
            yield epoch
            self._end_epoch()

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the current epoch, on the device, at the stage's resolution.

        Between a batch and its `step`, autocast is on if the plan computes in bfloat16.

        Raises:
            Interrupted: A stop signal came, or the time was up; a checkpoint was written.
            RuntimeError: A batch was taken without a `step` for the one before.
        """
        walk, state = self._sharing.walk, self._state
        if walk is None:
            raise RuntimeError(
                "session.batches() outside of session.epochs(): loop over the epochs first"
            )
        fed = self._feed.training(walk.ahead(), state.epoch, self.stage.resolution)
        self._clock.restart()
        try:
            while state.step < len(walk):
                index = state.step
                step = walk.step(index)
                yield from self._passes(step, self._fed(fed, walk.parts(index)))
                while self._stepper.repeat:
                    again = self._cut(walk.cut(step, self._sharing.micro_batch_size))
                    yield from self._passes(step, again)
                self._after_step(step)
        finally:
            self._stepper.leave_autocast()

    def step(self, loss: Loss | None = None, *, weight: float | None = None) -> bool:
        """Backward pass; after the step's last micro-batch also exchange, check, clip and update.

        Where memory runs out, all workers get the samples of this step once more, this one in
        smaller micro-batches: simply go on with the loop. Out of the backward pass that works for
        any loss, out of the forward pass for a function.

        Args:
            loss: Mean loss of the micro-batch's samples, a scalar, or a function without arguments
                that computes it; ``None`` if `backward` was called for all its parts.
            weight: What the loss is the mean over, if not the samples of the micro-batch (for
                example labelled pixels); with 0 the loss is not looked at.

        Returns:
            Whether the weights were updated: not before the last micro-batch of a step, and not
            where a gradient was infinite or not a number, or memory ran out.

        Raises:
            RuntimeError: No batch is open, or no parameter got a gradient.
            LostWorkerError: Another worker is gone.
            TrainingError: Gradients were not finite for many steps in a row, or not even the
                smallest micro-batch fits into memory.
        """
        return self._stepper.step(loss, weight)

    def backward(self, loss: Loss, *, weight: float | None = None) -> None:
        """One of several backward passes for the same micro-batch; then call `step` without loss.

        Args:
            loss: As for `step`; the parts' losses add up.
            weight: As for `step`, and the same for all parts.

        Raises:
            RuntimeError: No batch is open.
            ValueError: A part before had another weight.
        """
        self._stepper.backward(loss, weight)

    def evaluate(
        self,
        dataset: Dataset[Any] | ImagePipeline,
        metric: Metric,
        *,
        forward: Forward = outputs_and_labels,
        batch_size: int | None = None,
        model: nn.Module | None = None,
    ) -> dict[str, float]:
        """Mean of a metric over a held-out set, each sample counted once over all workers.

        Stands outside the training clock. Batch normalization uses all workers' statistics.

        Args:
            dataset: Map-style, or an `ImagePipeline`.
            metric: f(outputs, labels) -> a value for each sample, shape (n,), or a dict of such;
                a bool tensor is taken as top-1 accuracy. The first decides which checkpoint is
                ``best`` (more is better).
            forward: f(model, batch) -> (outputs, labels), for batches other than such pairs.
            batch_size: Samples in one forward pass; unset: the plan's micro-batch at its highest
                resolution, at least 256.
            model: Another than the session's, such as an average of its weights.

        Returns:
            The mean of each value, over all samples; the same on all workers.

        Raises:
            DataError: The data set is empty, or can only be iterated.
            ValueError: The metric gave something else than one value for each sample.
            Interrupted: A stop signal came; a checkpoint was written.
        """
        started = time.perf_counter()
        cast = partial(autocast, self.plan.precision, self.device)
        with self._recalibrated(model or self.model, forward, cast):
            sums, count, stopped = evaluate(
                model or self.model,
                self._held_out_feed(dataset),
                metric,
                group=self._group,
                stop=self._stop,
                batch_size=batch_size or max(256, self._top.micro_batch_size),
                resolution=None,
                forward=forward,
                autocast=cast,
                shares=self.local_batch_sizes,
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
                self._keeper.settle()  # nobody leaves before checkpoints and summary are there
            elif is_out_of_memory(error):
                error.add_note(
                    "batchwright repeats such a step in smaller micro-batches if session.step() "
                    "gets a function that computes the loss: "
                    "session.step(lambda: criterion(model(images), labels))"
                )
        finally:
            self._close()
        if isinstance(error, Interrupted) and self._exit_on_stop:
            if self.rank == 0:
                kept = f"; continue with resume=True in {self._folder}" if self._folder else ""
                print(f"batchwright: {error}{kept}", file=sys.stderr)  # noqa: T201 - the user's script has no other channel
            raise SystemExit(error.exit_code) from None

    # ----------------------------------------------------------------------------- micro-batches

    def _fed(self, fed: Iterator[Batch], parts: list[Tensor]) -> Iterator[tuple[int, Batch]]:
        """This worker's micro-batches of a step, as (samples, batch), out of the feed.

        One that the feed was asked for before memory ran out is cut again.
        """
        most = self._sharing.micro_batch_size
        for part in parts:
            batch = next(fed)
            if len(part) <= most:
                yield len(part), batch
            else:
                sizes = micro_batches(len(part), most, self._sharing.least)
                yield from self._cut(list(part.split(sizes)))

    def _cut(self, parts: list[Tensor]) -> Iterator[tuple[int, Batch]]:
        """The same, fetched here and now."""
        for part in parts:
            yield len(part), self._feed.single(part, self._state.epoch, self.stage.resolution)

    def _passes(self, step: Step, source: Iterator[tuple[int, Batch]]) -> Iterator[Batch]:
        """Yield the micro-batches of a step; all of them are taken from the source in any case."""
        left, stepper = step.local_batch_sizes[self.rank], self._stepper
        stepper.repeat = False
        if not left:
            stepper.step_without_samples(step)
        for samples, batch in source:
            if stepper.repeat:
                continue  # memory ran out: the rest of the step is in vain
            self._clock.lap(self._state.meter, "input")
            left -= samples
            stepper.open(samples, step, last=not left)
            yield batch
            stepper.leave_autocast()
            stepper.refuse_open()

    def _after_step(self, step: Step) -> None:
        """What all workers do together once the user's loop is done with a step."""
        self._keeper.check()
        walk, tally = self._sharing.walk, self._stepper.tally
        assert walk is not None  # noqa: S101 - `batches` has looked
        self._recorder.step(self._state.meter, len(walk), step.local_batch_sizes, tally.notes)
        if tally.stop:
            self._stop_now()
        if tally.checkpoint:
            self._checkpoint("last")

    def _wishes(self) -> tuple[bool, bool]:
        """Whether to stop, and whether to write a checkpoint, after the step in progress."""
        most = self.plan.job.goal.deadline
        time_is_up = self.rank == 0 and most is not None and self._recorder.wall_seconds > most
        return self._stop.number > 0 or time_is_up, self._keeper.due(self._state.steps + 1)

    # ------------------------------------------------------------------- epochs and checkpoints

    def _end_epoch(self) -> None:
        walk, meter, state = self._sharing.walk, self._state.meter, self._state
        if walk is not None and state.step < len(walk):
            raise RuntimeError(
                f"epoch {state.epoch + 1} ended after {state.step} of {len(walk)} steps: "
                "go through all of session.batches()"
            )
        self._sharing.end_epoch()
        own = meter.worker_time(self._group.places[self.rank], meter.shares[-1][1][self.rank])
        workers = self._group.gather(own)
        record = meter.record(self.stage, workers, self.noise_scale)
        self._recorder.epochs.append(record)  # before the checkpoint, which must know of it
        state.epoch, state.step = state.epoch + 1, 0
        self._save_if_due()
        self._recorder.epoch(record.model_copy(update={"checkpoint_seconds": meter.checkpoint}))

    def _save_if_due(self) -> None:
        """Write ``best`` where the score rose, ``last`` when it is due and at the end."""
        meter, state = self._state.meter, self._state
        if meter.scores:
            score = next(iter(meter.scores.values())) / meter.score_count
            if score > state.best_score:
                state.best_score = score
                self._checkpoint("best")
        if any(
            self._group.gather(self._keeper.due(state.steps) or state.epoch == self.plan.epochs)
        ):
            self._checkpoint("last")

    def _checkpoint(self, name: str) -> None:
        share = share_of(self.local_batch_sizes, self.rank)
        self._state.meter.checkpoint += self._keeper.save(name, self._state, share)
        self._clock.restart()

    def _stop_now(self) -> None:
        """All workers together: save and leave."""
        number = max(self._group.gather(self._stop.number))
        self._checkpoint("last")
        self._keeper.settle()
        where = f"epoch {self._state.epoch + 1}, step {self._state.step}"
        if number:
            raise Interrupted(number, f"stopped by signal {number} at {where}")
        raise DeadlineReached(
            f"goal.deadline={self.plan.job.goal.deadline:g} s was reached at {where}; to go on, "
            "resume with a later one"
        )

    def _recalibrated(
        self, model: nn.Module, forward: Forward, cast: Callable[[], torch.autocast]
    ) -> AbstractContextManager[None]:
        """Statistics of batch normalization for an evaluation, if the job asks for new ones."""
        walk = self._sharing.walk
        if not self.plan.job.cycle.recalibrate or walk is None:
            return nullcontext()
        batches = calibrating_batches(
            self._feed,
            self.plan,
            walk.order,
            epoch=self._state.epoch,
            shares=self.local_batch_sizes,
            rank=self.rank,
            between_epochs=self._state.step == len(walk),
        )
        return recalibrated(model, batches, self._group, forward=forward, autocast=cast)

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

    def _check_data(self) -> None:
        planned, found = self.plan.data.train_samples, len(self._feed)
        if planned != found:
            raise PlanError(
                f"the plan is for {planned} training samples and the data set has {found}: "
                "probe and plan again for this data"
            )

    def _check_workers(self, least: int, *, going_on: bool) -> None:
        """A run may go on with other workers than it began with; it begins as planned."""
        planned, found = self.plan.workers, self.world_size
        if planned == found:
            return
        if not going_on:
            raise PlanError(
                f"the plan is for {planned} worker(s) and {found} are running: "
                f"start {planned}, or plan again with workers={found}"
            )
        batch = min(stage.global_batch_size for stage in self.plan.stages)
        if batch < least * found:
            raise PlanError(
                f"the global batch of {batch} is too small for the {found} workers that are "
                f"running, each needs at least {least}: start fewer"
            )
        self._recorder.note(f"going on with {found} workers, planned were {planned}")

    def _close(self) -> None:
        if hasattr(self, "_reducer"):
            self._reducer.close()
        if hasattr(self, "_keeper"):
            self._keeper.close()
        self._stop.close()
        self._group.close()


def _checked_weights(weights: Tensor | None, samples: int) -> Tensor | None:
    if weights is None:
        return None
    weights = weights.detach().to("cpu", torch.float64)
    bad = weights.shape != (samples,) or not bool(torch.isfinite(weights).all())
    if bad or bool((weights < 0).any()) or not bool(weights.sum() > 0):
        raise ValueError(
            f"sample_weights of shape {tuple(weights.shape)} for {samples} samples: give one "
            "finite number for each, none negative and not all 0"
        )
    return weights


def _refuse_synchronized_on_cpu(model: nn.Module, device: torch.device) -> None:
    if device.type == "cpu" and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        raise PlanError(
            "SyncBatchNorm computes on GPUs only: on the CPU use plain BatchNorm, whose statistics "
            "are merged over the workers for evaluation and checkpoints"
        )


def _all_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's, in its order, then others that the optimizer has, such as a loss's own."""
    parameters = dict.fromkeys(model.parameters())
    for group in optimizer.param_groups:
        parameters.update(dict.fromkeys(group["params"]))
    return list(parameters)
