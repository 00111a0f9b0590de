"""Seed-OSS: a Llama with biases of queries, keys and values, and a width of heads that the file sets.

Source: transformers' ``modeling_seed_oss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import DecoderConfig
from .decoder.model import Decoder, DecoderFamily
from .gguf.architectures.seed_oss import SEED_OSS_GGUF


@dataclass(frozen=True)
class SeedOSSConfig(DecoderConfig):
    """The settings of a Seed-OSS; whether the output projection has a bias is a separate setting."""

    model_type = "seed_oss"
    fixed = {"sliding_window": None}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "head_dim": 128}

    max_position_embeddings: int = setting(default=524_288, minimum=1)
    attention_bias: bool = setting(default=True)
    output_bias: bool | None = setting("attention_out_bias", default=False)


class SeedOSS(Decoder):
    """A Seed-OSS language model.

    Example:
        >>> config = SeedOSSConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, head_dim=8)
        >>> [n for n in SeedOSS(config).raw_state_dict() if "0.self_attn" in n and "bias" in n]
        ['model.layers.0.self_attn.q_proj.bias', 'model.layers.0.self_attn.k_proj.bias',
         'model.layers.0.self_attn.v_proj.bias']
    """


SEED_OSS = SeedOSS.family = DecoderFamily.of(
    SeedOSS, SeedOSSConfig, "SeedOssForCausalLM", "SeedOssModel", gguf=SEED_OSS_GGUF
)
