"""Text for a person: pydantic's errors in one line, values shortened, unprintable text escaped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchwright.errors import printable as printable

_SHOWN = 60  # characters of a value that a message shows


def first_problem(error: ValidationError, what: str, place: str = "") -> str:
    """The first problem in a line.

    Args:
        error: What pydantic raised.
        what: Text before the key, such as ``job key ``.
        place: Text after the value, such as `` in job.yaml``.
    """
    problems = error.errors(include_url=False)
    problem = problems[0]
    key = key_of(problem)
    if problem["type"] == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{what}{key} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{what}{key} is unknown"
    # One message for each type that the key may have, and for its parts if it takes several. How
    # pydantic tried it (", unable to parse string as a number") is left out.
    messages = [
        p["msg"].partition(", unable to")[0]
        for p in problems
        if f"{key_of(p)}.".startswith(f"{key}.")
    ]
    texts = [message[0].lower() + message[1:] for message in dict.fromkeys(messages)]
    message = " or ".join(
        [texts[0], *(text.removeprefix("input should be ") for text in texts[1:])]
    )
    return f"{what}{key} = {shorten(problem['input'])}{place}: {message}" if key else message


def key_of(problem: Mapping[str, Any]) -> str:
    """The key that has a problem, nested parts joined by dots."""
    # For a key that takes several types, `loc` also holds the name of one of these types.
    types = ("int", "float", "str")
    return ".".join(
        str(part)
        for part in problem["loc"]
        if isinstance(part, int) or not (set(part) & set("[-") or part in types)
    )


def shorten(value: Any) -> str:
    """The value's `repr`, cut to 60 characters."""
    text = repr(_beginning(value, [_SHOWN]))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _beginning(value: Any, left: list[int]) -> Any:
    """A value without the parts that do not show in ``left`` characters, of which each takes one:
    the `repr` of millions of values would hold Python's lock, and with it other requests.
    """
    left[0] -= 1
    kind = type(value)
    if kind is str:
        return value[: _SHOWN + 1]
    if kind is list or kind is tuple:
        return kind(_beginning(one, left) for one in takewhile(lambda _: left[0] >= 0, value))
    if kind is dict:
        kept = takewhile(lambda _: left[0] >= 0, value.items())
        return {_beginning(key, left): _beginning(one, left) for key, one in kept}
    return value


def described(value: Any) -> str:
    """The type of an argument and its value if that is short, for an error message.

    >>> described(None), described("profile.json"), described(3)
    ('None', "the text 'profile.json'", 'the int 3')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Path):
        return f"the {'text' if isinstance(value, str) else 'path'} {shorten(str(value))}"
    if isinstance(value, int | float | bytes | list | tuple | dict):
        return f"the {type(value).__name__} {shorten(value)}"
    return f"a {type(value).__name__}"  # its repr may be many lines


def to_stderr(line: str) -> None:
    """Print a line on standard error, unprintable characters escaped (`printable`), if it can be
    written: no work is to end because a terminal was closed.
    """
    with suppress(OSError):
        print(printable(line), file=sys.stderr)  # noqa: T201 - a verb shows what it does
