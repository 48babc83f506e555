"""What measuring gradients costs: the noise scale, and adaptive gradient scaling besides.

`noise_scale_overhead` is the time of a step in which the norms of all micro-batches' gradients are
measured over that of a step without, minus 1. `ags_overhead` is the same with adaptive gradient
scaling (`ags.mode=norm`) besides, over the same step without.

Handwritten digits at 32 px, `resnet8`, SGD, one CPU worker, global batch 512 in 8 micro-batches of
64. Three processes take turns: in every round each trains an epoch (3 steps) that is not timed and
then two that are.

    blind   gradients are added up, and are not measured before the step
    noise   as every plan trains: the norms are measured
    ags     norms are measured, and each tensor has its own scaling factors

Figures are medians over the rounds of the ratio within a round, their spread is the quartiles. All
arms are started anew after 5 rounds, as a process has a speed of its own, a few percent from that
of the next; 2 starts with --quick, 8 with --full.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import batchwright as bw
from batchwright.distributed.reducer import Reducer, summed
from batchwright.distributed.tally import QueuedWork, Tally
from batchwright.records import Job
from batchwright.training import all_reduce_run
from batchwright.training.loop import open_task
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import prepare_process, usable_cores
from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure, ratios
from benchmarks.harness.plans import CPU, ENDLESS, ONE_WORKER, job_from, opened, planned
from benchmarks.harness.turns import Arm, Turns, images_per_second

BATCH, MICRO_BATCH, STEPS_PER_EPOCH = 512, 64, 3
SIDE, EPOCHS = 32, 2
ROUNDS, STARTS = 5, {False: 2, True: 8}  # by --full
ARMS = ("blind", "noise", "ags")

BENCHMARK = Benchmark(
    "gradient_overhead",
    "What measuring gradients costs",
    "`resnet8` on digits at 32 px, one worker, 8 micro-batches in a step; arms took turns in one "
    "run",
    (
        Figure("noise_scale_overhead", "share", "median",
               "time that measuring the gradient noise scale adds to a step", at_most=0.02),
        Figure("ags_overhead", "share", "median", "time that adaptive gradient scaling and its "
               "measurements add to a step", at_most=0.03),
    ),
)  # fmt: skip


class Blind(Reducer):
    """Sums the gradients of one worker, and measures the norms of their sum alone."""

    def take(self, share: float) -> None:
        """Add up the gradients of a micro-batch, without their norms."""
        del share
        self._sums = summed(self._sums, [p.grad for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self, tally: Tally, share: float, queued: QueuedWork | None = None) -> Tally:
        """Put the sums into ``.grad``, as if autograd had added them."""
        self.take(share)
        for parameter, total in zip(self.parameters, self._sums, strict=True):
            parameter.grad = total
        return super().finish(tally, share, queued)


def measure(arguments: Arguments, folder: Path) -> Found:
    """All arms in turns, a turn a few epochs."""
    del folder
    open_data(job_of("noise"))
    rates = images_per_second(
        {name: partial(Arm, trained, name) for name in ARMS},
        ROUNDS,
        lead_in=STEPS_PER_EPOCH,
        steps=STEPS_PER_EPOCH * EPOCHS,
        warm_up=STEPS_PER_EPOCH,
        starts=STARTS[arguments.full],
    )
    return found_of(rates), {"images_per_second": rates}


def found_of(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    """Step time over that of the arm without, less 1, from images per second in each round."""
    arms = {"noise_scale_overhead": "noise", "ags_overhead": "ags"}
    return {
        name: [ratio - 1 for ratio in ratios(rates["blind"], rates[arm])]
        for name, arm in arms.items()
    }


def job_of(arm: str) -> Job:
    """One worker that accumulates."""
    return job_from(
        f"{ONE_WORKER} network=resnet8 precision=float32 resolutions={SIDE} global_batch={BATCH} "
        f"micro_batch={MICRO_BATCH} base_batch={MICRO_BATCH} epochs={ENDLESS} "
        f"checkpoint_seconds={ENDLESS}",
        ags={"mode": "norm" if arm == "ags" else "off"},
    )


def trained(turns: Turns, arm: str) -> None:
    """An arm: the usual loop."""
    prepare_process(usable_cores())
    if arm == "blind":
        all_reduce_run.Reducer = Blind  # type: ignore[misc] # in this process only
    job = job_of(arm)
    plan = planned(job, opened(job.data, job.network, SIDE))
    task = open_task(plan, CPU)
    with bw.Session(task.network, task.optimizer, task.training, plan=plan) as session:
        turns.ready()
        for _ in session.epochs():
            for images, labels in session.batches():
                if session.step(partial(task.mean_loss, images, labels)):
                    turns.step_done(BATCH)


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
