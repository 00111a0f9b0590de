"""Reads slots or pages of one layer of a cache, without copying or converting the other layers.

Shapes: L layers, B sequences, K KV heads, S slots; N pages of P slots, M pages of each sequence (``pages.py``);
axes after the slots belong to one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit
from .operation import Operation, has_static_shapes, types_of
from .pages import checked_table


def slots_of(array: jax.Array, layer: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """``count`` slots of one layer of a cache ``[L, B, K, S, ...]``: ``[B, K, count, ...]``.

    Args:
        start: the first slot, an int32 scalar; it is clamped so that all ``count`` slots are within S.

    Example:
        >>> cache = jnp.arange(8).reshape(2, 1, 1, 4)
        >>> slots_of(cache, jnp.int32(1), jnp.int32(1), 2)[0, 0].tolist()
        [5, 6]
    """
    if not (has_static_shapes(array) and isinstance(count, int)):
        return _definition(count, array, layer, start)[0]
    return _OPERATION([array, layer, start], count)[0]


def pages_of(array: jax.Array, layer: jax.Array, table: jax.Array) -> jax.Array:
    """Return the pages of each sequence in one layer of a pool, one after the other: ``[B, K, M · P, ...]``.

    Args:
        array: the pool ``[L, N, K, P, ...]``.
        layer: index of the layer, an int32 scalar.
        table: the pages of each sequence, integers ``[B, M]``. What an entry outside 0 to N - 1 gives is
            some other page of the layer.

    Raises:
        ValueError: the table is not of this form.

    Example:
        >>> pool = jnp.arange(12).reshape(2, 3, 1, 2)
        >>> pages_of(pool, jnp.int32(1), jnp.array([[2, 0]]))[0, 0].tolist()
        [10, 11, 6, 7]
    """
    table = checked_table(table, table.shape[0])
    mesh = explicit.mesh_of(array, table)
    _, _, heads, _, *rest = explicit.entries(array)
    run = lambda *operands: _PAGES(operands, None)[0]
    if not has_static_shapes(array, table):
        run = lambda *operands: _pages_definition(None, *operands)[0]
    wanted = [explicit.entries(table)[0], heads, (), *rest]
    return explicit.automatic(run, mesh, wanted)(array, layer, table)


def bits(array: jax.Array) -> jax.Array:
    """A 16-bit float array as uint16 of the same bits; any other array unchanged. It has no derivative."""
    if array.dtype.itemsize == 2 and jnp.issubdtype(array.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array, jnp.uint16)
    return array


def from_bits(array: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of :func:`bits`: the array of this dtype that ``array`` has the bits of."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def _definition(count: int, array: jax.Array, layer: jax.Array, start: jax.Array) -> list[Any]:
    index = (layer, jnp.int32(0), jnp.int32(0), start, *[jnp.int32(0)] * (array.ndim - 4))
    shape = (1, *_shape(count, array))

    def cut(array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(array, index, shape, allow_negative_indices=False)[0]

    # Before a slice of bfloat16, XLA for CPUs converts the whole array to float32.
    as_bits = lambda array: from_bits(cut(bits(array)), array.dtype)
    return [jax.lax.platform_dependent(array, cpu=as_bits, default=cut)]


def _shape(count: int, array: Any) -> tuple[int, ...]:
    return (*array.shape[1:3], count, *array.shape[4:])


def _types(count: int, array: Any, *_: Any) -> list[Any]:
    return [array.update(shape=_shape(count, array), weak_type=False)]


def _kernel(count: int, array: Any, layer: Any, start: Any) -> Any:
    results = _types(count, *types_of([array]))
    return jax.ffi.ffi_call("maxjax_read_slots", results)(array, layer, start)


_OPERATION = Operation("maxjax_read_slots", _types, _definition, {"cpu": _kernel}, None, None)


# -- pages


@jax.custom_jvp
def _gathered(array: jax.Array, layer: jax.Array, table: jax.Array) -> jax.Array:
    def of_bits(array: jax.Array, layer: jax.Array, table: jax.Array) -> jax.Array:
        return from_bits(_gather(bits(array), layer, table), array.dtype)

    # As above; bits have no derivative.
    return jax.lax.platform_dependent(array, layer, table, cpu=of_bits, default=_gather)


@_gathered.defjvp
def _gathered_jvp(primals: Any, tangents: Any) -> Any:
    _, layer, table = primals
    return _gathered(*primals), _gather(tangents[0], layer, table)


def _gather(array: jax.Array, layer: jax.Array, table: jax.Array) -> jax.Array:
    # One gather with two indices: a slice of the layer would be a copy of all its pages.
    found = array.at[layer, table].get(mode="clip")  # [B, M, K, P, ...]
    return found.swapaxes(1, 2).reshape(_pages_shape(array, table))


def _pages_definition(static: None, *operands: jax.Array) -> list[jax.Array]:
    return [_gathered(*operands)]


def _pages_shape(array: Any, table: Any) -> tuple[int, ...]:
    batch, count = table.shape
    return (batch, array.shape[2], count * array.shape[3], *array.shape[4:])


def _pages_types(static: None, array: Any, layer: Any, table: Any) -> list[Any]:
    return [array.update(shape=_pages_shape(array, table), weak_type=False)]


def _pages_kernel(static: None, *operands: Any) -> Any:
    results = _pages_types(static, *types_of(operands))
    return jax.ffi.ffi_call("maxjax_read_pages", results)(*operands)


def _rule(ranks: Sequence[int]) -> Any:
    token = [f"d{i}" for i in range(ranks[0] - 4)]
    pool = ArrayMapping("l", "n", "h", "p", *token)
    return (pool, ArrayMapping(), ArrayMapping("b", "m")), (ArrayMapping("b", "h", "s", *token),)


def _shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    """Each device has all pages and tables, of its heads."""
    _, _, heads, _, *token = specs[0]
    return [[(), (), heads, (), *token], [], [(), ()]], [[(), heads, (), *token]], ()


PAGES_NAME = "maxjax_read_pages"
"""The name, in a jaxpr, of the operation that copies the pages of sequences."""

_PAGES = Operation(
    PAGES_NAME, _pages_types, _pages_definition, {"cpu": _pages_kernel}, _rule, _shardings
)
