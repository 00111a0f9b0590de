"""BERT, a text encoder. Attributes are named as in Hugging Face's checkpoints.

Shapes: B sequences of T tokens, H heads of width D, hidden size E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..graph.placement.strategy import Segment, ShardingStrategy
from ..nn.activation import ACTIVATIONS
from ..nn.attention.tapped_attention import tapped_attention
from ..nn.layer import Module
from ..nn.linear import linear_rules, linears
from .encoder.attention import Types
from .encoder.block import EncoderEmbeddings, plus
from .encoder.model import Encoder, Layers, with_head
from .family import Family
from .gguf.config.read import read_classifier, rows_of
from .gguf.metadata import MAX_LAYERS, Settings
from .gguf.names import CLASSIFIER
from .gguf.table import GGUFTable
from .names import GAMMA_BETA, Drop, Names, Prefix
from .parts import EncoderConfig, constant, layers, refuse, size


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The settings of a BERT, with Hugging Face's defaults for keys that old files lack."""

    model_type = "bert"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    hidden_act: str = "gelu"
    max_position_embeddings: int = size(512)
    type_vocab_size: int = size(2)
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"
    num_labels: int = constant(2)  # of "id2label"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"position_embedding_type": self.position_embedding_type}
        refuse(given, {"position_embedding_type": "absolute"}, type(self).__name__[:-6])


class BertSelfAttention(Module):
    """Self-attention: each token attends to every token that the mask allows."""

    def __init__(self, config: Any, types: Types):
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.softmax_dtype = types.reduce
        self.query = types.linear(size, size)
        self.key = types.linear(size, size)
        self.value = types.linear(size, size)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads."""
        segment = Segment.head_aware(
            self.num_heads, int(self.query.weight.shape[0]) // self.num_heads
        )
        rows = ShardingStrategy.segmented(1, 0, [segment])
        return linear_rules("query", rows) | linear_rules("key", rows) | linear_rules("value", rows)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        q, k, v = (
            y.astype(x.dtype).reshape(*x.shape[:2], self.num_heads, -1)  # [B, T, H, D]
            for y in linears([self.query, self.key, self.value], x)
        )
        mixed = tapped_attention(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return mixed.reshape(x.shape)


class BertResidual(Module):
    """``LayerNorm(x + dense(y))``, the end of each half of a layer. The sum is not rounded before the norm."""

    def __init__(self, in_dim: int, config: Any, types: Types):
        super().__init__()
        self.dense = types.linear(in_dim, config.hidden_size)
        self.LayerNorm = types.norm(config)

    def __call__(self, y: jax.Array, x: jax.Array) -> jax.Array:
        return plus(self.LayerNorm, x, self.dense(y))


class BertAttention(Module):
    """The first half of a layer: self-attention and its output."""

    def __init__(self, config: Any, types: Types):
        super().__init__()
        self.self = BertSelfAttention(config, types)
        self.output = BertResidual(config.hidden_size, config, types)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the output's columns as the heads are split."""
        heads, size = self.self.num_heads, int(self.output.dense.weight.logical_shape[1])
        columns = ShardingStrategy.head_aware_columnwise(1, heads, size // heads)
        return linear_rules("output.dense", columns)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return self.output(self.self(x, mask), x)


class BertIntermediate(Module):
    """The first linear layer of the MLP, with its activation."""

    def __init__(self, config: Any, types: Types):
        super().__init__()
        self.hidden_act = config.hidden_act
        self.dense = types.linear(config.hidden_size, config.intermediate_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.hidden_act](self.dense(x).astype(x.dtype))


class BertLayer(Module):
    """Attention, then an MLP, each with a residual connection and a LayerNorm after it.

    Attributes:
        attention_class: class of the attention, which is called with hidden states and ``tokens``.
    """

    attention_class: ClassVar[Any] = BertAttention

    def __init__(self, config: Any, types: Types):
        super().__init__()
        self.attention: Any = self.attention_class(config, types)
        self.intermediate = BertIntermediate(config, types)
        self.output = BertResidual(config.intermediate_size, config, types)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of the MLP."""
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        return linear_rules("intermediate.dense", rows) | linear_rules("output.dense", columns)

    def __call__(self, x: jax.Array, tokens: Any) -> jax.Array:
        x = self.attention(x, tokens)
        return self.output(self.intermediate(x), x)


class BertModel(Encoder):
    """BERT without a head.

    Args:
        config: settings of the model.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms, softmax and pooling are computed.
        pooler: whether the model has a pooler; by default it has.
        head: whether the model has a classification head.

    Example:
        >>> config = BertConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertModel(config, "float32")
        >>> out = jax.eval_shape(lambda m, x: m(x), model, jax.numpy.zeros((3, 5), int))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((3, 5, 8), (3, 8))
    """

    has_pooler: ClassVar[bool] = True

    def make(self, config: BertConfig, types: Types) -> None:
        """Makes embeddings and layers."""
        self.embeddings = EncoderEmbeddings(
            config, types, positions=config.max_position_embeddings,
            token_types=config.type_vocab_size,
        )  # fmt: skip
        layers = (BertLayer(config, types) for _ in range(config.num_hidden_layers))
        self.encoder = Layers("layer", layers)

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(input_ids, types, positions), mask)


class BertForSequenceClassification(BertModel):
    """A BERT with a classification head: a reranker, for example."""


def _read_gguf(given: Settings, tensors: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file.

    A RoBERTa file is read as BERT too, because the converter removes its first rows of positions, up to the padding
    token's, so that positions count from 0.
    """
    if "token_types.weight" not in tensors:
        raise given.unsupported("a BERT without token types (DistilBERT)")
    return {
        **read_classifier("BertForSequenceClassification", given, tensors),
        "hidden_size": given.count("embedding_length"),
        "intermediate_size": given.count("feed_forward_length"),
        "num_hidden_layers": given.count("block_count", maximum=MAX_LAYERS),
        "num_attention_heads": given.count("attention.head_count"),
        "max_position_embeddings": rows_of("position_embd.weight", tensors, given.path),
        "type_vocab_size": rows_of("token_types.weight", tensors, given.path),
        "layer_norm_eps": given.number("attention.layer_norm_epsilon"),
    }


BERT_GGUF = GGUFTable(
    "bert",
    {
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        ".attn_q": "attention.self.query",
        ".attn_k": "attention.self.key",
        ".attn_v": "attention.self.value",
        ".attn_output": "attention.output.dense",
        ".attn_output_norm": "attention.output.LayerNorm",
        ".ffn_up": "intermediate.dense",
        ".ffn_down": "output.dense",
        ".layer_output_norm": "output.LayerNorm",
        # The head of a reranker. That of XLM-RoBERTa computes the same as BERT's.
        "cls": "pooler.dense",
        CLASSIFIER: "classifier",
    },
    layer="encoder.layer.*.",
    is_decoder=False,
    fixed={"hidden_act": "gelu", "position_embedding_type": "absolute"},
    required={"is_decoder": False, "add_cross_attention": False},
    read=_read_gguf,
    write=lambda config: {"attention.causal": False},
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    biases=None,
    written=("attention.causal", "pooling_type"),
)

BERT = BertModel.family = Family.of(
    BertModel,
    BertConfig,
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    names=Names(
        Prefix({"bert.": ""}),
        Drop("cls.*", "classifier.*", "qa_outputs.*", head=True),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
    gguf=BERT_GGUF,
)
BERT_HEAD = BertForSequenceClassification.family = with_head(BERT, BertForSequenceClassification)
