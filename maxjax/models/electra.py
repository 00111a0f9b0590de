"""ELECTRA: a BERT whose embeddings may be narrower than its hidden states, and which has no pooler.

Its classification head has two linear layers. Attributes are named as in Hugging Face's checkpoints.

Source: arXiv:2003.10555.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from .bert import BERT, BertConfig, BertLayer, BertModel
from .encoder.attention import Types
from .encoder.block import EncoderEmbeddings
from .encoder.model import ClassificationHead, Layers, with_head
from .names import GAMMA_BETA, Drop, Names, Prefix
from .parts import size


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """The settings of an ELECTRA, with Hugging Face's defaults for missing keys."""

    model_type = "electra"

    embedding_size: int = size(128)


class ElectraHead(ClassificationHead):
    """The classification head."""

    activation: ClassVar[str] = "gelu"


class ElectraModel(BertModel):
    """An ELECTRA without a head: the discriminator of published files, or the generator.

    Attributes:
        embeddings_project: linear layer from the embeddings to the hidden size, or None.

    Example:
        >>> config = ElectraConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, embedding_size=4)
        >>> ElectraModel(config).embeddings_project.weight.shape
        [Dim(8), Dim(4)]
    """

    has_pooler: ClassVar[bool] = False
    head_class: ClassVar[Any] = ElectraHead

    def make(self, config: ElectraConfig, types: Types) -> None:
        """Makes embeddings and layers."""
        size, hidden = config.embedding_size, config.hidden_size
        self.embeddings = EncoderEmbeddings(
            config, types, positions=config.max_position_embeddings,
            token_types=config.type_vocab_size, size=size,
        )  # fmt: skip
        self.embeddings_project = types.linear(size, hidden) if size != hidden else None
        layers = (BertLayer(config, types) for _ in range(config.num_hidden_layers))
        self.encoder = Layers("layer", layers)

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        x = self.embeddings(input_ids, types, positions)
        if self.embeddings_project is not None:
            x = self.embeddings_project(x).astype(x.dtype)
        return self.encoder(x, mask)


class ElectraForSequenceClassification(ElectraModel):
    """An ELECTRA with a classification head: a reranker, for example."""


_HEADS = ("PreTraining", "MaskedLM", "TokenClassification", "QuestionAnswering")
ELECTRA = ElectraModel.family = BERT.like(
    ElectraModel,
    ElectraConfig,
    "ElectraModel",
    *(f"ElectraFor{head}" for head in _HEADS),
    names=Names(
        Prefix({"electra.": ""}),
        Drop(
            "cls.*",
            "classifier.*",
            "qa_outputs.*",
            "discriminator_predictions.*",
            "generator_*",
            head=True,
        ),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
ELECTRA_HEAD = ElectraForSequenceClassification.family = with_head(
    ELECTRA, ElectraForSequenceClassification
)
