"""The page of a run, and its files for download.

The page is drawn from a few hundred of the run's records, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.planning.schedule import rate_schedule
from batchwright.records.base import record_text
from batchwright.records.lines.run_lines import RunLine
from batchwright.records.service import Identifier, RunInfo
from batchwright.reporting.data.live_run import RunLines
from batchwright.reporting.data.outline import outlined
from batchwright.reporting.pages.live_page import (
    Part,
    RunStory,
    happened,
    plan_parts,
    run_parts,
    tiles,
)
from batchwright.reporting.pages.page import page as report_page
from batchwright.service.access import PageReader, StoreDep, check_form, need_page
from batchwright.service.api import runs as api
from batchwright.service.pages.rendering import Have, Live, answer_live, digest_of, piece, render
from batchwright.service.problems import NotFound
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/runs", include_in_schema=False)

MAX_EPOCHS = 160
"""Maximum number of epoch lines that are drawn; of a longer run, evenly spaced ones."""
MAX_STEPS = 200
MAX_SHARES = 160
MAX_ROUNDS = 400
MAX_NOTES = 20
MAX_KEPT = 32
"""Drawn pages that stay in memory, for all browsers that show the same run."""

OVER = ("finished",)
"""States in which a page does not change any more; a run that stopped or failed may go on."""

ENDED = ("finished", "failed", "stopped")


Draw = Callable[[RunInfo, str], Live]
"""Draws the page of a run; the second argument is `_etag` of the run."""


def run_pages(store: Store) -> Draw:
    """The function that draws the page of a run and keeps the newest pages in memory."""

    @lru_cache(maxsize=MAX_KEPT)
    def draw(info: RunInfo, _etag: str) -> Live:
        story = story_of(store, info)
        left = None if info.state in ENDED else seconds_left(story, info)
        now = piece(
            "run_now.html",
            run=info,
            tiles=tiles(story, left),
            advice=store.advice.list(info.id)[::-1],
            has_profile=story.profile is not None,
            has_summary=story.summary is not None,
        )
        parts = [*run_parts(story), *plan_parts(story.plan, story.profile, folded=True)]
        contents = Part("contents", "", piece("contents.html", parts=parts))
        return Live(
            happened(story),
            [Part("now", "", now), contents, *parts],
            over=info.state in OVER,
            title=f"{info.epochs_done}/{info.epochs} {info.name} - Batchwright",
        )

    return draw


@router.get("/{run}")
def run_page(request: Request, store: StoreDep, caller: PageReader, run: Identifier) -> Response:
    """The page."""
    info = store.runs.get(run)
    live = request.app.state.draw_run(info, _etag(store, info))
    return render(request, "run.html", caller, run=info, live=live)


@router.get("/{run}/live")
def run_live(
    request: Request, store: StoreDep, caller: PageReader, run: Identifier, have: Have = ""
) -> Response:
    """The parts of the page that have changed."""
    info = store.runs.get(run)
    etag, draw = _etag(store, info), request.app.state.draw_run
    return answer_live(request, caller, have, etag, lambda: draw(info, etag))


@router.post("/{run}/delete", dependencies=[Depends(check_form)])
def delete_run(
    request: Request,
    store: StoreDep,
    caller: Annotated[Caller, need_page("admin")],
    run: Identifier,
) -> Response:
    """Delete a run, and show the others."""
    api.delete_run(request, store, caller, run)
    return RedirectResponse("/runs", 303)


@router.get("/{run}/files/{name}")
def run_file(store: StoreDep, _caller: PageReader, run: Identifier, name: str) -> Response:
    """A document of the run as a file to download; there are four names."""
    runs = store.runs
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


def _etag(store: Store, info: RunInfo) -> str:
    """Digest of all that the page of a run depends on, by one quick query."""
    return digest_of(info.model_dump_json(), store.advice.numbers(info.id))


def story_of(store: Store, info: RunInfo) -> RunStory:
    """A run with its documents and the lines that its page draws."""
    plan, profile = store.runs.plan(info.id), store.runs.profile(info.id)
    summary = store.runs.summary(info.id) if info.state == "finished" else None
    return RunStory(
        name=info.name,
        plan=plan,
        profile=profile,
        schedule=rate_schedule(outlined(plan)),
        lines=lines_of(store, info),
        summary=summary,
        ended=info.state in ENDED,
    )


def lines_of(store: Store, info: RunInfo) -> RunLines:
    """The lines of a run that its page draws."""
    records = store.records
    epochs = records.page(info.id, "epoch", MAX_EPOCHS)
    recent = max(-1, info.records - 1 - MAX_ROUNDS)
    pages = (
        epochs,
        records.page(info.id, "step", MAX_STEPS),
        records.page(info.id, "shares", MAX_SHARES),
        records.after(info.id, "round", recent, MAX_ROUNDS),
        records.newest(info.id, "note", MAX_NOTES).page(),
    )
    lines: dict[int, RunLine] = {}
    for page in pages:
        lines |= dict(zip(page.sequences, page.records, strict=True))
    return RunLines.of((lines[number] for number in sorted(lines)), stride=epochs.stride)


def seconds_left(story: RunStory, info: RunInfo) -> float | None:
    """Expected seconds by the wall clock until a run ends; `None` if not known. On a simulated
    cluster, whose own clock is another one, they follow from the pace of the epochs so far.
    """
    spending = story.spending
    if not story.so_far.simulated:
        if spending.expected is None:
            return None
        return max(0.0, spending.expected - spending.so_far)
    done = len(story.so_far.epochs) * story.lines.stride + (story.now.share if story.now else 0.0)
    if not done:
        return None
    return (info.changed - info.created) * max(0.0, spending.epochs - done) / done
