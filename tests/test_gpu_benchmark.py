"""The programme for a first GPU: what it would do, and that it goes on where it was stopped."""

from __future__ import annotations

import json

import pytest
from benchmarks.gpu import __main__ as programme
from benchmarks.gpu.steps import STEPS


def test_the_limits_are_45_minutes_together_and_names_differ():
    assert sum(step.minutes for step in STEPS) == 45
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_a_dry_run_names_every_step_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "results"
    assert programme.main(["--dry-run", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert all(step.name in told and step.words in told for step in STEPS)
    assert not out.exists()


def test_what_is_done_is_not_taken_again_and_what_failed_comes_last(tmp_path, monkeypatch, capsys):
    taken, outcomes = [], {"speed-32": "failed with 1"}

    def take(name, asked, seconds):
        taken.append(name)
        return outcomes.get(name, "done")

    monkeypatch.setattr(programme, "_taken", take)
    words = ["--out", str(tmp_path), "--steps", "speed-32", "server", "autocast"]
    assert programme.main(words) == 1
    assert taken == ["speed-32", "autocast", "server"]
    outcomes.clear()
    assert programme.main([*words, "virtual"]) == 0
    assert taken[3:] == ["virtual", "speed-32"]
    assert programme.main(words) == 0
    assert len(taken) == 5
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [one["outcome"] for one in lines] == ["failed with 1", *["done"] * 4]


def test_no_step_is_begun_without_time(tmp_path, monkeypatch):
    monkeypatch.setattr(programme, "_taken", lambda *_: pytest.fail("began"))
    assert programme.main(["--out", str(tmp_path), "--minutes", "0.1"]) == 0


@pytest.mark.slow
def test_a_step_in_little_writes_what_it_finds(tmp_path, capsys):
    assert programme.main(["--tiny", "--out", str(tmp_path), "--steps", "server", "speed-32"]) == 0
    found = [json.loads(line) for line in (tmp_path / "speed-32.jsonl").read_text().splitlines()]
    assert any("session over resident batch" in one["what"] for one in found)
    assert all(one["tiny"] for one in found)
    assert "handed in" in capsys.readouterr().out
