"""Writes the tokens of a prefill into a cache: an update in place, of the slots of some tokens of one layer.

Shapes: L layers, B sequences, T tokens, K KV heads, S slots; whatever follows the slots is one token's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import explicit
from .blocked_attention import bits, from_bits
from .operation import Operation


def write_tokens(
    array: jax.Array,
    new: jax.Array,
    layer: jax.Array,
    place: jax.Array,
    consecutive: bool = False,
    division: explicit.Division | None = None,
) -> jax.Array:
    """``array`` with tokens written to slots ``place`` of a layer.

    Args:
        array: the cache ``[L, B, K, S, ...]``.
        new: the tokens ``[B, T, K, ...]``, which are converted to the cache's dtype.
        layer: index of the layer, an int32 scalar.
        place: the slot of each token, int32 ``[B, T]``. Tokens with a place beyond S are dropped; the other
            places of a row must differ.
        consecutive: whether those of a row that are not dropped are its first, and follow each other. TPUs then
            write each row at once.
        division: how a mesh divides ``array``, if that is known.

    Example:
        >>> cache, new = jnp.zeros((1, 1, 1, 4)), jnp.array([[[5.0], [6.0], [7.0]]])
        >>> write_tokens(cache, new, jnp.int32(0), jnp.array([[1, 2, 4]]), True)[0, 0, 0].tolist()
        [0.0, 5.0, 6.0, 0.0]
    """
    new = new.astype(array.dtype)
    mesh = explicit.mesh_of(array, new)
    if mesh is not None:
        division = explicit.Division.of(mesh, explicit.entries(array))
    elif division is not None:  # scales have one axis less than keys
        division = division._replace(entries=division.entries[: array.ndim])

    sizes = (*array.shape, *place.shape)
    fits = all(isinstance(n, int) for n in sizes) and place.shape[1] <= array.shape[3]

    def run(*operands: jax.Array) -> jax.Array:
        if consecutive and fits:
            return _OPERATION(operands, division)[0]
        return _scattered(*operands)

    if mesh is not None:
        run = explicit.automatic(run, mesh, explicit.entries(array))
    return run(array, new, layer, place)


@jax.custom_jvp
def _scattered(array: jax.Array, new: jax.Array, layer: jax.Array, place: jax.Array) -> jax.Array:
    def of_bits(array: jax.Array, new: jax.Array, layer: jax.Array, place: jax.Array) -> jax.Array:
        return from_bits(_set(bits(array), bits(new), layer, place), array.dtype)

    # For a CPU, XLA converts a whole array of bfloat16 to float32 before a scatter, and back after
    # it; for a TPU, it copies the array if its bits are taken.
    return jax.lax.platform_dependent(array, new, layer, place, cpu=of_bits, default=_set)


@_scattered.defjvp
def _scattered_jvp(primals: Any, tangents: Any) -> Any:
    array, _, layer, place = primals
    changes = (tangents[0], tangents[1].astype(array.dtype))
    # A scatter has a transpose only if all places are said to differ, those of dropped tokens too.
    # XLA copies the whole array on TPUs for such a scatter.
    size, length = array.shape[3], place.shape[1]
    differing = jnp.where(place < size, place, size + jnp.arange(length, dtype=jnp.int32))
    return _scattered(*primals), _set(*changes, layer, differing, unique_indices=True)


def _set(
    array: jax.Array, new: jax.Array, layer: jax.Array, place: jax.Array, **options: Any
) -> jax.Array:
    # The heads are an index too: with a slice for them XLA copies the whole array on TPUs.
    rows = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None, None]
    heads = jnp.arange(array.shape[2], dtype=jnp.int32)
    return array.at[layer, rows, heads, place[:, :, None]].set(new, mode="drop", **options)


# -- rows at once, on TPUs


def _definition(division: explicit.Division | None, *operands: jax.Array) -> list[jax.Array]:
    return [_scattered(*operands)]


def _on_tpu(
    division: explicit.Division | None, devices: int, *operands: jax.Array
) -> list[jax.Array]:
    """XLA for TPUs scatters into an array whose last axis is that of the heads' width, and copies the
    cache where the slots are last: it keeps heads so whose width 128 does not divide."""
    if devices == 1:
        return [_row_by_row(*operands)]
    if division is None:
        return [_scattered(*operands)]
    array, new, _, place = operands
    _, batch, heads, slots, *rest = division.entries
    parts = [division.entries, [batch, (), heads, *rest], [], [batch, ()]]
    whole = slots or not all(
        division.divides(a.shape, split) for a, split in ((array, parts[0]), (place, parts[3]))
    )
    if whole:
        return [_scattered(*operands)]
    return [division.on_parts(_row_by_row, parts, division.entries)(*operands)]


def _row_by_row(array: jax.Array, new: jax.Array, layer: jax.Array, place: jax.Array) -> jax.Array:
    slots, length = array.shape[3], place.shape[1]
    new = new.swapaxes(1, 2)  # [B, K, T, ...]
    zero, tail = jnp.int32(0), [jnp.int32(0)] * (array.ndim - 4)
    # The last slots that T tokens fit in begin before the first token if some tokens are dropped:
    # tokens that are not there come before it.
    before = jnp.pad(new, ((0, 0), (0, 0), (length, 0), *((0, 0),) * len(tail)))
    one = (1, *before.shape[1:2], length, *before.shape[3:])
    index = jnp.arange(length, dtype=jnp.int32)

    def write(row: jax.Array, array: jax.Array) -> jax.Array:
        at = jax.lax.dynamic_index_in_dim(place, row, keepdims=False, allow_negative_indices=False)
        start = jnp.clip(at[0], 0, slots - length)
        skipped = jnp.clip(at[0] - start, 0, length)
        token = index - skipped
        is_new = (token >= 0) & (token < jnp.sum(at < slots, dtype=jnp.int32))
        cut = lambda a, begin, shape: jax.lax.dynamic_slice(
            a, begin, shape, allow_negative_indices=False
        )
        found = cut(before, (row, zero, length - skipped, *tail), one)[None]
        begin = (layer, row, zero, start, *tail)
        is_new = is_new.reshape(1, 1, 1, length, *(1,) * len(tail))
        found = jnp.where(is_new, found, cut(array, begin, found.shape))
        return jax.lax.dynamic_update_slice(array, found, begin, allow_negative_indices=False)

    return jax.lax.fori_loop(0, place.shape[0], write, array)


def _types(division: Any, array: Any, *rest: Any) -> list[Any]:
    return [array]


def _never(*_: Any) -> Any:
    raise NotImplementedError("no platform has a kernel that writes tokens")


_OPERATION = Operation(
    "maxjax_write_tokens", _types, _definition, {}, _never, _never, lambda *_: None,
    forms={"tpu": _on_tpu},
)  # fmt: skip
