"""Smaller copies of a store: how exact they are, and that training reads them."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from batchwright.records import DataFacts
from batchwright.workload.data import reduced as module
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.reduced import area_mean, reduced, reduced_sizes
from batchwright.workload.data.store import open_store
from batchwright.workload.data.store_writer import StoreWriter
from samples import make_data

FACTS = make_data(train_samples=9, val_samples=1, classes=("a", "b"), side=4)


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """Edges and fine texture over slow gradients: uint8 (height, width, 3)."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.linspace(0, 1, height)[:, None, None]
    columns = torch.linspace(0, 1, width)[None, :, None]
    waves = torch.sin(torch.tensor([40.0, 25.0, 60.0]) * (rows + columns * columns))
    edges = ((rows * 7 + columns * 5) % 1 > 0.5).float()
    texture = torch.rand(height, width, 3, generator=random)
    values = 0.3 * (rows + columns) / 2 + 0.25 * (waves + 1) / 2 + 0.25 * edges + 0.2 * texture
    return (values * 255).to(torch.uint8)


SIZES = [(46, 46), (46, 46), (40, 61), (52, 40), (40, 40), (40, 40), (40, 40), (46, 60), (46, 60)]


def stored(sizes: list[tuple[int, int]] = SIZES) -> ImageStore:
    def build(writer: StoreWriter) -> DataFacts:
        for seed, size in enumerate(sizes):
            writer.add("train", picture(*size, seed)[None].numpy(), np.array([seed % 2]))
        writer.add("val", picture(4, 4)[None].numpy(), np.array([0]))
        return FACTS

    return open_store({"sizes": sizes}, build)[0]


def in_small_pieces(image: Tensor, height: int, width: int) -> Tensor:
    """The area mean from its definition: every pixel in pieces, whole pieces averaged."""
    rows, columns = image.shape[:2]
    pieces = image.double().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return pieces.view(height, rows, width, columns, 3).mean(dim=(1, 3))


def noise_ratio(image: Tensor, reference: Tensor) -> float:
    """Peak signal to noise, in decibels."""
    error = (image.double() - reference.double()).square().mean()
    return 20 * math.log10(255) - 10 * math.log10(float(error))


@pytest.mark.parametrize(("height", "width"), [(22, 25), (20, 20), (31, 31), (39, 49), (1, 1)])
def test_a_copy_is_the_mean_over_areas_but_for_rounding(height: int, width: int) -> None:
    image = picture(40, 50)
    copy = area_mean(image[None], height, width)[0]
    reference = in_small_pieces(image, height, width)
    assert (copy.double() - reference).abs().max() <= 0.5 + 1e-3
    assert copy.dtype == torch.uint8
    if height > 1:
        assert noise_ratio(copy, reference) > 57  # rounding alone leaves 58.9 dB


def test_fine_stripes_become_grey_and_do_not_alias() -> None:
    stripes = torch.zeros(40, 40, 3, dtype=torch.uint8)
    stripes[:, ::2] = 255
    copy = area_mean(stripes[None], 20, 20)
    assert set(copy.unique().tolist()) <= {127, 128}


def test_copies_are_at_the_scale_of_their_resolution() -> None:
    store = stored()
    sizes = reduced_sizes(store.sizes, side=40, resolution=22)
    assert sizes.tolist() == [[(2 * a * 22 + 40) // 80 for a in size] for size in SIZES]
    copies = reduced(store, side=40, resolution=22)
    assert copies.sizes.tolist() == sizes.tolist()
    assert torch.equal(copies.labels, store.labels)
    for index, (height, width) in enumerate(sizes.tolist()):
        alone = area_mean(store.image(index)[None], height, width)[0]
        assert torch.equal(copies.image(index), alone)


def test_a_copy_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = reduced(stored(), side=40, resolution=22)
    monkeypatch.setattr(module, "area_mean", lambda *_: pytest.fail("made again"))
    again = reduced(stored(), side=40, resolution=22)
    assert torch.equal(first.image(3), again.image(3))


def test_other_pixels_have_other_copies() -> None:
    ours = reduced(stored(), side=40, resolution=22)
    other = reduced(stored([(46, 46), (41, 60)]), side=40, resolution=22)
    assert len(ours) != len(other)


def test_a_damaged_copy_is_made_again(cache: Path) -> None:
    store = stored()
    before = reduced(store, side=40, resolution=22).image(0).clone()
    (damaged,) = (
        path for path in (cache / "stores").glob("*/train.pixels") if path.stat().st_size < 25_000
    )
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert torch.equal(reduced(store, side=40, resolution=22).image(0), before)


def test_without_room_images_are_the_same_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    store = stored()
    stores = len(list((cache / "stores").glob("*/header.json")))
    monkeypatch.setattr(module, "free_bytes", lambda: 20_000)
    with caplog.at_level(logging.WARNING):
        tight = pipeline(store).training_batch(torch.arange(9), epoch=1, resolution=22)[0]
    assert "are reduced in every epoch anew" in caplog.text
    assert len(list((cache / "stores").glob("*/header.json"))) == stores
    monkeypatch.undo()
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(cache))
    roomy = pipeline(store).training_batch(torch.arange(9), epoch=1, resolution=22)[0]
    assert torch.equal(tight, roomy)


# --------------------------------------------------------------------------- what training sees


def pipeline(store: ImageStore, *, side: int = 40, augmentation: str = "crop") -> ImagePipeline:
    return ImagePipeline(
        store,
        device=torch.device("cpu"),
        side=side,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        augmentation=augmentation,
        seed=4,
    )


def bright_spot(images: Tensor) -> Tensor:
    """Centre of mass of each image, in shares of its side: (n, 2)."""
    weights = images.mean(1)
    ticks = (torch.arange(images.shape[-1]) + 0.5) / images.shape[-1]
    total = weights.sum((1, 2))
    return torch.stack(
        [(weights.sum(2) * ticks).sum(1) / total, (weights.sum(1) * ticks).sum(1) / total], 1
    )


@pytest.mark.parametrize("size", [(40, 40), (46, 60)])
@pytest.mark.parametrize("resolution", [20, 22, 31])
def test_the_same_part_of_an_image_is_seen_at_every_resolution(size, resolution) -> None:
    image = torch.zeros(*size, 3, dtype=torch.uint8)
    image[18:24, 22:28] = 250
    store = ImageStore.from_images(image.expand(200, *size, 3).contiguous(), torch.arange(200))
    source, indices = pipeline(store), torch.arange(200)
    full = bright_spot(source.training_batch(indices, epoch=3, resolution=40)[0])
    low = bright_spot(source.training_batch(indices, epoch=3, resolution=resolution)[0])
    assert full.std(0).min() > 0.02  # they do move
    away = (full - low).abs().max()
    assert away < 0.9 / resolution  # half a pixel of position, and the rounding of the copy's size


@pytest.mark.parametrize("size", [(40, 40), (46, 60)])
def test_low_resolution_images_are_close_to_full_ones_made_smaller(size) -> None:
    store = ImageStore.from_images(
        torch.stack([picture(*size, seed) for seed in range(20)]), torch.arange(20)
    )
    source, indices = pipeline(store), torch.arange(20)
    source.strength = 0.0
    full = source.training_batch(indices, epoch=0, resolution=40)[0]
    low = source.training_batch(indices, epoch=0, resolution=20)[0]
    reference = torch.nn.functional.avg_pool2d(full.double(), 2)
    if size == (40, 40):  # the middle of 46 x 60 begins in the middle of a small pixel
        assert noise_ratio(low * 255, reference * 255) > 57
    assert torch.allclose(low.mean((2, 3)), reference.mean((2, 3)).float(), atol=0.02)


def test_a_sample_is_a_function_of_seed_epoch_index_and_resolution() -> None:
    store = stored()
    source, other = pipeline(store), pipeline(store)
    whole = source.training_batch(torch.arange(9), epoch=5, resolution=22)[0]
    other.training_batch(torch.arange(4), epoch=0, resolution=40)
    other.training_batch(torch.arange(4), epoch=5, resolution=30)
    for index in (0, 3, 8):
        alone = other.training_batch(torch.tensor([index]), epoch=5, resolution=22)[0]
        assert torch.equal(alone[0], whole[index])
    again = source.training_batch(torch.arange(9), epoch=6, resolution=22)[0]
    assert not torch.equal(again, whole)


def test_resolutions_near_the_top_and_evaluation_need_no_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_, **__):
        pytest.fail("a copy was made")

    monkeypatch.setattr("batchwright.workload.data.pipeline.reduced", fail)
    source = pipeline(stored())
    for resolution in (36, 40, 48):
        source.training_batch(torch.arange(4), epoch=0, resolution=resolution)
    source.evaluation_batch(torch.arange(4), resolution=20)


def test_what_is_prepared_is_there_for_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    source = pipeline(stored())
    source.prepare((22, 40), lambda done, total, what: told.append((done, total, what)))
    assert told[-1] == (9, 9, "reducing images to 22 px")
    monkeypatch.setattr(module, "area_mean", lambda *_: pytest.fail("made in the first batch"))
    source.training_batch(torch.arange(4), epoch=0, resolution=22)


def test_augment_none_reads_copies_too() -> None:
    source = pipeline(stored(), augmentation="none")
    images = source.training_batch(torch.arange(9), epoch=0, resolution=22)[0]
    other = source.training_batch(torch.arange(9), epoch=1, resolution=22)[0]
    assert images.shape == (9, 3, 22, 22)
    assert torch.equal(images, other)


def test_weights_of_many_sizes_are_not_all_kept() -> None:
    for width in range(2, 400):
        area_mean(torch.zeros(1, 2, width, 3, dtype=torch.uint8), 1, 1)
    assert module._weights.cache_info().currsize <= 256
