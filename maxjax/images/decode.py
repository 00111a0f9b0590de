"""Decodes a picture, whatever a caller has of it, into RGB pixels.

Pictures are hostile input: formats are chosen by their first bytes from a short list, the number of pixels is
compared with a limit before any is decoded, and every error of a decoder becomes one UserInputError. Nothing is
fetched from a network.
"""

from __future__ import annotations

import binascii
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import CheckpointError, UserInputError, printable
from ..paths import local_path
from ..storage.files import open_regular
from ..storage.limits import Limits, in_force, raising

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image


class _Format(NamedTuple):
    """A format: its name, the first bytes of its files, and Pillow's module and class that decode it."""

    name: str
    signature: bytes
    module: str
    plugin: str


# Pillow's own search would try formats that start other programs (EPS) and warn of sizes by a limit of the whole
# process.
_FORMATS = (
    _Format("PNG", rb"\x89PNG\r\n\x1a\n", "PngImagePlugin", "PngImageFile"),
    _Format("JPEG", rb"\xff\xd8\xff", "JpegImagePlugin", "JpegImageFile"),
    _Format("WebP", rb"RIFF.{4}WEBP", "WebPImagePlugin", "WebPImageFile"),
    _Format("GIF", rb"GIF8[79]a", "GifImagePlugin", "GifImageFile"),
    _Format("BMP", rb"BM", "BmpImagePlugin", "BmpImageFile"),
)
FORMATS = ", ".join(one.name for one in _FORMATS)
_SIGNATURE_BYTES = 16

# A decoder goes through all pixels of a progressive JPEG for each scan, of which an encoder makes about ten; a scan of
# a hostile file has 40 bytes.
_MOST_SCANS = 100
_SCAN = b"\xff\xda"  # the marker that begins a scan; other data never hold it
_PIECE = 1 << 20

_NETWORK = re.compile(r"(https?|ftp)://", re.IGNORECASE)
_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
# The keys of a part of a message that hold its picture.
_PART_KEYS = {"image": ("image", "url", "path"), "image_url": ("image_url",)}

_ORIENTATION = 0x0112  # the tag in EXIF
# Its values, and the names of Pillow's transpositions that put a picture upright.
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
    7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip

# Pixels that are converted at a time, so that the values in between take little memory.
_BAND = 1 << 20


def decode(item: Any, limits: Limits | None = None) -> np.ndarray:
    """Return the RGB pixels of a picture.

    EXIF's orientation is applied; transparency is blended onto white; grey, palettes and CMYK become RGB, and of
    16 bits the upper 8 are kept; an animation gives its first frame. Colour profiles are ignored.

    Args:
        item: a path; the bytes of a file; a ``data:image/…;base64,`` address; an image of Pillow; an array
            ``uint8[H, W, 3]``, ``[H, W, 4]`` (RGBA) or ``[H, W]`` (grey); or a part of a message,
            ``{"type": "image", "image": item}`` or ``{"type": "image_url", "image_url": {"url": item}}``.
            Files may be PNG, JPEG, WebP, GIF or BMP.
        limits: limits on files, of which ``image_pixels`` counts; by default those in force.

    Returns:
        Array ``uint8[H, W, 3]``.

    Raises:
        UserInputError: it is no picture, its format is not supported, it is truncated or corrupt, or has too many
            pixels; the path cannot be read; it is an address in a network; Pillow is not installed.

    Example:
        >>> import numpy as np
        >>> decode(np.array([[0, 255]], np.uint8)).tolist()
        [[[0, 0, 0], [255, 255, 255]]]
    """
    image = open_rgb(item, limits)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, band in bands(image):
        pixels[top : top + band.height] = np.asarray(band)
    return pixels


def is_image(item: Any) -> bool:
    """Return whether an item is a picture and not a text: anything :func:`decode` takes but a ``str`` with a path.

    Example:
        >>> is_image({"type": "image", "image": "cat.png"}), is_image("cat.png"), is_image(b"BM")
        (True, False, True)
    """
    if isinstance(item, str):
        return _DATA.match(item) is not None
    if isinstance(item, Mapping):
        return item.get("type") in _PART_KEYS
    is_pixels = isinstance(item, (bytes, bytearray, memoryview, os.PathLike)) or _is_array(item)
    return is_pixels or _is_pillow(item)


def beside(part: Mapping[str, Any], folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return a part of a message whose picture, if it has a relative path, is in a folder.

    Example:
        >>> beside({"type": "image", "image": "cat.png"}, "/photos")
        {'type': 'image', 'image': '/photos/cat.png'}

    Raises:
        UserInputError: the part holds no picture.
    """
    found = _payload(part)
    is_path = isinstance(found, str) and found and "://" not in found and not _is_data(found)
    return {"type": "image", "image": os.path.join(folder, found)} if is_path else part


def format_name(head: bytes) -> str | None:
    """Return the name of the format of a file that begins with these 16 bytes; None if :func:`decode` does not take it.

    Example:
        >>> format_name(b"GIF89a" + bytes(10)), format_name(b"<html>")
        ('GIF', None)
    """
    found = _format_of(head)
    return None if found is None else found.name


def data_address(picture: str | os.PathLike[str] | Mapping[str, Any]) -> str:
    """Return the picture of a file, or of a part of a message, as an address ``data:image/…;base64,…``.

    An address of a network stays as it is. Pillow is not needed.

    Raises:
        UserInputError: the path cannot be read, or the file is of no format that :func:`decode` takes.
    """
    found = _payload(picture)
    if isinstance(found, str) and ("://" in found or _is_data(found)):
        return found
    with _opened(found) as stream:
        data = stream.read()
    name = _require_format(data[:_SIGNATURE_BYTES], printable(os.fsdecode(found))).name
    return f"data:image/{name.lower()};base64,{binascii.b2a_base64(data, newline=False).decode()}"


def open_rgb(item: Any, limits: Limits | None = None) -> Picture:
    """Return a picture in RGB, upright; arguments and errors are those of :func:`decode`.

    Pillow's image takes 4 bytes a pixel, and there is one; one colour more if it is turned or has transparency, while
    it is resized. While a progressive JPEG is decoded, its coefficients take 3 bytes a pixel more (6 without
    subsampling of colours), and the frames of a WebP decoder 12. ``scripts/bench_images.py`` measures it.
    """
    limits = in_force(limits)
    pillow("PIL.Image")
    item = _payload(item)
    if isinstance(item, (str, os.PathLike)) and not (isinstance(item, str) and _is_data(item)):
        with _opened(item) as stream:
            return _decoded(stream, printable(os.fsdecode(item)), limits)
    if isinstance(item, str):
        item = _data_bytes(item)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return _decoded(io.BytesIO(item), f"picture of {len(item)} bytes", limits)
    image: Any = _of_array(np.asarray(item)) if _is_array(item) and not _is_pillow(item) else item
    if _is_pillow(image):
        return _upright_rgb(image, "picture", limits)
    raise UserInputError(
        "expected a picture (a path, the bytes of a file, a data: address, an image of Pillow, an array "
        f"uint8[H, W, 3], or a part of a message), got {type(item).__name__}"
    )


def pillow(module: str) -> Any:
    """Import a module of Pillow.

    Raises:
        UserInputError: Pillow is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        if error.name not in ("PIL", module):  # a library that Pillow needs does not load
            raise
        raise UserInputError(
            "pictures need the package pillow: pip install maxjax[images]"
        ) from None


def bands(image: Picture) -> Iterator[tuple[int, Image]]:
    """The rows of an image in bands of about a million pixels, each with the number of its first row."""
    rows = max(_BAND // max(image.width, 1), 1)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def check_pixels(width: int, height: int, what: str, limits: Limits) -> None:
    """Refuse a picture of no pixels, or of more than the limit.

    Raises:
        UserInputError: it is empty, or too large.
    """
    if width < 1 or height < 1:
        raise UserInputError(f"{what} has no pixels: {width} × {height}")
    if width * height > limits.image_pixels:
        raise UserInputError(
            f"{what} is too large (expected at most {limits.image_pixels} pixels, found {width} × {height} = "
            f"{width * height}). {raising('image_pixels')}"
        )


# --- what a caller has --------------------------------------------------------------------


def _payload(item: Any) -> Any:
    """The picture inside a part of a message; anything else as it is."""
    if not isinstance(item, Mapping):
        return item
    kind = item.get("type")
    keys = _PART_KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None:
        raise UserInputError(
            f"a part of type {kind!r} is not supported for pictures (supported: {', '.join(_PART_KEYS)})"
        )
    found = next((item[key] for key in keys if item.get(key) is not None), None)
    if kind == "image_url" and isinstance(found, Mapping):
        found = found.get("url")
    if found is None or isinstance(found, Mapping):
        raise UserInputError(
            f"a part of type {kind!r} must hold a picture under the key '{keys[0]}'"
        )
    return found


def _is_data(text: str) -> bool:
    """Whether a text is a ``data:`` address; refuses addresses in a network."""
    if _NETWORK.match(text):
        raise UserInputError(
            f"{printable(text[:80])!r}: pictures are not fetched from a network: download it, and pass the path "
            "or the bytes"
        )
    return text[:5].lower() == "data:"


def _data_bytes(text: str) -> bytes:
    """The bytes in an address ``data:image/…;base64,…``."""
    head = _DATA.match(text)
    if head is None:
        raise UserInputError(
            f"{printable(text[:60])!r}: expected an address data:image/…;base64,… (for example data:image/png;base64,…)"
        )
    try:
        return binascii.a2b_base64(text[head.end() :], strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise UserInputError(f"the data: address is not valid base64: {error}") from None


def _is_pillow(item: Any) -> bool:
    module = sys.modules.get("PIL.Image")  # who has an image of Pillow has imported it
    return module is not None and isinstance(item, module.Image)


def _is_array(item: Any) -> bool:
    """Whether it is an array: NumPy's, JAX's, or another library's."""
    return hasattr(item, "__array__") and hasattr(item, "dtype") and hasattr(item, "shape")


def _of_array(pixels: np.ndarray) -> Image:
    shape = pixels.shape
    if pixels.dtype != np.uint8:
        raise UserInputError(
            f"expected an array of uint8 from 0 to 255, got {pixels.dtype}: scale and convert it first"
        )
    if len(shape) not in (2, 3) or shape[2:] not in ((), (3,), (4,)):
        raise UserInputError(
            f"expected an array [H, W, 3], [H, W, 4] or [H, W], got {list(shape)}: channels are the last axis"
        )
    if 0 in shape:
        raise UserInputError(f"the array has no pixels: {list(shape)}")
    return pillow("PIL.Image").fromarray(np.ascontiguousarray(pixels))


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """The file of a picture while it is read."""
    try:
        file = open_regular(local_path(path))
    except CheckpointError as error:
        raise UserInputError(
            f"{printable(os.fsdecode(path))} is not a picture: {error.problem}"
        ) from error
    try:
        with os.fdopen(file.fd, "rb", closefd=False) as stream:
            yield stream
    finally:
        file.close()


# --- decoding -----------------------------------------------------------------------------


@contextmanager
def _as_input_error(what: str) -> Iterator[None]:
    """Turn every error of Pillow into a UserInputError; its decoders raise a dozen of classes for corrupt files."""
    try:
        yield
    except UserInputError:
        raise
    except Exception as error:
        reason = printable(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise UserInputError(
            f"{what} cannot be decoded, it is truncated or corrupt: {reason}"
        ) from error


def _decoded(stream: IO[bytes], what: str, limits: Limits) -> Picture:
    head = stream.read(_SIGNATURE_BYTES)
    stream.seek(0)
    found = _require_format(head, what)
    plugin = getattr(pillow(f"PIL.{found.module}"), found.plugin)
    if found.name == "JPEG":
        _check_scans(stream, what)
    with _as_input_error(what):
        return _upright_rgb(plugin(stream), what, limits)


def _format_of(head: bytes) -> _Format | None:
    return next((one for one in _FORMATS if re.match(one.signature, head, re.DOTALL)), None)


def _require_format(head: bytes, what: str) -> _Format:
    found = _format_of(head)
    if found is None:
        raise UserInputError(
            f"{what} has an unknown format (supported: {FORMATS}); it begins with {head!r}"
        )
    return found


def _check_scans(stream: IO[bytes], what: str) -> None:
    """Refuse a JPEG of so many scans that decoding it takes minutes."""
    count, last = 0, b""
    while piece := stream.read(_PIECE):
        count += (last + piece).count(_SCAN)
        last = piece[-1:]
    stream.seek(0)
    if count > _MOST_SCANS:
        raise UserInputError(
            f"{what} has too many scans (expected at most {_MOST_SCANS}, found {count})"
        )


def _upright_rgb(image: Image, what: str, limits: Limits) -> Picture:
    """The image in RGB, turned as its EXIF data say."""
    check_pixels(*image.size, what, limits)
    with _as_input_error(what):
        image.load()
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    if image.mode in ("I", "F"):
        raise UserInputError(
            f"{what} has the mode {image.mode!r}, whose values have no fixed range: convert it to 8 bits first"
        )
    if image.mode == "RGB" and turn is None and image.info.get("transparency") is None:
        return image
    return UprightImage(image, turn, what)


class UprightImage:
    """An image whose parts are made RGB and turned when they are needed: there is no second one of all its pixels.

    It has what is used of Pillow's images, with equal results; transparency is blended onto white.

    Args:
        image: an image of Pillow.
        turn: the name of the transposition that puts it upright; None if it is.
        what: what messages call it.
    """

    def __init__(self, image: Image, turn: str | None, what: str):
        self._image, self._what = image, what
        self._turn, self._box = turn, _BOXES[turn]
        # A turn by a quarter swaps the sides.
        self.width, self.height = image.size if turn not in _QUARTERS else image.size[::-1]
        self.size = self.width, self.height

    def crop(self, box: tuple[int, int, int, int]) -> Image:
        """Return a part, in RGB and upright, between its left, upper, right and lower sides."""
        with _as_input_error(self._what):
            part = self._rgb(self._image.crop(self._box(*box, *self._image.size)))
            if self._turn is None:
                return part
            return part.transpose(pillow("PIL.Image").Transpose[self._turn])

    def resize(self, size: tuple[int, int], resample: int) -> Image:
        """Return the image in another size; one colour after the other, which are independent."""
        found = []
        for colour in range(3):
            whole = pillow("PIL.Image").new("L", self.size)
            for top, band in bands(self):
                whole.paste(band.getchannel(colour), (0, top))
            found.append(whole.resize(size, resample))
        return pillow("PIL.Image").merge("RGB", found)

    def _rgb(self, part: Image) -> Image:
        transparent = self._image.info.get("transparency")
        if part.mode.startswith("I;16"):
            part = _upper_bits(part, transparent)
        elif "A" in part.getbands() or transparent is not None:
            white = pillow("PIL.Image").new("RGBA", part.size, "white")
            part = pillow("PIL.Image").alpha_composite(white, part.convert("RGBA"))
        return part.convert("RGB")


# What a caller of open_rgb gets.
Picture: TypeAlias = "Image | UprightImage"


# The sides of a part before it is turned, from those after it and the size of the image before it is turned.
_BOXES: dict[str | None, Callable[..., Any]] = {
    None: lambda left, top, right, bottom, w, h: (left, top, right, bottom),
    "FLIP_LEFT_RIGHT": lambda left, top, right, bottom, w, h: (w - right, top, w - left, bottom),
    "ROTATE_180": lambda left, top, right, bottom, w, h: (w - right, h - bottom, w - left, h - top),
    "FLIP_TOP_BOTTOM": lambda left, top, right, bottom, w, h: (left, h - bottom, right, h - top),
    "TRANSPOSE": lambda left, top, right, bottom, w, h: (top, left, bottom, right),
    "ROTATE_270": lambda left, top, right, bottom, w, h: (top, h - right, bottom, h - left),
    "TRANSVERSE": lambda left, top, right, bottom, w, h: (w - bottom, h - right, w - top, h - left),
    "ROTATE_90": lambda left, top, right, bottom, w, h: (w - bottom, left, w - top, right),
}
_QUARTERS = ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")


def _upper_bits(part: Image, transparent: int | None) -> Image:
    """The upper 8 of 16 bits of grey; the transparent value is white."""
    values = np.asarray(part)
    grey = (values >> 8).astype(np.uint8)
    if transparent is not None:
        grey[values == transparent] = 255
    return pillow("PIL.Image").fromarray(grey)
