"""The vision part of LLaVA-OneVision: that of LLaVA-NeXT, with a SigLIP and fewer features of large pictures.

::

    x = hidden states of the tower after its last layer                       [N, P, F]
    features = of the whole picture, and of the rows of patches of all its tiles together, without what is padding,
               shrunk (bilinear) to at most those of n tiles, each row followed by image_newline

Where a prompt has several pictures, each is one tile. n is that of ``vision_aspect_ratio``: "anyres_max_9".

Source: arXiv:2408.03326.

Shapes: N tiles, P patches of each, F features of the tower, E of a token of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...dtype import DType
from .llava_next import LlavaNextVision

_SIDE = 384
# What transformers' class has where a file does not.
_DEFAULTS: dict[str, Any] = {
    "image_token_index": 151_646,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [
        [_SIDE * rows, _SIDE * columns] for rows in range(1, 7) for columns in range(1, 7)
    ],
}
_TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14,
    "image_size": _SIDE, "num_hidden_layers": 26, "num_attention_heads": 16, "vision_use_head": False,
}  # fmt: skip


class LlavaOnevisionVision(LlavaNextVision):
    """The vision part of a LLaVA-OneVision."""

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        given = {**_DEFAULTS, **{key: one for key, one in raw.items() if one is not None}}
        tower = {**_TOWER, **given["vision_config"]}
        super().__init__({**given, "vision_config": tower}, config, dtype)
        self.most_tiles = most_tiles(given.get("vision_aspect_ratio", "anyres_max_9"))

    def of_canvas(self, grid: np.ndarray) -> np.ndarray:
        """See :class:`LlavaNextVision`."""
        tower = self.vision_tower.config
        rows, columns = grid.shape[:2]
        side = tower.image_size // tower.patch_size
        ratio = math.sqrt(rows * columns / (self.most_tiles * side**2))
        return shrunk(grid, int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else grid


def most_tiles(name: Any) -> int:
    """The number of tiles of which the features of a picture are kept, of the text ``anyres_max_9``.

    Example:
        >>> most_tiles("anyres_max_9")
        9
    """
    count = name.removeprefix("anyres_max_") if isinstance(name, str) else ""
    if not count.isascii() or not count.isdecimal() or not int(count[:4]):
        raise ValueError(f"'vision_aspect_ratio' must be as 'anyres_max_9' is, not {name!r}")
    return int(count)


def shrunk(grid: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Features ``[R, C, E]`` at fewer rows and columns, by bilinear interpolation between the two next ones.

    Example:
        >>> shrunk(np.arange(4.0)[None, :, None], 1, 2).ravel().tolist()
        [0.5, 2.5]
    """
    for axis, size in enumerate((rows, columns)):
        count = grid.shape[axis]
        at = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(count / size)
        at = np.maximum(at - np.float32(0.5), 0)
        first = np.minimum(at.astype(np.int64), count - 1)
        share = np.expand_dims(at - first, (1, 2) if axis == 0 else (0, 2))
        share = share.astype(grid.dtype)
        next_one = np.take(grid, np.minimum(first + 1, count - 1), axis)
        grid = np.take(grid, first, axis) * (1 - share) + next_one * share
    return grid
