"""Granite 4: Mamba 2 in most layers, attention without RoPE in the others, experts beside a shared MLP.

Source: transformers' ``modeling_granitemoehybrid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..nn.kv_cache.kinds import KeysValues, Shared, States
from .config import setting
from .decoder.attention import Cached, Step
from .decoder.block import FusedMLP, HybridLayer
from .decoder.config import check_kinds, kinds_of, layers_of, own
from .decoder.experts import MoEConfig, SparseMLP
from .decoder.mamba2 import Mamba2Mixer, Mamba2Parts, head_dim_of, limits_of
from .decoder.model import Decoder
from .gguf.architectures.mamba2 import GRANITE_HYBRID_GGUF
from .granitemoe import GRANITEMOE
from .parts.aliases import alias

_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


@dataclass(frozen=True)
class GraniteExpertsConfig(MoEConfig):
    """The settings of a Granite 3 MoE; ``intermediate_size`` is the inner size of an expert."""

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


class GraniteExpertsMLP(SparseMLP):
    """The experts of a Granite 3 MoE."""

    router_name: ClassVar[str] = "router"
    inner_router: ClassVar[str] = "layer"


@dataclass(frozen=True)
class GraniteHybridConfig(GraniteExpertsConfig, Mamba2Parts):
    """The settings of a Granite 4; ``intermediate_size`` is the inner size of an expert.

    Attributes:
        shared_intermediate_size: inner features of the MLP that all tokens go through.
        recurs: whether each layer has Mamba 2 instead of attention.
    """

    model_type = "granitemoehybrid"

    num_experts: int = setting("num_local_experts", default=8, held="axis", also=("num_experts",))
    shared_intermediate_size: int = setting(default=1024, minimum=1, held="axis")
    recurs: tuple = own(())

    def __post_init__(self) -> None:
        object.__setattr__(self, "recurs", tuple(self.recurs) or (True,) * self.num_hidden_layers)
        check_kinds(self.recurs, self.num_hidden_layers)
        super().__post_init__()

    @property
    def layer_kinds(self) -> tuple:
        """A kind for each layer; layers of one kind have the same tensors."""
        return self.recurs

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The states of Mamba 2, or the keys and values of attention."""
        if not self.recurs[number]:
            return super().states(number)
        return {Mamba2Mixer.group: Mamba2Mixer.kept(self)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The kinds of the layers, the heads of Mamba 2, and whether attention has RoPE."""
        kind = raw.get("position_embedding_type")
        if kind not in (None, "rope", "nope"):
            raise UnsupportedModelError(f"'position_embedding_type' {str(kind)[:60]!r}")
        key = "layers_block_type" if raw.get("layer_types") is None else "layer_types"
        found = {
            **super().derived(raw), "time_steps": limits_of(raw),
            "mamba_d_head": head_dim_of(raw, 128), "recurs": kinds_of(raw, _KINDS, key=key),
        }  # fmt: skip
        if kind != "rope":
            found["rotates"] = (False,) * layers_of(raw)
        if raw.get("num_local_experts") == 0:  # the other numbers of experts are not used
            found |= {"num_experts": 0, "num_experts_per_tok": 1}
        return found


class SharedMLP(FusedMLP):
    """The MLP that all tokens go through, with the attribute names of Granite's files."""

    gate_up_proj, down_proj = alias("input_linear"), alias("output_linear")

    def sharding_rules(self) -> dict[str, Any]:
        """The rules of :class:`FusedMLP`, with this class's names."""
        names = ("gate_up_proj", "input_linear"), ("down_proj", "output_linear")
        found = super().sharding_rules()
        for old, new in names:
            found = {name.replace(old, new): rule for name, rule in found.items()}
        return found


class GraniteHybridLayer(HybridLayer):
    """Mamba 2 (``mamba``) or attention (``self_attn``), then experts, if there are any, and a shared MLP."""

    recurrent: ClassVar[tuple[str, Any]] = "mamba", Mamba2Mixer
    mlp = alias("shared_mlp")

    def __init__(self, config: GraniteHybridConfig, number: int, dtype: DType):
        super().__init__(config, number, dtype)
        self.has_experts = config.sparse[number]
        if self.has_experts:
            self.block_sparse_moe = GraniteExpertsMLP(config, dtype)

    def make_mlp(self, config: Any, number: int, dtype: DType) -> SharedMLP:
        """Makes the shared MLP."""
        inner = config.shared_intermediate_size
        return SharedMLP(config.hidden_size, inner, dtype, config.hidden_act)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        y, cached = self.mixed(self.input_layernorm(x), step, cached, layer)
        x = self.added(x, y)
        h = self.post_attention_layernorm(x)
        y = self.mlp(h)
        y = y + self.block_sparse_moe(h) if self.has_experts else y
        return self.added(x, y), cached


class GraniteHybrid(Decoder):
    """A Granite 4 language model.

    Example:
        >>> config = GraniteHybridConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2, num_experts=0,
        ...     mamba_n_heads=4, mamba_d_head=4, mamba_d_state=6, recurs=(True, False, True))
        >>> cache = GraniteHybrid(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, {name: a.shape for name, a in cache.more["mamba"].arrays.items()}
        (1, {'conv': (2, 1, 3, 28), 'ssm': (2, 1, 4, 4, 6)})
    """

    layer_class: ClassVar[Any] = GraniteHybridLayer


GRANITE_HYBRID = GraniteHybrid.family = GRANITEMOE.like(
    GraniteHybrid, GraniteHybridConfig, "GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel",
    gguf=GRANITE_HYBRID_GGUF,
)  # fmt: skip
