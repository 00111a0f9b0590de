"""Encoders of ggml's K-quants Q4_K, Q5_K and Q6_K, whose layouts ``k_quants`` documents.

The algorithm is that of ``quantize_row_*_K_ref`` in ggml-quants.c. In each block of 256 values, the scale
of every sub-block is searched separately and then rounded to a multiple of a common factor; the
values are quantised again with the rounded scale. If that is 0, the integers of the search are kept.

An encoder takes float32 ``[n, 256]`` and fills blocks uint8 ``[n, nbytes]``. Internally, values have
the axes ``[position in the sub-block, sub-block, block]``.
"""

from __future__ import annotations

import numpy as np

from .layout import LAYOUTS
from .scratch import Scratch

# Q6_K: a sub-block of smaller values, and a block of smaller scales, is encoded as zeros.
EPSILON = np.float32(1e-15)

_TENTH = np.float32(0.1)
# Adding this to a number below 2 ** 22 leaves the nearest integer in the low bits of the mantissa.
_ROUNDER = np.float32(3 << 22)


def nearest(values: np.ndarray) -> np.ndarray:
    """The nearest integers, halves to even: float32 → int32. ggml's ``nearest_int``.

    As in ggml, NaN gives 0, infinities give -2 ** 22, and too large numbers wrap around.

    Example:
        >>> nearest(np.array([0.5, 1.5, -2.4, np.nan], np.float32))
        array([ 0,  2, -2,  0], dtype=int32)
    """
    return ((values + _ROUNDER).view(np.int32) & 0x7FFFFF) - 0x400000


def integers(
    x: np.ndarray, inverse: np.ndarray, lowest: int, highest: int, out: np.ndarray
) -> np.ndarray:
    """x * inverse, rounded to integers and clipped to a range, as float32."""
    np.multiply(x, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, np.float32(lowest), np.float32(highest), out=out)


def total(x: np.ndarray) -> np.ndarray:
    """The sum of each column, added from the first row to the last as in ggml."""
    return np.add.reduce(x, axis=0)


class Affine:
    """Search for a scale and a minimum of each sub-block: float32 ``x`` of ``[size, sub-blocks]``.

    ``scale`` and ``minimum`` (at most 0) approximate x as scale * q + minimum, with integers q from 0 to
    ``top``. The search tries ``count + 1`` scales: the first maps the largest value to ``top + first``,
    each further one to 0.1 more. It starts from the best minimum so far, which need not be the
    smallest value. ``x`` is kept, not copied.
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
        # 0 if all values are equal and not positive; then no attempt improves it.
        self.scale = np.float32(1) / inverse
        # The integers are computed with these; `minimum` is then fitted to the integers.
        self.inverse, self.origin = _finite(inverse), self.minimum.copy()
        self.integers()
        self.error = self._error(self.scale, self.minimum)
        for step in range(count + 1):
            target = np.float32(first) + _TENTH * np.float32(step) + np.float32(top)
            self._attempt(_finite(target / (highest - self.minimum)))

    def integers(self) -> np.ndarray:
        """The integers q of the best scales: float32 ``[size, sub-blocks]``, valid until the next call."""
        return self._integers(self.inverse, self.origin)

    def _integers(self, inverse: np.ndarray, origin: np.ndarray) -> np.ndarray:
        np.subtract(self.x, origin, out=self.q)
        return integers(self.q, inverse, 0, self.top, self.q)

    def _weigh(self) -> None:
        """Sets the weight of each value: its magnitude plus the root mean square of its sub-block."""
        np.multiply(self.x, self.x, out=self.products)
        mean = total(self.products) / np.float32(len(self.x))
        np.abs(self.x, out=self.weights)
        self.weights += np.sqrt(mean)
        self.sum_w = total(self.weights)
        self.sum_x = total(np.multiply(self.weights, self.x, out=self.products))

    def _error(self, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        """The weighted sum of squared errors; overwrites q."""
        self.q *= scale
        self.q += minimum
        self.q -= self.x
        np.multiply(self.q, self.q, out=self.q)
        self.q *= self.weights
        return total(self.q)

    def _fit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The least-squares scales and minima for q, and the determinants, positive if there is a solution."""
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
        """Tries a scale, and keeps it for the sub-blocks whose error it reduces."""
        self._integers(inverse, self.minimum)
        scale, minimum, determinant = self._fit()
        error = self._error(scale, minimum)
        better = (determinant > 0) & (error < self.error)
        np.copyto(self.origin, self.minimum, where=better)
        np.copyto(self.inverse, inverse, where=better)
        np.copyto(self.error, error, where=better)
        np.copyto(self.scale, scale, where=better)
        np.copyto(self.minimum, minimum, where=better)


def _finite(inverse: np.ndarray) -> np.ndarray:
    """``inverse`` with infinities set to 0, which gives the integers that ggml computes from them, 0."""
    inverse[np.isinf(inverse)] = 0
    return inverse


class Linear:
    """Search for a signed scale of each sub-block: float32 ``x`` of ``[size, sub-blocks]``.

    ``scale`` approximates x as scale * q, with integers q from ``-top`` to ``top - 1``; it is 0 if all
    values are below ``EPSILON``. ``x`` is kept, not copied.
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
        self.is_zero = np.abs(largest) < EPSILON
        self.scale[self.is_zero] = 0

    def integers(self) -> np.ndarray:
        """The integers q of the best scales, plus ``top``; 0 in sub-blocks that are encoded as zeros."""
        q = integers(self.x, self.inverse, -self.top, self.top - 1, self.q)
        q += np.float32(self.top)
        q[:, self.is_zero] = 0
        return q

    def _moments(self, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sums of w * x * q and of w * q * q, with weights w = x * x."""
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
    scale = search.scale.reshape(16, -1)
    magnitudes = np.abs(scale)
    largest = np.take_along_axis(scale, magnitudes.argmax(axis=0)[None], axis=0)[0]
    is_zero = np.abs(largest) < EPSILON
    inverse = np.float32(-128) / largest
    d[...] = np.where(is_zero, 0, np.float32(1) / inverse)
    steps = np.minimum(127, nearest(inverse * scale)).astype(np.int8)
    steps[:, is_zero] = 0
    scales[...] = steps.T
    divisors = d.astype(np.float32) * steps
    q = np.clip(nearest(x / divisors), -32, 31).astype(np.int8).view(np.uint8) + np.uint8(32)
    _keep_where_zero(q, divisors, search)
    q[:, :, is_zero] = 0
    # Each half of a block has four groups of 32 values, of two sub-blocks each.
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
    """Fills d, dmin and the packed scales; returns q as uint8 ``[32, 8, n]``."""
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
    """Numbers ``[8, n]`` quantised to 6 bits, and the factor of each block."""
    largest = np.maximum(np.maximum.reduce(factors, axis=0), np.float32(0))
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    steps = nearest(inverse * factors).astype(np.uint8)
    return np.minimum(steps, 63), largest / np.float32(63)


def _pack_six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Packs 8 scales and 8 minima of 6 bits into the 12 bytes that ``k_quants`` documents."""
    return np.concatenate(
        (
            scales[:4] | scales[4:] >> 4 << 6,
            minima[:4] | minima[4:] >> 4 << 6,
            scales[4:] & 15 | (minima[4:] & 15) << 4,
        )
    ).T


def _keep_where_zero(q: np.ndarray, divisors: np.ndarray, search: Affine | Linear) -> None:
    """Uses the integers of the search where the rounded scale is 0."""
    zero = divisors == 0
    if zero.any():
        np.copyto(q, search.integers().reshape(q.shape), where=zero, casting="unsafe")


def _pack_pairs(q: np.ndarray, qs: np.ndarray) -> None:
    """Packs each two sub-blocks into 32 bytes: the first in the low nibbles, the second in the high ones."""
    pairs = q[:, 0::2] | q[:, 1::2] << 4
    qs.reshape(-1, 4, 32)[...] = pairs.transpose(2, 1, 0)
