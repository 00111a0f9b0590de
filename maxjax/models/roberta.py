"""RoBERTa and XLM-RoBERTa, the encoder of BGE-M3 and many other embedding models and rerankers.

It is a BERT with two differences: positions start after the padding token's id and skip padding, and the
classification head has two linear layers. Attributes are named as in Hugging Face's checkpoints.

Sources: arXiv:1907.11692, arXiv:1911.02116.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .bert import BERT, BertConfig, BertModel
from .encoder.model import ClassificationHead, with_head
from .names import GAMMA_BETA, Drop, Names, Prefix
from .parts import size

_HEADS = ("MaskedLM", "TokenClassification", "MultipleChoice", "QuestionAnswering")


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
        >>> model.max_length, model.places(jnp.array([[5, 6, 1]]), jnp.arange(3)[None]).tolist()
        (510, [[2, 3, 1]])
    """

    takes_types: ClassVar[bool] = False
    head_class: ClassVar[Any] = ClassificationHead

    def places(self, input_ids: jax.Array, places: jax.Array) -> jax.Array:
        """``position_ids`` that count only real tokens; the position of padding is the padding token's id."""
        return places_after(input_ids, places, self.config.pad_token_id)


class RobertaForSequenceClassification(RobertaModel):
    """A RoBERTa with a classification head: a reranker, for example."""


def places_after(input_ids: jax.Array, places: jax.Array, padding: int) -> jax.Array:
    """``position_ids`` as in RoBERTa: ``padding`` plus the number of real tokens up to and including the token.

    Args:
        input_ids: token ids ``[B, T]``.
        places: index of each token in its text, ``[B or 1, T]``, from 0.
        padding: id of the padding token, which is also its position.
    """
    is_real = (input_ids != padding).astype(jnp.int32)
    count = jnp.cumsum(is_real, axis=1)
    starts = jnp.arange(input_ids.shape[1], dtype=jnp.int32)[None, :] - places
    before = jnp.take_along_axis(count - is_real, jnp.broadcast_to(starts, count.shape), axis=1)
    return (count - before) * is_real + padding


@dataclass(frozen=True)
class XLMRobertaConfig(RobertaConfig):
    """The settings of an XLM-RoBERTa."""

    model_type = "xlm-roberta"


class XLMRobertaModel(RobertaModel):
    """An XLM-RoBERTa without a head: RoBERTa with a vocabulary for a hundred languages."""


class XLMRobertaForSequenceClassification(XLMRobertaModel):
    """An XLM-RoBERTa with a classification head: a BGE reranker, for example."""


ROBERTA = RobertaModel.family = BERT.like(
    RobertaModel,
    RobertaConfig,
    "RobertaModel",
    *(f"RobertaFor{head}" for head in _HEADS),
    names=Names(
        Prefix({"roberta.": ""}),
        Drop("cls.*", "classifier.*", "qa_outputs.*", "lm_head.*", head=True),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
ROBERTA_HEAD = RobertaForSequenceClassification.family = with_head(
    ROBERTA, RobertaForSequenceClassification
)
XLM_ROBERTA = XLMRobertaModel.family = ROBERTA.like(
    XLMRobertaModel,
    XLMRobertaConfig,
    "XLMRobertaModel",
    *(f"XLMRobertaFor{head}" for head in _HEADS),
)
XLM_ROBERTA_HEAD = XLMRobertaForSequenceClassification.family = with_head(
    XLM_ROBERTA, XLMRobertaForSequenceClassification
)
