"""MPNet: BERT's layers with RoBERTa's positions, and a bias of scores that depends on the distance of two tokens.

Attributes are named as in Hugging Face's checkpoints. Source: arXiv:2004.09297.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..graph.device import DeviceRef
from ..graph.placement.strategy import ShardingStrategy
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from .bert import BertLayer
from .encoder.attention import EncoderAttention, TokenInputs, Types
from .encoder.block import EncoderEmbeddings, plus
from .encoder.model import ClassificationHead, Encoder, in_turn, with_head
from .family import Family
from .names import Drop, Names, Prefix
from .parts import EncoderConfig, constant, layers, refuse, size
from .roberta import places_after

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
    num_labels: int = constant(2)  # of "id2label"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"relative_attention_num_buckets": self.relative_attention_num_buckets}
        refuse(given, {"relative_attention_num_buckets": _BUCKETS}, "MPNet")

    @property
    def max_length(self) -> int:
        """The maximum number of tokens: the first rows of the table of positions belong to padding."""
        return self.max_position_embeddings - _PADDING - 1


class MPNetSelfAttention(EncoderAttention):
    """Self-attention."""

    names: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o")


class MPNetAttention(Module):
    """The first half of a layer: self-attention, the residual sum, and its norm."""

    def __init__(self, config: MPNetConfig, types: Types):
        super().__init__()
        self.attn = MPNetSelfAttention(config, types)
        self.LayerNorm = types.norm(config)

    def __call__(self, x: jax.Array, tokens: TokenInputs) -> jax.Array:
        return plus(self.LayerNorm, x, self.attn(x, tokens))


class MPNetLayer(BertLayer):
    """MPNet's attention, then BERT's MLP."""

    attention_class: ClassVar[Any] = MPNetAttention


class MPNetEncoder(Module):
    """The layers, and the table of biases that they share: one row for each class of distances."""

    def __init__(self, config: MPNetConfig, types: Types):
        super().__init__()
        self.layer: Any = LayerList(
            MPNetLayer(config, types) for _ in range(config.num_hidden_layers)
        )
        self.relative_attention_bias = Embedding(
            config.relative_attention_num_buckets,
            config.num_attention_heads,
            types.dtype,
            DeviceRef.CPU(),
        )

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table."""
        return {"relative_attention_bias.weight": ShardingStrategy.replicate(1)}

    def __call__(self, x: jax.Array, mask: Any) -> jax.Array:
        places = np.arange(x.shape[1])
        found = self.relative_attention_bias(jnp.asarray(buckets(places[None] - places[:, None])))
        return in_turn(self.layer, x, TokenInputs(mask, {}, jnp.transpose(found, (2, 0, 1))[None]))


def buckets(distances: np.ndarray) -> np.ndarray:
    """The class of each distance between a query and a key; each small distance has a class of its own.

    Example:
        >>> buckets(np.array([0, 1, -1, 7, 8, -200])).tolist()
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


class MPNetModel(Encoder):
    """An MPNet without a head.

    Example:
        >>> MPNetModel(MPNetConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)).max_length
        510
    """

    takes_types: ClassVar[bool] = False
    head_class: ClassVar[Any] = ClassificationHead

    def make(self, config: MPNetConfig, types: Types) -> None:
        """Makes embeddings and layers."""
        self.embeddings = EncoderEmbeddings(config, types, positions=config.max_position_embeddings)
        self.encoder = MPNetEncoder(config, types)

    def places(self, input_ids: jax.Array, places: jax.Array) -> jax.Array:
        """:meth:`Encoder.places`, as in RoBERTa."""
        return places_after(input_ids, places, _PADDING)

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(input_ids, types, positions), mask)


class MPNetForSequenceClassification(MPNetModel):
    """An MPNet with a classification head: a reranker, for example."""


MPNET = MPNetModel.family = Family.of(
    MPNetModel,
    MPNetConfig,
    "MPNetModel",
    "MPNetForMaskedLM",
    "MPNetForTokenClassification",
    "MPNetForQuestionAnswering",
    "MPNetForMultipleChoice",
    names=Names(
        Prefix({"mpnet.": ""}),
        Drop("lm_head.*", "classifier.*", "qa_outputs.*", head=True),
        Drop("embeddings.position_ids"),
    ),
)
MPNET_HEAD = MPNetForSequenceClassification.family = with_head(
    MPNET, MPNetForSequenceClassification
)
