"""`prediction.fit`: the line, its interval, and what it cannot tell."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.prediction.fit import UNKNOWN_RELATIVE_ERROR, fit_line, student_t_975

BATCHES = [16, 32, 64, 128, 256, 512]


@given(st.floats(1e-4, 1), st.floats(1e-6, 1e-2))
def test_an_exact_line_is_recovered_without_error(intercept, slope):
    line = fit_line(BATCHES, [intercept + slope * x for x in BATCHES])
    assert line.intercept == pytest.approx(intercept, rel=1e-6, abs=1e-9)
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-12)
    estimate = line.predict(1024)
    assert estimate.high - estimate.low < 1e-4 * estimate.value
    assert not line.caveat


def test_bytes_of_a_real_size_are_fitted_exactly():
    line = fit_line([64, 512], [44_868_567, 358_654_935])
    assert line.at(64) == pytest.approx(44_868_567, rel=1e-9)
    assert line.at(512) == pytest.approx(358_654_935, rel=1e-9)


def test_the_interval_holds_a_new_measurement_about_95_times_in_100():
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        noisy = {x: (0.01 + 0.0005 * x) * (1 + rng.gauss(0, 0.03)) for x in [*BATCHES, 100]}
        new = noisy.pop(100)
        estimate = fit_line(list(noisy), list(noisy.values())).predict(100)
        held += estimate.low <= new <= estimate.high
    assert 0.93 < held / 2000 < 0.97


def test_errors_are_relative_so_small_batches_count_as_much():
    ys = [0.01 + 0.0005 * x for x in BATCHES]
    ys[-1] *= 1.1
    line = fit_line(BATCHES, ys)
    assert line.at(16) == pytest.approx(ys[0], rel=0.03)


def test_a_negative_intercept_is_pinned_to_the_origin():
    line = fit_line([1, 2, 4], [1, 3, 8])
    assert line.intercept == 0
    assert "proportional" in line.caveat
    assert line.degrees == 2


def test_a_falling_line_is_pinned_to_a_constant():
    line = fit_line([1, 2, 4], [3.0, 2.9, 2.8])
    assert line.slope == 0
    assert "constant" in line.caveat
    assert line.predict(100).value == pytest.approx(2.9, rel=0.02)


def test_one_point_is_taken_as_proportional_and_flagged():
    line = fit_line([64], [0.5])
    assert line.at(128) == pytest.approx(1.0)
    assert "only x = 64" in line.caveat
    assert line.relative_error is None
    assert line.predict(64).high == pytest.approx(0.5 * (1 + 2 * UNKNOWN_RELATIVE_ERROR))


def test_two_points_give_a_line_whose_interval_is_assumed():
    line = fit_line([16, 64], [0.5, 1.1])
    assert line.at(64) == pytest.approx(1.1)
    assert "assumed" in line.caveat


def test_the_interval_widens_away_from_the_points():
    line = fit_line(BATCHES, [y * wobble for y, wobble in zip(BATCHES, [1, 1.1] * 3, strict=True)])
    inside, outside = line.predict(64), line.predict(4)
    assert outside.high / outside.value >= inside.high / inside.value


@pytest.mark.parametrize(
    ("xs", "ys"),
    [([], []), ([1], [1, 2]), ([1, 2], [1, 0]), ([0, 2], [1, 2]), ([1, 2], [1, float("inf")])],
)
def test_points_that_make_no_sense_are_refused(xs, ys):
    with pytest.raises(ValueError, match=r"line needs|is not positive"):
        fit_line(xs, ys)


@pytest.mark.parametrize("degrees", [1, 2, 5, 10, 11, 15, 30, 1000])
def test_students_t_agrees_with_scipy(degrees):
    stats = pytest.importorskip("scipy.stats")
    assert student_t_975(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-4)
