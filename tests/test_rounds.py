"""`training.parameter_server.rounds`: who trains on which samples next, and who has to wait."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.training.parameter_server.rounds import FEWEST, Rounds, segments
from example_counts import examples
from samples import make_job
from servers import make_rule, make_server_plan

calmly = examples(80)  # nothing here is about time

CONSISTENCIES = [("asp", None), ("bsp", None), ("ssp", 0), ("ssp", 1), ("ssp", 3)]


def make_rounds(shares=(6, 4, 2), consistency="asp", staleness=None, *, epochs=3, **changes):
    rule = make_rule(consistency, staleness=staleness, **changes.pop("rule", {}))
    return Rounds(make_server_plan(shares, rule=rule, epochs=epochs, **changes), sum(shares))


def samples_of(ticket, size):
    """(epoch, position in its order) of each sample of a round."""
    return [(epoch, n) for epoch, first, last in segments(ticket, size) for n in range(first, last)]


# ------------------------------------------------------------------------------------- the stream


def test_rounds_follow_each_other_in_the_order_of_asking():
    rounds = make_rounds((6, 4, 2))
    given = [rounds.take(worker) for worker in (2, 0, 1)]
    assert [(t.number, t.worker, t.start, t.samples) for t in given] == [
        (0, 2, 0, 2),
        (1, 0, 2, 6),
        (2, 1, 8, 4),
    ]


def test_a_worker_keeps_its_round_until_it_has_ended():
    rounds = make_rounds()
    first = rounds.take(0)
    assert rounds.take(0) is first
    assert rounds.commit(0) is first
    assert rounds.take(0).number == 1


def test_a_round_across_the_end_of_an_epoch_has_a_part_in_both():
    rounds = make_rounds((6, 4, 2))
    for worker in (0, 1):
        rounds.take(worker)
        rounds.commit(worker)
    ticket = rounds.take(0)  # of 12 samples 10 are handed out
    assert segments(ticket, 12) == [(0, 10, 12), (1, 0, 4)]
    assert ticket.epoch == 1  # of which most of it is


def test_a_round_that_begins_with_the_last_of_an_epoch_follows_the_next_row():
    stages = [
        {"epochs": 1, "samples_per_round": (6, 4), "update_factors": (1.0, 0.5)},
        {"epochs": 2, "samples_per_round": (5, 5), "update_factors": (1.0, 0.8)},
    ]
    rounds = Rounds(make_server_plan((6, 4), stages=stages), 10)
    for _ in range(2):
        rounds.take(1)
        rounds.commit(1)
    ticket = rounds.take(0)  # of 10 samples 8 are handed out
    assert (ticket.start, ticket.samples, ticket.epoch, ticket.stage) == (8, 5, 1, 1)
    assert (ticket.clock, ticket.span) == (10, 10)
    assert segments(ticket, 10) == [(0, 8, 10), (1, 0, 3)]


def test_what_a_round_does_follows_from_where_it_is():
    stages = [
        {"epochs": 1, "samples_per_round": (6, 4), "update_factors": (1.0, 0.5)},
        {"epochs": 2, "samples_per_round": (5, 5), "update_factors": (1.0, 0.8)},
    ]
    rounds = Rounds(make_server_plan((6, 4), stages=stages), 10)
    found = []
    for worker in (0, 1, 0, 1):
        ticket = rounds.take(worker)
        rounds.commit(worker)
        found.append((ticket.epoch, ticket.stage, ticket.samples, ticket.factor))
    assert found == [(0, 0, 6, 1.0), (0, 0, 4, 0.5), (1, 1, 5, 1.0), (1, 1, 5, 0.8)]


def test_the_rate_of_a_whole_round_goes_through_an_epoch():
    rounds = make_rounds((6, 6))
    found = []
    for worker in (0, 1, 0):
        ticket = rounds.take(worker)
        rounds.commit(worker)
        found.append((ticket.clock, ticket.span))
    assert found == [(0, 12), (0, 12), (12, 12)]


def test_within_a_round_the_rate_goes_on_in_proportion():
    rounds = make_rounds((8, 4))
    for worker in (0, 1):
        rounds.take(worker)
        rounds.commit(worker)
    ticket = rounds.take(0)  # 8 samples, while the epoch's 12 go by
    assert [ticket.samples_seen(done) for done in (0, 2, 8)] == [12, 15, 24]


def test_with_steps_between_exchanges_rounds_have_so_many_and_the_rate_follows_the_stream():
    rounds = make_rounds((20, 10), rule={"exchange_steps": 3}, batches=(4, 2))
    found = []
    for worker in (0, 1, 0):
        ticket = rounds.take(worker)
        rounds.commit(worker)
        found.append((ticket.start, ticket.samples, ticket.clock, ticket.span))
    assert found == [(0, 12, 0, 12), (12, 6, 12, 6), (18, 12, 18, 12)]


def test_a_short_last_round_counts_for_less():
    rounds = make_rounds((6, 4), epochs=1, factors=(1.0, 0.5))
    rounds.take(1)
    rounds.commit(1)
    rounds.take(1)
    rounds.commit(1)
    ticket = rounds.take(1)
    assert (ticket.samples, ticket.factor) == (2, 0.25)
    assert rounds.take(0) is None


def test_no_part_of_a_round_is_a_single_sample():
    rounds = make_rounds((5, 6), epochs=2)
    for _ in range(2):
        rounds.take(0)
        rounds.commit(0)
    longer = rounds.take(1)  # 10 of 11 are handed out: the last one was taken along
    assert longer.start == 11
    rounds = make_rounds((6, 6), epochs=2, stages=[{"samples_per_round": (7, 6)}])
    rounds.take(0)
    assert rounds.take(1).samples == 5  # and not one of the next epoch's


def test_a_worker_alone_has_an_epoch_a_round():
    rounds = make_rounds((12,), epochs=2)
    assert [rounds.take(0).samples, rounds.commit(0).epoch] == [12, 0]
    assert [rounds.take(0).samples, rounds.commit(0).epoch] == [12, 1]
    assert rounds.take(0) is None
    assert rounds.finished


# ---------------------------------------------------------------------------------------- waiting


@pytest.mark.parametrize(("staleness", "most"), [(0, 0), (1, 1), (3, 3)])
def test_a_worker_goes_on_while_it_is_no_more_than_so_many_rounds_ahead(staleness, most):
    rounds = make_rounds((2, 2), "ssp", staleness, epochs=10)
    rounds.take(1)
    ahead = 0
    while rounds.ready(0):
        rounds.take(0)
        rounds.commit(0)
        ahead += 1
    # c - min c <= s: with s + 1 ended it waits
    assert ahead == most + 1
    rounds.commit(1)
    assert rounds.ready(0)


@pytest.mark.parametrize(("consistency", "staleness"), [("bsp", None), ("ssp", 0)])
def test_where_all_begin_together_who_asks_first_makes_no_difference(consistency, staleness):
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        rounds = make_rounds((5, 4, 3), consistency, staleness, epochs=2)
        taken = []
        for _ in range(2):
            taken += [rounds.take(worker) for worker in order]
            for worker in order:
                rounds.commit(worker)
        found.append(sorted((t.number, t.worker, t.start) for t in taken))
    assert found[0] == found[1]
    assert [worker for _, worker, _ in found[0]] == [0, 1, 2, 0, 1, 2]


def test_nobody_waits_under_asp():
    rounds = make_rounds((2, 2), "asp", epochs=10)
    for _ in range(9):
        assert rounds.ready(0)
        rounds.take(0)
        rounds.commit(0)


@pytest.mark.parametrize("for_good", [True, False])
def test_nobody_waits_for_the_lost(for_good):
    rounds = make_rounds((2, 2), "bsp", epochs=10)
    rounds.take(0)
    rounds.take(1)
    rounds.commit(0)
    assert not rounds.ready(0)
    rounds.lose(1, for_good=for_good)
    assert rounds.ready(0)


def test_nobody_waits_for_those_that_have_nothing_left():
    rounds = make_rounds((2, 2), "ssp", 1, epochs=1)
    rounds.take(0)
    rounds.commit(0)
    rounds.take(0)  # of the other's samples
    assert rounds.take(1) is None
    assert rounds.members == [0]


def test_nor_does_anybody_after_a_checkpoint():
    rounds = make_rounds((2, 2), "ssp", 1, epochs=1)
    rounds.take(0)
    rounds.commit(0)
    rounds.take(0)
    assert rounds.take(1) is None
    other = make_rounds((2, 2), "ssp", 1, epochs=1)
    other.load_state_dict(rounds.state_dict())
    assert other.members == [0]


# ----------------------------------------------------------------------------------------- faults


def test_a_worker_that_comes_back_repeats_its_round_and_begins_with_the_slowest():
    rounds = make_rounds((2, 2, 2), "bsp", epochs=10)
    lost = rounds.take(2)
    rounds.lose(2, for_good=False)
    for _ in range(4):
        for worker in (0, 1):
            rounds.take(worker)
            rounds.commit(worker)
    rounds.come_back(2)
    assert rounds.take(2) is lost
    assert rounds.ended == {0: 4, 1: 4, 2: 4}
    assert rounds.lead(0) == 0


def test_the_round_of_a_worker_lost_for_good_is_anothers():
    rounds = make_rounds((6, 4, 2), epochs=2)
    lost = rounds.take(2)
    rounds.lose(2, for_good=True)
    ticket = rounds.take(0)
    assert (ticket.worker, ticket.number, ticket.start) == (0, lost.number, lost.start)
    assert rounds.shares(rounds._plan.stages[0]) == (7, 5, 0)  # the epoch among those left


def test_a_round_left_over_stays_its_new_workers_through_a_checkpoint():
    rounds = make_rounds((6, 4, 2))
    rounds.take(2)
    rounds.lose(2, for_good=True)
    ticket = rounds.take(0)
    other = make_rounds((6, 4, 2))
    other.load_state_dict(rounds.state_dict())
    assert other.open == {0: ticket}


def test_there_is_work_again_when_one_of_the_last_is_lost():
    rounds = make_rounds((6, 6), epochs=1)
    rounds.take(1)
    rounds.take(0)
    rounds.commit(0)
    assert rounds.take(0) is None
    rounds.lose(1, for_good=True)
    assert rounds.members == [0]
    rounds.take(0)
    rounds.commit(0)
    assert rounds.finished


def test_one_that_was_given_up_may_come_back():
    rounds = make_rounds((6, 4, 2))
    rounds.lose(0, for_good=True)
    rounds.come_back(0)
    assert rounds.take(0).samples == 6


# ----------------------------------------------------------------------------------------- shares


def test_shares_that_follow_the_workers_make_ends_meet():
    rounds = make_rounds((600, 400))
    assert rounds.follow({0: 0.001, 1: 0.003}) == (750, 250)
    assert [rounds.take(0).samples, rounds.take(1).samples] == [750, 250]


def test_shares_stay_where_all_end_together_already():
    rounds = make_rounds((600, 400))
    assert rounds.follow({0: 0.002, 1: 0.00301}) is None
    assert rounds.take(0).samples == 600


def test_shares_stay_where_one_would_change_by_one_part_in_a_hundred_and_no_more():
    rounds = make_rounds((1000, 1000))
    assert rounds.follow({0: 990, 1: 1010}) is None
    assert rounds.follow({0: 989, 1: 1011}) == (1011, 989)


def test_shares_that_were_made_again_hold_in_proportion_under_the_next_row():
    stages = [
        {"epochs": 1, "samples_per_round": (600, 400)},
        {"epochs": 1, "samples_per_round": (500, 500)},
    ]
    plan = make_server_plan((600, 400), stages=stages)
    rounds = Rounds(plan, 1000)
    rounds.follow({0: 1.0, 1: 3.0})  # 750, 250: by 1.25 and 0.625
    assert rounds.shares(plan.stages[1]) == (667, 333)


@pytest.mark.parametrize(
    ("seconds", "last"),
    [((1.0, 1.0, 1.0, 2.0), 360), ((1.0, 1.0, 1.0, 1.04), 360), ((1.0, 1.0, 1.0, 0.5), 360)],
)
def test_epochs_end_with_a_round_though_shares_change_while_others_train(seconds, last):
    rounds = make_rounds((360, 360, 360, 360), epochs=4)
    for worker in range(4):
        rounds.take(worker)
    for worker in range(3):  # they begin the next epoch before this one is done
        rounds.commit(worker)
        rounds.take(worker)
    rounds.commit(3)
    shares = rounds.follow(dict(enumerate(seconds)))
    assert shares[3] != 360
    assert rounds.take(3).samples == last  # what the others have left of the epoch
    found = []
    for worker in (3, 1, 2, 0):
        rounds.commit(worker)
        found.append(rounds.take(worker))
    assert [(one.epoch, one.samples) for one in found] == [(2, shares[w]) for w in (3, 1, 2, 0)]


def test_a_round_that_was_cut_to_end_its_epoch_counts_for_less():
    rounds = make_rounds((600, 400), factors=(1.0, 0.5))
    rounds.take(0)
    assert rounds.follow({0: 2.0, 1: 1.0}) == (333, 667)  # of 400 that are left
    ticket = rounds.take(1)
    assert (ticket.samples, ticket.factor) == (400, pytest.approx(0.5 * 400 / 667))


def test_as_published_batches_and_weights_follow_the_shares_however_little_they_change():
    job = make_job(workers=2, resolutions=(8,), dual={"shares": "published"})
    rounds = make_rounds((500, 500), "bsp", batches=(64, 64), job=job)
    first = [rounds.take(worker) for worker in (0, 1)]
    assert [(one.samples, one.batch, one.factor) for one in first] == [(500, 64, 1.0)] * 2
    assert rounds.follow({0: 1.0, 1: 1.004}) == (501, 499)  # no dead band
    for worker in (0, 1):
        rounds.commit(worker)
    assert rounds.follow({0: 1.0, 1: 3.0}) == (750, 250)
    made = [rounds.take(worker) for worker in (0, 1)]
    assert [(one.samples, one.batch) for one in made] == [(750, 96), (250, 32)]
    assert made[0].factor / made[1].factor == pytest.approx(3)  # models count by their samples


def test_as_published_batches_and_weights_are_in_proportion_to_planned_shares_too():
    """Workers of unequal speed have unequal shares from the start."""
    job = make_job(workers=2, resolutions=(8,), dual={"shares": "published"})
    rounds = make_rounds((750, 250), "bsp", batches=(64, 64), job=job)
    first = [rounds.take(worker) for worker in (0, 1)]
    assert [(one.samples, one.batch) for one in first] == [(750, 96), (250, 32)]
    assert first[0].factor / first[1].factor == pytest.approx(3)
    for worker in (0, 1):
        rounds.commit(worker)
    assert rounds.follow({0: 1.0, 1: 1.0}) == (500, 500)
    again = [rounds.take(worker) for worker in (0, 1)]
    assert [(one.samples, one.batch) for one in again] == [(500, 64), (500, 64)]
    assert again[0].factor == again[1].factor


def test_a_very_slow_worker_keeps_a_little():
    rounds = make_rounds((600, 400))
    assert rounds.follow({0: 1e-6, 1: 10.0}) == (998, 2)


@calmly
@given(
    st.lists(st.integers(2, 500), min_size=2, max_size=6),
    st.lists(st.floats(1e-4, 1e2), min_size=6, max_size=6),
    st.data(),
)
def test_shares_always_add_up_to_the_epoch(shares, seconds, data):
    rounds = make_rounds(tuple(shares), stages=[{"samples_per_round": tuple(shares)}])
    gone = data.draw(st.sets(st.integers(0, len(shares) - 1), max_size=len(shares) - 1))
    for worker in gone:
        rounds.lose(worker, for_good=True)
    left = {w: seconds[w] for w in range(len(shares)) if w not in gone}
    made = rounds.follow(left) or rounds.shares(rounds._plan.stages[0])
    assert sum(made) == sum(shares)
    assert [w for w, share in enumerate(made) if share] == sorted(left)
    times = [made[w] * left[w] for w in left if made[w] > FEWEST]
    if times:  # within the sample that cannot be cut, and the part that is not worth it
        assert max(times) - min(times) <= 0.02 * max(times) + 2 * max(left.values())


# ------------------------------------------------------------------------- whatever happens, at all


class Drive:
    """Workers that do in any order what they may, and are lost and come back in between."""

    def __init__(self, rounds, *, restore):
        self.rounds, self.restore = rounds, restore
        self.workers = list(rounds.ended)
        self.lost, self.gone = set(), set()
        self.trained = []

    def there(self):
        return [w for w in self.workers if w not in self.lost | self.gone]

    def may_act(self):
        """Those that can end their round, or begin one."""
        open_ones = self.rounds.open
        return [w for w in self.there() if w in open_ones or self.rounds.ready(w)]

    def act(self, worker):
        if worker in self.rounds.open:
            self.trained.append(self.rounds.commit(worker))
        else:
            self.rounds.take(worker)

    def event(self, kind, pick):
        if kind == "checkpoint":
            self.rounds = self.restore(self.rounds.state_dict())
            self.lost.clear()  # all are started again
        elif kind == "follow":
            left = [w for w in self.workers if w not in self.gone]
            self.rounds.follow({w: 1.0 + (pick * (w + 1)) % 7 for w in left})
        elif kind == "come back" and self.lost:
            worker = sorted(self.lost)[pick % len(self.lost)]
            self.lost.discard(worker)
            self.rounds.come_back(worker)
        elif kind in ("lose", "give up") and len(self.there()) > 1:
            worker = self.there()[pick % len(self.there())]
            self.rounds.lose(worker, for_good=kind == "give up")
            (self.gone if kind == "give up" else self.lost).add(worker)
        else:
            able = self.may_act()
            self.act(able[pick % len(able)])


@calmly
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(CONSISTENCIES),
    st.sampled_from([None, 1, 3]),
    st.lists(
        st.tuples(
            st.sampled_from(["act"] * 8 + ["follow", "lose", "come back", "give up", "checkpoint"]),
            st.integers(0, 100),
        ),
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_every_sample_is_trained_on_once_whatever_happens(
    shares, epochs, consistency, exchange_steps, events, random
):
    def fresh():
        return make_rounds(
            tuple(shares), *consistency, epochs=epochs, rule={"exchange_steps": exchange_steps}
        )

    def restored(state):
        rounds = fresh()
        rounds.load_state_dict(state)
        return rounds

    drive = Drive(fresh(), restore=restored)
    for kind, pick in events:
        if drive.rounds.finished:
            break
        drive.event(kind, pick)
        # As long as somebody is there, somebody can go on.
        assert drive.rounds.finished or drive.may_act()
    for worker in sorted(drive.lost):  # in the end all come back, or are given up
        back = random.random() < 0.5
        drive.lost.discard(worker)
        if back:
            drive.rounds.come_back(worker)
        else:
            drive.rounds.lose(worker, for_good=True)
            drive.gone.add(worker)
    for _ in range(10_000):
        if drive.rounds.finished:
            break
        able = drive.may_act()
        assert able
        for worker in able:
            if not drive.rounds.finished:
                drive.act(worker)
    size = sum(shares)
    trained = sorted(one for ticket in drive.trained for one in samples_of(ticket, size))
    assert trained == [(epoch, n) for epoch in range(epochs) for n in range(size)]
    parts = [last - first for t in drive.trained for _, first, last in segments(t, size)]
    assert min(parts) >= FEWEST or exchange_steps


def test_a_checkpoint_from_before_the_first_round_says_that_none_has_ended():
    rounds = make_rounds((5, 4, 3))
    rounds.load_state_dict(make_rounds((5, 4, 3)).state_dict())
    assert rounds.ended == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_a_checkpoint_is_plain_and_goes_on_the_same(consistency):
    rounds, other = make_rounds((5, 4, 3), *consistency), make_rounds((5, 4, 3), *consistency)
    rounds.follow({0: 1.0, 1: 1.0, 2: 1.0})
    for worker in (0, 1, 2, 0):
        if rounds.ready(worker):
            rounds.take(worker)
    rounds.commit(1)
    rounds.lose(0, for_good=True)
    state = rounds.state_dict()
    json.dumps(state)  # plain values alone
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert [other.take(1), other.take(2)] == [rounds.take(1), rounds.take(2)]
