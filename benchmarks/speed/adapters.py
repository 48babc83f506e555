"""Other trainers with our sampler and weighting against the same trainers without, and trackers.

CIFAR-100 on the CPU, `resnet8`, 32 px, random crop and flip image by image, SGD with Nesterov
momentum 0.9, weight decay 5e-4, constant rate 0.1, float32; two workers under DDP (gloo), each with
one thread, pinned to a core, 64 samples each in a step; data are loaded in the workers. The arms of
a trainer are alive together and take turns, the order reversed from round to round; a turn is one
epoch of 30 steps.

`NAME_over_plain`, for Lightning, Transformers' Trainer and accelerate: images per second with our
adapter and equal shares over those without it. Whole epochs are timed, because accelerate's own
loader makes each batch a step ahead, so it makes none in an epoch's last step. 4 rounds with
--quick; with --full 2 rounds in each of six sittings, which start all processes anew, since two
processes of the same kind differ by more than epochs of one process do. Median of the ratios within
a round, and quartiles. `adapter_over_plain` is the lowest of the three medians.

`NAME_uneven_over_plain`: one of two workers at half speed, as a burner process takes its part of
the second worker's core. Epoch seconds with shares that follow the speeds over those without the
adapter; 4 epochs with --quick, 6 with --full, of which the first two, in which shares are found, do
not count. The limit is 2/3. `uneven_pair` is the highest of the three medians.

`NAME_overhead`, of a tracker: our own loop, one worker with two threads, batch 128, with the
separate process that sends the run's lines to TensorBoard, MLflow (SQLite), Weights & Biases
(offline) or trackio, and without it. Both are the same training process; in every other turn the
tracker's process is stopped. The figure is images per second without it over those with it, minus
1. A turn with it begins when it has nothing left to do, and the next turn begins when that is so
again. Each turn has 24 steps that are not timed, and 60 that are: what the process does about the
former falls into the timed steps, as what it does about the last timed ones falls behind them. 2
rounds with --quick, 12 with --full. `tracker_overhead` is the highest median.
`NAME_processor_share` is the process's processor time, from the start of such a turn until it is
idle, over that of all cores in the turn: the least that it can cost, and not disturbed by the
scatter of step times.

It needs the CIFAR-100 folder and cores 0 and 1. A trainer or tracker that is not installed is left
out: `pip install ".[benchmark,transformers,tracking]"`, and `pip install trackio`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from batchwright.records import Job
from batchwright.records.registries.trackers import TRACKERS
from batchwright.workload.data.sources import open_data
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.beside import Beside
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
STEPS = 30  # of an epoch
SITTINGS, ROUNDS = {False: 1, True: 6}, {False: 4, True: 2}  # by --full; rounds of a sitting
UNEVEN_EPOCHS = {False: 4, True: 6}
FIRST_COUNTED = 2  # zero-based: the third epoch
TRACKED_ROUNDS, TRACKED_LEAD_IN, TRACKED_STEPS = {False: 2, True: 12}, 24, 60

BENCHMARK = Benchmark(
    "adapters",
    "Inside other people's trainers",
    "CIFAR-100, `resnet8`, two workers under DDP with one thread each on a core of its own, 64 "
    "samples each in a step; the trainer with our adapter (sampler and weighting) and the trainer "
    "without it take turns",
    (
        Figure("adapter_over_plain", "ratio", "median", "images/s with our adapter over without, "
               "equal shares, lowest of the three trainers", at_least=0.98),
        Figure("uneven_pair", "ratio", "median", "epoch time with our adapter over without, one of "
               "two workers at half speed, highest of the three trainers (limit: 0.67)",
               at_most=0.72),
        *(
            Figure(f"{name}_over_plain", "ratio", "median",
                   f"{words}: images/s with our adapter over without, equal shares", at_least=0.98)
            for name, words in TRAINERS.items()
        ),
        *(
            Figure(f"{name}_uneven_over_plain", "ratio", "median", f"{words}: epoch time with our "
                   "adapter over without, one of two workers at half speed (limit: 0.67)",
                   at_most=0.72)
            for name, words in TRAINERS.items()
        ),
        Figure("tracker_overhead", "share", "median", "our own loop: training time that a "
               "tracker's process costs, highest of the trackers", at_most=0.01),
        *(
            Figure(f"{name}_overhead", "share", "median",
                   f"our own loop: training time that the process of {name} costs", at_most=0.01)
            for name in TRACKERS.own
        ),
        *(
            Figure(f"{name}_processor_share", "share", "median", "our own loop: processor time of "
                   f"the process of {name} over that of all cores")
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
    """Measure all installed trainers, then all installed trackers."""
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
        say(f"{name}: equal shares, then one worker at half speed")
        rates, seconds = trainer_measured(name, arguments.data, arguments.full)
        over[name] = ratios(rates["adapter"], rates["plain"])
        uneven[name] = ratios(*(seconds[arm][FIRST_COUNTED:] for arm in ("adapter", "plain")))
        found |= {f"{name}_over_plain": over[name], f"{name}_uneven_over_plain": uneven[name]}
        found |= {f"{name}_{arm}_images_per_second": some for arm, some in rates.items()}
        measurements[name] = {"images_per_second": rates, "uneven_seconds": seconds}
    say("trackers")
    costs: dict[str, list[float]] = {}
    tracked = tracked_turns(arguments.data, folder, TRACKED_ROUNDS[arguments.full])
    for name, turns in tracked.items():
        alone, beside = ([rate for rate, _ in turns[one]] for one in ("alone", "beside"))
        costs[name] = [one - 1 for one in ratios(alone, beside)]
        found[f"{name}_processor_share"] = [share for _, share in turns["beside"]]
    measurements["tracked"] = tracked
    found |= {f"{name}_overhead": some for name, some in costs.items()}
    if costs:
        found["tracker_overhead"] = max(costs.values(), key=median)
    if over:
        found["adapter_over_plain"] = min(over.values(), key=median)
        found["uneven_pair"] = max(uneven.values(), key=median)
    return found, measurements


def trainer_measured(
    name: str, data: Path, full: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Images per second with equal shares, and epoch seconds with a burner beside worker 1."""
    loop = getattr(arms, name)
    shares = {"plain": None, "adapter": "equal", "follow": "follow"}
    starters = {
        arm: partial(Arm, loop, data, STEPS, given, cores=(0, 1)) for arm, given in shares.items()
    }
    equal = {arm: starters[arm] for arm in ("plain", "adapter")}
    rates: dict[str, list[float]] = {arm: [] for arm in equal}
    for _ in range(SITTINGS[full]):
        for arm, some in epochs(equal, ROUNDS[full]).items():
            rates[arm] += some
    with Burner(1):
        pair = {arm: starters[arm] for arm in ("plain", "follow")}
        uneven = epochs(pair, UNEVEN_EPOCHS[full])
    uneven = {"plain": uneven["plain"], "adapter": uneven["follow"]}
    return rates, {arm: [STEPS * BATCH / rate for rate in some] for arm, some in uneven.items()}


def epochs(starters: Mapping[str, Callable[[], Arm]], rounds: int) -> dict[str, list[float]]:
    """Images per second of whole epochs, after one epoch in which caches fill."""
    return images_per_second(starters, rounds, lead_in=0, steps=STEPS, warm_up=STEPS)


def tracked_turns(data: Path, folder: Path, rounds: int) -> dict[str, dict[str, list[Any]]]:
    """Turns of our own loop by installed tracker: `alone` and `beside` the tracker's process."""
    os.environ["WANDB_MODE"] = "offline"
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    places = {"tensorboard": folder / "tensorboard", "mlflow": f"sqlite:///{folder}/runs.db"}
    found = {}
    for name, spec in TRACKERS.own.items():
        if find_spec(spec.package) is None:
            say(f"{name} is not installed and left out")
            continue
        say(f"{name}: without it and with it")
        word = f"{name}:{places.get(name, 'benchmark')}"
        run = folder / name
        with started({name: partial(Arm, arms.session, data, run, (word,))}) as alive:
            (arm,) = alive.values()
            (trainer,) = arm.pids
            assert trainer is not None  # it was started
            beside = Beside(trainer, run)
            arm.turn(lead_in=0, steps=2 * TRACKED_LEAD_IN)  # caches, and the tracker opens
            beside.rest()
            turns = {
                "alone": partial(turn_alone, arm, beside),
                "beside": partial(turn_beside, arm, beside),
            }
            found[name] = take_turns(turns, rounds, form=lambda turn: f"{turn[0]:.0f} images/s")
    return found


def turn_alone(arm: Arm, beside: Beside) -> tuple[float, float]:
    """Images per second while the tracker's process is stopped, and 0 for its processor share."""
    beside.stand_still()
    try:
        rate = arm.turn(lead_in=TRACKED_LEAD_IN, steps=TRACKED_STEPS)
    finally:
        beside.go_on()
    beside.rest()
    return rate, 0.0


def turn_beside(arm: Arm, beside: Beside) -> tuple[float, float]:
    """Images per second beside the tracker's process, and its share of all cores' time."""
    used, began = beside.seconds(), time.monotonic()
    rate = arm.turn(lead_in=TRACKED_LEAD_IN, steps=TRACKED_STEPS)
    seconds = time.monotonic() - began
    beside.rest()
    return rate, (beside.seconds() - used) / seconds / len(os.sched_getaffinity(0))


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
