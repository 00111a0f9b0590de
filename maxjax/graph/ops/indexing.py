"""Ops that read and write elements by index.

Negative indices count from the end. Indices into a TensorValue that are known when the op is called
(a number, a list, a NumPy array) must be in range. Other indices are not checked, because compiled
code cannot raise errors. Out of range they write nothing, and read NaN (the smallest signed integer, the
largest unsigned one, or True).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..operands import check_inside
from ..rebinding import sized_as
from ..symbolic import to_size
from ..value import TensorValue, unwrap
from .lift import array, axis_of, boolean, canonical, integers, lift, numeric, same

_F = TypeVar("_F", bound=Callable[..., Any])


def _indexed(position: int) -> Callable[[_F], _F]:
    """``lift`` for an op with indices in the argument at ``position``."""

    def decorate(function: _F) -> _F:
        lifted, signature = lift(function), inspect.signature(function)

        @functools.wraps(function)
        def op(*args: Any, **kwargs: Any) -> Any:
            given = args[position] if len(args) > position else kwargs.get("indices")
            values = args[0] if args else kwargs.get("input")
            is_known = isinstance(given, (int, list, np.ndarray, np.integer))
            if is_known and isinstance(values, TensorValue):
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                _check_known(function.__name__, bound.arguments)
            return lifted(*args, **kwargs)

        return op  # type: ignore[return-value]

    return decorate


def _check_known(op: str, arguments: dict[str, Any]) -> None:
    """Checks that known indices are in range."""
    positions, shape = np.asarray(arguments["indices"]), unwrap(arguments["input"]).shape
    if positions.dtype.kind not in "iu" or not positions.size:
        return  # refused later, or empty
    if "axis" in arguments:
        axis = arguments["axis"]
        if isinstance(axis, int) and -len(shape) <= axis < len(shape):
            check_inside(positions, shape, axis, op)
        return
    first = arguments.get("batch_dims", 0)
    if positions.ndim and first + positions.shape[-1] <= len(shape):
        for i in range(positions.shape[-1]):
            check_inside(positions[..., i], shape, first + i, op)


@_indexed(1)
def gather(input: Any, indices: Any, axis: int) -> Any:
    """The slices of ``input`` at the given indices of one axis.

    Returns:
        A tensor of shape ``input.shape[:axis] + indices.shape + input.shape[axis + 1:]``.

    Raises:
        IndexError: there is no such axis.
        ValueError: the indices are not integers, or known indices into a TensorValue are out of range
            (as in all ops below).

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> table = jnp.array([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> ops.gather(table, jnp.array([[2, 0]]), axis=0).shape
        (1, 2, 2)
    """
    x = array(input)
    axis = axis_of(axis, x.ndim, "gather", IndexError)
    return jnp.take(x, integers(indices, "gather"), axis)


@_indexed(1)
def gather_nd(input: Any, indices: Any, batch_dims: int = 0) -> Any:
    """The slices of ``input`` at positions given by several indices each.

    Args:
        indices: ``[..., n]``; the last axis holds indices into the first ``n`` axes after the batch
            axes.
        batch_dims: number of leading axes that the input and the indices share.

    Returns:
        A tensor of shape ``indices.shape[:-1] + input.shape[batch_dims + n:]``.

    Raises:
        ValueError: there are more indices than axes, the batch axes differ, or the indices are not
            integers.
    """
    x, positions = array(input), integers(indices, "gather_nd")
    if batch_dims < 0:
        raise ValueError(f"gather_nd: batch_dims must not be negative, got {batch_dims}")
    if positions.ndim <= batch_dims or not 0 < positions.shape[-1] <= x.ndim - batch_dims:
        raise ValueError(f"gather_nd: indices of shape {positions.shape} do not fit a tensor of shape {x.shape} "
                         f"with batch_dims={batch_dims}")  # fmt: skip
    if not all(map(same, x.shape[:batch_dims], positions.shape[:batch_dims])):
        raise ValueError(f"gather_nd: the first {batch_dims} axes of {x.shape} and of the indices "
                         f"{positions.shape} must be equal")  # fmt: skip
    batch = [_iota(positions.shape[:-1], axis, positions.dtype) for axis in range(batch_dims)]
    return x.at[(*batch, *_along_last(positions))].get(mode="fill")


def _along_last(positions: jax.Array) -> list[jax.Array]:
    return [positions[..., i] for i in range(positions.shape[-1])]


def _iota(shape: Any, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.broadcasted_iota(dtype, shape, axis)


def _scatter(input: Any, updates: Any, indices: Any, axis: int, op: str, mode: str) -> jax.Array:
    x, new, positions = array(input), array(updates), integers(indices, op)
    axis = axis_of(axis, x.ndim, op)
    _same_dtype(x, new, op)
    shape, dtype = positions.shape, positions.dtype
    if not len(shape) == new.ndim == x.ndim or not all(map(same, shape, new.shape)):
        raise ValueError(f"{op}: updates {new.shape} and indices {shape} must have the same shape, "
                         f"with as many axes as {x.shape}")  # fmt: skip
    grid = [positions if i == axis else _iota(shape, i, dtype) for i in range(x.ndim)]
    return _update(x, tuple(grid), new, op, mode)


def _update(
    x: jax.Array, at: tuple[jax.Array, ...], new: jax.Array, op: str, mode: str
) -> jax.Array:
    if mode in ("add", "mul"):
        numeric(x, op)
    if mode == "mul" and jnp.issubdtype(x.dtype, jnp.inexact):
        return _multiply(x, at, new)
    return getattr(x.at[at], mode)(new)


@jax.custom_jvp
def _multiply(x: jax.Array, at: tuple[jax.Array, ...], new: jax.Array) -> jax.Array:
    """``x`` times the updates; JAX's own op has no derivative if two updates have the same index."""
    return x.at[at].mul(new)


@_multiply.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, at, new), (dx, _, dnew) = primals, tangents
    ones, zeros = jnp.ones_like(x), jnp.zeros_like(x)

    def read(a: jax.Array) -> jax.Array:
        return a.at[at].get(mode="clip")  # values read out of range get a cotangent of 0

    is_zero = new == 0
    count = read(zeros.at[at].add(is_zero.astype(x.dtype)))
    product = read(ones.at[at].mul(jnp.where(is_zero, 1, new)))
    # The product of the other updates with the same index, without division by an update of zero.
    others = jnp.where(count == is_zero.astype(x.dtype), product / jnp.where(is_zero, 1, new), 0)
    slope = dx * ones.at[at].mul(new)
    return x.at[at].mul(new), slope.at[at].add(dnew * others * read(x))


@_indexed(2)
def scatter(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """``input`` with elements replaced by ``updates``, each at its index along an axis.

    An update keeps its position along the other axes: for a matrix and its last axis,
    ``out[i, indices[i, j]] = updates[i, j]``. If several updates have the same position, any may win.

    Raises:
        ValueError: the axis does not exist, the indices are not integers, the dtypes of input and
            updates differ, or the shapes of updates and indices differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.scatter(jnp.zeros(4), jnp.array([5.0, 7.0]), jnp.array([3, 0])))
        [7. 0. 0. 5.]
    """
    return _scatter(input, updates, indices, axis, "scatter", "set")


@_indexed(2)
def scatter_add(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """Like ``scatter``, but adds each update to the element."""
    return _scatter(input, updates, indices, axis, "scatter_add", "add")


@_indexed(2)
def scatter_mul(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """Like ``scatter``, but multiplies the element by each update."""
    return _scatter(input, updates, indices, axis, "scatter_mul", "mul")


@_indexed(2)
def scatter_max(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """Like ``scatter``, but takes the maximum of the element and the updates."""
    return _scatter(input, updates, indices, axis, "scatter_max", "max")


@_indexed(2)
def scatter_min(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """Like ``scatter``, but takes the minimum of the element and the updates."""
    return _scatter(input, updates, indices, axis, "scatter_min", "min")


def _scatter_nd(input: Any, updates: Any, indices: Any, op: str, mode: str) -> jax.Array:
    x, new, positions = array(input), array(updates), integers(indices, op)
    _same_dtype(x, new, op)
    depth = positions.shape[-1] if positions.ndim else 0
    wanted = (*positions.shape[:-1], *x.shape[depth:])
    message = (f"{op}: updates {new.shape} at indices {positions.shape} of a tensor {x.shape}: "
               f"the updates must have shape {wanted}")  # fmt: skip
    if not 0 < depth <= x.ndim:
        raise ValueError(message)
    new = sized_as(new, wanted, message)
    return _update(x, tuple(_along_last(positions)), new, op, mode)


@_indexed(2)
def scatter_nd(input: Any, updates: Any, indices: Any) -> Any:
    """``input`` with slices replaced by ``updates``, at positions given by several indices each.

    Args:
        indices: ``[..., n]``; the last axis holds indices into the first ``n`` axes.
        updates: tensor of shape ``indices.shape[:-1] + input.shape[n:]``.

    Raises:
        ValueError: the shape or dtype of the updates does not fit, there are more indices than axes, or
            the indices are not integers.
    """
    return _scatter_nd(input, updates, indices, "scatter_nd", "set")


@_indexed(2)
def scatter_nd_add(input: Any, updates: Any, indices: Any) -> Any:
    """Like ``scatter_nd``, but adds each update to the slice."""
    return _scatter_nd(input, updates, indices, "scatter_nd_add", "add")


@_indexed(2)
def scatter_nd_mul(input: Any, updates: Any, indices: Any) -> Any:
    """Like ``scatter_nd``, but multiplies the slice by each update."""
    return _scatter_nd(input, updates, indices, "scatter_nd_mul", "mul")


@_indexed(2)
def scatter_nd_max(input: Any, updates: Any, indices: Any) -> Any:
    """Like ``scatter_nd``, but takes the maximum of the slice and the updates."""
    return _scatter_nd(input, updates, indices, "scatter_nd_max", "max")


@_indexed(2)
def scatter_nd_min(input: Any, updates: Any, indices: Any) -> Any:
    """Like ``scatter_nd``, but takes the minimum of the slice and the updates."""
    return _scatter_nd(input, updates, indices, "scatter_nd_min", "min")


def _same_dtype(x: jax.Array, new: jax.Array, op: str) -> None:
    if x.dtype != new.dtype:
        raise ValueError(
            f"{op}: the updates are {new.dtype} and the tensor is {x.dtype}; cast one of them"
        )


@lift
def masked_scatter(input: Any, mask: Any, updates: Any, out_dim: Any = None) -> Any:
    """``input`` with the elements where the mask is True replaced by the updates, in order.

    Args:
        mask: booleans that broadcast to the shape of the input.
        updates: values in row-major order, at least as many as the mask has True elements.
        out_dim: name of the number of True elements in MAX; ignored.

    Raises:
        ValueError: the mask is not boolean or does not broadcast, or the updates have another dtype
            than the input.
    """
    x, new = array(input), array(updates)
    mask = boolean(mask, "masked_scatter, as its mask,")
    _same_dtype(x, new, "masked_scatter")
    mask = jnp.broadcast_to(mask, x.shape)
    order = jnp.cumsum(mask.reshape(-1)).reshape(x.shape) - 1
    none = jnp.nan if jnp.issubdtype(new.dtype, jnp.inexact) else 0
    flat = jnp.concatenate(
        [new.reshape(-1), jnp.full(1, none, new.dtype)]
    )  # there may be no updates
    return jnp.where(mask, jnp.take(flat, jnp.maximum(order, 0)), x)


@lift
def nonzero(x: Any, out_dim: Any = None) -> Any:
    """The indices of the elements that are not zero: one row for each, in row-major order.

    The number of rows depends on the values. Therefore ``out_dim`` must be an integer under ``jax.jit``; rows after
    the last index are -1.

    Raises:
        ValueError: the tensor is traced, and ``out_dim`` is not a number.
    """
    x = array(x)
    size = _known_size(out_dim)
    if size is None and isinstance(x, Tracer):
        raise ValueError("nonzero under jax.jit needs a number as out_dim, because the number of "
                         "nonzero elements depends on values")  # fmt: skip
    columns = jnp.nonzero(x, size=size, fill_value=-1 if size is not None else None)
    return jnp.stack(columns, axis=-1).astype(canonical("int64"))


def _known_size(out_dim: Any) -> int | None:
    try:
        size = None if out_dim is None else to_size(out_dim)
    except ValueError:
        return None
    return size if isinstance(size, int) else None
