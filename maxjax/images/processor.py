"""The image processor of a checkpoint: pictures become the arrays that its vision model reads."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import UserInputError
from ..models.config import read_object
from ..storage.files import is_there
from ..storage.save.beside import Files
from .decode import Picture, bands, open_rgb, pillow
from .inputs import ImageInputs
from .kinds import Kind, find_kind, standard_size
from .prompt import PictureTokens, named_tokens, picture_tokens, with_outer
from .settings import ImageSettings, Size, read_settings

FILE = "preprocessor_config.json"
OUTER = "processor_config.json"


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes, crops and normalizes pictures as a checkpoint's ``preprocessor_config.json`` says.

    Results equal those of transformers' processors on Pillow. A call takes one picture or a list of them, each
    anything that :func:`maxjax.images.decode` takes, and returns :class:`ImageInputs`.

    Attributes:
        kind: the name of the kind, for example ``"clip"``.
        settings: what is done, with the keys of the file.
        tokens: what stands for a picture in a text; None where models read no such texts.

    Example:
        >>> import numpy as np
        >>> processor = ImageProcessor.of({"image_processor_type": "ViTImageProcessor", "size": 32})
        >>> processor(np.zeros((40, 60, 3), np.uint8)).pixels.shape
        (1, 3, 32, 32)
    """

    kind: str
    settings: ImageSettings
    tokens: PictureTokens | None
    _kind: Kind
    _settings: Mapping[str, Any]
    _files: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        outer: Mapping[str, Any] = MappingProxyType({}),
        *,
        tokenizer_config: Mapping[str, Any] = MappingProxyType({}),
        model_type: str | None = None,
    ) -> ImageProcessor:
        """Return the processor of some settings.

        Args:
            settings: the content of ``preprocessor_config.json``.
            outer: the content of ``processor_config.json``.
            tokenizer_config: the content of ``tokenizer_config.json``, which may name the tokens of pictures.
            model_type: that of ``config.json``, for old files that do not name their processor.

        Raises:
            UserInputError: the class of the processor or a setting is not supported, or invalid; the message
                names it.
        """
        kind = find_kind(settings, model_type)
        found = read_settings(
            settings, kind.defaults, kind.keys, is_square=kind.is_square, kind=kind.name
        )
        settings = copy.deepcopy(dict(settings))
        files = {FILE: settings} | ({OUTER: copy.deepcopy(dict(outer))} if outer else {})
        if named := settings.get("processor_class"):
            outer = {"processor_class": named, **outer}
        found = with_outer(found, kind.name, outer)
        outer = {"image_processor": settings, **outer}
        tokens = picture_tokens(kind.name, found, outer, named_tokens(tokenizer_config))
        return cls(kind.name, found, tokens, kind, settings, files)

    @classmethod
    def in_folder(cls, folder: Path | Files) -> ImageProcessor | None:
        """Return the processor of a checkpoint's folder; None if no file there has settings of one.

        They are in ``preprocessor_config.json``, or under ``image_processor`` in ``processor_config.json``.

        Raises:
            UserInputError: as for :meth:`of`.
            CheckpointError: a file is corrupt or cannot be read.
        """
        files = {name: _optional(folder / name) for name in (FILE, OUTER)}
        settings = files[OUTER].get("image_processor") or files[FILE]
        if not isinstance(settings, Mapping) or not settings:
            return None
        found = cls.of(
            settings, files[OUTER], tokenizer_config=_optional(folder / "tokenizer_config.json"),
            model_type=_optional(folder / "config.json").get("model_type"),
        )  # fmt: skip
        return dataclasses.replace(found, _files={name: one for name, one in files.items() if one})

    def to_dict(self) -> dict[str, Any]:
        """The settings that the processor was read from, with the keys of ``preprocessor_config.json``."""
        return copy.deepcopy(dict(self._settings))

    def files(self) -> dict[str, str]:
        """The files, by name, from which :meth:`in_folder` and transformers make this processor."""
        return {name: json.dumps(one, indent=2) + "\n" for name, one in self._files.items()}

    def __call__(self, images: Any, *, of: int | None = None) -> ImageInputs:
        """Return the inputs of a vision model for one picture, or a list of them.

        Args:
            images: one picture, or a list of those of a prompt.
            of: how many pictures the prompt has, if not all of them are passed: of several, LLaVA-OneVision makes
                one tile each.

        Raises:
            UserInputError: there is no picture; one cannot be decoded, or has too many pixels; or their sizes
                differ and the settings do not make them equal.
        """
        items = list(images) if isinstance(images, (list, tuple)) else [images]
        if not items:
            raise UserInputError("expected at least one picture, got an empty list")
        kind, s, is_alone = self._kind, self.settings, (of or len(items)) == 1
        found, sizes, tiles, layouts, grids = [], [], [], [], []
        for item in items:
            image = open_rgb(item)
            height, width = image.height, image.width
            cut = self._arrays(image, is_alone)
            del image
            tiles.append(len(cut))
            layouts.append(kind.layout(height, width, s) if tiles[-1] > 1 else (0, 0))
            sizes.append(cut[0].shape[1:] if kind.has_new_sizes else (height, width))
            grids.append((0, 0, 0))
            if kind.is_packed:
                grids[-1] = (1, *(side // s.patch_size for side in cut[0].shape[1:]))
                cut = [_patches(cut[0], s)]
                tiles[-1] = len(cut[0])
            found += cut
        pads = s.do_pad and kind.pads_batch
        inputs = ImageInputs(
            np.concatenate(found) if kind.is_packed else _stacked(found, pads, s.pad_size),
            sizes=np.array(sizes, np.int64), tiles=np.array(tiles, np.int64), layouts=np.array(layouts, np.int64),
            grids=np.array(grids, np.int64), counts=np.zeros(len(items), np.int64),
        )  # fmt: skip
        if self.tokens is None:
            return inputs
        return dataclasses.replace(inputs, counts=np.array(self.tokens.counts(inputs), np.int64))

    def expand(self, text: str, inputs: ImageInputs | Sequence[ImageInputs]) -> str:
        """Return a text with the tokens of its pictures in place of their placeholders.

        Args:
            text: what a chat template gives, with one placeholder for each picture.
            inputs: the pictures in their order: one call's inputs, or those of several calls.

        Raises:
            UserInputError: the text has another number of placeholders; or texts with pictures are not supported
                for this processor.
        """
        if self.tokens is None:
            named = self._settings.get("processor_class")
            raise UserInputError(
                f"texts with pictures are not supported for an image processor of kind {self.kind!r}"
                + (f" and 'processor_class' {named!r}" if named else "")
            )
        given = [inputs] if isinstance(inputs, ImageInputs) else inputs
        return self.tokens.expand(text, [(one, i) for one in given for i in range(len(one.sizes))])

    def _arrays(self, image: Picture, is_alone: bool) -> list[np.ndarray]:
        """The tiles of a picture, each ``float32[3, H, W]``."""
        s = self.settings
        if self._kind.is_float and s.do_resize and s.do_rescale:
            size = standard_size(image.height, image.width, s.size)
            return [_normalized(_resized_floats(image, *size, s) * np.float32(s.rescale_factor), s)]
        levels = _levels(s)
        cut = self._kind.cut if is_alone else self._kind.among_others or self._kind.cut
        return [_looked_up(tile, levels) for tile in cut(image, s)]


def _optional(path: Any) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_object(path) if is_there(path) else {}


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


def _looked_up(tile: Picture, levels: np.ndarray) -> np.ndarray:
    """The values of a tile's levels, ``float32[3, H, W]``."""
    found = np.empty((3, tile.height, tile.width), np.float32)
    for top, band in bands(tile):
        pixels = np.asarray(band)
        for colour in range(3):
            found[colour, top : top + band.height] = levels[colour][pixels[:, :, colour]]
    return found


def _resized_floats(image: Picture, height: int, width: int, settings: ImageSettings) -> np.ndarray:
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


def _patches(picture: np.ndarray, settings: ImageSettings) -> np.ndarray:
    """The patches of a picture ``[3, H, W]``: those that are merged into one feature follow each other.

    A picture is a film of equal frames, as many as a patch has.
    """
    p, m = settings.patch_size, settings.merge_size
    rows, columns = (side // (p * m) for side in picture.shape[1:])
    split = picture.reshape(3, rows, m, p, columns, m, p)
    split = split.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    split = np.broadcast_to(
        split, (*split.shape[:5], settings.temporal_patch_size, *split.shape[6:])
    )
    return split.reshape(rows * columns * m * m, -1)


def _stacked(tiles: list[np.ndarray], pads: bool, pad_size: Size | None) -> np.ndarray:
    """The tiles in one array; with ``pads`` with zeros below and on the right, up to a size or that of the largest.

    Raises:
        UserInputError: their sizes differ.
    """
    height, width = (max(tile.shape[axis] for tile in tiles) for axis in (1, 2))
    if pads and pad_size is not None:
        if height > pad_size["height"] or width > pad_size["width"]:
            raise UserInputError(
                f"a picture of {height} × {width} does not fit into 'pad_size' {dict(pad_size)}"
            )
        height, width = pad_size["height"], pad_size["width"]
    if pads:
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
