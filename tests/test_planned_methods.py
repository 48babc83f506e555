"""Plans of `dual-batch`, `cyclic` and `hybrid`, and for a virtual cluster."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from batchwright.algorithms.simulated_clock import step_times
from batchwright.cli.output import print_plan
from batchwright.errors import BatchwrightError, JobError, PlanError
from batchwright.planning.candidates.preemptions import losses_of
from batchwright.planning.candidates.table import Table
from batchwright.planning.methods import two_groups
from batchwright.planning.methods.simulated import simulated
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.planning.schedule import rate_schedule
from batchwright.prediction.memory import fit_memory
from batchwright.records import (
    CollectiveTime,
    Cycle,
    DualBatch,
    Goal,
    GradientNoise,
    Job,
    Link,
    MemoryParts,
    MemoryPoint,
    PairTime,
    Plan,
    Profile,
    Server,
    StepTime,
    UpdateTime,
    Virtual,
)
from batchwright.records.documents import change_job, load_job
from batchwright.records.text.formatting import duration
from batchwright.records.text.plan_text import is_chosen
from batchwright.workflows.verbs import plan as plan_verb
from samples import make_cluster, make_data, make_network, reason

MIB = 2**20
SIDES = (24, 32)
CIFAR100 = make_data(
    name="cifar100",
    train_samples=50_000,
    val_samples=100,
    classes=tuple(f"c{n}" for n in range(100)),
    side=32,
)
FIXED = 0.01  # seconds of a step, 3 ms of waiting not counted


def compute_seconds(side, batch):
    return FIXED + 0.0005 * (side / 32) ** 2 * batch


def step_of(workers, side, batch):
    seconds = compute_seconds(side, batch)
    sync = 0.003 if workers > 1 else 0.0
    return StepTime(
        resolution=side,
        local_batch_size=batch,
        workers=workers,
        compute_seconds=seconds,
        sync_seconds=sync,
        step_seconds=seconds + sync,
        step_low=0.99 * (seconds + sync),
        step_high=1.01 * (seconds + sync),
        repeats=10,
    )


def profile_of(*, workers=4, counts=None, sides=SIDES, data=CIFAR100, job=None, **changes):
    """Workers whose step takes 10 ms and half a millisecond an image of 32 px; memory by area."""
    counts = counts or (workers,)
    points = [(n, side, b) for n in counts for side in sides for b in (16, 64, 256)]
    fields = {
        "job": Job(
            data="cifar100:x",
            augment="crop-flip",
            precision="float32",
            resolutions=sides,
            workers=workers,
            **(job or {}),
        ),
        "data": data,
        "network": make_network(parameters=75_000, least_side=4),
        "cluster": make_cluster(workers=max(counts), cores=4, memory_bytes=4096 * MIB),
        "steps": tuple(step_of(*point) for point in points),
        "memory": tuple(
            MemoryPoint(
                resolution=side,
                local_batch_size=b,
                workers=n,
                peak_bytes=2 * MIB + b * MIB * side**2 // 1024,
            )
            for n, side, b in points
        ),
        "memory_parts": MemoryParts(
            parameters=300_000, buffers=0, gradients=300_000, optimizer=300_000, reduction=300_000
        ),
        "collectives": (
            CollectiveTime(
                operation="push-pull",
                bytes=300_000,
                workers=2,
                seconds=0.02,
                low=0.019,
                high=0.021,
                repeats=9,
            ),
        ),
        "noise": None,
        "evaluation_seconds_per_image": 0.0001,
        "probe_seconds": 9.0,
    }
    return Profile(**{**fields, **changes})


def planned(method, profile=None, **changes):
    profile = profile or profile_of()
    return make_plan(profile, profile.job.model_copy(update={"method": method, **changes}))


def round_of(groups_a, groups_b, batch, share):
    """Seconds of a worker's samples, the tail in a step of its own."""
    whole, tail = divmod(share, batch)
    return whole * (groups_b + groups_a * batch) + (groups_b + groups_a * tail if tail else 0)


# --------------------------------------------------------------------------------- dual batch


def test_a_plan_without_large_batches_does_not_tell_of_workers_that_have_them():
    plan = planned("dual-batch", dual=DualBatch(small_workers=4))
    assert "on a worker with the largest batch" in reason(plan, "memory").why


def test_dual_batch_is_one_row_at_the_highest_resolution_through_a_server():
    plan = planned("dual-batch")
    (stage,) = plan.stages
    assert (plan.method, plan.merge, stage.resolution) == ("dual-batch", "parameter server", 32)
    assert (plan.server.small_workers, plan.server.extra_time) == (3, 1.05)
    assert (plan.server.consistency, plan.server.staleness) == ("asp", None)
    large, *small = stage.local_batch_sizes
    by_time = planned("plain", goal=Goal(objective="knee"))
    assert large == by_time.stages[0].local_batch_sizes[0]
    assert len(set(small)) == 1
    assert small[0] < large
    assert sum(stage.samples_per_round) == 50_000
    assert stage.samples_per_round[0] == round(1.05 * 50_000 / 4)
    ratio = (50_000 - 13_125) / 3 / 13_125
    assert stage.update_factors == pytest.approx((1.0, ratio, ratio, ratio), rel=1e-4)
    assert plan.learning_rate.decay == plan.job.decay == "cosine"


def test_the_round_is_predicted_from_computing_alone_and_one_exchange():
    (stage,) = planned("dual-batch").stages
    each = [
        round_of(0.0005, FIXED, batch, share) + 0.02
        for batch, share in zip(stage.local_batch_sizes, stage.samples_per_round, strict=True)
    ]
    assert stage.predicted_epoch_seconds.value == pytest.approx(max(each))
    assert min(each) == pytest.approx(max(each), rel=0.01)
    alone = planned("dual-batch", dual=DualBatch(small_workers=0)).stages[0]
    ratio = stage.predicted_epoch_seconds.value / alone.predicted_epoch_seconds.value
    assert ratio == pytest.approx(1.05, abs=0.01)
    assert stage.predicted_epoch_seconds.low < stage.predicted_epoch_seconds.value
    assert (stage.sample_seconds, stage.step_seconds) == pytest.approx((0.0005, FIXED))


def with_updates(profile, muon_seconds):
    """The profile for a plan that may take either optimizer."""
    updates = [
        UpdateTime(optimizer=name, seconds=seconds, low=seconds, high=seconds, repeats=9)
        for name, seconds in (("sgd", 0.001), ("muon", 0.001 + muon_seconds))
    ]
    job = profile.job.model_copy(update={"optimizer": "auto"})
    return profile.model_copy(update={"job": job, "updates": tuple(updates)})


def both_optimizers(profile, muon_seconds):
    """The row of `dual-batch` with SGD, and with Muon, whose updates take so much longer."""
    known = with_updates(profile, muon_seconds)
    return [planned("dual-batch", known, optimizer=name).stages[0] for name in ("sgd", "muon")]


def test_a_longer_update_takes_its_time_in_a_round_too():
    sgd, muon = both_optimizers(profile_of(), 0.02)
    assert (sgd.step_seconds, muon.step_seconds) == pytest.approx((FIXED, FIXED + 0.02))


def pair_of(row, longer=1.0):
    """Its two batches beside each other; the small one takes so many times what is expected."""
    large, small = row.local_batch_sizes[0], row.local_batch_sizes[-1]
    seconds = compute_seconds(32, large), longer * compute_seconds(32, small)
    return PairTime(
        resolution=32,
        large_workers=1,
        small_workers=3,
        large_batch=large,
        small_batch=small,
        large_seconds=seconds[0],
        small_seconds=seconds[1],
        ratios=(seconds[1] / seconds[0],) * 5,
        repeats=5,
    )


def test_measured_pairs_take_the_longer_update_too():
    _, bare = both_optimizers(profile_of(), 0.02)
    _, told = both_optimizers(profile_of(pairs=(pair_of(bare),)), 0.02)
    assert told.step_seconds == pytest.approx(bare.step_seconds)
    assert told.local_batch_sizes == bare.local_batch_sizes


def test_large_batches_alone_are_compared_at_one_speed_of_the_machine():
    """Pairs that were measured while it was slower say nothing of them."""
    bare = planned("dual-batch")
    pair = pair_of(bare.stages[0])
    slow = {"large_seconds": 3 * pair.large_seconds, "small_seconds": 3 * pair.small_seconds}
    found = planned("dual-batch", profile_of(pairs=(pair.model_copy(update=slow),)))
    seconds = [one.stages[0].predicted_epoch_seconds.value for one in (bare, found)]
    assert seconds[1] > 2 * seconds[0]
    alone = [reason(one, "small-batch workers").alternatives[0] for one in (bare, found)]
    assert alone[0] == alone[1]


def test_the_large_batch_goes_by_the_longer_update_whether_one_worker_was_measured_or_not():
    alone, others = (both_optimizers(profile_of(counts=counts), 0.08) for counts in ((1, 4), (4,)))
    sizes = [row.local_batch_sizes for row in (*alone, *others)]
    assert sizes[0] == sizes[2]
    assert sizes[1] == sizes[3]
    assert sizes[1][0] > sizes[0][0]


def of_large_gpus(**changes):
    """Four workers whose steps take 8 ms however small, and exchange gradients in half a second."""
    batches = (16, 64, 256, 512, 1024, 2048)
    points = [
        (side, b, max(0.008, 0.0036 + 16e-6 * b * (side / 32) ** 2))
        for side in SIDES
        for b in batches
    ]
    noise = GradientNoise(noise_scale=230.0, trace=230.0, sqr_norm=1, parts=32, repeats=1)
    steps = tuple(
        step_of(4, side, b).model_copy(
            update={
                "compute_seconds": seconds,
                "sync_seconds": 0.5,
                "step_seconds": seconds + 0.5,
                "step_low": 0.99 * (seconds + 0.5),
                "step_high": 1.01 * (seconds + 0.5),
            }
        )
        for side, b, seconds in points
    )
    cluster = make_cluster(workers=4, cores=4, memory_bytes=80 * 1024 * MIB)
    job = {"network_args": {"pretrained": True}}  # so nothing tells accuracy
    return profile_of(steps=steps, cluster=cluster, noise=noise, job=job, **changes)


@pytest.mark.parametrize("method", ["dual-batch", "hybrid"])
def test_the_large_batch_is_that_of_a_worker_alone_and_not_all_that_memory_and_data_hold(method):
    profile = of_large_gpus()
    plan, plain = (
        planned(method, profile, scaling="sqrt"),
        planned("plain", profile, scaling="sqrt"),
    )
    top = plan.stages[-1]
    assert plain.stages[0].local_batch_sizes[0] > 512  # larger ones pay for the exchange
    assert top.local_batch_sizes[0] == 512
    assert plan.learning_rate.peak == pytest.approx(0.1 * 2)
    why = reason(plan, "large batch").why
    assert "By time and gradient noise, for one worker" in why
    assert "the upper end of the gradient noise scale" in why
    if method == "hybrid":  # images of 24 px take 9/16 of the memory
        assert plan.stages[0].local_batch_sizes[0] == pytest.approx(512 * 16 / 9, rel=0.01)
    most = {"dual": DualBatch(large_batches="memory")}
    assert planned(method, profile, **most).stages[-1].local_batch_sizes[0] == 50_000 // 4 // 10
    knee = planned(method, profile, goal=Goal(objective="knee")).stages[-1]
    assert knee.local_batch_sizes[0] > 512
    assert "beyond" not in reason(planned(method), "large batch").why  # no noise is known there


def test_a_worker_of_a_server_has_no_buffers_to_exchange_gradients():
    (stage,) = planned("dual-batch").stages
    profile = profile_of()
    memory = fit_memory(profile.memory, profile.memory_parts)
    alone, together = (memory.predict(32, stage.micro_batch_size, workers=k) for k in (1, 4))
    assert stage.predicted_bytes == alone
    assert alone.value < together.value


def test_what_is_asked_of_groups_and_server_is_kept():
    plan = planned(
        "dual-batch",
        dual=DualBatch(small_workers=1, extra_time=1.1, large_batches=(400,)),
        server=Server(consistency="ssp", staleness=2, update_factor="sqrt", merge="compsac"),
    )
    (stage,) = plan.stages
    assert stage.local_batch_sizes[:3] == (400, 400, 400)
    assert (plan.server.consistency, plan.server.staleness) == ("ssp", 2)
    assert (plan.server.merge, plan.server.extra_time) == ("compsac", 1.1)
    ratio = stage.samples_per_round[3] / stage.samples_per_round[0]
    assert stage.update_factors[3] == pytest.approx(ratio**0.5, rel=1e-3)
    for choice in ("large batch", "small-batch workers", "extra time"):
        assert reason(plan, choice).source == "asked"


@pytest.mark.parametrize("small", [0, 4])
def test_one_group_alone_has_equal_shares_and_factors_of_one(small):
    plan = planned("dual-batch", dual=DualBatch(small_workers=small, extra_time=1.1))
    (stage,) = plan.stages
    assert stage.samples_per_round == (12_500,) * 4
    assert stage.update_factors == (1.0,) * 4
    assert len(set(stage.local_batch_sizes)) == 1
    assert plan.server.extra_time == (1.1 if small else 1.0)


def test_a_global_batch_says_how_large_the_large_batch_is():
    (stage,) = planned("dual-batch", global_batch=1200).stages
    assert stage.local_batch_sizes[0] == 300


def test_the_rate_is_that_of_a_workers_own_step():
    plan = planned("dual-batch", dual=DualBatch(large_batches=(512,)), scaling="linear")
    assert plan.stages[0].learning_rate == pytest.approx(0.1 * 512 / 128)
    why = reason(plan, "learning rate").why
    assert "This is the rate of a worker's own steps with the large batch" in why


def test_a_measured_pair_decides_the_small_batch_and_says_so():
    profile = profile_of()
    first = planned("dual-batch", profile).stages[0]
    pairs = (pair_of(first, longer=1.05),)
    again = planned("dual-batch", profile.model_copy(update={"pairs": pairs}))
    assert again.stages[0].local_batch_sizes[-1] > first.local_batch_sizes[-1]
    assert reason(again, "small batch").source == "measured"
    assert "side by side" in reason(again, "small batch").why


def test_a_deadline_decides_the_extra_time():
    alone = planned("dual-batch", dual=DualBatch(small_workers=0))
    high = 30 * alone.stages[0].predicted_epoch_seconds.high
    found = [planned("dual-batch", goal=Goal(deadline=high * k)) for k in (1.08, 1.16, 2.0)]
    extra = [plan.server.extra_time for plan in found]
    assert extra[0] == pytest.approx(1.08, abs=0.01)
    assert extra[1] == pytest.approx(1.16, abs=0.01)
    assert extra[2] == 1.2
    for plan, k in zip(found, (1.08, 1.16, 2.0), strict=True):
        assert 30 * plan.stages[0].predicted_epoch_seconds.high <= high * k
        assert "goal.deadline" in reason(plan, "extra time").why
    smaller = [plan.stages[0].local_batch_sizes[-1] for plan in found]
    assert smaller == sorted(smaller, reverse=True)


def test_a_deadline_leaves_time_for_lost_work_too():
    rate = {"preemptions_per_hour": 30.0, "checkpoint_cost": 1, "restart_seconds": 0}
    alone = planned("dual-batch", dual=DualBatch(small_workers=0))
    high = 30 * alone.stages[0].predicted_epoch_seconds.high
    losses = losses_of(Job(goal=Goal(**rate)), make_network(), 4 * 30.0)
    assert losses.seconds(1.1 * high) > 1.2 * high
    plan = planned("dual-batch", goal=Goal(deadline=losses.seconds(1.1 * high), **rate))
    assert plan.server.extra_time == pytest.approx(1.1, abs=0.01)


def test_a_deadline_that_leaves_little_time_has_fewer_workers_with_a_small_batch():
    alone = planned("dual-batch", dual=DualBatch(small_workers=0))
    high = 30 * alone.stages[0].predicted_epoch_seconds.high
    little, much = (planned("dual-batch", goal=Goal(deadline=high * k)) for k in (1.03, 1.1))
    assert little.server.small_workers < much.server.small_workers == 3
    for plan in (little, much):
        large, *_, small = plan.stages[0].local_batch_sizes
        assert small <= large / 2
    assert "half" in reason(little, "small-batch workers").why
    asked = planned("dual-batch", goal=Goal(deadline=high * 1.03), dual=DualBatch(small_workers=3))
    assert asked.server.small_workers == 3


def test_a_deadline_that_the_asked_extra_time_misses_is_refused():
    alone = planned("dual-batch", dual=DualBatch(small_workers=0)).stages[0]
    goal = Goal(deadline=30 * alone.predicted_epoch_seconds.high * 1.05)
    with pytest.raises(PlanError, match=r"may take .* goal.deadline=.*leave dual.extra_time"):
        planned("dual-batch", goal=goal, dual=DualBatch(extra_time=1.2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dual": DualBatch(small_workers=5)}, "dual.small_workers=5 of workers=4: give at most 4"),
        (
            {"dual": DualBatch(small_workers=1, extra_time=1.4)},
            r"extra_time=1.4 leaves no samples.* less than 1\.333",
        ),
        ({"dual": DualBatch(large_batches=(1, 2, 3))}, "dual.large_batches=1,2,3: 3 values for 1"),
        ({"dual": DualBatch(large_batches=(20_000,))}, "large local batch, 20000, is more than"),
        ({"dual": DualBatch(small_workers=1, extra_time=1.33)}, "give at most 1"),
    ],
)
def test_groups_that_cannot_be_are_refused_in_one_line(changes, named):
    with pytest.raises(BatchwrightError, match=named) as caught:
        planned("dual-batch", **changes)
    assert "\n" not in str(caught.value)


def test_steps_in_which_no_fixed_time_was_found_are_taken_to_have_a_little():
    """As a busy machine measures them; a refusal would end a run after its probe."""
    steps = tuple(
        step_of(4, side, b).model_copy(
            update={"compute_seconds": 0.001 * b, "step_seconds": 0.001 * b, "sync_seconds": 0.0}
        )
        for side in SIDES
        for b in (16, 64, 256)
    )
    plan = planned("dual-batch", profile_of(steps=steps))
    large, small = plan.stages[0].local_batch_sizes[0], plan.stages[0].local_batch_sizes[-1]
    assert 2 <= small < large
    assert "too small to be told from none, so 1 % of a step" in reason(plan, "small batch").why
    assert "told from none" not in reason(planned("dual-batch"), "small batch").why


def test_a_candidate_with_as_many_samples_in_a_step_is_not_what_a_server_s_workers_train():
    keys = {"large_batches": (64,), "small_workers": 0}
    plan = planned("dual-batch", dual=DualBatch(**keys))
    same = next(one for one in plan.considered if one.global_batch_size == 4 * 64)
    assert plan.stages[0].global_batch_size == same.global_batch_size
    assert plan.chosen is None
    assert not is_chosen(plan, same)


def test_a_round_of_few_steps_is_said_to_have_no_exact_time():
    small = CIFAR100.model_copy(update={"train_samples": 3000})
    few = planned("dual-batch", profile_of(data=small))
    assert "be off by as much as" in reason(few, "extra time").why
    assert "be off by" not in reason(planned("dual-batch"), "extra time").why


def test_two_groups_take_two_workers_or_more_where_the_plan_may_choose():
    profile = profile_of(workers="auto", counts=(1, 2))
    assert planned("dual-batch", profile).workers == 2
    alone = planned("dual-batch", profile_of(workers=1))
    assert (alone.workers, alone.server.small_workers) == (1, 0)
    assert "no two groups" in reason(alone, "small-batch workers").why
    # It was refused, with advice to leave one of workers=auto and global_batch=auto to the plan.
    assert planned("dual-batch", profile, launch="in-process").workers == 1


def test_the_plan_says_what_is_known_of_small_batches_and_shows_the_control():
    why = reason(planned("dual-batch"), "small-batch workers")
    assert "control" in why.why
    assert "2509.26092" in why.reference
    assert [one.value for one in why.alternatives] == ["0 of 4", "1 of 4", "2 of 4", "4 of 4"]
    assert "uniform control" in why.alternatives[-1].loss
    assert "large batches alone" in why.alternatives[0].loss


# -------------------------------------------------------------------------------------- cyclic


def test_cyclic_goes_through_the_resolutions_in_each_stage():
    plan = planned("cyclic", epochs=28, global_batch=512)
    rows = [(s.epochs, s.resolution, s.rate_stage, s.global_batch_size) for s in plan.stages]
    assert rows == [
        (8, 24, 0, 512),
        (8, 32, 0, 512),
        (4, 24, 1, 512),
        (4, 32, 1, 512),
        (2, 24, 2, 512),
        (2, 32, 2, 512),
    ]
    peak = plan.learning_rate.peak
    assert [s.learning_rate for s in plan.stages] == pytest.approx(
        [peak, peak, peak / 10, peak / 10, peak / 100, peak / 100]
    )
    assert plan.learning_rate.decay == "none"
    assert (plan.server, plan.merge) == (None, "sample-weighted all-reduce")
    assert all(not s.samples_per_round for s in plan.stages)
    assert plan.epochs == 28


def test_each_resolution_is_predicted_as_plain_training_at_it_is():
    plan = planned("cyclic", global_batch=512)
    for stage in plan.stages[:2]:
        alone = planned("plain", global_batch=512, resolutions=(stage.resolution,)).stages[0]
        assert stage.predicted_epoch_seconds == alone.predicted_epoch_seconds
        assert stage.predicted_bytes == alone.predicted_bytes
    total = sum(s.epochs * s.predicted_epoch_seconds.value for s in plan.stages)
    assert f"{total + 30 * 25 * 1e-4:.3g} s" in reason(plan, "training time").value


def test_batches_dropouts_and_strengths_are_given_for_each_resolution():
    cycle = Cycle(batches=(1024, 512), dropouts=(0.1, 0.2), strengths=(0.5,))
    plan = planned("cyclic", cycle=cycle)
    rows = [
        (s.global_batch_size, s.dropout, s.augmentation_strength, s.resolution)
        for s in plan.stages[:2]
    ]
    assert rows == [(1024, 0.1, 0.5, 24), (512, 0.2, 0.5, 32)]
    assert plan.stages[1].learning_rate == plan.stages[0].learning_rate
    assert plan.learning_rate.peak == pytest.approx(0.1 * 2)  # of the batch at the highest


def test_a_deadline_that_only_the_cycle_keeps_is_kept():
    plain = planned("plain", global_batch=512).stages[0].predicted_epoch_seconds
    goal = Goal(deadline=0.9 * 30 * plain.high)
    with pytest.raises(PlanError, match=r"goal\.deadline"):
        planned("plain", global_batch=512, goal=goal)
    assert len(planned("cyclic", global_batch=512, goal=goal).stages) == 6
    with pytest.raises(PlanError, match=r"method=cyclic may take .*give epochs=10 or less"):
        planned("cyclic", global_batch=512, goal=Goal(deadline=0.3 * 30 * plain.high))


def test_a_cost_that_only_the_cycle_keeps_is_kept():
    usual = Goal(price=1.0)
    plain, cyclic = (
        planned(method, global_batch=512, goal=usual) for method in ("plain", "cyclic")
    )
    paid = sum(one.epochs * one.predicted_epoch_seconds.high for one in cyclic.stages)
    goal = usual.model_copy(update={"max_cost": 1.05 * plain.workers * paid / 3600})
    with pytest.raises(PlanError, match=r"goal\.max_cost"):
        planned("plain", global_batch=512, goal=goal)
    assert planned("cyclic", global_batch=512, goal=goal).stages == cyclic.stages


@pytest.mark.parametrize("limit", ["deadline", "max_cost"])
def test_limits_that_only_workers_of_a_server_keep_are_kept(limit):
    """Over a slow link they exchange once a round, and those of `plain` in each step."""
    slow, usual = Link(bandwidth=1e6), Goal(price=1.0)
    dual = virtual("dual-batch", link=slow, goal=usual)
    most = 1.3 * 30 * dual.stages[0].predicted_epoch_seconds.high
    given = {"deadline": most, "max_cost": 8 * most / 3600}[limit]
    goal = usual.model_copy(update={limit: given})
    with pytest.raises(PlanError, match=rf"goal\.{limit}"):
        virtual("plain", link=slow, goal=goal)
    assert virtual("dual-batch", link=slow, goal=goal).workers == 8


def test_of_two_limits_only_what_no_candidate_keeps_is_left_out(monkeypatch):
    seen = []

    def refuse(job, rows, *_):
        seen.append({miss.limit for row in rows for miss in row.misses})
        raise PlanError("none")

    candidates = planned("plain", goal=Goal(price=1.0)).considered
    middle = median(one.train_seconds.high for one in candidates)
    monkeypatch.setattr("batchwright.planning.assembly.found.choose", refuse)
    for deadline, max_cost in product((1e-3, middle), (1e-6, 4 * middle / 3600)):
        with pytest.raises(PlanError, match="none"):
            planned("dual-batch", goal=Goal(price=1.0, deadline=deadline, max_cost=max_cost))
    both = {"goal.deadline", "goal.max_cost"}
    assert [limits & both for limits in seen] == [
        set(),
        {"goal.max_cost"},
        {"goal.deadline"},
        both,
    ]


@pytest.mark.parametrize("method", ["dual-batch", "hybrid"])
@pytest.mark.parametrize("seconds", [6.5, 7.0, 7.5])
def test_a_deadline_that_evaluation_alone_takes_is_refused(monkeypatch, method, seconds):
    monkeypatch.setattr(Table, "other_seconds", lambda *_: seconds)
    with pytest.raises(PlanError, match=r"goal\.deadline"):
        planned(method, epochs=1, goal=Goal(deadline=7.0))


@pytest.mark.parametrize(
    "method",
    ["hybrid", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cyclic", "dual-batch"))],
)
def test_of_more_than_a_limit_is_advised_only_what_keeps_it(method):
    """The shortest training is one epoch; the plan's own extra time is not to be left to it."""
    with pytest.raises(PlanError, match=r": raise goal\.deadline$"):
        planned(method, epochs=1, goal=Goal(deadline=0.01))
    one = planned(method, epochs=1)
    most = 2 * one.stages[0].predicted_epoch_seconds.high
    for cycle in (Cycle(), Cycle(stage_epochs=(20, 10))):
        with pytest.raises(PlanError, match=r": raise goal\.deadline, or give") as refused:
            planned(method, epochs=30, cycle=cycle, goal=Goal(deadline=most))
        needed = method != "dual-batch" and cycle.stage_epochs != "auto"
        assert ("and cycle.stage_epochs=auto" in str(refused.value)) == needed
    assert planned(method, epochs=1, goal=Goal(deadline=most)).epochs == 1


@pytest.mark.parametrize(
    "method",
    ["hybrid", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cyclic", "dual-batch"))],
)
def test_the_most_epochs_that_keep_a_limit_are_advised(method):
    total = reason(planned(method, epochs=12), "training time").value  # 1 s (0.9 to 1.1)
    high = float(total.partition(" to ")[2].partition(")")[0].split()[0])
    goal = Goal(deadline=1.01 * high)
    assert planned(method, epochs=12, goal=goal).epochs == 12
    with pytest.raises(PlanError, match=r"give epochs=\d+ or less$") as refused:
        planned(method, epochs=30, goal=goal)
    most = int(re.findall(r"\d+", str(refused.value))[-1])
    assert most in (12, 13)
    assert planned(method, epochs=most, goal=goal)
    with pytest.raises(PlanError, match=r"goal\.deadline"):
        planned(method, epochs=most + 1, goal=goal)


@pytest.mark.parametrize("method", ["cyclic", "dual-batch", "hybrid"])
@pytest.mark.parametrize("often", [None, 5.0])
def test_the_line_of_a_plan_tells_what_its_reason_tells_of_the_whole_training(
    method, often, capsys
):
    plan = planned(method, epochs=2, goal=Goal(preemptions_per_hour=often))
    print_plan(plan, explain=False)
    seconds = reason(plan, "training time").value.partition(" s (")[0]
    assert f" s per epoch, {seconds} s in all" in capsys.readouterr().err


def test_a_single_epoch_is_one_in_words_too():
    plan = planned("cyclic", epochs=1, warmup_epochs=1)
    assert reason(plan, "stages").value == "1 epoch at 1 times the rate"
    assert reason(plan, "training time").why.startswith("1 epoch, and the evaluations")
    assert reason(plan, "warm-up").value == "1 epoch"


def test_the_preset_sets_epochs_rates_and_batches():
    plan = planned("cyclic", cycle=Cycle(preset="cifar100"))
    assert (plan.epochs, plan.job.epochs) == (140, 140)
    assert [s.learning_rate for s in plan.stages[::2]] == pytest.approx([0.2, 0.02, 0.002])
    assert [s.global_batch_size for s in plan.stages[:2]] == [600, 560]
    assert plan.learning_rate.warmup_epochs == 0
    hybrid = planned("hybrid", cycle=Cycle(preset="cifar100"))
    assert [s.local_batch_sizes[0] for s in hybrid.stages[:2]] == [600, 560]
    assert [s.dropout for s in hybrid.stages[:2]] == [0.1, 0.2]
    assert "may not suit" not in reason(plan, "preset").why
    measured = "augment=crop-flip, rotation=0.0, zoom=0.0, nesterov=true"  # without the preset
    assert measured in reason(plan, "preset").why
    assert "probe with cycle.preset=cifar100" in reason(plan, "preset").why


def test_a_cost_that_only_plain_training_keeps_is_refused():
    goal = {"price": 3600.0}
    seconds = planned("dual-batch").stages[0].predicted_epoch_seconds.high * 30
    kept = planned("dual-batch", goal=Goal(max_cost=seconds * 4 * 1.1, **goal))
    assert kept.server is not None
    dual = DualBatch(extra_time=1.2)
    with pytest.raises(PlanError, match=r"dual-batch may cost .* goal\.max_cost="):
        planned("dual-batch", dual=dual, goal=Goal(max_cost=seconds * 4 * 1.05, **goal))


def test_what_is_asked_goes_before_the_preset():
    plan = planned(
        "hybrid",
        cycle=Cycle(preset="cifar100"),
        epochs=14,
        learning_rate=0.05,
        scaling="none",
        dual=DualBatch(large_batches=(320,)),
    )
    assert [s.epochs for s in plan.stages] == [4, 4, 2, 2, 1, 1]
    assert plan.stages[0].learning_rate == 0.05
    assert {s.local_batch_sizes[0] for s in plan.stages} == {320}


def test_a_preset_on_other_data_warns_and_takes_batches_that_fit(capsys):
    small = CIFAR100.model_copy(update={"train_samples": 3000, "classes": ("a", "b")})
    profile = profile_of(data=small)
    plan = plan_verb(profile, method="hybrid", cycle={"preset": "cifar100"})
    assert "warning: cycle.preset=cifar100 was made for 100 classes" in capsys.readouterr().err
    assert "may not suit" in reason(plan, "preset").why
    assert max(s.local_batch_sizes[0] for s in plan.stages) <= 75  # ten steps of 750 samples


def test_the_same_resolution_throughout_needs_no_other():
    plan = planned("cyclic", cycle=Cycle(order="fixed"))
    assert {s.resolution for s in plan.stages} == {32}
    assert len(plan.stages) == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cycle": Cycle(stage_epochs=(20, 20))}, "add up to 40, not to epochs=30"),
        ({"cycle": Cycle(batches=(512, 256, 128))}, "cycle.batches=.*3 values for 2"),
        ({"cycle": Cycle(batches=(512, 256)), "global_batch": 128}, "says 256 at 32 px"),
        ({"cycle": Cycle(batches=(60_000, 256))}, "cycle.batches has 60000 at 24 px"),
        ({"resolutions": (32,)}, "one resolution, 32 px"),
        ({"resolutions": (2, 32)}, "at least 4 px, not 2"),
    ],
)
def test_cycles_that_cannot_be_are_refused(changes, named):
    with pytest.raises(BatchwrightError, match=named):
        planned("cyclic", **changes)


# -------------------------------------------------------------------------------------- hybrid


def test_hybrid_has_two_groups_at_each_resolution():
    plan = planned("hybrid", epochs=14)
    assert [s.resolution for s in plan.stages] == [24, 32] * 3
    for stage in plan.stages:
        assert sum(stage.samples_per_round) == 50_000
        assert stage.samples_per_round == plan.stages[0].samples_per_round
        each = [
            round_of(0.0005 * (stage.resolution / 32) ** 2, FIXED, batch, share) + 0.02
            for batch, share in zip(stage.local_batch_sizes, stage.samples_per_round, strict=True)
        ]
        assert stage.predicted_epoch_seconds.value == pytest.approx(max(each), rel=1e-6)
    low, high = plan.stages[:2]
    # 24 px take 9/16 of the memory, so 16/9 of the batch fits.
    ratio = low.local_batch_sizes[0] / high.local_batch_sizes[0]
    assert ratio == pytest.approx(16 / 9, rel=0.03)
    assert low.local_batch_sizes[-1] > high.local_batch_sizes[-1]
    assert (plan.merge, plan.learning_rate.decay) == ("parameter server", "none")


def test_more_workers_than_can_be_gone_through_are_refused_with_a_server():
    stated = {"launch": "virtual", "virtual": {"sample_seconds": 0.0005, "step_seconds": 0.015}}
    job = Job(workers=10**6, method="dual-batch", dual={"large_batches": (4,)}, **stated)
    with pytest.raises(PlanError, match=r"^workers=1000000: .*dual-batch .* give 20000 or less$"):
        plan_without_profile(job, make_data(train_samples=10**8), make_network())


def test_larger_batches_at_low_resolutions_leave_the_least_steps_of_a_round():
    data = CIFAR100.model_copy(update={"train_samples": 8000})
    plan = planned("hybrid", profile_of(data=data))
    assert all(s.local_batch_sizes[0] <= 2000 // 10 for s in plan.stages)


def test_a_plan_of_rows_explains_itself_and_comes_back_from_json():
    plan = planned("hybrid", cycle=Cycle(preset="cifar100"))
    text = plan.explain()
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("stage"))
    for column in ("epochs", "side", "rate", "dropout", "strength", "workers x local batch"):
        assert column in head
    for column in ("samples per round", "factor", "s / epoch"):
        assert column in head
    rows = lines[lines.index(head) + 1 :][:6]
    assert all("600 + 3 x " in row for row in rows[::2])
    assert all("560 + 3 x " in row for row in rows[1::2])
    assert [row.split()[3].rstrip(")") for row in rows] == ["40", "80", "100", "120", "130", "140"]
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert planned("hybrid", cycle=Cycle(preset="cifar100")) == plan


def test_planning_the_job_of_a_plan_again_gives_the_same_plan():
    profile = profile_of()
    for method in ("dual-batch", "cyclic", "hybrid"):
        plan = planned(method, profile, cycle=Cycle(preset="cifar100"))
        assert make_plan(profile, plan.job).stages == plan.stages


# ----------------------------------------------------------------------------- virtual cluster


def virtual(method, profile=None, **changes):
    profile = profile or profile_of(workers=1, counts=(1,))
    return planned(method, profile, launch="virtual", **{"workers": 8, **changes})


@pytest.mark.parametrize("method", ["cyclic", "dual-batch", "hybrid"])
def test_the_interval_between_checkpoints_is_the_plans_own_unless_it_was_asked_for(method):
    goal = Goal(preemptions_per_hour=2, checkpoint_cost=5)
    plan = planned(method, goal=goal)
    chosen = reason(plan, "checkpoint interval")
    assert (chosen.source, chosen.why[:10]) == ("published", "Daly's for")
    seconds = plan.job.checkpoint_seconds
    asked = planned(method, goal=goal, checkpoint_seconds=seconds)
    assert asked.stages == plan.stages
    assert reason(asked, "checkpoint interval").source == "asked"


def test_of_many_workers_not_every_number_of_small_batches_is_laid_out(monkeypatch):
    """Each is laid out worker by worker, which for all numbers took hours."""
    many = profile_of(
        workers=1, counts=(1,), data=CIFAR100.model_copy(update={"train_samples": 1_000_000})
    )
    keys = {"workers": 60, "virtual": Virtual(overheads=(1, 0.1) * 30)}
    counts, usual, best = [], two_groups.served, virtual("dual-batch", many, **keys)
    monkeypatch.setattr(two_groups, "_MOST_COUNTS", 5)
    monkeypatch.setattr(
        two_groups,
        "served",
        lambda *given, **keys: counts.append(keys["small_workers"].value) or usual(*given, **keys),
    )
    plan = virtual("dual-batch", many, **keys)
    assert counts[:5] == [1, 3, 8, 22, 60]
    assert plan.server.small_workers in counts[5:]
    assert plan.stages == best.stages
    told = "Of 60 numbers 5 were compared, and those around the best."
    assert told in reason(plan, "small-batch workers").why


def test_of_many_workers_as_many_get_a_small_batch_as_a_deadline_allows(monkeypatch):
    profile = profile_of(workers=40)
    alone = planned("dual-batch", profile, dual=DualBatch(small_workers=0))
    goal = Goal(deadline=1.03 * 30 * alone.stages[0].predicted_epoch_seconds.high)
    most = planned("dual-batch", profile, goal=goal)
    monkeypatch.setattr(two_groups, "_MOST_COUNTS", 6)
    assert most.server.small_workers not in range(29, 0, -5)  # those that are looked at first
    assert planned("dual-batch", profile, goal=goal).stages == most.stages


def test_speeds_and_overheads_of_unequal_numbers_of_workers_are_refused():
    stated = Virtual(speeds=(1.0, 1.0), overheads=(1.0, 1.0, 2.0, 2.0))
    with pytest.raises(JobError, match=r"virtual\.speeds has 2 values, virtual\.overheads 4"):
        virtual("plain", workers="auto", goal=Goal(max_workers=4), virtual=stated)


@pytest.mark.parametrize("method", ["plain", "dynamic-batch", "dual-batch", "cyclic", "hybrid"])
def test_any_number_of_workers_can_be_simulated_from_one_that_was_measured(method):
    plan = virtual(method)
    assert plan.workers == 8
    assert (plan.job.link.latency, plan.job.link.bandwidth) == (5e-4, 125e6)
    assert reason(plan, "link").source == "assumed"
    top = plan.stages[-1]
    assert (top.sample_seconds, top.step_seconds) == pytest.approx((0.0005, FIXED))
    if plan.stages[0].resolution == 24:
        assert plan.stages[0].sample_seconds == pytest.approx(0.0005 * 9 / 16)


def test_virtual_workers_take_the_time_of_the_fewest_that_were_measured():
    slower = tuple(
        step_of(2, side, b).model_copy(update={"compute_seconds": 1.0, "step_seconds": 1.003})
        for side in SIDES
        for b in (16, 64, 256)
    )
    steps = (*(step_of(1, s, b) for s in SIDES for b in (16, 64, 256)), *slower)
    plan = virtual("dual-batch", profile_of(workers=2, counts=(1, 2), steps=steps))
    assert plan.stages[0].sample_seconds == pytest.approx(0.0005)


def test_stated_times_were_disturbed_by_nobody():
    disturbed = {"disturbed": True, "beside_seconds": 0.9}
    steps = tuple(step_of(1, 32, batch).model_copy(update=disturbed) for batch in (16, 64))
    profile, job = profile_of(steps=steps), Job(launch="virtual", workers=2, resolutions=(32,))
    stated = job.model_copy(update={"virtual": Virtual(step_seconds=0.01)})
    for one in simulated(profile, stated, slowest=False).steps:
        assert (one.disturbed, one.beside_seconds) == (False, None)
    for one in simulated(profile, job, slowest=False).steps:
        assert (one.disturbed, one.beside_seconds) == (True, pytest.approx(0.9, rel=0.1))


def test_stated_times_take_the_place_of_measured_ones():
    stated = Virtual(sample_seconds=0.00056607, step_seconds=0.014041204)
    plan = virtual(
        "dual-batch",
        workers=4,
        virtual=stated,
        dual=DualBatch(large_batches=(500,), small_workers=3),
    )
    # Table 2 of the paper, rounded instead of cut off.
    assert plan.stages[0].local_batch_sizes == (500, 205, 205, 205)
    assert plan.stages[0].samples_per_round == (13_125, 12_292, 12_292, 12_291)
    low = virtual("hybrid", virtual=stated).stages[0]
    assert low.sample_seconds == pytest.approx(0.00056607 * 9 / 16)  # as measured
    assert low.step_seconds == pytest.approx(0.014041204)


@pytest.mark.parametrize(
    ("small", "batches"), [(1, (130, 102)), (2, (230, 185)), (3, (294, 243)), (4, (340, 286))]
)
def test_the_preset_with_a_line_for_each_resolution_has_the_papers_small_batches(small, batches):
    # Table 6 of the paper, CIFAR-100 at 24 and 32 px, with its authors' lines.
    stated = Virtual(
        sample_seconds=(0.000352682, 0.000505636), step_seconds=(0.014788833, 0.015562114)
    )
    plan = virtual(
        "hybrid",
        workers=4,
        virtual=stated,
        cycle=Cycle(preset="cifar100"),
        dual=DualBatch(small_workers=small, extra_time=1.05, large_batches=(600, 560)),
    )
    low, high = plan.stages[:2]
    assert (low.resolution, high.resolution) == (24, 32)
    assert (low.local_batch_sizes[-1], high.local_batch_sizes[-1]) == batches
    times = step_times(plan)
    assert [(one.sample_seconds, one.step_seconds) for one in times[:2]] == [
        pytest.approx((0.000352682, 0.014788833), rel=1e-6),
        pytest.approx((0.000505636, 0.015562114), rel=1e-6),
    ]


@pytest.mark.parametrize(
    ("small", "batches"),
    [(1, (156, 112, 67)), (2, (322, 222, 135)), (3, (464, 310, 190)), (4, (587, 383, 236))],
)
def test_the_lines_of_imagenet_give_the_papers_small_batches_and_a_third_less_time(small, batches):
    # Table 6 of the paper, with its authors' lines: 34.8 % less were measured with one of four
    # workers small, 36.0 % with none.
    stated = Virtual(
        sample_seconds=(0.000301354, 0.000568377, 0.000938717),
        step_seconds=(0.01203677, 0.01705089, 0.016659968),
    )
    data = make_data(
        name="imagefolder",
        train_samples=1_281_167,
        classes=tuple(f"c{n}" for n in range(1000)),
        side=288,
    )

    def seconds(small_workers, **changes):
        job = Job(
            method="hybrid",
            launch="virtual",
            workers=4,
            virtual=stated,
            cycle=Cycle(preset="imagenet"),
            dual=DualBatch(small_workers=small_workers, extra_time=1.05),
        ).model_copy(update=changes)
        plan = plan_without_profile(job, data, make_network())
        assert plan.epochs == 105
        total = sum(one.epochs * one.predicted_epoch_seconds.value for one in plan.stages)
        return total, plan

    hybrid, plan = seconds(small)
    assert [one.resolution for one in plan.stages[:3]] == [160, 224, 288]
    assert tuple(one.local_batch_sizes[-1] for one in plan.stages[:3]) == batches
    cycle, plan = seconds(0)
    assert plan.stages[0].local_batch_sizes == (2330,) * 4
    large = 3 * sum(
        one.epochs * one.predicted_epoch_seconds.value
        for one in plan.stages
        if one.resolution == 288
    )
    assert 1 - hybrid / large == pytest.approx(0.326, abs=0.003)
    assert 1 - cycle / large == pytest.approx(0.358, abs=0.003)


@pytest.mark.parametrize(
    ("small", "extra", "batch", "share"),
    [
        *((1, 1.05, 83, 10_625), (2, 1.05, 154, 11_875)),
        *((3, 1.05, 205, 12_291), (4, 1.05, 242, 12_500)),
        *((1, 1.1, 38, 8750), (2, 1.1, 87, 11_250), (3, 1.1, 127, 12_083), (4, 1.1, 160, 12_500)),
    ],
)
def test_truncated_as_in_table_2_of_the_paper(small, extra, batch, share):
    plan = virtual(
        "dual-batch",
        workers=4,
        virtual=Virtual(sample_seconds=0.00056607, step_seconds=0.014041204),
        dual=DualBatch(
            large_batches=(500,), small_workers=small, extra_time=extra, rounding="truncate"
        ),
    )
    (stage,) = plan.stages
    assert stage.local_batch_sizes[-1] == batch
    assert share <= stage.samples_per_round[-small] <= share + 1  # what is left goes one each
    assert sum(stage.samples_per_round) == plan.data.train_samples
    reason = next(one for one in plan.reasons if one.choice == "samples per round")
    assert "cut to whole numbers" in reason.why


def test_the_words_of_the_equations_plan_the_papers_first_experiment():
    page = (Path(__file__).parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    told = re.search(r"`(method=hybrid cycle\.order=fixed [^`]+)`", page)
    assert told
    words = told[1].split()
    three = {"dual.small_workers": 3, "dual.extra_time": 1.1, "warmup_epochs": 0}
    large, small = (
        plan_without_profile(change_job(load_job(None, words), keys), CIFAR100, make_network())
        for keys in ({}, three)
    )
    rates = [(80, pytest.approx(0.1)), (40, pytest.approx(0.02)), (20, pytest.approx(0.004))]
    for plan in (large, small):
        assert [(one.epochs, one.learning_rate) for one in plan.stages] == rates
    assert large.stages[0].local_batch_sizes == (500,) * 4
    assert small.stages[0].local_batch_sizes == (500, 127, 127, 127)  # table 2
    begin, *_ = rate_schedule(large).points
    assert begin.learning_rate == pytest.approx(0.02)
    (end,) = (one for one in rate_schedule(large).points if one.epoch == 5)
    assert end.learning_rate == pytest.approx(0.1)
    assert rate_schedule(small).points[0].learning_rate == pytest.approx(0.1)


def test_large_batches_may_be_the_largest_that_fit_as_published():
    knee, most = (
        planned("dual-batch", dual=DualBatch(large_batches=one, small_workers=1))
        for one in ("knee", "memory")
    )
    first, largest = (plan.stages[0].local_batch_sizes[0] for plan in (knee, most))
    assert largest > first
    told = {one.choice: one for plan in (knee, most) for one in plan.reasons}
    assert "largest that fits the memory, as published" in told["large batch"].why
    told = {one.choice: one for one in knee.reasons}
    assert "dual.large_batches=memory" in told["large batch"].why


def test_large_batches_by_memory_need_a_measured_memory():
    job = Job(
        method="dual-batch",
        launch="virtual",
        workers=2,
        resolutions=(32,),
        virtual={"sample_seconds": 0.001, "step_seconds": 0.01},
        dual={"large_batches": "memory"},
    )
    with pytest.raises(PlanError, match=r"large_batches=memory: no memory was measured") as refused:
        plan_without_profile(job, make_data(train_samples=50_000, side=32), make_network())
    assert "\n" not in str(refused.value)
    assert "or dual.large_batches=knee, which goes by time" in str(refused.value)
    knee = job.model_copy(update={"dual": DualBatch(large_batches="knee")})  # as the line says
    plan_without_profile(knee, make_data(train_samples=50_000, side=32), make_network())


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("virtual.sample_seconds=0.0005", 0.0005),
        ("virtual.sample_seconds=0.0004,0.0005", (0.0004, 0.0005)),
        ("virtual.step_seconds=0", 0.0),
        ("dual.large_batches=memory", "memory"),
        ("dual.large_batches=knee", "knee"),
        ("dual.large_batches=512", (512,)),
    ],
)
def test_one_value_several_or_a_word(word, value):
    group, _, key = word.partition("=")[0].partition(".")
    assert getattr(getattr(load_job(None, [word]), group), key) == value


def test_as_many_stated_times_as_resolutions_are_wanted():
    stated = Virtual(sample_seconds=(0.001, 0.002, 0.003), step_seconds=0.01)
    with pytest.raises(
        BatchwrightError, match=r"virtual.sample_seconds=0.001,0.002,0.003: 3 values for"
    ):
        virtual("hybrid", virtual=stated)


def test_a_stated_step_without_a_fixed_time_has_no_small_batch():
    stated = Virtual(sample_seconds=0.001, step_seconds=0.0)
    with pytest.raises(PlanError, match="a step has no fixed time"):
        virtual("dual-batch", workers=4, virtual=stated, dual=DualBatch(small_workers=3))


def test_a_step_as_long_whatever_its_batch_stays_so_in_the_simulation():
    flat = {"compute_seconds": 0.03, "sync_seconds": 0.0, "step_seconds": 0.03}
    steps = tuple(
        step_of(1, side, b).model_copy(update=flat) for side in SIDES for b in (16, 64, 256)
    )
    measured = profile_of(workers=1, counts=(1,), steps=steps)
    dual = DualBatch(small_workers=2, extra_time=1.3)
    for method in ("dual-batch", "plain"):
        plan = virtual(method, measured, workers=3, dual=dual)
        (times,) = step_times(plan)
        assert (times.work(1), times.work(256)) == pytest.approx((0.03, 0.03), rel=1e-6)


def test_unequal_virtual_workers_share_by_speed_and_hold_up_all_reduces():
    speeds = Virtual(speeds=(1, 1, 0.5, 0.5))
    plan = virtual("dual-batch", workers=4, virtual=speeds, dual=DualBatch(small_workers=2))
    large, _, small, _ = plan.stages[0].samples_per_round
    assert small < 0.55 * large
    assert "follows its speed" in reason(plan, "samples per round").why
    even = virtual("plain", workers=4, global_batch=512).stages[0]
    uneven = virtual("plain", workers=4, global_batch=512, virtual=speeds).stages[0]
    whole = even.predicted_epoch_seconds.value
    exchange = 98 * (2 * 3 * (5e-4 + 301_160 / 4 / 125e6))
    assert uneven.predicted_epoch_seconds.value == pytest.approx(2 * whole - exchange, rel=0.01)
    assert uneven.sample_seconds == pytest.approx(even.sample_seconds)


def test_virtual_workers_may_differ_in_the_fixed_time_of_a_step():
    steps = tuple(step_of(1, side, b) for side in SIDES for b in (16, 64, 256))
    measured = profile_of(workers=1, counts=(1,), steps=steps)
    apart = Virtual(speeds=(1, 1, 1, 0.8), overheads=(1, 2, 1, 3))
    exchange = 2 * 3 * (5e-4 + 301_160 / 4 / 125e6)
    for batch in (32, 256):
        stages = [
            virtual("plain", measured, workers=4, global_batch=4 * batch, **changes).stages[0]
            for changes in ({"virtual": apart}, {})
        ]
        seconds = [stage.predicted_epoch_seconds.value for stage in stages]
        slowest = (0.0005 * batch + 3 * FIXED) / 0.8 + exchange
        usual = 0.0005 * batch + FIXED + exchange
        assert seconds[0] / seconds[1] == pytest.approx(slowest / usual, rel=0.01)
        for stage in stages:
            row = stage.sample_seconds, stage.step_seconds
            assert row == pytest.approx((0.0005, FIXED), rel=0.01)


def test_an_all_reduce_of_virtual_workers_goes_at_the_pace_of_the_slowest_link():
    even, uneven = (
        virtual("plain", workers=4, global_batch=512, **changes).stages[0].predicted_epoch_seconds
        for changes in ({}, {"virtual": Virtual(links=(1, 1, 1, 0.1))})
    )
    longer = 98 * 2 * 3 * (301_160 / 4 / 12.5e6 - 301_160 / 4 / 125e6)
    assert uneven.value - even.value == pytest.approx(longer, rel=0.01)


def test_the_number_of_small_batches_is_that_of_the_most_updates_where_overheads_differ():
    stated = {"sample_seconds": 0.00056607, "step_seconds": 0.014041204}
    given = {"workers": 4, "dual": DualBatch(large_batches=(500,))}
    apart = Virtual(**stated, overheads=(1, 1, 0.1, 0.1))
    plan = virtual("dual-batch", virtual=apart, **given)
    assert plan.server.small_workers == 2
    assert plan.stages[0].local_batch_sizes == (500, 500, 23, 23)
    told = reason(plan, "small-batch workers")
    assert "the most updates a round" in told.why
    assert "(1, 1, 0.1, 0.1)" in told.why
    uniform = next(one.loss for one in told.alternatives if one.value == "4 of 4")
    assert "uniform control, 301 updates a round" in uniform
    assert "make 1109 updates a round" in told.why
    assert "two sizes can be well ahead" in told.why
    wrong = virtual(
        "dual-batch",
        virtual=Virtual(**stated, overheads=(0.1, 1, 1, 1)),
        workers=4,
        dual=DualBatch(large_batches=(500,), small_workers=3),
    )
    assert "costs worker 0 less" in reason(wrong, "small-batch workers").why
    alike = virtual("dual-batch", virtual=Virtual(**stated), **given)
    why = reason(alike, "small-batch workers").why
    assert "Other numbers of small-batch workers come to as many" in why
    assert "fixed time is the same on all workers, as here, the control is as accurate" in why


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"virtual": Virtual(speeds=(1, 2))}, "virtual.speeds=.*2 values for workers=8"),
        ({"virtual": Virtual(overheads=(1, 2))}, "virtual.overheads=.*2 values for workers=8"),
        ({"virtual": Virtual(links=(1, 2))}, "virtual.links=.*2 values for workers=8"),
        (
            {"virtual": Virtual(disturbances=({"worker": 8, "slowdown": 2},))},
            "worker 8 of workers=8: give 0 to 7",
        ),
    ],
)
def test_what_is_said_of_other_virtual_workers_is_refused(changes, named):
    with pytest.raises(BatchwrightError, match=named):
        virtual("plain", **changes)


# ------------------------------------------------------------------------------ nothing measured


def unmeasured(method, **changes):
    fields = {"data": "cifar100:x", "method": method, "workers": 4}
    return plan_without_profile(Job(**{**fields, **changes}), CIFAR100, make_network(least_side=4))


def test_without_a_profile_a_cycle_is_laid_out_and_nothing_predicted():
    plan = unmeasured("cyclic", epochs=14)
    assert [(s.epochs, s.resolution) for s in plan.stages] == [
        *((4, 24), (4, 32), (2, 24), (2, 32), (1, 24), (1, 32))
    ]
    assert all(s.predicted_epoch_seconds is None for s in plan.stages)
    assert {s.local_batch_sizes for s in plan.stages} == {(32, 32, 32, 32)}


def test_without_a_profile_two_groups_need_stated_times():
    with pytest.raises(PlanError, match=r"nothing was measured: probe first.*virtual\.sample_sec"):
        unmeasured("dual-batch")
    with pytest.raises(PlanError, match="nothing was measured"):
        unmeasured("hybrid", launch="virtual", virtual={"sample_seconds": 0.001})


def test_stated_times_plan_the_papers_experiment_without_a_profile():
    plan = unmeasured(
        "hybrid",
        launch="virtual",
        virtual={"sample_seconds": 0.000505636, "step_seconds": 0.015562114},
        cycle={"preset": "cifar100"},
        dual={"small_workers": 1},
    )
    assert plan.epochs == 140
    top = plan.stages[1]
    assert top.local_batch_sizes == (560, 560, 560, 102)  # table 6, 32 px
    assert top.samples_per_round == (13_125, 13_125, 13_125, 10_625)
    assert top.predicted_epoch_seconds.value == pytest.approx(
        round_of(0.000505636, 0.015562114, 560, 13_125) + 2 * (5e-4 + 300_000 / 125e6), rel=0.01
    )
    assert plan.stages[0].sample_seconds == pytest.approx(0.000505636 * 9 / 16)  # by the area


def test_stated_times_plan_the_interval_between_checkpoints_that_the_plan_names():
    stated = {"launch": "virtual", "virtual": {"sample_seconds": 0.0005, "step_seconds": 0.015}}
    goal = {"preemptions_per_hour": 2, "checkpoint_cost": 5}
    plan = unmeasured("dual-batch", goal=goal, **stated)
    chosen = reason(plan, "checkpoint interval")
    assert (chosen.source, chosen.why[:10]) == ("published", "Daly's for")
    assert chosen.value == duration(plan.job.checkpoint_seconds)
    asked = unmeasured("dual-batch", goal=goal, checkpoint_seconds=600, **stated)
    assert asked.job.checkpoint_seconds == 600


def test_without_any_time_nothing_is_said_of_what_is_lost_of_it():
    plan = unmeasured("cyclic", epochs=14, goal={"preemptions_per_hour": 2})
    assert not [one for one in plan.reasons if one.choice in ("lost work", "checkpoint interval")]
    assert plan.job.checkpoint_seconds == "auto"


@pytest.mark.parametrize(
    ("goal", "named"),
    [
        ({"deadline": 1.0}, r"dual-batch may take .* s, goal\.deadline=1: raise"),
        ({"max_cost": 0.01, "price": 1.0}, r"dual-batch may cost .*, goal\.max_cost=0\.01: raise"),
        ({"max_cost": 0.01}, r"goal\.max_cost=0\.01 needs the price"),
    ],
)
def test_stated_times_that_miss_a_limit_are_refused(goal, named):
    stated = {"launch": "virtual", "virtual": {"sample_seconds": 0.0005, "step_seconds": 0.015}}
    unmeasured("dual-batch", goal={"deadline": 1000.0, "max_cost": 1.0, "price": 1.0}, **stated)
    with pytest.raises(BatchwrightError, match=named):
        unmeasured("dual-batch", goal=goal, **stated)


def test_a_network_that_takes_one_resolution_only_is_refused_with_the_reason():
    fixed = make_network(least_side=32)
    with pytest.raises(PlanError, match=r"at least 32 px, not 24.*takes one resolution only"):
        plan_without_profile(Job(method="cyclic", resolutions=SIDES), CIFAR100, fixed)
    assert plan_without_profile(Job(resolutions=SIDES), CIFAR100, fixed).stages[0].resolution == 32


def test_a_stated_link_is_kept():
    plan = virtual("plain", link=Link(latency=1e-3))
    assert (plan.job.link.latency, plan.job.link.bandwidth) == (1e-3, 125e6)
