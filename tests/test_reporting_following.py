from __future__ import annotations

import json
import time

import pytest

from batchwright.records.lines.line_files import line_text, sound_line
from batchwright.records.lines.run_lines import note
from batchwright.storage.follow_lines import Tail, following
from batchwright.training.recorder import mend


def values(line):
    try:
        return json.loads(line)
    except ValueError:
        return None


def test_each_whole_line_is_handed_on_once(tmp_path):
    path, seen = tmp_path / "lines.jsonl", []
    lines = Tail(path, values)
    lines(seen.append)
    path.write_text('{"a": 1}\n{"a": ')
    lines(seen.append)
    lines(seen.append)
    assert seen == [{"a": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    lines(seen.append)
    assert seen == [{"a": 1}, {"a": 2}]


def test_what_was_there_before_can_be_left_out(tmp_path):
    path, seen = tmp_path / "lines.jsonl", []
    path.write_text('{"a": 1}\n')
    lines = Tail(path, values, from_end=True)
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    lines(seen.append)
    assert seen == [{"a": 2}]


@pytest.mark.parametrize("begun", ['{"kind": "step", "a": [1, 2, 3', "x" * 70_000])
def test_half_a_line_that_is_mended_does_not_move_what_comes_after_it(tmp_path, begun):
    path, seen = tmp_path / "lines.jsonl", []
    path.write_text('{"a": 1}\n' + begun)
    lines = Tail(path, values, from_end=True)
    lines(seen.append)
    mend(path)
    for number in range(2, 6):
        with path.open("a") as file:
            file.write(json.dumps({"a": number, "text": "y" * 20_000}) + "\n")
        lines(seen.append)
    assert [line["a"] for line in seen] == [2, 3, 4, 5]


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]", b"1", b"\0" * 9, b"\xff", b"[" * 100_000])
def test_a_damaged_line_is_left_out(tmp_path, damaged):
    path, seen = tmp_path / "lines.jsonl", []
    one, two = (line_text(note(text)).encode() for text in "ab")
    path.write_bytes(one + b"\n" + damaged + b"\n" + two + b"\n")
    Tail(path, sound_line)(seen.append)
    assert seen == [note("a"), note("b")]


def test_lines_are_followed_while_they_are_written(tmp_path):
    path, seen = tmp_path / "lines.jsonl", []
    lines = Tail(path, values)
    with following(lambda: lines(seen.append)):
        path.write_text('{"a": 1}\n')
        end = time.monotonic() + 500
        while not seen:
            assert time.monotonic() < end
            time.sleep(0.01)
        with path.open("a") as file:
            file.write('{"a": 2}\n')
    assert seen == [{"a": 1}, {"a": 2}]
