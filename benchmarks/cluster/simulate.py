"""Simulated trainings against real ones and against closed forms, and how large a cluster may be.

Real trainings (`simulated_epoch_error`). `resnet8` on scikit-learn's digits at 32 px, global batch
128, workers of one machine. With 1, 2 and 4 workers a job is probed (5 s), planned and trained for
8 epochs by `batchwright train`. The simulation has the plan and the profile, and nothing of the
training. Compared are seconds of an epoch: measured, the median of the epochs after the first;
simulated, the mean. Besides these even workers there are

    uneven   the last worker takes twice as long for all that it computes, by sleeping; plan and
             probe do not know it, the simulation does (`speeds=`): 2 workers under `plain` and
             `dynamic-batch`, 4 under `plain`
    kills    2 workers, one of which kills itself twice, after random stretches of training;
             compared are seconds of the whole training without its start. The simulation knows the
             mean number of failures, and the cost of a restart from another run with one kill

An error is |simulated - measured| / measured; median, with quartiles as spread.

Closed forms (`closed_form_error`, the largest error): a ring's all-reduce, the mean of the largest
of 64 exponential and of 64 normal step times, the time that work takes with failures and
checkpoints at Daly's interval, and the wait in a queue of constant service times
(Pollaczek-Khinchine). Most of each error is the chance in the random numbers that are averaged.

Size. `dynamic-batch` with shares computed anew every 25 steps, stragglers and failures, one repeat
of an epoch of 1,000 steps: seconds and peak memory of a process that simulates nothing else, on one
core; and seconds for 10,000 workers over those for 1,000, which are 10 where cost is linear.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from torch import nn

import batchwright as bw
from batchwright.algorithms.checkpointing import daly_interval, expected_seconds
from batchwright.planning.simulation.cluster import ImaginedCluster, Row
from batchwright.planning.simulation.failures import Hazards, run_through
from batchwright.planning.simulation.rounds import simulate_rounds
from batchwright.planning.simulation.steps import simulate_steps
from batchwright.records import NetworkFacts, Plan, Profile, RunSummary, Scenario
from batchwright.workload.task import build_network
from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value
from benchmarks.harness.plans import fixed_plan, made_up_data

SIDE, BATCH, EPOCHS, BUDGET = 32, 128, 8, 5.0
WORKERS, FACTOR, KILLS = (1, 2, 4), 2.0, 2
CHECKPOINT_SECONDS = 2.0
ORDERS = "BATCHWRIGHT_BENCHMARK_ORDERS"  # environment variable: file of `orders`
REPEATS, MANY_REPEATS = 16, 200
SIZES, SIZE_REPEATS = (1_000, 10_000), {False: 1, True: 3}

BENCHMARK = Benchmark(
    "simulate",
    "Simulated clusters",
    "Simulated trainings of `resnet8` on digits at 32 px, global batch 128, against real ones with "
    "1, 2 and 4 workers of one machine, even and uneven, with and without kills; simulations "
    "against closed forms; simulations of 10,000 workers",
    (
        Figure("simulated_epoch_error", "share", "median", "error of the simulated seconds of an "
               "epoch against measured ones, median", at_most=0.07),
        Figure("simulated_epoch_worst_error", "share", "largest", "error of the simulated seconds "
               "of an epoch against measured ones, largest"),
        Figure("closed_form_error", "share", "largest", "error of simulations against closed forms "
               "(ring all-reduce, largest of exponential and of normal times, Daly's checkpoint "
               "interval, a queue), largest", at_most=0.01),
        Figure("seconds_for_10000_workers_epoch", "s", "median", "seconds to simulate 1,000 steps "
               "of 10,000 workers with shares, stragglers and failures, on one core",
               at_most=60.0),
        Figure("gib_for_10000_workers", "GiB", "worst", "peak memory of the process that simulates "
               "10,000 workers", at_most=2.0),
        Figure("seconds_10000_over_1000_workers", "ratio", "median", "seconds to simulate 10,000 "
               "workers over those for 1,000 (linear: 10)", at_most=12.0),
    ),
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Measure part by part."""
    found: dict[str, Sequence[float] | Value] = {}
    measurements: dict[str, Any] = {}
    for part in (closed_forms, sizes, trainings):
        more, values = part(arguments, folder)
        say("; ".join(f"{one.name} {one.value:.4g}" for one in BENCHMARK.values(more).values()))
        found, measurements = found | more, measurements | values
    return found, measurements


# --------------------------------------------------------------------------------- real trainings


def ordered(num_classes: int) -> nn.Module:
    """`resnet8`; in the last worker it is slow or kills the process if the orders' file says so."""
    network = build_network("resnet8", classes=num_classes, side=SIDE)
    place = Path(os.environ.get(ORDERS, ""))
    if place.is_file() and "RANK" in os.environ:
        orders = json.loads(place.read_text())
        rank = int(os.environ["RANK"])
        if rank == int(os.environ["WORLD_SIZE"]) - 1:
            network.register_forward_pre_hook(_Obeys(place, **orders))
    return network


class _Obeys:
    """A hook before each forward pass: sleep in proportion to computing time, or kill itself."""

    def __init__(self, place: Path, factor: float, kills: Sequence[float]) -> None:
        attempt = len(list(place.parent.glob(f"{place.name}.*")))
        self._struck = place.with_name(f"{place.name}.{attempt}")
        self._factor, self._mark, self._begun = factor, 0.0, 0.0
        self._after = kills[attempt] if attempt < len(kills) else inf

    def __call__(self, *_: Any) -> None:
        if self._begun:
            time.sleep((self._factor - 1) * (time.thread_time() - self._mark))
        self._begun = self._begun or time.monotonic()
        self._mark = time.thread_time()
        if time.monotonic() - self._begun > self._after:
            self._struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Case:
    """A training, simulated and measured."""

    name: str
    simulated: float  # seconds
    measured: float

    @property
    def error(self) -> float:
        """Error of the simulation, relative to the measurement."""
        return abs(self.simulated - self.measured) / self.measured


@contextmanager
def orders(place: Path, factor: float = 1.0, kills: Sequence[float] = ()) -> Iterator[None]:
    """In this context, the last worker of each training that starts is slow, or kills itself.

    ``factor``: time of its computing over the usual one; ``kills``: for each attempt, seconds of
    training after which it kills itself.
    """
    place.write_text(json.dumps({"factor": factor, "kills": list(kills)}))
    os.environ[ORDERS] = str(place)
    try:
        yield
    finally:
        del os.environ[ORDERS]


def trainings(_: Arguments, folder: Path) -> Found:
    """Simulate and train with even workers, uneven ones, and kills."""
    cases: list[Case] = []
    known: dict[int, tuple[Profile, Plan]] = {}
    for workers in WORKERS:
        say(f"{workers} workers: probe, and train")
        profile = bw.probe(
            data="digits",
            network="benchmarks.cluster.simulate:ordered",
            resolutions=(SIDE,),
            workers=workers,
            device="cpu",
            launch="local" if workers > 1 else "in-process",
            probe={"budget": BUDGET, "learning": 0},
        )
        plan = bw.plan(profile, epochs=EPOCHS, global_batch=BATCH)
        known[workers] = profile, plan
        cases.append(
            compared(f"{workers} even", plan, profile, _train(plan, folder / f"e{workers}"))
        )
    for workers, method in ((2, "plain"), (2, "dynamic-batch"), (4, "plain")):
        say(f"{workers} workers, the last at half speed, {method}")
        profile, _ = known[workers]
        plan = bw.plan(profile, epochs=EPOCHS, global_batch=BATCH, method=method)
        with orders(folder / f"o{workers}{method}", FACTOR):
            run = _train(plan, folder / f"u{workers}{method}")
        speeds = [1.0] * (workers - 1) + [1 / FACTOR]
        cases.append(compared(f"{workers} uneven {method}", plan, profile, run, speeds=speeds))
    cases.append(_with_kills(folder, *known[2]))
    errors = [case.error for case in cases]
    return {"simulated_epoch_error": errors, "simulated_epoch_worst_error": errors}, {
        "trainings": [asdict(case) | {"error": case.error} for case in cases]
    }


def compared(name: str, plan: Plan, profile: Profile, run: RunSummary, **keys: Any) -> Case:
    """Simulate a training that has run: seconds of an epoch of both."""
    (found,) = bw.simulate(plan, profile=profile, repeats=REPEATS, **keys).clusters
    simulated = found.seconds.value * (1 - found.shares.evaluation) / plan.epochs
    case = Case(name, simulated, run.measured_epoch_seconds or 0.0)
    say(f"{name}: simulated {simulated:.3f} s, measured {case.measured:.3f} s")
    return case


def _train(plan: Plan, folder: Path) -> RunSummary:
    return bw.train(plan, run_folder=folder)


def _with_kills(folder: Path, profile: Profile, plan: Plan) -> Case:
    """A training with two kills; runs with none and one measure start and restart."""
    keys = {"checkpoint_seconds": CHECKPOINT_SECONDS, "restarts": KILLS + 1}
    plan = plan.model_copy(update={"job": plan.job.model_copy(update=keys)})
    say("2 workers: without kills, with one, and with two")
    moments = random.Random(0)
    walls, work, starting = [], 0.0, 0.0
    for count in (0, 1, KILLS):
        kills = [moments.uniform(0.6, 1.4) * work / (count + 1) for _ in range(count)]
        begun = time.perf_counter()
        with orders(folder / f"ok{count}", 1.0, kills):
            run = _train(plan, folder / f"k{count}")
        walls.append(time.perf_counter() - begun)
        if not count:
            work = sum(one.training_seconds + one.evaluation_seconds for one in run.epochs)
            starting = walls[0] - work
    restart = max(walls[1] - walls[0] - CHECKPOINT_SECONDS / 2, 0.1)
    # Simulated failures hit restarts, too, ours do not: the time of restarts is added afterwards.
    hours = 2 * work / KILLS / 3600
    hazards: dict[str, Any] = {"mtbf_hours": hours, "checkpoint_seconds": CHECKPOINT_SECONDS}
    hazards["restart_seconds"] = 0.0
    (found,) = bw.simulate(plan, profile=profile, repeats=MANY_REPEATS, **hazards).clusters
    simulated = found.seconds.value + found.failures * restart
    case = Case("2 with kills", simulated / EPOCHS, (walls[-1] - starting) / EPOCHS)
    say(f"kills: simulated {case.simulated:.3f} s, measured {case.measured:.3f} s")
    return case


# ----------------------------------------------------------------------------------- closed forms


def closed_forms(_: Arguments, __: Path) -> Found:
    """Errors of simulations against closed forms."""
    found = {
        "ring": _ring(),
        "exponential": _largest("exponential"),
        "normal": _largest("normal"),
        "daly": _daly(),
        "queue": _queue(),
    }
    return {"closed_form_error": [abs(a / b - 1) for a, b in found.values()]}, {
        "closed_forms": {name: {"simulated": a, "exact": b} for name, (a, b) in found.items()}
    }


def _plan() -> Plan:
    """A plan with stated step times."""
    facts = made_up_data("made up", 100_000, 10, SIDE)
    network = NetworkFacts(name="made up", parameters=10**6, trained_bytes=10**7, batch_norm=False)
    job = bw.Job(
        data="digits",
        workers=2,
        global_batch=64,
        epochs=1,
        learning_rate=0.1,
        resolutions=(SIDE,),
        precision="float32",
        augment="none",
        method="dynamic-batch",
    )
    row = {"sample_seconds": 1e-3, "step_seconds": 5e-3}
    return fixed_plan(job, facts, network, row, batches=(32, 32))


def _ring() -> tuple[float, float]:
    plan, workers, size = _plan(), 48, 10**7
    asked = Scenario(latency=1e-4, bandwidth=1e9)
    found = ImaginedCluster(plan, asked, workers).all_reduce_seconds(size)
    return found, 2 * (workers - 1) / workers * size / 1e9 + 2 * (workers - 1) * 1e-4


def _largest(kind: str) -> tuple[float, float]:
    from scipy.special import ndtr

    workers, steps = 64, 40_000
    row = Row(
        epochs=1,
        steps=steps,
        whole=float(steps),
        batches=np.ones(workers, dtype=np.int64),
        sample_seconds=np.zeros(workers),
        step_seconds=np.ones(workers),
        fixed_samples=0.0,
        samples_per_round=np.zeros(0, dtype=np.int64),
        exchange=0.0,
        level=0.0,
    )
    scatters = {
        "exponential": lambda random, shape: random.exponential(size=shape),
        "normal": lambda random, shape: 1 + 0.1 * random.standard_normal(shape),
    }
    generator = np.random.default_rng(0)
    found = simulate_steps(row, np.ones(workers), steps, generator, scatter=scatters[kind])
    at = np.linspace(-10, 10, 20_001)
    exact = {
        "exponential": sum(1 / n for n in range(1, workers + 1)),
        "normal": 1 + 0.1 * float(np.trapezoid(1 - ndtr(at) ** workers, at) + at[0]),
    }
    return float(found.slowest.mean()), exact[kind]


def _daly() -> tuple[float, float]:
    cost, mean, restart, work = 20.0, 4000.0, 60.0, 4_000_000.0
    best = daly_interval(cost, mean)
    hazards = Hazards(1, failures=1 / mean, interval=best, cost=cost, restart=restart)
    seconds = [
        run_through(work, hazards, np.random.default_rng(seed)).seconds for seed in range(40)
    ]
    return fmean(seconds), expected_seconds(work, best, cost, restart, mean)


def _queue() -> tuple[float, float]:
    workers, service, load = 2000, 0.001, 0.5
    mean = workers * service / load
    generator, until = np.random.default_rng(0), 150 * mean
    found = simulate_rounds(
        workers,
        10**6,
        lambda _: generator.exponential(mean),
        transfer=0.0,
        service=service,
        until=until,
    )
    load = found.pushes / until * service
    return found.queue, load * service / (2 * (1 - load))


# ------------------------------------------------------------------------------------------- size

_LARGE = """
import resource, sys, time
import batchwright as bw
begun = time.perf_counter()
bw.simulate(
    sys.argv[1], workers=int(sys.argv[2]), samples=32_000 * int(sys.argv[2]), epochs=1,
    repeats=1, steps=1000, straggler_share=0.05, mtbf_hours=50_000, workers_per_host=8,
    exchange="tree",
)
print(time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
assert "torch" not in sys.modules
"""


def sizes(arguments: Arguments, folder: Path) -> Found:
    """Simulate 1,000 and 10,000 workers, each in a process of its own on one core."""
    place = folder / "large.json"
    _plan().save(place)
    seconds: dict[int, list[float]] = {}
    memory: dict[int, list[float]] = {}
    for workers in SIZES:
        for _ in range(SIZE_REPEATS[arguments.full]):
            taken, gib = _large(place, workers)
            seconds.setdefault(workers, []).append(taken)
            memory.setdefault(workers, []).append(gib)
    few, many = SIZES
    return {
        "seconds_for_10000_workers_epoch": seconds[many],
        "gib_for_10000_workers": memory[many],
        "seconds_10000_over_1000_workers": [median(seconds[many]) / median(seconds[few])],
    }, {"sizes": {str(n): {"seconds": seconds[n], "gib": memory[n]} for n in SIZES}}


def _large(plan: Path, workers: int) -> tuple[float, float]:
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", _LARGE, str(plan), str(workers)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, gib = map(float, done.stdout.split())
    return seconds, gib


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
