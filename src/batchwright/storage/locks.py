"""One writer at a time: a lock that the kernel keeps, and frees when its holders have ended.

It is `flock`'s, which belongs to an open file and not to a process: whoever starts a process that
writes too hands it the open file, and the folder is free once the last of them has gone, however it
ended. What stands in the file is for messages; nothing is decided by it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Self
from weakref import WeakSet

from batchwright.errors import FileError
from batchwright.storage.files import make_folder, refusal

LOCK_FILE = "writer.lock"
WAIT_SECONDS = 10.0
"""For a holder that is just ending: after kill -9 a process may still import, or free a GPU."""

_HANDED = "BATCHWRIGHT_LOCK"  # the open lock file that a process was started with, as a number
_LOOK_SECONDS = 0.1
_IS_HELD = frozenset({errno.EAGAIN, errno.EACCES})  # the second is what SMB answers
_CANNOT = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_MAX_WORDS = 300  # characters that are believed to name a holder


class Busy(Exception):  # noqa: N818 - callers make their own error of it
    """Another process holds a lock; the message names it."""


class Lock:
    """A locked file: a context manager that lets go, unless another process was handed it, too.

    Processes that are forked off, such as loaders, do not hold it.

    Args:
        file: Open and locked.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        _ours.add(self)

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file, for a process that is to hold it too; -1 after `close`."""
        return -1 if self._file.closed else self._file.fileno()

    @property
    def environment(self) -> dict[str, str]:
        """By which such a process knows that it has been handed the lock."""
        return {_HANDED: str(self.descriptor)}

    def close(self) -> None:
        """Let go."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ours: WeakSet[Lock] = WeakSet()
_lent: ContextVar[Lock | None] = ContextVar("_lent", default=None)


def _let_go_in_child() -> None:
    for lock in list(_ours):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def writing(folder: Path) -> Iterator[Lock]:
    """Inside, this process and those that it hands the lock to are the only writers of a folder.

    What is called inside may say so again. Errors are those of `take`.
    """
    with take(folder, "another --out") as lock:
        former = _lent.set(lock)
        try:
            yield lock
        finally:
            _lent.reset(former)


def take(
    folder: Path,
    instead: str,
    *,
    seconds: float | None = None,
    unless: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
) -> Lock:
    """Become the only writer of a folder, which is made; joins a lock that was handed on to here.

    On a disk that cannot lock it warns, and nothing keeps a second writer away.

    Args:
        folder: To be written.
        instead: What else a user could name.
        seconds: To wait for another writer to end; unset: `WAIT_SECONDS`.
        unless: Says when not to wait any longer.
        tell: Takes the line that says so, or the warning.

    Raises:
        FileError: Somebody else writes there, or it cannot be written.
    """
    make_folder(folder, f"name {instead}")
    path = folder / LOCK_FILE
    joined = _joined(path)
    if joined is not None:
        return joined

    seconds = WAIT_SECONDS if seconds is None else seconds

    def is_ours() -> bool:
        return any(_is_at(path, lock.descriptor) for lock in list(_ours))

    def waiting(holder: str) -> None:
        tell(f"{folder} is being written by {holder}: waiting {seconds:g} s for it to end")

    try:
        return lock_file(
            path, seconds=seconds, unless=lambda: is_ours() or unless(), waiting=waiting
        )
    except Busy as holder:
        if is_ours():
            raise FileError(
                f"{folder} is being written by this process already: close what does, a session by "
                f"leaving its with block, or name {instead}"
            ) from None
        who, if_down = str(holder), ""
        if " on " in who and f" on {socket.gethostname()}," not in who:
            if_down = "; if that machine is down, the shared disk frees the folder after a while"
        raise FileError(
            f"{folder} is being written by {who}: wait until that has ended, stop it, or name "
            f"{instead}{if_down}"
        ) from None
    except OSError as error:
        if error.errno not in _CANNOT:
            raise refusal(path, error, f"name {instead}") from error
        tell(
            f"warning: the disk of {folder} cannot lock files ({error.strerror}), so nothing keeps "
            "a second run from writing there"
        )
        return Lock(_opened(path))


def lock_file(
    path: Path,
    *,
    seconds: float,
    unless: Callable[[], bool] = lambda: False,
    waiting: Callable[[str], None],
) -> Lock:
    """Lock a file, which is made; it stays when the lock is gone.

    Args:
        path: The file.
        seconds: To wait for another holder, at most.
        unless: Says when not to wait any longer.
        waiting: Told who holds it, once, before waiting.

    Raises:
        Busy: Somebody else holds it.
        OSError: It cannot be made, or the disk cannot lock.
    """
    end = time.monotonic() + seconds
    told = False
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file.fileno()):
                _sign(file)
                return Lock(file)
            file.close()  # the folder was made anew meanwhile
        except OSError as error:
            file.close()
            if error.errno not in _IS_HELD:
                raise
            if time.monotonic() >= end or unless():
                raise Busy(_holder(path)) from None
            if not told:
                waiting(_holder(path))
                told = True
            time.sleep(_LOOK_SECONDS)


def _opened(path: Path) -> FileIO:
    # For appending: what its holder has written stays until somebody else has the lock.
    return path.open("a+b", buffering=0)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _sign(file: FileIO) -> None:
    """Write who holds the lock, for whoever finds it taken; a full disk does not matter here."""
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
    except OSError:
        return


def _holder(path: Path) -> str:
    """Who holds the lock, as far as the file says; with SMB it cannot be read meanwhile."""
    try:
        with path.open("rb") as file:
            words = file.read(_MAX_WORDS).decode(errors="replace").strip()
    except OSError:
        words = ""
    return words if words.isprintable() and words else "another process"


def _joined(path: Path) -> Lock | None:
    """The lock that was lent by a caller, or handed on by the process that started this one."""
    lent = _lent.get()
    number = lent.descriptor if lent is not None else int(os.environ.get(_HANDED, "-1"))
    if not _is_at(path, number):  # none, or another folder's, or meant for a process before this
        return None
    if lent is None:
        _keep(number)
    return Lock(FileIO(os.dup(number), "r+b"))


def keep_handed() -> None:
    """Hold what this process was handed, if anything, and hand it to nobody by accident."""
    number = os.environ.get(_HANDED)
    if number is not None:
        with suppress(OSError):  # meant for a process before this
            os.fstat(int(number))
            _keep(int(number))


@cache
def _keep(descriptor: int) -> Lock:
    """Hold what was handed on until this process ends, and no process that it starts."""
    os.set_inheritable(descriptor, False)
    return Lock(FileIO(descriptor, "r+b"))
