"""A worker's side of the connection with the parameter server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from batchwright.errors import DeadlineReached, Interrupted, LostWorkerError, PlanError
from batchwright.training.parameter_server.merging import Weights
from batchwright.training.parameter_server.messages import (
    Beat,
    Bye,
    Farewell,
    Hello,
    Message,
    Next,
    Refused,
    Round,
    Settled,
    Stop,
    Stopped,
    Trained,
)
from batchwright.training.parameter_server.transport import BEAT_SECONDS, Received, connect
from batchwright.training.signals import StopRequest


class ServerClient:
    """A worker's messages to the server; a thread sends signs of life while the worker computes.

    Args:
        address: ``host:port``.
        key: Shared secret, hexadecimal.
        timeout: Seconds after which a silent server counts as lost.
        stop: Notes whether this worker is asked to stop; looked at while it waits.

    Raises:
        LostWorkerError: The server cannot be reached, or (from every method) is gone.
    """

    def __init__(self, address: str, key: str, timeout: float, stop: StopRequest) -> None:
        self._address, self._stop = address, stop
        self._stop_sent = False
        self._ending = threading.Event()
        with self._naming_the_server():
            self._link = connect(address, bytes.fromhex(key), timeout)
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)

    def hello(self, hello: Hello, weights: Weights | None) -> None:
        """Introduce this worker; worker 0 brings the first weights.

        Raises:
            PlanError: The worker does not fit the others.
        """
        with self._naming_the_server():
            self._link.send(hello, weights)
            self._thread.start()
            answer, _, _ = self._answer()
        if isinstance(answer, Refused):
            raise PlanError(answer.message)

    def next(self) -> tuple[Weights, Round]:
        """Get the merged model and the first round."""
        with self._naming_the_server():
            self._link.send(Next())
            return self._round()

    def push(self, weights: Weights, trained: Trained) -> tuple[Weights, Round]:
        """Push the model of a round; returns the merged model and the next round."""
        with self._naming_the_server():
            self._link.send(trained, weights)
            return self._round()

    def settle(self, settled: Settled) -> None:
        """Send the figures of the last exchange and of the evaluation after it."""
        with self._naming_the_server():
            self._link.send(settled)

    def look(self) -> None:
        """Read messages that the server has sent unasked.

        Raises:
            Interrupted: The run is stopped; its checkpoint is written.
        """
        with self._naming_the_server():
            while self._link.has_word():
                self._refuse_stop(self._link.receive().message)

    def stop(self, number: int) -> None:
        """Ask the server to stop the run, because of a signal; does not return.

        Raises:
            Interrupted: The checkpoint is written.
        """
        with self._naming_the_server():
            self._stop_sent = True
            self._link.send(Stop(number))
            while True:
                self._answer()

    def bye(self) -> None:
        """Say goodbye; returns once the server has written everything."""
        with self._naming_the_server():
            self._link.send(Bye())
            while not isinstance(self._answer().message, Farewell):
                pass

    def close(self) -> None:
        """Close the connection; without `bye` the worker then counts as lost."""
        self._ending.set()
        self._link.close()

    def _round(self) -> tuple[Weights, Round]:
        answer, weights, _ = self._answer()
        assert isinstance(answer, Round)  # noqa: S101 - nothing else answers
        assert weights is not None  # noqa: S101 - they come along
        return weights, answer

    def _answer(self) -> Received:
        """Wait for the next message other than a sign of life."""
        while isinstance((received := self._link.receive()).message, Beat):
            if self._stop.number and not self._stop_sent:
                self._stop_sent = True
                self._link.send(Stop(self._stop.number))
        self._refuse_stop(received.message)
        return received

    def _refuse_stop(self, message: Message) -> None:
        if isinstance(message, Stopped):
            raise (
                Interrupted(message.signal, message.message)
                if message.signal
                else DeadlineReached(message.message)
            )

    def _beat(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            try:
                self._link.send(Beat())
            except OSError:
                return  # the next exchange will fail and say so

    @contextmanager
    def _naming_the_server(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LostWorkerError(
                f"lost contact with the parameter server at {self._address}: {error}"
            ) from error
