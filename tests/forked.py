"""`batchwright` in processes of its own, forked from one that has imported it already.

A start takes two seconds of a core for its imports; tests that start dozens take their time from
all others. Where nothing is forked (elsewhere than on Linux), each starts as usual.

    python -m forked FOLDER OUT ERR WORDS...
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from unittest import mock

from batchwright.distributed import fork_server
from batchwright.distributed.processes import PARENT_PID

_NUMBERS = count()


class Forked:
    """A running ``batchwright WORDS``; is asked as a `subprocess.Popen` is.

    Args:
        words: Its command line.
        cwd: Where it runs.
        env: All its variables.
        prints: Folder for what it prints.
    """

    def __init__(
        self, words: list[str], *, cwd: Path, env: Mapping[str, str], prints: Path
    ) -> None:
        number = next(_NUMBERS)
        self._printed = [prints / f"{number}.{end}" for end in ("out", "err", "log")]
        with self._printed[2].open("wb") as log:
            self._process = fork_server.start(
                "forked",
                [*map(str, (cwd, *self._printed[:2])), *words],
                environment={**env, "PYTHONPATH": _with_tests(env)},
                log=log,
            )
        self.poll, self.wait = self._process.poll, self._process.wait
        self.kill, self.send_signal = self._process.kill, self._process.send_signal

    @property
    def returncode(self) -> int | None:
        """Negative if a signal ended it; ``None`` while it runs."""
        return self.poll()

    def communicate(self, timeout: float = 500.0) -> tuple[str, str]:
        """What it has printed on standard output and error by its end."""
        self.wait(timeout)
        return self.said()

    def said(self) -> tuple[str, str]:
        """The same until now."""
        out, err, log = (one.read_text() if one.exists() else "" for one in self._printed)
        return out, log + err


@contextmanager
def forking() -> Iterator[None]:
    """Inside, those that are started are forked."""
    with ExitStack() as stack:
        with mock.patch.dict(os.environ, PYTHONPATH=_with_tests(os.environ)):
            stack.enter_context(fork_server.imported_once())
        yield


def _with_tests(env: Mapping[str, str]) -> str:
    tests = str(Path(__file__).parent)
    return os.pathsep.join([tests, *filter(None, [env.get("PYTHONPATH")])])


def command(
    *words: object, cwd: Path, env: Mapping[str, str], prints: Path
) -> subprocess.CompletedProcess[str]:
    """What ``batchwright WORDS`` comes to."""
    one = Forked([*map(str, words)], cwd=cwd, env=env, prints=prints)
    try:
        out, err = one.communicate()
    finally:
        one.kill()
    return subprocess.CompletedProcess(words, one.returncode or 0, out, err)


if __name__ == "__main__":
    folder, out, err, *words = sys.argv[1:]
    for number, path in ((1, out), (2, err)):
        with open(path, "wb") as file:  # noqa: PTH123 - as the shell does
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    os.environ.pop(PARENT_PID, None)  # it is a command, not a worker of somebody's
    sys.argv = ["batchwright", *words]
    runpy.run_module("batchwright", run_name="__main__", alter_sys=True)
