"""Qwen3-MoE (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import own
from .decoder.experts import MoEConfig, MoEFamily, MoELayer, expert_count, sparse_layers
from .decoder.model import Decoder, make
from .llama import BARE, KNOWN
from .qwen import WINDOW


@dataclass(frozen=True)
class Qwen3MoEConfig(MoEConfig):
    """The settings of a Qwen 3 with experts in all or some layers."""

    unsaid: ClassVar[Mapping[str, Any]] = {**WINDOW, "num_key_value_heads": 4}

    max_position_embeddings: int = setting(default=32768, minimum=1)
    num_experts: int = setting(default=128, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=768, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=False)
    qk_norm: bool = own(True)

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """The width of an MLP counts nothing where every layer has experts."""
        try:
            sparse = sparse_layers(raw, expert_count(raw, "num_experts", cls.num_experts))
        except ValueError:
            sparse = ()
        return raw, frozenset({"intermediate_size"} if sparse and all(sparse) else ())

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts, which layers have them, and the window, if it is used."""
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        experts = expert_count(raw, "num_experts", cls.num_experts)
        return {
            "num_experts": experts, "sliding_window": window, "mlp_bias": False,
            "sparse": sparse_layers(raw, experts),
        }  # fmt: skip


class Qwen3MoE(Decoder):
    """A Qwen 3 with experts."""

    layer_class: ClassVar[Any] = MoELayer


QWEN3_MOE = Qwen3MoE.family = MoEFamily(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    config=Qwen3MoEConfig,
    make=make(Qwen3MoE),
    bare=BARE,
    ignored=KNOWN,
)
