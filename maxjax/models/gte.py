"""GTE v1.5 and multilingual (Alibaba's "new" models): BERT's layers with RoPE and a gated MLP.

Attributes are named as in its published files. Source: arXiv:2407.19669, and modeling.py beside the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax

from ..nn.rope_scaling import LinearScalingParams
from .encoder.attention import EncoderAttention, TokenInputs, Types
from .encoder.block import EncoderEmbeddings, EncoderLayer, EncoderMLP
from .encoder.model import Encoder, Layers, with_head
from .family import Family
from .names import ROPE_TABLES, Drop, Names, Prefix
from .parts import EncoderConfig, Rope, config_field, constant, layers, refuse, size

_FIXED = {
    "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True,
    "logn_attention_scale": False,
}  # fmt: skip


@dataclass(frozen=True)
class GteConfig(EncoderConfig):
    """The settings of a GTE, with the defaults of transformers for missing keys."""

    model_type = "gte"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    hidden_act: str = "gelu"
    max_position_embeddings: int = config_field(8192, minimum=1)
    type_vocab_size: int = size(1, minimum=0)
    layer_norm_eps: float = 1e-12
    rope_parameters: Rope = Rope(160_000.0)
    num_labels: int = constant(2)  # of "id2label"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; the published files scale RoPE by a rule of their own, "ntk"."""
        refuse(raw, _FIXED, "GTE")
        scaling = raw.get("rope_scaling")
        if not isinstance(scaling, Mapping) or scaling.get("type") != "ntk":
            return super().from_hf(raw, **values)
        refuse(scaling, {"mixed_b": None}, "GTE")
        factor, theta = _number(scaling, "factor"), _number(raw, "rope_theta", 10_000.0)
        heads, size = cls.read_field(raw, "num_attention_heads"), cls.read_field(raw, "hidden_size")
        divisor = factor ** (2 / max(size // heads, 2))
        rope = Rope(theta * factor, LinearScalingParams(divisor))
        return super().from_hf(raw, **{"rope_parameters": rope, **values})


def _number(given: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number among RoPE's settings, from 1 to 1e9."""
    value: Any = default if given.get(key) is None else given[key]
    if type(value) not in (int, float) or not 1 <= value <= 1e9:
        raise ValueError(f"'{key}' with 'rope_scaling' of type 'ntk' is {str(value)[:60]}")
    return float(value)


class GteAttention(EncoderAttention):
    """Self-attention with one projection of queries, keys and values."""

    names: ClassVar[tuple[str, ...]] = ("qkv_proj", "o_proj")


class GteMLP(EncoderMLP):
    """The gated MLP, with one projection of both halves."""

    names: ClassVar[tuple[str, ...]] = ("up_gate_proj", "down_proj")
    halves: ClassVar[str] = "up gate"


class GteLayer(EncoderLayer):
    """A layer with norms after the residual sums."""

    names = ("attention", "attn_ln", "mlp", "mlp_ln")

    def __init__(self, config: GteConfig, types: Types):
        attention = GteAttention(config, types, rope="global")
        mlp = GteMLP(config, types, has_bias=False, down_bias=True)
        super().__init__(config, types, attention, mlp)


class GteModel(Encoder):
    """A GTE without a head.

    Example:
        >>> model = GteModel(GteConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "up_gate" in name]
        ['encoder.layer.0.mlp.up_gate_proj.weight']
    """

    def make(self, config: GteConfig, types: Types) -> None:
        """Makes embeddings and layers."""
        self.embeddings = EncoderEmbeddings(config, types, token_types=config.type_vocab_size)
        layers = (GteLayer(config, types) for _ in range(config.num_hidden_layers))
        self.encoder = Layers("layer", layers)

    @property
    def takes_types(self) -> bool:  # type: ignore[override]
        """Whether the model was trained with the token types of text pairs."""
        return self.config.type_vocab_size > 1

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        x = self.embeddings(input_ids, types, positions)
        return self.encoder(x, TokenInputs(mask, self.rotations(positions, mask)))


class GteForSequenceClassification(GteModel):
    """A GTE with a classification head: a reranker, for example."""


GTE = GteModel.family = Family.of(
    GteModel,
    GteConfig,
    "GteModel",
    "GteForMaskedLM",
    "GteForTokenClassification",
    "NewModel",
    "NewForMaskedLM",
    "NewForTokenClassification",
    names=Names(
        Prefix({"new.": "", "gte.": ""}),
        Drop("lm_head.*", "classifier.*", head=True),
        Drop("embeddings.position_ids"),
        ROPE_TABLES,
    ),
)
GTE_HEAD = GteForSequenceClassification.family = with_head(
    GTE, GteForSequenceClassification,
    "GteForSequenceClassification", "NewForSequenceClassification",
)  # fmt: skip
