"""The service as a process: listens, answers, and ends in good order."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple

from batchwright.errors import BatchwrightError
from batchwright.service.operating.local import LOCAL, keep_local_token
from batchwright.service.settings import Settings
from batchwright.service.store import Store

GRACE_SECONDS = 15
"""For requests that are in progress when the service is told to end."""

CONNECTIONS = 1000
"""At once; further ones are answered 503."""


class Started(NamedTuple):
    """What to tell whoever started the service."""

    address: str
    """Such as ``http://127.0.0.1:8400``."""
    store: Store


def serve(
    settings: Settings,
    *,
    on_start: Callable[[Started], None],
    proxy: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests in progress are answered first.

    Args:
        settings: How.
        on_start: Called when connections are taken.
        proxy: Address of a proxy whose word on who its clients are is taken.

    Raises:
        BatchwrightError: The database cannot be opened, the address is taken, or it is a public
            one and nobody has a token.
    """
    import uvicorn

    from batchwright.service.app import create_app
    from batchwright.service.operating.connections import TimedProtocol

    store = Store.open(settings)
    try:
        keep_local_token(store)
        refuse_public_without_tokens(settings, store)
        listener = listen(settings.host, settings.port)
        with listener:
            config = uvicorn.Config(
                create_app(store, settings),
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
            # uvicorn ends in good order and then raises the signal again, for handlers that were
            # there before. Being told to end is no failure: these do nothing, and we exit with 0.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            on_start(Started(address_of(settings, listener), store))
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        store.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections, from now on: those that come early wait.

    Raises:
        BatchwrightError: The address is not of this machine, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        told = error.strerror or str(error)
        raise BatchwrightError(
            f"cannot listen on {host} port {port}: {told[0].lower()}{told[1:]}; name another with "
            "--host or --port"
        ) from None
    return listener


def address_of(settings: Settings, listener: socket.socket) -> str:
    """Where a browser finds the service."""
    host, port = settings.host, listener.getsockname()[1]
    if _is_everywhere(host):
        host = settings.allowed_hosts[0] if settings.allowed_hosts else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_public_without_tokens(settings: Settings, store: Store) -> None:
    """Nothing, unless others could reach the service and none of them could have a token.

    Raises:
        BatchwrightError: That is so.
    """
    if is_loopback(settings.host):
        return
    if not any(token.name != LOCAL and token.revoked is None for token in store.tokens.list()):
        raise BatchwrightError(
            f"refuse to serve at {settings.host}, which others can reach, before anybody has a "
            "token: make one with `batchwright token create NAME --scopes read,report`"
        )


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
