"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchwright.errors import FileError

LONGEST_NAME = 255
"""Most bytes of a file's or folder's name that disks take."""

_PIECE = 65536  # bytes that are read at a time from the end of a file
_INSTEAD = "choose another place"
_ASIDE = re.compile(r"\..+\.([0-9a-f]{8}|writing)")  # names of files that are being written


def is_there(path: str | Path) -> bool:
    """Whether a file or folder exists; false for a name that is too long for the disk."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises where a name is too long


def is_file(path: str | Path) -> bool:
    """Whether a file exists; false for a folder, and for a name that is too long for the disk."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises as above


def is_folder(path: str | Path) -> bool:
    """Whether a folder exists; false for a file, and for a name that is too long for the disk."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises as above


def beginning(name: str, most: int) -> str:
    """The longest beginning of a file's name that takes at most ``most`` bytes.

    >>> beginning("naïve", 3), beginning("naïve", 4), beginning("naïve", 9)
    ('na', 'naï', 'naïve')
    """
    return name.encode()[:most].decode(errors="ignore")


def behind_links(path: Path) -> Path:
    """The file or folder that a path leads to through links, which need not be there.

    Raises:
        FileError: The links lead round in a circle.
    """
    target = Path(os.path.realpath(path))
    if os.path.islink(target):  # noqa: PTH114 - Path.is_symlink raises where a name is too long
        raise FileError(f"cannot write {path}: it is a link that leads back to itself; remove it")
    return target


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, as `writing_whole` does.

    Raises:
        FileError: As there.
    """
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """Inside, write to a new file, which is renamed over ``path`` at the end, if there is no error.

    A device or a pipe, such as /dev/stdout, is written to and never replaced. Nor is a link: what
    is renamed is the file that it leads to.

    Raises:
        FileError: The folder is missing, unwritable or full, the name is too long, or ``path`` is a
            link to itself.
    """
    if is_there(path) and not (path.is_file() or path.is_dir()):
        try:
            with path.open("wb") as device:
                yield device
        except OSError as error:
            raise refusal(path, error) from error
        return
    target = behind_links(path)
    # Not `tempfile`: its files are private, and this one must have the usual permissions. Of the
    # name only a part, since names that are nearly too long are good for the file itself.
    aside = target.with_name(f".{target.name[:60]}.{os.urandom(4).hex()}")
    try:
        opened = aside.open("xb")
    except OSError as error:
        raise refusal(path, error) from error
    try:
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise refusal(path, error) from error
        raise


def look_again(folder: Path) -> None:
    """Have a network disk see which files others have written into a folder by now: otherwise it
    may say for a minute that one is missing which it has missed before.
    """
    with suppress(OSError), os.scandir(folder):
        pass


def is_unfinished(path: Path) -> bool:
    """Whether a file is being written, or is what a killed process left of writing it."""
    return _ASIDE.fullmatch(path.name) is not None


def refusal(path: Path, error: OSError, instead: str = _INSTEAD) -> FileError:
    """The error for a path that cannot be written; ``instead`` says what to try."""
    return FileError(f"cannot write {path}: {error.strerror}; {instead}")


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def end_of_lines(file: BinaryIO) -> int:
    """The offset in bytes at which the last whole line of a file ends.

    What follows it is half a line, as a killed process leaves it.
    """
    place = file.seek(0, os.SEEK_END)
    while place > 0:
        stop, place = place, max(0, place - _PIECE)
        file.seek(place)
        found = file.read(stop - place).rfind(b"\n")
        if found >= 0:
            return place + found + 1
    return 0


def lines_from_end(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines of a file without their line breaks, the last one first."""
    place, rest = end_of_lines(file) - 1, b""
    while place > 0:
        # As much again as the line has so far, or one of many pieces would be joined in each anew.
        stop, place = place, max(0, place - max(_PIECE, len(rest)))
        file.seek(place)
        rest, *lines = (file.read(stop - place) + rest).split(b"\n")
        yield from reversed(lines)
    if place == 0:
        yield rest


def make_folder(folder: Path, instead: str = _INSTEAD) -> None:
    """Make ``folder`` and its parents if they are missing.

    Raises:
        FileError: The folder cannot be made; ``instead`` ends the message with what to try.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(folder, error, instead) from error
