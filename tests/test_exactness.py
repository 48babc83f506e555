"""The gradient of unequal local batches is that of their union; DDP's and a plain mean are not.

Real processes, a real session: one step over a whole small data set, whose gradient, as the
optimizer gets it, is held against one process with all samples at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from batchwright import Session
from batchwright.distributed.group import Group
from batchwright.errors import TrainingError
from batchwright.records import LearningRateRule, Stage
from batchwright.training.step.stepper import MAX_BAD_STEPS
from batchwright.workload.networks import resnet8, vgg8
from test_reducer import distance, gradients
from test_session import make_tiny_plan, summary_in

CLASSES, SIDE = 5, 8
EXACT = 1e-12  # relative L2 distance of float64 gradients, all tensors together
CLOSE = 1e-4  # the same in float32, for each tensor
FAR = 1e-3  # what a wrong weighting misses by at least; a tenth and more is usual

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


class Images(Dataset):
    """Noise with a label and its own index; later images are brighter, so that parts differ."""

    def __init__(self, count):
        random = torch.Generator().manual_seed(1)
        self.images = torch.randn(64, 3, SIDE, SIDE, generator=random, dtype=torch.float64)[:count]
        self.images += torch.linspace(-1, 1, count, dtype=torch.float64).view(-1, 1, 1, 1)
        self.labels = torch.randint(0, CLASSES, (64,), generator=random)[:count]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index], index


class PartlyUsed(nn.Module):
    """One layer frozen, one that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.frozen = nn.Conv2d(8, 8, 3, padding=1).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, images):
        features = functional.relu(self.frozen(functional.relu(self.first(images))))
        return self.last(features.mean(dim=(2, 3)))


def resnet_without_norm():
    network = resnet8(CLASSES)
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return network


NETWORKS = {
    "vgg8": partial(vgg8, CLASSES),
    "resnet8 without normalization": resnet_without_norm,
    "partly used": PartlyUsed,
}


def make_network(name, dtype):
    torch.manual_seed(0)
    return NETWORKS[name]().to(dtype)


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    network: str
    split: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    micro: int = 64
    precision: str = "float32"
    clip_norm: float | None = None

    @property
    def batch(self):
        return sum(self.split)


class Noting(torch.optim.SGD):
    """Keeps the gradients of every step as it gets them."""

    def __init__(self, network, lr=0.1, **options):
        super().__init__(network.parameters(), lr=lr, **options)
        self.network, self.noted = network, []

    def step(self, closure=None):
        self.noted.append(gradients(self.network))
        return super().step(closure)


def one_step(rank: int, case: Case) -> dict[str, Any]:
    """The gradient that a worker's optimizer gets, and the samples that this worker computed."""
    network = make_network(case.network, case.dtype)
    optimizer, parts = Noting(network), []
    plan = make_tiny_plan(
        case.split, epochs=1, samples=case.batch, micro=case.micro, precision=case.precision
    )
    with Session(
        network, optimizer, Images(case.batch), plan=plan, loaders=0, clip_norm=case.clip_norm
    ) as session:
        for _ in session.epochs():
            for images, labels, indices in session.batches():
                loss = functional.cross_entropy(network(images.to(case.dtype)), labels)
                session.step(loss)
                parts.append(indices.tolist())
    (gradient,) = optimizer.noted
    return {"gradient": gradient, "parts": parts}


def ddp_steps(rank: int, cases: list[Case]) -> list[dict[str, Tensor | None]]:
    """What `DistributedDataParallel` makes of the same unequal batches, case by case."""
    group = Group(torch.device("cpu"), 60)
    try:
        return [ddp_step(rank, case) for case in cases]
    finally:
        group.barrier()
        group.close()


def ddp_step(rank, case):
    network = make_network(case.network, case.dtype)
    first = sum(case.split[:rank])
    part = range(first, first + case.split[rank])
    wrapped = DistributedDataParallel(network)  # kept until the backward pass is over
    loss_over(wrapped, case, part).backward()
    return gradients(network)


def loss_over(network, case, indices):
    everything, chosen = Images(case.batch), list(indices)
    outputs = network(everything.images[chosen].to(case.dtype))
    return functional.cross_entropy(outputs, everything.labels[chosen])


def weighted(case, parts, weights):
    """In one process: sum over the parts of weight x gradient of the part's mean loss."""
    network = make_network(case.network, case.dtype)
    for part, weight in zip(parts, weights, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bfloat16"):
            loss = loss_over(network, case, part)
        (loss * weight).backward()
    return gradients(network)


def plain_mean(case, parts):
    """The mean of the workers' own mean gradients, whatever their batches: 1/n for each."""
    local = [[index for part in own for index in part] for own in parts]
    return weighted(case, local, [1 / len(local)] * len(local))


def union(case):
    """In one process: all samples at once."""
    return weighted(case, [range(case.batch)], [1.0])


def worst_distance(found, wanted):
    """The largest relative L2 distance of a single tensor."""
    present = [key for key, gradient in wanted.items() if gradient is not None]
    return max(distance({key: found[key]}, {key: wanted[key]}) for key in present)


def same(one, two):
    return all(
        one[key] is two[key] is None or torch.equal(one[key], two[key]) for key in one.keys() | two
    )


def global_norm(gradient):
    return math.sqrt(sum(float(g.square().sum()) for g in gradient.values() if g is not None))


def taken(crew, case):
    """One session's step: its gradient, the same bits on all, and each worker's micro-batches."""
    found = crew.together(one_step, case, workers=len(case.split))
    assert all(same(found[0]["gradient"], other["gradient"]) for other in found[1:])
    sizes = tuple(sum(map(len, each["parts"])) for each in found)
    assert sizes == case.split
    everyone = [index for each in found for part in each["parts"] for index in part]
    assert sorted(everyone) == list(range(case.batch))
    return found[0]["gradient"], [each["parts"] for each in found]


# --------------------------------------------------------------------------------- any split at all


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_any_split_gives_the_gradient_of_the_union(crew, workers):
    @settings(max_examples=8)
    @given(
        some.lists(some.integers(1, 16), min_size=workers, max_size=workers),
        some.sampled_from(sorted(NETWORKS)),
        some.integers(1, 16),
    )
    def holds(split, network, micro):
        case = Case(network, tuple(split), micro=micro)
        ours, parts = taken(crew, case)
        wanted = union(case)
        assert distance(ours, wanted) <= EXACT
        if len(set(split)) > 1:
            assert distance(plain_mean(case, parts), wanted) > FAR

    holds()


def test_ddp_is_the_plain_mean_of_the_workers_and_misses_by_far(crew):
    cases = [Case("vgg8", split) for split in [(1, 23), (11, 13), (12, 12)]]
    for case, theirs in zip(cases, crew.together(ddp_steps, cases, workers=2)[0], strict=True):
        wanted = union(case)
        halves = [[range(case.split[0])], [range(case.split[0], case.batch)]]
        assert distance(theirs, plain_mean(case, halves)) <= EXACT
        if len(set(case.split)) > 1:
            assert distance(theirs, wanted) > FAR
        else:
            assert distance(theirs, wanted) <= EXACT
        assert distance(taken(crew, case)[0], wanted) <= EXACT


SPLITS = [(1, 23), (5, 19), (11, 13), (2, 9, 13), (1, 2, 3, 18)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_in_float32_every_tensor_is_close(crew, network, split):
    case = Case(network, split, dtype=torch.float32)
    assert worst_distance(taken(crew, case)[0], union(case)) <= CLOSE


def test_what_is_frozen_or_unused_has_no_gradient(crew):
    gradient, _ = taken(crew, Case("partly used", (5, 19)))
    missing = {name for name, value in gradient.items() if value is None}
    assert missing == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}


@pytest.mark.parametrize("split", [(5, 19), (2, 9, 13)], ids=str)
@pytest.mark.parametrize("micro", [64, 4])
def test_autocast_gives_what_one_process_does_on_the_same_parts(crew, split, micro):
    case = Case("vgg8", split, torch.float32, micro=micro, precision="bfloat16")
    ours, parts = taken(crew, case)
    every_part = [part for own in parts for part in own]
    wanted = weighted(case, every_part, [len(part) / case.batch for part in every_part])
    assert worst_distance(ours, wanted) <= 1e-5  # the order of adding them up is all that differs
    assert distance(union(Case("vgg8", split, torch.float32)), wanted) > 1e-5  # autocast was on


@pytest.mark.parametrize("micro", [64, 4])
def test_clipping_goes_by_the_norm_of_the_unions_gradient(crew, micro):
    wanted = union(Case("vgg8", (5, 19)))
    most = 0.5 * global_norm(wanted)
    clipped, _ = taken(crew, Case("vgg8", (5, 19), micro=micro, clip_norm=most))
    assert global_norm(clipped) == pytest.approx(most, rel=1e-6)
    halved = {key: None if g is None else 0.5 * g for key, g in wanted.items()}
    assert distance(clipped, halved) <= 1e-6  # the norm is summed in float32
    whole, _ = taken(crew, Case("vgg8", (5, 19), micro=micro, clip_norm=4 * most))
    assert distance(whole, wanted) <= EXACT


# ----------------------------------------------------------------------- a loss over something else


def labelled_step(rank: int, split: tuple[int, ...]) -> tuple[dict[str, Any], list[int]]:
    """A loss over the labelled samples only, weighed by their number."""
    case = Case("vgg8", split)
    network = make_network(case.network, case.dtype)
    optimizer, counts = Noting(network), []
    plan = make_tiny_plan(split, epochs=1, samples=case.batch)
    with Session(network, optimizer, Images(case.batch), plan=plan, loaders=0) as session:
        for _ in session.epochs():
            for images, labels, _ in session.batches():
                labelled = labels > 1
                loss = functional.cross_entropy(network(images)[labelled], labels[labelled])
                session.step(loss, weight=int(labelled.sum()))
                counts.append(int(labelled.sum()))
    return optimizer.noted[0], counts


def test_a_weight_makes_it_the_mean_over_all_that_is_labelled(crew):
    split = (5, 7, 12)
    found = crew.together(labelled_step, split, workers=3)
    case = Case("vgg8", split)
    chosen = [index for index in range(case.batch) if Images(case.batch)[index][1] > 1]
    counts = [count for _, each in found for count in each]
    assert sum(counts) == len(chosen)
    shares = [count / size for count, size in zip(counts, split, strict=True)]
    assert max(shares) > min(shares)  # else the samples' numbers would do as weights
    assert distance(found[0][0], weighted(case, [chosen], [1.0])) <= EXACT


# --------------------------------------------------------------------------------- a whole training

SAMPLES, STAGES, EPOCHS_EACH = 56, 3, 2  # three whole steps and a tail of 8
EQUAL = ((8, 8),) * STAGES
CHANGING = ((11, 5), (2, 14), (15, 1))
RULE = LearningRateRule(
    base=0.05, base_batch=16, scaling="none", peak=0.05, warmup_epochs=1, decay="cosine"
)


def training_plan(shares):
    """A stage with each of ``shares``; the rate warms up and falls over all of them."""
    stages = tuple(
        Stage(
            epochs=EPOCHS_EACH,
            resolution=SIDE,
            learning_rate=RULE.peak,
            dropout=0,
            augmentation="none",
            local_batch_sizes=sizes,
            micro_batch_size=64,
        )
        for sizes in shares
    )
    plan = make_tiny_plan(shares[0], samples=SAMPLES, rule=RULE)
    return plan.model_copy(update={"stages": stages})


def train(rank: int, shares: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Weighted sums of each step's loss on this worker, held-out losses, and the last weights."""
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    network = resnet_without_norm().double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    losses, held_out = [], []
    with Session(
        network, optimizer, Images(SAMPLES), plan=training_plan(shares), loaders=0, clip_norm=1.0
    ) as session:
        for _ in session.epochs():
            for images, labels, _ in session.batches():
                loss = functional.cross_entropy(network(images), labels)
                losses.append(float(loss.detach()) * len(labels))
                session.step(loss)
            means = session.evaluate(
                Images(20),
                partial(functional.cross_entropy, reduction="none"),
                forward=lambda network, batch: (network(batch[0]), batch[1]),
            )
            held_out.append(means["value"])
    weights = torch.cat([p.detach().flatten() for p in network.parameters()])
    return {"losses": torch.tensor(losses), "held out": held_out, "weights": weights}


def trajectory(found):
    """Sum of the loss over the samples of each step, over all workers."""
    return torch.stack([each["losses"] for each in found]).sum(dim=0)


def test_changing_shares_train_like_equal_ones(crew):
    equal = crew.together(train, EQUAL, workers=2)
    changing = crew.together(train, CHANGING, workers=2)
    alone = crew.together(train, ((16,),) * STAGES, workers=1)
    four = crew.together(train, ((1, 2, 3, 10), (4, 4, 4, 4), (7, 1, 7, 1)), workers=4)
    steps = STAGES * EPOCHS_EACH * -(-SAMPLES // 16)
    assert len(trajectory(equal)) == steps
    assert trajectory(equal)[-4:].sum() < trajectory(equal)[:4].sum()  # it does learn
    for other in (changing, alone, four):
        assert torch.allclose(trajectory(other), trajectory(equal), rtol=1e-5)
        assert other[0]["held out"] == pytest.approx(equal[0]["held out"], rel=1e-9)
        assert torch.allclose(other[0]["weights"], equal[0]["weights"], rtol=1e-7, atol=1e-10)


# ------------------------------------------------------------------------ gradients that are no use


def train_with_faults(rank: int, folder: Any, faults: dict[int, int]) -> dict[str, Any]:
    """``faults``: by step, the worker whose loss is not a number there."""
    network = make_network("vgg8", torch.float64)
    optimizer, updated, weights = Noting(network), [], []
    plan = make_tiny_plan((5, 3), epochs=2, samples=40)
    with Session(
        network, optimizer, Images(40), plan=plan, loaders=0, run_folder=folder
    ) as session:
        for _ in session.epochs():
            for images, labels, _ in session.batches():
                loss = functional.cross_entropy(network(images), labels)
                bad = faults.get(len(updated)) == rank
                updated.append(session.step(loss * math.nan if bad else loss))
                weights.append(next(network.parameters()).detach().clone())
    return {"updated": updated, "weights": weights, "noted": len(optimizer.noted)}


def test_a_gradient_that_is_not_a_number_on_one_worker_skips_the_step_on_all(crew, tmp_path):
    found = crew.together(train_with_faults, tmp_path / "run", {2: 1, 3: 0, 7: 1}, workers=2)
    for each in found:
        assert [number for number, done in enumerate(each["updated"]) if not done] == [2, 3, 7]
        assert each["noted"] == 10 - 3
        assert torch.equal(each["weights"][1], each["weights"][3])
        assert not torch.equal(each["weights"][3], each["weights"][4])
        assert all(bool(w.isfinite().all()) for w in each["weights"])
    assert torch.equal(found[0]["weights"][-1], found[1]["weights"][-1])
    assert [epoch.skipped_steps for epoch in summary_in(tmp_path / "run").epochs] == [2, 1]


def never_finite(rank: int) -> str:
    network = make_network("vgg8", torch.float64)
    plan = make_tiny_plan((5, 3), epochs=MAX_BAD_STEPS, samples=16)
    faults = 0
    try:
        with Session(network, Noting(network), Images(16), plan=plan, loaders=0) as session:
            for _ in session.epochs():
                for images, labels, _ in session.batches():
                    loss = functional.cross_entropy(network(images), labels)
                    faults += 1
                    session.step(loss * math.inf if rank else loss)
    except TrainingError as error:
        return f"{faults}: {error}"
    return "no error"


def test_both_workers_end_with_the_same_line_after_many_of_them(crew):
    one, two = crew.together(never_finite, workers=2)
    assert one == two
    assert one.startswith(f"{MAX_BAD_STEPS}: gradients were infinite or not a number")
    assert f"{MAX_BAD_STEPS} steps in a row" in one
