"""Lines of metrics.jsonl as they come from outside: checked, so that whoever draws or compares them
later finds numbers where numbers belong, and made text again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from batchwright.service.problems import Refused

LONGEST_NAME = 120
LONGEST_TEXT = 4000
LARGEST = 2**53
"""Whole numbers beyond it are not exact in JSON."""

_KIND = re.compile(r"[a-z][a-z0-9_-]{0,19}\Z")
_COUNTS = frozenset(("epoch", "epochs", "step", "steps", "worker", "round"))
_NUMBERS = frozenset(("lr", "resolution", "samples", "factor", "lead", "committed"))


def checked(record: Mapping[str, Any], sequence: int) -> tuple[str, str]:
    """A line's kind, and its text.

    Raises:
        Refused: It is none that a run writes; the message names ``sequence`` and the key.
    """
    kind = record.get("kind")
    if not isinstance(kind, str) or not _KIND.match(kind):
        raise Refused(f"record {sequence}: its kind is not a short lower-case word")
    for name, value in record.items():
        problem = _problem(name, value)
        if problem:
            raise Refused(f"record {sequence}: {name[:LONGEST_NAME]!r} {problem}")
    return kind, json.dumps(record, separators=(",", ":"))


def _problem(name: str, value: object) -> str:
    """What is wrong with a key and its value; empty if nothing is."""
    if len(name) > LONGEST_NAME:
        return f"is a name of more than {LONGEST_NAME} characters"
    if value is None:
        return ""
    if isinstance(value, str):
        if name in _COUNTS or name in _NUMBERS or ("/" in name and not name.startswith("place/")):
            return "is text where a number belongs"
        return "" if len(value) <= LONGEST_TEXT else f"is longer than {LONGEST_TEXT} characters"
    if isinstance(value, bool):
        return "is a yes or no where a number belongs" if name in _COUNTS or "/" in name else ""
    if isinstance(value, int):
        low = 0 if name in _COUNTS else -LARGEST
        return "" if low <= value <= LARGEST else "is out of range"
    if isinstance(value, float):
        if name in _COUNTS:
            return "is no whole number"
        return "" if isfinite(value) else "is no finite number"
    return "is neither a number nor text"
