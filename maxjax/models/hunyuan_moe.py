"""Hunyuan with experts (Hunyuan-A13B): norms of queries and keys come after RoPE.

Source: transformers' ``modeling_hunyuan_v1_moe``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..nn.layer import Module
from ..nn.linear import Linear
from ..nn.moe import Routing
from .config import setting
from .decoder.attention import DecoderAttention, Step
from .decoder.expert_files import MoEFamily
from .decoder.experts import MoEConfig, MoELayer, SparseMLP
from .decoder.model import Decoder, make
from .decoder.norm import norm
from .decoder.rope import Rope, read_rope, rope_settings
from .gguf.names import expert_names
from .gguf.table import GGUFTable


def hunyuan_rope(raw: Mapping[str, Any], context: int, width: Any) -> Rope:
    """The RoPE of a configuration, in which "dynamic" with ``alpha`` is a larger base for every length."""
    name, given = rope_settings(raw)
    alpha = given.get("alpha")
    if given.get("rope_type", given.get("type")) != "dynamic" or not alpha:
        return read_rope(raw, context)
    plain = {key: value for key, value in raw.items() if key != name}
    if (
        type(alpha) not in (int, float)
        or not 0 < alpha < 1e30
        or type(width) is not int
        or width < 4
    ):
        raise ValueError(f"'alpha' in '{name}' is {str(alpha)[:60]}, not a positive number")
    plain |= {key: given[key] for key in ("rope_theta",) if key in given}
    rope = read_rope({**plain, "rope_scaling": None, "rope_parameters": None}, context)
    return dataclasses.replace(rope, theta=rope.theta * alpha ** (width / (width - 2)))


@dataclass(frozen=True)
class HunyuanMoEConfig(MoEConfig):
    """The settings of a Hunyuan with experts; ``intermediate_size`` is that of an expert."""

    model_type = "hunyuan_v1_moe"

    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(default=1, minimum=1, held="axis")
    num_experts_per_tok: int = setting("moe_topk", default=1, minimum=1, held="axis")

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_size", self.intermediate_size)
        super().__post_init__()

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
        """The RoPE."""
        width, size, heads = (
            raw.get(k) for k in ("head_dim", "hidden_size", "num_attention_heads")
        )
        if width is None and type(size) is int and type(heads) is int and heads > 0:
            width = size // heads
        return {"rope": hunyuan_rope(raw, context, width)}

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """``moe_intermediate_size`` is not used."""
        return raw, frozenset({"moe_intermediate_size"})

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts, of which published files have a number for each layer.

        Raises:
            UnsupportedModelError: layers differ, or share keys and values.
        """
        found = {"moe_intermediate_size": None, "mlp_bias": False, "sliding_window": None}
        for key in ("num_experts", "moe_topk"):
            value = raw.get(key)
            if isinstance(value, list) and value:
                if any(one != value[0] for one in value):
                    raise UnsupportedModelError(f"{key!r} that differs between layers")
                found[key] = value[0]
        if raw.get("use_cla"):
            raise UnsupportedModelError("'use_cla', layers that share keys and values")
        return found


class HunyuanRouter(Module):
    """A router, whose linear layer files call ``wg``."""

    def __init__(self, size: int, count: int, dtype: DType):
        super().__init__()
        self.wg = Linear(size, count, dtype, DeviceRef.CPU())

    @property
    def weight(self) -> Any:
        """The weight of the linear layer."""
        return self.wg.weight

    def __call__(self, x: jax.Array) -> Any:
        """``[..., E]`` → ``[..., X]``."""
        return self.wg(x)


class HunyuanMLP(SparseMLP):
    """Experts by a normalised softmax, and an MLP for all tokens."""

    shared_name: ClassVar[str] = "shared_mlp"

    def routes(self, config: Any) -> Routing:
        """The softmax of the chosen."""
        return Routing(config.num_experts_per_tok, "softmax of chosen", wide=True)

    def make_router(self, config: Any, dtype: DType) -> HunyuanRouter:
        """The router."""
        return HunyuanRouter(config.hidden_size, config.num_experts, dtype)


class HunyuanAttention(DecoderAttention):
    """Attention with norms of queries and keys after RoPE."""

    def make_projections(self, config: Any, dtype: DType) -> None:
        """The projections, and the norms by the names of the files."""
        super().make_projections(config, dtype)
        self.query_layernorm, self.key_layernorm = (norm(config, dtype, config.width) for _ in "qk")

    def placed(self, q: jax.Array, k: jax.Array, step: Step) -> tuple[jax.Array, jax.Array, Step]:
        """Rotated, then normalised."""
        q, k, step = self.rotated_now(q, k, step)
        return self.query_layernorm(q), self.key_layernorm(k), step


class HunyuanMoELayer(MoELayer):
    """A layer of a Hunyuan with experts."""

    attention_class: ClassVar[Any] = HunyuanAttention
    sparse_class: ClassVar[Any] = HunyuanMLP


class HunyuanMoE(Decoder):
    """A Hunyuan language model with experts.

    Example:
        >>> config = HunyuanMoEConfig(100, 8, 16, num_layers=2, num_heads=2, num_experts=4)
        >>> [name for name in HunyuanMoE(config).raw_state_dict() if "0.mlp.gate" in name]
        ['model.layers.0.mlp.gate.wg.weight']
    """

    layer_class: ClassVar[Any] = HunyuanMoELayer


HUNYUAN_MOE = HunyuanMoE.family = MoEFamily(
    model_type=HunyuanMoEConfig.model_type,
    architectures=("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Model"),
    config=HunyuanMoEConfig,
    make=make(HunyuanMoE),
    gguf=GGUFTable(
        "hunyuan-moe",
        {
            ".attn_q_norm": "self_attn.query_layernorm",
            ".attn_k_norm": "self_attn.key_layernorm",
            **expert_names(router="gate.wg", shared="shared_mlp"),
        },
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_feed_forward_length": "intermediate_size",
        },
        fixed={"hidden_act": "silu"},
        biases=(),
    ),
)
