"""A plan with several rows through the public handle: resolution, batch, rate, dropout, strength.

And the statistics of batch normalization that an evaluation asks for.
"""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright import Session
from batchwright.errors import PlanError
from batchwright.records import Plan, Stage
from batchwright.training.evaluate.recalibration import recalibrated
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from samples import make_data, make_job, make_plan
from test_session import summary_in, top1, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, SIDE = 27, 12
ROWS = (  # epochs, resolution, global batch, rate, dropout, strength
    (2, 6, 8, 0.1, 0.1, 0.0),
    (1, 12, 5, 0.1, 0.3, 1.0),
    (1, 6, 8, 0.02, 0.1, 0.0),
    (2, 12, 5, 0.02, 0.3, 2.0),
)
EPOCHS = sum(row[0] for row in ROWS)


def images() -> ImageStore:
    random = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (SAMPLES, SIDE, SIDE, 3), generator=random)
    return ImageStore.from_images(pixels.to(torch.uint8), torch.arange(SAMPLES) % 3)


def pipeline(augmentation="crop-flip") -> ImagePipeline:
    return ImagePipeline(
        images(),
        device=torch.device("cpu"),
        side=SIDE,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        augmentation=augmentation,
        seed=0,
    )


def rows_plan(*, split=(1.0,), rows=ROWS, **job) -> Plan:
    """``split``: each worker's share of the global batch."""
    stages = tuple(
        Stage(
            epochs=epochs,
            resolution=side,
            learning_rate=rate,
            dropout=dropout,
            augmentation="crop-flip",
            augmentation_strength=strength,
            local_batch_sizes=tuple(max(1, round(batch * part)) for part in split),
            micro_batch_size=4,
        )
        for epochs, side, batch, rate, dropout, strength in rows
    )
    rule = {"base": 0.1, "base_batch": 8, "scaling": "none", "peak": 0.1, "warmup_epochs": 1}
    return make_plan(
        job=make_job(workers=len(split), timeout=200, **job),
        data=make_data(train_samples=SAMPLES, classes=tuple("abc")),
        precision="float32",
        learning_rate=rule | {"decay": "none"},
        stages=stages,
        considered=(),
        reasons=(),
    )


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(6, 3),
    )


def train(plan, folder=None, *, network=None, until=None, held_out=True, **options):
    """Trains as a user would; returns what was seen at each micro-batch, and the scores."""
    network = network or make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    seen, scores, steps = [], [], 0
    with Session(
        network, optimizer, pipeline(), plan=plan, run_folder=folder, **options
    ) as session:
        for epoch in session.epochs():
            for pixels, labels in session.batches():
                drop = next((m.p for m in network.modules() if isinstance(m, nn.Dropout)), 0.0)
                row = epoch, pixels.shape[-1], len(labels), drop
                updated = session.step(functional.cross_entropy(network(pixels), labels))
                seen.append((*row, optimizer.param_groups[0]["lr"], updated))
                steps += updated
                if until is not None and steps == until and updated:
                    os.kill(os.getpid(), signal.SIGTERM)
            if held_out:
                scores.append(session.evaluate(pipeline(), top1)["top1"])
    return {"network": network, "seen": seen, "scores": scores, "weights": weights_of(network)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return train(rows_plan(), folder) | {"folder": folder}


def test_each_epoch_follows_its_row(whole):
    planned = [row for row in ROWS for _ in range(row[0])]
    for epoch, (_, side, batch, rate, dropout, _) in enumerate(planned):
        mine = [one for one in whole["seen"] if one[0] == epoch]
        assert {(one[1], one[3]) for one in mine} == {(side, dropout)}
        assert sum(one[2] for one in mine) == SAMPLES
        assert sum(one[5] for one in mine) == -(-SAMPLES // batch)
        if epoch:  # the first is warm-up
            assert {round(one[4], 9) for one in mine if one[5]} == {rate}


def test_records_of_each_epoch_are_of_its_row(whole):
    records = summary_in(whole["folder"]).epochs
    planned = [row for row in ROWS for _ in range(row[0])]
    assert [(r.resolution, r.global_batch_size, r.samples) for r in records] == [
        (side, batch, SAMPLES) for _, side, batch, *_ in planned
    ]
    assert [r.shares[0].sizes for r in records] == [(batch,) for _, _, batch, *_ in planned]


@pytest.mark.parametrize(  # in every row, and at a row's end
    "until", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 11, 16, 25))]
)
def test_a_run_stopped_in_any_row_goes_on_bit_for_bit(whole, tmp_path, until):
    with pytest.raises(SystemExit):
        train(rows_plan(), tmp_path, until=until)
    again = train(rows_plan(), tmp_path, resume=True)
    assert torch.equal(again["weights"], whole["weights"])
    for name, buffer in whole["network"].named_buffers():
        assert torch.equal(dict(again["network"].named_buffers())[name], buffer)
    losses = [record.train_loss for record in summary_in(tmp_path).epochs]
    assert losses == [record.train_loss for record in summary_in(whole["folder"]).epochs]


def test_a_row_with_a_batch_larger_than_the_data_is_refused_before_training():
    rows = (ROWS[0], (1, 12, 28, 0.1, 0.1, 1.0))
    with pytest.raises(PlanError, match="global batch of 28 is larger than the 27"):
        train(rows_plan(rows=rows))


# --------------------------------------------------------------------------- several processes


def without_normalization() -> nn.Module:
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 8), nn.Tanh())
    return nn.Sequential(pooled, nn.Linear(8, 3))


ROWS_OF_TWO = tuple((*row[:4], 0.0, row[5]) for row in ROWS)


def in_two(rank, folder):
    plan = rows_plan(split=(0.62, 0.38), rows=ROWS_OF_TWO)
    *others, last = plan.stages
    first, turned = (
        last.model_copy(update={"epochs": 1, "local_batch_sizes": last.local_batch_sizes[::step]})
        for step in (1, -1)
    )
    plan = plan.model_copy(update={"stages": (*others, first, turned)})
    assert {sum(stage.local_batch_sizes) for stage in plan.stages} == {8, 5}
    found = train(plan, folder, network=without_normalization())
    return {"weights": found["weights"], "scores": found["scores"]}


@pytest.mark.slow
def test_two_workers_go_through_the_rows_like_one(tmp_path, crew):
    alone = train(rows_plan(rows=ROWS_OF_TWO), network=without_normalization())
    first, second = crew.together(in_two, tmp_path / "run", workers=2)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone["weights"], atol=1e-5)
    sizes = [record.shares[0].sizes for record in summary_in(tmp_path / "run").epochs]
    assert sizes == [(5, 3), (5, 3), (3, 2), (5, 3), (3, 2), (2, 3)]
    assert first["scores"] == pytest.approx(alone["scores"], abs=0.04)


# ---------------------------------------------------------------- statistics for an evaluation


class Alone:
    """A group of one."""

    places, rank, device = ("here",), 0, torch.device("cpu")

    def sum(self, values):
        return values


def batches_of(count, samples, *, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [
        (samples + i, torch.randn(samples + i, 3, 8, 8, generator=random) * (1 + i))
        for i in range(count)
    ]


def run_model(model, batch):
    return model(batch)


def taken_anew(network, batches, group):
    return recalibrated(network, batches, group, forward=run_model, autocast=nullcontext)


def test_recalibrated_statistics_are_those_of_all_samples():
    network, batches = make_network(), batches_of(3, 4)
    norm = network[1]
    with taken_anew(network, batches, Alone()):
        mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    with torch.no_grad():
        parts = [network[0](batch).double() for _, batch in batches]
    everything = torch.cat(parts)
    assert torch.allclose(mean.double(), everything.mean(dim=(0, 2, 3)), rtol=1e-5, atol=1e-6)
    expected = everything.var(dim=(0, 2, 3), unbiased=False)
    assert torch.allclose(variance.double(), expected, rtol=0.01)  # unbiased within each batch


def test_workers_batches_count_by_their_samples():
    class Two:
        def __init__(self, other):
            self.other = other

        def sum(self, values):
            return values + self.other

    class Noting(Alone):
        def sum(self, values):
            self.values = values.clone()
            return values

    network, batches = make_network(), batches_of(4, 3)
    noting = Noting()
    with taken_anew(network, batches[2:], noting):
        pass
    with taken_anew(network, batches, Alone()):
        whole = [b.clone() for b in network.buffers()]
    two = Two(noting.values)
    with taken_anew(network, batches[:2], two):
        for merged, one in zip(network.buffers(), whole, strict=True):
            if merged.is_floating_point():
                assert torch.allclose(merged, one, rtol=1e-5, atol=1e-6)


def test_recalibration_leaves_no_trace():
    network = make_network()
    network[4].eval()  # as frozen weights have it
    modes = [module.training for module in network.modules()]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    batches = batches_of(2, 4)
    with taken_anew(network, batches, Alone()):
        assert not torch.equal(network[1].running_mean, before["1.running_mean"])
        assert torch.equal(network[4].running_mean, before["4.running_mean"])
        assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)  # dropout drew nothing
    after = network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [network[1].momentum, network[4].momentum] == [0.1, 0.1]
    assert [module.training for module in network.modules()] == modes


def test_recalibration_does_not_hinder_the_backward_pass_of_a_batch_under_way():
    gradients = []
    for between in (False, True):
        network = make_network()
        loss = network(batches_of(1, 4)[0][1]).square().sum()
        if between:
            with taken_anew(network, batches_of(2, 4), Alone()):
                pass
        loss.backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_synchronized_layers_keep_their_statistics():
    """They would wait for the other workers in each batch, of which each has its own number."""
    network, modes = make_network(), []
    network[4] = nn.SyncBatchNorm(6)
    network[4].register_forward_hook(lambda layer, *_: modes.append(layer.training))
    before = {name: value.clone() for name, value in network[4].state_dict().items()}
    with taken_anew(network, batches_of(2, 4), Alone()):
        assert not torch.equal(network[1].running_mean, torch.zeros(6))
        after = network[4].state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    assert modes == [False, False]
    assert network[4].training


def test_asking_for_new_statistics_changes_scores_and_not_the_training(whole):
    plan = rows_plan(cycle={"recalibrate": 3})
    asked = train(plan)
    assert torch.equal(asked["weights"], whole["weights"])
    for name, buffer in whole["network"].named_buffers():
        assert torch.equal(dict(asked["network"].named_buffers())[name], buffer)
    assert asked["scores"] != whole["scores"]
