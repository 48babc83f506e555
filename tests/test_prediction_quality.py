"""`prediction.accuracy.quality`: the worth of a larger batch, epochs to a target, accuracy."""

import random
from math import log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.prediction.accuracy.outcomes import epochs_to
from batchwright.prediction.accuracy.quality import RUN_ERROR, SEED_ERROR, fit_progress
from batchwright.prediction.fit import Z_975
from batchwright.records import GradientNoise
from example_counts import examples
from samples import VAL, make_epoch, make_plan, make_summary

NOISE = GradientNoise(
    noise_scale=300.0, trace=3.0, sqr_norm=0.01, relative_error=0.1, parts=2, repeats=20
)
HALF = 0.5  # target, well below what a run reaches
COUNT = 100_000  # held-out images, so that an accuracy is hardly rounded


def run_of(batch, epochs_to_half, *, scaling="linear", noise=None, epochs=None, count=COUNT):
    """Accuracy rises evenly and passes 50 % after so many epochs."""
    plan = make_plan()
    rule = plan.learning_rate.model_copy(update={"scaling": scaling})
    return make_summary(
        plan=plan.model_copy(update={"learning_rate": rule}),
        epochs=tuple(
            make_epoch(
                e,
                global_batch_size=batch,
                val_count=count,
                val_correct=min(count, round(count * (0.1 + 0.4 * (e + 1) / epochs_to_half))),
                noise_scale=noise,
                learning_rate=0.1,
            )
            for e in range(epochs or int(epochs_to_half) + 2)
        ),
    )


@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_epochs_of_one_more_run_are_as_uncertain_as_runs_scatter_however_many_there_were(count):
    """Known for sure is their mean, after many; the next run is another seed."""
    runs = count * [run_of(64, 8.0)]
    found = fit_progress(None, base_batch=64, target=HALF, runs=runs).epochs(64)
    off = Z_975 * RUN_ERROR * sqrt(1 + 1 / count)
    assert 0.999 * off <= log(found.high / found.value) <= 1.2 * off
    assert log(found.value / found.low) == pytest.approx(log(found.high / found.value))


def test_of_data_without_classes_no_accuracy_is_known_by_guessing():
    """Nor is any read into the epochs before the first evaluation."""
    plan = make_plan()
    data = plan.data.model_copy(update={"classes": ()})
    told = {"global_batch_size": 64, "val_count": COUNT}
    run = make_summary(
        plan=plan.model_copy(update={"data": data}),
        epochs=tuple(
            make_epoch(e, val_correct=5000 * (e + 1) if e % 3 == 2 else None, **told)
            for e in range(12)
        ),
    )
    model = fit_progress(None, base_batch=64, runs=[run])
    values = [model.accuracy(64, epochs).value for epochs in range(1, 13)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.05)


def test_under_linear_scaling_epochs_are_polluxs_and_follow_the_noise_scale():
    model = fit_progress(NOISE, base_batch=100, scaling="linear")
    assert model.relative_epochs(100).value == 1
    large = model.relative_epochs(500)
    assert large.value == pytest.approx(800 / 400)
    assert large.low < large.value < large.high
    assert model.relative_epochs(50).value == pytest.approx(350 / 400)


def test_epochs_of_two_batches_are_compared_by_what_makes_them_differ():
    def off(model, batch):
        found = model.compared_epochs(batch, 100)
        assert found.low <= found.value <= found.high
        return found.high / found.low - 1

    model = fit_progress(NOISE, base_batch=100, scaling="linear")
    assert off(model, 100) == 0 < off(model, 110) < off(model, 200) < off(model, 800)
    assert model.compared_epochs(200, 100) == model.relative_epochs(200)
    assert fit_progress(None, base_batch=100, scaling="linear").compared_epochs(200, 100) is None
    ran = [run_of(batch, 6 + batch / 50) for batch in (50, 100, 200, 400)]
    model = fit_progress(NOISE, base_batch=100, target=HALF, runs=ran, scaling="linear")
    more = fit_progress(NOISE, base_batch=100, target=HALF, runs=4 * ran, scaling="linear")
    assert off(model, 100) == 0 < off(more, 200) < off(model, 200)
    later = model.relative_epochs(200)
    assert off(model, 200) < later.high / later.low - 1


def test_without_a_noise_scale_nothing_is_said_of_other_batches():
    for noise in (None, NOISE.model_copy(update={"noise_scale": None})):
        model = fit_progress(noise, base_batch=100, target=0.9)
        assert model.noise_scale is None
        assert model.relative_epochs(200) is None
        assert model.epochs(100) is None
        assert model.accuracy(100, 10) is None
        assert any("no run was given" in note for note in model.notes)


def test_a_probes_noise_scale_of_unknown_error_is_good_to_a_factor():
    model = fit_progress(NOISE.model_copy(update={"relative_error": None}), base_batch=100)
    assert model.noise_scale.high > 3 * model.noise_scale.value
    assert any("first steps" in note for note in model.notes)


def test_epochs_to_the_target_are_read_between_evaluations():
    run = run_of(64, 7.5)
    assert epochs_to(run, HALF) == pytest.approx(7.5, rel=0.001)
    assert epochs_to(run, 0.05) == 1
    assert epochs_to(run_of(64, 80, epochs=40), HALF) is None
    model = fit_progress(None, base_batch=64, target=HALF, runs=[run])
    estimate = model.epochs(64)
    # The crossing lies half way between two evaluations of an even rise.
    assert estimate.value == pytest.approx(7.5, rel=0.001)
    assert estimate.low < 7.5 < estimate.high


def test_one_run_and_its_noise_scale_give_the_epochs_of_other_batches():
    model = fit_progress(NOISE, base_batch=64, target=HALF, runs=[run_of(128, 10, noise=500.0)])
    assert model.noise_scale.value == pytest.approx(500)
    for batch in (32, 256, 1024):
        expected = 10 * (500 + batch) / 628
        estimate = model.epochs(batch)
        assert estimate.value == pytest.approx(expected, rel=0.01)
        assert estimate.low < expected < estimate.high
    widths = [model.epochs(b).high / model.epochs(b).value for b in (128, 256, 1024)]
    assert widths == sorted(widths)


@pytest.mark.parametrize("batch", [32, 64, 256, 512])
def test_a_rate_that_grows_with_the_root_makes_epochs_grow_with_it(batch):
    run = run_of(128, 10, scaling="sqrt", noise=1e6)
    model = fit_progress(None, base_batch=64, target=HALF, runs=[run])
    assert model.scaling == "sqrt"
    assert model.epochs(batch).value == pytest.approx(10 * (batch / 128) ** 0.5, rel=0.01)


def test_noise_limits_what_a_higher_rate_gains():
    run = run_of(128, 10, scaling="sqrt", noise=1.0)
    model = fit_progress(None, base_batch=64, target=HALF, runs=[run])
    assert model.epochs(512).value == pytest.approx(10 * 513 / 129, rel=0.01)


def test_a_constant_rate_makes_epochs_grow_with_the_batch():
    run = run_of(128, 10, scaling="none", noise=500.0)
    model = fit_progress(None, base_batch=64, target=HALF, runs=[run])
    assert model.epochs(256).value == pytest.approx(20, rel=0.01)


@given(st.sampled_from(["linear", "sqrt", "none"]), st.floats(1, 1e5), st.integers(1, 8192))
def test_it_does_not_matter_which_of_two_batches_ran(scaling, noise, batch):
    there = fit_progress(
        None, base_batch=64, target=HALF, runs=[run_of(128, 10, scaling=scaling, noise=noise)]
    )
    ratio = there.epochs(batch).value / there.epochs(128).value
    back = fit_progress(
        None, base_batch=64, target=HALF, runs=[run_of(batch, 10, scaling=scaling, noise=noise)]
    )
    assert back.epochs(batch).value / back.epochs(128).value == pytest.approx(ratio)


@examples(30)
@given(st.floats(2, 10), st.floats(50, 2000), st.integers(0, 2**32 - 1))
def test_least_epochs_and_critical_batch_are_recovered_from_runs(least, critical, seed):
    rng = random.Random(seed)
    law = {b: least * (1 + b / critical) for b in (32, 128, 512)}
    runs = [run_of(b, e * (1 + rng.gauss(0, 0.01))) for b, e in law.items() for _ in range(2)]
    model = fit_progress(None, base_batch=64, target=HALF, runs=runs)
    for batch in (32, 512):
        assert model.epochs(batch).value == pytest.approx(least * (1 + batch / critical), rel=0.12)
    asked = model.epochs(256)
    assert asked.low < least * (1 + 256 / critical) < asked.high


def test_of_three_batches_the_law_that_predicts_left_out_ones_better_is_taken():
    batches = (32, 128, 512, 2048)
    straight = [run_of(b, 4 + b / 100, scaling="sqrt") for b in batches]
    rooted = [run_of(b, 0.5 + b**0.5 / 2, scaling="linear") for b in batches]
    for runs, expected in ((straight, 4 + 10.24), (rooted, 0.5 + 16)):
        model = fit_progress(None, base_batch=64, target=HALF, runs=runs)
        assert model.epochs(1024).value == pytest.approx(expected, rel=0.02)


def test_a_target_no_run_reached_is_said_with_what_they_reached():
    model = fit_progress(NOISE, base_batch=64, target=0.99, runs=[run_of(64, 80, epochs=40)])
    assert model.epochs(64) is None
    assert any("30.0 %" in note for note in model.notes)


def test_a_batch_whose_runs_missed_the_target_and_larger_ones_have_no_epochs():
    runs = [run_of(32, 8), run_of(64, 9), run_of(128, 40, epochs=10)]
    model = fit_progress(None, base_batch=64, target=HALF, runs=runs)
    assert model.epochs(64).value == pytest.approx(9, rel=0.05)
    assert [model.epochs(batch) for batch in (128, 142, 1024)] == [None] * 3
    assert model.epochs(127) is not None
    assert any("1 of 1 run with batch 128 did not reach it in 10" in n for n in model.notes)
    larger = fit_progress(None, base_batch=64, target=HALF, runs=[*runs, run_of(256, 12)])
    assert [larger.epochs(batch) is None for batch in (127, 128, 142, 512)] == [0, 1, 0, 0]


def test_most_of_a_batchs_runs_say_whether_it_reaches_the_target():
    reached, missed = run_of(64, 9.5, epochs=10), run_of(64, 12, epochs=10)
    one = fit_progress(None, base_batch=64, target=HALF, runs=[reached, missed, missed])
    assert one.epochs(64) is None
    assert one.misses_target(64)
    assert not one.misses_target(32)
    assert any("not known, for 2 of 3 runs with batch 64" in note for note in one.notes)
    both = fit_progress(None, base_batch=64, target=HALF, runs=[reached, reached, missed])
    assert both.epochs(64).value == pytest.approx((9.5 + 9.5 + 10) / 3, rel=0.01)
    assert any("1 of 3 runs with batch 64" in note for note in both.notes)


def test_a_run_that_missed_the_target_is_a_lower_bound_and_a_short_one_says_nothing():
    runs = [run_of(32, 8), run_of(64, 9)]
    long = fit_progress(None, base_batch=64, target=HALF, runs=[*runs, run_of(64, 50, epochs=30)])
    assert 10 < long.epochs(64).value < 30 < long.epochs(64).high
    short = fit_progress(None, base_batch=64, target=HALF, runs=[*runs, run_of(64, 50, epochs=3)])
    assert short.epochs(64) == fit_progress(None, base_batch=64, target=HALF, runs=runs).epochs(64)
    other = fit_progress(None, base_batch=64, target=HALF, runs=[*runs, run_of(128, 50, epochs=3)])
    assert other.epochs(128) is not None


def test_runs_whose_batch_changed_are_left_out():
    run = run_of(64, 10)
    changed = run.epochs[1].model_copy(update={"global_batch_size": 128})
    mixed = run.model_copy(update={"epochs": (run.epochs[0], changed)})
    model = fit_progress(None, base_batch=64, target=HALF, runs=[mixed])
    assert model.epochs(64) is None
    assert any("left out" in note for note in model.notes)


def test_accuracy_is_read_where_the_run_had_made_the_same_progress():
    run = run_of(128, 20, noise=500.0, epochs=18)
    model = fit_progress(None, base_batch=64, runs=[run])
    own = model.accuracy(128, 10)
    assert own.low < own.value < own.high
    assert own.value == pytest.approx(0.3, abs=0.01)
    # Twice the noise scale plus batch takes twice the epochs.
    assert model.accuracy(628 * 2 - 500, 20).value == pytest.approx(0.3, abs=0.01)
    past = model.accuracy(128, 500)
    assert past.value == pytest.approx(0.1 + 0.4 * 18 / 20, abs=0.05)
    assert past.high > 0.95
    assert model.accuracy(100_000, 1).low >= 0


def test_accuracy_is_the_mean_of_a_batchs_seeds_and_its_interval_as_wide_as_they_scatter():
    runs = [run_of(64, e, epochs=30) for e in (30, 40, 60)]
    ends = [0.1 + 0.4 * 30 / e for e in (30, 40, 60)]
    found = [fit_progress(None, base_batch=64, runs=r).accuracy(64, 30) for r in (runs, runs[::-1])]
    assert found[0] == found[1]
    assert found[0].value == pytest.approx(sum(ends) / 3, abs=0.01)
    assert found[0].low < min(ends) < max(ends) < found[0].high
    alone = fit_progress(None, base_batch=64, runs=runs[:1]).accuracy(64, 30)
    assert alone.high - alone.low > 4 * SEED_ERROR


@pytest.mark.parametrize("few", [1, 2, 4])
def test_few_runs_leave_the_chance_of_few_images_in_the_accuracys_interval(few):
    """That of the runs given and that of the one predicted; seeds do not differ here."""

    def off(runs, count):
        given = runs * [run_of(64, 40, epochs=30, count=count)]
        model = fit_progress(None, base_batch=64, runs=given)
        found = model.accuracy(64, 30)
        assert found.value == pytest.approx(0.4, abs=0.02)
        return (found.high - found.low) / 2

    chance = Z_975 * sqrt(0.4 * 0.6 / 48 * (1 + 1 / few))
    assert chance <= off(few, 48) <= 1.05 * chance
    assert off(few, 480) < off(few, 48) / 2.5
    # Of very many images only seeds are left.
    assert off(few, COUNT) == pytest.approx(Z_975 * SEED_ERROR * sqrt(1 + 1 / few), rel=0.2)
    # From many runs on their own scatter tells, which has all of that in it.
    assert off(12, 48) < 0.2 * chance


@pytest.mark.slow
def test_one_run_holds_95_of_100_others_that_chance_alone_sets_apart():
    chance, inside, images = random.Random(0), 0, 48
    rights = [sum(chance.random() < 0.58 for _ in range(images)) for _ in range(2000)]
    for one, another in zip(rights[::2], rights[1::2], strict=True):
        epoch = make_epoch(0, global_batch_size=64, val_count=images, val_correct=one)
        model = fit_progress(None, base_batch=64, runs=[make_summary(epochs=(epoch,))])
        found = model.accuracy(64, 1)
        inside += found.low <= another / images <= found.high
    assert 930 < inside < 975


def test_an_accuracy_past_the_end_of_the_runs_is_a_wide_guess_and_longer_runs_come_first():
    short, whole = run_of(64, 8, epochs=3), run_of(64, 40, epochs=30)
    model = fit_progress(None, base_batch=64, runs=[short])
    guess = model.accuracy(64, 30)
    assert guess.value == pytest.approx(0.25, abs=0.01)
    assert guess.high > 0.95
    assert model.accuracy_until(64, 30) == 3
    both = fit_progress(None, base_batch=64, runs=[short, whole])
    assert both.accuracy(64, 30) == fit_progress(None, base_batch=64, runs=[whole]).accuracy(64, 30)
    assert both.accuracy_until(64, 30) is None


def test_the_sample_run_gives_a_whole_model():
    run = make_summary()
    model = fit_progress(NOISE, base_batch=128, target=HALF, runs=[run])
    batch = run.epochs[0].global_batch_size
    assert 1 < model.epochs(batch).value < len(run.epochs)
    assert model.accuracy(batch, 30).value == pytest.approx(run.accuracy, abs=2 / VAL)


def test_seeds_that_scatter_widely_leave_a_wide_interval():
    runs = [run_of(128, e, noise=500.0) for e in (1.5, 2, 30)]
    estimate = fit_progress(None, base_batch=64, target=HALF, runs=runs).epochs(256)
    assert 0 < estimate.low < estimate.value / 2
    assert estimate.high > 2 * estimate.value


def test_a_noise_scale_of_which_nothing_is_known_has_a_wide_interval_and_no_infinite_one():
    noise = NOISE.model_copy(update={"relative_error": 5000.0})
    scale = fit_progress(noise, base_batch=100).noise_scale
    assert scale.low < 1e-5 * scale.value < 1e5 * scale.value < scale.high < float("inf")
