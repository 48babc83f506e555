"""What a training comes to around its epochs."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchwright.algorithms.checkpointing import assumed_bytes
from batchwright.errors import FileError
from batchwright.records import RunSummary, run_folder
from batchwright.records.documents import job_yaml, write_record, write_text
from batchwright.records.run_folder import LAUNCH_FILE, load, new_folder, new_run_folder
from batchwright.workflows import run_training
from batchwright.workflows.stopwatch import Stopwatch
from samples import EPOCHS, make_job, make_plan, make_profile, make_server, make_summary


class Started(Exception):  # noqa: N818 - no error
    """Workers would have been started."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with so many epochs done; what `conduct` makes of it."""

    def start(*_, **__):
        raise Started

    monkeypatch.setattr(run_training, "_train_once", start)
    summary = make_summary()

    def conduct(done: int, **fields) -> RunSummary:
        write_record(summary.plan, tmp_path / "plan.json")
        told = summary.model_copy(update={"epochs": summary.epochs[:done], **fields})
        write_record(told, tmp_path / "summary.json")
        return run_training.conduct(tmp_path, summary.plan, Stopwatch(), resume=True)

    return conduct


def test_the_first_line_of_a_run_counts_its_epochs(tmp_path, capsys):
    with new_run_folder(tmp_path / "run", make_job(epochs=1)):
        pass
    assert "1 epoch, in" in capsys.readouterr().err


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "datetime", Stopped)
    job = make_job(data="imagefolder:~nobody-has-this-name/flowers")
    with new_run_folder(None, job) as one, new_run_folder(None, job) as other:
        assert one.name.startswith("flowers-")
        assert one.name.endswith("-20260102-030405")
        assert other.name == f"{one.name}-2"


def test_a_default_folder_has_a_name_that_fits_a_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = f"{'my_models_' * 20}.{'漢' * 40}:net"
    job = make_job(data=f"imagefolder:/sets/{'ü' * 100}", network=network)
    with new_folder(None, job, "sweep") as folder:
        assert folder.is_dir()
        assert folder.name.startswith("sweep-üü")
        assert len(folder.name.encode()) < 240


def test_a_finished_run_that_is_resumed_starts_nothing(run, capsys):
    assert len(run(EPOCHS).epochs) == EPOCHS
    assert "the run was finished already" in capsys.readouterr().err


def test_a_finished_run_whose_command_was_killed_gets_its_profile_at_the_resume(run, tmp_path):
    profile = make_profile()
    write_record(profile, tmp_path / "profile.json")
    assert run(EPOCHS, profile=None).profile == profile
    assert load(tmp_path).profile == profile


def test_a_run_with_epochs_left_goes_on(run):
    with pytest.raises(Started):
        run(EPOCHS - 1)


def test_a_run_that_is_killed_while_it_goes_on_for_more_epochs_has_not_finished(run, tmp_path):
    """A sweep, or an engine that starts it again, would take it for a finished run."""
    summary = make_summary()
    goal = summary.plan.job.goal.model_copy(update={"accuracy": 0.999})
    job = summary.plan.job.model_copy(update={"goal": goal})
    plan = summary.plan.model_copy(update={"job": job, "max_epochs": 10 * EPOCHS})
    write_record(plan, tmp_path / "plan.json")
    first = summary.model_copy(update={"plan": plan})

    def trains(*_, resume, **__):
        if resume:
            raise Started
        write_record(first, tmp_path / "summary.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_training, "_train_once", trains)
        with pytest.raises(Started):
            run_training.conduct(tmp_path, plan, Stopwatch(), resume=False)
    assert not (tmp_path / "summary.json").exists()
    assert load(tmp_path).epochs > EPOCHS
    assert load(tmp_path / f"summary-{EPOCHS}-epochs.json").epochs == first.epochs


def test_a_run_whose_inputs_were_half_written_can_be_resumed(tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt), new_run_folder(tmp_path / "a", make_job()) as folder:
        run_folder.write_inputs(folder, make_plan(), make_profile())
    with run_folder.existing_run(tmp_path / "a", "plan.json") as folder:
        assert load(folder) == make_plan()
        assert (folder / "profile.json").exists()


def test_a_folder_without_a_whole_file_is_that_of_a_new_run(tmp_path, monkeypatch):
    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # nothing tidies up after a kill
        with pytest.raises(KeyboardInterrupt), new_run_folder(tmp_path, make_job()) as folder:
            write_text(job_yaml(make_job()), folder / "job.yaml")
    (tmp_path / f".{LAUNCH_FILE}.writing").touch()
    assert any(path.name.startswith(".job.yaml.") for path in tmp_path.iterdir())
    with new_run_folder(tmp_path, make_job()):
        pass
    (tmp_path / ".git").mkdir()
    with pytest.raises(FileError, match="is not empty"), new_run_folder(tmp_path, make_job()):
        pass


def test_a_damaged_summary_does_not_keep_a_run_from_going_on(run, tmp_path):
    with pytest.raises(Started):
        run(1)
    (tmp_path / "summary.json").write_text("{")
    plan = make_summary().plan
    with pytest.raises(Started):
        run_training.conduct(tmp_path, plan, Stopwatch(), resume=True)


def test_a_disk_without_room_for_the_checkpoints_that_stay_is_told(tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(run_training, "disk_usage", lambda folder: usage)
    plan = make_plan(job=make_job(checkpoint_epochs=10))
    each = assumed_bytes(plan.network, "sgd", averages=False, served=False)
    usage.free = 3 * each
    run_training.warn_of_kept(tmp_path, plan)
    run_training.warn_of_kept(tmp_path, make_plan())
    assert capsys.readouterr().err == ""
    usage.free -= 1
    run_training.warn_of_kept(tmp_path, plan)
    line = capsys.readouterr().err
    usage.free = 3 * each
    run_training.warn_of_kept(tmp_path, plan.model_copy(update={"update": "adamw"}))
    assert "keeps 3 checkpoints" in capsys.readouterr().err  # a second number for each weight
    usage.free = 12 * plan.network.parameters  # a parameter server has no optimizer's state
    run_training.warn_of_kept(tmp_path, plan.model_copy(update={"server": make_server()}))
    assert capsys.readouterr().err == ""
    assert line.startswith("warning: checkpoint_epochs=10 keeps 3 checkpoints of some ")
    assert line.endswith("left: free some, or give a larger checkpoint_epochs\n")
