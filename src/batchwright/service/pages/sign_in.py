"""The pages that sign a browser in, by a one-time link, and out.

Opening the link changes nothing: programs that follow links before people do would use it up. Its
page has one button, which sends the secret back; the answer sets the session's cookie.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.service.access import (
    StoreDep,
    check_form,
    forget,
    need_page,
    open_to_all,
    remember,
    session_of,
    settings_of,
)
from batchwright.service.pages.rendering import render
from batchwright.service.store.tokens import BROWSER, Caller

router = APIRouter(include_in_schema=False)

Secret = Annotated[str, Query(max_length=200, pattern=r"^[A-Za-z0-9_-]*$")]


@router.get("/sign-in", dependencies=[open_to_all()])
def sign_in_page(request: Request, link: Secret = "") -> Response:
    """The page that a link leads to."""
    visitor: Caller | None = getattr(request.state, "visitor", None)
    if visitor is not None and not link:
        return RedirectResponse("/runs", 303)
    return render(request, "sign_in.html", None, link=link, failed=False)


@router.post("/sign-in", dependencies=[open_to_all()])
def sign_in(
    request: Request, store: StoreDep, link: Annotated[str, Form(max_length=200)]
) -> Response:
    """Exchange a link's secret for a session. Nobody is signed in, so there is no form to check."""
    session = store.sign_in.enter(link)
    if session is None:
        return render(request, "sign_in.html", None, status=403, link="", failed=True)
    visitor = store.sign_in.find(session)
    store.audit.note(visitor.name if visitor else BROWSER, "sign-in", "")
    response = RedirectResponse("/runs", 303)
    remember(response, session, settings_of(request))
    return response


@router.post("/sign-out", dependencies=[Depends(check_form)])
def sign_out(request: Request, store: StoreDep, caller: Annotated[Caller, need_page()]) -> Response:
    """End the session."""
    store.sign_in.leave(session_of(request))
    store.audit.note(caller.name, "sign-out", "")
    response = RedirectResponse("/sign-in", 303)
    forget(response, settings_of(request))
    return response
