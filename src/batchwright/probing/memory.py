"""Peak bytes of one training step, and whether it fits at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from batchwright.probing.bench import Batch, Bench
from batchwright.probing.timing import on_any


def peak_of_step(bench: Bench, supply: Callable[[], Batch]) -> int | None:
    """Largest sum of live tensor bytes during one training step, weights included.

    On CUDA the allocator counts; on the CPU, what was live before the step plus the running sum of
    the allocations and releases that PyTorch's profiler records. Both are what tensors ask for, and
    exactly linear in the batch; the process's resident size is neither.

    Returns:
        Bytes on this worker; `None` if the step does not fit on some worker. Then no weight was
        changed.
    """
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        fits = _try_step(bench, supply)
        return torch.cuda.max_memory_allocated(bench.device) if fits else None
    live = bench.live_bytes()
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        fits = _try_step(bench, supply)
    return live + _highest_sum(seen) if fits else None


def _try_step(bench: Bench, supply: Callable[[], Batch]) -> bool:
    failed = False
    try:
        bench.loss(supply()).backward()
    except (torch.OutOfMemoryError, MemoryError):
        failed = True
    except RuntimeError as error:  # the CPU's allocator has no class of its own
        if "can't allocate memory" not in str(error):
            raise
        failed = True
    if on_any(bench.group, failed):
        bench.optimizer.zero_grad(set_to_none=True)
        return False
    bench.exchange()
    bench.update()
    return True


def _highest_sum(seen: profile) -> int:
    """Highest running sum of allocated less released bytes."""
    assert seen.profiler is not None  # noqa: S101 - it has just run
    assert seen.profiler.kineto_results is not None  # noqa: S101 - as above
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = highest = 0
    for event in events:
        live += event.nbytes()  # type: ignore[attr-defined]  # not in the stubs
        highest = max(highest, live)
    return highest


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keep the profiler's own lines, written below Python, out of the user's terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
