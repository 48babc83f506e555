"""A run's page, part by part, from what the store holds: a few hundred records of however many."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from batchwright.planning.schedule import rate_schedule
from batchwright.records import RunSummary
from batchwright.records.service import Advice, RunInfo
from batchwright.reporting.data.live_run import RunLines
from batchwright.reporting.pages.live_page import (
    Part,
    RunStory,
    happened,
    plan_parts,
    run_parts,
    tiles,
)
from batchwright.service.pages.fragments import digest_of
from batchwright.service.pages.rendering import piece
from batchwright.service.store import Store

MOST_EPOCHS = 160
"""Epoch lines that are drawn; of a longer run, evenly spaced ones."""
MOST_STEPS = 200
MOST_SHARES = 160
MOST_ROUNDS = 400
MOST_NOTES = 20
MOST_KEPT = 32
"""Pages that are kept drawn: two who look at the same run cost no more than one."""

OVER = ("finished", "failed")
"""States of which a page need not ask again; a run that was stopped may go on."""

ENDED = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class RunPage:
    """A run as its page shows it.

    Attributes:
        info: The run.
        parts: In order.
        says: The newest thing, in a sentence.
        etag: Of all that it is made from.
    """

    info: RunInfo
    parts: list[Part]
    says: str
    etag: str

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.info.state in OVER

    @property
    def title(self) -> str:
        """For the window: how far it is, and its name."""
        info = self.info
        return f"{info.epochs_done}/{info.epochs} {info.name} - Batchwright"


class RunPages:
    """Draws the pages of runs, and keeps the newest ones.

    Args:
        store: Where the runs are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, RunPage] = OrderedDict()
        self._turn = threading.Lock()

    def etag(self, info: RunInfo) -> str:
        """What the page of a run depends on; cheap to find out."""
        return digest_of(info.model_dump_json(), self._store.advice.numbers(info.id))

    def page(self, info: RunInfo, etag: str | None = None) -> RunPage:
        """The page of a run.

        Args:
            info: The run.
            etag: From `etag`, if it is known already.
        """
        etag = etag or self.etag(info)
        with self._turn:
            found = self._kept.get(info.id)
            if found is not None and found.etag == etag:
                self._kept.move_to_end(info.id)
                return found
        drawn = self._draw(info, etag)
        with self._turn:
            self._kept[info.id] = drawn
            self._kept.move_to_end(info.id)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return drawn

    def _draw(self, info: RunInfo, etag: str) -> RunPage:
        story = story_of(self._store, info)
        advice = self._store.advice.list(info.id)
        parts = [Part("now", "", _now(story, info, advice))]
        told = [*run_parts(story), *plan_parts(story.plan, story.profile)]
        parts.append(Part("contents", "", piece("contents.html", parts=told)))
        return RunPage(info, [*parts, *told], happened(story), etag)


def story_of(store: Store, info: RunInfo) -> RunStory:
    """A run with as many of its lines as are drawn."""
    plan, profile = store.runs.plan(info.id), store.runs.profile(info.id)
    summary = store.runs.summary(info.id) if info.state == "finished" else None
    return RunStory(
        name=info.name,
        plan=plan,
        profile=profile,
        schedule=rate_schedule(plan),
        lines=lines_of(store, info),
        summary=None if summary is None else _named(summary, info.name),
        ended=info.state in ENDED,
    )


def lines_of(store: Store, info: RunInfo) -> RunLines:
    """What is drawn of a run's records."""
    records = store.records
    epochs = records.page(info.id, "epoch", MOST_EPOCHS)
    recent = max(-1, info.records - 1 - MOST_ROUNDS)
    return RunLines(
        epochs=epochs.records,
        steps=records.page(info.id, "step", MOST_STEPS).records,
        shares=records.page(info.id, "shares", MOST_SHARES).records,
        rounds=records.after(info.id, "round", recent, MOST_ROUNDS).records,
        notes=records.page(info.id, "note", MOST_NOTES).records,
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
    return (info.changed - info.created) * max(0.0, story.plan.epochs - done) / done


def _named(summary: RunSummary, name: str) -> RunSummary:
    """Where the run's files are on another machine is nobody's business here."""
    return summary.model_copy(update={"run_folder": name})


def _now(story: RunStory, info: RunInfo, advice: list[Advice]) -> str:
    left = None if info.state in ENDED else seconds_left(story, info)
    return piece(
        "run_now.html",
        run=info,
        tiles=tiles(story, left),
        advice=advice[::-1],
        has_profile=story.profile is not None,
        has_summary=story.summary is not None,
    )
