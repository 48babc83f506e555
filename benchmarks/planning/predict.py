"""Predictions against measurements: step time, memory, epochs to a target, and the planner's speed.

Step time and memory. Six workloads: `resnet8`, `vgg8` (no batch normalization) and
`mobilenet_small` (depthwise), each on CIFAR-100 at 24 and 32 px and on the ImageNet subset at 64
px, with 1 and 2 worker processes on the CPU. Each workload is probed (`probe.budget` 55 s with
--full, 20 s with --quick) and planned. The plan predicts steps that the probe did not
measure: batches midway between measured ones. `batchwright check` takes 6 of them with --full, 4
with --quick, as even as can be over workers, resolutions and batches, and measures each: once after
the plan, and once more after all other workloads. The measured value is the mean of both times; how
far they are apart, relative to it, is the repeat error.

    step_seconds_median_error   |predicted - measured| / measured, median over all points
    step_seconds_worst_error    the largest; goal: 0.10, or twice the largest repeat error
    repeat_error                the largest; no goal: it says how steady the machine was
    interval_coverage           share of points inside the nominal 95 % interval
    interval_half_width         half the interval over the prediction, median
    memory_median_error         the same for peak bytes of tensors
    memory_worst_under          (measured - upper end of the interval) / measured, largest
    memory_next_step            peak at 1.05 times `max_local_batch_size` over a limit, least
    memory_at_most              peak at `max_local_batch_size` over the same limit, largest
    probe_share                 probing over what it may cost: 2 % of the training, or 60 s; largest

The limit of the last memory figures is 1.5 times the largest measured peak of each workload, so the
answer lies beyond what was measured.

Epochs to a target. `resnet8` on CIFAR-100, two workers, constant rate 0.1 at batch 128, scaled with
the root of the batch; the epoch (interpolated) where held-out accuracy first reaches 20 %, seed 1.
The run at batch 128 is the one to learn from; batches 64, 256 and 512 are predicted from it and the
noise scale along it. Task and target were settled after seeing seed 0; docs/log.md says how.

    epochs_to_target_error      |predicted - measured| / measured, the largest of the three

Planner. Made-up profiles of five kinds of workers, 30 batches at 5 resolutions each; 10 to 10,000
workers; objective knee with prices.

    plan_10000_workers_seconds  wall time of `plan`, median of 5

--full keeps its report in benchmarks/results; --quick copies the epochs to a target from there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import batchwright as bw
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.prediction.accuracy.quality import fit_progress
from batchwright.prediction.memory import max_local_batch_size
from batchwright.records import (
    Check,
    CheckPoint,
    Cluster,
    DataFacts,
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
from batchwright.workload.data.sources import open_data
from batchwright.workload.task import build_network, network_facts
from benchmarks.harness.common import (
    Arguments,
    Figure,
    Measurements,
    kept_figures,
    quartiles,
    run_benchmark,
    say,
)

NETWORKS = ("resnet8", "vgg8", "mobilenet_small")
SIDES = {"cifar100": (24, 32), "imagefolder": (64,)}
FOLDERS = {"cifar100": "cifar-100-python", "imagefolder": "imagenette2-160"}
FULL_BUDGET, QUICK_BUDGET = 55.0, 20.0
FULL_POINTS, QUICK_POINTS = 6, 4
EPOCHS = 90  # of the training that is planned: what such data sets are trained for

MEDIAN_GOAL, WORST_GOAL, HALF_WIDTH_GOAL = 0.05, 0.10, 0.10
COVERAGE_GOAL = 22 / 24
MEMORY_GOAL = 0.03
PROBE_SHARE, PROBE_SECONDS = 0.02, 60.0
NEXT_STEP = 1.05

TARGET, REFERENCE, PREDICTED = 0.20, 128, (64, 256, 512)
TARGET_SEEDS = (1,)
TARGET_EPOCHS = {64: 3, 128: 4, 256: 5, 512: 7}
TARGET_GOAL = 0.20

WORKERS = (10, 100, 1_000, 10_000)
PLAN_SECONDS_GOAL = 1.0
PLAN_REPEATS = 5

KEPT = ("epochs_to_target_error",)


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("predict", __doc__, _measure, full_seeds=TARGET_SEEDS)


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    figures, measurements = _planner_figures()
    if arguments.data is not None:
        more, values = _prediction_figures(arguments)
        figures, measurements = figures + more, measurements | values
    if arguments.full and arguments.data is not None:
        more, values = _target_figures(arguments.data, folder)
        return figures + more, measurements | values
    return figures + kept_figures("predict", KEPT), measurements


# ------------------------------------------------------------------------- step time and memory


@dataclass
class Workload:
    """A network on data, as it goes through the benchmark."""

    job: Job
    profile: Profile
    plan: Plan
    points: int
    checks: list[Check]
    limits: list[dict[str, float]]


def _prediction_figures(arguments: Arguments) -> tuple[list[Figure], Measurements]:
    workloads = [
        _probe_and_check(_job(arguments, kind, network), arguments.full)
        for kind in SIDES
        for network in NETWORKS
    ]
    for workload in workloads:
        _check(workload)
    steps = [p for w in workloads for p in _paired(w, "step_seconds")]
    peaks = [p for w in workloads for p in _paired(w, "peak_bytes")]
    repeats = [pair.repeat_error for pair in steps]
    worst_goal = max(WORST_GOAL, 2 * max(repeats))
    shares = [_probe_share(workload) for workload in workloads]
    limits = [one for w in workloads for one in w.limits]
    figures = [
        _middle("step_seconds_median_error", [p.error for p in steps], at_most=MEDIAN_GOAL),
        _largest("step_seconds_worst_error", [p.error for p in steps], at_most=worst_goal),
        _largest("repeat_error", repeats),
        _coverage(steps),
        _middle("interval_half_width", [p.half_width for p in steps], at_most=HALF_WIDTH_GOAL),
        _middle("memory_median_error", [p.error for p in peaks], at_most=MEMORY_GOAL),
        _largest("memory_worst_under", [p.under for p in peaks], at_most=0.0),
        _least("memory_next_step", [one["next"] for one in limits], at_least=1.0),
        _largest("memory_at_most", [one["at"] for one in limits], at_most=1.0),
        _largest("probe_share", shares, at_most=1.0),
    ]
    return figures, {
        "step_seconds": [asdict(pair) for pair in steps],
        "peak_bytes": [asdict(pair) for pair in peaks],
        "limits": limits,
        "probe_seconds": [workload.profile.probe_seconds for workload in workloads],
    }


def _job(arguments: Arguments, kind: str, network: str) -> Job:
    budget = FULL_BUDGET if arguments.full else QUICK_BUDGET
    assert arguments.data is not None
    return Job(
        data=f"{kind}:{arguments.data / FOLDERS[kind]}",
        network=network,
        resolutions=SIDES[kind],
        epochs=EPOCHS,
        device="cpu",
        probe={"budget": budget},
    )


def _probe_and_check(job: Job, full: bool) -> Workload:
    say(f"{job.network} on {job.data.partition(':')[0]}: probe")
    profile = bw.probe(job)
    plan = bw.plan(profile)
    points = FULL_POINTS if full else QUICK_POINTS
    workload = Workload(job, profile, plan, points, [], [])
    _check(workload)
    workload.limits.append(_limit(profile))
    return workload


def _check(workload: Workload) -> None:
    say(f"{workload.job.network} on {workload.job.data.partition(':')[0]}: check")
    workload.checks.append(bw.check(workload.plan, points=workload.points))


@dataclass(frozen=True)
class Pair:
    """A prediction, and its two measurements."""

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
        """Mean of both."""
        return (self.first + self.second) / 2

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measurement."""
        return abs(self.predicted - self.measured) / self.measured

    @property
    def repeat_error(self) -> float:
        """Of the measurement, by its two halves."""
        return abs(self.first - self.second) / self.measured

    @property
    def half_width(self) -> float:
        """Of the interval, as a share of the prediction."""
        return (self.high - self.low) / 2 / self.predicted

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.low <= self.measured <= self.high

    @property
    def under(self) -> float:
        """How far the measurement lies above the interval, as a share of it; negative if not."""
        return (self.measured - self.high) / self.measured


def _paired(workload: Workload, quantity: str) -> list[Pair]:
    first, second = ([p for p in c.points if p.quantity == quantity] for c in workload.checks)
    return [_pair(workload, a, b) for a, b in zip(first, second, strict=True)]


def _pair(workload: Workload, first: CheckPoint, second: CheckPoint) -> Pair:
    return Pair(
        quantity=first.quantity,
        data=workload.profile.data.name,
        network=first.network,
        local_batch_size=first.local_batch_size,
        resolution=first.resolution,
        workers=first.workers,
        predicted=first.predicted,
        low=first.low,
        high=first.high,
        first=first.measured,
        second=second.measured,
    )


def _limit(profile: Profile) -> dict[str, float]:
    """Peaks at the largest batch for a limit, and a twentieth above it, over that limit."""
    side = max(profile.job.resolutions)
    limit = int(1.5 * max(p.peak_bytes for p in profile.memory if p.resolution == side))
    most = max_local_batch_size(profile, limit=limit, resolution=side, workers=1)
    above = -int(-NEXT_STEP * most // 1)
    at, following = (_peak(profile.job, side, batch) for batch in (most, above))
    return {"limit": limit, "batch": most, "at": at / limit, "next": following / limit}


def _peak(job: Job, side: int, batch: int) -> int:
    from batchwright.probing.probe import measure_points

    with tempfile.TemporaryDirectory(prefix="batchwright-benchmark-") as folder:
        found = measure_points(job, [(1, side, batch)], Path(folder), visits=1)
    return found.memory[0].peak_bytes


def _probe_share(workload: Workload) -> float:
    chosen = workload.plan.stages[0].predicted_epoch_seconds
    assert chosen is not None
    allowed = max(PROBE_SHARE * chosen.value * workload.plan.epochs, PROBE_SECONDS)
    return workload.profile.probe_seconds / allowed


# --------------------------------------------------------------------------- epochs to a target


def _target_figures(data: Path, folder: Path) -> tuple[list[Figure], Measurements]:
    runs = {
        batch: [_train(data, folder, batch, seed) for seed in TARGET_SEEDS]
        for batch in (REFERENCE, *PREDICTED)
    }
    measured = {batch: fmean(map(epochs_to_target, some)) for batch, some in runs.items()}
    progress = fit_progress(
        None, base_batch=REFERENCE, target=TARGET, runs=runs[REFERENCE], scaling="sqrt"
    )
    predicted = {batch: progress.epochs(batch) for batch in PREDICTED}
    errors = [
        abs(one.value - measured[batch]) / measured[batch]
        for batch, one in predicted.items()
        if one is not None
    ]
    return [_largest("epochs_to_target_error", errors, at_most=TARGET_GOAL)], {
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
    job = Job(
        data=f"cifar100:{data / FOLDERS['cifar100']}",
        workers=2,
        global_batch=batch,
        learning_rate=0.1,
        scaling="sqrt",
        warmup_epochs=0,
        decay="none",
        precision="float32",
        seed=seed,
        epochs=TARGET_EPOCHS[batch],
    )
    facts = open_data(job).facts
    classes = len(facts.classes)
    network = build_network("resnet8", classes=classes, side=facts.side, dropout=0, seed=0)
    plan = plan_without_profile(job, facts, network_facts("resnet8", network, facts.side))
    return bw.train(plan, run_folder=folder / f"{batch}-{seed}")


# ---------------------------------------------------------------------------------- the planner


def _planner_figures() -> tuple[list[Figure], Measurements]:
    seconds = {workers: _plan_seconds(workers) for workers in WORKERS}
    figures = [
        _middle(f"plan_{workers}_workers_seconds", found, unit="s")
        for workers, found in seconds.items()
    ]
    name = f"plan_{WORKERS[-1]}_workers_seconds"
    figures[-1] = _middle(name, seconds[WORKERS[-1]], unit="s", at_most=PLAN_SECONDS_GOAL)
    return figures, {"plan_seconds": seconds}


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
    job = Job(
        data="imagefolder:made-up",
        network="resnet18",
        device="cuda",
        workers="auto",
        augment="crop-flip",
        precision="float32",
        resolutions=sides,
        link={"latency": 2e-5, "bandwidth": 1e10},
    )
    steps = [
        _made_up_step(side, batch, (0.004 + 6e-8 * side**2 * batch) / speed)
        for side in sides
        for batch in batches
    ]
    return Profile(
        job=job,
        data=DataFacts(
            name="imagefolder",
            digest="0" * 64,
            train_samples=1_281_167,
            val_samples=50_000,
            split="made up",
            classes=tuple(map(str, range(1000))),
            side=224,
        ),
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
            for s in sides
            for b in batches
        ),
        collectives=(),
        noise=None,
        evaluation_seconds_per_image=0.0005 / speed,
        probe_seconds=30.0,
    )


def _made_up_step(side: int, batch: int, seconds: float) -> StepTime:
    return StepTime(
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


# ------------------------------------------------------------------------------------- figures


def _middle(
    name: str, values: Sequence[float], *, unit: str = "share", at_most: float | None = None
) -> Figure:
    """Median, and the quartiles as spread."""
    low, middle, high = quartiles(values)
    return _at_most(name, middle, unit, low, high, len(values), at_most)


def _largest(name: str, values: Sequence[float], *, at_most: float | None = None) -> Figure:
    """The largest; the spread is from the median to it."""
    return _at_most(name, max(values), "share", median(values), max(values), len(values), at_most)


def _at_most(
    name: str, value: float, unit: str, low: float, high: float, count: int, goal: float | None
) -> Figure:
    met = None if goal is None else value <= goal
    return Figure(name, value, unit, low, high, count, goal, met)


def _least(name: str, values: Sequence[float], *, at_least: float) -> Figure:
    """The least; the spread is from it to the median."""
    least = min(values)
    return Figure(
        name, least, "ratio", least, median(values), len(values), at_least, least >= at_least
    )


def _coverage(pairs: Iterable[Pair]) -> Figure:
    inside = [pair.inside for pair in pairs]
    share = sum(inside) / len(inside)
    met = share >= COVERAGE_GOAL
    return Figure(
        "interval_coverage", share, "share", share, share, len(inside), COVERAGE_GOAL, met
    )


if __name__ == "__main__":
    main()
