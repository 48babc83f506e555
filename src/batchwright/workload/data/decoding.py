"""One image file -> uint8 RGB pixels, upright, at the size at which it is stored."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
    | {".pbm", ".pgm", ".ppm"}
)
"""Suffixes of image files, in lower case."""

# Formats that Pillow decodes itself, without running another program on the file, as for EPS.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_ORIENTATION = 0x0112  # EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
STORE_MARGIN = 1.15  # shorter side of a stored image over the training resolution, for random crops
_REDUCING_GAP = 2.0  # cheap reduction stops at twice the wanted size, the filter does the rest


class UnreadableImageError(Exception):
    """An image cannot be decoded; the message says why."""


def decode(data: bytes, *, top_resolution: int) -> npt.NDArray[np.uint8]:
    """The pixels of an encoded image, as uint8 (height, width, 3).

    The image is turned upright by its EXIF orientation. Transparent parts are laid on white. 16-bit
    grey is divided by 257. CMYK is converted without colour profile. An animation gives its first
    frame.

    Args:
        data: The file's content.
        top_resolution: Largest training resolution, in pixels. A shorter side above 1.15 times the
            resolution is reduced to that, one below the resolution is enlarged to the resolution;
            the aspect ratio is kept.

    Raises:
        UnreadableImageError: The image is damaged, of an unknown format, too large, or has more
            than 16 bits a colour.
    """
    with _readable(io.BytesIO(data)) as image:
        width, height = stored_size(*image.size, top_resolution)
        _refuse_large(width, height)  # a long thin line enlarged
        # JPEG decodes at 1/2, 1/4 or 1/8 of its size for a fraction of the time.
        image.draft(None, (int(width * _REDUCING_GAP), int(height * _REDUCING_GAP)))
        encoded_size = image.size
        image.load()
        # Read after loading: PNG may store it behind the pixels, and TIFF turns itself.
        turn = _UPRIGHT.get(_orientation(image))
        if image.size != encoded_size:
            width, height = height, width
        pixels = _rgb(image)
        if pixels.size != (width, height):
            lanczos = Image.Resampling.LANCZOS
            pixels = pixels.resize((width, height), lanczos, reducing_gap=_REDUCING_GAP)
        return np.asarray(pixels if turn is None else pixels.transpose(turn))


@contextmanager
def _readable(file: BinaryIO) -> Iterator[Image.Image]:
    """Inside, the opened image; any error inside becomes an `UnreadableImageError`."""
    # Pillow's decoders raise many kinds of exceptions on damaged files: SyntaxError, struct.error,
    # zlib.error and others.
    try:
        with Image.open(file, formats=_FORMATS) as image:
            _refuse_large(*image.size)
            yield image
    except UnreadableImageError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own, at twice the limit
        raise UnreadableImageError(_too_large("it has more pixels than")) from error
    except UnidentifiedImageError as error:
        raise UnreadableImageError("not an image of a known format") from error
    except MemoryError as error:
        raise UnreadableImageError("not enough memory to decode it") from error
    except Exception as error:
        raise UnreadableImageError(" ".join(str(error).split()) or type(error).__name__) from error


def decode_square(
    data: bytes,
    *,
    top_resolution: int,
    resolution: int,
    place: tuple[float, float] | None,
) -> npt.NDArray[np.uint8]:
    """A square out of an encoded image, decoded no larger than needed: uint8 (m, m, 3).

    It is the square of ``top_resolution`` pixels that would be cropped out of the image as `decode`
    stores it, but at the smallest scale at which the decoder gives at least ``resolution`` pixels:
    JPEG decodes at 1/2, 1/4 or 1/8 of its size for a fraction of the time, and a square that is
    still twice as large or more is averaged over whole blocks of pixels.

    Args:
        data: The file's content.
        top_resolution: Highest training resolution, in pixels.
        resolution: Wanted side, in pixels; the square has at least as many, unless the image has
            fewer.
        place: Position of the square between top and bottom, and between left and right, each in
            [0, 1]; unset: in the middle.

    Raises:
        UnreadableImageError: As `decode` raises.
    """
    with _readable(io.BytesIO(data)) as image:
        stored = stored_size(*image.size, top_resolution)
        _refuse_large(*stored)  # so that an image is unreadable wherever images are kept
        share = top_resolution / min(stored)
        reduction = resolution / (share * min(image.size))
        image.draft(None, (ceil(image.width * reduction), ceil(image.height * reduction)))
        turned = upright(image)
        edge = min(max(1, round(share * min(turned.size))), *turned.size)
        rooms = turned.height - edge, turned.width - edge
        top, left = (
            room // 2 if place is None else round(room * at)
            for room, at in zip(rooms, place or (0.5, 0.5), strict=True)
        )
        square = turned.crop((left, top, left + edge, top + edge))
        factor = edge // resolution
        return np.array(square.reduce(factor) if factor > 1 else square)


def decode_part(
    data: bytes,
    *,
    top_resolution: int,
    resolution: int,
    part: Callable[[int, int], Sequence[int]],
) -> npt.NDArray[np.uint8]:
    """A part of an encoded image, decoded no larger than needed: uint8 (height, width, 3).

    JPEG is decoded at the smallest scale at which each side of the part has at least ``resolution``
    pixels; the part then begins and ends at the nearest whole pixels.

    Args:
        data: The file's content.
        top_resolution: Highest training resolution, in pixels, for the limit of `decode`.
        resolution: Wanted side, in pixels; the part has as many, but for one at its ends, unless it
            has fewer in the file.
        part: Gives first row, first column, height and width of the part, for the height and width
            of the upright image.

    Raises:
        UnreadableImageError: As `decode` raises.
    """
    with _readable(io.BytesIO(data)) as image:
        _refuse_large(*stored_size(*image.size, top_resolution))
        turned = None if image.format in ("JPEG", "MPO") else upright(image)
        width, height = (turned or image).size
        if turned is None and _orientation(image) in (5, 6, 7, 8):  # a quarter turn
            width, height = height, width
        top, left, rows, columns = part(height, width)
        if turned is None:
            reduction = resolution / min(rows, columns)
            image.draft(None, (ceil(image.width * reduction), ceil(image.height * reduction)))
            turned = upright(image)
        down, across = turned.height / height, turned.width / width
        edges = left * across, top * down, (left + columns) * across, (top + rows) * down
        first_column, first_row, last_column, last_row = map(round, edges)
        return np.array(turned.crop((first_column, first_row, last_column, last_row)))


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height of an encoded image in pixels, from its header, not turned upright.

    Raises:
        UnreadableImageError: The data are not an image, or it is too large.
    """
    with _readable(io.BytesIO(data)) as image:
        return image.size


_STARTS = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*", b"MM\0*")


def is_image(data: bytes) -> bool:
    """Whether bytes begin like an encoded image."""
    plain = data[:1] == b"P" and data[1:2] in b"123456" and data[2:3].isspace()
    return plain or data.startswith(_STARTS)


def encoded(image: Image.Image) -> bytes:
    """Encode an image that a library has decoded, losslessly; equal pixels give equal bytes."""
    if image.mode in ("L", "RGB") and not image.has_transparency_data:
        head = b"P%d %d %d 255\n" % (5 if image.mode == "L" else 6, *image.size)
        return head + image.tobytes()
    if image.has_transparency_data and image.mode in ("P", "L", "RGB"):
        image = image.convert("RGBA")  # TIFF stores transparency in no other way
    file = io.BytesIO()
    image.save(file, "TIFF")
    return file.getvalue()


def stored_size(width: int, height: int, top_resolution: int) -> tuple[int, int]:
    """Width and height at which an image is stored, in pixels; see `decode`."""
    shorter = min(width, height)
    wanted = min(max(shorter, top_resolution), round(STORE_MARGIN * top_resolution))
    if wanted == shorter:
        return width, height
    factor = wanted / shorter
    return max(wanted, round(width * factor)), max(wanted, round(height * factor))


def upright(image: Image.Image) -> Image.Image:
    """The loaded image in mode RGB, turned upright by its orientation; see `decode`."""
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    image = _rgb(image)
    return image if turn is None else image.transpose(turn)


def turned(image: Image.Image) -> Image.Image:
    """The image, loaded, turned upright by its orientation, in its own mode."""
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _refuse_large(width: int, height: int) -> None:
    """Enforce Pillow's limit: a small file may claim to unpack to more than the memory."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise UnreadableImageError(_too_large(f"{width} x {height} pixels are more than"))


def _too_large(what: str) -> str:
    return f"{what} Pillow's limit of {Image.MAX_IMAGE_PIXELS:,}; save it smaller"


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - damaged EXIF data are no reason to refuse good pixels
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    """``image`` in mode RGB; see `decode` for transparency and deep colour."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode == "F":
        raise UnreadableImageError("its pixels are floating-point numbers; save it with 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > 65535:
            raise UnreadableImageError("its pixels have 32 bits; save it with 8 or 16")
        grey = ((levels + 128) // 257).astype(np.uint8)
        if (clear := image.info.get("transparency")) is not None:  # a grey level, in a PNG
            grey[levels == clear] = 255
        image = Image.fromarray(grey)
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image.convert("RGBA"))
    return image.convert("RGB")
