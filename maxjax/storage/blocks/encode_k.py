"""Encoders of ggml's K-quants Q2_K to Q6_K, whose layouts ``k_quants`` documents.

The algorithm is that of ``quantize_row_*_K_ref`` in ggml-quants.c, and with an importance matrix that of
``quantize_row_*_K_impl``. In each block of 256 values, the scale of every sub-block is searched
separately and then rounded to a multiple of a common factor; the values are quantised again with the
rounded scale. If that is 0, the integers of the search are kept.

An encoder takes float32 ``[n, 256]`` and returns the fields of the blocks, ``[n]`` or ``[n, count]``.
It is written for NumPy and ``jax.numpy``. Internally, values have the axes
``[position in the sub-block, sub-block, block]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .encode_simple import Fields, ValueImportance
from .search import (
    EPSILON,
    Affine,
    Arrays,
    affine,
    affine_integers,
    descent,
    largest,
    linear,
    linear_integers,
    nearest,
    non_negative,
    total,
)


def q2_k(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    x = _by_sub_block(values, 16)
    if importance is None:
        search = affine(a, x, a.np.abs(x), 3, -0.5, 0.1, 15, absolute=True)
        scales, d = _rounded(a, search.scale[0], 15)
        minima, dmin = _rounded(a, -search.minimum[0], 15)
    else:
        weights = _weights(a, x, importance, 1)
        search = affine(a, x, weights, 3, -0.9, 0.05, 36)
        scales, minima, d, dmin = _searched(a, search, weights, 15)
    q = _again(a, x, search, (scales, d), (minima, dmin), 3)
    return (scales | minima << 4).T, _pack_twos(a, q), d, dmin


def q3_k(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    xp = a.np
    x = _by_sub_block(values, 16)
    if importance is None:
        scale, q = descent(a, x, 4)
        factor = largest(a, scale[0])
        inverse = np.float32(-32) / factor
        is_zero = factor == 0
        d = xp.where(is_zero, np.float32(0), np.float32(1) / inverse)
        # In a byte with a sign, as in ggml.
        steps = xp.clip(nearest(inverse * scale[0]).astype(np.int8), -32, 31) + np.int8(32)
        steps = xp.where(is_zero, np.int8(0), steps)
    else:
        weights = _weights(a, x, importance, 2)
        search = linear(a, x, weights, 4)
        scale, q = search.scale, linear_integers(a, x, search, 4)
        outer = linear(a, scale[0], total(a, weights)[0], 32)
        d, steps = outer.scale, linear_integers(a, scale[0], outer, 32).astype(np.int8)
    d = d[0].astype(np.float16)
    divisors = d.astype(np.float32)[None] * (steps - np.int8(32)).astype(np.float32)
    again = xp.clip(nearest(x / divisors[None]), -4, 3) + 4
    q = xp.where(divisors[None] == 0, q, again).astype(np.uint8)
    steps = steps.astype(np.uint8)
    high = steps[0:4] >> 4 | steps[4:8] >> 4 << 2 | steps[8:12] >> 4 << 4 | steps[12:] >> 4 << 6
    scales = xp.concatenate((steps[:8] & 15 | (steps[8:] & 15) << 4, high), axis=0)
    return _pack_ones(a, q >> 2), _pack_twos(a, q & 3), scales.T, d


def q4_k(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    d, dmin, scales, q = _affine(a, values, 15, -1.0, 20, importance)
    return d, dmin, scales, _pack_pairs(q)


def q5_k(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    d, dmin, scales, q = _affine(a, values, 31, -0.5, 15, importance)
    return d, dmin, scales, _pack_ones(a, q >> 4), _pack_pairs(q & 15)


def q6_k(a: Arrays, values: Any, importance: ValueImportance | None) -> Fields:
    xp = a.np
    x = _by_sub_block(values, 16)
    weights = x * x if importance is None else _by_sub_block(importance.weights, 16)
    search = linear(a, x, weights, 32)
    scale = search.scale[0]
    factor = largest(a, scale)
    is_zero = xp.abs(factor) < EPSILON
    inverse = np.float32(-128) / factor
    d = xp.where(is_zero, np.float32(0), np.float32(1) / inverse)[0].astype(np.float16)
    steps = xp.minimum(127, nearest(inverse * scale)).astype(np.int8)
    steps = xp.where(is_zero, np.int8(0), steps)
    divisors = d.astype(np.float32)[None] * steps.astype(np.float32)
    again = xp.clip(nearest(x / divisors[None]), -32, 31) + 32
    q = xp.where(divisors[None] == 0, linear_integers(a, x, search, 32), again)
    q = xp.where(is_zero[None], 0, q).astype(np.uint8)
    halves = _in_order(q).reshape(-1, 2, 2, 64)
    low = halves[:, :, 0] & 15 | (halves[:, :, 1] & 15) << 4
    return low.reshape(-1, 128), _pack_twos(a, q >> 4), steps.T, d


def _affine(
    a: Arrays, values: Any, top: int, first: float, count: int, importance: ValueImportance | None
) -> tuple[Any, Any, Any, Any]:
    """d, dmin, the packed scales, and q as uint8 ``[32, 8, n]``."""
    x = _by_sub_block(values, 32)
    if importance is None:
        mean = total(a, x * x) / np.float32(32)
        search = affine(a, x, a.np.abs(x) + a.np.sqrt(mean), top, first, 0.1, count)
        scales, d = _rounded(a, search.scale[0], 63)
        minima, dmin = _rounded(a, -search.minimum[0], 63)
    else:
        weights = _weights(a, x, importance, 2)
        search = affine(a, x, weights, top, -0.9, 0.05, 36)
        scales, minima, d, dmin = _searched(a, search, weights, 63)
    q = _again(a, x, search, (scales, d), (minima, dmin), top)
    return d, dmin, _pack_six_bits(a, scales, minima), q


def _by_sub_block(values: Any, size: int) -> Any:
    """``[n, 256]`` as ``[size, 256 // size, n]``."""
    return values.reshape(-1, 256 // size, size).transpose(2, 1, 0).copy()


def _in_order(q: Any) -> Any:
    """The inverse of ``_by_sub_block``."""
    return q.transpose(2, 1, 0).reshape(-1, 256)


def _weights(a: Arrays, x: Any, importance: ValueImportance, factor: int) -> Any:
    """The importance of each value times the root of x² and ``factor`` times the block's mean square."""
    squares = x.transpose(1, 0, 2).reshape(256, -1)
    mean = np.float32(factor) * total(a, squares * squares) / np.float32(256)
    return _by_sub_block(importance.weights, x.shape[0]) * a.np.sqrt(mean[None] + x * x)


def _rounded(a: Arrays, factors: Any, top: int) -> tuple[Any, Any]:
    """Numbers ``[sub-blocks, n]`` as bytes of 0 to ``top``, and the factor of each block, float16 ``[n]``."""
    xp = a.np
    high = xp.maximum(xp.max(factors, axis=0, keepdims=True), np.float32(0))
    inverse = xp.where(high > 0, np.float32(top) / high, np.float32(0))
    steps = nearest(inverse * factors).astype(np.uint8)
    return xp.minimum(steps, np.uint8(top)), (high[0] / np.float32(top)).astype(np.float16)


def _searched(a: Arrays, search: Affine, weights: Any, top: int) -> tuple[Any, Any, Any, Any]:
    """The scales and minima as bytes of 0 to ``top``, d and dmin, with the least weighted error."""
    sums = total(a, weights)[0]
    d, scales = non_negative(a, search.scale[0], sums, top)
    dmin, minima = non_negative(a, -search.minimum[0], sums, top)
    bytes_of = (one.astype(np.uint8) for one in (scales, minima))
    return *bytes_of, d[0].astype(np.float16), dmin[0].astype(np.float16)


def _again(
    a: Arrays, x: Any, search: Affine, scales: tuple[Any, Any], minima: tuple[Any, Any], top: int
) -> Any:
    """The integers for the rounded scales, or those of the search where the scale is 0, as bytes."""
    wide = [
        factor.astype(np.float32)[None, None] * steps.astype(np.float32)[None]
        for steps, factor in (scales, minima)
    ]
    q = a.np.clip(nearest((x + wide[1]) / wide[0]), 0, top)
    kept = affine_integers(a, x, search, top).astype(np.int32)
    return a.np.where(wide[0] == 0, kept, q).astype(np.uint8)


def _pack_six_bits(a: Arrays, scales: Any, minima: Any) -> Any:
    """Packs 8 scales and 8 minima of 6 bits into the 12 bytes that ``k_quants`` documents."""
    parts = (
        scales[:4] | scales[4:] >> 4 << 6,
        minima[:4] | minima[4:] >> 4 << 6,
        scales[4:] & 15 | (minima[4:] & 15) << 4,
    )
    return a.np.concatenate(parts, axis=0).T


def _pack_pairs(q: Any) -> Any:
    """Packs each two sub-blocks into 32 bytes: the first in the low nibbles, the second in the high ones."""
    pairs = q[:, 0::2] | q[:, 1::2] << 4
    return pairs.transpose(2, 1, 0).reshape(-1, 128)


def _pack_ones(a: Arrays, q: Any) -> Any:
    """Packs bits into 32 bytes: bit k of byte l is that of value 32 * k + l."""
    return a.np.packbits(_in_order(q).reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0]


def _pack_twos(a: Arrays, q: Any) -> Any:
    """Packs 2 bits of each value into 64 bytes, those of l, l + 32, l + 64 and l + 96 of a half into one."""
    parts = _in_order(q).reshape(-1, 2, 4, 32)
    packed = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return packed.reshape(-1, 64)
