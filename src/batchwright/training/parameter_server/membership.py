"""Which workers take part in a run with a parameter server, and their connections."""

from __future__ import annotations

from time import perf_counter

from batchwright.training.parameter_server.transport import Transport


class Membership:
    """Workers that are connected, lost, gone for good, or have left because they were done.

    Nothing here is safe to call from two threads at once.

    Args:
        workers: Number of workers of the plan.

    Attributes:
        links: Connection of each worker that is connected.
        lost: Time, by `time.perf_counter`, since which each worker is away that may come back.
        gone: Workers that will not come back, unless the run is resumed.
        left: Workers that have left because they were done.
    """

    def __init__(self, workers: int) -> None:
        self.links: dict[int, Transport] = {}
        self.lost: dict[int, float] = {}
        self.gone: set[int] = set()
        self.left: set[int] = set()
        self._workers = workers
        self._awaited: dict[int, float] | None = None  # not come yet: since when another has

    @property
    def absent(self) -> bool:
        """Whether no worker will come any more."""
        return len(self.left | self.gone) == self._workers

    def is_current(self, rank: int, link: Transport) -> bool:
        """Whether the connection is still the worker's own."""
        return self.links.get(rank) is link

    def refuse_replaced(self, rank: int, link: Transport) -> None:
        """Raise `ConnectionError` for a connection that is not the worker's any more."""
        if not self.is_current(rank, link):
            raise ConnectionError(f"this is not the connection of worker {rank} any more")

    def join(self, rank: int, link: Transport) -> None:
        """Add a worker's connection, for the first time or again."""
        if self._awaited is None:
            self._awaited = dict.fromkeys({*range(self._workers)} - self.gone, perf_counter())
        self._awaited.pop(rank, None)
        self.links[rank] = link
        self.lost.pop(rank, None)
        self.gone.discard(rank)
        self.left.discard(rank)

    def cut_off(self, rank: int) -> None:
        """End a worker's connection, if it has one; the thread that receives from it closes it."""
        link = self.links.pop(rank, None)
        if link is not None:
            link.cut()

    def lose(self, rank: int) -> None:
        """Note that a worker is away and may come back."""
        self.lost[rank] = perf_counter()

    def give_up(self, rank: int) -> None:
        """Note that a worker will not come back."""
        self.gone.add(rank)
        self.lost.pop(rank, None)
        if self._awaited is not None:
            self._awaited.pop(rank, None)

    def lost_for(self, seconds: float) -> list[int]:
        """Workers that have been lost, or that the others have waited for, for so many seconds."""
        now, away = perf_counter(), (self._awaited or {}) | self.lost
        return [rank for rank, since in away.items() if now - since >= seconds]
