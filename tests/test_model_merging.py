"""`parameter_server.merging`: whole models in one vector, and the rules of merging them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchwright.training.parameter_server.merging import (
    Weights,
    merge,
    pack,
    unpack,
    weighted_mean,
)
from batchwright.workload.task import build_network
from servers import numbers


@pytest.mark.parametrize(
    ("rule", "factor", "expected"),
    [
        # (w + f w_i) / (1 + f), with w = (1, -2) and w_i = (4, 10)
        ("journal", 1.0, (2.5, 4.0)),
        ("journal", 0.5, (2.0, 2.0)),
        ("journal", 0.25, (1.6, 0.4)),
        # ((2 - f) w + f w_i) / 2
        ("compsac", 1.0, (2.5, 4.0)),
        ("compsac", 0.5, (1.75, 1.0)),
        ("compsac", 0.25, (1.375, -0.5)),
    ],
)
def test_a_model_is_merged_as_the_published_rule_says(rule, factor, expected):
    weights = numbers(1, -2)
    merge(weights, numbers(4, 10), factor, rule)
    assert weights.floats.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_small_workers_share_is_the_published_one_under_both_rules():
    shares = {}
    for rule in ("journal", "compsac"):
        weights = numbers(0)
        merge(weights, numbers(1), 0.81, rule)
        shares[rule] = round(weights.floats.item(), 3)
    assert shares == {"journal": 0.448, "compsac": 0.405}


def test_a_pushed_model_stays_as_it_was():
    pushed = numbers(4, 10, counters=[3])
    merge(numbers(1, -2, counters=[5]), pushed, 0.5, "journal")
    weighted_mean([(pushed, 1.0), (numbers(0, 0, counters=[9]), 1.0)])
    assert pushed.floats.tolist() == [4, 10]
    assert pushed.integers.tolist() == [3]


def test_counters_take_the_largest():
    weights = numbers(1, counters=[5, 2])
    merge(weights, numbers(2, counters=[4, 7]), 1.0, "journal")
    assert weights.integers.tolist() == [5, 7]
    mean = weighted_mean([(weights, 1.0), (numbers(1, counters=[6, 1]), 1.0)])
    assert mean.integers.tolist() == [6, 7]


def test_the_mean_is_weighted_by_the_factors():
    mean = weighted_mean([(numbers(1, 8), 1.0), (numbers(4, 2), 0.5)])
    assert mean.floats.tolist() == pytest.approx([2, 6])


def test_the_mean_of_one_model_is_that_model_bit_for_bit():
    model = Weights(torch.randn(1000), torch.tensor([3]))
    mean = weighted_mean([(model, 0.637)])
    assert torch.equal(mean.floats, model.floats)
    assert mean.floats.data_ptr() != model.floats.data_ptr()


def test_a_network_comes_back_as_it_was_packed():
    one = build_network("resnet8", classes=3, side=8, seed=1)
    two = build_network("resnet8", classes=3, side=8, seed=2)
    one.train()(torch.randn(4, 3, 8, 8))  # moves the statistics and counts a batch
    unpack(pack(one), two)
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    assert int(pack(two).integers.max()) == 1


def test_packed_weights_are_a_copy():
    model = nn.Linear(2, 1)
    packed = pack(model)
    before = packed.floats.clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(packed.floats, before)


def test_weights_that_two_layers_share_are_packed_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    packed = pack(model)
    assert packed.floats.numel() == 9
    unpack(Weights(torch.arange(9.0), packed.integers), model)
    assert model[0].weight is model[1].weight
    assert model[1].weight.flatten().tolist() == list(range(9))


def test_weights_of_several_types_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(ValueError, match=r"torch\.float16, torch\.float32: .* convert the model"):
        pack(model)
