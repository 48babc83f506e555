"""A run with a parameter server never comes to a halt, whoever is lost, comes back or is slow.

Events are made up: losses for good and not, returns, messages that come late because others act in
between, checkpoints, and servers that start again from them. `Crowd` is the server's core and
`CoordinatorCrowd` is what its threads use.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.training.parameter_server.messages import Hello, Settled, Trained
from batchwright.training.parameter_server.parameter_server import ParameterServer
from batchwright.training.parameter_server.rounds import segments
from batchwright.training.parameter_server.server_coordinator import ServerCoordinator
from batchwright.training.recorder import Recorder
from example_counts import examples
from servers import make_rule, make_server_plan, numbers

CONSISTENCIES = [("asp", None), ("bsp", None), ("ssp", 0), ("ssp", 1), ("ssp", 2)]
TRAINED = Trained(steps=1, skipped=0, repeated=0, loss=1.0, rate=0.1, compute=0.1)
KINDS = ["act"] * 8 + ["lose", "return"] * 2 + ["give up", "late", "keep", "restart", "follow"]


def make_plan(shares, consistency, exchange_steps, epochs):
    name, staleness = consistency
    rule = make_rule(name, staleness=staleness, exchange_steps=exchange_steps)
    return make_server_plan(shares, rule=rule, epochs=epochs)


class Crowd:
    """The workers of a `ParameterServer`, and what they have trained on.

    A worker ``asks`` for a round or ``trains``; it may be ``lost`` or ``gone`` for good. Each acts
    when an event says so, so any of its messages may come after any others.
    """

    absent = ("lost", "gone")

    def __init__(self, plan):
        self.plan = plan
        self.workers = range(plan.workers)
        self.state = dict.fromkeys(self.workers, "asks")
        self.trained = []
        self.pushes = Counter()
        self.steady = set(self.workers)  # never lost, and never without a round
        self.open_before = set()
        self.start()
        self.keep()

    # ------------------------------------------------------------------------------ the system

    def start(self):
        self.server = ParameterServer(numbers(1.0), self.plan, self.plan.data.train_samples)

    @property
    def rounds(self):
        return self.server.rounds

    def values(self):
        return self.server.state_dict()

    def restore(self, values):
        self.start()
        self.server.load_state_dict(values)
        for worker in self.workers:  # all are started again, but for those that are gone
            if self.state[worker] != "gone":
                self.state[worker] = "asks"
            elif worker not in self.rounds.gone:
                self.server.lose(worker, for_good=True)

    def able(self, worker):
        """Whether a worker can do something now."""
        if self.state[worker] == "asks":
            return self.server.ready(worker) and self.has_round(worker)
        return self.state[worker] == "trains"

    def has_round(self, worker):
        return worker in self.rounds.members

    def act(self, worker):
        if self.state[worker] == "trains":
            self.pushed(worker, self.server.push(worker, numbers(2.0)))
            self.state[worker] = "asks"
        elif self.server.ready(worker) and self.server.take(worker) is not None:
            self.state[worker] = "trains"

    def lose(self, worker):
        self.server.lose(worker, for_good=False)
        self.state[worker] = "lost"

    def come_back(self, worker):
        self.server.come_back(worker)
        self.state[worker] = "asks"

    def give_up(self, worker):
        self.server.lose(worker, for_good=True)
        self.state[worker] = "gone"

    def speak_late(self, pick):
        """The core knows no connections."""

    def follow(self, pick):
        left = [worker for worker in self.workers if worker not in self.rounds.gone]
        self.rounds.follow({worker: 1.0 + (pick * (worker + 1)) % 7 for worker in left})

    @property
    def excused(self):
        """Whether nobody has to be able to go on."""
        return False

    # -------------------------------------------------------------------------------- what counts

    def check_leads(self):
        """Nobody has begun a round too far ahead, of those that were never lost."""
        rule = self.plan.server
        most = {"asp": 10**9, "bsp": 0, "ssp": rule.staleness}[rule.consistency]
        now = {(worker, ticket.number) for worker, ticket in self.rounds.open.items()}
        for worker, _ in now - self.open_before:
            if worker in self.steady:
                slowest = min(self.pushes[one] for one in self.steady)
                assert self.pushes[worker] - slowest <= most
        self.open_before = now

    def pushed(self, worker, ticket):
        self.trained.append(ticket)
        self.pushes[worker] += 1

    def present(self):
        return [one for one in self.workers if self.state[one] not in self.absent]

    def keep(self):
        self.kept = copy.deepcopy((self.values(), self.trained, self.pushes, self.steady))

    def restart(self):
        """The server was killed: all begin again from what was kept."""
        values, self.trained, self.pushes, self.steady = copy.deepcopy(self.kept)
        self.restore(values)
        self.open_before = {(worker, ticket.number) for worker, ticket in self.rounds.open.items()}

    def check(self):
        """Somebody can go on, or whatever is left is in the hands of the absent."""
        rounds = self.rounds
        self.steady &= set(self.present()) & set(rounds.members)
        assert rounds.committed <= rounds.total
        self.check_leads()
        if rounds.finished or not self.present() or self.excused:
            return
        if not any(map(self.able, self.present())):
            assert not set(rounds.members) & set(self.present())
            assert set(rounds.open) <= set(self.workers) - set(self.present())

    def event(self, kind, pick):
        present, lost = self.present(), [w for w in self.workers if self.state[w] == "lost"]
        if kind == "lose" and present:
            self.lose(present[pick % len(present)])
        elif kind == "return" and lost:
            self.come_back(lost[pick % len(lost)])
        elif kind == "give up" and len(present + lost) > 1:
            self.give_up((present + lost)[pick % len(present + lost)])
        elif kind == "late":
            self.speak_late(pick)
        elif kind == "keep":
            self.keep()
        elif kind == "restart":
            self.restart()
        elif kind == "follow":
            self.follow(pick)
        elif kind == "act" and present:
            self.act(present[pick % len(present)])

    def finish(self, chance):
        """The rest: all do what they can; when that is nothing, one of the absent comes back."""
        for _ in range(2000):
            if self.rounds.finished:
                return
            self.check()
            able = [one for one in self.present() if self.able(one)]
            lost = [one for one in self.workers if self.state[one] == "lost"]
            if able:
                self.act(chance.choice(able))
                continue
            assert lost
            if chance.random() < 0.3 and self.present():
                self.give_up(chance.choice(lost))
            else:
                self.come_back(chance.choice(lost))
        raise AssertionError("the run does not come to an end")


class CoordinatorCrowd(Crowd):
    """A `Crowd` of a `ServerCoordinator`: workers come, ask, get answers, settle and push."""

    def start(self):
        self.coordinator = ServerCoordinator(self.plan, Recorder(None, self.plan))
        self.links, self.former, self.tickets = {}, {}, {}
        for worker in self.workers:
            self.join(worker)

    @property
    def rounds(self):
        return self.coordinator.server.rounds

    def values(self):
        return self.coordinator.values()

    def join(self, worker):
        self.links[worker] = SimpleNamespace(cut=lambda: None)
        hello = Hello(worker, f"here/{worker}", (), {})
        weights = numbers(1.0) if worker == 0 else None
        self.coordinator.join(hello, weights, self.links[worker])

    def restore(self, values):
        self.coordinator = ServerCoordinator(self.plan, Recorder(None, self.plan))
        self.coordinator.restore(values, 0, 0.0)
        self.links, self.tickets = {}, {}
        for worker in self.workers:
            if self.state[worker] == "gone":
                self.coordinator.give_up(worker)
            else:
                self.join(worker)
                self.state[worker] = "asks"

    def able(self, worker):
        if self.state[worker] == "waits":
            return worker in self.coordinator._answers
        return self.state[worker] in ("asks", "settles", "trains")

    def act(self, worker):
        link, state = self.links[worker], self.state[worker]
        if state == "asks":
            self.coordinator.ask(worker, link)
            self.state[worker] = "waits"
        elif state == "waits":
            answer = self.coordinator.answer(worker, link, 0.0)
            if answer is not None:
                self.tickets[worker] = answer[0].ticket
                self.state[worker] = "settles"
        elif state == "settles":
            self.coordinator.settle(worker, link, Settled(exchange=0.1))
            self.state[worker] = "trains" if self.tickets[worker] else "done"
        elif state == "trains":
            self.push(worker, link)
            self.state[worker] = "waits"

    def push(self, worker, link):
        ticket = self.rounds.open[worker]
        seconds = 0.1 * (1 + len(self.trained) * (worker + 2) % 7)
        trained = replace(TRAINED, compute=seconds)
        self.coordinator.push(worker, link, numbers(2.0), trained, 0.0)
        self.pushed(worker, ticket)

    def lose(self, worker):
        self.former[worker] = self.links.pop(worker)
        self.coordinator.lose(worker, self.former[worker], "killed")
        self.state[worker] = "lost"

    def come_back(self, worker):
        self.join(worker)
        self.state[worker] = "asks"

    def give_up(self, worker):
        if worker in self.links:
            self.former[worker] = self.links.pop(worker)
        self.coordinator.give_up(worker)
        self.state[worker] = "gone"

    def speak_late(self, pick):
        """What a connection still brings that another has replaced counts for nothing."""
        for worker, link in self.former.items():
            before = self.rounds.committed, sorted(self.rounds.open)
            with pytest.raises(ConnectionError):
                self.coordinator.push(worker, link, numbers(2.0), TRAINED, 0.0)
            with pytest.raises(ConnectionError):
                self.coordinator.leave(worker, link)
            assert before == (self.rounds.committed, sorted(self.rounds.open))

    def follow(self, pick):
        """By measured times, at the end of each epoch."""

    @property
    def excused(self):
        return not self.coordinator.begun and len(self.present()) + len(
            self.coordinator.members.gone
        ) < len(self.workers)


def live(crowd, events, chance):
    for kind, pick in events:
        if crowd.rounds.finished:
            break
        crowd.event(kind, pick)
        crowd.check()
    crowd.finish(chance)
    size = crowd.plan.data.train_samples
    trained = sorted(
        (epoch, sample)
        for ticket in crowd.trained
        for epoch, first, last in segments(ticket, size)
        for sample in range(first, last)
    )
    assert trained == [(e, n) for e in range(crowd.plan.epochs) for n in range(size)]
    assert crowd.rounds.committed == crowd.rounds.total


ALONE = [("act", 0), ("act", 1)] * 4 + [("lose", 1)] + [("act", 0)] * 8  # worker 0, for a while
BOTH_LOST = [*ALONE, ("lose", 0), ("return", 1), ("return", 0)]
KEPT_MEANWHILE = [*ALONE, ("keep", 0), ("restart", 0)]


@pytest.mark.parametrize("kind", [Crowd, CoordinatorCrowd])
@pytest.mark.parametrize("consistency", CONSISTENCIES)
@pytest.mark.parametrize("events", [BOTH_LOST, KEPT_MEANWHILE])
def test_nobody_waits_for_one_that_was_away_while_others_went_on(kind, consistency, events):
    crowd = kind(make_plan((6, 6), consistency, None, 12))
    live(crowd, events, Random(0))
    name, staleness = consistency
    counts = crowd.rounds.ended.values()
    assert name == "asp" or max(counts) - min(counts) <= (staleness or 0) + 1


@examples(80, derandomize=True)
@pytest.mark.parametrize("kind", [Crowd, CoordinatorCrowd])
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.sampled_from(CONSISTENCIES),
    st.sampled_from([None, None, 1, 2]),
    st.integers(1, 6),
    st.lists(st.integers(0, 12 * len(KINDS) - 1), max_size=50),
    st.integers(0, 2**32),
)
def test_somebody_can_go_on_whatever_happens(
    kind, shares, consistency, exchange_steps, epochs, numbered, seed
):
    events = [(KINDS[number // 12], number % 12) for number in numbered]
    live(kind(make_plan(shares, consistency, exchange_steps, epochs)), events, Random(seed))
