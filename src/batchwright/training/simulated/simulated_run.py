"""What virtual training stands on, with or without a parameter server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from batchwright.algorithms.simulated_clock import Cluster, StepTime, step_times
from batchwright.distributed.group import Group
from batchwright.errors import DeadlineReached, Interrupted
from batchwright.records import Plan
from batchwright.training.batches.feeding import DatasetFeed, Feed, FileFeed, PipelineFeed
from batchwright.training.batches.sampler import epoch_order
from batchwright.training.batches.stage_settings import StageSettings
from batchwright.training.checkpoints.checkpoint_manager import CheckpointManager, RunState
from batchwright.training.evaluate.evaluation import Fitting, evaluate, outputs_and_labels
from batchwright.training.evaluate.recalibration import calibrating_batches, recalibrated
from batchwright.training.loop import Task, accuracy_and_loss
from batchwright.training.recorder import Recorder
from batchwright.training.signals import StopRequest
from batchwright.training.step.update import Updater
from batchwright.workload.data.image_files import FilePipeline
from batchwright.workload.data.loading import loader_processes
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import resized
from batchwright.workload.host import autocast

LEAST_EVALUATION_BATCH = 256


class VirtualRun:
    """A network, its data, its records and checkpoints; a context manager that ends the run.

    Args:
        plan: What is followed.
        task: Network, optimizer, loss and data.
        device: Where all is computed.
        folder: The run folder; ``None`` keeps nothing.
        resume: Continue from its checkpoint.

    Attributes:
        plan: As given.
        task: As given.
        device: As given.
        cluster: The workers that are simulated.
        times: What a step costs them, by row of the plan.
        feed: Of the training data.
        samples: Of the training data.
        least: Fewest samples that a worker can train on.
        parameters: What is trained.
        state: How far the run is.
        recorder: Of lines and the summary.
        keeper: Of checkpoints; what is virtual is kept as ``virtual``.
        settings: Of the network and the feed, by row.
        fields: More of the summary, for its end.

    Raises:
        PlanError: Nothing says how long a step takes.
        JobError: The job speaks of workers that are not there.
        FileError: The run folder holds a run already, or cannot be written.
    """

    def __init__(
        self, plan: Plan, task: Task, device: torch.device, folder: Path | None, *, resume: bool
    ) -> None:
        self.plan, self.task, self.device = plan, task, device
        self.cluster = Cluster(plan.job, plan.workers)
        self.times: tuple[StepTime, ...] = step_times(plan)
        self.feed, self._held_out = self._feed_of(task.training), self._feed_of(task.held_out)
        self.samples = len(self.feed)
        modules = list(task.network.modules())
        self.least = 2 if any(isinstance(module, _BatchNorm) for module in modules) else 1
        self.parameters = [p for p in task.network.parameters() if p.requires_grad]
        # Of all workers' optimizers, which are built alike; a checkpoint's are no longer the first.
        self._first_rates = [float(group["lr"]) for group in task.optimizer.param_groups]
        self.state = RunState()
        self.fields: dict[str, Any] = {"simulated": True}
        self.settings = StageSettings(task.network, self.feed, plan)
        self.recorder = Recorder(folder, plan)
        self._group = Group(device, plan.job.timeout)
        self.keeper = CheckpointManager(
            folder,
            plan,
            task.network,
            task.optimizer,
            self._group,
            self.recorder,
            self.feed.description(),
        )
        self._top = max(plan.stages, key=lambda stage: stage.resolution)
        self._orders: dict[int, Tensor] = {}
        self._fitting = Fitting()
        self._stop = StopRequest()
        try:
            self.keeper.prepare(may_exist=resume)
            if resume:
                self.keeper.restore(self.state)
            self.recorder.note(
                f"a virtual cluster of {plan.workers} workers in one process: all training "
                "seconds are simulated"
            )
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        self.recorder.training_begins()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                self.recorder.finish(**self.fields)
                self.keeper.settle()
        finally:
            self._close()

    @property
    def over(self) -> bool:
        """Whether nothing is left to train."""
        return self.state.epoch >= self.plan.epochs or self.recorder.reached

    # ---------------------------------------------------------------------------------- computing

    def updater(self, optimizer: torch.optim.Optimizer) -> Updater:
        """Steps one of the optimizers at the plan's rate."""
        return Updater(
            self.parameters,
            optimizer,
            self.plan,
            first_rates=self._first_rates,
            clip_norm=self.plan.job.clip_norm,
            own_rates=False,
            samples_per_epoch=self.samples,
        )

    def cast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass: autocast, if the plan computes in bfloat16."""
        return autocast(self.plan.precision, self.device)

    def order(self, epoch: int) -> Tensor:
        """Indices of all samples in the epoch's order, int64 (samples,)."""
        if epoch not in self._orders:
            self._orders = {key: kept for key, kept in self._orders.items() if key >= epoch - 2}
            self._orders[epoch] = epoch_order(
                self.samples, epoch, self.plan.job.seed, self.task.sample_weights
            )
        return self._orders[epoch]

    # --------------------------------------------------------------------------------- evaluating

    def evaluation_due(self, epoch: int) -> bool:
        """Whether the model is evaluated at the end of a zero-based epoch."""
        every = self.plan.job.evaluate_epochs
        return (epoch + 1) % every == 0 or epoch + 1 == self.plan.epochs

    def evaluate(
        self, epoch: int, shares: Sequence[int]
    ) -> tuple[dict[str, float], int, float] | None:
        """Score the network as it is; outside of the simulated time.

        Args:
            epoch: Zero-based.
            shares: Of the workers that would recalibrate batch normalization, in samples.

        Returns:
            Sum of each value, held-out images, and real seconds; ``None`` if a stop signal came.
        """
        started = time.perf_counter()
        with self._recalibrated(epoch, shares):
            sums, count, stopped = evaluate(
                self.task.network,
                self._held_out,
                accuracy_and_loss,
                group=self._group,
                stop=self._stop,
                batch_size=max(LEAST_EVALUATION_BATCH, self._top.micro_batch_size),
                resolution=None,
                forward=outputs_and_labels,
                autocast=self.cast,
                shares=(1,),
                fitting=self._fitting,
            )
        return None if stopped else (sums, count, time.perf_counter() - started)

    def is_best(self, sums: dict[str, float], count: int) -> bool:
        """Whether a score is the highest so far, which is noted."""
        score = sums["top1"] / count
        if score <= self.state.best_score:
            return False
        self.state.best_score = score
        return True

    def _recalibrated(self, epoch: int, shares: Sequence[int]) -> AbstractContextManager[None]:
        if not self.plan.job.cycle.recalibrate:
            return nullcontext()

        batches = partial(
            calibrating_batches,
            self.feed,
            self.plan,
            self.order(epoch),
            epoch=epoch,
            shares=shares,
            ranks=range(len(shares)),
            between_epochs=True,
            fitting=self._fitting,
        )
        return recalibrated(
            self.task.network,
            batches,
            self._group,
            forward=outputs_and_labels,
            autocast=self.cast,
            fitting=self._fitting,
        )

    # ------------------------------------------------------------------------ stops and checkpoints

    def stop_wished(self, now: float) -> bool:
        """Whether a stop signal came, or the job's deadline has passed in simulated time."""
        deadline = self.plan.job.goal.deadline
        return self._stop.number > 0 or (deadline is not None and now > deadline)

    def stop_if_asked(self, now: float) -> None:
        """Leave, with a checkpoint, if `stop_wished`; the network must be as it is to be kept."""
        if not self.stop_wished(now):
            return
        self.keeper.save("last", self.state, 1.0)
        self.keeper.settle()
        where = f"epoch {self.state.epoch + 1}, {now:.6g} simulated seconds"
        if self._stop.number:
            raise Interrupted(
                self._stop.number, f"stopped by signal {self._stop.number} at {where}"
            )
        raise DeadlineReached(
            f"goal.deadline={self.plan.job.goal.deadline:g} s was reached at {where}; to go on, "
            "resume with a later one"
        )

    def _feed_of(self, data: Any) -> Feed:
        if isinstance(data, ImagePipeline):
            return PipelineFeed(data)
        if isinstance(data, FilePipeline):
            return FileFeed(data)
        return DatasetFeed(
            data,
            device=self.device,
            seed=self.plan.job.seed,
            loaders=loader_processes(self.plan.job, 1, files=False),
            resize=resized,
        )

    def _close(self) -> None:
        self.keeper.close()
        self.feed.close()
        self._held_out.close()
        self._stop.close()
        self._group.close()
