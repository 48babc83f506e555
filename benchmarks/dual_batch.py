"""Two batch sizes at once: what a round takes, whether all end it together, and what is lost.

CIFAR-100, 32 px, `resnet8`, float32, SGD as the job's defaults have it, seed 0; one worker with
local batch 500 and one with a small batch, real processes with one thread each on a core of their
own, and the parameter server besides, under `asp` with shares that follow the measured speeds (the
defaults). The job is probed once; then the plan for extra time k = 1.05, and that for 1.1, is made,
its pair of batches measured side by side, and made again until the rounds agree. With them runs an
arm with two large batches and the same server. A turn is one run of each arm, 3 epochs (--full: 5),
so as many rounds of each worker, of which the first and the last do not count: caches are cold in
the one, and the other gets what samples are left; the order is reversed from turn to turn; 1 turn,
--full: 4. What a round takes is its computing, exchange and waiting, without the evaluation between
two rounds.

    round_over_large_k105   round time of the pair planned for k = 1.05 over that of two large
                            batches in the same turn (means over workers and rounds); to be within
                            0.02 of k; median and quartiles
    round_over_large_k110   the same for k = 1.1
    finish_spread           of the rounds of that number of both workers, longest less shortest over
                            their mean, for both pairs; median and quartiles
    server_share_of_round   push, merge and pull, as a share of a round; all arms, median and
                            quartiles
    pushes_per_second_2     pushes a second, each with merge and pull, of a `resnet18` (11 million
                            weights) by 2 processes that do not train, for 3 s (--full: three times
                            10 s); median and quartiles; the same for 4 and 8

--full keeps its report in benchmarks/results. Without the CIFAR-100 folder, or with one core only,
all but the last are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from batchwright import verbs
from batchwright.records import Job, Plan, Profile, RoundRecord, RunSummary
from batchwright.settling import Settled, pair_measurer_for, settle
from benchmarks.common import Arguments, Figure, median_figure, quartiles, run_benchmark, say
from benchmarks.pinned import RESNET8
from benchmarks.pushes import pushes_per_second

LARGE_BATCH, WORKERS = 500, 2
EXTRA_TIMES = {"k105": 1.05, "k110": 1.1}
WITHIN = 0.02
SPREAD_GOAL, SERVER_GOAL = 0.03, 0.02
EPOCHS, TURNS = {False: 3, True: 5}, {False: 1, True: 4}  # by --full
PROBE_SECONDS = 20.0

PUSHERS = (2, 4, 8)
PUSH_SECONDS, PUSH_REPEATS = {False: 3.0, True: 10.0}, {False: 1, True: 3}

Found = tuple[list[Figure], dict[str, Any]]  # figures, and the single measurements behind them


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("dual_batch", __doc__, _measure, full_seeds=())


def _measure(arguments: Arguments, folder: Path) -> Found:
    figures: list[Figure] = []
    measurements: dict[str, Any] = {}
    if arguments.data is None or len(os.sched_getaffinity(0)) < WORKERS:
        say("rounds: they need the CIFAR-100 folder and two cores")
    else:
        figures, measurements = _round_figures(arguments.data, folder, full=arguments.full)
    rates = {
        count: [
            pushes_per_second(count, PUSH_SECONDS[arguments.full])
            for _ in range(PUSH_REPEATS[arguments.full])
        ]
        for count in PUSHERS
    }
    figures += [
        median_figure(f"pushes_per_second_{count}", found, "pushes/s")
        for count, found in rates.items()
    ]
    return figures, {**measurements, "pushes_per_second": rates}


# ----------------------------------------------------------------------------------------- rounds


def _round_figures(data: Path, folder: Path, *, full: bool) -> Found:
    epochs = EPOCHS[full]
    say("probing")
    profile = verbs.probe(_job(data, epochs))
    settled = _settled(profile, folder)
    plans = {"large": _plan(profile, 0, 1.0), **{name: one.plan for name, one in settled.items()}}
    for name, one in settled.items():
        differences = ", ".join(f"{100 * check.difference:+.2f} %" for check in one.rounds)
        batches = one.plan.stages[0].local_batch_sizes
        say(f"{name}: local batches {batches}, rounds differ by {differences} as measured")
    turns = []
    for turn in range(TURNS[full]):
        names = list(plans) if turn % 2 == 0 else list(reversed(plans))
        runs = {}
        for name in names:
            runs[name] = verbs.train(
                plans[name], run_folder=folder / f"{name}-{turn}", profile=profile
            )
            say(f"turn {turn + 1}, {name}: {mean_round_seconds(counted(runs[name])):.2f} s a round")
        turns.append({name: counted(runs[name]) for name in plans})
    measurements = {
        "plans": {name: _facts(plan) for name, plan in plans.items()},
        "differences_of_pairs": {
            name: [check.difference for check in one.rounds] for name, one in settled.items()
        },
        "rounds": [
            {name: [_seconds(one) for one in rounds] for name, rounds in turn.items()}
            for turn in turns
        ],
    }
    return round_figures(turns), measurements


def round_figures(turns: Sequence[Mapping[str, Sequence[RoundRecord]]]) -> list[Figure]:
    """What the rounds that count say.

    Args:
        turns: By arm, ``large`` and those of `EXTRA_TIMES`, the rounds of a run.
    """
    figures = []
    for name, extra in EXTRA_TIMES.items():
        ratios = [
            mean_round_seconds(turn[name]) / mean_round_seconds(turn["large"]) for turn in turns
        ]
        low, middle, high = quartiles(ratios)
        met = abs(middle - extra) <= WITHIN
        figures.append(
            Figure(
                *(f"round_over_large_{name}", middle, "ratio", low, high, len(ratios)),
                goal=extra,
                met=met,
            )
        )
    spreads = [one for turn in turns for name in EXTRA_TIMES for one in finish_spreads(turn[name])]
    shares = [
        one.exchange_seconds / seconds_of(one)
        for turn in turns
        for rounds in turn.values()
        for one in rounds
    ]
    return [
        *figures,
        median_figure("finish_spread", spreads, "ratio", at_most=SPREAD_GOAL),
        median_figure("server_share_of_round", shares, "share", at_most=SERVER_GOAL),
    ]


def seconds_of(one: RoundRecord) -> float:
    """What a round takes, without the evaluation after it."""
    return one.compute_seconds + one.exchange_seconds + one.wait_seconds


def mean_round_seconds(rounds: Sequence[RoundRecord]) -> float:
    """Mean over workers and rounds."""
    return fmean(seconds_of(one) for one in rounds)


def counted(summary: RunSummary) -> list[RoundRecord]:
    """The rounds of a run but each worker's first and last, in the order they were handed out."""
    return [one for rounds in _by_worker(summary.rounds).values() for one in rounds[1:-1]]


def finish_spreads(rounds: Sequence[RoundRecord]) -> list[float]:
    """(longest - shortest) / mean of the workers' first rounds, of their second rounds, and so on.

    Args:
        rounds: Of all workers; one that has more of them than another has some left over.
    """
    together = zip(*_by_worker(rounds).values(), strict=False)
    found = []
    for some in together:
        seconds = [seconds_of(one) for one in some]
        found.append((max(seconds) - min(seconds)) / fmean(seconds))
    return found


def _by_worker(rounds: Sequence[RoundRecord]) -> dict[int, list[RoundRecord]]:
    found: dict[int, list[RoundRecord]] = {}
    for one in sorted(rounds, key=lambda one: one.number):
        found.setdefault(one.worker, []).append(one)
    return found


# ------------------------------------------------------------------------------------------ plans


def _job(data: Path, epochs: int) -> Job:
    return Job.model_validate(
        {
            "data": f"cifar100:{data}",
            "network": RESNET8,
            "method": "dual-batch",
            "workers": WORKERS,
            "device": "cpu",
            "precision": "float32",
            "epochs": epochs,
            "evaluate_epochs": epochs,
            "global_batch": WORKERS * LARGE_BATCH,
            "dual": _dual(1, 1.05),
            "probe": {"budget": PROBE_SECONDS},
        }
    )


def _dual(small: int, extra: float) -> dict[str, Any]:
    return {"small_workers": small, "extra_time": extra, "large_batches": (LARGE_BATCH,)}


def _plan(profile: Profile, small: int, extra: float) -> Plan:
    return verbs.plan(profile, dual=_dual(small, extra))


def _settled(profile: Profile, folder: Path) -> dict[str, Settled]:
    """The plan for each extra time, its pair measured until the rounds agree."""
    found = {}
    with ExitStack() as alive:
        measure = None
        for name, extra in EXTRA_TIMES.items():
            first = _plan(profile, 1, extra)
            if measure is None:
                measure = alive.enter_context(pair_measurer_for(first, folder / "pairs"))
            found[name] = settle(
                first, profile, measure, lambda known, extra=extra: _plan(known, 1, extra)
            )
            profile = found[name].profile
    return found


def _facts(plan: Plan) -> dict[str, Any]:
    row = plan.stages[0]
    return {
        "local_batch_sizes": row.local_batch_sizes,
        "samples_per_round": row.samples_per_round,
        "update_factors": row.update_factors,
    }


def _seconds(one: RoundRecord) -> dict[str, float]:
    named = ("compute_seconds", "exchange_seconds", "wait_seconds")
    return {"worker": one.worker, **{name: round(getattr(one, name), 5) for name in named}}


if __name__ == "__main__":
    main()
