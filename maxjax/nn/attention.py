"""Floor 4. Attention: every query looks at the keys its mask allows.

Below: jnp. Above: the attention layers of the model families, which project their
inputs and call :func:`attention`.

Shapes: B sequences, T queries, S keys, H heads of width D.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType


def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    scale: float | None = None,
    softmax_dtype: Any = DType.float32,
) -> jax.Array:
    """``softmax(scale · q kᵀ) v`` for each head by itself.

    Args:
        query: ``[B, T, H, D]``.
        key, value: ``[B, S, H, D]``.
        mask: Booleans, True = attend: ``[B, S]`` (which keys are there),
            ``[B, T, S]``, or ``[B, H or 1, T or 1, S]``. None: everybody sees everything.
        scale: ``1/√D`` by default.
        softmax_dtype: What scores and softmax are computed in.

    Returns:
        ``[B, T, H, D]`` in the dtype of ``value``. A query whose keys are all masked
        gets the mean of all values: finite, and of no meaning.

    Raises:
        ValueError: Shapes that do not fit together.
        TypeError: A mask that is not boolean (0 and 1 could mean either thing).

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> attention(x, x, x, jnp.array([[True, True, False]])).shape
        (1, 3, 2, 4)
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check(query, key, value)
    dtype = DType.of(softmax_dtype).np
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # Heads first, then products over whole matrices, then the division, of D numbers for each
    # query and not of S: on a CPU 2 to 4 times faster than the obvious einsums and softmax.
    q, k, v = (jnp.transpose(a, (0, 2, 1, 3)) for a in (query, key, value))  # [B, H, T or S, D]
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=dtype) * scale
    if mask is not None:
        # Not -inf: a row with nothing to see would become NaN.
        scores = jnp.where(_mask_4d(mask, scores.shape), scores, jnp.finfo(dtype).min)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - largest)  # [B, H, T, S]
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum(
        "bhts,bhsd->bhtd", weights.astype(value.dtype), v, preferred_element_type=dtype
    )
    return jnp.transpose((mixed / total).astype(value.dtype), (0, 2, 1, 3))


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = (query.shape, key.shape, value.shape)
    fits = (
        all(len(shape) == 4 for shape in shapes)
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[2:] == key.shape[2:]
    )
    if not fits:
        raise ValueError(
            "attention takes query [B, T, H, D] and key and value [B, S, H, D], "
            f"not {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


def _mask_4d(mask: Any, scores: tuple[int, ...]) -> jax.Array:
    """The mask with axes for heads and queries, ready to be broadcast to ``[B, H, T, S]``."""
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"a mask is boolean, True = attend; this one is {mask.dtype}")
    shape = mask.shape
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    elif mask.ndim == 3:
        mask = mask[:, None, :, :]
    if mask.ndim != 4 or any(m not in (1, s) for m, s in zip(mask.shape, scores, strict=True)):
        raise ValueError(
            f"a mask of shape {shape} does not fit scores of shape [B, H, T, S] = {scores}: "
            "it is [B, S], [B, T, S] or [B, H or 1, T or 1, S]"
        )
    return mask
