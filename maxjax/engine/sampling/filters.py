"""Top-k, top-p and min-p as one number per row: the smallest logit that stays.

Nothing here sorts a vocabulary. The number is found among the few largest logits where that is
enough, and otherwise by halving: each filter keeps a logit if those above it have less than a
certain number, or a certain probability, together.

All values are shifted so that the largest of a row is 0, and divided by the temperature.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .settings import Amounts, Sampling

# So many of the largest logits usually hold what top-p keeps.
_CANDIDATES = 256
# Of more than these, halving is faster than finding the largest.
MOST_CANDIDATES = 1024
# The largest of a wide row are looked for in the blocks with the largest maxima, which costs
# about half of the time; below this width it does not.
_BLOCK, _WIDE = 64, 65536
# Bits of a positive float32 up to infinity; halving them takes 31 steps.
_INFINITY, _HALVINGS = 0x7F800000, 31


def candidate_count(settings: Sampling, width: int) -> int:
    """How many of the largest logits are looked at first.

    Example:
        >>> candidate_count(Sampling(temperature=1, top_k=50), 32000)
        66
    """
    # A few more than k: the filter is right only where the last of them is left out.
    return min(width, settings.top_k + 16 if settings.top_k else _CANDIDATES)


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest values of each row ``[B, V]``, falling, and their columns: ``[B, count]`` each.

    Of equal ones the first column comes first, as with :func:`jax.lax.top_k`.

    Example:
        >>> largest(jnp.array([[1.0, 3.0, 2.0, 3.0]]), 3)[1].tolist()
        [[1, 3, 2]]
    """
    batch, width = values.shape
    blocks = -(-width // _BLOCK)
    if width < _WIDE or count > blocks // 4:
        return jax.lax.top_k(values, count)
    spare = blocks * _BLOCK - width
    tiles = jnp.pad(values, ((0, 0), (0, spare)), constant_values=-jnp.inf)
    tiles = tiles.reshape(batch, blocks, _BLOCK)
    _, chosen = jax.lax.top_k(jnp.max(tiles, axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # in the order of the columns, for equal values
    held = jnp.take_along_axis(tiles, chosen[:, :, None], axis=1).reshape(batch, -1)
    found, places = jax.lax.top_k(held, count)
    columns = jnp.take_along_axis(chosen, places // _BLOCK, axis=1) * _BLOCK + places % _BLOCK
    return found, columns


def edge_among(
    found: jax.Array, values: jax.Array, settings: Sampling, amounts: Amounts
) -> tuple[jax.Array, jax.Array]:
    """The smallest logit that stays, by the largest ``found [B, C]`` of ``values [B, V]``.

    Returns:
        The edge ``[B, 1]``, and whether it is right, bool ``[B]``: what stays is all in ``found``.

    Example:
        >>> v = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
        >>> settings = Sampling(temperature=1, top_p=0.6)
        >>> edge, right = edge_among(v, v, settings, settings.amounts)
        >>> (v >= edge).tolist(), right.tolist()
        ([[True, True, False]], [True])
    """
    # Never a slice of ``found``: XLA would merge it with the one inside top_k, which it then no
    # longer knows, and sort the vocabulary.
    last = jnp.min(found, axis=1)
    edge = jnp.full((found.shape[0], 1), amounts.least, jnp.float32)
    top_k = min(settings.top_k, values.shape[1])
    kth = None
    if top_k:
        rank = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
        kth = jnp.min(jnp.where(rank < top_k, found, 0.0), axis=1, keepdims=True)
        edge = jnp.maximum(edge, kth)
    if settings.top_p < 1:
        # What top-p looks at has been through top-k, not yet through min-p.
        weights = jnp.exp(found)
        total = jnp.sum(jnp.exp(values), axis=1, keepdims=True)
        if kth is not None:
            weights = jnp.where(found >= kth, weights, 0.0)
            total = jnp.sum(weights, axis=1, keepdims=True)
        above = jnp.cumsum(weights, axis=1) - weights
        # The largest, at 0, always stays: it is what the minimum is when nothing else does.
        stays = above < amounts.top_p * total
        edge = jnp.maximum(edge, jnp.min(jnp.where(stays, found, 0.0), axis=1, keepdims=True))
    right = (edge[:, 0] > last) | (last == -jnp.inf)
    return edge, right | (found.shape[1] == values.shape[1])


def edge_of(values: jax.Array, settings: Sampling, amounts: Amounts) -> jax.Array:
    """The smallest logit that stays, ``[B, 1]``, by all of ``values [B, V]``.

    Example:
        >>> v = jnp.log(jnp.array([[0.3, 0.5, 0.2]]))
        >>> settings = Sampling(temperature=1, top_k=1)
        >>> (v >= edge_of(v, settings, settings.amounts)).tolist()
        [[False, True, False]]
    """
    edge = jnp.full((values.shape[0], 1), amounts.least, jnp.float32)
    weights = None
    if 0 < settings.top_k < values.shape[1]:
        limit = jnp.full(edge.shape, settings.top_k, jnp.float32)
        top_k = _halved(values, jnp.ones_like(values), limit)
        weights = jnp.where(values >= top_k, jnp.exp(values), 0.0)
        edge = jnp.maximum(edge, top_k)
    if settings.top_p < 1:
        weights = jnp.exp(values) if weights is None else weights
        limit = amounts.top_p * jnp.sum(weights, axis=1, keepdims=True)
        edge = jnp.maximum(edge, _halved(values, weights, limit))
    return edge


def _halved(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The smallest number of which all above weigh less than the limit together, ``[B, 1]``."""

    # The shift makes every value at most 0; floats of one sign are in the order of their bits.
    def number(bits: jax.Array) -> jax.Array:
        return -jax.lax.bitcast_convert_type(bits, jnp.float32)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        above = jnp.sum(jnp.where(values > number(middle), weights, 0.0), axis=1, keepdims=True)
        light = above < limit
        return jnp.where(light, middle, low), jnp.where(light, high, middle - 1)

    # The largest value, at distance 0, has nothing above it: it always stays.
    bounds = jnp.zeros(limit.shape, jnp.int32), jnp.full(limit.shape, _INFINITY, jnp.int32)
    low, _ = jax.lax.fori_loop(0, _HALVINGS, halve, bounds)
    return number(low)
