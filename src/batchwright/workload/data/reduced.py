"""Smaller copies of a store, so that an epoch at a low resolution reads and handles small images.

A copy has every image at the scale of its resolution: a crop of ``resolution`` pixels from the copy
shows the part of the image that a crop of ``side`` pixels shows at the highest resolution, and need
not be resized. Each pixel is the mean over the area that it covers; parts of pixels count by their
area.

A copy is made once, on first use, beside the store, and found by the digest of the store's pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from batchwright.records import DataFacts
from batchwright.workload.data.image_store import ImageStore, shape_of
from batchwright.workload.data.store import Progress, cache_folder, free_bytes, open_part
from batchwright.workload.data.store_writer import StoreWriter

WELL_BELOW = 0.8
"""Largest share of the top resolution for which a copy is made; above it, images are resized."""
_DISK_SHARE = 0.5  # of the free bytes, that a copy may take
_AT_ONCE = 64  # images of one size that are reduced at once
_logger = logging.getLogger(__name__)


def is_well_below(resolution: int, side: int) -> bool:
    """Whether images of ``resolution`` pixels are read from a smaller copy."""
    return resolution <= WELL_BELOW * side


def reduced(
    store: ImageStore, *, side: int, resolution: int, progress: Progress | None = None
) -> ImageStore:
    """The images of ``store``, each ``resolution / side`` times as large.

    Args:
        store: The images, on disk or in memory; the copy is in the same place.
        side: Highest training resolution, in pixels.
        resolution: A lower resolution, in pixels.
        progress: Called as progress(done, total, what) while a copy is made.

    Returns:
        The copy; without room for it on the disk, a store that reduces images as they are read.

    Raises:
        FileError: The cache cannot be written.
    """
    sizes = reduced_sizes(store.sizes, side=side, resolution=resolution)
    origin = store.origin
    if origin is None:
        pixels = torch.cat([part.view(-1) for part in _copies(store, sizes)])
        return ImageStore(pixels, store.labels, sizes)
    wanted, free = int(sizes.prod(1).sum()) * 3, free_bytes()

    def build(writer: StoreWriter) -> DataFacts:
        done = 0
        for part in _copies(store, sizes):
            writer.add("train", part.numpy(), store.labels[done : done + len(part)].numpy())
            done += len(part)
            if progress:
                progress(done, len(store), f"reducing images to {resolution} px")
        return origin.facts

    recipe = {"reduced": origin.digest, "side": side, "resolution": resolution}
    found = open_part(recipe, build if wanted <= _DISK_SHARE * free else None, progress=progress)
    if found is None:
        _logger.warning(
            "a copy of the images at %d px would take %.1f GB and %s has %.1f GB left: they are "
            "reduced in every epoch anew, which is slower", resolution, wanted / 1e9,
            cache_folder(), free / 1e9,
        )  # fmt: skip
        return _Unstored(store, sizes)
    return found


def reduced_sizes(sizes: Tensor, *, side: int, resolution: int) -> Tensor:
    """Heights and widths of the copies, int64 (n, 2), in pixels: rounded, and at least 1."""
    return ((2 * sizes * resolution + side) // (2 * side)).clamp_(min=1)


def area_mean(images: Tensor, height: int, width: int) -> Tensor:
    """Images uint8 (n, any, any, 3), reduced to (n, height, width, 3) by means over equal areas.

    Parts of pixels count by their area. The means are exact but for rounding to whole grey levels.
    """
    count, rows, columns = images.shape[:3]
    # Two matrix products, for rows and columns, each over contiguous memory.
    down = _weights(rows, height) @ images.reshape(count, rows, columns * 3).float()
    turned = down.view(count, height, columns, 3).transpose(1, 2).reshape(count, columns, -1)
    across = (_weights(columns, width) @ turned).view(count, width, height, 3).transpose(1, 2)
    return across.add_(0.5).to(torch.uint8).contiguous()


@lru_cache(256)  # images may have any number of sizes
def _weights(old: int, new: int) -> Tensor:
    """Weight of each of ``old`` pixels in each of ``new`` means, float32 (new, old)."""
    edges = torch.arange(new + 1, dtype=torch.float64) * old / new
    pixels = torch.arange(old, dtype=torch.float64)
    ends = torch.minimum(edges[1:, None], pixels + 1)
    return ((ends - torch.maximum(edges[:-1, None], pixels)).clamp_(min=0) * new / old).float()


def _copies(store: ImageStore, sizes: Tensor) -> Iterator[Tensor]:
    """The reduced images in order; neighbours of equal sizes together: uint8 (n, h, w, 3)."""
    both = torch.cat([store.sizes, sizes], dim=1)
    changes = (both[1:] != both[:-1]).any(dim=1).nonzero().squeeze(1) + 1
    runs = torch.arange(len(store)).tensor_split(changes)
    for indices in (part for run in runs for part in run.split(_AT_ONCE)):
        height, width = sizes[indices[0]].tolist()
        yield area_mean(torch.stack([store.image(int(i)) for i in indices]), height, width)


class _Unstored(ImageStore):
    """Reduced images that are made each time they are read."""

    def __init__(self, store: ImageStore, sizes: Tensor) -> None:
        self._store = store
        self.labels, self.sizes, self.images, self.origin = store.labels, sizes, None, None
        self.pixels = torch.empty(0, dtype=torch.uint8)  # the pixels are not kept
        self.shape = shape_of(sizes)

    def image(self, index: int) -> Tensor:
        """Image ``index`` as uint8 (height, width, 3), reduced now."""
        height, width = self.sizes[index].tolist()
        return area_mean(self._store.image(index)[None], height, width)[0]

    def squares(self, indices: Tensor, tops: Tensor, lefts: Tensor, side: int) -> Tensor:
        """See `ImageStore.squares`."""
        places = zip(indices.tolist(), tops.tolist(), lefts.tolist(), strict=True)
        found = [self.image(i)[top : top + side, left : left + side] for i, top, left in places]
        return torch.stack(found)
