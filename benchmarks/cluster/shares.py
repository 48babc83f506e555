"""Equal shares, shares as published, and ours, under a load that comes and goes.

A share is a worker's part of the samples. Two workers, each a process with one thread on a core of
its own; `resnet8` and `mobilenet_small` on 3,840 images of CIFAR-100 at 16 px, initial local batch
64 each, float32, SGD at a constant rate. The load is a burner process that never waits and takes
its part of one core. Three rules for the shares:

    equal        each worker has the same share throughout
    ours         `rebalance=smoothed`, the default: shares are computed anew every 25 steps and at
                 the end of an epoch; with the server `dual.shares=measured`, the default
    published    `rebalance=published`: shares follow the times of the last epoch alone, once an
                 epoch; with the server `dual.shares=published`

Each is combined with two kinds of exchange: gradients summed at every step (`sum`), and models
averaged once an epoch by a parameter server whose workers wait for each other (`average`;
`server.consistency=bsp`). The six arms of a start are alive together and take turns, an epoch each;
the order is reversed from epoch to epoch. There are seven epochs, with the same load for each arm:

    1       no load; not counted
    2       a load starts on the second core, after half of the time that the first epoch took with
            equal shares and summed gradients
    3, 4    the load stays
    5       it ends, after the same time
    6, 7    a load on the first core

The figures, for each network and kind of exchange: seconds over those of equal shares in the same
start, of epoch 4, the third under the load (`steady`), and of epochs 2 to 7 (`changing`); median
and quartiles over twelve starts (--quick: one). `published_over_ours` is the mean over the starts
of seconds with published shares over seconds with ours, with its 95 % interval. A rule becomes the
default for a kind of exchange if all four intervals lie on its side of 1; else the default stays.
All of this was fixed before a run was made, but for the number of starts, which was eight at first.
Perfect shares would give 0.67 if one of two workers had half its speed; a worker beside a burner
keeps rather more than half a core.

--full takes some 30 minutes on two quiet cores. --keep DIR keeps each finished start of a network
(one to two minutes) and continues from there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.records import Job, Plan, ServerRule
from benchmarks.cluster import uneven_arms
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, ratios
from benchmarks.harness.images import smaller_cifar100
from benchmarks.harness.kept_runs import Wanted
from benchmarks.harness.loads import Burner
from benchmarks.harness.plans import ENDLESS, Opened, fixed_plan, job_from, opened
from benchmarks.harness.turns import LIMIT_SECONDS, Arm, started, take_turns

NETWORKS = ("resnet8", "mobilenet_small")
SIDE, IMAGES, HELD_OUT, BATCHES = 16, 3_840, 500, (64, 64)
STARTS = 12
WAYS, MERGES = ("equal", "ours", "published"), ("sum", "average")
SUMMED: Mapping[str, Mapping[str, Any]] = {
    "equal": {"method": "plain"},
    "ours": {"method": "dynamic-batch"},
    "published": {"method": "dynamic-batch", "rebalance": "published"},
}
SHARES = {"equal": "planned", "ours": "measured", "published": "published"}  # dual.shares

AVERAGING = ServerRule(
    consistency="bsp",
    staleness=None,
    merge="journal",
    update_factor="ratio",
    exchange_steps=None,
    momentum="keep",
    small_workers=0,
    extra_time=1.0,
)


@dataclass(frozen=True)
class Load:
    """The load during an epoch of each arm.

    Attributes:
        core: The core that a burner runs on; ``None``: there is no load.
        comes: Whether it starts after a while.
        goes: Whether it ends after a while.
    """

    core: int | None = None
    comes: bool = False
    goes: bool = False


LOADS = (
    *(Load(), Load(1, comes=True), Load(1), Load(1), Load(1, goes=True)),
    *(Load(0), Load(0)),
)
COUNTED = {"steady": (3,), "changing": tuple(range(1, len(LOADS)))}  # zero-based
COUNTED_WORDS = {
    "steady": "third epoch under a load on one core",
    "changing": "six epochs in which a load starts, ends and starts on the other core",
}
MERGE_WORDS = {"sum": "gradients summed each step", "average": "models averaged each epoch"}
WAY_WORDS = {"ours": "our shares", "published": "published shares"}

BENCHMARK = Benchmark(
    "shares",
    "Shares that follow speed: as published, and ours",
    "CIFAR-100 at 16 px, two workers with a core each and a burner process, which never waits, on "
    "one of the cores; ratios to equal shares: median and quartiles, published over "
    "ours: mean and 95 % interval",
    tuple(
        figure
        for network in NETWORKS
        for merge in MERGES
        for counted, when in COUNTED_WORDS.items()
        for figure in (
            *(
                Figure(f"{way}_over_equal_{counted}_{merge}_{network}", "ratio", "median",
                       f"seconds with {words} over equal shares; {when}; `{network}`, "
                       f"{MERGE_WORDS[merge]}")
                for way, words in WAY_WORDS.items()
            ),
            Figure(f"published_over_ours_{counted}_{merge}_{network}", "ratio", "interval",
                   f"seconds with published shares over ours; {when}; `{network}`, "
                   f"{MERGE_WORDS[merge]}"),
        )
    ),
    needs_data="always",
)  # fmt: skip

Seconds = Mapping[str, Sequence[float]]
"""Seconds of each epoch, by arm."""


def measure(arguments: Arguments, folder: Path) -> Found:
    """Time all starts, the networks in turn, so that an early end leaves starts of both."""
    data = images_for(arguments, folder, IMAGES)
    known = {network: opened(data, network, SIDE) for network in NETWORKS}
    starts: dict[str, list[Seconds]] = {network: [] for network in NETWORKS}
    for start in range(STARTS if arguments.full else 1):
        for network, some in starts.items():
            plans = plans_of(known[network], start)
            file = arguments.keep / f"{network}-{start}.json"
            some.append(seconds_of(file, plans, folder, (0, 1), _under_loads))
    return found_of(starts), {"epoch_seconds": starts}


def images_for(arguments: Arguments, folder: Path, images: int) -> str:
    """Copy ``images`` images, make the folder for kept starts, and return a job's key `data`.

    Raises:
        SystemExit: This process may not use cores 0 and 1.
    """
    if not {0, 1} <= os.sched_getaffinity(0):
        raise SystemExit("workers are put on cores 0 and 1, which this process may not both have")
    assert arguments.data is not None
    assert arguments.keep is not None
    arguments.keep.mkdir(parents=True, exist_ok=True)
    return (
        f"cifar100:{smaller_cifar100(arguments.data, images, folder / 'images', held_out=HELD_OUT)}"
    )


def found_of(starts: Mapping[str, Sequence[Seconds]]) -> dict[str, list[float]]:
    """All figures, by name, from the starts of each network."""
    found: dict[str, list[float]] = {}
    for network, some in starts.items():
        for merge in MERGES:
            for counted, epochs in COUNTED.items():
                sums = {
                    way: [sum(one[f"{way}-{merge}"][epoch] for epoch in epochs) for one in some]
                    for way in WAYS
                }
                end = f"{counted}_{merge}_{network}"
                for way in WAY_WORDS:
                    found[f"{way}_over_equal_{end}"] = ratios(sums[way], sums["equal"])
                found[f"published_over_ours_{end}"] = ratios(sums["published"], sums["ours"])
    return found


# ------------------------------------------------------------------------------------------ plans


def plans_of(known: Opened, seed: int) -> dict[str, Plan]:
    """The plan of each arm."""
    return {
        f"{way}-{merge}": summed(known, way, seed) if merge == "sum" else averaged(known, way, seed)
        for merge in MERGES
        for way in WAYS
    }


def summed(known: Opened, way: str, seed: int) -> Plan:
    """Two workers that sum their gradients at every step."""
    job = job_of(known, seed, BATCHES, **SUMMED[way])
    return fixed_plan(job, known.facts, known.network, batches=BATCHES)


def averaged(known: Opened, way: str, seed: int) -> Plan:
    """Two workers that train for an epoch, average their models and wait for each other."""
    job = job_of(
        known,
        seed,
        BATCHES,
        method="dual-batch",
        dual={"small_workers": 0, "shares": SHARES[way]},
        server={"consistency": "bsp"},
    )
    row = {"samples_per_round": (IMAGES // 2,) * 2, "update_factors": (1.0, 1.0)}
    more = {"merge": "parameter server", "server": AVERAGING}
    return fixed_plan(job, known.facts, known.network, row, batches=BATCHES, **more)


def job_of(known: Opened, seed: int, batches: Sequence[int], **keys: Any) -> Job:
    """An endless job of workers with these initial local batches, at a constant rate."""
    # They sleep while the other arms have their turn, hence the timeout.
    return job_from(
        f"network={known.network.name} workers={len(batches)} device=cpu precision=float32 "
        f"learning_rate=0.1 base_batch={sum(batches)} scaling=none warmup_epochs=0 decay=none "
        f"augment=crop-flip global_batch={sum(batches)} resolutions={SIDE} epochs={ENDLESS} "
        f"evaluate_epochs={ENDLESS} checkpoint_seconds={ENDLESS} timeout={LIMIT_SECONDS} "
        f"seed={seed}",
        data=known.data,
        **keys,
    )


# ----------------------------------------------------------------------------------------- starts


def seconds_of(
    file: Path,
    plans: Mapping[str, Plan],
    folder: Path,
    cores: Sequence[int],
    through: Callable[[Mapping[str, Arm]], Seconds],
) -> Seconds:
    """Seconds of a start: all arms in new processes, through all epochs.

    Args:
        file: Keeps the seconds, which are reused if the same plans made them.
        plans: The plan of each arm, by its name.
        folder: Folder for run folders.
        cores: The core of each worker, in rank order.
        through: f(arms by name) -> seconds of each epoch, by arm.
    """
    if (kept := _kept(file, plans)) is not None:
        return kept
    say(f"{file.stem}: starting")
    runs = folder / file.stem
    runs.mkdir()
    starters = {
        arm: partial(Arm, uneven_arms.epochs, plan, runs / arm, cores=cores)
        for arm, plan in plans.items()
    }
    with started(starters) as arms:
        seconds = through(arms)
    aside = file.with_name(f".{file.stem}.writing")
    told = {"plans": _digests(plans), "seconds": seconds}
    aside.write_text(json.dumps(told) + "\n", encoding="utf-8")
    aside.replace(file)
    return seconds


def _under_loads(arms: Mapping[str, Arm]) -> Seconds:
    """Seconds of an epoch of each arm under each load."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    wait = 0.0
    for number, load in enumerate(LOADS):
        turns = {arm: partial(_turn, one, load, wait) for arm, one in arms.items()}
        # `take_turns` has one round at a time, so the order is reversed here.
        names = list(turns) if number % 2 == 0 else list(reversed(turns))
        told = take_turns({arm: turns[arm] for arm in names}, 1, form="{:.2f} s".format)
        for arm, (one,) in told.items():
            seconds[arm].append(one)
        wait = wait or seconds["equal-sum"][0] / 2
    return seconds


def _turn(arm: Arm, load: Load, wait: float) -> float:
    """Seconds of an arm's epoch under a load, which may start or end after ``wait`` seconds."""
    with _burning(load) as burner:
        arm.begin(lead_in=0, steps=1)
        if load.comes or load.goes:
            time.sleep(wait)
            if load.comes:
                burner.start()
            else:
                burner.stop()
        return arm.end().seconds


@contextmanager
def _burning(load: Load) -> Iterator[Burner]:
    burner = Burner(load.core or 0)
    try:
        if load.core is not None and not load.comes:
            burner.start()
        yield burner
    finally:
        burner.stop()


def _kept(file: Path, plans: Mapping[str, Plan]) -> Seconds | None:
    """The kept seconds of a start, if the same plans made them."""
    if not file.exists():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    seconds: Seconds = values["seconds"]
    return seconds if values["plans"] == _digests(plans) else None


def _digests(plans: Mapping[str, Plan]) -> dict[str, str]:
    return {arm: Wanted(arm, plan.job.seed, plan).digest for arm, plan in plans.items()}


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
