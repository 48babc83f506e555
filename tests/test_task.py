"""Networks, weights and optimizers of a job."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from batchwright.errors import FileError, JobError
from batchwright.planning.candidates.learnt import expected_of
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job
from batchwright.records.registries.networks import NETWORKS
from batchwright.training import loop
from batchwright.workflows.prepare_job import check_training
from batchwright.workload import starting_weights, task
from batchwright.workload.data.sources import open_data
from samples import make_job, make_network

USER_MODULE = """
import torch
from torch import nn
from torch.nn import functional

class Holder:
    @staticmethod
    def build(num_classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))

def with_dropout(num_classes, dropout=0.3):
    network = Holder.build(num_classes)
    network.share = dropout
    return network

def needs_five_pixels(num_classes):
    return nn.Sequential(nn.Conv2d(3, num_classes, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def fails(num_classes):
    raise RuntimeError("no such\\nweights")

def no_module(num_classes):
    return num_classes

def lazy(num_classes):
    return nn.LazyLinear(num_classes)

def weightless(num_classes):
    return nn.Flatten()

class Film(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.frames, self.picture = nn.Conv3d(1, 2, 3), nn.Conv2d(3, num_classes, 3)

    def forward(self, images):
        return self.picture(images).mean((2, 3)) + self.frames(images[:, None]).mean()
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's, importable as ``mine``."""
    (tmp_path / "mine.py").write_text(USER_MODULE)
    (tmp_path / "broken.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "script.py").write_text("import argparse; argparse.ArgumentParser().error('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine", None)


def build(name: str = "resnet8", classes: int = 10, seed: int = 0, **options) -> nn.Module:
    options = {"side": 8, "dropout": 0.0} | options
    return task.build_network(name, classes=classes, seed=seed, **options)


ONE = torch.tensor(1)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# ----------------------------------------------------------------------------------- the network


def test_a_seed_gives_the_same_weights_and_leaves_the_callers_random_state():
    before = torch.random.get_rng_state()
    first = build(seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    assert same(first, build(seed=3))
    assert not same(first, build(seed=4))


def test_no_gpu_is_touched_to_build_a_network(monkeypatch):
    """Asking for its numbers opens a context of some hundred MiB; one that is in use has it."""
    asked = []
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *told: asked.append(told[-1]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    build("resnet8")
    assert not asked
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: None)
    build("resnet8")
    assert asked == [3, 3]


def test_a_network_is_channels_last():
    kernels = [p for p in build().parameters() if p.ndim == 4]
    assert all(k.is_contiguous(memory_format=torch.channels_last) for k in kernels)


@pytest.mark.usefixtures("user_module")
def test_kernels_of_three_dimensions_keep_their_layout():
    network = build("mine:Film")
    assert network.frames.weight.is_contiguous()
    assert network.picture.weight.is_contiguous(memory_format=torch.channels_last)
    assert task.network_facts("mine:Film", network, 8).least_side == 4


def test_an_unknown_network_gets_a_suggestion():
    with pytest.raises(JobError, match=r"^network=resnet81: unknown; did you mean resnet8"):
        build("resnet81")
    with pytest.raises(JobError, match=r"there are resnet8, resnet18, vgg8.*such as my_models"):
        build("perceptron")
    with pytest.raises(JobError, match="written timm:resnet50 or torchvision:resnet50"):
        build("resnet50")


def test_a_network_refuses_images_below_its_least_side():
    with pytest.raises(JobError, match="at least 8 pixels, not 6"):
        build("vgg8", side=6)


@pytest.mark.usefixtures("user_module")
def test_an_import_string_is_called_with_the_number_of_classes():
    assert build("mine:Holder.build", classes=7)[1].out_features == 7
    assert build("mine:with_dropout", dropout=0.1).share == 0.1


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere_at_all:build",
            "imported: there is no nowhere_at_all in /.*; start in its folder",
        ),
        ("mine.part:build", "imported: there is no mine.part in /"),
        ("broken:build", "'broken' cannot be imported: it imports a_package_that_is_missing, and"),
        ("script:build", r"'script' cannot be imported \(SystemExit: 2\): put what it runs as a"),
        ("mine:with_dropuot", "has no 'with_dropuot'; did you mean with_dropout"),
        ("mine:", "looks like package.module:function"),
        ("mine:fails", r"cannot be built \(RuntimeError: no such\)"),
        ("mine:lazy", "give every layer its sizes"),
        ("mine:no_module", "gave a int, not a torch.nn.Module"),
        ("mine:weightless", "^network=mine:weightless: has no weights to train$"),
    ],
)
def test_an_import_string_that_fails_says_why_in_one_line(name, message):
    with pytest.raises(JobError, match=message) as caught:
        build(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_of_networks_is_named_with_the_extra_that_installs_it(
    package, monkeypatch
):
    module = f"{package}.models"
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(JobError) as caught:
        build(f"{module}:resnet18")
    assert str(caught.value) == (
        f"network={module}:resnet18: module '{module}' cannot be imported: {package} is "
        'missing: pip install "batchwright[vision]"'
    )


def test_a_module_of_the_users_that_wants_torchvision_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "wants.py").write_text("from torchvision.transforms import v2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.transforms", raising=False)
    with pytest.raises(JobError, match=r'torchvision is missing: pip install "batchwright\[vis'):
        build("wants:network")


@pytest.mark.usefixtures("user_module")
def test_a_module_that_is_missing_is_said_to_be_in_none_of_the_folders_of_modules(monkeypatch):
    folders = ["/usr", str(Path.cwd()), "/there_is_no_such_folder", "/usr"]
    monkeypatch.setattr(sys, "path", folders)
    with pytest.raises(JobError, match=re.escape(f"nowhere_at_all in /usr, {Path.cwd()}; start")):
        build("nowhere_at_all.part:build")


@pytest.mark.usefixtures("user_module")
def test_dropout_that_a_network_does_not_take_is_refused():
    with pytest.raises(JobError, match="has no parameter `dropout`"):
        build("mine:Holder.build", dropout=0.2)


@pytest.mark.usefixtures("user_module")
def test_facts_count_weights_exchanged_bytes_and_least_side():
    network = build()
    facts = task.network_facts("resnet8", network, 8)
    assert (facts.parameters, facts.trained_bytes) == (78_042, 4 * 78_042)
    assert facts.batch_norm
    starting_weights.freeze(network, ["classifier.weight"])
    assert task.network_facts("resnet8", network, 8).trained_bytes == 4 * (78_042 - 640)

    name = "mine:needs_five_pixels"
    facts = task.network_facts(name, build(name), 16)
    assert (facts.least_side, facts.batch_norm) == (8, False)
    with pytest.raises(JobError, match="cannot take images of 4 pixels"):
        task.network_facts(name, build(name), 4)


def test_a_side_that_the_memory_cannot_hold_is_not_blamed_on_the_network(monkeypatch):
    network = build("resnet8")
    monkeypatch.setattr(network, "forward", mock.Mock(side_effect=MemoryError))
    with pytest.raises(JobError, match=r"resolutions=99: there is no memory for a single image"):
        task.network_facts("mine", network, 99, 5)


@pytest.mark.parametrize("name", [one.name for one in NETWORKS.own.values() if not one.takes_name])
def test_networks_of_ours_take_images_of_any_number_of_channels(name):
    network = build(name, arguments={"channels": 5})
    assert task.network_facts(name, network, 8, 5).least_side
    with pytest.raises(JobError, match=r"1 channel, .*give network_args\.channels=1") as told:
        task.network_facts(name, network, 8, 1)
    assert "\n" not in str(told.value)


class Grid(nn.Module):
    """Positions for 4 x 4 patches of 2 pixels: a single patch broadcasts, others do not fit."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 2, 2)
        self.positions = nn.Parameter(torch.zeros(1, 4, 16))

    def forward(self, images):
        return (self.patches(images).flatten(2) + self.positions).mean(2)


def test_a_network_with_a_fixed_grid_is_known_by_it_though_one_small_side_goes_through():
    with pytest.raises(JobError, match=r"takes 2 and its own 8: its grid .* seems to be fixed"):
        task.check_sides("mine:Grid", Grid(), (6, 8))
    small = nn.Sequential(nn.Conv2d(3, 2, 5), nn.AdaptiveAvgPool2d(1))
    with pytest.raises(JobError, match="takes 8: give resolutions= that suit it"):
        task.check_sides("mine:small", small, (4, 16))


# ----------------------------------------------------------------------------------- fine-tuning


def under(prefix, state):
    return {f"{prefix}{name}": value for name, value in state.items()}


OTHER = {"stem.0.weight": torch.zeros(1)}  # which fits nowhere, so it must not be taken


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"model": OTHER, "average": state, "epoch": 3},
        lambda state: {"state_dict": under("module.", state), "args": Namespace(lr=0.1)},
        lambda state: {"state_dict": OTHER, "state_dict_ema": state, "arch": "a", "version": 2},
        lambda state: {"model": OTHER, "model_ema": {"n_averaged": ONE, **under("module.", state)}},
        lambda state: {"state_dict": under("model._orig_mod.", state), "state_dict_ema": None},
        lambda state: {"model_state_dict": under("_orig_mod.module.", state), "loss": 0.1},
    ],
    ids=["plain", "ours", "average", "ddp", "timm", "torchvision", "lightning", "tutorial"],
)
def test_weights_come_back_from_what_programs_write(tmp_path, wrap):
    source = build(seed=1)
    torch.save(wrap(source.state_dict()), tmp_path / "w.pt")
    network = build(seed=2)
    assert starting_weights.load_weights(network, tmp_path / "w.pt") == []
    assert same(network, source)


def test_weights_come_back_from_safetensors(tmp_path):
    files = pytest.importorskip("safetensors.torch", reason="pip install 'batchwright[delivery]'")
    source, network = build(seed=1), build(seed=2)
    path = tmp_path / "w.safetensors"
    path.write_bytes(files.save({k: one.contiguous() for k, one in source.state_dict().items()}))
    assert starting_weights.load_weights(network, path) == []
    assert same(network, source)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FileError, match=r"w\.safetensors: damaged, or not written by safetensors$"):
        starting_weights.load_weights(network, path)


def test_a_prefix_that_the_network_has_itself_stays(tmp_path):
    source, network = (nn.ModuleDict({"model": build(seed=seed)}) for seed in (1, 2))
    torch.save({"state_dict": under("module.", source.state_dict())}, tmp_path / "w.pt")
    assert starting_weights.load_weights(network, tmp_path / "w.pt") == []
    assert same(network, source)


class TwoHeads(nn.Module):
    """A distilled network: two heads beside each other."""

    def __init__(self, classes):
        super().__init__()
        self.body, self.norm = nn.Linear(6, 4), nn.LayerNorm(4)
        self.head, self.head_dist = nn.Linear(4, classes), nn.Linear(4, classes)


def test_both_heads_of_a_distilled_network_are_of_the_classes(tmp_path):
    torch.save(TwoHeads(7).state_dict(), tmp_path / "w.pt")
    left = starting_weights.load_weights(network := TwoHeads(3), tmp_path / "w.pt")
    assert left == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    starting_weights.freeze(network, ["all-but-head"])
    assert [name for name, one in network.named_parameters() if one.requires_grad] == left


class HeadsInAList(nn.Module):
    """As timm's CrossViT: a head for each of two widths, whose logits are averaged."""

    def __init__(self, classes):
        super().__init__()
        self.norm = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(6)])
        self.head = nn.ModuleList([nn.Linear(4, classes), nn.Linear(6, classes)])


@pytest.mark.parametrize("classes", [3, 4, 6])  # 4 and 6: as many as a normalization is wide
def test_heads_of_several_widths_are_of_the_classes(tmp_path, classes):
    torch.save(HeadsInAList(7).state_dict(), tmp_path / "w.pt")
    left = starting_weights.load_weights(network := HeadsInAList(classes), tmp_path / "w.pt")
    assert left == ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"]
    starting_weights.freeze(network, ["all-but-head"])
    assert [name for name, one in network.named_parameters() if one.requires_grad] == left


class Normalized(nn.Module):
    """A head of timm's: a normalization, then a layer."""

    def __init__(self, classes):
        super().__init__()
        self.bn, self.linear = nn.BatchNorm1d(4), nn.Linear(4, classes)


class TwoNormalizedHeads(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.head, self.head_dist = Normalized(classes), Normalized(classes)


def test_heads_that_are_modules_are_of_the_classes_too(tmp_path):
    torch.save(TwoNormalizedHeads(7).state_dict(), tmp_path / "w.pt")
    left = starting_weights.load_weights(network := TwoNormalizedHeads(3), tmp_path / "w.pt")
    layers = ("head.linear", "head_dist.linear")
    assert left == [f"{layer}.{one}" for layer in layers for one in ("weight", "bias")]
    starting_weights.freeze(network, ["all-but-head"])
    assert [name for name, one in network.named_parameters() if one.requires_grad] == left


@pytest.mark.parametrize("resume", [False, True], ids=["begun", "resumed before a checkpoint"])
def test_training_starts_from_the_jobs_weights(tmp_path, monkeypatch, resume):
    torch.save(build("vgg8", seed=1).state_dict(), tmp_path / "w.pt")
    job = make_job(data="digits", network="vgg8", resolutions=(8,), weights=str(tmp_path / "w.pt"))
    plan = plan_without_profile(job, open_data(job).facts, make_network(name="vgg8"))
    found = []

    def begin(network, *_, **__):
        found.append(network)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "Session", begin)
    with pytest.raises(KeyboardInterrupt):
        loop.train(plan, run_folder=tmp_path / "run", resume=resume)
    assert same(found[0], build("vgg8", seed=1))


def test_a_run_with_a_checkpoint_goes_on_without_the_file_of_its_first_weights(
    tmp_path, monkeypatch, capsys
):
    job = make_job(
        data="digits",
        network="vgg8",
        resolutions=(8,),
        precision="float32",
        weights=str(tmp_path / "gone"),
    )
    plan = plan_without_profile(job, open_data(job).facts, make_network(name="vgg8"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileError, match="gone: cannot be read"):
        check_training(plan, resumed=tmp_path)
    (tmp_path / "checkpoints" / "previous.pt").touch()
    check_training(plan, resumed=tmp_path)
    assert not capsys.readouterr().err
    with pytest.raises(FileError, match="holds a run already"):
        loop.train(plan, run_folder=tmp_path, resume=False)
    monkeypatch.setattr(loop, "Session", mock.Mock(side_effect=KeyboardInterrupt))
    for resume in (True, False):  # of workers that a launcher has started again
        with pytest.raises(KeyboardInterrupt):
            loop.train(plan, run_folder=tmp_path, resume=resume)
    (tmp_path / "checkpoints" / "previous.pt").unlink()
    for resume in (True, False):
        with pytest.raises(FileError, match="gone: cannot be read"):
            loop.train(plan, run_folder=tmp_path, resume=resume)


def test_a_classifier_of_other_classes_stays_fresh_and_is_reported(tmp_path):
    source = build(classes=100, seed=1)
    state = {f"module.{name}": value for name, value in source.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    network, fresh = build(seed=2), build(seed=2)
    left = starting_weights.load_weights(network, tmp_path / "w.pt")
    assert left == ["classifier.weight", "classifier.bias"]
    assert torch.equal(network.classifier.weight, fresh.classifier.weight)
    assert same(network.stages, source.stages)


def test_tensors_missing_from_the_file_are_reported(tmp_path):
    state = build(seed=1).state_dict()
    del state["classifier.bias"]
    torch.save(state, tmp_path / "w.pt")
    assert starting_weights.load_weights(build(), tmp_path / "w.pt") == ["classifier.bias"]


def test_weights_of_another_network_are_refused_in_one_line(tmp_path):
    path = tmp_path / "w.pt"
    network = build("resnet18")
    fresh = build("resnet18")
    torch.save(build("vgg8").state_dict(), path)
    with pytest.raises(FileError, match=r"fit nowhere in the network: stages.0.0.weight, .*\.\.\."):
        starting_weights.load_weights(network, path)
    torch.save(build("resnet8").state_dict(), path)
    with pytest.raises(FileError, match="has shape"):
        starting_weights.load_weights(network, path)
    assert same(network, fresh)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged|not plain tensors"),
        (b"not weights at all", "not plain tensors|damaged"),
        (b"epochs: 3\n", "not plain tensors|damaged"),
        (b"run\n", "not plain tensors|damaged"),
        ({}, "neither a state_dict"),
        ({"epoch": 3}, "neither a state_dict"),
        ([1, 2], "neither a state_dict"),
    ],
)
def test_a_file_without_weights_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(FileError, match=message) as caught:
        starting_weights.load_weights(build(), path)
    assert "\n" not in str(caught.value)


def test_a_truncated_or_absent_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "w.pt"
    torch.save(build().state_dict(), path)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(FileError, match="damaged"):
        starting_weights.load_weights(build(), path)
    with pytest.raises(FileError, match=r"cannot be read \(No such file"):
        starting_weights.load_weights(build(), tmp_path / "other.pt")
    with pytest.raises(FileError, match=r"cannot be read \(Is a directory"):
        starting_weights.load_weights(build(), tmp_path)


def test_a_file_with_code_in_it_does_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    torch.save({"model": Trap()}, tmp_path / "w.pt")
    with pytest.raises(FileError, match="not plain tensors"):
        starting_weights.load_weights(build(), tmp_path / "w.pt")
    assert not (tmp_path / "sprung").exists()


def test_frozen_parts_keep_weights_and_statistics_while_the_rest_trains():
    network = build()
    starting_weights.freeze(network, ["stem.*", "stages.0.*"])
    before = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = task.build_optimizer(network, Job(), 0.1)
    task.set_training(network)
    network(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    for name, value in network.state_dict().items():
        frozen = name.startswith(("stem.", "stages.0."))
        unchanged = torch.equal(value, before[name])
        assert unchanged if frozen else ("running" not in name or not unchanged), name
    assert not torch.equal(network.classifier.weight, before["classifier.weight"])


def test_a_checkpoint_with_weights_under_another_name_is_told_its_keys(tmp_path):
    torch.save({"epoch": 3, "net": build().state_dict()}, tmp_path / "mine.pt")
    with pytest.raises(FileError, match="; it has epoch, net: save the network's state_dict alone"):
        starting_weights.load_weights(build(), tmp_path / "mine.pt")


def test_patterns_that_match_nothing_or_everything_are_refused():
    said = (
        r"^frozen=stage\.\*: matches no parameter; did you mean stages\.\d\.\*; the network has "
        r"stem\.0\.\*, stem\.1\.\*, stages\.0\.\*, stages\.1\.\*, stages\.2\.\*, classifier\.\*; "
        "all-but-head freezes all but classifier$"
    )
    with pytest.raises(JobError, match=said):
        starting_weights.freeze(build(), ["stage.*"])
    for name in ("stages", "stages."):  # the nearest part was named, which is only one of three
        with pytest.raises(JobError, match=r"no parameter; did you mean stages\.\*; the network"):
            starting_weights.freeze(build(), [name])
    with pytest.raises(JobError, match="leaves no parameter to train"):
        starting_weights.freeze(build(), ["*"])
    with pytest.raises(JobError, match="leaves no parameter to train"):
        starting_weights.freeze(nn.Flatten(), [])


def test_all_but_the_head_is_frozen_by_name_and_beside_patterns():
    for patterns in (["all-but-head"], ["stem.*", "all-but-head"]):
        starting_weights.freeze(network := build(), patterns)
        trained = [name for name, one in network.named_parameters() if one.requires_grad]
        assert trained == ["classifier.weight", "classifier.bias"]


# ------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_norms_and_biases_do_not_decay(optimizer):
    network = build()
    job = Job(optimizer=optimizer, weight_decay=0.1)
    decaying, other = task.build_optimizer(network, job, 0.5).param_groups
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert decaying["lr"] == other["lr"] == 0.5
    assert {p.ndim for p in decaying["params"]} == {2, 4}
    assert {p.ndim for p in other["params"]} == {1}
    assert len(decaying["params"]) + len(other["params"]) == len(list(network.parameters()))


def test_sgd_takes_the_step_of_the_textbook():
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, 2.0)
    optimizer = task.build_optimizer(network, Job(momentum=0.9, weight_decay=0.5), 0.1)
    weight, velocity = 2.0, 0.0
    for _ in range(3):
        network.weight.grad = torch.full((1, 1), 3.0)
        optimizer.step()
        gradient = 3.0 + 0.5 * weight
        velocity = 0.9 * velocity + gradient
        weight -= 0.1 * (gradient + 0.9 * velocity)
    assert network.weight.item() == pytest.approx(weight)


def test_plain_sgd_without_momentum_can_be_had():
    assert not task.build_optimizer(build(), Job(momentum=0), 0.1).defaults["nesterov"]


def trained_by(network, optimizer, passes=3):
    """Weights and state after a few steps; the state is taken out and put in again."""
    random = torch.Generator().manual_seed(0)
    for _ in range(passes):
        network(torch.randn(4, 3, 8, 8, generator=random)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return network.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": False}),
        ("adamw", torch.optim.AdamW, {}),
        ("adamw", torch.optim.AdamW, {"betas": (0.5, 0.75), "eps": 0.1}),
    ],
)
def test_optimizers_do_what_torchs_own_do_bit_by_bit(name, kind, options):
    ours, theirs = build(), build()
    theirs.load_state_dict(ours.state_dict())
    job = Job(optimizer=name, weight_decay=0.0, **{"nesterov": True, "momentum": 0.9} | options)
    optimizer = task.build_optimizer(ours, job, 0.1)
    plain = kind(
        [
            {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.0},
            {"params": [p for p in theirs.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        **{"lr": 0.1, "fused": True, **options},
    )
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    (weights, state), (wanted, expected) = trained_by(ours, optimizer), trained_by(theirs, plain)
    assert all(torch.equal(weights[key], wanted[key]) for key in wanted)
    assert state["param_groups"] == expected["param_groups"]
    for key, values in expected["state"].items():
        assert all(torch.equal(state["state"][key][k], v) for k, v in values.items())
    assert called == [1, 1, 1]
    assert isinstance(optimizer, kind)
    assert not any(p.grad is not None for p in ours.parameters())


WITHOUT_COMPILER = """
import sys
import torch
from batchwright.records import Job
from batchwright.workload.task import build_optimizer

def train(network, compiled, name="sgd"):
    optimizer = build_optimizer(network, Job(optimizer=name), 0.1)
    for _ in range(2):
        compiled(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return network[0].weight

def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))

torch.manual_seed(0)
plain, other = make(), make()
other.load_state_dict(plain.state_dict())
weight = train(plain, plain).clone()
train(plain, plain, "adamw")
train(plain, plain, "muon")
assert "torch._dynamo" not in sys.modules, "the compiler was loaded"
assert torch.equal(train(other, torch.compile(other, backend="eager")), weight)
assert "torch._dynamo" in sys.modules
"""


@pytest.mark.slow
def test_the_compiler_is_loaded_by_those_who_compile_only():
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr


def test_a_network_of_ours_for_other_channels_than_the_data_have_is_refused():
    network = task.build_network("resnet8", classes=10, side=8, arguments={"channels": 1})
    with pytest.raises(JobError, match="cannot take images of 3 channels"):
        task.network_facts("resnet8", network, 8)


# ---------------------------------------------------------------------- the last layer's own rate


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_all_layers_but_the_last_have_a_share_of_its_rate(name):
    network = build()
    usual = task.build_optimizer(network, Job(optimizer=name), 0.1)
    optimizer = task.build_optimizer(network, Job(optimizer=name, body_rate=0.25), 0.1)
    heads = task.heads_of(network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)
    for group in usual.param_groups:
        for parameter in group["params"]:
            ours = found[names[id(parameter)]]
            share = 1 if names[id(parameter)].rpartition(".")[0] in heads else 0.25
            assert ours == {**group, "params": ours["params"], "lr": share * group["lr"]}
    assert optimizer.param_groups[0]["lr"] == 0.1  # what a run tells is the last layer's
    assert (len(usual.param_groups), len(optimizer.param_groups)) == (2, 4) or name == "muon"
    trained_by(network, optimizer)


@pytest.mark.parametrize(("head", "why"), [(True, "is all that is trained"), (False, "is frozen")])
def test_a_body_rate_that_would_set_no_layer_apart_is_refused(head, why):
    network = build()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_((name.rpartition(".")[0] in task.heads_of(network)) == head)
    with pytest.raises(JobError, match=rf"body_rate=0\.25: the last layer \(classifier\) {why}"):
        task.build_optimizer(network, Job(optimizer="sgd", body_rate=0.25), 0.1)


def test_a_body_rate_with_all_other_layers_frozen_contradicts_itself():
    with pytest.raises(JobError, match=r"body_rate=0\.25 with frozen=all-but-head: only the last"):
        Job(body_rate=0.25, frozen=("all-but-head",))


def test_nothing_is_expected_of_a_body_with_its_own_rate_without_trials():
    """The other tasks' trainings had one rate for all layers."""
    facts = open_data(make_job()).facts
    assert expected_of(Job(device="cpu"), facts) is not None
    assert expected_of(Job(device="cpu", body_rate=0.25), facts) is None
