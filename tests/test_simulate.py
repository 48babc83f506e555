"""`simulate`: closed forms, what always holds, what is refused, and what a person is told."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import ceil, inf, log2
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.algorithms import balancer
from batchwright.algorithms.checkpointing import daly_interval, expected_seconds, young_interval
from batchwright.algorithms.simulated_clock import Cluster
from batchwright.errors import ArgumentError, BatchwrightError, PlanError
from batchwright.planning.planner import plan_without_profile
from batchwright.planning.simulation import simulate as simulating
from batchwright.planning.simulation.cluster import ImaginedCluster, Row
from batchwright.planning.simulation.failures import Hazards, run_through
from batchwright.planning.simulation.rounds import simulate_rounds
from batchwright.planning.simulation.steps import Stragglers, lognormal, simulate_steps
from batchwright.records import Estimate, LinkTime, Plan, Scenario, Simulation, UpdateTime
from batchwright.records.documents import read_record
from batchwright.reporting.render.simulation import simulation_tables, write_simulation_figure
from batchwright.workflows.simulating import scenario_of
from samples import (
    make_data,
    make_dual_plan,
    make_job,
    make_kind_profile,
    make_network,
    make_plan,
    make_profile,
)
from servers import make_server_plan
from test_planned_methods import planned

calmly = settings(max_examples=25, deadline=None)  # nothing here is about time
WITHIN = 0.01  # of a closed form
FAST = {"repeats": 2, "steps": 50}


def make_row(workers: int, seconds: float = 1.0, steps: int = 100, **changes) -> Row:
    """Workers whose step takes so long, whatever their batch."""
    told = {
        "epochs": 1,
        "steps": steps,
        "whole": float(steps),
        "batches": np.full(workers, 10, dtype=np.int64),
        "sample_seconds": np.zeros(workers),
        "step_seconds": np.full(workers, seconds),
        "fixed_samples": 0.0,
        "samples_per_round": np.zeros(0, dtype=np.int64),
        "exchange": 0.0,
        "level": 0.0,
    }
    return Row(**(told | changes))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def dynamic_plan(**keys) -> Plan:
    return bw.plan(make_profile(), epochs=3, method="dynamic-batch", workers=2, **keys)


# ------------------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("workers", [2, 8, 1000])
def test_a_ring_takes_what_its_formula_says(workers):
    plan = make_plan()
    size = plan.network.trained_bytes
    cluster = ImaginedCluster(plan, Scenario(latency=1e-4, bandwidth=1e8), workers)
    formula = 2 * (workers - 1) / workers * size / 1e8 + 2 * (workers - 1) * 1e-4
    assert cluster.all_reduce_seconds(size) == pytest.approx(formula, rel=1e-12)
    tree = ImaginedCluster(plan, Scenario(latency=1e-4, bandwidth=1e8, exchange="tree"), workers)
    formula = 2 * (1e-4 * ceil(log2(workers)) + size / 1e8)
    assert tree.all_reduce_seconds(size) == pytest.approx(formula, rel=1e-12)


def test_with_hosts_gradients_are_summed_inside_them_first():
    plan, size = make_plan(), 10**8
    asked = Scenario(
        workers_per_host=8, host_latency=1e-6, host_bandwidth=1e11, latency=1e-4, bandwidth=1e9
    )
    inside = 2 * 7 * (1e-6 + size / 8 / 1e11)
    between = 2 * 3 * (1e-4 + size / 4 / 1e9)
    found = ImaginedCluster(plan, asked, 32).all_reduce_seconds(size)
    assert found == pytest.approx(inside + between)
    flat = asked.model_copy(update={"workers_per_host": 1})
    assert found < ImaginedCluster(plan, flat, 32).all_reduce_seconds(size)
    seconds = dict.fromkeys(("latency", "latency_low", "latency_high"), 1e-6)
    rates = dict.fromkeys(("bandwidth", "bandwidth_low", "bandwidth_high"), 1e11)
    link = LinkTime(between="workers of a host", bytes=10**6, **seconds, **rates)
    unset = {"host_latency": None, "host_bandwidth": None}
    measured = ImaginedCluster(
        plan, asked.model_copy(update=unset), 32, [make_profile(links=(link,))]
    )
    assert measured.all_reduce_seconds(size) == pytest.approx(found)


def exponential(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return random.exponential(size=shape)


def normal(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 1 + 0.1 * random.standard_normal(shape)


def largest_normal(workers: int) -> float:
    """Expected maximum of standard normal numbers, by the trapezoid rule."""
    from scipy.special import ndtr

    at = np.linspace(-10, 10, 20_001)
    below = ndtr(at) ** workers
    return float(np.trapezoid(1 - below, at) + at[0]) if workers else 0.0


@pytest.mark.parametrize(
    "workers", [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 256))]
)
def test_a_step_lasts_as_long_as_the_slowest_of_exponential_times(workers):
    found = simulate_steps(
        make_row(workers, 0.5), np.ones(workers), 20_000, generator(), scatter=exponential
    )
    harmonic = sum(1 / n for n in range(1, workers + 1))
    assert found.slowest.mean() == pytest.approx(0.5 * harmonic, rel=WITHIN)
    assert found.computing.mean() == pytest.approx(0.5, rel=WITHIN)


@pytest.mark.parametrize(
    "workers", [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 256))]
)
def test_a_step_lasts_as_long_as_the_slowest_of_normal_times(workers):
    found = simulate_steps(make_row(workers), np.ones(workers), 20_000, generator(), scatter=normal)
    expected = 1 + 0.1 * largest_normal(workers)
    assert found.slowest.mean() == pytest.approx(expected, rel=WITHIN)


@pytest.mark.parametrize("restart", [pytest.param(0.0, marks=pytest.mark.slow), 60.0])
def test_failures_waste_what_daly_says_at_the_best_interval(restart):
    cost, mean, work = 20.0, 4000.0, 4_000_000.0
    best = daly_interval(cost, mean)
    hazards = Hazards(1, failures=1 / mean, interval=best, cost=cost, restart=restart)
    found = fmean(run_through(work, hazards, generator(n)).seconds for n in range(40))
    expected = expected_seconds(work, best, cost, restart, mean)
    assert found == pytest.approx(expected, rel=WITHIN)
    assert found / work - 1 == pytest.approx(expected / work - 1, rel=0.05)


def test_the_best_interval_is_where_the_expected_time_is_least():
    cost, mean = 20.0, 4000.0
    tried = np.geomspace(20, 4000, 2001)
    seconds = [expected_seconds(1.0, float(one), cost, 0.0, mean) for one in tried]
    least = float(tried[int(np.argmin(seconds))])
    assert daly_interval(cost, mean) == pytest.approx(least, rel=0.01)
    assert young_interval(cost, mean) == pytest.approx(400.0)
    assert abs(young_interval(cost, mean) - least) > abs(daly_interval(cost, mean) - least)
    assert daly_interval(100.0, 10.0) == 10.0  # checkpoints that take longer than work lasts
    assert expected_seconds(100.0, 10.0, 1.0, 5.0, inf) == pytest.approx(110.0)
    assert expected_seconds(1.0, 1e6, 1.0, 1.0, 1.0) == inf


@pytest.mark.slow
def test_models_queue_at_the_servers_link_as_pollaczek_and_khinchine_say():
    """M/D/1: many workers with exponential rounds push at random, and each push takes the same."""
    workers, service, load = 2000, 0.001, 0.5
    mean = workers * service / load
    random = generator()
    until = 100 * mean
    found = simulate_rounds(
        workers,
        10**6,
        lambda _: random.exponential(mean),
        transfer=0.0,
        service=service,
        until=until,
    )
    load = found.pushes / until * service
    assert found.queue == pytest.approx(load * service / (2 * (1 - load)), rel=WITHIN)


def test_workers_that_wait_for_each_other_are_as_slow_as_the_slowest():
    found = simulate_rounds(3, 4, lambda worker: 1.0 + worker, transfer=0.0, service=0.0, ahead=0)
    assert found.seconds == pytest.approx(12.0)
    assert found.waiting.tolist() == pytest.approx([6.0, 3.0, 0.0])  # after three rounds of four
    free = simulate_rounds(3, 4, lambda worker: 1.0 + worker, transfer=0.0, service=0.0)
    assert free.waiting.tolist() == [0.0, 0.0, 0.0]
    assert free.seconds == pytest.approx(12.0)
    bounded = simulate_rounds(3, 4, lambda worker: 1.0 + worker, transfer=0.0, service=0.0, ahead=1)
    assert 0.0 < bounded.waiting[0] < 6.0


# -------------------------------------------------------------------------------- what always holds


@calmly
@given(
    bandwidth=st.floats(1e6, 1e11),
    more=st.floats(1.0, 100.0),
    workers=st.integers(1, 40),
    host=st.integers(1, 8),
    exchange=st.sampled_from(["ring", "tree"]),
)
def test_more_bandwidth_is_never_slower(bandwidth, more, workers, host, exchange):
    def seconds(bandwidth: float) -> list[float]:
        asked = {"latency": 1e-5, "bandwidth": bandwidth, "workers_per_host": host}
        found = bw.simulate(make_plan(), workers=workers, exchange=exchange, **asked, **FAST)
        (one,) = found.clusters
        return [one.seconds.low, one.seconds.value, one.seconds.high]

    slow, fast = seconds(bandwidth), seconds(more * bandwidth)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(fast, slow, strict=True))


@calmly
@given(
    work=st.floats(1.0, 1e6),
    interval=st.floats(0.1, 1e5),
    cost=st.floats(0.0, 100.0),
    spares=st.integers(0, 3),
)
def test_without_failures_no_work_is_lost(work, interval, cost, spares):
    hazards = Hazards(5, interval=interval, cost=cost, restart=50, replacement=9, spares=spares)
    found = run_through(work, hazards, generator())
    assert (found.lost, found.restarts, found.waiting) == (0.0, 0.0, 0.0)
    assert found.done == pytest.approx(work)
    assert found.seconds == pytest.approx(work + found.checkpoints)


@calmly
@given(
    mean=st.floats(200.0, 1e5),
    interval=st.floats(10.0, 500.0),
    notice=st.sampled_from([0.0, 1e9]),
    replacement=st.floats(0.0, 5000.0),
    spares=st.integers(0, 3),
    until=st.sampled_from([inf, 3000.0]),
    seed=st.integers(0, 100),
)
def test_every_second_of_a_training_is_accounted_for(
    mean, interval, notice, replacement, spares, until, seed
):
    hazards = Hazards(
        4, 1 / mean / 8, 1 / mean / 8, notice, interval, 3.0, 20.0, replacement, spares
    )
    found = run_through(10_000.0, hazards, generator(seed), until=until, record_spans=True)
    parts = found.done + found.checkpoints + found.lost + found.restarts + found.waiting
    assert parts == pytest.approx(found.seconds)
    assert found.seconds <= until * (1 + 1e-9)
    assert found.done <= 10_000.0 * (1 + 1e-9)
    if until == inf:
        assert found.done == pytest.approx(10_000.0)
    ends = [0.0, *(span.end for span in found.spans)]
    assert [span.start for span in found.spans] == pytest.approx(ends[:-1])
    told = run_through(10_000.0, hazards, generator(seed), until=until)
    assert told.seconds == pytest.approx(found.seconds)


def test_notice_saves_the_work_and_spares_save_the_wait():
    def course(**changes):
        hazards = {"workers": 10, "preemptions": 1e-5, "interval": 600.0, "cost": 5.0}
        hazards |= {"restart": 60.0, "replacement": 7200.0} | changes
        return run_through(200_000.0, Hazards(**hazards), generator(1))

    plain = course()
    assert plain.counts["preemptions"] > 3
    assert plain.counts["failures"] == 0
    assert plain.lost > 0
    assert course(notice=5.0).lost == 0.0
    assert plain.waiting > 0
    assert course(spares=10).waiting == 0.0
    assert course(spares=10).seconds < plain.seconds


def test_seeds_reproduce_every_bit_and_others_do_not():
    keys = {"workers": (2, 5), "mtbf_hours": 0.1, "straggler_share": 0.1, **FAST}
    found = [bw.simulate(make_plan(), seed=seed, **keys) for seed in (3, 3, 4)]
    assert found[0].model_dump_json() == found[1].model_dump_json()
    assert found[0].clusters != found[2].clusters


@pytest.mark.parametrize("seconds", [1e-6, 0.03, 0.3], ids="{:g} s".format)
def test_a_worker_is_a_straggler_for_the_share_of_its_time_that_is_stated(seconds):
    """So at three times the time for three tenths of it, 0.7 + 0.3 / 3 of the work gets done."""
    plan = make_plan()
    asked = {"speed_spread": 0.0, "step_spread": 0.0, "repeats": 8, "epochs": 500, "steps": 4000}
    plain = bw.simulate(plan, workers=1, **asked).clusters[0]
    asked |= {"straggler_share": 0.3, "straggler_slowdown": 3, "straggler_seconds": seconds}
    slower = bw.simulate(plan, workers=1, **asked).clusters[0]
    assert slower.step_seconds.value / plain.step_seconds.value == pytest.approx(1.25, rel=0.05)


def test_steps_end_sooner_than_a_straggler_that_is_one_for_a_moment():
    """Of a step of a second at a thousandth of the speed, a straggler of a second leaves most."""
    slow = Stragglers(share=0.01, slowdown=1000.0, seconds=1.0)
    found = simulate_steps(
        make_row(1), np.ones(1), 20_000, generator(), scatter=lognormal(0), stragglers=slow
    )
    assert found.slowest.max() < 30
    assert found.slowest.mean() == pytest.approx(1 / (0.99 + 0.01 / 1000), rel=0.01)


@pytest.mark.slow
def test_a_straggler_stays_one_for_the_seconds_that_are_stated_whatever_steps_exchange():
    (row,) = ImaginedCluster(make_plan(), Scenario(), 1).rows()
    alone = float(row.sample_seconds[0] * row.batches[0] + row.step_seconds[0])
    row = replace(row, exchange=9 * alone)
    slow = Stragglers(share=0.2, slowdown=1.01, seconds=100 * alone)
    found = simulate_steps(
        row, np.ones(1), 100_000, generator(), scatter=lognormal(0), stragglers=slow
    )
    is_slow = found.slowest > 1.005 * alone
    times = np.count_nonzero(is_slow[1:] > is_slow[:-1])
    assert is_slow.sum() / times == pytest.approx(10, rel=0.1)  # of ten times as long steps


def test_a_measured_cluster_takes_what_the_plan_predicts():
    profile = make_profile()
    for workers in (1, 2):
        plan = bw.plan(profile, epochs=3, workers=workers, global_batch=64)
        (found,) = bw.simulate(plan, profile=profile).clusters
        predicted = plan.stages[0].predicted_epoch_seconds.value
        training = found.seconds.value * (1 - found.shares.evaluation) / 3
        assert training == pytest.approx(predicted, rel=0.05)
        assert sum(found.shares.model_dump().values()) == pytest.approx(1.0)
        (alone,) = bw.simulate(plan, speed_spread=0, step_spread=0).clusters  # by the plan's words
        assert alone.seconds.value == pytest.approx(plan.chosen.train_seconds.value, rel=0.05)


@pytest.mark.parametrize("launch", ["local", "virtual"])
def test_without_a_profile_the_exchange_counts_once(launch):
    """The plan's epochs include it; the times of its virtual workers do not."""
    link = {"latency": 1e-3, "bandwidth": 1e7}
    keys = {"workers": 8, "global_batch": 128, "epochs": 3, "link": link, "launch": launch}
    plan = bw.plan(make_profile(), **keys)
    asked = {"speed_spread": 0, "step_spread": 0, "samples": 25_600, **FAST}
    size, step = plan.network.trained_bytes, plan.chosen.step_seconds.value
    exchanges = {n: 2 * (n - 1) * (1e-3 + size / n / 1e7) for n in (8, 16)}
    assert exchanges[8] > 0.3 * step
    for stated in ({}, link):
        same, more = bw.simulate(plan, workers=(8, 16), **stated, **asked).clusters
        assert same.step_seconds.value == pytest.approx(step, rel=0.1)
        longer = more.step_seconds.value - same.step_seconds.value
        assert longer == pytest.approx(exchanges[16] - exchanges[8], rel=0.1)
    (quicker,) = bw.simulate(plan, latency=1e-6, bandwidth=1e12, **asked).clusters
    assert quicker.step_seconds.value <= same.step_seconds.value
    measured = bw.plan(make_profile(), workers=2, global_batch=64, epochs=3)
    notes = bw.simulate(measured, workers=4, **asked).notes
    assert any("include the exchange of its own workers" in one for one in notes)


@pytest.mark.parametrize(
    "stated", [{}, {"speeds": (1, 0.5)}, {"overheads": (1, 4)}, {"links": (1, 0.2)}]
)
def test_a_virtual_cluster_is_simulated_as_its_plan_says_whatever_the_host_took(stated):
    """Two workers of the host exchanged in 3 ms, and slowed each other."""
    link = {"latency": 1e-3, "bandwidth": 1e7}
    keys = {"workers": 2, "global_batch": 64, "epochs": 3, "link": link, "launch": "virtual"}
    plan = bw.plan(make_profile(), virtual=stated, **keys)
    asked = {"speed_spread": 0, "step_spread": 0, "samples": 6400, **FAST}
    evaluating = []
    for profile in ((), make_profile()):
        (found,) = bw.simulate(plan, profile=profile, **asked).clusters
        step = plan.chosen.step_seconds.value
        assert found.step_seconds.value == pytest.approx(step, rel=0.1)
        evaluating.append(found.shares.evaluation * found.seconds.value)
    assert evaluating[0] == pytest.approx(evaluating[1], rel=0.1)


def test_a_virtual_plan_without_times_takes_those_of_the_profile():
    job = make_job(launch="virtual", workers=2, global_batch=64, epochs=3)
    plan = plan_without_profile(job, make_data(), make_network())
    asked = {"samples": 6400, **FAST}
    with pytest.raises(PlanError, match="--profile"):
        bw.simulate(plan, **asked)
    (found,) = bw.simulate(plan, profile=make_profile(), **asked).clusters
    assert found.step_seconds.value > 0


def test_without_a_profile_a_cycle_takes_what_its_plan_predicts():
    """Its rows tell the time of computing by itself, and that of an epoch with the exchange."""
    plan = planned("cyclic", epochs=14)
    asked = {"speed_spread": 0, "step_spread": 0, **FAST}
    (found,) = bw.simulate(plan, **asked).clusters
    predicted = sum(stage.epochs * stage.predicted_epoch_seconds.value for stage in plan.stages)
    training = found.seconds.value * (1 - found.shares.evaluation)
    assert training == pytest.approx(predicted, rel=0.02)
    assert found.shares.exchange > 0.02


def test_what_a_plan_counts_for_lost_workers_is_not_taken_for_evaluations():
    goal = {"preemptions_per_hour": 500.0, "restart_seconds": 0, "checkpoint_cost": 0}
    alike = {"speed_spread": 0, "step_spread": 0, "checkpoint_cost": 0, "checkpoint_seconds": 60}
    none = {"preemptions_per_hour": 0, **alike, **FAST}
    keys = {"workers": 2, "global_batch": 64, "epochs": 30}
    plans = [bw.plan(make_profile(), goal=one, **keys) for one in ({}, goal)]
    assert plans[1].chosen.train_seconds.value > 1.05 * plans[0].chosen.train_seconds.value
    plain, losing = (bw.simulate(plan, **none).clusters[0] for plan in plans)
    assert losing.shares.evaluation == pytest.approx(plain.shares.evaluation, rel=1e-6)


def test_a_longer_update_takes_its_time_in_a_simulation_too():
    updates = [
        UpdateTime(optimizer=name, seconds=seconds, low=seconds, high=seconds, repeats=9)
        for name, seconds in (("sgd", 0.001), ("muon", 0.021))
    ]
    profile = make_profile(job=make_job(optimizer="auto", learning_rate="auto"), updates=updates)
    asked = {"speed_spread": 0, "step_spread": 0}
    steps = {
        name: bw.simulate(
            bw.plan(profile, epochs=3, workers=2, global_batch=64, optimizer=name),
            profile=profile,
            **asked,
        )
        .clusters[0]
        .step_seconds.value
        for name in ("sgd", "muon")
    }
    assert steps["muon"] - steps["sgd"] == pytest.approx(0.02, rel=0.05)


def test_shares_follow_speeds_by_the_very_class_that_training_uses(monkeypatch):
    made = []

    class Watched(balancer.Balancer):
        def __init__(self, *given, **known):
            super().__init__(*given, **known)
            made.append(self)

    plan = dynamic_plan()
    monkeypatch.setattr(balancer, "Balancer", Watched)
    asked = {"workers": 4, "speeds": (1, 0.5), "samples": 100_000, "global_batch": 256, **FAST}
    (found,) = bw.simulate(plan, rebalance_steps=10, **asked).clusters
    assert len(made) == FAST["repeats"]
    assert found.rebalancings >= 1
    (fixed,) = bw.simulate(plan, rebalance_steps=10**6, **asked).clusters
    assert fixed.rebalancings == 0
    assert found.seconds.value < 0.85 * fixed.seconds.value
    with pytest.raises(PlanError, match="rebalance_steps=10: with method=plain shares stay"):
        bw.simulate(make_plan(), rebalance_steps=10)


def test_kinds_of_workers_keep_their_batches_and_speeds():
    profiles = [make_kind_profile("a", 2.0), make_kind_profile("b")]
    kinds = [{"kind": "a", "count": 1, "price": 2.0}, {"kind": "b", "count": 1, "price": 1.0}]
    keys = {"epochs": 2, "workers": 2, "link": {"latency": 1e-5, "bandwidth": 1e10}}
    plan = bw.plan(profiles, goal={"kinds": kinds}, global_batch=192, resolutions=(96,), **keys)
    assert [one.kind for one in plan.kinds] == ["a", "b"]
    (found,) = bw.simulate(plan, profile=profiles, workers=10, spares=2, **FAST).clusters
    assert found.global_batch_size == 5 * 192
    assert found.cost.value == pytest.approx(found.seconds.value / 3600 * 15 * 12 / 10)
    with pytest.raises(PlanError, match=r"kind 'b', the profiles only of 'a'"):
        bw.simulate(
            plan.model_copy(update={"job": plan.job.model_copy(update={"goal": bw.Job().goal})}),
            profile=profiles[:1],
        )


def test_rounds_with_a_server_are_simulated_and_stragglers_lengthen_them():
    with pytest.raises(PlanError, match="give what it was made from with --profile"):
        bw.simulate(make_server_plan(), workers=2)
    plan = make_server_plan(stages=({"sample_seconds": 0.001, "step_seconds": 0.01},))
    asked = {"workers": (4, 64), "samples": 100_000, "repeats": 3}
    found = bw.simulate(plan, **asked)
    slower = bw.simulate(plan, straggler_share=0.5, straggler_slowdown=4, **asked)
    for one, other in zip(found.clusters, slower.clusters, strict=True):
        assert sum(one.shares.model_dump().values()) == pytest.approx(1.0)
        assert one.shares.exchange > 0
        assert other.seconds.value > one.seconds.value
    assert found.timeline.steps == ()


def test_links_that_differ_slow_the_rounds_of_their_workers_as_on_the_virtual_cluster():
    """At the end of its last round a worker has pushed its model once more than it has pulled."""
    keys = {"launch": "virtual", "virtual": {"links": (1, 0.1)}, "resolutions": (8,)}
    job = make_job(workers=2, link={"latency": 1e-3, "bandwidth": 1e6}, **keys)
    times = {"sample_seconds": 0.001, "step_seconds": 0.01}
    plan = make_server_plan(stages=(times,), job=job)
    size = 4 * plan.network.parameters
    seconds = [Cluster(job, 2).transfer_seconds(rank, size) for rank in range(2)]
    found = ImaginedCluster(plan, Scenario(), 4).transfer_seconds
    assert found == pytest.approx([seconds[0]] * 2 + [seconds[1]] * 2)
    still = {"speed_spread": 0, "step_spread": 0, "epochs": 10, "repeats": 1, "steps": 50}
    (slow,) = bw.simulate(plan, **still).clusters
    computing = 10 * 3 * (0.001 * 2 + 0.01)  # six samples by two in each of ten rounds
    assert slow.seconds.value == pytest.approx(computing + 19 * seconds[1], rel=WITHIN)
    (alike,) = bw.simulate(plan, latency=1e-3, bandwidth=1e6, **still).clusters
    assert alike.seconds.value < slow.seconds.value / 4


def test_of_many_workers_few_steps_are_simulated_and_a_note_says_so(monkeypatch):
    assert simulating._MAX_STEPS < 5 * 10**6  # of a million workers, half a second a repeat
    monkeypatch.setattr(simulating, "_MAX_STEPS", 1000)
    found = bw.simulate(make_plan(), workers=100, samples=10**6, repeats=1)
    words = "a row goes on as in its first 10 steps, since those of 100 workers take long"
    assert [note for note in found.notes if note.startswith(words)]
    assert not [note for note in bw.simulate(make_plan(), **FAST).notes if "first" in note]
    for plan in (make_server_plan(), dynamic_plan()):
        with pytest.raises(PlanError, match=r"^workers=1000000: .* give 20000 or less$"):
            bw.simulate(plan, workers=10**6, samples=10**9)


def test_a_search_says_all_assumptions_whichever_combination_is_the_best():
    alone = bw.simulate(make_plan(), mtbf_hours=100, checkpoint_seconds=60, **FAST)
    searched = bw.simulate(
        make_plan(), mtbf_hours=100, search={"checkpoint_seconds": [0.01, 60]}, **FAST
    )
    assert searched.searches[0].best == (60,)
    assert sorted(searched.notes) == sorted(alone.notes)


def test_where_all_are_alike_nobody_waits_whatever_rounding_does():
    """One worker with a server, as docs/simulate.md has it, and equal ones without."""
    server = make_server_plan(stages=({"sample_seconds": 0.001, "step_seconds": 0.01},))
    for seed in range(8):
        (alone,) = bw.simulate(server, workers=1, seed=seed, **FAST).clusters
        assert alone.shares.stragglers == pytest.approx(0, abs=1e-12)
    for seconds in (0.1, 0.3, 0.7, 1.1):  # a mean of 37 such numbers is not always one of them
        for workers in (3, 6, 37, 49):
            row = make_row(workers, seconds)
            speeds, random = np.ones(workers), generator()
            found = simulate_steps(row, speeds, 50, random, scatter=lognormal(0.0))
            assert found.totals(50, 50.0)[1] >= 0


def test_a_worker_that_is_lost_as_the_hours_end_is_not_waited_for():
    class Once:
        """Loses a worker once."""

        def exponential(self, mean):
            return 86.21002585905049

        def random(self):
            return 0.0

    cycle = {"interval": 2.5632734193629285, "cost": 0.14804569023655498}
    hazards = Hazards(1, failures=1.0, replacement=5, restart=1, **cycle)
    assert run_through(100.0, hazards, Once(), until=86.21002585905049).waiting == 0


@pytest.mark.parametrize("seconds", [1e-14, 1e-300, 5e-324])
def test_stragglers_for_a_moment_slow_a_servers_rounds_by_the_mean(seconds):
    """There are more of them in a round than can be drawn."""
    plan = make_server_plan(stages=({"sample_seconds": 0.001, "step_seconds": 0.01},))
    asked = {"straggler_share": 0.5, "straggler_slowdown": 3.0, **FAST}
    (found,) = bw.simulate(plan, straggler_seconds=seconds, **asked).clusters
    (often,) = bw.simulate(plan, straggler_seconds=1e-6, **asked).clusters
    assert found.step_seconds.value == pytest.approx(often.step_seconds.value, rel=0.02)


def test_checkpoints_are_assumed_to_cost_what_is_in_them():
    def notes(make=make_plan, **more):
        network = make_plan().network.model_copy(update={"trained_bytes": 200_000_000})
        plan = make(network=network, **more)
        return bw.simulate(plan, samples=10**6, epochs=9, mtbf_hours=2).model_dump_json()

    weights = 4 * make_plan().network.parameters / 200e6
    assert f"holds up training for {weights + 1:.2g} s" in notes()
    assert f"holds up training for {weights + 2:.2g} s" in notes(average_epochs=0.5)
    assert f"holds up training for {weights + 2:.2g} s" in notes(update="adamw")
    assert f"holds up training for {weights:.2g} s" in notes(make_dual_plan, update="adamw")


def test_a_search_finds_the_best_interval_on_the_same_numbers():
    asked = {"samples": 10**6, "epochs": 300, "workers": 8, "mtbf_hours": 2, "checkpoint_cost": 5}
    values = [5, 100, 5000]
    found = bw.simulate(make_plan(), search={"checkpoint_seconds": values}, price=1.0, **asked)
    (told,) = found.searches
    assert [one.values for one in told.tried] == [(one,) for one in values]
    assert (told.best, told.level) == ((100,), ())
    assert found.clusters[0].checkpoint_seconds == 100
    best = told.tried[1]
    assert (best.over_best.value, best.over_best.low) == (0.0, 0.0)
    for one in (told.tried[0], told.tried[2]):
        assert 0 < one.over_best.low <= one.over_best.value <= one.over_best.high


def test_a_search_of_several_keys_finds_the_best_of_all_combinations(monkeypatch):
    """By brute force, each combination a simulation of its own; the steps are simulated once."""
    stated = {"samples": 10**6, "epochs": 300, "workers": 8, "mtbf_hours": 20, "price": 1.0}
    stated |= {"checkpoint_cost": 5, "replacement_seconds": 7200, "repeats": 4, "steps": 50}
    search = {"checkpoint_seconds": [20, 300, 30_000], "spares": [0, 1, 2]}
    costs = {
        values: bw.simulate(make_plan(), **stated, **dict(zip(search, values, strict=True)))
        .clusters[0]
        .cost.value
        for values in product(*search.values())
    }
    made = []
    real = simulating.simulate_steps
    monkeypatch.setattr(
        simulating, "simulate_steps", lambda *a, **k: made.append(1) or real(*a, **k)
    )
    found = bw.simulate(make_plan(), search=search, **stated)
    (told,) = found.searches
    assert {one.values: one.cost.value for one in told.tried} == pytest.approx(costs)
    assert told.best == min(costs, key=costs.get)
    assert found.clusters[0].cost.value == pytest.approx(min(costs.values()))
    assert (found.clusters[0].checkpoint_seconds, found.clusters[0].spares) == told.best
    assert len(made) == stated["repeats"]
    assert [value for value, _ in told.along("spares")] == [0, 1, 2]
    assert told.with_the_best("spares") == f"checkpoint_seconds={told.best[0]:g}"


def test_values_with_which_a_training_never_ends_are_left_out_of_a_search():
    asked = {"samples": 10**6, "mtbf_hours": 0.01} | FAST
    with pytest.raises(PlanError, match="as good as never end"):
        bw.simulate(make_plan(), checkpoint_seconds=1000, **asked)
    found = bw.simulate(
        make_plan(), search={"checkpoint_seconds": [1, 1000]}, checkpoint_seconds=1000, **asked
    )
    assert (found.searches[0].best, found.searches[0].endless) == ((1,), ((1000,),))


def test_links_inside_hosts_concern_the_values_with_several_workers():
    link = {"latency": 1e-4, "bandwidth": 1e8, "host_latency": 1e-6, "host_bandwidth": 1e11}
    search = {"workers_per_host": [1, 4]}
    found = bw.simulate(make_plan(), workers=8, search=search, **link, **FAST)
    assert found.searches[0].best == (4,)
    with pytest.raises(ArgumentError, match="need workers_per_host=2 or more"):
        bw.simulate(make_plan(), workers=8, search={"spares": [0, 1]}, **link, **FAST)


def test_a_notice_of_preemption_costs_a_checkpoint_each_time():
    hazards = Hazards(1, preemptions=1 / 1000, notice=60.0, interval=1e9, cost=60.0, restart=30.0)
    found = run_through(10**6, hazards, generator())
    lost = found.counts["preemptions"]
    assert found.lost == 0.0
    assert found.checkpoints == pytest.approx(60 * lost, rel=0.05)
    # Of 1000 s between two preemptions, those while it restarts set it back, too.
    assert found.seconds == pytest.approx(10**6 + found.checkpoints + found.restarts)


def test_of_many_repeats_the_steps_of_the_first_alone_are_kept():
    found = simulating._SimulatedTrainings(make_plan(), Scenario(**FAST), 2, ())
    assert [one.series is not None for one in found.repeats] == [True, False]


def test_a_plan_takes_what_was_searched_and_says_where_each_value_came_from():
    plan = dynamic_plan(goal={"preemptions_per_hour": 2, "checkpoint_cost": 5})
    assert "Daly's for 5.00 s" in plan.explain()
    search = {"checkpoint_seconds": [0.5, 40, 5000], "rebalance_steps": [0, 3], "spares": [0, 1]}
    found = bw.simulate(plan, search=search, straggler_share=0.3, checkpoint_cost=0.01, price=1)
    taken = bw.take_searched(plan, found)
    (searched,) = found.searches
    best = dict(zip(searched.keys, searched.best, strict=True))
    assert taken.job.checkpoint_seconds == best["checkpoint_seconds"] != plan.job.checkpoint_seconds
    assert taken.job.rebalance_steps == best["rebalance_steps"] != plan.job.rebalance_steps
    assert taken.stages == plan.stages
    told = {one.choice: one for one in taken.reasons}
    assert len(told) == len(taken.reasons)
    for key, choice in [("spares", "spare workers"), ("checkpoint_seconds", "checkpoint interval")]:
        assert told[choice].value.startswith(f"{best[key]:g}"[:2])
        assert len(told[choice].alternatives) == len(search[key]) - 1
        assert "simulated with straggler_share=0.3 checkpoint_cost=0.01 price=1" in told[choice].why
    (method,) = (one for one in taken.reasons if one.choice == "method")
    assert (f"every {best['rebalance_steps']:g} steps" in method.why) == bool(
        best["rebalance_steps"]
    )
    for keys, words in [
        ({"workers": 4}, "workers=4: the plan is for 2"),
        ({"samples": 9999}, "samples=9999: the plan takes no values"),
        ({"search": {}}, "nothing was searched"),
    ]:
        asked = {"search": {"spares": [0, 1]}} | FAST | keys
        with pytest.raises(ArgumentError, match=words):
            bw.take_searched(plan, bw.simulate(plan, **asked))


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"workers": 0}, "simulate: workers.0 = 0: input should be greater than or equal to 1"),
        ({"workers": "8-2"}, "workers=8-2: give a range as 8-1024"),
        ({"workers": "many"}, "workers.0 = 'many'"),
        ({"workers": (2, 2)}, "workers names 2 twice"),
        ({"worker": 2}, "unknown key of simulate 'worker': did you mean 'workers'"),
        ({"latency": 1e-3}, "latency and bandwidth are stated together"),
        ({"host_latency": 0, "host_bandwidth": 1e9}, "need workers_per_host=2 or more"),
        ({"mtbf_hours": -1}, "mtbf_hours = -1"),
        ({"price": 1e308}, "price = 1e+308: input should be less than or equal to 1"),
        ({"mtbf_hours": 1, "replacement_seconds": 1e308}, "replacement_seconds = 1e+308"),
        ({"mtbf_hours": 1, "restart_seconds": 1e308}, "restart_seconds = 1e+308"),
        ({"hours": True}, "this key is no yes or no"),
        ({"workers": 10_000}, "workers=10000: an epoch of 1,437 images leaves some without any"),
        ({"workers": 8, "global_batch": 4}, "global_batch=4 leaves some of 8 workers without"),
        ({"mtbf_hours": 1e-6}, "as good as never end"),
        ({"mtbf_hours": 1e-6, "workers": 1}, "as good as never end; try a shorter restart_sec"),
        ({"mtbf_hours": 0.01, "restart_seconds": 1000}, "as good as never end"),
        ({"mtbf_hours": 1e-320}, "as good as never end"),
        ({"mtbf_hours": 0.001, "checkpoint_cost": 0}, "as good as never end"),
        (
            {"mtbf_hours": 1, "checkpoint_cost": 0, "checkpoint_seconds": 1e5, "samples": 10**9},
            "try checkpoint_seconds=18, fewer",
        ),
        ({"mtbf_hours": 1, "samples": 10**15}, "losses are gone through at most: give fewer epo"),
        ({"checkpoint_seconds": 1e-12}, "leaves hardly any time for training"),
        ({"latency": 0, "bandwidth": 1e-306}, "bandwidth = 1e-306: input should be greater than"),
        ({"latency": 1e300, "bandwidth": 1}, "latency = 1e+300: input should be less than or"),
        ({"speeds": (1, 5e-324)}, "speeds.1 = 5e-324: input should be greater than or equal to 0"),
        ({"speeds": "1e308"}, "speeds.0 = '1e308': input should be less than or equal to 1"),
        ({"straggler_share": 0.9, "straggler_slowdown": 1e308}, "straggler_slowdown = 1e+308"),
        ({"workers": "²-³"}, "workers.0 = '²-³'"),
        ({"workers": f"1-{'9' * 5000}"}, "workers.0 = '1-999"),
        ({"search": "spares=1"}, "search is the text 'spares=1': give a dictionary of values by"),
        ({"search": ["spares"]}, "search is the list ['spares']: give a dictionary of values by"),
        ({"global_batch": 10**30}, "less than or equal to"),
        ({"search": {"seed": [1, 2]}}, "--search seed: search one of"),
        ({"search": {"spares": [-1]}}, "spares = -1"),
        ({"search": {"spares": [1, 1.0]}}, "--search spares names 1 twice"),
        ({"search": {"spares": 3}}, "--search spares: give its values"),
        ({"search": {"checkpoint_seconds": [None]}}, "--search checkpoint_seconds: give its"),
        (
            {"search": {"spares": [*range(40)], "checkpoint_seconds": [*range(1, 41)]}},
            "1,600 combinations of",
        ),
        ({"search": {"spares": [0, 1]}, "hours": 1e-4}, "leave out hours="),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_makes_no_sense_ends_in_one_line(keys, words):
    with pytest.raises(BatchwrightError) as told:
        bw.simulate(make_plan(), **keys)
    assert words in str(told.value)
    assert "\n" not in str(told.value)
    assert told.value.exit_code == 2


def test_a_plan_whose_times_are_too_long_for_any_number_is_refused():
    far = Estimate(value=1e308, low=1e308, high=1e308)
    plan = make_plan()
    stage = plan.stages[0].model_copy(update={"predicted_epoch_seconds": far})
    with pytest.raises(PlanError, match="a step takes so long that no number holds it"):
        bw.simulate(plan.model_copy(update={"stages": (stage,)}), **FAST)


def test_checkpoints_without_end_are_not_gone_through_one_by_one():
    hazards = Hazards(2, failures=1e-4, interval=1e-9)
    assert run_through(1000.0, hazards, generator(), record_spans=True).done == pytest.approx(1000)


def test_a_profile_of_something_else_is_refused():
    with pytest.raises(PlanError, match="give the profile that the plan was made from"):
        bw.simulate(make_plan(), profile=make_kind_profile("a"))
    with pytest.raises(ArgumentError, match="profile= of simulate takes a profile"):
        bw.simulate(make_plan(), profile=[3])


def test_numbers_of_workers_are_listed_or_a_range_of_doublings():
    assert scenario_of({"workers": "8,16"}).workers == (8, 16)
    assert scenario_of({"workers": "8-50"}).workers == (8, 16, 32, 50)
    assert scenario_of({"workers": "8-8"}).workers == (8,)
    assert scenario_of({"workers": 8}).workers == (8,)
    assert scenario_of({"workers": None, "speeds": None}) == Scenario()
    assert scenario_of({"speeds": "1,0.5"}).speeds == (1.0, 0.5)


TIMES = [key for key in Scenario.model_fields if key.endswith("_seconds")]
TIMES += ["checkpoint_cost", "latency", "host_latency"]
TOGETHER = {"latency": {"bandwidth": 1e9}}  # what some of them are stated with
TOGETHER["host_latency"] = {"host_bandwidth": 1e9, "workers_per_host": 2}


@pytest.mark.parametrize("key", TIMES)
def test_times_are_written_with_their_unit_as_in_a_job(key):
    for words, seconds in (("90s", 90), ("1.5h", 5400), ("2 h 30 min", 9000), ("45", 45)):
        told = scenario_of({key: words, **TOGETHER.get(key, {})})
        assert getattr(told, key) == seconds
    said = "input should be a number of seconds, or a time such as 90s, 10min or 2h$"
    for words in ("2 parsecs", "2 h 30", "1,000 s"):
        with pytest.raises(ArgumentError, match=f"simulate: {key} = '{words}': {said}"):
            scenario_of({key: words})


@pytest.mark.parametrize("key", ["hours", "mtbf_hours"])
def test_hours_have_another_unit_where_it_is_given(key):
    for words, hours in (("36", 36), ("1.5d", 36), ("90min", 1.5), ("2 h 30 min", 2.5)):
        assert getattr(scenario_of({key: words}), key) == hours
    said = f"simulate: {key} = '2 parsecs': input should be a number of hours, or a time such as"
    with pytest.raises(ArgumentError, match=said):
        scenario_of({key: "2 parsecs"})


def test_bandwidths_have_units_as_in_a_job():
    told = scenario_of({"latency": "0.05ms", "bandwidth": "10Gbit/s"})
    assert (told.latency, told.bandwidth) == (5e-5, 1.25e9)
    with pytest.raises(ArgumentError, match=r"or a rate such as 1\.25GB/s or 10Gbit/s"):
        scenario_of({"latency": 0, "bandwidth": "10 Gb/s"})


def test_values_that_are_searched_may_have_units():
    searched = {"checkpoint_seconds": ["10", "1min"]}
    found = bw.simulate(make_plan(), search=searched, **FAST)
    assert [one.values for one in found.searches[0].tried] == [(10,), (60,)]
    with pytest.raises(ArgumentError, match="checkpoint_seconds names 60 twice"):
        bw.simulate(make_plan(), search={"checkpoint_seconds": ["60s", "1min"]}, **FAST)


# ------------------------------------------------------------------------------------- the verb


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile = make_profile()
    profile.save("profile.json")
    bw.plan(profile, epochs=3, workers=2).save("plan.json")
    return tmp_path


@pytest.fixture
def run(command):
    """Runs ``batchwright simulate WORDS`` in this process: stdout and stderr."""

    def call(*words, status=0):
        code, out, err = command("simulate", *words)
        assert code == status, err
        return out, err

    return call


@pytest.mark.slow
def test_the_command_prints_a_record_tables_and_a_figure(files, run):
    words = ("workers=2,8", "samples=50000", "price=1", "mtbf_hours=1", "repeats=3")
    out, err = run("plan.json", *words, "--profile", "profile.json", "--figure", "s.svg")
    found = Simulation.model_validate_json(out)
    assert [one.workers for one in found.clusters] == [2, 8]
    assert "where the time goes" in err
    assert "assumed: links between hosts" in err
    assert Path("s.svg").read_text().startswith("<?xml")
    run("plan.json", *words, "--search", "spares=0,1", "--out", "found.json")
    kept = bw.load("found.json")
    assert isinstance(kept, Simulation)
    assert kept.searches[0].keys == ("spares",)
    asked = ("mtbf_hours=1", "--search", "checkpoint_seconds=1,900", "--out", "found.json")
    _, err = run("plan.json", *asked, "--write-plan", "taken.json", "--explain")
    (best,) = bw.load("found.json").searches[0].best
    assert bw.load("taken.json").job.checkpoint_seconds == best
    assert "checkpoint interval" in err
    assert "2 workers" in repr(kept)


def test_a_key_that_is_given_twice_is_refused():
    twice = ["workers=8", "hours=1", "workers=16"]
    with pytest.raises(ArgumentError, match=r"^workers=16: workers=8 is given as well; leave one"):
        bw.simulate(make_plan(), twice)


def test_bad_words_end_the_command_with_one_line(files, run):
    for words in (
        ["workers=8", "workers=16"],
        ["workers=0"],
        ["mtbf_hours=1e-7"],
        ["--search", "spares"],
        ["--explain"],
    ):
        out, err = run("plan.json", *words, status=2)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert out == ""
    run(status=2)


@pytest.mark.slow
def test_simulating_loads_no_torch(files):
    code = (
        "import sys, batchwright as bw; bw.simulate('plan.json', profile='profile.json', "
        "workers=8, samples=10000); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_simulation_is_drawn_and_put_into_tables(tmp_path):
    from rich.console import Console

    found = bw.simulate(
        make_plan(),
        workers=(2, 4, 16),
        samples=50_000,
        price=1.0,
        mtbf_hours=0.5,
        spares=1,
        replacement_seconds=3600,
        search={"spares": [0, 1, 2], "checkpoint_seconds": [10, 100]},
        **FAST,
    )
    for suffix in ("png", "pdf", "svg"):
        assert write_simulation_figure(found, tmp_path / f"a.{suffix}").stat().st_size > 1000
    with pytest.raises(BatchwrightError, match="a figure ends in one of"):
        write_simulation_figure(found, tmp_path / "a.gif")
    console = Console(width=300)
    with console.capture() as told:
        for table in simulation_tables(found):
            console.print(table)
    text = told.get()
    assert "16 + 1" in text
    assert "cost over the best (95 %)" in text
    assert "best" in text
    (tmp_path / "found.json").write_text(found.model_dump_json())
    assert read_record(tmp_path / "found.json", Simulation) == found
    assert json.loads((tmp_path / "found.json").read_text())["format"] == "batchwright-simulation/2"


ENDING = {"mtbf_hours": 0.5, "replacement_seconds": 3600, **FAST}


def test_values_may_be_numpys():
    search = {"spares": np.arange(3), "checkpoint_seconds": [np.float32(10), np.int64(100)]}
    lists = {"spares": [0, 1, 2], "checkpoint_seconds": [10, 100]}
    found = bw.simulate(make_plan(), workers=np.array([4]), search=search, **ENDING)
    assert found == bw.simulate(make_plan(), workers=(4,), search=lists, **ENDING)


def test_an_older_simulation_is_to_be_made_anew(tmp_path):
    found = bw.simulate(make_plan(), workers=(4,), search={"spares": [0, 1]}, **ENDING)
    old = json.loads(found.model_dump_json()) | {"format": "batchwright-simulation/1"}
    for search in old["searches"]:  # as it was when each key was searched by itself
        search["key"] = search.pop("keys")[0]
    (tmp_path / "old.json").write_text(json.dumps(old))
    said = r"old\.json is a simulation as another version has it .*: make it anew; `batchwright sim"
    with pytest.raises(BatchwrightError, match=said):
        bw.take_searched(make_plan(), tmp_path / "old.json")


def test_a_checkpoint_that_the_hours_cut_short_is_no_training():
    found = run_through(
        100.0, Hazards(1, interval=10.0, cost=10.0), generator(), until=35, record_spans=True
    )
    assert (found.done, found.checkpoints, found.seconds) == (20.0, 15.0, 35.0)
    assert [span.part for span in found.spans] == ["training", "checkpoint"] * 2


def test_hours_end_a_training_and_say_how_much_was_done():
    asked = {"samples": 10**6, "epochs": 100, "workers": 2, **FAST}
    (whole,) = bw.simulate(make_plan(), **asked).clusters
    half = whole.seconds.value / 2 / 3600
    (cut,) = bw.simulate(make_plan(), hours=half, **asked).clusters
    assert cut.seconds.value == pytest.approx(3600 * half)
    assert cut.done.value == pytest.approx(0.5, rel=0.05)
    assert whole.done.value == 1.0


def test_rows_of_a_cycle_are_simulated_each_and_shortened_in_proportion():
    profile = make_kind_profile("a", sides=(96, 128))
    plan = bw.plan(profile, epochs=7, method="cyclic", workers=1, global_batch=64)
    assert len(plan.stages) > 1
    (found,) = bw.simulate(plan, profile=profile, **FAST).clusters
    predicted = sum(one.epochs * one.predicted_epoch_seconds.value for one in plan.stages)
    training = found.seconds.value * (1 - found.shares.evaluation)
    assert training == pytest.approx(predicted, rel=0.05)
    (short,) = bw.simulate(plan, profile=profile, epochs=2, **FAST).clusters
    assert 0 < short.seconds.value < 0.5 * found.seconds.value


def test_lognormal_scatter_keeps_the_measured_median():
    drawn = lognormal(0.3)(generator(), (10_001, 3))
    assert np.median(drawn) == pytest.approx(1.0, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.3, rel=0.02)
    assert simulating.estimate_of([1.0]).low == 1.0
