"""MiniMax M2: experts that are chosen by sigmoids plus a balancing bias, and norms over all heads together.

Source: transformers' ``modeling_minimax_m2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from .config import setting
from .decoder.config import own
from .decoder.experts import MAPS_W, MixtralLayer, MoEConfig, SparseMLP
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.minimax_m2 import MINIMAX_M2_GGUF
from .names import DECODER, Names, Rename
from .parts.rotary import Rope, read_rope


@dataclass(frozen=True)
class MiniMaxM2Config(MoEConfig):
    """The settings of a MiniMax M2; ``intermediate_size`` is the inner size of an expert."""

    model_type = "minimax_m2"
    fixed = {
        "attention_bias": False, "mlp_bias": False, "sliding_window": None, "norm_topk_prob": True
    }  # fmt: skip

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8}

    head_dim: int | None = setting(default=128, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=196608, minimum=1)
    num_experts: int = setting(
        "num_local_experts", default=256, minimum=1, held="axis", also=("num_experts",)
    )
    moe_intermediate_size: int | None = own(None)
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    maps: tuple = own(MAPS_W)
    qk_norm: bool | str = own("all")

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
        """The RoPE of a part of each head: the first ``rotary_dim`` features in published files."""
        width, head = raw.get("rotary_dim"), raw.get("head_dim")
        head = cls.head_dim if head is None else head
        part = 1.0
        if width is not None:
            if not all(type(n) is int and n > 0 for n in (width, head)):
                raise ValueError(f"'rotary_dim' is {str(width)[:60]}, not a part of 'head_dim'")
            part = width / head
        return {"rope": read_rope(raw, context, 5e6, part=part)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Checks the settings; no value is derived.

        Raises:
            UnsupportedModelError: queries and keys are normalised, or experts are chosen, in another way.
        """
        if raw.get("qk_norm_type") not in (None, "per_layer") or raw.get("use_qk_norm") is False:
            raise UnsupportedModelError("'use_qk_norm' other than true, of type 'per_layer'")
        if raw.get("scoring_func") not in (None, "sigmoid"):
            raise UnsupportedModelError("'scoring_func' other than 'sigmoid'")
        return {}


class MiniMaxM2MLP(SparseMLP):
    """Experts that are chosen by sigmoids; the balancing bias is beside the router."""

    route: ClassVar[Mapping[str, Any]] = {"shares": "sigmoid", "normalised": True}

    def __init__(self, config: MiniMaxM2Config, dtype: DType):
        super().__init__(config, dtype)
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", dtype, (config.num_experts,), DeviceRef.CPU()
        )

    def correction(self) -> Weight:
        """The balancing bias."""
        return self.e_score_correction_bias


class MiniMaxM2Layer(MixtralLayer):
    """A layer of a MiniMax M2, whose files call the mixture of experts ``block_sparse_moe``."""

    sparse_class: ClassVar[Any] = MiniMaxM2MLP


class MiniMaxM2(Decoder):
    """A MiniMax M2 language model.

    Example:
        >>> config = MiniMaxM2Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, num_experts=8, head_dim=4)
        >>> [n for n in MiniMaxM2(config).raw_state_dict() if "layers.1" in n and "_bias" in n]
        ['model.layers.1.block_sparse_moe.e_score_correction_bias']
    """

    layer_class: ClassVar[Any] = MiniMaxM2Layer


MINIMAX_M2 = MiniMaxM2.family = Family.of(
    MiniMaxM2,
    MiniMaxM2Config,
    names=Names(
        FusedExperts("block_sparse_moe.experts.#.*.weight", ("w1", "w3", "w2")),
        *DECODER,
        Rename(
            {
                ".mlp.gate.weight": ".block_sparse_moe.gate.weight",
                ".mlp.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
            }
        ),
    ),
    gguf=MINIMAX_M2_GGUF,
)
