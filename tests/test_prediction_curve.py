"""`prediction.curve`: straight or bent, what lies between, and how sure it is."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.prediction.curve import DOUBLING_ERROR, borrow_curve, fit_curve

BATCHES = (8, 16, 32, 64, 128)


def straight(batch):
    return 0.005 + 0.0004 * batch


def bent(batch):
    """A third slower beyond 64, as when memory goes back to the kernel."""
    return straight(batch) * (1.33 if batch > 64 else 1)


def saturating(batch):
    """Flat until the device is full."""
    return max(0.02, 0.0005 * batch)


def curve_of(truth, error=0.02, batches=BATCHES, seed=None):
    rng = random.Random(seed)
    noise = error if seed is not None else 0.0
    seconds = [truth(b) * (1 + rng.gauss(0, noise)) for b in batches]
    return fit_curve(batches, seconds, [error] * len(batches))


@given(st.floats(1e-4, 1), st.floats(1e-6, 1e-2), st.floats(0.005, 0.05), st.integers(0, 2**32 - 1))
def test_known_parameters_are_recovered_from_noisy_points(beta, a, error, seed):
    curve = curve_of(lambda b: beta + a * b, error, seed=seed)
    # Five standard errors at the ends; where the line is pinned it fits no worse there.
    for batch in (BATCHES[0], BATCHES[-1]):
        truth = beta + a * batch
        assert curve.line.at(batch) == pytest.approx(truth, rel=5.5 * error)


def test_slope_and_fixed_part_are_exact_without_noise():
    curve = curve_of(straight)
    assert curve.line.intercept == pytest.approx(0.005)
    assert curve.line.slope == pytest.approx(0.0004)
    assert curve.linear
    assert curve.misfit == pytest.approx(0, abs=1e-9)


def test_a_straight_curve_is_nearly_always_taken_for_straight():
    verdicts = [curve_of(straight, 0.03, seed=seed).linear for seed in range(300)]
    assert sum(verdicts) >= 290


@pytest.mark.parametrize("truth", [bent, saturating])
def test_a_bent_curve_is_nearly_always_taken_for_bent(truth):
    verdicts = [curve_of(truth, 0.03, seed=seed).linear for seed in range(300)]
    assert sum(verdicts) <= 15


def test_three_points_show_a_bend_beyond_their_scatter():
    assert not curve_of(saturating, batches=(8, 32, 128)).linear
    assert curve_of(saturating, 0.5, batches=(8, 32, 128)).linear


def test_a_bent_curve_goes_through_its_points_and_straight_between_them():
    curve = curve_of(bent)
    assert "bent" in curve.caveat
    for batch in BATCHES:
        assert curve.at(batch) == pytest.approx(bent(batch))
    assert curve.at(96) == pytest.approx((bent(64) + bent(128)) / 2)


def test_beyond_a_bent_curve_there_is_no_jump():
    curve = curve_of(bent)
    assert curve.at(129) == pytest.approx(bent(128), rel=0.02)
    assert curve.at(256) > 1.5 * bent(128)
    assert 0 < curve.at(4) < curve.at(8)


def test_the_error_is_largest_between_points_of_a_bent_curve_and_beyond_them():
    curve = curve_of(bent)
    at_a_point, between, beyond = (curve.standard_error(b) for b in (64, 96, 512))
    assert between > at_a_point
    assert beyond > at_a_point
    assert at_a_point == pytest.approx(0.02)


def test_each_doubling_beyond_the_points_adds_to_the_error():
    curve = curve_of(straight)
    assert curve.standard_error(512) > 2 * DOUBLING_ERROR
    assert curve.standard_error(512) > curve.standard_error(256) > curve.standard_error(128)
    assert curve.extrapolates(129)
    assert curve.extrapolates(7)
    assert not curve.extrapolates(100)


def test_two_points_leave_room_for_a_bend_between_them():
    curve = curve_of(straight, 0.01, batches=(8, 128))
    assert "two points" in curve.caveat
    assert curve.standard_error(64) > 0.04
    assert curve.standard_error(128) == pytest.approx(0.01)


def test_noisier_points_weigh_less():
    seconds = [straight(b) for b in BATCHES]
    seconds[2] *= 1.3
    errors = [0.01, 0.01, 0.3, 0.01, 0.01]
    curve = fit_curve(BATCHES, seconds, errors)
    assert curve.linear
    assert curve.at(32) == pytest.approx(straight(32), rel=0.01)


def test_the_line_is_as_sure_as_simulation_says():
    misses = []
    for seed in range(1000):
        curve = curve_of(straight, 0.03, seed=seed)
        misses.append((curve.line.at(48) / straight(48) - 1) / curve.line.own_error(48))
    held = sum(abs(miss) < 1.96 for miss in misses) / len(misses)
    assert 0.93 < held < 0.97


@pytest.mark.parametrize("truth", [straight, bent])
def test_a_single_point_borrows_the_shape_of_another_curve(truth):
    shape = curve_of(truth)
    curve = borrow_curve(shape, 32, 2 * truth(32), 0.02, "resolution 24 with 1 worker")
    for batch in (8, 32, 128):
        assert curve.at(batch) == pytest.approx(2 * truth(batch))
    assert curve.standard_error(32) > shape.standard_error(32)
    assert curve.extrapolates(33)
    assert "resolution 24" in curve.caveat


@pytest.mark.parametrize("level", [1.0, 3.0])
def test_scatter_of_the_last_points_tilts_what_lies_beyond_them(level):
    """As simulation says, for a bent curve, where a line's own scatter does not count."""
    batches, error, far = (8, 16, 32, 64), 0.03, 512
    seconds = {8: 0.1, 16: 0.1, 32: 0.1, 64: 0.1 + 0.1 * level}
    slope = (seconds[64] - seconds[32]) / 32
    rng, found = random.Random(3), []
    for _ in range(500):
        drawn = [y * math.exp(rng.gauss(0, error)) for y in seconds.values()]
        curve = fit_curve(batches, drawn, [error] * len(batches))
        found.append(curve.at(far))
    assert not curve.linear
    truth = seconds[64] + slope * (far - 64)
    scatter = statistics.pstdev(found) / truth
    assert curve.standard_error(far) > scatter
    assert curve.standard_error(far) < 3 * max(scatter, 3 * DOUBLING_ERROR)


def test_beyond_steps_that_wait_for_their_host_it_goes_on_as_the_large_ones_do():
    """As measured on an H100: 8 ms up to some 256 images, from there on 16 us an image."""

    def seconds(batch):
        return max(0.008, 0.0036 + 16e-6 * batch)

    batches = [16, 32, 64, 128, 256, 512, 1024, 2048]
    curve = fit_curve(batches, [seconds(b) for b in batches], [0.01] * len(batches))
    assert not curve.linear
    for batch in (2500, 4096, 10_000):
        assert curve.at(batch) == pytest.approx(seconds(batch), rel=1e-9)
