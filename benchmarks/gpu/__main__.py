"""45 minutes on one GPU, most valuable first; goes on where it was stopped.

    python -m benchmarks.gpu [--minutes 45] [--out gpu-results] [--data DIR] [--steps NAME...]

Each step is a process of its own with a limit of its own; what it finds is written, line by line,
to ``OUT/STEP.jsonl`` as it goes. A step that has ended is not taken again on the same commit; one
that failed or ran out of time is, last of all. ``OUT/steps.jsonl`` says how each ended, and its
output is in ``OUT/STEP.log``. Without ``--data`` (a folder with ``cifar-100-python/``), steps train
on made-up images, or on digits, and those that reach for an accuracy are left out.

``--dry-run`` says what would be done. ``--tiny`` does all of it in little, on the CPU, too: it
shows that the programme works and measures nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import STEPS
from benchmarks.harness.benchmark import ROOT, commit, say
from benchmarks.harness.kept_runs import append_line, read_lines

LEAST_SECONDS = 30.0  # with less left no step is begun


def main(words: Sequence[str] | None = None) -> int:
    """Take the steps; the exit code is 1 if one failed."""
    asked = _arguments(words)
    chosen = [step for step in STEPS if not asked.steps or step.name in asked.steps]
    notes = asked.out / "steps.jsonl"
    known = read_lines(notes)
    ended = {one["step"]: one["outcome"] for one in known if one["commit"] == commit()}
    todo = [step for step in chosen if ended.get(step.name) != "done"]
    todo.sort(key=lambda step: step.name in ended)  # what failed comes last
    left = 60.0 * asked.minutes
    for step in chosen:
        done = "done already" if step not in todo else f"at most {step.minutes:g} min"
        print(f"{step.name:14} {done:16} {step.words}")
    if asked.dry_run:
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for step in todo:
        if left < LEAST_SECONDS:
            say("the time is up; the same command goes on from here")
            break
        say(f"{step.name}: {step.words}")
        began = time.monotonic()
        outcome = _taken(step.name, asked, min(left, 60 * step.minutes))
        seconds = time.monotonic() - began
        left -= seconds
        failed |= outcome != "done"
        note = {"step": step.name, "outcome": outcome, "seconds": round(seconds, 1)}
        append_line(notes, {**note, "commit": commit(), "time": round(time.time())})
        say(f"{step.name}: {outcome} after {seconds:.0f} s")
    print(table(asked.out))
    return int(failed)


def table(folder: Path) -> str:
    """All that was found so far, as Markdown."""
    rows = ["", "| step | what | value |", "|---|---|---|"]
    for step in STEPS:
        rows += [
            f"| {step.name} | {line['what']} | {_told(line['value'])} |"
            for line in read_lines(folder / f"{step.name}.jsonl")
        ]
    return "\n".join(rows)


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _taken(name: str, asked: argparse.Namespace, seconds: float) -> str:
    """How the process of a step ended, in a word or two."""
    words = [sys.executable, "-m", "benchmarks.gpu.steps", name, "--out", str(asked.out.absolute())]
    words += ["--tiny"] * asked.tiny
    if asked.data is not None:
        words += ["--data", str(asked.data.absolute())]
    with (asked.out / f"{name}.log").open("ab") as log:
        try:
            done = subprocess.run(
                words, cwd=ROOT, stdout=log, stderr=log, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return "out of time"
    return "done" if not done.returncode else f"failed with {done.returncode}"


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=45.0, help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="takes what is found")
    parser.add_argument("--data", type=Path, help="folder with cifar-100-python/")
    parser.add_argument("--steps", nargs="*", choices=[one.name for one in STEPS], default=[])
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--tiny", action="store_true", help="all of it in little, also on the CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
