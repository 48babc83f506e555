r"""Accuracy within a training, epoch by epoch: curves measured, and what falls short of whole ones.

    python -m benchmarks.epoch_curves gather [--data DIR] [--limit-minutes M] [--lines FILE]
    python -m benchmarks.epoch_curves fit

Trainings are those of the look set of `benchmarks.decisions_runs` at its full length (seed 10,
images held out from the training set, none of them test images), evaluated after every epoch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.common import RESULTS, say
from benchmarks.decisions_runs import (
    LOOK_SEED,
    OPTIMIZERS,
    TASKS,
    Cell,
    open_images,
    wanted,
)
from benchmarks.kept_runs import RunLines, Wanted

LINES = RESULTS / "epoch-curves.jsonl"
BATCHES = (128, 512)
SMALLER = {"digits": (32, 128)}  # 1,152 images make too few steps with 512


def cells() -> Iterator[Cell]:
    """Trainings to make, a batch and an optimizer of every task before the next."""
    for place in range(len(BATCHES)):
        for optimizer in OPTIMIZERS:
            for name, task in TASKS.items():
                batch = SMALLER.get(name, BATCHES)[place]
                yield Cell(name, batch, optimizer, 1.0, max(task.epochs))


def gather(runs: RunLines, data: Path, folder: Path, until: float) -> None:
    """Make the trainings that are not kept."""

    @cache
    def opened(name: str):
        return open_images(TASKS[name], data, folder, look=TASKS[name].look_images)

    def one(cell: Cell) -> Wanted:
        made = wanted(cell, LOOK_SEED, opened(cell.task), prefix="curve-")
        plan = made.plan.model_copy(
            update={"job": made.plan.job.model_copy(update={"evaluate_epochs": 1})}
        )
        more = {"classes": len(plan.data.classes), "held_out": plan.data.val_samples}
        return replace(made, plan=plan, facts={**made.facts, **more})

    runs.gather(map(one, cells()), until)


def main(words: Sequence[str] | None = None) -> None:
    """Gather or fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=("gather", "fit"))
    parser.add_argument("--data", type=Path, default=os.environ.get("BATCHWRIGHT_DATA"))
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), metavar="M")
    parser.add_argument("--lines", type=Path, default=LINES, metavar="FILE")
    asked = parser.parse_args(words)
    if asked.data is None:
        parser.error("give --data DIR, or set BATCHWRIGHT_DATA")
    until = time.monotonic() + 60 * asked.limit_minutes
    with tempfile.TemporaryDirectory(prefix="batchwright-curves-") as name:
        folder = Path(name)
        os.environ["BATCHWRIGHT_CACHE"] = str(folder / "cache")
        gather(RunLines(asked.lines, folder), asked.data, folder, until)
    say(f"kept in {asked.lines}")


if __name__ == "__main__":
    main()
