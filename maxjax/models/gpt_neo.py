"""GPT-Neo and TinyStories: learned positions, a window in every other layer, attention scores that are not scaled.

::

    x = wte[ids] + wpe[positions]
    in each layer:
        h = ln_1(x)
        q, k, v = q_proj(h), k_proj(h), v_proj(h)
        x = x + out_proj(softmax(q kᵀ) v)                    for each head, over all tokens before or 256 of them
        x = x + c_proj(gelu(c_fc(ln_2(x))))
    logits = lm_head(ln_f(x))

Source: transformers' ``modeling_gpt_neo``.

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
from ..nn.linear import Linear, linears
from ..nn.norm import LayerNorm
from .family import Family
from .names import Drop, Headless, Names
from .parts import (
    CAUSAL,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    alias,
    attend,
    config_field,
    constant,
    layers,
    learned_rows,
    merge_heads,
    replicate_over_mesh,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from .unread import ReadTracker

# The kinds of layers in the files.
GLOBAL, LOCAL = "global", "local"


@dataclass(frozen=True)
class GPTNeoConfig(LanguageModelConfig):
    """The settings of a GPT-Neo: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F; ``4 · hidden_size`` by default.
        max_position_embeddings: number of positions that have been learned.
        window_size: number of tokens that a token attends to in local layers, itself included.
        attention_layers: kind of each layer, "global" or "local"; these in turn by default.
    """

    model_type = "gpt_neo"
    num_hidden_layers = alias("num_layers")
    num_attention_heads = num_key_value_heads = alias("num_heads")

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size(None)
    num_layers: int = layers(24, aliases=("num_hidden_layers",))
    num_heads: int = size(16, aliases=("num_attention_heads",))
    head_dim: int = constant(None)
    max_position_embeddings: int = size(2048)
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    window_size: int = config_field(256, minimum=1)
    attention_layers: tuple[str, ...] = config_field((), choices=(GLOBAL, LOCAL))
    tie_word_embeddings: bool = True

    def _fill_in(self) -> None:
        super()._fill_in()
        if not self.attention_layers:
            kinds = (GLOBAL, LOCAL) * self.num_layers
            self._set("attention_layers", kinds[: self.num_layers])

    def _check(self) -> None:
        super()._check()
        if len(self.attention_layers) != self.num_layers:
            raise ValueError(
                f"'attention_layers' has {len(self.attention_layers)} entries for {self.num_layers} layers"
            )

    def window(self, layer: int) -> int | None:
        """The number of tokens that a token attends to in a layer, itself included; None: all before it."""
        return self.window_size if self.attention_layers[layer] == LOCAL else None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the kinds of ``attention_layers``, else of ``attention_types``.

        Raises:
            ValueError: ``attention_types`` is not a list of pairs of kinds and a number.
        """
        raw = ReadTracker.of(raw)
        if raw.get("attention_layers") is None:
            raw = raw.replaced({"attention_layers": _kinds(raw.get("attention_types"))})
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with both keys of the kinds of layers."""
        kinds = [[[kind], 1] for kind in self.attention_layers]
        return {**super().to_hf(), "attention_types": kinds}


def _kinds(pairs: Any) -> list[str]:
    """The kinds of layers that ``attention_types`` lists, such as ``[[["global", "local"], 12]]``."""
    problem = "'attention_types' is not a list of pairs of kinds and a number"
    if not isinstance(pairs, list | None):
        raise ValueError(problem)
    found: list[str] = []
    for pair in [[[GLOBAL, LOCAL], 12]] if pairs is None else pairs:
        kinds, times = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if not isinstance(kinds, list) or type(times) is not int or not 0 < times <= 1000:
            raise ValueError(problem)
        found += kinds * times
    return found


class GPTNeoSelfAttention(Module):
    """Attention over all tokens before a token or over a window of them, whose scores have no factor."""

    def __init__(self, config: GPTNeoConfig, layer: int, dtype: DType):
        super().__init__()
        E, H, D = config.hidden_size, config.num_heads, config.head_dim
        self.heads, self.head_dim = H, D
        window = config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, H * D, dtype)
        self.v_proj = Linear(E, H * D, dtype)
        self.out_proj = Linear(H * D, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y, cache = attend(q, k, v, cache, self.mask, scale=1.0)  # [B, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.heads, "v_proj": self.heads}
        return split_heads_over_mesh(outputs, {"out_proj": self.heads}, self.head_dim)


class GPTNeoAttention(Module):
    """The module ``attn`` of the files, which holds only the module ``attention``."""

    def __init__(self, config: GPTNeoConfig, layer: int, dtype: DType):
        super().__init__()
        self.attention = GPTNeoSelfAttention(config, layer, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        return self.attention(x, cache)


class GPTNeoMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: GPTNeoConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.activation_function
        self.c_fc = Linear(E, F, dtype, has_bias=True)
        self.c_proj = Linear(F, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.c_fc(x))  # [B, T, F]
        return self.c_proj(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["c_fc"], ["c_proj"])


class GPTNeoBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: GPTNeoConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(E, dtype=dtype, eps=eps)
        self.attn = GPTNeoAttention(config, layer, dtype)
        self.ln_2 = LayerNorm(E, dtype=dtype, eps=eps)
        self.mlp = GPTNeoMLP(config, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y, cache = self.attn(self.ln_1(x), cache)
        x = x + y
        return x + self.mlp(self.ln_2(x)), cache


class GPTNeoModel(Module):
    """The model without its head: ``transformer`` in the files."""

    embed_tokens, layers = alias("wte"), alias("h")

    def __init__(self, config: GPTNeoConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.wte = Embedding(config.vocab_size, E, dtype)
        self.wpe = Embedding(config.max_position_embeddings, E, dtype)
        self.h = LayerList(GPTNeoBlock(config, layer, dtype) for layer in range(config.num_layers))
        self.ln_f = LayerNorm(E, dtype=dtype, eps=eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.wte(ids).astype(self.dtype.np)  # [B, T, E]
        rows = learned_rows(cache, self.config.max_position_embeddings)  # [B, T]
        x = x + self.wpe(rows).astype(self.dtype.np)
        x, cache = run_layers(self.h, x, cache)
        return self.ln_f(x), cache

    def sharding_rules(self) -> dict[str, Any]:
        """Holds the table of positions completely on every device."""
        return replicate_over_mesh("wpe")


class GPTNeo(LanguageModel):
    """A GPT-Neo language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = GPTNeoConfig(100, 8, num_layers=2, num_heads=2)
        >>> [name for name in GPTNeo(config).raw_state_dict() if "1.attn" in name][-2:]
        ['transformer.h.1.attn.attention.out_proj.weight', 'transformer.h.1.attn.attention.out_proj.bias']
        >>> config.window(0), config.window(1)
        (None, 256)
    """

    model = alias("transformer")

    def __init__(self, config: GPTNeoConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.transformer = GPTNeoModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    @property
    def position_limit(self) -> int:
        """The number of positions that the model has learned."""
        return self.config.max_position_embeddings


GPT_NEO = GPTNeo.family = Family.of(
    GPTNeo,
    GPTNeoConfig,
    names=Names(
        Drop("*.attn.attention.bias", "*.attn.attention.masked_bias"),
        Headless("transformer.", ("wte.", "wpe.", "h.", "ln_f.")),
    ),
    tied=("lm_head.weight", "transformer.wte.weight"),
)
