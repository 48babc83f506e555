"""`planning.methods.groups`: two groups on measured step times, which are curves."""

from __future__ import annotations

import pytest

from batchwright.algorithms.dual_batch import Relative, solve
from batchwright.errors import PlanError
from batchwright.planning.methods.groups import Pace, grouped, most_extra_time
from batchwright.records import PairTime

A, B, SAMPLES = 0.0005, 0.02, 50_000


def pace_of(
    seconds=None, *, speeds=(1.0,) * 4, overheads=(1.0,) * 4, pairs=(), exchange=0.0, least=2
):
    return Pace(
        seconds=seconds or (lambda side, batch: A * batch + B),
        workers=tuple(map(Relative, speeds, overheads)),
        least=least,
        exchange=(exchange,) * len(speeds),
        spread=lambda side, batch: (0.9, 1.1),
        pairs=pairs,
    )


def found(pace=None, *, small=1, extra=1.05, large=512, samples=SAMPLES, **options):
    return grouped(
        pace or pace_of(),
        32,
        large,
        small_workers=small,
        extra_time=extra,
        samples=samples,
        **options,
    )


def pair_time(small_batch, small_seconds, *, large_seconds=A * 512 + B, **changes):
    fields = {
        "resolution": 32,
        "large_workers": 3,
        "small_workers": 1,
        "large_batch": 512,
        "small_batch": small_batch,
        "large_seconds": large_seconds,
        "small_seconds": small_seconds,
        "repeats": 3,
    }
    return PairTime(**{**fields, **changes})


@pytest.mark.parametrize("small", [0, 1, 2, 3, 4])
def test_where_time_is_a_line_the_answer_is_that_of_the_formula(small):
    groups = found(small=small)
    pair = solve(
        A, B, 512, small_workers=small, large_workers=4 - small, extra_time=1.05, samples=SAMPLES
    )
    assert groups.pair == pair
    assert groups.local_batch_sizes == (512,) * (4 - small) + (pair.small_batch,) * small
    assert sum(groups.samples) == SAMPLES
    assert groups.measured is None


def test_a_round_takes_k_times_one_with_large_batches_alone():
    alone = found(small=0).round_seconds
    for k in (1.02, 1.05, 1.1):
        # To a step in a hundred or so: the last one of a round is smaller.
        assert found(small=2, extra=k).round_seconds / alone == pytest.approx(k, rel=0.01)


def test_on_a_curve_both_batches_lie_on_the_chord_that_was_solved_with():
    def seconds(side, batch):
        return 0.004 * batch**0.6  # bent: no line describes it

    groups = found(pace_of(seconds), small=3)
    small = groups.pair.small_batch
    for batch in (512, small):
        line = groups.sample_seconds * batch + groups.step_seconds
        assert line == pytest.approx(seconds(32, batch), rel=1e-6)
    each = [
        seconds(32, batch) / batch * share
        for batch, share in zip(groups.local_batch_sizes, groups.samples, strict=True)
    ]
    assert max(each) / min(each) == pytest.approx(1, abs=0.01)
    assert max(each) == pytest.approx(groups.pair.round_seconds, rel=0.01)


def test_a_curve_with_steps_is_solved_without_going_round_in_circles():
    def seconds(side, batch):
        return A * batch + B + 0.004 * (batch >= 96)

    groups = found(pace_of(seconds), small=3, extra=1.08)
    assert 2 <= groups.pair.small_batch < 512
    assert sum(groups.samples) == SAMPLES


def test_a_pair_that_was_measured_counts_more_than_the_fitted_line():
    fitted = found()
    # Side by side, the small batch takes 1 ms longer than the line says.
    measured = pair_time(fitted.pair.small_batch, A * fitted.pair.small_batch + B + 0.001)
    groups = found(pace_of(pairs=(measured,)))
    assert groups.measured == measured
    assert groups.pair.small_batch > fitted.pair.small_batch
    line = groups.sample_seconds * measured.small_batch + groups.step_seconds
    assert line == pytest.approx(measured.small_seconds)


def test_of_several_measured_pairs_the_nearest_is_named():
    def truth(batch):
        return A * batch + B - 0.0000002 * (batch - 512) ** 2 * 0.05

    pairs = tuple(pair_time(batch, truth(batch)) for batch in (20, 70, 90, 200))
    groups = found(pace_of(pairs=pairs))
    near = min(pairs, key=lambda one: abs(one.small_batch - groups.pair.small_batch))
    assert groups.measured == near


@pytest.mark.parametrize(
    "changes", [{"resolution": 24}, {"small_workers": 2}, {"large_batch": 256}]
)
def test_a_pair_of_another_resolution_group_or_large_batch_does_not_count(changes):
    assert found(pace_of(pairs=(pair_time(80, 0.1, **changes),))).measured is None


def test_measuring_the_planned_pair_again_and_again_ends():
    """As a run does: plan, measure the pair, plan again."""

    def truth(batch):
        return 0.9 * A * batch + 1.2 * B

    pairs: tuple[PairTime, ...] = ()
    for _ in range(4):
        groups = found(pace_of(pairs=pairs), extra=1.1)
        batch = groups.pair.small_batch
        predicted = groups.sample_seconds * batch + groups.step_seconds
        if pairs and predicted == pytest.approx(truth(batch), rel=0.01):
            break
        pairs += (pair_time(batch, truth(batch), large_seconds=truth(512)),)
    else:
        pytest.fail("the plan did not settle")
    times = [
        truth(b) / b * share
        for b, share in zip(groups.local_batch_sizes, groups.samples, strict=True)
    ]
    assert max(times) / min(times) == pytest.approx(1, abs=0.02)


def test_unequal_workers_end_together_and_the_slow_get_less():
    groups = found(pace_of(speeds=(1.0, 0.5, 1.0, 0.5)), small=2)
    fast, slow, small_fast, small_slow = groups.samples
    assert slow == pytest.approx(fast / 2, rel=1e-3)
    assert small_slow == pytest.approx(small_fast / 2, rel=1e-3)
    alone = (A * 512 + B) / 512 * SAMPLES / 3
    assert groups.round_seconds == pytest.approx(1.05 * alone, rel=0.01)


def test_workers_whose_steps_cost_less_end_together_with_the_others():
    overheads = (1.0, 2.0, 0.1, 0.2)
    groups = found(pace_of(overheads=overheads), small=2)
    times = [
        (A + o * B / batch) * share
        for o, batch, share in zip(overheads, groups.local_batch_sizes, groups.samples, strict=True)
    ]
    assert max(times) / min(times) == pytest.approx(1, abs=0.005)
    alone = SAMPLES / sum(1 / (A + o * B / 512) for o in overheads)
    assert groups.round_seconds == pytest.approx(1.05 * alone, rel=0.01)
    assert groups.updates > found(pace_of(overheads=overheads), small=4).updates


def test_exchanges_add_to_the_round():
    once = found(pace_of(exchange=0.5)).round_seconds
    assert once == pytest.approx(found().round_seconds + 0.5)
    # 13125 samples in steps of 512 are 26; the small batches of about 80 need far more.
    often = found(pace_of(exchange=0.001), small=0, exchange_steps=5).round_seconds
    assert often == pytest.approx(found(small=0).round_seconds + 5 * 0.001)


def test_models_that_are_exchanged_more_often_count_by_the_samples_between_exchanges():
    groups = found()
    _, _, large, small = groups.samples
    assert groups.samples_ratio(None) == pytest.approx(small / large, rel=1e-3)
    assert groups.samples_ratio(4) == groups.pair.small_batch / 512


def test_a_share_smaller_than_its_batch_is_refused():
    with pytest.raises(PlanError, match=r"worker 1 gets 2.. samples .* fewer than its local batch"):
        found(pace_of(speeds=(1.0, 0.1, 1.0, 1.0)), samples=8000)


def test_the_most_extra_time_leaves_the_least_batch():
    most = most_extra_time(pace_of(), 32, 512, small_workers=1, most=1.2)
    assert most == 1.2
    most = most_extra_time(pace_of(), 32, 512, small_workers=1, most=2.0)
    assert found(extra=most - 1e-3).pair.small_batch >= 2
    with pytest.raises(PlanError):
        found(extra=most + 0.01)
    assert most_extra_time(pace_of(), 32, 512, small_workers=0, most=2.0) == 1.0
    flat = pace_of(lambda side, batch: A * batch)
    assert most_extra_time(flat, 32, 512, small_workers=1, most=2.0) == 1.0
