"""Warm-up, scaling of the rate, and batch: the figures of the warm-up poster, measured again.

McCord and Dash (SC21) trained ResNet-50 on ImageNet for 90 epochs, with 60 and with about 240 times
the batch of one GPU, with a warm-up of 0, 5, 10 and 20 epochs, and with the rate scaled with the
batch or not.

Here everything is smaller, and lengths are a fifth: 18 epochs for 90, so a warm-up of 0, 1, 2 and
4 epochs. Two fifths of CIFAR-100 (20,000 images evenly spaced, and 2,000 held out) at half their
side, `resnet8`, bfloat16 where the processor computes in it, SGD with momentum 0.9 and weight
decay 5e-5, rate 0.0125 at batch 16, divided by 10 at 1/3, 2/3 and 8/9 of the epochs, as in the
example that the poster seems to follow. So 60 and 240 times the base batch are 960 and 3,840, and
linear scaling gives the poster's rates, 0.75 and 3. Batches are accumulated in parts of at most
128, each with its own batch statistics, as on one of the poster's GPUs. The number of steps is not
that of the poster: an epoch has 21 and 5 steps here, and 167 and 42 there.

Two sweeps (`batchwright sweep`) with the same seeds in all their cells:

    warmup   global_batch 960, 3840 x warmup_epochs 0, 1, 2, 4, linear scaling; seeds 0 to 4
    batch    global_batch 60, 240, 960, 3840 x scaling none, linear, warm-up 1; seeds 0 to 2

The best warm-up is the one with the best mean accuracy, in epochs of 90; its spread is from the
shortest to the longest warm-up within one standard error of that accuracy. The gain of warm-up is
the best one above 0 (by the mean) minus none, paired; another figure is the longest minus the best.
Accuracy is held out, after the last epoch; the spread of differences is Student's 95 % interval.
The curves epoch by epoch are drawn in figures/ in the folder of each sweep, which --keep keeps.

--full takes some three quarters of an hour on two cores that compute in bfloat16; --quick checks
warm-up 0 and 1 at 3,840.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from batchwright.records import Job, Sweep, SweepSetting
from batchwright.workflows.sweep.verb import sweep
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value, differences
from benchmarks.harness.images import smaller_cifar100
from benchmarks.harness.plans import job_from, quick_precision

SEEDS: Mapping[str, Sequence[int]] = {"warmup": range(5), "batch": range(3)}
TRAIN_IMAGES, HELD_OUT_IMAGES, SIDE = 20_000, 2_000, 16
EPOCHS, POSTER_EPOCHS = 18, 90
BASE_BATCH, BASE_RATE = 16, 0.0125
LARGE = (60 * BASE_BATCH, 240 * BASE_BATCH)
BATCHES = (60, 240, *LARGE)
WARMUPS = (0.0, 1.0, 2.0, 4.0)
RULES = ("none", "linear")

GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "warmup": {"global_batch": LARGE, "warmup_epochs": WARMUPS},
    "batch": {"global_batch": BATCHES, "scaling": RULES},
}

BENCHMARK = Benchmark(
    "warmup",
    "Warm-up and the rule for the rate",
    "The warm-up poster's figures (ResNet-50 on ImageNet, 90 epochs) measured again: 20,000 images "
    "of CIFAR-100 at 16 px, `resnet8`, 18 epochs, rate 0.0125 at batch 16, divided by 10 at 1/3, "
    "2/3 and 8/9 of them; five paired seeds for warm-ups, three for the rule",
    (
        *(
            Figure(f"warmup_best_epochs_{batch}", "epochs", "largest", "warm-up with the best mean "
                   f"accuracy, batch {batch:,}, in epochs of 90; spread: warm-ups within one "
                   "standard error of it")
            for batch in LARGE
        ),
        *(
            Figure(f"warmup_gain_points_{batch}", "points", "interval", "accuracy with the best "
                   f"warm-up above 0 minus accuracy without warm-up, batch {batch:,}")
            for batch in LARGE
        ),
        *(
            Figure(f"longest_over_best_points_{batch}", "points", "interval", "accuracy with the "
                   "longest warm-up, 20 of 90 epochs, minus accuracy with the best, batch "
                   f"{batch:,}")
            for batch in LARGE
        ),
        *(
            Figure(f"scaled_over_unscaled_points_{batch}", "points", "interval", "accuracy with "
                   f"linear scaling of the rate minus accuracy without scaling, batch {batch:,}")
            for batch in BATCHES
        ),
        *(
            Figure(f"accuracy_{rule}_{batch}", "%", "mean",
                   f"accuracy with {words}, batch {batch:,}")
            for rule, words in (("linear", "linear scaling of the rate"),
                                ("none", "the rate not scaled"))
            for batch in BATCHES
        ),
    ),
    seeds=SEEDS["warmup"],
    needs_data="always",
    copies=True,
)  # fmt: skip


def images_of(arguments: Arguments) -> Path:
    """The folder with the images of all runs, which is kept beside these."""
    images = arguments.keep / "images"
    if not images.exists():
        smaller_cifar100(arguments.data, TRAIN_IMAGES, images, held_out=HELD_OUT_IMAGES)
    return images


def job_of(data: Path) -> Job:
    """The job that all runs share."""
    return job_from(
        f"network=resnet8 resolutions={SIDE} precision={quick_precision()} weight_decay=5e-5 "
        f"learning_rate={BASE_RATE} base_batch={BASE_BATCH} scaling=linear warmup_epochs=1 "
        f"decay=steps micro_batch=128 epochs={EPOCHS}",
        data=f"cifar100:{data}",
    )


def measure(arguments: Arguments, _: Path) -> Found:
    """Make both sweeps; with --quick check one figure."""
    keep, job = arguments.keep, job_of(images_of(arguments))
    if not arguments.full:
        grid = {"global_batch": LARGE[1:], "warmup_epochs": WARMUPS[:2]}
        check = swept_in(keep / "check", job, grid, (0,))
        name = f"warmup_gain_points_{LARGE[1]}"
        return {f"{name}_check": warmups_found(check, BENCHMARK, EPOCHS)[name]}, told(check=check)
    swept = {name: swept_in(keep / name, job, grid, SEEDS[name]) for name, grid in GRIDS.items()}
    warmups = warmups_found(swept["warmup"], BENCHMARK, EPOCHS)
    return warmups | batches_found(swept["batch"], BATCHES), told(**swept)


def swept_in(
    folder: Path, job: Job, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> Sweep:
    """Make a sweep of a job, or continue the one in ``folder``."""
    if (folder / "sweep.json").exists():
        found = sweep(None, grid, seeds=seeds, out=folder, resume=True)
    else:
        found = sweep(job, grid, seeds=seeds, out=folder)
    for cell in found.failed:
        raise SystemExit(f"{cell.name}: {cell.error}")
    say(f"curves: {folder / 'figures'}")
    return found


def warmups_found(
    found: Sweep, benchmark: Benchmark, epochs: int
) -> dict[str, Sequence[float] | Value]:
    """The figures of warm-up, by name, from a sweep of trainings of ``epochs`` epochs."""
    made: dict[str, Sequence[float] | Value] = {}
    for batch in next(one.values for one in found.keys if one.key == "global_batch"):
        settings = [one for one in found.settings if one.values[0] == batch]
        best = max(settings, key=_mean)
        close = [one for one in settings if _mean(one) >= _mean(best) - _error(best)]
        near = [_epochs(one, epochs) for one in close]
        name = f"warmup_best_epochs_{batch}"
        made[name] = benchmark[name].made(_epochs(best, epochs), min(near), max(near), best.done)
        warmed = max((one for one in settings if one.values[1]), key=_mean)
        without = next(one for one in settings if not one.values[1])
        longest = max(settings, key=lambda one: float(str(one.values[1])))
        for name, one, other in (
            ("warmup_gain", warmed, without),
            ("longest_over_best", longest, best),
        ):
            made[f"{name}_points_{batch}"] = differences(
                _percents(found, one.values), _percents(found, other.values)
            )
    return made


def batches_found(found: Sweep, batches: Sequence[int]) -> dict[str, list[float]]:
    """The figures of rate scaling, by name, from a sweep over batches and rules."""
    percents = {
        (rule, batch): _percents(found, (batch, rule)) for batch, rule in product(batches, RULES)
    }
    return {
        **{
            f"scaled_over_unscaled_points_{batch}": differences(
                percents["linear", batch], percents["none", batch]
            )
            for batch in batches
        },
        **{f"accuracy_{rule}_{batch}": some for (rule, batch), some in percents.items()},
    }


def _percents(found: Sweep, values: tuple[Any, ...]) -> list[float]:
    """Last accuracy of a setting, in percent, seed by seed."""
    shares = [cell.accuracy for cell in found.runs_of(values)]
    return [100 * share for share in shares if share is not None]


def _mean(one: SweepSetting) -> float:
    return one.accuracy.value if one.accuracy else 0.0


def _error(one: SweepSetting) -> float:
    return (one.accuracy.standard_error or 0.0) if one.accuracy else 0.0


def _epochs(one: SweepSetting, epochs: int) -> float:
    """The warm-up of a setting, in epochs of the poster's training of 90."""
    return float(str(one.values[1])) * POSTER_EPOCHS / epochs


def told(**found: Sweep) -> dict[str, Any]:
    """Accuracy epoch by epoch of every run, by sweep and cell."""
    return {
        name: {
            cell.name: [None if share is None else round(share, 5) for share in cell.accuracies]
            for cell in one.cells
        }
        for name, one in found.items()
    }


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
