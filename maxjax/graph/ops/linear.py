"""Matmul, outer product, parts of a matrix, and the inverse FFT.

``ops.matmul(x, w.T)`` of a Weight is the fast product of a layer, as ``x @ w.T`` is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType, promote
from ..operands import check_product, same_rank
from ..weight.transpose import TransposedValue, WeightTranspose
from .lift import array, axis_of, floating, lift, meet, narrow, same


def matmul(lhs: Any, rhs: Any) -> Any:
    """``lhs @ rhs``: matrices in the last two axes, one for each place in the axes before.

    A tensor of one axis is a row on the left and a column on the right, as in NumPy.
    16-bit floats are multiplied with float32 accumulation and rounded once.

    Raises:
        ValueError: the sizes do not fit (the message names both shapes), or an integer
            tensor meets a float.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> ops.matmul(jnp.ones((5, 2, 3)), jnp.ones((3, 4))).shape
        (5, 2, 4)
    """
    if isinstance(rhs, (WeightTranspose, TransposedValue)):
        if rhs.T.stored.packing is None:
            promote(DType.of(lhs.dtype), rhs.dtype)
        return _after(lhs, lambda x: x @ rhs)
    return _matmul(lhs, rhs)


@lift
def _after(x: Any, function: Callable[[jax.Array], Any]) -> Any:
    return function(array(x))


@lift
def _matmul(lhs: Any, rhs: Any) -> Any:
    a, b = array(lhs), array(rhs)
    check_product(a.shape, b.shape)
    if a.dtype != b.dtype:
        dtype = promote(DType.of(a.dtype), DType.of(b.dtype)).np
        a, b = a.astype(dtype), b.astype(dtype)
    if min(a.ndim, b.ndim) >= 2:
        a, b = same_rank(a, b)
    if not narrow(a.dtype):
        return jnp.matmul(a, b)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


@lift
def outer(lhs: Any, rhs: Any) -> Any:
    """``out[i, j] = lhs[i] · rhs[j]`` for tensors of one axis.

    Raises:
        ValueError: the number of axes is wrong.
    """
    a, b = array(lhs), array(rhs)
    if (a.ndim, b.ndim) != (1, 1):
        raise ValueError(f"outer takes tensors of one axis, not of shapes {a.shape} and {b.shape}")
    return jnp.multiply(*meet(a[:, None], b[None, :]))


@lift
def band_part(
    x: Any, num_lower: int | None = None, num_upper: int | None = None, exclude: bool = False
) -> Any:
    """The matrices in the last two axes, zero but for a band round the diagonal.

    Args:
        num_lower: how many diagonals below the main one belong to the band; None or -1: all.
        num_upper: how many above.
        exclude: the band itself becomes zero, and the rest stays.

    Raises:
        ValueError: fewer than two axes, or a negative number.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.band_part(jnp.ones((3, 3), int), None, 0))
        [[1 0 0]
         [1 1 0]
         [1 1 1]]
    """
    x = array(x)
    if x.ndim < 2:
        raise ValueError(f"band_part takes a tensor of two axes or more, not of shape {x.shape}")
    row, column = (jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - i) for i in (2, 1))
    band = jnp.full(x.shape, True)
    for name, number, distance in (
        ("num_lower", num_lower, row - column),
        ("num_upper", num_upper, column - row),
    ):
        if number is None or number == -1:
            continue
        if number < 0:
            raise ValueError(f"band_part: {name} must not be negative, and is {number}")
        band = band & (distance <= number)
    return jnp.where(band ^ exclude, x, jnp.zeros((), x.dtype))


@lift
def as_interleaved_complex(x: Any) -> Any:
    """Pairs of the last axis, real and imaginary, as an axis of their own: ``[..., n/2, 2]``.

    Raises:
        ValueError: the last axis has an odd length.
    """
    x = array(x)
    if not x.ndim or not same(x.shape[-1] % 2, 0):
        raise ValueError(
            f"as_interleaved_complex: the last axis of {x.shape} does not divide into pairs"
        )
    return x.reshape((*x.shape[:-1], x.shape[-1] // 2, 2))


@lift
def irfft(
    input_tensor: Any,
    n: int | None = None,
    axis: int = -1,
    normalization: Any = "backward",
    input_is_complex: bool = False,
    buffer_size_mb: int = 512,
) -> Any:
    """The inverse Fourier transform along an axis, of a spectrum that belongs to real values.

    Args:
        input_tensor: the first half of the spectrum: complex, or its real part, or, with
            ``input_is_complex``, pairs of real and imaginary part in a last axis of 2.
        n: length of the result; by default ``2 · (length - 1)``.
        normalization: "backward" (divides by ``n``), "ortho" (by ``√n``) or "forward" (not).
        buffer_size_mb: for MAX's GPU library; ignored.

    Raises:
        ValueError: there is no such axis or normalisation.
    """
    x = array(input_tensor)
    if input_is_complex:
        x = jax.lax.complex(x[..., 0], x[..., 1])
    elif not jnp.iscomplexobj(x):
        x = floating(x, "irfft")
        x = jax.lax.complex(x, jnp.zeros_like(x))
    norm = str(getattr(normalization, "value", normalization)).lower()
    axis = axis_of(axis, x.ndim, "irfft")
    return jnp.fft.irfft(x, None if n is None else operator.index(n), axis, norm=norm)
