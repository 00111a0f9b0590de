"""Reads slots of one layer of a cache, without copying or converting the other layers.

Shapes: L layers, B sequences, K KV heads, S slots; axes after the slots belong to one token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .operation import Operation, has_static_shapes, types_of


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
