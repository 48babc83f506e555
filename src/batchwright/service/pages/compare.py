"""Runs beside each other: accuracy against epochs, time and cost, those that go on among them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from batchwright.errors import FileError, one_line
from batchwright.records import RunSummary
from batchwright.records.service import Identifier, RunInfo
from batchwright.reporting.data.comparison import compared
from batchwright.reporting.pages.live_page import Part
from batchwright.reporting.pages.page_comparison import clock_note, comparison_parts
from batchwright.service.access import PageReader, StoreDep
from batchwright.service.pages.rendering import Have, Live, answer_live, digest_of, piece, render
from batchwright.service.pages.run_page import OVER, story_of
from batchwright.service.problems import NotFound
from batchwright.service.store import Store

router = APIRouter(prefix="/compare", include_in_schema=False)

MAX_RUNS = 12
"""Compared at once: more are not told apart."""
MAX_OFFERED = 30
"""Newest runs that are offered to be added."""

Chosen = Annotated[list[Identifier], Query(max_length=50)]


@router.get("")
def compare_page(request: Request, store: StoreDep, caller: PageReader, run: Chosen = []) -> Response:  # noqa: B006
    """The page."""
    runs = _runs(store, run)
    query = "&".join(f"run={one.id}" for one in runs)
    return render(
        request,
        "compare.html",
        caller,
        runs=runs,
        others=[one for one in store.runs.list(MAX_OFFERED) if one.id not in run],
        most=MAX_RUNS,
        fragment=f"/compare/live?{query}",
        live=_live(store, runs),
    )


@router.get("/live")
def compare_live(
    request: Request,
    store: StoreDep,
    caller: PageReader,
    run: Chosen = [],  # noqa: B006 - FastAPI's way to say it; nothing changes it
    have: Have = "",
) -> Response:
    """What has changed on it."""
    runs = _runs(store, run)
    etag = digest_of(*(one.model_dump_json(exclude={"changed"}) for one in runs))
    return answer_live(request, caller, have, etag, lambda: _live(store, runs))


def _runs(store: Store, identifiers: list[str]) -> list[RunInfo]:
    """The runs that were asked for and are there, each once."""
    found = []
    for one in dict.fromkeys(identifiers):
        try:
            found.append(store.runs.get(one))
        except NotFound:
            continue
    return found[:MAX_RUNS]


def _live(store: Store, runs: list[RunInfo]) -> Live:
    done = ", ".join(f"{one.name} {one.epochs_done} of {one.epochs} epochs" for one in runs)
    says = f"{done}." if done else "No run is chosen."
    content = _content(store, runs)
    return Live(says, [Part("comparison", "", content)], all(one.state in OVER for one in runs))


def _content(store: Store, runs: list[RunInfo]) -> str:
    """The comparison, or why there is none."""
    if len(runs) < 2:
        return piece("compare_none.html", count=len(runs), problem="")
    try:
        told = compared([_summary(store, one, runs) for one in runs])
    except FileError as error:
        return piece("compare_none.html", count=2, problem=one_line(error))
    if all(not one.curve for one in told.runs):
        words = "none of these runs has finished and evaluated an epoch yet"
        return piece("compare_none.html", count=2, problem=words)
    return clock_note(told) + "\n".join(comparison_parts(told, by_run=True))


def _summary(store: Store, info: RunInfo, runs: list[RunInfo]) -> RunSummary:
    """A run under its name; one of several of that name has the start of its identifier, too."""
    same = [one for one in runs if _flat(one.name) == _flat(info.name)]
    name = _flat(info.name) if len(same) == 1 else f"{_flat(info.name)} ({info.id[:8]})"
    return story_of(store, info).so_far.model_copy(update={"run_folder": name})


def _flat(name: str) -> str:
    """A name as one word of a path: the comparison is made for folders."""
    return name.replace("/", "∕")  # noqa: RUF001 - the division slash looks like one
