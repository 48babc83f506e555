"""The parameter server's process, one for all workers of a run.

    python -m batchwright.training.parameter_server.server_process SOCKET

started by `distributed.server_child`, which hands it the number of a listening socket, says on
standard input what to serve, and reads on standard output what it should know. Each connection has
a thread, so a slow link delays its own worker only; the main thread does the rest: checkpoints, the
deadline, stop signals, the end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchwright.distributed.processes import worker_main
from batchwright.errors import BatchwrightError
from batchwright.records import Plan
from batchwright.records.text.formatting import counted
from batchwright.training.checkpoints.server_checkpoints import ServerCheckpoints
from batchwright.training.parameter_server.messages import (
    Beat,
    Bye,
    Farewell,
    Hello,
    Next,
    Refused,
    Settled,
    Stop,
    Stopped,
    Trained,
    Welcome,
)
from batchwright.training.parameter_server.server_coordinator import ServerCoordinator
from batchwright.training.parameter_server.transport import BEAT_SECONDS, Received, Transport
from batchwright.training.recorder import Recorder
from batchwright.training.signals import StopRequest, stopped
from batchwright.workload.host import prepare_process

POLL_SECONDS = 0.1
_GOODBYE_SECONDS = 5.0  # for workers to take their last answer


class ServerProcess:
    """The parameter server's side of all connections, and the run from its start to its end.

    Args:
        plan: A plan with a parameter server.
        folder: The run folder; ``None`` keeps nothing.
        resume: Go on from its last checkpoint.
        listener: Listening socket that workers connect to.
        key: Shared secret that workers must know.
        orders: Orders of the parent process, as they come: ``gone``, a worker lost for good.

    Raises:
        FileError: The folder holds a run already, or its checkpoints cannot be read.
        PlanError: The checkpoint is of another plan.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path | None,
        *,
        resume: bool,
        listener: socket.socket,
        key: bytes,
        orders: Iterable[Mapping[str, int]] = (),
    ) -> None:
        self._plan, self._listener, self._key, self._orders = plan, listener, key, orders
        self._over = threading.Event()
        self._problems: list[Exception] = []  # of other threads: the main one raises them
        self._recorder = Recorder(folder, plan)
        self._coordinator = ServerCoordinator(plan, self._recorder)
        self._checkpoints = ServerCheckpoints(folder, plan, self._coordinator, self._recorder)
        self._checkpoints.prepare(resume=resume)
        self._stop = StopRequest()

    def serve(self) -> None:
        """Serve until all workers are done.

        Raises:
            Interrupted: A stop signal came, or the time was up; a checkpoint was written.
            FileError: Something could not be written.
        """
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        threading.Thread(target=self._take_orders, name="orders", daemon=True).start()
        try:
            while not self._coordinator.deserted:
                time.sleep(POLL_SECONDS)
                if self._problems:
                    raise self._problems[0]
                self._coordinator.give_up_lost(self._plan.job.timeout)
                self._checkpoints.check()
                self._checkpoints.save_kept()
                self._checkpoints.save_best()
                self._checkpoints.save_if_due()
                self._stop_if_asked()
            self._coordinator.complete_rounds()
            self._checkpoints.finish()
            self._recorder.finish(rounds=tuple(self._coordinator.round_log.rounds))
            self._dismiss(Farewell())
        finally:
            _tell_parent({"ends": ""})  # before connections close: what is left may take long
            self._over.set()
            self._listener.close()
            self._checkpoints.close()
            self._stop.close()

    def _stop_if_asked(self) -> None:
        number = self._stop.number or self._coordinator.stop_asked
        if not (number or self._coordinator.time_is_up):
            return
        self._coordinator.stop(number)
        epochs, samples, _ = self._coordinator.progress
        most = self._plan.job.goal.deadline
        stop = stopped(number, most, f"after {counted(epochs, 'epoch')}, {samples} samples")
        self._checkpoints.finish()
        self._dismiss(Stopped(number, str(stop)))
        raise stop

    def _dismiss(self, word: Farewell | Stopped) -> None:
        """Send all workers their last message, and wait until they have disconnected."""
        for link in self._coordinator.dismiss(word):
            with suppress(OSError):
                link.send(word)
        end = time.monotonic() + _GOODBYE_SECONDS
        while not self._coordinator.empty and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 10)

    # -------------------------------------------------------------------------------- connections

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
                link = Transport(connection, self._plan.job.timeout)
            except OSError:  # the other end closed it before, or there is no room for another
                self._over.wait(POLL_SECONDS)
                continue
            try:
                threading.Thread(target=self._attend, args=(link,), daemon=True).start()
            except RuntimeError:  # there is no room for its thread
                link.close()

    def _attend(self, link: Transport) -> None:
        """Serve one connection, from its first message to its end."""
        rank = None
        try:
            link.authenticate(self._key, first=True)
            rank = self._admit(link, link.receive())
            while rank is not None:
                self._take(link, rank, link.receive())
        except OSError as error:
            if isinstance(error, TimeoutError) and rank is not None:
                _tell_parent({"silent": rank, "why": str(error)})
            if rank is not None:
                self._coordinator.lose(rank, link, str(error))
        except Exception as error:  # noqa: BLE001 - such as a full disk: it concerns all
            self._fail(error)
        finally:
            link.close()

    def _admit(self, link: Transport, received: Received) -> int | None:
        """Let a worker in by its first message; returns its rank, ``None`` if it is refused."""
        hello = received.message
        assert isinstance(hello, Hello)  # noqa: S101 - only our own client gets so far
        try:
            self._coordinator.join(hello, received.weights, link)
        except BatchwrightError as refusal:
            link.send(Refused(str(refusal)))
            return None
        link.send(Welcome())
        return hello.rank

    def _take(self, link: Transport, rank: int, received: Received) -> None:
        """Handle a message of a worker, and answer it where an answer is due."""
        message, weights, seconds = received
        coordinator = self._coordinator
        if isinstance(message, Settled):
            coordinator.settle(rank, link, message)
        if isinstance(message, Settled | Beat):
            return
        if isinstance(message, Trained):
            assert weights is not None  # noqa: S101 - as above
            coordinator.push(rank, link, weights, message, seconds)
        elif isinstance(message, Bye):
            coordinator.leave(rank, link)
        elif isinstance(message, Next | Stop):
            if isinstance(message, Stop):
                coordinator.ask_to_stop(rank, link, message.signal)
            coordinator.ask(rank, link)
        else:  # no message that a worker sends here
            return
        self._answer(link, rank)

    def _answer(self, link: Transport, rank: int) -> None:
        """Wait for the worker's answer and send it; meanwhile both sides send signs of life."""
        while (answer := self._coordinator.answer(rank, link, BEAT_SECONDS)) is None:
            while link.has_word():
                if isinstance(message := link.receive().message, Stop):
                    self._coordinator.ask_to_stop(rank, link, message.signal)
            if time.monotonic() - link.heard > self._plan.job.timeout:
                raise TimeoutError(f"silent for {self._plan.job.timeout:g} s")
            link.send(Beat())
        link.send(*answer)

    def _take_orders(self) -> None:
        for order in self._orders:
            try:
                self._coordinator.give_up(order["gone"])
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the server for an error; the parent hears of it before any connection is closed."""
        _tell_parent({"ends": str(error)})
        self._problems.append(error)


def _orders() -> Iterator[dict[str, Any]]:
    """Orders of the parent process, from standard input.

    Read without Python's buffer: the thread that waits here to the end would leave it locked.
    """
    read = b""
    while piece := os.read(0, 65536):
        *lines, read = (read + piece).split(b"\n")
        yield from map(json.loads, lines)


def _tell_parent(event: dict[str, Any]) -> None:
    """Print an event for the parent, which may be gone; several threads may do so at once."""
    with suppress(OSError):
        sys.stdout.write(json.dumps(event) + "\n")  # in one piece, unlike `print`
        sys.stdout.flush()


def _main() -> None:
    orders = _orders()
    order = next(orders)
    prepare_process(1)
    try:
        process = ServerProcess(
            Plan.model_validate(order["plan"]),
            Path(order["folder"]) if order["folder"] else None,
            resume=order["resume"],
            listener=socket.socket(fileno=int(sys.argv[1])),
            key=bytes.fromhex(order["key"]),
            orders=orders,
        )
    except BatchwrightError as error:
        _tell_parent({"refused": str(error)})
        raise
    _tell_parent({"ready": True})
    process.serve()


if __name__ == "__main__":
    worker_main(_main)
