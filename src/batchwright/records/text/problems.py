"""What pydantic finds wrong with a record, as one line for a person."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError


def first_problem(error: ValidationError, what: str, place: str = "") -> str:
    """The first problem in a line.

    Args:
        error: What pydantic raised.
        what: Stands before the key, such as ``job key ``.
        place: Stands behind the value, such as `` in job.yaml``.
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
    # One message for each type that the key may have, and for its parts if it takes several.
    # Not how it was tried, as in ", unable to parse string as a number".
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
    """The key that has a problem, with a dot before each part."""
    # Of a key that takes several types, the place also has the name of one of them.
    types = ("int", "float", "str")
    return ".".join(
        str(part)
        for part in problem["loc"]
        if isinstance(part, int) or not (set(part) & set("[-") or part in types)
    )


def shorten(value: Any) -> str:
    """A value as Python writes it, 60 characters at most."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def described(value: Any) -> str:
    """What an argument is, for a message about one of another kind.

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
    return f"a {type(value).__name__}"  # its own words may be many lines


def printable(text: str) -> str:
    r"""``text`` with control and direction characters made visible, so that names cannot act.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
