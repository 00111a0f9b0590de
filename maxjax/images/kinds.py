"""The kinds of image processors: what each class of transformers does to a picture before it is normalized.

A kind cuts a picture into tiles, resized images of RGB; most kinds have one tile. Sizes are rounded, and images
resized, as transformers' processors on Pillow do it (https://github.com/huggingface/transformers, ``models/*/
image_processing_pil_*.py``), so their results are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import UserInputError
from ..storage.limits import in_force
from .decode import check_pixels, pillow
from .settings import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageSettings,
    Size,
)

if TYPE_CHECKING:
    from PIL.Image import Image


# --- steps --------------------------------------------------------------------------------


def resized(image: Image, height: int, width: int, settings: ImageSettings) -> Image:
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


def center_cropped(image: Image, size: Size) -> Image:
    """The middle of an image, with black around it if it is smaller."""
    height, width = size["height"], size["width"]
    if image.size == (width, height):
        return image
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return on_canvas(image, height, width, -left, -top)


def on_canvas(
    image: Image, height: int, width: int, left: int, top: int, colour: tuple[int, ...] = (0, 0, 0)
) -> Image:
    """An image of one colour, with ``image`` at ``left`` and ``top``, which may be negative."""
    check_pixels(width, height, "the padded picture", in_force())
    canvas = pillow("PIL.Image").new("RGB", (width, height), colour)
    canvas.paste(image, (left, top))
    return canvas


def _standard(image: Image, settings: ImageSettings) -> list[Image]:
    if settings.do_resize:
        size = standard_size(image.height, image.width, settings.size)
        image = resized(image, *size, settings)
    if settings.do_center_crop and settings.crop_size is not None:
        image = center_cropped(image, settings.crop_size)
    return [image]


# --- kinds --------------------------------------------------------------------------------


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
    """

    name: str
    defaults: ImageSettings
    cut: Callable[[Image, Any], list[Image]] = _standard
    keys: frozenset[str] = frozenset({"do_center_crop", "crop_size", "do_pad", "pad_size"})
    is_square: bool = True
    is_float: bool = False


_SQUARE = MappingProxyType({"height": 224, "width": 224})
_SHORTEST = MappingProxyType({"shortest_edge": 224})
_CLIP = ImageSettings(
    size=_SHORTEST, resample=BICUBIC, do_center_crop=True, crop_size=_SQUARE,
    image_mean=CLIP_MEAN, image_std=CLIP_STD,
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
}  # fmt: skip
"""Name of a class in transformers → its kind."""

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
    found = KINDS.get(stem.replace("FeatureExtractor", "ImageProcessor"))
    if found is None:
        raise UserInputError(
            f"'image_processor_type' {named!r} is not supported (supported: {', '.join(sorted(KINDS))})"
        )
    return found
