"""Who asks, and whether too often.

What is asked of a known token counts against that token; everything else, requests with unknown
tokens too, against the address that it comes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchwright.service.access import COOKIE
from batchwright.service.problems import TooMany
from batchwright.service.settings import Limits
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller

MOST_KEYS = 10_000
"""Tokens and addresses whose rate is remembered."""

LONGEST_SECRET = 200
"""Characters; what is longer cannot be one of ours, and is not hashed."""


class Identify:
    """Puts who asks into a request's state: as `caller` by token, as `visitor` by cookie."""

    def __init__(
        self,
        app: ASGIApp,
        store: Store,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._store = store
        self._rates = Rates(limits.requests_per_second, limits.burst, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find out who asks, then go on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        address = f"address {request.client.host if request.client else ''}"
        caller = visitor = None
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        token = secret.strip() if kind.lower() == "bearer" else ""
        token = token if len(token) <= LONGEST_SECRET else ""
        session = request.cookies.get(COOKIE, "")
        if token or session:
            # A guesser is slowed down before each guess costs a look into the database.
            if self._rates.is_empty(address):
                self._refuse(address)
            if token:
                caller = await run_in_threadpool(self._store.tokens.find, token)
            elif len(session) <= LONGEST_SECRET:
                visitor = await run_in_threadpool(self._store.sign_in.find, session)
        key = f"token {caller.name}" if caller else address
        if not self._rates.take(key):
            self._refuse(key)
        scope.setdefault("state", {}).update(caller=caller, visitor=visitor)
        await self._app(scope, receive, send)

    def _refuse(self, key: str) -> NoReturn:
        wait = self._rates.wait(key)
        raise TooMany(f"too many requests: come again in {wait:.1f} s", wait)


class Rates:
    """A bucket of requests for each key, filled again steadily up to ``burst``."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> bool:
        """Take one request; false if there is none left."""
        left = self._left_of(key)
        if left < 1:
            return False
        if len(self._left) >= MOST_KEYS and key not in self._left:
            self._forget()
        self._left[key] = (left - 1, self._clock())
        return True

    def is_empty(self, key: str) -> bool:
        """Whether there is no request left."""
        return self._left_of(key) < 1

    def wait(self, key: str) -> float:
        """Seconds until there is one."""
        return max(0.0, (1 - self._left_of(key)) / self._per_second)

    def _left_of(self, key: str) -> float:
        left, then = self._left.get(key, (float(self._burst), 0.0))
        return min(float(self._burst), left + (self._clock() - then) * self._per_second)

    def _forget(self) -> None:
        """Drop the keys that are full again; of too many others those that were quiet longest."""
        busy = {key: kept for key, kept in self._left.items() if self._left_of(key) < self._burst}
        newest = sorted(busy, key=lambda key: busy[key][1])[-MOST_KEYS // 2 :]
        self._left = {key: busy[key] for key in newest}


def caller_of(scope: Scope) -> Caller | None:
    """Who was found to ask, by token or by cookie."""
    state = scope.get("state", {})
    found: Caller | None = state.get("caller") or state.get("visitor")
    return found
