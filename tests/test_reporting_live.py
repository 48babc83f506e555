"""Progress of runs with rounds, several resolutions or simulated time, on any terminal."""

from __future__ import annotations

import io
import re
from itertools import count

import pytest
from rich.console import Console

from batchwright.records.lines.run_lines import RoundLine
from batchwright.reporting.render.live_tables import LiveRounds, LiveWorkers
from batchwright.reporting.render.progress import RunProgress, joined
from dynamic_runs import shares_line, step_line
from run_lines import typed
from samples import TRAIN, make_cyclic_plan, make_dual_plan, make_hybrid_plan, make_rounds


def round_lines(plan):
    """What metrics.jsonl holds of a plan's rounds."""
    committed = 0
    for one in make_rounds(plan):
        committed += one.samples
        yield RoundLine(kind="round", record=one, learning_rate=0.1, committed=committed)


def epoch_line(epoch, **more):
    line = {
        "kind": "epoch",
        "epoch": epoch,
        "train/loss": 0.4,
        "val/loss": 0.6,
        "val/top1": 0.975,
        "time/epoch_s": 5000.0,
        "throughput/samples_per_sec": 1234.5,
        "lr": 0.1,
    }
    return typed(line | more)


def said(plan, records, *, every=1.0, terminal=False, width=80, height=30):
    """What a console is told if a line comes every so many seconds."""
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, height=height, color_system=None
    )
    ticks = count()
    clock = (lambda: every * next(ticks)) if not terminal else (lambda: 0.0)
    with RunProgress(console, plan.epochs, plan, clock) as shown:
        for record in records:
            shown.update(record)
    return console.file.getvalue()


def test_an_epoch_goes_on_as_its_samples_are_committed():
    lines = said(make_hybrid_plan(), round_lines(make_hybrid_plan())).splitlines()
    assert lines[0].startswith("epoch 3/18, ")  # the tenth second
    assert "16 px, loss" in lines[0]
    assert [line for line in lines if "32 px" in line]
    assert len(lines) == 73 // 10


def test_time_left_is_that_of_the_one_who_waits_by_committed_samples():
    plan = make_dual_plan()
    records = list(round_lines(plan))[:21]
    first, last = said(plan, records).splitlines()
    done, start = (records[at].committed / TRAIN for at in (9, 0))  # the tenth second, the first
    seconds = 9 / (done - start) * (plan.epochs - done)
    assert f"{seconds:.0f} s left" in first
    assert "left" in last


def test_simulated_time_is_named_and_time_left_is_real():
    job = make_cyclic_plan().job.model_copy(update={"launch": "virtual"})
    plan = make_cyclic_plan(job=job)
    first, second = said(plan, [epoch_line(0), epoch_line(1)], every=3.0).splitlines()
    assert "1 h 23 min simulated" in first
    assert "1,234 simulated images/s" in second.replace("1,235", "1,234")
    assert "left" not in first
    assert f"{3 * 16} s left" in second


def test_the_resolution_is_told_where_it_changes_and_only_there():
    assert "24 px" in said(make_cyclic_plan(), [epoch_line(4)])
    assert "px" not in said(make_dual_plan(), [epoch_line(4)])


def test_rounds_of_a_run_whose_plan_is_not_known_are_passed_over():
    console = Console(file=io.StringIO(), width=80)
    with RunProgress(console, 6) as shown:
        for record in round_lines(make_dual_plan()):
            shown.update(record)
    assert console.file.getvalue() == ""


def table_of(live, **size):
    console = Console(file=io.StringIO(), force_terminal=False, width=size["width"])
    console.print(live.table(**size))
    return console.file.getvalue().splitlines()


def live_of(plan, lines=None):
    live = LiveRounds(plan)
    for record in list(round_lines(plan))[:lines]:
        live.take(record)
    return live


def test_each_worker_has_a_row_with_its_last_round():
    head, *rows = table_of(live_of(make_hybrid_plan(), 8), most=9, width=80)
    assert head.split() == ["worker", "batch", "samples", "round", "wait", "lead"]
    assert [row.split()[:2] for row in rows] == [
        *(["0", "large"], ["1", "large"], ["2", "large"], ["3", "small"])
    ]
    assert rows[3].split()[2:5] == ["66", "666", "0.0790"]


def test_of_more_workers_than_have_room_the_slowest_rounds_are_shown():
    live = live_of(make_hybrid_plan(), 8)
    rows = table_of(live, most=3, width=80)[1:]
    assert len(rows) == 3
    assert rows[-1].split() == ["and", "2", "others"]
    assert live.table(most=1, width=80) is None
    assert live_of(make_hybrid_plan(), 1).table(most=9, width=80) is None


@pytest.mark.parametrize(
    ("width", "columns", "left_out"),
    [
        (80, 6, ""),
        (60, 6, ""),
        (50, 5, "samples"),
        (40, 4, "samples, lead"),
        (30, 3, "samples, lead, wait"),
    ],
)
def test_a_narrow_table_of_rounds_loses_columns_not_letters(width, columns, left_out):
    head, *rows = table_of(live_of(make_hybrid_plan()), most=9, width=width)
    assert len(head.split()) == columns
    assert all("…" not in row for row in (head, *rows))
    told = " ".join(" ".join(rows).split()).partition("no room for ")[2]
    assert told == left_out
    assert max(len(row.rstrip()) for row in (head, *rows)) <= width


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (60, "worker local batch share compute/step wait/step no room for place"),
        (50, "worker local batch compute/step wait/step no room for place, share"),
        (40, "worker local batch compute/step no room for place, share, wait/step"),
    ],
)
def test_a_narrow_table_of_workers_loses_columns_and_says_which(width, columns):
    live = LiveWorkers()
    live.take(shares_line(0, [8500, 43]))
    live.take(step_line(10, [8500, 43]))
    head, *rows = table_of(live, most=9, width=width)
    assert all("…" not in row and len(row.rstrip()) <= width for row in (head, *rows))
    assert " ".join(" ".join([head, *rows[2:]]).split()) == columns


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("make", [make_hybrid_plan, make_cyclic_plan])
def test_nothing_is_wider_than_the_terminal(make, width):
    plan = make()
    told = {"train/loss": 0.4123, "lr": 0.0866, "throughput/samples_per_sec": 12345.6}
    sizes = [850] * plan.workers
    steps = [shares_line(0, sizes), step_line(10, sizes, **told, **{"time/train_s": 1000.0})]
    records = list(round_lines(plan)) if plan.server else steps
    text = said(plan, [*records, epoch_line(17)], terminal=True, width=width)
    pieces = re.split(r"[\n\r]|\x1b\[[0-9;?]*[a-zA-Z]", text)
    assert max(map(len, pieces)) <= width
    assert "…" not in text
    assert "16 px" in text or "32 px" in text
    assert "accuracy 97.5 %" in text


def test_words_of_the_highest_rank_are_the_first_to_go():
    words = [(1, "32 px"), (3, "1,234 images/s"), (2, "loss 0.412"), (0, "9 s left")]
    assert joined(words) == "32 px, 1,234 images/s, loss 0.412, 9 s left"
    assert joined(words, 40) == "32 px, loss 0.412, 9 s left"
    assert joined(words, 10) == "9 s left"
    assert joined(words, 1) == "9 s left"
    assert joined([]) == ""
