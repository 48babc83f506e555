"""What looking at every micro-batch's gradient costs, and scaling gradients by what is seen.

`noise_scale_overhead`: step time with the norms of all parts over step time without, less 1.
`ags_overhead`: the same with adaptive gradient scaling (`ags.mode=norm`) besides.

Handwritten digits at 32 px, `resnet8`, SGD, one CPU worker, global batch 512 in 8 micro-batches of
64. Three processes take turns: in every round each trains an epoch (3 steps) that is not timed and
then two that are.

    blind   gradients add up in ``.grad`` and nobody looks at them before the step
    noise   as every plan trains
    ags     with factors of its own on each tensor

Figures are medians over the rounds of the ratio within a round, their spread the quartiles: 8
rounds of 2 epochs with --quick, 30 with --full, which keeps the report.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

import batchwright as bw
from batchwright.distributed.reducer import Reducer
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job
from batchwright.training import all_reduce_run
from batchwright.training.loop import open_task
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import prepare_process, usable_cores
from batchwright.workload.task import build_network, network_facts
from benchmarks.harness.common import (
    Arguments,
    Figure,
    Measurements,
    median_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.turns import Arm, Turns, started, take_turns

BATCH, MICRO_BATCH, STEPS_PER_EPOCH = 512, 64, 3
NOISE_GOAL, AGS_GOAL = 0.02, 0.03
SIDE, EPOCHS = 32, 2
ROUNDS = {False: 8, True: 30}
ENDLESS = 10**6
ARMS = ("blind", "noise", "ags")


class Blind(Reducer):
    """Sums gradients and sees none of them."""

    def take(self, share: float) -> None:
        """Leave the gradients where autograd adds the next ones."""
        del share


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("gradient_overhead", __doc__, _measure, full_seeds=())


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    del folder
    open_data(job_of("noise"))
    arms = {name: partial(Arm, trained, name) for name in ARMS}
    steps = STEPS_PER_EPOCH * EPOCHS
    with started(arms) as alive:
        for arm in alive.values():
            arm.turn(lead_in=0, steps=STEPS_PER_EPOCH)
        turns = {
            name: partial(arm.turn, lead_in=STEPS_PER_EPOCH, steps=steps)
            for name, arm in alive.items()
        }
        rates = take_turns(turns, ROUNDS[arguments.full], show=say)
    return figures_of(rates), {"images_per_second": rates}


def figures_of(rates: dict[str, list[float]]) -> list[Figure]:
    """Overheads from images per second by arm, round by round."""
    return [
        median_figure(name, overheads(rates["blind"], rates[arm]), "share", at_most=goal)
        for name, arm, goal in (
            ("noise_scale_overhead", "noise", NOISE_GOAL),
            ("ags_overhead", "ags", AGS_GOAL),
        )
    ]


def overheads(without: list[float], rates: list[float]) -> list[float]:
    """Step time over that of the arm without, less 1, in each round."""
    return [one / other - 1 for one, other in zip(without, rates, strict=True)]


def job_of(arm: str) -> Job:
    """One worker that accumulates."""
    job: dict[str, Any] = {
        "network": "resnet8",
        "precision": "float32",
        "device": "cpu",
        "workers": 1,
        "launch": "in-process",
        "resolutions": (SIDE,),
        "global_batch": BATCH,
        "micro_batch": MICRO_BATCH,
        "base_batch": MICRO_BATCH,
        "epochs": ENDLESS,
        "checkpoint_seconds": ENDLESS,
        "ags": {"mode": "norm" if arm == "ags" else "off"},
    }
    return Job.model_validate(job)


def trained(turns: Turns, arm: str) -> None:
    """An arm: the usual loop."""
    prepare_process(usable_cores())
    if arm == "blind":
        all_reduce_run.Reducer = Blind  # type: ignore[misc] # in this process only
    job = job_of(arm)
    data = open_data(job, verify=False)
    network = build_network(job.network, classes=len(data.facts.classes), side=SIDE)
    facts = network_facts(job.network, network, SIDE)
    plan = plan_without_profile(job, data.facts, facts)
    task = open_task(plan, torch.device("cpu"))
    with bw.Session(task.network, task.optimizer, task.training, plan=plan) as session:
        turns.ready()
        for _ in session.epochs():
            for images, labels in session.batches():
                if session.step(partial(task.mean_loss, images, labels)):
                    turns.step_done(BATCH)


if __name__ == "__main__":
    main()
