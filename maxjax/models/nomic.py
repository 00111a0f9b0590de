"""Nomic's BERT: BERT's layers with RoPE and a gated MLP, and without most biases.

Attributes are named as in its published files. Their ``config.json`` has the keys of GPT-2; newer files have the
usual ones. Source: arXiv:2402.01613, and modeling_hf_nomic_bert.py beside the files.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from .encoder.attention import EncoderAttention, Types
from .encoder.block import EncoderLayer, EncoderMLP
from .encoder.model import NormedEncoder, with_head
from .family import Family
from .gguf.architectures.nomic import NOMIC_BERT_GGUF
from .names import ROPE_TABLES, Drop, Names, Prefix
from .parts import EncoderConfig, Rope, config_field, constant, layers, refuse, size
from .parts.rotary import read_rope
from .unread import ReadTracker

# The usual keys, and the keys of the published files.
_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
}  # fmt: skip
_FIXED = {
    "prenorm": False, "parallel_block": False, "use_rms_norm": False, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "causal": False,
    "num_experts": 0, "add_cross_attention": False, "qk_norm": False,
}  # fmt: skip


@dataclass(frozen=True)
class NomicBertConfig(EncoderConfig):
    """The settings of a Nomic BERT, with the defaults of transformers for missing keys.

    Attributes:
        qkv_proj_bias, mlp_fc1_bias, mlp_fc2_bias: whether the projections of attention, the first
            linear layers of the MLP, and its last one have biases.
    """

    model_type = "nomic_bert"

    vocab_size: int = size(30_528)
    hidden_size: int = size(768)
    intermediate_size: int = size(3072)
    num_hidden_layers: int = layers(12)
    num_attention_heads: int = size(12)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(2048, minimum=1)
    type_vocab_size: int = size(2, minimum=0)
    layer_norm_eps: float = 1e-12
    qkv_proj_bias: bool = False
    mlp_fc1_bias: bool = False
    mlp_fc2_bias: bool = False
    rope_parameters: Rope = Rope(1000.0)
    num_labels: int = constant(2)  # of "id2label"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings under the usual keys or those of the published files, and RoPE in all three spellings."""
        refuse(raw, {**_FIXED, "moe_every_n_layers": (0, -1)}, "Nomic's BERT")
        found: dict[str, Any] = {}
        if raw.get("n_embd") is not None:
            found = {
                key: raw[theirs] for key, theirs in _KEYS.items() if raw.get(theirs) is not None
            }
            # "swiglu" is a gated MLP with SiLU.
            kind = found.get("hidden_act", "gelu")
            refuse({"activation_function": kind}, {"activation_function": "swiglu"}, "Nomic's BERT")
            found["hidden_act"] = "silu"
            if found.get("intermediate_size") is None:
                raise ValueError("'n_inner' is missing")
        raw = ReadTracker.of(raw).replaced(found)
        context = raw.get("max_position_embeddings")
        context = cls.max_position_embeddings if context is None else context
        if type(context) is int and context > 0:
            values = {"rope_parameters": _rope(raw, context), **values}
        return super().from_hf(raw, **values)


def _rope(raw: Mapping[str, Any], context: int) -> Rope:
    """The RoPE, for whose settings the published files have keys of their own."""
    given: Any = ChainMap({}, raw)  # type: ignore[arg-type]
    if raw.get("rotary_emb_base") is not None:
        given["rope_theta"] = raw["rotary_emb_base"]
    factor, trained = raw.get("rotary_scaling_factor"), raw.get("max_trained_positions")
    if factor is not None and type(trained) is int and trained > 0:
        given["rope_scaling"], context = {"rope_type": "dynamic", "factor": factor}, trained
    return read_rope(given, context, 1000.0)


class NomicBertAttention(EncoderAttention):
    """Self-attention with one projection of queries, keys and values."""

    names: ClassVar[tuple[str, ...]] = ("Wqkv", "out_proj")


class NomicBertMLP(EncoderMLP):
    """The gated MLP."""

    names: ClassVar[tuple[str, ...]] = ("fc12", "fc11", "fc2")


class NomicBertLayer(EncoderLayer):
    """A layer with norms after the residual sums."""

    names = ("attn", "norm1", "mlp", "norm2")

    def __init__(self, config: NomicBertConfig, types: Types):
        attention = NomicBertAttention(config, types, has_bias=config.qkv_proj_bias, rope="global")
        mlp = NomicBertMLP(
            config, types, has_bias=config.mlp_fc1_bias, down_bias=config.mlp_fc2_bias
        )
        super().__init__(config, types, attention, mlp)


class NomicBertModel(NormedEncoder):
    """A Nomic BERT without a head.

    Example:
        >>> model = NomicBertModel(NomicBertConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "attn" in name]
        ['encoder.layers.0.attn.Wqkv.weight', 'encoder.layers.0.attn.out_proj.weight']
    """

    layer_class: ClassVar[Any] = NomicBertLayer


class NomicBertForSequenceClassification(NomicBertModel):
    """A Nomic BERT with a classification head: a reranker, for example."""


NOMIC_BERT = NomicBertModel.family = Family.of(
    NomicBertModel,
    NomicBertConfig,
    "NomicBertModel",
    "NomicBertForPreTraining",
    "NomicBertForMaskedLM",
    "NomicBertForTokenClassification",
    names=Names(
        Prefix({"nomic_bert.": "", "bert.": ""}),
        Drop("cls.*", "classifier.*", head=True),
        ROPE_TABLES,
    ),
    gguf=NOMIC_BERT_GGUF,
)
NOMIC_BERT_HEAD = NomicBertForSequenceClassification.family = with_head(
    NOMIC_BERT, NomicBertForSequenceClassification
)
