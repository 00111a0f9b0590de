"""``unit_rms``: normalisation by the root mean square, without a weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """Return ``x / √(mean(x²) + eps)`` over the last axis, in the dtype of ``x`` (arXiv:1910.07467).

    Example:
        >>> unit_rms(jnp.array([0.0, 4.0, 0.0, 0.0]), 0.0).tolist()
        [0.0, 2.0, 0.0, 0.0]
    """
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
