"""Scaled against unscaled learning rates where the largest batch has a thousand steps.

The second figure of the warm-up poster again. In `benchmarks.methods.warmup`, a batch of 240 times
the base has 90 steps in all; here it has 1,008, in the trainings of
`benchmarks.methods.warmup_long`: 20,000 images, base batch 4, 48 epochs, batches 240 and 960. The
rate is scaled with the batch (`linear`) or stays that of the base batch, 0.0125 (`none`), both
after the poster's warm-up of 5 epochs in 90, which has no effect where the rate is not scaled.
Seeds 0 to 2 are paired.

The poster found no difference: the claim is that linear scaling gains nothing, and it is refuted
where the 95 % interval of the gain is above 0. All of this was fixed before a run was made.

--full makes 12 runs of 0.96 million images each, some 80 minutes on a core that computes in
float32; --quick checks batch 960 with seed 0.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure
from benchmarks.methods.warmup import RULES, batches_found, images_of, swept_in, told
from benchmarks.methods.warmup_long import BATCHES, SEEDS, STEPS, WARMUPS, job_at

WARMUP = WARMUPS[1]  # 5 epochs in 90

BENCHMARK = Benchmark(
    "scaling_long",
    "The rule for the rate in trainings of a thousand steps",
    "20,000 images of CIFAR-100 at 16 px, `resnet8`, 48 epochs, rate 0.0125 at batch 4, scaled or "
    "not, warm-up 5 epochs of 90, divided by 10 at 1/3, 2/3 and 8/9 of the epochs; three paired "
    "seeds",
    tuple(
        Figure(f"{name}_{batch}", unit, spread, f"{words}, batch {batch}, {steps:,} steps")
        for name, unit, spread, words in (
            ("scaled_over_unscaled_points", "points", "interval",
             "accuracy with linear scaling of the rate minus accuracy without scaling"),
            ("accuracy_linear", "%", "mean", "accuracy with linear scaling of the rate"),
            ("accuracy_none", "%", "mean", "accuracy with the rate not scaled"),
        )
        for batch, steps in zip(BATCHES, STEPS, strict=True)
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


def measure(arguments: Arguments, _: Path) -> Found:
    """Make the sweep; with --quick check one figure."""
    job = job_at(images_of(arguments)).model_copy(update={"warmup_epochs": WARMUP})
    batches, seeds = (BATCHES, SEEDS) if arguments.full else (BATCHES[1:], (0,))
    # The largest batch, which the claim is about, is trained first.
    swept = swept_in(
        arguments.keep / ("long" if arguments.full else "check"),
        job,
        {"global_batch": tuple(reversed(batches)), "scaling": RULES},
        seeds,
    )
    found = batches_found(swept, batches)
    if arguments.full:
        return found, told(long=swept)
    name = f"scaled_over_unscaled_points_{BATCHES[1]}"
    made = BENCHMARK[name].of(found[name], suffix="_check")
    return {made.name: made}, told(check=swept)


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
