"""Encoders of ggml's blocks of 32 values with one scale: Q4_0 to Q8_0 (``simple``) and MXFP4 (``codebooks``).

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
MXFP4  2 ** (floor(log2(largest magnitude)) - 2)      the nearest E2M1 value, ties towards zero
=====  =============================================  =======================================

``x / d`` is computed as ``x * (1 / d)``, and is 0 if d is 0. If 1 / d is infinite (d far below the
smallest float16), the result is undefined in C; here q is 0, as in files written on x86.

With an importance matrix the first four types search for the scale (``quantize_row_*_impl``): the weight
of a value is its importance times the root of x² plus the mean square of its row. Q8_0 and MXFP4
have no such search.

An encoder takes float32 ``[n, 32]`` and returns the fields of the blocks, ``[n]`` or ``[n, count]``.
It is written for NumPy and ``jax.numpy``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .search import Arrays, affine, affine_integers, finite, linear, linear_integers

Fields = tuple[Any, ...]


class ValueImportance(NamedTuple):
    """The importance of each value, float32 ``[n, elements]``, and the mean squares of their rows, ``[n]``."""

    weights: Any
    mean_square: Any


def q4_0(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    d, q = _signed(a, values, 8, importance)
    return d, _pack_halves(a, q)


def q5_0(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    d, q = _signed(a, values, 16, importance)
    return d, _pack_fifth(a, q), _pack_halves(a, q)


def q4_1(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    d, m, q = _shifted(a, values, 15, importance)
    return d, m, _pack_halves(a, q)


def q5_1(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    d, m, q = _shifted(a, values, 31, importance)
    return d, m, _pack_fifth(a, q), _pack_halves(a, q)


def q8_0(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    xp = a.np
    scale = xp.max(xp.abs(values), axis=1, keepdims=True) / np.float32(127)
    steps = values * _inverse(a, scale)
    # Doubling the fraction is exact; adding 0.5 to the value is not.
    whole = xp.trunc(steps)
    rest = steps - whole
    return scale[:, 0].astype(np.float16), (whole + xp.trunc(rest + rest)).astype(np.int8)


def mxfp4(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    xp = a.np
    sizes = xp.abs(values)
    # The exponent of the scale as a byte: 4 is the largest power of two in E2M1.
    exponent = (xp.max(sizes, axis=1, keepdims=True).view(np.int32) >> 23) - 2
    exponent = xp.maximum(exponent, 0)
    # 1 / scale as two factors, neither of which overflows.
    first = exponent >> 1
    powers = [((192 - part) << 23).view(np.float32) for part in (first + 2, exponent - first)]
    sizes = sizes * powers[0] * powers[1]
    # Twice the numbers of E2M1 are 0, 1, 2, 3, 4, 6, 8 and 12: these are the middles between them.
    index = sum(
        (sizes > np.float32(middle)).astype(np.uint8)
        for middle in (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
    )
    q = index | xp.where((values < 0) & (index > 0), np.uint8(8), np.uint8(0))
    return exponent[:, 0].astype(np.uint8), _pack_halves(a, q)


def _signed(
    a: Arrays, values: Any, top: int, importance: ValueImportance | None
) -> tuple[Any, Any]:
    """The scales, and integers of 0 to 2 * top - 1 as bytes."""
    xp = a.np
    if importance is not None:
        x, weights = _weighted(a, values, importance)
        found = linear(a, x, weights, top)
        q = linear_integers(a, x, found, top)
        return found.scale[0].astype(np.float16), q.T.astype(np.uint8)
    columns = xp.argmax(xp.abs(values), axis=1)
    # Adding 0 turns -0 into 0, as in ggml.
    scale = (_take(a, values, columns) + np.float32(0)) / np.float32(-top)
    return scale[:, 0].astype(np.float16), _steps(a, values, scale, top + 0.5, 2 * top - 1)


def _shifted(
    a: Arrays, values: Any, top: int, importance: ValueImportance | None
) -> tuple[Any, Any, Any]:
    """The scales, the minima, and integers of 0 to top as bytes."""
    xp = a.np
    if importance is not None:
        x, weights = _weighted(a, values, importance)
        found = affine(a, x, weights, top, -0.9, 0.05, 36)
        q = affine_integers(a, x, found, top).T.astype(np.uint8)
        return found.scale[0].astype(np.float16), found.minimum[0].astype(np.float16), q
    # Of 0 and -0 this takes the first, as ggml does.
    smallest = _take(a, values, xp.argmin(values, axis=1))
    scale = (_take(a, values, xp.argmax(values, axis=1)) - smallest) / np.float32(top)
    q = _steps(a, values - smallest, scale, 0.5, top)
    return scale[:, 0].astype(np.float16), smallest[:, 0].astype(np.float16), q


def _weighted(a: Arrays, values: Any, importance: ValueImportance) -> tuple[Any, Any]:
    """The values and the weights of their errors, ``[32, n]``."""
    roots = a.np.sqrt(importance.mean_square[:, None] + values * values)
    return values.T.copy(), (importance.weights * roots).T.copy()


def _take(a: Arrays, values: Any, columns: Any) -> Any:
    return a.np.take_along_axis(values, columns[:, None], axis=1)


def _inverse(a: Arrays, scale: Any) -> Any:
    """1 / scale, or 0 if that is infinite."""
    return finite(a, np.float32(1) / scale)


def _steps(a: Arrays, values: Any, scale: Any, plus: float, top: int) -> Any:
    """min(top, floor(values / scale + plus)), which is never negative, as uint8."""
    inverse = _inverse(a, scale)
    steps = a.np.clip(values * inverse + np.float32(plus), np.float32(0), np.float32(top))
    is_none = (inverse == 0) & (scale != 0)
    return a.np.where(is_none, np.uint8(0), steps.astype(np.uint8))


def _pack_halves(a: Arrays, q: Any) -> Any:
    """Packs 32 values into 16 bytes: the low 4 bits of byte j are value j, the high ones value j + 16."""
    return q[:, :16] & 15 | q[:, 16:] << 4


def _pack_fifth(a: Arrays, q: Any) -> Any:
    """Packs the fifth bits of 32 values into 4 bytes."""
    return a.np.packbits(q >> 4, axis=1, bitorder="little")
