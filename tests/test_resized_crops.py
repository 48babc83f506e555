"""Random resized crops: which parts of images they show, and that they show them right."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from batchwright.workload.data import pipeline as pipelines
from batchwright.workload.data.decoding import decode_part
from batchwright.workload.data.image_files import FilePipeline, ImageFiles
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.random_numbers import draw, split_mix, start_of
from batchwright.workload.data.resized_crops import ResizedCrops, resized_parts
from test_pipeline import MIXED, PLAIN, UNIFORM, build, grey_levels, smooth, store_of

CPU = torch.device("cpu")
SIZES = torch.tensor([[375, 500], [500, 375], [64, 64], [40, 400], [400, 40], [32, 45]])


def part_of(seed, epoch, index, height, width, *, least=0.08, ratio=(3 / 4, 4 / 3)):
    """torchvision's `RandomResizedCrop.get_params`, with our random numbers in place of its own."""
    start = split_mix(start_of(seed, epoch), np.array([2**64 - 2], np.uint64))
    place = draw(seed, epoch, torch.tensor([index]))
    log_ratio = [math.log(one) for one in ratio]
    for number in range(10):
        state = int(split_mix(start, np.array([10 * index + number], np.uint64))[0])
        area, shape = (state >> shift & 2**24 - 1 for shift in (0, 24))
        target = height * width * (least + (1 - least) * area / 2**24)
        aspect = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * shape / 2**24)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(place.vertical[0]) * (height - h + 1) >> 24
            left = int(place.horizontal[0]) * (width - w + 1) >> 24
            return [top, left, h, w]
    w, h = width, height
    if width / height < ratio[0]:
        h = round(w / ratio[0])
    elif width / height > ratio[1]:
        w = round(h * ratio[1])
    return [(height - h) // 2, (width - w) // 2, h, w]


def resized(image, part, side):
    """A part of an image, uint8 (h, w, 3), as PyTorch resizes it, float (side, side, 3)."""
    top, left, height, width = part
    cut = image[top : top + height, left : left + width].permute(2, 0, 1)[None].float()
    made = functional.interpolate(cut, size=(side, side), mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0)


# ------------------------------------------------------------------------------- which parts


def test_parts_are_those_of_torchvisions_definition():
    indices = torch.arange(1200)
    sizes = SIZES[indices % len(SIZES)]
    parts = ResizedCrops(7).draw(3, indices, sizes, 1.0).tolist()
    assert parts == [part_of(7, 3, i, *sizes[i].tolist()) for i in range(len(indices))]
    wide = ResizedCrops(7, 0.5).draw(3, indices, sizes, 1.0).tolist()
    assert wide == [part_of(7, 3, i, *sizes[i].tolist(), least=0.5) for i in range(len(indices))]


def test_areas_and_shapes_fill_their_ranges_and_places_do_not_hang_together_with_them():
    count = 20_000
    parts = ResizedCrops(1).draw(0, torch.arange(count), torch.tensor([[1000, 1000]] * count), 1.0)
    top, left, height, width = parts.double().unbind(1)
    area, shape = height * width / 1e6, (width / height).log()
    assert 0.079 < area.min() < 0.082
    assert area.max() > 0.97  # larger ones must be nearly square
    assert shape.abs().max() <= math.log(4 / 3) + 0.01
    assert abs(shape.mean()) < 4 * math.log(4 / 3) / (3 * count) ** 0.5
    small = area[area < 0.7]  # these all fit: uniform
    assert small.mean().item() == pytest.approx(0.39, abs=0.01)
    down, right = top / (1000 - height).clamp(min=1), left / (1000 - width).clamp(min=1)
    drawn = torch.stack((area, shape, down, right))[:, (area < 0.7)]
    apart = torch.corrcoef(drawn) - torch.eye(4)
    assert apart.abs().max() < 4 / len(small) ** 0.5
    assert down.mean().item() == pytest.approx(0.5, abs=0.02)


def test_parts_depend_on_seed_and_epoch_but_not_on_the_batch():
    sizes = torch.tensor([[90, 120]] * 50)
    indices = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    parts = ResizedCrops(1).draw(4, indices, sizes, 1.0)
    alone = ResizedCrops(1).draw(4, indices[7:8], sizes[:1], 1.0)
    assert torch.equal(alone[0], parts[7])
    assert not torch.equal(ResizedCrops(1).draw(5, indices, sizes, 1.0), parts)
    assert not torch.equal(ResizedCrops(2).draw(4, indices, sizes, 1.0), parts)


@pytest.mark.parametrize(
    "strength", [0.4, 3.0, *(pytest.param(n, marks=pytest.mark.slow) for n in (0.0, 1.0))]
)
def test_parts_are_the_same_when_sizes_are_known_one_by_one(strength):
    indices = torch.randperm(5000, generator=torch.Generator().manual_seed(3))
    sizes = SIZES[indices % len(SIZES)]
    parts = ResizedCrops(9, 0.2).draw(2, indices, sizes, strength).tolist()
    later = pickle.loads(pickle.dumps(ResizedCrops(9, 0.2).parts(2, indices, strength)))
    one_by_one = [list(part(*size)) for part, size in zip(later, sizes.tolist(), strict=True)]
    assert one_by_one == parts


@pytest.mark.parametrize(("strength", "least"), [(0.0, 1.0), (0.5, 0.54), (1.0, 0.08), (3.0, 0.08)])
def test_strength_bounds_how_far_a_part_is_from_the_whole(strength, least):
    indices = torch.arange(4000)
    parts = ResizedCrops(1).draw(0, indices, torch.tensor([[900, 900]] * 4000), strength)
    height, width = parts[:, 2:].double().unbind(1)
    area, shape = height * width / 810_000, (width / height).log().abs()
    assert least - 0.003 <= area.min() <= least + 0.01
    assert shape.max() <= min(1.0, strength) * math.log(4 / 3) + 0.01
    if not strength:  # of an image that is no square the middle one
        (part,) = ResizedCrops(1).draw(0, indices[:1], torch.tensor([[90, 120]]), 0.0).tolist()
        assert part == [0, 15, 90, 90]


# ----------------------------------------------------------------------------- what they show


@pytest.mark.parametrize("side", [5, 16, 40])
def test_a_batch_is_resized_as_pytorch_resizes_each_image(side):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (70, 30, 44, 3), generator=random, dtype=torch.uint8)
    sizes = torch.tensor([[30, 44]] * 70)
    parts = ResizedCrops(5).draw(0, torch.arange(70), sizes, 1.0)
    made = resized_parts(images, parts.int(), side)
    wanted = torch.stack([resized(images[i], parts[i].tolist(), side) for i in range(70)])
    assert (made - wanted).abs().max() < 1.01  # rows and columns are rounded
    assert (made - wanted).mean().abs() < 0.1  # halves are rounded up
    alone = resized_parts(images[66:67], parts[66:67].int(), side)
    assert torch.equal(alone[0], made[66])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(resized_parts(images, parts.int(), side), made)
    flat = resized_parts(torch.full_like(images, 255), parts.int(), side)
    assert (flat == 255).all()


@pytest.mark.parametrize(
    "resolution",
    [16, 40, pytest.param(12, marks=pytest.mark.slow)],  # larger: resized one by one
)
@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_a_pipeline_shows_the_drawn_parts_in_any_batch(store, resolution):
    indices = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:90]
    cropped = build(store, augmentation="resized-crop", crop_scale=0.2)
    images, labels = cropped.training_batch(indices, epoch=3, resolution=resolution)
    mirrored = draw(7, 3, indices).flip
    assert 25 < mirrored.sum() < 65
    crops = ResizedCrops(7, 0.2)
    for at in range(90):
        index = int(indices[at])
        (part,) = crops.draw(3, indices[at : at + 1], store.sizes[index][None], 1.0).tolist()
        wanted = resized(store.image(index), part, resolution)
        found = grey_levels(images[at : at + 1])[0].float()
        assert (found - (wanted.flip(1) if mirrored[at] else wanted)).abs().max() < 1.51
    other = build(store, augmentation="resized-crop", crop_scale=0.2)
    alone, label = other.training_batch(indices[17:18], epoch=3, resolution=resolution)
    assert torch.equal(alone[0], images[17])
    assert label[0] == labels[17]
    evaluated, _ = other.evaluation_batch(indices, resolution=resolution)
    assert torch.equal(evaluated, build(store).evaluation_batch(indices, resolution=resolution)[0])


def test_parts_at_the_end_of_the_store_are_whole():
    """A narrow image comes last: rectangles as wide as the batch's widest part would not fit."""
    store = store_of([smooth(20, 60, 1), smooth(60, 20, 2)])
    parts = torch.tensor([[0, 0, 20, 60], [40, 5, 20, 15]])
    rows, width, columns = store.rectangles(torch.arange(2), parts)
    assert int(rows.max()) + width * 3 <= len(store.pixels)
    images = pipelines.rectangles_at(store.pixels, rows, 20, width)
    assert torch.equal(images[0], store.image(0))
    found = images[1, :, columns[1] : columns[1] + 15]
    assert torch.equal(found, store.image(1)[40:, 5:])


def test_every_resolution_shows_the_same_part():
    """Red and green say the column and row that a pixel comes from."""
    store = store_of([places(90, 120)] * 30)
    indices = torch.arange(30)
    low, high = (
        build(store, side=80, augmentation="resized-crop", seed=1)
        .training_batch(indices, epoch=0, resolution=one)[0]
        .mean((2, 3))
        for one in (24, 80)
    )
    torch.testing.assert_close(low, high, atol=0.01, rtol=0)


def places(height, width):
    """An image whose red says the column, and green the row, as shares of 250."""
    image = torch.zeros(height, width, 3)
    image[:, :, 0] = ((torch.arange(width) + 0.5) / width * 250)[None, :]
    image[:, :, 1] = ((torch.arange(height) + 0.5) / height * 250)[:, None]
    return image.round().to(torch.uint8)


@pytest.mark.parametrize("resolution", [24, 64])
def test_the_corners_of_a_part_are_where_it_was_drawn(resolution):
    store = store_of([places(200, 250)] * 40)
    cropped = build(store, side=180, augmentation="resized-crop")
    indices = torch.arange(40)
    images, _ = cropped.training_batch(indices, epoch=0, resolution=resolution)
    parts = ResizedCrops(7).draw(0, indices, store.sizes, 1.0)
    images = torch.where(draw(7, 0, indices).flip[:, None, None, None], images.flip(3), images)
    images = images * 255 / 250  # shares of the image
    half = 0.5 / resolution  # the middle of an outermost pixel
    for image, (top, left, height, width) in zip(images, parts.tolist(), strict=True):
        first = torch.tensor([left + half * width, top + half * height])
        last = torch.tensor([left + (1 - half) * width, top + (1 - half) * height])
        whole = torch.tensor([250, 200])
        torch.testing.assert_close(image[:2, 0, 0], first / whole, atol=0.01, rtol=0)
        torch.testing.assert_close(image[:2, -1, -1], last / whole, atol=0.01, rtol=0)


# ------------------------------------------------------------------------------- out of files


def file_of(image, name, orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(image.numpy()).save(stream, name, quality=95, exif=exif)
    return stream.getvalue()


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("name", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_part_of_an_encoded_image_is_upright_and_right(name, orientation):
    image = places(240, 320)
    stored = {1: image, 3: image.rot90(2), 6: image.rot90(1)}[orientation].contiguous()
    seen = []

    def part(height, width):
        seen.append((height, width))
        return 20, 200, 80, 100

    made = decode_part(
        file_of(stored, name, orientation), top_resolution=96, resolution=40, part=part
    )
    assert seen == [(240, 320)]
    assert made.shape == ((40, 50, 3) if name == "JPEG" else (80, 100, 3))
    made = pipelines.resize(torch.from_numpy(made)[None], 40)[0].numpy()
    wanted = resized(image, (20, 200, 80, 100), 40)
    assert np.abs(made[..., :2].astype(float) - wanted[..., :2].numpy()).mean() < 2.5


def test_only_as_much_of_a_jpeg_is_decoded_as_a_part_needs(monkeypatch):
    from batchwright.workload.data import decoding

    shapes, sizes, usual = [], [], decoding.upright
    monkeypatch.setattr(
        decoding, "upright", lambda image: [turned := usual(image), sizes.append(turned.size)][0]
    )
    data = file_of(places(480, 640), "JPEG")
    for part in ([0, 0, 480, 480], [0, 0, 200, 240], [100, 100, 50, 50]):
        made = decode_part(data, top_resolution=96, resolution=100, part=lambda *_, part=part: part)
        shapes.append(made.shape[:2])
    assert shapes == [(120, 120), (100, 120), (50, 50)]
    assert sizes == [(160, 120), (320, 240), (640, 480)]


def test_files_show_the_parts_in_any_batch_and_process(tmp_path: Path):
    names = []
    for number in range(12):
        names.append(f"{number}.jpg")
        size = ((120, 160), (160, 120), (130, 130))[number % 3]
        (tmp_path / names[-1]).write_bytes(file_of(places(*size), "JPEG"))
    files = ImageFiles(tmp_path, names, torch.arange(12) % 2, side=48, **PLAIN)
    store = store_of([torch.tensor(np.array(Image.open(tmp_path / one))) for one in names])
    options = {"device": CPU, "augmentation": "resized-crop", "seed": 7, "crop_scale": 0.3}
    here, there = FilePipeline(files, loaders=0, **options), FilePipeline(files, **options)
    every = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    whole, labels = here.single(every, epoch=4, resolution=40)
    stored = build(store, side=48, augmentation="resized-crop", crop_scale=0.3)
    wanted, _ = stored.training_batch(every, epoch=4, resolution=40)
    assert (whole - wanted).abs().mean() < 0.01  # JPEG was decoded smaller
    parts = list(every.split(5))
    fetched = list(there.batches(iter(parts), epoch=4, resolution=40))
    again = list(there.batches(iter(parts[2:]), epoch=4, resolution=40))  # as after a resume
    there.close()
    assert torch.equal(torch.cat([images for images, _ in fetched]), whole)
    assert torch.equal(torch.cat([named for _, named in fetched]), labels)
    assert torch.equal(again[0][0], fetched[2][0])
    here.strength = 0.0
    still, _ = here.single(torch.arange(12), epoch=4, resolution=40)
    middle = still.mean((2, 3))[:, :2] * 255 / 250  # in the middle, mirrored or not
    torch.testing.assert_close(middle, torch.full((12, 2), 0.5), atol=0.02, rtol=0)


def test_pixels_beyond_a_part_do_not_count_in_it(tmp_path: Path):
    """As out of a store, and as torchvision crops; Pillow's own box averages them in."""
    image = torch.full((240, 320, 3), 255, dtype=torch.uint8)
    image[60:180, 80:240] = 0
    (tmp_path / "one.png").write_bytes(file_of(image, "PNG"))
    files = ImageFiles(tmp_path, ["one.png"], torch.tensor([0]), side=48, **PLAIN)
    assert not files.square(0, 48, lambda *_: (60, 80, 120, 160)).any()


def test_no_smaller_copies_are_made_for_low_resolutions(monkeypatch):
    """Parts of them would be blurred."""
    monkeypatch.setattr(pipelines, "reduced", lambda *_, **__: pytest.fail("a copy was made"))
    images = ImageStore.from_images(UNIFORM.images, UNIFORM.labels)
    cropped = build(images, augmentation="resized-crop")
    cropped.prepare([8, 16])
    assert cropped.training_batch(torch.arange(4), epoch=0, resolution=8)[0].shape[-1] == 8
