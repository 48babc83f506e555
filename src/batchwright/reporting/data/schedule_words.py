"""The learning rate of a plan in words, with the source of each part."""

from __future__ import annotations

from batchwright.records import RateSchedule, ScheduleRow
from batchwright.records.text.formatting import counted, local_batches, source


def start_lines(schedule: RateSchedule) -> list[str]:
    """The lines that a run prints before it trains: rate and batch; warm-up and decay."""
    batch = _joined(batch_words(schedule), _source(schedule, "global batch"))
    rate = _joined(rate_words(schedule), _source(schedule, "learning rate"))
    warmup = _joined(warmup_words(schedule), _source(schedule, "warm-up"))
    decay = _joined(decay_words(schedule), _source(schedule, "decay"))
    return [f"learning rate: {rate}; {batch}", f"warm-up: {warmup}; decay: {decay}"]


def fact_rows(schedule: RateSchedule) -> list[tuple[str, str]]:
    """Rate, batch, warm-up, decay and length as (name, value)."""
    parts = [
        ("learning rate", rate_words(schedule), "learning rate"),
        ("batch", batch_words(schedule), "global batch"),
        ("warm-up", warmup_words(schedule), "warm-up"),
        ("decay", decay_words(schedule), "decay"),
    ]
    length = f"{counted(schedule.epochs, 'epoch')} of {schedule.samples_per_epoch:,} images"
    facts = [(word, _joined(value, _source(schedule, choice))) for word, value, choice in parts]
    if schedule.ags is not None:
        words = f"factors of each tensor besides, mode {schedule.ags.mode}"
        largest = max(one.learning_rate * schedule.rows[one.row].most for one in schedule.points)
        if any(row.most_factor != 1 for row in schedule.rows):
            words += (
                f": with the rate up to {largest:.4g} per step, {largest / schedule.rule.base:.4g} "
                "times the base rate"
            )
        facts.append(("adaptive gradient scaling", words))
    return [*facts, ("length", length)]


def rate_words(schedule: RateSchedule) -> str:
    """The peak rate as a formula, such as ``0.2 per step = 0.1 x sqrt(512 / 128)``."""
    rule, batch = schedule.rule, schedule.scaled_to
    peak = f"{rule.peak:.4g} per step"
    if batch is None:
        return f"{peak}, where {rule.base:.4g} is for {rule.base_batch} samples"
    ratio = f"{batch} / {rule.base_batch}"
    most = max(row.most_gain for row in schedule.rows)
    gain = f"times a measured gain of 1 to {most:.4g} ({ratio})"
    return {
        "linear": f"{peak} = {rule.base:.4g} x {ratio}",
        "sqrt": f"{peak} = {rule.base:.4g} x sqrt({ratio})",
        "gain": f"{peak}, {gain if most > 1 else f'with nothing to gain ({ratio})'}",
        "none": f"{peak}, not scaled (batch {batch}, base batch {rule.base_batch})",
    }[rule.scaling]


def batch_words(schedule: RateSchedule) -> str:
    """The global batch at the highest resolution, as the sum of local batches."""
    row = max(schedule.rows, key=lambda row: row.resolution)
    if schedule.served:
        return (
            f"no global batch: workers step by themselves, {local_batches(row.local_batch_sizes)} "
            f"samples{_in_parts(row)}"
        )
    words = f"global batch {row.global_batch_size}"
    if len(row.local_batch_sizes) == 1 and row.accumulation_steps == 1:
        return f"{words} = 1 worker x {row.global_batch_size}"
    if len(set(row.local_batch_sizes)) > 1:
        return f"{words} = {local_batches(row.local_batch_sizes)} on the workers{_in_parts(row)}"
    workers, local = len(row.local_batch_sizes), row.local_batch_sizes[0]
    words += f" = {counted(workers, 'worker')} x "
    passes = row.accumulation_steps
    if passes > 1 and local % passes == 0:
        return f"{words}{local // passes} x {passes} accumulated"
    return f"{words}{local}{_in_parts(row)}"


def _in_parts(row: ScheduleRow) -> str:
    passes = row.accumulation_steps
    return "" if passes == 1 else f" in up to {passes} micro-batches"


def warmup_words(schedule: RateSchedule) -> str:
    """Length of the warm-up in epochs and steps, and its first and last rate."""
    rule, steps = schedule.rule, schedule.warmup_steps
    if rule.warmup_epochs == 0:
        return "none"
    length = f"{rule.warmup_epochs:g} epochs"
    if steps is not None:
        length += f" ({counted(steps, 'step')})"
    first = schedule.points[0].learning_rate
    return f"{length} from {first:.4g} to {rule.peak:.4g}"


def decay_words(schedule: RateSchedule) -> str:
    """The shape of the decay, and whether the rate has stages."""
    if len({row.rate_stage for row in schedule.rows}) > 1:
        return "by stages" if schedule.rule.decay == "none" else f"{schedule.rule.decay}, by stages"
    return schedule.rule.decay


def _source(schedule: RateSchedule, choice: str) -> str:
    """The source of a choice by the plan's reasons; empty if there is no reason for it."""
    found = next((one for one in schedule.reasons if one.choice == choice), None)
    return "" if found is None else source(found.source, found.reference)


def _joined(words: str, whence: str) -> str:
    return f"{words} [{whence}]" if whence else words
