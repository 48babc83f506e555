"""Measures a workload on its workers: job and hardware become a profile.

Runs inside every worker process, all at the same time and on the same schedule, as training will.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from batchwright.errors import PlanError
from batchwright.group import Group
from batchwright.probing.bench import Bench, sides_of
from batchwright.probing.collective import measure_collectives
from batchwright.probing.gradient_noise import measure_noise
from batchwright.probing.precision import choose_precision
from batchwright.probing.step_time import local_batch_sizes, measure_points
from batchwright.probing.timing import now, spread
from batchwright.records import Cluster, DataFacts, Job, MemoryPoint, Profile, StepTime
from batchwright.workload.host import (
    free_memory,
    prepare_process,
    resolve_device,
    usable_cores,
)
from batchwright.workload.sources import open_data
from batchwright.workload.task import network_facts, set_training

Progress = Callable[[int, int, str], None]

# Shares of the budget.
_PRECISION = 0.05
_TOP_RESOLUTION = 0.6  # step times where the training takes place
_OTHER_RESOLUTIONS = 0.25  # all of them together; taken from the share above where there are any
_COLLECTIVES = 0.05
_NOISE = 0.15
_EVALUATION = 0.05

_EVALUATION_BATCH = 256
_EVALUATION_REPEATS = 4


def measure(
    job: Job,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    allocator: str | None = None,
    progress: Progress | None = None,
) -> Profile | None:
    """Step times, memory, all-reduce times, gradient noise and evaluation time of a job.

    Every worker calls this at the same time; the process group is there already if there are
    several. Takes about ``job.probe.budget`` seconds, less where all is measured before, more only
    if even three small batches take longer.

    Args:
        job: What to measure; what is `auto` in it is resolved as training would.
        rank: This worker, from 0.
        world_size: Number of workers.
        local_rank: Number of this worker on its machine, from 0.
        allocator: State of the memory allocator, if `prepare_process` was called already.
        progress: Called on rank 0 as progress(done, total, what) before each point.

    Returns:
        The profile on rank 0, `None` on the others.

    Raises:
        DataError: The data are unknown, missing or damaged.
        JobError: Network, loss or device cannot be had.
        LostWorkerError: Another worker is gone.
    """
    started = time.perf_counter()
    allocator = allocator or prepare_process(torch.get_num_threads())
    device = resolve_device(job.device, local_rank)
    group = Group(device, job.timeout)
    _check_group(group, rank, world_size)
    data = open_data(job, verify=False)
    job = _resolved(job, data.facts, device, world_size)
    budget = job.probe.budget
    precision, compared = choose_precision(job, data, group, seconds=_PRECISION * budget)
    job = job.model_copy(update={"precision": precision})
    memory_bytes = free_memory(device, world_size)
    bench = Bench(job, data, group)
    network = network_facts(job.network, bench.network, bench.side)
    set_training(bench.network)
    least = 2 if network.batch_norm else 1
    sizes = _sizes(job, data.facts, world_size, least)
    report = _reporter(progress if rank == 0 else None, len(sizes), len(sides_of(job)))
    times, peaks = _measure_steps(bench, sizes, job.goal.memory or memory_bytes, report)
    report("exchange of gradients")
    collectives = measure_collectives(group, network.trained_bytes, seconds=_COLLECTIVES * budget)
    report("gradient noise")
    noise = measure_noise(bench, bench.side, times[0].local_batch_size, seconds=_NOISE * budget)
    report("evaluation")
    evaluation = _evaluation_seconds_per_image(bench, times, _EVALUATION * budget)
    report("")
    if rank != 0:
        return None
    return Profile(
        job=job,
        data=data.facts,
        network=network,
        cluster=Cluster(
            device="cuda" if device.type == "cuda" else "cpu",
            device_name=_device_name(device),
            workers=world_size,
            cores=usable_cores(),
            threads=torch.get_num_threads(),
            memory_bytes=memory_bytes,
            python=platform.python_version(),
            torch=torch.__version__,
            allocator=allocator,
        ),
        precisions=compared,
        steps=tuple(times),
        memory=tuple(peaks),
        collectives=collectives,
        noise=noise,
        evaluation_seconds_per_image=evaluation,
        probe_seconds=time.perf_counter() - started,
    )


def _check_group(group: Group, rank: int, world_size: int) -> None:
    if (group.rank, group.size) != (rank, world_size):
        raise PlanError(
            f"worker {rank} of {world_size} finds itself worker {group.rank} of {group.size} in "
            "the process group: start all workers with one launcher"
        )


def _resolved(job: Job, data: DataFacts, device: torch.device, workers: int) -> Job:
    """The job with what was measured in place of `auto`."""
    return job.model_copy(
        update={
            "device": device.type,
            "workers": workers,
            "augment": job.augmentation,
            "resolutions": (data.side,) if job.resolutions == "auto" else job.resolutions,
        }
    )


def _sizes(job: Job, data: DataFacts, workers: int, least: int) -> list[int]:
    """Local batches worth measuring, rising; the one asked for among them."""
    most = data.train_samples // job.goal.least_steps // workers
    if job.micro_batch != "auto":
        most = min(most, job.micro_batch)
    sizes = local_batch_sizes(most, least)
    if job.global_batch == "auto" or job.micro_batch != "auto":
        return sizes
    asked = max(least, -(-job.global_batch // workers))
    return sorted({*sizes, asked})


def _measure_steps(
    bench: Bench, sizes: list[int], memory_limit: int, report: Callable[[str], None]
) -> tuple[list[StepTime], list[MemoryPoint]]:
    """Many batches at the highest resolution, then three at each of the others."""
    budget = bench.job.probe.budget
    *others, top = sides_of(bench.job)
    share = _TOP_RESOLUTION - (_OTHER_RESOLUTIONS if others else 0)
    times, peaks = measure_points(
        bench, top, sizes, seconds=share * budget, memory_limit=memory_limit, report=report
    )
    measured = [point.local_batch_size for point in times]
    few = sorted({measured[0], measured[len(measured) // 2], measured[-1]})
    for side in reversed(others):
        more_times, more_peaks = measure_points(
            bench,
            side,
            few,
            seconds=_OTHER_RESOLUTIONS * budget / len(others),
            memory_limit=memory_limit,
            least_points=2,
            report=report,
        )
        times += more_times
        peaks += more_peaks
    return times, peaks


def _evaluation_seconds_per_image(bench: Bench, times: list[StepTime], seconds: float) -> float:
    """Median time of a forward pass without gradients, data path included, per image."""
    per_image = times[-1].compute_seconds / times[-1].local_batch_size
    affordable = int(seconds / (_EVALUATION_REPEATS + 1) / per_image)
    size = max(1, min(_EVALUATION_BATCH, affordable))
    supply = bench.evaluation_supply(size)
    bench.network.eval()
    measured = []
    with torch.inference_mode():
        for _ in range(_EVALUATION_REPEATS + 1):
            start = now(bench.device)
            bench.loss(supply())
            measured.append((now(bench.device) - start) / size)
    set_training(bench.network)
    return spread(measured[1:])[1]


def _reporter(progress: Progress | None, sizes: int, sides: int) -> Callable[[str], None]:
    """Counts points; those skipped for lack of time are passed over at the end."""
    total = sizes + 3 * (sides - 1) + 3
    done = 0

    def report(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done if what else total, total, f"measuring {what}" if what else "measured")
        done += 1

    return report


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
