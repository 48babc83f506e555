"""The reference networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.records.registries.networks import NETWORKS
from batchwright.workload.networks import ResidualBlock, resnet18, vgg8
from batchwright.workload.task import import_object

WEIGHTS = {
    "resnet8": 78_042,
    "resnet18": 11_173_962,
    "vgg8": 304_810,
    "mobilenet_small": 136_778,
}


def test_all_our_networks_are_looked_at_here():
    assert {*WEIGHTS} == {name for name, one in NETWORKS.items() if not one.takes_name}


def constructor(name):
    return import_object(NETWORKS[name].build, "network")


def build(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return constructor(name)(10, **options)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_network_has_the_stated_number_of_weights(name):
    network = build(name)
    assert sum(p.numel() for p in network.parameters()) == WEIGHTS[name]
    assert f"{WEIGHTS[name]:,}" in (constructor(name).__doc__ or "")


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_network_trains_at_its_least_side_and_at_odd_ones(name):
    network = build(name)
    for side in (NETWORKS[name].least_side, 13):
        logits = network(torch.randn(2, 3, side, side))
        assert logits.shape == (2, 10)
        logits.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", WEIGHTS)
def test_dropout_acts_before_the_classifier_and_only_in_training(name):
    network = build(name, dropout=0.5)
    images = torch.randn(4, 3, 16, 16)
    network.eval()
    assert torch.equal(network(images), network(images))
    network.dropout.train()
    assert not torch.equal(network(images), network(images))


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_a_residual_block_starts_as_its_shortcut(name):
    network = build(name)
    blocks = [module for module in network.modules() if isinstance(module, ResidualBlock)]
    assert len(blocks) == {"resnet8": 3, "resnet18": 8}[name]
    for block in blocks:
        features = torch.rand(2, block.first[0].in_channels, 8, 8)
        expected = functional.relu(block.shortcut(features))
        torch.testing.assert_close(block(features), expected)


def test_resnet18_reduces_large_images_in_its_stem():
    images = torch.randn(1, 3, 160, 160)
    assert resnet18(10, top_resolution=64).stem(images).shape == (1, 64, 160, 160)
    large = resnet18(10, top_resolution=160)
    assert large.stem(images).shape == (1, 64, 40, 40)
    assert sum(p.numel() for p in large.parameters()) == 11_181_642


def test_the_gradient_of_vgg8_over_a_batch_is_the_mean_over_its_samples():
    network = build("vgg8")
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6)

    def gradient(part: slice) -> torch.Tensor:
        network.zero_grad()
        functional.cross_entropy(network(images[part]), labels[part], reduction="sum").backward()
        return torch.cat([p.grad.flatten() for p in network.parameters()])

    whole = gradient(slice(0, 6))
    torch.testing.assert_close(gradient(slice(0, 2)) + gradient(slice(2, 6)), whole)


def test_signals_keep_their_size_through_vgg8():
    """Without normalization this is what He initialization is for."""
    torch.manual_seed(0)
    logits = vgg8(10)(torch.randn(64, 3, 32, 32))
    assert 0.3 < logits.std() < 3
