"""Reading a file of lines while other processes append to it."""

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
    """Reads new lines of a file: each line once, and only once it is whole.

    Args:
        path: The file; it may not exist yet.
        read: Parses a line; the line is left out if it returns `None`.
        from_end: Leave out the whole lines that the file holds already. Half a line at its end, as
            a full disk leaves it, is read again: the next process that appends overwrites it.
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
        """Call ``show`` with each line that was appended since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                parsed = self._read(line)
                if parsed is not None:
                    show(parsed)


@contextmanager
def following(look: Callable[[], None]) -> Iterator[None]:
    """Inside, a thread calls ``look`` every `FOLLOW_SECONDS`; at the end it is called once more."""
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
