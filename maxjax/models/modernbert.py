"""ModernBERT: an encoder with RoPE, a gated MLP, norms before attention and MLP, and windows in most layers.

::

    x = norm(tok_embeddings[ids])
    in each layer:
        q, k, v = split(attn.Wqkv(attn_norm(x)))                the first layer has no attn_norm
        x = x + attn.Wo(softmax(rope(q) rope(k)ᵀ / √D) v)        for each head; in most layers over a window
        gate, up = split(mlp.Wi(mlp_norm(x)))
        x = x + mlp.Wo(gelu(gate) · up)
    x = final_norm(x)
    scores = classifier(head.norm(gelu(head.dense(pooled))))

Source: arXiv:2412.13663.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import shown
from ..nn.activation import activation
from ..nn.attention.both_ways import both_ways
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from .family import Family
from .gguf.config.read import Config, Shapes
from .gguf.metadata import Settings, unsupported
from .gguf.table import ENCODER_NAMES, GGUFTable
from .names import Body, Drop, Names
from .parts import (
    FULL,
    SLIDING,
    Angles,
    AnswerFinder,
    Dtypes,
    Encoder,
    EncoderConfig,
    LanguageModelConfig,
    MaskedWordPredictor,
    Pooler,
    Rope,
    TextClassifier,
    TokenClassifier,
    config_field,
    constant,
    encoder_angles,
    layer_count,
    layer_kinds,
    layer_norm,
    layers,
    merge_heads,
    positive_integer,
    rope,
    run_encoder,
    size,
    split_features_over_mesh,
    split_fused_features_over_mesh,
    split_fused_heads_over_mesh,
    split_heads,
    split_heads_over_mesh,
    start_and_end,
    vocabulary_layer,
    with_head,
)
from .parts.rotary import object_of, rope_of
from .unread import ReadTracker

# The base of each kind of layer's RoPE, and its key in files without ``rope_parameters``.
_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """The settings of a ModernBERT: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        local_attention: number of tokens in a window, half of them on each side.
        layer_types: whether each layer has a window; by default all but every third, from the first on.
        rope_parameters, local_rope_parameters: RoPE of layers without and with a window.
    """

    model_type = "modernbert"
    special = LanguageModelConfig.special

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
    local_attention: int = config_field(128, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    rope_parameters: Rope = Rope(160_000.0)
    local_rope_parameters: Rope = constant(Rope(10_000.0))
    classifier_pooling: str = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    decoder_bias: bool = True

    def _fill_in(self) -> None:
        super()._fill_in()
        if not self.layer_types:
            self._set("layer_types", all_but_every_nth(self.num_hidden_layers, 3))

    def _check(self) -> None:
        super()._check()
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"'classifier_pooling' is {shown(self.classifier_pooling)}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file: the kinds of layers and the RoPE of each kind have two spellings."""
        period = positive_integer(raw, "global_attn_every_n_layers", 3)
        kinds = layer_kinds(raw, all_but_every_nth(layer_count(raw), period))
        context = cls.read_field(raw, "max_position_embeddings")
        by_kind = ropes_of_layers(raw, context)
        values = {
            "rope_parameters": by_kind[FULL],
            "local_rope_parameters": by_kind[SLIDING],
            **values,
        }
        return super().from_hf(ReadTracker.of(raw).replaced({"layer_types": kinds}), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the base of each kind of layer's RoPE."""
        found = super().to_hf()
        for key in ("rope_theta", "rope_scaling"):
            found.pop(key, None)
        thetas = self.rope_parameters.theta, self.local_rope_parameters.theta
        return {**found, "global_rope_theta": thetas[0], "local_rope_theta": thetas[1]}

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        """A kind for each layer; layers of one kind have the same tensors. The first layer has one norm less."""
        return tuple(i == 0 for i in range(self.num_hidden_layers))


def ropes_of_layers(raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
    """Return the RoPE of each kind of layer; files have one object for each, or one base for each.

    Args:
        raw: content of a file.
        context: ``max_position_embeddings``.

    Raises:
        UnsupportedModelError, ValueError: as for :func:`~maxjax.models.parts.rotary.read_rope`; or
            ``rope_parameters`` has no object for each kind.
    """
    given, scaling = object_of(raw, "rope_parameters"), object_of(raw, "rope_scaling")
    if not all(isinstance(given.get(kind) or {}, Mapping) for kind in _THETAS):
        raise ValueError("'rope_parameters' must have one object for each kind of layer")
    by_kind: dict[str, Rope] = {}
    for kind, (key, default) in _THETAS.items():
        theta = raw.get(key)
        if theta is None and kind == SLIDING and key in raw:
            theta = by_kind[FULL].theta  # null: that of the layers without windows
        part = {"rope_theta": default if theta is None else theta}
        part |= {**scaling, **(given.get(kind) or {})}
        by_kind[kind] = rope_of(part, "rope_parameters", context, raw)
    return by_kind


def all_but_every_nth(layers: int, n: int) -> tuple[str, ...]:
    """Return the kind of each layer: those with the numbers 0, n, 2n and so on have no window."""
    return tuple(SLIDING if i % n else FULL for i in range(layers))


class ModernBertEmbeddings(Module):
    """The embeddings of tokens, normalised."""

    def __init__(self, config: ModernBertConfig, dtypes: Dtypes):
        super().__init__()
        E = config.hidden_size
        self.tok_embeddings = Embedding(config.vocab_size, E, dtypes.dtype)
        self.norm = layer_norm(E, config.norm_eps, dtypes, config.norm_bias)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.tok_embeddings(ids)  # [B, T, E]
        return self.norm(x).astype(x.dtype)


class ModernBertAttention(Module):
    """Self-attention with rotary positions, to all tokens or to those in a window around each token."""

    def __init__(self, config: ModernBertConfig, layer: int, dtypes: Dtypes):
        super().__init__()
        E, bias, self.kind = config.hidden_size, config.attention_bias, config.layer_types[layer]
        self.radius = config.local_attention // 2 if self.kind == SLIDING else None
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.Wqkv = Linear(E, 3 * E, dtypes.dtype, has_bias=bias)
        self.Wo = Linear(E, E, dtypes.dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, angles: dict[str, Angles]
    ) -> jax.Array:
        qkv = jnp.split(self.Wqkv(x).astype(x.dtype), 3, axis=-1)  # 3 × [B, T, E]
        q, k, v = (split_heads(a, self.head_dim) for a in qkv)  # [B, T, H, D]
        q, k = rope(q, angles[self.kind]), rope(k, angles[self.kind])
        y = both_ways(q, k, v, mask, self.radius, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return self.Wo(merge_heads(y)).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = split_fused_heads_over_mesh("Wqkv", self.heads, self.head_dim)
        return outputs | split_heads_over_mesh({}, {"Wo": self.heads}, self.head_dim)


class ModernBertMLP(Module):
    """The gated MLP, with one linear layer for both inputs of the product."""

    def __init__(self, config: ModernBertConfig, dtypes: Dtypes):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act, self.features = config.hidden_activation, F
        self.Wi = Linear(E, 2 * F, dtypes.dtype, has_bias=bias)
        self.Wo = Linear(F, E, dtypes.dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.Wi(x).astype(x.dtype), 2, axis=-1)  # [B, T, F]
        return self.Wo(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        outputs = split_fused_features_over_mesh("Wi", self.features)
        return outputs | split_features_over_mesh([], ["Wo"])


class ModernBertLayer(Module):
    """Attention, then the MLP, each with a norm before it; the first layer's input is already normalised."""

    def __init__(self, config: ModernBertConfig, layer: int, dtypes: Dtypes):
        super().__init__()
        E, eps, bias = config.hidden_size, config.norm_eps, config.norm_bias
        self.attn_norm = layer_norm(E, eps, dtypes, bias) if layer else None
        self.attn = ModernBertAttention(config, layer, dtypes)
        self.mlp_norm = layer_norm(E, eps, dtypes, bias)
        self.mlp = ModernBertMLP(config, dtypes)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, angles: dict[str, Angles]
    ) -> jax.Array:
        y = x if self.attn_norm is None else self.attn_norm(x).astype(x.dtype)
        x = x + self.attn(y, mask, angles)
        return x + self.mlp(self.mlp_norm(x).astype(x.dtype))


class ModernBertHead(Module):
    """A linear layer, an activation function and a norm, before the linear layer of the scores."""

    def __init__(self, config: ModernBertConfig, dtypes: Dtypes):
        super().__init__()
        E = config.hidden_size
        self.act = config.classifier_activation
        self.dense = Linear(E, E, dtypes.dtype, has_bias=config.classifier_bias)
        self.norm = layer_norm(E, config.norm_eps, dtypes, config.norm_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(activation(self.act)(self.dense(x))).astype(x.dtype)


class ModernBertModel(Encoder):
    """A ModernBERT without a head.

    Example:
        >>> model = ModernBertModel(ModernBertConfig(100, 8, 16, num_hidden_layers=4, num_attention_heads=2))
        >>> model.config.layer_types.count("full_attention"), model.max_length
        (2, 8192)
    """

    takes_types: ClassVar[bool] = False

    def __init__(
        self,
        config: Any,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool = False,
    ):
        dtypes = Dtypes.of(dtype, reduce_dtype)
        super().__init__(config, dtypes)
        E, eps, bias = config.hidden_size, config.norm_eps, config.norm_bias
        self.embeddings = ModernBertEmbeddings(config, dtypes)
        self.layers: Any = LayerList(
            ModernBertLayer(config, layer, dtypes) for layer in range(config.num_hidden_layers)
        )
        self.final_norm = layer_norm(E, eps, dtypes, bias)
        self.pooler = Pooler(E, dtypes) if pooler else None

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last norm."""
        config = self.config
        by_kind = {FULL: config.rope_parameters, SLIDING: config.local_rope_parameters}
        angles = {
            kind: encoder_angles(one, positions, mask, config.head_dim)
            for kind, one in by_kind.items()
        }
        x = run_encoder(self.layers, self.embeddings(ids), mask, angles)  # [B, T, E]
        return self.final_norm(x).astype(x.dtype)


class ModernBertForMaskedLM(MaskedWordPredictor, ModernBertModel):
    """A ModernBERT that predicts masked words: ``decoder(head(x))``."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        table = self.embeddings.tok_embeddings
        self.head = ModernBertHead(config, dtypes)
        self.decoder = vocabulary_layer(table, config, dtypes, has_bias=config.decoder_bias)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.decoder(self.head(x))


class ModernBertForTokenClassification(TokenClassifier, ModernBertModel):
    """A ModernBERT with a head for tokens: one that finds names, for example."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.head = ModernBertHead(config, dtypes)
        self.classifier = Linear(config.hidden_size, config.num_labels, dtypes.dtype, has_bias=True)

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """The logits ``[B, T, labels]`` of the tokens."""
        return {"logits": self.classifier(self.head(x)).astype(jnp.float32)}


class ModernBertForQuestionAnswering(AnswerFinder, ModernBertModel):
    """A ModernBERT that finds the answer to a question in a text."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.head = ModernBertHead(config, dtypes)
        self.classifier = Linear(config.hidden_size, 2, dtypes.dtype, has_bias=True)

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """The logits ``[B, T]`` of each token as the first and as the last of the answer."""
        return start_and_end(self.classifier(self.head(x)))


class ModernBertForSequenceClassification(TextClassifier, ModernBertModel):
    """A ModernBERT with a head for texts: a reranker, for example."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.head = ModernBertHead(config, dtypes)
        self.classifier = Linear(config.hidden_size, config.num_labels, dtypes.dtype, has_bias=True)

    @property
    def head_pooling(self) -> str:  # type: ignore[override]
        """The pooling of the state that the head takes: ``classifier_pooling``, "cls" or "mean"."""
        return self.config.classifier_pooling

    def scores(self, pooled: jax.Array) -> jax.Array:
        """Pooled states ``[B, E]`` → logits ``[B, labels]``."""
        return self.classifier(self.head(pooled))


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """The settings in a GGUF file that only this architecture has."""
    if given.any("attention.sliding_window_pattern", 3) != 3:
        raise given.unsupported(f"'{given.prefix}attention.sliding_window_pattern' other than 3")
    return {
        "hidden_activation": given.text("hidden_act", "gelu"),
        "local_attention": given.count("attention.sliding_window", 128),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": given.number("rope.freq_base_swa", 10_000.0),
        "norm_bias": "output_norm.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
    }


def _write_gguf(config: Any) -> dict[str, Any]:
    """The metadata of a GGUF file that only this architecture has."""
    if any((kind == "full_attention") != (i % 3 == 0) for i, kind in enumerate(config.layer_types)):
        raise unsupported("a ModernBERT whose windows are not in all layers but every third")
    if (
        config.local_rope_parameters.scaling is not None
        or config.rope_parameters.scaling is not None
    ):
        raise unsupported("a ModernBERT with 'rope_scaling' in a GGUF file")
    return {
        "attention.sliding_window": config.local_attention, "attention.causal": False,
        "rope.freq_base_swa": config.local_rope_parameters.theta,
    }  # fmt: skip


MODERNBERT_GGUF = GGUFTable(
    "modern-bert",
    {
        **ENCODER_NAMES, "token_embd": "embeddings.tok_embeddings", "token_types": None,
        "token_embd_norm": "embeddings.norm", "output_norm": "final_norm", ".attn_norm": "attn_norm",
        ".attn_qkv": "attn.Wqkv", ".attn_output": "attn.Wo", ".ffn_norm": "mlp_norm",
        ".ffn_gate": None, ".ffn_up": "mlp.Wi", ".ffn_down": "mlp.Wo",
    },
    read=_read_gguf,
    write=_write_gguf,
    biases=(),
    epsilon=("attention.layer_norm_epsilon", "norm_eps"),
    layer="layers.*.",
    written=(
        "attention.causal", "pooling_type", "attention.sliding_window", "rope.freq_base_swa"
    ),
)  # fmt: skip

MODERNBERT = ModernBertModel.family = Family.of(
    ModernBertModel,
    ModernBertConfig,
    "ModernBertModel",
    "ModernBertForMultipleChoice",
    names=Names(
        Body("model."),
        Drop("head.*", "decoder.*", "classifier.*", "qa_outputs.*", head=True),
    ),
    gguf=MODERNBERT_GGUF,
)
ModernBertForMaskedLM.family = with_head(
    MODERNBERT,
    ModernBertForMaskedLM,
    "head.*",
    "decoder.*",
    layer="decoder",
    table="embeddings.tok_embeddings.weight",
)
ModernBertForTokenClassification.family = with_head(
    MODERNBERT, ModernBertForTokenClassification, "head.*", "classifier.*"
)
ModernBertForQuestionAnswering.family = with_head(
    MODERNBERT, ModernBertForQuestionAnswering, "head.*", "classifier.*"
)
ModernBertForSequenceClassification.family = with_head(
    MODERNBERT, ModernBertForSequenceClassification, "head.*", "classifier.*"
)
