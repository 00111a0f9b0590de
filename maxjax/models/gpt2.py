"""GPT-2: learned positions, LayerNorm, biases everywhere, and linear layers whose weights are ``[in, out]`` in files.

::

    x = wte[ids] + wpe[positions]
    in each layer:
        q, k, v = c_attn(ln_1(x))
        x = x + c_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        x = x + c_proj(gelu(c_fc(ln_2(x))))
    logits = lm_head(ln_f(x))

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features. A decode step, with one token per
sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.placement.split import COLUMNS, ROWS, Segment, Split
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.norm import LayerNorm
from ..nn.transposed_linear import TransposedLinear
from .family import Family
from .gguf.config.read import rows_of
from .gguf.layouts import Transposed
from .gguf.metadata import MAX_LAYERS, Settings
from .gguf.names import Rule
from .gguf.table import GGUFTable
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
    split_heads,
)


@dataclass(frozen=True)
class GPT2Config(LanguageModelConfig):
    """The settings of a GPT-2: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        n_embd: E.
        n_inner: F; ``4 · n_embd`` by default.
        n_positions: number of positions that have been learned.
        scale_attn_weights: whether scores are divided by ``√D``.
        scale_attn_by_inverse_layer_idx: whether scores of layer i are also divided by i + 1.

    Example:
        >>> config = GPT2Config.from_dict({"n_embd": 8, "n_head": 2, "n_layer": 3})
        >>> config.n_inner, config.n_positions, config.num_hidden_layers
        (32, 1024, 3)
    """

    model_type = "gpt2"
    hidden_size, intermediate_size = alias("n_embd"), alias("n_inner")
    num_hidden_layers, max_position_embeddings = alias("n_layer"), alias("n_positions")
    num_attention_heads = num_key_value_heads = alias("n_head")

    vocab_size: int = size(50257)
    n_embd: int = size(768, aliases=("hidden_size",))
    n_inner: int = size(None)
    n_layer: int = layers(12, aliases=("num_hidden_layers",))
    n_head: int = size(12, aliases=("num_attention_heads",))
    head_dim: int = constant(None)
    n_positions: int = size(1024, aliases=("max_position_embeddings",))
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file.

        Raises:
            UnsupportedModelError: the model has cross-attention to an encoder.
        """
        if raw.get("add_cross_attention"):
            raise UnsupportedModelError("'add_cross_attention' is not supported for gpt2")
        return super().from_hf(raw, **values)


class GPT2Attention(Module):
    """Attention with one linear layer for queries, keys and values."""

    def __init__(self, config: GPT2Config, layer: int, dtype: DType):
        super().__init__()
        E = config.n_embd
        self.heads, self.head_dim = config.n_head, config.head_dim
        self.scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.c_attn = TransposedLinear(E, 3 * E, dtype)
        self.c_proj = TransposedLinear(E, E, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k, v = self.c_attn.split_projections(
            x, 3 * [self.heads * self.head_dim]
        )  # [B, T, E] each
        q, k, v = (split_heads(a, self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y, cache = attend(q, k, v, cache, scale=self.scale)  # [B, T, H, D]
        return self.c_proj(merge_heads(y)), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        heads = (Segment.head_aware(self.heads, self.head_dim),)
        return {"c_attn": Split(0, heads * 3, by_device=True), "c_proj": Split(1, heads)}


class GPT2MLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: GPT2Config, dtype: DType):
        super().__init__()
        self.act = config.activation_function
        self.c_fc = TransposedLinear(config.n_embd, config.n_inner, dtype)
        self.c_proj = TransposedLinear(config.n_inner, config.n_embd, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.c_fc(x))  # [B, T, F]
        return self.c_proj(y)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return {"c_fc": ROWS, "c_proj": COLUMNS}


class GPT2Block(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: GPT2Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.n_embd, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(E, dtype=dtype, eps=eps)
        self.attn = GPT2Attention(config, layer, dtype)
        self.ln_2 = LayerNorm(E, dtype=dtype, eps=eps)
        self.mlp = GPT2MLP(config, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y, cache = self.attn(self.ln_1(x), cache)
        x = x + y
        return x + self.mlp(self.ln_2(x)), cache


class GPT2Model(Module):
    """The model without its head: ``transformer`` in the files."""

    embed_tokens, layers = alias("wte"), alias("h")

    def __init__(self, config: GPT2Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.wte = Embedding(config.vocab_size, config.n_embd, dtype)
        self.wpe = Embedding(config.n_positions, config.n_embd, dtype)
        self.h = LayerList(GPT2Block(config, layer, dtype) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, dtype=dtype, eps=config.layer_norm_epsilon)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.wte(ids).astype(self.dtype.np)  # [B, T, E]
        x = x + self.wpe(learned_rows(cache, self.config.n_positions)).astype(self.dtype.np)
        x, cache = run_layers(self.h, x, cache)
        return self.ln_f(x), cache

    def sharding_rules(self) -> dict[str, Any]:
        """Holds the table of positions completely on every device."""
        return replicate_over_mesh("wpe")


class GPT2(LanguageModel):
    """A GPT-2 language model.

    ``model`` and ``model.layers``, the names that other decoders have, are aliases of ``transformer`` and
    ``transformer.h``.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> list(GPT2(GPT2Config(100, 8, n_layer=2, n_head=2)).raw_state_dict())[:4]
        ['transformer.wte.weight', 'transformer.wpe.weight', 'transformer.ln_f.weight',
         'transformer.ln_f.bias']
    """

    model = alias("transformer")

    def __init__(self, config: GPT2Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.transformer = GPT2Model(config, self.dtype)
        self.lm_head = self.make_head(config.n_embd, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    @property
    def position_limit(self) -> int:
        """The number of positions that the model has learned."""
        return self.config.n_positions


def _read_gguf(given: Settings, tensors: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file."""
    return {
        "n_embd": given.count("embedding_length"),
        "n_layer": given.count("block_count", maximum=MAX_LAYERS),
        "n_head": given.count("attention.head_count"),
        "n_inner": given.count("feed_forward_length"),
        "n_positions": rows_of("position_embd.weight", tensors, given.path),
        "layer_norm_epsilon": given.number("attention.layer_norm_epsilon"),
    }


GPT2_GGUF = GGUFTable(
    "gpt2",
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        ".attn_norm": "ln_1",
        ".attn_qkv": Rule("attn.c_attn", Transposed()),
        ".attn_output": Rule("attn.c_proj", Transposed()),
        ".ffn_norm": "ln_2",
        ".ffn_up": Rule("mlp.c_fc", Transposed()),
        ".ffn_down": Rule("mlp.c_proj", Transposed()),
    },
    layer="transformer.h.*.",
    is_decoder=False,
    constants={"activation_function": "gelu_new"},
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    read=_read_gguf,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    biases=None,
)

GPT2_FAMILY = GPT2.family = Family.of(
    GPT2,
    GPT2Config,
    "GPT2LMHeadModel",
    "GPT2Model",
    names=Names(
        Drop("*.attn.bias", "*.attn.masked_bias"),
        Headless("transformer.", ("wte.", "wpe.", "h.", "ln_f.")),
    ),
    tied=("lm_head.weight", "transformer.wte.weight"),
    gguf=GPT2_GGUF,
)
