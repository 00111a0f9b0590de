"""Normalisation ops, which take their weights as arguments. The sums are taken in float32.

The result has the dtype of the input, not that of the weights.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .lift import array, floating, lift, rounded, same, wide


@lift
def layer_norm(input: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    """``(x - mean) / √(variance + epsilon) · gamma + beta`` over the last axis.

    Args:
        gamma, beta: vectors of the length of the last axis.

    Raises:
        ValueError: they have another length; the message has both.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.layer_norm(jnp.array([[1.0, 5.0]]), jnp.ones(2), jnp.zeros(2), 0.0))
        [[-1.  1.]]
    """
    x = floating(input, "layer_norm")
    scale, shift = (_broadcastable(w, x, name) for w, name in ((gamma, "gamma"), (beta, "beta")))
    y = _normalised(wide(x), -1, epsilon)
    return rounded(y * rounded(scale, y.dtype) + rounded(shift, y.dtype), x.dtype)


@lift
def rms_norm(
    input: Any,
    weight: Any,
    epsilon: float,
    weight_offset: float = 0.0,
    multiply_before_cast: bool = False,
) -> Any:
    """``x / √(mean(x²) + epsilon) · (weight + weight_offset)`` over the last axis.

    Args:
        weight: vector of the length of the last axis.
        multiply_before_cast: whether to multiply by the weight in float32 and then cast to the dtype of
            the input. Otherwise the cast comes first, as in Llama.

    Raises:
        ValueError: the weight has another length.
    """
    x = floating(input, "rms_norm")
    scale = _broadcastable(weight, x, "the weight")
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    if not multiply_before_cast:
        y = rounded(y, x.dtype)
    return rounded(y * (rounded(scale, y.dtype) + weight_offset), x.dtype)


@lift
def group_norm(input: Any, gamma: Any, beta: Any, num_groups: int, epsilon: float) -> Any:
    """Normalises each group of channels to mean 0 and variance 1, then applies ``· gamma + beta``.

    Args:
        input: ``[N, C, ...]``.
        gamma, beta: ``[C]``.
        num_groups: number of groups, which must divide ``C``.

    Raises:
        ValueError: it does not divide ``C``, or the shape of gamma or beta is not ``[C]``.
    """
    x = floating(input, "group_norm")
    channels = x.shape[1] if x.ndim > 1 else 0
    if x.ndim < 2 or not same(channels % num_groups, 0):
        raise ValueError(
            f"group_norm: {num_groups} groups do not divide the channels of [N, C, ...] = {x.shape}"
        )
    shape = (1, channels) + (1,) * (x.ndim - 2)
    weights = []
    for w, name in ((array(gamma), "gamma"), (array(beta), "beta")):
        if w.ndim != 1 or not same(w.shape[0], channels):
            raise ValueError(
                f"group_norm: {name} has shape {w.shape}, but there are {channels} channels"
            )
        weights.append(w.reshape(shape))
    grouped = wide(x).reshape(
        (x.shape[0], num_groups, channels // num_groups * math.prod(x.shape[2:]))
    )
    y = _normalised(grouped, -1, epsilon).reshape(x.shape)
    return rounded(y * rounded(weights[0], y.dtype) + rounded(weights[1], y.dtype), x.dtype)


def _normalised(x: jax.Array, axis: int, epsilon: float) -> jax.Array:
    centred = x - jnp.mean(x, axis=axis, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=axis, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon)


def _broadcastable(weight: Any, x: jax.Array, name: str) -> jax.Array:
    """A weight for the last axis, with leading axes of length 1."""
    w = array(weight)
    if w.ndim != 1 or not x.ndim or not same(w.shape[0], x.shape[-1]):
        raise ValueError(
            f"{name} has shape {w.shape}, which does not fit the last axis of the input {x.shape}"
        )
    return w.reshape((1,) * (x.ndim - 1) + w.shape)
