"""The main job: speed against plain loops and other trainers, and the accuracy that it reaches.

Speed. CIFAR-100 on the CPU, `resnet8`, one worker, batch 128, 32 px, random crop out of a border of
4 px and horizontal flip, SGD with Nesterov momentum 0.9, weight decay 5e-4, constant rate 0.1, seed
0. Speed is images per second over training steps, with input, without start-up and evaluation. The
arms are alive together, one process each, and take turns in one run: in every round each trains 8
steps that are not timed and then 30 that are; the order is reversed from round to round. After 5
rounds all arms are started anew, as a process has a speed of its own, a few percent from that of
the next; 2 starts with --quick, 6 with --full. A ratio is the median over all rounds of the ratio
within a round; its spread is the quartiles.

    session         our loop (Session over ImagePipeline, with its records), float32
    session_auto    our loop with precision=auto: bfloat16 where the processor computes in it
    bare            a plain PyTorch loop written by hand: the same uint8 data in memory, augmented a
                    batch at a time, channels last, fused SGD; same threads and allocator settings
    resident_batch  the steps of `bare` on one prepared batch
    lightning       LightningModule and Trainer, with a DataLoader; logger, checkpoints and progress
                    bar off; float32
    accelerate      a plain loop under Accelerator, with a DataLoader; float32

Lightning and accelerate get our network in channels last and fused SGD, which are faster for them,
too, and their best number of loader processes: before the arms are timed, each of the two trains
with 0, 1 and 2 of them in turns, in 6 rounds that do not count, and keeps the number with the
highest median of images per second.

Accuracy. `digits_accuracy` and `main_job_seconds`: `batchwright run` with its defaults, seeds 0 to
4; mean and range. `auto_accuracy`: precision=auto against float32, both trained by our loop on
CIFAR-100 for 3 epochs (settings as above, but the rate falls to 0 along half a cosine) from the
same weights and in the same order, seeds 0 to 7: mean difference of held-out accuracy (10,000
images) with its 95 % interval. The goal, no worse, is met if the lower end is above -1.0 point.

Without the CIFAR-100 folder, or where Lightning or accelerate is not installed, the figures that
need them are left out.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from batchwright.records import Job
from batchwright.records.documents import write_record
from batchwright.workload.data.sources import open_data
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, batchwright, say
from benchmarks.harness.figures import Figure, differences, ratios
from benchmarks.harness.plans import quick_precision
from benchmarks.harness.turns import Arm, images_per_second
from benchmarks.speed import main_job_arms as arms

ROUNDS, STARTS = 5, {False: 2, True: 6}  # by --full
LOADER_ROUNDS = 6  # to choose the number of loader processes
TURN = {"lead_in": 8, "steps": 30, "warm_up": 40}  # in steps
PEERS = ("lightning", "accelerate")
DIGITS_SEEDS, PAIR_SEEDS, PAIR_EPOCHS = range(5), range(8), 3
RATIOS = {
    "session_over_bare": ("session", "bare"),
    "over_resident_batch": ("session", "resident_batch"),
    "over_lightning": ("session", "lightning"),
    "over_accelerate": ("session", "accelerate"),
    "over_lightning_auto": ("session_auto", "lightning"),
}
ARMS = ("session", "bare", "resident_batch", "lightning", "accelerate", "session_auto")

BENCHMARK = Benchmark(
    "main_job",
    "One worker, and the first command",
    "Ratios compare arms that took turns in one run. CIFAR-100, `resnet8`, batch 128, one worker, "
    "unless said otherwise",
    (
        Figure("session_over_bare", "ratio", "median", "images/s, our loop over a plain PyTorch "
               "loop written by hand, the same data in memory", at_least=0.98),
        Figure("over_resident_batch", "ratio", "median", "images/s, our loop over the same steps "
               "on one batch that is already prepared", at_least=0.97),
        Figure("over_lightning", "ratio", "median", "images/s, our loop over Lightning with "
               "its best of 0, 1 and 2 loader processes, both float32", at_least=1.25),
        Figure("over_accelerate", "ratio", "median", "images/s, our loop over accelerate with "
               "its best of 0, 1 and 2 loader processes, both float32", at_least=1.25),
        Figure("over_lightning_auto", "ratio", "median", "images/s, our loop with "
               "`precision=auto` over Lightning as above, in float32", at_least=1.6),
        Figure("auto_accuracy", "points", "interval", "accuracy with `precision=auto` minus "
               "accuracy with float32, paired seeds", above=-1.0, full=True),
        Figure("digits_accuracy", "share", "mean",
               "held-out accuracy of `batchwright run` with its defaults (digits)",
               at_least=0.97, full=True),
        Figure("main_job_seconds", "s", "mean",
               "wall time of `batchwright run` with its defaults (digits)",
               at_most=120.0, full=True),
        *(Figure(f"{arm}_images_per_second", "images/s", "median") for arm in ARMS),
        *(Figure(f"{peer}_{count}_loaders_images_per_second", "images/s", "median")
          for peer in PEERS for count in arms.LOADERS),
    ),
    seeds=PAIR_SEEDS,
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Measure speed, and accuracies with all seeds, or with seed 0 as a check."""
    found: dict[str, list[float]] = {}
    measurements: dict[str, Any] = {}
    suffix = "" if arguments.full else "_check"
    if arguments.data is not None:
        say("CIFAR-100: reading")
        open_data(Job(data=f"cifar100:{arguments.data}"))
        starters = {
            name: partial(Arm, getattr(arms, name), arguments.data, folder / "runs")
            for name in ARMS
            if can_run(name)
        }
        looked = {}
        for peer in [name for name in PEERS if name in starters]:
            counts = {str(count): partial(starters[peer], count) for count in arms.LOADERS}
            looks = images_per_second(counts, LOADER_ROUNDS, **TURN)
            looked[peer] = looks
            found |= {f"{peer}_{n}_loaders_images_per_second": some for n, some in looks.items()}
            best = max(looks, key=lambda count: median(looks[count]))
            say(f"{peer}: {best} loader processes")
            starters[peer] = counts[best]
        rates = images_per_second(starters, ROUNDS, starts=STARTS[arguments.full], **TURN)
        measurements |= {"loader_processes": looked, "images_per_second": rates}
        found |= {
            name: ratios(rates[over], rates[under])
            for name, (over, under) in RATIOS.items()
            if over in rates and under in rates
        }
        found |= {f"{arm}_images_per_second": some for arm, some in rates.items()}
    digits: dict[str, list[float]] = {"accuracy": [], "seconds": []}
    for seed in DIGITS_SEEDS if arguments.full else (0,):
        started = time.perf_counter()
        result = batchwright("run", f"seed={seed}", "--out", folder / f"digits-{seed}")
        digits["seconds"].append(time.perf_counter() - started)
        digits["accuracy"].append(result["test_accuracy"])
        say(f"digits, seed {seed}: accuracy {result['test_accuracy']:.4f}")
    measurements["digits"] = digits
    found[f"digits_accuracy{suffix}"] = digits["accuracy"]
    found[f"main_job_seconds{suffix}"] = digits["seconds"]
    if arguments.data is not None and quick_precision() == "bfloat16":
        pairs = accuracy_pairs(arguments.data, PAIR_SEEDS if arguments.full else range(1), folder)
        measurements["cifar100_accuracy"] = pairs
        gains = differences(pairs["auto"], pairs["float32"])
        found[f"auto_accuracy{suffix}"] = [100 * gain for gain in gains]
    return found, measurements


def can_run(arm: str) -> bool:
    """Whether the arm's package is installed and the processor has the arm's precision."""
    if arm in PEERS and find_spec(arm) is None:
        say(f"{arm} is not installed and left out: pip install {arm}")
        return False
    return arm != "session_auto" or quick_precision() == "bfloat16"


def accuracy_pairs(data: Path, seeds: range, folder: Path) -> dict[str, list[float]]:
    """Accuracy with precision=auto and with float32 for each seed, as a share."""
    found: dict[str, list[float]] = {"auto": [], "float32": []}
    for seed in seeds:
        for precision, accuracies in found.items():
            name = folder / f"{precision}-{seed}"
            plan = arms.cifar_plan(
                data, epochs=PAIR_EPOCHS, precision=precision, seed=seed, decay="cosine"
            )
            write_record(plan, name.with_suffix(".json"))
            result = batchwright("train", name.with_suffix(".json"), "--out", name)
            accuracies.append(result["test_accuracy"])
        say(f"CIFAR-100, seed {seed}: " + ", ".join(f"{k} {v[-1]:.4f}" for k, v in found.items()))
    return found


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
