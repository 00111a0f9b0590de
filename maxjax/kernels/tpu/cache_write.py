"""Writes one token of each sequence into caches whose slots are last in memory, in place, in Mosaic.

XLA for TPUs keeps heads whose width 128 does not divide, and the scales of an int8 cache, with the slots
last. Whatever form the update of one slot has in XLA, some caches are copied for it: all of them for a scatter,
those of int8 for a ``dynamic_update_slice``. A program here reads and writes the 128 slots that share their
tiles of memory with the token's.

Shapes: L layers, B sequences, K KV heads, S slots, head dimension D.
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
    interpret: Any = False,
) -> list[jax.Array]:
    """``arrays`` with ``new`` in one slot of each sequence.

    Args:
        arrays: caches ``[L, B, K, S, D]`` and scales ``[L, B, K, S]``.
        new: a token of each, ``[B, K, D]`` and ``[B, K]``, in the dtypes of ``arrays``.
        layer: index of the layer.
        slot: the slot of each sequence, int32 ``[B]``; nothing is written for one beyond S.
        interpret: as for ``pallas_call``: how to run the kernel on another platform.
    """
    turned = [a.swapaxes(3, 4) if a.ndim == 5 else a for a in arrays]
    wide = [jnp.broadcast_to(n[..., None], (*n.shape, LANES)) for n in new]
    found = _call(len(arrays), interpret)(layer.reshape(1), slot, *wide, *turned)
    return [a.swapaxes(3, 4) if a.ndim == 5 else a for a in found]


@functools.lru_cache(maxsize=16)
def _call(count: int, interpret: Any) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import tpu

    def call(layer: Any, slot: Any, *operands: Any) -> Any:
        new, caches = operands[:count], list(operands[count:])
        slots = caches[0].shape[-1]

        def of_new(rank: int) -> Any:
            return lambda b, *_: (b, *(0,) * (rank - 1))

        def of_cache(rank: int) -> Any:
            def place(b: Any, layer: Any, slot: Any) -> Any:
                number = jax.lax.div(jnp.minimum(slot[b], slots - 1), LANES)
                return layer[0], b, *(0,) * (rank - 3), number

            return place

        one = pl.squeezed
        news = [pl.BlockSpec((one, *a.shape[1:]), of_new(a.ndim)) for a in new]
        parts = [pl.BlockSpec((one, one, *a.shape[2:-1], LANES), of_cache(a.ndim)) for a in caches]
        # Otherwise XLA may copy a small cache, of all layers, to the memory that the kernel computes in.
        if not interpret:
            caches = [tpu.with_memory_space_constraint(a, tpu.HBM) for a in caches]
        return pl.pallas_call(
            functools.partial(_program, slots),
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2, grid=slot.shape, in_specs=[*news, *parts], out_specs=parts
            ),
            out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands[count:]],
            input_output_aliases={2 + count + i: i for i in range(count)},
            interpret=interpret,
            name="maxjax_write_token",
        )(layer, slot, *new, *caches)

    return call


def _program(slots: int, layer: Any, slot: Any, *refs: Any) -> None:
    """The 128 slots of one sequence that the token's is among."""
    from jax.experimental import pallas as pl

    place = slot[pl.program_id(0)]
    begin = jax.lax.div(jnp.minimum(place, slots - 1), LANES) * LANES
    count = len(refs) // 3
    for new, old, out in zip(refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True):
        found = begin + jax.lax.broadcasted_iota(jnp.int32, old.shape, old.ndim - 1) == place
        # No TPU computes in 8 bits, and the older ones not in 16.
        wide = jnp.int32 if jnp.issubdtype(old.dtype, jnp.integer) else jnp.float32
        chosen = jnp.where(found, new[...].astype(wide), old[...].astype(wide))
        out[...] = chosen.astype(out.dtype)
