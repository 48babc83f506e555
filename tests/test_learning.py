"""The learning curve, the plans that follow it, and which trial comes next."""

import random
import re
import sys
from dataclasses import replace
from math import comb, exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.tools.learning_prior import TEN_IMAGES as IMAGES
from benchmarks.tools.learning_prior import ten_classes as measured

from batchwright.algorithms.learning_rate import make_rule, remark_on_rate, rule_for
from batchwright.errors import PlanError
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.learnt import LearningCurve, why_unknown
from batchwright.planning.candidates.objectives import OBJECTIVES
from batchwright.planning.candidates.objectives.comparisons import accurate
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Row
from batchwright.planning.candidates.trial_choice import Arm, Question
from batchwright.planning.planner import make_plan
from batchwright.prediction.accuracy import learning
from batchwright.prediction.accuracy.learning import PRIOR, Prior, fit_learning
from batchwright.prediction.accuracy.learning_law import REFERENCE_BATCH, REFERENCE_SAMPLES
from batchwright.prediction.accuracy.quality import fit_progress
from batchwright.prediction.accuracy.trainings import MIN_STEPS, Candidate, Observed
from batchwright.records import Estimate, FirstAnswers, Goal, RunSummary, Trial
from batchwright.records.registries.optimizers import OPTIMIZERS, Normal
from batchwright.records.text.plan_text import EXPECTED, explain
from batchwright.reporting.data.reading import compared_rows
from batchwright.reporting.pages.page_plan import choice_charts
from samples import (
    LOCAL_BATCHES,
    make_cluster,
    make_data,
    make_job,
    make_memory,
    make_profile,
    make_step,
    make_summary,
)
from test_choice import chosen, reason

CLASSES = 10
HELD_OUT = 10_000

# Measured with the trainings of `measured`: seconds of an epoch, by batch.
SECONDS = {16: 15.3, 32: 12.4, 64: 10.3, 128: 8.8, 256: 8.0, 512: 7.7, 1024: 7.5, 2000: 7.4}


def truth():
    return fit_learning(measured(), classes=CLASSES)


def made_up(
    level: float, slope: float, critical: float, batch: int, samples: float, classes: int = CLASSES
) -> float:
    """Accuracy by the law, written out anew; of 28 steps or more."""
    ideal = (samples - 14 * batch) / (batch + critical)
    reference = (10_000 - 14 * 32) / (32 + critical)
    unit = 1 / (1 + exp(-(level + slope * log(ideal / reference))))
    return 1 / classes + (1 - 1 / classes) * unit


def test_the_law_meets_measured_trainings_within_a_point_and_a_half():
    model = truth()
    off = [model.accuracy(Candidate(*one[:3])).value - one.accuracy for one in measured()]
    assert max(map(abs, off)) < 0.015
    assert np.mean(np.abs(off)) < 0.007


@pytest.mark.parametrize("left_out", [("sgd", 256), ("muon", 2000), ("muon", 64), ("sgd", 16)])
def test_a_training_left_out_is_within_its_interval(left_out):
    kept = [one for one in measured() if one[:2] != left_out]
    (gone,) = [one for one in measured() if one[:2] == left_out]
    found = fit_learning(kept, classes=CLASSES).accuracy(Candidate(*gone[:3]))
    assert found.low < gone.accuracy < found.high
    assert abs(found.value - gone.accuracy) < 0.03


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_parameters_come_back_from_many_trainings(classes):
    level, slope, critical = -0.3, 0.6, 300.0
    seen = [
        Observed("sgd", batch, size, made_up(level, slope, critical, batch, size, classes), 10**6)
        for batch in (8, 64, 512, 4096)
        for size in (2_000, 20_000, 200_000)
        if size >= 28 * batch
    ]
    model = fit_learning(seen, classes=classes, prior=sharp(PRIOR))
    for batch, size in ((32, 50_000), (1024, 500_000)):
        found = model.accuracy(Candidate("sgd", batch, size))
        assert found.value == pytest.approx(
            made_up(level, slope, critical, batch, size, classes), abs=0.01
        )


def test_trainings_of_few_steps_are_less_the_fewer_they_have_and_a_target_finds_them_again():
    """The law goes on below the steps that do not count, and its inverse with it."""
    model = fit_learning([], classes=CLASSES, optimizers=("muon",))
    for batch in (32, 512):
        lengths = [batch * steps for steps in (5, 14, 27.9, 28.1, 40, 400)]
        logits = [model._at(Candidate("muon", batch, one))[0] for one in lengths]
        assert logits == sorted(logits)
        assert logits[3] - logits[2] < 0.02  # no step where the form changes
        for samples in lengths:
            reached = model.reached_with(Candidate("muon", batch, samples), 0.5)
            aim = model.aim("muon", batch, reached)
            assert aim.samples == pytest.approx(samples, rel=1e-6)
            more = model.reached_with(Candidate("muon", batch, 1.001 * samples), 0.5)
            unit, above = ((one - 0.1) / 0.9 for one in (reached, more))
            rise = log(above / (1 - above)) - log(unit / (1 - unit))
            assert aim.slope == pytest.approx(rise / log(1.001), rel=0.01)


def sharp(prior: Prior) -> Prior:
    """With next to no scatter, so that observations decide."""
    return Prior(**{**prior.__dict__, "seed": 0.01})


def test_without_observations_the_prior_speaks_and_says_how_little_it_knows():
    found = fit_learning([], classes=CLASSES, optimizers=("muon",)).accuracy(
        Candidate("muon", 128, 100_000)
    )
    assert found.low < 0.2
    assert found.high > 0.95


def test_chances_are_as_uncertain_as_the_interval():
    prior, one = fit_learning([], classes=10), Candidate("sgd", 64, 50_000)
    low = prior.accuracy(one).low
    assert prior.probability(one, low) == pytest.approx(0.975, rel=1e-4)
    assert prior.reached_with(one, 0.975) == pytest.approx(low, rel=1e-4)


def test_more_samples_smaller_batches_and_more_classes_do_as_they_should():
    model = truth()

    def at(name, batch, samples):
        return model.accuracy(Candidate(name, batch, samples)).value

    for name in ("sgd", "muon"):
        assert at(name, 64, 10**5) < at(name, 64, 10**6) < 1
        assert at(name, 1024, 10**5) < at(name, 64, 10**5)
        assert at(name, 64, 1) == pytest.approx(1 / CLASSES, abs=0.02)


def test_longer_trainings_never_come_out_lower_however_trials_contradict_each_other():
    seen = [
        Observed("sgd", 32, samples, accuracy, 1000)
        for samples, accuracy in ((1280, 0.6), (12_800, 0.3), (128_000, 0.12))
    ]
    model = fit_learning(seen, classes=CLASSES)
    found = [model.accuracy(Candidate("sgd", 32, 10**power)).value for power in range(3, 8)]
    assert found == sorted(found)


def test_one_short_trial_tells_of_the_level_not_of_what_more_samples_bring():
    """What a trial reached is no word on the slope: levels are known where trials are."""

    def gain(accuracy: float) -> float:
        model = fit_learning([Observed("sgd", 32, 1280, accuracy, 1000)], classes=CLASSES)
        short, long = (model._at(Candidate("sgd", 32, samples))[0] for samples in (10**4, 10**5))
        return long - short

    assert gain(0.9) < gain(0.12) < 1.5 * gain(0.9)


def test_what_both_have_in_common_is_not_in_the_error_of_their_difference():
    model = fit_learning(
        [Observed("sgd", 128, 5000, 0.3, 1000)], classes=CLASSES, optimizers=("muon",)
    )
    one, other = Candidate("sgd", 64, 10**5), Candidate("sgd", 128, 10**5)
    apart, error = model.difference(one, other)
    assert apart == pytest.approx(-model.difference(other, one)[0])
    width = model.accuracy(one)
    assert error < (width.high - width.low) / 1.96 / 2
    assert model.difference(one, one) == (0.0, 0.0)


def test_a_trial_lowers_the_error_by_as_much_as_was_said_before():
    seen = [Observed("sgd", 128, 5000, 0.3, 1000)]
    model = fit_learning(seen, classes=CLASSES, optimizers=("muon",))
    one, other = Candidate("sgd", 64, 10**5), Candidate("muon", 64, 10**5)
    trial = Candidate("muon", 64, 5000)
    told = model.error_removed(trial, 1000, one, other)
    expected = model.accuracy(trial).value
    after = fit_learning(
        [*seen, Observed(*trial[:3], expected, 1000)], classes=CLASSES, optimizers=("muon",)
    )
    before, left = model.difference(one, other)[1], after.difference(one, other)[1]
    assert 0 < told < 1
    assert left == pytest.approx((1 - told) * before, rel=0.02)


@pytest.mark.parametrize("held_out", [20, 100])
@pytest.mark.parametrize("unit", [0.02, 0.3, 0.9, 0.97, 0.9995])
@pytest.mark.parametrize("classes", [2, 10])
def test_the_interval_of_an_accuracy_holds_what_is_counted_on_few_images(classes, unit, held_out):
    """Near guessing a count may lie below it, and near the end all images may be right."""
    model, one = replace(truth(), classes=classes), Candidate("sgd", 64, 60_000)
    (curve, row), logit = model._at(one), log(unit / (1 - unit))
    found = model.evaluated(one, Normal(curve - logit, 0.0), held_out)
    inside = 0.0
    for place in range(1, 200, 2):  # the seed's part of the error, then that of counting
        off = NormalDist().inv_cdf(place / 200) * model._error(row, one.samples)
        share = 1 / classes + (1 - 1 / classes) / (1 + exp(-logit - off))
        inside += sum(
            comb(held_out, right) * share**right * (1 - share) ** (held_out - right)
            for right in range(held_out + 1)
            if found.low <= right / held_out <= found.high
        )
    assert inside / 100 > 0.93


@pytest.mark.parametrize("rare", [1e-3, 1e-6])
def test_accuracy_of_data_of_nearly_one_class_is_predicted(rare):
    """Few held-out images tell nothing of so rare a class, as an interval of any width says."""
    model = fit_learning([], classes=1 / (1 - rare))
    found = model.evaluated(Candidate("sgd", 16, 448), Normal(0.0, 0.0), 10)
    assert 1 - rare - 0.1 < found.low < 1 - rare + 1e-9  # within an image of ten
    assert found.high == pytest.approx(1.0)


def test_guessing_is_no_end_of_the_law():
    """A training that diverged is near guessing, however many images agree on that."""
    seen = [Observed("sgd", 128, 5000, 0.1, 10**6), Observed("sgd", 256, 5000, 0.07, 1000)]
    found = fit_learning(seen, classes=CLASSES).accuracy(Candidate("sgd", 128, 5000))
    assert found.value < 0.2


@pytest.mark.parametrize(
    "accuracies", [(0.01, 1.0), (0.01, 0.6), (0.5, 0.01)], ids=["reached", "better", "worse"]
)
def test_a_trial_that_diverged_beside_another_leaves_one_law(accuracies, monkeypatch):
    """Steps of Gauss and Newton alone go to and fro between two laws for ever."""
    lengths = ((64, 3200), (1024, 51_200))
    seen = [Observed("muon", *one, a, 1000) for one, a in zip(lengths, accuracies, strict=True)]
    found = []
    for rounds in (50, 51):
        monkeypatch.setattr(learning, "_ROUNDS", rounds)
        model = fit_learning(seen, classes=100, optimizers=("muon",))
        found.append(model.accuracy(Candidate("muon", 256, 10**6)).value)
    assert found[0] == pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize("name", ["sgd", "muon"])
@pytest.mark.parametrize("accuracy", [0.2, 0.6, 0.9])
def test_samples_to_an_accuracy_are_those_that_reach_it(name, accuracy):
    model = truth()
    found = model.samples_to(name, 128, accuracy)
    assert found.low < found.value < found.high
    assert model.accuracy(Candidate(name, 128, found.value)).value == pytest.approx(accuracy)


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_samples_of_two_batches_are_compared_by_what_sets_them_apart(name):
    model = truth()
    small, large = (model.samples_to(name, batch, 0.6) for batch in (64, 512))
    ratio = model.samples_compared((name, 512), (name, 64), 0.6)
    assert ratio.value == pytest.approx(large.value / small.value)
    assert ratio.low < ratio.value < ratio.high < large.high / small.low
    same = model.samples_compared((name, 64), (name, 64), 0.6)
    assert (same.low, same.value, same.high) == pytest.approx((1, 1, 1))


def test_guessing_takes_no_samples():
    assert truth().samples_compared(("sgd", 64), ("muon", 64), 0.1) is None
    assert truth().samples_to("sgd", 128, 0.1) is None
    assert truth().samples_to("sgd", 128, 0.05) is None


# ------------------------------------------------------------------------------------------ rates


def at_rates(
    best: float, steps=(-1, 0, 1), name: str = "sgd", weight: float = 0.3
) -> list[Observed]:
    """Short trainings of a task whose best rate is known, at rates that are powers of 3."""
    found = []
    for step in steps:
        offset = round(step * log(3), 6)
        logit = -0.5 + 0.6 * log(3000 / 50_000) + weight * (2 * best * offset - offset**2)
        unit = 1 / (1 + exp(-logit))
        found.append(Observed(name, 128, 3000, 0.1 + 0.9 * unit, 10**5, offset))
    return found


@pytest.mark.parametrize("name", ["sgd", "muon"])
@pytest.mark.parametrize("best", [-1.0, 0.0, 0.8])
def test_trainings_at_several_rates_tell_the_best_one(name, best):
    model = fit_learning(at_rates(best, name=name), classes=CLASSES, prior=sharp(PRIOR))
    assert model.offset(name) == pytest.approx(best, abs=0.15)
    other = "muon" if name == "sgd" else "sgd"
    assert fit_learning([], classes=CLASSES, optimizers=("muon",)).offset(other) == 0


def test_no_rate_is_taken_beyond_those_that_were_tried():
    for best, end in ((2.5, 1), (-2.5, -1)):
        seen = at_rates(best, steps=(0, end))
        found = fit_learning(seen, classes=CLASSES, prior=sharp(PRIOR)).offset("sgd")
        assert found == pytest.approx(end * log(3), abs=0.002)


def test_where_high_rates_end_training_none_is_taken_above_the_highest_that_has_learnt():
    seen = at_rates(1.1)
    free = fit_learning(seen, classes=CLASSES, prior=sharp(PRIOR))
    bounded = fit_learning(seen, classes=CLASSES, prior=sharp(PRIOR), usual_rate=sqrt)
    found = exp(free.offset("sgd"))
    assert found == pytest.approx(3, rel=0.1)
    # Trials had a batch of 128 and up to three times its usual rate, so sqrt(128) * 3.
    for batch, most in ((64, found), (128, found), (512, 3 / 2), (2048, 1)):
        assert exp(free.offset("sgd", batch)) == pytest.approx(found)
        assert exp(bounded.offset("sgd", batch)) == pytest.approx(min(found, most), rel=0.01)
        aims = (bounded.aim("sgd", batch, 0.5, one) for one in (None, bounded.offset("sgd", batch)))
        assert len({one.samples for one in aims}) == 1
    lower = at_rates(-1.0)  # which are safe with any batch
    low = fit_learning(lower, classes=CLASSES, prior=sharp(PRIOR), usual_rate=sqrt)
    assert low.offset("sgd", 2048) == low.offset("sgd") < 0


@pytest.mark.parametrize("known", [(Normal(0.0, 0.1), Normal(1.0, 0.1)), (Normal(0.0, 9.0),) * 2])
def test_trainings_at_the_usual_rate_tell_as_much_whatever_depends_on_it(known):
    names = ("sgd", "muon")
    rates = dict(zip(("best_rate", "rate_weight"), known, strict=True))
    other = replace(PRIOR, optimizers={n: PRIOR.of(n)._replace(**rates) for n in names})
    usual, changed = (fit_learning(measured(), classes=CLASSES, prior=p) for p in (PRIOR, other))
    for one in measured():
        assert usual.accuracy(one.training) == changed.accuracy(one.training)


@pytest.mark.parametrize("best", [-1.0, 0.0, 1.0])
def test_an_optimizer_that_was_not_seen_is_compared_with_the_best_rate_of_the_other(best):
    """What a better rate of SGD gains, Muon is not behind for: it was unknown to both."""
    known = {name: PRIOR.of(name)._replace(level=Normal(0.9, 0.01)) for name in ("sgd", "muon")}
    prior = sharp(replace(PRIOR, optimizers=known))
    model = fit_learning(at_rates(best), classes=CLASSES, optimizers=("muon",), prior=prior)
    logits = {}
    for name, offset in (("sgd", model.rate_of("sgd")[0]), ("muon", 0.0)):
        reference = Candidate(name, REFERENCE_BATCH, REFERENCE_SAMPLES, offset)
        unit = (model.accuracy(reference).value - 1 / CLASSES) / (1 - 1 / CLASSES)
        logits[name] = log(unit / (1 - unit))
    assert logits["muon"] - logits["sgd"] == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("diverged", [False, True])
@pytest.mark.parametrize("held_out", [100, 10**6])
def test_a_training_that_fails_at_a_high_rate_hardly_pulls_the_law(diverged, held_out):
    seen = at_rates(0.3)
    failed = Observed("sgd", 128, 3000, 0.1, held_out, round(2 * log(3), 6), diverged)
    usual = Candidate("sgd", 128, 50_000)
    without, found = (fit_learning(some, classes=CLASSES) for some in (seen, [*seen, failed]))
    assert found.accuracy(usual).value == pytest.approx(without.accuracy(usual).value, abs=0.01)
    assert found.offset("sgd") == pytest.approx(without.offset("sgd"), abs=0.25)
    assert found.lowest_failing("sgd") == failed.offset


def test_where_the_usual_rate_diverges_the_one_below_is_taken():
    low, usual = at_rates(-1.0, steps=(-1, 0))
    seen = [low, usual._replace(accuracy=0.1, diverged=True)]
    model = fit_learning(seen, classes=CLASSES)
    assert model.offset("sgd") == pytest.approx(low.offset, abs=0.002)
    assert model.accuracy(low.training).value == pytest.approx(low.accuracy, abs=0.05)


def test_a_rate_too_low_to_learn_anything_speaks_against_no_higher_one():
    seen = [one._replace(accuracy=0.1) if one.offset < 0 else one for one in at_rates(0.8)]
    model = fit_learning(seen, classes=CLASSES)
    assert model.lowest_failing("sgd") == float("inf")
    assert model.offset("sgd") > 0


# ------------------------------------------------------------------------------------------ plans


def trial(name: str, batch: int, samples: int, accuracy: float, **changes) -> Trial:
    given = {
        "optimizer": name,
        "global_batch_size": batch,
        "rate": 0.1,
        "usual_rate": 0.1,
        "resolution": 32,
        "samples": samples,
        "steps": samples // batch,
        "accuracy": accuracy,
        "loss": 1.0,
        "held_out": 1000,
        "seconds": 1.0,
    }
    return Trial(**(given | changes))


def trials_of(model, sizes=(3000, 12_000)) -> tuple[Trial, ...]:
    """What short trainings would show of a task that follows a law exactly."""
    return tuple(
        trial(name, batch, size, model.accuracy(Candidate(name, batch, size)).value)
        for name in ("sgd", "muon")
        for batch in (32, 128)
        for size in sizes
    )


def taught(model=None, **changes):
    """A profile with trials."""
    job = make_job(optimizer="auto", learning_rate="auto", workers="auto")
    return make_profile(job=job, trials=trials_of(model or truth()), **changes)


def test_trials_decide_optimizer_and_batch():
    plan = make_plan(taught())
    without = make_plan(taught().model_copy(update={"trials": ()}))
    assert reason(plan, "optimizer").source == "predicted"
    assert "By the trials" in reason(plan, "optimizer").why
    row = chosen(plan)
    reached = {one.global_batch_size: one.accuracy.value for one in plan.considered}
    assert row.accuracy.value >= max(reached.values()) - 0.01
    quicker = [
        one
        for one in plan.considered
        if not one.refused
        and one.accuracy.value >= max(reached.values()) - 0.01
        and one.train_seconds.value < row.train_seconds.value
    ]
    assert not quicker
    untold = reason(without, "accuracy")
    assert untold.source == "assumed"
    expected = "as other tasks' trainings lead to expect: no trial of this training was measured"
    assert expected in untold.why
    assert "The probe had no trials: probe.learning" in untold.why
    wide, narrow = chosen(without).accuracy, row.accuracy
    assert wide.low < narrow.low < narrow.high < wide.high
    assert "expected from other tasks' trainings, " in reason(without, "global batch").why
    assert EXPECTED in explain(without)
    assert EXPECTED not in explain(plan)
    assert EXPECTED in choice_charts(without, None)


def test_other_tasks_buy_no_points_that_are_not_known_apart():
    """And expect nothing of fewer steps than any training had that they are known by."""
    bare = taught().model_copy(update={"trials": ()})
    plan = make_plan(bare)
    reached = [one.accuracy.value for one in plan.considered if one.accuracy]
    able = [one for one in plan.considered if one.accuracy and not one.refused]
    near = [one for one in able if one.accuracy.value >= max(reached) - 0.01]
    assert chosen(plan) == min(near, key=lambda one: one.train_seconds.value)  # none halves it
    why = reason(plan, "global batch").why
    assert "accuracy_tolerance=0.01, or within 3 times that if they take half the time and " in why
    assert "points more accurate, in " in why
    assert "within 3 points of the best" in choice_charts(plan, None)
    # All that rests on it is marked so.
    assert reason(plan, "global batch").source == "assumed"
    losses = [one.loss for one in reason(plan, "global batch").alternatives]
    assert all("accuracy expected" in one for one in losses)
    assert "as other tasks' trainings lead to expect" in reason(plan, "gradient noise scale").why
    assert "training on it gets, as other tasks lead to expect" in " ".join(explain(plan).split())
    asked = make_plan(bare, bare.job.model_copy(update={"global_batch": 400}))
    assert "leave global_batch to the plan" not in reason(asked, "global batch").why
    short = make_plan(bare, bare.job.model_copy(update={"epochs": 2}))
    for one in short.considered:
        steps = 2 * bare.data.train_samples / one.global_batch_size
        assert (one.accuracy is None) == (steps < MIN_STEPS)


@pytest.mark.parametrize(
    ("goal", "workers", "seconds", "taken"),
    [
        ({}, 1, (10.0, 6.0, 4.9, 4.0), (0, 2)),
        # From 512 on an epoch takes half as long; the training to the target does not.
        ({"accuracy": 0.2}, 1, (3.36, 3.83, 4.13, 4.2), (0,)),
        ({"accuracy": 0.2, "least": "cost"}, 4, (1.0, 1.9, 2.1, 1.0), (0, 1)),
    ],
)
def test_points_are_given_up_for_half_of_what_is_least(goal, workers, seconds, taken):
    """Else what is slower than another and learns less could be taken; nor beyond the noise scale.

    ``workers`` are those of the most accurate, the others have one.
    """
    told = {"tells_accuracy": True, "assumed": True, "doubtful_from": lambda batch: 929.0}
    soon = OBJECTIVES["auto"](table_for(**goal), (), SimpleNamespace(**told))
    rows = [
        replace(
            row_of(accuracy),
            batch=batch,
            epoch_seconds=860 / batch,
            train_seconds=time,
            cluster=SimpleNamespace(workers=workers if batch == 256 else 1, hourly=None),
        )
        for batch, accuracy, time in zip(
            (256, 512, 900, 1024), (0.7, 0.685, 0.68, 0.68), seconds, strict=True
        )
    ]
    assert soon.among(rows) == [rows[place] for place in taken]


def test_other_tasks_say_nothing_of_an_optimizer_that_none_had():
    """Trials with it tell, as those of any other."""
    profile = taught().model_copy(update={"trials": ()})
    job = profile.job.model_copy(update={"optimizer": "adamw"})
    bare = profile.model_copy(update={"job": job})
    told = reason(make_plan(bare), "accuracy")
    assert told.value == "not known"
    assert "So goal.objective=auto goes by time and gradient noise." in told.why
    tried = (trial("adamw", 32, 3000, 0.4, rate=0.001),)
    told = reason(make_plan(bare.model_copy(update={"trials": tried})), "accuracy")
    assert told.source == "predicted"


@pytest.mark.parametrize(
    ("images", "right", "said"),
    [
        (0, 0, "takes two classes or more, a number for each of them from the network"),
        (1280, 700, "network answers 700 of 1280 held-out images right: it has learnt before"),
    ],
)
def test_other_tasks_say_nothing_of_a_network_that_gives_no_class_or_knows_already(
    images, right, said
):
    """Whether or not trials were to be made."""

    def plan(images, right, by_chance):
        first = FirstAnswers(images=images, right=right, by_chance=by_chance)
        return make_plan(taught(first_answers=first).model_copy(update={"trials": ()}))

    told = plan(images, right, images / CLASSES)
    assert reason(told, "accuracy").value == "not known"
    assert said in reason(told, "accuracy").why
    assert told.update == "sgd"
    # By guessing, by one answer for all where most images are of one class, and by less than that.
    for chance, found in ((128, 160), (1000, 1000), (128, 0)):
        assert reason(plan(1280, found, chance), "accuracy").value != "not known"


def test_no_more_is_expected_of_batches_below_all_that_were_trained_with():
    """One trial says nothing of them: they were taken for what the law goes on to, at any price."""
    one = Observed("sgd", 128, 5000, 0.3, 1000)
    for seen, known in ((one, 32), (one._replace(batch=8), 8)):
        model = fit_learning([seen], classes=CLASSES)
        small, least, larger = (
            (model.accuracy(Candidate("sgd", batch, 10**5)), model.samples_to("sgd", batch, 0.6))
            for batch in (2, known, 2 * known)
        )
        assert small == least
        failed = Observed("sgd", 4, 2000, 1 / CLASSES, 1000, log(9))
        assert fit_learning([seen, failed], classes=CLASSES).known_from == known
        assert least[0].value > larger[0].value
        assert least[1].value < larger[1].value


@pytest.mark.parametrize("goal", [{"objective": "accuracy"}, {"accuracy": 0.5}, {}])
def test_of_batches_that_nothing_sets_apart_the_quickest_is_taken(goal):
    profile = taught()
    trials = tuple(one for one in profile.trials if one.global_batch_size == 128)
    job = profile.job.model_copy(update={"goal": profile.job.goal.model_copy(update=goal)})
    plan = make_plan(profile.model_copy(update={"trials": trials}), job)
    small = [one for one in plan.considered if one.global_batch_size <= 32]
    assert len({one.global_batch_size for one in small}) > 2
    told = [(one.accuracy, one.epochs, one.efficiency) for one in small]
    assert told == [told[0]] * len(told)
    row = chosen(plan)
    alike = [one for one in plan.considered if one.accuracy == row.accuracy and not one.refused]
    assert row == min(alike, key=lambda one: one.train_seconds.value)


def test_trials_tell_nothing_of_fewer_steps_than_they_have():
    profile = taught()
    images = profile.data.train_samples

    def planned(**changes):
        goal = profile.job.goal.model_copy(update={"accuracy": changes.pop("accuracy", None)})
        return make_plan(profile, profile.job.model_copy(update={"goal": goal, **changes}))

    short = planned(epochs=2).considered
    few = [one for one in short if 2 * images < MIN_STEPS * one.global_batch_size]
    assert 0 < len(few) < len(short)
    assert all((one.accuracy is None) == (one in few) for one in short)
    quick = planned(epochs=30, accuracy=0.2).considered
    assert any(one.trained_epochs == 1 for one in quick)
    for one in quick:
        assert one.trained_epochs * images >= MIN_STEPS * one.global_batch_size
    told = reason(planned(epochs=2, global_batch=500), "accuracy")
    assert told.value == "not known"
    assert f"Trials tell nothing of trainings with fewer than {MIN_STEPS} steps" in told.why
    with pytest.raises(PlanError, match="the 25 steps from which on accuracy is predicted within"):
        planned(epochs=2, global_batch=500, accuracy=0.2)


def test_what_an_image_is_worth_is_by_the_trials():
    """Not by the noise scale, which speaks of SGD's gradient."""
    plan = make_plan(taught(noise=None))
    told = {one.global_batch_size: one.efficiency for one in plan.considered}
    assert None not in told.values()
    assert told[128].value == pytest.approx(1)
    assert told[16].value > told[64].value > 1 > told[256].value


def test_the_tolerance_buys_time():
    profile = taught()
    goal = profile.job.goal

    def seconds(tolerance):
        job = profile.job.model_copy(
            update={"goal": goal.model_copy(update={"accuracy_tolerance": tolerance})}
        )
        row = chosen(make_plan(profile, job))
        return row.train_seconds.value, row.accuracy.value

    strict, loose = seconds(0.0), seconds(0.2)
    assert loose[0] < strict[0]
    assert loose[1] < strict[1]


def test_a_target_is_planned_for_by_trials():
    profile = taught()
    goal = profile.job.goal.model_copy(update={"objective": "target-accuracy", "accuracy": 0.5})
    plan = make_plan(profile, profile.job.model_copy(update={"goal": goal}))
    told = reason(plan, "epochs to target")
    assert "as the trials tell" in told.why
    row = chosen(plan)
    for one in plan.considered:
        # Seconds tell apart what the trials tell apart, whatever the noise scale says.
        assert not one.level or one.target_seconds.value < 1.5 * row.target_seconds.value
    others = [one.target_seconds.value for one in plan.considered if not one.refused]
    assert row.target_seconds.value == min(others)
    assert row.epochs.value < row.trained_epochs < row.epochs.high


def test_another_objective_stays_as_it_was():
    profile = taught()
    bare = profile.model_copy(update={"trials": ()})
    for objective in ("knee", "time"):
        goal = profile.job.goal.model_copy(update={"objective": objective})
        job = profile.job.model_copy(update={"goal": goal, "optimizer": "sgd"})
        assert make_plan(profile, job).stages == make_plan(bare, job).stages


def test_trials_of_all_profiles_count_each_once():
    profile = taught()
    bare = profile.model_copy(update={"trials": ()})
    whole = make_plan(profile)
    halves = [profile.model_copy(update={"trials": profile.trials[k::2]}) for k in (0, 1)]
    assert chosen(make_plan([bare, profile])).accuracy == chosen(whole).accuracy
    assert chosen(make_plan([profile, profile])).accuracy == chosen(whole).accuracy
    for one, other in zip(
        make_plan(halves).considered, make_plan([profile, bare]).considered, strict=True
    ):
        assert one.accuracy.value == pytest.approx(other.accuracy.value)


@pytest.mark.parametrize(
    "keys",
    [{"sampling": "balanced"}, {"clip_norm": 0.1}, {"label_smoothing": 0.2}, {"decay": "none"}],
)
def test_trials_count_for_nothing_where_training_is_another(keys):
    profile = taught()
    job = type(profile.job)(**(profile.job.model_dump() | keys))
    bare = profile.model_copy(update={"trials": ()})
    assert make_plan(profile, job).considered == make_plan(bare, job).considered


def test_why_accuracy_is_not_known_is_said():
    bare = taught().model_copy(update={"trials": ()})
    asked = bare.model_copy(update={"trials_note": "there are no trials, as it is late"})
    told = {
        "The probe had no trials: probe.learning": (bare, {}),
        "There are no trials, as it is late": (asked, {}),
        "The probe's trials had another rate": (taught(), {"clip_norm": 0.1}),
        "by gradient noise, so they do not tell its accuracy. So goal.objective=auto goes by time "
        "and gradient noise. Finished runs of this task would tell, also those of a loop of your "
        "own": (taught(), {"scaling": "gain"}),
    }
    for words, (profile, keys) in told.items():
        plan = make_plan(profile, type(profile.job)(**(profile.job.model_dump() | keys)))
        assert words in reason(plan, "accuracy").why
        assert "no trial was measured" not in reason(plan, "accuracy").why
    cyclic = taught().job.model_copy(update={"method": "cyclic"})
    assert "do not train as method=cyclic does" in why_unknown([taught()], cyclic)


def table_for(**goal):
    return SimpleNamespace(job=SimpleNamespace(goal=Goal(**goal)))


def test_what_may_tell_level_batches_apart_is_named():
    told = SimpleNamespace(tells_accuracy=True)
    auto, time = (
        OBJECTIVES[name](table_for(objective=name), (), told) for name in ("auto", "time")
    )
    assert "probe.learning" not in auto.level_words(["2 workers"])
    assert "probe.budget" in auto.level_words(["2 workers"])
    # The fifth of five was "and 1 more samples".
    assert "1, 2, 3, 4 and 5 samples." in auto.level_words([*"12345"], batches=True)
    assert "1, 2, 3, 4 and 2 more samples." in auto.level_words([*"123456"], batches=True)
    words = auto.level_words(["64"], batches=True)
    assert "a larger probe.budget may for their times, probe.learning for their accuracy" in words
    assert "probe.learning" not in time.level_words(["64"], batches=True)


@pytest.mark.parametrize(("saves", "off", "taken"), [(0.01, 0.02, 2), (0.1, 0.2, 4), (0.01, 0, 4)])
def test_more_workers_are_taken_for_time_that_they_are_known_to_save(saves, off, taken):
    """Not for less than two percent that measurements do not tell from nothing."""

    def step(workers, batch):
        whole = (0.0083 + 0.000435 * workers * batch) * (1 - saves * (workers == 4))
        one = make_step(workers, batch, seconds=whole - 0.0031)
        visits = tuple(scale * one.step_seconds for scale in (1 - off, 1, 1 + off))
        return one.model_copy(update={"visits": visits})

    points = [(workers, batch) for workers in (2, 4) for batch in LOCAL_BATCHES]
    profile = taught(
        steps=tuple(step(*one) for one in points),
        memory=tuple(make_memory(*one) for one in points),
        cluster=make_cluster(workers=4),
        data=make_data(train_samples=1408),
        evaluation_seconds_per_image=1e-9,
    )
    plan = make_plan(profile)
    assert plan.workers == taken
    told = reason(plan, "workers").why
    passed = "Not taken: 4 workers, global batch 64 (1.0 % less time, 98.0 % more worker-hours"
    assert (passed in told) == (taken == 2)
    free = reason(make_plan(profile, profile.job.model_copy(update={"workers": 4})), "workers").why
    assert ("itself would choose 2 workers" in free) == (taken == 2)


def test_fewer_workers_are_not_taken_by_a_prediction_far_from_what_was_measured():
    """It is passed over as the best one, and so it is as one that costs less."""

    def step(workers, batch):
        whole = (0.0083 + 0.000435 * workers * batch) * (0.83 if workers == 1 else 1)
        one = make_step(workers, batch, seconds=whole - (0.0031 if workers > 1 else 0))
        visits = tuple(scale * one.step_seconds for scale in (0.98, 1, 1.02))
        return one.model_copy(update={"visits": visits})

    points = [(1, 4), (1, 8), *((2, batch) for batch in LOCAL_BATCHES)]
    profile = taught(
        steps=tuple(step(*one) for one in points),
        memory=tuple(make_memory(*one) for one in points),
        data=make_data(train_samples=1408),
        evaluation_seconds_per_image=1e-9,
    )
    plan = make_plan(profile)
    assert plan.workers == 2
    assert "Not taken: 64 samples on 1 worker (1." in reason(plan, "global batch").why
    assert not [one for one in plan.reasons if one.choice == "extrapolation"]
    goal = profile.job.goal.model_copy(update={"objective": "time"})
    other = make_plan(profile, profile.job.model_copy(update={"goal": goal}))
    named = [one.value for one in reason(other, "workers").alternatives]
    assert "2 workers, global batch 64 (goal.objective=auto, near what was measured)" in named


def row_of(accuracy):
    """A candidate; all that counts is how accurate it is."""
    size = {
        "cluster": ClusterOption(()),
        "epochs": 1,
        "resolution": 32,
        "totals": (),
        "batch": 64,
        "steps": 10,
        "cost": None,
    }
    times = dict.fromkeys(("step_seconds", "epoch_seconds", "train_seconds"), 1.0)
    return Row(**size, **times, accuracy=accuracy, full_accuracy=accuracy)


def test_what_is_not_known_to_be_accurate_is_not_chosen_for_it():
    known, worse, unknown = (row_of(one) for one in (0.8, 0.7, None))
    assert accurate([known, worse, unknown], 0.01) == [known]
    assert accurate([unknown], 0.01) == [unknown]
    to_target = [replace(row, target_seconds=1.0) for row in (known, worse)]
    assert accurate(to_target, 0.01) == to_target[:1]


@pytest.mark.parametrize("learnt_with", ["sgd", "muon"])
def test_trials_tell_of_the_other_optimizer_too(learnt_with):
    """As after optimizer=auto where one is asked for: both are of the task."""
    profile = taught()
    job = profile.job.model_copy(update={"optimizer": "muon"})
    kept = tuple(one for one in profile.trials if one.optimizer == learnt_with)
    rows = (
        chosen(
            make_plan(
                profile.model_copy(update={"trials": trials}),
                job.model_copy(update={"global_batch": 128}),
            )
        )
        for trials in (profile.trials, kept, ())
    )
    widths = [row.accuracy.high - row.accuracy.low for row in rows]
    assert widths[0] < widths[1] < 0.8 * widths[2]


def test_trials_at_another_resolution_count_for_nothing():
    job = make_job(optimizer="auto", learning_rate="auto")
    profile = make_profile(job=job, trials=(trial("sgd", 32, 3000, 0.4, resolution=4),))
    bare = profile.model_copy(update={"trials": ()})
    assert make_plan(profile).considered == make_plan(bare).considered


def test_other_methods_are_not_judged_by_trials():
    profile = taught()
    job = profile.job.model_copy(update={"method": "dual-batch", "optimizer": "sgd"})
    assert all(one.accuracy is None for one in make_plan(profile, job).considered)


def with_rates(best: float, **changes):
    """A profile with trials at three rates of SGD, and the plan without those two."""
    job = make_job(optimizer="sgd", workers="auto", **({"learning_rate": "auto"} | changes))
    rates = tuple(
        trial("sgd", 128, 3000, one.accuracy, held_out=10**5, rate=0.1 * exp(one.offset))
        for one in at_rates(best)
    )
    profile = make_profile(job=job, trials=rates)
    return profile, make_plan(profile.model_copy(update={"trials": rates[1:2]}))


@pytest.mark.parametrize("best", [-0.9, 0.8])
def test_the_plan_takes_the_rate_that_trials_found(best):
    profile, usual = with_rates(best)
    plan = make_plan(profile)
    found = plan.learning_rate
    assert found.tried == pytest.approx(exp(best), rel=0.4)
    by_rule = rule_for(plan.job, plan.stages[0].global_batch_size, plan.data, plan.network, "sgd")
    for key in ("base", "peak"):
        assert getattr(found, key) == pytest.approx(found.tried * getattr(by_rule, key))
    assert plan.stages[0].learning_rate == found.peak
    why = reason(plan, "learning rate")
    assert "Trials at 0.333, 1, 3 times the usual rate" in why.why
    said = rf": {found.tried:.3g} times the usual rate reaches \d+\.\d points more than"
    assert re.search(said, why.why)
    assert why.source == "measured"
    assert usual.learning_rate.tried == 1
    assert "Trials at" not in reason(usual, "learning rate").why
    assert chosen(plan).accuracy.value > chosen(usual).accuracy.value


@pytest.mark.parametrize(("batch", "most"), [(128, 3.0), (512, 1.5), (1152, 1.0)])
def test_without_batch_normalization_the_plan_trusts_no_rate_above_those_that_learnt(batch, most):
    profile, _ = with_rates(1.1)
    job = profile.job.model_copy(update={"global_batch": batch})
    normalized = make_plan(profile, job).learning_rate.tried
    bare = profile.network.model_copy(update={"batch_norm": False})
    plan = make_plan(profile.model_copy(update={"network": bare}), job)
    assert plan.learning_rate.tried == pytest.approx(min(normalized, most), rel=0.01)
    why = reason(plan, "learning rate").why
    assert ("has no batch normalization" in why) == (batch > 128)
    assert ("reached more with smaller batches" in why) == (most == 1)


def test_a_rate_that_is_given_stays_whatever_trials_found():
    profile, usual = with_rates(0.8, learning_rate=0.1)
    plan = make_plan(profile)
    assert plan.learning_rate == usual.learning_rate
    assert chosen(plan).accuracy == chosen(usual).accuracy


def test_a_muon_rate_raised_for_few_steps_is_raised_no_less_by_trials():
    job, size = make_job(optimizer="muon", learning_rate="auto"), {"samples": 4000}
    usual = make_rule(job, 128, 1, "muon", **size)
    tried = make_rule(job, 128, 1, "muon", **size, tried=1.5)
    assert usual.base > OPTIMIZERS["muon"].rate
    assert tried.base == pytest.approx(1.5 * usual.base)
    assert remark_on_rate(job, tried, "muon") == remark_on_rate(job, usual, "muon") != ""


# ------------------------------------------------------------------------- of too few steps


def test_figures_are_of_trainings_of_which_anything_is_told():
    """Where the planned one has too few steps, of the first that has enough."""
    profile, _ = with_rates(0.8)
    sgd = make_plan(profile, profile.job.model_copy(update={"epochs": 2, "global_batch": 500}))
    assert reason(sgd, "accuracy").value == "not known"
    assert "to 25 steps, the fewest that it predicts: " in reason(sgd, "learning rate").why
    for trials in (taught().trials, ()):
        both = taught().model_copy(update={"trials": trials})
        for batch, few in ((500, True), (64, False)):
            job = both.job.model_copy(update={"epochs": 2, "global_batch": batch})
            why = reason(make_plan(both, job), "optimizer").why
            assert (" in a training of 25 steps" in why) == few


def test_optimizers_are_compared_after_as_many_steps_as_anything_is_told_of():
    learnt = LearningCurve(truth(), ("sgd", "muon"), IMAGES, HELD_OUT, 12_000)
    job = taught().job.model_copy(update={"epochs": 1})
    compared = {one.batch: one for one in learnt.compared(job)}
    assert compared[512].steps == 0
    assert compared[1024].steps == MIN_STEPS
    first = learnt.predictable_from(1024)
    assert 1 < first < 2
    assert compared[1024].muon == pytest.approx(learnt.accuracy("muon", 1024, first).value)


def test_epochs_to_a_target_are_no_fewer_than_those_of_which_anything_is_told():
    profile = taught()
    goal = Goal(objective="time", accuracy=0.15)
    job = profile.job.model_copy(update={"global_batch": 512, "goal": goal})
    plan = make_plan(profile, job)
    first = MIN_STEPS * 512 / profile.data.train_samples
    assert reason(plan, "epochs to target").value.startswith(f"{first:.3g} ({first:.3g} to ")
    for one in plan.considered:
        least = MIN_STEPS * one.global_batch_size / profile.data.train_samples
        assert one.epochs.low >= least


def test_a_chance_is_not_rounded_up_to_what_was_asked_for(monkeypatch):
    learnt = LearningCurve(truth(), ("muon",), IMAGES, HELD_OUT, 12_000)
    models = {"muon": fit_progress(None, base_batch=128)}
    told = {"target": 0.5, "confidence": 0.99, "least": 1, "learnt": learnt}
    progress = Progress(models, lambda _: "muon", 128, 5, **told)
    monkeypatch.setattr(Progress, "needed", lambda *_: None)
    for chance, words in ((0.9896, "0.98"), (0.004, "below 0.01")):
        monkeypatch.setattr(Progress, "chance", lambda *_, given=chance: given)
        assert f"with probability {words}, not 0.99 (goal" in progress.how_sure(64)
    few = replace(progress, planned=1)
    assert few.how_sure(2000).endswith("accuracy is not predicted for fewer than 25 steps")


def test_smaller_batches_are_told_where_the_least_that_trials_had_has_too_few_steps():
    """500 images are 15 steps with 32, and 31 with 16."""
    few = taught().data.model_copy(update={"train_samples": 500})
    profile = taught().model_copy(update={"data": few})
    for goal in ({"objective": "accuracy"}, {}):
        job = profile.job.model_copy(update={"epochs": 1, "goal": Goal(**goal)})
        assert chosen(make_plan(profile, job)).accuracy is not None


def test_candidates_of_too_few_steps_are_compared_by_an_epoch_whatever_a_deadline_leaves_of_them():
    """One worker, of whose training less fits, took less time than two."""
    bare = taught().model_copy(update={"trials": ()})
    job = bare.job.model_copy(update={"global_batch": 512})
    for deadline in (1.8, 2.2, 2.6, 3.5):
        goal = Goal(accuracy=0.9, deadline=deadline)
        plan = make_plan(bare, job.model_copy(update={"goal": goal}))
        assert chosen(plan).accuracy is None
        assert plan.workers == 2
        told = reason(plan, "workers")
        assert "the least time an epoch" in told.why
        assert re.search(
            f"less time, .*but [1-3] epochs?, not {plan.epochs}$", told.alternatives[0].loss
        )


# ------------------------------------------------------------------------------------ next trial


def question(epochs: int = 6, optimizers=("sgd", "muon"), **changes) -> Question:
    given = {
        "arms": tuple(
            Arm(name, batch, 2, batch, seconds)
            for batch, seconds in SECONDS.items()
            for name in optimizers
        ),
        "epochs": epochs,
        "samples": IMAGES,
        "classes": CLASSES,
        "tolerance": 0.01,
        "judging_seconds": 0.3,
    }
    return Question(**(given | changes))


def asked(asks: Question, budget: float, seed: int = 0):
    """Trials of the measured task, each off by as much as seeds are, until there is no next."""
    model, off = truth(), random.Random(seed)
    left, seen, made = budget, [], []
    while (wanted := asks.next_trial(seen, budget=budget, left=left)) is not None:
        share = model.accuracy(wanted.training).value
        unit = (share - 0.1) / 0.9
        logit = log(unit / (1 - unit)) + off.gauss(0, PRIOR.seed)
        share = 0.1 + 0.9 / (1 + exp(-logit))
        seen.append(Observed(*wanted.training[:3], share, asks.held_out, wanted.offset))
        made.append(wanted)
        left -= wanted.seconds
    return seen, made


@pytest.mark.parametrize("seed", range(5))
def test_a_tenth_of_the_time_finds_what_is_nearly_best(seed):
    budget = 0.1 * 6 * SECONDS[256]
    seen, made = asked(question(), budget, seed)
    assert sum(one.seconds for one in made) <= budget
    assert all(one.samples >= MIN_STEPS * one.arm.batch for one in made)
    assert {one.arm.optimizer for one in made} == {"sgd", "muon"}
    assert len({one.training for one in made}) == len(made)
    model = fit_learning(seen, classes=CLASSES, optimizers=("sgd", "muon"))
    accuracies = {
        (name, batch): model.accuracy(Candidate(name, batch, 6 * IMAGES)).value
        for name in ("sgd", "muon")
        for batch in SECONDS
    }
    least = max(accuracies.values()) - 0.01
    best = min((one for one in accuracies if accuracies[one] >= least), key=lambda k: SECONDS[k[1]])
    real = {one: truth().accuracy(Candidate(*one, 6 * IMAGES)).value for one in accuracies}
    assert real[best] > max(real.values()) - 0.03


def known_at_the_usual_rate(*names: str) -> list[Observed]:
    """Trainings that leave nothing open but the rate."""
    model = truth()
    return [
        Observed(name, batch, size, model.accuracy(Candidate(name, batch, size)).value, 10**6)
        for name in names
        for batch in SECONDS
        for size in (10_000, 40_000, 6 * IMAGES)
    ]


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_rates_are_tried_where_they_are_what_is_most_in_doubt(name):
    seen = known_at_the_usual_rate(name)
    open_ = question(optimizers=(name,), rates=True)
    wanted = open_.next_trial(seen, budget=20, left=20)
    assert abs(wanted.offset) == pytest.approx(log(3), abs=1e-6)
    assert "x the usual rate" in str(wanted)
    assert wanted.rate_scale == pytest.approx(exp(wanted.offset))
    closed = replace(open_, rates=False).next_trial(seen, budget=20, left=20)
    assert closed is None or not closed.offset


def test_further_rates_are_tried_where_the_best_is_at_an_end():
    higher = at_rates(2.0, steps=(0, 1), weight=0.4)
    seen = [*known_at_the_usual_rate("sgd"), *(one for one in higher if one.offset)]
    model = fit_learning(seen, classes=CLASSES)
    asks = question(optimizers=("sgd",), rates=True)
    assert max(asks.offsets(model, "sgd")) == pytest.approx(2 * log(3), abs=1e-6)
    failed = higher[1]._replace(accuracy=0.1, diverged=True)
    model = fit_learning([*known_at_the_usual_rate("sgd"), failed], classes=CLASSES)
    assert max(asks.offsets(model, "sgd")) == 0


def test_no_time_no_trial():
    assert question().next_trial([], budget=0.4, left=0.4) is None
    assert question().next_trial([], budget=10, left=0.2) is None


def test_one_trial_takes_all_of_the_time_where_three_do_not_fit():
    asks = question()
    least = asks.least_budget
    assert asks.next_trial([], budget=0.99 * least, left=least) is None
    only = asks.next_trial([], budget=1.01 * least, left=1.01 * least)
    assert least <= only.seconds <= 1.01 * least
    # From three such trials on, none takes more than a third of the time.
    first = asks.next_trial([], budget=3.01 * least, left=3.01 * least)
    assert first.seconds <= 3.01 * least / 3
    assert asks.next_trial([], budget=2.9 * least, left=2.9 * least).seconds <= 2.9 * least


def test_a_handful_of_images_leaves_none_to_judge_on():
    arms = (Arm("sgd", 2, 1, 2, 1e-3), Arm("sgd", 4, 1, 4, 1e-3))
    few = question(samples=9, epochs=1000, arms=arms)
    assert few.next_trial([], budget=100, left=100) is None


def test_what_is_settled_takes_no_more_time():
    asks = question()
    sure = [
        Observed(one.optimizer, one.batch, one.samples, one.accuracy, 10**6) for one in measured()
    ] * 30
    assert asks.next_trial(sure, budget=100, left=100) is None


def test_trials_are_chosen_for_trainings_of_enough_steps_alone():
    """What a plan does not take is no candidate, nor does a target take fewer steps."""
    arms = Arm("sgd", 64, 1, 64, 1.0), Arm("sgd", IMAGES, 1, 64, 0.5)
    two = question(epochs=30, arms=arms, tolerance=0.6)
    assert two.next_trial([], budget=100, left=100) is not None
    assert replace(two, epochs=2).next_trial([], budget=100, left=100) is None
    easy = question(epochs=100, target=0.11, arms=arms)
    least = MIN_STEPS * 64 / IMAGES
    assert easy.time_to_target(measured(), 1.0) == pytest.approx(least, rel=0.01)


def test_trials_go_on_while_they_save_more_of_the_training_than_they_take():
    """No batch may be more accurate, but a quicker one as accurate: they ended as settled."""
    model, seen = truth(), []
    for size in (5_000, 40_000):
        accuracy = model.accuracy(Candidate("muon", 64, size)).value
        seen.append(Observed("muon", 64, size, accuracy, 10**5))
    arms = tuple(Arm("muon", batch, 1, batch, SECONDS[batch]) for batch in (64, 256))
    short, long = (question(epochs=epochs, arms=arms) for epochs in (6, 24))
    assert short.next_trial(seen, budget=20, left=20) is None
    assert long.next_trial(seen, budget=20, left=20).arm.batch == 256
    dear = replace(long, judging_seconds=30.0)
    assert dear.next_trial(seen, budget=200, left=200) is None


def test_one_candidate_needs_no_trial_unless_nothing_is_told_of_it():
    asks = question(arms=(Arm("sgd", 64, 1, 64, 10.0),))
    assert asks.next_trial([], budget=100, left=100) is None
    blind = replace(asks, blind=True)
    _, made = asked(blind, budget=100.0)
    assert len(made) == 1


def test_where_a_plan_knows_nothing_without_one_a_trial_is_made_though_the_law_has_it_settled():
    """As with a rate of one's own: the plan does not expect what other tasks' trainings showed."""
    asks = question(epochs=30, optimizers=("sgd",), tolerance=0.9)
    assert asks.next_trial([], budget=20, left=20) is None
    first = replace(asks, blind=True).next_trial([], budget=20, left=20)
    assert not first.offset
    assert first.seconds <= 20 / 3


@pytest.mark.parametrize("seed", range(4))
def test_no_other_rate_is_tried_before_each_optimizer_was(seed):
    _, made = asked(question(rates=True), budget=12.0, seed=seed)
    others = [index for index, one in enumerate(made) if one.offset]
    assert others
    assert {one.arm.optimizer for one in made[: others[0]]} == {"sgd", "muon"}


def test_a_target_takes_trials_that_save_more_training_than_they_take():
    asks = question(epochs=24, target=0.6)
    _, made = asked(asks, budget=60.0)
    assert made
    assert sum(one.seconds for one in made) <= 60.0
    assert made[0].arm.optimizer == "muon"
    dear = question(epochs=1, target=0.6, judging_seconds=30.0)
    assert dear.next_trial(measured()[:1], budget=1000, left=1000) is None


def test_nothing_is_told_of_a_target_without_a_trial():
    little = question(epochs=1, target=0.6, judging_seconds=9.0)
    _, made = asked(little, budget=60.0)
    assert len(made) == 1


def test_what_trials_may_take_follows_what_they_tell():
    asks = question(epochs=100, target=0.6)
    harder = replace(asks, target=0.9)
    assert 0 < asks.time_to_target([], 0.1) < harder.time_to_target([], 0.1)
    known = {one.target: one.time_to_target(measured(), 0.1) for one in (asks, harder)}
    assert 0 < known[0.6] < 0.1 * 6 * max(SECONDS.values())  # six epochs reach it
    assert known[0.6] < known[0.9] < 0.1 * 100 * max(SECONDS.values())
    assert replace(asks, target=0.05).time_to_target([], 0.1) == 0
    easy = replace(asks, target=0.3)
    assert easy.time_to_target(measured(), 0.1) < easy.least_budget == easy.time_to_target([], 0.1)
    with pytest.raises(ValueError, match="no target"):
        replace(asks, target=None).time_to_target([], 0.1)


def test_a_target_that_is_known_well_takes_no_trial():
    sure = [
        Observed(one.optimizer, one.batch, one.samples, one.accuracy, 10**6) for one in measured()
    ] * 30
    asks = question(target=0.6)
    assert asks.next_trial(sure, budget=100, left=100) is None


def test_a_target_that_is_no_better_than_guessing_takes_no_trial():
    assert question(target=0.05).next_trial([], budget=100, left=100) is None


def test_the_error_of_an_aim_after_a_trial_is_known_before_it():
    known = measured()[:2]
    model = fit_learning(known, classes=CLASSES)
    trial = Candidate("sgd", 64, max(one.samples for one in known))
    aim = model.aim("sgd", 128, 0.6)
    told = model.aim_error(aim, trial, 1000)
    seen = Observed(*trial[:3], model.accuracy(trial).value, 1000)
    later = fit_learning([*known, seen], classes=CLASSES)
    assert told < model.aim_error(aim)
    assert later.aim_error(later.aim("sgd", 128, 0.6)) == pytest.approx(told, rel=0.05)


@pytest.mark.parametrize("confidence", [0.05, 0.5, 0.8, 0.99])
def test_what_is_surely_reached_is_reached_with_that_probability(confidence):
    model, training = truth(), Candidate("muon", 128, 60_000)
    surely = model.reached_with(training, confidence)
    assert model.probability(training, surely) == pytest.approx(confidence)
    assert model.probability(training, 0.05) == 1


# ---------------------------------------------------------------------------------------- reports


def expecting(summary: RunSummary, accuracy: Estimate) -> RunSummary:
    """A run whose plan predicted so much for all candidates."""
    plan = summary.plan
    considered = tuple(one.model_copy(update={"accuracy": accuracy}) for one in plan.considered)
    return summary.model_copy(update={"plan": plan.model_copy(update={"considered": considered})})


def test_a_report_sets_predicted_accuracy_beside_what_was_reached():
    summary = make_summary()
    assert "held-out accuracy" not in {name for name, *_ in compared_rows(summary)}
    close = Estimate(value=summary.accuracy + 0.01, low=0.9, high=0.99)
    told = compared_rows(expecting(summary, close))
    (row,) = [row for row in told if row[0] == "held-out accuracy"]
    assert row[2] == f"{100 * summary.accuracy:.1f} %"
    assert row[3] == "1.0 points less, inside the interval"
    left = expecting(summary, close).model_copy(update={"epochs": summary.epochs[:-1]})
    (row,) = [row for row in compared_rows(left) if row[0] == "held-out accuracy"]
    assert row[2] == "not measured"
