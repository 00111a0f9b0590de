"""GPT-NeoX and Pythia: attention beside the MLP, rotary positions in a quarter of each head, LayerNorm, biases.

::

    x = embed_in[ids]
    in each layer:
        q, k, v = query_key_value(input_layernorm(x))        for each head its query, key and value
        q, k = rope(q), rope(k)
        y = dense(softmax(q kᵀ / √D) v)
        x = x + y + dense_4h_to_h(gelu(dense_h_to_4h(post_attention_layernorm(x))))
    logits = embed_out(final_layer_norm(x))

Source: arXiv:2204.06745; transformers' ``modeling_gpt_neox``.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features. A decode step, with one token per
sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from ..nn.norm import LayerNorm
from .family import Family
from .gguf.names import GROUPS, Rule
from .gguf.table import PLAIN_BIASES, GGUFTable
from .names import ROPE_TABLES, Drop, Headless, Names, Rename
from .parts import (
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    alias,
    attend,
    config_field,
    constant,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_groups,
    split_heads_over_mesh,
)
from .unread import ReadTracker


@dataclass(frozen=True)
class GPTNeoXConfig(LanguageModelConfig):
    """The settings of a GPT-NeoX: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        rope_parameters: the rotary position embedding; older files have other keys for its settings.
        attention_bias: whether the linear layers of attention have biases.
        use_parallel_residual: whether attention and MLP are added to the same hidden states.
    """

    model_type = "gpt_neox"
    num_key_value_heads = alias("num_attention_heads")

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    head_dim: int = constant(None)
    max_position_embeddings: int = config_field(2048, minimum=1)
    layer_norm_eps: float = 1e-5
    hidden_act: str = "gelu"
    rope_parameters: Rope = Rope(theta=10_000.0, part=0.25)
    attention_bias: bool = True
    use_parallel_residual: bool = True
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which the older keys of RoPE come first."""
        older = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
        raw = ReadTracker.of(raw)
        found = {key: raw[old] for key, old in older.items() if raw.get(old) is not None}
        return super().from_hf(raw.replaced(found), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the older keys of RoPE."""
        found = super().to_hf()
        found["rotary_emb_base"] = found.pop("rope_theta")
        found["rotary_pct"] = found.pop("partial_rotary_factor")
        return found


class GPTNeoXAttention(Module):
    """Attention with rotary positions in a part of each head, and one linear layer for queries, keys and values."""

    def __init__(self, config: GPTNeoXConfig, dtype: DType):
        super().__init__()
        E, H, D = config.hidden_size, config.num_attention_heads, config.head_dim
        bias = config.attention_bias
        self.heads, self.head_dim = H, D
        self.query_key_value = Linear(E, 3 * H * D, dtype, has_bias=bias)
        self.dense = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y = self.query_key_value(x).astype(x.dtype)  # [B, T, 3 H D]
        q, k, v = split_groups(y, self.heads, self.heads, self.head_dim)  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.dense(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        rules = split_heads_over_mesh({"query_key_value": self.heads}, {}, 3 * self.head_dim)
        return rules | split_heads_over_mesh({}, {"dense": self.heads}, self.head_dim)


class GPTNeoXMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: GPTNeoXConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.dense_h_to_4h = Linear(E, F, dtype, has_bias=True)
        self.dense_4h_to_h = Linear(F, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.dense_h_to_4h(x))  # [B, T, F]
        return self.dense_4h_to_h(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["dense_h_to_4h"], ["dense_4h_to_h"])


class GPTNeoXBlock(Module):
    """One layer: attention, and the MLP beside it or after it, each after a norm and added to the hidden states."""

    def __init__(self, config: GPTNeoXConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.is_parallel = config.use_parallel_residual
        self.input_layernorm = LayerNorm(E, dtype=dtype, eps=eps)
        self.attention = GPTNeoXAttention(config, dtype)
        self.post_attention_layernorm = LayerNorm(E, dtype=dtype, eps=eps)
        self.mlp = GPTNeoXMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.attention(self.input_layernorm(x), cache, angles)
        h = x if self.is_parallel else x + y  # [B, T, E]
        return x + y + self.mlp(self.post_attention_layernorm(h)), cache


class GPTNeoXModel(Module):
    """The model without its head: ``gpt_neox`` in the files."""

    embed_tokens = alias("embed_in")

    def __init__(self, config: GPTNeoXConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.layer_norm_eps
        self.embed_in = Embedding(config.vocab_size, E, dtype)
        self.layers = LayerList(
            GPTNeoXBlock(config, dtype) for _ in range(config.num_hidden_layers)
        )
        self.final_layer_norm = LayerNorm(E, dtype=dtype, eps=eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_in(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.final_layer_norm(x), cache


class GPTNeoX(LanguageModel):
    """A GPT-NeoX or Pythia language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = GPTNeoX(GPTNeoXConfig(100, 32, 64, num_hidden_layers=1, num_attention_heads=4))
        >>> [name for name in model.raw_state_dict() if "layers" not in name]
        ['embed_out.weight', 'gpt_neox.embed_in.weight', 'gpt_neox.final_layer_norm.weight',
         'gpt_neox.final_layer_norm.bias']
    """

    model, lm_head = alias("gpt_neox"), alias("embed_out")

    def __init__(self, config: GPTNeoXConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.gpt_neox = GPTNeoXModel(config, self.dtype)
        self.embed_out = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------

GPT_NEOX_GGUF = GGUFTable(
    "gptneox",
    {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v", ".ffn_gate")),
        ".attn_qkv": Rule("attention.query_key_value", GROUPS),
        ".attn_output": "attention.dense",
        ".ffn_up": "mlp.dense_h_to_4h",
        ".ffn_down": "mlp.dense_4h_to_h",
    },
    keys={"use_parallel_residual": "use_parallel_residual"},
    constants={"hidden_act": "gelu", "attention_bias": True},
    layer="gpt_neox.layers.*.",
    read=lambda given, tensors, config: {"attention_bias": "blk.0.attn_qkv.bias" in tensors},
    biases=PLAIN_BIASES,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    is_partial=True,
    has_head=True,
)

GPT_NEOX = GPTNeoX.family = Family.of(
    GPTNeoX,
    GPTNeoXConfig,
    names=Names(
        Drop("*.attention.bias", "*.attention.masked_bias"),
        ROPE_TABLES,
        Headless("gpt_neox.", ("embed_in.", "layers.", "final_layer_norm.")),
        Rename({"lm_head.weight": "embed_out.weight"}, in_modules=True),
    ),
    tied=("embed_out.weight", "gpt_neox.embed_in.weight"),
    gguf=GPT_NEOX_GGUF,
)
