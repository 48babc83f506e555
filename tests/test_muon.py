"""Muon over kernels: its steps are torch's, and to all else it is one ordinary optimizer."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.nn import functional

import batchwright as bw
from batchwright.distributed.group import Group
from batchwright.errors import JobError
from batchwright.probing.bench import Bench
from batchwright.probing.measure.memory import estimate_peak, weigh
from batchwright.records import Job, LearningRateRule
from batchwright.records.registries.networks import NETWORKS
from batchwright.workload import muon
from batchwright.workload.optimizers import without_compiler
from batchwright.workload.starting_weights import freeze
from batchwright.workload.task import build_network, build_optimizer
from far import Operations
from test_probe import tiny_image_data, tiny_job
from test_session import FEATURES, Images, Points, make_tiny_plan

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_OPERATIONS = 170
"""Of a step of the matrices of `resnet18` on a GPU."""

LAYOUTS = {
    "contiguous": (torch.contiguous_format, lambda kernel: kernel.flatten(1)),
    "channels last": (torch.channels_last, lambda kernel: kernel.permute(0, 2, 3, 1).flatten(1)),
}


class Net(nn.Module):
    """Kernels of both shapes, wide and tall, and all that is left to SGD."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 10, 1)
        self.depthwise = nn.Conv2d(10, 10, 1, groups=10)
        self.hidden = nn.Linear(10, 4)
        self.classifier = nn.Linear(4, 3)

    def forward(self, images):
        features = self.second(functional.relu(self.norm(self.first(images))))
        features = self.depthwise(features)
        return self.classifier(torch.tanh(self.hidden(features.mean(dim=(2, 3)))))


def make_net(layout=torch.contiguous_format, dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype).to(memory_format=layout)


def take_steps(network, optimizer, steps=3, seed=0, scale=1.0):
    """A few steps on seeded noise; the gradients are cleared after each."""
    random = torch.Generator().manual_seed(seed)
    dtype = next(network.parameters()).dtype
    for _ in range(steps):
        images = torch.randn(5, 3, 6, 6, generator=random, dtype=torch.float64).to(dtype)
        labels = torch.randint(0, 3, (5,), generator=random)
        (functional.cross_entropy(network(images), labels) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def same_bits(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


def assert_near(one, two, tolerance=1e-9):
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------- the arithmetic


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with 2.9")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_steps_are_those_of_torchs_muon_on_flattened_copies_bit_by_bit(
    layout, momentum, monkeypatch
):
    monkeypatch.setattr(muon, "_format_for", lambda matrix: torch.bfloat16)  # as torch's always is
    memory_format, flatten = LAYOUTS[layout]
    network = make_net(memory_format, torch.float32)
    ours = bw.muon(network, 0.1, momentum=momentum, weight_decay=0.01)
    kernels = muon.matrices_of(network)
    copies = [
        (flatten(kernel) if kernel.ndim == 4 else kernel).detach().clone() for kernel in kernels
    ]
    theirs = without_compiler(torch.optim.Muon)(  # which takes seconds to load
        copies, lr=0.1, momentum=momentum, weight_decay=0.01, nesterov=momentum > 0
    )
    for step in range(4):
        functional.cross_entropy(network(torch.randn(5, 3, 6, 6)), torch.arange(5) % 3).backward()
        for kernel, matrix in zip(kernels, copies, strict=True):
            matrix.grad = (flatten(kernel.grad) if kernel.ndim == 4 else kernel.grad).clone()
        for group in (ours.param_groups[0], theirs.param_groups[0]):
            group["lr"] = 0.1 / (step + 1)
        ours.step()
        theirs.step()
        ours.zero_grad()
        for kernel, matrix in zip(kernels, copies, strict=True):
            assert torch.equal(flatten(kernel) if kernel.ndim == 4 else kernel, matrix)


def test_what_is_not_orthogonal_takes_the_steps_of_torchs_sgd_bit_by_bit():
    network = make_net()
    for kernel in (kernels := muon.matrices_of(network)):
        kernel.requires_grad_(False)
    other = copy.deepcopy(network)
    for kernel in kernels:
        kernel.requires_grad_(True)
    ours = bw.muon(network, 0.0, sgd_lr=0.2, weight_decay=0.1)
    rest = [p for p in other.parameters() if p.requires_grad]
    theirs = torch.optim.SGD(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in rest if p.ndim <= 1]},
        ],
        lr=0.2,
        momentum=0.9,
        nesterov=True,
        fused=True,
    )
    take_steps(network, ours)
    take_steps(other, theirs)
    assert same_bits(values_of(network), values_of(other))


@given(
    rows=some.integers(1, 12),
    columns=some.integers(1, 12),
    seed=some.integers(0, 99),
    power=some.integers(-10, 20),
)
@settings(max_examples=50)
def test_singular_values_become_about_one_whatever_the_scale(rows, columns, seed, power):
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, columns, generator=random, dtype=torch.float64)
    left, _, right = torch.linalg.svd(wide, full_matrices=False)
    values = torch.linspace(0.05, 1, min(rows, columns), dtype=torch.float64)
    matrix = left @ torch.diag(values) @ right
    found = muon.orthogonal(matrix)
    assert found.shape == matrix.shape
    reached = torch.linalg.svdvals(found)
    assert reached.min() > 0.67
    assert reached.max() < 1.21
    turned = left.T @ found @ right.T  # the directions are the matrix's own
    assert (turned - torch.diag(torch.diagonal(turned))).abs().max() < 1e-9
    assert torch.equal(muon.orthogonal(matrix * 2.0**power), found)


@given(
    short=some.integers(1, 9),
    longer=some.lists(some.integers(0, 14), max_size=5),
    turned=some.lists(some.booleans(), min_size=5, max_size=5),
    seed=some.integers(0, 99),
)
@settings(max_examples=60)
def test_matrices_of_one_short_side_are_made_orthogonal_together_as_by_themselves(
    short, longer, turned, seed
):
    random = torch.Generator().manual_seed(seed)
    wide = [
        torch.randn(short, short + more, generator=random, dtype=torch.float64) for more in longer
    ]
    given_ones = [one.T if turn else one for one, turn in zip(wide, turned, strict=False)]
    before = [one.clone() for one in given_ones]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        matrices = [one.to(dtype) for one in given_ones]
        found = muon.orthogonal_together(matrices)
        expected = [muon.orthogonal(one) for one in matrices]
        assert len(found) == len(longer)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, given_ones, before))


def test_a_matrix_that_is_not_finite_or_zero_leaves_the_others_of_its_stack_alone():
    matrices = [torch.randn(3, long, dtype=torch.float64) for long in (5, 4, 7, 6)]
    matrices[1][1, 2], matrices[2][0, 0] = torch.nan, torch.inf
    matrices[3].zero_()
    found = muon.orthogonal_together(matrices)
    expected = [muon.orthogonal(one) for one in matrices]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert [bool(torch.isfinite(one).all()) for one in found] == [True, False, False, True]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_steps_of_stacks_are_those_of_single_kernels(layout, momentum):
    alone, stacked = (make_net(LAYOUTS[layout][0]) for _ in range(2))
    # Other kernels of these short sides, wide and tall, whose gradients are noise.
    others = [nn.Conv2d(4, 6, 3), nn.Conv2d(3, 6, 3), nn.Linear(6, 30), nn.Linear(40, 10)]
    for network in (alone, stacked):
        network.others = copy.deepcopy(nn.ModuleList(others)).double()
        network.to(memory_format=LAYOUTS[layout][0])
        optimizer = bw.muon(network, 0.1, momentum=momentum, weight_decay=0.01)
        optimizer.together = network is stacked
        for step in range(3):
            random = torch.Generator().manual_seed(step)
            for other in network.others.parameters():
                other.grad = torch.randn(other.shape, generator=random, dtype=torch.float64)
            take_steps(network, optimizer, steps=1, seed=step)
    matrices = muon.matrices_of(stacked)
    counts = [len(one) for one in optimizer._stacks(matrices)]
    assert sum(counts) == len(matrices)
    assert max(counts) >= 3
    assert_near(values_of(alone), values_of(stacked))


def numbers_of(stack):
    """Without and with padding."""
    return sum(one.numel() for one in stack), len(stack) * max(one.numel() for one in stack)


@given(
    longer=some.lists(some.integers(0, 200), max_size=30), most=some.sampled_from([300, 900, 2**24])
)
def test_a_stack_is_hardly_padded_and_no_larger_than_it_may_be(longer, most):
    kernels = [torch.empty(5, 5 + more, device="meta") for more in longer]
    with mock.patch.object(muon, "MOST_AT_ONCE", most):
        found = list(muon.stacks(kernels))
    assert sorted(id(one) for stack in found for one in stack) == sorted(map(id, kernels))
    for stack in found:
        numbers, padded = numbers_of(stack)
        assert len(stack) == 1 or padded <= min(most, muon.MOST_PADDED * numbers)


@pytest.mark.slow
def test_a_step_of_resnet18_takes_a_gpu_few_operations():
    """One by one its 21 matrices take 462."""
    kernels = muon.matrices_of(build_network("resnet18", classes=100, side=32).to("meta"))
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0}
    counts = {}
    for together in (None, False):
        optimizer = without_compiler(muon.Muon)(
            [{"params": kernels, "orthogonal": True, **options}]
        )
        optimizer.together = together
        for kernel in kernels:
            kernel.grad = torch.empty_like(kernel)
        optimizer.step()  # momenta are there from now on
        with Operations() as seen:
            optimizer.step()
        counts[together] = seen.names.total()
        if together is None:
            sizes = [numbers_of(stack) for stack in optimizer._stacks(kernels)]
    assert len(kernels) == 21
    assert len(sizes) == 6
    assert counts[None] <= MOST_OPERATIONS < counts[False] / 2, seen.names
    assert sum(padded for _, padded in sizes) < 1.2 * sum(numbers for numbers, _ in sizes)


def test_zeros_and_tiny_gradients_are_harmless():
    assert not muon.orthogonal(torch.zeros(3, 4)).any()
    assert torch.isfinite(muon.orthogonal(torch.full((3, 4), 1e-30))).all()


def test_a_power_of_two_on_all_gradients_changes_no_kernel():
    plain, scaled = make_net(), make_net()
    for network, scale in ((plain, 1.0), (scaled, 4.0)):
        take_steps(network, bw.muon(network, 0.1, sgd_lr=0.0), scale=scale)
    assert same_bits(values_of(plain), values_of(scaled))


def test_formats_narrower_than_float32_are_widened_on_the_cpu():
    for given_format, used in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        assert muon.orthogonal(torch.randn(3, 4, dtype=given_format)).dtype == used
    network = make_net(dtype=torch.bfloat16)
    before = values_of(network)
    take_steps(network, bw.muon(network, 0.1))
    assert not torch.equal(network.first.weight, before["first.weight"])
    assert network.first.weight.dtype == torch.bfloat16


# --------------------------------------------------------------------------------------- the views


def test_channels_last_kernels_take_the_steps_of_contiguous_ones():
    plain, other = make_net(), make_net(torch.channels_last)
    take_steps(plain, bw.muon(plain, 0.1))
    take_steps(other, bw.muon(other, 0.1))
    assert other.first.weight.is_contiguous(memory_format=torch.channels_last)
    assert_near(values_of(plain), values_of(other))


@pytest.mark.parametrize(
    ("before", "layout"),
    [
        (torch.contiguous_format, torch.channels_last),
        (torch.channels_last, torch.contiguous_format),
    ],
)
def test_a_network_whose_layout_changes_later_trains_on(before, layout):
    kept, moved = make_net(before), make_net(before)
    optimizers = [bw.muon(network, 0.1) for network in (kept, moved)]
    take_steps(kept, optimizers[0])
    take_steps(moved, optimizers[1])
    moved.to(memory_format=layout)
    take_steps(kept, optimizers[0], seed=1)
    take_steps(moved, optimizers[1], seed=1)
    assert moved.first.weight.is_contiguous(memory_format=layout)
    assert_near(values_of(kept), values_of(moved))


def test_weights_that_get_other_storage_are_stepped_where_they_are_now():
    network = make_net()
    optimizer = bw.muon(network, 0.1)
    take_steps(network, optimizer)
    network.first.weight.data = network.first.weight.detach().clone()
    before = network.first.weight.detach().clone()
    take_steps(network, optimizer)
    assert not torch.equal(network.first.weight, before)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(4, 6, 3), nn.Conv3d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3), nn.Conv2d(1, 4, 5)],
)
@pytest.mark.parametrize("last", [False, True])
def test_kernels_of_any_dimension_share_their_storage_with_their_matrix(layer, last):
    kernel = layer.weight.detach()
    if last and kernel.ndim > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        kernel = kernel.contiguous(memory_format=formats[kernel.ndim])
    matrix = muon.matrix_of(kernel)
    assert matrix.shape == (kernel.shape[0], kernel[0].numel())
    matrix[2].zero_()
    assert not kernel[2].any()
    assert kernel[1].any()


def test_a_kernel_that_is_no_matrix_in_memory_is_refused_and_so_is_one_that_becomes_it():
    network = make_net()
    optimizer = bw.muon(network, 0.1)
    rows_inside = network.first.weight.data.transpose(0, 1).contiguous()
    network.first.weight.data = rows_inside.transpose(0, 1)
    with pytest.raises(ValueError, match=r"shape \(6, 3, 3, 3\) with strides .* contiguous, or"):
        take_steps(network, optimizer)
    with pytest.raises(ValueError, match="cannot be seen as a matrix"):
        bw.muon(network, 0.1)


def test_a_gradient_of_another_layout_than_its_kernel_is_read_right():
    plain, other = make_net(), make_net()
    for network in (plain, other):
        network.first.weight.grad = torch.arange(162.0, dtype=torch.float64).view(6, 3, 3, 3).sin()
    other.first.weight.grad = other.first.weight.grad.contiguous(memory_format=torch.channels_last)
    for network in (plain, other):
        bw.muon(network, 0.1).step()
    assert same_bits(values_of(plain), values_of(other))


# --------------------------------------------------------------------------- one ordinary optimizer


def test_gradients_are_cleared_and_state_is_the_kernels_own():
    network = make_net(torch.channels_last)
    optimizer = bw.muon(network, 0.1)
    take_steps(network, optimizer)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert set(optimizer.state) == set(network.parameters())
    for parameter, state in optimizer.state.items():
        assert list(state) == ["momentum_buffer"]
        assert state["momentum_buffer"].shape == parameter.shape
        assert state["momentum_buffer"].stride() == parameter.stride()


def test_parameters_without_gradient_stay_as_they_are_without_decay_too():
    network = make_net()
    optimizer = bw.muon(network, 0.1, weight_decay=0.5)
    before = values_of(network)
    network.hidden.weight.grad = torch.ones_like(network.hidden.weight)
    optimizer.step()
    changed = [
        name for name, value in network.state_dict().items() if (value != before[name]).any()
    ]
    assert changed == ["hidden.weight"]


def test_state_goes_through_a_file_and_the_rest_of_the_steps_have_the_same_bits(tmp_path):
    whole, first = make_net(torch.channels_last), make_net(torch.channels_last)
    optimizers = [bw.muon(network, 0.1, weight_decay=0.01) for network in (whole, first)]
    take_steps(whole, optimizers[0], steps=2)
    take_steps(first, optimizers[1], steps=2)
    torch.save([first.state_dict(), optimizers[1].state_dict()], tmp_path / "state.pt")
    second = make_net(torch.channels_last)
    later = bw.muon(second, 0.7)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_state_dict(weights)
    later.load_state_dict(state)
    take_steps(whole, optimizers[0], seed=1)
    take_steps(second, later, seed=1)
    assert same_bits(values_of(whole), values_of(second))


def test_a_copy_is_an_optimizer_of_its_own():
    network = make_net()
    optimizer = bw.muon(network, 0.1)
    take_steps(network, optimizer)
    twin, copied = copy.deepcopy((network, optimizer))
    before = values_of(network)
    take_steps(twin, copied)
    assert same_bits(values_of(network), before)
    take_steps(network, optimizer)
    assert same_bits(values_of(network), values_of(twin))


def test_a_group_that_is_added_later_is_sgds():
    network, added = make_net(), nn.Parameter(torch.ones(2, 2))
    optimizer = bw.muon(network, 0.1)
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    added.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(added.detach(), torch.full((2, 2), 0.5))


def test_a_closure_gives_the_loss_and_its_gradients():
    network = make_net()
    optimizer = bw.muon(network, 0.1)
    before = values_of(network)

    def closure():
        loss = functional.cross_entropy(
            network(torch.ones(5, 3, 6, 6).double()), torch.arange(5) % 3
        )
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert not torch.equal(network.first.weight, before["first.weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_on_a_gpu_kernels_are_stepped_as_on_the_cpu_up_to_rounding(layout):
    here, there = make_net(layout, torch.float32), make_net(layout, torch.float32).cuda()
    gradients = [torch.randn_like(p) for p in here.parameters()]
    for network in (here, there):
        optimizer = bw.muon(network, 0.1)
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient.to(parameter)
        optimizer.step()
    for one, two in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(one, two.cpu(), rtol=0, atol=1.5e-2)  # bfloat16 on the GPU


# ---------------------------------------------------------------------------- which are orthogonal


def named(network):
    chosen = {id(parameter) for parameter in muon.matrices_of(network)}
    return {name for name, parameter in network.named_parameters() if id(parameter) in chosen}


@pytest.mark.parametrize("name", [name for name, one in NETWORKS.items() if not one.takes_name])
def test_matrices_and_kernels_are_orthogonal_and_depthwise_ones_and_vectors_are_not(name):
    network = build_network(name, classes=10, side=32)
    wanted = {
        f"{path}.weight"
        for path, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and getattr(module, "groups", 1) == 1
    }
    assert named(network) == wanted
    optimizer = build_optimizer(network, Job(optimizer="muon"), 0.1)
    taken = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(taken) == len(set(taken)) == len(list(network.parameters()))


def test_what_is_no_matrix_stays_with_sgd():
    network = nn.ModuleDict(
        {
            "words": nn.Embedding(5, 4),
            "norm": nn.LayerNorm((4, 4)),
            "grouped": nn.Conv2d(8, 8, 3, groups=2),
            "row": nn.Linear(9, 1),
            "column": nn.Linear(1, 9),
            "inner": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "last": nn.Linear(4, 5),
        }
    )
    network["last"].weight = network["words"].weight  # tied
    network.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    wanted = {"inner.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    assert named(network) == wanted
    optimizer = bw.muon(network, 0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 6, 8]


def test_frozen_kernels_are_left_alone():
    network = build_network("resnet8", classes=4, side=8)
    freeze(network, ["stem.*", "stages.0.*"])
    before = values_of(network)
    take_steps(network, build_optimizer(network, Job(optimizer="muon"), 0.1))
    for name, value in network.state_dict().items():
        if name.endswith("weight"):
            assert torch.equal(value, before[name]) == name.startswith(("stem.", "stages.0."))


@pytest.mark.parametrize(
    "network",
    [
        nn.BatchNorm1d(4),
        nn.Linear(4, 1),
        nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.BatchNorm1d(3)),
        nn.Conv2d(4, 4, 3, groups=4),
    ],
    ids=["vectors", "one row", "frozen", "depthwise"],
)
def test_a_network_without_matrices_is_refused(network):
    with pytest.raises(JobError, match=r"optimizer=muon: .* no matrix.*optimizer=sgd"):
        build_optimizer(network, Job(optimizer="muon"), 0.1)


# ------------------------------------------------------------------------------------ in a training


def test_the_job_gives_momentum_and_decay_and_the_rate():
    network = build_network("mobilenet_small", classes=4, side=8)
    job = Job(optimizer="muon", momentum=0.8, weight_decay=0.02)
    matrices, others, vectors = build_optimizer(network, job, 0.3).param_groups
    assert [group["momentum"] for group in (matrices, others, vectors)] == [0.8] * 3
    assert [group["weight_decay"] for group in (matrices, others, vectors)] == [0.02, 0.02, 0.0]
    assert matrices["lr"] == 0.3
    assert others["lr"] == vectors["lr"] == 0.3 * muon.SGD_SHARE
    assert matrices["orthogonal"]
    assert not any(group["orthogonal"] for group in (others, vectors))


def test_the_probe_counts_its_state_and_keeps_the_groups_rates_in_proportion(monkeypatch):
    monkeypatch.setattr(muon, "SGD_SHARE", 0.5)
    job = tiny_job(network="resnet8", optimizer="muon", learning_rate=0.2, base_batch=8)
    bench = Bench(job, tiny_image_data(), Group(torch.device("cpu")))
    bench.step(bench.supply(4, 8))
    assert [group["lr"] for group in bench.optimizer.param_groups] == [0.1, 0.05]
    parts = bench.parts()
    assert parts.optimizer == parts.gradients == parts.parameters


@pytest.mark.parametrize(
    ("device", "batch", "side"),
    [
        pytest.param("cpu", 4, 32, marks=pytest.mark.slow),
        pytest.param("cpu", 2, 8, marks=pytest.mark.slow),
        ("cuda", 2, 8),
    ],
)
def test_the_peak_of_its_step_is_guessed_from_fake_tensors(device, batch, side):
    """Of so few pixels it is the peak of the update, which is higher where it has stacks."""
    data, job = tiny_image_data(), tiny_job(network="vgg8", resolutions=(side,), optimizer="muon")
    bench = Bench(job, data, Group(torch.device("cpu")))
    bench.optimizer.together = device == "cuda"
    peak, _ = weigh(bench, bench.supply(batch, side))
    there = job.model_copy(update={"device": device})
    assert estimate_peak(there, data.facts, side, batch) == pytest.approx(peak, rel=0.15)


def small_plan(batches, **changes):
    rule = LearningRateRule(
        base=0.1, base_batch=8, scaling="linear", peak=0.2, warmup_epochs=1, decay="cosine"
    )
    return make_tiny_plan(batches, samples=30, rule=rule, epochs=3, optimizer="muon", **changes)


def train(rank, batches, *, drift=0.0):
    """Weights and rates of a run; ``drift`` is added to the second worker's between epochs."""
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = bw.muon(model, 0.1, sgd_lr=0.05)
    rates = []
    with bw.Session(model, optimizer, Points(30), plan=small_plan(batches), loaders=0) as one:
        for epoch in one.epochs():
            for features, labels in one.batches():
                one.step(functional.cross_entropy(model(features.double()), labels))
                rates.append([group["lr"] for group in optimizer.param_groups])
            if epoch < 2:
                model[0].weight.data += rank * drift
    return values_of(model), rates


@pytest.fixture(scope="module")
def together(crew):
    return crew.together(both_runs, workers=2)


def both_runs(rank):
    return {"plain": train(rank, (5, 3)), "drifting": train(rank, (5, 3), drift=1e-6)}


@pytest.mark.slow
def test_unequal_batches_on_two_workers_train_as_one(together):
    alone, rates = train(0, (8,))
    for each in together:
        assert_near(each["plain"][0], alone, tolerance=1e-7)
        assert each["plain"][1] == rates
    assert same_bits(together[0]["plain"][0], together[1]["plain"][0])
    assert all(sgd == pytest.approx(lr / 2) for lr, sgd in rates)


@pytest.mark.slow
def test_workers_whose_processors_round_differently_are_evened_out_at_each_epoch(together):
    assert same_bits(together[0]["drifting"][0], together[1]["drifting"][0])
    assert_near(together[0]["drifting"][0], together[0]["plain"][0], tolerance=1e-5)


def train_images(folder, *, until=None, resume=False):
    """A run on images in channels-last format, stopped after ``until`` steps."""
    model = make_net(torch.channels_last, torch.float32)
    optimizer = bw.muon(model, 0.1)
    plan = make_tiny_plan((5,), epochs=3, optimizer="muon")
    with (
        warnings.catch_warnings(),
        bw.Session(
            model,
            optimizer,
            Images(),
            plan=plan,
            run_folder=folder,
            resume=resume,
            loaders=0,
            images="pixels",
        ) as one,
    ):
        warnings.simplefilter("ignore")
        steps = 0
        for _ in one.epochs():
            for batch in one.batches():
                one.step(functional.cross_entropy(model(batch["pixels"] / 22), batch["label"]))
                steps += 1
                if steps == until:
                    os.kill(os.getpid(), signal.SIGTERM)
    return values_of(model)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    whole = train_images(tmp_path / "whole")
    with pytest.raises(SystemExit):
        train_images(tmp_path / "pieces", until=3)
    assert same_bits(train_images(tmp_path / "pieces", resume=True), whole)
