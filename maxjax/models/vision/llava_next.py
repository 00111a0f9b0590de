"""The vision part of LLaVA-NeXT (1.6): that of LLaVA, over a picture as a whole and over tiles of it.

::

    features = of the whole picture, and of the rows of patches of all its tiles together, without what is padding,
               each row followed by image_newline

Source: https://llava-vl.github.io/blog/2024-01-30-llava-next/.

Shapes: N tiles, P patches of each, E features of a token of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.split import REPLICATED
from ...graph.weight.weight import Weight
from .llava import LlavaVision
from .part import PictureFeatures


class LlavaNextVision(LlavaVision):
    """The vision part of a LLaVA-NeXT."""

    names: ClassVar[tuple[str, ...]] = ("vision_tower", "multi_modal_projector", "image_newline")

    def __init__(self, raw: Mapping[str, Any], config: Any, dtype: DType):
        super().__init__(raw, config, dtype)
        self.resolutions = tuple((int(h), int(w)) for h, w in raw["image_grid_pinpoints"])
        self.image_newline = Weight("image_newline", dtype, (config.hidden_size,), DeviceRef.CPU())

    def encode(self, inputs: Any, run: Callable[..., Any]) -> PictureFeatures:
        """See :class:`VisionPart`."""
        tiles = self.of_tiles(inputs.pixels, run)  # [N, P, E]
        newline = np.asarray(self.image_newline.value).astype(tiles.dtype)
        if len(tiles) == 1:
            return PictureFeatures(np.concatenate([tiles[0], newline[None]]))
        tower = self.vision_tower.config
        side, size = tower.image_size // tower.patch_size, tower.image_size
        height, width = best_resolution(inputs.sizes[0], self.resolutions)
        rows, columns = height // size, width // size
        grid = tiles[1:].reshape(rows, columns, side, side, -1).swapaxes(1, 2)
        grid = unpadded(grid.reshape(rows * side, columns * side, -1), inputs.sizes[0])
        grid = self.of_canvas(grid)
        lines = np.broadcast_to(newline, (len(grid), 1, len(newline)))
        grid = np.concatenate([grid, lines], axis=1).reshape(-1, len(newline))
        return PictureFeatures(np.concatenate([tiles[0], grid]))

    def of_canvas(self, grid: np.ndarray) -> np.ndarray:
        """Return the features that are kept of those ``[rows, columns, E]`` of all tiles."""
        return grid

    def sharding_rules(self) -> dict[str, Any]:
        """Every device holds the vector between rows."""
        return {"image_newline": REPLICATED}


def best_resolution(size: Any, resolutions: Any) -> tuple[int, int]:
    """The height and the width of those to choose from that keep most of a picture's pixels, and waste the fewest.

    Example:
        >>> best_resolution((100, 300), [(336, 672), (672, 336), (672, 672)])
        (336, 672)
    """
    height, width = map(int, size)
    best, most, least = resolutions[0], 0, float("inf")
    for h, w in resolutions:
        scale = min(w / width, h / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = w * h - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (h, w), kept, wasted
    return best


def unpadded(grid: np.ndarray, size: Any) -> np.ndarray:
    """Features ``[rows, columns, E]`` of a picture of this size that was padded to the shape of the grid, without it.

    Example:
        >>> unpadded(np.zeros((4, 4, 1)), (10, 20)).shape
        (2, 4, 1)
    """
    (rows, columns), (height, width) = grid.shape[:2], map(int, size)
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return grid[padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return grid[:, padding : columns - padding]
