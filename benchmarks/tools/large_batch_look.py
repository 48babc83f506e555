"""Tries settings on the tasks of `benchmarks.methods.large_batch`: one line for each run.

    python -m benchmarks.tools.large_batch_look TASK ARM [KEY=VALUE ...] [--seeds 10,11]
        [--large N] [--images N] [--epochs N] [--rate R] [--data DIR] [--keep DIR]

KEY=VALUE changes the job of the arm. Seeds are 10 and up by default, so that those of the report
stay unseen while a form of AGS, or a task, is still being looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from batchwright.planning.planner import plan_without_profile
from batchwright.records import Plan
from batchwright.records.documents import change_job
from benchmarks.harness.benchmark import add_data, make_parser, say, scratch
from benchmarks.harness.kept_runs import KeptRuns, Wanted
from benchmarks.harness.plans import with_rates
from benchmarks.methods.large_batch_arms import TASKS, arms_of, open_task, plan_of

CHANGED = {"images": int, "epochs": int, "small": int, "large": int, "rate": float}


def main(words: Sequence[str] | None = None) -> None:
    """Run the arm with each seed and print what came of it."""
    parser = make_parser(__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("arm", choices=arms_of(next(iter(TASKS.values()))))
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[10])
    for name, kind in CHANGED.items():
        parser.add_argument(f"--{name}", type=kind)
    add_data(parser)
    parser.add_argument("--keep", type=Path)
    found = parser.parse_args(words)
    changes = {name: value for name in CHANGED if (value := getattr(found, name)) is not None}
    task = replace(TASKS[found.task], **changes)
    arm = arms_of(task)[found.arm]
    with scratch() as folder:
        known = open_task(task, found.data, folder)

        def changed(seed: int) -> Plan:
            if not found.keys:
                return plan_of(task, arm, seed, known)
            plain = plan_of(task, replace(arm, rate_factor=1.0), seed, known)
            job = change_job(plain.job, {}, found.keys)
            plan = plan_without_profile(job, known.facts, known.network)
            return with_rates(plan, arm.rate_factor)

        told = [f"{key}={value}" for key, value in changes.items()]
        title = "-".join([found.task, found.arm, *found.keys, *told])
        name = title.replace("/", "_")
        runs = KeptRuns(found.keep or folder / "kept", folder).make(
            [Wanted(name, seed, changed(seed), arm.words) for seed in found.seeds]
        )
    accuracies = [run.accuracy for run in runs]
    say(f"{title}: {fmean(accuracies):.2f} % over {len(runs)} seed(s)")


if __name__ == "__main__":
    main()
