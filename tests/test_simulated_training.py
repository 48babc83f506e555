"""All workers in one process, in simulated time."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from batchwright import Session
from batchwright.algorithms.learning_rate import rate_factor
from batchwright.distributed.server_child import SERVER, SERVER_KEY
from batchwright.errors import (
    DeadlineReached,
    FileError,
    Interrupted,
    JobError,
    PlanError,
    TrainingError,
)
from batchwright.records import AgsRule, RunSummary
from batchwright.records.run import stalled_epoch
from batchwright.training import loop
from batchwright.training.batches.epoch_steps import EpochSteps
from batchwright.training.batches.randomness import seed_worker
from batchwright.training.batches.sampler import epoch_order, step_sizes
from batchwright.training.checkpoints import checkpoint_writer
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.loop import accuracy_and_loss
from batchwright.training.parameter_server.merging import pack, unpack, weighted_mean
from batchwright.training.simulated.simulated_rounds import SimulatedRounds
from batchwright.training.simulated.simulated_training import train_task, train_virtually
from batchwright.workload import loss_scaling
from batchwright.workload.data.sources import open_data
from batchwright.workload.task import build_optimizer
from hosting import KEY, hosted
from simulated_tasks import CPU, RULE, SAMPLES, make_task, make_virtual_plan

pytestmark = pytest.mark.usefixtures("one_thread")


def train(plan, folder, *, resume=False):
    """The summary of a virtual run, and its weights."""
    task = make_task(dropout=plan.stages[0].dropout)
    train_task(plan, task, CPU, folder, resume=resume)
    return result_in(folder)


def train_by_loop(plan, folder, *, resume):
    """By the loop of worker processes, as their only one."""
    loop.train(plan, run_folder=folder, resume=resume)


def result_in(folder):
    summary = RunSummary.model_validate_json((folder / "summary.json").read_text())
    return summary, load_checkpoint(folder / "checkpoints" / "last.pt")["model"]


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def told(summary):
    """All of a summary that does not depend on how fast this process is."""
    real = {"evaluation_seconds": 0.0, "checkpoint_seconds": 0.0, "whole": True}
    epochs = [record.model_copy(update=real) for record in summary.epochs]
    return epochs, summary.rounds


SERVERS = {
    "asp": {"consistency": "asp"},
    "bsp": {"consistency": "bsp"},
    "ssp": {"consistency": "ssp", "rule": {"staleness": 1}},
}
SCALED = AgsRule(mode="norm", base_batch=2, least=1.0, most=None, lookback=20)
UNEVEN = {"shares": (40, 30, 20), "factors": (1.0, 0.75, 0.5)}


def growing(plan, larger):
    """The plan with a row for larger local batches, in reach as soon as there is more noise."""
    row = plan.stages[0].model_copy(update={"local_batch_sizes": larger, "learning_rate": 0.11})
    return plan.model_copy(update={"growth": (row,)})


def plan_of(kind, **changes):
    """A plan of three workers, the last one at half the speed; its gradients may be scaled."""
    if kind.endswith("scaled"):
        plan = plan_of(kind.removesuffix(" scaled"), micro=3, **changes)
        return plan.model_copy(update={"ags": SCALED})
    virtual = {"speeds": (1.0, 1.0, 0.5)}
    if kind == "growing":
        return growing(plan_of("plain", **{"epochs": 4} | changes), (10, 10, 10))
    if kind == "published":
        return plan_of("dynamic-batch", rebalance="published", **changes)
    if kind in SERVERS:
        return make_virtual_plan((8, 8, 4), virtual=virtual, **SERVERS[kind], **UNEVEN, **changes)
    return make_virtual_plan((8, 8, 8), method=kind, virtual=virtual, rebalance_steps=2, **changes)


KINDS = (
    *("plain", "growing", "dynamic-batch", "asp", "bsp", "ssp"),
    *("dynamic-batch scaled", "asp scaled"),
)
RARER = (
    *("growing", "ssp", "bsp", "dynamic-batch scaled", "plain scaled", "asp scaled"),
    "published",
)


def quick_but(kinds, rarer=RARER):
    """The kinds for a parameter: those in ``rarer`` are trained by slow tests alone."""
    marks = pytest.mark.slow
    return [pytest.param(kind, marks=marks) if kind in rarer else kind for kind in kinds]


# -------------------------------------------------------------------------- as real workers would


def train_for_real(rank, plan, folder):
    """One of the workers of a plan in a process of its own; the model as it is kept."""
    task = make_task(dropout=plan.stages[0].dropout)
    seed_worker(plan.job.seed, 0, rank)  # as `training.loop` does
    with Session(
        task.network, task.optimizer, task.training, plan=plan, run_folder=folder
    ) as session:
        for _ in session.epochs():
            for images, labels in session.batches():
                session.step(partial(task.mean_loss, images, labels))
            if session.evaluation_due:
                session.evaluate(task.held_out, accuracy_and_loss)


def train_served(rank, plan, address):
    """The same with a parameter server, which keeps the records."""
    own = {"RANK": str(rank), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(plan.workers)}
    before = dict(os.environ)
    os.environ.update({SERVER: address, SERVER_KEY: KEY.hex(), **own})
    try:
        train_for_real(rank, plan, None)
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, True])
def test_two_workers_that_sum_their_gradients_learn_what_two_processes_do_bit_for_bit(
    tmp_path, crew, one_thread, grows
):
    plan = make_virtual_plan((10, 6), micro=4, clip_norm=0.5, epochs=4)
    plan = growing(plan, (12, 8)) if grows else plan.model_copy(update={"ags": SCALED})
    crew.together(train_for_real, plan, tmp_path / "real", workers=2)
    real, kept = result_in(tmp_path / "real")
    summary, weights = train(plan, tmp_path / "virtual")
    assert same(weights, kept)
    for one, two in zip(summary.epochs, real.epochs, strict=True):
        assert one.train_loss == pytest.approx(two.train_loss, rel=1e-6)  # summed in float32 there
        assert one.noise_scale == pytest.approx(two.noise_scale, rel=1e-6)
        assert one.global_batch_size == two.global_batch_size
        assert one.gradient_factors == two.gradient_factors
        assert (one.val_correct, one.learning_rate) == (two.val_correct, two.learning_rate)
    assert len({one.global_batch_size for one in summary.epochs}) == 1 + grows


@pytest.mark.slow
def test_two_workers_under_bsp_learn_what_two_processes_and_a_server_do_bit_for_bit(
    tmp_path, crew, one_thread
):
    plan = make_virtual_plan(
        (10, 6),
        consistency="bsp",
        shares=(50, 40),
        factors=(1.0, 0.8),
        micro=4,
        dual={"shares": "planned"},
    ).model_copy(update={"ags": SCALED})
    with hosted(plan, tmp_path / "real") as address:
        crew.together(train_served, plan, address, workers=2)
    real, kept = result_in(tmp_path / "real")
    summary, weights = train(plan, tmp_path / "virtual")
    assert same(weights, kept)
    assert [r.val_correct for r in summary.epochs] == [r.val_correct for r in real.epochs]
    for one in summary.rounds:
        two = next(r for r in real.rounds if r.number == one.number)
        assert (one.worker, one.samples, one.steps) == (two.worker, two.samples, two.steps)
        assert one.loss == pytest.approx(two.loss, rel=1e-6)
        assert one.update_factor == two.update_factor


@pytest.mark.parametrize("consistency", [pytest.param("bsp", marks=pytest.mark.slow), None])
def test_one_worker_learns_what_a_plain_loop_does_bit_for_bit(tmp_path, consistency, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")  # one thread
    alone = make_virtual_plan((8,))
    train_for_real(0, alone.model_copy(update={"server": None}), tmp_path / "real")
    kept = load_checkpoint(tmp_path / "real" / "checkpoints" / "last.pt")["model"]
    summary, weights = train(make_virtual_plan((8,), consistency=consistency), tmp_path / "virtual")
    assert same(weights, kept)
    assert [record.samples for record in summary.epochs] == [SAMPLES] * 3


def test_shares_as_published_end_rounds_together_after_one_with_batches_in_proportion(tmp_path):
    plan = make_virtual_plan(
        (8, 8),
        consistency="bsp",
        shares=(45, 45),
        dual={"shares": "published"},
        server={"consistency": "bsp"},
        virtual={"speeds": (1.0, 0.5), "sample_seconds": 0.01, "step_seconds": 0.0},
    )
    summary, _ = train(plan, tmp_path / "virtual")
    told = [(one.samples, one.local_batch_size) for one in summary.rounds]
    assert sorted(told[:2]) == [(45, 8), (45, 8)]
    assert sorted(told[2:4]) == [(30, 5), (60, 11)]
    times = [one.compute_seconds for one in summary.rounds]
    assert times[2] == pytest.approx(times[3])
    assert max(times[:2]) == pytest.approx(2 * min(times[:2]))


def test_bsp_is_the_weighted_mean_of_what_each_worker_makes_of_its_samples(tmp_path):
    factors = (1.0, 0.5)
    plan = make_virtual_plan(
        (8, 4),
        consistency="bsp",
        shares=(60, 30),
        factors=factors,
        dropout=0.0,
        dual={"shares": "planned"},
    )
    _, weights = train(plan, tmp_path / "virtual")
    task = make_task(dropout=0.0)
    merged = pack(task.network)
    optimizers = [task.optimizer, build_optimizer(task.network, plan.job, RULE.base)]
    for epoch in range(3):
        order, pushed = epoch_order(SAMPLES, epoch, 0), []
        for rank, (first, last, batch) in enumerate([(0, 60, 8), (60, 90, 4)]):
            unpack(merged, task.network)
            done = 0
            for size in step_sizes(last - first, batch, workers=1, least=2):
                part = order[first + done : first + done + size]
                images, labels = task.training.training_batch(part, epoch=epoch, resolution=8)
                seen = epoch * SAMPLES + done * SAMPLES / (last - first)
                factor = rate_factor(seen, rule=RULE, samples_per_epoch=SAMPLES, epochs=3)
                for group in optimizers[rank].param_groups:
                    group["lr"] = 0.1 * factor
                optimizers[rank].zero_grad()
                task.mean_loss(images, labels).backward()
                optimizers[rank].step()
                done += size
            pushed.append((pack(task.network), factors[rank]))
        merged = weighted_mean(pushed)
    unpack(merged, task.network)
    for key, value in task.network.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", [pytest.param("keep", marks=pytest.mark.slow), "reset"])
def test_momentum_is_each_workers_own_and_kept_or_reset_after_an_exchange(tmp_path, momentum):
    plan = make_virtual_plan((8, 8), consistency="asp", rule={"momentum": momentum})
    found = train(plan, tmp_path / momentum)[1]
    other = make_virtual_plan((8, 8), consistency="asp")
    assert same(found, train(other, tmp_path / "other")[1]) == (momentum == "keep")


def test_updates_that_are_skipped_are_on_record_with_their_round(tmp_path):
    plan, task = make_virtual_plan((8, 8), consistency="bsp", epochs=2), make_task()
    calls = iter(range(1000))

    def loss(outputs, labels):
        value = functional.cross_entropy(outputs, labels)
        return value * (float("nan") if next(calls) == 2 else 1)

    train_task(plan, replace(task, loss=loss), CPU, tmp_path / "run", resume=False)
    summary, _ = result_in(tmp_path / "run")
    skipped = [(one.worker, one.skipped_steps) for one in summary.rounds[:3]]
    assert skipped == [(0, 1), (1, 0), (0, 0)]
    assert [epoch.skipped_steps for epoch in summary.epochs] == [1, 0]


@pytest.mark.parametrize("consistency", [None, "bsp"])
def test_a_batch_that_is_no_number_leaves_no_trace_in_the_weights(tmp_path, consistency):
    plan, task = make_virtual_plan((8, 8), consistency=consistency, epochs=1), make_task()
    calls = iter(range(1000))

    def spoil(network, args):
        return args[0] * float("nan") if network.training and next(calls) == 2 else None

    task.network.register_forward_pre_hook(spoil)
    train_task(plan, task, CPU, tmp_path / "run", resume=False)
    summary, weights = result_in(tmp_path / "run")
    assert [epoch.skipped_steps for epoch in summary.epochs] == [1]
    assert all(bool(value.isfinite().all()) for value in weights.values())


@pytest.mark.parametrize("consistency", [None, "bsp"])
def test_where_memory_runs_out_the_step_is_done_again_in_smaller_micro_batches(
    tmp_path, consistency
):
    plan, task = make_virtual_plan((8, 8), consistency=consistency, epochs=1), make_task()
    seen = []

    def loss(outputs, labels):
        seen.append(len(labels))
        if len(labels) > 4:
            raise torch.OutOfMemoryError("the test allows no more")
        return functional.cross_entropy(outputs, labels)

    train_task(plan, replace(task, loss=loss), CPU, tmp_path / "run", resume=False)
    summary, _ = result_in(tmp_path / "run")
    assert summary.epochs[0].repeated_steps == (1 if consistency is None else 2)  # by each worker
    assert summary.epochs[0].samples == SAMPLES
    assert sum(size for size in seen if size <= 4) == SAMPLES


def test_where_not_even_the_smallest_micro_batch_fits_it_says_so(tmp_path):
    def loss(outputs, labels):
        raise torch.OutOfMemoryError("the test allows none")

    task = replace(make_task(), loss=loss)
    with pytest.raises(TrainingError, match=r"virtual/0 has not enough memory for 2 samples"):
        train_task(make_virtual_plan((8, 8), consistency="bsp"), task, CPU, tmp_path, resume=False)


# ------------------------------------------------------------------------------- data of one's own


@pytest.mark.parametrize(
    "take", [train_virtually, pytest.param(train_by_loop, marks=pytest.mark.slow)]
)
def test_a_users_images_are_trained_and_scored_at_the_plans_resolutions(
    tmp_path, monkeypatch, take
):
    seen = set()

    class Network(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.last = nn.Linear(3, num_classes)

        def forward(self, images):
            seen.add((self.training, tuple(images.shape[2:])))
            return self.last(images.mean(dim=(2, 3)))

    own = ModuleType("own_images")
    images = TensorDataset(torch.rand(SAMPLES, 3, 16, 24), torch.arange(SAMPLES) % 3)
    own.load, own.Network = lambda: (images, images, ["a", "b", "c"]), Network
    monkeypatch.setitem(sys.modules, "own_images", own)
    names = {"data": "own_images:load", "network": "own_images:Network"}
    plan = make_virtual_plan((8,), epochs=1, dropout=0.0, **names)
    stages = [plan.stages[0].model_copy(update={"resolution": side}) for side in (4, 8)]
    data = open_data(plan.job).facts
    plan = plan.model_copy(update={"stages": tuple(stages), "data": data})
    take(plan, tmp_path / "run", resume=False)
    assert seen == {(True, (4, 6)), (True, (8, 12)), (False, (8, 12))}


# ------------------------------------------------------------------------------ always the same


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """What comes of a run of some kind that nothing stops; each is trained once."""
    return functools.cache(lambda kind: train(plan_of(kind), tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("kind", quick_but(KINDS))
def test_the_same_job_gives_the_same_weights_and_records(tmp_path, kind, whole_run):
    (one, first), (two, second) = whole_run(kind), train(plan_of(kind), tmp_path / "run")
    assert same(first, second)
    assert told(one) == told(two)
    assert one.simulated


@pytest.mark.parametrize("kind", quick_but([*KINDS, "plain scaled", "published"]))
@pytest.mark.parametrize("part", [0.3, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path, kind, part, whole_run):
    whole, weights = whole_run(kind)
    deadline = part * sum(record.training_seconds for record in whole.epochs)
    early = plan_of(kind, goal={"deadline": deadline})
    with pytest.raises(DeadlineReached, match=r"goal\.deadline=.* reached at epoch"):
        train(early, tmp_path / "pieces")
    pieces, again = train(plan_of(kind), tmp_path / "pieces", resume=True)
    assert same(weights, again)
    assert told(whole)[0] == told(pieces)[0]
    assert whole.rounds == pieces.rounds
    assert pieces.resumed == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.3, pytest.param(0.5, marks=pytest.mark.slow)])
def test_shares_that_are_to_change_do_so_at_their_step_after_a_stop(tmp_path, monkeypatch, part):
    """Loader processes fetch batches ahead, so that new shares hold from a later step on."""
    asked = EpochSteps.ahead

    def fetched_ahead(steps):
        left, ready = asked(steps), deque()
        for batch in left:
            ready.append(batch)
            if len(ready) > 6:  # of three workers: those of two steps more
                yield ready.popleft()
        yield from ready

    def plan(**job):
        own = {"method": "dynamic-batch", "rebalance_steps": 2, "virtual": {"speeds": (1, 1, 0.5)}}
        return make_virtual_plan((4, 4, 4), **own, **job)

    monkeypatch.setattr(EpochSteps, "ahead", fetched_ahead)
    whole, weights = train(plan(), tmp_path / "whole")
    deadline = part * whole.epochs[0].training_seconds
    with pytest.raises(DeadlineReached):
        train(plan(goal={"deadline": deadline}), tmp_path / "pieces")
    pieces, again = train(plan(), tmp_path / "pieces", resume=True)
    assert told(pieces) == told(whole)
    assert same(weights, again)


@pytest.mark.slow
def test_the_scale_of_each_workers_losses_goes_on_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scaling, "FIRST", 2.0**24)  # steps are left out until it is lower

    def half(**job):
        return plan_of("asp", **job).model_copy(update={"precision": "float16"})

    whole, weights = train(half(), tmp_path / "whole")
    deadline = 0.7 * sum(record.training_seconds for record in whole.epochs)
    with pytest.raises(DeadlineReached):
        train(half(goal={"deadline": deadline}), tmp_path / "pieces")
    kept = load_checkpoint(tmp_path / "pieces" / "checkpoints" / "last.pt")["kept"]["virtual"]
    assert all(one["loss_scale"]["scale"] < 2.0**24 for one in kept["learnt"])
    _, again = train(half(), tmp_path / "pieces", resume=True)
    assert same(weights, again)


@pytest.mark.parametrize("kind", quick_but(["plain", "plain scaled"]))
def test_a_run_that_is_killed_within_an_epoch_goes_on_from_its_last_step(kind, tmp_path, whole_run):
    plan, task, calls = plan_of(kind, checkpoint_steps=5), make_task(), []
    parts = 3 if "scaled" in kind else 1  # micro-batches of each of the three workers

    def killing(*args):
        calls.append(args)
        if len(calls) > 5 * 3 * parts:  # in the sixth step, the second of the second epoch
            raise KeyboardInterrupt
        return functional.cross_entropy(*args)

    with pytest.raises(KeyboardInterrupt):
        train_task(plan, replace(task, loss=killing), CPU, tmp_path / "run", resume=False)
    kept = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["state"]
    assert (kept["epoch"], kept["step"]) == (1, 1)
    summary, weights = train(plan_of(kind), tmp_path / "run", resume=True)
    assert same(weights, whole_run(kind)[1])
    assert told(summary) == told(whole_run(kind)[0])


@pytest.mark.parametrize(
    "kind", quick_but(["plain", "dynamic-batch", "asp"], ["dynamic-batch", "plain"])
)
def test_a_run_that_is_killed_behind_its_best_goes_on_from_there(
    kind, tmp_path, whole_run, monkeypatch
):
    save = checkpoint_writer.save_checkpoint

    def killed(path, content, **options):
        if path.stem == "last" and content["state"]["epoch"] == 2:
            raise FileError("killed")
        save(path, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "save_checkpoint", killed)
        # Due once the disk is done: a newer one would replace those that still wait.
        patch.setattr(checkpoint_writer.Writer, "due", lambda writer, _: writer.wait())
        patch.setattr(RunState, "note_score", lambda *_: True)
        with pytest.raises(FileError, match="killed"):
            train(plan_of(kind), tmp_path / "run")
    best, last = (
        load_checkpoint(tmp_path / "run" / "checkpoints" / f"{name}.pt")["state"]
        for name in ("best", "last")
    )
    assert best["epoch"] == 2 > last["epoch"]
    summary, weights = train(plan_of(kind), tmp_path / "run", resume=True)
    assert summary.resumed == 1
    assert same(weights, whole_run(kind)[1])
    assert told(summary)[0] == told(whole_run(kind)[0])[0]


def test_shares_go_on_following_after_a_stop(tmp_path):
    with pytest.raises(DeadlineReached):
        train(plan_of("dynamic-batch", goal={"deadline": 1.5}), tmp_path / "run")
    summary, _ = train(plan_of("dynamic-batch"), tmp_path / "run", resume=True)
    assert [record.samples for record in summary.epochs] == [SAMPLES] * 3
    sizes = [worker.local_batch_size for worker in summary.epochs[-1].workers]
    assert sum(sizes) == 24
    assert sizes[2] < sizes[0]


@pytest.mark.parametrize("kind", quick_but(["plain", "asp"], ["asp"]))
def test_a_stop_signal_leaves_a_checkpoint(tmp_path, kind, monkeypatch, whole_run):
    plan, calls = plan_of(kind), []

    def pulled(*args):
        calls.append(args)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*args)

    task = make_task()
    loss = task.loss
    monkeypatch.setattr("simulated_tasks.functional.cross_entropy", pulled)
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM at epoch 1"):
        train(plan, tmp_path / "run")
    monkeypatch.undo()
    _, weights = train(plan, tmp_path / "run", resume=True)
    assert same(weights, whole_run(kind)[1])


# ------------------------------------------------------------------------------------------- time


def test_a_step_takes_as_long_as_its_slowest_worker_and_the_exchange(tmp_path):
    link = {"latency": 0.01, "bandwidth": 1e5}
    summary, _ = train(plan_of("plain", link=link), tmp_path / "run")
    epoch = summary.epochs[0]
    # 90 samples are three steps of 24 and a tail of 18; the third worker takes twice as long
    compute = 3 * (0.01 * 8 + 0.05) + (0.01 * 6 + 0.05)
    size = sum(4 * p.numel() for p in make_task().network.parameters())
    exchange = 4 * 2 * 2 * (0.01 + size / 3 / 1e5)
    assert epoch.training_seconds == pytest.approx(2 * compute + exchange)
    fast, slow = epoch.workers[0], epoch.workers[2]
    assert fast.compute_seconds == pytest.approx(compute)
    assert fast.wait_seconds == pytest.approx(compute)
    assert slow.compute_seconds == pytest.approx(2 * compute)
    assert slow.wait_seconds == 0
    assert slow.communication_seconds == pytest.approx(exchange)
    assert [worker.samples for worker in epoch.workers] == [30, 30, 30]


def test_shares_follow_the_simulated_speeds_and_a_disturbance(tmp_path):
    disturbance = {"worker": 0, "start": 2.0, "slowdown": 3.0}
    plan = make_virtual_plan(
        (12, 12),
        method="dynamic-batch",
        epochs=12,
        rebalance_steps=5,
        virtual={"speeds": (1.0, 0.5), "step_seconds": 0.0, "disturbances": [disturbance]},
    )
    summary, _ = train(plan, tmp_path / "run")
    sizes = [record.workers[0].local_batch_size for record in summary.epochs]
    assert max(sizes) == 16  # twice as fast
    assert sizes[-1] == 10  # then a third of that: 2/3 against 1
    assert all(sum(s.sizes) == 24 for record in summary.epochs for s in record.shares)


@pytest.mark.slow
def test_published_shares_follow_the_last_epoch_alone_once_an_epoch(tmp_path):
    disturbance = {"worker": 0, "start": 2.0, "slowdown": 4.0}
    plan = make_virtual_plan(
        (12, 12),
        method="dynamic-batch",
        epochs=6,
        rebalance="published",
        virtual={"speeds": (1.0, 0.5), "step_seconds": 0.0, "disturbances": [disturbance]},
    )
    summary, _ = train(plan, tmp_path / "run")
    assert all(len(record.shares) == 1 for record in summary.epochs)
    sizes = [record.shares[0].sizes for record in summary.epochs]
    assert sizes[:2] == [(12, 12), (16, 8)]  # equal at first, then as the times of that epoch
    assert sizes[-1] == (8, 16)  # a quarter of twice the speed


def test_overheads_lengthen_the_steps_of_their_workers_alone(tmp_path):
    plan = make_virtual_plan(
        (10, 10),
        consistency="asp",
        shares=(30, 60),
        virtual={"sample_seconds": 0.1, "step_seconds": 0.5, "overheads": (1.0, 0.2)},
        link={"latency": 0.0, "bandwidth": 1e12},
        dual={"shares": "planned"},
        epochs=2,
    )
    summary, _ = train(plan, tmp_path / "run")
    first = {r.worker: round(r.compute_seconds, 3) for r in reversed(summary.rounds)}
    assert first == {0: 4.5, 1: 6.6}  # 3 steps of 1.5 s, 6 of 1.1 s
    reduced = make_virtual_plan(
        (10, 10),
        method="plain",
        virtual={"sample_seconds": 0.1, "step_seconds": 0.5, "overheads": (1.0, 3.0)},
        link={"latency": 0.0, "bandwidth": 1e12},
        epochs=1,
    )
    summary, _ = train(reduced, tmp_path / "reduced")
    record = summary.epochs[0]
    usual, slower = (worker.compute_seconds for worker in record.workers)
    assert slower - usual == pytest.approx(2 * 0.5 * record.steps)


def test_under_asp_workers_push_and_pull_in_their_own_time(tmp_path):
    # No time but computing: rounds of 3 s and, at 0.6 of the speed, 10 s.
    plan = make_virtual_plan(
        (10, 10),
        consistency="asp",
        shares=(30, 60),
        virtual={"sample_seconds": 0.1, "step_seconds": 0.0, "speeds": (1.0, 0.6)},
        link={"latency": 0.0, "bandwidth": 1e12},
        dual={"shares": "planned"},
        epochs=2,
    )
    summary, _ = train(plan, tmp_path / "run")
    ended = [(r.worker, r.samples, round(r.start, 3), round(r.compute_seconds, 3), r.lead)
             for r in summary.rounds]  # fmt: skip
    assert ended == [
        (0, 30, 0.0, 3.0, 0),
        (0, 30, 3.0, 3.0, 1),
        (0, 30, 6.0, 3.0, 2),
        (1, 60, 0.0, 10.0, 0),
        (0, 30, 9.0, 3.0, 3),
    ]
    assert summary.epochs[0].samples + summary.epochs[1].samples == 2 * SAMPLES


def test_under_bsp_all_wait_for_the_slowest(tmp_path):
    summary, _ = train(plan_of("bsp", dual={"shares": "planned"}), tmp_path / "run")
    starts = {}
    for record in summary.rounds:
        starts.setdefault(record.epoch, []).append(record.start)
    ends = [r.start + r.compute_seconds for r in summary.rounds]
    for before, after in pairwise(range(3)):
        assert min(starts[after]) > max(
            end for end, r in zip(ends, summary.rounds, strict=True) if r.epoch == before
        )
    assert {record.lead for record in summary.rounds} == {0}
    assert summary.epochs[0].workers[0].wait_seconds > 0
    longest = max(r.compute_seconds for r in summary.rounds if r.epoch == 0)
    assert summary.epochs[0].training_seconds == pytest.approx(longest, rel=0.02)


def test_under_ssp_none_is_further_ahead_than_it_may_be(tmp_path):
    slow = {"speeds": (1.0, 1.0, 0.2), "sample_seconds": 0.01, "step_seconds": 0.05}
    plan = make_virtual_plan(
        (8, 8, 4), **SERVERS["ssp"], **UNEVEN, virtual=slow, epochs=6, dual={"shares": "planned"}
    )
    summary, _ = train(plan, tmp_path / "run")
    assert max(record.lead for record in summary.rounds) == 1
    assert sum(record.wait_seconds for record in summary.rounds) > 0


def test_shares_per_round_follow_the_simulated_speeds_at_epochs_ends(tmp_path):
    summary, _ = train(plan_of("bsp", epochs=4), tmp_path / "run")
    last = summary.rounds[-3:]
    times = [record.compute_seconds for record in last]
    assert max(times) - min(times) < 0.15 * max(times)  # a step is a tenth of a round here
    assert sum(record.samples for record in last) == SAMPLES
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any("samples per round, by measured speed" in line for line in lines)


def test_a_slow_link_slows_its_own_worker_alone(tmp_path):
    found = {}
    for name, links in (("even", ()), ("slow", (1.0, 1.0, 0.001))):
        plan = make_virtual_plan(
            (8, 8, 4),
            **SERVERS["asp"],
            **UNEVEN,
            virtual={"links": links},
            link={"latency": 0.0, "bandwidth": 1e6},
        )
        found[name] = train(plan, tmp_path / name)[0].rounds
    first = {name: {r.worker: r for r in reversed(rounds)} for name, rounds in found.items()}
    for worker in (0, 1):
        assert first["slow"][worker] == first["even"][worker]
    assert first["slow"][2].exchange_seconds > 100 * first["even"][2].exchange_seconds


# ---------------------------------------------------------------------------------------- records


def test_every_epoch_is_scored_and_every_sample_of_it_trained_on(tmp_path):
    summary, _ = train(plan_of("asp"), tmp_path / "run")
    assert [record.epoch for record in summary.epochs] == [0, 1, 2]
    assert all(record.val_count == 40 for record in summary.epochs)
    assert sum(record.samples for record in summary.rounds) == 3 * SAMPLES
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds.count("epoch") == 3
    assert kinds.count("round") == len(summary.rounds)
    assert "a virtual cluster of 3 workers" in lines[0]["text"]


@pytest.mark.slow
def test_every_epoch_is_scored_in_a_run_that_goes_on_after_it_was_killed(tmp_path, monkeypatch):
    begin = SimulatedRounds._train

    def killed(rounds, worker, ticket, start):
        if rounds.state.epoch == 2:
            raise KeyboardInterrupt  # no checkpoint is written on the way
        return begin(rounds, worker, ticket, start)

    monkeypatch.setattr(SimulatedRounds, "_train", killed)
    with pytest.raises(KeyboardInterrupt):
        train(plan_of("asp", checkpoint_steps=1), tmp_path / "run")
    monkeypatch.undo()
    summary, _ = train(plan_of("asp"), tmp_path / "run", resume=True)
    assert [record.val_count for record in summary.epochs] == [40] * 3


@pytest.mark.parametrize("consistency", [None, "asp"])
def test_a_run_whose_last_checkpoint_is_not_written_is_not_finished(
    tmp_path, consistency, monkeypatch
):
    save = checkpoint_writer.save_checkpoint

    def only_the_best(path, content, **options):
        if path.stem == "last":
            raise FileError("the test's disk is full")
        save(path, content, **options)

    served = {"consistency": consistency, "shares": (50, 40)} if consistency else {}
    plan = make_virtual_plan((10, 8), epochs=2, **served)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "save_checkpoint", only_the_best)
        with pytest.raises(FileError, match="the test's disk is full"):
            train(plan, tmp_path)
    assert not (tmp_path / "summary.json").exists()
    assert len(train(plan, tmp_path, resume=True)[0].epochs) == 2


def test_no_run_folder_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_task(plan_of("asp", epochs=1), make_task(), CPU, None)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- bad input


def test_normalization_over_processes_is_refused():
    plan = make_virtual_plan(batch_norm="synchronized")
    with pytest.raises(PlanError, match="batch_norm=synchronized computes over the workers'"):
        train_virtually(plan, None)


def test_speeds_of_other_workers_are_refused(tmp_path):
    plan = make_virtual_plan((8, 8))
    one = plan.job.virtual.model_copy(update={"speeds": (1.0,)})
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"virtual": one})})
    with pytest.raises(JobError, match=r"virtual\.speeds=1: 1 values for workers=2"):
        train(plan, tmp_path / "run")


def test_a_plan_without_times_is_refused(tmp_path):
    plan = make_virtual_plan((8, 8), virtual={"sample_seconds": None})
    with pytest.raises(PlanError, match=r"state virtual\.sample_seconds=\.\.\."):
        train(plan, tmp_path / "run")


@pytest.mark.parametrize(
    "kind", quick_but(["plain", "dynamic-batch", "asp", "bsp"], ["plain", "dynamic-batch", "bsp"])
)
def test_training_ends_where_the_target_is_reached_and_stays_ended(kind, tmp_path):
    plan = plan_of(kind, epochs=4, evaluate_epochs=2, goal={"accuracy": 0.01})
    summary, weights = train(plan, tmp_path)
    assert len(summary.epochs) in ((2,) if kind in ("plain", "dynamic-batch") else (2, 3))
    assert "goal.accuracy=0.01 is reached" in (tmp_path / "metrics.jsonl").read_text()
    stays_ended(plan, tmp_path, summary, weights)


@pytest.mark.parametrize(
    ("kind", "steps"), [("bsp", 4), pytest.param("ssp", 1, marks=pytest.mark.slow)]
)
def test_rounds_that_are_under_way_when_the_target_is_reached_count(kind, steps, tmp_path):
    """Others are told then that nothing is left, and nobody waits for them."""
    plan = plan_of(kind, epochs=4, goal={"accuracy": 0.01})
    rule = plan.server.model_copy(update={"exchange_steps": steps})
    summary, _ = train(plan.model_copy(update={"server": rule}), tmp_path)
    kept = load_checkpoint(tmp_path / "checkpoints" / "last.pt")["kept"]["virtual"]["server"]
    committed = kept["rounds"]["committed"]
    assert (sum(record.samples for record in summary.rounds), kept["waiting"]) == (committed, {})
    assert [epoch.top1 is not None for epoch in summary.epochs] == [True] * (committed // SAMPLES)


@pytest.mark.slow
def test_a_deadline_is_not_missed_where_the_target_was_reached_before_it(tmp_path):
    target = {"accuracy": 0.01}
    summary, weights = train(plan_of("asp", epochs=4, goal=target), tmp_path / "any")
    ends = sorted(record.start + record.compute_seconds for record in summary.rounds)
    assert len(ends) > plan_of("asp").workers  # some were in a second round by then
    goal = target | {"deadline": (ends[-2] + ends[-1]) / 2}
    again, same_weights = train(plan_of("asp", epochs=4, goal=goal), tmp_path / "late")
    assert again.rounds == summary.rounds
    assert same(weights, same_weights)


@pytest.mark.parametrize(
    "kind", quick_but(["plain", "dynamic-batch", "asp", "bsp"], ["dynamic-batch", "asp", "bsp"])
)
def test_training_ends_by_patience_and_stays_ended(kind, tmp_path):
    plan = plan_of(kind, epochs=8, goal={"patience": 1})
    summary, weights = train(plan, tmp_path)
    last = stalled_epoch(plan, summary.epochs)
    assert len(summary.epochs) - last.epoch in ((1,) if plan.server is None else (1, 2))
    assert "goal.patience=1 ended training" in (tmp_path / "metrics.jsonl").read_text()
    stays_ended(plan, tmp_path, summary, weights)


@pytest.mark.parametrize("kind", quick_but(["plain", "asp"], ["plain"]))
def test_checkpoints_of_some_epochs_stay(kind, tmp_path):
    train(plan_of(kind, epochs=4, checkpoint_epochs=2), tmp_path)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("epoch-*"))
    assert kept == ["epoch-2.pt", "epoch-4.pt"]


def stays_ended(plan, tmp_path, summary, weights):
    again, same_weights = train(plan, tmp_path, resume=True)
    assert told(again) == told(summary)
    assert same(weights, same_weights)
