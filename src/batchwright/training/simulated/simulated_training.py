"""All workers of a plan in one process, in simulated time: what is computed is real.

Every gradient, merge and accuracy is that of as many real workers; only the clock is simulated
(`algorithms.simulated_clock`), so the order in which workers reach a parameter server is that of
the cluster that is asked for, whatever machine this is. Nothing depends on how fast this process
is: the same job gives the same weights, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import torch

from batchwright.errors import PlanError
from batchwright.records import Plan
from batchwright.training.loop import Task, open_task
from batchwright.training.simulated.simulated_rounds import VirtualRounds
from batchwright.training.simulated.simulated_run import VirtualRun
from batchwright.training.simulated.simulated_steps import VirtualSteps
from batchwright.workload.host import prepare_process, resolve_device, worker_threads


def train_virtually(plan: Plan, run_folder: Path | None, *, resume: bool = False) -> None:
    """Train as ``plan`` says, all of its workers in this process; records go to the run folder.

    Args:
        plan: What to do; its job says how fast the virtual workers are.
        run_folder: Where metrics, checkpoints and the summary go; ``None`` keeps none.
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
    device = resolve_device(plan.job.device)
    train_task(plan, open_task(plan, device), device, run_folder, resume=resume)


def train_task(
    plan: Plan, task: Task, device: torch.device, run_folder: Path | None, *, resume: bool = False
) -> None:
    """The same with a task that is open already."""
    with VirtualRun(plan, task, device, run_folder, resume=resume) as run:
        if plan.server is None:
            VirtualSteps(run).train()
        else:
            VirtualRounds(run).train()
