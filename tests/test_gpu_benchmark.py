"""The programme for a first GPU: what it would do, and that it goes on where it was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu import __main__ as programme
from benchmarks.gpu import findings, papers, pytest_plugin, steps
from benchmarks.gpu.findings import NAME, Findings
from benchmarks.gpu.programme import AFTERWARDS, FIRST, STEPS
from benchmarks.gpu.steps import RUN, Here, _rates, why_not
from benchmarks.harness.benchmark import ROOT
from benchmarks.harness.plans import Opened

from forked_tasks import forking_tasks
from samples import make_data, make_network


def test_the_limits_are_45_minutes_together_and_45_afterwards_and_each_fits_into_ten():
    assert sum(step.minutes for step in FIRST) == 45
    assert sum(step.minutes for step in AFTERWARDS) == 45
    assert max(step.minutes for step in STEPS) <= 8
    assert [step.name for step in STEPS] == [*RUN]


def test_the_first_45_minutes_hold_all_that_a_first_gpu_is_to_tell_of_the_methods():
    order = [step.name for step in FIRST]
    wanted = ["speed-32", "predictions", "speed-224", "autocast", "server", "virtual", "accuracy"]
    assert order[:2] == ["machine", "tests"]
    assert [name for name in order if name in wanted] == wanted


def test_what_lacks_is_named_before_anything_of_ours_is_imported():
    script = "import sys, benchmarks.gpu.__main__; print([*sys.modules])"
    told = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True)
    assert not told.returncode, told.stderr
    assert b"'batchwright" not in told.stdout
    assert b"'torch" not in told.stdout
    assert b"'pytest" not in told.stdout


def test_a_dry_run_names_every_step_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "results"
    assert programme.main(["--dry-run", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert all(step.name in told and step.words in told for step in STEPS)
    assert not out.exists()


@pytest.fixture
def taking(tmp_path, monkeypatch):
    """Runs the programme with steps that take no time; the names of those that were taken."""
    monkeypatch.setattr(programme, "commit", lambda: "abc")
    outcomes = {}

    def run(*words, out="out", **ends):
        outcomes.clear()
        outcomes.update({name.replace("_", "-"): told for name, told in ends.items()})
        taken = []

        def take(step, *_):
            taken.append(step.name)
            return outcomes.get(step.name, "done")

        monkeypatch.setattr(programme, "_run_step", take)
        code = programme.main(["--out", str(tmp_path / out), *words])
        return code, taken

    return run


def test_what_is_done_is_not_taken_again_and_what_failed_comes_last(taking, tmp_path):
    some = ["--steps", "speed-32", "server", "autocast"]
    assert taking(*some, speed_32="failed with 1") == (1, ["speed-32", "autocast", "server"])
    assert taking(*some, "virtual") == (0, ["virtual", "speed-32"])
    assert taking(*some) == (0, [])
    found = Findings(tmp_path / "out", "abc")
    assert found.of("speed-32") == {"outcome": "done"}
    assert [line["value"] for line in found.lines] == ["failed with 1", *["done"] * 4]


def test_what_was_cut_short_goes_on_first(taking):
    some = ["--steps", "speed-32", "autocast"]
    assert taking(*some, speed_32=programme.CUT) == (0, ["speed-32", "autocast"])
    assert taking(*some, "server") == (0, ["speed-32", "server"])


def test_a_step_waits_where_another_fits_into_what_is_left(taking):
    # Of predictions (6 min), autocast (2) and server (3), three minutes hold the last two.
    some = ["--steps", "predictions", "autocast", "server"]
    assert taking(*some, "--minutes", "3.5") == (0, ["autocast", "server", "predictions"])


def test_no_step_is_begun_without_time(taking):
    assert taking("--minutes", "0.5") == (0, [])


def test_a_command_with_an_empty_folder_goes_on_from_another(taking, tmp_path, capsys):
    assert taking("--steps", "server", "autocast", autocast="failed with 1", out="first")[0] == 1
    kept = (tmp_path / "first" / NAME).read_text()
    words = ["--steps", "server", "autocast", "--resume", str(tmp_path / "first")]
    capsys.readouterr()
    assert taking(*words, "--dry-run", out="second") == (0, [])
    assert "server       done already" in capsys.readouterr().out
    assert taking(*words, out="second") == (0, ["autocast"])
    assert (tmp_path / "second" / NAME).read_text().startswith(kept)
    assert (tmp_path / "first" / NAME).read_text() == kept


def test_the_folder_to_send_back_is_named(taking, tmp_path, capsys):
    assert taking("--steps", "server") == (0, ["server"])
    told = capsys.readouterr()
    assert f"to send back: the folder {tmp_path / 'out'}" in told.out + told.err


def test_another_machine_is_described_and_probed_anew(taking, tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "machine", lambda: "GPU-1")
    assert taking("--steps", "machine", "server") == (0, ["machine", "server"])
    assert taking("--steps", "machine", "server") == (0, [])
    found = Findings(tmp_path / "out", "abc")
    found.add("predictions", "points checked", 6)
    assert found.is_of_this_machine("predictions", "points checked")
    monkeypatch.setattr(findings, "machine", lambda: "GPU-2")
    assert not found.is_of_this_machine("predictions", "points checked")
    assert taking("--steps", "machine", "server") == (0, ["machine"])
    assert [line["machine"] for line in found.lines] == ["GPU-1"] * 3 + ["GPU-2"]


def test_sources_without_a_commit_of_their_own_have_a_digest(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(programme, "ROOT", tmp_path)
    monkeypatch.setattr(programme, "commit", lambda: "abc+changes")
    (tmp_path / "src" / "a.py").write_text("1")
    first = programme._commit()
    (tmp_path / "src" / "a.py").write_text("2")
    assert first.startswith("abc+changes-")
    assert programme._commit() not in (first, "abc+changes")
    monkeypatch.setattr(programme, "commit", lambda: "abc")
    assert programme._commit() == "abc"


def test_a_peer_that_fails_costs_its_own_figures_alone(tmp_path, monkeypatch):
    def steps(fails_at):
        for step in count():
            if step == fails_at:
                raise RuntimeError("bus error\nat length")
            yield

    monkeypatch.setattr(Here, "device", torch.device("cpu"))
    here = Here("speed-32", Findings(tmp_path, "abc"), tmp_path, None, tiny=True)
    arms = {"session": steps(None), "resident batch": steps(None), "peer": steps(7)}
    rates = _rates(here, arms, 8, "a network")
    assert {name: len(each) for name, each in rates.items()} == {"session": 2, "resident batch": 2}
    assert here.findings.of("speed-32") == {"a network, peer: failed": "RuntimeError: bus error"}
    with pytest.raises(RuntimeError, match="bus error"):
        _rates(here, {"session": steps(7)}, 8, "a network")


def test_a_plain_script_that_fails_or_does_not_get_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Here, "device", torch.device("cpu"))
    monkeypatch.setattr(Here, "image_data", lambda _: "made up")
    monkeypatch.setattr(steps, "batchwright", lambda *_, **__: {"test_accuracy": 0.5})
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    script = tmp_path / "benchmarks" / "planning" / "plain_torch.py"
    script.parent.mkdir(parents=True)
    for folder in (script.parent, script.parent.parent):
        (folder / "__init__.py").touch()
    here = Here("accuracy", Findings(tmp_path, "abc"), tmp_path, None, tiny=True)
    script.write_text("print('{\"accuracy\": 0.01}'); raise SystemExit(3)")
    with pytest.raises(SystemExit, match="ended with 3"):
        steps.accuracy(here)
    what = "made-up images, resnet8, seconds to 0.02: a plain script at rate 0.1"
    assert not here.has(what)
    script.write_text("print('{\"accuracy\": 0.01}')")
    steps.accuracy(here)
    assert here.findings.of("accuracy")[what] == "never reached; best 0.01"


def test_a_test_that_failed_in_an_earlier_command_runs_again(tmp_path, monkeypatch):
    here = Here("tests", Findings(tmp_path, "abc"), tmp_path, None, tiny=True)
    here.found("a", "passed")
    here.found("b", "failed: another process held the GPU")

    def run(*_, **__):
        assert here.findings.of("tests") == {"a": "passed", "b": findings.BEGAN}
        here.found("b", "passed")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(steps.subprocess, "run", run)
    steps.tests(here)
    assert here.findings.of("tests") == {"a": "passed", "b": "passed"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_no_test_passes_for_done_and_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(programme, "commit", lambda: "abc")
    assert programme.main(["--out", str(tmp_path), "--steps", "tests"]) == 1
    (told,) = Findings(tmp_path, "abc").of("tests").values()
    assert told.startswith("failed with 1: ")
    assert "sees no GPU" in told


def test_what_other_commits_have_found_counts_for_nothing(taking):
    assert taking("--steps", "server") == (0, ["server"])
    assert taking("--steps", "server", "--commit", "other") == (0, ["server"])
    assert taking("--steps", "server") == (0, [])


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    found = Findings(tmp_path, "abc")
    found.add("server", "one", 1)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"step": "server", "wh')
    assert found.of("server") == {"one": 1}
    found.add("server", "two", 2)
    assert found.of("server") == {"one": 1, "two": 2}


def test_the_table_counts_tests_and_names_those_that_failed(tmp_path):
    found = Findings(tmp_path, "abc")
    for name, outcome in (("a", "passed"), ("b", "passed"), ("c", "failed: x | y")):
        found.add("tests", name, outcome)
    table = programme.table(found)
    assert "| tests | tests passed | 2 |" in table
    assert "| tests | c | failed: x / y |" in table


def test_what_a_step_has_started_ends_with_it():
    words = ["sh", "-c", "sleep 600 & echo $!; wait"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    child = int(process.stdout.readline())
    programme._end(process)
    process.stdout.close()
    end = time.monotonic() + 300
    while _runs(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


TESTS = """
import time, pytest
def test_a(): pass
def test_b(): assert 1 == 2
@pytest.mark.skip
def test_c(): pass
def test_d(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_e(): time.sleep(600)
def test_e_too(): pass
"""


@pytest.mark.slow
def test_every_test_is_told_though_one_hangs_and_one_breaks_the_gpu(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        "from benchmarks.gpu import pytest_plugin\npytest_plugin.SECONDS = 5\n"
    )
    found = Findings(tmp_path, "abc")
    env = {**os.environ, pytest_plugin.FOLDER: str(tmp_path), pytest_plugin.COMMIT: "abc"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    words = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.pytest_plugin", "--rootdir=."]
    words += ["-c", os.devnull, "--capture=sys", "-p", "no:cacheprovider", "test_it.py"]
    codes = []
    while len(codes) < 4:
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        codes.append(done.returncode)
        hung = [name for name, value in found.of("tests").items() if value == pytest_plugin.BEGAN]
        for name in hung:
            found.add("tests", name, "failed: hangs")
        if not hung and done.returncode != pytest_plugin.AGAIN:
            break
    told = {name.rpartition("::")[2]: value for name, value in found.of("tests").items()}
    assert told == {
        "test_a": "passed",
        "test_b": "failed: assert 1 == 2",
        "test_c": "skipped",
        "test_d": "failed: RuntimeError: CUDA error: an illegal memory access was encountered",
        "test_e": "failed: hangs",
        "test_e_too": "passed",
    }, done.stdout + done.stderr
    assert codes == [pytest_plugin.AGAIN, 1, 0]


@pytest.mark.parametrize(("small", "batches"), [(0, {600, 560}), (3, {600, 560, 294, 243})])
def test_the_papers_trainings_have_their_schedule_and_batches(
    monkeypatch, tmp_path, small, batches
):
    data = make_data(name="cifar100", train_samples=50_000, val_samples=10_000, side=32)
    monkeypatch.setattr(papers, "opened", lambda *_: Opened("cifar100:x", data, make_network()))
    here = Here("hybrid", Findings(tmp_path, "abc"), tmp_path, tmp_path, tiny=False)
    monkeypatch.setattr(Here, "device", torch.device("cpu"))
    plan = papers.published_plan(here, small=small, cycles=True)
    assert [(one.epochs, one.resolution) for one in plan.stages] == [
        *((40, 24), (40, 32), (20, 24), (20, 32), (10, 24), (10, 32)),
    ]
    assert {size for one in plan.stages for size in one.local_batch_sizes} == batches
    assert (plan.job.rotation, plan.job.looks_ahead) == (0.05, False)
    fixed = papers.published_plan(here, small=small, cycles=False)
    assert {one.resolution for one in fixed.stages} == {32}
    assert {one.dropout for one in fixed.stages} == {0.2}


def test_the_short_trainings_are_of_each_kind_and_what_is_found_is_not_trained_again(
    monkeypatch, tmp_path
):
    plans = []

    def trained(_, plan):
        plans.append(plan)
        epoch = SimpleNamespace(training_seconds=1.0, val_loss=2.0)
        return 3.0, SimpleNamespace(accuracy=0.5, epochs=[epoch])

    data = make_data(name="cifar100", train_samples=50_000, val_samples=10_000, side=32)
    monkeypatch.setattr(papers, "opened", lambda *_: Opened("cifar100:x", data, make_network()))
    monkeypatch.setattr(papers, "_trained", trained)
    monkeypatch.setattr(Here, "device", torch.device("cpu"))
    here = Here("papers", Findings(tmp_path, "abc"), tmp_path, tmp_path, tiny=False)
    papers.short(here)
    assert [(plan.method, plan.job.workers, plan.epochs) for plan in plans] == [
        *(("hybrid", 4, 14), ("hybrid", 4, 14)),
        *(("plain", 1, 20), ("plain", 1, 20)),
    ]
    assert [plan.job.dual.small_workers for plan in plans[:2]] == [3, 0]
    assert {plan.job.global_batch for plan in plans[2:]} == {960}
    assert [plan.learning_rate.warmup_epochs > 0 for plan in plans[2:]] == [False, True]
    papers.short(here)
    assert len(plans) == 4


def test_a_package_that_is_there_and_does_not_fit_is_none(tmp_path, monkeypatch):
    (tmp_path / "broken_by_another.py").write_text("raise RuntimeError('operator a::b\\nis not')")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not("broken_by_another") == "RuntimeError: operator a::b"
    assert why_not("nobody_has_this").startswith("ModuleNotFoundError")
    assert not why_not("json")


@pytest.mark.slow
def test_a_step_in_little_writes_what_it_finds(
    tmp_path, tmp_path_factory, capsys, monkeypatch, forks
):
    words = ["--tiny", "--out", str(tmp_path), "--steps", "machine", "server", "speed-32"]
    with forking_tasks(tmp_path_factory.mktemp("forks") / "log") as forked:
        paths = os.pathsep.join([forked["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
        for name, value in (forked | {"PYTHONPATH": paths}).items():
            monkeypatch.setenv(name, value)
        assert programme.main(words) == 0, (tmp_path / "log.txt").read_text()
    found = Findings(tmp_path, programme._commit())
    assert any("session over resident batch" in what for what in found.of("speed-32"))
    assert "PyTorch" in found.of("machine")
    trained = {
        what: value
        for what, value in found.of("server").items()
        if what.endswith(("rate", "local batches")) and "small" not in what
    }
    assert len(trained) == 4
    assert len({*trained.values()}) == 2  # accuracies of unlike trainings say nothing
    assert "epoch 1/1" in (tmp_path / "log.txt").read_text()
    assert "handed in" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "log.txt"}  # all else is elsewhere
