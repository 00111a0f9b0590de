"""Ops along one axis, by default the last: sums, extremes, cumsum, softmax.

A reduced axis is kept with length 1: ``sum`` of ``[B, T]`` along the last axis is ``[B, 1]``. Sums and products of
16-bit and narrower floats are computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import operands
from .lift import array, axis_of, binary_operands, floating, lift, numeric, pairwise, rounded, wide


@lift
def sum(x: Any, axis: int = -1) -> Any:
    """The sum along an axis, which is kept with length 1.

    Raises:
        ValueError: there is no such axis (as in all ops below), or the tensor is boolean.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.sum(jnp.array([[1.0, 2.0], [3.0, 4.0]])))
        [[3.]
         [7.]]
    """
    return _total(jnp.sum, x, axis, "sum")


@lift
def mean(x: Any, axis: int = -1) -> Any:
    """The mean along an axis, which is kept with length 1; of integers it is rounded toward zero, as in MAX."""
    return operands.mean(*_numbers(x, axis, "mean"))


@lift
def prod(x: Any, axis: int = -1) -> Any:
    """The product along an axis, which is kept with length 1."""
    return _total(jnp.prod, x, axis, "prod")


@pairwise
def max(x: Any, y: Any = None, /, axis: int | None = None) -> Any:
    """The elementwise maximum of two tensors, or the maximum of one along an axis.

    Raises:
        ValueError: two tensors and an axis are given.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> x = jnp.array([[1.0, 5.0], [4.0, 2.0]])
        >>> ops.max(x).shape, ops.max(x, axis=0).shape, ops.max(x, 3.0).shape
        ((2, 1), (1, 2), (2, 2))
    """
    return _extreme(jnp.maximum, jnp.max, "max", x, y, axis)


@pairwise
def min(x: Any, y: Any = None, /, axis: int | None = None) -> Any:
    """The elementwise minimum of two tensors, or the minimum of one along an axis.

    Raises:
        ValueError: two tensors and an axis are given.
    """
    return _extreme(jnp.minimum, jnp.min, "min", x, y, axis)


def _extreme(two: Any, reduce: Any, op: str, x: Any, y: Any, axis: int | None) -> Any:
    if y is not None:
        if axis is not None:
            raise ValueError(f"{op} of two tensors is element by element and takes no axis")
        return two(*binary_operands(x, y))
    x = array(x)
    axis = axis_of(-1 if axis is None else axis, x.ndim, op)
    if isinstance(x.shape[axis], int):
        return reduce(x, axis, keepdims=True)
    # jnp wants to know that an axis is not empty, which a named size does not say.
    low, high = operands.ends(x.dtype)
    return reduce(x, axis, keepdims=True, initial=low if op == "max" else high)


@lift
def argmax(x: Any, axis: int = -1) -> Any:
    """The index of the maximum along an axis, which is kept with length 1; the first of equal ones.

    The dtype is int64, or int32 without ``jax_enable_x64``.
    """
    x = array(x)
    return jnp.argmax(x, axis_of(axis, x.ndim, "argmax"), keepdims=True)


@lift
def argmin(x: Any, axis: int = -1) -> Any:
    """The index of the minimum along an axis, which is kept with length 1; the first of equal ones."""
    x = array(x)
    return jnp.argmin(x, axis_of(axis, x.ndim, "argmin"), keepdims=True)


@lift
def cumsum(x: Any, axis: int = -1, exclusive: bool = False, reverse: bool = False) -> Any:
    """The cumulative sum along an axis.

    Args:
        exclusive: whether each sum excludes its own element, so that the first is 0.
        reverse: whether to sum from the end.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> x = jnp.array([1, 2, 3])
        >>> print(ops.cumsum(x), ops.cumsum(x, exclusive=True), ops.cumsum(x, reverse=True))
        [1 3 6] [0 1 3] [6 5 3]
    """
    x, axis = _numbers(x, axis, "cumsum")
    sums = operands.widely(jax.lax.cumsum)(x, axis, reverse=reverse)
    if not exclusive:
        return sums
    # Shifted by one rather than `sums - x`, which rounds, and is NaN at infinities.
    low, high = (-1, 1) if reverse else (1, -1)
    padding = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return jax.lax.pad(sums, jnp.zeros((), x.dtype), padding)


@lift
def softmax(value: Any, axis: int = -1) -> Any:
    """``exp(x) / Σ exp(x)`` along an axis; of 16-bit floats computed in float32."""
    x = floating(value, "softmax")
    return operands.widely(jax.nn.softmax)(x, axis_of(axis, x.ndim, "softmax"))


@lift
def logsoftmax(value: Any, axis: int = -1) -> Any:
    """``log(softmax(x))`` along an axis; of 16-bit floats computed in float32."""
    x = floating(value, "logsoftmax")
    return operands.widely(jax.nn.log_softmax)(x, axis_of(axis, x.ndim, "logsoftmax"))


def _total(reduce: Any, x: Any, axis: int, op: str) -> jax.Array:
    """A sum or product in the dtype of the tensor."""
    x, axis = _numbers(x, axis, op)
    found = wide(x)
    return rounded(reduce(found, axis, keepdims=True, dtype=found.dtype), x.dtype)


def _numbers(x: Any, axis: int, op: str) -> tuple[jax.Array, int]:
    x = numeric(x, op)
    return x, axis_of(axis, x.ndim, op)
