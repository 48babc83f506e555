"""For how long this process has heard all reports, by a clock that nobody set.

Silence may be a break of its own: while the process stood still, or the database was locked, no
report was stored; and once the wall clock is set, the times of former reports are wrong. Runs that
go on report again within seconds, so none is called silent for a while after a break. The start of
the process is one: before it there was nobody to hear them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

CLOCK_SECONDS = 1.0
"""By how much the wall clock may gain or lose between two looks; if it does more, it was set."""


class Listening:
    """Notes breaks. Safe to use from several threads.

    Args:
        clock: Unix time in seconds.
        steady: Seconds, by a clock that never jumps.
        away: Returns for how many seconds, so far, no report could be stored.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        steady: Callable[[], float],
        away: Callable[[], float],
    ) -> None:
        self._clock, self._steady, self._away = clock, steady, away
        self._lock = threading.Lock()
        self._broken = steady()  # when a break was seen last
        self._ahead, self._missed = clock() - self._broken, away()

    def seconds(self) -> float:
        """Seconds since the last break. It counts from the first call after it, so this is to be
        called often.
        """
        with self._lock:
            steady, missed = self._steady(), self._away()
            ahead = self._clock() - steady
            if missed > self._missed or abs(ahead - self._ahead) > CLOCK_SECONDS:
                self._broken = steady
            self._ahead, self._missed = ahead, missed
            return steady - self._broken
