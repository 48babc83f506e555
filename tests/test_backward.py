"""Backward passes that go wrong, or have nothing to do, in a loop of the user's own."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.errors import TrainingError
from batchwright.training.batches import recovering
from batchwright.training.step import stepper
from batchwright.training.step.released_graph import release_graph
from batchwright.training.step.stepper import MAX_BAD_STEPS
from test_session import Points, make_model, make_session, make_tiny_plan, summary_in, train
from tight import Tight

BATCH = 8
BYTES = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"


class Activation(torch.autograd.Function):
    """Saves a large tensor for its backward pass, as layers do."""

    alive: list[weakref.ref] = []  # noqa: RUF012 - emptied by each test

    @staticmethod
    def forward(ctx, values):
        saved = torch.zeros(1000)
        Activation.alive.append(weakref.ref(saved))
        ctx.save_for_backward(saved)
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0 * ctx.saved_tensors[0].sum()


class Full(torch.autograd.Function):
    """Runs out of memory in its first backward passes."""

    left = 0

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        Full.left -= 1
        if Full.left >= 0:
            raise RuntimeError(BYTES)
        return gradient


class Wide(nn.Module):
    """Activations are alive from each forward pass until somebody lets go of them."""

    def __init__(self):
        super().__init__()
        self.linear = make_model()
        self.seen = []

    def forward(self, features):
        self.seen.append((len(features), sum(one() is not None for one in Activation.alive)))
        return Full.apply(Activation.apply(self.linear(features)))


def inline(one, model, features, labels):
    one.step(functional.cross_entropy(model(features), labels))


def held_loss(one, model, features, labels):
    one.kept = loss = functional.cross_entropy(model(features), labels)
    one.step(loss)


def held_outputs(one, model, features, labels):
    one.kept = outputs = model(features)
    one.step(functional.cross_entropy(outputs, labels))


def function(one, model, features, labels):
    one.step(lambda: functional.cross_entropy(model(features), labels))


@pytest.mark.parametrize("loop", [inline, held_loss, held_outputs, function])
@pytest.mark.parametrize("failures", [1, 2])
def test_a_step_is_repeated_without_the_activations_of_the_failed_one(loop, failures):
    Activation.alive.clear()
    Full.left = failures
    model = Wide()
    with make_session(model, dataset=Points(BATCH), plan=plan_of_one_step()) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                loop(one, model, features, labels)
    halves = [BATCH, *[BATCH // 2**failures] * 2**failures]
    if failures == 2:
        halves.insert(1, BATCH // 2)
    assert [samples for samples, _ in model.seen] == halves
    assert all(alive == 0 for _, alive in model.seen)


@pytest.mark.parametrize("loop", [inline, held_loss, held_outputs, function])
def test_nothing_of_the_failed_one_is_alive_when_memory_is_given_back(loop, monkeypatch):
    """What a GPU's allocator still holds blocks of, it cannot give back."""
    Activation.alive.clear()
    Full.left, alive = 1, []
    monkeypatch.setattr(
        stepper,
        "release_memory",
        lambda _: alive.append(sum(one() is not None for one in Activation.alive)),
    )
    model = Wide()
    with make_session(model, dataset=Points(BATCH), plan=plan_of_one_step()) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                loop(one, model, features, labels)
    assert alive == [0]


def plan_of_one_step():
    return make_tiny_plan((BATCH,), epochs=1, samples=BATCH)


def test_a_second_failure_may_be_in_the_repeated_forward_pass():
    Full.left, model, sizes = 1, Wide(), []

    def loss_of(features, labels):
        sizes.append(len(features))
        if len(features) == BATCH // 2:
            raise RuntimeError(BYTES)
        return functional.cross_entropy(model(features), labels)

    with make_session(model, dataset=Points(BATCH), plan=plan_of_one_step()) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(lambda f=features, y=labels: loss_of(f, y))
    assert sizes == [8, 4, 2, 2, 2, 2]


def test_a_released_loss_keeps_its_value_and_says_why_it_has_no_graph():
    weight = torch.ones(3, requires_grad=True)
    outputs = weight.exp()
    loss = outputs.square().sum()
    value = float(loss.detach())
    release_graph(loss)
    assert float(loss) == value
    assert not loss.requires_grad
    with pytest.raises(RuntimeError, match=r"memory ran out .* its graph was freed"):
        outputs.sum().backward()


def test_functions_in_python_may_be_through_when_memory_runs_out():
    """As compiled parts of a network may be, of which nothing is left to free by then."""
    Full.left, model, sizes = 1, make_model(), []
    with make_session(model, dataset=Points(BATCH), plan=plan_of_one_step()) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                sizes.append(len(features))
                outputs = Activation.apply(Full.apply(model(features)))
                one.step(functional.cross_entropy(outputs, labels))
    assert sizes == [BATCH, BATCH // 2, BATCH // 2]


def test_a_run_that_ends_for_want_of_memory_quotes_what_was_said_of_it():
    """Libraries of a GPU say much the same where they lack something else."""

    def fails():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")

    def loop():
        with make_session(dataset=Points(BATCH), plan=plan_of_one_step()) as one:
            for _ in one.epochs():
                for _ in one.batches():
                    one.step(fails)

    line = r"memory for 1 sample .* \(RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INIT"
    with pytest.raises(TrainingError, match=line):
        loop()


def test_releasing_frees_what_layers_of_torch_have_saved():
    weight = torch.ones(3, requires_grad=True)
    outputs = weight.exp()  # saves its result
    deeper = outputs.square()  # saves its input
    release_graph(deeper.sum())
    assert deeper.grad_fn is not None
    for node, name in ((deeper.grad_fn, "_saved_self"), (outputs.grad_fn, "_saved_result")):
        with pytest.raises(RuntimeError, match="its graph was freed"):
            getattr(node, name)


def test_steps_without_weight_are_no_infinite_gradients(tmp_path):
    model = make_model()
    before = model.weight.detach().clone()
    steps = MAX_BAD_STEPS + 2
    plan = make_tiny_plan((5,), epochs=1, samples=5 * steps)
    with make_session(model, dataset=Points(5 * steps), plan=plan, run_folder=tmp_path) as one:
        for _ in one.epochs():
            for features, _labels in one.batches():
                assert not one.step(model(features).sum() * 0, weight=0)
    assert torch.equal(model.weight, before)
    assert summary_in(tmp_path).epochs[0].steps == steps


def test_steps_without_weight_do_not_hide_infinite_gradients():
    steps = 2 * MAX_BAD_STEPS
    plan = make_tiny_plan((5,), epochs=1, samples=5 * steps)
    model = make_model()
    numbers = itertools.count()

    def loop(one):
        for _ in one.epochs():
            for features, _ in one.batches():
                one.step(model(features).sum() * float("inf"), weight=5 * (next(numbers) % 2))

    with (
        make_session(model, dataset=Points(5 * steps), plan=plan) as one,
        pytest.raises(TrainingError, match="infinite or not a number for 20 steps"),
    ):
        loop(one)
    assert next(numbers) == 2 * MAX_BAD_STEPS


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 3, sparse=True)
        self.linear = nn.Linear(3, 3)

    def forward(self, features):
        return self.linear(self.embedding(features[:, 0].abs().long() % 10))


@pytest.mark.parametrize("micro", [64, 3])
def test_a_sparse_gradient_gets_one_clear_line(micro):
    model = Words()
    plan = make_tiny_plan((5,), epochs=1, micro=micro)
    with (
        pytest.raises(TrainingError, match=r"shape \(10, 3\) is sparse.*sparse=False"),
        make_session(model, plan=plan) as one,
    ):
        train(one)


class Named(NamedTuple):
    many: int
    values: torch.Tensor


@dataclass(frozen=True)
class Told:
    many: int
    values: torch.Tensor


@pytest.mark.parametrize(
    "form",
    [lambda x: x, lambda x: {"values": x}, lambda x: [1, x], partial(Named, 1), partial(Told, 1)],
    ids=["tensor", "dictionary", "list", "named tuple", "data class"],
)
def test_an_output_of_any_form_comes_to_depend_on_what_other_parts_use(form):
    """As `DistributedDataParallel` looks into it for parameters that are used."""
    weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    output = recovering._with(form(2 * weight), other[:0].sum())
    values = output if torch.is_tensor(output) else getattr(output, "values", None)
    if not torch.is_tensor(values):
        values = output["values"] if isinstance(output, dict) else output[1]
    assert type(output) is type(form(weight))
    values.sum().backward()
    assert (weight.grad.tolist(), other.grad.tolist()) == ([2, 2], [0, 0])


@pytest.mark.parametrize("failures", [1, 2])
def test_parts_are_computed_without_the_activations_of_the_failed_batch(failures):
    """The trainer holds its loss, and with it all that a GPU lacks the memory for."""
    Activation.alive.clear()
    Full.left, model = failures, Wide()
    batch = torch.randn(BATCH, model.linear.in_features), torch.arange(BATCH) % 3

    def loss_of(part):
        return functional.cross_entropy(model(part[0]), part[1])

    parts = recovering.Recovering(model.parameters(), lambda _: None)
    loss = parts.loss(loss_of, batch)
    value = float(loss.detach())
    parts.backward(loss.backward)
    parts.close()
    assert len(model.seen) > 2
    assert all(alive == 0 for _, alive in model.seen)
    assert float(loss) == value
    found = [one.grad for one in model.parameters()]
    wanted = torch.autograd.grad(loss_of(batch), list(model.parameters()))
    torch.testing.assert_close(found, list(wanted))


@pytest.mark.parametrize("tight", ["forward", "backward"])
def test_layers_that_are_frozen_and_unfrozen_on_the_way_have_the_gradient_of_the_whole_batch(tight):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = torch.randn(BATCH, 4), torch.arange(BATCH) % 3

    def loss_of(part):
        if tight == "forward" and len(part[0]) > room:
            raise RuntimeError(BYTES)
        hidden = model[:2](part[0])
        hidden = Tight.apply(hidden, room) if tight == "backward" else hidden
        return functional.cross_entropy(model[2](hidden), part[1])

    parts = recovering.Recovering(model.parameters(), lambda _: None)
    for first, last, room in ((False, True, BATCH), (True, True, 3), (True, False, 1)):
        model[0].requires_grad_(first)
        model[2].requires_grad_(last)
        model.zero_grad()
        loss = parts.loss(loss_of, batch)
        parts.backward(loss.backward)
        trained = [one for one in model.parameters() if one.requires_grad]
        found, room = [one.grad for one in trained], BATCH
        torch.testing.assert_close(found, list(torch.autograd.grad(loss_of(batch), trained)))
    parts.close()


@pytest.mark.parametrize("tight", ["forward", "backward"])
def test_layers_that_a_training_step_unfreezes_itself_have_the_gradient_of_the_batch(tight):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = torch.randn(BATCH, 4), torch.arange(BATCH) % 3

    def loss_of(part, unfrozen):
        model[0].requires_grad_(unfrozen)
        hidden = model[:2](part[0])
        hidden = Tight.apply(hidden, room) if tight == "backward" else hidden
        return functional.cross_entropy(model[2](hidden), part[1])

    model[0].requires_grad_(False)
    parts = recovering.Recovering(model.parameters(), lambda _: None)
    parts.most = 3 if tight == "forward" else None
    for unfrozen, room in ((False, BATCH), (True, 3), (False, BATCH)):
        model.zero_grad()
        loss = parts.loss(partial(loss_of, unfrozen=unfrozen), batch)
        parts.backward(loss.backward)
        trained = [one for one in model.parameters() if one.requires_grad]
        found, room = [one.grad for one in trained], BATCH
        wanted = torch.autograd.grad(loss_of(batch, unfrozen), trained)
        torch.testing.assert_close(found, list(wanted))
    parts.close()


def narrow_gradients(tight, scaler, factor=1e-5):
    """Of a loss so small that float16 holds its gradients only if it is scaled, and in float32.

    Memory runs out for more than 16 of 64 samples: in the forward pass, or in the backward pass.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs, labels = torch.randn(64, 32), torch.randint(10, (64,))

    def loss_of(batch):
        if tight == "forward" and len(batch[0]) > 16:
            raise RuntimeError(BYTES)
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = model[:2](batch[0])
            hidden = Tight.apply(hidden, 16) if tight == "backward" else hidden
            outputs = model[2](hidden)
        return factor * functional.cross_entropy(outputs.float(), batch[1])

    parts = recovering.Recovering(model.parameters(), lambda _: None, scaler)
    loss = parts.loss(loss_of, (inputs, labels))
    parts.backward(lambda: scaler.scale(loss).backward())
    parts.close()
    scale = scaler.get_scale()
    found = torch.cat([one.grad.flatten() for one in model.parameters()]) / scale
    whole = factor * functional.cross_entropy(model(inputs), labels)
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    return found, torch.cat([one.flatten() for one in wanted]), loss, whole


@pytest.mark.parametrize("tight", ["forward", "backward"])
def test_losses_of_parts_are_scaled_as_the_trainer_scales_that_of_the_batch(tight):
    found, wanted, loss, whole = narrow_gradients(tight, torch.amp.GradScaler("cpu"))
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    torch.testing.assert_close(loss, whole, rtol=0.01, atol=0)


def test_a_scale_that_is_too_much_for_a_part_is_halved_there():
    found, wanted, *_ = narrow_gradients("backward", torch.amp.GradScaler("cpu", 2.0**40))
    assert not found[-10:].isfinite().all()  # of the last layer, which had its own by then
    first = 32 * 64 + 64
    assert (found - wanted)[:first].norm() < 0.05 * wanted[:first].norm()


def test_gradients_that_no_scale_makes_finite_are_left_to_the_trainer():
    scaler = torch.amp.GradScaler("cpu")
    found, *_ = narrow_gradients("backward", scaler, factor=float("inf"))
    assert not found.isfinite().all()
