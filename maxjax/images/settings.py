"""The settings of an image processor: ``preprocessor_config.json``, in the spellings of old and new files.

A setting that changes pixels is read or refused by its key, so that no picture is quietly processed otherwise
than the model was trained with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserInputError, printable

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)

# Pillow's filters by their numbers, as ``resample`` has them.
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)

Size = Mapping[str, int]
# The forms of a size.
_SIZES = (
    {"height", "width"}, {"shortest_edge"}, {"shortest_edge", "longest_edge"}, {"longest_edge"},
    {"max_height", "max_width"},
)  # fmt: skip
_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_MOST = 2**31 - 1
_MOST_PINPOINTS = 1024


@dataclass(frozen=True)
class ImageSettings:
    """What is done to a picture, with the keys of ``preprocessor_config.json``; the defaults are a kind's own.

    A ``size`` has the keys ``height`` and ``width``, ``shortest_edge`` and perhaps ``longest_edge``, ``longest_edge``,
    or ``max_height`` and ``max_width``.
    """

    do_resize: bool = True
    size: Size = dataclasses.field(default_factory=lambda: {"height": 224, "width": 224})
    resample: int = BILINEAR
    do_center_crop: bool = False
    crop_size: Size | None = None
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...] = HALF
    image_std: tuple[float, ...] = HALF
    do_pad: bool = False
    pad_size: Size | None = None
    # Gemma 3
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2
    # LLaVA-NeXT and LLaVA-OneVision: heights and widths that tiles can make
    image_grid_pinpoints: tuple[tuple[int, int], ...] = ()
    # Idefics3 and SmolVLM
    do_image_splitting: bool = True
    max_image_size: Size = dataclasses.field(default_factory=lambda: {"longest_edge": 364})
    # Pixtral and Qwen2-VL
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2


# Keys that every kind has.
COMMON = frozenset(
    "do_resize size resample do_rescale rescale_factor do_normalize image_mean image_std".split()
)
# Keys that say nothing of the pixels, or nothing that could be otherwise: pictures are always RGB.
_IGNORED = frozenset(
    "image_processor_type feature_extractor_type processor_class auto_map do_convert_rgb input_data_format "
    "device disable_grouping return_tensors default_to_square return_row_col_info image_seq_length "
    "image_seq_len video_sampling aspect_ratio_setting use_fast _valid_processor_keys".split()
)  # fmt: skip
# Keys that are only looked at where a step is on.
_OF_STEPS = {"crop_size": "do_center_crop", "pad_size": "do_pad"}


def read_settings(
    raw: Mapping[str, Any],
    defaults: ImageSettings,
    keys: Collection[str],
    *,
    is_square: bool,
    kind: str,
) -> ImageSettings:
    """Return the settings of a file.

    Args:
        raw: the content of the file; null stands for the default, as in transformers.
        defaults: the settings of keys that the file does not have.
        keys: the keys that the kind supports beside :data:`COMMON`.
        is_square: whether a ``size`` that is one number is that of both sides, and not of the shorter one.
        kind: the kind's name, for errors.

    Raises:
        UserInputError: a key is not supported, or its value is invalid; the message names it.
    """
    found: dict[str, Any] = {}
    if "max_pixels" in keys:
        raw = _with_pixels(raw, defaults)
    for key, value in raw.items():
        step = _OF_STEPS.get(key)
        is_off = step is not None and not raw.get(step, getattr(defaults, step))
        if key in _IGNORED or value is None or is_off and key not in keys:
            continue
        if key == "data_format" and value == "channels_first":
            continue
        if key not in COMMON and key not in keys:
            if value is False:  # a step that is off
                continue
            raise UserInputError(
                f"preprocessor_config.json: {printable(key)!r}={printable(repr(value))[:60]} is not supported for "
                f"image processors of kind {kind}"
            )
        try:
            found[key] = _READERS[key](value, is_square)
        except _Invalid as error:
            raise UserInputError(
                f"preprocessor_config.json: {key!r} must be {error}, got {printable(repr(value))[:80]}"
            ) from None
    return dataclasses.replace(defaults, **found)


def _with_pixels(raw: Mapping[str, Any], defaults: ImageSettings) -> Mapping[str, Any]:
    """The settings with ``min_pixels`` and ``max_pixels`` as the edges of ``size``, where transformers has them."""
    pixels = {new: raw[key] for key, new in _PIXELS.items() if raw.get(key) is not None}
    size = raw.get("size") or defaults.size
    if pixels and isinstance(size, Mapping):
        raw = {**raw, "size": {_PIXELS.get(key, key): one for key, one in size.items()} | pixels}
    return {key: value for key, value in raw.items() if key not in _PIXELS}


class _Invalid(Exception):
    """What a value must be."""


def _flag(value: Any, _: bool) -> bool:
    if not isinstance(value, bool):
        raise _Invalid("true or false")
    return value


def _integer(value: Any, _: bool = False) -> int:
    if type(value) is not int or not 0 < value <= _MOST:
        raise _Invalid("an integer above 0")
    return value


def _number(value: Any, _: bool) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _Invalid("a number")
    return float(value)


def _resample(value: Any, _: bool) -> int:
    if type(value) is not int or not NEAREST <= value <= HAMMING:
        raise _Invalid("the number of a filter of Pillow, from 0 to 5")
    return value


def _colour(value: Any, _: bool) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3:
        raise _Invalid("three numbers, of red, green and blue")
    return tuple(_number(one, False) for one in values)


def _deviation(value: Any, _: bool) -> tuple[float, ...]:
    found = _colour(value, False)
    if 0 in found:
        raise _Invalid("three numbers other than 0")
    return found


def _size(value: Any, is_square: bool) -> Size:
    if isinstance(value, list) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    elif type(value) is int:
        value = {"height": value, "width": value} if is_square else {"shortest_edge": value}
    if isinstance(value, Mapping):
        # Files of fast processors have all keys, most of them null.
        value = {_PIXELS.get(key, key): one for key, one in value.items() if one is not None}
    if not isinstance(value, Mapping) or value.keys() not in _SIZES:
        raise _Invalid(
            "one or two integers, or have the keys 'height' and 'width', 'shortest_edge' or 'longest_edge'"
        )
    return {key: _integer(one) for key, one in value.items()}


def _both(value: Any, _: bool) -> Size:
    return _size(value, True)


def _edge(value: Any, _: bool) -> Size:
    """The size of a square tile."""
    found = _size(value, False)
    if set(found) != {"longest_edge"}:
        raise _Invalid("an object with the key 'longest_edge'")
    return found


def _patch(value: Any, _: bool) -> int:
    found = _size(value, True)
    if found.get("height") is None or found["height"] != found["width"]:
        raise _Invalid("an integer, or have equal 'height' and 'width'")
    return found["height"]


def _pinpoints(value: Any, _: bool) -> tuple[tuple[int, int], ...]:
    is_list = isinstance(value, list) and 0 < len(value) <= _MOST_PINPOINTS
    if not is_list or any(not isinstance(one, list) or len(one) != 2 for one in value):
        raise _Invalid(f"a list of 1 to {_MOST_PINPOINTS} pairs [height, width]")
    return tuple((_integer(height), _integer(width)) for height, width in value)


_READERS: dict[str, Callable[[Any, bool], Any]] = {
    "do_resize": _flag, "size": _size, "resample": _resample, "do_center_crop": _flag, "crop_size": _both,
    "do_rescale": _flag, "rescale_factor": _number, "do_normalize": _flag, "image_mean": _colour,
    "image_std": _deviation, "do_pad": _flag, "pad_size": _both, "do_pan_and_scan": _flag,
    "pan_and_scan_min_crop_size": _integer, "pan_and_scan_max_num_crops": _integer,
    "pan_and_scan_min_ratio_to_activate": _number, "image_grid_pinpoints": _pinpoints, "do_image_splitting": _flag,
    "max_image_size": _edge, "patch_size": _patch, "temporal_patch_size": _integer, "merge_size": _integer,
}  # fmt: skip
