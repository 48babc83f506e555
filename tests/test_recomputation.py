"""Activation checkpointing: the same training with less memory, and when it is chosen."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.distributed.group import Group
from batchwright.errors import JobError, PlanError
from batchwright.planning.measurements import recomputation as reasons
from batchwright.planning.planner import make_plan
from batchwright.probing.commands import Recompute
from batchwright.probing.measure import comparison
from batchwright.probing.measure import recomputation as module
from batchwright.probing.measure.recomputation import compare_recomputation
from batchwright.records import Job, Profile, RecomputationTimes
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.workload.host import autocast
from batchwright.workload.networks import mobilenet_small, resnet8, resnet18, vgg8
from batchwright.workload.passes.recomputation import _blocks, forward, recompute
from batchwright.workload.tensor_bytes import counting_tensors
from samples import make_job, make_profile
from test_session import make_session, make_tiny_plan, train

CPU = torch.device("cpu")
MIB = 2**20


class Awkward(nn.Module):
    """Blocks with chance in them, and with buffers that a forward pass reads and changes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.rows = nn.ModuleList(self._row() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def _row(self):
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1)),
            nn.BatchNorm2d(8),
            nn.InstanceNorm2d(8, track_running_stats=True),
            nn.ReLU(inplace=True),
            nn.Dropout(0.4),
        )

    def forward(self, images):
        features = self.stem(images)
        for row in self.rows:
            features = row(features) + features
        return self.head(features.mean(dim=(2, 3)))


def test_a_network_whose_blocks_all_have_forward_passes_of_their_own_is_refused():
    network = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    for block in _blocks(network):
        block.forward = lambda inputs: inputs
    with pytest.raises(JobError, match=r"forward pass of its own .*activation_checkpointing=off"):
        recompute(network)


def steps_of(network, precision="float32", *, on):
    """State, gradients and a random number after some steps, of two micro-batches each."""
    torch.manual_seed(1)
    if on:
        recompute(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    for _ in range(3):
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 6)):
            with autocast(precision, CPU):
                loss = functional.cross_entropy(network(images[part]).float(), labels[part])
            loss.backward()
        optimizer.step()
    gradients = {name: one.grad for name, one in network.named_parameters()}
    return network.state_dict(), gradients, torch.rand(2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [lambda: resnet8(4, dropout=0.3), Awkward])
def test_weights_gradients_statistics_and_chance_are_the_same_to_the_bit(build, precision):
    torch.manual_seed(0)
    plain = build()
    again = copy.deepcopy(plain)
    for one, other in zip(
        steps_of(plain, precision, on=False), steps_of(again, precision, on=True), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


def names_of(network):
    names = {module: name for name, module in network.named_modules()}
    return [names[block] for block in _blocks(network)]


def test_blocks_are_what_lies_between_the_single_layers():
    stages = ["stages.0.0", "stages.1.0", "stages.2.0"]
    assert names_of(resnet8(4)) == ["stem", *stages]
    assert names_of(resnet18(4))[1:3] == ["stages.0.0", "stages.0.1"]
    assert names_of(vgg8(4)) == ["stages.0", "stages.1", "stages.2", "hidden"]
    assert names_of(mobilenet_small(4))[1:] == [f"stages.{k}" for k in range(5)]
    assert names_of(Awkward()) == ["rows.0", "rows.1"]


def test_layers_of_a_transformer_are_blocks_however_deep_they_stand():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    network = nn.Module()
    network.body = nn.Module()
    network.body.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert names_of(network) == [f"body.encoder.layers.{k}" for k in range(3)]


def highest(network):
    images = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    with counting_tensors() as most:
        network(images).sum().backward()
    return most()


@pytest.mark.slow
def test_a_step_takes_less_memory_and_can_go_back_to_what_it_was():
    network = resnet18(4).to(memory_format=torch.channels_last)
    before = highest(network)
    recompute(network)
    recompute(network)  # once more does nothing
    assert highest(network) < 0.7 * before
    recompute(network, on=False)
    assert all("forward" not in vars(module) for module in network.modules())


@pytest.mark.slow
def test_16_bit_copies_of_weights_go_block_by_block():
    network = resnet18(4).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    peaks = []
    for on in (False, True):
        recompute(network, on=on)
        network.zero_grad()
        with counting_tensors() as most, torch.autocast("cpu", torch.bfloat16):
            loss = network(images).sum()
            torch.clear_autocast_cache()
            with torch.autocast("cpu", enabled=False):
                loss.backward()
        peaks.append(most())
    assert peaks[1] <= peaks[0]


def test_copies_and_pickles_compute_by_themselves():
    network = resnet8(4)
    recompute(network)
    twin, back = copy.deepcopy(network), pickle.loads(pickle.dumps(network))
    for parameter in network.parameters():
        parameter.data.fill_(float("nan"))
    for other in (twin, back):
        loss = other(torch.randn(4, 3, 8, 8)).sum()
        loss.backward()
        assert torch.isfinite(loss)
        assert list(other.state_dict()) == list(resnet8(4).state_dict())


def test_a_forward_pass_in_place_of_a_blocks_own_stays():
    network = resnet8(4)
    block = network.stages[1][0]
    block.forward = lambda features: features.repeat(1, 2, 1, 1)[:, :, ::2, ::2]
    placed, images = block.forward, torch.randn(4, 3, 8, 8)
    plain = copy.deepcopy(network)(images)
    recompute(network)
    torch.testing.assert_close(network(images), plain, rtol=0, atol=0)
    recompute(network, on=False)
    assert [module for module in network.modules() if "forward" in vars(module)] == [block]
    assert block.forward is placed


def test_a_network_out_of_a_pickle_is_recomputed():
    network = resnet8(4)
    recompute(network)
    back = pickle.loads(pickle.dumps(network))
    recompute(back)
    assert all(block.forward.__func__ is forward for block in _blocks(back))


def test_a_network_without_blocks_is_refused_in_a_line():
    with pytest.raises(JobError, match="activation_checkpointing=on: the network has no blocks"):
        recompute(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)))


def layered():
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU())
    return nn.Sequential(hidden, nn.Linear(8, 3))


def test_runs_with_and_without_are_one_training_and_take_each_others_checkpoints(tmp_path):
    found = {}
    for key in ("off", "on"):
        folder = tmp_path / key
        plan = make_tiny_plan(activation_checkpointing=key)
        with make_session(layered(), plan=plan, run_folder=folder) as session:
            train(session)
        found[key] = load_checkpoint(folder / "checkpoints" / "last.pt")["model"]
    torch.testing.assert_close(found["on"], found["off"], rtol=0, atol=0)
    network = layered()
    network.load_state_dict(found["on"])
    recompute(network)
    network.load_state_dict(found["off"])


# ------------------------------------------------------------------------------------- the choice


@dataclass
class Machine:
    """Stands for a bench: a step takes a fixed time and one for each sample, and so with memory.

    Attributes:
        fixed: Seconds of a pass, whatever its samples.
        longer: Times as long as a step is with recomputation.
        less: Share of a sample's memory that is left with it.
    """

    fixed: float = 0.0
    longer: float = 1.3
    less: float = 0.25
    on: bool = False
    seconds: float = 0.0
    sizes: list[tuple[bool, int]] = field(default_factory=list)
    group: Group = field(default_factory=lambda: Group(CPU))
    device: torch.device = CPU

    def recompute(self, *, on):
        self.on = on

    def supply(self, size, resolution):
        return size

    def step(self, size):
        took = (self.fixed + 0.001 * size) * (self.longer if self.on else 1)
        self.seconds += took
        self.sizes.append((self.on, size))
        return took, 0.0

    def weigh(self, bench, size):
        self.step(size)
        self.step(size)
        return int(10 * MIB + MIB * size * (self.less if self.on else 1)), None


def compared(monkeypatch, machine, *, limit, wanted=256, seconds=10.0):
    monkeypatch.setattr(module, "weigh", machine.weigh)
    for part in (module, comparison):
        monkeypatch.setattr(part, "now", lambda device: machine.seconds)
    command = Recompute(
        workers=1,
        resolution=32,
        wanted_batch_size=wanted,
        limit_bytes=limit * MIB,
        seconds=seconds,
    )
    told = compare_recomputation(machine, command)
    assert machine.on == (told is not None and told.chosen)
    return told


def test_micro_batches_are_kept_where_they_are_the_quicker(monkeypatch):
    told = compared(monkeypatch, Machine(), limit=100)
    assert (told.plain_batch_size, told.recomputing_batch_size) == (90, 256)
    assert told.compared_batch_sizes == (90, 256)
    assert told.ratio.value == pytest.approx(1.3)
    assert not told.chosen


def test_blocks_are_recomputed_where_small_passes_take_too_long(monkeypatch):
    told = compared(monkeypatch, Machine(fixed=0.05), limit=18)
    assert (told.plain_batch_size, told.recomputing_batch_size) == (8, 32)
    assert told.ratio.value == pytest.approx((0.082 * 1.3 / 32) / (0.058 / 8))
    assert told.chosen


@pytest.mark.parametrize(("limit", "chosen"), [(11, True), (10, False)])
def test_they_are_recomputed_where_nothing_else_fits(monkeypatch, limit, chosen):
    told = compared(monkeypatch, Machine(), limit=limit)
    assert told.plain_batch_size == 0
    assert told.chosen == chosen
    assert told.ratio is None


def test_there_is_no_question_where_all_samples_fit(monkeypatch):
    assert compared(monkeypatch, Machine(), limit=270) is None


def test_nothing_is_timed_where_it_saves_no_memory(monkeypatch):
    machine = Machine(less=1.0)
    told = compared(monkeypatch, machine, limit=100)
    assert (told.ratio, told.chosen) == (None, False)


def test_time_bounds_the_steps_that_are_compared(monkeypatch):
    machine = Machine()
    told = compared(monkeypatch, machine, limit=100, seconds=1.0)
    assert max(told.compared_batch_sizes) <= 256
    assert told.compared_batch_sizes[0] == told.compared_batch_sizes[1] < 90


TIMES = RecomputationTimes(
    resolution=32,
    wanted_batch_size=256,
    limit_bytes=100 * MIB,
    plain_batch_size=90,
    recomputing_batch_size=256,
    compared_batch_sizes=(90, 256),
    plain_sample_seconds=0.001,
    recomputing_sample_seconds=0.0013,
    ratio={"value": 1.3, "low": 1.2, "high": 1.4},
    chosen=False,
)


def test_the_plan_says_what_fits_and_what_it_takes_both_ways():
    (reason,) = reasons(make_profile(recomputation=TIMES))
    assert reason.value == "off"
    for words in ("Of 256 images on a worker 90 fit", "100 MiB", "1 ms an image", "1.30 times"):
        assert words in reason.why
    assert reason.alternatives[0].value == "on"
    job = make_job(activation_checkpointing="on")
    chosen = TIMES.model_copy(update={"chosen": True, "plain_batch_size": 0, "ratio": None})
    (reason,) = reasons(make_profile(job=job, recomputation=chosen))
    assert "no other way" in reason.why
    assert not reasons(make_profile())
    (asked,) = reasons(make_profile(job=job))
    assert asked.why.startswith("Asked for")


def test_a_profile_taken_one_way_plans_no_training_in_the_other():
    taken = make_profile(job=make_job(activation_checkpointing="on"))
    for asked in ("on", "auto"):
        job = make_job(activation_checkpointing=asked)
        assert make_plan(taken, job).job.activation_checkpointing == "on"
    with pytest.raises(PlanError, match="measured with activation_checkpointing=on"):
        make_plan(taken, make_job(activation_checkpointing="off"))


def test_profiles_from_before_were_taken_without():
    old = make_profile(job=make_job()).model_dump(mode="json")
    del old["job"]["activation_checkpointing"]
    assert Profile.model_validate(old).job.activation_checkpointing == "off"


def test_statistics_over_all_workers_are_not_exchanged_twice():
    with pytest.raises(JobError, match="batch_norm=synchronized"):
        Job(activation_checkpointing="on", batch_norm="synchronized")
