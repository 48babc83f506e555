"""The processes that another launcher started: worker 0 runs a command, the others help it.

    worker 0: runs the command --order--> the others: carry it out, and wait for the next
              <--answer, or error--

All of it goes through the store at which they meet, since waiting for an order may take as long as
worker 0 needs for its own work, and an exchange would give up. Gradients go another way (`group`).
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from torch.distributed.distributed_c10d import PrefixStore, Store

from batchwright.distributed.heartbeat import BEAT_SECONDS, Presence, RollCall, presence
from batchwright.distributed.joining.environments import (
    Started,
    adopt,
    join,
    launch_name,
    process_name,
)
from batchwright.distributed.rendezvous import LimitedStore, meet, store_keeper
from batchwright.errors import (
    BatchwrightError,
    Interrupted,
    LostWorkerError,
    PlanError,
    one_line,
    stopped_by,
)

MEETING_SECONDS = "BATCHWRIGHT_MEETING_SECONDS"
"""Environment variable: how long the processes of a start wait for each other."""

_MEETING_SECONDS = 120.0
_SILENT_SECONDS = 60.0  # without a beat: a process that imports or opens a GPU may miss many
_TELL_SECONDS = 8.0  # longer than processes usually are apart
_CLOCK_SECONDS = 30.0  # by which clocks may differ; a busy host may look at its own late
_LAST_SECONDS = 10.0  # for worker 0 to end its command after an error, and for all to take leave
_STOP_SECONDS = 5.0  # within which a launcher that signals all processes has signalled them
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Member:
    """A process, as all others know it."""

    rank: int
    host: str
    versions: Mapping[str, str]  # by package
    words: str  # the command that it was started with
    launch: str  # name of the launch; empty if unknown
    process: str  # name of this very process
    presence: Presence

    def __str__(self) -> str:
        """Such as ``worker 2 (node1)``."""
        return f"worker {self.rank} ({self.host})"

    def is_beside(self, other: Member) -> bool:
        """Whether both are on one host; hosts may have one name, and containers are apart."""
        return (self.host, self.presence.machine) == (other.host, other.presence.machine)


@dataclass(frozen=True)
class Ended:
    """The end of worker 0's command.

    Attributes:
        code: Its exit code.
        message: Its error; empty if there was none.
        result: Its result, as text.
    """

    code: int
    message: str = ""
    result: str = ""


class Gathering:
    """The processes of one start; a context manager that leaves them.

    Args:
        started: This process's place, whose variables were adopted.
        versions: Versions of the packages that all must have alike.
        words: The command that this process was started with, the same for all.

    Attributes:
        current: The gathering of this process, if any.
        started: This process's place.
        members: All processes, in rank order.
        noted: Stop signals that came to this process, for `stops` to pass on.

    Raises:
        BatchwrightError: Some processes did not come in time, or worker 0 cannot be reached.
        PlanError: Versions or commands differ.
    """

    current: ClassVar[Gathering | None] = None

    def __init__(self, started: Started, *, versions: Mapping[str, str], words: str) -> None:
        self.started = started
        self.noted: Sequence[int] = ()
        self._orders = 0
        self._stops: list[int] = []
        self._heard = math.inf  # time of the first stop signal of any process
        self._quiet = -math.inf  # time until which none has come to this very process
        self._may_ask = started.size > 1
        seconds = _meeting_seconds()
        own = Member(
            rank=started.rank,
            host=socket.gethostname(),
            versions=versions,
            words=words,
            launch=launch_name(),
            process=process_name(),
            presence=presence(f"{socket.gethostname()}/worker:{started.rank}"),
        )
        self.members: tuple[Member, ...] = (own,)
        self._roll_call: RollCall | None = None
        if started.size > 1:
            store = PrefixStore("batchwright/gathering", _met(started, seconds))
            self._store = LimitedStore(store, seconds)
            self._tell(f"member/{started.rank}", json.dumps(asdict(own)))
            self._hear_of_all(store)
        if not started.local_size:  # as by hand, and by launchers other than torchrun
            here = [one for one in self.members if one.is_beside(own)]
            self.started = replace(started, local_size=len(here))
            adopt(self.started)
        Gathering.current = self
        join(self.started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        Gathering.current = None
        join(None)
        if self._roll_call is not None:
            self._roll_call.close()

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len({one.host for one in self.members})

    def stops(self) -> Sequence[int]:
        """Stop signals, two at most, that came to this process or to another that calls this.

        A process that got one tells all; worker 0 then tells them that it ends its command.
        A launcher may signal all: what comes here shortly after another's is the same one. When
        it came is known only by the look before, and some seconds may be between two looks.
        """
        if not self._may_ask:
            return max(self._stops, self.noted, key=len)
        own = [*self.noted]
        if not own:
            self._quiet = time.monotonic()
        elif self._quiet > self._heard + _STOP_SECONDS:
            own.insert(0, self._stops[0])
        try:
            for nth in (1, 2):
                if len(self._stops) >= nth:
                    continue
                if len(own) >= nth:
                    self._tell(f"stop/{nth}", str(own[nth - 1]))
                elif not self._has(f"stop/{nth}"):
                    break
                self._stops.append(int(self._hear(f"stop/{nth}")))
                self._heard = min(self._heard, time.monotonic())
                if not self.started.rank:
                    self._tell("stopping", "")
        except LostWorkerError:  # of the store: what it was asked for says so, and does not wait
            self._may_ask = False
        return max(self._stops, self.noted, key=len)

    # ------------------------------------------------------------------------------ worker 0's part

    def order(self, do: str, **what: Any) -> int:
        """Send all others an order, a word and plain values; returns its number."""
        self._orders += 1
        if self.started.size > 1:
            self._tell(f"order/{self._orders}", json.dumps({"do": do, **what}))
        return self._orders

    def ask(self, do: str, **what: Any) -> list[Any]:
        """Send all others an order, and wait for their answers, in rank order.

        Raises:
            LostWorkerError: One is gone or silent.
            BatchwrightError: One could not carry it out.
        """
        return self.answers(self.order(do, **what))

    def answers(self, number: int, patience: float = math.inf) -> list[Any]:
        """Wait for the others' answers to an order, in rank order; raises as `ask` does.

        Args:
            number: Number of the order.
            patience: Seconds after a stop signal to any until `Interrupted` is raised.
        """
        keys = [f"answer/{number}/{rank}" for rank in self._others]
        self._wait(keys, patience)
        return [json.loads(self._hear(key)) for key in keys]

    def end(self, how: Ended) -> None:
        """Tell all others that the command has ended, and wait until they have read it."""
        if self.started.size == 1:
            return
        with suppress(LostWorkerError):  # the store may be gone with its host
            self.order("end", **asdict(how))
            self._let_all("left")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace the error of a broken exchange by the error that another worker reports.

        Raises:
            BatchwrightError: The other worker's error.
            LostWorkerError: No worker has reported any.
        """
        try:
            yield
        except LostWorkerError:
            self._raise_failed(secondary=False)  # it is noted before the group is left
            raise

    # ----------------------------------------------------------------------------- the others' part

    def follow(self, work: Callable[[Mapping[str, Any]], Any]) -> Ended:
        """Carry out orders until worker 0 has ended its command.

        Args:
            work: f(order) -> answer of plain values. An error that it raises is reported to worker
                0, which then has some seconds to end its command.

        Raises:
            LostWorkerError: Worker 0 is gone or silent.
            BatchwrightError: The error of ``work``, if worker 0 did not hear of it.
        """
        while True:
            self._orders += 1
            if self.noted:  # the next order may be there already, and many more may follow
                self.stops()
            try:
                self._wait([f"order/{self._orders}"], _STOP_SECONDS)
            except Interrupted as stopped:  # this process alone
                self._orders -= 1
                if (ended := self._fail(stopped)) is not None:
                    return ended
                raise
            order = json.loads(self._hear(f"order/{self._orders}"))
            if order["do"] == "end":
                return self._take_leave(order)
            try:
                answer = work(order)
            except Exception as error:
                if (ended := self._fail(error)) is not None:
                    return ended
                raise
            self._tell(f"answer/{self._orders}/{self.started.rank}", json.dumps(answer))

    def note_failure(self, error: Exception) -> None:
        """Note the error that ends this worker, for worker 0 to raise in place of its loss."""
        if not self.started.rank:
            return
        failed = {
            "message": one_line(error),
            "code": error.exit_code if isinstance(error, BatchwrightError) else 1,
            "secondary": isinstance(error, LostWorkerError),
        }
        with suppress(LostWorkerError):  # the store may be gone
            self._tell(f"failed/{self.started.rank}", json.dumps(failed))
            self._tell("failed", "")

    def _fail(self, error: Exception) -> Ended | None:
        """Report an error to worker 0; returns the end of its command, if it tells."""
        limit = time.monotonic() + _LAST_SECONDS
        self.note_failure(error)
        with suppress(LostWorkerError):  # the store may be gone
            if self._roll_call is not None:  # else others would wait for this one until a timeout
                with self._explaining_silence():
                    self._roll_call.say_failed()
            while time.monotonic() < limit:
                if self._has(f"order/{self._orders + 1}"):
                    self._orders += 1
                    order = json.loads(self._hear(f"order/{self._orders}"))
                    if order["do"] == "end":
                        return self._take_leave(order)
                time.sleep(_POLL_SECONDS)
        return None

    def _take_leave(self, order: Mapping[str, Any]) -> Ended:
        with suppress(LostWorkerError):  # worker 0 may have stopped waiting for it
            self._tell(f"left/{self.started.rank}", "")
        return Ended(order["code"], order["message"], order["result"])

    # ------------------------------------------------------------------------------------- together

    def _hear_of_all(self, store: Store) -> None:
        """Exchange members between all processes; raise what keeps them from working together."""
        size = self.started.size
        if self.started.rank == 0:
            values = [json.loads(self._hear(f"member/{rank}", rank)) for rank in range(size)]
            members = [_member(one) for one in values]
            self._tell("members", json.dumps([values, unlike(members), time.time()]))
        values, problem, clock = json.loads(self._hear("members"))
        self.members = tuple(_member(one) for one in values)
        doubt = clock_words(self.members, self.started.rank, time.time() - clock)
        if doubt and not self.started.local_rank:  # once a host, which has one clock
            print(f"warning: {doubt}", file=sys.stderr)  # noqa: T201 - for the person who waits
        if problem:
            if self.started.rank:
                with suppress(LostWorkerError):  # worker 0 may have stopped waiting for it
                    self._tell(f"heard/{self.started.rank}", "")
            else:  # it may hold the store, which must last until the others have read
                self._let_all("heard")
            raise PlanError(problem)
        self._roll_call = RollCall(
            store,
            self.started.rank,
            [one.presence for one in self.members],
            store_keeper(),
            patience=_SILENT_SECONDS,
        )

    @property
    def _others(self) -> range:
        return range(1, self.started.size)

    def _let_all(self, word: str) -> None:
        """Let worker 0 wait for a word of all others, `_LAST_SECONDS` at most."""
        limit = time.monotonic() + _LAST_SECONDS
        left = [f"{word}/{rank}" for rank in self._others]
        while time.monotonic() < limit and (left := [key for key in left if not self._has(key)]):
            time.sleep(_POLL_SECONDS)

    def _wait(self, keys: Sequence[str], patience: float = math.inf) -> None:
        """Wait until all these keys are set, while the processes live that may set them.

        A stop signal raises `Interrupted` after ``patience`` seconds; on workers other than 0 only
        if worker 0 has not said that it ends its command.
        """
        look, stop = time.monotonic() + BEAT_SECONDS, 0.0
        left = list(keys)
        while left := [key for key in left if not self._has(key)]:
            if self.started.rank == 0:
                self._raise_failed(secondary=True)
            asks = patience < math.inf and (self.noted or not self.started.rank)
            if asks and (stops := self.stops()):
                stop = stop or time.monotonic() + patience
                if time.monotonic() > stop and not (self.started.rank and self._has("stopping")):
                    raise Interrupted(stops[0], stopped_by(stops[0]))
            if time.monotonic() > look:
                look = time.monotonic() + BEAT_SECONDS
                if self._roll_call is not None and self._roll_call.misses_one(failed=False):
                    if self.started.rank and self._has(left[0]):
                        return  # worker 0 has set the key, and is gone
                    raise LostWorkerError(self._roll_call.loss())
            time.sleep(_POLL_SECONDS)

    def _raise_failed(self, *, secondary: bool) -> None:
        """Raise an error that another worker has reported, workers' own errors first."""
        if self.started.size == 1 or not self._has("failed"):
            return
        found = [
            (rank, json.loads(self._hear(f"failed/{rank}")))
            for rank in self._others
            if self._has(f"failed/{rank}")
        ]
        for rank, failed in sorted(found, key=lambda one: one[1]["secondary"]):
            if failed["secondary"] and not secondary:
                continue
            text = f"{self.members[rank]}: {failed['message']}"
            raise LostWorkerError(text) if failed["secondary"] else _error_of(failed["code"], text)

    # ------------------------------------------------------------------------------------ the store

    def _has(self, key: str) -> bool:
        with self._explaining_silence():
            return bool(self._store.check([key]))

    def _tell(self, key: str, word: str) -> None:
        with self._explaining_silence():
            self._store.set(key, word)

    def _hear(self, key: str, rank: int = 0) -> bytes:
        """Wait for a key's word, which is there or comes from worker ``rank``."""
        with self._explaining_silence(rank):
            return self._store.get(key)

    @contextmanager
    def _explaining_silence(self, rank: int = 0) -> Iterator[None]:
        """Replace the store's error by one that names the lost worker.

        Raises:
            LostWorkerError: The store, or worker ``rank``, does not answer.
        """
        try:
            yield
        except RuntimeError:
            silent = f"the store at {self.started.address}:{self.started.port} does not answer"
            if rank:
                silent = f"worker {rank} has come to the start, and is gone or silent since then"
            elif self.started.rank:
                known = len(self.members) == self.started.size
                first = self.members[0] if known else "worker 0"
                silent = f"lost contact with {first}, which led the command: {silent}"
            raise LostWorkerError(silent) from None


def stops_of_all(noted: Sequence[int]) -> Callable[[], Sequence[int]]:
    """Function that returns the stop signals noted here and those of other processes.

    A scheduler may signal any process of a group; the command ends as a whole.
    """
    if Gathering.current is None:
        return lambda: noted
    Gathering.current.noted = noted
    return Gathering.current.stops


def _error_of(code: int, text: str) -> BatchwrightError:
    if code > 128:  # that worker alone got a stop signal
        return Interrupted(code - 128, text)
    return (BatchwrightError if code == BatchwrightError.exit_code else LostWorkerError)(text)


def _meeting_seconds() -> float:
    text = os.environ.get(MEETING_SECONDS, "")
    try:
        seconds = float(text) if text else _MEETING_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BatchwrightError(
            f"{MEETING_SECONDS}={text}: give a number of seconds, such as {_MEETING_SECONDS:g}, or "
            "unset it"
        )
    return seconds


def _met(started: Started, seconds: float) -> Store:
    """The store of this start; raises on each process that cannot reach it."""
    if started.rank:
        _reach(started, seconds)
    try:
        with _telling_who_waits(started, seconds):
            return meet(started.rank, started.size, seconds)
    except LostWorkerError as error:
        raise BatchwrightError(
            f"{error}: are all of the {started.size} processes that {started.by} announced "
            f"running, and is port {started.port} of {started.address} open to their hosts? "
            f"({MEETING_SECONDS} says how long to wait)"
        ) from None
    except RuntimeError as error:
        raise BatchwrightError(
            f"{started} cannot meet the others at {started.address}:{started.port} "
            f"({one_line(error)[:200]}): name another port with MASTER_PORT"
        ) from None


@contextmanager
def _telling_who_waits(started: Started, seconds: float) -> Iterator[None]:
    """Inside, worker 0 prints after a while what it waits for: variables may be left over."""

    def tell() -> None:
        print(  # noqa: T201 - for the person who waits
            f"waiting for all {started.size} processes that {started.by} has announced, "
            f"{seconds:g} s at most",
            file=sys.stderr,
        )

    timer = threading.Timer(_TELL_SECONDS, tell)
    timer.daemon = True
    if started.rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reach(started: Started, seconds: float) -> None:
    """Wait until this process can reach the port at which all meet."""
    limit, problem = time.monotonic() + seconds, ""
    while True:
        try:
            left = max(1.0, limit - time.monotonic())
            with socket.create_connection((started.address, started.port), timeout=left):
                return
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() > limit:
            raise BatchwrightError(
                f"{started} cannot reach {started.address}:{started.port}, where worker 0 waits "
                f"({problem}): open that port between the hosts, or name another address and port "
                "with MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(10 * _POLL_SECONDS)


def _member(values: Mapping[str, Any]) -> Member:
    return Member(**{**values, "presence": Presence(**values["presence"])})


def clock_words(members: Sequence[Member], rank: int, ahead: float) -> str:
    """Warning about a clock that is ``ahead`` of worker 0's by so many seconds; empty: none.

    Waiting does not depend on it: silence is measured by each host's own clock.
    """
    if abs(ahead) <= _CLOCK_SECONDS:
        return ""
    where = "ahead of" if ahead > 0 else "behind"
    return (
        f"the clock of {members[rank]} is {abs(ahead):,.0f} s {where} that of {members[0]}: times "
        "that the two write down do not go together; set both, as by chrony or ntpd"
    )


def unlike(members: Sequence[Member]) -> str:
    """Difference that keeps processes from working together, in a line; empty: none."""
    first = members[0]
    for other in members[1:]:
        for package, version in first.versions.items():
            if other.versions.get(package) != version:
                return (
                    f"{other} has {package} {other.versions.get(package)}, and {first} has "
                    f"{version}: install the same on all hosts"
                )
        if other.words != first.words:
            return (
                f"{other} was started with `{other.words}`, and {first} with `{first.words}`: "
                "start the same command everywhere"
            )
    return ""
