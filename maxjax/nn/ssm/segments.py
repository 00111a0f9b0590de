"""Chunks of tokens and the decay within them, for recurrences that are computed in chunks.

Shapes: C tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def chunked(length: int, most: int, block: int = 1) -> tuple[int, int]:
    """The number of chunks of a text, and of tokens in each: at most ``most``, and a multiple of ``block``.

    A length that is known only when an exported program runs gets chunks of ``most`` tokens.

    Example:
        >>> chunked(5, 64, 16), chunked(130, 64), chunked(0, 64)
        ((1, 16), (3, 64), (0, 1))
    """
    known = isinstance(length, int)
    size = (min(most, -(-length // block) * block) or block) if known else most
    return -(-length // size), size


def in_chunks(array: jax.Array, count: int, size: int) -> jax.Array:
    """``[B, T, H, ...]`` → ``[count, B, H, size, ...]`` in float32, with zeros after the last token.

    Example:
        >>> in_chunks(jnp.arange(1.0, 4.0).reshape(1, 3, 1, 1), 2, 2)[..., 0].tolist()
        [[[[1.0, 2.0]]], [[[3.0, 0.0]]]]
    """
    pads = ((0, 0), (0, count * size - array.shape[1]), (0, 0), (0, 0))
    array = jnp.pad(array.astype(jnp.float32), pads)
    return array.reshape(array.shape[0], count, size, *array.shape[2:]).transpose(1, 0, 3, 2, 4)


def joined(chunks: jax.Array, length: int) -> jax.Array:
    """``[n, B, H, C, D]`` → ``[B, length, H, D]``, the inverse of :func:`in_chunks`."""
    count, batch, heads, size, width = chunks.shape
    tokens = chunks.transpose(1, 0, 3, 2, 4).reshape(batch, count * size, heads, width)
    return tokens[:, :length]


def segment_sums(g: jax.Array) -> jax.Array:
    """``[..., C]`` → ``[..., C, C]``: at i, j the sum of ``g[j + 1 … i]``; -inf where j > i.

    Each column has its own cumulative sum: differences of one cumulative sum would lose digits where g is large.
    Source: "segsum" of arXiv:2405.21060.

    Example:
        >>> segment_sums(jnp.array([1.0, 2.0, 3.0])).tolist()
        [[0.0, -inf, -inf], [2.0, 0.0, -inf], [5.0, 3.0, 0.0]]
    """
    size = g.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    sums = jnp.cumsum(jnp.where(jnp.tril(lower, -1), g[..., None], 0), axis=-2)
    return jnp.where(lower, sums, -jnp.inf)
