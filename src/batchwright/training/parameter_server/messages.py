"""Messages between workers and the parameter server; whole models travel beside them.

worker:  Hello ...  Next  [Trained  Settled]...  Bye        Stop, Beat at any time
server:  Welcome    Round [Round         ]...  Farewell     Refused, Stopped, Beat
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from batchwright.training.parameter_server.merging import Entry
from batchwright.training.parameter_server.rounds import RoundAssignment


@dataclass(frozen=True)
class Hello:
    """Introduction of a worker; worker 0's comes with the first weights.

    Attributes:
        rank: Rank of the worker.
        place: Host and device on which it computes.
        entries: Layout of its model's weights in a message.
        description: What a user of the network must know about its input.
    """

    rank: int
    place: str
    entries: tuple[Entry, ...]
    description: Mapping[str, Any]


@dataclass(frozen=True)
class Welcome:
    """Answer to `Hello`: the worker fits the others."""


@dataclass(frozen=True)
class Refused:
    """Answer to `Hello`: the worker does not fit the others, and ``message`` says why."""

    message: str


@dataclass(frozen=True)
class Next:
    """Request of a worker for its first round."""


@dataclass(frozen=True)
class Trained:
    """End of a worker's round, whose model comes along.

    Attributes:
        steps: Steps of the round.
        skipped: Steps of them whose update was left out, because a gradient was not finite.
        repeated: Steps done again because memory ran out.
        loss: Mean training loss; ``None`` if it is not finite.
        rate: Learning rate of the last step.
        compute: Seconds of training the round.
        peak: Most bytes that the worker's tensors took; 0 if unknown.
    """

    steps: int
    skipped: int
    repeated: int
    loss: float | None
    rate: float
    compute: float
    peak: int = 0


@dataclass(frozen=True)
class Round:
    """Answer to `Next` and `Trained`: the merged model and, while there is one, a round.

    Attributes:
        ticket: The round; ``None``: none is left.
        evaluate: Epoch whose model this worker is to evaluate; ``None``: it is not to.
        scores: Means of the last evaluation, by name; empty before the first.
        wait: Seconds that the worker waited for others.
        idle: Seconds in which the worker had no round left to train.
    """

    ticket: RoundAssignment | None
    evaluate: int | None
    scores: dict[str, float]
    wait: float
    idle: float


@dataclass(frozen=True)
class Settled:
    """Figures of a worker's last exchange, and of the evaluation after it.

    Attributes:
        exchange: Seconds of the exchange, without waiting for others.
        evaluation: Seconds of the evaluation.
        scores: Sums over the held-out samples, by name; empty where none were asked for.
        count: Held-out samples.
    """

    exchange: float
    evaluation: float = 0.0
    scores: Mapping[str, float] | None = None
    count: int = 0


@dataclass(frozen=True)
class Stop:
    """Request of a worker to stop the run, because it was asked to by a signal."""

    signal: int


@dataclass(frozen=True)
class Stopped:
    """End of the run, by a signal or (0) by its deadline; ``message`` says which."""

    signal: int
    message: str


@dataclass(frozen=True)
class Bye:
    """Goodbye of a worker that has nothing more to do."""


@dataclass(frozen=True)
class Farewell:
    """Goodbye of the server, once everything is written."""


@dataclass(frozen=True)
class Beat:
    """A sign of life."""


Message = (
    Hello | Welcome | Refused | Next | Trained | Round | Settled | Stop | Stopped
    | Bye | Farewell | Beat
)  # fmt: skip
_KINDS = {kind.__name__: kind for kind in Message.__args__}


def as_text(message: Message, **beside: Any) -> bytes:
    """A message as JSON text, with more values ``beside`` it; read by `of_text`."""
    named = {"kind": type(message).__name__, "values": asdict(message), **beside}
    return json.dumps(named).encode()


def of_text(text: bytes) -> tuple[Message, dict[str, Any]]:
    """A message, and the values beside it.

    Raises:
        ValueError: The text is no message of `as_text`.
    """
    named = json.loads(text)
    if named.get("kind") not in _KINDS:
        raise ValueError(f"a message of kind {named.get('kind')!r}")
    message: Message = _reader(_KINDS[named["kind"]]).validate_python(named["values"])
    return message, named


@cache
def _reader(kind: type[Message]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
