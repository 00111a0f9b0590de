"""GTE v1.5 and multilingual (Alibaba's "new" models): BERT's layers with RoPE and a gated MLP.

::

    x = LayerNorm(word_embeddings[ids] + token_type_embeddings[types])
    in each layer:
        q, k, v = split(qkv_proj(x))
        x = attn_ln(x + o_proj(softmax(rope(q) rope(k)ᵀ / √D) v))    for each head, over all tokens
        up, gate = split(up_gate_proj(x))
        x = mlp_ln(x + down_proj(gelu(gate) · up))

Source: arXiv:2407.19669, and modeling.py beside the published files.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import shown
from ..nn.activation import activation
from ..nn.attention.both_ways import both_ways
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from ..nn.rope_scaling import LinearScalingParams
from .family import Family
from .names import ROPE_TABLES, Body, Drop, Names, Prefix, Rename
from .parts import (
    Angles,
    Dtypes,
    Encoder,
    EncoderConfig,
    MaskedWordHead,
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
    split_fused_features_over_mesh,
    split_fused_heads_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_head,
)
from .split_layers import QKV, SplitLayers

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
        raise ValueError(f"'{key}' with 'rope_scaling' of type 'ntk' is {shown(value)}")
    return float(value)


class GteEmbeddings(Module):
    """The normalised sum of the embeddings of tokens and, where there are any, token types."""

    def __init__(self, config: GteConfig, dtypes: Dtypes):
        super().__init__()
        E, types = config.hidden_size, config.type_vocab_size
        self.reduce_dtype = dtypes.reduce
        self.word_embeddings = Embedding(config.vocab_size, E, dtypes.dtype)
        self.token_type_embeddings = Embedding(types, E, dtypes.dtype) if types else None
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, ids: jax.Array, types: jax.Array) -> jax.Array:
        x = self.word_embeddings(ids)  # [B, T, E]
        total = x
        if self.token_type_embeddings is not None:
            total = add_embeddings(self.reduce_dtype, x, self.token_type_embeddings(types))
        return self.LayerNorm(total).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table; the table of tokens has its own rule."""
        return replicate_over_mesh("token_type_embeddings")


class GteAttention(Module):
    """Self-attention with rotary positions, and one linear layer for queries, keys and values."""

    def __init__(self, config: GteConfig, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.qkv_proj = Linear(E, 3 * E, dtype, has_bias=True)
        self.o_proj = Linear(E, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        qkv = jnp.split(self.qkv_proj(x).astype(x.dtype), 3, axis=-1)  # 3 × [B, T, E]
        q, k, v = (split_heads(a, self.head_dim) for a in qkv)  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y = both_ways(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = split_fused_heads_over_mesh("qkv_proj", self.heads, self.head_dim)
        return outputs | split_heads_over_mesh({}, {"o_proj": self.heads}, self.head_dim)


class GteMLP(Module):
    """The gated MLP, with one linear layer for both inputs of the product."""

    def __init__(self, config: GteConfig, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act, self.features = config.hidden_act, F
        self.up_gate_proj = Linear(E, 2 * F, dtypes.dtype)
        self.down_proj = Linear(F, E, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        up, gate = jnp.split(self.up_gate_proj(x).astype(x.dtype), 2, axis=-1)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        outputs = split_fused_features_over_mesh("up_gate_proj", self.features)
        return outputs | split_features_over_mesh([], ["down_proj"])


class GteLayer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: GteConfig, dtypes: Dtypes):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.attention = GteAttention(config, dtypes)
        self.attn_ln = layer_norm(E, eps, dtypes)
        self.mlp = GteMLP(config, dtypes)
        self.mlp_ln = layer_norm(E, eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        x = add_norm(self.attn_ln, x, self.attention(x, mask, angles))
        return add_norm(self.mlp_ln, x, self.mlp(x))


class GteEncoder(Module):
    """The layers."""

    def __init__(self, config: GteConfig, dtypes: Dtypes):
        super().__init__()
        self.layer: Any = LayerList(
            GteLayer(config, dtypes) for _ in range(config.num_hidden_layers)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        return run_encoder(self.layer, x, mask, angles)


class GteModel(Encoder):
    """A GTE without a head.

    Example:
        >>> model = GteModel(GteConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "up_gate" in name]
        ['encoder.layer.0.mlp.up_gate_proj.weight']
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
        self.embeddings = GteEmbeddings(config, dtypes)
        self.encoder = GteEncoder(config, dtypes)
        self.pooler = Pooler(config.hidden_size, dtypes) if pooler else None

    @property
    def takes_types(self) -> bool:  # type: ignore[override]
        """Whether the model was trained with the token types of text pairs."""
        return self.config.type_vocab_size > 1

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        config = self.config
        angles = encoder_angles(config.rope_parameters, positions, mask, config.head_dim)
        return self.encoder(self.embeddings(ids, types), mask, angles)


class GteForMaskedLM(MaskedWordPredictor, GteModel):
    """A GTE that predicts masked words: ``decoder(layer_norm(gelu(dense(x))))``."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.lm_head = MaskedWordHead(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.lm_head(x)


class GteForTokenClassification(TokenClassifier, GteModel):
    """A GTE with a head for tokens: one that finds names, for example."""


class GteForSequenceClassification(PooledClassifier, GteModel):
    """A GTE with a head for texts: a reranker, for example."""


GTE = GteModel.family = Family.of(
    GteModel,
    GteConfig,
    "GteModel",
    "NewModel",
    names=Names(
        Body("gte.", "new."),
        Rename.of_layers({"lm_head.norm": "lm_head.layer_norm"}, written=True, in_modules=False),
        Drop("lm_head.*", "classifier.*", head=True),
        Drop("embeddings.position_ids"),
        ROPE_TABLES,
        # The names of transformers' modules.
        SplitLayers(
            {"attention.qkv_proj": QKV, "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")}
        ),
        Prefix({"layers.": "encoder.layer."}, in_modules=True),
        Rename.of_layers(
            {
                "self_attn.o_proj": "attention.o_proj",
                "post_attention_layernorm": "attn_ln",
                "post_mlp_layernorm": "mlp_ln",
            },
            in_modules=True,
        ),
    ),
)
GteForMaskedLM.family = with_head(
    GTE,
    GteForMaskedLM,
    "lm_head.*",
    layer="lm_head.decoder",
    architectures=("GteForMaskedLM", "NewForMaskedLM"),
)
GteForTokenClassification.family = with_head(
    GTE,
    GteForTokenClassification,
    "classifier.*",
    architectures=("GteForTokenClassification", "NewForTokenClassification"),
)
GteForSequenceClassification.family = with_head(
    GTE,
    GteForSequenceClassification,
    "classifier.*",
    architectures=("GteForSequenceClassification", "NewForSequenceClassification"),
)
