"""A text encoder: token ids → hidden states, and with a classification head → scores.

Shapes: B sequences, T tokens, hidden size E.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...errors import UserInputError
from ...nn.activation import ACTIVATIONS
from ...nn.layer import LayerList, LayerStack, Module
from ..family import Family, PretrainedModel
from .attention import TokenInputs, Types
from .block import EncoderEmbeddings


class EncoderOutput(NamedTuple):
    """The result of an encoder.

    Attributes:
        last_hidden_state: hidden states ``[B, T, E]``.
        pooler_output: ``[B, E]``, the first token's state after ``pooler``; None if the model has
            no pooler.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array | None


class Pooler(Module):
    """A linear layer and an activation function, applied to the first token's state."""

    activation: ClassVar[str] = "tanh"

    def __init__(self, config: Any, types: Types):
        super().__init__()
        self.dense = types.linear(config.hidden_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](self.dense(x[:, 0]).astype(x.dtype))  # [B, E]


class ClassificationHead(Module):
    """A linear layer, an activation function and the linear layer of the scores, as in RoBERTa."""

    activation: ClassVar[str] = "tanh"

    def __init__(self, config: Any, types: Types):
        super().__init__()
        self.dense = types.linear(config.hidden_size, config.hidden_size)
        self.out_proj = types.linear(config.hidden_size, config.num_labels)

    def __call__(self, x: jax.Array) -> jax.Array:
        """A pooled state ``[B, E]`` → scores ``[B, labels]``."""
        return self.out_proj(ACTIVATIONS[self.activation](self.dense(x).astype(x.dtype)))


class Encoder(PretrainedModel):
    """A text encoder. A family's class defines :meth:`make`, which makes the parts, and :meth:`states`.

    Args:
        config: settings of the model.
        dtype: dtype of weights and activations.
        reduce_dtype: dtype in which norms, softmax and pooling are computed.
        pooler: whether the model has a pooler; None: as ``has_pooler``.
        head: whether the model has a classification head.

    Attributes:
        pooler: the layer of ``pooler_output``, or None.
        classifier: the layer of the scores, or None.
        head_pooling: the pooling (a name in ``models.pooling.POOLINGS``) of the state that the
            classification head takes.
        pooler_class: class of the pooler.
        head_class: class of ``classifier``, which takes the state without the pooler; None: a linear layer
            after the pooler, if there is one.
        has_pooler: whether models have a pooler by default.
        takes_types: whether the model was trained with token types for pairs of texts.
    """

    head_pooling: ClassVar[str] = "cls"
    has_pooler: ClassVar[bool] = False
    pooler_class: ClassVar[Any] = Pooler
    head_class: ClassVar[Any] = None
    takes_types: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        dtype: Any = DType.float32,
        *,
        reduce_dtype: Any = DType.float32,
        pooler: bool | None = None,
        head: bool = False,
    ):
        super().__init__()
        types = Types(DType.of(dtype), DType.of(reduce_dtype))
        self.config = config
        self.reduce_dtype = types.reduce
        self.make(config, types)
        has_pooler = self.has_pooler if pooler is None else pooler
        self.pooler = self.pooler_class(config, types) if has_pooler else None
        self.classifier: Any = None
        if head:
            self.make_head(config, types)

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """:meth:`PretrainedModel.of_checkpoint`, with a pooler and a head if the checkpoint has their tensors."""
        parts = {name.partition(".")[0] for name in names}
        return cls(
            config, dtype, reduce_dtype=reduce_dtype,
            pooler="pooler" in parts, head="classifier" in parts,
        )  # fmt: skip

    def make(self, config: Any, types: Types) -> None:
        """Makes the parts of the model, named as in the files of its family."""
        raise NotImplementedError

    def make_head(self, config: Any, types: Types) -> None:
        """Makes ``classifier``, the layer of the scores."""
        linear = lambda config, types: types.linear(config.hidden_size, config.num_labels)
        self.classifier = (self.head_class or linear)(config, types)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        return self.config.max_length

    def places(self, input_ids: jax.Array, places: jax.Array) -> jax.Array:
        """The ``position_ids`` of tokens, from their indices in their texts, ``[B or 1, T]``, counted from 0."""
        return places

    def states(
        self, input_ids: jax.Array, types: jax.Array, positions: jax.Array, mask: Any
    ) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer.

        Args:
            input_ids, types, positions: token ids and token types ``[B, T]``, ``position_ids`` ``[B or 1, T]``.
            mask: bools ``[B, T]`` or ``[B, T, T]``, as in ``TokenInputs``, or None.
        """
        raise NotImplementedError

    def rotations(self, positions: jax.Array, mask: Any) -> dict[str, Any]:
        """cos and sin of the tokens' angles, by the kind of RoPE, for ``TokenInputs``."""
        if mask is None:
            lengths = jnp.full(1, positions.shape[-1], jnp.int32)
        else:
            lengths = jnp.sum(mask, axis=-1, dtype=jnp.int32)  # [B], or [B, T]
            lengths = lengths if mask.ndim == 2 else jnp.max(lengths, axis=-1)
        names = {"global": "rope_parameters", "local": "local_rope_parameters"}
        ropes = {kind: getattr(self.config, name, None) for kind, name in names.items()}
        width = self.config.head_dim
        return {
            name: rope.cos_sin(positions, lengths, width)
            for name, rope in ropes.items() if rope is not None
        }  # fmt: skip

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
                :meth:`places` for these.

        Raises:
            UserInputError: ``input_ids`` is not ``[B, T]``; or there are more tokens than positions,
                and no ``position_ids``.
        """
        input_ids = jnp.asarray(input_ids)
        if input_ids.ndim != 2:
            raise UserInputError(f"input_ids must be [B, T], not of shape {input_ids.shape}")
        length = input_ids.shape[1]
        if position_ids is None:
            if length > self.max_length:
                raise UserInputError(
                    f"the sequence has {length} tokens and the model takes {self.max_length}: "
                    "shorten it"
                )
            position_ids = self.places(input_ids, jnp.arange(length, dtype=jnp.int32)[None, :])
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(input_ids)
        mask = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        x = self.states(input_ids, token_type_ids, position_ids, mask)
        return EncoderOutput(x, None if self.pooler is None else self.pooler(x))

    def scores(self, pooled: jax.Array) -> jax.Array:
        """The classification head: pooled states ``[B, E]`` → scores ``[B, labels]``. It needs a ``classifier``."""
        if self.pooler is not None and self.head_class is None:
            pooled = self.pooler(pooled[:, None])
        return self.classifier(pooled)


class NormedEncoder(Encoder):
    """An encoder without learned positions, whose norm of the embeddings, ``emb_ln``, is beside the embeddings.

    Attributes:
        layer_class: class of the layers.
    """

    layer_class: ClassVar[Any]

    def make(self, config: Any, types: Types) -> None:
        """Makes embeddings, their norm and layers."""
        self.embeddings = EncoderEmbeddings(
            config, types, token_types=config.type_vocab_size, has_norm=False
        )
        self.emb_ln = types.norm(config)
        layers = (self.layer_class(config, types) for _ in range(config.num_hidden_layers))
        self.encoder = Layers("layers", layers)

    def states(self, input_ids: Any, types: Any, positions: Any, mask: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` after the last layer."""
        x = self.embeddings(input_ids, types, positions)
        x = self.emb_ln(x).astype(x.dtype)
        return self.encoder(x, TokenInputs(mask, self.rotations(positions, mask)))


class Layers(Module):
    """Runs layers one after another; the attribute with the layers has the name of the family's files.

    Example:
        >>> Layers("layer", []).layer
        LayerList(0 layers)
    """

    def __init__(self, name: str, layers: Iterable[Module]):
        super().__init__()
        self.attribute = name
        setattr(self, name, LayerList(layers))

    def __call__(self, x: jax.Array, tokens: Any) -> jax.Array:
        """Hidden states ``[B, T, E]`` → the same shape; ``tokens`` is what each layer gets."""
        return in_turn(getattr(self, self.attribute), x, tokens)


def in_turn(layers: Iterable[Any], x: jax.Array, tokens: Any) -> jax.Array:
    """Runs the layers one after another, or a LayerStack as one loop."""
    if isinstance(layers, LayerStack):
        return layers.scan(x, tokens=tokens)
    for layer in layers:
        x = layer(x, tokens)
    return x


def with_head(family: Family, kind: type[Encoder], *architectures: str) -> Family:
    """Makes the family of an encoder's models with a classification head.

    Args:
        family: the family of the encoder.
        kind: class of the model with the head.
        architectures: names in ``config.json`` of models with this head; the class's name by default.
    """
    return dataclasses.replace(
        family, architectures=architectures or (kind.__name__,), make=kind.of_checkpoint, gguf=None,
        names=family.names.without("classifier.*", "pre_classifier.*", "head.*"),
    )  # fmt: skip
