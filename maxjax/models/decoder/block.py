"""One layer of a decoder: attention and MLP, each with a residual connection.

It also has the attention of decoders that embed texts, where each token attends to the tokens before and after it.

Shapes: B sequences, T tokens, hidden size E, inner features F.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from ...dtype import DType
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...nn.attention.both_ways import both_ways
from ...nn.layer import Module
from ...nn.linear import MLP
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
        return MLP(
            dtype, None, config.hidden_size, config.intermediate_size, [DeviceRef.CPU()],
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
