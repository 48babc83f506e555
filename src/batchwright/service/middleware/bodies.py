"""Reads the body of each request whole, within limits, before anything else happens with it.

A body that passes has at most `Limits.body_bytes`. If it is JSON, it is UTF-8 without NUL or half a
surrogate pair, which no database and no answer could hold; it is nested in at most `Limits.nesting`
levels, and has at most `Limits.values` values, since each takes a hundred bytes of memory or more
once it is parsed. All bodies in memory together are no larger than `HELD` of the largest.

Only artifacts of jobs are not read here: their route writes them to disk piece by piece.
"""

from __future__ import annotations

import asyncio
import io
import re
import threading
from collections import Counter
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.service.api.error_responses import is_for_programs
from batchwright.service.middleware.identify import caller_of, whose
from batchwright.service.problems import Late, ServiceProblem, TooLarge, TooMany, Unauthorized
from batchwright.service.reading import check_json, run_apart_if_large
from batchwright.service.settings import Limits

STRANGERS_BYTES = 64 * 1024
"""Maximum size of a JSON body whose sender is not known."""

STRANGERS_FORM_BYTES = 8 * 1024
"""Maximum size of their other bodies: a form is parsed before it is known who may send it."""

FORM_BYTES = 256 * 1024
"""Maximum size of a body that is neither JSON nor multipart."""

THREAD_BYTES = 2**20
"""Size up to which a body is checked within milliseconds, so that a thread can do it."""

BODY_SECONDS = 60.0
"""Maximum time for a body to arrive."""

STREAMED = ("PUT", re.compile(r"/v1/jobs/[^/]+/artifacts/[^/]+"))
"""Method and path of requests whose route reads the body piece by piece."""

HELD = 4
"""Number of largest bodies that may be in memory at once; one token or address may have half of
that. Bodies up to `STRANGERS_BYTES` do not count; the number of connections bounds them."""


class Bodies:
    """Reads and checks the body of each request."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._held = _HeldBytes(HELD * limits.body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then go on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        method, path = STREAMED
        if request.method == method and path.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        share = _RequestBytes(self._held, whose(scope))
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await self._read(request, receive, share)
            except TimeoutError:
                raise Late(f"the body did not come within {BODY_SECONDS:.0f} s") from None
            if body and is_json(request.headers.get("content-type", "application/json")):
                most = self._limits.nesting, self._limits.values
                if len(body) <= STRANGERS_BYTES:
                    check_json(body, *most)
                elif len(body) <= THREAD_BYTES:
                    await run_in_threadpool(check_json, body, *most)
                else:
                    check = partial(run_apart_if_large, len(body), check_json, body, *most)
                    await run_in_threadpool(check)
            if body is not None:  # else the client has gone
                scope.setdefault("state", {})["body"] = body
                await self._app(scope, _replay(body, receive), send)
        finally:
            share.give_back()

    async def _read(self, request: Request, receive: Receive, share: _RequestBytes) -> bytes | None:
        """The body; `None` if the client has disconnected."""
        most, stranger = self._limits.body_bytes, caller_of(request.scope) is None
        kind = request.headers.get("content-type", "application/json")
        if stranger:
            most = min(most, STRANGERS_BYTES if is_json(kind) else STRANGERS_FORM_BYTES)
        elif not is_json(kind) and not kind.lower().startswith("multipart/"):
            most = min(most, FORM_BYTES)
        too_large: ServiceProblem = TooLarge(
            f"the body is larger than {most} bytes: send less at once"
        )
        if stranger and not is_json(kind):
            too_large = TooLarge(
                f"the body is larger than {most} bytes: sign in before you send it"
            )
        if stranger and is_for_programs(request):
            too_large = Unauthorized("a known token is needed, as `Authorization: Bearer TOKEN`")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > most:
            raise too_large
        body = io.BytesIO()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body.write(message.get("body", b""))
            size = body.tell()
            if size > most:
                raise too_large
            if size > STRANGERS_BYTES:
                share.grow(size)
            if not message.get("more_body", False):
                return body.getvalue()


class _HeldBytes:
    """Bytes of the bodies in memory, by sender; ``most`` at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.lock = threading.Lock()
        self.of: Counter[str] = Counter()  # by sender, as `identify.whose` names them

    def total(self) -> int:
        """Bytes of all bodies."""
        return sum(self.of.values())


class _RequestBytes:
    """The part of `_HeldBytes` that one request has."""

    def __init__(self, held: _HeldBytes, who: str) -> None:
        self._held, self._who, self._size = held, who, 0

    def grow(self, size: int) -> None:
        """Have ``size`` bytes from now on.

        Raises:
            TooMany: All bodies, or those of this sender, would be too large.
        """
        held, more = self._held, size - self._size
        with held.lock:
            if held.total() + more > held.most or held.of[self._who] + more > held.most // 2:
                raise TooMany("too many large bodies at once: come again", 1.0)
            held.of[self._who] += more
            self._size = size

    def give_back(self) -> None:
        """Have no bytes any more."""
        if self._size:
            with self._held.lock:
                self._held.of[self._who] -= self._size
                self._held.of += Counter()  # drops senders with no bytes
            self._size = 0


def body_of(scope: Scope) -> bytes:
    """The body that was read; the request's own method would copy it."""
    body: bytes = scope["state"]["body"]
    return body


def is_json(content_type: str) -> bool:
    """Whether a body of this type is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `Receive` that returns the body that was read, and then other messages, such as that the
    client has disconnected.
    """
    replayed = False

    async def again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
