"""The page a person shows to a colleague: one HTML file that opens without a network.

Style is inline and allowed by its hash, nothing else is: no script, no image, no font, no form.
Every word from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchwright.files import make_folder, write_whole
from batchwright.records import EpochRecord, Plan, Profile, Reason, RunSummary
from batchwright.records.words import (
    counted,
    duration,
    in_seconds,
    number,
    percent,
)
from batchwright.reporting import markup
from batchwright.reporting.live_run import EpochNow
from batchwright.reporting.page_charts import (
    candidates_chart,
    epochs_chart,
    learning_charts,
    worker_chart,
)
from batchwright.reporting.page_facts import environment_part, job_part
from batchwright.reporting.page_plan import choice_charts, knees_table
from batchwright.reporting.page_rounds import rounds_part
from batchwright.reporting.page_stages import stages_part
from batchwright.reporting.page_workers import workers_charts
from batchwright.reporting.plan_words import (
    batches_words,
    decided_words,
    header_rows,
    split_rows,
    stage_rows,
    stage_word,
)
from batchwright.reporting.reading import (
    SIMULATED,
    Comparison,
    accuracy,
    comparisons,
    last_evaluated,
    measured_word,
    overall,
    refit_words,
    simulated_word,
    training_words,
    whole_accounting,
)
from batchwright.reporting.worker_curves import worker_curves


def write_page(summary: RunSummary, path: Path) -> None:
    """Write the report of ``summary`` to ``path``, usually ``report.html`` in the run folder.

    The same summary gives the same bytes. Folders on the way are made.

    Raises:
        FileError: The file cannot be written.
    """
    make_folder(path.parent)
    write_whole(path, page(summary).encode())


def page(summary: RunSummary) -> str:
    """The report as an HTML document."""
    title = f"{summary.plan.network.name} on {summary.plan.data.name}"
    body = "\n".join(
        [
            _headline(summary, title),
            markup.section("The plan", plan_part(summary.plan, summary.profile, summary.epochs)),
            markup.section("Predicted against measured", predicted_part(summary)),
            *([markup.section("Rounds", rounds_part(summary))] if summary.rounds else []),
            markup.section("Accuracy", accuracy_part(summary)),
            markup.section("Where the time went", time_part(summary)),
            markup.section("The job", job_part(summary)),
            markup.section("Data, network and environment", environment_part(summary)),
        ]
    )
    return markup.document(f"{title} - Batchwright report", body)


# --------------------------------------------------------------------------------------- sections


def _headline(summary: RunSummary, title: str) -> str:
    plan, whole = summary.plan, overall(summary)
    workers = counted(plan.workers, "worker")
    error = whole.error_percent
    done = f"{len(summary.epochs)} of {plan.epochs} epochs"
    if summary.resumed:
        done += f", continued {counted(summary.resumed, 'time')}"
    tiles = [
        (
            "Decided",
            decided_words(plan),
            f"{workers}, local batch {batches_words(plan)}, {plan.precision}",
        ),
        (
            "Prediction",
            whole.verdict if error is None else f"{abs(error):.1f} % {whole.direction}",
            _how_right(summary),
        ),
        (
            "Held-out accuracy",
            _top1(last_evaluated(summary)),
            f"last epoch; best {accuracy(summary.best_epoch)}",
        ),
        ("Time", *_time_words(summary, done)),
    ]
    cells = "\n".join(
        f"<li><span>{markup.safe(name)}</span><strong>{markup.safe(value)}</strong>"
        f"<small>{markup.safe(more)}</small></li>"
        for name, value, more in tiles
    )
    note = f'<p class="note">{markup.safe(SIMULATED)}</p>' if summary.simulated else ""
    return (
        f'<header><p class="kicker">Batchwright report</p><h1>{markup.safe(title)}</h1>'
        f'<ul class="tiles">{cells}</ul>{note}</header>'
    )


def _time_words(summary: RunSummary, done: str) -> tuple[str, str]:
    """Wall time; of a simulated cluster its own training time first."""
    if not summary.simulated:
        return duration(summary.wall_seconds), done
    seconds = sum(epoch.training_seconds for epoch in summary.epochs)
    real = f"computing it took {duration(summary.wall_seconds)} of real time"
    return training_words(summary, seconds), f"{done}; {real}"


def _how_right(summary: RunSummary) -> str:
    whole = overall(summary)
    if whole.predicted is None or whole.measured is None:
        return "no pair of predicted and measured seconds"
    inside = "inside" if whole.inside else "outside"
    mean = ", mean of all stages" if len(summary.plan.stages) > 1 else ""
    return (
        f"{number(whole.predicted.value)} s an epoch predicted, {number(whole.measured)} s "
        f"{measured_word(summary)}{mean}, {inside} the interval"
    )


def _top1(epoch: EpochRecord | None) -> str:
    return "not evaluated" if epoch is None or epoch.top1 is None else percent(epoch.top1)


def plan_part(
    plan: Plan, profile: Profile | None = None, epochs: Sequence[EpochRecord] = ()
) -> str:
    """A plan: its table, why, over the epochs, and what else was considered.

    Args:
        plan: Any.
        profile: What it was made from, if known: measured steps are drawn on top.
        epochs: Those that were trained by it, if any: their rates are drawn on top.
    """
    reasons = "\n".join(
        f"<li><p><strong>{markup.safe(one.choice)}: {markup.safe(one.value)}</strong> "
        f'<span class="badge">{markup.safe(one.source)}</span></p><p>{markup.safe(one.why)}'
        + (f" <cite>{markup.safe(one.reference)}</cite>" if one.reference else "")
        + f"</p>{_alternatives(one)}</li>"
        for one in plan.reasons
    )
    return (
        _stages(plan)
        + (f'<h3>Why</h3><ul class="reasons">{reasons}</ul>' if reasons else "")
        + stages_part(plan, epochs)
        + choice_charts(plan, profile)
        + knees_table(plan)
    )


def _stages(plan: Plan) -> str:
    """Header and stages: one turned on its side, of several a row for each."""
    if len(plan.stages) == 1:
        (word, stage), *turned = stage_rows(plan)
        table = markup.table(
            "The plan's stages", [word, *stage], [[name, *v] for name, v in turned]
        )
        return markup.pair(table, markup.table("The plan's header", None, header_rows(plan)))
    common, (head, *rows) = split_rows(plan)
    return markup.table("The plan's stages", head, rows) + markup.pair(
        markup.table("The same at all stages", None, common),
        markup.table("The plan's header", None, header_rows(plan)),
    )


def _alternatives(reason: Reason) -> str:
    told = ((markup.safe(one.value), markup.safe(one.loss)) for one in reason.alternatives)
    items = "".join(f"<li>or {value}: {loss}</li>" for value, loss in told)
    return f'<ul class="instead">{items}</ul>' if items else ""


def predicted_part(summary: RunSummary, now: EpochNow | None = None) -> str:
    """Seconds per epoch, stage by stage and epoch by epoch, and what a new fit would change.

    Args:
        summary: The run, or its finished epochs.
        now: The epoch in progress, if one is.
    """
    compared, measured = comparisons(summary), measured_word(summary)
    caption = f"{simulated_word(summary)}seconds per epoch of training".capitalize()
    head = ["stage", "predicted (95 %)", f"{measured} (median)", f"{measured} (range)"]
    rows = [
        [
            stage_word(summary.plan, one.stage),
            in_seconds(one.predicted),
            markup.or_dash(one.measured),
            _range(one),
            one.verdict,
        ]
        for one in compared
    ]
    table = markup.table(caption, [*head, "the prediction was"], rows)
    if len(rows) == 1:
        turned = list(zip([*head, "the prediction was"], rows[0], strict=True))
        table = markup.table(caption, list(turned[0]), [list(row) for row in turned[1:]])
    note = (
        "<div><p>Evaluation and checkpoints are not part of these seconds. "
        "The median is taken over whole epochs, the first left out: it pays for what is done "
        "once.</p></div>"
    )
    charts = markup.pair(candidates_chart(summary), epochs_chart(summary, now))
    words = refit_words(summary)
    refit = f"<p>{markup.safe(words)}</p>" if words else ""
    beside = markup.pair(table, note) if len(compared) == 1 else table + note
    return beside + refit + charts


def _range(one: Comparison) -> str:
    if one.fastest is None or one.slowest is None:
        return "-"
    return f"{number(one.fastest)} to {number(one.slowest)}"


def accuracy_part(summary: RunSummary) -> str:
    """Last and best held-out accuracy, and both curves."""
    if not summary.epochs:
        return "<p>No epoch was finished.</p>"
    last, best = last_evaluated(summary), summary.best_epoch
    text = (
        f"<p>Last evaluated epoch: <strong>{markup.safe(accuracy(last))}</strong>. "
        f"Best: <strong>{markup.safe(accuracy(best))}</strong>"
        + (f" in epoch {best.epoch + 1}" if best else "")
        + f". Held out: {markup.safe(summary.plan.data.split)}.</p>"
    )
    return text + markup.pair(*learning_charts(summary))


def time_part(summary: RunSummary, *, by_epoch: bool = True) -> str:
    """Where the time went, of all and worker by worker.

    Args:
        summary: The run, or its finished epochs.
        by_epoch: Whether to draw the workers over the epochs, too.
    """
    parts = whole_accounting(summary)
    total = sum(seconds for _, seconds in parts)
    whole = "training, simulated time" if summary.simulated else "wall time"
    table = markup.table(
        f"Parts of the {whole}",
        ["part", "time", "share"],
        [
            *(
                [name, duration(seconds), percent(seconds / total if total else 0.0)]
                for name, seconds in parts
            ),
            ["all", duration(total), ""],
        ],
    )
    if not worker_curves(summary):
        return table
    over_epochs = workers_charts(summary) if by_epoch else ""
    return markup.pair(worker_chart(summary), f"<div>{table}</div>") + over_epochs
