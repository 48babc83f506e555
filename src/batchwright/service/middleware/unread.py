"""Closes a connection on which a request was answered before its body had come whole.

What the client sends next would be taken for the rest of that body, and is never answered
(RFC 9112, section 9.3). Bodies are left unread where a request is refused: an upload to a job that
is not there, or one that is too large.
"""

from __future__ import annotations

import asyncio
import math

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REST_BYTES, REST_SECONDS = 2**20, 1.0
"""How much of a body is read before its request is refused, and for how long: if that is all of it,
the connection stays."""

LINGER_SECONDS = 10.0
"""How long the rest of a body is read after the answer. A client that still sends as the connection
is closed may lose the answer, and a proxy may answer 502 instead."""


class Unread:
    """Announces the end of the connection in an answer that comes before the end of the body, and
    closes it once the client has done so or sent all, or after a while.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on; read more of the body before and after the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, lingers = _Body(receive), False

        async def closing(message: Message) -> None:
            nonlocal lingers
            if message["type"] == "http.response.start" and not body.whole:
                # Who waits for `100 Continue` has sent nothing; reading would have it start.
                waits = Headers(scope=scope).get("expect", "").lower() == "100-continue"
                reads = body.begun or not waits
                if reads:
                    await body.read_rest(REST_SECONDS, REST_BYTES)
                if not body.whole:
                    MutableHeaders(scope=message)["connection"] = "close"
                    lingers = reads
            elif message["type"] == "http.response.body" and lingers:
                message = {**message, "more_body": True}  # at the end the connection is closed
            await send(message)

        await self._app(scope, body.receive, closing)
        if lingers:
            await body.read_rest(LINGER_SECONDS)
            await send({"type": "http.response.body"})


class _Body:
    """A request's body, of which it is known whether it has been read to its end.

    Attributes:
        begun: Whether anybody has asked for a part of it.
        whole: Whether its last part has been read, or the client has gone.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.begun = self.whole = False

    async def receive(self) -> Message:
        """The next message."""
        self.begun = True
        message = await self._receive()
        self.whole = not message.get("more_body", False)
        return message

    async def read_rest(self, seconds: float, most: float = math.inf) -> None:
        """Read on for some seconds at most, until ``most`` bytes have come."""
        size = 0
        try:
            async with asyncio.timeout(seconds):
                while size < most and not self.whole:
                    size += len((await self.receive()).get("body", b""))
        except TimeoutError:
            pass
