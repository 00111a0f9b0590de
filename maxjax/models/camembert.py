"""CamemBERT: a RoBERTa for French, whose files have names of their own.

Source: arXiv:1911.03894.
"""

from __future__ import annotations

from dataclasses import dataclass

from .encoder.model import with_head
from .roberta import ROBERTA, RobertaConfig, RobertaModel


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


class CamembertForSequenceClassification(CamembertModel):
    """A CamemBERT with a classification head."""


CAMEMBERT = CamembertModel.family = ROBERTA.like(
    CamembertModel,
    CamembertConfig,
    *(name.replace("Roberta", "Camembert") for name in ROBERTA.architectures),
)
CAMEMBERT_HEAD = CamembertForSequenceClassification.family = with_head(
    CAMEMBERT, CamembertForSequenceClassification
)
