"""Jina's embeddings v3: XLM-RoBERTa with RoPE instead of learned positions.

Attributes are named as in its published files, which also have low-rank updates (LoRA) of every layer, one
for each task. These are not applied: embeddings are those of sentence-transformers without a task.

Source: arXiv:2409.10173, and modeling_xlm_roberta.py beside the files.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from .encoder.attention import EncoderAttention, Types
from .encoder.block import EncoderLayer, EncoderMLP
from .encoder.model import ClassificationHead, NormedEncoder, with_head
from .family import Family
from .gguf.architectures.jina import JINA_V3_GGUF
from .names import Drop, Names, Prefix, Rename
from .parts import EncoderConfig, Rope, config_field, constant, layers, size
from .unread import ReadTracker

_LOG = logging.getLogger("maxjax")
# In files with updates, each weight has the name of a parametrised torch weight, beside its updates.
_ORIGINAL = ".parametrizations.weight.original"
_HEADS = ("MaskedLM", "TokenClassification", "QuestionAnswering")


@dataclass(frozen=True)
class JinaV3Config(EncoderConfig):
    """The settings of Jina's embeddings v3, with the defaults of transformers for missing keys."""

    model_type = "jina_embeddings_v3"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    hidden_act: str = "gelu"
    max_position_embeddings: int = config_field(8194, minimum=3)
    type_vocab_size: int = size(1, minimum=0)
    layer_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(20_000.0)
    num_labels: int = constant(2)  # of "id2label"

    @property
    def max_length(self) -> int:
        """The maximum number of tokens: as in XLM-RoBERTa, two of the positions belong to padding."""
        return self.max_position_embeddings - 2

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; the published files have a key of their own for the base of RoPE."""
        if raw.get("lora_adaptations"):
            _LOG.warning(
                "this model's updates for tasks (%s) are not applied: its vectors are those of "
                "sentence-transformers without a task", str(raw["lora_adaptations"])[:200],
            )  # fmt: skip
        if (base := raw.get("rotary_emb_base")) is not None:
            raw = ReadTracker.of(raw).replaced({"rope_theta": base})
        return super().from_hf(raw, **values)


class JinaV3Attention(EncoderAttention):
    """Self-attention with one projection of queries, keys and values."""

    names: ClassVar[tuple[str, ...]] = ("Wqkv", "out_proj")


class JinaV3MLP(EncoderMLP):
    """The MLP."""

    names: ClassVar[tuple[str, ...]] = ("fc1", "fc2")


class JinaV3Layer(EncoderLayer):
    """A layer with norms after the residual sums."""

    names = ("mixer", "norm1", "mlp", "norm2")

    def __init__(self, config: JinaV3Config, types: Types):
        attention = JinaV3Attention(config, types, rope="global")
        super().__init__(config, types, attention, JinaV3MLP(config, types))


class JinaV3Model(NormedEncoder):
    """Jina's embeddings v3.

    Example:
        >>> model = JinaV3Model(JinaV3Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "Wqkv" in name]
        ['encoder.layers.0.mixer.Wqkv.weight', 'encoder.layers.0.mixer.Wqkv.bias']
    """

    takes_types: ClassVar[bool] = False
    head_class: ClassVar[Any] = ClassificationHead
    layer_class: ClassVar[Any] = JinaV3Layer


class JinaV3ForSequenceClassification(JinaV3Model):
    """Jina's encoder with a classification head."""


JINA_V3 = JinaV3Model.family = Family.of(
    JinaV3Model,
    JinaV3Config,
    "JinaEmbeddingsV3Model",
    *(f"JinaEmbeddingsV3For{head}" for head in _HEADS),
    names=Names(
        Prefix({"roberta.": ""}),
        Drop("lm_head.*", "classifier.*", "qa_outputs.*", head=True),
        Drop("*.lora_A", "*.lora_B", kept=True),
        Rename({_ORIGINAL: ".weight"}),
    ),
    gguf=JINA_V3_GGUF,
)
JINA_V3_HEAD = JinaV3ForSequenceClassification.family = with_head(
    JINA_V3, JinaV3ForSequenceClassification, "JinaEmbeddingsV3ForSequenceClassification"
)
# The published files name the architecture XLM-RoBERTa.
JINA_V3_PUBLISHED = dataclasses.replace(
    JINA_V3,
    gguf=None,
    model_type="xlm-roberta",
    architectures=("XLMRobertaModel",),
    only=(("position_embedding_type", "rotary"),),
)
