"""Records of runs: each stored once, in order, and handed out few at a time."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError

from batchwright.records.lines.line_files import line_text
from batchwright.records.lines.run_lines import EpochLine, EvaluationLine
from batchwright.records.service import RecordBatch, RunEnd, RunIntroduction
from batchwright.service.database.tables import records
from batchwright.service.problems import (
    Conflict,
    Forbidden,
    NotFound,
    Refused,
    TooLarge,
    Unavailable,
)
from batchwright.service.settings import Limits, Settings
from batchwright.service.store import Store
from batchwright.service.store import records as records_module
from batchwright.service.store.lines import LONGEST_LINE, MAX_BYTES, read_batch
from batchwright.service.store.records import from_level, insert_rows
from run_lines import values_of
from samples import make_data, make_epoch, make_plan, make_summary
from services import (
    epoch,
    flat_epoch,
    flat_step,
    leave_unsynced,
    new_database,
    step,
    step_line,
)

DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]


@pytest.fixture(params=DATABASES)
def store(request, tmp_path):
    """A store over either database."""
    store = opened(request, tmp_path)
    yield store
    store.close()


def opened(request, folder):
    if request.param == "sqlite":
        return in_a_file(folder)
    return Store.open(Settings(database=request.getfixturevalue("postgres")()))


def in_a_file(folder, **more):
    return leave_unsynced(Store.open(Settings(database=new_database(folder), **more)))


def a_run(store: Store, **changes) -> str:
    run = str(uuid.uuid4())
    told = {"name": "digits", "plan": make_plan()} | changes
    store.runs.introduce(run, RunIntroduction(**told), "me")
    return run


def send(store: Store, run: str, first: int, *records) -> int:
    return store.records.append(run, RecordBatch(first=first, records=records)).next


def stored(store: Store, run: str) -> list[int]:
    """Steps of the stored records, in order of their sequence numbers."""
    page = store.records.after(run, limit=100_000)
    assert page.sequences == tuple(range(len(page.sequences)))
    return [record.step for record in page.records]


def test_what_is_sent_again_is_skipped(store):
    run = a_run(store)
    assert send(store, run, 0, step(0), step(1)) == 2
    assert send(store, run, 0, step(0), step(1)) == 2
    assert send(store, run, 1, step(1), step(2), step(3)) == 4
    assert stored(store, run) == [0, 1, 2, 3]


def test_a_gap_is_refused_with_what_is_wanted(store):
    run = a_run(store)
    send(store, run, 0, step(0))
    with pytest.raises(Conflict, match="records from 1 on") as refusal:
        send(store, run, 2, step(2))
    assert refusal.value.values == {"next": 1}
    assert stored(store, run) == [0]
    with pytest.raises(Conflict):
        send(store, run, 2**53, step(2))


def test_a_batch_with_one_bad_record_is_not_stored_at_all(store):
    run = a_run(store)
    body = to_json({"first": 0, "records": [step(0), step(1) | {"learning_rate": "high"}]})
    with pytest.raises(Refused, match=r"record 1: step\.learning_rate = 'high'"):
        store.records.append(run, read_batch(body, make_data))
    assert stored(store, run) == []


def test_a_run_that_there_is_not_takes_nothing(store):
    with pytest.raises(NotFound):
        send(store, str(uuid.uuid4()), 0, step(0))
    for ask in (store.records.after, store.records.epochs, store.runs.get, store.runs.alive):
        with pytest.raises(NotFound):
            ask(str(uuid.uuid4()))


def test_records_of_many_runs_at_once_are_all_there_once(store):
    runs = [a_run(store) for _ in range(4)]
    failures = []

    def report(run):
        try:
            following = 0
            while following < 60:  # what came before is repeated each time
                first = max(0, following - 5)
                lines = [step(i) for i in range(first, min(60, following + 7))]
                following = send(store, run, first, *lines)
        except Exception as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=report, args=(run,)) for run in runs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failures
    for run in runs:
        assert stored(store, run) == list(range(60))


def test_one_bad_delivery_among_those_committed_together_harms_no_other(store):
    """All wait for the first commit; then one thread commits the rest, good and bad."""
    good, gone = a_run(store), str(uuid.uuid4())
    taken, refused = [], []

    def deliver(run, first):
        try:
            taken.append(send(store, run, first, step(first)))
        except (NotFound, Conflict) as problem:
            refused.append(problem)

    with store.database.writing():
        threads = [
            threading.Thread(target=deliver, args=words)
            for words in ((good, 0), (gone, 0), (good, 99), (good, 0))
        ]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(300)
    assert taken == [1, 1]
    assert len(refused) == 2
    assert stored(store, good) == [0]


def test_a_commit_that_fails_is_told_to_everybody_in_it_and_stores_nothing(store, monkeypatch):
    run = a_run(store)

    class DiskFullError(Exception):
        pass

    def fail(*_arguments):
        raise DiskFullError

    with monkeypatch.context() as patch:
        patch.setattr("batchwright.service.store.records.progress_in", fail)
        with pytest.raises(DiskFullError):
            send(store, run, 0, step(0))
    assert store.runs.get(run).records == 0
    assert send(store, run, 0, step(0)) == 1


def test_whatever_is_delivered_in_whatever_order_each_record_is_there_once(tmp_path):
    store = in_a_file(tmp_path)

    @settings(max_examples=12)
    @given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), max_size=15))
    def holds(deliveries):
        run, wanted = a_run(store), 0
        for first, count in deliveries:
            lines = [step(first + i) for i in range(count)]
            if first > wanted:
                with pytest.raises(Conflict) as refusal:
                    send(store, run, first, *lines)
                assert refusal.value.values == {"next": wanted}
            else:
                wanted = max(wanted, first + count)
                assert send(store, run, first, *lines) == wanted
        assert stored(store, run) == list(range(wanted))

    holds()
    store.close()


def test_another_token_may_not_report(store):
    from batchwright.service.store.tokens import Caller

    run = a_run(store)
    batch = RecordBatch(first=0, records=(step(0),))
    for scopes in (["report"], ["read", "report", "submit"]):
        with pytest.raises(Forbidden):
            store.records.append(run, batch, Caller("you", frozenset(scopes)))
    assert store.records.append(run, batch, Caller("me", frozenset(["report"]))).next == 1


def test_a_run_takes_only_so_many_records(tmp_path):
    store = in_a_file(tmp_path, limits=Limits(records_per_run=3))
    run = a_run(store)
    send(store, run, 0, step(0), step(1), step(2))
    with pytest.raises(Refused, match="3 records"):
        send(store, run, 3, step(3))
    assert send(store, run, 0, step(0)) == 3
    store.close()


# ------------------------------------------------------------------------------ handed out again


@pytest.fixture(scope="module", params=DATABASES)
def long_run(request, tmp_path_factory):
    """1000 steps with an epoch line after each hundred; newest is a step. Tests only read it."""
    store = opened(request, tmp_path_factory.mktemp("long"))
    run, lines = a_run(store), []
    for number in range(1000):
        lines.append(step(number, epoch=number // 100))
        if number % 100 == 99 and number < 900:
            lines.append(epoch(number // 100))
    for first in range(0, len(lines), 300):
        send(store, run, first, *lines[first : first + 300])
    yield store, run
    store.close()


@pytest.mark.parametrize("most", [1, 2, 7, 100, 999, 1000, 5000])
def test_a_page_is_evenly_spaced_and_ends_with_the_newest(long_run, most):
    store, run = long_run
    page = store.records.page(run, "step", most)
    steps = [record.step for record in page.records]
    assert page.total == 1000
    assert len(steps) <= most + 1
    assert len(steps) > min(most, 1000) / 2
    assert steps[-1] == 999
    assert [s + 1 for s in steps[:-1]] == [page.stride * (i + 1) for i in range(len(steps) - 1)]
    assert page.stride == 1 or 1000 // page.stride <= most < 2 * 1000 // page.stride + 1
    assert sorted(page.sequences) == list(page.sequences)


def test_few_of_a_long_runs_records_are_found_without_going_through_all(tmp_path):
    store = in_a_file(tmp_path)
    asked = from_level(a_run(store), "step", 3).compile(compile_kwargs={"literal_binds": True})
    with store.database.reading() as connection:
        (line,) = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked}").all()
    assert "USING INDEX ix_records_level (run_id=? AND kind=? AND level>?)" in line[3]
    store.close()


def test_a_page_stays_as_it_was_when_more_comes(store):
    run = a_run(store)
    send(store, run, 0, *(step(i) for i in range(80)))
    before = store.records.page(run, "step", 40)
    send(store, run, 80, *(step(i) for i in range(80, 87)))
    after = store.records.page(run, "step", 50)
    assert before.stride == after.stride == 2
    assert set(before.sequences) - set(after.sequences) <= {79}


def test_a_page_of_a_kind_that_there_is_not_is_empty(long_run):
    store, run = long_run
    page = store.records.page(run, "round", 10)
    assert (page.total, page.records) == (0, ())
    assert store.records.after(run, "round").records == ()


@pytest.mark.parametrize("kind", [None, "step", "epoch"])
def test_what_comes_after_is_whole_page_by_page(long_run, kind):
    store, run = long_run
    found, last = [], -1
    while True:
        page = store.records.after(run, kind, last, limit=130)
        if not page.sequences:
            break
        assert len(page.sequences) <= 130
        assert page.sequences[0] > last
        found += page.sequences
        last = page.sequences[-1]
    assert found == sorted(set(found))
    assert len(found) == {None: 1009, "step": 1000, "epoch": 9}[kind] == page.total


def test_pages_of_a_kind_skip_nothing_that_comes_while_one_is_read(store, monkeypatch):
    run, count = a_run(store), records_module._counts
    send(store, run, 0, *(step(i) for i in range(3)))

    def counted(*given):
        monkeypatch.setattr(records_module, "_counts", count)
        found = count(*given)
        send(store, run, 3, *(step(i) for i in range(3, 8)))  # the fourth is of a level of its own
        return found

    monkeypatch.setattr(records_module, "_counts", counted)
    found, last = [], -1
    while page := store.records.after(run, "step", last, limit=10).sequences:
        found += page
        last = page[-1]
    assert found == list(range(8))


def test_epochs_are_in_order_and_one_done_again_counts_as_it_was_last(store):
    run = a_run(store)
    lines = [epoch(0), epoch(1), step(0), epoch(1, lr=0.5), epoch(2)]
    send(store, run, 0, *lines)
    assert [(one.epoch, one.learning_rate) for one in store.records.epochs(run)] == [
        (0, 0.1),
        (1, 0.5),
        (2, 0.1),
    ]


# --------------------------------------------------------------------------------- what they tell


def test_a_runs_row_follows_its_epochs(store):
    run = a_run(store)
    assert store.runs.get(run).epochs_done == 0
    send(store, run, 0, step(0), epoch(0), epoch(1, **{"val/top1": 0.875, "batch/global": 64}))
    told = store.runs.get(run)
    assert (told.epochs_done, told.top1, told.global_batch_size) == (2, 0.875, 64)
    send(store, run, 3, epoch(2, **{"val/top1": None}))
    assert (store.runs.get(run).epochs_done, store.runs.get(run).top1) == (3, 0.875)
    # With a parameter server an epoch may be evaluated after its line was written.
    send(store, run, 4, {"kind": "evaluation", "epoch": 2, "top1": 0.9})
    assert (store.runs.get(run).epochs_done, store.runs.get(run).top1) == (3, 0.9)
    send(store, run, 5, {"kind": "evaluation", "epoch": 2, "top1": None})
    assert store.runs.get(run).top1 == 0.9


def test_the_highest_number_of_an_epoch_leaves_the_list_of_runs_readable(store):
    send(store, a_run(store), 0, epoch(2**53))
    assert [one.epochs_done for one in store.runs.list()] == [2**53]


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({}, ""),
        (3, ""),
        ({"kind": None}, ""),
        ({"kind": "Step"}, "'Step'"),
        ({"kind": "x" * 1000}, ""),
        (step(0) | {"epoch": -1}, "step.epoch = -1"),
        (step(0) | {"epoch": 1.5}, "step.epoch = 1.5"),
        (step(0) | {"epoch": True}, "step.epoch = True"),
        (step(0) | {"epoch": 2**53 + 1}, "step.epoch"),
        (step(0) | {"learning_rate": 1e301}, "step.learning_rate"),
        (step(0) | {"learning_rate": "0.1"}, "step.learning_rate = '0.1'"),
        (step(0) | {"more": 1}, "step.more is unknown"),
        (step(0) | {"workers": [{"compute_seconds": 1}]}, "step.workers.0.local_batch_size is"),
        ({"kind": "step", "epoch": 0}, "step.step is missing"),
        ({"kind": "epoch", "epochs": 3, "record": {"epoch": 10**400}}, "epoch.record"),
        ({"kind": "note", "text": "x" * 4001}, "note.text"),
        ({"kind": "note", "text": ["a"]}, "note.text"),
        ({"kind": "note", "text": "a"} | {f"key{i}": 1 for i in range(5000)}, "5,000 keys"),
        ({"kind": "note", "text": "a" * LONGEST_LINE}, "1,048,6"),
        (flat_step(0) | {"lr": "high"}, "step.learning_rate"),
        (flat_step(0, epoch=-1), "step.epoch"),
        (flat_epoch(0) | {"val/top1": "0.9"}, "no epoch's line"),
        (
            flat_epoch(0) | {"throughput/samples_per_sec": "ab", "time/epoch_s": 10**18},
            "no epoch's line",  # the product of these two would be a text of that many characters
        ),
        (flat_epoch(0) | {"kind": "other"}, "no kind of line 'other'"),
        (flat_epoch(0) | {"batch/global": 0}, "no epoch's line"),
    ],
    ids=range(25),
)
def test_what_no_run_writes_is_refused_by_number_and_field(record, place):
    body = to_json({"first": 7, "records": [step(0), record]})
    with pytest.raises(Refused, match=f"record 8: .*{re.escape(place)}") as refused:
        read_batch(body, make_data)
    assert "\n" not in refused.value.detail
    assert len(refused.value.detail) < 300


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{}", b"{" * 100_000, b'{"first": 0}', b'{"records": [NaN]}'),
        b'{"first": 0, "records": []}',
        b'{"first": "0", "records": [{"kind": "note", "text": "a"}]}',
    ],
)
def test_what_is_no_batch_is_refused(body):
    with pytest.raises(Refused):
        read_batch(body, make_data)
    with pytest.raises(TooLarge):
        read_batch(body.ljust(MAX_BYTES + 1), make_data)


def test_a_batch_is_refused_at_its_first_mistake_however_many_it_has():
    records = [{"kind": "note", "text": "a"} | {f"{i:x}": 0 for i in range(20_000)}]
    with pytest.raises(Refused, match="record 0: 20,002 keys, where 8,000 are taken"):
        read_batch(to_json({"first": 0, "records": records}), make_data)
    with pytest.raises(Refused, match="k0 is unknown"):
        read_batch(to_json({"records": []} | {f"k{i}": 0 for i in range(20_000)}), make_data)
    records = [{"kind": "epoch", "epochs": 3, "record": {f"{i:x}": 0 for i in range(10_000)}}]
    with pytest.raises(Refused, match=r"record 0: 10,0\d\d keys are wrong"):
        read_batch(to_json({"first": 0, "records": records}), make_data)
    records = [step(0) | {"workers": [{}] * 100}] * 200
    with pytest.raises(Refused, match=r"record 0: step\.workers\.0\.local_batch_size is missing"):
        read_batch(to_json({"first": 0, "records": records}), make_data)


def test_an_epoch_of_a_thousand_workers_is_taken(store):
    worker = make_epoch(3).workers[0].model_copy(update={"compute_seconds": 0.12345678901234567})
    record = make_epoch(3).model_copy(update={"workers": (worker,) * 1000})
    line = EpochLine(kind="epoch", record=record, epochs=9)
    assert send(store, a_run(store), 0, line) == 1
    assert len(line_text(line)) < 300_000


# ------------------------------------------------------------------------ earlier versions' lines


def test_lines_of_an_earlier_version_are_taken_as_records(store):
    run = a_run(store)
    flat = [flat_step(0), flat_epoch(0), {"kind": "note", "text": "a"}, step(1)]
    batch = read_batch(to_json({"first": 0, "records": flat}), lambda: store.records.data(run))
    assert store.records.append(run, batch).next == 4
    first, finished, *_, last = store.records.after(run).records
    assert (first, last) == (step_line(0), step_line(1))
    assert finished.record.val_count == make_data().val_samples
    assert (store.runs.get(run).epochs_done, store.runs.get(run).top1) == (1, finished.record.top1)


def test_lines_that_an_earlier_version_stored_are_read(store):
    run = a_run(store)
    send(store, run, 0, step(0), step(1), step(2), step(3))
    bodies = [flat_step(0), flat_epoch(5), {"kind": "custom", "a": 1}, "no JSON"]
    with store.database.writing() as connection:
        for sequence, body in enumerate(bodies):
            row = (records.c.run_id == run) & (records.c.sequence == sequence)
            connection.execute(update(records).where(row).values(body=to_json(body).decode()))
    found = store.records.after(run).records
    assert [line.kind for line in found] == ["step", "epoch", "note", "note"]
    assert found[1].record.epoch == 5
    assert found[2].text == "record 2 is none that this version knows"


# --------------------------------------------------------------------------------- digests


def digest_of(*lines):
    return hashlib.sha256(b"".join(to_json(line) + b"\n" for line in lines)).hexdigest()


def batch_of(lines, first, end=None, **more):
    told = {"before": digest_of(*lines[:first]), "after": digest_of(*lines[:end])}
    return RecordBatch(first=first, records=lines[first:end], **(told | more))


def test_lines_that_follow_on_others_than_those_stored_are_refused_and_sent_anew_once(store):
    run = a_run(store)
    ours = [step(0), epoch(0), step(1, 1), step(2, 1)]
    theirs = [*ours[:2], step(5, 1), step(6, 1), epoch(1)]
    taken = store.records.append(run, batch_of(ours, 0))
    assert taken.digest == store.runs.get(run).digest == digest_of(*ours)
    assert store.runs.alive(run).digest == taken.digest
    with pytest.raises(Conflict, match="are wanted anew") as refused:
        store.records.append(run, batch_of(theirs, 4))
    assert refused.value.values == {"next": 4}
    with pytest.raises(Conflict, match="are wanted anew") as refused:
        store.records.append(run, batch_of(theirs, 2, 4))
    assert refused.value.values == {"next": 2}
    with pytest.raises(Conflict, match="stored already") as refused:
        store.records.append(run, batch_of(theirs, 2))
    assert refused.value.values == {"next": 4}
    assert stored_lines(store, run) == ours
    for _ in range(2):  # the answer was lost
        taken = store.records.append(run, batch_of(theirs, 0, 3, anew=True))
    assert stored_lines(store, run) == theirs[:3]
    assert store.runs.get(run).epochs_done == 1
    taken = store.records.append(run, batch_of(theirs, 3))
    assert (taken.next, taken.digest) == (5, digest_of(*theirs))
    assert stored_lines(store, run) == theirs
    assert store.records.page(run, "step", 10).total == 3
    assert store.runs.get(run).epochs_done == 2


def test_batches_without_digests_are_taken_and_compared_with_nothing(store):
    run = a_run(store)
    send(store, run, 0, step(0))
    assert store.runs.get(run).digest is None
    lines = [step(9), step(1)]
    assert store.records.append(run, batch_of(lines, 1)).digest == digest_of(*lines)
    assert send(store, run, 2, step(2)) == 3
    assert store.runs.get(run).digest is None


def test_what_is_stored_of_a_finished_run_is_not_replaced(store, monkeypatch):
    run, other = a_run(store), a_run(store)
    store.records.append(run, batch_of([step(0)], 0))
    store.records.append(other, batch_of([step(0)], 0))
    store.runs.end(run, RunEnd(outcome="finished"))
    monkeypatch.setattr("batchwright.service.store.records.MAX_DROPPED", 0)
    for one in (run, other):
        with pytest.raises(Conflict, match="stays") as refused:
            store.records.append(one, batch_of([step(1)], 0, anew=True))
        assert refused.value.values == {}
        assert stored(store, one) == [0]


def test_rows_that_the_database_refuses_are_told_as_by_other_statements(store):
    run = a_run(store)  # of an error that is not SQLAlchemy's no service knows what to answer
    with pytest.raises(IntegrityError), store.database.writing() as connection:
        insert_rows(connection, [(run, 0, "step", 0, "{}")] * 2)
    assert send(store, run, 0, step(0)) == 1


def stored_lines(store, run):
    page = store.records.after(run)
    assert page.sequences == tuple(range(len(page.sequences)))
    return [values_of(record) for record in page.records]


def test_an_answer_is_sent_in_pieces_and_never_read_as_a_whole(service, monkeypatch):
    run = service.a_run()
    service.report(run, *(step(number) for number in range(50)), epoch(0))
    found = service.store.records.following(run)
    whole = b"".join(found.pieces())
    assert json.loads(whole) == json.loads(found.page().model_dump_json(exclude_defaults=True))
    place = "batchwright.service.store.records.PIECE_CHARACTERS"
    monkeypatch.setattr(place, 500)
    pieces = list(found.pieces())
    assert b"".join(pieces) == whole
    assert len(pieces) > 10
    monkeypatch.setattr(type(found), "page", lambda _: pytest.fail("read as a whole"))
    answer = service.get("read", f"/v1/runs/{run}/records", params={"limit": 5000})
    assert answer.content == whole
    assert answer.headers["content-type"] == "application/json"
    none = service.get("read", f"/v1/runs/{run}/records", params={"after": 1000}).json()
    assert (none["sequences"], none["records"]) == ([], [])


def test_of_very_long_records_fewer_are_handed_out_at_once(store, monkeypatch):
    run = a_run(store)
    send(store, run, 0, *(step(i) for i in range(100)))
    length = len(line_text(step_line(0)))
    place = "batchwright.service.store.records.MAX_CHARACTERS"
    monkeypatch.setattr(place, 10 * length)
    for kind in (None, "step"):
        found, last = [], -1
        while sequences := store.records.after(run, kind, last).sequences:
            assert len(sequences) < 12
            found += sequences
            last = sequences[-1]
        assert found == list(range(100))
    page = store.records.page(run, "step", 100)
    assert 5 <= len(page.records) <= 13
    steps = [record.step + 1 for record in page.records]
    assert steps[:-1] == [page.stride * (i + 1) for i in range(len(steps) - 1)]
    assert steps[-1] == 100
    monkeypatch.setattr("batchwright.service.store.records.MAX_CHARACTERS", 1)
    assert store.records.after(run, None, 41).sequences == (42,)
    assert store.records.page(run, "step", 100).sequences[-1] == 99


def test_every_line_that_a_run_writes_is_taken_as_it_is(tmp_path, store):
    """The recorder's own lines, not a list of them."""
    from batchwright.distributed.tally import WorkerNote  # noqa: F401 - imports torch, as the recorder does
    from batchwright.training.recorder import Recorder

    recorder = Recorder(tmp_path, make_plan())
    recorder.note("it begins")
    recorder.shares(0, 0, 45, [20, 12], ["node1/cpu", "node2/cpu"], {"node1/cpu": 100.0})
    recorder.epochs.append(make_epoch(0))
    recorder.epoch(make_epoch(0))
    recorder.line(EvaluationLine(kind="evaluation", epoch=0, top1=0.5))
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    run = a_run(store)
    body = f'{{"first": 0, "records": [{",".join(texts)}]}}'.encode()
    store.records.append(run, read_batch(body, make_data))
    assert [line_text(line) for line in store.records.after(run).records] == texts


# ------------------------------------------------------------------------------------------- runs


def test_a_run_may_be_introduced_again_and_a_stopped_one_goes_on(store):
    run = a_run(store)
    send(store, run, 0, step(0))
    assert store.runs.end(run, RunEnd(outcome="stopped", error="by signal")).state == "stopped"
    assert store.runs.get(run).error == "by signal"
    again = store.runs.introduce(run, RunIntroduction(name="again", plan=make_plan()), "me")
    assert (again.state, again.name, again.records, again.error) == ("running", "again", 1, None)
    store.runs.end(run, RunEnd(outcome="finished"))
    again = store.runs.introduce(run, RunIntroduction(name="again", plan=make_plan()), "me")
    assert again.state == "finished"


def test_a_finished_run_is_not_ended_otherwise_by_what_comes_late(store):
    run = a_run(store)
    summary = make_summary()
    store.runs.end(run, RunEnd(outcome="finished", summary=summary))
    for outcome in ("stopped", "failed"):
        late = store.runs.end(run, RunEnd(outcome=outcome, error="from a copy of the folder"))
        assert (late.state, late.error) == ("finished", None)
    assert store.runs.end(run, RunEnd(outcome="finished")).state == "finished"
    assert store.runs.summary(run).epochs == summary.epochs
    with pytest.raises(NotFound):
        store.runs.end("5f0a3c1e-0000-4000-8000-000000000000", RunEnd(outcome="stopped"))


def test_a_run_keeps_its_owner_and_its_training(store):
    run = a_run(store)
    with pytest.raises(Conflict, match="another token"):
        store.runs.introduce(run, RunIntroduction(name="x", plan=make_plan()), "you")
    plan = make_plan()
    other = plan.model_copy(update={"network": plan.network.model_copy(update={"name": "vgg8"})})
    with pytest.raises(Conflict, match="network resnet8, not vgg8"):
        store.runs.introduce(run, RunIntroduction(name="x", plan=other), "me")


def test_names_that_every_list_of_runs_would_hold_are_not_endless(store):
    plan = make_plan()
    for name in ("network", "data"):
        part = getattr(plan, name).model_copy(update={"name": 1001 * "x"})
        with pytest.raises(Refused, match=f"plan.{name}: its name has more than 1,000 characters"):
            a_run(store, plan=plan.model_copy(update={name: part}))


def test_a_run_gives_back_plan_profile_and_summary_as_they_were(store):
    from samples import make_profile, make_summary

    run = a_run(store, profile=make_profile())
    assert store.runs.plan(run) == make_plan()
    assert store.runs.profile(run) == make_profile()
    assert store.runs.summary(run) is None
    store.runs.end(run, RunEnd(outcome="finished", summary=make_summary()))
    # Where its files are is nobody's business here.
    assert store.runs.summary(run) == make_summary(run_folder=store.runs.get(run).name)
    assert store.runs.profile(a_run(store)) is None


def test_a_deleted_run_leaves_nothing_behind(store, monkeypatch):
    monkeypatch.setattr("batchwright.service.store.runs.REMOVED_AT_ONCE", 3)
    kept, run = a_run(store), a_run(store)
    for one in (kept, run):
        send(store, one, 0, *(step(i) for i in range(10)))
    store.advice.offer(run, 2, "because", make_plan())
    store.runs.delete(run)
    with pytest.raises(NotFound):
        store.runs.delete(run)
    assert store.runs.to_remove() == [run]
    while store.runs.remove_some(run):
        pass
    assert store.runs.to_remove() == []
    with store.database.reading() as connection:
        for table in ("records", "advice"):
            left = connection.exec_driver_sql(f"SELECT run_id FROM {table}").scalars()  # noqa: S608
            assert run not in set(left)
    assert stored(store, kept) == list(range(10))


def test_nobody_finds_a_run_that_is_half_removed_and_its_reporter_cannot_bring_it_back(
    store, monkeypatch
):
    """As after a kill: the row said that all records were there, while half of them were gone."""
    monkeypatch.setattr("batchwright.service.store.runs.REMOVED_AT_ONCE", 3)
    kept, run = a_run(store), a_run(store)
    send(store, run, 0, *(step(i) for i in range(10)))
    store.advice.offer(run, 2, "because", make_plan())
    store.runs.delete(run)
    assert store.runs.remove_some(run)
    asks = (
        *(store.runs.get, store.runs.owner, store.runs.plan, store.runs.alive, store.runs.delete),
        *(store.records.after, store.records.epochs, store.advice.list),
        lambda run: send(store, run, 10, step(10)),
        lambda run: store.runs.end(run, RunEnd(outcome="finished")),
        lambda run: store.advice.offer(run, 3, "because", make_plan()),
        lambda run: store.advice.taken(run, 1, 3),
    )
    for ask in asks:
        with pytest.raises(NotFound):
            ask(run)
    assert [one.id for one in store.runs.list()] == [kept]
    again = RunIntroduction(name="digits", plan=make_plan())
    for _ in range(2):
        with pytest.raises(Conflict, match="deleted here"):
            store.runs.introduce(run, again, "me")
        while store.runs.remove_some(run):
            pass
    assert store.tidy() == []
    monkeypatch.setattr("batchwright.service.store.runs.REMEMBERED_SECONDS", -1.0)
    store.tidy()
    assert store.runs.introduce(run, again, "me").records == 0


def test_a_run_that_was_too_old_may_come_again(store):
    run = a_run(store)
    send(store, run, 0, step(0))
    store.settings = store.settings.model_copy(update={"retention_days": 1e-9})
    store.tidy()
    assert store.tidy() == [run]
    again = RunIntroduction(name="digits", plan=make_plan())
    with pytest.raises(Unavailable):
        store.runs.introduce(run, again, "me")
    while store.runs.remove_some(run):
        pass
    assert store.runs.introduce(run, again, "me").records == 0


def test_advice_is_numbered_told_with_records_and_taken(store):
    run, plan = a_run(store), make_plan()
    assert store.records.append(run, RecordBatch(first=0, records=(step(0),))).advice == 0
    assert store.advice.offer(run, 2, "slower than predicted", plan).number == 1
    assert store.advice.offer(run, 3, "slower still", plan).number == 2
    assert store.runs.alive(run).advice == 2
    assert store.advice.taken(run, 2, 3).taken == 3
    assert [(one.number, one.taken) for one in store.advice.list(run)] == [(1, None), (2, 3)]
    with pytest.raises(NotFound):
        store.advice.taken(run, 9, 3)
    with pytest.raises(NotFound):
        store.advice.offer(str(uuid.uuid4()), 1, "x", plan)
