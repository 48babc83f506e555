"""The form of a benchmark's report and the arithmetic of its figures, on made-up measurements."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from batchwright.workload.data.image_files import ImageFiles
from batchwright.workload.data.image_store import ImageStore

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks run from the project's root and are not installed

from benchmarks.cluster import engines, shared_cores, shares  # noqa: E402
from benchmarks.cluster.kills import (  # noqa: E402
    BATCH,
    Counting,
    KilledRun,
    Samples,
    job_plan,
    miscounted,
    train,
)
from benchmarks.cluster.uneven import BENCHMARK as UNEVEN  # noqa: E402
from benchmarks.cluster.uneven import (  # noqa: E402
    REBALANCE_STEPS,
    kills_found,
    recovery_intervals,
    slowest_over_fastest,
)
from benchmarks.first_contact import first_contact  # noqa: E402
from benchmarks.first_contact.first_contact import Epoch, jpeg_files, own_data_found  # noqa: E402
from benchmarks.first_contact.first_look import Regret, regrets_found  # noqa: E402
from benchmarks.first_contact.own_data import SETS  # noqa: E402
from benchmarks.harness import beside, slurm_nodes, tables, turns  # noqa: E402
from benchmarks.harness.benchmark import (  # noqa: E402
    SINCE,
    Arguments,
    Benchmark,
    keep_report,
    kept_values,
    make_report,
    parse_arguments,
    write_report,
)
from benchmarks.harness.figures import (  # noqa: E402
    STATISTICS,
    Figure,
    Value,
    differences,
    print_values,
    ratios,
)
from benchmarks.harness.kept_runs import Run  # noqa: E402
from benchmarks.harness.loads import until  # noqa: E402
from benchmarks.harness.plans import Opened, facts_of, made_up_data  # noqa: E402
from benchmarks.harness.turns import (  # noqa: E402
    Arm,
    Turn,
    images_per_second,
    started,
    take_turns,
)
from benchmarks.methods import large_batch, warmup  # noqa: E402
from benchmarks.methods.cyclic import BENCHMARK as CYCLIC  # noqa: E402
from benchmarks.methods.cyclic import (  # noqa: E402
    EPOCHS,
    accuracies_found,
    rows,
    timed_tasks,
    times_found,
)
from benchmarks.methods.resolution_arms import Trained, subset  # noqa: E402
from benchmarks.planning import large_networks  # noqa: E402
from benchmarks.service import service  # noqa: E402
from benchmarks.speed import data_path, gradient_overhead, step_overhead  # noqa: E402
from benchmarks.speed.data_path import MEAN, STD, UsualImages, square_of  # noqa: E402
from benchmarks.tools import demo_run  # noqa: E402

from batchwright.client.trackers.following import State  # noqa: E402
from batchwright.records.lines.line_files import METRICS  # noqa: E402
from batchwright.records.lines.run_lines import RunLine  # noqa: E402
from batchwright.training import all_reduce_run  # noqa: E402
from batchwright.training.loop import open_task  # noqa: E402
from batchwright.training.step.gradient_scaling import Adaptive  # noqa: E402
from loops import counting, failing, summing  # noqa: E402
from run_lines import typed  # noqa: E402
from samples import make_plan, make_profile, make_summary  # noqa: E402

FORM = {"name", "value", "unit", "low", "high", "repeats", "goal", "met", "from"}
QUICK = Arguments(full=False, data=None, json=None)
RATE = Figure("rate", "images/s", "median")
RATIO = Figure("a_over_b", "ratio", "median", at_least=1.25)


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    # The medians of the arms themselves, 200 and 100, would give 2.
    over, under = [100.0, 200.0, 900.0, 950.0, 150.0], [100.0, 100.0, 300.0, 950.0, 100.0]
    value = RATIO.of(ratios(over, under))
    assert (value.low, value.value, value.high) == (1.0, 1.5, 2.0)
    assert (value.repeats, value.goal, value.met) == (5, 1.25, True)
    assert RATIO.of(ratios(over, under), goal=1.6).met is False


def test_arms_of_different_lengths_give_no_ratio() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_a_mean_is_held_against_its_goal_from_the_right_side() -> None:
    assert Figure("accuracy", "share", "mean", at_least=0.97).of([0.96, 0.99]).met is True
    seconds = Figure("seconds", "s", "mean", at_most=120.0)
    assert seconds.of([100.0, 130.0]).met is True
    late = seconds.of([110.0, 150.0])
    assert (late.value, late.low, late.high, late.goal, late.met) == (130, 110, 150, 120, False)
    assert Figure("seconds", "s", "mean").of([1.0]).met is None


def test_a_median_is_held_against_its_goal_from_the_right_side() -> None:
    small = Figure("a_over_b", "ratio", "median", at_most=0.71)
    assert small.of([0.7]).met is True
    assert small.of([0.72]).met is False
    assert RATE.of([1.0]).met is None


def test_a_goal_to_be_near_is_missed_on_either_side() -> None:
    near = Figure("a_over_b", "ratio", "median", near=(1.05, 0.02))
    assert [near.of([one]).met for one in (1.02, 1.04, 1.06, 1.08)] == [False, True, True, False]
    assert near.of([1.0]).goal == 1.05


def test_extremes_and_shares_have_spreads_of_their_own() -> None:
    values = [1.0, 2.0, 6.0]
    for statistic, expected in (
        ("largest", (2.0, 6.0, 6.0)),
        ("least", (1.0, 1.0, 2.0)),
        ("worst", (1.0, 6.0, 6.0)),
        ("share", (3.0, 3.0, 3.0)),
    ):
        found = Figure("one", "s", statistic).of(values)
        assert (found.low, found.value, found.high) == expected


NO_WORSE = Figure("d", "points", "interval", above=-1.0)


def test_no_worse_needs_the_whole_interval_above_the_margin() -> None:
    reference = [50.0, 51.0, 52.0, 53.0, 54.0]
    even = [a + d for a, d in zip(reference, (-0.2, 0.1, 0.0, -0.1, 0.2), strict=True)]
    value = NO_WORSE.of(differences(even, reference))
    half = 2.776445 * math.sqrt(0.1 / 4 / 5)  # Student's t with four degrees of freedom
    assert value.value == pytest.approx(0, abs=1e-12)
    assert (value.low, value.high) == pytest.approx((-half, half), abs=1e-6)
    assert (value.goal, value.met) == (-1.0, True)
    assert NO_WORSE.of((-2.0, 1.0, 0.0, -1.0, 2.0)).met is False


def test_a_single_pair_is_a_check_without_interval_or_goal() -> None:
    value = NO_WORSE.of([-0.5], suffix="_check")
    assert (value.name, value.value, value.low, value.high) == ("d_check", -0.5, -0.5, -0.5)
    assert value.goal is None
    assert value.met is None


def test_a_report_has_the_agreed_form_and_no_folder_of_this_machine(tmp_path: Path) -> None:
    arguments = Arguments(full=True, data=tmp_path / "data", json=tmp_path / "out.json")
    values = [RATE.of([1 / 3, 2.0, 3.0])]
    report = make_report("made_up", arguments, values, "abc1234", {1, 0}, {"a": [1.0]})
    write_report(report, tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    read = json.loads(text)
    assert {"name", "command", "environment", "figures"} <= set(read)
    assert read["command"] == "python -m benchmarks.made_up --full --data DIR"
    assert {"processor", "cores", "torch", "versions", "seeds", "commit"} <= set(
        read["environment"]
    )
    assert read["environment"]["seeds"] == [0, 1]
    assert all(set(figure) == FORM for figure in read["figures"])
    assert read["figures"][0]["from"] == "measured in this run"
    assert str(tmp_path) not in text
    assert str(ROOT) not in text


def test_infinite_figures_are_not_written(tmp_path: Path) -> None:
    report = make_report("made_up", QUICK, [RATE.of([math.inf])], "abc1234", (), {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(report, tmp_path / "out.json")


def test_kept_figures_come_from_the_newest_report_and_say_so(tmp_path: Path) -> None:
    accuracy = Figure("accuracy", "share", "mean", at_least=0.97)
    for date, share in (("2030-01-02", 0.98), ("2030-01-01", 0.5)):
        values = [accuracy.of([share]), RATE.of([7.0])]
        report = make_report("made_up", QUICK, values, "abc1234", (0,), {})
        keep_report({**report, "date": date}, tmp_path)
    (copied,) = kept_values("made_up", ["accuracy", "never_measured"], tmp_path)
    assert (copied.value, copied.goal, copied.met) == (0.98, 0.97, True)
    assert "made_up-2030-01-02" in copied.source
    assert "commit abc1234" in copied.source
    assert kept_values("another", ["accuracy"], tmp_path) == []


def test_reports_of_older_code_are_neither_copied_nor_shown(tmp_path: Path) -> None:
    def shown() -> tuple[bool, str]:
        """Whether the table is there, and what is said of goals without a figure."""
        lines = tables.tables(tmp_path).splitlines()
        (missing,) = (one for one in lines if one.startswith(f"- {UNEVEN.title}: `"))
        return f"## {UNEVEN.title}" in lines, missing

    kills = UNEVEN["kills_recovered"]
    report = make_report("uneven", QUICK, [kills.of([20.0])], "abc1234", (0,), {})
    keep_report({**report, "date": "2026-11-23"}, tmp_path)
    assert kept_values("uneven", [kills.name], tmp_path) == []
    table, missing = shown()
    assert not table
    assert f"`{kills.name}`" in missing
    assert missing.endswith("last figures in [log.md](log.md#uneven).")
    keep_report({**report, "date": SINCE}, tmp_path)
    assert kept_values("uneven", [kills.name], tmp_path)[0].value == 20
    table, missing = shown()
    assert table
    assert f"`{kills.name}`" not in missing


def test_all_percentages_in_tables_are_written_alike() -> None:
    for unit, value in (("share", 0.22871), ("%", 22.871)):
        assert tables.shown_value({"unit": unit, "value": value}) == "22.9 %"


def test_a_copied_figure_is_not_copied_on_as_if_it_were_measured_there(tmp_path: Path) -> None:
    copied = replace(RATE.of([7.0]), source="kept: made_up-2026-11-21-abc1234.json")
    report = make_report("made_up", QUICK, [copied], "abc1234", (0,), {})
    keep_report({**report, "date": SINCE}, tmp_path)
    assert kept_values("made_up", ["rate"], tmp_path) == []


def test_a_claim_that_was_not_measured_on_this_code_says_where_older_figures_are(
    tmp_path: Path,
) -> None:
    lines = tables.papers(tmp_path).splitlines()
    (row,) = (one for one in lines if "AGS is 9 points more" in one)
    assert row.endswith("| last figures in [log.md](log.md#large_batch) |  | not run |")


def test_a_value_survives_json() -> None:
    value = RATIO.of([2.0, 3.0])
    assert Value.from_json(value.as_json()) == value


def test_arms_take_turns_and_the_order_is_reversed_from_round_to_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns: list[str] = []

    def arm(name: str, rates: list[float]) -> float:
        turns.append(name)
        return rates.pop(0)

    slow, fast = [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]
    found = take_turns({"slow": lambda: arm("slow", slow), "fast": lambda: arm("fast", fast)}, 3)
    assert turns == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert found == {"slow": [1.0, 2.0, 3.0], "fast": [10.0, 20.0, 30.0]}
    assert capsys.readouterr().err.count("\n") == 3


def test_arms_are_started_anew_after_so_many_rounds() -> None:
    started_arms: list[Any] = []

    class Counting(SimpleNamespace):
        """An arm whose speed counts its turns, and says which start it is of."""

        def turn(self, **_: int) -> int:
            self.turns += 1
            return 100 * self.start + self.turns

    def start() -> Any:
        starts = len(started_arms)
        ended: list[None] = []
        arm = Counting(start=starts, turns=0, ready=str, stop=lambda: ended.append(None))
        assert all(len(one.ended) == 1 for one in started_arms)  # of the starts before
        arm.ended = ended
        started_arms.append(arm)
        return arm

    found = images_per_second({"only": start}, 2, lead_in=0, steps=1, starts=3)
    assert found == {"only": [1, 2, 101, 102, 201, 202]}


def test_the_command_line_is_quick_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHWRIGHT_DATA", raising=False)
    assert parse_arguments("made up", []) == QUICK
    assert parse_arguments("made up", ["--full", "--data", "x"]).data == Path("x")
    with pytest.raises(SystemExit):
        parse_arguments("made up", ["--full", "--quick"])


def test_a_benchmark_measures_in_a_folder_that_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", "the user's")
    folders = []

    def measure(arguments: Arguments, folder: Path) -> tuple[dict[str, list[float]], Any]:
        assert os.environ["BATCHWRIGHT_CACHE"].startswith(str(folder))
        assert arguments.keep == folder / "kept"
        folders.append(folder)
        return {"rate": [2.0], "rate_check": [3.0], "a_over_b": []}, {"rate": [2.0]}

    words = ["--quick", "--json", str(tmp_path / "out.json")]
    made_up = Benchmark("made_up", "Made up", "", (RATE, RATIO), seeds=(7,))
    made_up.run(measure, "What it is.", words)
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (report["name"], report["environment"]["seeds"]) == ("made_up", [0])
    values = {one["name"]: one["value"] for one in report["figures"]}
    assert values == {"rate": 2.0, "rate_check": 3.0}
    assert report["measurements"] == {"rate": [2.0]}
    assert not folders[0].exists()


def test_a_benchmark_that_needs_data_says_so_before_it_measures(monkeypatch, capsys) -> None:
    monkeypatch.delenv("BATCHWRIGHT_DATA", raising=False)
    for needs, words in (("always", []), ("full", ["--full"])):
        made_up = Benchmark("made_up", "Made up", "", (), needs_data=needs)
        with pytest.raises(SystemExit, match="2"):
            made_up.run(None, "What it is.", words)
        assert "made_up needs --data DIR here" in capsys.readouterr().err


MISSED = {
    "fastapi, sqlalchemy": lambda _: runpy.run_path(service.__file__, run_name="__main__"),
    "schemathesis, playwright": partial(service.measure, QUICK),
    "pytorch_optimizer": partial(large_batch.measure, replace(QUICK, full=True)),
    "torchvision": partial(large_networks.measure, QUICK),
}


@pytest.mark.parametrize("missed", MISSED)
def test_packages_that_a_benchmark_would_miss_late_are_named_first(
    missed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.harness.benchmark.find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")  # Chromium
    with pytest.raises(SystemExit, match="2"):
        MISSED[missed](tmp_path)
    assert re.fullmatch(f"error: {missed} not installed: pip install .*\n", capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]


def test_the_table_shows_a_missed_goal(capsys: pytest.CaptureFixture[str]) -> None:
    print_values([RATIO.of([0.5])])
    shown = capsys.readouterr().out
    assert "a_over_b" in shown
    assert "NO" in shown


@pytest.mark.parametrize("name", tables.ORDER)
def test_figures_are_declared_once_with_a_known_statistic_and_one_goal_at_most(name: str) -> None:
    declared = tables.declared(name).figures
    names = [one.name for one in declared]
    assert len(set(names)) == len(names)
    for one in declared:
        assert one.statistic in STATISTICS
        goals = (one.at_least, one.at_most, one.above, one.near)
        assert sum(goal is not None for goal in goals) <= 1
        assert one.above is None or one.statistic == "interval"


@pytest.mark.parametrize(
    ("one", "values", "word"),
    [
        (Figure("a", "ratio", "median", at_least=1.0), [1.1, 1.2, 1.3], "yes"),
        (Figure("a", "ratio", "median", at_least=1.0), [0.7, 0.8, 0.9], "no"),
        (Figure("a", "ratio", "median", at_least=1.0), [0.7, 1.2, 1.3], "undecided"),
        (Figure("a", "ratio", "median", at_least=1.0), [0.7, 1.2, 1.3] * 30, "yes"),
        (Figure("a", "ratio", "median", at_least=1.0), [0.9], "no"),
        (Figure("a", "points", "interval", above=0.0), [-1.0, 0.0, 2.0], "undecided"),
        (Figure("a", "points", "interval", above=0.0), [-1.0, -1.1, -1.2], "no"),
        (Figure("a", "ratio", "median", near=(1.0, 0.1)), [0.95, 1.0, 1.05], "yes"),
        (Figure("a", "ratio", "median", near=(1.0, 0.1)), [0.95, 1.0, 1.6], "undecided"),
        # A mean has a range, which does not tell how uncertain it is.
        (Figure("a", "ratio", "mean", at_most=1.0), [0.5, 1.0, 2.0], "no"),
        (Figure("a", "ratio", "mean", at_most=1.2), [0.5, 1.0, 2.0], "yes"),
        # The largest is what is judged, however small the others are.
        (Figure("a", "share", "largest", at_most=0.1), [0.01, 0.02, 0.2], "no"),
        (Figure("a", "ratio", "median"), [1.0, 2.0], ""),
    ],
)
def test_a_goal_that_a_value_may_miss_or_meet_is_undecided(
    one: Figure, values: list[float], word: str
) -> None:
    assert tables.judged(one.of(values).as_json(), one) == word


# ------------------------------------------------------------------------------- uneven workers


def made_turn(intervals: list[float], started: float = 100.0) -> Turn:
    """A turn whose intervals have steps of these seconds each."""
    ends, now = [], started
    for seconds in intervals:
        for _ in range(REBALANCE_STEPS):
            now += seconds
            ends.append(now)
    return Turn(started, tuple(ends), 128 * len(ends))


def test_recovery_counts_whole_intervals_from_the_first_after_the_change() -> None:
    turn = made_turn([0.06, 0.06, 0.12, 0.085, 0.08, 0.08])
    end = turn.step_ends[-1]
    middle_of_second = turn.started + 1.5 * REBALANCE_STEPS * 0.06
    # Number 0 is the third interval, slow throughout; the fourth is within 10 % of 0.08.
    assert recovery_intervals(turn, middle_of_second, end, 0.08) == 1
    assert recovery_intervals(turn, middle_of_second, end, 0.12) == 0
    assert recovery_intervals(turn, turn.started, end, 0.06) == 0
    # A load that starts on the border of two intervals is whole in the second of them.
    border = turn.step_ends[2 * REBALANCE_STEPS - 1]
    assert recovery_intervals(turn, border, end, 0.08) == 1


def test_a_recovery_that_does_not_come_counts_all_intervals_before_the_next_change() -> None:
    turn = made_turn([0.06, 0.12, 0.12, 0.12, 0.06])
    begins = turn.started + 0.5 * REBALANCE_STEPS * 0.06
    ends = turn.step_ends[4 * REBALANCE_STEPS - 1] - 0.01  # in the fourth interval
    assert recovery_intervals(turn, begins, ends, 0.08) == 2
    assert recovery_intervals(turn, ends, turn.step_ends[-1], 0.05) == 1
    assert recovery_intervals(turn, turn.step_ends[-2], turn.step_ends[-1], 0.06) is None


def test_the_median_step_of_an_interval_decides() -> None:
    turn = made_turn([0.12, 0.08])
    slow_at_first = [1.0 if i % REBALANCE_STEPS < 3 else 0.0 for i in range(2 * REBALANCE_STEPS)]
    shifts = [sum(slow_at_first[: i + 1]) for i in range(len(slow_at_first))]
    ends = tuple(end + shift for end, shift in zip(turn.step_ends, shifts, strict=True))
    turn = Turn(turn.started, ends, turn.images)
    assert recovery_intervals(turn, turn.started, ends[-1], 0.08) == 1


def test_slowest_over_fastest_takes_input_and_compute_of_the_epoch_asked_for() -> None:
    def line(epoch: int, *seconds: tuple[float, float]) -> RunLine:
        parts: dict[str, Any] = {}
        for rank, (input_seconds, compute) in enumerate(seconds):
            parts[f"batch/local/{rank}"] = 8
            parts[f"time/rank{rank}/input_s"] = input_seconds
            parts[f"time/rank{rank}/compute_s"] = compute
        return typed({"kind": "epoch", "epoch": epoch, **parts})

    records = [
        typed({"kind": "shares"}),
        line(0, (0.0, 9.0), (0.0, 1.0)),
        line(2, (0.5, 4.0), (1.0, 4.4)),
    ]
    assert slowest_over_fastest(records, 2) == pytest.approx(5.4 / 4.5)
    with pytest.raises(ValueError, match="no line about epoch 3"):
        slowest_over_fastest(records, 3)


UNDISTURBED = KilledRun(10.0, (), 0, 0)


def test_shares_are_compared_within_a_start_over_the_epochs_that_count() -> None:
    epochs = {"equal": 2.0, "ours": 1.5, "published": 1.6}
    start = {
        f"{way}-{merge}": [9.0, 4.0, 4.0, one, 4.0, 4.0, 4.0]
        for way, one in epochs.items()
        for merge in shares.MERGES
    }
    found = shares.found_of({network: [start, start] for network in shares.NETWORKS})
    assert found.keys() == {one.name for one in shares.BENCHMARK.figures}
    assert found["ours_over_equal_steady_sum_resnet8"] == pytest.approx([0.75, 0.75])
    assert found["published_over_ours_steady_average_resnet8"] == pytest.approx([1.6 / 1.5] * 2)
    assert found["published_over_equal_changing_sum_resnet8"] == pytest.approx([21.6 / 22] * 2)


def test_a_start_that_is_kept_is_taken_from_there_only_for_the_very_same_plans(tmp_path) -> None:
    known = made_up_network()
    plans = shares.plans_of(known, 0)
    assert {plan.method for plan in plans.values()} == {"plain", "dynamic-batch", "dual-batch"}
    seconds = {arm: [1.0] * len(shares.LOADS) for arm in plans}
    told = {"plans": shares._digests(plans), "seconds": seconds}
    (tmp_path / "one.json").write_text(json.dumps(told))
    assert shares._kept(tmp_path / "one.json", plans) == seconds
    assert shares._kept(tmp_path / "one.json", shares.plans_of(known, 1)) is None
    assert shares._kept(tmp_path / "other.json", plans) is None


def test_workers_on_one_core_are_compared_by_their_last_and_by_all_epochs_but_the_first() -> None:
    ideal = 9 * 2 / 3
    starts = [
        {
            "equal": [50.0, 9.0, 9.0, 9.0, 9.0],
            "ours": [50.0, 8.0, 7.0, ideal, ideal],
            "published": [50.0, 9.0, 9.0, 6.6, 6.6],
        }
    ] * 2
    found = shared_cores.found_of(starts)
    assert found.keys() == {one.name for one in shared_cores.BENCHMARK.figures}
    assert found["ours_over_equal_last"] == pytest.approx([2 / 3] * 2)
    assert found["published_over_ours_last"] == pytest.approx([1.1] * 2)
    assert found["published_over_equal_counted"] == pytest.approx([31.2 / 36] * 2)


def test_workers_on_one_core_share_a_batch_that_goes_through_the_network_at_once() -> None:
    plans = shared_cores.plans_of(made_up_network(), 0)
    assert plans.keys() == {"equal", "ours", "published"}
    for way, plan in plans.items():
        assert plan.method == ("plain" if way == "equal" else "dynamic-batch")
        assert plan.stages[0].local_batch_sizes == (64,) * len(shared_cores.CORES)
        assert plan.stages[0].micro_batch_size == plan.job.global_batch == 256
    assert plans["published"].job.rebalance == "published"


def test_a_start_is_made_once_and_then_taken_from_where_it_is_kept(tmp_path, monkeypatch) -> None:
    plans = shared_cores.plans_of(made_up_network(), 0)
    monkeypatch.setattr(shares, "Arm", lambda *_, **__: Sleeping())
    made = []

    def through(arms: Any) -> shares.Seconds:
        made.append([*arms])
        return {name: [1.0] for name in arms}

    file = tmp_path / "start-0.json"
    for _ in range(2):
        found = shares.seconds_of(file, plans, tmp_path, shared_cores.CORES, through)
        assert found == {name: [1.0] for name in plans}
    assert made == [[*plans]]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["start-0.json"]


class Sleeping:
    """An arm that is set up at once and does nothing."""

    def ready(self) -> None:
        pass

    stop = ready


def made_up_network() -> Opened:
    """What plans want to know of data that are nowhere."""
    facts = made_up_data("none", shares.IMAGES, 100, 32)
    return Opened("digits", facts, facts_of("resnet8", 100, shares.SIDE))


def test_engines_are_compared_within_a_round_and_those_that_are_not_there_are_left_out() -> None:
    found = engines.found_in({"torchrun": [5.0, 9.0], "slurm": [8.0, 10.0]})
    assert found["slurm_later_seconds"] == [3.0, 1.0]
    assert not [name for name in found if name.startswith("ray")]
    assert set(found) <= {one.name for one in engines.BENCHMARK.figures}


def test_a_slurm_that_is_installed_and_does_not_come_up_is_told_apart_from_none(
    tmp_path: Path, monkeypatch
) -> None:
    """Tests that want one are skipped without it, and fail where it is broken."""
    for name in ("slurmctld", "slurmd", "sbatch", "sinfo", "scancel", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm_nodes, "_LAST_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="nodes did not come"):
        slurm_nodes.slurm_nodes(tmp_path).__enter__()


def test_kills_are_added_up_over_the_runs() -> None:
    runs = [KilledRun(22.0, (1.0, 2.0, 3.0), 3, 0), KilledRun(12.0, (1.0,), 1, 2)]
    found = UNEVEN.values(kills_found(UNDISTURBED, runs, wanted=4))
    recovered, lost, seconds = found.values()
    assert (recovered.value, recovered.repeats, recovered.goal, recovered.met) == (4, 4, 4, True)
    assert (lost.value, lost.high, lost.goal, lost.met) == (2, 2, 0, False)
    assert (seconds.value, seconds.low, seconds.high) == (3.0, 2.0, 4.0)


def test_a_run_that_does_not_end_says_how_far_it_came_and_nothing_of_samples() -> None:
    found = kills_found(UNDISTURBED, [KilledRun(9.0, (1.0, 2.0), 1, None)], wanted=4)
    (recovered,) = UNEVEN.values(found).values()
    assert (recovered.value, recovered.repeats, recovered.met) == (1, 2, False)


@pytest.mark.slow
def test_the_job_that_is_killed_counts_its_samples(tmp_path: Path) -> None:
    train(tmp_path, job_plan(workers=1, epochs=2, samples=4 * BATCH))
    assert miscounted(tmp_path, epochs=2) == 0
    with pytest.raises(ValueError, match="without 3 epochs"):
        miscounted(tmp_path, epochs=3)


def test_a_sample_left_out_and_one_repeated_are_both_counted() -> None:
    samples = Samples(4 * BATCH)
    model = Counting(len(samples))
    optimizer = torch.optim.SGD([model.numbers], lr=float(BATCH))
    order = [*range(1, len(samples)), 7]  # without 0
    for first in range(0, len(samples), BATCH):
        batch = torch.utils.data.default_collate([samples[i] for i in order[first : first + BATCH]])
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()
    assert model.miscounted(1) == 2


def test_the_job_that_is_killed_has_no_tail_which_would_count_otherwise() -> None:
    assert job_plan().data.train_samples % BATCH == 0


# ------------------------------------------------------------------------------------------- arms


@pytest.mark.slow
def test_an_arm_sleeps_between_turns_in_a_process_of_its_own_and_ends_when_told() -> None:
    arm = Arm(counting, 128)
    assert arm.turn(lead_in=2, steps=3) > 0
    assert arm.turn(lead_in=0, steps=1) > 0
    arm.stop()
    with pytest.raises(RuntimeError, match="counting ended"):
        arm.turn(lead_in=0, steps=1)


def test_what_feeds_a_tracker_stands_still_and_rests_once_it_has_all(tmp_path: Path) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        State(tmp_path).note("kept", len(slept))  # a line is handed on meanwhile

    def runs(state: str) -> bool:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == state

    words = [sys.executable, "-c", "input()", "trackers.following"]
    (tmp_path / METRICS).write_text("{}\n" * 3)
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        assert until(lambda: beside.command_line(process.pid), 60)  # empty as it is started
        one = beside.Beside(os.getpid(), tmp_path, clock=lambda: len(slept), sleep=sleep)
        one.stand_still()
        assert until(partial(runs, "T"), 60)
        one.rest()
        assert len(slept) == 3
        (tmp_path / METRICS).write_text("{}\n" * 999)
        with pytest.raises(RuntimeError, match="does not come to rest"):
            one.rest()
        one.go_on()
        assert until(lambda: not runs("T"), 60)
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(RuntimeError, match="nothing feeds a tracker"):
        one.stand_still()


def test_a_long_turn_tells_computing_waiting_for_a_core_and_waiting_for_others_apart() -> None:
    before, after = {1: (5.0, 1.0), 2: (0.5, 0.0)}, {1: (9.0, 3.5), 2: (0.5, 0.0), 3: (1.0, 1.0)}
    assert turns.long_turn(130.0, before, after) == (
        "a turn of 130.0 s: process 1 had a core for 4.0 s and waited for one for 2.5 s; "
        "process 2 had a core for 0.0 s and waited for one for 0.0 s"
    )


def test_what_a_process_has_had_of_a_core_is_counted_with_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        before = turns.core_seconds()
        assert {os.getpid(), child.pid} <= before.keys()
        spent = time.thread_time()
        while time.thread_time() - spent < 0.05:
            pass
        ran = turns.core_seconds()[os.getpid()][0] - before[os.getpid()][0]
        child.communicate(b"\n")
    assert ran >= 0.04


def test_a_child_that_ends_while_it_is_looked_at_is_left_out(monkeypatch) -> None:
    gone = 2**22 + 1  # more than Linux counts to
    monkeypatch.setattr(turns, "children", lambda _: [gone])
    assert turns.core_seconds().keys() == {os.getpid()}


class OneTurn:
    """A pipe whose other end asks for one turn of a step and then for no more."""

    def __init__(self) -> None:
        self.requests, self.sent = [(0, 1)], []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def recv(self) -> tuple[int, int] | None:
        return self.requests.pop() if self.requests else None


@pytest.mark.parametrize("longest", [-1.0, 3600.0])
def test_only_a_turn_that_takes_too_long_explains_itself(longest, monkeypatch, capsys) -> None:
    armed: list[str] = []
    monkeypatch.setattr(turns, "LONG_SECONDS", longest)
    monkeypatch.setattr(
        turns.faulthandler, "dump_traceback_later", lambda *_, **__: armed.append("on")
    )
    monkeypatch.setattr(
        turns.faulthandler, "cancel_dump_traceback_later", lambda: armed.append("off")
    )
    arm = turns.Turns(pipe := OneTurn())
    arm.ready()
    with pytest.raises(SystemExit):
        arm.step_done(64)
    assert pipe.sent[1].images == 64
    assert armed == ["on", "off"]
    assert (f"process {os.getpid()} had a core" in capsys.readouterr().err) == (longest < 0)


@pytest.mark.slow
def test_an_arm_that_dies_is_named() -> None:
    arm = Arm(failing)
    with pytest.raises(RuntimeError, match="failing ended"):
        arm.turn(lead_in=0, steps=5)
    arm.stop()


@pytest.mark.slow
def test_an_arm_of_two_workers_is_a_group_pinned_to_its_cores_that_sleeps_at_one_step(
    tmp_path: Path,
) -> None:
    core = min(os.sched_getaffinity(0))
    with started({"summing": lambda: Arm(summing, tmp_path, cores=(core, core))}) as arms:
        for steps in (3, 2):
            arms["summing"].begin(lead_in=1, steps=steps)
            turn = arms["summing"].end()
            assert turn.images == 3 * steps  # of 1 and 2, summed over the workers
            assert len(turn.step_ends) == steps
            assert turn.started < turn.step_ends[0]
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [str({core})] * 2


# ------------------------------------------------------------------------- cyclic and data path


def test_cyclic_rows_are_the_published_ones_scaled() -> None:
    cifar = rows((24, 32), 140)
    assert [(row.epochs, row.resolution) for row in cifar["cyclic"]] == [
        (40, 24), (40, 32), (20, 24), (20, 32), (10, 24), (10, 32)
    ]  # fmt: skip
    assert [row.rate for row in cifar["cyclic"]] == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert [(row.epochs, row.resolution) for row in cifar["fixed"]] == [
        (80, 32),
        (40, 32),
        (20, 32),
    ]
    folder = rows((88, 124, 160), 105)
    assert [row.epochs for row in folder["cyclic"]] == [20, 20, 20, 10, 10, 10, 5, 5, 5]
    for arms in (cifar, folder):
        assert len({sum(row.epochs for row in arm) for arm in arms.values()}) == 1


def test_epochs_of_the_cyclic_benchmark_divide() -> None:
    for name, task in timed_tasks(Path()).items():
        for table in rows(task.sides, EPOCHS[name]).values():
            assert sum(row.epochs for row in table) == EPOCHS[name]
    with pytest.raises(ValueError, match="do not divide"):
        rows((88, 124, 160), 14)


def test_time_saved_is_of_training_alone_and_beside_it_with_evaluation() -> None:
    fast = Trained(training=80.0, evaluation=20.0, copying=3.0, accuracy=0.51)
    slow = Trained(training=100.0, evaluation=20.0, copying=0.0, accuracy=0.50)
    found = CYCLIC.values(times_found("cifar", [{"cyclic": fast, "fixed": slow}] * 2))
    assert found["cifar_time_saved"].value == pytest.approx(0.2)
    assert found["cifar_time_saved"].met
    assert found["cifar_time_saved_with_evaluation"].value == pytest.approx(1 / 6)
    assert found["cifar_copy_seconds"].value == 3.0


def test_warm_ups_are_held_against_none_and_the_best_by_the_same_seeds() -> None:
    shares = {0.0: (0.30, 0.32), 1.0: (0.33, 0.34), 4.0: (0.31, 0.33)}
    swept = SimpleNamespace(
        keys=[SimpleNamespace(key="global_batch", values=(960,))],
        settings=[
            SimpleNamespace(
                values=(960, length),
                accuracy=SimpleNamespace(value=sum(some) / 2, standard_error=0.001),
                done=2,
            )
            for length, some in shares.items()
        ],
        runs_of=lambda values: [SimpleNamespace(accuracy=one) for one in shares[values[1]]],
    )
    found = warmup.warmups_found(swept, warmup.BENCHMARK, epochs=18)
    assert found["warmup_best_epochs_960"].value == pytest.approx(5)
    assert found["warmup_gain_points_960"] == pytest.approx([3.0, 2.0])
    assert found["longest_over_best_points_960"] == pytest.approx([-2.0, -1.0])


def test_accuracy_of_cycles_is_no_worse_only_with_its_whole_interval() -> None:
    def runs(*accuracies: float) -> list[Run]:
        return [Run(one, 1.0, (128,)) for one in accuracies]

    fixed = runs(50.0, 51.0, 49.0)
    near, wide = (
        CYCLIC.values(accuracies_found("cifar", {"cyclic": some, "fixed": fixed}))["cifar_accuracy"]
        for some in (runs(50.5, 51.4, 49.6), runs(53.0, 50.0, 48.5))
    )
    assert (near.value, near.met) == (pytest.approx(0.5), True)
    assert wide.value > 0
    assert wide.met is False


def test_data_path_figures_are_ratios_within_rounds() -> None:
    found = data_path.found_of(
        {"low": [310.0, 640.0], "top": [100.0, 200.0]}, {"ours": [300.0], "pil": [200.0]}
    )
    low_over_top, loader, *rates = data_path.BENCHMARK.values(found).values()
    assert (low_over_top.value, low_over_top.met) == (pytest.approx(3.15), True)
    assert (loader.value, loader.met) == (1.5, False)
    assert {rate.unit for rate in rates} == {"images/s"}


def test_the_usual_images_and_ours_show_the_same_part(tmp_path: Path) -> None:
    pixels = torch.zeros(375, 500, 3, dtype=torch.uint8)
    pixels[150:225, 200:300] = 255
    Image.fromarray(pixels.numpy()).save(tmp_path / "0.jpg", quality=95)
    usual, label = UsualImages([tmp_path / "0.jpg"], [0], square_of, 96, (MEAN, STD))[0]
    files = ImageFiles(tmp_path, ["0.jpg"], torch.tensor([0]), side=96, mean=MEAN, std=STD)
    ours, _ = files[0]
    assert usual.shape == ours.shape == (3, 96, 96)
    assert label == 0
    # How much of the crop the bright part covers tells the scale, wherever the crop begins.
    bright = []
    for image in (usual.float(), ours.float()):
        dark, light = image[0].min(), image[0].max()
        bright.append(float(((image[0] - dark) / (light - dark)).mean()))
    assert bright[0] == pytest.approx(bright[1], rel=0.03)


def test_a_subset_is_spread_evenly_over_the_store() -> None:
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 2, 2, 3).contiguous()
    part = subset(ImageStore.from_images(images, torch.arange(10)), 5)
    assert part.labels.tolist() == [0, 2, 4, 6, 8]
    assert int(part.image(3)[0, 0, 0]) == 6


# ------------------------------------------------------------------------------ gradient_overhead


def test_overheads_are_step_times_over_those_without_round_by_round():
    rates = {"blind": [100.0, 200.0], "noise": [100.0, 196.0], "ags": [80.0, 160.0]}
    noise, ags = gradient_overhead.BENCHMARK.values(gradient_overhead.found_of(rates)).values()
    assert (noise.name, noise.goal, noise.met) == ("noise_scale_overhead", 0.02, True)
    assert noise.value == pytest.approx((0.0 + 200 / 196 - 1) / 2)
    assert (ags.name, ags.goal, ags.met) == ("ags_overhead", 0.03, False)
    assert ags.value == pytest.approx(0.25)


def first_step_of(arm, monkeypatch):
    """Weights after the first step of an arm, and whether parts of it were measured."""
    tasks, measured = [], []

    class EnoughError(Exception):
        """The arm has taken its step."""

    def end(samples):
        raise EnoughError

    def note(adaptive, tally, norms, *, batch):
        measured.append(tally.local_sqr_norms is not None)

    def opened_task(*arguments):
        tasks.append(open_task(*arguments))
        return tasks[0]

    monkeypatch.setattr(gradient_overhead, "open_task", opened_task)
    monkeypatch.setattr(gradient_overhead, "prepare_process", lambda cores: None)
    monkeypatch.setattr(Adaptive, "learn", note)
    torch.manual_seed(0)
    with pytest.raises(EnoughError):
        gradient_overhead.trained(SimpleNamespace(ready=lambda: None, step_done=end), arm)
    return [p.detach().clone() for p in tasks[0].network.parameters()], measured


@pytest.mark.slow
def test_the_blind_arm_takes_the_steps_of_the_others_and_measures_no_norms(monkeypatch):
    monkeypatch.setattr(all_reduce_run, "Reducer", all_reduce_run.Reducer)  # the arm sets another
    weights, measured = first_step_of("noise", monkeypatch)
    blind, unmeasured = first_step_of("blind", monkeypatch)
    assert (measured, unmeasured) == ([True], [False])
    assert all(torch.equal(a, b) for a, b in zip(weights, blind, strict=True))


# ---------------------------------------------------------------------------------- step_overhead


def test_costs_of_a_tensor_are_those_over_the_plain_step_of_the_same_round():
    rounds = {"plain": [100.0, 200.0], "session": [900.0, 1160.0], "ddp": [260.0, 360.0]}
    found = step_overhead.found_of({"2_160": rounds, "1_20": rounds})
    figures = step_overhead.BENCHMARK.values(found)
    head = figures["step_overhead_us_per_tensor"]
    assert head.value == figures["step_us_per_tensor_2_160"].value == 5.5
    assert (head.goal, head.met) == (6.0, True)
    assert figures["ddp_us_per_tensor_1_20"].value == 8.0
    assert "step_us_per_tensor_1_20" in figures


def test_own_data_figures_are_over_the_cases() -> None:
    def epoch(data: str, predicted: float, alone: float, noise: float | None) -> Epoch:
        return Epoch(
            data,
            2,
            1,
            predicted,
            0.9 * predicted,
            1.1 * predicted,
            alone,
            1.0,
            (1, 1),
            20.0,
            "",
            0.5,
            noise,
            100.0,
        )

    cases = [
        epoch("pictures", 1.05, 0.3, 25.0),
        epoch("pictures", 0.8, 0.4, None),
        epoch("tensors", 1.02, 0.9, 200.0),
    ]
    found = first_contact.BENCHMARK.values(own_data_found(cases))
    assert found["own_data_epoch_error"].value == pytest.approx(0.05)
    assert found["own_data_epoch_error"].met
    assert found["own_data_worst_error"].value == pytest.approx(0.2)
    assert found["own_data_coverage"].value == pytest.approx(2 / 3)
    assert not found["own_data_coverage"].met
    assert found["own_data_without_loading"].value == pytest.approx(0.65)
    noise = found["own_data_noise_ratio"]
    assert (noise.value, noise.low, noise.high, noise.met) == (0.25, 0.25, 2.0, False)


def test_the_worst_choice_of_a_format_counts() -> None:
    def choice(chosen: Any, plain: float, half: float) -> Regret:
        seconds: Any = {"float32": plain, "bfloat16": half}
        return Regret("resnet8", "tensors", 256, 256, chosen, half / plain, seconds)

    found = [choice("bfloat16", 1.0, 0.5), choice("float32", 1.02, 1.0), choice("float32", 1, 2)]
    worst, middle = first_contact.BENCHMARK.values(regrets_found(found)).values()
    assert (worst.value, worst.met) == (1.02, True)
    assert middle.value == 0.5


def test_jpeg_files_are_real_ones_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "FILES", 8)
    made = jpeg_files(tmp_path / "made")
    assert len(list(made.glob("*/*.jpg"))) == 8
    again = jpeg_files(tmp_path / "linked", made)
    assert (again / "class1" / "0001.jpg").resolve() == made / "class1" / "0001.jpg"
    monkeypatch.setenv("OWN_DATA", str(again))
    training, held_out, names = SETS["pictures"]()
    assert (len(training), len(held_out), len(names)) == (7, 1, 4)
    image, label = training[6]
    assert image.shape == (3, 64, 64)
    assert label == 3


# --------------------------------------------------------------------------------- the demo run


def finished_run(run_folder: Path, **_: object) -> None:
    run_folder.mkdir()
    make_plan().save(run_folder / "plan.json")
    make_profile().save(run_folder / "profile.json")
    make_summary().save(run_folder / "summary.json")
    (run_folder / "metrics.jsonl").write_text(json.dumps({"kind": "note", "text": "so"}) + "\n")


def test_a_run_beside_other_programs_is_no_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = "other programs used 0.80 of 2 cores"
    monkeypatch.setattr(demo_run.bw, "run", finished_run)
    monkeypatch.setattr(demo_run, "load_words", lambda _: busy)
    monkeypatch.setattr(demo_run.demo, "__file__", str(tmp_path / "demo.py"))
    monkeypatch.setattr(sys, "argv", ["demo_run"])
    with pytest.raises(SystemExit, match="not packed: other programs used"):
        demo_run.main()
    assert not (tmp_path / "demo.json.gz").exists()
    assert "epochs inside the interval of their median" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["demo_run", "--busy"])
    demo_run.main()
    assert (tmp_path / "demo.json.gz").stat().st_size > 1000
