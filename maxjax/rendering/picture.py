"""Pictures of numbers: images as PNG, histograms as SVG and as characters. No library draws them."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_BLOCKS = " ▁▂▃▄▅▆▇█"
# The last colour of a palette, for NaN and infinities.
_BAD = (214, 39, 40)


def number(value: Any) -> str:
    """A number as text: an integer with all its digits, a float with at most four.

    Example:
        >>> number(0.000012345), number(65536), number(float("nan")), number(-3)
        ('1.234e-05', '65536', 'nan', '-3')
    """
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    return f"{float(value):.4g}"


def bars(counts: Sequence[int]) -> str:
    """A histogram in a line of characters.

    Example:
        >>> bars([0, 1, 4, 8, 4, 1])
        ' ▁▄█▄▁'
    """
    most = max(counts, default=0)
    if not most:
        return " " * len(counts)
    return "".join(_BLOCKS[math.ceil(8 * count / most)] for count in counts)


def histogram(counts: Sequence[int], low: str, high: str, wide: int = 320, tall: int = 90) -> str:
    """A histogram as SVG, with the labels ``low`` and ``high`` below its ends."""
    most, step = max(max(counts, default=0), 1), wide / max(len(counts), 1)
    path = "".join(
        f"M{i * step:.1f} {tall}v-{tall * count / most:.1f}h{step * 0.92:.1f}V{tall}z"
        for i, count in enumerate(counts)
        if count
    )
    style = 'font-size="11" fill="currentColor"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall + 16}" '
        f'viewBox="0 0 {wide} {tall + 16}" style="max-width:100%"><path d="{path}" fill="#4c86b8"/>'
        f'<path d="M0 {tall + 0.5}h{wide}" stroke="currentColor" stroke-opacity="0.5"/>'
        f'<text x="0" y="{tall + 13}" {style}>{html.escape(low)}</text>'
        f'<text x="{wide}" y="{tall + 13}" {style} text-anchor="end">{html.escape(high)}</text></svg>'
    )


def small_histogram(counts: Sequence[int]) -> str:
    """A histogram as SVG, as high as a line of text."""
    most = max(max(counts, default=0), 1)
    path = "".join(f"M{3 * i} 14v-{14 * c / most:.1f}h2.6V14z" for i, c in enumerate(counts) if c)
    return f'<svg width="{3 * len(counts)}" height="14"><path d="{path}" fill="#4c86b8"/></svg>'


# --- images ---------------------------------------------------------------------------------


def palette(signed: bool) -> np.ndarray:
    """256 colours ``[256, 3]``: from blue over white to orange, or from white to dark blue."""
    stops = (
        [(0.0, (33, 82, 140)), (0.5, (247, 247, 247)), (1.0, (200, 90, 20))]
        if signed
        else [(0.0, (247, 251, 255)), (0.5, (107, 174, 214)), (1.0, (8, 48, 107))]
    )
    at = np.linspace(0, 1, 255)
    places, colors = [place for place, _ in stops], np.array([color for _, color in stops])
    made = np.stack([np.interp(at, places, colors[:, c]) for c in range(3)], 1)
    return np.concatenate([made, [_BAD]]).round().astype(np.uint8)


def png(values: np.ndarray, low: float, high: float, signed: bool = False) -> bytes:
    """An image ``[rows, columns]`` as a PNG file: colours from ``low`` to ``high``.

    NaN and infinities are red. See the PNG specification (ISO/IEC 15948): an image of type 3, whose
    bytes are places in a palette.

    Example:
        >>> made = png(np.array([[0.0, 1.0], [np.nan, 0.5]]), 0, 1)
        >>> made[:8], made[16:24].hex()
        (b'\\x89PNG\\r\\n\\x1a\\n', '0000000200000002')
    """
    places = _places(values, low, high, 254)
    rows, columns = places.shape
    # Each row begins with the number of its filter: none.
    raw = np.concatenate([np.zeros((rows, 1), np.uint8), places], 1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", palette(signed).tobytes()),
              (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]  # fmt: skip
    made = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        made += struct.pack(">I", len(data)) + kind + data
        made += struct.pack(">I", zlib.crc32(kind + data))
    return made


def _places(values: np.ndarray, low: float, high: float, last: int) -> np.ndarray:
    """The place of each value on a scale from 0 (``low``) to ``last`` (``high``); ``last + 1`` if it is not finite."""
    values = np.asarray(values, np.float64)  # the range of float32 overflows in float32
    finite = np.isfinite(values)
    scale = last / (high - low) if high > low else 0.0
    places = np.clip((np.where(finite, values, low) - low) * scale, 0, last)
    return np.where(finite, places.round(), last + 1).astype(np.uint8)


def png_url(values: np.ndarray, low: float, high: float, signed: bool = False) -> str:
    """The image of :func:`png` as a URL that contains it."""
    return f"data:image/png;base64,{base64.b64encode(png(values, low, high, signed)).decode()}"


def image(url: str, wide: float, high: float) -> str:
    """The image at a URL as an HTML element that is ``wide`` × ``high`` pixels large."""
    return (
        f'<img alt="" src="{url}" style="width:{wide:.0f}px;height:{high:.0f}px;'
        'image-rendering:pixelated;border:1px solid #8888;max-width:100%">'
    )


def shades(values: np.ndarray, low: float, high: float) -> list[str]:
    """An image as lines of characters, one for each row; "!" stands for NaN and infinities.

    Example:
        >>> shades(np.array([[0.0, 0.5, 1.0], [np.nan, 1.0, 0.0]]), 0, 1)
        [' ▒█', '!█ ']
    """
    marks = np.array(list(" ░▒▓█!"))
    return ["".join(line) for line in marks[_places(values, low, high, 4)]]
