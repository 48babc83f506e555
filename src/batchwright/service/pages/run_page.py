"""One run: its page, what changes on it, and its files.

The page is drawn part by part from what the store holds: a few hundred records of however many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.planning.schedule import rate_schedule
from batchwright.records.base import record_text
from batchwright.records.lines.run_lines import (
    EpochLine,
    NoteLine,
    RoundLine,
    SharesLine,
    StepLine,
)
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
from batchwright.service.pages.rendering import Have, Live, answer_live, digest_of, piece, render
from batchwright.service.problems import NotFound
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/runs", include_in_schema=False)

MAX_EPOCHS = 160
"""Epoch lines that are drawn; of a longer run, evenly spaced ones."""
MAX_STEPS = 200
MAX_SHARES = 160
MAX_ROUNDS = 400
MAX_NOTES = 20
MAX_KEPT = 32
"""Pages that are kept drawn: two who look at the same run cost no more than one."""

OVER = ("finished", "failed")
"""States of which a page need not ask again; a run that was stopped may go on."""

ENDED = ("finished", "failed", "stopped")


Draw = Callable[[RunInfo, str], Live]


def run_pages(store: Store) -> Draw:
    """Draws the page of a run, of which `_etag` says what it depends on; the newest are kept."""

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
        told = [*run_parts(story), *plan_parts(story.plan, story.profile, folded=True)]
        contents = Part("contents", "", piece("contents.html", parts=told))
        return Live(
            happened(story),
            [Part("now", "", now), contents, *told],
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
    """What has changed on the page."""
    info = store.runs.get(run)
    etag, draw = _etag(store, info), request.app.state.draw_run
    return answer_live(request, caller, have, etag, lambda: draw(info, etag))


@router.post("/{run}/delete", dependencies=[Depends(check_form)])
def delete_run(
    request: Request, store: StoreDep, caller: Annotated[Caller, need_page("admin")], run: Identifier
) -> Response:
    """Delete a run, and show the others."""
    store.runs.delete(run)
    request.app.state.remover.soon()
    store.audit.note(caller.name, "run.delete", run)
    return RedirectResponse("/runs", 303)


@router.get("/{run}/files/{name}")
def run_file(store: StoreDep, _caller: PageReader, run: Identifier, name: str) -> Response:
    """A document of the run as a file to keep; there are four names."""
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
    """What the page of a run depends on; cheap to find out."""
    return digest_of(info.model_dump_json(), store.advice.numbers(info.id))


def story_of(store: Store, info: RunInfo) -> RunStory:
    """A run with as many of its lines as are drawn."""
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
    told = [
        *epochs.records,
        *records.page(info.id, "step", MAX_STEPS).records,
        *records.page(info.id, "shares", MAX_SHARES).records,
        *records.after(info.id, "round", recent, MAX_ROUNDS).records,
        *records.page(info.id, "note", MAX_NOTES).records,
    ]
    return RunLines(
        epochs=[line for line in told if isinstance(line, EpochLine)],
        steps=[line for line in told if isinstance(line, StepLine)],
        shares=[line for line in told if isinstance(line, SharesLine)],
        rounds=[line for line in told if isinstance(line, RoundLine)],
        notes=[line for line in told if isinstance(line, NoteLine)],
        stride=epochs.stride,
    )


def seconds_left(story: RunStory, info: RunInfo) -> float | None:
    """Seconds until the end by the clock on the wall; of a simulated cluster by the pace so far."""
    told = story.spending
    if not story.so_far.simulated:
        return None if told.expected is None else max(0.0, told.expected - told.so_far)
    done = len(story.so_far.epochs) * story.lines.stride + (story.now.share if story.now else 0.0)
    if not done:
        return None
    return (info.changed - info.created) * max(0.0, told.epochs - done) / done
