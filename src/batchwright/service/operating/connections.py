"""Connections that somebody opens and does not use are closed.

uvicorn closes those that are idle after an answer. For the first request of a connection, and for
the end of any request's head, it would wait for ever, and nobody is answered once
`serving.CONNECTIONS` are open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""In which the head of a request must have come, from the connection's or its own first byte on."""


class TimedProtocol(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, for those who ask in time."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take in what has come."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()  # a request is being answered; its body has a time of its own
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        self.transport.close()
