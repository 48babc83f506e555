"""The newest rounds with a parameter server of a run that goes on, a lane for each worker."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import Plan, RoundRecord
from batchwright.records.text.formatting import duration, number
from batchwright.reporting.data.axes import Axis, linear_axis
from batchwright.reporting.data.round_curves import large_workers
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.charts import Box, lanes_chart, swatch

_MOST_LANES = 24
_MOST_ROWS = 60
_LOWER = 0.62  # of a lane: large and small are told apart without colour, too

_TITLE = "The newest rounds"
_NAMES = (
    ("training, large batch", "large"),
    ("training, small batch (lower)", "small"),
    ("wait", "wait"),
    ("exchange", "exchange"),
)


def newest_rounds(plan: Plan, rounds: Sequence[RoundRecord]) -> str:
    """A timeline of ``rounds``, and a table of them; empty without any."""
    if not rounds:
        return ""
    start = min(one.start for one in rounds)
    end = max(one.start + one.compute_seconds + one.exchange_seconds for one in rounds)
    large = large_workers(plan)
    lanes = [
        (
            f"{worker} {'large' if worker < large else 'small'}",
            _boxes([one for one in rounds if one.worker == worker], end, small=worker >= large),
        )
        for worker in sorted({one.worker for one in rounds})[:_MOST_LANES]
    ]
    clock = "simulated " if plan.job.launcher.simulated else ""
    label = f"{clock}seconds since training began"
    ticks = linear_axis(label, [start, end], from_zero=False).ticks
    inside = tuple(tick for tick in ticks if start <= tick[0] <= end)
    x = Axis(label, start, max(end, start + 1e-6), inside)
    legend = markup.legend([(name, swatch(f"part-{part}", "bar")) for name, part in _NAMES])
    return markup.figure(_TITLE, legend, lanes_chart(_TITLE, x, lanes), _table(rounds))


def _boxes(rounds: Sequence[RoundRecord], end: float, *, small: bool) -> list[Box]:
    boxes = []
    for one in rounds:
        at = one.start
        for part, seconds, words in (
            ("small" if small else "large", one.compute_seconds, "training"),
            ("wait", one.wait_seconds, "wait"),
            ("exchange", one.exchange_seconds, "exchange"),
        ):
            until = min(at + seconds, end)
            if until > at:
                title = f"worker {one.worker}, round {one.number + 1}: {words} {duration(seconds)}"
                high = _LOWER if part == "small" else 1.0
                boxes.append(Box(f"bar part-{part}", at, until, title, high=high))
            at = until
    return boxes


def _table(rounds: Sequence[RoundRecord]) -> str:
    return markup.table(
        _TITLE,
        ["round", "worker", "epoch", "batch", "samples", "training", "wait", "exchange", "lead"],
        [
            [
                str(one.number + 1),
                str(one.worker),
                str(one.epoch + 1),
                f"{one.local_batch_size:,}",
                f"{one.samples:,}",
                number(one.compute_seconds),
                number(one.wait_seconds),
                number(one.exchange_seconds),
                str(one.lead),
            ]
            for one in rounds[-_MOST_ROWS:]
        ],
    )
