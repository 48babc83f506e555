"""`probing.measure.timing`: what a step takes in the long run."""

from math import sqrt
from statistics import fmean, median, stdev

import pytest

from batchwright.probing.commands import Point
from batchwright.probing.course.acquisition import Ledger
from batchwright.probing.measure.timing import mean_step

TAIL = [(0.010, 0.001)] * 7 + [(0.012, 0.004)] * 2 + [(0.011, 0.015)]  # short steps of two workers


def test_a_visit_says_what_a_sum_of_its_steps_takes():
    found, whole = mean_step(TAIL), [sum(step) for step in TAIL]
    assert found.seconds * len(TAIL) == pytest.approx(sum(whole))
    assert found.compute == pytest.approx(fmean(compute for compute, _ in TAIL))
    assert found.sync == pytest.approx(fmean(sync for _, sync in TAIL))
    assert found.error == pytest.approx(stdev(whole) / sqrt(len(whole)) / fmean(whole))
    assert found.seconds > 1.2 * median(whole)


def test_a_suspended_process_counts_for_three_steps():
    found = mean_step([(0.01, 0.0)] * 9 + [(0.9, 0.1)])
    assert found.seconds == pytest.approx(1.2 * 0.01)
    assert found.sync == pytest.approx(0.1 * 0.03 / 10)  # its parts keep their shares


def test_a_single_step_tells_nothing_of_its_scatter():
    assert mean_step([(0.01, 0.002)]) == (pytest.approx(0.01), pytest.approx(0.002), 0.0)


def test_the_ledger_keeps_the_mean_step_of_each_visit():
    ledger, point = Ledger(), Point(2, 8, 16)
    ledger.add(point, TAIL)
    ledger.add(point, TAIL[:7])
    assert ledger.means(point) == [mean_step(TAIL), mean_step(TAIL[:7])]
