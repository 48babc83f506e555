"""`algorithms.dual_batch`: the published tables, what always holds, and what has no answer."""

from __future__ import annotations

import json
from math import floor
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchwright.algorithms.dual_batch import (
    Relative,
    chord,
    largest_extra_time,
    largest_extra_time_unlike,
    solve,
    solve_unlike,
    spread,
    update_factor,
    weights_in_time,
)
from batchwright.errors import PlanError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dual_batch.json").read_text())
A, B, LARGE, SAMPLES = 0.00056607, 0.014041204, 500, 50_000  # of table 2


def rows_of_one_table(name):
    table = GOLDEN[name]
    return [(table, {"k": row["k"], **row}) for row in table["rows"]]


def rows_of_table_6():
    table = GOLDEN["table6"]
    return [
        ({**case, "rounding": table["rounding"]}, {"k": table["k"], **row})
        for case in table["cases"]
        for row in case["rows"]
    ]


def solved(small, large, extra, *, a=A, b=B, batch=LARGE, samples=SAMPLES, **options):
    return solve(
        a,
        b,
        batch,
        small_workers=small,
        large_workers=large,
        extra_time=extra,
        samples=samples,
        **options,
    )


PUBLISHED = [
    *rows_of_one_table("table2"),
    *rows_of_one_table("eight_workers"),
    *rows_of_table_6(),
]


def published(table, row):
    return solve(
        table["a"],
        table["b"],
        table["B_L"],
        small_workers=row["n_S"],
        large_workers=row["n_L"],
        extra_time=row["k"],
        samples=table["d"],
        rounding=table["rounding"],
    )


@pytest.mark.parametrize(("table", "row"), PUBLISHED)
def test_every_row_of_the_published_tables_comes_out_exactly(table, row):
    pair = published(table, row)
    assert (pair.small_batch, pair.small_samples, pair.large_samples) == (
        row["B_S"],
        row["d_S"],
        row["d_L"],
    )
    if row.get("factor") is not None:
        assert pair.factor == pytest.approx(row["factor"], abs=table["factor_tolerance"])


def test_in_each_of_the_49_published_rows_the_groups_share_the_data_and_end_together():
    assert len(PUBLISHED) == 49
    for table, row in PUBLISHED:
        pair = published(table, row)
        done = row["n_L"] * (pair.large_samples or 0) + row["n_S"] * (pair.small_samples or 0)
        assert abs(done - table["d"]) <= row["n_L"] + row["n_S"]
        seconds = [
            (table["a"] + table["b"] / batch) * samples
            for batch, samples in (
                (table["B_L"], pair.large_samples),
                (pair.small_batch, pair.small_samples),
            )
            if samples is not None
        ]
        off = 1 / pair.small_batch if pair.small_batch else 1e-3  # by rounding that batch
        assert seconds == pytest.approx([pair.round_seconds] * len(seconds), rel=off)


@pytest.mark.parametrize("entry", GOLDEN["order_sensitive"], ids=lambda entry: entry["why"])
def test_the_order_of_rounding_is_the_one_that_gives_the_tables(entry):
    table = GOLDEN[entry["table"]]
    if "dataset" in entry:
        case = next(one for one in table["cases"] if one["dataset"] == entry["dataset"])
        table = {**case, "k": table["k"], "n": table["n"], "rounding": table["rounding"]}
    small, k = entry["n_S"], entry.get("k", table.get("k"))
    pair = solve(
        table["a"],
        table["b"],
        table["B_L"],
        small_workers=small,
        large_workers=table["n"] - small,
        extra_time=k,
        samples=table["d"],
        rounding=table["rounding"],
    )
    found = {"d_S": pair.small_samples, "B_S": pair.small_batch}[entry["quantity"]]
    assert found == entry["expected"] != entry["if_rounded_last"]


# ---------------------------------------------------------------------------- what always holds

workers = st.integers(min_value=1, max_value=16)
slopes = st.floats(min_value=1e-5, max_value=1e-2)
fixed = st.floats(min_value=1e-4, max_value=0.2)
batches = st.integers(min_value=64, max_value=2000)


@st.composite
def problems(draw):
    """Two groups, a line and an extra time that surely has a small batch of 4 or more."""
    problem = {
        "a": draw(slopes),
        "b": draw(fixed),
        "large_batch": draw(batches),
        "small_workers": draw(workers),
        "large_workers": draw(st.integers(min_value=0, max_value=16)),
    }
    most = largest_extra_time(
        problem["a"],
        problem["b"],
        problem["large_batch"],
        small_workers=problem["small_workers"],
        large_workers=problem["large_workers"],
        least=4,
    )
    share = draw(st.floats(min_value=0.02, max_value=0.98))
    return {**problem, "extra_time": 1 + share * (most - 1), "samples": 10**12}


@given(problems())
def test_shares_sum_to_the_data_and_differ_from_the_pair_by_rounding_alone(problem):
    pair = solve(**problem)
    large, small = problem["large_workers"], problem["small_workers"]
    shares = spread(pair, problem["samples"], large=(1.0,) * large, small=(1.0,) * small)
    assert sum(shares) == problem["samples"]
    assert all(share == pair.large_samples for share in shares[:large])
    assert all(abs(share - pair.small_samples) <= 1 for share in shares[large:])


@given(problems())
def test_both_groups_take_equally_long_and_k_times_what_large_batches_take(problem):
    pair = solve(**problem)
    a, b, batch, samples = (problem[key] for key in ("a", "b", "large_batch", "samples"))
    count = problem["large_workers"] + problem["small_workers"]
    alone = (a + b / batch) * samples / count
    assert pair.round_seconds == pytest.approx(problem["extra_time"] * alone)
    if pair.large_samples:
        assert (a + b / batch) * pair.large_samples == pytest.approx(pair.round_seconds, rel=1e-3)
    # The small batch is a whole number, so its time lies between those of its neighbours.
    slow, quick = ((a + b / (pair.small_batch + off)) * pair.small_samples for off in (-0.51, 0.51))
    assert quick * (1 - 1e-4) <= pair.round_seconds <= slow * (1 + 1e-4)


@given(problems())
def test_the_closed_form_says_the_same(problem):
    pair = solve(**problem)
    a, b, batch, k = (problem[key] for key in ("a", "b", "large_batch", "extra_time"))
    large, small = problem["large_workers"], problem["small_workers"]
    ratio = (large + small - k * large) / (k * small)
    assert pair.small_batch == pytest.approx(b / ((a + b / batch) / ratio - a), abs=0.6)
    if large:
        assert pair.factor == pytest.approx(ratio, rel=1e-3)
        assert update_factor(pair.factor, "sqrt") == pytest.approx(ratio**0.5, rel=1e-3)
        assert update_factor(pair.factor, "ratio") == pair.factor
    assert update_factor(pair.factor, "none") == 1.0


@given(problems(), st.floats(min_value=0.1, max_value=0.9))
def test_a_larger_extra_time_makes_the_small_batch_smaller(problem, part):
    less = {**problem, "extra_time": 1 + part * (problem["extra_time"] - 1)}
    assert solve(**less).small_batch >= solve(**problem).small_batch


@given(problems())
def test_of_as_many_workers_fewer_small_ones_have_a_smaller_batch(problem):
    assume(problem["small_workers"] >= 2)
    fewer = {
        **problem,
        "small_workers": problem["small_workers"] - 1,
        "large_workers": problem["large_workers"] + 1,
    }
    groups = {key: problem[key] for key in ("a", "b", "large_batch")}
    counts = {key: fewer[key] for key in ("small_workers", "large_workers")}
    assume(problem["extra_time"] < largest_extra_time(**groups, **counts, least=2))
    assert solve(**fewer).small_batch <= solve(**problem).small_batch


@given(workers, st.integers(min_value=0, max_value=16), slopes, fixed, batches)
def test_without_extra_time_both_batches_are_the_same(small, large, a, b, batch):
    pair = solved(small, large, 1, a=a, b=b, batch=batch, samples=1_000_003)
    assert pair.small_batch == batch
    assert pair.factor == pytest.approx(1, abs=1e-3)


@given(problems())
def test_the_largest_extra_time_still_has_the_least_batch_and_more_has_not(problem):
    groups = {key: problem[key] for key in ("a", "b", "large_batch")}
    count = {key: problem[key] for key in ("small_workers", "large_workers")}
    most = largest_extra_time(**groups, **count, least=4)
    rest = {"samples": 10**12, "rounding": "truncate", "least": 4}
    assert solve(**groups, **count, extra_time=1 + (most - 1) * 0.9999, **rest).small_batch >= 4
    with pytest.raises(PlanError):
        solve(**groups, **count, extra_time=most * 1.01, **rest)


def test_only_the_part_of_small_workers_counts():
    four = solved(3, 1, 1.05, samples=8_000_000)
    eight = solved(6, 2, 1.05, samples=8_000_000)
    assert four.small_batch == eight.small_batch


# -------------------------------------------------------------------------------- degenerate


def test_without_small_workers_all_have_the_same_samples_and_extra_time_means_nothing():
    pair = solved(0, 4, 1.05)
    assert (pair.small_batch, pair.small_samples, pair.large_samples) == (None, None, 12_500)
    assert pair.factor == 1.0
    assert pair.round_seconds == pytest.approx((A + B / LARGE) * 12_500)


def test_without_large_workers_there_is_one_smaller_batch():
    pair = solved(4, 0, 1.1, rounding="truncate")
    assert (pair.small_batch, pair.small_samples, pair.large_samples) == (160, 12_500, None)
    assert pair.factor == 1.0


def test_a_rounding_that_leaves_a_small_batch_worker_nothing_is_refused():
    with pytest.raises(PlanError, match="wants a local batch below 1"):
        solve(1.0, 1.0, 5, small_workers=1, large_workers=1, extra_time=1.99, samples=10)


@pytest.mark.parametrize(("large", "extra"), [(3, 4 / 3), (3, 1.4), (7, 8 / 7), (1, 5)])
def test_extra_time_that_leaves_no_samples_is_refused_with_the_largest_that_works(large, extra):
    with pytest.raises(PlanError, match="leaves no samples") as caught:
        solved(1, large, extra)
    text = str(caught.value)
    most = float(text.rpartition(" ")[2])
    assert f"below {(large + 1) / large:.4g}" in text
    assert 1 < most < (large + 1) / large
    assert solved(1, large, most).small_batch >= 1


def test_extra_time_that_wants_less_than_a_sample_is_refused_with_the_largest_that_works():
    with pytest.raises(PlanError, match="below 2: give at most") as caught:
        solved(1, 3, 1.32, least=2)
    most = float(str(caught.value).split("give at most ")[1].split(",")[0])
    assert solved(1, 3, most, least=2).small_batch >= 2


@pytest.mark.parametrize("fixed_seconds", [0.0, -1e-6])
def test_a_step_without_a_fixed_time_has_no_small_batch(fixed_seconds):
    with pytest.raises(PlanError, match=r"no fixed time .* a smaller batch takes no longer"):
        solved(1, 3, 1.05, b=fixed_seconds)
    assert solved(0, 4, 1.05, b=0).large_samples == 12_500


def test_a_batch_larger_than_its_share_is_refused():
    with pytest.raises(PlanError, match="the large local batch, 500, is more than the 420"):
        solved(1, 3, 1.05, samples=1600)
    with pytest.raises(PlanError, match="the large local batch, 500, is more than the 250"):
        solved(0, 4, 1.0, samples=1000)
    with pytest.raises(PlanError, match="the small local batch, 243, is more than the 200"):
        solved(4, 0, 1.05, samples=800)


@pytest.mark.parametrize("a", [-1e-4, float("nan")])
def test_step_times_that_cannot_be_are_refused(a):
    with pytest.raises(PlanError, match="which cannot be"):
        solved(1, 3, 1.05, a=a)


def test_a_constant_step_time_still_has_a_small_batch():
    pair = solved(1, 1, 1.2, a=0.0, b=0.01, batch=100, samples=10_000)
    # T = k b d / (2 B_L), d_S = d - k d / 2: B_S = b d_S / T.
    assert pair.small_batch == floor(0.01 * 4000 / (1.2 * 0.01 * 10_000 / 200) + 0.5) == 67


# --------------------------------------------------------------------------------------- chords


def test_a_chord_goes_through_both_points_in_any_order():
    a, b = chord((128, 0.084), (32, 0.036))
    assert (a * 32 + b, a * 128 + b) == (pytest.approx(0.036), pytest.approx(0.084))
    assert chord((32, 0.036), (128, 0.084)) == (a, b)
    with pytest.raises(PlanError, match="one batch, 32"):
        chord((32, 0.1), (32, 0.2))


@given(
    st.lists(st.floats(min_value=0.2, max_value=5), min_size=1, max_size=6),
    st.lists(st.floats(min_value=0.2, max_value=5), min_size=1, max_size=6),
    st.integers(min_value=100_000, max_value=2_000_000),
)
def test_workers_of_unequal_speed_get_shares_that_take_them_equally_long(large, small, samples):
    most = largest_extra_time(
        A, B, 256, small_workers=sum(small), large_workers=sum(large), least=8
    )
    pair = solve(
        A,
        B,
        256,
        small_workers=sum(small),
        large_workers=sum(large),
        extra_time=1 + (most - 1) / 2,
        samples=samples,
    )
    shares = spread(pair, samples, large=large, small=small)
    assert sum(shares) == samples
    batches_ = [256] * len(large) + [pair.small_batch] * len(small)
    rows = zip(shares, batches_, [*large, *small], strict=True)
    # Off by rounding the share and the small batch, whose neighbours differ by up to 1 / B_S.
    for share, batch, speed in rows:
        seconds = (A + B / batch) * share / speed
        assert seconds == pytest.approx(pair.round_seconds, rel=0.6 / pair.small_batch + 2 / share)


# ------------------------------------------------------------------- fixed times that differ

unlike = st.lists(
    st.builds(Relative, st.floats(0.2, 5), st.floats(0.05, 20)), min_size=1, max_size=5
)


@given(unlike, unlike, st.integers(min_value=100_000, max_value=2_000_000))
def test_workers_of_unlike_overhead_end_together_after_the_extra_time(large, small, samples):
    problem = {"small": small, "large": large}
    most = largest_extra_time_unlike(A, B, 256, **problem, least=8)
    extra = 1 + (most - 1) / 2
    pair = solve_unlike(A, B, 256, **problem, extra_time=extra, samples=samples, least=8)
    assert 8 <= pair.small_batch <= 256
    shares = spread(
        pair,
        samples,
        large=weights_in_time(A, B, 256, large),
        small=weights_in_time(A, B, pair.small_batch, small),
    )
    assert sum(shares) == samples
    alone = samples / sum(one.speed / (A + one.overhead * B / 256) for one in [*large, *small])
    assert pair.round_seconds == pytest.approx(extra * alone)
    batches_ = [256] * len(large) + [pair.small_batch] * len(small)
    for share, batch, one in zip(shares, batches_, [*large, *small], strict=True):
        seconds = (A + one.overhead * B / batch) * share / one.speed
        rounded = 0.6 / pair.small_batch + 20 / share
        assert seconds == pytest.approx(pair.round_seconds, rel=rounded)


@given(problems())
def test_with_like_overheads_the_answer_is_the_papers(problem):
    small, large = problem["small_workers"], problem["large_workers"]
    given_ = {key: problem[key] for key in ("a", "b", "large_batch", "extra_time")}
    usual = solve(**problem)
    found = solve_unlike(
        **given_, small=[Relative(1)] * small, large=[Relative(1)] * large, samples=10**12
    )
    exact = solve(**{**problem, "samples": 10**12})  # so many that whole samples do not show
    assert abs(found.small_batch - exact.small_batch) <= 1
    assert found.factor == pytest.approx(exact.factor, rel=1e-6)
    assert usual.small_batch <= problem["large_batch"]


@pytest.mark.parametrize("small", [1, 2, 3, 4])
def test_alike_workers_make_as_many_steps_in_the_time_whoever_has_the_small_batch(small):
    pair = solved(small, 4 - small, 1.05, samples=10**8)
    steps = small * pair.small_samples / pair.small_batch
    steps += (4 - small) * (pair.large_samples or 0) / LARGE
    alone = (A + B / LARGE) * 10**8  # T n
    assert steps == pytest.approx((1.05 * alone - A * 10**8) / B, rel=1 / pair.small_batch)


def test_small_batches_where_steps_cost_least_make_more_of_them():
    light, usual = Relative(1, 0.1), Relative(1)
    given_ = {"extra_time": 1.02, "samples": SAMPLES}
    apart = solve_unlike(A, B, LARGE, small=[light] * 2, large=[usual] * 2, **given_)
    alike = solve_unlike(A, B, LARGE, small=[light] * 2 + [usual] * 2, large=[], **given_)
    steps = 2 * apart.small_samples / apart.small_batch + 2 * apart.large_samples / LARGE
    assert apart.small_batch < alike.small_batch
    assert steps > 2 * SAMPLES / alike.small_batch


def test_what_has_no_answer_with_unlike_overheads_is_refused():
    light, usual = Relative(1, 0.1), Relative(1)

    def call(extra, *, b=B, small=(light,), samples=SAMPLES):
        return solve_unlike(
            A, b, LARGE, small=list(small), large=[usual], extra_time=extra, samples=samples
        )

    with pytest.raises(PlanError, match=r"extra_time=3 .* local batch below 1: give at most 1\."):
        call(3)
    with pytest.raises(PlanError, match="no fixed time"):
        call(1.02, b=0.0)
    with pytest.raises(PlanError, match="the large local batch, 500, is more than"):
        call(1.02, samples=600)
    with pytest.raises(PlanError, match="the small local batch, 413, is more than the 325"):
        solve_unlike(A, B, LARGE, small=[usual] * 4, large=[], extra_time=1.01, samples=1300)
    alone = call(1.0, small=())
    assert (alone.small_batch, alone.small_samples, alone.large_samples) == (None, None, SAMPLES)
    assert alone.factor == 1.0
    assert alone.round_seconds == pytest.approx((A + B / LARGE) * SAMPLES)
    with pytest.raises(PlanError, match=r"give smaller dual\.large_batches$"):
        call(1.0, small=(), samples=LARGE - 1)
    assert largest_extra_time_unlike(A, B, LARGE, small=[], large=[usual]) == 1.0
    assert largest_extra_time(A, B, LARGE, small_workers=0, large_workers=1) == 1.0


def test_the_largest_extra_time_with_unlike_overheads_has_the_least_batch():
    problem = {"small": [Relative(1.0, overhead=0.5)], "large": [Relative(1.0)], "least": 8}
    most = largest_extra_time_unlike(A, B, LARGE, **problem)
    pair = solve_unlike(A, B, LARGE, **problem, extra_time=most, samples=SAMPLES)
    assert pair.small_batch == 8


def test_too_few_images_for_the_workers_are_refused():
    with pytest.raises(PlanError, match="3 training images are too few for 4 workers"):
        spread(solved(0, 4, 1, batch=1, samples=4), 3, large=(1.0,) * 4, small=())


def test_one_image_for_each_worker_is_enough():
    pair = solved(0, 4, 1, batch=1, samples=4)
    assert spread(pair, 4, large=(1.0,) * 4, small=()) == (1, 1, 1, 1)
    assert solved(0, 1, 1, batch=1, samples=1).large_samples == 1
