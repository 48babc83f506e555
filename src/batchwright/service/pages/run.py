"""One run: its page, what changes on it, and its files."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.records.base import record_text
from batchwright.records.service import Identifier
from batchwright.reporting.pages.page import page as report_page
from batchwright.service.access import check_form, need_page, store_of
from batchwright.service.caller import Caller
from batchwright.service.pages.fragments import live_parts, tagged, unchanged
from batchwright.service.pages.rendering import render
from batchwright.service.pages.run_page import RunPages
from batchwright.service.problems import NotFound

router = APIRouter(prefix="/runs", include_in_schema=False)

Reader = Annotated[Caller, need_page("read")]
Operator = Annotated[Caller, need_page("admin")]
Have = Annotated[str, Query(max_length=2000)]


def pages_of(request: Request) -> RunPages:
    """The drawn pages of this app."""
    found: RunPages | None = getattr(request.app.state, "run_pages", None)
    if found is None:
        found = request.app.state.run_pages = RunPages(store_of(request))
    return found


@router.get("/{run}")
def run_page(request: Request, caller: Reader, run: Identifier) -> Response:
    """The page."""
    told = pages_of(request).page(store_of(request).runs.get(run))
    return render(
        request,
        "run.html",
        caller,
        title=told.title,
        run=told.info,
        says=told.says,
        over=told.over,
        parts=live_parts(told.parts),
    )


@router.get("/{run}/live")
def run_live(request: Request, caller: Reader, run: Identifier, have: Have = "") -> Response:
    """What has changed on the page."""
    pages, info = pages_of(request), store_of(request).runs.get(run)
    etag = pages.etag(info)
    same = unchanged(request, etag)
    if same is not None:
        return same
    told = pages.page(info, etag)
    response = render(
        request,
        "live.html",
        caller,
        title=told.title,
        says=told.says,
        over=told.over,
        parts=live_parts(told.parts, have),
    )
    return tagged(response, etag)


@router.post("/{run}/delete", dependencies=[Depends(check_form)])
def delete_run(request: Request, caller: Operator, run: Identifier) -> Response:
    """Delete a run, and show the others."""
    store = store_of(request)
    store.runs.delete(run)
    request.app.state.remover.soon()
    store.audit.note(caller.name, "run.delete", run)
    return RedirectResponse("/runs", 303)


@router.get("/{run}/files/{name}")
def run_file(request: Request, _caller: Reader, run: Identifier, name: str) -> Response:
    """A document of the run as a file to keep; there are four names."""
    runs = store_of(request).runs
    kind = "application/json"
    if name == "plan.json":
        text = record_text(runs.plan(run))
    elif name == "profile.json" and (profile := runs.profile(run)) is not None:
        text = record_text(profile)
    elif name == "summary.json" and (summary := runs.summary(run)) is not None:
        text = record_text(summary)
    elif name == "report.html" and (summary := runs.summary(run)) is not None:
        text, kind = report_page(summary), "text/html; charset=utf-8"
    else:
        raise NotFound("this run has no such file")
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type=kind, headers=headers)
