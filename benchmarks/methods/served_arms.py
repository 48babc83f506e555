"""What `methods.dual_batch` compares: rounds with a parameter server, one by one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

import batchwright as bw
from batchwright.records import Plan
from batchwright.training.loop import open_task
from batchwright.workload.host import prepare_process, usable_cores
from benchmarks.harness.turns import Turns

ENDLESS = 1_000_000
"""Epochs, and whatever else is never to come."""


def served_rounds(turns: Turns, plan: Plan, run_folder: Path) -> None:
    """The training verb's loop, as one of the plan's workers, without evaluation.

    A step of the turn is a round, its exchange included.
    """
    prepare_process(usable_cores())
    torch.set_num_threads(1)
    task = open_task(plan, torch.device("cpu"))
    shares = plan.stages[0].samples_per_round
    with bw.Session(
        task.network, task.optimizer, task.training, plan=plan, run_folder=run_folder
    ) as session:
        turns.ready()
        for _ in session.epochs():
            for images, labels in session.batches():
                session.step(partial(task.mean_loss, images, labels))
            turns.step_done(shares[int(os.environ["RANK"])])
