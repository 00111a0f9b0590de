"""Granite 3: a Llama with factors of the embeddings, the attention scores, the residual terms and the logits.

::

    x = embedding_multiplier · embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + residual_multiplier · o_proj(softmax(attention_multiplier · q kᵀ) v)
        h = post_attention_layernorm(x)
        x = x + residual_multiplier · down_proj(silu(gate_proj(h)) · up_proj(h))
    logits = lm_head(norm(x)) / logits_scaling

Source: arXiv:2408.13359; transformers' ``modeling_granite``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from .family import Family
from .gguf.metadata import Settings
from .gguf.table import PERMUTED, GGUFTable
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
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class GraniteConfig(LanguageModelConfig):
    """The settings of a Granite: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        embedding_multiplier, attention_multiplier, residual_multiplier: factors of the embeddings, of the
            attention scores, and of what attention and MLP add to the hidden states.
        logits_scaling: divisor of the logits.
    """

    model_type = "granite"

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
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = config_field(1.0, minimum=1e-9)


class GraniteAttention(Module):
    """Attention with rotary positions, whose scores have a factor of the configuration."""

    def __init__(self, config: GraniteConfig, dtype: DType):
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


class GraniteMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: GraniteConfig, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype, has_bias=bias)
        self.up_proj = Linear(E, F, dtype, has_bias=bias)
        self.down_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class GraniteBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states with a factor."""

    def __init__(self, config: GraniteConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.residual = config.residual_multiplier
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = GraniteAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = GraniteMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + self.residual * y
        return x + self.residual * self.mlp(self.post_attention_layernorm(x)), cache


class GraniteModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: GraniteConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            GraniteBlock(config, dtype) for _ in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Granite(LanguageModel):
    """A Granite language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> Granite(GraniteConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)).model.layers[0].residual
        1.0
    """

    def __init__(self, config: GraniteConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = GraniteModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``."""
        return super().logits(x) * (1 / self.config.logits_scaling)


# --- GGUF files ---------------------------------------------------------------------------------


def attention_scale(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the factor of attention scores; in a file without one it is llama.cpp's, and not Granite's 1."""
    scale = given.number("attention.scale", 0.0, positive=False)
    return {"attention_multiplier": scale or config["head_dim"] ** -0.5}


def with_rope(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return :func:`attention_scale` of a file of a model with RoPE."""
    if not given.flag("rope.scaling.finetuned", True):
        raise given.unsupported("a Granite without RoPE and without Mamba 2")
    return attention_scale(given, tensors, config)


def _read(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    mlp_bias = "blk.0.ffn_gate.bias" in tensors
    return {**with_rope(given, tensors, config), "mlp_bias": mlp_bias}


GRANITE_GGUF = GGUFTable(
    "granite",
    PERMUTED,
    keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    constants={"hidden_act": "silu"},
    read=_read,
    biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    is_divided=True,
)

GRANITE = Granite.family = Family.of(
    Granite, GraniteConfig, names=Names(*DECODER), gguf=GRANITE_GGUF
)
