"""Removes the folders of jobs that an agent has not worked on for days, from its disk."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 3600.0  # between two looks
DAY = 86400.0


class OldFolders:
    """The folders of former jobs. A folder's age counts from when anything in it last changed, or
    from the last work on the job (`note`).

    A folder is removed only if it was too old at two looks: a clock that is ahead for a while, as
    after the start of some machines, removes nothing. Links to folders elsewhere stay.

    Args:
        jobs: Folder with a folder for each job, named by the job's identifier.
        days: Age from which they are removed; `None`: never.
        tell: Called with each line for the person who watches.
    """

    def __init__(self, jobs: Path, days: float | None, tell: Callable[[str], None]) -> None:
        self._jobs, self._days, self._tell = jobs, days, tell
        self._look_at = 0.0  # by `time.monotonic`
        self._old = set[Path]()  # too old at the last look

    def note(self, job: str) -> None:
        """Note that the agent has worked on a job until now."""
        with suppress(OSError):  # it has no folder
            os.utime(self._jobs / job)

    def remove(self) -> None:
        """Remove what is too old; to be called often, while no job is worked on."""
        if self._days is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        before = time.time() - self._days * DAY
        old = set[Path]()
        with suppress(OSError):  # a network disk may be away
            old = {one for one in self._jobs.iterdir() if _is_job(one) and _is_older(one, before)}
        for path in sorted(old & self._old):
            try:
                shutil.rmtree(path)
                self._tell(f"removed {path}: no work on it for {self._days:g} days")
            except OSError as error:
                self._tell(f"cannot remove {path}: {error.strerror or error}")
        self._old = old


def _is_job(path: Path) -> bool:
    """Whether a path is a folder with the name of a job's; what else lies there is not the agent's,
    or was put elsewhere by somebody who wants it.
    """
    with suppress(ValueError):
        return path.name == str(uuid.UUID(path.name)) and path.is_dir() and not path.is_symlink()
    return False


def _is_older(folder: Path, before: float) -> bool:
    """Whether a folder and all that is in it have not changed since ``before``, in Unix time; not
    where something in it cannot be looked at.

    An agent that was killed at work has not noted that it worked, but checkpoints and logs tell.
    """
    with suppress(OSError):
        if folder.lstat().st_mtime >= before:
            return False
        for place, below, names in os.walk(folder, onerror=_raise):
            if any(os.lstat(Path(place, name)).st_mtime >= before for name in (*below, *names)):
                return False
        return True
    return False


def _raise(error: OSError) -> None:
    raise error
