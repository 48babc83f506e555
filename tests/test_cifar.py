import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchwright.errors import DataError
from batchwright.workload.data.arrays import EDITIONS, find_folder, read_classes, read_part

HUNDRED = EDITIONS["cifar100"]
DATA = os.environ.get("BATCHWRIGHT_DATA")


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # From protocol 3 on, bytes are written as such; from 5 on, arrays in another way.
    path.write_bytes(pickle.dumps(content, protocol=4))


def planes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cifar-100-python"
    write(made / "train", {b"data": planes(6), b"fine_labels": [0, 1, 2, 0, 1, 2]})
    write(made / "test", {b"data": planes(3, seed=1), b"fine_labels": [2, 1, 0]})
    write(made / "meta", {b"fine_label_names": [b"apple", b"bee", b"crab"]})
    return made


def test_the_folder_is_found_by_itself_or_by_its_parent(folder: Path) -> None:
    assert find_folder(HUNDRED, folder) == folder
    assert find_folder(HUNDRED, folder.parent) == folder


def test_classes_are_read_as_text(folder: Path) -> None:
    assert read_classes(HUNDRED, folder) == ("apple", "bee", "crab")


def test_colour_planes_become_rgb_pixels(folder: Path) -> None:
    images, labels = read_part(HUNDRED, folder, "train", 3)
    assert images.shape == (6, 32, 32, 3)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    for channel in range(3):
        plane = planes(6)[4, channel * 1024 : (channel + 1) * 1024].reshape(32, 32)
        assert np.array_equal(images[4, :, :, channel], plane)


def test_the_five_training_files_of_cifar10_are_joined_in_order(tmp_path: Path) -> None:
    ten = EDITIONS["cifar10"]
    for seed, name in enumerate(ten.train):
        write(tmp_path / name, {b"data": planes(2, seed), b"labels": [seed, 9]})
    images, labels = read_part(ten, tmp_path, "train", 10)
    assert labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert images[8, 0, 0].tolist() == planes(2, 4)[0, ::1024].tolist()


def test_a_truncated_file_is_named_with_its_size_and_the_original_size(folder: Path) -> None:
    path = folder / "train"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"train is truncated .* 1,000 bytes, .* 155,249,918"):
        read_part(HUNDRED, folder, "train", 3)


@pytest.mark.parametrize("call", [os.system, eval, pickle.loads, np.load])
def test_a_pickle_that_asks_for_anything_else_is_refused_before_it_runs(
    folder: Path, call: Any
) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return call, (str(folder / "ran"),)

    write(folder / "train", {b"data": Call(), b"fine_labels": []})
    with pytest.raises(DataError, match=rf"train is refused: it calls \w+\.{call.__name__},"):
        read_part(HUNDRED, folder, "train", 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds no dictionary"),
        ({b"data": [1]}, "has no uint8 array"),
        ({b"data": planes(2).astype(float)}, "has no uint8 array"),
        ({b"data": planes(2)[:, :3000]}, r"shape \(2, 3000\) instead of \(images, 3072\)"),
        ({b"data": planes(0), b"fine_labels": []}, r"shape \(0, 3072\)"),
        ({b"data": planes(2), b"labels": [0, 1]}, "no list `fine_labels` of 2 labels"),
        ({b"data": planes(2), b"fine_labels": [0]}, "no list `fine_labels` of 2 labels"),
        ({b"data": planes(2), b"fine_labels": [0, 3]}, "whole numbers below 3"),
        ({b"data": planes(2), b"fine_labels": [0, -1]}, "whole numbers below 3"),
    ],
)
def test_a_file_with_other_content_is_named(folder: Path, content: Any, message: str) -> None:
    write(folder / "test", content)
    with pytest.raises(DataError, match=message) as caught:
        read_part(HUNDRED, folder, "val", 3)
    assert str(folder / "test") in str(caught.value)


def test_missing_things_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_folder(HUNDRED, tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a file: unpack it"):
        find_folder(HUNDRED, folder / "train")
    with pytest.raises(DataError, match=r"holds no CIFAR-10: .* data_batch_1"):
        find_folder(EDITIONS["cifar10"], folder)
    (folder / "meta").unlink()
    with pytest.raises(DataError, match="has no file meta"):
        find_folder(HUNDRED, folder)


@pytest.mark.skipif(not DATA, reason="BATCHWRIGHT_DATA names no folder with cifar-100-python")
def test_the_original_files_can_be_read() -> None:
    folder = find_folder(HUNDRED, Path(DATA or ""))
    assert {name: (folder / name).stat().st_size for name in HUNDRED.files} == HUNDRED.files
    classes = read_classes(HUNDRED, folder)
    assert len(classes) == 100
    assert classes[0] == "apple"
    images, labels = read_part(HUNDRED, folder, "val", 100)
    assert images.shape == (10_000, 32, 32, 3)
    assert np.bincount(labels).tolist() == [100] * 100
