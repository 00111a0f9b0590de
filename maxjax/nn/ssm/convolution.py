"""The causal convolution over tokens, channel by channel, that precedes a recurrent state.

Shapes: B sequences, T tokens, C channels, K taps of the kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def causal_conv(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: jax.Array | None,
    counts: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """``y[t] = bias + Σ_k weight[:, k] · x[t - K + 1 + k]``, and the last inputs for what follows.

    Args:
        x: inputs ``[B, T, C]``.
        weight: ``[C, K]``; the last tap is the token itself.
        bias: ``[C]`` or None.
        state: the K - 1 inputs before these, ``[B, C, K - 1]``; None: zeros.
        counts: number of real tokens in each row, ``[B]``; the rest is padding. None: all are real.

    Returns:
        ``[B, T, C]`` in float32 or wider, and the state after the real tokens.

    Example:
        >>> x = jnp.arange(1.0, 4.0)[None, :, None]
        >>> y, state = causal_conv(x, jnp.ones((1, 3)), None, None, jnp.array([2]))
        >>> y[0, :, 0].tolist(), state[0, 0].tolist()
        ([1.0, 3.0, 6.0], [1.0, 2.0])
    """
    batch, length, channels = x.shape
    taps = weight.shape[1]
    if state is None:
        before = jnp.zeros((batch, taps - 1, channels), x.dtype)
    else:
        before = state.astype(x.dtype).swapaxes(1, 2)
    padded = jnp.concatenate([before, x], axis=1)  # [B, K - 1 + T, C]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.zeros((batch, length, channels), wide)
    for k in range(taps):
        y = y + padded[:, k : k + length].astype(wide) * weight[:, k].astype(wide)[None, None]
    if bias is not None:
        y = y + bias.astype(wide)[None, None]
    if counts is None:
        last = padded[:, length:]
    else:
        at = counts[:, None] + jnp.arange(taps - 1, dtype=counts.dtype)[None]
        last = jnp.take_along_axis(padded, at[..., None], axis=1)
    return y, last.swapaxes(1, 2)
