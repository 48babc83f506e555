"""The most bytes that tensors take on a worker while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from batchwright.records import Stage
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.step.clock import StepClock
from batchwright.workload.passes.cuda_graphs import CudaGraphs
from batchwright.workload.tensor_bytes import counting_tensors


class PeakMemory:
    """Measures the peak memory of the epoch in progress, for the ``peak`` of its meter.

    On CUDA the allocator counts all along. On the CPU the profiler does, so one step of each row
    of the plan is profiled, as by the probe: the second, when the optimizer has its state.

    Args:
        device: Where the worker computes.
        state: State of the run, whose meter gets the peak.
        clock: Leaves out the profiler's start and end, some milliseconds.
        lasting: Returns the bytes that live between two steps; ``None``: no profile on the CPU.
        graphs: CUDA graphs that passes are replayed from, if any are.
    """

    def __init__(
        self,
        device: torch.device,
        state: RunState,
        clock: StepClock,
        lasting: Callable[[], int] | None,
        graphs: CudaGraphs | None,
    ) -> None:
        self._device, self._state, self._clock = device, state, clock
        self._lasting = lasting if device.type == "cpu" else None
        self._row: Stage | None = None
        self._steps = 0
        self._graphs = graphs
        self._highest: dict[int | None, int] = {}  # by resolution, while passes are recorded

    @contextmanager
    def of_epoch(self) -> Iterator[None]:
        """Measure the steps inside, those of an epoch or a part of it, on CUDA."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            # A replayed pass allocates nothing: it has the memory in which it was recorded, maybe
            # at the same resolution many epochs ago. That of another one is not this epoch's.
            if self._graphs is None or not self._graphs.holds:
                self._highest.clear()
            side = None if self._row is None else self._row.resolution
            self._highest[side] = max(peak, self._highest.get(side, 0))
            self._note(self._highest[side])

    @contextmanager
    def of_step(self, row: Stage) -> Iterator[None]:
        """Measure the step inside, of the plan's ``row``, on the CPU."""
        self._steps = 1 if row is not self._row else self._steps + 1
        self._row = row
        if self._lasting is None or self._steps != 2:
            yield
            return
        lasting, began = self._lasting(), time.perf_counter()
        with counting_tensors() as highest:
            self._clock.leave_out(time.perf_counter() - began)
            yield
            ended = time.perf_counter()
        self._note(lasting + highest())
        self._clock.leave_out(time.perf_counter() - ended)

    def _note(self, peak: int) -> None:
        self._state.meter.peak = max(self._state.meter.peak, peak)
