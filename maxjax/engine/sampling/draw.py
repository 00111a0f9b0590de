"""Sampling of the next token of each row: pure functions of logits and a random key, for jit.

They use the Gumbel-max trick: add to each logit a random number that is a function of the key, the
row, the position and the token id, and take the argmax. So the sample depends neither on the other
rows of the batch nor on the sharding of the vocabulary.

Top-k, top-p and min-p are one threshold per row: the smallest logit that is kept. Nothing here sorts the
vocabulary. The threshold is found among the few largest logits where they suffice, and otherwise by
bisection: a filter keeps a logit if the logits above it are together fewer than k, or less probable than
p. All values are shifted so that the largest of a row is 0, and divided by the temperature.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...kernels.tpu.mosaic import LANES
from .filters import RareFilters, bisected, near_the_top, rarely_kept


class Sampled(NamedTuple):
    """The sampled token of each row of a batch. A pytree.

    Attributes:
        tokens: the token ids, int32 ``[B]``; 0 where ``valid`` is False.
        valid: False for a row that has a NaN or plus infinity, or no token left to choose.
        logprobs: the log-probabilities of the sampled tokens, float32 ``[B]``, or None if they were
            not requested. They belong to the model's own distribution, before bias, penalties,
            bans, temperature and filters, as vLLM and the OpenAI API report them.
        top_tokens, top_logprobs: the n most probable tokens of the same distribution, most probable
            first, int32 and float32 ``[B, n]``, or None.
        is_near_tie: whether rounding may decide between the token and the second best, bool ``[B]``; None where that
            is not computed.
    """

    tokens: jax.Array
    valid: jax.Array
    logprobs: jax.Array | None = None
    top_tokens: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    is_near_tie: jax.Array | None = None


class Chosen(NamedTuple):
    """The tokens with the best scores, int32 ``[B]``, and by how much they lead the second best, float32 ``[B]``."""

    tokens: jax.Array
    lead: jax.Array


# --- choosing -------------------------------------------------------------------------------


def first_equal(values: jax.Array, top: jax.Array, columns: jax.Array) -> jax.Array:
    """The smallest column that has the top value: argmax, but many times as fast."""
    none = jnp.iinfo(jnp.int32).max
    return jnp.min(jnp.where(values == top, columns, none), axis=1)


def columns_of(values: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)


def best_of(values: jax.Array, top: jax.Array, columns: jax.Array) -> Chosen:
    """The tokens ``columns`` ``[B, N]`` with the top values, and their lead: 0 if two have the same.

    Example:
        >>> v = jnp.array([[1.0, 4.0, 3.5]])
        >>> [a.tolist() for a in best_of(v, v.max(axis=1, keepdims=True), columns_of(v))]
        [[1], [0.5]]
    """
    tokens = first_equal(values, top, columns)
    others = jnp.where(columns == tokens[:, None], -jnp.inf, values)
    return Chosen(tokens, top[:, 0] - jnp.max(others, axis=1))


def _gumbel_argmax(values: jax.Array, columns: jax.Array, keys: jax.Array) -> Chosen:
    scores = values + _gumbel(keys, columns)
    return best_of(scores, jnp.max(scores, axis=1, keepdims=True), columns)


def _drawn_of_candidates(
    values: jax.Array, keys: jax.Array, top_k: Any, top_p: Any, least: Any
) -> Chosen:
    """The tokens drawn among the largest logits if these have all that is kept, else among all."""

    def from_all() -> Chosen:
        threshold = threshold_of(values, top_k, top_p, least)
        return _gumbel_argmax(_kept(values, threshold), columns_of(values), keys)

    found, tokens = largest(values, min(CANDIDATES, values.shape[1]))
    threshold, exact = threshold_among(found, values, top_k, top_p, least)

    def from_few() -> Chosen:
        return _gumbel_argmax(_kept(found, threshold), tokens, keys)

    return jax.lax.cond(jnp.all(exact), from_few, from_all)


def _filtered(
    values: jax.Array, usual: tuple[Any, Any, Any], rare: RareFilters, chance: Any
) -> jax.Array:
    """The values with -inf for what any filter excludes; XTC where ``chance`` is at most its probability."""
    values = near_the_top(values, rare.top_n_sigma)
    return rarely_kept(_kept(values, threshold_of(values, *usual)), rare, chance)


def _drawn_of_all(
    values: jax.Array, keys: jax.Array, usual: tuple[Any, Any, Any], rare: RareFilters
) -> Chosen:
    """The tokens drawn where some filter needs all of the values."""
    chance = _uniform(_words(keys, jnp.full((keys.shape[0], 1), _XTC, jnp.uint32)))
    return _gumbel_argmax(_filtered(values, usual, rare, chance), columns_of(values), keys)


def choose_drawn(
    values: jax.Array,
    keys: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    least: jax.Array,
    rare: RareFilters | None = None,
) -> Chosen:
    """The tokens drawn from ``values`` ``[B, V]``, where each row has its own filters, arrays ``[B, 1]``.

    Args:
        values: logits divided by the temperature, of which the largest of a row is 0.
        keys: the key of each row at its position, uint32 ``[B, 2]``.
        top_k, top_p, least: as for :func:`threshold_of`; V, 1 and -inf are off.
        rare: the other filters; None if there are none.
    """
    width = values.shape[1]
    is_filtered = (top_k < width) | (top_p < 1) | (least > -jnp.inf)

    def filtered() -> Chosen:
        return _drawn_of_candidates(values, keys, top_k, top_p, least)

    def plain() -> Chosen:
        return _gumbel_argmax(values, columns_of(values), keys)

    if rare is None:
        return jax.lax.cond(jnp.any(is_filtered), filtered, plain)

    def rarely() -> Chosen:
        return _drawn_of_all(values, keys, (top_k, top_p, least), rare)

    which = jnp.where(jnp.any(rare.is_used), 2, jnp.any(is_filtered).astype(jnp.int32))
    return jax.lax.switch(which, [plain, filtered, rarely])


def _kept(values: jax.Array, threshold: jax.Array) -> jax.Array:
    return jnp.where(values >= threshold, values, -jnp.inf)


def scaled(values: jax.Array, top: jax.Array, temperature: Any) -> jax.Array:
    """Values minus their largest, divided by the temperature: at most 0, so that none overflows."""
    return (values - jnp.where(jnp.isfinite(top), top, 0.0)) / temperature


def top_logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> list[jax.Array]:
    """The log-probabilities ``[B]`` of tokens, and the ``count`` most probable tokens with theirs, ``[B, count]``.

    Example:
        >>> logits = jnp.log(jnp.array([[0.25, 0.75]]))
        >>> [a.round(2).tolist() for a in top_logprobs(logits, jnp.array([0]), 1)]
        [[-1.38...], [[1]], [[-0.28...]]]
    """
    values = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(values, axis=1, keepdims=True)
    chosen = jnp.take_along_axis(values, tokens[:, None], axis=1) - total
    found, top_tokens = largest(values, count)
    return [chosen[:, 0], top_tokens, found - total]


# --- randomness -----------------------------------------------------------------------------


def row_keys(words: jax.Array, numbers: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the key of each row at its position, as words uint32 ``[B, 2]``.

    Args:
        words: words of the key of each row's request, uint32 ``[B, 2]``.
        numbers: the number of each row's text among those with this key, int32 ``[B]``.
        positions: the position of the new token in its text, int32 ``[B]``.

    Example:
        >>> zeros = jnp.zeros(1, jnp.int32)
        >>> row_keys(jnp.zeros((1, 2), jnp.uint32), zeros, zeros).shape
        (1, 2)
    """
    # Always threefry: with other generators the bits of a row depend on the array's full shape.
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    for one in (numbers, positions):
        keys = jax.vmap(jax.random.fold_in)(keys, one)
    return jax.random.key_data(keys)


def _gumbel(words: jax.Array, tokens: jax.Array) -> jax.Array:
    """Standard Gumbel noise ``[B, N]``: a function of each row's key and each token's id."""
    return standard_gumbel(_words(words, tokens))


# No token has this id.
_XTC = 2**32 - 1


def _words(words: jax.Array, numbers: jax.Array) -> jax.Array:
    """Random bits uint32 ``[B, N]``: a function of each row's key and each number."""
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, numbers)
    # A folded key is itself 64 random bits, so none are drawn from it.
    return jax.random.key_data(folded)[..., 0]


def _uniform(bits: jax.Array) -> jax.Array:
    """Numbers from 0 to 1 of 32 random bits each, never 0; the smallest are dense."""
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-32


def standard_gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise of 32 random bits each, finite for all of them.

    Example:
        >>> f"{standard_gumbel(jnp.uint32(1 << 31)):.4f}"
        '0.3665'
    """
    # The numbers near 0 decide which of many tokens wins, and floats are dense there.
    return -jnp.log(-jnp.log1p(-jnp.minimum(_uniform(bits), 1 - 2.0**-24)))


CANDIDATES = 256
"""So many of the largest logits usually include all that top-p keeps."""

# In a row of at least _WIDE columns, the largest logits are searched in the blocks with the largest
# maxima, which takes about half the time.
_BLOCK, _WIDE = 64, 65536


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest values of each row of ``[B, V]``, descending, and their columns: ``[B, count]``.

    Equal values are in the order of their columns, as with :func:`jax.lax.top_k`.

    Example:
        >>> largest(jnp.array([[1.0, 3.0, 2.0, 3.0]]), 3)[1].tolist()
        [[1, 3, 2]]
    """
    in_blocks = functools.partial(_largest, count=count)
    if values.shape[1] < _WIDE:
        return jax.lax.top_k(values, count)
    # A TPU pads smaller blocks, which then take twice the memory.
    on_tpu = functools.partial(in_blocks, size=LANES)
    return jax.lax.platform_dependent(values, tpu=on_tpu, default=in_blocks)


def _largest(values: jax.Array, count: int, size: int = _BLOCK) -> tuple[jax.Array, jax.Array]:
    batch, width = values.shape
    blocks = -(-width // size)
    if count > blocks // 4:
        found, places = jax.lax.top_k(values, count)
        return found, places
    spare = blocks * size - width
    tiles = jnp.pad(values, ((0, 0), (0, spare)), constant_values=-jnp.inf)
    tiles = tiles.reshape(batch, blocks, size)
    _, chosen = jax.lax.top_k(jnp.max(tiles, axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # keeps equal values in the order of their columns
    candidates = jnp.take_along_axis(tiles, chosen[:, :, None], axis=1).reshape(batch, -1)
    found, places = jax.lax.top_k(candidates, count)
    columns = jnp.take_along_axis(chosen, places // size, axis=1) * size + places % size
    return found, columns


def threshold_among(
    found: jax.Array, values: jax.Array, top_k: Any, top_p: Any, least: Any
) -> tuple[jax.Array, jax.Array]:
    """The threshold found among ``found [B, C]``, the largest of ``values [B, V]``.

    Args:
        top_k, top_p, least: as for :func:`threshold_of`.

    Returns:
        The threshold ``[B, 1]``, and whether it is exact, bool ``[B]``: every logit that is kept is
        in ``found``.

    Example:
        >>> v = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
        >>> threshold, exact = threshold_among(v, v, 3, 0.6, -jnp.inf)
        >>> (v >= threshold).tolist(), exact.tolist()
        ([[True, True, False]], [True])
    """
    # Never a slice of ``found``: XLA would merge it with the slice inside top_k, no longer
    # recognise top_k, and sort the whole vocabulary.
    last = jnp.min(found, axis=1)
    has_k = jnp.asarray(top_k) < values.shape[1]
    rank = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
    kth = jnp.min(jnp.where(rank < top_k, found, 0.0), axis=1, keepdims=True)
    kth = jnp.where(has_k, kth, -jnp.inf)
    threshold = jnp.broadcast_to(jnp.asarray(least, jnp.float32), (found.shape[0], 1))
    threshold = jnp.maximum(threshold, kth)
    # Top-p applies to the result of top-k; min-p comes after it.
    weights = jnp.exp(found)
    total = jnp.sum(jnp.exp(values), axis=1, keepdims=True)
    weights = jnp.where(found >= kth, weights, 0.0)
    total = jnp.where(has_k, jnp.sum(weights, axis=1, keepdims=True), total)
    above = jnp.cumsum(weights, axis=1) - weights
    # The largest value, 0, is always kept: it is the minimum if nothing else is.
    stays = above < top_p * total
    nucleus = jnp.min(jnp.where(stays, found, 0.0), axis=1, keepdims=True)
    threshold = jnp.maximum(threshold, jnp.where(jnp.asarray(top_p) < 1, nucleus, -jnp.inf))
    exact = (threshold[:, 0] > last) | (last == -jnp.inf)
    return threshold, exact | (found.shape[1] == values.shape[1])


def threshold_of(values: jax.Array, top_k: Any, top_p: Any, least: Any) -> jax.Array:
    """The threshold ``[B, 1]``, found by bisection over all of ``values [B, V]``.

    Args:
        values: logits divided by the temperature, of which the largest of a row is 0.
        top_k, top_p: numbers or arrays ``[B, 1]``; V and 1 are off.
        least: the smallest logit that is kept.

    Example:
        >>> v = jnp.log(jnp.array([[0.3, 0.5, 0.2]]))
        >>> (v >= threshold_of(v - v.max(), 1, 1.0, -jnp.inf) + v.max()).tolist()
        [[False, True, False]]
    """
    threshold = jnp.broadcast_to(jnp.asarray(least, jnp.float32), (values.shape[0], 1))
    weights = jnp.exp(values)
    limit = jnp.broadcast_to(jnp.asarray(top_k, jnp.float32), threshold.shape)
    kth = bisected(values, jnp.ones_like(values), limit)
    kth = jnp.where(limit < values.shape[1], kth, -jnp.inf)
    weights = jnp.where(values >= kth, weights, 0.0)
    threshold = jnp.maximum(threshold, kth)
    limit = top_p * jnp.sum(weights, axis=1, keepdims=True)
    nucleus = bisected(values, weights, limit)
    return jnp.maximum(threshold, jnp.where(jnp.asarray(top_p) < 1, nucleus, -jnp.inf))
