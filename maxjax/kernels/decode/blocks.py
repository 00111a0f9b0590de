"""Decode attention in ``jax.numpy``, in blocks of slots up to the longest sequence.

It is the form for platforms without a kernel. Unlike the definition it does not read slots that no
sequence has filled, and makes no array of the size of a layer's keys or values; it has no derivative
in reverse mode.

Shapes: B sequences, K KV heads, G query heads of each, S slots of the cache, s slots of a block, head_dim D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..cache_read import slots_of
from ..int8_rows import restored
from ..operation import varying_with
from .step import Options, biased, mean, seen, write_token, written

# Elements of keys in a block: 4 MiB in 16 bits, so that reading them takes longer than starting an iteration.
_NUMBERS = 1 << 21
_LEAST_SLOTS = 128


def in_blocks(
    static: Options,
    devices: int,
    *operands: Any,
    write: Callable[..., list[jax.Array]] = write_token,
) -> list[jax.Array]:
    """What ``decode_attention.definition`` computes from the same operands, which XLA divides between devices."""
    q, _, _, keys, _, layer, lengths, _, _, sinks, slopes, *_ = operands
    step = written(static, *operands, write=write)
    caches = step.layers()
    slots = keys.shape[-2]
    block = _block(math.prod(q.shape[:2]) * q.shape[3] // devices, slots)
    low, high = _range(static, lengths, step.fits, slots)

    def turn(number: Any, state: Any) -> Any:
        largest, total, mixed = state
        # The last block ends with the last slot; slots that are in the block before it too are masked.
        start = jnp.minimum(number * block, slots - block)
        found, values, *scales = (slots_of(a, layer, start, block) for a in caches)
        if scales:
            found, values = restored(found, scales[0]), restored(values, scales[1])
        slot = start + jnp.arange(block, dtype=jnp.int32)
        sees = seen(static, lengths, slot, slots) & (slot >= number * block)[None, :]
        sees = sees[:, None, None, :]
        scores = jnp.einsum("bkgd,bksd->bkgs", step.q * static.scale, found.astype(jnp.float32))
        if static.cap:
            scores = static.cap * jnp.tanh(scores / static.cap)
        scores = biased(scores, static, lengths, slot, slots, slopes)
        scores = jnp.where(sees, scores, -jnp.inf)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new[..., None])
        kept = jnp.exp(largest - new)
        total = total * kept + jnp.sum(weights, axis=-1)
        # Values in slots that are not seen may be NaN.
        values = jnp.where(sees.swapaxes(2, 3), values.astype(jnp.float32), 0)
        more = jnp.einsum("bkgs,bksd->bkgd", weights, values)
        return new, total, mixed * kept[..., None] + more

    rows = step.q[..., 0]
    # Finite, so that a block in which a row sees no slot leaves that row's state unchanged.
    lowest = jnp.full_like(rows, jnp.finfo(jnp.float32).min)
    state = (lowest, jnp.zeros_like(rows), jnp.zeros_like(step.q))
    end = (high + block - 1) // block
    state = varying_with(state, step.q, caches, lengths)
    largest, total, mixed = jax.lax.fori_loop(low // block, end, turn, state)
    return step.answer(mean(largest, total, mixed, sinks), lengths, q.dtype)


def _range(
    static: Options, lengths: jax.Array, fits: jax.Array, slots: int
) -> tuple[jax.Array, jax.Array]:
    """The first slot that the new token of any sequence attends to, and the one after the last."""
    last = lengths % slots
    count = jnp.minimum(lengths, min(slots, static.window or slots) - 1) + 1
    wraps = count > last + 1  # the range passes slot 0: only in a rotating cache
    low = jnp.where(wraps, 0, last + 1 - count)
    high = jnp.where(wraps, slots, last + 1)
    # One reduction instead of two: on a mesh that splits the sequences each needs communication.
    found = jnp.stack([slots - low, high])
    found = jnp.max(jnp.where(fits, found, 0), axis=1, initial=0)
    return slots - found[0], found[1]


def _block(numbers: int, slots: int) -> int:
    """The number of slots in a block, where one slot of all sequences and heads has ``numbers`` elements."""
    wanted = _NUMBERS // max(numbers, 1) // _LEAST_SLOTS * _LEAST_SLOTS
    return min(slots, max(_LEAST_SLOTS, wanted))
