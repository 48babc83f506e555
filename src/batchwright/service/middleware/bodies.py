"""Bodies are read whole before anything else happens with them, and only so far.

What goes on from here is no larger than `Limits.body_bytes`, and if it is JSON, it is UTF-8 without
NUL or half a surrogate pair, which no database and no answer could hold, and no more nested than
`Limits.nesting`. Only files of jobs are not read here: their route writes them down as they come.
"""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.service.api.error_responses import is_for_programs
from batchwright.service.middleware.identify import caller_of
from batchwright.service.problems import Refused, ServiceProblem, TooLarge, Unauthorized
from batchwright.service.settings import Limits

STRANGERS_BYTES = 64 * 1024
"""Read of a body whose sender is not known."""

BODY_SECONDS = 60.0
"""In which a body must have come."""

STREAMED = ("PUT", re.compile(r"/v1/jobs/[^/]+/artifacts/[^/]+"))
"""Method and path of what is read by its route, as it comes."""

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SOUND_ESCAPE = re.compile(
    rb"""\\ (?: [^u]
        | u (?! 0000 | [dD][89a-fA-F] ) .{4}            # neither NUL nor a surrogate
        | u [dD][89abAB].. \\u [dD][c-fC-F]..           # a whole pair
    )""",
    re.DOTALL | re.VERBOSE,
)
_EXCEPT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


class Bodies:
    """Reads and checks the body of each request."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then go on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if _is_streamed(request):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(request, receive)
            told = request.headers.get("content-type", "application/json")
            kind = told.partition(";")[0].strip().lower()
            if body and (kind == "application/json" or kind.endswith("+json")):
                check_json(body, self._limits.nesting)
        except TimeoutError:
            told = f"the body did not come within {BODY_SECONDS:.0f} s"
            raise ServiceProblem(told) from None
        if body is not None:  # else the client has gone
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, request: Request, receive: Receive) -> bytes | None:
        most, stranger = self._limits.body_bytes, caller_of(request.scope) is None
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
            if not message.get("more_body", False):
                return b"".join(parts)


def _is_streamed(request: Request) -> bool:
    method, path = STREAMED
    return request.method == method and path.fullmatch(request.scope["path"]) is not None


def check_json(body: bytes, levels: int) -> None:
    """Refuse what is no sound JSON text; whether it is JSON at all, its parser says.

    Raises:
        Refused: It is not UTF-8, holds NUL or half a surrogate pair, or is too deeply nested.
    """
    try:
        body.decode()
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8") from None
    if b"\0" in body:
        raise Refused("the body holds NUL")
    if b"\\u" in body and b"\\" in _SOUND_ESCAPE.sub(b"", body):
        raise Refused("the body holds NUL or half of a surrogate pair, as an escape")
    if _is_deeper(body, levels):
        raise Refused(
            f"the body has more than {levels} levels of lists and objects, or brackets that do "
            "not match"
        )


def _is_deeper(body: bytes, levels: int) -> bool:
    """Whether brackets outside strings nest deeper; also if they do not match.

    Each turn takes away the innermost pairs, so that as many turns are needed as there are levels.
    Byte by byte it would take a second for a large body.
    """
    if b"\\" in body:
        body = _ESCAPE.sub(b"", body)
    outside = body.translate(None, _EXCEPT_STRUCTURE).split(b'"')[::2]
    brackets = b"".join(outside).translate(_AS_LISTS)
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
