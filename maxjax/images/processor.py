"""The image processor of a checkpoint: pictures become the arrays that its vision model reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserInputError
from ..models.config import read_object
from ..storage.files import is_there
from ..storage.save.beside import Files
from .decode import bands, open_rgb, pillow
from .kinds import Kind, find_kind, standard_size
from .settings import ImageSettings, read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

FILE = "preprocessor_config.json"
OUTER = "processor_config.json"


@dataclass(frozen=True)
class ImageInputs:
    """Pictures as a vision model reads them.

    Attributes:
        pixels: ``float32[N, 3, H, W]``; the tiles of a picture follow each other.
        sizes: ``int64[images, 2]``, the height and width of each picture.
        tiles: ``int64[images]``, how many rows of ``pixels`` each picture has.
    """

    pixels: np.ndarray
    sizes: np.ndarray
    tiles: np.ndarray


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes, crops and normalizes pictures as a checkpoint's ``preprocessor_config.json`` says.

    Results equal those of transformers' processors on Pillow. A call takes one picture or a list of them, each
    anything that :func:`maxjax.images.decode` takes, and returns :class:`ImageInputs`.

    Attributes:
        kind: the name of the kind, for example ``"clip"``.
        settings: what is done, with the keys of the file.

    Example:
        >>> import numpy as np
        >>> processor = ImageProcessor.of({"image_processor_type": "ViTImageProcessor", "size": 32})
        >>> processor(np.zeros((40, 60, 3), np.uint8)).pixels.shape
        (1, 3, 32, 32)
    """

    kind: str
    settings: ImageSettings
    _kind: Kind
    _raw: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, model_type: str | None = None) -> ImageProcessor:
        """Return the processor of some settings.

        Args:
            settings: the content of ``preprocessor_config.json``.
            model_type: that of ``config.json``, for old files that do not name their processor.

        Raises:
            UserInputError: the class of the processor or a setting is not supported, or invalid; the message
                names it.
        """
        kind = find_kind(settings, model_type)
        found = read_settings(
            settings, kind.defaults, kind.keys, is_square=kind.is_square, kind=kind.name
        )
        return cls(kind.name, found, kind, copy.deepcopy(dict(settings)))

    @classmethod
    def in_folder(cls, folder: Path | Files) -> ImageProcessor | None:
        """Return the processor of a checkpoint's folder; None if no file there has settings of one.

        They are in ``preprocessor_config.json``, or under ``image_processor`` in ``processor_config.json``.

        Raises:
            UserInputError: as for :meth:`of`.
            CheckpointError: a file is corrupt or cannot be read.
        """
        settings = read_object(folder / FILE) if is_there(folder / FILE) else None
        outer = read_object(folder / OUTER) if is_there(folder / OUTER) else {}
        if isinstance(inner := outer.get("image_processor"), Mapping):
            settings = inner
        if settings is None:
            return None
        config = read_object(folder / "config.json") if is_there(folder / "config.json") else {}
        return cls.of(settings, model_type=config.get("model_type"))

    def to_dict(self) -> dict[str, Any]:
        """The content of ``preprocessor_config.json``: what the processor was read from."""
        return copy.deepcopy(dict(self._raw))

    def __call__(self, images: Any) -> ImageInputs:
        """Return the inputs of a vision model for one picture, or a list of them.

        Raises:
            UserInputError: there is no picture; one cannot be decoded, or has too many pixels; or their sizes
                differ and the settings do not make them equal.
        """
        items = list(images) if isinstance(images, (list, tuple)) else [images]
        if not items:
            raise UserInputError("expected at least one picture, got an empty list")
        found, sizes, tiles = [], [], []
        for item in items:
            image = open_rgb(item)
            sizes.append((image.height, image.width))
            cut = self._arrays(image)
            tiles.append(len(cut))
            found += cut
        pixels = _stacked(found, self.settings)
        return ImageInputs(pixels, np.array(sizes, np.int64), np.array(tiles, np.int64))

    def _arrays(self, image: Image) -> list[np.ndarray]:
        """The tiles of a picture, each ``float32[3, H, W]``."""
        s = self.settings
        if self._kind.is_float and s.do_resize and s.do_rescale:
            size = standard_size(image.height, image.width, s.size)
            return [_normalized(_resized_floats(image, *size, s) * np.float32(s.rescale_factor), s)]
        levels = _levels(s)
        return [_looked_up(tile, levels) for tile in self._kind.cut(image, s)]


def _levels(settings: ImageSettings) -> np.ndarray:
    """The value that each of the 256 levels of each colour becomes, ``float32[3, 256]``."""
    values = np.arange(256, dtype=np.float64)
    if settings.do_rescale:
        values *= settings.rescale_factor
    levels = np.tile(values.astype(np.float32), (3, 1))
    return _normalized(levels, settings)


def _normalized(values: np.ndarray, settings: ImageSettings) -> np.ndarray:
    """The values ``[3, …]`` less the mean of their colour, divided by its deviation, in float32."""
    if not settings.do_normalize:
        return values
    shape = (3, *[1] * (values.ndim - 1))
    mean = np.array(settings.image_mean, np.float32).reshape(shape)
    return (values - mean) / np.array(settings.image_std, np.float32).reshape(shape)


def _looked_up(tile: Image, levels: np.ndarray) -> np.ndarray:
    """The values of a tile's levels, ``float32[3, H, W]``."""
    found = np.empty((3, tile.height, tile.width), np.float32)
    for top, band in bands(tile):
        pixels = np.asarray(band)
        for colour in range(3):
            found[colour, top : top + band.height] = levels[colour][pixels[:, :, colour]]
    return found


def _resized_floats(image: Image, height: int, width: int, settings: ImageSettings) -> np.ndarray:
    """The levels of an image in another size, not rounded: ``float32[3, height, width]``."""
    found = np.empty((3, height, width), np.float32)
    for colour in range(3):
        # First the width, band after band: a picture in floats has four times the bytes.
        narrow = pillow("PIL.Image").new("F", (width, image.height))
        for top, band in bands(image):
            floats = band.getchannel(colour).convert("F")
            narrow.paste(floats.resize((width, band.height), resample=settings.resample), (0, top))
        found[colour] = np.asarray(narrow.resize((width, height), resample=settings.resample))
    return found


def _stacked(tiles: list[np.ndarray], settings: ImageSettings) -> np.ndarray:
    """The tiles in one array, padded with zeros below and on the right if the settings say so.

    Raises:
        UserInputError: their sizes differ.
    """
    height, width = (max(tile.shape[axis] for tile in tiles) for axis in (1, 2))
    if settings.do_pad and settings.pad_size is not None:
        if height > settings.pad_size["height"] or width > settings.pad_size["width"]:
            raise UserInputError(
                f"a picture of {height} × {width} does not fit into 'pad_size' {dict(settings.pad_size)}"
            )
        height, width = settings.pad_size["height"], settings.pad_size["width"]
    if settings.do_pad:
        found = np.zeros((len(tiles), 3, height, width), np.float32)
        for row, tile in zip(found, tiles, strict=True):
            row[:, : tile.shape[1], : tile.shape[2]] = tile
        return found
    if len({tile.shape for tile in tiles}) > 1:
        shapes = sorted({tile.shape[1:] for tile in tiles})
        raise UserInputError(
            f"pictures of different sizes do not fit into one array: {shapes[0]} and {shapes[-1]}; pass them one by "
            "one, or settings with 'do_pad' or a 'size' of 'height' and 'width'"
        )
    return np.stack(tiles)
