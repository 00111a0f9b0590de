"""Hunyuan (0.5B to 7B): a Llama with norms of queries and keys after RoPE.

Source: transformers' ``modeling_hunyuan_v1_dense``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from .config import setting
from .decoder.attention import DecoderAttention, Step
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig
from .decoder.model import Decoder
from .decoder.norm import norm
from .family import Family
from .gguf.architectures.hunyuan import HUNYUAN_GGUF
from .names import DECODER, Names
from .parts.rotary import Rope, read_rope, rope_settings


@dataclass(frozen=True)
class HunyuanConfig(DecoderConfig):
    """The settings of a Hunyuan. Every Hunyuan has norms of queries and keys."""

    model_type = "hunyuan_v1_dense"
    fixed = {"mlp_bias": False, "sliding_window": None}
    unused = ("use_qk_norm",)  # the norms are there whatever it says

    rms_norm_eps: float = setting(default=1e-5)

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
        """The RoPE; scaling of type "dynamic" with ``alpha`` is a larger base for all lengths."""
        name, given = rope_settings(raw)
        alpha, width = given.get("alpha"), raw.get("head_dim")
        if given.get("rope_type", given.get("type")) != "dynamic" or not alpha:
            return {"rope": read_rope(raw, context)}
        size, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
        if width is None and type(size) is int and type(heads) is int and heads > 0:
            width = size // heads
        if type(width) is not int:  # the check of the settings refuses it later
            return {"rope": Rope()}
        if width < 4:
            raise ValueError(
                f"'head_dim' is {width}, and must be at least 4 for 'alpha' in '{name}'"
            )
        if type(alpha) not in (int, float) or not 0 < alpha < 1e30:
            raise ValueError(f"'alpha' in '{name}' is {str(alpha)[:60]}, not a positive number")
        plain = {key: given[key] for key in ("rope_theta",) if key in given}
        rope = read_rope(plain, context)
        return {
            "rope": dataclasses.replace(rope, theta=rope.theta * alpha ** (width / (width - 2)))
        }


class HunyuanAttention(DecoderAttention):
    """Attention with norms of queries and keys after RoPE."""

    def make_projections(self, config: Any, dtype: DType) -> None:
        """Makes the projections, and the norms with the names of the files."""
        super().make_projections(config, dtype)
        self.query_layernorm, self.key_layernorm = (norm(config, dtype, config.width) for _ in "qk")

    def placed(self, q: jax.Array, k: jax.Array, step: Step) -> tuple[jax.Array, jax.Array, Step]:
        """Applies RoPE to queries and keys, and then the norms."""
        q, k, step = self.rotated_now(q, k, step)
        return self.query_layernorm(q), self.key_layernorm(k), step


class HunyuanLayer(DecoderLayer):
    """A layer of a Hunyuan."""

    attention_class: ClassVar[Any] = HunyuanAttention


class Hunyuan(Decoder):
    """A Hunyuan language model.

    Example:
        >>> config = HunyuanConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [name for name in Hunyuan(config).raw_state_dict() if "query" in name]
        ['model.layers.0.self_attn.query_layernorm.weight']
    """

    layer_class: ClassVar[Any] = HunyuanLayer


HUNYUAN = Hunyuan.family = Family.of(
    Hunyuan,
    HunyuanConfig,
    "HunYuanDenseV1ForCausalLM",
    "HunYuanDenseV1Model",
    names=Names(*DECODER),
    gguf=HUNYUAN_GGUF,
)
