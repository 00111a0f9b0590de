"""Gemma 1, 2 and 3 (text).

::

    x = √E · embed_tokens[ids]
    in each layer of Gemma 1:                             in each layer of Gemma 2 and 3:
        x = x + attention(input_layernorm(x))                 y = attention(input_layernorm(x))
        x = x + mlp(post_attention_layernorm(x))              x = x + post_attention_layernorm(y)
                                                              y = mlp(pre_feedforward_layernorm(x))
                                                              x = x + post_feedforward_layernorm(y)
    logits = embed_tokensᵀ norm(x)                        logits = cap · tanh(embed_tokensᵀ norm(x) / cap)

    norm(x) = x / rms(x) · (1 + weight)
    mlp(x) = down_proj(gelu(gate_proj(x)) · up_proj(x))

Gemma 2 caps the scores of attention too, and every other layer attends to a sliding window. Gemma 3 caps no scores,
normalises queries and keys, and has five layers with a sliding window, and a RoPE of their own, for each layer
without one.

Sources: arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786; EmbeddingGemma arXiv:2509.20354.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
V tokens in the vocabulary. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from .family import Family
from .gguf.config.read import WINDOWS, layer_types, window_period
from .gguf.layouts import Plus
from .gguf.metadata import Settings, unsupported
from .gguf.names import Rule
from .gguf.table import GGUFTable
from .names import DECODER, Drop, Names
from .parts import (
    CAUSAL,
    FULL,
    SLIDING,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    bidirectional,
    config_field,
    full_every,
    layers,
    merge_heads,
    rope,
    ropes_by_kind,
    ropes_to_hf,
    run_layers,
    size,
    sliding,
    soft_cap,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_blocks,
    with_defaults,
)

_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class GemmaConfig(LanguageModelConfig):
    """The settings of a Gemma 1: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads: K; ``num_attention_heads`` by default, in files 16.
        head_dim: D.
        attention_bias: whether the linear layers of attention have biases.

    Raises:
        UnsupportedModelError: a file sets bidirectional attention, which only Gemma 3 has.
    """

    model_type = "gemma"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=256)
    hidden_act: str = _GELU
    max_position_embeddings: int = config_field(8192, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file. The first releases say "gelu" and mean its tanh approximation."""
        refuse_bidirectional(raw)
        if raw.get("hidden_act") == "gelu":
            values["hidden_act"] = _GELU
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 16}), **values)


def refuse_bidirectional(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a file that sets bidirectional attention."""
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "'use_bidirectional_attention': only causal attention is supported"
        )


class GemmaNorm(RMSNorm):
    """``x / rms(x) · (1 + weight)``, computed in float32 and rounded once."""

    def __init__(self, width: int, dtype: DType, eps: float):
        super().__init__(width, dtype, eps, weight_offset=1.0, multiply_before_cast=True)


class GemmaAttention(Module):
    """Attention with rotary positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: GemmaConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
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
        y, cache = attend(q, k, v, cache, with_blocks(CAUSAL), scale=self.head_dim**-0.5)
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class GemmaMLP(Module):
    """The gated MLP, GeGLU (arXiv:2002.05202).

    Args:
        width: E.
        inner: F.
        act: name of the activation function.
        dtype: dtype of the weights.
    """

    def __init__(self, width: int, inner: int, act: str, dtype: DType):
        super().__init__()
        self.act = act
        self.gate_proj = Linear(width, inner, dtype)
        self.up_proj = Linear(width, inner, dtype)
        self.down_proj = Linear(inner, width, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class GemmaBlock(Module):
    """One layer of Gemma 1: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: GemmaConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaNorm(E, dtype, eps)
        self.self_attn = GemmaAttention(config, dtype)
        self.post_attention_layernorm = GemmaNorm(E, dtype, eps)
        self.mlp = GemmaMLP(E, config.intermediate_size, config.hidden_act, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class GemmaModel(Module):
    """A Gemma 1 or 2 without its head: ``model`` in the files."""

    def __init__(self, config: GemmaConfig | Gemma2Config, blocks: Sequence[Module], dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(blocks)
        self.norm = GemmaNorm(config.hidden_size, dtype, config.rms_norm_eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Gemma(LanguageModel):
    """A Gemma 1 language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = GemmaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> Gemma(config).lm_head.weight.shape
        [Dim(100), Dim(8)]
    """

    def __init__(self, config: GemmaConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        blocks = [GemmaBlock(config, self.dtype) for _ in range(config.num_hidden_layers)]
        self.model = GemmaModel(config, blocks, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# In GGUF files the weights of norms are those that the norms multiply by.
_ONE_MORE = Plus(-1.0)
_GGUF_NORMS = {
    "output_norm": Rule("model.norm", _ONE_MORE),
    ".attn_norm": Rule("input_layernorm", _ONE_MORE),
}
_GGUF_FIXED = {"hidden_activation": _GELU, "hidden_act": _GELU}
GEMMA_GGUF = GGUFTable(
    "gemma",
    {**_GGUF_NORMS, ".ffn_norm": Rule("post_attention_layernorm", _ONE_MORE)},
    constants=_GGUF_FIXED,
    biases=(),
    is_tied=True,
)

GEMMA = Gemma.family = Family.of(Gemma, GemmaConfig, names=Names(*DECODER), gguf=GEMMA_GGUF)


# --- Gemma 2: norms after attention and MLP, capped scores and logits, sliding windows -----------


@dataclass(frozen=True)
class Gemma2Config(LanguageModelConfig):
    """The settings of a Gemma 2: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads: K; ``num_attention_heads`` by default, in files 4.
        attn_logit_softcapping, final_logit_softcapping: caps of the scores of attention and of the logits; None, which
            is null in a file: no cap.
        query_pre_attn_scalar: number by whose square root queries are divided.
        sliding_window: number of tokens, itself included, that a token attends to in a layer with a window; None if no
            layer has one.
        layer_types: "full_attention" or "sliding_attention" for each layer; by default the window is in every other
            layer, the first included.

    Raises:
        ValueError: layers have a sliding window, and ``sliding_window`` is None.
        UnsupportedModelError: a file sets bidirectional attention, which only Gemma 3 has.
    """

    model_type = "gemma2"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=256)
    hidden_activation: str = _GELU
    max_position_embeddings: int = config_field(8192, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    sliding_window: int | None = config_field(4096, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    query_pre_attn_scalar: float = config_field(256.0, minimum=1e-3)
    attn_logit_softcapping: float | None = config_field(50.0, minimum=1e-3)
    final_logit_softcapping: float | None = config_field(30.0, minimum=1e-3)

    def __post_init__(self) -> None:
        if not self.layer_types:
            self._set("layer_types", full_every(2, self.num_hidden_layers))
        if SLIDING not in self.layer_types:
            self._set("sliding_window", None)
        super().__post_init__()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for no cap and no window."""
        refuse_bidirectional(raw)
        raw = with_defaults(raw, {"num_key_value_heads": 4})
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
            if raw.get(key, 0) is None:
                values[key] = None
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings; transformers requires that the scale of queries is an integer."""
        return {**super().to_hf(), "query_pre_attn_scalar": int(self.query_pre_attn_scalar)}


class Gemma2Attention(Module):
    """Attention whose scores are capped, and which in some layers has a sliding window."""

    def __init__(self, config: Gemma2Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.scale = config.query_pre_attn_scalar**-0.5
        self.soft_cap = config.attn_logit_softcapping
        window = config.window(layer)
        self.mask = with_blocks(CAUSAL if window is None else sliding(window))
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
        y, cache = attend(q, k, v, cache, self.mask, scale=self.scale, soft_cap=self.soft_cap)
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Gemma2Block(Module):
    """One layer of Gemma 2 or 3: attention and MLP, each with a norm before and after it."""

    def __init__(self, config: Gemma2Config | Gemma3Config, attention: Module, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaNorm(E, dtype, eps)
        self.self_attn = attention
        self.post_attention_layernorm = GemmaNorm(E, dtype, eps)
        self.pre_feedforward_layernorm = GemmaNorm(E, dtype, eps)
        self.mlp = GemmaMLP(E, config.intermediate_size, config.hidden_activation, dtype)
        self.post_feedforward_layernorm = GemmaNorm(E, dtype, eps)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Any
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y), cache


class Gemma2(LanguageModel):
    """A Gemma 2 language model.

    Args:
        config, dtype, stacked: as for :class:`Gemma`.

    Example:
        >>> config = Gemma2Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2)
        >>> [config.window(layer) for layer in range(4)], Gemma2(config).lm_head.weight is None
        ([4096, None, 4096, None], False)
    """

    def __init__(self, config: Gemma2Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        blocks = [
            Gemma2Block(config, Gemma2Attention(config, layer, self.dtype), self.dtype)
            for layer in range(config.num_hidden_layers)
        ]
        self.model = GemmaModel(config, blocks, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the capped logits ``[..., V]`` of hidden states ``[..., E]``."""
        return soft_cap(super().logits(x), self.config.final_logit_softcapping)


_GGUF_WINDOWS = ("attention.sliding_window", WINDOWS, "final_logit_softcapping")
_GGUF_NORMS_2 = {
    **_GGUF_NORMS,
    ".post_attention_norm": Rule("post_attention_layernorm", _ONE_MORE),
    ".ffn_norm": Rule("pre_feedforward_layernorm", _ONE_MORE),
    ".post_ffw_norm": Rule("post_feedforward_layernorm", _ONE_MORE),
}


def query_scalar(given: Settings, config: Mapping[str, Any], largest: int) -> int:
    """Return the number by whose square root queries are divided.

    llama.cpp recognises the largest models by their number of layers: their scale does not depend on the width of a
    head.
    """
    if config["num_hidden_layers"] == largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def write_windows(config: Gemma2Config | Gemma3Config, usual: int) -> dict[str, Any]:
    """Return the metadata of the sliding window, and of its layers if not every ``usual``-th has none."""
    window = config.sliding_window or config.max_position_embeddings
    slides = [config.window(i) is not None for i in range(config.num_hidden_layers)]
    period = window_period(slides, usual)
    if period is None:
        raise unsupported("'layer_types' that do not repeat with a full layer at the end")
    return {"attention.sliding_window": window, **({WINDOWS: period} if period != usual else {})}


def _read_gemma2(given: Settings, tensors: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the caps and windows. Gemma 2's first files leave them to llama.cpp's defaults."""
    attn_cap = given.number("attn_logit_softcapping", 50.0, positive=False)
    final_cap = given.number("final_logit_softcapping", 30.0, positive=False)
    return {
        "attn_logit_softcapping": attn_cap or None,
        "final_logit_softcapping": final_cap or None,
        "query_pre_attn_scalar": query_scalar(given, config, 46),
        "sliding_window": given.count("attention.sliding_window", 4096),
        "layer_types": layer_types(given, config, 2),
    }


def _write_gemma2(config: Gemma2Config) -> dict[str, Any]:
    """Return the metadata of the caps and windows."""
    caps = {
        key: getattr(config, key) for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    for key, cap in caps.items():
        if cap is None:  # llama.cpp would use its default
            raise unsupported(f"Gemma 2 without '{key}' in a GGUF file")
    return {**caps, **write_windows(config, 2)}


GEMMA2_GGUF = GGUFTable(
    "gemma2",
    _GGUF_NORMS_2,
    constants=_GGUF_FIXED,
    read=_read_gemma2,
    write=_write_gemma2,
    biases=(),
    is_tied=True,
    written=(*_GGUF_WINDOWS, "attn_logit_softcapping"),
)

GEMMA2 = Gemma2.family = Family.of(Gemma2, Gemma2Config, names=Names(*DECODER), gguf=GEMMA2_GGUF)


# --- Gemma 3: norms of queries and keys, and a RoPE for each kind of layer -----------------------


@dataclass(frozen=True)
class Gemma3Config(LanguageModelConfig):
    """The settings of a Gemma 3's text model: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        rope_parameters: the rotary position embedding of layers with full attention.
        local_rope_parameters: that of layers with a sliding window.
        final_logit_softcapping, query_pre_attn_scalar, sliding_window, layer_types: as in :class:`Gemma2Config`.
        sliding_window_pattern: n, where every n-th layer has full attention, unless ``layer_types`` lists the layers.
        use_bidirectional_attention: whether tokens also attend to those after them, as in EmbeddingGemma; half of the
            sliding window is then on each side.

    Raises:
        ValueError: layers have a sliding window, and ``sliding_window`` is None.
    """

    model_type = "gemma3_text"
    # transformers reads this key too, but never uses it.
    unused: ClassVar[Sequence[str]] = ("attn_logit_softcapping",)

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=256)
    hidden_activation: str = _GELU
    max_position_embeddings: int = config_field(131_072, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=1_000_000.0)
    local_rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    sliding_window: int | None = config_field(4096, minimum=1)
    sliding_window_pattern: int = config_field(6, minimum=1, maximum=1000)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    query_pre_attn_scalar: float = config_field(256.0, minimum=1e-3)
    final_logit_softcapping: float | None = config_field(None, minimum=1e-3)
    use_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        if not self.layer_types:
            kinds = full_every(self.sliding_window_pattern, self.num_hidden_layers)
            self._set("layer_types", kinds)
        if SLIDING not in self.layer_types:
            self._set("sliding_window", None)
        super().__post_init__()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file. Published multimodal files leave out many of the text model's."""
        raw = with_defaults(raw, {
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        })  # fmt: skip
        if raw.get("sliding_window", 0) is None:
            values["sliding_window"] = None
        context = cls.read_field(raw, "max_position_embeddings")
        thetas, older = {FULL: 1e6, SLIDING: 1e4}, {SLIDING: "rope_local_base_freq"}
        by_kind = ropes_by_kind(raw, context, thetas, older)
        values |= {"rope_parameters": by_kind[FULL], "local_rope_parameters": by_kind[SLIDING]}
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the base of the second RoPE, or with both Ropes if the second is scaled too."""
        found, local = super().to_hf(), self.local_rope_parameters
        found["query_pre_attn_scalar"] = int(self.query_pre_attn_scalar)
        if local.scaling is None:
            return {**found, "rope_local_base_freq": local.theta}
        return {**found, **ropes_to_hf({FULL: self.rope_parameters, SLIDING: local})}


class Gemma3Attention(Module):
    """Attention with norms of queries and keys, and in some layers a sliding window and a RoPE of its own."""

    def __init__(self, config: Gemma3Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.scale, self.kind = config.query_pre_attn_scalar**-0.5, config.layer_types[layer]
        window = config.window(layer)
        self.mask = with_blocks(CAUSAL if window is None else sliding(window), cut=True)
        if config.use_bidirectional_attention:
            self.mask = bidirectional(None if window is None else window // 2)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.q_norm, self.k_norm = GemmaNorm(D, dtype, eps), GemmaNorm(D, dtype, eps)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles]
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(self.q_norm(q), angles[self.kind]), rope(self.k_norm(k), angles[self.kind])
        y, cache = attend(q, k, v, cache, self.mask, scale=self.scale)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Gemma3Model(Module):
    """A Gemma 3 without its head: ``model`` in the files."""

    def __init__(self, config: Gemma3Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Gemma2Block(config, Gemma3Attention(config, layer, dtype), dtype)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = GemmaNorm(config.hidden_size, dtype, config.rms_norm_eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        config = self.config
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        angles = {
            FULL: config.rope_parameters.angles(cache, config.head_dim),
            SLIDING: config.local_rope_parameters.angles(cache, config.head_dim),
        }
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Gemma3(LanguageModel):
    """The text model of a Gemma 3. The vision part of multimodal checkpoints is ignored.

    Args:
        config, dtype, stacked: as for :class:`Gemma`.

    Example:
        >>> config = Gemma3Config(100, 8, 16, num_hidden_layers=7, num_attention_heads=2)
        >>> [layer for layer in range(7) if config.window(layer) is None]
        [5]
    """

    def __init__(self, config: Gemma3Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Gemma3Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``, capped if the model has a cap."""
        return soft_cap(super().logits(x), self.config.final_logit_softcapping)


def _read_gemma3(
    given: Settings, tensors: Any, config: dict[str, Any], largest: int = 62
) -> dict[str, Any]:
    """Return the cap, windows and Ropes."""
    window = given.count("attention.sliding_window", 0, minimum=0)
    cap = given.number("final_logit_softcapping", 0.0, positive=False)
    return {
        "final_logit_softcapping": cap or None,
        "query_pre_attn_scalar": query_scalar(given, config, largest),
        # Without a window every layer sees all tokens, and any number will do.
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": layer_types(given, config, 6 if window else 1),
        "rope_local_base_freq": given.number("rope.freq_base_swa", 10_000.0),
    }


def _write_gemma3(config: Gemma3Config) -> dict[str, Any]:
    """Return the metadata of the cap, windows and Ropes."""
    if config.local_rope_parameters.scaling is not None:
        raise unsupported("rope scaling in sliding-window layers of a GGUF file")
    cap = config.final_logit_softcapping
    found = {"final_logit_softcapping": cap} if cap is not None else {}
    found["rope.freq_base_swa"] = config.local_rope_parameters.theta
    return {**found, **(write_windows(config, 6) if config.sliding_window else {})}


_GGUF_NORMS_3 = {
    **_GGUF_NORMS_2,
    ".attn_q_norm": Rule("self_attn.q_norm", _ONE_MORE),
    ".attn_k_norm": Rule("self_attn.k_norm", _ONE_MORE),
}
EMBEDDING_GGUF = GGUFTable(
    "gemma-embedding",
    {**_GGUF_NORMS_3, "dense_2": "dense_2", "dense_3": "dense_3"},
    constants={
        **_GGUF_FIXED,
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
    },
    read=partial(_read_gemma3, largest=0),
    write=_write_gemma3,
    biases=(),
    written=(*_GGUF_WINDOWS, "rope.freq_base_swa", "pooling_type", "attention.causal"),
)
GEMMA3_GGUF = GGUFTable(
    "gemma3",
    _GGUF_NORMS_3,
    constants=_GGUF_FIXED,
    read=_read_gemma3,
    write=_write_gemma3,
    biases=(),
    written=(*_GGUF_WINDOWS, "rope.freq_base_swa"),
    instead=lambda config: ("gemma-embedding", {}) if config.use_bidirectional_attention else None,
    variants=(EMBEDDING_GGUF,),
)

GEMMA3 = Gemma3.family = Family.of(
    Gemma3,
    Gemma3Config,
    "Gemma3ForCausalLM",
    "Gemma3TextModel",
    # EmbeddingGemma's dense layers in GGUF files belong to its pooling.
    names=Names(Drop("dense_2.*", "dense_3.*"), *DECODER),
    gguf=GEMMA3_GGUF,
)
