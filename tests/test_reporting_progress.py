from __future__ import annotations

import errno
import io
import sys

import pytest
from rich.console import Console

from batchwright.records.lines.run_lines import note
from batchwright.records.run import recorded_loss
from batchwright.records.text.problems import to_stderr
from batchwright.reporting.render.live_tables import LiveWorkers
from batchwright.reporting.render.progress import LINE_SECONDS, StepsProgress, progress, steps
from dynamic_runs import shares_line, step_line
from run_lines import typed


def a_console(*, terminal=False, **more):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, **more)


def step(epoch, number, seconds, **more):
    line = {
        "kind": "step",
        "epoch": epoch,
        "step": number,
        "steps": 10,
        "time/train_s": seconds,
        "train/loss": 0.5,
        "throughput/samples_per_sec": 1234.5,
        "lr": 0.1,
        "batch/global": 96,
    }
    return typed(line | more)


def epoch_end(epoch, **more):
    line = {
        "kind": "epoch",
        "epoch": epoch,
        "epochs": 2,
        "train/loss": 0.4,
        "val/loss": 0.6,
        "val/top1": 0.975,
        "time/epoch_s": 20.0,
        "time/eval_s": 1.0,
        "throughput/samples_per_sec": 1200.0,
        "lr": 0.1,
        "plan/predicted_epoch_s": 19.0,
        "gns/simple": 212.0,
    }
    return typed(line | more)


def lines(console, records, epochs=2):
    with progress(console, epochs=epochs) as shown:
        for record in records:
            shown.update(record)
    return console.file.getvalue().splitlines()


def test_an_epoch_is_one_plain_line_where_there_is_no_terminal():
    said = lines(a_console(), [step(0, 5, 1.0), step(0, 10, 2.0), epoch_end(0), epoch_end(1)])
    assert len(said) == 2
    assert said[0].startswith("epoch 1/2: ")
    for words in ("loss 0.400", "accuracy 97.5 %", "20.0 s (predicted 19.0 s)", "21 s left"):
        assert words in said[0]
    assert "left" not in said[1]


def test_inside_a_long_epoch_lines_are_at_least_ten_seconds_of_training_apart():
    said = lines(a_console(), [step(0, n, 4.0 * n) for n in range(1, 11)])
    assert len(said) == 3
    assert [line.split(":")[0].split()[-1] for line in said] == ["3/10", "6/10", "9/10"]
    assert LINE_SECONDS == 10


def test_time_left_uses_the_pace_of_the_first_epoch_until_one_is_finished():
    (first,) = lines(a_console(), [step(0, 5, 10.0)])
    assert "30 s left" in first
    _, second = lines(a_console(), [epoch_end(0), step(1, 5, 10.0)])
    assert "10 s left" in second


def test_time_left_goes_by_the_median_of_the_last_five_epochs():
    spent = [9.0, 9.0, 19.0, 9.0, 99.0, 19.0, 19.0]  # and a second of evaluation each
    told = [epoch_end(n, **{"time/epoch_s": seconds}) for n, seconds in enumerate(spent)]
    said = lines(a_console(), told, epochs=11)
    assert [line.rpartition(", ")[2] for line in said] == [
        *("1 min 40 s left", "1 min 30 s left", "1 min 20 s left", "1 min 10 s left"),
        *("1 min 00 s left", "1 min 40 s left", "1 min 20 s left"),
    ]


@pytest.mark.parametrize("changed", [{"resolution": 64}, {"batch/global": 512}])
def test_time_left_begins_anew_with_another_resolution_or_batch(changed):
    before = [epoch_end(n, **{"time/epoch_s": 9.0}) for n in range(3)]
    *_, last = lines(a_console(), [*before, epoch_end(3, **changed)], epochs=5)
    assert last.endswith(", 21 s left")


def test_a_line_does_not_wrap_however_narrow_the_console():
    console = Console(file=io.StringIO(), force_terminal=False, width=20)
    assert len(lines(console, [epoch_end(0)])) == 1


def test_what_an_epoch_was_like_is_told_whole_on_a_narrow_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=30)
    said = " ".join(" ".join(lines(console, [epoch_end(0)])).split())
    for word in ("0.400", "97.5", "1,200", "images/s", "20.0", "21", "left"):
        assert word in said


def test_values_that_are_missing_or_null_are_left_out():
    (said,) = lines(a_console(), [epoch_end(0, **{"train/loss": None, "val/top1": None})])
    assert "accuracy" not in said
    assert said.startswith("epoch 1/2: held-out loss")
    assert lines(a_console(), [typed({"kind": "epoch", "epoch": 1})]) == ["epoch 2/2: 0 s"]
    line = {"kind": "evaluation", "epoch": 1, "val/top1": 0.5}
    assert lines(a_console(), [typed(line)]) == []


def test_a_loss_that_is_not_finite_is_left_out():
    assert (recorded_loss(float("nan")), recorded_loss(float("inf")), recorded_loss(-2.5)) == (
        None,
        None,
        -2.5,
    )
    (said,) = lines(a_console(), [step(0, 5, 20.0, **{"train/loss": None})])
    assert "loss" not in said


def test_a_note_is_shown_as_it_is_but_cannot_act_on_the_terminal():
    assert lines(a_console(), [note("[red]kept\x1b[2J :smile:")]) == ["[red]kept\\x1b[2J :smile:"]


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end():
    console = a_console(terminal=True)
    text = "\n".join(lines(console, [step(0, 5, 1.0), epoch_end(0)]))
    assert "━" in text
    assert "accuracy 97.5 %" in text
    assert text.endswith("\x1b[2K")


def test_no_color_takes_the_colours_away(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = "\n".join(lines(a_console(terminal=True), [step(0, 5, 1.0), epoch_end(0)]))
    assert "\x1b[3" not in text
    assert "\x1b[9" not in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert len(lines(a_console(terminal=True), [step(0, 5, 1.0), epoch_end(0)])) == 1


def test_without_a_console_everything_goes_to_standard_error(capsys):
    with progress(epochs=1) as shown:
        shown.update(note("hello"))
    with steps() as count:
        count(1, 1, "reading")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hello\nreading: 1 of 1\n"


def test_what_nobody_can_read_any_more_ends_no_work(monkeypatch):
    class Closed(io.StringIO):
        def write(self, _):
            raise OSError(errno.EIO, "the terminal was closed")

    monkeypatch.setattr(sys, "stderr", Closed())
    with progress(epochs=1) as shown:
        shown.update(note("hello"))
    to_stderr("hello")


def test_countable_work_says_its_start_its_end_and_little_in_between():
    console, now = a_console(), iter(range(1000))
    with StepsProgress(console, clock=lambda: float(next(now))) as count:
        for done in range(26):
            count(done, 25, "reading training images")
        for done in range(3):
            count(done, 2, "reading held-out images")
    assert console.file.getvalue().splitlines() == [
        "reading training images: 0 of 25",
        "reading training images: 10 of 25",
        "reading training images: 20 of 25",
        "reading training images: 25 of 25",
        "reading held-out images: 0 of 2",
        "reading held-out images: 2 of 2",
    ]


@pytest.mark.parametrize("total", [0, 3])
def test_countable_work_has_a_bar_on_a_terminal(total):
    console = a_console(terminal=True)
    with steps(console) as count:
        for done in range(total + 1):
            count(done, total, "[b]reading")
    assert f"{total} of {total}" in console.file.getvalue()
    assert "[b]reading" in console.file.getvalue()


def test_a_change_of_the_local_batches_is_a_line_and_no_change_is_none():
    said = lines(
        a_console(),
        [
            shares_line(0, [64, 64]),
            shares_line(0, [64, 64], [800, 790]),
            step_line(30, [85, 43]),
            shares_line(25, [85, 43], [800, 405.3]),
        ],
    )
    assert said == [
        "epoch 1/2, step 1/100: local batches 2 x 64",
        "epoch 1/2, step 26/100: local batches 85 + 43, were 2 x 64 (800, 405 images/s)",
    ]


def test_a_change_of_many_workers_stays_a_short_line():
    sizes = list(range(20, 60))
    (said,) = lines(a_console(), [shares_line(50, sizes, [float(size) for size in sizes])])
    assert said.endswith("local batches 20 to 59 (20.0 to 59.0 images/s)")


def test_one_worker_has_neither_lines_nor_a_table():
    console = a_console(terminal=True)
    text = "\n".join(lines(console, [shares_line(0, [64]), step_line(10, [64])]))
    assert "local batch" not in text


def test_a_terminal_shows_each_worker_below_the_bar_and_takes_the_table_away():
    console = a_console(terminal=True, height=30)
    with progress(console, epochs=2) as shown:
        shown.update(shares_line(0, [85, 43]))
        shown.update(step_line(10, [85, 43]))
        of_epoch = {"batch/local/0": 85, "batch/local/1": 43, "time/rank0/compute_s": 9.0}
        shown.update(epoch_end(0, **of_epoch))
        shown.update(step_line(20, [80, 48]))
    text = console.file.getvalue()
    rows = [line.split() for line in text.splitlines() if "node1/cpu:1" in line]
    assert rows[-1][:9] == ["1", "node1/cpu:1", "48", "37.5", "%", "48.0", "ms", "0.500", "ms"]
    assert "80.0 ms" in text
    assert "9,000 ms" not in text  # the seconds of an epoch are not those of a step
    assert text.endswith("\x1b[2K")


def table_of(live, **size):
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    console.print(live.table(**size))
    return console.file.getvalue()


def test_of_more_workers_than_have_room_the_slowest_are_shown():
    live = LiveWorkers()
    live.take(step_line(10, list(range(10, 26))))
    rows = [line.split() for line in table_of(live, most=5).splitlines()]
    assert [row[0] for row in rows[1:]] == ["12", "13", "14", "15", "and"]
    assert rows[-1] == ["and", "12", "others"]
    assert len(table_of(live, most=16).splitlines()) == 17
    assert live.table(most=1) is None


def test_workers_that_left_take_their_times_and_places_with_them():
    live = LiveWorkers()
    live.take(shares_line(0, [30, 30, 30]))
    live.take(step_line(10, [30, 30, 30]))
    live.take(shares_line(20, [45, 45]))
    text = table_of(live, most=9)
    assert len(text.splitlines()) == 3
    assert "node1/cpu:2" not in text
    assert "ms" not in text
