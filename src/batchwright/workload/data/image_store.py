"""Decoded images in memory, or mapped into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchwright.records import DataFacts


@dataclass(frozen=True)
class Origin:
    """Identity of a store's images.

    Attributes:
        digest: SHA-256 of pixels and index: equal for equal images and labels.
        facts: Facts of the data set.
    """

    digest: str
    facts: DataFacts


def shape_of(sizes: torch.Tensor) -> tuple[int, int] | None:
    """Height and width in pixels if all of ``sizes`` (n, 2) agree, else `None`."""
    if not bool((sizes == sizes[0]).all()):
        return None
    height, width = sizes[0].tolist()
    return height, width


class ImageStore:
    """The images of one part (training or held-out) of a data set, for reading only.

    All workers share one copy in the page cache; a copy in each worker's own memory would not be
    faster (docs/log.md, the data path).

    Args:
        pixels: uint8, flat: image after image, each of height x width x 3 values.
        labels: int64 (N,), class of each image, on the CPU.
        sizes: int64 (N, 2), height and width of each image, in pixels.
        origin: Identity of the images; ``None`` for images in memory.

    All arguments are attributes, too.

    Attributes:
        shape: Height and width in pixels, if those of all images are equal; else `None`.
        images: uint8 (N, height, width, 3), a view of the pixels, if ``shape`` is set; else `None`.

    Raises:
        ValueError: The arguments do not fit together.
    """

    def __init__(
        self,
        pixels: torch.Tensor,
        labels: torch.Tensor,
        sizes: torch.Tensor,
        origin: Origin | None = None,
    ) -> None:
        self.labels = labels
        self.sizes = sizes
        self.origin = origin
        self.pixels = pixels
        ends = (sizes[:, 0] * sizes[:, 1] * 3).cumsum(0)
        if len(labels) != len(sizes) or int(ends[-1]) != len(pixels):
            raise ValueError(f"{len(pixels)} pixel values do not make {len(labels)} such images")
        self._starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        self.shape = shape_of(sizes)
        self.images: torch.Tensor | None = None
        if self.shape is not None:
            self.images = pixels.view(len(labels), *self.shape, 3)

    @classmethod
    def from_images(cls, images: torch.Tensor, labels: torch.Tensor) -> ImageStore:
        """A store of uint8 ``images`` (N, height, width, 3) in memory."""
        sizes = torch.tensor(images.shape[1:3]).expand(len(images), 2)
        return cls(images.reshape(-1), labels, sizes)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> torch.Tensor:
        """Image ``index`` as uint8 (height, width, 3), a view of the store."""
        height, width = self.sizes[index].tolist()
        start = int(self._starts[index])
        return self.pixels[start : start + height * width * 3].view(height, width, 3)

    def squares(
        self, indices: torch.Tensor, tops: torch.Tensor, lefts: torch.Tensor, side: int
    ) -> torch.Tensor:
        """A square out of each of some images: uint8 (n, side, side, 3).

        All rows of all squares are copied at once, as byte ranges, which is quicker than image by
        image (docs/log.md, the data path at low resolutions).

        Args:
            indices: Indices of the images, int64 (n,).
            tops: First row of each square in its image, int64 (n,).
            lefts: First column of each square in its image, int64 (n,).
            side: Side of the squares, in pixels; they lie inside their images.
        """
        return squares_at(self.pixels, self.rows(indices, tops, lefts, side), side)

    def rows(
        self, indices: torch.Tensor, tops: torch.Tensor, lefts: torch.Tensor, side: int
    ) -> torch.Tensor:
        """First byte in ``pixels`` of each row of such squares: int64 (n * side,)."""
        row_bytes = self.sizes[indices, 1] * 3
        firsts = self._starts[indices] + tops * row_bytes + lefts * 3
        return (firsts[:, None] + torch.arange(side) * row_bytes[:, None]).view(-1)

    def rectangles(
        self, indices: torch.Tensor, parts: torch.Tensor
    ) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Rectangles of one size, that of the largest part, each with the part of an image in it.

        A rectangle begins with its part, or so much further left that it ends inside ``pixels``.
        Beyond the part it has pixels of anywhere.

        Args:
            indices: Indices of the images, int64 (n,).
            parts: First row, first column, height and width of each part, int64 (n, 4).

        Returns:
            First byte in ``pixels`` of each row, int64 (n * height,); their width in pixels; and
            the column of each rectangle with which its part begins, int64 (n,).
        """
        tops, lefts, heights, widths = parts.unbind(1)
        width = int(widths.max())
        last = len(self.pixels) - width * 3
        rows = self.rows(indices, tops, lefts, int(heights.max())).view(len(indices), -1)
        beyond = (rows.gather(1, heights[:, None] - 1) - last).clamp_(min=0)
        return (rows - beyond).clamp_(max=last).view(-1), width, beyond[:, 0] // 3


def squares_at(pixels: torch.Tensor, rows: torch.Tensor, side: int) -> torch.Tensor:
    """Squares (n, side, side, 3) whose rows start at the bytes ``rows`` (n * side,)."""
    return rectangles_at(pixels, rows, side, side)


def rectangles_at(
    pixels: torch.Tensor, rows: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Rectangles (n, height, width, 3) whose rows start at the bytes ``rows`` (n * height,)."""
    return pixels.unfold(0, width * 3, 1).index_select(0, rows).view(-1, height, width, 3)
