"""Pictures from every source become RGB pixels, and what is no picture is one clear error."""

import base64
import io
import os
import random
import struct
import sys
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from maxjax.errors import UserInputError
from maxjax.images import decode, is_image
from maxjax.images.decode import open_rgb
from maxjax.images.processor import ImageProcessor
from maxjax.storage.limits import Limits, allowing
from tests.images.pictures import encoded, hopper, photograph

PICTURE = photograph(12, 17)
LOSSLESS = {"PNG": {}, "BMP": {}, "WEBP": {"lossless": True}}


def address(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("format", LOSSLESS)
def test_lossless_formats_give_their_pixels(format):
    np.testing.assert_array_equal(decode(encoded(PICTURE, format, **LOSSLESS[format])), PICTURE)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_jpeg_is_decoded_as_by_pillow(options):
    data = encoded(photograph(70, 90), "JPEG", **options)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decode(data), np.asarray(image))


def test_a_photograph_from_a_file():
    with Image.open(hopper()) as image:
        np.testing.assert_array_equal(decode(hopper()), np.asarray(image))


def test_all_sources_of_a_picture_are_equal(tmp_path):
    data = encoded(PICTURE)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    items = [
        path, str(path), data, bytearray(data), memoryview(data), Image.fromarray(PICTURE), PICTURE,
        jnp.asarray(PICTURE), np.asfortranarray(PICTURE), address(data),
    ]  # fmt: skip
    items += [{"type": "image", "image": item} for item in items]
    items += [{"type": "image", "path": str(path)}, {"type": "image", "url": address(data)}]
    items += [
        {"type": "image_url", "image_url": u} for u in (address(data), {"url": address(data)})
    ]
    for item in items:
        found = decode(item)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, PICTURE)
        assert is_image(item) or item == str(path)


@pytest.mark.parametrize("item", ["a.png", "a cat", 5, None, ["a"], {"type": "text", "text": "a"}])
def test_a_text_is_no_image(item):
    assert not is_image(item)


# --- orientation, modes and transparency --------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(PICTURE, "PNG", exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decode(data), np.asarray(ImageOps.exif_transpose(image)))
        np.testing.assert_array_equal(decode(image), decode(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_parts_and_resized_images_are_those_of_the_whole(orientation, mode, monkeypatch):
    """Also of images of several bands, for each filter, larger and smaller."""
    monkeypatch.setattr(sys.modules["maxjax.images.decode"], "_BAND", 200)
    draw = np.random.default_rng(orientation)
    image = Image.fromarray(draw.integers(0, 256, (23, 37, len(mode)), dtype=np.uint8))
    data = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(data, "PNG", exif=exif)
    found = open_rgb(data.getvalue())
    whole = Image.fromarray(decode(data.getvalue()))
    turned = ImageOps.exif_transpose(Image.open(data))
    expected = turned if mode == "RGB" else on_white(turned)
    assert found.size == whole.size == turned.size
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(expected))
    np.testing.assert_array_equal(
        np.asarray(found.crop((3, 5, 20, 19))), np.asarray(whole.crop((3, 5, 20, 19)))
    )
    for size in ((11, 50), (60, 7), (37, 11), whole.size):
        for resample in range(6):
            resized = found.resize(size, resample)
            np.testing.assert_array_equal(
                np.asarray(resized), np.asarray(whole.resize(size, resample))
            )


def on_white(image):
    """Blended onto white, as in transformers' convert_to_rgb."""
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_is_blended_onto_white(mode):
    image = Image.fromarray(photograph(40, 30, 4)).convert("RGBA")
    image.putalpha(Image.fromarray(photograph(40, 30, 5)[..., 0]))
    image = image.quantize(32).convert(mode) if mode == "PA" else image.convert(mode)
    np.testing.assert_array_equal(decode(image), on_white(image))


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_transparent_colour_of_a_palette_is_white(format):
    image = Image.fromarray(PICTURE).quantize(8)
    data = encoded(image, format, transparency=3)
    with Image.open(io.BytesIO(data)) as opened:
        expected = on_white(opened)
    found = decode(data)
    np.testing.assert_array_equal(found, expected)
    assert (found[np.asarray(image) == 3] == 255).all()


def test_rgba_arrays_are_blended_as_images():
    pixels = np.concatenate([PICTURE, photograph(12, 17, 7)[..., :1]], axis=-1)
    np.testing.assert_array_equal(decode(pixels), on_white(Image.fromarray(pixels)))


def test_of_16_bits_the_upper_8_are_kept():
    grey = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = decode(encoded(grey))
    np.testing.assert_array_equal(found, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, -1))


def test_grey_and_black_and_white_have_three_equal_channels():
    grey = photograph(9, 11)[..., 0]
    for item in (grey, encoded(grey), encoded(grey, "JPEG")):
        found = decode(item)
        assert found.shape == (9, 11, 3) and (found == found[..., :1]).all()
    bits = Image.fromarray(grey > 128)
    np.testing.assert_array_equal(decode(encoded(bits))[..., 0], np.where(grey > 128, 255, 0))


def test_cmyk_becomes_rgb():
    image = Image.fromarray(photograph(24, 32)).convert("CMYK")
    data = encoded(image, "JPEG", quality=100, subsampling=0)
    assert np.abs(decode(data).astype(int) - np.asarray(image.convert("RGB"))).max() < 16


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(format):
    frames = [Image.fromarray(photograph(20, 24, seed)) for seed in range(3)]
    options = LOSSLESS.get(format, {})
    one = encoded(frames[0], format, **options)
    many = encoded(
        frames[0], format, save_all=True, append_images=frames[1:], duration=100, **options
    )
    np.testing.assert_array_equal(decode(many), decode(one))


def test_large_pictures_are_converted_in_bands():
    """More pixels than a band has, of a width that does not divide it."""
    grey = photograph(1103, 1201)[..., 0]
    np.testing.assert_array_equal(decode(grey), np.repeat(grey[..., None], 3, -1))


# --- what is refused ----------------------------------------------------------------------

GOOD = {
    format: encoded(photograph(40, 50), format) for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
}


@pytest.mark.parametrize("format", GOOD)
@pytest.mark.parametrize("part", [0.2, 0.6])
def test_a_truncated_file_is_refused(format, part):
    with pytest.raises(UserInputError, match="truncated or corrupt"):
        decode(GOOD[format][: int(len(GOOD[format]) * part)])


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (b"", "unknown format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PNG, JPEG, WebP, GIF, BMP"),
        (encoded(PICTURE, "TIFF"), "PNG, JPEG, WebP, GIF, BMP"),
        (b"<html></html>", "unknown format"),
        ("https://example.com/a.png", "network"),
        ("HTTP://example.com/a.png", "network"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "network"),
        ("gs://bucket/a.png", "gs://"),
        ("data:text/plain;base64,AAAA", "data:image"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,A!!A", "base64"),
        ({"type": "video", "video": "a.mp4"}, "'video'"),
        ({"type": "image"}, "'image'"),
        ({"type": "image_url", "image_url": {}}, "'image_url'"),
        ({"image": PICTURE}, "None"),
        (5, "int"),
        (None, "NoneType"),
        (PICTURE.astype(np.float32), "float32"),
        (PICTURE.astype(np.int64), "int64"),
        (PICTURE.transpose(2, 0, 1), "last axis"),
        (PICTURE[None], "last axis"),
        (PICTURE[:0], "no pixels"),
        (Image.new("F", (3, 3)), "'F'"),
        (Image.new("I", (3, 3)), "'I'"),
        (Image.new("RGB", (0, 3)), "no pixels"),
        ("", "empty"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(item, says):
    with pytest.raises(UserInputError, match=says):
        decode(item)


def test_paths_that_hold_no_file_are_refused_by_name(tmp_path):
    with pytest.raises(UserInputError, match=r"gone\.png"):
        decode(tmp_path / "gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("pipe.png", "."):
        with pytest.raises(UserInputError, match="not a picture"):
            decode(tmp_path / name)


def test_errors_name_the_file_and_its_bytes_are_printable(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"\x1b[2Jno picture")
    with pytest.raises(UserInputError, match=r"a\.png") as caught:
        decode(path)
    assert str(caught.value).isprintable()


def png(width, height):
    def chunk(name, content):
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def jpeg(width, height):
    data = bytearray(GOOD["JPEG"])
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


BOMBS = {
    "png": png(31_623, 31_623),
    "jpeg": jpeg(65_500, 65_500),
    "bmp": GOOD["BMP"][:18] + struct.pack("<ii", 31_623, 31_623) + GOOD["BMP"][26:],
    "gif": GOOD["GIF"][:6] + struct.pack("<HH", 65_535, 65_535) + GOOD["GIF"][10:],
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_billion_declared_pixels_are_refused(kind):
    with pytest.raises(UserInputError, match="image_pixels=N"):
        decode(BOMBS[kind])


def test_a_jpeg_of_many_scans_is_refused():
    """Each of its scans, of a few bytes, would be decoded over all pixels."""
    data = encoded(PICTURE, "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    np.testing.assert_array_equal(decode(data[:-2] + last * 20 + data[-2:]).shape, PICTURE.shape)
    with pytest.raises(UserInputError, match="at most 100, found 1010"):
        decode(data[:-2] + last * 1000 + data[-2:])
    spread = data[:-2] + (last + bytes(90_001)) * 101 + data[-2:]  # in several pieces
    with pytest.raises(UserInputError, match="too many scans"):
        decode(spread)


def test_the_limit_on_pixels_can_be_lowered_and_raised():
    with pytest.raises(UserInputError, match="at most 203 pixels, found 17 × 12 = 204"):
        decode(PICTURE, Limits(image_pixels=203))
    with allowing(Limits(image_pixels=203)), pytest.raises(UserInputError, match="image_pixels=N"):
        decode(encoded(PICTURE))
    assert decode(PICTURE, Limits(image_pixels=204)).shape == PICTURE.shape


def test_a_strip_that_would_grow_beyond_the_limit_is_refused():
    processor = ImageProcessor.of({"image_processor_type": "CLIPImageProcessor"})
    with pytest.raises(UserInputError, match="the resized picture is too large"):
        processor(np.zeros((1, 700_000, 3), np.uint8))


@pytest.mark.parametrize("format", GOOD)
def test_damaged_files_are_decoded_or_refused(format):
    draw = random.Random(format)
    for _ in range(150):
        data = bytearray(GOOD[format])
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        data = data[: draw.randrange(8, len(data))] if draw.random() < 0.2 else data
        try:
            assert decode(bytes(data), Limits(image_pixels=1 << 20)).ndim == 3
        except UserInputError as error:
            assert str(error).isprintable()


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    for name in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserInputError, match=r"pip install maxjax\[images\]"):
        decode(Path("a.png"))
