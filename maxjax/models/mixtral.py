"""Mixtral: a Mistral in which each MLP is a mixture of experts.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        chosen, shares = the k experts with the highest gate(h), and the softmax over these k scores
        x = x + Σ share · w2(silu(w1(h)) · w3(h))            over the chosen experts
    logits = lm_head(norm(x))

Source: arXiv:2401.04088.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .names import DECODER, Names, Rename
from .parts import (
    CAUSAL,
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
    sliding,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class MixtralConfig(LanguageModelConfig):
    """The settings of a Mixtral: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F, the inner features of an expert.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        sliding_window: number of tokens that a token attends to, itself included; None: all before it.
        num_local_experts, num_experts_per_tok: X and k.
    """

    model_type = "mixtral"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(131_072, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=1e6)
    sliding_window: int | None = config_field(None, minimum=1)
    num_local_experts: int = size(default=8, aliases=("num_experts",))
    num_experts_per_tok: int = size(default=2)
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for as many KV heads as query heads."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 8}), **values)


class MixtralAttention(Module):
    """Attention with rotary positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: MixtralConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, window = config.hidden_size, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, K * D, dtype)
        self.v_proj = Linear(E, K * D, dtype)
        self.o_proj = Linear(H * D, E, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class MixtralSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k experts with the highest scores."""

    def __init__(self, config: MixtralConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, ("w1", "w3", "w2"), config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, "softmax of chosen")  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class MixtralBlock(Module):
    """One layer: attention, then the mixture of experts, each added to the hidden states."""

    def __init__(self, config: MixtralConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = MixtralAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.block_sparse_moe = MixtralSparseMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.block_sparse_moe(self.post_attention_layernorm(x)), cache


class MixtralModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: MixtralConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            MixtralBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Mixtral(LanguageModel):
    """A Mixtral language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> model = Mixtral(MixtralConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "1.block_sparse_moe.experts.7" in name][0]
        'model.layers.1.block_sparse_moe.experts.7.w1.weight'
    """

    def __init__(self, config: MixtralConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = MixtralModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


MIXTRAL = Mixtral.family = Family.of(
    Mixtral,
    MixtralConfig,
    names=Names(
        FusedExperts("block_sparse_moe.experts.#.*.weight", ("w1", "w3", "w2")),
        *DECODER,
        Rename({".mlp.gate.weight": ".block_sparse_moe.gate.weight"}, in_modules=True),
    ),
)
