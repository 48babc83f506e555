"""A run that goes on in words, the least important of which give way in a narrow terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batchwright.records.text.formatting import duration, number, percent

Word = tuple[int, str]  # rank and text: what has the highest rank is the first to be left out


def left_words(seconds: float) -> str:
    """Time left, in whole seconds: more figures would only flicker."""
    return f"{seconds:.0f} s left" if seconds < 59.5 else f"{duration(seconds)} left"


def step_words(record: Mapping[str, Any], *, simulated: bool) -> list[Word]:
    """How training goes, by a line inside an epoch."""
    speed = "simulated images/s" if simulated else "images/s"
    return _words(
        record,
        ("throughput/samples_per_sec", 3, lambda v: f"{number(v)} {speed}"),
        ("train/loss", 2, lambda v: f"loss {number(v)}"),
        ("lr", 4, lambda v: f"rate {v:.3g}"),
    )


def epoch_words(record: Mapping[str, Any], *, brief: bool, simulated: bool) -> list[Word]:
    """What an epoch was like; ``brief`` on a terminal."""
    clock = " simulated" if simulated else ""
    words = _words(
        record,
        ("train/loss", 3, lambda v: f"loss {number(v)}"),
        ("val/loss", 6, lambda v: f"held-out loss {number(v)}"),
        ("val/top1", 0, lambda v: f"accuracy {percent(v)}{'' if brief else _expected(record)}"),
        ("throughput/samples_per_sec", 5, lambda v: f"{number(v)}{clock} images/s"),
        ("time/epoch_s", 2, lambda v: f"{duration(v)}{clock}"),
    )
    if brief:
        return [word for word in words if word[0] != 6]
    if record.get("time/epoch_s") and record.get("plan/predicted_epoch_s"):
        rank, text = words[-1]
        words[-1] = (rank, f"{text} (predicted {duration(record['plan/predicted_epoch_s'])})")
    return words


def _expected(record: Mapping[str, Any]) -> str:
    """The accuracy that the plan predicted, in parentheses; empty if it did not."""
    ends = [record.get(f"plan/predicted_top1_{end}") for end in ("low", "high")]
    told = [percent(end) for end in ends if end is not None]
    return f" (predicted {' to '.join(told)})" if len(told) == 2 else ""


def _words(
    record: Mapping[str, Any], *shown: tuple[str, int, Callable[[float], str]]
) -> list[Word]:
    return [(rank, say(record[key])) for key, rank, say in shown if record.get(key) is not None]


def joined(words: Iterable[Word], room: int | None = None) -> str:
    """The words in their order; those of the highest rank left out until they fit ``room``."""
    kept = list(words)
    while room is not None and len(kept) > 1 and len(joined(kept)) > room:
        kept.remove(max(kept))
    return ", ".join(text for _, text in kept)


class Pace:
    """How fast epochs go by a clock of the person who waits, whatever time the records tell."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left(self, done: float, total: float, now: float) -> float | None:
        """Seconds until ``total`` epochs are done, by the pace since the first call."""
        if self._first is None or done <= self._first[0]:
            self._first = self._first or (done, now)
            return None
        before, then = self._first
        return (now - then) / (done - before) * (total - done)
