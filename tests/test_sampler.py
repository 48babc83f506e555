"""Who gets which sample at which step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from batchwright.algorithms.partition import apportion
from batchwright.errors import PlanError
from batchwright.training.batches.epoch_steps import EpochSteps, Shares
from batchwright.training.batches.sampler import (
    balancing_weights,
    epoch_order,
    micro_batches,
    step_sizes,
)
from example_counts import examples

calmly = examples(60)  # nothing here is about time


@st.composite
def epochs(draw):
    """Samples, local batches and the least batch; every worker gets its least at full steps."""
    least = draw(st.integers(1, 2))
    local = draw(st.lists(st.integers(least, 40), min_size=1, max_size=6))
    samples = draw(st.integers(sum(local), 2000))
    return samples, local, least


def make_walk(samples, local, least, *, rank=0, micro=10_000, first=0, done=0, together=False):
    sizes = step_sizes(samples - done, sum(local), workers=len(local), least=least)
    shares, how = Shares(first, tuple(local), micro), {"least": least, "together": together}
    return EpochSteps(torch.arange(samples), sizes, shares, start=done, ranks=(rank,), **how)


def epoch_steps(samples, local, least):
    walk = make_walk(samples, local, least)
    return [walk.step(index) for index in range(len(walk))]


@calmly
@given(epochs())
def test_every_sample_comes_exactly_once(epoch):
    samples, local, least = epoch
    steps = epoch_steps(samples, local, least)
    positions = [
        position for step in steps for r in range(len(local)) for position in range(*step.span(r))
    ]
    assert positions == list(range(samples))


@calmly
@given(epochs())
def test_all_steps_but_the_last_have_the_planned_shares(epoch):
    samples, local, least = epoch
    *before, last = epoch_steps(samples, local, least)
    assert all(step.local_batch_sizes == tuple(local) for step in before)
    assert len(last.local_batch_sizes) == len(local)


@calmly
@given(epochs())
def test_a_tail_is_its_own_step_only_where_everybody_gets_the_least(epoch):
    samples, local, least = epoch
    batch = sum(local)
    whole, tail = divmod(samples, batch)
    steps = epoch_steps(samples, local, least)
    assert all(min(step.local_batch_sizes) >= least for step in steps)
    if tail and tail >= least * len(local):
        assert [step.samples for step in steps] == [batch] * whole + [tail]
    else:
        assert [step.samples for step in steps] == [batch] * (whole - 1) + [batch + tail]


@calmly
@given(epochs(), st.randoms())
def test_a_step_has_the_same_samples_whatever_the_shares(epoch, random):
    samples, local, least = epoch
    other = list(local)
    random.shuffle(other)
    one = epoch_steps(samples, local, least)
    two = epoch_steps(samples, other, least)
    alone = epoch_steps(samples, [sum(local)], least * len(local))
    assert [(s.start, s.samples) for s in one] == [(s.start, s.samples) for s in two]
    assert [(s.start, s.samples) for s in one] == [(s.start, s.samples) for s in alone]


@calmly
@given(st.integers(1, 5000), st.integers(1, 600))
def test_micro_batches_are_as_few_and_as_even_as_can_be(size, most):
    parts = micro_batches(size, most)
    assert sum(parts) == size
    assert len(parts) == -(-size // most)
    assert max(parts) <= most
    assert max(parts) - min(parts) <= 1


def test_nothing_is_cut_into_no_parts():
    assert micro_batches(0, 4) == []


@calmly
@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 4))
def test_micro_batches_are_never_smaller_than_a_worker_can_train_on(size, most, least):
    parts = micro_batches(size, most, least)
    assert sum(parts) == size
    assert min(parts) >= min(size, least)


@calmly
@given(st.integers(1, 300), st.integers(0, 50), st.integers(0, 2**63 - 1))
def test_the_order_is_a_permutation_that_epoch_and_seed_decide(samples, epoch, seed):
    order = epoch_order(samples, epoch, seed)
    assert torch.equal(order.sort().values, torch.arange(samples))
    assert torch.equal(order, epoch_order(samples, epoch, seed))


def test_orders_stay_what_they_were_or_a_run_could_not_be_gone_on_with():
    def permutation(seed):
        return torch.randperm(100, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(epoch_order(100, 3, 2), permutation(2_000_009))
    assert torch.equal(epoch_order(100, 1, 2**62), permutation(2**62 + 1))


@pytest.mark.parametrize(
    ("samples", "local", "micro"), [(257, (64, 64), 64), (300, (50, 30), 16), (81, (16, 16), 8)]
)
def test_workers_that_exchange_in_each_micro_batch_have_equally_many(samples, local, micro):
    """Also at a tail, or where one has joined a step: other counts would never meet."""
    walks = [make_walk(samples, local, 2, rank=rank, micro=micro, together=True) for rank in (0, 1)]
    apart = [make_walk(samples, local, 2, rank=rank, micro=micro) for rank in (0, 1)]
    assert any(len(apart[0].parts(i)) != len(apart[1].parts(i)) for i in range(len(apart[0])))
    seen = []
    for index in range(len(walks[0])):
        one, other = ([part for _, part in walk.parts(index)] for walk in walks)
        assert len(one) == len(other)
        assert max(map(len, one + other)) <= micro
        seen += one + other
    assert torch.cat(seen).sort().values.tolist() == list(range(samples))


def test_where_they_cannot_all_say_so():
    for rank in (0, 1):
        walk = make_walk(202, (100, 2), 1, rank=rank, micro=10, together=True)
        with pytest.raises(PlanError, match="2 samples for one worker and 10 micro-batches"):
            walk.parts(0)


# ------------------------------------------------------------------------------ shares that change


@st.composite
def changing(draw):
    """An epoch, how far each worker's feed is ahead, and shares that change on the way."""
    samples, local, least = draw(epochs())
    batch, workers = sum(local), len(local)
    ahead = draw(st.lists(st.integers(0, 5), min_size=workers, max_size=workers))
    changes = {}
    for _ in range(draw(st.integers(0, 4))):
        weights = draw(st.lists(st.floats(0.1, 10), min_size=workers, max_size=workers))
        micro = draw(st.integers(2, 30))
        changes[draw(st.integers(0, 30))] = (apportion(weights, batch, least=least), micro)
    return samples, local, least, ahead, changes


@calmly
@given(changing())
def test_every_sample_comes_once_while_feeds_are_ahead_and_shares_change(epoch):
    samples, local, least, ahead, changes = epoch
    walks = [make_walk(samples, local, least, rank=rank) for rank in range(len(local))]
    feeds = [PrefetchingFeed(walk, most) for walk, most in zip(walks, ahead, strict=True)]
    seen = []
    for index in range(len(walks[0])):
        for walk, feed in zip(walks, feeds, strict=True):
            parts = [part for _, part in walk.parts(index)]
            fed = [feed.next() for _ in parts]
            assert [list(part) for part in fed] == [list(part) for part in parts]
            assert sum(map(len, fed)) == walk.step(index).local_batch_sizes[walks.index(walk)]
            seen += [int(position) for part in fed for position in part]
        if index in changes:
            sizes, micro = changes[index]
            first = max(walk.taken for walk in walks) + 1
            for walk in walks:
                walk.change(Shares(first, tuple(sizes), micro))
    assert sorted(seen) == list(range(samples))
    assert len({tuple(walk.step(i) for i in range(len(walk))) for walk in walks}) == 1


class PrefetchingFeed:
    """Asks for micro-batches ahead, as a loader with processes of its own does."""

    def __init__(self, walk, most):
        self.source, self.most, self.waiting = walk.ahead(), most, []

    def next(self):
        while len(self.waiting) <= self.most:
            part = next(self.source, None)
            if part is None:
                break
            self.waiting.append(part)
        return self.waiting.pop(0)


def test_a_change_applies_from_its_step_on():
    walk = make_walk(100, [6, 4], 1)
    walk.change(Shares(3, (2, 8), 4))
    assert [walk.step(i).local_batch_sizes for i in (2, 3)] == [(6, 4), (2, 8)]
    walk.change(Shares(3, (5, 5), 4))
    assert [walk.step(i).local_batch_sizes for i in (2, 3, 9)] == [(6, 4), (5, 5), (5, 5)]
    assert [one.first for one in walk.table] == [0, 3]


def test_before_a_feed_has_asked_the_first_step_that_is_left_can_change_and_none_before():
    walk = make_walk(100, [6, 4], 1, first=3, done=30)
    assert walk.taken == 2
    walk.change(Shares(3, (5, 5), 4))
    assert walk.step(3).local_batch_sizes == (5, 5)
    with pytest.raises(AssertionError):
        walk.change(Shares(2, (6, 4), 4))


def test_a_step_that_a_feed_has_asked_for_cannot_change():
    walk = make_walk(100, [6, 4], 1)
    ahead = walk.ahead()
    next(ahead), next(ahead)
    assert walk.taken == 1
    with pytest.raises(AssertionError):
        walk.change(Shares(1, (5, 5), 4))


@calmly
@given(epochs(), st.integers(1, 8), st.data())
def test_after_a_resume_with_other_workers_the_rest_comes_once(epoch, workers, data):
    samples, local, least = epoch
    batch = sum(local)
    assume(batch >= least * workers)
    first = data.draw(st.integers(0, len(make_walk(samples, local, least))))
    done = sum(make_walk(samples, local, least).step(i).samples for i in range(first))
    other = apportion([1.0] * workers, batch)
    walk = make_walk(samples, other, least, first=first, done=done)
    steps = [walk.step(i) for i in range(first, len(walk))]
    positions = [p for step in steps for r in range(workers) for p in range(*step.span(r))]
    assert positions == list(range(done, samples))
    few = [step for step in steps if 0 < step.samples < least]  # nobody can train on so few
    sizes = [size for step in steps if step not in few for size in step.local_batch_sizes]
    assert all(size == 0 or size >= least for size in sizes)


def test_a_tail_that_is_too_small_for_more_workers_gives_nobody_fewer_than_the_least():
    walk = make_walk(15, [2, 2, 2], 2, first=2, done=12)
    assert walk.step(2).local_batch_sizes == (3, 0, 0)


# --------------------------------------------------------------------------------- drawn by weight


def test_balanced_sampling_draws_all_classes_equally_often():
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    order = epoch_order(1000, 0, 0, balancing_weights(labels))
    assert balancing_weights(labels)[[0, 900, 999]].tolist() == [1 / 900, 1 / 90, 1 / 10]
    counts = labels[order].bincount()
    assert counts.tolist() == pytest.approx([333.3] * 3, rel=0.15)
    assert torch.equal(order, epoch_order(1000, 0, 0, balancing_weights(labels)))
    assert not torch.equal(order, epoch_order(1000, 1, 0, balancing_weights(labels)))


def test_a_sample_without_weight_is_never_drawn():
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    drawn = torch.cat([epoch_order(5, epoch, 0, weights) for epoch in range(200)])
    counts = drawn.bincount(minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert int(counts[3]) == pytest.approx(750, abs=60)


@pytest.mark.parametrize(("draw", "sample"), [(0.0, 1), (0.5, 3), (1.0, 3)])
def test_draws_at_an_edge_are_of_the_sample_behind_it_and_the_last_is_the_end(
    monkeypatch, draw, sample
):
    """A sample without weight is never drawn; rounding may take a draw to the end."""
    monkeypatch.setattr(torch, "rand", lambda count, **options: torch.full((count,), draw).double())
    assert epoch_order(4, 0, 0, torch.tensor([0.0, 2.0, 1.0, 3.0])).tolist() == [sample] * 4


def test_the_last_sample_is_drawn_as_often_as_its_weight_says():
    drawn = torch.cat([epoch_order(2, epoch, 0, torch.tensor([1.0, 3.0])) for epoch in range(500)])
    assert int(drawn.sum()) == pytest.approx(750, abs=60)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_order(100, epoch, seed) for epoch in range(3) for seed in range(3)]
    assert len({tuple(order.tolist()) for order in orders}) == 9
