"""ERNIE 4.5 with experts in some layers; a bias balances how often experts are chosen.

Source: ERNIE 4.5 Technical Report; transformers' ``modeling_ernie4_5_moe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..nn.layer import Module
from ..nn.moe import Routing
from .config import setting
from .decoder.config import layers_of, own
from .decoder.experts import MoEConfig, MoELayer, SparseMLP
from .decoder.model import Decoder
from .family import Family
from .fused_experts import FusedExperts
from .gguf.architectures.ernie4_5 import ERNIE4_5_MOE_GGUF
from .names import DECODER, Drop, Names, Rename
from .parts.rotary import Rope


@dataclass(frozen=True)
class Ernie45MoEConfig(MoEConfig):
    """The settings of an ERNIE 4.5 with experts.

    Attributes:
        n_shared: width of the shared MLP, as a multiple of an expert's.
        norm_min: lower bound of the sum that shares are divided by.
        first, interval: index from which layers may have experts, and n, where every n-th of these has.
    """

    model_type = "ernie4_5_moe"
    fixed = {"norm_topk_prob": True}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4, "rope_theta": 5e5}

    max_position_embeddings: int = setting(default=131072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    tie_word_embeddings: bool = setting(default=True)
    num_experts: int = setting(
        "moe_num_experts", default=64, minimum=1, held="axis", also=("num_experts",)
    )
    num_experts_per_tok: int = setting(
        "moe_k", default=6, minimum=1, held="axis", also=("num_experts_per_tok",)
    )
    moe_intermediate_size: int | None = setting(default=1536, minimum=1, held="axis")
    first: int = setting("moe_layer_start_index", default=1)
    interval: int = setting("moe_layer_interval", default=1, minimum=1)
    n_shared: int = setting("moe_num_shared_experts", default=2, held="axis")
    norm_min: float = setting("moe_norm_min", default=1e-12)
    attention_bias: bool = setting("use_bias", default=False)
    mlp_bias: bool = setting("use_bias", default=False)
    head_bias: bool = setting("use_bias", default=False)
    rope: Rope = own(Rope(5e5, interleaved=True))

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared_size", self.n_shared * self.expert_size)
        if not self.sparse:
            every = range(self.num_hidden_layers)
            sparse = tuple(i >= self.first and (i + 1) % self.interval == 0 for i in every)
            object.__setattr__(self, "sparse", sparse)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with experts.

        Raises:
            ValueError: a setting that gives these layers is not an integer in range.
        """
        keys = {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}
        given = {
            key: default if raw.get(key) is None else raw[key] for key, default in keys.items()
        }
        for key, value in given.items():
            if type(value) is not int or value < -1 or (key.endswith("interval") and value < 1):
                raise ValueError(f"{key!r} is {str(value)[:60]}, not a number of layers")
        first, last, interval = given.values()
        count = layers_of(raw)
        last = count - 1 if last == -1 else last
        sparse = tuple((i + 1) % interval == 0 and first <= i <= last for i in range(count))
        return {"sparse": sparse, "sliding_window": None}


class Statics(Module):
    """The bias that balances how often experts are chosen, in the files' shape ``[1, X]``."""

    def __init__(self, count: int):
        super().__init__()
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (1, count), DeviceRef.CPU()
        )

    def __call__(self) -> jax.Array:
        """The bias ``[X]``."""
        return self.e_score_correction_bias.__jax_array__()[0]


class Ernie45MLP(SparseMLP):
    """Experts that are chosen by softmax plus a balancing bias, and an MLP that every token goes through."""

    shared_name: ClassVar[str] = "shared_experts"

    def __init__(self, config: Ernie45MoEConfig, dtype: DType):
        super().__init__(config, dtype)
        self.moe_statics = Statics(config.num_experts)

    def routes(self, config: Any) -> Routing:
        """A softmax over all experts; the chosen shares are normalised."""
        count = config.num_experts_per_tok
        return Routing(count, "softmax", normalised=True, least=config.norm_min, wide=True)

    def correction(self) -> jax.Array:
        """The balancing bias."""
        return self.moe_statics()


class Ernie45Layer(MoELayer):
    """A layer of an ERNIE 4.5."""

    sparse_class: ClassVar[Any] = Ernie45MLP


class Ernie45MoE(Decoder):
    """An ERNIE 4.5 language model with experts.

    Example:
        >>> config = Ernie45MoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, num_experts=8)
        >>> [n for n in Ernie45MoE(config).raw_state_dict() if "1.mlp.moe_statics" in n]
        ['model.layers.1.mlp.moe_statics.e_score_correction_bias']
    """

    layer_class: ClassVar[Any] = Ernie45Layer


ERNIE4_5_MOE = Ernie45MoE.family = Family.of(
    Ernie45MoE,
    Ernie45MoEConfig,
    "Ernie4_5_MoeForCausalLM",
    "Ernie4_5_MoeModel",
    names=Names(
        FusedExperts(),
        Drop("*.mtp_*", "mtp_*", kept=True),
        *DECODER,
        Rename({"gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction_bias"}),
    ),
    gguf=ERNIE4_5_MOE_GGUF,
)
