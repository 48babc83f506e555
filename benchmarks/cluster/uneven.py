"""Uneven workers: what following their speeds gains, what it costs, and whether it survives kills.

All speeds are of `resnet8` on CIFAR-100 in memory, 32 px, random crop and flip, global batch 128,
SGD with Nesterov momentum 0.9, weight decay 5e-4, constant rate 0.1, float32, seed 0. Each worker
is one process with one thread, pinned to a core. Shares (each worker's part of the global batch)
are computed anew every 25 steps, the default. The processes of all arms are alive together and take
turns; the order is reversed from round to round. Our loop does one epoch in a turn, of as many
images as the turn has steps.

Even workers (`one_worker_`, `two_workers_`, `even_dynamic_`). A turn has 5 steps that are not timed
and 25 that are; with --quick 4 rounds with one worker and 6 with two, with --full 12 and 12. Ratios
are taken within a round: median and quartiles. Under DistributedDataParallel, too, each worker of
the loop by hand has its own statistics of batch normalization.

One of two workers at half speed (`_over_equal_shares`, `slowest_over_fastest`): a burner process,
which never waits, takes its part of the second worker's core, from the first step on. 4 epochs of
50 steps and one start with --quick, of 60 steps and two starts with --full. Ratios are of epoch
seconds in the third and the fourth epoch: median and quartiles; the limit is 2/3. Fixed shares of
85 and 43 show what can be reached here. In `each_epoch`, shares are computed anew at the end of
each epoch only, and otherwise as usual; `benchmarks.cluster.shares` has the published rule. Slowest
over fastest: input and compute seconds of the slower worker over the other's with `dynamic-batch`
in the third epoch, by the run's own records.

A load that starts and ends while `dynamic-batch` trains (`recovery_intervals`): 325 steps; the
burner starts between steps 50 and 75 and ends some 125 to 150 steps later; 1 round with --quick, 4
with --full. An interval is the 25 steps between two computations of shares. Intervals are counted
from the first one that lies wholly after the load started or ended, which is number 0. The figure
is the number of the first interval whose median step is within 10 % of the ideal one, or how many
intervals there were if none is; the largest, with a spread from the median to it. Ideal is the
median step with fixed shares of 85 and 43 under the load, and of 64 and 64 without it, in the same
round.

Four workers on the two cores: each computes 4 times as long as it otherwise would, and the last one
8 times, by sleeping after each backward pass, so the cores have room for all. 4 epochs of 30 steps,
one start; ratios of the third and the fourth epoch; the limit is 4/7, 0.571.

Kills. The job of `cluster.kills` under torchrun. One worker at a time is killed with SIGKILL, at a
moment drawn evenly from the 8 seconds after the workers' start, which include starting up. 20 kills
with --full, five in each run; 3 with --quick (names end with `_check`). Samples lost or repeated
are counted by the end of the worst epoch of the worst run. The seconds of a kill are those of a run
minus those of a run without kills, divided by the number of kills; mean.

Accuracy. The whole of CIFAR-100, 2 epochs, the rate falling to 0 along half a cosine, with batch
normalization over each worker's own samples: `dynamic-batch` with the burner beside its second
worker against equal shares without it, from the same weights and in the same order, seeds 0 to 4.
The figure is the mean difference of held-out accuracy (10,000 images) with its 95 % interval. The
goal, no worse, is met if the lower end is above -1.0 point.

Without the CIFAR-100 folder, or with one core only, the figures that need them are left out.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from batchwright.records import Job, RunSummary
from batchwright.records.documents import read_record
from batchwright.records.lines.line_files import lines_of
from batchwright.records.lines.run_lines import EpochLine, RunLine, SharesLine
from batchwright.workload.data.sources import open_data
from benchmarks.cluster import uneven_arms
from benchmarks.cluster.kills import KilledRun, run_and_kill
from benchmarks.cluster.uneven_arms import uneven_plan
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value, differences, ratios
from benchmarks.harness.loads import Burner
from benchmarks.harness.turns import Arm, Turn, images_per_second, started, take_turns
from benchmarks.speed import main_job_arms
from benchmarks.speed.main_job_arms import BATCH

EQUAL, FIXED = (64, 64), (85, 43)
REBALANCE_STEPS = 25

LEAD_IN_STEPS, TIMED_STEPS = 5, 25
ONE_WORKER_ROUNDS, TWO_WORKERS_ROUNDS = {False: 4, True: 12}, {False: 6, True: 12}  # by --full
UNEVEN_EPOCHS, FIRST_COUNTED = 4, 2  # zero-based: the third epoch
UNEVEN_STEPS, UNEVEN_STARTS = {False: 50, True: 60}, {False: 1, True: 2}
LOAD_STEPS, LOAD_ROUNDS = 325, {False: 1, True: 4}
LOAD_BEGINS, LOAD_LASTS = (2, 3), (5, 6)  # intervals of 25 steps: ranges to draw from
IDEAL_STEPS, WITHIN = 25, 1.10
FOUR_CORES, FOUR_FACTORS = (0, 1, 0, 1), (4.0, 4.0, 4.0, 8.0)
FOUR_SHARES, FOUR_STEPS = (32, 32, 32, 32), 30
KILLS, KILLS_PER_RUN = {False: 3, True: 20}, 5
SEEDS, ACCURACY_EPOCHS = range(5), 2

BENCHMARK = Benchmark(
    "uneven",
    "Uneven workers, and kills",
    "CIFAR-100, `resnet8`, global batch 128, each worker with one thread on a core of its own; a "
    "burner process that never waits takes half of one core and makes its worker slow",
    (
        Figure("dynamic_over_equal_shares", "ratio", "median", "time of the third and fourth epoch "
               "of `dynamic-batch` over that of equal shares, one of two workers at half speed "
               "(limit: 0.67)", at_most=0.70),
        Figure("each_epoch_over_equal_shares", "ratio", "median", "time of the third and fourth "
               "epoch over that of equal shares, one of two workers at half speed: "
               "`dynamic-batch` that changes shares at the end of an epoch only, as often as "
               "published", full=True),
        Figure("fixed_over_equal_shares", "ratio", "median", "time of the third and fourth epoch "
               "over that of equal shares, one of two workers at half speed: fixed shares of 85 "
               "and 43, which shows what can be reached"),
        Figure("slowest_over_fastest", "ratio", "median", "input and compute time of the slower "
               "worker over the other's, `dynamic-batch`", at_most=1.08),
        Figure("recovery_intervals", "intervals", "largest", "intervals of 25 steps after a load "
               "starts or ends until the step time is within 10 % of the ideal, largest",
               at_most=1.0),
        Figure("four_workers_dynamic_over_equal_shares", "ratio", "median", "time of the third and "
               "fourth epoch of `dynamic-batch` over that of equal shares, one of four workers at "
               "half speed by sleeping (limit: 0.57)", full=True),
        Figure("even_dynamic_over_ddp_seconds", "ratio", "median", "even workers: time of "
               "`dynamic-batch` over a DistributedDataParallel loop written by hand", at_most=1.02),
        Figure("one_worker_over_bare_images", "ratio", "median", "one worker: images/s, our loop "
               "over a plain loop written by hand", at_least=0.98),
        Figure("two_workers_over_ddp_images", "ratio", "median", "two even workers: images/s, "
               "our loop over a DistributedDataParallel loop written by hand", at_least=0.97),
        Figure("kills_recovered", "kills", "largest", "kills of a worker at random moments after "
               "which the run went on", at_least=20.0, full=True),
        Figure("samples_lost_or_repeated", "samples", "worst", "samples lost or repeated by the "
               "end of an epoch in runs with kills of workers, largest", at_most=0.0, full=True),
        Figure("seconds_lost_per_kill", "s", "mean", "time that the kill of a worker costs",
               full=True),
        Figure("accuracy_dynamic_less_equal", "points", "interval", "accuracy of `dynamic-batch` "
               "under a load minus that of equal shares without load, batch normalization, paired "
               "seeds", above=-1.0, full=True),
        *(
            Figure(f"{arm}_images_per_second", "images/s", "median")
            for arm in ("one_worker", "bare", "plain", "dynamic", "ddp")
        ),
    ),
    seeds=SEEDS,
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Measure part by part: all that the data folder, the cores and --full allow."""
    parts = [kills]
    if arguments.data is None or not {0, 1} <= os.sched_getaffinity(0):
        say("all but the kills needs the CIFAR-100 folder, and cores 0 and 1")
    else:
        say("CIFAR-100: reading")
        open_data(Job(data=f"cifar100:{arguments.data}"))
        parts = [even, uneven, load, kills, *([four, accuracy] if arguments.full else [])]
    found: dict[str, Sequence[float] | Value] = {}
    measurements: dict[str, Any] = {}
    for part in parts:
        more, values = part(arguments, folder / part.__name__)
        say("; ".join(f"{one.name} {one.value:.4g}" for one in BENCHMARK.values(more).values()))
        found, measurements = found | more, measurements | values
    return found, measurements


# ----------------------------------------------------------------------------------- even workers


def even(arguments: Arguments, folder: Path) -> Found:
    """Time even workers beside loops written by hand."""
    ours = partial(session, arguments.data, steps=LEAD_IN_STEPS + TIMED_STEPS)
    one = {
        "one_worker": ours(folder / "one_worker", "plain", (BATCH,)),
        "bare": partial(Arm, main_job_arms.bare, arguments.data, cores=(0,)),
    }
    two = {
        "plain": ours(folder / "plain", "plain", EQUAL),
        "dynamic": ours(folder / "dynamic", "dynamic-batch", EQUAL),
        "ddp": partial(Arm, main_job_arms.bare_ddp, arguments.data, cores=(0, 1)),
    }
    how = {"lead_in": LEAD_IN_STEPS, "steps": TIMED_STEPS, "warm_up": LEAD_IN_STEPS + TIMED_STEPS}
    rates = images_per_second(one, ONE_WORKER_ROUNDS[arguments.full], **how)
    rates |= images_per_second(two, TWO_WORKERS_ROUNDS[arguments.full], **how)
    return {
        "one_worker_over_bare_images": ratios(rates["one_worker"], rates["bare"]),
        "two_workers_over_ddp_images": ratios(rates["plain"], rates["ddp"]),
        "even_dynamic_over_ddp_seconds": ratios(rates["ddp"], rates["dynamic"]),
        **{f"{name}_images_per_second": some for name, some in rates.items()},
    }, {"images_per_second": rates}


# ----------------------------------------------------------------- one of two workers at half speed


def uneven(arguments: Arguments, folder: Path) -> Found:
    """Time epochs with a burner beside the second of two workers."""
    steps = UNEVEN_STEPS[arguments.full]
    ours = partial(session, arguments.data, steps=steps)
    starts: list[dict[str, Any]] = []
    slowest: list[float] = []
    for start in range(UNEVEN_STARTS[arguments.full]):
        runs = folder / str(start)
        starters = {
            "equal": ours(runs / "equal", "plain", EQUAL),
            "dynamic": ours(runs / "dynamic", "dynamic-batch", EQUAL),
            "fixed": ours(runs / "fixed", "plain", FIXED),
        }
        if arguments.full:
            starters["each_epoch"] = ours(
                runs / "each_epoch", "dynamic-batch", EQUAL, rebalance_steps=0
            )
        with started(starters) as arms, Burner(1):
            seconds = epoch_seconds(arms, steps)
        lines = records(runs / "dynamic")
        slowest.append(slowest_over_fastest(lines, FIRST_COUNTED))
        starts.append({"seconds": seconds, "records": kept(lines)})
    arms = [arm for arm in starters if arm != "equal"]
    return {
        **{f"{arm}_over_equal_shares": over_equal(arm, starts) for arm in arms},
        "slowest_over_fastest": slowest,
    }, {"uneven": starts}


def epoch_seconds(arms: Mapping[str, Arm], steps: int) -> dict[str, list[float]]:
    """Seconds of each epoch, by arm."""
    turns = {name: partial(arm.turn, lead_in=0, steps=steps) for name, arm in arms.items()}
    rates = take_turns(turns, UNEVEN_EPOCHS)
    return {name: [steps * BATCH / rate for rate in some] for name, some in rates.items()}


def over_equal(arm: str, starts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Epoch seconds of an arm over those with equal shares, for each epoch that counts."""
    return ratios(
        *(
            [seconds for one in starts for seconds in one["seconds"][name][FIRST_COUNTED:]]
            for name in (arm, "equal")
        )
    )


def slowest_over_fastest(lines: Sequence[RunLine], epoch: int) -> float:
    """Input and compute seconds of the slowest worker over those of the fastest, in one epoch.

    Raises:
        ValueError: No line is about that epoch, which is zero-based.
    """
    for line in lines:
        if isinstance(line, EpochLine) and line.record.epoch == epoch:
            seconds = [one.input_seconds + one.compute_seconds for one in line.record.workers]
            return max(seconds) / min(seconds)
    raise ValueError(f"no line about epoch {epoch} among {len(lines)}")


def records(run: Path) -> list[EpochLine | SharesLine]:
    """The lines of a run about epochs and shares."""
    return [line for line in lines_of(run) if isinstance(line, EpochLine | SharesLine)]


def kept(lines: Iterable[RunLine]) -> list[dict[str, Any]]:
    """Lines of a run as JSON values, for a report's measurements."""
    return [line.model_dump(mode="json", exclude_defaults=True) for line in lines]


# ------------------------------------------------------------------------ a load starts and ends


def load(arguments: Arguments, folder: Path) -> Found:
    """Count recovery intervals where a burner starts and ends during training."""
    ours = partial(session, arguments.data)
    starters = {
        "dynamic": ours(folder / "dynamic", "dynamic-batch", EQUAL, steps=LOAD_STEPS),
        "equal": ours(folder / "equal", "plain", EQUAL, steps=IDEAL_STEPS),
        "fixed": ours(folder / "fixed", "plain", FIXED, steps=IDEAL_STEPS),
    }
    moments = random.Random(0)
    with started(starters) as arms:
        for name in ("equal", "fixed"):
            arms[name].turn(lead_in=0, steps=IDEAL_STEPS)
        rounds = [load_round(arms, moments) for _ in range(LOAD_ROUNDS[arguments.full])]
    counts = [float(count) for one in rounds for count in one["intervals"] if count is not None]
    return {"recovery_intervals": counts}, {
        "load": rounds,
        "load_records": kept(records(folder / "dynamic")),
    }


def load_round(arms: Mapping[str, Arm], moments: random.Random) -> dict[str, Any]:
    """One load: ideal steps with and without it, and the steps of `dynamic-batch` meanwhile."""
    ideal = _median_step(arms["equal"])
    with Burner(1):
        ideal_loaded = _median_step(arms["fixed"])
    arm, burner = arms["dynamic"], Burner(1)
    arm.begin(lead_in=0, steps=LOAD_STEPS)
    time.sleep(moments.uniform(*LOAD_BEGINS) * REBALANCE_STEPS * ideal)
    begins = time.monotonic()
    with burner:
        time.sleep(moments.uniform(*LOAD_LASTS) * REBALANCE_STEPS * ideal_loaded)
    ends = time.monotonic()
    turn = arm.end()
    intervals = (
        recovery_intervals(turn, begins, ends, ideal_loaded),
        recovery_intervals(turn, ends, turn.step_ends[-1], ideal),
    )
    say(f"load started and ended: recovered in intervals {intervals[0]}, {intervals[1]}")
    return {
        "intervals": intervals,
        "ideal_seconds": (ideal_loaded, ideal),
        "load_seconds": (begins - turn.started, ends - turn.started),
        "step_ends": [round(end - turn.started, 4) for end in turn.step_ends],
    }


def _median_step(arm: Arm) -> float:
    arm.begin(lead_in=0, steps=IDEAL_STEPS)
    return median(_step_seconds(arm.end()))


def _step_seconds(turn: Turn) -> list[float]:
    return differences(turn.step_ends, (turn.started, *turn.step_ends[:-1]))


def recovery_intervals(turn: Turn, change: float, until: float, ideal: float) -> int | None:
    """Number of whole intervals after a change before the first one near the ideal step.

    Args:
        turn: The steps' times; it begins where shares are computed.
        change: When the load started or ended; the first interval that begins later is number 0.
        until: Time of the next change; intervals that end later do not count.
        ideal: Ideal seconds of a step; an interval is near it up to 10 % more, in the median.

    Returns:
        The number of the interval; if none is near the ideal, how many there were; ``None`` if no
        whole interval lies between the changes.
    """
    starts, seconds = (turn.started, *turn.step_ends), _step_seconds(turn)
    whole = [
        first
        for first in range(0, len(seconds) - REBALANCE_STEPS + 1, REBALANCE_STEPS)
        if starts[first] >= change and starts[first + REBALANCE_STEPS] <= until
    ]
    for number, first in enumerate(whole):
        if median(seconds[first : first + REBALANCE_STEPS]) <= WITHIN * ideal:
            return number
    return len(whole) or None


# ----------------------------------------------------------------------------------- four workers


def four(arguments: Arguments, folder: Path) -> Found:
    """Time epochs of four workers on two cores, slowed down by sleeping."""
    starters = {
        name: session(
            arguments.data,
            folder / name,
            method,
            FOUR_SHARES,
            steps=FOUR_STEPS,
            cores=FOUR_CORES,
            factors=FOUR_FACTORS,
        )
        for name, method in (("equal", "plain"), ("dynamic", "dynamic-batch"))
    }
    with started(starters) as arms:
        seconds = epoch_seconds(arms, FOUR_STEPS)
    starts = [{"seconds": seconds, "records": kept(records(folder / "dynamic"))}]
    over = over_equal("dynamic", starts)
    return {"four_workers_dynamic_over_equal_shares": over}, {"four_workers": starts}


# ------------------------------------------------------------------------------------------ kills


def kills(arguments: Arguments, folder: Path) -> Found:
    """Run the job that counts its samples, without kills and with them."""
    moments = random.Random(0)
    say("kills: a run without any")
    undisturbed = run_and_kill(folder / "undisturbed", 0, moments)
    wanted = KILLS[arguments.full]
    runs: list[KilledRun] = []
    while (left := wanted - _count(runs)) > 0 and (not runs or runs[-1].miscounted is not None):
        runs.append(run_and_kill(folder / str(len(runs)), min(KILLS_PER_RUN, left), moments))
        say(f"kills: {_count(runs)} of {wanted}, recovered {sum(r.recovered for r in runs)}")
    suffix = "" if arguments.full else "_check"
    found = kills_found(undisturbed, runs, wanted, suffix)
    return found, {"kills": [asdict(run) for run in (undisturbed, *runs)]}


def kills_found(
    undisturbed: KilledRun, runs: Sequence[KilledRun], wanted: int, suffix: str = ""
) -> dict[str, Sequence[float] | Value]:
    """The figures of kills, by name; samples and seconds only if every run came to its end."""
    recovered = BENCHMARK["kills_recovered"].of(
        [float(sum(run.recovered for run in runs))],
        goal=float(wanted),
        repeats=_count(runs),
        suffix=suffix,
    )
    counts = [float(run.miscounted) for run in runs if run.miscounted is not None]
    if len(counts) < len(runs):
        return {recovered.name: recovered}
    lost = [
        (run.seconds - undisturbed.seconds) / len(run.killed_after)
        for run in runs
        if run.killed_after
    ]
    return {
        recovered.name: recovered,
        f"samples_lost_or_repeated{suffix}": counts,
        f"seconds_lost_per_kill{suffix}": lost,
    }


def _count(runs: Sequence[KilledRun]) -> int:
    return sum(len(run.killed_after) for run in runs)


# --------------------------------------------------------------------------------------- accuracy


def accuracy(arguments: Arguments, folder: Path) -> Found:
    """Accuracy of uneven workers with `dynamic-batch`, and of even ones with equal shares."""
    found: dict[str, list[float]] = {"dynamic": [], "equal": []}
    seconds: dict[str, list[float]] = {"dynamic": [], "equal": []}
    shares = []
    for seed in SEEDS:
        for name, accuracies in found.items():
            summary, wall = _trained(arguments.data, folder / f"{name}-{seed}", name, seed)
            accuracies.append(summary.accuracy)
            seconds[name].append(wall)
            if name == "dynamic":
                shares.append([worker.samples for worker in summary.epochs[-1].workers])
        say(f"seed {seed}: " + ", ".join(f"{k} {v[-1]:.4f}" for k, v in found.items()))
    gains = [100 * gain for gain in differences(found["dynamic"], found["equal"])]
    return {"accuracy_dynamic_less_equal": gains}, {
        "accuracy": found,
        "accuracy_run_seconds": seconds,
        "samples_of_workers_in_last_epoch": shares,
    }


def _trained(data: Path, run: Path, name: str, seed: int) -> tuple[RunSummary, float]:
    method = "dynamic-batch" if name == "dynamic" else "plain"
    plan = uneven_plan(data, method, EQUAL, epochs=ACCURACY_EPOCHS, seed=seed, decay="cosine")
    starters = {name: partial(Arm, uneven_arms.whole_run, plan, run, cores=(0, 1))}
    with Burner(1) if name == "dynamic" else nullcontext(), started(starters) as arms:
        arms[name].begin(lead_in=0, steps=1)
        turn = arms[name].end()
    return read_record(run / "summary.json", RunSummary), turn.seconds


def session(
    data: Path,
    run: Path,
    method: str,
    shares: Sequence[int],
    *,
    steps: int,
    cores: Sequence[int] | None = None,
    factors: Sequence[float] | None = None,
    rebalance_steps: int = REBALANCE_STEPS,
    **keys: Any,
) -> Callable[[], Arm]:
    """A function that starts our loop with epochs of ``steps`` steps.

    Worker r is on core r, or on ``cores[r]``, and computes ``factors[r]`` times as long. ``keys``
    are keys of the job.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    plan = uneven_plan(
        data, method, shares, samples=steps * sum(shares), rebalance_steps=rebalance_steps, **keys
    )
    places = range(len(shares)) if cores is None else cores
    return partial(Arm, uneven_arms.session, plan, run, factors, cores=tuple(places))


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
