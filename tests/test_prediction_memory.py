"""`prediction.memory`: bounds that hold for any step, and the largest batch within a limit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import PlanError
from batchwright.prediction.memory import (
    HELD,
    RESIDENT_ERROR,
    fit_memory,
    max_local_batch_size,
)
from batchwright.records import MemoryParts, MemoryPoint, OutOfMemory
from samples import make_profile

PARTS = MemoryParts(
    parameters=300_000, buffers=10_000, gradients=300_000, optimizer=300_000, reduction=300_000
)
ALWAYS = 610_000
FLOOR = 910_000


def memory_point(batch, peak, *, resolution=32, workers=1, resident=None):
    return MemoryPoint(
        resolution=resolution,
        local_batch_size=batch,
        peak_bytes=round(peak),
        workers=workers,
        resident_bytes=resident,
    )


def straight(batch, resolution=32):
    return FLOOR + 668_000 * batch * (resolution / 32) ** 2


moments = st.lists(
    st.tuples(st.integers(0, 50_000_000), st.integers(0, 1_000_000)), min_size=1, max_size=6
)
batch_sets = st.sets(st.integers(1, 500), min_size=1, max_size=5)


@given(moments, batch_sets, st.integers(1, 3000))
def test_the_interval_holds_the_peak_of_any_step(others, batches, asked):
    """A step is moments with fixed bytes and bytes per sample; the update is one of them."""
    steps = [(FLOOR, 0), *((ALWAYS + fixed, each) for fixed, each in others)]

    def peak(batch):
        return max(fixed + each * batch for fixed, each in steps)

    model = fit_memory([memory_point(b, peak(b)) for b in batches], PARTS)
    estimate = model.predict(32, asked)
    assert estimate.low <= peak(asked) <= estimate.high
    assert estimate.low <= estimate.value <= estimate.high


@given(moments, batch_sets, st.integers(500_000, 2_000_000_000))
def test_the_largest_batch_fits_and_one_more_is_not_sure_to(others, batches, limit):
    steps = [(FLOOR, 0), *((ALWAYS + fixed, each) for fixed, each in others)]
    model = fit_memory([memory_point(b, max(f + g * b for f, g in steps)) for b in batches], PARTS)
    largest = model.largest_batch(32, limit, 2000)
    assert largest == 0 or model.predict(32, largest).high <= limit
    assert largest == 2000 or model.predict(32, largest + 1).high > limit


@given(st.integers(10_000, 5_000_000), st.integers(0, 30_000_000), st.integers(9, 4000))
def test_bytes_per_sample_and_the_fixed_part_of_a_straight_peak_are_recovered(each, more, asked):
    model = fit_memory([memory_point(b, FLOOR + more + each * b) for b in (8, 64, 256)], PARTS)
    assert model.bytes_per_sample(32) == pytest.approx(each)
    truth = FLOOR + more + each * asked
    assert model.predict(32, asked).value == pytest.approx(truth)


def test_between_points_of_a_straight_peak_the_bounds_meet():
    model = fit_memory([memory_point(b, straight(b)) for b in (8, 64, 128, 256)], PARTS)
    estimate = model.predict(32, 100)
    assert estimate.value == pytest.approx(straight(100))
    assert estimate.high <= 1.006 * straight(100)
    assert not model.notes


def test_without_parts_bounds_still_hold_but_are_wider():
    points = [memory_point(b, straight(b)) for b in (8, 64)]
    known, unknown = fit_memory(points, PARTS), fit_memory(points)
    assert unknown.predict(32, 512).high > known.predict(32, 512).high > straight(512)
    assert any("not counted" in note for note in unknown.notes)


def test_accumulating_keeps_gradients_beside_the_activations():
    model = fit_memory([memory_point(b, straight(b)) for b in (8, 64)], PARTS)
    once, again = (model.predict(32, 64, accumulates=a) for a in (False, True))
    assert again.value - once.value == pytest.approx(PARTS.gradients)
    assert again.high > once.high
    unknown = fit_memory([memory_point(8, straight(8))])
    assert unknown.predict(32, 8, accumulates=True).high > 1.4 * straight(8)


def test_several_workers_need_buffers_to_exchange_gradients():
    model = fit_memory([memory_point(b, straight(b)) for b in (8, 64)], PARTS)
    assert model.predict(32, 64, workers=4).value == pytest.approx(straight(64) + 300_000)
    both = [memory_point(64, straight(64) + 300_000, workers=2), memory_point(64, straight(64))]
    measured = fit_memory(both, PARTS)
    assert measured.predict(32, 64, workers=2).value == straight(64) + 300_000
    assert measured.predict(32, 64, workers=8).value == straight(64) + 300_000
    assert measured.predict(32, 64).value == straight(64)
    together = fit_memory(both[:1], PARTS).predict(32, 64)
    assert together.value == straight(64)
    assert together.low < straight(64) < straight(64) + 300_000 < together.high


@pytest.mark.parametrize("resolution", [26, 28, 36, 44])
def test_between_resolutions_peaks_may_grow_faster_than_the_pixels(resolution):
    """As with attention over all pixels: bounds hold what is likely, and what is so."""

    def peak(batch, side):
        return FLOOR + 668_000 * batch * (side / 32) ** 4

    points = [memory_point(b, peak(b, r), resolution=r) for b in (8, 64) for r in (24, 48)]
    model = fit_memory(points, PARTS)
    estimate = model.predict(resolution, 32)
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.low <= peak(32, resolution) <= estimate.high
    fitting = model.largest_batch(resolution, 100_000_000, 10_000)
    assert peak(fitting, resolution) <= 100_000_000


@pytest.mark.parametrize("resolution", [16, 24, 40, 48, 96])
def test_other_resolutions_lie_between_the_measured_ones_or_grow_with_the_pixels(resolution):
    points = [memory_point(b, straight(b, r), resolution=r) for b in (8, 64) for r in (24, 48)]
    model = fit_memory(points, PARTS)
    estimate = model.predict(resolution, 32)
    assert estimate.low <= straight(32, resolution) <= estimate.high
    assert estimate.value == pytest.approx(straight(32, resolution), rel=0.02)
    assert model.bytes_per_sample(96) == pytest.approx(9 * 668_000)
    assert model.resolutions == (24, 48)


def test_points_that_are_not_convex_widen_the_margin_and_are_told():
    peaks = {8: 10_000_000, 16: 20_000_000, 32: 36_000_000}  # rises less and less
    model = fit_memory([memory_point(b, p) for b, p in peaks.items()], device="cpu")
    assert model.margin > 0.05
    assert any("convex" in note for note in model.notes)
    assert model.predict(32, 16).high > 20_000_000


def test_cuda_blocks_need_a_wider_margin():
    points = [memory_point(b, straight(b)) for b in (8, 64)]
    cpu, cuda = (fit_memory(points, PARTS, device=d).predict(32, 32) for d in ("cpu", "cuda"))
    assert cuda.high > 1.02 * cpu.high


def test_the_resident_size_has_an_interval_of_about_a_tenth():
    points = [memory_point(b, straight(b), resident=300_000_000 + 700_000 * b) for b in (8, 64)]
    model = fit_memory(points, PARTS)
    estimate = model.resident(32, 32)
    assert estimate.value == pytest.approx(322_400_000, rel=0.02)
    assert estimate.high >= 1.1 * estimate.value
    assert model.resident(48, 32) is None
    assert fit_memory([memory_point(8, straight(8))], PARTS).resident(32, 8) is None


def test_small_batches_whose_resident_sizes_scatter_do_not_set_the_slope():
    sizes = {
        2: 340_000_000,
        4: 352_000_000,
        8: 349_000_000,
    }  # a line through these: 1.4 MB a sample
    points = [memory_point(b, straight(b), resident=size) for b, size in sizes.items()]
    estimate = fit_memory(points, PARTS).resident(32, 256)
    true = 347_000_000 + 1.5 * (straight(256) - straight(5))
    assert estimate.low < true < estimate.high
    assert estimate.value == pytest.approx(true, rel=0.05)
    assert estimate.high - estimate.low > 2 * 0.5 * straight(256)  # the slope is not known better


def test_what_earlier_steps_of_a_probe_have_left_is_not_predicted():
    line = {size: int(300_000_000 + 1.5 * straight(size)) for size in (4, 8, 16)}
    sizes = {4: line[4], 8: line[8] + 20_000_000, 16: line[16] + 20_000_000}
    points = [memory_point(b, straight(b), resident=size) for b, size in sizes.items()]
    estimate = fit_memory(points, PARTS).resident(32, 16)
    assert estimate.value == pytest.approx(line[16], rel=0.02)
    on_gpu = fit_memory(points, PARTS, device="cuda").resident(32, 16)  # nothing is left there
    assert on_gpu.value > estimate.value + 10_000_000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_resident_size_beside_a_measured_one_has_the_errors_of_both(device):
    """On the CPU of the lowest point, through which the line goes; on a GPU of the mean of all."""
    line = {size: int(300_000_000 + 1.5 * straight(size)) for size in (7, 8, 9)}
    points = [
        memory_point(b, straight(b), resident=size + (b != 8) * 10_000) for b, size in line.items()
    ]
    estimate = fit_memory(points, PARTS, device=device).resident(32, 8)
    errors = 2 if device == "cpu" else 1 + 1 / 3
    half = 2 * RESIDENT_ERROR * estimate.value * math.sqrt(errors)
    assert estimate.high - estimate.value == pytest.approx(half, rel=0.01)


def test_where_pieces_are_kept_apart_a_training_holds_more_and_the_interval_has_a_step_too():
    points = [memory_point(b, straight(b), resident=345_000_000) for b in (2, 8)]
    joined, apart = (fit_memory(points, PARTS, apart=a).resident(32, 256) for a in (False, True))
    assert apart.value - joined.value == pytest.approx(HELD * (straight(256) - FLOOR))
    assert apart.low < joined.value < apart.high


@pytest.mark.parametrize(
    ("points", "message"),
    [([], "no memory peaks"), ([memory_point(8, 500_000)], "batch 8 .*measure it again")],
)
def test_bad_points_are_refused_in_one_line(points, message):
    with pytest.raises(PlanError, match=message) as error:
        fit_memory(points, PARTS)
    assert "\n" not in str(error.value)


def test_the_largest_local_batch_of_a_profile_surely_fits_its_limit():
    profile = make_profile(memory_parts=PARTS)
    model = fit_memory(profile.memory, PARTS)
    for limit in (5_000_000, 20_000_000, 40_000_000):
        largest = max_local_batch_size(profile, limit=limit, workers=1)
        truth = [1_250_000 + 668_000 * b for b in (largest, largest + 1)]
        assert truth[0] <= limit < 1.05 * truth[1]
        assert largest == 0 or model.predict(32, largest).high <= limit
    assert max_local_batch_size(profile, limit=100) == 0


def test_the_largest_local_batch_leaves_room_for_an_average():
    extra = 10_000_000
    network = make_profile().network.model_copy(update={"trained_bytes": extra})
    profile = make_profile(memory_parts=PARTS, network=network)
    job = profile.job.model_copy(update={"average_weights": "on"})
    averaging = make_profile(memory_parts=PARTS, network=network, job=job)
    for limit in (20_000_000, 40_000_000):
        largest = max_local_batch_size(averaging, limit=limit + extra)
        assert largest == max_local_batch_size(profile, limit=limit)
        assert max_local_batch_size(averaging, limit=limit) < largest


def test_what_profiles_from_before_lost_was_lost_to_memory():
    text = '{"resolution": 32, "local_batch_size": 50, "workers": 2}'
    assert OutOfMemory.model_validate_json(text).short_of == "memory"


def test_what_failed_before_is_not_offered_again():
    failed = OutOfMemory(resolution=32, local_batch_size=50, workers=2)
    profile = make_profile(memory_parts=PARTS, out_of_memory=(failed,))
    assert max_local_batch_size(profile) == 49
    assert max_local_batch_size(profile, workers=1) > 49


def test_the_limit_of_the_job_comes_before_that_of_the_device():
    profile = make_profile(memory_parts=PARTS)
    goal = profile.job.goal.model_copy(update={"memory": 20_000_000})
    stated = make_profile(memory_parts=PARTS, job=profile.job.model_copy(update={"goal": goal}))
    assert max_local_batch_size(stated) < max_local_batch_size(profile)
    with pytest.raises(PlanError, match="limit=-1"):
        max_local_batch_size(profile, limit=-1)
