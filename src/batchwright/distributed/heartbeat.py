"""Heartbeats: each worker writes them to the launcher's store; after a failure the others look.

A collective that fails says that a connection broke or that time ran out, never whose fault it is.
The store is reached without collectives, so the survivors can find out there. A worker's beat comes
from a thread of its own and so goes on while the worker computes; it stops when the process is
killed or stopped, or its host is gone.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from batchwright.errors import LostWorkerError, TrainingError

T = TypeVar("T")

BEAT_SECONDS = 0.5
MISSED_BEATS = 3  # so many in a row, and a worker counts as silent
LONG_SILENCE = 10.0  # seconds; while nothing has failed: a busy process may miss some beats
_ANSWER_SECONDS = 10.0  # a store that says nothing for so long is taken as gone


@dataclass(frozen=True)
class Presence:
    """What other workers must know about a worker to notice that it is gone."""

    place: str  # where it computes: host name, device type and local rank, as in ``node1/cpu:0``
    machine: str  # names the machine and its set of process numbers; empty where that is unknown
    process: int  # process number there
    token: str  # differs at each start of each worker


def machine_name() -> str:
    """A name under which process numbers are unique: this boot's and this process namespace's."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return ""


class RollCall:
    """Sends this worker's heartbeats until `close`, and names workers that send none.

    Args:
        store: Store that all workers write to; a process other than the workers should hold it.
        rank: This worker.
        present: All workers, in rank order.
        keeper: Address of a store that another process holds; empty: worker 0 holds it,
            and must not leave before the others have looked.
        patience: Seconds without a heartbeat after which `misses_one` counts a worker as gone.
        apart: Whether to take a connection to the store of its own. Where a process group waits for
            a key of the store, as NCCL's does for worker 0, nobody else gets a word through the
            same one, and beats would stop.

    Attributes:
        current: The roll call of this process, if any; once it is closed, the one before it.
        exchanging: Whether the worker is in an exchange now; for `naming_the_lost` to set.
    """

    current: ClassVar[RollCall | None] = None

    def __init__(
        self,
        store: Store,
        rank: int,
        present: Sequence[Presence],
        keeper: str = "",
        patience: float = LONG_SILENCE,
        *,
        apart: bool = False,
    ) -> None:
        self._patience = patience
        # Older PyTorch has no `clone`.
        own = store.clone() if apart and hasattr(store, "clone") else store
        self._kept = store  # which in worker 0's process answers, also once its group is gone
        self._store = PrefixStore(f"batchwright/roll-call/{present[0].token}", own)
        self._rank, self._present = rank, tuple(present)
        self._keeper = keeper
        self._count = 0
        self._begun = 0, ""  # how much, and what last; the same on all workers, if they are as far
        self._met = ""  # the last key under which it has met the others
        self._failed = False
        self._last_words = ""  # of worker 0, whose store may go with it: that it left, and why
        self._seen: dict[int, tuple[str | None, float]] = {}  # last beats, and since when
        self._exchanged_at = time.monotonic()
        self._exchanging = False
        self._ending = threading.Event()
        self._former = RollCall.current
        self._beat()
        self._thread = threading.Thread(target=self._beat_on, name="roll-call", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that wakes up in a dying interpreter aborts it
        RollCall.current = self

    @property
    def exchanging(self) -> bool:
        """Whether the worker is in an exchange now."""
        return self._exchanging

    @exchanging.setter
    def exchanging(self, value: bool) -> None:
        self._exchanging = value
        self._exchanged_at = time.monotonic()

    def close(self, why: str = "") -> None:
        """Note in the store that this worker has left on purpose, and send no more heartbeats.

        Args:
            why: The error that ends it, for the others to read; empty: none. Worker 0, if it holds
                the store, then waits until they have: some beats, and no longer.
        """
        atexit.unregister(self.close)
        if self._ending.is_set():
            return
        self._ending.set()
        while RollCall.current is not None and RollCall.current._ending.is_set():
            RollCall.current = RollCall.current._former
        self._thread.join(timeout=1.0)
        if not self._failed and not self._thread.is_alive():
            _asked(lambda: self._leave(why), seconds=1.0)
            if why and not (self._rank or self._keeper):
                _asked(self._await_hearers, seconds=_ANSWER_SECONDS)

    def misses_one(self, *, failed: bool = True) -> bool:
        """Whether an exchange in progress is in vain: a worker is gone or silent, or has failed.

        It sends nothing. To be called every now and then, since silence takes two looks,
        `patience` apart.

        Args:
            failed: Whether a worker counts that has only noted that it failed.
        """
        words = ("left", "failed") if failed else ("left",)
        return _asked(lambda: self._misses_one(words), seconds=_ANSWER_SECONDS) is not False

    def say_failed(self) -> None:
        """Note in the store that this worker has failed and takes part in no more exchanges."""
        self._failed = True
        self._store.set(f"word/{self._rank}", "failed")

    def loss(self) -> str:
        """Message of a `LostWorkerError` that names the gone worker, after `misses_one`."""
        return "lost contact with another worker: " + (self.inquire() or "one fell silent")

    def announce(self, what: str) -> None:
        """Note what this worker begins; all workers take part in each, in the same order."""
        self._begun = self._begun[0] + 1, what

    def monitored_barrier(self, timeout: float) -> None:
        """Wait until all workers have begun what this one has begun last.

        Otherwise its exchange would be paired with a different one: both workers would wait for a
        timeout, or use each other's numbers wrongly. ``timeout`` is in seconds.

        Raises:
            TrainingError: Another worker has begun something else instead.
            LostWorkerError: Another worker is gone or silent, or has not come in time.
        """
        began, pause = time.monotonic(), 1e-3
        longest = max(BEAT_SECONDS / 10, 1e-3 * len(self._present))  # one store answers them all
        look = began + BEAT_SECONDS
        self._ask(self._come)
        while not self._ask(self._all_have_come):
            now = time.monotonic()
            if now > look:
                look = now + BEAT_SECONDS
                self._refuse_other_ways()
            if now > began + timeout and (late := self._ask(self._not_come)):
                who = ", ".join(map(self._name, late))
                # No inquiry, before which this worker would say that it has failed: the others are
                # to read why it leaves.
                _, found = self._ask(partial(self._look, late))
                raise LostWorkerError(
                    f"{self.here} {self._begun[1]}, and {who} did not within {timeout:g} s"
                    + (f": {found}" if found else "")
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    @property
    def here(self) -> str:
        """This worker, in words."""
        return self._name(self._rank)

    def inquire(self) -> str:
        """After a failed exchange: which workers are lost, as one sentence; empty if all answer.

        Takes `MISSED_BEATS` beats at most, less where a worker has plainly ended.
        """
        outcome = _asked(self._inquire, seconds=_ANSWER_SECONDS)
        if isinstance(outcome, str):
            return outcome
        if self._keeper:
            return f"the launcher's store at {self._keeper} does not answer"
        return self._last_words or f"{self._name(0)}, which holds the store, does not answer"

    # ------------------------------------------------------------------------------------- beating

    def _leave(self, why: str) -> None:
        if why:  # first: whoever sees the word may look for it
            self._store.set(f"why/{self._rank}", why)
        self._store.set(f"word/{self._rank}", "left")

    def _beat_on(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            try:
                self._beat()
                if self._rank and not self._keeper and not self._last_words:
                    self._heed_first()
            except RuntimeError:
                return  # the store is gone; the next exchange will fail and say so

    def _heed_first(self) -> None:
        """Remember why worker 0 has left, before the store goes with it, and let it know."""
        if self._read("word/0") == "left":
            self._last_words = self._told([0], "left the run")
            self._store.set(f"heard/{self._rank}", "")

    def _await_hearers(self) -> None:
        """Let worker 0 wait until the others know that it has left, or are gone themselves."""
        limit = time.monotonic() + 2 * MISSED_BEATS * BEAT_SECONDS
        left = list(range(1, len(self._present)))
        while time.monotonic() < limit and (left := [r for r in left if not self._has_heard(r)]):
            time.sleep(BEAT_SECONDS / 10)

    def _has_heard(self, rank: int) -> bool:
        words = any(self._read(f"{key}/{rank}") is not None for key in ("heard", "word"))
        return words or self._has_ended(rank)

    def _beat(self) -> None:
        self._count += 1
        beat = {
            "count": self._count,
            "time": time.time(),
            "exchanging": self._exchanging,
            "seconds": time.monotonic() - self._exchanged_at,
            "begun": self._begun,
        }
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    # ------------------------------------------------------------------------------------- looking

    def _misses_one(self, words: Sequence[str]) -> bool:
        now = time.monotonic()
        for rank in range(len(self._present)):
            if rank == self._rank:
                continue
            if self._read(f"word/{rank}") in words or self._has_ended(rank):
                return True
            beat = self._read(f"beat/{rank}")
            known, since = self._seen.get(rank, (None, now))
            self._seen[rank] = beat, since if beat == known else now
            if now - self._seen[rank][1] > self._patience:
                return True
        return False

    def _inquire(self) -> str:
        self.say_failed()
        others = [rank for rank in range(len(self._present)) if rank != self._rank]
        lost, sentence = self._look(others)
        self._store.set(f"done/{self._rank}", "")
        if self._rank == 0 and not self._keeper:  # the others still look
            end = time.monotonic() + 2 * MISSED_BEATS * BEAT_SECONDS
            left = [rank for rank in others if rank not in lost]
            while time.monotonic() < end and any(self._read(f"done/{r}") is None for r in left):
                time.sleep(BEAT_SECONDS / 10)
        return sentence

    def _look(self, others: Sequence[int]) -> tuple[Sequence[int], str]:
        """The lost workers, and a sentence about them."""
        before = {rank: self._read(f"beat/{rank}") for rank in others}
        end = time.monotonic() + MISSED_BEATS * BEAT_SECONDS
        while True:
            words = {rank: self._read(f"word/{rank}") for rank in others}
            quiet = [rank for rank in others if words[rank] is None]
            left = [rank for rank in others if words[rank] == "left"]
            ended = [rank for rank in quiet if self._has_ended(rank)]
            if left:
                return left, self._told(left, "left the run")
            if ended:
                return ended, self._told(ended, "ended without a word")
            if not quiet or time.monotonic() > end:
                break
            time.sleep(BEAT_SECONDS / 10)
        beats = {rank: self._read(f"beat/{rank}") for rank in quiet}
        silent = [rank for rank in quiet if beats[rank] == before[rank]]
        if silent:
            return silent, ", ".join(
                f"{self._name(rank)} has been silent{_silence(beats[rank])}" for rank in silent
            )
        absent = {rank: beat for rank in quiet if not (beat := _decoded(beats[rank]))["exchanging"]}
        return list(absent), ", ".join(
            f"{self._name(rank)} answers, but has not come to an exchange for "
            f"{beat['seconds']:.0f} s"
            for rank, beat in absent.items()
        )

    def _come(self) -> None:
        """Note that this worker has begun what it has, and forget where it met the others last."""
        if self._met:  # all have met there: exchanges have followed
            with suppress(RuntimeError):  # not every store can
                self._store.delete_key(self._met)
        self._met = self._place(self._rank)
        self._store.set(self._met, "")

    def _all_have_come(self) -> bool:
        """Whether all workers have begun what this one has."""
        return self._store.check([self._place(rank) for rank in range(len(self._present))])

    def _not_come(self) -> Sequence[int]:
        """The workers that have not begun what this one has."""
        return [rank for rank in range(len(self._present)) if not self._has_come(rank)]

    def _has_come(self, rank: int) -> bool:
        return self._store.check([self._place(rank)])

    def _place(self, rank: int) -> str:
        """The key under which a worker notes that it has begun the same as this one."""
        number, what = self._begun
        return f"met/{number}/{what}/{rank}"

    def _refuse_other_ways(self) -> None:
        """Raise if another worker has begun something else instead, or is gone or silent."""
        if other := self._ask(self._other_way):
            raise TrainingError(
                f"{self.here} {self._begun[1]}, and {other}: call session.step() and "
                "session.evaluate() on all workers alike, and leave the loop after the same "
                "step, by a value that all of them have"
            )
        if self._ask(lambda: self._misses_one(("left", "failed"))):
            raise LostWorkerError(self.loss())

    def _other_way(self) -> str:
        """Who has begun something else instead, and what; empty: nobody."""
        number, what = self._begun
        for rank in range(len(self._present)):
            theirs, doing = _decoded(self._read(f"beat/{rank}")).get("begun", (0, ""))
            other = theirs > number or (theirs == number and doing != what)
            # Looked at after the beat: who has come, and has met all, goes on with the next.
            if other and not self._has_come(rank):
                return f"{self._name(rank)} {doing}"
        return ""

    def _ask(self, question: Callable[[], T]) -> T:
        """Ask the store.

        Raises:
            LostWorkerError: It does not answer.
        """
        try:
            return answered(question, _ANSWER_SECONDS)
        except RuntimeError:
            raise LostWorkerError(self.loss()) from None

    def _read(self, key: str) -> str | None:
        """A value of the store; ``None`` where there is none, for which `Store.get` would wait."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _has_ended(self, rank: int) -> bool:
        """Whether a worker is on this machine and its process has ended."""
        other, own = self._present[rank], self._present[self._rank]
        if not own.machine or other.machine != own.machine:
            return False
        try:
            status = Path(f"/proc/{other.process}/stat").read_text(encoding="utf-8")
        except OSError:
            return True
        return status.rpartition(")")[2].split()[0] in "ZX"  # ended, but not yet waited for

    def _name(self, rank: int) -> str:
        return f"worker {rank} ({self._present[rank].place})"

    def _told(self, ranks: Iterable[int], what: str) -> str:
        return ", ".join(f"{self._name(rank)} {what}{self._why(rank)}" for rank in ranks)

    def _why(self, rank: int) -> str:
        """The error that a worker has noted, behind a colon; empty if it has noted none."""
        why = self._read(f"why/{rank}")
        return f": {why}" if why else ""


def presence(place: str) -> Presence:
    """The `Presence` of this process."""
    return Presence(place, machine_name(), os.getpid(), os.urandom(8).hex())


def _silence(beat: str | None) -> str:
    """Time since a heartbeat, in words, by the clocks of both hosts."""
    if beat is None:
        return " from the start"
    return f" for {max(MISSED_BEATS * BEAT_SECONDS, time.time() - _decoded(beat)['time']):.0f} s"


def _decoded(beat: str | None) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(beat or "{}")
    return decoded


def answered(ask: Callable[[], T], seconds: float) -> T:
    """Call a store; give up after so many seconds.

    By itself PyTorch's gives up waiting for a key that nobody sets, and where the other end closes
    the connection. Of a host that is gone, or a process that stands still, it hears nothing.

    Raises:
        RuntimeError: There was no answer in time, or the store is gone.
    """
    answers: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001 - raised below, where the caller is
            failed.append(error)

    thread = threading.Thread(target=run, name="asking-the-store", daemon=True)
    thread.start()
    for _ in range(2):  # of a process that was suspended one wait is over as it wakes up
        thread.join(seconds / 2)
    if failed:
        raise failed[0]
    if not answers:
        raise RuntimeError(f"the store did not answer within {seconds:g} s")
    return answers[0]


def _asked(question: Callable[[], T], *, seconds: float) -> T | None:
    """As `answered`; ``None`` if the store is gone or does not answer in time."""
    try:
        return answered(question, seconds)
    except RuntimeError:
        return None
