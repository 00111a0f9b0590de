"""Nomic's BERT: BERT's layers with RoPE and a gated MLP, and without most biases.

::

    x = emb_ln(word_embeddings[ids] + token_type_embeddings[types])
    in each layer:
        q, k, v = split(Wqkv(x))
        x = norm1(x + out_proj(softmax(rope(q) rope(k)ᵀ / √D) v))    for each head, over all tokens
        x = norm2(x + fc2(silu(fc12(x)) · fc11(x)))

The published files' ``config.json`` has the keys of GPT-2; newer files have the usual ones. Source:
arXiv:2402.01613, and modeling_hf_nomic_bert.py beside the files.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.activation import activation
from ..nn.attention.both_ways import both_ways
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from .family import Family
from .gguf.config.read import Config, Shapes, rows_of
from .gguf.metadata import Settings
from .gguf.table import ENCODER_BIASES, ENCODER_NAMES, GGUFTable
from .names import ROPE_TABLES, Body, Drop, Names, Prefix, Rename
from .parts import (
    Angles,
    Dtypes,
    Encoder,
    EncoderConfig,
    MaskedWordPredictor,
    PooledClassifier,
    Pooler,
    Rope,
    TokenClassifier,
    add_embeddings,
    add_norm,
    config_field,
    encoder_angles,
    layer_norm,
    layers,
    merge_heads,
    refuse,
    replicate_over_mesh,
    rope,
    run_encoder,
    size,
    split_features_over_mesh,
    split_fused_heads_over_mesh,
    split_heads,
    split_heads_over_mesh,
    vocabulary_layer,
    with_head,
)
from .parts.rotary import read_rope
from .split_layers import QKV, SplitLayers
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


class NomicBertEmbeddings(Module):
    """The sum of the embeddings of tokens and, where there are any, token types."""

    def __init__(self, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        E, types = config.hidden_size, config.type_vocab_size
        self.reduce_dtype = dtypes.reduce
        self.word_embeddings = Embedding(config.vocab_size, E, dtypes.dtype)
        self.token_type_embeddings = Embedding(types, E, dtypes.dtype) if types else None

    def __call__(self, ids: jax.Array, types: jax.Array) -> jax.Array:
        x = self.word_embeddings(ids)  # [B, T, E]
        if self.token_type_embeddings is None:
            return x
        return add_embeddings(self.reduce_dtype, x, self.token_type_embeddings(types)).astype(
            x.dtype
        )

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table; the table of tokens has its own rule."""
        return replicate_over_mesh("token_type_embeddings")


class NomicBertAttention(Module):
    """Self-attention with rotary positions, and one linear layer for queries, keys and values."""

    def __init__(self, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.Wqkv = Linear(E, 3 * E, dtype, has_bias=config.qkv_proj_bias)
        self.out_proj = Linear(E, E, dtype, has_bias=config.qkv_proj_bias)

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        qkv = jnp.split(self.Wqkv(x).astype(x.dtype), 3, axis=-1)  # 3 × [B, T, E]
        q, k, v = (split_heads(a, self.head_dim) for a in qkv)  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y = both_ways(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = split_fused_heads_over_mesh("Wqkv", self.heads, self.head_dim)
        return outputs | split_heads_over_mesh({}, {"out_proj": self.heads}, self.head_dim)


class NomicBertMLP(Module):
    """The gated MLP."""

    def __init__(self, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        E, F, dtype = config.hidden_size, config.intermediate_size, dtypes.dtype
        self.act = config.hidden_act
        self.fc12 = Linear(E, F, dtype, has_bias=config.mlp_fc1_bias)
        self.fc11 = Linear(E, F, dtype, has_bias=config.mlp_fc1_bias)
        self.fc2 = Linear(F, E, dtype, has_bias=config.mlp_fc2_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (y.astype(x.dtype) for y in linears([self.fc12, self.fc11], x))  # [B, T, F]
        return self.fc2(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc12", "fc11"], ["fc2"])


class NomicBertLayer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.attn = NomicBertAttention(config, dtypes)
        self.norm1 = layer_norm(E, eps, dtypes)
        self.mlp = NomicBertMLP(config, dtypes)
        self.norm2 = layer_norm(E, eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        x = add_norm(self.norm1, x, self.attn(x, mask, angles))
        return add_norm(self.norm2, x, self.mlp(x))


class NomicBertEncoder(Module):
    """The layers."""

    def __init__(self, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        self.layers: Any = LayerList(
            NomicBertLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        return run_encoder(self.layers, x, mask, angles)


class NomicBertModel(Encoder):
    """A Nomic BERT without a head.

    Example:
        >>> model = NomicBertModel(NomicBertConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "attn" in name]
        ['encoder.layers.0.attn.Wqkv.weight', 'encoder.layers.0.attn.out_proj.weight']
    """

    def __init__(
        self,
        config: Any,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool = False,
    ):
        dtypes = Dtypes.of(dtype, reduce_dtype)
        super().__init__(config, dtypes)
        self.embeddings = NomicBertEmbeddings(config, dtypes)
        self.emb_ln = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)
        self.encoder = NomicBertEncoder(config, dtypes)
        self.pooler = Pooler(config.hidden_size, dtypes) if pooler else None

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        x = self.embeddings(ids, types)
        x = self.emb_ln(x).astype(x.dtype)
        config = self.config
        angles = encoder_angles(config.rope_parameters, positions, mask, config.head_dim)
        return self.encoder(x, mask, angles)


class NomicBertTransform(Module):
    """``layer_norm(act(dense(x)))``, the first part of the head for masked words."""

    def __init__(self, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        E, self.act = config.hidden_size, config.hidden_act
        self.dense = Linear(E, E, dtypes.dtype, has_bias=True)
        self.layer_norm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, E]
        return self.layer_norm(y).astype(x.dtype)


class NomicBertPredictions(Module):
    """``decoder(transform(x))``."""

    def __init__(self, table: Embedding, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        self.transform = NomicBertTransform(config, dtypes)
        self.decoder = vocabulary_layer(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.transform(x))  # [B, T, V]


class NomicBertHeads(Module):
    """``cls`` in the files."""

    def __init__(self, table: Embedding, config: NomicBertConfig, dtypes: Dtypes):
        super().__init__()
        self.predictions = NomicBertPredictions(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.predictions(x)  # [B, T, V]


class NomicBertForMaskedLM(MaskedWordPredictor, NomicBertModel):
    """A Nomic BERT that predicts masked words."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.cls = NomicBertHeads(self.embeddings.word_embeddings, config, dtypes)

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """:meth:`Encoder.of_checkpoint`; in the published files the head has no biases, as the MLPs have none."""
        model = super().of_checkpoint(config, names, dtype, reduce_dtype)
        if model.task is not None:
            head = model.cls.predictions
            for name, layer in {
                "transform.dense": head.transform.dense,
                "decoder": head.decoder,
            }.items():
                if f"cls.predictions.{name}.bias" not in names:
                    layer.bias = None
        return model

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.cls(x)


class NomicBertForTokenClassification(TokenClassifier, NomicBertModel):
    """A Nomic BERT with a head for tokens: one that finds names, for example."""


class NomicBertForSequenceClassification(PooledClassifier, NomicBertModel):
    """A Nomic BERT with a head for texts: a reranker, for example."""


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """The settings in a GGUF file that only this architecture has."""
    return {
        "type_vocab_size": rows_of("token_types.weight", tensors, given.path),
        "qkv_proj_bias": "blk.0.attn_qkv.bias" in tensors,
        "mlp_fc1_bias": "blk.0.ffn_up.bias" in tensors,
        "mlp_fc2_bias": "blk.0.ffn_down.bias" in tensors,
    }


NOMIC_BERT_GGUF = GGUFTable(
    "nomic-bert",
    {
        **ENCODER_NAMES, "token_embd_norm": "emb_ln", ".attn_qkv": "attn.Wqkv",
        ".attn_output": "attn.out_proj", ".attn_output_norm": "norm1", ".ffn_gate": "mlp.fc12",
        ".ffn_up": "mlp.fc11", ".ffn_down": "mlp.fc2", ".layer_output_norm": "norm2",
    },
    constants={"hidden_act": "silu"},
    read=_read_gguf,
    write=lambda config: {"attention.causal": False},
    biases=ENCODER_BIASES,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    layer="encoder.layers.*.",
    written=("attention.causal", "pooling_type"),
)  # fmt: skip

# The names of transformers' modules.
_MODULES = (
    SplitLayers({"attn.Wqkv": QKV}),
    Prefix({"layers.": "encoder.layers.", "embeddings.LayerNorm.": "emb_ln."}, in_modules=True),
    Rename.of_layers(
        {
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc11",
            "mlp.gate_proj": "mlp.fc12",
            "mlp.down_proj": "mlp.fc2",
            "post_attention_layernorm": "norm1",
            "post_mlp_layernorm": "norm2",
        },
        in_modules=True,
    ),
)

NOMIC_BERT = NomicBertModel.family = Family.of(
    NomicBertModel,
    NomicBertConfig,
    "NomicBertModel",
    names=Names(
        Body("nomic_bert.", "bert."),
        Drop("cls.predictions.*", "cls.seq_relationship.*", "classifier.*", head=True),
        ROPE_TABLES,
        *_MODULES,
    ),
    gguf=NOMIC_BERT_GGUF,
)
NomicBertForMaskedLM.family = with_head(
    NOMIC_BERT,
    NomicBertForMaskedLM,
    "cls.predictions.*",
    layer="cls.predictions.decoder",
    bias="cls.predictions.bias",
    architectures=("NomicBertForMaskedLM", "NomicBertForPreTraining"),
)
NomicBertForTokenClassification.family = with_head(
    NOMIC_BERT, NomicBertForTokenClassification, "classifier.*"
)
NomicBertForSequenceClassification.family = with_head(
    NOMIC_BERT, NomicBertForSequenceClassification, "classifier.*"
)
