"""`bw.ForAccelerate`: unequal, exactly-once batches in a loop with accelerate."""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    WeightedRandomSampler,
)

import batchwright as bw
from batchwright.errors import ArgumentError, PlanError
from batchwright.records import LearningRateRule
from batchwright.training.batches.recovering import parts_of
from forked import imported
from gloo import Crew, Worker
from other_trainers import BATCH, SAMPLES, alike, closed, data, loader
from paced import paced_passes
from test_session import make_tiny_plan
from tight import Tight

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="pip install 'batchwright[accelerate]'"
)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def opened(passes=1):
    import accelerate  # here, as it takes long

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=passes)
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    return accelerator, plain, *accelerator.prepare(plain, optimizer)


def loss_of(model, batch, room=None, back=None):
    inputs, labels, _ = batch
    if room is not None and len(inputs) > room:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: too many samples")
    if back is not None:
        hidden = Tight.apply(model(inputs), back)
        return functional.cross_entropy(hidden, labels)
    return functional.cross_entropy(model(inputs), labels)


def trained(
    rank, shares, *, batch=BATCH, passes=1, room=None, back=None, take=None, epochs=2, keep=None
):
    """Samples seen, gradients of each step, weights and shares in the end."""
    accelerator, plain, model, optimizer = opened(passes)
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(batch), shares=shares)
        seen, gradients = [], []
        if keep and keep[0] == "load":
            accelerator.load_state(keep[1])
        for _ in range(epochs):
            for one in feed:
                seen.append(one[2].tolist())
                with accelerator.accumulate(model):
                    if take is not None:
                        take(len(one[0]))
                    compute = partial(loss_of, model, room=room, back=back)
                    feed.backward(compute if room or back else compute(one))
                    if accelerator.sync_gradients:
                        gradients.append([p.grad.clone() for p in plain.parameters()])
                    optimizer.step()
                    optimizer.zero_grad()
                if keep and keep[0] == "save" and len(seen) == keep[2]:
                    accelerator.save_state(keep[1])
                    return seen, gradients, None, None
        sizes = feed.sampler.local_batch_sizes
        return seen, gradients, [p.detach() for p in plain.parameters()], sizes
    finally:
        closed()


def trained_with(rank, shares, how):
    return trained(rank, shares, **how)


@pytest.fixture(scope="module")
def server():
    """What the workers of this file are forked from; to import accelerate takes seconds."""
    with imported("pytest", "accelerate") as server:
        yield server


@pytest.fixture
def crew(server):
    """Of each test its own.

    DDP keeps its reducer in a cycle, and with it the process group, whose threads are waited for
    whenever that is collected, by the thread that holds the lock of Python.
    """
    crew = Crew(partial(Worker, server=server))
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def alone():
    return trained(0, "equal", batch=2 * BATCH)


def automatic(rank, folder):
    """An automatic plan, and one that goes on from its checkpoint with another batch of its own."""
    accelerator, plain, model, optimizer = opened()
    before = [p.detach().clone() for p in plain.parameters()]
    try:
        feed = bw.ForAccelerate(
            *(accelerator, model, optimizer, loader(4), "auto"),
            loss=loss_of,
            epochs=2,
            probe={"budget": 0.3},
            micro_batch=16,
        )
        alike(before, list(plain.parameters()))
        rate = optimizer.param_groups[0]["lr"]
        seen = []
        for one in feed:
            if feed.sampler.part(feed._index).samples:  # else it only keeps in step with the others
                seen += one[2].tolist()
            with accelerator.accumulate(model):
                feed.backward(loss_of(model, one))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()  # worker 0 has written the model
        made = vars(feed.arrangement)
        batch = made["global_batch"]
        other = batch - 2 if 2 * batch > SAMPLES else batch + 2
        feed.arrangement = replace(feed.arrangement, global_batch=other, passes=1)
        feed._arrange()
        accelerator.load_state(folder)
        again = vars(feed.arrangement), feed.sampler.global_batch, feed.sampler.epoch
        return feed.plan.stages[0].global_batch_size, feed.plan.epochs, rate, made, seen, again
    finally:
        closed()


@pytest.mark.slow
def test_an_automatic_batch_is_planned_by_all_workers_together(crew, tmp_path):
    both = crew.together(automatic, str(tmp_path), workers=2)
    batch, epochs, rate, made, _, (again, total, epoch) = both[0]
    assert both[1][:4] == both[0][:4]
    assert sorted(i for one in both for i in one[4]) == list(range(SAMPLES))
    assert epochs == 2
    assert made["global_batch"] == batch
    assert made["follow"]
    assert rate == pytest.approx(0.2 * made["rate"])
    assert (again, total, epoch) == (made | {"shares": None}, batch, 1)


def test_an_automatic_plan_takes_the_place_of_the_accelerators_accumulation(monkeypatch, capfd):
    """And that of a checkpoint, whose batch is told, that of the new plan."""
    from batchwright.workflows.trainers import accelerate as ours

    bases, plan = [], make_tiny_plan((2 * BATCH,), samples=SAMPLES)
    monkeypatch.setattr(ours, "probed", lambda *_, base_batch, **__: bases.append(base_batch))
    monkeypatch.setattr(ours, "automatic", lambda *_: plan)
    accelerator, _, model, optimizer = opened(passes=3)
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(), "auto", loss=loss_of)
        state = feed.state_dict()
        feed.arrangement = replace(feed.arrangement, global_batch=BATCH)
        assert "stop" not in capfd.readouterr().err
        feed.load_state_dict(state)
        assert f"as before the stop: batch_size={2 * BATCH} on" in capfd.readouterr().err
    finally:
        closed()
    assert bases == [3 * BATCH]  # for which the rate is assumed to hold
    assert (feed.arrangement.global_batch, feed.arrangement.passes) == (2 * BATCH, 1)
    assert accelerator.gradient_accumulation_steps == 1


def test_auto_takes_a_loss_and_nothing_else_does():
    accelerator, _, model, optimizer = opened()
    try:
        for plan, how in (("auto", {}), (None, {"loss": loss_of}), (None, {"epochs": 2})):
            with pytest.raises(ArgumentError, match=r'"auto", loss=loss_of\)'):
                bw.ForAccelerate(accelerator, model, optimizer, loader(), plan, **how)
    finally:
        closed()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"passes": 2, "batch": BATCH // 2}, {"room": 4}, {"back": 4}],
    ids=["plain", "accumulating", "out of memory", "in backward"],
)
def test_gradients_are_those_of_one_process(crew, alone, how):
    both = crew.together(trained_with, (3, 1), how, workers=2)
    seen = [i for one in both for batch in one[0] for i in batch]
    assert sorted(seen) == sorted(2 * list(range(SAMPLES)))
    for one in both:
        assert len(one[1]) == len(alone[1]) == 8
        for mine, whole in zip(one[1], alone[1], strict=True):
            alike(mine, whole)
        alike(one[2], alone[2])


def normalized(rank, room):
    """Weights after an epoch with batch normalization, whose statistics DDP sends around.

    Memory runs out for worker 0 before the network, then within it, then in its backward pass.
    """
    import accelerate  # here, as it takes long

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    places = iter(("room", "within", "back", ""))
    place = ""

    def refuse(module, inputs):
        if place == "within" and len(inputs[0]) > room:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: too many samples")

    plain[2].register_forward_pre_hook(refuse)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(), shares="equal")
        for _ in feed:
            place = next(places) if rank == 0 else ""
            feed._recovering.most = None  # or it would be in parts from the first time on
            how = {place: room} if place in ("room", "back") else {}
            feed.backward(partial(loss_of, model, **how))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in plain.parameters()]
    finally:
        closed()


@pytest.mark.slow
def test_workers_stay_together_where_memory_runs_out_and_buffers_are_exchanged(crew):
    one, other = crew.together(normalized, 3, workers=2)
    alike(one, other)


def test_gradients_of_parts_are_scaled_as_accelerate_scales_the_loss():
    """It computes in float16 on GPUs alone: here its parts are put together by hand."""
    accelerator, plain, model, optimizer = opened()
    accelerator.scaler = scaler = torch.amp.GradScaler("cpu")
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(32), shares="equal")

        def tiny(batch):
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = model(batch[0])
            if len(batch[0]) > 4:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: too many samples")
            return 1e-6 * functional.cross_entropy(outputs.float(), batch[1])

        one = next(iter(feed))
        feed.backward(tiny)
        found = [parameter.grad / scaler.get_scale() for parameter in plain.parameters()]
        whole = 1e-6 * functional.cross_entropy(plain(one[0]), one[1])
        for mine, wanted in zip(
            found, torch.autograd.grad(whole, list(plain.parameters())), strict=True
        ):
            assert (mine - wanted).norm() < 0.05 * wanted.norm()
    finally:
        closed()


def left_early(rank, passes):
    """Samples of a pass that is left in the middle of a step, and of the two after it."""
    accelerator, _, model, optimizer = opened(passes)
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(BATCH // passes))
        each, last_of_step = [], []
        for epoch in range(3):
            each.append([])
            for at, one in enumerate(feed):
                each[-1].append((one[2].tolist(), feed.sampler.part(at).samples > 0))
                with accelerator.accumulate(model):
                    feed.backward(loss_of(model, one))
                    if accelerator.sync_gradients:
                        last_of_step.append(at % passes == passes - 1)
                    optimizer.step()
                    optimizer.zero_grad()
                if epoch == 0 and at == 2 * passes:
                    break
            if epoch == 0:
                left = feed.sampler.state_dict(2 * passes)
        return each, last_of_step, left["done"], feed._follower.timed
    finally:
        closed()


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
def test_a_pass_that_is_left_early_is_over(crew, passes):
    both = crew.together(left_early, passes, workers=2)
    for epoch in (1, 2):
        seen = [i for one in both for batch, counts in one[0][epoch] if counts for i in batch]
        assert sorted(seen) == list(range(SAMPLES))
    for each, last_of_step, done, timed in both:
        assert done == 2 * 2 * BATCH
        assert each[0] != each[1][: len(each[0])]
        assert all(last_of_step)
        assert not timed


def slowed(rank):
    with paced_passes() as take:
        slow = 0.008 if rank == 0 else 0.002
        return trained(rank, None, take=lambda samples: take(slow * samples), epochs=4)[3]


@pytest.mark.slow
def test_shares_follow_a_slow_worker(crew):
    one, other = crew.together(slowed, workers=2)
    assert one == other
    assert one[0] < one[1] / 2


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "passes"), [(1, 1), (2, 1), (2, 2)])
def test_a_state_in_the_middle_of_an_epoch_goes_on_exactly(crew, tmp_path, alone, workers, passes):
    folder = str(tmp_path / "state")
    how = {"passes": passes, "batch": BATCH // passes}
    keep = ("save", folder, 7 * passes - 1)  # in the middle of a step, too
    saving = crew.together(trained_with, (3, 1), {"keep": keep, **how}, workers=2)
    how = {"keep": ("load", folder), "passes": passes, "epochs": 1}
    how["batch"] = 2 * BATCH // workers // passes
    after = crew.together(trained_with, None, how, workers=workers)
    seen = [i for one in saving for batch in one[0][4 * passes : 6 * passes] for i in batch]
    seen += [i for one in after for batch in one[0] for i in batch]
    assert sorted(seen) == list(range(SAMPLES))
    for one in after:
        alike(one[2], alone[2])


@pytest.mark.slow
def test_shares_that_are_asked_for_hold_against_those_of_a_state(crew, tmp_path):
    folder = str(tmp_path / "state")
    crew.together(trained_with, (3, 1), {"keep": ("save", folder, 7)}, workers=2)
    how = {"keep": ("load", folder), "epochs": 0}
    found = [
        crew.together(trained_with, shares, how, workers=2)[0][3]
        for shares in (None, "equal", (1, 3))
    ]
    assert found == [(12, 4), (8, 8), (4, 12)]


@pytest.mark.parametrize("right", [True, False])
def test_a_step_whose_losses_went_past_the_feed_is_told_once(capfd, right):
    accelerator, _, model, optimizer = opened(passes=2)
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(4))
        for one in feed:
            with accelerator.accumulate(model):
                (feed if right else accelerator).backward(loss_of(model, one))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.backward(loss_of(model, one))
        optimizer.step()  # of something else than the feed's batches
    finally:
        closed()
    told = capfd.readouterr().err
    assert told.count("the optimizer steps without feed.backward(loss)") == (not right)


def test_an_update_after_each_pass_of_a_plan_that_accumulates_is_refused():
    """It would be made with a part of the gradient, divided by the number of passes."""
    accelerator, _, model, optimizer = opened(passes=2)
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(4))
        batches = iter(feed)
        feed.backward(loss_of(model, next(batches)))
        with pytest.raises(PlanError, match=r"steps after pass 1 of 2.*accelerator\.accumulate"):
            optimizer.step()
    finally:
        closed()


def test_a_loss_that_is_a_part_of_another_loss_is_weighed_once_in_it():
    accelerator, plain, model, optimizer = opened(passes=2)
    gradients = []
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(4))
        *_, one = feed
        assert feed.sampler.part(feed._index).factor(1) == 2 * 2 / 5  # the smaller of a last step
        loss = loss_of(model, one)
        for part in (loss, 2 * loss):
            optimizer.zero_grad()
            feed.backward(part, retain_graph=True)
            gradients.append([p.grad.clone() for p in plain.parameters()])
    finally:
        closed()
    alike([2 * each for each in gradients[0]], gradients[1])


def test_a_step_whose_closure_gives_its_loss_to_the_feed_is_not_told(capfd):
    accelerator, _, model, optimizer = opened(passes=2)
    try:
        feed = bw.ForAccelerate(accelerator, model, optimizer, loader(4))
        for one in feed:
            with accelerator.accumulate(model):
                optimizer.step(lambda one=one: feed.backward(loss_of(model, one)))
    finally:
        closed()
    assert "the optimizer steps without" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_model_with_its_loss_is_probed_planned_and_trained(tmp_path):
    accelerator, plain, model, optimizer = opened()
    weights = [p.detach().clone() for p in plain.parameters()]
    how = {"probe": {"budget": 0.3}, "epochs": 2}
    profile = bw.ForAccelerate.probe(accelerator, model, optimizer, loader(), loss_of, **how)
    alike([p.detach() for p in plain.parameters()], weights)
    plan = bw.plan(profile, global_batch=32, micro_batch=16)
    feed = bw.ForAccelerate(accelerator, model, optimizer, loader(), plan)
    assert (feed.arrangement.global_batch, feed.arrangement.passes) == (32, 2)
    assert accelerator.gradient_accumulation_steps == 2
    rate = 0.2 * plan.learning_rate.peak / plan.learning_rate.base
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert len(feed) == len(list(feed)) == 4
    closed()


@pytest.mark.parametrize("prepared", [True, False])
def test_a_scheduler_that_was_there_before_goes_on_at_the_plans_rate_or_a_line_says_so(
    prepared, capfd
):
    accelerator, plain, _, optimizer = opened()
    rule = LearningRateRule(
        base=0.1, base_batch=4, scaling="linear", peak=0.4, warmup_epochs=0, decay="none"
    )
    plan = make_tiny_plan((16,), samples=SAMPLES, rule=rule)
    scheduler = LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))
    theirs = accelerator.prepare(scheduler) if prepared else scheduler
    try:
        feed = bw.ForAccelerate(accelerator, plain, optimizer, loader(), plan)
        feed.backward(loss_of(plain, next(iter(feed))))
        optimizer.step()
        theirs.step()
    finally:
        closed()
    told = capfd.readouterr().err
    assert ("build it after bw.ForAccelerate" in told) is not prepared
    if prepared:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(4 * 0.2 / 2)


@pytest.mark.parametrize("factor", [1, 4])
def test_other_optimizers_whose_rates_the_plan_leaves_are_told(factor, capfd):
    accelerator, plain, _, optimizer = opened()
    accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1))
    plan = make_tiny_plan((BATCH * factor,), samples=SAMPLES, factor=factor)
    try:
        bw.ForAccelerate(accelerator, plain, optimizer, loader(), plan)
    finally:
        closed()
    told = "only the optimizer that bw.ForAccelerate was given has its rates times 4"
    assert (told in capfd.readouterr().err) is (factor == 4)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 4), (4, 4), (4, 1)])
def test_a_resumed_training_has_the_rate_of_its_plan_whatever_it_had_before(
    tmp_path, before, after
):
    def feeding(factor):
        accelerator, plain, _, optimizer = opened()
        plan = make_tiny_plan((BATCH * factor,), samples=SAMPLES, factor=factor)
        plan = None if factor == 1 else plan
        feed = bw.ForAccelerate(accelerator, plain, optimizer, loader(), plan)
        return accelerator, optimizer, feed

    try:
        accelerator, _, feed = feeding(before)
        next(iter(feed))
        accelerator.save_state(tmp_path)
        accelerator, optimizer, _ = feeding(after)
        accelerator.load_state(tmp_path)
    finally:
        closed()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * after)


class Named(NamedTuple):
    inputs: Any
    name: str


class Thing:
    """Moves itself, as graphs and sparse batches do."""

    def __init__(self, inputs):
        self.inputs = inputs

    def to(self, device):
        return Thing(self.inputs.to(device))


class Held(Mapping):
    """Can be read only."""

    def __init__(self, values):
        self.values_of = values

    def __getitem__(self, key):
        return self.values_of[key]

    def __iter__(self):
        return iter(self.values_of)

    def __len__(self):
        return len(self.values_of)


def held(items):
    inputs = torch.stack([one[0] for one in items])
    keyed = defaultdict(list, inputs=inputs, names=["a"])
    return [UserDict(inputs=inputs), keyed, Named(inputs, "a"), Thing(inputs), Held(keyed)]


def test_batches_of_any_kind_come_on_the_device():
    accelerator, _, model, optimizer = opened()
    accelerator.state.device = torch.device("meta")
    own = DataLoader(data(), BATCH, collate_fn=held)
    for user, keyed, named, thing, read in bw.ForAccelerate(accelerator, model, optimizer, own):
        assert (type(user), type(keyed), keyed.default_factory) == (UserDict, defaultdict, list)
        assert (type(named), type(read), keyed["names"]) == (Named, Held, ["a"])
        found = (user["inputs"], keyed["inputs"], named.inputs, thing.inputs, read["inputs"])
        assert all(one.is_meta for one in found)
    closed()


def test_a_batch_of_any_kind_can_be_computed_in_parts():
    keyed = defaultdict(list, inputs=torch.arange(4), name="a")
    parts = parts_of([keyed, UserDict(keyed)], 4, 2)
    assert [part[1]["inputs"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part[0]["inputs"].tolist() for part in parts] == [[0, 1], [2, 3]]


def test_a_batch_sampler_of_pytorch_is_taken_over_and_a_loader_with_its_own_batches_refused():
    accelerator, _, model, optimizer = opened()
    make = partial(bw.ForAccelerate, accelerator, model, optimizer)
    batches = BatchSampler(SequentialSampler(data()), BATCH, False)
    feed = make(DataLoader(data(), batch_sampler=batches))
    assert feed.sampler.global_batch == BATCH
    assert [i for one in feed for i in one[2].tolist()] == list(range(SAMPLES))
    with pytest.raises(PlanError, match="class Own has __iter__ of its own") as told:
        make(type("Own", (DataLoader,), {"__iter__": lambda self: iter(())})(data(), BATCH))
    assert "\n" not in str(told.value)
    closed()


def test_what_would_break_exactly_once_is_refused_in_a_line():
    accelerator, plain, model, optimizer = opened()
    make = partial(bw.ForAccelerate, accelerator, model, optimizer)
    with pytest.raises(PlanError, match=r"leave it out of accelerator\.prepare"):
        make(accelerator.prepare(loader()))
    for shares in (3, ("a",), ()):
        with pytest.raises(ArgumentError, match="give a number for each worker"):
            make(loader(), shares=shares)
    own = loader(shuffle=False, sampler=WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES))
    with pytest.raises(PlanError, match="WeightedRandomSampler decides"):
        make(own)
    with pytest.raises(PlanError, match="steps of 100 samples, and the training set has 61"):
        make(loader(100))
    with pytest.raises(PlanError, match=r"model or optimizer of bw\.ForAccelerate is not prepared"):
        bw.ForAccelerate(accelerator, plain, optimizer.optimizer, loader())
    accelerator.state._shared_state["num_processes"] = 2  # the model was prepared for one
    with pytest.raises(PlanError, match=r"model or optimizer of bw\.ForAccelerate is not prepared"):
        make(loader())
    closed()
