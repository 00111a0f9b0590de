"""A Mosaic kernel that writes single tokens, in place, into caches whose slots are last in memory.

XLA for TPUs lays out caches with the slots last if 128 does not divide the head dimension, and so the scales of
int8 caches. To update one slot it copies some of these caches: all of them for a scatter, the int8 ones for a
``dynamic_update_slice``. A program here reads and writes the 128 slots that share their tiles of memory with
the token's slot.

Shapes: L layers, B sequences or pages, K KV heads, S slots, head dimension D; N tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .mosaic import LANES


def write_token(
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    layer: jax.Array,
    slot: jax.Array,
    row: jax.Array | None = None,
    interpret: Any = False,
) -> list[jax.Array]:
    """``arrays`` with ``new`` in one slot for each token.

    Args:
        arrays: caches ``[L, B, K, S, D]`` and scales ``[L, B, K, S]``.
        new: tokens for each array, ``[N, K, D]`` and ``[N, K]``, in the dtypes of ``arrays``.
        layer: index of the layer.
        slot: the slot of each token, int32 ``[N]``; for slots from S on nothing is written.
        row: the sequence or page of each token that is written, int32 ``[N]``; None: 0, 1, 2, …. Tokens of the same
            row must follow each other.
        interpret: argument of ``pallas_call`` that runs the kernel on another platform.
    """
    turned = [a.swapaxes(3, 4) if a.ndim == 5 else a for a in arrays]
    slots = arrays[0].shape[3]
    wide = [jnp.broadcast_to(n[..., None], (*n.shape, min(slots, LANES))) for n in new]
    place = _blocks(slot, row, slots)
    found = _call(len(arrays), interpret)(layer.reshape(1), *place, slot, *wide, *turned)
    return [a.swapaxes(3, 4) if a.ndim == 5 else a for a in found]


def _blocks(slot: jax.Array, row: jax.Array | None, slots: int) -> tuple[jax.Array, jax.Array]:
    """The row, and the number of the 128 slots in it, that each token's program reads and writes, ``[N]``."""
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    number = jnp.minimum(slot, slots - 1) // LANES
    if row is None:
        return index, number
    # A token that is not written has the block of the one before it, or of the first: in a block of its own it
    # could undo what another program writes.
    last = jax.lax.cummax(jnp.where(slot < slots, index, -1))
    at = jnp.where(last < 0, jnp.argmax(slot < slots).astype(jnp.int32), last)
    return row[at], number[at]


@functools.lru_cache(maxsize=16)
def _call(count: int, interpret: Any) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import tpu

    def call(layer: Any, row: Any, number: Any, slot: Any, *operands: Any) -> Any:
        new, caches = operands[:count], list(operands[count:])
        rows, width = caches[0].shape[1], new[0].shape[-1]

        def of_new(rank: int) -> Any:
            return lambda n, *_: (n, *(0,) * (rank - 1))

        def of_cache(rank: int) -> Any:
            def place(n: Any, layer: Any, row: Any, number: Any, slot: Any) -> Any:
                return layer[0], jnp.clip(row[n], 0, rows - 1), *(0,) * (rank - 3), number[n]

            return place

        one = pl.squeezed
        news = [pl.BlockSpec((one, *a.shape[1:]), of_new(a.ndim)) for a in new]
        parts = [pl.BlockSpec((one, one, *a.shape[2:-1], width), of_cache(a.ndim)) for a in caches]
        # Otherwise XLA may copy a small cache, with all layers, to VMEM.
        if not interpret:
            caches = [tpu.with_memory_space_constraint(a, tpu.HBM) for a in caches]
        return pl.pallas_call(
            _program,
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4, grid=slot.shape, in_specs=[*news, *parts], out_specs=parts
            ),
            out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands[count:]],
            input_output_aliases={4 + count + i: i for i in range(count)},
            interpret=interpret,
            name="maxjax_write_token",
        )(layer, row, number, slot, *new, *caches)

    return call


def _program(layer: Any, row: Any, number: Any, slot: Any, *refs: Any) -> None:
    """One program: the 128 slots of one row that include the token's slot."""
    from jax.experimental import pallas as pl

    this = pl.program_id(0)
    before = jnp.maximum(this - 1, 0)
    is_next = (this > 0) & (row[this] == row[before]) & (number[this] == number[before])
    place, begin = slot[this], number[this] * LANES
    count = len(refs) // 3
    for new, old, out in zip(refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True):
        # Else the block has what the program before has written.
        @pl.when(~is_next)
        def _(old: Any = old, out: Any = out) -> None:
            out[...] = old[...]

        found = begin + jax.lax.broadcasted_iota(jnp.int32, old.shape, old.ndim - 1) == place
        # No TPU computes in 8 bits, and the older ones not in 16.
        wide = jnp.int32 if jnp.issubdtype(old.dtype, jnp.integer) else jnp.float32
        chosen = jnp.where(found, new[...].astype(wide), out[...].astype(wide))
        out[...] = chosen.astype(out.dtype)
