"""The list of runs: found by words and state, some at a time, up to date by itself."""

from __future__ import annotations

from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.records.service import Identifier, RunInfo, RunState
from batchwright.records.text.formatting import counted
from batchwright.reporting.pages.live_page import Part
from batchwright.service.access import csrf_of, need_page, store_of
from batchwright.service.caller import Caller
from batchwright.service.pages.fragments import digest_of, live_parts, tagged, unchanged
from batchwright.service.pages.rendering import origin_of, piece, render

router = APIRouter(include_in_schema=False)

MOST_ROWS = 50

Reader = Annotated[Caller, need_page("read")]
Words = Annotated[str, Query(max_length=120, pattern="^[^\x00]*$")]
State = Annotated[RunState | None, Query()]
Before = Annotated[Identifier | None, Query()]
Have = Annotated[str, Query(max_length=2000)]


@router.get("/")
def home(_caller: Reader) -> Response:
    """The runs are what most come for."""
    return RedirectResponse("/runs", 303)


@router.get("/runs")
def runs_page(
    request: Request,
    caller: Reader,
    query: Words = "",
    state: Annotated[RunState | str | None, Query(max_length=20)] = None,
    before: Before = None,
) -> Response:
    """The page. A form that leaves the state open sends an empty one."""
    chosen = next((one for one in get_args(RunState) if one == state), None)
    listed = _Listed(request, caller, query, chosen, before)
    return render(
        request,
        "runs.html",
        caller,
        query=query,
        state=chosen,
        states=get_args(RunState),
        fragment=listed.address("/runs/rows"),
        says=listed.says,
        parts=live_parts([listed.part()]),
    )


@router.get("/runs/rows")
def runs_rows(
    request: Request,
    caller: Reader,
    query: Words = "",
    state: State = None,
    before: Before = None,
    have: Have = "",
) -> Response:
    """What has changed in the list."""
    listed = _Listed(request, caller, query, state, before)
    same = unchanged(request, listed.etag)
    if same is not None:
        return same
    response = render(
        request,
        "live.html",
        caller,
        title="",
        says=listed.says,
        over=False,
        parts=live_parts([listed.part()], have),
    )
    return tagged(response, listed.etag)


class _Listed:
    """Some of the runs."""

    def __init__(
        self,
        request: Request,
        caller: Caller,
        query: str,
        state: RunState | None,
        before: str | None,
    ) -> None:
        self._request, self._caller = request, caller
        self._asked = {"query": query, "state": state, "before": before}
        found = store_of(request).runs.list(MOST_ROWS + 1, before, state, query)
        self.runs: list[RunInfo] = found[:MOST_ROWS]
        self._more = len(found) > MOST_ROWS
        told = [one.model_dump_json() for one in self.runs]
        self.etag = digest_of(*told, self._more, self._asked, csrf_of(request))

    @property
    def says(self) -> str:
        """How many run, in a sentence."""
        running = sum(one.state == "running" for one in self.runs)
        return f"{counted(running, 'run')} going on, {len(self.runs)} shown."

    def address(self, path: str, **changes: str | None) -> str:
        """A page of the same words and state."""
        asked = {key: value for key, value in (self._asked | changes).items() if value}
        return f"{path}?{urlencode(asked)}" if asked else path

    def part(self) -> Part:
        """The rows, or what to do where there are none."""
        older = self.address("/runs", before=self.runs[-1].id) if self._more else ""
        content = piece(
            "runs_rows.html",
            caller=self._caller,
            csrf=csrf_of(self._request),
            origin=origin_of(self._request),
            runs=self.runs,
            filtered=any(self._asked.values()),
            older=older,
            newest=self.address("/runs", before=None) if self._asked["before"] else "",
        )
        return Part("rows", "", content)
