"""JSON from clients, checked and made records: where it is large, in a process of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from batchwright.records.text.problems import shorten
from batchwright.service.problems import Refused
from batchwright.service.processes import Workers
from batchwright.service.settings import Limits

P = ParamSpec("P")
T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

SMALL_BYTES = 64 * 1024
"""Up to this size a body takes milliseconds, even one that is made to take long."""

READ_SECONDS = 20.0
"""In which a large body must have been read; most take some hundredths of a second."""

MAX_KEYS = 1000
"""Most keys of one object in a body: pydantic remembers each that it does not know."""

MAX_ESCAPES = 250_000
"""Backslashes in a body."""

_READERS = Workers(most=1)

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SOUND_ESCAPE = re.compile(
    rb"""\\ (?: [^u]
        | u (?! 0000 | [dD][89a-fA-F] ) .{4}            # neither NUL nor a surrogate
        | u [dD][89abAB].. \\u [dD][c-fC-F]..           # a whole pair
    )""",
    re.DOTALL | re.VERBOSE,
)
_EXCEPT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},'))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


def run_apart_if_large(size: int, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """What ``function`` makes of a text of so many bytes. Of a large one the calling thread waits,
    and nobody else.

    Raises:
        Refused: It raised a `BatchwrightError`.
        TooMany: Others send as large ones just now.
    """
    if size <= SMALL_BYTES:
        return function(*given, **named)
    return _READERS.call(READ_SECONDS, function, *given, **named)


def check_json(body: bytes, levels: int, values: int = Limits().values) -> None:
    """Refuse what is no sound JSON text; whether it is JSON at all, its parser says.

    No step of it takes longer than some hundredths of a second for the largest body.

    Raises:
        Refused: It is not UTF-8, holds NUL or half a surrogate pair, is too deeply nested, or holds
            too many values or escapes.
    """
    escapes = body.count(b"\\")
    if escapes > MAX_ESCAPES:
        raise Refused(f"the body holds {escapes:,} escapes, where {MAX_ESCAPES:,} are taken")
    # Each value has a key at most, and each of these two quotes.
    if body.count(b'"') > 4 * values + escapes:
        raise Refused(f"the body holds more than {values:,} values: send less at once")
    try:
        body.decode()
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8") from None
    if b"\0" in body:
        raise Refused("the body holds NUL")
    if b"\\u" in body and b"\\" in _SOUND_ESCAPE.sub(b"", body):
        raise Refused("the body holds NUL or half of a surrogate pair, as an escape")
    if escapes:
        body = _ESCAPE.sub(b"", body)
    # Two quotes in a row open and close, or close and open: without them nothing changes sides.
    structure = body.translate(None, _EXCEPT_STRUCTURE).replace(b'""', b"")
    outside = b"".join(structure.split(b'"')[::2])
    if len(outside) - outside.count(b"]") - outside.count(b"}") > values:
        raise Refused(f"the body holds more than {values:,} values: send less at once")
    if _is_deeper(outside.translate(_AS_LISTS, b","), levels):
        raise Refused(
            f"the body has more than {levels} levels of lists and objects, or brackets that do "
            "not match"
        )


def _is_deeper(brackets: bytes, levels: int) -> bool:
    """Whether brackets nest deeper; also if they do not match.

    Each turn takes away the innermost pairs, so that as many turns are needed as there are levels.
    Byte by byte it would take a second for a large body.
    """
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def read(model: type[Model], body: bytes) -> Model:
    """The record in a body, read `aside`.

    Raises:
        Refused: It is none; the line names the first thing that is wrong.
        TooMany: As there.
    """
    return run_apart_if_large(len(body), read_json, model, body)


def read_json(model: type[Model], body: bytes) -> Model:
    """`read`, in this process."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    waiting = [values] if isinstance(values, dict | list) else []
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and len(one) > MAX_KEYS:
            raise Refused(f"the body holds an object of {len(one):,} keys, where none has many")
        inner = one.values() if isinstance(one, dict) else one
        waiting += [part for part in inner if isinstance(part, dict | list)]
    try:
        return model.model_validate(values)
    except ValidationError as error:
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
    return told.encode("utf-8", "replace").decode()[:MAX_CHARACTERS]


MAX_CHARACTERS = 1000
"""Longest line that says what is wrong."""


def shorten_name(name: str) -> str:
    """A place in a body, 120 characters at most: keys come from outside."""
    return name if len(name) <= 120 else name[:117] + "..."
