"""Ops that change the shape of a tensor but not its elements.

Sizes may be numbers, Dims, or the names of symbolic dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from ..operands import reshaped
from ..rebinding import rebound
from ..symbolic import to_sizes
from .lift import array, axis_of, canonical, creator, lift, same, sizing


@sizing("shape")
@lift
def reshape(x: Any, shape: Iterable[Any]) -> Any:
    """The tensor in another shape with as many elements; one size may be -1, which is then computed.

    Raises:
        ValueError: two sizes are -1, or the number of elements differs.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> ops.reshape(jnp.arange(6), (3, -1)).shape
        (3, 2)
    """
    return reshaped(array(x), shape)


@sizing("dims")
@lift
def permute(x: Any, dims: Sequence[int]) -> Any:
    """The tensor with its axes in another order: axis ``i`` of the result is axis ``dims[i]``.

    Raises:
        IndexError: there is no such axis.
        ValueError: an axis occurs twice or is missing.
    """
    x, dims = array(x), list(dims)
    if len(dims) != x.ndim:
        raise ValueError(f"permute: {len(dims)} axes are given, but the tensor has {x.ndim}")
    axes = [axis_of(d, x.ndim, "permute", IndexError) for d in dims]
    if len(set(axes)) != len(axes):
        raise ValueError(f"permute: {dims} contains an axis twice")
    return jnp.transpose(x, axes)


@lift
def transpose(x: Any, axis_1: int, axis_2: int) -> Any:
    """The tensor with two axes swapped.

    Raises:
        IndexError: there is no such axis.
    """
    x = array(x)
    axes = [axis_of(axis, x.ndim, "transpose", IndexError) for axis in (axis_1, axis_2)]
    return jnp.swapaxes(x, *axes)


@lift
def unsqueeze(x: Any, axis: int) -> Any:
    """The tensor with a new axis of length 1, at index ``axis`` of the result.

    Raises:
        ValueError: the result would have no such axis.
    """
    x = array(x)
    return jnp.expand_dims(x, axis_of(axis, x.ndim + 1, "unsqueeze"))


@lift
def squeeze(x: Any, axis: int) -> Any:
    """The tensor without an axis of length 1.

    Raises:
        IndexError: there is no such axis.
        ValueError: the axis is longer.
    """
    x = array(x)
    axis = axis_of(axis, x.ndim, "squeeze", IndexError)
    if not same(x.shape[axis], 1):
        raise ValueError(f"squeeze: axis {axis} of shape {x.shape} is {x.shape[axis]} long, not 1")
    return jnp.squeeze(x, axis)


@sizing("shape", "out_dims")
@lift
def broadcast_to(x: Any, shape: Iterable[Any], out_dims: Iterable[Any] | None = None) -> Any:
    """The tensor broadcast to a shape: repeated along axes of length 1 and new leading axes.

    Args:
        out_dims: the sizes, if ``shape`` is a tensor.

    Raises:
        ValueError: an axis longer than 1 has another size in the shape.
    """
    x = array(x)
    sizes = to_sizes(shape if out_dims is None else out_dims, x.shape)
    old = sizes[len(sizes) - x.ndim :]
    if len(old) != x.ndim or any(
        not (same(have, want) or same(have, 1)) for have, want in zip(x.shape, old, strict=True)
    ):
        raise ValueError(f"broadcast_to: a tensor of shape {x.shape} does not broadcast to {sizes}")
    return jnp.broadcast_to(x, sizes)


@sizing("shape")
@lift
def rebind(x: Any, shape: Iterable[Any], message: str = "", layout: Any = None) -> Any:
    """The tensor with the given sizes declared: numbers, names, or arithmetic over names.

    In a Graph the result has these sizes. If tracing cannot decide whether they are right, as for two
    different names, they are checked each time the program runs. A new name is defined as this size;
    outside of a Graph it matches any size.

    Args:
        message: beginning of the error message.
        layout: layout of a convolution's filter in MAX; ignored.

    Raises:
        ValueError: the tensor has another rank or size.

    Example:
        >>> import numpy as np
        >>> from maxjax.engine import InferenceSession
        >>> from maxjax.graph import DeviceRef, Graph, TensorType, ops
        >>> vector = lambda size: TensorType("float32", [size], DeviceRef.CPU())
        >>> with Graph("sum", input_types=[vector("a"), vector("b")]) as g:
        ...     x, y = (value.tensor for value in g.inputs)
        ...     g.output(x + ops.rebind(y, ["a"]))
        >>> model = InferenceSession().load(g)
        >>> print(model(np.ones(2, "float32"), np.ones(2, "float32"))[0].value)
        [2. 2.]
        >>> model(np.ones(2, "float32"), np.ones(3, "float32"))
        Traceback (most recent call last):
        ValueError: rebind: axis 0 was rebound to a = 2, and is b = 3 (with a = 2, b = 3)
    """
    return rebound(array(x), shape, message)


@lift
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """The tensor with the axes from ``start_dim`` to ``end_dim``, both included, merged.

    Raises:
        IndexError: there is no such axis.
        ValueError: the first comes after the last.
    """
    x = array(x)
    rank = max(x.ndim, 1)
    start = axis_of(start_dim, rank, "flatten", IndexError)
    end = axis_of(end_dim, rank, "flatten", IndexError)
    if start > end:
        raise ValueError(f"flatten: start_dim ({start_dim}) comes after end_dim ({end_dim})")
    middle = math.prod(x.shape[start : end + 1])
    return x.reshape((*x.shape[:start], middle, *x.shape[end + 1 :]))


@creator
def shape_to_tensor(shape: Iterable[Any]) -> Any:
    """The sizes as a tensor of integers: int64, or int32 without ``jax_enable_x64``."""
    sizes = [jnp.asarray(size, canonical("int64")) for size in to_sizes(shape)]
    return jnp.stack(sizes) if sizes else jnp.zeros((0,), canonical("int64"))
