"""How often a step makes the host wait for the device: at most once, on a device that is played."""

from __future__ import annotations

import functools
import weakref
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy as criterion

import kept_network
from batchwright import Session
from batchwright.distributed import group as groups
from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer, buffer_bytes
from batchwright.distributed.transports import nothing
from batchwright.errors import BrokenStepError
from batchwright.probing.bench import Bench
from batchwright.records import AgsRule, LearningRateRule
from batchwright.training.loop import _fed
from batchwright.training.step import stepper
from batchwright.training.step.clock import StepClock
from batchwright.training.step.early_batches import Early
from batchwright.training.step.updater import Updater
from batchwright.workload import optimizers
from batchwright.workload.data import copying
from batchwright.workload.data import pipeline as pipelines
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import ImageData
from batchwright.workload.muon import muon
from batchwright.workload.networks import resnet8
from batchwright.workload.optimizers import adamw, can_skip_steps, sgd
from far import FAR, far_device, in_this_thread
from samples import make_job
from test_probe import tiny_image_data, tiny_job
from test_session import make_tiny_plan

SAMPLES, SIDE, CLASSES, BATCH = 48, 8, 3, 12
HOST_SYNCHRONIZATIONS_PER_STEP = 1
"""At most."""
OPERATIONS = {1: 19, 2: 65}
"""Beside those of a plain step at most, by the workers: a host takes 10 to 25 us for each. PyTorch
2.6 counts two more than 2.13."""

GAIN = LearningRateRule(
    base=0.1, base_batch=4, scaling="gain", peak=0.1, warmup_epochs=0, decay="none"
)


def data():
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (SAMPLES, SIDE, SIDE, 3), generator=random, dtype=torch.uint8)
    return ImageStore.from_images(images, torch.arange(SAMPLES) % CLASSES)


def pipeline(device, **options):
    options = {"side": SIDE, "augmentation": "crop-flip"} | options
    middle = (0.5, 0.5, 0.5)
    return ImagePipeline(data(), device=device, mean=middle, std=middle, seed=1, **options)


def network_on(device):
    """A small one: none of its layers makes the host wait."""
    torch.manual_seed(0)
    return kept_network.network(CLASSES).to(memory_format=torch.channels_last).to(device)


def waits_of(plan, build, device=FAR, *, images=None, **options):
    """Waits of each step of a training, and the weights at its end."""
    with far_device() as seen:
        network = network_on(device)
        loader = pipeline(device, **(images or {}))
        steps: list[int] = []
        with Session(network, build(network), loader, plan=plan, **options) as session:
            for _ in session.epochs():
                before = seen.count
                for images, labels in session.batches():
                    if session.step(lambda i=images, b=labels: criterion(network(i), b)):
                        steps.append(seen.count - before)
                        before = seen.count
                told = session.evaluate(pipeline(device), right)
        weights = torch.cat([p.detach().cpu().flatten() for p in network.parameters()])
        return steps, weights, told, dict(seen.waits)


def right(outputs, labels):
    return outputs.argmax(dim=1) == labels


def plan_for(batches=(BATCH,), **job):
    return make_tiny_plan(batches, epochs=2, samples=SAMPLES, sides=(SIDE,), **job)


def by_sgd(network):
    return sgd(network, make_job(), 0.1)


def by_a_rate_there(network):
    """The rate is a number of the device."""
    optimizer = by_sgd(network)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.1, device=next(network.parameters()).device)
    return optimizer


def with_ags(plan):
    rule = AgsRule(mode="norm", base_batch=4, least=0.5, most=None, lookback=5)
    return plan.model_copy(update={"ags": rule})


KINDS = {
    "plain": (plan_for(), by_sgd, {}),
    "float16": (plan_for(precision="float16"), by_sgd, {}),
    "accumulation": (plan_for(micro=4), by_sgd, {}),
    "clip": (plan_for(), by_sgd, {"clip_norm": 0.1}),
    "rate": (plan_for(), by_a_rate_there, {"learning_rate": "mine"}),
    "adamw": (plan_for(), lambda network: adamw(network, make_job(), 0.001), {}),
    "muon": (plan_for(optimizer="muon"), lambda network: muon(network, 0.02), {}),
    "gain": (plan_for(micro=4, rule=GAIN), by_sgd, {}),
    "ags": (with_ags(plan_for(micro=4)), by_sgd, {}),
    "frozen": (plan_for(), lambda network: by_sgd(frozen(network)), {}),
}


def frozen(network):
    next(network.parameters()).requires_grad_(requires_grad=False)
    return network


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_makes_the_host_wait_once_and_trains_as_on_the_cpu(kind):
    plan, build, options = KINDS[kind]
    steps, weights, told, waits = waits_of(plan, build, **options)
    _, expected, there, _ = waits_of(plan, build, torch.device("cpu"), **options)
    assert len(steps) == 2 * SAMPLES // BATCH
    assert max(steps) <= HOST_SYNCHRONIZATIONS_PER_STEP, waits
    torch.testing.assert_close(weights, expected)
    assert told == there


def updates_of(plan, build, device=FAR, *, spoil=None, clear=None, odd=None, **options):
    """Of each step: waits before the optimizer stepped, and after; and all that was learnt.

    ``spoil`` is a step whose loss is infinite, ``clear`` one before which the state is gone,
    ``odd`` one that alone is weighed otherwise.
    """
    with far_device() as seen:
        network = network_on(device)
        optimizer, found, begun = build(network), [], []
        usual, weight = Updater._step, options.pop("weight", None)

        def noted(updater):
            begun.append(seen.count)
            usual(updater)

        with (
            mock.patch.object(Updater, "_step", noted),
            Session(network, optimizer, pipeline(device), plan=plan, **options) as session,
        ):
            for _ in session.epochs():
                for images, labels in session.batches():
                    if len(found) == clear:
                        optimizer.state.clear()
                    loss = criterion(network(images), labels)
                    before = seen.count
                    begun.clear()
                    done = session.step(
                        loss * torch.inf if len(found) == spoil else loss,
                        weight=7.0 if len(found) == odd else weight,
                    )
                    first = begun[0] - before if begun else None
                    found.append((first, seen.count - before, done))
        learnt = (*network.parameters(), *network.buffers())
        return found, torch.cat([one.detach().cpu().double().flatten() for one in learnt])


@pytest.mark.parametrize("kind", ["plain", pytest.param("adamw", marks=pytest.mark.slow)])
def test_the_update_is_on_its_way_before_the_host_waits(kind):
    found, _ = updates_of(*KINDS[kind][:2])
    assert found[0] == (1, 1, True)  # the optimizer has no state yet
    assert set(found[1:]) == {(0, 1, True)}


def test_the_next_images_are_made_before_the_host_waits(monkeypatch):
    made, plan = [], plan_for()
    finished = ImagePipeline._finished

    def noted(self, *given):
        made.append(seen.count)
        return finished(self, *given)

    monkeypatch.setattr(ImagePipeline, "_finished", noted)
    with far_device() as seen:
        network = network_on(FAR)
        with Session(network, by_sgd(network), pipeline(FAR), plan=plan) as session:
            for _ in session.epochs():
                made.clear()
                for step, (images, labels) in enumerate(session.batches()):
                    before = seen.count
                    session.step(criterion(network(images), labels))
                    last = step == SAMPLES // BATCH - 1
                    assert made[step + 1 :] == ([] if last else [before])


class Counting(torch.optim.SGD):
    """Does something of its own in each step."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        return super().step(closure)


class Wrapped(torch.optim.Optimizer):
    """Has all that another has, and steps that one."""

    def __init__(self, inner):
        self.__dict__ = dict(inner.__dict__)
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def hooked(network):
    optimizer = by_sgd(network)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def counting(network):
    return Counting(network.parameters(), lr=0.1, momentum=0.9, fused=True)


def averaging(network):
    """The user's own wrapper: it does something besides in each step, and says what it wraps."""
    optimizer = by_sgd(network)
    step, average = optimizer.step, [p.detach().clone() for p in network.parameters()]

    @functools.wraps(step)
    def step_and_average(closure=None):
        step(closure)
        torch._foreach_lerp_(average, [p.detach() for p in network.parameters()], 0.1)

    optimizer.step = step_and_average
    return optimizer


def half_fused(network):
    optimizer = by_sgd(network)
    optimizer.param_groups[1]["fused"] = False
    return optimizer


@pytest.mark.parametrize(
    "build",
    [averaging, *(pytest.param(n, marks=pytest.mark.slow) for n in (hooked, counting, half_fused))],
)
def test_an_optimizer_that_does_more_than_torchs_is_stepped_by_the_host(build):
    found, _ = updates_of(plan_for(), build)
    assert {before for before, _, _ in found} == {1}


def test_whether_an_optimizer_can_leave_out_a_step_is_asked_of_what_steps():
    weights = [torch.nn.Parameter(torch.ones(3))]
    fused = torch.optim.AdamW(weights, fused=True)
    assert can_skip_steps(fused)
    assert can_skip_steps(adamw(torch.nn.Linear(2, 2), make_job(), 0.1))
    torch.optim.lr_scheduler.StepLR(fused, 1)  # wraps its step, and changes nothing in it
    assert can_skip_steps(fused)
    assert not can_skip_steps(Wrapped(fused))
    assert not can_skip_steps(torch.optim.AdamW(weights))
    fused.load_state_dict(torch.optim.AdamW(weights).state_dict())
    assert not can_skip_steps(fused)


class Bare(torch.optim.SGD):
    """Steps as torch's does, and has all that another has but its hooks."""

    def __init__(self, inner):
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        self.__dict__ = {name: one for name, one in vars(inner).items() if name not in hooks}


class Outside(torch.optim.Optimizer):
    """As wrappers do that never call `Optimizer.__init__`: what it has is asked of another."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_without_lists_of_hooks_is_stepped_by_the_host(monkeypatch):
    found, _ = updates_of(plan_for(), lambda network: Outside(by_sgd(network)))
    assert {before for before, _, _ in found} == {1}
    fused = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], fused=True)
    assert not can_skip_steps(Bare(fused))
    monkeypatch.delattr(optimizers.torch_optimizers, "_global_optimizer_pre_hooks")
    assert not can_skip_steps(fused)


def test_losses_weighed_otherwise_are_stepped_by_the_host():
    found, _ = updates_of(plan_for(), by_sgd, weight=7.0)
    assert {before for before, _, _ in found} == {1}


def test_sgd_without_momentum_makes_no_state_and_goes_ahead_at_once():
    def build(network):
        return sgd(network, make_job(momentum=0.0), 0.1)

    found, learnt = updates_of(plan_for(), build, spoil=3)
    assert {before for before, _, _ in found} == {0}
    there, expected = updates_of(plan_for(), build, torch.device("cpu"), spoil=3)
    assert [done for *_, done in found] == [done for *_, done in there]
    torch.testing.assert_close(learnt, expected)


def test_one_odd_step_has_the_host_step_that_one_and_the_next():
    found, _ = updates_of(plan_for(), by_sgd, odd=2)
    assert [before for before, _, _ in found] == [1, 0, 1, 1, 0, 0, 0, 0]


def test_the_next_images_wait_where_there_is_no_memory_for_them_yet():
    full = [True]

    def make(part):
        if full and full.pop(0):
            raise torch.OutOfMemoryError
        return int(part.sum())

    early = Early(iter(torch.arange(5).split(2)), make)
    early.ask()
    early.make()
    early.ask()
    assert list(early) == [1, 5, 4]
    early.ask()
    early.make()
    assert list(early) == []


@pytest.mark.parametrize(
    ("kind", "told"),
    [("plain", "figures update images read"), ("clip", "figures images read update")],
)
def test_the_device_has_the_next_images_to_make_while_the_host_does_the_rest(
    kind, told, monkeypatch
):
    plan, build, options = KINDS[kind]
    seen, passing = [], []

    def noted(owner, name, word):
        usual = getattr(owner, name)

        def note(*given):
            seen.append(word)
            return usual(*given)

        monkeypatch.setattr(owner, name, note)

    def read(values, meanwhile=nothing):
        seen.append("figures")
        meanwhile()
        seen.append("read")
        return values.cpu()

    monkeypatch.setattr(groups, "fetched", read)
    monkeypatch.setattr(StepClock, "passing", lambda _, work: passing.append(work) or work)
    noted(ImagePipeline, "_finished", "images")
    noted(Updater, "_step", "update")
    updates_of(plan, build, **options)
    usual = told.split()
    last = [word for word in usual if word != "images"]  # of an epoch
    steps = SAMPLES // BATCH
    assert seen[-steps * len(usual) :] == ["images", *(usual * (steps - 1)), *last]
    assert len(passing) == sum(one == "figures" and two != "read" for one, two in pairwise(seen))


@pytest.mark.slow
def test_the_next_images_give_way_where_a_step_is_taken_again(monkeypatch):
    made, alive, read, finished = [], [], [], ImagePipeline._finished

    def noted(self, *given):
        batch = finished(self, *given)
        made.append(weakref.ref(batch[0]))
        return batch

    def short(values, meanwhile=nothing):
        meanwhile()
        read.append(values)
        if len(read) == 2:
            raise RuntimeError("CUDA error: out of memory")
        return values.cpu()

    def release(_):
        alive.append(sum(one() is not None for one in made))

    monkeypatch.setattr(groups, "fetched", short)
    monkeypatch.setattr(stepper, "release_memory", release)
    monkeypatch.setattr(ImagePipeline, "_finished", noted)
    plan, build, options = KINDS["clip"]
    updates_of(plan, build, **options)
    assert alive == [1]  # those of the step that is taken again


@pytest.mark.parametrize(
    "kind", ["clip", *(pytest.param(n, marks=pytest.mark.slow) for n in ("muon", "float16"))]
)
def test_an_update_that_takes_a_number_of_the_host_comes_after(kind):
    plan, build, options = KINDS[kind]
    found, _ = updates_of(plan, build, **options)
    assert {before for before, _, done in found if done} == {1}


@pytest.mark.parametrize(
    "told",
    [
        pytest.param({"spoil": 0}, marks=pytest.mark.slow),
        {"spoil": 3},
        pytest.param({"clear": 3}, marks=pytest.mark.slow),
        pytest.param({"clear": 3, "spoil": 3}, marks=pytest.mark.slow),
        pytest.param({"weight": 7.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_that_is_not_as_usual_ends_as_on_the_cpu(told):
    plan, build, _ = KINDS["plain"]
    found, learnt = updates_of(plan, build, **told)
    there, expected = updates_of(plan, build, torch.device("cpu"), **told)
    assert [done for *_, done in found] == [done for *_, done in there]
    assert [done for *_, done in found].count(False) == ("spoil" in told)
    torch.testing.assert_close(learnt, expected)


@pytest.mark.parametrize("kind", ["plain", pytest.param("clip", marks=pytest.mark.slow)])
def test_memory_that_runs_out_behind_a_queued_update_breaks_the_step(kind, monkeypatch):
    """Where none was queued it is taken once more, in smaller micro-batches."""
    plan, build, options = KINDS[kind]
    read = []

    def short(values, meanwhile=nothing):
        meanwhile()
        read.append(values)
        if len(read) == 3:
            raise RuntimeError("CUDA error: out of memory")
        return values.cpu()

    monkeypatch.setattr(groups, "fetched", short)
    if kind == "plain":
        with pytest.raises(BrokenStepError, match="behind an update that may be made already"):
            updates_of(plan, build, **options)
    else:
        found, _ = updates_of(plan, build, **options)
        assert [done for *_, done in found].count(True) == 2 * SAMPLES // BATCH
    assert len(read) >= 3


@pytest.mark.parametrize("store", ["whole", pytest.param("photographs", marks=pytest.mark.slow)])
def test_so_does_one_whose_images_come_from_the_cpu_a_batch_ahead(monkeypatch, store):
    monkeypatch.setattr(copying, "enter", in_this_thread)
    monkeypatch.setattr(pipelines, "RESIDENT_BYTES", 0)
    _as_photographs(monkeypatch, store)
    plan, build, options = KINDS["plain"]
    steps, weights, _, waits = waits_of(plan, build, **options)
    assert max(steps) <= HOST_SYNCHRONIZATIONS_PER_STEP, waits
    _, expected, _, _ = waits_of(plan, build, torch.device("cpu"), **options)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(
    "images",
    [
        {"augmentation": "flip", "rotation": 0.05, "zoom": 0.25},
        pytest.param({"augmentation": "resized-crop"}, marks=pytest.mark.slow),
    ],
    ids=["turned", "resized"],
)
def test_so_does_one_whose_images_are_turned_or_resized(images):
    plan, build, options = KINDS["plain"]
    options = {**options, "images": images}
    steps, weights, _, waits = waits_of(plan, build, **options)
    assert max(steps) <= HOST_SYNCHRONIZATIONS_PER_STEP, waits
    _, expected, _, _ = waits_of(plan, build, torch.device("cpu"), **options)
    torch.testing.assert_close(weights, expected)


def test_so_does_one_that_averages_its_weights():
    _, build, options = KINDS["plain"]
    plan = plan_for().model_copy(update={"average_epochs": 0.5})
    steps, weights, _, waits = waits_of(plan, build, **options)
    assert max(steps) <= HOST_SYNCHRONIZATIONS_PER_STEP, waits
    _, expected, _, _ = waits_of(plan, build, torch.device("cpu"), **options)
    torch.testing.assert_close(weights, expected)


def test_so_does_one_whose_photographs_stay_on_the_device(monkeypatch):
    _as_photographs(monkeypatch, "photographs")
    plan, build, options = KINDS["plain"]
    steps, weights, _, waits = waits_of(plan, build, **options)
    assert max(steps) <= HOST_SYNCHRONIZATIONS_PER_STEP, waits
    _, expected, _, _ = waits_of(plan, build, torch.device("cpu"), **options)
    torch.testing.assert_close(weights, expected)


def _as_photographs(monkeypatch, store):
    if store == "photographs":
        monkeypatch.setattr("test_host_waits.data", photographs)


def photographs():
    """Images of several sizes, none smaller than what is cut out of them."""
    sizes = torch.tensor([(SIDE + 2, SIDE + 5), (SIDE + 4, SIDE)] * (SAMPLES // 2))
    random = torch.Generator().manual_seed(2)
    count = 3 * int(sizes.prod(1).sum())
    pixels = torch.randint(0, 256, (count,), generator=random, dtype=torch.uint8)
    return ImageStore(pixels, torch.arange(SAMPLES) % CLASSES, sizes)


def of_two(rank, kind):
    torch.set_num_threads(1)
    plan, build, options = {
        "plain": (plan_for((6, 6)), by_sgd, {}),
        "accumulation": (plan_for((6, 6), micro=3), by_sgd, {}),
        "clip": (plan_for((6, 6)), by_sgd, {"clip_norm": 0.1}),
        "dynamic-batch": (plan_for((4, 8), method="dynamic-batch", rebalance_steps=2), by_sgd, {}),
        "muon": (plan_for((6, 6), optimizer="muon"), lambda network: muon(network, 0.02), {}),
        "gain": (plan_for((6, 6), rule=GAIN), by_sgd, {}),
        "ags": (with_ags(plan_for((6, 6))), by_sgd, {}),
    }[kind]
    steps, weights, _, waits = waits_of(plan, build, **options)
    return steps, weights, waits


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["plain", "accumulation", "clip", "dynamic-batch", "muon", "gain", "ags"]
)
def test_so_does_a_step_of_several_workers(crew, kind):
    (steps, weights, waits), (_, others, _) = crew.together(of_two, kind, workers=2)
    assert max(steps) <= HOST_SYNCHRONIZATIONS_PER_STEP, waits
    assert torch.equal(weights, others)


def odd_of_two(rank):
    torch.set_num_threads(1)
    return updates_of(plan_for((6, 6)), by_sgd, odd=2)


@pytest.mark.slow
def test_several_workers_learn_of_an_odd_step_from_its_figures(crew):
    """Their devices leave it out, so that the hosts step once more; and the next one waits."""
    (found, _), _ = crew.together(odd_of_two, workers=2)
    assert [before for before, _, _ in found] == [1, 0, 0, 1, 0, 0, 0, 0]
    assert {waits for _, waits, _ in found} == {1}


def operations_of_a_step(plan):
    """Of PyTorch's, in a step of a session that is neither its first nor its epoch's last."""
    counts = []
    with far_device() as seen:
        network = resnet8(CLASSES).to(memory_format=torch.channels_last).to(FAR)
        with Session(network, by_sgd(network), pipeline(FAR), plan=plan) as session:
            for _ in session.epochs():
                for images, labels in session.batches():
                    session.step(criterion(network(images), labels))
                    counts.append(seen.operations)
    return counts[-2] - counts[-3]


def operations_of_a_plain_step():
    counts = []
    with far_device() as seen:
        network = resnet8(CLASSES).to(memory_format=torch.channels_last).to(FAR)
        optimizer, loader = by_sgd(network), pipeline(FAR)
        for indices in torch.arange(SAMPLES).split(BATCH):
            images, labels = loader.training_batch(indices, epoch=0, resolution=SIDE)
            criterion(network(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(seen.operations)
    return counts[-2] - counts[-3]


def operations_of_two(rank):
    torch.set_num_threads(1)
    with mock.patch.object(Reducer.__init__, "__defaults__", (2**16, ())):  # bytes of a bucket
        return operations_of_a_step(plan_for((BATCH // 2, BATCH // 2)))


def test_a_step_takes_few_operations_beside_a_plain_one():
    assert operations_of_a_step(plan_for()) - operations_of_a_plain_step() <= OPERATIONS[1]


@pytest.mark.slow
def test_so_does_one_of_several_workers_with_many_buckets(crew):
    """Gradients come and go in buckets, each with a copy, an exchange and two norms."""
    plain, (first, _) = operations_of_a_plain_step(), crew.together(operations_of_two, workers=2)
    assert first - plain <= OPERATIONS[2]


def test_the_device_that_is_played_tells_what_waits():
    with far_device() as seen:
        there = torch.arange(3.0).to(FAR)
        before = seen.count
        assert before == 1  # from memory that is not pinned
        torch.tensor([1.0], device=FAR)
        assert seen.count == before + 1  # so are numbers
        before += 1
        there.mul_(2)
        assert seen.count == before
        assert there.cpu().tolist() == [0.0, 2.0, 4.0]
        assert float(there.sum()) == 6.0
        assert len(there[there > 1]) == 2
        assert seen.count >= before + 3
        with pytest.raises(RuntimeError, match="together"):
            there + torch.ones(3)
        now = seen.count
        sent = torch.ones(3).pin_memory().to(FAR, non_blocking=True)
        assert (sent + there).shape == (3,)
        assert seen.count == now


def test_reading_is_one_wait():
    with far_device() as seen:
        group = Group(FAR)
        values = torch.zeros(3, device=FAR)
        assert group.read(values).tolist() == [0.0] * 3
        assert seen.count == 1


def test_a_probe_weighs_steps_beside_all_images_that_a_training_keeps_on_the_device():
    middle = (0.5, 0.5, 0.5)
    images = ImageData(data(), data(), tiny_image_data().facts, middle, middle)
    job = tiny_job(network="resnet8", resolutions=(4, SIDE))
    with far_device():
        bench = Bench(job, images, Group(FAR))
        bench.batches.hold_images()
        batches = bench.batches
        held = [batches._train._full, batches._train._reduced[4], batches._held_out._full]
        assert all(one.pixels.device == FAR for one in held)
    near = Bench(job, images, Group(torch.device("cpu")))
    near.batches.hold_images()
    assert near.batches._held_out is None


def loaded(images, **job):
    """What a training's images are made from, of both parts, on the device or not."""
    plan = make_tiny_plan((BATCH,), sides=(SIDE,), **job)
    return [_fed(part, plan, images, FAR)._full for part in (images.train, images.val)]


def test_images_stay_on_a_device_only_if_they_take_little_of_what_a_worker_may_use():
    """With a goal.memory below their size every peak was above it, whatever the batch."""
    middle = (0.5, 0.5, 0.5)
    images = ImageData(data(), data(), tiny_image_data().facts, middle, middle)
    room = 4 * len(images.train.pixels)
    with far_device():
        for limit, stay in ((room, True), (room - 4, False)):
            goal = {"memory": limit}
            bench = bench_of(goal=goal)
            bench.batches.hold_images()
            held = [bench.batches._train._full, bench.batches._held_out._full]
            for one in held + loaded(images, goal=goal):
                assert (one.pixels.device == FAR) == stay


def bench_of(**changes):
    middle = (0.5, 0.5, 0.5)
    images = ImageData(data(), data(), tiny_image_data().facts, middle, middle)
    job = tiny_job(network="resnet8", resolutions=(SIDE,), **changes)
    return Bench(job, images, Group(FAR))


def goes_ahead(bench, seen):
    """Whether a step of a probe queues its update before the host waits."""
    supply, begun, usual = bench.supply(BATCH, SIDE), [], Updater._step
    before = seen.count
    with mock.patch.object(
        Updater, "_step", lambda updater: (begun.append(seen.count), usual(updater))
    ):
        bench.step(supply)
    assert seen.count == before + 1
    return begun == [before]


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, False),
        pytest.param({"clip_norm": 0.1}, True, marks=pytest.mark.slow),
        ({"ags": {"mode": "norm"}}, True),
    ],
    ids=str,
)
def test_a_probe_steps_ahead_and_sums_per_tensor_where_a_training_does(changes, waits):
    with far_device() as seen:
        bench = bench_of(**changes)
        assert goes_ahead(bench, seen) != waits
        assert bench.parts().reduction == buffer_bytes(bench.trained, per_tensor=waits)


def test_a_probe_steps_ahead_only_where_all_state_is_there():
    with far_device() as seen:
        bench = bench_of(optimizer="adamw")
        del bench.optimizer.state[bench.trained[0]]
        assert not goes_ahead(bench, seen)
        assert goes_ahead(bench, seen)


def test_a_probes_next_images_wait_where_there_is_no_memory_for_them_yet(monkeypatch):
    made, finished = [], ImagePipeline._finished

    def full(self, *given):
        made.append(given)
        if len(made) == 2:
            raise torch.OutOfMemoryError
        return finished(self, *given)

    with far_device():
        bench = bench_of()
        supply = bench.supply(BATCH, SIDE)
        monkeypatch.setattr(ImagePipeline, "_finished", full)
        bench.step(supply)
        bench.step(supply)
        assert bench._early._made
        bench.supply(2 * BATCH, SIDE)
        assert not bench._early._made  # or it would be weighed with that
    assert len(made) == 4  # once more where it failed
