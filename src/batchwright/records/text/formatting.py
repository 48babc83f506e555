"""Numbers, times, sizes and estimates as text for a person, in the same way wherever shown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from math import floor, isclose, isfinite, log10
from pathlib import Path

from batchwright.records.base import Estimate
from batchwright.records.registries.data_sources import source_of

HARDLY_KNOWN = 0.5
"""Width of a share's interval beyond which the share is called hardly known."""


def local_batches(sizes: tuple[int, ...]) -> str:
    """Local batches as short text: equal neighbours counted, more than four groups as a range.

    >>> local_batches((32, 32, 32, 32)), local_batches((40, 24)), local_batches((8,))
    ('4 x 32', '40 + 24', '8')
    >>> local_batches((30, 16, 16, 8)), local_batches((12, 11, 10, 9, 8))
    ('30 + 2 x 16 + 8', '8 to 12')
    """
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    if len(runs) > 4:
        return f"{min(sizes)} to {max(sizes)}"
    return " + ".join(f"{count:,} x {size}" if count > 1 else str(size) for size, count in runs)


def sentence(words: str) -> str:
    """Words with a capital and a full stop; empty words stay empty."""
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "thread"), counted(2, "worker")
    ('1 thread', '2 workers')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds as text with about three figures.

    >>> [duration(s) for s in (0, 0.01234, 4.5, 59.99, 200, 3840)]
    ['0 s', '0.0123 s', '4.50 s', '1 min 00 s', '3 min 20 s', '1 h 04 min']
    """
    if seconds < 59.95:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def number(value: float) -> str:
    """A number with three significant figures, without an exponent unless it is tiny.

    >>> [number(v) for v in (0, 0.001234, 0.5, 12.345, 12345.6, float("nan"))]
    ['0', '0.00123', '0.500', '12.3', '12,346', 'nan']
    >>> number(1e-300)
    '1e-300'
    """
    if not value or not isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, 2 - floor(log10(abs(value))))
    return f"{value:,.{decimals}f}" if decimals <= 15 else f"{value:.3g}"


def significant(value: float, digits: int = 3) -> str:
    """A number with at most ``digits`` significant figures, also large ones without exponent.

    >>> [significant(v) for v in (0.5, 12.0, 999.6, 36_012.0)], significant(123.4, 2)
    (['0.5', '12', '1,000', '36,000'], '120')
    """
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def milliseconds(seconds: float, digits: int = 3) -> str:
    """Seconds as milliseconds, with at most ``digits`` significant figures."""
    return f"{significant(1e3 * seconds, digits)} ms"


def size(count: float) -> str:
    """A number of bytes with its unit.

    >>> size(44_865_945), size(3 * 2**30), size(1500), size(89)
    ('42.8 MiB', '3.00 GiB', '1.46 KiB', '89 bytes')
    """
    if abs(count) < 2**10:
        return counted(round(count), "byte")
    unit, scale = _unit(count)
    return f"{number(count / scale)} {unit}"


def _unit(count: float) -> tuple[str, int]:
    return next((u for u in (("GiB", 2**30), ("MiB", 2**20)) if count >= u[1]), ("KiB", 2**10))


def between(estimate: Estimate, unit: str = "") -> str:
    """An estimate with its interval, and ``unit`` behind its value."""
    return f"{number(estimate.value)}{unit} ({number(estimate.low)} to {number(estimate.high)})"


def shares_between(estimate: Estimate) -> str:
    """An estimated share with its interval, in percent; a wide interval is marked.

    >>> shares_between(Estimate(value=0.67, low=0.62, high=0.7))
    '67.0 % (62.0 % to 70.0 %)'
    >>> shares_between(Estimate(value=0.67, low=0.12, high=0.97))
    '67.0 % (hardly known: 12 to 97 %)'
    """
    return f"{percent(estimate.value)} ({share_ends(estimate)})"


def share_ends(estimate: Estimate) -> str:
    """The interval of an estimated share, in percent; a wide one is marked."""
    low, high = percent(estimate.low), percent(estimate.high)
    if estimate.high - estimate.low > HARDLY_KNOWN:  # else the value would be read as a promise
        low, high = f"hardly known: {100 * estimate.low:.0f}", percent(estimate.high, 0)
    return f"{low} to {high}"


def counted_points(share: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * share:.3g} point{'' if isclose(share, 0.01) else 's'}"


def in_seconds(estimate: Estimate | None) -> str:
    """An estimate of seconds with its interval."""
    return "not measured" if estimate is None else between(estimate)


def in_bytes(estimate: Estimate | None) -> str:
    """An estimate of bytes with its interval."""
    if estimate is None:
        return "not measured"
    _, scale = _unit(estimate.value)
    low, high = (number(end / scale) for end in (estimate.low, estimate.high))
    return f"{size(estimate.value)} ({low} to {high})"


def percent(share: float, decimals: int = 1) -> str:
    """A share in percent.

    >>> percent(0.98055), percent(0.98055, 0)
    ('98.1 %', '98 %')
    """
    return f"{100 * share:.{decimals}f} %"


def job_value(value: object) -> str:
    """The JSON value of a job key as text for the command line.

    >>> [job_value(value) for value in (5.0, 0.05, "auto", None, [24, 32])]
    ['5', '0.05', 'auto', 'null', '24,32']
    >>> job_value([{"worker": 0}])
    '[{"worker": 0}]'
    """
    if isinstance(value, list | tuple) and not any(isinstance(one, dict) for one in value):
        return ",".join(map(job_value, value))
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return "null" if value is None else str(value)


def setting_words(keys: Sequence[str], values: Sequence[object]) -> str:
    """A setting of a sweep as on the command line: ``scaling=sqrt warmup_epochs=5``."""
    return " ".join(f"{key}={job_value(value)}" for key, value in zip(keys, values, strict=True))


_ARCHIVE = re.compile(r"\.(zip|tar|tgz|(tar\.)?(gz|bz2|xz))$")


def data_name(data: str) -> str:
    """A short name of a job's data: that of its folder or archive, else the kind of source.

    >>> data_name("imagefolder:/sets/flowers/"), data_name("cifar100:/sets/cifar-100-python")
    ('flowers', 'cifar100')
    >>> data_name("wds:/sets/birds/train-{0..9}.tar"), data_name("s3://bucket/plates.tar.gz?v=2")
    ('birds', 'plates')
    """
    kind, _, place = data.partition(":")
    if not (source_of(data).named_by_folder and place):
        return kind
    elsewhere = "//" in place
    path = Path(place.partition("?")[0])
    if not elsewhere:
        # ~NAME of an unknown user, or a link to itself: opening the data will refuse it.
        with suppress(RuntimeError):
            path = Path(place).expanduser().resolve()
    plain = next((part for part in reversed(path.parts) if not set("{}*[]") & set(part)), "")
    return _ARCHIVE.sub("", plain).strip("/") or kind


def column_blocks(
    widths: Sequence[int], room: int, *, keys: int = 1, gap: int = 2
) -> list[list[int]]:
    """Split a table's columns into blocks that fit a width; blocks are shown below each other.

    Args:
        widths: Widths of the columns, in characters.
        room: Width of a block, in characters. A block of the key columns and one other may exceed
            it.
        keys: Number of first columns that each block repeats.
        gap: Characters between two columns.

    Returns:
        Column indices of each block.

    >>> column_blocks([5, 10, 10, 10], 29), column_blocks([5, 10], 9)
    ([[0, 1, 2], [0, 3]], [[0, 1]])
    """
    blocks = [list(range(min(keys, len(widths))))]
    for at in range(keys, len(widths)):
        block = [*blocks[-1], at]
        wide = sum(widths[i] for i in block) + gap * (len(block) - 1) > room
        if wide and len(block) > keys + 1:
            blocks.append([*range(keys), at])
        else:
            blocks[-1] = block
    return blocks


def source(kind: str, reference: str) -> str:
    """The source of a reason, with its reference if it has one."""
    return f"{kind}: {reference}" if reference else kind
