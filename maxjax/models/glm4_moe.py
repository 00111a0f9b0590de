"""GLM-4.5 to 4.7: experts that are chosen by sigmoids plus a balancing bias, in all but the first layers.

Their files also hold layers of multi-token prediction, which maxjax leaves out.

Source: arXiv:2508.06471; transformers' ``modeling_glm4_moe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import layers_of, own
from .decoder.experts import BalancedMLP, GroupedMoEConfig, MoELayer, after_dense
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.glm4 import GLM4_MOE_GGUF
from .names import DECODER, MULTIMODAL, PREDICTION, Names
from .parts.rotary import Rope


@dataclass(frozen=True)
class GLM4MoEConfig(GroupedMoEConfig):
    """The settings of a GLM-4.5.

    Attributes:
        n_shared: width of the shared MLP, as a multiple of an expert's.
    """

    model_type = "glm4_moe"
    fixed = {"sliding_window": None, "mlp_bias": False}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8}

    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(
        "n_routed_experts", default=128, minimum=1, held="axis", also=("num_local_experts",)
    )
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=1408, minimum=1, held="axis")
    n_shared: int = setting("n_shared_experts", default=1, held="axis")
    qk_norm: bool | str = setting("use_qk_norm", default=False)
    output_bias: bool | None = own(False)
    rope: Rope = own(Rope(part=0.5))

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_size", self.n_shared * self.expert_size)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with experts: all but the first ``first_k_dense_replace``."""
        return {"sparse": after_dense(raw, layers_of(raw), 1)}


class GLM4MoELayer(MoELayer):
    """A layer of a GLM-4.5."""

    sparse_class: ClassVar[Any] = BalancedMLP


class GLM4MoE(Decoder):
    """A GLM-4.5 language model.

    Example:
        >>> config = GLM4MoEConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2, sparse=(False, True, True))
        >>> [type(layer.mlp).__name__ for layer in GLM4MoE(config, stacked=False).model.layers]
        ['MLP', 'BalancedMLP', 'BalancedMLP']
    """

    layer_class: ClassVar[Any] = GLM4MoELayer


GLM4_MOE = GLM4MoE.family = Family.of(
    GLM4MoE,
    GLM4MoEConfig,
    "Glm4MoeForCausalLM",
    "Glm4MoeModel",
    names=Names(PREDICTION, FusedExperts(), *MULTIMODAL, *DECODER),
    gguf=GLM4_MOE_GGUF,
)
