"""Requests that were meant for somebody else are refused, on loopback too.

A page of any site can have a browser send requests to 127.0.0.1, and with a name of its own that it
lets point there it could read the answers (DNS rebinding). Such a request names that other host, or
another origin than the one it goes to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchwright.service.api.error_responses import answer
from batchwright.service.problems import Forbidden, ServiceProblem

_PORTS = {"http": 80, "https": 443}


class Hosts:
    """Checks the Host and Origin headers.

    Args:
        app: The next one.
        names: Names and addresses that are this service, beside loopback's.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {name.strip("[]").lower().rstrip(".") for name in names} - {"", "*"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the headers, then go on."""
        if scope["type"] == "http":
            problem = self._problem(Headers(scope=scope))
            if problem is not None:
                await answer(Request(scope), problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> ServiceProblem | None:
        hosts = headers.getlist("host")
        host = _parts(f"//{hosts[0]}") if len(hosts) == 1 else None
        if host is None or not self._is_ours(host[0]):
            return Forbidden(
                "this service does not go by that name: use its own, or start it with "
                "--allowed-host NAME"
            )
        for origin in headers.getlist("origin"):
            scheme = origin.partition(":")[0].lower()
            from_ = _parts(origin) if scheme in _PORTS else None
            # Which of the two schemes the browser used, a proxy in front of us may know alone.
            same = (
                from_ is not None
                and from_[0] == host[0]
                and ((from_[1] or _PORTS[scheme]) == (host[1] or _PORTS[scheme]))
            )
            if not same:
                return Forbidden("requests from pages of other sites are not answered")
        return None

    def _is_ours(self, name: str) -> bool:
        return name in self._names or _is_loopback(name)


def _parts(url: str) -> tuple[str, int | None] | None:
    """Name and port of a URL that has nothing else; `None` if it is another thing."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or "@" in parts.netloc or parts.path or parts.query or parts.fragment:
        return None
    return name.rstrip("."), port


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
