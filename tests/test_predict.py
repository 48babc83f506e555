"""`predict`, and `names` of a delivered network: images are prepared as held-out ones were."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

import batchwright as bw
from batchwright.errors import ArgumentError, DataError, PlanError
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job
from batchwright.records.documents import write_record
from batchwright.workflows.delivery.class_counts import Predicted
from batchwright.workflows.delivery.model_card import model_card
from batchwright.workflows.delivery.predict import (
    HEAD,
    _Batch,
    _computed,
    _held_out_otherwise,
    _labelled,
    _may_be_trained_on,
    _rows,
    _writer,
    predict,
)
from batchwright.workload.data import image_files
from batchwright.workload.data.sources import open_data
from batchwright.workload.model_files import TrainedModel, built_model
from samples import make_network

SIDE = 16
CLASSES = ("blue", "green", "red")
SIZES = ((16, 16), (40, 25), (23, 61), (18, 17), (90, 64))


def photograph(number: int, label: int) -> Image.Image:
    """Noise with a colour in the middle, of which the edges have another."""
    generator = np.random.default_rng([number, label])
    width, height = SIZES[number % len(SIZES)]
    pixels = generator.integers(0, 256, (height, width, 3))
    short = min(width, height)
    top, left = (height - short) // 2, (width - short) // 2
    other = generator.integers(0, 3)
    pixels[..., other] += 40
    pixels[top : top + short, left : left + short, other] -= 40
    pixels[top : top + short, left : left + short, 2 - label] += generator.integers(0, 25)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "images"
    for part, numbers in (("train", range(30)), ("val", range(100, 125))):
        for label, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True)
            for number in numbers:
                exif = Image.Exif()
                exif[0x0112] = (1, 6, 3)[number % 3]
                path = root / part / name / f"{number}.{'jpg' if number % 2 else 'png'}"
                photograph(number, label).save(path, exif=exif)
    return root


def trained(folder: Path, data: str, side: int = SIDE, **keys) -> bw.RunSummary:
    job = Job(
        data=data, launch="in-process", workers=1, epochs=3, resolutions=(side,), global_batch=16,
        precision="float32", network="kept_network:network", **keys,
    )  # fmt: skip
    plan = plan_without_profile(job, open_data(job).facts, make_network(name=job.network))
    named = {key: getattr(job, key) for key in job.code_keys}
    return bw.train(plan, run_folder=folder, **named)


NAMED = ["network=kept_network:network"]


@pytest.fixture(scope="module")
def run(images, tmp_path_factory) -> bw.RunSummary:
    return trained(tmp_path_factory.mktemp("runs") / "run", f"imagefolder:{images}")


@pytest.fixture(scope="module")
def model(run, tmp_path_factory) -> Path:
    pytest.importorskip("safetensors", reason="pip install 'batchwright[delivery]'")
    folder = tmp_path_factory.mktemp("delivered") / "model"
    bw.deliver(run.run_folder, folder)
    return folder


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def classified(place, *images, out: Path, overrides=(), **how):
    """The counts, the rows by path, and what was said of bad files."""
    said: list[str] = []
    words = [*overrides, *NAMED]
    found = predict(place, [*map(str, images)], words, out=out, tell=said.append, **how)
    return found, table(out.read_text()), said


def test_images_of_a_home_folder_are_known_as_those_of_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _may_be_trained_on(str(tmp_path / "photos" / "train"), "imagefolder:~/photos")
    assert not _may_be_trained_on(str(tmp_path / "photos" / "val"), "imagefolder:~/photos")
    assert not _may_be_trained_on(str(tmp_path / "others"), "imagefolder:~nobody-here/photos")
    assert not _may_be_trained_on("~nobody-here.png", f"imagefolder:{tmp_path}")  # a file's name


def test_a_part_that_was_not_trained_on_is_not_said_to_have_been(images):
    whole = Job(data=f"imagefolder:{images}", resolutions=(SIDE,))
    part = Job(data=f"imagefolder:{images}/train", val=0.2, resolutions=(SIDE,))
    more = part.model_copy(update={"val": 0.4})
    for job, training, expected in (
        (part, whole, True),
        (more, part, True),
        (part, part, False),
        (whole, part, False),  # val/ lies beside the folder whose images were split
    ):
        plan = SimpleNamespace(job=training, data=open_data(training).facts)
        assert _held_out_otherwise(job, open_data(job), plan) is expected


@pytest.mark.slow
def test_a_folder_a_run_and_a_delivered_network_give_what_the_run_reported(
    images, run, model, tmp_path, monkeypatch
):
    best, last = run.best_epoch, run.epochs[-1]
    assert 0 < best.val_correct < best.val_count == 75
    own, rows, _ = classified(run.run_folder, out=tmp_path / "own.csv")
    assert (own.correct, own.images, own.labelled) == (best.val_correct, 75, 75)
    found, again, _ = classified(run.run_folder, images / "val", out=tmp_path / "folder.csv")
    assert (found, again) == (own, rows)
    assert {row["path"] for row in rows} == {str(one) for one in (images / "val").glob("*/*")}
    assert all(Path(row["path"]).parent.name == row["label"] for row in rows)
    assert sum(row["class"] == row["label"] for row in rows) == own.correct
    assert all(row["second"] in {*CLASSES} - {row["class"]} for row in rows)
    for seen in (images, images / "train", images.parent, images / "train" / "red" / "0.png"):
        _, _, (said,) = classified(run.run_folder, seen, out=tmp_path / "seen.csv")
        assert said.startswith(f"note: most images of data={run.plan.job.data} were trained on")
    _, _, said = classified(run.run_folder, images / "val", out=tmp_path / "new.csv")
    assert said == []
    final, _, _ = classified(run.run_folder, checkpoint="last", out=tmp_path / "last.csv")
    assert final.correct == last.val_correct

    # Without the run, from files in one word each, and from Python.
    found, again, _ = classified(model, images / "val", out=tmp_path / "delivered.csv")
    assert (found, again) == (own, rows)
    one = images / "val" / "red"
    files, some, _ = classified(model, *sorted(one.iterdir()), out=tmp_path / "files.csv")
    assert some == [row for row in rows if row["label"] == "red"]
    assert files.correct == sum(row["class"] == "red" for row in some)
    loaded = bw.load_model(model, NAMED[0].partition("=")[2])
    paths = [row["path"] for row in rows]
    assert loaded.names(paths) == [row["class"] for row in rows]
    shares = loaded.probabilities([Path(path) for path in paths])
    assert [f"{share:.4f}" for share in shares.amax(dim=1).tolist()] == [
        row["probability"] for row in rows
    ]
    pngs = [row for row in rows if row["path"].endswith(".png")]
    assert loaded.names([Image.open(row["path"]) for row in pngs]) == [row["class"] for row in pngs]
    assert loaded.names([]) == []

    # Other data by a spec, and data that stay in their files.
    spec = [f"data=imagefolder:{images}"]
    found, again, _ = classified(model, overrides=spec, out=tmp_path / "spec.csv")
    assert (found, again) == (own, rows)
    monkeypatch.setattr(image_files, "free_bytes", lambda: 0)
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    found, again, _ = classified(model, overrides=[*spec, "loaders=0"], out=tmp_path / "kept.csv")
    assert [row["path"] for row in again] == paths
    assert abs(found.correct - own.correct) <= 3  # which are decoded at a smaller scale

    # Theirs is not the mean of the training's images, which is the one that counts.
    for part in ("train", "val"):
        for name in CLASSES:
            (tmp_path / "dark" / part / name).mkdir(parents=True)
            dark = photograph(0, CLASSES.index(name)).point(lambda level: level // 3)
            dark.save(tmp_path / "dark" / part / name / "0.png")
    spec = [f"data=imagefolder:{tmp_path / 'dark'}", "loaders=0"]
    _, rows, _ = classified(model, tmp_path / "dark" / "val", out=tmp_path / "dark.csv")
    _, again, _ = classified(model, overrides=spec, out=tmp_path / "in-files.csv")
    assert again == rows
    monkeypatch.undo()
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    _, again, _ = classified(model, overrides=spec, out=tmp_path / "stored.csv")
    assert again == rows


@pytest.mark.slow
def test_held_out_images_that_were_trained_on_are_told(images, run, tmp_path):
    train = f"data=imagefolder:{images}/train"
    for words, told in (([train, "val=0.2"], 1), ([f"data=imagefolder:{images}/."], 0)):
        _, _, said = classified(run.run_folder, overrides=words, out=tmp_path / "table.csv")
        assert len(said) == told
        assert all("may have been trained on" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("side", [8, 12])  # to which all 8 pixels are enlarged
def test_handwritten_digits_as_files_are_classified_as_the_run_did(side, tmp_path):
    weights = (0.485, 0.456, 0.406, 0.229, 0.224, 0.225)  # whose normalization is another
    run = trained(tmp_path / "run", "digits", side, normalize=weights)
    own, rows, _ = classified(run.run_folder, out=tmp_path / "own.csv")
    assert own.correct == run.best_epoch.val_correct < own.labelled == 360
    assert own.correct < own.in_top <= 360
    held = open_data(run.plan.job).val
    for index, label in enumerate(held.labels.tolist()):
        folder = tmp_path / "digits" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(held.image(index).numpy()).save(folder / f"{index:03}.png")
    found, again, _ = classified(run.run_folder, tmp_path / "digits", out=tmp_path / "files.csv")
    assert found == own
    by_number = {f"digits#{int(Path(row['path']).stem)}": row for row in again}
    assert {row["path"]: row for row in rows} == {
        path: row | {"path": path} for path, row in by_number.items()
    }


@pytest.mark.slow
def test_what_a_command_shows(images, run, command, tmp_path):
    words = ("predict", run.run_folder, *NAMED)
    code, out, said = command(*words, "--out", tmp_path / "table.csv", "--json")
    assert code == 0
    best = run.best_epoch
    told = json.loads(out)
    assert told["accuracy"] == best.val_correct / best.val_count
    assert told["top5_accuracy"] is None  # of three classes
    assert [one["class"] for one in told["classes"]] == [*CLASSES]
    assert sum(one["recall"] * one["images"] for one in told["classes"]) == best.val_correct
    assert f"75 images, accuracy {100 * best.top1:.1f} % ({best.val_correct} of 75)\n" in said
    assert "most often confused with" in said
    code, out, _ = command(*words, images / "val")
    assert (code, out) == (0, (tmp_path / "table.csv").read_text())

    # Images without labels, of which two cannot be read.
    (tmp_path / "new" / "deep").mkdir(parents=True)
    photograph(1, 0).save(tmp_path / "new" / "deep" / "a, b.png")
    (tmp_path / "new" / "bad.jpg").write_bytes(b"\xff\xd8 no image")
    (tmp_path / "new" / "empty.png").touch()
    (tmp_path / "new" / "notes.txt").touch()
    (tmp_path / "new" / "link.png").symlink_to(next((images / "val" / "red").glob("*.png")))
    (tmp_path / "new" / "red").symlink_to(images / "val" / "red")
    (tmp_path / "new" / "again").symlink_to(tmp_path / "new" / "deep")
    code, out, said = command(*words, tmp_path / "new")
    assert code == 2
    (row,) = table(out)
    assert (row["path"], row["label"]) == (str(tmp_path / "new" / "deep" / "a, b.png"), "")
    lines = said.splitlines()
    out_of = f"left out 2 links out of {tmp_path / 'new'}: name those files too"
    assert lines.pop(0) == out_of
    assert [line.partition(": ")[0] for line in lines[:2]] == [
        f"unreadable image {tmp_path / 'new' / name}" for name in ("bad.jpg", "empty.png")
    ]
    assert lines[2:] == [
        "1 image, none with a label",
        "error: 2 of 3 images cannot be read and are left out: they are named above; mend or "
        "remove them",
    ]


@pytest.mark.slow
def test_bad_words_are_refused_in_a_line(images, run, model, command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.png").symlink_to(next((images / "val" / "red").glob("*.png")))
    (tmp_path / "there.csv").touch()
    val = str(images / "val")
    for words, said in (
        ((run.run_folder, "nowhere.png"), "there is no image or folder nowhere.png: look at its"),
        ((run.run_folder, str(tmp_path / "empty")), "empty holds no image (.bmp, .gif,"),
        ((run.run_folder, val, "epochs=3"), "predict takes data, data_args, val,"),
        ((run.run_folder, val, "data=digits"), "images or data=..., not both: leave out data="),
        ((run.run_folder, val, "--json"), "so give the table a file with --out"),
        ((run.run_folder, val, "--checkpoint", "new"), 'give "best", "last", or "epoch-10"'),
        ((run.run_folder, val, "--out", str(tmp_path / "there.csv")), "overwrite it with --force"),
        ((run.run_folder, "data=digits"), "has none of the network's classes"),
        ((str(model),), "model holds a network and no images: name image files, folders, or data"),
        ((str(model), val, "--checkpoint", "last"), "leave --checkpoint out"),
        (
            (run.run_folder, str(tmp_path / "links")),
            "holds no image (.bmp, .gif, .jfif, .jpe, .jpeg",
        ),
        ((run.run_folder, str(tmp_path / "links")), "(links that lead out of the data folder are"),
        ((str(tmp_path / "empty"), val), "holds no summary.json"),
    ):
        code, out, err = command("predict", *words, *NAMED)
        assert (code, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1
    code, _, err = command("predict", run.run_folder, val)
    assert code == 2
    assert "repeat network=kept_network:network on the command line" in err
    assert not (tmp_path / "there.csv").read_text()


@pytest.mark.slow
def test_a_runs_own_images_must_be_those_of_its_training(run, tmp_path, images):
    plan = run.plan.model_copy(
        update={"data": run.plan.data.model_copy(update={"digest": "0" * 64})}
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(Path(run.run_folder).resolve() / "checkpoints")
    write_record(run.model_copy(update={"plan": plan}), tmp_path / "run" / "summary.json")
    with pytest.raises(PlanError, match="has changed since the training: 90 training and 75 held"):
        classified(tmp_path / "run", out=tmp_path / "table.csv")
    assert not (tmp_path / "table.csv").exists()
    found, _, _ = classified(tmp_path / "run", images / "val", out=tmp_path / "table.csv")
    assert found.correct == run.best_epoch.val_correct


@pytest.mark.slow
def test_accuracies_by_other_statistics_than_the_weights_have_are_told(run, tmp_path):
    cycle = run.plan.job.cycle.model_copy(update={"recalibrate": 2})
    plan = run.plan.model_copy(update={"job": run.plan.job.model_copy(update={"cycle": cycle})})
    plan = plan.model_copy(update={"network": plan.network.model_copy(update={"batch_norm": True})})
    other, folder = run.model_copy(update={"plan": plan}), tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").symlink_to(Path(run.run_folder).resolve() / "checkpoints")
    write_record(other, folder / "summary.json")
    _, _, said = classified(folder, out=tmp_path / "table.csv")
    assert [line[:42] for line in said] == ["note: the run evaluated with statistics of"]
    config = {"network_args": {}, "side": SIDE, "mean": ()}
    for one, is_told in ((other, True), (run, False)):
        card = model_card(one, one.best_epoch, config, onnx=False)
        assert ("these weights have those of training" in card) is is_told


class Tones(torch.utils.data.Dataset):
    """Images of one's own, prepared by one's own code."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((3, SIDE, SIDE), index % 2 - 0.5), index % 2


def tones():
    return Tones(), Tones(), ("dark", "light")


def new_tones():
    return Tones(), Subset(Tones(), range(4)), ("dark", "light")


def namesakes():
    return Tones(), Tones(), ("crane", "crane")


@pytest.mark.slow
def test_images_of_a_function_are_classified_and_files_are_not_guessed_at(images, model, tmp_path):
    data = f"{__name__}:tones"
    run = trained(tmp_path / "run", data)
    words = [f"data={data}", "loaders=0"]
    found, rows, _ = classified(run.run_folder, overrides=words, out=tmp_path / "own.csv")
    assert (found.correct, found.images) == (run.best_epoch.val_correct, 24)
    assert [row["path"] for row in rows[:2]] == [f"{data}#0", f"{data}#1"]
    with pytest.raises(PlanError, match=f"repeat data={data} on the command line"):
        classified(run.run_folder, out=tmp_path / "no.csv")
    with pytest.raises(ArgumentError, match=r"predict takes data=package\.module:function"):
        classified(run.run_folder, images / "val", out=tmp_path / "no.csv")
    words = [f"data={__name__}:new_tones", "loaders=0"]
    found, rows, _ = classified(run.run_folder, overrides=words, out=tmp_path / "new.csv")
    assert found.images == 4
    assert rows[0]["path"] == f"{__name__}:new_tones#0"
    words = [f"data={data}", "loaders=0"]
    with pytest.raises(DataError, match="has none of the network's classes"):
        classified(model, overrides=words, out=tmp_path / "no.csv")
    assert not (tmp_path / "no.csv").exists()


@pytest.mark.slow
def test_classes_of_one_name_are_told_apart_by_their_numbers(tmp_path):
    data = f"{__name__}:namesakes"
    run = trained(tmp_path / "run", data)
    words = [f"data={data}", "loaders=0"]
    found, _, _ = classified(run.run_folder, overrides=words, out=tmp_path / "own.csv")
    assert (found.correct, found.images) == (run.best_epoch.val_correct, 24)


def test_images_in_a_folder_called_as_several_classes_have_no_label(tmp_path):
    """Of two classes called crane, an image of either counted as one of the second."""
    network = TrainedModel(torch.nn.Identity(), ("crane", "dog", "crane"), 8)
    for name in ("crane", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "0.png")
    said: list[str] = []
    found = _labelled([str(tmp_path)], network.class_numbers, said.append)
    assert [label for _, label in found] == [-1, 1]
    (note,) = said
    assert "several classes are called crane" in note


@pytest.mark.slow
def test_names_of_held_out_files_that_are_no_text_are_shown_escaped(model, tmp_path):
    for part in ("train", "val"):
        for label, name in enumerate(CLASSES):
            (tmp_path / part / name).mkdir(parents=True)
            photograph(label, label).save(tmp_path / part / name / os.fsdecode(b"\xff,\n.png"))
    spec = [f"data=imagefolder:{tmp_path}"]
    _, rows, _ = classified(model, overrides=spec, out=tmp_path / "own.csv")
    assert rows[0]["path"] == f"{tmp_path}/val/{sorted(CLASSES)[0]}/\\udcff,\n.png"


class Gone:
    """The held-out images of a function whose file is not there any more."""

    closed = False

    def __len__(self):
        return 1

    def evaluation(self, indices, group):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a.png")

    def close(self):
        self.closed = True


def test_an_image_that_cannot_be_read_is_not_called_a_table_that_cannot_be_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("batchwright.workflows.delivery.predict._names", lambda *_: ["a"])
    data = SimpleNamespace(facts=SimpleNamespace(classes=("a",)))
    model = SimpleNamespace(class_numbers={"a": 0}, classes=("a",), side=8)
    feed, out = Gone(), tmp_path / "table.csv"
    said = r"^data=mine:images: an image cannot be read \(.*No such file or directory: 'a\.png'\)$"
    with pytest.raises(DataError, match=said), _writer(out):
        list(_computed(model, Job(data="mine:images"), data, feed))
    assert feed.closed
    assert not out.exists()


class Broken(Image.Image):
    """An opened image whose pixels cannot be decoded."""

    def load(self):
        raise struct.error("unpack requires a buffer of 4 bytes")


@pytest.mark.slow
def test_names_says_what_it_takes(images, model, tmp_path):
    loaded = bw.load_model(model, NAMED[0].partition("=")[2])
    path = str(images / "val" / "red" / "100.png")
    for wrong in (path, Path(path), Image.open(path)):
        with pytest.raises(ArgumentError, match=r"a list of paths .*: write \[image\]"):
            loaded.names(wrong)
    for wrong, said in ((3, "the int 3"), (np.zeros(3), "a ndarray"), (iter([path]), "a list_it")):
        with pytest.raises(ArgumentError, match=rf"a list of paths .*, not {said}\w*$"):
            loaded.names(wrong)
    with pytest.raises(ArgumentError, match="an image is a path or an image of Pillow, not"):
        loaded.names([3])
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"unreadable image .*bad\.png: not an image of a known"):
        loaded.names([path, tmp_path / "bad.png"])
    with pytest.raises(DataError, match=r"unreadable image nowhere\.png: No such file"):
        loaded.names(["nowhere.png"])

    # An opened image as its file: damaged EXIF data are no reason to refuse good pixels.
    exif = b"Exif\0\0II*\0"  # which ends within its header
    photograph(1, 2).save(tmp_path / "exif.jpg", exif=exif, quality=100)
    same = Image.new("RGB", (9, 12))
    same.info["exif"] = exif
    assert loaded.names([same, tmp_path / "exif.jpg"])[0] in CLASSES
    with pytest.raises(DataError, match=r"unreadable image of Pillow: "):
        loaded.names([Broken()])
    with pytest.raises(PlanError, match=r"the trained network is resnet8; leave network= out$"):
        built_model(tmp_path, {"network": "resnet8", "classes": "ab"}, dict, "vgg8")


class Named:
    """A network's classes."""

    classes = tuple("abcdefg")

    def class_name(self, label):
        return self.classes[label]


def test_images_are_counted_by_class():
    logits = torch.tensor(
        [
            [9.0, 8, 7, 6, 5, 4, 3],  # a is found
            [8, 9, 7, 6, 5, 4, 3],  # b, where a is second
            [8, 9, 7, 6, 5, 4, 3],  # b, and the label f is the sixth
            [8, 7, 9, 6, 5, 4, 3],  # c, whose label is unknown
            [torch.nan, 1, 1, 1, 1, 1, 1],
        ]
    )
    counts = Predicted(Named.classes)
    rows = list(_rows(Named(), _Batch("vwxyz", [0, 0, 5, -1, 0], logits), counts))
    assert [len(row) for row in rows] == [len(HEAD)] * 5
    assert [row[1] for row in rows] == ["a", "b", "b", "c", ""]
    assert [row[3:] for row in rows[:4]] == [("b", "a"), ("a", "a"), ("a", "f"), ("a", "")]
    assert rows[4][2] == "nan"
    assert (counts.images, counts.labelled, counts.correct, counts.in_top) == (5, 4, 1, 2)
    a, b, f = counts.by_class()
    assert (a.name, a.images, a.recall, a.precision) == ("a", 3, 1 / 3, 1.0)
    assert (a.confused_with, a.confusions) == ("b", 1)
    assert (b.images, b.recall, b.precision, b.confused_with) == (0, None, 0.0, "")
    assert (f.recall, f.precision, f.confused_with) == (0.0, None, "b")
    assert str(counts) == (
        "5 images, accuracy 25.0 % (1 of 4), top-5 50.0 % (2), 1 without a label"
    )
    assert counts.class_table()[1][1] == ["b", "0", "", "0.0 %", ""]


def test_of_equal_outputs_only_so_many_are_the_most_likely_ones():
    model = SimpleNamespace(class_name=str)
    counts = Predicted(tuple("abcdefgh"))
    list(_rows(model, _Batch("abcdefgh", [*range(8)], torch.zeros(8, 8)), counts))
    assert counts.in_top == 5
