"""ModernBERT: an encoder with RoPE, a gated MLP, norms before attention and MLP, and windows in most layers.

The first layer has no norm before its attention, because the embeddings are normalised. Attributes are named
as in Hugging Face's checkpoints.

Source: arXiv:2412.13663.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..graph.device import DeviceRef
from ..nn.activation import ACTIVATIONS
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from .config import setting
from .decoder.config import check_activation, check_kinds, count_of, layers_of, own, slides_of
from .decoder.rope import Rope, rope_of
from .encoder.attention import EncoderAttention, TokenInputs, Types
from .encoder.block import EncoderMLP
from .encoder.config import EncoderConfig
from .encoder.model import Encoder, in_turn, with_head
from .family import Family
from .gguf.architectures.modernbert import MODERNBERT_GGUF

_KINDS = ("full_attention", "sliding_attention")
_THETAS = {"global": 160_000.0, "local": 10_000.0}


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """The settings of a ModernBERT, with Hugging Face's defaults for missing keys.

    Attributes:
        local_attention: number of tokens in a window, half of them on each side.
        local_layers: whether each layer has a window; by default all but every third.
    """

    model_type = "modernbert"

    max_position_embeddings: int = setting(default=8192, minimum=1)
    layer_norm_eps: float = setting("norm_eps", default=1e-5)
    hidden_act: str = setting("hidden_activation", default="gelu")
    type_vocab_size: int = own(0)
    norm_bias: bool = setting(default=False)
    attention_bias: bool = setting(default=False)
    mlp_bias: bool = setting(default=False)
    local_attention: int = setting(default=128, minimum=1)
    classifier_pooling: str = setting(default="cls")
    classifier_bias: bool = setting(default=False)
    classifier_activation: str = setting(default="gelu")
    local_layers: tuple = own(())
    rope: Rope | None = own(Rope(_THETAS["global"]))
    local_rope: Rope | None = own(Rope(_THETAS["local"]))

    def __post_init__(self) -> None:
        if not self.local_layers:
            slides = tuple(bool(i % 3) for i in range(self.num_layers))
            object.__setattr__(self, "local_layers", slides)
        check_kinds(self.local_layers, self.num_layers)
        check_activation("classifier_activation", self.classifier_activation)
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"'classifier_pooling' is {self.classifier_pooling[:60]!r}")
        super().__post_init__()

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        """The layers whose tensors differ from those of the others: the first, which has a norm less."""
        return tuple(i == 0 for i in range(self.num_layers))

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with windows and the RoPE of each kind, in both spellings."""
        period, layers = count_of(raw, "global_attn_every_n_layers", 3), layers_of(raw)
        context = raw.get("max_position_embeddings")
        context = context if type(context) is int and context > 0 else 8192
        given = raw.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or not all(
            isinstance(given.get(kind) or {}, Mapping) for kind in _KINDS
        ):
            raise ValueError("'rope_parameters' must have one object for each kind of layer")
        ropes = []
        for kind, name in zip(_KINDS, ("global", "local"), strict=True):
            theta = raw.get(f"{name}_rope_theta")
            theta = ropes[0].theta if theta is None and f"{name}_rope_theta" in raw else theta
            part = {"rope_theta": _THETAS[name] if theta is None else theta}
            part |= {**(raw.get("rope_scaling") or {}), **(given.get(kind) or {})}
            ropes.append(rope_of(part, "rope_parameters", context, raw))
        slides = slides_of(raw, [bool(i % period) for i in range(layers)])
        return {"local_layers": slides, "rope": ropes[0], "local_rope": ropes[1]}


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
        slides, bias = config.local_layers[number], config.norm_bias
        self.attn_norm = types.norm(config, bias) if number else None
        self.attn = ModernBertAttention(
            config, types, has_bias=config.attention_bias,
            window=config.local_attention // 2 if slides else None,
            rope="local" if slides else "global",
        )  # fmt: skip
        self.mlp_norm = types.norm(config, bias)
        self.mlp = ModernBertMLP(config, types, has_bias=config.mlp_bias)

    def __call__(self, x: jax.Array, tokens: TokenInputs) -> jax.Array:
        """Hidden states ``[B, T, E]`` → the same shape."""
        y = x if self.attn_norm is None else self.attn_norm(x).astype(x.dtype)
        x = x + self.attn(y, tokens)
        return x + self.mlp(self.mlp_norm(x).astype(x.dtype))


class ModernBertHead(Module):
    """A linear layer, an activation function and a norm, before the layer of the scores."""

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
        >>> model = ModernBertModel(ModernBertConfig(100, 8, 16, num_layers=4, num_heads=2))
        >>> model.config.local_layers, model.max_length
        ((False, True, True, False), 8192)
    """

    takes_types: ClassVar[bool] = False

    def make(self, config: ModernBertConfig, types: Types) -> None:
        """Makes embeddings, layers and the last norm."""
        self.embeddings = ModernBertEmbeddings(config, types)
        layers = range(config.num_layers)
        self.layers: Any = LayerList(ModernBertLayer(config, i, types) for i in layers)
        self.final_norm = types.norm(config, config.norm_bias)

    def make_head(self, config: ModernBertConfig, types: Types) -> None:
        """Makes ``head`` and ``classifier``."""
        self.head = ModernBertHead(config, types)
        super().make_head(config, types)

    @property
    def head_pooling(self) -> str:  # type: ignore[override]
        """The pooling of the state that the head takes: "cls" or "mean", as the files say."""
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
    ModernBertModel, ModernBertConfig,
    "ModernBertModel", "ModernBertForMaskedLM", "ModernBertForTokenClassification",
    "ModernBertForQuestionAnswering", "ModernBertForMultipleChoice",
    prefixes=("model.",),
    ignored=("head.*", "decoder.*", "classifier.*", "qa_outputs.*"),
    gguf=MODERNBERT_GGUF,
)  # fmt: skip
MODERNBERT_HEAD = ModernBertForSequenceClassification.family = with_head(
    MODERNBERT, ModernBertForSequenceClassification, "ModernBertForSequenceClassification"
)
