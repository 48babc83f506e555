"""The public handle, in one process: a user's own loop on a small data set."""

from __future__ import annotations

import errno
import io
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import batchwright as bw
from batchwright import Session
from batchwright.algorithms.learning_rate import rate_factor
from batchwright.distributed.processes import STOP_SIGNALS
from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import (
    ArgumentError,
    DataError,
    FileError,
    Interrupted,
    PlanError,
    TrainingError,
)
from batchwright.records import AgsRule, LearningRateRule, Plan, RunSummary, Stage
from batchwright.records.documents import read_record
from batchwright.records.lines.line_files import lines_of
from batchwright.records.lines.lost_lines import lines_that_count
from batchwright.storage.locks import LOCK_FILE
from batchwright.training import all_reduce_run, session, session_checks, signals
from batchwright.training.batches.feeding import SeededItems
from batchwright.training.batches.randomness import seed_item
from batchwright.training.batches.sampler import epoch_order
from batchwright.training.checkpoints import checkpoint_manager, checkpoint_writer
from batchwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.evaluate.evaluation import outputs_and_labels
from batchwright.training.recorder import Recorder
from batchwright.training.session_checks import (
    as_weights,
    refuse_other_things,
    refuse_unlike_workers,
    refuse_without_float64,
)
from batchwright.training.signals import StopRequest
from batchwright.training.step import clock
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.workload.data.random_numbers import put_aside
from batchwright.workload.muon import muon
from run_lines import typed
from samples import make_data, make_epoch, make_job, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, FEATURES, CLASSES = 22, 4, 3
BATCH = 5  # 22 samples are 4 full steps and a tail of 2


class Points(Dataset):
    """Points whose label is hidden in one feature; ``noisy`` adds to each what chance gives."""

    def __init__(self, samples=SAMPLES, *, noisy=False):
        self.samples, self.noisy = samples, noisy
        self.seen = []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.seen.append(index)
        features = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        features[index % CLASSES] += 2
        if self.noisy:
            features += torch.rand(FEATURES) + random.random() + np.random.rand()  # noqa: NPY002
        return features, index % CLASSES


class Images(Dataset):
    """Tiny images in a dict."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"pixels": torch.full((3, 8, 8), float(index)), "label": index % CLASSES}


def make_tiny_plan(
    batches=(BATCH,),
    *,
    epochs=2,
    samples=SAMPLES,
    micro=64,
    precision="float32",
    sides=(8,),
    factor=1,
    **job,
):
    """A plan for `Points`: constant rate, ``factor`` times the base, unless ``rule`` is another."""
    rule = job.pop("rule", None) or LearningRateRule(
        base=0.1,
        base_batch=BATCH,
        scaling="none" if factor == 1 else "linear",
        peak=0.1 * factor,
        warmup_epochs=0,
        decay="none",
    )
    stages = tuple(
        Stage(
            epochs=epochs,
            resolution=side,
            learning_rate=rule.peak,
            dropout=0,
            augmentation="none",
            local_batch_sizes=batches,
            micro_batch_size=micro,
        )
        for side in sides
    )
    return make_plan(
        job=make_job(workers=len(batches), timeout=200, **job),
        data=make_data(train_samples=samples, classes=tuple("abc")),
        update=job.get("optimizer", "sgd"),
        precision=precision,
        learning_rate=rule,
        stages=stages,
        considered=(),
        reasons=(),
    )


def make_model(*, extras=False):
    """Linear; with ``extras`` also what makes an exact resume hard."""
    torch.manual_seed(0)
    if not extras:
        return nn.Linear(FEATURES, CLASSES)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    )


def make_session(model=None, optimizer=None, dataset=None, *, plan=None, **options):
    model = model or make_model()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loaders": 0, "plan": plan or make_tiny_plan()} | options
    return Session(model, optimizer, dataset or Points(), **options)


def train(one, *, until=None, each_step=lambda: None):
    """The usual loop; ``until`` steps, then the process is asked to stop."""
    steps = 0
    for _ in one.epochs():
        for features, labels in one.batches():
            one.step(functional.cross_entropy(one.model(features), labels))
            each_step()
            steps += 1
            if steps == until:
                os.kill(os.getpid(), signal.SIGTERM)
        one.evaluate(Points(7), top1)


def wait_until(true):
    """Checkpoints are written while training goes on."""
    end = time.monotonic() + 500
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def run_loop(one, step):
    """The loop alone, with any ``step(features, labels)``."""
    with one:
        for _ in one.epochs():
            for features, labels in one.batches():
                step(features, labels)


def top1(outputs, labels):
    return outputs.argmax(dim=1) == labels


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def summary_in(folder):
    return RunSummary.model_validate_json((folder / "summary.json").read_text())


# ------------------------------------------------------------------------------------ the update


def test_each_group_has_the_plans_rate_in_proportion_to_its_own_first():
    rule = LearningRateRule(
        base=0.1, base_batch=BATCH, scaling="linear", peak=0.4, warmup_epochs=1, decay="cosine"
    )
    model = make_model()
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias],
                                 "lr": 0.02}])  # fmt: skip
    rates, seen = [], 0
    with make_session(model, optimizer, plan=make_tiny_plan(rule=rule, epochs=3)) as one:
        train(one, each_step=lambda: rates.append([g["lr"] for g in optimizer.param_groups]))
    sizes = [5, 5, 5, 5, 2] * 3
    for (first, second), size in zip(rates, sizes, strict=True):
        factor = rate_factor(seen, rule=rule, samples_per_epoch=SAMPLES, epochs=3)
        assert first == pytest.approx(0.1 * factor * 4)
        assert second == pytest.approx(0.02 * factor * 4)
        seen += size
    assert rates[0][0] == pytest.approx(0.1)  # the warm-up begins at the small batch's rate


def test_the_next_session_begins_at_the_optimizers_first_rate(tmp_path):
    rule = LearningRateRule(
        base=0.1, base_batch=BATCH, scaling="linear", peak=0.4, warmup_epochs=0, decay="cosine"
    )
    model, rates = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for until in (7, None):  # stopped, and gone on with in the same process
        with (
            pytest.raises(Interrupted) if until else nullcontext(),
            make_session(
                model,
                optimizer,
                plan=make_tiny_plan(epochs=2, rule=rule),
                run_folder=tmp_path / "run",
                resume=until is None,
                exit_on_stop=False,
            ) as one,
        ):
            train(one, until=until, each_step=lambda: rates.append(optimizer.param_groups[0]["lr"]))
        assert optimizer.param_groups[0]["lr"] == 0.2
    wanted = [
        0.8 * rate_factor(at, rule=rule, samples_per_epoch=SAMPLES, epochs=2)
        for at in (0, 5, 10, 15, 20, 22, 27, 32, 37, 42)
    ]
    assert rates == pytest.approx(wanted)


def test_rates_of_ones_own_are_left_alone_with_a_warning():
    rule = LearningRateRule(
        base=0.1, base_batch=BATCH, scaling="linear", peak=0.4, warmup_epochs=0, decay="cosine"
    )
    rates = set()
    with pytest.warns(UserWarning, match="the plan wanted 4 times your rate at global batch 5"):
        one = make_session(plan=make_tiny_plan(rule=rule), learning_rate="mine")
    with one:
        train(one, each_step=lambda: rates.add(one.optimizer.param_groups[0]["lr"]))
    assert rates == {0.1}


def test_rates_of_ones_own_are_no_news_where_the_plan_wants_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(learning_rate="mine").__exit__(None, None, None)


@pytest.mark.parametrize(
    ("update", "build", "how"),
    [
        ("muon", "SGD", r"take bw\.muon\(model, lr=\.\.\.\), or plan with optimizer=sgd"),
        ("muon", "AdamW", r"take bw\.muon\(model, lr=\.\.\.\), or plan with optimizer=sgd"),
        ("sgd", "Muon", "take an optimizer like sgd, or plan with optimizer=muon"),
        ("adamw", "Muon", "take an optimizer like adamw, or plan with optimizer=muon"),
    ],
)
def test_an_optimizer_that_the_plan_is_not_for_is_told(update, build, how):
    model = make_model()
    made = muon(model, 0.1) if build == "Muon" else getattr(torch.optim, build)(model.parameters())
    plan = make_tiny_plan().model_copy(update={"update": update})
    with pytest.warns(
        UserWarning, match=f"for optimizer={update} and the session got {build}: {how}"
    ) as told:
        one = make_session(model, made, plan=plan)
    one.__exit__(None, None, None)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize(("update", "build"), [("muon", "Muon"), ("sgd", "SGD"), ("adamw", "SGD")])
def test_an_optimizer_like_the_plans_is_no_news(update, build):
    model = make_model()
    made = muon(model, 0.1) if build == "Muon" else torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_tiny_plan().model_copy(update={"update": update})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(model, made, plan=plan).__exit__(None, None, None)


def test_an_optimizer_of_another_model_is_told():
    """The training would go well, and change nothing."""
    for other, loss, told in (True, False, True), (True, True, True), (False, True, False):
        model, sharpness = make_model(), nn.Parameter(torch.ones(()))
        trained = list((make_model() if other else model).parameters()) + [sharpness] * loss
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make_session(model, torch.optim.SGD(trained, lr=0.1)).__exit__(None, None, None)
        assert ["has none of the parameters" in str(one.message) for one in found] == [True] * told
    model.requires_grad_(False)  # on purpose
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(model, torch.optim.SGD([sharpness], lr=0.1)).__exit__(None, None, None)


def test_a_tensor_that_the_optimizer_leaves_out_is_told_unless_it_is_frozen():
    """Another optimizer of the loop would find no gradient of it, and never change it."""
    model = make_model()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.warns(UserWarning, match="leaves out 1 of 2 tensors .* such as bias, and a step"):
        make_session(model, optimizer).__exit__(None, None, None)
    model.bias.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(model, optimizer).__exit__(None, None, None)


def test_rates_by_layer_that_only_a_scheduler_of_timm_would_set_are_told():
    model = make_model()
    groups = [{"params": [model.weight], "lr_scale": 0.5}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.warns(UserWarning, match=r"have lr_scale, which only timm's schedulers .* by gro"):
        make_session(model, optimizer).__exit__(None, None, None)
    for group in optimizer.param_groups:
        group["lr"] *= group.pop("lr_scale", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(model, optimizer).__exit__(None, None, None)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (torch.optim.LBFGS, r"is LBFGS, whose step.. needs closure=: .* use bw\.Sampler and bw\."),
        (lambda weights: [torch.optim.SGD(weights, lr=0.1)] * 2, "give one optimizer, with a para"),
        (lambda weights: rateless(weights), "is SGD with lr=None in group 0: "),
        (
            lambda weights: type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(weights, 0.1),
            "is sharded .ZeroRedundancyOptimizer.: ",
        ),
    ],
)
def test_an_optimizer_that_a_step_cannot_serve_is_refused_before_training(build, said):
    model = make_model()
    with pytest.raises((ArgumentError, PlanError), match=said):
        make_session(model, build(model.parameters()))


def test_an_optimizer_whose_step_does_not_tell_its_arguments_is_left_alone(monkeypatch):
    """As one of compiled code."""

    def silent(_):
        raise ValueError("no signature found for builtin")

    monkeypatch.setattr(session_checks, "signature", silent)
    model = make_model()
    refuse_other_things(model, torch.optim.SGD(model.parameters(), lr=0.1), Points())


def rateless(weights):
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def test_a_model_without_weights_or_shapes_is_refused():
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="a Flatten without parameters"):
        make_session(nn.Flatten(), optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of what may change in lazy modules
        lazy = nn.Sequential(nn.LazyLinear(CLASSES))
    with pytest.raises(ArgumentError, match=r"the model's 0\.weight has no shape yet"):
        make_session(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))


def test_a_scheduler_beside_the_plans_rates_is_told():
    """One that begins with a warm-up would have the whole training go on at its first rate."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    with pytest.warns(UserWarning, match="has set the optimizer's rate to 0, and the plan sets it"):
        make_session(model, optimizer).__exit__(None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(model, optimizer, learning_rate="mine").__exit__(None, None, None)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_scheduler_that_checkpoints_do_not_hold_is_told(tmp_path, keeps):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with make_session(
            model, optimizer, learning_rate="mine", run_folder=tmp_path / "run"
        ) as one:
            if keeps:
                one.keep("scheduler", scheduler)
            train(one, each_step=scheduler.step)
    said = ["checkpoints do not hold the scheduler" in str(one.message) for one in told]
    assert said == [True] * (not keeps)
    assert all(one.filename == __file__ for one in told)


@pytest.mark.parametrize("rates", ["plan", "mine"])
def test_a_rate_that_the_loop_sets_is_no_rate_of_the_plan_and_told_once(rates):
    """A scheduler that only looks at a score, such as this one, leaves no mark of its own."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    seen = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with make_session(model, optimizer, plan=make_tiny_plan(), learning_rate=rates) as one:
            train(one, each_step=lambda: (seen.append(optimizer.param_groups[0]["lr"]),
                                          scheduler.step(1.0)))  # fmt: skip
    planned = [0.1] * 10
    assert seen == (planned if rates == "plan" else [0.1 / 2 ** max(0, n - 1) for n in range(10)])
    said = "or a scheduler, has set the optimizer's rate to 0.05, and the plan sets it at each step"
    assert [said in str(one.message) for one in told] == [True] * (rates == "plan")
    assert all(one.filename == __file__ for one in told)


def test_a_model_on_another_device_than_the_plans_is_told():
    how = r"for device=cuda and the model is on cpu: model\.to\(f'cuda:{local_rank}'\) before"
    with pytest.warns(UserWarning, match=how):
        one = make_session(plan=make_tiny_plan(device="cuda"))
    one.__exit__(None, None, None)


def first_change(**options):
    """How far a single step of rate 1 moves the weights."""
    model = make_model()
    before = weights_of(model)
    rule = LearningRateRule(
        base=1, base_batch=BATCH, scaling="none", peak=1, warmup_epochs=0, decay="none"
    )
    plan = make_tiny_plan(rule=rule, **options.pop("job", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    moved = []
    with make_session(model, optimizer, plan=plan, **options) as one:
        train(one, each_step=lambda: moved.append(weights_of(model) - before))
    return moved[0]


@pytest.mark.parametrize("options", [{"clip_norm": 0.01}, {"job": {"clip_norm": 0.01}}])
def test_a_large_gradient_is_clipped_to_its_norm(options):
    free, clipped = first_change(), first_change(**options)
    assert free.norm() > 0.1
    assert clipped.norm() == pytest.approx(0.01, rel=1e-4)
    assert torch.allclose(clipped / clipped.norm(), free / free.norm(), atol=1e-4)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"clip_norm": 0}, "clip_norm=0 of Session: give a number above 0"),
        ({"clip_norm": -0.5}, "clip_norm=-0.5 of Session: give a number above 0"),
        ({"clip_norm": "small"}, "clip_norm='small' of Session: give a number above 0"),
        ({"learning_rate": 0.1}, "learning_rate=0.1 of Session: give 'plan' or 'mine'"),
    ],
)
def test_a_norm_or_rate_that_makes_no_sense_is_refused(option, said):
    with pytest.raises(ArgumentError, match=said):
        make_session(**option)


def test_a_small_gradient_is_not_clipped():
    assert torch.equal(first_change(), first_change(clip_norm=1000))


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_micro_batches_give_the_same_training(micro):
    whole, parts = make_model().double(), make_model().double()
    sizes = []
    for model, most in ((whole, 64), (parts, micro)):
        with make_session(model, plan=make_tiny_plan(micro=most)) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    loss = functional.cross_entropy(model(features.double()), labels)
                    updated = one.step(loss)
                    if most == micro:
                        sizes.append((len(labels), updated))
    assert torch.allclose(weights_of(whole), weights_of(parts), rtol=1e-12)
    assert max(size for size, _ in sizes) <= micro
    assert sum(updated for _, updated in sizes) == 10  # 5 steps in each of 2 epochs
    assert sum(size for size, _ in sizes) == 2 * SAMPLES


def gradient_of(loss_of, micro=64):
    """The gradient that the first step uses: ``loss_of(session, outputs, labels)`` makes it."""
    model = make_model().double()
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = make_session(model, optimizer, plan=make_tiny_plan(micro=micro, epochs=1))
    try:
        next(one.epochs())
        for features, labels in one.batches():
            if loss_of(one, model(features.double()), labels):
                return (before - weights_of(model)) / 0.1
    finally:
        one.__exit__(RuntimeError, RuntimeError(), None)
    raise AssertionError("no update")


def test_a_loss_over_other_things_than_samples_is_weighed_by_their_number():
    """Samples of class 0 count not at all: the mean is over the others, over all micro-batches."""

    def chosen(one, outputs, labels):
        kept = labels > 0
        if not kept.any():
            return one.step(outputs.sum() * 0, weight=0)
        return one.step(functional.cross_entropy(outputs[kept], labels[kept]), weight=kept.sum())

    whole, parts = gradient_of(chosen), gradient_of(chosen, micro=2)
    assert torch.allclose(whole, parts, rtol=1e-10)
    model = make_model().double()
    points = [Points()[int(i)] for i in epoch_order(SAMPLES, 0, 0)[:BATCH]]
    kept = [(f, y) for f, y in points if y > 0]
    features = torch.stack([f for f, _ in kept]).double()
    functional.cross_entropy(model(features), torch.tensor([y for _, y in kept])).backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(whole, wanted, rtol=1e-10)


def test_gradients_that_the_loop_has_left_are_no_part_of_a_step():
    def weights(*, stray):
        model = make_model()
        for _ in range(2):  # before the session
            model(torch.ones(1, FEATURES)).sum().backward() if stray else None
        with make_session(model, plan=make_tiny_plan(micro=3)) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(model(features), labels))
                    if stray:  # such as for a figure of the loop's own
                        model(features).sum().backward()
        return model.weight.detach()

    assert torch.equal(weights(stray=False), weights(stray=True))


@pytest.mark.parametrize("also", ["nothing", "step", "backward"])
def test_a_backward_pass_of_the_loops_own_is_refused(also):
    """It would count for nothing, or on each worker as if it were alone, such as a penalty."""
    one = make_session()

    def step(features, labels):
        functional.cross_entropy(one.model(features), labels).backward()
        if also == "backward":
            one.backward(functional.cross_entropy(one.model(features), labels))
        one.step(one.model(features).sum() if also == "step" else None)

    with pytest.raises(RuntimeError, match=r"called backward\(\) .* give step\(loss\), or call"):
        run_loop(one, step)


def test_gradients_that_the_loop_has_set_to_zero_again_are_none():
    """As after a pass for the gradient of the input, such as of an adversarial sample."""

    def weights(*, own):
        one = make_session()

        def step(features, labels):
            if own:
                functional.cross_entropy(one.model(features), labels).backward()
                one.model.zero_grad(set_to_none=False)
            one.step(functional.cross_entropy(one.model(features), labels))

        run_loop(one, step)
        return one.model.weight.detach()

    assert torch.equal(weights(own=False), weights(own=True))


def test_several_backward_passes_add_up():
    def in_parts(one, outputs, labels):
        loss = functional.cross_entropy(outputs, labels)
        one.backward(0.25 * loss)
        one.backward(0.75 * functional.cross_entropy(one.model(inputs_of(outputs)), labels))
        return one.step()

    def at_once(one, outputs, labels):
        loss = functional.cross_entropy(outputs, labels)
        other = functional.cross_entropy(one.model(inputs_of(outputs)), labels)
        return one.step(0.25 * loss + 0.75 * other)

    def inputs_of(outputs):
        return torch.ones(len(outputs), FEATURES, dtype=torch.float64)

    wanted = gradient_of(at_once)
    assert torch.allclose(gradient_of(in_parts), wanted, rtol=1e-10)
    assert torch.allclose(gradient_of(in_parts, micro=2), wanted, rtol=1e-10)


def test_parts_of_a_loss_with_other_weights_are_refused():
    one = make_session()

    def step(features, labels):
        one.backward(one.model(features).mean())
        one.step(one.model(features).mean(), weight=3)

    with pytest.raises(ValueError, match="weight=3 after weight=5: the losses of one micro"):
        run_loop(one, step)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_loss_over_less_than_nothing_or_no_number_is_refused(weight):
    """With the first two no step would ever change the model, and nobody would be told."""
    one = make_session()
    with pytest.raises(ValueError, match=f"weight={weight:g}: give what the loss is a mean over"):
        run_loop(one, lambda features, _: one.step(one.model(features).mean(), weight=weight))


def test_weights_outside_the_optimizer_neither_move_nor_add_up():
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    before = weights_of(model[0])
    leftovers = []
    with make_session(model, optimizer) as one:
        train(one, each_step=lambda: leftovers.append(model[0].weight.grad))
    assert torch.equal(weights_of(model[0]), before)
    assert leftovers == [None] * 10


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(tmp_path):
    model, changes = make_model(), []
    with make_session(model, run_folder=tmp_path / "run") as one:
        for _ in one.epochs():
            for number, (features, labels) in enumerate(one.batches()):
                loss = functional.cross_entropy(model(features), labels)
                before = weights_of(model)
                updated = one.step(loss * (float("nan") if number in (1, 3) else 1))
                changes.append((updated, not torch.equal(weights_of(model), before)))
    assert changes == [(n not in (1, 3),) * 2 for _ in range(2) for n in range(5)]
    assert [epoch.skipped_steps for epoch in summary_in(tmp_path / "run").epochs] == [2, 2]
    assert [epoch.train_loss for epoch in summary_in(tmp_path / "run").epochs] == [None, None]


def test_a_batch_that_is_no_number_leaves_the_statistics_as_they_were():
    model, seen = make_model(extras=True), []
    with make_session(model, plan=make_tiny_plan(micro=3, epochs=1)) as one:
        for _ in one.epochs():
            for number, (features, labels) in enumerate(one.batches()):
                spoilt = features * float("nan") if number == 5 else features
                one.step(functional.cross_entropy(model(spoilt), labels))
                seen.append([buffer.clone() for buffer in model[1].buffers()])
    # Two micro-batches each: the sixth is the second of its step.
    assert all(torch.equal(*pair) for pair in zip(seen[5], seen[3], strict=True))
    assert not torch.equal(seen[5][0], seen[4][0])
    assert all(bool(buffer.isfinite().all()) for buffer in seen[-1])


def test_a_step_that_is_done_again_counts_once_in_the_statistics():
    model, calls = make_model(extras=True), []

    def loss(features, labels):
        value = functional.cross_entropy(model(features), labels)
        calls.append(value)
        if len(calls) == 3:
            raise MemoryError
        return value

    one = make_session(model, plan=make_tiny_plan(epochs=1))
    run_loop(one, lambda features, labels: one.step(partial(loss, features, labels)))
    assert int(model[1].num_batches_tracked) == len(calls) - 1


def test_gradients_that_stay_infinite_end_the_training_with_the_rate_in_the_message():
    one = make_session(plan=make_tiny_plan(epochs=30))
    with pytest.raises(TrainingError, match=r"20 steps in a row .*learning_rate, now 0\.1, "):
        run_loop(one, lambda features, labels: one.step(one.model(features).sum() * float("inf")))


# ------------------------------------------------------------------------------------ unfreezing


def test_layers_may_be_unfrozen_on_the_way():
    model = make_model(extras=True)
    model[0].requires_grad_(False)
    rule = AgsRule(mode="norm", base_batch=2, least=1.0, most=None, lookback=20)
    plan = make_tiny_plan(micro=2, epochs=3).model_copy(update={"ags": rule})
    before, moved = weights_of(model[0]), []
    with make_session(model, plan=plan) as one:
        for epoch in one.epochs():
            model[0].requires_grad_(epoch != 0)
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features), labels))
            moved.append(not torch.equal(weights_of(model[0]), before))
            assert len(one._run.state.tensors.trace) == (4 if epoch == 0 else 6)
    assert moved == [False, True, True]


def test_unfreezing_in_the_middle_of_a_step_is_refused():
    model = make_model(extras=True)
    model[0].requires_grad_(False)
    one = make_session(model, plan=make_tiny_plan(micro=2))

    def step(features, labels):
        one.step(functional.cross_entropy(model(features), labels))
        model[0].requires_grad_(True)

    with pytest.raises(RuntimeError, match=r"2 parameters unfrozen between"):
        run_loop(one, step)


def test_a_parameter_group_that_the_optimizer_gets_later_is_refused():
    model = make_model(extras=True)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    one = make_session(model, optimizer)
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(RuntimeError, match=r"2 parameter groups and had 1 when"):
        train(one)


# ---------------------------------------------------------------------------------------- misuse


def test_a_step_without_a_batch_is_refused():
    with make_session() as one:
        with pytest.raises(RuntimeError, match="without a batch"):
            one.step(torch.zeros((), requires_grad=True))
        with pytest.raises(RuntimeError, match="without a batch"):
            one.backward(torch.zeros((), requires_grad=True))


def test_two_steps_for_one_batch_are_refused():
    one = make_session()

    def step(features, labels):
        one.step(one.model(features).sum())
        one.step(one.model(features).sum())

    with pytest.raises(RuntimeError, match="without a batch"):
        run_loop(one, step)


def test_batches_without_steps_are_refused():
    with pytest.raises(RuntimeError, match="call step"):
        run_loop(make_session(), lambda features, labels: None)


def test_leaving_an_epoch_early_is_refused():
    def leave_early(one):
        with one:
            for _ in one.epochs():
                for number, (features, _) in enumerate(one.batches()):
                    if number == 2:
                        break
                    one.step(one.model(features).sum())

    with pytest.raises(RuntimeError, match="epoch 1 ended after 2 of 5 steps"):
        leave_early(make_session())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_loss_that_has_nothing_to_do_with_the_model_is_refused(requires_grad):
    one = make_session()
    loss = torch.zeros((), requires_grad=requires_grad)
    with pytest.raises(RuntimeError, match="no gradient: is the loss computed from"):
        run_loop(one, lambda features, labels: one.step(loss * 2))


def test_a_gpu_that_has_failed_ends_a_session_with_one_line(tmp_path):
    """It names a label only where one may be the cause, and a checkpoint only where one may be."""

    def told(failure, **options):
        said = rf"^the GPU of \S+/cpu:0 has failed: {failure}; .*_BLOCKING=1 shows the line"
        with pytest.raises(TrainingError, match=said) as caught, make_session(**options):
            raise RuntimeError(f"CUDA error: {failure}\nSearch for ...")
        return ["label" in str(caught.value), "resume" in str(caught.value)]

    assert told("device-side assert triggered", run_folder=tmp_path / "run") == [True, True]
    assert told("an illegal memory access was encountered") == [True, False]
    assert told("uncorrectable ECC error") == [False, False]


def test_other_workers_are_told_why_a_session_leaves_them(monkeypatch):
    told, failed = [], ValueError("no such thing")
    monkeypatch.setattr(
        session.Group, "give_up", lambda group, error: told.append((error, "first"))
    )
    monkeypatch.setattr(session.Group, "close", lambda group, error=None: told.append(error))
    with pytest.raises(ValueError, match="no such thing"), make_session():
        raise failed
    with pytest.raises(Interrupted), make_session(exit_on_stop=False):
        raise Interrupted(15, "stopped by SIGTERM")
    with make_session():
        pass
    assert told == [(failed, "first"), failed, None, None]


@pytest.fixture
def group_of_one():
    """A process group that somebody joined before the session."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("inside", ["", "backbone"])
def test_a_wrapped_model_is_refused_with_what_to_give_instead(group_of_one, wrap, inside):
    model = wrap(make_model())
    if inside:
        model = nn.ModuleDict({inside: model})
    what = f"the model's {inside}" if inside else "the model"
    with pytest.raises(PlanError) as refused:
        make_session(model)
    told = str(refused.value)
    assert told.startswith(f"{what} is wrapped in {wrap.__name__}: leave that out and give Session")
    assert "the wrapper's .module" in told
    assert "\n" not in told


def test_a_sharded_model_is_refused():
    class FSDPModule:
        """As `fully_shard` leaves it among a module's classes."""

    class Sharded(FSDPModule, nn.Linear):
        pass

    with pytest.raises(
        PlanError, match=r"the model is sharded \(Sharded\): give Session the model"
    ):
        make_session(Sharded(FEATURES, CLASSES))


def test_a_process_group_that_was_joined_before_is_used_and_left_open(group_of_one):
    with make_session() as one:
        train(one)
    assert torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_model_itself():
    """The session gets the model, the loop calls what the compiler made of it."""
    plain, model = make_model(), make_model()
    compiled = torch.compile(model, backend="eager")
    for called, held in ((plain, plain), (compiled, model)):
        with make_session(held) as one:
            run_loop(one, lambda x, y, f=called, s=one: s.step(functional.cross_entropy(f(x), y)))
    assert torch.equal(weights_of(plain), weights_of(model))
    with make_session(plain) as one:  # what is compiled of a layer has no length, and so no truth
        assert one.evaluate(Points(7), top1, model=compiled) == one.evaluate(Points(7), top1)


def by_turns(optimizer):
    """Rates that follow from the rates before, as those of most schedulers."""
    schedulers = torch.optim.lr_scheduler
    first = schedulers.ConstantLR(optimizer, factor=1.0)
    return schedulers.SequentialLR(optimizer, [first, schedulers.StepLR(optimizer, 1, 0.1)], [2])


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (partial(torch.optim.lr_scheduler.StepLR, step_size=2), [0.1, 0.1, 0.01, 0.01, 0.001]),
        (by_turns, [0.1, 0.1, 0.1, 0.01, 0.001]),
    ],
    ids=["one", "two by turns"],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_scheduler_of_ones_own_steps_with_rates_of_ones_own(tmp_path, made, wanted, first):
    """Also one that was made after the session, which has set its first rates again."""
    rates = []
    for resume in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = made(optimizer) if first else None
        options = {"run_folder": tmp_path / "run", "resume": resume, "learning_rate": "mine"}
        one = make_session(model, optimizer, plan=make_tiny_plan(micro=3, epochs=1), **options)
        scheduler = scheduler or made(optimizer)
        one.keep("scheduler", scheduler)

        def step(features, labels, one=one, scheduler=scheduler, optimizer=optimizer):
            if one.step(functional.cross_entropy(one.model(features), labels)):
                rates.append(optimizer.param_groups[0]["lr"])
                scheduler.step()
                if len(rates) == 3:
                    os.kill(os.getpid(), signal.SIGTERM)

        if resume:
            run_loop(one, step)
        else:
            with pytest.raises(SystemExit):
                run_loop(one, step)
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_scheduler_of_the_momentum_goes_on_with_it_on_a_resumed_run(tmp_path, first):
    def made(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)

    def now():
        return [optimizer.param_groups[0][key] for key in ("lr", "betas")]

    found = []
    for resume in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = made(optimizer) if first else None
        options = {"run_folder": tmp_path / "run", "resume": resume, "learning_rate": "mine"}
        one = make_session(model, optimizer, plan=make_tiny_plan(micro=3, epochs=1), **options)
        scheduler = scheduler or made(optimizer)
        one.keep("scheduler", scheduler)
        found.append(now())

        def step(features, labels, one=one, scheduler=scheduler):
            if one.step(functional.cross_entropy(one.model(features), labels)):
                scheduler.step()
                found.append(now())
                if len(found) == 4:
                    os.kill(os.getpid(), signal.SIGTERM)

        if not resume:
            with pytest.raises(SystemExit):
                run_loop(one, step)
    one.__exit__(None, None, None)
    start, *_, left, again = found
    assert again == left
    assert again[1] != start[1]


def test_a_thing_without_a_state_is_refused_by_keep():
    with make_session() as one, pytest.raises(ArgumentError, match="got the int 3: give something"):
        one.keep("count", 3)


def test_a_plan_for_other_data_is_refused():
    with pytest.raises(PlanError, match="for 22 training samples and the data set has 23"):
        make_session(dataset=Points(23))


def test_a_plan_for_more_workers_is_refused():
    with pytest.raises(
        PlanError, match=r"for 2 workers, and 1 running: start 2 \(torchrun --nproc-per-node 2\)"
    ):
        make_session(plan=make_tiny_plan((3, 2)))


class OneOfTwo:
    """A group of two workers, which are threads."""

    size, places = 2, ("here/cpu:0", "there/cpu:0")
    given, meeting = ["", ""], threading.Barrier(2, timeout=300)

    def __init__(self, rank):
        self.rank = rank

    def gather(self, own):
        self.given[self.rank] = own
        self.meeting.wait()
        gathered = list(self.given)
        self.meeting.wait()
        return gathered


def test_workers_with_other_networks_or_options_are_refused_before_they_wait_for_each_other():
    plan = make_tiny_plan()

    def told(rank, change=lambda _: None, groups=1, plan=plan, **options):
        model = make_model(extras=True)
        change(model)
        parts = [list(model.parameters())] if groups == 1 else [[p] for p in model.parameters()]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.1)
        given = {"run_folder": "a folder", "sample_weights": torch.ones(3)} | options
        try:
            refuse_unlike_workers(plan, OneOfTwo(rank), model, optimizer, **given)
        except PlanError as error:
            return str(error)

    def refused(*changes, **options):
        with ThreadPoolExecutor() as threads:
            first = threads.submit(told, 0)
            second = threads.submit(told, 1, *changes, **options)
            assert first.result() == second.result()
            return second.result()

    assert refused() is None
    # Hosts may compute them with another last bit.
    assert refused(sample_weights=torch.tensor([1, 1, 1 + 1e-7])) is None
    said = "worker 1 (there/cpu:0) has {}, and worker 0 (here/cpu:0) has {}: give all workers the "

    def names(what, there, here, *changes, **options):
        expected = said.format(f"{what} {there}", here) + f"same {what}"
        assert refused(*changes, **options) == expected

    names("run_folder", "None", "a folder", run_folder="None")
    names("sample_weights", "of shape (4,)", "of shape (3,)", sample_weights=torch.ones(4))
    names("sample_weights", "None", "of shape (3,)", sample_weights=None)
    longer = refused(plan=make_tiny_plan(epochs=7))
    assert re.search(r" has plan (\S+)=7, and worker 0 \(here/cpu:0\) has \1=2: ", longer), longer
    weight, shape = "0.weight", tuple(make_model(extras=True)[0].weight.shape)
    there, here = (f"{weight} {shape} float32 {is_}trained" for is_ in ("not ", ""))
    names("model", there, here, lambda model: model[0].requires_grad_(False))
    names(
        "model",
        "4.weight (3, 3) float32 trained",
        "1.running_mean (8,) float32 not trained",
        lambda model: model.append(nn.Linear(3, 3)),
    )
    names("optimizer", "group 1: (8,) float32 trained", "group 0: (8,) float32 trained", groups=9)


@pytest.mark.parametrize(
    ("change", "build", "said"),
    [
        (lambda model: model.append(nn.Linear(3, 3)), torch.optim.SGD, r"another model .*Missing"),
        (lambda _: None, torch.optim.AdamW, "another optimizer .*lack .*betas"),
    ],
)
def test_a_run_does_not_go_on_with_another_network_or_optimizer(change, build, said, tmp_path):
    def part(change, build, **options):
        model = make_model(extras=True)
        change(model)
        with make_session(
            model, build(model.parameters(), lr=0.1), run_folder=tmp_path / "run", **options
        ) as one:
            next(one.epochs())
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features), labels))

    part(lambda _: None, torch.optim.SGD)
    with pytest.raises(FileError, match=rf"last\.pt was written with {said}") as told:
        part(change, build, resume=True)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"resume": True}, "resume=True of Session needs run_folder="),
        ({"follow_advice": True}, "follow_advice=True of Session needs run_folder="),
        ({"loaders": -1}, "loaders=-1 of Session"),
        ({"loaders": "auto"}, "loaders='auto' of Session"),
    ],
)
def test_an_option_that_would_do_nothing_or_fail_later_is_refused(option, said):
    with pytest.raises(ArgumentError, match=said):
        make_session(**option)


@pytest.mark.parametrize("size", [-3, 0, 4.0])
def test_a_batch_to_evaluate_that_is_no_number_of_samples_is_refused(size):
    words = rf"batch_size={size} of session\.evaluate\(\): give a whole number from 1 on"
    with make_session() as one, pytest.raises(ArgumentError, match=words):
        one.evaluate(Points(7), top1, batch_size=size)


def test_a_session_that_was_never_entered_does_not_train(tmp_path):
    """Its summary would never be written."""
    one = make_session(run_folder=tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"write `with bw\.Session"):
        next(one.epochs())
    one.__exit__(None, None, None)


def test_an_evaluation_after_the_last_epoch_says_that_it_is_not_recorded(tmp_path):
    for number, within in enumerate((False, True)):
        with make_session(run_folder=tmp_path / str(number)) as one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                if within:
                    one.evaluate(Points(7), top1)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                assert set(one.evaluate(Points(7), top1)) == {"top1"}
        assert ["after the last epoch" in str(one.message) for one in told] == [True] * (not within)
        assert all(one.filename == __file__ for one in told)


def test_a_batch_that_is_skipped_is_no_part_of_its_step():
    """Where it is a whole step, as the last of an epoch, weights stay as they are."""
    model, wanted = make_model(), None
    last = weights_of(model)
    with make_session(model, plan=make_tiny_plan(micro=3, epochs=1)) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                if len(labels) == 3:
                    loss = functional.cross_entropy(model(features), labels)
                    found = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
                    gradient = torch.cat([part.flatten() for part in found])
                    wanted = weights_of(model) - 0.1 * gradient
                    assert not one.step(loss)
                else:
                    assert one.step(weight=0) == (wanted is not None)
                    now = weights_of(model)
                    torch.testing.assert_close(now, last if wanted is None else wanted)
                    last, wanted = now, None


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(PlanError, match="global batch of 23 is larger than the 22"):
        train(make_session(plan=make_tiny_plan((23,))))


def test_a_default_device_for_all_tensors_is_refused():
    torch.set_default_device("meta")
    try:
        with pytest.raises(PlanError, match="set it for the model alone, as in"):
            make_session()
    finally:
        torch.set_default_device(None)


def test_data_that_can_only_be_iterated_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(DataError, match="Stream can only be iterated: each sample exactly once"):
        make_session(dataset=Stream())
    with make_session() as one, pytest.raises(DataError, match="generator can only be iterated"):
        one.evaluate((n for n in range(3)), top1)


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(FileError, match=r"there is no file .*plan\.json"):
        make_session(plan=tmp_path / "plan.json")


@pytest.mark.parametrize("taken", [lambda: closing(StopRequest()), noting_signals])
def test_a_signal_that_the_program_around_python_handles_is_left_to_it(taken, monkeypatch):
    """As R's reticulate does with Ctrl-C: Python knows of no handler, and could not put it back."""
    known = signal.getsignal
    before = {number: known(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGINT else known(number)
    )
    with taken():
        same = {number for number in STOP_SIGNALS if known(number) == before[number]}
    assert same == {signal.SIGINT}
    assert {number: known(number) for number in STOP_SIGNALS} == before


@pytest.mark.parametrize("taken", [lambda: closing(StopRequest()), noting_signals])
def test_a_closed_terminal_under_nohup_stops_nothing(taken):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with taken():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("once", [False, True])
def test_a_closed_terminal_is_one_signal_however_often_it_is_told(once):
    """The kernel and the shell tell it; a second signal would end the run without a checkpoint."""
    with noting_signals(once=once) as noted:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
    assert noted == [signal.SIGHUP]


def test_who_closes_the_terminal_after_ctrl_c_does_not_hasten_the_end():
    with noting_signals() as noted:
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
    assert noted == [signal.SIGINT]


def test_a_second_ctrl_c_ends_a_loop_that_does_not_come_to_its_next_step(tmp_path, monkeypatch):
    """Not one that a launcher has started, which passes on what the terminal has sent to all; nor
    one that hears of a single signal twice, as by `timeout --signal=INT`.
    """
    before = signal.getsignal(signal.SIGINT)
    cases = (
        (False, -1.0, KeyboardInterrupt),
        (False, math.inf, SystemExit),
        (True, -1.0, SystemExit),
    )
    for number, (launched, apart, ends) in enumerate(cases):
        monkeypatch.setattr(signals, "_AGAIN_SECONDS", apart)
        monkeypatch.setattr(session, "started_by_hand", lambda hand=not launched: hand)
        with pytest.raises(ends), make_session(run_folder=tmp_path / str(number)) as one:
            train(one, each_step=lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
        assert signal.getsignal(signal.SIGINT) == before
        kept = (tmp_path / str(number) / "checkpoints" / "last.pt").exists()
        assert kept == (ends is SystemExit)


def test_a_script_whose_terminal_is_closed_ends_as_one_that_was_stopped(tmp_path, monkeypatch):
    """Though its last line cannot be written any more."""

    class Closed(io.StringIO):
        def write(self, _):
            raise OSError(errno.EIO, "the terminal was closed")

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(SystemExit, match="129"), make_session(run_folder=tmp_path / "run") as one:
        train(one, each_step=lambda: os.kill(os.getpid(), signal.SIGHUP))


def test_a_refused_session_gives_the_signals_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PlanError):
        make_session(dataset=Points(23))
    assert signal.getsignal(signal.SIGTERM) is before
    with make_session():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


# -------------------------------------------------------------------------------------- batches


def test_every_epoch_has_every_sample_once():
    points = Points()
    with make_session(dataset=points) as one:
        for _ in one.epochs():
            points.seen.clear()
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
            assert sorted(points.seen) == list(range(SAMPLES))


def sides_seen(**options):
    """Side, kind and labels of the batches under two resolutions."""
    seen = []
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    plan = make_tiny_plan(sides=(4, 8), epochs=1)
    with make_session(model, dataset=Images(), plan=plan, **options) as one:
        for _ in one.epochs():
            for batch in one.batches():
                assert sorted(batch) == ["label", "pixels"]
                one.step(functional.cross_entropy(model(batch["pixels"]), batch["label"]))
                seen.append(tuple(batch["pixels"].shape[-2:]))
    return seen


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["tensor", "array", "list"])
def test_samples_are_drawn_by_weights_of_any_kind(kind):
    points, weights = Points(), kind([float(index == 3) for index in range(SAMPLES)])
    one = make_session(dataset=points, plan=make_tiny_plan(epochs=1), sample_weights=weights)
    run_loop(one, lambda x, y: one.step(functional.cross_entropy(one.model(x), y)))
    assert points.seen == [3] * SAMPLES


@pytest.mark.parametrize(
    "given",
    [[1e-50, 0.1, 1e50], np.array([1e50, 0.1, 1e-50])[::-1], np.array([1e-50, 0.1, 1e50], object)],
    ids=["list", "reversed", "objects"],
)
def test_weights_keep_their_digits_and_may_be_any_array(given):
    assert as_weights(given).tolist() == [1e-50, 0.1, 1e50]


def test_weights_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="sample_weights of Session is the text 'balanced': give"):
        make_session(sample_weights="balanced")


def test_the_named_image_in_a_batch_is_resized():
    assert sides_seen(images="pixels") == [(4, 4)] * 5 + [(8, 8)] * 5


@pytest.mark.parametrize("images", ["image", 2])
def test_an_image_that_is_not_in_the_batch_is_refused_in_a_line(images):
    words = rf"images={images!r} of Session, and a batch is a dict of 'pixels', 'label': give"
    with pytest.raises(PlanError, match=words):
        sides_seen(images=images)


def test_ones_own_resizing_is_called_with_the_resolution():
    def crop(batch, side):
        return {**batch, "pixels": batch["pixels"][..., :side, :side]}

    assert sides_seen(resize=crop) == [(4, 4)] * 5 + [(8, 8)] * 5


def test_several_resolutions_without_a_way_to_resize_are_refused():
    with pytest.raises(PlanError, match=r"several resolutions \(4, 8\): .*images=.*resize="):
        sides_seen()


def test_an_item_is_the_same_whoever_fetches_it_and_the_callers_chance_is_untouched():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    expected = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    items = SeededItems(Points(noisy=True), seed=3)
    first = items[(2, 7)][0]
    found = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]
    assert torch.equal(items[(2, 7)][0], first)
    assert not torch.equal(items[(3, 7)][0], first)
    assert not torch.equal(SeededItems(Points(noisy=True), seed=4)[(2, 7)][0], first)


def chance():
    """The states of the three generators, to be compared."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return random.getstate(), str(numpy), torch.get_rng_state().tolist()


def test_a_batch_of_items_is_seeded_one_by_one_and_leaves_the_callers_chance_where_it_was():
    items = SeededItems(Points(noisy=True), seed=3)
    alone = [items[(2, index)][0] for index in (7, 1, 4)]
    before = chance()
    together = [item[0] for item in items.__getitems__([(2, 7), (2, 1), (2, 4)])]
    assert torch.equal(torch.stack(alone), torch.stack(together))
    assert chance() == before


def test_an_item_that_fails_leaves_the_callers_chance_where_it_was():
    class Broken(Points):
        def __getitem__(self, index):
            random.random(), torch.rand(1), np.random.rand()  # noqa: NPY002
            raise ValueError(index)

    before = chance()
    with pytest.raises(ValueError, match="1"):
        SeededItems(Broken(), seed=3)[(0, 1)]
    assert chance() == before


def drawn_by_item(*key):
    """What each of the three generators gives once they are seeded for an item."""
    seed_item(*key)
    return random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64).item()  # noqa: NPY002


def test_items_draw_apart_from_each_other_and_generators_too():
    keys = [(seed, epoch, index) for seed in (0, 1, 2**63 - 1) for epoch in (0, 1, 7)
            for index in (0, 1, 2, 1_000_000)]  # fmt: skip
    drawn = [drawn_by_item(*key) for key in keys]
    assert drawn == [drawn_by_item(*key) for key in keys]
    assert len({value for each in drawn for value in each}) == 3 * len(keys)


def test_each_sample_is_fetched_once_where_batch_normalization_wants_larger_parts():
    """Five samples in parts of two would leave one alone."""
    points, model = Points(), make_model(extras=True)
    one = make_session(model, dataset=points, plan=make_tiny_plan(micro=2, epochs=1))
    run_loop(one, lambda features, _: one.step(model(features).square().mean()))
    assert sorted(points.seen) == list(range(SAMPLES))


@pytest.mark.slow
def test_loader_processes_change_nothing():
    models = []
    for loaders in (0, 2):
        model = make_model(extras=True)
        torch.manual_seed(1)
        with make_session(model, dataset=Points(noisy=True), loaders=loaders) as one:
            train(one)
        models.append(weights_of(model))
    assert torch.equal(*models)


def test_autocast_is_on_from_the_batch_to_its_step():
    def is_on():
        return torch.is_autocast_enabled("cpu")

    one = make_session(plan=make_tiny_plan(precision="bfloat16", epochs=1))
    with one:
        for _ in one.epochs():
            for features, labels in one.batches():
                assert is_on()
                outputs = one.model(features)
                assert outputs.dtype == torch.bfloat16
                one.backward(functional.cross_entropy(outputs.float(), labels))
                assert is_on()
                assert one.model(features).dtype == torch.bfloat16
                one.step()
                assert not is_on()
            assert not is_on()
            assert one.evaluate(Points(7), lambda o, y: (o.dtype == torch.bfloat16) + 0 * y) == {
                "value": 1.0
            }
    assert all(p.dtype == torch.float32 for p in one.model.parameters())


def test_an_error_in_the_users_loop_leaves_autocast():
    one = make_session(plan=make_tiny_plan(precision="bfloat16"))
    with pytest.raises(ZeroDivisionError):
        run_loop(one, lambda features, labels: 1 / 0)
    assert not torch.is_autocast_enabled("cpu")


def test_so_does_one_before_a_batch_is_done_whose_iterator_is_kept():
    with make_session(plan=make_tiny_plan(precision="bfloat16", epochs=1)) as one:
        next(one.epochs())
        batches = one.batches()
        next(batches)
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    batches.close()


# ------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("batch_size", [None, 1, 3, 7])
def test_evaluation_counts_every_sample_once(batch_size):
    points = Points(7)
    with make_session() as one:
        means = one.evaluate(
            points,
            lambda outputs, labels: {"one": torch.ones(len(labels)), "label": labels},
            batch_size=batch_size,
        )
    assert sorted(points.seen) == list(range(7))
    assert means == {"one": 1.0, "label": sum(i % 3 for i in range(7)) / 7}


def test_evaluation_gives_every_module_its_own_mode_back():
    model = make_model(extras=True)
    model[1].eval()  # a frozen normalization stays as its owner left it
    modes = [module.training for module in model.modules()]
    with make_session(model) as one:
        one.evaluate(Points(7), lambda o, y: torch.full(y.shape, not any_training(model)))
        assert [module.training for module in model.modules()] == modes
        assert not any(p.requires_grad is False for p in model.parameters())


def any_training(model):
    return any(module.training for module in model.modules())


def test_whether_a_guess_is_right_is_the_accuracy_of_the_records(tmp_path):
    with make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=1)) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
            means = one.evaluate(Points(4), lambda o, y: torch.arange(4) < 3)
    assert means == {"top1": 0.75}
    assert summary_in(tmp_path / "run").epochs[0].top1 == 0.75


def test_a_metric_that_is_a_mean_already_is_refused():
    with make_session() as one, pytest.raises(ValueError, match="one value for each, not their"):
        one.evaluate(Points(7), lambda outputs, labels: top1(outputs, labels).float().mean())


def test_samples_that_a_collate_function_leaves_out_cannot_be_evaluated():
    def without_last(items):
        return torch.utils.data.default_collate(items[:-1])

    words = r"shape \(6,\) for 7 samples: .*collate= may leave none out here"
    with make_session(collate=without_last) as one, pytest.raises(ValueError, match=words):
        one.evaluate(Points(7), top1)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda outputs, labels: 0.5, "'value' is the float 0.5: return a tensor"),
        (lambda outputs, labels: {"top1": [True] * len(labels)}, "'top1' is the list"),
        (lambda outputs, labels: top1(outputs, labels).numpy(), "is a ndarray: return a tensor"),
        (lambda outputs, labels: None, "'value' is None"),
    ],
    ids=["number", "list", "array", "nothing"],
)
def test_a_metric_that_gives_no_tensor_is_refused(metric, words):
    with make_session() as one, pytest.raises(ValueError, match=words):
        one.evaluate(Points(7), metric)


def test_an_empty_data_set_cannot_be_evaluated():
    with make_session() as one, pytest.raises(DataError, match="empty data set"):
        one.evaluate(Points(0), top1)


@pytest.mark.parametrize("batch", [{"pixels": 1, "label": 2}, (1, 2, 3), torch.ones(2, 4), 5])
def test_other_batches_without_a_forward_pass_of_their_own_are_refused(batch):
    """A dict of two would have been taken for its keys, and a tensor of two samples for a pair."""
    kind = type(batch).__name__
    with pytest.raises(ValueError, match=rf"a batch that is a {kind}.*: give it forward=f, whe"):
        outputs_and_labels(make_model(), batch)


def test_other_batches_are_evaluated_by_the_users_own_forward_pass():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    with make_session(model, dataset=Images()) as one:
        means = one.evaluate(
            Images(),
            lambda outputs, labels: torch.ones_like(labels),
            forward=lambda model, batch: (model(batch["pixels"]), batch["label"]),
        )
    assert means == {"value": 1.0}


# ---------------------------------------------------------------------------- folder and resume


def test_a_run_leaves_its_records(tmp_path):
    folder = tmp_path / "run"
    with make_session(run_folder=folder, plan=make_tiny_plan(epochs=3)) as one:
        train(one)
    summary = summary_in(folder)
    assert [epoch.epoch for epoch in summary.epochs] == [0, 1, 2]
    assert all(epoch.samples == SAMPLES and epoch.steps == 5 for epoch in summary.epochs)
    assert all(epoch.whole for epoch in summary.epochs)
    assert summary.resumed == 0
    assert summary.plan == one.plan
    lines = bw.metrics(folder)
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [0, 1, 2]


def test_an_evaluation_between_two_steps_is_no_training(tmp_path, monkeypatch):
    """Waiting for slower workers at its beginning is part of it."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    now = Clock()
    for module in (clock, all_reduce_run):
        monkeypatch.setattr(module, "time", now)

    def wait_for_slower_workers(group):
        now.now += 7

    def metric(outputs, labels):
        now.now += 30
        return top1(outputs, labels)

    monkeypatch.setattr(session.Group, "monitored_barrier", wait_for_slower_workers)

    with make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=1)) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                now.now += 1
                one.step(functional.cross_entropy(one.model(features), labels))
                one.evaluate(Points(7), metric)
    (epoch,) = summary_in(tmp_path / "run").epochs
    assert (epoch.training_seconds, epoch.evaluation_seconds) == (5, 185)
    assert epoch.workers[0].input_seconds == 0


def test_a_run_without_a_checkpoint_begins_with_as_many_workers_as_planned(tmp_path):
    plan = make_tiny_plan((3, 2))
    with pytest.raises(PlanError, match=r"for 2 workers, and 1 running"):
        make_session(plan=plan, run_folder=tmp_path / "run", resume=True)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with make_session() as one:
        train(one)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path):
    with make_session(run_folder=tmp_path / "run") as one:
        train(one)
    (tmp_path / "run" / LOCK_FILE).unlink()  # it tells who was there last
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    with pytest.raises(FileError, match="holds a run already: choose another folder, or resume"):
        make_session(run_folder=tmp_path / "run")
    (tmp_path / "run" / LOCK_FILE).unlink()
    after = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert before == after


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=f"cannot write {tmp_path}/file/run: Not a directory"):
        make_session(run_folder=tmp_path / "file" / "run")


class Counter:
    """Something of the user's with a state."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def run_in_pieces(folder, pieces, plan):
    """Train, asked to stop after each of ``pieces`` steps, resumed each time; the last to its end.

    Nothing but the folder goes from one piece to the next.
    """
    for number, until in enumerate([*pieces, None]):
        model = make_model(extras=True)
        torch.manual_seed(1 if number == 0 else 1000 + number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        points = Points(noisy=True)
        one = make_session(
            model, optimizer, points, plan=plan, run_folder=folder, resume=number > 0
        )
        counter = Counter()
        one.keep("counter", counter)

        def count(counter=counter):
            counter.count += 1

        if until is None:
            with one:
                train(one, each_step=count)
        else:
            with pytest.raises(SystemExit) as stopped, one:
                train(one, until=until, each_step=count)
            assert stopped.value.code == 143
    return model, counter


@pytest.mark.parametrize(
    "pieces",
    [
        (2, 4, 3),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ((1,), (3,), (5,), (7,), (5, 5, 1))),
    ],
    ids=lambda pieces: str(pieces),
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, pieces, capsys):
    """Stopped inside an epoch, at its very end, and several times in a row."""
    plan = make_tiny_plan(epochs=3)
    whole, _ = run_in_pieces(tmp_path / "whole", (), plan)
    model, counter = run_in_pieces(tmp_path / "pieces", pieces, plan)
    assert torch.equal(weights_of(model), weights_of(whole))
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    assert counter.count == 15
    one, two = summary_in(tmp_path / "whole"), summary_in(tmp_path / "pieces")
    assert two.resumed == len(pieces)
    assert [epoch.epoch for epoch in two.epochs] == [0, 1, 2]
    for before, after in zip(one.epochs, two.epochs, strict=True):
        assert (after.samples, after.steps) == (before.samples, before.steps)
        assert after.train_loss == pytest.approx(before.train_loss, rel=1e-12)
        assert (after.val_correct, after.val_count) == (before.val_correct, before.val_count)
    assert "continue with resume=True in" in capsys.readouterr().err


def test_a_resumed_run_goes_on_with_the_parameters_of_its_loss(tmp_path):
    plan = make_tiny_plan(epochs=3)

    def piece(folder, until=None):
        model, scale = make_model(), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1, momentum=0.9)
        with make_session(
            model, optimizer, plan=plan, run_folder=tmp_path / folder, resume=True
        ) as one:
            batches = (batch for _ in one.epochs() for batch in one.batches())
            for step, (features, labels) in enumerate(batches):
                one.step(functional.cross_entropy(scale * model(features), labels))
                if step + 1 == until:
                    os.kill(os.getpid(), signal.SIGTERM)
        return [weights_of(model), scale.detach()]

    whole = piece("whole")
    with pytest.raises(SystemExit, match="143"):
        piece("parts", until=7)
    assert all(map(torch.equal, whole, piece("parts")))


def in_a_thread(work):
    """What it returns, or raises, in another than the main thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_in_a_thread_a_session_trains_as_in_the_main_one(tmp_path):
    def trained():
        one = make_session(model=(model := make_model()), run_folder=tmp_path / str(get_ident()))
        with one:
            train(one)
        return weights_of(model)

    assert torch.equal(in_a_thread(trained), trained())


def test_in_a_thread_a_session_stops_when_it_is_told_and_goes_on(tmp_path):
    folder, plan = tmp_path / "run", make_tiny_plan(epochs=2)

    def piece(*, stop):
        one = make_session(model=(model := make_model()), plan=plan, run_folder=folder, resume=True)
        with one:
            train(one, each_step=one.stop if stop else lambda: None)
        return weights_of(model)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.raises(Interrupted, match="stopped by SIGTERM at epoch 1, step 2") as stopped:
        in_a_thread(lambda: piece(stop=True))
    assert stopped.value.exit_code == 143
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    with make_session(model=(whole := make_model()), plan=plan) as one:
        train(one)
    assert torch.equal(in_a_thread(lambda: piece(stop=False)), weights_of(whole))


def test_a_stop_during_evaluation_keeps_the_finished_steps(tmp_path):
    one = make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=1))

    def metric(outputs, labels):
        os.kill(os.getpid(), signal.SIGUSR1)
        return top1(outputs, labels)

    def loop():
        with one:
            for _ in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                one.evaluate(Points(7), metric, batch_size=3)

    with pytest.raises(SystemExit) as stopped:
        loop()
    assert stopped.value.code == 138
    with make_session(
        run_folder=tmp_path / "run", plan=one.plan, resume=True, model=(model := make_model())
    ) as again:
        train(again, each_step=lambda: pytest.fail("all steps were done"))
    assert torch.equal(weights_of(model), weights_of(one.model))
    (epoch,) = summary_in(tmp_path / "run").epochs
    assert (epoch.steps, epoch.val_count, epoch.whole) == (5, 7, False)


def test_another_plans_checkpoint_is_not_resumed(tmp_path):
    with make_session(run_folder=tmp_path / "run") as one:
        train(one)
    with pytest.raises(PlanError, match=r"last\.pt was written under another plan"):
        make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=9), resume=True)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    with make_session(run_folder=tmp_path / "run") as one:
        train(one)
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    path.write_bytes(path.read_bytes()[:-500] if content is None else content)
    with pytest.raises(FileError, match=f"{path} is no readable checkpoint"):
        make_session(run_folder=tmp_path / "run", resume=True)


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(SystemExit), make_session(run_folder=folder) as one:
        train(one, until=7)
    shutil.rmtree(folder / "checkpoints")
    lines = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(FileError, match="no readable checkpoint"):
        make_session(run_folder=folder, resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == lines


def test_checkpoints_open_without_us_and_hold_plain_values(tmp_path):
    model = make_model(extras=True)
    with make_session(model, run_folder=tmp_path / "run") as one:
        train(one)
    for name in ("last", "best"):
        path = tmp_path / "run" / "checkpoints" / f"{name}.pt"
        content = torch.load(path, weights_only=True)
        assert content["classes"] == ["a", "b", "c"]
        assert content["network"] == "resnet8"
        fresh = make_model(extras=True)
        fresh.load_state_dict(content["model"])
        Plan.model_validate_json(content["plan"])
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert all(torch.equal(last["model"][key], value) for key, value in model.state_dict().items())


def test_best_is_the_first_epoch_with_the_highest_score(tmp_path):
    scores = [0.5, 0.9, 0.9, 0.2]
    assert weights_of_best(tmp_path, lambda epoch: scores[epoch]) == 1


@pytest.mark.parametrize(("others", "best"), [((), 2), (("f1",), 1)])
def test_a_loss_is_no_score_and_where_there_is_no_other_the_lowest_is_best(tmp_path, others, best):
    """Wherever it stands in the dict: a metric that names it first would keep the worst epoch."""
    losses, scores = [0.9, 0.8, 0.3, 0.4], [0.1, 0.7, 0.2, 0.3]

    def metric(epoch):
        return {"loss": losses[epoch]} | dict.fromkeys(others, scores[epoch])

    assert weights_of_best(tmp_path, metric) == best


@pytest.mark.parametrize(
    ("means", "better"),
    [
        ({"loss": 0.5, "top1": 0.2}, True),  # that was the highest loss
        ({"loss": 0.5}, True),
        ({"top1": 0.2, "loss": 0.5}, False),
        ({"f1": 0.2}, False),
    ],
)
def test_a_run_of_an_earlier_version_whose_score_was_a_loss_finds_its_best_anew(means, better):
    values = RunState(best_score=0.9).values()
    del values["loss_as_score"]
    state = RunState()
    state.restore(values, EpochMeter())
    assert state.note_score(means, 1) == better
    then = RunState()
    then.restore(state.values(), EpochMeter())
    assert not then.note_score(means, 1)


def weights_of_best(folder, metric):
    """The epoch whose weights are in ``best.pt``, where ``metric`` gives each epoch's values."""
    after = []

    def values(labels, epoch):
        given = metric(epoch)
        if not isinstance(given, dict):
            return torch.full(labels.shape, given)
        return {name: torch.full(labels.shape, value) for name, value in given.items()}

    with make_session(run_folder=folder / "run", plan=make_tiny_plan(epochs=4)) as one:
        for epoch in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
            after.append(weights_of(one.model))
            one.evaluate(Points(4), lambda _, labels, e=epoch: values(labels, e))
    model = load_checkpoint(folder / "run" / "checkpoints" / "best.pt")["model"]
    best = torch.cat([value.flatten() for value in model.values()])
    return next(epoch for epoch, weights in enumerate(after) if torch.equal(weights, best))


@pytest.mark.parametrize("name", ["top1", "f1"])
def test_of_equal_accuracies_the_lower_loss_is_the_best_but_a_score_of_one_s_own_is_not_judged(
    tmp_path, name
):
    """In ``best.pt`` and in the records, after a resume, too; NaN is no lower loss."""
    folder, plan = tmp_path / "run", make_tiny_plan(epochs=6)
    losses, after = [0.8, 0.9, 0.7, 0.7, 0.75, float("nan")], []

    def metric(epoch):
        def scored(outputs, labels):
            right = torch.ones_like(labels, dtype=torch.bool)
            return {name: right, "loss": torch.full(labels.shape, losses[epoch])}

        return scored

    for first, last in ((0, 1), (2, 5)):
        with make_session(run_folder=folder, plan=plan, resume=first > 0) as one:
            for epoch in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                after.append(weights_of(one.model))
                one.evaluate(Points(4), metric(epoch))
                if epoch == last:
                    break
    expected = 2 if name == "top1" else 0
    best = load_checkpoint(folder / "checkpoints" / "best.pt")["model"]
    weights = torch.cat([value.flatten() for value in best.values()])
    assert torch.equal(weights, after[expected])
    if name == "top1":
        assert summary_in(folder).best_epoch.epoch == expected


def test_the_best_of_a_killed_run_is_of_an_epoch_of_the_run_that_goes_on(tmp_path, monkeypatch):
    """Only the first epoch is in ``last.pt``, and after the resume none is as good as the next."""
    folder = tmp_path / "run"

    def part(*scores, resume=False):
        plan = make_tiny_plan(epochs=4)
        with make_session(run_folder=folder, plan=plan, resume=resume) as one:
            for epoch in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                if epoch == len(scores):
                    raise ConnectionError("killed")
                right = scores[epoch]
                one.evaluate(Points(4), lambda _, y, r=right: {"top1": torch.full(y.shape, r)})

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.Writer, "due", lambda _, steps: steps == 5)
        with pytest.raises(ConnectionError):
            part(0.25, 0.75)
    assert load_checkpoint(folder / "checkpoints" / "last.pt")["state"]["epoch"] == 1
    part(0.0, 0.0, 0.0, 0.0, resume=True)
    summary = summary_in(folder)
    assert [one.top1 for one in summary.epochs] == [0.25, 0.75, 0.0, 0.0]
    best = load_checkpoint(folder / "checkpoints" / "best.pt")["state"]
    assert best["best_score"] == summary.best_epoch.top1
    assert best["epoch"] == summary.best_epoch.epoch + 1


def test_a_run_that_has_only_its_best_of_the_last_epoch_has_a_last_after_the_resume(
    tmp_path, monkeypatch
):
    folder, plan, save = tmp_path / "run", make_tiny_plan(epochs=3), save_checkpoint

    def killed(path, content, **options):
        if path.stem == "last" and content["state"]["epoch"] == 3:
            raise FileError("killed")
        save(path, content, **options)

    def part(**options):
        with make_session(run_folder=folder, plan=plan, **options) as one:
            for epoch in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                one.evaluate(Points(4), lambda _, y, e=epoch: torch.full(y.shape, 0.1 * e))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "save_checkpoint", killed)
        patch.setattr(checkpoint_writer.Writer, "due", lambda _, steps: steps == 5)
        with pytest.raises(FileError, match="killed"):
            part()
    assert load_checkpoint(folder / "checkpoints" / "last.pt")["state"]["epoch"] == 1
    part(resume=True)
    assert len(summary_in(folder).epochs) == 3
    assert load_checkpoint(folder / "checkpoints" / "last.pt")["state"]["epoch"] == 3


def test_a_last_that_is_written_after_the_end_has_the_weights_and_not_their_average(
    tmp_path, monkeypatch
):
    """Of a run that was killed behind its best, at the end: training may be extended from it."""
    folder, save = tmp_path / "run", save_checkpoint
    plan = make_tiny_plan(epochs=2).model_copy(update={"average_epochs": 1.0})

    def killed(path, content, **options):
        if path.stem == "last" and content["state"]["epoch"] == 2:
            raise FileError("killed")
        save(path, content, **options)

    def part(**options):
        with make_session(run_folder=folder, plan=plan, **options) as one:
            for epoch in one.epochs():
                for features, labels in one.batches():
                    one.step(functional.cross_entropy(one.model(features), labels))
                one.evaluate(Points(4), lambda _, y, e=epoch: torch.full(y.shape, 0.1 * e))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "save_checkpoint", killed)
        patch.setattr(checkpoint_writer.Writer, "due", lambda _, steps: steps == 5)
        with pytest.raises(FileError, match="killed"):
            part()
    part(resume=True)
    best, last = (load_checkpoint(folder / "checkpoints" / f"{one}.pt") for one in ("best", "last"))
    assert last["state"]["epoch"] == best["state"]["epoch"] == 2
    for name, weights in best["model"].items():
        assert torch.equal(last["model"][name], weights)
        assert torch.equal(last["average"][name], best["average"][name])
        assert not torch.equal(last["average"][name], weights)


def test_an_epoch_whose_line_a_kill_has_taken_is_on_record_after_the_resume(tmp_path, monkeypatch):
    said = Recorder.epoch

    def killed(recorder, record):
        if record.epoch == 1:
            raise ConnectionError("killed")  # the checkpoint of its end is on the disk
        said(recorder, record)

    folder, plan = tmp_path / "run", make_tiny_plan(epochs=3)

    def part(**options):
        with make_session(run_folder=folder, plan=plan, **options) as one:
            train(one)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "epoch", killed)
        patch.setattr(checkpoint_writer.Writer, "due", lambda _, steps: steps == 10)
        with pytest.raises(ConnectionError):
            part()
    part(resume=True)
    told = [line.record for line in lines_of(folder) if line.kind == "epoch"]
    assert [one.epoch for one in told] == [0, 1, 2]
    ended = summary_in(folder).epochs
    assert [one.train_loss for one in told] == [one.train_loss for one in ended]


class Written:
    """Records of a run, as each of its starts writes them."""

    def __init__(self, folder, content=None):
        self.folder, self.recorder = folder, Recorder(folder, make_tiny_plan(epochs=4))
        if content is not None:
            self.recorder.restore(content, "resumed")

    def end_epoch(self, number, seconds, *, told=True):
        record = make_epoch(number).model_copy(update={"training_seconds": seconds})
        self.recorder.epochs.append(record)
        content = self.recorder.values()
        if told:
            self.recorder.epoch(record)
        return content

    @property
    def epochs(self):
        lines = lines_that_count(lines_of(self.folder))
        found = [line.record for line in lines if line.kind == "epoch"]
        return [(one.epoch, one.training_seconds) for one in found]


def test_the_line_of_a_lost_epoch_stands_for_none_that_was_trained_again(tmp_path):
    first = Written(tmp_path)
    content = first.end_epoch(0, 1.0)
    first.end_epoch(1, 1.0)
    again = Written(tmp_path, content)
    again.recorder.line(typed({"kind": "step", "epoch": 1, "step": 1}))
    content = again.end_epoch(1, 2.0, told=False)  # killed behind its checkpoint
    assert Written(tmp_path, content).epochs == [(0, 1.0), (1, 2.0)]


def test_an_epoch_without_a_line_before_others_takes_none_of_these_away(tmp_path):
    """An earlier version went on without the line that a kill had taken."""
    first = Written(tmp_path)
    first.end_epoch(0, 1.0)
    first.end_epoch(1, 1.0, told=False)
    content = first.end_epoch(2, 1.0)
    assert Written(tmp_path, content).epochs == [(0, 1.0), (2, 1.0)]


def test_a_line_that_a_full_disk_cuts_off_spoils_none_after_it(tmp_path, monkeypatch):
    recorder, opened = Recorder(tmp_path, make_tiny_plan()), Path.open

    @contextmanager
    def full(path, *how, **options):
        def write(text):
            file.write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with opened(path, *how, **options) as file:
            yield SimpleNamespace(write=write)

    recorder.note("one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(FileError, match="No space left"):
            recorder.note("two")
    recorder.note("three")
    assert [line.text for line in lines_of(tmp_path)] == ["one", "three"]


@pytest.mark.parametrize("also", ["step", "update"])
def test_a_scaler_that_was_left_in_the_loop_is_refused_in_one_line(also):
    scaler = torch.amp.GradScaler("cpu")

    def scaled(features, labels):
        loss = functional.cross_entropy(one.model(features), labels)
        one.step(scaler.scale(loss))
        if also == "step":
            scaler.step(one.optimizer)
        scaler.update()

    one = make_session()
    with pytest.raises(ArgumentError, match="leave the scaler out") as refused:
        run_loop(one, scaled)
    assert "\n" not in str(refused.value)


def test_a_loss_that_a_scaler_has_scaled_is_told_of_once():
    """Nothing else of the scaler is left in the loop, and the gradients are 65,536 times as large.

    A loss that is weighed, or a mean over something else, is an ordinary one.
    """
    scaler = torch.amp.GradScaler("cpu")
    ordinary = (
        lambda loss: loss * torch.tensor(0.5),
        lambda loss: 2 * loss,
        lambda loss: (loss * torch.ones(256)).sum() / torch.ones(256).sum(),
        lambda loss: loss * torch.ones(256).sum(),
    )
    for change in (scaler.scale, *ordinary):
        one = make_session()

        def step(features, labels, one=one, change=change):
            one.step(change(functional.cross_entropy(one.model(features), labels)))

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run_loop(one, step)
        found = [str(each.message) for each in told if "GradScaler" in str(each.message)]
        assert len(found) == (change == scaler.scale)
        assert all(each.filename == __file__ for each in told if "GradScaler" in str(each.message))


def test_a_loop_that_stops_early_keeps_its_last_epoch(tmp_path):
    with make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=5)) as one:
        for epoch in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
            one.evaluate(Points(4), lambda o, y, e=epoch: torch.full(y.shape, 0.5 + e))
            if epoch == 2:
                break
    assert [epoch.epoch for epoch in summary_in(tmp_path / "run").epochs] == [0, 1, 2]
    for name in ("best", "last"):
        content = load_checkpoint(tmp_path / "run" / "checkpoints" / f"{name}.pt")
        assert content["state"]["best_score"] == 2.5
        weights = torch.cat([value.flatten() for value in content["model"].values()])
        assert torch.equal(weights, weights_of(one.model))


@pytest.mark.parametrize("averaged", [None, 0.5])
def test_a_loop_that_is_left_in_the_middle_of_an_epoch_keeps_its_steps(tmp_path, averaged):
    """With a batch open, too, whose forward pass is no part of them.

    Or between two epochs, as the checkpoint of the last was not due.
    """
    plan = make_tiny_plan(epochs=3).model_copy(update={"average_epochs": averaged})
    folder = tmp_path / "run"

    def part(*leave, **options):
        torch.manual_seed(1)
        with make_session(make_model(extras=True), plan=plan, **options) as one:
            state = one._run.state
            for _ in one.epochs():
                for features, labels in one.batches() if leave != (state.epoch, 0) else ():
                    if leave == (state.epoch, state.step):
                        with put_aside():
                            one.model(features * float("nan"))
                        break
                    one.step(functional.cross_entropy(one.model(features), labels))
                if leave == (state.epoch, state.step):
                    break
        return torch.cat([value.flatten() for value in one.model.state_dict().values()])

    for leave in (0, 3), (1, 0), (2, 4):
        part(*leave, run_folder=folder, resume=True)
        kept = load_checkpoint(folder / "checkpoints" / "last.pt")["state"]
        assert (kept["epoch"], kept["step"]) == leave
        assert len(summary_in(folder).epochs) == leave[0]
    assert torch.equal(part(run_folder=folder, resume=True), part())


@pytest.mark.parametrize("last", [3, 5])
def test_a_stop_in_the_step_behind_which_a_loop_ends_is_a_stop(tmp_path, last):
    def stopped_in_its_last_step():
        with make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=5)) as one:
            next(one.epochs())
            for step, (features, labels) in enumerate(one.batches(), 1):
                if step == last:
                    os.kill(os.getpid(), signal.SIGTERM)
                one.step(functional.cross_entropy(one.model(features), labels))
                if step == last:
                    break

    with pytest.raises(SystemExit, match="143"):
        stopped_in_its_last_step()
    content = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")
    assert (content["state"]["epoch"], content["state"]["step"]) == (0, last)


def test_best_is_what_was_evaluated_also_in_the_middle_of_an_epoch(tmp_path):
    evaluated = []
    with make_session(run_folder=tmp_path / "run") as one:
        for epoch in one.epochs():
            for step, (features, labels) in enumerate(one.batches()):
                one.step(functional.cross_entropy(one.model(features), labels))
                if step == 2:
                    evaluated.append(weights_of(one.model).clone())
                    one.evaluate(Points(4), lambda o, y, e=epoch: torch.full(y.shape, 0.9 - e))
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.pt", weights_only=True)["model"]
    assert torch.equal(torch.cat([value.flatten() for value in best.values()]), evaluated[0])


def test_improving_epochs_do_not_put_off_the_checkpoint_that_is_resumed(tmp_path, monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

        def time_ns(self):
            return int(1e9 * self.now)

    clock = Clock()
    for module in (checkpoint_manager, checkpoint_writer):
        monkeypatch.setattr(module, "time", clock)
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    plan = make_tiny_plan(epochs=4, checkpoint_seconds=45)
    with make_session(run_folder=tmp_path / "run", plan=plan) as one:
        for epoch in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(one.model(features), labels))
            clock.now += 30
            one.evaluate(Points(4), lambda o, y, e=epoch: torch.full(y.shape, float(e)))
            if epoch < 2:
                assert not path.exists()
            else:
                wait_until(path.exists)


@pytest.mark.parametrize("often", [{"checkpoint_seconds": 1e-9}, {"checkpoint_steps": 1}])
def test_checkpoints_inside_an_epoch_are_written_by_the_clock_or_by_steps(tmp_path, often):
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    steps = []
    with make_session(run_folder=tmp_path / "run", plan=make_tiny_plan(epochs=1, **often)) as one:

        def nobody_writes():
            """Until then there may be no ``last.pt``, and by the clock nothing else is written."""
            return all(job.done() for job in one._run._checkpoints._writer._jobs)

        for _ in one.epochs():
            for done, (features, labels) in enumerate(one.batches()):
                if done:
                    wait_until(nobody_writes)
                    assert torch.load(path, weights_only=True)["state"]["step"] == done
                    steps.append(done)
                one.step(functional.cross_entropy(one.model(features), labels))
    assert steps == [1, 2, 3, 4]


def test_loader_processes_end_with_the_session():
    before = set(multiprocessing.active_children())
    with make_session(plan=make_tiny_plan(epochs=1), loaders=1) as one:
        train(one)
        loaders = set(multiprocessing.active_children()) - before
        assert len(loaders) == 2  # of the training and of the held-out set
    assert [loader.exitcode for loader in loaders] == [0, 0]


def test_a_full_disk_ends_the_run_and_keeps_the_former_checkpoint(tmp_path, monkeypatch):
    plan = make_tiny_plan(epochs=1, checkpoint_steps=1)
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    one = make_session(run_folder=tmp_path / "run", plan=plan)
    steps = []

    def full(descriptor):
        raise OSError(28, "No space left on device")

    def step(features, labels):
        if steps:
            wait_until(lambda: all(job.done() for job in one._run._checkpoints._writer._jobs))
            monkeypatch.setattr(os, "fsync", full)
        steps.append(one.step(functional.cross_entropy(one.model(features), labels)))

    with pytest.raises(FileError, match=r"last\.pt: .*No space left.*the previous one"):
        run_loop(one, step)
    assert len(steps) == 3  # the step after the failure
    assert torch.load(path, weights_only=True)["state"]["step"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("room", [100, 1500])
def test_a_checkpoint_that_does_not_fit_says_so_in_the_systems_words(tmp_path, room):
    """A limit on file sizes stops the writing early, or in the middle of torch's own."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"epoch": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(FileError, match=r"last\.pt: File too large; the previous one"):
            save_checkpoint(path, {"epoch": 2, "model": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_checkpoint(path)["epoch"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_noise_scale_needs_two_parts_of_a_step():
    with make_session() as one:
        train(one)
        with pytest.warns(UserWarning, match=r"here a step is one: plan with micro_batch= of half"):
            assert one.noise_scale is None
    with make_session(plan=make_tiny_plan(micro=2)) as one:
        train(one)
        assert one.noise_scale is not None


def test_time_is_divided_without_rest(tmp_path):
    with make_session(run_folder=tmp_path / "run") as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                time.sleep(0.001)
                one.step(functional.cross_entropy(one.model(features), labels))
    for epoch in summary_in(tmp_path / "run").epochs:
        (worker,) = epoch.workers
        parts = worker.input_seconds + worker.compute_seconds + worker.wait_seconds
        assert parts + worker.communication_seconds == pytest.approx(
            epoch.training_seconds, rel=1e-6
        )


def test_memory_is_measured_on_the_cpu_where_the_loop_allows_it(capfd, tmp_path):
    plan = make_tiny_plan(epochs=2)
    with make_session(plan=plan, run_folder=tmp_path / "without") as one:
        train(one)
    with make_session(plan=plan, run_folder=tmp_path / "with", profile_memory=True) as one:
        train(one, each_step=lambda: sys.stderr.write("mine\n"))
    without, found = (
        [epoch.workers[0].peak_bytes for epoch in read_record(folder, RunSummary).epochs]
        for folder in (tmp_path / "without" / "summary.json", tmp_path / "with" / "summary.json")
    )
    assert without == [None, None]
    first, second = found
    assert second is None  # one step of a row is enough
    weights = sum(4 * parameter.numel() for parameter in one.model.parameters())
    assert 2 * weights <= first < 2**16  # gradients are as large, and little else is there
    told = capfd.readouterr().err.split("\n")
    assert told.count("mine") == 10
    assert not [line for line in told if "rofiler" in line or "unknown size" in line]


def test_16_bit_copies_of_weights_go_as_the_backward_pass_goes_through_their_layers(tmp_path):
    side, peaks = 512, {}
    for precision in ("float32", "bfloat16"):
        wide = nn.Sequential(
            nn.Linear(FEATURES, side),
            *(nn.Linear(side, side) for _ in range(6)),
            nn.Linear(side, CLASSES),
        )
        folder, plan = tmp_path / precision, make_tiny_plan(epochs=1, precision=precision)
        with make_session(wide, plan=plan, run_folder=folder, profile_memory=True) as one:
            train(one)
        (epoch,) = summary_in(folder).epochs
        peaks[precision] = epoch.workers[0].peak_bytes
    copies = 2 * sum(parameter.numel() for parameter in wide.parameters())
    assert peaks["bfloat16"] - peaks["float32"] < copies / 2


def test_a_model_on_a_device_without_float64_is_refused():
    refuse_without_float64(torch.device("cuda", 0))
    with pytest.raises(PlanError, match=r"on mps, where PyTorch has no float64"):
        refuse_without_float64(torch.device("mps"))


@pytest.mark.parametrize("of_model", [True, False])
def test_weights_on_several_devices_are_refused(of_model):
    """As of a network that is spread over GPUs, or of a loss that was never moved to one."""
    model, elsewhere = make_model(), nn.Linear(2, 2, device="meta")
    trained = [*model.parameters(), *elsewhere.parameters()]
    if of_model:
        model.ends = elsewhere
    optimizer = torch.optim.SGD(trained, lr=0.1)
    what = r"the model's ends\.weight" if of_model else r"a parameter .* of shape \(2, 2\),"
    with pytest.raises(PlanError, match=rf"{what} is on meta, and the model's .*weight on cpu"):
        make_session(model, optimizer)


def test_frozen_weights_may_be_elsewhere_where_one_worker_trains():
    """Such as a teacher on another GPU: nothing of them is summed or measured."""
    model = make_model()
    model.teacher = nn.Linear(2, 2, device="meta").requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_session(model, optimizer) as one:
        train(one)
    with pytest.raises(PlanError, match=r"teacher\.weight is on meta"):
        make_session(model, optimizer, plan=make_tiny_plan((BATCH, BATCH)))
