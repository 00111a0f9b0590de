"""Attention sinks: scores that take part in a softmax and have no value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def checked_sinks(sinks: Any, heads: int) -> jax.Array:
    """The sinks as an array ``[H]``, or ``[0]`` for None.

    Raises:
        ValueError: they have another shape.
    """
    if sinks is None:
        return jnp.zeros(0, jnp.float32)
    sinks = jnp.asarray(sinks)
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks must have the shape ({heads},), a score for each query head, not {sinks.shape}"
        )
    return sinks


def with_sinks(out: jax.Array, sums: jax.Array, sinks: jax.Array) -> jax.Array:
    """Attention to keys and a sink, from attention to the keys alone.

    Args:
        out: the result of attention to the keys alone, ``[..., H, D]``.
        sums: log-sum-exp of each query's scores, ``[..., H]``.
        sinks: for each head a score that takes part in the softmax and has no value (gpt-oss,
            arXiv:2508.10925); its shape broadcasts to that of ``sums``.

    Example:
        >>> with_sinks(jnp.ones((1, 2, 4)), jnp.zeros((1, 2)), jnp.zeros(2))[0, 0, 0].item()
        0.5
    """
    scores = jnp.broadcast_to(sinks.astype(sums.dtype), sums.shape)
    kept = jax.nn.sigmoid(sums - scores)
    return (out.astype(sums.dtype) * kept[..., None]).astype(out.dtype)
