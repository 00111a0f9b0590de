"""TransformerBlock: attention and a feed-forward network, each around a shortcut."""

from __future__ import annotations

from typing import Any

from ..layer import Module


class TransformerBlock(Module):
    """``h = x + m · attention(norm(x))``, then ``h + m · mlp(norm(h))``.

    Args (in MAX's order):
        attention: Called with the normalised input and whatever else the block is called with.
        mlp: Called with one argument.
        attention_norm, mlp_norm: Applied before each of them.
        residual_multiplier: The factor m (Granite has one).

    Attributes:
        self_attn, mlp, input_layernorm, post_attention_layernorm: The four layers, under the
            names they have in Hugging Face's checkpoints.

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
