from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console

from batchwright.records import (
    Check,
    CheckPoint,
    CommandPart,
    Estimate,
    MemoryParts,
    OutOfMemory,
    RoundCheck,
)
from batchwright.records.lines.run_lines import EpochLine
from batchwright.reporting.data.accounting import accounting, whole_accounting, worker_rows
from batchwright.reporting.data.reading import check_words, compared_rows, comparisons
from batchwright.reporting.data.worker_curves import worker_curves
from batchwright.reporting.pages.page import page
from batchwright.reporting.render.progress import progress
from batchwright.reporting.render.tables import check_table, profile_table, summary_table
from clusters import make_measured
from dynamic_runs import dynamic_summary
from samples import (
    make_data,
    make_epoch,
    make_job,
    make_network,
    make_pair,
    make_plan,
    make_profile,
    make_summary,
    shown,
)


def test_all_that_was_waited_for_is_told():
    before, after = (("start", 1.0), ("probe", 5.0)), (("report", 2.0),)
    summary = make_summary().model_copy(
        update={
            name: tuple(CommandPart(name=part, seconds=seconds) for part, seconds in parts)
            for name, parts in (("before", before), ("after", after))
        }
    )
    told = whole_accounting(summary)
    assert (*told[:2], told[-1]) == (*before, *after)
    assert sum(seconds for _, seconds in told) == pytest.approx(8 + summary.wall_seconds)
    simulated = summary.model_copy(update={"simulated": True})
    assert whole_accounting(simulated) == accounting(simulated)

    continued = summary.model_copy(update={"resumed": 1})  # earlier commands' parts are not kept
    names = [name for name, _ in whole_accounting(continued)]
    assert names[:2] == ["start (last command)", "probe (last command)"]
    assert names[-1] == "report (last command)"
    assert names[2:-1] == [name for name, _ in accounting(summary)]


def test_the_parts_of_the_time_sum_to_the_wall_time():
    summary = make_summary()
    assert sum(s for _, s in accounting(summary)) == pytest.approx(summary.wall_seconds)
    for one in worker_curves(summary):
        parts = accounting(summary, one)
        assert sum(s for _, s in parts) == pytest.approx(summary.wall_seconds)


@given(wall=some.floats(0, 1e6), setup=some.floats(0, 1e6), count=some.integers(0, 3))
def test_no_part_is_negative_and_no_second_is_lost(wall, setup, count):
    summary = make_summary(
        epochs=tuple(make_epoch(epoch) for epoch in range(count)),
        wall_seconds=wall,
        setup_seconds=setup,
    )
    parts = accounting(summary)
    assert all(seconds >= 0 for _, seconds in parts)
    claimed = sum(seconds for name, seconds in parts if name != "other")
    assert sum(s for _, s in parts) == pytest.approx(max(wall, claimed))


def test_the_mean_over_the_workers_is_what_the_run_is_charged():
    summary = make_summary()
    first, second = (dict(accounting(summary, one)) for one in worker_curves(summary))
    whole = dict(accounting(summary))
    for part in ("input", "compute", "communication"):
        assert whole[part] == pytest.approx((first[part] + second[part]) / 2)


def test_the_comparison_of_a_single_stage_is_the_summary_s_own():
    summary = make_summary()
    (one,) = comparisons(summary)
    assert one.measured == summary.measured_epoch_seconds
    assert one.ratio == pytest.approx(one.measured / one.predicted.value)


@pytest.mark.parametrize(
    ("measured", "inside", "words"),
    [
        (1.0, True, "0.0 % more, inside"),
        (1.25, False, "25.0 % more, outside"),
        (0.95, True, "5.0 % less, inside"),
        (2.42, False, "2.42 times as much, outside"),
        (0.5, False, "0.500 times as much, outside"),
    ],
)
def test_the_verdict_says_direction_size_and_whether_it_fell_inside(measured, inside, words):
    stage = make_plan().stages[0]
    predicted = stage.model_copy(
        update={"predicted_epoch_seconds": Estimate(value=1.0, low=0.9, high=1.1)}
    )
    summary = make_summary(
        plan=make_plan(stages=(predicted,)),
        epochs=(make_epoch(0, training_seconds=measured),),
    )
    (one,) = comparisons(summary)
    assert one.inside is inside
    assert words in one.verdict


def test_each_stage_is_compared_with_its_own_epochs():
    stage = make_plan().stages[0]
    plan = make_plan(stages=tuple(stage.model_copy(update={"epochs": 3}) for _ in range(2)))
    seconds = [9.0, 1.0, 1.0, 9.0, 2.0, 2.0]
    epochs = tuple(make_epoch(e, training_seconds=s) for e, s in enumerate(seconds))
    assert [one.measured for one in comparisons(make_summary(plan=plan, epochs=epochs))] == [1, 2]


def test_an_epoch_that_was_resumed_is_not_compared():
    epochs = tuple(make_epoch(e, training_seconds=1.0 + e, whole=e != 1) for e in range(3))
    (one,) = comparisons(make_summary(epochs=epochs))
    assert one.measured == 3.0


def test_the_summary_s_table_shows_accuracy_with_its_counts_and_every_part_of_the_time():
    text = shown(summary_table(make_summary()), width=100)
    assert "98.1 % (353 of 360)" in text
    assert "98.6 % (355 of 360)" in text
    assert "more, inside" in text
    for name, _ in accounting(make_summary()):
        assert name in text


def test_a_run_without_a_finished_epoch_a_profile_or_a_prediction_still_has_its_tables():
    stage = (
        make_plan()
        .stages[0]
        .model_copy(update={"predicted_epoch_seconds": None, "predicted_bytes": None})
    )
    plan = make_plan(stages=(stage,), considered=(), reasons=())
    text = shown(summary_table(make_summary(plan=plan, profile=None, epochs=())))
    assert "nothing was predicted" in text
    assert "not evaluated" in text


def test_the_profile_s_table_says_where_the_noise_could_not_be_measured():
    assert "212 samples" in shown(profile_table(make_profile()))
    assert "below measurement" in shown(profile_table(make_profile(noise=None)))


def test_names_cannot_send_markup_or_control_characters_to_the_terminal():
    data = make_data(name="[bold red]digits\x1b[2J\u202e")
    text = shown(profile_table(make_profile(data=data, network=make_network(name="[link=x]y"))))
    assert "[link=x]y on [bold red]digits\\x1b[2J\\u202e" in text
    assert "\x1b" not in text


def test_the_profile_s_table_shows_every_worker_count_its_visits_and_what_did_not_fit():
    parts = MemoryParts(
        parameters=301_160, buffers=2_000, gradients=301_160, optimizer=301_160, reduction=0
    )
    lost = OutOfMemory(resolution=32, local_batch_size=4096, workers=2)
    shared = lost.model_copy(update={"workers": 1, "short_of": "shared memory"})
    profile = make_measured(memory_parts=parts, out_of_memory=(shared, lost))
    text = shown(profile_table(profile), width=120)
    rows = [line.split() for line in text.splitlines() if " px " in line and " to " in line]
    assert [row[0] for row in rows] == ["1"] * 5 + ["2"] * 5
    assert "median of visits' means; quartiles of steps" in text  # a mean may be beside them
    assert {row[-2] for row in rows} == {"3"}
    assert "parameters 294 KiB, buffers 1.95 KiB, gradients 294 KiB, optimizer 294 KiB" in text
    assert "too little memory" in text
    assert "too little shared memory" in text


def make_check(*measured, tolerance=0.1, **changes):
    points = tuple(
        CheckPoint(
            quantity="step_seconds",
            network="resnet8",
            local_batch_size=24,
            resolution=32,
            workers=2,
            predicted=1.0,
            low=0.9,
            high=1.1,
            measured=seconds,
        )
        for seconds in measured
    )
    cluster = make_profile().cluster
    return Check(**({"points": points, "tolerance": tolerance, "cluster": cluster} | changes))


def test_a_check_is_shown_point_by_point_and_in_a_sentence():
    check = make_check(1.0, 1.05, 1.25)
    text = shown(check_table(check))
    assert "2 x 24, 32 px" in text
    assert "1.00 (0.900 to 1.10)" in text
    assert "-20.0 %" in text
    found = [word for word in text.split() if word in ("inside", "outside")]
    assert found == ["inside", "inside", "outside"]
    words = check_words(check)
    assert "miss the measured ones by 4.8 % in the median, within the 10.0 % of" in words
    assert "20.0 % at worst; 2 of 3 step times lie inside" in words
    assert "more than the 2.0 % of goal.tolerance" in check_words(make_check(1.05, tolerance=0.02))


def test_a_checks_sentence_says_what_its_figures_are_of():
    own, other = make_check(0.78, 0.733).points
    peak = other.model_copy(update={"quantity": "peak_bytes", "measured": 1.0})
    check = make_check(points=(own.model_copy(update={"planned": True}), other, peak))
    words = check_words(check)
    assert "own step (2 x 24, 32 px) was predicted 28.2 % too high. Predicted step times" in words
    assert "with the plan's own, miss the measured ones by 32.3 % in the median, more than" in words
    assert "by 36.4 % at worst; 0 of 2 step times and 1 of 1 memory peak lie inside" in words
    assert dict(check._facts())["median error"] == "32.3 %"


def test_the_held_out_loss_is_called_cross_entropy_where_another_one_is_trained():
    plan = make_plan(job=make_job(loss="mine:focal"))
    own = make_summary(plan=plan)
    assert "held-out cross entropy" in page(own)
    assert "held-out loss" not in page(own)
    assert "cross entropy" in shown(summary_table(own), width=100)
    assert "held-out loss" in page(make_summary())
    assert "cross entropy" not in page(make_summary()) + shown(summary_table(make_summary()))
    line = EpochLine(kind="epoch", record=make_epoch(0), epochs=30)
    for told, name in ((plan, "held-out cross entropy 1.72"), (make_plan(), "held-out loss 1.72")):
        console = Console(file=io.StringIO(), force_terminal=False, width=100)
        with progress(console, epochs=30, plan=told) as lines:
            lines.update(line)
        assert f", {name}" in console.file.getvalue()


PAIR = make_pair(ratios=(0.19, 0.2, 0.21))


def test_rounds_with_two_batch_sizes_are_shown_with_what_is_left_between_them():
    rounds = tuple(
        RoundCheck(pair=pair, large_samples=13_125, small_samples=samples)
        for pair, samples in (
            (PAIR, 10_625),
            (PAIR.model_copy(update={"resolution": 24}), 11_000),
        )
    )
    check = make_check(1.0, rounds=rounds)
    text = shown(check_table(check), width=120)
    assert "13,125" in text
    assert "-2.5 %" in text  # 10,625 * 0.06 / 83 over 13,125 * 0.3 / 500
    assert "+1.0 %" in text
    words = check_words(check)
    assert words.endswith("planned to end together, differ by 2.5 % at worst.")
    assert "Rounds" not in check_words(make_check(1.0))


def test_the_profile_s_table_shows_pairs():
    text = shown(profile_table(make_measured(pairs=(PAIR,))), width=120)
    assert "3 + 1" in text
    assert "500 and 83" in text
    assert "0.200 (0.190 to 0.210)" in text
    assert "side by side" not in shown(profile_table(make_measured()))


def test_a_point_that_did_not_fit_is_shown():
    lost = OutOfMemory(resolution=32, local_batch_size=4096, workers=2)
    check = make_check(out_of_memory=(lost,))
    assert "did not fit" in shown(check_table(check))
    assert "2 x 4096, 32 px" in shown(check_table(check))
    shared = lost.model_copy(update={"short_of": "shared memory"})
    assert "shared memory" in shown(check_table(make_check(out_of_memory=(shared,))))
    assert check_words(check) == "No step could be measured."


def weighed(*peaks):
    """An epoch whose workers' tensors took so many bytes."""
    (epoch,) = make_summary().epochs[:1]
    workers = (
        worker.model_copy(update={"peak_bytes": peak})
        for worker, peak in zip(epoch.workers, peaks, strict=True)
    )
    return epoch.model_copy(update={"workers": tuple(workers)})


def test_measured_memory_stands_beside_the_predicted_one():
    stage = make_plan().stages[0]
    predicted = Estimate(value=100 * 2**20, low=90 * 2**20, high=120 * 2**20)
    plan = make_plan(stages=(stage.model_copy(update={"predicted_bytes": predicted}),))
    summary = make_summary(plan=plan, epochs=(weighed(80 * 2**20, 125 * 2**20), make_epoch(1)))
    _, _, row = compared_rows(summary)  # of the worker that took the most
    assert row[:3] == ["peak memory", "100 MiB (90.0 to 120)", "125 MiB"]
    assert row[3] == "25.0 % more, outside the interval"
    for text in (shown(summary_table(summary), width=100), page(summary)):
        assert "125 MiB" in text
        assert "not measured in this run" not in text


def test_a_run_without_measured_memory_says_so_and_why():
    said = " ".join(shown(summary_table(make_summary())).split())
    for text in (said, page(make_summary())):
        assert "Memory was not measured in this run. On the CPU it takes" in text
    simulated = make_summary(simulated=True)
    assert "memory of simulated workers is not known" in page(simulated)


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
@pytest.mark.parametrize("make", [make_summary, dynamic_summary], ids=["plain", "dynamic"])
def test_no_column_and_no_figure_is_lost_on_a_narrow_terminal(make, width):
    summary = make()
    text = shown(summary_table(summary), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    words = text.split()
    for table in (worker_rows(summary), compared_rows(summary)):
        assert {word for row in table for cell in row for word in cell.split()} <= set(words)
    if width != 60:  # where it depends on the names of the workers
        assert ("(continued)" in text) == (width == 40)


def test_a_long_name_is_folded_and_not_cut():
    profile = make_profile(network=make_network(name="n" * 150))
    assert shown(profile_table(profile), width=60).count("n" * 40) >= 2
