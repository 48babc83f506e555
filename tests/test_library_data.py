"""Data of other libraries and formats, made on the spot; skipped where a library is missing."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import ssl
import stat
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from batchwright.errors import DataError, FileError, JobError
from batchwright.records import Job
from batchwright.records.registries import data_sources
from batchwright.records.registries.data_sources import DATA
from batchwright.records.run_folder import new_run_folder
from batchwright.storage.locks import writing
from batchwright.workload.data import listing, sources
from batchwright.workload.data.image_files import ImageFiles
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.libraries import remote, torchvision_data, web_dataset
from batchwright.workload.data.sources import ImageData, open_data
from batchwright.workload.extras import EXTRAS, missing
from clouds import Put, played_az, played_gs
from s3 import played_s3
from test_docs import briefly, entered, quickly, shown_for
from test_sources import stores


@pytest.fixture(autouse=True)
def offline(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=missing(name), exc_type=(ImportError, RuntimeError))


def picture(grey: int, mode: str = "L", kind: str = "PNG", size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("L", (size, size), grey).convert(mode).save(file, kind)
    return file.getvalue()


def open_(data: str, **keys: Any) -> ImageData:
    return open_data(Job(data=data, **keys))


def greys(store: ImageStore) -> list[int]:
    return [int(store.image(index)[0, 0, 0]) for index in range(len(store))]


def refused(data: str, **keys: Any) -> str:
    with pytest.raises((DataError, JobError)) as caught:
        open_(data, **keys)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "name", "extra"),
    [("hf:x", "datasets", "data"), ("torchvision:FakeData", "torchvision", "vision")],
)
def test_a_missing_library_is_named_with_its_extra(
    data: str, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert f'{name} is missing: pip install "batchwright[{extra}]"' in refused(data)


def test_arguments_are_for_sources_that_take_them() -> None:
    assert "takes no data_args: leave out label" in refused("digits", data_args={"label": "x"})


# -------------------------------------------------------------------------------------- WebDataset


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as made:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


def samples(first: int, labels: list[str]) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for place, label in enumerate(labels, start=first):
        made |= {f"{place:03}.png": picture(place), f"{place:03}.cls": label.encode()}
    return made


def shards(folder: Path) -> Path:
    tar(folder / "train-000.tar", samples(0, ["0", "1", "0"]))
    tar(folder / "train-001.tar", samples(3, ["1", "0", "1"]))
    tar(folder / "val-000.tar", samples(6, ["0", "1"]))
    return folder


def test_each_sample_of_tar_files_counts_once(tmp_path: Path) -> None:
    folder = shards(tmp_path / "birds")
    for pattern in ("{train-{000..001},val-000}.tar", "*.tar", ""):
        data = open_(f"wds:{folder}/{pattern}")
        train, val = stores(data)
        assert greys(train) == [0, 1, 2, 3, 4, 5]
        assert train.labels.tolist() == [0, 1, 0, 1, 0, 1]
        assert greys(val) == [6, 7]
        assert data.facts.classes == ("0", "1")
        assert data.facts.split == "the files of val"
        assert data.facts.name == "birds"


def test_images_that_were_decoded_for_auto_are_not_decoded_again_for_the_plan_s_side(
    tmp_path: Path, own_cache: Path
) -> None:
    data = f"wds:{shards(tmp_path / 'birds')}"
    auto = open_(data)
    for sides in ((auto.facts.side,), (4, auto.facts.side)):  # as a plan's job has them
        planned = open_(data, resolutions=sides)
        assert planned.facts == auto.facts
    assert [one.suffix for one in (own_cache / "stores").iterdir()].count("") == 1
    larger = stores(open_(data, resolutions=[16]))[0]
    assert larger.shape == (16, 16)


def test_a_share_or_named_tar_files_are_held_out(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    train = f"wds:{folder}/train-{{000..001}}.tar"
    assert "with val=0.1, or name their files: data_args.val=PATTERN" in refused(train)
    assert len(stores(open_(train, val=0.34))[1]) == 2
    named = open_(train, data_args={"val": f"{folder}/val-000.tar"})
    assert greys(stores(named)[1]) == [6, 7]


def test_tar_files_of_a_test_beside_a_validation_are_left_alone(tmp_path: Path) -> None:
    folder = shards(tmp_path / "birds")
    before = open_(f"wds:{folder}").facts
    for members in ({"009.png": picture(9)}, samples(9, ["-1"]), samples(9, ["2"])):
        tar(folder / "test-000.tar", members)
        for pattern in ("", "/*.tar"):
            assert open_(f"wds:{folder}{pattern}").facts == before
    (folder / "val-000.tar").unlink()
    assert "has classes that no training image has: 2" in refused(f"wds:{folder}")


def test_labels_of_tar_files_may_be_words_or_stand_in_json(tmp_path: Path) -> None:
    words: dict[str, bytes] = {}
    for i in range(4):
        held = {"kind": "ab"[i % 2], "label": i % 2}
        words |= {f"{i}.jpg": picture(9, kind="JPEG"), f"{i}.json": json.dumps(held).encode()}
    path = tar(tmp_path / "a.tar", words)
    assert open_(f"wds:{path}", val=0.5).facts.classes == ("0", "1")
    named = open_(f"wds:{path}", val=0.5, data_args={"label": "kind"})
    assert named.facts.classes == ("a", "b")
    assert "has no colour: it has kind, label" in refused(
        f"wds:{path}", val=0.5, data_args={"label": "colour"}
    )


def test_a_named_key_of_the_json_goes_before_other_labels_of_tar_files(tmp_path: Path) -> None:
    members = samples(0, ["0", "1", "0", "1"])
    path = tar(tmp_path / "a.tar", members)
    said = refused(f"wds:{path}", val=0.5, data_args={"label": "kind"})
    assert "it has cls besides its image; data_args.label=kind is neither an ending" in said
    for i in range(4):
        members[f"{i:03}.json"] = json.dumps({"kind": "ab"[i // 2]}).encode()
    tar(path, members)
    named = open_(f"wds:{path}", val=0.5, data_args={"label": "kind"})
    assert named.facts.classes == ("a", "b")
    by_ending = open_(f"wds:{path}", val=0.5, data_args={"label": "cls"})
    assert by_ending.facts.classes == open_(f"wds:{path}", val=0.5).facts.classes == ("0", "1")


def test_a_store_with_labels_of_the_ending_in_place_of_the_named_key_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = samples(0, ["0", "1", "0", "1"])
    for i in range(4):
        members[f"{i:03}.json"] = json.dumps({"kind": "ab"[i // 2]}).encode()
    data, keys = f"wds:{tar(tmp_path / 'a.tar', members)}", {"data_args": {"label": "kind"}}
    read, opened = web_dataset._samples, web_dataset.open_listed

    def by_ending(path: Path, root: Path, job: Job) -> Any:
        return read(path, root, job.model_copy(update={"data_args": {}}))

    def as_before(make: Any, identity: dict[str, Any], *more: Any) -> ImageData:
        return opened(make, {key: identity[key] for key in ("data", "files")}, *more)

    with monkeypatch.context() as older:
        older.setattr(web_dataset, "_samples", by_ending)
        older.setattr(web_dataset, "open_listed", as_before)
        assert open_(data, val=0.5, **keys).facts.classes == ("0", "1")
    assert open_(data, val=0.5, **keys).facts.classes == ("a", "b")


def test_images_in_tar_files_may_stay_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sources, "fits_the_disk", lambda _: False)
    data = open_(f"wds:{shards(tmp_path)}")
    assert isinstance(data.train, ImageFiles)
    assert int(data.train.square(4, 8, None)[0, 0, 0]) == 4


def test_damaged_tar_files_are_refused_by_name_and_member(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    path, whole = folder / "train-001.tar", (folder / "train-001.tar").read_bytes()
    path.write_bytes(whole[:2700])
    assert "train-001.tar is damaged or cut off behind" in refused(f"wds:{folder}")
    path.write_bytes(whole[:2048] + b"x" * 512 + whole[2560:])  # the header of another member
    assert "train-001.tar is damaged or cut off behind 003.cls (more" in refused(f"wds:{folder}")
    path.write_bytes(whole + whole)  # as by cat: what follows the first end would be lost
    assert "more follows behind its end" in refused(f"wds:{folder}")
    long = tarfile.TarInfo("x")
    long.type, long.size = tarfile.XHDTYPE, 2**32
    path.write_bytes(long.tobuf() + whole)
    assert "a header of 4,294,967,296 bytes" in refused(f"wds:{folder}")
    path.write_bytes(gzip.compress(whole))
    assert "train-001.tar is compressed" in refused(f"wds:{folder}")
    path.write_bytes(whole)
    assert not list((tmp_path / "cache").rglob("*.part"))
    stores(open_(f"wds:{folder}"))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.png": b"no image", "a.cls": b"0"}, "a.tar/a.png: not an image"),
        ({"a.png": picture(1)}, "sample a has no label: it has nothing besides"),
        ({"a.cls": b"0"}, "sample a has a label and no image"),
        ({"a.png": picture(1), "a.jpg": picture(1), "a.cls": b"0"}, "sample a has two images"),
        ({"a.png": picture(1), "a.cls": b"\xff"}, "sample a.cls is no label"),
        ({"a.png": picture(1), "a.cls": b""}, "has no label"),
        ({"a.png": picture(1), "a.json": b"[" * 99_999}, "sample a.json is no label"),
        ({"a.png": picture(1), "a.cls": b" " * 2**21}, "label of sample a has more than"),
        ({"a.png": picture(1), "a.cls": b"cat"}, "some labels are numbers and some are words"),
    ],
)
def test_samples_that_cannot_be_used_are_named(
    tmp_path: Path, members: dict[str, bytes], said: str
) -> None:
    path = tar(
        tmp_path / "a.tar", members | {f"z{n}": c for n, c in samples(1, list("0101")).items()}
    )
    assert said in refused(f"wds:{path}", val=0.5)


def test_patterns_that_name_nothing_are_refused(tmp_path: Path) -> None:
    assert "there is no file" in refused(f"wds:{tmp_path}/x-{{0..2}}.tar")
    assert "holds no .tar file" in refused(f"wds:{tmp_path}")
    assert "is neither a range" in refused(f"wds:{tmp_path}/x-{{0-2}}.tar")
    assert "goes backwards: write {0..7}" in refused(f"wds:{tmp_path}/x-{{7..0}}.tar")
    many = "{0..9999999999}"
    assert "names more than 100,000 files" in refused(f"wds:{tmp_path}/x-{many}{many}.tar")
    assert "and no vall" in refused(f"wds:{tmp_path}", data_args={"vall": "x"})
    assert 'data_args.val=["x"] is no text' in refused(f"wds:{tmp_path}", data_args={"val": ["x"]})
    path = tar(tmp_path / "one.tar", samples(0, ["7", "7"]))
    assert "are of one class" in refused(f"wds:{path}", val=0.5)
    tar(tmp_path / "val.tar", samples(0, ["7", "8"]))
    tar(tmp_path / "train.tar", samples(0, ["7", "9"]))
    assert "has classes that no training image has: 8" in refused(
        f"wds:{tmp_path}/{{train,val}}.tar"
    )


def test_tar_files_are_the_same_data_wherever_they_lie(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b [1]"):
        folder = tmp_path / name
        for part in ("one", "two"):
            tar(folder / part / "000.tar", samples(0, list("010101")))
        tar(folder / "val" / "000.tar", samples(0, list("01")))
        tar(folder / "test" / "000.tar", samples(8, list("01")))
        drawn = open_(f"wds:{folder}/{{one,two}}/000.tar", val=0.3)
        told = open_(f"wds:{folder}")
        assert (told.facts.train_samples, told.facts.split) == (12, "the files of val")
        found.append((drawn.facts.digest, greys(stores(drawn)[1]), told.facts.digest))
    assert found[0] == found[1]
    assert open_(f"wds:{tmp_path}/b [1]/one/000.tar", val=0.3).facts.train_samples == 4


def test_a_relative_path_is_of_the_folder_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for first, name in enumerate("ab"):
        path = tar(tmp_path / name / "x.tar", samples(4 * first, list("0101")))
        os.utime(path, (1, 1))  # as of archives that are made to be equal wherever they are made
        monkeypatch.chdir(tmp_path / name)
        found.append(greys(stores(open_("wds:x.tar", val=0.5))[0]))
        held_out = {"val": str(path)}
        said = refused("wds:x.tar", data_args=held_out)
        assert "all of these files are held out" in said
    assert max(found[0]) < min(found[1])


def test_classes_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", samples(0, ["cat", "dog\x1b[2J"] * 2))
    assert r"the class 'dog\x1b[2J' needs a printable" in refused(f"wds:{path}", val=0.5)


# ------------------------------------------------------------------------------------------- LMDB


def write(path: Path, values: dict[str, bytes]) -> None:
    path.mkdir(parents=True)
    with (
        library("lmdb").open(str(path), map_size=2**20) as database,
        database.begin(write=True) as put,
    ):
        for key, value in values.items():
            put.put(key.encode(), value)


def datum(label: int, planes: np.ndarray | None = None, image: bytes = b"") -> bytes:
    def whole(number: int, value: int) -> bytes:
        return bytes([number << 3, value])

    data = image if planes is None else planes.tobytes()
    shape = () if planes is None else planes.shape
    head = b"".join(whole(number, side) for number, side in enumerate(shape, start=1))
    size = bytes([len(data) & 127 | 128, len(data) >> 7])
    return head + bytes([4 << 3 | 2]) + size + data + whole(5, label) + whole(7, planes is None)


def test_databases_of_keys_with_classes_and_of_caffe_are_read(tmp_path: Path) -> None:
    library("lmdb")
    keys = {f"{name}/{i}": picture(i) for name in ("cat", "dog") for i in range(3)}
    write(tmp_path / "a", keys)
    data = open_(f"lmdb:{tmp_path}/a", val=0.34)
    assert data.facts.classes == ("cat", "dog")
    assert (len(stores(data)[0]), data.facts.name) == (4, "a")
    planes = np.zeros((3, 8, 8), np.uint8)
    planes[0] = 255  # blue
    write(tmp_path / "b" / "train_lmdb", {"0": datum(0, planes), "1": datum(1, image=picture(9))})
    write(tmp_path / "b" / "test_lmdb", {"0": datum(0, planes[:1]), "1": datum(1, planes)})
    data = open_(f"lmdb:{tmp_path}/b")
    assert stores(data)[0].image(0)[0, 0].tolist() == [0, 0, 255]
    assert stores(data)[1].image(0)[0, 0].tolist() == [255] * 3
    assert data.facts.split == "the database test_lmdb"


def test_a_test_database_beside_a_validation_is_left_alone(tmp_path: Path) -> None:
    library("lmdb")
    for part, labels in (("train", [1, 2]), ("val", [1, 2]), ("test", [0])):
        ones = {str(at): datum(label, image=picture(at)) for at, label in enumerate(labels)}
        write(tmp_path / f"{part}_lmdb", ones)
    data = open_(f"lmdb:{tmp_path}")
    assert data.facts.classes == ("1", "2")
    assert stores(data)[0].labels.tolist() == [0, 1]


def test_a_database_that_is_made_anew_is_read_anew(tmp_path: Path) -> None:
    library("lmdb")
    found = []
    for grey in (1, 2):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        write(tmp_path / "a", {f"{name}/{i}": picture(grey) for name in "cd" for i in range(2)})
        found.append(open_(f"lmdb:{tmp_path}/a", val=0.5))
    assert [greys(stores(data)[0]) for data in found] == [[1, 1], [2, 2]]
    assert found[0].facts.digest != found[1].facts.digest


def test_a_database_with_a_relative_path_is_of_the_folder_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("lmdb")
    found = []
    for grey in (1, 2):
        folder = tmp_path / str(grey)
        write(folder / "pets", {f"{name}/{i}": picture(grey) for name in "cd" for i in range(2)})
        os.utime(folder / "pets" / "data.mdb", (1, 1))
        monkeypatch.chdir(folder)
        found.append(greys(stores(open_("lmdb:pets", val=0.5))[0]))
    assert found == [[1, 1], [2, 2]]


def test_databases_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    library("lmdb")
    assert "holds no LMDB" in refused(f"lmdb:{tmp_path}")
    write(tmp_path / "a", {"1": picture(1)})
    assert "key '1' has no class" in refused(f"lmdb:{tmp_path}/a")
    write(tmp_path / "b", {"cat/1": b"nothing"})
    assert "'cat/1' is neither an encoded image nor a Datum" in refused(f"lmdb:{tmp_path}/b")
    bomb = bytes([4 << 3]) + b"\xff" * 5 + b"\x01" + datum(0)[3:]  # its data are a number
    one, odd = picture(1), datum(1, np.zeros((5, 2, 2), np.uint8))
    for name, held in (("bomb", bomb), ("odd", odd)):
        write(
            tmp_path / name, {"0": held, **{f"{i}": datum(i % 2, image=one) for i in range(1, 6)}}
        )
        assert "no Datum of Caffe with an image" in refused(f"lmdb:{tmp_path}/{name}", val=0.5)
    write(tmp_path / "cut", {f"{c}/{i}": picture(i, size=99) * 99 for c in "ab" for i in range(9)})
    file = tmp_path / "cut" / "data.mdb"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])  # reading it was a SIGBUS
    assert "bytes are there" in refused(f"lmdb:{tmp_path}/cut", val=0.5)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "data.mdb").write_bytes(b"x" * 9999)
    assert "cannot be read as LMDB" in refused(f"lmdb:{tmp_path}/c")


# ------------------------------------------------------------------------------------- torchvision


def test_fake_data_of_torchvision_are_the_same_at_every_opening(tmp_path: Path) -> None:
    library("torchvision")
    args = {"size": 30, "image_size": [3, 8, 8], "num_classes": 3}
    data = open_("torchvision:FakeData", val=0.2, data_args=args)
    assert data.facts.classes == ("0", "1", "2")
    assert data.facts.train_samples + data.facts.val_samples == 30
    before = data.facts.digest
    (tmp_path / "cache").rename(tmp_path / "other")
    assert open_("torchvision:FakeData", val=0.2, data_args=args).facts.digest == before
    assert "did you mean FakeData" in refused("torchvision:FakeDate")
    assert "FakeData takes no sice" in refused("torchvision:FakeData", data_args={"sice": 3})
    assert "data_args.root=PATH" in refused("torchvision:CIFAR10")
    said = refused("torchvision:CIFAR10", data_args={"root": str(tmp_path)})
    assert "cannot be made with" in said


def test_a_folder_of_torchvision_is_decoded_anew_when_it_changes(tmp_path: Path) -> None:
    library("torchvision")
    for name in "ab":
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "set" / name / f"{i}.png").write_bytes(picture(i))
    args = {"root": str(tmp_path / "set"), "download": True}
    assert "takes no download" in refused("torchvision:ImageFolder", val=0.3, data_args=args)
    args["download"] = "no"
    assert "is true or false, not 'no'" in refused("torchvision:MNIST", data_args=args)
    del args["download"]
    before = open_("torchvision:ImageFolder", val=0.3, data_args=args).facts.digest
    for i in range(3):
        (tmp_path / "set" / "a" / f"{i}.png").write_bytes(picture(99))
    assert open_("torchvision:ImageFolder", val=0.3, data_args=args).facts.digest != before
    whole = picture(9, size=99)
    (tmp_path / "set" / "a" / "0.png").write_bytes(whole[:33] + b"x" * (len(whole) - 33))
    assert "unreadable=skip" in refused("torchvision:ImageFolder", val=0.3, data_args=args)
    left = open_("torchvision:ImageFolder", val=0.3, data_args=args, unreadable="skip")
    assert left.facts.skipped == 1


def test_a_run_beside_a_set_of_torchvision_is_no_change_of_it(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "images.bin").write_bytes(b"1")
    before = listing.file_states(tmp_path)
    with writing(tmp_path / "runs" / "a"):
        (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("{}")
        assert listing.file_states(tmp_path) == before
    (tmp_path / "set" / "more.bin").write_bytes(b"2")
    assert len(listing.file_states(tmp_path)) == 2


class Parts:
    """As a class of torchvision's that has the splits train, val and test."""

    wrong: Exception | None = None
    names: tuple[str, ...] = ("train", "val", "test")

    def __init__(self, split: str = "train") -> None:
        if split not in self.names:
            known = "', '".join(self.names)
            raise ValueError(f"Unknown value '{split}' for argument split. Valid: '{known}'.")
        if split == "val" and self.wrong is not None:
            raise self.wrong
        self.split = split

    def __len__(self) -> int:
        return 1


def test_only_a_part_that_a_class_does_not_have_makes_way_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(data="torchvision:Parts")
    assert list(torchvision_data._made(job, "Parts", Parts)) == ["train", "val"]
    for wrong in (OSError("no route"), RuntimeError("corrupted"), ValueError("invalid literal")):
        monkeypatch.setattr(Parts, "wrong", wrong)
        with pytest.raises(DataError, match=f"'val'.*{wrong}.*data_args.split=train takes"):
            torchvision_data._made(job, "Parts", Parts)
    monkeypatch.setattr(Parts, "names", ("train", "test"))
    assert list(torchvision_data._made(job, "Parts", Parts)) == ["train", "test"]


@pytest.mark.parametrize("label", [torch.tensor([1, 2]), np.array([1, 2]), (1, 2)])
def test_a_label_of_several_numbers_is_refused_in_words(label: Any) -> None:
    class Several(Parts):
        targets = (label,)

    with pytest.raises(DataError, match=r"train/0: its label is a (list|tuple); labels are whole"):
        torchvision_data._list({"train": Several()}, Job(data="torchvision:Several"), "Several")


def test_items_without_a_class_are_refused_before_all_are_read() -> None:
    """As torchvision's CelebA, whose items have 40 attributes, and LFWPairs, a second image."""
    read: list[int] = []

    class Faces(Parts):
        def __len__(self) -> int:
            return 5000

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            read.append(index)
            return Image.new("RGB", (8, 8)), torch.arange(40)

    class Pairs(Faces):
        targets = (0,) * 5000

    for kind in (Faces, Pairs):
        read.clear()
        with pytest.raises(DataError, match="train/0: its label is a list; labels are whole"):
            torchvision_data._list({"train": kind()}, Job(data="torchvision:Faces"), "Faces")
        assert len(read) <= 101


def test_no_more_items_are_compared_with_the_list_than_a_hundred() -> None:
    for count in (0, 1, 99, 100, 199, 10_000):
        read: list[int] = []

        class Digits(Parts):
            targets = [0] * count

            def __len__(self) -> int:
                return len(self.targets)

            def __getitem__(self, index: int) -> tuple[Any, int]:
                read.append(index)  # noqa: B023 - is called in this turn of the loop
                return Image.new("RGB", (8, 8)), 0

        assert torchvision_data._labels("", Digits()) == ([0] * count, True)
        assert min(count, 50) <= len(read) <= 100


def test_labels_are_those_of_the_items_where_the_list_has_others() -> None:
    """As torchvision's OxfordIIITPet with target_types=binary-category, whose list has breeds."""

    class Pets(Parts):
        classes = ("Abyssinian", "beagle", "boxer", "Sphynx")
        targets = (0, 1, 2, 3) * 3

        def __init__(self, binary: bool) -> None:
            self.binary = binary

        def __len__(self) -> int:
            return len(self.targets)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            breed = self.targets[index]
            return Image.new("RGB", (8, 8)), int(breed in (1, 2)) if self.binary else breed

    job = Job(data="torchvision:Pets", val=0.3)
    found = torchvision_data._list({"train": Pets(binary=True)}, job, "Pets")
    assert found.classes == ("0", "1")
    labels = {file.name: file.label for file in found.all_files}
    assert [labels[f"train/{row}"] for row in range(12)] == [0, 1, 1, 0] * 3
    found = torchvision_data._list({"train": Pets(binary=False)}, job, "Pets")
    assert found.classes == Pets.classes
    assert [file.label for file in sorted(found.all_files, key=lambda one: int(one.name[6:]))] == [
        *Pets.targets
    ]


def test_photographs_of_torchvision_are_turned_upright_as_files_are() -> None:
    from batchwright.workload.data.decoding import decode

    halves = Image.fromarray(np.repeat(np.uint8([[0], [255]]), 8, axis=0).repeat(16, axis=1))
    lying, file, exif = halves.convert("RGB"), io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    lying.save(file, "JPEG", exif=exif, quality=95)
    wanted = decode(file.getvalue(), top_resolution=16)
    assert wanted[0, 0, 0] > 200 > 50 > wanted[0, -1, 0]
    opened = Image.open(file).convert("RGB")  # as torchvision's loader does
    found = decode(torchvision_data.Items({"train": [(opened, 0)]})("train/0"), top_resolution=16)
    assert np.array_equal(found, wanted)


def test_lsun_would_unpickle_a_file_of_the_current_folder() -> None:
    library("torchvision")
    assert "torchvision has no data set LSUN" in refused("torchvision:LSUN")


# ------------------------------------------------------------------------------------ Hugging Face


def hugging(count: int = 6, names: tuple[str, ...] = ("cat", "dog"), start: int = 0) -> Any:
    library_ = library("datasets")
    images = [Image.new("L", (8, 8), start + i) for i in range(count)]
    features = library_.Features(
        {"picture": library_.Image(), "kind": library_.ClassLabel(names=list(names))}
    )
    rows = {"picture": images, "kind": [i % len(names) for i in range(count)]}
    return library_.Dataset.from_dict(rows, features=features)


def test_a_saved_data_set_is_read_by_its_features(tmp_path: Path) -> None:
    library_ = library("datasets")
    both = library_.DatasetDict({"train": hugging(), "test": hugging(2, start=50)})
    both.save_to_disk(str(tmp_path / "pets"))
    data = open_(f"hf:{tmp_path}/pets")
    train, val = stores(data)
    assert (greys(train), greys(val)) == ([0, 1, 2, 3, 4, 5], [50, 51])
    assert data.facts.classes == ("cat", "dog")
    assert (data.facts.split, data.facts.name) == ("the split test", "pets")
    drawn = open_(f"hf:{tmp_path}/pets/train", val=0.34)
    assert len(stores(drawn)[1]) == 2


def test_columns_and_splits_that_are_not_clear_are_named(tmp_path: Path) -> None:
    library_ = library("datasets")
    made = hugging()
    made = made.add_column("other", [1] * 6).cast_column(
        "other", library_.ClassLabel(names=["a", "b"])
    )
    made.save_to_disk(str(tmp_path / "a"))
    where = f"hf:{tmp_path}/a"
    said = refused(where, val=0.5)
    assert "data_args.label=COLUMN; it has picture (Image), kind (ClassLabel), other" in said
    assert open_(where, val=0.5, data_args={"label": "kind"}).facts.classes == ("cat", "dog")
    assert "has no split x: data_args.val is one of train" in refused(where, data_args={"val": "x"})
    assert "name one of its splits (train) with" in refused(where, data_args={"label": "kind"})
    assert "is to count once" in refused(where, data_args={"streaming": True})
    for key in ("lable", "revision", "streaming"):
        said = refused(where, val=0.5, data_args={"label": "kind", key: False})
        assert said.endswith(f"data_args.image, data_args.label, and no {key}")
    assert "code of others" in refused("hf:x", data_args={"trust_remote_code": True})
    assert "looked for a folder" in refused("hf:nobody/nothing")
    twice = {"label": "kind", "train": "train", "val": "train"}
    assert "cannot be both trained on and held out" in refused(where, data_args=twice)
    assert 'data_args.image={"a": 1} is no text' in refused(where, data_args={"image": {"a": 1}})
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.json").write_text("{")  # what the library was doing, and why it failed
    assert "DatasetGenerationError: An error occurred while generating the dataset: " in refused(
        f"hf:{tmp_path}/text", data_args={"cache_dir": str(tmp_path / "hub")}
    )


def test_labels_that_pandas_has_made_floats_are_told_from_missing_ones(tmp_path: Path) -> None:
    rows = {"image": [picture(0)] * 4, "label": [0.0, 1.0, float("nan"), 1.0]}
    library("datasets").Dataset.from_dict(rows).save_to_disk(str(tmp_path / "a"))
    said = refused(f"hf:{tmp_path}/a", val=0.5)
    assert "has no single column of words or whole numbers for label: name it" in said
    assert said.endswith("it has image (binary), label (float64)")


def test_splits_that_number_classes_otherwise_or_have_no_labels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_ = library("datasets")
    pair = {"train": hugging(), "test": hugging(2, names=("cat", "fox"))}
    library_.DatasetDict(pair).save_to_disk(str(tmp_path / "a"))
    said = refused(f"hf:{tmp_path}/a")
    assert "only in train: dog; only in test: fox" in said
    half = hugging(2).map(lambda row: {"kind": row["kind"] - 1})
    library_.DatasetDict({"train": hugging(), "test": half}).save_to_disk(str(tmp_path / "b"))
    assert "row test/0 has no label (-1)" in refused(f"hf:{tmp_path}/b")
    parts = {"train": hugging(), "test": hugging(2).select([])}
    monkeypatch.setattr(library_, "load_from_disk", lambda _: parts)
    assert "the split test has no images" in refused(f"hf:{tmp_path}/a")
    monkeypatch.setattr(library_, "load_from_disk", lambda _: hugging().to_iterable_dataset())
    assert "each sample is to count once" in refused(f"hf:{tmp_path}/a")


@pytest.mark.parametrize("kept", ["label", "column", ""])
def test_a_test_split_without_labels_gives_way_to_a_share_that_is_held_out(
    tmp_path: Path, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    bare = hugging(2).map(lambda _: {"kind": -1})
    if kept == "column":
        bare = bare.cast_column("kind", library("datasets").Value("int64"))
    elif not kept:
        bare = bare.remove_columns("kind")
    both = library("datasets").DatasetDict({"train": hugging(), "test": bare})
    both.save_to_disk(str(tmp_path / "a"))
    where = f"hf:{tmp_path}/a"
    said = refused(where)
    assert "the split test has no labels" in said
    assert said.endswith("hold out a share of the others with val=0.1")
    assert "the split test has no labels" in refused(where, val=0.34, data_args={"val": "test"})
    caplog.clear()
    data = open_(where, val=0.34)
    assert (data.facts.train_samples, data.facts.val_samples) == (4, 2)
    assert data.facts.split == "0.34 of each class, drawn by their names"
    assert caplog.messages == [f"data={where}/test is left out: its images have no labels"]


def test_a_folder_of_parquet_files_with_bytes_and_words_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_ = library("datasets")
    monkeypatch.setattr(library_.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    rows = {
        "image": [{"bytes": picture(i, mode), "path": None} for i, mode in
                  enumerate(("L", "P", "RGBA", "I;16" if False else "L"))],
        "label": ["cat", "dog", "cat", "dog"],
    }  # fmt: skip
    (tmp_path / "set").mkdir()
    for part in ("train", "validation"):
        library_.Dataset.from_dict(rows).to_parquet(str(tmp_path / "set" / f"{part}-0.parquet"))
    data = open_(f"hf:{tmp_path}/set")
    assert data.facts.classes == ("cat", "dog")
    assert data.facts.split == "the split validation"
    assert greys(stores(data)[0]) == [0, 1, 2, 3]


def test_a_run_beside_the_data_is_begun_where_the_library_does_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(data="hf:.")
    (tmp_path / "train-0.parquet").touch()
    with pytest.raises(FileError, match=r"--out \.\./run, or one that the data leaves out, as its"):
        new_run_folder(None, job).__enter__()
    with new_run_folder(".runs/1", job):
        pass
    (tmp_path / "state.json").touch()  # as of `save_to_disk`
    with new_run_folder(None, job):
        pass


def test_what_a_run_writes_beside_the_data_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_ = library("datasets")
    monkeypatch.setattr(library_.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "set" / "data").mkdir(parents=True)
    for part, start in (("train", 0), ("test", 50)):
        path = tmp_path / "set" / "data" / f"{part}-00000-of-00001.parquet"
        hugging(start=start).to_parquet(str(path))
    before = open_(f"hf:{tmp_path}/set")
    with new_run_folder(tmp_path / "set" / ".runs/1", Job(data=f"hf:{tmp_path}/set")) as folder:
        for name in ("logs/train.log", "figures/test.png", "metrics.jsonl"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(picture(1))
        after = open_(f"hf:{tmp_path}/set")
    assert after.facts == before.facts
    assert greys(stores(after)[0]) == [0, 1, 2, 3, 4, 5]


def test_rows_name_no_files_that_are_not_of_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_ = library("datasets")
    monkeypatch.setattr(library_.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "private.png").write_bytes(picture(7))
    (tmp_path / "set").mkdir()
    for path, grey in ((tmp_path / "private.png", None), (tmp_path / "set" / "a.png", 5)):
        if grey is not None:
            path.write_bytes(picture(grey))
        rows = {"image": [{"bytes": None, "path": str(path)}] * 4, "label": ["a", "b"] * 2}
        made = library_.Dataset.from_dict(rows)
        monkeypatch.setattr(library_, "load_dataset", lambda *_, made=made, **__: made)
        (tmp_path / "set" / "x").write_text(str(grey))
        if grey is None:
            assert "which is not of the data set" in refused(f"hf:{tmp_path}/set", val=0.5)
        else:
            assert greys(stores(open_(f"hf:{tmp_path}/set", val=0.5))[0]) == [5, 5]


def test_rows_name_files_of_a_fetched_data_set(
    tmp_path: Path, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_ = library("datasets")
    monkeypatch.setattr(library_.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    put(elsewhere, class_folders(tmp_path / "pets"), "/bucket/pets")
    data = open_("hf:memory://bucket/pets")
    assert (greys(stores(data)[0]), data.facts.classes) == ([3, 4], ("cat", "dog"))


def test_secrets_and_class_names_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    said = refused("hf:a/b", data_args={"token": "hf_secret"})
    assert "data_args.token would be kept in run folders: set HF_TOKEN" in said
    assert "hf_secret" not in said
    hugging(names=("cat", "dog\n")).save_to_disk(str(tmp_path / "a"))
    assert r"'dog\n' needs a printable" in refused(f"hf:{tmp_path}/a", val=0.5)
    hugging(names=("cat",)).save_to_disk(str(tmp_path / "b"))
    assert "there must be two or more" in refused(f"hf:{tmp_path}/b", val=0.5)


# -------------------------------------------------------------------------------------- elsewhere


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(DATA._found, "memory", replace(DATA["s3"], name="memory"))
    system = library("fsspec").filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def put(system: Any, folder: Path, place: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            system.pipe(f"{place}/{path.relative_to(folder)}", path.read_bytes())


def class_folders(folder: Path) -> Path:
    for part in ("train", "val"):
        for grey, name in ((3, "cat"), (4, "dog")):
            (folder / part / name).mkdir(parents=True)
            (folder / part / name / "a.png").write_bytes(picture(grey))
    return folder


def test_a_folder_elsewhere_is_fetched_once_and_again_when_it_changes(
    tmp_path: Path, elsewhere: Any
) -> None:
    put(elsewhere, class_folders(tmp_path / "pets"), "/bucket/pets")
    data = open_("memory://bucket/pets")
    assert (greys(stores(data)[0]), data.facts.name) == ([3, 4], "pets")
    assert open_("imagefolder:memory://bucket/pets").facts.digest == data.facts.digest
    elsewhere.pipe("/bucket/pets/train/cat/b.png", picture(9))
    assert open_("memory://bucket/pets").facts.train_samples == 3
    elsewhere.rm("/bucket", recursive=True)
    job = Job(data="memory://bucket/pets")
    assert open_data(job, verify=False).facts.train_samples == 3  # as a worker opens it
    assert "there is neither a file nor a folder" in refused("memory://bucket/pets")


def test_archives_and_tar_files_elsewhere_are_known_by_what_is_in_them(
    tmp_path: Path, elsewhere: Any
) -> None:
    packed = tmp_path / "pets.tar.gz"
    with tarfile.open(packed, "w:gz") as made:
        made.add(class_folders(tmp_path / "pets"), "pets")
    elsewhere.pipe("/b/pets.tar.gz", packed.read_bytes())
    assert open_("memory://b/pets.tar.gz").facts.classes == ("cat", "dog")
    put(elsewhere, shards(tmp_path / "birds"), "/b/birds")
    for data in ("memory://b/birds", "wds:memory://b/birds/{train-{000..001},val-000}.tar"):
        assert greys(stores(open_(data))[0]) == [0, 1, 2, 3, 4, 5]
    elsewhere.pipe("/b/bad.tar.gz", packed.read_bytes()[:200])
    assert "bad.tar.gz is damaged" in refused("memory://b/bad.tar.gz")
    folder = tmp_path / "cache" / "fetched"
    assert not list(folder.rglob("*.part"))
    outside = tmp_path / "evil.tar.gz"
    with tarfile.open(outside, "w:gz") as made:
        made.addfile(tarfile.TarInfo("../../evil.txt"), io.BytesIO())
    elsewhere.pipe("/b/evil.tar.gz", outside.read_bytes())
    assert "evil.tar.gz is damaged" in refused("memory://b/evil.tar.gz")
    assert not list(tmp_path.rglob("evil.txt"))


def packed(kind: str, members: dict[str, bytes], link: str = "") -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
            for name, content in members.items():
                made.writestr(name, content)
            if link:
                info = zipfile.ZipInfo(link)
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
                made.writestr(info, "/etc")
        return file.getvalue()
    with tarfile.open(fileobj=file, mode="w:gz" if kind == "tar.gz" else "w") as made_tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made_tar.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo(link)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            made_tar.addfile(member)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_licence_may_lie_beside_the_folder_in_an_archive(kind: str, elsewhere: Any) -> None:
    members = {"LICENSE.txt": b"free", "pets/README": b"cats"}
    for label in "ab":
        members |= {f"pets/{label}/{i}.png": picture(i) for i in range(2)}
    elsewhere.pipe(f"/b/pets.{kind}", packed(kind, members))
    assert open_(f"memory://b/pets.{kind}", val=0.5).facts.classes == ("a", "b")


def test_names_that_mean_something_in_addresses_are_files_in_a_store(elsewhere: Any) -> None:
    for name in "ab":
        for i, char in enumerate("?#%&"):
            elsewhere.pipe(f"/b/{name}/{char}{i}%20.png", picture(i))
    data = open_("memory://b", val=0.25)
    assert (data.facts.train_samples, data.facts.val_samples) == (6, 2)


def test_files_of_one_name_in_several_places_are_all_there(elsewhere: Any) -> None:
    for place, part in enumerate(("train", "val")):
        content = packed("tar", samples(9 * place, list("010")))
        elsewhere.pipe(f"/b/{part}/000.tar", content)
        elsewhere.pipe(f"/c/{part}.zip", packed("zip", {f"{c}/1.png": picture(1) for c in "ab"}))
    data = open_("wds:memory://b/{train,val}/000.tar")
    assert [greys(store) for store in stores(data)] == [[0, 1, 2], [9, 10, 11]]
    assert open_("memory://b").facts.digest == data.facts.digest
    assert "val.zip holds a/1.png, and so does another" in refused("memory://c", val=0.5)


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar"])
def test_archives_write_nothing_elsewhere_and_no_more_than_there_is_room(
    kind: str, tmp_path: Path, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = {f"{c}/{i}.png": picture(1) for c in "ab" for i in range(2)}
    for number, name in enumerate(("../../evil.png", "a/../../../evil.png", "/../evil.png")):
        elsewhere.pipe(f"/b/{number}.{kind}", packed(kind, {**fine, name: picture(1)}))
        assert "leads out of the folder" in refused(f"memory://b/{number}.{kind}", val=0.5)
    assert not list(tmp_path.rglob("evil.png"))
    elsewhere.pipe(f"/b/link.{kind}", packed(kind, fine, link="c"))
    assert "c is a link or a device" in refused(f"memory://b/link.{kind}", val=0.5)
    whole = packed("tar", fine)
    if kind == "tar":  # a damaged header would have been taken for the end
        elsewhere.pipe("/b/damaged.tar", whole[:1024] + b"x" * 512 + whole[1536:])
        assert "more follows behind its end" in refused("memory://b/damaged.tar", val=0.5)
    elsewhere.pipe(f"/b/good.{kind}", packed(kind, fine))
    assert open_(f"memory://b/good.{kind}", val=0.5).facts.train_samples == 2
    elsewhere.pipe(f"/b/bomb.{kind}", packed(kind, {**fine, "c/1.png": bytes(2**21)}))
    monkeypatch.setattr(remote, "free_bytes", lambda: 2**21 + 40_000 if kind == "tar" else 2**21)
    if kind != "tar":  # which is no smaller than what is in it
        assert "unpacks to more than the disk" in refused(f"memory://b/bomb.{kind}", val=0.5)
    assert not list((tmp_path / "cache" / "fetched").glob("*.part"))


@pytest.mark.slow
def test_a_folder_of_a_web_server_is_fetched_and_its_changes_are_seen(tmp_path: Path) -> None:
    library("fsspec")
    library("aiohttp")
    folder = class_folders(tmp_path / "pets & co")
    for part in ("train", "val"):
        (folder / part / "cat").rename(folder / part / "a cat")
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(tmp_path))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/pets%20%26%20co"
            for data in (url, f"imagefolder:{url}/"):
                found = open_(data).facts
                assert (found.train_samples, found.classes) == (2, ("a cat", "dog"))
            file = folder / "train" / "a cat" / "a.png"
            size = file.stat().st_size
            file.write_bytes(picture(200))
            assert file.stat().st_size == size  # only the time tells
            os.utime(file, (1, 1))
            assert 200 in greys(stores(open_(url))[0])
            assert "404" in refused(f"{url}/nothing")
            said = refused(url.replace("127", "me:secret@127"))
            assert "would be kept in files" in said
            assert "secret" not in said
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_web_server_with_a_certificate_and_a_header_of_its_own_is_read(tmp_path: Path) -> None:
    """As a user has it: processes that are told of both in their environment."""
    library("fsspec")
    library("aiohttp")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    folder = tmp_path / "served"
    (folder / "b").mkdir(parents=True)
    fine = {f"{c}/{i}.png": picture(i) for c in "ab" for i in range(2)}
    (folder / "b" / "pets.zip").write_bytes(packed("zip", fine))

    class Guarded(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def send_head(self) -> Any:
            if self.headers.get("Authorization") == "Bearer x1y2":
                return super().send_head()
            self.send_error(403)
            return None

    opened = (
        "import json, os, sys\nfrom batchwright.errors import BatchwrightError\n"
        "from batchwright.records import Job\n"
        "from batchwright.workload.data.sources import open_data\n"
        "assert not {'aiohttp', 'fsspec'} & set(sys.modules)  # they read it as they are imported\n"
        "for more in map(json.loads, sys.argv[2:]):\n"
        "    if os.fork():\n"
        "        os.wait()\n"
        "        continue\n"
        "    os.environ.update(more)\n"
        "    try: print(open_data(Job(data=sys.argv[1], val=0.5)).facts.train_samples)\n"
        "    except BatchwrightError as error: print(error)\n"
        "    break\n"
    )
    header = {"FSSPEC_HTTPS": json.dumps({"headers": {"Authorization": "Bearer x1y2"}})}
    trusted = {"SSL_CERT_FILE": str(certificate)}
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=str(folder))) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # who hangs up
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"https://localhost:{server.server_port}/b/pets.zip"
            words = [sys.executable, "-c", opened, url]
            said = subprocess.run(
                [*words, *map(json.dumps, (header, trusted, header | trusted))],
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            ).stdout.splitlines()
        finally:
            server.shutdown()
            thread.join()
    assert len(said) == 3
    assert "CERTIFICATE_VERIFY_FAILED" in said[0]
    assert "403" in said[1]
    assert said[2] == "2"


@pytest.mark.slow
def test_data_on_s3_are_fetched_with_credentials_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played_s3(monkeypatch) as client:
        client.create_bucket(Bucket="pets")
        folder = class_folders(tmp_path / "pets")
        for path in sorted(folder.rglob("*.png")):
            client.upload_file(str(path), "pets", f"small/{path.relative_to(folder)}")
        assert greys(stores(open_("s3://pets/small"))[0]) == [3, 4]
        client.put_object(Bucket="pets", Key="small/train/cat/b.png", Body=picture(9))
        assert open_("s3://pets/small").facts.train_samples == 3
        shards(tmp_path / "birds")
        for path in sorted((tmp_path / "birds").rglob("*.tar")):
            client.upload_file(str(path), "pets", f"birds/{path.name}")
        found = open_("wds:s3://pets/birds/{train-{000..001},val-000}.tar")
        assert greys(stores(found)[0]) == [0, 1, 2, 3, 4, 5]
        assert "there is neither a file nor a folder" in refused("s3://pets/nothing")
        assert "cannot be reached" in refused("s3://no-such-bucket/x")


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "played"), [("gs", played_gs), ("az", played_az)])
def test_data_in_googles_and_azures_stores_are_fetched_and_fetched_again_when_they_change(
    scheme: str, played: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: Put
    with played(tmp_path, monkeypatch) as put:
        folder = class_folders(tmp_path / "pets")
        for path in sorted(folder.rglob("*.png")):
            put(f"small/{path.relative_to(folder)}", path.read_bytes())
        data = open_(f"{scheme}://pets/small")
        assert (greys(stores(data)[0]), data.facts.name) == ([3, 4], "small")
        put("small/train/cat/a.png", picture(9))  # as many bytes as before
        assert greys(stores(open_(f"{scheme}://pets/small"))[0]) == [9, 4]
        for path in sorted(shards(tmp_path / "birds").rglob("*.tar")):
            put(f"birds/{path.name}", path.read_bytes())
        found = open_(f"wds:{scheme}://pets/birds/{{train-{{000..001}},val-000}}.tar")
        assert greys(stores(found)[0]) == [0, 1, 2, 3, 4, 5]
        for missing in ("pets/nothing", "no-such-bucket/x"):
            assert f"nor a folder with files at {scheme}://{missing}" in refused(
                f"{scheme}://{missing}"
            )
        said = refused(f"{scheme}://pets/small/train/cat/a.png")
        assert f"{scheme}://pets/small/train/cat/a.png holds 0 class folders" in said


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("X-Amz-Credential=AKIA1234%2F2026&X-Amz-Signature=beef", "X-Amz-Credential"),
        ("sv=2022&sig=beef", "sig"),
        ("dl=1&access_token=beef", "access_token"),
        ("AWSAccessKeyId=beef&Expires=1", "AWSAccessKeyId"),
        ("%1b[2Jtoken=beef", r"\x1b[2Jtoken"),
        *(
            (f"{name}=beef", name)
            for name in ("pwd", "password", "jwt", "token", "X-Goog-Signature")
        ),
    ],
)
def test_signed_addresses_are_refused_since_run_folders_keep_them(query: str, name: str) -> None:
    for word in ("", "wds:", "imagefolder:"):
        said = refused(f"{word}https://127.0.0.1:9/birds/{{000..001}}.tar?{query}")
        assert f"an address with {name}= in it" in said
        assert "FSSPEC_HTTPS" in said
        assert not {"beef", "AKIA1234"} & set(re.findall(r"\w+", said))


@pytest.mark.parametrize("launch", ["local", "slurm", "ray"])
def test_secrets_in_addresses_are_refused_by_the_job_before_anything_is_written(
    launch: str,
) -> None:
    for address in ("s3://b/x?X-Amz-Signature=beef", "https://h/x?sig=beef", "https://u:beef@h/x"):
        with pytest.raises(JobError, match=r"would be kept in files|lets whoever reads") as caught:
            Job(data=f"wds:{address}", launch=launch)
        assert "beef" not in str(caught.value)


def test_names_of_files_are_no_secrets_and_the_longest_one_is_looked_through_at_once() -> None:
    for data in ("wds:s3://b/a#monkeys/x.tar", "wds:s3://b/?key.tar", "a" * 10**6, "a:" * 10**6):
        assert not data_sources.secret_in(data)
    assert "sig= in it" in data_sources.secret_in(f"wds:{'a' * 10**6}://b/x?sig=beef")


def test_words_of_a_query_that_open_nothing_are_no_secret() -> None:
    assert not any(map(data_sources._SECRET.search, ("author", "keywords", "design", "dl")))


@pytest.mark.parametrize("url", ["file:///etc", "s3:etc", "ftp://x/y", "s3://x::file:///etc"])
def test_places_elsewhere_are_of_the_stores_that_are_named(url: str) -> None:
    said = refused(f"imagefolder:{url}" if "://" in url and url[:2] != "s3" else url)
    assert "places elsewhere begin with s3://, gs://, az://, https://, http://" in said


def test_a_server_that_does_not_answer_is_told_from_a_file_that_is_not_there() -> None:
    library("fsspec")
    library("aiohttp")
    assert "cannot be reached" in refused("http://127.0.0.1:9/pets")
    assert "Port out of range" in refused("http://127.0.0.1:99999/pets")


def test_a_fetch_that_is_interrupted_leaves_nothing_half_made(
    tmp_path: Path, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(elsewhere, class_folders(tmp_path / "pets"), "/bucket/pets")
    fetched: list[str] = []
    usual = type(elsewhere).get_file

    def stop(self: Any, path: str, target: str, **keys: Any) -> None:
        fetched.append(path)
        if len(fetched) == 2:
            raise KeyboardInterrupt
        usual(self, path, target, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(type(elsewhere), "get_file", stop)
        with pytest.raises(KeyboardInterrupt):
            open_("memory://bucket/pets")
    assert not [p for p in (tmp_path / "cache" / "fetched").iterdir() if p.suffix != ".lock"]
    assert open_("memory://bucket/pets").facts.train_samples == 2


def test_a_store_whose_package_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    library("fsspec")
    for scheme, package, extra in (("s3", "s3fs", "s3"), ("gs", "gcsfs", "gs")):
        monkeypatch.setitem(sys.modules, package, None)
        assert f'{package} is missing: pip install "batchwright[{extra}]"' in refused(
            f"{scheme}://bucket/pets"
        )


def test_sixteen_bits_and_transparency_are_read_as_in_folders() -> None:
    from batchwright.workload.data.decoding import decode, encoded

    deep = Image.fromarray(np.full((8, 8), 257 * 5, np.uint16))
    assert decode(encoded(deep), top_resolution=8)[0, 0].tolist() == [5] * 3
    clear = Image.new("RGBA", (8, 8), (9, 9, 9, 0))
    assert decode(encoded(clear), top_resolution=8)[0, 0].tolist() == [255] * 3
    for mode, entry in (("P", 0), ("L", 9), ("RGB", (9, 9, 9))):
        clear = Image.new(mode, (8, 8), entry)
        if mode == "P":
            clear.putpalette([9, 9, 9])
        clear.info["transparency"] = entry
        assert decode(encoded(clear), top_resolution=8)[0, 0].tolist() == [255] * 3
    assert torch.equal(*(torch.tensor(bytearray(encoded(Image.new("RGB", (2, 2))))) for _ in "ab"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for _, line in shown_for("test_library_data")])
def test_the_commands_of_the_page_run(command: str, tmp_path: Path, forks: None) -> None:
    """With PATH made here; each with what it needs, or skipped."""
    for name in re.findall(r"=(\w+):", command):
        if (needed := {"hf": "datasets"}.get(name, name)) in EXTRAS:
            library(needed)
    place, labels = tmp_path / "PATH", ["0", "1"] * 4
    for number in range(8):
        for part in ("birds/train", "birds/val", "train/part", "held-out/part"):
            first = 100 * number + 50 * part.startswith(("held", "birds/val"))
            tar(place / f"{part}-{number:03}.tar", samples(first, labels))
    if "hf:" in command:
        both = {"train": hugging(60), "test": hugging(20, start=100)}
        library("datasets").DatasetDict(both).save_to_disk(str(place / "pets"))
    if "lmdb:" in command:
        keys = {f"{name}/{i}": picture(i) for name in ("cat", "dog") for i in range(40)}
        write(place / "pets", keys)
    # `briefly` asks for float32: PyTorch's bfloat16 on CPUs may end in gradients that are not
    # numbers where images come down to a pixel, as these small ones do in some networks.
    entered(quickly(briefly(command)), tmp_path, tmp_path)
    assert len([*tmp_path.glob("runs/*/summary.json")]) == 1
