"""Each worker over the epochs of a run: its local batch, its share, and where its time went.

A worker is known by its place, host and device: ranks change hands when a host goes or comes.
Records from before places were told are taken by rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

from batchwright.records import EpochRecord, LocalBatches, RunSummary, WorkerTime
from batchwright.records.text.problems import printable

Part = Literal["input", "compute", "wait", "communication"]
PARTS: tuple[Part, ...] = ("input", "compute", "wait", "communication")
"""What a worker's training time is made of, in the order of a step."""

T = TypeVar("T")
Step = tuple[float, int]  # place in epochs since the start of the run, local batch

_LONGEST = 30  # letters of a label, as many as stand above a small panel


@dataclass(frozen=True)
class Share:
    """A stretch of an epoch with one local batch.

    ``start`` and ``end`` are in epochs since the start of the run; ``step`` is the first step of
    the zero-based ``epoch``; ``share`` is of the global batch, in [0, 1].
    """

    epoch: int
    step: int
    start: float
    end: float
    local_batch_size: int
    share: float


@dataclass(frozen=True)
class WorkerEpoch:
    """Where a worker's time went in one zero-based epoch, in seconds.

    ``wait_seconds`` is ``None`` in records that count waiting as communication; ``whole`` is false
    if part of the epoch ran before a resume.
    """

    epoch: int
    whole: bool
    samples: int
    local_batch_size: int
    input_seconds: float
    compute_seconds: float
    wait_seconds: float | None
    communication_seconds: float
    loading_cpu_seconds: float = 0.0

    def seconds(self, part: Part) -> float:
        """Seconds of one of `PARTS`; 0 for waiting that was not told apart."""
        found: float | None = getattr(self, f"{part}_seconds")
        return found or 0.0


@dataclass(frozen=True)
class WorkerCurve:
    """One worker over the run; ``number`` counts the workers as they came, the first by rank."""

    number: int
    place: str
    shares: tuple[Share, ...]
    epochs: tuple[WorkerEpoch, ...]

    @property
    def label(self) -> str:
        """Number and place, the place's end if it is long: that names the device."""
        if not self.place:
            return f"worker {self.number}"
        place, room = printable(self.place), _LONGEST - len(f"{self.number}: ")
        return f"{self.number}: {place if len(place) <= room else '…' + place[1 - room :]}"

    @property
    def samples(self) -> int:
        """Samples trained on over the run."""
        return sum(one.samples for one in self.epochs)

    def seconds(self, part: Part) -> float:
        """Seconds of one of `PARTS` over the run."""
        return sum(one.seconds(part) for one in self.epochs)

    @property
    def loading_cpu_seconds(self) -> float:
        """Processor time of its loader processes over the run, beside those parts."""
        return sum(one.loading_cpu_seconds for one in self.epochs)


def told_parts(summary: RunSummary) -> tuple[Part, ...]:
    """`PARTS`, without waiting where no record tells it from communication: it names no place."""
    told = any(worker.place for epoch in summary.epochs for worker in epoch.workers)
    return tuple(part for part in PARTS if part != "wait" or told)


def worker_curves(summary: RunSummary) -> list[WorkerCurve]:
    """Every worker that took part in an epoch, in the order they came, those of one by rank."""
    shares: dict[tuple[str, int], list[Share]] = {}
    epochs: dict[tuple[str, int], list[WorkerEpoch]] = {}
    for epoch in summary.epochs:
        names = _names(epoch.workers)
        for rank, (name, worker) in enumerate(zip(names, epoch.workers, strict=True)):
            shares.setdefault(name, []).extend(_shares(epoch, rank))
            epochs.setdefault(name, []).append(
                WorkerEpoch(
                    epoch=epoch.epoch,
                    whole=epoch.whole,
                    samples=worker.samples,
                    local_batch_size=worker.local_batch_size,
                    input_seconds=worker.input_seconds,
                    compute_seconds=worker.compute_seconds,
                    wait_seconds=worker.wait_seconds if worker.place else None,
                    communication_seconds=worker.communication_seconds,
                    loading_cpu_seconds=worker.loading_cpu_seconds,
                )
            )
    return [
        WorkerCurve(number, name[0], tuple(shares[name]), tuple(epochs[name]))
        for number, name in enumerate(epochs)
    ]


def most_different(curves: Sequence[WorkerCurve], most: int) -> list[WorkerCurve]:
    """At most ``most`` workers, evenly from that of the fewest samples to that of the most.

    They come back in their own order.
    """
    ordered = sorted(curves, key=lambda one: (one.samples, one.number))
    return sorted(spread(ordered, most), key=lambda one: one.number)


def spread(things: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the things, both ends among them, evenly spaced.

    >>> spread("abc", 5), spread("abcdefghi", 3)
    (['a', 'b', 'c'], ['a', 'e', 'i'])
    """
    last = len(things) - 1
    if last < most:
        return list(things)
    return [things[at] for at in sorted({round(n * last / (most - 1)) for n in range(most)})]


def step_lines(shares: Iterable[Share]) -> list[list[Step]]:
    """The local batch as lines that go up and down in steps, a new one after each gap."""
    lines: list[list[Step]] = []
    for one in shares:
        begin, end = (one.start, one.local_batch_size), (one.end, one.local_batch_size)
        if not lines or lines[-1][-1][0] != one.start:
            lines.append([begin, end])
        elif lines[-1][-1][1] == one.local_batch_size:
            lines[-1][-1] = end
        else:
            lines[-1] += [begin, end]
    return lines


def changes(shares: Sequence[Share]) -> list[Share]:
    """The first stretch, and every one whose local batch is not that of the one before."""
    later = [b for a, b in pairwise(shares) if a.local_batch_size != b.local_batch_size]
    return [*shares[:1], *later]


def _names(workers: Sequence[WorkerTime]) -> list[tuple[str, int]]:
    """Place of each worker, and how many of the same place come before it.

    The count tells machines of one name apart, and is the rank where no places were told.
    """
    seen: Counter[str] = Counter()
    names = []
    for worker in workers:
        names.append((worker.place, seen[worker.place]))
        seen[worker.place] += 1
    return names


def _shares(epoch: EpochRecord, rank: int) -> list[Share]:
    """The stretches of one epoch of the worker with ``rank``.

    Those of another number of workers, from before a resume, are left out: their places are not
    known. A record without stretches has one, from the local batches at its end.
    """
    whole = LocalBatches(step=0, sizes=tuple(one.local_batch_size for one in epoch.workers))
    told = [one for one in epoch.shares or (whole,) if one.step < epoch.steps]
    ends = [*(one.step for one in told[1:]), epoch.steps]
    return [
        Share(
            epoch=epoch.epoch,
            step=one.step,
            start=epoch.epoch + one.step / epoch.steps,
            end=epoch.epoch + end / epoch.steps,
            local_batch_size=one.sizes[rank],
            share=one.sizes[rank] / (sum(one.sizes) or 1),
        )
        for one, end in zip(told, ends, strict=False)  # an epoch without a step has an end alone
        if len(one.sizes) == len(epoch.workers)
    ]
