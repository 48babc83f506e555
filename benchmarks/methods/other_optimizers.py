"""Train by a plan with an optimizer of another package, in a user's own loop on `Session`.

    python -m benchmarks.methods.other_optimizers lars VECTOR_RATE PLAN --out FOLDER
    python -m benchmarks.methods.other_optimizers lamb PLAN --out FOLDER

LARS and LAMB come from the package `pytorch-optimizer`; rates, warm-up and decay are the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import batchwright as bw
from batchwright.records import Plan
from batchwright.records.documents import read_record
from batchwright.training.batches.randomness import seed_worker
from batchwright.training.loop import accuracy_and_loss, open_task
from benchmarks.harness.benchmark import make_parser
from benchmarks.harness.plans import CPU

Build = Callable[[nn.Module, Plan], torch.optim.Optimizer]

LARS_TRUST, LARS_MOMENTUM = 0.001, 0.9
LAMB_DECAY = 0.01


def lars(network: nn.Module, plan: Plan, *, vector_rate: float) -> torch.optim.Optimizer:
    """LARS with trust coefficient 0.001 and momentum 0.9 (You et al. 2017, arXiv 1708.03888).

    Biases and normalizations, which LARS does not adapt, have ``vector_rate``, plain SGD's rate
    at the base batch: LARS's own is several times as high, and nothing would rescale it for them.
    """
    from pytorch_optimizer import LARS

    matrices, vectors = _by_dimension(network)
    return LARS(
        [
            {"params": matrices, "weight_decay": plan.job.weight_decay},
            {"params": vectors, "weight_decay": 0.0, "lr": vector_rate},
        ],
        lr=plan.learning_rate.base,
        momentum=LARS_MOMENTUM,
        trust_coefficient=LARS_TRUST,
    )


def lamb(network: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """LAMB with betas 0.9, 0.999, epsilon 1e-6, decay 0.01 (You et al. 2019, arXiv 1904.00962)."""
    from pytorch_optimizer import Lamb

    matrices, vectors = _by_dimension(network)
    return Lamb(
        [
            {"params": matrices, "weight_decay": LAMB_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=plan.learning_rate.base,
        betas=(0.9, 0.999),
        eps=1e-6,
    )


def train(plan: Plan, build: Build, run_folder: Path) -> None:
    """Train like `training.loop.train`, but with the optimizer that ``build`` makes."""
    task = open_task(plan, CPU)
    seed_worker(plan.job.seed, 0, 0)
    optimizer = build(task.network, plan)
    with bw.Session(
        task.network, optimizer, task.training, plan=plan, run_folder=run_folder
    ) as session:
        for _ in session.epochs():
            for images, labels in session.batches():
                session.step(partial(task.mean_loss, images, labels))
            if session.evaluation_due:
                session.evaluate(task.held_out, accuracy_and_loss)


def _by_dimension(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters: matrices and kernels, and then vectors and scalars."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]


def main() -> None:
    """The command line above."""
    parser = make_parser(__doc__)
    parser.add_argument("kind", choices=("lars", "lamb"))
    parser.add_argument("vector_rate", type=float, nargs="?")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    found = parser.parse_args()
    build = partial(lars, vector_rate=found.vector_rate) if found.kind == "lars" else lamb
    train(read_record(found.plan, Plan), build, found.out)


if __name__ == "__main__":
    main()
