"""Follows a file of lines that other processes append to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from batchwright.storage.files import end_of_lines

FOLLOW_SECONDS = 0.1

Line = TypeVar("Line")


class Tail(Generic[Line]):
    """Hands on the lines of a file, each once and whole lines only.

    Args:
        path: The file; it may not be there yet.
        read: What a line says; `None` leaves it out.
        from_end: Leave out the whole lines that it holds already. Half a line at its end, as a full
            disk leaves it, is cut off and written over by whoever appends next.
    """

    def __init__(
        self, path: Path, read: Callable[[bytes], Line | None], *, from_end: bool = False
    ) -> None:
        self._path, self._read = path, read
        self._position = 0
        if from_end and path.exists():
            with path.open("rb") as file:
                self._position = end_of_lines(file)

    def __call__(self, show: Callable[[Line], None]) -> None:
        """Call ``show`` with every line that is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                said = self._read(line)
                if said is not None:
                    show(said)

    @contextmanager
    def followed(self, show: Callable[[Line], None]) -> Iterator[None]:
        """Inside, a thread calls ``show`` with every line soon after it was written."""
        with following(lambda: self(show)):
            yield


@contextmanager
def following(look: Callable[[], None]) -> Iterator[None]:
    """Inside, a thread calls ``look`` again and again; it is called once more at the end."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(FOLLOW_SECONDS):
            look()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        look()
