"""BLOOM: attention with linear biases in place of positions (ALiBi), a norm of the embeddings, biases everywhere.

::

    x = word_embeddings_layernorm(word_embeddings[ids])
    in each layer:
        h = input_layernorm(x)
        q, k, v = query_key_value(h)                         for each head its query, key and value
        x = x + dense(softmax(q kᵀ / √D - slope · distance) v)
        h = post_attention_layernorm(x)
        x = x + dense_4h_to_h(gelu(dense_h_to_4h(h)))
    logits = lm_head(ln_f(x))

Some early models add attention and MLP to the outputs of the norms: to ``h`` in place of ``x``.

Source: arXiv:2211.05100; transformers' ``modeling_bloom``; arXiv:2108.12409 (ALiBi).

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F = 4 E inner features. A decode step, with one token
per sequence, has no axis T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from .names import Headless, Names
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    alias,
    alibi_slopes,
    attend,
    config_field,
    constant,
    layers,
    merge_heads,
    run_layers,
    size,
    split_features_over_mesh,
    split_groups,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class BloomConfig(LanguageModelConfig):
    """The settings of a BLOOM: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        seq_length: length of the texts of its training; the model has no table of positions.
        apply_residual_connection_post_layernorm: whether attention and MLP are added to the outputs of their norms.
    """

    model_type = "bloom"
    num_hidden_layers, max_position_embeddings = alias("n_layer"), alias("seq_length")
    num_attention_heads = num_key_value_heads = alias("n_head")

    vocab_size: int = size(250_880)
    hidden_size: int = size(64, aliases=("n_embed",))
    intermediate_size: int = constant(None)
    n_layer: int = layers(2, aliases=("num_hidden_layers",))
    n_head: int = size(8, aliases=("num_attention_heads",))
    head_dim: int = constant(None)
    seq_length: int = config_field(2048, minimum=1, aliases=("max_position_embeddings",))
    layer_norm_epsilon: float = 1e-5
    apply_residual_connection_post_layernorm: bool = False
    alibi: bool = constant(True)
    tie_word_embeddings: bool = True

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, without the usual length of texts, for which transformers has no key."""
        found = super().to_hf()
        if self.seq_length == type(self).seq_length:
            del found["seq_length"]
        return found


class BloomAttention(Module):
    """Attention with linear biases, and one linear layer for queries, keys and values."""

    def __init__(self, config: BloomConfig, dtype: DType):
        super().__init__()
        E, H, D = config.hidden_size, config.n_head, config.head_dim
        self.heads, self.head_dim = H, D
        self.query_key_value = Linear(E, 3 * H * D, dtype, has_bias=True)
        self.dense = Linear(H * D, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y = self.query_key_value(x).astype(x.dtype)  # [B, T, 3 H D]
        q, k, v = split_groups(y, self.heads, self.heads, self.head_dim)  # [B, T, H, D]
        slopes = alibi_slopes(self.heads)  # [H]
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5, slopes=slopes)  # [B, T, H, D]
        return self.dense(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        rules = split_heads_over_mesh({"query_key_value": self.heads}, {}, 3 * self.head_dim)
        return rules | split_heads_over_mesh({}, {"dense": self.heads}, self.head_dim)


class BloomMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: BloomConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.dense_h_to_4h = Linear(E, F, dtype, has_bias=True)
        self.dense_4h_to_h = Linear(F, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation("gelu_new")(self.dense_h_to_4h(x))  # [B, T, F]
        return self.dense_4h_to_h(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["dense_h_to_4h"], ["dense_4h_to_h"])


class BloomBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states or to the output of its norm."""

    def __init__(self, config: BloomConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.adds_to_norms = config.apply_residual_connection_post_layernorm
        self.input_layernorm = LayerNorm(E, dtype=dtype, eps=eps)
        self.self_attention = BloomAttention(config, dtype)
        self.post_attention_layernorm = LayerNorm(E, dtype=dtype, eps=eps)
        self.mlp = BloomMLP(config, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)  # [B, T, E]
        y, cache = self.self_attention(h, cache)
        x = y + (h if self.adds_to_norms else x)
        h = self.post_attention_layernorm(x)
        return self.mlp(h) + (h if self.adds_to_norms else x), cache


class BloomModel(Module):
    """The model without its head: ``transformer`` in the files."""

    embed_tokens, layers = alias("word_embeddings"), alias("h")

    def __init__(self, config: BloomConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.word_embeddings = Embedding(config.vocab_size, E, dtype)
        self.word_embeddings_layernorm = LayerNorm(E, dtype=dtype, eps=eps)
        self.h = LayerList(BloomBlock(config, dtype) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(E, dtype=dtype, eps=eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.word_embeddings(ids).astype(self.dtype.np)  # [B, T, E]
        x, cache = run_layers(self.h, self.word_embeddings_layernorm(x), cache)
        return self.ln_f(x), cache


class Bloom(LanguageModel):
    """A BLOOM language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = Bloom(BloomConfig(100, 8, n_layer=1, n_head=2))
        >>> model.raw_state_dict()["transformer.h.0.self_attention.query_key_value.weight"].shape
        [Dim(24), Dim(8)]
    """

    model = alias("transformer")

    def __init__(self, config: BloomConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.transformer = BloomModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------

BLOOM_GGUF = GGUFTable(
    "bloom",
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v", ".ffn_gate")),
        ".attn_qkv": Rule("self_attention.query_key_value", GROUPS),
        ".attn_output": "self_attention.dense",
        ".ffn_up": "mlp.dense_h_to_4h",
        ".ffn_down": "mlp.dense_4h_to_h",
    },
    required={"apply_residual_connection_post_layernorm": False},
    layer="transformer.h.*.",
    has_rope=False,
    biases=(*PLAIN_BIASES, "token_embd_norm"),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)

BLOOM = Bloom.family = Family.of(
    Bloom,
    BloomConfig,
    names=Names(
        Headless("transformer.", ("word_embeddings.", "word_embeddings_layernorm.", "h.", "ln_f."))
    ),
    tied=("lm_head.weight", "transformer.word_embeddings.weight"),
    gguf=BLOOM_GGUF,
)
