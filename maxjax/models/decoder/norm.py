"""The norms of a decoder, by the kind that its configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...nn.norm import LayerNorm, RMSNorm
from .config import DecoderConfig


def _rms(config: DecoderConfig, dtype: DType, width: int) -> RMSNorm:
    # With an offset, as in Gemma, it rounds only once, at the end.
    offset = config.norm_offset
    return RMSNorm(width, dtype, config.rms_norm_eps, offset, multiply_before_cast=bool(offset))


def _wide_rms(config: DecoderConfig, dtype: DType, width: int) -> RMSNorm:
    return RMSNorm(width, dtype, config.rms_norm_eps, config.norm_offset)


def _layer(config: DecoderConfig, dtype: DType, width: int) -> LayerNorm:
    return LayerNorm(width, [DeviceRef.CPU()], dtype, config.rms_norm_eps)


def _layer_without_bias(config: DecoderConfig, dtype: DType, width: int) -> LayerNorm:
    return LayerNorm(width, [DeviceRef.CPU()], dtype, config.rms_norm_eps, use_bias=False)


# What ``config.norm`` may be: "rms" rounds before it multiplies by the weight, as Llama does, and
# "wide_rms" after it.
NORMS: dict[str, Callable[[DecoderConfig, DType, int], Any]] = {
    "rms": _rms,
    "wide_rms": _wide_rms,
    "layer": _layer,
    "layer_without_bias": _layer_without_bias,
}


def unit_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """``x / rms(x)`` over the last axis: an RMSNorm without a weight, in the dtype of x."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def norm(config: DecoderConfig, dtype: DType, width: int | None = None) -> Any:
    """The norm of the kind ``config.norm``, a key of ``NORMS``.

    Args:
        config: settings of the decoder.
        dtype: dtype of the weights.
        width: length of the axis that is normalised; ``config.hidden_size`` by default.

    Example:
        >>> config = DecoderConfig(100, 8, 16, num_layers=2, num_heads=2, norm="layer")
        >>> list(norm(config, DType.float32).raw_state_dict())
        ['weight', 'bias']
    """
    return NORMS[config.norm](config, dtype, config.hidden_size if width is None else width)
