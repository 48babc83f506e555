"""What runs with either optimizer tell a plan that may choose between them."""

from __future__ import annotations

import re
from math import exp

import pytest

from batchwright.algorithms.learning_rate import make_rule
from batchwright.errors import PlanError
from batchwright.planning.candidates.optimizer import Compared, chosen_optimizer
from batchwright.planning.planner import make_plan
from batchwright.planning.run_history import experience_of
from batchwright.prediction.accuracy.quality import SEED_ERROR
from batchwright.records import Ags, AgsRule, Goal, RunSummary
from batchwright.records.registries.optimizers import SGD
from samples import make_epoch, make_job, make_server, make_summary, reason
from samples import make_plan as make_sample_plan
from test_learning import trial
from test_optimizer import profile_of

COUNT = 1_000_000  # held-out images, so that an accuracy is hardly rounded


def run_of(
    update: str,
    batch: int,
    accuracy: float,
    *,
    epochs: int = 10,
    base: float | None = None,
    held_out: int = COUNT,
    **changes,
) -> RunSummary:
    """Accuracy rises evenly to its last value."""
    plan = make_sample_plan()
    job = plan.job.model_copy(update={"optimizer": "auto", "learning_rate": "auto"} | changes)
    rule = make_rule(job, batch, epochs, update, samples=plan.data.train_samples)
    rule = rule.model_copy(update={"base": base or rule.base})
    stage = plan.stages[0].model_copy(update={"epochs": epochs, "local_batch_sizes": (batch,)})
    fields = {"job": job, "update": update, "learning_rate": rule, "stages": (stage,)}
    return make_summary(
        plan=plan.model_copy(update=fields),
        epochs=tuple(
            make_epoch(
                e,
                global_batch_size=batch,
                val_count=held_out,
                val_correct=round(held_out * (0.1 + (accuracy - 0.1) * (e + 1) / epochs)),
                noise_scale=None,
            )
            for e in range(epochs)
        ),
    )


def test_what_runs_with_both_showed_at_a_batch_comes_before_the_rule():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512)
    assert make_plan(profile_of(), job).update == "muon"
    runs = [run_of("sgd", 512, 0.97), run_of("muon", 512, 0.90)]
    plan = make_plan(profile_of(), job, runs=runs)
    assert plan.update == "sgd"
    assert plan.learning_rate.base == SGD.rate
    why = reason(plan, "optimizer")
    assert why.source == "measured"
    assert (
        "In the 2 runs given with batch 512, SGD reached 97.0 % held out and Muon 90.0 %" in why.why
    )
    small = job.model_copy(update={"global_batch": 64})
    turned = [run_of("sgd", 64, 0.90), run_of("muon", 64, 0.97)]
    plan = make_plan(profile_of(), small, runs=turned)
    assert plan.update == "muon"
    assert reason(plan, "optimizer").source == "measured"


def test_it_counts_within_a_factor_of_two_and_the_nearest_comes_first():
    job = make_job(optimizer="auto", learning_rate="auto", base_batch=64)
    runs = [
        run_of(name, batch, accuracy, base_batch=64)
        for batch, reached in ((512, (0.97, 0.9)), (2048, (0.8, 0.9)))
        for name, accuracy in zip(("sgd", "muon"), reached, strict=True)
    ]
    compared = experience_of(profile_of(), job, runs).compared()
    assert [one.batch for one in compared] == [512, 2048]
    expected = {255: "sgd", 256: "sgd", 700: "sgd", 1025: "muon", 2048: "muon"}
    assert {batch: chosen_optimizer(job, batch, compared) for batch in expected} == expected
    told = Compared(200, 0.5, 0.6, 0.05, runs=0)  # nearer, but only predicted
    expected |= {255: "muon", 300: "sgd"}
    found = {batch: chosen_optimizer(job, batch, [told, *compared]) for batch in expected}
    assert found == expected


def test_a_difference_that_seeds_could_make_leaves_the_rule_and_is_told():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512)
    runs = [run_of("sgd", 512, 0.92), run_of("muon", 512, 0.92 - SEED_ERROR)]
    few = reason(make_plan(profile_of(), job, runs=runs), "optimizer").why
    assert "a difference that may be chance. " in few
    assert "by trainings of other tasks" in few  # the learning curve decides
    many = [run_of("sgd", 512, 0.92) for _ in range(16)]
    many += [run_of("muon", 512, 0.92 - SEED_ERROR) for _ in range(16)]
    plan = make_plan(profile_of(), job, runs=many)
    assert plan.update == "sgd"
    assert "by trainings of other tasks" not in reason(plan, "optimizer").why


def test_few_runs_on_few_images_differ_by_chance_more_than_seeds_do():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512)
    told = []
    for held_out, runs in ((COUNT, 1), (360, 1), (360, 5)):
        reached = [("sgd", 0.9), ("muon", 0.86)] * runs
        given = [run_of(name, 512, share, held_out=held_out) for name, share in reached]
        (compared,) = experience_of(profile_of(), job, given).compared()
        told.append(compared.better)
    assert told == ["sgd", None, "sgd"]  # five seeds show the chance that they are of
    runs = [run_of("sgd", 512, 0.86, held_out=360)]
    runs.append(run_of("sgd", 512, 0.9, held_out=360, scaling="linear"))
    job = job.model_copy(update={"optimizer": "sgd"})
    assert make_plan(profile_of(), job, runs=runs).learning_rate.scaling == "sqrt"


def test_only_runs_at_the_rates_of_a_plan_and_of_one_length_are_compared():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512, scaling="sqrt")
    sgd = run_of("sgd", 512, 0.97)
    for muon in (
        run_of("muon", 512, 0.5, base=0.3),
        run_of("muon", 512, 0.5, epochs=5),
        run_of("muon", 512, 0.5, scaling="none"),
    ):
        assert experience_of(profile_of(), job, [sgd, muon]).compared() == ()
        assert make_plan(profile_of(), job, runs=[sgd, muon]).update == "muon"


def test_runs_at_a_rate_that_trials_found_are_compared():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512, scaling="sqrt")
    run = run_of("muon", 512, 0.5, base=0.3)
    rule = run.plan.learning_rate
    usual = make_rule(run.plan.job, 512, 10, "muon", samples=run.plan.data.train_samples)
    tried = rule.model_copy(update={"tried": rule.base / usual.base})
    run = run.model_copy(update={"plan": run.plan.model_copy(update={"learning_rate": tried})})
    told = experience_of(profile_of(), job, [run_of("sgd", 512, 0.97), run])
    assert told.compared()
    # The learning curve takes them as trainings at those rates.
    rates = [exp(seen.offset) for _, seen in told.observed()]
    assert rates == [1.0, pytest.approx(rule.base / usual.base, rel=1e-5)]


def by(run: RunSummary, mode: str) -> RunSummary:
    """As with adaptive gradient scaling."""
    rule = AgsRule(mode=mode, base_batch=128, least=1.0, most=None, lookback=50)
    return run.model_copy(update={"plan": run.plan.model_copy(update={"ags": rule})})


def test_the_rule_for_the_batch_is_that_which_did_best_in_the_runs():
    job = make_job(optimizer="sgd", learning_rate="auto", global_batch=512)
    usual, linear = run_of("sgd", 512, 0.7), run_of("sgd", 512, 0.8, scaling="linear")
    plan = make_plan(profile_of(), job, runs=[usual, linear])
    assert (plan.learning_rate.scaling, plan.ags) == ("linear", None)
    told = reason(plan, "rule for the batch")
    assert (told.value, told.source) == ("scaling=linear ags.mode=off", "measured")
    assert "Of the 2 runs given with batch 512 and optimizer=sgd" in told.why
    assert [(one.value, one.loss) for one in told.alternatives] == [
        ("scaling=sqrt", "reached 70.0 %")
    ]
    assert "80.0 %" in reason(plan, "accuracy").value
    gain = by(run_of("sgd", 512, 0.9, scaling="none"), "gain")
    plan = make_plan(profile_of(), job, runs=[usual, linear, gain])
    assert (plan.learning_rate.scaling, plan.ags.mode) == ("none", "gain")
    assert plan.job.ags.mode == "gain"
    assert reason(plan, "parts of a step")
    scaled, rate = reason(plan, "gradient scaling"), reason(plan, "learning rate")
    assert (scaled.source, scaled.why[:18]) == ("measured", "By the runs given.")
    assert rate.source == "measured"
    own = job.model_copy(update={"scaling": "none", "ags": Ags(mode="gain")})
    plan = make_plan(profile_of(), own, runs=[usual, linear, gain])
    assert {reason(plan, key).source for key in ("gradient scaling", "learning rate")} == {"asked"}
    asked = job.model_copy(update={"scaling": "sqrt", "ags": Ags(mode="off")})
    plan = make_plan(profile_of(), asked, runs=[usual, linear, gain])
    assert (plan.learning_rate.scaling, plan.ags) == ("sqrt", None)
    assert all(one.choice != "rule for the batch" for one in plan.reasons)


def test_a_rule_that_is_ahead_by_chance_alone_leaves_the_usual_one():
    job = make_job(optimizer="sgd", learning_rate="auto", global_batch=512)
    linear = run_of("sgd", 512, 0.7 + SEED_ERROR, scaling="linear")
    plan = make_plan(profile_of(), job, runs=[run_of("sgd", 512, 0.7), linear])
    assert plan.learning_rate.scaling == "sqrt"
    why = reason(plan, "rule for the batch").why
    assert "scaling=linear was ahead by no more than chance may make" in why


def test_runs_far_from_the_batch_say_nothing_of_its_rule():
    job = make_job(optimizer="sgd", learning_rate="auto")
    runs = [run_of("sgd", 512, 0.7), run_of("sgd", 512, 0.9, scaling="linear")]
    near = make_plan(profile_of(), job.model_copy(update={"global_batch": 256}), runs=runs)
    far = make_plan(profile_of(), job.model_copy(update={"global_batch": 64}), runs=runs)
    assert (near.learning_rate.scaling, far.learning_rate.scaling) == ("linear", "sqrt")
    assert make_plan(profile_of(), job, runs=runs).learning_rate.scaling == "linear"


def test_the_rule_is_that_of_the_optimizer_which_the_runs_speak_for():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512)
    runs = [run_of("sgd", 512, 0.8, scaling="linear"), run_of("muon", 512, 0.6)]
    plan = make_plan(profile_of(), job, runs=runs)
    assert (plan.update, plan.learning_rate.scaling) == ("sgd", "linear")
    runs[1] = run_of("muon", 512, 0.9)
    plan = make_plan(profile_of(), job, runs=runs)
    assert (plan.update, plan.learning_rate.scaling) == ("muon", "sqrt")
    gain = by(run_of("sgd", 512, 0.97, scaling="none"), "gain")
    plan = make_plan(profile_of(), job, runs=[*runs, gain])
    assert (plan.update, plan.learning_rate.scaling, plan.ags.mode) == ("sgd", "none", "gain")


def test_each_optimizers_batches_are_judged_by_its_own_runs():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512)
    runs = [run_of("sgd", 512, 0.4), run_of("muon", 512, 0.9)]
    goal = Goal(accuracy=0.85)
    plan = make_plan(profile_of(), job.model_copy(update={"goal": goal}), runs=runs)
    assert "90.0 %" in reason(plan, "accuracy").value
    assert 9 < float(reason(plan, "epochs to target").value.split()[0]) < 10
    forced = job.model_copy(update={"goal": goal, "optimizer": "sgd"})
    plan = make_plan(profile_of(), forced, runs=runs)
    assert "40.0 %" in reason(plan, "accuracy").value
    assert all(one.choice != "epochs to target" for one in plan.reasons)


def test_a_target_that_only_one_optimizer_reached_is_planned_with_that_one():
    job = make_job(optimizer="auto", learning_rate="auto", base_batch=64)
    goal = Goal(objective="target-accuracy", accuracy=0.85)
    runs = [run_of("sgd", 64, 0.4, base_batch=64), run_of("muon", 512, 0.9, base_batch=64)]
    plan = make_plan(profile_of(), job.model_copy(update={"goal": goal}), runs=runs)
    assert plan.update == "muon"


def test_a_batch_whose_runs_missed_the_target_is_not_planned_for_it():
    job = make_job(optimizer="sgd", learning_rate="auto")
    runs = [run_of("sgd", 32, 0.95), run_of("sgd", 64, 0.93), run_of("sgd", 128, 0.4)]
    goal = Goal(objective="target-accuracy", accuracy=0.85)
    plan = make_plan(profile_of(), job.model_copy(update={"goal": goal}), runs=runs)
    assert plan.stages[0].global_batch_size < 128
    why = reason(plan, "global batch").why
    assert "1 of 1 run with batch 128 did not reach it in 10 epochs" in why
    one = [run_of("sgd", 8, accuracy) for accuracy in (0.9, 0.8, 0.8)]
    plan = make_plan(profile_of(), job.model_copy(update={"goal": goal}), runs=one)
    assert "No batch within the limits is known to reach" in reason(plan, "global batch").why


def test_an_accuracy_of_shorter_runs_says_after_how_many_epochs_it_was():
    job = make_job(optimizer="sgd", learning_rate="auto", global_batch=64, epochs=30)
    plan = make_plan(profile_of(), job, runs=[run_of("sgd", 64, 0.4, epochs=3)])
    assert "after as much as 3 epochs" in reason(plan, "accuracy").why
    plan = make_plan(profile_of(), job, runs=[run_of("sgd", 64, 0.4, epochs=30)])
    assert "as much as" not in reason(plan, "accuracy").why


@pytest.mark.parametrize("target", [None, 0.3])
def test_one_accuracy_stands_in_all_reasons(target):
    """Runs tell it by their curves; what the law makes of their ends is another number."""
    profile, runs = profile_of(global_batch=32), [run_of("sgd", 32, 0.4, epochs=3)]
    rates = [trial("sgd", 32, 3000, u, rate=0.05 * r) for u, r in ((0.3, 1), (0.35, 3))]
    if target is not None:  # with trials, runs tell accuracy where they reached the target
        profile = profile.model_copy(update={"trials": (*rates, trial("muon", 32, 3000, 0.5))})
    goal = Goal(accuracy=target)
    plan = make_plan(profile, profile.job.model_copy(update={"goal": goal}), runs=runs)
    assert "by the runs given at equal progress" in reason(plan, "accuracy").why
    optimizer = reason(plan, "optimizer")
    assert "the runs given, and by trainings of other tasks" in optimizer.why
    assert "points more accurate than SGD on held-out images" in optimizer.why
    told = reason(plan, "accuracy").value
    others = [one.why for one in plan.reasons if one.choice in ("optimizer", "learning rate")]
    assert {one for why in others for one in re.findall(r"[\d.]+ %", why)} <= {told.split(" (")[0]}


def served(run: RunSummary) -> RunSummary:
    plan = run.plan.model_copy(update={"method": "dual-batch", "server": make_server()})
    return run.model_copy(update={"plan": plan})


def smaller_images(run: RunSummary) -> RunSummary:
    stages = tuple(one.model_copy(update={"resolution": 8}) for one in run.plan.stages)
    return run.model_copy(update={"plan": run.plan.model_copy(update={"stages": stages})})


def broken_off(run: RunSummary) -> RunSummary:
    return run.model_copy(update={"epochs": run.epochs[:3]})


def cyclic(run: RunSummary) -> RunSummary:
    return run.model_copy(update={"plan": run.plan.model_copy(update={"method": "cyclic"})})


def of_job(run: RunSummary, **changes) -> RunSummary:
    job = run.plan.job.model_copy(update=changes)
    return run.model_copy(update={"plan": run.plan.model_copy(update={"job": job})})


def with_weights(run: RunSummary) -> RunSummary:
    return of_job(run, weights="best.pt")


def frozen(run: RunSummary) -> RunSummary:
    return of_job(run, frozen=("all-but-head",))


def pretrained(run: RunSummary) -> RunSummary:
    return of_job(run, network_args={"pretrained": True})


def with_parameters(run: RunSummary, number: int) -> RunSummary:
    network = run.plan.network.model_copy(update={"parameters": number})
    return run.model_copy(update={"plan": run.plan.model_copy(update={"network": network})})


def smaller_images_of_a_transformer(run: RunSummary) -> RunSummary:
    return with_parameters(smaller_images(run), 70_000)  # fewer positions


@pytest.mark.parametrize(
    "other",
    [
        *(served, smaller_images, smaller_images_of_a_transformer, broken_off, cyclic),
        *(with_weights, pretrained, frozen),
    ],
)
def test_runs_of_another_method_resolution_or_start_or_left_early_are_no_evidence(other):
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512)
    runs = [other(run_of("sgd", 512, 0.97)), run_of("muon", 512, 0.90)]
    assert experience_of(profile_of(), job, runs).compared() == ()
    plan = make_plan(profile_of(), job, runs=runs)
    assert plan.update == "muon"
    why = reason(plan, "gradient noise scale").why
    assert "Left out of the runs given: 1 of another method" in why
    plan = make_plan(profile_of(), job, runs=[other(run_of("muon", 512, 0.97))])
    assert reason(plan, "accuracy") == reason(make_plan(profile_of(), job), "accuracy")


def test_a_run_of_the_network_with_other_arguments_or_another_size_is_refused():
    job = make_job(optimizer="sgd", global_batch=512)
    run = run_of("sgd", 512, 0.9)
    other = of_job(run, network_args={"width": 2, "act": "relu"})
    said = "has network=resnet8 network_args.act=relu network_args.width=2, the "
    with pytest.raises(PlanError, match=re.escape(f"{said}profile network=resnet8: give")):
        make_plan(profile_of(), job, runs=[other])
    other = with_parameters(run, 300_000)
    with pytest.raises(PlanError, match=r"resnet8 \(300,000 weights\), the profile .*same task"):
        make_plan(profile_of(), job, runs=[other])
    from_scratch = of_job(run, network_args={"pretrained": False})
    assert experience_of(profile_of(), job, [from_scratch]).runs == (from_scratch,)


def test_a_run_with_an_accuracy_above_one_is_refused_with_its_folder_and_value():
    run = run_of("sgd", 512, 0.9)
    *epochs, last = run.epochs
    percent = last.model_copy(update={"val_correct": 76, "val_count": 1})  # a loop's own metric
    run = run.model_copy(update={"epochs": (*epochs, percent), "run_folder": "runs/mine"})
    with pytest.raises(PlanError, match=r"^the run runs/mine has top1=76 after epoch 10, where"):
        make_plan(profile_of(), make_job(optimizer="sgd", global_batch=512), runs=[run])


def test_a_run_left_once_it_reached_the_target_tells_its_epochs():
    job = make_job(optimizer="sgd", learning_rate="auto", global_batch=64, goal=Goal(accuracy=0.2))
    left = broken_off(run_of("sgd", 64, 0.9))
    plan = make_plan(profile_of(), job, runs=[left])
    assert float(reason(plan, "epochs to target").value.split()[0]) < 3
    assert experience_of(profile_of(), job, [left]).compared() == ()


def test_runs_with_other_settings_are_left_out_or_stand_in_and_it_is_said():
    job = make_job(optimizer="auto", learning_rate="auto", global_batch=512)
    runs = [run_of("muon", 512, 0.9), run_of("muon", 512, 0.3, base=5.0)]
    plan = make_plan(profile_of(), job, runs=runs)
    assert "90.0 %" in reason(plan, "accuracy").value
    told = reason(plan, "gradient noise scale").why
    assert "Of the runs with optimizer=muon, 1 with another rate" in told
    plan = make_plan(profile_of(), job, runs=[run_of("sgd", 512, 0.6)])
    assert plan.update == "muon"
    assert "No run with optimizer=muon was given" in reason(plan, "gradient noise scale").why


def test_runs_that_the_job_cannot_be_like_are_refused_if_there_are_no_others():
    job = make_job(optimizer="sgd", global_batch=512)
    with pytest.raises(PlanError, match="has optimizer=muon, the job optimizer=sgd"):
        make_plan(profile_of(), job, runs=[run_of("muon", 512, 0.9)])
    assert make_plan(profile_of(), job, runs=[run_of("muon", 512, 0.9), run_of("sgd", 512, 0.9)])


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"optimizer": "sgd", "global_batch": 512}, True),
        ({"optimizer": "sgd", "global_batch": 128}, False),
        ({"optimizer": "sgd", "global_batch": 512, "ags": Ags(mode="off")}, False),
        ({"optimizer": "sgd", "global_batch": 512, "scaling": "gain"}, False),
        ({"optimizer": "muon", "global_batch": 512}, False),
    ],
)
def test_a_plan_says_why_it_scales_no_gradients_where_it_could(keys, told):
    plan = make_plan(profile_of(), make_job(learning_rate="auto", **keys))
    found = [one for one in plan.reasons if one.choice == "gradient scaling"]
    assert bool(found) == told
    if told:
        assert "`plan --run` follows" in found[0].why
