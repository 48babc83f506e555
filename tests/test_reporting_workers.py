from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from batchwright.records import LocalBatches, WorkerTime
from batchwright.records.text.plan_text import explain
from batchwright.reporting.charts.workers import MAX_PANELS
from batchwright.reporting.data.accounting import accounting, worker_rows
from batchwright.reporting.data.worker_curves import (
    Share,
    changes,
    most_different,
    step_lines,
    worker_curves,
)
from batchwright.reporting.pages.page import page
from batchwright.reporting.render.figures import write_figures
from batchwright.reporting.render.tables import summary_table
from dynamic_runs import STEPS, dynamic_epoch, dynamic_summary
from samples import make_plan, make_summary, only_drawn, shown
from test_reporting_page import Document

HOSTILE = "<script>$\\frac$\x1b[2J"
FAST, SLOW = "node1/cpu:0", "node2/cpu:0"


def run_of(*epochs):
    """A run of these epochs; without candidates, whose figures are slow to draw."""
    return make_summary(epochs=tuple(epochs), plan=make_plan(considered=()))


# --------------------------------------------------------------------------------------- the curves


def test_workers_are_known_by_place_when_their_ranks_change():
    summary = run_of(
        dynamic_epoch(0, [800, 400], [(0, (64, 32))], [FAST, SLOW]),
        dynamic_epoch(1, [400, 800], [(0, (32, 64))], [SLOW, FAST]),
    )
    fast, slow = worker_curves(summary)
    assert (fast.place, slow.place) == (FAST, SLOW)
    assert [one.local_batch_size for one in fast.shares] == [64, 64]
    assert [one.samples for one in (fast, slow)] == [2 * STEPS * 64, 2 * STEPS * 32]


def test_machines_of_one_name_and_records_without_places_are_taken_by_rank():
    same = run_of(*(dynamic_epoch(e, [8, 8], [(0, (6, 2))], [FAST, FAST]) for e in (0, 1)))
    for summary in (same, make_summary()):
        assert [one.number for one in worker_curves(summary)] == [0, 1]
    assert [one.samples for one in worker_curves(same)] == [2 * STEPS * 6, 2 * STEPS * 2]
    assert [one.label for one in worker_curves(make_summary())] == ["worker 0", "worker 1"]


def test_a_worker_that_comes_later_has_no_epochs_and_no_share_before():
    summary = run_of(
        dynamic_epoch(0, [8], [(0, (96,))], [FAST]),
        dynamic_epoch(1, [8, 8], [(0, (48, 48))], [FAST, SLOW]),
    )
    fast, slow = worker_curves(summary)
    assert [one.epoch for one in slow.epochs] == [1]
    assert (slow.shares[0].start, slow.shares[-1].end) == (1.0, 2.0)
    assert [one.share for one in fast.shares] == [1.0, 0.5]


def test_the_stretches_of_an_epoch_follow_each_other_and_their_shares_sum_to_one():
    sizes = [(0, (48, 48)), (3, (60, 36)), (9, (64, 32))]
    fast, slow = worker_curves(run_of(dynamic_epoch(2, [8, 4], sizes)))
    ends = [(one.start, one.end) for one in fast.shares]
    assert ends == [(2.0, 2.25), (2.25, 2.75), (2.75, 3.0)]
    assert [(one.step, one.local_batch_size) for one in slow.shares] == [(0, 48), (3, 36), (9, 32)]
    for one, other in zip(fast.shares, slow.shares, strict=True):
        assert one.share + other.share == pytest.approx(1)


def test_stretches_of_other_workers_and_after_the_last_step_are_left_out():
    told = ((0, (32, 32, 32)), (4, (48, 48)), (STEPS, (90, 6)))
    epoch = dynamic_epoch(0, [8, 8], [(0, (48, 48))]).model_copy(
        update={"shares": tuple(LocalBatches(step=step, sizes=sizes) for step, sizes in told)}
    )
    first, _ = worker_curves(run_of(epoch))
    assert [(one.step, one.end, one.local_batch_size) for one in first.shares] == [(4, 1.0, 48)]


def test_an_epoch_without_a_step_has_no_stretch():
    epoch = dynamic_epoch(0, [8, 8], [(0, (4, 4))]).model_copy(update={"steps": 0})
    assert [one.shares for one in worker_curves(run_of(epoch))] == [(), ()]


@given(some.lists(some.tuples(some.booleans(), some.integers(0, 3)), max_size=12))
def test_lines_have_the_local_batch_of_every_stretch_and_break_where_there_is_none(told):
    shares = [
        Share(at, 0, float(at), at + 1.0, size, 0.5)
        for at, (there, size) in enumerate(told)
        if there
    ]
    lines = step_lines(shares)
    for one in shares:
        middle = (one.start + one.end) / 2
        found = [
            a[1]
            for line in lines
            for a, b in pairwise(line)
            if a[0] < middle < b[0] and a[1] == b[1]
        ]
        assert found == [one.local_batch_size]
    covered = sum(line[-1][0] - line[0][0] for line in lines)
    assert covered == len(shares)
    assert len(changes(shares)) <= len(shares)


def test_of_many_workers_those_of_fewest_and_most_samples_are_kept():
    curves = worker_curves(dynamic_summary(40))
    kept = most_different(curves, 5)
    assert len(kept) == 5
    samples = [one.samples for one in curves]
    assert {min(samples), max(samples)} <= {one.samples for one in kept}
    assert most_different(curves[:3], 5) == curves[:3]


# ------------------------------------------------------------------------------ where the time went


def test_waiting_is_a_part_of_its_own_and_the_parts_still_sum_to_the_wall_time():
    summary = dynamic_summary()
    whole = dict(accounting(summary))
    assert list(whole)[1:5] == ["input", "compute", "wait", "communication"]
    assert sum(whole.values()) == pytest.approx(summary.wall_seconds)
    waits = [one.wait_seconds for epoch in summary.epochs for one in epoch.workers]
    assert whole["wait"] == pytest.approx(sum(waits) / 2)
    assert dict(accounting(summary, worker_curves(summary)[0]))["wait"] == pytest.approx(
        sum(waits[::2])
    )


def test_records_that_count_waiting_as_communication_say_so():
    assert "wait" not in dict(accounting(make_summary()))
    head, *rows = worker_rows(make_summary())
    assert head[-1] == "exchange and wait"
    assert {len(row) for row in rows} == {len(head)}
    assert "Communication and wait" in page(make_summary())


def test_the_mean_is_over_the_workers_that_an_epoch_had():
    summary = run_of(
        dynamic_epoch(0, [8], [(0, (96,))], [FAST]),
        dynamic_epoch(1, [8, 8], [(0, (48, 48))], [FAST, SLOW]),
    )
    busy = [epoch.workers[0].compute_seconds for epoch in summary.epochs]
    assert dict(accounting(summary))["compute"] == pytest.approx(sum(busy))


def test_the_table_of_the_workers_names_places_and_waiting():
    text = shown(summary_table(dynamic_summary()), width=100)
    (row,) = [line for line in text.splitlines() if "1: node0/cpu:1" in line]
    slow = worker_curves(dynamic_summary())[1]
    assert f"{slow.seconds('wait'):.3f} s" in row
    assert f"{slow.samples:,}" in row


def test_a_plan_of_the_method_says_that_local_batches_are_where_it_starts():
    plan, plain = dynamic_summary().plan, make_plan()
    for text in (explain(plan), page(dynamic_summary())):
        assert "local batch at first" in text
        assert "local batches follow the measured speeds, every 25 steps and epoch" in text
    assert "at first" not in explain(plain)
    assert "follow" not in explain(plain)
    job = plan.job.model_copy(update={"rebalance_steps": 0})
    assert "speeds, every epoch" in explain(plan.model_copy(update={"job": job}))


# --------------------------------------------------------------------------------------- the figure


def test_the_figure_s_numbers_are_those_of_every_worker(tmp_path, undrawn):
    summary = dynamic_summary(3)
    written = write_figures(run_of(*summary.epochs), tmp_path)
    assert tmp_path / "workers.png" in written
    data = json.loads((tmp_path / "workers.figure.json").read_text())
    assert data["format"] == "batchwright-workers-figure/1"
    last = data["workers"][2]
    assert last["place"] == "node0/cpu:2"
    assert [one["local_batch_size"] for one in last["shares"]][:4] == [48, 48, 48, 28]
    assert [one["whole"] for one in last["epochs"]].count(False) == 1


def drawn(summary, name="workers.png"):
    return only_drawn(summary, name)


def test_one_worker_has_no_figure_of_workers(tmp_path, undrawn):
    names = [path.name for path in write_figures(dynamic_summary(1), tmp_path)]
    assert "time.png" in names
    assert not [name for name in names if name.startswith("workers")]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "panels"), [(2, 2), (5, 5), (40, MAX_PANELS)])
def test_each_worker_has_a_panel_for_its_batches_and_one_for_its_times(workers, panels):
    figure = drawn(dynamic_summary(workers, epochs=4))
    assert len(figure.axes) == 2 * panels
    tops = [axes for axes in figure.axes if axes.get_title()]
    assert len({axes.get_title() for axes in tops}) == panels
    for axes in tops:  # all workers' lines, grey, and its own
        assert len(axes.lines) == workers + 1
    assert len({axes.get_ylim() for axes in tops}) == 1
    said = figure.get_suptitle()
    assert said == (
        f"16 of {workers} workers, from the fewest samples to the most" * (workers > 16)
    )


def test_the_bars_of_an_epoch_are_as_high_as_its_time(tmp_path):
    summary = dynamic_summary()
    times = drawn(summary).axes[2]  # below the batches of two workers
    tops = {}
    for bar in (path for bars in times.collections for path in bars.get_paths()):
        at, top = int(bar.vertices[:, 0].mean()), bar.vertices[:, 1].max()
        tops[at] = max(tops.get(at, 0.0), top)
    expected = {epoch.epoch: epoch.training_seconds for epoch in summary.epochs}
    assert tops == pytest.approx(expected)


def test_no_panel_of_the_workers_cuts_off_what_is_drawn_in_another():
    epoch = dynamic_epoch(0, [8, 4, 2], [(0, (32, 32, 32))])
    times = [one.model_copy(update={"wait_seconds": 0.0}) for one in epoch.workers]
    figure = drawn(run_of(epoch.model_copy(update={"workers": tuple(times)})))
    for axes in figure.axes:
        tops = [max(line.get_ydata()) for line in axes.lines]
        bars = [path for part in axes.collections for path in part.get_paths()]
        tops += [bar.vertices[:, 1].max() for bar in bars]
        low, high = axes.get_ylim()
        assert low == 0
        assert high > 1.03 * max(tops)


def test_parts_that_took_no_time_are_not_in_the_legends():
    epoch = dynamic_epoch(0, [8, 8], [(0, (48, 48))])
    idle = {"wait_seconds": 0.0, "input_seconds": 0.0}
    times = tuple(one.model_copy(update=idle) for one in epoch.workers)
    summary = run_of(epoch.model_copy(update={"workers": times}))
    for figure in (drawn(summary), drawn(summary, "time.png")):
        named = {text.get_text() for text in figure.legends[0].get_texts()}
        assert {"compute", "communication"} <= named
        assert not named & {"wait", "input"}


def test_a_place_is_only_text_in_figure_page_and_terminal(tmp_path):
    summary = run_of(dynamic_epoch(0, [8, 8], [(0, (48, 48))], [HOSTILE, "x" * 80 + "/cuda:7"]))
    assert write_figures(summary, tmp_path)
    text = page(summary)
    assert "<script" not in text
    for said in (text, shown(summary_table(summary), width=200)):
        assert "\x1b" not in said
        assert "xxx/cuda:7" in said
        assert "x" * 40 not in said


# ----------------------------------------------------------------------------------------- the page


def workers_part(text):
    (found,) = re.findall(r"<h3>Worker by worker</h3>(.*?)</section>", text, re.DOTALL)
    return dict(
        re.findall(r"<figure><figcaption>(.*?)</figcaption>(.*?)</figure>", found, re.DOTALL)
    )


def test_two_workers_have_a_line_each_in_a_chart_of_all_that_changes():
    text = page(dynamic_summary())
    Document(text)
    charts = workers_part(text)
    assert list(charts) == ["Local batch", "Compute", "Waiting for slower workers"]
    assert "Throughout: communication 0." in text
    for chart in charts.values():
        assert chart.count("<polyline") == 2
        assert "band" not in chart
    words = "1: node0/cpu:1: 32 samples (33.3 %) from epoch 3, step 5"
    assert f"<title>{words}</title>" in charts["Local batch"]
    row = '<tr><th scope="row">3</th><td>5</td><td>64 (66.7 %)</td><td>32 (33.3 %)</td></tr>'
    assert row in charts["Local batch"]
    assert charts["Local batch"].count("<tr>") == 4  # the head, the start, slower, faster again


def test_many_workers_have_five_lines_a_band_and_all_of_them_in_the_table():
    text = page(dynamic_summary(16))
    Document(text)
    for chart in workers_part(text).values():
        assert chart.count("<polyline") == 5
        assert "all 16 workers" in chart
        assert all(f'<th scope="col">{rank}: node' in chart for rank in range(16))


def test_a_band_holds_every_worker_s_local_batch():
    chart = workers_part(page(dynamic_summary(16)))["Local batch"]
    (edge,) = re.findall(r'<polygon class="band grey" points="([^"]*)"', chart)
    heights = [float(place.split(",")[1]) for place in edge.split()]
    lines = re.findall(r'<polyline class="line[^"]*" points="([^"]*)"', chart)
    drawn = [float(place.split(",")[1]) for line in lines for place in line.split()]
    assert min(heights) <= min(drawn)
    assert max(heights) >= max(drawn)


def test_one_worker_has_no_part_of_its_own():
    assert "Worker by worker" not in page(dynamic_summary(1))


def test_a_run_that_changes_its_shares_all_the_time_keeps_a_page_of_readable_size():
    epochs = []
    for epoch in range(25):
        shares = [
            (step, (40 + (epoch + step) % 9, 56 - (epoch + step) % 9)) for step in range(STEPS)
        ]
        epochs.append(dynamic_epoch(epoch, [8, 8], shares))
    chart = workers_part(page(run_of(*epochs)))["Local batch"]
    assert "(100 of 300; all are in summary.json)" in chart
    assert chart.count("<circle") + chart.count("<rect") <= 2 * 25


def test_an_epoch_without_waiting_told_beside_one_with_it_is_read():
    old = WorkerTime(
        local_batch_size=48, samples=1, input_seconds=0, compute_seconds=1, communication_seconds=1
    )
    before = dynamic_epoch(0, [8, 8], [(0, (48, 48))]).model_copy(update={"workers": (old, old)})
    summary = run_of(before, dynamic_epoch(1, [8, 8], [(0, (48, 48))]))
    assert [one.place for one in worker_curves(summary)][:2] == ["", ""]
    assert len(worker_curves(summary)) == 4
    assert page(summary)
