"""The page a person shows to a colleague: one HTML file that opens without a network.

Style is inline and allowed by its hash, nothing else is: no script, no image, no font, no form.
Every word from outside is escaped.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.metadata import version
from pathlib import Path

from batchwright.files import make_folder, write_whole
from batchwright.records import EpochRecord, Reason, RunSummary
from batchwright.records.explaining import local_batch_word
from batchwright.records.words import (
    counted,
    duration,
    in_seconds,
    local_batches,
    number,
    percent,
    size,
)
from batchwright.reporting import markup
from batchwright.reporting.page_charts import (
    candidates_chart,
    epochs_chart,
    learning_charts,
    worker_chart,
)
from batchwright.reporting.page_plan import choice_charts, knees_table
from batchwright.reporting.page_workers import workers_charts
from batchwright.reporting.reading import (
    Comparison,
    accounting,
    accuracy,
    comparisons,
    header_rows,
    last_evaluated,
    refit_words,
    stage_rows,
)
from batchwright.reporting.style import STYLE
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
            markup.section("The plan", _plan(summary)),
            markup.section("Predicted against measured", _predicted(summary)),
            markup.section("Accuracy", _accuracy(summary)),
            markup.section("Where the time went", _time(summary)),
            markup.section("The job", _job(summary)),
            markup.section("Data, network and environment", _environment(summary)),
        ]
    )
    style_hash = b64encode(sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{markup.safe(title)} - Batchwright report</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
<footer>
Batchwright {markup.safe(version("batchwright"))}. Intervals are meant to hold 95 times in 100.
</footer>
</body>
</html>
"""


# --------------------------------------------------------------------------------------- sections


def _headline(summary: RunSummary, title: str) -> str:
    plan, stage, first = summary.plan, summary.plan.stages[0], comparisons(summary)[0]
    workers = counted(plan.workers, "worker")
    error = first.error_percent
    tiles = [
        (
            "Decided",
            f"global batch {stage.global_batch_size:,}",
            f"{workers}, {local_batch_word(plan)} {local_batches(stage.local_batch_sizes)}, "
            f"{plan.precision}",
        ),
        (
            "Prediction",
            first.verdict if error is None else f"{abs(error):.1f} % {first.direction}",
            _how_right(summary),
        ),
        (
            "Held-out accuracy",
            _top1(last_evaluated(summary)),
            f"last epoch; best {accuracy(summary.best_epoch)}",
        ),
        (
            "Time",
            duration(summary.wall_seconds),
            f"{len(summary.epochs)} of {plan.epochs} epochs"
            + (f", continued {counted(summary.resumed, 'time')}" if summary.resumed else ""),
        ),
    ]
    cells = "\n".join(
        f"<li><span>{markup.safe(name)}</span><strong>{markup.safe(value)}</strong>"
        f"<small>{markup.safe(more)}</small></li>"
        for name, value, more in tiles
    )
    return (
        f'<header><p class="kicker">Batchwright report</p><h1>{markup.safe(title)}</h1>'
        f'<ul class="tiles">{cells}</ul></header>'
    )


def _how_right(summary: RunSummary) -> str:
    first = comparisons(summary)[0]
    if first.predicted is None or first.measured is None:
        return "no pair of predicted and measured seconds"
    inside = "inside" if first.inside else "outside"
    return (
        f"{number(first.predicted.value)} s an epoch predicted, {number(first.measured)} s "
        f"measured, {inside} the interval"
    )


def _top1(epoch: EpochRecord | None) -> str:
    return "not evaluated" if epoch is None or epoch.top1 is None else percent(epoch.top1)


def _plan(summary: RunSummary) -> str:
    plan = summary.plan
    (word, stages), *rows = stage_rows(plan)
    reasons = "\n".join(
        f"<li><p><strong>{markup.safe(one.choice)}: {markup.safe(one.value)}</strong> "
        f'<span class="badge">{markup.safe(one.source)}</span></p><p>{markup.safe(one.why)}'
        + (f" <cite>{markup.safe(one.reference)}</cite>" if one.reference else "")
        + f"</p>{_alternatives(one)}</li>"
        for one in plan.reasons
    )
    table = markup.table("The plan's stages", [word, *stages], [[name, *row] for name, row in rows])
    header = markup.table("The plan's header", None, header_rows(plan))
    return (
        _beside(table, header, stages=len(stages))
        + (f'<h3>Why</h3><ul class="reasons">{reasons}</ul>' if reasons else "")
        + choice_charts(plan, summary.profile)
        + knees_table(plan)
    )


def _alternatives(reason: Reason) -> str:
    told = ((markup.safe(one.value), markup.safe(one.loss)) for one in reason.alternatives)
    items = "".join(f"<li>or {value}: {loss}</li>" for value, loss in told)
    return f'<ul class="instead">{items}</ul>' if items else ""


def _predicted(summary: RunSummary) -> str:
    compared = comparisons(summary)
    table = markup.table(
        "Seconds per epoch of training",
        ["stage", *(str(one.stage) for one in compared)],
        [
            ["predicted (95 %)", *(in_seconds(one.predicted) for one in compared)],
            ["measured (median)", *(markup.or_dash(one.measured) for one in compared)],
            ["measured (range)", *(_range(one) for one in compared)],
            ["the prediction was", *(one.verdict for one in compared)],
        ],
    )
    note = (
        "<div><p>Evaluation and checkpoints are not part of these seconds. Measured is taken over "
        "whole epochs, the first left out: it pays for what is done once.</p></div>"
    )
    charts = markup.pair(candidates_chart(summary), epochs_chart(summary))
    words = refit_words(summary)
    refit = f"<p>{markup.safe(words)}</p>" if words else ""
    return _beside(table, note, stages=len(compared)) + refit + charts


def _beside(table: str, other: str, *, stages: int) -> str:
    """A table of stages and something beside it; a table of many stages has the page's width."""
    return markup.pair(table, other) if stages == 1 else table + other


def _range(one: Comparison) -> str:
    if one.fastest is None or one.slowest is None:
        return "-"
    return f"{number(one.fastest)} to {number(one.slowest)}"


def _accuracy(summary: RunSummary) -> str:
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


def _time(summary: RunSummary) -> str:
    parts = accounting(summary)
    total = sum(seconds for _, seconds in parts)
    table = markup.table(
        "Parts of the wall time",
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
    return markup.pair(worker_chart(summary), f"<div>{table}</div>") + workers_charts(summary)


def _job(summary: RunSummary) -> str:
    import yaml

    text = yaml.safe_dump(summary.plan.job.model_dump(mode="json"), sort_keys=False)
    return f"<pre>{escape(text)}</pre>"


def _environment(summary: RunSummary) -> str:
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
    classes = ", ".join(markup.safe(name) for name in data.classes)
    names = f"<summary>Names of the classes ({len(data.classes):,})</summary><p>{classes}</p>"
    return markup.pair(
        f"<div>{markup.table('Data and network', None, facts)}<details>{names}</details></div>",
        f"<div>{markup.table('Environment', None, _cluster(summary))}</div>",
    )


def _cluster(summary: RunSummary) -> list[tuple[str, str]]:
    if summary.profile is None:
        return [("hardware", "not measured: the run had no profile")]
    cluster = summary.profile.cluster
    noise = summary.profile.noise
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
        ("measured in", duration(summary.profile.probe_seconds)),
    ]
