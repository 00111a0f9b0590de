"""Changes of the shape of an array, with MAX's checks: for the ops and for the methods of TensorValue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .operands import same
from .symbolic import to_sizes


def axis_of(axis: int, rank: int, op: str, error: type[Exception] = ValueError) -> int:
    """An axis, which may be negative, as an index from the front.

    Raises:
        ValueError: it is out of range (or ``error``, if MAX raises another class).
        TypeError: it is not an integer.
    """
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{op}: the axis must be an integer, not {axis!r}")
    if not -rank <= axis < rank:
        raise error(f"{op}: axis {axis} is out of range for a tensor with {rank} axes")
    return int(axis) % max(rank, 1)


def reshape(array: jax.Array, shape: Iterable[Any], **options: Any) -> jax.Array:
    """The array in another shape, of which one size may be -1.

    Raises:
        ValueError: two sizes are -1, the numbers of elements differ, or whether they do depends on the values of
            symbolic sizes.
    """
    sizes = list(to_sizes(shape, array.shape))
    try:
        _fill(sizes, array.shape)
        return array.reshape(tuple(sizes), **options)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"reshape: a tensor of shape {tuple(array.shape)} cannot be reshaped to {tuple(sizes)}: {error}"
        ) from error


def _fill(sizes: list[Any], shape: Sequence[Any]) -> None:
    """Where a size is symbolic, replaces a -1 and checks that the number of elements is equal; JAX compares numbers."""
    free = [axis for axis, size in enumerate(sizes) if same(size, -1)]
    if len(free) > 1:
        raise ValueError(f"at most one size may be -1, not {len(free)}")
    if all(isinstance(size, int) for size in (*shape, *sizes)):
        return
    total = math.prod(shape)
    if len(free) == 1:
        sizes[free[0]] = total // math.prod(size for size in sizes if not same(size, -1))
    if not same(math.prod(sizes), total):
        raise ValueError(
            f"{math.prod(sizes)} elements are not always {total}; rebind the tensor first if they are"
        )


def permute(x: jax.Array, dims: Iterable[int]) -> jax.Array:
    """The array with its axes in another order.

    Raises:
        IndexError: there is no such axis.
        ValueError: an axis is missing or occurs twice.
    """
    dims = list(dims)
    if len(dims) != x.ndim:
        raise ValueError(f"permute: {len(dims)} axes are given, not each of the {x.ndim} axes once")
    axes = [axis_of(axis, x.ndim, "permute", IndexError) for axis in dims]
    if len(set(axes)) != len(axes):
        raise ValueError(f"permute: {dims} contains an axis twice")
    return jnp.transpose(x, axes)


def transpose(x: jax.Array, first: int, second: int) -> jax.Array:
    """The array with two axes swapped.

    Raises:
        IndexError: there is no such axis.
    """
    axes = [axis_of(axis, x.ndim, "transpose", IndexError) for axis in (first, second)]
    return jnp.swapaxes(x, *axes)


def unsqueeze(x: jax.Array, axis: int) -> jax.Array:
    """The array with a new axis of length 1, at index ``axis`` of the result.

    Raises:
        ValueError: the result would have no such axis.
    """
    return jnp.expand_dims(x, axis_of(axis, x.ndim + 1, "unsqueeze"))


def squeeze(x: jax.Array, axis: int) -> jax.Array:
    """The array without an axis of length 1.

    Raises:
        IndexError: there is no such axis.
        ValueError: the axis is longer.
    """
    axis = axis_of(axis, x.ndim, "squeeze", IndexError)
    if not same(x.shape[axis], 1):
        raise ValueError(f"squeeze: axis {axis} of shape {x.shape} is {x.shape[axis]} long, not 1")
    return jnp.squeeze(x, axis)


def flatten(x: jax.Array, start_dim: int, end_dim: int) -> jax.Array:
    """The array with the axes from ``start_dim`` to ``end_dim``, both included, merged.

    Raises:
        IndexError: there is no such axis.
        ValueError: the first comes after the last.
    """
    rank = max(x.ndim, 1)
    start = axis_of(start_dim, rank, "flatten", IndexError)
    end = axis_of(end_dim, rank, "flatten", IndexError)
    if start > end:
        raise ValueError(f"flatten: start_dim ({start_dim}) comes after end_dim ({end_dim})")
    middle = math.prod(x.shape[start : end + 1])
    return x.reshape((*x.shape[:start], middle, *x.shape[end + 1 :]))


def broadcast_to(x: jax.Array, shape: Iterable[Any]) -> jax.Array:
    """The array repeated along axes of length 1 and new leading axes.

    Raises:
        ValueError: an axis longer than 1 has another size in the shape.
    """
    sizes = to_sizes(shape, x.shape)
    old = sizes[len(sizes) - x.ndim :]
    if len(old) != x.ndim or any(
        not (same(have, want) or same(have, 1)) for have, want in zip(x.shape, old, strict=True)
    ):
        raise ValueError(f"broadcast_to: a tensor of shape {x.shape} does not broadcast to {sizes}")
    return jnp.broadcast_to(x, sizes)
