"""Training loops of several workers, for `uneven`, `shares` and `methods.dual_batch`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import batchwright as bw
from batchwright.records import Plan
from batchwright.training.loop import open_task, train
from batchwright.workload.host import prepare_process, usable_cores
from benchmarks.harness.loads import Slowdown
from benchmarks.harness.plans import CPU, ENDLESS
from benchmarks.harness.turns import Turns
from benchmarks.speed.main_job_arms import cifar_plan, train_session

PAUSE_SECONDS = 7200.0  # timeout of an exchange: workers pause while other arms have their turns


def uneven_plan(
    data: Path,
    method: str,
    shares: Sequence[int],
    *,
    samples: int | None = None,
    epochs: int = ENDLESS,
    seed: int = 0,
    decay: str = "none",
    **keys: Any,
) -> Plan:
    """A plan for uneven workers that is made without measurements, in float32.

    ``shares`` are the local batches in rank order; with ``dynamic-batch`` they are the first ones.
    With ``samples``, only that many first images are trained on; ``keys`` change the job.
    """
    plan = cifar_plan(data, epochs=epochs, precision="float32", seed=seed, decay=decay)
    changed = {
        "workers": len(shares),
        "launch": "local" if len(shares) > 1 else "in-process",
        "global_batch": sum(shares),
        "method": method,
        "timeout": PAUSE_SECONDS,
        **keys,
    }
    facts = plan.data.model_copy(update={"train_samples": samples or plan.data.train_samples})
    stage = plan.stages[0].model_copy(update={"local_batch_sizes": tuple(shares)})
    return plan.model_copy(
        update={
            "job": plan.job.model_copy(update=changed),
            "data": facts,
            "method": method,
            "stages": (stage,),
        }
    )


def session(
    turns: Turns, plan: Plan, run_folder: Path, factors: Sequence[float] | None = None
) -> None:
    """Our loop by the plan; worker r computes ``factors[r]`` times as long, if given."""
    slow = partial(Slowdown, factor=factors[_rank()]) if factors else None
    train_session(turns, plan, run_folder, slow)


def epochs(turns: Turns, plan: Plan, run_folder: Path) -> None:
    """The training verb's loop, as one of the plan's workers, without evaluation.

    A step of the turn is an epoch; under a parameter server it is a round, its exchange included.
    """
    prepare_process(usable_cores())
    torch.set_num_threads(1)
    task = open_task(plan, CPU)
    with bw.Session(
        task.network, task.optimizer, task.training, plan=plan, run_folder=run_folder
    ) as session:
        turns.ready()
        for _ in session.epochs():
            for images, labels in session.batches():
                session.step(partial(task.mean_loss, images, labels))
            turns.step_done(plan.data.train_samples)


def whole_run(turns: Turns, plan: Plan, run_folder: Path) -> None:
    """The training verb's loop from the first epoch to the last, with evaluation: one "step"."""
    turns.ready()
    train(plan, run_folder=run_folder, resume=False, local_rank=_rank())
    turns.step_done(plan.epochs * plan.data.train_samples)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
