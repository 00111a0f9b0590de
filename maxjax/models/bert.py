"""BERT, a text encoder. Attributes are named as in Hugging Face's checkpoints.

Shapes: B sequences of T tokens, H heads of width D, hidden size E.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..dtype import DType, promote
from ..errors import UnsupportedModelError, UserInputError
from ..graph.device import DeviceRef
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..nn.activation import ACTIVATIONS
from ..nn.attention.tapped_attention import tapped_attention
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linear_rules, linears
from ..nn.norm import LayerNorm
from .config import ModelConfig, setting
from .decoder.config import check_activation
from .family import Family, PretrainedModel


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """The settings of a BERT, with Hugging Face's defaults for keys that old files lack."""

    model_type = "bert"

    vocab_size: int = setting(minimum=1, held="axis")
    hidden_size: int = setting(minimum=1, held="axis")
    intermediate_size: int = setting(minimum=1, held="axis")
    num_layers: int = setting("num_hidden_layers", minimum=1, maximum=1000, held="layers")
    num_heads: int = setting("num_attention_heads", minimum=1, held="axis")
    max_position_embeddings: int = setting(default=512, minimum=1, held="axis")
    type_vocab_size: int = setting(default=2, minimum=1, held="axis")
    layer_norm_eps: float = setting(default=1e-12)
    hidden_act: str = setting(default="gelu")
    position_embedding_type: str = setting(default="absolute")
    is_decoder: bool = setting(default=False)

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"'hidden_size' {self.hidden_size} is not a multiple of "
                f"'num_attention_heads' {self.num_heads}"
            )
        check_activation("hidden_act", self.hidden_act)
        if self.position_embedding_type != "absolute":
            kind = self.position_embedding_type
            raise UnsupportedModelError(
                f"BERT with 'position_embedding_type' {kind!r}: only 'absolute' is supported"
            )
        if self.is_decoder:
            raise UnsupportedModelError("BERT as a decoder ('is_decoder') is not supported")


@dataclass(frozen=True)
class _Types:
    """The dtype of weights, and the dtype in which norms and softmax are computed.

    The weights of norms are stored in the wider of the two: they are small, and rounding
    them to bfloat16 costs more accuracy than rounding all others together.
    """

    dtype: DType
    reduce: DType

    def linear(self, in_dim: int, out_dim: int) -> Linear:
        return Linear(in_dim, out_dim, self.dtype, DeviceRef.CPU(), has_bias=True)

    def norm(self, config: BertConfig) -> LayerNorm:
        return LayerNorm(
            config.hidden_size, [DeviceRef.CPU()], promote(self.dtype, self.reduce),
            config.layer_norm_eps, compute_dtype=self.reduce,
        )  # fmt: skip


class BertOutput(NamedTuple):
    """The result of a BERT.

    Attributes:
        last_hidden_state: hidden states ``[B, T, E]``.
        pooler_output: ``[B, E]``, the first token's state after ``pooler``; None if the model has
            no pooler.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None


class BertEmbeddings(Module):
    """The sum of the token, position and token-type embeddings, normalised."""

    def __init__(self, config: BertConfig, types: _Types):
        super().__init__()

        def table(rows: int) -> Embedding:
            return Embedding(rows, config.hidden_size, types.dtype, DeviceRef.CPU())

        self.word_embeddings = table(config.vocab_size)
        self.position_embeddings = table(config.max_position_embeddings)
        self.token_type_embeddings = table(config.type_vocab_size)
        self.LayerNorm = types.norm(config)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the small tables of positions and token types; the token table has its own rule."""
        replicated = ShardingStrategy.replicate(1)
        return {f"{name}_embeddings.weight": replicated for name in ("position", "token_type")}

    def __call__(self, input_ids: Any, token_type_ids: Any, position_ids: Any) -> jax.Array:
        tokens = self.word_embeddings(input_ids)  # [B, T, E]
        types = self.token_type_embeddings(token_type_ids)  # [B, T, E]
        positions = self.position_embeddings(position_ids)  # [1 or B, T, E]
        dtype = self.LayerNorm.compute_dtype.np
        positions = jnp.broadcast_to(positions.astype(dtype), tokens.shape)
        total = tokens.astype(dtype) + types.astype(dtype) + positions
        return self.LayerNorm(total).astype(tokens.dtype)


class BertSelfAttention(Module):
    """Self-attention: each token attends to every token that the mask allows."""

    def __init__(self, config: BertConfig, types: _Types):
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.softmax_dtype = types.reduce
        self.query = types.linear(size, size)
        self.key = types.linear(size, size)
        self.value = types.linear(size, size)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads."""
        segment = Segment.head_aware(
            self.num_heads, int(self.query.weight.shape[0]) // self.num_heads
        )
        rows = ShardingStrategy.segmented(1, 0, [segment])
        return linear_rules("query", rows) | linear_rules("key", rows) | linear_rules("value", rows)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        q, k, v = (
            y.astype(x.dtype).reshape(*x.shape[:2], self.num_heads, -1)  # [B, T, H, D]
            for y in linears([self.query, self.key, self.value], x)
        )
        mixed = tapped_attention(q, k, v, mask, softmax_dtype=self.softmax_dtype)  # [B, T, H, D]
        return mixed.reshape(x.shape)


class BertResidual(Module):
    """``LayerNorm(x + dense(y))``, the end of each half of a layer. The sum is not rounded first."""

    def __init__(self, in_dim: int, config: BertConfig, types: _Types):
        super().__init__()
        self.dense = types.linear(in_dim, config.hidden_size)
        self.LayerNorm = types.norm(config)

    def __call__(self, y: jax.Array, x: jax.Array) -> jax.Array:
        dtype = self.LayerNorm.compute_dtype.np
        return self.LayerNorm(x.astype(dtype) + self.dense(y).astype(dtype)).astype(x.dtype)


class BertAttention(Module):
    """The first half of a layer: self-attention and its output."""

    def __init__(self, config: BertConfig, types: _Types):
        super().__init__()
        self.self = BertSelfAttention(config, types)
        self.output = BertResidual(config.hidden_size, config, types)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the output's columns as the heads are split."""
        heads, size = self.self.num_heads, int(self.output.dense.weight.logical_shape[1])
        columns = ShardingStrategy.head_aware_columnwise(1, heads, size // heads)
        return linear_rules("output.dense", columns)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        return self.output(self.self(x, mask), x)


class BertIntermediate(Module):
    """The first linear layer of the MLP, with its activation."""

    def __init__(self, config: BertConfig, types: _Types):
        super().__init__()
        self.hidden_act = config.hidden_act
        self.dense = types.linear(config.hidden_size, config.intermediate_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.hidden_act](self.dense(x).astype(x.dtype))


class BertLayer(Module):
    """Attention, then an MLP, each with a residual connection and a LayerNorm after it."""

    def __init__(self, config: BertConfig, types: _Types):
        super().__init__()
        self.attention = BertAttention(config, types)
        self.intermediate = BertIntermediate(config, types)
        self.output = BertResidual(config.intermediate_size, config, types)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of the MLP."""
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        return linear_rules("intermediate.dense", rows) | linear_rules("output.dense", columns)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class BertEncoder(Module):
    """The layers, one after the other."""

    def __init__(self, config: BertConfig, types: _Types):
        super().__init__()
        self.layer = LayerList([BertLayer(config, types) for _ in range(config.num_layers)])

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class BertPooler(Module):
    """A linear layer and tanh, applied to the first token's state."""

    def __init__(self, config: BertConfig, types: _Types):
        super().__init__()
        self.dense = types.linear(config.hidden_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.dense(x[:, 0]).astype(x.dtype))  # [B, E]


class BertModel(PretrainedModel):
    """BERT without a head.

    Args:
        config: settings of the model.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms, softmax and pooling are computed.
        pooler: whether the model has a pooler.

    Example:
        >>> config = BertConfig(100, 8, 16, num_layers=2, num_heads=2)
        >>> model = BertModel(config, "float32")
        >>> out = jax.eval_shape(lambda m, x: m(x), model, jnp.zeros((3, 5), jnp.int32))
        >>> out.last_hidden_state.shape, out.pooler_output.shape
        ((3, 5, 8), (3, 8))
    """

    def __init__(
        self,
        config: BertConfig,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool = True,
    ):
        super().__init__()
        types = _Types(DType.of(dtype), DType.of(reduce_dtype))
        self.config = config
        self.reduce_dtype = types.reduce
        self.embeddings = BertEmbeddings(config, types)
        self.encoder = BertEncoder(config, types)
        self.pooler = BertPooler(config, types) if pooler else None

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.config.max_position_embeddings

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
    ) -> BertOutput:
        """Token ids ``[B, T]`` → hidden states.

        Args:
            input_ids: token ids ``[B, T]``.
            attention_mask: ``[B, T]``, nonzero for real tokens (by default all are real);
                or ``[B, T, T]``, nonzero where a query (axis 1) may attend to a key (axis 2).
            token_type_ids: token types ``[B, T]``; zeros by default.
            position_ids: positions ``[B, T]`` or ``[1, T]``; 0, 1, 2, … by default.

        Raises:
            UserInputError: there are more tokens than the model has positions, or ``input_ids`` is
                not ``[B, T]``.
        """
        input_ids = jnp.asarray(input_ids)
        if input_ids.ndim != 2:
            raise UserInputError(f"input_ids must be [B, T], not of shape {input_ids.shape}")
        length = input_ids.shape[1]
        if position_ids is None:
            if length > self.max_length:
                raise UserInputError(
                    f"the sequence has {length} tokens and the model takes {self.max_length}"
                )
            position_ids = jnp.arange(length, dtype=jnp.int32)[None, :]
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(input_ids)
        mask = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        x = self.embeddings(input_ids, token_type_ids, position_ids)
        x = self.encoder(x, mask)
        return BertOutput(x, None if self.pooler is None else self.pooler(x))


def _make(
    config: BertConfig, names: Collection[str], dtype: DType, reduce_dtype: DType
) -> BertModel:
    return BertModel(
        config, dtype, reduce_dtype=reduce_dtype, pooler="pooler.dense.weight" in names
    )


BERT = Family(
    model_type=BertConfig.model_type,
    architectures=(
        "BertModel", "BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction",
        "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification",
        "BertForQuestionAnswering",
    ),
    config=BertConfig,
    make=_make,
    prefixes=("bert.",),
    renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    # Buffers of positions and token types, and the heads on top of the encoder.
    ignored=(
        "embeddings.position_ids", "embeddings.token_type_ids",
        "cls.*", "classifier.*", "qa_outputs.*",
    ),
)  # fmt: skip
BertModel.family = BERT
