"""Ops that change the shape of a tensor but not its elements.

Sizes may be numbers, Dims, or the names of symbolic dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from .. import shaping
from ..rebinding import rebound
from ..symbolic import to_sizes
from .lift import array, canonical, creator, lift, sizing


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
    return shaping.reshape(array(x), shape)


@sizing("dims")
@lift
def permute(x: Any, dims: Sequence[int]) -> Any:
    """The tensor with its axes in another order: axis ``i`` of the result is axis ``dims[i]``.

    Raises:
        IndexError: there is no such axis.
        ValueError: an axis occurs twice or is missing.
    """
    return shaping.permute(array(x), dims)


@lift
def transpose(x: Any, axis_1: int, axis_2: int) -> Any:
    """The tensor with two axes swapped.

    Raises:
        IndexError: there is no such axis.
    """
    return shaping.transpose(array(x), axis_1, axis_2)


@lift
def unsqueeze(x: Any, axis: int) -> Any:
    """The tensor with a new axis of length 1, at index ``axis`` of the result.

    Raises:
        ValueError: the result would have no such axis.
    """
    return shaping.unsqueeze(array(x), axis)


@lift
def squeeze(x: Any, axis: int) -> Any:
    """The tensor without an axis of length 1.

    Raises:
        IndexError: there is no such axis.
        ValueError: the axis is longer.
    """
    return shaping.squeeze(array(x), axis)


@sizing("shape", "out_dims")
@lift
def broadcast_to(x: Any, shape: Iterable[Any], out_dims: Iterable[Any] | None = None) -> Any:
    """The tensor broadcast to a shape: repeated along axes of length 1 and new leading axes.

    Args:
        out_dims: the sizes, if ``shape`` is a tensor.

    Raises:
        ValueError: an axis longer than 1 has another size in the shape.
    """
    return shaping.broadcast_to(array(x), shape if out_dims is None else out_dims)


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
    return shaping.flatten(array(x), start_dim, end_dim)


@creator
def shape_to_tensor(shape: Iterable[Any]) -> Any:
    """The sizes as a tensor of integers: int64, or int32 without ``jax_enable_x64``."""
    sizes = [jnp.asarray(size, canonical("int64")) for size in to_sizes(shape)]
    return jnp.stack(sizes) if sizes else jnp.zeros((0,), canonical("int64"))
