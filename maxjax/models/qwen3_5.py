"""Qwen 3.5 (text), dense and with experts: a Qwen3-Next with separate projections for the delta rule.

Source: transformers' ``modeling_qwen3_5`` and ``modeling_qwen3_5_moe``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..nn.linear import Linear, linear_rules, linears
from .config import setting
from .decoder.config import own
from .decoder.gated_delta import GatedDelta
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.qwen3_next import QWEN3_5_GGUF, QWEN3_5_MOE_GGUF
from .names import DECODER, MULTIMODAL, Drop, Names
from .qwen3_next import PREDICTING, Qwen3NextConfig, Qwen3NextLayer


@dataclass(frozen=True)
class Qwen35MoEConfig(Qwen3NextConfig):
    """The settings of a Qwen 3.5 with experts in all layers."""

    model_type = "qwen3_5_moe_text"
    # No layer has an MLP of this size.
    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2, "intermediate_size": 1}

    num_experts: int = setting(default=256, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Every layer has experts, and the shares of the chosen experts are normalised."""
        dense = dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"))
        return {**super().derived(ChainMap(dense, raw)), "norm_topk_prob": True}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Qwen35Config(Qwen3NextConfig):
    """The settings of a Qwen 3.5 without experts."""

    model_type = "qwen3_5_text"
    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4}

    num_experts: int = own(0)
    num_experts_per_tok: int = own(1)
    norm_topk_prob: bool = own(True)
    moe_intermediate_size: int | None = own(None)
    shared_size: int | None = own(None)

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`: all numbers are compared."""
        return raw

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`Qwen3NextConfig.derived`, without experts."""
        return {**super().derived(raw), "num_experts": 0, "sparse": ()}


class Qwen35Delta(GatedDelta):
    """The gated delta rule with four linear layers: for queries, keys and values; gate; share; and decay."""

    def make_projections(self, size: int, dtype: DType) -> None:
        """Makes ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``."""
        heads, keys = self.value_heads, self.key_heads * self.key_dim
        values = heads * self.value_dim
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = (
            Linear(size, width, dtype, DeviceRef.CPU())
            for width in (2 * keys + values, values, heads, heads)
        )

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """As :meth:`GatedDelta.project`."""
        layers = [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]
        mixed, z, b, a = (y.astype(x.dtype) for y in linears(layers, x))
        return mixed, z.reshape(*z.shape[:-1], self.value_heads, self.value_dim), b, a

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``in_proj_qkv`` along its rows, and the other projections between heads."""
        rules = super().sharding_rules() | linear_rules("in_proj_qkv", ShardingStrategy.rowwise(1))
        for name, width in (("z", self.value_dim), ("b", 1), ("a", 1)):
            segment = Segment.head_aware(self.value_heads, width)
            rules |= linear_rules(f"in_proj_{name}", ShardingStrategy.segmented(1, 0, [segment]))
        return rules


class Qwen35MoELayer(Qwen3NextLayer):
    """A layer of a Qwen 3.5, with experts or without."""

    delta_class: ClassVar[Any] = Qwen35Delta


class Qwen35(Decoder):
    """A Qwen 3.5 language model without experts.

    Example:
        >>> config = Qwen35Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=8)
        >>> config.linear, Qwen35(config).cache(1, 16).num_layers
        ((True, True, True, False), 1)
    """

    layer_class: ClassVar[Any] = Qwen35MoELayer


class Qwen35MoE(Decoder):
    """A Qwen 3.5 language model with experts."""

    layer_class: ClassVar[Any] = Qwen35MoELayer


QWEN3_5 = Qwen35.family = Family.of(
    Qwen35,
    Qwen35Config,
    "Qwen3_5ForCausalLM",
    "Qwen3_5TextModel",
    names=Names(FusedExperts(), *MULTIMODAL, Drop(*PREDICTING, kept=True), *DECODER),
    gguf=QWEN3_5_GGUF,
)
QWEN3_5_MOE = Qwen35MoE.family = Family.of(
    Qwen35MoE,
    Qwen35MoEConfig,
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeTextModel",
    names=Names(FusedExperts(), *MULTIMODAL, Drop(*PREDICTING, kept=True), *DECODER),
    gguf=QWEN3_5_MOE_GGUF,
)
