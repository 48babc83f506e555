"""What makes the same accuracy cheaper: small changes of a training, each against the same without.

    python -m benchmarks.cheaper gather [--data DIR] [--folder DIR] [--limit-minutes M]
    python -m benchmarks.cheaper table

Written down before anything was run. Tasks: three of the look set of `benchmarks.decisions_runs`,
with its training images and those held out for it (never test images), at half of the longer of its
lengths: 6 epochs of `groups-resnet8` and `cifar-vgg8`, 4 of `imagenette-resnet8`. With SGD at batch
64 and Muon at 128 (`cifar-vgg8` with Muon alone: SGD hardly begins to learn there), both at the
rate that a plan gives, one cosine over all epochs, seeds 11 and 12: ten pairs for each arm.

| arm | what differs from `base` |
|---|---|
| `base` | nothing: random flips, no smoothing, the top resolution, one batch |
| `averaged-2`, `-5`, `-10` | `base`'s own training, evaluated with an exponential moving average of weights and statistics of normalization, its horizon 2, 5 or 10 % of all steps |
| `flips` | an image's flip is drawn in epoch 1 and then alternates (Jordan 2024, arXiv 2404.00498) |
| `smooth-0.1`, `smooth-0.2` | label smoothing |
| `low` | the first 60 % of the epochs at 3/4 of the side |
| `grow` | batch doubled at 1/2 and at 3/4 of the epochs, the rate kept (Smith et al. 2018) |
| `cyclic` | `method=cyclic` as it is by default: 3/4 of the side and all of it in each of three stages of the rate (1, 0.1 and 0.01), no cosine |
| `double` | twice the batch from the start, at the rate of a plan: what `grow` has to beat |

Accuracy: held out, after the last epoch, paired with `base` of the same task, optimizer and seed.
Seconds: of the processor, in one thread, training alone: others use the machine at the same time.
An arm pays where it has either the same accuracy (mean difference at least -0.25 points) for at
least 5 % less time, or at least 0.5 points more for the same time (at most 1 % more); the mean over
the pairs, its standard error below the gain; and no task (mean of its pairs) worse by over
1 point. `grow` must besides beat `double` by the same rule, else a fixed batch does as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

import batchwright as bw
from batchwright.documents import change_job, read_record
from batchwright.planning.partition import apportion
from batchwright.planning.planner import plan_without_profile
from batchwright.preparing import resolve
from batchwright.records import Job, Plan
from batchwright.training.loop import accuracy_and_loss, open_task
from batchwright.workload import pipeline
from batchwright.workload.randomness import seed_worker
from benchmarks.common import RESULTS, say
from benchmarks.decisions_runs import TASKS, Optimizer, job_keys, open_images
from benchmarks.kept_runs import Run, RunLines, Wanted, read_lines
from benchmarks.large_batch_arms import Opened

EPOCHS = {"groups-resnet8": 6, "cifar-vgg8": 6, "imagenette-resnet8": 4}
BATCHES: dict[Optimizer, int] = {"sgd": 64, "muon": 128}
PAIRS: tuple[tuple[str, Optimizer], ...] = (
    ("groups-resnet8", "sgd"),
    ("groups-resnet8", "muon"),
    ("cifar-vgg8", "muon"),
    ("imagenette-resnet8", "sgd"),
    ("imagenette-resnet8", "muon"),
)
SEEDS = (11, 12)
ARMS = ("base", "flips", "low", "smooth-0.1", "grow", "cyclic", "double", "smooth-0.2")
FIRST = 6  # of them with both seeds before the others have any
LOW_PART, LOW_SIDE = 0.6, 0.75
HORIZONS = (0.02, 0.05, 0.1)  # of averages, as parts of all steps
LINES = RESULTS / "cheaper.jsonl"
FIGURES = "cheaper.json"  # of a run, in its folder

SAME_POINTS, LESS_TIME = -0.25, 0.05
MORE_POINTS, SAME_TIME = 0.5, 0.01
WORST_TASK = -1.0


# ------------------------------------------------------------------------------------------- plans


def plan_of(name: str, arm: str, optimizer: Optimizer, seed: int, opened: Opened) -> Plan:
    """The plan of a training."""
    task, epochs = TASKS[name], EPOCHS[name]
    batch = BATCHES[optimizer] * (2 if arm == "double" else 1)
    asked = {"global_batch": batch, "optimizer": optimizer, "seed": seed}
    smoothing = float(arm.removeprefix("smooth-")) if arm.startswith("smooth") else 0.0
    keys = {**job_keys(task, opened, epochs), **asked, "label_smoothing": smoothing}
    if arm == "cyclic":
        keys |= {"method": "cyclic", "resolutions": [round(LOW_SIDE * task.side), task.side]}
    job = resolve(change_job(Job(), keys), opened.facts)
    plan = plan_without_profile(job, opened.facts, opened.network)
    stage = plan.stages[0]
    if arm == "low":
        first = round(LOW_PART * epochs)
        low = {"epochs": first, "resolution": round(LOW_SIDE * stage.resolution)}
        rows = (low, {"epochs": epochs - first})
    elif arm == "grow":
        lengths = apportion([2, 1, 1], epochs)
        sizes = [batch * factor for factor in (1, 2, 4)]
        rows = tuple(
            {"epochs": length, "local_batch_sizes": (size,), "micro_batch_size": size}
            for length, size in zip(lengths, sizes, strict=True)
        )
    else:
        return plan
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update=row) for row in rows)}
    )


def wanted(name: str, arm: str, optimizer: Optimizer, seed: int, opened: Opened) -> Wanted:
    """The run of an arm."""
    facts = {
        "task": name,
        "optimizer": optimizer,
        "arm": arm,
        "epochs": EPOCHS[name],
        "seed": seed,
    }
    plan = plan_of(name, arm, optimizer, seed, opened)
    words = ("benchmarks.cheaper", "train", arm)
    return Wanted(f"{name}-{optimizer}-{arm}", seed, plan, words, facts)


class Lines(RunLines):
    """Lines that say, too, what a run wrote into `FIGURES`."""

    def _store(self, one: Wanted, run: Run) -> None:
        figures = json.loads((self._run(one) / FIGURES).read_text(encoding="utf-8"))
        super()._store(replace(one, facts={**one.facts, **figures}), run)


def gather(data: Path, folder: Path, until: float) -> None:
    """Make the runs that are not kept, seed by seed."""

    @cache
    def opened(name: str) -> Opened:
        return open_images(TASKS[name], data, folder, look=TASKS[name].look_images)

    def all_of_them() -> Iterator[Wanted]:
        for arms, seed in product((ARMS[:FIRST], ARMS[FIRST:]), SEEDS):
            for arm, (name, optimizer) in product(arms, PAIRS):
                yield wanted(name, arm, optimizer, seed, opened(name))

    with tempfile.TemporaryDirectory(prefix="batchwright-cheaper-") as runs:
        Lines(LINES, Path(runs)).gather(all_of_them(), until)


# ---------------------------------------------------------------------------------------- training


class Averages:
    """Exponential moving averages of all numbers of a network, each with its own horizon.

    Args:
        network: What is trained.
        steps: Of the whole training.

    Attributes:
        networks: The averages, in the order of `HORIZONS`.
        seconds: Of the processor, that averaging took.
    """

    def __init__(self, network: nn.Module, steps: int) -> None:
        self._network = network
        self._parts = [1 / max(1.0, horizon * steps) for horizon in HORIZONS]
        self.networks = [deepcopy(network).eval() for _ in HORIZONS]
        self.seconds = 0.0

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the weights after a step."""
        before = time.process_time()
        now = [value for value in self._network.state_dict().values() if value.is_floating_point()]
        for network, part in zip(self.networks, self._parts, strict=True):
            means = [one for one in network.state_dict().values() if one.is_floating_point()]
            torch._foreach_lerp_(means, now, part)
        self.seconds += time.process_time() - before


def alternating(seed: int, epoch: int, indices: Tensor) -> pipeline.Draws:
    """As `pipeline.draw`, but that flips are those of epoch 0, and the others in odd epochs."""
    first = DRAW(seed, 0, indices).flip
    return DRAW(seed, epoch, indices)._replace(flip=~first if epoch % 2 else first)


DRAW = pipeline.draw


def train(plan: Plan, arm: str, run_folder: Path) -> None:
    """Train an arm's plan as `training.loop.train` does, and write `FIGURES`."""
    if arm == "flips":
        pipeline.draw = alternating
    task = open_task(plan, torch.device("cpu"))
    seed_worker(plan.job.seed, 0, 0)
    samples = plan.data.train_samples
    steps = sum(row.epochs * -(-samples // row.global_batch_size) for row in plan.stages)
    averages = Averages(task.network, steps) if arm == "base" else None
    seconds: list[float] = []
    figures: dict[str, object] = {}
    with bw.Session(
        task.network, task.optimizer, task.training, plan=plan, run_folder=run_folder
    ) as session:
        for _ in session.epochs():
            before = time.process_time() - (averages.seconds if averages else 0.0)
            for images, labels in session.batches():
                updated = session.step(partial(task.mean_loss, images, labels))
                if averages and updated:
                    averages.follow()
            spent = time.process_time() - (averages.seconds if averages else 0.0) - before
            seconds.append(round(spent, 3))
            if session.evaluation_due:
                session.evaluate(task.held_out, accuracy_and_loss)
                if averages:
                    figures["averaged"] = [
                        round(100 * _accuracy(session, one, task.held_out), 4)
                        for one in averages.networks
                    ]
                    session.evaluate(task.held_out, accuracy_and_loss)  # what the summary says
    figures["processor_seconds"] = seconds
    if averages:
        figures["averaging_seconds"] = round(averages.seconds / len(HORIZONS), 3)
    (run_folder / FIGURES).write_text(json.dumps(figures), encoding="utf-8")


def _accuracy(session: bw.Session, network: nn.Module, held_out: object) -> float:
    def forward(_: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return network(batch[0]), batch[1]

    return session.evaluate(held_out, accuracy_and_loss, forward=forward)["top1"]


# ------------------------------------------------------------------------------------------- table


def main(words: Sequence[str] | None = None) -> None:
    """Gather runs, train one of them, or say what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    gathering = kinds.add_parser("gather")
    gathering.add_argument("--data", type=Path, default=os.environ.get("BATCHWRIGHT_DATA"))
    gathering.add_argument("--folder", type=Path, help="keeps the copies of images")
    gathering.add_argument("--limit-minutes", type=float, default=float("inf"), metavar="M")
    training = kinds.add_parser("train")
    training.add_argument("arm", choices=ARMS)
    training.add_argument("plan", type=Path)
    training.add_argument("--out", type=Path, required=True)
    kinds.add_parser("table")
    asked = parser.parse_args(words)
    if asked.kind == "train":
        train(read_record(asked.plan, Plan), asked.arm, asked.out)
    elif asked.kind == "table":
        say(table(read_lines(LINES)))
    elif asked.data is None:
        parser.error("give --data DIR, or set BATCHWRIGHT_DATA")
    else:
        until = time.monotonic() + 60 * asked.limit_minutes
        with tempfile.TemporaryDirectory(prefix="batchwright-cheaper-images-") as made:
            folder = asked.folder or Path(made)
            os.environ["BATCHWRIGHT_CACHE"] = str(folder / "cache")
            gather(asked.data, folder, until)


if __name__ == "__main__":
    main()
