"""Why rows, rates and the training's time are what they are, for plans of several rows.

What decides stands in `resolution` and `composed`; nothing here does.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.algorithms.dual_batch import PAPER
from batchwright.planning.candidates.table import mebibytes
from batchwright.planning.reasons import reasons
from batchwright.planning.resolution import Schedule
from batchwright.records import DataFacts, Job, LearningRateRule, Reason, Source, Stage

# ------------------------------------------------------------------------------- the whole method


def method(job: Job) -> Reason:
    """What the method does."""
    why = f"Asked for. {job.method_spec.why}"
    return Reason(choice="method", value=job.method, why=why, source="published", reference=PAPER)


def preset(job: Job, schedule: Schedule | None, data: DataFacts) -> tuple[Reason, ...]:
    """The published schedule, and why the data may not suit it."""
    if schedule is None or schedule.preset is None:
        return ()
    doubts = schedule.preset.doubts(data)
    why = "Asked for. What the job says otherwise than by default goes before it."
    if doubts:
        why += f" It {' and '.join(doubts)}: it may not suit."
    return (
        Reason(
            choice="preset",
            value=job.cycle.preset,
            why=why,
            source="published",
            reference=PAPER,
        ),
    )


# ----------------------------------------------------------------------------------- the schedule


def resolutions(job: Job, schedule: Schedule, data: DataFacts) -> Reason:
    """Which resolutions, and in which order."""
    sides = schedule.resolutions
    order = {
        "cycle": "low to high in each stage of the learning rate, so that the high rate meets all",
        "one-pass": "low to high once over the whole training, as progressive learning without a "
        "cycle does",
        "fixed": "the highest throughout",
    }[job.cycle.order]
    pixels = sum(
        part.epochs * (sides[part.level] / sides[-1]) ** 2 for part in schedule.parts
    ) / max(1, job.epochs)
    own = "the size of the data's own images"
    if sides[-1] != data.side:
        own = f"asked for, the data's own images have {data.side} px"
    return Reason(
        choice="resolutions",
        value=", ".join(map(str, sides)) + " px",
        why=f"{order[0].upper()}{order[1:]}; the highest is {own}. All epochs together go through "
        f"{pixels:.0%} of the pixels of {sides[-1]} px throughout.",
        source="published" if job.cycle.order == "cycle" else "asked",
        reference=PAPER if job.cycle.order == "cycle" else "",
    )


def stages(job: Job, schedule: Schedule) -> Reason:
    """How long the stages are, and who gets the odd epochs."""
    lengths = "+".join(map(str, schedule.stage_epochs))
    source: Source
    if job.cycle.stage_epochs != "auto":
        why, source = "Asked for.", "asked"
    elif schedule.preset is not None:
        why, source = f"In the proportion of cycle.preset={job.cycle.preset}.", "published"
    else:
        why, source = "Each half as long as the one before, as published.", "published"
    uneven = any(
        len({part.epochs for part in schedule.parts if part.rate_stage == stage}) > 1
        for stage in range(len(schedule.stage_epochs))
    )
    if uneven and job.cycle.order == "cycle" and job.cycle.shares == "auto":
        why += (
            " Where a stage does not divide evenly, the higher resolution gets the odd epoch, as "
            "the highest is what is evaluated."
        )
    rates = ", ".join(f"{rate:g}" for rate in schedule.rates)
    return Reason(
        choice="stages",
        value=f"{lengths} epochs at {rates} times the rate",
        why=why,
        source=source,
        reference=PAPER if source == "published" else "",
    )


def cycle_batches(batches: Sequence[int], sides: Sequence[int], source: str) -> Reason:
    """The global batch at each resolution of `cyclic`."""
    values = ", ".join(f"{n} at {side} px" for n, side in zip(batches, sides, strict=True))
    found: dict[str, tuple[str, Source]] = {
        "asked": ("Asked for.", "asked"),
        "published": (
            "The published batch of a step, for which the published rate holds.",
            "published",
        ),
    }
    why, kind = found.get(source, ("The same at all: the one chosen at the highest.", "assumed"))
    return Reason(
        choice="batch at each resolution",
        value=values,
        why=why,
        source=kind,
        reference=PAPER if source == "published" else "",
    )


def dropouts(schedule: Schedule) -> tuple[Reason, ...]:
    """Dropout and augmentation, where they differ between resolutions."""
    if len(set(schedule.dropouts)) == 1 and len(set(schedule.strengths)) == 1:
        return ()
    published = schedule.preset is not None and schedule.dropouts == schedule.preset.dropouts
    values = [f"dropout {', '.join(f'{one:g}' for one in schedule.dropouts)}"]
    if len(set(schedule.strengths)) > 1:
        values.append(f"strength {', '.join(f'{one:g}' for one in schedule.strengths)}")
    return (
        Reason(
            choice="regularization",
            value="; ".join(values),
            why="Larger images, more of it: each resolution has its own.",
            source="published" if published else "asked",
            reference=PAPER if published else "",
        ),
    )


# ------------------------------------------------------------------------------------------ times


def link(job: Job) -> tuple[Reason, ...]:
    """The network of a virtual cluster."""
    if not job.launcher.simulated or job.link.latency is None or job.link.bandwidth is None:
        return ()
    return (
        Reason(
            choice="link",
            value=f"{1e3 * job.link.latency:g} ms and {job.link.bandwidth / 1e6:g} MB/s",
            why="Of the virtual cluster, whose times are simulated; unless link.latency and "
            "link.bandwidth say otherwise, Ethernet of 1 Gb/s as in the dual-batch paper.",
            source="assumed",
        ),
    )


def training_time(job: Job, stages: Sequence[Stage], other_seconds: float) -> tuple[Reason, ...]:
    """The whole training over all rows; nothing where nothing is predicted."""
    found = [(stage.epochs, stage.predicted_epoch_seconds) for stage in stages]
    value, low, high = (
        other_seconds + sum(n * getattr(one, end) for n, one in found if one is not None)
        for end in ("value", "low", "high")
    )
    if any(one is None for _, one in found):
        return ()
    simulated = " of the simulated clock" if job.launcher.simulated else ""
    why = f"{sum(n for n, _ in found)} epochs, and the evaluations among them."
    if job.goal.deadline is not None:
        why += f" goal.deadline={job.goal.deadline:g} s holds for the upper end."
    return (
        Reason(
            choice="training time",
            value=f"{value:.3g} s{simulated} ({low:.3g} to {high:.3g})",
            why=why,
            source="predicted",
        ),
    )


def round_time(job: Job, stages: Sequence[Stage]) -> tuple[Reason, ...]:
    """A round at the highest resolution."""
    top = max(stages, key=lambda stage: stage.resolution)
    estimate = top.predicted_epoch_seconds
    if estimate is None:
        return ()
    return (
        Reason(
            choice="round time",
            value=f"{estimate.value:.3g} s ({estimate.low:.3g} to {estimate.high:.3g})",
            why=f"At {top.resolution} px, until the last worker has ended its samples, the "
            "exchange with the server included.",
            source="assumed" if job.launcher.simulated else "predicted",
        ),
    )


def memory(stages: Sequence[Stage], limit: int) -> tuple[Reason, ...]:
    """The largest predicted peak of a worker against the limit."""
    peaks = [stage.predicted_bytes for stage in stages if stage.predicted_bytes is not None]
    if not peaks:
        return ()
    peak = max(peaks, key=lambda one: one.high)
    return (
        Reason(
            choice="memory",
            value=f"{mebibytes(peak.value)} per worker",
            why=f"At most {mebibytes(peak.high)} predicted, on a large-batch worker; the limit is "
            f"{mebibytes(limit)}.",
            source="predicted",
        ),
    )


def rate(
    job: Job, rule: LearningRateRule, batch: int, schedule: Schedule | None
) -> tuple[Reason, ...]:
    """Rate, warm-up and decay: of a step of ``batch`` samples, a worker's own under a server."""
    if schedule is not None and schedule.preset is not None and job.learning_rate == "auto":
        first = Reason(
            choice="learning rate",
            value=f"{rule.peak:.4g} per step",
            why="As published, whatever the batch; each stage has its own.",
            source="published",
            reference=PAPER,
        )
    else:
        first = reasons.rate(rule, batch)
        whose = "a worker's own steps" if job.method_spec.served else "steps"
        first = first.model_copy(
            update={
                "why": f"{first.why} It is that of {whose} at the highest resolution, and the "
                "same for other batches of the plan."
            }
        )
    decay = reasons.decay(rule)
    if job.method_spec.cycles:
        decay = Reason(
            choice="decay",
            value="by stages",
            why="Each stage has its own rate, in the table; nothing else decays it.",
            source="published",
            reference=PAPER,
        )
    return first, reasons.warmup(job, rule, batch), decay
