"""The table of notices to a webhook: events that `look` finds in other tables, kept until they were
sent or given up.

As events are found by looking, no request waits for a notice, and what happened while the service
was away is found as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import delete, select, update

from batchwright.records.service import Event, Notice
from batchwright.service.database.tables import jobs, notices, runs
from batchwright.service.settings import DAY
from batchwright.service.store.part import Part

LOOK_BACK_SECONDS = 3600.0
"""Age of an event from which it is not noted any more, as when there was no webhook then."""

WAITS = (10.0, 60.0, 300.0, 1800.0, 7200.0)
"""Seconds to wait after each attempt that failed; after one more the notice is given up."""

CLAIM_SECONDS = 60.0
"""For which a notice is left to the process that sends it; then another process may send it."""

KEPT_SECONDS = 30 * DAY
"""For how long the row of a notice stays, so that its event is not noted again."""

_MOST = 100  # notices that are sent in a row
_MAX_DETAIL = 2000  # characters


class DueNotice(NamedTuple):
    """A notice to be sent now."""

    key: str
    notice: Notice
    tries: int
    """Number of attempts before."""


_KEYS = select(notices.c.key)


def _key(event: Event, subject: str, mark: object = "") -> str:
    """Key of an event, which is noted once."""
    return f"{event}:{subject}:{mark}"[:120]


class Notices(Part):
    """The table of notices; without a webhook nothing is noted."""

    def note(self, event: Event, subject: str, mark: object, name: str, detail: str) -> None:
        """Note an event, unless it is noted already.

        Args:
            event: Kind of the event.
            subject: Identifier of the job or run.
            mark: Distinguishes events of the same kind and subject.
            name: Name of the job or run.
            detail: What happened, for people.
        """
        key = _key(event, subject, mark)
        if self._settings.webhook is None or self._read(_KEYS.where(notices.c.key == key)):
            return
        now, page = self._clock(), "jobs" if event == "job.failed" else "runs"
        notice = Notice(
            id=str(uuid.uuid4()),
            event=event,
            created=now,
            subject=subject,
            name=name,
            detail=" ".join(detail.split())[:_MAX_DETAIL],
            path=f"/{page}/{subject}",
        )
        row = {"key": key, "body": notice.model_dump_json(), "created": now, "tries": 0, "due": now}
        self._write(self._insert_if_new(notices, **row))

    def look(self) -> None:
        """Note the jobs that have failed and the runs that have fallen silent."""
        now = self._clock()
        heard = self._listening.seconds()
        known = {row.key for row in self._read(_KEYS.where(notices.c.created > now - DAY))}
        failed = select(jobs.c.id, jobs.c.name, jobs.c.error).where(
            jobs.c.state == "failed", jobs.c.changed > now - LOOK_BACK_SECONDS
        )
        for job in self._read(failed):
            if _key("job.failed", job.id) not in known:
                detail = job.error or "no reason is known"
                self.note("job.failed", job.id, "", job.name, detail)
        if heard <= self._settings.silent_seconds:
            return  # runs that go on were not heard of either, or their times are wrong
        silent = now - self._settings.silent_seconds
        wanted = select(runs.c.id, runs.c.name, runs.c.changed).where(
            runs.c.outcome.is_(None),
            runs.c.changed.between(silent - LOOK_BACK_SECONDS, silent),
        )
        for run in self._read(wanted):
            mark = f"{run.changed:.0f}"
            if _key("run.silent", run.id, mark) not in known:
                detail = f"nothing was heard of it for {self._settings.silent_seconds:.0f} s"
                self.note("run.silent", run.id, mark, run.name, detail)

    def due(self) -> Iterable[DueNotice]:
        """The notices to be sent now, each claimed, so that no other process sends it meanwhile."""
        now = self._clock()
        for row in self._read(select(notices).where(notices.c.due <= now).limit(_MOST)):
            unclaimed = update(notices).where(notices.c.key == row.key, notices.c.due == row.due)
            if self._write(unclaimed.values(due=self._clock() + CLAIM_SECONDS)):
                yield DueNotice(row.key, Notice.model_validate_json(row.body), row.tries)

    def sent(self, key: str) -> None:
        """Note that the webhook has taken a notice."""
        self._write(update(notices).where(notices.c.key == key).values(due=None))

    def not_sent(self, due: DueNotice) -> bool:
        """Note that the webhook has not taken a notice; returns whether it will be sent again."""
        again = due.tries < len(WAITS)
        next_time = self._clock() + WAITS[due.tries] if again else None
        row = update(notices).where(notices.c.key == due.key)
        self._write(row.values(tries=due.tries + 1, due=next_time))
        return again

    def forget_old(self) -> None:
        """Delete the rows of notices of `KEPT_SECONDS` ago."""
        self._write(delete(notices).where(notices.c.created < self._clock() - KEPT_SECONDS))
