"""DeBERTa V2 and V3: a BERT whose attention scores depend on contents and on distances.

Attributes are named as in Hugging Face's checkpoints. Sources: arXiv:2006.03654, arXiv:2111.09543.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.placement.strategy import ShardingStrategy
from ..nn.activation import ACTIVATIONS
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from .bert import BERT, BertConfig, BertLayer
from .encoder.attention import Types
from .encoder.block import EncoderEmbeddings
from .encoder.disentangled import KINDS, DisentangledAttention, Near, classes
from .encoder.model import Encoder, Pooler, in_turn, with_head
from .names import GAMMA_BETA, Drop, Names, Prefix
from .parts import config_field, refuse, size, with_defaults


@dataclass(frozen=True)
class DebertaV2Config(BertConfig):
    """The settings of a DeBERTa V2 or V3.

    Attributes:
        max_relative_positions: largest distance; ``max_position_embeddings`` by default.
        position_buckets: number of classes of distances in one direction; -1: each distance is a class.
        position_biased_input: whether position embeddings are added to the token embeddings.
        share_att_key: whether distances use the linear layers of queries and keys.
        norm_rel_ebd: "layer_norm" if the embeddings of distances are normalised.
        pos_att_type: which of "c2p" and "p2c" are added to the scores of contents.
    """

    model_type = "deberta-v2"

    type_vocab_size: int = size(0, minimum=0)
    layer_norm_eps: float = 1e-7
    max_relative_positions: int = config_field(-1, minimum=-1)
    position_buckets: int = size(-1, minimum=-1)
    position_biased_input: bool = True
    share_att_key: bool = False
    norm_rel_ebd: str = "none"
    pooler_hidden_act: str = "gelu"
    pos_att_type: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which ``pos_att_type`` may be a text with ``|``.

        Raises:
            UnsupportedModelError: there is a convolution (V2 xlarge), or no embeddings of distances.
        """
        width = raw.get("hidden_size")
        usual = {"relative_attention": True, "embedding_size": width, "pooler_hidden_size": width}
        refuse(with_defaults(raw, {"relative_attention": False}), usual, "DeBERTa")
        if raw.get("conv_kernel_size"):
            raise UnsupportedModelError("'conv_kernel_size' of a DeBERTa, a convolution")
        kinds = raw.get("pos_att_type") or ()
        kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
        is_list = isinstance(kinds, (list, tuple))
        found = tuple(kind.strip() for kind in kinds if isinstance(kind, str)) if is_list else ()
        if not is_list or len(found) < len(kinds) or {*found} - {*KINDS}:
            raise ValueError("'pos_att_type' must be of 'c2p' and 'p2c'")
        return super().from_hf(raw, **{"pos_att_type": found, **values})

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, also that there are terms with distances, which is not the default."""
        return {**super().to_hf(), "relative_attention": True}

    def _check(self) -> None:
        super()._check()
        if self.pooler_hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"'pooler_hidden_act' is {self.pooler_hidden_act[:80]!r}: it must be one of {known}"
            )

    @property
    def span(self) -> int:
        """R/2, the number of classes of distances in one direction."""
        return self.position_buckets if self.position_buckets > 0 else self.farthest

    @property
    def farthest(self) -> int:
        """The largest distance."""
        farthest = self.max_relative_positions
        return farthest if farthest > 0 else self.max_position_embeddings

    def classes(self, length: int) -> Any:
        """The class of the distance between each query and key, ``[T, T]``."""
        return classes(length, self.span, self.farthest if self.position_buckets > 0 else None)


class DebertaV2Layer(BertLayer):
    """A layer of BERT with disentangled attention."""

    def __init__(self, config: DebertaV2Config, types: Types):
        super().__init__(config, types)
        size, heads, shares = config.hidden_size, config.num_attention_heads, config.share_att_key
        attention = DisentangledAttention(size, heads, config.pos_att_type, shares, types)
        self.attention.self = attention


class DebertaV2Encoder(Module):
    """The layers, and the embedding table of distances that they share."""

    def __init__(self, config: DebertaV2Config, types: Types):
        super().__init__()
        self.config, rows = config, 2 * config.span
        self.layer: Any = LayerList(
            DebertaV2Layer(config, types) for _ in range(config.num_hidden_layers)
        )
        self.rel_embeddings = Embedding(rows, config.hidden_size, types.dtype, DeviceRef.CPU())
        self.LayerNorm = types.norm(config) if "layer_norm" in config.norm_rel_ebd else None

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table."""
        return {"rel_embeddings.weight": ShardingStrategy.replicate(1)}

    def __call__(self, x: jax.Array, mask: Any) -> jax.Array:
        """``[B, T, E]`` → the same shape."""
        rows = self.rel_embeddings(jnp.arange(2 * self.config.span))
        rows = rows if self.LayerNorm is None else self.LayerNorm(rows)
        near = Near(mask, rows.astype(x.dtype), jnp.asarray(self.config.classes(x.shape[1])))
        return in_turn(self.layer, x, near)


class DebertaV2Pooler(Pooler):
    """The linear layer between the first token's state and the layer of the scores."""

    def __init__(self, config: DebertaV2Config, types: Types):
        super().__init__(config, types)
        self.activation = config.pooler_hidden_act  # type: ignore[misc]


class DebertaV2Model(Encoder):
    """A DeBERTa V2 or V3 without a head.

    Example:
        >>> config = DebertaV2Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2, position_buckets=4)
        >>> DebertaV2Model(config).raw_state_dict()["encoder.rel_embeddings.weight"].shape
        [Dim(8), Dim(8)]
    """

    pooler_class: ClassVar[Any] = DebertaV2Pooler

    def make(self, config: DebertaV2Config, types: Types) -> None:
        """Makes embeddings and layers."""
        positions = config.max_position_embeddings if config.position_biased_input else 0
        if not positions:  # some files have such a table all the same
            self.unused_tensors = ("*.position_embeddings.*",)
        self.embeddings = EncoderEmbeddings(
            config, types, positions=positions, token_types=config.type_vocab_size
        )
        self.encoder = DebertaV2Encoder(config, types)

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(input_ids, types, positions), mask)


class DebertaV2ForSequenceClassification(DebertaV2Model):
    """A DeBERTa with a classification head: a reranker, for example."""


_HEADS = ("MaskedLM", "TokenClassification", "QuestionAnswering", "MultipleChoice")
DEBERTA_V2 = DebertaV2Model.family = BERT.like(
    DebertaV2Model,
    DebertaV2Config,
    "DebertaV2Model",
    *(f"DebertaV2For{head}" for head in _HEADS),
    names=Names(
        Prefix({"deberta.": ""}),
        Drop(
            "cls.*",
            "classifier.*",
            "qa_outputs.*",
            "lm_predictions.*",
            "mask_predictions.*",
            head=True,
        ),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
DEBERTA_V2_HEAD = DebertaV2ForSequenceClassification.family = with_head(
    DEBERTA_V2, DebertaV2ForSequenceClassification
)
