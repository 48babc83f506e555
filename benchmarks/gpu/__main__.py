"""45 minutes of measurements on one GPU, most valuable first, in as many commands as it takes.

    python -m benchmarks.gpu [--minutes 45] [--out gpu-results] [--resume DIR] [--data DIR]
        [--steps NAME...]

All findings go into ``OUT/found.jsonl``, line by line, and the output of the steps into
``OUT/log.txt``; a third file keeps a profile. Send the folder back as it is, also where steps have
failed. Only the packages that the project depends on, pytest and hypothesis have to be installed;
missing ones are named at the start.

Each step is a process with a time limit, and continues where an earlier process of it was stopped.
A step that is done is not repeated on the same commit, but each machine is described, and each
finding names its GPUs; a step that failed or ran out of time is repeated after all others. So the
programme fits into any number of commands. Where a command may take ten minutes, say ``--minutes
9.5``; where each command begins in an empty folder, ``--resume`` names the folder that came back
from the command before. A step that would not end in the remaining time is left to the next
command, as long as another step would.

The trainings at the papers' scale take another 45 minutes: first a tenth of the epochs of two of
them (`hybrid` and large batches alone) and two warm-ups of the poster, then all trainings with all
140 epochs, and all eight warm-ups. Say ``--minutes 90`` for everything, or name steps with
``--steps``.

Without ``--data`` (a folder with ``cifar-100-python/``), images with a pattern for each class are
made up, as many as CIFAR-100's and of the same size. ``--dry-run`` prints the steps. ``--tiny``
runs a tiny version of all steps, also on the CPU: it shows that the programme works and measures
nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.programme import STEPS, Step
from benchmarks.harness.benchmark import ROOT, commit, say, scratch

MIN_SECONDS = 60.0  # no step is begun with less time left
ENDING_SECONDS = 10.0  # for a step to end after a signal
OUTCOME = "outcome"  # name of the finding that says how a step ended
SOURCES = ("src", "benchmarks", "tests")  # folders of what is measured
CUT = "to go on"  # outcome of a step that was stopped before its limit


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps; the exit code is 1 if one failed."""
    began = time.monotonic()
    asked = _arguments(words)
    findings = Findings(asked.out, asked.commit or _commit())
    if asked.resume and not asked.dry_run:
        asked.out.mkdir(parents=True, exist_ok=True)
        findings.go_on_from(asked.resume)
    elif asked.resume:
        findings = Findings(asked.resume, findings.commit)
    chosen = [step for step in STEPS if not asked.steps or step.name in asked.steps]
    todo = _todo(chosen, findings)
    for step in chosen:
        done = "done already" if step not in todo else f"at most {step.minutes:g} min"
        print(f"{step.name:12} {done:16} {step.words}")
    if missing := _missing():
        say(f"not installed here, so some steps will fail: {', '.join(missing)}")
    if asked.dry_run:
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with scratch() as work:
        while todo:
            left = 60 * asked.minutes - (time.monotonic() - began)
            if left < MIN_SECONDS:
                say("the time is up; the same command goes on from here")
                break
            step = next((one for one in todo if 60 * one.minutes <= left), todo[0])
            todo.remove(step)
            say(f"{step.name}: {step.words}")
            outcome = _run_step(step, asked, findings, left, work)
            findings.add(step.name, OUTCOME, outcome)
            failed |= outcome not in ("done", CUT)
            say(f"{step.name}: {outcome}, {(time.monotonic() - began) / 60:.1f} min so far")
    print(table(findings))
    say(f"to send back: the folder {asked.out.absolute()}, as it is")
    return int(failed)


def _todo(chosen: Sequence[Step], findings: Findings) -> list[Step]:
    """The steps that are not done, in order; those that failed before come last."""
    ended = {step.name: findings.of(step.name).get(OUTCOME) for step in chosen}
    if not findings.is_of_this_machine("machine", OUTCOME):
        ended["machine"] = None  # each machine is described
    todo = [step for step in chosen if ended[step.name] != "done"]
    return sorted(todo, key=lambda step: ended[step.name] not in (None, CUT))


def table(findings: Findings) -> str:
    """All findings so far as Markdown; passed and skipped tests are counted."""
    rows = ["", "| step | what | value |", "|---|---|---|"]
    for step in STEPS:
        found = findings.of(step.name)
        usual = {what for what, value in found.items() if value in ("passed", "skipped")}
        counts = Counter(found[what] for what in usual)
        rows += [f"| {step.name} | tests {value} | {n} |" for value, n in sorted(counts.items())]
        rows += [
            f"| {step.name} | {what} | {_told(value)} |"
            for what, value in found.items()
            if what not in usual
        ]
    return "\n".join(rows)


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def _run_step(
    step: Step, asked: argparse.Namespace, findings: Findings, left: float, work: Path
) -> str:
    """Run a step in a process of its own, and return its outcome."""
    words = [sys.executable, "-m", "benchmarks.gpu.steps", step.name, "--work", str(work)]
    words += ["--out", str(asked.out.absolute()), "--commit", findings.commit]
    words += ["--tiny"] * asked.tiny
    if asked.data is not None:
        words += ["--data", str(asked.data.absolute())]
    places = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    env["PYTHONUNBUFFERED"] = "1"
    whole = 60 * step.minutes <= left
    seconds = 60 * step.minutes if whole else left - ENDING_SECONDS
    with (asked.out / "log.txt").open("ab") as log:
        log.write(f"\n===== {step.name}\n".encode())
        log.flush()
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=log, stderr=log, env=env, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "out of time" if whole else CUT
        finally:
            _end(process)
    return "done" if not code else f"failed with {code}: {_last_line(asked.out / 'log.txt')}"


def _last_line(log: Path) -> str:
    """The last line of the log, which most likely says why a step failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next(filter(None, map(str.strip, reversed(lines))), "")[:200]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step and its child processes, which would slow down the next step."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)


def _commit() -> str:
    """The commit; where sources differ from it, or without git, with a digest of the sources."""
    try:
        name = commit()
    except OSError:  # a machine without git
        name = "unknown"
    if name.isalnum() and name != "unknown":
        return name
    digest = sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{name}-{digest.hexdigest()[:8]}"


def _missing() -> list[str]:
    """Needed packages that are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w-]", one)[0] for one in project["dependencies"]]
    missing = []
    for name in (*names, "pytest", "hypothesis"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=45.0, help="most minutes of this command")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of findings")
    parser.add_argument("--resume", type=Path, help="folder of an earlier command's findings")
    parser.add_argument("--commit", help="commit that is measured, where there is no git")
    parser.add_argument("--data", type=Path, help="folder with cifar-100-python/")
    parser.add_argument("--steps", nargs="*", choices=[one.name for one in STEPS], default=[])
    parser.add_argument("--dry-run", action="store_true", help="print the steps and end")
    parser.add_argument("--tiny", action="store_true", help="tiny steps, also on the CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    # A SIGTERM to this command ends its step, too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
