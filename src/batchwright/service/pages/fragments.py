"""Parts of a page that are asked for again and again.

A part carries a version, the digest of its markup. The script tells which versions it has; what it
has already is answered as an empty part of the same version. Where nothing at all can have changed
since the last answer, its ETag says so before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version

from fastapi import Request, Response
from markupsafe import Markup

from batchwright.reporting.pages.live_page import Part
from batchwright.service.pages.rendering import drawn


@dataclass(frozen=True)
class LivePart:
    """A part with its version; ``known`` parts are not sent again."""

    name: str
    title: str
    content: Markup
    version: str
    known: bool = False


def live_parts(parts: Iterable[Part], have: str = "") -> list[LivePart]:
    """The parts of a page.

    Args:
        parts: In order.
        have: ``name.version`` of what the asker has, joined by ``~``.
    """
    there = set(have.split("~"))
    found = []
    for one in parts:
        digest = digest_of(one.title, one.content)
        known = f"{one.name}.{digest}" in there
        content = Markup("") if known else drawn(one.content)
        found.append(LivePart(one.name, one.title, content, digest, known))
    return found


def digest_of(*values: object) -> str:
    """A short digest of some values, the version of this program among them."""
    text = "\x00".join([version("batchwright"), *map(str, values)])
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def unchanged(request: Request, etag: str) -> Response | None:
    """An empty answer, if the asker has what ``etag`` stands for."""
    if request.headers.get("if-none-match") != f'"{etag}"':
        return None
    return Response(status_code=304, headers=_headers(etag))


def tagged(response: Response, etag: str) -> Response:
    """The answer under its ETag."""
    response.headers.update(_headers(etag))
    return response


def _headers(etag: str) -> dict[str, str]:
    return {"ETag": f'"{etag}"', "Cache-Control": "private, no-cache", "Vary": "Cookie"}
