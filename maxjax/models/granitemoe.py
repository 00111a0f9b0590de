"""Granite 3 with experts: a Granite 3 in which each MLP is a mixture of experts.

::

    x = embedding_multiplier · embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + residual_multiplier · o_proj(softmax(attention_multiplier · q kᵀ) v)
        h = post_attention_layernorm(x)
        chosen, shares = the k experts with the highest router(h), and the softmax over these k scores
        x = x + residual_multiplier · Σ share · down_proj(silu(gate_proj(h)) · up_proj(h))   over the chosen experts
    logits = lm_head(norm(x)) / logits_scaling

Files hold the gate and up projections of all experts of a layer as one tensor, ``input_linear``, and the down
projections as another, ``output_linear``.

Source: arXiv:2408.13359; transformers' ``modeling_granitemoe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.names import expert_names
from .granite import GRANITE_GGUF, with_rope
from .names import DECODER, Names, Rename
from .parts import (
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    split_heads,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class GraniteMoEConfig(LanguageModelConfig):
    """The settings of a Granite with experts: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        embedding_multiplier, attention_multiplier, residual_multiplier: factors of the embeddings, of the
            attention scores, and of what attention and MLP add to the hidden states.
        logits_scaling: divisor of the logits.
        intermediate_size: F, the inner features of an expert.
        num_local_experts, num_experts_per_tok: X and k.
    """

    model_type = "granitemoe"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(2048, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    num_local_experts: int = size(default=8, aliases=("num_experts",))
    num_experts_per_tok: int = size(default=2)
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = config_field(1.0, minimum=1e-9)


class GraniteMoEAttention(Module):
    """Attention with rotary positions, whose scores have a factor of the configuration."""

    def __init__(self, config: GraniteMoEConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.scale = config.attention_multiplier
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.scale)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class GraniteMoERouter(Module):
    """The scores of the experts, by a linear layer without a bias."""

    def __init__(self, config: GraniteMoEConfig, dtype: DType):
        super().__init__()
        self.layer = Linear(config.hidden_size, config.num_local_experts, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)  # [B, T, X]


class GraniteMoESparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k experts with the highest scores."""

    def __init__(self, config: GraniteMoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.router = GraniteMoERouter(config, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.router(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, "softmax of chosen")  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]


class GraniteMoEBlock(Module):
    """One layer: attention, then the mixture of experts, each added to the hidden states with a factor."""

    def __init__(self, config: GraniteMoEConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.residual = config.residual_multiplier
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = GraniteMoEAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.block_sparse_moe = GraniteMoESparseMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + self.residual * y
        return x + self.residual * self.block_sparse_moe(self.post_attention_layernorm(x)), cache


class GraniteMoEModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: GraniteMoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            GraniteMoEBlock(config, dtype) for _ in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class GraniteMoE(LanguageModel):
    """A Granite language model with experts.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = GraniteMoE(GraniteMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "0.block_sparse_moe.router" in name]
        ['model.layers.0.block_sparse_moe.router.layer.weight']
    """

    def __init__(
        self, config: GraniteMoEConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = GraniteMoEModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``."""
        return super().logits(x) * (1 / self.config.logits_scaling)


GRANITEMOE_GGUF = replace(
    GRANITE_GGUF,
    architecture="granitemoe",
    tensors={**GRANITE_GGUF.tensors, **expert_names("block_sparse_moe", "router.layer")},
    keys={
        **GRANITE_GGUF.keys, "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    read=with_rope, biases=("attn_q", "attn_k", "attn_v", "attn_output"),
)  # fmt: skip
_SPARSE = "block_sparse_moe"
GRANITEMOE = GraniteMoE.family = Family.of(
    GraniteMoE,
    GraniteMoEConfig,
    "GraniteMoeForCausalLM",
    "GraniteMoeModel",
    names=Names(
        FusedExperts(
            f"{_SPARSE}.experts.#.*.weight",
            gate_up=(f"{_SPARSE}.input_linear", f"{_SPARSE}.experts.gate_up_proj"),
            down=(f"{_SPARSE}.output_linear", f"{_SPARSE}.experts.down_proj"),
            suffix=".weight",
            written=True,
        ),
        *DECODER,
        Rename({f"{_SPARSE}.router.weight": f"{_SPARSE}.router.layer.weight"}, in_modules=True),
    ),
    gguf=GRANITEMOE_GGUF,
)
