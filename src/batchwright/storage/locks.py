"""One writer of a folder at a time, by a lock that the kernel frees when its holders have ended.

The lock is `flock`'s, which belongs to an open file and not to a process: a process passes its open
lock file on to those it starts that write, too, and the folder is free once the last of them has
ended, in whatever way. The file's content names the holder for messages; nothing is decided by it.
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
"""Seconds to wait for a holder that is ending: after kill -9 a process may still free a GPU."""

RESTART_SECONDS = 90.0
"""The same after a launcher has started all processes again: the holder may be on a host that went
down, of which a shared disk learns late."""

_HANDED = "BATCHWRIGHT_LOCK"  # variable with the descriptor of the lock file passed to a process
_LOOK_SECONDS = 0.1  # between two tries
_IS_HELD = frozenset({errno.EAGAIN, errno.EACCES})  # EACCES is what SMB answers
_CANNOT_LOCK = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_MAX_HOLDER_BYTES = 300  # of a lock file's content that are read for a message


class Busy(Exception):  # noqa: N818 - callers raise an error of their own from it
    """Another process holds a lock; the message names the process."""


class Lock:
    """A locked file; a context manager that closes it.

    The lock is free once every process that holds the open file has closed it. Processes that are
    forked off, such as loaders, do not hold it.

    Args:
        file: The open and locked file.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        _ours.add(self)

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file, to pass on to another process; -1 after `close`."""
        return -1 if self._file.closed else self._file.fileno()

    @property
    def environment(self) -> dict[str, str]:
        """Variable that tells a process which of its open files is the lock."""
        return {_HANDED: str(self.descriptor)}

    def close(self) -> None:
        """Give up the lock in this process."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ours: WeakSet[Lock] = WeakSet()  # all locks of this process
_lent: ContextVar[Lock | None] = ContextVar("_lent", default=None)  # that of the caller's `writing`


def _close_in_child() -> None:
    for lock in list(_ours):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def writing(folder: Path, *, seconds: float | None = None) -> Iterator[Lock]:
    """Inside, this process and those that it passes the lock to are the only writers of a folder.

    Functions called inside may use `writing` or `take` on the same folder again.

    Args:
        folder: The folder to write.
        seconds: As for `take`.

    Raises:
        FileError: As `take` raises.
    """
    with take(folder, "another --out", seconds=seconds) as lock:
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
    """Become the only writer of a folder, which is made if missing.

    A lock that the caller holds, or that this process was started with, is shared. A disk that
    cannot lock files gets a warning, and nothing keeps a second writer away.

    Args:
        folder: The folder to write.
        instead: What a user could name in place of the folder, for messages.
        seconds: How long to wait for another writer to end; unset: `WAIT_SECONDS`.
        unless: Returns true when to stop waiting.
        tell: Called with the line that announces a wait, or with the warning.

    Raises:
        FileError: Another process writes there, or the folder cannot be written.
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
        if error.errno not in _CANNOT_LOCK:
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
    """Lock a file, which is made if missing and stays after the lock is freed.

    Args:
        path: The file.
        seconds: How long to wait for another holder, at most.
        unless: Returns true when to stop waiting.
        waiting: Called once with the holder's name before waiting.

    Raises:
        Busy: Another process holds the lock.
        OSError: The file cannot be made, or the disk cannot lock.
    """
    end = time.monotonic() + seconds
    announced = False
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file.fileno()):
                since = datetime.now().astimezone().isoformat(" ", "seconds")
                with suppress(OSError):  # the name is for messages alone, and a disk may be full
                    file.truncate(0)
                    holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
                    file.write(holder.encode())
                return Lock(file)
            file.close()  # meanwhile the folder was deleted and made again
        except OSError as error:
            file.close()
            if error.errno not in _IS_HELD:
                raise
            if time.monotonic() >= end or unless():
                raise Busy(_holder(path)) from None
            if not announced:
                waiting(_holder(path))
                announced = True
            time.sleep(_LOOK_SECONDS)


def _opened(path: Path) -> FileIO:
    # Opened for appending, so that the holder's name stays until another process has the lock.
    return path.open("a+b", buffering=0)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _holder(path: Path) -> str:
    """The holder's name in the lock file; a file locked over SMB cannot be read."""
    try:
        with path.open("rb") as file:
            words = file.read(_MAX_HOLDER_BYTES).decode(errors="replace").strip()
    except OSError:
        words = ""
    return words if words.isprintable() and words else "another process"


def _joined(path: Path) -> Lock | None:
    """The lock of a caller's `writing`, or of the process that started this one, if it is there."""
    lent = _lent.get()
    number = lent.descriptor if lent is not None else int(os.environ.get(_HANDED, "-1"))
    # There may be no such lock, or one of another folder, or the variable was for a parent process.
    if not _is_at(path, number):
        return None
    if lent is None:
        _keep(number)
    return Lock(FileIO(os.dup(number), "r+b"))


def keep_handed() -> None:
    """Hold the lock that this process was started with, if any; its own children do not get it."""
    number = os.environ.get(_HANDED)
    if number is not None:
        with suppress(OSError):  # the variable was for a parent process
            os.fstat(int(number))
            _keep(int(number))


@cache
def _keep(descriptor: int) -> Lock:
    """Hold a lock file until this process ends, without passing it on to processes it starts."""
    os.set_inheritable(descriptor, False)
    return Lock(FileIO(descriptor, "r+b"))
