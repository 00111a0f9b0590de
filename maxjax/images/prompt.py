"""The tokens of pictures in a text: each family's placeholder becomes the tokens of one picture.

A chat template puts one placeholder for each picture. The model reads as many tokens as the picture has features,
and in some families others around and between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserInputError, printable
from .inputs import ImageInputs
from .kinds import best_resolution
from .settings import ImageSettings

_MOST = 2**20


@dataclass(frozen=True)
class PictureTokens:
    """What a family writes for a picture.

    Attributes:
        family: the family's name.
        placeholder: the token of a chat template that stands for a picture.
        feature: the token that is repeated for the features of a picture; often that of the placeholder.
        text: the tokens of the picture ``i`` of some inputs.
        after_last: what follows the last picture of a text.
        end: what a text with pictures ends with.
        template: the Jinja template of a chat where the tokenizer has none; None: there is no such template.
    """

    family: str
    placeholder: str
    feature: str
    text: Callable[[ImageInputs, int], str]
    after_last: str = ""
    end: str = ""
    template: str | None = None

    def counts(self, inputs: ImageInputs) -> list[int]:
        """How many features each picture has in a text."""
        return [self.text(inputs, i).count(self.feature) for i in range(len(inputs.sizes))]

    def expand(self, text: str, pictures: list[tuple[ImageInputs, int]]) -> str:
        """The text with the tokens of the pictures in place of its placeholders.

        Raises:
            UserInputError: it has another number of placeholders.
        """
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(pictures):
            raise UserInputError(
                f"the text has {len(parts) - 1} times the placeholder {self.placeholder!r}, and there are "
                f"{len(pictures)} pictures: each picture needs one"
            )
        texts = [self.text(*picture) for picture in pictures]
        if not texts:
            return text
        texts[-1] += self.after_last
        found = parts[0] + "".join(t + part for t, part in zip(texts, parts[1:], strict=True))
        return found + self.end


class _Outer:
    """The settings of ``processor_config.json``, and the named tokens of ``tokenizer_config.json``."""

    def __init__(
        self, raw: Mapping[str, Any], tokens: Mapping[str, Any], file: str = "processor_config.json"
    ):
        self._raw, self._tokens, self._file = raw, tokens, file

    def token(self, key: str, default: str) -> str:
        """A token by its name: the tokenizer's own, else the processor's, else the family's."""
        for found in (self._tokens.get(key), self._raw.get(key)):
            if isinstance(found, Mapping):
                found = found.get("content")
            if isinstance(found, str) and found:
                return found
        return default

    @property
    def pictures(self) -> _Outer:
        """The settings of the image processor."""
        found = self._raw.get("image_processor")
        return _Outer(
            found if isinstance(found, Mapping) else {}, self._tokens, "preprocessor_config.json"
        )

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= _MOST:
            raise UserInputError(
                f"{self._file}: {key!r} must be an integer of at least {least}, got "
                f"{printable(repr(value))[:60]}"
            )
        return value

    def choice(self, key: str, default: str, *choices: str) -> str:
        value = self._raw.get(key)
        value = default if value is None else value
        if value not in (default, *choices):
            raise UserInputError(
                f"{self._file}: {key!r} must be one of {', '.join((default, *choices))}, got "
                f"{printable(repr(value))[:60]}"
            )
        return str(value)


def _gemma3(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    start, feature = (
        outer.token("boi_token", "<start_of_image>"),
        outer.token("image_token", "<image_soft_token>"),
    )
    count = outer.integer("image_seq_length", 256)
    one = f"\n\n{start}{feature * count}{outer.token('eoi_token', '<end_of_image>')}\n\n"

    def text(inputs: ImageInputs, i: int) -> str:
        crops = int(inputs.tiles[i]) - 1
        if not crops:
            return one
        return (
            f"Here is the original image {one} and here are some crops to help you see better "
            + " ".join([one] * crops)
        )

    return PictureTokens("gemma3", start, feature, text)


def _llava(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    token, patch = outer.token("image_token", "<image>"), outer.integer("patch_size")
    more = _additional(outer)

    def text(inputs: ImageInputs, i: int) -> str:
        height, width = inputs.pixels.shape[-2:]
        return token * ((height // patch) * (width // patch) + more)

    return PictureTokens("llava", token, token, text)


def _additional(outer: _Outer) -> int:
    """The tokens of a tile that no patch has, less the class token where a model drops it."""
    strategy = outer.choice("vision_feature_select_strategy", "full", "default")
    return outer.integer("num_additional_image_tokens", 0, 0) - (strategy == "default")


def _llava_next(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    token, patch = outer.token("image_token", "<image>"), outer.integer("patch_size")
    more = _additional(outer)

    def text(inputs: ImageInputs, i: int) -> str:
        height, width = inputs.pixels.shape[-2:]
        tile = height // patch, width // patch
        rows, columns = _canvas(inputs.sizes[i], (height, width), tile, settings)
        return token * (rows * columns + rows + tile[0] * tile[1] + more)

    return PictureTokens("llava_next", token, token, text)


def _canvas(
    size: Any, pixels: tuple[int, int], patches: tuple[int, int], settings: ImageSettings
) -> tuple[int, int]:
    """The rows and columns of features of a picture on its canvas, without the border around it.

    Args:
        size: the height and width of the picture.
        pixels: those of a tile.
        patches: the rows and columns of patches of a tile.
        settings: the settings, which have the sizes of canvases.
    """
    height, width = map(int, size)
    best = best_resolution(height, width, settings.image_grid_pinpoints)
    rows, columns = (b // p * n for b, p, n in zip(best, pixels, patches, strict=True))
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def _llava_onevision(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    token, count = outer.token("image_token", "<image>"), outer.integer("num_image_tokens")
    less = outer.choice("vision_feature_select_strategy", "full", "default") == "default"
    most = _anyres_most(outer)
    side = math.isqrt(count)

    def text(inputs: ImageInputs, i: int) -> str:
        if inputs.tiles[i] == 1:  # one of several pictures, of which each has one tile
            return token * (count + 1 - less)
        pixels = inputs.pixels.shape[-2], inputs.pixels.shape[-1]
        rows, columns = _canvas(inputs.sizes[i], pixels, (side, side), settings)
        ratio = math.sqrt(rows * columns / (most * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return token * (rows * columns + rows + count - less)

    return PictureTokens("llava_onevision", token, token, text)


def _anyres_most(outer: _Outer) -> int:
    """The most tiles whose features LLaVA-OneVision keeps, of the text ``anyres_max_9``."""
    name = outer.choice(
        "vision_aspect_ratio", "anyres_max_9", *(f"anyres_max_{n}" for n in range(1, 100))
    )
    return int(name.removeprefix("anyres_max_"))


def _idefics3(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    around, token, whole = "<fake_token_around_image>", "<image>", "<global-img>"
    features = token * outer.integer("image_seq_len", 169)
    last = f"{around}{whole}{features}{around}"

    def text(inputs: ImageInputs, i: int) -> str:
        rows, columns = map(int, inputs.layouts[i])
        if not rows:
            return last
        lines = [
            "".join(f"{around}<row_{r + 1}_col_{c + 1}>{features}" for c in range(columns)) + "\n"
            for r in range(rows)
        ]
        return "".join(lines) + "\n" + last

    return PictureTokens("idefics3", token, token, text)


def _pixtral(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    token, patch = outer.token("image_token", "[IMG]"), settings.patch_size
    next_row, end = (
        outer.token("image_break_token", "[IMG_BREAK]"),
        outer.token("image_end_token", "[IMG_END]"),
    )

    def text(inputs: ImageInputs, i: int) -> str:
        height, width = map(int, inputs.sizes[i])
        return next_row.join([token * (width // patch)] * (height // patch)) + end

    return PictureTokens("pixtral", token, token, text)


# The pictures of all messages, and then their texts.
_PICTURES_FIRST = """
{%- for kind in ("image", "text") -%}
  {%- for message in messages -%}
    {%- set parts = [{"type": "text", "text": message.content}] if message.content is string else message.content -%}
    {%- for part in parts if part.type == kind -%}
      {{- "PLACEHOLDER" if kind == "image" else part.text -}}
    {%- endfor -%}
  {%- endfor -%}
{%- endfor -%}
"""


def _paligemma(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    token, first = outer.token("image_token", "<image>"), outer.token("bos_token", "<bos>")
    features = token * outer.pictures.integer("image_seq_length")

    def text(inputs: ImageInputs, i: int) -> str:
        return features

    template = _PICTURES_FIRST.replace("PLACEHOLDER", token)
    return PictureTokens("paligemma", token, token, text, first, "\n", template)


def _qwen2_vl(outer: _Outer, settings: ImageSettings) -> PictureTokens:
    token = outer.token("image_token", "<|image_pad|>")

    def text(inputs: ImageInputs, i: int) -> str:
        return token * (int(inputs.grids[i].prod()) // settings.merge_size**2)

    return PictureTokens("qwen2_vl", token, token, text)


_Rules = Callable[[_Outer, ImageSettings], PictureTokens]
# The class of a processor in transformers → its rules.
_PROCESSORS: Mapping[str, _Rules] = {
    "Gemma3Processor": _gemma3, "LlavaProcessor": _llava, "LlavaNextProcessor": _llava_next,
    "LlavaOnevisionProcessor": _llava_onevision, "Idefics3Processor": _idefics3, "SmolVLMProcessor": _idefics3,
    "PaliGemmaProcessor": _paligemma, "PixtralProcessor": _pixtral, "Qwen2VLProcessor": _qwen2_vl,
    "Qwen2_5_VLProcessor": _qwen2_vl, "Qwen3VLProcessor": _qwen2_vl,
}  # fmt: skip
# The same by kind, where no file names the class.
_OF_KINDS: Mapping[str, _Rules] = {
    "gemma3": _gemma3, "llava": _llava, "llava_next": _llava_next, "llava_onevision": _llava_onevision,
    "idefics3": _idefics3, "pixtral": _pixtral, "qwen2_vl": _qwen2_vl,
}  # fmt: skip


def named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that a tokenizer has by name, such as ``image_token``, and the class of its processor."""
    found = {**tokenizer_config}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(more := tokenizer_config.get(key), Mapping):
            found |= more
    return found


def with_outer(settings: ImageSettings, kind: str, outer: Mapping[str, Any]) -> ImageSettings:
    """The settings that ``processor_config.json`` replaces: the patches of Pixtral, which it merges."""
    if kind != "pixtral" or not outer:
        return settings
    found = _Outer(outer, {})
    patch = found.integer("patch_size", 16) * found.integer("spatial_merge_size", 1)
    return replace(settings, patch_size=patch)


def picture_tokens(
    kind: str, settings: ImageSettings, outer: Mapping[str, Any], tokens: Mapping[str, Any]
) -> PictureTokens | None:
    """The rules of a checkpoint's processor; None if it has no texts with pictures, or its class is not supported.

    Args:
        kind: the kind of the image processor.
        settings: its settings.
        outer: the content of ``processor_config.json``, with the class of the processor.
        tokens: what :func:`named_tokens` gives.

    Raises:
        UserInputError: a setting is missing or invalid.
    """
    named = outer.get("processor_class") or tokens.get("processor_class")
    rules = _OF_KINDS.get(kind) if named is None else _PROCESSORS.get(str(named))
    return None if rules is None else rules(_Outer(outer, tokens), settings)
