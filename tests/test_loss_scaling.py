"""Training in float16: losses are scaled, steps left out, on all workers alike."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.distributed.group import Group
from batchwright.probing.measure.precision import choose_precision
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.workload import host, loss_scaling
from batchwright.workload.loss_scaling import FIRST, LossScale
from samples import make_plan
from test_host_waits import GAIN, with_ags
from test_precision import module as precisions
from test_probe import tiny_bench, tiny_image_data, tiny_job
from test_session import make_model, make_session, make_tiny_plan

CPU = torch.device("cpu")
FLOAT16 = make_tiny_plan(precision="float16")


def test_the_scale_goes_as_that_of_pytorch(monkeypatch):
    monkeypatch.setattr(loss_scaling, "AFTER_STEPS", 3)
    theirs = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=3)
    ours = LossScale.of("float16")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for good in map(bool, [1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]):
        theirs.scale(weight.sum() * (1 if good else math.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours = ours.after(good=good)
        assert ours.scale == theirs.get_scale()


def test_the_scale_is_never_below_1():
    scale = LossScale(2.0)
    for _ in range(1100):  # a float has room for 1074 halvings of 1, and then is 0
        scale = scale.after(good=False)
    assert scale == LossScale(1.0)


def test_only_float16_is_scaled():
    assert LossScale.of("float16").scale == 2**16
    assert LossScale.of("bfloat16").scale == LossScale.of("float32").scale == 1
    loss = torch.tensor(60000.0, dtype=torch.float16)
    assert LossScale(2.0**16).scaled(loss, 0.5).item() == 60000.0 * 2**15  # no float16 holds that
    assert LossScale().scaled(loss, 0.5).dtype == torch.float16


class Plain(nn.Linear):
    """Computes in float32 whatever is cast around it, so that only the scaling differs."""

    def forward(self, features):
        with torch.autocast("cpu", enabled=False):
            return super().forward(features)


def trained(*, plan=FLOAT16, breaks=(), each_step=lambda one: None, **options):
    """Weights after a training in which the gradients of some steps are infinite."""
    torch.manual_seed(0)
    model, steps, updated = Plain(4, 3), [0], []
    with make_session(model, plan=plan, **options) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                loss = functional.cross_entropy(model(features), labels)
                updated.append(one.step(loss * (math.inf if steps[0] in breaks else 1)))
                steps[0] += 1
                each_step(one)
        state = one._run.state
    return model.weight.detach().clone(), updated, state


KINDS = {
    "plain": ({}, {}, lambda plan: plan),
    "accumulation": ({"micro": 4}, {}, lambda plan: plan),
    "clip": ({}, {"clip_norm": 0.01}, lambda plan: plan),
    "gain": ({"micro": 4, "rule": GAIN}, {}, lambda plan: plan),
    "ags": ({"micro": 4}, {}, with_ags),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_changes_no_digit_of_what_is_learnt(kind):
    keys, options, change = KINDS[kind]
    whole, _, plainly = trained(plan=change(make_tiny_plan(**keys)), **options)
    plan = change(make_tiny_plan(precision="float16", **keys))
    scaled, _, state = trained(plan=plan, **options)
    assert torch.equal(whole, scaled)
    assert state.noise == plainly.noise
    assert state.loss_scale == LossScale(FIRST, state.steps)
    assert plainly.loss_scale is None


def test_it_trains_as_pytorch_does_in_float16():
    ours, theirs, batches = make_model(), make_model(), []
    with make_session(ours, plan=make_tiny_plan(precision="float16")) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                batches.append((features, labels))
                one.step(functional.cross_entropy(ours(features), labels))
        scale = one._run.state.loss_scale
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for features, labels in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(theirs(features), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scale.scale == scaler.get_scale()
    assert torch.equal(ours.weight, theirs.weight)
    assert not torch.equal(ours.weight, make_model().weight)


def test_a_step_whose_gradient_overflows_is_left_out_and_the_scale_halved():
    scales = []
    _, updated, state = trained(
        breaks=(1, 2),
        each_step=lambda one: scales.append(one._run.state.loss_scale.scale),
    )
    assert updated[:5] == [True, False, False, True, True]
    assert scales[:5] == [FIRST, FIRST / 2, FIRST / 4, FIRST / 4, FIRST / 4]
    assert state.loss_scale.good_steps == len(updated) - 3


def test_a_mean_over_pixels_is_scaled_like_a_mean_over_samples():
    """Else gradients would overflow 18 times more before the scale is right."""
    model, pixels, updated = make_model(), 2.0**18, []
    with make_session(model, plan=FLOAT16) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                loss = functional.cross_entropy(model(features), labels)
                updated.append(one.step(loss, weight=pixels * len(labels)))
        scale = one._run.state.loss_scale
    assert updated.count(False) <= 3
    assert scale.weight == pixels
    assert scale.factor == scale.scale / pixels
    assert LossScale().after(good=True, weight=0.3).weight == 1
    assert LossScale().after(good=True, weight=5).weight == 8


def test_the_scale_is_kept_in_checkpoints():
    state = RunState(loss_scale=LossScale(2.0**9, 17))
    values = state.values()
    again = RunState()
    again.restore(values, EpochMeter())
    assert again.loss_scale == LossScale(2.0**9, 17)
    del values["loss_scale"]  # as older versions have written them
    again.restore(values, EpochMeter())
    assert again.loss_scale is None


def test_a_resumed_run_goes_on_with_its_scale(tmp_path):
    seen, resumed = [], []

    def end(one):
        seen.append(one._run.state.loss_scale)
        if len(seen) == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    plan, folder = make_tiny_plan(precision="float16", epochs=3), tmp_path / "run"
    with pytest.raises(SystemExit):
        trained(plan=plan, breaks=(1,), each_step=end, run_folder=folder)

    def note(one):
        resumed.append(one._run.state.loss_scale)

    trained(plan=plan, each_step=note, run_folder=folder, resume=True)
    assert seen[-1].scale == FIRST / 2
    assert resumed[0] == seen[-1].after(good=True)


def breaks_on_one(rank):
    plan = make_tiny_plan((6, 6), precision="float16", micro=3)
    scales = []
    _, updated, _ = trained(
        plan=plan,
        breaks=(2,) if rank == 1 else (),
        each_step=lambda one: scales.append(one._run.state.loss_scale),
    )
    return updated, scales


@pytest.mark.slow
def test_all_workers_leave_out_the_step_of_one_whose_gradient_overflows(crew):
    (first, scales), (second, others) = crew.together(breaks_on_one, workers=2)
    assert first == second
    assert scales == others
    assert FIRST / 2 in {one.scale for one in scales if one is not None}


def test_a_probe_scales_and_leaves_out_steps_as_a_training_does():
    bench = tiny_bench(precision="float16")
    first = bench.scale.scale
    assert first > 1
    before = [parameter.detach().clone() for parameter in bench.trained]
    supply = bench.supply(4, bench.side)
    usual = bench._loss
    bench._loss = lambda outputs, labels: usual(outputs.float(), labels) * math.inf
    assert bench.try_step(supply)
    assert bench.scale == LossScale(first / 2)
    assert all(torch.equal(p, b) for p, b in zip(bench.trained, before, strict=True))
    bench._loss = usual
    bench.step(supply)
    assert all(parameter.isfinite().all() for parameter in bench.trained)
    assert bench.scale == LossScale(first / 2, 1)


@pytest.mark.parametrize(
    ("bfloat16", "capability", "half"),
    [(True, (9, 0), "bfloat16"), (False, (7, 5), "float16"), (False, (6, 1), None)],
    ids=["H100", "T4", "P100"],
)
def test_gpus_compute_in_the_16_bits_that_they_have(monkeypatch, bfloat16, capability, half):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert host.half_of(torch.device("cuda", 0)) == half


def test_float16_is_compared_where_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(precisions, "half_of", lambda device: "float16")
    job = tiny_job(precision="auto", global_batch=4)
    choice = choose_precision(job, tiny_image_data(), Group(CPU), seconds=0.2)
    assert [one.precision for one in choice.times] == ["float32", "float16"]


def test_the_format_of_a_job_is_that_of_its_plan():
    assert make_plan(precision="float16").precision == "float16"
    assert tiny_job(precision="float16").precision == "float16"
