"""A Mosaic kernel that writes one token of each sequence, in place, into caches whose slots are last in memory.

XLA for TPUs lays out caches with the slots last if 128 does not divide the head dimension, and so the scales of
int8 caches. To update one slot it copies some of these caches: all of them for a scatter, the int8 ones for a
``dynamic_update_slice``. A program here reads and writes the 128 slots that share their tiles of memory with
the token's slot.

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
        new: one token for each array, ``[B, K, D]`` and ``[B, K]``, in the dtypes of ``arrays``.
        layer: index of the layer.
        slot: the slot of each sequence, int32 ``[B]``; for slots from S on nothing is written.
        interpret: argument of ``pallas_call`` that runs the kernel on another platform.
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
        # Otherwise XLA may copy a small cache, with all layers, to VMEM.
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
    """One program: the 128 slots of one sequence that include the token's slot."""
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
