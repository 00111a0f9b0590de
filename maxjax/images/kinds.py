"""The kinds of image processors: what each class of transformers does to a picture before it is normalized.

A kind cuts a picture into tiles, resized images of RGB; most kinds have one tile. Sizes are rounded, and images
resized, as transformers' processors on Pillow do it (https://github.com/huggingface/transformers, ``models/*/
image_processing_pil_*.py``), so their results are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import UserInputError
from ..storage.limits import in_force
from .decode import Picture, bands, check_pixels, pillow
from .settings import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    LANCZOS,
    ImageSettings,
    Size,
)

# --- steps --------------------------------------------------------------------------------


def resized(image: Picture, height: int, width: int, settings: ImageSettings) -> Picture:
    """The image in another size.

    Raises:
        UserInputError: the size has no pixels, or too many, as for a picture that is one pixel high.
    """
    if image.size == (width, height):
        return image
    check_pixels(width, height, "the resized picture", in_force())
    return image.resize((width, height), resample=settings.resample)


def standard_size(height: int, width: int, size: Size) -> tuple[int, int]:
    """The height and width of a picture that is resized to ``size``."""
    if "height" in size:
        return size["height"], size["width"]
    if "max_height" in size:
        scale = min(size["max_height"] / height, size["max_width"] / width)
        return int(height * scale), int(width * scale)
    if "shortest_edge" not in size:
        raise UserInputError(
            "preprocessor_config.json: a 'size' of 'longest_edge' alone is not supported for this kind"
        )
    short, long = min(height, width), max(height, width)
    new: float = size["shortest_edge"]
    if "longest_edge" in size and long / short * new > size["longest_edge"]:
        new = size["longest_edge"] * short / long
    edge = int(round(new))
    if short == edge and "longest_edge" in size:
        return height, width
    other = int(new * long / short)
    return (edge, other) if height <= width else (other, edge)


def center_cropped(image: Picture, size: Size) -> Picture:
    """The middle of an image, with black around it if it is smaller."""
    height, width = size["height"], size["width"]
    if image.size == (width, height):
        return image
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return on_canvas(image, height, width, -left, -top)


def on_canvas(
    image: Picture,
    height: int,
    width: int,
    left: int,
    top: int,
    colour: tuple[int, ...] = (0, 0, 0),
) -> Picture:
    """An image of one colour, with ``image`` at ``left`` and ``top``, which may be negative."""
    check_pixels(width, height, "the padded picture", in_force())
    canvas = pillow("PIL.Image").new("RGB", (width, height), colour)
    for down, band in bands(image):
        canvas.paste(band, (left, top + down))
    return canvas


def cropped(image: Picture, left: int, top: int, width: int, height: int) -> Picture:
    """A part of an image, less what would lie outside of it."""
    right, bottom = min(left + width, image.width), min(top + height, image.height)
    return image.crop((left, top, right, bottom))


def on_square(image: Picture, settings: ImageSettings) -> Picture:
    """The image in the middle of a square of the mean colour."""
    side = max(image.size)
    if image.width == image.height:
        return image
    colour = tuple(int(mean * 255) for mean in settings.image_mean)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    return on_canvas(image, side, side, left, top, colour)


# --- tiles --------------------------------------------------------------------------------


def _standard(image: Picture, settings: ImageSettings) -> list[Picture]:
    """One tile: resized, then cropped."""
    if settings.do_resize:
        size = standard_size(image.height, image.width, settings.size)
        image = resized(image, *size, settings)
    if settings.do_center_crop and settings.crop_size is not None:
        image = center_cropped(image, settings.crop_size)
    return [image]


def _llava(image: Picture, settings: ImageSettings) -> list[Picture]:
    """One tile, of a picture that is first padded to a square if the settings say so."""
    return _standard(on_square(image, settings) if settings.do_pad else image, settings)


def _padded_to_square(image: Picture, settings: ImageSettings) -> list[Picture]:
    return _standard(on_square(image, settings), settings)


def _gemma3(image: Picture, settings: ImageSettings) -> list[Picture]:
    """The whole picture, and after it, if it is long, crops along its longer side (pan and scan)."""
    rows, columns = pan_and_scan(image.height, image.width, settings)
    tiles = [image]
    if rows:
        height, width = math.ceil(image.height / rows), math.ceil(image.width / columns)
        tiles += [
            cropped(image, width * column, height * row, width, height)
            for row in range(rows)
            for column in range(columns)
        ]
    return [tile for one in tiles for tile in _standard(one, settings)]


def pan_and_scan(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The rows and columns of Gemma 3's crops of a picture; 0 and 0 if it is not cropped."""
    short, long = min(height, width), max(height, width)
    smallest = settings.pan_and_scan_min_crop_size
    if not settings.do_pan_and_scan or long / short < settings.pan_and_scan_min_ratio_to_activate:
        return 0, 0
    count = max(2, min(long // smallest, math.floor(long / short + 0.5)))
    count = min(settings.pan_and_scan_max_num_crops, count)
    if min(math.ceil(long / count), short) < smallest:
        return 0, 0
    return (1, count) if width >= height else (count, 1)


def _anyres(image: Picture, settings: ImageSettings) -> list[Picture]:
    """The whole picture in one tile, then those of a canvas in the size that fits it best (LLaVA-NeXT)."""
    side, tile = _sides(settings)
    height, width = best_resolution(image.height, image.width, settings.image_grid_pinpoints)
    down, across = height / image.height, width / image.width
    if across < down:
        new = min(math.ceil(image.height * across), height), width
    else:
        new = height, min(math.ceil(image.width * down), width)
    fitted = resized(image, *new, settings)
    canvas = on_canvas(fitted, height, width, (width - new[1]) // 2, (height - new[0]) // 2)
    tiles = [
        cropped(canvas, left, top, tile, tile)
        for top in range(0, height, tile)
        for left in range(0, width, tile)
    ]
    whole = resized(image, *side, settings)
    return [found for one in (whole, *tiles) for found in _standard(one, settings)]


def _sides(settings: ImageSettings) -> tuple[tuple[int, int], int]:
    """The height and width of the tile with the whole picture, and the side of a tile of the canvas."""
    size = settings.size
    shortest = size.get("shortest_edge", 0)
    side = size.get("height", shortest), size.get("width", shortest)
    crop = settings.crop_size or {}
    return side, crop.get("height", 0) or side[0]


def anyres_layout(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The rows and columns of the tiles of LLaVA-NeXT's canvas for a picture."""
    _, tile = _sides(settings)
    best = best_resolution(height, width, settings.image_grid_pinpoints)
    return math.ceil(best[0] / tile), math.ceil(best[1] / tile)


def best_resolution(
    height: int, width: int, resolutions: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The first of the sizes in which most pixels of a picture remain, and of these that waste fewest."""

    def quality(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(resolutions, key=quality)


# No side of a picture is longer before Idefics3 divides it.
_IDEFICS_MOST = 4096


def _idefics3(image: Picture, settings: ImageSettings) -> list[Picture]:
    """Tiles row by row, and after them the whole picture in one tile (Idefics3, SmolVLM)."""
    tile = settings.max_image_size["longest_edge"]
    if settings.do_resize:
        image = resized(image, *_idefics3_size(image.height, image.width, settings), settings)
    if not settings.do_image_splitting:
        return [resized(image, tile, tile, settings)]
    rows, columns = _idefics3_grid(image.height, image.width, tile)
    image = resized(image, rows * tile, columns * tile, settings)
    if rows == columns == 1:
        return [image]
    tiles = [
        cropped(image, tile * column, tile * row, tile, tile)
        for row in range(rows)
        for column in range(columns)
    ]
    return [*tiles, resized(image, tile, tile, settings)]


def idefics3_layout(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The rows and columns of the tiles of a picture; 0 and 0 if it is one tile."""
    if settings.do_resize:
        height, width = _idefics3_size(height, width, settings)
    grid = _idefics3_grid(height, width, settings.max_image_size["longest_edge"])
    return (0, 0) if not settings.do_image_splitting or grid == (1, 1) else grid


def _idefics3_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    size = settings.size
    if "height" in size:
        return size["height"], size["width"]
    if "longest_edge" not in size:
        raise UserInputError(
            "preprocessor_config.json: 'size' must have 'longest_edge', or 'height' and 'width'"
        )
    longest = size["longest_edge"]
    # An even shorter side, and not beyond the longest that there may be.
    ratio = width / height
    if width >= height:
        height, width = int(longest / ratio), longest
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _IDEFICS_MOST:
        height, width = int(_IDEFICS_MOST / ratio), _IDEFICS_MOST
    elif height > width and height > _IDEFICS_MOST:
        height, width = _IDEFICS_MOST, int(_IDEFICS_MOST * ratio)
    return max(height, 1), max(width, 1)


def _idefics3_grid(height: int, width: int, tile: int) -> tuple[int, int]:
    """The rows and columns of tiles into which a picture is stretched."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)


def _pixtral(image: Picture, settings: ImageSettings) -> list[Picture]:
    """One tile of whole patches, no longer than the longest edge."""
    size, patch = settings.size, settings.patch_size
    if settings.do_resize:
        height, width = image.height, image.width
        most = (
            size.get("height", size.get("longest_edge")),
            size.get("width", size.get("longest_edge")),
        )
        if most[0] is None or most[1] is None or "shortest_edge" in size:
            raise UserInputError(
                "preprocessor_config.json: 'size' must have 'longest_edge', or 'height' and 'width'"
            )
        ratio = max(height / most[0], width / most[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        height, width = ((one - 1) // patch + 1 for one in (height, width))
        image = resized(image, height * patch, width * patch, settings)
    if settings.do_center_crop and settings.crop_size is not None:
        image = center_cropped(image, settings.crop_size)
    return [image]


def _qwen2_vl(image: Picture, settings: ImageSettings) -> list[Picture]:
    """One tile of whole groups of patches, with so many pixels as the settings allow."""
    height, width = image.height, image.width
    factor = settings.patch_size * settings.merge_size
    if settings.do_resize:
        return [resized(image, *qwen2_vl_size(height, width, settings), settings)]
    if height % factor or width % factor:
        raise UserInputError(
            f"a picture that is not resized must have sides that {factor} divides, not {height} × {width}"
        )
    return [image]


# Qwen's models refuse longer pictures.
_QWEN_RATIO = 200


def qwen2_vl_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """The height and width that Qwen's processors resize a picture to.

    Raises:
        UserInputError: one side is more than 200 times the other, or the settings have no bounds of pixels.
    """
    factor = settings.patch_size * settings.merge_size
    if settings.size.keys() != {"shortest_edge", "longest_edge"}:
        raise UserInputError(
            "preprocessor_config.json: 'size' must have 'shortest_edge' and 'longest_edge', the bounds of pixels"
        )
    least, most = settings.size["shortest_edge"], settings.size["longest_edge"]
    if max(height, width) > _QWEN_RATIO * min(height, width):
        raise UserInputError(
            f"a picture of {height} × {width} is too long for the model: one side may be at most {_QWEN_RATIO} times "
            "the other"
        )
    found = [round(side / factor) * factor for side in (height, width)]
    if found[0] * found[1] > most:
        scale = math.sqrt(height * width / most)
        found = [
            max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
        ]
    elif found[0] * found[1] < least:
        scale = math.sqrt(least / (height * width))
        found = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return found[0], found[1]


# --- kinds --------------------------------------------------------------------------------


def _no_layout(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    return 0, 0


@dataclass(frozen=True)
class Kind:
    """What the image processors of one class do.

    Attributes:
        name: the name of the kind.
        defaults: the settings that a file need not have.
        cut: makes the tiles of a picture.
        keys: the keys of settings beside those that all kinds have.
        is_square: whether a ``size`` that is one number is that of both sides.
        is_float: whether a picture is resized in floats, without rounding to 256 levels.
        among_others: makes the tiles in place of ``cut`` where a prompt has several pictures.
        layout: the rows and columns of a picture's tiles, of its height and width; 0 and 0 if it has one.
        is_packed: whether the pixels are patches, not tiles.
        has_new_sizes: whether a model needs the sizes of the resized pictures, not those of the given ones.
        pads_batch: whether ``do_pad`` is to pad pictures to the largest of them.
    """

    name: str
    defaults: ImageSettings
    cut: Callable[[Picture, ImageSettings], list[Picture]] = _standard
    keys: frozenset[str] = frozenset({"do_center_crop", "crop_size", "do_pad", "pad_size"})
    is_square: bool = True
    is_float: bool = False
    among_others: Callable[[Picture, ImageSettings], list[Picture]] | None = None
    layout: Callable[[int, int, ImageSettings], tuple[int, int]] = _no_layout
    is_packed: bool = False
    has_new_sizes: bool = False
    pads_batch: bool = True


_SQUARE = MappingProxyType({"height": 224, "width": 224})
_SHORTEST = MappingProxyType({"shortest_edge": 224})
_CLIP = ImageSettings(
    size=_SHORTEST, resample=BICUBIC, do_center_crop=True, crop_size=_SQUARE,
    image_mean=CLIP_MEAN, image_std=CLIP_STD,
)  # fmt: skip

# The sizes of LLaVA's canvases, as multiples of the sides of their tiles.
_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_ANYRES_KEYS = frozenset({"do_center_crop", "crop_size", "do_pad", "image_grid_pinpoints"})
_GRID = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
_IDEFICS3 = Kind(
    "idefics3",
    ImageSettings(size=MappingProxyType({"longest_edge": 1456}), resample=LANCZOS, do_pad=True),
    _idefics3, layout=idefics3_layout, pads_batch=False,
    keys=frozenset({"do_image_splitting", "max_image_size", "do_pad"}),
)  # fmt: skip

KINDS: Mapping[str, Kind] = {
    "CLIPImageProcessor": Kind("clip", _CLIP, is_square=False),
    "BitImageProcessor": Kind("bit", _CLIP, is_square=False),
    "SiglipImageProcessor": Kind(
        "siglip", ImageSettings(size=_SQUARE, resample=BICUBIC), is_square=False
    ),
    "ViTImageProcessor": Kind("vit", ImageSettings(size=_SQUARE)),
    "DeiTImageProcessor": Kind(
        "deit",
        ImageSettings(
            size=MappingProxyType({"height": 256, "width": 256}), resample=BICUBIC,
            do_center_crop=True, crop_size=_SQUARE,
        ),
    ),
    "DINOv3ViTImageProcessor": Kind(
        "dinov3_vit",
        ImageSettings(
            size=_SQUARE, resample=BILINEAR, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD
        ),
        keys=frozenset(),
        is_float=True,
    ),
    "Gemma3ImageProcessor": Kind(
        "gemma3", ImageSettings(size=_SQUARE), _gemma3, layout=pan_and_scan,
        keys=frozenset(
            {"do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops",
             "pan_and_scan_min_ratio_to_activate"}
        ),
    ),
    "LlavaImageProcessor": Kind(
        "llava", _CLIP, _llava, is_square=False, pads_batch=False,
        keys=frozenset({"do_center_crop", "crop_size", "do_pad"}),
    ),
    "LlavaNextImageProcessor": Kind(
        "llava_next", replace(_CLIP, do_pad=True, image_grid_pinpoints=_PINPOINTS), _anyres, layout=anyres_layout,
        is_square=False, pads_batch=False, keys=_ANYRES_KEYS,
    ),
    "LlavaOnevisionImageProcessor": Kind(
        "llava_onevision",
        replace(
            _CLIP, size=MappingProxyType({"height": 384, "width": 384}), do_center_crop=False, crop_size=None,
            do_pad=True, image_grid_pinpoints=_GRID,
        ),
        _anyres, among_others=_padded_to_square, layout=anyres_layout, is_square=False, pads_batch=False,
        keys=_ANYRES_KEYS,
    ),
    "Idefics3ImageProcessor": _IDEFICS3,
    "SmolVLMImageProcessor": _IDEFICS3,
    "PixtralImageProcessor": Kind(
        "pixtral",
        ImageSettings(
            size=MappingProxyType({"longest_edge": 1024}), resample=BICUBIC, image_mean=CLIP_MEAN, image_std=CLIP_STD,
            do_pad=True, patch_size=16,
        ),
        _pixtral, has_new_sizes=True, keys=frozenset({"do_center_crop", "crop_size", "do_pad", "patch_size"}),
    ),
    "Qwen2VLImageProcessor": Kind(
        "qwen2_vl",
        ImageSettings(
            size=MappingProxyType({"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}), resample=BICUBIC,
            image_mean=CLIP_MEAN, image_std=CLIP_STD, patch_size=14,
        ),
        _qwen2_vl, is_packed=True, is_square=False,
        keys=frozenset({"patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"}),
    ),
}  # fmt: skip
"""Name of a class in transformers → its kind."""

# Classes that other names stood for.
_ALIASES = {"Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor"}
# The class of a model's image processor, where the file does not name one.
_OF_MODELS = {
    "clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor", "vit": "ViTImageProcessor",
    "deit": "DeiTImageProcessor", "dinov2": "BitImageProcessor", "dinov2_with_registers": "BitImageProcessor",
    "dinov3_vit": "DINOv3ViTImageProcessor",
}  # fmt: skip


def find_kind(raw: Mapping[str, Any], model_type: str | None = None) -> Kind:
    """Return the kind of image processor that a file names.

    Args:
        raw: the content of ``preprocessor_config.json``.
        model_type: that of ``config.json``, for old files that name no class.

    Raises:
        UserInputError: it names none, or one that is not supported.
    """
    named = raw.get("image_processor_type") or raw.get("feature_extractor_type")
    if named is None:
        named = _OF_MODELS.get(model_type or "")
        if named is None:
            raise UserInputError(
                "preprocessor_config.json has no 'image_processor_type', and that of a model of type "
                f"{model_type!r} is not known"
            )
    stem = str(named).removesuffix("Fast").removesuffix("Pil")
    stem = stem.replace("FeatureExtractor", "ImageProcessor")
    found = KINDS.get(_ALIASES.get(stem, stem))
    if found is None:
        raise UserInputError(
            f"'image_processor_type' {named!r} is not supported (supported: {', '.join(sorted(KINDS))})"
        )
    return found
