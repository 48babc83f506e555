"""An average of the weights is what is evaluated, kept and delivered, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import batchwright as bw
from batchwright.errors import BatchwrightError
from batchwright.planning.planner import make_plan
from batchwright.training.evaluate import weight_average
from batchwright.training.evaluate.weight_average import WeightAverage
from batchwright.workload.starting_weights import trained_weights
from batchwright.workload.task import build_network
from far import Operations
from samples import make_profile
from test_objectives import PROFILE, reason
from test_session import (
    CLASSES,
    FEATURES,
    Points,
    make_model,
    make_session,
    make_tiny_plan,
    summary_in,
    top1,
    train,
    weights_of,
)

STEPS = 5  # of an epoch of a tiny plan
HELD_OUT = 21
MOST_OPERATIONS = 28
"""Of an update of the average of `resnet18` on a GPU."""


def averaging(back=0.5, **given):
    return make_tiny_plan(**given).model_copy(update={"average_epochs": back})


def logits(outputs, labels):
    """Something that any change of a weight changes."""
    return {"first": outputs[:, 0]}


def test_it_is_the_exponential_average_that_pytorch_makes():
    """Every step counts where the average looks back on few."""
    model, back = make_model(extras=True), 2 * STEPS
    one = WeightAverage(model, epochs=2)

    @torch.no_grad()
    def exponential(means, now, count):
        for mean, live in zip(means, now, strict=True):
            if mean.is_floating_point():
                mean.lerp_(live, max(1 / back, 1 / (int(count) + 1)))

    reference = AveragedModel(model, multi_avg_fn=exponential, use_buffers=True)
    for step in range(4 * STEPS):
        features = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(step))
        model(features)  # its statistics follow
        with torch.no_grad():
            for weight in model.parameters():
                weight += torch.randn(weight.shape)
        one.step(STEPS)
        reference.update_parameters(model)
    own = weights_of(model)
    with one.in_place():
        torch.testing.assert_close(weights_of(model), weights_of(reference.module))
        torch.testing.assert_close(model[1].running_mean, reference.module[1].running_mean)
    assert torch.equal(weights_of(model), own)


def test_tensors_that_are_taken_in_together_have_the_bits_of_single_ones(monkeypatch):
    """Whatever their format and layout, and however many at once."""
    monkeypatch.setattr(weight_average, "_IN_CACHE", 100)
    model = nn.Sequential(
        nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(7),
        nn.Conv2d(7, 5, 1).bfloat16(),
        nn.Linear(5, 3).double(),
        nn.PReLU(),
    )
    model[3].weight.data = torch.randn(3, 10).double()[:, ::2]
    one = WeightAverage(model, epochs=1)
    live = dict(model.named_parameters())
    live |= {name: value for name, value in model.named_buffers() if "running" in name}
    means = {
        name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        for name, value in live.items()
    }
    for step in range(8):
        with torch.no_grad():
            for value in live.values():
                value += torch.randn(value.shape).to(value.dtype)
            model[0].weight[0, 0, 0, :2] = torch.tensor([torch.nan, torch.inf])
        one.step(STEPS)
        for name, mean in means.items():
            now = live[name].detach().to(mean.dtype)
            mean.lerp_(torch.where(torch.isfinite(now), now, mean), max(1 / STEPS, 1 / (step + 1)))
    assert len(one._parts) > len({value.dtype for value in live.values()})
    with one.in_place():
        for name, mean in means.items():
            assert torch.equal(live[name], mean.to(live[name].dtype)), name
        assert live["0.weight"].is_contiguous(memory_format=torch.channels_last)
        assert all(value.data_ptr() % 64 == 0 for value in live.values())


def test_an_update_takes_a_gpu_few_operations():
    """One by one the 102 tensors took 612."""
    one = WeightAverage(build_network("resnet18", classes=100, side=32).to("meta"), epochs=0.5)
    with Operations() as seen:
        one.step(64)
    assert seen.names.total() <= MOST_OPERATIONS, seen.names


def test_a_long_look_back_takes_the_weights_in_every_few_steps():
    model = make_model()
    one = WeightAverage(model, epochs=0.5)
    for _ in range(640):
        one.step(640)
    assert one.updates == 1 + 639 // 10  # the first step, then 32 in half an epoch


@pytest.mark.parametrize("extras", [False, True])
def test_training_goes_on_as_without_it(extras):
    """Also with a backward pass that an evaluation comes in the middle of."""

    def trained(plan):
        model, seen = make_model(extras=extras), []
        with make_session(model, plan=plan) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    loss = functional.cross_entropy(model(features), labels)
                    one.evaluate(Points(4), top1)
                    one.step(loss)
                    seen += [copy.deepcopy(value) for value in model.state_dict().values()]
        return seen

    plain, other = trained(make_tiny_plan()), trained(averaging())
    assert len(plain) == len(other)
    assert all(map(torch.equal, plain, other))


def test_a_step_that_is_left_out_is_no_step_of_it():
    model, done = make_model(), []
    with make_session(model, plan=averaging(2.0)) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                loss = functional.cross_entropy(model(features), labels)
                done.append(one.step(loss * torch.inf if len(done) == 2 else loss))
        assert done.count(False) == 1
        assert one._run._setup.average.updates == done.count(True)


def test_evaluations_see_it_and_another_model_is_itself():
    model = make_model(extras=True)
    with make_session(model, plan=averaging()) as one:
        before = one.evaluate(Points(HELD_OUT), logits)
        assert before == one.evaluate(Points(HELD_OUT), logits, model=copy.deepcopy(model))
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features), labels))
            average = one.evaluate(Points(HELD_OUT), logits)
            wrapped = torch.nn.Sequential(model)
            assert average == one.evaluate(Points(HELD_OUT), logits, model=wrapped)
            assert average != one.evaluate(Points(HELD_OUT), logits, model=copy.deepcopy(model))


def test_after_the_last_epoch_the_model_has_it():
    """What a loop of one's own saves afterwards is what was evaluated."""
    model = make_model(extras=True)
    with make_session(model, plan=averaging()) as one:
        train(one)
        average = one.evaluate(Points(HELD_OUT), logits)
        assert average == one.evaluate(Points(HELD_OUT), logits, model=copy.deepcopy(model))


def test_so_has_one_whose_loop_is_left_behind_an_epochs_last_step():
    """As early stopping leaves it."""
    model = make_model(extras=True)
    with make_session(model, plan=averaging()) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features), labels))
            with one._run._setup.average.in_place():
                average = weights_of(model)
            assert not torch.equal(average, weights_of(model))
            break
    assert torch.equal(average, weights_of(model))


def test_masks_stay_and_values_that_are_not_finite_are_passed_over():
    model = make_model(extras=True)
    mask = torch.full((3, 3), -torch.inf).triu(1)
    model.register_buffer("mask", mask.clone())
    model[0].requires_grad_(False)
    one, frozen = WeightAverage(model, epochs=1), weights_of(model[0])
    for step in range(8):
        with torch.no_grad():
            model[3].bias.fill_(torch.nan if step == 4 else step)
        one.step(STEPS)
    with one.in_place():
        assert torch.equal(model.mask, mask)
        assert torch.equal(weights_of(model[0]), frozen)
        assert torch.isfinite(model[3].bias).all()
    assert one.lasting_bytes < sum(4 * p.numel() for p in model.parameters())


def test_weights_of_sixteen_bits_follow_slowly_but_surely():
    model = make_model().bfloat16()
    one = WeightAverage(model, epochs=32)
    for value in [0.0] * 100 + [1.0] * 2000:
        with torch.no_grad():
            model.bias.fill_(value)
        one.step(STEPS)
    with one.in_place():
        assert model.bias.dtype == torch.bfloat16
        assert (model.bias > 0.95).all()
    assert (model.bias == 1).all()


@pytest.mark.parametrize("at", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 7))])
def test_a_resumed_run_has_the_same_average(tmp_path, at):
    plan = averaging(1, epochs=3)

    def piece(folder, **how):
        model = make_model(extras=True)
        with make_session(model, plan=plan, run_folder=tmp_path / folder, resume=True) as one:
            train(one, **how)
        return one, model

    piece("whole")
    with pytest.raises(SystemExit, match="143"):
        piece("parts", until=at)
    piece("parts")
    whole, parts = (
        torch.load(tmp_path / folder / "checkpoints" / "last.pt", weights_only=True)
        for folder in ("whole", "parts")
    )
    assert all(torch.equal(whole["average"][name], one) for name, one in parts["average"].items())
    assert any(
        not torch.equal(whole["average"][name], whole["model"][name]) for name in whole["model"]
    )
    first, second = (summary_in(tmp_path / folder).epochs for folder in ("whole", "parts"))
    assert [one.val_correct for one in first] == [one.val_correct for one in second]


def test_so_has_one_that_was_stopped_by_an_evaluation_between_two_steps(tmp_path):
    def piece(folder, until=None):
        model, steps, plan = make_model(extras=True), 0, averaging(1)
        with make_session(model, plan=plan, run_folder=tmp_path / folder, resume=True) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(model(features), labels))
                    steps += 1
                    if steps == until:
                        one.stop()
                    one.evaluate(Points(4), top1)

    piece("whole")
    with pytest.raises(SystemExit, match="143"):
        piece("parts", until=3)
    piece("parts")
    whole, parts = (
        torch.load(tmp_path / folder / "checkpoints" / "last.pt", weights_only=True)["average"]
        for folder in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], one) for name, one in parts.items())


@pytest.mark.parametrize("same", [True, False])
def test_averages_of_sixteen_bits_are_resumed_without_rounding(same):
    def averaged(model, steps):
        one = WeightAverage(model, epochs=4)
        for step in range(steps):
            with torch.no_grad():
                model.bias.copy_(torch.arange(CLASSES) + (1 + step) / 3)
            one.step(STEPS)
        return one

    one = averaged(make_model().bfloat16(), 3)
    with one.in_place():
        state = copy.deepcopy(one._model.state_dict())
    again = averaged(make_model().bfloat16(), 0)
    again.restore(state, copy.deepcopy(one.values()), same_workers=same)
    assert all(map(torch.equal, one.shared, again.shared))


def test_a_checkpoint_has_it_by_the_names_of_weights_and_statistics():
    names = {"1.running_mean": 3.0, "1.running_var": 4.0}
    model = make_model(extras=True)
    one = WeightAverage(model, epochs=1)
    one.step(STEPS)
    assert {*one.values()} == {"buffers", "updates", "steps"}
    assert {*one.values()["buffers"]} == {*names}
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    own = {name: torch.full((8,), value) for name, value in names.items()}
    one.restore(state, {"buffers": own, "updates": 7, "steps": 1}, same_workers=True)
    assert one.updates == 7
    with one.in_place():
        assert (weights_of(model) == 2).all()
        assert all((model.state_dict()[name] == value).all() for name, value in names.items())


def test_what_a_checkpoint_delivers_is_what_was_evaluated(tmp_path):
    model = make_model()
    with make_session(model, plan=averaging(1), run_folder=tmp_path / "run") as one:
        train(one)
        wanted = one.evaluate(Points(HELD_OUT), logits)
    content = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    for value in content["average"].values():
        assert value.untyped_storage().nbytes() == value.nbytes  # nothing else is written with it
    delivered = make_model()
    delivered.load_state_dict(trained_weights(content))
    with make_session(delivered) as other:
        assert other.evaluate(Points(HELD_OUT), logits) == wanted
    for other in ({}, 0.91, None):  # in a checkpoint of somebody else
        assert trained_weights({**content, "average": other}) is content["model"]


def test_a_plan_to_a_target_averages_and_counts_the_memory():
    goal = PROFILE.job.goal.model_copy(update={"accuracy": 0.5, "objective": "target-accuracy"})
    keys = {"epochs": 30, "goal": goal, "global_batch": 64}
    without, plan = (
        make_plan(PROFILE, PROFILE.job.model_copy(update={**keys, "average_weights": how}))
        for how in ("off", "auto")
    )
    assert (without.average_epochs, plan.average_epochs) == (None, 0.5)
    assert reason(plan, "average of weights").source == "assumed"
    more = [
        chosen.peak_bytes.value - other.peak_bytes.value
        for chosen, other in zip(plan.considered, without.considered, strict=True)
    ]
    assert set(more) == {PROFILE.network.trained_bytes}
    assert plan.held_out == without.held_out  # steps of a probe, which have no average


def test_a_plan_without_a_target_does_so_where_it_is_asked_to():
    profile = make_profile()
    assert bw.plan(profile).average_epochs is None
    asked = bw.plan(profile, ["average_weights=on"])
    assert asked.average_epochs == 0.5
    assert reason(asked, "average of weights").source == "asked"


@pytest.mark.parametrize(
    ("keys", "named"), [({"method": "dual-batch"}, "method"), ({"launch": "virtual"}, "launch")]
)
def test_workers_that_cannot_average_refuse_to(keys, named):
    with pytest.raises(BatchwrightError, match=f"average_weights=on with {named}="):
        bw.plan(make_profile(), average_weights="on", workers=2, **keys)
