"""Predictions against measurements: step time, memory, epochs to a target, and the planner's speed.

Workloads. `resnet8`, `vgg8` (no batch normalization) and `mobilenet_small` (depthwise
convolutions), each on CIFAR-100 at 24 and 32 px and on the ImageNet subset at 64 px, with 1 and 2
worker processes on the CPU: six workloads. Each is probed (`probe.budget` 55 s with --full, 20 s
with --quick; no trials, since a training of 90 epochs would give them half an hour) and planned.

Step time. The plan predicts steps that the probe did not measure, at batches midway between
measured ones. `batchwright check` chooses 6 of them with --full, 4 with --quick, spread evenly over
workers, resolutions and batches, and measures each twice: once right after the plan, and once after
all other workloads. The measured value is the mean of both. Their difference relative to it
(`repeat_error`) shows how steady the machine was. An error is |predicted - measured| / measured;
the largest error of a step is to be at most 0.10.

Step time beside a load. All of it once more, in the same way, while another program comes and goes
on the last core: it computes for 2 to 20 s and rests for 2 to 20 s, all as likely, with seed 0
(`loads.stretches`), during probes and checks alike. A check is hardly longer than such a stretch,
so a step may be measured beside the program and predicted without it. Goals, set before the first
run: errors of 0.10 in the median, and 22 of 24 steps inside their intervals. How wide these are has
no goal there.

Memory is peak bytes of tensors. `memory_worst_under` is (measured - upper end of the interval) /
measured. For each workload a memory limit of 1.5 times its largest measured peak is set, so that
the answer lies beyond what was measured: the peak at `max_local_batch_size` is to be within that
limit (`memory_at_most`), and the peak at 1.05 times that batch beyond it (`memory_next_step`).
`probe_share` is a probe's seconds over those that it may take: 2 % of the training, or 60 s if that
is more.

Epochs to a target. `resnet8` on CIFAR-100, two workers, constant rate 0.1 at batch 128, scaled with
the square root of the batch, seed 1. The target is the epoch (interpolated) in which held-out
accuracy first reaches 20 %. The model is fitted to the run at batch 128 and the noise scale
measured in it, and predicts the epochs at batches 64, 256 and 512. Task and target were chosen
after seeing seed 0; docs/log.md says how.

Planner. Wall time of `plan` with objective knee and prices, median of 5, for made-up profiles of
five kinds of workers, 30 batches at 5 resolutions each, and 10 to 10,000 workers.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import batchwright as bw
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.prediction.accuracy.quality import fit_progress
from batchwright.prediction.memory import max_local_batch_size
from batchwright.probing.probe import measure_points
from batchwright.records import (
    Check,
    Cluster,
    Goal,
    Job,
    MemoryPoint,
    NetworkFacts,
    Plan,
    Profile,
    RunSummary,
    StepTime,
    WorkerKind,
)
from batchwright.records.documents import read_record
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, batchwright, say
from benchmarks.harness.figures import Figure, errors
from benchmarks.harness.loads import Burner
from benchmarks.harness.plans import job_from, made_up_data, opened

NETWORKS = ("resnet8", "vgg8", "mobilenet_small")
SIDES = {"cifar100": (24, 32), "imagefolder": (64,)}
FOLDERS = {"cifar100": "cifar-100-python", "imagefolder": "imagenette2-160"}
BUDGET, POINTS = {False: 20.0, True: 55.0}, {False: 4, True: 6}  # by --full
EPOCHS = 90  # of the planned training, a usual length on such data
LAST_CORE, BURNER_SEED = max(os.sched_getaffinity(0)), 0
PROBE_SHARE, PROBE_SECONDS = 0.02, 60.0
NEXT_STEP = 1.05

TARGET, REFERENCE, PREDICTED = 0.20, 128, (64, 256, 512)
TARGET_SEEDS = (1,)
TARGET_EPOCHS = {64: 3, 128: 4, 256: 5, 512: 7}

WORKERS = (10, 100, 1_000, 10_000)
PLAN_REPEATS = 5

BENCHMARK = Benchmark(
    "predict",
    "Predictions",
    "`resnet8`, `vgg8` and `mobilenet_small` on CIFAR-100 and Imagenette, one and two workers. An "
    "error is |predicted - measured| / measured. Spread: quartiles for medians, else from the "
    "median to the extreme",
    (
        Figure("step_seconds_median_error", "share", "median", "error of the predicted time of a "
               "step that was not probed, median", at_most=0.05),
        Figure("step_seconds_worst_error", "share", "largest", "error of the predicted time of a "
               "step that was not probed, largest", at_most=0.10),
        Figure("repeat_error", "share", "largest", "difference between two measurements of the "
               "same step, minutes apart, relative to their mean, largest"),
        Figure("interval_coverage", "share", "share", "share of the steps whose measured time lies "
               "in the predicted 95 % interval (half width {interval_half_width})",
               at_least=22 / 24),
        Figure("interval_half_width", "share", "median", "half width of the 95 % interval of a "
               "step's time, relative to the prediction", at_most=0.10),
        Figure("step_seconds_median_error_beside", "share", "median", "error of the predicted time "
               "of a step that was not probed, beside a program that comes and goes on one core, "
               "median", at_most=0.10),
        Figure("repeat_error_beside", "share", "largest", "difference between two measurements of "
               "the same step beside such a program, minutes apart, relative to their mean, "
               "largest"),
        Figure("interval_coverage_beside", "share", "share", "share of the steps beside such a "
               "program whose measured time lies in the predicted 95 % interval (half width "
               "{interval_half_width_beside})", at_least=22 / 24),
        Figure("interval_half_width_beside", "share", "median", "half width of the 95 % interval "
               "of a step's time, relative to the prediction, where probes ran beside such a "
               "program"),
        Figure("memory_median_error", "share", "median",
               "error of the predicted peak memory of tensors, median", at_most=0.03),
        Figure("memory_worst_under", "share", "largest", "excess of the measured peak memory of "
               "tensors over the upper end of its predicted interval, relative to the peak, "
               "largest (negative: below that end)", at_most=0.0),
        Figure("memory_at_most", "share", "largest", "peak memory of tensors at the largest local "
               "batch that is predicted to fit a limit, over that limit, largest", at_most=1.0),
        Figure("memory_next_step", "ratio", "least", "peak memory of tensors at 1.05 times the "
               "largest local batch that is predicted to fit a limit, over that limit, smallest "
               "(above 1: it does not fit)", at_least=1.0),
        Figure("probe_share", "share", "largest", "seconds of a probe over the seconds that it may "
               "take (2 % of a training of 90 epochs, at least 60 s), largest", at_most=1.0),
        Figure("epochs_to_target_error", "share", "largest", "error of the predicted number of "
               "epochs to an accuracy, three batches, largest", at_most=0.20, full=True),
        Figure("plan_10000_workers_seconds", "s", "median",
               "seconds to plan for 10,000 workers of five kinds", at_most=1.0),
        *(Figure(f"plan_{count}_workers_seconds", "s", "median",
                 f"seconds to plan for {count:,} workers of five kinds")
          for count in WORKERS[:-1]),
    ),
    seeds=TARGET_SEEDS,
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """The planner's speed, and predictions if there is a data folder."""
    seconds = {workers: _plan_seconds(workers) for workers in WORKERS}
    found: dict[str, Any] = {f"plan_{n}_workers_seconds": some for n, some in seconds.items()}
    measurements: dict[str, Any] = {"plan_seconds": seconds}
    if arguments.data is not None:
        more, values = predictions(arguments, folder)
        found, measurements = found | more, measurements | values
        if arguments.full:
            more, values = epochs_to_targets(arguments.data, folder)
            found, measurements = found | more, measurements | values
    return found, measurements


# ------------------------------------------------------------------------- step time and memory


@dataclass
class Workload:
    """A network on a data set: its profile and plan, and the checks made so far."""

    profile: Profile
    plan: Plan
    checks: list[Check]


def predictions(arguments: Arguments, folder: Path) -> Found:
    """Predicted and measured step times and peaks of memory, alone and beside a load."""
    workloads = _measured(arguments, folder)
    say(f"the same beside a program that comes and goes on core {LAST_CORE}")
    with Burner(LAST_CORE, seed=BURNER_SEED):
        beside = _measured(arguments, folder)
    limits = [_limit(workload.profile) for workload in workloads]
    steps, steps_beside = (_pairs(some, "step_seconds") for some in (workloads, beside))
    peaks = _pairs(workloads, "peak_bytes")
    found: dict[str, list[float]] = {
        **_found_of_steps(steps),
        "step_seconds_worst_error": [pair.error for pair in steps],
        **_found_of_steps(steps_beside, "_beside"),
        "memory_median_error": [pair.error for pair in peaks],
        "memory_worst_under": [pair.under for pair in peaks],
        "memory_next_step": [one["next"] for one in limits],
        "memory_at_most": [one["at"] for one in limits],
        "probe_share": [_probe_share(workload) for workload in workloads],
    }
    return found, {
        "step_seconds": [asdict(pair) for pair in steps],
        "step_seconds_beside": [asdict(pair) for pair in steps_beside],
        "peak_bytes": [asdict(pair) for pair in peaks],
        "limits": limits,
        "probe_seconds": [workload.profile.probe_seconds for workload in workloads],
        "loads_beside": [one.profile.load and one.profile.load.model_dump() for one in beside],
    }


def _found_of_steps(steps: Sequence[Pair], suffix: str = "") -> dict[str, list[float]]:
    """The figures that both arms have, by name."""
    return {
        f"step_seconds_median_error{suffix}": [pair.error for pair in steps],
        f"repeat_error{suffix}": [pair.repeat_error for pair in steps],
        f"interval_coverage{suffix}": [float(pair.inside) for pair in steps],
        f"interval_half_width{suffix}": [pair.half_width for pair in steps],
    }


def _measured(arguments: Arguments, folder: Path) -> list[Workload]:
    """Each workload probed, planned and checked; and checked again after all others."""
    workloads = []
    for kind, network in product(SIDES, NETWORKS):
        say(f"{network} on {kind}: probe")
        words = (
            *("device=cpu", f"network={network}", f"epochs={EPOCHS}"),
            f"data={kind}:{arguments.data / FOLDERS[kind]}",
            f"resolutions={','.join(map(str, SIDES[kind]))}",
            *(f"probe.budget={BUDGET[arguments.full]}", "probe.learning=0"),
        )
        # A process of its own, as for it the burner, which this process has started, is another's.
        batchwright("probe", *words, "--out", folder / "profile.json")
        profile = read_record(folder / "profile.json", Profile)
        workloads.append(Workload(profile, bw.plan(profile), []))
        _check(workloads[-1], POINTS[arguments.full])
    for workload in workloads:
        _check(workload, POINTS[arguments.full])
    return workloads


def _check(workload: Workload, points: int) -> None:
    job = workload.profile.job
    say(f"{job.network} on {job.data.partition(':')[0]}: check")
    workload.checks.append(bw.check(workload.plan, points=points))


@dataclass(frozen=True)
class Pair:
    """A prediction, and the two measurements that check it, in the quantity's unit."""

    quantity: str
    data: str
    network: str
    local_batch_size: int
    resolution: int
    workers: int
    predicted: float
    low: float
    high: float
    first: float
    second: float

    @property
    def measured(self) -> float:
        """Mean of the two measurements."""
        return (self.first + self.second) / 2

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return abs(self.predicted - self.measured) / self.measured

    @property
    def repeat_error(self) -> float:
        """Difference between the two measurements, relative to their mean."""
        return abs(self.first - self.second) / self.measured

    @property
    def half_width(self) -> float:
        """Half width of the interval, relative to the prediction."""
        return (self.high - self.low) / 2 / self.predicted

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.low <= self.measured <= self.high

    @property
    def under(self) -> float:
        """(measured - upper end of the interval) / measured; negative below that end."""
        return (self.measured - self.high) / self.measured


def _pairs(workloads: Sequence[Workload], quantity: str) -> list[Pair]:
    return [pair for one in workloads for pair in _paired(one, quantity)]


def _paired(workload: Workload, quantity: str) -> list[Pair]:
    both = ([p for p in check.points if p.quantity == quantity] for check in workload.checks)
    of_point = ("network", "local_batch_size", "resolution", "workers", "predicted", "low", "high")
    return [
        Pair(
            quantity=quantity,
            data=workload.profile.data.name,
            first=first.measured,
            second=second.measured,
            **{name: getattr(first, name) for name in of_point},
        )
        for first, second in zip(*both, strict=True)
    ]


def _limit(profile: Profile) -> dict[str, float]:
    """Peaks over a memory limit: at the largest batch predicted to fit, and at 1.05 times that."""
    side = max(profile.job.resolutions)
    limit = int(1.5 * max(p.peak_bytes for p in profile.memory if p.resolution == side))
    most = max_local_batch_size(profile, limit=limit, resolution=side, workers=1)
    above = -int(-NEXT_STEP * most // 1)
    at, following = (_peak(profile.job, side, batch) for batch in (most, above))
    return {"limit": limit, "batch": most, "at": at / limit, "next": following / limit}


def _peak(job: Job, side: int, batch: int) -> int:
    with tempfile.TemporaryDirectory(prefix="batchwright-benchmark-") as folder:
        found = measure_points(job, [(1, side, batch)], Path(folder), visits=1)
    return found.memory[0].peak_bytes


def _probe_share(workload: Workload) -> float:
    chosen = workload.plan.stages[0].predicted_epoch_seconds
    allowed = max(PROBE_SHARE * chosen.value * workload.plan.epochs, PROBE_SECONDS)
    return workload.profile.probe_seconds / allowed


# --------------------------------------------------------------------------- epochs to a target


def epochs_to_targets(data: Path, folder: Path) -> Found:
    """Predicted and measured epochs to the target, from a training at each batch."""
    runs = {
        batch: [_train(data, folder, batch, seed) for seed in TARGET_SEEDS]
        for batch in (REFERENCE, *PREDICTED)
    }
    measured = {batch: fmean(map(epochs_to_target, some)) for batch, some in runs.items()}
    progress = fit_progress(
        None, base_batch=REFERENCE, target=TARGET, runs=runs[REFERENCE], scaling="sqrt"
    )
    predicted = {batch: progress.epochs(batch) for batch in PREDICTED}
    known = [batch for batch, one in predicted.items() if one is not None]
    off = errors([predicted[batch].value for batch in known], [measured[batch] for batch in known])
    return {"epochs_to_target_error": off}, {
        "epochs_to_target": {
            "measured": {b: [epochs_to_target(run) for run in some] for b, some in runs.items()},
            "predicted": {b: one and one.model_dump() for b, one in predicted.items()},
        }
    }


def epochs_to_target(run: RunSummary) -> float:
    """Epochs until held-out accuracy reached the target, between evaluations in proportion."""
    before = 0.0
    for epoch in run.epochs:
        reached = epoch.top1 or 0.0
        if reached >= TARGET:
            return epoch.epoch + (TARGET - before) / (reached - before)
        before = reached
    batch = run.plan.stages[0].global_batch_size
    raise SystemExit(f"batch {batch} did not reach {TARGET} in {len(run.epochs)} epochs")


def _train(data: Path, folder: Path, batch: int, seed: int) -> RunSummary:
    say(f"CIFAR-100, batch {batch}, seed {seed}: train")
    job = job_from(
        "workers=2 learning_rate=0.1 scaling=sqrt warmup_epochs=0 decay=none precision=float32 "
        f"global_batch={batch} seed={seed} epochs={TARGET_EPOCHS[batch]}",
        data=f"cifar100:{data / FOLDERS['cifar100']}",
    )
    known = opened(job.data, "resnet8", 32)
    plan = plan_without_profile(job, known.facts, known.network)
    return bw.train(plan, run_folder=folder / f"{batch}-{seed}")


# ---------------------------------------------------------------------------------- the planner


def _plan_seconds(workers: int) -> list[float]:
    profiles = [made_up_profile(f"kind-{n}", speed=2.0**n) for n in range(5)]
    kinds = [
        WorkerKind(kind=f"kind-{n}", count=max(1, workers // 5), price=0.1 * 1.8**n)
        for n in range(5)
    ]
    job = profiles[0].job.model_copy(update={"goal": Goal(kinds=tuple(kinds))})
    found = []
    for _ in range(PLAN_REPEATS):
        start = time.perf_counter()
        make_plan(profiles, job)
        found.append(time.perf_counter() - start)
    return found


def made_up_profile(kind: str, *, speed: float) -> Profile:
    """A profile of one kind of worker: straight lines in the batch and in the image's area."""
    sides, batches = (96, 128, 160, 192, 224), [8 * n for n in range(1, 31)]
    job = job_from(
        "data=imagefolder:made-up network=resnet18 device=cuda workers=auto augment=crop-flip "
        "precision=float32",
        resolutions=sides,
        link={"latency": 2e-5, "bandwidth": 1e10},
    )
    steps = []
    for side, batch in product(sides, batches):
        seconds = (0.004 + 6e-8 * side**2 * batch) / speed
        steps.append(
            StepTime(
                resolution=side,
                local_batch_size=batch,
                workers=1,
                compute_seconds=seconds,
                sync_seconds=0.0,
                step_seconds=seconds,
                step_low=0.99 * seconds,
                step_high=1.01 * seconds,
                repeats=10,
                visits=(0.995 * seconds, seconds, 1.005 * seconds),
            )
        )
    return Profile(
        job=job,
        data=made_up_data("imagefolder", 1_281_167, 1000, 224, held_out=50_000),
        network=NetworkFacts(
            name="resnet18", parameters=11_689_512, trained_bytes=46_758_048, batch_norm=True
        ),
        cluster=Cluster(
            kind=kind,
            device="cuda",
            device_name=kind,
            workers=1,
            cores=16,
            threads=16,
            memory_bytes=80 * 2**30,
            python="3.11",
            torch="2.13.0",
            allocator="made up",
        ),
        steps=tuple(steps),
        memory=tuple(
            MemoryPoint(resolution=s, local_batch_size=b, peak_bytes=180_000_000 + 60 * s**2 * b)
            for s, b in product(sides, batches)
        ),
        collectives=(),
        noise=None,
        evaluation_seconds_per_image=0.0005 / speed,
        probe_seconds=30.0,
    )


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
