"""ModernBERT: an encoder with RoPE, a gated MLP, norms before attention and MLP, and windows in most layers.

The first layer has no norm before its attention, because the embeddings are already normalised. Attributes
are named as in Hugging Face's checkpoints.

Source: arXiv:2412.13663.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax

from ..graph.device import DeviceRef
from ..nn.activation import ACTIVATIONS
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from .encoder.attention import EncoderAttention, TokenInputs, Types
from .encoder.block import EncoderMLP
from .encoder.model import Encoder, in_turn, with_head
from .family import Family
from .gguf.architectures.modernbert import MODERNBERT_GGUF
from .names import Drop, Names, Prefix
from .parts import (
    FULL,
    SLIDING,
    EncoderConfig,
    Rope,
    alias,
    config_field,
    constant,
    layer_count,
    layer_kinds,
    layers,
    size,
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
    special = ("bos_token_id", "eos_token_id", "pad_token_id")

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
    num_labels: int = constant(2)  # of "id2label"

    hidden_act, layer_norm_eps = alias("hidden_activation"), alias("norm_eps")

    def _fill_in(self) -> None:
        if not self.layer_types:
            self._set("layer_types", all_but_every_nth(self.num_hidden_layers, 3))

    def _check(self) -> None:
        super()._check()
        if self.classifier_activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"'classifier_activation' is {self.classifier_activation[:80]!r}: it must be one of {known}"
            )
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"'classifier_pooling' is {self.classifier_pooling[:60]!r}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file: the kinds of layers and the RoPE of each kind have two spellings."""
        period = raw.get("global_attn_every_n_layers")
        period = 3 if period is None else period
        if type(period) is not int or period < 1:
            raise ValueError(
                f"'global_attn_every_n_layers' is {str(period)[:60]}, not a positive integer"
            )
        kinds = layer_kinds(raw, all_but_every_nth(layer_count(raw), period))
        context = cls.read_field(raw, "max_position_embeddings")
        given, scaling = object_of(raw, "rope_parameters"), object_of(raw, "rope_scaling")
        if not all(isinstance(given.get(kind) or {}, Mapping) for kind in _THETAS):
            raise ValueError("'rope_parameters' must have one object for each kind of layer")
        ropes: dict[str, Rope] = {}
        for kind, (key, default) in _THETAS.items():
            theta = raw.get(key)
            if theta is None and kind == SLIDING and key in raw:
                theta = ropes[FULL].theta  # null: that of the layers without windows
            part = {"rope_theta": default if theta is None else theta}
            part |= {**scaling, **(given.get(kind) or {})}
            ropes[kind] = rope_of(part, "rope_parameters", context, raw)
        values = {"rope_parameters": ropes[FULL], "local_rope_parameters": ropes[SLIDING], **values}
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


def all_but_every_nth(layers: int, n: int) -> tuple[str, ...]:
    """Return the kind of each layer: those with the numbers 0, n, 2n and so on have no window."""
    return tuple(SLIDING if i % n else FULL for i in range(layers))


class ModernBertAttention(EncoderAttention):
    """Self-attention with one projection of queries, keys and values."""

    names: ClassVar[tuple[str, ...]] = ("Wqkv", "Wo")


class ModernBertMLP(EncoderMLP):
    """A gated MLP with one projection of both halves."""

    names: ClassVar[tuple[str, ...]] = ("Wi", "Wo")
    halves: ClassVar[str] = "gate up"


class ModernBertEmbeddings(Module):
    """The embeddings of tokens, normalised."""

    def __init__(self, config: ModernBertConfig, types: Types):
        super().__init__()
        self.tok_embeddings = Embedding(
            config.vocab_size, config.hidden_size, types.dtype, DeviceRef.CPU()
        )
        self.norm = types.norm(config, config.norm_bias)

    def __call__(self, input_ids: Any) -> jax.Array:
        x = self.tok_embeddings(input_ids)
        return self.norm(x).astype(x.dtype)


class ModernBertLayer(Module):
    """``h = x + attn(norm(x))``, then ``h + mlp(norm(h))``; the first layer's attention has no norm."""

    def __init__(self, config: ModernBertConfig, number: int, types: Types):
        super().__init__()
        bias = config.norm_bias
        window = config.local_attention // 2 if config.layer_types[number] == SLIDING else None
        self.attn_norm = types.norm(config, bias) if number else None
        self.attn = ModernBertAttention(
            config,
            types,
            has_bias=config.attention_bias,
            window=window,
            rope="global" if window is None else "local",
        )
        self.mlp_norm = types.norm(config, bias)
        self.mlp = ModernBertMLP(config, types, has_bias=config.mlp_bias)

    def __call__(self, x: jax.Array, tokens: TokenInputs) -> jax.Array:
        """Hidden states ``[B, T, E]`` → the same shape."""
        y = x if self.attn_norm is None else self.attn_norm(x).astype(x.dtype)
        x = x + self.attn(y, tokens)
        return x + self.mlp(self.mlp_norm(x).astype(x.dtype))


class ModernBertHead(Module):
    """A linear layer, an activation function and a norm, before the linear layer of the scores."""

    def __init__(self, config: ModernBertConfig, types: Types):
        super().__init__()
        self.activation = config.classifier_activation
        self.dense = types.linear(config.hidden_size, config.hidden_size, config.classifier_bias)
        self.norm = types.norm(config, config.norm_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(ACTIVATIONS[self.activation](self.dense(x))).astype(x.dtype)


class ModernBertModel(Encoder):
    """A ModernBERT without a head.

    Example:
        >>> model = ModernBertModel(ModernBertConfig(100, 8, 16, num_hidden_layers=4, num_attention_heads=2))
        >>> model.config.layer_types.count("full_attention"), model.max_length
        (2, 8192)
    """

    takes_types: ClassVar[bool] = False

    def make(self, config: ModernBertConfig, types: Types) -> None:
        """Makes embeddings, layers and the last norm."""
        self.embeddings = ModernBertEmbeddings(config, types)
        layers = range(config.num_hidden_layers)
        self.layers: Any = LayerList(ModernBertLayer(config, i, types) for i in layers)
        self.final_norm = types.norm(config, config.norm_bias)

    def make_head(self, config: ModernBertConfig, types: Types) -> None:
        """Makes ``head`` and ``classifier``."""
        self.head = ModernBertHead(config, types)
        super().make_head(config, types)

    @property
    def head_pooling(self) -> str:  # type: ignore[override]
        """The pooling of the state that the head takes: ``classifier_pooling``, "cls" or "mean"."""
        return self.config.classifier_pooling

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last norm."""
        x = self.embeddings(input_ids)
        x = in_turn(self.layers, x, TokenInputs(mask, self.rotations(positions, mask)))
        return self.final_norm(x).astype(x.dtype)

    def scores(self, pooled: jax.Array) -> jax.Array:
        """The classification head: pooled states ``[B, E]`` → scores ``[B, labels]``."""
        return self.classifier(self.head(pooled))


class ModernBertForSequenceClassification(ModernBertModel):
    """A ModernBERT with a classification head: a reranker, for example."""


MODERNBERT = ModernBertModel.family = Family.of(
    ModernBertModel,
    ModernBertConfig,
    "ModernBertModel",
    "ModernBertForMaskedLM",
    "ModernBertForTokenClassification",
    "ModernBertForQuestionAnswering",
    "ModernBertForMultipleChoice",
    names=Names(
        Prefix({"model.": ""}),
        Drop("head.*", "decoder.*", "classifier.*", "qa_outputs.*", head=True),
    ),
    gguf=MODERNBERT_GGUF,
)
MODERNBERT_HEAD = ModernBertForSequenceClassification.family = with_head(
    MODERNBERT, ModernBertForSequenceClassification
)
