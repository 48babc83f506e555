"""JSON from clients, checked and parsed into records; a large text in a process of its own."""

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
"""Size up to which a body is parsed within milliseconds, even one that was made to take long."""

READ_SECONDS = 20.0
"""Maximum time to parse a large body; most take some hundredths of a second."""

MAX_KEYS = 1000
"""Maximum keys of one object in a body: pydantic remembers each that it does not know."""

MAX_ESCAPES = 250_000
"""Maximum backslashes in a body."""

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
    """Call a function that parses a text: in a process of its own if the text is large, so that
    only the calling thread waits.

    Args:
        size: Bytes of the text.
        function: The function; returns what this returns.
        *given: Its positional arguments.
        **named: Its keyword arguments.

    Raises:
        Refused: The function raised a `BatchwrightError`.
        TooMany: Too many large texts are being parsed.
        Unavailable: Parsing took too long, or the system ended the process.
    """
    if size <= SMALL_BYTES:
        return function(*given, **named)
    return _READERS.call(READ_SECONDS, function, *given, **named)


def check_json(body: bytes, levels: int, values: int = Limits().values) -> None:
    """Refuse JSON text that would take its parser too much time or memory, or holds text that no
    database can store. Whether the text is JSON at all is left to the parser.

    No step takes longer than some hundredths of a second for the largest body.

    Args:
        body: The text.
        levels: Maximum levels of lists and objects.
        values: Maximum number of values.

    Raises:
        Refused: The text is not UTF-8, holds NUL or half a surrogate pair, is too deeply nested, or
            holds too many values or escapes.
    """
    escapes = body.count(b"\\")
    if escapes > MAX_ESCAPES:
        raise Refused(f"the body holds {escapes:,} escapes, where {MAX_ESCAPES:,} are taken")
    # A value has one key at most, and each of the two has two quotes.
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
    # Two adjacent quotes open and close a string, or close and open one: what is outside of strings
    # stays outside without them.
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
    """Whether brackets are nested in more than ``levels``, or do not match.

    Each turn removes the innermost pairs, so as many turns are needed as there are levels. Counting
    byte by byte would take a second for a large body.
    """
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def read(model: type[Model], body: bytes) -> Model:
    """The record in a body, parsed by `run_apart_if_large`.

    Raises:
        Refused: The body is no such record; the line names the first mistake.
        TooMany: Too many large bodies are being parsed.
        Unavailable: Parsing took too long, or the system ended the process.
    """
    return run_apart_if_large(len(body), read_json, model, body)


def read_json(model: type[Model], body: bytes) -> Model:
    """The record in a body, parsed in this process.

    Raises:
        Refused: The body is no such record; the line names the first mistake.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    unchecked = [values] if isinstance(values, dict | list) else []
    while unchecked:
        one = unchecked.pop()
        if isinstance(one, dict) and len(one) > MAX_KEYS:
            raise Refused(f"the body holds an object of {len(one):,} keys, where none has many")
        inner = one.values() if isinstance(one, dict) else one
        unchecked += [part for part in inner if isinstance(part, dict | list)]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise Refused(problem_line(first, ("body", *first["loc"]))) from None


def problem_line(problem: Mapping[str, Any], place: Sequence[int | str]) -> str:
    """A mistake that pydantic found, with its place and value, in one line.

    Args:
        problem: The mistake, of `ValidationError.errors`.
        place: Keys that lead to the value; the first one is ``body`` or ``query``.
    """
    name = ".".join(str(part) for part in place[1:]) or str(place[0])
    name = name if len(name) <= 120 else name[:117] + "..."  # keys come from clients
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] not in ("missing", "extra_forbidden", "json_invalid"):
        name = f"{name} = {shorten(problem.get('input'))}"
    return f"{name}: {message}".encode("utf-8", "replace").decode()[:MAX_CHARACTERS]


MAX_CHARACTERS = 1000
"""Maximum characters of a line that describes a mistake."""
