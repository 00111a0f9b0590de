"""The lightning indexer: a token attends only to the keys that small heads of their own give the highest scores.

Source: DeepSeek-V3.2-Exp (DeepSeek Sparse Attention), arXiv:2512.02556.

Shapes: B sequences, T tokens, S keys, H heads of the indexer, head width D. One token per sequence has no axis T.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...kernels import explicit
from ...kernels.attention import MOST_SCORES, in_query_blocks
from .cache import LayerCache


def top_keys(
    q: jax.Array, k: jax.Array, weights: jax.Array, count: int, cache: LayerCache
) -> jax.Array | None:
    """Return which keys each token attends to: those ``count`` before it with the highest ``Σ weight · relu(q · k)``.

    Args:
        q: queries of the indexer ``[B, T, H, D]``, or ``[B, H, D]``.
        k: keys of the indexer ``[B, S, D]``: of the tokens at the positions from 0 on (``cache.remember``).
        weights: weight of each head's scores ``[B, T, H]``, or ``[B, H]``.
        count: number of keys.
        cache: the layer's cache, for the positions of the tokens.

    Returns:
        bools ``[B, T, S]``, for ``chosen`` of :func:`~maxjax.models.parts.attend`; None if there are at most
        ``count`` keys, to all of which a token may attend. Of keys with equal scores, the first are chosen.

    Example:
        >>> from maxjax.models.parts import no_cache
        >>> k = jnp.array([[[1.0], [3.0], [2.0]]])
        >>> top_keys(jnp.ones((1, 3, 1, 1)), k, jnp.ones((1, 3, 1)), 2, no_cache(3))[0].tolist()
        [[True, True, False], [True, True, False], [False, True, True]]
    """
    if k.shape[1] <= count:
        return None
    if q.ndim == 3:
        q, weights = q[:, None], weights[:, None]
    positions = cache.context.rows_of_positions

    def run(q: jax.Array, weights: jax.Array, positions: jax.Array, k: jax.Array) -> jax.Array:
        keys = k.astype(jnp.float32)

        def block(q: jax.Array, weights: jax.Array, positions: jax.Array) -> jax.Array:
            scores = jnp.einsum("bthd,bsd->bths", q.astype(jnp.float32), keys)
            scores = jnp.einsum("bth,bths->bts", weights.astype(jnp.float32), jax.nn.relu(scores))
            sees = jnp.arange(keys.shape[1])[None, None, :] <= positions[:, :, None]
            found = jax.lax.top_k(jnp.where(sees, scores, -jnp.inf), count)[1]  # [B, T, count]
            rows, tokens = (jnp.arange(n, dtype=found.dtype) for n in found.shape[:2])
            chosen = jnp.zeros(scores.shape, bool)
            return chosen.at[rows[:, None, None], tokens[None, :, None], found].set(True)

        of_token = q.shape[0] * q.shape[2] * keys.shape[1]
        return in_query_blocks(block, (q, weights, positions), MOST_SCORES // of_token)

    rows, tokens, *_ = explicit.entries(q)
    run = explicit.automatic(run, explicit.mesh_of(q, k), [rows, tokens, ()])
    return run(q, weights, positions, k)
