"""Attention as architectures write it: :func:`attend`, the masks, and the axis of heads.

Shapes: B sequences, T tokens, H query heads, K KV heads, head width D. One token per sequence has no axis T.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ...nn.layer import tap
from .cache import LayerCache, Mask, scores

C = TypeVar("C", bound=LayerCache)


CAUSAL = Mask()
"""The mask by which a token attends to itself and to all earlier tokens."""


def sliding(window: int) -> Mask:
    """Return the mask by which a token attends to ``window`` tokens: itself and those just before it."""
    return Mask(window)


def chunked(size: int) -> Mask:
    """Return the mask by which a token attends to the tokens before it in its own chunk of ``size`` positions."""
    return Mask(size, chunked=True)


def bidirectional(radius: int | None = None) -> Mask:
    """Return the mask by which a token attends to tokens before and after it, at most ``radius`` away."""
    return Mask(radius, is_causal=False)


def with_blocks(mask: Mask, *, cut: bool = False) -> Mask:
    """Return the mask by which a token of a block, such as a picture, also attends to all other tokens of it.

    Args:
        mask: which other tokens a token attends to.
        cut: whether earlier tokens of the block must be in the mask's window.
    """
    return mask._replace(sees_blocks=True, cuts_blocks=cut)


def attend(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: C,
    mask: Mask = CAUSAL,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    slopes: Any = None,
    chosen: jax.Array | None = None,
    group: str | None = None,
) -> tuple[jax.Array, C]:
    """Compute ``softmax(scale · q kᵀ) v`` for each head, over the tokens of the call and those in the cache.

    Args:
        q: queries ``[B, T, H, D]``, or ``[B, H, D]`` for one token per sequence; after RoPE.
        k, v: keys and values ``[B, T, K, D]`` of the same tokens; H is a multiple of K, and H/K neighbouring
            query heads share one KV head (arXiv:2305.13245). None: the layer attends to what an earlier
            layer wrote to the same ``group``.
        cache: the layer's cache.
        mask: which tokens a token attends to.
        scale: factor of the scores; ``1/√D`` by default.
        soft_cap: cap of the scores, which become ``soft_cap · tanh(score / soft_cap)`` (arXiv:2408.00118).
        sinks: scores ``[H]`` that take part in the softmax and have no value (arXiv:2508.10925).
        slopes: numbers ``[H]``, such as :func:`alibi_slopes`; each times (key position - query position) is
            added to the head's scores, after scale and cap (arXiv:2108.12409).
        chosen: which of the keys that the mask allows a token attends to, bools ``[B, T, S]``, also for one token
            per sequence (T is 1): S is the number of positions of the cache, or T without one. None: all. It is
            for causal masks without a window (:func:`top_keys`).
        group: group of the cache that has the layer's keys and values, if it is not that of the mask.

    Returns:
        The heads' results, in the shape of ``q``, and the cache with the new tokens.

    Raises:
        UserInputError: the mask is not causal and there is a KV cache.
        ValueError: ``chosen`` is given for a mask with a window, or for one that is not causal.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.models.parts import no_cache
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> y, _ = attend(x, x, x, no_cache(3))
        >>> y.shape
        (1, 3, 2, 4)
    """
    if k is not None and v is not None:
        cache = cache.write(k, v)
    y, cache = cache.attend(q, mask, scores(q, scale, soft_cap, sinks, slopes, chosen), group)
    return tap("heads", y), cache


def alibi_slopes(heads: int) -> jax.Array:
    """Return the slopes ``[H]`` of ALiBi, attention with linear biases, for :func:`attend`.

    For a power of two they are ``2^(-8 i / H)`` for i from 1 to H. For another number they are those of the next
    smaller power of two, and then every second of those of the next larger one, from the first on.

    Source: arXiv:2108.12409 and its code.

    Args:
        heads: H.

    Example:
        >>> alibi_slopes(6).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * i / power for i in range(1, power + 1)]
    exponents += [4 * i / power for i in range(1, 2 * (heads - power), 2)]
    return jnp.asarray(np.exp2(-np.asarray(exponents)), jnp.float32)


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Return ``[..., heads · D]`` as ``[..., heads, D]``.

    Example:
        >>> import jax.numpy as jnp
        >>> split_heads(jnp.ones((2, 6)), 3).shape
        (2, 2, 3)
    """
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


def merge_heads(x: jax.Array) -> jax.Array:
    """Return ``[..., heads, D]`` as ``[..., heads · D]``."""
    return x.reshape(*x.shape[:-2], -1)


def split_groups(
    x: jax.Array, heads: int, kv_heads: int, head_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries ``[..., H, D]``, keys and values ``[..., K, D]`` of one linear layer's outputs.

    The outputs ``[..., K · (H/K + 2) · D]`` have a group for each KV head: its query heads, its key and its value.

    Args:
        x: the outputs.
        heads, kv_heads, head_dim: H, K and D.

    Example:
        >>> import jax.numpy as jnp
        >>> q, k, v = split_groups(jnp.arange(8), heads=4, kv_heads=2, head_dim=1)
        >>> q[:, 0].tolist(), k[:, 0].tolist(), v[:, 0].tolist()
        ([0, 1, 4, 5], [2, 6], [3, 7])
    """
    x = x.reshape(*x.shape[:-1], kv_heads, heads // kv_heads + 2, head_dim)
    q = x[..., :-2, :]  # [..., K, H/K, D]
    return q.reshape(*q.shape[:-3], heads, head_dim), x[..., -2, :], x[..., -1, :]


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return ``cap · tanh(x / cap)``, which is near ``x`` where that is small and within ± ``cap``; None: ``x`` itself.

    Source: arXiv:2408.00118.

    Example:
        >>> import jax.numpy as jnp
        >>> soft_cap(jnp.array([0.0, 100.0]), 2.0).tolist()
        [0.0, 2.0]
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
