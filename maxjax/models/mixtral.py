"""Mixtral: a Mistral whose MLPs are mixtures of experts.

Source: arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import own
from .decoder.expert_files import MoEFamily
from .decoder.experts import MAPS_W, MoEConfig, MoELayer
from .decoder.model import Decoder
from .parts.aliases import alias


@dataclass(frozen=True)
class MixtralConfig(MoEConfig):
    """The settings of a Mixtral: a Mistral whose layers all have experts."""

    model_type = "mixtral"
    fixed = {"norm_topk_prob": True, "attention_bias": False, "mlp_bias": False}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "rope_theta": 1e6}

    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(
        "num_local_experts", default=8, minimum=1, held="axis", also=("num_experts",)
    )
    moe_intermediate_size: int | None = own(None)
    maps: tuple = own(MAPS_W)


class MixtralLayer(MoELayer):
    """A layer of a Mixtral, whose checkpoints call the mixture of experts ``block_sparse_moe``."""

    mlp = alias("block_sparse_moe")


class Mixtral(Decoder):
    """A Mixtral language model.

    Example:
        >>> model = Mixtral(MixtralConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "1.block_sparse_moe.experts.7" in name][0]
        'model.layers.1.block_sparse_moe.experts.7.w1.weight'
    """

    layer_class: ClassVar[Any] = MixtralLayer


MIXTRAL = Mixtral.family = MoEFamily.of(
    Mixtral, MixtralConfig,
    renamed=((".mlp.gate.weight", ".block_sparse_moe.gate.weight"),),
    experts="block_sparse_moe.experts.#.*.weight",
    maps=MAPS_W,
)  # fmt: skip
