"""Attention with linear biases (ALiBi): a score has a bias in proportion to the distance of query and key.

Source: O. Press et al., arXiv:2108.12409.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def checked_slopes(slopes: Any, heads: int) -> jax.Array | None:
    """The slopes as an array ``[H]``; None stays None.

    Raises:
        ValueError: they have another shape.
    """
    if slopes is None:
        return None
    slopes = jnp.asarray(slopes)
    if slopes.shape != (heads,):
        raise ValueError(
            f"slopes must have the shape ({heads},), a number for each query head, not {slopes.shape}"
        )
    return slopes


def bias_of_distance(
    slopes: jax.Array, positions: jax.Array, key_positions: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """The biases ``slope · (key position - query position)`` of scores, ``[B or 1, H, T, S]``.

    Args:
        slopes: a number for each query head, ``[H]``.
        positions: position of each query, integers ``[B or 1, T]``.
        key_positions: position of each key, integers ``[B or 1, S]``.
        dtype: dtype of the biases.

    Example:
        >>> at = jnp.arange(3)[None]
        >>> bias_of_distance(jnp.array([0.5]), at, at)[0, 0].tolist()
        [[0.0, 0.5, 1.0], [-0.5, 0.0, 0.5], [-1.0, -0.5, 0.0]]
    """
    distance = key_positions[:, None, :] - positions[:, :, None]  # [B or 1, T, S]
    return slopes.astype(dtype)[None, :, None, None] * distance[:, None].astype(dtype)
