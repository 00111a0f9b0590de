"""DeBERTa V2 and V3: a BERT whose attention scores depend on contents and on distances.

::

    x = LayerNorm(word_embeddings[ids] + token_type_embeddings[types] + position_embeddings[positions])
    in each layer, with d the class of the distance of tokens i and j, and r the embeddings of these classes:
        q, k, v = query_proj(x), key_proj(x), value_proj(x)
        score[i, j] = (q[i] k[j] + q[i] pos_key_proj(r)[d] + k[j] pos_query_proj(r)[d]) / √(3 D)
        x = LayerNorm(x + dense(softmax(score) v))              for each head, over all tokens
        x = LayerNorm(x + output(gelu(intermediate(x))))

Sources: arXiv:2006.03654, arXiv:2111.09543.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features, R classes of distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..errors import UnsupportedModelError, UserInputError
from ..nn.activation import activation
from ..nn.attention.tapped_attention import tapped_attention
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from .family import Family
from .names import GAMMA_BETA, Body, Drop, Names
from .parts import (
    AnswerFinder,
    Dtypes,
    Encoder,
    EncoderConfig,
    MaskedWordPredictor,
    PooledClassifier,
    Pooler,
    PredictionHeads,
    TokenClassifier,
    add_embeddings,
    add_norm,
    config_field,
    layer_norm,
    layers,
    merge_heads,
    refuse,
    replicate_over_mesh,
    run_encoder,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    vocabulary_layer,
    with_defaults,
    with_head,
)

# The two terms with distances: content-distance and distance-content.
KINDS = ("c2p", "p2c")


@dataclass(frozen=True)
class DebertaV2Config(EncoderConfig):
    """The settings of a DeBERTa V2 or V3.

    Attributes:
        max_relative_positions: largest distance; ``max_position_embeddings`` by default.
        position_buckets: number of classes of distances in one direction; -1: each distance is a class.
        position_biased_input: whether position embeddings are added to the token embeddings.
        share_att_key: whether distances use the linear layers of queries and keys.
        norm_rel_ebd: "layer_norm" if the embeddings of distances are normalised.
        pos_att_type: which of "c2p" and "p2c" are added to the scores of contents.
        legacy: whether the head for masked words is BERT's, or that of the published files of V3.
    """

    model_type = "deberta-v2"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    hidden_act: str = "gelu"
    max_position_embeddings: int = size(512)
    position_embedding_type: str = "absolute"
    type_vocab_size: int = size(0, minimum=0)
    layer_norm_eps: float = 1e-7
    max_relative_positions: int = config_field(-1, minimum=-1)
    position_buckets: int = size(-1, minimum=-1)
    position_biased_input: bool = True
    share_att_key: bool = False
    norm_rel_ebd: str = "none"
    pooler_hidden_act: str = "gelu"
    pos_att_type: tuple[str, ...] = ()
    legacy: bool = True

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
            raise UnsupportedModelError(
                "'conv_kernel_size', a convolution after the first layer, is not supported for deberta-v2"
            )
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
        farthest = self.farthest if self.position_buckets > 0 else None
        return distance_classes(length, self.span, farthest)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"position_embedding_type": self.position_embedding_type}
        refuse(given, {"position_embedding_type": "absolute"}, "DebertaV2")


def distance_classes(length: int, span: int, farthest: int | None = None) -> np.ndarray:
    """The class of the distance between each query and key, ``[T, T]``.

    Args:
        length: T.
        span: R/2, the number of classes in one direction.
        farthest: largest distance, if distances above span/2 share classes by their logarithm;
            None: each distance has its own class.

    Example:
        >>> distance_classes(3, 2).tolist()
        [[2, 1, 0], [3, 2, 1], [3, 3, 2]]
    """
    places = np.arange(length)
    found = places[:, None] - places
    if farthest is not None:
        middle = span // 2
        far = np.where(np.abs(found) < middle, middle - 1, np.abs(found))
        # In float32 as in transformers, since the result is rounded up.
        logs = np.log((far / middle).astype(np.float32))
        logs = logs / np.log(np.float32((farthest - 1) / middle)) * np.float32(middle - 1)
        large = (np.ceil(logs) + middle).astype(int) * np.sign(found)
        found = np.where(far <= middle, found, large)
    return np.clip(found + span, 0, 2 * span - 1).astype(np.int32)


class DebertaV2Embeddings(Module):
    """The normalised sum of the embeddings of tokens and, where there are tables, of token types and positions."""

    def __init__(self, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        E, dtype = config.hidden_size, dtypes.dtype
        positions = config.max_position_embeddings if config.position_biased_input else 0
        types = config.type_vocab_size
        self.reduce_dtype = dtypes.reduce
        self.word_embeddings = Embedding(config.vocab_size, E, dtype)
        self.position_embeddings = Embedding(positions, E, dtype) if positions else None
        self.token_type_embeddings = Embedding(types, E, dtype) if types else None
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)

    def __call__(self, ids: jax.Array, types: jax.Array, positions: jax.Array) -> jax.Array:
        x = total = self.word_embeddings(ids)  # [B, T, E]
        if self.token_type_embeddings is not None:
            total = add_embeddings(self.reduce_dtype, total, self.token_type_embeddings(types))
        if self.position_embeddings is not None:
            total = add_embeddings(self.reduce_dtype, total, self.position_embeddings(positions))
        return self.LayerNorm(total).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small tables; the table of tokens has its own rule."""
        return replicate_over_mesh("position_embeddings", "token_type_embeddings")


class DebertaV2SelfAttention(Module):
    """Disentangled self-attention: scores depend on contents and on distances."""

    def __init__(self, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        E, dtype, kinds = config.hidden_size, dtypes.dtype, config.pos_att_type
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kinds, self.shares, self.softmax_dtype = kinds, config.share_att_key, dtypes.reduce
        self.query_proj = Linear(E, E, dtype, has_bias=True)
        self.key_proj = Linear(E, E, dtype, has_bias=True)
        self.value_proj = Linear(E, E, dtype, has_bias=True)
        if "c2p" in kinds and not self.shares:
            self.pos_key_proj = Linear(E, E, dtype, has_bias=True)
        if "p2c" in kinds and not self.shares:
            self.pos_query_proj = Linear(E, E, dtype, has_bias=True)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, distances: jax.Array, classes: jax.Array
    ) -> jax.Array:
        """Attend, given the embeddings of distances ``[R, E]`` and the class of each distance ``[T, T]``."""
        q, k, v = linears([self.query_proj, self.key_proj, self.value_proj], x)  # [B, T, E]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        scale, bias = (self.head_dim * (1 + len(self.kinds))) ** -0.5, None
        for kind in self.kinds:
            if kind == "c2p":  # a query's content and the distance of the key
                linear = self.key_proj if self.shares else self.pos_key_proj
                scores = self.scores(q, linear(distances[None]), classes) * scale  # [B, H, T, T]
            else:  # a key's content and the distance of the query
                linear = self.query_proj if self.shares else self.pos_query_proj
                scores = self.scores(k, linear(distances[None]), classes.T) * scale
                scores = scores.swapaxes(2, 3)
            bias = scores if bias is None else bias + scores
        options: dict[str, Any] = {"scale": scale, "softmax_dtype": self.softmax_dtype}
        return merge_heads(tapped_attention(q, k, v, mask, bias=bias, **options))  # [B, T, E]

    def scores(self, contents: jax.Array, distances: jax.Array, classes: jax.Array) -> jax.Array:
        """Return the scores ``[B, H, T, T]`` of contents ``[B, T, H, D]`` with distances ``[1, R, E]``."""
        r = split_heads(distances.astype(contents.dtype), self.head_dim)  # [1, R, H, D]
        r = jnp.broadcast_to(r, (len(contents), *r.shape[1:]))  # [B, R, H, D]
        scores = jnp.einsum("bthd,brhd->bhtr", contents, r, preferred_element_type=jnp.float32)
        at = jnp.broadcast_to(classes[None, None], (*scores.shape[:3], len(classes)))
        return jnp.take_along_axis(scores, at, 3)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads."""
        names = ["query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"]
        return split_heads_over_mesh(dict.fromkeys(names, self.heads), {}, self.head_dim)


class DebertaV2Residual(Module):
    """``LayerNorm(x + dense(y))``, the end of each half of a layer."""

    def __init__(self, features: int, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        self.dense = Linear(features, config.hidden_size, dtypes.dtype, has_bias=True)
        self.LayerNorm = layer_norm(config.hidden_size, config.layer_norm_eps, dtypes)

    def __call__(self, y: jax.Array, x: jax.Array) -> jax.Array:
        return add_norm(self.LayerNorm, x, self.dense(y))


class DebertaV2Attention(Module):
    """The first half of a layer: self-attention and its output."""

    def __init__(self, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        self.self = DebertaV2SelfAttention(config, dtypes)
        self.output = DebertaV2Residual(config.hidden_size, config, dtypes)

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        return self.output(self.self(x, *args), x)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the output's inputs as the heads are split."""
        return split_heads_over_mesh({}, {"output.dense": self.self.heads}, self.self.head_dim)


class DebertaV2Intermediate(Module):
    """The first linear layer of the MLP, with its activation."""

    def __init__(self, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.dense = Linear(E, F, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, F]


class DebertaV2Layer(Module):
    """Attention, then the MLP, each with a LayerNorm after the sum."""

    def __init__(self, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        self.attention = DebertaV2Attention(config, dtypes)
        self.intermediate = DebertaV2Intermediate(config, dtypes)
        self.output = DebertaV2Residual(config.intermediate_size, config, dtypes)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, distances: jax.Array, classes: jax.Array
    ) -> jax.Array:
        x = self.attention(x, mask, distances, classes)
        return self.output(self.intermediate(x), x)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of the MLP."""
        return split_features_over_mesh(["intermediate.dense"], ["output.dense"])


class DebertaV2Encoder(Module):
    """The layers, and the embedding table of distances that they share."""

    def __init__(self, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        E, self.config = config.hidden_size, config
        self.layer: Any = LayerList(
            DebertaV2Layer(config, dtypes) for _ in range(config.num_hidden_layers)
        )
        self.rel_embeddings = Embedding(2 * config.span, E, dtypes.dtype)
        has_norm = "layer_norm" in config.norm_rel_ebd
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes) if has_norm else None

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        rows = self.rel_embeddings(jnp.arange(2 * self.config.span))  # [R, E]
        rows = rows if self.LayerNorm is None else self.LayerNorm(rows)
        classes = jnp.asarray(self.config.classes(x.shape[1]))  # [T, T]
        return run_encoder(self.layer, x, mask, rows.astype(x.dtype), classes)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small table."""
        return replicate_over_mesh("rel_embeddings")


class DebertaV2Model(Encoder):
    """A DeBERTa V2 or V3 without a head.

    Example:
        >>> config = DebertaV2Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2, position_buckets=4)
        >>> DebertaV2Model(config).raw_state_dict()["encoder.rel_embeddings.weight"].shape
        [Dim(8), Dim(8)]
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
        if not config.position_biased_input:  # some files have such a table all the same
            self.unused_tensors = ("*.position_embeddings.*",)
        self.embeddings = DebertaV2Embeddings(config, dtypes)
        self.encoder = DebertaV2Encoder(config, dtypes)
        act = config.pooler_hidden_act
        self.pooler = Pooler(config.hidden_size, dtypes, act) if pooler else None

    def hidden_states(self, ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        return self.encoder(self.embeddings(ids, types, positions), mask)


class DebertaV3Predictions(Module):
    """``LayerNorm(act(dense(x)))``, and ``decoder``, the embedding table with a bias: the head of V3's files."""

    def __init__(self, table: Embedding, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        E, self.act = config.hidden_size, config.hidden_act
        self.dense = Linear(E, E, dtypes.dtype, has_bias=True)
        self.LayerNorm = layer_norm(E, config.layer_norm_eps, dtypes)
        self.decoder = vocabulary_layer(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.dense(x).astype(x.dtype))  # [B, T, E]
        return self.decoder(self.LayerNorm(y).astype(x.dtype))  # [B, T, V]


class DebertaV3Heads(Module):
    """``lm_predictions`` in the files."""

    def __init__(self, table: Embedding, config: DebertaV2Config, dtypes: Dtypes):
        super().__init__()
        self.lm_head = DebertaV3Predictions(table, config, dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.lm_head(x)  # [B, T, V]


class DebertaV2ForMaskedLM(MaskedWordPredictor, DebertaV2Model):
    """A DeBERTa that predicts masked words."""

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        self.cls = PredictionHeads(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.cls(x)


class DebertaV3ForMaskedLM(MaskedWordPredictor, DebertaV2Model):
    """A DeBERTa that predicts masked words with the head of V3's files: its config must have ``legacy=False``.

    Raises:
        UserInputError: ``config.legacy`` is true, or ``tie_word_embeddings`` false: this head has no table of its own.
    """

    def add_head(self, config: Any, dtypes: Dtypes) -> None:
        """Makes the layers of the head."""
        if config.legacy or not config.tie_word_embeddings:
            raise UserInputError(
                "DebertaV3ForMaskedLM must have a config with legacy=False and tie_word_embeddings=True"
            )
        self.lm_predictions = DebertaV3Heads(self.embeddings.word_embeddings, config, dtypes)

    def word_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states ``[B, T, E]`` → logits ``[B, T, V]`` of the words in each place."""
        return self.lm_predictions(x)


class DebertaV2ForTokenClassification(TokenClassifier, DebertaV2Model):
    """A DeBERTa with a head for tokens: one that finds names, for example."""


class DebertaV2ForQuestionAnswering(AnswerFinder, DebertaV2Model):
    """A DeBERTa that finds the answer to a question in a text."""


class DebertaV2ForSequenceClassification(PooledClassifier, DebertaV2Model):
    """A DeBERTa with a head for texts: a reranker, for example."""


DEBERTA_V2 = DebertaV2Model.family = Family.of(
    DebertaV2Model,
    DebertaV2Config,
    "DebertaV2Model",
    "DebertaV2ForMultipleChoice",
    names=Names(
        Body("deberta."),
        Drop(
            "cls.predictions.*",
            "classifier.*",
            "qa_outputs.*",
            "lm_predictions.lm_head.*",
            "mask_predictions.*",
            head=True,
        ),
        Drop("embeddings.position_ids", "embeddings.token_type_ids"),
        GAMMA_BETA,
    ),
)
DebertaV2ForMaskedLM.family = with_head(
    DEBERTA_V2,
    DebertaV2ForMaskedLM,
    "cls.predictions.*",
    layer="cls.predictions.decoder",
    bias="cls.predictions.bias",
)
DebertaV3ForMaskedLM.family = replace(
    with_head(
        DEBERTA_V2,
        DebertaV3ForMaskedLM,
        "lm_predictions.lm_head.*",
        architectures=("DebertaV2ForMaskedLM",),
        layer="lm_predictions.lm_head.decoder",
        bias="lm_predictions.lm_head.bias",
    ),
    only=(("legacy", False),),
)
DebertaV2ForTokenClassification.family = with_head(
    DEBERTA_V2, DebertaV2ForTokenClassification, "classifier.*"
)
DebertaV2ForQuestionAnswering.family = with_head(
    DEBERTA_V2, DebertaV2ForQuestionAnswering, "qa_outputs.*"
)
DebertaV2ForSequenceClassification.family = with_head(
    DEBERTA_V2, DebertaV2ForSequenceClassification, "classifier.*", "pooler.*"
)
