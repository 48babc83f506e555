"""The page that compares runs, finished or not: accuracy against epochs, time and cost."""

from __future__ import annotations

from contextlib import suppress
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
"""Maximum number of runs: curves of more could not be distinguished."""
MAX_OFFERED = 30
"""Number of newest runs that are offered to be added."""

Chosen = Annotated[list[Identifier], Query(max_length=50)]


@router.get("")
def compare_page(
    request: Request,
    store: StoreDep,
    caller: PageReader,
    run: Chosen = [],  # noqa: B006 - FastAPI's way to say it; nothing changes it
) -> Response:
    """The page."""
    runs = _runs(store, run)
    chosen = [one.id for one in runs]
    query = "&".join(f"run={one}" for one in chosen)
    return render(
        request,
        "compare.html",
        caller,
        runs=runs,
        others=[one for one in store.runs.list(MAX_OFFERED) if one.id not in chosen],
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
    """The parts of the page that have changed."""
    runs = _runs(store, run)
    etag = digest_of(*(one.model_dump_json(exclude={"changed"}) for one in runs))
    return answer_live(request, caller, have, etag, lambda: _live(store, runs))


def _runs(store: Store, identifiers: list[str]) -> list[RunInfo]:
    """The chosen runs that are there, each once."""
    runs = []
    for identifier in dict.fromkeys(identifiers):
        with suppress(NotFound):
            runs.append(store.runs.get(identifier))
    return runs[:MAX_RUNS]


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
        comparison = compared([_summary(store, info, runs) for info in runs])
    except FileError as error:
        return piece("compare_none.html", count=2, problem=one_line(error))
    if all(not run.curve for run in comparison.runs):
        words = "none of these runs has finished and evaluated an epoch yet"
        return piece("compare_none.html", count=2, problem=words)
    return clock_note(comparison) + "\n".join(comparison_parts(comparison, by_run=True))


def _summary(store: Store, info: RunInfo, runs: list[RunInfo]) -> RunSummary:
    """The summary of a run so far, with its name as the run folder; if other runs have that name,
    the begin of its identifier follows.
    """
    same = [one for one in runs if _flat(one.name) == _flat(info.name)]
    name = _flat(info.name) if len(same) == 1 else f"{_flat(info.name)} ({info.id[:8]})"
    return story_of(store, info).so_far.model_copy(update={"run_folder": name})


def _flat(name: str) -> str:
    """A name without slashes: the comparison takes names of folders."""
    return name.replace("/", "∕")  # noqa: RUF001 - the division slash looks like one
