"""Which lines of a run count, where a kill has taken what some of them tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from batchwright.records.lines.run_lines import (
    EpochLine,
    EvaluationLine,
    NoteLine,
    RoundLine,
    RunLine,
    SharesLine,
    StepLine,
)


def lines_that_count(lines: Iterable[RunLine]) -> list[RunLine]:
    """Lines of a run, in order, without those of what a kill has taken.

    A run that is killed and resumed goes on from a checkpoint, and trains again what came after it:
    only the last time counts. So an epoch's line ends what later epochs had before it, and those of
    steps, rounds and local batches likewise. A round that takes the place of others ends the epochs
    behind these. Notes stay.

    Args:
        lines: Lines of all kinds as they were written, or of one kind.
    """
    counting: list[RunLine | None] = []
    places: dict[str, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for line in lines:
        ends, lost = _ends(line), len(counting)
        for kind, place in ends:
            while places[kind] and places[kind][-1][0] >= place:
                lost = places[kind].pop()[1]
                counting[lost] = None
        while isinstance(line, RoundLine) and places["epoch"] and places["epoch"][-1][1] > lost:
            counting[places["epoch"].pop()[1]] = None
        for kind, place in ends[:1]:
            places[kind].append((place, len(counting)))
        counting.append(line)
    return [line for line in counting if line is not None]


def newest_epoch(newest_first: Iterable[RunLine]) -> int:
    """The last epoch, zero-based, whose line counts by those of epochs, steps and local batches.

    It is that of `lines_that_count`, which reads all lines. No line before the last epoch's can
    change it.

    Args:
        newest_first: Lines of all kinds, the last one first.

    Returns:
        The epoch; -1: there is none.
    """
    begun = inf  # the earliest epoch that lines behind say to be in progress
    for line in newest_first:
        if isinstance(line, EpochLine):
            return int(min(line.record.epoch, begun - 1))
        if isinstance(line, StepLine | SharesLine):
            begun = min(begun, line.epoch)
        if begun == 0:
            break
    return -1


def _ends(line: RunLine) -> list[tuple[str, tuple[int, ...]]]:
    """The place of a line among those of its kind, first, and places from which on others end."""
    if isinstance(line, NoteLine):
        return []
    if isinstance(line, RoundLine):
        before = line.committed - line.record.samples  # of the rounds that count before it
        return [(line.kind, (line.committed,)), (line.kind, (before + 1,))]
    if isinstance(line, EvaluationLine):  # of two workers the later epoch's may come first
        return [(f"{line.kind} {line.epoch}", ())]
    place: tuple[int, ...]
    if isinstance(line, EpochLine):
        epoch, place = line.record.epoch, (line.record.epoch,)
    else:
        epoch, place = line.epoch, (line.epoch, line.step)
    # The epoch is not over, or was not until now, and no later one has begun.
    return [
        (line.kind, place),
        ("epoch", (epoch,)),
        ("step", (epoch + 1,)),
        ("shares", (epoch + 1,)),
    ]
