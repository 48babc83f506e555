"""The report's part on rounds with a parameter server: timeline, evenness, waits and leads."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.records import Plan, RoundRecord, RunSummary
from batchwright.records.text.formatting import number, percent
from batchwright.reporting.charts import rounds as charts
from batchwright.reporting.data.reading import simulated_word
from batchwright.reporting.data.round_curves import epoch_rounds, one_clock, round_facts, round_rows
from batchwright.reporting.data.worker_curves import spread
from batchwright.reporting.pages import markup

_MAX_ROWS = 100  # rows of a table; all rounds are in summary.json
_NEWEST_ROWS = 60
_HOW = (
    "<div><p>A round is what a worker trains on between two exchanges with the server. It "
    "finishes when its training ends; waits and the exchange come after. Lines across the lanes: "
    "an epoch's worth of samples is there, or the plan's next stage begins.</p></div>"
)


def rounds_part(summary: RunSummary) -> str:
    """Timeline, evenness and leads of a run's rounds; empty without rounds."""
    if not summary.rounds:
        return ""
    facts = markup.table("Rounds in short", None, round_facts(summary))
    head, *rows = round_rows(summary)
    caption = f"Rounds by worker{', simulated time' * summary.simulated}"
    more = markup.left_out(rows, _MAX_ROWS)
    workers = markup.table(caption + more, head, spread(rows, _MAX_ROWS))
    lines = [markup.figure(one, _rounds_table(summary)) for one in charts.timelines(summary)]
    by_epoch = [
        markup.figure(one, _epochs_table(summary)) for one in charts.evenness_charts(summary)
    ]
    return markup.pair(facts, _HOW) + _side_by_side(lines) + _side_by_side(by_epoch) + workers


def _side_by_side(drawn: Sequence[str]) -> str:
    """Two figures side by side; a single one takes the whole width."""
    return markup.pair(*drawn) if len(drawn) == 2 else drawn[0]


def _rounds_table(summary: RunSummary) -> str:
    rounds = one_clock(summary.rounds)
    more = markup.left_out(rounds, _MAX_ROWS, "; all are in summary.json")
    head = ["round", "worker", "epoch", "side", "batch", "samples", "start", "training"]
    return markup.table(
        f"Rounds, {simulated_word(summary)}seconds{more}",
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
            for one in spread(rounds, _MAX_ROWS)
        ],
    )


def _epochs_table(summary: RunSummary) -> str:
    epochs = epoch_rounds(summary)
    more = markup.left_out(epochs, _MAX_ROWS)
    return markup.table(
        f"Rounds by the epoch in which they began{more}",
        ["epoch", "rounds", "spread", "over predicted", "exchange", "wait", "lead"],
        [
            [
                str(one.epoch + 1),
                str(one.rounds),
                markup.or_dash(one.spread, percent),
                markup.or_dash(one.over_predicted, "{:.3f}".format),
                percent(one.exchange_share),
                percent(one.wait_share),
                str(one.lead),
            ]
            for one in spread(epochs, _MAX_ROWS)
        ],
    )


def newest_rounds(plan: Plan, rounds: Sequence[RoundRecord]) -> str:
    """A timeline and a table of the newest rounds of a running training; empty without rounds."""
    if not rounds:
        return ""
    table = markup.table(
        "The newest rounds",
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
            for one in rounds[-_NEWEST_ROWS:]
        ],
    )
    return markup.figure(charts.newest_rounds(plan, rounds), table)
