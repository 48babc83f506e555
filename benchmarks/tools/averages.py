r"""Do averages of weights reach a target earlier than the weights themselves?

    python -m benchmarks.tools.averages train TASK OPTIMIZER SEED --data DIR [--epochs E]
        [--lines FILE]
    python -m benchmarks.tools.averages compare SEED... [--lines FILE]
    python -m benchmarks.tools.averages lengths SEED... [--lines FILE]

Settled before any run. Trainings of the look images (none of them test images, nor of the truth of
`benchmarks.planning.decisions`), one cosine, batch 128, the plan's rate, evaluated after every
epoch with the weights as they are and with averages of weights and statistics:

- ``ema-E`` exponential, looking back on E epochs (0.5, 1, 2);
- ``power-S`` of relative width S (0.05, 0.10): :math:`\beta_t = (1 - 1/t)^{\gamma + 1}` (Karras et
  al. 2024, arXiv 2312.02696).

A target is the last accuracy of the weights less 0.5, 2 and 5 points. What counts is the first
epoch at or above it over that of the weights, as a geometric mean over trainings and targets. An
average pays at 0.9 or less over all, no task above 1.03, and a last accuracy at most 0.25 points
below. The best by seed 11 is looked at again with seeds 13 and 14.

`lengths` asks what a schedule costs that is longer than a target needs, as a training ends at the
target. Settled before its runs: trainings of half, three quarters and all of the epochs, the target
the last accuracy of ``ema-0.5`` in the shortest. What counts is where each reaches it, between two
evaluations by a straight line, over where the shortest does. A longer schedule costs little at 1.1
or less as a geometric mean over trainings, no task above 1.25; by seed 11, then seeds 13 and 14.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

import batchwright as bw
from batchwright.records import Job
from batchwright.records.documents import change_job
from batchwright.training.batches.randomness import seed_worker
from batchwright.training.loop import accuracy_and_loss, open_task
from batchwright.workload.host import prepare_process
from benchmarks.harness.benchmark import RESULTS, make_parser, say, scratch
from benchmarks.harness.kept_runs import read_lines
from benchmarks.harness.plans import CPU, planned
from benchmarks.planning.decisions_runs import TASKS, Task, job_keys, open_images

LINES = RESULTS / "averages.jsonl"
BATCH = 128
CASES: dict[str, tuple[Task, int, int]] = {  # images, epochs
    "cifar-resnet8": (TASKS["cifar-resnet8"], 8192, 16),
    "groups-resnet8": (TASKS["groups-resnet8"], 8192, 16),
    "cifar-vgg8": (TASKS["cifar-vgg8"], 8192, 16),
    "imagenette-resnet8": (TASKS["imagenette-resnet8"], 2048, 12),
    "cifar-long": (Task("cifar100", "resnet8", 16, 8192, (3, 12), 30000, 2000), 30000, 16),
}
EPOCHS_BACK = (0.5, 1.0, 2.0)
GAMMA = {0.05: 16.97, 0.10: 6.94}  # by relative width
POINTS_BELOW = (0.5, 2.0, 5.0)
KEPT = "ema-0.5"  # what runs to a target are evaluated with


def _averaging(kept: Callable[[int], float]) -> Callable[..., None]:
    """For `AveragedModel`: how much of the average stays at the n-th update."""

    @torch.no_grad()
    def update(means: list[Tensor], now: list[Tensor], count: int | Tensor) -> None:
        if means[0].is_floating_point():
            torch._foreach_lerp_(means, now, 1 - kept(int(count)))

    return update


def _rules(steps: int) -> dict[str, Callable[[int], float]]:
    """By name, what stays at the n-th update; an epoch has so many steps."""

    def exponential(back: float, n: int) -> float:
        return 1 - max(1 / (back * steps), 1 / (n + 1))

    def power(gamma: float, n: int) -> float:
        return (1 - 1 / (n + 1)) ** (gamma + 1)

    return {
        **{f"ema-{back:g}": partial(exponential, back) for back in EPOCHS_BACK},
        **{f"power-{width:g}": partial(power, gamma) for width, gamma in GAMMA.items()},
    }


def train(
    name: str, optimizer: str, seed: int, data: Path, lines: Path, length: int | None = None
) -> None:
    """One training, and a line with accuracies in per cent after each epoch."""
    task, images, longest = CASES[name]
    epochs = length or longest
    prepare_process(1)
    with scratch() as folder:
        known = open_images(task, data, folder, look=images)
        asked = {"global_batch": BATCH, "optimizer": optimizer, "seed": seed, "evaluate_epochs": 1}
        plan = planned(change_job(Job(), {**job_keys(task, known, epochs), **asked}), known)
        one = open_task(plan, CPU)
        seed_worker(seed, 0, 0)
        averages = {
            rule: AveragedModel(one.network, multi_avg_fn=_averaging(kept), use_buffers=True)
            for rule, kept in _rules(-(-images // BATCH)).items()
            if length is None or rule == KEPT  # evaluations of all would take most of the time
        }
        curves: dict[str, list[float]] = {rule: [] for rule in ("weights", *averages)}
        run = folder / "run"
        with bw.Session(one.network, one.optimizer, one.training, plan=plan, run_folder=run) as s:
            for _ in s.epochs():
                for batch in s.batches():
                    if s.step(partial(one.mean_loss, *batch)):
                        for average in averages.values():
                            average.update_parameters(one.network)
                for rule, curve in curves.items():
                    model = averages[rule].module if rule in averages else None
                    found = s.evaluate(one.held_out, accuracy_and_loss, model=model)
                    curve.append(round(100 * found["top1"], 3))
    line = {"task": name, "optimizer": optimizer, "seed": seed, "images": images, "curves": curves}
    with lines.open("a") as file:
        file.write(json.dumps(line) + "\n")


def compare(lines: Sequence[dict[str, Any]], seeds: Sequence[int]) -> None:
    """Print each average's epochs over those of the weights, and its last accuracy."""
    told = [one for one in lines if one["seed"] in seeds]
    for rule in told[0]["curves"]:
        by_task: dict[str, list[float]] = {}
        for one in told:
            by_task.setdefault(one["task"], []).extend(_ratios(one["curves"], rule))
        last = fmean(one["curves"][rule][-1] - one["curves"]["weights"][-1] for one in told)
        mean = exp(fmean(log(ratio) for some in by_task.values() for ratio in some))
        tasks = {task: round(exp(fmean(map(log, some))), 3) for task, some in by_task.items()}
        say(f"{rule}: {mean:.3f}, last {last:+.2f} points, {tasks}")


def _is_whole(line: dict[str, Any]) -> bool:
    return len(line["curves"]["weights"]) == CASES[line["task"]][2]


def _ratios(curves: dict[str, list[float]], rule: str) -> list[float]:
    targets = [curves["weights"][-1] - below for below in POINTS_BELOW]
    return [_first(curves[rule], one) / _first(curves["weights"], one) for one in targets]


def compare_lengths(lines: Sequence[dict[str, Any]], seeds: Sequence[int]) -> None:
    """Print by how much later longer schedules reach the end of shorter ones."""
    found: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    for one in lines:
        if one["seed"] in seeds:
            case = tuple(one[key] for key in ("task", "optimizer", "seed"))
            curve = one["curves"][KEPT]
            found.setdefault(case, {})[len(curve)] = curve
    by_pair: dict[tuple[int, int], dict[str, list[float]]] = {}
    for case, curves in found.items():
        for least, epochs in combinations(sorted(curves), 2):
            target = curves[least][-1]
            ratio = _crossing(curves[epochs], target) / _crossing(curves[least], target)
            by_pair.setdefault((least, epochs), {}).setdefault(case[0], []).append(ratio)
    for (least, epochs), tasks in sorted(by_pair.items()):
        mean = exp(fmean(log(ratio) for some in tasks.values() for ratio in some))
        told = {task: round(exp(fmean(map(log, some))), 3) for task, some in tasks.items()}
        say(f"{epochs} epochs to the end of {least}: {mean:.3f} of them, {told}")


def _crossing(curve: Sequence[float], target: float) -> float:
    """Epochs to a target, between two evaluations by a straight line; one more if it is missed."""
    at = _first(curve, target)
    if at == 1 or at > len(curve):
        return float(at)
    before, after = curve[at - 2 : at]
    return at - (after - target) / (after - before)


def _first(curve: Sequence[float], target: float) -> int:
    """The first epoch at or above a target; one more than there are if none is."""
    return next((at for at, one in enumerate(curve, 1) if one >= target), len(curve) + 1)


def main(words: Sequence[str] | None = None) -> None:
    """Train or compare."""
    parser = make_parser(__doc__)
    kinds = parser.add_subparsers(dest="which", required=True)
    training, comparing = kinds.add_parser("train"), kinds.add_parser("compare")
    measuring = kinds.add_parser("lengths")
    training.add_argument("task", choices=CASES)
    training.add_argument("optimizer", choices=("sgd", "muon"))
    training.add_argument("seed", type=int)
    training.add_argument("--data", type=Path, required=True, metavar="DIR")
    training.add_argument("--epochs", type=int, metavar="E", help="default: all of the task's")
    for one in (comparing, measuring):
        one.add_argument("seeds", type=int, nargs="+")
    for one in (training, comparing, measuring):
        one.add_argument("--lines", type=Path, default=LINES, metavar="FILE")
    asked = parser.parse_args(words)
    if asked.which == "compare":
        whole = [one for one in read_lines(asked.lines) if _is_whole(one)]
        compare(whole, asked.seeds)
    elif asked.which == "lengths":
        compare_lengths(read_lines(asked.lines), asked.seeds)
    else:
        chosen = (asked.task, asked.optimizer, asked.seed, asked.data, asked.lines)
        train(*chosen, asked.epochs)


if __name__ == "__main__":
    main()
