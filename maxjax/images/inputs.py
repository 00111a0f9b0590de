"""What an image processor gives: pictures as arrays, and what a model must know of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ImageInputs:
    """Pictures as a vision model reads them.

    Attributes:
        pixels: ``float32[N, 3, H, W]``; the tiles of a picture follow each other. For Qwen's models patches,
            ``float32[N, 3 · T · P · P]``, of which those that become one feature follow each other.
        sizes: ``int64[images, 2]``, the height and width of each picture; for Pixtral after it was resized.
        tiles: ``int64[images]``, how many rows of ``pixels`` each picture has.
        layouts: ``int64[images, 2]``, the rows and columns of each picture's tiles besides that of the whole picture;
            0 and 0 if there are none.
        grids: ``int64[images, 3]``, the times, rows and columns of patches of each picture (``image_grid_thw``);
            all 0 where ``pixels`` are no patches.
        counts: ``int64[images]``, how many features each picture has in a text; 0 where models read no such texts.
    """

    pixels: np.ndarray
    sizes: np.ndarray
    tiles: np.ndarray
    layouts: np.ndarray
    grids: np.ndarray
    counts: np.ndarray
