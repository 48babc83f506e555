"""`prediction.noise_scale`: unbiased for any split, averaged before dividing."""

import json
from dataclasses import asdict
from math import nan

import numpy as np
import pytest

from batchwright.prediction.noise_scale import NoiseState, estimate

DIMENSIONS = 20
TRUE_GRADIENT = np.full(DIMENSIONS, 0.3)
DEVIATION = np.linspace(0.5, 2.0, DIMENSIONS)
TRUE_TRACE = float(np.sum(DEVIATION**2))
TRUE_SQR_NORM = float(np.sum(TRUE_GRADIENT**2))


def norms(rng, sizes, draws):
    """S and |g|^2 of mean gradients over parts of the given sizes, each of so many draws."""
    noise = rng.standard_normal((draws, len(sizes), DIMENSIONS)) * DEVIATION
    parts = TRUE_GRADIENT + noise / np.sqrt(np.array(sizes))[:, None]
    shares = np.array(sizes) / sum(sizes)
    whole = shares @ parts
    return np.sum(parts**2, axis=2) @ shares, np.sum(whole**2, axis=1)


@pytest.mark.parametrize(
    "sizes",
    [(64, 64), (85, 43), (8, 24, 32, 64), pytest.param((1,) * 128, marks=pytest.mark.slow)],
)
def test_estimates_are_unbiased_for_any_split(sizes):
    rng = np.random.default_rng(0)
    drawn = np.hstack(
        [estimate(*norms(rng, sizes, 1000), parts=len(sizes), batch=128) for _ in range(20)]
    )
    error = drawn.std(axis=1) / np.sqrt(drawn.shape[1])
    trace, sqr_norm = drawn.mean(axis=1)
    assert abs(trace - TRUE_TRACE) < 4 * error[0]
    assert abs(sqr_norm - TRUE_SQR_NORM) < 4 * error[1]


def test_averaging_finds_the_noise_scale():
    rng = np.random.default_rng(1)
    state = NoiseState()
    for both in zip(*norms(rng, (85, 43), 5000), strict=True):
        state = state.update(*map(float, both), parts=2, batch=128)
    assert state.noise_scale == pytest.approx(TRUE_TRACE / TRUE_SQR_NORM, rel=0.1)


def test_a_decay_forgets_the_past_and_without_one_all_count_the_same():
    plain = forgetting = NoiseState()
    for trace in [1.0] * 50 + [3.0] * 50:
        norms_of = {"weighted_sqr_norm": trace + 1, "sqr_norm": 1.0, "parts": 2, "batch": 1}
        plain = plain.update(**norms_of)
        forgetting = forgetting.update(**norms_of, decay=0.9)
    assert plain.trace == pytest.approx(2.0)
    assert forgetting.trace == pytest.approx(3.0, rel=0.01)


def test_there_is_no_noise_scale_before_the_first_step_or_without_signal():
    assert NoiseState().noise_scale is None
    assert NoiseState().update(3.0, 1.0, parts=2, batch=8).noise_scale is None


def test_a_step_that_is_not_finite_leaves_no_trace():
    state = NoiseState().update(1.2, 1.0, parts=2, batch=8)
    assert state.update(nan, 1.0, parts=2, batch=8) is state


def test_one_part_cannot_tell_noise_from_signal():
    with pytest.raises(ValueError, match="parts=1"):
        estimate(1.0, 1.0, parts=1, batch=8)


def test_the_state_survives_a_checkpoint():
    state = NoiseState().update(1.2, 1.0, parts=2, batch=8)
    assert NoiseState(**json.loads(json.dumps(asdict(state)))) == state
