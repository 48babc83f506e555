"""Puts the newest kept results into the README: ``python -m benchmarks.readme_table [--check]``.

Reads ``benchmarks/results/main_job-*.json`` and replaces what stands between the two comments
``<!-- figures ... -->`` and ``<!-- /figures -->``. With ``--check`` nothing is written; the exit
code is 1 if the README is out of step.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- figures: .*? -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
NOTHING = "No result has been kept yet."

MEANINGS = {
    "session_over_bare": "our loop over a plain PyTorch loop written by hand on the same data in "
    "memory, images/s",
    "over_resident_batch": "our loop over the same steps on one batch that is already there, "
    "images/s",
    "over_lightning": "our loop over Lightning as started by default (two loader processes, "
    "float32), images/s",
    "over_accelerate": "our loop over accelerate with the same loader, images/s",
    "over_lightning_auto": "the same over Lightning, ours with `precision=auto`, images/s",
    "auto_accuracy": "accuracy of `precision=auto` less that of float32, paired seeds",
    "digits_accuracy": "held-out accuracy of `batchwright run` with its defaults (digits)",
    "main_job_seconds": "wall time of that command",
}
"""What a figure is, for a reader of the README; figures without a line here are left out."""


def newest(folder: Path = RESULTS) -> dict[str, Any] | None:
    """The report of the latest full run; `None` if none was kept."""
    reports = []
    for path in folder.glob("main_job-*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        reports.append((report["date"], path.name, report))
    return max(reports, key=lambda one: one[:2])[2] if reports else None


def table(report: Mapping[str, Any] | None) -> str:
    """Markdown: one row for each figure that was measured, and where it was measured."""
    if report is None:
        return NOTHING + "\n"
    figures = {figure["name"]: figure for figure in report["figures"]}
    rows = [_row(figures[name], words) for name, words in MEANINGS.items() if name in figures]
    place = report["environment"]
    return "\n".join(
        [
            "| figure | measured (spread) | goal | met |",
            "|---|---|---|---|",
            *rows,
            "",
            f"{place['processor']}, {place['cores']} cores, torch {place['torch']}, Python "
            f"{place['python']}; {report['date']}, commit {place['commit']}. Ratios compare arms "
            "that took turns in one run. CIFAR-100, `resnet8`, batch 128, one worker, unless said "
            f"otherwise; `{report['command']}` repeats it, and the head of "
            "`benchmarks/main_job.py` says what is compared.",
            "",
        ]
    )


def _row(figure: Mapping[str, Any], words: str) -> str:
    show = _shown(figure["unit"])
    spread = f"{show(figure['low'])} to {show(figure['high'])}"
    goal = "" if figure["goal"] is None else show(figure["goal"])
    met = {None: "", True: "yes", False: "no"}[figure["met"]]
    return f"| {words} | **{show(figure['value'])}** ({spread}) | {goal} | {met} |"


def _shown(unit: str) -> Any:
    """How values of a unit are written."""
    return {
        "ratio": lambda value: f"{value:.2f}",
        "share": lambda value: f"{value:.1%}",
        "points": lambda value: f"{value:+.2f} points",
        "s": lambda value: f"{value:.0f} s",
    }.get(unit, lambda value: f"{value:.4g} {unit}")


def filled(readme: str) -> str:
    """The README's text with the block as it should be."""
    text, found = BLOCK.subn(lambda m: m[1] + table(newest()) + m[3], readme)
    if found != 1:
        raise SystemExit("README.md does not hold exactly one block of figures")
    return text


def main() -> None:
    """Write the block, or with ``--check`` compare it."""
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = filled(before)
    if sys.argv[1:] == ["--check"]:
        if after != before:
            raise SystemExit("README.md is out of step: run python -m benchmarks.readme_table")
    elif after != before:
        path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
