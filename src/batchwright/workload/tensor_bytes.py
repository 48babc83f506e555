"""Bytes of given tensors, and the most bytes of tensors that live at once on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

_PROFILER_LINES = (b"ActivityProfiler", b"CPUAllocator.cpp", b"gpuGetDeviceCount")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def lasting_bytes(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes kept between two steps: weights, buffers and the optimizer's state."""
    held = (v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))
    return bytes_of(network.parameters()) + bytes_of(network.buffers()) + bytes_of(held)


@contextmanager
def counting_tensors() -> Iterator[Callable[[], int]]:
    """Count the bytes of this thread's CPU tensors with PyTorch's profiler.

    A release counts only if its tensor was allocated inside. PyTorch has one profiler: no other
    code may use it inside.

    Yields:
        A function that returns, afterwards, the highest sum of allocated less released bytes.
    """

    def highest_sum() -> int:
        assert profiler.kineto_results is not None  # noqa: S101 - it has just run
        events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        live = highest = 0
        for event in events:
            live += event.nbytes()
            highest = max(highest, live)
        return highest

    # `torch.profiler` would import the compiler.
    with _without_profiler_lines(), profile(profile_memory=True) as profiler:
        yield highest_sum


@contextmanager
def _without_profiler_lines() -> Iterator[None]:
    """Inside, keep the profiler's own lines, written below Python, out of the user's terminal.

    The profiler writes a line as it starts, one as it stops, a warning in between where a block
    from before is released, and an error where PyTorch is built for GPUs and finds none. Other
    lines are passed on at the end; only a signal that kills the process inside loses them.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with TemporaryFile() as lines:
        try:
            os.dup2(lines.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            lines.seek(0)
            for line in lines:
                if not any(word in line for word in _PROFILER_LINES):
                    os.write(2, line)
