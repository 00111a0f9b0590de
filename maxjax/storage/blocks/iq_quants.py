"""Decoders of ggml's IQ1, IQ2 and IQ3 blocks: groups of values that are looked up in a codebook.

The formulas are those of ``dequantize_row_iq*`` in ggml-quants.c. ``d`` is float16, and every block has
256 values. A group is a row of the type's codebook (``grids``): 8 values, in IQ3 4. A sign byte has one
bit for each of 8 values, lowest first, set for minus; if only 7 bits are stored, the eighth is chosen so
that the number of set bits is even. ``sc`` is the scale of a sub-block.

IQ2_XXS  d * (0.5 + sc) / 4 * group. Every 32 values take two words of 32 bits: the first holds four
         group indices of a byte each; the second four times 7 sign bits, then sc in the upper 4 bits.
IQ2_XS   The same formula. Each item of ``qs`` is a group index of 9 bits and 7 sign bits; nibble i of
         ``scales`` is sc of 16 values.
IQ2_S    The same formula. ``qs`` holds the lower 8 bits of each group index, ``qh`` its upper 2 bits;
         signs are bytes.
IQ3_XXS  d * (0.5 + sc) / 2 * group. ``qs`` holds group indices; ``scales`` has for every 32 values a word
         like the second one of IQ2_XXS.
IQ3_S    d * (1 + 2 * sc) * group. As IQ2_S, with one bit of ``qh`` per group, and one sc for 32 values.
IQ1_S    d * (2 * sc + 1) * (group + delta). ``qh`` has a word for every 32 values: four times the upper
         3 bits of a group index, 3 bits of sc, and one bit that is set if delta is -1/8, not 1/8.
IQ1_M    The same formula and codebook. The low 12 bits of each item of ``scales`` are sc of 16 values, 3
         bits each; its upper 4 bits are part of the float16 d. ``qh`` has for each group the upper
         3 bits of its index and the sign bit of delta.

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
    """The signs, 1 or -1, for every sign byte: float32 ``[256, 8]``."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


@cache
def _even_signs() -> np.ndarray:
    """The signs for every 7 sign bits, completed to an even number of set bits: float32 ``[128, 8]``."""
    odd = np.bitwise_count(np.arange(128)) & 1
    return _signs()[np.arange(128) | odd << 7]


def iq2_xxs(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["IQ2_XXS"].split(blocks)
    words = qs.copy().reshape(-1, 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scales, signs = _scale_and_signs(words[:, :, 1])
    scales = d.astype(np.float32)[:, None] * scales * np.float32(0.25)
    _fill("IQ2_XXS", indices, _even_signs()[signs], scales, out)


def iq2_xs(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, packed = LAYOUTS["IQ2_XS"].split(blocks)
    scales = _scales(d, packed) * np.float32(0.25)
    _fill("IQ2_XS", qs & 511, _even_signs()[qs >> 9], scales, out)


def iq2_s(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, signs, qh, packed = LAYOUTS["IQ2_S"].split(blocks)
    scales = _scales(d, packed) * np.float32(0.25)
    _fill("IQ2_S", _indices(qs, qh, 2), _signs()[signs], scales, out)


def iq3_xxs(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, words = LAYOUTS["IQ3_XXS"].split(blocks)
    scales, signs = _scale_and_signs(words)
    scales = d.astype(np.float32)[:, None] * scales * np.float32(0.5)
    _fill("IQ3_XXS", qs, _even_signs()[signs], scales, out)


def iq3_s(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, qh, signs, packed = LAYOUTS["IQ3_S"].split(blocks)
    scales = d.astype(np.float32)[:, None] * (1 + 2 * _nibbles(packed))
    _fill("IQ3_S", _indices(qs, qh, 1), _signs()[signs], scales, out)


def iq1_s(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, qh = LAYOUTS["IQ1_S"].split(blocks)
    scales = d.astype(np.float32)[:, None] * (2 * (qh >> 12 & 7) + 1)
    delta = np.where(qh & 0x8000, -_DELTA, _DELTA)
    upper = qh[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    indices = qs | upper.reshape(qs.shape) << 8
    _fill_shifted(indices, delta, scales, out)


def iq1_m(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    qs, qh, packed = LAYOUTS["IQ1_M"].split(blocks)
    d = np.bitwise_or.reduce((packed & 0xF000) >> np.arange(12, -1, -4, dtype=np.uint16), axis=1)
    steps = (packed[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    scales = d.view(np.float16).astype(np.float32)[:, None] * (2 * steps + 1)
    nibbles = _nibbles(qh)
    delta = np.where(nibbles & 8, -_DELTA, _DELTA)
    indices = qs | (nibbles & 7).astype(np.uint16) << 8
    _fill_shifted(indices, delta, scales, out)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The nibbles of bytes, the low one of each first: ``[n, k]`` → ``[n, 2 * k]``."""
    return np.stack((packed & 15, packed >> 4), axis=2).reshape(len(packed), -1)


def _scales(d: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """d * (0.5 + sc)."""
    return d.astype(np.float32)[:, None] * (np.float32(0.5) + _nibbles(packed))


def _scale_and_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """0.5 + sc of words ``[n, 8]``, and their four times 7 sign bits ``[n, 8, 4]``."""
    signs = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return np.float32(0.5) + (words >> 28).astype(np.float32), signs


def _indices(qs: np.ndarray, qh: np.ndarray, width: int) -> np.ndarray:
    """Group indices: 8 lower bits from ``qs``, ``width`` upper bits from ``qh``, lowest bits first."""
    upper = qh[:, :, None] >> np.arange(0, 8, width, dtype=np.uint8) & (1 << width) - 1
    return qs | upper.astype(np.uint16).reshape(qs.shape) << 8


def _fill(
    name: str, indices: np.ndarray, signs: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """Fills ``out`` with scale * group * sign."""
    fill_product(out, grid(name)[indices], scales)
    out *= signs.reshape(out.shape)


def _fill_shifted(
    indices: np.ndarray, delta: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """Fills ``out`` with scale * (group + delta)."""
    groups = grid("IQ1_S")[indices]
    add(groups, delta)
    fill_product(out, groups, scales)
