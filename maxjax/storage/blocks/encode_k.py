"""Encoding of ggml's K-quants Q4_K, Q5_K and Q6_K; ``k_quants`` tells their form.

Source: ggml-quants.c, ``quantize_row_q4_K_ref`` and its like. The scales of the sub-blocks of 256
values are searched for one by one, then rounded to multiples of the largest; the values are
quantised anew by the rounded scales. Where a rounded scale is 0, the integers of the search stay.

An encoder takes float32 ``[n, 256]`` and fills blocks uint8 ``[n, nbytes]``. Inside, values are
``[place in the sub-block, sub-block, block]``.
"""

from __future__ import annotations

import numpy as np

from .layout import LAYOUTS
from .scratch import Scratch

# Below this, all values of a sub-block of Q6_K are taken for zero, and all scales of a block.
EPSILON = np.float32(1e-15)

_TENTH = np.float32(0.1)
# Added to a number of less than 2 ** 22, this leaves the integer nearest to it in the mantissa.
_MAGIC = np.float32(3 << 22)


def nearest(values: np.ndarray) -> np.ndarray:
    """The nearest integers, halves to even: float32 → int32. ggml's ``nearest_int``.

    What is 0 of NaN, -2 ** 22 of infinities, and the low bits of numbers that are too large, is so
    in ggml's files too.

    Example:
        >>> nearest(np.array([0.5, 1.5, -2.4, np.nan], np.float32))
        array([ 0,  2, -2,  0], dtype=int32)
    """
    return ((values + _MAGIC).view(np.int32) & 0x7FFFFF) - 0x400000


def integers(
    x: np.ndarray, inverse: np.ndarray, lowest: int, highest: int, out: np.ndarray
) -> np.ndarray:
    """x * inverse as the nearest integers of a range, in float32."""
    np.multiply(x, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, np.float32(lowest), np.float32(highest), out=out)


def total(x: np.ndarray) -> np.ndarray:
    """The sums of the columns, from the first row to the last."""
    return np.add.reduce(x, axis=0)


class Affine:
    """A scale and a minimum for each sub-block: float32 ``x`` of ``[size, sub-blocks]``.

    ``scale`` and ``minimum`` (at most 0) are such that x is about scale * q + minimum with q of
    0 to ``top``. Tried are ``count + 1`` scales that put the largest value at ``top + first``, at a
    tenth more, and so on, above the minimum that is the best so far: not always the smallest value.
    ``x`` stays in use.
    """

    def __init__(self, x: np.ndarray, top: int, first: float, count: int, scratch: Scratch) -> None:
        self.x, self.top = x, top
        self.weights, self.q, self.products, self._squares = (
            scratch.array(name, x.shape, "f4") for name in ("weights", "q", "products", "squares")
        )
        self._weigh()
        highest = np.maximum.reduce(x, axis=0)
        self.minimum = np.minimum(np.minimum.reduce(x, axis=0), np.float32(0))
        inverse = np.float32(top) / (highest - self.minimum)
        # 0 where all values are the same and not above 0; no attempt is better then.
        self.scale = np.float32(1) / inverse
        # What the integers are made by, as `minimum` goes on to be what they lead to.
        self.inverse, self.origin = _without_infinity(inverse), self.minimum.copy()
        self.integers()
        self.error = self._error(self.scale, self.minimum)
        for step in range(count + 1):
            target = np.float32(first) + _TENTH * np.float32(step) + np.float32(top)
            self._attempt(_without_infinity(target / (highest - self.minimum)))

    def integers(self) -> np.ndarray:
        """The q of the scales found: float32 ``[size, sub-blocks]``, valid until the next call."""
        return self._integers(self.inverse, self.origin)

    def _integers(self, inverse: np.ndarray, origin: np.ndarray) -> np.ndarray:
        np.subtract(self.x, origin, out=self.q)
        return integers(self.q, inverse, 0, self.top, self.q)

    def _weigh(self) -> None:
        """A value's weight is its magnitude and the root of the mean square of its sub-block."""
        np.multiply(self.x, self.x, out=self.products)
        mean = total(self.products) / np.float32(len(self.x))
        np.abs(self.x, out=self.weights)
        self.weights += np.sqrt(mean)
        self.sum_w = total(self.weights)
        self.sum_x = total(np.multiply(self.weights, self.x, out=self.products))

    def _error(self, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        """The weighted sum of squares; overwrites q."""
        self.q *= scale
        self.q += minimum
        self.q -= self.x
        np.multiply(self.q, self.q, out=self.q)
        self.q *= self.weights
        return total(self.q)

    def _fit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The best scales and minima for the q, and the determinants: above 0 where there is one."""
        products = np.multiply(self.weights, self.q, out=self.products)
        sum_q = total(products)
        squares = np.multiply(products, self.q, out=self._squares)
        sum_qq = total(squares)
        products *= self.x
        sum_qx = total(products)
        determinant = self.sum_w * sum_qq - sum_q * sum_q
        scale = (self.sum_w * sum_qx - self.sum_x * sum_q) / determinant
        minimum = (sum_qq * self.sum_x - sum_q * sum_qx) / determinant
        above = minimum > 0
        np.copyto(minimum, 0, where=above)
        np.copyto(scale, sum_qx / sum_qq, where=above)
        return scale, minimum, determinant

    def _attempt(self, inverse: np.ndarray) -> None:
        """Keeps what this scale leads to where the error is less than that of the best so far."""
        self._integers(inverse, self.minimum)
        scale, minimum, determinant = self._fit()
        error = self._error(scale, minimum)
        better = (determinant > 0) & (error < self.error)
        np.copyto(self.origin, self.minimum, where=better)
        np.copyto(self.inverse, inverse, where=better)
        np.copyto(self.error, error, where=better)
        np.copyto(self.scale, scale, where=better)
        np.copyto(self.minimum, minimum, where=better)


def _without_infinity(inverse: np.ndarray) -> np.ndarray:
    """0 for infinity, which makes all integers 0: in ggml those of 0 * inf and of inf are."""
    inverse[np.isinf(inverse)] = 0
    return inverse


class Linear:
    """A scale with a sign for each sub-block: float32 ``x`` of ``[size, sub-blocks]``.

    ``scale`` is such that x is about scale * q with q of ``-top`` to ``top - 1``; 0 where all
    values are below ``EPSILON``. ``x`` stays in use.
    """

    def __init__(self, x: np.ndarray, top: int, scratch: Scratch) -> None:
        self.x, self.top = x, top
        self.cubes, self.squares, self.q, self.products = (
            scratch.array(name, x.shape, "f4") for name in ("cubes", "squares", "q", "products")
        )
        np.abs(x, out=self.products)
        columns = self.products.argmax(axis=0)[None]
        largest = np.take_along_axis(x, columns, axis=0)[0]
        np.multiply(x, x, out=self.squares)
        np.multiply(self.squares, x, out=self.cubes)
        self.inverse = np.float32(-top) / largest
        moment, square = self._moments(self.inverse)
        self.scale = moment / square
        best = self.scale * moment
        for step in (*range(-9, 0), *range(1, 10)):
            inverse = -(np.float32(top) + _TENTH * np.float32(step)) / largest
            moment, square = self._moments(inverse)
            better = moment * moment > best * square
            scale = moment / square
            np.copyto(self.scale, scale, where=better)
            np.copyto(best, scale * moment, where=better)
            np.copyto(self.inverse, inverse, where=better)
        self.none = np.abs(largest) < EPSILON
        self.scale[self.none] = 0

    def integers(self) -> np.ndarray:
        """The q of the scales found, plus ``top``; 0 where all values are taken for zero."""
        q = integers(self.x, self.inverse, -self.top, self.top - 1, self.q)
        q += np.float32(self.top)
        q[:, self.none] = 0
        return q

    def _moments(self, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sums of w * x * q and of w * q * q, with the squares of the values as weights."""
        q = integers(self.x, inverse, -self.top, self.top - 1, self.q)
        moment = total(np.multiply(self.cubes, q, out=self.products))
        np.multiply(self.squares, q, out=self.products)
        return moment, total(np.multiply(self.products, q, out=self.products))


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
