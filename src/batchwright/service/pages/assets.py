"""Style sheet, script and icon, each under a name that changes with its content."""

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
    """A file of the pages: the name in its address, its media type and content."""

    name: str
    kind: str
    content: bytes


@cache
def assets() -> dict[str, Asset]:
    """The assets, by the name that templates use."""
    folder = files("batchwright.service.pages") / "static"
    texts = {
        "style.css": ("text/css", STYLE + (folder / "pages.css").read_text(encoding="utf-8")),
        "live.js": ("text/javascript", (folder / "live.js").read_text(encoding="utf-8")),
        "icon.svg": ("image/svg+xml", (folder / "icon.svg").read_text(encoding="utf-8")),
    }
    made = {}
    for name, (kind, text) in texts.items():
        content = text.encode()
        stem, _, suffix = name.partition(".")
        digest = sha256(content).hexdigest()[:12]
        made[name] = Asset(f"{stem}-{digest}.{suffix}", kind, content)
    return made


def asset_url(name: str) -> str:
    """Address of an asset, such as of ``style.css``."""
    return f"/static/{assets()[name].name}"


@router.get("/static/{name}", dependencies=[open_to_all()])
def asset(name: str, request: Request) -> Response:
    """An asset; addresses from before an update do not exist any more."""
    file = next((each for each in assets().values() if each.name == name), None)
    if file is None:
        raise NotFound("there is no such file: load the page again")
    headers = {"Cache-Control": _FOREVER, "ETag": f'"{file.name}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=f"{file.kind}; charset=utf-8", headers=headers)
