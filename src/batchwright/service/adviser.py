"""Looks at runs after their epochs and offers advice, beside whoever takes in the records."""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress

from batchwright.errors import BatchwrightError, one_line
from batchwright.records.service import Advice
from batchwright.service.background_queue import BackgroundQueue
from batchwright.service.plan_answers import advised, refuse_costly
from batchwright.service.problems import NotFound
from batchwright.service.store import Store
from batchwright.workflows.drift import drift_of

log = logging.getLogger("batchwright.service")

REMEMBERED = 10_000
"""Runs of which is known what was last thought about."""

PAUSE_SECONDS = 2.0
"""Between two looks at a run, at least: many runs with epochs of less would keep it busy."""

NEWEST_LINES = 16
"""Epoch lines that say whether a run goes as predicted; an epoch may be there twice."""

NEWS = 0.05
"""Change of the measured time that makes thinking again worth while, as a share."""


class Adviser(BackgroundQueue):
    """Thinks about one run at a time; `add` one that has finished an epoch.

    Planning takes tenths of a second: a reporter must not wait for that, nor whoever else asks, so
    it happens in the process that plans. What was not thought about when the service ends comes
    again with the next epoch.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(self._think, "adviser", pause_seconds=PAUSE_SECONDS)
        self._store = store
        self._thought: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def consider(self, run: str) -> Advice | None:
        """Think about a run now; returns the advice that it was offered, if any.

        Raises:
            NotFound: There is no such run.
        """
        info = self._store.runs.get(run)
        if info.state == "finished":
            return None
        plan = self._store.runs.plan(run)
        newest = self._store.records.newest_epochs(run, NEWEST_LINES)
        drift = drift_of(plan, newest)
        if (
            drift is None
            or not drift.beyond
            or not self._is_news(run, str(drift.stage), drift.measured)
        ):
            return None
        row = plan.stage_of(drift.done - 1)
        self._store.notices.note("prediction.missed", run, row, info.name, str(drift))
        profile = self._store.runs.profile(run)
        if profile is None and info.job is not None:
            with suppress(NotFound):
                profile = self._store.jobs.profile(info.job)
        if profile is None:
            return None
        offered = self._store.advice.list(run)
        try:
            refuse_costly(plan.job, [profile])
            offer = advised(plan, profile, self._store.records.epochs(run), offered)
        except BatchwrightError as error:  # the run is fine, and goes on as it is
            log.info("no advice", extra={"fields": {"run": run, "why": one_line(error)}})
            return None
        if offer is None:
            return None
        advice = self._store.advice.offer(run, offer.epoch, offer.reason, offer.plan)
        self._store.audit.note("service", "advice.offer", run, offer.reason)
        return advice

    def _is_news(self, run: str, row: str, measured: float) -> bool:
        """Whether the run is not as it was when it was thought about last."""
        known = self._thought.pop(run, ("", measured))
        news = known[0] != row or abs(measured / known[1] - 1) > NEWS
        self._thought[run] = (row, measured) if news else known
        while len(self._thought) > REMEMBERED:
            self._thought.popitem(last=False)
        return news

    def _think(self, run: str) -> None:
        with suppress(NotFound):  # deleted meanwhile
            self.consider(run)
