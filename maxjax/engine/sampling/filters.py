"""Top-k, top-p and min-p as one threshold per row: the smallest logit that is kept.

Nothing here sorts the vocabulary. The threshold is found among the few largest logits where they
suffice, and otherwise by bisection: a filter keeps a logit if the logits above it are together
fewer than k, or less probable than p.

All values are shifted so that the largest of a row is 0, and divided by the temperature.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .settings import Amounts, Sampling

# This many of the largest logits usually include all that top-p keeps.
_CANDIDATES = 256
# For more candidates than this, bisection is faster than finding the largest logits.
MOST_CANDIDATES = 1024
# In a row of at least _WIDE columns, the largest logits are searched in the blocks with the largest
# maxima, which takes about half the time.
_BLOCK, _WIDE = 64, 65536
# The bits of infinity in float32; bisection over the bits of positive floats takes 31 steps.
_INFINITY, _BISECTIONS = 0x7F800000, 31


def candidate_count(settings: Sampling, width: int) -> int:
    """The number of largest logits among which the threshold is searched first.

    Example:
        >>> candidate_count(Sampling(temperature=1, top_k=50), 32000)
        66
    """
    # A few more than k: the threshold is exact only if the last candidate is below it.
    return min(width, settings.top_k + 16 if settings.top_k else _CANDIDATES)


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest values of each row of ``[B, V]``, descending, and their columns: ``[B, count]``.

    Equal values are in the order of their columns, as with :func:`jax.lax.top_k`.

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
    chosen = jnp.sort(chosen, axis=-1)  # keeps equal values in the order of their columns
    candidates = jnp.take_along_axis(tiles, chosen[:, :, None], axis=1).reshape(batch, -1)
    found, places = jax.lax.top_k(candidates, count)
    columns = jnp.take_along_axis(chosen, places // _BLOCK, axis=1) * _BLOCK + places % _BLOCK
    return found, columns


def threshold_among(
    found: jax.Array, values: jax.Array, settings: Sampling, amounts: Amounts
) -> tuple[jax.Array, jax.Array]:
    """The threshold found among ``found [B, C]``, the largest of ``values [B, V]``.

    Returns:
        The threshold ``[B, 1]``, and whether it is exact, bool ``[B]``: every logit that is kept is
        in ``found``.

    Example:
        >>> v = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
        >>> settings = Sampling(temperature=1, top_p=0.6)
        >>> threshold, exact = threshold_among(v, v, settings, settings.amounts)
        >>> (v >= threshold).tolist(), exact.tolist()
        ([[True, True, False]], [True])
    """
    # Never a slice of ``found``: XLA would merge it with the slice inside top_k, no longer
    # recognise top_k, and sort the whole vocabulary.
    last = jnp.min(found, axis=1)
    threshold = jnp.full((found.shape[0], 1), amounts.least, jnp.float32)
    top_k = min(settings.top_k, values.shape[1])
    kth = None
    if top_k:
        rank = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
        kth = jnp.min(jnp.where(rank < top_k, found, 0.0), axis=1, keepdims=True)
        threshold = jnp.maximum(threshold, kth)
    if settings.top_p < 1:
        # Top-p applies to the result of top-k; min-p comes after it.
        weights = jnp.exp(found)
        total = jnp.sum(jnp.exp(values), axis=1, keepdims=True)
        if kth is not None:
            weights = jnp.where(found >= kth, weights, 0.0)
            total = jnp.sum(weights, axis=1, keepdims=True)
        above = jnp.cumsum(weights, axis=1) - weights
        # The largest value, 0, is always kept: it is the minimum if nothing else is.
        stays = above < amounts.top_p * total
        threshold = jnp.maximum(
            threshold, jnp.min(jnp.where(stays, found, 0.0), axis=1, keepdims=True)
        )
    exact = (threshold[:, 0] > last) | (last == -jnp.inf)
    return threshold, exact | (found.shape[1] == values.shape[1])


def threshold_of(values: jax.Array, settings: Sampling, amounts: Amounts) -> jax.Array:
    """The threshold ``[B, 1]``, found by bisection over all of ``values [B, V]``.

    Example:
        >>> v = jnp.log(jnp.array([[0.3, 0.5, 0.2]]))
        >>> settings = Sampling(temperature=1, top_k=1)
        >>> (v >= threshold_of(v, settings, settings.amounts)).tolist()
        [[False, True, False]]
    """
    threshold = jnp.full((values.shape[0], 1), amounts.least, jnp.float32)
    weights = None
    if 0 < settings.top_k < values.shape[1]:
        limit = jnp.full(threshold.shape, settings.top_k, jnp.float32)
        top_k = _bisected(values, jnp.ones_like(values), limit)
        weights = jnp.where(values >= top_k, jnp.exp(values), 0.0)
        threshold = jnp.maximum(threshold, top_k)
    if settings.top_p < 1:
        weights = jnp.exp(values) if weights is None else weights
        limit = amounts.top_p * jnp.sum(weights, axis=1, keepdims=True)
        threshold = jnp.maximum(threshold, _bisected(values, weights, limit))
    return threshold


def _bisected(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The smallest number for which the weights of all larger values sum to less than ``limit``."""

    # Every value is at most 0, and floats of one sign are in the order of their bits.
    def number(bits: jax.Array) -> jax.Array:
        return -jax.lax.bitcast_convert_type(bits, jnp.float32)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        above = jnp.sum(jnp.where(values > number(middle), weights, 0.0), axis=1, keepdims=True)
        light = above < limit
        return jnp.where(light, middle, low), jnp.where(light, high, middle - 1)

    # The largest value, 0, has nothing above it, so it is always kept.
    bounds = jnp.zeros(limit.shape, jnp.int32), jnp.full(limit.shape, _INFINITY, jnp.int32)
    low, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, bounds)
    return number(low)
