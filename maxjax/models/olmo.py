"""OLMo 1: a Llama whose LayerNorms have no weights, and whose queries, keys and values may be clipped.

::

    x = embed_tokens[ids]
    in each layer:
        h = normalised(x)
        q, k, v = clip(q_proj(h)), clip(k_proj(h)), clip(v_proj(h))
        x = x + o_proj(softmax(rope(q) rope(k)ᵀ / √D) v)
        h = normalised(x)
        x = x + down_proj(silu(gate_proj(h)) · up_proj(h))
    logits = lm_head(normalised(x))

Source: arXiv:2402.00838; transformers' ``modeling_olmo``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import ConstantLayerNorm
from .family import Family
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
    constant,
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
class OlmoConfig(LanguageModelConfig):
    """The settings of an OLMo: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        clip_qkv: bound at which queries, keys and values are clipped; None: they are not.
    """

    model_type = "olmo"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(2048, minimum=1)
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    clip_qkv: float | None = None
    layer_norm_eps: float = constant(1e-5)


class OlmoAttention(Module):
    """Attention with rotary positions, whose queries, keys and values may be clipped."""

    def __init__(self, config: OlmoConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.bound = config.clip_qkv
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (a.astype(x.dtype) for a in (q, k, v))
        if self.bound is not None:
            q, k, v = (jnp.clip(a, -self.bound, self.bound) for a in (q, k, v))
        q, k, v = (split_heads(a, self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class OlmoMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: OlmoConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype)
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class OlmoBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: OlmoConfig, dtype: DType):
        super().__init__()
        self.input_layernorm = ConstantLayerNorm(
            config.hidden_size, DeviceRef.CPU(), dtype, config.layer_norm_eps
        )
        self.self_attn = OlmoAttention(config, dtype)
        self.post_attention_layernorm = ConstantLayerNorm(
            config.hidden_size, DeviceRef.CPU(), dtype, config.layer_norm_eps
        )
        self.mlp = OlmoMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class OlmoModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: OlmoConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(OlmoBlock(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = ConstantLayerNorm(
            config.hidden_size, DeviceRef.CPU(), dtype, config.layer_norm_eps
        )

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Olmo(LanguageModel):
    """An OLMo language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = Olmo(OlmoConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "norm" in name]
        []
    """

    def __init__(self, config: OlmoConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = OlmoModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


OLMO_GGUF = GGUFTable(
    "olmo",
    {**PERMUTED, ".attn_norm": None, ".ffn_norm": None, "output_norm": None},
    keys={"attention.clamp_kqv": "clip_qkv"},
    constants={"hidden_act": "silu"},
    biases=(),
    is_square=True,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
)

OLMO = Olmo.family = Family.of(Olmo, OlmoConfig, names=Names(*DECODER), gguf=OLMO_GGUF)
