"""AltUp: several hidden states, of which a layer computes one; and LAuReL: learned residuals.

Shapes: A hidden states of B sequences with T tokens and hidden size E.

Sources: AltUp, arXiv:2301.13310; LAuReL, arXiv:2411.07501; transformers' ``modeling_gemma3n``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.specs import Split
from ...graph.placement.strategy import ShardingStrategy
from ...graph.weight.weight import Weight
from ...nn.layer import Module
from ...nn.linear import Linear
from .norm import norm

# Lower bound of the mean square by which a hidden state is rescaled.
_LEAST = 1e-5


class Laurel(Module):
    """A learned residual of low rank: ``x + norm(right(left(x)))``."""

    def __init__(self, config: Any, dtype: DType):
        super().__init__()
        size, rank, cpu = config.hidden_size, config.laurel_rank, DeviceRef.CPU()
        self.linear_left = Linear(size, rank, dtype, cpu)
        self.linear_right = Linear(rank, size, dtype, cpu)
        self.post_laurel_norm = norm(config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        y = self.linear_right(self.linear_left(x).astype(x.dtype)).astype(x.dtype)
        return x + self.post_laurel_norm(y)


class AltUp(Module):
    """Alternating updates: each hidden state is predicted from all of them. Then all are corrected
    by the difference between the one that the layer computes and its prediction."""

    def __init__(self, config: Any, dtype: DType):
        super().__init__()
        self.count, self.active = config.altup_num_inputs, config.altup_active_idx
        size, cpu = config.hidden_size, DeviceRef.CPU()
        self.scales, self.size = config.altup_correct_scale, size
        self.correct_output_scale = Weight("correct_output_scale", dtype, (size,), cpu)
        self.correction_coefs = Linear(self.count, self.count, dtype, cpu)
        self.prediction_coefs = Linear(self.count, self.count**2, dtype, cpu)
        self.modality_router = Linear(size, self.count, dtype, cpu)
        self.router_norm = norm(config, dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the weights, which are small."""
        whole = Split(ShardingStrategy.replicate(1))
        names = ("correction_coefs", "prediction_coefs", "modality_router")
        return dict.fromkeys(("correct_output_scale", *(f"{n}.weight" for n in names)), whole)

    def _modalities(self, x: jax.Array) -> jax.Array:
        routed = self.modality_router(self.router_norm(x) * jnp.asarray(1 / self.size, x.dtype))
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)  # [..., A]

    def __call__(self, states: jax.Array) -> jax.Array:
        """``[A, ..., E]`` → predictions of the same shape."""
        found = self.prediction_coefs(self._modalities(states[self.active])).astype(states.dtype)
        found = found.reshape(*found.shape[:-1], self.count, self.count)
        return states + jnp.einsum("i...e,...ji->j...e", states, found).astype(states.dtype)

    def correct(self, predictions: jax.Array, computed: jax.Array) -> jax.Array:
        """Predictions ``[A, ..., E]`` and the layer's result ``[..., E]`` → hidden states ``[A, ..., E]``."""
        change = computed - predictions[self.active]
        shares = self.correction_coefs(self._modalities(computed)).astype(computed.dtype) + 1
        return predictions + jnp.moveaxis(shares, -1, 0)[..., None] * change[None]

    def scaled(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` times ``correct_output_scale``, if the configuration says so."""
        if not self.scales:
            return x
        weight = jnp.asarray(self.correct_output_scale).astype(x.dtype)
        return x * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def sized(x: jax.Array, like: jax.Array) -> jax.Array:
    """Vectors ``x`` ``[..., E]``, rescaled to the root mean square of ``like``."""
    x = x.astype(like.dtype)
    wanted = jnp.sqrt(jnp.mean(like**2, axis=-1, keepdims=True))
    return x * wanted / jnp.sqrt(jnp.maximum(jnp.mean(x**2, axis=-1, keepdims=True), _LEAST))
