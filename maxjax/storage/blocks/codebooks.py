"""Decoders of ggml's table-based and ternary blocks: IQ4, FP4, TQ.

The formulas are those of ``dequantize_row_*`` in ggml-quants.c, and the tables are ``kvalues_iq4nl``
and ``kvalues_mxfp4`` of ggml-common.h. ``d`` is float16 unless stated otherwise; ``q`` is a 4-bit index.

IQ4_NL  d * table[q], 32 values; q is stored as in Q4_0.
IQ4_XS  d * (sc - 32) * table[q]. Eight sub-blocks of 32 values, each stored in 16 bytes as in Q4_0. The
        scale sc of sub-block i has 6 bits: the lower 4 are nibble i % 2 of byte i // 2 of ``scales_l``,
        the upper 2 are bits 2 * i and 2 * i + 1 of ``scales_h``.
MXFP4   scale * table[q], 32 values; q is stored as in Q4_0, the scale is 2 ** (e - 128), and the table
        holds E2M1 values times 2 (OCP microscaling formats, section 5.3).
NVFP4   The same table. Four sub-blocks of 16 values, each stored in 8 bytes, low nibbles first. The scale
        of sub-block i is half of byte i of ``d``, an E4M3 number without sign. 0x7F means 0; for other
        bytes the highest bit is ignored, and the largest exponent is an ordinary one: 0xFF is 240.
TQ1_0   d * (digit - 1). Digit k of byte b is ((b * 3 ** k mod 256) * 3) >> 8. There are five digits per
        byte in the first 32 bytes of ``qs``, five in its other 16, and four in ``qh``. In each of these
        parts, digit 0 of all bytes comes first, then digit 1, and so on.
TQ2_0   d * (q - 1), with q of 2 bits, stored in ``qs`` as in Q2_K.

A decoder takes blocks uint8 ``[n, nbytes]`` and fills float32 ``[n, elements]``.
"""

from __future__ import annotations

import numpy as np

from .layout import LAYOUTS
from .scratch import Scratch, bits, fill_product, nibbles

_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_THREES = np.array([1, 3, 9, 27, 81], np.uint8)


def _e4m3_halves() -> np.ndarray:
    """The scale of NVFP4 for every byte: half of the E4M3 number."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).astype(np.float32)
    values = np.where(
        exponent == 0,
        np.ldexp(mantissa, -10),
        np.ldexp(1 + mantissa / 8, exponent - 8),
    )
    values[0x7F] = 0
    return values


# MXFP4: the scale for every byte e, 255 included.
_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128)
_UE4M3 = _e4m3_halves()


def iq4_nl(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["IQ4_NL"].split(blocks)
    _look_up(_IQ4, qs, 16, d.astype(np.float32), out, scratch)


def iq4_xs(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, scales_h, scales_l, qs = LAYOUTS["IQ4_XS"].split(blocks)
    low = np.stack((scales_l & 15, scales_l >> 4), axis=2).reshape(-1, 8)
    high = (scales_h[:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    steps = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    scales = steps * d.astype(np.float32)[:, None]
    _look_up(_IQ4, qs, 16, scales, out, scratch)


def mxfp4(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    e, qs = LAYOUTS["MXFP4"].split(blocks)
    _look_up(_FP4, qs, 16, _E8M0[e], out, scratch)


def nvfp4(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["NVFP4"].split(blocks)
    _look_up(_FP4, qs, 8, _UE4M3[d], out, scratch)


def tq1_0(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    qs, qh, d = LAYOUTS["TQ1_0"].split(blocks)
    at = 0
    for part, digits in ((qs[:, :32], 5), (qs[:, 32:], 5), (qh, 4)):
        powers = part[:, None, :] * _THREES[:digits, None]
        values = (powers * np.uint16(3) >> 8).astype(np.int8) - np.int8(1)
        end = at + digits * part.shape[1]
        np.copyto(out[:, at:end], values.reshape(len(blocks), -1))
        at = end
    out *= d.astype(np.float32)[:, None]


def tq2_0(blocks: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    qs, d = LAYOUTS["TQ2_0"].split(blocks)
    values = bits(scratch, qs, 2, 32)
    values -= 1
    fill_product(out, values.view(np.int8), d.astype(np.float32))


def _look_up(
    table: np.ndarray,
    qs: np.ndarray,
    chunk: int,
    scales: np.ndarray,
    out: np.ndarray,
    scratch: Scratch,
) -> None:
    """Fills ``out`` with table[q] * scale; of each ``chunk`` bytes of ``qs`` the low nibbles come first."""
    fill_product(out, np.take(table, nibbles(scratch, qs, chunk), mode="clip"), scales)
