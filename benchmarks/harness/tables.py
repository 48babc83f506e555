"""Puts the newest kept results into the documents: ``python -m benchmarks.harness.tables``.

Reads the newest report of each benchmark in ``benchmarks/results`` since `SINCE`, and replaces the
text between the comments ``<!-- figures ... -->`` and ``<!-- /figures -->``: in the README the main
figures in one table, in ``docs/measured.md`` all figures, in ``docs/papers.md`` the claims of the
papers behind the methods beside the figures that test them, in ``docs/methods/`` the figures of
each method. With ``--check`` nothing is written, and the exit code is 1 if a document differs.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any

from batchwright.records.text.formatting import percent, significant
from benchmarks.harness.benchmark import (
    COMMITS,
    RESULTS,
    ROOT,
    Benchmark,
    module_of,
    newest,
    of_its_own,
)
from benchmarks.harness.claims import EACH, PAPERS, SCALES, Claim, Paper
from benchmarks.harness.figures import SPREADS, SPREADS_AROUND, Figure
from benchmarks.harness.kept_runs import read_lines

BLOCK = re.compile(r"(<!-- figures: .*? -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
NOTHING = "No result has been kept yet."
LOG = ROOT / "docs" / "log.md"
HEAD = ("| figure | measured (spread) | goal | met | when |", "|---|---|---|---|---|")
FRONT_HEAD = (
    "| figure | measured (spread) | goal | met | when | on a GPU |",
    "|---|---|---|---|---|---|",
)

ORDER = (
    *("time_to_accuracy", "main_job", "predict", "batch_curves", "large_networks", "decisions"),
    *("uneven", "shares", "shared_cores", "adapters", "simulate", "hosts", "engines"),
    *("hybrid", "hybrid_virtual", "dual_batch", "dual_accuracy", "dual_uneven", "update_factors"),
    *("cyclic", "data_path", "feeding", "batch_growth", "large_batch", "gradient_scaling_long"),
    *("warmup", "warmup_long", "scaling_long"),
    *("gradient_overhead", "step_overhead", "first_contact", "service"),
)
"""Benchmarks, in the order of their tables."""

HEADLINES = (
    (
        "time_to_accuracy",
        "time_to_accuracy_all",
        "time to the same accuracy on two CPU cores: a script's seconds over those of `batchwright "
        "run`, scripts of some ten minutes (CIFAR-100, and Imagenette at 96 px)",
    ),
    (
        "time_to_accuracy",
        "time_to_accuracy_short",
        "the same, scripts of some two minutes (half of CIFAR-100 with two networks, and "
        "Imagenette at 64 px)",
    ),
    (
        "decisions",
        "regret_points",
        "decisions: accuracy that the plan's batch and optimizer lose to the best ones that are as "
        "fast",
    ),
    (
        "decisions",
        "time_regret",
        "decisions: time with the plan's batch and optimizer over the least with any as accurate",
    ),
    (
        "main_job",
        "session_over_bare",
        "speed over a plain PyTorch loop on data in memory, one CPU worker",
    ),
    ("main_job", "over_lightning", "the same over Lightning with its best number of loaders"),
    (
        "feeding",
        "feeding_over_usual",
        "JPEG photographs to batches at 224 px: images/s over a usual DataLoader with its best "
        "number of processes",
    ),
    ("predict", "step_seconds_median_error", "predictions: error of a step's seconds"),
    (
        "predict",
        "interval_coverage",
        "predictions, as above: steps inside the predicted 95 % interval",
    ),
    (
        "predict",
        "step_seconds_median_error_beside",
        "predictions beside a program that comes and goes on one core: error of a step's seconds",
    ),
    (
        "predict",
        "interval_coverage_beside",
        "predictions, as above: steps inside the predicted 95 % interval",
    ),
    (
        "decisions",
        "accuracy_error_points",
        "predictions, by trials of some seconds: error of the accuracy of whole trainings",
    ),
    (
        "hybrid",
        "hybrid_time_saved",
        "`hybrid` against large batches, CIFAR-100: training time saved",
    ),
    (
        "hybrid",
        "hybrid_accuracy_points",
        "`hybrid` against large batches, CIFAR-100: accuracy gained",
    ),
    (
        "hosts",
        "kills_recovered",
        "kills of workers and hosts, under five methods, after which the run went on",
    ),
)
"""Benchmark, figure, and its words, in the README's order; figures without report are left out."""


ON_GPU = {
    "session_over_bare": "resnet18, 32 px, bfloat16: session over resident batch",
    "over_lightning": "resnet18, 32 px, bfloat16: session over lightning, 8 loaders",
    "step_seconds_median_error": "step_seconds, batch {}, 32 px: error of the prediction",
    "interval_coverage": "step_seconds, batch {}, 32 px: inside its interval",
}
"""By figure of the README, what `benchmarks.gpu` calls its counterpart on a GPU; ``{}`` stands for
any batch."""


def on_gpu(name: str, lines: Sequence[Mapping[str, Any]], unit: str) -> str:
    """The newest counterpart of a figure on a GPU, with date and commit; empty without one.

    Several values of a commit become their median, in absolute terms; booleans become their share.
    """
    if name not in ON_GPU:
        return ""
    pattern = re.escape(ON_GPU[name]).replace(re.escape("{}"), r"\d+")
    found = [line for line in lines if re.fullmatch(pattern, line["what"])]
    if not found:
        return ""
    last = max(found, key=lambda line: line["time"])
    values = [abs(line["value"]) for line in found if line["commit"] == last["commit"]]
    value = (fmean if isinstance(last["value"], bool) else median)(values)
    date = datetime.fromtimestamp(last["time"], UTC).date()
    return f"**{shown_value({'value': value, 'unit': unit})}** ({date}, {last['commit']})"


def declared(name: str) -> Benchmark:
    """The declaration of a benchmark, from its module."""
    made: Benchmark = import_module(module_of(name)).BENCHMARK
    return made


def headlines(folder: Path = RESULTS) -> str:
    """Markdown: one table of the main figures."""
    rows, places, gpu = [], set(), read_lines(folder / "gpu" / "found.jsonl")
    for name, figure, words in HEADLINES:
        report, _ = newest(name, folder) or (None, None)
        found = {one["name"]: one for one in of_its_own(report)} if report else {}
        if report and figure in found:
            row = _row(found[figure], words, when(report, brief=True), declared(name)[figure])
            rows.append(f"{row} {on_gpu(figure, gpu, found[figure]['unit'])} |")
            places.add("{processor}, {cores} cores".format(**report["environment"]))
    if not rows:
        return NOTHING + "\n"
    return "\n".join([*FRONT_HEAD, *rows, "", f"On {'; '.join(sorted(places))}.", ""])


def tables(folder: Path = RESULTS) -> str:
    """Markdown: the table of each benchmark with a report, and the goals without a figure."""
    made = [section(declared(one), found[0]) for one in ORDER if (found := newest(one, folder))]
    return "\n".join([*made, *unmeasured(folder)])


def unmeasured(folder: Path = RESULTS) -> list[str]:
    """Lines: each benchmark with goals for which no report since `SINCE` has a figure."""
    lines = []
    for name in ORDER:
        report, _ = newest(name, folder) or (None, None)
        found = {one["name"] for one in of_its_own(report)} if report else set()
        made = declared(name)
        goals = [f"`{one.name}`" for one in made.figures if one.has_goal and one.name not in found]
        if goals:
            lines.append(f"- {made.title}: {', '.join(goals)}; {earlier(name)}.")
    head = ("## Goals without a figure", "", "Not measured on this code:", "")
    return [*head, *lines, ""] if lines else []


def earlier(name: str, up: str = "") -> str:
    """Where docs/log.md has the older figures of a benchmark; ``up`` is the path to docs/."""
    kept = f"\n### `{name}`\n" in LOG.read_text(encoding="utf-8")
    return f"last figures in [log.md]({up}log.md#{name})" if kept else "never measured"


def section(benchmark: Benchmark, report: Mapping[str, Any]) -> str:
    """Markdown: one row for each measured figure, and where they were measured."""
    found = measured(benchmark, report)
    dated = when(report)
    worded = [_row(figure, words, dated, one) for figure, words, one in found if words]
    others = [
        _row(figure, f"`{figure['name']}`", dated, one) for figure, words, one in found if not words
    ]
    return "\n".join(
        [
            *(f"## {benchmark.title}", "", f"{benchmark.remark}.", "", *HEAD, *worded, ""),
            *folded(others),
            _where(benchmark, report),
            *([f"Note: {report['note']}"] if report.get("note") else []),
            "",
        ]
    )


def _where(benchmark: Benchmark, report: Mapping[str, Any]) -> str:
    """The place of a report's measurements, and the command that repeats them."""
    module = module_of(benchmark.name)
    command = re.sub(r"(?<=-m )\S+", module, report["command"])  # the module may have moved since
    return (
        "{processor}, {cores} cores, torch {torch}, Python {python}; {date}, commit {commits}. "
        "`{command}` repeats it; the head of `{path}.py` says what is compared.".format(
            **report["environment"],
            date=report["date"],
            commits=commits(report),
            command=command,
            path=module.replace(".", "/"),
        )
    )


def measured(
    benchmark: Benchmark, report: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], str, Figure | None]]:
    """All measured figures of a report, in the order of the table, with words and declaration.

    Checks with few seeds, and figures that are no longer declared, come last, without words.
    """
    figures = {figure["name"]: figure for figure in of_its_own(report)}
    shown = {name: shown_value(figure) for name, figure in figures.items()}
    declared_ones = {one.name: one for one in benchmark.figures if one.name in figures}
    order = [*declared_ones, *(name for name in figures if name not in declared_ones)]
    return [
        (figures[name], one.words.format_map(shown) if one else "", one)
        for name in order
        for one in [declared_ones.get(name)]
    ]


def folded(rows: Sequence[str]) -> list[str]:
    """Lines of a table that opens with a click; no lines without rows."""
    if not rows:
        return []
    summary = f"Figures without words: {len(rows)}"
    return [f"<details><summary>{summary}</summary>", "", *HEAD, *rows, "", "</details>", ""]


def shown_value(figure: Mapping[str, Any], key: str = "value") -> str:
    """A figure's value, or the end of its spread, with its unit."""
    show = UNITS.get(figure["unit"], lambda value: f"{significant(value, 4)} {figure['unit']}")
    return show(figure[key])


def with_spread(figure: Mapping[str, Any], one: Figure | None = None) -> str:
    """A figure's value and in brackets its spread and what that is, unless both ends read the same.

    Args:
        figure: The figure, as in a report.
        one: Its declaration; without it the spread's kind is left out.
    """
    low, high = (shown_value(figure, end) for end in ("low", "high"))
    kind = SPREADS[one.statistic] if one else ""
    spread = f"{kind} {low} to {high}".strip()
    return f"**{shown_value(figure)}**" + ("" if low == high else f" ({spread})")


def when(report: Mapping[str, Any], brief: bool = False) -> str:
    """Date and commit of a report; ``brief`` counts the other commits of its runs."""
    return f"{report['date']}, {commits(report, brief)}"


def commits(report: Mapping[str, Any], brief: bool = False) -> str:
    """The commit of a report, and the commits of its runs, if there are others among them."""
    one: str = report["environment"]["commit"]
    runs = report["measurements"].get(COMMITS, {})
    if {one} >= runs.keys():
        return one
    return f"{one} (runs of {f'{len(runs)} commits' if brief else ', '.join(runs)})"


MET = {None: "", True: "yes", False: "no"}
UNDECIDED = "undecided"
NOTCH = 1.57
"""Half width of the 95 % interval of a median, in distances of the quartiles over the root of the
number of measurements (McGill, Tukey and Larsen 1978, notched box plots)."""


def judged(figure: Mapping[str, Any], one: Figure | None) -> str:
    """Whether a figure reaches its goal: yes, no, undecided, or empty without a goal.

    It is undecided if the goal is within the uncertainty of the value. A figure whose spread is a
    range, or that is an extreme or a count, is judged by its value alone.
    """
    met = MET[figure["met"]] if _has_goal(figure, one) else ""
    if not met or one is None or one.statistic not in SPREADS_AROUND:
        return met
    low, high = figure["low"], figure["high"]
    if one.statistic == "median":
        off = NOTCH * (high - low) / math.sqrt(figure["repeats"])
        low, high = figure["value"] - off, figure["value"] + off
    within = one.near[1] if one.near else 0.0
    goals = (figure["goal"] - within, figure["goal"] + within)
    return UNDECIDED if any(low < goal < high for goal in goals) else met


def _has_goal(figure: Mapping[str, Any], one: Figure | None) -> bool:
    """Whether a figure has a goal that is still declared."""
    return figure["goal"] is not None and (one is None or one.has_goal)


def _row(figure: Mapping[str, Any], words: str, dated: str, one: Figure | None = None) -> str:
    cells = (words, with_spread(figure, one), _goal(figure, one), judged(figure, one), dated)
    return f"| {' | '.join(cells)} |"


def _goal(figure: Mapping[str, Any], one: Figure | None) -> str:
    """The goal of the report, in the form of the declaration."""
    if not _has_goal(figure, one):
        return ""
    goal = shown_value(figure, "goal")
    if one is not None and one.near:
        return f"{goal} within {one.near[1]:g}"
    if one is not None and one.above is not None:
        return f"interval above {goal}"
    return goal


# ----------------------------------------------------------------------------------------- papers

VERDICTS = ("no", "partly", "not shown", "not run", "yes")
"""Whether a claim holds, in the order of a table's rows. *Partly*: for some of its results. *Not
shown*: the spreads overlap, or the goal is undecided."""


def papers(folder: Path = RESULTS) -> str:
    """Markdown: a section for each paper."""
    return "\n".join(paper_section(one, folder) for one in PAPERS)


def paper_section(paper: Paper, folder: Path = RESULTS) -> str:
    """Markdown: a paper's claims beside the figures, and all figures of its benchmarks."""
    reports = {name: found[0] for name in SCALES if (found := newest(name, folder))}
    figures = {
        f"{name}.{figure['name']}": {**figure, "judged": judged(figure, one)}
        for name, report in reports.items()
        for figure, _, one in measured(declared(name), report)
    }
    held = [(verdict(one, figures), one) for one in paper.claims]
    held.sort(key=lambda pair: VERDICTS.index(pair[0]))
    rows = [_claim_row(one, holds, figures, reports) for holds, one in held]
    missed, others = [], []
    for name in paper.benchmarks:
        if name in reports:
            for figure, words, one in measured(declared(name), reports[name]):
                named = f"`{figure['name']}` {words}".strip()
                row = _row(figure, named, when(reports[name]), one)
                (missed if judged(figure, one) == MET[False] else others).append(row)
    opened = [f"<details><summary>All {len(missed + others)} figures, misses first</summary>", ""]
    return "\n".join(
        [
            *(f"## {paper.title}", "", f"{paper.source}.", "", f"Known to us: {paper.known}."),
            *("", "| claim | command | scale | seeds | result (spread) | when | holds? |"),
            *("|---|---|---|---|---|---|---|", *rows, ""),
            *(*opened, *HEAD, *missed, *others, "", "</details>", ""),
        ]
    )


def verdict(claim: Claim, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether a claim holds, as one of `VERDICTS`.

    Args:
        claim: The claim.
        figures: The judged figures, by ``BENCHMARK.FIGURE``.
    """
    if not claim.results:
        return "yes" if claim.outcome else "not run"
    known = [figures[one] for one in claim.results.values() if one in figures]
    if len(known) < len(claim.results):
        return "not run"
    if claim.over is None:
        met = {one["judged"] for one in known} - {""}
        if len(met) > 1:
            return "partly" if MET[True] in met else "no"
        return {MET[True]: "yes", UNDECIDED: "not shown"}.get(*met, "no")
    found = set()
    for each in claim.results.values() if EACH in claim.over else ("",):
        (low, high), (other_low, other_high) = (
            (one, one) if isinstance(one, float) else (figures[one]["low"], figures[one]["high"])
            for one in (each if side == EACH else side for side in claim.over)
        )
        found.add("yes" if low > other_high else "no" if high < other_low else "not shown")
    if len(found) > 1:
        return "partly" if "yes" in found else "no"
    return found.pop()


def _claim_row(
    claim: Claim,
    holds: str,
    figures: Mapping[str, Mapping[str, Any]],
    reports: Mapping[str, Mapping[str, Any]],
) -> str:
    known = {label: figures[one] for label, one in claim.results.items() if one in figures}
    command, scale, seeds, dated, outcome = claim.command, "", "", "", claim.outcome
    if claim.results:
        name = next(iter(claim.results.values())).partition(".")[0]
        quick = "--quick" in reports[name]["command"] if name in reports else False
        command = f"python -m {module_of(name)} {'--quick' if quick else '--full'}"
        scale = SCALES[name]
        each = [_seeds(one) for one in known.values()]
        seeds = each[0] if len(set(each)) == 1 else ", ".join(each)
        dated, outcome = (when(reports[name]), "") if known else ("", earlier(name))
    result = "; ".join(f"{label} {with_spread(one)}".strip() for label, one in known.items())
    cells = (claim.words, f"`{command}`", scale, seeds, result or outcome, dated, holds)
    return f"| {' | '.join(cells)} |"


def _seeds(figure: Mapping[str, Any]) -> str:
    """Number of seeds of a figure, or its number of measurements with one seed."""
    accuracy = figure["unit"] in ("points", "%", "epochs", "nats")
    return f"{figure['repeats']}" if accuracy else f"1, {figure['repeats']} measurements"


# ------------------------------------------------------------------------------------------ cards

CARDS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "plain": {"time_to_accuracy": {}, "main_job": {}},
    "dynamic-batch": {"shares": {}, "shared_cores": {}, "uneven": {}},
    "dual-batch": {
        "hybrid": {
            "seconds_dual_over_large": "training time over that with large batches",
            "accuracy_dual": "accuracy with two batch sizes",
            "accuracy_large": "accuracy with large batches",
        },
        "dual_accuracy": {},
        "dual_uneven": {},
        "update_factors": {},
        "dual_batch": {},
    },
    "cyclic": {
        "hybrid": {
            "seconds_cyclic_over_large": "training time over that at 32 px throughout",
            "accuracy_cyclic": "accuracy with the cycle, large batches",
            "accuracy_large": "accuracy at 32 px throughout, large batches",
        },
        "cyclic": {},
        "data_path": {},
    },
    "hybrid": {"hybrid": {}, "hybrid_virtual": {}},
    "muon": {
        "gradient_scaling_long": {
            f"muon_over_plain_points_{batch}_{steps}": "accuracy with Muon less SGD, each at its "
            f"best rate; batch {batch}, {steps:,} steps"
            for batch in (64, 256)
            for steps in (64, 256, 1024)
        },
        "batch_growth": {},
        "large_batch": {
            "muon_over_plain_points": "Muon: accuracy less SGD, both with the large batch",
            "picked_gap_closed": "gap of SGD with the large batch to SGD with small ones that the "
            "plan's choice (Muon) closes",
            "picked_rate_spread_points": "what a factor of 3 in its base rate changes",
            "picked_under_best_small_points": "small batches with the better optimizer: accuracy "
            "less the plan's choice",
        },
    },
    "gradient-scaling": {
        "gradient_scaling_long": {
            f"{arm}_over_plain_points_{batch}_{steps}": f"{words}; batch {batch}, {steps:,} steps"
            for arm, words in (
                (
                    "ags",
                    "accuracy with gradient scaling less SGD without it, each at its best rate",
                ),
                ("muon", "Muon less SGD, each at its best rate"),
            )
            for batch in (64, 256)
            for steps in (64, 256, 1024)
        },
        "large_batch": {
            "ags_over_plain_points": "accuracy with gradient scaling less SGD without it, both "
            "with the large batch",
            "ags_least_over_plain_points": "the same on the task where it gains least",
            "ags_over_its_rate_points": "accuracy with gradient scaling less the same rate without",
            "ags_over_best_untuned_points": "accuracy with gradient scaling less the best other "
            "way without tuning",
            "gap_closed": "gap to small batches that it closes",
        },
        "gradient_overhead": {},
    },
    "warm-up": {"warmup": {}, "warmup_long": {}, "scaling_long": {}},
}
"""By card in docs/methods, its benchmarks, and for each the figures with their words; an empty
mapping stands for all figures that have words of their own."""


def card(name: str, folder: Path = RESULTS) -> str:
    """Markdown: the figures of a method."""
    parts = []
    for benchmark, chosen in CARDS[name].items():
        report, _ = newest(benchmark, folder) or (None, None)
        made = declared(benchmark)
        if report is None:
            missing = f"Not measured on this code; {earlier(benchmark, '../')}."
            parts.append(f"### {made.title}\n\n{missing}\n")
            continue
        found = {one["name"]: (one, words, about) for one, words, about in measured(made, report)}
        words = chosen or {key: own for key, (_, own, _) in found.items() if own}
        rows = [
            _row(found[key][0], words[key], when(report), found[key][2])
            for key in words
            if key in found
        ]
        head = (f"### {made.title}", "", f"{made.remark}.", "", *HEAD)
        parts.append("\n".join([*head, *rows, "", _where(made, report), ""]))
    return "\n".join(parts)


UNITS: Mapping[str, Callable[[float], str]] = {
    "ratio": lambda value: f"{value:.2f}",
    "share": percent,
    "%": lambda value: percent(value / 100),
    "points": lambda value: f"{value:+.2f} points",
    "s": lambda value: f"{value:.0f} s" if value >= 10 else f"{value:.2g} s",
}
"""By unit, how a value is written; other values are written as the number with its unit."""


def filled(text: str, block: str) -> str:
    """A document's text with a new block of figures."""
    text, found = BLOCK.subn(lambda m: m[1] + block + m[3], text)
    if found != 1:
        raise SystemExit("a document does not hold exactly one block of figures")
    return text


def main() -> None:
    """Write the blocks, or with ``--check`` compare them."""
    for name, make in DOCUMENTS.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = filled(before, make())
        if after == before:
            continue
        if sys.argv[1:] == ["--check"]:
            raise SystemExit(f"{name} is out of step: run python -m benchmarks.harness.tables")
        path.write_text(after, encoding="utf-8")


DOCUMENTS: dict[str, Callable[[], str]] = {
    "README.md": headlines,
    "docs/measured.md": tables,
    "docs/papers.md": papers,
    **{f"docs/methods/{name}.md": partial(card, name) for name in CARDS},
}

if __name__ == "__main__":
    main()
