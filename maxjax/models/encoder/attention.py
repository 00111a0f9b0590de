"""Self-attention of an encoder: each token attends to every other one, or to those in a window around it.

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
from ...nn.attention.tapped_attention import tapped_attention
from ...nn.layer import Module, is_tapped
from ...nn.linear import Linear, linear_rules, linears
from ...nn.norm import LayerNorm
from ...nn.rotary_embedding import rotate
from .config import EncoderConfig

# Texts of so many windows and more are cut into blocks, each of which sees its neighbours only.
_BLOCKS = 4


class Types(NamedTuple):
    """The dtype of weights, and the dtype in which norms and softmax are computed.

    The weights of norms are stored in the wider of the two: they are small, and rounding
    them to bfloat16 costs more accuracy than rounding all others together.
    """

    dtype: DType
    reduce: DType

    def linear(self, in_dim: int, out_dim: int, has_bias: bool = True) -> Linear:
        """A linear layer."""
        return Linear(in_dim, out_dim, self.dtype, DeviceRef.CPU(), has_bias=has_bias)

    def norm(self, config: EncoderConfig, has_bias: bool = True) -> LayerNorm:
        """A LayerNorm over the hidden size."""
        return LayerNorm(
            config.hidden_size, [DeviceRef.CPU()], promote(self.dtype, self.reduce),
            config.layer_norm_eps, has_bias, compute_dtype=self.reduce,
        )  # fmt: skip


class TokenInputs(NamedTuple):
    """What every layer needs to know about the tokens of one call.

    Attributes:
        mask: bools ``[B, T]``, which tokens are real, or ``[B, T, T]``, which key (axis 2) a query
            sees; None: all.
        rotations: (cos, sin) of each token's angles ``[B or 1, T, D/2]``, by the kind of RoPE.
        bias: numbers added to the scores, ``[1, H, T, T]``; None: none.
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
        output_bias: whether the output projection has one; by default as they have.
        window: distance up to which a token sees others; None: it sees all.
        rope: name of the RoPE in ``Tokens.rotations``; None: none.

    Attributes:
        names: attribute names of the linear layers: of queries, keys, values and output, or of one layer
            of queries, keys and values in turn, and of the output.
    """

    names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(
        self,
        config: EncoderConfig,
        types: Types,
        *,
        has_bias: bool = True,
        output_bias: bool | None = None,
        window: int | None = None,
        rope: str | None = None,
    ):
        super().__init__()
        size, inputs = config.hidden_size, self.names[:-1]
        self.num_heads, self.softmax_dtype = config.num_heads, types.reduce
        self.window, self.rope = window, rope
        for name in inputs:
            setattr(self, name, types.linear(size, size * 3 // len(inputs), has_bias))
        bias = has_bias if output_bias is None else output_bias
        setattr(self, self.names[-1], types.linear(size, size, bias))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads, and the output's columns alike."""
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


def both_ways(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    window: int | None = None,
    **options: Any,
) -> jax.Array:
    """Attention to the tokens before and after each one, or to those at most ``window`` away.

    Args:
        q, k, v: ``[B, T, H, D]``; keys and values may have fewer heads.
        mask: as in ``Tokens``.
        window: distance up to which a token sees others; None: it sees all.
        options: as for ``kernels.attention.attention``.

    Returns:
        ``[B, T, H, D]``. With a window, memory is linear in the number of tokens.

    Example:
        >>> x = jnp.ones((1, 9, 2, 4))
        >>> both_ways(x, x, x, window=1).shape
        (1, 9, 2, 4)
    """
    length = q.shape[1]
    if window is None or window >= length:
        return tapped_attention(q, k, v, mask, **options)
    has_blocks = (mask is None or mask.ndim == 2) and options.get("bias") is None
    if window and length > _BLOCKS * window and has_blocks and not is_tapped("weights"):
        return _in_blocks(q, k, v, mask, window, options)
    at = jnp.arange(length, dtype=jnp.int32)
    near = (jnp.abs(at[:, None] - at[None, :]) <= window)[None]  # [1, T, T]
    if mask is not None:
        near = near & (mask[:, None, :] if mask.ndim == 2 else mask)
    return tapped_attention(q, k, v, near[:, None], **options)


def _in_blocks(q: Any, k: Any, v: Any, mask: Any, window: int, options: dict[str, Any]) -> Any:
    """Attention to tokens at most ``window`` away, in memory that is linear in the number of tokens.

    The tokens are cut into blocks as long as the window, so that each sees its own block and the two beside it.
    """
    batch, length = q.shape[:2]
    count = -(-length // window)
    real = jnp.ones((1, length), bool) if mask is None else mask

    def blocks(a: jax.Array) -> jax.Array:
        """``[B, T, …]`` → ``[B, blocks, window, …]``."""
        pads = [(0, 0), (0, count * window - length), *[(0, 0)] * (a.ndim - 2)]
        return jnp.pad(a, pads).reshape(a.shape[0], count, window, *a.shape[2:])

    def around(a: jax.Array) -> jax.Array:
        """Each block with the one before and the one after it."""
        ends = jnp.pad(a, [(0, 0), (1, 1), *[(0, 0)] * (a.ndim - 2)])
        return jnp.concatenate([ends[:, :-2], a, ends[:, 2:]], axis=2)

    places = jnp.arange(3 * window, dtype=jnp.int32)
    near = jnp.abs(places[None, :] - window - places[:window, None]) <= window
    seen = near[None, None] & around(blocks(real))[:, :, None, :]
    seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:]))
    keys, values = (around(blocks(a)).reshape(-1, 3 * window, *a.shape[2:]) for a in (k, v))
    queries = blocks(q).reshape(-1, window, *q.shape[2:])
    y = tapped_attention(queries, keys, values, seen.reshape(-1, window, 3 * window), **options)
    return y.reshape(batch, count * window, *q.shape[2:])[:, :length]
