"""StarCoder and SantaCoder (GPT-BigCode): a GPT-2 in which all query heads share one key and one value.

::

    x = wte[ids] + wpe[positions]
    in each layer:
        q, k, v = c_attn(ln_1(x))                            H queries, one key, one value
        x = x + c_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        x = x + c_proj(gelu(c_fc(ln_2(x))))
    logits = lm_head(ln_f(x))

Source: arXiv:2305.06161; transformers' ``modeling_gpt_bigcode``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from ..nn.norm import LayerNorm
from .family import Family
from .gguf.metadata import unsupported
from .gguf.names import GROUPS, Rule
from .gguf.table import PLAIN_BIASES, GGUFTable
from .names import Drop, Headless, Names
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    alias,
    attend,
    constant,
    layers,
    learned_rows,
    merge_heads,
    replicate_over_mesh,
    run_layers,
    size,
    split_features_over_mesh,
    split_groups,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class GPTBigCodeConfig(LanguageModelConfig):
    """The settings of a GPT-BigCode: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        n_embd: E.
        n_inner: F; ``4 · n_embd`` by default.
        n_positions: number of positions that have been learned.
        scale_attn_weights: whether scores are divided by ``√D``.
        multi_query: whether there is one KV head; otherwise there is one for each query head.
    """

    model_type = "gpt_bigcode"
    unused: ClassVar[Sequence[str]] = ("num_key_value_heads",)
    hidden_size, intermediate_size = alias("n_embd"), alias("n_inner")
    num_hidden_layers, max_position_embeddings = alias("n_layer"), alias("n_positions")
    num_attention_heads = alias("n_head")

    vocab_size: int = size(50257)
    n_embd: int = size(768, aliases=("hidden_size",))
    n_inner: int = size(None)
    n_layer: int = layers(12, aliases=("num_hidden_layers",))
    n_head: int = size(12, aliases=("num_attention_heads",))
    head_dim: int = constant(None)
    n_positions: int = size(1024, aliases=("max_position_embeddings",))
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_pytorch_tanh"
    scale_attn_weights: bool = True
    multi_query: bool = True
    tie_word_embeddings: bool = True

    @property
    def num_key_value_heads(self) -> int:
        """K."""
        return 1 if self.multi_query else self.n_head

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file.

        Raises:
            UnsupportedModelError: the model has cross-attention to an encoder.
        """
        if raw.get("add_cross_attention"):
            raise UnsupportedModelError("'add_cross_attention' is not supported for gpt_bigcode")
        return super().from_hf(raw, **values)


class GPTBigCodeAttention(Module):
    """Attention whose linear layer computes all queries, one key and one value, or these three for each head."""

    def __init__(self, config: GPTBigCodeConfig, dtype: DType):
        super().__init__()
        E, H, K, D = config.n_embd, config.n_head, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.scale = D**-0.5 if config.scale_attn_weights else 1.0
        self.c_attn = Linear(E, (H + 2 * K) * D, dtype, has_bias=True)
        self.c_proj = Linear(H * D, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y = self.c_attn(x).astype(x.dtype)  # [B, T, (H + 2 K) D]
        q, k, v = split_groups(y, self.heads, self.kv_heads, self.head_dim)  # [B, T, H, D]
        y, cache = attend(q, k, v, cache, scale=self.scale)  # [B, T, H, D]
        return self.c_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads; ``c_attn`` with a key for all heads is not split."""
        rules = split_heads_over_mesh({}, {"c_proj": self.heads}, self.head_dim)
        if self.kv_heads == 1:
            return rules | replicate_over_mesh("c_attn")
        return rules | split_heads_over_mesh({"c_attn": self.heads}, {}, 3 * self.head_dim)


class GPTBigCodeMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: GPTBigCodeConfig, dtype: DType):
        super().__init__()
        self.act = config.activation_function
        self.c_fc = Linear(config.n_embd, config.n_inner, dtype, has_bias=True)
        self.c_proj = Linear(config.n_inner, config.n_embd, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.c_fc(x))  # [B, T, F]
        return self.c_proj(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["c_fc"], ["c_proj"])


class GPTBigCodeBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: GPTBigCodeConfig, dtype: DType):
        super().__init__()
        E, eps = config.n_embd, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(E, dtype=dtype, eps=eps)
        self.attn = GPTBigCodeAttention(config, dtype)
        self.ln_2 = LayerNorm(E, dtype=dtype, eps=eps)
        self.mlp = GPTBigCodeMLP(config, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y, cache = self.attn(self.ln_1(x), cache)
        x = x + y
        return x + self.mlp(self.ln_2(x)), cache


class GPTBigCodeModel(Module):
    """The model without its head: ``transformer`` in the files."""

    embed_tokens, layers = alias("wte"), alias("h")

    def __init__(self, config: GPTBigCodeConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.wte = Embedding(config.vocab_size, config.n_embd, dtype)
        self.wpe = Embedding(config.n_positions, config.n_embd, dtype)
        self.h = LayerList(GPTBigCodeBlock(config, dtype) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, dtype=dtype, eps=config.layer_norm_epsilon)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.wte(ids).astype(self.dtype.np)  # [B, T, E]
        x = x + self.wpe(learned_rows(cache, self.config.n_positions)).astype(self.dtype.np)
        x, cache = run_layers(self.h, x, cache)
        return self.ln_f(x), cache

    def sharding_rules(self) -> dict[str, Any]:
        """Holds the table of positions completely on every device."""
        return replicate_over_mesh("wpe")


class GPTBigCode(LanguageModel):
    """A StarCoder or SantaCoder language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = GPTBigCode(GPTBigCodeConfig(100, 8, n_layer=1, n_head=2))
        >>> model.raw_state_dict()["transformer.h.0.attn.c_attn.weight"].shape
        [Dim(16), Dim(8)]
    """

    model = alias("transformer")

    def __init__(
        self, config: GPTBigCodeConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.transformer = GPTBigCodeModel(config, self.dtype)
        self.lm_head = self.make_head(config.n_embd, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    @property
    def position_limit(self) -> int:
        """The number of positions that the model has learned."""
        return self.config.n_positions


# --- GGUF files ---------------------------------------------------------------------------------


def _read(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    if config["num_key_value_heads"] != 1:
        raise given.unsupported("a StarCoder with more than one key")
    return {"n_inner": config["intermediate_size"], "multi_query": True}


def _write(config: Any) -> dict[str, Any]:
    if not config.multi_query:
        raise unsupported("'multi_query' false in a GGUF file of 'starcoder'")
    return {}


STARCODER_GGUF = GGUFTable(
    "starcoder",
    {
        "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f", ".attn_norm": "ln_1", ".ffn_norm": "ln_2",
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v", ".ffn_gate")),
        ".attn_qkv": Rule("attn.c_attn", GROUPS), ".attn_output": "attn.c_proj",
        ".ffn_up": "mlp.c_fc", ".ffn_down": "mlp.c_proj",
    },
    constants={"activation_function": "gelu_pytorch_tanh", "scale_attn_weights": True},
    layer="transformer.h.*.",
    read=_read, write=_write, biases=PLAIN_BIASES, has_rope=False,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)  # fmt: skip

GPT_BIGCODE = GPTBigCode.family = Family.of(
    GPTBigCode,
    GPTBigCodeConfig,
    names=Names(
        Drop("*.attn.bias", "*.attn.masked_bias"),
        Headless("transformer.", ("wte.", "wpe.", "h.", "ln_f.")),
    ),
    tied=("lm_head.weight", "transformer.wte.weight"),
    gguf=STARCODER_GGUF,
)
