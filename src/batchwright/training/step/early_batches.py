"""Batches of which the next may be made before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from batchwright.training.batches.feeding import Batch
from batchwright.workload.host import is_out_of_memory


class Early(Iterator[Batch]):
    """Batches of which the next may be made before it is asked for.

    Args:
        parts: Indices of the samples of each.
        make: Makes one.
    """

    def __init__(self, parts: Iterator[Tensor], make: Callable[[Tensor], Batch]) -> None:
        self._parts, self._make = parts, make
        self._next: Tensor | None = None  # asked for early
        self._made: list[Batch] = []

    def __next__(self) -> Batch:
        part, self._next = self._next, None
        if self._made:
            return self._made.pop()
        return self._make(next(self._parts) if part is None else part)

    @property
    def asked(self) -> bool:
        """Whether there is one to be made early."""
        return self._next is not None and not self._made

    def ask(self) -> None:
        """Ask for the samples of the next, if there is one; `make` may follow."""
        if self._next is None:
            self._next = next(self._parts, None)

    def make(self) -> None:
        """Make what was asked for, if there is memory for it beside the step in progress."""
        if self._next is None or self._made:
            return
        try:
            self._made = [self._make(self._next)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def drop(self) -> None:
        """Make what was made once more when its turn has come: its memory is wanted."""
        self._made.clear()


NO_BATCHES = Early(iter(()), lambda part: part)
"""Of which none can be made early."""
