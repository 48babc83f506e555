"""Starts the process that feeds trackers beside a run, and ends it with the run; training never
waits for it.

At the end the process gets some seconds for what is left. What trackers do not get stays in the run
folder, for ``batchwright send --tracker`` or the next time that the run is resumed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchwright.client.reporter_process import outcome_of
from batchwright.client.trackers.following import chosen_trackers
from batchwright.distributed.worker_processes import Companion
from batchwright.errors import ArgumentError, said_by

TRACKERS_VARIABLE = "BATCHWRIGHT_TRACKERS"  # trackers of runs that name none, with commas between
LAST_SECONDS = 20.0  # for what is left at the end of the run: a tracker may still be starting
_SILENT_SECONDS = 2.0  # of these, before a message says what the command waits for
_GRACE_SECONDS = 5.0  # beyond LAST_SECONDS, for trackers to close


def wanted_trackers(words: Iterable[str] | None) -> tuple[str, ...]:
    """The trackers of a run, each by its `TrackerChoice.word`.

    Args:
        words: The user's choices, each ``NAME`` or ``NAME:PLACE``; ``None``: those of the
            environment.

    Raises:
        ArgumentError: There is no such tracker, its package is not installed, or it cannot have
            several places at once.
    """
    if words is None:
        named = os.environ.get(TRACKERS_VARIABLE, "").split(",")
        with said_by(TRACKERS_VARIABLE):
            return wanted_trackers(word.strip() for word in named)
    chosen = chosen_trackers(word for word in words if word)
    names = set[str]()
    for each in chosen:
        if each.spec.single and each.spec.name in names:
            raise ArgumentError(
                f"--tracker {each.word}: {each.spec.name} takes one place while a run goes on: "
                f"`batchwright send RUN --tracker {each.word}` hands it on to another one later"
            )
        names.add(each.spec.name)
    return tuple(each.word for each in chosen)


@contextmanager
def tracked(
    folder: Path, words: tuple[str, ...], *, tell: Callable[[str], None]
) -> Iterator[Companion | None]:
    """Inside, trackers are fed with the run's lines; at the end they get its outcome.

    Args:
        folder: The run folder.
        words: The trackers, from `wanted_trackers`; empty: nothing is started.
        tell: Called with each message that is left after the end.
    """
    if not words:
        yield None
        return
    options = [part for word in words for part in ("--tracker", word)]
    command = shlex.join(["batchwright", "send", str(folder), *options])
    try:
        companion = Companion(
            "batchwright.client.trackers.following",
            [str(folder), *words],
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            log=subprocess.DEVNULL,
        )
    except OSError as error:  # a run is worth more
        tell(f"trackers get nothing of this run ({error.strerror}); `{command}` hands it on later")
        yield None
        return
    ending: BaseException | None = None
    try:
        yield companion
    except BaseException as error:
        ending = error
        raise
    finally:
        outcome, _ = outcome_of(ending)
        companion.say({"outcome": outcome, "error": None, "seconds": LAST_SECONDS})
        code = None
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the waiting: the run itself has ended
            code = companion.wait(_SILENT_SECONDS)
            if code is None:
                tell(f"trackers have {LAST_SECONDS:g} s for what is left; Ctrl-C ends that")
                code = companion.wait(LAST_SECONDS + _GRACE_SECONDS)
        companion.close()
        for line in companion.lines():
            tell(line)
        if code != 0:
            tell(f"trackers do not have all of this run yet: `{command}` hands it on")
