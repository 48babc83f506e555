"""`prediction.step_time`: batches, resolutions, workers; intervals that hold; bad points."""

import random
from collections import defaultdict
from itertools import pairwise, product
from math import exp, inf
from statistics import fmean, median, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import PlanError
from batchwright.prediction import measured_curves
from batchwright.prediction.contradictions import contradictions
from batchwright.prediction.drift import ASSUMED_DRIFT
from batchwright.prediction.overlap import combine
from batchwright.prediction.step_time import fit_step_time
from batchwright.probing.measure.timing import mean_step
from batchwright.records import CollectiveTime, Link, StepTime

BATCHES = (16, 32, 64, 128)
LINK = Link(latency=5e-5, bandwidth=1e9)
SYNC = 0.003


def compute_of(batch, resolution=32):
    return 0.005 + 0.0004 * batch * (resolution / 32) ** 2


def point(batch, compute, sync=SYNC, *, resolution=32, workers=2, visits=(), scatter=0.01):
    step = compute + sync
    value = median(visits) if visits else step
    return StepTime(
        resolution=resolution,
        local_batch_size=batch,
        workers=workers,
        compute_seconds=value * compute / step,
        sync_seconds=value * sync / step,
        step_seconds=value,
        step_low=(1 - scatter) * value,
        step_high=(1 + scatter) * value,
        repeats=10,
        visits=tuple(visits),
    )


def points_of(resolutions=(32,), workers=(2,), rng=None, drift=0.0, visits=3):
    """Straight in batch and pixels; one worker has no exchange."""
    found = []
    for count in workers:
        for side in resolutions:
            for batch in BATCHES:
                compute, sync = compute_of(batch, side), SYNC if count > 1 else 0.0
                drawn = tuple(
                    (compute + sync) * exp(rng.gauss(0, drift) if rng else 0.0)
                    for _ in range(visits)
                )
                found.append(
                    point(batch, compute, sync, resolution=side, workers=count, visits=drawn)
                )
    return found


def test_a_straight_step_time_is_recovered_everywhere():
    model = fit_step_time(points_of())
    for batch in (8, 16, 100, 128, 512):
        expected = compute_of(batch) + SYNC
        estimate = model.predict(2, 32, batch)
        assert estimate.value == model.seconds(2, 32, batch) == pytest.approx(expected)
        assert estimate.low < expected < estimate.high
    curve = model.curve(2, 32)
    assert curve.linear
    assert curve.line.intercept == pytest.approx(0.008)
    assert curve.line.slope == pytest.approx(0.0004)
    assert not model.extrapolates(2, 32, 100)
    assert model.extrapolates(2, 32, 8)
    assert model.extrapolates(2, 32, 129)


def test_the_same_steps_are_fitted_once_whatever_is_asked_of_them(monkeypatch):
    fitted, usual = [], measured_curves.fit_curve
    monkeypatch.setattr(
        measured_curves, "fit_curve", lambda *some: fitted.append(some) or usual(*some)
    )
    points = points_of(visits=2, rng=random.Random(7), drift=0.01)
    model = fit_step_time(points)
    assert len(fitted) == 2  # the whole step and its computing
    other = fit_step_time([one.model_copy() for one in points], gradient_bytes=1000, link=LINK)
    assert len(fitted) == 2
    assert other.curve(2, 32) == model.curve(2, 32)
    assert other.seconds(4, 32, 16) > 0
    with pytest.raises(PlanError, match="link"):
        model.seconds(4, 32, 16)  # nothing of the other's link is kept


def test_the_drift_of_all_points_is_found_once(monkeypatch):
    asked, usual = [], measured_curves.pooled_drift
    for module in ("drift", "measured_curves"):
        monkeypatch.setattr(
            f"batchwright.prediction.{module}.pooled_drift",
            lambda points: asked.append(points) or usual(points),
        )
    fit_step_time(points_of(visits=2, rng=random.Random(8), drift=0.01))
    assert len(asked) == 1


def test_points_may_come_in_any_order():
    points = points_of((24, 32), (1, 2))
    assert fit_step_time(points[::-1]) == fit_step_time(points)


def test_micro_batches_exchange_gradients_once():
    model = fit_step_time(points_of())
    for local, sizes in ((128, [64, 64]), (160, [54, 53, 53]), (127, [26, 26, 25, 25, 25])):
        expected = sum(map(compute_of, sizes)) + SYNC
        assert model.seconds(2, 32, local, len(sizes)) == pytest.approx(expected)
        assert model.predict(2, 32, local, len(sizes)).value == pytest.approx(expected)
        assert model.computing(2, 32, local, len(sizes)) == pytest.approx(expected - SYNC)


def test_a_step_of_any_number_of_passes_is_predicted_at_once():
    """A list of as many would not fit any memory."""
    found = fit_step_time(points_of()).predict(2, 32, 10**15, 10**15 // 2)
    assert found.value == pytest.approx(10**15 / 2 * compute_of(2))


# As measured on two shared cores: one worker with both, and two with one each.
ALONE = {4: 0.0038, 8: 0.0049, 16: 0.0067, 32: 0.0107, 256: 0.0614}
TOGETHER = {4: 0.0071, 8: 0.0067, 16: 0.0110, 64: 0.0317, 256: 0.1146}


def test_beyond_few_short_steps_of_two_workers_one_worker_says_how_they_go_on():
    """The slope of the first two alone has batch 256 take 7 ms, in place of 115."""
    alone = [point(b, s, 0.0, workers=1, visits=(0.98 * s, 1.02 * s)) for b, s in ALONE.items()]
    together = [
        point(b, 0.8 * s, 0.2 * s, visits=(0.9 * s, 1.1 * s)) for b, s in TOGETHER.items() if b < 16
    ]
    model = fit_step_time([*alone, *together])
    for batch in (64, 256):
        estimate = model.predict(2, 32, batch)
        assert estimate.low < TOGETHER[batch] < estimate.high
        assert model.extrapolates(2, 32, batch)
    assert model.seconds(2, 32, 256) == pytest.approx(TOGETHER[256], rel=0.35)
    by_themselves = fit_step_time(together)
    assert by_themselves.seconds(2, 32, 256) < 0.1 * TOGETHER[256]
    assert model.seconds(2, 32, 8) == pytest.approx(by_themselves.seconds(2, 32, 8), rel=0.01)


def test_a_curve_that_is_well_known_goes_on_by_itself():
    """Two workers whose steps grow otherwise than one's, and repeat to 1 %."""
    alone = [point(b, compute_of(b), 0.0, workers=1) for b in (*BATCHES, 1024)]
    together = [point(b, 3 * compute_of(b), 0.0) for b in BATCHES]
    truth = 3 * compute_of(512)
    assert fit_step_time([*alone, *together]).seconds(2, 32, 512) == pytest.approx(truth, rel=0.01)
    steeper = [point(b, 0.02 + 0.002 * b, 0.0) for b in BATCHES]
    found = fit_step_time([*alone, *steeper]).seconds(2, 32, 512)
    assert found == pytest.approx(0.02 + 0.002 * 512, rel=0.1)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.sampled_from([2, 4, 8, 12, 16, 32]), min_size=2, max_size=4),
    st.sets(st.sampled_from([64, 128, 256, 512]), min_size=2),
    st.floats(0, 0.02),
    st.sampled_from([1e-4, 1e-3, 1e-2]),
    st.sampled_from([0.01, 0.1, 0.3]),
    st.integers(0, 2**32 - 1),
)
def test_beyond_what_was_measured_a_larger_batch_takes_no_less_and_is_no_surer(
    few, many, fixed, slope, scatter, seed
):
    rng = random.Random(seed)

    def measured(workers, batch, scatter):
        seconds = fixed + slope * batch
        visits = tuple(seconds * exp(rng.gauss(0, scatter)) for _ in range(3))
        return point(batch, 0.9, 0.1, workers=workers, visits=visits)

    alone = [measured(1, batch, 0) for batch in many]
    curve = fit_step_time([*alone, *(measured(2, batch, scatter) for batch in few)]).curve(2, 32)
    last = max(few)
    sure = curve.standard_error(last)
    assert curve.at(last * (1 + 1e-9)) == pytest.approx(curve.at(last))
    assert curve.standard_error(last * (1 + 1e-9)) == pytest.approx(sure, abs=1e-4)
    seconds = [curve.at(last * 1.03**n) for n in range(200)]
    assert all(more >= less * (1 - 1e-9) for less, more in pairwise(seconds))
    assert all(curve.standard_error(last * 1.03**n) >= sure * (1 - 1e-9) for n in range(200))


def test_a_slope_that_scatter_hides_leaves_a_number_however_far_it_is_gone_on_with():
    together = [point(batch, 0.01, visits=(0.0117, 0.013, 0.0143)) for batch in (1, 2)]
    estimate = fit_step_time(together).predict(2, 32, 10**6)
    assert 0 < estimate.low < estimate.value < estimate.high < inf


def test_bent_points_are_kept_and_said_to_be_bent():
    points = [point(b, compute_of(b) * (1.5 if b > 64 else 1)) for b in BATCHES]
    model = fit_step_time(points)
    assert not model.curve(2, 32).linear
    assert any("bent" in note for note in model.notes)
    for one in points:
        assert model.seconds(2, 32, one.local_batch_size) == pytest.approx(one.step_seconds)


@pytest.mark.parametrize("resolution", [24, 28, 32, 40, 48, 64, 16])
def test_time_is_linear_in_the_pixels_between_and_beyond_resolutions(resolution):
    model = fit_step_time(points_of((24, 48)))
    expected = compute_of(64, resolution) + SYNC
    assert model.seconds(2, resolution, 64) == pytest.approx(expected)
    assert model.extrapolates(2, resolution, 64) == (not 24 <= resolution <= 48)


def test_far_from_the_measured_resolutions_the_interval_is_wider():
    model = fit_step_time(points_of((24, 48), rng=random.Random(0), drift=0.02))
    errors = [model.standard_error(2, side, 64) for side in (48, 64, 96)]
    assert errors == sorted(errors)
    assert errors[2] > errors[0] + 0.05


def test_beyond_resolutions_time_grows_no_faster_than_pixels_and_never_shrinks():
    points = [point(b, 0.001 * b, resolution=24) for b in BATCHES]
    points += [point(b, 0.01 * b, resolution=32) for b in BATCHES]  # far more than in proportion
    model = fit_step_time(points)
    edge = model.seconds(2, 32, 64)
    assert edge < model.seconds(2, 64, 64) <= 4 * edge * 1.0001
    assert model.seconds(2, 8, 64) > 0


def test_another_resolution_than_the_only_one_is_refused_with_what_to_measure():
    model = fit_step_time(points_of())
    with pytest.raises(PlanError, match=r"resolution 48: only 32 .*resolutions=32,48"):
        model.seconds(2, 48, 16)


def test_each_number_of_workers_has_its_own_curve():
    model = fit_step_time(points_of(workers=(1, 4)))
    assert model.workers == (1, 4)
    assert model.seconds(1, 32, 64) == pytest.approx(compute_of(64))
    assert model.seconds(4, 32, 64) == pytest.approx(compute_of(64) + SYNC)
    assert model.seconds(2, 32, 64) == pytest.approx(compute_of(64) + SYNC / 3)
    assert model.extrapolates(2, 32, 64)
    assert not model.assumed(2)
    assert model.resolutions(2) == model.resolutions(1) == (32,)


def test_one_worker_not_measured_exchanges_nothing():
    model = fit_step_time(points_of(workers=(2,)))
    assert model.seconds(1, 32, 64) == pytest.approx(compute_of(64))
    assert model.extrapolates(1, 32, 64)


def test_more_workers_than_measured_take_the_stated_link():
    model = fit_step_time(points_of(workers=(1, 2)), gradient_bytes=8_000_000, link=LINK)
    assert not model.assumed(2)
    assert model.assumed(4)
    exchange = 6 * (5e-5 + 2e6 / 1e9)
    assert model.seconds(4, 32, 64) == pytest.approx(compute_of(64) + exchange)
    assert model.extrapolates(4, 32, 64)
    estimate = model.predict(4, 32, 64)
    known = model.predict(2, 32, 64)
    assert estimate.high / estimate.value > known.high / known.value
    curve = model.curve(4, 32)
    assert curve.linear
    assert curve.line.intercept == pytest.approx(0.005 + exchange)
    assert curve.line.slope == pytest.approx(0.0004)


def test_more_workers_without_a_link_are_refused_with_the_keys_to_give():
    with pytest.raises(PlanError, match=r"workers=16.*link\.latency.*link\.bandwidth"):
        fit_step_time(points_of()).predict(16, 32, 64)


def collective(seconds, size=8_000_000):
    return CollectiveTime(
        bytes=size, workers=2, seconds=seconds, low=seconds, high=seconds, repeats=20
    )


@settings(max_examples=30)
@given(st.floats(1, 3), st.integers(0, 2**32 - 1))
def test_the_overlap_is_recovered_and_used_for_more_workers(overlap, seed):
    rng = random.Random(seed)
    exchange, points = 0.03, []
    for batch in BATCHES:
        compute = compute_of(batch)
        step = combine(compute, exchange, overlap)
        visits = tuple(step * exp(rng.gauss(0, 0.01)) for _ in range(5))
        points.append(point(batch, compute, step - compute, visits=visits))
    model = fit_step_time(
        points, collectives=[collective(exchange)], gradient_bytes=8_000_000, link=LINK
    )
    assert combine(1, 1, model.overlap) == pytest.approx(combine(1, 1, overlap), rel=0.04)
    ring = 14 * (5e-5 + 1e6 / 1e9)
    expected = combine(compute_of(64), ring, overlap)
    assert model.seconds(8, 32, 64) == pytest.approx(expected, rel=0.06)


def test_an_overlap_that_nothing_tells_is_none_and_noted():
    alone = fit_step_time(points_of(workers=(1,)))
    assert alone.overlap is None
    assert not alone.notes
    short = fit_step_time(points_of(), collectives=[collective(1e-5)], gradient_bytes=8_000_000)
    assert short.overlap is None
    assert any("too short" in note for note in short.notes)


def test_drift_is_measured_where_points_were_revisited_and_else_assumed():
    measured = fit_step_time(points_of(rng=random.Random(0), drift=0.08, visits=6))
    assert measured.drift == pytest.approx(0.08, rel=0.35)
    once = fit_step_time(points_of(visits=0))
    assert once.drift == ASSUMED_DRIFT
    assert any("assumed" in note for note in once.notes)


def test_more_visits_make_the_curve_surer():
    errors = [
        fit_step_time(points_of(rng=random.Random(0), drift=0.05, visits=n)).standard_error(
            2, 32, 50
        )
        for n in (3, 30)
    ]
    assert errors[1] < 0.6 * errors[0]


def later_measurement(rng, truth, drift, common=0.0):
    return truth * median(exp(rng.gauss(0, drift) + common) for _ in range(3))


def test_intervals_hold_a_later_measurement_about_95_times_in_100():
    rng = random.Random(1)
    held, widths, total = 0, [], 0
    for _ in range(150):
        model = fit_step_time(points_of((24, 32), (1, 2), rng=rng, drift=0.04))
        for batch in (24, 48, 96):
            truth = compute_of(batch) + SYNC
            estimate = model.predict(2, 32, batch)
            held += estimate.low <= later_measurement(rng, truth, 0.04) <= estimate.high
            widths.append((estimate.high - estimate.low) / 2 / estimate.value)
            total += 1
    assert 0.94 < held / total < 0.995
    assert median(widths) < 0.08


def test_intervals_know_that_cores_which_share_a_step_may_be_moved_after_a_probe():
    """No visit of these saw it; what a step takes whatever its batch may differ by 80 %."""
    points = points_of(rng=random.Random(0), drift=0.01, workers=(1,))
    alone, shared = (fit_step_time(points, several_cores=several) for several in (False, True))
    fixed = shared.seconds(1, 32, 1)
    for batch in (16, 64, 128):
        narrow, wide = (model.predict(1, 32, batch) for model in (alone, shared))
        moved = wide.value + 0.5 * fixed
        assert narrow.high < moved < wide.high
        assert wide.low < narrow.low
        assert wide.value == narrow.value
        told = [model.cores_may_move(1, 32, batch) for model in (alone, shared)]
        assert told == [False, True]
    halves, whole = (shared.predict(1, 32, 64, passes) for passes in (2, 1))
    assert halves.high / halves.value > whole.high / whole.value  # two passes have it twice


def test_an_interval_that_scatter_makes_wide_already_stays_as_it_is():
    points = points_of(rng=random.Random(0), drift=0.4, workers=(1,))
    alone, shared = (
        fit_step_time(points, several_cores=several).predict(1, 32, 128)
        for several in (False, True)
    )
    assert shared == alone
    assert not fit_step_time(points, several_cores=True).cores_may_move(1, 32, 128)


def test_intervals_hold_where_slow_stretches_hit_all_points_alike():
    """Half of the drift, as a variance, is common to all visits of one pass."""
    rng = random.Random(2)
    held, total = 0, 0
    share = 0.04 * 0.5**0.5
    for _ in range(200):
        passes = [rng.gauss(0, share) for _ in range(3)]
        points = []
        for batch in BATCHES:
            step = compute_of(batch) + SYNC
            visits = tuple(step * exp(common + rng.gauss(0, share)) for common in passes)
            points.append(point(batch, compute_of(batch), visits=visits))
        model = fit_step_time(points)
        for batch in (24, 96):
            truth = compute_of(batch) + SYNC
            estimate = model.predict(2, 32, batch)
            held += estimate.low <= later_measurement(rng, truth, 0.04) <= estimate.high
            total += 1
    assert 0.93 < held / total < 0.995


def steps_of(rng, level, spread, count):
    """Steps that are ``level`` in the mean and scatter by ``spread``."""
    return [level * exp(rng.gauss(-(spread**2) / 2, spread)) for _ in range(count)]


def visited(rng, batch, workers, *, drift, spread, visits=3):
    """A point whose visits of ten steps drift, and whose steps scatter by ``spread`` within one."""
    truth = compute_of(batch) + SYNC
    drawn = []
    for _ in range(visits):
        level = truth * exp(rng.gauss(0, drift))
        drawn.append(steps_of(rng, level, spread, 10))
    means = [mean_step([(step, 0.0) for step in visit]) for visit in drawn]
    together = [step for visit in drawn for step in visit]
    low, value, high = quantiles(together, n=4, method="inclusive")
    one = point(batch, compute_of(batch), workers=workers, visits=[one.seconds for one in means])
    seen = {"step_seconds": value, "step_low": low, "step_high": high, "repeats": len(together)}
    seen["visit_error"] = median(one.error for one in means)
    return one.model_copy(update=seen)


def held_and_widths(drift, spread, *, visits=3, seeds=150):
    """Share of later measurements inside their intervals, and median half width.

    By workers and batch; ``drift`` is by workers, ``spread`` of (workers, batch).
    """
    held, widths = defaultdict(list), defaultdict(list)
    for seed in range(seeds):
        rng = random.Random(seed)
        model = fit_step_time(
            [
                visited(rng, b, w, drift=drift[w], spread=spread(w, b), visits=visits)
                for w in (1, 2)
                for b in BATCHES
            ]
        )
        for key in product((1, 2), (24, 96)):
            workers, batch = key
            estimate = model.predict(workers, 32, batch)
            later = visited(
                rng, batch, workers, drift=drift[workers], spread=spread(*key), visits=5
            )
            held[key].append(estimate.low <= median(later.visits) <= estimate.high)
            widths[key].append((estimate.high - estimate.low) / 2 / estimate.value)
    return (
        {key: fmean(some) for key, some in held.items()},
        {key: median(some) for key, some in widths.items()},
    )


@pytest.mark.parametrize("visits", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_intervals_hold_and_follow_the_drift_of_each_number_of_workers(visits):
    held, widths = held_and_widths({1: 0.01, 2: 0.08}, lambda *_: 0.01, visits=visits)
    assert min(held.values()) >= 0.9, held
    assert widths[1, 24] < 0.06  # with a drift pooled over both it was 0.08 and more
    assert widths[1, 96] < 0.06
    assert widths[2, 24] > 2 * widths[1, 24]


@pytest.mark.slow
def test_intervals_hold_and_follow_the_scatter_of_short_steps():
    """As of two workers with few images, whose steps wait for an exchange that scatters."""
    held, widths = held_and_widths(
        {1: 0.02, 2: 0.02}, lambda workers, batch: 0.02 if workers == 1 else 6 / batch
    )
    assert min(held.values()) >= 0.9, held
    assert widths[2, 24] > 0.12
    assert widths[2, 96] < 0.6 * widths[2, 24]
    assert max(widths[1, 24], widths[1, 96]) < 0.06


def test_a_single_point_goes_on_with_the_shape_of_its_neighbour():
    points = [*points_of((32,)), point(32, compute_of(32, 24), resolution=24)]
    model = fit_step_time(points)
    ratio = (compute_of(32, 24) + SYNC) / (compute_of(32) + SYNC)
    expected = ratio * (compute_of(64) + SYNC)
    assert model.seconds(2, 24, 64) == pytest.approx(expected)
    assert model.extrapolates(2, 24, 64)
    assert any("only batch 32" in note for note in model.notes)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "no step times"),
        ([point(32, 0.02)], "batch 32 at resolution 32 with 2 .*measure batch 64 too"),
        ([point(32, 0.02), point(32, 0.03), point(64, 0.05)], "batch 32 .* twice"),
    ],
)
def test_bad_points_are_refused_in_one_line_that_says_what_to_measure(points, message):
    with pytest.raises(PlanError, match=message) as error:
        fit_step_time(points)
    assert "\n" not in str(error.value)


def test_a_larger_batch_a_little_faster_is_scatter():
    fit_step_time([point(32, 0.02), point(64, 0.018), point(128, 0.05)])


@pytest.mark.parametrize("stray", [8, 16, 32, 64])
def test_a_point_that_contradicts_a_larger_one_counts_for_little_and_is_named(stray):
    times = {batch: 0.01 + 0.001 * batch for batch in (8, 16, 32, 64, 128)}
    quiet = fit_step_time([point(*one) for one in times.items()])
    times[stray] *= 10
    model = fit_step_time([point(*one) for one in times.items()])
    (told,) = (note for note in model.notes if "was disturbed" in note)
    assert f"local batch {2 * stray} " in told
    assert f"but batch {stray} " in told
    for batch in times:
        true = 0.01 + 0.001 * batch
        assert model.seconds(2, 32, batch) == pytest.approx(true, rel=0.25)
        assert model.standard_error(2, 32, batch) >= quiet.standard_error(2, 32, batch)


def test_small_batches_that_were_all_disturbed_count_for_little():
    times = {batch: 0.01 + 0.001 * batch for batch in (8, 16, 32, 64, 128, 256)}
    slow = times | dict.fromkeys((8, 16, 32), 0.5)
    model = fit_step_time([point(*one) for one in slow.items()])
    for batch, true in times.items():
        assert model.seconds(2, 32, batch) == pytest.approx(true + SYNC, rel=0.3)


def beside(batch, disturbed, factor, workers=2):
    slow = point(batch, factor * (0.01 + 0.001 * batch), factor * SYNC, workers=workers)
    return slow.model_copy(update={"disturbed": disturbed})


def test_a_point_that_was_visited_beside_others_is_known_as_well_as_the_rest():
    """Else, on a host that takes some time from all, small batches seemed the only known ones."""
    batches = (2, 4, 8)
    model, untold = (
        fit_step_time([beside(2, first, 1), beside(4, False, 1), beside(8, first, 1)])
        for first in (True, False)
    )
    for batch in (*batches, 128):
        assert model.predict(2, 32, batch) == untold.predict(2, 32, batch)
        assert model.comparison_error(2, 32, batch) == untold.comparison_error(2, 32, batch)


def test_intervals_beside_others_reach_as_far_as_a_step_waited_for_its_threads():
    points = [beside(batch, False, 1, workers) for batch in BATCHES for workers in (1, 2)]
    waited = [
        one.model_copy(update={"beside_seconds": one.step_seconds + 0.3})
        if (one.workers, one.local_batch_size) == (1, 16)
        else one
        for one in points
    ]
    short, long, other = (1, 32, 16), (1, 32, 128), (2, 32, 16)
    for told in (points, waited):
        quiet = fit_step_time(told)
        assert [quiet.predict(*at) for at in (short, long, other)] == [
            fit_step_time(points).predict(*at) for at in (short, long, other)
        ]
    without, model = (fit_step_time(some, least_share=0.5) for some in (points, waited))
    assert model.predict(*other) == without.predict(*other)
    wait = 0.3 - model.seconds(*short)  # beyond that by half of the cores
    for at in (short, long):
        assert without.predict(*at).high < model.predict(*at).high
        assert model.predict(*at).high >= 2 * model.seconds(*at) + wait
        assert model.predict(*at).low == without.predict(*at).low  # nothing makes a step quicker
    ratios = [model.predict(*at).high / without.predict(*at).high for at in (short, long)]
    assert ratios[0] > 3 * ratios[1]


def test_steps_of_quicker_or_slower_workers_wait_as_much_beside_others():
    usual = [beside(batch, False, 1, 1) for batch in BATCHES]
    usual[1] = usual[1].model_copy(update={"beside_seconds": 0.5})
    for ratio in (0.25, 4.0):
        steps = [point.scaled(ratio) for point in usual]
        one, other = (fit_step_time(told, least_share=0.5) for told in (usual, steps))
        for batch in BATCHES:
            here, there = one.predict(1, 32, batch), other.predict(1, 32, batch)
            assert there.value == pytest.approx(ratio * here.value)
            assert there.high / there.value == pytest.approx(here.high / here.value)


def test_two_points_that_contradict_each_other_still_make_a_curve_with_a_wide_interval():
    model = fit_step_time([point(32, 0.2), point(64, 0.05)])
    assert model.seconds(2, 32, 64) >= model.seconds(2, 32, 32) > 0
    assert model.seconds(2, 32, 64) == pytest.approx(0.05 + SYNC, rel=0.05)
    assert model.standard_error(2, 32, 64) < 0.1 < 0.5 < model.standard_error(2, 32, 32)


def test_a_contradiction_names_both_points_until_their_scatter_explains_it():
    others = [point(128, 0.3), point(8, 0.01, resolution=24)]
    small, large = point(32, 0.2), point(64, 0.05)
    assert contradictions([large, *others, small]) == [(small, large)]
    visits = (0.2, 0.05, 0.2, 0.05, 0.06, 0.2)
    assert contradictions([large, *others, point(32, 0.05, visits=visits)]) == []
