"""ModernBERT: an encoder with RoPE, a gated MLP, norms before attention and MLP, and windows in most layers.

The first layer has no norm before its attention, because the embeddings are already normalised. Attributes
are named as in Hugging Face's checkpoints.

Source: arXiv:2412.13663.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..graph.device import DeviceRef
from ..nn.activation import ACTIVATIONS
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from .config import setting
from .decoder.config import check_activation, own
from .encoder.alternating import AlternatingConfig
from .encoder.attention import EncoderAttention, TokenInputs, Types
from .encoder.block import EncoderMLP
from .encoder.model import Encoder, in_turn, with_head
from .family import Family
from .gguf.architectures.modernbert import MODERNBERT_GGUF
from .names import Drop, Names, Prefix


@dataclass(frozen=True)
class ModernBertConfig(AlternatingConfig):
    """The settings of a ModernBERT, with Hugging Face's defaults for missing keys."""

    model_type = "modernbert"
    special = ("bos_token_id", "eos_token_id", "pad_token_id")

    layer_norm_eps: float = setting("norm_eps", default=1e-5)
    hidden_act: str = setting("hidden_activation", default="gelu")
    type_vocab_size: int = own(0)
    norm_bias: bool = setting(default=False)
    attention_bias: bool = setting(default=False)
    mlp_bias: bool = setting(default=False)
    classifier_pooling: str = setting(default="cls")
    classifier_bias: bool = setting(default=False)
    classifier_activation: str = setting(default="gelu")

    def __post_init__(self) -> None:
        check_activation("classifier_activation", self.classifier_activation)
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"'classifier_pooling' is {self.classifier_pooling[:60]!r}")
        super().__post_init__()

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        """A kind for each layer; layers of one kind have the same tensors. The first layer has one norm less."""
        return tuple(i == 0 for i in range(self.num_hidden_layers))


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
        self.attn_norm = types.norm(config, bias) if number else None
        self.attn = ModernBertAttention(
            config, types, has_bias=config.attention_bias, **config.attention_of(number)
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
        >>> model.config.local_layers, model.max_length
        ((False, True, True, False), 8192)
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
