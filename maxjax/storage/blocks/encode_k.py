"""Floor 1. Encoding of ggml's K-quants Q4_K, Q5_K and Q6_K; ``k_quants`` tells their form.

Source: ggml-quants.c, ``quantize_row_q4_K_ref`` and its like. The scales of the sub-blocks of 256
values are searched for one by one, then rounded to multiples of the largest; the values are
quantised anew by the rounded scales. Where a rounded scale is 0, the integers of the search stay.

An encoder takes float32 ``[n, 256]`` and fills blocks uint8 ``[n, nbytes]``. Inside, values are
``[place in the sub-block, sub-block, block]``. Below: layout, scratch, encode_search. Above: encoders.
"""

from __future__ import annotations

import numpy as np

from .encode_search import EPSILON, Affine, Linear, nearest
from .layout import LAYOUTS
from .scratch import Scratch


def q4_k(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    d, dmin, scales, qs = LAYOUTS["Q4_K"].split(blocks)
    q = _affine(values, 15, -1.0, 20, (d, dmin, scales), scratch)
    _pack_pairs(q, qs)


def q5_k(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    d, dmin, scales, qh, qs = LAYOUTS["Q5_K"].split(blocks)
    q = _affine(values, 31, -0.5, 15, (d, dmin, scales), scratch)
    _pack_pairs(q & 15, qs)
    qh[...] = np.packbits(q >> 4, axis=1, bitorder="little")[:, 0].T


def q6_k(values: np.ndarray, blocks: np.ndarray, scratch: Scratch) -> None:
    ql, qh, scales, d = LAYOUTS["Q6_K"].split(blocks)
    x = _by_sub_block(values, 16, scratch)
    search = Linear(x.reshape(16, -1), 32, scratch)
    found = search.scale.reshape(16, -1)
    magnitudes = np.abs(found)
    largest = np.take_along_axis(found, magnitudes.argmax(axis=0)[None], axis=0)[0]
    nothing = np.abs(largest) < EPSILON
    inverse = np.float32(-128) / largest
    d[...] = np.where(nothing, 0, np.float32(1) / inverse)
    steps = np.minimum(127, nearest(inverse * found)).astype(np.int8)
    steps[:, nothing] = 0
    scales[...] = steps.T
    divisors = d.astype(np.float32) * steps
    q = np.clip(nearest(x / divisors), -32, 31).astype(np.int8).view(np.uint8) + np.uint8(32)
    _keep_where_zero(q, divisors, search)
    q[:, :, nothing] = 0
    # Of each half of a block: four groups of 32 values, each of two sub-blocks.
    groups = q.reshape(16, 2, 4, 2, -1).transpose(2, 4, 1, 3, 0).reshape(4, -1, 2, 32)
    low, high = groups & 15, groups >> 4
    ql.reshape(-1, 2, 2, 32)[...] = np.stack((low[0] | low[2] << 4, low[1] | low[3] << 4), axis=2)
    qh.reshape(-1, 2, 32)[...] = high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6


def _affine(
    values: np.ndarray,
    top: int,
    first: float,
    count: int,
    fields: tuple[np.ndarray, np.ndarray, np.ndarray],
    scratch: Scratch,
) -> np.ndarray:
    """Fills d, dmin and the packed scales; gives the q, uint8 of ``[32, 8, n]``."""
    d, dmin, packed = fields
    x = _by_sub_block(values, 32, scratch)
    search = Affine(x.reshape(32, -1), top, first, count, scratch)
    scales, d[...] = _six_bits(search.scale.reshape(8, -1))
    minima, dmin[...] = _six_bits(-search.minimum.reshape(8, -1))
    packed[...] = _pack_six_bits(scales, minima)
    divisors = d.astype(np.float32) * scales
    shifts = dmin.astype(np.float32) * minima
    q = np.clip(nearest((x + shifts) / divisors), 0, top).astype(np.uint8)
    _keep_where_zero(q, divisors, search)
    return q


def _by_sub_block(values: np.ndarray, size: int, scratch: Scratch) -> np.ndarray:
    """``[n, 256]`` as ``[size, 256 // size, n]``."""
    x = scratch.array("x", (size, 256 // size, len(values)), "f4")
    np.copyto(x, values.reshape(len(values), -1, size).transpose(2, 1, 0))
    return x


def _six_bits(factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers ``[8, n]`` as uint8 of 0 to 63, and what one is worth in each block."""
    largest = np.maximum(np.maximum.reduce(factors, axis=0), np.float32(0))
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    steps = nearest(inverse * factors).astype(np.uint8)
    return np.minimum(steps, 63), largest / np.float32(63)


def _pack_six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """12 bytes of ``[8, n]`` scales and as many minima; ``k_quants`` tells how they lie."""
    return np.concatenate(
        (
            scales[:4] | scales[4:] >> 4 << 6,
            minima[:4] | minima[4:] >> 4 << 6,
            scales[4:] & 15 | (minima[4:] & 15) << 4,
        )
    ).T


def _keep_where_zero(q: np.ndarray, divisors: np.ndarray, search: Affine | Linear) -> None:
    """Puts the integers of the search where the rounded scale is 0."""
    zero = divisors == 0
    if zero.any():
        np.copyto(q, search.integers().reshape(q.shape), where=zero, casting="unsafe")


def _pack_pairs(q: np.ndarray, qs: np.ndarray) -> None:
    """32 bytes of two sub-blocks: the first one's values in the low halves, the other's above."""
    pairs = q[:, 0::2] | q[:, 1::2] << 4
    qs.reshape(-1, 4, 32)[...] = pairs.transpose(2, 1, 0)
