"""Phi-3.5-MoE and Phi-mini-MoE: a Mixtral with LayerNorm and two experts per token, with shares by SparseMixer.

The share of each chosen expert is a softmax over the experts with scores near its own. llama.cpp computes other
norms and shares for its architecture of this name, so maxjax has no GGUF files of this family.
Source: arXiv:2404.14219, for the shares arXiv:2409.12136; transformers' ``modeling_phimoe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..errors import UnsupportedModelError
from ..nn.rope_scaling import LongRoPEScalingParams
from .config import setting
from .decoder.config import own
from .decoder.experts import MAPS_W, MixtralLayer, MoEConfig, SparseMLP
from .decoder.model import Decoder
from .encoder.config import refuse
from .family import Family
from .fused_experts import FusedExperts
from .names import DECODER, Names, Rename
from .parts.rotary import rope_settings


@dataclass(frozen=True)
class PhiMoEConfig(MoEConfig):
    """The settings of a Phi with experts; ``intermediate_size`` is the inner size of an expert."""

    model_type = "phimoe"

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "rope_theta": 1e6}

    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    num_experts: int = setting(
        "num_local_experts", default=16, minimum=2, held="axis", also=("num_experts",)
    )
    moe_intermediate_size: int | None = own(None)
    head_bias: bool = setting("lm_head_bias", default=False)
    norm: str = own("layer")
    maps: tuple = own(MAPS_W)
    norm_topk_prob: bool = own(False)

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE; with LongRoPE, its magnitude is ``short_mscale``.

        Raises:
            UnsupportedModelError: ``short_mscale`` and ``long_mscale`` differ.
        """
        found, given = super().ropes(raw, context), rope_settings(raw)[1]
        short, long = (given.get(f"{kind}_mscale") for kind in ("short", "long"))
        if not isinstance(found["rope"].scaling, LongRoPEScalingParams):
            return found
        if not isinstance(short, (int, float)) or short != long:
            raise UnsupportedModelError("'short_mscale' other than 'long_mscale' of a phimoe")
        return {"rope": replace(found["rope"], magnitude=float(short))}

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The factor of cos and sin of LongRoPE under keys of the family."""
        if not isinstance(self.rope.scaling, LongRoPEScalingParams):
            return raw
        own = dict.fromkeys(("short_mscale", "long_mscale"), self.rope.magnitude)
        return {**raw, "rope_scaling": {**raw["rope_scaling"], **own}}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Checks that a token has two experts, and that the tolerance of near scores is 1 %."""
        refuse(raw, {"num_experts_per_tok": 2, "router_jitter_noise": 0.01}, "Phi-MoE")
        return {"mlp_bias": False, "norm_topk_prob": False}


class PhiMoEMLP(SparseMLP):
    """Experts whose shares are softmaxes over near scores, without the experts that were chosen before."""

    # Two softmaxes: over the scores near that of the first expert, and over those near that of the second.
    route: ClassVar[Mapping[str, Any]] = {"shares": "softmax of near"}


class PhiMoELayer(MixtralLayer):
    """A layer of a Phi with experts."""

    sparse_class: ClassVar[Any] = PhiMoEMLP


class PhiMoE(Decoder):
    """A Phi language model with experts.

    Example:
        >>> model = PhiMoE(PhiMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "1.block_sparse_moe.gate" in name]
        ['model.layers.1.block_sparse_moe.gate.weight']
    """

    layer_class: ClassVar[Any] = PhiMoELayer


PHIMOE = PhiMoE.family = Family.of(
    PhiMoE,
    PhiMoEConfig,
    "PhimoeForCausalLM",
    "PhiMoEForCausalLM",
    "PhimoeModel",
    names=Names(
        FusedExperts("block_sparse_moe.experts.#.*.weight", ("w1", "w3", "w2")),
        *DECODER,
        Rename({".mlp.router.weight": ".block_sparse_moe.gate.weight"}),
    ),
)
