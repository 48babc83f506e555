"""The heartbeat of a lease: tells the service now and then that the agent is there, and receives
its orders.

    agent  --JobProgress--> service
           <--JobOrders---

Every report on a job is sent from here, so that an agent which has lost the job sends no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from batchwright.client.http import Backoff, ServiceError
from batchwright.errors import BatchwrightError
from batchwright.records import Plan, Profile
from batchwright.records.service import JobOrders, JobProgress

BEAT_SECONDS = 2.0  # between two heartbeats, at most: a cancelled job stops after so long
POLL_SECONDS = 0.05  # between two looks whether the work is to end

LOST = (401, 403, 404, 409)
"""Statuses after which the lease is lost: the token is unknown by now or may not report on the job,
or the job or its lease is gone. Another agent may have the job, so this one stops."""

_ENDING = ("done", "failed", "cancelled", "queued")  # states that end the lease

Report = Callable[[JobProgress], JobOrders]
"""Sends a report on a job to the service; raises `ServiceError`."""


class LeaseEnded(BatchwrightError):  # noqa: N818 - the job is another agent's now: no error
    """The agent is not to work on the job any more."""


class LeaseHeartbeat:
    """The heartbeat of one lease; a context manager.

    Args:
        report: Sends a report to the service.
        key: Key of the lease.
        seconds: Length of the lease: without a heartbeat for so long it would be lost.
        stopping: Set when the agent itself is to end.

    Attributes:
        ended: Whether the work is to stop: cancelled, lost, or `stopping` is set.
        cancelled: Whether the service ordered the job to stop.
        lost: Whether another agent has the lease, or the service refuses reports of this agent.
        run: Identifier of the run that carries out the job; sent with the next heartbeat.
        trained: Epochs in the run's newest checkpoint; sent with the next heartbeat.
    """

    def __init__(self, report: Report, key: str, seconds: float, stopping: threading.Event) -> None:
        self._report, self._key, self._stopping = report, key, stopping
        self._seconds = min(BEAT_SECONDS, seconds / 4)
        self._over = threading.Event()
        self._lock = threading.RLock()  # one message at a time, so that they arrive in order
        self._sent: tuple[str | None, float | None] = (None, None)  # newest run and trained
        self.run: str | None = None
        self.trained: float | None = None
        self.cancelled = self.lost = False
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(1.0)  # its request may still be open; the answer matters no more

    @property
    def ended(self) -> bool:
        """Whether the work is to stop."""
        return self.cancelled or self.lost or self._stopping.is_set()

    def check(self) -> None:
        """Return if the work may go on.

        Raises:
            LeaseEnded: The work is to stop.
        """
        if self.ended:
            raise LeaseEnded("the work on the job is to end")

    def wait(self, seconds: float) -> None:
        """Wait, while the work may go on.

        Raises:
            LeaseEnded: The work is to stop.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check()
            time.sleep(POLL_SECONDS)

    def say(
        self,
        state: str | None = None,
        *,
        profile: Profile | None = None,
        plan: Plan | None = None,
        error: str | None = None,
        reason: str | None = None,
    ) -> JobOrders:
        """Report the state of the job, again and again until the service has taken the report.

        Raises:
            LeaseEnded: The job is not this agent's any more, or the agent is to stop meanwhile.
            ServiceError: The service refuses the report.
        """
        backoff = Backoff(0.2, 5.0)
        while not self.lost:
            try:
                return self._send(
                    state=state, profile=profile, plan=plan, error=error, reason=reason
                )
            except ServiceError as problem:
                if not problem.passing and not self.lost:
                    raise
                wait = backoff.seconds(problem)
            if self._stopping.wait(wait):
                break
        raise LeaseEnded("the lease of the job was lost")

    def give_back(self, *, sent: bool) -> None:
        """Give the job back for another agent, in one attempt; without it the lease runs out.

        Args:
            sent: Whether the service has the newest checkpoint.
        """
        with suppress(ServiceError):
            self._send(state="queued", sent=sent)

    def _beat(self) -> None:
        """Send heartbeats; the first one at once, as it shows that the lease has arrived.

        The service may take longer over a report than the lease lasts, as it makes the plan again.
        Meanwhile heartbeats say only that the agent is there, in whatever order they arrive; what
        the answers say, that to the report says, too.
        """
        while not self.lost:
            with suppress(ServiceError):  # the next one may get through
                if self._lock.acquire(blocking=False):
                    try:
                        if not self._over.is_set():
                            self._send()
                    finally:
                        self._lock.release()
                else:
                    self._report(JobProgress(key=self._key))
            if self._over.wait(self._seconds):
                return

    def _send(self, **fields: Any) -> JobOrders:
        """Send a `JobProgress` of ``fields``, with the run and its progress where they are new."""
        with self._lock:
            newest = self.run, self.trained
            run, trained = (
                value if value != before else None
                for value, before in zip(newest, self._sent, strict=True)
            )
            try:
                progress = JobProgress(key=self._key, run=run, trained=trained, **fields)
                orders = self._report(progress)
            except ServiceError as problem:
                self.lost = self.lost or problem.status in LOST
                raise
            self._sent = newest
            self.cancelled = self.cancelled or orders.stop
            if fields.get("state") in _ENDING:
                self._over.set()  # a further heartbeat would be told that the lease was lost
        return orders
