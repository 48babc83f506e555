"""Bytes of tensors: of those that are there, and the most that live at once on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

_ITS_LINES = (b"ActivityProfiler", b"CPUAllocator.cpp")


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What the tensors hold, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def lasting_bytes(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that live between two steps: weights, buffers and the optimizer's state."""
    held = (v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))
    return bytes_of(network.parameters()) + bytes_of(network.buffers()) + bytes_of(held)


@contextmanager
def counting_tensors() -> Iterator[Callable[[], int]]:
    """Count what this thread's tensors take on the CPU, where no allocator does, by the profiler.

    What is released is counted only if it was allocated inside. PyTorch has one profiler: nobody
    else may use it inside.

    Yields:
        A function that tells, afterwards, the highest sum of allocated less released bytes.
    """
    # Not torch.profiler's, which imports the compiler: 1.4 s.
    with _without_its_lines(), profile(profile_memory=True) as seen:
        yield lambda: _highest_sum(seen)


def _highest_sum(seen: profile) -> int:
    assert seen.kineto_results is not None  # noqa: S101 - it has just run
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = highest = 0
    for event in events:
        live += event.nbytes()  # type: ignore[attr-defined]  # not in the stubs
        highest = max(highest, live)
    return highest


@contextmanager
def _without_its_lines() -> Iterator[None]:
    """Keep the profiler's own lines, written below Python, out of the user's terminal.

    All the while: it writes one as it starts, one as it stops, and a warning in between, where a
    block from before is released. Other lines are passed on in the end. Only a signal that kills
    the process inside loses them.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with TemporaryFile() as told:
        try:
            os.dup2(told.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            told.seek(0)
            for line in told:
                if not any(word in line for word in _ITS_LINES):
                    os.write(2, line)
