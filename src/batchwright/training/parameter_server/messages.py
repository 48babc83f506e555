"""What workers and the parameter server say to each other; whole models travel beside it.

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
    """What a worker says of itself when it comes; worker 0 brings the first weights.

    Attributes:
        rank: The worker.
        place: Where it computes.
        samples: Size of its data set.
        plan: That it follows, as JSON text.
        entries: How its model's weights lie in a message.
        description: What a user of the network must know of its input.
    """

    rank: int
    place: str
    samples: int
    plan: str
    entries: tuple[Entry, ...]
    description: Mapping[str, Any]


@dataclass(frozen=True)
class Welcome:
    """A worker fits the others."""


@dataclass(frozen=True)
class Refused:
    """It does not; the message says why."""

    message: str


@dataclass(frozen=True)
class Next:
    """A worker asks for its first round."""


@dataclass(frozen=True)
class Trained:
    """A worker's round has ended, whose model comes along.

    Attributes:
        steps: Updates asked for.
        skipped: Those of them left out because a gradient was not finite.
        repeated: Steps done again because memory ran out.
        loss: Mean training loss; ``None`` if it is not finite.
        rate: Learning rate of the last step.
        compute: Seconds.
        peak: Most bytes that tensors took; 0 if unknown.
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
    """What a worker gets: the merged model and, as long as there is one, a round.

    Attributes:
        ticket: The round; ``None``: there is none left.
        evaluate: The epoch after which this worker is to evaluate the model; ``None``: it is not.
        scores: Means of the last evaluation, by name; empty before the first.
        wait: Seconds that the worker waited for others.
        idle: Seconds in which there was nothing left for it to do.
    """

    ticket: RoundAssignment | None
    evaluate: int | None
    scores: dict[str, float]
    wait: float
    idle: float


@dataclass(frozen=True)
class Settled:
    """What the last exchange and the evaluation after it were like.

    Attributes:
        exchange: Seconds, waiting for others left out.
        evaluation: Seconds.
        scores: Sums over the held-out samples, by name; empty where none were asked for.
        count: Held-out samples.
    """

    exchange: float
    evaluation: float = 0.0
    scores: Mapping[str, float] | None = None
    count: int = 0


@dataclass(frozen=True)
class Stop:
    """A worker was asked to stop, by a signal: all are to stop."""

    signal: int


@dataclass(frozen=True)
class Stopped:
    """The run ends here, by a signal or (0) by its deadline, as the message says."""

    signal: int
    message: str


@dataclass(frozen=True)
class Bye:
    """A worker has nothing more to do."""


@dataclass(frozen=True)
class Farewell:
    """Everything is written."""


@dataclass(frozen=True)
class Beat:
    """A sign of life."""


Message = (
    Hello | Welcome | Refused | Next | Trained | Round | Settled | Stop | Stopped
    | Bye | Farewell | Beat
)  # fmt: skip
_KINDS = {kind.__name__: kind for kind in Message.__args__}


def as_text(message: Message, **beside: Any) -> bytes:
    """A message as JSON, and more values for `of_text`."""
    named = {"kind": type(message).__name__, "values": asdict(message), **beside}
    return json.dumps(named).encode()


def of_text(text: bytes) -> tuple[Message, dict[str, Any]]:
    """A message and what was beside it.

    Raises:
        ValueError: It is none of ours.
    """
    named = json.loads(text)
    if named.get("kind") not in _KINDS:
        raise ValueError(f"a message of kind {named.get('kind')!r}")
    message: Message = _reader(_KINDS[named["kind"]]).validate_python(named["values"])
    return message, named


@cache
def _reader(kind: type[Message]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
