"""`bw.Sampler` and `bw.weight`: unequal batches in a loop of somebody else's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import batchwright as bw
from batchwright.distributed.group import Group
from batchwright.errors import ArgumentError, DataError, PlanError
from batchwright.training.batches import unequal

SAMPLES, BATCH = 53, 16  # a tail of 5


def batches_of(workers, shares=None, *, epoch=0, state=None, **how):
    """What each worker gets: (indices, part) of each of its batches."""
    found = []
    for rank in range(workers):
        sampler = bw.Sampler(SAMPLES, BATCH, shares=shares, rank=rank, workers=workers, **how)
        if state is not None:
            sampler.load_state_dict(state)
        else:
            sampler.set_epoch(epoch)
        batches = list(sampler)
        found.append([(batch, sampler.part(at)) for at, batch in enumerate(batches)])
    return found


@settings(max_examples=60)
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.floats(0.1, 9), min_size=n, max_size=n))
    ),
    st.integers(1, 3),
    st.integers(0, 40),
)
def test_each_sample_counts_once_an_epoch_whatever_the_shares(workers_and_shares, passes, done):
    workers, shares = workers_and_shares
    state = {"epoch": 3, "done": done, "samples": SAMPLES, "seed": 0, "shares": []}
    each = batches_of(workers, shares, state=state, passes=passes)
    counted = [i for mine in each for batch, part in mine for i in batch if part.samples]
    assert len(counted) == len(set(counted)) == SAMPLES - done
    assert len({len(mine) for mine in each}) == 1
    for together in zip(*each, strict=True):
        assert len({part.total for _, part in together}) == 1


def test_a_step_has_the_same_samples_with_any_workers_and_shares():
    (alone,) = batches_of(1)
    steps = [set(batch) for batch, _ in alone]
    each = batches_of(3, (5, 2, 1), passes=2)
    for at, step in enumerate(steps):
        mine = {i for one in each for batch, _ in one[2 * at : 2 * at + 2] for i in batch}
        assert mine == step


def test_each_pass_over_it_is_the_next_epoch_and_set_epoch_says_another():
    sampler = bw.Sampler(SAMPLES, BATCH, rank=0, workers=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert next(iter(bw.Sampler(SAMPLES, BATCH, rank=0, workers=1, shuffle=False))) == list(
        range(16)
    )


def test_after_a_pass_that_was_left_early_the_next_one_is_the_next_epoch():
    sampler = bw.Sampler(SAMPLES, BATCH, rank=0, workers=1)
    whole = [list(sampler) for _ in range(3)]
    loader = DataLoader(torch.arange(SAMPLES), batch_sampler=sampler)
    sampler.set_epoch(0)
    assert next(iter(loader)).tolist() == whole[0][0]
    left = sampler.state_dict(1)
    assert [one.tolist() for one in loader] == whole[1]
    sampler.load_state_dict(left)
    assert next(iter(sampler)) == whole[0][1]  # what the checkpoint has left of its epoch
    assert list(sampler) == whole[1]
    sampler.load_state_dict(left)
    next(iter(sampler))
    sampler.set_epoch(0)
    assert list(sampler) == whole[0]


def test_it_goes_on_in_the_middle_of_an_epoch_with_other_workers():
    samplers = [bw.Sampler(SAMPLES, BATCH, shares=(3, 1), rank=r, workers=2) for r in range(2)]
    seen = []
    for sampler in samplers:
        sampler.set_epoch(2)
        ahead = iter(sampler)
        seen += next(ahead) + next(ahead)
        next(ahead)  # asked for by a loader process, and not trained on
    states = [sampler.state_dict(2) for sampler in samplers]
    assert states[0] == states[1]
    for workers in (1, 2, 3):
        rest = batches_of(workers, state=states[0])
        left = [i for mine in rest for batch, part in mine for i in batch if part.samples]
        assert sorted(seen + left) == list(range(SAMPLES))
    again = bw.Sampler(SAMPLES, BATCH, rank=0, workers=2)
    again.load_state_dict(states[0])
    assert again.local_batch_sizes == (12, 4)
    again.set_epoch(2)  # as trainers say it at the start of each epoch
    assert len(list(again)) == 2


def test_a_rest_too_small_for_more_workers_gives_no_pass_fewer_than_the_least():
    state = {"epoch": 3, "done": SAMPLES - 3, "samples": SAMPLES, "seed": 0, "shares": []}
    (((one, mine),), ((other, theirs),)) = batches_of(2, state=state, least=2)
    assert (len(one), mine.samples) == (3, 3)
    assert (len(other), theirs.samples) == (2, 0)  # only to keep the worker in step
    (mine,) = batches_of(1, state=state, least=2, passes=2)
    assert [(len(batch), part.samples) for batch, part in mine] == [(3, 3), (2, 0)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_are_numbered_on_the_cpu_whatever_the_default_device_is(shuffle):
    with torch.device("meta"):
        batches = list(bw.Sampler(7, 3, shuffle=shuffle))
    assert sorted(i for batch in batches for i in batch) == list(range(7))


def test_the_state_behind_the_last_batch_is_the_next_epoch():
    sampler = bw.Sampler(SAMPLES, BATCH, rank=0, workers=1)
    assert len(list(sampler)) == len(sampler) == 4
    assert sampler.state_dict()["epoch"] == 1
    sampler.set_epoch(1)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["done"]) == (1, 0)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"global_batch": 99}, "from 2 to 53"),
        ({"global_batch": 3, "passes": 2}, "from 4 to 53"),
        ({"shares": (1, 2, 3)}, "3 shares for 2 workers"),
        ({"shares": (1, 2), "workers": 1}, "2 shares for 1 worker: give"),
        ({"shares": (0, 0)}, "at least one must be positive"),
        ({"rank": 2}, "rank=2 of 2 workers"),
        ({"shares": 3}, "shares=3: give a number for each worker"),
        ({"shares": ("a", "b")}, r"shares=\('a', 'b'\): give a number"),
        ({"shares": "12"}, "shares='12': give a number"),
        ({"shares": ()}, r"shares=\(\): give a number"),
        ({"global_batch": "4"}, "global_batch='4' of Sampler: give a whole number"),
        ({"global_batch": 4.5}, "global_batch=4.5 of Sampler: give a whole number"),
        ({"data": 10.5}, "data=10.5 of Sampler: give a whole number"),
        ({"passes": 0}, "passes=0 of Sampler: give a number from 1"),
        ({"least": 0}, "least=0 of Sampler: give a number from 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(how, words):
    with pytest.raises(ArgumentError, match=words) as told:
        bw.Sampler(**{"data": SAMPLES, "global_batch": 16, "rank": 0, "workers": 2, **how})
    assert "\n" not in str(told.value)


def test_numbers_and_shares_may_be_those_of_numpy():
    numpy = pytest.importorskip("numpy")
    shares = numpy.array([3, 1])
    sampler = bw.Sampler(numpy.int64(8), numpy.int64(4), shares=shares, rank=0, workers=2)
    assert sampler.local_batch_sizes == (3, 1)


@pytest.mark.parametrize("how", [(3, 0), (-3, 2), (3, -1), (3, 6, 0)])
def test_a_weight_of_samples_that_cannot_be_is_refused_in_a_line(how):
    with pytest.raises(ArgumentError, match=f"weight of samples={how[0]}, total={how[1]}"):
        bw.weight(torch.tensor(1.0), *how, workers=1)


def test_data_that_can_only_be_iterated_and_another_data_sets_state_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    with pytest.raises(DataError, match="can only be iterated"):
        bw.Sampler(Stream(), 2)
    state = bw.Sampler(50, 10, rank=0, workers=1).state_dict()
    with pytest.raises(PlanError, match="samples=50 and here it is 53"):
        bw.Sampler(SAMPLES, 10, rank=0, workers=1).load_state_dict(state)


def test_several_passes_need_the_samples_of_all_and_no_samples_count_nothing():
    with pytest.raises(ArgumentError, match="total="):
        bw.weight(torch.tensor(1.0), 4, passes=2)
    assert bw.weight(torch.tensor(float("nan")), 0, 8).item() == 0
    assert bw.weight(torch.tensor(2.0), 4, workers=1).item() == 2


@pytest.mark.parametrize("over", [0.9, 3.7, 2**24 + 1])
def test_a_mean_may_be_over_weights_of_classes_or_many_pixels(over):
    """As a whole number, or in float32, their sum over the workers would be another."""
    assert bw.weight(torch.tensor(2.0, dtype=torch.float64), over).item() == 2


def test_a_sampler_that_was_made_before_its_group_is_refused(monkeypatch):
    """It would give this worker the samples of all."""
    sampler, given = bw.Sampler(SAMPLES, BATCH), bw.Sampler(SAMPLES, BATCH, rank=0, workers=1)
    monkeypatch.setattr(unequal, "place_among_workers", lambda: (1, 2))
    with pytest.raises(ArgumentError, match="made as worker 0 of 1, and this is worker 1 of 2"):
        next(iter(sampler))
    assert len(list(given)) == 4
    assert len(list(bw.Sampler(SAMPLES, BATCH))) == 4


def test_a_sampler_that_was_made_in_its_group_may_be_read_behind_it(monkeypatch):
    """Or in a process beside the worker, which is in no group."""
    with monkeypatch.context() as joined:
        joined.setattr(unequal, "_in_group", lambda: True)
        joined.setattr(unequal.distributed, "get_rank", lambda: 1)
        joined.setattr(unequal.distributed, "get_world_size", lambda: 2)
        sampler = bw.Sampler(SAMPLES, BATCH)
    assert [len(batch) for batch in sampler] == [8, 8, 8, 2]


def data():
    random = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=random),
        torch.randint(3, (SAMPLES,), generator=random),
    )


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(rank, workers, passes, summed):
    """Two epochs in a plain DDP loop, the shares changed between them; gradients and weights."""
    group = Group(torch.device("cpu"), 60)  # joins as the environment says
    model = None
    try:
        plain = network()
        model = DistributedDataParallel(plain) if workers > 1 else plain
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
        sampler = bw.Sampler(data(), BATCH, shares=(3, 1)[:workers], passes=passes)
        loader = DataLoader(data(), batch_sampler=sampler)
        gradients = []
        for _ in range(2):
            for at, (inputs, labels) in enumerate(loader):
                part = sampler.part(at)
                last = (at + 1) % passes == 0
                model.require_backward_grad_sync = last  # as `no_sync` does
                loss = functional.cross_entropy(model(inputs), labels)
                loss = bw.weight(loss, part.samples) if summed else bw.weight(loss, *part)
                (loss / passes).backward()
                if last:
                    gradients.append([p.grad.clone() for p in plain.parameters()])
                    optimizer.step()
                    optimizer.zero_grad()
            sampler.set_shares((1, 5)[:workers])
        return gradients, [p.detach() for p in plain.parameters()]
    finally:
        group.barrier()
        # DDP holds the process group: were it the last to do so, gloo's threads would be awaited
        # with the interpreter locked, which one of them may want, to let go of a tensor.
        model = None
        group.close()


@pytest.mark.slow
@pytest.mark.parametrize(("passes", "summed"), [(1, False), (1, True), (3, False)])
def test_two_workers_with_unequal_shares_train_as_one_process_does(crew, passes, summed):
    both = crew.together(trained, 2, passes, summed, workers=2)
    alone = trained(0, 1, 1, False)
    for gradients, weights in both:
        assert len(gradients) == len(alone[0]) == 8
        for mine, whole in zip((*gradients, weights), (*alone[0], alone[1]), strict=True):
            for one, other in zip(mine, whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
