"""gpt-oss: experts with biases and a clamped gate, attention sinks, and a window in every second layer.

Its files hold all experts of a layer in one tensor, in MXFP4, and they stay quantised in memory.

Source: arXiv:2508.10925; transformers' ``modeling_gpt_oss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.specs import TENSOR, Split
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..graph.weight.weight import Weight
from ..nn.linear import Linear
from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.config import layers_of, own, slides_of
from .decoder.experts import MoEConfig, MoELayer, SparseMLP
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.gpt_oss import GPT_OSS_GGUF
from .names import DECODER, Names


@dataclass(frozen=True)
class GptOssConfig(MoEConfig):
    """The settings of a gpt-oss; ``intermediate_size`` is the inner size of an expert."""

    model_type = "gpt_oss"
    fixed = {"mlp_bias": False}

    unsaid: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8, "sliding_window": 128, "head_dim": 64, "rope_theta": 150000.0,
    }  # fmt: skip
    unsaid_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip

    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(
        "num_local_experts", default=128, minimum=1, held="axis", also=("num_experts",)
    )
    moe_intermediate_size: int | None = own(None)
    num_experts_per_tok: int = setting(default=4, minimum=1, held="axis")
    attention_bias: bool = setting(default=True)
    alpha: float = setting("swiglu_alpha", default=1.702)
    limit: float = setting("swiglu_limit", default=7.0)
    norm_topk_prob: bool = own(True)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with a window: every second one, from the first on."""
        return {"slides": slides_of(raw, [i % 2 == 0 for i in range(layers_of(raw))])}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """``(up + 1) · gate · σ(alpha · gate)``, where gate and up are clamped to ``limit``."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Gate and up, of one shape → the same shape."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GptOssMLP(SparseMLP):
    """The experts of a gpt-oss."""

    router_name: ClassVar[str] = "router"
    experts_have_biases: ClassVar[bool] = True
    route: ClassVar[Mapping[str, Any]] = {"shares": "softmax of chosen"}

    def kind(self, config: Any) -> ClampedSwiGLU:
        """A :class:`ClampedSwiGLU` with the configuration's numbers."""
        return ClampedSwiGLU(config.alpha, config.limit)

    def make_router(self, config: Any, dtype: DType) -> Linear:
        """Makes a linear layer with a bias."""
        return Linear(config.hidden_size, config.num_experts, dtype, DeviceRef.CPU(), has_bias=True)


class GptOssAttention(DecoderAttention):
    """Attention with a sink for each query head."""

    def make_projections(self, config: Any, dtype: DType) -> None:
        """Makes the projections, and the sinks ``[H]``."""
        super().make_projections(config, dtype)
        self.sinks = Weight("sinks", dtype, (self.num_heads,), DeviceRef.CPU())

    def sharding_rules(self) -> dict[str, Any]:
        """:meth:`DecoderAttention.sharding_rules`, with the sinks split between query heads."""
        heads = ShardingStrategy.segmented(1, 0, [Segment.head_aware(self.num_heads, 1)])
        return {**super().sharding_rules(), "sinks": Split(heads, TENSOR)}


class GptOssLayer(MoELayer):
    """A layer of a gpt-oss."""

    attention_class: ClassVar[Any] = GptOssAttention
    sparse_class: ClassVar[Any] = GptOssMLP


class GptOss(Decoder):
    """A gpt-oss language model.

    Example:
        >>> config = GptOssConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, sliding_window=4)
        >>> [name for name in GptOss(config).raw_state_dict() if "layers.1.self_attn.s" in name]
        ['model.layers.1.self_attn.sinks']
    """

    layer_class: ClassVar[Any] = GptOssLayer


GPT_OSS = GptOss.family = Family.of(
    GptOss,
    GptOssConfig,
    names=Names(
        FusedExperts(
            gate_up=("mlp.experts.gate_up_proj",),
            down=("mlp.experts.down_proj",),
            transposed=True,
            interleaved=True,
            written=True,
        ),
        *DECODER,
    ),
    gguf=GPT_OSS_GGUF,
)
