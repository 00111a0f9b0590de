"""The norms of a decoder: the kinds that a configuration can name, and a norm for each head.

Shapes: heads of width D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...dtype import DType
from ...graph.device import DeviceRef
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
