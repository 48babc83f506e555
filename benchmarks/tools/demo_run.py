"""Makes the demo run that comes with the service: a real training of about a minute, packed.

    python -m benchmarks.tools.demo_run [--run FOLDER]

Without a folder it trains digits with two workers whose shares follow their speed. What is packed
is what a reporter would have sent; of the machine only the kind of its processor stays.
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
from batchwright.service.pages import demo

NAME = "Demo: digits, two workers whose shares follow their speed"
JOB = {
    "data": "digits",
    "workers": 2,
    "method": "dynamic-batch",
    "epochs": 24,
    "goal": {"price": 0.35},
    "probe": {"budget": 30},
}


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


def main() -> None:
    """Train, if need be, and pack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a finished run to pack; unset: trains one")
    folder = parser.parse_args().run
    target = Path(demo.__file__).with_name("demo.json.gz")
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            folder = Path(made) / "run"
            bw.run(run_folder=folder, **JOB)
        content = packed(folder)
    target.write_bytes(content)
    print(f"{target}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
