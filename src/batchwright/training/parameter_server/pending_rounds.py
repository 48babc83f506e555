"""Rounds that have ended and are not in the book yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from batchwright.records import RoundRecord
from batchwright.training.parameter_server.round_log import RoundLog


@dataclass
class _Ended:
    record: RoundRecord
    rate: float
    committed: int
    complete: bool = False


class PendingRounds:
    """Keeps rounds until their workers have said how long the exchange took.

    The book takes them in the order in which they ended.

    Args:
        book: Gets each round once all is known of it and of those before.
    """

    def __init__(self, book: RoundLog) -> None:
        self._book = book
        self._rounds: deque[_Ended] = deque()

    def add(self, record: RoundRecord, rate: float, committed: int) -> None:
        """A round has ended.

        Args:
            record: As far as it is known.
            rate: Learning rate of its last step, per step.
            committed: Samples that the server had from all workers, this round's included.
        """
        self._rounds.append(_Ended(record, rate, committed))

    def note(self, worker: int, **known: float) -> None:
        """Fields of the record of a worker's last round are known."""
        for one in self._open_of(worker):
            one.record = one.record.model_copy(update=known)

    def complete(self, worker: int, **known: float) -> None:
        """All is known of a worker's last round that ever will be."""
        self.note(worker, **known)
        for one in self._open_of(worker):
            one.complete = True
        self._enter()

    def complete_all(self) -> None:
        """Nothing more will be known of any."""
        for one in self._rounds:
            one.complete = True
        self._enter()

    def values(self) -> list[tuple[str, float, int]]:
        """Plain values for a checkpoint."""
        return [(one.record.model_dump_json(), one.rate, one.committed) for one in self._rounds]

    def restore(self, values: Iterable[tuple[str, float, int]]) -> None:
        """Enter what a checkpoint's `values` hold: whoever knew more of them has gone."""
        for text, rate, committed in values:
            record = RoundRecord.model_validate_json(text)
            self._book.add(record, rate=rate, committed=committed, complete=False)

    def _open_of(self, worker: int) -> list[_Ended]:
        """A worker's last round, if something is still missing of it; it can have no two such."""
        return [one for one in self._rounds if one.record.worker == worker and not one.complete]

    def _enter(self) -> None:
        while self._rounds and self._rounds[0].complete:
            one = self._rounds.popleft()
            self._book.add(one.record, rate=one.rate, committed=one.committed)
