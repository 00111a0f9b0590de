"""LFM2 with experts (8B-A1B): an LFM2 with a mixture of experts in all layers but the first ones.

Source: arXiv:2511.23404; transformers' ``modeling_lfm2_moe``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..nn.moe import Routing
from .config import setting
from .decoder.config import layers_of, own
from .decoder.experts import MAPS_W, MoEConfig, MoELayer, SparseMLP, after_dense
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.lfm2 import LFM2_MOE_GGUF
from .lfm2 import LFM2, LFM2Config, LFM2Layer
from .names import ROPE_TABLES, Headless, Names

_MLP = "feed_forward"


@dataclass(frozen=True)
class LFM2MoEConfig(LFM2Config, MoEConfig):
    """The settings of an LFM2 with experts; with ``use_expert_bias`` there is a bias that balances the experts."""

    model_type = "lfm2_moe"
    unsaid: ClassVar[Mapping[str, Any]] = {
        **LFM2Config.unsaid, "num_dense_layers": 2, "intermediate_size": 7168,
    }  # fmt: skip

    num_experts: int = setting(default=32, minimum=1, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=4, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=1792, minimum=1, held="axis")
    use_expert_bias: bool = setting(default=True)
    routed_scaling_factor: float = setting(default=1.0)
    maps: tuple = own(MAPS_W)

    @property
    def layer_kinds(self) -> tuple:
        """A kind for each layer; layers of one kind have the same tensors."""
        return tuple(zip(self.convolves, self.sparse, strict=True))

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`: the MLP's size is not adjusted."""
        return super(LFM2Config, cls).bounded_sizes(raw)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`LFM2Config.derived` without adjusting the MLP's size; and the layers with experts."""
        found = super().derived(ChainMap({"block_auto_adjust_ff_dim": False}, raw))  # type: ignore[arg-type]
        return {**found, "sparse": after_dense(raw, layers_of(raw), key="num_dense_layers")}


class LFM2MoEMLP(SparseMLP):
    """Experts that are chosen by sigmoids; the balancing bias ``expert_bias`` is beside the router."""

    def __init__(self, config: LFM2MoEConfig, dtype: DType):
        super().__init__(config, dtype)
        self.expert_bias = (
            Weight("expert_bias", DType.float32, (config.num_experts,), DeviceRef.CPU())
            if config.use_expert_bias else None
        )  # fmt: skip

    def routes(self, config: Any) -> Routing:
        """A routing by sigmoids, whose shares may be normalised."""
        return Routing(
            config.num_experts_per_tok, "sigmoid", normalised=config.norm_topk_prob, more=1e-6,
            factor=config.routed_scaling_factor,
        )  # fmt: skip

    def correction(self) -> Any:
        """The balancing bias, or None."""
        return self.expert_bias


class LFM2MoELayer(LFM2Layer, MoELayer):
    """A layer of an LFM2 with an MLP or a mixture of experts."""

    sparse_class: ClassVar[Any] = LFM2MoEMLP


class LFM2MoE(LFM2):
    """An LFM2 language model with experts.

    Example:
        >>> config = LFM2MoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, num_experts=8)
        >>> [name for name in LFM2MoE(config).raw_state_dict() if "1.feed_forward.expert_bias" in name]
        ['model.layers.1.feed_forward.expert_bias']
    """

    layer_class: ClassVar[Any] = LFM2MoELayer


LFM2_MOE = LFM2MoE.family = Family.of(
    LFM2MoE,
    LFM2MoEConfig,
    "Lfm2MoeForCausalLM",
    "Lfm2MoeModel",
    names=Names(
        FusedExperts(
            f"{_MLP}.experts.#.*.weight",
            ("w1", "w3", "w2"),
            gate_up=(f"{_MLP}.experts.gate_up_proj",),
            down=(f"{_MLP}.experts.down_proj",),
        ),
        ROPE_TABLES,
        Headless("model.", ("embed_tokens.", "layers.", "embedding_norm.")),
    ),
    gguf=LFM2_MOE_GGUF,
)
