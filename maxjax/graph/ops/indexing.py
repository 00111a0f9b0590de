"""Ops that read and write elements by index.

Negative indices count from the end. An index outside the axis of a TensorValue is refused where
it is known when the op is called: a number, a list, a NumPy array. One in a tensor, or into a
plain array, reads NaN (of integers the least number there is) and writes nothing: compiled code
cannot raise.
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
from ..symbolic import to_size
from ..value import TensorValue, unwrap
from .lift import array, axis_of, boolean, canonical, integers, lift, same

_F = TypeVar("_F", bound=Callable[..., Any])


def _indexed(position: int) -> Callable[[_F], _F]:
    """``lift`` for an op whose argument of that position holds indices."""

    def decorate(function: _F) -> _F:
        lifted, signature = lift(function), inspect.signature(function)

        @functools.wraps(function)
        def op(*args: Any, **kwargs: Any) -> Any:
            given = args[position] if len(args) > position else kwargs.get("indices")
            values = args[0] if args else kwargs.get("input")
            known = isinstance(given, (int, list, np.ndarray, np.integer))
            if known and isinstance(values, TensorValue):
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                _check_known(function.__name__, bound.arguments)
            return lifted(*args, **kwargs)

        return op  # type: ignore[return-value]

    return decorate


def _check_known(op: str, arguments: dict[str, Any]) -> None:
    """Indices that are no tensor must lie inside."""
    places, shape = np.asarray(arguments["indices"]), unwrap(arguments["input"]).shape
    if places.dtype.kind not in "iu" or not places.size:
        return  # refused later, or nothing
    if "axis" in arguments:
        axis = arguments["axis"]
        if isinstance(axis, int) and -len(shape) <= axis < len(shape):
            check_inside(places, shape, axis, op)
        return
    first = arguments.get("batch_dims", 0)
    if places.ndim and first + places.shape[-1] <= len(shape):
        for i in range(places.shape[-1]):
            check_inside(places[..., i], shape, first + i, op)


@_indexed(1)
def gather(input: Any, indices: Any, axis: int) -> Any:
    """The slices of ``input`` at some places of one axis.

    Returns:
        ``input.shape[:axis] + indices.shape + input.shape[axis + 1:]``.

    Raises:
        IndexError: there is no such axis.
        ValueError: the indices are no integers, or known and outside the axis of a
            TensorValue (here and in all that follow).

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
    """The slices of ``input`` at places given by several indices each.

    Args:
        indices: ``[..., n]``: the last axis holds the indices of the first ``n`` axes after
            the batch axes.
        batch_dims: number of leading axes that both share.

    Returns:
        ``indices.shape[:-1] + input.shape[batch_dims + n:]``.

    Raises:
        ValueError: more indices than axes, different batch axes, or no integers.
    """
    x, places = array(input), integers(indices, "gather_nd")
    if places.ndim <= batch_dims or batch_dims + places.shape[-1] > x.ndim:
        raise ValueError(f"gather_nd: indices of shape {places.shape} for the axes of {x.shape} "
                         f"with batch_dims={batch_dims}")  # fmt: skip
    if not all(map(same, x.shape[:batch_dims], places.shape[:batch_dims])):
        raise ValueError(f"gather_nd: the first {batch_dims} axes of {x.shape} and of the indices "
                         f"{places.shape} must be the same")  # fmt: skip
    batch = [_iota(places.shape[:-1], axis, places.dtype) for axis in range(batch_dims)]
    return x.at[(*batch, *_along_last(places))].get(mode="fill")


def _along_last(places: jax.Array) -> list[jax.Array]:
    return [places[..., i] for i in range(places.shape[-1])]


def _iota(shape: Any, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.broadcasted_iota(dtype, shape, axis)


def _scatter(input: Any, updates: Any, indices: Any, axis: int, op: str, how: str) -> jax.Array:
    x, new, places = array(input), array(updates), integers(indices, op)
    axis = axis_of(axis, x.ndim, op)
    _same_dtype(x, new, op)
    if places.ndim != x.ndim or not all(map(same, places.shape, new.shape)) or new.ndim != x.ndim:
        raise ValueError(f"{op}: updates {new.shape} and indices {places.shape} must have one shape, "
                         f"of as many axes as {x.shape}")  # fmt: skip
    grid = [places if i == axis else _iota(places.shape, i, places.dtype) for i in range(x.ndim)]
    return _update(x, tuple(grid), new, how)


def _update(x: jax.Array, at: tuple[jax.Array, ...], new: jax.Array, how: str) -> jax.Array:
    if how == "mul" and jnp.issubdtype(x.dtype, jnp.inexact):
        return _multiply(x, at, new)
    return getattr(x.at[at], how)(new)


@jax.custom_jvp
def _multiply(x: jax.Array, at: tuple[jax.Array, ...], new: jax.Array) -> jax.Array:
    """``x`` times the updates; JAX's own has no derivative where two updates meet in one place."""
    return x.at[at].mul(new)


@_multiply.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, at, new), (dx, _, dnew) = primals, tangents
    ones, zeros = jnp.ones_like(x), jnp.zeros_like(x)

    def there(a: jax.Array) -> jax.Array:
        return a.at[at].get(mode="clip")  # what is read outside meets a cotangent of 0

    is_zero = new == 0
    count = there(zeros.at[at].add(is_zero.astype(x.dtype)))
    product = there(ones.at[at].mul(jnp.where(is_zero, 1, new)))
    # The product of the others at an update's place: without dividing by an update of zero.
    others = jnp.where(count == is_zero.astype(x.dtype), product / jnp.where(is_zero, 1, new), 0)
    slope = dx * ones.at[at].mul(new)
    return x.at[at].mul(new), slope.at[at].add(dnew * others * there(x))


@_indexed(2)
def scatter(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """``input`` with ``updates`` written over it, each at its index along an axis.

    Each update goes to its own place but for the one axis: in two axes and along the
    last, ``out[i, indices[i, j]] = updates[i, j]``. Of several updates for one place any
    may win.

    Raises:
        ValueError: no such axis, no integers, another dtype than the input's, or updates
            and indices of different shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.scatter(jnp.zeros(4), jnp.array([5.0, 7.0]), jnp.array([3, 0])))
        [7. 0. 0. 5.]
    """
    return _scatter(input, updates, indices, axis, "scatter", "set")


@_indexed(2)
def scatter_add(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """As ``scatter``, adding each update to what is there."""
    return _scatter(input, updates, indices, axis, "scatter_add", "add")


@_indexed(2)
def scatter_mul(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """As ``scatter``, multiplying what is there by each update."""
    return _scatter(input, updates, indices, axis, "scatter_mul", "mul")


@_indexed(2)
def scatter_max(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """As ``scatter``, keeping the greatest of what is there and the updates."""
    return _scatter(input, updates, indices, axis, "scatter_max", "max")


@_indexed(2)
def scatter_min(input: Any, updates: Any, indices: Any, axis: int = -1) -> Any:
    """As ``scatter``, keeping the least of what is there and the updates."""
    return _scatter(input, updates, indices, axis, "scatter_min", "min")


def _scatter_nd(input: Any, updates: Any, indices: Any, op: str, how: str) -> jax.Array:
    x, new, places = array(input), array(updates), integers(indices, op)
    _same_dtype(x, new, op)
    depth = places.shape[-1] if places.ndim else 0
    wanted = (*places.shape[:-1], *x.shape[depth:])
    if (
        not places.ndim
        or depth > x.ndim
        or new.ndim != len(wanted)
        or not all(map(same, new.shape, wanted))
    ):
        raise ValueError(f"{op}: updates {new.shape} at indices {places.shape} of a tensor {x.shape}: "
                         f"the updates must have shape {wanted}")  # fmt: skip
    return _update(x, tuple(_along_last(places)), new, how)


@_indexed(2)
def scatter_nd(input: Any, updates: Any, indices: Any) -> Any:
    """``input`` with slices written over it at places given by several indices each.

    Args:
        indices: ``[..., n]``: the last axis holds the indices of the first ``n`` axes.
        updates: ``indices.shape[:-1] + input.shape[n:]``.

    Raises:
        ValueError: another shape or dtype of the updates, more indices than axes, or no
            integers.
    """
    return _scatter_nd(input, updates, indices, "scatter_nd", "set")


@_indexed(2)
def scatter_nd_add(input: Any, updates: Any, indices: Any) -> Any:
    """As ``scatter_nd``, adding each update to what is there."""
    return _scatter_nd(input, updates, indices, "scatter_nd_add", "add")


@_indexed(2)
def scatter_nd_mul(input: Any, updates: Any, indices: Any) -> Any:
    """As ``scatter_nd``, multiplying what is there by each update."""
    return _scatter_nd(input, updates, indices, "scatter_nd_mul", "mul")


@_indexed(2)
def scatter_nd_max(input: Any, updates: Any, indices: Any) -> Any:
    """As ``scatter_nd``, keeping the greatest of what is there and the updates."""
    return _scatter_nd(input, updates, indices, "scatter_nd_max", "max")


@_indexed(2)
def scatter_nd_min(input: Any, updates: Any, indices: Any) -> Any:
    """As ``scatter_nd``, keeping the least of what is there and the updates."""
    return _scatter_nd(input, updates, indices, "scatter_nd_min", "min")


def _same_dtype(x: jax.Array, new: jax.Array, op: str) -> None:
    if x.dtype != new.dtype:
        raise ValueError(
            f"{op}: updates of {new.dtype} for a tensor of {x.dtype}; cast one of them"
        )


@lift
def masked_scatter(input: Any, mask: Any, updates: Any, out_dim: Any = None) -> Any:
    """``input`` with the updates, in order, where the mask holds.

    Args:
        mask: booleans; broadcasts to the input's shape.
        updates: read in row-major order; at least as many as the mask has places.
        out_dim: MAX's name for how many those are; not needed here.

    Raises:
        ValueError: the mask is not of booleans or does not broadcast, or the updates have
            another dtype than the input.
    """
    x, new = array(input), array(updates)
    mask = boolean(mask, "masked_scatter, as its mask,")
    _same_dtype(x, new, "masked_scatter")
    mask = jnp.broadcast_to(mask, x.shape)
    turn = jnp.cumsum(mask.reshape(-1)).reshape(x.shape) - 1
    return jnp.where(mask, jnp.take(new.reshape(-1), jnp.maximum(turn, 0)), x)


@lift
def nonzero(x: Any, out_dim: Any = None) -> Any:
    """Where the elements are not zero: a row of indices for each, in row-major order.

    How many there are is known only from the values: under ``jax.jit`` ``out_dim`` must be
    a number, and the rows beyond are -1.

    Raises:
        ValueError: while tracing without a number.
    """
    x = array(x)
    size = _known_size(out_dim)
    if size is None and isinstance(x, Tracer):
        raise ValueError("nonzero under jax.jit needs a number as out_dim: how many there are is not "
                         "known while tracing (or call it outside)")  # fmt: skip
    columns = jnp.nonzero(x, size=size, fill_value=-1 if size is not None else None)
    return jnp.stack(columns, axis=-1).astype(canonical("int64"))


def _known_size(out_dim: Any) -> int | None:
    try:
        size = None if out_dim is None else to_size(out_dim)
    except ValueError:
        return None
    return size if isinstance(size, int) else None
