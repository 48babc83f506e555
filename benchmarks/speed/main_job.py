"""The main job: speed against plain loops and peers, and the accuracy it reaches.

Speed. CIFAR-100 on the CPU, `resnet8`, one worker, batch 128, 32 px, random crop out of a border of
4 px and horizontal flip, SGD with Nesterov momentum 0.9, weight decay 5e-4, constant rate 0.1, seed
0. Images per second over training steps, input included, start-up and evaluation not. The arms are
alive together, one process each, and take turns in one run: in every round each trains 8 steps
that are not timed and then 30 that are; the order is reversed from round to round. 12 rounds with
--quick, 40 with --full. A ratio is the median over the rounds of the ratio within a round, its
spread the quartiles.

    session         our loop (Session over ImagePipeline, with its records), float32
    session_auto    the same with precision=auto: bfloat16 where the processor computes in it
    bare            a plain PyTorch loop written by hand: the same uint8 data in memory, augmented a
                    batch at a time, channels last, fused SGD; same threads and allocator settings
    resident_batch  the same steps on one prepared batch
    lightning       LightningModule and Trainer as started by default, with a DataLoader of two
                    loader processes; logger, checkpoints and progress bar off; float32
    accelerate      a plain loop under Accelerator as started by default, the same DataLoader

The peers get our network in channels last, which is the faster format for them too.

Accuracy. `digits_accuracy`: last held-out accuracy (360 images) of `batchwright run` with its
defaults, seeds 0 to 4; mean and range. `main_job_seconds`: wall time of those commands; mean and
range. `auto_accuracy`: precision=auto against float32, both trained by our loop on CIFAR-100 for 3
epochs (settings as above, but the rate falls to 0 along half a cosine) from the same weights and in
the same order, seeds 0 to 7; difference of held-out accuracy (10,000 images), 95 % interval of the
mean; no worse means that its lower end is above -1.0 point.

--full measures everything and keeps the report in benchmarks/results. --quick copies the accuracy
figures from the newest kept report and runs seed 0 of each again as a check. Without the CIFAR-100
folder, or where a peer is not installed, the figures that need it are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from batchwright.records import Job
from batchwright.records.documents import write_record
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import computes_in_bfloat16
from benchmarks.harness.common import (
    Arguments,
    Figure,
    Measurements,
    difference_figure,
    kept_figures,
    mean_figure,
    median_figure,
    ratio_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.turns import Arm, started, take_turns
from benchmarks.speed import main_job_arms as arms

LEAD_IN_STEPS, TIMED_STEPS = 8, 30
WARM_UP_STEPS = 40
QUICK_ROUNDS, FULL_ROUNDS = 12, 40
DIGITS_SEEDS = tuple(range(5))
DIGITS_GOAL, MAIN_JOB_SECONDS_GOAL = 0.97, 120.0
PAIR_SEEDS = tuple(range(8))
PAIR_EPOCHS = 3
MARGIN = 1.0  # points

RATIOS = (
    ("session_over_bare", "session", "bare", 0.98),
    ("over_resident_batch", "session", "resident_batch", 0.97),
    ("over_lightning", "session", "lightning", 1.25),
    ("over_accelerate", "session", "accelerate", 1.25),
    ("over_lightning_auto", "session_auto", "lightning", 1.6),
)
KEPT = ("digits_accuracy", "main_job_seconds", "auto_accuracy")


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("main_job", __doc__, _measure, full_seeds=DIGITS_SEEDS + PAIR_SEEDS)


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    figures: list[Figure] = []
    measurements: Measurements = {}
    if arguments.data is not None:
        say("CIFAR-100: reading")
        open_data(Job(data=f"cifar100:{arguments.data}"))
        rounds = FULL_ROUNDS if arguments.full else QUICK_ROUNDS
        rates = _images_per_second(arguments.data, folder, rounds)
        measurements["images_per_second"] = rates
        figures += _timing_figures(rates)
    suffix = "" if arguments.full else "_check"  # of one seed, beside the kept figure
    if not arguments.full:
        figures += kept_figures("main_job", KEPT)
    seconds, accuracies = _digits(DIGITS_SEEDS if arguments.full else (0,), folder)
    measurements["digits"] = {"accuracy": accuracies, "seconds": seconds}
    figures += [
        mean_figure(f"digits_accuracy{suffix}", accuracies, "share", at_least=DIGITS_GOAL),
        mean_figure(f"main_job_seconds{suffix}", seconds, "s", at_most=MAIN_JOB_SECONDS_GOAL),
    ]
    if arguments.data is not None and computes_in_bfloat16(torch.device("cpu")):
        seeds = PAIR_SEEDS if arguments.full else (0,)
        auto, float32 = _accuracy_pairs(arguments.data, seeds, folder)
        measurements["cifar100_accuracy"] = {"auto": auto, "float32": float32}
        points = [[100 * accuracy for accuracy in both] for both in (auto, float32)]
        figures.append(
            difference_figure(f"auto_accuracy{suffix}", *points, "points", margin=MARGIN)
        )
    return figures, measurements


# ------------------------------------------------------------------------------------------ speed


def _images_per_second(data: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """By arm, images per second in each round."""
    with started(_arms(data, folder / "runs")) as alive:
        for name, arm in alive.items():
            say(f"warming up {name}")
            arm.turn(lead_in=0, steps=WARM_UP_STEPS)
        turns = {
            name: partial(arm.turn, lead_in=LEAD_IN_STEPS, steps=TIMED_STEPS)
            for name, arm in alive.items()
        }
        return take_turns(turns, rounds, show=say)


def _arms(data: Path, runs: Path) -> dict[str, Callable[[], Arm]]:
    """What starts each arm that this machine can run."""
    loops: list[tuple[Any, ...]] = [
        (arms.session, data, runs),
        (arms.bare, data),
        (arms.resident_batch, data),
    ]
    loops += [
        (peer, data) for peer in (arms.lightning, arms.accelerate) if _installed(peer.__name__)
    ]
    if computes_in_bfloat16(torch.device("cpu")):
        loops.append((arms.session_auto, data, runs))
    return {loop.__name__: partial(Arm, loop, *rest) for loop, *rest in loops}


def _installed(peer: str) -> bool:
    if find_spec(peer) is not None:
        return True
    say(f"{peer} is not installed and left out: pip install {peer}")
    return False


def _timing_figures(rates: dict[str, list[float]]) -> list[Figure]:
    ratios = [
        ratio_figure(name, rates[over], rates[under], at_least=goal)
        for name, over, under, goal in RATIOS
        if over in rates and under in rates
    ]
    return ratios + [
        median_figure(f"{arm}_images_per_second", values, "images/s")
        for arm, values in rates.items()
    ]


# --------------------------------------------------------------------------------------- accuracy


def _digits(seeds: Sequence[int], folder: Path) -> tuple[list[float], list[float]]:
    """Wall seconds and accuracy of ``batchwright run`` with each seed."""
    seconds, accuracies = [], []
    for seed in seeds:
        started = time.perf_counter()
        result = _batchwright("run", f"seed={seed}", "--out", folder / f"digits-{seed}")
        seconds.append(time.perf_counter() - started)
        accuracies.append(result["test_accuracy"])
        say(f"digits, seed {seed}: accuracy {accuracies[-1]:.4f} in {seconds[-1]:.0f} s")
    return seconds, accuracies


def _accuracy_pairs(
    data: Path, seeds: Sequence[int], folder: Path
) -> tuple[list[float], list[float]]:
    """Accuracy with precision=auto and with float32 for each seed."""
    found: dict[str, list[float]] = {"auto": [], "float32": []}
    for seed in seeds:
        for precision, accuracies in found.items():
            name = folder / f"{precision}-{seed}"
            plan = arms.cifar_plan(
                data, epochs=PAIR_EPOCHS, precision=precision, seed=seed, decay="cosine"
            )
            write_record(plan, name.with_suffix(".json"))
            result = _batchwright("train", name.with_suffix(".json"), "--out", name)
            accuracies.append(result["test_accuracy"])
        say(f"CIFAR-100, seed {seed}: " + ", ".join(f"{k} {v[-1]:.4f}" for k, v in found.items()))
    return found["auto"], found["float32"]


def _batchwright(*words: str | Path) -> dict[str, Any]:
    """What a command prints as JSON; its own messages go to standard error if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "batchwright.cli.commands", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"batchwright {' '.join(map(str, words))} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
