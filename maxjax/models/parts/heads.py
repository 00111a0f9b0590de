"""Heads of text encoders: what computes logits from hidden states, and what heads of several architectures share.

::

    masked words:  logits = decoder(norm(gelu(dense(x))))       for each token; the decoder is the embedding table
    tokens:        logits = classifier(x)                       for each token
    answers:       start, end = split(qa_outputs(x))            for each token
    texts:         logits = classifier(pooled state)            for each text

Shapes: B sequences, T tokens, hidden size E, vocabulary size V.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...nn.activation import activation
from ...nn.embedding import Embedding
from ...nn.layer import Module
from ...nn.linear import ColumnParallelLinear, Linear
from ..family import Family, PretrainedModel
from ..names import Names, SharedBias
from ..pooling import pool
from .encoder import Dtypes, layer_norm

FILL_MASK, TAG, CLASSIFY, ANSWER = "fill-mask", "tag", "classify", "answer"
"""What heads are for: the values of ``model.task``."""


def vocabulary_layer(table: Embedding, config: Any, dtypes: Dtypes, has_bias: bool = True) -> Any:
    """Return the last layer of a head for masked words, whose weight is the embedding table if the config says so.

    Args:
        table: the embedding table ``[V, E]``.
        config: settings of the model.
        dtypes: dtypes of weights, and of norms.
        has_bias: whether the layer has a bias.

    Example:
        >>> from maxjax.models import BertConfig
        >>> config = BertConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> table = Embedding(config.vocab_size, config.hidden_size)
        >>> vocabulary_layer(table, config, Dtypes.of("float32", "float32")).weight is table.weight
        True
    """
    rows, width = map(int, table.weight.logical_shape)
    tied = table.weight if config.tie_word_embeddings else None
    return ColumnParallelLinear(
        width, rows, dtypes.dtype, [DeviceRef.CPU()], tied_weight=tied, has_bias=has_bias
    )


class MaskedWordHead(Module):
    """``decoder(layer_norm(gelu(dense(x))))``, the ``lm_head`` of RoBERTa and others."""

    def __init__(self, table: Embedding, config: Any, dtypes: Dtypes):
        super().__init__()
        E = config.hidden_size
        self.dense = Linear(E, E, dtypes.dtype, has_bias=True)
        self.layer_norm = layer_norm(E, config.layer_norm_eps, dtypes)
        self.decoder = vocabulary_layer(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation("gelu")(self.dense(x).astype(x.dtype))  # [B, T, E]
        return self.decoder(self.layer_norm(y).astype(x.dtype))  # [B, T, V]


class PredictionTransform(Module):
    """``LayerNorm(act(dense(x)))``, the first part of BERT's head for masked words."""

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        E = config.hidden_size
        self.act = config.hidden_act
        self.dense = Linear(E, E, dtypes.dtype, has_bias=True)
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, E]
        return self.LayerNorm(y).astype(x.dtype)


class PredictionHead(Module):
    """``decoder(transform(x))``: BERT's head for masked words."""

    def __init__(self, table: Embedding, config: Any, dtypes: Dtypes):
        super().__init__()
        self.transform = PredictionTransform(config, dtypes)
        self.decoder = vocabulary_layer(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.transform(x))  # [B, T, V]


class PredictionHeads(Module):
    """``cls`` in BERT's files, of which only ``predictions`` is computed."""

    def __init__(self, table: Embedding, config: Any, dtypes: Dtypes):
        super().__init__()
        self.predictions = PredictionHead(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.predictions(x)  # [B, T, V]


class ClassificationHead(Module):
    """A linear layer, an activation function and the linear layer of the logits, as in RoBERTa."""

    def __init__(self, size: int, labels: int, dtypes: Dtypes, act: str = "tanh"):
        super().__init__()
        self.act = act
        self.dense = Linear(size, size, dtypes.dtype, has_bias=True)
        self.out_proj = Linear(size, labels, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """A pooled state ``[B, E]`` → logits ``[B, labels]``."""
        return self.out_proj(activation(self.act)(self.dense(x).astype(x.dtype)))


class WithHead:
    """Mixin of encoders with a head: the layers that :meth:`add_head` makes come after those of the encoder.

    Attributes:
        head_needs_pooler: see :class:`Encoder`; only if it is true there is a pooler by default.
    """

    head_needs_pooler: ClassVar[bool]

    def __init__(
        self,
        config: Any,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool | None = None,
    ):
        if pooler is None:
            pooler = self.head_needs_pooler
        super().__init__(config, dtype, reduce_dtype=reduce_dtype, pooler=pooler)  # type: ignore[call-arg]
        self.add_head(config, Dtypes.of(dtype, reduce_dtype))

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head: each class with one defines it."""
        raise NotImplementedError


class MaskedWordPredictor(WithHead):
    """Mixin of encoders with a head for masked words."""

    task: ClassVar[str | None] = FILL_MASK

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]``: each class defines it."""
        raise NotImplementedError

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """The logits ``[B, T, V]`` of the words in each place."""
        return {"logits": self.word_logits(x).astype(jnp.float32)}


class TextClassifier(WithHead):
    """Mixin of encoders with a head for texts.

    Attributes:
        head_pooling: the pooling (a name in ``models.pooling.POOLINGS``) of the state that the head takes.
        classifier: the layer of the logits, or the whole head.
    """

    task: ClassVar[str | None] = CLASSIFY
    head_pooling: ClassVar[str] = "cls"
    classifier: Any
    reduce_dtype: DType

    def scores(self, pooled: jax.Array) -> jax.Array:
        """Pooled states ``[B, E]`` → logits ``[B, labels]``."""
        return self.classifier(pooled)

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """The logits ``[B, labels]`` of the texts, each of which is a whole row; see ``Encoder.head_outputs``."""
        if mask is None:
            mask = jnp.ones(x.shape[:2], bool)
        real = mask if mask.ndim == 2 else jnp.any(mask, axis=1)  # [B, T]
        pooled = pool(x.astype(self.reduce_dtype.np), real, (self.head_pooling,))  # [B, E]
        return {"logits": self.scores(pooled).astype(jnp.float32)}


class PooledClassifier(TextClassifier):
    """Mixin of encoders whose head for texts is one linear layer, over the state after the pooler."""

    head_needs_pooler: ClassVar[bool] = True
    pooler: Any

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layer of the logits."""
        self.classifier = Linear(config.hidden_size, config.num_labels, dtypes.dtype, has_bias=True)

    def scores(self, pooled: jax.Array) -> jax.Array:
        """First tokens' states ``[B, E]`` → logits ``[B, labels]``."""
        if self.pooler is not None:
            pooled = self.pooler(pooled[:, None])
        return self.classifier(pooled)


class FirstTokenClassifier(TextClassifier):
    """Mixin of encoders whose head for texts is a :class:`ClassificationHead` over the first token's state.

    Attributes:
        head_act: name of the head's activation function.
    """

    head_act: ClassVar[str] = "tanh"

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layer of the logits."""
        self.classifier = ClassificationHead(
            config.hidden_size, config.num_labels, dtypes, self.head_act
        )


class TokenClassifier(WithHead):
    """Mixin of encoders with a head for tokens, such as one that finds names.

    Attributes:
        classifier: the layer of the logits.
    """

    task: ClassVar[str | None] = TAG

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layer of the logits."""
        self.classifier = Linear(config.hidden_size, config.num_labels, dtypes.dtype, has_bias=True)

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """The logits ``[B, T, labels]`` of the tokens."""
        return {"logits": self.classifier(x).astype(jnp.float32)}


class AnswerFinder(WithHead):
    """Mixin of encoders with a head that finds the answer to a question in a text.

    Attributes:
        qa_outputs: the layer of the logits.
    """

    task: ClassVar[str | None] = ANSWER

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layer of the logits."""
        self.qa_outputs = Linear(config.hidden_size, 2, dtypes.dtype, has_bias=True)

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """The logits ``[B, T]`` of each token as the first and as the last of the answer."""
        return start_and_end(self.qa_outputs(x))


def start_and_end(logits: jax.Array) -> dict[str, jax.Array]:
    """Return the two logits ``[B, T]`` of each token, of logits ``[B, T, 2]``, by the names of ``EncoderOutput``.

    Example:
        >>> start_and_end(jnp.array([[[1, 5], [2, 6]]]))["end_logits"].tolist()
        [[5.0, 6.0]]
    """
    logits = logits.astype(jnp.float32)
    return {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}


def with_head(
    family: Family,
    kind: type[PretrainedModel],
    *patterns: str,
    architectures: tuple[str, ...] = (),
    layer: str | None = None,
    table: str = "embeddings.word_embeddings.weight",
    bias: str | None = None,
) -> Family:
    """Return the family of an encoder's models with a head.

    Args:
        family: the family of the encoder.
        kind: class of the model with the head.
        patterns: patterns of the names of the head's tensors.
        architectures: names in ``config.json`` of models with this head; the class's name by default.
        layer: name of the layer of a head for masked words whose weight is the embedding table.
        table: name of the embedding table's weight.
        bias: the name that files have for the bias of this layer, if it is not that of the layer.

    Example:
        >>> from maxjax.models import BertForTokenClassification, BertModel
        >>> found = with_head(BertModel.family, BertForTokenClassification, "classifier.*")
        >>> found.architectures, found.names.file_names("classifier.bias")
        (('BertForTokenClassification',), ['classifier.bias'])
    """
    names = family.names.with_head(*patterns)
    if layer is not None and bias is not None:
        names = Names(*names.rows, SharedBias(layer, bias))
    return dataclasses.replace(
        family, architectures=architectures or (kind.__name__,), make=kind.of_checkpoint, gguf=None,
        names=names, tied=family.tied if layer is None else (f"{layer}.weight", table),
        body=None if kind.task == CLASSIFY else family,
    )  # fmt: skip
