"""Run folders, checkpoints and a database of an older version (commit 8f6983c) open and go on.

The folders in tests/kept are of `batchwright run data=digits network=kept_network:network
resolutions=8 epochs=12 probe.budget=2 probe.learning=0` with what their names say, stopped by
SIGTERM after two epochs; logs and locks were left out. The database holds a run with records, a
profile, and two jobs of which an agent has leased one.
"""

from __future__ import annotations

import json
import os
import tarfile
from functools import partial
from pathlib import Path

import pytest

from batchwright.records import Profile, RunSummary
from batchwright.records.documents import read_record
from batchwright.records.lines.line_files import lines_of
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from forked import command
from services import HandClock, Service

TESTS = Path(__file__).parent
FOLDERS = ("plain", "in-process", "dual", "virtual", "dynamic", "cyclic")
STOPPED, EPOCHS = 2, 12


def unpack(name, folder):
    with tarfile.open(TESTS / "kept" / f"{name}.tar.xz") as kept:
        # Python before 3.11.4 has no filters; from 3.14 on this one is the default.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        kept.extractall(folder, **safely)  # noqa: S202 - an archive of ours


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS[:4])
def test_a_kept_run_goes_on_from_its_checkpoint(name, tmp_path, tmp_path_factory, forks):
    unpack(name, tmp_path)
    run = tmp_path / name
    prints = tmp_path_factory.mktemp("prints")
    batchwright = partial(command, cwd=tmp_path, env=os.environ, prints=prints)
    before = (run / "metrics.jsonl").read_bytes()
    kept = list(lines_of(run))
    assert [line.record.epoch for line in kept if line.kind == "epoch"] == list(range(STOPPED))
    words = ("run", "--resume", "--out", name, "network=kept_network:network")
    done = batchwright(*words)
    assert done.returncode == 0, done.stderr
    summary = read_record(run / "summary.json", RunSummary)
    assert [one.epoch for one in summary.epochs] == list(range(EPOCHS))
    assert summary.accuracy > summary.epochs[STOPPED - 1].top1
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    lines = list(lines_of(run))
    assert lines[: len(kept)] == kept
    told = {line.record.epoch: line.record for line in lines if line.kind == "epoch"}
    assert list(told) == list(range(EPOCHS))
    assert all(told[one.epoch].samples == one.samples for one in summary.epochs)
    rounds = [line.record for line in lines if line.kind == "round"]
    assert all(one in rounds for one in summary.rounds)
    told = batchwright("report", name)
    assert told.returncode == 0, told.stderr
    told = batchwright("report", name, "--metrics", "flat.jsonl")
    assert told.returncode == 0, told.stderr
    flat = list(map(json.loads, (tmp_path / "flat.jsonl").read_text().splitlines()))
    assert flat[: len(kept)] == list(map(json.loads, before.splitlines()))
    assert len(flat) == len(lines)


@pytest.mark.parametrize("name", FOLDERS)
def test_kept_plans_and_profiles_are_explained_and_planned_from(name, tmp_path):
    unpack(name, tmp_path)
    profile = read_record(tmp_path / name / "profile.json", Profile)
    assert profile.network.name == "kept_network:network"
    from batchwright.records.run_folder import load
    from batchwright.workflows import verbs

    assert "global batch" in load(tmp_path / name / "plan.json").explain()
    assert verbs.plan(profile, ["epochs=20"]).epochs == 20


def test_a_kept_database_is_served(tmp_path):
    unpack("service", tmp_path)
    settings = Settings(database=f"sqlite:///{tmp_path}/service.sqlite")
    clock = HandClock()
    clock.go(61)
    store = Store.open(settings, clock)
    try:
        tokens = {"read": store.tokens.create("new", ["read"])}
        service = Service(store, settings, clock, tokens)
        (run,) = service.get("read", "/v1/runs").json()
        assert (run["name"], run["records"]) == ("kept", 21)
        found = service.get("read", f"/v1/runs/{run['id']}/records").json()["records"]
        (epoch, *_) = [one["record"] for one in found if one["kind"] == "epoch"]
        assert (epoch["epoch"], len(epoch["workers"])) == (0, 2)
        assert {one["kind"] for one in found} == {"epoch", "step"}
        jobs = {one["name"]: one["state"] for one in service.get("read", "/v1/jobs").json()}
        assert jobs.keys() == {"waits", "queued"}
        assert jobs["queued"] == "queued"
        (profile,) = service.get("read", "/v1/profiles").json()
        assert profile["name"] == "two workers"
        browser = service.sign_in("read")
        assert browser.get(f"/runs/{run['id']}").status_code == 200
        assert json.loads(service.get("read", "/healthz").text)
    finally:
        store.close()
