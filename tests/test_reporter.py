"""A run reported from its folder: each line once, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import suppress
from typing import ClassVar

import pytest
from sqlalchemy import delete

from batchwright.cli import client_commands
from batchwright.client import reporter, reporter_process
from batchwright.client.http import ServiceError
from batchwright.client.outbox import Lines, can_be_sent, read_report, seal_of
from batchwright.client.reporter import Order, Reporter
from batchwright.client.reporter_process import ReporterProcess, destination, reported
from batchwright.client.sending import MAX_LINES, Sender, report_to_send, send
from batchwright.errors import BatchwrightError, FileError, Interrupted, PlanError
from batchwright.records import Plan
from batchwright.records.documents import read_record, write_record
from batchwright.records.service import KeptAdvice, RunEnd, RunIntroduction
from batchwright.service.database.tables import runs
from batchwright.training.recorder import Recorder, mend
from clients import (
    Wire,
    a_report,
    a_server,
    epoch,
    lines_of,
    remote,
    run_folder,
    step,
    wait_until,
    write_lines,
)
from run_lines import values_of
from samples import make_plan, make_summary
from test_session import make_session, make_tiny_plan, train


@pytest.fixture
def folder(tmp_path):
    return run_folder(tmp_path / "runs" / "a run", lines=7)


@pytest.fixture
def told():
    return []


def stored(service, run):
    """Sequence numbers and records as the service has them."""
    page = service.store.records.after(run, None, -1, 5000)
    return list(page.sequences), [values_of(record) for record in page.records]


def sent(sender, times=50):
    """Send until nothing is left, as a reporter would that has no clock."""
    for _ in range(times):
        if not sender.send_some():
            return
    raise AssertionError("it never ends")


def a_sender(folder, service, told, faults=(), **report):
    return Sender(
        folder, a_report(folder, **report), remote(service, "report", faults), told.append
    )


# --------------------------------------------------------------------------------- lines of a file


def test_only_whole_lines_count_and_each_has_its_number(tmp_path):
    path = tmp_path / "lines"
    lines = Lines(path)
    assert (lines.ahead(5), lines.count(), lines.waiting) == ([], 0, False)
    path.write_bytes(b"a\nbb\nc")
    assert lines.ahead(5) == [b"a", b"bb"]
    assert lines.count() == 2
    lines.take(lines.ahead(5))
    assert (lines.next, lines.ahead(5), lines.waiting) == (2, [], True)
    with path.open("ab") as file:
        file.write(b"c\n\n")
    assert lines.ahead(5) == [b"cc", b""]
    assert lines.go_to(1)
    assert lines.ahead(1) == [b"bb"]
    assert lines.go_to(4)
    assert not lines.go_to(5)


def test_a_line_longer_than_a_message_comes_alone(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 3_000_000 + b"\ny\n")
    lines = Lines(path)
    assert list(map(len, lines.ahead(9, 1000)))[:1] == [3_000_000]
    lines.go_to(1)
    assert lines.ahead(9) == [b"y"]


@pytest.mark.parametrize("line", [b"", b"[1]", b'{"a": NaN}', b'{"a"', b"\xff", b"[" * 10_000])
def test_what_is_no_json_object_is_not_sent(line):
    assert not can_be_sent(line)
    assert can_be_sent(b'{"kind": "step"}')


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b'{"a": 1}\n{"b"', b'{"a": 1}\n'),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a"', b""),
        (b"", b""),
        (b"a\n" + b"x" * 200_000, b"a\n"),
        (b"x" * 65_535 + b"\n" + b"y" * 65_536, b"x" * 65_535 + b"\n"),
    ],
)
def test_a_torn_last_line_is_cut_off_and_no_other(tmp_path, content, left):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    mend(path)
    assert path.read_bytes() == left
    mend(tmp_path / "nowhere")


def test_a_very_long_torn_line_is_never_in_memory_as_a_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"a\n" + b"x" * 2**21)
    tracemalloc.start()
    try:
        mend(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == b"a\n"
    assert most < 2**20


def test_a_recorder_mends_what_a_killed_one_left(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "note"}\n{"kind": "st')
    Recorder(tmp_path, make_plan()).note("resumed")
    assert [line["kind"] for line in lines_of(tmp_path)] == ["note", "note"]


# --------------------------------------------------------------------------------------- the report


def test_a_report_is_read_as_it_was_written_and_names_the_run_for_people(tmp_path):
    folder = run_folder(tmp_path / "a\u202eb\nc")
    report = a_report(folder, job=None, next=3)
    assert read_report(folder) == report
    assert report.name == "a b c"
    assert read_report(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"format": "batchwright-report/1"}', '{"format": "else"}'),
        json.dumps(
            {
                "format": "batchwright-report/1",
                "url": "http://localhost:1",
                "run": "{00000000-0000-4000-8000-000000000001}",
                "name": "of no address",
            }
        ),
    ],
)
def test_a_damaged_report_says_what_to_do(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(FileError, match="remove it to report anew"):
        read_report(tmp_path)


def test_a_report_that_cannot_be_written_leaves_no_half_file(tmp_path):
    (tmp_path / "report.json").mkdir()
    with pytest.raises(FileError, match=r"cannot write .*report\.json: Is a directory"):
        a_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_where_to_report_is_asked_for_remembered_or_set(tmp_path, monkeypatch):
    monkeypatch.delenv("BATCHWRIGHT_REPORT_TO", raising=False)
    monkeypatch.delenv("BATCHWRIGHT_TOKEN", raising=False)
    assert destination(None, None) is None
    monkeypatch.setenv("BATCHWRIGHT_REPORT_TO", "http://localhost:1")
    assert destination(None, None) == "http://localhost:1"
    assert destination(None, "") is None
    run_folder(tmp_path)
    there = "http://localhost:2"
    monkeypatch.delenv("BATCHWRIGHT_REPORT_TO")
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", "bw_mine")
    a_report(tmp_path, there, seal=seal_of(there, "bw_mine"))
    assert destination(tmp_path, None) == there
    assert destination(tmp_path, "http://localhost:3/") == "http://localhost:3"
    monkeypatch.delenv("BATCHWRIGHT_TOKEN")
    with pytest.raises(BatchwrightError, match="there is no token to report to https://far"):
        destination(None, "https://far.example")


def test_a_folder_of_somebody_elses_does_not_get_the_token(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", "bw_mine")
    monkeypatch.delenv("BATCHWRIGHT_REPORT_TO", raising=False)
    run_folder(tmp_path, lines=1)
    evil = "https://evil.example"
    a_report(tmp_path, evil, seal=seal_of(evil, "bw_theirs"))
    with pytest.raises(BatchwrightError, match="with another token than yours: say --report-to"):
        destination(tmp_path, None)
    with pytest.raises(BatchwrightError, match="with another token than yours: say --server"):
        client_commands.send(tmp_path)
    assert destination(tmp_path, "") is None
    assert destination(tmp_path, evil) == evil
    monkeypatch.setenv("BATCHWRIGHT_REPORT_TO", evil)
    assert destination(tmp_path, None) == evil


# ------------------------------------------------------------------------------------- exactly once


def test_a_run_is_introduced_sent_and_ended(service, folder, told):
    sender = a_sender(folder, service, told)
    sender.introduce()
    sent(sender)
    write_lines(folder, epoch(0))
    sent(sender)
    write_record(make_summary(), folder / "summary.json")
    sender.end("finished", None)
    run = sender.report.run
    assert stored(service, run) == (list(range(8)), lines_of(folder))
    info = service.store.runs.get(run)
    assert (info.name, info.state, info.epochs_done) == ("a run", "finished", 1)
    without_path = {"run_folder": "a run"}  # where it lies is nobody's business there
    assert service.store.runs.summary(run) == make_summary().model_copy(update=without_path)
    assert service.store.runs.profile(run) is not None
    assert (sender.report.next, sender.report.told, sender.left, told) == (8, True, 0, [])


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_whatever_the_wire_loses_each_line_is_stored_once(service, folder, told, seed):
    chance = random.Random(seed)
    faults = ["refused", "lost", "answered", "503", "", "", ""]
    wire = (chance.choice(faults) for _ in iter(int, 1))
    sender = a_sender(folder, service, told, wire)
    introduced = False
    for turn in range(200):
        if turn < 30:
            write_lines(folder, *(step(turn) for _ in range(chance.randrange(4))))
        if chance.random() < 0.05:  # killed, and started again with an old or no note of how far
            report = sender.report.to(next=chance.choice([0, sender.report.next]))
            sender = Sender(folder, report, remote(service, "report", wire), told.append)
            introduced = False
        try:
            if not introduced:
                sender.introduce()
                introduced = True
            if not sender.send_some() and turn > 30 and not sender.left:
                break
        except BatchwrightError:
            continue
    assert stored(service, sender.report.run) == (
        list(range(len(lines_of(folder)))),
        lines_of(folder),
    )
    assert told == []


def test_two_senders_at_once_double_nothing(service, folder, told):
    one = a_sender(folder, service, told)
    two = Sender(folder, one.report, remote(service), told.append)
    one.introduce()
    two.introduce()
    sent(one)
    write_lines(folder, step(8))
    sent(two)
    sent(one)
    assert stored(service, one.report.run) == (list(range(8)), lines_of(folder))
    assert one.report.next == two.report.next == 8


def test_many_lines_go_in_several_messages(service, folder, told):
    write_lines(folder, *({"kind": "note", "text": str(n)} for n in range(2 * MAX_LINES)))
    sender = a_sender(folder, service, told)
    sender.introduce()
    assert sender.send_some()
    assert sender.report.next == MAX_LINES
    sent(sender)
    assert stored(service, sender.report.run)[1] == lines_of(folder)


def test_damaged_and_unwanted_lines_keep_their_places(service, folder, told):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            b"half a li\n" + json.dumps({"kind": "step", "a": "b" * 5_000_000}).encode() + b"\n"
        )
    write_lines(folder, {"no": "kind"}, step(9))
    sender = a_sender(folder, service, told)
    sender.introduce()
    sent(sender)
    numbers, records = stored(service, sender.report.run)
    assert numbers == list(range(11))
    assert records[:7] + records[10:] == lines_of_sound(folder)
    assert records[7] == {"kind": "note", "text": "line 8 of metrics.jsonl is damaged"}
    assert records[8]["text"].startswith("line 9 of metrics.jsonl is damaged")


def lines_of_sound(folder):
    """The steps among the lines."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines if line.startswith(b'{"kind": "step", "epoch"')]


def lose_tail(folder, kept, *lines):
    """A machine went down: of the lines only the first are there, and others came since."""
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    write_lines(folder, *lines)


@pytest.mark.parametrize(
    "count", [0, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)
@pytest.mark.parametrize("faults", [[], ["", "answered", "", "answered"], ["", "lost", "503"]])
def test_lines_that_were_lost_and_written_anew_replace_those_that_were_sent(
    service, folder, told, count, faults
):
    sender = a_sender(folder, service, told)
    sender.introduce()
    sent(sender)
    assert service.store.runs.get(sender.report.run).digest == sha256_of(folder)
    lose_tail(folder, 4, *(step(20 + n) for n in range(count)))
    again = Sender(folder, sender.report, remote(service, "report", faults), told.append)
    again.introduce()
    for _ in range(9):
        with suppress(ServiceError):  # the wire's
            sent(again)
    write_lines(folder, epoch(0))
    for _ in range(9):
        with suppress(ServiceError):
            sent(again)
    assert again.report.run == sender.report.run
    assert stored(service, again.report.run) == (list(range(5 + count)), lines_of(folder))
    assert service.store.runs.get(again.report.run).digest == sha256_of(folder)
    assert len(told) == 1
    assert "they are sent anew" in told[0]
    last = Sender(folder, again.report, remote(service), told.append)
    last.introduce()
    assert not last.send_some()
    assert len(told) == 1


def sha256_of(folder):
    return hashlib.sha256((folder / "metrics.jsonl").read_bytes()).hexdigest()


def test_other_lines_are_noticed_by_a_sign_of_life_and_while_lines_are_sent(service, folder, told):
    first = a_sender(folder, service, told)
    first.introduce()
    sent(first)
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    for act in (Sender.alive, sent):
        lose_tail(copy, 4, step(30), step(31), step(32), step(33))
        other = Sender(copy, first.report, remote(service), told.append)
        other.introduce()
        sent(other)
        write_lines(folder, step(8))
        act(first)
        sent(first)
        assert "they are sent anew" in told[-1]
        assert stored(service, first.report.run)[1] == lines_of(folder)
        first = Sender(folder, first.report, remote(service), told.append)
        first.introduce()


def test_two_copies_of_a_folder_become_two_runs(service, folder, told):
    one = a_sender(folder, service, told)
    one.introduce()
    sent(one)
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    lose_tail(copy, 3, step(30))
    two = Sender(copy, one.report, remote(service), told.append)
    two.introduce()
    for number in range(5):
        for sender, place in ((one, folder), (two, copy)):
            write_lines(place, step(40 + number))
            sent(sender)
    assert one.report.run != two.report.run
    assert stored(service, one.report.run)[1] == lines_of(folder)
    assert stored(service, two.report.run)[1] == lines_of(copy)
    assert "it is reported as a run of its own" in told[-1]


def test_a_copy_of_a_finished_run_is_reported_as_a_run_of_its_own(service, folder, told):
    sender = a_sender(folder, service, told)
    sender.introduce()
    sent(sender)
    sender.end("finished", None)
    before = lines_of(folder)
    lose_tail(folder, 0, step(0))
    other = Sender(folder, sender.report, remote(service), told.append)
    other.introduce()
    sent(other)
    assert other.report.run != sender.report.run
    assert stored(service, sender.report.run)[1] == before
    assert stored(service, other.report.run) == ([0], lines_of(folder))
    assert "it is reported as a run of its own" in told[-1]


def test_a_service_of_an_earlier_version_gets_no_records_and_is_named(service, folder, told):
    sender = a_sender(folder, service, told)
    sender._service.put = lambda *_: {"id": sender.report.run, "records": 0}
    with pytest.raises(ServiceError, match="is of an earlier version") as refused:
        sender.introduce()
    assert not refused.value.passing


def test_a_service_that_has_lost_records_gets_them_again(service, folder, told):
    sender = a_sender(folder, service, told)
    sender.introduce()
    sent(sender)
    plan = make_plan()
    with service.store.database.writing() as connection:  # as where a backup was gone back to
        connection.execute(delete(runs).where(runs.c.id == sender.report.run))
    service.store.runs.introduce(
        sender.report.run, RunIntroduction(name="restored", plan=plan), "report"
    )
    write_lines(folder, step(8))
    sent(sender)
    assert stored(service, sender.report.run)[1] == lines_of(folder)


def test_a_run_that_somebody_deleted_is_not_brought_back_by_its_reporter(service, folder, told):
    sender = a_sender(folder, service, told)
    sender.introduce()
    sent(sender)
    assert service.delete("report", f"/v1/runs/{sender.report.run}").status_code == 204
    write_lines(folder, step(8))
    with pytest.raises(ServiceError) as forgotten:
        sent(sender)
    assert forgotten.value.status == 404
    with pytest.raises(ServiceError, match="deleted here") as refused:
        sender.introduce()
    assert not refused.value.passing
    assert service.store.runs.list() == []
    (folder / "report.json").unlink(missing_ok=True)
    again = send(folder, report_to_send(folder, sender.report.url), remote(service), told.append)
    assert service.store.runs.get(again.run).records == 8


@pytest.mark.slow
def test_what_has_been_sent_by_hand_need_not_be_sent_again(service, folder, told):
    with pytest.raises(FileError, match="never reported anywhere"):
        report_to_send(folder, None)
    with pytest.raises(FileError, match="holds no run"):
        report_to_send(folder.parent, None)
    report = report_to_send(folder, "http://127.0.0.1:8400")
    done = send(folder, report, remote(service, "report", ["", "answered"]), told.append)
    assert (done.next, done.told) == (7, False)
    assert service.store.runs.get(done.run).state == "running"
    write_record(make_summary(), folder / "summary.json")
    done = send(folder, report_to_send(folder, None), remote(service), told.append)
    assert (done.run, done.told) == (read_report(folder).run, True)
    assert service.store.runs.get(done.run).state == "finished"
    with pytest.raises(BatchwrightError, match="7 lines are left to send"):
        send(folder, report.to(next=0), remote(service, "report", ["401"]), told.append)


# ------------------------------------------------------------------------------ the reporter's loop


class Running:
    """A reporter in a thread, with everything faster."""

    def __init__(self, folder, service, monkeypatch, faults=()):
        self.wire = remote(service, "report", faults)
        monkeypatch.setattr(reporter, "Service", lambda *_: self.wire)
        monkeypatch.setattr(reporter, "find_token", lambda _: "bw")
        for name, seconds in (("LOOK_SECONDS", 0.01), ("BATCH_SECONDS", 0.02), ("KEEP_SECONDS", 0)):
            monkeypatch.setattr(reporter, name, seconds)
        self.orders = queue.Queue()
        self.said = []
        one = Reporter(folder, self.orders, self)
        monkeypatch.setattr(one, "_backoff", Quick())
        self.thread = threading.Thread(target=one.run, daemon=True)
        self.thread.start()

    def write(self, text):
        self.said += [text] if text.strip() else []

    def flush(self):
        pass

    def end(self, outcome="finished", error=None, seconds=20.0):
        self.orders.put(Order(outcome, error, seconds))
        self.thread.join(300)
        assert not self.thread.is_alive()


class Quick:
    def reset(self):
        pass

    def seconds(self, error=None):
        return 0.01


def test_a_reporter_follows_a_run_through_bad_times(service, folder, monkeypatch):
    report = a_report(folder)
    faults = [*["refused"] * 5, "", "503", "answered", "lost", ""]
    running = Running(folder, service, monkeypatch, faults)
    wait_until(lambda: read_report(folder).next == 7)
    for number in range(5):
        write_lines(folder, step(number))
        time.sleep(0.01)
    running.end("failed", "worker 1 was killed by SIGKILL")
    assert stored(service, report.run) == (list(range(12)), lines_of(folder))
    info = service.store.runs.get(report.run)
    assert (info.state, info.error) == ("failed", "worker 1 was killed by SIGKILL")
    assert running.said[0].startswith("cannot reach http://127.0.0.1:8400")
    assert running.said[1] == "the service takes records again"
    kept = read_report(folder)
    assert (kept.next, kept.state, kept.told) == (12, "failed", True)


def test_an_error_that_names_a_file_in_another_encoding_is_told(service, folder, told):
    sender = a_sender(folder, service, told)
    sender.introduce()
    sender.end("failed", "cannot read caf\udce9.jpg:\nis it an image?")
    info = service.store.runs.get(sender.report.run)
    assert (info.state, info.error) == ("failed", r"cannot read caf\udce9.jpg: is it an image?")


def test_a_reporter_that_gets_no_further_notes_the_end_and_leaves(service, folder, monkeypatch):
    report = a_report(folder)
    running = Running(folder, service, monkeypatch, ["503"] * 1_000_000)
    running.end(seconds=0.2)
    kept = read_report(folder)
    assert (kept.run, kept.next, kept.state, kept.told) == (report.run, 0, "finished", False)


def test_a_reporter_that_looks_for_another_token_closes_its_connections(
    service, folder, monkeypatch
):
    closed = []
    monkeypatch.setattr(Wire, "close", lambda wire: closed.append(wire))
    report = a_report(folder)
    running = Running(folder, service, monkeypatch, ["401", "", "401"])
    running.end()
    assert len(closed) == 2
    assert service.store.runs.get(report.run).state == "finished"


def test_a_reporter_whose_training_was_killed_sends_the_rest_and_says_nothing_of_an_end(
    service, folder, monkeypatch
):
    report = a_report(folder)
    running = Running(folder, service, monkeypatch)
    running.end("", None)
    assert len(stored(service, report.run)[0]) == 7
    assert service.store.runs.get(report.run).state == "running"
    assert read_report(folder).state == "running"


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["", '{"kind": "st'])  # a full disk leaves half a line
def test_a_run_with_nothing_to_say_is_still_heard_of(service, folder, clock, monkeypatch, begun):
    report = a_report(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(begun)
    monkeypatch.setattr(reporter, "ALIVE_SECONDS", 1.0)
    running = Running(folder, service, monkeypatch)
    wait_until(lambda: read_report(folder).next == 7)
    clock.go(1000)
    wait_until(lambda: service.store.runs.get(report.run).state == "running")
    running.end("stopped")


# ------------------------------------------------------------------------------------------- advice


def offer(service, run, number):
    """Advice of this number, from the epoch of the same number on."""
    return service.store.advice.offer(run, number, f"reason {number}", make_plan())


def kept(advice, run, taken=None):
    """Advice as the run folder holds it."""
    return KeptAdvice(**dict(advice) | {"run": run, "taken": taken})


def put_aside(folder, advice, run, taken=None):
    """What training leaves behind when it is done with advice."""
    write_record(kept(advice, run, taken), folder / f"advice-{advice.number}.json")
    (folder / "advice.json").unlink(missing_ok=True)


def test_an_empty_answer_is_an_error_that_passes_and_loses_no_line(service, folder, told):
    """As of a proxy whose service is away."""
    sender = a_sender(folder, service, told, ["204", "", "204", "204", "204"])
    with pytest.raises(ServiceError, match="does not answer as"):
        sender.introduce()
    sender.introduce()
    for send_it in (sender.send_some, sender.alive, lambda: sender.end("stopped", None)):
        with pytest.raises(ServiceError, match="does not answer as") as error:
            send_it()
        assert error.value.passing
    assert not sender.report.told
    sent(sender)
    assert len(stored(service, sender.report.run)[0]) == 7


def test_advice_comes_into_the_folder_of_a_run_that_follows_it(service, folder, told):
    sender = a_sender(folder, service, told, follows_advice=True)
    sender.introduce()
    run = sender.report.run
    offer(service, run, 1)
    two = offer(service, run, 2)
    sent(sender)
    sender.exchange_advice()
    assert read_record(folder / "advice.json", KeptAdvice) == kept(two, run)
    assert told == ["advice of the service, for the end of an epoch: reason 2"]
    (folder / "advice.json").unlink()  # training put the one before aside, just then
    sender.exchange_advice()
    assert read_record(folder / "advice.json", KeptAdvice) == kept(two, run)


def test_advice_that_cannot_be_written_comes_later_and_does_not_hold_up_the_end(
    service, folder, clock, monkeypatch
):
    """As on a disk that is full for a while."""
    monkeypatch.setattr(reporter, "ALIVE_SECONDS", 0.0)
    run = a_report(folder, follows_advice=True).run
    service.store.runs.introduce(run, RunIntroduction(name="a", plan=make_plan()), "report")
    offer(service, run, 1)
    file, full = folder / "advice.json", folder / ".advice.json.writing"
    full.mkdir()
    running = Running(folder, service, monkeypatch)
    wait_until(lambda: any("cannot write" in line for line in running.said))
    wait_until(lambda: read_report(folder).next == 7)
    clock.go(1000)
    wait_until(lambda: service.store.runs.get(run).state == "running", "it is not heard of")
    full.rmdir()
    wait_until(file.exists, "it did not come")
    full.mkdir()
    file.unlink()
    running.end()
    assert service.store.runs.get(run).state == "finished"


def test_advice_that_was_taken_is_told_once_with_the_plan_that_came_of_it(service, folder, told):
    sender = a_sender(folder, service, told, follows_advice=True)
    sender.introduce()
    run = sender.report.run
    advice = offer(service, run, 1)
    sent(sender)
    sender.exchange_advice()
    new = make_plan(reasons=())
    write_record(new, folder / "plan.json")
    put_aside(folder, advice, run, taken=4)
    sender.exchange_advice()
    (known,) = service.store.advice.list(run)
    assert known.taken == 4
    assert service.store.runs.plan(run) == new
    assert sender.report.advice_told == 1
    asked = list(sender._service._client.asked)
    sender.exchange_advice()
    assert sender._service._client.asked == asked
    again = Sender(folder, sender.report, remote(service), told.append)
    again.introduce()
    again.alive()
    again.exchange_advice()
    assert not (folder / "advice.json").exists()


def test_advice_that_training_cannot_read_does_not_come_again(service, folder, told):
    """As from a service of a newer version: each epoch would find it, and note it, anew."""
    sender = a_sender(folder, service, told, follows_advice=True)
    sender.introduce()
    offer(service, sender.report.run, 1)
    sent(sender)
    sender.exchange_advice()
    (folder / "advice.json").rename(folder / "advice-unreadable.json")  # as training does
    sender.exchange_advice()
    assert not (folder / "advice.json").exists()
    offer(service, sender.report.run, 2)
    sender.alive()
    sender.exchange_advice()
    assert read_record(folder / "advice.json", KeptAdvice).number == 2


def test_advice_is_only_told_to_a_run_that_does_not_follow_it(service, folder, told):
    sender = a_sender(folder, service, told)
    sender.introduce()
    offer(service, sender.report.run, 1)
    sender.alive()
    sender.exchange_advice()
    assert told == ["advice of the service: reason 1 (--follow-advice would take it)"]
    assert not (folder / "advice.json").exists()


OTHER_RUN = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def once_advised(service, folder):
    """The folder of a run that has taken advice of another service."""
    advice = offer(service, service.a_run(), 1)
    put_aside(folder, advice, OTHER_RUN, taken=1)
    return folder


def test_advice_that_was_taken_for_another_run_is_not_told(service, once_advised, told):
    write_record(make_summary(), once_advised / "summary.json")
    report = report_to_send(once_advised, "http://127.0.0.1:8400")
    done = send(once_advised, report, remote(service), told.append)
    assert (done.told, done.advice_told, told) == (True, 0, [])
    assert service.store.runs.get(done.run).state == "finished"


def test_advice_of_a_number_that_another_run_had_comes_into_the_folder(service, once_advised, told):
    sender = a_sender(once_advised, service, told, follows_advice=True)
    sender.introduce()
    run = sender.report.run
    advice = offer(service, run, 1)
    sent(sender)
    sender.exchange_advice()
    assert read_record(once_advised / "advice.json", KeptAdvice) == kept(advice, run)
    (once_advised / "advice.json").unlink()
    sender.exchange_advice()
    assert (once_advised / "advice.json").exists()
    put_aside(once_advised, advice, run, taken=1)
    sender.exchange_advice()
    assert service.store.advice.list(run)[0].taken == 1
    assert sender.report.advice_told == 1


def test_a_copy_that_is_a_run_of_its_own_gets_advice_of_its_own(service, folder, told):
    sender = a_sender(folder, service, told, follows_advice=True)
    sender.introduce()
    former = sender.report.run
    sent(sender)
    service.report(former, step(7), step(8))  # from the other copy
    service.store.runs.end(former, RunEnd(outcome="finished"))
    offer(service, former, 1)
    sender.alive()
    sender.exchange_advice()
    assert not (folder / "advice.json").exists()
    sent(sender)
    run = sender.report.run
    assert run != former
    advice = offer(service, run, 1)
    write_lines(folder, step(7))
    sent(sender)
    sender.exchange_advice()
    assert read_record(folder / "advice.json", KeptAdvice) == kept(advice, run)


@pytest.mark.parametrize(("number", "taken"), [(2, 1), (1, 10_000)])
def test_taken_advice_that_the_service_refuses_does_not_hold_up_the_end(
    service, folder, number, taken, monkeypatch
):
    report = a_report(folder)
    plan = make_plan()
    service.store.runs.introduce(report.run, RunIntroduction(name="a", plan=plan), "report")
    advice = offer(service, report.run, 1).model_copy(update={"number": number})
    put_aside(folder, advice, report.run, taken)
    running = Running(folder, service, monkeypatch)
    running.end()
    (line,) = running.said
    assert line.startswith(f"advice {number} was taken, which the service does not note: ")
    assert service.store.runs.get(report.run).state == "finished"
    assert read_report(folder).told


def test_damaged_advice_does_not_hold_up_the_end(service, folder, told):
    sender = a_sender(folder, service, told)
    sender.introduce()
    (folder / "advice-1.json").write_text("{")
    (folder / "advice-2.json").write_text("[]")
    sender.report_taken_advice()
    assert sender.report.advice_told == 0


def test_advice_that_cannot_be_read_does_not_hold_up_the_records(service, folder, told):
    sender = a_sender(folder, service, told, ["", "", "403"])
    sender.introduce()
    offer(service, sender.report.run, 1)
    sent(sender)
    sender.exchange_advice()
    sender.exchange_advice()
    (line,) = told
    assert line.startswith("there is advice, and it cannot be read")


# ------------------------------------------------------------------------------------ the companion


def test_a_run_that_is_not_reported_has_no_companion(folder, told):
    with reported(folder, None, tell=told.append) as nobody:
        assert nobody is None
    assert told == []


def test_a_report_that_cannot_be_written_does_not_stop_a_run(folder, told):
    (folder / "report.json").mkdir()
    with reported(folder, "http://127.0.0.1:9", tell=told.append):
        pass
    assert told[0].startswith("this run is not reported: cannot read")


def test_a_machine_that_can_start_no_thread_does_not_stop_a_run(folder, told, monkeypatch):
    """The limit on processes counts threads, too; the reporter's lines are read by one."""

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with reported(folder, "http://127.0.0.1:9", tell=told.append):
        pass
    assert told == ["this run is not reported: BlockingIOError: [Errno 11] can't start new thread"]


class Waiting:
    """A reporter for which the user does not wait."""

    def __init__(self, *_, **__):
        pass

    def say(self, _):
        pass

    def wait(self, _):
        raise KeyboardInterrupt

    def close(self):
        pass

    def lines(self):
        return ()


def test_ctrl_c_ends_the_waiting_for_the_reporter_and_not_the_run(folder, told, monkeypatch):
    monkeypatch.setattr(reporter_process, "Companion", Waiting)
    try:
        with reported(folder, "http://127.0.0.1:9", tell=told.append):
            pass
    except KeyboardInterrupt:
        pytest.fail("it ended the run")
    assert told[-1].startswith("7 lines of this run could not be sent to http://127.0.0.1:9 yet")
    assert read_report(folder).state == "finished"


@pytest.mark.slow
def test_a_service_that_is_not_there_is_told_of_and_left_for_later(folder, told, monkeypatch):
    monkeypatch.setattr(reporter_process, "LAST_SECONDS", 0.5)

    def interrupted():
        with reported(folder, "http://127.0.0.1:9", tell=told.append):
            raise Interrupted(15, "stopped by SIGTERM")

    with pytest.raises(Interrupted):
        interrupted()
    assert told[0].startswith("reporting to http://127.0.0.1:9/runs/")
    assert told[-1].startswith("7 lines of this run could not be sent to http://127.0.0.1:9 yet")
    assert told[-1].endswith(f"; `batchwright send '{folder}'` sends what is left")
    report = read_report(folder)
    assert (report.state, report.told) == ("stopped", False)


@pytest.mark.slow
def test_a_service_that_hangs_keeps_nobody_waiting(folder, told, monkeypatch):
    monkeypatch.setattr(reporter_process, "LAST_SECONDS", 0.5)
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", "bw_x")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with reported(folder, f"http://127.0.0.1:{silent.getsockname()[1]}", tell=told.append):
            connection, _ = silent.accept()  # and never a word
        connection.close()
    assert told[-1].startswith("7 lines of this run could not be sent")
    assert read_report(folder).state == "finished"


@pytest.mark.slow
def test_a_server_killed_again_and_again_has_each_line_once(tmp_path, told, monkeypatch):
    folder = run_folder(tmp_path / "run")
    chance = random.Random(time.time_ns())
    with a_server(tmp_path) as server:
        monkeypatch.setenv("BATCHWRIGHT_TOKEN", server.token)
        one = ReporterProcess(folder, server.url)
        for round_ in range(3):
            for number in range(400):
                write_lines(folder, step(number, epoch=round_))
            time.sleep(chance.random())
            server.kill()
            write_lines(folder, *(step(number) for number in range(50)))
            server.start()
        wait_until(lambda: read_report(folder).next == 1350, "it never caught up")
        one.end("finished", None)
        run = read_report(folder).run
        found = []
        with remote_of(server) as service_:
            while len(found) < 1350:
                after = len(found) - 1
                page = service_.get(f"/v1/runs/{run}/records?after={after}&limit=1000")
                found += page["records"]
            assert service_.get(f"/v1/runs/{run}")["state"] == "finished"
    assert found == lines_of(folder)


def remote_of(server):
    from batchwright.client.http import Service

    return Service(server.url, server.token)


KILLED = """
import os, sys, time
from pathlib import Path
from batchwright.client.reporter_process import ReporterProcess
companion = ReporterProcess(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_reporter_ends_soon_after_its_training_was_killed(folder, monkeypatch):
    monkeypatch.setenv("BATCHWRIGHT_TOKEN", "bw_x")
    training = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), "http://127.0.0.1:9"],
        stdout=subprocess.PIPE,
        env=os.environ,
    )
    assert training.stdout is not None
    assert training.stdout.readline() == b"ready\n"
    found = children_of(training.pid)
    assert len(found) == 1
    training.send_signal(signal.SIGKILL)
    training.wait(300)
    wait_until(lambda: not is_there(found[0]), "the reporter stayed")


def children_of(process):
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    return [int(word) for word in listed.stdout.split()]


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# ---------------------------------------------------------------------------- loops of one's own


class Noted:
    """In place of a companion: how it was begun and ended."""

    def __init__(self, folder, url, *, follow_advice):
        self.calls.append((folder.name, url, follow_advice))

    calls: ClassVar[list] = []

    def lines(self):
        return ["a line"]

    def end(self, *outcome):
        self.calls.append(outcome)


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr("batchwright.training.session.ReporterProcess", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    return Noted.calls


def test_a_session_is_reported_from_its_begin_to_its_end(tmp_path, noted, capsys):
    options = {"run_folder": tmp_path / "run", "report_to": "http://localhost:8400/"}
    with make_session(**options) as one:
        assert read_record(tmp_path / "run" / "plan.json", Plan) == one.plan
        train(one)
    assert noted == [("run", "http://localhost:8400", False), ("finished", None)]
    assert capsys.readouterr().err.splitlines() == ["batchwright: a line"] * 2


def test_a_session_that_fails_or_stops_says_so(tmp_path, noted):
    options = {"report_to": "http://localhost:8400"}
    with pytest.raises(ZeroDivisionError), make_session(run_folder=tmp_path / "a", **options):
        1 / 0  # noqa: B018
    assert noted[-1] == ("failed", "ZeroDivisionError: division by zero")
    with (
        pytest.raises(SystemExit),
        make_session(run_folder=tmp_path / "b", plan=make_tiny_plan(epochs=9), **options) as one,
    ):
        train(one, until=2)
    assert noted[-1] == ("stopped", None)


def test_a_session_without_a_run_folder_has_nothing_to_report():
    with pytest.raises(PlanError, match="report_to= needs run_folder="):
        make_session(report_to="http://localhost:8400")


@pytest.mark.slow
def test_neither_training_nor_a_reporter_loads_what_it_does_not_need():
    code = (
        "import sys, batchwright.client.reporter as r, batchwright.client.reporter_process\n"
        "assert not {'pydantic', 'torch', 'httpx', 'yaml'} & set(sys.modules)\n"
        "import batchwright.workflows.verbs\n"
        "assert not {'torch', 'httpx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
