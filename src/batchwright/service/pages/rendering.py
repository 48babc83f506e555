"""Templates become answers: escaped throughout, the same frame around each page.

Parts of a page that goes on are asked for again and again. Each carries a version, the digest of
its markup. The script tells which versions it has; what it has already is answered as an empty part
of the same version. Where nothing at all can have changed since the last answer, its ETag says so
before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from typing import Annotated, Any

from fastapi import Query, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from batchwright.records.text.formatting import counted, duration, number, percent
from batchwright.records.text.problems import printable
from batchwright.reporting.pages.live_page import Part
from batchwright.service.access import csrf_of
from batchwright.service.pages.assets import asset_url
from batchwright.service.problems import ServiceProblem
from batchwright.service.store.tokens import Caller
from batchwright.storage.version import VERSION

NAVIGATION = (
    ("/runs", "Runs"),
    ("/compare", "Compare"),
    ("/planner", "Planner"),
    ("/jobs", "Jobs"),
)

TITLES = {
    400: "This cannot be read",
    401: "Sign in first",
    403: "This is not allowed",
    404: "There is nothing here",
    405: "This cannot be done here",
    409: "This does not fit what is there",
    413: "This is too large",
    422: "Something in it is wrong",
    429: "Too much at once",
    500: "Something went wrong",
    503: "Not available just now",
}

Have = Annotated[str, Query(max_length=2000)]
"""Which parts a page has already: ``name.version`` of each, joined by ``~``."""


def render(
    request: Request,
    template: str,
    caller: Caller | None,
    *,
    status: int = 200,
    live: Live | None = None,
    **values: Any,
) -> HTMLResponse:
    """A page, or a fragment of one.

    Args:
        request: What is answered.
        template: Name of its file.
        caller: Who is signed in; `None` shows no navigation.
        status: Of the answer.
        live: What changes on it.
        values: What the template shows; strings are escaped, `markupsafe.Markup` is not.
    """
    values |= shown_live(live) if live is not None else {}
    text = fill(request, template, caller, **values)
    return HTMLResponse(text, status, {"Cache-Control": "no-store", "Vary": "Cookie"})


def fill(request: Request, template: str, caller: Caller | None, **values: Any) -> str:
    """A part of a page as markup; escaped as in `render`."""
    return (
        _environment()
        .get_template(template)
        .render(
            caller=caller,
            csrf=csrf_of(request) if caller is not None else "",
            here=request.scope["path"],
            # The service's own address, as this browser knows it.
            origin=f"{request.scope['scheme']}://{request.headers.get('host', '')}",
            **values,
        )
    )


def error_page(request: Request, problem: ServiceProblem) -> Response:
    """The page that tells of ``problem``; one who is not signed in learns how to."""
    caller: Caller | None = getattr(request.state, "visitor", None)
    return render(
        request,
        "problem.html",
        caller,
        status=problem.status,
        title=TITLES.get(problem.status, "This did not work"),
        detail=problem.detail,
        sign_in=problem.status == 401,
    )


@dataclass(frozen=True)
class Live:
    """What changes on a page.

    Attributes:
        says: The newest thing, in a sentence.
        parts: In order.
        over: Whether nothing more is to come.
        title: For the window; empty where it stays.
    """

    says: str
    parts: Iterable[Part]
    over: bool = False
    title: str = ""


def answer_live(
    request: Request, caller: Caller, have: str, etag: str, draw: Callable[[], Live]
) -> Response:
    """What has changed on a page; nothing is drawn for who has what ``etag`` stands for."""
    headers = {"ETag": f'"{etag}"', "Cache-Control": "private, no-cache", "Vary": "Cookie"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    response = render(request, "live.html", caller, **shown_live(draw(), have))
    response.headers.update(headers)
    return response


def shown_live(live: Live, have: str = "") -> dict[str, Any]:
    """What changes on a page, for a template."""
    there = set(have.split("~"))
    parts = []
    for one in live.parts:
        digest = digest_of(one.title, one.content)
        known = f"{one.name}.{digest}" in there
        content = Markup("") if known else drawn(one.content)
        told = {"name": one.name, "title": one.title, "version": digest, "known": known}
        told["folded"] = one.folded
        parts.append({**told, "content": content})
    return {"says": live.says, "over": live.over, "title": live.title, "parts": parts}


def digest_of(*values: object) -> str:
    """A short digest of some values, the version of this program among them."""
    text = "\x00".join([VERSION, *map(str, values)])
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def sentence(words: str) -> str:
    """An error's line, as people write."""
    return f"{words[:1].upper()}{words[1:]}."


def piece(template: str, **values: Any) -> str:
    """A filled template that is the same for everybody."""
    return _environment().get_template(template).render(**values)


def drawn(markup: str) -> Markup:
    """What `batchwright.reporting` drew: it has escaped every word from outside."""
    return Markup(markup)  # noqa: S704 - escaped where it was made


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("batchwright.service.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
        auto_reload=False,
    )
    environment.filters |= {
        "percent": percent,
        "duration": duration,
        "number": number,
        "counted": counted,
        "time": time_element,
        "lines": _lines,
    }
    environment.globals |= {
        "asset": asset_url,
        "version": VERSION,
        "navigation": NAVIGATION,
        "may": _may,
    }
    return environment


def _shown(value: object) -> object:
    """What a template prints: control and direction characters of names are made visible."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return value


def _lines(text: str) -> Markup:
    """Text that keeps its line ends, as in a text area."""
    return Markup("\n").join(escape(printable(line)) for line in text.splitlines())


def time_element(at: float) -> Markup:
    """A moment; the script tells how long ago it was, and in the reader's own time."""
    moment = datetime.fromtimestamp(at, UTC)
    return Markup('<time data-ago datetime="{}">{} UTC</time>').format(
        moment.isoformat(timespec="milliseconds"), f"{moment:%Y-%m-%d %H:%M:%S}"
    )


@pass_context
def _may(context: Context, *scopes: str) -> bool:
    """Whether who is signed in has one of ``scopes``."""
    caller: Caller | None = context.get("caller")
    return caller is not None and caller.may(*scopes)
