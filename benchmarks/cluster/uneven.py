"""Uneven workers: what following their speeds gains, what it costs, and whether it survives kills.

All speeds are of `resnet8` on CIFAR-100 in memory, 32 px, random crop and flip, global batch 128,
SGD with Nesterov momentum 0.9, weight decay 5e-4, constant rate 0.1, float32, seed 0; each worker
is one process with one thread, pinned to a core. Shares are made again every 25 steps (the
default). Arms are alive together and take turns, the order reversed from round to round. Our loop's
arms do one epoch in a turn, of as many images as the turn has steps.

Even workers (`one_worker_`, `two_workers_`, `even_dynamic_`). 5 steps that are not timed and 25
that are, in each turn; 4 rounds with one worker and 6 with two with --quick, 12 and 12 with --full.
Ratios within a round, median and quartiles. The loop by hand keeps batch normalization's statistics
to each worker under DistributedDataParallel, too.

One of two workers at half speed (`_over_equal_shares`, `slowest_over_fastest`): a burner process
takes its share of the second worker's core, from the first step on. 4 epochs of 50 steps with
--quick, of 60 with --full; one start with --quick, two with --full. Ratios of epoch seconds in the
third and the fourth epoch, median and quartiles; the limit is 2/3. Fixed shares are 85 and 43: what
can be reached here. `each_epoch` has shares made again at the end of each epoch only, otherwise as
usual; `benchmarks.cluster.shares` has the published ones. Slowest over fastest: `dynamic-batch`,
third epoch, input and compute seconds of the slower worker over the other's, by the run's own
records.

A load that starts and ends while `dynamic-batch` trains (`recovery_intervals`): 325 steps; the
burner starts between the 50th and the 75th and ends some 125 to 150 steps later; 1 round with
--quick, 4 with --full. An interval is the 25 steps between two times at which shares are made.
Counted from the first that lies wholly after the load started or ended, which is number 0: the
number of the first whose median step is within 10 % of the ideal; if none is, how many there were.
The largest; spread from the median to it. Ideal: the median step of fixed shares of 85 and 43 under
the load, and of 64 and 64 without, in the same round.

Four workers on the two cores: each computes 4 times as long as it would, and the last 8 times, by
sleeping after each backward pass; so the cores have room for all. 4 epochs of 30 steps, one start;
ratios of the third and the fourth epoch; the limit is 4/7, 0.571.

Kills. The job of `cluster.kills` under torchrun; one worker at a time is killed with SIGKILL, at a
moment drawn evenly from the 8 seconds after the workers' start, starting up included. 20 kills with
--full, five in each run; 3 with --quick (names end with `_check`). Samples lost or repeated are
counted by the end of the worst epoch of the worst run; a kill's seconds are those of a run less
those of one without kills, by its kills, mean.

Accuracy. The whole of CIFAR-100, 2 epochs, the rate falling to 0 along half a cosine, with batch
normalization over each worker's own samples: `dynamic-batch` with the burner beside its second
worker, and equal shares without, from the same weights and in the same order, seeds 0 to 4;
held-out accuracy (10,000 images), mean difference and its 95 % interval; no worse means that its
lower end is above -1.0 point.

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
LOAD_BEGINS, LOAD_LASTS = (2, 3), (5, 6)  # intervals, drawn from between
IDEAL_STEPS, WITHIN = 25, 1.10
FOUR_CORES, FOUR_FACTORS = (0, 1, 0, 1), (4.0, 4.0, 4.0, 8.0)
FOUR_SHARES, FOUR_STEPS = (32, 32, 32, 32), 30
KILLS, KILLS_PER_RUN = {False: 3, True: 20}, 5
SEEDS, ACCURACY_EPOCHS = range(5), 2

BENCHMARK = Benchmark(
    "uneven",
    "Uneven workers, and kills",
    "CIFAR-100, `resnet8`, global batch 128, each worker with one thread on a core of its own; a "
    "burner process takes half of one core",
    (
        Figure("dynamic_over_equal_shares", "ratio", "median", "epoch time of `dynamic-batch` over "
               "equal shares, one of two workers at half speed, third epoch (limit: 0.67)",
               at_most=0.70),
        Figure("each_epoch_over_equal_shares", "ratio", "median", "the same with shares made again "
               "at the end of an epoch only, which is as often as published", full=True),
        Figure("fixed_over_equal_shares", "ratio", "median",
               "the same with fixed shares of 85 and 43: what can be reached"),
        Figure("slowest_over_fastest", "ratio", "median", "compute time of the slower worker over "
               "the other's, `dynamic-batch`", at_most=1.08),
        Figure("recovery_intervals", "intervals", "largest", "rebalancing intervals until the step "
               "time is within 10 % of ideal, after a load starts or ends, the largest",
               at_most=1.0),
        Figure("four_workers_dynamic_over_equal_shares", "ratio", "median", "epoch time over equal "
               "shares, one of four workers at half speed by an injected slowdown (limit: 0.57)",
               full=True),
        Figure("even_dynamic_over_ddp_seconds", "ratio", "median", "even workers: time of "
               "`dynamic-batch` over a DistributedDataParallel loop written by hand", at_most=1.02),
        Figure("one_worker_over_bare_images", "ratio", "median", "one worker: our loop over a "
               "plain loop written by hand, images/s", at_least=0.98),
        Figure("two_workers_over_ddp_images", "ratio", "median", "two workers: our loop over the "
               "DistributedDataParallel loop, images/s", at_least=0.97),
        Figure("kills_recovered", "kills", "largest", "kills of a worker at random moments after "
               "which the run went on", at_least=20.0, full=True),
        Figure("samples_lost_or_repeated", "samples", "worst",
               "samples lost or repeated in these runs", at_most=0.0, full=True),
        Figure("seconds_lost_per_kill", "s", "mean", "time that a kill costs", full=True),
        Figure("accuracy_dynamic_less_equal", "points", "interval", "accuracy of `dynamic-batch` "
               "under a load less that of equal shares, batch normalization, paired seeds",
               above=-1.0, full=True),
        *(
            Figure(f"{arm}_images_per_second", "images/s", "median")
            for arm in ("one_worker", "bare", "plain", "dynamic", "ddp")
        ),
    ),
    seeds=SEEDS,
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Part by part, what can and is to be measured."""
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
    """Workers of the same speed beside loops written by hand."""
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
    """A burner beside the second worker."""
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
    """By arm, seconds of each epoch."""
    turns = {name: partial(arm.turn, lead_in=0, steps=steps) for name, arm in arms.items()}
    rates = take_turns(turns, UNEVEN_EPOCHS)
    return {name: [steps * BATCH / rate for rate in some] for name, some in rates.items()}


def over_equal(arm: str, starts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Epoch seconds of an arm over those with equal shares, in the epochs that count."""
    return ratios(
        *(
            [seconds for one in starts for seconds in one["seconds"][name][FIRST_COUNTED:]]
            for name in (arm, "equal")
        )
    )


def slowest_over_fastest(lines: Sequence[RunLine], epoch: int) -> float:
    """Input and compute seconds of the slowest worker over the fastest's in an epoch of a run.

    Raises:
        ValueError: No line is about that epoch (zero-based).
    """
    for line in lines:
        if isinstance(line, EpochLine) and line.record.epoch == epoch:
            seconds = [one.input_seconds + one.compute_seconds for one in line.record.workers]
            return max(seconds) / min(seconds)
    raise ValueError(f"no line about epoch {epoch} among {len(lines)}")


def records(run: Path) -> list[EpochLine | SharesLine]:
    """A run's lines about epochs and shares."""
    return [line for line in lines_of(run) if isinstance(line, EpochLine | SharesLine)]


def kept(lines: Iterable[RunLine]) -> list[dict[str, Any]]:
    """Lines as they are kept beside the figures."""
    return [line.model_dump(mode="json", exclude_defaults=True) for line in lines]


# ------------------------------------------------------------------------ a load starts and ends


def load(arguments: Arguments, folder: Path) -> Found:
    """A burner that comes and goes."""
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
    """One load, and what a step takes without it and with fixed shares beside it."""
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
    """Whole intervals after a change and before the first with a median step near the ideal.

    Args:
        turn: Begins where shares are made.
        change: When the load started or ended; the first interval that begins later is number 0.
        until: Intervals that end later do not count: something else changed.
        ideal: Seconds of a step; up to 10 % more are near it.

    Returns:
        The number of that interval; if there is none, how many there were; ``None`` where not one
        interval lies between the changes.
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
    """More workers than cores, slowed down by sleeping."""
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
    """The job that counts its samples, undisturbed and killed."""
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
    """What the runs with kills say; samples and seconds only where all of them have ended well."""
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
    """Uneven workers that follow their speeds, and even ones that do not."""
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
    """What starts our loop with an epoch of ``steps`` steps, worker r on core r or ``cores[r]``.

    ``keys`` are of the job.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    plan = uneven_plan(
        data, method, shares, samples=steps * sum(shares), rebalance_steps=rebalance_steps, **keys
    )
    places = range(len(shares)) if cores is None else cores
    return partial(Arm, uneven_arms.session, plan, run, factors, cores=tuple(places))


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
