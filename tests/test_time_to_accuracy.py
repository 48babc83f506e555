"""The scripts that `batchwright run` is compared with, the lines of these runs, and their score."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.harness.kept_runs import read_lines
from benchmarks.planning import plain_images
from benchmarks.planning import time_to_accuracy_runs as runs
from benchmarks.planning.time_to_accuracy import (
    BENCHMARK,
    Pair,
    found_of,
    pairs_of,
    scores_of,
    told,
)
from benchmarks.planning.time_to_accuracy_runs import (
    FIRST_RATES,
    LOADERS,
    RATES,
    TASKS,
    Asked,
    Bench,
    TimeIsUpError,
)

from batchwright.records import Estimate, MachineLoad
from batchwright.records.documents import write_record
from batchwright.records.lines.line_files import line_text
from batchwright.workload.task import build_network
from run_lines import typed
from samples import make_plan, make_profile, make_summary

SHORT, LONG = "groups-resnet8", "cifar-resnet8"

# ----------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", plain_images.NETWORKS)
def test_a_script_trains_the_very_network_of_that_name(name: str) -> None:
    ours, theirs = build_network(name, classes=10, side=32), plain_images.NETWORKS[name](10)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    images = torch.rand(2, 3, 32, 32)
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        assert torch.allclose(ours(images), theirs(images), atol=1e-5)


def test_a_look_trains_on_a_quarter_of_the_images_and_judges_on_others(tmp_path: Path) -> None:
    for part, name in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        (tmp_path / part / name).mkdir(parents=True)
        for number in range(20):
            image = Image.new("RGB", (16, 12), (number, 0, 0))
            image.save(tmp_path / part / name / f"{number:02}.png")
    asked = Namespace(data=f"imagefolder:{tmp_path}", side=8, loaders=0, device="cpu", look=True)
    train, held_out, classes = plain_images.loaders(asked)
    assert classes == 2
    assert not set(train.dataset.indices) & set(held_out.dataset.indices)
    assert (len(train.dataset), len(held_out.dataset)) == (10, 2)
    images, labels = next(iter(train))
    assert images.shape == (10, 3, 8, 8)
    assert sorted(labels.tolist()) == [0] * 5 + [1] * 5
    asked.look = False
    assert [len(one.dataset) for one in plain_images.loaders(asked)[:2]] == [40, 40]


# ------------------------------------------------------------------------------------------- lines


class MadeUp(Bench):
    """Runs that take no time: a second an epoch, more with fewer loader processes."""

    def __init__(self, lines: Path, **more: Any) -> None:
        super().__init__(lines, Path(), Path(), **more)
        self.order: list[Asked] = []

    def _wait_until_quiet(self) -> None:
        if time.monotonic() >= self.until:
            raise TimeIsUpError

    def _script(self, asked: Asked) -> dict[str, Any]:
        self.order.append(asked)
        assert asked.loaders is not None
        epoch = 3.0 - asked.loaders
        evaluations = [[2 + epoch * number, 10.0 * number] for number in range(1, asked.epochs + 1)]
        accuracy = 50.0 + (asked.rate == 0.3) + asked.seed
        return {"seconds": evaluations[-1][0], "whole_seconds": evaluations[-1][0],
                "accuracy": accuracy, "evaluations": evaluations}  # fmt: skip

    def _ours(self, asked: Asked) -> dict[str, Any]:
        self.order.append(asked)
        return {"seconds": 30.0, "training_seconds": 20.0, "accuracy": asked.target,
                "reached": True, "tries": [{"refused": True}]}  # fmt: skip


def test_looks_settle_loaders_length_and_rate(tmp_path: Path) -> None:
    bench = MadeUp(tmp_path / "lines.jsonl", lightning=Path("python"))
    best = runs.tuned(bench, SHORT, TASKS[SHORT])
    assert best.loaders == {"torch": 2, "lightning": 2}
    assert best.epochs == 30  # 120 s, four seconds each
    assert best.rate == 0.3
    looks = [one for one in bench.order if one.look]
    assert len(looks) == 2 * len(LOADERS) + len(FIRST_RATES) + 1  # and 1.0, beyond the best
    assert all(one.seed == 10 for one in looks)
    whole = bench.order[len(looks) :]
    assert [(one.arm, one.seed, one.epochs) for one in whole] == [("torch", 0, 30)] * 4
    assert {one.rate for one in whole} == {0.03, 0.1, 0.3, 1.0}  # all are near the best look


def test_whole_trainings_settle_the_rate_among_those_of_good_looks(tmp_path: Path) -> None:
    looks = {0.03: 40.0, 0.1: 55.0, 0.3: 60.0, 1.0: 62.0, 3.0: 10.0}
    whole = {0.1: 70.0, 0.3: 69.0, 1.0: 60.0}

    class Other(MadeUp):
        def _script(self, asked: Asked) -> dict[str, Any]:
            made = super()._script(asked)
            assert asked.rate is not None
            return {**made, "accuracy": (looks if asked.look else whole)[asked.rate]}

    best = runs.tuned(Other(tmp_path / "lines.jsonl"), SHORT, TASKS[SHORT])
    assert best.rate == 0.1


def test_the_best_rate_lies_between_two_others_or_at_the_end_of_all() -> None:
    for wanted in RATES:
        tried: list[float] = []

        def accuracy(rate: float, wanted: float = wanted, tried: list[float] = tried) -> float:
            tried.append(rate)
            return -abs(log(rate / wanted))

        found = runs.look_at_rates(accuracy)
        assert max(found, key=found.__getitem__) == wanted
        assert len(tried) == len(set(tried))  # each is trained once
        near = RATES.index(wanted)
        assert {*FIRST_RATES, *RATES[max(near - 1, 0) : near + 2]} <= set(tried)


def test_a_python_without_lightning_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for python in ("false", str(tmp_path / "nothing")):
        with pytest.raises(SystemExit, match="2"):
            runs.main(["--data", str(tmp_path), "--lightning-python", python])
        assert f"error: --lightning-python {python} cannot import" in capsys.readouterr().err


@pytest.mark.slow
def test_pairs_are_made_in_turns_short_tasks_first_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "Burner", nullcontext)
    lines = tmp_path / "lines.jsonl"
    tasks = {name: TASKS[name] for name in (LONG, SHORT)}
    bench = MadeUp(lines, lightning=Path("python"))
    runs.gather(bench, tasks)
    # Each task begins with whole trainings for its rate, of which 0.3 is the best.
    made = [one for one in bench.order if not one.look and one.rate in (None, 0.3)]
    names = [one.task for one in made]
    assert names[:10] == [SHORT] * 5 + [LONG] * 5
    assert names[10:] == ([SHORT] * 4 + [LONG] * 4) * 2 + [SHORT] * 2
    assert [one.arm for one in made[:5]] == ["torch", "torch", "ours", "lightning", "ours"]
    assert [one.against for one in made[:5]] == [None, None, "torch", None, "lightning"]
    assert made[2].target == 51.0
    assert [one.burner for one in made].count(True) == 2
    again = MadeUp(lines, lightning=Path("python"), until=time.monotonic())
    runs.gather(again, tasks)
    assert again.order == []
    with pytest.raises(TimeIsUpError):
        again.made(replace(made[0], seed=7))


def lines_of(commit: str, *arms: str, accuracy: float = 51.0, **more: Any) -> list[dict[str, Any]]:
    """Full runs of the short task with seed 0, as `runs.gather` asks for them."""
    return [
        {**vars(Asked(SHORT, arm, 0, 30, *(() if arm == "ours" else (2, 0.3)))),
         "accuracy": accuracy, "seconds": 1.0, "commit": commit, "processor": "here",
         **({"against": "torch", "target": accuracy} if arm == "ours" else {}), **more}
        for arm in arms
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("there", "anew", "made"),
    [
        ([], False, ["torch", "ours"]),
        (lines_of("old", "torch", "ours"), False, []),
        (lines_of("old", "torch", "ours"), True, ["torch", "ours"]),
        (lines_of("now", "torch", "ours"), True, []),
        (lines_of("now", "torch"), False, ["torch", "ours"]),
        (lines_of("old", "torch") + lines_of("now", "ours"), False, ["torch", "ours"]),
        (lines_of("now", "torch", "torch", "ours", "ours"), False, []),
        (lines_of("now", "torch", "lightning", "ours"), False, ["torch", "ours"]),
        (lines_of("now", "torch", "ours", target=50.0), False, ["torch", "ours"]),
        (lines_of("now", "torch", "ours", processor="another"), False, ["torch", "ours"]),
    ],
    ids=[
        "none",
        "old",
        "old anew",
        "now",
        "script alone",
        "two commits",
        "twice",
        "other",
        "goal",
        "processor",
    ],
)
def test_a_pair_is_made_together_or_not_at_all(
    there: list[dict[str, Any]], anew: bool, made: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(runs, "commit", lambda: "now")
    place = dict.fromkeys(("processor", "cores", "python", "torch"), "here")
    monkeypatch.setattr(runs, "environment", lambda _: place)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in there))
    bench = MadeUp(lines, anew=anew)
    best = runs.Tuned(30, 0.3, {"torch": 2})
    runs.pair(bench, SHORT, "torch", 0, best)
    assert [one.arm for one in bench.order] == made
    kept = read_lines(lines)
    assert kept[: len(there)] == there
    assert [(one["arm"], one["commit"]) for one in kept[len(there) :]] == [
        (arm, "now") for arm in made
    ]
    again = MadeUp(lines, anew=anew)
    runs.pair(again, SHORT, "torch", 0, best)
    assert again.order == []


@pytest.mark.parametrize(
    ("others", "made"),
    [((0.5, 0, 0), ["torch", "torch", "ours"]), ((0, 0.5, 0, 0), ["torch", "ours"] * 2)],
    ids=["script", "ours"],
)
def test_a_pair_beside_others_is_made_again_as_a_whole(
    others: tuple[float, ...], made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = iter(others)
    monkeypatch.setattr(runs, "load_since", lambda _: (next(load), 0.0))
    bench = MadeUp(tmp_path / "lines.jsonl")
    runs.pair(bench, SHORT, "torch", 0, runs.Tuned(30, 0.3, {"torch": 2}))
    assert [one.arm for one in bench.order] == made
    assert [one["arm"] for one in read_lines(bench.lines)] == ["torch", "ours"]


def test_a_pair_that_is_begun_is_brought_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = MadeUp(tmp_path / "lines.jsonl", until=time.monotonic() + 600)
    script = bench._script

    def late(asked: Asked) -> dict[str, Any]:
        bench.until = 0.0
        return script(asked)

    monkeypatch.setattr(bench, "_script", late)
    best = runs.Tuned(30, 0.3, {"torch": 2})
    runs.pair(bench, SHORT, "torch", 0, best)
    assert [one.arm for one in bench.order] == ["torch", "ours"]
    with pytest.raises(TimeIsUpError):
        runs.pair(bench, SHORT, "torch", 1, best)


def test_of_two_lines_of_a_run_the_later_counts() -> None:
    asked = Asked(SHORT, "torch", 0, 6, 1, 0.1)
    lines = [{**vars(asked), "accuracy": 1.0}, {**vars(asked), "accuracy": 2.0}]
    found = runs.line_of([*lines, {**vars(asked), "seed": 1, "accuracy": 3.0}], asked)
    assert found is not None
    assert found["accuracy"] == 2.0
    assert runs.line_of(lines, replace(asked, burner=True)) is None


def test_a_run_beside_others_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = iter((0.5, 0.02))

    def load(*_: object) -> MachineLoad:
        return MachineLoad(cores=2, seconds=9, ours=2, others=next(others), stolen=0, idle=0,
                           throttled=0)  # fmt: skip

    monkeypatch.setattr(runs, "load_between", load)
    bench = MadeUp(tmp_path / "lines.jsonl")
    bench.made(Asked(SHORT, "torch", 0, 6, 1, 0.1))
    assert len(bench.order) == 2
    (line,) = read_lines(tmp_path / "lines.jsonl")
    assert (line["others"], line["images"], line["task"]) == (0.02, 25_000, SHORT)
    assert {"commit", "torch", "cores", "processor"} <= set(line)


# ----------------------------------------------------------------------------------- our command


def test_the_first_evaluation_that_reaches_the_target_counts() -> None:
    evaluations = [(10.0, 40.0), (20.0, 50.00004), (30.0, 49.0), (40.0, 55.0)]
    assert runs.reached(evaluations, 50.0001) == 20.0
    assert runs.reached(evaluations, 55.1) is None


def test_a_command_is_followed_to_its_end(tmp_path: Path) -> None:
    lines = (
        typed({"kind": "epoch", "epoch": n, "val/top1": v}) for n, v in enumerate((0.25, None, 0.5))
    )
    rows = "".join(line_text(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(rows + '{"kind": "epo')
    with runs.ending(runs.subprocess.Popen(["true"])) as process:
        evaluations, memory = runs.followed(process, tmp_path, time.monotonic())
    assert [accuracy for _, accuracy in evaluations] == [25.0, 50.0]
    assert memory is None


def test_what_was_not_trained_leaves_the_prediction_in_proportion(tmp_path: Path) -> None:
    plan = make_plan()
    assert plan.chosen is not None
    seconds = Estimate(value=60.0, low=50.0, high=70.0)
    chosen = plan.chosen.model_copy(update={"train_seconds": seconds})
    plan = plan.model_copy(update={"considered": (chosen,)})
    summary = make_summary(plan=plan, profile=make_profile())
    write_record(summary, tmp_path / "summary.json")
    whole = runs.trained_facts(tmp_path)
    assert whole["predicted_seconds"] == pytest.approx(60.0)
    assert whole["measured_seconds"] > 0
    half = summary.model_copy(update={"epochs": summary.epochs[: len(summary.epochs) // 2]})
    write_record(half, tmp_path / "summary.json")
    found = runs.trained_facts(tmp_path)
    assert found["predicted_seconds"] == pytest.approx(30.0)
    assert found["measured_seconds"] < whole["measured_seconds"]
    assert json.dumps(found)


# ----------------------------------------------------------------------------------------- scoring


def made_pair(task: str, script: str, seed: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Lines of a script and of ours, which takes ``ours`` seconds, a fifth of it for the probe."""
    seconds, ours = changes.pop("seconds", 200.0), changes.pop("ours", 50.0)
    both = {"task": task, "seed": seed, "burner": False, "look": False, "commit": "a",
            "processor": changes.pop("processor", "b")}  # fmt: skip
    one = {"batch": 64, "predicted_seconds": 39.0, "measured_seconds": 40.0,
           "billed_seconds": 41.0, "predicted_resident_bytes": 9.5e8,
           "resident_bytes": 1e9}  # fmt: skip
    theirs = {**both, "arm": script, "seconds": seconds, "whole_seconds": seconds,
              "accuracy": 60.0, "epochs": 6, "loaders": 2, "rate": 0.1}  # fmt: skip
    return [
        theirs,
        {**both, "arm": "ours", "against": script, "target": 60.0, "seconds": ours,
         "training_seconds": 0.8 * ours, "reached": True, "tries": [one], **changes},
    ]  # fmt: skip


def test_the_script_counts_that_is_better() -> None:
    pairs = pairs_of([*made_pair(SHORT, "torch", ours=40.0), *made_pair(SHORT, "lightning")])
    assert scores_of(pairs)[SHORT].ratio == pytest.approx(4)


def test_a_pair_needs_the_accuracy_that_the_script_reached_last() -> None:
    lines = made_pair(SHORT, "torch")
    assert len(pairs_of(lines)) == 1
    assert not pairs_of([*lines, {**lines[0], "accuracy": 61.0}])
    assert not pairs_of(lines[1:])


def test_a_report_is_of_one_processor_that_of_the_last_run() -> None:
    lines = made_pair(SHORT, "torch", ours=40.0)
    lines += made_pair(SHORT, "lightning", ours=80.0, processor="older")
    (pair,) = pairs_of([*lines[2:], *lines[:2]])
    assert pair.ratio == 5


@pytest.mark.parametrize(("accuracy", "rate"), [(59.0, 0.1), (61.0, 1.0)])
def test_pairs_count_at_the_rate_with_which_the_loop_by_hand_is_most_accurate(
    accuracy: float, rate: float
) -> None:
    lines = [line for seed in (0, 1) for line in made_pair(SHORT, "torch", seed)]
    lines += made_pair(SHORT, "lightning")
    lines += [{**line, "burner": True} for line in lines[:2]]
    other = made_pair(SHORT, "torch", 0)
    lines += [{**other[0], "rate": 1.0, "accuracy": accuracy}, {**other[1], "target": accuracy}]
    lines += [{**other[0], "rate": 1.0, "accuracy": 70.0, "seed": 1}]  # the first seed decides
    pairs = pairs_of(lines)
    assert {pair.theirs["rate"] for pair in pairs} == {rate}
    assert len(pairs) == (4 if rate == 0.1 else 1)


def test_pairs_from_before_loader_processes_were_tuned_again_no_longer_count() -> None:
    lines = made_pair(SHORT, "torch", 0)
    again = made_pair(SHORT, "torch", 1)
    again[0]["loaders"] = 1
    assert [pair.ours["seed"] for pair in pairs_of([*lines, *again])] == [1]


def test_a_goal_that_is_missed_counts_as_a_tenth() -> None:
    (pair,) = pairs_of(made_pair(SHORT, "torch", reached=False))
    assert (pair.ratio, pair.training_ratio) == (0.1, 0.1)


def test_figures_are_of_long_and_of_short_tasks() -> None:
    lines = [
        line
        for seed, ours in ((0, 50.0), (1, 12.5))
        for line in made_pair(SHORT, "torch", seed, ours=ours)
    ]
    lines += made_pair(LONG, "torch", seconds=800.0, ours=100.0)
    uneven = made_pair(SHORT, "torch", seconds=300.0)
    pairs = [*pairs_of(lines), Pair(uneven[0], {**uneven[1], "burner": True})]
    figures = BENCHMARK.values(found_of(pairs))
    values = {name: one.value for name, one in figures.items()}
    assert values["time_to_accuracy_all"] == pytest.approx(8)
    assert values["time_to_accuracy_short"] == pytest.approx(8)  # 4 and 16
    short = figures["time_to_accuracy_short"]
    assert (short.low, short.high) == pytest.approx((4, 16))
    training = figures["time_to_accuracy_training"]  # 5 and 20, and the long task's 10 with each
    assert training.value == pytest.approx(10)
    assert (training.low, training.high) == pytest.approx((50**0.5, 200**0.5))
    assert values["time_to_accuracy_least"] == pytest.approx(8)
    assert values["time_to_accuracy_uneven"] == pytest.approx(6)
    assert values["time_to_accuracy_missed"] == 0
    assert values["training_seconds_error"] == pytest.approx(0.025)
    assert values["training_cost_worst"] == pytest.approx(2 / 41)
    assert values["resident_memory_error"] == pytest.approx(0.05)
    assert values["resident_memory_worst"] == pytest.approx(0.05)
    assert all(one.met is not False for one in figures.values())
    assert set(figures) < {one.name for one in BENCHMARK.figures}
    assert json.dumps([told(pair) for pair in pairs], allow_nan=False)


def test_each_figure_has_its_words() -> None:
    assert all(one.words for one in BENCHMARK.figures)
    assert {f"ratio_{task}" for task in TASKS} < {one.name for one in BENCHMARK.figures}
