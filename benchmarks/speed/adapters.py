"""Trainers of other people's with our sampler and weighting, beside the same without.

CIFAR-100 on the CPU, `resnet8`, 32 px, random crop and flip item by item, SGD with Nesterov
momentum 0.9, weight decay 5e-4, constant rate 0.1, float32; two workers under DDP (gloo), each with
one thread, pinned to a core, 64 samples each in a step; data are loaded in the workers. Both arms
of a trainer are alive together and take turns, the order reversed from round to round; a turn is
one epoch.

`NAME_over_plain`, for Lightning, Transformers' Trainer and accelerate: images per second with the
adapter, equal shares, over those without; 5 steps of a turn that are not timed and 25 that are; 6
rounds with --quick, 24 with --full; median of the ratios within a round, and quartiles.
`adapter_over_plain` is the lowest of the three medians.

`NAME_uneven_over_plain`: one of two workers at half speed, a burner process taking its share of the
second worker's core, from the first step on. Epoch seconds with shares that follow the speeds over
those without the adapter; epochs of 30 steps with --quick, of 50 with --full, 5 and 8 epochs, of
which the first two, in which shares are found, do not count; the limit is 2/3. `uneven_pair` is the
highest of the three medians.

`NAME_overhead`, of a tracker: our own loop by one worker with two threads, batch 128, alone and
with the process beside it that hands its lines on to TensorBoard, MLflow (SQLite), Weights & Biases
(offline) or trackio; images per second without over those with, less 1. 8 steps that are not timed
and 40 that are; 8 rounds with --quick, 30 with --full. `tracker_overhead` is the highest median.

It needs the CIFAR-100 folder and cores 0 and 1; a trainer or tracker that is not installed is left
out: `pip install ".[benchmark,transformers,tracking]"`, and `pip install trackio`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from batchwright.records import Job
from batchwright.records.registries.trackers import TRACKERS
from batchwright.workload.data.sources import open_data
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, ratios
from benchmarks.harness.loads import Burner
from benchmarks.harness.turns import Arm, images_per_second, started, take_turns
from benchmarks.speed import adapters_arms as arms
from benchmarks.speed.main_job_arms import BATCH

TRAINERS = {
    "lightning": "Lightning",
    "transformers": "Transformers' Trainer",
    "accelerate": "accelerate",
}
LEAD_IN_STEPS, TIMED_STEPS = 5, 25
ROUNDS = {False: 6, True: 24}  # by --full
TRACKED_ROUNDS, TRACKED_LEAD_IN, TRACKED_STEPS = {False: 8, True: 30}, 8, 40
UNEVEN_STEPS, UNEVEN_EPOCHS, FIRST_COUNTED = {False: 30, True: 50}, {False: 5, True: 8}, 2

BENCHMARK = Benchmark(
    "adapters",
    "Inside other people's trainers",
    "CIFAR-100, `resnet8`, two workers under DDP with one thread each on a core of its own, 64 "
    "samples each in a step; with our sampler and weighting and without take turns",
    (
        Figure("adapter_over_plain", "ratio", "median", "equal shares: images/s with our sampler "
               "and weighting over those without, the lowest of the three trainers",
               at_least=0.98),
        Figure("uneven_pair", "ratio", "median", "one of two workers at half speed: epoch time "
               "with our shares over theirs, the highest of the three trainers (limit: 0.67)",
               at_most=0.72),
        *(
            Figure(f"{name}_over_plain", "ratio", "median", f"{words}: images/s with over without",
                   at_least=0.98)
            for name, words in TRAINERS.items()
        ),
        *(
            Figure(f"{name}_uneven_over_plain", "ratio", "median",
                   f"{words}: epoch time of the uneven pair with over without", at_most=0.72)
            for name, words in TRAINERS.items()
        ),
        Figure("tracker_overhead", "share", "median", "our own loop with a tracker: time that the "
               "process beside it takes from training, the highest of the trackers",
               at_most=0.01),
        *(
            Figure(f"{name}_overhead", "share", "median", f"{name}: the same", at_most=0.01)
            for name in TRACKERS.own
        ),
        *(
            Figure(f"{name}_{arm}_images_per_second", "images/s", "median")
            for name in TRAINERS for arm in ("plain", "adapter")
        ),
    ),
    needs_data="always",
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Trainer by trainer, what is installed."""
    assert arguments.data is not None  # it needs data always
    if not {0, 1} <= os.sched_getaffinity(0):
        raise SystemExit("benchmarks.speed.adapters needs cores 0 and 1: leave both to it")
    say("CIFAR-100: reading")
    open_data(Job(data=f"cifar100:{arguments.data}"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or the trainers would take GPUs
    found: dict[str, Sequence[float]] = {}
    measurements: dict[str, Any] = {}
    over: dict[str, list[float]] = {}
    uneven: dict[str, list[float]] = {}
    for name in TRAINERS:
        if find_spec(name) is None:
            say(f"{name} is not installed and left out: pip install 'batchwright[{name}]'")
            continue
        say(f"{name}: equal shares")
        rates = equal_rates(name, arguments.data, ROUNDS[arguments.full])
        say(f"{name}: one worker at half speed")
        seconds = uneven_seconds(name, arguments.data, arguments.full)
        over[name] = ratios(rates["adapter"], rates["plain"])
        uneven[name] = ratios(*(seconds[arm][FIRST_COUNTED:] for arm in ("adapter", "plain")))
        found |= {f"{name}_over_plain": over[name], f"{name}_uneven_over_plain": uneven[name]}
        found |= {f"{name}_{arm}_images_per_second": some for arm, some in rates.items()}
        measurements[name] = {"images_per_second": rates, "uneven_seconds": seconds}
    say("trackers")
    shown = tracked_rates(arguments.data, folder, TRACKED_ROUNDS[arguments.full])
    measurements["tracked"] = shown
    costs = {
        name: [one - 1 for one in ratios(shown["alone"], some)]
        for name, some in shown.items()
        if name != "alone"
    }
    found |= {f"{name}_overhead": some for name, some in costs.items()}
    if costs:
        found["tracker_overhead"] = max(costs.values(), key=median)
    if over:
        found["adapter_over_plain"] = min(over.values(), key=median)
        found["uneven_pair"] = max(uneven.values(), key=median)
    return found, measurements


def starters(name: str, data: Path, steps: int, shares: str) -> Mapping[str, Any]:
    """What starts a trainer without our adapter, and with it."""
    loop = getattr(arms, name)
    return {
        arm: partial(Arm, loop, data, steps, given, cores=(0, 1))
        for arm, given in (("plain", None), ("adapter", shares))
    }


def equal_rates(name: str, data: Path, rounds: int) -> dict[str, list[float]]:
    """Images per second of both arms with equal shares."""
    steps = LEAD_IN_STEPS + TIMED_STEPS
    made = starters(name, data, steps, "equal")
    return images_per_second(made, rounds, lead_in=LEAD_IN_STEPS, steps=TIMED_STEPS, warm_up=steps)


def uneven_seconds(name: str, data: Path, full: bool) -> dict[str, list[float]]:
    """Seconds of each epoch of both arms, with a burner beside the second worker."""
    steps = UNEVEN_STEPS[full]
    with started(starters(name, data, steps, "follow")) as alive, Burner(1):
        turns = {arm: partial(one.turn, lead_in=0, steps=steps) for arm, one in alive.items()}
        rates = take_turns(turns, UNEVEN_EPOCHS[full])
    return {arm: [steps * BATCH / rate for rate in some] for arm, some in rates.items()}


def tracked_rates(data: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Images per second of our own loop alone, and beside each tracker that is installed."""
    os.environ["WANDB_MODE"] = "offline"
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    places = {"tensorboard": folder / "tensorboard", "mlflow": f"sqlite:///{folder}/runs.db"}
    made = {"alone": partial(Arm, arms.session, data, folder / "alone", ())}
    for name, spec in TRACKERS.own.items():
        if find_spec(spec.package) is None:
            say(f"{name} is not installed and left out")
            continue
        word = f"{name}:{places.get(name, 'benchmark')}"
        made[name] = partial(Arm, arms.session, data, folder / name, (word,))
    how = {"lead_in": TRACKED_LEAD_IN, "steps": TRACKED_STEPS, "warm_up": 4 * TRACKED_STEPS}
    return images_per_second(made, rounds, **how)


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
