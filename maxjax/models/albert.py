"""ALBERT: layers that share one set of weights, and embeddings that are narrower than the hidden states.

::

    x = LayerNorm(word_embeddings[ids] + token_type_embeddings[types] + position_embeddings[positions])
    x = embedding_hidden_mapping_in(x)
    in each layer, with the weights of its group:
        q, k, v = query(x), key(x), value(x)
        x = LayerNorm(x + dense(softmax(q kᵀ / √D) v))          for each head, over all tokens
        x = full_layer_layer_norm(x + ffn_output(gelu(ffn(x))))
    pooled = tanh(pooler(x[0]))

Source: arXiv:1909.11942.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

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
    PooledClassifier,
    TokenClassifier,
    add_embeddings,
    add_norm,
    config_field,
    layer_norm,
    layers,
    merge_heads,
    refuse,
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
class AlbertConfig(EncoderConfig):
    """The settings of an ALBERT, with Hugging Face's defaults for missing keys.

    Attributes:
        num_hidden_groups: number of sets of weights; each is used for the same number of layers.
        inner_group_num: number of layers in a set of weights.
    """

    model_type = "albert"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = config_field(minimum=1, maximum=1000)
    num_attention_heads: int = size()
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = size(512)
    type_vocab_size: int = size(2)
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"
    embedding_size: int = size(128)
    num_hidden_groups: int = layers(1)
    inner_group_num: int = config_field(1, minimum=1, maximum=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"position_embedding_type": self.position_embedding_type}
        refuse(given, {"position_embedding_type": "absolute"}, "Albert")


class AlbertEmbeddings(Module):
    """The normalised sum of the embeddings of tokens, token types and positions."""

    def __init__(self, config: AlbertConfig, dtypes: Dtypes):
        super().__init__()
        width, dtype = config.embedding_size, dtypes.dtype
        self.reduce_dtype = dtypes.reduce
        self.word_embeddings = Embedding(config.vocab_size, width, dtype)
        self.position_embeddings = Embedding(config.max_position_embeddings, width, dtype)
        self.token_type_embeddings = Embedding(config.type_vocab_size, width, dtype)
        self.LayerNorm = layer_norm(width, config.layer_norm_eps, dtypes)

    def __call__(self, ids: jax.Array, types: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.word_embeddings(ids)  # [B, T, embedding_size]
        others = self.token_type_embeddings(types), self.position_embeddings(positions)
        return self.LayerNorm(add_embeddings(self.reduce_dtype, x, *others)).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small tables; the table of tokens has its own rule."""
        return replicate_over_mesh("position_embeddings", "token_type_embeddings")


class AlbertAttention(Module):
    """Self-attention, the sum, and its norm."""

    def __init__(self, config: AlbertConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.query = Linear(E, E, dtype, has_bias=True)
        self.key = Linear(E, E, dtype, has_bias=True)
        self.value = Linear(E, E, dtype, has_bias=True)
        self.dense = Linear(E, E, dtype, has_bias=True)
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        q, k, v = linears([self.query, self.key, self.value], x)  # [B, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y = both_ways(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return add_norm(self.LayerNorm, x, self.dense(merge_heads(y)).astype(x.dtype))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = dict.fromkeys(["query", "key", "value"], self.heads)
        return split_heads_over_mesh(outputs, {"dense": self.heads}, self.head_dim)


class AlbertLayer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: AlbertConfig, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.attention = AlbertAttention(config, dtypes)
        self.ffn = Linear(E, F, dtypes.dtype, has_bias=True)
        self.ffn_output = Linear(F, E, dtypes.dtype, has_bias=True)
        self.full_layer_layer_norm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = self.attention(x, mask)
        y = activation(self.act)(self.ffn(x).astype(x.dtype))  # [B, T, F]
        return add_norm(self.full_layer_layer_norm, x, self.ffn_output(y).astype(x.dtype))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["ffn"], ["ffn_output"])


class AlbertGroup(Module):
    """The layers of one set of weights."""

    def __init__(self, config: AlbertConfig, dtypes: Dtypes):
        super().__init__()
        self.albert_layers: Any = LayerList(
            AlbertLayer(config, dtypes) for _ in range(config.inner_group_num)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return run_encoder(self.albert_layers, x, mask)


class AlbertTransformer(Module):
    """The linear layer from the embeddings to the hidden size, and the layers."""

    def __init__(self, config: AlbertConfig, dtypes: Dtypes):
        super().__init__()
        layers, groups = config.num_hidden_layers, config.num_hidden_groups
        self.group_of_layer = [i * groups // layers for i in range(layers)]
        self.embedding_hidden_mapping_in = Linear(
            config.embedding_size, config.hidden_size, dtypes.dtype, has_bias=True
        )
        self.albert_layer_groups: Any = LayerList(
            AlbertGroup(config, dtypes) for _ in range(groups)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = self.embedding_hidden_mapping_in(x).astype(x.dtype)  # [B, T, E]
        groups = list(self.albert_layer_groups)
        for number in self.group_of_layer:
            x = groups[number](x, mask)
        return x


class AlbertPooler(Linear):
    """A linear layer and tanh, applied to the first token's state."""

    def __init__(self, config: AlbertConfig, dtypes: Dtypes):
        super().__init__(config.hidden_size, config.hidden_size, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(super().__call__(x[:, 0]).astype(x.dtype))


class AlbertModel(Encoder):
    """An ALBERT without a head.

    Example:
        >>> model = AlbertModel(AlbertConfig(100, 8, 16, num_hidden_layers=12, num_attention_heads=2))
        >>> sum("attention.query.weight" in name for name in model.raw_state_dict())
        1
    """

    def __init__(
        self,
        config: Any,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool = True,
    ):
        dtypes = Dtypes.of(dtype, reduce_dtype)
        super().__init__(config, dtypes)
        self.embeddings = AlbertEmbeddings(config, dtypes)
        self.encoder = AlbertTransformer(config, dtypes)
        self.pooler = AlbertPooler(config, dtypes) if pooler else None

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(ids, types, positions), mask)


class AlbertPredictions(Module):
    """``decoder(LayerNorm(act(dense(x))))``, from the hidden size to that of the embeddings to the vocabulary."""

    def __init__(self, table: Embedding, config: AlbertConfig, dtypes: Dtypes):
        super().__init__()
        E, narrow = config.hidden_size, config.embedding_size
        self.act = config.hidden_act
        self.dense = Linear(E, narrow, dtypes.dtype, has_bias=True)
        self.LayerNorm = layer_norm(narrow, config.layer_norm_eps, dtypes)
        self.decoder = vocabulary_layer(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, embedding_size]
        return self.decoder(self.LayerNorm(y).astype(x.dtype))  # [B, T, V]


class AlbertForMaskedLM(MaskedWordPredictor, AlbertModel):
    """An ALBERT that predicts masked words."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.predictions = AlbertPredictions(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.predictions(x)


class AlbertForTokenClassification(TokenClassifier, AlbertModel):
    """An ALBERT with a head for tokens: one that finds names, for example."""


class AlbertForQuestionAnswering(AnswerFinder, AlbertModel):
    """An ALBERT that finds the answer to a question in a text."""


class AlbertForSequenceClassification(PooledClassifier, AlbertModel):
    """An ALBERT with a head for texts: a reranker, for example."""


ALBERT = AlbertModel.family = Family.of(
    AlbertModel,
    AlbertConfig,
    "AlbertModel",
    "AlbertForMultipleChoice",
    names=Names(
        Body("albert."),
        Drop(
            "cls.*", "classifier.*", "qa_outputs.*", "predictions.*", "sop_classifier.*", head=True
        ),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
AlbertForMaskedLM.family = with_head(
    ALBERT,
    AlbertForMaskedLM,
    "predictions.*",
    layer="predictions.decoder",
    bias="predictions.bias",
    architectures=("AlbertForMaskedLM", "AlbertForPreTraining"),
)
AlbertForTokenClassification.family = with_head(
    ALBERT, AlbertForTokenClassification, "classifier.*"
)
AlbertForQuestionAnswering.family = with_head(ALBERT, AlbertForQuestionAnswering, "qa_outputs.*")
AlbertForSequenceClassification.family = with_head(
    ALBERT, AlbertForSequenceClassification, "classifier.*"
)
