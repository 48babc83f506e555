"""`deliver`: weights, card and ONNX of a run, and the line that loads them again."""

from __future__ import annotations

import json

import pytest
import torch

import batchwright as bw
from batchwright.errors import ArgumentError, FileError, PlanError
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job
from batchwright.workload.data.sources import open_data
from samples import make_network

pytest.importorskip("safetensors", reason="pip install 'batchwright[delivery]'")


def trained(folder, **keys):
    job = Job(launch="in-process", workers=1, epochs=2, resolutions=(8,), **keys)
    network = make_network(name=job.network, least_side=4)
    plan = plan_without_profile(job, open_data(job).facts, network)
    return bw.train(plan, run_folder=folder, **{k: v for k, v in keys.items() if k == "network"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("delivery") / "run"
    return trained(folder)


@pytest.mark.slow
def test_a_delivered_network_classifies_as_the_run_said(run, tmp_path):
    card = bw.deliver(run.run_folder, tmp_path / "model", licence="cc0-1.0").read_text()
    assert card.startswith("---\nlicense: cc0-1.0\npipeline_tag: image-classification\n")
    best = run.best_epoch
    assert f"{best.val_correct} of {best.val_count}" in card
    for told in (run.plan.data.digest, "resnet8 on digits", "seconds per epoch", "1,437"):
        assert told in card
    scope = {}
    model = bw.load_model(tmp_path / "model")
    held = open_data(run.plan.job).val
    images, labels = held.images.permute(0, 3, 1, 2).float() / 255, held.labels
    found = model.names(images)
    right = sum(name == model.classes[label] for name, label in zip(found, labels, strict=True))
    assert abs(right - best.val_correct) <= 1  # of images that are on the edge
    assert not scope
    assert model(images[:2]).shape == (2, 10)

    # What is there already stays, whatever is asked.
    with pytest.raises(FileError, match="is there already and not empty"):
        bw.deliver(run.run_folder, tmp_path / "model")
    # Files of it that are damaged are named.
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(FileError, match=r"model\.safetensors is damaged"):
        bw.load_model(tmp_path / "model")


@pytest.mark.slow
def test_the_line_in_the_card_loads_it(run, tmp_path, monkeypatch):
    card = bw.deliver(run.run_folder, tmp_path / "DIR", checkpoint="last").read_text()
    assert "license: unknown" in card
    assert "No licence was named" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    scope = {"images": torch.rand(3, 3, 8, 8)}
    exec(code, scope)  # noqa: S102 - it is ours
    assert len(scope["names"]) == 3


@pytest.mark.slow
def test_onnx_computes_the_same(run, tmp_path):
    pytest.importorskip("onnxscript", reason="pip install 'batchwright[delivery]'")
    onnx = pytest.importorskip("onnx", reason="pip install 'batchwright[delivery]'")
    from onnx.reference import ReferenceEvaluator

    bw.deliver(run.run_folder, tmp_path / "model", onnx=True)
    images = torch.rand(3, 3, 8, 8)
    (found,) = ReferenceEvaluator(onnx.load(tmp_path / "model" / "model.onnx")).run(
        None, {"images": images.numpy()}
    )
    with torch.inference_mode():
        wanted = bw.load_model(tmp_path / "model")(images)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-3, atol=1e-4)


class Odd(torch.nn.Module):
    """A network of one's own that ONNX has no word for."""

    def __init__(self, num_classes):
        super().__init__()
        self.last = torch.nn.Linear(192, num_classes)

    def forward(self, images):
        if float(images.sum().item()) > 1e9:  # depends on values
            return images
        return self.last(images.flatten(1))


@pytest.mark.slow
def test_a_network_of_ones_own_is_named_again_and_may_not_go_into_onnx(tmp_path):
    name = f"{__name__}:Odd"
    run = trained(tmp_path / "run", network=name)
    bw.deliver(run.run_folder, tmp_path / "model")
    with pytest.raises(PlanError, match="in a file would run code: repeat network="):
        bw.load_model(tmp_path / "model")
    for given in (name, Odd, Odd(10)):
        assert bw.load_model(tmp_path / "model", given)(torch.rand(2, 3, 8, 8)).shape == (2, 10)
    with pytest.raises(FileError, match="damaged, or of another network"):
        bw.load_model(tmp_path / "model", torch.nn.Linear(2, 2))
    pytest.importorskip("onnxscript", reason="pip install 'batchwright[delivery]'")
    with pytest.raises(PlanError, match="cannot be written as ONNX"):
        bw.deliver(run.run_folder, tmp_path / "other", onnx=True, network=name)
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_delivered_is_refused_in_a_line(tmp_path):
    with pytest.raises(ArgumentError, match='checkpoint=\'newest\': give "best" or "last"'):
        bw.deliver(tmp_path, tmp_path / "model", checkpoint="newest")
    with pytest.raises(FileError, match=r"holds no summary\.json"):
        bw.deliver(tmp_path, tmp_path / "model")
    with pytest.raises(FileError, match="cannot read a model in"):
        bw.load_model(tmp_path)
    for text, words in (("{", "is not JSON"), ("[]", "none of ours"), ("{}", "none of ours")):
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(FileError, match=words):
            bw.load_model(tmp_path)
    config = {"format": "batchwright-model/1", "network": "resnet8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match="damaged, or of another network"):
        bw.load_model(tmp_path)
