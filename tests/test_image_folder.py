import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchwright.errors import DataError, FileError
from batchwright.records import Job
from batchwright.records.run_folder import new_run_folder
from batchwright.storage.locks import writing
from batchwright.workflows.prepare_job import warn_of_doubts
from batchwright.workload.data.image_folder import images_below, list_images
from batchwright.workload.data.listing import ImageFile, hold_out, natural_side
from batchwright.workload.data.sources import ImageData, open_data
from samples import png_that_claims
from test_sources import stores

pytestmark = pytest.mark.usefixtures("own_cache")
GREY = {"cat": 40, "dog": 200}


def draw(path: Path, size: tuple[int, int] = (16, 16), grey: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, GREY[path.parent.name] if grey is None else grey).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "images"
    for part, first, last in (("train", 0, 3), ("val", 10, 12)):
        for name, grey in GREY.items():
            for number in range(first, last):
                draw(made / part / name / f"{number - first}.png", grey=grey + number)
    return made


def open_folder(root: Path, **keys: Any) -> ImageData:
    return open_data(Job(data=f"imagefolder:{root}", **keys))


def names(root: Path, part: str, **keys: Any) -> list[str]:
    return [file.name for file in list_images(root, Job(**keys)).files[part]]  # type: ignore[index]


def test_images_come_in_order_of_name_with_their_class(root: Path) -> None:
    data = open_folder(root)
    train, val = stores(data)
    assert data.facts.classes == ("cat", "dog")
    assert (data.facts.train_samples, data.facts.val_samples) == (6, 4)
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert val.labels.tolist() == [0, 0, 1, 1]
    assert [int(train.image(i)[0, 0, 0]) for i in (0, 5)] == [40, 202]
    assert data.facts.split == "the folder val/"
    assert data.facts.side == 16


def test_the_share_of_the_commonest_class_is_counted_held_out(root: Path) -> None:
    assert open_folder(root).facts.largest_class == 0.5
    for index in range(7, 11):
        draw(root / "val" / "dog" / f"{index}.png")
    facts = open_folder(root).facts
    assert facts.largest_class == facts.guessing == 6 / 8


def test_test_stands_in_for_val(root: Path) -> None:
    (root / "val").rename(root / "test")
    assert open_folder(root).facts.split == "the folder test/"


@pytest.mark.parametrize(
    ("train", "held_out"), [("train", "valid"), ("Train", "Test"), ("training", "validation")]
)
def test_parts_may_have_the_names_that_people_give_them(
    root: Path, train: str, held_out: str
) -> None:
    (root / "val").rename(root / held_out)
    (root / "train").rename(root / train)
    found = open_folder(root).facts
    assert (found.split, found.classes) == (f"the folder {held_out}/", ("cat", "dog"))
    assert (found.train_samples, found.val_samples) == (6, 4)


@pytest.mark.parametrize("name", ["valid", "Training", "Train"])
def test_a_class_may_be_called_as_a_part_is(root: Path, name: str) -> None:
    (root / "train" / "dog").rename(root / "train" / name)
    assert set(open_folder(root / "train", val=0.4).facts.classes) == {"cat", name}


def test_a_class_called_train_is_asked_for_another_name(root: Path) -> None:
    (root / "train" / "dog").rename(root / "train" / "train")
    said = r"train/train holds 0 class folder.*; if train/ is itself a class, call its folder some"
    with pytest.raises(DataError, match=said):
        open_folder(root / "train", val=0.4)


def test_two_parts_without_the_one_for_training_are_no_classes(root: Path) -> None:
    (root / "train").rename(root / "test")
    (root / "val").rename(root / "valid")
    with pytest.raises(DataError, match="has test/ but no train/ beside it"):
        open_folder(root, val=0.5)


def test_mixed_sizes_keep_their_aspect(root: Path) -> None:
    draw(root / "train" / "cat" / "wide.png", (64, 32))
    train, _ = stores(open_folder(root))
    assert train.shape is None
    assert train.image(3).shape == (18, 36, 3)  # shorter side 1.15 x 16


def test_the_top_resolution_of_the_job_decides_the_stored_size(root: Path) -> None:
    train, _ = stores(open_folder(root, resolutions=(4, 8)))
    assert train.shape == (9, 9)


def test_a_share_of_each_class_is_held_out_where_there_is_no_val(root: Path) -> None:
    for folder in (root, root / "train"):  # train/ alone, or the class folders themselves
        if (root / "val").exists():
            (root / "val").rename(root.parent / "other")
        data = open_folder(folder, val=0.34)
        assert stores(data)[1].labels.tolist() == [0, 1]
        assert data.facts.split == "0.34 of each class, drawn by their names"


def test_test_images_without_labels_are_left_out_in_a_line(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw(root / "test" / "1.png", grey=7)
    said = f"{root / 'test'} is left out: its images have no labels"
    assert open_folder(root).facts.split == "the folder val/"
    assert caplog.messages == [said]
    (root / "val").rename(root.parent / "other")
    with pytest.raises(DataError, match=r"test has no class folders.* with val=0\.1, or put"):
        open_folder(root)
    caplog.clear()
    data = open_folder(root, val=0.34)
    assert data.facts.split == "0.34 of each class, drawn by their names"
    assert (data.facts.train_samples, data.facts.val_samples) == (4, 2)
    assert caplog.messages == [said]


def test_the_held_out_images_are_the_same_with_every_seed(root: Path) -> None:
    train = root / "train"
    for index in range(3, 40):
        draw(train / "cat" / f"{index}.png")
    first = names(train, "val", val=0.2, seed=1)
    assert first == names(train, "val", val=0.2, seed=2)
    facts = [open_folder(train, val=0.2, seed=seed).facts for seed in (0, 1)]
    assert facts[0] == facts[1]  # so a sweep over seeds is of one task, and a plan of any seed
    assert facts[0].digest != open_folder(train, val=0.3).facts.digest
    everything = names(train, "train", val=0.2, seed=1) + first
    assert sorted(everything) == sorted(set(everything))
    assert sum(name.startswith("cat/") for name in first) == 8


def test_at_least_one_image_of_a_class_goes_to_each_side() -> None:
    files = [ImageFile(f"{label}/{i}", label, 1, 1) for label in (0, 1) for i in range(2)]
    for share in (0.01, 0.99):
        parts = hold_out(files, ("a", "b"), share)
        assert [file.label for file in parts["val"]] == [0, 1]
        assert [file.label for file in parts["train"]] == [0, 1]


def test_many_classes_are_split_in_one_pass() -> None:
    class Files(list[ImageFile]):
        passes = 0

        def __iter__(self) -> Iterator[ImageFile]:
            self.passes += 1
            return super().__iter__()

    files = Files(ImageFile(f"{i % 9}/{i}", i % 9, 1, 1) for i in range(90))
    parts = hold_out(files, tuple("abcdefghi"), 0.3)
    assert Counter(file.label for file in parts["val"]) == dict.fromkeys(range(9), 3)
    assert files.passes == 1


def test_hidden_files_and_files_that_are_no_images_are_left_out(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw(root / "train" / "cat" / "deep" / "4.png", grey=0)
    draw(root / "train" / "cat" / ".5.png", grey=0)
    draw(root / "train" / ".git" / "6.png", grey=0)
    draw(root / "train" / "__MACOSX" / "cat" / "._0.png", grey=0)
    for name in ("notes.txt", "a.heic", "b.HEIC", "c"):
        (root / "train" / "cat" / name).write_text("hello")
    found = names(root, "train")
    assert not [name for name in found if "__MACOSX" in name]
    cats = [name for name in found if "cat" in name]
    assert cats == [f"train/cat/{name}.png" for name in ("0", "1", "2", "deep/4")]
    open_folder(root)
    said = f"4 files of {root} left out, as images do not end so: 2 .heic, 1 without ending"
    assert said in caplog.text


@pytest.mark.parametrize("ending", ["jfif", "JPE"])
def test_jpegs_may_end_as_browsers_name_them(root: Path, ending: str) -> None:
    Image.new("L", (8, 8)).save(root / "train" / "cat" / f"0.{ending}", "JPEG")
    assert f"train/cat/0.{ending}" in names(root, "train")


def test_links_are_followed_inside_the_folder_only(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cats = root / "train" / "cat"
    draw(root.parent / "secret" / "7.png", grey=0)
    (cats / "in.png").symlink_to(cats / "0.png")
    (cats / "out.png").symlink_to(root.parent / "secret" / "7.png")
    (cats / "round").symlink_to(cats)
    (root / "train" / "fox").symlink_to(root.parent / "secret")
    data = open_folder(root)
    assert data.facts.train_samples == 7
    assert data.facts.classes == ("cat", "dog")
    assert f"2 links out of {root} not followed" in caplog.text


def test_a_link_to_nothing_is_an_image_that_cannot_be_read(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a clone by git-annex whose content has not been fetched."""
    cats = root / "train" / "cat"
    (cats / "out.png").symlink_to(root.parent / "gone" / "7.png")
    (cats / "gone.png").symlink_to(cats / "nothing.png")
    with pytest.raises(DataError, match=r"unreadable image .*gone\.png: No such file"):
        open_folder(root)
    data = open_folder(root, unreadable="skip")
    assert (data.facts.train_samples, data.facts.skipped) == (6, 1)
    assert f"1 link out of {root} not followed" in caplog.text
    assert images_below(cats)[0][-1] == "gone.png"


def test_a_link_to_itself_is_an_image_that_cannot_be_read(root: Path) -> None:
    """As a second `ln -s DIR cat` leaves it in the folder."""
    itself = root / "train" / "cat" / "cat"
    itself.symlink_to(itself)
    with pytest.raises(DataError, match=r"unreadable image .*train/cat/cat: "):
        open_folder(root)
    assert images_below(root / "train")[0].count("cat/cat") == 1


def test_a_class_folder_that_is_a_link_to_nothing_is_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was passed over, and so was its class. A link out of the folder is not followed anyway."""
    fox = root / "train" / "fox"
    fox.symlink_to(root / "train" / "gone")
    with pytest.raises(DataError, match=r"class folder .*/train/fox is a link that leads to noth"):
        open_folder(root)
    below, _ = images_below(root / "train")
    assert "fox" in below  # predict says that it cannot be read
    fox.unlink()
    fox.symlink_to(root.parent / "gone")
    assert open_folder(root).facts.classes == ("cat", "dog")
    assert f"1 link out of {root} not followed" in caplog.text


def test_a_link_out_of_the_folder_counts_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "val").rename(root / "test")
    (root / "test" / "fox").symlink_to(root.parent)
    assert open_folder(root).facts.classes == ("cat", "dog")
    assert caplog.messages == [f"1 link out of {root} not followed"]


@pytest.mark.parametrize("in_files", [False, True])
def test_held_out_images_that_are_trained_on_are_told(
    root: Path, in_files: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if in_files:
        monkeypatch.setattr("batchwright.workload.data.sources.fits_the_disk", lambda _: False)
    open_folder(root)
    assert not caplog.messages
    shutil.copy(root / "train" / "cat" / "0.png", root / "val" / "dog" / "7.png")
    (root / "val" / "cat" / "8.png").symlink_to(root / "train" / "cat" / "1.png")
    assert open_folder(root).facts.val_samples == 6
    (said,) = caplog.messages
    assert said.startswith(f"2 held-out images of {root} with the bytes of a training image: ")


def test_a_part_that_is_a_link_out_of_the_folder_is_refused(root: Path) -> None:
    (root / "val").rename(root.parent / "elsewhere")
    (root / "val").symlink_to(root.parent / "elsewhere")
    with pytest.raises(DataError, match="val is a link that leads out of"):
        open_folder(root)


def test_no_run_is_begun_among_the_images_that_it_trains_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = root / "train"
    monkeypatch.chdir(classes)
    job = Job(data="imagefolder:.", val=0.4)
    for wanted in (None, "cat/run", classes / "results" / "a"):
        with pytest.raises(FileError, match="name a folder elsewhere with --out"):
            new_run_folder(wanted, job).__enter__()
    assert {path.name for path in classes.iterdir()} == {"cat", "dog"}
    job = Job(data=f"imagefolder:{root}")
    with pytest.raises(FileError, match="lies among the images"):
        new_run_folder(None, job).__enter__()
    for wanted in (root / "runs" / "a", classes / ".runs" / "a", root.parent / "run"):
        with new_run_folder(wanted, job):
            pass


def test_figures_of_a_run_are_no_images_of_a_class(root: Path) -> None:
    with writing(root / "train" / "cat" / "run"):
        draw(root / "train" / "cat" / "run" / "figures" / "learning.png", grey=1)
    assert len(names(root, "train")) == 6


def test_a_held_out_part_that_is_the_one_for_training_is_refused(root: Path) -> None:
    shutil.rmtree(root / "val")
    (root / "val").symlink_to("train")
    with pytest.raises(DataError, match="train/ and val/ are the same folder"):
        open_folder(root)


def test_the_folder_itself_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert open_folder(link).facts == open_folder(root).facts


def test_an_unreadable_image_is_named_with_the_way_out(root: Path) -> None:
    path = root / "train" / "cat" / "1.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=f"unreadable image {path}: .*unreadable=skip$"):
        open_folder(root)


def test_an_unreadable_image_is_left_out_and_counted_if_asked(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "train" / "cat" / "1.png").write_bytes(b"no image")
    data = open_folder(root, unreadable="skip")
    assert (data.facts.skipped, data.facts.train_samples) == (1, 5)
    assert caplog.records[0].levelno == logging.WARNING
    assert "cat/1.png: not an image of a known format" in caplog.text
    with pytest.raises(DataError, match="unreadable image"):
        open_folder(root)  # what was skipped for one job is not skipped for another


def test_a_file_s_name_cannot_act_on_the_terminal(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "train" / "cat" / "a\x1b[2J\nb.png").write_bytes(b"no image")
    open_folder(root, unreadable="skip")
    (said,) = caplog.messages
    assert r"train/cat/a\x1b[2J\nb.png: not an image" in said


@pytest.mark.parametrize("sides", ["auto", (16,)])
@pytest.mark.parametrize("edge", [10_000, 20_000])  # Pillow warns of the one, refuses the other
@pytest.mark.parametrize("in_files", [False, True])
def test_an_image_beyond_pillows_limit_is_an_unreadable_one(
    root: Path,
    edge: int,
    sides: Any,
    in_files: bool,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    if in_files:
        monkeypatch.setattr("batchwright.workload.data.sources.fits_the_disk", lambda _: False)
    huge = root / "train" / "cat" / "0.png"
    huge.write_bytes(png_that_claims(edge, edge))
    said = f"unreadable image {huge}: .*pixels.*limit of 89,478,485; save it smaller; .*=skip$"
    with pytest.raises(DataError, match=said):
        open_folder(root, resolutions=sides)
    data = open_folder(root, resolutions=sides, unreadable="skip")
    assert (data.facts.skipped, data.facts.train_samples) == (1, 5)
    assert not recwarn.list


def test_a_class_of_which_nothing_can_be_read_is_named(root: Path) -> None:
    for path in (root / "val" / "dog").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no val image of class dog can be read"):
        open_folder(root, unreadable="skip")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_image_without_permission_is_unreadable(root: Path) -> None:
    (root / "train" / "cat" / "1.png").chmod(0)
    with pytest.raises(DataError, match=r"1\.png: Permission denied"):
        open_folder(root)


def test_classes_that_differ_between_the_parts_are_named(root: Path) -> None:
    (root / "val" / "dog").rename(root / "val" / "dingo")
    with pytest.raises(DataError, match=r"differ: only in train/: dog; only in val/: dingo"):
        open_folder(root)


def test_a_folder_that_is_laid_out_otherwise_is_refused_in_words(root: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_folder(root / "nowhere")
    with pytest.raises(DataError, match="is not a folder"):
        open_folder(root / "val" / "cat" / "0.png")
    with pytest.raises(DataError, match=r"no val/ or test/: .* with val=0\.1"):
        open_folder(root / "train")
    with pytest.raises(DataError, match=r"cat holds 0 class folders"):
        open_folder(root / "train" / "cat", val=0.1)
    (root / "train" / "fox").mkdir()
    (root / "val" / "fox").mkdir()
    with pytest.raises(
        DataError, match=r"train/fox holds no image: put .*\.png.* or remove the folder"
    ):
        open_folder(root)
    draw(root / "train" / "fox" / "1.png", grey=0)
    with pytest.raises(
        DataError, match="class fox has a single image, so none can be held out: add"
    ):
        open_folder(root / "train", val=0.1)
    (root / "train").rename(root / "first")
    with pytest.raises(DataError, match="has val/ but no train/"):
        open_folder(root)


def test_a_folder_around_the_one_that_is_meant_is_refused_with_its_name(root: Path) -> None:
    around = root.parent / "archive"
    around.mkdir()
    root.rename(around / "flowers")
    said = f"archive holds 1 class folder.* did you mean {around}/flowers, which holds several"
    with pytest.raises(DataError, match=said):
        open_folder(around, val=0.1)
    with pytest.raises(DataError, match=r"holds 0 class folder.* named for it$"):
        open_folder(around / "flowers" / "train" / "cat", val=0.1)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_cannot_be_looked_at_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    dog = root / "train" / "dog"
    look = os.scandir

    def refuse(path: str | Path) -> Any:
        if what == "folder" and Path(path) == dog:
            raise PermissionError(13, "Permission denied", str(path))
        found = list(look(path))
        if what == "file" and Path(path) == dog:
            (dog / "0.png").unlink()
        return found

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"^{dog}.* cannot be read \\("):
        open_folder(root)


def test_a_changed_image_makes_another_store(root: Path) -> None:
    before = open_folder(root)
    path = root / "train" / "cat" / "0.png"
    draw(path, grey=99)
    os.utime(path, ns=(1, 1))
    after = open_folder(root)
    assert int(stores(after)[0].image(0)[0, 0, 0]) == 99
    assert after.facts.digest != before.facts.digest


def test_the_digest_depends_on_names_classes_and_content_alone(root: Path) -> None:
    digest = open_folder(root).facts.digest
    copy = root.parent / "copy"
    root.rename(copy)
    for path in copy.rglob("*.png"):
        os.utime(path, ns=(5, 5))
    assert open_folder(copy).facts.digest == digest
    assert open_folder(copy, resolutions=(8,)).facts.digest == digest
    (copy / "val" / "cat" / "0.png").rename(copy / "val" / "dog" / "9.png")
    assert open_folder(copy).facts.digest != digest


@pytest.mark.parametrize(("side", "natural"), [(5, 8), (47, 40), (160, 160), (500, 160)])
def test_the_natural_side_follows_the_median_image(root: Path, side: int, natural: int) -> None:
    for path in root.rglob("*.png"):
        draw(path, (side, 2 * side))
    draw(root / "train" / "cat" / "large.png", (900, 900))
    (root / "train" / "cat" / "bad.png").write_bytes(b"")
    assert natural_side(list_images(root, Job())) == natural


def test_progress_counts_every_image(root: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    open_data(Job(data=f"imagefolder:{root}"), progress=lambda *call: calls.append(call))
    assert calls == [(done, 10, "decoding images") for done in range(1, 11)]


def test_data_are_called_by_the_folder_s_name_wherever_they_were_decoded(root: Path) -> None:
    assert open_folder(root).facts.name == "images"
    assert open_folder(root / "train" / "..").facts.name == "images"  # out of the cache, too


def test_a_held_out_share_is_told_to_do_nothing_beside_a_split_of_one_s_own(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(data=f"imagefolder:{root}", val=0.5)
    warn_of_doubts(job, open_data(job).facts)
    said = "warning: val=0.5 does nothing: images has held-out images of its own (the folder val/)"
    assert capsys.readouterr().err == f"{said}\n"
    shutil.rmtree(root / "val")
    warn_of_doubts(job, open_data(job).facts)
    assert capsys.readouterr().err == ""
