"""DeepSeek V2, V3 and R1, Kimi K2 and Moonlight: latent attention, and experts in all but the first layers.

Sources: arXiv:2405.04434, arXiv:2412.19437; transformers' ``modeling_deepseek_v2`` and ``_v3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..errors import UnsupportedModelError
from .config import setting
from .decoder.config import layers_of, own
from .decoder.experts import BalancedMLP, GroupedMLP, GroupedMoEConfig, MoELayer, after_dense
from .decoder.latent import LatentAttention, LatentConfig, yarn_scale
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.deepseek import DEEPSEEK_GGUF
from .names import DECODER, MULTIMODAL, PREDICTION, Drop, Names
from .parts.rotary import Rope, read_rope


@dataclass(frozen=True)
class DeepseekV3Config(LatentConfig, GroupedMoEConfig):
    """The settings of a DeepSeek V3.

    Attributes:
        n_shared_experts: number of experts that every token goes through; together they are one MLP.
    """

    model_type = "deepseek_v3"
    fixed = {"mlp_bias": False}
    unsaid: ClassVar[Mapping[str, Any]] = {"q_lora_rank": 1536}
    first_dense: ClassVar[int] = 3
    # The supported values of ``topk_method``, and whether experts are chosen only from the best groups.
    methods: ClassVar[Mapping[str, bool]] = {"noaux_tc": True}

    max_position_embeddings: int = setting(default=4096, minimum=1)
    num_experts: int = setting(
        "n_routed_experts", default=256, held="axis", also=("num_local_experts",)
    )
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=2048, minimum=1, held="axis")
    n_shared_experts: int = setting(default=1, held="axis")
    routed_scaling_factor: float = setting(default=2.5)
    n_group: int = setting(default=8, minimum=1, held="axis")
    topk_group: int = setting(default=4, minimum=1, held="axis")

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_size", self.expert_size * self.n_shared_experts or None)
        super().__post_init__()

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """RoPE of neighbouring features unless ``rope_interleave`` says otherwise."""
        return {
            "rope": read_rope(raw, context, interleaved=raw.get("rope_interleave") is not False)
        }

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with experts, the size of the shared MLP, and the scale of scores, which depends on YaRN."""
        scoring = raw.get("scoring_func", cls.scoring)
        if scoring != cls.scoring:
            raise UnsupportedModelError(
                f"'scoring_func' {str(scoring)[:60]!r} of a {cls.model_type}"
            )
        if raw.get("moe_layer_freq") not in (None, 1):
            raise UnsupportedModelError(f"'moe_layer_freq' other than 1 of a {cls.model_type}")
        method = raw.get("topk_method")
        if method not in (None, *cls.methods):
            raise UnsupportedModelError(
                f"'topk_method' {str(method)[:60]!r} of a {cls.model_type}: "
                f"supported are {', '.join(cls.methods)}"
            )
        found = {
            "sliding_window": None,
            "sparse": after_dense(raw, layers_of(raw), cls.first_dense),
        }
        return {**found, **yarn_scale(raw)}


@dataclass(frozen=True)
class DeepseekV2Config(DeepseekV3Config):
    """The settings of a DeepSeek V2, whose experts are chosen by a softmax.

    Attributes:
        topk_method: "greedy", or "group_limited_greedy" for experts from the best groups.
    """

    model_type = "deepseek_v2"
    unused = ("rope_interleave",)  # RoPE is of neighbouring features whatever it says
    scoring: ClassVar[str] = "softmax"
    first_dense: ClassVar[int] = 0
    methods: ClassVar[Mapping[str, bool]] = {"greedy": False, "group_limited_greedy": True}

    max_position_embeddings: int = setting(default=2048, minimum=1)
    num_experts: int = setting(
        "n_routed_experts", default=64, held="axis", also=("num_local_experts", "num_experts")
    )
    num_experts_per_tok: int = setting(default=6, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=1407, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=False)
    n_shared_experts: int = setting(default=2, held="axis")
    routed_scaling_factor: float = setting(default=1.0)
    n_group: int = setting(default=1, minimum=1, held="axis")
    topk_group: int = setting(default=1, minimum=1, held="axis")
    topk_method: str = setting(default="greedy")
    best_of_group: int = own(1)
    rope: Rope = own(Rope(interleaved=True))

    def __post_init__(self) -> None:
        if self.topk_method not in self.methods:
            known = " or ".join(self.methods)
            raise ValueError(f"'topk_method' is {self.topk_method[:60]!r}: {known}")
        if not self.methods[self.topk_method]:
            for name in ("n_group", "topk_group"):
                object.__setattr__(self, name, 1)
        super().__post_init__()

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """RoPE of neighbouring features."""
        return {"rope": read_rope(raw, context, interleaved=True)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`DeepseekV3Config.derived`; files with normalised shares are refused."""
        if raw.get("norm_topk_prob"):
            raise UnsupportedModelError("'norm_topk_prob' of a deepseek_v2")
        return super().derived(raw)


class DeepseekV2Layer(MoELayer):
    """A layer of a DeepSeek V2."""

    attention_class: ClassVar[Any] = LatentAttention
    sparse_class: ClassVar[Any] = GroupedMLP


class DeepseekV3Layer(DeepseekV2Layer):
    """A layer of a DeepSeek V3."""

    sparse_class: ClassVar[Any] = BalancedMLP


class DeepseekV2(Decoder):
    """A DeepSeek V2 language model."""

    layer_class: ClassVar[Any] = DeepseekV2Layer


class DeepseekV3(Decoder):
    """A DeepSeek V3 language model; also R1, Kimi K2 and Moonlight.

    Example:
        >>> config = DeepseekV3Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, kv_lora_rank=6,
        ...     q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, num_experts=8,
        ...     num_experts_per_tok=2, moe_intermediate_size=4, n_group=1, topk_group=1)
        >>> cache = DeepseekV3(config).cache(batch=1, capacity=16)
        >>> cache.keys.shape, cache.values is cache.keys
        ((4, 1, 1, 16, 8), True)
    """

    layer_class: ClassVar[Any] = DeepseekV3Layer


DEEPSEEK_V2 = DeepseekV2.family = Family.of(
    DeepseekV2, DeepseekV2Config, names=Names(PREDICTION, FusedExperts(), *DECODER)
)
DEEPSEEK_V3 = DeepseekV3.family = Family.of(
    DeepseekV3,
    DeepseekV3Config,
    names=Names(PREDICTION, FusedExperts(), *MULTIMODAL, Drop("mm_projector.*"), *DECODER),
    gguf=DEEPSEEK_GGUF,
)
# Kimi K2's files name DeepSeek's architecture, but a model type of their own.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", architectures=(), gguf=None)
