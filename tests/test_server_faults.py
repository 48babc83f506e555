"""Runs with a parameter server whose processes are killed: who goes on, and with what."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import batchwright as bw
import forked
from batchwright.distributed import launch_with_server
from batchwright.distributed.exit_reports import ERRORS_FOLDER, leave_report
from batchwright.distributed.launch_with_server import run_with_server
from batchwright.errors import Interrupted, LostWorkerError, WorkerError
from batchwright.planning.planner import plan_without_profile
from batchwright.records import RunSummary
from batchwright.records.documents import read_record, write_record
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.workload.data.sources import open_data
from samples import make_job, make_network
from served import make_served_plan, serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]
TESTS = Path(__file__).parent
SAMPLES, EPOCHS = 24, 4


class Told:
    """What came of a run."""

    def __init__(self, folder, lines):
        self.folder, self.lines = folder, lines

    @property
    def summary(self):
        return read_record(self.folder / "run" / "summary.json", RunSummary)

    @property
    def notes(self):
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [line["text"] for line in map(json.loads, lines) if line["kind"] == "note"]

    def life(self, rank, number):
        """What a worker noted in one of its lives: (round, epoch, indices) of each step."""
        return [json.loads(x) for x in (self.folder / f"life-{rank}-{number}").open()]


def run(folder, plan, ends, *, restarts):
    """A run in which workers' lives end as told."""
    (folder / "logs").mkdir(parents=True)
    write_record(plan, folder / "plan.json")
    (folder / "settings.json").write_text(json.dumps(ends))
    lines = []
    run_with_server(
        "serving",
        [str(folder)],
        plan=plan.model_dump(mode="json"),
        workers=plan.workers,
        threads=1,
        run_folder=folder / "run",
        folder=folder / "logs",
        restarts=restarts,
        tell=lines.append,
    )
    return Told(folder, lines)


def make_plan(**server):
    return make_served_plan((4, 4), (16, 8), server=server, epochs=EPOCHS, checkpoint_steps=1)


# ---------------------------------------------------------------------------------- who is killed


@pytest.fixture(scope="module")
def killed_worker(tmp_path_factory, forks):
    """Worker 1 kills itself in its second round, after one of two steps."""
    folder = tmp_path_factory.mktemp("killed") / "a"
    return run(folder, make_plan(), {"1": [["self", 1, 0]]}, restarts=1)


def test_a_killed_worker_is_started_again_alone_and_repeats_its_round(killed_worker):
    assert killed_worker.lines == ["worker 1 was killed by SIGKILL; it was started again (1 of 1)"]
    assert not (killed_worker.folder / "life-0-1").exists()
    (_, _, lost), *_ = [one for one in killed_worker.life(1, 0) if one[0] == 1]
    assert killed_worker.life(1, 1)[0] == [0, 0, lost] or killed_worker.life(1, 1)[0][2] == lost
    assert any("is lost" in note for note in killed_worker.notes)
    assert any("came back" in note and "fresh momentum" in note for note in killed_worker.notes)


def test_the_records_have_every_sample_of_each_epoch_once(killed_worker):
    assert_complete(killed_worker.summary)


def assert_complete(summary):
    """All samples of all epochs are in the records, once, and they are scored to the end."""
    assert sum(one.samples for one in summary.rounds) == SAMPLES * EPOCHS
    assert len({one.number for one in summary.rounds}) == len(summary.rounds)
    assert [one.epoch for one in summary.epochs] == list(range(EPOCHS))
    assert sum(one.samples for one in summary.epochs) == SAMPLES * EPOCHS
    assert all(one.top1 is not None for one in summary.epochs)


@pytest.fixture(scope="module")
def killed_server(tmp_path_factory, forks):
    """Worker 0 kills the server in its third round."""
    folder = tmp_path_factory.mktemp("server") / "a"
    ends = {"0": [["server", 2, 0]]}
    return run(folder, make_plan(consistency="bsp"), ends, restarts=1)


def test_all_start_again_from_the_checkpoint_of_a_killed_server(killed_server):
    (line,) = killed_server.lines
    assert "the parameter server was killed by SIGKILL; all were started again" in line
    assert any("fresh momentum" in note for note in killed_server.notes)
    summary = killed_server.summary
    assert summary.resumed == 1
    assert_complete(summary)


def test_all_start_again_from_the_checkpoint_of_a_server_that_stands_still(tmp_path):
    """Workers that are started again alone would wait for it once more."""
    plan = make_plan(consistency="bsp")
    hasty = plan.job.model_copy(update={"timeout": 5.0})
    ends = {"0": [["still", 2, 0]]}
    told = run(tmp_path / "a", plan.model_copy(update={"job": hasty}), ends, restarts=1)
    (line,) = told.lines
    assert line.startswith("the parameter server stood still; all were started again from its last")
    assert_complete(told.summary)


def test_a_server_that_stands_still_once_more_than_restarts_is_not_said_to_lack_memory(tmp_path):
    """As SIGKILL of the system's own would be; this one was ours."""
    plan = make_plan(consistency="bsp")  # so that worker 0 takes part in each epoch
    hasty = plan.job.model_copy(update={"timeout": 5.0})
    with pytest.raises(LostWorkerError, match="the parameter server stood still; logs"):
        run(
            tmp_path / "a",
            plan.model_copy(update={"job": hasty}),
            {"0": [["still", 2, 0]]},
            restarts=0,
        )


def test_samples_of_a_round_are_those_of_its_place_in_the_epoch(killed_server):
    """Whoever trains on them, and however often a round is begun again."""
    seen = defaultdict(set)
    for rank in (0, 1):
        for number in (0, 1):
            for _, epoch, indices in killed_server.life(rank, number):
                seen[epoch] |= set(indices)
    assert all(seen[epoch] == set(range(SAMPLES)) for epoch in range(EPOCHS))


def test_a_worker_gone_for_good_leaves_its_samples_to_the_others(tmp_path):
    told = run(tmp_path / "a", make_plan(), {"1": [["self", 0, 0]]}, restarts=0)
    (line,) = told.lines
    assert "worker 1 was killed by SIGKILL, once more than restarts=0" in line
    assert any(
        "worker 1 is gone for good: samples per round are now 24, 0" in note for note in told.notes
    )
    assert_complete(told.summary)
    assert {one.worker for one in told.summary.rounds} == {0}
    assert {one.samples for one in told.summary.rounds} >= {16, 8}


def test_an_error_of_a_workers_own_ends_the_run(tmp_path):
    with pytest.raises(WorkerError, match=r"^worker 1: ValueError: no such thing$"):
        run(tmp_path / "a", make_plan(), {"1": [["error", 0, 0]]}, restarts=3)


def test_a_server_that_is_started_again_is_told_who_is_gone(tmp_path, monkeypatch):
    told = []
    server = SimpleNamespace(
        start=lambda resume: told.append("started"),
        give_up=lambda rank: told.append(rank),
        events=list,
        returncode=None,
    )
    workers = SimpleNamespace(kill=lambda: None, forget=lambda rank: None)
    watch = launch_with_server.WithServer(workers, tmp_path, server, workers=3)
    watch._after_worker(1, -signal.SIGKILL)
    watch._most = 1
    monkeypatch.setattr(watch, "_start_worker", lambda rank: None)
    watch._after_server(-signal.SIGKILL)
    assert told == [1, "started", 1]


@pytest.mark.parametrize("code", [1, -signal.SIGKILL])
def test_a_worker_that_ends_while_the_server_does_is_not_started_again(code, tmp_path, monkeypatch):
    """The server may still write its last checkpoint, for as long as the disk takes."""
    monkeypatch.setenv(ERRORS_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    leave_report("lost contact with the parameter server", 1, secondary=True)
    told, started, said = [], [], [[], [{"ends": "cannot write metrics.jsonl"}], []]
    server = SimpleNamespace(wait=lambda seconds: None, events=lambda: said.pop(0), returncode=None)
    workers = SimpleNamespace(runs=lambda rank: False)
    watch = launch_with_server.WithServer(
        workers, tmp_path, server, workers=2, restarts=3, tell=told.append
    )
    monkeypatch.setattr(watch, "_start_worker", started.append)
    watch._hear()
    watch._after_worker(1, code)
    watch._after_worker(1, code)  # as it is seen again and again, until the server has ended
    assert not told
    assert not started
    server.events = list
    watch._ends = False
    watch._after_worker(1, code)
    assert started == [1]


# ------------------------------------------------------------------------------ the whole command


def test_train_follows_a_dual_batch_plan_stops_at_the_deadline_and_goes_on(tmp_path, undrawn):
    job = make_job(
        data="digits",
        network="vgg8",
        epochs=2,
        global_batch=256,
        resolutions=(8,),
        precision="float32",
        dual={"shares": "planned"},
    )
    facts = open_data(job).facts
    large = 2 * facts.train_samples // 3
    plan = serve(
        plan_without_profile(job, facts, make_network(name="vgg8")),
        (large, facts.train_samples - large),
        (1.0, 0.5),
    )
    folder = tmp_path / "run"
    with pytest.raises(Interrupted, match="deadline") as caught:
        bw.train(plan, run_folder=folder, overrides=["goal.deadline=0.01"])
    assert caught.value.exit_code == 124
    assert load_checkpoint(folder / "checkpoints" / "last.pt")["server"]["layout"]
    summary = bw.train(run_folder=folder, resume=True, overrides=["goal.deadline=1000"])
    assert summary.resumed == 1
    assert len(summary.epochs) == 2
    assert sum(one.samples for one in summary.rounds) == 2 * facts.train_samples
    assert summary.accuracy is not None
    assert {one.update_factor for one in summary.rounds} == {1.0, 0.5}


def test_a_loop_of_ones_own_runs_under_torchrun(tmp_path):
    plan = make_plan()
    write_record(plan, tmp_path / "plan.json")
    (tmp_path / "settings.json").write_text("{}")
    words = ("--standalone", "--nproc-per-node=2", TESTS / "serving.py", tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    how = {"cwd": tmp_path, "env": env, "prints": tmp_path}
    done = forked.command(*words, program=forked.TORCHRUN, **how)
    assert done.returncode == 0, done.stderr
    assert_complete(Told(tmp_path, []).summary)
