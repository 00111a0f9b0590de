"""DistilBERT: a BERT with half the layers, and no token types or pooler. Attributes are named as in its checkpoints.

Source: arXiv:1910.01108.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..nn.activation import ACTIVATIONS
from .encoder.attention import EncoderAttention, TokenInputs, Types
from .encoder.block import EncoderEmbeddings, EncoderLayer, EncoderMLP
from .encoder.model import Encoder, Layers, with_head
from .family import Family
from .names import GAMMA_BETA, Drop, Names, Prefix
from .parts import EncoderConfig, alias, constant, layers, size


@dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    """The settings of a DistilBERT, whose files have other keys than BERT's."""

    model_type = "distilbert"

    hidden_size, intermediate_size = alias("dim"), alias("hidden_dim")
    num_hidden_layers, num_attention_heads = alias("n_layers"), alias("n_heads")
    hidden_act = alias("activation")

    vocab_size: int = size(30522)
    dim: int = size(768, aliases=("hidden_size",))
    hidden_dim: int = size(3072, aliases=("intermediate_size",))
    n_layers: int = layers(6, aliases=("num_hidden_layers",))
    n_heads: int = size(12, aliases=("num_attention_heads",))
    activation: str = "gelu"
    max_position_embeddings: int = size(512)
    layer_norm_eps: float = constant(1e-12)
    num_labels: int = constant(2)  # of "id2label"


class DistilBertAttention(EncoderAttention):
    """Self-attention."""

    names: ClassVar[tuple[str, ...]] = ("q_lin", "k_lin", "v_lin", "out_lin")


class DistilBertMLP(EncoderMLP):
    """The MLP."""

    names: ClassVar[tuple[str, ...]] = ("lin1", "lin2")


class DistilBertLayer(EncoderLayer):
    """A layer with norms after the residual sums."""

    names = ("attention", "sa_layer_norm", "ffn", "output_layer_norm")

    def __init__(self, config: DistilBertConfig, types: Types):
        attention, mlp = DistilBertAttention(config, types), DistilBertMLP(config, types)
        super().__init__(config, types, attention, mlp)


class DistilBertModel(Encoder):
    """A DistilBERT without a head.

    Example:
        >>> model = DistilBertModel(DistilBertConfig(100, 8, 16, n_layers=2, n_heads=2))
        >>> list(model.raw_state_dict())[0], model.max_length
        ('embeddings.word_embeddings.weight', 512)
    """

    takes_types: ClassVar[bool] = False

    def make(self, config: DistilBertConfig, types: Types) -> None:
        """Makes embeddings and layers."""
        self.embeddings = EncoderEmbeddings(config, types, positions=config.max_position_embeddings)
        layers = (DistilBertLayer(config, types) for _ in range(config.num_hidden_layers))
        self.transformer = Layers("layer", layers)

    def make_head(self, config: DistilBertConfig, types: Types) -> None:
        """Makes ``pre_classifier`` and ``classifier``."""
        self.pre_classifier = types.linear(config.hidden_size, config.hidden_size)
        super().make_head(config, types)

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.transformer(self.embeddings(input_ids, types, positions), TokenInputs(mask, {}))

    def scores(self, pooled: jax.Array) -> jax.Array:
        """The classification head: pooled states ``[B, E]`` → scores ``[B, labels]``."""
        return self.classifier(ACTIVATIONS["relu"](self.pre_classifier(pooled)))


class DistilBertForSequenceClassification(DistilBertModel):
    """A DistilBERT with a classification head: a reranker, for example."""


DISTILBERT = DistilBertModel.family = Family.of(
    DistilBertModel,
    DistilBertConfig,
    "DistilBertModel",
    "DistilBertForMaskedLM",
    "DistilBertForTokenClassification",
    "DistilBertForQuestionAnswering",
    "DistilBertForMultipleChoice",
    names=Names(
        Prefix({"distilbert.": ""}),
        Drop("vocab_*", "pre_classifier.*", "classifier.*", "qa_outputs.*", head=True),
        Drop("embeddings.position_ids"),
        GAMMA_BETA,
    ),
)
DISTILBERT_HEAD = DistilBertForSequenceClassification.family = with_head(
    DISTILBERT, DistilBertForSequenceClassification
)
