"""Tries settings on the tasks of `benchmarks.methods.large_batch`: one line for each run.

    python -m benchmarks.tools.large_batch_look TASK ARM [KEY=VALUE ...] [--seeds 10,11]
        [--large N] [--images N] [--epochs N] [--rate R] [--data DIR] [--keep DIR]

KEY=VALUE changes the job of the arm. Seeds are 10 and up by default, so that those of the report
stay unseen while a form of AGS, or a task, is still being looked for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from batchwright.planning.planner import plan_without_profile
from batchwright.records import Plan
from batchwright.records.documents import change_job
from benchmarks.harness.common import say
from benchmarks.harness.kept_runs import KeptRuns, Wanted
from benchmarks.methods.large_batch_arms import TASKS, arms_of, open_task, plan_of, with_rates

CHANGED = {"images": int, "epochs": int, "small": int, "large": int, "rate": float}


def main(words: Sequence[str] | None = None) -> None:
    """Run the arm with each seed and print what came of it."""
    found = _arguments(words)
    changes = {name: value for name in CHANGED if (value := getattr(found, name)) is not None}
    task = replace(TASKS[found.task], **changes)
    arm = arms_of(task)[found.arm]
    with tempfile.TemporaryDirectory(prefix="batchwright-look-") as name:
        folder = Path(name)
        os.environ["BATCHWRIGHT_CACHE"] = str(folder / "cache")
        opened = open_task(task, found.data, folder)

        def planned(seed: int) -> Plan:
            plain = replace(arm, rate_factor=1.0)
            if not found.keys:
                return plan_of(task, arm, seed, opened)
            job = change_job(plan_of(task, plain, seed, opened).job, {}, found.keys)
            plan = plan_without_profile(job, opened.facts, opened.network)
            return with_rates(plan, arm.rate_factor)

        changed = [f"{key}={value}" for key, value in changes.items()]
        title = "-".join([found.task, found.arm, *found.keys, *changed])
        runs = KeptRuns(found.keep or folder / "kept", folder).make(
            [
                Wanted(title.replace("/", "_"), seed, planned(seed), arm.words)
                for seed in found.seeds
            ]
        )
    accuracies = [run.accuracy for run in runs]
    say(f"{title}: {fmean(accuracies):.2f} % over {len(runs)} seed(s)")


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("arm", choices=arms_of(next(iter(TASKS.values()))))
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    parser.add_argument(
        "--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[10]
    )
    for name, kind in CHANGED.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--data", type=Path, default=os.environ.get("BATCHWRIGHT_DATA"))
    parser.add_argument("--keep", type=Path)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
