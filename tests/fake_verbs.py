"""Stands in for the command line that an agent runs: probes, plans and trains in no time.

    python -m fake_verbs train PLAN.json --out RUN --report-to URL

Where the file that FAKE_HOLD names is there and holds the verb, it waits half-way until it is gone;
where it holds `fail VERB` or `fail VERB: WORDS`, the verb fails. What the verbs make is in the
folder FAKE_MADE.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from batchwright.client.outbox import METRICS, new_report, write_report
from batchwright.client.reporter_process import REPORT_TO, RUN_JOB, RUN_NAME, reported

MADE = Path(os.environ["FAKE_MADE"])
STEPS = 20


def hold(verb: str) -> None:
    file = Path(os.environ["FAKE_HOLD"])
    said = file.read_text() if file.exists() else ""
    order, _, words = said.partition(": ")
    if order == f"fail {verb}":
        print(f"error: {words or f'{verb} cannot be done here'}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    if said == verb:
        told = file.with_name("reached")
        told.with_suffix(".part").write_text(verb)
        told.with_suffix(".part").replace(told)  # there at once and whole, for who waits for it
        while file.exists():
            time.sleep(0.01)


def train(words: list[str]) -> None:
    out = Path(words[words.index("--out") + 1])
    url = words[words.index("--report-to") + 1]
    done = 0
    if "--resume" in words:
        done = (out / METRICS).read_bytes().count(b"\n") if (out / METRICS).exists() else 0
    else:
        out.mkdir()
        shutil.copy(words[1], out / "plan.json")
    if not url.endswith(":8400"):  # a server that is there
        with reported(out, url, tell=print):
            steps(out, done)
        return
    if not (out / "report.json").exists():
        names = {"name": os.environ[RUN_NAME], "job": os.environ[RUN_JOB]}
        write_report(out, new_report(out, url, **names))
    steps(out, done)


def steps(out: Path, done: int) -> None:
    for number in range(done, STEPS):
        write(out, json.loads((MADE / "step.json").read_text()) | {"step": number + 1})
        if number == STEPS // 2:
            keep(out, number)
            hold("train")
    write(out, json.loads((MADE / "epoch.json").read_text()))
    keep(out, STEPS)
    shutil.copy(MADE / "summary.json", out / "summary.json")
    hold("report")


def keep(out: Path, number: int) -> None:
    """A checkpoint, whole or not there."""
    (out / "checkpoints").mkdir(exist_ok=True)
    (out / "coming.pt").write_text(f"after step {number}")
    (out / "coming.pt").replace(out / "checkpoints" / "last.pt")


def write(out: Path, line: dict[str, object]) -> None:
    with (out / METRICS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    if sys.platform == "linux":  # as `verb_child` does, which loads more
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    words = sys.argv[1:]
    print(f"{words[0]} begins", file=sys.stderr, flush=True)  # noqa: T201
    assert REPORT_TO not in os.environ
    assert int(os.environ["BATCHWRIGHT_VERB_PARENT"]) == os.getppid()
    if words[0] == "train":
        train(words)
        return
    hold(words[0])
    if words[0] == "check":
        shutil.copy(words[words.index("--profile") + 1], words[words.index("--out") + 1])
        return
    made = {"probe": "profile.json", "plan": "plan.json"}[words[0]]
    shutil.copy(MADE / made, words[words.index("--out") + 1])


main()
