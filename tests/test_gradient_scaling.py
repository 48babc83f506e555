"""Adaptive gradient scaling and AdaScale's gain: bounds, equations, what they leave alone."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import batchwright as bw
from batchwright.distributed.buckets import sqr_norms
from batchwright.distributed.tally import Tally
from batchwright.errors import JobError, PlanError
from batchwright.planning.gradient_scaling import small_parts, step_split_of
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.planning.schedule import rate_schedule
from batchwright.prediction.noise_scale import NoiseState, gain
from batchwright.records import AgsRule, Job, LearningRateRule
from batchwright.reporting.data.schedule_words import fact_rows
from batchwright.training.batches.sampler import epoch_order
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.gradient_scaling import (
    Adaptation,
    Adaptive,
    TensorNoise,
    factors,
    multiply,
)
from batchwright.training.step.rates import Rates
from batchwright.training.step.updater import Updater
from example_counts import examples
from samples import make_data, make_job, make_network, make_profile
from test_session import (
    SAMPLES,
    Points,
    make_model,
    make_session,
    make_tiny_plan,
    summary_in,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def rule_of(**changes):
    plain = {"mode": "gain", "base_batch": 64, "least": 1.0, "most": None, "lookback": 50}
    return AgsRule(**(plain | changes))


def state_of(trace, sqr_norm):
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (trace, sqr_norm))
    return TensorNoise(*tensors, updates=9)


# ------------------------------------------------------------------------------------ the factors

NORMS = st.one_of(
    st.sampled_from([0.0, -1.0, 5e-324, 1e-300, 1e300, -1e300]),
    st.floats(-1e3, 1e3, allow_nan=False),
)


@given(
    norms=st.lists(st.tuples(NORMS, NORMS), min_size=1, max_size=5),
    mode=st.sampled_from(["norm", "gain"]),
    base=st.integers(1, 4096),
    batch=st.integers(1, 10**6),
    least=st.sampled_from([0.25, 1.0, 1.5]),
    most=st.one_of(st.none(), st.sampled_from([1.5, 2.0, 100.0])),
)
@examples(80)
def test_factors_keep_their_bounds_whatever_the_norms(norms, mode, base, batch, least, most):
    rule = rule_of(mode=mode, base_batch=base, least=least, most=most)
    found = factors(state_of(*zip(*norms, strict=True)), rule, batch)
    ratio = batch / base
    limit = (ratio if mode == "gain" else math.sqrt(ratio)) if most is None else most
    assert all(least <= one <= max(least, limit) for one in found.tolist())


@given(trace=NORMS, sqr_norm=NORMS, base=st.integers(1, 4096), batch=st.integers(1, 10**6))
@examples(80)
def test_the_gain_keeps_its_bounds_and_is_the_factor_of_a_network_of_one_tensor(
    trace, sqr_norm, base, batch
):
    found = gain(trace, sqr_norm, base_batch=base, batch=batch)
    assert 1 <= found <= max(1.0, batch / base)
    (factor,) = factors(state_of([trace], [sqr_norm]), rule_of(base_batch=base), batch).tolist()
    assert found == pytest.approx(factor, rel=1e-9)


def test_factors_are_ratios_of_norms_at_two_batches():
    state = state_of([300.0, 0.0, 7.0, 0.0], [1.0, 2.0, 0.0, 0.0])
    wanted = [(1 + 3) / (1 + 1), 1.0, 3.0, 1.0]  # mixed, signal only, noise only, no gradient
    assert factors(state, rule_of(base_batch=100), 300).tolist() == wanted
    roots = factors(state, rule_of(mode="norm", base_batch=100), 300).tolist()
    assert roots == pytest.approx([math.sqrt(one) for one in wanted])
    assert NoiseState(300.0, 1.0, 5).gain(base_batch=100, batch=300) == 2.0


@pytest.mark.parametrize("batch", [1, 63, 64])
def test_up_to_the_base_batch_all_factors_are_exactly_1(batch):
    state = state_of([5.0, 1e-9], [0.3, 0.0])
    for mode in ("norm", "gain"):
        assert factors(state, rule_of(mode=mode), batch).tolist() == [1.0, 1.0]
    assert NoiseState(5.0, 0.3, 5).gain(base_batch=64, batch=batch) == 1.0


def test_nothing_known_gives_factors_of_exactly_1():
    assert factors(TensorNoise.of(3), rule_of(), 512).tolist() == [1.0] * 3
    assert NoiseState().gain(base_batch=64, batch=512) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38 * 2])
def test_norms_that_are_not_finite_leave_no_trace(bad):
    norms = {"parts": 4, "batch": 64, "lookback": 50}
    state = TensorNoise.of(2).update(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 1.0]), **norms)
    worse = torch.tensor([2.0, bad])
    assert state.update(worse, torch.tensor([1.0, 1.0]), **norms) is state
    assert state.update(torch.tensor([1.0, 1.0]), worse, **norms) is state


def test_norms_of_zero_are_safe():
    zeros = torch.zeros(2)
    state = TensorNoise.of(2).update(zeros, zeros, parts=4, batch=64, lookback=50)
    assert factors(state, rule_of(), 512).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (2, 6, 8, 16)])
def test_estimates_of_each_tensor_are_unbiased_for_unequal_parts(sizes):
    """Three tensors of unlike noise, drawn 20,000 times at once."""
    random, batch, draws = torch.Generator().manual_seed(0), sum(sizes), 20_000
    truth, spread, count = torch.tensor([0.5, 0.1, 0.0]), torch.tensor([1.0, 2.0, 0.5]), 10
    shares = torch.tensor(sizes) / batch
    noise = torch.randn(draws, len(sizes), 3, count, generator=random)
    parts = truth[:, None] + noise * (spread[:, None] / torch.tensor(sizes)[:, None, None].sqrt())
    whole = (shares[:, None, None] * parts).sum(1)
    weighted = (shares[:, None] * parts.square().sum(-1)).sum(1)
    state = TensorNoise.of(3)
    mean = state.update(
        weighted.mean(0), whole.square().sum(-1).mean(0), parts=len(sizes), batch=batch, lookback=1
    )  # the estimates are linear, so that of the mean norms is the mean of all
    wanted = spread.square() * count
    assert mean.trace.tolist() == pytest.approx(wanted.tolist(), rel=0.02)
    assert mean.sqr_norm.tolist() == pytest.approx((truth.square() * count).tolist(), abs=0.02)


def test_first_steps_count_alike_and_later_the_past_fades():
    state, norms = TensorNoise.of(1), {"parts": 2, "batch": 1, "lookback": 10}
    for trace in [1.0] * 5 + [3.0] * 5:
        state = state.update(torch.tensor([trace + 1]), torch.tensor([1.0]), **norms)
    assert state.trace.item() == pytest.approx(2.0)
    for _ in range(50):
        state = state.update(torch.tensor([4.0]), torch.tensor([1.0]), **norms)
    assert state.trace.item() == pytest.approx(3.0, rel=0.01)


# ------------------------------------------------------------------------------------- the descent


def stepped(start, gradient, scales, rate):
    """Weights, each a tensor of its own, after a step of an `Updater` with plain SGD."""
    weights = [torch.nn.Parameter(one.clone()) for one in start]
    updater = Updater(weights, torch.optim.SGD(weights, lr=rate), clip_norm=None)
    for weight, one in zip(weights, gradient, strict=True):
        weight.grad = one.clone()
    norms = updater.rescale(Tally(1.0, 0.0, sqr_norms=sqr_norms(weights)), 1.0)
    assert updater.apply(norms, scales)
    return torch.stack([weight.detach() for weight in weights])


@given(
    start=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    noise=st.lists(st.floats(0, 5), min_size=3, max_size=3),
    rate=st.floats(1e-3, 1.0),
    mode=st.sampled_from(["norm", "gain"]),
    base=st.integers(1, 64),
    ratio=st.floats(1, 16),
)
@examples(80)
def test_a_scaled_step_descends_as_far_as_the_bound_says(start, noise, rate, mode, base, ratio):
    r"""On a quadratic the expectation is exact: E f(w') = f(w - eta s g) + eta^2 sum s^2 a v / 2B.

    The bound: f - (eta s_min - L eta^2 s_max^2 / 2) |grad|^2 + L eta^2 s_max^2 sigma^2 / 2B, with
    the least and the most that the rule promises for s.
    """
    batch = round(base * ratio)
    curvature, w, variance = (
        torch.tensor(v, dtype=torch.float64) for v in ([0.1, 1.0, 4.0], start, noise)
    )
    gradient = curvature * w
    state = TensorNoise(trace=variance, sqr_norm=gradient.square(), updates=9)
    s = factors(state, rule_of(mode=mode, base_batch=base), batch)
    found = stepped(w, gradient, s, rate)
    torch.testing.assert_close(found, w - rate * s * gradient)

    def f(at):
        return float((curvature * at.square()).sum()) / 2

    expected = f(found)
    expected += float((curvature * s.square() * variance).sum()) * rate**2 / (2 * batch)
    steepest, least, most = 4.0, 1.0, batch / base if mode == "gain" else math.sqrt(batch / base)
    descent = rate * least - steepest * rate**2 * most**2 / 2
    bound = f(w) - descent * float(gradient.square().sum())
    bound += steepest * rate**2 * most**2 * sum(noise) / (2 * batch)
    assert expected <= bound + 1e-9 * (1 + abs(bound))


def test_a_whole_training_keeps_the_mean_gradient_under_the_bound():
    r"""With factors from the parts themselves, at the largest rate that the bound allows:

    mean |grad|^2 <= 2 (f_0 - f*) / (eta s_min T) + L eta s_max^2 sigma^2 / (s_min B).
    """
    random = torch.Generator().manual_seed(0)
    curvature, steps, parts, size = torch.tensor([0.1, 1.0, 4.0]), 200, 4, 32
    batch, sigma = parts * size, 6.0  # sigma^2: trace of one sample's noise
    rule = rule_of(mode="norm", base_batch=32)
    most = math.sqrt(batch / rule.base_batch)
    rate = 1 / (4.0 * most**2)
    w, state, seen, scales = torch.tensor([3.0, 2.0, 1.0]), TensorNoise.of(3), [], []
    start = float((curvature * w.square()).sum()) / 2
    for _ in range(steps):
        gradient = curvature * w
        seen.append(float(gradient.square().sum()))
        spread = math.sqrt(sigma / 3 / size)
        each = gradient + spread * torch.randn(parts, 3, generator=random)
        mean = each.mean(0)
        scale = factors(state, rule, batch)
        scales += scale.tolist()
        state = state.update(
            each.square().mean(0), mean.square(), parts=parts, batch=batch, lookback=50
        )
        w = w - rate * (scale * mean).float()
    bound = 2 * start / (rate * steps) + 4.0 * rate * most**2 * sigma / batch
    assert sum(seen) / steps <= bound
    assert min(scales) == 1
    assert 1.5 < max(scales) <= most  # where little but noise is left


# ------------------------------------------------------------------------------- what is left alone


def test_a_factor_of_1_leaves_a_gradient_untouched():
    gradients = [torch.tensor([1.0, math.nan]), torch.tensor([2.0]), None]
    versions = [g._version for g in gradients if g is not None]
    multiply(gradients, [1.0, 3.0, 5.0])
    assert [g._version for g in gradients if g is not None] == [versions[0], versions[1] + 1]
    assert gradients[1].item() == 6.0


def update(clip, adaptation, *, frozen=False):
    """Weights after a step of an `Updater`."""
    model = make_model(extras=True)
    model[0].bias.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    plan = make_tiny_plan()
    updater = Updater(list(model.parameters()), optimizer, clip_norm=clip)
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    parameters = [p for p in model.parameters() if p.requires_grad]
    tally = Tally(8.0, 0.0, sqr_norms=sqr_norms(parameters))
    Rates(optimizer, plan, own=False, samples_per_epoch=SAMPLES).set(
        0.0, plan.stages[0], adaptation.gain
    )
    assert updater.apply(updater.rescale(tally, 1.0), adaptation.factors)
    return model, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.3])
def test_factors_of_exactly_1_reproduce_the_optimizer_bit_for_bit(clip):
    plain = update(clip, Adaptation())[1]
    ones = update(clip, Adaptation(1.0, torch.ones(len(plain), dtype=torch.float64)))[1]
    assert all(torch.equal(one, two) for one, two in zip(plain, ones, strict=True))


def test_decay_is_not_scaled_and_each_trained_tensor_has_its_own_factor():
    before = [p.detach().clone() for p in make_model(extras=True).parameters()]
    count = len(before)
    scales = [1.0 + index for index in range(count - 1)]  # the frozen one has none
    tensors = torch.tensor(scales, dtype=torch.float64)
    after = update(None, Adaptation(2.0, tensors), frozen=True)[1]
    scales.insert(1, 0.0)
    for index, (old, new, scale) in enumerate(zip(before, after, scales, strict=True)):
        wanted = old
        if index != 1:
            wanted = old - 2 * 0.1 * (scale * 0.1 * (index + 1) + 0.1 * old)
        torch.testing.assert_close(new, wanted)


def test_clipping_comes_after_the_scaling_and_holds_for_what_is_applied():
    model, _ = update(0.5, Adaptation(1.0, torch.full((6,), 3.0, dtype=torch.float64)))
    norms = torch.stack([p.grad.norm() for p in model.parameters()])
    assert norms.norm().item() == pytest.approx(0.5)


# --------------------------------------------------------------------------------------- in a run

SCALED = rule_of(mode="norm", base_batch=1)


def scaled_plan(rule=SCALED, **changes):
    return make_tiny_plan(**({"micro": 2} | changes)).model_copy(update={"ags": rule})


def weights_of(plan, *, until=None, **options):
    """What a run ends with; after ``until`` micro-batches it is asked to stop."""
    model, passes = make_model().double(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    with make_session(model, optimizer, plan=plan, **options) as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features.double()), labels))
                passes += 1
                if passes == until:
                    os.kill(os.getpid(), signal.SIGTERM)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_with_factors_held_at_1_a_run_is_the_plain_one_bit_for_bit():
    held = scaled_plan(rule_of(base_batch=1, most=1.0), clip_norm=0.5)
    plain = held.model_copy(update={"ags": None})
    assert torch.equal(weights_of(held), weights_of(plain))


def test_a_run_does_what_a_loop_by_hand_does_with_factors_from_steps_before():
    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    points, state = Points(), TensorNoise.of(2)
    for epoch in range(2):
        for step in epoch_order(SAMPLES, epoch, 0).split(5):
            optimizer.zero_grad()
            weighted = torch.zeros(2, dtype=torch.float64)
            parts = step.tensor_split(-(-len(step) // 2))
            for part in parts:
                items = [points[int(index)] for index in part]
                features = torch.stack([one for one, _ in items]).double()
                loss = functional.cross_entropy(
                    model(features), torch.tensor([y for _, y in items])
                )
                found = torch.autograd.grad(loss, list(model.parameters()))
                share = len(part) / len(step)
                for index, (parameter, gradient) in enumerate(
                    zip(model.parameters(), found, strict=True)
                ):
                    weighted[index] += share * gradient.square().sum()
                    added = share * gradient
                    parameter.grad = added if parameter.grad is None else parameter.grad + added
            norms = torch.stack([p.grad.square().sum() for p in model.parameters()])
            for parameter, scale in zip(
                model.parameters(), factors(state, SCALED, len(step)), strict=True
            ):
                parameter.grad *= scale
            if len(parts) > 1:
                state = state.update(
                    weighted, norms, parts=len(parts), batch=len(step), lookback=50
                )
            optimizer.step()
    wanted = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.allclose(weights_of(scaled_plan()), wanted, rtol=1e-5)
    assert not torch.allclose(weights_of(make_tiny_plan(micro=2)), wanted, rtol=1e-2)


@pytest.mark.parametrize("scaling", ["factors", "gain"])
def test_a_resumed_run_has_the_same_bits(tmp_path, scaling):
    plan = scaled_plan() if scaling == "factors" else gaining_plan()
    whole = weights_of(plan, run_folder=tmp_path / "whole")
    with pytest.raises(SystemExit):
        weights_of(plan, run_folder=tmp_path / "pieces", until=8)
    again = weights_of(plan, run_folder=tmp_path / "pieces", resume=True)
    assert torch.equal(whole, again)
    records = [summary_in(tmp_path / name).epochs for name in ("whole", "pieces")]
    for one, two in zip(*records, strict=True):
        assert one.gradient_factors == two.gradient_factors
        assert one.rate_gain == two.rate_gain
        assert one.noise_scale == two.noise_scale


def gaining_plan(**changes):
    rule = LearningRateRule(
        base=0.1, base_batch=2, scaling="gain", peak=0.1, warmup_epochs=0, decay="none"
    )
    return make_tiny_plan(rule=rule, micro=2, **changes)


def test_the_gain_multiplies_the_rate_from_the_second_step_on(tmp_path):
    rates, gains = [], []
    with make_session(plan=gaining_plan(), run_folder=tmp_path / "run") as one:
        train(one, each_step=lambda: rates.append(one.optimizer.param_groups[0]["lr"]))
    assert rates[2] == 0.1  # of three micro-batches: nothing was known before the first step
    gains = [rate / 0.1 for rate in rates]
    assert all(1 <= one <= 2.5 for one in gains)
    assert max(gains) > 1
    (first, second) = summary_in(tmp_path / "run").epochs
    assert first.rate_gain.least == 1.0
    assert first.rate_gain.most <= 2.5
    assert second.rate_gain.least == 1.0  # the tail of 2 is no larger than the base batch
    assert 1 < second.rate_gain.mean < second.rate_gain.most
    assert first.gradient_factors is None
    line = bw.metrics(tmp_path / "run")[-1]
    assert line["lr/gain_most"] == second.rate_gain.most


def test_rates_of_ones_own_are_left_alone_by_the_gain():
    with pytest.warns(UserWarning, match="the plan wanted your rate times a measured gain"):
        one = make_session(plan=gaining_plan(), learning_rate="mine")
    with one:
        train(one)
    assert one.optimizer.param_groups[0]["lr"] == 0.1


def test_adam_is_told_what_factors_cannot_do():
    model = make_model()
    with (
        pytest.warns(UserWarning, match="ags: Adam divides each gradient by its own recent size"),
        make_session(model, torch.optim.Adam(model.parameters()), plan=scaled_plan()) as one,
    ):
        train(one)


def test_losses_that_are_no_means_over_samples_leave_the_factors_at_1(tmp_path, recwarn):
    with make_session(plan=scaled_plan(), run_folder=tmp_path / "run") as one:
        for _ in one.epochs():
            for features, labels in one.batches():
                loss = functional.cross_entropy(one.model(features), labels)
                one.step(loss, weight=3.0 * len(labels))
    (told,) = recwarn
    assert "so ags.mode=norm learns nothing from it" in str(told.message)
    assert told.filename == __file__
    for epoch in summary_in(tmp_path / "run").epochs:
        assert epoch.gradient_factors is None
        assert epoch.noise_scale is None


def test_memory_that_runs_out_in_a_later_micro_batch_changes_nothing():
    wanted, failed = weights_of(scaled_plan()), []

    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    with make_session(model, optimizer, plan=scaled_plan()) as one:

        def loss_of(features, labels):
            if len(failed) < 5:
                failed.append(len(labels))
                if len(failed) == 5:  # the second of the second step's three
                    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
            return functional.cross_entropy(model(features.double()), labels)

        for _ in one.epochs():
            for features, labels in one.batches():
                one.step(lambda f=features, y=labels: loss_of(f, y))
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    # From there on in other parts, so with other factors; a step counted twice would be far off.
    assert torch.allclose(found, wanted, rtol=0.2)
    assert failed[4] == 2


def test_one_part_alone_teaches_nothing():
    known = RunState()
    adaptive = Adaptive(scaled_plan(), known)
    norms = torch.ones(2)
    adaptive.learn(Tally(8.0, 0.0, parts=1, local_sqr_norms=2 * norms), norms, batch=8)
    assert known.tensors is None
    assert adaptive.of_step(8) == Adaptation()
    adaptive.learn(Tally(8.0, 0.0, parts=2, local_sqr_norms=2 * norms), norms, batch=8)
    assert known.tensors.updates == known.noise.updates == 1
    again = RunState()
    again.restore(
        json.loads(json.dumps({"noise": asdict(known.noise), "tensors": None})), EpochMeter()
    )
    assert again.noise == known.noise


# ----------------------------------------------------------------------------------- in the plan


def planned(**job):
    return plan_without_profile(Job(**({"workers": 1} | job)), make_data(), make_network())


def reason(plan, choice):
    return next((one for one in plan.reasons if one.choice == choice), None)


@pytest.mark.parametrize(("workers", "micro"), [(1, 64), (2, 64), (4, 64), (8, 32)])
def test_a_large_batch_is_cut_into_parts_enough(workers, micro):
    plan = planned(workers=workers, global_batch=256, base_batch=64, ags={"mode": "norm"})
    assert plan.ags == rule_of(mode="norm")
    assert plan.stages[0].micro_batch_size == micro
    assert reason(plan, "parts of a step").value == f"{max(4, workers)} of up to {micro} samples"
    assert reason(plan, "gradient scaling").value == "norm, factors of 1 to 2"


def test_micro_batches_as_asked_stay_where_there_are_parts_enough():
    asked = {"global_batch": 256, "base_batch": 64, "ags": {"mode": "gain", "parts": 8}}
    assert planned(micro_batch=16, **asked).stages[0].micro_batch_size == 16
    assert planned(micro_batch=100, **asked).stages[0].micro_batch_size == 32
    assert planned(global_batch=256).stages[0].micro_batch_size == 256


def test_up_to_the_base_batch_steps_stay_whole_and_the_plan_says_why():
    plan = planned(global_batch=128, base_batch=128, ags={"mode": "norm"})
    assert plan.stages[0].micro_batch_size == 128
    assert "nothing to make up for" in reason(plan, "gradient scaling").why
    assert reason(plan, "parts of a step") is None


def test_optimizers_that_factors_do_not_reach_are_named():
    asked = {"global_batch": 512, "ags": {"mode": "norm"}}
    assert "nearly cancels" in reason(planned(optimizer="adamw", **asked), "gradient scaling").why
    assert "nearly" not in reason(planned(**asked), "gradient scaling").why


def test_a_gain_of_the_rate_wants_parts_too_and_the_plan_says_that_both_act():
    plan = planned(global_batch=512, base_batch=64, scaling="gain")
    assert plan.ags is None
    assert plan.stages[0].micro_batch_size == 128
    assert reason(plan, "parts of a step").value == "4 of up to 128 samples"
    plan = planned(global_batch=512, base_batch=64, scaling="gain", ags={"mode": "gain"})
    assert "both act" in reason(plan, "gradient scaling").why


def test_bounds_that_cross_and_batches_of_one_part_are_refused():
    with pytest.raises(JobError, match=r"ags\.least=3 is more than ags\.most=2"):
        planned(global_batch=512, ags={"mode": "norm", "least": 3, "most": 2})
    with pytest.raises(PlanError, match=r"ags\.mode=norm .* 3 samples cannot be cut into 2 of"):
        planned(global_batch=3, base_batch=2, ags={"mode": "norm"})


@pytest.mark.parametrize(
    ("job", "largest", "doubted"),
    [
        ({"scaling": "none", "ags": {"mode": "gain"}}, "0.4 per step at most, 4 times", False),
        ({"scaling": "sqrt", "ags": {"mode": "norm"}}, "0.4 per step at most, 4 times", False),
        ({"scaling": "sqrt", "ags": {"mode": "gain"}}, "0.4 per step at most, 4 times", False),
        ({"scaling": "gain", "ags": {"mode": "gain"}}, "0.4 per step at most, 4 times", False),
        ({"scaling": "linear", "ags": {"mode": "gain", "most": 1}}, "0.4 per step at most", False),
        ({"scaling": "sqrt", "ags": {"mode": "gain", "most": 9}}, "0.8 per step at most, 8", True),
        ({"scaling": "gain", "ags": {"mode": "gain", "most": 9}}, "1.6 per step at most", True),
        ({"scaling": "gain", "ags": {"mode": "gain", "least": 2}}, "0.8 per step at most", True),
    ],
)
def test_what_rate_and_factors_come_to_together_is_told_and_doubted_beyond_linear(
    job, largest, doubted
):
    plan = planned(global_batch=256, base_batch=64, **job)
    assert f"a tensor's rate comes to {largest}" in reason(plan, "gradient scaling").why
    told = rate_schedule(plan)
    assert len(told.doubts) == doubted
    assert not doubted or "linear scaling to 256 samples gives 4 times" in told.doubts[0]
    words = dict(fact_rows(told)).get("adaptive gradient scaling")
    adds = doubted or (plan.ags.most != 1 and plan.learning_rate.scaling != "gain")
    assert (largest.partition(" at most")[0] in words) == adds


def test_on_top_of_linear_scaling_factors_have_no_room_and_the_plan_says_so():
    plan = planned(global_batch=256, base_batch=64, scaling="linear", ags={"mode": "gain"})
    assert "scaling=linear does all that already" in reason(plan, "gradient scaling").why
    assert reason(plan, "gradient scaling").value == "gain, factors of 1 to 1"
    (doubt,) = rate_schedule(plan).doubts
    assert doubt.startswith("ags.mode=gain has nothing to do on top of scaling=linear")
    learnt = RunState(tensors=state_of([300.0], [1.0]))
    assert Adaptive(plan, learnt).of_step(256).factors.tolist() == [1.0]


@given(
    mode=st.sampled_from(["norm", "gain"]),
    scaling=st.sampled_from(["none", "sqrt", "linear", "gain"]),
    trace=st.floats(0, 1e6),
    ratio=st.integers(1, 64),
)
@settings(max_examples=60)
def test_rate_and_factors_together_stay_within_linear_scaling(mode, scaling, trace, ratio):
    plan = planned(base_batch=8, global_batch=8 * ratio, scaling=scaling, ags={"mode": mode})
    learnt = RunState(noise=NoiseState(trace, 1.0, 9), tensors=state_of([trace, 0.0], [1.0, 1.0]))
    adaptation = Adaptive(plan, learnt).of_step(8 * ratio)
    raised = plan.learning_rate.peak / plan.learning_rate.base * adaptation.gain
    largest = max(adaptation.factors.tolist())
    assert largest >= 1
    assert raised * largest <= ratio * (1 + 1e-9)


@pytest.mark.parametrize("least", [3, 2.1])
def test_a_least_factor_above_all_that_the_batch_wants_is_refused(least):
    asked = {"global_batch": 256, "base_batch": 64}
    with pytest.raises(JobError, match=r"ags\.least=.* the largest factor at a batch of 256, 2"):
        planned(**asked, ags={"mode": "norm", "least": least})
    held = planned(**asked, ags={"mode": "norm", "least": least, "most": least})
    assert f"factors of {least:g} to {least:g}" in reason(held, "gradient scaling").value


@pytest.mark.parametrize(
    ("batch", "parts", "why", "doubts"),
    [
        (256, 4, "of which there are to be at least ags.parts=4.", []),
        (256, 2, "fewer than 4 tell little", ["give ags.parts=4"]),
        (5, 4, "ags.parts=4 of at least 2 samples do not come out of 5; fewer", ["give a larger"]),
        (512, 1000, "ags.parts=1000 of at least 2", ["256 parts of up to 2 samples in steps of"]),
    ],
)
def test_parts_that_are_few_or_small_are_told(batch, parts, why, doubts):
    asked = {"mode": "norm", "parts": parts}
    plan = planned(global_batch=batch, base_batch=2 if batch < 9 else 64, ags=asked)
    assert why in reason(plan, "parts of a step").why
    assert ("to be at least" in reason(plan, "parts of a step").why) == (batch == 256)
    assert batch != 5 or reason(plan, "parts of a step").value == "2 of up to 3 samples"
    found = rate_schedule(plan).doubts
    assert len(found) == len(doubts)
    assert all(said in doubt for said, doubt in zip(doubts, found, strict=True))


@pytest.mark.parametrize("local", range(2, 40))
@pytest.mark.parametrize("least", [1, 2])
def test_small_parts_are_large_enough_and_are_cut_alike_in_training(local, least):
    from batchwright.training.batches.sampler import micro_batches

    for passes in (1, 2, 4, 8):
        parts = small_parts(local, passes, least)
        assert local // parts >= min(least, local)
        assert parts >= min(passes, local // least)
        largest = -(-local // parts)
        assert micro_batches(local, largest, least)[0] <= largest


def test_a_measured_plan_counts_the_time_of_its_parts():
    job = make_job(base_batch=32, global_batch=128)
    whole = make_plan(make_profile(), job)
    cut = make_plan(make_profile(), Job(**(job.model_dump() | {"ags": {"mode": "gain"}})))
    assert whole.ags is None
    assert (whole.stages[0].micro_batch_size, cut.stages[0].micro_batch_size) == (64, 32)
    before, after = (plan.stages[0].predicted_epoch_seconds.value for plan in (whole, cut))
    assert after > before
    assert reason(cut, "parts of a step").value == "4 of up to 32 samples"


def test_each_worker_of_a_parameter_server_has_parts_of_its_own():
    job = Job(
        method="dual-batch",
        launch="virtual",
        workers=4,
        base_batch=16,
        dual={"large_batches": (64,), "small_workers": 2},
        virtual={"sample_seconds": 0.001, "step_seconds": 0.02},
        ags={"mode": "norm"},
    )
    plan = plan_without_profile(job, make_data(), make_network())
    (stage,) = plan.stages
    for size in stage.local_batch_sizes:
        assert size <= 16 or -(-size // stage.micro_batch_size) >= 4
    assert step_split_of(job).alone
