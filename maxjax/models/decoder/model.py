"""The decoder-only language model that the families share: token ids → logits of the next token.

``model(ids)`` returns logits; ``model(ids, cache)`` returns logits and the next cache.

Shapes: L layers, B sequences, T tokens, K KV heads, S slots of the cache, head width D,
hidden size E, vocabulary size V.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...nn.embedding import Embedding
from ...nn.layer import LayerList, LayerStack, Module
from ..family import Family
from ..parts.cache import LayerCache
from ..parts.language_model import LanguageModel
from .attention import Cached, Step
from .block import DecoderLayer
from .config import DecoderConfig
from .norm import norm


class DecoderModel(Module):
    """Embedding, layers and final norm: ``model`` in Hugging Face's checkpoints."""

    _mx_carries = True

    def __init__(self, config: DecoderConfig, dtype: DType, layer_class: Any):
        super().__init__()
        self.dtype, self.embedding_scale = dtype, config.embedding_scale
        self.make_embeddings(config, dtype)
        self.layers: Any = LayerList(
            layer_class(config, i, dtype) for i in range(config.num_hidden_layers)
        )
        self.norm = norm(config, dtype)

    def make_embeddings(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the embedding table that :meth:`embed` uses."""
        width, cpu = config.embedding_size, DeviceRef.CPU()
        self.embed_tokens = Embedding(config.vocab_size, width, dtype, cpu)

    def __call__(
        self, ids: jax.Array, step: Step, cached: Cached, at: jax.Array | None = None
    ) -> tuple[jax.Array, Cached]:
        """Token ids ``[B, T]``, or ``[B]`` (one for each sequence) → hidden states.

        Args:
            ids: integers ``[B, T]`` or ``[B]``.
            step: positions of the tokens.
            cached: the states of the cache by the names of its groups; empty without a cache.
            at: index ``[B]`` of the one token in each row whose state is returned; None: all tokens.

        Returns:
            Hidden states ``[B, T, E]`` (``[B, E]`` for ids ``[B]`` or with ``at``), and the cache
            with these tokens.
        """
        x, cached = self.run_layers(self.embed(ids, step), step, cached)
        if at is not None and x.ndim == 3:
            x = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        return self.output(x), cached

    def output(self, x: jax.Array) -> jax.Array:
        """Hidden states after the last layer → hidden states for the head."""
        return self.norm(x)

    def run_layers(self, x: Any, step: Step, cached: Cached) -> tuple[Any, Cached]:
        """Runs all layers in order; returns the hidden states after the last one, and the cache."""
        carry = (x, cached)
        if isinstance(self.layers, LayerStack):
            carry = self.layers.scan(carry, index="layer", step=step)
        else:
            for i, layer in enumerate(self.layers):
                # The barrier hides the number from XLA, which would otherwise compile each layer's
                # kernels anew, and could turn writes to one layer of the cache into copies.
                carry = layer(carry, step=step, layer=jax.lax.optimization_barrier(jnp.int32(i)))
        return carry

    def embed(self, ids: jax.Array, step: Step) -> jax.Array:
        """The token embeddings that enter the first layer, ``[B, T, E]`` or ``[B, E]``."""
        x = self.embed_tokens(ids).astype(self.dtype.np)
        if self.embedding_scale != 1.0:
            x = x * jnp.asarray(self.embedding_scale, x.dtype)
        return x


class Decoder(LanguageModel):
    """A decoder-only language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Attributes:
        model: the model without its head.
        lm_head: linear layer that computes the logits; it shares the embedding's weight if the two
            are tied.

    Example:
        >>> config = DecoderConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = Decoder(config)
        >>> ids = jnp.zeros((3, 5), jnp.int32)
        >>> jax.eval_shape(lambda m, ids: m(ids), model, ids).shape
        (3, 5, 100)
        >>> call = lambda m, ids: m(ids, m.cache(3, 16), last=True)
        >>> logits, cache = jax.eval_shape(call, model, ids)
        >>> logits.shape, cache.keys.shape
        ((3, 100), (2, 3, 2, 16, 4))
    """

    layer_class: ClassVar[Any] = DecoderLayer
    model_class: ClassVar[Any] = DecoderModel

    def __init__(self, config: DecoderConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = self.model_class(config, self.dtype, self.layer_class)
        self.lm_head = self.make_head(
            config.embedding_size, tied=config.tie_word_embeddings, has_bias=config.head_bias
        )
        if stacked:
            self.stack()

    def hidden_states(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """:meth:`LanguageModel.hidden_states`, by the layers' hooks."""
        context, config = cache.context, self.config
        step = Step(
            context.starts,
            context.counts,
            {},
            context.tokens,
            context.numbers,  # type: ignore[arg-type]
        )
        ropes = {"global": config.rope, "local": config.local_rope}
        rotations = {
            name: rope.cos_sin(context.rows_of_positions, context.text_lengths, width)
            for (name, rope), width in zip(ropes.items(), config.rope_widths, strict=True)
            if rope is not None
        }
        if config.query_scaling is not None:
            factors = config.query_scaling.factors(context.rows_of_positions)
            step = step._replace(query_scales=factors)
        x, cached = self.model(ids, step._replace(rotations=rotations), cache.states, None)
        return x, cache.at(0, cached)

    def logits(self, x: jax.Array) -> jax.Array:
        """:meth:`LanguageModel.logits`, with the factor and the cap of the configuration."""
        logits = super().logits(x)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


# The family of models that are made in code; no checkpoint names it.
Decoder.family = Family("decoder", ("Decoder",), DecoderConfig, Decoder.of_checkpoint)
