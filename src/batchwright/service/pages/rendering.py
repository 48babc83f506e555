"""Pages from templates: everything is escaped, and each page has the same frame.

The script of a live page requests its parts again and again. Each part has a version, the digest of
its markup. The script sends the versions that it has; a part that it has already is answered empty,
with its version. Where nothing can have changed since the last answer, the ETag says so before
anything is drawn.
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
from batchwright.reporting.pages.markup import prose
from batchwright.service.access import csrf_of, settings_of
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
"""The parts that a page has already: ``name.version`` of each, joined by ``~``."""


def render(
    request: Request,
    template: str,
    caller: Caller | None,
    *,
    status: int = 200,
    live: Live | None = None,
    **values: Any,
) -> HTMLResponse:
    """A page, or a fragment of one, as an answer.

    Args:
        request: The request.
        template: File name of the template.
        caller: The caller who is signed in; `None`: the page has no navigation.
        status: HTTP status of the answer.
        live: The parts of the page that change.
        values: Values for the template; strings are escaped, `markupsafe.Markup` is not.
    """
    values |= shown_live(live) if live is not None else {}
    text = fill(request, template, caller, **values)
    return HTMLResponse(text, status, {"Cache-Control": "no-store", "Vary": "Cookie"})


def fill(request: Request, template: str, caller: Caller | None, **values: Any) -> str:
    """A filled template as markup; escaped as in `render`."""
    return (
        _environment()
        .get_template(template)
        .render(
            caller=caller,
            csrf=csrf_of(request) if caller is not None else "",
            here=request.scope["path"],
            # The service's own address, as others know it, or at least this browser.
            origin=settings_of(request).public_url
            or f"{request.scope['scheme']}://{request.headers.get('host', '')}",
            **values,
        )
    )


def error_page(request: Request, problem: ServiceProblem) -> Response:
    """The page that describes a problem; to a browser that is not signed in, how to sign in."""
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
    """The content of a page that changes.

    Attributes:
        says: The newest event, in a sentence, also for screen readers.
        parts: Parts of the page, in order.
        over: Whether nothing will change any more.
        title: Title of the window; empty: unchanged.
    """

    says: str
    parts: Iterable[Part]
    over: bool = False
    title: str = ""


def answer_live(
    request: Request, caller: Caller, have: str, etag: str, draw: Callable[[], Live]
) -> Response:
    """The parts of a page that have changed, as an answer.

    Args:
        request: The request; if it names ``etag``, nothing is drawn.
        caller: The caller who is signed in.
        have: The parts that the page has already, see `Have`.
        etag: Digest of all that the page depends on.
        draw: Draws the page's content.
    """
    headers = {"ETag": f'"{etag}"', "Cache-Control": "private, no-cache", "Vary": "Cookie"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    response = render(request, "live.html", caller, **shown_live(draw(), have))
    response.headers.update(headers)
    return response


def shown_live(live: Live, have: str = "") -> dict[str, Any]:
    """The content of a page that changes, as values for a template; parts in ``have`` are empty."""
    present = set(have.split("~"))
    parts = []
    for part in live.parts:
        version = digest_of(part.title, part.content)
        known = f"{part.name}.{version}" in present
        parts.append(
            {
                "name": part.name,
                "title": part.title,
                "version": version,
                "known": known,
                "folded": part.folded,
                "content": Markup("") if known else drawn(part.content),
            }
        )
    says = live.says.replace("`", "")  # text alone, for screen readers
    return {"says": says, "over": live.over, "title": live.title, "parts": parts}


def digest_of(*values: object) -> str:
    """A short digest of values and of this program's version."""
    text = "\x00".join([VERSION, *map(str, values)])
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def sentence(words: str) -> str:
    """An error's line as a sentence, with a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def piece(template: str, **values: Any) -> str:
    """A filled template that is the same for all callers."""
    return _environment().get_template(template).render(**values)


def drawn(markup: str) -> Markup:
    """Markup of `batchwright.reporting`, which has escaped every text from outside."""
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
        "prose": _prose,
    }
    environment.globals |= {
        "asset": asset_url,
        "version": VERSION,
        "navigation": NAVIGATION,
        "may": _may,
    }
    return environment


def _shown(value: object) -> object:
    """A value as a template prints it, with control and direction characters made visible."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return value


def _lines(text: str) -> Markup:
    """Text with its line ends kept, for a text area."""
    return Markup("\n").join(escape(printable(line)) for line in text.splitlines())


def _prose(text: str, whole: str = "") -> Markup:
    """Sentences in which what stands in backticks is code.

    Where `text` is the beginning of `whole`, it may have been cut within code; a backtick that has
    no other is one of Bash, which quotes `so'.
    """
    within = text.count("`") % 2 and whole.count("`") > text.count("`")
    return drawn(prose(f"{text}`" if within else text))


def time_element(at: float) -> Markup:
    """A moment in UTC; the script replaces it by how long ago it was, with the local time."""
    moment = datetime.fromtimestamp(at, UTC)
    return Markup('<time data-ago datetime="{}">{} UTC</time>').format(
        moment.isoformat(timespec="milliseconds"), f"{moment:%Y-%m-%d %H:%M:%S}"
    )


@pass_context
def _may(context: Context, *scopes: str) -> bool:
    """Whether the caller who is signed in has one of ``scopes``."""
    caller: Caller | None = context.get("caller")
    return caller is not None and caller.may(*scopes)
