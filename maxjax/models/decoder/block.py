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
from ...nn.norm import RMSNorm
from .attention import Cached, DecoderAttention, Step
from .config import DecoderConfig


def norm(config: DecoderConfig, dtype: DType) -> RMSNorm:
    """An RMSNorm over the hidden size. With an offset, as in Gemma, it rounds only once, at the end."""
    return RMSNorm(
        config.hidden_size, dtype, config.rms_norm_eps, config.norm_offset,
        multiply_before_cast=bool(config.norm_offset),
    )  # fmt: skip


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
        self.self_attn = self.attention_class(config, config.slides[number], dtype)
        self.mlp = self.make_mlp(config, number, dtype)
        self.input_layernorm = norm(config, dtype)
        self.post_attention_layernorm = norm(config, dtype)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.pre_feedforward_layernorm = norm(config, dtype)
            self.post_feedforward_layernorm = norm(config, dtype)

    def make_mlp(self, config: DecoderConfig, number: int, dtype: DType) -> Any:
        """The layer's MLP, which maps ``[..., E]`` to the same shape."""
        return MLP(
            dtype, None, config.hidden_size, config.intermediate_size, [DeviceRef.CPU()],
            has_bias=config.mlp_bias, activation_function=config.hidden_act,
        )  # fmt: skip

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        y, cached = self.self_attn(self.input_layernorm(x), step, cached, layer)
        if not self.post_norms:
            x = x + y
            return x + self.mlp(self.post_attention_layernorm(x)).astype(x.dtype), cached
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x)).astype(x.dtype)
        return x + self.post_feedforward_layernorm(y), cached
