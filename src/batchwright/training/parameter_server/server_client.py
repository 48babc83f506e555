"""A worker's side of the connection with the parameter server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from batchwright.errors import DeadlineReached, Interrupted, LostWorkerError, PlanError
from batchwright.training.parameter_server.merging import Entry, Weights
from batchwright.training.parameter_server.rounds import RoundAssignment
from batchwright.training.parameter_server.transport import BEAT_SECONDS, Message, connect
from batchwright.training.signals import StopRequest


@dataclass(frozen=True)
class Pulled:
    """What the server answers.

    Attributes:
        weights: The merged model.
        ticket: The next round; ``None``: there is none left.
        evaluate: The epoch after which this worker is to evaluate the model; ``None``: it is not.
        scores: Of the last evaluation, by name; empty before the first.
        away: Seconds of the exchange in which this worker waited for others, or had nothing left.
    """

    weights: Weights
    ticket: RoundAssignment | None
    evaluate: int | None
    scores: dict[str, float]
    away: float


class ServerClient:
    """Talks to the server. A thread gives it signs of life, also while the worker computes.

    Args:
        address: ``host:port``.
        key: Shared secret, hexadecimal.
        timeout: Seconds after which a silent server counts as lost.
        stop: Asked while this worker waits.

    Raises:
        LostWorkerError: It cannot be reached; from every method too: it is gone.
    """

    def __init__(self, address: str, key: str, timeout: float, stop: StopRequest) -> None:
        self._address, self._stop = address, stop
        self._told_of_stop = False
        self._ending = threading.Event()
        with self._naming_the_server():
            self._link = connect(address, bytes.fromhex(key), timeout)
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)

    def hello(
        self,
        *,
        rank: int,
        place: str,
        samples: int,
        plan: str,
        entries: Sequence[Entry],
        description: Mapping[str, Any],
        weights: Weights | None,
    ) -> None:
        """Say who this is.

        Args:
            rank: This worker.
            place: Where it computes.
            samples: Size of its data set.
            plan: That it follows, as JSON text.
            entries: How its weights lie.
            description: Of its network's input.
            weights: To begin with; from worker 0 only.

        Raises:
            PlanError: It does not fit the others.
        """
        with self._naming_the_server():
            self._link.send(
                "hello",
                weights,
                rank=rank,
                place=place,
                samples=samples,
                plan=plan,
                layout=[(one.name, one.shape, one.dtype, one.start) for one in entries],
                description=dict(description),
            )
            self._thread.start()
            answer = self._answer()
        if answer.kind == "refused":
            raise PlanError(answer.values["message"])

    def next(self) -> Pulled:
        """The first round."""
        with self._naming_the_server():
            self._link.send("next")
            return self._pulled()

    def push(self, weights: Weights, told: Mapping[str, Any]) -> Pulled:
        """Hand in the model of a round and get the next.

        Args:
            weights: The model.
            told: ``steps``, ``loss``, ``rate`` and ``compute`` (seconds) of the round.
        """
        with self._naming_the_server():
            self._link.send("push", weights, **told)
            return self._pulled()

    def settled(
        self,
        *,
        exchange: float,
        evaluation: float = 0.0,
        scores: Mapping[str, float] | None = None,
        count: int = 0,
    ) -> None:
        """Tell what the last exchange and the evaluation after it were like.

        Args:
            exchange: Seconds, waiting for others left out.
            evaluation: Seconds.
            scores: Sums over the held-out samples, by name.
            count: Held-out samples.
        """
        with self._naming_the_server():
            self._link.send(
                "settled",
                exchange=exchange,
                evaluation=evaluation,
                scores=dict(scores) if scores else None,
                count=count,
            )

    def look(self) -> None:
        """Take in what the server says unasked.

        Raises:
            Interrupted: The run is stopped; its checkpoint is written.
        """
        with self._naming_the_server():
            while self._link.has_word():
                self._refuse_stop(self._link.receive())

    def stop(self, number: int) -> None:
        """Ask the server to stop the run, because of a signal; does not return.

        Raises:
            Interrupted: The checkpoint is written.
        """
        with self._naming_the_server():
            self._told_of_stop = True
            self._link.send("stop", signal=number)
            while True:
                self._answer()

    def bye(self) -> None:
        """Nothing more will be asked; returns when all is written."""
        with self._naming_the_server():
            self._link.send("bye")
            while self._answer().kind != "farewell":
                pass

    def close(self) -> None:
        """Close the connection; without `bye` the server takes this worker for lost."""
        self._ending.set()
        self._link.close()

    def _pulled(self) -> Pulled:
        answer = self._answer()
        assert answer.weights is not None  # noqa: S101 - a round, or the end, has them
        values = answer.values
        ticket = RoundAssignment(**values["ticket"]) if answer.kind == "round" else None
        away = values["wait"] + values["idle"]
        return Pulled(answer.weights, ticket, values["evaluate"], dict(values["scores"]), away)

    def _answer(self) -> Message:
        """The next message that is more than a sign of life."""
        while (message := self._link.receive()).kind == "beat":
            if self._stop.number and not self._told_of_stop:
                self._told_of_stop = True
                self._link.send("stop", signal=self._stop.number)
        self._refuse_stop(message)
        return message

    def _refuse_stop(self, message: Message) -> None:
        if message.kind != "stop":
            return
        number, text = message.values["signal"], message.values["message"]
        raise Interrupted(number, text) if number else DeadlineReached(text)

    def _beat(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            try:
                self._link.send("beat")
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
