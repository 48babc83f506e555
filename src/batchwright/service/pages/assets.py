"""Style sheet, script and icon: a few files, each under a name that changes with what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from batchwright.reporting.pages.style import STYLE
from batchwright.service.access import open_to_all
from batchwright.service.problems import NotFound

router = APIRouter(include_in_schema=False)

_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Asset:
    """A file of the pages: the name in its address, and what it holds."""

    name: str
    kind: str
    content: bytes


@cache
def assets() -> dict[str, Asset]:
    """All of them, by the name that templates use."""
    folder = files("batchwright.service.pages") / "static"
    told = {
        "style.css": ("text/css", STYLE + (folder / "pages.css").read_text(encoding="utf-8")),
        "live.js": ("text/javascript", (folder / "live.js").read_text(encoding="utf-8")),
        "icon.svg": ("image/svg+xml", (folder / "icon.svg").read_text(encoding="utf-8")),
    }
    found = {}
    for name, (kind, text) in told.items():
        content = text.encode()
        stem, _, suffix = name.partition(".")
        digest = sha256(content).hexdigest()[:12]
        found[name] = Asset(f"{stem}-{digest}.{suffix}", kind, content)
    return found


def asset_url(name: str) -> str:
    """The address of one, such as of ``style.css``."""
    return f"/static/{assets()[name].name}"


@router.get("/static/{name}", dependencies=[open_to_all()])
def asset(name: str, request: Request) -> Response:
    """One of the files; an address from before an update is gone."""
    found = next((one for one in assets().values() if one.name == name), None)
    if found is None:
        raise NotFound("there is no such file: load the page again")
    headers = {"Cache-Control": _FOREVER, "ETag": f'"{found.name}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=f"{found.kind}; charset=utf-8", headers=headers)
