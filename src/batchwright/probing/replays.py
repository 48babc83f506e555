"""Passes of measured steps, replayed from CUDA graphs where a training's would be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from batchwright.records import Job
from batchwright.records.registries.networks import by_tensors
from batchwright.workload.passes.cuda_graphs import CudaGraphs, graph_training


def may_replay(job: Job) -> bool:
    """Whether a job leaves it open, and nothing that it asks for speaks against it."""
    return (
        job.cuda_graphs == "auto"
        and job.device == "cuda"
        and by_tensors(job.network)
        and "on" not in (job.compile, job.activation_checkpointing)
        and job.batch_norm != "synchronized"
    )


class Replays:
    """Replays passes of a network inside `as_trained` alone, once that is switched on.

    So what else is measured, such as gradient noise, goes as it is.

    Args:
        network: On its device.
        limit: Bytes that a worker may use; ``None``: all that are free.

    Attributes:
        on: Whether it is.
    """

    def __init__(self, network: nn.Module, limit: int | None) -> None:
        self._network, self._limit, self.on = network, limit, False
        self._graphs: CudaGraphs | None = None  # before that the network is left as it is

    def switch(self, *, on: bool) -> None:
        """Whether passes are replayed from now on, as far as they can be."""
        self.on = on
        if on and self._graphs is None:
            self._graphs = graph_training(self._network, after=0, limit=self._limit)
        if self._graphs is not None:
            self._graphs.on = False

    @contextmanager
    def as_trained(self) -> Iterator[None]:
        """Inside, passes are those of a training."""
        if self._graphs is not None:
            self._graphs.on = self.on
        try:
            yield
        finally:
            if self._graphs is not None:
                self._graphs.on = False

    @property
    def holds(self) -> int:
        """How many shapes are recorded."""
        return 0 if self._graphs is None else self._graphs.holds

    @property
    def failure(self) -> str:
        """Why passes are not replayed, though they should; empty: they are, or should not."""
        return "" if self._graphs is None else self._graphs.failure

    def forget(self) -> None:
        """Let what is recorded go, whose memory would be weighed with what comes."""
        if self._graphs is not None:
            self._graphs.forget()

    def end(self) -> None:
        """Let the network take its passes by itself again."""
        if self._graphs is not None:
            self._graphs.end()
        self._graphs, self.on = None, False
