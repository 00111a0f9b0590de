"""The causal convolution over tokens, channel by channel, that precedes a recurrent state.

Shapes: B sequences, T tokens, C channels, K taps of the kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.split import REPLICATED
from ...graph.weight.weight import Weight
from ..layer import Module


class CausalConv(Module):
    """A causal convolution of each channel, whose weight ``[C, 1, K]`` has PyTorch's shape.

    Args:
        channels, taps: numbers C of channels and K of taps.
        dtype: dtype of the weights.
        has_bias: whether there is a bias ``[C]``.

    Example:
        >>> [(name, *map(int, w.shape)) for name, w in CausalConv(6, 4, has_bias=True).raw_state_dict().items()]
        [('weight', 6, 1, 4), ('bias', 6)]
    """

    def __init__(
        self, channels: int, taps: int, dtype: Any = DType.float32, has_bias: bool = False
    ):
        super().__init__()
        self.weight = Weight("weight", dtype, (channels, 1, taps), DeviceRef.CPU())
        self.bias = Weight("bias", dtype, (channels,), DeviceRef.CPU()) if has_bias else None

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the weights, which are small."""
        return {"weight": REPLICATED} | ({} if self.bias is None else {"bias": REPLICATED})

    def __call__(
        self, x: jax.Array, state: jax.Array | None = None, counts: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """:func:`causal_conv` with these weights."""
        bias = None if self.bias is None else jnp.asarray(self.bias)
        return causal_conv(x, jnp.asarray(self.weight)[:, 0], bias, state, counts)


def causal_conv(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: jax.Array | None,
    counts: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """``y[t] = bias + Σ_k weight[:, k] · x[t - K + 1 + k]``, and the state for the tokens that follow.

    Args:
        x: inputs ``[B, T, C]``.
        weight: kernel ``[C, K]``; its last tap multiplies the token itself.
        bias: bias ``[C]``, or None.
        state: the K - 1 inputs before ``x``, ``[B, K - 1, C]``; None means zeros.
        counts: number of tokens of each row that are not padding, ``[B]``; None means all.

    Returns:
        ``y [B, T, C]`` in float32 or wider, and the state: the last K - 1 inputs that are not padding.

    Example:
        >>> x = jnp.arange(1.0, 4.0)[None, :, None]
        >>> y, state = causal_conv(x, jnp.ones((1, 3)), None, None, jnp.array([2]))
        >>> y[0, :, 0].tolist(), state[0, :, 0].tolist()
        ([1.0, 3.0, 6.0], [1.0, 2.0])
    """
    batch, length, channels = x.shape
    taps = weight.shape[1]
    if state is None:
        before = jnp.zeros((batch, taps - 1, channels), x.dtype)
    else:
        before = state.astype(x.dtype)
    padded = jnp.concatenate([before, x], axis=1)  # [B, K - 1 + T, C]
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
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
    return y, last
