"""`candidates.knees`: a cluster's knee on straight and bent curves, its interval, its words."""

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchwright.algorithms.batch_size import knee_of_line
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.knees import KneeFit, knee_fits_of, knee_record, line_of
from batchwright.planning.planner import make_plan
from batchwright.records import Goal
from batchwright.records.text.formatting import percent
from example_counts import examples
from samples import make_data, make_job, make_profile, make_step
from test_optimizer import update

BATCHES = (4, 8, 16, 32, 64)


def planned(seconds, samples=100_000, batches=BATCHES, workers=(1,), job=None, **goal):
    """A plan from step times that are a function of the local batch."""
    steps = tuple(
        make_step(count, batch, seconds=seconds(batch)) for count in workers for batch in batches
    )
    profile = make_profile(
        steps=steps, data=make_data(train_samples=samples), job=make_job(workers="auto")
    )
    goal = Goal(**({"objective": "knee"} | goal))
    keys = {"workers": "auto", "goal": goal, **(job or {})}
    return make_plan(profile, profile.job.model_copy(update=keys))


def why(plan):
    return next(one for one in plan.reasons if one.choice == "global batch").why


@examples(60)
@given(
    st.floats(1e-5, 1e-2),
    st.floats(0.2, 400),
    st.floats(0.02, 0.4),
    st.integers(200, 200_000),
    st.sampled_from([(4, 8, 16, 32, 64), (3, 7, 50), (16, 24, 40, 100), (2, 200)]),
    st.sampled_from([(1,), (2,), (1, 2)]),
)
def test_on_a_line_the_knee_is_the_smallest_candidate_not_below_the_closed_form(
    slope, ratio, gain, samples, batches, workers
):
    fixed = ratio * slope
    plan = planned(
        lambda batch: fixed + slope * batch, samples, batches, workers, doubling_gain=gain
    )
    for knee in plan.knees:
        exchange = 0.0031 if knee.workers > 1 else 0.0
        local = (fixed + exchange) * (1 - 2 * gain) / (2 * gain * slope)
        closed_form = knee.workers * local
        assert knee.closed_form == pytest.approx(closed_form, rel=1e-6)
        candidates = [
            one.global_batch_size
            for one in plan.considered
            if one.workers == knee.workers and not one.refused
        ]
        assume(all(abs(batch / closed_form - 1) > 1e-6 for batch in candidates))
        expected = min((b for b in candidates if b >= closed_form), default=None)
        assert knee.global_batch_size == expected
        assert knee.low is None or knee.low <= closed_form * (1 + 1e-6)
        assert knee.high is None or knee.high >= closed_form * (1 - 1e-6)


def test_beyond_the_line_a_knee_is_where_predictions_have_it():
    """Two workers were measured less far than one, whose shape counts beyond."""
    alone = [make_step(1, batch, seconds=0.02 + 0.0005 * batch) for batch in (4, 64, 1024)]
    together = [make_step(2, batch, seconds=0.02 + 0.002 * batch) for batch in (4, 8, 16)]
    profile = make_profile(
        steps=(*alone, *together), data=make_data(train_samples=100_000), job=make_job(workers=2)
    )
    goal = Goal(objective="knee")
    plan = make_plan(profile, profile.job.model_copy(update={"goal": goal}))
    (knee,) = (one for one in plan.knees if one.workers == 2)
    assert knee.closed_form is None
    each = {
        one.global_batch_size: one.step_seconds.value / one.global_batch_size
        for one in plan.considered
        if one.workers == 2
    }
    saves = {batch: 1 - each[2 * batch] / each[batch] for batch in each if 2 * batch in each}
    assert knee.global_batch_size == min(batch for batch in saves if saves[batch] <= 0.05)
    assert "straight line" not in why(plan)
    told = "Beyond batch 16 the shape with 1 worker counts, too."
    assert any(told in one.why for one in plan.reasons)


@pytest.mark.parametrize(
    ("optimizer", "fixed", "knee"),
    [("muon", 0.0052, 512), ("auto", 0.0052, 16), ("sgd", 0.02, 256)],
)
def test_the_knee_counts_the_update_that_each_batch_is_given(optimizer, fixed, knee):
    batches = tuple(2**n for n in range(2, 10))
    profile = make_profile(
        steps=tuple(make_step(1, batch, seconds=fixed + 0.0008 * batch) for batch in batches),
        data=make_data(train_samples=100_000),
        job=make_job(optimizer="auto", learning_rate="auto", workers=1),
        updates=(update("sgd", 0.0001), update("muon", 0.0201)),
        collectives=(),
    )
    keys = {"optimizer": optimizer, "goal": Goal(objective="knee")}
    plan = make_plan(profile, profile.job.model_copy(update=keys))
    seconds = {one.global_batch_size: one.step_seconds.value for one in plan.considered}
    saved = {n: 1 - seconds[2 * n] / 2 / seconds[n] for n in seconds if 2 * n in seconds}
    assert min(n for n, share in saved.items() if share <= 0.05) == knee
    assert plan.knees[0].global_batch_size == knee == plan.stages[0].global_batch_size
    if optimizer == "auto":  # Muon is worth its update from 32 on, which so takes longer
        assert f"{2 * knee} would take {percent(-saved[knee])} more" in why(plan)
    else:
        assert f"{2 * knee} would save {percent(saved[knee])}" in why(plan)
    if optimizer == "muon":  # the same update for all leaves a line
        assert plan.knees[0].closed_form == pytest.approx(0.0252 * 9 / 0.0008)


def test_on_a_bent_curve_the_doubling_rule_goes_by_the_curve():
    def bent(batch):  # twice as slow for each image from 16 on
        return 0.002 + 0.001 * batch + 0.001 * max(0, batch - 16)

    plan = planned(bent, batches=(2, 4, 8, 12, 16, 24, 32, 64, 128))
    knee = plan.knees[0]
    assert knee.closed_form is None
    seconds = {b: bent(b) / b for b in (2, 4, 8, 16, 32, 64)}
    expected = next(b for b in (2, 4, 8, 16, 32) if 1 - seconds[2 * b] / seconds[b] <= 0.05)
    assert knee.global_batch_size == expected == plan.stages[0].global_batch_size
    assert "straight line" not in why(plan)


def test_the_interval_of_a_knee_at_the_smallest_candidate_begins_there():
    knee = planned(lambda batch: 1e-4 * batch**1.5).knees[0]
    assert knee.global_batch_size == knee.low == 4


def test_time_in_proportion_to_the_batch_has_no_knee_and_the_smallest_is_taken():
    plan = planned(lambda batch: 0.001 * batch)
    assert plan.stages[0].global_batch_size == 4
    assert "There is no knee: a step takes time in proportion" in why(plan)


def test_time_that_hardly_grows_has_no_knee_and_the_largest_is_taken():
    plan = planned(lambda batch: 0.5 + 1e-6 * batch)
    assert plan.knees[0].global_batch_size is None
    allowed = [one.global_batch_size for one in plan.considered if not one.refused]
    assert plan.stages[0].global_batch_size == max(allowed)
    assert "There is no knee: each doubling" in why(plan)


def test_one_candidate_is_said_to_be_the_only_one():
    plan = planned(lambda batch: 0.01 + 0.001 * batch, samples=45)
    assert [one.global_batch_size for one in plan.considered if not one.refused] == [4]
    assert plan.stages[0].global_batch_size == 4
    plan = planned(lambda batch: 0.01 + 0.001 * batch, samples=20, least_steps=10)
    assert [one.global_batch_size for one in plan.considered if not one.refused] == [2]


def test_kneedle_is_named_where_it_differs():
    plan = planned(lambda batch: 0.02 + 0.001 * batch)
    knee = plan.knees[0]
    assert knee.kneedle is not None
    assert knee.kneedle != knee.global_batch_size
    assert knee.kneedle in [one.global_batch_size for one in plan.considered]
    assert f"Kneedle over log2 of the same batches says {knee.kneedle}" in why(plan)


def test_scattered_times_widen_the_knee():
    narrow = planned(lambda batch: 0.02 + 0.001 * batch).knees[0]
    wide = planned(
        lambda batch: (0.02 + 0.001 * batch) * (1.06 if batch in (8, 32) else 0.96),
        batches=(2, 4, 8, 12, 16, 32, 64),
    ).knees[0]
    assert narrow.high / narrow.low < 4
    assert wide.high is None or wide.high / wide.low > narrow.high / narrow.low


def test_micro_batches_as_asked_leave_the_knee_to_the_times_themselves():
    plan = planned(lambda batch: 0.02 + 0.001 * batch, job={"micro_batch": 32})
    knee = plan.knees[0]
    # From 32 on, twice the batch is twice the passes: nothing is saved.
    assert knee.global_batch_size == 32
    assert knee.closed_form is None


# --------------------------------------------------------------------------- kinds by themselves


def kind_of(fixed, slope, *, cut=False):
    """A kind whose step takes ``fixed + slope * local batch`` seconds, whatever else there is."""
    return SimpleNamespace(
        least=1,
        most=10_000,
        micro_batch=None,
        cuts=lambda workers: cut,
        largest=lambda workers, side: 10_000,
        line=lambda workers, side: (fixed, slope),
        straight_to=lambda workers, side: inf,
        seconds=lambda workers, side, local: fixed + slope * local,
        seconds_at_once=lambda workers, side, local: fixed + slope * local,
    )


def test_the_line_of_several_kinds_is_that_of_shares_that_take_equally_long():
    cluster = ClusterOption(((kind_of(0.02, 0.001), 2), (kind_of(0.05, 0.0005), 3)))
    fixed, slope = line_of(cluster, 32)
    for seconds in (0.1, 0.3):
        batch = 2 * (seconds - 0.02) / 0.001 + 3 * (seconds - 0.05) / 0.0005
        assert fixed + slope * batch == pytest.approx(seconds)


def test_there_is_no_line_where_one_kind_has_none():
    straight, level = kind_of(0.02, 0.001), kind_of(0.02, 0.0)
    assert line_of(ClusterOption(((level, 2),)), 32) == (0.02, 0.0)
    assert line_of(ClusterOption(((straight, 2),)), 32) == pytest.approx((0.02, 0.0005))
    assert line_of(ClusterOption(((straight, 1), (level, 1))), 32) is None
    assert line_of(ClusterOption(((straight, 1), (kind_of(0.02, 0.001, cut=True), 1))), 32) is None
    none = SimpleNamespace(cuts=lambda workers: False, line=lambda workers, side: None)
    assert line_of(ClusterOption(((none, 1),)), 32) is None


def fit_of(cluster, seconds, surplus=lambda batch: 0.0):
    rows = tuple(
        SimpleNamespace(
            cluster=cluster, resolution=32, batch=batch, step_seconds=found, totals=(1, 1)
        )
        for batch, found in seconds.items()
    )
    return KneeFit(rows, None, None, None, None, surplus)


def test_time_of_several_kinds_goes_straight_between_candidates_and_by_the_slowest_beyond():
    cluster = ClusterOption(((kind_of(0.02, 0.001), 1), (kind_of(0.02, 0.002), 1)))
    fit = fit_of(cluster, {16: 0.2, 32: 0.3, 64: 0.5}, lambda batch: 0.01 if batch > 40 else 0.002)
    for batch, seconds in {16: 0.2, 20: 0.225, 32: 0.3, 48: 0.394 + 0.01, 64: 0.5}.items():
        assert fit.per_sample(batch) * batch == pytest.approx(seconds)
    assert fit.per_sample(120) * 120 == pytest.approx(0.02 + 0.001 * 80 + 0.01)
    assert fit.per_sample(6) * 6 == pytest.approx(0.02 + 0.001 * 4 + 0.002)
    one_each = pytest.approx(0.02 + 0.002)  # seconds of a step, without its update
    assert (fit.per_sample(1) - 0.002) * 2 == one_each
    assert (fit.cluster, fit.resolution) == (cluster, 32)


def test_time_of_one_kind_is_that_of_its_own_share():
    fit = fit_of(ClusterOption(((kind_of(0.02, 0.001), 4),)), {16: 0.1}, lambda batch: 0.004)
    assert fit.per_sample(40) * 40 == pytest.approx(0.02 + 0.001 * 10 + 0.004)
    assert fit.per_sample(1) == pytest.approx((0.02 + 0.001) / 4 + 0.004)
    once = kind_of(0.02, 0.001, cut=True)
    once.seconds = lambda workers, side, local: 9.0
    assert fit_of(ClusterOption(((once, 4),)), {16: 0.1}).per_sample(40) == pytest.approx(9 / 40)


@pytest.mark.parametrize(
    ("knee", "missed", "best"),
    [(8, (), 8), (8, (8,), 16), (32, (32,), 16), (None, (), 32), (8, (4, 8, 16, 32), None)],
)
def test_past_a_limit_the_next_larger_batch_is_best_and_else_the_next_smaller(knee, missed, best):
    rows = {n: SimpleNamespace(batch=n, misses=(n,) * (n in missed)) for n in (4, 8, 16, 32)}
    fit = KneeFit(tuple(rows.values()), rows.get(knee), None, None, None, lambda batch: 0.0)
    assert fit.best is rows.get(best)


@pytest.mark.parametrize("more", [0.0, 0.04])
def test_the_interval_of_a_line_s_knee_follows_from_the_errors_of_both_its_times(more):
    """Of half the fixed time over the whole, the knee's saving: their relative errors together."""
    kind = kind_of(0.04, 0.001)
    errors = {0: 0.06, 40: 0.08}
    kind.fitted_line = lambda workers, side: SimpleNamespace(
        intercept=0.04, at=lambda local: 0.04 + 0.001 * local, own_error=errors.__getitem__
    )
    fit = fit_of(ClusterOption(((kind, 2),)), {16: 0.1, 80: 0.2}, lambda batch: more)
    fit = replace(fit, row=fit.rows[1], line=(0.04 + more, 0.0005))
    # The update's time is certain: of the fixed 0.08 s it is a half, of the step's 0.12 s a third.
    error = (0.03**2 + (0.08 * 2 / 3) ** 2) ** 0.5 if more else 0.1
    found = knee_record(fit, 0.05, named=False, ends=True)
    low, high = (0.05 * (1 + sign * 1.96 * error) for sign in (1, -1))
    assert found.low == pytest.approx(knee_of_line(*fit.line, low))
    assert found.high == pytest.approx(knee_of_line(*fit.line, high))
    assert found.global_batch_size == 80
    bare = knee_record(fit, 0.05, named=False, ends=False)
    assert (bare.low, bare.high) == (None, None)


def test_the_interval_of_a_knee_off_the_line_follows_from_the_errors_of_two_steps():
    kind = kind_of(0.04, 0.00001)
    errors = {4000: 0.003, 8000: 0.004}
    kind.times = SimpleNamespace(comparison_error=lambda workers, side, size: errors[size])
    kind.fitted_line = lambda workers, side: None
    fit = fit_of(ClusterOption(((kind, 2),)), {1600: 0.1, 8000: 0.2})
    fit = replace(fit, row=fit.rows[1])
    found = knee_record(fit, 0.2, named=False, ends=True)
    low, high = (0.2 + sign * 1.96 * 0.8 * 0.005 for sign in (1, -1))
    for end, share in ((found.low, low), (found.high, high)):
        saved = 1 - fit.per_sample(2 * end) / fit.per_sample(end)
        assert saved == pytest.approx(share, abs=0.0005)


def test_a_knee_that_another_update_makes_has_no_interval_beside_it():
    """On a GPU Muon's update may take longer than the rest of a step."""
    kind = kind_of(0.004, 16e-6)
    kind.times = SimpleNamespace(comparison_error=lambda workers, side, size: 0.01)
    kind.fitted_line = lambda workers, side: None
    cluster, seconds = ClusterOption(((kind, 1),)), {64: 0.005, 256: 0.008, 512: 0.0205}
    for more, told in ((0.0, True), (0.0085, False)):
        fit = fit_of(cluster, seconds, lambda batch, more=more: more if batch > 256 else 0.0)
        found = knee_record(replace(fit, row=fit.rows[1]), 0.05, named=False, ends=True)
        assert (found.low is not None) == told
        assert found.high is None or told


def test_there_is_no_interval_without_a_knee_nor_for_several_kinds_or_passes():
    alone = fit_of(ClusterOption(((kind_of(0.04, 0.001), 2),)), {80: 0.2})
    several = fit_of(
        ClusterOption(((kind_of(0.04, 0.001), 1), (kind_of(0.04, 0.002), 1))), {80: 0.2}
    )
    cut = fit_of(ClusterOption(((kind_of(0.04, 0.001, cut=True), 2),)), {80: 0.2})
    for fit in (alone, replace(several, row=several.rows[0]), replace(cut, row=cut.rows[0])):
        found = knee_record(fit, 0.05, named=False, ends=True)
        assert (found.low, found.high) == (None, None)


@pytest.mark.parametrize(("heavier_from", "straight"), [(320, False), (161, False), (321, True)])
def test_the_line_counts_where_one_update_is_made_up_to_twice_the_knee(heavier_from, straight):
    kind = kind_of(0.035, 0.001)
    cluster = ClusterOption(((kind, 1),))
    rows = [
        SimpleNamespace(
            cluster=cluster,
            resolution=32,
            batch=batch,
            asked=False,
            misses=(),
            per_sample=0.001 + 0.035 / batch,
        )
        for batch in (20, 40, 80, 160, 320, 640)
    ]
    (fit,) = knee_fits_of(rows, 0.1, lambda cluster, batch: 0.02 if batch >= heavier_from else 0.0)
    assert fit.row is rows[3]  # 140 by the line
    assert (fit.line is not None) is straight
    assert fit.closed_form == (pytest.approx(140) if straight else None)
