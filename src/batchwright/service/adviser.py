"""Compares runs with their predictions after each epoch and offers advice, in the background."""

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
"""Runs of which is known in what state they were considered last."""

PAUSE_SECONDS = 2.0
"""Minimum time between two looks at a run: many runs with shorter epochs would keep it busy."""

NEWEST_LINES = 16
"""Epoch lines that say whether a run goes as predicted; an epoch may be there twice."""

NEWS = 0.05
"""Relative change of the measured time after which a run is considered again."""


class Adviser(BackgroundQueue):
    """Considers one run at a time; `add` a run that has finished an epoch.

    Planning takes tenths of a second, for which no request may wait, so it is done in the process
    that plans. Runs that wait when the service ends are added again after their next epoch.
    """

    def __init__(self, store: Store) -> None:
        super().__init__("adviser", pause_seconds=PAUSE_SECONDS)
        self._store = store
        # By run: row of the plan, and measured time, when it was considered last.
        self._considered: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def consider(self, run: str) -> Advice | None:
        """Compare a run with its prediction now; returns the advice that it is offered, if any.

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
        """Whether a run is in another row of its plan, or takes another time, than it did when it
        was considered last.
        """
        known = self._considered.pop(run, ("", measured))
        news = known[0] != row or abs(measured / known[1] - 1) > NEWS
        self._considered[run] = (row, measured) if news else known
        while len(self._considered) > REMEMBERED:
            self._considered.popitem(last=False)
        return news

    def _do(self, run: str, /) -> None:
        with suppress(NotFound):  # deleted meanwhile
            self.consider(run)
