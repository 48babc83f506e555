"""Starts what feeds trackers beside a run, and ends it with the run; training never waits for it.

At the end it gets some seconds to hand on what is left. What it cannot stays in the run folder, for
``batchwright send --tracker`` or the next time that the run is resumed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchwright.client.reporter_process import outcome_of
from batchwright.client.trackers.following import asked
from batchwright.distributed.worker_processes import Companion
from batchwright.errors import ArgumentError, said_by

TRACKERS_VARIABLE = "BATCHWRIGHT_TRACKERS"  # for runs that name none, with commas between them
LAST_SECONDS = 20.0  # for what is left at the end of the run: a tracker may still be starting
_SILENT_SECONDS = 2.0  # of them, before a person is told what is waited for
_GRACE_SECONDS = 5.0  # for trackers to end, beyond that


def wanted_trackers(words: Iterable[str] | None) -> tuple[str, ...]:
    """The trackers of a run, as `following.asked` names them.

    Args:
        words: As asked for; ``None``: as the environment says.

    Raises:
        ArgumentError: There is no such tracker, its package is not installed, or it cannot have
            several places at once.
    """
    if words is None:
        named = os.environ.get(TRACKERS_VARIABLE, "").split(",")
        with said_by(TRACKERS_VARIABLE):
            return wanted_trackers(one.strip() for one in named)
    found = asked(word for word in words if word)
    taken = set[str]()
    for one in found:
        if one.spec.single and one.spec.name in taken:
            raise ArgumentError(
                f"--tracker {one.word}: {one.spec.name} takes one place while a run goes on: "
                f"`batchwright send RUN --tracker {one.word}` hands it on to another one later"
            )
        taken.add(one.spec.name)
    return tuple(one.word for one in found)


@contextmanager
def tracked(
    folder: Path, words: tuple[str, ...], *, tell: Callable[[str], None]
) -> Iterator[Companion | None]:
    """Inside, trackers get what the run writes; after, they know how it ended.

    Args:
        folder: The run folder.
        words: From `wanted_trackers`; none: nothing is started.
        tell: Takes what is left to say after the end.
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
        with suppress(KeyboardInterrupt):  # who does not want to wait: the run itself has ended
            code = companion.wait(_SILENT_SECONDS)
            if code is None:
                tell(f"trackers have {LAST_SECONDS:g} s for what is left; Ctrl-C ends that")
                code = companion.wait(LAST_SECONDS + _GRACE_SECONDS)
        companion.close()
        for line in companion.lines():
            tell(line)
        if code != 0:
            tell(f"trackers do not have all of this run yet: `{command}` hands it on")
