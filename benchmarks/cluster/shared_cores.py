"""Equal shares, shares as published, and ours, where workers are uneven because they share a core.

Four workers, each a process with one thread: three share one core, the fourth has the other one to
itself. So the three are slow because of each other's work, which changes with their shares; there
is no other load. `resnet8` on 7,680 images of CIFAR-100 at 16 px, initial local batch 64 each, so
30 steps an epoch; a worker's share goes through the network at once, however large; float32, SGD at
a constant rate, gradients summed at every step. Three rules for the shares:

    equal        each worker has the same share throughout
    ours         `rebalance=smoothed`, the default: shares are computed anew every 25 steps and at
                 the end of an epoch
    published    `rebalance=published`: shares follow the times of the last epoch alone, once an
                 epoch

The three arms of a start are alive together and take turns, an epoch each; the order is reversed
from epoch to epoch. There are five epochs; the first, in which all begin with equal shares, is not
counted.

The figures: seconds over those of equal shares in the same start, of the last two epochs together
(`last`), and of the last four (`counted`); median and quartiles over twelve starts (--quick: one).
`published_over_ours` is the mean over the starts of seconds with published shares over seconds with
ours, with its 95 % interval. Published shares shorten epochs here if the upper quartile of `last`
is below 1; one rule is faster than the other if the interval does not contain 1. All of this was
fixed before a run was made, but for the number of starts, which was eight at first.

Ideal shares would give 2/3: with equal shares a step takes the shared core three times as long as a
quarter of the batch takes, fixed time included; with half of the work on each core, both take twice
as long as a quarter. The exchange of gradients comes on top with every rule.

--full takes some nine minutes on two quiet cores. --keep DIR keeps each finished start (a minute)
and continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from batchwright.records import Plan
from benchmarks.cluster.shares import (
    SIDE,
    SUMMED,
    WAY_WORDS,
    Seconds,
    images_for,
    job_of,
    seconds_of,
)
from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure, ratios
from benchmarks.harness.plans import Opened, fixed_plan, opened
from benchmarks.harness.turns import Arm, take_turns

NETWORK, IMAGES, BATCHES, CORES = "resnet8", 7_680, (64,) * 4, (0, 0, 0, 1)
STARTS, EPOCHS = 12, 5
COUNTED = {"last": (3, 4), "counted": (1, 2, 3, 4)}  # zero-based
COUNTED_WORDS = {
    "last": "the last two of the four epochs that count",
    "counted": "all four epochs that count",
}

BENCHMARK = Benchmark(
    "shared_cores",
    "Shares that follow speed, several workers on one core",
    "CIFAR-100 at 16 px, `resnet8`, four workers on two cores, three of them on one; gradients "
    "summed at each step; ratios to equal shares: median and quartiles, published "
    "over ours: mean and 95 % interval",
    tuple(
        figure
        for counted, when in COUNTED_WORDS.items()
        for figure in (
            *(
                Figure(f"{way}_over_equal_{counted}", "ratio", "median",
                       f"seconds with {words} over equal shares (ideal: 0.67); {when}")
                for way, words in WAY_WORDS.items()
            ),
            Figure(f"published_over_ours_{counted}", "ratio", "interval",
                   f"seconds with published shares over ours; {when}"),
        )
    ),
    needs_data="always",
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Time all starts, one after the other."""
    known = opened(images_for(arguments, folder, IMAGES), NETWORK, SIDE)
    assert arguments.keep is not None
    starts = [
        seconds_of(
            arguments.keep / f"start-{start}.json", plans_of(known, start), folder, CORES, through
        )
        for start in range(STARTS if arguments.full else 1)
    ]
    return found_of(starts), {"epoch_seconds": starts}


def found_of(starts: Sequence[Seconds]) -> dict[str, list[float]]:
    """All figures, by name, from all starts."""
    found: dict[str, list[float]] = {}
    for counted, epochs in COUNTED.items():
        sums = {way: [sum(one[way][epoch] for epoch in epochs) for one in starts] for way in SUMMED}
        for way in WAY_WORDS:
            found[f"{way}_over_equal_{counted}"] = ratios(sums[way], sums["equal"])
        found[f"published_over_ours_{counted}"] = ratios(sums["published"], sums["ours"])
    return found


def plans_of(known: Opened, seed: int) -> dict[str, Plan]:
    """The plan of each arm."""
    whole = {"micro_batch_size": sum(BATCHES)}
    return {
        way: fixed_plan(
            job_of(known, seed, BATCHES, **keys),
            known.facts,
            known.network,
            whole,
            batches=BATCHES,
        )
        for way, keys in SUMMED.items()
    }


def through(arms: Mapping[str, Arm]) -> Seconds:
    """Seconds of all epochs of all arms, in turns."""
    turns = {name: partial(_epoch, arm) for name, arm in arms.items()}
    return take_turns(turns, EPOCHS, form="{:.2f} s".format)


def _epoch(arm: Arm) -> float:
    arm.begin(lead_in=0, steps=1)
    return arm.end().seconds


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
