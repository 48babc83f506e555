"""Refuses requests that name another host or come from another origin; and adds headers that say
what a browser may do with an answer.

A page of any site can have a browser send requests to 127.0.0.1, and by a name of its own that it
lets point there it could read the answers (DNS rebinding). Such a request names that host, or
another origin than the service.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.service.problems import Forbidden

POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: browsers then send `Origin: null` with forms, which nothing can check.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_PORTS = {"http": 80, "https": 443}


class Hosts:
    """Checks the Host and Origin headers.

    Args:
        app: The application within.
        names: Names of this service, beside those of loopback.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {name.strip("[]").lower().rstrip(".") for name in names} - {"", "*"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the headers, then go on."""
        if scope["type"] == "http":
            self._check(Headers(scope=scope))
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        host = _parts(f"//{hosts[0]}") if len(hosts) == 1 else None
        if host is None or not (host[0] in self._names or is_loopback(host[0])):
            raise Forbidden(
                "this service does not go by that name: use its own, or start it with "
                "--allowed-host NAME"
            )
        for origin in headers.getlist("origin"):
            scheme = origin.partition(":")[0].lower()
            from_ = _parts(origin) if scheme in _PORTS else None
            # Schemes are not compared: behind a proxy only the proxy knows which one was used.
            same = (
                from_ is not None
                and from_[0] == host[0]
                and ((from_[1] or _PORTS[scheme]) == (host[1] or _PORTS[scheme]))
            )
            if not same:
                raise Forbidden("requests from pages of other sites are not answered")


def _parts(url: str) -> tuple[str, int | None] | None:
    """Name and port of a URL; `None` if it is invalid or has anything else in it."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or "@" in parts.netloc or parts.path or parts.query or parts.fragment:
        return None
    return name.rstrip("."), port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class SecurityHeaders:
    """Adds `HEADERS`, and forbids caching unless the answer allows it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on, with the headers added to what is sent."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
