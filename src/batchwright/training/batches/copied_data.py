"""Notices that a loop changes a data set of which loader processes have copies.

PyTorch's loader starts its processes anew in each epoch unless it is told to keep them, as ours is.
So a data set may have been made for changes between epochs, such as another transform.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

_MOST_PARTS = 100  # in a list that may be of data sets; one of samples may be long
_PLAIN = (bool, int, float, complex, str, bytes)


class CopiedData:
    """A data set as it was when loader processes were given their copies.

    Args:
        dataset: The data set, whose attributes are looked at, and those of data sets within it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._then = dict(_attributes(dataset))

    @property
    def changed(self) -> str:
        """Name of an attribute that has another value now; empty: none.

        One that was ``None`` may have been opened at its first use in this process, such as a file.
        """
        for name, now in _attributes(self._dataset):
            then = self._then.get(name)
            if then is None or then is now:
                continue
            if not (isinstance(then, _PLAIN) and isinstance(now, _PLAIN) and then == now):
                return name
        return ""


def _attributes(
    dataset: Any, before: str = "", seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Attributes of a data set and of those that it is made of, by their names in it."""
    seen |= {id(dataset)}
    for name, value in getattr(dataset, "__dict__", {}).items():
        yield f"{before}{name}", value
        several = isinstance(value, list | tuple) and len(value) <= _MOST_PARTS
        for number, part in enumerate(value if several else [value]):
            if isinstance(part, Dataset) and id(part) not in seen:
                place = f"{before}{name}[{number}]." if several else f"{before}{name}."
                yield from _attributes(part, place, seen)
