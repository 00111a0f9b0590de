"""What text encoders share: the base classes of their models and configurations, and functions for their mathematics.

Shapes: B sequences, T tokens, H heads of width D, hidden size E.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from ...dtype import DType, promote
from ...errors import UnsupportedModelError, UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.activation import activation
from ...nn.layer import LayerStack, Module
from ...nn.linear import Linear, linear_rules
from ...nn.norm import LayerNorm
from ..config import label_names, labels_of
from ..family import Family, PretrainedModel
from .config import ArchitectureConfig
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
    segments = [Segment.head_aware(heads, head_dim)] * 3
    return linear_rules(name, ShardingStrategy.segmented(1, 0, segments))


def split_fused_features_over_mesh(name: str, features: int) -> dict[str, Any]:
    """Return sharding rules for one Linear whose outputs are the two inputs of a gated MLP's product."""
    return linear_rules(name, ShardingStrategy.segmented(1, 0, [Segment.even(features)] * 2))


class Pooler(Module):
    """A linear layer and an activation function, applied to the first token's state."""

    def __init__(self, size: int, dtypes: Dtypes, act: str = "tanh"):
        super().__init__()
        self.act = act
        self.dense = Linear(size, size, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return activation(self.act)(self.dense(x[:, 0]).astype(x.dtype))  # [B, E]


class ClassificationHead(Module):
    """A linear layer, an activation function and the linear layer of the scores, as in RoBERTa."""

    def __init__(self, size: int, labels: int, dtypes: Dtypes, act: str = "tanh"):
        super().__init__()
        self.act = act
        self.dense = Linear(size, size, dtypes.dtype, has_bias=True)
        self.out_proj = Linear(size, labels, dtypes.dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """A pooled state ``[B, E]`` → scores ``[B, labels]``."""
        return self.out_proj(activation(self.act)(self.dense(x).astype(x.dtype)))


class EncoderOutput(NamedTuple):
    """The result of an encoder.

    Attributes:
        last_hidden_state: hidden states ``[B, T, E]``.
        pooler_output: ``[B, E]``, the first token's state after ``pooler``; None if the model has
            no pooler.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None


class Encoder(PretrainedModel):
    """A text encoder: token ids → hidden states, and with a classification head → scores.

    An architecture makes its parts in ``__init__`` and defines :meth:`hidden_states`. It may override
    :meth:`position_ids`, :meth:`scores`, ``head_pooling`` and ``takes_types``.

    Args:
        config: settings of the model.
        dtypes: dtypes of weights, and of norms, softmax and pooling.

    Attributes:
        pooler: the layer of ``pooler_output``, or None.
        classifier: the layer of the scores, or None.
        head_pooling: the pooling (a name in ``models.pooling.POOLINGS``) of the state that the
            classification head takes.
        takes_types: whether the model was trained with token types for pairs of texts.
    """

    head_pooling: ClassVar[str] = "cls"
    takes_types: ClassVar[bool] = True
    pooler: Any = None
    classifier: Any = None

    def __init__(self, config: Any, dtypes: Dtypes):
        super().__init__()
        self.config = config
        self.reduce_dtype = dtypes.reduce

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """:meth:`PretrainedModel.of_checkpoint`, with a pooler and a head if the checkpoint has their tensors."""
        make: Any = cls
        parts = {name.partition(".")[0] for name in names}
        return make(
            config, dtype, reduce_dtype=reduce_dtype,
            pooler="pooler" in parts, head="classifier" in parts,
        )  # fmt: skip

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.config.max_length

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

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
    ) -> EncoderOutput:
        """Token ids ``[B, T]`` → hidden states.

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
        return EncoderOutput(x, None if self.pooler is None else self.pooler(x))

    def scores(self, pooled: jax.Array) -> jax.Array:
        """The classification head: pooled states ``[B, E]`` → scores ``[B, labels]``. It needs a ``classifier``."""
        if self.pooler is not None:
            pooled = self.pooler(pooled[:, None])
        return self.classifier(pooled)


def with_head(family: Family, kind: type[Encoder], *architectures: str) -> Family:
    """Return the family of an encoder's models with a classification head.

    Args:
        family: the family of the encoder.
        kind: class of the model with the head.
        architectures: names in ``config.json`` of models with this head; the class's name by default.
    """
    return dataclasses.replace(
        family, architectures=architectures or (kind.__name__,), make=kind.of_checkpoint, gguf=None,
        names=family.names.without("classifier.*", "pre_classifier.*", "head.*"),
    )  # fmt: skip


class EncoderConfig(ArchitectureConfig):
    """Base class of the configurations of text encoders. It declares no fields."""

    # An encoder is never causal, whatever a file says.
    unused = ("is_causal",)
    # No call reads it: the head's weights have the number.
    _mx_unread: ClassVar[frozenset[str]] = frozenset({"num_labels"})

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other."""
        size, heads = self.hidden_size, self.num_attention_heads  # type: ignore[attr-defined]
        if size % heads:
            raise ValueError(
                f"'{self.key_of('hidden_size')}' {size} is not a multiple of "
                f"'{self.key_of('num_attention_heads')}' {heads}"
            )
        super()._check()

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.hidden_size // self.num_attention_heads  # type: ignore[attr-defined]

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.max_position_embeddings  # type: ignore[attr-defined]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the number of labels of a classification head.

        Raises:
            UnsupportedModelError: the model is a decoder; or as the architecture says.
        """
        if raw.get("is_decoder"):
            what = cls.__name__.removesuffix("Config")
            raise UnsupportedModelError(f"{what} as a decoder ('is_decoder') is not supported")
        return super().from_hf(raw, **{"num_labels": labels_of(raw), **values})

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with names of labels."""
        return {**super().to_hf(), **label_names(self.num_labels)}  # type: ignore[attr-defined]
