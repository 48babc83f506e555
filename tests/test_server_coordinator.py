"""What the parameter server does for workers that come and go, without processes or a network."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.checkpoints.server_checkpoints import ServerCheckpoints
from batchwright.training.parameter_server.messages import Hello, Settled, Trained
from batchwright.training.parameter_server.server_coordinator import ServerCoordinator
from batchwright.training.recorder import Recorder
from samples import make_job
from servers import make_rule, make_server_plan, numbers


class Served:
    """A server, and workers that do at once what they are told."""

    def __init__(self, plan, folder=None, *, resume=False):
        self.plan, self.folder = plan, folder
        self.recorder = Recorder(folder, plan)
        self.coordinator = ServerCoordinator(plan, self.recorder)
        self.keeper = ServerCheckpoints(folder, plan, self.coordinator, self.recorder)
        self.keeper.prepare(resume=resume)
        self.links, self.told = {}, {}

    def come(self, *ranks):
        """Workers are there, and ask for their first rounds."""
        for rank in ranks:
            self.links[rank] = SimpleNamespace(cut=lambda: None)
            hello = Hello(rank, f"here/{rank}", (), {})
            weights = numbers(1.0) if rank == 0 else None
            self.coordinator.join(hello, weights, self.links[rank])
            self.coordinator.ask(rank, self.links[rank])

    def answer(self, rank):
        """What a worker is told to do; it does nothing of that yet."""
        answer = self.coordinator.answer(rank, self.links[rank], 0)
        self.told[rank] = answer and answer[0]
        return self.told[rank]

    def push(self, rank, *, seconds=0.5, model=2.0):
        """A worker ends its round, which took so many seconds, with a model of one number."""
        trained = Trained(steps=3, skipped=0, repeated=0, loss=1.0, rate=0.1, compute=seconds)
        self.coordinator.push(rank, self.links[rank], numbers(model), trained, 0.01)
        return self.answer(rank)

    def settle(self, rank):
        """A worker has its answer, unless it waits, and has evaluated where that says so."""
        if self.told[rank] is None:
            return
        scores = {"top1": 6.0} if self.told[rank].evaluate is not None else None
        settled = Settled(exchange=0.1, evaluation=1.0, scores=scores, count=12)
        self.coordinator.settle(rank, self.links[rank], settled)

    def train(self, *ranks):
        """Workers end a round each, one after the other."""
        for rank in ranks:
            self.push(rank)
            self.settle(rank)

    def lose(self, rank):
        self.coordinator.lose(rank, self.links[rank], "killed")

    def again(self):
        """The server that goes on from a checkpoint of this moment."""
        self.keeper.save_last()
        self.keeper.settle()
        return Served(self.plan, self.folder, resume=True)

    @property
    def accuracies(self):
        """Of each epoch on record."""
        self.coordinator.complete_rounds()
        return [epoch.top1 for epoch in self.recorder.epochs]

    @property
    def lines(self):
        return [json.loads(x) for x in (self.folder / "metrics.jsonl").open()]

    @property
    def notes(self):
        return [line["text"] for line in self.lines if line["kind"] == "note"]


def begun(plan, folder=None):
    """A server whose workers are all in their first rounds."""
    served = Served(plan, folder)
    served.come(*range(plan.workers))
    for rank in range(plan.workers):
        assert served.answer(rank).ticket is not None
    return served


# -------------------------------------------------------------------------------------- checkpoints


def test_rounds_that_ended_before_a_checkpoint_belong_to_the_epoch_in_progress(tmp_path):
    served = begun(make_server_plan((6, 6), epochs=4), tmp_path)
    served.train(0, 1, 0, 1, 0)
    served.push(1)  # its third round: how long the exchange took is not known yet
    again = served.again()
    assert [line["kind"] for line in again.lines[-3:]] == ["note", "round", "epoch"]
    assert again.lines[-1]["record"]["epoch"] == 2
    again.come(0, 1)
    again.answer(0)
    again.answer(1)
    again.train(0, 1)
    again.coordinator.complete_rounds()
    epochs = again.recorder.epochs
    assert [(epoch.epoch, epoch.samples) for epoch in epochs] == [(n, 12) for n in range(4)]
    assert [epoch.whole for epoch in epochs] == [True, True, False, True]
    assert [epoch.top1 for epoch in epochs[:2]] == [0.5, 0.5]
    assert sum(one.samples for one in again.coordinator.round_log.rounds) == 48


def test_rounds_whose_lines_went_down_with_the_machine_leave_none_twice(tmp_path):
    served = begun(make_server_plan((12,), epochs=6), tmp_path)
    served.train(0, 0, 0)
    served.keeper.save_last()
    served.keeper.settle()
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    kept = next(i for i, line in enumerate(lines) if b'"kind":"round"' in line) + 1
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:kept]))
    again = Served(served.plan, tmp_path, resume=True)
    assert any("2 rounds of before are not on record" in text for text in again.notes)
    again.come(0)
    again.answer(0)
    again.train(0, 0)
    third = again.again()
    numbers = [one.number for one in third.coordinator.round_log.rounds]
    assert numbers == sorted(set(numbers))


def test_a_run_goes_on_though_all_lines_of_an_earlier_start_are_gone(tmp_path):
    """Else bytes from behind the end of the file would be asked for."""
    served = begun(make_server_plan((12,), epochs=9), tmp_path)
    served.train(0, 0, 0, 0, 0)
    again = served.again()
    again.come(0)
    again.answer(0)
    again.train(0)
    again.keeper.save_last()
    again.keeper.settle()
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    third = Served(served.plan, tmp_path, resume=True)
    assert any("6 rounds of before are not on record" in text for text in third.notes)
    assert third.again().coordinator.progress[:2] == (6, 72)


# ------------------------------------------------------------------- evaluations that are cut short


def test_an_evaluation_cut_short_by_a_stop_is_done_after_the_resume(tmp_path):
    served = begun(make_server_plan((6, 6), epochs=1), tmp_path)
    served.train(0)
    assert served.push(1).evaluate == 0
    again = served.again()
    again.come(0, 1)
    assert [again.answer(rank).ticket for rank in (0, 1)] == [None, None]
    assert [again.told[rank].evaluate for rank in (0, 1)] == [0, None]
    again.settle(0)
    assert again.accuracies == [0.5]
    third = again.again()
    third.come(0, 1)
    assert third.answer(0).evaluate is None


def test_an_evaluation_waits_for_its_worker_when_all_others_have_left():
    served = begun(make_server_plan((6, 6), epochs=1))
    served.train(0)
    assert served.push(1).evaluate == 0
    assert served.answer(0).ticket is None
    served.coordinator.leave(0, served.links[0])
    served.lose(1)
    assert not served.coordinator.deserted
    served.come(1)
    assert (served.answer(1).ticket, served.told[1].evaluate) == (None, 0)
    served.settle(1)
    served.coordinator.leave(1, served.links[1])
    assert served.coordinator.deserted
    assert served.accuracies == [0.5]


def test_a_deadline_cuts_no_evaluation_short_behind_the_last_round():
    job = make_job(resolutions=(8,), goal={"deadline": 1e-6})
    served = begun(make_server_plan((6, 6), epochs=1, job=job))
    served.train(0)
    assert served.coordinator.time_is_up
    assert served.push(1).evaluate == 0
    assert not served.coordinator.time_is_up


def test_epochs_that_end_with_one_round_are_all_scored():
    """Its worker was in a second round when the other, and with it a part of the first, was lost
    for good: with what is left of an epoch the next round is longer than one."""
    served = begun(make_server_plan((16, 8), epochs=4))
    served.train(0)
    served.lose(1)
    served.coordinator.give_up(1)
    ended = []
    while not served.coordinator.finished:
        before = len(served.recorder.epochs)
        served.train(0)
        served.coordinator.complete_rounds()
        ended.append(len(served.recorder.epochs) - before)
    assert max(ended) > 1
    assert served.accuracies == [0.5] * 4


def test_a_worker_that_was_lost_while_it_evaluated_alone_does_it_when_it_is_back():
    served = begun(make_server_plan((6,), epochs=2))
    assert served.push(0).evaluate == 0
    served.lose(0)
    served.come(0)
    assert served.answer(0).ticket is not None
    assert served.told[0].evaluate == 0
    served.settle(0)
    served.train(0)
    assert served.accuracies == [0.5, 0.5]


def test_another_evaluates_for_one_that_is_lost():
    served = begun(make_server_plan((6, 6), epochs=3))
    served.train(0)
    assert served.push(1).evaluate == 0
    served.lose(1)
    assert served.push(0).evaluate == 0
    assert served.told[0].ticket is not None
    served.settle(0)
    assert served.recorder.epochs[0].top1 == 0.5


# ------------------------------------------------------------------------------- workers that leave


def test_the_round_of_one_that_left_without_a_word_is_anothers_in_the_end():
    served = begun(make_server_plan((6, 6), epochs=1))
    served.lose(0)
    assert served.push(1) is None
    served.coordinator.give_up_lost(1000.0)
    assert served.answer(1) is None
    served.coordinator.give_up_lost(0.0)
    assert served.answer(1).ticket is not None
    served.train(1)
    assert served.coordinator.finished


def test_who_does_not_come_at_all_is_given_up_in_the_end():
    """As of a launcher that starts nobody again: the others would wait for ever."""
    served = Served(make_server_plan((6, 6), epochs=1))
    served.coordinator.give_up_lost(0.0)  # nobody has come yet
    served.come(0)
    assert served.answer(0) is None
    served.coordinator.give_up_lost(1000.0)
    assert served.answer(0) is None
    served.coordinator.give_up_lost(0.0)
    assert served.answer(0).ticket.samples > 0
    assert served.coordinator.members.gone == {1}


def test_nobody_is_given_up_while_nobody_else_is_there():
    served = begun(make_server_plan((6,), epochs=1))
    served.lose(0)
    served.coordinator.give_up_lost(0.0)
    assert not served.coordinator.deserted


def test_a_run_that_goes_on_has_its_weights_and_does_not_wait_for_the_gone(tmp_path):
    again = begun(make_server_plan((6, 6)), tmp_path).again()
    again.come(1)
    again.coordinator.give_up(0)
    assert again.answer(1).ticket is not None


def test_models_of_some_epochs_stay(tmp_path):
    plan = make_server_plan((6, 6), epochs=4)
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"checkpoint_epochs": 2})})
    served = begun(plan, tmp_path)
    for _ in range(4):
        served.train(0, 1)
        served.keeper.save_last()
    served.keeper.settle()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("epoch-*")) == ["epoch-2.pt", "epoch-4.pt"]
    assert load_checkpoint(folder / "epoch-2.pt")["state"]["epoch"] == 2


def test_under_bsp_the_model_of_an_epoch_has_all_models_that_its_merge_waited_for(tmp_path):
    """With an exchange after some steps an epoch ends before all workers have ended their rounds;
    the run is stopped and resumed just then."""
    rule, job = make_rule("bsp", exchange_steps=1), make_job(resolutions=(8,), checkpoint_epochs=2)
    plan = make_server_plan((6, 6), batches=(8, 8), rule=rule, epochs=3, job=job)
    served = begun(plan, tmp_path)
    served.train(0, 1)
    assert served.answer(0).ticket.samples == 8
    served.settle(0)
    assert served.push(0, model=4.0) is None
    assert served.coordinator.progress[:2] == (2, 24)
    assert served.coordinator.take_kept() is None
    again = served.again()
    again.come(0, 1)
    assert again.answer(0) is None
    assert (again.answer(1).ticket.samples, again.told[1].evaluate) == (8, None)
    again.push(1, model=8.0)
    kept = again.coordinator.take_kept()
    assert (kept.number, kept.weights.floats.item(), kept.progress[:2]) == (2, 6.0, (2, 32))
    assert again.answer(0).evaluate == 1


@pytest.mark.parametrize("lost", [False, True])
def test_an_epoch_behind_the_target_is_merged_kept_and_scored_under_bsp(lost):
    """It ends with a model that waits for that of the worker whose evaluation reaches the target
    of the epoch before; its own worker has nothing left to do then."""
    goal = {"accuracy": 0.5}
    job = make_job(resolutions=(8,), checkpoint_epochs=2, goal=goal)
    rule = make_rule("bsp", exchange_steps=1)
    served = begun(make_server_plan((6, 6), batches=(8, 8), rule=rule, epochs=3, job=job))
    served.train(0)
    assert served.push(1).evaluate == 0
    served.answer(0)
    served.settle(0)
    assert served.push(0, model=4.0) is None
    served.settle(1)  # its scores are those of the target, and it is in its round
    assert (served.answer(0).ticket, served.told[0].evaluate) == (None, None)
    served.coordinator.leave(0, served.links[0])
    if lost:
        served.lose(1)
        assert not served.coordinator.deserted
        served.come(1)
        served.answer(1)
    else:
        served.push(1, model=8.0)
    assert (served.told[1].ticket, served.told[1].evaluate) == (None, 1)
    kept = served.coordinator.take_kept()
    assert (kept.number, kept.weights.floats.item()) == (2, 4.0 if lost else 6.0)
    served.settle(1)
    served.coordinator.leave(1, served.links[1])
    assert served.coordinator.deserted
    assert served.accuracies == [0.5, 0.5]


# ------------------------------------------------------------------------------------------ shares


@pytest.mark.parametrize(("steps", "told"), [(None, True), (3, False)])
def test_shares_are_told_where_they_decide_how_long_rounds_are(tmp_path, steps, told):
    plan = make_server_plan((6, 6), epochs=6, rule=make_rule(exchange_steps=steps))
    served = begun(plan, tmp_path)
    for _ in range(3):
        for rank, seconds in enumerate((0.5, 1.0)):
            served.push(rank, seconds=seconds)
            served.settle(rank)
    served.coordinator.give_up(1)
    assert [note for note in served.notes if "samples per round" in note] == [
        "so that all workers end their rounds together, samples per round are now 8, 4",
        "worker 1 is gone for good: samples per round are now 12, 0",
    ] * told
