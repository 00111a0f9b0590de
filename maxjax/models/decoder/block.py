"""One layer of a decoder: attention and MLP, each with a residual connection.

It also has the MLPs other than ``nn.MLP`` (with other names, with one weight for gate and up, without a gate),
and the attention of decoders that embed texts, where each token attends to the tokens before and after it.

Shapes: B sequences, T tokens, hidden size E, inner features F.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from ...dtype import DType
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.activation import activation
from ...nn.attention.both_ways import both_ways
from ...nn.layer import Module
from ...nn.linear import MLP, Linear, gated, linear_rules, linears
from ...nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .attention import Cached, DecoderAttention, Step
from .config import DecoderConfig
from .norm import norm


class BothWays(DecoderAttention):
    """Bidirectional attention, for embedding texts: a token attends to those before and after it. There is no cache.

    Args:
        config, slides, dtype: as for :class:`DecoderAttention`.
        reach: number of tokens on each side that a token attends to in a sliding layer; the window by default.
    """

    def __init__(self, config: DecoderConfig, slides: bool, dtype: DType, reach: int | None = None):
        super().__init__(config, slides, dtype)
        window = self.sliding_window
        self.reach = None if window is None else window if reach is None else reach

    def __call__(self, x: Any, step: Step, cached: Cached, layer: Any) -> tuple[Any, Cached]:
        """:meth:`DecoderAttention.__call__` without a cache.

        Raises:
            UserInputError: there is a cache.
        """
        if cached:
            raise UserInputError(
                "this model's attention is bidirectional ('is_causal' is false, or 'use_bidirectional_attention'): "
                "it can embed texts (maxjax.embed), but not generate them"
            )
        q, k, v = self.project(x)
        q, k = self._rotated(step, q, k)
        y = both_ways(
            q, k, v, step.real(x.shape[1]), self.reach,
            scale=self.scale, soft_cap=self.soft_cap, softmax_dtype=self.softmax_dtype,
        )  # fmt: skip
        return self.o_proj(y.reshape(*x.shape[:-1], -1)).astype(x.dtype), cached


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
    # Names of the MLP's linear layers, if they are not gate_proj, up_proj and down_proj: three names, or
    # two for an MLP without a gate.
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
        """Makes the attention, or the layer's replacement for it, that :meth:`mixed` calls."""
        kind = self.attention_class if config.is_causal else BothWays
        self.self_attn = kind(config, config.slides[number], dtype)
        if config.rotates and not config.rotates[number]:
            self.self_attn.rope = "none"

    def mixed(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """The result of attention or of its replacement, and the cache with these tokens."""
        return self.self_attn(x, step, cached, layer)

    def make_mlp(self, config: DecoderConfig, number: int, dtype: DType) -> Any:
        """The layer's MLP, which maps ``[..., E]`` to the same shape."""
        names, sizes = self.mlp_names, (config.hidden_size, config.intermediate_size)
        if names:
            kind = PlainMLP if len(names) == 2 else GatedMLP
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
        """The residual sum of hidden states ``x`` and the result ``y`` of attention or MLP."""
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
        """The MLP's result for hidden states, before the norm that follows the MLP."""
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
        norms: number of norms: with 2 the MLP has its own norm, ``post_attention_layernorm`` (GPT-NeoX).
    """

    norms: ClassVar[int] = 1

    def make_norms(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes one norm for both attention and MLP, or one for each."""
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


class FusedMLP(Module):
    """``down_proj(activation(gate) · up)``, where ``gate_up_proj`` computes gate and up (Phi-3, GLM-4).

    Args:
        hidden_dim, feed_forward_length: E and F.
        dtype: dtype of the weights.
        activation_function: name of the activation function.
        has_bias: whether both linear layers have a bias.

    Example:
        >>> [(name, *map(int, w.shape)) for name, w in FusedMLP(4, 6).raw_state_dict().items()]
        [('gate_up_proj.weight', 12, 4), ('down_proj.weight', 4, 6)]
    """

    def __init__(
        self, hidden_dim: int, feed_forward_length: int, dtype: Any = DType.float32,
        activation_function: str = "silu", has_bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.activation_function, self.sizes = activation_function, (feed_forward_length,) * 2
        self.gate_up_proj: Any = StackedLinear(
            hidden_dim, self.sizes, ["gate", "up"], dtype, stacked=True, has_bias=has_bias
        )
        self.down_proj = Linear(feed_forward_length, hidden_dim, dtype, has_bias=has_bias)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of gate, up and down."""
        segments = [Segment.even(size) for size in self.sizes]
        return stacked_rules("gate_up_proj", self.gate_up_proj, segments) | linear_rules(
            "down_proj", ShardingStrategy.columnwise(1)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        gate, up = split_projections(self.gate_up_proj, x, self.sizes)  # [..., F]
        return self.down_proj(gated(gate, up, self.activation_function, 0.0))


class NamedMLP(Module):
    """The linear layers of an MLP, with the attribute names of the checkpoint; the last one is "down".

    The arguments are those of :class:`GatedMLP` and :class:`PlainMLP`.
    """

    def __init__(
        self, names: tuple[str, ...], hidden_dim: int, feed_forward_length: int,
        dtype: Any = DType.float32, activation_function: str = "silu", has_bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.names, self.activation_function = tuple(names), activation_function
        sizes = (hidden_dim, feed_forward_length)
        for name in names:
            in_dim, out_dim = sizes if name != names[-1] else sizes[::-1]
            setattr(self, name, Linear(in_dim, out_dim, dtype, DeviceRef.CPU(), has_bias))

    @property
    def layers(self) -> list[Any]:
        """The linear layers, in the order of ``names``."""
        return [getattr(self, name) for name in self.names]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        *inputs, down = self.names
        rules = linear_rules(down, ShardingStrategy.columnwise(1))
        for name in inputs:
            rules |= linear_rules(name, ShardingStrategy.rowwise(1))
        return rules


class GatedMLP(NamedMLP):
    """``down(activation(gate(x)) · up(x))``: an ``nn.MLP`` with other attribute names.

    Args:
        names: attribute names of gate, up and down, as in the checkpoint.
        hidden_dim, feed_forward_length: E and F.
        dtype: dtype of the weights.
        activation_function: name of the activation function.
        has_bias: whether the linear layers have a bias.

    Example:
        >>> list(GatedMLP(("w1", "w3", "w2"), 4, 6).raw_state_dict())
        ['w1.weight', 'w3.weight', 'w2.weight']
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        *inputs, down = self.layers
        gate, up = linears(inputs, x)  # [..., F]
        return down(gated(gate, up, self.activation_function, 0.0))


class PlainMLP(NamedMLP):
    """``down(activation(up(x)))``: an MLP without a gate.

    Args:
        names: attribute names of the two linear layers, as in the checkpoint.
        hidden_dim, feed_forward_length: E and F.
        dtype: dtype of the weights.
        activation_function: name of the activation function.
        has_bias: whether both linear layers have a bias.

    Example:
        >>> list(PlainMLP(("fc1", "fc2"), 4, 6, has_bias=True).raw_state_dict())
        ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias']
    """

    def __init__(
        self, names: tuple[str, ...], hidden_dim: int, feed_forward_length: int,
        dtype: Any = DType.float32, activation_function: str = "gelu", has_bias: bool = False,
    ):  # fmt: skip
        super().__init__(
            names, hidden_dim, feed_forward_length, dtype, activation_function, has_bias
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        up, down = self.layers
        return down(self.activated(up(x)))

    def activated(self, x: jax.Array) -> jax.Array:
        """Applies the activation function between the two linear layers, ``[..., F]`` → the same shape."""
        return activation(self.activation_function)(x)
