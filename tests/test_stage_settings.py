"""What a row of the plan sets in a network and its feed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from batchwright.errors import PlanError
from batchwright.records import Plan
from batchwright.training.batches.feeding import DatasetFeed
from batchwright.training.batches.stage_settings import StageSettings
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.networks import resnet8
from samples import make_plan

CPU = torch.device("cpu")


def feed() -> ImagePipeline:
    pixels = torch.randint(0, 256, (20, 16, 16, 3), generator=torch.Generator().manual_seed(3))
    store = ImageStore.from_images(pixels.to(torch.uint8), torch.arange(20))
    return ImagePipeline(
        store,
        device=CPU,
        side=16,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        augmentation="crop",
        seed=1,
    )


def plan_of(*, dropouts=(0.0, 0.0), strengths=(1.0, 1.0)) -> Plan:
    row = make_plan().stages[0]
    rows = [
        row.model_copy(update={"dropout": dropout, "augmentation_strength": strength})
        for dropout, strength in zip(dropouts, strengths, strict=True)
    ]
    return make_plan(stages=tuple(rows))


class Sites(nn.Module):
    """Drops features in two places, for two reasons."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.planes, self.last = nn.Dropout(0.5), nn.Dropout2d(0.1), nn.Dropout(0.1)


def test_dropout_follows_the_rows_in_every_layer_built_with_it():
    network, plan = Sites(), plan_of(dropouts=(0.1, 0.2))
    settings = StageSettings(network, feed(), plan)
    for row in (0, 1, 0):
        settings.enter(plan.stages[row])
        assert network.planes.p == network.last.p == plan.stages[row].dropout
        assert network.attention.p == 0.5


def test_a_network_that_stopped_in_another_row_is_still_governed():
    network, plan = resnet8(3, dropout=0.2), plan_of(dropouts=(0.1, 0.2))
    StageSettings(network, feed(), plan).enter(plan.stages[0])
    assert network.dropout.p == 0.1


def test_one_dropout_throughout_leaves_the_network_alone():
    network, plan = Sites(), plan_of(dropouts=(0.3, 0.3))
    StageSettings(network, feed(), plan).enter(plan.stages[1])
    assert (network.attention.p, network.planes.p, network.last.p) == (0.5, 0.1, 0.1)


def test_dropouts_that_no_layer_has_are_refused():
    with pytest.raises(PlanError, match=r"changes the dropout \(0.2, 0.4\) and no dropout layer"):
        StageSettings(Sites(), feed(), plan_of(dropouts=(0.2, 0.4)))


def test_strength_follows_the_rows():
    source, plan = feed(), plan_of(strengths=(0.0, 2.0))
    settings = StageSettings(Sites(), source, plan)
    looks = []
    for row in plan.stages:
        settings.enter(row)
        images, _ = source.single(torch.arange(20), 0, 16)
        looks.append(images)
    as_stored = next(source.evaluation([torch.arange(20)], 16))[0]
    assert torch.equal(looks[0], as_stored)
    assert not torch.equal(looks[1], as_stored)


def test_strengths_for_a_data_set_that_augments_itself_are_refused():
    own = DatasetFeed(TensorDataset(torch.zeros(4, 3)), device=CPU, seed=0, loaders=0)
    StageSettings(Sites(), own, plan_of())
    with pytest.raises(PlanError, match="shifts images by 0, 1 times the usual"):
        StageSettings(Sites(), own, plan_of(strengths=(0.0, 1.0)))
