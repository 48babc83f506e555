"""Folders too large to be decoded once: what is cut out of the files, and in which order."""

from __future__ import annotations

import gc
import io
import math
import multiprocessing
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from batchwright import Session
from batchwright.distributed.group import Group
from batchwright.errors import DataError
from batchwright.probing import commands
from batchwright.probing.bench import Bench
from batchwright.probing.executor import Executor
from batchwright.probing.measure.evaluation import evaluate
from batchwright.probing.measure.step_time import visit_beside_loading
from batchwright.records import Job
from batchwright.workload.data import decoding, image_files, listing, sources
from batchwright.workload.data.decoding import decode, decode_square
from batchwright.workload.data.image_files import FilePipeline, ImageFiles
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline, resize
from batchwright.workload.data.sources import ImageData, open_data
from gloo import Crew
from samples import make_data
from test_decoding import encoded
from test_session import make_tiny_plan

pytestmark = pytest.mark.usefixtures("own_cache")
TOP = 48
SIZES = [(120, 160), (160, 120), (130, 130), (60, 50), (220, 150)]
CPU = torch.device("cpu")


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Smooth, with edges: what JPEG is made for."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs")
    for part, count in (("train", 9), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                seed = 100 * label + number
                image = photograph(*SIZES[number % len(SIZES)], seed)
                exif = Image.Exif()
                exif[0x0112] = (1, 6, 3)[number % 3]
                image.save(root / part / name / f"{number}.jpg", quality=92, exif=exif)
    return root


def job(root: Path) -> Job:
    return Job(data=f"imagefolder:{root}", resolutions=(24, TOP))


def in_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> ImageData:
    """The data as on a disk that is nearly full."""
    monkeypatch.setattr(image_files, "free_bytes", lambda: 100_000)
    return open_data(job(root))


def pipeline(
    data: ImageData, *, loaders: int = 0, augmentation="crop-flip", **warps
) -> FilePipeline:
    assert isinstance(data.train, ImageFiles)
    return FilePipeline(
        data.train, device=CPU, augmentation=augmentation, seed=3, loaders=loaders, **warps
    )


def store_pipeline(data: ImageData, augmentation="crop-flip", **warps) -> ImagePipeline:
    assert isinstance(data.train, ImageStore)
    return ImagePipeline(
        data.train,
        device=CPU,
        side=TOP,
        mean=data.mean,
        std=data.std,
        augmentation=augmentation,
        seed=3,
        **warps,
    )


def decibels(images: Tensor, reference: Tensor) -> float:
    """Peak signal to noise of values in [0, 1]."""
    return -10 * math.log10(float((images.double() - reference.double()).square().mean()))


def likeness(one: Tensor, other: Tensor) -> float:
    """Correlation of two images."""
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


# ------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("place", [None, (0.0, 0.0), (1.0, 0.3), (0.2, 1.0)])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_square_is_the_part_of_the_stored_image(place, orientation) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photograph(500, 375, 1), "JPEG", quality=95, exif=exif)
    stored = torch.from_numpy(decode(data, top_resolution=96).copy())
    height, width = stored.shape[:2]
    down, right = place or (0.5, 0.5)
    top, left = round((height - 96) * down), round((width - 96) * right)
    wanted = resize(stored[None, top : top + 96, left : left + 96].float(), 48)[0]
    square = torch.from_numpy(
        decode_square(data, top_resolution=96, resolution=48, place=place).copy()
    )
    assert 48 <= len(square) < 96
    found = resize(square[None].float(), 48)[0]
    assert decibels(found / 255, wanted / 255) > 31  # position to half a decoded pixel
    assert decibels(found.roll(2, 0) / 255, wanted / 255) < 25


def test_no_more_is_decoded_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    turn = decoding.upright

    def noted(image):
        upright = turn(image)
        seen.append(upright.size)
        return upright

    monkeypatch.setattr(decoding, "upright", noted)
    data = encoded(photograph(800, 800, 1), "JPEG")
    for resolution in (80, 160, 320, 640):
        decode_square(data, top_resolution=640, resolution=resolution, place=None)
    assert seen == [(100, 100), (200, 200), (400, 400), (800, 800)]


def test_a_format_without_reduced_decoding_is_averaged() -> None:
    stripes = np.zeros((400, 400, 3), np.uint8)
    stripes[:, ::2] = 255
    data = encoded(Image.fromarray(stripes))
    square = decode_square(data, top_resolution=400, resolution=100, place=None)
    assert square.shape == (100, 100, 3)
    assert set(np.unique(square)) <= {127, 128}


def test_a_float_reference_of_the_reduced_decoding() -> None:
    data = encoded(photograph(400, 400, 2), "JPEG", quality=95)
    with Image.open(io.BytesIO(data)) as image:
        whole = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].double()
    edge = round(400 / 1.15)  # what a store at 100 px would be cropped to
    first = (400 - edge) // 2
    part = whole[..., first : first + edge, first : first + edge]
    wanted = functional.interpolate(part, (100, 100), mode="bilinear", antialias=True)
    square = decode_square(data, top_resolution=100, resolution=100, place=None)
    found = resize(torch.from_numpy(square.copy())[None].float(), 100).permute(0, 3, 1, 2)
    assert decibels(found / 255, wanted / 255) > 38


# --------------------------------------------------------------------------- which way is taken


def test_a_folder_that_fits_is_stored(root: Path) -> None:
    assert isinstance(open_data(job(root)).train, ImageStore)


def test_what_was_begun_one_way_stays_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = open_data(job(root))
    assert isinstance(in_files(root, monkeypatch).train, ImageStore)  # on a disk now full
    assert stored.facts == open_data(job(root)).facts


def test_files_stay_files_when_the_disk_has_room_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = in_files(root, monkeypatch)
    monkeypatch.setattr(image_files, "free_bytes", lambda: 10**12)
    again = open_data(job(root))
    assert isinstance(again.train, ImageFiles)
    assert (again.facts, again.mean, again.std) == (first.facts, first.mean, first.std)


def test_facts_are_those_of_the_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored = open_data(job(root))
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "other"))
    files = in_files(root, monkeypatch)
    assert files.facts == stored.facts
    assert files.mean == pytest.approx(stored.mean, abs=1e-6)
    assert files.std == pytest.approx(stored.std, abs=1e-6)
    assert torch.equal(files.train.labels, stored.train.labels)


def test_an_unreadable_file_is_left_out_or_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    monkeypatch.setattr(listing, "_LOOKED_AT", 1)
    (copy / "train" / "cat" / "4.jpg").write_bytes(b"no image")
    half = copy / "train" / "dog" / "2.jpg"  # is fine, as far as its header says
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    monkeypatch.setattr(image_files, "free_bytes", lambda: 100_000)
    with pytest.raises(DataError, match=r"unreadable image .*train/cat/4.jpg"):
        open_data(job(copy))
    skipping = open_data(job(copy).model_copy(update={"unreadable": "skip"}))
    assert (skipping.facts.train_samples, skipping.facts.skipped) == (16, 2)
    assert len(skipping.train) == 16
    assert skipping.train.labels.tolist() == [0] * 8 + [1] * 8
    assert pipeline(skipping).single(torch.arange(16), epoch=0, resolution=24)[0].shape[0] == 16


def test_mean_and_deviation_come_from_images_that_can_be_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    monkeypatch.setattr(listing, "_LOOKED_AT", 2)
    for name in ("cat", "dog"):  # the first and the tenth of 18 would be looked at
        (copy / "train" / name / "0.jpg").write_bytes(b"no image")
    monkeypatch.setattr(image_files, "free_bytes", lambda: 100_000)
    data = open_data(job(copy).model_copy(update={"unreadable": "skip"}))
    looked_at = [Image.open(copy / "train" / name / "1.jpg") for name in ("cat", "dog")]
    mean = np.mean([np.asarray(image).mean((0, 1)) / 255 for image in looked_at], axis=0)
    assert data.mean == pytest.approx(mean, abs=0.01)
    assert 0 < min(data.std) < max(data.std) < 0.5


def test_an_index_by_an_earlier_rule_of_what_is_readable_is_made_anew(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    monkeypatch.setattr(image_files, "free_bytes", lambda: 100_000)
    skipping = job(copy).model_copy(update={"unreadable": "skip"})
    line = photograph(4000, 1, 1)  # 192,000 x 48 pixels where it is stored
    line.save(copy / "train" / "cat" / "9.png")
    with monkeypatch.context() as before:
        before.setattr(sources, "_IN_FILES", "decoded files")
        assert open_data(skipping).facts.skipped == 0
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    assert open_data(skipping).facts.skipped == 1


def test_an_image_changed_between_two_readings_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    place = copy / "train" / "cat" / "0.jpg"
    usual = listing.ThreadPoolExecutor

    def pool(*how):
        if (tmp_path / "read").exists():
            place.write_bytes(b"no image")
        (tmp_path / "read").touch()
        return usual(*how)

    monkeypatch.setattr(listing, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(image_files, "free_bytes", lambda: 100_000)
    with pytest.raises(DataError, match=rf"^{place} was changed as it was read: not an image"):
        open_data(job(copy))


def read_with_a_warning(name: str) -> bytes:
    """An image; none if the warning would be shown."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn("odd metadata", stacklevel=1)
    return b"" if shown else encoded(photograph(60, 60, 1))


def test_loader_processes_show_no_warnings_amid_the_progress(tmp_path: Path) -> None:
    middle = (0.5, 0.5, 0.5)
    files = ImageFiles(
        tmp_path, ["1.png"], torch.tensor([0]), side=TOP, mean=middle, std=middle,
        read=read_with_a_warning,
    )  # fmt: skip
    one = FilePipeline(files, device=CPU, augmentation="none", seed=0, loaders=1)
    assert len(list(one.batches([torch.arange(1)], epoch=0, resolution=24))) == 1
    one.close()


def test_damage_behind_the_header_is_named_when_it_is_met(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = in_files(root, monkeypatch)
    broken = tmp_path / "broken.jpg"
    content = (root / "train" / "cat" / "0.jpg").read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    files = ImageFiles(
        tmp_path, ["broken.jpg"], torch.tensor([0]), side=TOP, mean=data.mean, std=data.std
    )
    said = rf"^unreadable image {broken}: .*as it was and go on with --resume.*unreadable=skip"
    with pytest.raises(DataError, match=said):
        files.square(0, 24, None)
    for loaders in (0, 1):  # from another process it arrives as the same line
        one = FilePipeline(files, device=CPU, augmentation="none", seed=0, loaders=loaders)
        with pytest.raises(DataError, match=rf"{said}.*\Z"):
            next(one.batches([torch.arange(1)], epoch=0, resolution=24))
        one.close()
    with pytest.raises(DataError, match=said):
        one.single(torch.arange(1), epoch=0, resolution=24)


# ------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("resolution", [24, TOP])
def test_batches_look_like_those_of_a_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resolution: int
) -> None:
    stored = store_pipeline(open_data(job(root)))
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "other"))
    files = pipeline(in_files(root, monkeypatch))
    every = torch.arange(18)
    wanted, labels = stored.training_batch(every, epoch=2, resolution=resolution)
    found, own = files.single(every, epoch=2, resolution=resolution)
    assert torch.equal(own, labels)
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(found, wanted, strict=True):  # mirrored and placed alike
        assert likeness(one, other) > 0.9 > likeness(one.flip(2), other)


@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("side", "resolution"), [(TOP, TOP), (TOP, 24), (30, TOP)])
def test_squares_without_margin_are_shifted_as_those_of_a_store_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, side: int, resolution: int, strength: float
) -> None:
    for part, count in (("train", 9), ("val", 1)):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / "squares" / part / name).mkdir(parents=True)
            for number in range(count):
                image = photograph(side, side, 100 * label + number)
                image.save(tmp_path / "squares" / part / name / f"{number}.png")
    stored = store_pipeline(open_data(job(tmp_path / "squares")))
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "other"))
    files = pipeline(in_files(tmp_path / "squares", monkeypatch))
    stored.strength = files.strength = strength
    every = torch.arange(18)
    wanted, _ = stored.training_batch(every, epoch=2, resolution=resolution)
    found, _ = files.single(every, epoch=2, resolution=resolution)
    black = (wanted == wanted.amin(dim=(2, 3), keepdim=True)).float().mean()
    assert (black > 0.05) == (strength > 0)
    if (side, resolution) == (TOP, TOP):
        assert torch.equal(found, wanted)
    for one, other in zip(found, wanted, strict=True):
        assert likeness(one, other) > 0.95 > likeness(one.flip(2), other)


def test_they_are_turned_and_mirrored_as_those_of_a_store_are(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn = {"augmentation": "flip", "rotation": 0.5, "zoom": 0.25}
    stored = store_pipeline(open_data(job(root)), **drawn)
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "other"))
    files = pipeline(in_files(root, monkeypatch), **drawn)
    every = torch.arange(18)
    wanted, _ = stored.training_batch(every, epoch=2, resolution=TOP)
    found, _ = files.single(every, epoch=2, resolution=TOP)
    for one, other in zip(found, wanted, strict=True):
        assert likeness(one, other) > 0.9 > likeness(one.flip(1), other)


def test_a_sample_is_the_same_whatever_batch_or_process_makes_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = in_files(root, monkeypatch)
    here, there = pipeline(data), pipeline(data, loaders=2)
    every = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    parts = list(every.split(5))
    fetched = list(there.batches(iter(parts), epoch=4, resolution=24))
    whole, labels = here.single(every, epoch=4, resolution=24)
    assert torch.equal(torch.cat([images for images, _ in fetched]), whole)
    assert torch.equal(torch.cat([names for _, names in fetched]), labels)
    again = list(there.batches(iter(parts[2:]), epoch=4, resolution=24))  # as after a resume
    assert torch.equal(again[0][0], fetched[2][0])
    other = list(there.batches(iter(parts), epoch=5, resolution=24))
    assert not torch.equal(other[0][0], fetched[0][0])


def test_evaluation_is_whole_and_still(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = in_files(root, monkeypatch)
    source = pipeline(data)
    (first,), (second,) = (
        list(source.batches([torch.arange(6)], epoch=None, resolution=TOP)) for _ in range(2)
    )
    assert torch.equal(first[0], second[0])
    alone, label = data.train[3]
    torch.testing.assert_close(first[0][3], alone, atol=0.02, rtol=0)
    assert label == first[1][3]


def test_strength_zero_takes_the_middle(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pipeline(in_files(root, monkeypatch), augmentation="crop")
    source.strength = 0.0
    every = torch.arange(18)
    images, _ = source.single(every, epoch=1, resolution=24)
    ((still, _),) = source.batches([every], epoch=None, resolution=24)
    assert (images - still).abs().mean() < 0.1  # a room of an odd number of pixels has two middles


def test_a_pipeline_dropped_in_mid_epoch_takes_its_loaders_along(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = set(multiprocessing.active_children())
    one = pipeline(in_files(root, monkeypatch), loaders=1)
    batches = one.batches([torch.tensor([0, 1])] * 6, epoch=0, resolution=32)
    next(batches)
    (loader,) = set(multiprocessing.active_children()) - before
    gc.disable()  # whatever is in no circle goes at once, and in order
    try:
        del batches, one
        assert loader.exitcode == 0
    finally:
        gc.enable()


def test_a_closed_feed_of_files_ends_its_loaders_and_others_may_follow(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(multiprocessing.active_children())
    feed = pipeline(in_files(root, monkeypatch), loaders=1)
    for _ in range(2):
        batches = feed.training([torch.tensor([0, 1])] * 6, epoch=0, resolution=32)
        next(batches)
        (loader,) = set(multiprocessing.active_children()) - before
        assert loader.exitcode is None
        feed.close()
        assert loader.exitcode == 0
        del batches  # an error on its way holds them likewise


def test_a_session_trains_on_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = in_files(root, monkeypatch)
    plan = make_tiny_plan((6,), samples=18, epochs=1, sides=(24, TOP))
    plan = plan.model_copy(update={"data": make_data(train_samples=18, classes=("cat", "dog"))})
    network = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    shapes = []
    with Session(network, optimizer, pipeline(data, loaders=1), plan=plan) as session:
        for _ in session.epochs():
            for images, labels in session.batches():
                session.step(functional.cross_entropy(network(images), labels))
                shapes.append(tuple(images.shape))
            score = session.evaluate(
                FilePipeline(data.val, device=CPU, augmentation="none", seed=0, loaders=0),
                lambda outputs, labels: outputs.argmax(1) == labels,
            )
    assert shapes == [(6, 3, 24, 24)] * 3 + [(6, 3, TOP, TOP)] * 3
    assert 0 <= score["top1"] <= 1


@pytest.mark.parametrize("loaders", [0, 1])
def test_steps_and_evaluations_are_timed_beside_the_decoding(
    loaders: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(device="cpu", precision="float32", resolutions=(32,), loaders=loaders)
    bench = Bench(job, in_files(root, monkeypatch), Group(CPU))
    feed = bench.batches.feed(1)
    assert feed is not None
    steps, _, told = visit_beside_loading(bench, feed, 3, 32, seconds=0.01, most_steps=2)
    assert len(steps) == 2
    assert told.loaders == loaders
    assert told.batch_seconds > 0
    assert feed.loading.batches >= 1 + 2 + loaders  # one at hand, two timed
    assert evaluate(bench, 3, repeats=2).seconds_per_image > 0
    bench.close()


def _probed_on_unlike_hosts(rank: int, root: Path, cache: Path, loaders: int | None) -> list[int]:
    """Steps of a visit; worker 0 has fewer loader processes, or no room to decode all at once."""
    os.environ["BATCHWRIGHT_CACHE"] = str(cache / str(rank))
    keys = {"device": "cpu", "precision": "float32", "resolutions": (32,), "loaders": 1}
    with pytest.MonkeyPatch.context() as patch:
        if loaders is not None or not rank:
            patch.setattr(image_files, "free_bytes", lambda: 100_000)
        if loaders is not None and rank:
            keys["loaders"] = loaders
        own, group = Job(data=f"imagefolder:{root}", **keys), Group(CPU, 60)
        executor = Executor(own, group, (2,), "as it is")
        executor.carry_out(commands.Prepare(workers=2, precision="float32"))
        visit = {"resolution": 32, "local_batch_size": 3, "seconds": 0.01, "most_steps": 2}
        visited = executor.carry_out(commands.Visit(workers=2, **visit))
        noise = {"resolution": 32, "part_size": 2, "seconds": 0.1}
        executor.carry_out(commands.MeasureNoise(workers=2, **noise))
        executor.close()
        group.close()
    return [len(visited.steps), visited.loading.loaders]


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [4, None])
def test_workers_take_equally_many_steps_whatever_their_hosts_load_with(
    loaders: int | None, root: Path, tmp_path: Path, crew: Crew
) -> None:
    """By cores, of which a host may have more, or from what it has had the disk to decode."""
    own = crew.together(_probed_on_unlike_hosts, root, tmp_path, loaders, workers=2)
    assert own == [[2 if loaders is None else loaders, loaders or 1]] * 2
