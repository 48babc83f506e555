"""Shares that follow measured speeds, on simulated workers: pure arithmetic, no processes."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.algorithms.balancer import balancer_of
from batchwright.algorithms.rebalancing import (
    balanced,
    fixed_cost,
    followed,
    midmean,
    noise_between,
    noise_within,
    speeds_of,
    worth_changing,
)
from batchwright.planning.validation import idle_keys
from batchwright.training.batches.batch_split import Sharing
from batchwright.training.checkpoints.checkpoint_manager import RunState
from example_counts import examples
from samples import make_job, make_plan

calmly = examples(100)
speeds = st.lists(st.floats(0.05, 50), min_size=1, max_size=9)


class Workers:
    """Simulated: a step takes worker ``i`` ``(b_i + fixed) / speed_i`` seconds, give or take."""

    def __init__(self, speeds, *, fixed=0.0, noise=0.0, seed=0):
        self.speeds, self.fixed, self.noise = list(speeds), fixed, noise
        self.random = random.Random(seed)

    def seconds(self, batches):
        return [
            (b + self.fixed) / v * (1 + self.random.gauss(0, self.noise))
            for b, v in zip(batches, self.speeds, strict=True)
        ]


def run(workers, balancer, batches, steps, *, epoch=10**9):
    """Local batches after each step."""
    history = []
    for step in range(1, steps + 1):
        balancer.watch(batches, workers.seconds(batches), usual=True)
        batches = balancer.look(epoch_ends=step % epoch == 0) or batches
        history.append(batches)
    return history


def make_balancer(count, *, every=10, least=1, known=None, fixed=0.0, **job):
    return balancer_of(
        make_job(workers=count, method="dynamic-batch", rebalance_steps=every, **job),
        [f"host/cpu:{rank}" for rank in range(count)],
        least=least,
        speeds=known or {},
        fixed_samples=fixed,
    )


# -------------------------------------------------------------------------------------- arithmetic


def test_the_published_example_of_three_slow_workers_and_a_fast_one():
    assert balanced([1 / 3, 1 / 3, 1 / 3, 1], 512) == [86, 85, 85, 256]


def test_without_fixed_cost_shares_are_those_of_the_published_rule():
    shares, seconds = [0.1, 0.2, 0.3, 0.4], [1.0, 3.0, 2.0, 5.0]
    performance = [d / t for d, t in zip(shares, seconds, strict=True)]
    wanted = [1000 * p / sum(performance) for p in performance]
    batches = [round(1000 * share) for share in shares]
    found = balanced(speeds_of(batches, seconds, 0), 1000)
    assert all(abs(a - b) < 1 for a, b in zip(found, wanted, strict=True))


@calmly
@given(speeds, st.integers(9, 4000), st.floats(0, 60))
def test_batches_sum_to_the_global_batch_and_finish_together(speeds, batch, fixed):
    found = balanced(speeds, batch, fixed_samples=fixed)
    assert sum(found) == batch
    assert min(found) >= 1
    free = [i for i, b in enumerate(found) if b > 1]
    seconds = [(found[i] + round(fixed)) / speeds[i] for i in free]
    a_sample = max(1 / speeds[i] for i in free) if free else 0
    assert not free or max(seconds) - min(seconds) <= 2 * a_sample


@calmly
@given(speeds, st.integers(100, 4000), st.integers(1, 5))
def test_what_one_worker_cannot_take_goes_to_the_others(speeds, batch, least):
    most = -(-batch // len(speeds)) + 3
    found = balanced(speeds, batch, least=least, most=most)
    assert sum(found) == batch
    assert all(least <= size <= most for size in found)


def test_bounds_that_leave_no_way_are_refused():
    with pytest.raises(ValueError, match="outside what the bounds allow"):
        balanced([1, 1], 100, most=20)


def test_the_middle_half_is_not_moved_by_a_hiccup_but_by_a_lasting_change():
    assert midmean([1.0] * 9 + [50.0]) == 1.0
    assert midmean([1.0] * 3 + [2.0] * 9) == 2.0
    assert midmean([3.0]) == 3.0


def test_what_all_workers_have_in_common_changes_no_share():
    known = {"a": 100.0, "b": 50.0}
    found = followed(known, {"a": 60.0, "b": 30.0})
    assert found["a"] / found["b"] == pytest.approx(2)


def test_small_changes_are_smoothed_and_sudden_ones_believed():
    known = {"a": 100.0, "b": 100.0}
    little = followed(known, {"a": 102.0, "b": 98.0})
    assert 1.0 < little["a"] / little["b"] < 1.02
    sudden = followed(known, {"a": 100.0, "b": 50.0})
    assert sudden["a"] / sudden["b"] == pytest.approx(2)


def test_what_noise_makes_is_neither_sudden_nor_worth_a_change():
    known, measured = {"a": 10.0, "b": 10.0}, {"a": 8.0, "b": 12.0}
    assert followed(known, measured, 0.03) == measured
    assert followed(known, measured, 0.1) == pytest.approx({"a": 9.4, "b": 10.6})
    assert worth_changing([50, 50], [46, 54], 0.05)
    assert not worth_changing([50, 50], [46, 54], 0.2)


def test_the_noise_of_a_measurement_is_that_of_its_steps_and_of_those_before():
    alike = [[1.0 + 0.2 * step, 2.0 + 0.4 * step] for step in range(25)]
    assert noise_within(alike) == pytest.approx(0)  # all slow down together
    assert noise_within([[0.0, 0.0]]) == 0
    workers = Workers([1.0, 2.0, 3.0], noise=0.1)
    found = [noise_within([workers.seconds([60] * 3) for _ in range(25)]) for _ in range(40)]
    assert sum(found) / 40 == pytest.approx(
        0.1 * 0.8 / 25**0.5, rel=0.2
    )  # 0.8: less what is common
    steady, slower = {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.5}
    assert noise_between([steady] * 3 + [slower] * 4) == 0
    assert noise_between([steady, slower] * 3) > 0.3


def test_noise_between_measurements_reads_each_speed_a_few_times_however_many_workers():
    class Counted(dict):
        reads = 0

        def values(self):
            for value in super().values():
                Counted.reads += 1
                yield value

    workers = 500
    noise_between([Counted({f"{n}": 1.0 + n for n in range(workers)}) for _ in range(2)])
    assert Counted.reads <= 2 * 2 * workers  # with a mean for each worker it was their square


def test_shares_of_equal_workers_rest_where_one_or_the_other_is_slow_for_an_epoch():
    """Epochs of few steps on a busy machine: who was slow in one says nothing of the next."""
    moves = []
    for seed in range(8):
        drawn, balancer = random.Random(seed), make_balancer(2, every=25, least=2)
        shares, found = (16, 16), []
        for _ in range(60):
            slower = [drawn.lognormvariate(0, 0.25) for _ in shares]
            times = [one * batch for one, batch in zip(slower, shares, strict=True)]
            for step in range(6):
                balancer.watch(shares, times, usual=step > 0)
            shares = balancer.look(epoch_ends=True) or shares
            found.append(shares)
        moves.append(sum(one != then for one, then in pairwise(found[10:])))
    assert sum(moves) / len(moves) < 20  # of 49; believed at once, they were 43


def test_a_slow_down_soon_after_the_start_hides_no_recovery():
    workers, balancer = Workers([1.0, 1.0]), make_balancer(2)
    assert run(workers, balancer, (60, 60), 20)[-1] == (60, 60)
    workers.speeds[0] = 0.7
    assert run(workers, balancer, (60, 60), 10)[-1] == (49, 71)
    workers.speeds[0] = 1.0
    assert run(workers, balancer, (49, 71), 10)[-1] == (60, 60)


def test_workers_that_were_not_measured_keep_their_relative_speed():
    found = followed({"a": 100.0, "gone": 50.0}, {"a": 50.0, "new": 10.0})
    assert found == pytest.approx({"a": 50.0, "gone": 25.0, "new": 10.0})


@calmly
@given(st.floats(0, 60), st.floats(0.3, 3), st.floats(0.5, 2))
def test_the_fixed_cost_is_found_from_two_rounds(fixed, slower, common):
    old, new = [64, 64], [90, 38]
    workers = Workers([1.0, slower], fixed=fixed)
    after = [common * t for t in workers.seconds(new)]
    found = fixed_cost((old, workers.seconds(old)), (new, after))
    assert found == pytest.approx(fixed, abs=0.01)


def test_batches_that_hardly_changed_tell_no_fixed_cost():
    assert fixed_cost(([64, 64], [1, 1]), ([66, 62], [1, 1])) is None


def test_less_than_the_dead_band_is_not_worth_a_change():
    assert not worth_changing([100, 100], [103, 97])
    assert worth_changing([100, 100], [104, 96])
    assert worth_changing([6, 2], [5, 3])


# ------------------------------------------------------------------------------- simulated clusters


def test_without_fixed_cost_one_round_is_enough():
    workers = Workers([1.0, 0.5])
    history = run(workers, make_balancer(2), (64, 64), 30)
    assert history[8] == (64, 64)
    assert set(history[9:]) == {(85, 43)}


@pytest.mark.parametrize("fixed", [5.0, 20.0, 40.0])
def test_with_a_fixed_cost_that_is_known_one_round_is_enough_too(fixed):
    workers = Workers([1.0, 0.5], fixed=fixed)
    history = run(workers, make_balancer(2, fixed=fixed), (64, 64), 20)
    first, second = workers.seconds(history[9])
    assert first == pytest.approx(second, rel=0.03)


@pytest.mark.parametrize("fixed", [5.0, 20.0, 40.0])
def test_a_fixed_cost_that_is_not_known_is_learnt_in_a_second_round(fixed):
    workers = Workers([1.0, 0.5], fixed=fixed)
    balancer = make_balancer(2)
    history = run(workers, balancer, (64, 64), 30)
    first, second = workers.seconds(history[19])
    assert first == pytest.approx(second, rel=0.03)
    assert balancer.fixed_samples == pytest.approx(fixed, rel=0.2)


def test_a_slow_down_and_a_recovery_are_followed_in_one_whole_interval():
    workers = Workers([1.0, 1.0], fixed=10.0, noise=0.02)
    balancer = make_balancer(2, fixed=10.0)
    batches = run(workers, balancer, (64, 64), 40)[-1]
    assert batches == (64, 64)
    for speeds in ([1.0, 0.5], [1.0, 1.0], [0.25, 1.0]):
        workers.speeds = speeds
        batches = run(workers, balancer, batches, 13)[-1]  # part of an interval and a whole one
        ideal = (128 + 2 * 10) / sum(speeds)
        assert max(workers.seconds(batches)) < 1.1 * ideal
        batches = run(workers, balancer, batches, 7)[-1]


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))]
)
def test_noise_moves_nothing(count, seed):
    workers = Workers([1.0] * count, fixed=10.0, noise=0.05, seed=seed)
    even = (64,) * count
    balancer = make_balancer(count, every=make_job().rebalance_steps)
    assert set(run(workers, balancer, even, 5000)) == {even}


def test_drift_of_the_whole_machine_moves_nothing():
    workers, balancer = Workers([1.0, 1.0], fixed=10.0), make_balancer(2)
    for factor in (1.0, 0.8, 1.3, 0.7, 1.0):
        workers.speeds = [factor, factor]
        assert set(run(workers, balancer, (64, 64), 30)) == {(64, 64)}


def test_once_an_epoch_as_published():
    workers = Workers([1.0, 0.5])
    history = run(workers, make_balancer(2, every=0), (64, 64), 60, epoch=20)
    assert set(history[:19]) == {(64, 64)}
    assert set(history[19:]) == {(85, 43)}


def test_published_shares_are_equal_in_time_after_one_epoch_where_time_follows_samples():
    # Three workers share a GPU, 3 ms a sample, and one has its own, 1 ms: Ye et al. 2020.
    workers = Workers([1 / 3, 1 / 3, 1 / 3, 1.0])
    balancer = make_balancer(4, rebalance="published")
    history = run(workers, balancer, (128,) * 4, 6, epoch=2)
    assert history[0] == (128,) * 4
    assert set(history[1:]) == {(86, 85, 85, 256)}
    assert max(workers.seconds((128,) * 4)) == pytest.approx(384)
    assert max(workers.seconds(history[-1])) == pytest.approx(258)


def test_published_shares_need_some_epochs_where_a_step_has_a_fixed_time():
    workers = Workers([1.0, 1.0, 0.25], fixed=20.0)
    history = run(workers, make_balancer(3, rebalance="published"), (60, 60, 60), 5, epoch=1)
    slowest = [max(workers.seconds(batches)) / min(workers.seconds(batches)) for batches in history]
    assert slowest == sorted(slowest, reverse=True)
    assert slowest[0] > 1.5
    assert slowest[3] < 1.15


def test_published_shares_have_no_dead_band_and_remember_one_epoch_alone():
    workers = Workers([1.0, 0.98])
    balancer = make_balancer(2, rebalance="published")
    assert run(workers, balancer, (100, 100), 1, epoch=1) == [(101, 99)]
    workers.speeds = [1.0, 0.5]
    assert run(workers, balancer, (101, 99), 1, epoch=1) == [(133, 67)]


def test_published_shares_count_every_step_of_the_epoch_the_tail_among_them():
    balancer = make_balancer(2, rebalance="published")
    balancer.watch((60, 60), [2.0, 1.0], usual=False)  # the first
    balancer.watch((60, 60), [1.0, 1.0], usual=True)
    assert balancer.look(epoch_ends=False) is None
    balancer.watch((20, 20), [0.5, 0.8], usual=False)  # the tail
    assert balancer.look(epoch_ends=True) == tuple(balanced([140 / 3.5, 140 / 2.8], 120))
    assert balancer.speeds == {"host/cpu:0": 140 / 3.5, "host/cpu:1": 140 / 2.8}


def test_a_rhythm_beside_the_published_one_is_said_to_do_nothing():
    job = make_job(method="dynamic-batch", rebalance="published", rebalance_steps=5)
    (line,) = idle_keys(job)
    assert line.startswith("rebalance_steps=5 does nothing with rebalance=published")
    assert not idle_keys(make_job(method="dynamic-batch", rebalance="published"))


def test_an_epoch_of_few_steps_is_judged_by_several_epochs():
    workers = Workers([1.0, 0.5])
    history = run(workers, make_balancer(2, every=50), (64, 64), 12, epoch=2)
    assert history[3] == (64, 64)
    assert history[-1] == (85, 43)


def test_the_jobs_bounds_hold():
    workers = Workers([10.0, 1.0, 1.0])
    bounded = make_balancer(3, least_local_batch=20, most_local_batch=60)
    assert run(workers, bounded, (40, 40, 40), 40)[-1] == (60, 30, 30)
    floor = make_balancer(3, least_local_batch=20)
    assert run(workers, floor, (40, 40, 40), 40)[-1] == (80, 20, 20)


def test_where_more_workers_go_on_the_network_still_gets_what_it_needs():
    known = {f"host/cpu:{rank}": speed for rank, speed in enumerate([10.0, 10.0, 10.0, 0.1])}
    balancer = make_balancer(4, least=2, known=known, least_local_batch=4)
    assert balancer.shares_of(12) == (4, 3, 3, 2)  # 4 each would be 16


def test_a_bound_below_an_even_split_does_not_stop_the_run():
    narrow = make_balancer(2, most_local_batch=10)
    assert run(Workers([1.0, 0.1]), narrow, (64, 64), 20)[-1] == (64, 64)


def test_speeds_known_from_before_give_the_first_shares():
    known = {"host/cpu:0": 10.0, "host/cpu:1": 30.0, "gone/cpu:0": 99.0}
    assert make_balancer(2, known=known).shares_of(100) == (25, 75)
    assert make_balancer(3, known=known).shares_of(120) == (20, 60, 40)  # a new one is average


# ------------------------------------------------------------------------ after a loss, and a gain


@pytest.mark.parametrize("method", ["plain", "dynamic-batch"])
def test_each_worker_has_samples_after_others_have_gone_and_come_back(method):
    """A checkpoint of the time between has the local batches of the workers that were left."""
    plan = make_plan(method=method, job=make_job(method=method, workers=2))
    state, lines = RunState(), []

    def begin(*places):
        group = SimpleNamespace(places=places, size=len(places), rank=0, here=(0,))
        recorder = SimpleNamespace(shares=lambda *told: lines.append(told))
        sharing = Sharing(
            plan, group, state, recorder, together=False, samples=960, least=1, weights=None
        )
        sharing.begin_epoch()
        sharing.keep()
        return sharing.steps.shares_at(state.step).local_batch_sizes

    both = ("node-a/cpu:0", "node-b/cpu:0")
    assert begin(*both) == (48, 48)
    state.step, state.samples_seen = 2, 192
    assert begin("node-a/cpu:0") == (96,)
    assert not state.balancing  # of two workers; their times would be old when both are back
    state.step, state.samples_seen = 4, 384
    assert begin(*both) == (48, 48)
    for _, _, _, sizes, places, _ in lines:
        assert len(sizes) == len(places)
