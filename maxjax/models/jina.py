"""Jina's embeddings v3: XLM-RoBERTa with RoPE instead of learned positions.

::

    x = emb_ln(word_embeddings[ids] + token_type_embeddings[types])
    in each layer:
        q, k, v = split(Wqkv(x))
        x = norm1(x + out_proj(softmax(rope(q) rope(k)ᵀ / √D) v))    for each head, over all tokens
        x = norm2(x + fc2(gelu(fc1(x))))

The published files also have low-rank updates (LoRA) of every layer, one for each task. These are not applied:
embeddings are those of sentence-transformers without a task.

Source: arXiv:2409.10173, and modeling_xlm_roberta.py beside the files.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.activation import activation
from ..nn.attention.both_ways import both_ways
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from .family import Family
from .gguf.config.read import rows_of
from .gguf.table import ENCODER_BIASES, ENCODER_NAMES, GGUFTable
from .names import Body, Drop, Names, Prefix, Rename
from .parts import (
    Angles,
    AnswerFinder,
    Dtypes,
    Encoder,
    EncoderConfig,
    FirstTokenClassifier,
    MaskedWordHead,
    MaskedWordPredictor,
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
    replicate_over_mesh,
    rope,
    run_encoder,
    size,
    split_features_over_mesh,
    split_fused_heads_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_head,
)
from .split_layers import QKV, SplitLayers
from .unread import ReadTracker

_LOG = logging.getLogger("maxjax")
# In files with updates, each weight has the name of a parametrised torch weight, beside its updates.
_ORIGINAL = ".parametrizations.weight.original"


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


class JinaV3Embeddings(Module):
    """The sum of the embeddings of tokens and, where there are any, token types."""

    def __init__(self, config: JinaV3Config, dtypes: Dtypes):
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


class JinaV3Attention(Module):
    """Self-attention with rotary positions, and one linear layer for queries, keys and values."""

    def __init__(self, config: JinaV3Config, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.softmax_dtype = dtypes.reduce
        self.Wqkv = Linear(E, 3 * E, dtype, has_bias=True)
        self.out_proj = Linear(E, E, dtype, has_bias=True)

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


class JinaV3MLP(Module):
    """The MLP."""

    def __init__(self, config: JinaV3Config, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.fc1 = Linear(E, F, dtypes.dtype, has_bias=True)
        self.fc2 = Linear(F, E, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.fc1(x).astype(x.dtype))  # [B, T, F]
        return self.fc2(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc1"], ["fc2"])


class JinaV3Layer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: JinaV3Config, dtypes: Dtypes):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.mixer = JinaV3Attention(config, dtypes)
        self.norm1 = layer_norm(E, eps, dtypes)
        self.mlp = JinaV3MLP(config, dtypes)
        self.norm2 = layer_norm(E, eps, dtypes)

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        x = add_norm(self.norm1, x, self.mixer(x, mask, angles))
        return add_norm(self.norm2, x, self.mlp(x))


class JinaV3Encoder(Module):
    """The layers."""

    def __init__(self, config: JinaV3Config, dtypes: Dtypes):
        super().__init__()
        self.layers: Any = LayerList(
            JinaV3Layer(config, dtypes) for _ in range(config.num_hidden_layers)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None, angles: Angles) -> jax.Array:
        return run_encoder(self.layers, x, mask, angles)


class JinaV3Model(Encoder):
    """Jina's embeddings v3.

    Example:
        >>> model = JinaV3Model(JinaV3Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "Wqkv" in name]
        ['encoder.layers.0.mixer.Wqkv.weight', 'encoder.layers.0.mixer.Wqkv.bias']
    """

    takes_types: ClassVar[bool] = False

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
        self.embeddings = JinaV3Embeddings(config, dtypes)
        self.emb_ln = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)
        self.encoder = JinaV3Encoder(config, dtypes)
        self.pooler = Pooler(config.hidden_size, dtypes) if pooler else None

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        x = self.embeddings(ids, types)
        x = self.emb_ln(x).astype(x.dtype)
        config = self.config
        angles = encoder_angles(config.rope_parameters, positions, mask, config.head_dim)
        return self.encoder(x, mask, angles)


class JinaV3ForMaskedLM(MaskedWordPredictor, JinaV3Model):
    """Jina's encoder that predicts masked words: ``decoder(layer_norm(gelu(dense(x))))``."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.lm_head = MaskedWordHead(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.lm_head(x)


class JinaV3ForTokenClassification(TokenClassifier, JinaV3Model):
    """Jina's encoder with a head for tokens: one that finds names, for example."""


class JinaV3ForQuestionAnswering(AnswerFinder, JinaV3Model):
    """Jina's encoder that finds the answer to a question in a text."""


class JinaV3ForSequenceClassification(FirstTokenClassifier, JinaV3Model):
    """Jina's encoder with a head for texts: a reranker, for example."""


JINA_V3_GGUF = GGUFTable(
    "jina-bert-v3",
    {
        **ENCODER_NAMES, "token_embd_norm": "emb_ln", ".attn_qkv": "mixer.Wqkv",
        ".attn_output": "mixer.out_proj", ".attn_output_norm": "norm1", ".ffn_gate": None,
        ".ffn_up": "mlp.fc1", ".ffn_down": "mlp.fc2", ".layer_output_norm": "norm2",
    },
    constants={"hidden_act": "gelu"},
    read=lambda given, tensors, config: {
        "type_vocab_size": rows_of("token_types.weight", tensors, given.path)
    },
    write=lambda config: {"attention.causal": False},
    biases=ENCODER_BIASES,
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    layer="encoder.layers.*.",
    written=("attention.causal", "pooling_type"),
)  # fmt: skip

# The names of transformers' modules.
_MODULES = (
    SplitLayers({"mixer.Wqkv": QKV}),
    Prefix({"layers.": "encoder.layers.", "embeddings.LayerNorm.": "emb_ln."}, in_modules=True),
    Rename.of_layers(
        {
            "self_attn.o_proj": "mixer.out_proj",
            "post_attention_layernorm": "norm1",
            "post_mlp_layernorm": "norm2",
        },
        in_modules=True,
    ),
)

JINA_V3 = JinaV3Model.family = Family.of(
    JinaV3Model,
    JinaV3Config,
    "JinaEmbeddingsV3Model",
    names=Names(
        Body("roberta."),
        Drop("lm_head.*", "classifier.*", "qa_outputs.*", head=True),
        Drop("*.lora_A", "*.lora_B", kept=True),
        Rename({_ORIGINAL: ".weight"}),
        *_MODULES,
    ),
    gguf=JINA_V3_GGUF,
)
JinaV3ForMaskedLM.family = with_head(
    JINA_V3,
    JinaV3ForMaskedLM,
    "lm_head.*",
    layer="lm_head.decoder",
    bias="lm_head.bias",
    architectures=("JinaEmbeddingsV3ForMaskedLM",),
)
JinaV3ForTokenClassification.family = with_head(
    JINA_V3,
    JinaV3ForTokenClassification,
    "classifier.*",
    architectures=("JinaEmbeddingsV3ForTokenClassification",),
)
JinaV3ForQuestionAnswering.family = with_head(
    JINA_V3,
    JinaV3ForQuestionAnswering,
    "qa_outputs.*",
    architectures=("JinaEmbeddingsV3ForQuestionAnswering",),
)
JinaV3ForSequenceClassification.family = with_head(
    JINA_V3,
    JinaV3ForSequenceClassification,
    "classifier.*",
    architectures=("JinaEmbeddingsV3ForSequenceClassification",),
)
# The published files name the architecture XLM-RoBERTa.
JINA_V3_PUBLISHED = dataclasses.replace(
    JINA_V3,
    gguf=None,
    model_type="xlm-roberta",
    architectures=("XLMRobertaModel",),
    only=(("position_embedding_type", "rotary"),),
)
