"""Counts, times and logs each request. Errors of the middleware within are answered here, and
exceptions that no handler has caught.
"""

from __future__ import annotations

import logging
import time
import uuid

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.service.api.error_responses import answer, problem_of
from batchwright.service.middleware.identify import caller_of

log = logging.getLogger("batchwright.service")

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
REQUEST_ID = "x-request-id"
OURS = 500
"""Statuses from here on are mistakes of the service."""
UNKNOWN_ROUTE = "none"
"""Label of requests without a route; by their paths clients could make up labels."""


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Meters:
    """Metrics of one app; each app has its own, so that those of tests do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "batchwright_requests_total",
            "Requests answered, by method, route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "batchwright_request_seconds",
            "Time to answer, by route.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "batchwright_requests_in_progress",
            "Requests being answered.",
            registry=self.registry,
        )
        self.records = Counter(
            "batchwright_records_total",
            "Records of runs in batches that were accepted.",
            registry=self.registry,
        )
        self.writes = Histogram(
            "batchwright_database_write_seconds",
            "Transactions that write: waiting for their turn, and then.",
            ("part",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "batchwright_database_refused_total",
            "Transactions that write and that the database refused, being locked for example.",
            registry=self.registry,
        )

    def note_write(self, waited: float, took: float | None) -> None:
        """Note the end of a transaction that writes; a `database.engine.WriteMeter`."""
        self.writes.labels("wait").observe(waited)
        if took is None:
            self.refused.inc()
        else:
            self.writes.labels("write").observe(took)


class Observe:
    """Counts, times and logs requests.

    The log has the route, never the path that was requested: a sign-in link is a secret.

    Args:
        app: The application within.
        meters: The app's metrics.
    """

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on, and note the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        status = 0
        started = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        self._meters.in_progress.inc()
        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= OURS:
                log.error("failed", exc_info=error, extra={"fields": {"request_id": request_id}})
            if not status:
                await answer(Request(scope), problem)(scope, receive, watched)
            error.__traceback__ = problem.__traceback__ = None  # it holds the body: see `app`
        finally:
            self._meters.in_progress.dec()
            self._note(scope, status, time.perf_counter() - started, request_id)

    def _note(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        self._meters.requests.labels(method, route, str(status)).inc()
        self._meters.seconds.labels(route).observe(seconds)
        caller = caller_of(scope)
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            "caller": caller.name if caller else None,
            "client": scope["client"][0] if scope.get("client") else None,
            "request_id": request_id,
        }
        log.info("request", extra={"fields": fields})
