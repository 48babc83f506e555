"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from batchwright.errors import FileError

_PIECE = 65536  # bytes that are read at a time from the end of a file
_INSTEAD = "choose another place"


def is_there(path: str | Path) -> bool:
    """Whether there is a file or folder of that name; one that no file can have names none."""
    return os.path.exists(path)  # noqa: PTH110 - Path's own raises where a name is too long


def is_file(path: str | Path) -> bool:
    """The same of a file."""
    return os.path.isfile(path)  # noqa: PTH113 - as above


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``: aside first, then renamed over what was there.

    A device or a pipe, such as /dev/stdout, is written to and never replaced.

    Raises:
        FileError: The folder is missing, unwritable or full.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        try:
            path.write_bytes(content)
        except OSError as error:
            raise refusal(path, error) from error
        return
    # Not `tempfile`, whose files are private: this one is to have the usual permissions.
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        opened = aside.open("xb")
    except OSError as error:
        raise refusal(path, error) from error
    try:
        with opened as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise refusal(path, error) from error
        raise


def refusal(path: Path, error: OSError, instead: str = _INSTEAD) -> FileError:
    """What to say of something that cannot be written, and ``instead``, what to try."""
    return FileError(f"cannot write {path}: {error.strerror}; {instead}")


def end_of_lines(file: BinaryIO) -> int:
    """Where the last whole line of a file ends; what stands after it, a killed process left."""
    place = file.seek(0, os.SEEK_END)
    tail = b""
    while place > 0 and b"\n" not in tail:
        stop, place = place, max(0, place - _PIECE)
        file.seek(place)
        tail = file.read(stop - place) + tail
    return place + tail.rfind(b"\n") + 1


def make_folder(folder: Path, instead: str = _INSTEAD) -> None:
    """Make ``folder`` and what leads to it, unless it is there; ``instead`` is what else to try.

    Raises:
        FileError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(folder, error, instead) from error
