"""ALBERT: layers that share one set of weights, and embeddings that are narrower than the hidden states.

Attributes are named as in Hugging Face's checkpoints. Source: arXiv:1909.11942.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..graph.device import DeviceRef
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from .bert import BERT, BertConfig
from .encoder.attention import EncoderAttention, TokenInputs, Types
from .encoder.block import EncoderEmbeddings, EncoderMLP, plus
from .encoder.model import Encoder, Layers, with_head
from .names import GAMMA_BETA, Drop, Names, Prefix
from .parts import config_field, layers, size


@dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """The settings of an ALBERT, with Hugging Face's defaults for missing keys.

    Attributes:
        num_hidden_groups: number of sets of weights; each is used for the same number of layers.
        inner_group_num: number of layers in a set of weights.
    """

    model_type = "albert"

    num_hidden_layers: int = config_field(minimum=1, maximum=1000)
    hidden_act: str = "gelu_new"
    embedding_size: int = size(128)
    num_hidden_groups: int = layers(1)
    inner_group_num: int = config_field(1, minimum=1, maximum=1000)


class AlbertAttention(EncoderAttention):
    """Self-attention, the residual sum, and its norm."""

    names: ClassVar[tuple[str, ...]] = ("query", "key", "value", "dense")

    def __init__(self, config: AlbertConfig, types: Types):
        super().__init__(config, types)
        self.LayerNorm = types.norm(config)

    def __call__(self, x: jax.Array, tokens: TokenInputs) -> jax.Array:
        """``[B, T, E]`` → the same shape."""
        return plus(self.LayerNorm, x, super().__call__(x, tokens))


class AlbertLayer(EncoderMLP):
    """Attention, then the MLP of ``ffn`` and ``ffn_output``, the residual sum, and its norm."""

    names: ClassVar[tuple[str, ...]] = ("ffn", "ffn_output")

    def __init__(self, config: AlbertConfig, types: Types):
        super().__init__(config, types)
        self.attention = AlbertAttention(config, types)
        self.full_layer_layer_norm = types.norm(config)

    def __call__(self, x: jax.Array, tokens: Any = None) -> jax.Array:
        """``[B, T, E]`` → the same shape."""
        x = self.attention(x, tokens)
        return plus(self.full_layer_layer_norm, x, super().__call__(x))


def _group(config: AlbertConfig, types: Types) -> Layers:
    """The layers of one set of weights."""
    layers = (AlbertLayer(config, types) for _ in range(config.inner_group_num))
    return Layers("albert_layers", layers)


class AlbertTransformer(Module):
    """The linear layer from the embeddings to the hidden size, and the layers."""

    def __init__(self, config: AlbertConfig, types: Types):
        super().__init__()
        count = config.num_hidden_groups
        self.each = [i * count // config.num_hidden_layers for i in range(config.num_hidden_layers)]
        self.embedding_hidden_mapping_in = types.linear(config.embedding_size, config.hidden_size)
        self.albert_layer_groups: Any = LayerList(_group(config, types) for _ in range(count))

    def __call__(self, x: jax.Array, tokens: TokenInputs) -> jax.Array:
        x = self.embedding_hidden_mapping_in(x).astype(x.dtype)
        groups = list(self.albert_layer_groups)
        for number in self.each:
            x = groups[number](x, tokens)
        return x


class AlbertPooler(Linear):
    """A linear layer and tanh, applied to the first token's state."""

    def __init__(self, config: AlbertConfig, types: Types):
        super().__init__(config.hidden_size, config.hidden_size, types.dtype, DeviceRef.CPU(), True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(super().__call__(x[:, 0]).astype(x.dtype))


class AlbertModel(Encoder):
    """An ALBERT without a head.

    Example:
        >>> model = AlbertModel(AlbertConfig(100, 8, 16, num_hidden_layers=12, num_attention_heads=2))
        >>> sum("attention.query.weight" in name for name in model.raw_state_dict())
        1
    """

    has_pooler: ClassVar[bool] = True
    pooler_class: ClassVar[Any] = AlbertPooler

    def make(self, config: AlbertConfig, types: Types) -> None:
        """Makes embeddings and layers."""
        self.embeddings = EncoderEmbeddings(
            config, types, positions=config.max_position_embeddings,
            token_types=config.type_vocab_size, size=config.embedding_size,
        )  # fmt: skip
        self.encoder = AlbertTransformer(config, types)

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(input_ids, types, positions), TokenInputs(mask, {}))


class AlbertForSequenceClassification(AlbertModel):
    """An ALBERT with a classification head."""


_HEADS = ("PreTraining", "MaskedLM", "TokenClassification", "QuestionAnswering", "MultipleChoice")
ALBERT = AlbertModel.family = BERT.like(
    AlbertModel,
    AlbertConfig,
    "AlbertModel",
    *(f"AlbertFor{head}" for head in _HEADS),
    names=Names(
        Prefix({"albert.": ""}),
        Drop(
            "cls.*", "classifier.*", "qa_outputs.*", "predictions.*", "sop_classifier.*", head=True
        ),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
ALBERT_HEAD = AlbertForSequenceClassification.family = with_head(
    ALBERT, AlbertForSequenceClassification
)
