"""Templates become answers: escaped throughout, the same frame around each page."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from batchwright.records.text.formatting import counted, duration, number, percent
from batchwright.records.text.problems import printable
from batchwright.service.access import csrf_of
from batchwright.service.caller import Caller
from batchwright.service.pages.assets import asset_url

NAVIGATION = (
    ("/runs", "Runs"),
    ("/compare", "Compare"),
    ("/planner", "Planner"),
    ("/jobs", "Jobs"),
)


def render(
    request: Request, template: str, caller: Caller | None, *, status: int = 200, **values: Any
) -> HTMLResponse:
    """A page, or a fragment of one.

    Args:
        request: What is answered.
        template: Name of its file.
        caller: Who is signed in; `None` shows no navigation.
        status: Of the answer.
        values: What the template shows; strings are escaped, `markupsafe.Markup` is not.
    """
    text = (
        _environment()
        .get_template(template)
        .render(
            caller=caller,
            csrf=csrf_of(request) if caller is not None else "",
            here=request.scope["path"],
            origin=origin_of(request),
            **values,
        )
    )
    return HTMLResponse(text, status, {"Cache-Control": "no-store", "Vary": "Cookie"})


def origin_of(request: Request) -> str:
    """The service's own address, as this browser knows it."""
    return f"{request.scope['scheme']}://{request.headers.get('host', '')}"


def piece(template: str, **values: Any) -> str:
    """A part of a page as markup; escaped as in `render`."""
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
        "version": version("batchwright"),
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
