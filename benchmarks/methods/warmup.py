"""Warm-up, scaling of the rate, and batch: the figures of the warm-up poster, drawn again.

McCord and Dash (SC21) trained ResNet-50 on ImageNet for 90 epochs, with 60 and with about 240 times
the batch of one GPU, warm-up of 0, 5, 10 and 20 epochs, and the rate scaled with the batch or not.
Here all is smaller, and epochs are scaled by a fifth: 18 for 90, so warm-up of 0, 1, 2 and 4. Two
fifths of CIFAR-100 (20,000 images evenly spaced, and 2,000 held out) at half their side, `resnet8`,
bfloat16 where the processor computes in it, SGD with momentum 0.9 and decay 5e-5, rate 0.0125 at
batch 16, a tenth at 1/3, 2/3 and 8/9 of the epochs, as in the example that the poster seems to
follow; so 60 and 240 times the base batch are 960 and 3,840, and linear scaling gives the poster's
rates, 0.75 and 3. Batches are accumulated in parts of at most 128, each with its own batch
statistics, as on a GPU of the poster's. What is not scaled: an epoch has 21 and 5 steps here, and
167 and 42 there.

Two sweeps (`batchwright sweep`), the same seeds in all cells of one:

    warmup   global_batch 960, 3840 x warmup_epochs 0, 1, 2, 4, linear scaling; seeds 0 to 4
    batch    global_batch 60, 240, 960, 3840 x scaling none, linear, warm-up 1; seeds 0 to 2

    warmup_best_epochs_B        warm-up with the best mean accuracy, in epochs of 90; spread: from
                                the shortest to the longest within one standard error of it
    warmup_gain_points_B        the better of those above 0 (by the mean) less none, paired
    scaled_over_unscaled_points_B   linear scaling less none at each batch, paired
    accuracy_RULE_B             mean and range

Accuracy is held out, after the last epoch; of differences the spread is Student's 95 % interval.
The curves epoch by epoch are drawn as figures/ in the folder of each sweep, which --keep keeps.

--full takes some three quarters of an hour on two cores that compute in bfloat16, and goes on where
it was with --keep. --quick repeats what was kept, and runs warm-up 0 and 1 at 3,840 with seed 0
again as a check. Without the CIFAR-100 folder nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.records import Job, Sweep, SweepSetting
from batchwright.workflows.sweep.verb import sweep
from benchmarks.harness.common import (
    Arguments,
    Figure,
    difference_figure,
    kept_figures,
    mean_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.kept_runs import quick_precision
from benchmarks.harness.smaller import smaller_cifar100

SEEDS: Mapping[str, Sequence[int]] = {"warmup": range(5), "batch": range(3)}
TRAIN_IMAGES, HELD_OUT_IMAGES, SIDE = 20_000, 2_000, 16
EPOCHS, POSTER_EPOCHS = 18, 90
BASE_BATCH, BASE_RATE = 16, 0.0125
LARGE = (60 * BASE_BATCH, 240 * BASE_BATCH)
BATCHES = (60, 240, *LARGE)
WARMUPS = (0.0, 1.0, 2.0, 4.0)
RULES = ("none", "linear")
CHECKED = "warmup_gain_points_3840"

GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "warmup": {"global_batch": LARGE, "warmup_epochs": WARMUPS},
    "batch": {"global_batch": BATCHES, "scaling": RULES},
}


def job_of(data: Path) -> Job:
    """What all runs share."""
    return Job(
        data=f"cifar100:{data}",
        network="resnet8",
        resolutions=(SIDE,),
        precision=quick_precision(),
        weight_decay=5e-5,
        learning_rate=BASE_RATE,
        base_batch=BASE_BATCH,
        scaling="linear",
        warmup_epochs=1.0,
        decay="steps",
        micro_batch=128,
        epochs=EPOCHS,
    )


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("warmup", __doc__, _measure, full_seeds=SEEDS["warmup"])


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], dict[str, Any]]:
    if arguments.data is None:
        say("warm-up: it needs the CIFAR-100 folder")
        return [], {}
    keep = arguments.keep or folder / "kept"
    data = keep / "images"
    if not data.exists():
        smaller_cifar100(arguments.data, TRAIN_IMAGES, data, held_out=HELD_OUT_IMAGES)
    if not arguments.full:
        grid = {"global_batch": LARGE[1:], "warmup_epochs": WARMUPS[:2]}
        found = _swept(keep / "check", data, grid, (0,))
        check = [replace(one, name=f"{CHECKED}_check") for one in warmup_figures(found)]
        check = [one for one in check if one.unit == "points"]
        return [*kept_figures("warmup", names_of_figures()), *check], _told(check=found)
    found = {name: _swept(keep / name, data, grid, SEEDS[name]) for name, grid in GRIDS.items()}
    figures = [*warmup_figures(found["warmup"]), *batch_figures(found["batch"])]
    return figures, _told(**found)


def _swept(
    folder: Path, data: Path, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> Sweep:
    """A sweep, gone on with where it was."""
    if (folder / "sweep.json").exists():
        found = sweep(None, grid, seeds=seeds, out=folder, resume=True)
    else:
        found = sweep(job_of(data), grid, seeds=seeds, out=folder)
    for cell in found.failed:
        raise SystemExit(f"{cell.name}: {cell.error}")
    say(f"curves: {folder / 'figures'}")
    return found


# ---------------------------------------------------------------------------------------- figures


def names_of_figures() -> list[str]:
    """All that a full run gives."""
    return [
        *(f"warmup_{what}_{batch}" for batch in LARGE for what in ("best_epochs", "gain_points")),
        *(f"scaled_over_unscaled_points_{batch}" for batch in BATCHES),
        *(f"accuracy_{rule}_{batch}" for batch in BATCHES for rule in RULES),
    ]


def warmup_figures(found: Sweep) -> list[Figure]:
    """The best warm-up at each batch, and what it gains."""
    figures = []
    for batch in next(one.values for one in found.keys if one.key == "global_batch"):
        settings = [one for one in found.settings if one.values[0] == batch]
        best = max(settings, key=_mean)
        near = [_epochs(one) for one in settings if _mean(one) >= _mean(best) - _error(best)]
        figures.append(
            Figure(
                f"warmup_best_epochs_{batch}",
                _epochs(best),
                "epochs",
                min(near),
                max(near),
                best.done,
            )
        )
        warmed = max((one for one in settings if one.values[1]), key=_mean)
        without = next(one for one in settings if not one.values[1])
        figures.append(
            _difference(f"warmup_gain_points_{batch}", found, warmed.values, without.values)
        )
    return figures


def batch_figures(found: Sweep) -> list[Figure]:
    """Scaled against unscaled rate at each batch, and each accuracy."""
    differences = [
        _difference(
            f"scaled_over_unscaled_points_{batch}", found, (batch, "linear"), (batch, "none")
        )
        for batch in BATCHES
    ]
    accuracies = [
        mean_figure(f"accuracy_{rule}_{batch}", _percents(found, (batch, rule)), "%")
        for batch in BATCHES
        for rule in RULES
    ]
    return [*differences, *accuracies]


def _difference(
    name: str, found: Sweep, one: tuple[Any, ...], reference: tuple[Any, ...]
) -> Figure:
    """Mean difference over the seeds; no goal: whatever the data say."""
    values, others = _percents(found, one), _percents(found, reference)
    figure = difference_figure(name, values, others, "points", margin=0.0)
    return replace(figure, goal=None, met=None)


def _percents(found: Sweep, values: tuple[Any, ...]) -> list[float]:
    """Last accuracy of a setting, seed by seed."""
    shares = [cell.accuracy for cell in found.runs_of(values)]
    return [100 * share for share in shares if share is not None]


def _mean(one: SweepSetting) -> float:
    return one.accuracy.value if one.accuracy else 0.0


def _error(one: SweepSetting) -> float:
    return (one.accuracy.standard_error or 0.0) if one.accuracy else 0.0


def _epochs(one: SweepSetting) -> float:
    """The warm-up in epochs of the poster's training."""
    return float(str(one.values[1])) * POSTER_EPOCHS / EPOCHS


def _told(**found: Sweep) -> dict[str, Any]:
    """Accuracy epoch by epoch of every run, by sweep and cell."""
    return {
        name: {cell.name: [_rounded(share) for share in cell.accuracies] for cell in one.cells}
        for name, one in found.items()
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 5)


if __name__ == "__main__":
    main()
