"""A stream of batches whose next one may be made before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from batchwright.training.batches.feeding import Batch
from batchwright.workload.host import is_out_of_memory


class Early(Iterator[Batch]):
    """Batches of which the next one may be made before it is asked for.

    Args:
        parts: Sample indices of each batch, int64 (samples,).
        make: Makes a batch from such indices.
    """

    def __init__(self, parts: Iterator[Tensor], make: Callable[[Tensor], Batch]) -> None:
        self._parts, self._make = parts, make
        self._next: Tensor | None = None  # indices of the next batch, if `ask` has fetched them
        self._made: list[Batch] = []  # the next batch, if it is made already

    def __next__(self) -> Batch:
        part, self._next = self._next, None
        if self._made:
            return self._made.pop()
        return self._make(next(self._parts) if part is None else part)

    @property
    def asked(self) -> bool:
        """Whether the next batch's indices are known and the batch is still to be made."""
        return self._next is not None and not self._made

    def ask(self) -> None:
        """Fetch the indices of the next batch, if there is one; `make` may follow."""
        if self._next is None:
            self._next = next(self._parts, None)

    def make(self) -> None:
        """Make the batch that `ask` fetched, if memory suffices beside the step in progress."""
        if self._next is None or self._made:
            return
        try:
            self._made = [self._make(self._next)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def drop(self) -> None:
        """Let go of the batch that was made, whose memory is needed; it is made again in turn."""
        self._made.clear()


NO_BATCHES = Early(iter(()), lambda part: part)
"""An empty stream, where batches cannot be made early."""
