"""Loads that make workers uneven: a process that takes its share of a core, or slower passes.

    with Burner(core=1):
        ...  # whatever is pinned to core 1 runs at half its speed

`python -m benchmarks.harness.loads CORE SHARE [SEED]` burns until it is ended. `Slowdown` is for
more workers than a machine has cores.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from math import inf
from pathlib import Path
from typing import Any, Self

from batchwright.distributed.processes import die_with_parent

STARTER = "BATCHWRIGHT_BURNER_STARTER"  # environment variable: the process that a burner dies with
PERIOD_SECONDS = 0.02  # in which a burner with a share below 1 burns once and rests once
STRETCH_SECONDS = 2.0, 20.0  # of burning, and of resting, of a burner that comes and goes


def pin(core: int) -> None:
    """Pin this process, with all its present and later threads, to one core.

    Raises:
        OSError: This process cannot use such a core.
    """
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


class Burner:
    """A process that competes for a core; as a context manager it burns inside.

    If another process of equal priority is busy there, each gets half of the core.

    Args:
        core: The core that it is pinned to.
        share: Share of the time in which it wants to run; 1: it never rests.
        seed: Seed of `stretches`, in which it comes and goes; `None`: it stays.

    Raises:
        ValueError: The share is not in (0, 1].
    """

    def __init__(self, core: int, share: float = 1.0, seed: int | None = None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share}: a burner wants more than 0 and at most 1 of a core")
        self.core, self.share, self.seed = core, share, seed
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The burner's process number; ``None`` while it does not burn."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start to burn; returns once it burns. The process dies with the calling thread.

        Raises:
            OSError: There is no such core.
            RuntimeError: It burns already, or did not start.
        """
        if self._process is not None:
            raise RuntimeError(f"core {self.core} is burning already")
        root = str(Path(__file__).parent.parent.parent)
        words = [str(one) for one in (self.core, self.share, self.seed) if one is not None]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.loads", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=root,  # benchmarks are not installed
            env={**os.environ, STARTER: str(os.getpid())},
        )
        try:
            os.sched_setaffinity(self._process.pid, {self.core})  # its start is a load as well
            assert self._process.stdout is not None
            if not self._process.stdout.readline():  # it prints a line once it burns
                raise RuntimeError(f"no burner on core {self.core}: see standard error")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop burning, if it burns."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()  # waits, and closes the pipe
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Slowdown:
    """Makes each forward and backward pass of a network take ``factor`` times as long.

    After the backward pass it sleeps for (``factor`` - 1) times the processor time that its thread
    has used since the forward pass began. So the core is free meanwhile, and several slow workers
    fit on one core. The rest of the loop, and the exchange of gradients, are not slowed.

    Args:
        network: The network, on the CPU; its first parameter gets its gradient last.
        factor: The factor, at least 1.
        clock: Returns processor seconds of this thread.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        network: Any,
        factor: float,
        *,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if factor < 1:
            raise ValueError(f"factor={factor}: a slowdown has a factor of at least 1")
        self._factor, self._clock, self._sleep = factor, clock, sleep
        self._mark = 0.0
        network.register_forward_pre_hook(self._begins)
        next(network.parameters()).register_post_accumulate_grad_hook(self._ends)

    def _begins(self, *_: Any) -> None:
        self._mark = self._clock()

    def _ends(self, *_: Any) -> None:
        self._sleep((self._factor - 1) * (self._clock() - self._mark))


def free_port() -> int:
    """A port of this machine that nobody listens on just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def children(pid: int) -> list[int]:
    """The running processes that process ``pid`` has started, in no order."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # "pid (name) state parent ...", where the name may contain anything
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(folder.name))
    return found


def command_line(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def until(done: Callable[[], bool], seconds: float, *, every: float = 0.02) -> bool:
    """Wait until ``done()`` is true, for at most ``seconds``; whether it became true."""
    end = time.monotonic() + seconds
    while not (found := done()) and time.monotonic() < end:
        time.sleep(every)
    return found


def stretches(seed: int) -> Iterator[tuple[float, float]]:
    """Seconds of burning and then of resting, over and over: each 2 to 20 s, all as likely."""
    draw = random.Random(seed)
    while True:
        yield draw.uniform(*STRETCH_SECONDS), draw.uniform(*STRETCH_SECONDS)


def _burn(core: int, share: float, seed: int | None) -> None:
    die_with_parent(STARTER)
    pin(core)
    print("burning", flush=True)
    for burning, resting in repeat((inf, 0.0)) if seed is None else stretches(seed):
        end = time.monotonic() + burning
        while time.monotonic() < end:
            until = time.monotonic() + share * PERIOD_SECONDS
            while time.monotonic() < until:
                pass
            if share < 1:
                time.sleep((1 - share) * PERIOD_SECONDS)
        time.sleep(resting)


if __name__ == "__main__":
    _burn(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
