"""Runs that are kept, and smaller copies of data sets."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.harness import kept_runs
from benchmarks.harness.images import smaller_cifar100, smaller_folder
from benchmarks.harness.kept_runs import KeptRuns, Run, RunLines, Wanted, append_line
from benchmarks.harness.plans import Opened, with_rates
from benchmarks.methods.dual_accuracy import first_arms
from benchmarks.methods.dual_accuracy import plan_of as dual_plan
from benchmarks.methods.large_batch_arms import (
    TASKS,
    arms_of,
    open_task,
    plan_of,
)
from benchmarks.planning import decisions_runs

from batchwright.workload.data.arrays import EDITIONS, find_folder, read_part
from samples import make_data, make_network


def wanted(seed: int, place: str = "here", **changes: object) -> Wanted:
    data = make_data(name="cifar100", train_samples=50_000)
    known = Opened(f"cifar100:{place}", data, make_network())
    plan = dual_plan(first_arms()["k105-3"], seed, known)
    return Wanted("k105-3", seed, plan, **changes)


def test_a_kept_run_counts_only_for_the_very_plan_that_made_it(tmp_path: Path) -> None:
    runs, one = KeptRuns(tmp_path / "kept", tmp_path), wanted(0)
    assert runs.kept(one) is None
    values = {"plan": one.digest, "accuracy": 33.0, "seconds": 1.0, "batches": [500, 205]}
    (tmp_path / "kept" / "k105-3-0.json").write_text(json.dumps(values | {"loss": 3.0}))
    assert runs.kept(one) == Run(33.0, 1.0, (500, 205))  # older code kept one loss alone
    (tmp_path / "kept" / "k105-3-0.json").write_text(json.dumps(values | {"losses": [4.0, 3.0]}))
    assert runs.kept(one) == Run(33.0, 1.0, (500, 205), losses=(4.0, 3.0))
    assert runs.kept(wanted(0, "there")) is not None
    assert runs.kept(Wanted("k105-3", 0, wanted(1).plan)) is None
    assert runs.kept(wanted(0, words=("benchmarks.methods.other_optimizers", "lamb"))) is None


def test_the_commits_of_lines_are_counted_once_a_run_and_only_of_what_was_asked_for(tmp_path):
    lines = tmp_path / "runs.jsonl"
    for seed, commit in enumerate(("a", "a", "b")):
        told = {"accuracy": 1.0, "seconds": 1.0, "commit": commit, "digest": wanted(seed).digest}
        append_line(lines, told)
    runs = RunLines(lines, tmp_path)
    assert not runs.commits
    for seed in (1, 2, 1, 9):
        runs.kept(wanted(seed))
    assert runs.commits == {"a": 1, "b": 1}


def test_the_trainings_that_were_kept_of_digits_count_as_those_that_are_planned_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that comes to say more than it did would have hours of trainings made again."""
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    known = decisions_runs.open_images(decisions_runs.TASKS["digits"], tmp_path, tmp_path)
    kept = RunLines(decisions_runs.TRUTH_LINES, tmp_path)
    grid = [decisions_runs.wanted(cell, 0, known) for cell in decisions_runs.cells_of("digits")]
    assert len(grid) > 40
    assert [one.name for one in grid if kept.kept(one) is None] == []


def test_a_run_that_fails_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    runs = KeptRuns(tmp_path / "kept", tmp_path)
    with pytest.raises(SystemExit, match=r"(?s)k105-3, seed 0, ended .*No module named"):
        runs.make([wanted(0, words=("benchmarks.nothing",))])
    assert not list((tmp_path / "kept").iterdir())


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    return open_task(TASKS["digits"], None, tmp_path)


@pytest.mark.slow
def test_runs_are_made_once_and_one_that_diverges_counts_as_guessing(
    tmp_path: Path, digits: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS["digits"]
    arms = arms_of(task)

    def asked(name: str, factor: float = 1.0, seed: int = 0) -> Wanted:
        plan = with_rates(plan_of(task, arms[name], seed, digits), factor)
        short = plan.model_copy(
            update={"stages": (plan.stages[0].model_copy(update={"epochs": 1}),)}
        )
        return Wanted(name, seed, short, arms[name].words)

    pair = [asked("unscaled"), asked("small", 1e30)]
    made = KeptRuns(tmp_path / "kept", tmp_path).make(pair)
    assert [run.diverged for run in made] == [False, True]
    assert made[1].accuracy == pytest.approx(10.0)
    assert made[0].seconds > 0
    monkeypatch.setattr(kept_runs.subprocess, "Popen", None)  # nothing is started any more
    again = KeptRuns(tmp_path / "kept", tmp_path).make(pair)
    assert again == made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_other_optimizers_train_by_the_plans_rates(
    name: str, tmp_path: Path, digits: Opened
) -> None:
    pytest.importorskip("pytorch_optimizer", reason="pip install pytorch-optimizer")
    from functools import partial

    from benchmarks.methods import other_optimizers

    from batchwright.records.run_folder import read_summary

    task = TASKS["digits"]
    plan = plan_of(task, arms_of(task)[name], 0, digits)
    built = []

    def build(network, plan):
        kind = {
            "lars": partial(other_optimizers.lars, vector_rate=0.25),
            "lamb": other_optimizers.lamb,
        }
        built.append(kind[name](network, plan))
        return built[0]

    short = plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"epochs": 1}),)})
    other_optimizers.train(short, build, tmp_path / "run")
    matrices, vectors = built[0].param_groups
    assert all(p.ndim > 1 for p in matrices["params"])
    assert all(p.ndim <= 1 for p in vectors["params"])
    assert vectors["weight_decay"] == 0
    first = 0.25 if name == "lars" else plan.learning_rate.base
    assert vectors["lr"] / matrices["lr"] == pytest.approx(first / plan.learning_rate.base)
    assert read_summary(tmp_path / "run").accuracy > 0


# -------------------------------------------------------------------------------- smaller data sets


def test_a_smaller_cifar_has_images_from_all_over_and_all_held_out_ones(tmp_path: Path) -> None:
    original = tmp_path / "data" / "cifar-100-python"
    original.mkdir(parents=True)
    pixels = np.arange(50 * 3072, dtype=np.int64).astype(np.uint8).reshape(50, 3072)
    names = {"fine_label_names": [f"class {n}" for n in range(100)]}
    for name, count in (("train", 50), ("test", 7)):
        content = {"data": pixels[:count], "fine_labels": list(range(count))}
        (original / name).write_bytes(pickle.dumps(content, protocol=4))
    (original / "meta").write_bytes(pickle.dumps(names))
    copy = smaller_cifar100(tmp_path / "data", 10, tmp_path / "copy")
    edition = EDITIONS["cifar100"]
    folder = find_folder(edition, copy)
    images, labels = read_part(edition, folder, "train", 100)
    assert labels.tolist() == list(range(0, 50, 5))
    full, _ = read_part(edition, original, "train", 100)
    assert (images == full[::5]).all()
    assert len(read_part(edition, folder, "val", 100)[1]) == 7
    few = smaller_cifar100(tmp_path / "data", 10, tmp_path / "few", held_out=2)
    few = find_folder(edition, few)
    assert read_part(edition, few, "val", 100)[1].tolist() == [0, 3]
    with pytest.raises(ValueError, match="60 images wanted of 50"):
        smaller_cifar100(tmp_path / "data", 60, tmp_path / "other")


def test_a_smaller_folder_has_as_many_images_of_each_class(tmp_path: Path) -> None:
    for part, count in (("train", 9), ("val", 4)):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(count):
                (tmp_path / "data" / part / name / f"{number}.png").write_bytes(b"%d" % number)
    copy = smaller_folder(tmp_path / "data", 6, tmp_path / "copy")
    for name in ("cat", "dog"):
        taken = sorted(path.name for path in (copy / "train" / name).iterdir())
        assert taken == ["0.png", "3.png", "6.png"]
        assert (copy / "train" / name / "3.png").read_bytes() == b"3"
        assert len(list((copy / "val" / name).iterdir())) == 4
    few = smaller_folder(tmp_path / "data", 6, tmp_path / "few", held_out=2)
    assert sorted(path.name for path in few.glob("val/*/*")) == ["0.png", "0.png"]
