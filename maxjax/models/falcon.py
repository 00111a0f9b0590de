"""Falcon (7B, 40B, 180B, Falcon 2 and Falcon-RW): attention beside the MLP, and one or few KV heads.

::

    x = word_embeddings[ids]
    in each layer:
        q, k, v = query_key_value(ln_attn(x))                for each KV head its queries, its key and its value
        q, k = rope(q), rope(k)
        y = dense(softmax(q kᵀ / √D) v)
        x = x + y + dense_4h_to_h(gelu(dense_h_to_4h(ln_mlp(x))))
    logits = lm_head(ln_f(x))

The 7B and Falcon 2 have one norm for both parts, ``input_layernorm``. Falcon-RW has the MLP after attention, and ALiBi
(arXiv:2108.12409) in place of RoPE: ``softmax((q kᵀ - slope · distance) / √D)``. transformers rounds slopes and their
products with positions to bfloat16, which changes logits by about 0.01 where there are more than 8 heads.

Source: arXiv:2311.16867; transformers' ``modeling_falcon``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from .gguf.metadata import Settings, unsupported
from .gguf.names import GROUPS, Rule
from .gguf.table import GGUFTable
from .names import ROPE_TABLES, Headless, NameRow, Names
from .parts import (
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    alias,
    alibi_slopes,
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


@dataclass(frozen=True)
class FalconConfig(LanguageModelConfig):
    """The settings of a Falcon: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        ffn_hidden_size: F; ``4 · hidden_size`` by default.
        num_kv_heads: K of the new architecture; ``num_attention_heads`` by default.
        alibi: whether scores have a bias for the distance (ALiBi) in place of RoPE.
        bias: whether the linear layers of attention and MLP have biases.
        new_decoder_architecture: whether the model is built like the 40B, with grouped KV heads.
        multi_query: whether a model of the old architecture has one KV head.
        parallel_attn: whether attention and MLP are in parallel in the old architecture.
        num_ln_in_parallel_attn: number of norms in a layer of the new architecture.
    """

    model_type = "falcon"
    intermediate_size, num_key_value_heads = alias("ffn_hidden_size"), alias("num_kv_heads")

    vocab_size: int = size()
    hidden_size: int = size()
    ffn_hidden_size: int = size(None)
    num_hidden_layers: int = layers(32, aliases=("n_layer",))
    num_attention_heads: int = size(71, aliases=("n_head",))
    num_kv_heads: int = size(None, aliases=("n_head_kv",))
    head_dim: int = constant(None)
    max_position_embeddings: int = config_field(2048, minimum=1)
    layer_norm_epsilon: float = 1e-5
    activation: str = "gelu"
    rope_parameters: Rope = Rope(theta=10_000.0)
    alibi: bool = False
    bias: bool = False
    tie_word_embeddings: bool = True
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int = config_field(2, minimum=1, maximum=2)

    def _fill_in(self) -> None:
        if not self.new_decoder_architecture:
            self._set("num_kv_heads", 1 if self.multi_query else self.num_attention_heads)
        super()._fill_in()

    @property
    def is_parallel(self) -> bool:
        """Whether the MLP is beside attention, and not after it."""
        return self.new_decoder_architecture or self.parallel_attn

    @property
    def has_two_norms(self) -> bool:
        """Whether attention and the MLP beside it have a norm each."""
        return self.new_decoder_architecture and self.num_ln_in_parallel_attn == 2

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, without the norms in a model of the old architecture, which transformers would make."""
        found = super().to_hf()
        if not self.new_decoder_architecture and self.num_ln_in_parallel_attn == 2:
            del found["num_ln_in_parallel_attn"]
        return found


class FalconAttention(Module):
    """Attention with rotary positions or ALiBi, whose linear layer computes queries, key and value of each KV head."""

    def __init__(self, config: FalconConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, K, D
        E, bias, self.has_alibi = config.hidden_size, config.bias, config.alibi
        self.query_key_value = Linear(E, (H + 2 * K) * D, dtype, has_bias=bias)
        self.dense = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y = self.query_key_value(x).astype(x.dtype)  # [B, T, (H + 2 K) D]
        q, k, v = split_groups(y, self.heads, self.kv_heads, self.head_dim)  # [B, T, H, D]
        slopes = alibi_slopes(self.heads) / self.head_dim**0.5 if self.has_alibi else None  # [H]
        if not self.has_alibi:
            q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5, slopes=slopes)  # [B, T, H, D]
        return self.dense(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``query_key_value`` between KV heads with their queries, and ``dense`` between query heads."""
        group = (self.heads // self.kv_heads + 2) * self.head_dim
        rules = split_heads_over_mesh({"query_key_value": self.kv_heads}, {}, group)
        return rules | split_heads_over_mesh({}, {"dense": self.heads}, self.head_dim)


class FalconMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: FalconConfig, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.ffn_hidden_size, config.bias
        self.act = config.activation
        self.dense_h_to_4h = Linear(E, F, dtype, has_bias=bias)
        self.dense_4h_to_h = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.dense_h_to_4h(x))  # [B, T, F]
        return self.dense_4h_to_h(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["dense_h_to_4h"], ["dense_4h_to_h"])


class FalconBlock(Module):
    """One layer: attention, and the MLP beside it or after it, added to the hidden states."""

    def __init__(self, config: FalconConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.is_parallel, self.has_two_norms = config.is_parallel, config.has_two_norms
        if self.has_two_norms:
            self.ln_attn = LayerNorm(E, dtype=dtype, eps=eps)
            self.ln_mlp = LayerNorm(E, dtype=dtype, eps=eps)
        else:
            self.input_layernorm = LayerNorm(E, dtype=dtype, eps=eps)
        if not self.is_parallel:
            self.post_attention_layernorm = LayerNorm(E, dtype=dtype, eps=eps)
        self.self_attention = FalconAttention(config, dtype)
        self.mlp = FalconMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.ln_attn(x) if self.has_two_norms else self.input_layernorm(x)  # [B, T, E]
        y, cache = self.self_attention(h, cache, angles)
        if self.has_two_norms:
            h = self.ln_mlp(x)
        elif not self.is_parallel:
            h = self.post_attention_layernorm(x + y)
        return x + y + self.mlp(h), cache


class FalconModel(Module):
    """The model without its head: ``transformer`` in the files."""

    embed_tokens, layers = alias("word_embeddings"), alias("h")

    def __init__(self, config: FalconConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.word_embeddings = Embedding(config.vocab_size, E, dtype)
        self.h = LayerList(FalconBlock(config, dtype) for _ in range(config.num_hidden_layers))
        self.ln_f = LayerNorm(E, dtype=dtype, eps=eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.word_embeddings(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.h, x, cache, angles)
        return self.ln_f(x), cache


class Falcon(LanguageModel):
    """A Falcon language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = FalconConfig(100, 32, num_hidden_layers=1, num_attention_heads=4)
        >>> Falcon(config).raw_state_dict()["transformer.h.0.self_attention.query_key_value.weight"].shape
        [Dim(48), Dim(32)]
    """

    model = alias("transformer")

    def __init__(self, config: FalconConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.transformer = FalconModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


class OneNorm(NameRow):
    """GGUF files have one name for the MLP's norm and for the norm of both parts: drops what the layers do not have."""

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`NameRow`."""
        both = any(".ln_attn." in name for name in tensors)
        if any(".input_layernorm." in n for n in tensors) and any(".ln_mlp." in n for n in tensors):
            left = ".input_layernorm." if both else ".ln_mlp."
            return {name: value for name, value in tensors.items() if left not in name}
        return tensors


def _read(given: Settings, tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the architecture, which the norms and the number of KV heads tell."""
    heads, two = config["num_key_value_heads"], "blk.0.attn_norm_2.weight" in tensors
    found = {"ffn_hidden_size": config["intermediate_size"]}
    if heads == 1 and not two:
        return {**found, "new_decoder_architecture": False, "multi_query": True}
    norms = {"num_ln_in_parallel_attn": 1 + two}
    return {**found, **norms, "new_decoder_architecture": True, "num_kv_heads": heads}


def _write(config: FalconConfig) -> dict[str, Any]:
    if not config.is_parallel:
        raise unsupported("'parallel_attn' false in a GGUF file of 'falcon'")
    return {}


FALCON_GGUF = GGUFTable(
    "falcon",
    {
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v", ".ffn_gate", ".ffn_norm")),
        ".attn_norm": (Rule("input_layernorm"), Rule("ln_mlp")),
        ".attn_qkv": Rule("self_attention.query_key_value", GROUPS),
        ".attn_output": "self_attention.dense",
        ".ffn_up": "mlp.dense_h_to_4h",
        ".ffn_down": "mlp.dense_4h_to_h",
        ".attn_norm_2": "ln_attn",
    },
    constants={"activation": "gelu", "bias": False},
    required={"alibi": False},
    layer="transformer.h.*.",
    read=_read,
    write=_write,
    biases=("attn_norm", "attn_norm_2", "output_norm"),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)

FALCON = Falcon.family = Family.of(
    Falcon,
    FalconConfig,
    names=Names(
        OneNorm(), ROPE_TABLES, Headless("transformer.", ("word_embeddings.", "h.", "ln_f."))
    ),
    tied=("lm_head.weight", "transformer.word_embeddings.weight"),
    gguf=FALCON_GGUF,
)
