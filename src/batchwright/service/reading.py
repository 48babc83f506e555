"""JSON from clients made records: in this process where it is small, else in one of `WORKERS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from batchwright.records.text.problems import shorten
from batchwright.service.problems import Refused
from batchwright.service.processes import WORKERS

Model = TypeVar("Model", bound=BaseModel)

SMALL_BYTES = 64 * 1024
"""What is no larger takes a few milliseconds, even if it is made to take long."""

READ_SECONDS = 20.0
"""In which a large body must have been read; most take some hundredths of a second."""

MOST_PROBLEMS = 1000
"""Found in a body; of more nobody is told the first, since that costs as much as all of them."""


def read(model: type[Model], body: bytes) -> Model:
    """The record in a body. Of a large one the calling thread waits, and nobody else.

    Raises:
        Refused: It is none; the line names the first thing that is wrong.
        TooMany: Others send as large ones just now.
    """
    if len(body) <= SMALL_BYTES:
        return read_json(model, body)
    return WORKERS.call(READ_SECONDS, read_json, model, body)


def read_json(model: type[Model], body: bytes) -> Model:
    """As `read`, in this process."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        if error.error_count() > MOST_PROBLEMS:
            raise Refused(
                f"{error.error_count():,} things are wrong with the body: is it meant for this "
                "address?"
            ) from None
        first = error.errors(include_url=False, include_context=False)[0]
        raise Refused(problem_line(first, ("body", *first["loc"]))) from None


def problem_line(problem: Mapping[str, Any], place: Sequence[int | str]) -> str:
    """What pydantic finds wrong, with its place and value, in one line."""
    name = ".".join(str(part) for part in place[1:]) or str(place[0])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] in ("missing", "extra_forbidden", "json_invalid"):
        told = f"{shorten_name(name)}: {message}"
    else:
        told = f"{shorten_name(name)} = {shorten(problem.get('input'))}: {message}"
    return told.encode("utf-8", "replace").decode()[:MOST_CHARACTERS]


MOST_CHARACTERS = 600
"""Of a line that says what is wrong."""


def shorten_name(name: str) -> str:
    """A place in a body, 120 characters at most: keys come from outside."""
    return name if len(name) <= 120 else name[:117] + "..."
