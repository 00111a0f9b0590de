"""Self-attention of an encoder: each token attends to all tokens, or to those in a window around it.

Shapes: B sequences, T tokens, H heads of width D, hidden size E.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ...dtype import DType, promote
from ...graph.device import DeviceRef
from ...graph.placement.specs import Split
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.attention.both_ways import both_ways
from ...nn.layer import Module
from ...nn.linear import Linear, linear_rules, linears
from ...nn.norm import LayerNorm
from ...nn.rotary_embedding import rotate


class Types(NamedTuple):
    """The dtype of weights, and the dtype in which norms and softmax are computed.

    The weights of norms are stored in the wider of the two: they are small, and rounding
    them to bfloat16 costs more accuracy than rounding all others together.
    """

    dtype: DType
    reduce: DType

    def linear(self, in_dim: int, out_dim: int, has_bias: bool = True) -> Linear:
        """Makes a linear layer with weights in ``dtype``."""
        return Linear(in_dim, out_dim, self.dtype, DeviceRef.CPU(), has_bias=has_bias)

    def norm(self, config: Any, has_bias: bool = True, size: int | None = None) -> LayerNorm:
        """Makes a LayerNorm over ``size`` features, by default the hidden size."""
        return LayerNorm(
            size or config.hidden_size, [DeviceRef.CPU()], promote(self.dtype, self.reduce),
            config.layer_norm_eps, has_bias, compute_dtype=self.reduce,
        )  # fmt: skip


class TokenInputs(NamedTuple):
    """Masks, RoPE angles and score biases for the tokens of one call, which every layer gets.

    Attributes:
        mask: bools ``[B, T]``, which tokens are real, or ``[B, T, T]``, which keys (axis 2) a query
            (axis 1) attends to; None: all.
        rotations: (cos, sin) of each token's angles ``[B or 1, T, D/2]``, by the kind of RoPE.
        bias: bias ``[1, H, T, T]`` that is added to the scores; None: none.
    """

    mask: jax.Array | None
    rotations: dict[str, tuple[jax.Array, jax.Array]]
    bias: jax.Array | None = None


class EncoderAttention(Module):
    """Self-attention in both directions, with its output projection.

    Args:
        config: settings of the encoder.
        types: dtypes.
        has_bias: whether the projections of queries, keys and values have biases.
        output_bias: whether the output projection has a bias; by default as ``has_bias``.
        window: maximum distance of the tokens that a token attends to; None: it attends to all.
        rope: name of the RoPE in ``TokenInputs.rotations``; None: none.

    Attributes:
        names: attribute names of the linear layers: either four, of queries, keys, values and output; or
            two, of one layer that computes queries, then keys, then values, and of the output.
    """

    names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(
        self,
        config: Any,
        types: Types,
        *,
        has_bias: bool = True,
        output_bias: bool | None = None,
        window: int | None = None,
        rope: str | None = None,
    ):
        super().__init__()
        size, inputs = config.hidden_size, self.names[:-1]
        self.num_heads, self.softmax_dtype = config.num_attention_heads, types.reduce
        self.window, self.rope = window, rope
        for name in inputs:
            setattr(self, name, types.linear(size, size * 3 // len(inputs), has_bias))
        bias = has_bias if output_bias is None else output_bias
        setattr(self, self.names[-1], types.linear(size, size, bias))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections and the columns of the output projection between heads."""
        *inputs, output = self.names
        heads, width = self.num_heads, int(getattr(self, output).weight.logical_shape[0])
        segments = [Segment.head_aware(heads, width // heads)] * (3 // len(inputs))
        rows = ShardingStrategy.segmented(1, 0, segments)
        rules = linear_rules(
            output, ShardingStrategy.head_aware_columnwise(1, heads, width // heads)
        )
        for name in inputs:
            rules |= {f"{name}.weight": Split(rows), f"{name}.bias": Split(rows)}
        return rules

    def project(self, x: jax.Array) -> list[jax.Array]:
        """``[B, T, E]`` → queries, keys and values ``[B, T, H, D]``, before RoPE."""
        found = linears([getattr(self, name) for name in self.names[:-1]], x)
        parts = found if len(found) == 3 else jnp.split(found[0], 3, axis=-1)
        return [y.astype(x.dtype).reshape(*x.shape[:2], self.num_heads, -1) for y in parts]

    def __call__(self, x: jax.Array, tokens: TokenInputs) -> jax.Array:
        """``[B, T, E]`` → the same shape."""
        q, k, v = self.project(x)
        if self.rope is not None:
            angles = tokens.rotations[self.rope]
            q, k = (rotate(a, *angles, interleaved=False) for a in (q, k))
        options: dict[str, Any] = {"softmax_dtype": self.softmax_dtype}
        if tokens.bias is not None:
            options["bias"] = tokens.bias
        mixed = both_ways(q, k, v, tokens.mask, self.window, **options).reshape(x.shape)
        return getattr(self, self.names[-1])(mixed).astype(x.dtype)
