"""Closes a connection on which a request was answered before its body had come whole.

What the client sends next would be taken for the rest of that body, and is never answered
(RFC 9112, section 9.3). Bodies are left unread where a request is refused: an upload to a job that
is not there, or one that is too large.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REST_BYTES = 2**20
REST_SECONDS = 1.0
"""How much of a body is read before its request is refused, and for how long. A client that is
still sending when the connection is closed may lose the answer."""


class Unread:
    """Announces the end of the connection in an answer that comes before the end of the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on; read a little more of the body before the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        # A client that waits for `100 Continue` has sent nothing; reading would have it start.
        waits = Headers(scope=scope).get("expect", "").lower() == "100-continue"

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.whole:
                if body.begun or not waits:
                    await body.read_rest()
                if not body.whole:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, body.receive, closing)


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

    async def read_rest(self) -> None:
        """Read on, within limits."""
        size = 0
        try:
            async with asyncio.timeout(REST_SECONDS):
                while size < REST_BYTES and not self.whole:
                    size += len((await self.receive()).get("body", b""))
        except TimeoutError:
            pass
