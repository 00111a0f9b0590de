"""Rows of floats as int8, with one scale each.

A row x is kept as ``s = max |x| / 127`` and ``n = round(x / s)``; it is then about ``n · s``, no
number further off than ``s / 2``. What caches of keys and values are made of that take half the
memory of bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

HIGHEST = 127


def quantised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Floats ``[..., D]`` → int8 ``[..., D]`` and scales ``[...]`` in float32.

    A row of zeros has the scale 0; one with a NaN or an Inf is no number when it is restored.

    Example:
        >>> numbers, scale = quantised(jnp.array([0.0, -2.54, 1.0]))
        >>> numbers.tolist(), round(float(scale), 4)
        ([0, -127, 50], 0.02)
    """
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / HIGHEST
    ratio = jnp.round(wide / jnp.expand_dims(scale, -1))  # 0 / 0 where all are 0
    return jnp.where(jnp.isfinite(ratio), ratio, 0).astype(jnp.int8), scale


def restored(numbers: jax.Array, scale: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """The floats again, ``[..., D]``.

    Example:
        >>> restored(jnp.array([1, -2], jnp.int8), jnp.float32(0.5)).tolist()
        [0.5, -1.0]
    """
    return (numbers.astype(jnp.float32) * jnp.expand_dims(scale, -1)).astype(dtype)
