from __future__ import annotations

import time

from batchwright.reporting.following import Tail


def test_each_whole_line_is_handed_on_once(tmp_path):
    path, seen = tmp_path / "lines.jsonl", []
    lines = Tail(path)
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
    lines = Tail(path, from_end=True)
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    lines(seen.append)
    assert seen == [{"a": 2}]


def test_lines_are_followed_while_they_are_written(tmp_path):
    path, seen = tmp_path / "lines.jsonl", []
    with Tail(path).followed(seen.append):
        path.write_text('{"a": 1}\n')
        patience = 200
        while not seen and patience:
            time.sleep(0.05)
            patience -= 1
        with path.open("a") as file:
            file.write('{"a": 2}\n')
    assert seen == [{"a": 1}, {"a": 2}]
