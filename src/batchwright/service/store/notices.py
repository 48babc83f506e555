"""What a webhook is to be told: found in the tables, kept until it was told or given up.

Nothing is told of from where it happens, so nobody who reports or asks ever waits for it, and what
happened while the service was away is found as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from batchwright.records.service import Event, Notice
from batchwright.service.database.tables import jobs, notices, runs
from batchwright.service.settings import DAY
from batchwright.service.store.part import Part

LOOK_BACK_SECONDS = 3600.0
"""Age from which an event is told of no more, as when there was no webhook then."""

WAITS = (10.0, 60.0, 300.0, 1800.0, 7200.0)
"""Seconds after each time that the webhook did not take a notice; then it is given up."""

CLAIM_SECONDS = 60.0
"""In which who sends a notice has come to an end; then another service may send it."""

KEPT_SECONDS = 30 * DAY
"""How long it is remembered what was told."""

_MOST = 100  # notices that are sent in a row
_MAX_DETAIL = 2000


class Due(NamedTuple):
    """A notice to be told now."""

    key: str
    notice: Notice
    tries: int
    """Before this one."""


_KEYS = select(notices.c.key)


def _key(event: Event, subject: str, mark: object = "") -> str:
    """Key of an event: with an equal key it is noted once."""
    return f"{event}:{subject}:{mark}"[:120]


class Notices(Part):
    """The table of notices; without a webhook nothing is noted."""

    def note(self, event: Event, subject: str, mark: object, name: str, detail: str) -> None:
        """Note that something happened, unless it is noted already.

        Args:
            event: What.
            subject: Identifier of the job or run.
            mark: Tells it from another time that the same happened.
            name: Of the job or run.
            detail: For people.
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
        told = {"body": notice.model_dump_json(), "created": now, "tries": 0, "due": now}
        with suppress(IntegrityError):  # another service was quicker
            self._write(insert(notices).values(key=key, **told))

    def look(self) -> None:
        """Note the jobs that have failed and the runs that have fallen silent."""
        now = self._clock()
        known = {row.key for row in self._read(_KEYS.where(notices.c.created > now - DAY))}
        failed = select(jobs.c.id, jobs.c.name, jobs.c.error).where(
            jobs.c.state == "failed", jobs.c.changed > now - LOOK_BACK_SECONDS
        )
        for job in self._read(failed):
            if _key("job.failed", job.id) not in known:
                told = job.error or "no reason is known"
                self.note("job.failed", job.id, "", job.name, told)
        silent = now - self._settings.silent_seconds
        wanted = select(runs.c.id, runs.c.name, runs.c.changed).where(
            runs.c.outcome.is_(None),
            runs.c.changed.between(silent - LOOK_BACK_SECONDS, silent),
        )
        for run in self._read(wanted):
            mark = f"{run.changed:.0f}"
            if _key("run.silent", run.id, mark) not in known:
                told = f"nothing was heard of it for {self._settings.silent_seconds:.0f} s"
                self.note("run.silent", run.id, mark, run.name, told)

    def due(self) -> Iterable[Due]:
        """Each notice that is to be told now; no other service tells it meanwhile."""
        now = self._clock()
        for row in self._read(select(notices).where(notices.c.due <= now).limit(_MOST)):
            mine = update(notices).where(notices.c.key == row.key, notices.c.due == row.due)
            if self._write(mine.values(due=self._clock() + CLAIM_SECONDS)):
                yield Due(row.key, Notice.model_validate_json(row.body), row.tries)

    def told(self, key: str) -> None:
        """The webhook has taken it."""
        self._write(update(notices).where(notices.c.key == key).values(due=None))

    def not_told(self, due: Due) -> bool:
        """The webhook has not taken it; returns whether it is tried again."""
        again = due.tries < len(WAITS)
        next_time = self._clock() + WAITS[due.tries] if again else None
        one = update(notices).where(notices.c.key == due.key)
        self._write(one.values(tries=due.tries + 1, due=next_time))
        return again

    def forget_old(self) -> None:
        """Forget what was told long ago."""
        self._write(delete(notices).where(notices.c.created < self._clock() - KEPT_SECONDS))
