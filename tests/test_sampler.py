"""Who gets which sample at which step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchwright.errors import PlanError
from batchwright.training.sampler import epoch_order, epoch_steps, micro_batches

calmly = settings(deadline=None, max_examples=60)  # nothing here is about time


@st.composite
def epochs(draw):
    """Samples, local batches and the least batch; every worker gets its least at full steps."""
    least = draw(st.integers(1, 2))
    local = draw(st.lists(st.integers(least, 40), min_size=1, max_size=6))
    samples = draw(st.integers(sum(local), 2000))
    return samples, local, least


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
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 240))
def test_a_batch_larger_than_the_data_is_refused(local, samples):
    assume(samples < sum(local))
    with pytest.raises(PlanError, match=f"{sum(local)} is larger than the {samples} training"):
        epoch_steps(samples, local, 1)


@calmly
@given(st.integers(1, 5000), st.integers(1, 600))
def test_micro_batches_are_as_few_and_as_even_as_can_be(size, most):
    parts = micro_batches(size, most)
    assert sum(parts) == size
    assert len(parts) == -(-size // most)
    assert max(parts) <= most
    assert max(parts) - min(parts) <= 1


@calmly
@given(st.integers(1, 300), st.integers(0, 50), st.integers(0, 2**63 - 1))
def test_the_order_is_a_permutation_that_epoch_and_seed_decide(samples, epoch, seed):
    order = epoch_order(samples, epoch, seed)
    assert torch.equal(order.sort().values, torch.arange(samples))
    assert torch.equal(order, epoch_order(samples, epoch, seed))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_order(100, epoch, seed) for epoch in range(3) for seed in range(3)]
    assert len({tuple(order.tolist()) for order in orders}) == 9
