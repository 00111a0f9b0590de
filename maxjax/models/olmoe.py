"""OLMoE: many small experts, and norms of queries and keys over all heads together.

Source: arXiv:2409.02060; transformers' ``modeling_olmoe``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType
from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.config import own
from .decoder.expert_files import MoEFamily
from .decoder.experts import MoEConfig, MoELayer
from .decoder.model import Decoder
from .gguf.architectures.olmo import OLMOE_GGUF


@dataclass(frozen=True)
class OLMoEConfig(MoEConfig):
    """The settings of an OLMoE; ``clip_qkv`` is the bound at which queries, keys and values are clipped."""

    model_type = "olmoe"
    fixed = {"sliding_window": None, "mlp_bias": False}

    max_position_embeddings: int = setting(default=4096, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(default=64, minimum=1, held="axis", also=("num_local_experts",))
    moe_intermediate_size: int | None = own(None)
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=False)
    clip_qkv: float | None = setting(default=None)
    qk_norm: bool | str = own("all")


class OLMoEAttention(DecoderAttention):
    """Attention whose queries, keys and values may be clipped."""

    def __init__(self, config: OLMoEConfig, slides: bool, dtype: DType):
        super().__init__(config, slides, dtype)
        self.clip = config.clip_qkv

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """Normalises queries and keys, then clips all three to ``±clip_qkv``."""
        found = super().heads(q, k, v)
        return found if self.clip is None else [jnp.clip(a, -self.clip, self.clip) for a in found]


class OLMoELayer(MoELayer):
    """A layer of an OLMoE."""

    attention_class: ClassVar[Any] = OLMoEAttention


class OLMoE(Decoder):
    """An OLMoE language model.

    Example:
        >>> config = OLMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, num_experts=8)
        >>> OLMoE(config, stacked=False).model.layers[0].self_attn.k_norm.weight.shape
        [Dim(8)]
    """

    layer_class: ClassVar[Any] = OLMoELayer


OLMOE = OLMoE.family = MoEFamily.of(
    OLMoE, OLMoEConfig, "OlmoeForCausalLM", "OlmoeModel", gguf=OLMOE_GGUF
)
