"""`method=auto`: which method a plan takes, and what it says of the others."""

from __future__ import annotations

import pytest

from batchwright.errors import JobError
from batchwright.planning.candidates.learnt import teaches
from batchwright.planning.candidates.optimizer import optimizers_of
from batchwright.planning.methods import dynamic_batch
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.planning.resolution import settled
from batchwright.records import Ags, Cycle, Goal, Job, Plan, RunSummary, Virtual
from batchwright.records.documents import change_job
from batchwright.records.run import WorkerTime
from samples import make_data, make_epoch, make_network, make_summary
from test_learning import taught
from test_planned_methods import profile_of, virtual


def planned(profile, method: str, runs=(), **changes) -> Plan:
    job = profile.job.model_copy(update={"method": method, **changes})
    return make_plan(profile, job, runs=runs)


def reasons(plan: Plan, choice: str):
    return [one for one in plan.reasons if one.choice == choice]


def others(plan: Plan) -> dict[str, str]:
    """What is said of the methods that were not taken."""
    (reason,) = reasons(plan, "method")
    return {one.value: one.loss for one in reason.alternatives}


def run_of(plan: Plan, accuracy: float, seconds: tuple[float, ...] = ()) -> RunSummary:
    """A finished run of a plan, whose workers took so many seconds each in an epoch."""
    images = plan.data.train_samples
    batch = plan.stages[-1].global_batch_size
    workers = tuple(
        WorkerTime(
            local_batch_size=batch // plan.workers,
            samples=images // plan.workers,
            input_seconds=0.0,
            compute_seconds=one,
            communication_seconds=0.0,
        )
        for one in seconds or (10.0,) * plan.workers
    )
    epochs = tuple(
        make_epoch(
            epoch,
            global_batch_size=batch,
            steps=images // batch,
            workers=workers,
            val_count=10_000,
            val_correct=round(10_000 * accuracy * (epoch + 1) / plan.epochs),
            noise_scale=None,
        )
        for epoch in range(plan.epochs)
    )
    return make_summary(plan=plan, profile=None, epochs=epochs)


def test_without_anything_told_it_is_plain_and_says_what_else_there_was():
    profile = profile_of()
    plan, plain = planned(profile, "auto"), planned(profile, "plain")
    assert plan.model_copy(update={"reasons": plain.reasons}) == plain
    assert list(others(plan)) == ["dynamic-batch", "cyclic", "dual-batch", "hybrid"]
    assert "accuracy not known: only runs with it tell" in others(plan)["dual-batch"]
    assert others(plan)["dual-batch"].endswith("not known to learn as much")
    assert others(plan)["dynamic-batch"].endswith("saves less than 2 %")
    assert "or hybrid" in plan.explain()


def test_workers_that_are_stated_to_differ_get_shares_by_speed():
    plan = virtual("auto", workers=4, global_batch=512, virtual=Virtual(speeds=(1, 1, 0.5, 0.5)))
    assert (plan.method, plan.job.method) == ("dynamic-batch", "dynamic-batch")
    (reason,) = reasons(plan, "method")
    assert "even shares would take" in reason.why
    assert others(plan)["plain"].endswith("takes longer")
    even = virtual("auto", workers=4, global_batch=512)
    assert even.method == "plain"
    assert "no worker is known to be slower" in others(even)["dynamic-batch"]


def test_time_by_shares_is_that_of_steps_that_all_end_together():
    speeds = Virtual(speeds=(1, 0.5), overheads=(1, 2))
    plan = virtual("dynamic-batch", workers=2, global_batch=96, virtual=speeds)
    (stage,) = plan.stages
    a, b = stage.sample_seconds, stage.step_seconds
    even = max(48 * a + b, (48 * a + 2 * b) / 0.5)
    level = (96 * a + 3 * b) / 1.5
    first = (level - b) / a  # samples of the first worker, and of the second
    assert first + (0.5 * level - 2 * b) / a == pytest.approx(96)
    steps = 50_000 // 96 + 1
    assert dynamic_batch.saved_by_shares(plan, ()) == pytest.approx(
        plan.epochs * steps * (even - level), rel=0.01
    )


def test_workers_that_a_run_measured_as_slower_count_too():
    profile = profile_of()
    plain = planned(profile, "plain")
    slow = run_of(plain, 0.5, (10.0, 10.0, 10.0, 20.0))
    assert planned(profile, "auto", [slow]).method == "dynamic-batch"
    alike = run_of(plain, 0.5, (10.0, 10.0, 10.0, 10.1))
    assert planned(profile, "auto", [alike]).method == "plain"


def test_what_shares_save_is_part_of_what_is_predicted_however_slow_a_run_was():
    profile = profile_of()
    plain = planned(profile, "plain")
    for slower in (1.0, 1000.0):
        run = run_of(plain, 0.5, tuple(slower * one for one in (10.0, 10.0, 10.0, 20.0)))
        plan = planned(profile, "dynamic-batch", [run])
        whole = plan.epochs * plan.chosen.epoch_seconds.value
        # The slowest of four takes twice as long: all together 4 / 3.5 of what the others take.
        assert dynamic_batch.saved_by_shares(plan, [run]) <= 1.001 * whole * (1 - 4 / 3.5 / 2)
    assert dynamic_batch.saved_by_shares(plan, [run]) == pytest.approx(
        whole * (1 - 4 / 3.5 / 2), rel=0.2
    )


def test_shares_save_time_in_the_epochs_that_a_target_is_likely_to_take():
    """A schedule may be laid out over more."""
    profile = profile_of()
    run = run_of(planned(profile, "plain"), 0.9, (10.0, 10.0, 10.0, 20.0))
    whole = planned(profile, "dynamic-batch", [run])
    plan = planned(profile, "dynamic-batch", [run], goal=Goal(accuracy=0.3))
    assert plan.likely_epochs() < plan.epochs
    saved = [
        dynamic_batch.saved_by_shares(one, [run]) / one.chosen.epoch_seconds.value
        for one in (plan, whole)
    ]
    assert saved[0] / plan.likely_epochs() == pytest.approx(saved[1] / whole.epochs, rel=0.1)


@pytest.mark.parametrize(("apart", "taken"), [(-0.005, "hybrid"), (-0.05, "plain")])
def test_two_batches_are_taken_where_runs_tell_that_they_learn_as_much(apart, taken):
    profile = profile_of()
    runs = [
        run_of(planned(profile, "plain"), 0.5),
        run_of(planned(profile, "hybrid"), 0.5 + apart),
    ]
    plan = planned(profile, "auto", runs)
    assert plan.method == taken
    told = reasons(plan, "method")[0].why if taken == "hybrid" else others(plan)["hybrid"]
    assert "by the runs given" in told
    assert f"accuracy {50 + 100 * apart:.1f} %" in told
    assert told.endswith("may lose more than goal.accuracy_tolerance") == (taken == "plain")


def test_time_decides_where_chance_may_have_set_the_runs_apart():
    """Two points are more than the tolerance, and less than single runs tell for sure."""
    profile = profile_of()
    plain, hybrid = (planned(profile, method) for method in ("plain", "hybrid"))
    runs = [run_of(plain, 0.5), run_of(hybrid, 0.48)]
    plan = planned(profile, "auto", runs)
    assert plan.method == "hybrid"
    (reason,) = reasons(plan, "method")
    assert "2.0 points below plain, which may be chance (give or take" in reason.why
    many = [
        run_of(one, accuracy + off)
        for one, accuracy in ((plain, 0.5), (hybrid, 0.48))
        for off in (-0.004, -0.002, 0, 0, 0.002, 0.004)
    ]
    plan = planned(profile, "auto", many)
    assert plan.method == "plain"
    assert others(plan)["hybrid"].endswith("may lose more than goal.accuracy_tolerance")


@pytest.mark.parametrize(
    ("objective", "taken"),
    [pytest.param("time", "hybrid", marks=pytest.mark.slow), ("cost", "plain")],
)
def test_the_method_has_the_least_of_what_the_goal_asks_for(objective, taken):
    """Two groups of workers are quicker than one worker with `plain`, and cost more."""
    profile = profile_of(counts=(1, 2, 4))
    slow = {"seconds": 4.0, "low": 3.9, "high": 4.1}
    waits = {"sync_seconds": 1.0, "step_seconds": 1.0, "step_low": 0.99, "step_high": 1.01}
    profile = profile.model_copy(
        update={
            "collectives": tuple(one.model_copy(update=slow) for one in profile.collectives),
            "steps": tuple(
                one.model_copy(update=waits if one.workers > 1 else {}) for one in profile.steps
            ),
        }
    )
    asked = {"workers": "auto", "goal": Goal(objective=objective, price=1.0)}
    runs = [run_of(planned(profile, method, **asked), 0.5) for method in ("plain", "hybrid")]
    plan = planned(profile, "auto", runs, **asked)
    assert plan.method == taken
    why = reasons(plan, "method")[0].why
    assert f"the least predicted {objective} is taken of those known" in why
    if taken == "plain":
        assert others(plan)["hybrid"].endswith("costs more")


def test_a_method_that_cannot_be_is_said_to_be_not_possible():
    profile = profile_of(workers=1, counts=(1,), sides=(32,))
    plan = planned(profile, "auto")
    assert others(plan)["cyclic"].startswith("not possible: method=cyclic has one resolution")
    assert others(plan)["dual-batch"] == "not possible: two batches at once take 2 workers or more"


def test_another_method_that_was_asked_for_says_what_plain_would_reach():
    profile = taught()
    plan = planned(profile, "dual-batch", workers=2)
    (reason,) = [one for one in reasons(plan, "accuracy") if "method=dual-batch" in one.why]
    plain = planned(profile, "plain", workers=2)
    reached = next(one for one in plain.considered if one.accuracy and _is_of(plain, one))
    assert f"{100 * reached.accuracy.value:.1f} %" in reason.why
    bare = planned(profile.model_copy(update={"trials": ()}), "dual-batch", workers=2)
    assert not [one for one in bare.reasons if "method=plain" in one.why]


def test_another_method_says_what_plain_takes_to_a_target_or_that_it_does_not_reach_it():
    profile = taught()
    near = {"workers": 2, "goal": Goal(accuracy=0.5)}
    plain, plan = (planned(profile, method, **near) for method in ("plain", "dual-batch"))
    (reason,) = reasons(plan, "accuracy")
    assert plain.likely_epochs() < plan.epochs
    assert f"With method=plain {plain.likely_epochs()} epochs are predicted" in reason.why
    (reason,) = reasons(
        planned(profile, "dual-batch", workers=2, goal=Goal(accuracy=0.99)), "accuracy"
    )
    said = "and method=plain has no plan that does: no candidate has a chance of 10 %"
    assert said in reason.why


def test_a_method_is_planned_where_plain_refuses_the_job():
    """The smallest factor suits the batch of the cycle, and not the smaller one of `plain`."""
    profile = profile_of()
    keys = {
        "base_batch": 512,
        "ags": Ags(mode="norm", least=1.9),
        "cycle": Cycle(batches=(2048, 2048)),
    }
    with pytest.raises(JobError, match=r"ags.least=1.9 is more than the largest factor"):
        planned(profile, "plain", **keys)
    plan = planned(profile, "cyclic", **keys)
    runs = [run_of(planned(profile, "plain"), 0.5)]
    assert planned(profile, "cyclic", runs, **keys).stages == plan.stages
    aimed = keys | {"goal": Goal(accuracy=0.4)}
    (reason,) = reasons(planned(profile, "cyclic", runs, **aimed), "accuracy")
    assert "method=plain has no plan that does: ags.least=1.9 is more than" in reason.why


def _is_of(plan: Plan, one) -> bool:
    return (one.workers, one.global_batch_size) == (plan.workers, plan.stages[0].global_batch_size)


@pytest.mark.parametrize(
    ("key", "method"),
    [
        ("cycle.order=one-pass", "cyclic"),
        ("dual.extra_time=1.1", "dual-batch"),
        ("rebalance_steps=5", "dynamic-batch"),
    ],
)
def test_a_key_of_one_method_is_refused_where_the_plan_is_to_choose(key, method):
    with pytest.raises(JobError, match=f"{key} is for method=.*{method}.* leaves the method to"):
        change_job(Job(), {"method": "auto"}, [key])


def test_what_is_left_to_the_plan_is_probed_at_lower_resolutions_and_tried_as_plain_is():
    job = settled(Job(method="auto"), make_data(side=32))
    assert job.resolutions == (24, 32)
    assert teaches(job)
    assert optimizers_of(job) == optimizers_of(Job(resolutions=(32,)))


def test_where_nothing_was_measured_it_is_plain():
    job = Job(method="auto", resolutions=(8,))
    plan = plan_without_profile(job, make_data(), make_network())
    assert (plan.method, plan.job.method) == ("plain", "plain")
