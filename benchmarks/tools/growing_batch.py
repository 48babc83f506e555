"""A batch that follows the measured gradient noise: is the same accuracy cheaper with it?

    python -m benchmarks.tools.growing_batch gather|table
        [--muon] [--data DIR] [--limit-minutes M] [--lines FILE]

docs/log.md ("A batch that follows the noise, planned"; --muon: "A batch that grows with Muon,
planned") has arms, seeds and rule, written down before anything was trained. `gather` makes the
missing runs; `table` probes each task, for the seconds of an epoch with each batch, and so wants
the machine left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby, product
from math import log2, sqrt
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

import batchwright as bw
from batchwright.records import Job, Plan, RunSummary
from batchwright.records.documents import change_job, read_record
from benchmarks.harness.benchmark import RESULTS, add_gathering, make_parser, say, scratch
from benchmarks.harness.kept_runs import Run, RunLines, Wanted, read_lines
from benchmarks.harness.plans import Opened, planned
from benchmarks.planning.decisions_runs import TASKS, job_keys, open_images

BATCHES = {
    ("groups-resnet8", "sgd"): 64,
    ("groups-resnet8", "muon"): 128,
    ("cifar-vgg8", "muon"): 128,
    ("imagenette-resnet8", "sgd"): 32,
    ("imagenette-resnet8", "muon"): 32,
}  # by task and optimizer, at the start
Pair = tuple[str, str]  # task and optimizer


@dataclass(frozen=True)
class Look:
    """Arms, pairs of a task and an optimizer, and seeds that are compared."""

    arms: tuple[str, ...]  # `base` first: others follow its noise
    pairs: tuple[Pair, ...]
    seeds: tuple[int, ...]


FIRST = Look(("base", "follow", "follow-root", "fixed", "double"), tuple(BATCHES), (11, 12))
MUON = Look(
    ("base", "follow-root", "fixed-root", "short"),
    tuple(pair for pair in BATCHES if pair[1] == "muon"),
    (13, 14, 15, 16),
)
LEAST_STEPS, MOST = 16, 8  # steps that an epoch keeps, and largest growth
LINES = RESULTS / "growing-batch.jsonl"


def factors_of(arm: str, room: int, epochs: int, noise: Sequence[float | None]) -> list[int]:
    """Batch of each epoch over that at the start, from the noise after each epoch of `base`."""
    if arm.startswith("fixed"):
        grown = [2.0 ** ((2 * e >= epochs) + (4 * e >= 3 * epochs)) for e in range(epochs)]
    elif arm.startswith("follow"):
        first = next(one for one in noise if one)
        grown = [1.0, *accumulate(((one or first) / first for one in noise[:-1]), max)]
    else:
        grown = [2.0 if arm == "double" else 1.0] * epochs
    return [min(room, 2 ** int(log2(max(1.0, one)))) for one in grown]


def room_of(pair: Pair) -> int:
    """Largest batch over that at the start."""
    return min(MOST, TASKS[pair[0]].look_images // LEAST_STEPS // BATCHES[pair])


def plan_of(pair: Pair, arm: str, seed: int, known: Opened, noise: Sequence[float | None]) -> Plan:
    """The plan of a training; all arms have the same micro-batches, half the batch at the start."""
    task, batch = TASKS[pair[0]], BATCHES[pair]
    asked = {"global_batch": (1 + (arm == "double")) * batch, "optimizer": pair[1], "seed": seed}
    epochs = max(task.epochs) - (arm == "short")
    made = planned(change_job(Job(), {**job_keys(task, known, epochs), **asked}), known)
    first, stages = made.stages[0], []
    for factor, some in groupby(factors_of(arm, room_of(pair), made.epochs, noise)):
        rate = first.learning_rate * sqrt(factor if arm.endswith("-root") else 1)
        row = {"epochs": len(list(some)), "learning_rate": rate, "micro_batch_size": batch // 2}
        stages.append(first.model_copy(update={**row, "local_batch_sizes": (factor * batch,)}))
    return made.model_copy(update={"stages": tuple(stages)})


class Lines(RunLines):
    """Lines with the batch of each epoch, and the noise scale after it."""

    def _store(self, one: Wanted, run: Run) -> None:
        summary = self._run(one) / "summary.json"
        rows = () if run.diverged else read_record(summary, RunSummary).epochs
        more = {
            "batches": [
                row.global_batch_size for row in one.plan.stages for _ in range(row.epochs)
            ],
            "noise": [row.noise_scale for row in rows],
        }
        super()._store(replace(one, facts={**one.facts, **more}), run)


def gather(look: Look, data: Path, lines: Path, folder: Path, until: float) -> None:
    """Make the missing runs, `base` before the arms that follow its noise."""

    @cache
    def images_of(name: str) -> Opened:
        return open_images(TASKS[name], data, folder, look=TASKS[name].look_images)

    def wanted(arm: str) -> Iterator[Wanted]:
        base = {tuple(one["pair"]): one for one in read_lines(lines) if one["arm"] == "base"}
        for seed, (name, optimizer) in product(look.seeds, look.pairs):
            noise = base.get((name, optimizer, seed), {}).get("noise", ())
            if arm == "base" or any(noise):
                made = plan_of((name, optimizer), arm, seed, images_of(name), noise)
                facts = {"arm": arm, "pair": (name, optimizer, seed)}
                yield Wanted(f"{name}-{optimizer}-{arm}", seed, made, facts=facts)

    for arm in look.arms:
        Lines(lines, folder).gather(wanted(arm), until)


def epoch_seconds(pair: Pair, data: Path, folder: Path) -> dict[int, float]:
    """Seconds of an epoch with each batch, as a plan predicts them."""
    known = open_images(TASKS[pair[0]], data, folder, look=TASKS[pair[0]].look_images)
    keys = job_keys(TASKS[pair[0]], known, 1)
    rows = bw.plan(bw.probe(**keys, optimizer=pair[1], probe={"learning": 0})).considered
    return {one.global_batch_size: one.epoch_seconds.value for one in rows}


def table(
    look: Look, lines: Sequence[Mapping[str, Any]], seconds: Mapping[Pair, Mapping[int, float]]
) -> None:
    """Print each arm against `base`, over the pairs of the same task, optimizer and seed.

    A batch that never grows is `base`, which is not trained again: no line of its own is needed.
    """
    kept = {(one["arm"], *one["pair"]): one for one in lines}
    bases = [one for (arm, *_, seed), one in kept.items() if arm == "base" and seed in look.seeds]
    for arm in look.arms[1:]:
        points, times = dict[str, list[float]](), list[float]()
        for base in bases:
            name, optimizer, seed = base["pair"]
            own = kept.get((arm, name, optimizer, seed))
            if own is None:
                pair, epochs = (name, optimizer), len(base["batches"])
                factors = factors_of(arm, room_of(pair), epochs, base["noise"])
                if arm == "short" or max(factors) > 1:
                    continue
                own = base
            cost = seconds[name, optimizer]
            points.setdefault(name, []).append(own["accuracy"] - base["accuracy"])
            ours, theirs = (sum(cost[size] for size in one["batches"]) for one in (own, base))
            times.append(ours / theirs)
        every = [one for some in points.values() for one in some]
        if len(every) > 1:
            gain, error = fmean(every), stdev(every) / sqrt(len(every))
            worst, time = min(map(fmean, points.values())), geometric_mean(times)
            pays = "pays" if gain >= -0.25 and time <= 0.95 and worst >= -1 else "does not pay"
            say(
                f"{arm}, {len(every)} pairs: {gain:+.2f} ({error:.2f}) points, "
                f"worst {worst:+.2f}, {time:.3f}: {pays}"
            )


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line, and gather or print."""
    parser = make_parser(__doc__)
    parser.add_argument("which", choices=("gather", "table"))
    parser.add_argument("--muon", action="store_true")
    add_gathering(parser, LINES)
    asked = parser.parse_args(words)
    look = MUON if asked.muon else FIRST
    with scratch() as folder:
        if asked.which == "gather":
            gather(look, asked.data, asked.lines, folder, asked.until)
        else:
            times = {pair: epoch_seconds(pair, asked.data, folder) for pair in look.pairs}
            table(look, read_lines(asked.lines), times)


if __name__ == "__main__":
    main()
