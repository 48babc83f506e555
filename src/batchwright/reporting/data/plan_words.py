"""A plan as table rows and short texts, for pages, terminal and comparison."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from batchwright.records import Plan, Stage
from batchwright.records.text.formatting import in_bytes, in_seconds, local_batches
from batchwright.records.text.plan_text import local_batch_word, method_words
from batchwright.reporting.data.round_curves import large_workers


def stage_rows(plan: Plan) -> list[tuple[str, list[str]]]:
    """The plan's stage table, transposed: (name, one value per stage)."""
    stages = plan.stages
    several = len({stage.rate_stage for stage in stages}) > 1
    rows = [
        ("stage", [str(number) for number in range(1, len(stages) + 1)]),
        ("epochs", [str(stage.epochs) for stage in stages]),
        ("of the rate", [str(stage.rate_stage + 1) for stage in stages] if several else []),
        ("resolution", [f"{stage.resolution} px" for stage in stages]),
        ("learning rate", [f"{stage.learning_rate:.4g}" for stage in stages]),
        ("dropout", [f"{stage.dropout:g}" for stage in stages]),
        ("augmentation", [_augmentation(stage) for stage in stages]),
        ("workers", [str(stage.workers) for stage in stages]),
        (batch_word(plan), [local_batches(stage.local_batch_sizes) for stage in stages]),
        ("global batch", [f"{stage.global_batch_size:,}" for stage in stages]),
        ("samples a round", [_distinct(stage.samples_per_round, ",") for stage in stages]),
        ("update factors", [_distinct(stage.update_factors, ".3g") for stage in stages]),
        ("micro-batch", [f"{stage.micro_batch_size:,}" for stage in stages]),
        ("accumulation", [str(stage.accumulation_steps) for stage in stages]),
        ("predicted s / epoch", [in_seconds(stage.predicted_epoch_seconds) for stage in stages]),
        ("predicted memory", [in_bytes(stage.predicted_bytes) for stage in stages]),
    ]
    return [(word, values) for word, values in rows if any(values)]


def split_rows(plan: Plan) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Values that all stages share as (name, value), and the others as rows, one for each stage.

    The first row is the head. A plan of one stage has no shared values.
    """
    facts = stage_rows(plan)
    several = len(plan.stages) > 1
    common = [(word, values[0]) for word, values in facts if several and len(set(values)) == 1]
    kept = [(word, values) for word, values in facts if word not in dict(common)]
    rows = [[values[at] for _, values in kept] for at in range(len(plan.stages))]
    return common, [[_SHORT.get(word, word) for word, _ in kept], *rows]


_MAX_GROUPS = 4  # of numbers in one cell

_SHORT = {
    "of the rate": "rate stage",
    "learning rate": "rate",
    "resolution": "side",
    "local batch, large + small": "large + small",
    "predicted s / epoch": "s / epoch",
}


def batch_word(plan: Plan) -> str:
    """The heading of local batches; with two batch sizes it says that the large ones come first."""
    large = large_workers(plan)
    if plan.server is not None and 0 < large < plan.workers:
        return "local batch, large + small"
    return local_batch_word(plan)


def stage_word(plan: Plan, index: int) -> str:
    """A stage's number, counted from one, and its resolution if the plan has several."""
    several = len({stage.resolution for stage in plan.stages}) > 1
    return f"{index + 1}: {plan.stages[index].resolution} px" if several else str(index + 1)


def decided_words(plan: Plan) -> str:
    """The batch for a headline: the global one, or with two batch sizes both local ones."""
    large = large_workers(plan)
    if plan.server is None or not 0 < large < plan.workers:
        return f"global batch {range_words(stage.global_batch_size for stage in plan.stages)}"
    first, last = (
        range_words(size for stage in plan.stages for size in stage.local_batch_sizes[part])
        for part in (slice(large), slice(large, None))
    )
    return f"batches {first} and {last}"


def local_range(plan: Plan) -> str:
    """Ranges of the local batches of all stages, for a narrow column; large + small if both."""
    large = large_workers(plan)
    parts = [slice(large), slice(large, None)] if plan.server is not None else [slice(None)]
    sizes = ([n for row in plan.stages for n in row.local_batch_sizes[part]] for part in parts)
    return " + ".join(range_words(ones) for ones in sizes if ones)


def batches_words(plan: Plan) -> str:
    """The local batches in few words; if stages differ, those of the first and the last."""
    distinct = list(dict.fromkeys(local_batches(stage.local_batch_sizes) for stage in plan.stages))
    if len(distinct) > 1:
        return f"{distinct[0]} at first, {distinct[-1]} at last"
    return f"{distinct[0]}{' at first' if plan.method_spec.balancer else ''}"


def range_words(values: Iterable[int]) -> str:
    """Whole numbers as a range, or one number if all are equal.

    >>> range_words([64, 64]), range_words([512, 64, 128])
    ('64', '64 to 512')
    """
    listed = list(values)
    low, high = min(listed), max(listed)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _augmentation(stage: Stage) -> str:
    strength = stage.augmentation_strength
    return stage.augmentation + (f" x {strength:g}" if strength != 1 else "")


def _distinct(values: tuple[float, ...], spec: str) -> str:
    """Numbers with equal neighbours counted; more than four groups as a range; empty if none."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    if len(runs) > _MAX_GROUPS:
        return f"{min(values):{spec}} to {max(values):{spec}}"
    return " + ".join(
        f"{count} x {value:{spec}}" if count > 1 else f"{value:{spec}}" for value, count in runs
    )


def header_rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan's header as (name, value)."""
    rule = plan.learning_rate
    gained = " times the measured gain" if rule.scaling == "gain" else ""
    return [
        ("method", method_words(plan)),
        ("merge", plan.merge),
        ("update", plan.update),
        ("precision", plan.precision),
        (
            "learning-rate rule",
            f"{rule.base:.4g} at batch {rule.base_batch}, {rule.scaling} scaling: peak "
            f"{rule.peak:.4g}{gained}; warm-up {rule.warmup_epochs:g} epochs; decay "
            f"{rule.decay}",
        ),
        ("seed", str(plan.job.seed)),
    ]
