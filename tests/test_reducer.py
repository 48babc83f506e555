"""Gradients summed over two real processes, against one process with the whole batch."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from batchwright.distributed.buckets import sqr_norms
from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer, buffer_bytes, summed
from batchwright.distributed.tally import QueuedWork, Tally, WorkerNote
from batchwright.errors import TrainingError

SHARES = (11, 5)
BATCH = sum(SHARES)
CPU = torch.device("cpu")
pytestmark = pytest.mark.slow


class Network(nn.Module):
    """Convolutions without BatchNorm; one layer frozen, one unused, one only for large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.frozen = nn.Conv2d(8, 8, 3, padding=1)
        self.unused = nn.Linear(4, 4)
        self.large = nn.Conv2d(8, 8, 1)
        self.last = nn.Linear(8, 5)
        self.frozen.requires_grad_(False)

    def forward(self, images):
        features = functional.relu(self.frozen(functional.relu(self.first(images))))
        if len(images) > 5:
            features = features + self.large(features)
        return self.last(features.mean(dim=(2, 3)))


def make_network(dtype, channels_last=False):
    torch.manual_seed(0)
    network = Network().to(dtype)
    return network.to(memory_format=torch.channels_last) if channels_last else network


def make_batch(dtype):
    random = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 6, 6, generator=random, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 5, (BATCH,), generator=random)


def part_of(batch, rank):
    first = sum(SHARES[:rank])
    return tuple(values[first : first + SHARES[rank]] for values in batch)


def loss_of(network, images, labels):
    return functional.cross_entropy(network(images), labels)


def gradients(network):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in network.named_parameters()
    }


CASES = {
    "float64": {"dtype": torch.float64},
    "float32": {"dtype": torch.float32},
    "small buckets": {"dtype": torch.float64, "bucket_bytes": 700},
    "a bucket each": {"dtype": torch.float64, "bucket_bytes": 1},
    "micro-batches": {"dtype": torch.float64, "micro": 6, "bucket_bytes": 700},
    "float32 channels last": {"dtype": torch.float32, "channels_last": True, "bucket_bytes": 700},
    "told by the device": {"dtype": torch.float32, "on_device": True},
    "bfloat16": {"dtype": torch.bfloat16, "bucket_bytes": 300},
    "taken": {"dtype": torch.float64, "micro": 6, "bucket_bytes": 700, "take": True},
    "float32 micro-batches": {"dtype": torch.float32, "micro": 4, "bucket_bytes": 700},
    "float32 taken": {"dtype": torch.float32, "micro": 4, "bucket_bytes": 700, "take": True},
    "bfloat16 micro-batches": {"dtype": torch.bfloat16, "micro": 4, "bucket_bytes": 300},
    "bfloat16 taken": {"dtype": torch.bfloat16, "micro": 4, "bucket_bytes": 300, "take": True},
    "one norm": {"dtype": torch.float64, "bucket_bytes": 700, "per_tensor": False},
    "one norm taken": {
        "dtype": torch.float64,
        "micro": 6,
        "bucket_bytes": 700,
        "take": True,
        "per_tensor": False,
    },
}


def reduce_case(
    rank,
    group,
    *,
    dtype,
    bucket_bytes=2**20,
    micro=BATCH,
    channels_last=False,
    take=False,
    per_tensor=True,
    on_device=False,
):
    """Two steps, so that the second shows whether the first left anything behind."""
    network = make_network(dtype, channels_last)
    reducer = Reducer(network.parameters(), group, bucket_bytes, per_tensor=per_tensor)
    assert reducer.buffer_bytes == buffer_bytes(
        network.parameters(), bucket_bytes, per_tensor=per_tensor
    )
    known = partial(torch.tensor, dtype=torch.float64) if on_device else float
    note = WorkerNote(rank + 1.0, 2.0, 3.0, known(rank + 4.0))
    images, labels = part_of(make_batch(dtype), rank)
    for step in range(2):
        network.zero_grad()
        parts = list(zip(images.split(micro), labels.split(micro), strict=True))
        loss = 0.0
        for index, part in enumerate(parts):
            if index == len(parts) - 1 and step == 0:  # not armed: all is sent at the end
                reducer.arm()
            value = loss_of(network, *part)
            (value * len(part[0]) / BATCH).backward()
            loss += float(value.detach()) * len(part[0])
            if take and index < len(parts) - 1:
                reducer.take(len(part[0]) / BATCH)
        tally = Tally(len(images), known(loss), stop=float(rank == 1), checkpoint=1.0, note=note)
        tally = reducer.finish(tally, (len(parts[-1][0]) if take else SHARES[rank]) / BATCH)
        if step == 0:
            first = gradients(network)
    strides = {name: p.grad.stride() for name, p in network.named_parameters() if p.requires_grad
               and p.grad is not None}  # fmt: skip
    reducer.close()
    own = {name: p.stride() for name, p in network.named_parameters()}
    same_strides = all(own[name] == stride for name, stride in strides.items())
    return first, gradients(network), asdict(tally), same_strides


def all_cases(rank):
    group = Group(CPU, timeout=200)
    try:
        return {name: reduce_case(rank, group, **case) for name, case in CASES.items()}
    finally:
        group.close()


@pytest.fixture(scope="module")
def reduced(crew):
    return crew.together(all_cases, workers=2)


def reference(dtype, micro=BATCH):
    """Gradient and loss of the whole batch in one process, and each worker's own mean gradient."""
    own, weighted, loss = [], None, 0.0
    for rank in range(2):
        network = make_network(dtype)
        images, labels = part_of(make_batch(dtype), rank)
        for part in zip(images.split(micro), labels.split(micro), strict=True):
            value = loss_of(network, *part)
            (value * (len(part[0]) / SHARES[rank])).backward()
            loss += float(value.detach()) * len(part[0])
        own.append(gradients(network))
    weighted = {
        name: add(*(scaled(g[name], s / BATCH) for g, s in zip(own, SHARES, strict=True)))
        for name in own[0]
    }
    return weighted, own, loss


def scaled(gradient, share):
    return None if gradient is None else gradient * share


def add(one, two):
    if one is None or two is None:
        return one if two is None else two
    return one + two


def distance(one, two):
    """Relative L2 distance over all tensors together."""
    names = [name for name, gradient in two.items() if gradient is not None]
    apart = torch.cat([(one[n] - two[n]).flatten().double() for n in names])
    return float(apart.norm() / torch.cat([two[n].flatten().double() for n in names]).norm())


def test_unequal_batches_give_the_gradient_of_their_union(reduced):
    """In one process, over all 16 samples at once, where every layer sees each sample alike."""
    network = make_network(torch.float64)
    images, labels = make_batch(torch.float64)
    outputs = torch.cat([network(part_of((images, labels), rank)[0]) for rank in range(2)])
    functional.cross_entropy(outputs, labels).backward()
    union = gradients(network)
    _, own, _ = reference(torch.float64)
    plain = {name: add(scaled(own[0][name], 0.5), scaled(own[1][name], 0.5)) for name in own[0]}
    ours = reduced[0]["float64"][0]
    assert distance(ours, union) <= 1e-12
    assert distance(plain, union) > 0.1  # 0.35: what averaging without weights would do


@pytest.mark.parametrize("name", [name for name in CASES if "bfloat16" not in name])
def test_every_layout_gives_the_same_gradient(reduced, name):
    case = CASES[name]
    wanted, _, _ = reference(case["dtype"], case.get("micro", BATCH))
    for rank in range(2):
        for found in reduced[rank][name][:2]:
            if case["dtype"] == torch.float64:
                assert distance(found, wanted) <= 1e-12
            for key, gradient in wanted.items():
                if gradient is not None:
                    assert distance({key: found[key]}, {key: gradient}) <= 1e-4


def test_half_precision_gradients_are_summed_and_counts_stay_exact(reduced):
    wanted, _, _ = reference(torch.bfloat16)
    found, _, tally, _ = reduced[0]["bfloat16"]
    assert distance(found, wanted) < 0.02
    assert tally["weight"] == BATCH


@pytest.mark.parametrize("name", CASES)
def test_both_workers_hold_the_same_bits(reduced, name):
    for one, two in zip(reduced[0][name][:2], reduced[1][name][:2], strict=True):
        for key in one:
            assert one[key] is two[key] is None or torch.equal(one[key], two[key])


@pytest.mark.parametrize("name", CASES)
def test_frozen_and_unused_parameters_keep_none(reduced, name):
    found = reduced[0][name][0]
    missing = {key for key, gradient in found.items() if gradient is None}
    wanted = {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}
    if CASES[name].get("micro", BATCH) <= 5:
        wanted |= {"large.weight", "large.bias"}
    assert wanted == missing


def test_a_layer_used_by_one_worker_only_has_that_workers_gradient(reduced):
    _, own, _ = reference(torch.float64)
    assert own[1]["large.weight"] is None
    wanted = own[0]["large.weight"] * SHARES[0] / BATCH
    for rank in range(2):
        assert torch.allclose(reduced[rank]["float64"][0]["large.weight"], wanted, rtol=1e-12)


def test_gradients_have_their_parameters_memory_format(reduced):
    assert reduced[0]["float32 channels last"][3]


@pytest.mark.parametrize("name", ["float64", "small buckets", "float32", "micro-batches",
                                  "told by the device"])  # fmt: skip
def test_the_tally_sums_what_every_worker_says(reduced, name):
    case = CASES[name]
    _, own, loss = reference(case["dtype"], case.get("micro", BATCH))
    trained = [key for key, p in make_network(case["dtype"]).named_parameters() if p.requires_grad]
    norms = [
        sum(
            s / BATCH * float(g[key].double().square().sum())
            for g, s in zip(own, SHARES, strict=True)
            if g[key] is not None
        )
        for key in trained
    ]
    for rank in range(2):
        tally = reduced[rank][name][2]
        assert tally["weight"] == BATCH
        assert tally["loss"] == pytest.approx(loss, rel=1e-5)
        assert (tally["stop"], tally["checkpoint"]) == (1.0, 2.0)
        assert tally["local_sqr_norms"].tolist() == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_every_worker_s_note_has_its_own_place(reduced, name):
    for each in reduced:
        assert each[name][2]["notes"] == ((1.0, 2.0, 3.0, 4.0), (2.0, 2.0, 3.0, 5.0))


@pytest.mark.parametrize("name", CASES)
def test_squared_norms_are_those_of_the_gradient_that_was_summed(reduced, name):
    found, tally = reduced[0][name][1:3]
    trained = [key for key, p in make_network(torch.float32).named_parameters() if p.requires_grad]
    squares = [0.0 if found[key] is None else float(found[key].double().square().sum())
               for key in trained]  # fmt: skip
    wanted = [sum(squares)] if "one norm" in name else squares
    assert tally["sqr_norms"].tolist() == pytest.approx(
        wanted, rel=0.02 if "bfloat16" in name else 1e-6
    )


@pytest.mark.parametrize(("whole", "each"), [("one norm", "small buckets"),
                                             ("one norm taken", "taken")])  # fmt: skip
def test_one_norm_is_the_sum_of_those_of_all_tensors(reduced, whole, each):
    for found in reduced:
        (local,) = found[whole][2]["local_sqr_norms"].tolist()
        assert local == pytest.approx(float(found[each][2]["local_sqr_norms"].sum()))


@pytest.mark.parametrize("kind", ["float32 ", "bfloat16 "])
def test_looking_at_each_micro_batch_leaves_the_bits_of_the_sum(reduced, kind):
    for each in reduced:
        for taken, added in zip(
            each[f"{kind}taken"][:2], each[f"{kind}micro-batches"][:2], strict=True
        ):
            assert taken.keys() == added.keys()
            for key, gradient in taken.items():
                assert gradient is added[key] is None or torch.equal(gradient, added[key])


def test_every_micro_batch_of_every_worker_is_a_part(reduced):
    trained = [key for key, p in make_network(torch.float64).named_parameters() if p.requires_grad]
    wanted, parts = dict.fromkeys(trained, 0.0), 0
    for rank in range(2):
        images, labels = part_of(make_batch(torch.float64), rank)
        for part in zip(images.split(6), labels.split(6), strict=True):
            network = make_network(torch.float64)
            loss_of(network, *part).backward()
            parts += 1
            for key, gradient in gradients(network).items():
                if gradient is not None:
                    wanted[key] += len(part[0]) / BATCH * float(gradient.square().sum())
    for each in reduced:
        tally = each["taken"][2]
        assert tally["parts"] == parts == 3
        assert tally["local_sqr_norms"].tolist() == pytest.approx(list(wanted.values()), rel=1e-5)


def test_one_worker_alone_sees_its_micro_batches_too():
    network, batch = make_network(torch.float32), make_batch(torch.float32)
    reducer = Reducer(network.parameters(), Group(CPU))
    own = []
    for keep in (False, True):
        for left, part in enumerate(zip(*(values.split(4) for values in batch), strict=True)):
            (loss_of(network, *part) / 4).backward()
            if keep and left < 3:
                reducer.take(1 / 4)
        tally = reducer.finish(Tally(weight=BATCH, loss=0.0), 1 / 4 if keep else 1.0)
        own.append(gradients(network))
        network.zero_grad()
    assert all(own[0][k] is own[1][k] is None or torch.equal(own[0][k], own[1][k]) for k in own[0])
    assert tally.parts == 4
    assert float(tally.local_sqr_norms.sum()) > sum(
        float(g.square().sum()) for g in own[1].values() if g is not None
    )
    wanted = torch.zeros_like(tally.local_sqr_norms)
    for part in zip(*(values.split(4) for values in batch), strict=True):
        network.zero_grad()
        loss_of(network, *part).backward()
        wanted += sqr_norms(reducer.parameters) / 4
    assert tally.local_sqr_norms.tolist() == pytest.approx(wanted.tolist(), rel=1e-5)


def test_one_worker_alone_may_want_one_norm_for_all():
    network, (images, labels) = make_network(torch.float64), make_batch(torch.float64)
    found = []
    for per_tensor in (True, False):
        reducer = Reducer(network.parameters(), Group(CPU), per_tensor=per_tensor)
        (loss_of(network, images[:4], labels[:4]) / 4).backward()
        reducer.take(1 / 4)
        (loss_of(network, images[4:], labels[4:]) * 3 / 4).backward()
        found.append(reducer.finish(Tally(weight=BATCH, loss=0.0), 3 / 4))
        network.zero_grad()
    each, whole = found
    for one, all_of_them in (
        (each.local_sqr_norms, whole.local_sqr_norms),
        (each.sqr_norms, whole.sqr_norms),
    ):
        assert all_of_them.tolist() == pytest.approx([float(one.sum())])


def test_gradients_are_added_where_both_are_there():
    one, two = torch.ones(2), torch.full((2,), 3.0)
    both, first, second, neither = summed([one, one.clone(), None, None], [two, None, two, None])
    assert both is one
    assert both.tolist() == [4.0, 4.0]
    assert (first.tolist(), second.tolist(), neither) == ([1.0, 1.0], [3.0, 3.0], None)
    assert summed([], [one, None]) == [one, None]


def test_nothing_is_held_before_the_first_gradient_nor_after_the_last():
    layer = nn.Linear(2, 2)
    reducer = Reducer(layer.parameters(), Group(CPU))
    assert reducer.empty
    layer(torch.ones(1, 2)).sum().backward()
    assert not reducer.empty
    reducer.take(1.0)
    assert all(p.grad is None for p in layer.parameters())
    assert not reducer.empty
    reducer.finish(Tally(weight=1.0, loss=0.0, missing=1.0), 0.0)
    assert reducer.empty


def test_a_step_in_vain_leaves_nothing_for_the_next():
    network = make_network(torch.float32)
    reducer = Reducer(network.parameters(), Group(CPU))
    loss_of(network, *make_batch(torch.float32)).backward()
    reducer.take(0.5)
    assert not reducer.empty
    reducer.finish(Tally(weight=0.0, loss=0.0, missing=1.0), 0.0)
    assert reducer.empty
    assert reducer.finish(Tally(weight=0.0, loss=0.0), 0.0).parts == 0
    assert all(p.grad is None for p in network.parameters())


def test_one_worker_alone_sends_nothing():
    network = make_network(torch.float32)
    reducer = Reducer(network.parameters(), Group(CPU))
    reducer.arm()
    loss_of(network, *make_batch(torch.float32)).backward()
    before = gradients(network)
    tally = Tally(weight=BATCH, loss=1.0)
    found = reducer.finish(tally, 1.0)
    assert found.sqr_norms.tolist() == sqr_norms(reducer.parameters).tolist()
    assert replace(found, sqr_norms=None) == replace(tally, parts=1, notes=(tally.note,))
    after = gradients(network)
    assert all(after[k] is before[k] is None or torch.equal(after[k], before[k]) for k in after)
    assert not reducer._hooks


ODD = ("nothing", "weight", "missing", "infinite", "no gradient")


def ahead_case(rank, workers):
    """By what is odd: what the device was told before the figures were read, and the host after."""
    group, found = Group(CPU, timeout=200), {}
    try:
        for odd in ODD:
            layer, flags = nn.Linear(2, 1), []
            reducer = Reducer(layer.parameters(), group)
            last = rank == workers - 1
            factor = torch.inf if odd == "infinite" and last else 1.0
            (factor * layer(torch.ones(1, 2)).sum()).backward()
            if odd == "no gradient":
                layer.bias.grad = None
            tally = Tally(weight=2.0, loss=0.0, missing=float(odd == "missing" and last))
            expected = 2.0 * workers + (odd == "weight")
            told = reducer.finish(tally, 1 / workers, QueuedWork(flags.append, expected))
            found[odd] = [None if flag is None else float(flag) for flag in flags], told.went_ahead
            reducer.close()
        return found
    finally:
        group.close()


def test_the_device_goes_ahead_only_where_the_host_finds_all_as_usual(crew):
    odd = {"weight": ([1.0], False), "missing": ([1.0], False), "infinite": ([1.0], False)}
    for found in crew.together(ahead_case, 2, workers=2):
        assert found == {"nothing": ([0.0], True), **odd, "no gradient": ([1.0], False)}
    # One worker knows beforehand of what is not infinite, and does not look for gradients.
    asked = {"weight": ([None], False), "missing": ([None], False)}
    alone = {"nothing": ([0.0], True), **odd, **asked, "no gradient": ([0.0], True)}
    assert crew.together(ahead_case, 1, workers=1) == [alone]


def test_squared_norms_are_per_parameter_and_0_without_a_gradient():
    network = make_network(torch.float64)
    loss_of(network, *make_batch(torch.float64)).backward()
    parameters = [p for p in network.parameters() if p.requires_grad]
    wanted = [0.0 if p.grad is None else float(p.grad.square().sum()) for p in parameters]
    assert sqr_norms(parameters).tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("others", [(), (torch.float32,), (torch.float64,)], ids=str)
def test_squared_norms_of_half_precision_neither_round_nor_overflow(dtype, others):
    parameters = [nn.Parameter(torch.zeros(100_000, dtype=one)) for one in (dtype, *others)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 300.0)
    assert sqr_norms(parameters).tolist() == pytest.approx([9e9] * len(parameters), rel=1e-3)


def test_a_sparse_gradient_is_told_from_dense_ones():
    dense, sparse = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(10, 3))
    dense.grad, sparse.grad = torch.ones(4), torch.ones(10, 3).to_sparse()
    with pytest.raises(TrainingError, match=r"shape \(10, 3\) is sparse"):
        sqr_norms([dense, sparse])


# ---------------------------------------------------------------- the order in which gradients come


class Backwards(nn.Module):
    """Layers that are used in another order than they are named in; one is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.third = nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(4, 4, bias=False)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, features):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(features)))))


def one_step(reducer, network, features):
    """A step on this worker's half; how many buckets had left when the backward pass was over."""
    network.zero_grad()
    reducer.arm()
    (network(features).square().mean() / 2).backward()
    sent = reducer._next
    reducer.finish(Tally(weight=4.0, loss=0.0), 0.5)
    return sent


def buckets_of(network, reducer):
    names = {p: name.partition(".")[0] for name, p in network.named_parameters()}
    return [[names[p] for p in bucket.parameters] for bucket in reducer._buckets]


def ordered(rank):
    group = Group(CPU, timeout=200)
    try:
        network = Backwards()
        features = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
        reducer = Reducer(network.parameters(), group, 1)
        found = {"before": buckets_of(network, reducer), "sent": []}
        found["sent"] = [one_step(reducer, network, features) for _ in range(2)]
        found["order"], found["after"] = reducer.order, buckets_of(network, reducer)
        network.second.requires_grad_(False)
        found["sent"].append(one_step(reducer, network, features))
        reducer.close()
        network.second.requires_grad_(True)
        unseen = Reducer(network.parameters(), group, 1)
        found["unseen"] = []
        for _ in range(3):
            network.zero_grad()
            (network(features).square().mean() / 2).backward()
            unseen.finish(Tally(weight=4.0, loss=0.0), 0.5)
            found["unseen"].append(unseen.order)
        unseen.close()
        for name, trained, order in (
            ("frozen then", True, [[0, 2], [1]]),
            ("resumed", True, found["order"]),
            ("frozen now", False, found["order"]),
        ):
            network.second.requires_grad_(trained)
            again = Reducer(network.parameters(), group, 1, order=order)
            found[name] = buckets_of(network, again)
            if trained:
                again.close()
        one_step(again, network, features)
        network.second.requires_grad_(True)
        found["unfrozen"] = again.add_unfrozen(), buckets_of(network, again), again.order
        one_step(again, network, features)
        found["gradient"] = network.second.weight.grad.abs().sum().item()
        again.close()
        return found
    finally:
        group.close()


def test_buckets_follow_the_order_in_which_gradients_came(crew):
    for found in crew.together(ordered, workers=2):
        assert found["before"] == [["second"], ["first"], ["unused"], ["third"]]
        assert found["after"] == [["third"], ["second"], ["first"], ["unused"]]
        assert found["order"] == [[0, 3, 2], [1]]
        # Nothing leaves early while the order is recorded; then neither the layer that has no
        # gradient holds up those before it, nor one that was frozen since those after it.
        assert found["sent"] == [0, 3, 3]


def test_after_three_steps_that_were_not_seen_the_last_layers_stay_first(crew):
    for found in crew.together(ordered, workers=2):
        assert found["unseen"] == [[], [], [[3, 2, 1, 0], []]]


def test_a_resumed_run_sums_in_the_order_that_was_recorded(crew):
    for found in crew.together(ordered, workers=2):
        assert found["resumed"] == found["after"]
        assert found["frozen then"] == found["before"]


def test_a_resumed_run_keeps_the_order_though_it_unfreezes_layers_only_later(crew):
    for found in crew.together(ordered, workers=2):
        assert found["frozen now"] == found["after"]
        assert found["unfrozen"] == (False, found["after"], found["order"])
        assert found["gradient"] > 0


class Turned(Backwards):
    """Uses two layers the other way round on the second worker."""

    def __init__(self, rank):
        super().__init__()
        self.layers = [self.first, self.second][:: 1 - 2 * rank]

    def forward(self, features):
        one, two = self.layers
        return self.third(torch.tanh(two(torch.tanh(one(features)))))


def turned(rank):
    """The order after a step in which one worker has no samples, and after one of both."""
    group = Group(CPU, timeout=200)
    try:
        network = Turned(rank)
        reducer = Reducer(network.parameters(), group, 1)
        found = []
        for idle in (1, None):
            network.zero_grad()
            reducer.arm()
            if rank != idle:
                (network(torch.ones(4, 4)).square().mean() / 2).backward()
            reducer.finish(Tally(weight=4.0, loss=0.0), 0.0 if rank == idle else 0.5)
            found.append(reducer.order)
        reducer.close()
        return found
    finally:
        group.close()


def test_the_order_is_that_of_worker_0_in_a_step_in_which_all_have_samples(crew):
    for found in crew.together(turned, workers=2):
        assert found == [[], [[0, 3, 2], [1]]]


def mixed_case(rank):
    """Sums of layers in several number formats, and whether the bytes are those foretold."""
    group = Group(CPU, timeout=200)
    try:
        formats = torch.float64, torch.float32, torch.bfloat16, torch.float32
        layers = [nn.Parameter(torch.ones(3, dtype=one)) for one in formats]
        reducer = Reducer(layers, group)
        sum((rank + 1) * layer.sum().double() for layer in layers).backward()
        reducer.finish(Tally(weight=1.0, loss=0.0), 0.5)
        reducer.close()
        return [p.grad.tolist() for p in layers], reducer.buffer_bytes - buffer_bytes(layers)
    finally:
        group.close()


def test_each_number_format_has_buckets_of_its_own(crew):
    for sums, more in crew.together(mixed_case, workers=2):
        assert sums == [[3.0] * 3] * 4
        assert more == 0


def complex_case(rank):
    """Two steps with a complex layer in the bucket that would be the last."""
    group = Group(CPU, timeout=200)
    try:
        weight = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
        reducer = Reducer([weight], group)
        for _ in range(2):
            weight.grad = None
            reducer.arm()
            ((rank + 1) * weight.abs().square().sum()).backward()
            tally = reducer.finish(Tally(weight=4.0, loss=float(rank)), 0.5)
        reducer.close()
        return weight.grad, weight.detach(), tally.weight, tally.sqr_norms
    finally:
        group.close()


def test_complex_gradients_are_summed_and_counts_are_real(crew):
    for gradient, weight, samples, norms in crew.together(complex_case, workers=2):
        assert torch.equal(gradient, 6 * weight)
        assert samples == 8
        assert norms.tolist() == pytest.approx([36 * 15])


class Tied(nn.Module):
    """Two checkpointed segments share one layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.shared = nn.Linear(8, 8)
        self.own = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, features, reentrant=None, segments=2):
        hidden = torch.tanh(self.first(features))
        parts = [self.segment, *[self.longer] * (segments - 1)]
        for part in parts:
            hidden = part(hidden) if reentrant is None else checkpoint(
                part, hidden, use_reentrant=reentrant
            )  # fmt: skip
        return self.last(hidden)

    def segment(self, hidden):
        return torch.tanh(self.shared(hidden))

    def longer(self, hidden):
        return torch.tanh(self.own(self.shared(hidden)))


def tied_case(rank, group, reentrant, segments=(2, 2, 2)):
    network = Tied()
    features = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))[4 * rank :][:4]
    reducer = Reducer(network.parameters(), group, 1)
    try:
        for count in segments:
            network.zero_grad()
            reducer.arm()
            (network(features, reentrant, count).square().mean() / 2).backward()
            reducer.finish(Tally(weight=4.0, loss=0.0), 0.5)
        return gradients(network)
    except TrainingError as error:
        return str(error)
    finally:
        reducer.close()


def tied_cases(rank):
    group = Group(CPU, timeout=200)
    try:
        found = {kind: tied_case(rank, group, kind) for kind in (None, False, True)}
        found["more than recorded"] = tied_case(rank, group, True, (1, 2))
        return found
    finally:
        group.close()


def test_a_gradient_that_comes_in_parts_is_summed_whole_or_refused(crew):
    """Reentrant checkpointing hands on a shared layer's gradient once for each segment."""
    for found in crew.together(tied_cases, workers=2):
        for kind in (False, True):
            assert distance(found[kind], found[None]) < 1e-6
        assert "came once more after it had been sent" in found["more than recorded"]
        assert "use_reentrant=False" in found["more than recorded"]
