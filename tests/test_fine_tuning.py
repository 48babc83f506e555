"""What images are normalized by: the training images' own, or what pretrained weights expect."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import batchwright as bw
from batchwright.errors import JobError, PlanError
from batchwright.planning.planner import plan_without_profile
from batchwright.planning.validation import measured_job
from batchwright.records import DataFacts, Job
from batchwright.records.agent_rules import misfit
from batchwright.records.documents import load_job
from batchwright.workflows.prepare_job import ready_for
from batchwright.workload import library_networks
from batchwright.workload.data import image_files
from batchwright.workload.data.image_files import ImageFiles
from batchwright.workload.data.sources import open_data
from batchwright.workload.extras import missing
from batchwright.workload.starting_weights import library_normalization
from batchwright.workload.task import build_network
from samples import make_job, make_network, make_profile

SIX = (0.5, 0.4, 0.3, 0.2, 0.3, 0.4)
IMAGENET = (0.485, 0.456, 0.406, 0.229, 0.224, 0.225)
TEXT = "normalize=0.5,0.4,0.3,0.2,0.3,0.4"


@pytest.fixture(scope="module")
def digits() -> DataFacts:
    return open_data(Job(data="digits")).facts


def settled(digits: DataFacts, **keys: Any) -> Job:
    keys = {"data": "digits", "workers": 1, "device": "cpu", "resolutions": (8,)} | keys
    return ready_for(Job(**keys), digits)


def test_numbers_are_three_means_and_three_deviations() -> None:
    assert load_job(None, [TEXT]).normalize == SIX
    assert load_job(None, ["normalize=data"]).normalize == "data"
    for wrong in ("0.5,0.5,0.5", "123,116,103,58,57,57", "0,0,0,1,1,0", "0.5"):
        with pytest.raises(JobError, match=r"give data, or six numbers for pixels from 0 to 1"):
            load_job(None, [f"normalize={wrong}"])
    with pytest.raises(JobError, match=r"data=mine:images normalizes its images itself"):
        load_job(None, ["data=mine:images", TEXT])


@pytest.mark.usefixtures("own_cache")
def test_images_of_the_cache_and_of_files_are_normalized_by_the_jobs_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        place = tmp_path / "images" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 51 * (number % 4), np.uint8)).save(
            place / f"{number}.png"
        )
    keys = {"data": f"imagefolder:{tmp_path / 'images'}", "val": 0.25, "resolutions": (8,)}
    own = open_data(Job(**keys))
    stored = open_data(Job(normalize=SIX, **keys))
    assert (*stored.mean, *stored.std) == SIX
    assert stored.facts == own.facts
    again = open_data(Job(**keys))  # the cache keeps the images' own
    assert (again.mean, again.std) == (own.mean, own.std) != (stored.mean, stored.std)

    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(image_files, "free_bytes", lambda: 100)
    files = open_data(Job(normalize=SIX, **keys)).val
    assert isinstance(files, ImageFiles)
    pixel = files.square(0, 8, None)[0, 0].float() / 255
    wanted = (pixel - torch.tensor(SIX[:3])) / torch.tensor(SIX[3:])
    torch.testing.assert_close(files[0][0][:, 0, 0], wanted)


def saved(folder: Path, **processor: Any) -> str:
    """A tiny network of Transformers with trained weights, and how its images are processed."""
    library = pytest.importorskip("transformers", reason=missing("transformers"))
    config = library.ResNetConfig(hidden_sizes=[8, 16], depths=[1, 1], embedding_size=8)
    library.AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return f"transformers:{folder}"


TOLD = {"image_mean": SIX[:3], "image_std": SIX[3:], "rescale_factor": 1 / 255}


@pytest.mark.parametrize(
    ("processor", "given", "wanted"),
    [
        (TOLD, "auto", SIX),
        (TOLD, "data", "data"),
        pytest.param(TOLD, IMAGENET, IMAGENET, marks=pytest.mark.slow),
        (TOLD | {"do_normalize": False}, "auto", (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)),
        pytest.param(TOLD | {"rescale_factor": None}, "auto", SIX, marks=pytest.mark.slow),
        (TOLD | {"rescale_factor": 1 / 127.5, "rescale_offset": True}, "auto", "auto"),
        pytest.param({}, "auto", "auto", marks=pytest.mark.slow),
    ],
)
def test_a_job_takes_what_pretrained_weights_of_transformers_expect(
    processor: dict[str, Any],
    given: Any,
    wanted: Any,
    digits: DataFacts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = saved(tmp_path / "mine", **processor)
    pretrained = {"network_args": {"pretrained": True}, "normalize": given}
    job = settled(digits, network=network, **pretrained)
    assert job.normalize == wanted
    said = capsys.readouterr().err
    assert ("images are normalized as for the weights: normalize=" in said) is (
        given == "auto" != wanted
    )
    assert ("the weights do not tell" in said) is (wanted == "auto")
    assert settled(digits, network=network, normalize=given).normalize == given
    asked = Job(network=network, **pretrained)
    assert not misfit(asked, asked.model_copy(update={"normalize": job.normalize}))


def test_timm_and_torchvision_say_what_their_weights_expect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: Any = SimpleNamespace(pretrained_cfg={"mean": SIX[:3], "std": SIX[3:]})
    assert library_normalization("timm:any", built) == SIX
    built = SimpleNamespace(pretrained_cfg={"mean": (0.5,), "std": (0.5,)})  # of one channel
    assert library_normalization("timm:any", built) is None
    weights = SimpleNamespace(
        DEFAULT=SimpleNamespace(transforms=lambda: SimpleNamespace(mean=[*SIX[:3]], std=[*SIX[3:]]))
    )
    models = SimpleNamespace(get_model_weights=lambda name: {"any": weights}[name])
    monkeypatch.setattr(library_networks, "import_library", lambda _: models)
    assert library_normalization("torchvision:any", built) == SIX
    assert library_normalization("mine:network", built) is None


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_the_libraries_themselves_say_it(name: str) -> None:
    library = name.partition(":")[0]
    pytest.importorskip(library, reason=missing(library), exc_type=(ImportError, RuntimeError))
    built = build_network(name, classes=3, side=32)
    assert library_normalization(name, built) == pytest.approx(IMAGENET)


def test_a_checkpoint_and_a_delivered_network_say_how_they_were_trained(
    digits: DataFacts, tmp_path: Path
) -> None:
    path, weights = tmp_path / "w.pt", build_network("resnet8", classes=10, side=8).state_dict()
    torch.save({"model": weights, "input": {"side": 8, "mean": SIX[:3], "std": SIX[3:]}}, path)
    assert settled(digits, weights=str(path)).normalize == SIX
    torch.save(weights, path)
    assert settled(digits, weights=str(path)).normalize == "auto"
    files = pytest.importorskip("safetensors.torch", reason=missing("safetensors"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(files.save({name: one.contiguous() for name, one in weights.items()}))
    assert settled(digits, weights=str(path)).normalize == "auto"
    (tmp_path / "config.json").write_text(json.dumps({"mean": SIX[:3], "std": SIX[3:]}))
    assert settled(digits, weights=str(path)).normalize == SIX


def test_the_tensors_of_a_file_are_read_once(
    digits: DataFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, load, mapped = tmp_path / "w.pt", torch.load, []

    def noted(*given: Any, mmap: bool = False, **named: Any) -> Any:
        mapped.append(mmap)
        return load(*given, mmap=mmap, **named)

    torch.save(build_network("resnet8", classes=10, side=8).state_dict(), path)
    monkeypatch.setattr(torch, "load", noted)
    assert settled(digits, weights=str(path)).normalize == "auto"
    assert sorted(mapped) == [False, True]


def test_a_profile_of_another_normalization_is_refused_and_an_open_one_taken() -> None:
    profile = make_profile(job=make_job(normalize=SIX))
    with pytest.raises(PlanError, match=rf"measured with {TEXT}, the job says normalize=data"):
        measured_job([profile], make_job(normalize="data"))
    assert measured_job([profile], make_job()).normalize == SIX
    with pytest.raises(PlanError, match=rf"normalize=auto, the job says {TEXT}: probe again"):
        measured_job([make_profile()], make_job(normalize=SIX))


@pytest.mark.slow
def test_a_run_and_what_is_delivered_keep_the_numbers(digits: DataFacts, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason=missing("safetensors"))
    job = Job(launch="in-process", workers=1, epochs=1, resolutions=(8,), normalize=SIX)
    plan = plan_without_profile(job, digits, make_network(least_side=4))
    (reason,) = (one for one in plan.reasons if one.choice == "normalization")
    assert reason.value in TEXT
    run = bw.train(plan, run_folder=tmp_path / "run")
    bw.deliver(run.run_folder, tmp_path / "model", checkpoint="last")
    model = bw.load_model(tmp_path / "model")
    found = (*model.mean.flatten().tolist(), *model.std.flatten().tolist())
    assert found == pytest.approx(SIX)
