"""The page's part on rounds with a parameter server: how even, how right, and who waited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchwright.records import RoundRecord, RunSummary
from batchwright.records.text.formatting import counted, duration, number, percent
from batchwright.reporting.data.axes import Axis, epochs_axis, linear_axis
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.round_curves import (
    ROUND_PARTS,
    EpochRounds,
    Lane,
    bin_count,
    bins,
    epoch_rounds,
    first_seconds,
    lanes,
    last_seconds,
    marks,
    one_clock,
    parts_of,
)
from batchwright.reporting.data.rounds_words import round_facts, round_rows
from batchwright.reporting.data.worker_curves import spread
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Box, Mark, Point, Series, lanes_chart, swatch

_MOST_ROWS = 100  # of a table; all rounds are in summary.json
_MOST_BINS = 76  # of a chart
_HEIGHT = {"small": 0.62}  # of a lane: large and small are told apart without colour, too


def rounds_part(summary: RunSummary) -> str:
    """Timeline, evenness and leads of a run's rounds; empty for a run without any."""
    if not summary.rounds:
        return ""
    told = lanes(summary)
    facts = markup.table("Rounds in short", None, round_facts(summary))
    head, *rows = round_rows(summary)
    workers = markup.table(f"Rounds by worker{', simulated time' * summary.simulated}", head, rows)
    return markup.pair(facts, _HOW) + _timeline(summary, told) + _by_epoch(summary) + workers


_HOW = (
    "<div><p>A round is what a worker trains on between two exchanges with the server. It "
    "finishes when its training ends; waits and the exchange come after. Lines across the lanes: "
    "an epoch's worth of samples is there, or the plan's next stage begins.</p></div>"
)


# ------------------------------------------------------------------------------------- the timeline


def _timeline(summary: RunSummary, told: Sequence[Lane]) -> str:
    """The first rounds one by one; of a longer run all of it beside them, in stretches."""
    until, over = first_seconds(told), last_seconds(told)
    table = _rounds_table(summary)
    clock = f"{simulated_word(summary)}seconds since training began"

    def chart(title: str, lower: str, boxes_of: Callable[[Lane], list[Box]], end: float) -> str:
        x = linear_axis(clock, [end])
        x = Axis(x.label, 0.0, end, tuple(tick for tick in x.ticks if tick[0] <= end))
        drawn = [(lane.label, boxes_of(lane)) for lane in told]
        lines = _marks(summary, end)
        return markup.figure(
            title, _legend(told, lower), lanes_chart(title, x, drawn, lines), table
        )

    title = "The first rounds" if until < over else "The rounds"
    first = chart(title, " (lower)", lambda lane: _boxes(lane, until), until)
    if until >= over:
        return first
    title, count = "The whole run: what the time went into", bin_count(told, _MOST_BINS)
    return markup.pair(first, chart(title, "", lambda lane: _stretches(lane, over, count), over))


def _legend(told: Sequence[Lane], lower: str) -> str:
    """What is there; ``lower`` is how else small batches are told from large ones."""
    there = {
        part
        for lane in told
        for one in lane.rounds
        for part, seconds in parts_of(one, small=lane.small)
        if seconds
    }
    names = {"large": "training, large batch", "small": f"training, small batch{lower}"}
    shown = [part for part in ROUND_PARTS if part in there]
    return markup.legend([(names.get(one, one), swatch(f"part-{one}", "bar")) for one in shown])


def _marks(summary: RunSummary, end: float) -> list[Mark]:
    """Ends of epochs, and rows that begin there; of very many epochs the rows alone."""
    shown = [one for one in marks(summary) if one.seconds <= end]
    if len(shown) > 12:
        shown = [one for one in shown if one.row]
    found = []
    for one in shown:
        words = f"{counted(one.epoch, 'epoch')} done" + (f", then {one.row}" if one.row else "")
        found.append(Mark(one.seconds, words, one.row or f"{one.epoch}"))
    return found


def _boxes(lane: Lane, until: float) -> list[Box]:
    boxes = []
    for one in lane.rounds:
        start = one.start
        for part, seconds in parts_of(one, small=lane.small):
            end = min(start + seconds, until)
            if end > start:
                words = f"worker {lane.label}, {_round_words(one)}: {_PARTS[part]} "
                words += duration(seconds)
                style = f"{'bar' if part in ('large', 'small') else 'box'} part-{part}"
                boxes.append(Box(style, start, end, words, high=_HEIGHT.get(part, 1.0)))
            start += seconds
    return boxes


_PARTS = {
    "large": "training",
    "small": "training",
    "wait": "wait",
    "exchange": "exchange",
    "evaluation": "evaluation",
}


def _round_words(one: RoundRecord) -> str:
    return (
        f"round {one.number + 1}, epoch {one.epoch + 1}, {one.resolution} px, batch "
        f"{one.local_batch_size:,}, {counted(one.samples, 'sample')}"
    )


def _stretches(lane: Lane, until: float, count: int) -> list[Box]:
    """Shares of the time as heights, the highest for what takes a whole stretch."""
    boxes = []
    for one in bins(lane, until, count):
        foot = 0.0
        for part in ROUND_PARTS:
            share = min(one.shares.get(part, 0.0), 1.0 - foot)
            if share < 0.005:
                continue
            words = (
                f"worker {lane.label}, {number(one.start)} to {number(one.end)} s: "
                f"{_PARTS[part]} {percent(share)}"
            )
            boxes.append(Box(f"box part-{part}", one.start, one.end, words, foot, foot + share))
            foot += share
    return boxes


def _rounds_table(summary: RunSummary) -> str:
    rounds = one_clock(summary.rounds)
    kept = [rounds[index] for index in spread(len(rounds), _MOST_ROWS)]
    more = f" ({len(kept)} of {len(rounds):,}; all are in summary.json)"
    head = ["round", "worker", "epoch", "side", "batch", "samples", "start", "training"]
    return markup.table(
        f"Rounds, {simulated_word(summary)}seconds" + (more if len(kept) < len(rounds) else ""),
        [*head, "wait", "exchange", "evaluation", "lead"],
        [
            [
                str(one.number + 1),
                str(one.worker),
                str(one.epoch + 1),
                f"{one.resolution} px",
                f"{one.local_batch_size:,}",
                f"{one.samples:,}",
                number(one.start),
                number(one.compute_seconds),
                number(one.wait_seconds),
                number(one.exchange_seconds),
                number(one.evaluation_seconds),
                str(one.lead),
            ]
            for one in kept
        ],
    )


# ---------------------------------------------------------------------------------- epoch by epoch


def _by_epoch(summary: RunSummary) -> str:
    """Spread of the finish times and rounds over prediction, and what waits and exchange took."""
    told = epoch_rounds(summary)
    table = markup.table(
        "Rounds by the epoch in which they began",
        ["epoch", "rounds", "spread", "over predicted", "exchange", "wait", "lead"],
        [
            [
                str(one.epoch + 1),
                str(one.rounds),
                "-" if one.spread is None else percent(one.spread),
                "-" if one.over_predicted is None else f"{one.over_predicted:.3f}",
                percent(one.exchange_share),
                percent(one.wait_share),
                str(one.lead),
            ]
            for one in told
        ],
    )
    even = [
        _line("spread of finish times", "blue", told, lambda one: one.spread),
        _line("exchange, of a round", "red", told, lambda one: one.exchange_share),
        _line("waiting, of all time", "orange", told, lambda one: one.wait_share),
    ]
    right = [
        _line(
            "measured / predicted",
            "green",
            told,
            lambda one: one.over_predicted,
            1,
        )
    ]
    last = summary.plan.epochs
    x = epochs_axis(last)
    shares = [point.y for one in even for point in one.points]
    charts = markup.xy_figure(
        "How even the rounds were", x, linear_axis("percent", shares), even, [], table
    )
    if summary.simulated or not right[0].points:  # simulated times follow from the predicted ones
        return charts
    ends = tuple(Point(at, 1.0, "") for at in (0.5, last + 0.5))
    right.append(Series("as predicted", "grey", ends, "none"))
    ratios = [point.y for one in right for point in one.points]
    return markup.pair(
        charts,
        markup.xy_figure(
            "Seconds of a round, measured over predicted",
            x,
            linear_axis("ratio", ratios, from_zero=False),
            right,
            [],
            table,
        ),
    )


def _line(
    name: str,
    style: str,
    told: Sequence[EpochRounds],
    value: Callable[[EpochRounds], float | None],
    factor: float = 100,
) -> Series:
    points = []
    for one in told:
        found = value(one)
        if found is not None:
            words = percent(found) if factor == 100 else f"{found:.3f}"
            points.append(
                Point(one.epoch + 1, factor * found, f"epoch {one.epoch + 1}: {name} {words}")
            )
    return Series(name, style, tuple(points), "circle" if len(points) <= 60 else "none")
