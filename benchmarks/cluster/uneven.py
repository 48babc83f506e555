"""Uneven workers: what following their speeds gains, what it costs, and whether it survives kills.

All speeds are of `resnet8` on CIFAR-100 in memory, 32 px, random crop and flip, global batch 128,
SGD with Nesterov momentum 0.9, weight decay 5e-4, constant rate 0.1, float32, seed 0; each worker
is one process with one thread, pinned to a core. Shares are made again every 25 steps (the
default). Arms are alive together and take turns, the order reversed from round to round. Our loop's
arms do one epoch in a turn, of as many images as the turn has steps.

Even workers. 5 steps that are not timed and 25 that are, in each turn; 4 rounds with one worker and
6 with two with --quick, 12 and 12 with --full. Ratios within a round, median and quartiles.

    one_worker_over_bare_images   our loop over a plain loop written by hand, images/s
    two_workers_over_ddp_images   our loop, `plain`, over the same loop by hand under
                                  DistributedDataParallel, which keeps batch normalization's
                                  statistics to each worker
    even_dynamic_over_ddp_seconds time of our loop, `dynamic-batch`, over that loop's

One of two workers at half speed: a burner process takes its share of the second worker's core, from
the first step on. 4 epochs of 50 steps with --quick, of 60 with --full; one start with --quick, two
with --full. Ratios of the third and the fourth epoch, median and quartiles.

    dynamic_over_equal_shares     epoch seconds of `dynamic-batch` over equal shares; the limit is
                                  2/3
    fixed_over_equal_shares       the same of fixed shares of 85 and 43: what can be reached here
    each_epoch_over_equal_shares  the same of `dynamic-batch` as published, with shares made again
                                  at the end of each epoch only (--full)
    slowest_over_fastest          `dynamic-batch`, third epoch: input and compute seconds of the
                                  slower worker over the other's, by the run's own records

A load that starts and ends while `dynamic-batch` trains: 325 steps; the burner starts between the
50th and the 75th and ends some 125 to 150 steps later; 1 round with --quick, 4 with --full.

    recovery_intervals            an interval is the 25 steps between two times at which shares are
                                  made. Counted from the first that lies wholly after the load
                                  started or ended, which is number 0: the number of the first whose
                                  median step is within 10 % of the ideal; if none is, how many
                                  there were. The largest; spread from the median to it. Ideal: the
                                  median step of fixed shares of 85 and 43 under the load, and of 64
                                  and 64 without, in the same round

Four workers on the two cores (--full): each computes 4 times as long as it would, and the last 8
times, by sleeping after each backward pass; so the cores have room for all. 4 epochs of 30 steps,
one start; ratios of the third and the fourth epoch.

    four_workers_dynamic_over_equal_shares   epoch seconds; the limit is 4/7, 0.571

Kills. The job of `benchmarks.cluster.kills` under torchrun; one worker at a time is killed with
SIGKILL, at a moment drawn evenly from the 8 seconds after the workers' start, starting up included.
20 kills with --full, five in each run; 3 with --quick (names end with `_check`).

    kills_recovered               kills after which the run went on, of all
    samples_lost_or_repeated      by the end of the worst epoch of the worst run
    seconds_lost_per_kill         time of a run less that of one without kills, by its kills; mean

Accuracy (--full). The whole of CIFAR-100, 2 epochs, the rate falling to 0 along half a cosine, with
batch normalization over each worker's own samples: `dynamic-batch` with the burner beside its
second worker, and equal shares without, from the same weights and in the same order, seeds 0 to 4.

    accuracy_dynamic_less_equal   held-out accuracy (10,000 images), mean difference and its 95 %
                                  interval; no worse means that its lower end is above -1.0 point

--full keeps its report in benchmarks/results; --quick copies from there what it does not measure.
Without the CIFAR-100 folder, or with one core only, the figures that need them are left out.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from batchwright.records import Job, RunSummary
from batchwright.records.documents import read_record
from batchwright.workload.data.sources import open_data
from benchmarks.cluster import uneven_arms
from benchmarks.cluster.kills import KilledRun, run_and_kill
from benchmarks.cluster.uneven_arms import Method, uneven_plan
from benchmarks.harness.common import (
    Arguments,
    Figure,
    difference_figure,
    kept_figures,
    mean_figure,
    median_figure,
    ratio_figure,
    run_benchmark,
    say,
)
from benchmarks.harness.loads import Burner
from benchmarks.harness.turns import Arm, Turn, started, take_turns
from benchmarks.speed import main_job_arms
from benchmarks.speed.main_job_arms import BATCH

EQUAL, FIXED = (64, 64), (85, 43)
REBALANCE_STEPS = 25

LEAD_IN_STEPS, TIMED_STEPS, WARM_UP_TURNS = 5, 25, 1
ONE_WORKER_ROUNDS, TWO_WORKERS_ROUNDS = {False: 4, True: 12}, {False: 6, True: 12}  # by --full
ONE_WORKER_GOAL, TWO_WORKERS_GOAL, EVEN_GOAL = 0.98, 0.97, 1.02

UNEVEN_EPOCHS, FIRST_COUNTED = 4, 2  # zero-based: the third epoch
UNEVEN_STEPS, UNEVEN_STARTS = {False: 50, True: 60}, {False: 1, True: 2}
UNEVEN_GOAL, SLOWEST_GOAL = 0.70, 1.08

LOAD_STEPS, LOAD_ROUNDS = 325, {False: 1, True: 4}
LOAD_BEGINS, LOAD_LASTS = (2, 3), (5, 6)  # intervals, drawn from between
IDEAL_STEPS = 25
WITHIN, RECOVERY_GOAL = 1.10, 1.0

FOUR_CORES, FOUR_FACTORS = (0, 1, 0, 1), (4.0, 4.0, 4.0, 8.0)
FOUR_SHARES, FOUR_STEPS, FOUR_STARTS = (32, 32, 32, 32), 30, 1

KILLS, KILLS_PER_RUN = {False: 3, True: 20}, 5

SEEDS, ACCURACY_EPOCHS, MARGIN = tuple(range(5)), 2, 1.0

KEPT = (
    "each_epoch_over_equal_shares",
    "four_workers_dynamic_over_equal_shares",
    "kills_recovered",
    "samples_lost_or_repeated",
    "seconds_lost_per_kill",
    "accuracy_dynamic_less_equal",
)

Found = tuple[list[Figure], dict[str, Any]]  # figures, and the single measurements behind them


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("uneven", __doc__, _measure, full_seeds=SEEDS)


def _measure(arguments: Arguments, folder: Path) -> Found:
    figures: list[Figure] = []
    measurements: dict[str, Any] = {}
    for part in _parts(arguments):
        more, values = part(arguments, _made(folder / part.__name__.strip("_")))
        say("; ".join(f"{figure.name} {figure.value:.4g}" for figure in more))
        figures, measurements = figures + more, measurements | values
    if not arguments.full:
        figures += kept_figures("uneven", KEPT)
    return figures, measurements


def _parts(arguments: Arguments) -> list[Callable[[Arguments, Path], Found]]:
    """What can and is to be measured."""
    if not {0, 1} <= os.sched_getaffinity(0):
        say("cores 0 and 1 are needed for all but the kills")
        return [_kill_figures]
    if arguments.data is None:
        return [_kill_figures]
    say("CIFAR-100: reading")
    open_data(Job(data=f"cifar100:{arguments.data}"))
    parts: list[Callable[[Arguments, Path], Found]]
    parts = [_even_figures, _uneven_figures, _load_figures, _kill_figures]
    if arguments.full:
        parts += [_four_figures, _accuracy_figures]
    return parts


# ----------------------------------------------------------------------------------- even workers


def _even_figures(arguments: Arguments, folder: Path) -> Found:
    data = _folder(arguments)
    steps = LEAD_IN_STEPS + TIMED_STEPS
    loops: dict[str, tuple[Method, tuple[int, ...]]] = {
        "one_worker": ("plain", (BATCH,)),
        "plain": ("plain", EQUAL),
        "dynamic": ("dynamic-batch", EQUAL),
    }
    sessions = {
        name: _session(data, folder / name, method, shares, steps)
        for name, (method, shares) in loops.items()
    }
    one = {"one_worker": sessions.pop("one_worker"), "bare": _bare(data)}
    two = {**sessions, "ddp": _bare_ddp(data)}
    rates = _images_per_second(one, ONE_WORKER_ROUNDS[arguments.full])
    rates |= _images_per_second(two, TWO_WORKERS_ROUNDS[arguments.full])
    return [
        ratio_figure(
            "one_worker_over_bare_images",
            rates["one_worker"],
            rates["bare"],
            at_least=ONE_WORKER_GOAL,
        ),
        ratio_figure(
            "two_workers_over_ddp_images", rates["plain"], rates["ddp"], at_least=TWO_WORKERS_GOAL
        ),
        ratio_figure(
            "even_dynamic_over_ddp_seconds", rates["ddp"], rates["dynamic"], at_most=EVEN_GOAL
        ),
        *(median_figure(f"{n}_images_per_second", v, "images/s") for n, v in rates.items()),
    ], {"images_per_second": rates}


def _images_per_second(starters: Mapping[str, Callable[[], Arm]], rounds: int) -> dict[str, Any]:
    with started(starters) as arms:
        turns = {
            name: partial(arm.turn, lead_in=LEAD_IN_STEPS, steps=TIMED_STEPS)
            for name, arm in arms.items()
        }
        take_turns(turns, WARM_UP_TURNS, show=say)
        return take_turns(turns, rounds, show=say)


# ----------------------------------------------------------------- one of two workers at half speed


def _uneven_figures(arguments: Arguments, folder: Path) -> Found:
    data, steps = _folder(arguments), UNEVEN_STEPS[arguments.full]
    found: list[dict[str, Any]] = []
    for start in range(UNEVEN_STARTS[arguments.full]):
        runs = _made(folder / str(start))
        starters = {
            "equal": _session(data, runs / "equal", "plain", EQUAL, steps),
            "dynamic": _session(data, runs / "dynamic", "dynamic-batch", EQUAL, steps),
            "fixed": _session(data, runs / "fixed", "plain", FIXED, steps),
        }
        if arguments.full:
            starters["each_epoch"] = _session(
                data, runs / "each_epoch", "dynamic-batch", EQUAL, steps, rebalance_steps=0
            )
        with started(starters) as arms, Burner(1):
            seconds = _epoch_seconds(arms, steps)
        found.append({"seconds": seconds, "records": _records(runs / "dynamic")})
    figures = [
        _over_equal("dynamic", found, UNEVEN_GOAL),
        _over_equal("fixed", found),
        median_figure(
            "slowest_over_fastest",
            [slowest_over_fastest(one["records"], FIRST_COUNTED) for one in found],
            "ratio",
            at_most=SLOWEST_GOAL,
        ),
    ]
    if arguments.full:
        figures.append(_over_equal("each_epoch", found))
    return figures, {"uneven": found}


def _epoch_seconds(arms: Mapping[str, Arm], steps: int) -> dict[str, list[float]]:
    """By arm, seconds of each epoch."""
    turns = {name: partial(arm.turn, lead_in=0, steps=steps) for name, arm in arms.items()}
    rates = take_turns(turns, UNEVEN_EPOCHS, show=say)
    return {name: [steps * BATCH / rate for rate in some] for name, some in rates.items()}


def _over_equal(arm: str, found: Sequence[Mapping[str, Any]], goal: float | None = None) -> Figure:
    """Epoch seconds of an arm over those with equal shares, in the epochs that count."""
    over, under = (
        [seconds for one in found for seconds in one["seconds"][name][FIRST_COUNTED:]]
        for name in (arm, "equal")
    )
    return ratio_figure(f"{arm}_over_equal_shares", over, under, at_most=goal)


def slowest_over_fastest(records: Sequence[Mapping[str, Any]], epoch: int) -> float:
    """Input and compute seconds of the slowest worker over the fastest's, from metrics.jsonl.

    Args:
        records: Lines of the run.
        epoch: Zero-based; its line must be there.

    Raises:
        ValueError: It is not.
    """
    for line in records:
        if line["kind"] == "epoch" and line["epoch"] == epoch:
            seconds: list[float] = []
            while f"time/rank{len(seconds)}/compute_s" in line:
                own = f"time/rank{len(seconds)}"
                seconds.append(line[f"{own}/input_s"] + line[f"{own}/compute_s"])
            return max(seconds) / min(seconds)
    raise ValueError(f"no line about epoch {epoch} among {len(records)}")


def _records(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl about epochs and shares."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] in ("epoch", "shares")]


# ------------------------------------------------------------------------ a load starts and ends


def _load_figures(arguments: Arguments, folder: Path) -> Found:
    data = _folder(arguments)
    starters = {
        "dynamic": _session(data, folder / "dynamic", "dynamic-batch", EQUAL, LOAD_STEPS),
        "equal": _session(data, folder / "equal", "plain", EQUAL, IDEAL_STEPS),
        "fixed": _session(data, folder / "fixed", "plain", FIXED, IDEAL_STEPS),
    }
    moments = random.Random(0)
    with started(starters) as arms:
        for name in ("equal", "fixed"):
            arms[name].turn(lead_in=0, steps=IDEAL_STEPS)
        rounds = [_load_round(arms, moments) for _ in range(LOAD_ROUNDS[arguments.full])]
    counts = [count for one in rounds for count in one["intervals"] if count is not None]
    measurements = {"load": rounds, "load_records": _records(folder / "dynamic")}
    if not counts:
        return [], measurements
    most, middle = float(max(counts)), float(median(counts))
    figure = Figure(
        *("recovery_intervals", most, "intervals", middle, most, len(counts)),
        goal=RECOVERY_GOAL,
        met=most <= RECOVERY_GOAL,
    )
    return [figure], measurements


def _load_round(arms: Mapping[str, Arm], moments: random.Random) -> dict[str, Any]:
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
    starts = (turn.started, *turn.step_ends)
    return [end - start for start, end in zip(starts, turn.step_ends, strict=False)]


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


def _four_figures(arguments: Arguments, folder: Path) -> Found:
    data = _folder(arguments)
    methods: dict[str, Method] = {"equal": "plain", "dynamic": "dynamic-batch"}
    found: list[dict[str, Any]] = []
    for start in range(FOUR_STARTS):
        runs = _made(folder / str(start))
        starters = {
            name: _session(
                data,
                runs / name,
                method,
                FOUR_SHARES,
                FOUR_STEPS,
                cores=FOUR_CORES,
                factors=FOUR_FACTORS,
            )
            for name, method in methods.items()
        }
        with started(starters) as arms:
            seconds = _epoch_seconds(arms, FOUR_STEPS)
        found.append({"seconds": seconds, "records": _records(runs / "dynamic")})
    figure = _over_equal("dynamic", found)
    return [_renamed(figure, f"four_workers_{figure.name}")], {"four_workers": found}


# ------------------------------------------------------------------------------------------ kills


def _kill_figures(arguments: Arguments, folder: Path) -> Found:
    moments = random.Random(0)
    say("kills: a run without any")
    undisturbed = run_and_kill(folder / "undisturbed", 0, moments)
    wanted = KILLS[arguments.full]
    runs: list[KilledRun] = []
    while (left := wanted - _kills(runs)) > 0 and (not runs or runs[-1].miscounted is not None):
        runs.append(run_and_kill(folder / str(len(runs)), min(KILLS_PER_RUN, left), moments))
        say(f"kills: {_kills(runs)} of {wanted}, recovered {sum(r.recovered for r in runs)}")
    suffix = "" if arguments.full else "_check"
    return [_renamed(one, one.name + suffix) for one in kill_figures(undisturbed, runs, wanted)], {
        "kills": [asdict(run) for run in (undisturbed, *runs)]
    }


def kill_figures(undisturbed: KilledRun, runs: Sequence[KilledRun], wanted: int) -> list[Figure]:
    """What the runs with kills say; samples and seconds only where all of them have ended well."""
    recovered = float(sum(run.recovered for run in runs))
    figures = [
        Figure(
            *("kills_recovered", recovered, "kills", recovered, recovered, _kills(runs)),
            goal=float(wanted),
            met=recovered >= wanted,
        )
    ]
    counts = [float(run.miscounted) for run in runs if run.miscounted is not None]
    if len(counts) < len(runs):
        return figures
    lost = [
        (run.seconds - undisturbed.seconds) / len(run.killed_after)
        for run in runs
        if run.killed_after
    ]
    worst = max(counts)
    return [
        *figures,
        Figure(
            *("samples_lost_or_repeated", worst, "samples", min(counts), worst, len(counts)),
            goal=0.0,
            met=worst == 0,
        ),
        mean_figure("seconds_lost_per_kill", lost, "s"),
    ]


def _kills(runs: Sequence[KilledRun]) -> int:
    return sum(len(run.killed_after) for run in runs)


# --------------------------------------------------------------------------------------- accuracy


def _accuracy_figures(arguments: Arguments, folder: Path) -> Found:
    found: dict[str, list[float]] = {"dynamic": [], "equal": []}
    seconds: dict[str, list[float]] = {"dynamic": [], "equal": []}
    shares = []
    for seed in SEEDS:
        for name, accuracies in found.items():
            run = folder / f"{name}-{seed}"
            summary, wall = _trained(_folder(arguments), run, name == "dynamic", seed)
            assert summary.accuracy is not None
            accuracies.append(summary.accuracy)
            seconds[name].append(wall)
            if name == "dynamic":
                shares.append([worker.samples for worker in summary.epochs[-1].workers])
        say(f"seed {seed}: " + ", ".join(f"{k} {v[-1]:.4f}" for k, v in found.items()))
    dynamic, equal = ([100 * one for one in found[name]] for name in ("dynamic", "equal"))
    name = "accuracy_dynamic_less_equal"
    return [difference_figure(name, dynamic, equal, "points", margin=MARGIN)], {
        "accuracy": found,
        "accuracy_run_seconds": seconds,
        "samples_of_workers_in_last_epoch": shares,
    }


def _trained(data: Path, run: Path, dynamic: bool, seed: int) -> tuple[RunSummary, float]:
    plan = uneven_plan(
        data,
        "dynamic-batch" if dynamic else "plain",
        EQUAL,
        epochs=ACCURACY_EPOCHS,
        seed=seed,
        decay="cosine",
    )
    with Burner(1) if dynamic else nullcontext():
        arm = Arm(uneven_arms.whole_run, plan, run, cores=(0, 1))
        try:
            arm.begin(lead_in=0, steps=1)
            turn = arm.end()
        finally:
            arm.stop()
    return read_record(run / "summary.json", RunSummary), turn.seconds


# ---------------------------------------------------------------------------- what the parts share


def _session(
    data: Path,
    run: Path,
    method: Method,
    shares: Sequence[int],
    steps: int,
    *,
    cores: Sequence[int] | None = None,
    factors: Sequence[float] | None = None,
    rebalance_steps: int = REBALANCE_STEPS,
) -> Callable[[], Arm]:
    """What starts our loop with an epoch of ``steps`` steps, worker r on core r or ``cores[r]``."""
    plan = uneven_plan(
        data, method, shares, samples=steps * sum(shares), rebalance_steps=rebalance_steps
    )
    places = range(len(shares)) if cores is None else cores
    return partial(Arm, uneven_arms.session, plan, run, factors, cores=tuple(places))


def _bare(data: Path) -> Callable[[], Arm]:
    return partial(Arm, main_job_arms.bare, data, cores=(0,))


def _bare_ddp(data: Path) -> Callable[[], Arm]:
    return partial(Arm, main_job_arms.bare_ddp, data, cores=(0, 1))


def _folder(arguments: Arguments) -> Path:
    assert arguments.data is not None  # `_parts` saw to it
    return arguments.data


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _renamed(figure: Figure, name: str) -> Figure:
    return Figure(**{**asdict(figure), "name": name})


if __name__ == "__main__":
    main()
