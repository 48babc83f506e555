"""The service as a process: listens, answers, logs, and ends in good order.

Connections that a client opens and does not use are closed. uvicorn itself closes only those that
are idle after an answer: for the first request of a connection, the end of a request's head, and a
client that does not read its answer, it would wait for ever. No request is answered once
`CONNECTIONS` are open, and no artifact sent once the maximum of transfers is reached.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from batchwright.errors import BatchwrightError, printable
from batchwright.service.app import create_app
from batchwright.service.middleware.hosts import is_loopback
from batchwright.service.operating.local import is_local, keep_local_token
from batchwright.service.processes import free_at_once
from batchwright.service.settings import Settings
from batchwright.service.store import Store

GRACE_SECONDS = 15
"""For requests that are in progress when the service is told to end."""

CONNECTIONS = 1000
"""Maximum number of connections; requests on further ones are answered 503."""

HEAD_SECONDS = 10.0
"""Maximum time for the head of a request, from the opening of the connection or its first byte."""

TAKE_SECONDS = 60.0
"""Maximum time in which a client reads nothing of an answer that is larger than the buffer."""

FREE_PIECES, SMALL_PIECE = 500, 256
"""Number of pieces of a body that may be small; of more pieces the mean must have so many bytes."""

COLLECTED_AFTER = (20_000, 5, 5)
"""Thresholds of Python's garbage collector: a batch of records makes thousands of objects and no
reference cycle, and with the usual thresholds collecting took a sixth of the time."""

LOGGERS = ("batchwright.service", "uvicorn.error")


def serve(
    settings: Settings,
    *,
    on_start: Callable[[str, Store], None],
    proxy: str | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; requests in progress are answered first.

    Args:
        settings: Settings of the service.
        on_start: Called with address and store once connections are accepted.
        proxy: Address of a proxy whose headers about its clients are trusted.

    Raises:
        BatchwrightError: Database or place of artifacts cannot be opened, the address is in use, or
            it is a public one and there is no token but local ones.
    """
    free_at_once()
    store = Store.open(settings)
    try:
        keep_local_token(store)
        refuse_public_without_tokens(settings, store)
        if store.artifacts.kept:
            _ = store.artifacts.place  # an error later would lose a checkpoint
        listener = listen(settings.host, settings.port)
        with listener:
            app = create_app(store, settings)
            build_routes(app)
            config = uvicorn.Config(
                app,
                http=TimedProtocol,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                proxy_headers=proxy is not None,
                forwarded_allow_ips=proxy,
                limit_concurrency=CONNECTIONS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
            server = uvicorn.Server(config)

            def end(*_: object) -> None:
                server.should_exit = True

            # uvicorn ends in good order and then raises the signal again, for the handlers from
            # before. With these the exit code is 0, as a stop that was asked for is no failure. A
            # signal before uvicorn has begun comes to them, too, and ends it as soon as it has.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    signal.signal(number, end)
            on_start(address_of(settings, listener), store)
            gc.freeze()  # the objects so far stay; collecting them takes as long as some answers
            gc.set_threshold(*COLLECTED_AFTER)
            server.run(sockets=[listener])
    finally:
        store.close()


def build_routes(app: FastAPI) -> None:
    """Have FastAPI build all routes now. It would do so at the first request to each router, on the
    event loop: up to a tenth of a second of a core each, in which no other request is answered.
    """
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/nowhere", "headers": []})


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; connections wait until they are accepted.

    Raises:
        BatchwrightError: The address is not one of this machine, or in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit this option. Without it the second part of a small answer waits 40 ms
        # for the client's acknowledgement of the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible name
        listener.close()
        why = getattr(error, "strerror", None) or str(error)
        raise BatchwrightError(
            f"cannot listen on {host} port {port}: {why[0].lower()}{why[1:]}; name another with "
            "--host or --port"
        ) from None
    return listener


def address_of(settings: Settings, listener: socket.socket) -> str:
    """Address of the service for a browser."""
    if settings.public_url is not None:
        return settings.public_url
    host, port = settings.host, listener.getsockname()[1]
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = settings.allowed_hosts[0] if settings.allowed_hosts else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def public_parts(url: str) -> tuple[str, str]:
    """Scheme and name of a service's public address.

    Raises:
        BatchwrightError: The address is invalid, or has more in it than a name and a port.
    """
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if not whole or url.rstrip("/") != f"{parts.scheme}://{parts.netloc}" or "@" in parts.netloc:
        raise BatchwrightError(
            f"{url!r} is no address of a service: write it as https://plans.example.org"
        )
    return parts.scheme, parts.hostname or ""


def check_names(names: Iterable[str], proxy: str | None) -> None:
    """Refuse names of the service, and an address of a proxy, that no request can have.

    Args:
        names: Names, each without scheme and port.
        proxy: Addresses or networks with commas between; ``*``: any; `None`: no proxy.

    Raises:
        BatchwrightError: A name or the address is invalid.
    """
    for name in names:
        if not re.fullmatch(r"[\w.-]+|\[?[\da-fA-F:]+\]?", name):
            raise BatchwrightError(
                f"--allowed-host {name}: give a name alone, without scheme and port, such as "
                "plans.example.org"
            )
    try:
        for part in (proxy or "*").split(","):
            if part.strip() != "*":
                ipaddress.ip_network(part.strip(), strict=False)
    except ValueError:
        raise BatchwrightError(
            f"--proxy {proxy}: give the address from which it asks, such as 127.0.0.1"
        ) from None


def refuse_public_without_tokens(settings: Settings, store: Store) -> None:
    """Refuse to serve other machines before there is a token for them.

    Raises:
        BatchwrightError: The address is not loopback, and there is no token but local ones.
    """
    if is_loopback(settings.host):
        return
    if not any(not is_local(token.name) and token.revoked is None for token in store.tokens.list()):
        raise BatchwrightError(
            f"refuse to serve at {settings.host}, which others can reach, before anybody has a "
            "token: make one with `batchwright token create NAME --scopes read,report`"
        )


class PiecesConnection(h11.Connection):
    """Refuses a body in very small pieces: each takes as long as a large one, and a chunk of one
    byte is sent as six, so that a client that sends such would delay all others.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._pieces = self._bytes = 0

    def next_event(self) -> Any:
        """The next event of the connection."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > FREE_PIECES and self._bytes < SMALL_PIECE * self._pieces:
                raise h11.RemoteProtocolError("the body comes in too small pieces")
        return event


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with time limits for a request's head and for reading an answer."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = PiecesConnection()
        self._deadline: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process data from the client."""
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the form of other problems, and close the connection."""
        body = json.dumps({"detail": msg}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        head = h11.Response(status_code=400, headers=[*headers, ("connection", "close")])
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers: the connection is closed."""
        self._taken()
        super().connection_lost(exc)
        self._stop()

    def pause_writing(self) -> None:
        """Start a timer: the client does not read the answer as fast as it is written."""
        super().pause_writing()
        self._untaken = self.loop.call_later(TAKE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer: the client has read most of what was waiting."""
        self._taken()
        super().resume_writing()

    def _taken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()  # a request is being answered; its body has a limit of its own
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        self.transport.close()


_JSON = json.JSONEncoder(default=str)


class JsonLines(logging.Formatter):
    """Log lines as JSON: time (UTC), level, event, fields, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["error"] = self.formatException(record.exc_info)
        return _JSON.encode(values)


class PlainLines(logging.Formatter):
    """Log lines for a person at a terminal: local time, and the event with its fields in words."""

    def __init__(self) -> None:
        super().__init__("{asctime} {message}", "%H:%M:%S", style="{")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging names it so
        """The line; a request is method, route, status, milliseconds and caller."""
        fields = getattr(record, "fields", {})
        if "route" in fields:
            words = "{method} {route} {status}".format_map(fields)
            caller = f" for {fields['caller']}" if fields["caller"] else ""
            words += f", {1000 * fields['seconds']:.0f} ms{caller}"
        else:
            more = "".join(f", {name} {value}" for name, value in fields.items())
            level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            words = f"{level}{record.message}{more}"
        return f"{record.asctime} {printable(words)}"  # others may have sent some of the text


def log_to_stderr(level: str | None) -> None:
    """Send what the service logs to standard error: as JSON, or in words if that is a terminal.

    Args:
        level: Lowest level; `None`: `info`, which has each request, but `warning` at a terminal.
    """
    watched = sys.stderr.isatty()
    level = level or ("warning" if watched else "info")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines() if watched else JsonLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
