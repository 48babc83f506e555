"""What a summary says, as plain numbers and words: the one source of tables, figures and page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import floor, isfinite, log10
from statistics import fmean, median

from batchwright.records import EpochRecord, Estimate, Plan, Prediction, RunSummary

# ------------------------------------------------------------------------------------ where it went


@dataclass(frozen=True)
class WorkerTotal:
    """One worker's training over all epochs, times in seconds."""

    rank: int
    local_batch_size: int
    samples: int
    input_seconds: float
    compute_seconds: float
    communication_seconds: float


def worker_totals(summary: RunSummary) -> list[WorkerTotal]:
    """Samples and seconds of each worker over all epochs, in rank order.

    The local batch is that of the last epoch in which the worker took part.
    """
    ranks = max((len(epoch.workers) for epoch in summary.epochs), default=0)
    totals = []
    for rank in range(ranks):
        own = [epoch.workers[rank] for epoch in summary.epochs if rank < len(epoch.workers)]
        totals.append(
            WorkerTotal(
                rank=rank,
                local_batch_size=own[-1].local_batch_size,
                samples=sum(one.samples for one in own),
                input_seconds=sum(one.input_seconds for one in own),
                compute_seconds=sum(one.compute_seconds for one in own),
                communication_seconds=sum(one.communication_seconds for one in own),
            )
        )
    return totals


def accounting(summary: RunSummary, rank: int | None = None) -> list[tuple[str, float]]:
    """Where the wall time went, as (part, seconds): parts that sum to ``wall_seconds``.

    Input, compute and communication are the mean over the workers, or those of worker ``rank``
    alone. ``other`` is what no clock claims. Clocks that claim more than the wall time (epochs from
    before a resume are not part of it) leave ``other`` at 0, and the parts then sum to the claims.
    """
    totals = worker_totals(summary)
    chosen = totals if rank is None else [totals[rank]]
    parts = [
        ("set-up", summary.setup_seconds),
        ("input", _mean(one.input_seconds for one in chosen)),
        ("compute", _mean(one.compute_seconds for one in chosen)),
        ("communication", _mean(one.communication_seconds for one in chosen)),
        ("evaluation", sum(epoch.evaluation_seconds for epoch in summary.epochs)),
        ("checkpoints", sum(epoch.checkpoint_seconds for epoch in summary.epochs)),
    ]
    claimed = sum(seconds for _, seconds in parts)
    return [*parts, ("other", max(0.0, summary.wall_seconds - claimed))]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fmean(listed) if listed else 0.0


# -------------------------------------------------------------------- predicted against measured


@dataclass(frozen=True)
class Comparison:
    """A stage's predicted seconds per epoch of training beside the measured ones."""

    stage: int
    predicted: Estimate | None
    measured: float | None
    fastest: float | None
    slowest: float | None

    @property
    def error_percent(self) -> float | None:
        """100 (predicted - measured) / measured; negative if the prediction was too low."""
        if self.predicted is None or not self.measured:
            return None
        return 100 * (self.predicted.value - self.measured) / self.measured

    @property
    def inside(self) -> bool | None:
        """Whether the measured seconds fell inside the predicted interval."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted.low <= self.measured <= self.predicted.high

    @property
    def direction(self) -> str:
        """Which way the prediction erred."""
        return "too low" if (self.error_percent or 0.0) < 0 else "too high"

    @property
    def verdict(self) -> str:
        """How right the prediction was, in a few words."""
        error = self.error_percent
        if self.predicted is None:
            return "nothing was predicted"
        if error is None:
            return "nothing was measured"
        where = "inside" if self.inside else "outside"
        return f"{abs(error):.1f} % {self.direction}, {where} the 95 % interval"


def comparisons(summary: RunSummary) -> list[Comparison]:
    """One comparison per stage of the plan.

    Measured is the median over the stage's whole epochs, the first left out if there are more (it
    pays for what is done once), as in `RunSummary.measured_epoch_seconds`.
    """
    found = []
    for index, stage in enumerate(summary.plan.stages):
        seconds = [
            epoch.training_seconds
            for epoch in summary.epochs
            if epoch.whole and summary.plan.stage_of(epoch.epoch) == index
        ]
        steady = seconds[1:] or seconds
        found.append(
            Comparison(
                stage=index,
                predicted=stage.predicted_epoch_seconds,
                measured=median(steady) if steady else None,
                fastest=min(steady, default=None),
                slowest=max(steady, default=None),
            )
        )
    return found


def is_chosen(plan: Plan, candidate: Prediction) -> bool:
    """Whether ``candidate`` is what one of the plan's stages does."""
    return any(
        (candidate.workers, candidate.global_batch_size, candidate.resolution)
        == (stage.workers, stage.global_batch_size, stage.resolution)
        for stage in plan.stages
    )


def training_clock(summary: RunSummary) -> list[float]:
    """Seconds of training by the end of each epoch."""
    clock, seconds = [], 0.0
    for epoch in summary.epochs:
        seconds += epoch.training_seconds
        clock.append(seconds)
    return clock


# ---------------------------------------------------------------------------------- into words


def stage_rows(plan: Plan) -> list[tuple[str, list[str]]]:
    """The plan's stage table turned on its side: (word, one value per stage)."""
    stages = plan.stages
    return [
        ("stage", [str(index) for index in range(len(stages))]),
        ("epochs", [str(stage.epochs) for stage in stages]),
        ("resolution", [f"{stage.resolution} px" for stage in stages]),
        ("learning rate", [f"{stage.learning_rate:.4g}" for stage in stages]),
        ("dropout", [f"{stage.dropout:g}" for stage in stages]),
        ("augmentation", [stage.augmentation for stage in stages]),
        ("workers", [str(stage.workers) for stage in stages]),
        ("local batch", [local_batches(stage.local_batch_sizes) for stage in stages]),
        ("global batch", [f"{stage.global_batch_size:,}" for stage in stages]),
        ("micro-batch", [f"{stage.micro_batch_size:,}" for stage in stages]),
        ("accumulation", [str(stage.accumulation_steps) for stage in stages]),
        ("predicted s / epoch", [in_seconds(stage.predicted_epoch_seconds) for stage in stages]),
        ("predicted memory", [in_bytes(stage.predicted_bytes) for stage in stages]),
    ]


def header_rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan's header as (word, value)."""
    rule = plan.learning_rate
    return [
        ("method", plan.method),
        ("merge", plan.merge),
        ("update", plan.update),
        ("precision", plan.precision),
        (
            "learning-rate rule",
            f"{rule.base:g} at batch {rule.base_batch}, {rule.scaling} scaling: peak "
            f"{rule.peak:.4g}; warm-up {rule.warmup_epochs:g} epochs; decay {rule.decay}",
        ),
        ("seed", str(plan.job.seed)),
    ]


def local_batches(sizes: tuple[int, ...]) -> str:
    """Local batches in few words, neighbours of one size together.

    >>> local_batches((32, 32, 32, 32)), local_batches((40, 24)), local_batches((8,))
    ('4 x 32', '40 + 24', '8')
    >>> local_batches((30, 16, 16, 8)), local_batches((12, 11, 10, 9, 8))
    ('30 + 2 x 16 + 8', '8 to 12')
    """
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    if len(runs) > 4:
        return f"{min(sizes)} to {max(sizes)}"
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs)


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "thread"), counted(2, "worker")
    ('1 thread', '2 workers')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds for a person, three figures or so.

    >>> [duration(s) for s in (0, 0.01234, 4.5, 59.99, 200, 3840)]
    ['0 s', '0.0123 s', '4.50 s', '1 min 00 s', '3 min 20 s', '1 h 04 min']
    """
    if seconds < 59.95:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: float) -> str:
    """Three significant figures, without an exponent.

    >>> [number(v) for v in (0, 0.001234, 0.5, 12.345, 12345.6, float("nan"))]
    ['0', '0.00123', '0.500', '12.3', '12,346', 'nan']
    """
    if not value or not isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, 2 - floor(log10(abs(value))))
    return f"{value:,.{decimals}f}"


def size(count: float) -> str:
    """Bytes for a person.

    >>> size(44_865_945), size(3 * 2**30), size(1500)
    ('42.8 MiB', '3.00 GiB', '1.46 KiB')
    """
    unit, scale = _unit(count)
    return f"{number(count / scale)} {unit}"


def _unit(count: float) -> tuple[str, int]:
    return next((u for u in (("GiB", 2**30), ("MiB", 2**20)) if count >= u[1]), ("KiB", 2**10))


def in_seconds(estimate: Estimate | None) -> str:
    """An estimate of seconds with its interval."""
    if estimate is None:
        return "not measured"
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def in_bytes(estimate: Estimate | None) -> str:
    """An estimate of bytes with its interval."""
    if estimate is None:
        return "not measured"
    _, scale = _unit(estimate.value)
    low, high = (number(end / scale) for end in (estimate.low, estimate.high))
    return f"{size(estimate.value)} ({low} to {high})"


def percent(share: float) -> str:
    """A share in [0, 1], in percent with one decimal.

    >>> percent(0.98055)
    '98.1 %'
    """
    return f"{100 * share:.1f} %"


def accuracy(epoch: EpochRecord | None) -> str:
    """An epoch's held-out accuracy with the counts behind it."""
    if epoch is None or epoch.top1 is None:
        return "not evaluated"
    return f"{percent(epoch.top1)} ({epoch.val_correct:,} of {epoch.val_count:,})"


def last_evaluated(summary: RunSummary) -> EpochRecord | None:
    """The last epoch with a held-out accuracy."""
    return next((epoch for epoch in reversed(summary.epochs) if epoch.top1 is not None), None)


def source(kind: str, reference: str) -> str:
    """Where a reason comes from, with its reference if it has one."""
    return f"{kind}: {reference}" if reference else kind


def printable(text: str) -> str:
    r"""``text`` with control and direction characters made visible, so that names cannot act.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
