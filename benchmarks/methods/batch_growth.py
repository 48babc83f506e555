"""A batch that grows with the measured gradient noise: the same accuracy in less time?

`batch_growth=noise` doubles the global batch, and raises the rate by its root, for each time that
the noise scale has doubled since the first epoch. Here it trains with Muon beside two others:

    base      the batch stays
    noise     it grows
    short     it stays, for one epoch fewer: what else saves as much time

Three tasks of `benchmarks.planning.decisions_runs`, with the images and the longer length of their
looks: ten groups of CIFAR-100's classes with `resnet8` (batch 128), CIFAR-100 with `vgg8` (128),
Imagenette at 64 px with `resnet8` (32). Two workers with a core each, which measure the noise by
comparing their gradients; plans without a probe, so at the same usual rates. Seeds 17 to 22,
paired: the same initial weights and order of samples. One training at a time has the machine to
itself; the arms take turns, and with each seed a different one comes first.

Growth pays if, over the 18 pairs, it costs at most 0.25 points in the mean and a point on no task,
takes at most 0.95 of the time, and is at least 0.25 points ahead of `short`. All of this was
written down before the code under test had run; earlier trainings at other seeds, in which the
batch followed the noise of `base`, are in docs/log.md ("A batch that grows with Muon, planned").

--full makes 54 trainings, some 20 minutes. --keep keeps finished ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from batchwright.records import Job, Plan
from batchwright.records.documents import change_job
from benchmarks.harness.benchmark import Arguments, Benchmark, Found
from benchmarks.harness.figures import Figure
from benchmarks.harness.kept_runs import KeptRuns, Run, Wanted, plain_runs
from benchmarks.harness.plans import Opened, planned
from benchmarks.planning.decisions_runs import TASKS, job_keys, open_images

BATCHES = {"groups-resnet8": 128, "cifar-vgg8": 128, "imagenette-resnet8": 32}
"""Global batch at the start, by task: the one that plans choose, or near it."""
ARMS = ("base", "noise", "short")
WORKERS, SEEDS = 2, range(17, 23)

BENCHMARK = Benchmark(
    "batch_growth",
    "Batches that grow with the gradient noise",
    "ten groups of CIFAR-100's classes with `resnet8`, CIFAR-100 with `vgg8`, Imagenette at 64 px "
    "with `resnet8`; Muon, two workers with a core each, 7 to 12 epochs, six seeds each",
    (
        Figure("points", "points", "interval", "accuracy with `batch_growth=noise` minus that "
               "with the batch that stays, paired seeds", at_least=-0.25),
        Figure("points_worst_task", "points", "least", "the same, mean over a task's seeds, worst "
               "task", at_least=-1.0),
        Figure("time", "ratio", "median", "training time over that with the batch that stays",
               at_most=0.95),
        Figure("points_over_short", "points", "interval", "accuracy with `batch_growth=noise` "
               "minus that of one epoch fewer", at_least=0.25),
        Figure("time_short", "ratio", "median", "training time of one epoch fewer over that of "
               "all"),
        Figure("growth", "ratio", "median", "batch of the last epoch over that of the first"),
    ),
    seeds=SEEDS,
    needs_data="always",
    copies=True,
)  # fmt: skip


def plan_of(name: str, arm: str, seed: int, known: Opened) -> Plan:
    """The plan of a training on a task."""
    task = TASKS[name]
    keys = job_keys(task, known, max(task.epochs) - (arm == "short"))
    asked = {
        "optimizer": "muon",
        "global_batch": BATCHES[name],
        "workers": WORKERS,
        "launch": "local",
        "seed": seed,
        "batch_growth": "noise" if arm == "noise" else "off",
    }
    return planned(change_job(Job(), {**keys, **asked}), known)


def measure(arguments: Arguments, folder: Path) -> Found:
    """Train all arms with each seed on each task."""
    seeds = SEEDS if arguments.full else SEEDS[:1]
    tasks = BATCHES if arguments.full else ("groups-resnet8",)
    runs = {}
    for name in tasks:
        known = open_images(TASKS[name], arguments.data, folder, look=TASKS[name].look_images)
        made = folder / f"{name}-runs"
        made.mkdir()
        wanted = [
            Wanted(arm, seed, plan_of(name, arm, seed, known))
            for at, seed in enumerate(seeds)
            for arm in (*ARMS[at % len(ARMS) :], *ARMS[: at % len(ARMS)])
        ]
        runs[name] = KeptRuns(arguments.keep / name, made, alone=True).by_arm(wanted)
    found = found_of(runs)
    if not arguments.full:
        found = {f"{key}_check": some for key, some in found.items()}
    return found, {"runs": {name: plain_runs(some) for name, some in runs.items()}}


def found_of(runs: Mapping[str, Mapping[str, Sequence[Run]]]) -> dict[str, list[float]]:
    """All figures, by name, from runs by task and arm over the same seeds."""
    by_task = {
        name: list(zip(*(arms[arm] for arm in ARMS), strict=True)) for name, arms in runs.items()
    }
    every = [one for some in by_task.values() for one in some]
    return {
        "points": [noise.accuracy - base.accuracy for base, noise, _ in every],
        "points_worst_task": [
            fmean(noise.accuracy - base.accuracy for base, noise, _ in some)
            for some in by_task.values()
        ],
        "time": [noise.seconds / base.seconds for base, noise, _ in every],
        "points_over_short": [noise.accuracy - short.accuracy for _, noise, short in every],
        "time_short": [short.seconds / base.seconds for base, _, short in every],
        "growth": [
            sum(noise.batches) / BATCHES[name]
            for name, some in by_task.items()
            for _, noise, _ in some
        ],
    }


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
