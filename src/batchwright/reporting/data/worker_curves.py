"""Each worker over the epochs of a run: its local batch, its share, and its times.

A worker is identified by its place, that is host and device, since ranks may change when a host
leaves or joins. In older records without places it is identified by rank.
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
"""Parts of a worker's training time, in the order of a step."""

T = TypeVar("T")
Step = tuple[float, int]  # place in epochs since the start of the run, local batch

_LONGEST = 30  # letters of a label, so that it fits above a small panel


@dataclass(frozen=True)
class Share:
    """A stretch of an epoch with one local batch.

    Attributes:
        epoch: The epoch, zero-based.
        step: First step of the stretch in this epoch, zero-based.
        start: Start of the stretch, in epochs since the start of the run.
        end: End of the stretch, in epochs since the start of the run.
        local_batch_size: Samples per step of the worker.
        share: The worker's share of the global batch, in [0, 1].
    """

    epoch: int
    step: int
    start: float
    end: float
    local_batch_size: int
    share: float


@dataclass(frozen=True)
class WorkerEpoch:
    """How a worker spent its time in one zero-based epoch, in seconds.

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
        """Seconds of one of `PARTS`; 0 for waiting that was counted as communication."""
        found: float | None = getattr(self, f"{part}_seconds")
        return found or 0.0


@dataclass(frozen=True)
class WorkerCurve:
    """One worker over the run; ``number`` is its number in the order of `worker_curves`."""

    number: int
    place: str
    shares: tuple[Share, ...]
    epochs: tuple[WorkerEpoch, ...]

    @property
    def label(self) -> str:
        """Number and place; of a long place only the end, which names the device."""
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
        """Processor seconds of its loader processes over the run, not part of `PARTS`."""
        return sum(one.loading_cpu_seconds for one in self.epochs)


def recorded_parts(summary: RunSummary) -> tuple[Part, ...]:
    """`PARTS`, without waiting if the records count it as communication: these have no places."""
    places_known = any(worker.place for epoch in summary.epochs for worker in epoch.workers)
    return tuple(part for part in PARTS if part != "wait" or places_known)


def worker_curves(summary: RunSummary) -> list[WorkerCurve]:
    """Every worker that took part in an epoch: in order of the first epoch, and then of rank."""
    shares: dict[tuple[str, int], list[Share]] = {}
    epochs: dict[tuple[str, int], list[WorkerEpoch]] = {}
    for epoch in summary.epochs:
        names = _names(epoch.workers)
        for name, worker, own in zip(names, epoch.workers, _shares(epoch), strict=True):
            shares.setdefault(name, []).extend(own)
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
    """At most ``most`` workers, evenly spaced from the fewest samples to the most."""
    ordered = sorted(curves, key=lambda one: (one.samples, one.number))
    return sorted(spread(ordered, most), key=lambda one: one.number)


def spread(things: Sequence[T], most: int) -> list[T]:
    """At most ``most`` (two or more) of the things, evenly spaced, with both ends.

    >>> spread("abc", 5), spread("abcdefghi", 3)
    (['a', 'b', 'c'], ['a', 'e', 'i'])
    """
    last = len(things) - 1
    if last < most:
        return list(things)
    return [things[at] for at in sorted({round(n * last / (most - 1)) for n in range(most)})]


def step_lines(shares: Iterable[Share]) -> list[list[Step]]:
    """The local batch as step lines; a new line begins after each gap."""
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
    """The first stretch, and every one whose local batch differs from the previous one's."""
    later = [b for a, b in pairwise(shares) if a.local_batch_size != b.local_batch_size]
    return [*shares[:1], *later]


def _names(workers: Sequence[WorkerTime]) -> list[tuple[str, int]]:
    """Place of each worker, and the number of workers before it with the same place.

    The number distinguishes machines of the same name, and is the rank in records without places.
    """
    seen: Counter[str] = Counter()
    names = []
    for worker in workers:
        names.append((worker.place, seen[worker.place]))
        seen[worker.place] += 1
    return names


def _shares(epoch: EpochRecord) -> list[list[Share]]:
    """The stretches of one epoch of each worker, in rank order.

    Stretches with another number of workers, from before a resume, are left out, since the places
    of these workers are unknown. In a record without stretches the epoch is one, with the local
    batches at its end.
    """
    whole = LocalBatches(step=0, sizes=tuple(one.local_batch_size for one in epoch.workers))
    stretches = [one for one in epoch.shares or (whole,) if one.step < epoch.steps]
    ends = [*(one.step for one in stretches[1:]), epoch.steps]
    kept = [
        (one, end, sum(one.sizes) or 1)  # added up once, not for each of thousands of workers
        # Not strict: an epoch without steps has no stretch, but an end.
        for one, end in zip(stretches, ends, strict=False)
        if len(one.sizes) == len(epoch.workers)
    ]
    return [
        [
            Share(
                epoch=epoch.epoch,
                step=one.step,
                start=epoch.epoch + one.step / epoch.steps,
                end=epoch.epoch + end / epoch.steps,
                local_batch_size=one.sizes[rank],
                share=one.sizes[rank] / total,
            )
            for one, end, total in kept
        ]
        for rank in range(len(epoch.workers))
    ]
