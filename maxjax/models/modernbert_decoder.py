"""ModernBERT's decoders, such as Ettin: causal attention with sliding windows in most layers, and gated MLPs.

::

    x = embeddings.norm(tok_embeddings[ids])
    in each layer:
        h = attn_norm(x)                                     the first layer has no attn_norm
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + Wo(softmax(q kᵀ / √D) v)                     for each head; in most layers over a window
        gate, up = split(mlp.Wi(mlp_norm(x)))
        x = x + mlp.Wo(gelu(gate) · up)
    logits = lm_head(transform.norm(gelu(transform.dense(final_norm(x)))))

RoPE has one base in layers with a window and another in those without. Files call ``transform`` lm_head, and
``lm_head`` decoder.

Sources: arXiv:2412.13663, arXiv:2507.11412; transformers' ``modeling_modernbert_decoder``.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features, V tokens in the vocabulary.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import shown
from ..graph.device import DeviceRef
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import LayerNorm
from .family import Family
from .modernbert import all_but_every_nth, ropes_of_layers
from .names import ROPE_TABLES, Names, Rename
from .parts import (
    CAUSAL,
    FULL,
    SLIDING,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    alias,
    attend,
    config_field,
    constant,
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    positive_integer,
    replicate_over_mesh,
    rope,
    ropes_to_hf,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_fused_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class ModernBertDecoderConfig(LanguageModelConfig):
    """The settings of a ModernBERT decoder: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        sliding_window: number of tokens, itself included, that a token attends to in layers with a window; half of
            ``local_attention`` in a file without the key.
        layer_types: whether each layer has a window; by default all but every third, from the first on.
        rope_parameters, local_rope_parameters: RoPE of layers without and with a window.
        norm_bias, attention_bias, mlp_bias: whether norms, and the linear layers of attention and MLP, have biases.
        classifier_activation, classifier_bias: activation function of the head, and whether its first linear layer
            has a bias.
        decoder_bias: whether the logits have a bias.
    """

    model_type = "modernbert-decoder"
    special = MappingProxyType({"bos_token_id": -1, "eos_token_id": None, "pad_token_id": -1})
    num_key_value_heads = alias("num_attention_heads")

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    hidden_activation: str = "gelu"
    max_position_embeddings: int = config_field(8192, minimum=1)
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = config_field(64, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    rope_parameters: Rope = Rope(160_000.0)
    local_rope_parameters: Rope = constant(Rope(10_000.0))
    classifier_activation: str = "gelu"
    classifier_bias: bool = False
    decoder_bias: bool = True
    tie_word_embeddings: bool = True

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file: the kinds of layers and the RoPE of each kind have two spellings."""
        raw = with_defaults(raw, {"local_attention": 128, "global_attn_every_n_layers": 3})
        width, period = (
            raw.get("local_attention"),
            positive_integer(raw, "global_attn_every_n_layers"),
        )
        kinds = layer_kinds(raw, all_but_every_nth(layer_count(raw), period))
        window = raw.get("sliding_window")
        if window is None and SLIDING in kinds:
            if type(width) is not int or width < 2:
                raise ValueError(f"'local_attention' must be at least 2, not {shown(width)}")
            window = width // 2
        by_kind = ropes_of_layers(raw, cls.read_field(raw, "max_position_embeddings"))
        values |= {"rope_parameters": by_kind[FULL], "local_rope_parameters": by_kind[SLIDING]}
        raw = raw.replaced({"layer_types": kinds, "sliding_window": window})
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with RoPE's for each kind of layer, and the window under both keys."""
        found = super().to_hf()
        if self.sliding_window is not None:
            found["local_attention"] = 2 * self.sliding_window
        for key in ("rope_theta", "rope_scaling"):
            found.pop(key, None)
        by_kind = {FULL: self.rope_parameters, SLIDING: self.local_rope_parameters}
        return {**found, **ropes_to_hf(by_kind)}

    def _fill_in(self) -> None:
        if not self.layer_types:
            self._set("layer_types", all_but_every_nth(self.num_hidden_layers, 3))

    def _check(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"'hidden_size' {self.hidden_size} is not a multiple of 'num_attention_heads' "
                f"{self.num_attention_heads}"
            )
        super()._check()


def _norm(config: ModernBertDecoderConfig, dtype: DType) -> LayerNorm:
    """Return a LayerNorm of hidden states."""
    cpu = [DeviceRef.CPU()]
    return LayerNorm(config.hidden_size, cpu, dtype, config.norm_eps, use_bias=config.norm_bias)


class ModernBertDecoderEmbeddings(Module):
    """The embeddings of tokens, normalised."""

    def __init__(self, config: ModernBertDecoderConfig, dtype: DType):
        super().__init__()
        self.dtype = dtype
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.norm = _norm(config, dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.norm(self.tok_embeddings(ids).astype(self.dtype.np))  # [B, T, E]


class ModernBertDecoderAttention(Module):
    """Attention with rotary positions, to all tokens before a token or to those in a window."""

    def __init__(self, config: ModernBertDecoderConfig, layer: int, dtype: DType):
        super().__init__()
        E, bias, window = config.hidden_size, config.attention_bias, config.window(layer)
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kind = config.layer_types[layer]
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, E, dtype, has_bias=bias)
        self.k_proj = Linear(E, E, dtype, has_bias=bias)
        self.v_proj = Linear(E, E, dtype, has_bias=bias)
        self.Wo = Linear(E, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles]
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles[self.kind]), rope(k, angles[self.kind])
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.Wo(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.heads, "v_proj": self.heads}
        return split_heads_over_mesh(outputs, {"Wo": self.heads}, self.head_dim)


class ModernBertDecoderMLP(Module):
    """The gated MLP, with one linear layer for both inputs of the product."""

    def __init__(self, config: ModernBertDecoderConfig, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act, self.features = config.hidden_activation, F
        self.Wi = Linear(E, 2 * F, dtype, has_bias=bias)
        self.Wo = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.Wi(x).astype(x.dtype), 2, axis=-1)  # [B, T, F]
        return self.Wo(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        outputs = split_fused_features_over_mesh("Wi", self.features)
        return outputs | split_features_over_mesh([], ["Wo"])


class ModernBertDecoderBlock(Module):
    """Attention, then the MLP, each with a norm before it; the first layer's input is already normalised."""

    def __init__(self, config: ModernBertDecoderConfig, layer: int, dtype: DType):
        super().__init__()
        self.attn_norm = _norm(config, dtype) if layer else None
        self.attn = ModernBertDecoderAttention(config, layer, dtype)
        self.mlp_norm = _norm(config, dtype)
        self.mlp = ModernBertDecoderMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles]
    ) -> tuple[jax.Array, LayerCache]:
        h = x if self.attn_norm is None else self.attn_norm(x)
        y, cache = self.attn(h, cache, angles)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class ModernBertDecoderModel(Module):
    """The model without its head: ``model`` in the files."""

    embed_tokens = alias("embeddings.tok_embeddings")

    def __init__(self, config: ModernBertDecoderConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embeddings = ModernBertDecoderEmbeddings(config, dtype)
        self.layers = LayerList(
            ModernBertDecoderBlock(config, layer, dtype)
            for layer in range(config.num_hidden_layers)
        )
        self.final_norm = _norm(config, dtype)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        config = self.config
        x = self.embeddings(ids)  # [B, T, E]
        by_kind = {FULL: config.rope_parameters, SLIDING: config.local_rope_parameters}
        angles = {kind: one.angles(cache, config.head_dim) for kind, one in by_kind.items()}
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.final_norm(x), cache


class ModernBertDecoderTransform(Module):
    """A linear layer, an activation function and a norm, before the linear layer of the logits."""

    def __init__(self, config: ModernBertDecoderConfig, dtype: DType):
        super().__init__()
        E = config.hidden_size
        self.act = config.classifier_activation
        self.dense = Linear(E, E, dtype, has_bias=config.classifier_bias)
        self.norm = _norm(config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(activation(self.act)(self.dense(x)).astype(x.dtype))  # [..., E]

    def sharding_rules(self) -> dict[str, Any]:
        """Holds the linear layer completely on every device."""
        return replicate_over_mesh("dense")


class ModernBertDecoder(LanguageModel):
    """A ModernBERT decoder, a language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = ModernBertDecoderConfig(100, 8, 16, num_hidden_layers=4, num_attention_heads=2)
        >>> ModernBertDecoder(config).cache(1, 100).sliding.size
        64
    """

    def __init__(
        self, config: ModernBertDecoderConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = ModernBertDecoderModel(config, self.dtype)
        self.transform = ModernBertDecoderTransform(config, self.dtype)
        tied, bias = config.tie_word_embeddings, config.decoder_bias
        self.lm_head = self.make_head(config.hidden_size, tied=tied, has_bias=bias)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``."""
        return super().logits(self.transform(x))


MODERNBERT_DECODER = ModernBertDecoder.family = Family.of(
    ModernBertDecoder,
    ModernBertDecoderConfig,
    "ModernBertDecoderForCausalLM",
    names=Names(
        ROPE_TABLES,
        Rename.of_layers(
            {
                "lm_head.dense": "transform.dense",
                "lm_head.norm": "transform.norm",
                "decoder": "lm_head",
            },
            written=True,
        ),
    ),
    tied=("lm_head.weight", "model.embeddings.tok_embeddings.weight"),
)
