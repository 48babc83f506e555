"""The page of all runs, filtered by text and state, a page at a time."""

from __future__ import annotations

from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.records.service import Identifier, RunInfo, RunState
from batchwright.records.text.formatting import counted
from batchwright.reporting.pages.live_page import Part
from batchwright.service.access import PageReader, csrf_of, store_of
from batchwright.service.pages.rendering import Have, Live, answer_live, digest_of, fill, render
from batchwright.service.store.tokens import Caller

router = APIRouter(include_in_schema=False)

MAX_ROWS = 50

Words = Annotated[str, Query(max_length=120, pattern="^[^\x00]*$")]
State = Annotated[RunState | None, Query()]
Before = Annotated[Identifier | None, Query()]


@router.get("/")
def home(_caller: PageReader) -> Response:
    """The start page: the list of runs."""
    return RedirectResponse("/runs", 303)


@router.get("/runs")
def runs_page(
    request: Request,
    caller: PageReader,
    query: Words = "",
    state: Annotated[str, Query(max_length=20)] = "",
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
        live=listed.live(),
    )


@router.get("/runs/rows")
def runs_rows(
    request: Request,
    caller: PageReader,
    query: Words = "",
    state: State = None,
    before: Before = None,
    have: Have = "",
) -> Response:
    """The parts of the list that have changed."""
    listed = _Listed(request, caller, query, state, before)
    return answer_live(request, caller, have, listed.etag, listed.live)


class _Listed:
    """A page of the list of runs; ``etag`` is a digest of all that the page depends on."""

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
        runs = store_of(request).runs.list(MAX_ROWS + 1, before, state, query)
        self.runs: list[RunInfo] = runs[:MAX_ROWS]
        self._more = len(runs) > MAX_ROWS
        rows = [run.model_dump_json() for run in self.runs]
        self.etag = digest_of(*rows, self._more, self._asked, csrf_of(request))

    def address(self, path: str, **changes: str | None) -> str:
        """Address of a page of the list, with this one's filters but for ``changes``."""
        asked = {key: value for key, value in (self._asked | changes).items() if value}
        return f"{path}?{urlencode(asked)}" if asked else path

    def live(self) -> Live:
        """The rows, or what to do where there are none."""
        running = sum(run.state == "running" for run in self.runs)
        content = fill(
            self._request,
            "runs_rows.html",
            self._caller,
            runs=self.runs,
            filtered=any(self._asked.values()),
            older=self.address("/runs", before=self.runs[-1].id) if self._more else "",
            newest=self.address("/runs", before=None) if self._asked["before"] else "",
        )
        says = f"{counted(running, 'run')} going on, {len(self.runs)} shown."
        return Live(says, [Part("rows", "", content)])
