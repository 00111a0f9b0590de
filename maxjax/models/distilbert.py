"""DistilBERT: a BERT with half the layers, and no token types or pooler.

::

    x = LayerNorm(word_embeddings[ids] + position_embeddings[positions])
    in each layer:
        q, k, v = q_lin(x), k_lin(x), v_lin(x)
        x = sa_layer_norm(x + out_lin(softmax(q kᵀ / √D) v))    for each head, over all tokens
        x = output_layer_norm(x + lin2(gelu(lin1(x))))
    texts: logits = classifier(relu(pre_classifier(x[0])))
    masked words: logits = vocab_projector(vocab_layer_norm(gelu(vocab_transform(x))))

Source: arXiv:1910.01108.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..nn.activation import activation
from ..nn.attention.both_ways import both_ways
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from .family import Family
from .names import GAMMA_BETA, Body, Drop, Names
from .parts import (
    AnswerFinder,
    Dtypes,
    Encoder,
    EncoderConfig,
    MaskedWordPredictor,
    Pooler,
    TextClassifier,
    TokenClassifier,
    add_embeddings,
    add_norm,
    alias,
    constant,
    layer_norm,
    layers,
    merge_heads,
    replicate_over_mesh,
    run_encoder,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    vocabulary_layer,
    with_head,
)


@dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    """The settings of a DistilBERT, whose files have other keys than BERT's."""

    model_type = "distilbert"

    hidden_size, intermediate_size = alias("dim"), alias("hidden_dim")
    num_hidden_layers, num_attention_heads = alias("n_layers"), alias("n_heads")

    vocab_size: int = size(30522)
    dim: int = size(768, aliases=("hidden_size",))
    hidden_dim: int = size(3072, aliases=("intermediate_size",))
    n_layers: int = layers(6, aliases=("num_hidden_layers",))
    n_heads: int = size(12, aliases=("num_attention_heads",))
    activation: str = "gelu"
    max_position_embeddings: int = size(512)
    layer_norm_eps: float = constant(1e-12)


class DistilBertEmbeddings(Module):
    """The normalised sum of the embeddings of tokens and positions."""

    def __init__(self, config: DistilBertConfig, dtypes: Dtypes):
        super().__init__()
        self.reduce_dtype = dtypes.reduce
        self.word_embeddings = Embedding(config.vocab_size, config.dim, dtypes.dtype)
        self.position_embeddings = Embedding(
            config.max_position_embeddings, config.dim, dtypes.dtype
        )
        self.LayerNorm = layer_norm(config.dim, config.layer_norm_eps, dtypes)

    def __call__(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.word_embeddings(ids)  # [B, T, E]
        total = add_embeddings(self.reduce_dtype, x, self.position_embeddings(positions))
        return self.LayerNorm(total).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table; the table of tokens has its own rule."""
        return replicate_over_mesh("position_embeddings")


class DistilBertAttention(Module):
    """Self-attention: each token attends to every token that the mask allows."""

    def __init__(self, config: DistilBertConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.dim, dtypes.dtype
        self.heads, self.head_dim = config.n_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.q_lin = Linear(E, E, dtype, has_bias=True)
        self.k_lin = Linear(E, E, dtype, has_bias=True)
        self.v_lin = Linear(E, E, dtype, has_bias=True)
        self.out_lin = Linear(E, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        q, k, v = linears([self.q_lin, self.k_lin, self.v_lin], x)  # [B, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y = both_ways(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return self.out_lin(merge_heads(y)).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = dict.fromkeys(["q_lin", "k_lin", "v_lin"], self.heads)
        return split_heads_over_mesh(outputs, {"out_lin": self.heads}, self.head_dim)


class DistilBertMLP(Module):
    """The MLP."""

    def __init__(self, config: DistilBertConfig, dtypes: Dtypes):
        super().__init__()
        self.act = config.activation
        self.lin1 = Linear(config.dim, config.hidden_dim, dtypes.dtype, has_bias=True)
        self.lin2 = Linear(config.hidden_dim, config.dim, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.lin1(x).astype(x.dtype))  # [B, T, F]
        return self.lin2(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["lin1"], ["lin2"])


class DistilBertLayer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: DistilBertConfig, dtypes: Dtypes):
        super().__init__()
        self.attention = DistilBertAttention(config, dtypes)
        self.sa_layer_norm = layer_norm(config.dim, config.layer_norm_eps, dtypes)
        self.ffn = DistilBertMLP(config, dtypes)
        self.output_layer_norm = layer_norm(config.dim, config.layer_norm_eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = add_norm(self.sa_layer_norm, x, self.attention(x, mask))
        return add_norm(self.output_layer_norm, x, self.ffn(x))


class DistilBertTransformer(Module):
    """The layers."""

    def __init__(self, config: DistilBertConfig, dtypes: Dtypes):
        super().__init__()
        self.layer: Any = LayerList(
            DistilBertLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return run_encoder(self.layer, x, mask)


class DistilBertModel(Encoder):
    """A DistilBERT without a head.

    Example:
        >>> model = DistilBertModel(DistilBertConfig(100, 8, 16, n_layers=2, n_heads=2))
        >>> list(model.raw_state_dict())[0], model.max_length
        ('embeddings.word_embeddings.weight', 512)
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
        self.embeddings = DistilBertEmbeddings(config, dtypes)
        self.transformer = DistilBertTransformer(config, dtypes)
        self.pooler = Pooler(config.dim, dtypes) if pooler else None

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.transformer(self.embeddings(ids, positions), mask)


class DistilBertForMaskedLM(MaskedWordPredictor, DistilBertModel):
    """A DistilBERT that predicts masked words: ``vocab_projector(vocab_layer_norm(act(vocab_transform(x))))``."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        table = self.embeddings.word_embeddings
        self.vocab_transform = Linear(config.dim, config.dim, dtypes.dtype, has_bias=True)
        self.vocab_layer_norm = layer_norm(config.dim, config.layer_norm_eps, dtypes)
        self.vocab_projector = vocabulary_layer(table, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        y = activation(self.config.activation)(self.vocab_transform(x).astype(x.dtype))  # [B, T, E]
        y = self.vocab_layer_norm(y).astype(x.dtype)
        return self.vocab_projector(y)


class DistilBertForTokenClassification(TokenClassifier, DistilBertModel):
    """A DistilBERT with a head for tokens: one that finds names, for example."""


class DistilBertForQuestionAnswering(AnswerFinder, DistilBertModel):
    """A DistilBERT that finds the answer to a question in a text."""


class DistilBertForSequenceClassification(TextClassifier, DistilBertModel):
    """A DistilBERT with a head for texts: a reranker, for example."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.pre_classifier = Linear(config.dim, config.dim, dtypes.dtype, has_bias=True)
        self.classifier = Linear(config.dim, config.num_labels, dtypes.dtype, has_bias=True)

    def scores(self, pooled: jax.Array) -> jax.Array:
        """First tokens' states ``[B, E]`` → logits ``[B, labels]``."""
        return self.classifier(activation("relu")(self.pre_classifier(pooled)))


DISTILBERT = DistilBertModel.family = Family.of(
    DistilBertModel,
    DistilBertConfig,
    "DistilBertModel",
    "DistilBertForMultipleChoice",
    names=Names(
        Body("distilbert."),
        Drop("vocab_*", "pre_classifier.*", "classifier.*", "qa_outputs.*", head=True),
        Drop("embeddings.position_ids"),
        GAMMA_BETA,
    ),
)
DistilBertForMaskedLM.family = with_head(
    DISTILBERT, DistilBertForMaskedLM, "vocab_*", layer="vocab_projector"
)
DistilBertForTokenClassification.family = with_head(
    DISTILBERT, DistilBertForTokenClassification, "classifier.*"
)
DistilBertForQuestionAnswering.family = with_head(
    DISTILBERT, DistilBertForQuestionAnswering, "qa_outputs.*"
)
DistilBertForSequenceClassification.family = with_head(
    DISTILBERT, DistilBertForSequenceClassification, "pre_classifier.*", "classifier.*"
)
