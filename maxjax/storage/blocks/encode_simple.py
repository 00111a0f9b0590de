"""Encoders of ggml's blocks with one scale, Q4_0 to Q8_0, which ``simple`` decodes.

The algorithm is that of ``quantize_row_*_ref`` in ggml-quants.c, in float32 and in ggml's order. ``d``
and ``m`` are stored as float16, but values are quantised with them before that rounding.

=====  =============================================  =======================================
type   scale                                          q
=====  =============================================  =======================================
Q4_0   d = v / -8; v: first of largest magnitude      min(15, floor(x / d + 8.5))
Q5_0   d = v / -16                                    min(31, floor(x / d + 16.5))
Q4_1   d = (largest - smallest) / 15, m = smallest    min(15, floor((x - m) / d + 0.5))
Q5_1   d = (largest - smallest) / 31, m = smallest    min(31, floor((x - m) / d + 0.5))
Q8_0   d = largest magnitude / 127                    x / d, ties rounded away from zero
=====  =============================================  =======================================

``x / d`` is computed as ``x * (1 / d)``, and is 0 if d is 0. If 1 / d is infinite (d far below the
smallest float16), the result is undefined in C; here q is 0, as in files written on x86.

An encoder takes float32 ``[n, elements]`` and fills blocks uint8 ``[n, nbytes]``.
"""

from __future__ import annotations

import numpy as np

from .layout import LAYOUTS
from .scratch import Scratch


def q4_0(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["Q4_0"].split(blocks)
    scale = _first_largest(values, scratch) / np.float32(-8)
    d[...] = scale
    q = _steps(values, scale, 8.5, 15, scratch)
    _pack_halves(q, qs)


def q4_1(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    d, m, qs = LAYOUTS["Q4_1"].split(blocks)
    shifted, scale = _above_smallest(values, 15, d, m, scratch)
    q = _steps(shifted, scale, 0.5, 15, scratch)
    _pack_halves(q, qs)


def q5_0(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    d, qh, qs = LAYOUTS["Q5_0"].split(blocks)
    scale = _first_largest(values, scratch) / np.float32(-16)
    d[...] = scale
    q = _steps(values, scale, 16.5, 31, scratch)
    _pack_halves(q, qs)
    qh[...] = np.packbits(q >> 4, axis=1, bitorder="little")


def q5_1(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    d, m, qh, qs = LAYOUTS["Q5_1"].split(blocks)
    shifted, scale = _above_smallest(values, 31, d, m, scratch)
    q = _steps(shifted, scale, 0.5, 31, scratch)
    _pack_halves(q, qs)
    qh[...] = np.packbits(q >> 4, axis=1, bitorder="little")


def q8_0(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    d, qs = LAYOUTS["Q8_0"].split(blocks)
    scale = np.abs(_first_largest(values, scratch)) / np.float32(127)
    d[...] = scale
    steps = scratch.array("steps", values.shape, "f4")
    np.multiply(values, _inverse(scale)[:, None], out=steps)
    # Doubling the fraction is exact; adding 0.5 to the value is not.
    rounded = scratch.array("rounded", values.shape, "f4")
    np.trunc(steps, out=rounded)
    steps -= rounded
    steps += steps
    np.trunc(steps, out=steps)
    rounded += steps
    np.copyto(qs, rounded, casting="unsafe")


def _first_largest(values: np.ndarray, scratch: Scratch) -> np.ndarray:
    """The value of largest magnitude in each block, with its sign; the first of several."""
    magnitudes = np.abs(values, out=scratch.array("magnitudes", values.shape, "f4"))
    # Adding 0 turns -0 into 0, as in ggml.
    return _take(values, magnitudes.argmax(axis=1)) + np.float32(0)


def _take(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, columns[:, None], axis=1)[:, 0]


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, or 0 if that is infinite."""
    inverse = np.float32(1) / scale
    inverse[np.isinf(inverse)] = 0
    return inverse


def _above_smallest(
    values: np.ndarray, top: int, d: np.ndarray, m: np.ndarray, scratch: Scratch
) -> tuple[np.ndarray, np.ndarray]:
    """Values minus the smallest of their block, and the scales; fills the fields d and m."""
    # Of 0 and -0 this takes the first, as ggml does.
    smallest = _take(values, values.argmin(axis=1))
    scale = (_take(values, values.argmax(axis=1)) - smallest) / np.float32(top)
    d[...], m[...] = scale, smallest
    shifted = scratch.array("shifted", values.shape, "f4")
    return np.subtract(values, smallest[:, None], out=shifted), scale


def _steps(
    values: np.ndarray, scale: np.ndarray, plus: float, top: int, scratch: Scratch
) -> np.ndarray:
    """min(top, floor(values / scale + plus)), which is never negative, as uint8."""
    steps = scratch.array("steps", values.shape, "f4")
    inverse = _inverse(scale)
    np.multiply(values, inverse[:, None], out=steps)
    steps += np.float32(plus)
    np.clip(steps, np.float32(0), np.float32(top), out=steps)
    q = scratch.array("steps in bytes", values.shape, "u1")
    np.copyto(q, steps, casting="unsafe")
    q[(inverse == 0) & (scale != 0)] = 0
    return q


def _pack_halves(q: np.ndarray, qs: np.ndarray) -> None:
    """Packs 32 values into 16 bytes: the low 4 bits of byte j are value j, the high ones value j + 16."""
    np.bitwise_or(q[:, :16] & 15, q[:, 16:] << 4, out=qs)
