"""`planning.learning_rate`: the rate over samples seen."""

import pytest

from batchwright.errors import JobError
from batchwright.planning.learning_rate import make_rule, rate_factor, scaled_rate
from batchwright.records import Job, LearningRateRule

SAMPLES = 50_000


def rule_of(**changes):
    plain = {"base": 0.1, "base_batch": 128, "scaling": "linear", "peak": 0.8}
    return LearningRateRule(**{**plain, "warmup_epochs": 5, "decay": "none", **changes})


def factor(epoch, rule, epochs=90):
    return rate_factor(epoch * SAMPLES, rule=rule, samples_per_epoch=SAMPLES, epochs=epochs)


@pytest.mark.parametrize(
    ("workers", "warmup", "epoch", "expected"),
    [
        (60, 5, 0, 0.016666666666666666),
        (60, 5, 1.25, 0.2625),
        (60, 5, 2.5, 0.5083333333333333),
        (60, 5, 5, 1.0),
        (240, 10, 0, 0.004166666666666667),
        (240, 10, 2.5, 0.253125),
        (240, 10, 5.0, 0.5020833333333333),
        (240, 10, 10, 1.0),
        (8, 5, 1.25, 0.34375),
        (4, 5, 2.5, 0.625),
        (60, 20, 5.0, 0.2625),
        (60, 20, 20, 1.0),
        (1, 5, 0, 1.0),
        (1, 5, 2.5, 1.0),
        (60, 0, 0, 1.0),
    ],
)
def test_warmup_follows_the_published_points(workers, warmup, epoch, expected):
    rule = rule_of(base=0.0125, peak=0.0125 * workers, warmup_epochs=warmup)
    assert factor(epoch, rule) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("decay", ["cosine", "steps", "none"])
@pytest.mark.parametrize("warmup", [0, 3, 4.7])
def test_the_end_of_warmup_is_exactly_the_peak(decay, warmup):
    assert factor(warmup, rule_of(decay=decay, warmup_epochs=warmup)) == 1.0


@pytest.mark.parametrize("decay", ["cosine", "none"])
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
    for decay in ("cosine", "steps", "none"):
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


@pytest.mark.parametrize(("base", "workers", "peak"), [(0.0125, 60, 0.75), (0.0125, 240, 3.0)])
def test_linear_scaling_over_workers_gives_the_published_peak(base, workers, peak):
    assert scaled_rate(base, 128, 128 * workers, "linear") == pytest.approx(peak)


@pytest.mark.parametrize(
    ("batch", "epochs", "warmup"), [(128, 30, 0), (64, 30, 0), (256, 30, 3), (256, 90, 5)]
)
def test_default_warmup_is_none_without_scaling_up_else_five_or_a_tenth(batch, epochs, warmup):
    assert make_rule(Job(), batch, epochs).warmup_epochs == warmup


def test_default_rate_depends_on_the_optimizer_and_an_asked_one_is_kept():
    assert make_rule(Job(), 128, 30).peak == 0.1
    assert make_rule(Job(optimizer="adamw"), 128, 30).peak == 0.001
    rule = make_rule(Job(learning_rate=0.3, base_batch=64, scaling="linear"), 128, 30)
    assert (rule.base, rule.base_batch, rule.peak) == (0.3, 64, 0.6)


def test_a_warmup_longer_than_the_training_is_refused():
    with pytest.raises(JobError, match="warmup_epochs=31"):
        make_rule(Job(warmup_epochs=31), 128, 30)
