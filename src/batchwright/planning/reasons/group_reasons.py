"""Why two groups of workers are what they are: their batches, shares and weights.

What decides stands in `rows` and `groups`; nothing here does.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.algorithms.dual_batch import PAPER, update_factor
from batchwright.errors import PlanError
from batchwright.planning.methods.groups import LEAST_FIXED, Pace, grouped, shown_relative
from batchwright.planning.methods.rows import (
    MOST_EXTRA_TIME,
    USUAL_EXTRA_TIME,
    Served,
    usual_small_workers,
)
from batchwright.records import Alternative, Job, Reason, Source

HO = "Ho et al. 2013"

FEW_STEPS = 40
"""Of a round, below which its last step matters for its time."""

_MOST_ALTERNATIVES = 8  # numbers of small-batch workers shown beside the chosen one

_WHY_LARGE: dict[str, tuple[str, Source]] = {
    "asked": ("Asked for.", "asked"),
    "published": ("As published; it fits the memory and the samples of a round.", "published"),
    "memory": (
        "What `plain` would choose as local batch at the highest resolution, and below it more by "
        "as much as more fits the memory, with goal.least_steps={least_steps} steps a round at "
        "least.",
        "predicted",
    ),
    "one": ("What `plain` would choose as local batch.", "predicted"),
    "base": ("The base batch of the learning rate, or what the data allow.", "assumed"),
}

_WHY_EXTRA: dict[str, tuple[str, Source]] = {
    "asked": ("Asked for.", "asked"),
    "usual": ("The smaller of the two values published.", "published"),
    "deadline": (
        "As much as goal.deadline={deadline} s leaves at the upper end of the predicted time, "
        "up to {most:g}.",
        "predicted",
    ),
    "least": ("As much as leaves a small batch that can be trained on.", "predicted"),
}


def groups(
    job: Job,
    found: Served,
    pace: Pace,
    sides: Sequence[int],
    *,
    samples: int,
    large_source: str,
    measured: bool,
) -> tuple[Reason, ...]:
    """Both batches, both shares, and what the server does.

    Args:
        job: Resolved.
        found: Both groups at each resolution.
        pace: How long steps take.
        sides: Resolutions, low to high.
        samples: Training samples of an epoch.
        large_source: Where the large batches come from, as `rows.large_batches_of` says.
        measured: Whether step times were measured rather than stated.
    """
    return (
        _large(job, found, sides, large_source),
        _small_workers(job, found, pace, sides[-1], samples),
        *_extra_time(job, found),
        *_small(found, sides, measured=measured),
        _shares(found, pace),
        *_factor(found),
        _server(found),
    )


def _large(job: Job, found: Served, sides: Sequence[int], source: str) -> Reason:
    why, kind = _WHY_LARGE[source]
    why = why.format(least_steps=job.goal.least_steps)
    return Reason(
        choice="large batch",
        value=_at_each(found.large_batches, sides),
        why=why,
        source=kind,
        reference=PAPER if kind == "published" else "",
    )


def _small_workers(job: Job, found: Served, pace: Pace, side: int, samples: int) -> Reason:
    small, workers = found.rule.small_workers, len(pace.workers)
    source: Source
    if job.dual.small_workers != "auto":
        why, source, reference = "Asked for.", "asked", ""
    elif workers == 1:
        why, source, reference = "One worker makes no two groups.", "assumed", ""
    elif pace.unlike:
        why = (
            "The number with the most updates a round in that time, as the fixed time of a step "
            f"differs from worker to worker ({shown_relative(_overheads(pace))})."
        )
        source, reference = "predicted", ""
    elif small != usual_small_workers(workers):
        why = (
            "As many as have, in the time that goal.deadline leaves, a batch of at most half the "
            "large one; that of three quarters of the workers would be nearer to it."
        )
        source, reference = "predicted", ""
    else:
        why = (
            "Three quarters of the workers: in the paper's table 5 (CIFAR-100, four workers, "
            "single runs) three of four were most accurate, 70.6 % against 67.8 % with large "
            "batches alone at 1.05 times the time. Few, very small batches hurt in its authors' "
            "logs."
        )
        source, reference = "published", PAPER
    why += _updates(found, pace)
    why += _control(pace)
    return Reason(
        choice="small-batch workers",
        value=f"{small} of {workers}",
        why=why,
        source=source,
        reference=reference,
        alternatives=_other_counts(found, pace, side, samples),
    )


def _control(pace: Pace) -> str:
    """What one smaller batch for all would do in the same time."""
    why = " All workers small is the control: one uniform smaller batch in the same time."
    if not pace.unlike:
        why += (
            " Where a step's fixed time is the same on all workers, as here, it is as good: 70.1 % "
            "in the paper's table 5, and in five paired runs of ours (docs/measured.md) 23.7 % "
            "against 23.3 % with two sizes and 13.4 % with large batches alone. Most of the gain "
            "is the smaller batch itself."
        )
    else:
        why += (
            " Where fixed times differ, two sizes can be well ahead of it: in five paired runs of "
            "ours, with a tenth of the fixed time on two of four workers (docs/measured.md), "
            "25.7 % against 18.2 % in 1.02 times the time. In 1.05 times the small batch came down "
            "to 23, and both reached 24 %: a smaller dual.extra_time can be better."
        )
    return why + " On ImageNet the paper found no gain in accuracy."


def _updates(found: Served, pace: Pace) -> str:
    """How many there are, and who could make more."""
    small = found.rule.small_workers
    if not small:
        return ""
    why = f" All workers together make {found.groups[-1].updates:.0f} updates a round"
    if not pace.unlike:
        return (
            f"{why}. That many take up the extra time whoever makes them, so other numbers of "
            "small-batch workers come to as many."
        )
    overheads = _overheads(pace)
    border = len(overheads) - small
    cheaper = [n for n in range(border) if overheads[n] < max(overheads[border:])]
    if cheaper:
        listed = ", ".join(map(str, cheaper))
        why += f"; a step costs worker(s) {listed} less than others with the small batch: number "
        why += "workers so that the last ones have the least fixed time"
    return f"{why}."


def _overheads(pace: Pace) -> list[float]:
    return [worker.overhead for worker in pace.workers]


def _other_counts(found: Served, pace: Pace, side: int, samples: int) -> tuple[Alternative, ...]:
    """What other numbers of small-batch workers would mean at the highest resolution."""
    small, workers = found.rule.small_workers, len(pace.workers)
    counts = sorted(
        (n for n in range(workers + 1) if n != small),
        key=lambda n: (n not in (0, workers), abs(n - small)),
    )[:_MOST_ALTERNATIVES]
    extra = found.rule.extra_time if small else USUAL_EXTRA_TIME
    chosen = found.groups[-1].round_seconds
    shown = []
    for count in sorted(counts):
        name = f"{count} of {workers}"
        try:
            other = grouped(
                pace,
                side,
                found.large_batches[-1],
                small_workers=count,
                extra_time=extra if count else 1.0,
                samples=samples,
                exchange_steps=found.rule.exchange_steps,
            )
        except PlanError:
            shown.append(Alternative(value=name, loss="no small batch gives that time"))
            continue
        time = other.round_seconds / chosen - 1
        if not count:
            loss = f"large batches alone, {abs(time):.1%} {'more' if time > 0 else 'less'} time"
        else:
            share = sum(other.samples[workers - count :]) / samples
            loss = f"small batch {other.pair.small_batch} with {share:.0%} of the data"
            loss += ", the uniform control" if count == workers else ""
        loss += f", {other.updates:.0f} updates a round"
        shown.append(Alternative(value=name, loss=loss))
    return tuple(shown)


def _extra_time(job: Job, found: Served) -> tuple[Reason, ...]:
    if not found.rule.small_workers:
        return ()
    why, source = _WHY_EXTRA[found.why_time]
    why = why.format(deadline=f"{job.goal.deadline or 0:g}", most=MOST_EXTRA_TIME)
    steps = found.groups[-1].samples[0] / found.groups[-1].local_batch_sizes[0]
    if steps < FEW_STEPS:
        why += (
            f" A round is only {steps:.3g} steps of a large batch, the last of which need not be a "
            f"whole one, so the time can be off by as much as {1 / steps:.0%}."
        )
    return (
        Reason(
            choice="extra time",
            value=f"{found.rule.extra_time:g} times a round of large batches alone",
            why=why,
            source=source,
            reference=PAPER if source == "published" else "",
        ),
    )


def _small(found: Served, sides: Sequence[int], *, measured: bool) -> tuple[Reason, ...]:
    if not found.rule.small_workers:
        return ()
    batches = [groups.pair.small_batch or 0 for groups in found.groups]
    texts = []
    for groups, side in zip(found.groups, sides, strict=True):
        where = f" at {side} px" if len(sides) > 1 else ""
        how = "stated times"
        if groups.measured is not None:
            one = groups.measured
            how = f"batches {one.large_batch} and {one.small_batch}, measured side by side"
        elif measured:
            how = "the fitted step times at both batches"
        texts.append(
            f"By {how}, a step takes {1e3 * groups.step_seconds:.3g} ms and "
            f"{1e3 * groups.sample_seconds:.3g} ms a sample{where}."
        )
    if measured and any(
        groups.measured is None and groups.fixed_share <= LEAST_FIXED * (1 + 1e-9)
        for groups in found.groups
    ):
        texts.append(
            f"No fixed part could be told from none: {LEAST_FIXED:.0%} of a step is taken for it."
        )
    texts.append(
        "So both groups end a round together. A small error of the fixed part moves it a lot."
    )
    sure = all(groups.measured is not None for groups in found.groups)
    return (
        Reason(
            choice="small batch",
            value=_at_each(batches, sides),
            why=" ".join(texts),
            source="measured" if sure else "predicted" if measured else "assumed",
        ),
    )


def _shares(found: Served, pace: Pace) -> Reason:
    top = found.groups[-1]
    small = found.rule.small_workers
    large = len(top.samples) - small
    parts = [
        f"{count} x {share}"
        for count, share in ((large, top.pair.large_samples), (small, top.pair.small_samples))
        if count
    ]
    why = "Together all the data once a round, so that all workers end it at the same time; "
    why += "what rounding leaves goes one each to the last group."
    for what, values in (
        ("speed", [worker.speed for worker in pace.workers]),
        ("fixed time of a step", _overheads(pace)),
    ):
        shown = shown_relative(values)
        if shown:
            why += f" Each worker's share follows its {what}: {shown}."
    return Reason(choice="samples per round", value=" + ".join(parts), why=why, source="predicted")


def _factor(found: Served) -> tuple[Reason, ...]:
    small, top = found.rule.small_workers, found.groups[-1]
    if not small or small == len(top.samples):
        return ()
    rule = found.rule.update_factor
    value = update_factor(top.samples_ratio(found.rule.exchange_steps), rule)
    what = {
        "ratio": "A small-batch worker's model counts by its samples between two exchanges over a "
        "large-batch worker's.",
        "sqrt": "The root of the ratio of both groups' samples.",
        "none": "All models count alike.",
    }[rule]
    return (
        Reason(
            choice="update factor",
            value=f"{value:.3f} for small batches",
            why=f"{what} In the paper's table 3, all three are within about a point.",
            source="published",
            reference=PAPER,
        ),
    )


def _server(found: Served) -> Reason:
    rule = found.rule
    why = {
        "asp": "Each worker's weights are merged as they arrive; nobody waits.",
        "bsp": "All wait for each other after each round.",
        "ssp": f"No worker is more than {rule.staleness} rounds ahead of the slowest.",
    }[rule.consistency]
    if rule.consistency == "asp":
        why += (
            " In two paired runs of ours with rounds as long as planned, `bsp` reached 26.2 % and "
            "`asp` 23.2 % in the same time (docs/measured.md); `bsp` loses time where rounds "
            "scatter."
        )
    return Reason(
        choice="consistency",
        value=rule.consistency
        if rule.staleness is None
        else f"{rule.consistency} ({rule.staleness})",
        why=f"{why} Momentum after an exchange: {rule.momentum}.",
        source="published",
        reference=HO if rule.consistency == "ssp" else PAPER,
    )


def _at_each(batches: Sequence[int], sides: Sequence[int]) -> str:
    if len(set(batches)) == 1:
        return f"{batches[0]} samples"
    return ", ".join(f"{n} at {side} px" for n, side in zip(batches, sides, strict=True))
