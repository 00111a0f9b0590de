"""Hunyuan with experts (Hunyuan-A13B): a Hunyuan whose MLPs are mixtures of experts.

Source: transformers' ``modeling_hunyuan_v1_moe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import UnsupportedModelError
from .config import setting
from .decoder.config import own
from .decoder.experts import MoEConfig, MoELayer, SparseMLP
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.hunyuan import HUNYUAN_MOE_GGUF
from .hunyuan import HunyuanAttention, HunyuanConfig
from .names import DECODER, Names


@dataclass(frozen=True)
class HunyuanMoEConfig(HunyuanConfig, MoEConfig):
    """The settings of a Hunyuan with experts; ``intermediate_size`` is the inner size of an expert."""

    model_type = "hunyuan_v1_moe"
    fixed = {**HunyuanConfig.fixed, "norm_topk_prob": True}

    num_experts: int = setting(default=1, minimum=1, held="axis", also=("num_local_experts",))
    moe_intermediate_size: int | None = own(None)
    num_experts_per_tok: int = setting(
        "moe_topk", default=1, minimum=1, held="axis", also=("num_experts_per_tok",)
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_size", self.intermediate_size)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of experts, which published files list for each layer.

        Raises:
            UnsupportedModelError: layers differ or share keys and values, or the experts' shares are scaled.
        """
        found = {**super().derived(raw)}
        for key in ("num_experts", "moe_topk", "num_experts_per_tok"):
            value = raw.get(key)
            if isinstance(value, list) and value:
                if any(one != value[0] for one in value):
                    raise UnsupportedModelError(f"{key!r} that differs between layers")
                found[key] = value[0]
        if raw.get("routed_scaling_factor") not in (None, False, 1):
            raise UnsupportedModelError("'routed_scaling_factor' of a Hunyuan")
        if raw.get("use_cla"):
            raise UnsupportedModelError("'use_cla', layers that share keys and values")
        return found


class HunyuanMLP(SparseMLP):
    """Experts whose shares are a softmax over the chosen ones, and an MLP that every token goes through."""

    shared_name: ClassVar[str] = "shared_mlp"
    route: ClassVar[Mapping[str, Any]] = {"shares": "softmax of chosen", "wide": True}
    inner_router: ClassVar[str] = "wg"


class HunyuanMoELayer(MoELayer):
    """A layer of a Hunyuan with experts."""

    attention_class: ClassVar[Any] = HunyuanAttention
    sparse_class: ClassVar[Any] = HunyuanMLP


class HunyuanMoE(Decoder):
    """A Hunyuan language model with experts.

    Example:
        >>> config = HunyuanMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, num_experts=4)
        >>> [name for name in HunyuanMoE(config).raw_state_dict() if "0.mlp.gate" in name]
        ['model.layers.0.mlp.gate.wg.weight']
    """

    layer_class: ClassVar[Any] = HunyuanMoELayer


HUNYUAN_MOE = HunyuanMoE.family = Family.of(
    HunyuanMoE,
    HunyuanMoEConfig,
    "HunYuanMoEV1ForCausalLM",
    "HunYuanMoEV1Model",
    names=Names(FusedExperts(), *DECODER),
    gguf=HUNYUAN_MOE_GGUF,
)
