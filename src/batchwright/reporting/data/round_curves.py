"""Rounds with a parameter server as plain numbers: what timeline, page and tables show of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from batchwright.records import Plan, RoundRecord, RunSummary
from batchwright.records.text.formatting import counted, duration, local_batches, percent

RoundPart = Literal["large", "small", "wait", "exchange", "evaluation"]
ROUND_PARTS: tuple[RoundPart, ...] = ("large", "small", "wait", "exchange", "evaluation")
"""What a worker does in a round: trains with one of two batches, waits, exchanges, evaluates."""

MAX_ROUNDS = 8  # of one worker that a timeline shows one by one

_MAX_MARKS = 10_000

_SHORT = 1 - 1e-6  # of the usual update factor: a round that ends with an epoch may be cut short


@dataclass(frozen=True)
class Lane:
    """A worker's rounds in the order of their starts."""

    worker: int
    small: bool
    rounds: tuple[RoundRecord, ...]

    @property
    def label(self) -> str:
        """Rank and kind, as short as a timeline needs them."""
        return f"{self.worker} {'small' if self.small else 'large'}"

    def seconds(self, part: str) -> float:
        """Seconds over the run: ``compute``, ``exchange``, ``wait`` or ``evaluation``."""
        return float(sum(getattr(one, f"{part}_seconds") for one in self.rounds))


@dataclass(frozen=True)
class Mark:
    """A time at which an epoch's worth of samples is there, in seconds since training began.

    ``epoch`` counts those that are whole; ``row`` says what begins, empty where no row does.
    """

    seconds: float
    epoch: int
    row: str


@dataclass(frozen=True)
class Bin:
    """A stretch of the run and the share of it that a worker spent on each part."""

    start: float
    end: float
    shares: dict[RoundPart, float]


@dataclass(frozen=True)
class EpochRounds:
    """The rounds that began in one zero-based epoch.

    Attributes:
        spread: (Latest - earliest) / mean of the workers' training seconds in a round; `None` for
            fewer than two workers.
        over_predicted: Seconds of a round, waits aside, over the predicted ones; `None` if nothing
            was predicted.
        exchange_share: Of a round, waits aside.
        wait_share: Of the workers' time, evaluation aside.
        lead: Most rounds that a worker was ahead of the slowest.
    """

    epoch: int
    rounds: int
    spread: float | None
    over_predicted: float | None
    exchange_share: float
    wait_share: float
    lead: int


def large_workers(plan: Plan) -> int:
    """How many workers have the large batch; they come first in rank order."""
    return plan.workers - (plan.server.small_workers if plan.server else 0)


def lanes(summary: RunSummary) -> list[Lane]:
    """A lane for each worker of the plan, those without a round among them.

    A clock that began anew with a resume is taken to go on where it stopped.
    """
    large = large_workers(summary.plan)
    told: dict[int, list[RoundRecord]] = {worker: [] for worker in range(summary.plan.workers)}
    for one in one_clock(summary.rounds):
        told.setdefault(one.worker, []).append(one)
    return [
        Lane(worker, worker >= large, tuple(sorted(ones, key=lambda one: one.start)))
        for worker, ones in sorted(told.items())
    ]


def one_clock(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The rounds, as they ended, by one clock: no worker begins one before its last one's end."""
    found: list[RoundRecord] = []
    trained: dict[int, float] = {}  # until when each worker has trained
    shift = over = 0.0
    for one in rounds:
        if one.start + shift < trained.get(one.worker, 0.0):
            shift = over - one.start
        moved = one.model_copy(update={"start": one.start + shift}) if shift else one
        trained[one.worker] = moved.start + one.compute_seconds
        over = max(over, end_of(moved))
        found.append(moved)
    return found


def end_of(one: RoundRecord) -> float:
    """When a round is over, evaluation included, in seconds since training began."""
    return one.start + sum(seconds for _, seconds in parts_of(one, small=False))


def parts_of(one: RoundRecord, *, small: bool) -> list[tuple[RoundPart, float]]:
    """What a round is made of, in the order of time: (part, seconds)."""
    return [
        ("small" if small else "large", one.compute_seconds),
        ("wait", one.wait_seconds),
        ("exchange", one.exchange_seconds),
        ("evaluation", one.evaluation_seconds),
    ]


def marks(summary: RunSummary) -> list[Mark]:
    """The end of each epoch: when the last of the rounds that made up its samples had ended.

    That need not be the last on record: those that end at one barrier are there in rank order.
    """
    plan, committed, over = summary.plan, 0, 0.0
    most = min(plan.epochs, _MAX_MARKS)
    found: list[Mark] = []
    for one in one_clock(summary.rounds):
        committed += one.samples
        over = max(over, one.start + one.compute_seconds + one.exchange_seconds)
        while len(found) < most and (len(found) + 1) * plan.data.train_samples <= committed:
            epoch = len(found) + 1
            found.append(Mark(over, epoch, _row_words(plan, epoch)))
    return found


def _row_words(plan: Plan, epoch: int) -> str:
    """What is new with the row that ``epoch`` begins."""
    if not 0 < epoch < plan.epochs or plan.stage_of(epoch) == plan.stage_of(epoch - 1):
        return ""
    before, row = (plan.stages[plan.stage_of(one)] for one in (epoch - 1, epoch))
    words = [f"{row.resolution} px"] if row.resolution != before.resolution else []
    if row.learning_rate != before.learning_rate:
        words.append(f"rate {row.learning_rate:.3g}")
    return ", ".join(words)


def first_seconds(told: Sequence[Lane]) -> float:
    """Where a timeline of single rounds ends: no worker has more than `MAX_ROUNDS` before."""
    ends = [end_of(one.rounds[MAX_ROUNDS - 1]) for one in told if len(one.rounds) > MAX_ROUNDS]
    return min(ends, default=last_seconds(told))


def last_seconds(told: Sequence[Lane]) -> float:
    """When the last round is over, in seconds since training began."""
    return max((end_of(one) for lane in told for one in lane.rounds), default=0.0)


def bin_count(told: Sequence[Lane], most: int) -> int:
    """In how many stretches to show a run: some to a round, or whole rounds to a stretch.

    Anything between would draw patterns that are not there.
    """
    rounds = max((len(lane.rounds) for lane in told), default=0) or 1
    return 4 * rounds if 4 * rounds <= most else -(-rounds // -(-rounds // most))


def bins(lane: Lane, until: float, count: int) -> list[Bin]:
    """The run in ``count`` equal stretches, and where the worker's time went in each."""
    width = until / count
    found: list[dict[RoundPart, float]] = [{} for _ in range(count)]
    for one in lane.rounds:
        start = one.start
        for part, seconds in parts_of(one, small=lane.small):
            end = start + seconds
            index = min(int(start / width), count - 1)
            while index < count and index * width < end:
                inside = min(end, (index + 1) * width) - max(start, index * width)
                found[index][part] = found[index].get(part, 0.0) + max(inside, 0.0) / width
                index += 1
            start = end
    return [Bin(n * width, (n + 1) * width, shares) for n, shares in enumerate(found)]


# --------------------------------------------------------------------------- how even, how right


def epoch_rounds(summary: RunSummary) -> list[EpochRounds]:
    """Rounds by epoch, for each epoch in which one began."""
    by_epoch: dict[int, list[RoundRecord]] = {}
    for one in summary.rounds:
        by_epoch.setdefault(one.epoch, []).append(one)
    return [_epoch_rounds(summary.plan, epoch, ones) for epoch, ones in sorted(by_epoch.items())]


def all_rounds(summary: RunSummary) -> EpochRounds | None:
    """The run in one: medians over its epochs, and the largest lead; `None` without a round."""
    told = epoch_rounds(summary)
    if not told:
        return None
    spreads = [one.spread for one in told if one.spread is not None]
    ratios = [one.over_predicted for one in told if one.over_predicted is not None]
    return EpochRounds(
        epoch=told[-1].epoch,
        rounds=len(summary.rounds),
        spread=median(spreads) if spreads else None,
        over_predicted=median(ratios) if ratios else None,
        exchange_share=median(one.exchange_share for one in told),
        wait_share=median(one.wait_share for one in told),
        lead=max(one.lead for one in told),
    )


def _epoch_rounds(plan: Plan, epoch: int, rounds: Sequence[RoundRecord]) -> EpochRounds:
    trained = sum(one.compute_seconds for one in rounds)
    exchanged = sum(one.exchange_seconds for one in rounds)
    waited = sum(one.wait_seconds for one in rounds)
    stage = plan.stages[plan.stage_of(epoch)]
    whole: dict[int, list[RoundRecord]] = {}  # of each worker, those that were not cut short
    for one in rounds:
        if one.update_factor > _SHORT * stage.update_factors[one.worker]:
            whole.setdefault(one.worker, []).append(one)
    times = [_seconds(plan, epoch, ones) for ones in whole.values()]
    predicted = stage.predicted_epoch_seconds
    finishes = [seconds for seconds, _ in times]
    ratio = None
    if predicted is not None and times:
        ratio = fmean(seconds + exchange for seconds, exchange in times) / predicted.value
    return EpochRounds(
        epoch=epoch,
        rounds=len(rounds),
        spread=(max(finishes) - min(finishes)) / (fmean(finishes) or 1.0)
        if len(finishes) > 1
        else None,
        over_predicted=ratio,
        exchange_share=exchanged / (trained + exchanged or 1.0),
        wait_share=waited / (trained + exchanged + waited or 1.0),
        lead=max(one.lead for one in rounds),
    )


def _seconds(plan: Plan, epoch: int, rounds: Sequence[RoundRecord]) -> tuple[float, float]:
    """What a worker needs for its part of an epoch: seconds of training, and of exchange.

    That is a round; where workers exchange every few steps, so many rounds as make up its part.
    """
    row = plan.stages[plan.stage_of(epoch)]
    often = float(len(rounds))
    if plan.server is not None and plan.server.exchange_steps is not None:
        samples = sum(one.samples for one in rounds)
        often = samples / row.samples_per_round[rounds[0].worker]
    trained = sum(one.compute_seconds for one in rounds)
    return trained / often, sum(one.exchange_seconds for one in rounds) / often


def server_words(plan: Plan) -> str:
    """How a plan's server merges, in a few words; empty without one."""
    rule = plan.server
    if rule is None:
        return ""
    order = {
        "bsp": "all wait for each other (BSP)",
        "ssp": f"at most {counted(rule.staleness or 0, 'round')} ahead of the slowest (SSP)",
        "asp": "nobody waits (ASP)",
    }[rule.consistency]
    often = "once a round"
    if rule.exchange_steps is not None:
        often = f"every {counted(rule.exchange_steps, 'step')}"
    merge = "" if rule.consistency == "bsp" else f", merge {rule.merge}"
    return f"{order}{merge}, factor {rule.update_factor}, {often}, momentum {rule.momentum}"


def round_facts(summary: RunSummary) -> list[tuple[str, str]]:
    """The rounds of a run as (word, value); empty without any."""
    told = all_rounds(summary)
    if told is None:
        return []
    facts = [
        ("server", server_words(summary.plan)),
        ("rounds", f"{told.rounds:,}"),
        (
            "spread of finish times, (latest - earliest) / mean",
            "-" if told.spread is None else f"{percent(told.spread)} (median epoch)",
        ),
        (
            "measured / predicted round",
            "nothing was predicted"
            if told.over_predicted is None
            else f"{told.over_predicted:.3f} (median epoch)",
        ),
        ("push, merge and pull", f"{percent(told.exchange_share)} of a round"),
        ("waiting for others", f"{percent(told.wait_share)} of the workers' time"),
        ("largest lead", counted(told.lead, "round")),
    ]
    if summary.simulated:
        del facts[3]  # its time is computed from the predicted one
    return facts


def round_rows(summary: RunSummary) -> list[list[str]]:
    """The workers' rounds: head first, then a row for each."""
    rows = [["worker", "batch", "rounds", "samples", "training", "exchange", "wait", "lead"]]
    for lane in lanes(summary):
        batches = tuple(dict.fromkeys(one.local_batch_size for one in lane.rounds))
        rows.append(
            [
                lane.label,
                local_batches(batches) if len(batches) < 2 else f"{min(batches)} to {max(batches)}",
                f"{len(lane.rounds):,}",
                f"{sum(one.samples for one in lane.rounds):,}",
                *(duration(lane.seconds(part)) for part in ("compute", "exchange", "wait")),
                str(max((one.lead for one in lane.rounds), default=0)),
            ]
        )
    return rows
