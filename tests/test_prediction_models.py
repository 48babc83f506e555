"""`prediction.step_time`, `memory` and `collective`: recovery, interpolation, limits."""

import pytest

from batchwright.prediction.collective import all_reduce_seconds
from batchwright.prediction.memory import fit_memory
from batchwright.prediction.step_time import fit_step_time
from batchwright.records import CollectiveTime, MemoryPoint, StepTime

BATCHES = (16, 32, 64, 128)


def step_point(batch, compute, sync=0.003, scatter=0.01):
    step = compute + sync
    return StepTime(
        resolution=32,
        local_batch_size=batch,
        workers=2,
        compute_seconds=compute,
        sync_seconds=sync,
        step_seconds=step,
        step_low=(1 - scatter) * step,
        step_high=(1 + scatter) * step,
        repeats=10,
    )


def linear_points():
    return [step_point(b, 0.005 + 0.0004 * b) for b in BATCHES]


def bent_points():
    """A line up to 64, then a third slower, as when memory goes back to the kernel."""
    return [step_point(b, (0.005 + 0.0004 * b) * (1.33 if b > 64 else 1)) for b in BATCHES]


def test_a_linear_step_time_is_recovered_everywhere():
    model = fit_step_time(linear_points())
    for batch in (8, 16, 100, 128, 512):
        expected = 0.008 + 0.0004 * batch
        estimate = model.predict(batch, [batch])
        assert estimate.value == pytest.approx(expected)
        assert estimate.low < expected < estimate.high
    assert not model.extrapolates(100)
    assert model.extrapolates(8)
    assert model.extrapolates(129)


def test_a_bent_step_time_keeps_to_the_measured_points():
    points = bent_points()
    model = fit_step_time(points)
    for point in points:
        size = point.local_batch_size
        assert model.predict(size, [size]).value == pytest.approx(point.step_seconds)
    halfway = (points[-1].step_seconds + points[-2].step_seconds) / 2
    assert model.predict(96, [96]).value == pytest.approx(halfway)


def test_a_bend_within_the_scatter_of_the_points_is_smoothed_by_the_line():
    wobbles = (1.15, 0.9, 1.15, 0.9)
    seconds = [(0.005 + 0.0004 * b) * w for b, w in zip(BATCHES, wobbles, strict=True)]
    quiet, noisy = (
        fit_step_time(
            [step_point(b, s, scatter=scatter) for b, s in zip(BATCHES, seconds, strict=True)]
        )
        for scatter in (0.01, 0.3)
    )
    assert quiet.compute.at(64) == pytest.approx(seconds[2])
    assert noisy.compute.at(64) == noisy.compute.line.at(64)


def test_beyond_bent_points_the_prediction_goes_on_without_a_jump():
    points = bent_points()
    model = fit_step_time(points)
    edge = points[-1].step_seconds
    assert model.predict(129, [129]).value == pytest.approx(edge, rel=0.02)
    assert model.predict(256, [256]).value > 1.5 * edge
    assert model.predict(4, [4]).value > 0
    widths = [model.compute.standard_error(batch) for batch in (128, 96, 256)]
    assert widths[0] < widths[1]
    assert widths[0] < widths[2]


def test_accumulation_exchanges_gradients_once():
    model = fit_step_time(linear_points())
    whole = model.predict(64, [64]).value
    split = model.predict(64, [32, 32]).value
    assert split == pytest.approx(whole + 0.005)
    with pytest.raises(ValueError, match="64"):
        model.predict(64, [32, 16])


def test_a_jumpy_exchange_does_not_bend_computing():
    syncs = (0.0007, 0.004, 0.001, 0.0039)
    points = [
        step_point(b, 0.003 + 0.00002 * b, sync=s, scatter=0.3)
        for b, s in zip(BATCHES, syncs, strict=True)
    ]
    model = fit_step_time(points)
    assert model.compute.at(64) == pytest.approx(0.003 + 0.00002 * 64)
    estimate = model.predict(64, [64])
    assert 0.001 < estimate.value - model.compute.at(64) < 0.0039
    assert 0 < estimate.low < 0.8 * estimate.value


def test_waiting_that_grows_with_the_batch_is_seen():
    points = [step_point(b, 0.005 + 0.0004 * b, sync=0.002 + 0.00004 * b) for b in BATCHES]
    expected = 0.007 + 0.00044 * 512
    assert fit_step_time(points).predict(512, [512]).value == pytest.approx(expected)


def test_one_worker_exchanges_nothing():
    model = fit_step_time([step_point(b, 0.01 * b, sync=0.0) for b in BATCHES])
    assert model.predict(64, [64]).value == pytest.approx(0.64)


def test_points_may_come_in_any_order():
    assert fit_step_time(linear_points()[::-1]) == fit_step_time(linear_points())


def test_memory_is_a_line_and_its_inverse_is_consistent():
    points = [
        MemoryPoint(resolution=32, local_batch_size=b, peak_bytes=1_250_000 + 668_000 * b)
        for b in BATCHES
    ]
    model = fit_memory(points)
    assert model.predict(512).value == pytest.approx(1_250_000 + 668_000 * 512)
    for limit in (1_000_000, 2_000_000, 50_000_000, 10**9):
        largest = model.largest_batch(limit, 10_000)
        assert not model.fits(largest + 1, limit)
        assert largest == 0 or model.fits(largest, limit)
    assert model.largest_batch(10**12, 300) == 300


def test_all_reduce_time_is_interpolated_and_limited_by_latency_and_bandwidth():
    points = [
        CollectiveTime(bytes=size, workers=2, seconds=s, low=s, high=s, repeats=20)
        for size, s in ((40_000, 0.0026), (4_000_000, 0.0033), (44_000_000, 0.028))
    ]
    assert all_reduce_seconds(4, points) == 0.0026
    assert all_reduce_seconds(40_000, points) == 0.0026
    assert all_reduce_seconds(4_000_000, points) == pytest.approx(0.0033)
    assert all_reduce_seconds(24_000_000, points) == pytest.approx((0.0033 + 0.028) / 2)
    assert all_reduce_seconds(88_000_000, points) == pytest.approx(0.056)
