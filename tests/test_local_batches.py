"""Shares that follow real processes' speeds, and steps that are done again for want of memory."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright import Session
from batchwright.errors import DeadlineReached, TrainingError
from batchwright.records.lines import line_files
from batchwright.training import all_reduce_run
from paced import PacedClock
from test_session import FEATURES, Points, make_session, make_tiny_plan, summary_in

pytestmark = pytest.mark.slow
SAMPLES, BATCH = 210, 16  # 13 steps and a tail of 2
SLOW_SAMPLE = 0.005  # seconds that a slowed worker needs for a sample, others half


class Numbered(Points):
    """Each sample says its number too."""

    def __getitem__(self, index):
        return (*super().__getitem__(index), index)


def pace(rank, samples, epoch):
    """Seconds of a worker's step."""
    slow = rank == 1 and 1 <= epoch < 4
    return samples * SLOW_SAMPLE * (1 if slow else 0.5)


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(rank, batches, folder, *, paced=False, loaders=0, epochs=6, memory=10**9, **job):
    """Numbers seen in each epoch, and everything else that can be compared."""
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    plan = make_tiny_plan(batches, samples=SAMPLES, epochs=epochs, **job)
    plan = plan.model_copy(update={"method": plan.job.method})
    numbers, weights, updates = [], [], 0

    def loss(features, labels):
        if len(labels) > memory:
            raise torch.OutOfMemoryError("the test allows no more")
        return functional.cross_entropy(network(features.double()), labels)

    with pytest.MonkeyPatch.context() as patch:
        if paced:
            patch.setattr(all_reduce_run, "clock_for", lambda _: PacedClock())
        session = Session(
            network, optimizer, Numbered(SAMPLES), plan=plan, run_folder=folder, loaders=loaders
        )
    with session as one:
        for epoch in one.epochs():
            numbers.append([])
            for features, labels, indices in one.batches():
                if paced:
                    one._run._clock.sleep(pace(rank, len(labels), epoch))
                before = one._run.state.meter.repeated
                updates += one.step(lambda x=features, y=labels: loss(x, y))
                if one._run.state.meter.repeated == before:
                    numbers[-1] += indices.tolist()
            weights.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    return {"weights": weights, "numbers": numbers, "updates": updates}


def lines_of(folder, kind):
    return [line for line in line_files.lines_of(folder) if line.kind == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shares")


@pytest.fixture(scope="module")
def found(folder, crew):
    return crew.together(everything, folder, workers=2)


def everything(rank, folder):
    memory = 3 if rank else 99
    dynamic = {"method": "dynamic-batch", "rebalance_steps": 5}
    return {
        "even": train(rank, (8, 8), folder / "even"),
        "dynamic": train(rank, (8, 8), folder / "dynamic", paced=True, loaders=1, **dynamic),
        "memory": train(rank, (8, 8), folder / "memory", memory=memory, epochs=2),
        "fed ahead": train(rank, (8, 8), None, memory=memory, epochs=2, loaders=1),
        "deadline": stopped(rank, folder / "deadline"),
    }


# ------------------------------------------------------------------------------ shares that follow


def test_shares_follow_a_worker_that_becomes_slow_and_fast_again(found, folder):
    epochs = summary_in(folder / "dynamic").epochs
    last = [epoch.shares[-1].sizes for epoch in epochs]
    assert abs(last[0][0] - 8) <= 1
    assert last[3][0] in (10, 11, 12)  # 2 to 1 would be 10.7
    assert abs(last[5][0] - 8) <= 1
    changes = lines_of(folder / "dynamic", "shares")
    first, *changes = changes
    assert (first.step, first.workers[0].speed, first.sizes[0]) == (0, None, 8)
    assert len(changes) == sum(len(epoch.shares) - 1 for epoch in epochs) + sum(
        one.shares[-1].sizes != two.shares[0].sizes for one, two in pairwise(epochs)
    )
    assert all(sum(line.sizes) == BATCH for line in changes)
    # The interval of the first change was still even in part.
    speeds = [[w.speed for w in line.workers] for line in changes if line.epoch in (1, 2, 3)]
    slowed = [one / two for one, two in speeds]
    assert max(slowed) > 1.5


def test_changes_come_inside_epochs_too(found, folder):
    epochs = summary_in(folder / "dynamic").epochs
    assert [share for epoch in epochs for share in epoch.shares if share.step > 0]


def test_every_sample_is_trained_on_once_per_epoch_while_shares_change(found):
    for name in ("even", "dynamic", "memory", "fed ahead"):
        for epoch, numbers in enumerate(
            zip(*(each[name]["numbers"] for each in found), strict=True)
        ):
            counts = Counter(n for worker in numbers for n in worker)
            assert counts == Counter(range(SAMPLES)), (name, epoch)


def test_all_workers_have_the_same_weights_whatever_the_shares(found):
    for name in ("even", "dynamic", "memory", "fed ahead"):
        for one, other in zip(*(each[name]["weights"] for each in found), strict=True):
            assert torch.equal(one, other)


def test_the_shares_do_not_change_what_is_learnt(found):
    even, dynamic = (found[0][name]["weights"] for name in ("even", "dynamic"))
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(dynamic, even, strict=True))


def test_where_the_time_went_tells_waiting_from_exchanging(folder):
    slowed = summary_in(folder / "dynamic").epochs[1]
    fast, slow = slowed.workers
    assert fast.wait_seconds > slow.wait_seconds
    assert fast.place != slow.place
    parts = ("input_seconds", "compute_seconds", "wait_seconds", "communication_seconds")
    assert sum(getattr(fast, part) for part in parts) == pytest.approx(
        slowed.training_seconds, rel=1e-6
    )


# ---------------------------------------------------------------------------------- out of memory


def test_a_worker_without_memory_goes_on_in_micro_batches_and_the_batch_stays(found, folder):
    for name in ("memory", "fed ahead"):
        weights, even = (found[0][one]["weights"][1] for one in (name, "even"))
        assert torch.allclose(weights, even, rtol=1e-9)
        assert found[0][name]["updates"] == found[1][name]["updates"] == 2 * 14
    summary = summary_in(folder / "memory")
    assert [epoch.repeated_steps for epoch in summary.epochs] == [2, 0]  # 8, 4, then 2
    assert [epoch.samples for epoch in summary.epochs] == [SAMPLES] * 2
    texts = [line.text for line in lines_of(folder / "memory", "note")]
    assert ["at most 4" in texts[0], "at most 2" in texts[1]] == [True, True]
    assert "worker 1" in texts[0]


def test_one_sample_that_does_not_fit_ends_the_run_with_a_clear_line(tmp_path):
    with pytest.raises(TrainingError, match=r"not enough memory for 1 sample at once"):
        train(0, (BATCH,), tmp_path / "run", memory=0)


def test_memory_that_runs_out_in_the_loops_own_forward_pass_is_explained():
    def loop():
        with make_session() as one:
            for _ in one.epochs():
                for _ in one.batches():
                    raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop()
    assert "session.step(lambda:" in caught.value.__notes__[0]


# --------------------------------------------------------------------------------------- deadline


def stopped(rank, folder):
    """Stopped by its goal's deadline; then resumed with a later one."""
    goal = {"deadline": 0.5}
    error = None
    try:
        train(rank, (8, 8), folder, paced=True, epochs=50, goal=goal)
    except SystemExit as ended:
        error = ended.code
    return error


def test_the_deadline_ends_a_run_with_a_checkpoint(found, folder):
    assert [each["deadline"] for each in found] == [124, 124]
    assert (folder / "deadline" / "checkpoints" / "last.pt").exists()


def test_the_deadline_says_where_it_came_and_what_to_do():
    plan = make_tiny_plan(epochs=50, goal={"deadline": 0.1})

    def loop():
        with make_session(plan=plan, exit_on_stop=False) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                    time.sleep(0.02)

    with pytest.raises(DeadlineReached, match=r"deadline=0.1 s was reached at epoch \d+, step \d+"):
        loop()
