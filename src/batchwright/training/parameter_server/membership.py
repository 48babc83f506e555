"""Who takes part in a run with a parameter server, and through which connection."""

from __future__ import annotations

from time import perf_counter

from batchwright.training.parameter_server.transport import Transport


class Membership:
    """Workers that are connected, lost, gone for good, or have left when they had nothing to do.

    Nothing here is safe to call from two threads at once.

    Args:
        workers: How many the plan has.

    Attributes:
        links: The connection of each that is there.
        lost: Since when each that may come back is away, by the clock of this process.
        gone: Those that will not come back, unless a run is resumed.
        left: Those that said that they have nothing more to do.
    """

    def __init__(self, workers: int) -> None:
        self.links: dict[int, Transport] = {}
        self.lost: dict[int, float] = {}
        self.gone: set[int] = set()
        self.left: set[int] = set()
        self._workers = workers

    @property
    def absent(self) -> bool:
        """Whether nobody will come any more."""
        return len(self.left | self.gone) == self._workers

    def speaks(self, rank: int, link: Transport) -> bool:
        """Whether the connection is still the worker's."""
        return self.links.get(rank) is link

    def refuse_replaced(self, rank: int, link: Transport) -> None:
        """Raise `ConnectionError` for a connection that is not the worker's any more."""
        if not self.speaks(rank, link):
            raise ConnectionError(f"this is not the connection of worker {rank} any more")

    def join(self, rank: int, link: Transport) -> None:
        """A worker is there, for the first time or again."""
        self.links[rank] = link
        self.lost.pop(rank, None)
        self.gone.discard(rank)
        self.left.discard(rank)

    def cut_off(self, rank: int) -> None:
        """End a worker's connection, if it has one; whoever receives from it closes it."""
        link = self.links.pop(rank, None)
        if link is not None:
            link.cut()

    def lose(self, rank: int) -> None:
        """A worker is away and may come back."""
        self.lost[rank] = perf_counter()

    def give_up(self, rank: int) -> None:
        """A worker will not come back."""
        self.gone.add(rank)
        self.lost.pop(rank, None)

    def lost_for(self, seconds: float) -> list[int]:
        """Workers that have been lost for so long."""
        now = perf_counter()
        return [rank for rank, since in self.lost.items() if now - since >= seconds]
