"""A plan as text: its stages, the reason of each choice, knees and candidates.

The text stays short whatever the plan's size: of many candidates it shows the most relevant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from textwrap import wrap

from batchwright.records.base import Estimate
from batchwright.records.plan_fields import (
    KindCount,
    PlanFields,
    Prediction,
)
from batchwright.records.text.formatting import (
    between,
    column_blocks,
    counted,
    duration,
    in_seconds,
    local_batches,
    number,
    percent,
    size,
    source,
)
from batchwright.records.text.problems import printable

MAX_ROWS = 48  # candidates shown; of more the chosen cluster, knees and frontier

WIDTH = 100  # of the text, in characters; tables may be wider
_ALIGNED = 40  # widest value of an alternative up to which the losses are aligned
_REMARK = 30  # width of the last column in a table that does not fit

Cluster = tuple[int, tuple[KindCount, ...]]
Size = tuple[int, int, int]  # workers, resolution, global batch


def explain(plan: PlanFields, width: int | None = None) -> str:
    """The plan as text for a person.

    Tables that are wider than a terminal of ``width`` characters are continued below; with ``None``
    text is 100 characters wide, and tables are as wide as they need.
    """
    parts = (
        [line for text in _header_lines(plan) for line in _hanging(text, width, 0)],
        _stage_lines(plan, width),
        _reason_lines(plan, width),
        _knee_lines(plan, width),
        _candidate_lines(plan, width),
    )
    text = "\n\n".join("\n".join(lines) for lines in parts if lines)
    return "\n".join(printable(line).rstrip() for line in text.split("\n"))


# ------------------------------------------------------------------- words that pages use, too


def cluster_words(workers: int, kinds: Sequence[KindCount]) -> str:
    """A cluster in words, such as ``2 workers`` or ``4 a100 + 2 v100``."""
    return " + ".join(f"{one.count:,} {one.kind}" for one in kinds) or counted(workers, "worker")


def local_batch_word(plan: PlanFields) -> str:
    """The heading of planned local batches: those of the whole run, or only the first ones."""
    return "local batch at first" if plan.method_spec.balancer else "local batch"


def method_words(plan: PlanFields) -> str:
    """How the workers share the batch."""
    if (rule := plan.server) is not None:
        staleness = "" if rule.staleness is None else f"({rule.staleness})"
        often = "once a round"
        if rule.exchange_steps is not None:
            often = f"every {counted(rule.exchange_steps, 'step')}"
        return (
            f"{plan.method}: {rule.small_workers} small-batch, "
            f"{rule.consistency.upper()}{staleness}, merged by {rule.merge} with factor "
            f"{rule.update_factor}, {often}, momentum {rule.momentum}; a round takes "
            f"{rule.extra_time:g} times that of large batches alone"
        )
    if plan.method_spec.cycles:
        return f"{plan.method}: {len(plan.stages)} stages of one resolution and rate each"
    if not plan.method_spec.balancer:
        return plan.method
    steps = plan.job.rebalance_steps
    often = f"every {counted(steps, 'step')} and epoch" if steps else "every epoch"
    if plan.job.rebalance == "published":
        often = "every epoch, as published"
    return f"{plan.method}: local batches follow the measured speeds, {often}"


def planned_sizes(plan: PlanFields) -> frozenset[Size]:
    """Workers, resolution and global batch of each of the plan's stages.

    Where the batch grows while training, only of the first one: the plan chose no other. None with
    a parameter server, whose workers step by themselves.
    """
    stages = plan.stages[:1] if plan.growth else plan.stages
    if plan.server is not None:
        return frozenset()
    return frozenset((row.workers, row.resolution, row.global_batch_size) for row in stages)


def is_chosen(plan: PlanFields, one: Prediction, planned: frozenset[Size] | None = None) -> bool:
    """Whether a candidate is that of one of the plan's stages.

    Callers with many candidates pass `planned_sizes` as ``planned``, to compute them once.
    """
    size = (one.workers, one.resolution, one.global_batch_size)
    sizes = planned_sizes(plan) if planned is None else planned
    return size in sizes and (not one.kinds or one.kinds == plan.kinds)


def chosen_candidate(plan: PlanFields) -> Prediction:
    """The candidate of the plan's cluster and batch; else the first one of its cluster."""
    own = [one for one in plan.considered if (one.workers, one.kinds) == (plan.workers, plan.kinds)]
    return next((one for one in own if is_chosen(plan, one)), own[0])


def rivals(plan: PlanFields) -> tuple[Prediction, ...]:
    """The candidates that differ from a planned stage in the batch alone."""
    clusters = {(stage.workers, stage.resolution) for stage in plan.stages}
    return tuple(
        one
        for one in plan.considered
        if (one.workers, one.resolution) in clusters and (not one.kinds or one.kinds == plan.kinds)
    )


def candidate_words(
    plan: PlanFields, one: Prediction, planned: frozenset[Size] | None = None
) -> str:
    """Remarks on a candidate, such as chosen, knee or extrapolated, and why it was refused.

    ``planned`` as in `is_chosen`.
    """
    knee = any(
        (knee.workers, knee.kinds, knee.resolution, knee.global_batch_size)
        == (one.workers, one.kinds, one.resolution, one.global_batch_size)
        for knee in plan.knees
    )
    words = [
        ("chosen", is_chosen(plan, one, planned)),
        ("knee", knee),
        ("may be as good", one.level),
        ("frontier", one.frontier),
        ("extrapolated", one.extrapolated),
        ("assumed", one.assumed),
        (one.refused, bool(one.refused)),
    ]
    return ", ".join(word for word, applies in words if applies)


def kept_candidates(plan: PlanFields) -> tuple[Prediction, ...]:
    """The candidates to show, in the plan's order, at most `MAX_ROWS`."""
    considered = plan.considered
    if len(considered) <= MAX_ROWS:
        return considered
    planned = planned_sizes(plan)
    ranked = sorted((_rank(plan, one, planned), at) for at, one in enumerate(considered))
    kept = sorted(index for _, index in ranked[:MAX_ROWS])
    return tuple(considered[index] for index in kept)


def _rank(plan: PlanFields, one: Prediction, planned: frozenset[Size]) -> int:
    """The rank by which candidates are shown where there is no room for all; 0 comes first."""
    words, top = candidate_words(plan, one, planned).split(", "), plan.top_resolution
    cluster = (one.workers, one.resolution) == (plan.workers, top)
    best = one.frontier and not one.refused
    order = ("chosen" in words, cluster, "knee" in words, best, one.level, one.resolution == top)
    return next((rank for rank, applies in enumerate(order) if applies), len(order))


def knee_rows(plan: PlanFields) -> list[list[str]]:
    """The knees as table rows: the head, then a row for each cluster and resolution.

    Of many knees, those of `kept_candidates` are shown.
    """
    knees = plan.knees
    if len(knees) > MAX_ROWS // 2:
        shown = {(one.workers, one.kinds, one.resolution) for one in kept_candidates(plan)}
        knees = tuple(one for one in knees if (one.workers, one.kinds, one.resolution) in shown)
    rows = [["cluster", "side", "knee", "interval", "closed form", "Kneedle"]]
    for knee in knees[: MAX_ROWS // 2]:
        batch, ends = knee.global_batch_size, (knee.low, knee.high)
        row = [
            cluster_words(knee.workers, knee.kinds),
            f"{knee.resolution} px",
            "none: each doubling pays" if batch is None else f"{batch:,}",
            " to ".join("?" if end is None else number(end) for end in ends) if any(ends) else "-",
            "not straight" if knee.closed_form is None else number(knee.closed_form),
            "none" if knee.kneedle is None else f"{knee.kneedle:,}",
        ]
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------ the parts


def _header_lines(plan: PlanFields) -> list[str]:
    data, network = plan.data, plan.network
    batches = dict.fromkeys(stage.global_batch_size for stage in plan.stages)
    batch = f"global batch {', '.join(map(str, batches))}"
    if plan.server is not None:
        batch = f"local batches {local_batches(plan.stages[-1].local_batch_sizes)}"
    kinds = f" ({cluster_words(plan.workers, plan.kinds)})" if plan.kinds else ""
    return [
        f"{network.name} ({network.parameters:,} weights) on {data.name} "
        f"({data.train_samples:,} training and {data.val_samples:,} held-out images, "
        f"{len(data.classes)} classes)",
        f"{counted(plan.workers, 'worker')}{kinds}, {batch}, "
        f"{plan.precision}, {plan.update}, {plan.merge}, {counted(plan.epochs, 'epoch')}",
        *(words for words in [method_words(plan)] if words != plan.method),
    ]


def _stage_lines(plan: PlanFields, width: int | None) -> list[str]:
    if plan.server is None and len(plan.stages) == 1:
        local, stage = local_batch_word(plan), plan.stages[0]
        return _aligned(
            [
                ["stage", "epochs", "side", local, "micro-batch", "rate", "s / epoch (95 %)"],
                [
                    "1",
                    str(stage.epochs),
                    str(stage.resolution),
                    local_batches(stage.local_batch_sizes),
                    str(stage.micro_batch_size),
                    f"{stage.learning_rate:.4g}",
                    in_seconds(stage.predicted_epoch_seconds),
                ],
            ],
            width,
            keys=1,
        )
    columns = _stage_columns(plan)
    table = _aligned([list(columns), *zip(*columns.values(), strict=True)], width, keys=2)
    notes = []
    if plan.job.launcher.simulated:
        notes.append("seconds are those of the simulated clock")
    return [*table, *notes]


def _stage_columns(plan: PlanFields) -> dict[str, list[str]]:
    """The table of stages by column; with a server also samples per round and update factors."""
    stages = plan.stages
    ends = list(accumulate(stage.epochs for stage in stages))
    columns = {
        "stage": [str(stage.rate_stage + 1) for stage in stages],
        "epochs": [f"{stage.epochs} (to {end})" for stage, end in zip(stages, ends, strict=True)],
        "side": [str(stage.resolution) for stage in stages],
        "rate": [f"{stage.learning_rate:.4g}" for stage in stages],
        "dropout": [f"{stage.dropout:g}" for stage in stages],
        "strength": [f"{stage.augmentation_strength:g}" for stage in stages],
        "workers x local batch": [local_batches(stage.local_batch_sizes) for stage in stages],
        "micro-batch": [str(stage.micro_batch_size) for stage in stages],
    }
    if plan.server is not None:
        columns["samples per round"] = [local_batches(stage.samples_per_round) for stage in stages]
        columns["factor"] = [_factors(stage.update_factors) for stage in stages]
    columns["s / epoch (95 %)"] = [in_seconds(stage.predicted_epoch_seconds) for stage in stages]
    return columns


def _factors(factors: tuple[float, ...]) -> str:
    """The distinct update factors as text.

    >>> _factors((1.0, 0.81, 0.81)), _factors((1.0, 1.0))
    ('1, 0.810', '1')
    """
    return ", ".join(f"{one:g}" if one == 1 else f"{one:.3f}" for one in dict.fromkeys(factors))


def _reason_lines(plan: PlanFields, width: int | None) -> list[str]:
    lines = ["why"] if plan.reasons else []
    for reason in plan.reasons:
        title = f"{reason.choice} = {reason.value}   [{source(reason.source, reason.reference)}]"
        lines += _hanging(title, width, 2)
        text = min(WIDTH, width or WIDTH)
        lines += wrap(reason.why, text, initial_indent=6 * " ", subsequent_indent=6 * " ")
        wide = max((len(one.value) for one in reason.alternatives), default=0)
        wide = wide if wide <= _ALIGNED else 0
        for one in reason.alternatives:
            lines += _hanging(f"or {one.value:<{wide}}  {one.loss}", width, 6)
    return lines


def _hanging(text: str, width: int | None, indent: int) -> list[str]:
    """An indented line; where it is longer than ``width``, several with a hanging indent."""
    line = " " * indent + text
    if width is None or len(line) <= width:
        return [line]
    return wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4))


def _knee_lines(plan: PlanFields, width: int | None) -> list[str]:
    if not plan.knees:
        return []
    gain = percent(plan.job.goal.doubling_gain)
    title = f"knees: the smallest batch whose doubling saves at most {gain}"
    return [title, *_indented(_aligned(knee_rows(plan), width and width - 4, keys=2))]


def _candidate_lines(plan: PlanFields, width: int | None) -> list[str]:
    """A table of candidates for each cluster and resolution."""
    if not plan.considered:
        return []
    kept = kept_candidates(plan)
    left = len(plan.considered) - len(kept)
    title = "considered, with 95 % intervals"
    lines = [f"{title} ({left:,} more are in the plan)" if left else title]
    # Where the plan chooses the epochs, they replace the column of epochs to the target.
    chosen = any(one.trained_epochs for one in plan.considered)
    known = {
        "s / epoch": True,
        "epochs": chosen,
        "training": any(one.train_seconds for one in plan.considered),
        "cost": any(one.cost for one in plan.considered),
        "worth of an image": any(one.efficiency for one in plan.considered),
        "epochs to target": not chosen and any(one.epochs for one in plan.considered),
        target_heading(plan): any(one.target_seconds for one in plan.considered),
        "accuracy": any(one.accuracy for one in plan.considered),
        "peak": True,
    }
    columns = [name for name, is_known in known.items() if is_known]
    if expects_accuracy(plan):
        lines.append(f"  accuracy: {EXPECTED}")
    if "worth of an image" in columns:
        whence = ", as other tasks lead to expect" if expects_accuracy(plan) else ""
        lines += wrap(
            f"worth of an image: how far training on it gets{whence}, where one in a batch of "
            f"{plan.job.base_batch} (base_batch) counts as 100 %. The gradient of a larger batch "
            "holds less noise, but each image in it adds less.",
            min(WIDTH, width or WIDTH),
            initial_indent="  ",
            subsequent_indent="  ",
        )

    def cluster_of(one: Prediction) -> tuple[int, Cluster]:
        return one.resolution, (one.workers, one.kinds)

    for (side, cluster), ones in groupby(sorted(kept, key=_order), key=cluster_of):
        lines.append(f"  {cluster_words(*cluster)} at {side} px")
        rows = [["", "batch", *columns, ""]]
        rows += [_candidate_row(plan, one, columns) for one in ones]
        lines += _indented(_aligned(rows, width and width - 4, keys=2))
    return lines


EXPECTED = "no trials: expected from other tasks' trainings, nothing of it was measured"


def expects_accuracy(plan: PlanFields) -> bool:
    """Whether a plan's accuracies are only expected from other tasks' trainings."""
    sources = [one.source for one in plan.reasons if one.choice == "accuracy"]
    return "assumed" in sources and any(one.accuracy for one in plan.considered)


def _order(one: Prediction) -> tuple[int, int, str, int]:
    kinds = cluster_words(one.workers, one.kinds)
    return one.resolution, one.workers, kinds, one.global_batch_size


def target_heading(plan: PlanFields) -> str:
    """The heading of `target_seconds`: without known epochs they are no time to an accuracy."""
    known = any(one.trained_epochs or one.epochs for one in plan.considered)
    return "s to target" if known else "s to equal progress"


def _candidate_row(plan: PlanFields, one: Prediction, columns: Iterable[str]) -> list[str]:
    values = {
        "s / epoch": between(one.epoch_seconds),
        "epochs": f"{one.trained_epochs or plan.epochs:,}",
        "training": _or_dash(one.train_seconds, duration),
        "cost": "-" if one.cost is None else between(one.cost),
        "worth of an image": _or_dash(one.efficiency, percent),
        "epochs to target": "-" if one.epochs is None else between(one.epochs),
        target_heading(plan): "-" if one.target_seconds is None else between(one.target_seconds),
        "accuracy": _or_dash(one.accuracy, percent),
        "peak": size(one.peak_bytes.high),
    }
    mark = "*" if is_chosen(plan, one) else ""
    shown = [values[name] for name in columns]
    return [mark, f"{one.global_batch_size:,}", *shown, candidate_words(plan, one)]


def _or_dash(estimate: Estimate | None, shown: Callable[[float], str]) -> str:
    return "-" if estimate is None else shown(estimate.value)


def _aligned(rows: Sequence[Sequence[str]], room: int | None, *, keys: int) -> list[str]:
    """Table rows as lines, with columns two spaces apart.

    Where the table is wider than ``room``, its last column is wrapped; columns that still do not
    fit follow below, each block with the first ``keys`` columns.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    if room and sum(widths) + 2 * (len(widths) - 1) > room:
        widths[-1] = min(widths[-1], _REMARK)
        rows = [line for row in rows for line in _wrapped(row, widths[-1])]
    lines: list[str] = []
    for block in column_blocks(widths, room or sum(widths) + 2 * len(widths), keys=keys):
        lines += [""] * bool(lines)
        texts = ["  ".join(f"{row[at]:<{widths[at]}}" for at in block) for row in rows]
        lines += [text for text in texts if text.strip()]
    return lines


def _wrapped(row: Sequence[str], width: int) -> list[list[str]]:
    first, *more = wrap(row[-1], width) or [""]
    return [[*row[:-1], first], *([*[""] * (len(row) - 1), rest] for rest in more)]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
