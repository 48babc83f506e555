"""What a plan comes to in a trainer with a loop of its own, and what does not go together."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from batchwright.errors import ArgumentError, DataError, PlanError
from batchwright.workflows.trainers.arrangement import arranged, scale_rates, shuffled
from samples import make_plan

SAMPLES = make_plan().data.train_samples
DATA = TensorDataset(torch.zeros(6, 1))


def planned(micro=48, **changes):
    plan = make_plan(**changes)
    (row,) = plan.stages
    return plan.model_copy(update={"stages": (row.model_copy(update={"micro_batch_size": micro}),)})


def settled(plan, shares=None, **how):
    theirs = {"workers": 2, "batch": 8, "passes": 1, "samples": SAMPLES}
    names = {"batch": "their_batch", "accumulation": "their_passes"}
    return arranged(plan, shares, trainer="theirs", words=names, **{**theirs, **how})


@pytest.mark.parametrize("left_out", ["rank", "workers", "least"])
def test_a_sampler_takes_a_workers_place_and_what_its_passes_need(left_out):
    """Without the latter, a pass could have one sample, which batch normalization cannot take."""
    given = {"rank": 1, "workers": 2, "least": 2}
    assert settled(None).sampler(SAMPLES, **given).rank == 1
    del given[left_out]
    with pytest.raises(TypeError, match=left_out):
        settled(None).sampler(SAMPLES, **given)


def test_a_plan_says_batch_accumulation_and_rate_and_without_one_they_stay():
    made = settled(planned(micro=20))
    assert (made.global_batch, made.passes, made.shares) == (96, 3, (48, 48))
    assert made.rate == pytest.approx(0.866)
    assert not made.follow  # the plan's method has equal shares
    assert settled(planned(micro=20), passes=3).passes == 3  # as the plan has it
    made = settled(None, passes=5)
    assert (made.global_batch, made.passes, made.shares, made.rate) == (80, 5, None, 1.0)
    assert made.follow
    assert settled(planned(), "follow").follow
    assert not settled(None, workers=1).follow
    assert settled(None, (3, 1)).shares == (3, 1)
    assert settled(planned(), "equal").shares is None


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        (planned(), {"workers": 3}, "for 2 workers and theirs has 3: start as many, or plan again"),
        (planned(), {"samples": 7}, f"for {SAMPLES:} training samples and the data set has 7"),
        (None, {"samples": 20, "passes": 3}, r"20: try their_batch=3 or less"),
        (None, {"samples": 5, "passes": 3}, r"5: try fewer workers or passes"),
        (None, {"samples": 5, "passes": 6, "workers": 1}, r"5: try fewer passes"),
        (planned(), {"passes": 2}, "their_passes=2 and the plan accumulates over 1: leave it out"),
    ],
)
def test_a_plan_for_something_else_is_refused_in_a_line(plan, how, words):
    with pytest.raises(PlanError) as told:
        settled(plan, **how)
    assert words in str(told.value)
    assert "\n" not in str(told.value)
    with pytest.raises(ArgumentError, match='shares=\'fair\': give "follow", "equal"'):
        settled(None, "fair")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class Own(SequentialSampler):
    """A sampler of somebody's own."""


class OwnBatches(BatchSampler):
    """Batches of somebody's own."""


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Stream(), 2), "Stream can only be iterated"),
        ([1, 2], "trains on list: each sample exactly once takes one torch.utils.data.DataLoader"),
        (DataLoader(DATA, None), "batch_size=None, so that its data set makes the batches"),
        (DataLoader(DATA, 2, sampler=Own(DATA)), "Own decides which samples come"),
        (DataLoader(DATA, batch_sampler=OwnBatches(Own(DATA), 2, False)), "OwnBatches decides"),
        (DataLoader(DATA, 2, sampler=RandomSampler(DATA, True)), "RandomSampler decides"),
        (DataLoader(DATA, 2, sampler=RandomSampler(DATA, num_samples=3)), "RandomSampler decides"),
    ],
    ids=["iterable", "several", "no batch size", "sampler", "batches", "replacement", "fewer"],
)
def test_data_whose_samples_would_not_count_once_are_refused_in_a_line(loader, words):
    with pytest.raises((PlanError, DataError)) as told:
        shuffled(loader, "theirs")
    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_loaders_that_shuffle_are_told_from_those_that_do_not():
    both = ConcatDataset([DATA, DATA])
    assert shuffled(DataLoader(both, 2, shuffle=True), "theirs")
    assert not shuffled(DataLoader(both, 2), "theirs")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "lines"), [(True, ["batchwright: error: no"]), (False, [])])
def test_a_refusal_ends_a_script_with_one_line_of_the_first_worker(first, lines):
    script = f"""
from batchwright.errors import PlanError
from batchwright.workflows.trainers.arrangement import refused_in_a_line
with refused_in_a_line(first={first}):
    raise PlanError("no")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (1, lines)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda one, _: LambdaLR(one, lambda step: (step + 1) / 4),
        lambda one, _: SequentialLR(
            one, [LinearLR(one, 0.1, total_iters=3), CosineAnnealingLR(one, 5)], [3]
        ),
        lambda one, _: SequentialLR(
            one, [LambdaLR(one, lambda step: step + 1), LambdaLR(one, lambda step: 1 - step)], [3]
        ),
        lambda one, _: ChainedScheduler([LambdaLR(one, lambda step: (step + 1) / 4)]),
        lambda one, rate: CyclicLR(one, rate / 10, rate, step_size_up=2, cycle_momentum=False),
        lambda one, rate: OneCycleLR(one, rate, total_steps=9),
    ],
)
def test_a_schedule_goes_on_at_the_plans_rate_whatever_it_is_made_of(schedule):
    def rates(first, factor):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=first)
        scheduler = schedule(optimizer, first)
        scale_rates([optimizer], [scheduler], factor)
        for _ in range(8):
            yield optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()

    assert list(rates(0.1, 4.0)) == pytest.approx(list(rates(0.4, 1.0)))


def test_a_rate_that_groups_share_as_one_tensor_is_multiplied_once():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(3)]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1))
    scale_rates([optimizer], [], 4.0)
    assert [float(one["lr"]) for one in optimizer.param_groups] == pytest.approx([0.4] * 3)
