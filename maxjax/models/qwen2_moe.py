"""Qwen 2 MoE and Qwen 1.5 MoE: a Qwen 2 with experts, and a shared expert that every token goes through.

Source: arXiv:2407.10671.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.linear import Linear
from .config import setting
from .decoder.config import layers_of, own, slides_of, windowed
from .decoder.expert_files import MoEFamily
from .decoder.experts import MoELayer, QwenMoEConfig, SparseMLP
from .decoder.model import Decoder


@dataclass(frozen=True)
class Qwen2MoEConfig(QwenMoEConfig):
    """The settings of a Qwen 2 with experts in all or some layers."""

    model_type = "qwen2_moe"

    unsaid: ClassVar[Mapping[str, Any]] = {**QwenMoEConfig.unsaid, "num_key_value_heads": 16}

    num_experts: int = setting(default=60, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=4, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=1408, minimum=1, held="axis")
    shared_size: int | None = setting(
        "shared_expert_intermediate_size", default=5632, minimum=1, held="axis"
    )
    attention_bias: bool = setting("qkv_bias", default=True)
    output_bias: bool | None = own(False)
    qk_norm: bool = own(False)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The experts, and the layers with a window: every second one before ``max_window_layers``."""
        found = super().derived(raw)
        first, layers = raw.get("max_window_layers"), layers_of(raw)
        window = found["sliding_window"]
        if type(first) is not int or not layers:
            return found
        slides = [window is not None and i % 2 == 0 and i < first for i in range(layers)]
        return {**found, **windowed(slides_of(raw, slides), window)}


class Qwen2MoEMLP(SparseMLP):
    """The experts, and a shared expert whose result is multiplied by a gate for each token."""

    def __init__(self, config: Qwen2MoEConfig, dtype: DType):
        super().__init__(config, dtype)
        self.shared_expert_gate = Linear(config.hidden_size, 1, dtype, DeviceRef.CPU())

    def shared(self, x: jax.Array) -> Any:
        """``σ(gate(x)) · shared_expert(x)``."""
        y = super().shared(x)
        assert y is not None
        return jax.nn.sigmoid(self.shared_expert_gate(x)) * y


class Qwen2MoELayer(MoELayer):
    """A layer of a Qwen 2 MoE."""

    sparse_class: ClassVar[Any] = Qwen2MoEMLP


class Qwen2MoE(Decoder):
    """A Qwen 2 MoE language model.

    Example:
        >>> config = Qwen2MoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, shared_size=8)
        >>> [name for name in Qwen2MoE(config).raw_state_dict() if "0.mlp.shared_expert_" in name]
        ['model.layers.0.mlp.shared_expert_gate.weight']
    """

    layer_class: ClassVar[Any] = Qwen2MoELayer


QWEN2_MOE = Qwen2MoE.family = MoEFamily.of(
    Qwen2MoE, Qwen2MoEConfig, "Qwen2MoeForCausalLM", "Qwen2MoeModel"
)
