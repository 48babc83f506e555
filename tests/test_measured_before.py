"""A run that was stopped before its plan goes on by what it has measured, and loses none of it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from batchwright.errors import PlanError
from batchwright.probing.probe import unfinished
from batchwright.records import Job
from batchwright.records.documents import (
    change_job,
    job_yaml,
    load_job,
    read_record,
    write_record,
    write_text,
)
from batchwright.workflows import job_changes, verbs
from batchwright.workflows.job_changes import measured_before
from batchwright.workflows.stopwatch import Stopwatch
from samples import make_job, make_profile
from test_learning import taught


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Puts a profile into a run folder, whose data are those that it was measured with."""

    def put(profile):
        monkeypatch.setattr(job_changes, "data_facts", lambda _: profile.data)
        write_record(profile, tmp_path / "profile.json")
        return profile

    return put


def asked(profile, **keys):
    """The job as its file has it, before measuring settles anything, with keys changed."""
    return profile.job.model_copy(update={"precision": "auto", **keys})


def test_what_was_measured_is_planned_by_and_a_line_says_so(tmp_path, measured, capsys):
    profile = measured(make_profile())
    found = measured_before(tmp_path, asked(profile))
    assert found == profile
    assert (
        capsys.readouterr().err
        == f"{tmp_path}/profile.json has all that was measured: planning by it\n"
    )
    goal = profile.job.goal.model_copy(update={"deadline": 60.0})
    found = measured_before(tmp_path, asked(profile, epochs=7, goal=goal))
    assert (found.job.epochs, found.job.goal.deadline) == (7, 60.0)
    assert found.steps == profile.steps
    assert "planning by it, with epochs=7, goal.deadline=60.0\n" in capsys.readouterr().err


def test_an_earlier_versions_normalization_is_kept_whatever_the_weights_tell(
    tmp_path, measured, capsys
):
    profile = measured(make_profile(job=make_job(weights="w.pt")))
    told = (0.5, 0.4, 0.3, 0.2, 0.3, 0.4)
    assert measured_before(tmp_path, asked(profile, normalize=told)) == profile
    assert "was measured with normalize=auto, which is kept\n" in capsys.readouterr().err
    measured(make_profile(job=make_job()))
    with pytest.raises(PlanError, match=r"with normalize=auto, and normalize=0\.5"):
        measured_before(tmp_path, make_job(normalize=told))


def test_a_resumed_run_measures_on_with_the_earlier_versions_normalization(
    tmp_path, measured, monkeypatch
):
    profile = measured(make_profile(job=make_job(weights="w.pt")))
    write_text(job_yaml(profile.job), tmp_path / "job.yaml")
    told = profile.job.model_copy(update={"normalize": (0.5, 0.4, 0.3, 0.2, 0.3, 0.4)})
    monkeypatch.setattr(verbs, "ready", lambda _, judged: told)
    monkeypatch.setattr(verbs, "_workers_of", lambda _: nullcontext())
    monkeypatch.setattr(verbs, "_planned_in", None)
    with pytest.raises(TypeError):
        verbs.run(run_folder=tmp_path, resume=True)
    assert load_job(tmp_path / "job.yaml").normalize == "auto"


def test_open_trials_go_on_for_the_job_as_it_is_now(tmp_path, measured):
    profile = measured(taught().model_copy(update={"trials_open": True}))
    found = measured_before(tmp_path, asked(profile, epochs=7))
    assert (found.trials_open, found.trials, found.job.epochs) == (True, profile.trials, 7)


@pytest.mark.parametrize("most", [2, 8])
def test_a_bound_above_the_workers_that_are_here_loses_no_trials(tmp_path, measured, capsys, most):
    """A run has bounded the profile's job to 2, or was stopped before it did."""
    job = change_job(taught().job, {"goal": {"max_workers": most}})
    measured(taught().model_copy(update={"job": job, "trials_open": most == 8}))
    again = change_job(job, {"goal": {"max_workers": 8}})
    found = measured_before(tmp_path, asked(make_profile(job=again)))
    assert "goal.max_workers" not in capsys.readouterr().err
    write_record(found, tmp_path / "profile.json")
    assert bool(unfinished(tmp_path / "profile.json", again)) == (most == 8)


def test_more_time_for_trials_opens_them_again(tmp_path, measured):
    profile = measured(taught())
    probe = profile.job.probe.model_copy(update={"learning": 60})
    found = measured_before(tmp_path, asked(profile, probe=probe))
    assert (found.trials_open, found.trials) == (True, profile.trials)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"optimizer": "adamw"},
            "measured with optimizer=.*, and optimizer=adamw is asked for: go",
        ),
        ({"workers": 7}, "workers=7 is asked for"),
        ({"resolutions": (16,)}, "resolutions=16 is asked for"),
        ({"learning_rate": 0.5}, "measured with learning_rate=auto, and learning_rate=0.5 is"),
    ],
)
def test_a_job_that_was_not_measured_is_refused_and_nothing_is_lost(tmp_path, measured, keys, said):
    profile = measured(taught())
    with pytest.raises(PlanError, match=said):
        measured_before(tmp_path, asked(profile, **keys))
    assert read_record(tmp_path / "profile.json", type(profile)) == profile


def test_other_images_are_refused(tmp_path, measured, monkeypatch):
    profile = measured(make_profile())
    other = profile.data.model_copy(update={"digest": "0" * 64})
    monkeypatch.setattr(job_changes, "data_facts", lambda _: other)
    with pytest.raises(PlanError, match="was measured with other images than data="):
        measured_before(tmp_path, asked(profile))


def test_a_rate_may_change_where_no_trials_were_made_with_another(tmp_path, measured):
    profile = measured(make_profile())
    assert measured_before(tmp_path, asked(profile, learning_rate=0.5)).job.learning_rate == 0.5


def test_without_a_profile_a_line_says_that_all_is_measured(tmp_path, capsys):
    assert measured_before(tmp_path, make_job()) is None
    assert (
        capsys.readouterr().err == f"{tmp_path} has no profile yet: measuring from the beginning\n"
    )


def test_a_run_says_that_its_plan_is_below_an_accuracy_that_it_does_not_aim_for(tmp_path, capsys):
    profile = taught()
    goal = profile.job.goal.model_copy(update={"objective": "time", "accuracy": 0.999})
    before = profile.model_copy(update={"job": profile.job.model_copy(update={"goal": goal})})
    verbs._planned_in(tmp_path, before.job, Stopwatch(), before)
    assert "%), which is below goal.accuracy=0.999\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_a_plan_measures_nothing_again(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(cache))
    folder, planned = tmp_path / "run", []
    keys = {"data": "digits", "network": "resnet8", "workers": 1, "launch": "in-process"}
    more = {"precision": "float32", "probe": {"budget": 0.3, "learning": 0}}
    job = Job(**keys, device="cpu", epochs=1, **more)
    tight = job.model_copy(update={"goal": job.goal.model_copy(update={"deadline": 1e-6})})
    again = f"; `batchwright run --resume --out {folder} KEY=VALUE` plans again with what was"
    with pytest.raises(PlanError, match=f"no candidate is within the limits.*{again}"):
        verbs.run(tight, run_folder=folder)
    before = (folder / "profile.json").read_bytes()
    with pytest.raises(PlanError, match="optimizer=sgd is asked for"):
        verbs.run(run_folder=folder, resume=True, optimizer="sgd", goal={"deadline": None})
    assert (folder / "profile.json").read_bytes() == before
    monkeypatch.setattr(verbs, "_probe_in", None)
    monkeypatch.setattr(verbs, "conduct", None)
    with pytest.raises(TypeError):  # there is a plan, and training would begin
        verbs.run(run_folder=folder, resume=True, goal={"deadline": None}, on_plan=planned.append)
    assert len(planned) == 1
    assert planned[0].job.goal.deadline is None
