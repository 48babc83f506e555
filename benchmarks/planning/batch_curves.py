"""Time, cost and accuracy against the global batch, for several networks: Tula's figure.

`resnet8`, `vgg8` and `mobilenet_small` on CIFAR-100 at 32 px, two workers of one core each, 30
epochs, a worker-hour at a price of 1. Each network is probed (60 s with --full, 15 s with --quick)
and planned for `goal.objective=knee`; with --full two minutes of trials of each also predict
accuracy. The curve is what the plan predicts for its candidates with two workers, by batch: seconds
and cost of an epoch, without evaluation, and accuracy of the whole training.

*Knee* is the batch that the plan takes, *fastest* the batch with the fewest seconds. *128* is the
baseline of the speedup: the same two workers with global batch 128, 64 each. That baseline is our
choice: the paper's abstract does not say what its "20 times" is relative to.

    knee_over_least      seconds of an epoch at the knee over those at the fastest
    knee_over_fastest    batch at the knee over the fastest batch
    speedup_over_128     seconds of an epoch at 128 over those at the fastest
    accuracy_lost        accuracy at 128 minus accuracy at the fastest, predicted from trials

The first three are of predictions. Then steps at 128, the knee and the fastest are measured in
turns, three visits each (one with --quick), with the optimizer that is planned for them. They give
the same ratios as measured, visit by visit, and the errors of the predicted steps,
|predicted - measured| / measured. Where the knee is the fastest batch, the two are one point.

A figure over all networks is the largest of theirs. The goals were set before the first run: at the
knee no more than 1.10 times the shortest time, with at most half of the fastest batch; 20 times as
fast as at 128; steps within 14 %, the upper end of the paper's errors.

--full takes some 13 minutes on a quiet machine, --quick some two and a half. --keep keeps profiles:
`batchwright plan DIR/resnet8.json --figure curve.png` draws the curve of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import batchwright as bw
from batchwright.probing.probe import measure_points
from batchwright.records import Job, Plan, Profile
from batchwright.records.documents import read_record, write_record
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, errors, ratios
from benchmarks.harness.plans import job_from

NETWORKS = ("resnet8", "vgg8", "mobilenet_small")
WORKERS, SIDE, EPOCHS, BASELINE = 2, 32, 30, 128
BUDGET, TRIALS, VISITS = {False: 15, True: 60}, {False: 0, True: 120}, {False: 1, True: 3}

BENCHMARK = Benchmark(
    "batch_curves",
    "Time, cost and accuracy against the batch",
    "`resnet8`, `vgg8` and `mobilenet_small` on CIFAR-100, 32 px, two workers of one core each. "
    "Time is seconds of an epoch, the knee is the batch that `goal.objective=knee` takes, the "
    "fastest batch is the one with the shortest time. Spread: the range over the networks, or "
    "quartiles",
    (
        Figure("knee_over_least", "ratio", "worst", "time at the knee over the shortest time of "
               "all batches, predicted, largest of three networks", at_most=1.10),
        Figure("measured_knee_over_least", "ratio", "worst", "time at the knee over the time at "
               "the fastest batch, measured, largest of three networks"),
        Figure("knee_over_fastest", "share", "worst", "batch at the knee over the fastest batch, "
               "largest of three networks", at_most=0.5),
        Figure("speedup_over_128", "ratio", "worst", "time at global batch 128 over the shortest "
               "time of all batches, predicted, largest of three networks", at_least=20.0),
        Figure("measured_speedup_over_128", "ratio", "worst", "time at global batch 128 over the "
               "time at the fastest batch, measured, largest of three networks"),
        Figure("accuracy_lost_points", "points", "worst", "accuracy at global batch 128 minus that "
               "at the fastest batch, equal epochs, predicted from trials, largest of three "
               "networks", full=True),
        Figure("curve_error", "share", "median", "error of the predicted time of a step at global "
               "batch 128, the knee and the fastest batch, median", at_most=0.14),
        *(
            figure
            for name in NETWORKS
            for figure in (
                Figure(f"knee_{name}", "samples", "mean", f"`{name}`: batch at the knee"),
                Figure(f"fastest_{name}", "samples", "mean", f"`{name}`: fastest batch"),
                Figure(f"least_cost_{name}", "per epoch", "mean", f"`{name}`: predicted cost of an "
                       "epoch at the fastest batch, a worker-hour at 1"),
                Figure(f"knee_over_least_{name}", "ratio", "median", f"`{name}`: time at the knee "
                       "over the time at the fastest batch, measured"),
                Figure(f"speedup_over_128_{name}", "ratio", "median", f"`{name}`: time at global "
                       "batch 128 over the time at the fastest batch, measured"),
            )
        ),
    ),
    needs_data="always",
    copies=True,
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """What a plan predicts for one batch of a curve."""

    batch: int  # global, in samples
    step_seconds: float  # predicted
    epoch_seconds: float  # predicted, without evaluation
    cost: float  # predicted, of an epoch, where a worker-hour costs 1
    accuracy: float | None  # of the whole training, predicted, a share; ``None`` without trials


@dataclass(frozen=True)
class Curve:
    """A network's predicted curve, and the measured steps at some of its batches."""

    points: tuple[Point, ...]  # by batch
    knee: Point
    baseline: Point
    visits: Mapping[int, Sequence[float]]  # by batch, measured seconds of a step

    @property
    def fastest(self) -> Point:
        """The point with the fewest predicted seconds of an epoch."""
        return min(self.points, key=lambda one: one.epoch_seconds)

    def over_fastest(self, one: Point) -> float:
        """Predicted seconds of an epoch over those at the fastest point."""
        return one.epoch_seconds / self.fastest.epoch_seconds

    def measured_over_fastest(self, one: Point) -> list[float]:
        """Measured seconds of an epoch over those at the fastest point, visit by visit."""
        return ratios(self._samples_seconds(one), self._samples_seconds(self.fastest))

    def errors(self) -> list[float]:
        """Relative error of each predicted step, visit by visit."""
        points = {one.batch: one for one in (self.baseline, self.knee, self.fastest)}
        return [
            error
            for batch, one in points.items()
            for error in errors([one.step_seconds] * len(self.visits[batch]), self.visits[batch])
        ]

    def _samples_seconds(self, one: Point) -> list[float]:
        return [seconds / one.batch for seconds in self.visits[one.batch]]


def measure(arguments: Arguments, folder: Path) -> Found:
    """Probe, plan and measure each network."""
    assert arguments.keep is not None
    arguments.keep.mkdir(parents=True, exist_ok=True)
    curves = {
        name: curve_of(_profile(name, arguments), folder / name, VISITS[arguments.full])
        for name in NETWORKS
    }
    return found_of(curves), {name: asdict(one) for name, one in curves.items()}


def _profile(name: str, arguments: Arguments) -> Profile:
    """The profile of a network: the kept one, or else of a new probe."""
    assert arguments.keep is not None
    file = arguments.keep / f"{name}.json"
    if not file.exists():
        say(f"{name}: probe")
        job = job_from(
            f"network={name} resolutions={SIDE} workers={WORKERS} device=cpu epochs={EPOCHS} "
            f"goal.objective=knee goal.price=1 probe.budget={BUDGET[arguments.full]} "
            f"probe.learning={TRIALS[arguments.full]}",
            data=f"cifar100:{arguments.data}",
        )
        write_record(bw.probe(job), file)
    return read_record(file, Profile)


def curve_of(profile: Profile, folder: Path, visits: int) -> Curve:
    """The curve of a profile, with measured steps at the baseline, the knee and the fastest batch.

    Args:
        profile: Profile of a network with two workers.
        folder: Folder for the files of the measurement; it is created.
        visits: Number of visits to each of the steps.
    """
    plan = bw.plan(profile)
    points = points_of(plan)
    knee, baseline = (
        plan.stages[0].global_batch_size,
        points_of(bw.plan(profile, global_batch=BASELINE)),
    )
    at = {one.batch: one for one in (*points, *baseline)}
    curve = Curve(points, at[knee], at[BASELINE], {})
    wanted = dict.fromkeys((BASELINE, knee, curve.fastest.batch))
    say(f"{profile.job.network}: steps at {', '.join(map(str, wanted))}")
    updates = {batch: bw.plan(profile, global_batch=batch).update for batch in wanted}
    return Curve(points, at[knee], at[BASELINE], _visited(profile.job, updates, folder, visits))


def points_of(plan: Plan) -> tuple[Point, ...]:
    """The points of all candidates of a plan that have two workers and are not refused."""
    return tuple(
        Point(
            one.global_batch_size,
            one.step_seconds.value,
            one.epoch_seconds.value,
            WORKERS * one.epoch_seconds.value / 3600,
            one.accuracy.value if one.accuracy else None,
        )
        for one in plan.considered
        if one.workers == WORKERS and not one.refused
    )


def _visited(
    job: Job, updates: Mapping[int, str], folder: Path, visits: int
) -> dict[int, tuple[float, ...]]:
    """Measured seconds of a step by batch, visit by visit, each with its plan's optimizer."""
    found: dict[int, tuple[float, ...]] = {}
    for optimizer in dict.fromkeys(updates.values()):
        batches = {batch // WORKERS: batch for batch, one in updates.items() if one == optimizer}
        points = [(WORKERS, SIDE, local) for local in batches]
        (own := folder / optimizer).mkdir(parents=True)
        own_job = job.model_copy(update={"optimizer": optimizer})
        for one in measure_points(own_job, points, own, visits=visits).steps:
            found[batches[one.local_batch_size]] = one.visits or (one.step_seconds,)
    return found


def found_of(curves: Mapping[str, Curve]) -> dict[str, list[float]]:
    """The figures of all networks, by name."""
    found: dict[str, list[float]] = {}

    def add(name: str, *values: float) -> None:
        found.setdefault(name, []).extend(values)

    for name, one in curves.items():
        knee, baseline = (one.measured_over_fastest(at) for at in (one.knee, one.baseline))
        add("knee_over_least", one.over_fastest(one.knee))
        add("measured_knee_over_least", median(knee))
        add("knee_over_fastest", one.knee.batch / one.fastest.batch)
        add("speedup_over_128", one.over_fastest(one.baseline))
        add("measured_speedup_over_128", median(baseline))
        if one.baseline.accuracy is not None and one.fastest.accuracy is not None:
            add("accuracy_lost_points", 100 * (one.baseline.accuracy - one.fastest.accuracy))
        add("curve_error", *one.errors())
        add(f"knee_{name}", one.knee.batch)
        add(f"fastest_{name}", one.fastest.batch)
        add(f"least_cost_{name}", one.fastest.cost)
        add(f"knee_over_least_{name}", *knee)
        add(f"speedup_over_128_{name}", *baseline)
    return found


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
