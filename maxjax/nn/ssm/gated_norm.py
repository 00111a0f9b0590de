"""``GatedNorm``: the RMSNorm with a gate that follows a recurrence (Mamba 2, gated DeltaNet)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
from ..layer import Module


class GatedNorm(Module):
    """An RMSNorm over groups of features with a gate: ``norm(x · silu(gate))`` or ``norm(x) · silu(gate)``.

    Source: arXiv:2405.21060, arXiv:2412.06464.

    Args:
        width: number of features.
        dtype: dtype of the weights.
        epsilon: number added to the mean square.
        groups: number of groups of features.
        gate_first: whether x is gated before it is normalised, and not after.

    Example:
        >>> norm = GatedNorm(4, DType.float32, 1e-5, groups=2)
        >>> [(name, *map(int, w.shape)) for name, w in norm.raw_state_dict().items()]
        [('weight', 4)]
    """

    def __init__(
        self, width: int, dtype: DType, epsilon: float, groups: int = 1, gate_first: bool = False
    ):
        super().__init__()
        self.groups, self.epsilon, self.gate_first = groups, epsilon, gate_first
        self.weight = Weight("weight", dtype, (width,), DeviceRef.CPU())

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """``[..., width]`` → the same shape, in float32."""
        weight = jnp.asarray(self.weight)
        return gated_norm(x, gate, weight, self.epsilon, self.groups, self.gate_first)


def gated_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, epsilon: float, groups: int = 1,
    gate_first: bool = False,
) -> jax.Array:  # fmt: skip
    """Compute a :class:`GatedNorm` with the weight ``[width]``: ``[..., width]`` → the same shape, in float32.

    Example:
        >>> gated_norm(jnp.ones((1, 2)), jnp.zeros((1, 2)), jnp.ones(2), 1e-5).tolist()
        [[0.0, 0.0]]
    """
    x, gate = x.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
    x = x * gate if gate_first else x
    y = x.reshape(*x.shape[:-1], groups, -1)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    y = y.reshape(x.shape) * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return y if gate_first else y * gate
