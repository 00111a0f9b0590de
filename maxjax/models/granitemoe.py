"""Granite 3 MoE: a Granite 3 whose MLPs are mixtures of experts.

Source: transformers' ``modeling_granitemoe``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import own
from .decoder.expert_files import MoEFamily, Together
from .decoder.experts import MixtralLayer, MoEConfig, SparseMLP
from .decoder.model import Decoder
from .gguf.architectures.granite import GRANITEMOE_GGUF


@dataclass(frozen=True)
class GraniteMoEConfig(MoEConfig):
    """The settings of a Granite 3 MoE; ``intermediate_size`` is the inner size of an expert."""

    model_type = "granitemoe"
    fixed = {"sliding_window": None, "mlp_bias": False}

    embedding_scale: float = setting("embedding_multiplier", default=1.0)
    query_scale: float | None = setting("attention_multiplier", default=1.0)
    residual_scale: float = setting("residual_multiplier", default=1.0)
    logits_scaling: float = setting(default=1.0, minimum=1e-9)

    num_experts: int = setting(
        "num_local_experts", default=8, minimum=1, held="axis", also=("num_experts",)
    )
    moe_intermediate_size: int | None = own(None)
    norm_topk_prob: bool = own(True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_scale", 1 / self.logits_scaling)
        super().__post_init__()


class GraniteMoEMLP(SparseMLP):
    """The experts of a Granite 3 MoE."""

    router_name: ClassVar[str] = "router"
    inner_router: ClassVar[str] = "layer"


class GraniteMoELayer(MixtralLayer):
    """A layer of a Granite 3 MoE, whose files call the mixture of experts ``block_sparse_moe``."""

    sparse_class: ClassVar[Any] = GraniteMoEMLP


class GraniteMoE(Decoder):
    """A Granite 3 MoE language model.

    Example:
        >>> model = GraniteMoE(GraniteMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "0.block_sparse_moe.router" in name]
        ['model.layers.0.block_sparse_moe.router.layer.weight']
    """

    layer_class: ClassVar[Any] = GraniteMoELayer


_SPARSE = "block_sparse_moe"
GRANITEMOE = GraniteMoE.family = MoEFamily.of(
    GraniteMoE, GraniteMoEConfig, "GraniteMoeForCausalLM", "GraniteMoeModel",
    gguf=GRANITEMOE_GGUF,
    renamed=((f"{_SPARSE}.router.weight", f"{_SPARSE}.router.layer.weight"),),
    experts=f"{_SPARSE}.experts.#.*.weight",
    together=Together(
        (f"{_SPARSE}.input_linear", f"{_SPARSE}.experts.gate_up_proj"),
        (f"{_SPARSE}.output_linear", f"{_SPARSE}.experts.down_proj"),
        suffix=".weight", written=True,
    ),
)  # fmt: skip
