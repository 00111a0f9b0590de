"""Helium 1: a Llama with RoPE of neighbouring features, and norms that round after they multiply by the weight.

Source: transformers' ``modeling_helium``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import setting
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder, DecoderFamily
from .parts.rotary import Rope


@dataclass(frozen=True)
class HeliumConfig(DecoderConfig):
    """The settings of a Helium 1."""

    model_type = "helium"
    fixed = {"sliding_window": None}

    head_dim: int | None = setting(default=128, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=4096, minimum=1)
    rms_norm_eps: float = setting(default=1e-8)
    output_bias: bool | None = own(False)
    norm: str = own("wide_rms")
    rope: Rope = own(Rope(1e5, interleaved=True))


class Helium(Decoder):
    """A Helium 1 language model.

    Example:
        >>> model = Helium(HeliumConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2, head_dim=4))
        >>> model.model.layers[0].self_attn.interleaved
        True
    """


HELIUM = Helium.family = DecoderFamily.of(Helium, HeliumConfig)
