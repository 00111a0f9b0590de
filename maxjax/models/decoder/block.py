"""One layer of a decoder: attention and MLP, each with a residual connection.

Shapes: B sequences, T tokens, hidden size E.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from ...dtype import DType
from ...graph.device import DeviceRef
from ...nn.layer import Module
from ...nn.linear import MLP
from .attention import Cached, DecoderAttention, Step
from .both_ways import BothWays
from .config import DecoderConfig
from .mlp import GatedMLP, PlainMLP
from .norm import norm


class DecoderLayer(Module):
    """``h = x + attention(norm(x))``, then ``h + mlp(norm(h))``.

    Args:
        config: settings of the decoder.
        number: index of the layer. Layers whose attributes depend on it are not equal, and are
            compiled separately.
        dtype: dtype of the weights.

    Attributes:
        self_attn, mlp, input_layernorm, post_attention_layernorm: named as in Hugging Face's files.
        pre_feedforward_layernorm, post_feedforward_layernorm: present if ``config.post_norms``;
            then ``post_attention_layernorm`` is applied to the attention's result, before the sum.
    """

    attention_class: ClassVar[Any] = DecoderAttention
    # Names of the MLP's linear layers, if they are not gate_proj, up_proj and down_proj: three, or
    # two of an MLP without a gate.
    mlp_names: ClassVar[tuple[str, ...]] = ()
    _mx_carries = True

    def __init__(self, config: DecoderConfig, number: int, dtype: DType):
        super().__init__()
        config = config.of_layer(number)
        self.make_mixer(config, number, dtype)
        self.mlp = self.make_mlp(config, number, dtype)
        self.residual_scale = config.residual_scale
        self.make_norms(config, dtype)

    def make_mixer(self, config: DecoderConfig, number: int, dtype: DType) -> None:
        """Makes the attention, or what the layer has in its place, that :meth:`mixed` uses."""
        kind = self.attention_class if config.is_causal else BothWays
        self.self_attn = kind(config, config.slides[number], dtype)
        if config.rotates and not config.rotates[number]:
            self.self_attn.rope = "none"

    def mixed(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """What the tokens get from those before, and the cache with them."""
        return self.self_attn(x, step, cached, layer)

    def make_mlp(self, config: DecoderConfig, number: int, dtype: DType) -> Any:
        """The layer's MLP, which maps ``[..., E]`` to the same shape."""
        names, sizes = self.mlp_names, (config.hidden_size, config.intermediate_size)
        if names:
            kind: Any = PlainMLP if len(names) == 2 else GatedMLP
            return kind(names, *sizes, dtype, config.hidden_act, config.mlp_bias)
        return MLP(
            dtype, None, *sizes, [DeviceRef.CPU()],
            has_bias=config.mlp_bias, activation_function=config.hidden_act,
        )  # fmt: skip

    def make_norms(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the norms that :meth:`__call__` uses."""
        self.input_layernorm = norm(config, dtype)
        self.post_attention_layernorm = norm(config, dtype)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.pre_feedforward_layernorm = norm(config, dtype)
            self.post_feedforward_layernorm = norm(config, dtype)

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The residual sum of hidden states and what attention or MLP adds to them."""
        y = y.astype(x.dtype)
        return x + (y if self.residual_scale == 1.0 else y * self.residual_scale)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        y, cached = self.mixed(self.input_layernorm(x), step, cached, layer)
        if not self.post_norms:
            x = self.added(x, y)
            return self.added(x, self.mlp(self.post_attention_layernorm(x))), cached
        x = self.added(x, self.post_attention_layernorm(y))
        return self.added(x, self.post_feedforward_layernorm(self.fed(x))), cached

    def fed(self, x: jax.Array) -> jax.Array:
        """What the MLP makes of hidden states, before the norm that follows it."""
        return self.mlp(self.pre_feedforward_layernorm(x)).astype(x.dtype)


class PostNormLayer(DecoderLayer):
    """``h = x + norm(attention(x))``, then ``h + norm(mlp(h))`` (OLMo 2, EXAONE 4)."""

    def make_norms(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the norms after attention and after the MLP."""
        self.post_attention_layernorm = norm(config, dtype)
        self.post_feedforward_layernorm = norm(config, dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        y, cached = self.self_attn(x, step, cached, layer)
        x = self.added(x, self.post_attention_layernorm(y))
        y = self.mlp(x).astype(x.dtype)
        return self.added(x, self.post_feedforward_layernorm(y)), cached


class ParallelLayer(DecoderLayer):
    """``x + attention(norm(x)) + mlp(norm(x))`` (GPT-J, Cohere): attention and MLP in parallel.

    Attributes:
        norms: number of norms: with 2 the MLP has its own, ``post_attention_layernorm`` (GPT-NeoX).
    """

    norms: ClassVar[int] = 1

    def make_norms(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the norm of both, or one of each."""
        self.input_layernorm = norm(config, dtype)
        if self.norms == 2:
            self.post_attention_layernorm = norm(config, dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        h = self.input_layernorm(x)
        y, cached = self.self_attn(h, step, cached, layer)
        h = self.post_attention_layernorm(x) if self.norms == 2 else h
        return self.added(self.added(x, y), self.mlp(h)), cached
