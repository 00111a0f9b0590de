"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections; in Phi-4-mini, RoPE rotates a part of each head.

Sources: arXiv:2404.14219, arXiv:2412.08905, arXiv:2503.01743; transformers' ``modeling_phi3``.

Shapes: H query heads and K KV heads of width D, hidden size E.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..graph.placement.strategy import Segment
from ..nn.linear import Linear
from ..nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.block import DecoderLayer, FusedMLP
from .decoder.config import DecoderConfig
from .decoder.model import Decoder, DecoderFamily
from .gguf.architectures.phi import PHI3_GGUF
from .parts.rotary import Rope, object_of, read_rope

# Names in the first files for LongRoPE, the only kind of RoPE scaling in this family.
_LONGROPE = ("su", "yarn")


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """The settings of a Phi-3 or Phi-4: all layers have the sliding window, if there is one."""

    model_type = "phi3"
    fixed = {"attention_bias": False, "mlp_bias": False}

    unsaid: ClassVar[Mapping[str, Any]] = {"original_max_position_embeddings": 4096}

    max_position_embeddings: int = setting(default=4096, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
        """The RoPE of a part of each head; every scaling is LongRoPE."""
        changed: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            given = object_of(raw, name)
            for key in ("type", "rope_type"):
                if given.get(key) in _LONGROPE:
                    changed[name] = given = {**given, key: "longrope"}
        return {"rope": read_rope(ChainMap(changed, raw), context, part=1.0)}  # type: ignore[arg-type]


class Phi3Attention(DecoderAttention):
    """Self-attention with one linear layer for queries, keys and values.

    Attributes:
        qkv_proj: linear layer of queries, keys and values, weight ``[(H + 2 K) D, E]``.
    """

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes ``qkv_proj`` and ``o_proj``."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self.sizes = tuple(count * self.head_dim for count in heads)
        self.qkv_proj: Any = StackedLinear(
            config.hidden_size, self.sizes, ["q", "k", "v"], dtype, stacked=True
        )
        self.o_proj = Linear(self.sizes[0], config.hidden_size, dtype)

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """``[..., E]`` → queries ``[..., H, D]``, keys and values ``[..., K, D]``."""
        return self.heads(
            *(y.astype(x.dtype) for y in split_projections(self.qkv_proj, x, self.sizes))
        )

    def sharding_rules(self) -> dict[str, Any]:
        """Splits all weights between heads."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        segments = [Segment.head_aware(count, self.head_dim) for count in heads]
        return super().sharding_rules() | stacked_rules("qkv_proj", self.qkv_proj, segments)


class Phi3Layer(DecoderLayer):
    """A decoder layer whose attention and MLP have fused projections."""

    attention_class: ClassVar[Any] = Phi3Attention

    def make_mlp(self, config: DecoderConfig, number: int, dtype: DType) -> FusedMLP:
        """The layer's MLP, with one linear layer for gate and up."""
        return FusedMLP(config.hidden_size, config.intermediate_size, dtype, config.hidden_act)


class Phi3(Decoder):
    """A Phi-3 or Phi-4 language model.

    Example:
        >>> config = Phi3Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> [name for name in Phi3(config).raw_state_dict() if "layers.0.self_attn" in name]
        ['model.layers.0.self_attn.qkv_proj.weight', 'model.layers.0.self_attn.o_proj.weight']
    """

    layer_class: ClassVar[Any] = Phi3Layer


PHI3 = Phi3.family = DecoderFamily.of(Phi3, Phi3Config, gguf=PHI3_GGUF)
