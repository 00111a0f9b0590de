"""OLMoE: a Llama with many small experts, and norms of queries and keys over all heads together.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_norm(q_proj(h))), rope(k_norm(k_proj(h))), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        chosen, shares = the k experts with the largest softmax(gate(h)), and these values
        x = x + Σ share · down_proj(silu(gate_proj(h)) · up_proj(h))              over the chosen experts
    logits = lm_head(norm(x))

Source: arXiv:2409.02060; transformers' ``modeling_olmoe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from .gguf.names import HEAD_NORMS, expert_names
from .gguf.table import GGUFTable
from .names import DECODER, Names
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
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    split_heads,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class OLMoEConfig(LanguageModelConfig):
    """The settings of an OLMoE: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F, the inner features of an expert.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias: whether the linear layers of attention have biases.
        clip_qkv: bound to which queries, keys and values are clipped before RoPE; None: they are not.
        num_experts, num_experts_per_tok: X and k.
        norm_topk_prob: whether the shares of the chosen experts are normalised to sum to 1.
    """

    model_type = "olmoe"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(4096, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = size(default=64, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=8)
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False


class OLMoEAttention(Module):
    """Attention with rotary positions; queries and keys are normalised over all heads, and all three clipped."""

    def __init__(self, config: OLMoEConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.clip = config.clip_qkv
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.q_norm = RMSNorm(H * D, dtype, eps, multiply_before_cast=False)
        self.k_norm = RMSNorm(K * D, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k = self.q_norm(q.astype(x.dtype)), self.k_norm(k.astype(x.dtype))
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if self.clip is not None:
            q, k, v = (jnp.clip(a, -self.clip, self.clip) for a in (q, k, v))
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class OLMoESparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k experts with the highest scores."""

    def __init__(self, config: OLMoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_experts
        self.top_k = config.num_experts_per_tok
        self.shares = "softmax of chosen" if config.norm_topk_prob else "softmax"
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, self.shares)  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class OLMoEBlock(Module):
    """One layer: attention, then the mixture of experts, each added to the hidden states."""

    def __init__(self, config: OLMoEConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = OLMoEAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = OLMoESparseMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class OLMoEModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: OLMoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(OLMoEBlock(config, dtype) for _ in range(config.num_hidden_layers))
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class OLMoE(LanguageModel):
    """An OLMoE language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = OLMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, num_experts=8)
        >>> OLMoE(config, stacked=False).model.layers[0].self_attn.k_norm.weight.shape
        [Dim(8)]
    """

    def __init__(self, config: OLMoEConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = OLMoEModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


OLMOE_GGUF = GGUFTable(
    "olmoe",
    {
        **HEAD_NORMS,
        ".ffn_gate": None,
        ".ffn_up": None,
        ".ffn_down": None,
        **expert_names(),
    },
    keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    constants={"hidden_act": "silu", "norm_topk_prob": False, "clip_qkv": None},
    biases=(),
)
OLMOE = OLMoE.family = Family.of(
    OLMoE,
    OLMoEConfig,
    "OlmoeForCausalLM",
    "OlmoeModel",
    names=Names(FusedExperts(), *DECODER),
    gguf=OLMOE_GGUF,
)
