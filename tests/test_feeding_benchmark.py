"""The benchmark of feeding: its figures, its photographs, and that both arms hand over the same."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.speed import feeding
from benchmarks.speed.feeding import BENCHMARK, MEAN, SIDE, STD, usual_images

from batchwright.training.loop import open_task
from batchwright.workload.data import sources
from batchwright.workload.data.image_files import FilePipeline

CPU = torch.device("cpu")
COLOURS = {"cat": (200, 100, 50), "dog": (20, 120, 220)}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder like Imagenette's, of which all images are taken."""
    monkeypatch.setattr(feeding, "FILES", 4)
    monkeypatch.setattr(feeding, "HELD_OUT", 2)
    for part, count in (("train", 2), ("val", 1)):
        for name, colour in COLOURS.items():
            folder = tmp_path / "data" / "imagenette2-160" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (213, 160), colour).save(folder / f"{number}.JPEG")
    return tmp_path / "data"


def test_figures_are_of_one_core_and_against_the_usual_code_at_its_best():
    rates = {
        "ours_0": [300.0, 300.0],
        "ours_1": [400.0, 400.0],
        "ours_2": [600.0, 800.0],
        "usual_0": [200.0, 900.0],  # with the highest median
        "usual_1": [500.0, 400.0],
        "usual_2": [100.0, 900.0],
        "evaluated": [500.0],
    }
    found = feeding.found_of(rates, 2)
    assert found["images_per_core"] == [300.0, 400.0]
    assert found["feeding_over_usual"] == pytest.approx([3.0, 8 / 9])
    assert found["evaluated_per_core"] == [250.0]
    assert feeding.found_of(rates, 1)["images_per_core"] == [400.0, 400.0]
    names = {one.name for one in BENCHMARK.figures}
    assert set(BENCHMARK.values(found | {"kilobytes_per_file": [40.0]})) == names


def test_photographs_are_enlarged_copies_or_the_originals(data: Path, tmp_path: Path):
    root = feeding.photographs(data, tmp_path / "one")
    files = feeding.files_of(root)
    assert [path.parent.name for path in files] == ["cat", "cat", "dog", "dog"]
    assert len(feeding.files_of(root, "val")) == 2
    assert {Image.open(path).size for path in files} == {(500, 375)}
    small = feeding.files_of(data / "imagenette2-160")
    assert {Image.open(path).size for path in small} == {(213, 160)}
    (data / "imagenette2-160").rename(data / "imagenette2")
    taken = feeding.files_of(feeding.photographs(data, tmp_path / "two"))
    assert {Image.open(path).size for path in taken} == {(213, 160)}


@pytest.mark.usefixtures("own_cache")
def test_both_arms_hand_over_the_same_kind_of_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = feeding.photographs(data, tmp_path)
    monkeypatch.setattr(sources, "fits_the_disk", lambda _: False)
    plan = feeding.plan_of(root, 0)
    task = open_task(plan, CPU)
    assert isinstance(task.training, FilePipeline)
    assert isinstance(task.held_out, FilePipeline)
    indices = next(feeding.endless(4))
    ours, labels = next(iter(task.training.batches([indices], epoch=0, resolution=SIDE)))
    files = task.training.files
    usual = usual_images(root)
    assert len(usual) == 4
    for index, image, label in zip(indices.tolist(), ours, labels.tolist(), strict=True):
        other, named = usual[index]
        assert named == label
        assert (other.shape, other.dtype) == (image.shape, image.dtype)
        levels = [
            shown * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
            for shown, mean, std in ((image, files.mean, files.std), (other, MEAN, STD))
        ]
        torch.testing.assert_close(*levels, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(500, 375), (30, 400)])
def test_a_random_part_lies_in_the_image(size: tuple[int, int]):
    random.seed(0)
    parts = [feeding.random_part(*size) for _ in range(300)]
    for left, top, right, bottom in parts:
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
    if size == (30, 400):  # few shapes fit: mostly the middle
        assert (0, 180, 30, 220) in parts
    else:
        shares = [(right - left) * (bottom - top) / 187_500 for left, top, right, bottom in parts]
        assert 0.07 < min(shares) < 0.2
        assert max(shares) > 0.8
