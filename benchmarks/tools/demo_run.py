"""Make the demo run that comes with the service: a real training of about a minute, packed.

    python -m benchmarks.tools.demo_run [--run FOLDER] [--busy]

Without --run it trains digits with two equal workers. The pack holds what a reporter would have
sent, whatever the result; of the machine only the kind of its processor is kept. The machine must
have been quiet: beside other programs epochs take several times as long as a plan can know, and
workers wait for each other without a cause in the run. A run beside other programs is packed only
with --busy.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from pathlib import Path

import batchwright as bw
from batchwright.records import Plan, Profile, RunSummary
from batchwright.records.documents import read_record
from batchwright.records.lines.line_files import lines_of
from batchwright.records.service import RunEnd, RunIntroduction
from batchwright.records.text.load_text import load_words
from batchwright.reporting.data.reading import accuracy_words, pace_words
from batchwright.service.pages import demo
from batchwright.workload.load import load_between, read_load

NAME = "Demo: digits on two workers"
JOB = {
    "data": "digits",
    "workers": 2,
    "method": "plain",
    "epochs": 30,
    "resolutions": [16],
    "goal": {"price": 0.35},
    "probe": {"budget": 40, "learning": 20},
}
"""Images have twice their own side, since a step at 8 px would mostly be the exchange."""


def packed(folder: Path) -> bytes:
    """A finished run's folder as the service stores it; the same folder gives the same bytes."""
    introduction = RunIntroduction(
        name=NAME,
        plan=read_record(folder / "plan.json", Plan),
        profile=read_record(folder / "profile.json", Profile),
    )
    summary = read_record(folder / "summary.json", RunSummary)
    host = summary.epochs[0].workers[0].place.partition("/")[0]
    records = [line.model_dump(mode="json", exclude_defaults=True) for line in lines_of(folder)]
    summary = summary.model_copy(update={"run_folder": "demo", "profile": None})
    told = {
        "introduction": introduction.model_dump(mode="json", exclude_defaults=True),
        "records": records,
        "end": RunEnd(outcome="finished", summary=summary).model_dump(mode="json"),
    }
    text = json.dumps(told, separators=(",", ":")).replace(f'"{host}/', '"demo/')
    return gzip.compress(text.encode(), mtime=0)


def told(folder: Path) -> list[str]:
    """Lines about the run's result, for the person who makes it."""
    summary = read_record(folder / "summary.json", RunSummary)
    seconds = [epoch.training_seconds for epoch in summary.epochs[1:]]
    predicted = summary.plan.stages[0].predicted_epoch_seconds
    lines = [": ".join(pace_words(summary)), accuracy_words(summary)]
    if predicted is not None:
        inside = sum(predicted.low <= one <= predicted.high for one in seconds)
        lines.append(f"{inside} of {len(seconds)} epochs inside the interval of their median")
    return [line for line in lines if line]


def main() -> None:
    """Read the command line, train without --run, and pack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a finished run to pack; unset: trains one")
    parser.add_argument("--busy", action="store_true", help="pack a run beside other programs, too")
    given = parser.parse_args()
    target = Path(demo.__file__).with_name("demo.json.gz")
    with tempfile.TemporaryDirectory() as made:
        folder, busy = given.run, ""
        if folder is None:
            folder = Path(made) / "run"
            first = read_load()
            bw.run(run_folder=folder, **JOB)
            last = read_load()
            busy = load_words(load_between(first, last) if first and last else None)
        print("\n".join(told(folder)))
        if busy and not given.busy:
            raise SystemExit(f"not packed: {busy}; make it while the machine is quiet")
        content = packed(folder)
    target.write_bytes(content)
    print(f"{target}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
