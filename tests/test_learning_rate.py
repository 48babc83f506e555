"""`algorithms.learning_rate`: the rate over samples seen."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.algorithms.learning_rate import (
    fitted_warmup,
    make_rule,
    raises_nothing,
    rate_factor,
    reach,
    scaled_rate,
)
from batchwright.errors import JobError
from batchwright.planning.candidates.optimizer import chosen_optimizer
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job, LearningRateRule
from batchwright.records.documents import load_job
from batchwright.records.registries.optimizers import MUON
from batchwright.workload.optimizers import without_compiler
from samples import make_data, make_network

SAMPLES = 50_000
GOLDEN = json.loads((Path(__file__).parent / "golden" / "warmup.json").read_text())


def rule_of(**changes):
    plain = {"base": 0.1, "base_batch": 128, "scaling": "linear", "peak": 0.8}
    return LearningRateRule(**{**plain, "warmup_epochs": 5, "decay": "none", **changes})


def planned_rule(job, batch, epochs, **more):
    return make_rule(job, batch, epochs, chosen_optimizer(job, batch), **more)


def factor(epoch, rule, epochs=90):
    return rate_factor(epoch * SAMPLES, rule=rule, samples_per_epoch=SAMPLES, epochs=epochs)


@pytest.mark.parametrize("point", GOLDEN["points"], ids=lambda one: str([*one.values()][:3]))
def test_warmup_follows_the_published_points(point):
    rule = rule_of(base=0.0125, peak=0.0125 * point["N"], warmup_epochs=point["W"])
    assert factor(point["e"], rule) == pytest.approx(point["factor"], abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 5, 10, 20])
def test_steps_fall_at_the_published_epochs(warmup):
    rule = rule_of(decay="steps", warmup_epochs=warmup)
    for one in GOLDEN["decay"]:
        assert factor(one["from_epoch"], rule) == pytest.approx(one["factor"])
        assert factor(one["from_epoch"] - 0.01, rule) == pytest.approx(10 * one["factor"])


@pytest.mark.parametrize("decay", ["cosine", "steps", "one-cycle", "none"])
@pytest.mark.parametrize("warmup", [0, 3, 4.7])
def test_the_end_of_warmup_is_exactly_the_peak(decay, warmup):
    assert factor(warmup, rule_of(decay=decay, warmup_epochs=warmup)) == 1.0


@pytest.mark.parametrize("decay", ["cosine", "one-cycle", "none"])
def test_warmup_joins_the_decay_without_a_jump(decay):
    rule = rule_of(decay=decay)
    before, after = factor(5 - 1e-7, rule), factor(5 + 1e-7, rule)
    assert before == pytest.approx(1, abs=1e-6)
    assert after == pytest.approx(1, abs=1e-6)


def test_cosine_falls_from_the_peak_to_zero():
    rule = rule_of(decay="cosine", warmup_epochs=10)
    assert factor(50, rule) == pytest.approx(0.5)
    assert factor(90, rule) == 0.0
    falling = [factor(epoch, rule) for epoch in range(10, 91)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("epoch", "expected"), [(29.9, 1), (30, 0.1), (59.9, 0.1), (60, 0.01), (80, 0.001), (90, 0.001)]
)
def test_steps_come_at_a_third_two_thirds_and_eight_ninths(epoch, expected):
    assert factor(epoch, rule_of(decay="steps")) == pytest.approx(expected)


def test_past_the_end_holds_what_holds_at_the_end():
    for decay in ("cosine", "steps", "one-cycle", "none"):
        rule = rule_of(decay=decay)
        assert factor(200, rule) == factor(90, rule)


def test_a_warmup_as_long_as_the_training_ends_at_the_peak():
    rule = rule_of(decay="cosine", warmup_epochs=10)
    assert factor(10, rule, epochs=10) == 1.0
    assert factor(12, rule, epochs=10) == 1.0


def test_a_rate_scaled_down_does_not_start_above_its_peak():
    rule = rule_of(base=0.1, peak=0.05)
    assert factor(0, rule) == factor(5, rule) == 1.0


@pytest.mark.parametrize(
    ("scaling", "expected"), [("linear", 0.8), ("sqrt", 0.1 * 8**0.5), ("none", 0.1)]
)
def test_each_scaling_rule_is_as_published(scaling, expected):
    assert scaled_rate(0.1, 128, 1024, scaling) == pytest.approx(expected)
    assert scaled_rate(0.1, 128, 128, scaling) == 0.1


@pytest.mark.parametrize("one", GOLDEN["peak_lr"], ids=lambda one: str(one["N"]))
def test_linear_scaling_over_workers_gives_the_published_peak(one):
    peak = scaled_rate(one["base_lr"], 128, 128 * one["N"], "linear")
    assert peak == pytest.approx(one["lr"])


def test_a_gain_is_not_known_beforehand_so_the_plan_has_the_base_rate():
    assert scaled_rate(0.1, 128, 1024, "gain") == 0.1
    rule = planned_rule(Job(scaling="gain"), 1024, 30)
    assert (rule.peak, rule.warmup_epochs) == (rule.base, 0)


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_a_warmup_left_open_is_as_long_as_the_poster_found_best(scaling):
    job = Job(base_batch=128, scaling=scaling)
    for batch, epochs, warmup in ((7680, 90, 5), (30720, 90, 10), (7680, 180, 10)):
        assert planned_rule(job, batch, epochs).warmup_epochs == warmup


@pytest.mark.parametrize("batch", [1, 64, 128])
def test_a_rate_that_is_not_scaled_up_has_no_warmup(batch):
    assert planned_rule(Job(), batch, 30).warmup_epochs == 0
    assert planned_rule(Job(scaling="none"), 64 * batch, 30).warmup_epochs == 0
    assert fitted_warmup(batch / 128, 30)[:3] == (0, 0, 0)


@given(first=st.floats(1.001, 1e6), second=st.floats(1.001, 1e6), epochs=st.integers(1, 1000))
def test_a_larger_batch_never_warms_up_shorter_and_nothing_over_half_the_epochs(
    first, second, epochs
):
    small, large = (fitted_warmup(ratio, epochs) for ratio in sorted((first, second)))
    for shorter, longer in zip(small[:3], large[:3], strict=True):
        assert 0 < shorter <= longer <= epochs / 2
    for one in (small, large):
        assert one.least <= one.epochs <= one.most


def test_the_warmup_is_as_uncertain_as_the_posters_grid_is_coarse():
    assert fitted_warmup(60, 90) == (5, 2.5, 7.5, "law")
    assert fitted_warmup(240, 90) == (10, 7.5, 15, "law")
    below, above = fitted_warmup(6, 90), fitted_warmup(2400, 90)
    assert below.most / below.least > 7.5 / 2.5
    assert above.most / above.least > 15 / 7.5


def test_the_line_through_the_posters_optima_is_as_its_authors_read_it():
    # W(B) = 5 + 5 (B - 7680) / 23040 of 90 epochs, at 128 samples a GPU.
    for batch, warmup in ((7680, 5), (30_720, 10), (15_360, 6.67), (19_200, 7.5)):
        assert fitted_warmup(batch / 128, 90, "linear").epochs == warmup
    assert fitted_warmup(60, 90, "linear")[:3] == (5, 2.5, 7.5)
    assert fitted_warmup(1, 90, "linear")[:3] == (0, 0, 0)
    assert planned_rule(Job(warmup_law="linear"), 15_360, 90).warmup_epochs == 6.67


def test_a_warmup_may_begin_far_below_the_base_rate_also_where_the_rate_is_not_scaled():
    for scaling, batch, peak in (("none", 7680, 0.1), ("linear", 7680, 6.0), ("gain", 7680, 0.1)):
        rule = planned_rule(Job(scaling=scaling, warmup_start=0.01, learning_rate=0.1), batch, 90)
        assert (rule.peak, rule.warmup_epochs) == (pytest.approx(peak), 5)
        assert factor(0, rule) == 0.01
        assert factor(2.5, rule) == pytest.approx(0.505)
        assert factor(5, rule) == 1
        assert not raises_nothing(rule)
    assert raises_nothing(planned_rule(Job(scaling="none", warmup_epochs=3), 7680, 90))
    rise = planned_rule(Job(decay="one-cycle", warmup_start=0.1), 1280, 90)
    assert factor(0, rise) == pytest.approx(0.1)


@pytest.mark.parametrize("start", ["0", "1", "-0.1", "low"])
def test_a_warmup_that_begins_at_no_share_of_the_peak_is_refused_in_a_line(start):
    with pytest.raises(JobError, match="warmup_start") as refused:
        load_job(None, [f"warmup_start={start}"])
    assert "\n" not in str(refused.value)


def test_one_cycle_is_that_of_pytorch():
    steps, peak = 400, 0.8
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = without_compiler(torch.optim.SGD)([weight], lr=1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    rule = planned_rule(Job(learning_rate=peak, decay="one-cycle"), 128, 90)
    assert rule.warmup_epochs == 27
    top = 0.3 * steps - 1  # of its steps, counted from 0, has the peak; its last one the end
    for step in range(steps):
        share = 0.3 * step / top if step < top else 0.3 + 0.7 * (step - top) / (steps - 1 - top)
        ours = rule.peak * factor(90 * share, rule)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-12)
        optimizer.step()
        if step < steps - 1:
            theirs.step()


def test_one_cycle_rises_as_long_as_asked_and_ends_far_below_its_start():
    rule = planned_rule(Job(decay="one-cycle", warmup_epochs=9), 1280, 90)
    assert factor(0, rule) == pytest.approx(1 / 25)
    assert factor(4.5, rule) == pytest.approx((1 + 1 / 25) / 2)
    assert factor(9, rule) == 1
    assert factor(90, rule) == factor(200, rule) == pytest.approx(1 / 250_000)
    falling = planned_rule(Job(decay="one-cycle", warmup_epochs=0), 1280, 90)
    assert factor(0, falling) == 1


@given(
    epoch=st.floats(0, 200),
    warmup=st.floats(0, 90),
    peak=st.floats(1e-6, 1e6),
    decay=st.sampled_from(["cosine", "steps", "one-cycle", "none"]),
)
def test_the_factor_is_a_share_at_any_moment(epoch, warmup, peak, decay):
    rule = rule_of(peak=peak, warmup_epochs=warmup, decay=decay)
    assert 0 <= factor(epoch, rule) <= 1


def test_a_stage_of_a_cycle_has_its_own_rate_and_no_other_decay():
    job = Job(
        method="cyclic", resolutions=(24, 32), epochs=14, global_batch=1024, decay="one-cycle"
    )
    data = make_data(train_samples=50_000)
    plan = plan_without_profile(job, data, make_network())
    rule = plan.learning_rate
    assert (rule.decay, rule.warmup_epochs) == ("none", fitted_warmup(8, 14).epochs)
    for epoch in range(1, 14):  # the warm-up is over
        stage = plan.stages[plan.stage_of(epoch)]
        assert stage.learning_rate == pytest.approx(rule.peak / 10**stage.rate_stage)
        assert factor(epoch, rule, epochs=14) == 1
    assert factor(0, rule, epochs=14) * plan.stages[0].learning_rate == pytest.approx(rule.base)


def test_default_rate_depends_on_the_optimizer_and_an_asked_one_is_kept():
    assert planned_rule(Job(), 128, 30).peak == 0.1
    assert planned_rule(Job(optimizer="adamw"), 128, 30).peak == 0.001
    rule = planned_rule(Job(learning_rate=0.3, base_batch=64, scaling="linear"), 128, 30)
    assert (rule.base, rule.base_batch, rule.peak) == (0.3, 64, 0.6)


@pytest.mark.parametrize("rate", ["0", "-0.1", "nan", "inf"])
def test_a_rate_that_is_not_above_zero_and_finite_is_refused(rate):
    with pytest.raises(JobError, match="job key learning_rate = "):
        load_job(None, [f"learning_rate={rate}"])


@pytest.mark.parametrize(("rate", "batch"), [(1e308, 12800), (5e-324, 1)])
def test_a_rate_that_scaling_makes_infinite_or_zero_is_refused(rate, batch):
    with pytest.raises(JobError, match="give another rate"):
        planned_rule(Job(learning_rate=rate, scaling="linear"), batch, 30)


@pytest.mark.parametrize(
    ("job", "batch", "said"),
    [
        ({"scaling": "gain"}, 512, "512 / 128 = 4"),
        ({"scaling": "gain"}, 64, "nothing to gain"),
        ({"scaling": "linear"}, 64, "scaled down"),
        ({"scaling": "sqrt"}, 1024, "leave 0.0616 to 2.5 epochs open"),
        ({"decay": "one-cycle"}, 1024, "over 30 % of the epochs"),
        ({"warmup_epochs": 2}, 1024, "Asked for."),
        ({"warmup_epochs": 2, "warmup_start": 0.01}, 1024, "0.01 of the peak as asked"),
        ({"scaling": "none", "warmup_start": 0.5}, 1024, "Linear from 0.05, 0.5 of the peak"),
        ({"warmup_law": "linear"}, 1024, "A line in the batch goes through both"),
        ({"decay": "one-cycle", "warmup_start": 0.1}, 1024, "from 0.1 of the peak as asked, over"),
        ({"warmup_start": 0.01}, 64, "So warmup_start does nothing: warmup_epochs= would"),
    ],
)
def test_the_plan_says_what_its_rate_is_made_of(job, batch, said):
    job = Job(global_batch=batch, workers=2, **job)
    plan = plan_without_profile(job, make_data(train_samples=50_000), make_network())
    told = {one.choice: one for one in plan.reasons}
    words = [told[choice].why for choice in ("learning rate", "warm-up", "decay")]
    assert any(said in why for why in words)
    assert told["warm-up"].value == f"{plan.learning_rate.warmup_epochs:g} epochs"


@pytest.mark.parametrize("decay", ["cosine", "steps", "one-cycle", "none"])
@pytest.mark.parametrize("scaling", ["sqrt", "none"])
def test_the_default_rate_of_muon_reaches_far_enough_in_few_steps(decay, scaling):
    job = Job(optimizer="muon", global_batch=500, decay=decay, scaling=scaling)
    usual = planned_rule(job, 500, 5)
    assert reach(usual, 500, samples=1500, epochs=5) < MUON.reach
    rule = planned_rule(job, 500, 5, samples=1500)
    seen = [500 * (step + 0.5) for step in range(15)]
    rates = [
        rule.peak * rate_factor(one, rule=rule, samples_per_epoch=1500, epochs=5) for one in seen
    ]
    assert sum(rates) == pytest.approx(MUON.reach, rel=0.05)
    assert rule.warmup_epochs == usual.warmup_epochs
    assert rule.peak == pytest.approx(scaled_rate(rule.base, 128, 500, scaling))


def test_the_rate_of_muon_stays_where_steps_are_enough_or_it_was_asked_for():
    job = Job(optimizer="muon", global_batch=500)
    assert planned_rule(job, 500, 50, samples=1500) == planned_rule(job, 500, 50)
    asked = job.model_copy(update={"learning_rate": 0.1})
    assert planned_rule(asked, 500, 5, samples=1500) == planned_rule(asked, 500, 5)
    sgd = job.model_copy(update={"optimizer": "sgd"})
    assert planned_rule(sgd, 500, 5, samples=1500) == planned_rule(sgd, 500, 5)
    assert planned_rule(job, 500, 1, samples=500).peak == 1.0  # as far as it goes


def test_a_plan_of_few_steps_says_why_the_rate_of_muon_is_higher():
    facts = {"optimizer": "muon", "workers": 1, "global_batch": 512}
    for epochs, told in ((4, True), (100, False)):
        plan = plan_without_profile(Job(epochs=epochs, **facts), make_data(), make_network())
        (why,) = [one.why for one in plan.reasons if one.choice == "learning rate"]
        assert ("Muon's usual 0.1 was raised, as there are few steps" in why) == told
    plan = plan_without_profile(
        Job(epochs=1, **facts | {"global_batch": 100}), make_data(), make_network()
    )
    why = {one.choice: one.why for one in plan.reasons}
    base = f"{plan.learning_rate.base:.4g}"
    assert base != f"{plan.learning_rate.base:g}"
    assert why["learning rate"].startswith(base)
    assert why["warm-up"] == f"None: the rate is not scaled up over {base}."


def test_without_batch_normalization_the_default_rate_of_muon_is_lower():
    facts = {"optimizer": "muon", "workers": 1, "global_batch": 512, "epochs": 4}
    plain = make_network(batch_norm=False)
    for method in ({}, {"method": "cyclic", "resolutions": (16, 32)}):
        plan = plan_without_profile(Job(**facts, **method), make_data(), plain)
        assert plan.learning_rate.base == 0.02
    plan = plan_without_profile(Job(**facts), make_data(), plain)
    (why,) = [one.why for one in plan.reasons if one.choice == "learning rate"]
    assert "networks without batch normalization" in why
    asked = plan_without_profile(Job(learning_rate=0.02, **facts), make_data(), plain)
    (why,) = [one.why for one in asked.reasons if one.choice == "learning rate"]
    assert "networks without" not in why
    sgd = plan_without_profile(Job(**(facts | {"optimizer": "sgd"})), make_data(), plain)
    assert sgd.learning_rate.base == 0.1
