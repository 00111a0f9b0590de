"""Ops that join, split and repeat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..shape import Dim
from ..symbolic import to_size, to_sizes
from ..value import TensorValue
from .collectives import inputs_of, same_shapes
from .lift import array, axis_of, binary_operands, integers, lift, same, sizing


@lift
def concat(original_vals: Iterable[Any], axis: int = 0) -> Any:
    """Concatenates tensors along an existing axis.

    Raises:
        IndexError: there is no such axis.
        ValueError: there are no tensors, or they differ in rank, in dtype, or in size along another
            axis; the message names the shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> ops.concat([jnp.ones((2, 3)), jnp.ones((4, 3))]).shape
        (6, 3)
    """
    arrays = _same_rank_and_dtype(original_vals, "concat")
    axis = axis_of(axis, arrays[0].ndim, "concat", IndexError)
    for i, sizes in enumerate(zip(*(x.shape for x in arrays), strict=True)):
        if i != axis and not all(same(size, sizes[0]) for size in sizes):
            raise ValueError(f"concat along axis {axis}: the tensors differ along axis {i}: "
                             f"{_shapes(arrays)}")  # fmt: skip
    return jnp.concatenate(arrays, axis)


@lift
def stack(values: Iterable[Any], axis: int = 0) -> Any:
    """Stacks tensors of one shape along a new axis.

    Raises:
        IndexError: the result has no such axis.
        ValueError: there are no tensors, or their shapes or dtypes differ.
    """
    arrays = _same_rank_and_dtype(values, "stack")
    axis = axis_of(axis, arrays[0].ndim + 1, "stack", IndexError)
    for x in arrays:
        if not all(map(same, x.shape, arrays[0].shape)):
            raise ValueError(f"stack: the tensors must have one shape, not {_shapes(arrays)}")
    return jnp.stack(arrays, axis)


def _same_rank_and_dtype(values: Iterable[Any], op: str) -> list[jax.Array]:
    """Checks that there is at least one array, and that all have one rank and dtype."""
    arrays = [array(x) for x in values]
    if not arrays:
        raise ValueError(f"{op} takes at least one tensor")
    if len({x.ndim for x in arrays}) > 1:
        raise ValueError(f"{op}: the tensors must have the same rank, not {_shapes(arrays)}")
    if len({x.dtype for x in arrays}) > 1:
        found = ", ".join(str(x.dtype) for x in arrays)
        raise ValueError(f"{op}: the tensors must have one dtype, not {found}; cast them first")
    return arrays


def _shapes(arrays: Sequence[jax.Array]) -> str:
    return ", ".join(str(x.shape) for x in arrays)


@sizing("split_sizes")
@lift
def split(x: Any, split_sizes: Sequence[Any], axis: int = 0) -> Any:
    """Splits a tensor along an axis into a list of pieces of the given lengths.

    Raises:
        IndexError: there is no such axis.
        ValueError: a length is negative, or the lengths do not add up to that of the axis.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> [piece.shape for piece in ops.split(jnp.ones((2, 5)), [3, 2], axis=1)]
        [(2, 3), (2, 2)]
    """
    x = array(x)
    axis = axis_of(axis, x.ndim, "split", IndexError)
    sizes = to_sizes(split_sizes, x.shape)
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise ValueError(f"split: the sizes must not be negative: {list(sizes)}")
    if not same(sum(sizes), x.shape[axis]):
        raise ValueError(
            f"split: the sizes {list(sizes)} must add up to the {x.shape[axis]} of axis {axis}"
        )
    return _pieces(x, sizes, axis)


@lift
def chunk(x: Any, chunks: int, axis: int = 0) -> Any:
    """Splits a tensor into a list of ``chunks`` pieces of equal length.

    Raises:
        IndexError: there is no such axis.
        ValueError: ``chunks`` does not divide the axis.
    """
    x = array(x)
    axis = axis_of(axis, x.ndim, "chunk", IndexError)
    chunks = to_size(chunks)
    if chunks < 1 or not same(x.shape[axis] % chunks, 0):
        raise ValueError(
            f"chunk: axis {axis} of length {x.shape[axis]} is not divisible by {chunks}"
        )
    return _pieces(x, (x.shape[axis] // chunks,) * chunks, axis)


def _pieces(x: jax.Array, sizes: Sequence[Any], axis: int) -> list[jax.Array]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(jax.lax.slice_in_dim(x, start, start + size, axis=axis))
        start = start + size
    return pieces


@sizing("repeats")
@lift
def tile(x: Any, repeats: Iterable[Any]) -> Any:
    """Repeats the tensor ``repeats[i]`` times along axis ``i``.

    Raises:
        ValueError: the number of repeats is wrong, or one is below 1.
    """
    x = array(x)
    counts = to_sizes(repeats, x.shape)
    if len(counts) != x.ndim:
        raise ValueError(f"tile: the axes of {x.shape} need {x.ndim} numbers, not {counts}")
    if any(isinstance(n, int) and n < 1 for n in counts):
        raise ValueError(f"tile: the numbers must be positive, not {counts}")
    return jnp.tile(x, counts)


@lift
def repeat_interleave(x: Any, repeats: Any, axis: int | None = None, out_dim: Any = None) -> Any:
    """Repeats each element along an axis; without an axis, each element of the flattened tensor.

    Args:
        repeats: number of repeats, or a tensor with one number for each element along the axis.
        out_dim: length of the axis in the result; required if ``repeats`` is a tensor.

    Raises:
        ValueError: the axis does not exist, a number is below 1, or ``out_dim`` is missing.
    """
    x = array(x)
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = axis_of(axis, x.ndim, "repeat_interleave")
    if isinstance(repeats, Dim):
        repeats = to_size(repeats)
    if isinstance(repeats, int):
        if repeats < 1:
            raise ValueError(f"repeat_interleave: the number must be positive, not {repeats}")
        return jnp.repeat(x, repeats, axis)
    if out_dim is None:
        raise ValueError(
            "repeat_interleave: a tensor of repeats needs out_dim, the length of the result"
        )
    repeats = integers(repeats, "repeat_interleave")
    length = to_size(out_dim, x.shape) if not isinstance(out_dim, str) else _total(repeats, out_dim)
    if isinstance(length, int) and isinstance(x.shape[axis], int):
        return jnp.repeat(x, repeats, axis, total_repeat_length=length)
    # jnp.repeat must know that sizes are not 0, which symbolic ones may be; with one more row this axis is not.
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, int(i == axis), 0) for i in range(x.ndim)])
    ends = jnp.cumsum(jax.lax.pad(repeats, jnp.zeros((), repeats.dtype), [(0, 1, 0)]))
    counts = jnp.zeros(length, jnp.int32).at[ends].add(1, mode="drop")
    return jnp.take(x, jnp.cumsum(counts), axis, mode="clip")


def _total(repeats: jax.Array, name: str) -> Any:
    """The size of a named dimension, or the sum of ``repeats`` if there is none."""
    try:
        return to_size(name)
    except ValueError:
        if isinstance(repeats, Tracer):
            raise
        return int(repeats.sum())


_PAD_MODES = ("constant", "reflect", "edge")


@sizing("paddings")
@lift
def pad(
    input: Any,
    paddings: Iterable[int],
    mode: Literal["constant", "reflect", "edge"] = "constant",
    value: Any = 0,
) -> Any:
    """Pads the tensor at the ends of its axes.

    Args:
        paddings: ``[before_0, after_0, before_1, after_1, …]``, two for each axis.
        mode: what to pad with: "constant" for ``value``, "reflect" for the mirror image without the
            edge element, "edge" for the edge element.

    Raises:
        ValueError: a number is negative or missing, or the mode is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.pad(jnp.array([1, 2, 3]), [1, 2], mode="reflect"))
        [2 1 2 3 2 1]
    """
    x, numbers = array(input), list(paddings)
    if mode not in _PAD_MODES:
        raise ValueError(f"pad: mode is one of {', '.join(map(repr, _PAD_MODES))}, not {mode!r}")
    if len(numbers) != 2 * x.ndim:
        raise ValueError(f"pad: two numbers for each of the {x.ndim} axes, not {numbers}")
    if any(isinstance(n, int) and n < 0 for n in numbers):
        raise ValueError(f"pad: the numbers must not be negative: {numbers}")
    widths = list(zip(numbers[::2], numbers[1::2], strict=True))
    if mode == "reflect":
        for axis, ends in enumerate(widths):
            if not isinstance(x.shape[axis], int):
                x, widths[axis] = _reflected(x, axis, *ends), (0, 0)
    if mode != "constant":
        return jnp.pad(x, widths, mode)
    fill = jnp.asarray(binary_operands(x, value)[1], x.dtype).reshape(())
    return jax.lax.pad(x, fill, [(before, after, 0) for before, after in widths])


def _reflected(x: jax.Array, axis: int, before: Any, after: Any) -> jax.Array:
    """The tensor padded with its mirror image along an axis of any size, which ``jnp.pad`` has to know."""
    size = x.shape[axis]
    period = jnp.maximum(jnp.asarray(2 * size - 2), 1)
    place = (jnp.arange(before + size + after) - before) % period
    return jnp.take(x, jnp.minimum(place, period - place), axis)


@lift
def slice_tensor(x: Any, indices: Sequence[Any]) -> Any:
    """``x[indices]`` for a list of numbers, slices, ``...``, None and scalar tensors.

    A slice may be given with the length of its result, as ``(slice, length)``; this is required if its bounds are
    tensors.

    Raises:
        ValueError: an index is out of range, there are more indices than axes, a step is below 1, or
            an index tensor is not a scalar. (``x[…]`` follows NumPy's rules, which allow more.)
    """
    x, parts = array(x), list(indices) if isinstance(indices, (list, tuple)) else [indices]
    indices = [i[0] if isinstance(i, tuple) else i for i in parts]
    axes = [i for i in indices if i is not None and i is not Ellipsis]
    if len(axes) > x.ndim:
        raise ValueError(f"slice_tensor: {len(axes)} indices for the {x.ndim} axes of {x.shape}")
    ellipsis_at = indices.index(Ellipsis) if any(i is Ellipsis for i in indices) else len(indices)
    before = sum(i is not None for i in indices[:ellipsis_at])
    for position, index in enumerate(axes):
        axis = position if position < before else position + x.ndim - len(axes)
        _check_index(index, x.shape[axis], axis)
    return TensorValue(x)[tuple(parts)].value


def _check_index(index: Any, size: Any, axis: int) -> None:
    if isinstance(index, slice):
        if isinstance(index.step, int) and index.step < 1:
            raise ValueError(
                f"slice_tensor: the step along axis {axis} must be positive, not {index.step}"
            )
        outside = [i for i in (index.start, index.stop) if _outside(i, size, True)]
    else:
        if getattr(index, "ndim", 0):
            raise ValueError(f"slice_tensor: an index must be a scalar, not of shape {index.shape}")
        outside = [index] if _outside(index, size, False) else []
    if outside:
        raise ValueError(f"slice_tensor: {outside[0]} is outside axis {axis}, which is {size} long")


def _outside(index: Any, size: Any, end: bool) -> bool:
    index = to_size(index) if isinstance(index, Dim) else index
    if not (isinstance(index, int | np.integer) and isinstance(size, int)):
        return False
    return not -size <= index <= size - (not end)


def shard_and_stack(
    inputs: Iterable[Any], devices: Iterable[Any], axis: int = 0
) -> list[TensorValue]:
    """For each device its parts of all tensors, stacked along a new first axis.

    Args:
        inputs: tensors of one shape and dtype.
        devices: the devices; as many as there are parts of each tensor.
        axis: axis that is split.

    Raises:
        IndexError: there is no such axis.
        ValueError: there is no tensor or no device, the tensors differ in shape or dtype, or the axis is not
            divisible by the number of devices.

    Example:
        >>> from maxjax.graph import DeviceRef
        >>> rows = jnp.array([[1, 2], [3, 4]])
        >>> parts = shard_and_stack([rows, 10 * rows], [DeviceRef.CPU()] * 2, axis=1)
        >>> parts[1].to_numpy().tolist()
        [[[2], [4]], [[20], [40]]]
    """
    op, devices = "shard_and_stack", list(devices)
    values = inputs_of(op, inputs, None)
    same_shapes(op, values)
    if not devices:
        raise ValueError(f"{op} needs at least one device")
    axis = axis_of(axis, values[0].rank, op, IndexError)
    parts = zip(*(chunk(x, len(devices), axis) for x in values), strict=True)
    return [stack(part).to(device) for part, device in zip(parts, devices, strict=True)]
