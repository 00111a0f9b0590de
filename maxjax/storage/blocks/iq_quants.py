"""Decoding of ggml's IQ1, IQ2 and IQ3 blocks: groups of values out of a code book.

Source: ggml-quants.c, ``dequantize_row_iq*``; ``d`` is float16, all have 256 values. A group is a
row of the type's table (grids): 8 values, of IQ3 4. A sign byte has a bit for each of 8 values,
lowest first, set for minus; where only 7 bits are stored the eighth makes their number even.

IQ2_XXS  d * (0.5 + sc) / 4 * group. Two words of 32 bits for 32 values: four numbers of groups of a
         byte each; four times 7 bits of signs, and above them 4 bits sc.
IQ2_XS   the same product. ``qs``: 9 bits number, 7 bits signs; half i of ``scales`` is sc of 16 values.
IQ2_S    the same. ``qs`` has the low 8 bits of a number, two bits of ``qh`` the upper; signs as bytes.
IQ3_XXS  d * (0.5 + sc) / 2 * group. ``qs`` are numbers; a word for 32 values as the second of IQ2_XXS.
IQ3_S    d * (1 + 2 * sc) * group. As IQ2_S, one bit of ``qh`` a group; sc belongs to 32 values.
IQ1_S    d * (2 * sc + 1) * (group + delta). ``qh`` has a word for 32 values: four times 3 upper bits
         of the number, 3 bits sc, and whether delta is 1/8 or, if set, -1/8.
IQ1_M    the same; sc of 3 bits for 16 values in the low 12 bits of each of ``scales``, whose upper 4
         bits are those of the float16 d; ``qh`` has for each group 3 upper bits and the sign of delta.
         IQ1_M has the book of IQ1_S.

A decoder takes blocks uint8 ``[n, nbytes]`` and fills float32 ``[n, 256]``.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .grids import grid
from .layout import LAYOUTS
from .scratch import Scratch, add, fill_product

_DELTA = np.float32(0.125)


@cache
def _signs() -> np.ndarray:
    """1 or -1 for the bits of each byte: float32 ``[256, 8]``."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


@cache
def _even_signs() -> np.ndarray:
    """The same for 7 bits, the eighth filled up: float32 ``[128, 8]``."""
    odd = np.bitwise_count(np.arange(128)) & 1
    return _signs()[np.arange(128) | odd << 7]


def iq2_xxs(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["IQ2_XXS"].split(blocks)
    words = qs.copy().reshape(-1, 8, 2)
    numbers = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scales, signs = _scale_and_signs(words[:, :, 1])
    scales = d.astype(np.float32)[:, None] * scales * np.float32(0.25)
    _groups("IQ2_XXS", numbers, _even_signs()[signs], scales, out)


def iq2_xs(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, packed = LAYOUTS["IQ2_XS"].split(blocks)
    scales = _half(d, packed) * np.float32(0.25)
    _groups("IQ2_XS", qs & 511, _even_signs()[qs >> 9], scales, out)


def iq2_s(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, signs, qh, packed = LAYOUTS["IQ2_S"].split(blocks)
    scales = _half(d, packed) * np.float32(0.25)
    _groups("IQ2_S", _numbers(qs, qh, 2), _signs()[signs], scales, out)


def iq3_xxs(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, words = LAYOUTS["IQ3_XXS"].split(blocks)
    scales, signs = _scale_and_signs(words)
    scales = d.astype(np.float32)[:, None] * scales * np.float32(0.5)
    _groups("IQ3_XXS", qs, _even_signs()[signs], scales, out)


def iq3_s(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, qh, signs, packed = LAYOUTS["IQ3_S"].split(blocks)
    scales = d.astype(np.float32)[:, None] * (1 + 2 * _halves(packed))
    _groups("IQ3_S", _numbers(qs, qh, 1), _signs()[signs], scales, out)


def iq1_s(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, qh = LAYOUTS["IQ1_S"].split(blocks)
    scales = d.astype(np.float32)[:, None] * (2 * (qh >> 12 & 7) + 1)
    delta = np.where(qh & 0x8000, -_DELTA, _DELTA)
    upper = qh[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    numbers = qs | upper.reshape(qs.shape) << 8
    _shifted_groups(numbers, delta, scales, out)


def iq1_m(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    qs, qh, packed = LAYOUTS["IQ1_M"].split(blocks)
    d = np.bitwise_or.reduce((packed & 0xF000) >> np.arange(12, -1, -4, dtype=np.uint16), axis=1)
    steps = (packed[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    scales = d.view(np.float16).astype(np.float32)[:, None] * (2 * steps + 1)
    halves = _halves(qh)
    delta = np.where(halves & 8, -_DELTA, _DELTA)
    numbers = qs | (halves & 7).astype(np.uint16) << 8
    _shifted_groups(numbers, delta, scales, out)


def _halves(packed: np.ndarray) -> np.ndarray:
    """The low and the high four bits of each byte in turn: ``[n, k]`` → ``[n, 2 * k]``."""
    return np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def _half(d: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """d * (0.5 + sc)."""
    return d.astype(np.float32)[:, None] * (np.float32(0.5) + _halves(packed))


def _scale_and_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """0.5 + sc of words ``[n, 8]``, and their fours of 7 bits of signs ``[n, 8, 4]``."""
    signs = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return np.float32(0.5) + (words >> 28).astype(np.float32), signs


def _numbers(qs: np.ndarray, qh: np.ndarray, width: int) -> np.ndarray:
    """Numbers of groups: 8 bits of ``qs``, above them ``width`` bits of ``qh``, lowest first."""
    upper = qh[:, :, None] >> np.arange(0, 8, width, dtype=np.uint8) & (1 << width) - 1
    return qs | upper.astype(np.uint16).reshape(qs.shape) << 8


def _groups(
    name: str, numbers: np.ndarray, signs: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """scale * group * sign."""
    fill_product(out, grid(name)[numbers], scales)
    out *= signs.reshape(out.shape)


def _shifted_groups(
    numbers: np.ndarray, delta: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """scale * (group + delta)."""
    groups = grid("IQ1_S")[numbers]
    add(groups, delta)
    fill_product(out, groups, scales)
