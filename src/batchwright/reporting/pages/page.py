"""The report of a run: one HTML file that opens without a network.

Its style is inline and allowed by its hash; scripts, images, fonts and forms are not allowed. All
text from outside is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from batchwright.records import EpochRecord, Job, Plan, Profile, Reason, RunSummary
from batchwright.records.documents import asked_yaml, job_yaml
from batchwright.records.lines.run_lines import EpochLine
from batchwright.records.text.formatting import (
    counted,
    duration,
    in_bytes,
    in_seconds,
    number,
    percent,
    shares_between,
    size,
)
from batchwright.records.text.load_text import load_words
from batchwright.records.text.plan_text import is_chosen, planned_sizes, rivals
from batchwright.reporting.charts import run as charts
from batchwright.reporting.data.accounting import accounting_rows, worker_rows
from batchwright.reporting.data.live_run import EpochNow, forecast_words
from batchwright.reporting.data.outline import outline_words, outlined
from batchwright.reporting.data.plan_words import (
    batches_words,
    decided_words,
    header_rows,
    split_rows,
    stage_rows,
)
from batchwright.reporting.data.reading import (
    SIMULATED,
    accuracy,
    accuracy_words,
    compared_rows,
    epoch_accuracies,
    held_out_loss,
    last_evaluated,
    learnt_words,
    measured_word,
    memory_note,
    pace_words,
    refit_words,
    simulated_word,
    training_clock,
    training_words,
)
from batchwright.reporting.data.worker_curves import spread, worker_curves
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.page_plan import choice_charts, stages_part
from batchwright.reporting.pages.page_rounds import rounds_part
from batchwright.reporting.pages.page_workers import workers_charts
from batchwright.storage.files import make_folder, write_whole

LONGEST_JOB = 64 * 1024
"""Most characters of a job that is shown: YAML takes a second to write a hundred thousand."""

_MAX_ROWS = 100  # of a table
_MAX_STAGES = 12  # stages of the plan that are visible without a click
_MAX_CLASSES = 1000  # class names that are listed


def write_page(summary: RunSummary, path: Path) -> None:
    """Write the report of ``summary`` to ``path``, usually ``report.html`` in the run folder.

    The same summary gives the same bytes. Missing folders are made.

    Raises:
        FileError: The file cannot be written.
    """
    make_folder(path.parent)
    write_whole(path, page(summary).encode())


def page(summary: RunSummary) -> str:
    """The report as an HTML document."""
    title = f"{summary.plan.network.name} on {summary.plan.data.name}"
    whole = summary.plan
    summary = summary.model_copy(update={"plan": outlined(whole)})
    body = [
        markup.section("Learning", accuracy_part(summary)),
        markup.section("Predicted against measured", predicted_part(summary)),
        *([markup.section("Rounds", rounds_part(summary))] if summary.rounds else []),
        markup.section("Where the time went", time_part(summary)),
        markup.section("The plan", plan_part(whole, summary.profile, summary.epochs)),
        markup.section("The job", job_text(summary.plan.job)),
        markup.section("Data, network and environment", environment_part(summary)),
    ]
    return markup.document("report", title, _headline(summary), body)


# --------------------------------------------------------------------------------------- sections


def _headline(summary: RunSummary) -> str:
    plan = summary.plan
    workers, last = counted(plan.workers, "worker"), last_evaluated(summary)
    done = f"{len(summary.epochs)} of {plan.epochs} epochs"
    if summary.resumed:
        done += f", continued {counted(summary.resumed, 'time')}"
    time = duration(summary.wall_seconds)
    if summary.simulated:
        done += f"; computing it took {time} of real time"
        time = training_words(summary, sum(one.training_seconds for one in summary.epochs))
    tiles = [
        (
            "Decided",
            decided_words(plan),
            f"{workers}, local batch {batches_words(plan)}, {plan.precision}",
        ),
        ("Epochs against the prediction", *pace_words(summary)),
        (
            "Held-out accuracy",
            "not evaluated" if last is None else percent(last.top1 or 0.0),
            f"last epoch; best {accuracy(summary.best_epoch)}",
        ),
        ("Time", time, done),
    ]
    cells = "\n".join(
        f"<li><span>{markup.safe(name)}</span><strong>{markup.safe(value)}</strong>"
        f"<small>{markup.safe(more)}</small></li>"
        for name, value, more in tiles
    )
    note = f'<p class="note">{markup.safe(SIMULATED)}</p>' if summary.simulated else ""
    return f'<ul class="tiles">{cells}</ul>{note}'


def plan_part(
    plan: Plan,
    profile: Profile | None = None,
    epochs: Sequence[EpochRecord] = (),
    *,
    learning: bool = True,
) -> str:
    """A plan: accuracy, time and cost by batch, its stages, and the reason of each choice.

    Of a very long plan only an outline is drawn. Measured steps of the profile, and the rates of
    trained epochs, are drawn on top. Without ``learning`` there is no accuracy.
    """
    note, plan = outline_words(plan), outlined(plan)
    stated = [one for one in plan.reasons if one.value or one.why]
    reasons = "\n".join(map(_reason, stated))
    return (
        (f'<p class="note">{markup.safe(note)}</p>' if note else "")
        + choice_charts(plan, profile, learning=learning)
        + stages_part(plan, epochs)
        + "<h3>What was decided</h3>"
        + _stages(plan)
        + (f'<h3>Why</h3><ul class="reasons">{reasons}</ul>' if reasons else "")
    )


def _stages(plan: Plan) -> str:
    """Header and stages: a single stage transposed, several as a row each."""
    if len(plan.stages) == 1:
        (word, stage), *turned = stage_rows(plan)
        table = markup.table(
            "The plan's stages", [word, *stage], [[name, *v] for name, v in turned]
        )
        return markup.pair(table, markup.table("The plan's header", None, header_rows(plan)))
    common, (head, *rows) = split_rows(plan)
    first, rest = rows[:_MAX_STAGES], rows[_MAX_STAGES:]
    more = markup.folded(
        f"{len(rest):,} more stages", markup.table("The plan's further stages", head, rest)
    )
    table = markup.table("The plan's stages", head, first) + more * bool(rest)
    return table + markup.pair(
        markup.table("The same at all stages", None, common),
        markup.table("The plan's header", None, header_rows(plan)),
    )


def _reason(reason: Reason) -> str:
    """A list item: choice, value, first sentence and source; the rest is folded below it."""
    first, *rest = re.split(r"(?<=[.?!]) (?=[A-Z`])", reason.why, maxsplit=1)
    what = ": ".join(text for text in (reason.choice, reason.value) if text)
    line = (
        f"<strong>{markup.safe(what)}</strong> "
        f'{markup.prose(first)} <span class="badge">{markup.safe(reason.source)}</span>'
    )
    more = "".join(f"<p>{markup.prose(text)}</p>" for text in [*rest, reason.reference] if text)
    others = ((markup.safe(one.value), markup.prose(one.loss)) for one in reason.alternatives)
    more += "".join(f"<p>Or {value}: {loss}</p>" for value, loss in others)
    if not more:
        return f"<li>{line}</li>"
    return f"<li><details><summary>{line}</summary>{more}</details></li>"


def predicted_part(
    summary: RunSummary, now: EpochNow | None = None, *, running: bool = False
) -> str:
    """Seconds per epoch and peak memory, predicted and measured, and the effect of a refit.

    The epoch in progress, ``now``, is drawn, too. Of a ``running`` one all may still be measured.
    """
    charts = markup.pair(_epochs_chart(summary, now), _candidates_chart(summary))
    head, *rows = compared_rows(summary, running=running)
    caption = f"Predicted and {measured_word(summary)}"
    more = markup.left_out(rows, _MAX_ROWS)
    table = markup.table(caption + more, head, spread(rows, _MAX_ROWS), cards=True)
    notes = (
        "Evaluation and checkpoints are not part of these seconds. What is predicted is the median "
        "over whole epochs, the first left out: it pays for what is done once. Single epochs "
        "scatter more widely than the interval of their median.",
        memory_note(summary),
        refit_words(summary),
        learnt_words(summary),
    )
    return charts + table + "".join(f"<p>{markup.prose(note)}</p>" for note in notes if note)


def accuracy_part(summary: RunSummary, forecast: EpochLine | None = None) -> str:
    """Last and best held-out accuracy, and both curves, with a running training's forecast."""
    if not summary.epochs:
        return "<p>No epoch was finished.</p>"
    last, best = last_evaluated(summary), summary.best_epoch
    back = summary.plan.average_epochs
    averaged = f"Both are of an average of the weights over {back:g} epoch. " if back else ""
    ahead = f", {markup.safe(forecast_words(forecast))}" if forecast else ""
    return _learning_charts(summary, forecast) + (
        f"<p>Last evaluated epoch: <strong>{markup.safe(accuracy(last))}</strong>{ahead}. "
        f"Best: <strong>{markup.safe(accuracy(best))}</strong>"
        + (f" in epoch {best.epoch + 1}" if best else "")
        + f". {averaged}Held out: {markup.safe(summary.plan.data.split)}. "
        f"{markup.safe(accuracy_words(summary))}</p>"
    )


def time_part(summary: RunSummary, *, by_epoch: bool = True) -> str:
    """How the time was spent, in all and by each worker; with ``by_epoch`` over the epochs, too."""
    around = " of the command" * bool(summary.before or summary.after)
    whole = "training, simulated time" if summary.simulated else f"wall time{around}"
    head, rows = ["part", "time", "share"], accounting_rows(summary)
    table = markup.table(f"Parts of the {whole}", head, rows)
    if not worker_curves(summary):
        return table
    head, *rows = worker_rows(summary)
    caption = f"Workers{', simulated time' * summary.simulated}"
    more = markup.left_out(rows, _MAX_ROWS)
    workers = markup.table(caption + more, head, spread(rows, _MAX_ROWS))
    chart = markup.figure(charts.time_chart(summary), workers)
    over_epochs = workers_charts(summary) if by_epoch else ""
    return markup.pair(chart, f"<div>{table}</div>") + over_epochs


def _candidates_chart(summary: RunSummary) -> str:
    chart = charts.candidates_chart(summary)
    if chart is None:
        return ""
    planned = planned_sizes(summary.plan)
    table = markup.table(
        "Candidates",
        [
            "global batch",
            "side",
            "workers",
            "steps",
            "s / step",
            "s / epoch",
            "peak memory",
            "remarks",
        ],
        [
            [
                f"{one.global_batch_size:,}",
                f"{one.resolution} px",
                str(one.workers),
                f"{one.steps_per_epoch:,}",
                in_seconds(one.step_seconds),
                in_seconds(one.epoch_seconds),
                in_bytes(one.peak_bytes),
                "chosen " * is_chosen(summary.plan, one, planned)
                + "extrapolated" * one.extrapolated,
            ]
            for one in spread(rivals(summary.plan), _MAX_ROWS)
        ],
    )
    return markup.figure(chart, table)


def _epochs_chart(summary: RunSummary, now: EpochNow | None) -> str:
    chart = charts.epochs_chart(summary, now)
    if chart is None:
        return ""
    head = ["epoch", "steps", "skipped", f"{simulated_word(summary)}training", "evaluation"]
    more = markup.left_out(summary.epochs, _MAX_ROWS, "; all are in summary.json")
    table = markup.table(
        f"Seconds of each epoch{more}",
        [*head, "checkpoints", "learning rate"],
        [
            [
                str(epoch.epoch + 1),
                f"{epoch.steps:,}",
                f"{epoch.skipped_steps:,}",
                number(epoch.training_seconds),
                number(epoch.evaluation_seconds),
                number(epoch.checkpoint_seconds),
                f"{epoch.learning_rate:.4g}",
            ]
            for epoch in spread(summary.epochs, _MAX_ROWS)
        ],
    )
    return markup.figure(chart, table)


def _learning_charts(summary: RunSummary, forecast: EpochLine | None) -> str:
    """Loss and held-out accuracy over the epochs; at least one was finished."""
    epochs, word = summary.epochs, simulated_word(summary)
    timed = list(zip(epochs, training_clock(summary), strict=True))
    compared = {
        at: [shares_between(one.predicted), one.verdict.replace("95 % interval", "interval")]
        for at, one in epoch_accuracies(summary).items()
        if one.predicted is not None
    }
    head = ["epoch", f"training ({word}s)", "training loss", held_out_loss(summary.plan)]
    head.append("held-out accuracy")
    table = markup.table(
        "Epochs" + markup.left_out(epochs, _MAX_ROWS, "; all are in summary.json"),
        [*head, *(["predicted (95 %)", "it was"] if compared else [])],
        [
            [
                str(epoch.epoch + 1),
                number(seconds),
                markup.or_dash(epoch.train_loss),
                markup.or_dash(epoch.val_loss),
                accuracy(epoch),
                *(compared.get(epoch.epoch, ["-", "-"]) if compared else []),
            ]
            for epoch, seconds in spread(timed, _MAX_ROWS)
        ],
    )
    loss, right = charts.learning_charts(summary, forecast)
    drawn = markup.pair(markup.figure(loss, table), markup.figure(right, table))
    if tracked := charts.track_charts(summary):
        rows = [
            [str(one.epoch + 1), *map(markup.or_dash, (one.gradient_norm, one.hessian_eigenvalue))]
            for one in spread(epochs, _MAX_ROWS)
        ]
        head = ["epoch", "gradient norm", "largest Hessian eigenvalue"]
        numbers = markup.table("On a batch of training samples, at each evaluation", head, rows)
        drawn += markup.pairs([markup.figure(one, numbers) for one in tracked])
    return drawn


def job_text(job: Job) -> str:
    """A job as valid YAML: keys that are not at their defaults, and folded below them every key."""
    if len(job.model_dump_json()) > LONGEST_JOB:
        return "<p>This job is too long to be shown here.</p>"
    every, asked = _preformatted(job_yaml(job), "key-list"), asked_yaml(job)
    shown = _preformatted(asked) if asked else "<p>Every key has its default.</p>"
    return shown + markup.folded("Every key", every)


def _preformatted(text: str, kind: str = "") -> str:
    opened = f'<pre class="{kind}">' if kind else "<pre>"
    return f"{opened}{chr(10).join(map(markup.safe, text.splitlines()))}</pre>"


def environment_part(summary: RunSummary) -> str:
    """Data and network, and hardware and software of the measurements."""
    data, network = summary.plan.data, summary.plan.network
    facts = [
        ("data", f"{data.name}, {data.side} px"),
        ("images", f"{data.train_samples:,} training, {data.val_samples:,} held out"),
        ("held out", data.split),
        ("unreadable images left out", f"{data.skipped:,}"),
        ("data SHA-256", data.digest),
        ("network", f"{network.name}, {network.parameters:,} weights"),
        ("exchanged gradient", size(network.trained_bytes)),
        ("run folder", Path(summary.run_folder).name),
    ]
    measured = [("hardware", "not measured: the run had no profile")]
    if summary.profile is not None:
        measured = _measured(summary.profile)
    classes = ", ".join(markup.safe(name) for name in data.classes[:_MAX_CLASSES])
    more = markup.left_out(data.classes, _MAX_CLASSES)
    names = markup.folded(
        f"Names of the classes ({len(data.classes):,}){more}", f"<p>{classes}</p>"
    )
    return markup.pair(
        f"<div>{markup.table('Data and network', None, facts)}{names}</div>",
        f"<div>{markup.table('Environment', None, measured)}</div>",
    )


def profile_facts(profile: Profile) -> str:
    """A table of a profile's workload, hardware and software."""
    steps = [
        ("network and data", f"{profile.network.name} on {profile.data.name}"),
        ("step times", f"{len(profile.steps):,} measured"),
    ]
    return markup.table("What was measured", None, [*steps, *_measured(profile)])


def _measured(profile: Profile) -> list[tuple[str, str]]:
    cluster, noise = profile.cluster, profile.noise
    scale = noise.noise_scale if noise else None
    return [
        ("device", f"{cluster.device_name} ({cluster.device})"),
        ("cores", str(cluster.cores)),
        ("workers that measured", f"{cluster.workers}, {counted(cluster.threads, 'thread')} each"),
        ("memory per worker", size(cluster.memory_bytes)),
        ("Python", cluster.python),
        ("PyTorch", cluster.torch),
        ("allocator", cluster.allocator),
        ("gradient noise scale", f"{number(scale)} samples" if scale else "below measurement"),
        ("measured in", duration(profile.probe_seconds)),
        *([("busy meanwhile", load)] if (load := load_words(profile.load)) else []),
    ]
