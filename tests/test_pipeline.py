"""Batches out of stored images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from batchwright.workload.data import pipeline as module
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.pipeline import ImagePipeline, Warps, warp
from batchwright.workload.data.random_numbers import draw, split_mix

CPU = torch.device("cpu")
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def store_of(images: list[torch.Tensor]) -> ImageStore:
    """Images in memory, of whatever sizes."""
    pixels = torch.cat([image.reshape(-1) for image in images])
    sizes = torch.tensor([image.shape[:2] for image in images])
    return ImageStore(pixels, torch.arange(len(images)) % 10, sizes)


def noise(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size in sizes
    ]


def smooth(height: int, width: int, seed: int) -> torch.Tensor:
    """A photograph's like: what is near has nearly the same colour."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    fine = functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=True)
    return (fine[0].permute(1, 2, 0) * 255).to(torch.uint8).contiguous()


UNIFORM = store_of(noise(*[(16, 16)] * 300))
MIXED = store_of(noise(*[(18, 24), (30, 18), (18, 18)] * 100))


def build(store=UNIFORM, **options) -> ImagePipeline:
    options = {"device": CPU, "side": 16, "augmentation": "crop-flip", "seed": 7} | PLAIN | options
    return ImagePipeline(store, **options)


def grey_levels(images: torch.Tensor) -> torch.Tensor:
    """Back to uint8 (n, height, width, 3), where mean is 0 and std is 1."""
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


# ------------------------------------------------------------------------------------- randomness


def test_the_hash_is_split_mix_64():
    state = np.zeros(1, dtype=np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert split_mix(state, np.arange(3, dtype=np.uint64)).tolist() == expected


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_a_sample_looks_the_same_whatever_batch_it_is_in(store):
    indices = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:40]
    whole, labels = build(store).training_batch(indices, epoch=3, resolution=12)
    other = build(store)
    other.training_batch(indices.flip(0), epoch=9, resolution=16)
    for position in (0, 17, 39):
        alone, label = other.training_batch(
            indices[position : position + 1], epoch=3, resolution=12
        )
        assert torch.equal(alone[0], whole[position])
        assert label[0] == labels[position] == store.labels[indices[position]]


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_seed_and_epoch_change_the_image(store):
    indices = torch.arange(20)
    first, _ = build(store).training_batch(indices, epoch=0, resolution=16)
    next_epoch, _ = build(store).training_batch(indices, epoch=1, resolution=16)
    other_seed, _ = build(store, seed=8).training_batch(indices, epoch=0, resolution=16)
    assert not torch.equal(first, next_epoch)
    assert not torch.equal(first, other_seed)


def test_draws_are_uniform_and_independent():
    count, bins = 40_000, 9
    draws = draw(seed=1, epoch=2, indices=torch.arange(count))
    rows = draws.vertical * bins >> 24
    columns = draws.horizontal * bins >> 24
    cells = (rows * bins + columns) * 2 + draws.flip
    observed = torch.bincount(cells, minlength=2 * bins * bins).double()
    expected = count / len(observed)
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert abs(chi_squared - freedom) < 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_neighbouring_epochs_and_seeds_are_unrelated():
    indices = torch.arange(1, 20_001)
    reference = draw(0, 0, indices).horizontal.double()
    for seed, epoch, offset in ((0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 1, -1), (2**64 - 1, 0, 0)):
        other = draw(seed, epoch, indices + offset).horizontal.double()
        correlation = torch.corrcoef(torch.stack([reference, other]))[0, 1]
        assert abs(correlation) < 4 / len(indices) ** 0.5, (seed, epoch, offset)


# ----------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_a_turned_sample_looks_the_same_whatever_batch_it_is_in(store):
    indices = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:40]
    options = {"augmentation": "flip", "rotation": 0.05, "zoom": 0.25}
    whole, _ = build(store, **options).training_batch(indices, epoch=3, resolution=12)
    alone, _ = build(store, **options).training_batch(indices[17:18], epoch=3, resolution=12)
    assert torch.equal(alone[0], whole[17])
    plain, _ = build(store, augmentation="flip").training_batch(indices, epoch=3, resolution=12)
    assert not torch.equal(plain, whole)
    evaluated, _ = build(store, **options).evaluation_batch(indices, resolution=12)
    assert torch.equal(evaluated, build(store).evaluation_batch(indices, resolution=12)[0])


def test_turns_and_zooms_reach_their_bounds_and_are_those_of_no_crop():
    indices = torch.arange(20_000)
    cosine, sine = Warps(1, 0.05, 0.25).draw(2, indices, 1.0).double().unbind(1)
    angles, scales = torch.atan2(sine, cosine) / (2 * torch.pi), torch.hypot(cosine, sine)
    for values, middle, bound in ((angles, 0.0, 0.05), (scales, 1.0, 0.25)):
        assert (values - middle).abs().max() <= bound * (1 + 1e-6)
        assert (values - middle).std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    crops = draw(1, 2, indices)
    drawn = (angles, scales, crops.vertical.double(), crops.horizontal.double())
    apart = torch.corrcoef(torch.stack(drawn)) - torch.eye(4)
    assert apart.abs().max() < 4 / len(indices) ** 0.5
    half = Warps(1, 0.05, 0.0).draw(2, indices, 0.5)
    assert torch.hypot(*half.unbind(1)).sub(1).abs().max() < 1e-6
    assert torch.atan2(*half.flip(1).unbind(1)).abs().max() <= torch.pi * 0.0501


def test_a_quarter_turn_and_a_zoom_show_what_they_say():
    image = torch.stack(noise((16, 16)))
    quarter = warp(image, torch.tensor([[0.0, 1.0]]))
    assert torch.allclose(quarter, torch.rot90(image, 1, (1, 2)).float(), atol=1e-3)
    same = warp(image, torch.tensor([[1.0, 0.0]]))
    assert torch.allclose(same, image.float(), atol=1e-3)
    half = warp(image, torch.tensor([[0.5, 0.0]]))  # the middle, twice as large
    middle = functional.interpolate(
        image[:, 4:12, 4:12].permute(0, 3, 1, 2).float(), scale_factor=2, mode="bilinear"
    )
    inner = slice(1, -1)  # at the border one looks beyond the middle, the other does not
    wanted = middle.permute(0, 2, 3, 1)[:, inner, inner]
    assert torch.allclose(half[:, inner, inner], wanted, atol=1e-3)


def test_flips_alone_move_nothing_else():
    indices = torch.arange(300)
    images, _ = build(augmentation="flip").training_batch(indices, epoch=0, resolution=16)
    still, _ = build().evaluation_batch(indices, resolution=16)
    mirrored = draw(7, 0, indices).flip
    assert 100 < mirrored.sum() < 200
    assert torch.equal(images[mirrored], still[mirrored].flip(3))
    assert torch.equal(images[~mirrored], still[~mirrored])


def test_every_shift_of_a_padded_image_occurs_and_nothing_else():
    image = noise((16, 16))[0]
    padded = torch.zeros(20, 20, 3, dtype=torch.uint8)
    padded[2:18, 2:18] = image
    expected = {
        padded[y : y + 16, x : x + 16].numpy().tobytes() for y in range(5) for x in range(5)
    }
    images, _ = build(store_of([image] * 2000), augmentation="crop").training_batch(
        torch.arange(2000), epoch=0, resolution=16
    )
    assert {one.numpy().tobytes() for one in grey_levels(images)} == expected


def test_half_of_the_images_are_mirrored():
    indices = torch.arange(300)
    cropped, _ = build(augmentation="crop").training_batch(indices, epoch=0, resolution=16)
    both, _ = build(augmentation="crop-flip").training_batch(indices, epoch=0, resolution=16)
    same = (both == cropped).flatten(1).all(1)
    mirrored = (both == cropped.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 0.4 < mirrored.double().mean() < 0.6


def test_crops_of_larger_images_reach_every_corner_and_stay_inside():
    image = noise((18, 24))[0]
    inside = {image[y : y + 16, x : x + 16].numpy().tobytes() for y in range(3) for x in range(9)}
    images, _ = build(store_of([image] * 2000), augmentation="crop").training_batch(
        torch.arange(2000), epoch=0, resolution=16
    )
    assert {one.numpy().tobytes() for one in grey_levels(images)} == inside


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_evaluation_takes_the_middle_and_nothing_random(store):
    pipeline = build(store)
    images, labels = pipeline.evaluation_batch(torch.arange(3), resolution=16)
    for index in range(3):
        image = store.image(index)
        top, left = (image.shape[0] - 16) // 2, (image.shape[1] - 16) // 2
        middle = image[top : top + 16, left : left + 16]
        assert torch.equal(grey_levels(images)[index], middle)
    assert labels.tolist() == [0, 1, 2]
    without, _ = build(store, augmentation="none").training_batch(
        torch.arange(3), epoch=5, resolution=16
    )
    assert torch.equal(without, images)


@pytest.mark.parametrize("resolution", [8, 12, 14, 16, 24])
@pytest.mark.parametrize("sizes", [[(16, 16)], [(18, 24), (30, 18), (18, 18)]])
def test_another_resolution_keeps_the_mean_colour(sizes, resolution):
    store = store_of([smooth(*size, seed) for seed in range(3) for size in sizes])
    every = torch.arange(len(store))
    full, _ = build(store).training_batch(every, epoch=0, resolution=16)
    resized, _ = build(store).training_batch(every, epoch=0, resolution=resolution)
    assert resized.shape == (len(store), 3, resolution, resolution)
    # Half a small pixel more or less of a black border, or of another part of the picture.
    torch.testing.assert_close(
        resized.mean((2, 3)), full.mean((2, 3)), atol=0.01 + 0.6 / resolution, rtol=0
    )


def test_resizing_averages_fine_detail_instead_of_picking_pixels():
    """A checkerboard becomes grey; taking the nearest pixels would leave it black or white."""
    board = ((torch.arange(16)[:, None] + torch.arange(16)) % 2 * 255).to(torch.uint8)
    store = store_of([board[:, :, None].expand(16, 16, 3)] * 2)
    images, _ = build(store).evaluation_batch(torch.arange(2), resolution=4)
    assert (images - 0.5).abs().max() < 0.1


def test_images_without_margin_are_seen_whole_at_lower_resolutions():
    """A dot in the corner is still there after resizing, so that no part was cut away."""
    image = torch.zeros(32, 32, 3, dtype=torch.uint8)
    image[:2, :2] = 255
    images, _ = build(store_of([image] * 2), side=16).evaluation_batch(
        torch.arange(2), resolution=16
    )
    assert images[0, 0, 0, 0] > 0.5


def test_images_smaller_than_the_side_are_enlarged():
    store = store_of(
        [torch.full((h, w, 3), 99, dtype=torch.uint8) for h, w in ((10, 30), (16, 18))]
    )
    images, _ = build(store).training_batch(torch.arange(2), epoch=0, resolution=16)
    assert (grey_levels(images) == 99).all()


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_batches_are_normalized_channels_last_and_of_the_asked_format(store):
    mean, std = (0.2, 0.4, 0.6), (0.5, 0.25, 0.125)
    indices = torch.arange(5)
    plain, _ = build(store).training_batch(indices, epoch=1, resolution=12)
    images, labels = build(store, mean=mean, std=std).training_batch(
        indices, epoch=1, resolution=12
    )
    expected = (plain - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(images, expected)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64
    half, _ = build(store, mean=mean, std=std, dtype=torch.bfloat16).training_batch(
        indices, epoch=1, resolution=12
    )
    assert torch.equal(half, images.bfloat16())


def test_the_store_itself_is_never_changed():
    before = UNIFORM.images.clone()
    build().training_batch(torch.arange(300), epoch=0, resolution=16)
    assert torch.equal(UNIFORM.images, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_a_gpu_makes_the_same_images(monkeypatch, store, resident):
    monkeypatch.setattr(module, "RESIDENT_BYTES", 2**30 if resident else 0)
    gpu = build(store, device=torch.device("cuda"))
    for resolution in (16, 12):
        expected, labels = build(store).training_batch(
            torch.arange(40), epoch=2, resolution=resolution
        )
        images, gpu_labels = gpu.training_batch(torch.arange(40), epoch=2, resolution=resolution)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(gpu_labels.cpu(), labels)
        torch.testing.assert_close(images.cpu(), expected, atol=0.6 / 255, rtol=0)


# --------------------------------------------------------------------------- strength of the shift


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_strength_one_is_the_usual_and_returns_after_another(store):
    indices = torch.arange(50)
    usual, _ = build(store).training_batch(indices, epoch=2, resolution=16)
    changed = build(store)
    for strength in (0.5, 0.0, 1.0):
        changed.strength = strength
        images, _ = changed.training_batch(indices, epoch=2, resolution=16)
        assert torch.equal(images, usual) == (strength == 1.0)


@pytest.mark.parametrize("store", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_strength_zero_takes_the_middle(store):
    still = build(store, augmentation="crop")
    still.strength = 0.0
    indices = torch.arange(100)
    images, _ = still.training_batch(indices, epoch=0, resolution=16)
    assert torch.equal(images, still.evaluation_batch(indices, resolution=16)[0])


@pytest.mark.parametrize(("strength", "furthest"), [(0.5, 1), (1.0, 2), (2.0, 4)])
def test_strength_bounds_the_shift(strength, furthest):
    image = torch.zeros(16, 16, 3, dtype=torch.uint8)
    image[8, 8] = 255
    shifted = build(store_of([image] * 500), augmentation="crop")
    shifted.strength = strength
    images, _ = shifted.training_batch(torch.arange(500), epoch=0, resolution=16)
    places = images[:, 0].nonzero()[:, 1:] - 8
    assert len(places) == 500
    assert places.min() == -furthest
    assert places.max() == furthest


def test_half_the_strength_crops_around_the_middle():
    rows = torch.arange(20, dtype=torch.uint8)[:, None, None].expand(20, 20, 3).contiguous()
    cropped = build(store_of([rows] * 400), augmentation="crop")
    cropped.strength = 0.5
    images, _ = cropped.training_batch(torch.arange(400), epoch=0, resolution=16)
    tops = grey_levels(images)[:, 0, 0, 0]
    assert sorted(set(tops.tolist())) == [1, 2, 3]


def test_where_rows_start_is_made_anew_for_each_stream(monkeypatch):
    """What one stream of a GPU has made, another would use before it is there."""
    made, images = [], torch.zeros(4, 8, 8, 3, dtype=torch.uint8)
    usual = module.copy_to_device
    monkeypatch.setattr(
        module, "copy_to_device", lambda *given: made.append(given) or usual(*given)
    )
    module._row_starts.cache_clear()
    for stream in (1, 2, 1):
        monkeypatch.setattr(module, "_stream", lambda device, at=stream: at)
        module.shifted(images, torch.zeros(4, dtype=torch.int64), 2)
    assert len(made) == 2
    module._row_starts.cache_clear()
