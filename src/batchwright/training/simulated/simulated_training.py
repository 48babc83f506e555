"""Training of all workers of a plan in one process, in simulated time: results are real.

Every gradient, merge and accuracy is that of as many real workers; only the clock is simulated
(`algorithms.simulated_clock`), so the order in which workers reach a parameter server is that of
the cluster that is asked for, whatever machine this is. Nothing depends on how fast this process
is: the same job gives the same weights, bit for bit.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch

from batchwright.distributed.group import Group
from batchwright.errors import PlanError
from batchwright.records import Plan
from batchwright.records.run_folder import has_checkpoint
from batchwright.training.batches.feeding import Feed, feed_of
from batchwright.training.batches.stage_settings import StageSettings
from batchwright.training.evaluate.evaluation import (
    Evaluation,
    evaluation_batch,
    outputs_and_labels,
)
from batchwright.training.loop import Task, accuracy_and_loss, open_task
from batchwright.training.running import Setup, compiled, replayed
from batchwright.training.session import Images
from batchwright.training.signals import StopRequest
from batchwright.training.simulated.simulated_rounds import SimulatedRounds
from batchwright.training.simulated.simulated_steps import SimulatedAllReduce
from batchwright.workload.data.loading import loader_processes
from batchwright.workload.data.sources import resized
from batchwright.workload.host import enter, prepare_process, resolve_device, worker_threads
from batchwright.workload.passes.recomputation import recompute


def train_virtually(plan: Plan, run_folder: Path | None, *, resume: bool = False) -> None:
    """Train as ``plan`` says, all of its workers in this process; records go to the run folder.

    Args:
        plan: The plan to follow; its job says how fast the simulated workers are.
        run_folder: Folder for metrics, checkpoints and the summary; ``None`` keeps none.
        resume: Continue from the run folder's last checkpoint.

    Raises:
        PlanError: The data are not those of the plan, nothing says how long a step takes, or the
            plan cannot be trained in one process.
        Interrupted: A stop signal came; a checkpoint was written.
        DeadlineReached: The simulated time was up; a checkpoint was written.
    """
    if plan.job.batch_norm == "synchronized":
        raise PlanError(
            "batch_norm=synchronized computes over the workers' processes, and launch=virtual has "
            "one: plan with batch_norm=worker"
        )
    prepare_process(worker_threads(1))
    device = enter(resolve_device(plan.job.device))
    goes_on = resume and run_folder is not None and has_checkpoint(run_folder)
    task = open_task(plan, device, goes_on=goes_on)
    train_task(plan, task, device, run_folder, resume=resume)


def train_task(
    plan: Plan, task: Task, device: torch.device, run_folder: Path | None, *, resume: bool = False
) -> None:
    """As `train_virtually`, with a task that is open already."""
    if plan.job.activation_checkpointing == "on":
        recompute(task.network)
    with ExitStack() as stack:
        training, held_out = (
            stack.enter_context(closing(_feed_of(data, plan, device)))
            for data in (task.training, task.held_out)
        )
        setup = Setup(
            plan=plan,
            model=task.network,
            optimizer=task.optimizer,
            feed=training,
            settings=StageSettings(task.network, training, plan),
            group=stack.enter_context(closing(Group(device, plan.job.timeout))),
            stop=stack.enter_context(closing(StopRequest())),
            folder=run_folder,
            resume=resume,
            again=False,
            clip_norm=plan.job.clip_norm,
            own_rates=False,
            sample_weights=task.sample_weights,
            compilation=compiled(task.network, plan),
            graphs=replayed(task.network, plan),
        )
        stack.callback(setup.end_replay)
        run: SimulatedAllReduce | SimulatedRounds
        run = SimulatedAllReduce(setup) if plan.server is None else SimulatedRounds(setup)
        stack.enter_context(closing(run))
        scoring = Evaluation(
            task.network, held_out, accuracy_and_loss, outputs_and_labels, evaluation_batch(plan)
        )
        for _ in run.epochs():
            for images, labels in run.batches():
                run.stepper.step(partial(task.mean_loss, images, labels), None)
            if run.evaluation_due:
                run.evaluate(scoring)
        run.finish()


def _feed_of(data: Images, plan: Plan, device: torch.device) -> Feed:
    loaders = loader_processes(plan.job, 1, files=False)
    return feed_of(data, device, seed=plan.job.seed, loaders=loaders, resize=resized)
