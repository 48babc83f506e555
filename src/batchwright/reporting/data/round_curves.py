"""Rounds with a parameter server as plain numbers, for timelines, pages and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from batchwright.records import Plan, RoundRecord, RunSummary
from batchwright.records.text.formatting import counted, duration, local_batches, percent

RoundPart = Literal["large", "small", "wait", "exchange", "evaluation"]
ROUND_PARTS: tuple[RoundPart, ...] = ("large", "small", "wait", "exchange", "evaluation")
"""Parts of a worker's round: training with one of two batches, waiting, exchange, evaluation."""

MAX_ROUNDS = 8  # rounds of one worker in a timeline of single rounds

_MAX_MARKS = 10_000

# Share of the planned update factor below which a round was cut short by the end of an epoch.
_SHORT = 1 - 1e-6


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
    """The end of an epoch, in seconds since training began.

    ``epoch`` is the number of finished epochs; ``row`` describes the stage that begins, if any.
    """

    seconds: float
    epoch: int
    row: str


@dataclass(frozen=True)
class Bin:
    """A stretch of the run, with the share of its time that a worker spent on each part."""

    start: float
    end: float
    shares: dict[RoundPart, float]


@dataclass(frozen=True)
class EpochRounds:
    """The rounds that began in one zero-based epoch.

    Attributes:
        epoch: The epoch.
        rounds: Number of rounds.
        spread: (Longest - shortest) / mean of the workers' training seconds in a round; `None` for
            fewer than two workers.
        over_predicted: Seconds of a round without waiting, over the predicted ones; `None` if
            nothing was predicted.
        exchange_share: Share of the exchange in a round without waiting.
        wait_share: Share of waiting in the workers' time without evaluation.
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
    """Number of workers with the large batch, which have the lowest ranks."""
    return plan.workers - (plan.server.small_workers if plan.server else 0)


def lanes(summary: RunSummary) -> list[Lane]:
    """A lane for each worker of the plan, also for workers without a round, on `one_clock`."""
    large = large_workers(summary.plan)
    by_worker: dict[int, list[RoundRecord]] = {worker: [] for worker in range(summary.plan.workers)}
    for one in one_clock(summary.rounds):
        by_worker.setdefault(one.worker, []).append(one)
    return [
        Lane(worker, worker >= large, tuple(sorted(ones, key=lambda one: one.start)))
        for worker, ones in sorted(by_worker.items())
    ]


def one_clock(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The rounds, in the order of their ends, on one clock.

    A clock that began again with a resume is continued where it stopped: it is recognized by a
    worker's round that starts before the worker's previous training has ended.
    """
    found: list[RoundRecord] = []
    trained: dict[int, float] = {}  # end of each worker's newest training
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
    """End of a round with its evaluation, in seconds since training began."""
    return one.start + sum(seconds for _, seconds in parts_of(one, small=False))


def parts_of(one: RoundRecord, *, small: bool) -> list[tuple[RoundPart, float]]:
    """The parts of a round in order of time: (part, seconds)."""
    return [
        ("small" if small else "large", one.compute_seconds),
        ("wait", one.wait_seconds),
        ("exchange", one.exchange_seconds),
        ("evaluation", one.evaluation_seconds),
    ]


def marks(summary: RunSummary) -> list[Mark]:
    """The end of each epoch: the latest end of the rounds that make up its samples.

    That need not be the end of the last recorded one, since rounds that end at one barrier are
    recorded in rank order.
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
    """Resolution and rate of the stage that begins with ``epoch``, as far as they change."""
    if not 0 < epoch < plan.epochs or plan.stage_of(epoch) == plan.stage_of(epoch - 1):
        return ""
    before, row = (plan.stages[plan.stage_of(one)] for one in (epoch - 1, epoch))
    words = [f"{row.resolution} px"] if row.resolution != before.resolution else []
    if row.learning_rate != before.learning_rate:
        words.append(f"rate {row.learning_rate:.3g}")
    return ", ".join(words)


def first_seconds(all_lanes: Sequence[Lane]) -> float:
    """End of a timeline of single rounds, with at most `MAX_ROUNDS` of each worker."""
    ends = [end_of(one.rounds[MAX_ROUNDS - 1]) for one in all_lanes if len(one.rounds) > MAX_ROUNDS]
    return min(ends, default=last_seconds(all_lanes))


def last_seconds(all_lanes: Sequence[Lane]) -> float:
    """End of the last round, in seconds since training began."""
    return max((end_of(one) for lane in all_lanes for one in lane.rounds), default=0.0)


def bin_count(all_lanes: Sequence[Lane], most: int) -> int:
    """Number of stretches to show a run in: several for each round, or whole rounds for each.

    Numbers between these would draw patterns that do not exist.
    """
    rounds = max((len(lane.rounds) for lane in all_lanes), default=0) or 1
    return 4 * rounds if 4 * rounds <= most else -(-rounds // -(-rounds // most))


def bins(lane: Lane, until: float, count: int) -> list[Bin]:
    """The run in ``count`` equal stretches, with a worker's shares of time in each."""
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


# -------------------------------------------------------------------------- evenness of the rounds


def epoch_rounds(summary: RunSummary) -> list[EpochRounds]:
    """The rounds of each epoch in which some began."""
    by_epoch: dict[int, list[RoundRecord]] = {}
    for one in summary.rounds:
        by_epoch.setdefault(one.epoch, []).append(one)
    plan, found = summary.plan, []
    for epoch, rounds in sorted(by_epoch.items()):
        trained = sum(one.compute_seconds for one in rounds)
        exchanged = sum(one.exchange_seconds for one in rounds)
        waited = sum(one.wait_seconds for one in rounds)
        stage = plan.stages[plan.stage_of(epoch)]
        whole: dict[int, list[RoundRecord]] = {}  # rounds of each worker that were not cut short
        for one in rounds:
            if one.update_factor > _SHORT * stage.update_factors[one.worker]:
                whole.setdefault(one.worker, []).append(one)
        times = [_seconds(plan, epoch, ones) for ones in whole.values()]
        predicted, ratio, spread = stage.predicted_epoch_seconds, None, None
        if predicted is not None and times:
            ratio = fmean(seconds + exchange for seconds, exchange in times) / predicted.value
        if len(times) > 1:
            finishes = [seconds for seconds, _ in times]
            spread = (max(finishes) - min(finishes)) / (fmean(finishes) or 1.0)
        found.append(
            EpochRounds(
                epoch=epoch,
                rounds=len(rounds),
                spread=spread,
                over_predicted=ratio,
                exchange_share=exchanged / (trained + exchanged or 1.0),
                wait_share=waited / (trained + exchanged + waited or 1.0),
                lead=max(one.lead for one in rounds),
            )
        )
    return found


def all_rounds(summary: RunSummary) -> EpochRounds | None:
    """Medians over all epochs, and the largest lead; `None` without rounds."""
    epochs = epoch_rounds(summary)
    if not epochs:
        return None
    spreads = [one.spread for one in epochs if one.spread is not None]
    ratios = [one.over_predicted for one in epochs if one.over_predicted is not None]
    return EpochRounds(
        epoch=epochs[-1].epoch,
        rounds=len(summary.rounds),
        spread=median(spreads) if spreads else None,
        over_predicted=median(ratios) if ratios else None,
        exchange_share=median(one.exchange_share for one in epochs),
        wait_share=median(one.wait_share for one in epochs),
        lead=max(one.lead for one in epochs),
    )


def _seconds(plan: Plan, epoch: int, rounds: Sequence[RoundRecord]) -> tuple[float, float]:
    """A worker's seconds of training and of exchange for its samples of an epoch.

    These samples are one round, or several if workers exchange every few steps.
    """
    row = plan.stages[plan.stage_of(epoch)]
    often = float(len(rounds))
    if plan.server is not None and plan.server.exchange_steps is not None:
        samples = sum(one.samples for one in rounds)
        often = samples / row.samples_per_round[rounds[0].worker]
    trained = sum(one.compute_seconds for one in rounds)
    return trained / often, sum(one.exchange_seconds for one in rounds) / often


def server_words(plan: Plan) -> str:
    """How a plan's parameter server merges, in words; empty without a server."""
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
    """Figures of a run's rounds as (name, value); empty without rounds."""
    whole = all_rounds(summary)
    if whole is None:
        return []
    facts = [
        ("server", server_words(summary.plan)),
        ("rounds", f"{whole.rounds:,}"),
        (
            "spread of finish times, (latest - earliest) / mean",
            "-" if whole.spread is None else f"{percent(whole.spread)} (median epoch)",
        ),
        (
            "measured / predicted round",
            "nothing was predicted"
            if whole.over_predicted is None
            else f"{whole.over_predicted:.3f} (median epoch)",
        ),
        ("push, merge and pull", f"{percent(whole.exchange_share)} of a round"),
        ("waiting for others", f"{percent(whole.wait_share)} of the workers' time"),
        ("largest lead", counted(whole.lead, "round")),
    ]
    if summary.simulated:
        del facts[3]  # simulated times are computed from the predicted ones
    return facts


def round_rows(summary: RunSummary) -> list[list[str]]:
    """The workers' rounds as table rows: the head, then a row for each worker."""
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
