"""The report's parts on a plan: the charts of its choice, its stages, and the candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchwright.records import EpochRecord, Plan, Profile
from batchwright.records.text.formatting import (
    between,
    duration,
    in_seconds,
    number,
    percent,
    shares_between,
    size,
)
from batchwright.records.text.plan_text import (
    EXPECTED,
    candidate_words,
    cluster_words,
    expects_accuracy,
    kept_candidates,
    knee_rows,
    planned_sizes,
    target_heading,
)
from batchwright.reporting.charts import plan as charts
from batchwright.reporting.charts.memory import memory_chart
from batchwright.reporting.charts.stages import changes, stage_charts
from batchwright.reporting.data.accuracy_curves import accuracy_picture
from batchwright.reporting.data.plan_curves import ClusterCurve, CurvePoint, plan_curves, units_of
from batchwright.reporting.data.plan_words import split_rows
from batchwright.reporting.data.worker_curves import spread
from batchwright.reporting.pages import markup

_MAX_ROWS = 60  # of a table


def choice_charts(plan: Plan, profile: Profile | None, *, learning: bool = True) -> str:
    """Time and cost of the training over the global batch, a curve for each cluster.

    With ``learning`` the accuracy comes first, if it is known. Empty without candidates.
    """
    curves = plan_curves(plan, [profile] if profile else [])
    if not curves.clusters:
        return ""
    learnt = accuracy_chart(plan) if learning else ""
    if learnt:
        expected = f"<p>Accuracy: {EXPECTED}.</p>" if expects_accuracy(plan) else ""
        learnt = f"<h3>What is learnt in the time</h3>{expected}{learnt}"
    table = candidates_table(plan)
    both = markup.pair(
        markup.figure(charts.batch_chart(curves, "seconds"), table),
        markup.figure(charts.batch_chart(curves, "cost"), table),
    )
    head = "<h3>Time and cost of the training, by cluster</h3>"
    memory = memory_chart(plan, profile)
    more = "" if memory is None else markup.pairs([markup.figure(memory, table)])
    knees = ""
    if plan.knees:
        gain = percent(plan.job.goal.doubling_gain)
        names, *rows = knee_rows(plan)
        found = markup.table(f"Knees: doubling the batch beyond saves at most {gain}", names, rows)
        says = "<summary>Where a larger batch stops paying</summary>"
        knees = f"<details>{says}{found}</details>"
    return f"{learnt}{head}{both}{knees}{more}"


def accuracy_chart(plan: Plan) -> str:
    """Predicted accuracy over training time, a line for each cluster; empty if unknown."""
    curves = plan_curves(plan)
    picture = accuracy_picture(curves)
    if picture is None:
        return ""
    drawn = [
        (cluster, one)
        for cluster, line in zip(curves.clusters, picture.lines, strict=True)
        for one in line
    ]
    table = markup.table(
        "The most accurate in the time, with 95 % intervals",
        ["candidate", "training", "accuracy (%)"],
        [
            [
                _named(cluster, one.candidate, {"chosen": one.candidate.chosen}),
                duration(one.seconds[0]),
                "{:.1f} ({:.1f} to {:.1f})".format(*one.accuracy),
            ]
            for cluster, one in sorted(drawn, key=lambda pair: pair[1].seconds[0])
            if one.best or one.candidate.chosen
        ],
        cards=True,
    )
    chart = markup.figure(charts.accuracy_chart(curves, picture), candidates_table(plan))
    return markup.pair(chart, f"<div>{table}</div>")


def pareto_part(plan: Plan) -> str:
    """Cost over time of all candidates, and a table of the frontier; empty without candidates.

    Where accuracies are predicted, the table has the plan's own frontier, which counts them.
    """
    curves = plan_curves(plan)
    if not curves.clusters:
        return ""
    (second, unit), (worth, currency) = units_of(curves)
    every = [(cluster, one) for cluster in curves.clusters for one in cluster.points]
    best = charts.frontier(curves)
    if known := any(one.accuracy for _, one in every):
        best = sorted((at for at in every if at[1].frontier), key=lambda at: at[1].seconds[0])
    counts_it = known and not any(one.target_seconds for one in plan.considered)
    table = markup.table(
        f"The frontier{' of time, cost and accuracy' * counts_it}, with 95 % intervals; training "
        f"in {unit}, cost {currency if currency.startswith('in ') else f'in {currency}'}",
        ["candidate", "training", "cost", *["accuracy (%)"] * known],
        [
            [
                _named(
                    cluster,
                    one,
                    {
                        "chosen": one.chosen,
                        "knee": charts.is_knee(cluster, one),
                        "extrapolated": one.extrapolated,
                        "assumed": one.assumed,
                    },
                ),
                _range(one.seconds, second),
                _range(one.cost, worth),
                *[_percents(one.accuracy)] * known,
            ]
            for cluster, one in spread(best, _MAX_ROWS)
        ],
        cards=True,
    )
    chart = markup.figure(charts.pareto_chart(curves), candidates_table(plan))
    return markup.pair(chart, f"<div>{table}</div>")


def _named(cluster: ClusterCurve, one: CurvePoint, words: Mapping[str, bool]) -> str:
    """A candidate's name, with those of the remarks ``words`` that apply."""
    remarks = ", ".join(word for word, applies in words.items() if applies)
    return f"{cluster.label}, batch {one.global_batch_size:,}" + (f": {remarks}" if remarks else "")


def _percents(accuracy: tuple[float, float, float] | None) -> str:
    """An accuracy with its interval, in percent."""
    if accuracy is None:
        return "-"
    return "{:.1f} ({:.1f} to {:.1f})".format(*(100 * end for end in accuracy))


def _range(ends: tuple[float, float, float], unit: float) -> str:
    value, low, high = (number(end / unit) for end in ends)
    return f"{value} ({low} to {high})"


def stages_part(plan: Plan, epochs: Sequence[EpochRecord] = ()) -> str:
    """A chart for each quantity that differs between stages; empty if none does.

    Args:
        plan: The plan.
        epochs: Trained epochs, whose rates are drawn on the planned one.
    """
    if len(plan.stages) < 2:
        return ""
    _, (head, *rows) = split_rows(plan)
    more = markup.left_out(rows, _MAX_ROWS)
    table = markup.table(f"What differs between the stages{more}", head, spread(rows, _MAX_ROWS))
    drawn = [
        markup.figure(chart, table)
        for chart in stage_charts(plan, epochs)
        if any(changes(point.y for point in one.points) for one in chart.series)
    ]
    return "<h3>Over the epochs</h3>" + markup.pairs(drawn) if drawn else ""


def candidates_table(plan: Plan) -> str:
    """The table of `kept_candidates`, a row for each."""
    kept = kept_candidates(plan)
    left = len(plan.considered) - len(kept)
    aimed, known = any(one.target_seconds for one in kept), any(one.accuracy for one in kept)
    sides, planned = len({one.resolution for one in kept}) > 1, planned_sizes(plan)
    priced = any(one.cost for one in kept)
    head = ["global batch", "cluster", *["side"] * sides, "steps", "s / step", "s / epoch"]
    head += ["s of training", *[target_heading(plan)] * aimed, *["cost"] * priced]
    head += ["accuracy"] * known
    rows = []
    for one in kept:
        target = between(one.target_seconds) if one.target_seconds else "-"
        cost = between(one.cost) if one.cost else "-"
        accuracy = shares_between(one.accuracy) if one.accuracy else "-"
        rows.append(
            [
                f"{one.global_batch_size:,}",
                cluster_words(one.workers, one.kinds),
                *[f"{one.resolution} px"] * sides,
                f"{one.steps_per_epoch:,}",
                number(one.step_seconds.value),
                in_seconds(one.epoch_seconds),
                between(one.train_seconds) if one.train_seconds else "-",
                *[target] * aimed,
                *[cost] * priced,
                *[accuracy] * known,
                size(one.peak_bytes.value),
                candidate_words(plan, one, planned),
            ]
        )
    return markup.table(
        "Candidates" + (f" ({left:,} more in plan.json)" if left else ""),
        [*head, "peak memory", "remarks"],
        rows,
    )
