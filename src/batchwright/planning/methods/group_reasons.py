"""Reasons for two groups of workers: their batches, numbers, times and shares."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from batchwright.algorithms.dual_batch import Rounding, update_factor
from batchwright.errors import PlanError
from batchwright.planning.chosen import Chosen
from batchwright.planning.methods.groups import (
    MIN_FIXED,
    Groups,
    Pace,
    grouped,
    shown_relative,
)
from batchwright.planning.methods.two_groups import USUAL_EXTRA_TIME, Served, at_each
from batchwright.records import Alternative, Reason, Source
from batchwright.records.registries.methods import PAPER
from batchwright.records.text.formatting import counted, milliseconds, percent

FEW_STEPS = 40
"""Steps of a round below which its last step, which may be smaller, matters for its time."""

HO = "Ho et al. 2013"

_MAX_ALTERNATIVES = 8  # numbers of small-batch workers shown beside the chosen one


def group_reasons(
    found: Served,
    pace: Pace,
    sides: Sequence[int],
    *,
    samples: int,
    measured: bool,
    rounding: Rounding,
) -> tuple[Reason, ...]:
    """Reasons for both batches, both shares, and for what the server does.

    Args:
        found: The two groups.
        pace: How long steps take.
        sides: Resolutions, low to high, in pixels.
        samples: Training samples of an epoch.
        measured: Whether step times were measured, rather than stated.
        rounding: How batches and shares became whole numbers.
    """
    small, workers = found.small_workers, len(pace.workers)
    control = _CONTROL.format(_UNLIKE if pace.unlike else _ALIKE)
    more = f"{small.why}{_updates(found, pace)}{control}"
    others = _other_counts(found, pace, sides[-1], samples, rounding)
    counts = small._replace(why=more, alternatives=others)
    large = found.large_batches
    return (
        large.reason("large batch", at_each(large.value, sides)),
        counts.reason("small-batch workers", f"{small.value} of {workers}"),
        *(_of_small(found, sides, measured=measured) if small.value else ()),
        _shares(found, pace, rounding),
        *(_factor(found) if 0 < small.value < workers else ()),
        _server(found),
    )


_CONTROL = (
    " With the small batch on all workers there is one smaller batch in the same time: the "
    "control. {} On ImageNet the paper found no gain in accuracy."
)
_ALIKE = (
    "Where a step's fixed time is the same on all workers, as here, the control is as accurate: "
    "70.1 % in the paper's table 5, and no worse in five paired runs of an earlier version "
    "(docs/log.md). Most of the gain is the smaller batch itself."
)
_UNLIKE = (
    "Where fixed times differ, as here, two sizes can be well ahead of the control, as in five "
    "paired runs of an earlier version, with a tenth of the fixed time on two of four workers "
    "(docs/log.md). With more extra time the small batch was so small that both were level: a "
    "smaller dual.extra_time can be better."
)


def _updates(found: Served, pace: Pace) -> str:
    """The number of updates in a round, and which workers could make more, in a sentence."""
    small = found.small_workers.value
    if not small:
        return ""
    why = f" All workers together make {found.groups[-1].updates:.0f} updates a round"
    if not pace.unlike:
        return (
            f"{why}. Other numbers of small-batch workers come to as many, since the extra time "
            "has room for no more."
        )
    overheads = pace.overheads
    border = len(overheads) - small
    cheaper = [n for n in range(border) if overheads[n] < max(overheads[border:])]
    if cheaper:
        listed = ", ".join(map(str, cheaper))
        who = "worker" if len(cheaper) == 1 else "workers"
        why += f"; a step costs {who} {listed} less than others with the small batch: number "
        why += "workers so that the last ones have the least fixed time"
    return f"{why}."


def _other_counts(
    found: Served, pace: Pace, side: int, samples: int, rounding: Rounding
) -> tuple[Alternative, ...]:
    """Other numbers of small-batch workers as alternatives, at the highest resolution."""
    small, workers = found.small_workers.value, len(pace.workers)
    counts = sorted(
        (n for n in range(workers + 1) if n != small),
        key=lambda n: (n not in (0, workers), abs(n - small)),
    )[:_MAX_ALTERNATIVES]
    extra = found.extra_time.value if small else USUAL_EXTRA_TIME

    def with_small(count: int, pace: Pace) -> Groups:
        return grouped(
            pace,
            side,
            found.large_batches.value[-1],
            small_workers=count,
            extra_time=extra if count else 1.0,
            samples=samples,
            exchange_steps=found.rule.exchange_steps,
            rounding=rounding,
        )

    chosen = found.groups[-1].round_seconds
    with suppress(PlanError):
        # Large batches alone have no measured pair, so a round is compared without one: pairs were
        # measured at another time, at which the machine may have been quicker or slower.
        chosen = with_small(small, replace(pace, pairs=())).round_seconds
    shown = []
    for count in sorted(counts):
        name = f"{count} of {workers}"
        try:
            other = with_small(count, pace)
        except PlanError:
            shown.append(Alternative(value=name, loss="no small batch gives that time"))
            continue
        time = other.round_seconds / chosen - 1
        if not count:
            loss = (
                f"large batches alone, {percent(abs(time))} {'more' if time > 0 else 'less'} time"
            )
        else:
            share = sum(other.samples[workers - count :]) / samples
            loss = f"small batch {other.pair.small_batch} with {percent(share, 0)} of the data"
            loss += ", the uniform control" if count == workers else ""
        loss += f", {other.updates:.0f} updates a round"
        shown.append(Alternative(value=name, loss=loss))
    return tuple(shown)


def _of_small(found: Served, sides: Sequence[int], *, measured: bool) -> tuple[Reason, Reason]:
    """Reasons for the extra time of a round, and for the small batches."""
    extra, top = found.extra_time, found.groups[-1]
    steps = top.samples[0] / top.local_batch_sizes[0]
    if steps < FEW_STEPS:
        extra = extra._replace(
            why=f"{extra.why} A round is only {steps:.3g} steps of a large batch, the last of "
            "which need not be a whole one, so the time can be off by as much as "
            f"{percent(1 / steps, 0)}."
        )
    texts = []
    for groups, side in zip(found.groups, sides, strict=True):
        where = f" at {side} px" if len(sides) > 1 else ""
        how = "the fitted step times at both batches" if measured else "stated times"
        if groups.measured is not None:
            one = groups.measured
            how = f"batches {one.large_batch} and {one.small_batch}, measured side by side"
        texts.append(
            f"By {how}, a step takes {milliseconds(groups.step_seconds)} whatever its batch, and "
            f"{milliseconds(groups.sample_seconds)} for each sample{where}."
        )
    if measured and any(
        groups.measured is None and groups.fixed_share <= MIN_FIXED * (1 + 1e-9)
        for groups in found.groups
    ):
        texts.append(
            "The first part is too small to be told from none, so "
            f"{percent(MIN_FIXED, 0)} of a step is assumed for it."
        )
    together = "all workers end a round" + " together" * (len(top.samples) > 1)
    texts.append(
        f"With this batch {together}. A small error of the first part changes the batch a lot."
    )
    batches = [groups.pair.small_batch or 0 for groups in found.groups]
    sure = all(groups.measured is not None for groups in found.groups)
    source: Source = "measured" if sure else "predicted" if measured else "assumed"
    value = f"{extra.value:g} times a round of large batches alone"
    return (
        extra.reason("extra time", value),
        Chosen(batches, " ".join(texts), source).reason("small batch", at_each(batches, sides)),
    )


def _shares(found: Served, pace: Pace, rounding: Rounding) -> Reason:
    top, small = found.groups[-1], found.small_workers.value
    parts = [
        f"{count} x {share}"
        for count, share in (
            (len(top.samples) - small, top.pair.large_samples),
            (small, top.pair.small_samples),
        )
        if count
    ]
    why = "A round goes through all the data once, and all workers end it at the same time. The "
    why += "last group gets what rounding leaves, one sample each."
    if rounding == "truncate":
        why += " Batches and shares are cut to whole numbers, as in the paper's tables 2 and 3."
    for what, values in (
        ("speed", [worker.speed for worker in pace.workers]),
        ("fixed time of a step", pace.overheads),
    ):
        if shown := shown_relative(values):
            why += f" Each worker's share follows its {what}: {shown}."
    return Chosen(" + ".join(parts), why, "predicted").reason("samples per round")


def _factor(found: Served) -> tuple[Reason]:
    rule = found.rule.update_factor
    value = update_factor(found.groups[-1].samples_ratio(found.rule.exchange_steps), rule)
    what = {
        "ratio": "A small-batch worker's model counts by its samples between two exchanges over a "
        "large-batch worker's.",
        "sqrt": "The root of the ratio of both groups' samples.",
        "none": "All models count alike.",
    }[rule]
    why = (
        f"{what} In the paper's table 3, all three are within about a point; in runs of ours "
        "`none` was 0.5 to 0.8 points ahead of `ratio` (docs/measured.md)."
    )
    factor = Chosen(value, why, "published", PAPER)
    return (factor.reason("update factor", f"{value:.3f} for small batches"),)


def _server(found: Served) -> Reason:
    rule = found.rule
    value, reference, why = {
        "asp": (
            "asp",
            PAPER,
            "Each worker's weights are merged as they arrive; nobody waits. `bsp` was more "
            "accurate in the same time in two paired runs of an earlier version, with rounds as "
            "long as planned (docs/log.md); it loses time where rounds scatter.",
        ),
        "bsp": ("bsp", PAPER, "All wait for each other after each round."),
        "ssp": (
            f"ssp ({rule.staleness})",
            HO,
            f"No worker is more than {counted(rule.staleness or 0, 'round')} ahead of the slowest.",
        ),
    }[rule.consistency]
    why += f" Momentum after an exchange: {rule.momentum}."
    return Chosen(value, why, "published", reference).reason("consistency")
