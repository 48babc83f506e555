import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batchwright.workload.data.decoding import (
    UnreadableImageError,
    decode,
    decode_square,
    size_of,
    stored_size,
)
from samples import png_that_claims

# Four corners of different colour tell how an image was turned.
CORNERS = np.array(
    [[[250, 0, 0], [0, 250, 0], [0, 0, 250]], [[250, 250, 0], [0, 250, 250], [250, 0, 250]]],
    np.uint8,
)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def decoded(image: Image.Image, form: str = "PNG", top: int = 2, **options: object) -> np.ndarray:
    return decode(encoded(image, form, **options), top_resolution=top)


def test_rgb_pixels_come_out_as_they_are() -> None:
    pixels = decoded(Image.fromarray(CORNERS))
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, CORNERS)


def test_grey_is_repeated_over_the_channels() -> None:
    grey = np.array([[0, 128], [200, 255]], np.uint8)
    assert np.array_equal(decoded(Image.fromarray(grey)), np.repeat(grey[..., None], 3, 2))


def test_black_and_white_become_0_and_255() -> None:
    image = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1")
    assert decoded(image)[..., 0].tolist() == [[0, 255], [255, 0]]


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_not_clipped(form: str) -> None:
    deep = np.array([[0, 257], [32896, 65535]], np.uint16)
    assert decoded(Image.fromarray(deep), form)[..., 0].tolist() == [[0, 1], [128, 255]]


def test_transparent_parts_are_laid_on_white() -> None:
    rgba = np.array([[[100, 50, 0, 255], [100, 50, 0, 0]], [[0, 0, 0, 51], [9, 9, 9, 255]]])
    pixels = decoded(Image.fromarray(rgba.astype(np.uint8)))
    assert pixels.tolist() == [[[100, 50, 0], [255, 255, 255]], [[204, 204, 204], [9, 9, 9]]]


def test_grey_with_transparency_is_laid_on_white() -> None:
    image = Image.merge("LA", [Image.new("L", (2, 2), 10), Image.new("L", (2, 2), 0)])
    assert (decoded(image) == 255).all()


def test_a_transparent_level_of_16_bits_is_laid_on_white() -> None:
    deep = np.array([[0, 257], [32896, 65535]], np.uint16)
    pixels = decoded(Image.fromarray(deep), transparency=257)
    assert pixels[..., 0].tolist() == [[0, 255], [128, 255]]


def palette_image() -> Image.Image:
    image = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "P")
    image.putpalette([250, 0, 0, 0, 250, 0, 0, 0, 250])
    return image


@pytest.mark.parametrize("form", ["PNG", "GIF", "TIFF", "BMP"])
def test_a_palette_becomes_its_colours(form: str) -> None:
    red, green, blue = [250, 0, 0], [0, 250, 0], [0, 0, 250]
    assert decoded(palette_image(), form).tolist() == [[red, green], [blue, green]]


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 255])])
def test_a_transparent_palette_entry_becomes_white(transparency: object) -> None:
    pixels = decoded(palette_image(), transparency=transparency)
    red, white, blue = [250, 0, 0], [255, 255, 255], [0, 0, 250]
    assert pixels.tolist() == [[red, white], [blue, white]]


def test_cmyk_becomes_rgb() -> None:
    pixels = decoded(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "TIFF")
    assert pixels.tolist() == [[[255, 0, 0]] * 2] * 2


def test_cmyk_jpeg_is_not_inverted() -> None:
    pixels = decoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", top=16)
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() <= 4


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_a_rotated_image_is_set_upright(form: str, orientation: int) -> None:
    # What a camera held so writes: the upright image turned the other way (EXIF 2.3, 4.6.4 A).
    turned = {
        1: CORNERS,
        2: CORNERS[:, ::-1],
        3: CORNERS[::-1, ::-1],
        4: CORNERS[::-1],
        5: CORNERS.transpose(1, 0, 2),
        6: np.rot90(CORNERS),
        7: CORNERS[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(CORNERS, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decoded(Image.fromarray(np.ascontiguousarray(turned)), form, exif=exif)
    assert np.array_equal(pixels, CORNERS)


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_a_large_rotated_image_is_reduced_and_set_upright(form: str) -> None:
    upright = np.kron(CORNERS, np.ones((400, 400, 1), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    camera = Image.fromarray(np.ascontiguousarray(np.rot90(upright)))
    pixels = decoded(camera, form, top=40, exif=exif)
    assert pixels.shape == (46, 69, 3)
    centres = pixels[11::23, 11::23].astype(int)
    assert np.abs(centres - CORNERS).max() <= 8


def test_a_jpeg_with_a_second_picture_behind_it_gives_the_first() -> None:
    frames = [Image.new("RGB", (16, 16), grey) for grey in ((90, 90, 90), (200, 200, 200))]
    pixels = decoded(frames[0], "MPO", top=16, save_all=True, append_images=frames[1:])
    assert np.abs(pixels.astype(int) - 90).max() <= 2


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_orientation_data_do_not_spoil_good_pixels() -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x09"
    assert np.array_equal(decoded(Image.fromarray(CORNERS), exif=exif), CORNERS)


@pytest.mark.parametrize(
    ("size", "stored"),
    [
        ((640, 480), (153, 115)),  # reduced to 1.15 x 100, aspect kept
        ((480, 640), (115, 153)),
        ((130, 110), (130, 110)),  # between 100 and 115: as it is
        ((100, 300), (100, 300)),
        ((50, 80), (100, 160)),  # enlarged to 100
        ((115, 115), (115, 115)),
    ],
)
def test_the_shorter_side_is_kept_between_top_resolution_and_its_margin(
    size: tuple[int, int], stored: tuple[int, int]
) -> None:
    assert stored_size(*size, 100) == stored
    height, width, _ = decoded(Image.new("RGB", size), top=100).shape
    assert (width, height) == stored


def test_reduction_averages_what_it_leaves_out() -> None:
    stripes = np.zeros((400, 400, 3), np.uint8)
    stripes[:, ::2] = 255
    inner = decoded(Image.fromarray(stripes), top=20)[2:-2, 2:-2]
    assert np.abs(inner.astype(int) - 127).max() <= 3


def test_the_first_frame_stands_for_an_animation() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    pixels = decoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (pixels == [255, 0, 0]).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("keep", [1, 20, 150, 500])
def test_a_truncated_image_is_unreadable(keep: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for form in ("JPEG", "PNG", "WEBP", "TIFF"):
        with pytest.raises(UnreadableImageError, match=r"\S"):
            decode(encoded(Image.fromarray(noise), form)[:keep], top_resolution=8)


def test_text_and_postscript_are_unreadable() -> None:
    for data in (b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        with pytest.raises(UnreadableImageError, match="not an image of a known format"):
            decode(data, top_resolution=8)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_unreadable(tmp_path: Path) -> None:
    for side in (10_000, 20_000):  # above Pillow's limit, and above twice that
        said = r"pixels .* Pillow's limit of 89,478,485; save it smaller$"
        with pytest.raises(UnreadableImageError, match=said):
            decode(png_that_claims(side, side), top_resolution=8)
        with pytest.raises(UnreadableImageError, match=said):
            size_of(png_that_claims(side, side))


def test_a_line_that_would_be_enlarged_to_a_bomb_is_unreadable() -> None:
    line = encoded(Image.new("L", (1, 30_000)))
    with pytest.raises(UnreadableImageError, match="9000000 pixels are more than"):
        decode(line, top_resolution=300)
    with pytest.raises(UnreadableImageError, match="9000000 pixels are more than"):
        decode_square(line, top_resolution=300, resolution=300, place=None)


def test_deep_colour_is_refused_by_name() -> None:
    with pytest.raises(UnreadableImageError, match="floating-point"):
        decoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(UnreadableImageError, match="32 bits"):
        decoded(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "TIFF")
