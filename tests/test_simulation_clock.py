"""`algorithms.simulated_clock`: how long virtual workers take, and what happens next."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.algorithms.simulated_clock import Cluster, Events, StepTime, Worker, step_times
from batchwright.errors import JobError, PlanError
from batchwright.records import VIRTUAL_BANDWIDTH, VIRTUAL_LATENCY, Disturbance, Estimate
from samples import make_job
from servers import make_server_plan

calmly = settings(max_examples=100)  # nothing here is about time


def slower(start, end, slowdown, worker=0):
    return Disturbance(worker=worker, start=start, end=end, slowdown=slowdown)


def make_cluster(workers=4, *, link=None, **virtual):
    return Cluster(make_job(workers=workers, link=link or {}, virtual=virtual), workers)


# -------------------------------------------------------------------------------------- computing


def test_a_step_costs_its_samples_and_a_fixed_time():
    assert StepTime(0.002, 0.01).work(50) == pytest.approx(0.11)
    assert StepTime(0.002, 0.01).work(0) == 0


def test_an_overhead_is_of_the_fixed_time_alone():
    assert StepTime(0.002, 0.01).work(50, 3.0) == pytest.approx(0.13)
    workers = make_cluster(3, speeds=(1, 2, 1), overheads=(1, 1, 0.1)).workers
    assert [(one.speed, one.overhead) for one in workers] == [(1, 1), (2, 1), (1, 0.1)]
    with pytest.raises(JobError, match=r"virtual.overheads=1,2: 2 values for workers=3"):
        make_cluster(3, overheads=(1, 2))


def test_a_worker_twice_as_fast_needs_half_the_time():
    assert Worker(2.0, VIRTUAL_BANDWIDTH).finish(3.0, 5.0) == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("start", "work", "finish"),
    [
        (0.0, 10.0, 10.0),  # over before it begins
        (0.0, 12.0, 14.0),  # 10 s at full speed, 2 s of work in 4
        (12.0, 2.0, 16.0),  # inside
        (18.0, 3.0, 22.0),  # 2 s for 1 of work, then 2
        (8.0, 9.0, 22.0),  # 2, then all 10 s of it for 5, then 2
        (20.0, 1.0, 21.0),  # after
    ],
)
def test_a_disturbance_slows_just_the_part_of_a_step_that_it_covers(start, work, finish):
    worker = Worker(1.0, VIRTUAL_BANDWIDTH, (slower(10.0, 20.0, 2.0),))
    assert worker.finish(start, work) == pytest.approx(finish)


def test_disturbances_multiply_and_may_have_no_end():
    worker = Worker(2.0, VIRTUAL_BANDWIDTH, (slower(0.0, None, 2.0), slower(4.0, 6.0, 4.0)))
    # 4 s at 1, 2 s at a quarter, then 1 again
    assert worker.finish(0.0, 5.0) == pytest.approx(6.5)


@calmly
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0.1, 30), st.floats(0.2, 8)), min_size=1, max_size=4
    ),
    st.floats(0, 60),
    st.lists(st.floats(0.01, 20), min_size=1, max_size=5),
)
def test_work_takes_as_long_in_one_piece_as_in_several(times, start, pieces):
    worker = Worker(
        1.3,
        VIRTUAL_BANDWIDTH,
        tuple(slower(begin, begin + length, s) for begin, length, s in times),
    )
    now = start
    for piece in pieces:
        now = worker.finish(now, piece)
    assert now == pytest.approx(worker.finish(start, sum(pieces)), rel=1e-9)


# Constants and rows of Table 2 of the dual-batch paper: k, B_S, d_S, d_L with B_L = 500.
TABLE_2 = StepTime(0.00056607, 0.014041204)
ROWS = [
    (1.05, 83, 10625, 13125),
    (1.05, 154, 11875, 13125),
    (1.05, 205, 12291, 13125),
    (1.1, 38, 8750, 13750),
    (1.1, 87, 11250, 13750),
    (1.1, 127, 12083, 13750),
]


def round_seconds(batch, samples):
    whole, tail = divmod(samples, batch)
    return whole * TABLE_2.work(batch) + TABLE_2.work(tail)


@pytest.mark.parametrize(("k", "small", "small_samples", "large_samples"), ROWS)
def test_large_and_small_workers_of_the_published_table_end_their_rounds_together(
    k, small, small_samples, large_samples
):
    alone = round_seconds(500, 12500)
    assert round_seconds(500, large_samples) / alone == pytest.approx(k, rel=0.005)
    assert round_seconds(small, small_samples) / alone == pytest.approx(k, rel=0.005)


# -------------------------------------------------------------------------------------- exchanging


def test_a_ring_goes_at_the_pace_of_its_slowest_link():
    cluster = make_cluster(4, link={"latency": 0.001, "bandwidth": 1e6}, links=(1, 1, 0.5, 2))
    assert cluster.all_reduce_seconds(400_000) == pytest.approx(6 * (0.001 + 100_000 / 500_000))


def test_one_worker_has_nobody_to_exchange_with():
    assert make_cluster(1).all_reduce_seconds(10**9) == 0


def test_links_are_a_local_ethernet_where_nothing_is_stated():
    cluster = make_cluster(2)
    assert (
        cluster.transfer_seconds(0, 1_000_000)
        == VIRTUAL_LATENCY + 1_000_000 / VIRTUAL_BANDWIDTH
        == 0.0085
    )


def test_models_that_arrive_together_go_through_the_servers_link_one_by_one():
    link = make_cluster(3, link={"latency": 0.5, "bandwidth": 100.0}).server_link(200)  # 2 s each
    assert [link.receive(10.0), link.receive(10.0), link.receive(11.0)] == [10.0, 12.0, 14.0]
    assert link.receive(50.0) == 50.0
    assert [link.send(10.0), link.send(10.0), link.send(30.0)] == [10.0, 12.0, 30.0]


def test_a_slow_link_delays_its_own_worker_alone():
    cluster = make_cluster(2, link={"latency": 0, "bandwidth": 100.0}, links=(1, 0.01))
    link = cluster.server_link(100)
    assert cluster.transfer_seconds(1, 100) == pytest.approx(100)
    # Its model is under way from 0 to 100; the other's comes and goes meanwhile.
    assert link.receive(5.0) == 5.0
    assert link.receive(100.0) == 100.0


def test_a_link_goes_on_from_a_checkpoint():
    one, two = (make_cluster().server_link(500) for _ in range(2))
    one.receive(3.0)
    one.send(4.0)
    two.load_state_dict(one.state_dict())
    assert (one.receive(0.0), one.send(0.0)) == (two.receive(0.0), two.send(0.0))


# ------------------------------------------------------------------------------------------ events


def test_events_come_in_the_order_of_time_and_then_of_rank():
    events = Events()
    for time, worker in ((2.0, 1), (1.0, 3), (2.0, 0), (1.0, 2), (2.0, -1)):
        events.add(time, worker, "ask")
    restored = Events()
    restored.load_state_dict(json.loads(json.dumps(events.state_dict())))
    for queue in (events, restored):
        found = []
        while queue:
            event = queue.next()
            found.append((event.time, event.worker))
        assert found == [(1.0, 2), (1.0, 3), (2.0, -1), (2.0, 0), (2.0, 1)]


# ------------------------------------------------------------------------- what the times are from


def make_timed_plan(rows, **virtual):
    return make_server_plan(
        (600, 400),
        stages=[{"epochs": 1, **row} for row in rows],
        job=make_job(workers=2, virtual=virtual),
        batches=(20, 5),
    )


def test_what_the_job_states_holds_at_the_highest_resolution_and_by_area_below():
    plan = make_timed_plan(
        [{"resolution": 16}, {"resolution": 32}], sample_seconds=0.004, step_seconds=0.01
    )
    assert step_times(plan) == (StepTime(0.001, 0.01), StepTime(0.004, 0.01))


def test_what_the_rows_say_is_taken_and_tells_the_proportion():
    rows = [
        {"resolution": 16, "sample_seconds": 0.003, "step_seconds": 0.02},
        {"resolution": 32, "sample_seconds": 0.006, "step_seconds": 0.03},
    ]
    assert step_times(make_timed_plan(rows)) == (StepTime(0.003, 0.02), StepTime(0.006, 0.03))
    stated = step_times(make_timed_plan(rows, sample_seconds=0.1))
    assert stated == (StepTime(0.05, 0.02), StepTime(0.1, 0.03))


def test_a_predicted_epoch_tells_too():
    # 30 steps of 20 samples in 6 s: 0.2 s a step, of which 5 samples' worth are fixed
    row = {
        "predicted_epoch_seconds": Estimate(value=6, low=5, high=7),
        "fixed_samples": 5.0,
        "resolution": 16,
    }
    (found,) = step_times(make_timed_plan([row]))
    assert found.sample_seconds == pytest.approx(0.008)
    assert found.step_seconds == pytest.approx(0.04)


def test_a_plan_that_tells_nothing_is_refused():
    with pytest.raises(PlanError, match=r"virtual\.step_seconds=\.\.\., or plan from a profile"):
        step_times(make_timed_plan([{}], sample_seconds=0.1))


@pytest.mark.parametrize(
    ("virtual", "message"),
    [
        ({"speeds": (1, 2)}, r"virtual\.speeds=1,2: 2 values for workers=3: give one for each"),
        ({"links": (1,)}, r"virtual\.links=1: 1 values for workers=3"),
        (
            {"disturbances": [{"worker": 3, "slowdown": 2}]},
            "worker 3 of workers=3: give 0 to 2",
        ),
        (
            {"disturbances": [{"worker": 0, "start": 5, "end": 5, "slowdown": 2}]},
            "worker 0 from 5 s until 5 s: the end must be later",
        ),
    ],
)
def test_workers_that_are_not_there_are_refused(virtual, message):
    with pytest.raises(JobError, match=message):
        make_cluster(3, **virtual)
