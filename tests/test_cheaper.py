"""The experiment on what makes the same accuracy cheaper."""

from __future__ import annotations

import pytest
import torch
from benchmarks.planning.decisions_runs import TASKS
from benchmarks.tools import cheaper
from benchmarks.tools.cheaper import EPOCHS, PAIRS, Line, alternating, lines_of


def line(points, time: float, tasks=("a", "b", "c")) -> Line:
    return Line(tuple(points), tuple(tasks), (time,) * len(points))


@pytest.mark.parametrize(
    ("points", "time", "pays"),
    [
        ((-0.1, 0.0, 0.1), 0.94, True),
        ((-0.1, 0.0, 0.1), 0.96, False),  # too little time
        ((-0.6, -0.6, -0.6), 0.5, False),  # another accuracy
        ((0.7, 0.6, 0.8), 1.0, True),
        ((0.7, 0.6, 0.8), 1.1, False),  # for more time
        ((4.0, 0.0, -1.5), 1.0, False),  # less than its own error, and a task worse
        ((2.5, 2.5, -1.1), 0.5, False),  # a task worse
    ],
)
def test_an_arm_pays_by_the_rule_that_was_written_down(points, time, pays):
    assert line(points, time).pays == pays


def test_alternating_flips_show_each_image_both_ways_in_turn():
    indices = torch.arange(1000)
    first, second, third = (alternating(3, epoch, indices) for epoch in range(3))
    assert torch.equal(first.flip, ~second.flip)
    assert torch.equal(first.flip, third.flip)
    assert 400 < int(first.flip.sum()) < 600
    assert not torch.equal(first.vertical, second.vertical)


def test_arms_are_held_against_the_same_task_optimizer_and_seed():
    steps = [
        {"task": name, "optimizer": optimizer, "side": side, "batch": batch, "step_seconds": 1.0}
        for name, optimizer in PAIRS
        for side in (TASKS[name].side, round(0.75 * TASKS[name].side))
        for batch in (cheaper.BATCHES[optimizer], 2 * cheaper.BATCHES[optimizer])
    ]
    runs = [
        {"arm": arm, "task": name, "optimizer": optimizer, "seed": seed, "epochs": EPOCHS[name]}
        | {"accuracy": 50.0 + seed + (arm == "double"), "processor_seconds": [1.0]}
        | {"averaged": [50.0, 51.0, 52.0], "averaging_seconds": 0.1}
        for arm in ("base", "double")
        for seed in cheaper.SEEDS
        for name, optimizer in PAIRS
    ]
    found = lines_of(runs, steps)
    assert found["double"].points == (1.0,) * 10
    assert found["double"].time == pytest.approx(0.5)  # half the steps, each as long here
    assert found["averaged-10"].gain == pytest.approx(52 - 61.5)
    assert found["averaged-2"].time == pytest.approx(1.1)
