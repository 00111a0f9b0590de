"""TransformerBlock: attention and a feed-forward network, each with a residual connection."""

from __future__ import annotations

from typing import Any

from ...absent import absent as _absent
from ..layer import Module
from .outputs import LogitsPostprocessMixin as LogitsPostprocessMixin
from .outputs import ReturnHiddenStates as ReturnHiddenStates
from .outputs import ReturnLogits as ReturnLogits
from .outputs import captures_by_device as captures_by_device
from .outputs import extract_hs as extract_hs
from .outputs import fuse_captured_hidden_states as fuse_captured_hidden_states
from .outputs import logits_postprocess as logits_postprocess
from .sequence import forward_sequential_layers as forward_sequential_layers
from .sequence import forward_sharded_layers as forward_sharded_layers


class TransformerBlock(Module):
    """``h = x + m · attention(norm(x))``, then ``h + m · mlp(norm(h))``.

    Args (in MAX's order):
        attention: layer that is called with the normalised input and the block's further arguments.
        mlp: layer that is called with one argument.
        attention_norm, mlp_norm: layers applied before each of them.
        residual_multiplier: factor m (used by Granite).

    Attributes:
        self_attn, mlp, input_layernorm, post_attention_layernorm: four layers, under their
            names in Hugging Face's checkpoints.

    Example:
        >>> from maxjax.nn.identity import Identity
        >>> block = TransformerBlock(*[Identity()] * 4, residual_multiplier=0.5)
        >>> block(4.0)  # 4 + 0.5 · 4 = 6, then 6 + 0.5 · 6
        9.0
    """

    def __init__(
        self,
        attention: Any,
        mlp: Any,
        attention_norm: Any,
        mlp_norm: Any,
        residual_multiplier: float = 1.0,
    ):
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = attention_norm
        self.post_attention_layernorm = mlp_norm
        self.residual_multiplier = residual_multiplier

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``[..., T, E]`` → the same shape; further arguments go to the attention."""
        h = x + self._scaled(self.self_attn(self.input_layernorm(x), *args, **kwargs))
        return h + self._scaled(self.mlp(self.post_attention_layernorm(h)))

    def _scaled(self, y: Any) -> Any:
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier


__getattr__ = _absent(__name__)
