"""MPNet: BERT's layers with RoBERTa's positions, and a bias of scores that depends on the distance of two tokens.

::

    x = LayerNorm(word_embeddings[ids] + position_embeddings[positions])
    bias = relative_attention_bias[bucket of the distance of two tokens]
    in each layer:
        x = LayerNorm(x + o(softmax(q(x) k(x)ᵀ / √D + bias) v(x)))    for each head, over all tokens
        x = LayerNorm(x + output(gelu(intermediate(x))))

Source: arXiv:2004.09297.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..nn.activation import activation
from ..nn.attention.both_ways import both_ways
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from .family import Family
from .names import Body, Drop, Names
from .parts import (
    AnswerFinder,
    Dtypes,
    Encoder,
    EncoderConfig,
    FirstTokenClassifier,
    MaskedWordHead,
    MaskedWordPredictor,
    Pooler,
    TokenClassifier,
    add_embeddings,
    add_norm,
    layer_norm,
    layers,
    merge_heads,
    positions_past_padding,
    refuse,
    replicate_over_mesh,
    run_encoder,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_head,
)

# transformers fixes these three numbers, whatever the configuration says.
_PADDING, _BUCKETS, _FARTHEST = 1, 32, 128


@dataclass(frozen=True)
class MPNetConfig(EncoderConfig):
    """The settings of an MPNet, with Hugging Face's defaults for missing keys."""

    model_type = "mpnet"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    hidden_act: str = "gelu"
    max_position_embeddings: int = size(512, minimum=3)
    layer_norm_eps: float = 1e-12
    relative_attention_num_buckets: int = size(_BUCKETS)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"relative_attention_num_buckets": self.relative_attention_num_buckets}
        refuse(given, {"relative_attention_num_buckets": _BUCKETS}, "MPNet")

    @property
    def max_length(self) -> int:
        """The maximum number of tokens: the first rows of the table of positions belong to padding."""
        return self.max_position_embeddings - _PADDING - 1


def distance_buckets(distances: np.ndarray) -> np.ndarray:
    """The class of each distance between a query and a key; each small distance has a class of its own.

    Example:
        >>> distance_buckets(np.array([0, 1, -1, 7, 8, -200])).tolist()
        [0, 17, 1, 23, 24, 15]
    """
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    far = np.abs(distances)
    # In float32 as in transformers, since the result is rounded down.
    logs = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)).astype(np.float32)
    scaled = logs / np.float32(math.log(_FARTHEST / exact)) * np.float32(half - exact)
    large = np.minimum(exact + scaled.astype(np.int64), half - 1)
    found = np.where(distances > 0, half, 0) + np.where(far < exact, far, large)
    return found.astype(np.int32)


class MPNetEmbeddings(Module):
    """The normalised sum of the embeddings of tokens and positions."""

    def __init__(self, config: MPNetConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.reduce_dtype = dtypes.reduce
        self.word_embeddings = Embedding(config.vocab_size, E, dtype)
        self.position_embeddings = Embedding(config.max_position_embeddings, E, dtype)
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.word_embeddings(ids)  # [B, T, E]
        total = add_embeddings(self.reduce_dtype, x, self.position_embeddings(positions))
        return self.LayerNorm(total).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table; the table of tokens has its own rule."""
        return replicate_over_mesh("position_embeddings")


class MPNetSelfAttention(Module):
    """Self-attention with a bias of the scores."""

    def __init__(self, config: MPNetConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.q = Linear(E, E, dtype, has_bias=True)
        self.k = Linear(E, E, dtype, has_bias=True)
        self.v = Linear(E, E, dtype, has_bias=True)
        self.o = Linear(E, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, mask: jax.Array | None, bias: jax.Array) -> jax.Array:
        q, k, v = linears([self.q, self.k, self.v], x)  # [B, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y = both_ways(q, k, v, mask, bias=bias, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return self.o(merge_heads(y)).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = dict.fromkeys(["q", "k", "v"], self.heads)
        return split_heads_over_mesh(outputs, {"o": self.heads}, self.head_dim)


class MPNetAttention(Module):
    """The first half of a layer: self-attention, the sum, and its norm."""

    def __init__(self, config: MPNetConfig, dtypes: Dtypes):
        super().__init__()
        self.attn = MPNetSelfAttention(config, dtypes)
        self.LayerNorm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None, bias: jax.Array) -> jax.Array:
        return add_norm(self.LayerNorm, x, self.attn(x, mask, bias))


class MPNetIntermediate(Module):
    """The first linear layer of the MLP, with its activation."""

    def __init__(self, config: MPNetConfig, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.dense = Linear(E, F, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, F]


class MPNetOutput(Module):
    """The last linear layer of the MLP, the sum, and its norm."""

    def __init__(self, config: MPNetConfig, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.dense = Linear(F, E, dtypes.dtype, has_bias=True)
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, y: jax.Array, x: jax.Array) -> jax.Array:
        return add_norm(self.LayerNorm, x, self.dense(y))


class MPNetLayer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: MPNetConfig, dtypes: Dtypes):
        super().__init__()
        self.attention = MPNetAttention(config, dtypes)
        self.intermediate = MPNetIntermediate(config, dtypes)
        self.output = MPNetOutput(config, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None, bias: jax.Array) -> jax.Array:
        x = self.attention(x, mask, bias)
        return self.output(self.intermediate(x), x)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of the MLP."""
        return split_features_over_mesh(["intermediate.dense"], ["output.dense"])


class MPNetEncoder(Module):
    """The layers, and the table of biases that they share: one row for each class of distances."""

    def __init__(self, config: MPNetConfig, dtypes: Dtypes):
        super().__init__()
        self.layer: Any = LayerList(
            MPNetLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )
        rows, heads = config.relative_attention_num_buckets, config.num_attention_heads
        self.relative_attention_bias = Embedding(rows, heads, dtypes.dtype)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        at = np.arange(x.shape[1])
        classes = jnp.asarray(distance_buckets(at[None] - at[:, None]))  # [T, T]
        bias = jnp.transpose(self.relative_attention_bias(classes), (2, 0, 1))[None]  # [1, H, T, T]
        return run_encoder(self.layer, x, mask, bias)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table."""
        return replicate_over_mesh("relative_attention_bias")


class MPNetModel(Encoder):
    """An MPNet without a head.

    Example:
        >>> MPNetModel(MPNetConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)).max_length
        510
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
        self.embeddings = MPNetEmbeddings(config, dtypes)
        self.encoder = MPNetEncoder(config, dtypes)
        self.pooler = Pooler(config.hidden_size, dtypes) if pooler else None

    def position_ids(self, ids: jax.Array, indices: jax.Array) -> jax.Array:
        """The positions of tokens, as in RoBERTa: they count only real tokens."""
        return positions_past_padding(ids, indices, _PADDING)

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(ids, positions), mask)


class MPNetForMaskedLM(MaskedWordPredictor, MPNetModel):
    """An MPNet that predicts masked words: ``decoder(layer_norm(gelu(dense(x))))``."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.lm_head = MaskedWordHead(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.lm_head(x)


class MPNetForTokenClassification(TokenClassifier, MPNetModel):
    """An MPNet with a head for tokens: one that finds names, for example."""


class MPNetForQuestionAnswering(AnswerFinder, MPNetModel):
    """An MPNet that finds the answer to a question in a text."""


class MPNetForSequenceClassification(FirstTokenClassifier, MPNetModel):
    """An MPNet with a head for texts: a reranker, for example."""


MPNET = MPNetModel.family = Family.of(
    MPNetModel,
    MPNetConfig,
    "MPNetModel",
    "MPNetForMultipleChoice",
    names=Names(
        Body("mpnet."),
        Drop("lm_head.*", "classifier.*", "qa_outputs.*", head=True),
        Drop("embeddings.position_ids"),
    ),
)
MPNetForMaskedLM.family = with_head(
    MPNET, MPNetForMaskedLM, "lm_head.*", layer="lm_head.decoder", bias="lm_head.bias"
)
MPNetForTokenClassification.family = with_head(MPNET, MPNetForTokenClassification, "classifier.*")
MPNetForQuestionAnswering.family = with_head(MPNET, MPNetForQuestionAnswering, "qa_outputs.*")
MPNetForSequenceClassification.family = with_head(
    MPNET, MPNetForSequenceClassification, "classifier.*"
)
