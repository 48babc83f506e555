"""What a step costs beside the backward pass and the update: processor time for each tensor.

`step_overhead_us_per_tensor`: thread CPU time of `Session.step` with two workers and 160 tensors,
minus that of a backward pass and a fused SGD step alone, over the number of tensors, in
microseconds. Further figures are the same cost with one worker and two, and with 20, 160 and 640
tensors, of `Session.step` (``step_us_per_tensor_...``) and of DistributedDataParallel on the same
network (``ddp_us_per_tensor_...``).

The tensors hold 8 numbers each, so the cost of a tensor and of a step is measured, not that of a
number. In each process three networks take turns within every step:

    plain    ``loss.backward()`` and ``optimizer.step()``, no workers
    session  ``session.step(loss)``
    ddp      ``loss.backward()`` through DistributedDataParallel, and ``optimizer.step()``

Forward passes are not timed. Time is CPU time of the worker's own thread, without waiting for the
other worker and without the threads that send. A figure is the median over the rounds of the median
within a round of 20 steps, minus that of `plain` in the same round; its spread is the quartiles: 10
rounds with --quick, 15 with --full. All steps lie in one epoch, before its last ones, in which
workers have unequal numbers of micro-batches and could not take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw
from batchwright.records import Plan
from batchwright.workload.host import prepare_process
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, differences
from benchmarks.harness.plans import ENDLESS, job_from, opened, planned
from benchmarks.harness.turns import environments_of

WORKERS, TENSORS = (1, 2), (20, 160, 640)
HEADLINE = "2_160"
NUMBERS = 8  # size of each tensor
BATCH = 2  # local batch of each worker
STEPS = 20  # steps of a round
ROUNDS = {False: 10, True: 15}  # by --full
LEAD_IN = 30  # steps before the first round
ARMS = ("plain", "session", "ddp")

BENCHMARK = Benchmark(
    "step_overhead",
    "What a step costs beside its computing",
    "CPU time of the worker's own thread in a step, minus that of backward pass and update alone, "
    "for each tensor; tensors of 8 numbers; arms took turns within each step",
    (
        Figure("step_overhead_us_per_tensor", "us", "median", "CPU time of `session.step` for each "
               "tensor, without backward pass and update, 2 workers, 160 tensors",
               at_most=6.0),
        *(
            Figure(f"{arm}_us_per_tensor_{workers}_{tensors}", "us", "median",
                   f"CPU time of {words} for each tensor, without backward pass and update, "
                   f"{workers} worker{'s' * (workers > 1)}, {tensors} tensors")
            for workers, tensors in product(WORKERS, TENSORS)
            for arm, words in (("step", "`session.step`"), ("ddp", "DistributedDataParallel"))
        ),
    ),
)  # fmt: skip


class Many(nn.Module):
    """A network of ``tensors`` trained tensors of `NUMBERS` zeros."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(
            [nn.Parameter(torch.zeros(NUMBERS)) for _ in range(tensors)]
        )

    def forward(self, values: Tensor) -> Tensor:
        """A loss that depends on every tensor."""
        return (torch.stack(list(self.tensors)) * values.mean()).sum()


class Values(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A data set of ``samples`` constant samples, which take no time to make."""

    def __init__(self, samples: int) -> None:
        self._samples, self._item = samples, torch.ones(1)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._item, 0


def measure(arguments: Arguments, folder: Path) -> Found:
    """Measure each number of workers with each number of tensors, in new processes."""
    times: dict[str, dict[str, list[float]]] = {}
    for workers, tensors in product(WORKERS, TENSORS):
        name = f"{workers}_{tensors}"
        out = folder / f"{name}.json"
        given = (environments_of(workers), tensors, ROUNDS[arguments.full], out)
        multiprocessing.spawn(_worker, args=given, nprocs=workers)
        times[name] = json.loads(out.read_text(encoding="utf-8"))
        say(f"{workers} worker(s), {tensors} tensors: done")
    return found_of(times), {"us_per_step": times}


def found_of(times: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """All figures, by name, from microseconds of a step by case and arm, round by round."""
    found: dict[str, list[float]] = {}
    for name, arms in times.items():
        tensors = int(name.partition("_")[2])
        for arm, figure in (("session", "step"), ("ddp", "ddp")):
            more = differences(arms[arm], arms["plain"])
            found[f"{figure}_us_per_tensor_{name}"] = [one / tensors for one in more]
    if HEADLINE in times:
        found["step_overhead_us_per_tensor"] = found[f"step_us_per_tensor_{HEADLINE}"]
    return found


def _worker(
    rank: int, environments: list[dict[str, str]], tensors: int, rounds: int, out: Path
) -> None:
    os.environ.update(environments[rank])
    prepare_process(1)
    dist.init_process_group("gloo")
    try:
        times = _times(_plan(len(environments)), tensors, LEAD_IN + rounds * STEPS)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        starts = range(LEAD_IN, LEAD_IN + rounds * STEPS, STEPS)
        medians = {
            arm: [1e6 * statistics.median(values[start : start + STEPS]) for start in starts]
            for arm, values in times.items()
        }
        out.write_text(json.dumps(medians), encoding="utf-8")


def _times(plan: Plan, tensors: int, steps: int) -> dict[str, list[float]]:
    """Seconds of the thread's CPU time in each step, by arm."""
    networks = {arm: Many(tensors) for arm in ARMS}
    optimizers = {
        arm: torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
        for arm, network in networks.items()
    }
    wrapped = DistributedDataParallel(networks["ddp"])
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    dataset = Values(plan.data.train_samples)
    with bw.Session(
        networks["session"], optimizers["session"], dataset, plan=plan, loaders=0
    ) as session:
        for _ in session.epochs():
            for values, _ in session.batches():
                if len(times["plain"]) < steps:
                    _step("plain", networks["plain"](values), times, _update(optimizers["plain"]))
                    _step("ddp", wrapped(values), times, _update(optimizers["ddp"]))
                _step("session", networks["session"](values), times, session.step)
    return times


def _update(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def _step(
    arm: str, loss: Tensor, times: dict[str, list[float]], step: Callable[[Tensor], Any]
) -> None:
    started = time.thread_time()
    step(loss)
    times[arm].append(time.thread_time() - started)


def _plan(workers: int) -> Plan:
    job = job_from(
        f"network=resnet8 optimizer=sgd precision=float32 device=cpu workers={workers} epochs=2 "
        f"global_batch={BATCH * workers} checkpoint_seconds={ENDLESS}"
    )
    return planned(job, opened(job.data, job.network, 8))


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
