"""Keeps a lease: tells the service now and then that the agent is there, and hears its orders.

    agent  --JobProgress--> service
           <--JobOrders---

Whatever an agent says of its job goes through here, so one that has lost the job says nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from batchwright.client.http import Backoff, ServiceError
from batchwright.errors import BatchwrightError
from batchwright.records import Plan, Profile
from batchwright.records.service import JobOrders, JobProgress

BEAT_SECONDS = 2.0  # between two signs of life, at most: a cancelled job stops so soon

_LOST = (401, 403, 404, 409)
"""Answers after which no other will come: the token is not known any more or may not speak of the
job, or the job or its lease is gone. Another agent may have the job, so this one stops."""

Report = Callable[[JobProgress], JobOrders]
"""Tells the service how a job stands; raises `ServiceError`."""


class LeaseEnded(BatchwrightError):  # noqa: N818 - the job is somebody else's now, which is no error
    """The agent is not to work on the job any more."""


class LeaseHeartbeat:
    """The heartbeat of one lease; a context manager.

    Args:
        report: Tells the service.
        key: Of the lease.
        seconds: After which it would be lost.
        stopping: Set when the agent itself is to end.

    Attributes:
        ended: Set when the work is to stop: cancelled, lost, or `stopping`.
        cancelled: Whether the service asked for that.
        lost: Whether the lease is another's, or the service will not hear of it from this agent.
        run: The run that carries out the job, told with the next sign of life.
        trained: Epochs that its newest checkpoint holds, told likewise.
    """

    def __init__(self, report: Report, key: str, seconds: float, stopping: threading.Event) -> None:
        self._report, self._key, self._stopping = report, key, stopping
        self._seconds = min(BEAT_SECONDS, seconds / 4)
        self._over = threading.Event()
        self._lock = threading.Lock()  # one message at a time, so that they arrive in order
        self._told: tuple[str | None, float | None] = (None, None)
        self.run: str | None = None
        self.trained: float | None = None
        self.cancelled = self.lost = False
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(1.0)  # it may wait for an answer, and matters no more

    @property
    def ended(self) -> bool:
        """Whether the work is to stop."""
        return self.cancelled or self.lost or self._stopping.is_set()

    def say(
        self,
        state: str | None = None,
        *,
        profile: Profile | None = None,
        plan: Plan | None = None,
        error: str | None = None,
        reason: str | None = None,
    ) -> JobOrders:
        """Tell how the job stands, until the service has taken it.

        Raises:
            LeaseEnded: The job is not this agent's any more, or the agent is to stop meanwhile.
            ServiceError: The service refuses what is said.
        """
        told: dict[str, Any] = {"state": state, "profile": profile, "plan": plan, "error": error}
        told["reason"] = reason
        backoff = Backoff(0.2, 5.0)
        while not self.lost:
            try:
                return self._send(told)
            except ServiceError as problem:
                if not problem.passing and not self.lost:
                    raise
                wait = backoff.seconds(problem)
            if self._stopping.wait(wait):
                break
        raise LeaseEnded("the lease of the job was lost")

    def give_back(self, *, sent: bool) -> None:
        """Tell that another agent may have the job, if it can be told at once; else the lease runs
        out by itself. ``sent`` is whether the service has the newest checkpoint.
        """
        try:
            self._send({"state": "queued", "sent": sent})
        except ServiceError:
            return

    def _beat(self) -> None:
        """The first one at once: it tells that the lease has arrived."""
        while not self.lost:
            with suppress(ServiceError):  # the next one may get through
                self._send({})
            if self._over.wait(self._seconds):
                return

    def _send(self, told: dict[str, Any]) -> JobOrders:
        with self._lock:
            now = self.run, self.trained
            run, trained = (
                value if value != before else None
                for value, before in zip(now, self._told, strict=True)
            )
            try:
                progress = JobProgress(key=self._key, run=run, trained=trained, **told)
                orders = self._report(progress)
            except ServiceError as problem:
                self.lost = self.lost or problem.status in _LOST
                raise
            self._told = now
            self.cancelled = self.cancelled or orders.stop
        return orders
