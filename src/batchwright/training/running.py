"""Everything that a run is set up with: what `Session` hands to `AllReduceRun` or `ServerRun`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer
from batchwright.records import Plan
from batchwright.storage.locks import Lock
from batchwright.training.batches.batch_split import Division
from batchwright.training.batches.feeding import Feed
from batchwright.training.batches.stage_settings import StageSettings
from batchwright.training.checkpoints.checkpoint_manager import CheckpointManager, RunState
from batchwright.training.evaluate.curvature import tracked
from batchwright.training.evaluate.evaluation import (
    Evaluation,
    Fitting,
    evaluate,
    evaluation_mode,
    merged_batch_norm,
)
from batchwright.training.evaluate.recalibration import calibrating_batches, recalibrated
from batchwright.training.evaluate.weight_average import WeightAverage
from batchwright.training.recorder import Recorder
from batchwright.training.signals import StopRequest
from batchwright.training.step.clock import StepClock
from batchwright.training.step.micro_batches import MicroBatches, Turns
from batchwright.training.step.normalization import Statistics
from batchwright.training.step.peak_memory import PeakMemory
from batchwright.training.step.rates import Rates
from batchwright.training.step.stepper import Stepper, StepRequests
from batchwright.training.step.updater import Updater
from batchwright.workload.host import autocast
from batchwright.workload.passes.compilation import Compilation, compile_training
from batchwright.workload.passes.cuda_graphs import CudaGraphs, graph_training
from batchwright.workload.tensor_bytes import lasting_bytes


def compiled(model: nn.Module, plan: Plan) -> Compilation:
    """Have the model compiled at its first step, if the plan says so.

    Where compiling fails, a plan that chose it by measurement goes on without it; a job that asked
    for it ends with an error.
    """
    if plan.job.compile != "on":
        return Compilation(on=False)
    compilation = compile_training(model)
    reasons = [one for one in plan.reasons if one.choice == "compiling"]
    compilation.asked = all(reason.source == "asked" for reason in reasons)
    return compilation


def replayed(model: nn.Module, plan: Plan) -> CudaGraphs | None:
    """Have the model's passes replayed from CUDA graphs, if the plan says so."""
    if plan.job.cuda_graphs != "on":
        return None
    return graph_training(model, limit=plan.job.goal.memory)


def average_of(model: nn.Module, plan: Plan) -> WeightAverage | None:
    """The average of a model's weights, if the plan asks for one."""
    return WeightAverage(model, plan.average_epochs) if plan.average_epochs else None


@dataclass(frozen=True)
class Setup:
    """What is trained, on what, and how.

    Attributes:
        plan: The plan that is followed.
        model: The network that is trained, on its device.
        optimizer: The optimizer of its parameters.
        feed: Source of the training batches.
        settings: Sets dropout and augmentation to a row of the plan.
        group: The processes that one launcher started.
        stop: Notes whether a signal asks to stop.
        folder: The run folder; ``None`` keeps nothing.
        resume: Whether to go on from the folder's last checkpoint.
        again: Whether this very launch has begun the run that is in the folder.
        clip_norm: Largest global gradient norm; ``None``: no limit.
        own_rates: Whether the optimizer's rates are left alone.
        sample_weights: How often each sample is drawn, (samples,); ``None``: once per epoch.
        follow_advice: Whether to stop after an epoch where advice for the next is in the folder.
        lock: Lock of the run folder, if this worker holds it.
        profile_memory: Whether to measure the memory of steps on the CPU, by the profiler.
        compilation: Whether the network is compiled.
        graphs: CUDA graphs from which its passes are replayed; ``None``: none are.
        average: Average of the weights, to be evaluated and delivered; ``None``: the weights are.
        fitting: How many samples fit into an evaluation's forward pass, as far as is known.
    """

    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    feed: Feed
    settings: StageSettings
    group: Group
    stop: StopRequest
    folder: Path | None
    resume: bool
    again: bool
    clip_norm: float | None
    own_rates: bool
    sample_weights: Tensor | None
    follow_advice: bool = False
    lock: Lock | None = None
    profile_memory: bool = False
    compilation: Compilation = field(default_factory=lambda: Compilation(on=False))
    graphs: CudaGraphs | None = None
    average: WeightAverage | None = None
    fitting: Fitting = field(default_factory=Fitting)

    def end_replay(self) -> None:
        """Replay the model's passes from CUDA graphs no longer."""
        if self.graphs is not None:
            self.graphs.end()

    @property
    def least(self) -> int:
        """Fewest samples that a worker can train on: 2 where batch statistics need several."""
        return 2 if any(isinstance(m, _BatchNorm) for m in self.model.modules()) else 1

    @property
    def synchronized(self) -> bool:
        """Whether workers exchange batch statistics in each forward pass."""
        return any(isinstance(m, nn.SyncBatchNorm) for m in self.model.modules())

    @property
    def own_buffers(self) -> list[str]:
        """Names of the model's buffers that checkpoints have, but for batch statistics.

        These are merged over the workers; buffers that are not kept are such as a mask for the
        longest sequence so far.
        """
        return [
            f"{path}.{name}" if path else name
            for path, layer in self.model.named_modules()
            if not isinstance(layer, _BatchNorm)
            for name, one in layer.named_buffers(recurse=False)
            if one.layout is torch.strided and name not in layer._non_persistent_buffers_set
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the model, in its order, then others of the optimizer, such as a loss's."""
        parameters = dict.fromkeys(self.model.parameters())
        for group in self.optimizer.param_groups:
            parameters.update(dict.fromkeys(group["params"]))
        return list(parameters)

    def rates(self) -> Rates:
        """The learning-rate schedule; the optimizer must still have its initial rates."""
        samples = len(self.feed)
        return Rates(self.optimizer, self.plan, own=self.own_rates, samples_per_epoch=samples)

    @property
    def per_tensor(self) -> bool:
        """Whether updates depend on norms of gradients: by clipping, gradient factors or the rate.

        Then a `Reducer` computes norms of single tensors, which sum to the same bits however the
        tensors are put into buckets.
        """
        gaining = self.plan.learning_rate.scaling == "gain" and not self.own_rates
        return self.plan.ags is not None or self.clip_norm is not None or gaining

    def checkpoints(self, recorder: Recorder) -> CheckpointManager:
        """What writes and restores the run's checkpoints, with the records of ``recorder``."""
        return CheckpointManager(
            self.folder,
            self.plan,
            self.model,
            self.optimizer,
            self.group,
            recorder,
            self.feed.description(),
            self.average,
        )

    def step_loop(
        self,
        group: Group,
        state: RunState,
        division: Division,
        reducer: Reducer,
        rates: Rates,
        clock: StepClock,
        *,
        requests: Callable[[], StepRequests] = StepRequests,
        turns: Turns | None = None,
    ) -> tuple[Stepper, MicroBatches]:
        """The stepper of a run, and the micro-batches that it is called for.

        Args:
            group: The workers that take steps together.
            state: How far the run is.
            division: Divides epochs into steps, and steps between the workers.
            reducer: Sums gradients.
            rates: The learning-rate schedule.
            clock: Books the time.
            requests: Returns what this worker asks of the others at a step; unset: nothing.
            turns: How workers of this process take turns.
        """

        def lasting() -> int:
            average = self.average.lasting_bytes if self.average else 0
            return lasting_bytes(self.model, self.optimizer) + reducer.buffer_bytes + average

        stepper = Stepper(
            self.plan,
            group,
            state,
            reducer,
            Updater(self.parameters, self.optimizer, clip_norm=self.clip_norm),
            rates,
            Statistics(self.model),
            division,
            clock,
            requests,
            self.compilation,
            self.graphs,
            resumes=self.folder is not None,
        )
        profiled = lasting if self.profile_memory else None
        memory = PeakMemory(group.device, state, clock, profiled, self.graphs)
        loop = MicroBatches(self.feed, stepper, division, state, clock, memory, group.here, turns)
        return stepper, loop

    def evaluated(
        self,
        what: Evaluation,
        *,
        group: Group,
        shares: Sequence[int],
        order: Tensor | None,
        epoch: int,
        between_epochs: bool,
    ) -> tuple[dict[str, float], int, int]:
        """Sums of each value of a metric over a held-out set, as `evaluation.evaluate` gives them.

        Batch normalization has recalibrated statistics meanwhile, if the job asks for them.

        Args:
            what: Model, held-out set and metric.
            group: The processes that evaluate.
            shares: The workers' local batches, in rank order; one process may be all workers.
            order: Order of the epoch's training samples; ``None``: there is no epoch.
            epoch: Zero-based.
            between_epochs: Whether the training feed has nothing else under way.
        """
        statistics: AbstractContextManager[None] = nullcontext()
        if self.plan.job.cycle.recalibrate and order is not None:
            batches = calibrating_batches(
                self.feed,
                self.plan,
                order,
                epoch=epoch,
                shares=shares,
                ranks=(group.rank,) if group.size > 1 else range(len(shares)),
                between_epochs=between_epochs,
            )
            statistics = recalibrated(
                what.model, batches, group, forward=what.forward, autocast=self.autocast
            )
        own = shares if group.size > 1 else (1,)
        # Average and statistics are those of the trained model; any other keeps its own.
        averaged = self.average.in_place() if self.average else nullcontext()
        with averaged, statistics:
            sums, count, stopped = evaluate(
                what,
                group=group,
                stop=self.stop,
                autocast=self.autocast,
                shares=own,
                fitting=self.fitting,
            )
        if self.plan.job.track and count and not stopped:  # not of their average
            share = own[group.rank] / sum(own)
            found = self._tracked(what, group, share) if "loss" in sums else {}
            sums = sums | {name: count * value for name, value in found.items()}
        return sums, count, stopped

    def _tracked(self, what: Evaluation, group: Group, share: float) -> dict[str, float]:
        """Figures of the job's ``track``: curvature of the metric's loss on one fixed batch."""
        samples = len(self.feed)
        top = max(self.plan.stages, key=lambda stage: stage.resolution)

        def batch_of(count: int) -> Any:
            return self.feed.single(torch.arange(count) * samples // count, 0, top.resolution)

        def loss_of(batch: Any) -> Tensor:
            values = what.metric(*what.forward(what.model, batch))
            assert isinstance(values, dict)  # noqa: S101 - it has given `loss` before
            return values["loss"].mean()

        with evaluation_mode(what.model), merged_batch_norm(what.model, group, share):
            most = min(samples, top.micro_batch_size)
            return tracked(self.plan.job.track, what.model, loss_of, batch_of, most)

    def autocast(self) -> torch.autocast:
        """Context of a forward pass in the plan's precision."""
        return autocast(self.plan.precision, self.group.device)
