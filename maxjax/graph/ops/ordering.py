"""Ops that sort along an axis. Sorting is stable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .lift import array, axis_of, canonical, lift


@lift
def top_k(input: Any, k: int, axis: int = -1) -> tuple[Any, Any]:
    """The ``k`` greatest elements along an axis, in descending order, and their indices.

    Raises:
        ValueError: there is no such axis, or it is shorter than ``k``, or ``k`` is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> values, indices = ops.top_k(jnp.array([3.0, 1.0, 2.0]), 2)
        >>> print(values, indices)
        [3. 2.] [0 2]
    """
    x = array(input)
    axis = _check(x, k, axis, "top_k")
    values, indices = jax.lax.top_k(jnp.moveaxis(x, axis, -1), k)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis).astype(
        canonical("int64")
    )


@lift
def bottom_k(input: Any, k: int, axis: int = -1) -> tuple[Any, Any]:
    """The ``k`` least elements along an axis, in ascending order, and their indices.

    Raises:
        ValueError: there is no such axis, or it is shorter than ``k``, or ``k`` is negative.
    """
    x = array(input)
    axis = _check(x, k, axis, "bottom_k")
    indices = jax.lax.slice_in_dim(jnp.argsort(x, axis), 0, k, axis=axis)
    return jnp.take_along_axis(x, indices, axis), indices.astype(canonical("int64"))


def _check(x: jax.Array, k: int, axis: int, op: str) -> int:
    axis = axis_of(axis, x.ndim, op)
    size = x.shape[axis]
    if k < 0 or (isinstance(size, int) and k > size):
        raise ValueError(f"{op}: {k} elements of axis {axis}, which is {size} long")
    return axis


@lift
def argsort(x: Any, ascending: bool = True) -> Any:
    """The indices that sort a tensor of one axis.

    Raises:
        ValueError: it has another number of axes.
    """
    x = array(x)
    if x.ndim != 1:
        raise ValueError(f"argsort takes a tensor of one axis, not of shape {x.shape}")
    return jnp.argsort(x, descending=not ascending).astype(canonical("int64"))
