"""Decoders of ggml's K-quants: 256 values in sub-blocks of 16 or 32, with quantised scales.

The formulas are those of ``dequantize_row_*`` in ggml-quants.c. ``d`` and ``dmin`` are float16 (``d`` of Q8_K
is float32); ``sc`` and ``mn`` are the scale and the minimum of the sub-block of a value.

Q2_K  d * sc * q - dmin * mn, sub-blocks of 16. Byte i of ``scales`` holds sc of sub-block i in its low
      nibble and mn in its high one. Each half of ``qs`` is 32 bytes for 128 values: byte l holds the
      values l, l + 32, l + 64 and l + 96, 2 bits each, starting from the lowest.
Q3_K  d * (sc - 32) * (q - 4 * (1 - h)), sub-blocks of 16. q is stored as in Q2_K; h of value 32 * i + l
      is bit i of byte l of ``hmask``. The lower 4 bits of sc of sub-block i are the low nibble of byte i
      of ``scales``, or for i >= 8 the high nibble of byte i - 8; the upper 2 bits are bits 2 * (i // 4)
      and above of byte 8 + i % 4.
Q4_K  d * sc * q - dmin * mn, sub-blocks of 32. Each quarter of ``qs`` is 32 bytes for 64 values: byte l
      holds value l in its low nibble and value l + 32 in its high one. ``scales`` holds 6 bits for each
      sc and mn. For i < 4, sc of sub-block i is the low 6 bits of byte i, and mn those of byte i + 4. For
      sub-block i + 4, sc is the low nibble of byte i + 8, with the upper 2 bits of byte i above it; mn is
      the high nibble of byte i + 8, with the upper 2 bits of byte i + 4.
Q5_K  As Q4_K; the fifth bit of value 32 * i + l is bit i of byte l of ``qh``.
Q6_K  d * sc * (q - 32), sub-blocks of 16; sc is int8. For each half (128 values), the lower 4 bits are the
      low nibbles of its 64 bytes of ``ql``, then their high nibbles; the upper 2 bits are in its 32 bytes
      of ``qh``, stored like the values of Q2_K.
Q8_K  d * q; q is int8. ``bsums``, the sums of 16 values each, only serve dot products.

A decoder takes blocks uint8 ``[n, nbytes]`` and fills float32 ``[n, 256]``. The product of a scale and a
value is exact in float32; ggml's order of operations is kept because it decides the sign of zeros.
"""

from __future__ import annotations

import numpy as np

from .layout import LAYOUTS
from .scratch import Scratch, add, bits, fill_product, nibbles


def q2_k(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    packed, qs, d, dmin = LAYOUTS["Q2_K"].split(blocks)
    scales = (packed & 15) * d.astype(np.float32)[:, None]
    minima = (packed >> 4) * dmin.astype(np.float32)[:, None]
    fill_product(out, bits(scratch, qs, 2, 32), scales)
    add(out, -minima)


def q3_k(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    hmask, qs, packed, d = LAYOUTS["Q3_K"].split(blocks)
    values = bits(scratch, qs, 2, 32).copy()  # the next call reuses the memory
    high = bits(scratch, hmask, 1, 32)
    high *= 4
    values += high
    values -= 4
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    upper = (packed[:, None, 8:] >> np.array([[0], [2], [4], [6]], np.uint8)) & 3
    steps = (low | upper.reshape(-1, 16) << 4).view(np.int8) - np.int8(32)
    scales = steps * d.astype(np.float32)[:, None]
    fill_product(out, values.view(np.int8), scales)


def q4_k(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, dmin, packed, qs = LAYOUTS["Q4_K"].split(blocks)
    scales, minima = _six_bit_scales(packed, d, dmin, scratch)
    fill_product(out, nibbles(scratch, qs, 32), scales)
    add(out, -minima)


def q5_k(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, dmin, packed, qh, qs = LAYOUTS["Q5_K"].split(blocks)
    scales, minima = _six_bit_scales(packed, d, dmin, scratch)
    values = nibbles(scratch, qs, 32)
    high = bits(scratch, qh, 1, 32)
    high *= 16
    values |= high
    fill_product(out, values, scales)
    add(out, -minima)


def q6_k(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    ql, qh, packed, d = LAYOUTS["Q6_K"].split(blocks)
    values = nibbles(scratch, ql, 64)
    high = bits(scratch, qh, 2, 32)
    high *= 16
    values |= high
    values -= 32
    scales = scratch.array("scales", packed.shape, "f4")
    fill_product(scales, packed, d.astype(np.float32))
    fill_product(out, values.view(np.int8), scales)


def q8_k(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs, _ = LAYOUTS["Q8_K"].split(blocks)
    fill_product(out, qs, d)


def _six_bit_scales(
    packed: np.ndarray, d: np.ndarray, dmin: np.ndarray, scratch: Scratch
) -> np.ndarray:
    """The scales times d, and the minima times dmin, of Q4_K and Q5_K: ``[2, n * 8]``."""
    n = len(packed)
    # Four sub-blocks at a time, as the bytes of a 32-bit word; the words of all blocks are adjacent.
    words = scratch.array("words", (3, n), "<u4")
    np.copyto(words, packed.view("<u4").T)
    unpacked = scratch.array("unpacked", (2, n, 2), "<u4")
    np.bitwise_and(words[:2], 0x3F3F3F3F, out=unpacked[:, :, 0])
    upper = scratch.array("upper", (2, n), "<u4")
    np.right_shift(words[:2], 2, out=upper)
    upper &= 0x30303030
    lower = scratch.array("lower", (2, n), "<u4")
    np.copyto(lower[0], words[2])
    np.right_shift(words[2], 4, out=lower[1])
    lower &= 0x0F0F0F0F
    np.bitwise_or(upper, lower, out=unpacked[:, :, 1])
    scales = scratch.array("scales", (2, n * 8), "f4")
    factors = scratch.array("factors", (2, n), "f4")
    factors[0], factors[1] = d, dmin
    fill_product(scales, unpacked.view(np.uint8), factors)
    return scales
