"""What `Session` hands to the run behind it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer
from batchwright.records import Plan
from batchwright.storage.locks import Lock
from batchwright.training.batches.feeding import Feed
from batchwright.training.batches.stage_settings import StageSettings
from batchwright.training.checkpoints.checkpoint_manager import RunState
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
from batchwright.training.signals import StopRequest
from batchwright.training.step.clock import StepClock
from batchwright.training.step.peak_memory import PeakMemory
from batchwright.training.step.rates import Rates
from batchwright.training.step.updater import Updater
from batchwright.workload.host import autocast
from batchwright.workload.passes.compilation import Compilation, compile_training
from batchwright.workload.passes.cuda_graphs import CudaGraphs, graph_training
from batchwright.workload.tensor_bytes import lasting_bytes


def compiled(model: nn.Module, plan: Plan) -> Compilation:
    """Have the model compiled at its first step, where the plan says so.

    What the plan has measured may be given up; what the job asks for, without or against a
    measurement, ends the training where it cannot be had.
    """
    if plan.job.compile != "on":
        return Compilation(on=False)
    told = compile_training(model)
    told.asked = all(one.source == "asked" for one in plan.reasons if one.choice == "compiling")
    return told


def replayed(model: nn.Module, plan: Plan) -> CudaGraphs | None:
    """Have the model's passes replayed from CUDA graphs, where the plan says so."""
    if plan.job.cuda_graphs != "on":
        return None
    return graph_training(model, limit=plan.job.goal.memory)


def average_of(model: nn.Module, plan: Plan) -> WeightAverage | None:
    """The average of a model's weights that its plan asks for."""
    return WeightAverage(model, plan.average_epochs) if plan.average_epochs else None


@dataclass(frozen=True)
class Setup:
    """What is trained, on what, and how.

    Attributes:
        plan: What is followed.
        model: On its device.
        optimizer: Of its parameters.
        feed: Makes the training batches.
        settings: Sets network and feed to a row of the plan.
        group: The processes that one launcher started.
        stop: Whether a signal asks to stop.
        folder: The run folder; ``None`` keeps nothing.
        resume: Whether to go on from it.
        again: Whether this very launch has begun the run that is in it.
        clip_norm: Largest global gradient norm; ``None``: no limit.
        own_rates: Whether the optimizer's rates are left alone.
        sample_weights: How often each sample is drawn, (samples,); ``None``: once per epoch.
        follow_advice: Whether to stop after an epoch where advice for the next is in the folder.
        lock: Of the run folder, if this worker holds it.
        profile_memory: Whether to weigh steps on the CPU by the profiler.
        compilation: Whether the network computes compiled.
        graphs: Replays its passes; ``None``: they are taken as they are.
        average: Of the weights, which is evaluated and delivered; ``None``: the weights are.
        fitting: How many samples fit into an evaluation's forward pass, as far as known.
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
        """Let the model take its passes by itself again."""
        if self.graphs is not None:
            self.graphs.end()

    @property
    def least(self) -> int:
        """Fewest samples that a worker can train on: of one, there are no batch statistics."""
        return 2 if any(isinstance(m, _BatchNorm) for m in self.model.modules()) else 1

    @property
    def synchronized(self) -> bool:
        """Whether workers exchange statistics of their samples in each forward pass."""
        return any(isinstance(m, nn.SyncBatchNorm) for m in self.model.modules())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's, in its order, then others that the optimizer has, such as a loss's own."""
        parameters = dict.fromkeys(self.model.parameters())
        for group in self.optimizer.param_groups:
            parameters.update(dict.fromkeys(group["params"]))
        return list(parameters)

    def updater(self, trained: list[nn.Parameter]) -> Updater:
        """Steps the optimizer."""
        return Updater(trained, self.optimizer, clip_norm=self.clip_norm)

    def rates(self) -> Rates:
        """Sets the optimizer's rates, which are still those that its builder set."""
        samples = len(self.feed)
        return Rates(self.optimizer, self.plan, own=self.own_rates, samples_per_epoch=samples)

    @property
    def per_tensor(self) -> bool:
        """Whether weights come to depend on norms of gradients: by clipping, factors or the rate.

        Then a `Reducer` is to give those of single tensors. They sum to the same bits however
        tensors are put into buckets.
        """
        gaining = self.plan.learning_rate.scaling == "gain" and not self.own_rates
        return self.plan.ags is not None or self.clip_norm is not None or gaining

    def peak_memory(self, state: RunState, clock: StepClock, reducer: Reducer) -> PeakMemory:
        """Says what the steps take; ``reducer`` has buffers of its own."""

        def lasting() -> int:
            average = self.average.lasting_bytes if self.average else 0
            return lasting_bytes(self.model, self.optimizer) + reducer.buffer_bytes + average

        weighed = lasting if self.profile_memory else None
        return PeakMemory(self.group.device, state, clock, weighed, self.graphs)

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

        Batch normalization has new statistics meanwhile, if the job asks for them.

        Args:
            what: Model, held-out set and metric.
            group: The processes that evaluate.
            shares: Of the workers, in rank order; one process may be all of them.
            order: Of the epoch's training samples; ``None``: there is no epoch.
            epoch: Zero-based.
            between_epochs: Whether the training feed has nothing else under way.
        """
        how: dict[str, Any] = {"autocast": self.autocast, "fitting": self.fitting}
        statistics: AbstractContextManager[None] = nullcontext()
        if self.plan.job.cycle.recalibrate and order is not None:
            batches = partial(
                calibrating_batches,
                self.feed,
                self.plan,
                order,
                epoch=epoch,
                shares=shares,
                ranks=(group.rank,) if group.size > 1 else range(len(shares)),
                between_epochs=between_epochs,
                fitting=self.fitting,
            )
            statistics = recalibrated(what.model, batches, group, forward=what.forward, **how)
        own = shares if group.size > 1 else (1,)
        # Of another model than the one that is trained nothing is changed.
        averaged = self.average.in_place() if self.average else nullcontext()
        with averaged, statistics:
            sums, count, stopped = evaluate(what, group=group, stop=self.stop, shares=own, **how)
        if self.plan.job.track and count and not stopped:  # of the weights that are trained
            share = own[group.rank] / sum(own)
            found = self._tracked(what, group, share) if "loss" in sums else {}
            sums = sums | {name: count * value for name, value in found.items()}
        return sums, count, stopped

    def _tracked(self, what: Evaluation, group: Group, share: float) -> dict[str, float]:
        """What ``track`` asks for, of the metric's loss on a batch that stays; on every worker."""
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
        """The plan's precision, for a forward pass."""
        return partial(autocast, self.plan.precision, self.group.device)()
