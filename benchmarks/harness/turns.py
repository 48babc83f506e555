"""Arms of a timing benchmark, each in processes of its own, that take turns in one run.

An arm is a training loop as its users would write it. For the benchmark it only calls `Turns.ready`
before its first step and `Turns.step_done` after every step. In these calls it sleeps while other
arms have their turns. So each arm starts and imports once, and its process settings (allocator,
threads) affect no other arm.

The workers of an arm with several sleep at the same step. If a loop measures its own workers, a
turn should be an epoch: between epochs no clock of a session runs.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import say
from benchmarks.harness.loads import children, free_port, pin

LIMIT_SECONDS = 1800.0  # after which setting up, or a turn, counts as hanging
LONG_SECONDS = 120.0  # after which a turn is reported on standard error


@dataclass(frozen=True)
class Turn:
    """The times of one turn, by `time.monotonic`, whose origin is the same in all processes."""

    started: float  # when the first timed step began
    step_ends: tuple[float, ...]  # when each timed step ended
    images: int  # of all workers, in the timed steps

    @property
    def seconds(self) -> float:
        """Seconds of all timed steps."""
        return self.step_ends[-1] - self.started

    @property
    def images_per_second(self) -> float:
        """Images per second over the timed steps."""
        return self.images / self.seconds


class Turns:
    """The arm's side of the turns, in each of its processes.

    A turn begins with steps that are not timed: they fill the caches again, and use up the batches
    that loader processes made during the pause.

    In a turn that takes longer than `LONG_SECONDS`, the stacks of all threads of this process are
    printed on standard error at that moment, and the message of `long_turn` at its end.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lead_in = self._timed = 0
        self._images = 0
        self._started = self._began = 0.0
        self._step_ends: list[float] = []
        self._core_seconds: dict[int, tuple[float, float]] = {}

    def ready(self) -> None:
        """Report that the arm is set up for its first step; sleeps until the first turn."""
        self._core_seconds = core_seconds()
        self._pipe.send(None)
        self._wait()

    def _wait(self) -> None:
        """Sleep until the next turn; raises `SystemExit` if there is none."""
        try:
            request = self._pipe.recv()
        except EOFError:
            request = None
        if request is None:
            raise SystemExit(0)
        self._lead_in, self._timed = request
        self._images = 0
        self._step_ends = []
        faulthandler.dump_traceback_later(LONG_SECONDS, file=sys.__stderr__)
        self._started = self._began = time.monotonic()

    def step_done(self, images: int) -> None:
        """Report the end of a step with ``images`` images; sleeps at the end of a turn."""
        now = time.monotonic()
        if self._lead_in:
            self._lead_in -= 1
            self._started = now
            return
        self._images += images
        self._step_ends.append(now)
        if len(self._step_ends) == self._timed:
            faulthandler.cancel_dump_traceback_later()
            before, self._core_seconds = self._core_seconds, core_seconds()
            if now - self._began > LONG_SECONDS:
                say(long_turn(now - self._began, before, self._core_seconds))
            self._pipe.send(Turn(self._started, tuple(self._step_ends), self._images))
            self._wait()


class Arm:
    """The benchmark's side of one arm.

    Args:
        loop: Trains until its `Turns` end it; a module-level function.
        arguments: Arguments of ``loop`` after its `Turns`.
        cores: One worker for each core, pinned there, with the environment that torchrun would
            give them; unset: one process that may use all cores.

    Raises:
        RuntimeError: By any method: the arm has ended, with its error on standard error; or it
            hangs.
    """

    def __init__(
        self, loop: Callable[..., None], *arguments: Any, cores: Sequence[int] | None = None
    ) -> None:
        # Spawned, not forked: an untouched allocator and fresh thread pools.
        context = multiprocessing.get_context("spawn")
        self.name = loop.__name__
        self._pipes: list[Connection] = []
        self._processes = []
        self._is_ready = False
        places: Sequence[int | None] = [None] if cores is None else cores
        environments = [{}] if cores is None else environments_of(len(cores))
        for core, environment in zip(places, environments, strict=True):
            ours, theirs = context.Pipe()
            # A daemon could not start loader processes. This process ends with its pipe.
            process = context.Process(
                target=_run, args=(loop, theirs, arguments, core, environment)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int | None]:
        """Process numbers of its workers."""
        return [process.pid for process in self._processes]

    def ready(self) -> None:
        """Wait until all workers of the arm are set up; a turn does so too."""
        if not self._is_ready:
            self._received()
            self._is_ready = True

    def begin(self, *, lead_in: int, steps: int) -> None:
        """Have all workers begin a turn; `end` waits for its end."""
        self.ready()
        try:
            for pipe in self._pipes:
                pipe.send((lead_in, steps))
        except OSError:
            raise RuntimeError(f"arm {self.name} ended before its turn did") from None

    def end(self) -> Turn:
        """Wait until the turn is over; the times of the first worker."""
        return self.ends()[0]

    def ends(self) -> list[Turn]:
        """Wait until the turn is over; the times of each worker."""
        return self._received()

    def turn(self, *, lead_in: int, steps: int) -> float:
        """Take one turn; images per second over its timed ``steps``."""
        self.begin(lead_in=lead_in, steps=steps)
        return self.end().images_per_second

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(OSError):  # it may have ended already
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
                process.join()

    def _received(self) -> list[Any]:
        """Wait for a message from each worker."""
        until = time.monotonic() + LIMIT_SECONDS
        messages = []
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise RuntimeError(f"arm {self.name} hangs: silent for {LIMIT_SECONDS:.0f} s")
            try:
                messages.append(pipe.recv())
            except (EOFError, OSError):
                raise RuntimeError(f"arm {self.name} ended before its turn did") from None
        return messages


def core_seconds() -> dict[int, tuple[float, float]]:
    """Seconds so far that this process and its children have run, and have waited for a core.

    By process number, as sums over the present threads. Empty where the system does not show them.
    """
    found = {}
    for pid in (os.getpid(), *children(os.getpid())):
        with suppress(OSError):  # a thread, or all of it, has just ended
            texts = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
            nanoseconds = [tuple(map(int, text.split()[:2])) for text in texts]
            if nanoseconds:  # else it has ended, or the system does not show them
                ran, waited = map(sum, zip(*nanoseconds, strict=True))
                found[pid] = ran / 1e9, waited / 1e9
    return found


def long_turn(
    seconds: float,
    before: Mapping[int, tuple[float, float]],
    after: Mapping[int, tuple[float, float]],
) -> str:
    """A message that shows whether a long turn computed, waited for a core, or for a process.

    Args:
        seconds: Seconds of the turn.
        before: `core_seconds` when this process went to sleep before the turn.
        after: `core_seconds` at the end of the turn.
    """
    shares = [
        f"process {pid} had a core for {after[pid][0] - ran:.1f} s and waited for one for "
        f"{after[pid][1] - waited:.1f} s"
        for pid, (ran, waited) in before.items()
        if pid in after
    ]
    known = shares or ["nothing is known of its processes"]
    return f"a turn of {seconds:.1f} s: " + "; ".join(known)


@contextmanager
def started(starters: Mapping[str, Callable[[], Arm]]) -> Iterator[dict[str, Arm]]:
    """Inside, the arms that ``starters`` make, all set up."""
    arms: dict[str, Arm] = {}
    try:
        for name, start in starters.items():
            arms[name] = start()
        for arm in arms.values():
            arm.ready()  # else it would set up during another arm's turn
        yield arms
    finally:
        for arm in arms.values():
            arm.stop()


def environments_of(workers: int) -> list[dict[str, str]]:
    """Environment variables that torchrun would set for each worker of one machine."""
    # Imported here, so that arms, which import this module, import torch only if they use it.
    from batchwright.workload.host import collective_interface

    shared = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": collective_interface(),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


def _run(
    loop: Callable[..., None],
    pipe: Connection,
    arguments: tuple[Any, ...],
    core: int | None,
    environment: Mapping[str, str],
) -> None:
    # The loop's own processes start by the default method, not spawned as this one was.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(environment)
    if core is not None:
        pin(core)
    loop(Turns(pipe), *arguments)


def take_turns(
    arms: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    form: Callable[[Any], str] = "{:.0f} images/s".format,
) -> dict[str, list[Any]]:
    """Measure all arms in every round, the order reversed from round to round.

    Args:
        arms: Functions that make one measurement of an arm.
        rounds: Number of rounds.
        form: Formats a measurement for the line about a round.

    Returns:
        By arm, one measurement for each round.
    """
    found: dict[str, list[Any]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms) if number % 2 == 0 else list(reversed(arms)):
            found[name].append(arms[name]())
        latest = "  ".join(f"{name} {form(values[-1])}" for name, values in found.items())
        say(f"round {number + 1} of {rounds}: {latest}")
    return found


def images_per_second(
    starters: Mapping[str, Callable[[], Arm]],
    rounds: int,
    *,
    lead_in: int,
    steps: int,
    warm_up: int = 0,
    rest: float = 0.0,
    starts: int = 1,
) -> dict[str, list[float]]:
    """Images per second of each arm in each round, all arms alive together.

    Args:
        starters: Functions that make the arms.
        rounds: Number of turns of each arm.
        lead_in: Untimed steps at the beginning of a turn.
        steps: Timed steps of a turn.
        warm_up: Steps of each arm before the first turn.
        rest: Seconds before each turn, in which the loader processes of the arm before end what
            they were asked for.
        starts: How often the arms are started, each time for so many ``rounds``. A process keeps
            the memory that it got, and so a speed of its own: of one loop, started again and
            again, some percent apart.
    """

    def turn(arm: Arm) -> float:
        time.sleep(rest)
        return arm.turn(lead_in=lead_in, steps=steps)

    found: dict[str, list[float]] = {name: [] for name in starters}
    for _ in range(starts):
        with started(starters) as arms:
            for name, arm in arms.items():
                if warm_up:
                    say(f"warming up {name}")
                    arm.turn(lead_in=0, steps=warm_up)
            turns = {name: partial(turn, arm) for name, arm in arms.items()}
            for name, rates in take_turns(turns, rounds).items():
                found[name] += rates
    return found
