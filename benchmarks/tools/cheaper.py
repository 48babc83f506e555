"""What makes the same accuracy cheaper: small changes of a training, each against the same without.

    python -m benchmarks.tools.cheaper gather [--data DIR] [--folder DIR] [--limit-minutes M]
    python -m benchmarks.tools.cheaper steps [--data DIR] [--folder DIR]
    python -m benchmarks.tools.cheaper table

Written down before anything was run. Tasks: three of the look set of
`benchmarks.planning.decisions_runs`, with its training images and those held out for it (never test
images), at half of the longer of its lengths: 6 epochs of `groups-resnet8` and `cifar-vgg8`, 4 of
`imagenette-resnet8`. With SGD at batch 64 and Muon at 128 (`cifar-vgg8` with Muon alone: SGD hardly
begins to learn there), both at the rate that a plan gives, one cosine over all epochs, seeds 11 and
12: ten pairs for each arm.

Arms, and what differs from `base`:

- `base`: nothing; random flips, no smoothing, the top resolution, one batch.
- `averaged-2`, `-5`, `-10`: `base`'s own training, evaluated with an exponential moving average of
  weights and of statistics of normalization, its horizon 2, 5 or 10 % of all steps.
- `flips`: an image's flip is drawn in epoch 1 and then alternates (Jordan 2024, arXiv 2404.00498).
- `smooth-0.1`, `smooth-0.2`: label smoothing.
- `low`: the first 60 % of the epochs at 3/4 of the side.
- `grow`: batch doubled at 1/2 and at 3/4 of the epochs, the rate kept (Smith et al. 2018).
- `cyclic`: `method=cyclic` as it is by default: 3/4 of the side and all of it in each of three
  stages of the rate (1, 0.1 and 0.01), no cosine.
- `double`: twice the batch from the start, at the rate of a plan: what `grow` has to beat.

Accuracy: held out, after the last epoch, paired with `base` of the same task, optimizer and seed.
Seconds: by the cost of a step at each side and batch, timed in turns on one core (`steps`), as
others used the machine during the runs: seconds of the processor, which each run keeps, too, turned
out to vary by a third between runs of the same work.
An arm pays where it has either the same accuracy (mean difference at least -0.25 points) for at
least 5 % less time, or at least 0.5 points more for the same time (at most 1 % more); the mean over
the pairs, its standard error below the gain; and no task (mean of its pairs) worse by over
1 point. `grow` must besides beat `double` by the same rule, else a fixed batch does as well.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import batchwright as bw
from batchwright.algorithms.partition import apportion
from batchwright.records import Job, Plan
from batchwright.records.documents import change_job, read_record
from batchwright.training.batches.randomness import seed_worker
from batchwright.training.loop import accuracy_and_loss, open_task
from batchwright.workload.data import pipeline
from batchwright.workload.host import autocast, prepare_process
from benchmarks.harness.benchmark import RESULTS, add_data, add_gathering, make_parser, say, scratch
from benchmarks.harness.kept_runs import Run, RunLines, Wanted, read_lines
from benchmarks.harness.plans import CPU, Opened, planned
from benchmarks.planning.decisions_runs import TASKS, Optimizer, job_keys, open_images

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
LATE = ("cyclic", "low", "grow")  # second seed later: the first of the last two lost points
LAST = ("double", "smooth-0.2")
LOW_PART, LOW_SIDE = 0.6, 0.75
HORIZONS = (0.02, 0.05, 0.1)  # of averages, as parts of all steps
LINES = RESULTS / "cheaper.jsonl"
STEPS = RESULTS / "cheaper-steps.jsonl"
TURNS, TURN_IMAGES = 6, 1024  # of steps that are timed; of 16 px in each turn
FIGURES = "cheaper.json"  # of a run, in its folder

SAME_POINTS, LESS_TIME = -0.25, 0.05
MORE_POINTS, SAME_TIME = 0.5, 0.01
WORST_TASK = -1.0


# ------------------------------------------------------------------------------------------- plans


def plan_of(name: str, arm: str, optimizer: Optimizer, seed: int, known: Opened) -> Plan:
    """The plan of a training."""
    task, epochs = TASKS[name], EPOCHS[name]
    batch = BATCHES[optimizer] * (2 if arm == "double" else 1)
    asked = {"global_batch": batch, "optimizer": optimizer, "seed": seed}
    smoothing = float(arm.removeprefix("smooth-")) if arm.startswith("smooth") else 0.0
    keys = {**job_keys(task, known, epochs), **asked, "label_smoothing": smoothing}
    if arm == "cyclic":
        keys |= {"method": "cyclic", "resolutions": [round(LOW_SIDE * task.side), task.side]}
    plan = planned(change_job(Job(), keys), known)
    if arm not in ("low", "grow"):
        return plan
    rows = (
        {
            "epochs": length,
            "resolution": side,
            "local_batch_sizes": (size,),
            "micro_batch_size": size,
        }
        for length, side, size in rows_of(name, arm, optimizer)
    )
    stages = tuple(plan.stages[0].model_copy(update=row) for row in rows)
    return plan.model_copy(update={"stages": stages})


def rows_of(name: str, arm: str, optimizer: str) -> list[tuple[int, int, int]]:
    """Epochs, side and batch of an arm's rows; of `cyclic` the epochs at each side in all."""
    top, batch, epochs = TASKS[name].side, BATCHES[optimizer], EPOCHS[name]
    low = round(LOW_SIDE * top)
    if arm == "low":
        first = round(LOW_PART * epochs)
        return [(first, low, batch), (epochs - first, top, batch)]
    if arm == "cyclic":
        first = sum(one // 2 for one in apportion([4, 2, 1], epochs))  # the top gets the odd epoch
        return [(first, low, batch), (epochs - first, top, batch)]
    if arm == "grow":
        lengths = zip(apportion([2, 1, 1], epochs), (1, 2, 4), strict=True)
        return [(length, top, batch * times) for length, times in lengths]
    return [(epochs, top, batch * (2 if arm == "double" else 1))]


def wanted(name: str, arm: str, optimizer: Optimizer, seed: int, known: Opened) -> Wanted:
    """The run of an arm."""
    facts = {"task": name, "optimizer": optimizer, "arm": arm, "epochs": EPOCHS[name], "seed": seed}
    plan = plan_of(name, arm, optimizer, seed, known)
    words = ("benchmarks.tools.cheaper", "train", arm)
    return Wanted(f"{name}-{optimizer}-{arm}", seed, plan, words, facts)


class Lines(RunLines):
    """Lines that say, too, what a run wrote into `FIGURES`."""

    def _store(self, one: Wanted, run: Run) -> None:
        figures = json.loads((self._run(one) / FIGURES).read_text(encoding="utf-8"))
        super()._store(replace(one, facts={**one.facts, **figures}), run)


def _turn_of(one: tuple[str, int]) -> tuple[bool, bool, int, int]:
    """When an arm with a seed is made."""
    arm, seed = one
    late = seed != SEEDS[0] and arm in LATE
    return arm in LAST, late, SEEDS.index(seed), ARMS.index(arm)


def gather(data: Path, folder: Path, lines: Path, until: float) -> None:
    """Make the runs that are not kept, seed by seed."""

    @cache
    def images_of(name: str) -> Opened:
        return open_images(TASKS[name], data, folder, look=TASKS[name].look_images)

    def all_of_them() -> Iterator[Wanted]:
        turns = sorted(product(ARMS, SEEDS), key=_turn_of)
        for (arm, seed), (name, optimizer) in product(turns, PAIRS):
            yield wanted(name, arm, optimizer, seed, images_of(name))

    with tempfile.TemporaryDirectory(prefix="batchwright-cheaper-") as runs:
        Lines(lines, Path(runs)).gather(all_of_them(), until)


# ---------------------------------------------------------------------------------------- training


class Averages:
    """Exponential moving averages of all numbers of a network, each with its own horizon.

    ``networks`` are the averages, in the order of `HORIZONS`; ``seconds`` of the processor are what
    averaging took.
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
    task = open_task(plan, CPU)
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


# ------------------------------------------------------------------------------------------- steps


def cost_of_steps(data: Path, folder: Path) -> None:
    """Time steps of each task, optimizer, side and batch in turns, and keep what each takes."""
    prepare_process(1)
    found = []
    for name, optimizer in PAIRS:
        known = open_images(TASKS[name], data, folder, look=TASKS[name].look_images)
        plan = plan_of(name, "base", optimizer, SEEDS[0], known)
        task, side, batch = open_task(plan, CPU), TASKS[name].side, BATCHES[optimizer]
        shapes = [(round(LOW_SIDE * side), batch), *((side, batch * times) for times in (1, 2, 4))]
        seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
        for turn, shape in product(range(TURNS + 1), shapes):
            spent = _turn(task, shape, plan.precision, turn)
            if turn:  # the first warms up
                seconds[shape].append(spent)
        for (side, batch), values in seconds.items():
            cost = float(f"{statistics.median(values):.4g}")
            shape = {"side": side, "batch": batch, "step_seconds": cost}
            found.append({"task": name, "optimizer": optimizer, **shape})
    STEPS.write_text("".join(f"{json.dumps(one)}\n" for one in found), encoding="utf-8")


def _turn(task: Any, shape: tuple[int, int], precision: str, turn: int) -> float:
    """Processor seconds of a step, over as many steps as go through `TURN_IMAGES`."""
    side, batch = shape
    steps = max(1, TURN_IMAGES // (batch * max(1, side // 16) ** 2))
    spent = 0.0
    for step in range(steps):
        indices = torch.arange(step * batch, (step + 1) * batch) % len(task.training)
        before = time.process_time()
        images, labels = task.training.training_batch(indices, epoch=turn, resolution=side)
        with autocast(precision, CPU):
            loss = task.mean_loss(images, labels)
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        spent += time.process_time() - before
    return spent / steps


# ------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Line:
    """An arm against `base`, over pairs of the same task, optimizer and seed."""

    points: tuple[float, ...]  # accuracy less that of `base`, of each pair
    tasks: tuple[str, ...]  # of each pair
    times: tuple[float, ...]  # seconds over those of `base`, of each pair

    @property
    def gain(self) -> float:
        """Mean, in points."""
        return statistics.fmean(self.points)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.points) / len(self.points) ** 0.5

    @property
    def time(self) -> float:
        """Geometric mean of the ratios."""
        return statistics.geometric_mean(self.times)

    @property
    def worst(self) -> float:
        """Mean of the worst task, in points."""
        return min(
            statistics.fmean(
                points for points, task in zip(self.points, self.tasks, strict=True) if task == one
            )
            for one in self.tasks
        )

    @property
    def pays(self) -> bool:
        """By the rule in the head."""
        quicker = self.time <= 1 - LESS_TIME and self.gain >= SAME_POINTS
        better = self.time <= 1 + SAME_TIME and self.gain >= max(MORE_POINTS, self.error)
        return (quicker or better) and self.worst >= WORST_TASK


def lines_of(runs: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> dict[str, Line]:
    """Each arm against `base`, as far as pairs were made, from what `LINES` and `STEPS` hold."""
    cost = {
        (one["task"], one["optimizer"], one["side"], one["batch"]): one["step_seconds"]
        for one in steps
    }
    kept = {
        (one["arm"], one["task"], one["optimizer"], one["seed"]): one
        for one in runs
        if one["epochs"] == EPOCHS[one["task"]] and (one["task"], one["optimizer"]) in PAIRS
    }

    def seconds(arm: str, name: str, optimizer: str) -> float:
        return sum(
            length * TASKS[name].look_images / size * cost[name, optimizer, side, size]
            for length, side, size in rows_of(name, arm, optimizer)
        )

    found = {}
    for arm in (*ARMS[1:], *(f"averaged-{100 * part:.0f}" for part in HORIZONS)):
        points, tasks, times = [], [], []
        for (name, optimizer), seed in product(PAIRS, SEEDS):
            base = kept.get(("base", name, optimizer, seed))
            own = base if arm.startswith("averaged") else kept.get((arm, name, optimizer, seed))
            if base is None or own is None:
                continue
            if arm.startswith("averaged"):
                part = float(arm.removeprefix("averaged-")) / 100
                accuracy = own["averaged"][HORIZONS.index(part)]
                ratio = 1 + own["averaging_seconds"] / sum(own["processor_seconds"])
            else:
                accuracy = own["accuracy"]
                ratio = seconds(arm, name, optimizer) / seconds("base", name, optimizer)
            points.append(accuracy - base["accuracy"])
            tasks.append(name)
            times.append(ratio)
        if len(points) > 1:
            found[arm] = Line(tuple(points), tuple(tasks), tuple(times))
    return found


def table(lines: Mapping[str, Line]) -> str:
    """Rows of a table in Markdown."""
    rows = [
        f"| `{arm}` | {len(one.points)} | {one.gain:+.2f} ({one.error:.2f}) | {one.worst:+.2f} "
        f"| {one.time:.3f} | {'yes' if one.pays else 'no'} |"
        for arm, one in lines.items()
    ]
    head = "| arm | pairs | points (standard error) | worst task | time | pays |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


# ------------------------------------------------------------------------------------ command line


def main(words: Sequence[str] | None = None) -> None:
    """Gather runs, train one of them, or say what came of them."""
    parser = make_parser(__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    gathering, timing, training = map(kinds.add_parser, ("gather", "steps", "train"))
    kinds.add_parser("table")
    add_gathering(gathering, LINES)
    add_data(timing, required=True)
    for one in (gathering, timing):
        one.add_argument("--folder", type=Path, help="keeps the copies of images")
    training.add_argument("arm", choices=ARMS)
    training.add_argument("plan", type=Path)
    training.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(words)
    if asked.kind == "train":
        train(read_record(asked.plan, Plan), asked.arm, asked.out)
    elif asked.kind == "table":
        say(table(lines_of(read_lines(LINES), read_lines(STEPS))))
    else:
        with scratch(asked.folder) as folder:
            if asked.kind == "steps":
                cost_of_steps(asked.data, folder)
            else:
                gather(asked.data, folder, asked.lines, asked.until)


if __name__ == "__main__":
    main()
