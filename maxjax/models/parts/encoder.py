"""What text encoders share: the base classes of their models and configurations, and functions for their mathematics.

Shapes: B sequences, T tokens, H heads of width D, hidden size E.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from ...dtype import DType, promote
from ...errors import UnsupportedModelError, UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.split import Segment, Split
from ...nn.activation import activation
from ...nn.layer import LayerStack, Module
from ...nn.linear import Linear
from ...nn.norm import LayerNorm
from ..family import PretrainedModel
from .config import LabelledConfig
from .rotary import Angles, Rope


class Dtypes(NamedTuple):
    """The dtype of weights and activations, and the dtype in which norms and softmax are computed."""

    dtype: DType
    reduce: DType

    @classmethod
    def of(cls, dtype: Any, reduce: Any) -> Dtypes:
        """Return the dtypes of these names."""
        return cls(DType.of(dtype), DType.of(reduce))


def layer_norm(size: int, eps: float, dtypes: Dtypes, has_bias: bool = True) -> LayerNorm:
    """Return a LayerNorm over ``size`` features.

    Its weights are in the wider of the two dtypes: they are small, and rounding them to bfloat16 costs more
    accuracy than rounding all others together.
    """
    wide = promote(dtypes.dtype, dtypes.reduce)
    return LayerNorm(size, [DeviceRef.CPU()], wide, eps, has_bias, compute_dtype=dtypes.reduce)


def add_norm(norm: LayerNorm, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return ``norm(x + y)`` in the dtype of ``x``; the sum is not rounded before the norm."""
    dtype = norm.compute_dtype.np
    return norm(x.astype(dtype) + y.astype(dtype)).astype(x.dtype)


def add_embeddings(dtype: DType, tokens: jax.Array, *others: jax.Array) -> jax.Array:
    """Return the sum of the embeddings of tokens ``[B, T, E]`` and others ``[B or 1, T, E]``, computed in ``dtype``."""
    total = tokens
    for one in others:
        total = total.astype(dtype.np) + jnp.broadcast_to(one.astype(dtype.np), tokens.shape)
    return total


def run_encoder(layers: Any, x: jax.Array, *args: Any) -> jax.Array:
    """Run all layers in order: ``x = layer(x, *args)`` for each; a LayerStack as one loop."""
    if isinstance(layers, LayerStack):
        return layers.scan(x, call=_run_layer, args=args)
    for layer in layers:
        x = layer(x, *args)
    return x


def _run_layer(layer: Any, x: jax.Array, args: Any) -> jax.Array:
    return layer(x, *args)


def encoder_angles(
    rope: Rope, positions: jax.Array, mask: jax.Array | None, head_dim: int
) -> Angles:
    """Return the angles of the tokens of a call, for heads of this width.

    Args:
        rope: settings of the rotary position embedding.
        positions: integers ``[B or 1, T]``.
        mask: bools ``[B, T]`` or ``[B, T, T]``, as in ``Encoder.hidden_states``, which give each text's length.
        head_dim: D.
    """
    if mask is None:
        lengths = jnp.full(1, positions.shape[-1], jnp.int32)
    else:
        lengths = jnp.sum(mask, axis=-1, dtype=jnp.int32)  # [B], or [B, T]
        lengths = lengths if mask.ndim == 2 else jnp.max(lengths, axis=-1)
    return Angles(*rope.cos_sin(positions, lengths, head_dim), rope.interleaved)


def positions_past_padding(ids: jax.Array, indices: jax.Array, padding: int) -> jax.Array:
    """Return ``position_ids`` as in RoBERTa: ``padding`` plus the number of real tokens up to and including the token.

    Args:
        ids: token ids ``[B, T]``.
        indices: index of each token in its text, ``[B or 1, T]``, from 0.
        padding: id of the padding token, which is also its position.

    Example:
        >>> positions_past_padding(jnp.array([[5, 6, 1]]), jnp.arange(3)[None], 1).tolist()
        [[2, 3, 1]]
    """
    is_real = (ids != padding).astype(jnp.int32)
    count = jnp.cumsum(is_real, axis=1)
    starts = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :] - indices
    before = jnp.take_along_axis(count - is_real, jnp.broadcast_to(starts, count.shape), axis=1)
    return (count - before) * is_real + padding


def split_fused_heads_over_mesh(name: str, heads: int, head_dim: int) -> dict[str, Any]:
    """Return sharding rules for one Linear whose outputs are all queries, then all keys, then all values."""
    return {name: Split(0, (Segment.head_aware(heads, head_dim),) * 3)}


def split_fused_features_over_mesh(name: str, features: int) -> dict[str, Any]:
    """Return sharding rules for one Linear whose outputs are the two inputs of a gated MLP's product."""
    return {name: Split(0, (Segment.even(features),) * 2)}


class Pooler(Module):
    """A linear layer and an activation function, applied to the first token's state."""

    def __init__(self, size: int, dtypes: Dtypes, act: str = "tanh"):
        super().__init__()
        self.act = act
        self.dense = Linear(size, size, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return activation(self.act)(self.dense(x[:, 0]).astype(x.dtype))  # [B, E]


class EncoderOutput(NamedTuple):
    """The result of an encoder. Logits are float32; None without a head that computes them.

    Attributes:
        last_hidden_state: hidden states ``[B, T, E]``.
        pooler_output: ``[B, E]``, the first token's state after ``pooler``; None if the model has
            no pooler.
        logits: of the vocabulary ``[B, T, V]`` ("fill-mask"), of each token's labels ``[B, T, labels]`` ("tag"),
            or of each text's labels ``[B, labels]`` ("classify").
        start_logits, end_logits: of each token as the first and as the last of the answer ``[B, T]`` ("answer").
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None = None
    logits: jax.Array | None = None
    start_logits: jax.Array | None = None
    end_logits: jax.Array | None = None


class Encoder(PretrainedModel):
    """A text encoder: token ids → hidden states, and with a head → logits.

    An architecture makes its parts in ``__init__`` and defines :meth:`hidden_states`. It may override
    :meth:`position_ids` and ``takes_types``; a class of it with a head defines :meth:`head_outputs` and ``task``.

    Args:
        config: settings of the model.
        dtypes: dtypes of weights, and of norms, softmax and pooling.

    Attributes:
        pooler: the layer of ``pooler_output``, or None.
        takes_types: whether the model was trained with token types for pairs of texts.
        head_needs_pooler: whether the head computes from ``pooler_output``.
    """

    takes_types: ClassVar[bool] = True
    head_needs_pooler: ClassVar[bool] = False
    pooler: Any = None

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        self.config = config
        self.reduce_dtype = dtypes.reduce

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """:meth:`PretrainedModel.of_checkpoint`, with a pooler if the checkpoint has it or the head needs it."""
        make: Any = cls
        has_pooler = cls.head_needs_pooler or any(name.startswith("pooler.") for name in names)
        return make(config, dtype, reduce_dtype=reduce_dtype, pooler=has_pooler)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.config.max_length

    @property
    def id2label(self) -> dict[int, str]:
        """The names of the labels of the model's head, by number."""
        return self.config.id2label

    @property
    def problem_type(self) -> str | None:
        """What the labels of a text are, as ``config.json`` says; None if it does not say."""
        return self.config.problem_type

    def position_ids(self, ids: jax.Array, indices: jax.Array) -> jax.Array:
        """The positions of tokens, from their indices in their texts, ``[B or 1, T]``, counted from 0."""
        return indices

    def hidden_states(
        self, ids: jax.Array, types: jax.Array, positions: jax.Array, mask: jax.Array | None
    ) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer.

        Args:
            ids, types, positions: token ids and token types ``[B, T]``, ``position_ids`` ``[B or 1, T]``.
            mask: bools ``[B, T]``, which tokens are real, or ``[B, T, T]``, which keys (axis 2) a query (axis 1)
                attends to; None: all.
        """
        raise NotImplementedError

    def head_outputs(self, x: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
        """What the head computes, by the names of :class:`EncoderOutput`; nothing without a head.

        Args:
            x: hidden states ``[B, T, E]`` after the last layer.
            mask: as for :meth:`hidden_states`.
        """
        return {}

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
    ) -> EncoderOutput:
        """Token ids ``[B, T]`` → hidden states, and logits of the head.

        Inside ``jax.jit`` what is not used is not computed: states alone cost as much as without a head.

        Args:
            input_ids: token ids ``[B, T]``.
            attention_mask: ``[B, T]``, nonzero for real tokens (by default all are real);
                or ``[B, T, T]``, nonzero where a query (axis 1) may attend to a key (axis 2).
            token_type_ids: token types ``[B, T]``; zeros by default.
            position_ids: positions ``[B, T]`` or ``[1, T]``; by default 0, 1, 2, …, or the result of
                :meth:`position_ids` for these.

        Raises:
            UserInputError: ``input_ids`` is not ``[B, T]``; or there are more tokens than positions,
                and no ``position_ids``.
        """
        ids = jnp.asarray(input_ids)
        if ids.ndim != 2:
            raise UserInputError(f"input_ids must be [B, T], not of shape {ids.shape}")
        length = ids.shape[1]
        if position_ids is None:
            if length > self.max_length:
                raise UserInputError(
                    f"the sequence has {length} tokens and the model takes {self.max_length}: "
                    "shorten it"
                )
            position_ids = self.position_ids(ids, jnp.arange(length, dtype=jnp.int32)[None, :])
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(ids)
        mask = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        x = self.hidden_states(ids, token_type_ids, position_ids, mask)
        pooled = None if self.pooler is None else self.pooler(x)
        return EncoderOutput(x, pooled, **self.head_outputs(x, mask))


@dataclass(frozen=True)
class EncoderConfig(LabelledConfig):
    """Base class of the configurations of text encoders, with the settings that heads have in all of them.

    Attributes:
        tie_word_embeddings: whether the last layer of a head for masked words is the embedding table.
    """

    # An encoder is never causal, whatever a file says.
    unused = ("is_causal",)
    # No call reads them: the head's weights have the number of labels, and are those of the table or not.
    _mx_unread: ClassVar[frozenset[str]] = LabelledConfig._mx_unread | {"tie_word_embeddings"}

    tie_word_embeddings: bool = field(default=True, kw_only=True)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.max_position_embeddings  # type: ignore[attr-defined]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the labels of its head.

        Raises:
            UnsupportedModelError: the model is a decoder; or as the architecture says.
        """
        if raw.get("is_decoder"):
            what = cls.__name__.removesuffix("Config")
            raise UnsupportedModelError(f"{what} as a decoder ('is_decoder') is not supported")
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with names of labels; that the head's table is the embedding table is the default."""
        found = super().to_hf()
        if self.tie_word_embeddings:
            del found["tie_word_embeddings"]
        return found
