"""Lines of runs: records, what earlier versions wrote, and flat names for trackers."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import FileError
from batchwright.records import EpochRecord, RoundRecord
from batchwright.records.documents import write_record
from batchwright.records.lines import line_files
from batchwright.records.lines.flat_lines import completed, flat_values, from_flat
from batchwright.records.lines.line_files import (
    METRICS,
    line_text,
    lines_of,
    read_line,
    sound_line,
)
from batchwright.records.lines.lost_lines import lines_that_count, newest_epoch
from batchwright.records.lines.run_lines import (
    LONGEST_NOTE,
    EpochLine,
    EvaluationLine,
    RoundLine,
    note,
)
from batchwright.storage import files
from dynamic_runs import shares_line, step_line
from run_lines import typed
from samples import make_data, make_dual_plan, make_epoch, make_plan, make_rounds
from services import flat_epoch, flat_step
from test_kept_folders import FOLDERS, unpack

ROUND = make_rounds(make_dual_plan())[0]
LINES = [
    step_line(3, [20, 12]),
    shares_line(0, [20, 12], [100.5, 60.25]),
    EpochLine(kind="epoch", record=make_epoch(2), epochs=9, predicted_seconds=1.5),
    RoundLine(kind="round", record=ROUND, learning_rate=0.1, committed=900),
    EvaluationLine(kind="evaluation", epoch=2, top1=None),
    note("it begins"),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.kind)
def test_a_line_is_read_as_it_was_written(line):
    text = line_text(line)
    assert "\n" not in text
    assert json.loads(text)["kind"] == line.kind
    assert read_line(text) == line
    assert flat_values(read_line(text)) == flat_values(line)


@settings(max_examples=30)
@given(st.data())
def test_values_that_are_the_default_come_back(data):
    for model, record in ((EpochRecord, make_epoch(2)), (RoundRecord, ROUND)):
        free = [n for n, field in model.model_fields.items() if not field.is_required()]
        reset = data.draw(st.sets(st.sampled_from(sorted(free))))
        one = record.model_copy(update={n: model.model_fields[n].default for n in reset})
        assert model.model_validate_json(one.model_dump_json(exclude_defaults=True)) == one


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"{}", b"\xff", b'{"kind": "note"}', b"null"])
def test_what_is_no_line_is_refused_or_left_out(text):
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        read_line(text)
    assert sound_line(text) is None


def test_a_note_is_cut_to_its_length():
    assert note("a" * 5000).text == "a" * LONGEST_NOTE


def test_a_note_may_name_a_file_whose_name_is_no_utf_8():
    told = note(os.fsdecode(b"cannot read caf\xe9.png"))
    assert sound_line(line_text(told)) == told
    assert told.text == "cannot read caf?.png"


# --------------------------------------------------------------------------- earlier versions


@pytest.mark.parametrize("name", FOLDERS)
def test_what_an_earlier_version_wrote_is_read_whole(name, tmp_path):
    unpack(name, tmp_path)
    texts = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    found = list(lines_of(tmp_path / name))
    assert [flat_values(line) for line in found] == list(map(json.loads, texts))
    assert {line.kind for line in found} >= {"epoch"}


def test_a_folder_may_hold_both_forms(tmp_path):
    write_record(make_plan(), tmp_path / "plan.json")
    texts = [json.dumps(flat_step(1)), json.dumps(flat_epoch(0)), "damaged", line_text(note("a"))]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*texts, '{"kind": "st']))
    one, two, three = lines_of(tmp_path)
    assert (one.step, two.record.epoch, three.text) == (1, 0, "a")
    (tmp_path / "plan.json").unlink()
    with pytest.raises(FileError, match=r"plan\.json"):
        list(lines_of(tmp_path))
    assert list(lines_of(tmp_path / "nowhere")) == []


def test_what_an_epochs_flat_line_leaves_out_comes_from_other_lines():
    shares = [
        typed({"kind": "shares", "epoch": 0, "step": 0, "batch/local/0": 16, "batch/local/1": 16}),
        typed({"kind": "shares", "epoch": 1, "step": 20, "batch/local/0": 20, "batch/local/1": 12}),
    ]
    steps = [typed({"kind": "step", "epoch": 1, "step": 3, "steps": 44})]
    epochs = [from_flat(flat_epoch(epoch), make_data).record for epoch in (0, 1)]
    first, second = completed(epochs, steps, shares)
    assert (first.steps, second.steps) == (100, 44)
    assert [one.sizes for one in second.shares] == [(16, 16), (20, 12)]
    assert [one.place for one in second.workers] == ["node1/cpu:0", "node1/cpu:1"]
    (alone,) = completed(epochs[:1], [], [])
    assert [one.place for one in alone.workers] == ["rank 0", "rank 1"]
    assert alone.steps == round(alone.samples / 32)
    (whole,) = completed([first], [], [])
    assert whole == first


def test_an_epochs_flat_line_needs_the_data():
    with pytest.raises(ValueError, match="needs the run's plan"):
        from_flat(flat_epoch(0))
    assert from_flat(flat_step(0)) == typed(flat_step(0))


# ------------------------------------------------------------------------------------ export


def at(epoch, step):
    return typed({"kind": "step", "epoch": epoch, "step": step})


def after(epoch, seconds=1.0):
    record = make_epoch(epoch).model_copy(update={"training_seconds": seconds})
    return EpochLine(kind="epoch", record=record, epochs=9)


def ended(committed, learning_rate=0.1, samples=100):
    record = ROUND.model_copy(update={"samples": samples})
    return RoundLine(kind="round", record=record, learning_rate=learning_rate, committed=committed)


def shared(epoch, step, *sizes):
    own = {f"batch/local/{rank}": size for rank, size in enumerate(sizes)}
    return typed({"kind": "shares", "epoch": epoch, "step": step, **own})


def scored(epoch, top1):
    return EvaluationLine(kind="evaluation", epoch=epoch, top1=top1)


RESUMED = note("resumed")


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ([after(1)], [after(1, 2.0)]),
        ([after(1), at(2, 3), after(2), after(3)], [after(1, 2.0)]),
        ([at(0, 9), after(0), at(1, 2)], [at(0, 9)]),  # it is in that epoch again
        ([at(1, 4), at(1, 9), after(1)], [at(1, 3), at(1, 8)]),
        ([shared(1, 5, 9, 7)], [shared(1, 4, 8, 8), shared(1, 6, 9, 7)]),
        ([ended(500), ended(700)], [ended(500, 0.2), ended(900)]),
        ([ended(400), after(1), ended(500)], [ended(600, samples=300)]),  # a larger one comes first
        ([scored(3, 0.5)], [scored(3, 0.25)]),
    ],
)
def test_of_what_was_trained_again_after_a_kill_the_last_time_counts(tmp_path, lost, again):
    before = [at(0, 1), shared(0, 2, 8, 8), ended(300), scored(4, 0.5), scored(2, 0.5)]
    told = [*before, *lost, RESUMED, *again]
    (tmp_path / "metrics.jsonl").write_text("".join(line_text(line) + "\n" for line in told))
    assert bw.metrics(tmp_path) == [flat_values(line) for line in (*before, RESUMED, *again)]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["epoch", "step", "shares"]), st.integers(0, 3))))
def test_the_newest_epoch_is_that_of_the_lines_that_count(told):
    """An epoch's line names it; one of steps says that its epoch and later ones are not over."""
    newest = -1
    for kind, epoch in told:
        newest = epoch if kind == "epoch" else min(newest, epoch - 1)
    lines = [typed({"kind": kind, "epoch": epoch}) for kind, epoch in told]
    assert newest_epoch(reversed(lines)) == newest


def test_for_the_newest_epoch_only_lines_behind_the_last_one_are_read(tmp_path, monkeypatch):
    told = [{"kind": "epoch", "epoch": epoch} for epoch in range(50)]
    told.append({"kind": "step", "epoch": 50})
    (tmp_path / METRICS).write_text("".join(line_text(typed(one)) + "\n" for one in told))
    read = []

    def counted(text, data=None):
        read.append(text)
        return read_line(text, data)

    monkeypatch.setattr(line_files, "read_line", counted)
    assert newest_epoch(lines_of(tmp_path, newest_first=True)) == 49
    assert len(read) == 2


@pytest.mark.parametrize("end", ["", '{"kind": "no', "\n\n", "é" * 90])
@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_lines_are_the_same_from_either_end(tmp_path, monkeypatch, end, piece):
    monkeypatch.setattr(files, "_PIECE", piece)
    path = tmp_path / METRICS
    texts = [line_text(note("é" * length)) for length in (0, 3, 200)]
    for count in range(len(texts) + 1):
        path.write_text("".join(f"{text}\nno line\n" for text in texts[:count]) + end)
        lines = list(lines_of(tmp_path))
        assert [len(one.text) for one in lines] == [0, 3, 200][:count]
        assert list(lines_of(tmp_path, newest_first=True)) == lines[::-1]


def test_a_line_of_many_pieces_is_read_from_the_end_in_few(monkeypatch):
    """As a damaged disk may leave one: to join all pieces so far in each takes the square."""

    class Counting(io.BytesIO):
        reads = 0

        def read(self, *size):
            self.reads += 1
            return super().read(*size)

    monkeypatch.setattr(files, "_PIECE", 10)
    file = Counting(b"a\n" + bytes(10_000) + b"\n")
    assert list(files.lines_from_end(file)) == [bytes(10_000), b"a"]
    assert file.reads < 20


def test_lines_of_a_run_that_nothing_has_killed_all_count():
    told = [shared(0, 0, 8, 8), at(0, 1), shared(0, 6, 9, 7), at(0, 5), at(0, 9), after(0)]
    told += [note("a"), shared(1, 0, 9, 7), at(1, 1), ended(100), after(1), scored(1, 0.5)]
    told += [note("a"), scored(0, 0.5), ended(200)]
    assert lines_that_count(told) == told


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(line_text(line) + "\n" for line in LINES))
    return run


def test_lines_go_out_under_flat_names(folder, tmp_path):
    rows = bw.metrics(folder, out=tmp_path / "flat.jsonl")
    assert rows == list(map(json.loads, (tmp_path / "flat.jsonl").read_text().splitlines()))
    assert [row["kind"] for row in rows] == [line.kind for line in LINES]
    assert rows[0]["time/rank1/compute_s"] == pytest.approx(0.012)
    assert rows[2]["val/top1"] == make_epoch(2).top1
    assert rows[3]["time/exchange_s"] == ROUND.exchange_seconds
    bw.metrics(folder, out=tmp_path / "flat.csv")
    with (tmp_path / "flat.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["kind"] for row in table] == [row["kind"] for row in rows]
    assert float(table[2]["val/top1"]) == rows[2]["val/top1"]
    assert table[5]["text"] == "it begins"
    assert table[5]["val/top1"] == ""


def test_the_command_writes_the_lines_of_a_run_that_goes_on(folder, tmp_path, command):
    code, out, err = command("report", folder, "--metrics", tmp_path / "flat.jsonl")
    assert (code, out, err) == (0, "", "")
    assert len((tmp_path / "flat.jsonl").read_text().splitlines()) == len(LINES)
    for words, told in (
        ((folder, folder, "--metrics", tmp_path / "a"), "the lines of one run"),
        ((tmp_path, "--metrics", tmp_path / "a"), "holds no metrics.jsonl"),
        ((folder, "--metrics", tmp_path / "none" / "a"), "cannot write"),
    ):
        code, out, err = command("report", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert told in err
    assert not (tmp_path / "a").exists()
