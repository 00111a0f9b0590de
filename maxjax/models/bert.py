"""BERT, and the text encoders that are computed alike: RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA.

::

    x = LayerNorm(word_embeddings[ids] + token_type_embeddings[types] + position_embeddings[positions])
    in each layer:
        q, k, v = query(x), key(x), value(x)
        x = LayerNorm(x + dense(softmax(q kᵀ / √D) v))          for each head, over all tokens
        x = LayerNorm(x + output(gelu(intermediate(x))))
    pooled = tanh(pooler(x[0]))
    masked words: logits = decoder(LayerNorm(gelu(dense(x))))      the decoder is word_embeddings

Sources: arXiv:1810.04805; RoBERTa arXiv:1907.11692; XLM-RoBERTa arXiv:1911.02116; CamemBERT arXiv:1911.03894;
ELECTRA arXiv:2003.10555.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.activation import activation
from ..nn.attention.both_ways import both_ways
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from .family import Family
from .gguf.config.read import LABELS, read_classifier, rows_of
from .gguf.metadata import MAX_LAYERS, Settings
from .gguf.names import CLASSIFIER
from .gguf.table import GGUFTable
from .names import GAMMA_BETA, Body, Drop, Names
from .parts import (
    AnswerFinder,
    Dtypes,
    Encoder,
    EncoderConfig,
    FirstTokenClassifier,
    MaskedWordHead,
    MaskedWordPredictor,
    PooledClassifier,
    Pooler,
    PredictionHeads,
    TokenClassifier,
    WithHead,
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
    vocabulary_layer,
    with_head,
)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"position_embedding_type": self.position_embedding_type}
        refuse(given, {"position_embedding_type": "absolute"}, type(self).__name__[:-6])


class BertEmbeddings(Module):
    """The normalised sum of the embeddings of tokens, token types and positions."""

    def __init__(self, config: BertConfig, dtypes: Dtypes, width: int | None = None):
        super().__init__()
        E, dtype = width or config.hidden_size, dtypes.dtype
        self.reduce_dtype = dtypes.reduce
        self.word_embeddings = Embedding(config.vocab_size, E, dtype)
        self.position_embeddings = Embedding(config.max_position_embeddings, E, dtype)
        self.token_type_embeddings = Embedding(config.type_vocab_size, E, dtype)
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, ids: jax.Array, types: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.word_embeddings(ids)  # [B, T, E]
        others = self.token_type_embeddings(types), self.position_embeddings(positions)
        return self.LayerNorm(add_embeddings(self.reduce_dtype, x, *others)).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small tables; the table of tokens has its own rule."""
        return replicate_over_mesh("position_embeddings", "token_type_embeddings")


class BertSelfAttention(Module):
    """Self-attention: each token attends to every token that the mask allows."""

    def __init__(self, config: BertConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.query = Linear(E, E, dtype, has_bias=True)
        self.key = Linear(E, E, dtype, has_bias=True)
        self.value = Linear(E, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        q, k, v = linears([self.query, self.key, self.value], x)  # [B, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y = both_ways(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return merge_heads(y)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads."""
        return split_heads_over_mesh(
            dict.fromkeys(["query", "key", "value"], self.heads), {}, self.head_dim
        )


class BertResidual(Module):
    """``LayerNorm(x + dense(y))``, the end of each half of a layer."""

    def __init__(self, features: int, config: BertConfig, dtypes: Dtypes):
        super().__init__()
        self.dense = Linear(features, config.hidden_size, dtypes.dtype, has_bias=True)
        self.LayerNorm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)

    def __call__(self, y: jax.Array, x: jax.Array) -> jax.Array:
        return add_norm(self.LayerNorm, x, self.dense(y))


class BertAttention(Module):
    """The first half of a layer: self-attention and its output."""

    def __init__(self, config: BertConfig, dtypes: Dtypes):
        super().__init__()
        self.self = BertSelfAttention(config, dtypes)
        self.output = BertResidual(config.hidden_size, config, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return self.output(self.self(x, mask), x)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the output's inputs as the heads are split."""
        return split_heads_over_mesh({}, {"output.dense": self.self.heads}, self.self.head_dim)


class BertIntermediate(Module):
    """The first linear layer of the MLP, with its activation."""

    def __init__(self, config: BertConfig, dtypes: Dtypes):
        super().__init__()
        self.act = config.hidden_act
        self.dense = Linear(
            config.hidden_size, config.intermediate_size, dtypes.dtype, has_bias=True
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, F]


class BertLayer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: BertConfig, dtypes: Dtypes):
        super().__init__()
        self.attention = BertAttention(config, dtypes)
        self.intermediate = BertIntermediate(config, dtypes)
        self.output = BertResidual(config.intermediate_size, config, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of the MLP."""
        return split_features_over_mesh(["intermediate.dense"], ["output.dense"])


class BertEncoder(Module):
    """The layers."""

    def __init__(self, config: BertConfig, dtypes: Dtypes):
        super().__init__()
        self.layer: Any = LayerList(
            BertLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return run_encoder(self.layer, x, mask)


class BertModel(Encoder):
    """BERT without a head.

    Args:
        config: settings of the model.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms, softmax and pooling are computed.
        pooler: whether the model has a pooler.

    Example:
        >>> config = BertConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = BertModel(config, "float32")
        >>> out = jax.eval_shape(lambda m, x: m(x), model, jax.numpy.zeros((3, 5), int))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((3, 5, 8), (3, 8))
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
        self.embeddings = BertEmbeddings(config, dtypes)
        self.encoder = BertEncoder(config, dtypes)
        self.pooler = Pooler(config.hidden_size, dtypes) if pooler else None

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(ids, types, positions), mask)


class BertForMaskedLM(MaskedWordPredictor, BertModel):
    """A BERT that predicts masked words.

    Example:
        >>> config = BertConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> model, ids = BertForMaskedLM(config), jax.numpy.zeros((3, 5), int)
        >>> model.task, jax.eval_shape(lambda m, x: m(x).logits, model, ids).shape
        ('fill-mask', (3, 5, 100))
    """

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.cls = PredictionHeads(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.cls(x)


class BertForTokenClassification(TokenClassifier, BertModel):
    """A BERT with a head for tokens: one that finds names, for example."""


class BertForQuestionAnswering(AnswerFinder, BertModel):
    """A BERT that finds the answer to a question in a text."""


class BertForSequenceClassification(PooledClassifier, BertModel):
    """A BERT with a head for texts: a reranker, for example."""


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
    constants={"hidden_act": "gelu", "position_embedding_type": "absolute"},
    required={"is_decoder": False, "add_cross_attention": False},
    read=_read_gguf,
    write=lambda config: {"attention.causal": False},
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    biases=None,
    written=("attention.causal", "pooling_type", LABELS),
)


BERT = BertModel.family = Family.of(
    BertModel,
    BertConfig,
    "BertModel",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
    names=Names(
        Body("bert."),
        Drop("cls.predictions.*", "cls.seq_relationship.*", head=True),
        Drop("classifier.*", "qa_outputs.*", head=True),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
    gguf=BERT_GGUF,
)
BertForMaskedLM.family = with_head(
    BERT,
    BertForMaskedLM,
    "cls.predictions.*",
    architectures=("BertForMaskedLM", "BertForPreTraining"),
    layer="cls.predictions.decoder",
    bias="cls.predictions.bias",
)
BertForTokenClassification.family = with_head(BERT, BertForTokenClassification, "classifier.*")
BertForQuestionAnswering.family = with_head(BERT, BertForQuestionAnswering, "qa_outputs.*")
BertForSequenceClassification.family = with_head(
    BERT, BertForSequenceClassification, "classifier.*"
)

# --- RoBERTa: positions skip padding and start after its id, and the head has two linear layers --------------


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """The settings of a RoBERTa, with Hugging Face's defaults for missing keys."""

    model_type = "roberta"

    pad_token_id: int = size(1, minimum=0)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens: the first rows of the table of positions belong to padding."""
        return self.max_position_embeddings - self.pad_token_id - 1


class RobertaModel(BertModel):
    """A RoBERTa without a head.

    Example:
        >>> model = RobertaModel(RobertaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> ids, indices = jax.numpy.array([[5, 6, 1]]), jax.numpy.arange(3)[None]
        >>> model.max_length, model.position_ids(ids, indices).tolist()
        (510, [[2, 3, 1]])
    """

    takes_types: ClassVar[bool] = False

    def position_ids(self, ids: jax.Array, indices: jax.Array) -> jax.Array:
        """The positions of tokens, which count only real tokens; that of padding is the padding token's id."""
        return positions_past_padding(ids, indices, self.config.pad_token_id)


class RobertaForMaskedLM(MaskedWordPredictor, RobertaModel):
    """A RoBERTa that predicts masked words: ``decoder(layer_norm(gelu(dense(x))))``."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.lm_head = MaskedWordHead(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.lm_head(x)


class RobertaForTokenClassification(TokenClassifier, RobertaModel):
    """A RoBERTa with a head for tokens: one that finds names, for example."""


class RobertaForQuestionAnswering(AnswerFinder, RobertaModel):
    """A RoBERTa that finds the answer to a question in a text."""


class RobertaForSequenceClassification(FirstTokenClassifier, RobertaModel):
    """A RoBERTa with a head for texts: a reranker, for example."""


ROBERTA = RobertaModel.family = BERT.like(
    RobertaModel,
    RobertaConfig,
    "RobertaModel",
    "RobertaForMultipleChoice",
    names=Names(
        Body("roberta."),
        Drop("cls.*", "classifier.*", "qa_outputs.*", "lm_head.*", head=True),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
RobertaForMaskedLM.family = with_head(
    ROBERTA, RobertaForMaskedLM, "lm_head.*", layer="lm_head.decoder", bias="lm_head.bias"
)
RobertaForTokenClassification.family = with_head(
    ROBERTA, RobertaForTokenClassification, "classifier.*"
)
RobertaForQuestionAnswering.family = with_head(ROBERTA, RobertaForQuestionAnswering, "qa_outputs.*")
RobertaForSequenceClassification.family = with_head(
    ROBERTA, RobertaForSequenceClassification, "classifier.*"
)

# --- XLM-RoBERTa: a vocabulary for a hundred languages; BGE-M3 and many other embedding models ----------------


@dataclass(frozen=True)
class XLMRobertaConfig(RobertaConfig):
    """The settings of an XLM-RoBERTa."""

    model_type = "xlm-roberta"


class XLMRobertaModel(RobertaModel):
    """An XLM-RoBERTa without a head: RoBERTa with a vocabulary for a hundred languages."""


class XLMRobertaForMaskedLM(RobertaForMaskedLM, XLMRobertaModel):
    """An XLM-RoBERTa that predicts masked words."""


class XLMRobertaForTokenClassification(TokenClassifier, XLMRobertaModel):
    """An XLM-RoBERTa with a head for tokens: one that finds names, for example."""


class XLMRobertaForQuestionAnswering(AnswerFinder, XLMRobertaModel):
    """An XLM-RoBERTa that finds the answer to a question in a text."""


class XLMRobertaForSequenceClassification(FirstTokenClassifier, XLMRobertaModel):
    """An XLM-RoBERTa with a head for texts: a reranker, for example."""


XLM_ROBERTA = XLMRobertaModel.family = ROBERTA.like(
    XLMRobertaModel,
    XLMRobertaConfig,
    "XLMRobertaModel",
    "XLMRobertaForMultipleChoice",
)
XLMRobertaForMaskedLM.family = with_head(
    XLM_ROBERTA, XLMRobertaForMaskedLM, "lm_head.*", layer="lm_head.decoder", bias="lm_head.bias"
)
XLMRobertaForTokenClassification.family = with_head(
    XLM_ROBERTA, XLMRobertaForTokenClassification, "classifier.*"
)
XLMRobertaForQuestionAnswering.family = with_head(
    XLM_ROBERTA, XLMRobertaForQuestionAnswering, "qa_outputs.*"
)
XLMRobertaForSequenceClassification.family = with_head(
    XLM_ROBERTA, XLMRobertaForSequenceClassification, "classifier.*"
)

# --- CamemBERT: a RoBERTa for French, whose files have names of their own ------------------------------------


@dataclass(frozen=True)
class CamembertConfig(RobertaConfig):
    """The settings of a CamemBERT."""

    model_type = "camembert"


class CamembertModel(RobertaModel):
    """A CamemBERT without a head.

    Example:
        >>> CamembertModel(CamembertConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)).max_length
        510
    """


class CamembertForMaskedLM(RobertaForMaskedLM, CamembertModel):
    """A CamemBERT that predicts masked words."""


class CamembertForTokenClassification(TokenClassifier, CamembertModel):
    """A CamemBERT with a head for tokens: one that finds names, for example."""


class CamembertForQuestionAnswering(AnswerFinder, CamembertModel):
    """A CamemBERT that finds the answer to a question in a text."""


class CamembertForSequenceClassification(FirstTokenClassifier, CamembertModel):
    """A CamemBERT with a head for texts: a reranker, for example."""


CAMEMBERT = CamembertModel.family = ROBERTA.like(
    CamembertModel,
    CamembertConfig,
    "CamembertModel",
    "CamembertForMultipleChoice",
)
CamembertForMaskedLM.family = with_head(
    CAMEMBERT, CamembertForMaskedLM, "lm_head.*", layer="lm_head.decoder", bias="lm_head.bias"
)
CamembertForTokenClassification.family = with_head(
    CAMEMBERT, CamembertForTokenClassification, "classifier.*"
)
CamembertForQuestionAnswering.family = with_head(
    CAMEMBERT, CamembertForQuestionAnswering, "qa_outputs.*"
)
CamembertForSequenceClassification.family = with_head(
    CAMEMBERT, CamembertForSequenceClassification, "classifier.*"
)

# --- ELECTRA: embeddings may be narrower than hidden states, and there is no pooler --------------------------


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """The settings of an ELECTRA, with Hugging Face's defaults for missing keys."""

    model_type = "electra"

    embedding_size: int = size(128)


class ElectraModel(BertModel):
    """An ELECTRA without a head: the discriminator of published files, or the generator.

    Attributes:
        embeddings_project: linear layer from the embeddings to the hidden size, or None.

    Example:
        >>> config = ElectraConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, embedding_size=4)
        >>> ElectraModel(config).embeddings_project.weight.shape
        [Dim(8), Dim(4)]
    """

    def __init__(
        self,
        config: Any,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool = False,
    ):
        super().__init__(config, dtype, reduce_dtype=reduce_dtype, pooler=pooler)
        dtypes, narrow = Dtypes.of(dtype, reduce_dtype), config.embedding_size
        self.embeddings = BertEmbeddings(config, dtypes, narrow)
        is_narrow = narrow != config.hidden_size
        self.embeddings_project = (
            Linear(narrow, config.hidden_size, dtypes.dtype, has_bias=True) if is_narrow else None
        )

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        x = self.embeddings(ids, types, positions)  # [B, T, embedding_size]
        if self.embeddings_project is not None:
            x = self.embeddings_project(x).astype(x.dtype)  # [B, T, E]
        return self.encoder(x, mask)


class ElectraTransform(Module):
    """``LayerNorm(gelu(dense(x)))``, from the hidden size to that of the embeddings."""

    def __init__(self, config: ElectraConfig, dtypes: Dtypes):
        super().__init__()
        E, narrow = config.hidden_size, config.embedding_size
        self.dense = Linear(E, narrow, dtypes.dtype, has_bias=True)
        self.LayerNorm = layer_norm(narrow, config.layer_norm_eps, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation("gelu")(self.dense(x).astype(x.dtype))  # [B, T, embedding_size]
        return self.LayerNorm(y).astype(x.dtype)


class ElectraForMaskedLM(MaskedWordPredictor, ElectraModel):
    """The generator of an ELECTRA, which predicts masked words."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        table = self.embeddings.word_embeddings
        self.generator_predictions = ElectraTransform(config, dtypes)
        self.generator_lm_head = vocabulary_layer(table, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        y = self.generator_predictions(x)  # [B, T, embedding_size]
        return self.generator_lm_head(y)


class ElectraDetector(Module):
    """``dense_prediction(act(dense(x)))``: one number for each token."""

    def __init__(self, config: ElectraConfig, dtypes: Dtypes):
        super().__init__()
        E, self.act = config.hidden_size, config.hidden_act
        self.dense = Linear(E, E, dtypes.dtype, has_bias=True)
        self.dense_prediction = Linear(E, 1, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, E]
        return self.dense_prediction(y)[..., 0]  # [B, T]


class ElectraForPreTraining(WithHead, ElectraModel):
    """The discriminator of an ELECTRA, which tells replaced tokens: their logits are above 0."""

    task: ClassVar[str | None] = "detect"

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.discriminator_predictions = ElectraDetector(config, dtypes)

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """The logits ``[B, T]`` of each token: whether it is another than in the text."""
        return {"logits": self.discriminator_predictions(x).astype(jnp.float32)}


class ElectraForTokenClassification(TokenClassifier, ElectraModel):
    """An ELECTRA with a head for tokens: one that finds names, for example."""


class ElectraForQuestionAnswering(AnswerFinder, ElectraModel):
    """An ELECTRA that finds the answer to a question in a text."""


class ElectraForSequenceClassification(FirstTokenClassifier, ElectraModel):
    """An ELECTRA with a head for texts: a reranker, for example."""

    head_act: ClassVar[str] = "gelu"


ELECTRA = ElectraModel.family = BERT.like(
    ElectraModel,
    ElectraConfig,
    "ElectraModel",
    "ElectraForMultipleChoice",
    names=Names(
        Body("electra."),
        Drop("cls.*", "classifier.*", "qa_outputs.*", "sequence_summary.*", head=True),
        Drop("discriminator_predictions.*", "generator_predictions.*", head=True),
        Drop("generator_lm_head.*", head=True),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
ElectraForMaskedLM.family = with_head(
    ELECTRA,
    ElectraForMaskedLM,
    "generator_predictions.*",
    "generator_lm_head.*",
    layer="generator_lm_head",
)
ElectraForPreTraining.family = with_head(
    ELECTRA, ElectraForPreTraining, "discriminator_predictions.*"
)
ElectraForTokenClassification.family = with_head(
    ELECTRA, ElectraForTokenClassification, "classifier.*"
)
ElectraForQuestionAnswering.family = with_head(ELECTRA, ElectraForQuestionAnswering, "qa_outputs.*")
ElectraForSequenceClassification.family = with_head(
    ELECTRA, ElectraForSequenceClassification, "classifier.*"
)
