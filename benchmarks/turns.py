"""Arms of a timing benchmark, each in a process of its own, taken in turn in one run.

An arm is a training loop written as its users write it; all it does for the benchmark is to call
`Turns.step_done` after every step. There it sleeps while the others have their turn, so neither
starting up nor importing is paid again, and what one arm does to its process (allocator, threads)
touches no other.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


class Turns:
    """The arm's side.

    A turn begins with steps that are not timed: in them caches fill again, and batches that loader
    processes made ahead during the pause are used up.

    Args:
        pipe: To the process that runs the benchmark.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lead_in = self._timed = 0
        self._images = 0
        self._started = 0.0

    def wait(self) -> None:
        """Sleep until the next turn.

        Raises:
            SystemExit: There is none any more.
        """
        try:
            request = self._pipe.recv()
        except EOFError:
            request = None
        if request is None:
            raise SystemExit(0)
        self._lead_in, self._timed = request
        self._images = 0
        self._started = time.perf_counter()

    def step_done(self, images: int) -> None:
        """A step with so many ``images`` is done; at the end of a turn this takes a while."""
        if self._lead_in:
            self._lead_in -= 1
            self._started = time.perf_counter()
            return
        self._images += images
        self._timed -= 1
        if not self._timed:
            self._pipe.send(self._images / (time.perf_counter() - self._started))
            self.wait()


class Arm:
    """The benchmark's side of one arm.

    Args:
        loop: Trains until `Turns.wait` ends it; a function of a module.
        arguments: Handed to ``loop`` after its `Turns`.
    """

    def __init__(self, loop: Callable[..., None], *arguments: Any) -> None:
        # Spawned, not forked: an untouched allocator and fresh thread pools.
        context = multiprocessing.get_context("spawn")
        self.name = loop.__name__
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(loop, theirs, arguments))
        self._process.start()
        theirs.close()

    def turn(self, *, lead_in: int, steps: int) -> float:
        """One turn; returns images per second over its timed ``steps``.

        Raises:
            RuntimeError: The arm has ended; its error is on standard error.
        """
        try:
            self._pipe.send((lead_in, steps))
            return float(self._pipe.recv())
        except (EOFError, OSError):
            raise RuntimeError(f"arm {self.name} ended before its turn did") from None

    def stop(self) -> None:
        """End the process."""
        with suppress(OSError):  # it may have ended already
            self._pipe.send(None)
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(loop: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...]) -> None:
    # The loop's own processes start as they would anywhere, not spawned as this one was.
    multiprocessing.set_start_method(None, force=True)
    turns = Turns(pipe)
    turns.wait()
    loop(turns, *arguments)


def take_turns(
    arms: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    show: Callable[[str], None],
) -> dict[str, list[float]]:
    """Measure all arms in every round, the order reversed from round to round.

    Args:
        arms: Each gives one measurement.
        rounds: How often.
        show: Told about every round.

    Returns:
        By arm, one measurement for each round.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        for name in names:
            found[name].append(arms[name]())
        rates = "  ".join(f"{name} {values[-1]:.0f}" for name, values in found.items())
        show(f"round {number + 1} of {rounds}, images/s: {rates}")
    return found
