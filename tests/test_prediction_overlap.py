"""`prediction.overlap`: one after the other, hidden, and between."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchwright.prediction.overlap import FULL_OVERLAP, combine, fit_overlap
from example_counts import examples

positive = st.floats(1e-4, 10)


@given(positive, positive, st.floats(1, 10))
def test_a_step_takes_at_least_the_longer_part_and_at_most_both(compute, exchange, overlap):
    step = combine(compute, exchange, overlap)
    assert max(compute, exchange) * (1 - 1e-9) <= step <= (compute + exchange) * (1 + 1e-9)


def test_the_ends_are_a_sum_and_nearly_the_longer_part():
    assert combine(0.3, 0.1, 1.0) == pytest.approx(0.4)
    assert combine(0.3, 0.1, FULL_OVERLAP) == pytest.approx(0.3, rel=1e-4)
    assert combine(0.3, 0.0, 3.0) == 0.3


def steps_of(overlap, rng, error, exchange=0.1):
    return [
        (compute, exchange, combine(compute, exchange, overlap) * (1 + rng.gauss(0, error)), error)
        for compute in (0.03, 0.06, 0.1, 0.15, 0.3)
        for _ in range(3)
    ]


@examples(50)
@given(st.floats(1, 4), st.integers(0, 2**32 - 1))
def test_a_known_overlap_is_recovered_from_noisy_steps(overlap, seed):
    found = fit_overlap(steps_of(overlap, random.Random(seed), 0.01))
    assert found is not None
    # Steps tell the exposed share; the exponent follows from it, less sharply where it is large.
    assert combine(0.1, 0.1, found) == pytest.approx(combine(0.1, 0.1, overlap), rel=0.02)
    assume(overlap < 2)
    assert found == pytest.approx(overlap, rel=0.12)


def test_a_short_exchange_does_not_tell_the_overlap():
    assert fit_overlap(steps_of(2.0, random.Random(0), 0.03, exchange=0.0005)) is None
    assert fit_overlap([]) is None
