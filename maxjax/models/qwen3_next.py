"""Qwen3-Next: the gated delta rule in three of every four layers, gated attention in the fourth, and experts.

Source: transformers' ``modeling_qwen3_next``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..nn.linear import Linear, linear_rules, linears
from .config import setting
from .decoder.attention import Cached, Step
from .decoder.config import own
from .decoder.experts import GatedSharedLayer, QwenMoEConfig
from .decoder.gated_delta import GatedAttention, GatedDelta, GatedDeltaConfig
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.qwen3_next import QWEN3_NEXT_GGUF
from .names import DECODER, Drop, Names
from .parts.rotary import Rope

# Tensors of the layer of multi-token prediction.
PREDICTING = ("mtp.*",)


@dataclass(frozen=True)
class Qwen3NextConfig(GatedDeltaConfig, QwenMoEConfig):
    """The settings of a Qwen3-Next."""

    model_type = "qwen3_next"
    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2}

    max_position_embeddings: int = setting(default=32768, minimum=1)
    head_dim: int | None = setting(default=256, minimum=1, held="axis")
    num_experts: int = setting(default=512, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=10, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=512, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=True)
    shared_size: int | None = setting(
        "shared_expert_intermediate_size", default=512, minimum=1, held="axis"
    )
    norm_offset: float = own(1.0)
    rope: Rope = own(Rope(part=0.25))


class Qwen3NextDelta(GatedDelta):
    """The gated delta rule; each key head's queries, keys, values and gates are consecutive rows of one layer."""

    def make_projections(self, size: int, dtype: DType) -> None:
        """Makes ``in_proj_qkvz`` and ``in_proj_ba``."""
        each = self.value_heads // self.key_heads
        self.widths = (2 * self.key_dim + 2 * each * self.value_dim, 2 * each)
        self.in_proj_qkvz, self.in_proj_ba = (
            Linear(size, self.key_heads * width, dtype, DeviceRef.CPU()) for width in self.widths
        )

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """As :meth:`GatedDelta.project`."""
        lead, values = x.shape[:-1], self.value_heads // self.key_heads * self.value_dim
        both, rest = (
            y.astype(x.dtype).reshape(*lead, self.key_heads, width)
            for y, width in zip(
                linears([self.in_proj_qkvz, self.in_proj_ba], x), self.widths, strict=True
            )
        )
        ends = (self.key_dim, 2 * self.key_dim, 2 * self.key_dim + values)
        q, k, v, z = jnp.split(both, ends, axis=-1)
        share, decay = jnp.split(rest, 2, axis=-1)
        mixed = jnp.concatenate([a.reshape(*lead, -1) for a in (q, k, v)], axis=-1)
        heads = (*lead, self.value_heads)
        return mixed, z.reshape(*heads, self.value_dim), share.reshape(heads), decay.reshape(heads)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between key heads."""
        rules = super().sharding_rules()
        for name, width in zip(("in_proj_qkvz", "in_proj_ba"), self.widths, strict=True):
            segment = Segment.head_aware(self.key_heads, width)
            rules |= linear_rules(name, ShardingStrategy.segmented(1, 0, [segment]))
        return rules


class Qwen3NextLayer(GatedSharedLayer):
    """A layer with the delta rule (``linear_attn``) or with attention (``self_attn``), and experts."""

    attention_class: ClassVar[Any] = GatedAttention
    delta_class: ClassVar[Any] = Qwen3NextDelta

    def make_mixer(self, config: Any, number: int, dtype: DType) -> None:
        """Makes ``linear_attn`` or ``self_attn``."""
        self.is_linear = config.linear[number]
        if self.is_linear:
            self.linear_attn = self.delta_class(config, dtype)
        else:
            super().make_mixer(config, number, dtype)

    def mixed(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """The result of the delta rule or of attention, and the cache with these tokens."""
        mixer = self.linear_attn if self.is_linear else self.self_attn
        return mixer(x, step, cached, layer)


class Qwen3Next(Decoder):
    """A Qwen3-Next language model.

    Example:
        >>> config = Qwen3NextConfig(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=8, num_experts=4, num_experts_per_tok=2, linear_num_key_heads=1, linear_num_value_heads=2,
        ...     linear_key_head_dim=4, linear_value_head_dim=6)
        >>> cache = Qwen3Next(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, {name: a.shape for name, a in cache.more["linear"].arrays.items()}
        (1, {'conv': (3, 1, 3, 20), 'delta': (3, 1, 2, 4, 6)})
    """

    layer_class: ClassVar[Any] = Qwen3NextLayer


QWEN3_NEXT = Qwen3Next.family = Family.of(
    Qwen3Next,
    Qwen3NextConfig,
    names=Names(FusedExperts(), Drop(*PREDICTING, kept=True), *DECODER),
    gguf=QWEN3_NEXT_GGUF,
)
