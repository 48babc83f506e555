"""Times, sizes and rates as people write them: ``2 h 30 min``, ``8 GiB``, ``10 Gbit/s``."""

from __future__ import annotations

import re
from collections.abc import Mapping

NUMBER = r"[0-9]+(?:[.,][0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
AMBIGUOUS = re.compile(r",[0-9]{3}(?![0-9])")
"""A comma as in 8,000, which may mean eight or eight thousand."""
_PARTS = re.compile(rf"\s*({NUMBER})\s*([a-zµ]*)\s*", re.IGNORECASE)
_TIMES = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "µs", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_SIZES = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1.0),
    **{f"{letter}{end}": 1000.0**n for n, letter in enumerate("kmgt", 1) for end in ("b", "")},
    **{f"{letter}ib": 1024.0**n for n, letter in enumerate("kmgt", 1)},
}
_BITS = {
    f"{letter}{end}": 1000.0**n / 8
    for n, letter in enumerate("kmgt", 1)
    for end in ("bit", "bits", "bps")
}


def seconds_of(words: str) -> float | None:
    """Seconds of ``2 h 30 min``, ``90 min``, ``0.2 ms``, ``0s`` or ``5400``; `None`: not a time."""
    return _sum(words, _TIMES)


def bytes_of(words: str) -> int | None:
    """Bytes of ``8 GiB``, ``500MB`` or ``1024``; `None`: not a size.

    >>> bytes_of("8GiB"), bytes_of("8GB"), bytes_of("8 bits")
    (8589934592, 8000000000, None)
    """
    total = _sum(words, _SIZES)
    return max(1, round(total)) if total else None


def rate_of(words: str) -> float | None:
    """Bytes per second of ``1.25 GB/s``, ``10 Gbit/s`` or ``1.25e9``; `None`: not a rate.

    >>> rate_of("1.25 GB/s"), rate_of("10 Gbit/s"), rate_of("10 Gb/s")
    (1250000000.0, 1250000000.0, None)
    """
    amount = re.sub(r"\s*(/\s*s(ec)?|a second|per second)$", "", words, flags=re.IGNORECASE)
    if re.search("[A-Za-z]b$", amount):  # Gb may mean gigabits or gigabytes
        return None
    return _sum(amount, _SIZES | _BITS) or None


def _sum(words: str, units: Mapping[str, float]) -> float | None:
    """The sum of amounts such as ``2 h 30 min``; `None` if the text is anything else."""
    if AMBIGUOUS.search(words):
        return None
    total, place = 0.0, 0
    while place < len(words):
        part = _PARTS.match(words, place)
        if part is None or part[2].lower() not in units:
            return None
        if not part[2] and len(part[0]) < len(words):  # a part without unit: 8 000, 2 h 30
            return None
        total += float(part[1].replace(",", ".")) * units[part[2].lower()]
        place = part.end()
    return total if words and total < 1e18 else None
