"""Searches for the scales of quantised blocks, written once for NumPy and ``jax.numpy``.

The formulas are those of ``make_*_quants`` in ggml-quants.c; with NumPy the order of operations is
ggml's too, so that the results are equal in every bit. A search works on many sub-blocks at a time:
``x`` and ``weights`` are float32 ``[size, ...]``, and results have the same rank, ``[1, ...]``.

===========  =====================================  =================================================
function     ggml                                   finds
===========  =====================================  =================================================
affine       make_qkx2_quants, make_qkx3_quants     x = scale * q + minimum, q of 0 to top
linear       make_qx_quants                         x = scale * q, q of -top to top - 1
positive     make_qp_quants                         x = scale * q for x >= 0, q of 0 to top
descent      make_q3_quants                         as linear, changing one q after the other
===========  =====================================  =================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Sub-blocks of smaller values are encoded as zeros.
EPSILON = np.float32(1e-15)
# Adding this to a number below 2 ** 22 leaves the nearest integer in the low bits of the mantissa.
_ROUNDER = np.float32(3 << 22)


class Arrays(NamedTuple):
    """The array module that an encoder computes with, NumPy or ``jax.numpy``, and a loop for it."""

    np: Any
    # Like jax.lax.fori_loop: (first, end, body, state) → state; body(step, state) → state
    loop: Callable[[int, int, Callable[[Any, Any], Any], Any], Any]


def _python_loop(first: int, end: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
    for step in range(first, end):
        state = body(step, state)
    return state


NUMPY = Arrays(np, _python_loop)


class Affine(NamedTuple):
    """``scale`` and ``minimum`` (at most 0) of each sub-block; ``inverse`` and ``origin`` give the integers."""

    scale: Any
    minimum: Any
    inverse: Any
    origin: Any


class LinearCode(NamedTuple):
    """``scale`` of each sub-block; ``inverse`` gives the integers, which are 0 where ``is_zero``."""

    scale: Any
    inverse: Any
    is_zero: Any


def nearest(values: Any) -> Any:
    """The nearest integers, halves to even: float32 → int32. ggml's ``nearest_int``.

    As in ggml, NaN gives 0, infinities give -2 ** 22, and too large numbers wrap around.

    Example:
        >>> nearest(np.array([0.5, 1.5, -2.4, np.nan], np.float32))
        array([ 0,  2, -2,  0], dtype=int32)
    """
    return ((values + _ROUNDER).view(np.int32) & 0x7FFFFF) - 0x400000


def total(a: Arrays, x: Any) -> Any:
    """The sum over the first axis, from the first row to the last as in ggml."""
    return a.np.sum(x, axis=0, keepdims=True)


def largest(a: Arrays, x: Any) -> Any:
    """The value of largest magnitude, the first of several, along the first axis.

    Example:
        >>> largest(NUMPY, np.array([[1.0], [-3.0], [3.0]], np.float32))
        array([[-3.]], dtype=float32)
    """
    xp = a.np
    rows = xp.argmax(xp.abs(x), axis=0, keepdims=True)
    # Adding 0 turns -0 into 0, as in ggml.
    return xp.take_along_axis(x, rows, axis=0) + np.float32(0)


def finite(a: Arrays, inverse: Any) -> Any:
    """``inverse`` with infinities set to 0, which gives the integers that ggml computes from them, 0."""
    return a.np.where(a.np.isinf(inverse), np.float32(0), inverse)


def affine_integers(a: Arrays, x: Any, found: Affine, top: int) -> Any:
    """The integers of an affine search, as float32."""
    return _integers(a, x - found.origin, found.inverse, 0, top)


def linear_integers(a: Arrays, x: Any, found: LinearCode, top: int) -> Any:
    """The integers of a linear search plus ``top``: int32 of 0 to 2 * top - 1, or 0 for zeros."""
    q = a.np.clip(nearest(x * found.inverse), -top, top - 1) + top
    return a.np.where(found.is_zero, 0, q)


# The in-place operations below act only on new arrays: with NumPy they save memory, with JAX they are ordinary ones.


def _integers(a: Arrays, x: Any, inverse: Any, lowest: int, highest: int) -> Any:
    """x * inverse, rounded and clipped, as float32."""
    q = a.np.rint(x * inverse)
    return a.np.minimum(a.np.maximum(q, np.float32(lowest)), np.float32(highest))


def affine(
    a: Arrays,
    x: Any,
    weights: Any,
    top: int,
    first: float,
    step: float,
    count: int,
    *,
    absolute: bool = False,
) -> Affine:
    """Search for a scale and a minimum of each sub-block with the least weighted error.

    It tries ``count + 1`` scales: the first maps the largest value to ``top + first``, each further one
    to ``step`` more. It starts from the best minimum so far, which need not be the smallest value.

    Args:
        absolute: whether to count absolute errors instead of their squares.
    """
    xp, zero = a.np, np.float32(0)

    def error(q: Any, scale: Any, minimum: Any) -> Any:
        wrong = q * scale
        wrong += minimum
        wrong -= x
        wrong = xp.abs(wrong) if absolute else wrong * wrong
        wrong *= weights
        return total(a, wrong)

    sum_w, sum_x = total(a, weights), total(a, weights * x)
    high = xp.max(x, axis=0, keepdims=True)
    # Of 0 and -0 this takes the first, as ggml does.
    low = xp.take_along_axis(x, xp.argmin(x, axis=0, keepdims=True), axis=0)
    low = xp.where(low > 0, zero, low)
    # The difference of zeros of both signs may be -0.
    inverse = np.float32(top) / (high - low + zero)
    # The scale is 0 if all values are equal and not positive; then no attempt improves it.
    start = Affine(np.float32(1) / inverse, low, finite(a, inverse), low)
    least = error(affine_integers(a, x, start, top), start.scale, low)

    def attempt(k: Any, state: tuple[Affine, Any]) -> tuple[Affine, Any]:
        best, least = state
        target = np.float32(first) + np.float32(step) * xp.float32(k) + np.float32(top)
        inverse = finite(a, target / (high - best.minimum))
        q = _integers(a, x - best.minimum, inverse, 0, top)
        products = weights * q
        sum_q, sum_qq = total(a, products), total(a, products * q)
        products *= x
        sum_qx = total(a, products)
        determinant = sum_w * sum_qq - sum_q * sum_q
        scale = (sum_w * sum_qx - sum_x * sum_q) / determinant
        minimum = (sum_qq * sum_x - sum_q * sum_qx) / determinant
        above = minimum > 0
        minimum = xp.where(above, zero, minimum)
        scale = xp.where(above, sum_qx / sum_qq, scale)
        found = error(q, scale, minimum)
        better = (determinant > 0) & (found < least)
        new = Affine(scale, minimum, inverse, best.minimum)
        kept = (xp.where(better, one, other) for one, other in zip(new, best, strict=True))
        return Affine(*kept), xp.where(better, found, least)

    best, _ = a.loop(0, count + 1, attempt, (start, least))
    return best


def linear(a: Arrays, x: Any, weights: Any, top: int) -> LinearCode:
    """Search for a signed scale of each sub-block with the least weighted squared error.

    The first scale maps the largest value to ``-top``, the others to up to 0.9 more or less.
    """
    xp, zero = a.np, np.float32(0)
    extreme = largest(a, x)
    weighted = weights * x

    def moments(inverse: Any) -> tuple[Any, Any]:
        q = _integers(a, x, inverse, -top, top - 1)
        moment = total(a, weighted * q)
        squares = weights * q
        squares *= q
        return moment, total(a, squares)

    def attempt(number: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        scale, best, most = state
        k = xp.where(number >= 0, number + 1, number)  # 0 was the first of all
        inverse = -(np.float32(top) + np.float32(0.1) * xp.float32(k)) / extreme
        moment, square = moments(inverse)
        better = (square > 0) & (moment * moment > most * square)
        found = moment / square
        return (
            xp.where(better, found, scale),
            xp.where(better, inverse, best),
            xp.where(better, found * moment, most),
        )

    inverse = np.float32(-top) / extreme
    moment, square = moments(inverse)
    scale = xp.where(square == 0, zero, moment / square)
    state = scale, inverse, scale * moment
    scale, inverse, _ = a.loop(-9, 9, attempt, state)
    is_zero = xp.abs(extreme) < EPSILON
    return LinearCode(xp.where(is_zero, zero, scale), inverse, is_zero)


def non_negative(a: Arrays, x: Any, weights: Any, top: int) -> tuple[Any, Any]:
    """A scale for the non-negative numbers along the first axis, and their integers, int32 of 0 to ``top``."""
    xp, zero = a.np, np.float32(0)
    high = xp.maximum(xp.max(x, axis=0, keepdims=True), zero)
    is_zero = high < EPSILON

    def error(scale: Any, q: Any) -> Any:
        wrong = x - scale * xp.float32(q)
        return total(a, weights * wrong * wrong)

    def attempt(number: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        inverse, least = state
        k = xp.where(number >= 0, number + 1, number)
        other = (np.float32(0.1) * xp.float32(k) + np.float32(top)) / high
        q = xp.minimum(nearest(other * x), top)
        found = error(np.float32(1) / other, q)
        better = found < least
        return xp.where(better, other, inverse), xp.where(better, found, least)

    inverse = np.float32(top) / high
    least = error(np.float32(1) / inverse, nearest(inverse * x))
    inverse, _ = a.loop(-4, 4, attempt, (inverse, least))
    q = xp.clip(nearest(inverse * x), 0, top)
    scale, q = _descend(a, x, weights, q, 0, top, needs_square=True)
    return xp.where(is_zero, zero, scale), xp.where(is_zero, 0, q)


def descent(a: Arrays, x: Any, top: int) -> tuple[Any, Any]:
    """A signed scale of each sub-block, and its integers, int32 of 0 to 2 * top - 1; zeros give 0 for both."""
    xp = a.np
    extreme = largest(a, x)
    is_zero = xp.abs(extreme) < EPSILON
    q = xp.clip(nearest(np.float32(-top) / extreme * x), -top, top - 1)
    scale, q = _descend(a, x, x * x, q, -top, top - 1, needs_square=False)
    return xp.where(is_zero, np.float32(0), scale), xp.where(is_zero, 0, q + top)


def _descend(
    a: Arrays, x: Any, weights: Any, q: Any, lowest: int, highest: int, *, needs_square: bool
) -> tuple[Any, Any]:
    """Changes one integer after the other while that increases moment² / square; five rounds."""
    xp = a.np
    wide = xp.float32(q)
    moment, square = total(a, weights * x * wide), total(a, weights * wide * wide)

    def round_of_changes(_: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        q, moment, square = state
        rows = []
        for i in range(x.shape[0]):
            value, weight, old = x[i : i + 1], weights[i : i + 1], q[i : i + 1]
            wide = xp.float32(old)
            m, s = moment - weight * value * wide, square - weight * wide * wide
            take = (m > 0) & (s > 0) if needs_square else m > 0
            new = xp.clip(nearest(value * s / m), lowest, highest)
            wide = xp.float32(new)
            m, s = m + weight * value * wide, s + weight * wide * wide
            take = take & (new != old) & (s > 0) & (m * m * square > moment * moment * s)
            rows.append(xp.where(take, new, old))
            moment, square = xp.where(take, m, moment), xp.where(take, s, square)
        return xp.concatenate(rows, axis=0), moment, square

    q, moment, square = a.loop(0, 5, round_of_changes, (q, moment, square))
    return xp.where(square == 0, np.float32(0), moment / square), q
