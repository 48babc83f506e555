"""`deliver`: weights, card and ONNX of a run, and the line that loads them again."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from unittest import mock

import pytest
import torch
import yaml
from torch.nn import functional

import batchwright as bw
from batchwright.errors import ArgumentError, FileError, PlanError
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Estimate, Job, RunSummary
from batchwright.records.documents import read_record, write_record
from batchwright.records.text.formatting import percent
from batchwright.reporting.render import figures
from batchwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from batchwright.workflows.delivery.deliver import trained as trained_network
from batchwright.workflows.delivery.model_card import model_card
from batchwright.workload.data.sources import open_data
from samples import make_network, make_plan, make_summary
from test_session import Points, make_session, make_tiny_plan

pytest.importorskip("safetensors", reason="pip install 'batchwright[delivery]'")


def trained(folder, **keys):
    job = Job(launch="in-process", workers=1, epochs=2, resolutions=(8,), **keys)
    network = make_network(name=job.network, least_side=4)
    plan = plan_without_profile(job, open_data(job).facts, network)
    named = {k: v for k, v in keys.items() if k in ("network", "data")}
    with mock.patch.multiple(figures, figure=lambda *_, **__: None, file_bytes=lambda *_: b""):
        return bw.train(plan, run_folder=folder, **named)  # as with the fixture `undrawn`


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("delivery") / "run"
    return trained(folder)


@pytest.mark.slow
def test_a_checkpoint_that_was_kept_is_delivered_with_its_own_accuracy(run, tmp_path):
    folder = tmp_path / "run"
    one = trained(folder, checkpoint_epochs=1)
    kept = sorted(path.name for path in (folder / "checkpoints").glob("epoch-*"))
    assert kept == ["epoch-1.pt", "epoch-2.pt"]
    card = bw.deliver(folder, tmp_path / "model", checkpoint="epoch-1").read_text()
    assert f"After epoch 1: {percent(one.epochs[0].top1)} of the held-out images" in card
    first, last = (load_checkpoint(folder / "checkpoints" / name) for name in kept)
    assert first["state"]["epoch"] == 1
    assert not torch.equal(first["model"]["classifier.weight"], last["model"]["classifier.weight"])
    at_end = load_checkpoint(folder / "checkpoints" / "last.pt")
    assert torch.equal(last["model"]["classifier.weight"], at_end["model"]["classifier.weight"])
    with pytest.raises(FileError, match=r"of single epochs there are: epoch-1, epoch-2$"):
        bw.deliver(folder, tmp_path / "other", checkpoint="epoch-3")


@pytest.mark.slow
def test_a_delivered_network_classifies_as_the_run_said(run, tmp_path):
    card = bw.deliver(run.run_folder, tmp_path / "model", licence="cc0-1.0").read_text()
    assert card.startswith("---\nlicense: cc0-1.0\npipeline_tag: image-classification\n")
    best = run.best_epoch
    assert f"{best.val_correct} of {best.val_count}" in card
    for told in (run.plan.data.digest, "resnet8 on digits", "seconds per epoch", "1,437"):
        assert told in card
    assert f"After epoch {best.epoch + 1}: {percent(best.top1)} of the held-out images" in card
    scope = {}
    model = bw.load_model(tmp_path / "model")
    held = open_data(run.plan.job).val
    images, labels = held.images.permute(0, 3, 1, 2).float() / 255, held.labels
    found = model.names(images)
    right = sum(name == model.classes[label] for name, label in zip(found, labels, strict=True))
    assert abs(right - best.val_correct) <= 1  # of images that are on the edge
    assert not scope
    assert model(images[:2]).shape == (2, 10)
    with pytest.raises(ArgumentError, match=r"from 0 to 1, not torch.uint8: divide"):
        model.names(held.images.permute(0, 3, 1, 2))

    # What is there already stays, whatever is asked.
    with pytest.raises(FileError, match="exists and is not empty: choose another --out"):
        bw.deliver(run.run_folder, tmp_path / "model")
    # Files of it that are damaged are named.
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(FileError, match=r"model\.safetensors is damaged"):
        bw.load_model(tmp_path / "model")


def evaluated_in(folder, checkpoint="best"):
    found = trained_network(folder, checkpoint).evaluated
    return None if found is None else found.epoch


@pytest.mark.slow
def test_the_best_of_a_parameter_server_is_found_by_its_score(run, tmp_path):
    """It goes on to train while a model is evaluated, and may be in a later epoch by then."""
    folder = tmp_path / "run"
    shutil.copytree(run.run_folder, folder)
    first, second = (
        one.model_copy(update={"val_correct": 200, "val_loss": loss})
        for one, loss in zip(run.epochs, (0.8, 0.7), strict=True)
    )
    write_record(run.model_copy(update={"epochs": (first, second)}), folder / "summary.json")
    path = folder / "checkpoints" / "best.pt"
    content = load_checkpoint(path) | {"server": {}}
    state = content["state"]
    state |= {"epoch": 2, "best_score": second.top1, "best_loss": 0.7}
    save_checkpoint(path, content)
    assert evaluated_in(folder) == 1
    state["best_loss"] = 0.8
    save_checkpoint(path, content)
    assert evaluated_in(folder) == 0
    del state["best_loss"]  # an earlier version kept the first of equals
    save_checkpoint(path, content)
    assert evaluated_in(folder) == 0
    state["best_score"] = 0.987  # of a run that went on after its summary
    save_checkpoint(path, content)
    assert evaluated_in(folder) is None


def scored(folder, scores, *, within=None, **options):
    """Train a loop of one's own with such means of each epoch; ``within``: another after a step."""
    plan = make_tiny_plan(epochs=3)
    with make_session(run_folder=folder, plan=plan, **options) as session:
        for epoch in session.epochs():
            for step, (features, labels) in enumerate(session.batches()):
                session.step(functional.cross_entropy(session.model(features), labels))
                if within == (epoch, step):
                    session.evaluate(Points(4), lambda _, y: {"top1": torch.full(y.shape, 0.75)})
            if epoch == len(scores):
                raise ConnectionError("killed")
            means = scores[epoch]
            session.evaluate(
                Points(4), lambda _, y, m=means: {k: torch.full(y.shape, v) for k, v in m.items()}
            )


def test_the_best_of_ones_own_score_is_delivered_with_its_own_epoch(tmp_path):
    """Its accuracy is not the highest."""
    own = [{"f1": f1, "top1": top1} for f1, top1 in ((0.5, 0.25), (0.75, 0.0), (0.25, 0.5))]
    scored(tmp_path / "run", own)
    assert evaluated_in(tmp_path / "run") == 1


def test_the_best_from_within_an_epoch_gets_no_accuracy_of_another(tmp_path):
    scored(tmp_path / "run", [{"top1": 0.25}] * 3, within=(1, 1))
    assert evaluated_in(tmp_path / "run") is None
    assert evaluated_in(tmp_path / "run", "last") == 2


def test_a_best_that_is_newer_than_the_summary_is_delivered_with_its_own_epoch(tmp_path):
    folder = tmp_path / "run"
    scored(folder, [{"top1": 0.25}] * 3)
    older = read_record(folder / "summary.json", RunSummary)
    shutil.rmtree(folder)
    with pytest.raises(ConnectionError):
        scored(folder, [{"top1": 0.25}, {"top1": 0.5}])
    write_record(older.model_copy(update={"epochs": older.epochs[:1]}), folder / "summary.json")
    found = trained_network(folder, "best").evaluated
    assert (found.epoch, found.top1) == (1, 0.5)


def test_a_card_says_of_which_epoch_an_accuracy_is_and_rounds_its_numbers():
    seconds = Estimate(value=0.5541371716710273, low=0.4912345678, high=0.6212345678)
    shares = tuple(
        Estimate(value=v, low=v - 0.1, high=v + 0.1) for v in (0.50123, 0.60123, 0.64623)
    )
    plan = make_plan()
    stages = (plan.stages[0].model_copy(update={"predicted_epoch_seconds": seconds}),)
    loss = Estimate(value=0.5, low=0.4, high=0.6)
    told = {"stages": stages, "epoch_accuracy": shares, "end_loss": loss}
    plan = plan.model_copy(update=told)
    summary = make_summary(plan=plan)
    config = {"side": 32, "network_args": {}, "mean": []}
    card = model_card(summary, summary.epochs[0], config, onnx=False)
    assert "\nAfter epoch 1: " in card
    assert "| held-out accuracy, epoch 3 | 64.6 %" in card
    assert "| held-out loss, epoch 30 | 0.500" in card
    assert "| predicted epoch seconds | 0.554 |" in card
    assert "| predicted accuracy, epoch 3 | 64.6 % |" in card
    assert not re.search(r"\d\.\d{5}", card)


@pytest.mark.slow
def test_the_line_in_the_card_loads_it(run, tmp_path, monkeypatch):
    card = bw.deliver(run.run_folder, tmp_path / "DIR", checkpoint="last").read_text()
    assert "license: unknown" in card
    assert "of the held-out images" in card
    assert "No licence was named" in card
    for licence in ("no", "1.0"):  # which YAML would take for another value
        head = bw.deliver(run.run_folder, tmp_path / licence, licence=licence).read_text()
        assert yaml.safe_load(head.split("---")[1])["license"] == licence
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    scope = {"images": torch.rand(3, 3, 8, 8)}
    exec(code, scope)  # noqa: S102 - it is ours
    assert len(scope["names"]) == 3

    # Of a run that went on after its summary was written, the checkpoint tells the accuracy.
    shutil.copytree(run.run_folder, tmp_path / "longer")
    before = run.model_copy(update={"epochs": run.epochs[:-1]})
    write_record(before, tmp_path / "longer" / "summary.json")
    card = bw.deliver(tmp_path / "longer", tmp_path / "other", checkpoint="last").read_text()
    assert f"After epoch 2: {percent(run.epochs[-1].top1)} of the held-out images" in card


@pytest.mark.slow
def test_onnx_computes_the_same(run, tmp_path, capfd):
    pytest.importorskip("onnxscript", reason="pip install 'batchwright[delivery]'")
    onnx = pytest.importorskip("onnx", reason="pip install 'batchwright[delivery]'")
    from onnx.reference import ReferenceEvaluator

    bw.deliver(run.run_folder, tmp_path / "model", onnx=True)
    assert capfd.readouterr() == ("", "")  # nobody can do anything about its warnings
    images = torch.rand(3, 3, 8, 8)
    (found,) = ReferenceEvaluator(onnx.load(tmp_path / "model" / "model.onnx")).run(
        None, {"images": images.numpy()}
    )
    with torch.inference_mode():
        wanted = bw.load_model(tmp_path / "model")(images)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_pretrained_network_of_transformers_comes_back_at_the_side_it_was_built_for(tmp_path):
    library = pytest.importorskip("transformers", reason="pip install 'batchwright[transformers]'")
    config = library.Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    library.AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path / "dino")
    arguments = {"pretrained": True}  # keeps 17 positions, and 8 px have 5
    run = trained(
        tmp_path / "run", network=f"transformers:{tmp_path / 'dino'}", network_args=arguments
    )
    bw.deliver(run.run_folder, tmp_path / "model", checkpoint="last")
    model = bw.load_model(tmp_path / "model")
    told = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (told["side"], told["built_side"]) == (8, 16)
    wanted = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["model"]
    found = model.network.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)


class Built(torch.nn.Module):
    """A network of one's own whose layers go by its arguments."""

    def __init__(self, num_classes, hidden=8, dropout=0.0):
        super().__init__()
        first = [torch.nn.Linear(192, hidden), *[torch.nn.Dropout(dropout)] * (dropout > 0)]
        self.layers = torch.nn.Sequential(*first, torch.nn.Linear(hidden, num_classes))

    def forward(self, images):
        return {"logits": self.layers(images.flatten(1))}


HOSTILE = "[x](http://evil) <img src=x> `a` | \\| *b*\n```\n# head"


@pytest.mark.slow
def test_a_network_is_built_with_the_arguments_it_was_trained_with(tmp_path, monkeypatch):
    name, arguments = f"{__name__}:Built", {"hidden": 5}
    run = trained(tmp_path / "run", network=name, network_args=arguments, dropout=0.1)
    plan = run.plan.model_copy(update={"data": run.plan.data.model_copy(update={"name": HOSTILE})})
    write_record(run.model_copy(update={"plan": plan}), tmp_path / "run" / "summary.json")
    card = bw.deliver(tmp_path / "run", tmp_path / "model").read_text()
    assert f'bw.load_model("DIR", network={name!r}, network_args={arguments!r})' in card
    for given in ({}, {"network": name}, {"network_args": arguments}):
        with pytest.raises(PlanError, match=r"repeat network='.*' and network_args={'hidden': 5}"):
            bw.load_model(tmp_path / "model", **given)
    model = bw.load_model(tmp_path / "model", name, arguments)
    assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)
    built = bw.load_model(tmp_path / "model", lambda num_classes: Built(num_classes, 5, 0.1))
    assert len(built.names(torch.rand(2, 3, 8, 8))) == 2

    # What a name holds is shown as it is.
    for markup in ("[x](", " <img", " `a`", "\n# head", " *b*", " | \\\\|"):
        assert markup not in card
    assert card.count("```") == 2

    # Nothing stays of what could not be delivered.
    monkeypatch.setattr("batchwright.workload.model_files.write_onnx", full)
    for place in (tmp_path / "other", tmp_path / "deep" / "other"):
        with pytest.raises(FileError, match="No space left on device"):
            bw.deliver(tmp_path / "run", place, onnx=True, network=name)
        assert not place.exists()


def full(model, side, channels, path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def radar():
    """Images of two channels, and which of both is brighter."""
    brighter = torch.arange(40) % 2
    images = torch.zeros(40, 2, 8, 8)
    images[torch.arange(40), brighter] = 1
    both = torch.utils.data.TensorDataset(images, brighter)
    return both, both, ("first", "second")


@pytest.mark.slow
def test_images_of_other_than_three_channels_are_trained_on_and_their_network_delivered(tmp_path):
    data, arguments = f"{__name__}:radar", {"channels": 2}
    run = trained(tmp_path / "run", data=data, network_args=arguments, global_batch=8)
    assert run.plan.data.channels == 2
    assert run.accuracy == 1.0
    card = bw.deliver(run.run_folder, tmp_path / "model").read_text()
    assert "`images` are a tensor of images as the data set gave them, (n, 2, 8, 8)" in card
    model = bw.load_model(tmp_path / "model", "resnet8", arguments)
    images, _ = radar()[0].tensors
    assert model.names(images[:2]) == ["first", "second"]


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
    with pytest.raises(ArgumentError, match='checkpoint=\'newest\': give "best", "last", or "e'):
        bw.deliver(tmp_path, tmp_path / "model", checkpoint="newest")
    for licence in ("mit\nmodel-index: x", "", "a b", "x" * 99, "[mit]"):
        with pytest.raises(ArgumentError, match="give its identifier, such as apache"):
            bw.deliver(tmp_path, tmp_path / "model", licence=licence)
    with pytest.raises(FileError, match=r"holds no summary\.json"):
        bw.deliver(tmp_path, tmp_path / "model")
    with pytest.raises(FileError, match="cannot read a model in"):
        bw.load_model(tmp_path)
    for text, words in (("{", "is not JSON"), ("[]", "none of ours"), ("{}", "none of ours")):
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(FileError, match=words):
            bw.load_model(tmp_path)
    config = {"format": "batchwright-model/1", "network": "timm:resnet18", "classes": ["a", "b"]}
    evil = {"side": 8, "network_args": {"checkpoint_path": "evil.pth"}}  # timm unpickles that
    (tmp_path / "config.json").write_text(json.dumps(config | evil))
    with pytest.raises(PlanError, match=r"would run code: .* and network_args={'checkpoint_path'"):
        bw.load_model(tmp_path, "timm:resnet18")
    config = {"format": "batchwright-model/1", "network": "resnet8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match="damaged, or of another network"):
        bw.load_model(tmp_path)
