"""Pictures drawn with integers alone, so that they are the same on every machine."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def photograph(height, width, seed=0):
    """Colours that change slowly, with noise on them: ``uint8[height, width, 3]``."""
    rng = np.random.default_rng(seed)
    across = np.arange(width)[None, :, None] * np.array([3, 5, 2]) * 7 // max(width, 8)
    down = np.arange(height)[:, None, None] * np.array([40, 11, 90]) // max(height, 8)
    return ((across * 11 + down + rng.integers(0, 60, (height, width, 3))) % 256).astype(np.uint8)


def page(height=330, width=240):
    """A scanned page: dark words in lines on white."""
    rng = np.random.default_rng(5)
    found = np.full((height, width, 3), 250, np.uint8)
    for top in range(20, height - 20, 12):
        left = 15
        while left < width - 40:
            length = int(rng.integers(6, 26))
            found[top : top + 6, left : left + length] = rng.integers(0, 60)
            left += length + 4
    return found


PICTURES = {
    "portrait": photograph(90, 61),
    "landscape": photograph(64, 113, 1),
    "page": page(),
    "dot": photograph(1, 1, 2),
    "strip": photograph(30, 9000, 3),
}


def encoded(picture, format="PNG", **options):
    """The bytes of a file with a picture (an array, or Pillow's image)."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def hopper():
    """A photograph that matplotlib has among its files: the path of a JPEG of 512 × 600."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
