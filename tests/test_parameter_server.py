"""`training.parameter_server.parameter_server`: models in, merged as the plan says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.training.parameter_server.merging import Weights
from batchwright.training.parameter_server.parameter_server import ParameterServer
from example_counts import examples
from servers import make_rule, make_server_plan, numbers

calmly = examples(60)  # nothing here is about time


def make_server(shares=(6, 6), consistency="asp", start=(0.0,), *, epochs=4, factors=None, **rule):
    plan = make_server_plan(
        shares, rule=make_rule(consistency, **rule), epochs=epochs, factors=factors
    )
    return ParameterServer(numbers(*start), plan, sum(shares))


def train(ticket, weights):
    """A stand-in for training: what comes of it depends on start, round and samples alone."""
    moved = weights.clone()
    moved.floats.mul_(0.9).add_(0.1 * (1 + ticket.number % 3) + 0.01 * ticket.samples)
    return moved


def one_round(server, worker):
    """Take, train and push."""
    ticket = server.take(worker)
    server.push(worker, train(ticket, server.weights))
    return ticket


# --------------------------------------------------------------------------------------------- bsp


def test_bsp_waits_for_all_and_takes_their_weighted_mean():
    server = make_server((6, 3, 3), "bsp", factors=(1.0, 0.5, 0.5))
    for worker in range(3):
        server.take(worker)
    server.push(2, numbers(8))
    server.push(0, numbers(2))
    assert not server.ready(0)
    assert (server.weights.floats.item(), server.merges) == (0.0, 0)
    server.push(1, numbers(4))
    assert server.weights.floats.item() == pytest.approx((2 + 0.5 * 4 + 0.5 * 8) / 2)
    assert server.merges == 1
    assert all(map(server.ready, range(3)))


def test_the_mean_is_summed_in_rank_order():
    floats = [2.0**30, 1.0, -(2.0**30), 0.0]  # whose sum depends on the order
    arrivals = {}
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        server = make_server((3, 3, 3, 3), "bsp")
        for worker in range(4):
            server.take(worker)
        for worker in order:
            server.push(worker, numbers(floats[worker]))
        arrivals[order] = server.weights.floats.item()
    assert set(arrivals.values()) == {0.0}  # as the last to be added the 1 would have stayed


def test_one_worker_under_bsp_gets_its_own_model_back_bit_for_bit():
    server = make_server((12,), "bsp", start=(0.3, -1.7), factors=(1.0,))
    model = torch.nn.Linear(2, 1)
    for _ in range(4):
        server.take(0)
        pushed = Weights(torch.cat([p.detach().flatten() for p in model.parameters()]), _none())
        server.push(0, pushed)
        assert torch.equal(server.weights.floats, pushed.floats)


def _none():
    return torch.empty(0, dtype=torch.int64)


def test_a_lost_worker_is_not_waited_for_and_what_it_pushed_counts():
    server = make_server((4, 4, 4), "bsp")
    for worker in range(3):
        server.take(worker)
    server.push(0, numbers(3))
    server.push(1, numbers(5))
    server.lose(0, for_good=False)
    assert server.merges == 0
    server.lose(2, for_good=False)
    assert server.weights.floats.item() == pytest.approx(4)


def test_the_last_model_is_merged_though_a_worker_is_back_that_has_nothing_left_to_train():
    server = make_server((3, 3), "bsp", epochs=1, exchange_steps=1)  # three rounds of 2 samples
    server.take(0)
    server.take(1)
    server.push(1, numbers(2))
    server.lose(1, for_good=False)
    server.push(0, numbers(4))
    assert server.take(0).start == 4
    server.come_back(1)  # and it has not asked for a round yet
    server.push(0, numbers(8))
    assert server.rounds.finished
    assert (server.weights.floats.item(), server.merges) == (8.0, 2)


# --------------------------------------------------------------------------------------------- asp


@pytest.mark.parametrize("rule", ["journal", "compsac"])
def test_one_worker_under_asp_follows_the_rules_recurrence(rule):
    server = make_server((8,), "asp", start=(1.0,), factors=(0.5,), merge=rule)
    expected = 1.0
    for pushed in (4.0, -2.0, 10.0):
        server.take(0)
        server.push(0, numbers(pushed))
        if rule == "journal":
            expected = (expected + 0.5 * pushed) / 1.5
        else:
            expected = (1.5 * expected + 0.5 * pushed) / 2
        assert server.weights.floats.item() == pytest.approx(expected, rel=1e-6)
    # by hand: (1 + 2) / 1.5 = 2, (2 - 1) / 1.5 = 2/3; (1.5 + 2) / 2 = 1.75, 0.8125
    assert expected == pytest.approx(3.777778 if rule == "journal" else 3.109375)


def test_each_model_is_merged_as_it_comes_with_its_own_factor():
    server = make_server((8, 4), "asp", factors=(1.0, 0.5))
    server.take(0)
    server.take(1)
    server.push(1, numbers(3))  # (0 + 0.5 * 3) / 1.5
    assert server.weights.floats.item() == pytest.approx(1)
    server.push(0, numbers(5))  # (1 + 5) / 2
    assert server.weights.floats.item() == pytest.approx(3)
    assert server.merges == 2


def test_a_small_worker_with_the_large_batch_and_factor_1_is_like_any_other():
    plain, dual = make_server((6, 6)), make_server((6, 6), small_workers=1, factors=(1.0, 1.0))
    for worker in (0, 1, 1, 0, 1):
        one_round(plain, worker)
        one_round(dual, worker)
    assert torch.equal(plain.weights.floats, dual.weights.floats)


# --------------------------------------------------------------------------------------------- ssp


def run(server, picks):
    """Workers pull, train and push in the order that chance says; returns models after merges."""
    found, pulled = [], {}
    workers = list(server.rounds.ended)
    picks = list(picks)
    for turn in range(1000):
        if server.rounds.finished:
            return found
        able = [w for w in workers if w in pulled or server.ready(w)]
        worker = able[(picks[turn] if turn < len(picks) else turn) % len(able)]
        if worker not in pulled:
            ticket = server.take(worker)
            if ticket is not None:
                pulled[worker] = train(ticket, server.weights)
        else:
            before = server.merges
            server.push(worker, pulled.pop(worker))
            if server.merges > before:
                found.append(server.weights.floats.clone())
    raise AssertionError("they do not come to an end")


orders = st.lists(st.integers(0, 100), max_size=60)


@calmly
@given(orders, orders, st.lists(st.integers(2, 6), min_size=1, max_size=4))
def test_ssp_without_staleness_is_bsp_in_whatever_order_models_arrive(one, two, shares):
    factors = tuple(1 / (1 + worker) for worker in range(len(shares)))
    bsp = run(make_server(tuple(shares), "bsp", factors=factors), one)
    ssp = run(make_server(tuple(shares), "ssp", staleness=0, factors=factors), two)
    assert len(bsp) == len(ssp) == 4
    assert all(map(torch.equal, bsp, ssp))


@calmly
@given(orders, st.lists(st.integers(2, 6), min_size=1, max_size=4))
def test_ssp_without_a_bound_is_asp_for_the_same_arrivals(order, shares):
    asp = run(make_server(tuple(shares), "asp"), order)
    ssp = run(make_server(tuple(shares), "ssp", staleness=10_000), order)
    assert len(asp) == len(ssp)
    assert all(map(torch.equal, asp, ssp))


@calmly
@given(orders, st.integers(1, 3))
def test_under_ssp_none_begins_more_than_so_many_rounds_ahead_and_all_are_merged_at_once(
    order, staleness
):
    server = make_server((3, 3, 3), "ssp", staleness=staleness)
    take = server.take

    def watched(worker):
        assert server.rounds.lead(worker) <= staleness
        return take(worker)

    server.take = watched
    found = run(server, order)
    assert len(found) == server.merges == server.rounds._number  # the merge of asp


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("consistency", "staleness"), [("asp", None), ("bsp", None), ("ssp", 0), ("ssp", 2)]
)
def test_a_server_goes_on_from_a_checkpoint_as_it_would_have(consistency, staleness):
    one = make_server((6, 3, 3), consistency, staleness=staleness)
    pulled = {w: train(one.take(w), one.weights) for w in range(3)}
    one.push(1, pulled[1])
    state = {
        key: value.clone() if torch.is_tensor(value) else value
        for key, value in one.state_dict().items()
    }
    two = make_server((6, 3, 3), consistency, staleness=staleness)
    two.load_state_dict(state)
    for server in (one, two):
        assert [server.take(w) is not None for w in (0, 2)] == [True, True]
        server.push(2, pulled[2])
        server.push(0, pulled[0])
    assert torch.equal(one.weights.floats, two.weights.floats)
    assert one.merges == two.merges
    assert one.rounds.state_dict() == two.rounds.state_dict()
