"""Experts beside an MLP, with a router that normalises and scales its inputs, and factors of shares (Gemma 4).

Shapes: N tokens, hidden size E, X experts.

Source: transformers' ``modeling_gemma4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
from ...nn.layer import Module
from ...nn.linear import Linear
from ..config import setting
from .config import DecoderConfig
from .experts import MAPS_PROJ, SparseMLP
from .norm import unit_rms


@dataclass(frozen=True)
class ExpertsBeside(DecoderConfig):
    """The settings of a decoder that may have experts beside each MLP.

    Attributes:
        has_experts: whether there are experts.
        num_experts, num_experts_per_tok, moe_intermediate_size: number of experts, of those that a
            token chooses, and of an expert's inner features; all are 0 without experts.
    """

    maps: ClassVar[tuple[str, str, str]] = MAPS_PROJ
    shared_size: ClassVar[None] = None

    has_experts: bool = setting("enable_moe_block", default=False)
    num_experts: int = setting(default=0, held="axis")
    num_experts_per_tok: int = setting("top_k_experts", default=0, held="axis")
    moe_intermediate_size: int = setting(default=0, held="axis")

    def __post_init__(self) -> None:
        if not self.has_experts:
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
                object.__setattr__(self, name, 0)
        super().__post_init__()

    @property
    def expert_size(self) -> int:
        """The inner features of an expert."""
        return self.moe_intermediate_size


class ScaledRouter(Module):
    """Scores experts by a linear layer over normalised hidden states, whose features are scaled by ``scale``."""

    def __init__(self, config: Any, dtype: DType):
        super().__init__()
        self.proj = Linear(config.hidden_size, config.num_experts, dtype, DeviceRef.CPU())
        self.scale = Weight("scale", dtype, (config.hidden_size,), DeviceRef.CPU())
        self.per_expert_scale = Weight(
            "per_expert_scale", dtype, (config.num_experts,), DeviceRef.CPU()
        )
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → scores ``[..., X]``."""
        wide = unit_rms(x.astype(jnp.float32), self.epsilon)
        scale = jnp.asarray(self.scale).astype(x.dtype) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
        return self.proj(wide.astype(x.dtype) * scale)


class ScaledExperts(SparseMLP):
    """Experts whose shares, after they are normalised to sum to 1, are multiplied by a factor of each expert."""

    router_name: ClassVar[str] = "router"
    route: ClassVar[Mapping[str, Any]] = {"shares": "softmax of chosen"}

    def make_router(self, config: Any, dtype: DType) -> Module:
        """Makes the :class:`ScaledRouter`."""
        return ScaledRouter(config, dtype)

    def choose(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """:meth:`SparseMLP.choose`, with shares times ``per_expert_scale``."""
        chosen, shares = super().choose(tokens)
        scale = jnp.asarray(self.router_layer.per_expert_scale).astype(jnp.float32)
        return chosen, shares * scale[chosen]
