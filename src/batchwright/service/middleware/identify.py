"""Finds the sender of each request, and limits the rate of requests.

A request with a known token or cookie counts against that token or session, any other one against
its address; those with unknown tokens are counted apart from those without any.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NoReturn

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchwright.service.access import cookie_name
from batchwright.service.problems import TooMany
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller, hash_of

MAX_KEYS = 10_000
"""Maximum number of tokens and addresses whose rate is remembered."""

HEALTH = "/healthz"
"""Path that answers without a look at the database, whoever asks: it is to tell that the process
lives, and who restarts it for want of an answer may send a token."""

LONGEST_SECRET = 200
"""Maximum characters of a secret; a longer one is no secret of this service, and is not hashed."""


class Identify:
    """Puts the `Caller` into a request's state: as `caller` by token, as `visitor` by cookie.

    Args:
        app: The application within.
        store: Store of tokens and sessions.
        settings: Limits, and the database that names the cookie.
        clock: Seconds, by a clock that never jumps.
    """

    def __init__(
        self,
        app: ASGIApp,
        store: Store,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._store = store
        limits = settings.limits
        self._rates = Rates(limits.requests_per_second, limits.burst, clock)
        self._cookie = cookie_name(settings)
        self._known: OrderedDict[str, None] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find the caller, then go on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        address = f"address {request.client.host if request.client else ''}"
        caller = visitor = None
        kind, _, secret = request.headers.get("authorization", "").partition(" ")
        token = secret.strip() if kind.lower() == "bearer" else ""
        token = token if len(token) <= LONGEST_SECRET else ""
        session = request.cookies.get(self._cookie, "")
        session = session if len(session) <= LONGEST_SECRET else ""
        key = address
        if (secret := token or session) and scope["path"] != HEALTH:
            # Guessing is limited before each guess costs a query. Secrets that were known a moment
            # ago are not counted as guesses: what others do at the same address, such as a proxy's,
            # keeps nobody out who has a token.
            key = f"guesses from {address}"
            if hash_of(secret) not in self._known and self._rates.is_empty(key):
                self._refuse(key)
            if token:
                caller = await run_in_threadpool(self._store.tokens.find, token)
            else:
                visitor = await run_in_threadpool(self._store.sign_in.find, session)
            if found := caller or visitor:
                known = hash_of(secret)
                self._known[known] = None
                self._known.move_to_end(known)
                while len(self._known) > MAX_KEYS:
                    self._known.popitem(last=False)
                key = f"token {found.name}" if caller else f"session {known}"
        if not self._rates.take(key):
            self._refuse(key)
        scope.setdefault("state", {}).update(caller=caller, visitor=visitor)
        await self._app(scope, receive, send)

    def _refuse(self, key: str) -> NoReturn:
        wait = self._rates.wait(key)
        raise TooMany(f"too many requests: come again in {wait:.1f} s", wait)


class Rates:
    """A token bucket for each key.

    Args:
        per_second: Requests by which a bucket is refilled in a second.
        burst: Maximum number of requests in a bucket.
        clock: Seconds.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> bool:
        """Take a request from a bucket; returns false if it is empty."""
        left = self._left_of(key)
        if left < 1:
            return False
        if len(self._left) >= MAX_KEYS and key not in self._left:
            self._forget()
        self._left[key] = (left - 1, self._clock())
        return True

    def is_empty(self, key: str) -> bool:
        """Whether no request is left in a bucket."""
        return self._left_of(key) < 1

    def wait(self, key: str) -> float:
        """Seconds until a bucket has a request."""
        return max(0.0, (1 - self._left_of(key)) / self._per_second)

    def _left_of(self, key: str) -> float:
        left, then = self._left.get(key, (float(self._burst), 0.0))
        return min(float(self._burst), left + (self._clock() - then) * self._per_second)

    def _forget(self) -> None:
        """Drop the buckets that are full again; of too many others those unused for longest."""
        busy = {key: left for key, left in self._left.items() if self._left_of(key) < self._burst}
        newest = sorted(busy, key=lambda key: busy[key][1])[-MAX_KEYS // 2 :]
        self._left = {key: busy[key] for key in newest}


def whose(scope: Scope) -> str:
    """The sender of a request: its token, else its address."""
    caller: Caller | None = scope.get("state", {}).get("caller")
    address = scope["client"][0] if scope.get("client") else ""
    return f"token {caller.name}" if caller else f"address {address}"


def caller_of(scope: Scope) -> Caller | None:
    """The caller of a request, by token or by cookie; `None` if not known."""
    state = scope.get("state", {})
    caller: Caller | None = state.get("caller") or state.get("visitor")
    return caller
