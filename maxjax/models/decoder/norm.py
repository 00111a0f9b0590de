"""The norms of a decoder: the kinds that a configuration can name, and a norm for each head.

Shapes: heads of width D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.specs import Split
from ...graph.placement.strategy import ShardingStrategy
from ...graph.weight.weight import Weight
from ...nn.layer import Module
from ...nn.norm import ConstantLayerNorm, LayerNorm, RMSNorm
from ..parts.norm import unit_rms as unit_rms

if TYPE_CHECKING:
    from .config import DecoderConfig


def _rms(config: DecoderConfig, dtype: DType, width: int) -> RMSNorm:
    # With an offset, as in Gemma, the result is rounded only once, at the end.
    offset = config.norm_offset
    return RMSNorm(width, dtype, config.rms_norm_eps, offset, multiply_before_cast=bool(offset))


def _wide_rms(config: DecoderConfig, dtype: DType, width: int) -> RMSNorm:
    return RMSNorm(width, dtype, config.rms_norm_eps, config.norm_offset)


def _layer(config: DecoderConfig, dtype: DType, width: int) -> LayerNorm:
    offset = config.norm_offset
    return LayerNorm(width, [DeviceRef.CPU()], dtype, config.rms_norm_eps, weight_offset=offset)


def _layer_without_bias(config: DecoderConfig, dtype: DType, width: int) -> LayerNorm:
    return LayerNorm(width, [DeviceRef.CPU()], dtype, config.rms_norm_eps, use_bias=False)


def _layer_without_weights(config: DecoderConfig, dtype: DType, width: int) -> ConstantLayerNorm:
    return ConstantLayerNorm(width, DeviceRef.CPU(), dtype, config.rms_norm_eps)


# The values of ``config.norm``. "rms" rounds to the model's dtype before it multiplies by the weight,
# as in Llama, and "wide_rms" rounds after it.
NORMS: dict[str, Callable[[DecoderConfig, DType, int], Any]] = {
    "rms": _rms,
    "wide_rms": _wide_rms,
    "layer": _layer,
    "layer_without_bias": _layer_without_bias,
    "layer_without_weights": _layer_without_weights,
}


def norm(config: DecoderConfig, dtype: DType, width: int | None = None) -> Any:
    """Makes a norm of the kind ``config.norm``, a key of ``NORMS``.

    Args:
        config: settings of the decoder.
        dtype: dtype of the weights.
        width: length of the axis that is normalised; ``config.hidden_size`` by default.

    Example:
        >>> from maxjax.models import DecoderConfig
        >>> config = DecoderConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, norm="layer")
        >>> list(norm(config, DType.float32).raw_state_dict())
        ['weight', 'bias']
    """
    return NORMS[config.norm](config, dtype, config.hidden_size if width is None else width)


class HeadNorms(Module):
    """LayerNorm of each head, with a weight for each feature of each head.

    Attributes:
        weight: Weight ``[heads, D]``.
    """

    def __init__(self, heads: int, width: int, dtype: DType, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = Weight("weight", dtype, (heads, width), DeviceRef.CPU())

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the weight, which is small."""
        return {"weight": Split(ShardingStrategy.replicate(1))}

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., heads, D]`` → the same shape and dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        weight = jnp.asarray(self.weight).astype(jnp.float32)
        weight = weight.reshape((1,) * (x.ndim - 2) + weight.shape)
        return (weight * centred * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype)

    def initializer(self, name: str) -> Any:
        """Initialises the weight to ones."""
        return jax.nn.initializers.ones
