import errno
import logging
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from batchwright.errors import DataError, FileError
from batchwright.records import DataFacts
from batchwright.storage.locks import lock_file
from batchwright.workload.data import store_writer
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.store import cache_folder, free_bytes, mapped_bytes, open_store
from batchwright.workload.data.store_writer import StoreWriter
from samples import make_data

SECONDS = 300  # until a wait has failed; a busy machine may take long

RECIPE = {"data": "made for a test"}
FACTS = make_data(train_samples=3, val_samples=1, classes=("a", "b"), side=4)


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def build_uniform(writer: StoreWriter) -> DataFacts:
    writer.add("train", noise(3, 4, 5, 3), np.array([1, 0, 1]))
    writer.add("val", noise(1, 4, 5, 3, seed=1), np.array([0]))
    return FACTS


def build_mixed(writer: StoreWriter) -> DataFacts:
    writer.add("train", noise(1, 4, 5, 3), np.array([1]))
    writer.add("train", noise(2, 6, 2, 3), np.array([0, 1]))
    writer.add("val", noise(1, 4, 5, 3), np.array([0]))
    return FACTS


def refuse_to_build(writer: StoreWriter) -> DataFacts:
    raise AssertionError("the store was there already")


def only_store(cache: Path) -> Path:
    (folder,) = (path for path in (cache / "stores").iterdir() if path.is_dir())
    return folder


def test_images_of_one_size_come_back_as_one_tensor() -> None:
    train, val, header = open_store(RECIPE, build_uniform)
    assert train.shape == (4, 5)
    assert train.images is not None
    assert torch.equal(train.images, torch.from_numpy(noise(3, 4, 5, 3)))
    assert torch.equal(train.image(2), train.images[2])
    assert train.labels.dtype == torch.int64
    assert train.labels.tolist() == [1, 0, 1]
    assert len(val) == 1
    assert header.facts == FACTS


def test_images_of_mixed_sizes_come_back_one_by_one() -> None:
    train, _, _ = open_store(RECIPE, build_mixed)
    assert train.shape is None
    assert train.images is None
    assert train.sizes.tolist() == [[4, 5], [6, 2], [6, 2]]
    assert torch.equal(train.image(0), torch.from_numpy(noise(1, 4, 5, 3)[0]))
    assert torch.equal(train.image(2), torch.from_numpy(noise(2, 6, 2, 3)[1]))


def test_images_are_a_view_of_the_mapped_file_and_writing_to_them_leaves_the_file_alone() -> None:
    train, _, _ = open_store(RECIPE, build_uniform)
    assert train.images is not None
    assert train.images.data_ptr() == train.image(0).data_ptr()
    train.images.zero_()
    again, _, _ = open_store(RECIPE, refuse_to_build)
    assert torch.equal(again.image(0), torch.from_numpy(noise(3, 4, 5, 3)[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's limit on mappings")
def test_a_file_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    size, path = 2**42, tmp_path / "train.pixels"
    try:
        with path.open("wb") as file:
            file.truncate(size)  # takes no room on the disk
    except OSError:
        pytest.skip("the disk has no files of 4 TiB")
    pixels = mapped_bytes(path)
    assert pixels.shape == (size,)
    pixels[size // 2] = 7
    assert pixels[size // 2 - 1 : size // 2 + 2].tolist() == [0, 7, 0]
    assert mapped_bytes(path)[size // 2] == 0


def test_a_store_that_may_not_be_mapped_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(RECIPE, build_uniform)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(FileError, match=r"train\.pixels cannot be mapped .* raise the limit"):
        open_store(RECIPE, refuse_to_build)


def test_a_store_can_stand_on_images_in_memory() -> None:
    images, labels = torch.from_numpy(noise(3, 4, 5, 3)), torch.tensor([2, 0, 1])
    made = ImageStore.from_images(images, labels)
    assert made.images is not None
    assert torch.equal(made.images, images)
    assert torch.equal(made.image(1), images[1])


def test_pixels_that_do_not_fit_the_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="59 pixel values do not make 1 such images"):
        ImageStore(torch.zeros(59, dtype=torch.uint8), torch.tensor([0]), torch.tensor([[4, 5]]))


def test_mean_and_deviation_are_those_of_the_training_pixels() -> None:
    _, _, header = open_store(RECIPE, build_mixed)
    pixels = np.concatenate([noise(1, 4, 5, 3).reshape(-1, 3), noise(2, 6, 2, 3).reshape(-1, 3)])
    assert header.mean == pytest.approx(pixels.mean(0) / 255)
    assert header.std == pytest.approx(pixels.std(0) / 255)


def test_a_channel_that_never_changes_has_a_deviation_of_one_grey_level() -> None:
    def build(writer: StoreWriter) -> DataFacts:
        for part in store_writer.PARTS:
            writer.add(part, np.zeros((1, 4, 4, 3), np.uint8), np.array([0]))
        return FACTS

    _, _, header = open_store(RECIPE, build)
    assert header.std == (1 / 255,) * 3


def test_a_store_is_found_again_by_its_recipe_alone() -> None:
    open_store(RECIPE, build_uniform)
    open_store(dict(RECIPE), refuse_to_build)
    with pytest.raises(AssertionError):
        open_store({"data": "another"}, refuse_to_build)


def test_a_cache_in_a_home_that_nobody_has_is_refused(monkeypatch):
    monkeypatch.setenv(store_writer.CACHE_VARIABLE, "~nobody-has-this-name/cache")
    said = r"BATCHWRIGHT_CACHE=~nobody-has-this-name/cache: there is no such home folder"
    with pytest.raises(FileError, match=said):
        cache_folder()


def test_a_user_without_a_home_is_asked_for_a_cache(monkeypatch):
    monkeypatch.delenv(store_writer.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # of a number that has no name
    with pytest.raises(FileError, match="no home folder to keep a cache in: set BATCHWRIGHT_CACHE"):
        cache_folder()


def test_the_cache_is_private(cache: Path) -> None:
    open_store(RECIPE, build_uniform)
    assert (cache / "stores").stat().st_mode & 0o777 == 0o700
    assert only_store(cache).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["train.pixels", "val.index"])
def test_a_changed_byte_is_noticed_and_the_store_made_again(
    cache: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(RECIPE, build_uniform)
    path = only_store(cache) / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    train, _, _ = open_store(RECIPE, build_uniform)
    assert torch.equal(train.image(0), torch.from_numpy(noise(3, 4, 5, 3)[0]))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{name} is not what was written" in caplog.text
    assert "made again" in caplog.text


@pytest.mark.parametrize("name", ["train.pixels", "header.json", "val.index"])
def test_a_truncated_file_is_noticed_even_without_digests(
    cache: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(RECIPE, build_uniform)
    path = only_store(cache) / name
    path.write_bytes(path.read_bytes()[:-1])
    train, _, _ = open_store(RECIPE, build_uniform, verify=False)
    assert len(train) == 3
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()


def test_a_missing_file_is_noticed_even_without_digests(cache: Path) -> None:
    open_store(RECIPE, build_uniform)
    (only_store(cache) / "val.pixels").unlink()
    _, val, _ = open_store(RECIPE, build_uniform, verify=False)
    assert len(val) == 1


def test_what_a_killed_process_left_behind_is_no_store(cache: Path) -> None:
    open_store(RECIPE, build_uniform)
    folder = only_store(cache)
    folder.rename(folder.with_suffix(".part"))
    open_store(RECIPE, build_uniform)
    assert only_store(cache) == folder


def test_what_killed_processes_left_behind_does_not_fill_the_disk(cache: Path) -> None:
    for folder in ("stores", "fetched"):
        (cache / folder / "dead.part").mkdir(parents=True)
        (cache / folder / "at_work.part").mkdir()
    (cache / "films" / "half.part").mkdir(parents=True)  # of others, in a folder that is shared
    path = cache / "stores" / "at_work.lock"
    with lock_file(path, seconds=0, waiting=lambda _: None):
        assert free_bytes() > 0
    left = [one.name for one in sorted(cache.glob("*/*.part"))]
    assert left == ["half.part", "at_work.part"]


@pytest.mark.parametrize("failure", [DataError("bad image"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(cache: Path, failure: BaseException) -> None:
    def build(writer: StoreWriter) -> DataFacts:
        build_uniform(writer)
        raise failure

    with pytest.raises(type(failure)):
        open_store(RECIPE, build)
    assert [path.suffix for path in (cache / "stores").iterdir()] == [".lock"]


def test_a_full_disk_leaves_nothing_and_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_writer._HashedFile, "write", full)
    with pytest.raises(FileError, match=r"cache is full: .*stores: No space.*BATCHWRIGHT_CACHE"):
        open_store(RECIPE, build_uniform)
    assert [path.suffix for path in (cache / "stores").iterdir()] == [".lock"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_up_at_the_end_gives_the_same_line(cache: Path) -> None:
    def build(writer: StoreWriter) -> DataFacts:
        writer._pixels["val"] = store_writer._HashedFile(Path("/dev/full"))
        return build_uniform(writer)  # so few bytes that they are written when the file is closed

    with pytest.raises(FileError, match="cache is full"):
        open_store(RECIPE, build)
    assert [path.suffix for path in (cache / "stores").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FileError, match=r"file/cache/stores: Not a directory; set BATCHWRIGHT"):
        open_store(RECIPE, build_uniform)


def test_of_two_that_want_the_same_store_one_builds_it_and_the_other_waits() -> None:
    started, waited, builds, told = threading.Event(), threading.Event(), [], []

    def build(writer: StoreWriter) -> DataFacts:
        builds.append(1)
        started.set()
        assert waited.wait(SECONDS)  # until the other has found the lock taken
        return build_uniform(writer)

    def tell(done: int, total: int, what: str) -> None:
        told.append(what)
        waited.set()

    first = threading.Thread(target=open_store, args=(RECIPE, build), daemon=True)
    first.start()
    assert started.wait(SECONDS)
    train, _, _ = open_store(RECIPE, refuse_to_build, progress=tell)
    first.join(SECONDS)
    assert len(train) == 3
    assert builds == [1]
    assert told == ["waiting for another process that writes these images"]
