"""`prediction.fit`: the line, its error, and what the points do not identify."""

import random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.prediction.fit import (
    between,
    choose_line,
    fit_line,
    interval_in_ratio,
    leave_one_out,
    root_mean_square,
    student_t_975,
)

BATCHES = [16, 32, 64, 128, 256, 512]


@given(st.floats(1e-4, 1), st.floats(1e-6, 1e-2))
def test_an_exact_line_is_recovered_without_error(intercept, slope):
    line = fit_line(BATCHES, [intercept + slope * x for x in BATCHES])
    assert line.intercept == pytest.approx(intercept, rel=1e-6, abs=1e-9)
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-12)
    assert line.at(1024) == pytest.approx(intercept + slope * 1024, rel=1e-6)
    assert line.relative_error is not None
    assert line.relative_error < 1e-5
    assert not line.caveat


def test_bytes_of_a_real_size_are_fitted_exactly():
    line = fit_line([64, 512], [44_868_567, 358_654_935])
    assert line.at(64) == pytest.approx(44_868_567, rel=1e-9)
    assert line.at(512) == pytest.approx(358_654_935, rel=1e-9)


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
    assert line.at(100) == pytest.approx(2.9, rel=0.02)


def test_one_point_is_taken_as_proportional_and_flagged():
    line = fit_line([64], [0.5])
    assert line.at(128) == pytest.approx(1.0)
    assert "only x = 64" in line.caveat
    assert line.relative_error is None


def test_two_points_give_a_line_whose_interval_is_assumed():
    line = fit_line([16, 64], [0.5, 1.1])
    assert line.at(64) == pytest.approx(1.1)
    assert "assumed" in line.caveat


def test_the_error_of_the_line_is_larger_away_from_the_points():
    ys = [(1 + x) * wobble for x, wobble in zip(BATCHES, [1, 1.1] * 3, strict=True)]
    line = fit_line(BATCHES, ys)
    assert line.intercept > 0
    assert line.own_error(4) > line.own_error(64)


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


def test_an_interval_of_ratios_reaches_further_up_than_down_and_stays_positive():
    estimate = interval_in_ratio(2.0, 1.5)
    assert estimate.low * estimate.high == pytest.approx(4.0)
    assert estimate.high - 2 > 2 - estimate.low > 0
    assert estimate.low > 0


def test_pieces_go_through_their_points_and_straight_between_them():
    assert between([1, 2, 6], [1.0, 3.0, 5.0], 2) == 3.0
    assert between([1, 2, 6], [1.0, 3.0, 5.0], 4) == 4.0


@given(st.floats(0.01, 100))
def test_a_scaled_line_is_the_line_of_scaled_points(factor):
    ys = [0.01 + 0.0005 * x * (1 + 0.1 * (x % 3)) for x in BATCHES]
    line = fit_line(BATCHES, ys).scaled(factor)
    again = fit_line(BATCHES, [factor * y for y in ys])
    for x in (16, 100, 2000):
        assert line.at(x) == pytest.approx(again.at(x))
        assert line.own_error(x) == pytest.approx(again.own_error(x))


def test_the_lines_own_error_is_the_spread_of_lines_through_other_samples():
    rng = random.Random(0)
    truth = [0.01 + 0.0005 * x for x in BATCHES]
    found = []
    for _ in range(2000):
        ys = [y * (1 + rng.gauss(0, 0.03)) for y in truth]
        found.append(fit_line(BATCHES, ys, [0.03 * y for y in truth]).at(100) / 0.06 - 1)
    expected = fit_line(BATCHES, truth, [0.03 * y for y in truth]).own_error(100)
    assert root_mean_square(found) == pytest.approx(expected, rel=0.06)


def test_points_left_out_are_predicted_from_the_others_alone():
    errors = leave_one_out([1, 2, 3, 5], [1.0, 4.0, 3.0, 5.0], [1.0] * 4)
    # The second, left out, lies on the line through the others; so does what pieces say.
    assert errors.line[0] == pytest.approx(2 / 4 - 1)
    assert errors.pieces[0] == pytest.approx(2 / 4 - 1)
    assert errors.pieces[1] == pytest.approx((4 + 1 / 3) / 3 - 1)
    assert leave_one_out([1, 2], [1.0, 2.0], [1.0, 1.0]).line == ()


@pytest.mark.parametrize(("scatter", "kept"), [(0.3, True), (0.02, False)])
def test_the_line_is_kept_while_the_points_scatter_as_much_as_they_bend(scatter, kept):
    ys = [max(1.0, x / 64) for x in BATCHES]
    scales = [scatter * y for y in ys]
    line = fit_line(BATCHES, ys, scales)
    assert choose_line(line, len(ys), leave_one_out(BATCHES, ys, scales)) is kept


def test_points_that_scatter_more_than_they_should_keep_a_line_that_predicts_clearly_better():
    ys = [1 + x / 64 for x in BATCHES]
    ys[2] *= 1.2  # its neighbours suffer in pieces, hardly in a line
    ys[3] *= 0.8
    scales = [0.02 * y for y in ys]
    line = fit_line(BATCHES, ys, scales)
    assert choose_line(line, len(ys), leave_one_out(BATCHES, ys, scales))


def test_the_error_of_a_ratio_of_two_places_is_the_spread_of_such_ratios():
    rng = random.Random(0)
    truth = [0.02 + 0.001 * x for x in BATCHES]
    ratios = []
    for _ in range(1000):
        ys = [y * (1 + 0.03 * rng.gauss(0, 1)) for y in truth]
        line = fit_line(BATCHES, ys, truth)
        ratios.append(line.at(400) / line.at(200))
    told = 0.03 * fit_line(BATCHES, truth, truth).ratio_error(400, 200)
    assert told == pytest.approx(stdev(ratios) / fmean(ratios), rel=0.1)
    line = fit_line(BATCHES, truth, truth)
    assert line.ratio_error(200, 200) == 0
    assert line.ratio_error(200, 400) == pytest.approx(line.ratio_error(400, 200))
