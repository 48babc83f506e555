"""Lines of metrics.jsonl as they come from outside: checked, so that whoever draws or compares them
later finds numbers where numbers belong, and made text again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from typing import Any, Literal

from pydantic_core import to_json

from batchwright.service.problems import Refused

LONGEST_NAME = 120
LONGEST_TEXT = 4000
MOST_KEYS = 8000
LONGEST_LINE = 256 * 1024
"""Characters of a whole line: an epoch of a thousand workers has some 200,000."""
LARGEST = 2**53
"""Whole numbers beyond it are not exact in JSON."""

_MOST_KNOWN_KEYS = 512
_MOST_KNOWN_CHARACTERS = 16 * 1024

_KIND = re.compile(r"[a-z][a-z0-9_-]{0,19}\Z")
_COUNTS = frozenset(("epoch", "epochs", "step", "steps", "worker", "round"))
_NUMBERS = frozenset(("lr", "resolution", "samples", "factor", "lead", "committed"))

Holds = Literal["count", "number", "anything", "too long"]


def checked(record: Mapping[str, Any], sequence: int) -> tuple[str, str]:
    """A line's kind, and its text.

    Raises:
        Refused: It is none that a run writes; the message names ``sequence`` and the key.
    """
    kind = record.get("kind")
    if not isinstance(kind, str) or not _KIND.match(kind):
        raise Refused(f"record {sequence}: its kind is not a short lower-case word")
    if len(record) > MOST_KEYS:
        raise Refused(f"record {sequence}: {len(record):,} keys, where {MOST_KEYS:,} are taken")
    for name, holds, value in zip(record, _shape(tuple(record)), record.values(), strict=True):
        # Most values are numbers where numbers belong: of those, no more is asked.
        if holds == "number" and type(value) in (float, int) and -LARGEST <= value <= LARGEST:
            continue
        problem = _problem(holds, value)
        if problem:
            raise Refused(f"record {sequence}: {name[:LONGEST_NAME]!r} {problem}")
    text = to_json(record).decode()
    if len(text) > LONGEST_LINE:
        raise Refused(
            f"record {sequence}: {len(text):,} characters, where {LONGEST_LINE:,} are taken"
        )
    return kind, text


def _shape(names: tuple[str, ...]) -> tuple[Holds, ...]:
    """What the values of a line with these keys may be.

    Most lines of a run have the same keys, so that is remembered; but only little, since the names
    come from outside.
    """
    small = len(names) <= _MOST_KNOWN_KEYS and sum(map(len, names)) <= _MOST_KNOWN_CHARACTERS
    return _shape_of(names) if small else _shape_of.__wrapped__(names)


@lru_cache(maxsize=128)
def _shape_of(names: tuple[str, ...]) -> tuple[Holds, ...]:
    return tuple(map(_holds, names))


def _holds(name: str) -> Holds:
    """What a key's value may be; `null` always may."""
    if len(name) > LONGEST_NAME:
        return "too long"
    if name in _COUNTS:
        return "count"
    if name in _NUMBERS or ("/" in name and not name.startswith("place/")):
        return "number"
    return "anything"


def _problem(holds: Holds, value: object) -> str:
    """What is wrong with a value; empty if nothing is."""
    if holds == "too long":
        return f"is a name of more than {LONGEST_NAME} characters"
    if value is None:
        return ""
    if isinstance(value, str | bool) and holds != "anything":
        return "is no number, where one belongs"
    if isinstance(value, str):
        return "" if len(value) <= LONGEST_TEXT else f"is longer than {LONGEST_TEXT} characters"
    if isinstance(value, int):
        least = 0 if holds == "count" else -LARGEST
        return "" if least <= value <= LARGEST else "is out of range"
    if isinstance(value, float):
        if holds == "count":
            return "is no whole number"
        return "" if isfinite(value) else "is no finite number"
    return "is neither a number nor text"
