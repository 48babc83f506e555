"""Checkpoints of a run with a parameter server, on a disk that takes its time."""

from __future__ import annotations

import threading

import pytest

from batchwright.training.checkpoints import checkpoint_writer
from batchwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from batchwright.training.parameter_server.messages import Settled
from servers import make_server_plan
from test_server_coordinator import Served, begun
from test_session import wait_until

SECONDS = 300  # after which a test gives up waiting


class SlowDisk:
    """Writes wait until they are let through, one by one or all."""

    def __init__(self, monkeypatch):
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self.names = []
        monkeypatch.setattr(checkpoint_writer, "save_checkpoint", self.save)

    def save(self, path, content, **options):
        self.names.append(path.stem)
        self.begun.release()
        assert self.allowed.acquire(timeout=SECONDS)
        save_checkpoint(path, content, **options)

    def wait_for_write(self):
        assert self.begun.acquire(timeout=SECONDS)

    def let_through(self, writes=1):
        self.allowed.release(writes)


@pytest.fixture
def disk(monkeypatch):
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.let_through(100)


def score(served, rank, correct, loss=None):
    """A worker ends a round, and an epoch with it, and has evaluated the model."""
    assert served.push(rank).evaluate is not None
    scores = {"top1": correct} | ({} if loss is None else {"loss": loss})
    settled = Settled(exchange=0.1, evaluation=1.0, scores=scores, count=12)
    served.coordinator.settle(rank, served.links[rank], settled)


def in_a_thread(call):
    """Whether a call comes back while others go on."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return not thread.is_alive()


def best_score(folder):
    return load_checkpoint(folder / "checkpoints" / "best.pt")["state"]["best_score"]


def test_nobody_waits_for_a_slow_disk_and_the_best_model_is_kept_in_the_end(tmp_path, disk):
    served = begun(make_server_plan((12,), epochs=6), tmp_path)
    score(served, 0, 3.0)
    served.keeper.save_best()
    disk.wait_for_write()
    for correct in (6.0, 9.0, 4.0):  # the first is still being written
        score(served, 0, correct)
        assert in_a_thread(served.keeper.save_best)
        assert in_a_thread(lambda: served.coordinator.answer(0, served.links[0], 0))
    assert disk.names == ["best"]
    disk.let_through(100)
    served.keeper.finish()
    assert disk.names == ["best", "best", "last"]  # the one between was never the newest
    assert best_score(tmp_path) == 0.75
    assert load_checkpoint(tmp_path / "checkpoints" / "last.pt")["state"]["best_score"] == 0.75


def test_a_checkpoint_that_knows_a_best_score_is_written_after_that_model(tmp_path, disk):
    """Else a kill between the two would leave a score that no model has."""
    served = begun(make_server_plan((12,), epochs=6), tmp_path)
    score(served, 0, 3.0)
    served.keeper.save_best()
    disk.wait_for_write()
    score(served, 0, 6.0)
    assert in_a_thread(served.keeper.save_last)
    disk.let_through(2)
    disk.wait_for_write()
    disk.wait_for_write()
    assert disk.names == ["best", "best", "last"]
    disk.let_through()
    served.keeper.settle()
    assert best_score(tmp_path) == 0.5


def test_of_equal_accuracies_the_lower_loss_is_the_best_after_a_resume_too(tmp_path):
    plan = make_server_plan((12,), epochs=6)
    served = begun(plan, tmp_path)
    for loss in (12.0, 6.0, 9.0):
        score(served, 0, 6.0, loss)
        served.keeper.save_best()
    served.keeper.save_last()
    served.keeper.settle()
    state = load_checkpoint(tmp_path / "checkpoints" / "best.pt")["state"]
    assert (state["best_score"], state["best_loss"]) == (0.5, 0.5)
    assert state["epoch"] == 2
    best = served.again().coordinator.evaluations.best
    assert (best.best_score, best.best_loss) == (0.5, 0.5)


@pytest.mark.parametrize("has_last", [True, False])
def test_a_server_goes_on_from_its_best_where_that_is_newer_than_its_last(tmp_path, has_last):
    """Else the best would be of an epoch that the resumed run never has."""
    served = begun(make_server_plan((12,), epochs=6), tmp_path)
    score(served, 0, 3.0)
    if has_last:
        served.keeper.save_last()
    score(served, 0, 6.0)
    served.keeper.save_best()
    served.keeper.settle()
    again = Served(served.plan, tmp_path, resume=True)
    assert [epoch.top1 for epoch in again.recorder.epochs] == [0.25, 0.5]
    assert again.coordinator.progress == served.coordinator.progress
    assert not again.coordinator.evaluations.best.note_score({"top1": 5.0}, 12)


def test_a_best_is_written_after_models_that_are_to_stay(tmp_path):
    """Else a run that goes on from it would never write those."""
    served = begun(plan_with(checkpoint_epochs=1), tmp_path)
    score(served, 0, 3.0)
    served.keeper.save_best()
    served.keeper.settle()
    assert not any((tmp_path / "checkpoints").iterdir())
    served.keeper.save_kept()
    served.keeper.save_best()
    served.keeper.settle()
    names = {path.stem for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"epoch-1", "best"}


@pytest.mark.parametrize(("scores", "kept"), [(("loss", "top1"), False), (("top1", "loss"), True)])
def test_a_loss_that_an_earlier_version_took_for_a_score_is_none_after_a_resume(
    tmp_path, scores, kept
):
    served = begun(make_server_plan((12,), epochs=6), tmp_path)
    score(served, 0, 6.0)
    served.coordinator.evaluations.scores = dict.fromkeys(scores, 0.5)
    served.keeper.save_last()
    served.keeper.settle()
    path = tmp_path / "checkpoints" / "last.pt"
    content = load_checkpoint(path)
    del content["state"]["loss_as_score"]
    save_checkpoint(path, content)
    best = Served(served.plan, tmp_path, resume=True).coordinator.evaluations.best
    assert best.note_score(dict.fromkeys(scores, 1.0), 12) is not kept


def plan_with(**keys):
    plan = make_server_plan((12,), epochs=6)
    return plan.model_copy(update={"job": plan.job.model_copy(update=keys)})


def test_rounds_wait_for_a_disk_that_cannot_follow_before_kept_models_fill_the_memory(
    tmp_path, disk
):
    served = begun(plan_with(checkpoint_epochs=1), tmp_path)
    served.train(0)
    served.keeper.save_kept()
    disk.wait_for_write()
    served.train(0)
    assert served.told[0].ticket is not None  # one is being written, and one waits
    served.keeper.save_kept()
    served.train(0)
    assert served.told[0].evaluate == 2  # two wait, and it evaluates the model of the second
    assert served.push(0) is None
    served.keeper.save_kept()
    assert served.answer(0) is None
    disk.let_through()
    wait_until(lambda: served.keeper.save_kept() or served.answer(0) is not None)
    disk.wait_for_write()
    disk.let_through(100)
    served.keeper.finish()
    assert disk.names == ["epoch-1", "epoch-2", "epoch-3", "epoch-4", "best", "last"]
    for number in (1, 2, 3, 4):  # of its epoch, however late it is written
        kept = load_checkpoint(tmp_path / "checkpoints" / f"epoch-{number}.pt")
        assert kept["state"]["epoch"] == number


def test_an_epoch_is_evaluated_before_rounds_wait_for_the_disk(tmp_path, disk):
    """Else its accuracy would be that of a model which others have changed meanwhile."""
    plan = make_server_plan((6, 6), epochs=6)
    keys = {"checkpoint_epochs": 1}
    served = begun(plan.model_copy(update={"job": plan.job.model_copy(update=keys)}), tmp_path)
    served.train(0, 1)
    served.keeper.save_kept()
    disk.wait_for_write()
    served.train(0, 1, 0)
    assert served.push(1).evaluate == 2
    assert served.push(0) is None  # its round had begun before
    served.settle(1)
    assert served.push(1) is None
    disk.let_through()
    wait_until(lambda: served.keeper.save_kept() or served.answer(1) is not None)
    assert served.told[1].evaluate == 3
    assert served.answer(0) is None
    disk.let_through(100)
    served.keeper.finish()


def test_a_checkpoint_is_not_asked_for_while_one_is_being_written(tmp_path, disk):
    served = begun(plan_with(checkpoint_steps=1), tmp_path)
    for _ in range(3):
        score(served, 0, 3.0)
        assert in_a_thread(served.keeper.save_if_due)
    disk.wait_for_write()
    disk.let_through(100)
    served.keeper.settle()
    assert disk.names == ["best", "last"]
