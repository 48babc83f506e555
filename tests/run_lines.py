"""Lines of runs as tests need them: from flat names, whatever is left out has a plain value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchwright.records import DataFacts
from batchwright.records.lines.flat_lines import from_flat
from batchwright.records.lines.line_files import line_text
from batchwright.records.lines.run_lines import RunLine
from samples import make_data

_STEPS = {"epoch": 0, "step": 0, "steps": 100}
_PLAIN: dict[str, dict[str, Any]] = {
    "step": {
        **_STEPS,
        "time/train_s": 0.0,
        "train/loss": None,
        "throughput/samples_per_sec": 0.0,
        "lr": 0.0,
    },
    "shares": _STEPS,
    "epoch": {
        "epochs": 100,
        "train/loss": None,
        "time/epoch_s": 0.0,
        "time/eval_s": 0.0,
        "time/checkpoint_s": 0.0,
        "lr": 0.0,
        "resolution": 32,
        "batch/global": 32,
    },
}
_OF_WORKERS: dict[str, dict[str, Any]] = {
    "step": {"time/rank{}/compute_s": 0.0, "time/rank{}/wait_s": 0.0},
    "shares": {"place/{}": "node1/cpu:{}"},
    "epoch": {f"time/rank{{}}/{part}_s": 0.0 for part in ("input", "compute", "wait", "comm")},
}


def typed(flat: Mapping[str, Any], data: DataFacts | None = None) -> RunLine:
    """The record of a flat line that may lack most of its values."""
    kind, found = flat["kind"], dict(flat)
    for name, value in _PLAIN.get(kind, {}).items():
        found.setdefault(name, value)
    ranks = [name.removeprefix("batch/local/") for name in flat if name.startswith("batch/local/")]
    for rank in ranks:
        for pattern, value in _OF_WORKERS.get(kind, {}).items():
            told = value.format(rank) if isinstance(value, str) else value
            found.setdefault(pattern.format(rank), told)
    return from_flat(found, lambda: data or make_data())


def values_of(line: RunLine) -> dict[str, Any]:
    """A line as JSON has it."""
    found: dict[str, Any] = json.loads(line_text(line))
    return found
