"""Warm-up where the largest batch has a thousand steps: the warm-up poster's first figure again.

In `benchmarks.methods.warmup`, a batch of 240 times the base has 90 steps in all, too few for a
long warm-up to pay off. Here it has 1,008, as the base batch is 4: batches 240 and 960, 48 epochs
of the same 20,000 images, 84 and 21 steps in each. Warm-ups are in the poster's proportion: 0, 5,
10 and 20 epochs of 90. The rest is as there: rate 0.0125 at the base batch and linear scaling,
which gives the poster's rates, 0.75 and 3, divided by 10 at 1/3, 2/3 and 8/9 of the epochs,
momentum 0.9, weight decay 5e-5, parts of at most 128 samples; seeds 0 to 2, the same in all cells.

The best warm-up is the one with the best mean accuracy, in epochs of 90; its spread is from the
shortest to the longest warm-up within one standard error of that accuracy. The poster's claim holds
if the best warm-up is longer at 960.

--full makes 24 runs of 0.96 million images each, an hour and a half on a core that computes in
bfloat16; --quick checks warm-up 0 and 5 at 960 with seed 0.
"""

from __future__ import annotations

from pathlib import Path

from batchwright.records import Job
from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure
from benchmarks.methods.warmup import (
    POSTER_EPOCHS,
    images_of,
    job_of,
    swept_in,
    told,
    warmups_found,
)

SEEDS = range(3)
BASE_BATCH, EPOCHS = 4, 48
BATCHES = (60 * BASE_BATCH, 240 * BASE_BATCH)
STEPS = (4_032, 1_008)  # of a training with each batch
WARMUPS = tuple(round(EPOCHS * epochs / POSTER_EPOCHS, 3) for epochs in (0, 5, 10, 20))

BENCHMARK = Benchmark(
    "warmup_long",
    "Warm-up in trainings of a thousand steps",
    "20,000 images of CIFAR-100 at 16 px, `resnet8`, 48 epochs, rate 0.0125 at batch 4, linear "
    "scaling, divided by 10 at 1/3, 2/3 and 8/9 of the epochs; three paired seeds",
    tuple(
        figure
        for batch, steps in zip(BATCHES, STEPS, strict=True)
        for figure in (
            Figure(f"warmup_best_epochs_{batch}", "epochs", "largest", "warm-up with the best mean "
                   f"accuracy, batch {batch}, {steps:,} steps, in epochs of 90; spread: warm-ups "
                   "within one standard error of it"),
            Figure(f"warmup_gain_points_{batch}", "points", "interval", "accuracy with the best "
                   f"warm-up above 0 minus accuracy without warm-up, batch {batch}, {steps:,} "
                   "steps"),
            Figure(f"longest_over_best_points_{batch}", "points", "interval", "accuracy with the "
                   "longest warm-up, 20 of 90 epochs, minus accuracy with the best, batch "
                   f"{batch}, {steps:,} steps"),
        )
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


def job_at(data: Path) -> Job:
    """The job that all runs share."""
    return job_of(data).model_copy(update={"base_batch": BASE_BATCH, "epochs": EPOCHS})


def measure(arguments: Arguments, _: Path) -> Found:
    """Make the sweep; with --quick check one figure."""
    keep, job = arguments.keep, job_at(images_of(arguments))
    if not arguments.full:
        grid = {"global_batch": BATCHES[1:], "warmup_epochs": WARMUPS[:2]}
        check = swept_in(keep / "check", job, grid, (0,))
        name = f"warmup_gain_points_{BATCHES[1]}"
        return {f"{name}_check": warmups_found(check, BENCHMARK, EPOCHS)[name]}, told(check=check)
    grid = {"global_batch": BATCHES, "warmup_epochs": WARMUPS}
    swept = swept_in(keep / "long", job, grid, SEEDS)
    return warmups_found(swept, BENCHMARK, EPOCHS), told(long=swept)


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
