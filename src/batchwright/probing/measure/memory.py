"""Peak bytes of one training step: measured, or estimated without taking the step."""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from batchwright.distributed.group import Group
from batchwright.probing.bench import Steppable, sides_of
from batchwright.records import DataFacts, Job, Precision
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.workload.data.store_writer import PARTS, PIXELS
from batchwright.workload.host import autocast, free_memory, identity, release_memory
from batchwright.workload.muon import Muon
from batchwright.workload.passes.recomputation import recompute
from batchwright.workload.starting_weights import freeze
from batchwright.workload.task import build_network, build_optimizer, set_training
from batchwright.workload.tensor_bytes import counting_tensors


def weigh(
    bench: Steppable, supply: Callable[[], Any], *, alone: bool = False
) -> tuple[int | None, int | None]:
    """Largest sum of live tensor bytes, and largest resident size, during one training step.

    On CUDA the allocator counts tensor bytes, and its reserved bytes stand for the resident size:
    nobody else can use blocks that it keeps between tensors. On the CPU the peak is the bytes live
    before the step plus the running sum of the allocations and releases that PyTorch's profiler
    records. Both peaks are what tensors ask for, and exactly linear in the batch between two
    moments of the step; the resident size is neither. It includes all of the images that are mapped
    into memory, as a training reads them all; of those held out each worker reads its part.

    Args:
        bench: Takes the steps.
        supply: Returns a step's samples.
        alone: Whether a worker evaluates all images that are held out, as with a parameter server.

    Returns:
        Peak in bytes on this worker, `None` if the step does not fit on some worker: then no weight
        was changed. Resident size of this process in bytes, `None` where the system does not show
        it.
    """
    if bench.device.type == "cuda":
        release_memory(bench.device)  # else blocks reserved for earlier, larger batches would count
        torch.cuda.reset_peak_memory_stats(bench.device)
        if not bench.try_step(supply):
            release_memory(bench.device)
            return None, None
        peak = torch.cuda.max_memory_allocated(bench.device)
        return peak, torch.cuda.max_memory_reserved(bench.device)
    known = _forget_highest_resident()
    if not bench.try_step(supply):
        return None, None
    resident = _highest_resident(1 if alone else bench.group.size) if known else None
    live = bench.live_bytes()
    with counting_tensors() as highest:
        fits = bench.try_step(supply)
    return (live + highest(), resident) if fits else (None, None)


def held_bytes(bench: Steppable) -> int:
    """Bytes that a GPU holds between two steps besides the step's own: images, workspaces.

    Each peak on a GPU includes them, whatever the batch. 0 on the CPU, where peaks leave them out.
    """
    if bench.device.type != "cuda":
        return 0
    return max(0, torch.cuda.memory_allocated(bench.device) - bench.live_bytes())


def memory_of_each(group: Group, neighbours: int) -> int:
    """Bytes that each worker of a group may use; all workers call this together.

    They take the same batches, so the least memory counts. Workers that are on one GPU, as NCCL can
    be told to allow, get equal parts of it.

    Args:
        group: The workers.
        neighbours: Number of workers on a machine.
    """
    device = group.device
    here, free = (socket.gethostname(), identity(device)), free_memory(device, neighbours)
    if here[1]:  # `free_memory` contains what this process holds, and not what the others do
        held = torch.cuda.memory_reserved(device)
        on_gpu = [other for place, other in group.gather((here, held)) if place == here]
        free = (free - held + sum(on_gpu)) // len(on_gpu)
    least: int = min(group.gather(max(1, free)))
    return least


def estimate_peak(job: Job, data: DataFacts, resolution: int, local_batch_size: int) -> int | None:
    """Peak bytes of a step of one worker, estimated with tensors without storage.

    The estimate uses a private tool of PyTorch (`torch.distributed._tools.mem_tracker`). It counts
    the tensors that operators return, not what they use inside.

    Args:
        job: Names network, number format and optimizer; its resolutions are concrete.
        data: Facts of the job's data.
        resolution: Image side, in pixels.
        local_batch_size: Samples in the step.

    Returns:
        Bytes; `None` where PyTorch has no such tool, or the network needs real tensors.
    """
    try:
        return _peak_of_fakes(job, data, resolution, local_batch_size)
    except Exception:  # noqa: BLE001 - the tool is private, and the user's network may do anything
        return None


def _peak_of_fakes(job: Job, data: DataFacts, resolution: int, size: int) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    side = max(sides_of(job))
    network = build_network(
        job.network,
        classes=len(data.classes),
        side=side,
        dropout=job.dropout,
        arguments=job.network_args,
    )
    freeze(network, job.frozen)
    set_training(network)
    if job.activation_checkpointing == "on":
        recompute(network)
    precision: Precision = "float32" if job.precision == "auto" else job.precision
    mode = FakeTensorMode()
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fake = mode.from_tensor(parameter.detach())
            module.register_parameter(name, nn.Parameter(fake, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, mode.from_tensor(buffer))
    with mode:
        optimizer = build_optimizer(network, job, OPTIMIZERS[job.optimizer].rate)
        if isinstance(optimizer, Muon):  # the fake tensors claim to be on the CPU
            optimizer.together = job.device == "cuda"
        tracker = MemTracker()
        tracker.track_external(network, optimizer)
        with tracker:
            for _ in range(2):  # the optimizer's state is there from the second step on
                images = torch.empty(size, data.channels, resolution, resolution)
                labels = torch.zeros(size, dtype=torch.long)
                with autocast(precision, torch.device("cpu")):
                    outputs = network(images.contiguous(memory_format=torch.channels_last))
                    loss = functional.cross_entropy(outputs, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                tracker.reset_mod_stats()
    peaks = tracker.get_tracker_snapshot("peak")
    return sum(int(counted["Total"]) for counted in peaks.values())


def _forget_highest_resident() -> bool:
    """Give free memory back and reset the peak of the resident size, if the kernel can (Linux)."""
    if sys.platform != "linux":
        return False
    with suppress(AttributeError):  # another C library: free memory stays, and is counted
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _highest_resident(workers: int) -> int | None:
    """Largest resident size since it was reset, plus the mapped images not yet read, in bytes.

    Of the images held out, each of the ``workers`` that evaluate together reads a part. The kernel
    drops pages of a file before memory runs out, so a file larger than the free memory is never
    resident as a whole: of what is not read, at most the free bytes count.
    """
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next((line.split()[1] for line in status if line.startswith("VmHWM:")), None)
    if peak is None:
        return None
    unread, size, readers = 0, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):  # the next mapping: addresses, mode, offset, device, inode, path
            held_out = line.endswith(PARTS[1] + PIXELS)
            readers = workers if held_out else int(line.endswith(PIXELS))
        elif readers and key == "Size:":
            size = int(values[0]) * 1024
        elif readers and key == "Rss:":  # it follows the size
            unread += max(0, size // readers - int(values[0]) * 1024)
    return int(peak) * 1024 + min(unread, free_memory(torch.device("cpu"), 1))
