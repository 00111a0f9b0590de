"""``Step``: the positions of the tokens of one call, which every layer gets; and the cache slots of tokens.

Shapes: L layers, B sequences, T tokens, S slots of the cache, head width D.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...kernels.attention import NO_KEY
from ...nn.kv_cache.layout import CachePart

# The states of a KVCache by the names of its groups; empty without a cache.
Cached = Mapping[str, Any]


class Step(NamedTuple):
    """Positions and other facts about the tokens of one call, which every layer gets.

    Attributes:
        starts: position of each row's first token, ``[B]``, or ``[1]`` for all rows.
        counts: number of real tokens in each row, ``[B]``; the rest is padding. None: all are real.
        rotations: (cos, sin) of each token's angles ``[B or 1, T, R/2]``, by the kind of RoPE; the
            first R features of a head are rotated.
        query_scales: factor of each token's queries ``[B or 1, T]``, if the model has one.
        tokens: for a decode step, the starts ``[B]``, with -1 for rows without a token.
        numbers: index of each layer in its cache group, ``[L]``, or a dict of these by group where they
            differ; None: the layer's own index.
        capacity: number of positions in the cache; set only where attention weights are tapped.
        inputs: further inputs of each layer beside the hidden states, ``[L, B, (T,) ...]``; None: none.
        sinks: attention sinks ``[H]`` of the layer that runs; None: none.
    """

    starts: jax.Array
    counts: jax.Array | None
    rotations: dict[str, tuple[jax.Array, jax.Array]]
    tokens: jax.Array | None = None
    numbers: jax.Array | dict[str, jax.Array] | None = None
    capacity: int | None = None
    sinks: jax.Array | None = None
    query_scales: jax.Array | None = None
    inputs: jax.Array | None = None

    def positions(self, length: int) -> jax.Array:
        """The positions of the tokens, ``[B or 1, T]``."""
        return self.starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]

    def number(self, group: str, layer: Any) -> Any:
        """The index of a layer in its cache group."""
        numbers = self.numbers[group] if isinstance(self.numbers, dict) else self.numbers
        if numbers is None:
            return layer
        return jax.lax.dynamic_index_in_dim(numbers, layer, keepdims=False)

    def real(self, length: int) -> jax.Array | None:
        """Which tokens are real, not padding, bools ``[B, T]``; None: all are."""
        if self.counts is None:
            return None
        return jnp.arange(length, dtype=jnp.int32)[None, :] < self.counts[:, None]


def ends(step: Step, length: int) -> jax.Array:
    """The number of tokens of each row after a step, ``[B, 1]``."""
    return step.starts[:, None] + (length if step.counts is None else step.counts[:, None])


def own_slots(
    part: CachePart | None, positions: jax.Array, size: int, rotating: bool
) -> tuple[jax.Array, jax.Array | None]:
    """(Slots ``[B or 1, T]`` of the tokens on this device, which tokens it holds, bools; None: all)."""
    parts = 1 if part is None else part.slots
    slot = positions % (size * parts) if rotating else positions
    if part is None or parts == 1:
        return slot, None
    return slot // parts, slot % parts == part.first


def numbers(part: CachePart | None, size: int) -> jax.Array:
    """The global indices ``[S]`` of the slots on this device."""
    return jnp.arange(size, dtype=jnp.int32) if part is None else part.numbers(size)


def slot_positions(after: jax.Array, size: int, part: CachePart | None = None) -> jax.Array:
    """The position in each slot ``[B, S]`` of a rotating cache after ``after`` ``[B, 1]`` tokens.

    The position of an empty slot is ``NO_KEY``.
    """
    parts = 1 if part is None else part.slots
    last = after - 1
    found = last - (last - numbers(part, size)[None, :]) % (size * parts)
    return jnp.where(found < 0, NO_KEY, found)


def nan_beyond(
    limit: int, x: jax.Array, step: Step, length: int, at: jax.Array | None = None
) -> jax.Array:
    """``x``, with NaN for tokens at positions of ``limit`` and beyond.

    Args:
        limit: number of positions.
        x: ``[B, T, ...]`` for all tokens, or ``[B, ...]`` for one in each row.
        step: positions of the tokens.
        length: T.
        at: index ``[B]`` of the one token in each row; None: T is 1, or ``x`` has all tokens.
    """
    fits = step.positions(length) < limit  # [B or 1, T]
    real = step.real(length)
    fits = fits if real is None else fits | ~real
    if at is not None:
        fits = jnp.broadcast_to(fits, (at.shape[0], length))
        fits = jnp.take_along_axis(fits, at[:, None], axis=1)
    return jnp.where(fits[..., None] if x.ndim == 3 else fits, x, jnp.nan)
