"""Networks by the names of timm, torchvision and Transformers; skipped where these are missing."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.errors import JobError
from batchwright.records import Job
from batchwright.records.documents import change_job
from batchwright.records.registries.networks import network_spec
from batchwright.workload.extras import missing
from batchwright.workload.starting_weights import load_weights
from batchwright.workload.task import build_network, logits_in, network_facts

SMALL = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=missing(name), exc_type=(ImportError, RuntimeError))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


def build(name: str, side: int = 32, **arguments: Any) -> nn.Module:
    return build_network(name, classes=3, side=side, arguments=arguments)


def trains(network: nn.Module, side: int = 32) -> None:
    outputs = network(torch.zeros(2, 3, side, side))
    assert isinstance(outputs, torch.Tensor)
    assert outputs.shape == (2, 3)
    outputs.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def refused(name: str, **arguments: Any) -> str:
    with pytest.raises(JobError) as caught:
        build(name, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_logits_are_found_in_what_networks_give() -> None:
    logits, other = torch.zeros(2, 3), torch.ones(2, 3)
    for outputs in (
        logits,
        (logits, other),
        [logits],
        {"logits": logits, "hidden": other},
        {"out": logits, "loss": None},
        SimpleNamespace(logits=logits, aux_logits=other),
    ):
        assert logits_in(outputs) is logits
    for outputs in ({"a": logits, "b": other}, (), "text", {}):
        with pytest.raises(JobError, match="without logits"):
            logits_in(outputs)


def test_arguments_come_by_name_from_the_command_line_a_file_and_python() -> None:
    words = ["network=timm:resnet18", "network_args.pretrained=true", "network_args.drop_rate=0.1"]
    wanted = {"pretrained": True, "drop_rate": 0.1}
    assert change_job(Job(), {}, words).network_args == wanted
    assert (
        change_job(Job(), {}, [w.replace("_args", ".args") for w in words]).network_args == wanted
    )
    assert change_job(Job(), {"network_args": wanted}).network_args == wanted
    assert change_job(Job(network_args={"a": 1}), {}, ["network_args=null"]).network_args == {}
    text = change_job(Job(), {"data_args": {"label": "12"}}).data_args
    assert text == {"label": "12"}  # what Python says stays as it is
    with pytest.raises(JobError, match="data_args = "):
        change_job(Job(), {}, ["data_args=3"])


def test_a_library_s_network_names_no_code_that_a_file_must_not_run() -> None:
    assert Job(network="timm:resnet18").code_keys == ()
    assert Job(network="timm.models:resnet18").code_keys == ("network",)
    assert network_spec("timm") is None
    assert "did you mean timm:NAME" in refused("timm")


@pytest.mark.parametrize("name", ["timm", "torchvision", "transformers"])
def test_a_missing_library_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, f"{name}.models", None)
    extra = "transformers" if name == "transformers" else "vision"
    said = f'network={name}:resnet: {name} is missing: pip install "batchwright[{extra}]"'
    assert refused(f"{name}:resnet") == said


def test_a_network_of_timm_is_built_at_the_job_s_size() -> None:
    library("timm")
    trains(build("timm:resnet18"))
    network = build("timm:vit_tiny_patch16_224", depth=1)
    trains(network)
    assert network_facts("timm:vit_tiny_patch16_224", network, 32).least_side == 32
    assert "did you mean resnet18" in refused("timm:resnet81")
    assert "argument 'nope'" in refused("timm:resnet18", nope=1)


def test_a_network_of_torchvision_is_built_without_auxiliary_classifiers() -> None:
    library("torchvision")
    trains(build("torchvision:resnet18"))
    trains(build("torchvision:googlenet", side=64), side=64)
    assert "did you mean resnet18" in refused("torchvision:resnet81")


def test_trained_weights_of_torchvision_are_taken_but_for_the_classifier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = library("torchvision").models
    trained = models.resnet18(num_classes=1000)
    stored = {name: torch.full_like(value, 2) for name, value in trained.state_dict().items()}
    kind = type(models.ResNet18_Weights.DEFAULT)
    monkeypatch.setattr(kind, "get_state_dict", lambda *_, **__: stored)
    network = build("torchvision:resnet18", pretrained=True)
    assert bool((network.conv1.weight == 2).all())
    assert network.fc.weight.shape == (3, 512)

    def absent(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(kind, "get_state_dict", absent)
    said = refused("torchvision:resnet18", pretrained=True)
    assert "resnet18-f37072fd.pth are neither in the library's cache (TORCH_HOME)" in said


def test_a_network_of_transformers_gives_logits_and_starts_from_a_folder(tmp_path: Any) -> None:
    library("transformers")
    network = build("transformers:resnet", **SMALL)
    trains(network)
    with torch.no_grad():
        network.resnet.embedder.embedder.convolution.weight.fill_(2)
    network.save_pretrained(tmp_path / "mine")
    again = build_network(
        f"transformers:{tmp_path}/mine", classes=5, side=32, arguments={"pretrained": True}
    )
    assert bool((again.resnet.embedder.embedder.convolution.weight == 2).all())
    assert again(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    assert load_weights(build("transformers:resnet", **SMALL), tmp_path / "weights.pt") == []


def test_what_transformers_does_not_have_is_refused_in_a_line() -> None:
    library("transformers")
    assert "has no depth; did you mean depths" in refused("transformers:resnet", depth=1)
    assert "without trained weights" in refused("transformers:resnet", pretrained=True)
    assert "did you mean resnet" in refused("transformers:resnett")
    assert "trust_remote_code" in refused("transformers:resnet", trust_remote_code=True)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18", "transformers:resnet"])
def test_what_the_job_says_elsewhere_is_no_argument(name: str) -> None:
    library(name.partition(":")[0])
    for key in ("num_classes", "dropout", "top_resolution"):
        assert f"network_args.{key} is not for a job to give" in refused(name, **{key: 7})
    assert "is true or false, not 'no'" in refused(name, pretrained="no")
    if name == "transformers:resnet":
        assert "num_labels is not for a job" in refused(name, num_labels=9)


def test_code_beside_a_configuration_is_not_run_even_where_a_terminal_could_be_asked(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    mapped = {"AutoConfig": "evil.Config", "AutoModelForImageClassification": "evil.Net"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": mapped}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused(f"transformers:{tmp_path}")
    assert not (tmp_path / "ran").exists()
