"""Matmul, outer product, parts of a matrix, and the inverse FFT.

``ops.matmul(x, w.T)`` with a Weight uses the fast kernel of linear layers, like ``x @ w.T``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..operands import common, product
from ..symbolic import to_size
from ..value import TransposedValue
from ..weight.transpose import WeightTranspose
from .lift import (
    array,
    axis_of,
    binary_operands,
    floating,
    lift,
    pairwise,
    rounded,
    same,
    wide,
)


def matmul(lhs: Any, rhs: Any) -> Any:
    """``lhs @ rhs``, batched over all axes but the last two.

    A 1-D tensor is a row on the left and a column on the right, as in NumPy.
    16-bit floats are multiplied with float32 accumulation and rounded once.

    Raises:
        ValueError: the sizes do not fit (the message has both shapes), or one tensor has integers and
            the other floats.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> ops.matmul(jnp.ones((5, 2, 3)), jnp.ones((3, 4))).shape
        (5, 2, 4)
    """
    if isinstance(rhs, (WeightTranspose, TransposedValue)):
        if rhs.T.spec.packing is None:
            common(lhs.dtype, rhs.dtype)
        return _apply(lhs, rhs.__rmatmul__)
    return _matmul(lhs, rhs)


@lift
def _apply(x: Any, function: Callable[[jax.Array], Any]) -> Any:
    return function(array(x))


@pairwise
def _matmul(lhs: Any, rhs: Any) -> Any:
    return product(array(lhs), array(rhs))


@pairwise
def outer(lhs: Any, rhs: Any) -> Any:
    """``out[i, j] = lhs[i] · rhs[j]`` for 1-D tensors.

    Raises:
        ValueError: the number of axes is wrong.
    """
    a, b = array(lhs), array(rhs)
    if (a.ndim, b.ndim) != (1, 1):
        raise ValueError(f"outer takes tensors of one axis, not of shapes {a.shape} and {b.shape}")
    return jnp.multiply(*binary_operands(a[:, None], b[None, :]))


@lift
def band_part(
    x: Any, num_lower: int | None = None, num_upper: int | None = None, exclude: bool = False
) -> Any:
    """The matrices in the last two axes, with zeros outside a band around the diagonal.

    Args:
        num_lower: number of diagonals of the band below the main one; None or -1 for all.
        num_upper: number of diagonals above it.
        exclude: whether to set the band to zero instead of the rest.

    Raises:
        ValueError: the tensor has fewer than two axes, or a number is negative.

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
        number = None if number is None else to_size(number)
        if number is None or number == -1:
            continue
        if number < 0:
            raise ValueError(f"band_part: {name} must not be negative, got {number}")
        band = band & (distance <= number)
    return jnp.where(band ^ exclude, x, jnp.zeros((), x.dtype))


@lift
def as_interleaved_complex(x: Any) -> Any:
    """The last axis split into pairs of real and imaginary parts: ``[..., n]`` → ``[..., n/2, 2]``.

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
    """The inverse Fourier transform along an axis, for the spectrum of a real signal; of 16-bit floats in float32.

    Args:
        input_tensor: first half of the spectrum: complex, or only its real part, or with
            ``input_is_complex`` pairs of real and imaginary parts in a last axis of length 2.
        n: length of the result; by default ``2 · (length - 1)``.
        normalization: "backward" (divides by ``n``), "ortho" (by ``√n``) or "forward" (by 1).
        buffer_size_mb: for MAX's GPU library; ignored.

    Raises:
        ValueError: there is no such axis or normalisation.
    """
    x = floating(input_tensor, "irfft")
    dtype, x = jnp.finfo(x.dtype).dtype, wide(x)  # the dtype of the real result
    if input_is_complex:
        x = jax.lax.complex(x[..., 0], x[..., 1])
    elif not jnp.iscomplexobj(x):
        x = jax.lax.complex(x, jnp.zeros_like(x))
    norm = str(getattr(normalization, "value", normalization)).lower()
    axis = axis_of(axis, x.ndim, "irfft")
    y = jnp.fft.irfft(x, None if n is None else operator.index(n), axis, norm=norm)
    return rounded(y, dtype)
