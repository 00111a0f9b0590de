"""Ops that sort along an axis. Sorting is stable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..rebinding import rebound
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
    if not isinstance(
        x.shape[axis], int
    ):  # jax.lax.top_k wants to know that the axis is long enough
        indices = _first(jnp.argsort(x, axis, descending=True), k, axis, "top_k")
        return jnp.take_along_axis(x, indices, axis), indices.astype(canonical("int64"))
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
    indices = _first(jnp.argsort(x, axis), k, axis, "bottom_k")
    return jnp.take_along_axis(x, indices, axis), indices.astype(canonical("int64"))


def _first(order: jax.Array, k: int, axis: int, op: str) -> jax.Array:
    """The first ``k`` along an axis. If it has a symbolic size, the Model checks that there are as many."""
    found = order[(slice(None),) * axis + (slice(k),)]
    return rebound(found, [k if i == axis else None for i in range(order.ndim)], op)


def _check(x: jax.Array, k: int, axis: int, op: str) -> int:
    axis = axis_of(axis, x.ndim, op)
    size = x.shape[axis]
    if isinstance(k, jax.Array):
        raise ValueError(f"{op}: the number of elements is a size of the result, not a tensor")
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
