"""Bodies are read whole before anything else happens with them, and only so far.

What goes on from here is no larger than `Limits.body_bytes`, and if it is JSON, it is UTF-8 without
NUL or half a surrogate pair, which no database and no answer could hold, no more nested than
`Limits.nesting`, and of no more than `Limits.values` values, since each takes a hundred bytes of
memory or more once it is parsed. All bodies that are held at once are no larger than `HELD` such.

Only files of jobs are not read here: their route writes them down as they come.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.service.api.error_responses import is_for_programs
from batchwright.service.middleware.identify import caller_of, whose
from batchwright.service.problems import Refused, ServiceProblem, TooLarge, TooMany, Unauthorized
from batchwright.service.settings import Limits

STRANGERS_BYTES = 64 * 1024
"""Read of a body whose sender is not known."""

FORM_BYTES = 256 * 1024
"""Of a body that is neither JSON nor a file."""

BODY_SECONDS = 60.0
"""In which a body must have come."""

STREAMED = ("PUT", re.compile(r"/v1/jobs/[^/]+/artifacts/[^/]+"))
"""Method and path of what is read by its route, as it comes."""

HELD = 4
"""As many of the largest bodies may be held at once, half of them of one token or address. What is
no larger than `STRANGERS_BYTES` does not count; the number of connections bounds that."""

MOST_ESCAPES = 250_000
"""Backslashes in a body."""

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SOUND_ESCAPE = re.compile(
    rb"""\\ (?: [^u]
        | u (?! 0000 | [dD][89a-fA-F] ) .{4}            # neither NUL nor a surrogate
        | u [dD][89abAB].. \\u [dD][c-fC-F]..           # a whole pair
    )""",
    re.DOTALL | re.VERBOSE,
)
_EXCEPT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},'))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


class Bodies:
    """Reads and checks the body of each request."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._held = _Held(HELD * limits.body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then go on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if _is_streamed(request):
            await self._app(scope, receive, send)
            return
        share = _Share(self._held, whose(scope))
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await self._read(request, receive, share)
            except TimeoutError:
                told = f"the body did not come within {BODY_SECONDS:.0f} s"
                raise ServiceProblem(told) from None
            if body and is_json(request.headers.get("content-type", "application/json")):
                most = self._limits.nesting, self._limits.values
                if len(body) <= STRANGERS_BYTES:
                    check_json(body, *most)
                else:
                    await run_in_threadpool(check_json, body, *most)
            if body is not None:  # else the client has gone
                await self._app(scope, _replay(body, receive), send)
        finally:
            share.give_back()

    async def _read(self, request: Request, receive: Receive, share: _Share) -> bytes | None:
        most, stranger = self._limits.body_bytes, caller_of(request.scope) is None
        kind = request.headers.get("content-type", "application/json")
        if not is_json(kind) and not kind.lower().startswith("multipart/"):
            most = min(most, FORM_BYTES)
        if stranger:
            most = min(most, STRANGERS_BYTES)
        too_large: ServiceProblem = TooLarge(
            f"the body is larger than {most} bytes: send less at once"
        )
        if stranger and is_for_programs(request):
            too_large = Unauthorized("a known token is needed, as `Authorization: Bearer TOKEN`")
        told = request.headers.get("content-length", "")
        if told.isdecimal() and len(told) < 20 and int(told) > most:
            raise too_large
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise too_large
            if size > STRANGERS_BYTES:
                share.grow(size)
            if not message.get("more_body", False):
                return b"".join(parts)


def _is_streamed(request: Request) -> bool:
    method, path = STREAMED
    return request.method == method and path.fullmatch(request.scope["path"]) is not None


class _Held:
    """Bytes of the bodies that are held, by whom they are from."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.lock = threading.Lock()
        self.of: Counter[str] = Counter()

    def total(self) -> int:
        """Of all."""
        return sum(self.of.values())


class _Share:
    """What one request has of `_Held`."""

    def __init__(self, held: _Held, who: str) -> None:
        self._held, self._who, self._size = held, who, 0

    def grow(self, size: int) -> None:
        """Hold so many bytes.

        Raises:
            TooMany: They are too many, of all or of this one's.
        """
        held, more = self._held, size - self._size
        with held.lock:
            if held.total() + more > held.most or held.of[self._who] + more > held.most // 2:
                raise TooMany("too many large bodies at once: come again", 1.0)
            held.of[self._who] += more
            self._size = size

    def give_back(self) -> None:
        """Hold nothing any more."""
        if self._size:
            with self._held.lock:
                self._held.of[self._who] -= self._size
                self._held.of += Counter()  # forgets those that hold nothing
            self._size = 0


def is_json(content_type: str) -> bool:
    """Whether a body of this type is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def check_json(body: bytes, levels: int, values: int = Limits().values) -> None:
    """Refuse what is no sound JSON text; whether it is JSON at all, its parser says.

    No step of it takes longer than some hundredths of a second for the largest body.

    Raises:
        Refused: It is not UTF-8, holds NUL or half a surrogate pair, is too deeply nested, or holds
            too many values or escapes.
    """
    escapes = body.count(b"\\")
    if escapes > MOST_ESCAPES:
        raise Refused(f"the body holds {escapes:,} escapes, where {MOST_ESCAPES:,} are taken")
    # Each value has a key at most, and each of these two quotes.
    if body.count(b'"') > 4 * values + escapes:
        raise Refused(f"the body holds more than {values:,} values: send less at once")
    try:
        body.decode()
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8") from None
    if b"\0" in body:
        raise Refused("the body holds NUL")
    if b"\\u" in body and b"\\" in _SOUND_ESCAPE.sub(b"", body):
        raise Refused("the body holds NUL or half of a surrogate pair, as an escape")
    if escapes:
        body = _ESCAPE.sub(b"", body)
    outside = b"".join(body.translate(None, _EXCEPT_STRUCTURE).split(b'"')[::2])
    if len(outside) - outside.count(b"]") - outside.count(b"}") > values:
        raise Refused(f"the body holds more than {values:,} values: send less at once")
    if _is_deeper(outside.translate(_AS_LISTS, b","), levels):
        raise Refused(
            f"the body has more than {levels} levels of lists and objects, or brackets that do "
            "not match"
        )


def _is_deeper(brackets: bytes, levels: int) -> bool:
    """Whether brackets nest deeper; also if they do not match.

    Each turn takes away the innermost pairs, so that as many turns are needed as there are levels.
    Byte by byte it would take a second for a large body.
    """
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hands on the body that was read, and then whatever else comes, such as a disconnection."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
