"""Two batch sizes at once: time of a round, whether both workers end it together, server traffic.

10,000 training images of CIFAR-100, evenly drawn, 32 px, `resnet8`, float32, SGD with the job's
defaults, seed 0. One worker has local batch 500 and one a small batch; both are real processes with
one thread each on a core of their own, with the parameter server besides, under `asp` with shares
that follow the measured speeds (the defaults). The job is probed once. Then the plans for extra
time k = 1.05 and 1.1 are made: each plan's pair of batches is measured side by side, and the plan
is made again until the rounds agree. A third arm has two large batches and the same server.

All three arms are alive in one run and take turns. A turn is one round of both workers of each arm,
which begin it at the same moment, some ten seconds; the order is reversed from turn to turn. A
round is computing, exchange and waiting, without evaluation. The first two turns, in which caches
are cold and no speed is known yet, do not count; then come 6 turns, 40 with --full. Turns are that
short because the machine's speed drifts.

    round_over_large       mean round time of the two workers over that of two large batches, in the
                           same turn
    finish_spread          longest minus shortest round of the two workers of a turn over their
                           mean, for both pairs; `equal_finish_spread` is that of two large batches,
                           which is the machine's own part
    pace_beside_small      seconds a sample of the worker with the large batch over its seconds with
                           two large batches in the same turn. A plan assumes 1
    server_share_of_round  push, merge and pull as a share of a round, over all arms; of a round of
                           the whole of CIFAR-100 it would be a fifth of that
    pushes_per_second      pushes, each with merge and pull, of a `resnet18` (11 million weights) by
                           2, 4 and 8 processes that do not train, for 3 s (--full: 3 times 10 s)

All figures are medians with quartiles. Without the CIFAR-100 folder, or with one core only, all but
the pushes are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from batchwright.records import Job, Plan, Profile, RoundRecord
from batchwright.records.lines.line_files import lines_of
from batchwright.records.lines.run_lines import RoundLine
from batchwright.workflows import verbs
from batchwright.workflows.match_rounds import Settled, pair_measurer_for, settle
from benchmarks.cluster import uneven_arms
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, ratios
from benchmarks.harness.images import smaller_cifar100
from benchmarks.harness.plans import ENDLESS, job_from
from benchmarks.harness.turns import LIMIT_SECONDS, Arm, started, take_turns
from benchmarks.methods.served_arms import RESNET8, pushes_per_second

LARGE_BATCH, WORKERS = 500, 2
EXTRA_TIMES = {"k105": 1.05, "k110": 1.1}
WITHIN = 0.02
IMAGES, HELD_OUT = 10_000, 100
COLD_TURNS, TURNS = 2, {False: 6, True: 40}  # by --full
PROBE_SECONDS = 20.0
PUSHING = (2, 4, 8)  # processes
PUSH_SECONDS, PUSH_REPEATS = {False: 3.0, True: 10.0}, {False: 1, True: 3}

BENCHMARK = Benchmark(
    "dual_batch",
    "Two batch sizes at once: time",
    "CIFAR-100, `resnet8`, one worker with local batch 500 and one with a small batch, a core "
    "each, and the parameter server besides",
    (
        Figure("round_over_large_k105", "ratio", "median", "time of a round with two batch sizes "
               "over that with large batches alone, planned for 1.05", near=(1.05, WITHIN)),
        Figure("round_over_large_k110", "ratio", "median", "time of a round with two batch sizes "
               "over that with large batches alone, planned for 1.1", near=(1.1, WITHIN)),
        Figure("finish_spread", "ratio", "median", "two batch sizes: longer minus shorter round of "
               "the two workers over their mean", at_most=0.03),
        Figure("equal_finish_spread", "ratio", "median", "two large batches: longer minus shorter "
               "round of the two workers over their mean (the machine's own part)"),
        *(
            Figure(f"pace_beside_small_{name}", "ratio", "median", "seconds a sample of the worker "
                   "with the large batch, beside a small batch over beside a large one (a plan "
                   f"assumes 1); extra time {extra:g}")
            for name, extra in EXTRA_TIMES.items()
        ),
        Figure("server_share_of_round", "share", "median",
               "push, merge and pull as a share of a round", at_most=0.02),
        *(
            Figure(f"pushes_per_second_{count}", "pushes/s", "median", "pushes, each with merge "
                   f"and pull, of an 11-million-parameter model by {count} processes")
            for count in PUSHING
        ),
    ),
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Time rounds, then pushes."""
    found: dict[str, list[float]] = {}
    measurements: dict[str, Any] = {}
    if arguments.data is None or len(os.sched_getaffinity(0)) < WORKERS:
        say("rounds: they need the CIFAR-100 folder and two cores")
    else:
        found, measurements = measure_rounds(arguments.data, folder, full=arguments.full)
    pushes = {
        count: [
            pushes_per_second(count, PUSH_SECONDS[arguments.full])
            for _ in range(PUSH_REPEATS[arguments.full])
        ]
        for count in PUSHING
    }
    found |= {f"pushes_per_second_{count}": some for count, some in pushes.items()}
    return found, {**measurements, "pushes_per_second": pushes}


@dataclass(frozen=True)
class Round:
    """One round of both workers of an arm."""

    seconds: tuple[float, ...]  # time of each worker's round, in rank order
    exchanges: tuple[float, ...]  # each worker's seconds of push, merge and pull in the round
    samples: tuple[int, ...]  # samples that each worker trained on in the round

    @property
    def mean(self) -> float:
        """Mean seconds of the workers' rounds."""
        return fmean(self.seconds)

    @property
    def spread(self) -> float:
        """Longest minus shortest round of the workers over their mean."""
        return (max(self.seconds) - min(self.seconds)) / self.mean

    @property
    def pace(self) -> float:
        """Seconds a sample of the first worker, which always has the large batch."""
        return self.seconds[0] / self.samples[0]


def measure_rounds(data: Path, folder: Path, *, full: bool) -> Found:
    """Time rounds of both pairs of batches and of two large ones, in turns."""
    turns = COLD_TURNS + TURNS[full] + 1  # one more: the last exchange is never recorded
    smaller_cifar100(data, IMAGES, folder, held_out=HELD_OUT)
    say("probing")
    profile = verbs.probe(_job(folder))
    settled = _settled(profile, folder)
    plans = {"large": _plan(profile, 0, 1.0), **{name: one.plan for name, one in settled.items()}}
    off = {name: [check.difference for check in one.rounds] for name, one in settled.items()}
    for name, some in off.items():
        batches = plans[name].stages[0].local_batch_sizes
        words = ", ".join(f"{100 * one:+.2f} %" for one in some)
        say(f"{name}: local batches {batches}, rounds differ by {words} as measured")
    cores = tuple(sorted(os.sched_getaffinity(0))[:WORKERS])
    starters = {
        name: partial(Arm, uneven_arms.epochs, plan, folder / name, cores=cores)
        for name, plan in plans.items()
    }
    with started(starters) as arms:
        seconds = take_turns({name: partial(_turn, arms[name]) for name in arms}, turns, form=str)
    records = {name: _records(folder / name) for name in plans}
    rounds = [
        {
            name: Round(
                each[turn],
                tuple(worker[turn].exchange_seconds for worker in records[name]),
                tuple(worker[turn].samples for worker in records[name]),
            )
            for name, each in seconds.items()
        }
        for turn in range(COLD_TURNS, turns - 1)
    ]
    return rounds_found(rounds), {
        "plans": {name: _facts(plan) for name, plan in plans.items()},
        "differences_of_pairs": off,
        "rounds": [{name: asdict(one) for name, one in turn.items()} for turn in rounds],
    }


def rounds_found(turns: Sequence[Mapping[str, Round]]) -> dict[str, list[float]]:
    """The figures of rounds, by name, from turns with a round of each arm."""
    large = [turn["large"].mean for turn in turns]
    return {
        **{
            f"round_over_large_{name}": ratios([turn[name].mean for turn in turns], large)
            for name in EXTRA_TIMES
        },
        "finish_spread": [turn[name].spread for turn in turns for name in EXTRA_TIMES],
        "equal_finish_spread": [turn["large"].spread for turn in turns],
        **{
            f"pace_beside_small_{name}": ratios(
                [turn[name].pace for turn in turns], [turn["large"].pace for turn in turns]
            )
            for name in EXTRA_TIMES
        },
        "server_share_of_round": [
            share
            for turn in turns
            for one in turn.values()
            for share in ratios(one.exchanges, one.seconds)
        ],
    }


def _turn(arm: Arm) -> tuple[float, ...]:
    """Have an arm do a round: seconds of each worker's round."""
    arm.begin(lead_in=0, steps=1)
    return tuple(turn.seconds for turn in arm.ends())


def _records(run_folder: Path) -> list[list[RoundRecord]]:
    """The recorded rounds of each worker, in order."""
    rounds = [line.record for line in lines_of(run_folder) if isinstance(line, RoundLine)]
    return [[one for one in rounds if one.worker == worker] for worker in range(WORKERS)]


# ------------------------------------------------------------------------------------------ plans


def _job(data: Path) -> Job:
    # Workers sleep while the other arms have their turn, hence the timeout.
    return job_from(
        f"network={RESNET8} method=dual-batch workers={WORKERS} device=cpu precision=float32 "
        f"epochs={ENDLESS} evaluate_epochs={ENDLESS} checkpoint_seconds={ENDLESS} "
        f"timeout={LIMIT_SECONDS} global_batch={WORKERS * LARGE_BATCH}",
        data=f"cifar100:{data}",
        dual=_dual(1, 1.05),
        probe={"budget": PROBE_SECONDS},
    )


def _dual(small: int, extra: float) -> dict[str, Any]:
    return {"small_workers": small, "extra_time": extra, "large_batches": (LARGE_BATCH,)}


def _plan(profile: Profile, small: int, extra: float) -> Plan:
    return verbs.plan(profile, dual=_dual(small, extra))


def _settled(profile: Profile, folder: Path) -> dict[str, Settled]:
    """The plan for each extra time, whose pair was measured until the rounds agreed."""
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


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
