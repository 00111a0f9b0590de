"""Bidirectional attention, to all tokens or to those in a window around each token.

Shapes: B sequences, T tokens, H heads of width D.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..layer import is_tapped
from .tapped_attention import tapped_attention

# Sequences longer than this number of windows are computed in blocks, which attend only to neighbouring blocks.
_BLOCKS = 4


def both_ways(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    window: int | None = None,
    **options: Any,
) -> jax.Array:
    """Attention of each token to all tokens, earlier and later ones, or to those at most ``window`` away.

    Args:
        q, k, v: queries, keys and values ``[B, T, H, D]``; keys and values may have fewer heads.
        mask: booleans, True = attend: ``[B, T]`` for keys that are not padding, or ``[B, T, T]``; None masks nothing.
        window: largest distance of tokens that attend to each other; None means no limit.
        options: further arguments of ``kernels.attention.attention``.

    Returns:
        ``[B, T, H, D]``. With a window, memory is linear in the number of tokens.

    Example:
        >>> x = jnp.ones((1, 9, 2, 4))
        >>> both_ways(x, x, x, window=1).shape
        (1, 9, 2, 4)
    """
    length = q.shape[1]
    if window is None or window >= length:
        return tapped_attention(q, k, v, mask, **options)
    has_blocks = (mask is None or mask.ndim == 2) and options.get("bias") is None
    if window and length > _BLOCKS * window and has_blocks and not is_tapped("weights"):
        return _in_blocks(q, k, v, mask, window, options)
    at = jnp.arange(length, dtype=jnp.int32)
    near = (jnp.abs(at[:, None] - at[None, :]) <= window)[None]  # [1, T, T]
    if mask is not None:
        near = near & (mask[:, None, :] if mask.ndim == 2 else mask)
    return tapped_attention(q, k, v, near[:, None], **options)


def _in_blocks(q: Any, k: Any, v: Any, mask: Any, window: int, options: dict[str, Any]) -> Any:
    """Attention to tokens at most ``window`` away, in memory that is linear in the number of tokens.

    The tokens are cut into blocks as long as the window, so each token attends within its block and both neighbours.
    """
    batch, length = q.shape[:2]
    count = -(-length // window)
    real = jnp.ones((1, length), bool) if mask is None else mask

    def blocks(a: jax.Array) -> jax.Array:
        """``[B, T, …]`` → ``[B, blocks, window, …]``."""
        pads = [(0, 0), (0, count * window - length), *[(0, 0)] * (a.ndim - 2)]
        return jnp.pad(a, pads).reshape(a.shape[0], count, window, *a.shape[2:])

    def around(a: jax.Array) -> jax.Array:
        """Each block with the one before and the one after it."""
        ends = jnp.pad(a, [(0, 0), (1, 1), *[(0, 0)] * (a.ndim - 2)])
        return jnp.concatenate([ends[:, :-2], a, ends[:, 2:]], axis=2)

    places = jnp.arange(3 * window, dtype=jnp.int32)
    near = jnp.abs(places[None, :] - window - places[:window, None]) <= window
    seen = near[None, None] & around(blocks(real))[:, :, None, :]
    seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:]))
    keys, values = (around(blocks(a)).reshape(-1, 3 * window, *a.shape[2:]) for a in (k, v))
    queries = blocks(q).reshape(-1, window, *q.shape[2:])
    y = tapped_attention(queries, keys, values, seen.reshape(-1, window, 3 * window), **options)
    return y.reshape(batch, count * window, *q.shape[2:])[:, :length]
