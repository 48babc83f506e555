"""Charts of rounds with a parameter server: timelines, their evenness, and their predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from batchwright.records import Plan, RoundRecord, RunSummary
from batchwright.records.text.formatting import counted, duration, number, percent
from batchwright.reporting.charts.chart import (
    Box,
    Chart,
    Lane,
    Lanes,
    Mark,
    Marker,
    Point,
    Series,
    epochs_axis,
    exact_axis,
    heights,
    linear_axis,
)
from batchwright.reporting.data import round_curves
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.round_curves import (
    ROUND_PARTS,
    EpochRounds,
    RoundPart,
    bin_count,
    bins,
    epoch_rounds,
    first_seconds,
    large_workers,
    last_seconds,
    marks,
    parts_of,
)
from batchwright.reporting.data.worker_curves import spread

_MAX_LANES, _MAX_NEWEST = 64, 24  # workers of a timeline, and of one that is drawn often
_LOWER = 0.62  # height of small batches' boxes, to distinguish them without colour
_CLOCK = "seconds since training began"
_NAMES = {"large": "training, large batch", "small": "training, small batch"}


def timelines(summary: RunSummary, most_bins: int = 76) -> list[Lanes]:
    """The first rounds one by one; a longer run also whole, in ``most_bins`` stretches at most."""
    all_lanes = round_curves.lanes(summary)
    shown = spread(all_lanes, _MAX_LANES)
    until, over = first_seconds(all_lanes), last_seconds(all_lanes)
    there = {
        part
        for lane in all_lanes
        for one in lane.rounds
        for part, seconds in parts_of(one, small=lane.small)
        if seconds
    }

    def chart(
        title: str, lower: str, boxes: Callable[[round_curves.Lane], list[Box]], end: float
    ) -> Lanes:
        names = _names((part for part in ROUND_PARTS if part in there), lower)
        x = exact_axis(simulated_word(summary) + _CLOCK, 0.0, end)
        lanes = [Lane(lane.label, boxes(lane)) for lane in shown]
        if len(shown) < len(all_lanes):
            title += f" ({len(shown)} of {len(all_lanes):,} workers)"
        return Lanes(title, x, lanes, names, _marks(summary, end))

    title = "The first rounds" if until < over else "The rounds"
    first = chart(title, " (lower)", lambda lane: _boxes(lane, until), until)
    if until >= over:
        return [first]
    title, count = "The whole run: what the time went into", bin_count(all_lanes, most_bins)
    return [first, chart(title, "", lambda lane: _stretches(lane, over, count), over)]


def newest_rounds(plan: Plan, rounds: Sequence[RoundRecord]) -> Lanes:
    """A timeline of the newest rounds, at least one, of a running training."""
    start = min(one.start for one in rounds)
    end = max(one.start + one.compute_seconds + one.exchange_seconds for one in rounds)
    large = large_workers(plan)
    lanes = []
    for worker in spread(sorted({one.worker for one in rounds}), _MAX_NEWEST):
        boxes = []
        for one in (one for one in rounds if one.worker == worker):
            words = f"worker {worker}, round {one.number + 1}:"
            parts = parts_of(one, small=worker >= large)[:-1]
            for part, at, until, seconds in _until(one.start, parts, end):
                title = f"{words} {_word(part)} {duration(seconds)}"
                boxes.append(Box(f"bar part-{part}", at, until, title, high=_height(part)))
        lanes.append(Lane(f"{worker} {'large' if worker < large else 'small'}", boxes))
    clock = "simulated " if plan.job.launcher.simulated else ""
    x = exact_axis(clock + _CLOCK, start, end)
    return Lanes("The newest rounds", x, lanes, _names(ROUND_PARTS[:-1], " (lower)"))


def _names(parts: Iterable[RoundPart], lower: str) -> list[tuple[str, str]]:
    """Names and styles of the parts; ``lower`` is added to the name of small batches."""
    words = _NAMES | {"small": _NAMES["small"] + lower}
    return [(words.get(part, part), f"part-{part}") for part in parts]


def _word(part: RoundPart) -> str:
    return "training" if part in _NAMES else part


def _height(part: RoundPart) -> float:
    return _LOWER if part == "small" else 1.0


def _until(
    start: float, parts: Iterable[tuple[RoundPart, float]], end: float
) -> Iterable[tuple[RoundPart, float, float, float]]:
    """The parts of a round that begin before ``end``: (part, start, end, seconds)."""
    for part, seconds in parts:
        until = min(start + seconds, end)
        if until > start:
            yield part, start, until, seconds
        start += seconds


def _marks(summary: RunSummary, end: float) -> list[Mark]:
    """Marks at ends of epochs, with the stages that begin there; of many epochs only the latter."""
    shown = [one for one in marks(summary) if one.seconds <= end]
    if len(shown) > 12:
        shown = [one for one in shown if one.row]
    found = []
    for one in shown:
        words = f"{counted(one.epoch, 'epoch')} done" + (f", then {one.row}" if one.row else "")
        found.append(Mark(one.seconds, words, one.row or f"{one.epoch}"))
    return found


def _boxes(lane: round_curves.Lane, end: float) -> list[Box]:
    boxes = []
    for one in lane.rounds:
        whose = (
            f"worker {lane.label}, round {one.number + 1}, epoch {one.epoch + 1}, "
            f"{one.resolution} px, batch {one.local_batch_size:,}, "
            f"{counted(one.samples, 'sample')}"
        )
        for part, start, until, seconds in _until(one.start, parts_of(one, small=lane.small), end):
            style = f"{'bar' if part in _NAMES else 'box'} part-{part}"
            title = f"{whose}: {_word(part)} {duration(seconds)}"
            batch = f"{one.local_batch_size:,}" * (part in _NAMES)
            boxes.append(Box(style, start, until, title, high=_height(part), label=batch))
    return boxes


def _stretches(lane: round_curves.Lane, until: float, count: int) -> list[Box]:
    """Boxes of a worker's shares of time in each stretch; heights are shares."""
    boxes = []
    for one in bins(lane, until, count):
        foot = 0.0
        for part in ROUND_PARTS:
            share = min(one.shares.get(part, 0.0), 1.0 - foot)
            if share < 0.005:
                continue
            words = (
                f"worker {lane.label}, {number(one.start)} to {number(one.end)} s: "
                f"{_word(part)} {percent(share)}"
            )
            boxes.append(Box(f"box part-{part}", one.start, one.end, words, foot, foot + share))
            foot += share
    return boxes


def evenness_charts(summary: RunSummary) -> list[Chart]:
    """Spread of the finish times, exchange and waits by epoch; and rounds over their prediction."""
    epochs = epoch_rounds(summary)
    even = [
        _line("spread of finish times", "blue", "circle", epochs, lambda one: one.spread),
        _line("exchange, of a round", "red", "square", epochs, lambda one: one.exchange_share),
        _line("waiting, of all time", "orange", "diamond", epochs, lambda one: one.wait_share),
    ]
    name = "measured / predicted"
    right = [_line(name, "green", "circle", epochs, lambda one: one.over_predicted, ratio=True)]
    last = summary.plan.epochs
    x = epochs_axis(last)
    charts = [Chart("How even the rounds were", x, linear_axis("percent", heights(even)), even)]
    if summary.simulated or not right[0].points:  # simulated times follow from the predicted ones
        return charts
    ends = tuple(Point(at, 1.0) for at in (0.5, last + 0.5))
    right.append(Series("as predicted", "grey", ends, "none"))
    y = linear_axis("ratio", heights(right), from_zero=False)
    return [*charts, Chart("Seconds of a round, measured over predicted", x, y, right)]


def _line(
    name: str,
    style: str,
    marker: Marker,
    epochs: Sequence[EpochRounds],
    value: Callable[[EpochRounds], float | None],
    *,
    ratio: bool = False,
) -> Series:
    """A line of percentages over the epochs, or with ``ratio`` of plain ratios."""
    points = []
    for one in epochs:
        found = value(one)
        if found is not None:
            words = f"epoch {one.epoch + 1}: {name} {f'{found:.3f}' if ratio else percent(found)}"
            points.append(Point(one.epoch + 1, found if ratio else 100 * found, words))
    return Series(name, style, tuple(points), marker if len(points) <= 60 else "none")
