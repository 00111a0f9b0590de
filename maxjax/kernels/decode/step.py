"""The parts that all forms of decode attention share: options, rope, and the new token's write to the cache.

Shapes: L layers, B sequences, K KV heads, G query heads of each, S slots of the cache, head_dim D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..explicit import Division
from ..int8_rows import quantised
from ..pages import places_of
from ..sinks import with_sinks


class Options(NamedTuple):
    """The static arguments of decode attention.

    Attributes:
        scale: factor of the scores.
        window: number of tokens that a token attends to, itself included; 0: all.
        cap: cap of the scores; 0: none.
        interleaved: whether rope rotates pairs of neighbouring elements, instead of one of each half.
        rotating: whether a sequence longer than S continues in slot 0.
        division: how a mesh with Auto axes shards the keys, if that is known.
        is_written: whether the new tokens are in the cache already.
    """

    scale: float
    window: int
    cap: float
    interleaved: bool
    rotating: bool
    division: Division | None = None
    is_written: bool = False


class Written(NamedTuple):
    """A decode step after the new token is in the cache.

    Attributes:
        q: rotated queries ``[B, K, G, D]`` in float32.
        caches: keys and values, and for int8 their scales.
        fits: whether each sequence has a slot for its new token, bools ``[B]``.
    """

    q: jax.Array
    caches: list[jax.Array]
    fits: jax.Array

    def layers(self) -> list[jax.Array]:
        """Keys and values ``[L, B, K, S, D]`` as they are read, and for int8 their scales."""
        keys, values, *scales = self.caches
        # Without values, the keys are the values.
        found = self.caches if values.ndim else [keys, keys, *scales, *scales]
        return [a if keys.ndim == 5 else a[None] for a in found]

    def answer(self, out: jax.Array, lengths: jax.Array, dtype: Any) -> list[jax.Array]:
        """``out`` ``[B, K, G, D]``, with zeros in unused rows and NaN in rows without a slot; and the caches."""
        missing = jnp.where(lengths < 0, 0.0, jnp.nan)[:, None, None, None]
        out = jnp.where(self.fits[:, None, None, None], out, missing)
        return [out.astype(dtype), *self.caches]


def write_token(
    arrays: Sequence[jax.Array], new: Sequence[jax.Array], layer: jax.Array, slot: jax.Array
) -> list[jax.Array]:
    """Caches ``[(L,) B, K, S, ...]`` with tokens ``[B, K, ...]`` in slots ``[B]``; slots from S on are dropped."""
    # The heads are an index too: with a slice for them XLA copies the whole cache on TPUs.
    rows, heads = jnp.arange(slot.shape[0])[:, None], jnp.arange(new[0].shape[1])
    place = (rows, heads, slot[:, None])
    place = place if arrays[0].ndim == new[0].ndim + 1 else (layer, *place)
    pairs = zip(arrays, new, strict=True)
    return [a.at[place].set(x, mode="drop", unique_indices=True) for a, x in pairs]


def written(
    static: Options,
    *operands: jax.Array,
    write: Callable[..., list[jax.Array]] = write_token,
    table: jax.Array | None = None,
) -> Written:
    """Rotates ``q`` ``[B, K, G, D]`` and ``k``, and writes ``k`` and ``v`` into the caches.

    The operands are those of ``decode_attention.definition``. If ``values`` and ``v`` are scalars, the keys are the
    values too. ``write`` is :func:`write_token`, or another function that does the same. With ``table`` the caches are
    pools of pages, and ``write`` takes positions in the sequences.
    """
    q, k, v, keys, values, layer, lengths, cos, sin, _, _, *scales = operands
    slots = keys.shape[-2] if table is None else table.shape[1] * keys.shape[-2]
    q32 = rotated(q.astype(jnp.float32), cos[:, None, None], sin[:, None, None], static)
    k32 = rotated(k.astype(jnp.float32), cos[:, None], sin[:, None], static)
    fits = lengths >= 0 if static.rotating else (lengths >= 0) & (lengths < slots)
    if table is not None:
        fits &= places_of(table, lengths[:, None], keys.shape[-4], keys.shape[-2]).exists[:, 0]
    slot = jnp.where(fits, lengths % slots, slots)  # nothing is written past the last slot
    shared = not values.ndim
    caches, new = ([keys, *scales], [k32]) if shared else ([keys, values, *scales], [k32, v])
    if scales:
        new = [a for pair in zip(*map(quantised, new), strict=True) for a in pair]
    stored = [x.astype(a.dtype) for a, x in zip(caches, new, strict=True)]
    if not static.is_written:
        caches = write(caches, stored, layer, slot)
    if shared:
        caches.insert(1, values)
    return Written(q32, caches, fits)


def mean(largest: jax.Array, total: jax.Array, mixed: jax.Array, sinks: jax.Array) -> jax.Array:
    """The weighted mean of the values ``[B, K, G, D]``, from sums of weights and of weighted values.

    Args:
        largest: largest score of each query, ``[B, K, G]``, which was subtracted before the exponential.
        total: sum of the weights, ``[B, K, G]``.
        mixed: weighted sum of the values, ``[B, K, G, D]``.
        sinks: attention sinks ``[K, G]``, or ``[K, 0]`` without sinks.
    """
    out = mixed / total[..., None]
    return with_sinks(out, largest + jnp.log(total), sinks) if sinks.size else out


def seen(static: Options, lengths: jax.Array, slot: jax.Array, slots: int) -> jax.Array:
    """Whether the new token of each sequence attends to the slots ``slot`` ``[s]`` of S: bools ``[B, s]``."""
    age = lengths[:, None] - slot[None, :]
    age = age % slots if static.rotating else age
    sees = (age >= 0) & (age <= lengths[:, None])
    return sees & (age < static.window) if static.window else sees


def biased(
    scores: jax.Array, static: Options, lengths: jax.Array, slot: jax.Array, slots: int,
    slopes: jax.Array,
) -> jax.Array:  # fmt: skip
    """The scores ``[B, K, G, s]`` of the keys in the slots ``slot`` ``[s]`` of S, with ALiBi's bias.

    Args:
        scores, static, lengths, slot, slots: the scores, and what :func:`seen` takes.
        slopes: slope of each head, ``[K, G]``, or ``[K, 0]`` without biases.
    """
    if not slopes.size:
        return scores
    age = lengths[:, None] - slot[None, :]
    age = age % slots if static.rotating else age
    return scores - slopes[None, :, :, None] * age[:, None, None, :].astype(scores.dtype)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, static: Options) -> jax.Array:
    """``x`` ``[..., D]`` with its first 2 · pairs elements rotated; cos and sin broadcast to ``[..., pairs]``."""
    pairs = cos.shape[-1]
    if not pairs:
        return x
    head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if static.interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
    else:
        a, b = head[..., :pairs], head[..., pairs:]
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = [jnp.stack([a, b], -1).reshape(head.shape)] if static.interleaved else [a, b]
    return jnp.concatenate([*turned, rest], -1)
