"""Passes of measured steps, replayed from CUDA graphs where those of a training would be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from batchwright.records import Job
from batchwright.records.registries.networks import by_tensors
from batchwright.workload.passes.cuda_graphs import CudaGraphs, graph_training


def may_replay(job: Job) -> bool:
    """Whether a job leaves replaying open, and none of its other settings excludes it."""
    return (
        job.cuda_graphs == "auto"
        and job.device == "cuda"
        and by_tensors(job.network)
        and "on" not in (job.compile, job.activation_checkpointing)
        and job.batch_norm != "synchronized"
    )


class Replays:
    """Replays passes of a network, once switched on, but only inside `as_trained`.

    Other measurements, such as that of gradient noise, take their passes without graphs.

    Args:
        network: The network, on its device.
        limit: Bytes that a worker may use; ``None``: all free bytes.

    Attributes:
        on: Whether passes inside `as_trained` are replayed.
    """

    def __init__(self, network: nn.Module, limit: int | None) -> None:
        self._network, self._limit, self.on = network, limit, False
        self._graphs: CudaGraphs | None = None  # the network is unchanged until it is switched on

    def switch(self, *, on: bool) -> None:
        """Switch replaying on, as far as passes can be replayed, or off."""
        self.on = on
        if on and self._graphs is None:
            self._graphs = graph_training(self._network, after=0, limit=self._limit)
        if self._graphs is not None:
            self._graphs.on = False

    @contextmanager
    def as_trained(self) -> Iterator[None]:
        """Inside, passes are replayed if that is switched on, as in a training."""
        if self._graphs is not None:
            self._graphs.on = self.on
        try:
            yield
        finally:
            if self._graphs is not None:
                self._graphs.on = False

    @property
    def holds(self) -> int:
        """Number of recorded shapes."""
        return 0 if self._graphs is None else self._graphs.holds

    @property
    def failure(self) -> str:
        """Why passes cannot be replayed though it is switched on; empty: nothing has failed."""
        return "" if self._graphs is None else self._graphs.failure

    def forget(self) -> None:
        """Drop the recorded passes, so that their memory is not weighed with later steps."""
        if self._graphs is not None:
            self._graphs.forget()

    def end(self) -> None:
        """Restore the network's own forward pass."""
        if self._graphs is not None:
            self._graphs.end()
        self._graphs, self.on = None, False
