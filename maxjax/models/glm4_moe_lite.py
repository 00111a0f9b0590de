"""GLM-4.7-Flash: the latent attention of a DeepSeek V3, and the experts of a GLM-4.5.

Source: arXiv:2508.06471; transformers' ``modeling_glm4_moe_lite``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.experts import sparse_of
from .deepseek import DEEPSEEK_V3, DeepseekV3, DeepseekV3Config


@dataclass(frozen=True)
class GLM4MoELiteConfig(DeepseekV3Config):
    """The settings of a GLM-4.7-Flash."""

    model_type = "glm4_moe_lite"
    unsaid: ClassVar[Mapping[str, Any]] = {"q_lora_rank": 768}
    first_dense: ClassVar[int] = 1

    max_position_embeddings: int = setting(default=202_752, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(
        "n_routed_experts", default=64, held="axis", also=("num_local_experts",)
    )
    num_experts_per_tok: int = setting(default=4, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=1536, minimum=1, held="axis")
    routed_scaling_factor: float = setting(default=1.8)
    n_group: int = setting(default=1, minimum=1, held="axis")
    topk_group: int = setting(default=1, minimum=1, held="axis")
    qk_nope_head_dim: int = setting(default=192, minimum=1, held="axis")
    v_head_dim: int = setting(default=256, minimum=1, held="axis")

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`DeepseekV3Config.derived`, with the layers that ``mlp_layer_types`` lists."""
        found = super().derived(raw)
        return {**found, "sparse": sparse_of(raw, found.get("sparse", ()))}


class GLM4MoELite(DeepseekV3):
    """A GLM-4.7-Flash language model.

    Example:
        >>> config = GLM4MoELiteConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=6,
        ...     q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, num_experts=8,
        ...     moe_intermediate_size=4, sparse=(False, True))
        >>> [type(layer.mlp).__name__ for layer in GLM4MoELite(config, stacked=False).model.layers]
        ['MLP', 'BalancedMLP']
    """


# llama.cpp reads such a model as a DeepSeek V3, so DeepSeek's GGUF table lists this model type too.
GLM4_MOE_LITE = GLM4MoELite.family = DEEPSEEK_V3.like(
    GLM4MoELite,
    GLM4MoELiteConfig,
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteModel",
    gguf=None,
)
