"""Bytes of one training step: measured, and guessed before anything was tried."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from batchwright.probing.bench import Stepping, sides_of
from batchwright.records import DataFacts, Job, Precision
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.workload.data.store_writer import PIXELS
from batchwright.workload.host import autocast, free_memory, release_memory
from batchwright.workload.muon import Muon
from batchwright.workload.passes.recomputation import recompute
from batchwright.workload.task import build_network, build_optimizer, freeze, set_training
from batchwright.workload.tensor_bytes import counting_tensors


def weigh(bench: Stepping, supply: Callable[[], Any]) -> tuple[int | None, int | None]:
    """Largest sum of live tensor bytes, and largest resident size, during one training step.

    On CUDA the allocator counts, and what it has reserved stands for the resident size: blocks that
    it keeps between tensors are taken from others, too. On the CPU, what was live before the step
    plus the running sum of the allocations and releases that PyTorch's profiler records. Both are
    what tensors ask for, and exactly linear in the batch between two moments of the step; the
    resident size is neither. Images that are mapped into memory count whole in it, as a training
    reads them all.

    Returns:
        Peak in bytes on this worker, `None` if the step does not fit on some worker: then no weight
        was changed. Resident size of this process in bytes, `None` where the system does not tell.
    """
    if bench.device.type == "cuda":
        release_memory(bench.device)  # what larger batches before have left reserved
        torch.cuda.reset_peak_memory_stats(bench.device)
        if not bench.try_step(supply):
            release_memory(bench.device)
            return None, None
        peak = torch.cuda.max_memory_allocated(bench.device)
        return peak, torch.cuda.max_memory_reserved(bench.device)
    known = _forget_highest_resident()
    if not bench.try_step(supply):
        return None, None
    resident = _highest_resident() if known else None
    live = bench.live_bytes()
    with counting_tensors() as highest:
        fits = bench.try_step(supply)
    return (live + highest(), resident) if fits else (None, None)


def held_bytes(bench: Stepping) -> int:
    """Bytes that a GPU holds between two steps beside what lives of the step: images, workspaces.

    They are in each peak there, whatever the batch. 0 on the CPU, where peaks do not count them.
    """
    if bench.device.type != "cuda":
        return 0
    return max(0, torch.cuda.memory_allocated(bench.device) - bench.live_bytes())


def estimate_peak(job: Job, data: DataFacts, resolution: int, local_batch_size: int) -> int | None:
    """Peak bytes of a step of one worker that was never tried, from tensors without storage.

    Rests on a private tool of PyTorch's (`torch.distributed._tools.mem_tracker`); it counts what
    operators return, not what they use inside.

    Args:
        job: Network, loss precision and optimizer; its resolutions are concrete.
        data: The job's data.
        resolution: Image side, in pixels.
        local_batch_size: Samples in the step.

    Returns:
        Bytes; `None` where PyTorch has no such tool, or the network cannot do without real tensors.
    """
    try:
        return _peak_of_fakes(job, data, resolution, local_batch_size)
    except Exception:  # noqa: BLE001 - private, and the user's network may do anything
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
        if isinstance(optimizer, Muon):  # these tensors say that they are of the CPU
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
    """Give free memory back and have the kernel count anew; whether it can (Linux and glibc)."""
    if sys.platform != "linux":
        return False
    with suppress(AttributeError):  # another C library: free memory stays, and is counted
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _highest_resident() -> int | None:
    """Largest resident size since it was forgotten, and images not yet read, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 + _unread_images()
    return None


def _unread_images() -> int:
    """Bytes of the mapped image files that this process has not read, at most what is free.

    The kernel drops pages of a file before memory runs out: a larger file is never all there.
    """
    unread, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):  # the next mapping: addresses, mode, offset, device, inode, path
            ours = line.endswith(PIXELS)
        elif ours and key in ("Size:", "Rss:"):
            unread += int(values[0]) * 1024 * (1 if key == "Size:" else -1)
    return min(unread, free_memory(torch.device("cpu"), 1))
