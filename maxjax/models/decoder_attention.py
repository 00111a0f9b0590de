"""Floor 5. Attention of a decoder, with and without a cache of keys and values.

Three ways lead through it: all tokens of a text at once, more tokens of texts that are in the
cache (prefill, also in chunks), and one token of each (a decode step, ``kernels.decode_attention``).
Below: ``nn.attention``, ``kernels``. Above: the layers of decoders.

Shapes: L layers, B sequences, T tokens, H heads of queries and K of keys, S slots, width D,
hidden size E.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..dtype import DType, promote
from ..graph.device import DeviceRef
from ..graph.placement import parts
from ..graph.sharding import Segment, ShardingStrategy
from ..kernels import decode_attention, explicit
from ..nn.attention import attention
from ..nn.layer import Module
from ..nn.linear import Linear, linear_rules, linears
from ..nn.norm import RMSNorm
from ..nn.rotary_embedding import rotate
from .decoder_config import DecoderConfig

# Keys and values of all layers, [L, B, K, S, D] each; or nothing, where there is no cache.
Cached = tuple[jax.Array, ...]

# Prefill looks at T slots of the cache, or so many times as many, or at all.
_STEP, _STEPS = 4, 3


class Step(NamedTuple):
    """What all layers of one call are told about its tokens.

    Attributes:
        starts: ``[B]``, or ``[1]`` for all: the position of the first.
        counts: ``[B]``: how many of a row are real, the rest is padding; None: all are.
        longest: The largest of the starts.
        turns: (cos, sin) of each token's angles ``[B or 1, T, D/2]``, by the kind of rope.
    """

    starts: jax.Array
    counts: jax.Array | None
    longest: jax.Array
    turns: dict[str, tuple[jax.Array, jax.Array]]

    def positions(self, length: int) -> jax.Array:
        """``[B or 1, T]``."""
        return self.starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]

    def real(self, length: int) -> jax.Array | None:
        """``[B, T]``: which are no padding; None: all."""
        if self.counts is None:
            return None
        return jnp.arange(length, dtype=jnp.int32)[None, :] < self.counts[:, None]


class DecoderAttention(Module):
    """Self-attention over rotated queries and keys, by the settings of a DecoderConfig.

    Args:
        config: The settings.
        slides: Whether it looks back through ``config.sliding_window``.
        dtype: Of the weights.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: The projections.
        q_norm, k_norm: Norms of each head, if ``config.qk_norm``.
    """

    def __init__(self, config: DecoderConfig, slides: bool, dtype: DType):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads, config.kv_heads, config.width
        )  # fmt: skip
        self.scale, self.soft_cap = config.query_scale, config.attn_soft_cap
        self.sliding_window = config.sliding_window if slides else None
        self.rope = "local" if slides and config.local_rope is not None else "global"
        self.softmax_dtype = promote(dtype, DType.float32)
        size, width, bias = config.hidden_size, config.width, config.attention_bias

        def linear(in_dim: int, out_dim: int, has_bias: bool) -> Linear:
            return Linear(in_dim, out_dim, dtype, DeviceRef.CPU(), has_bias=has_bias)

        self.q_proj = linear(size, self.num_heads * width, bias)
        self.k_proj = linear(size, self.num_kv_heads * width, bias)
        self.v_proj = linear(size, self.num_kv_heads * width, bias)
        self.o_proj = linear(self.num_heads * width, size, bool(config.output_bias))
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    width, dtype, config.rms_norm_eps, config.norm_offset,
                    multiply_before_cast=bool(config.norm_offset),
                )
                for _ in range(2)
            )  # fmt: skip

    def sharding_rules(self) -> dict[str, Any]:
        """By whole heads; the columns of ``o_proj`` as the heads of the queries."""
        width = self.head_dim
        rules = linear_rules(
            "o_proj", ShardingStrategy.head_aware_columnwise(1, self.num_heads, width)
        )
        for name, heads in (
            ("q_proj", self.num_heads), ("k_proj", self.num_kv_heads), ("v_proj", self.num_kv_heads)
        ):  # fmt: skip
            segment = Segment.head_aware(heads, width)
            rules |= linear_rules(name, ShardingStrategy.segmented(1, 0, [segment]))
        return rules

    def __call__(
        self, x: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """``[B, T, E]``, or one token of each sequence ``[B, E]`` → the same shape.

        Args:
            step: Where the tokens are.
            cached: The cache, or ``()``.
            layer: Which layer of the cache is this one's.

        Returns:
            The result, and the cache with these tokens.
        """
        q, k, v = self._projected(x)
        if x.ndim == 2:
            y, cached = self._decoded(q, k, v, step, cached, layer)
        else:
            cos, sin = step.turns[self.rope]
            q, k = (rotate(a, cos, sin, interleaved=False) for a in (q, k))
            if cached:
                y, cached = self._prefilled(q, k, v, step, cached, layer)
            else:
                y = self._attend(q, k, v, step.positions(x.shape[1]))
        y = y.reshape(*x.shape[:-1], self.num_heads * self.head_dim)
        return self.o_proj(y).astype(x.dtype), cached

    def _projected(self, x: jax.Array) -> list[jax.Array]:
        """Queries ``[..., H, D]``, keys and values ``[..., K, D]``."""
        q, k, v = (
            y.astype(x.dtype).reshape(*y.shape[:-1], y.shape[-1] // self.head_dim, self.head_dim)
            for y in linears([self.q_proj, self.k_proj, self.v_proj], x)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return [q, k, v]

    def _decoded(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        starts = step.starts
        if step.counts is not None:  # of rows without a token nothing is written
            starts = jnp.where(step.counts > 0, starts, -1)
        if self.num_kv_heads % parts(self.o_proj.weight, 1):
            q = placed(q, 1, ())  # the cache is whole on every device
        cos, sin = (a[:, 0] for a in step.turns[self.rope])  # [B, D/2]
        keys, values = cached
        y, keys, values = decode_attention(
            q, k, v, keys, values, starts, layer=layer, rope=(cos, sin), scale=self.scale,
            sliding_window=self.sliding_window, soft_cap=self.soft_cap,
        )  # fmt: skip
        return y, (keys, values)

    def _prefilled(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, cached: Cached, layer: Any
    ) -> tuple[jax.Array, Cached]:
        length, slots = q.shape[1], cached[0].shape[-2]
        positions, real = step.positions(length), step.real(length)
        place = positions if real is None else jnp.where(real, positions, slots)
        keys, values = (
            _written(whole, new, layer, place) for whole, new in zip(cached, (k, v), strict=True)
        )

        def attend(seen: int) -> jax.Array:
            k, v = (_first(whole, layer, seen).astype(q.dtype) for whole in (keys, values))
            return self._attend(q, k, v, positions)

        # What is empty is not looked at, in steps, each of which is compiled.
        sizes = [n for n in (length * _STEP**i for i in range(_STEPS)) if n < slots]
        branches = [functools.partial(attend, n) for n in (*sizes, slots)]
        needed = step.longest + length
        which = sum((needed > n).astype(jnp.int32) for n in sizes)
        y = jax.lax.switch(which, branches) if sizes else attend(slots)
        return y, (keys, values)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        """Queries at positions ``[B or 1, T]`` look at keys at 0, 1, 2, …, none ahead of them."""
        back = positions[:, :, None] - jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
        sees = back >= 0
        if self.sliding_window is not None:
            sees = sees & (back < self.sliding_window)
        if self.num_kv_heads % parts(self.o_proj.weight, 1):
            # Too few heads of keys to split: every device has all, and takes those of its queries.
            k, v = (jnp.repeat(a, self.num_heads // self.num_kv_heads, axis=2) for a in (k, v))
        options = {} if self.soft_cap is None else {"soft_cap": self.soft_cap}
        return attention(
            q, k, v, sees[:, None], scale=self.scale, softmax_dtype=self.softmax_dtype, **options
        )


def _first(whole: jax.Array, layer: Any, seen: int) -> jax.Array:
    """The first slots of one layer of the cache, ``[B, seen, K, D]``."""
    _, batch, heads, _, width = whole.shape
    part = jax.lax.dynamic_slice(
        whole, (layer, 0, 0, 0, 0), (1, batch, heads, seen, width), allow_negative_indices=False
    )
    return part[0].swapaxes(1, 2)


def placed(array: jax.Array, axis: int, over: explicit.Entry) -> jax.Array:
    """On a mesh with Explicit axes: with one axis split over these; elsewhere XLA sees to it."""
    mesh = explicit.mesh_of(array)
    if mesh is None:
        return array
    wanted = explicit.entries(array)
    wanted[axis] = over
    return jax.sharding.reshard(array, explicit.sharding(mesh, wanted))


def _written(whole: jax.Array, new: jax.Array, layer: Any, place: jax.Array) -> jax.Array:
    """The cache with ``new`` ``[B, T, K, D]`` in the slots ``place`` ``[B, T]``; beyond S: nowhere."""

    def run(whole: jax.Array, new: jax.Array, layer: Any, place: jax.Array) -> jax.Array:
        rows = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]
        return whole.at[layer, rows, :, place].set(new.astype(whole.dtype), mode="drop")

    layer = jnp.asarray(layer, jnp.int32)
    mesh = explicit.mesh_of(whole, new)
    if mesh is not None:
        run = explicit.automatic(run, mesh, explicit.entries(whole))
    return run(whole, new, layer, place)
