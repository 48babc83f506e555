"""Records of rounds, and of epochs that are made of them."""

from __future__ import annotations

import json

import pytest

from batchwright.records import Plan, RoundRecord, RunSummary, Stage
from batchwright.training.parameter_server.round_log import RoundLog
from batchwright.training.recorder import Recorder
from samples import make_plan, make_server

SAMPLES = 100
PLACES = ("here/cpu:0", "here/cpu:1")


def server_plan() -> Plan:
    plan = make_plan()
    stage = Stage(
        epochs=3,
        resolution=32,
        learning_rate=0.1,
        dropout=0,
        augmentation="none",
        local_batch_sizes=(20, 5),
        micro_batch_size=20,
        samples_per_round=(60, 40),
        update_factors=(1.0, 2 / 3),
    )
    rule = make_server(extra_time=1.2)
    return plan.model_copy(update={"stages": (stage,), "server": rule, "merge": "parameter server"})


def round_of(worker: int, number: int, **changes) -> RoundRecord:
    fields = {
        "worker": worker,
        "number": number,
        "epoch": number // 2,
        "resolution": 32,
        "local_batch_size": (20, 5)[worker],
        "samples": (60, 40)[worker],
        "steps": (3, 8)[worker],
        "update_factor": (1.0, 2 / 3)[worker],
        "loss": (2.0, 1.0)[worker],
        "start": 10.0 * (number // 2),
        "compute_seconds": 9.0 + worker,
        "exchange_seconds": 0.5,
        "wait_seconds": 1.0 - worker,
        "evaluation_seconds": 3.0,
    }
    return RoundRecord(**(fields | changes))


@pytest.fixture
def book(tmp_path):
    plan = server_plan()
    recorder = Recorder(tmp_path, plan)
    return RoundLog(recorder, plan, SAMPLES, PLACES), recorder


def lines(recorder: Recorder) -> list[dict]:
    return [json.loads(line) for line in (recorder.folder / "metrics.jsonl").open()]


def test_an_epoch_is_made_once_its_samples_are_committed(book):
    rounds, recorder = book
    rounds.add(round_of(0, 0), rate=0.1, committed=60)
    assert not recorder.epochs
    rounds.add(round_of(1, 1), rate=0.05, committed=100)
    (epoch,) = recorder.epochs
    assert (epoch.epoch, epoch.samples, epoch.steps, epoch.learning_rate) == (0, 100, 11, 0.05)
    assert epoch.train_loss == pytest.approx((60 * 2.0 + 40 * 1.0) / 100)
    assert epoch.training_seconds == pytest.approx((10.5 + 10.5) / 2)  # evaluation not counted
    assert [one.samples for one in epoch.workers] == [60, 40]
    assert epoch.workers[0].wait_seconds == 1.0
    assert [line["kind"] for line in lines(recorder)] == ["round", "round", "epoch"]


def test_an_epoch_s_rate_is_that_of_its_own_rounds_also_after_a_resume(book):
    rounds, recorder = book
    rounds.add(round_of(0, 0), rate=0.1, committed=60)
    rounds.add(round_of(1, 1, samples=38), rate=0.09, committed=98)
    again = RoundLog(recorder, server_plan(), SAMPLES, PLACES)
    again.restore(json.loads(json.dumps(rounds.values())))
    again.add(round_of(0, 2), rate=0.01, committed=158)  # of the next row, with the last two
    assert [one.learning_rate for one in recorder.epochs] == [0.09]


def test_several_rounds_of_a_worker_in_an_epoch_add_up(book):
    rounds, recorder = book
    for number, (worker, samples) in enumerate([(0, 30), (1, 40), (0, 30)]):
        committed = sum((30, 40, 30)[: number + 1])
        record = round_of(worker, number, samples=samples)
        rounds.add(record, rate=0.1, committed=committed)
    (epoch,) = recorder.epochs
    assert epoch.workers[0].compute_seconds == 18.0
    assert epoch.training_seconds == pytest.approx((2 * 10.5 + 10.5) / 2)


def test_scores_reach_the_epoch_whether_they_come_before_or_after_its_record(book):
    rounds, recorder = book
    rounds.scored(0, {"top1": 30.0, "loss": 80.0}, 40, 2.5)
    for number, worker in enumerate((0, 1, 0, 1)):
        rounds.add(round_of(worker, number), rate=0.1, committed=(60, 100, 160, 200)[number])
    rounds.scored(1, {"top1": 36.0}, 40, 1.5)
    first, second = recorder.epochs
    assert (first.top1, first.val_loss, first.evaluation_seconds) == (0.75, 2.0, 2.5)
    assert (second.top1, second.val_loss, second.evaluation_seconds) == (0.9, None, 1.5)


def test_an_epoch_without_a_round_of_some_worker_still_counts_all_of_them(book):
    rounds, recorder = book
    rounds.add(round_of(0, 0, samples=100), rate=0.1, committed=100)
    assert recorder.epochs[0].training_seconds == pytest.approx(10.5 / 2)  # the other is under way
    rounds.gone.add(1)
    rounds.add(round_of(0, 1, samples=100), rate=0.1, committed=200)
    assert recorder.epochs[1].training_seconds == pytest.approx(10.5)


def test_a_loss_that_is_not_finite_anywhere_leaves_the_others(book):
    rounds, recorder = book
    rounds.add(round_of(0, 0, loss=None), rate=0.1, committed=60)
    rounds.add(round_of(1, 1), rate=0.1, committed=100)
    assert recorder.epochs[0].train_loss == 1.0


def test_a_restored_book_goes_on_and_says_that_the_epoch_is_not_whole(book, tmp_path):
    rounds, recorder = book
    for number, worker in enumerate((0, 1, 0)):
        rounds.add(round_of(worker, number), rate=0.1, committed=(60, 100, 160)[number])
    rounds.scored(0, {"top1": 30.0}, 40, 2.5)
    rounds.scored(1, {"top1": 36.0}, 40, 1.5)  # before the last of its rounds is over
    values = json.loads(json.dumps(rounds.values()))
    again = Recorder(tmp_path, server_plan())
    again.restore(json.loads(json.dumps(recorder.values())), "")
    other = RoundLog(again, server_plan(), SAMPLES, PLACES)
    other.restore(values)
    other.add(round_of(1, 3), rate=0.1, committed=200)
    assert other.rounds[:3] == rounds.rounds
    first, second = again.epochs
    assert first.whole
    assert not second.whole
    assert second.samples == 100
    assert (first.top1, second.top1) == (0.75, 0.9)
    summary = again.summary(rounds=tuple(other.rounds), simulated=True)
    assert RunSummary.model_validate_json(summary.model_dump_json()) == summary


# ------------------------------------------------------------------------------------ checkpoints


def resumed(recorder: Recorder, values: dict) -> RoundLog:
    """The book of a run that goes on from a checkpoint with these values."""
    again = Recorder(recorder.folder, server_plan())
    again.epochs = list(recorder.epochs)
    book = RoundLog(again, server_plan(), SAMPLES, PLACES)
    book.restore(json.loads(json.dumps(values)))
    return book


def test_a_checkpoint_is_as_long_after_many_rounds_as_after_few(book):
    rounds, _ = book
    lengths = []
    for number in range(500):
        rounds.add(round_of(0, number, epoch=0), rate=0.1, committed=0)
        lengths.append(len(json.dumps(rounds.values())))
    assert lengths[-1] - lengths[0] < 10  # digits of numbers


def test_a_killed_run_has_the_rounds_that_its_checkpoint_knows_each_once(book):
    first, recorder = book
    first.add(round_of(0, 0), rate=0.1, committed=60)
    values = first.values()
    first.add(round_of(1, 1, loss=9.0), rate=0.1, committed=100)  # after the checkpoint
    lines = recorder.folder / "metrics.jsonl"
    with lines.open("a") as file:
        file.write('{"kind": "round", "round": 2, "wor')  # killed while it wrote
    recorder.epochs.clear()
    second = resumed(recorder, values)
    assert second.rounds == first.rounds[:1]
    second.add(round_of(1, 1, loss=1.0, compute_seconds=1 / 3), rate=0.1, committed=100)
    values = second.values()
    second.add(round_of(0, 2, loss=9.0), rate=0.1, committed=160)  # and killed again
    third = resumed(second._recorder, values)
    assert third.rounds == second.rounds[:2]
    third.add(round_of(0, 2), rate=0.1, committed=160)
    assert [one.number for one in third.rounds] == [0, 1, 2]
    assert [one.loss for one in third.rounds] == [2.0, 1.0, 2.0]
    assert resumed(third._recorder, values).rounds == second.rounds[:2]  # of the checkpoint before
    assert resumed(third._recorder, third.values()).rounds == third.rounds


def test_a_run_that_was_killed_before_its_first_checkpoint_leaves_no_rounds(book):
    first, recorder = book
    first.add(round_of(0, 0), rate=0.1, committed=60)
    again = RoundLog(Recorder(recorder.folder, server_plan()), server_plan(), SAMPLES, PLACES)
    again.add(round_of(0, 0), rate=0.1, committed=60)
    assert resumed(recorder, again.values()).rounds == again.rounds


def test_a_checkpoint_that_holds_its_rounds_is_read_and_kept(book):
    first, recorder = book
    first.add(round_of(0, 0), rate=0.1, committed=60)
    former = {"rounds": [first.rounds[0].model_dump_json()], "since": 1, "rates": [(0, 0.1)]}
    second = resumed(recorder, former)
    second.add(round_of(1, 1), rate=0.1, committed=100)
    assert resumed(recorder, second.values()).rounds == [round_of(0, 0), round_of(1, 1)]


def test_rounds_whose_lines_are_no_longer_there_are_missed_and_the_run_goes_on(book):
    first, recorder = book
    first.add(round_of(0, 0), rate=0.1, committed=60)
    values = first.values()
    (recorder.folder / "metrics.jsonl").unlink()
    second = resumed(recorder, values)
    assert second.rounds == []
    assert "1 rounds of before are not on record" in lines(recorder)[-1]["text"]
    second.add(round_of(1, 1), rate=0.1, committed=100)
    assert resumed(recorder, second.values()).rounds == [round_of(1, 1)]


def test_without_a_folder_the_rounds_are_there_at_the_end():
    book = RoundLog(Recorder(None, server_plan()), server_plan(), SAMPLES, PLACES)
    book.add(round_of(0, 0), rate=0.1, committed=60)
    assert book.rounds == [round_of(0, 0)]
