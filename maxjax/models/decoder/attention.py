"""Attention of a decoder, with and without a cache of keys and values.

Three ways lead through it: all tokens of a text at once, more tokens of texts that are in the
cache (prefill, also in chunks), and one token of each (a decode step, ``kernels.decode_attention``).
Layers that slide have a cache of their own, which goes round.

Shapes: L layers, B sequences, T tokens, H heads of queries and K of keys, S slots, width D,
hidden size E.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ...dtype import DType, promote
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.specs import axis_of, parts, split_over
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...kernels import decode_attention, explicit
from ...nn.attention import attention
from ...nn.kv_cache.slots import Slots
from ...nn.layer import Module
from ...nn.linear import Linear, linear_rules, linears
from ...nn.norm import RMSNorm
from ...nn.rotary_embedding import rotate
from .config import DecoderConfig

# Those of layers that see all tokens, and of layers that slide, as in a KVCache; or nothing,
# where there is no cache.
Cached = tuple[Slots | None, ...]

# Prefill looks at T slots of the cache, or so many times as many, or at all.
_STEP, _STEPS = 4, 3

# What a layer's ``rope`` may be.
_ROPES = ("global", "local", "none")
# A position that no token sees.
_NOWHERE = 2**31 - 1


class Step(NamedTuple):
    """What all layers of one call are told about its tokens.

    Attributes:
        starts: ``[B]``, or ``[1]`` for all: the position of the first.
        counts: ``[B]``: how many of a row are real, the rest is padding; None: all are.
        longest: The largest of the starts.
        turns: (cos, sin) of each token's angles ``[B or 1, T, D/2]``, by the kind of rope.
        tokens: Of a decode step, ``[B]``: the starts, -1 for rows without a token.
        numbers: ``[L]``: of each layer, which of its part of the cache it is; None: the same.
    """

    starts: jax.Array
    counts: jax.Array | None
    longest: jax.Array
    turns: dict[str, tuple[jax.Array, jax.Array]]
    tokens: jax.Array | None = None
    numbers: jax.Array | None = None

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

    A family whose queries, keys and values come from elsewhere overrides :meth:`make_projections`
    and :meth:`project`; all else, the cache among it, goes on from these.

    Args:
        config: The settings.
        slides: Whether it looks back through ``config.sliding_window``.
        dtype: Of the weights.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: The projections.
        q_norm, k_norm: Norms of each head, if ``config.qk_norm``.
        num_heads, num_kv_heads, head_dim: H, K and D.
        scale, soft_cap: What scores are multiplied by, and capped at.
        sliding_window: How far it looks back, or None.
        rope: How queries and keys are turned: "global" by the rope of the settings, "local" by
            ``config.local_rope``, "none" not at all.
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
        self.q_norm = self.k_norm = None
        self.make_projections(config, dtype)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_projected" in vars(cls) and "project" not in vars(cls):
            cls.project = vars(cls)["_projected"]  # what it was called once

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes what :meth:`project` needs, and ``o_proj``, which comes after the attention."""
        size, width, bias = config.hidden_size, config.width, config.attention_bias

        def linear(in_dim: int, out_dim: int, has_bias: bool) -> Linear:
            return Linear(in_dim, out_dim, dtype, DeviceRef.CPU(), has_bias=has_bias)

        self.q_proj = linear(size, self.num_heads * width, bias)
        self.k_proj = linear(size, self.num_kv_heads * width, bias)
        self.v_proj = linear(size, self.num_kv_heads * width, bias)
        self.o_proj = linear(self.num_heads * width, size, bool(config.output_bias))
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    width, dtype, config.rms_norm_eps, config.norm_offset,
                    multiply_before_cast=bool(config.norm_offset),
                )
                for _ in range(2)
            )  # fmt: skip

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """``[..., E]`` → queries ``[..., H, D]``, keys and values ``[..., K, D]``, not turned yet."""
        q, k, v = (
            y.astype(x.dtype).reshape(*y.shape[:-1], y.shape[-1] // self.head_dim, self.head_dim)
            for y in linears([self.q_proj, self.k_proj, self.v_proj], x)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return [q, k, v]

    def head_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that the heads of keys, and so those of a cache, are split over.

        They are those of the columns of ``o_proj``, if they divide the heads.
        """
        return self._axes_of(self.o_proj.weight, 1)

    def _axes_of(self, weight: Any, axis: int) -> tuple[str, ...]:
        where = weight.sharding
        if not isinstance(where, NamedSharding):
            return ()
        fsdp = axis_of(where.mesh, "fsdp")  # what a weight is gathered over splits no heads
        over = tuple(name for name in split_over(weight, axis) if name != fsdp)
        count = math.prod(where.mesh.shape[name] for name in over)
        return () if self.num_kv_heads % count else over

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
        if self.rope not in _ROPES:
            raise UserInputError(f"rope = {self.rope!r} is none of {', '.join(map(repr, _ROPES))}")
        q, k, v = self.project(x)
        turns = step.turns.get(self.rope)
        part = int(self._rotates(cached))
        if cached and step.numbers is not None:
            layer = jax.lax.dynamic_index_in_dim(step.numbers, layer, keepdims=False)
        if x.ndim == 2:
            y, slots = self._decoded(q, k, v, step, cached[part], layer, bool(part))
        else:
            if turns is not None:
                q, k = (rotate(a, *turns, interleaved=False) for a in (q, k))
            if cached:
                way = self._slid if part else self._prefilled
                y, slots = way(q, k, v, step, cached[part], layer)
            else:
                places = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
                y, slots = self._attend(q, k, v, step.positions(x.shape[1]), places), None
        if cached:
            cached = (slots, cached[1]) if part == 0 else (cached[0], slots)
        y = y.reshape(*x.shape[:-1], self.num_heads * self.head_dim)
        return self.o_proj(y).astype(x.dtype), cached

    def _rotates(self, cached: Cached) -> bool:
        """Whether this layer's part of the cache is the one that goes round."""
        return bool(cached) and self.sliding_window is not None and cached[1] is not None

    def _decoded(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, slots: Any, layer: Any,
        rotating: bool,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        if self.num_kv_heads % parts(self.o_proj.weight, 1):
            q = placed(q, 1, ())  # the cache is whole on every device
        turns = step.turns.get(self.rope)
        if turns is not None:
            turns = turns[0][:, 0], turns[1][:, 0]  # [B, D/2]
        y, *new = decode_attention(
            q, k, v, slots.keys, slots.values, step.starts if step.tokens is None else step.tokens,
            layer=layer, rope=turns,
            scale=self.scale, sliding_window=self.sliding_window, soft_cap=self.soft_cap,
            rotating=rotating, scales=slots.scales,
        )  # fmt: skip
        return y, Slots(*new)

    def _prefilled(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, slots: Any, layer: Any
    ) -> tuple[jax.Array, Slots]:
        """Writes, then looks at the cache from its first slot on."""
        length, size = q.shape[1], slots.size
        positions, real = step.positions(length), step.real(length)
        place = positions if real is None else jnp.where(real, positions, size)
        slots = slots.written(layer, k, v, place)

        def attend(seen: int) -> jax.Array:
            places = jnp.arange(seen, dtype=jnp.int32)[None, :]
            keys, values = slots.read(layer, seen, q.dtype)
            return self._attend(q, keys, values, positions, places)

        # What is empty is not looked at, in steps, each of which is compiled.
        sizes = [n for n in (length * _STEP**i for i in range(_STEPS)) if n < size]
        return _chosen(attend, [*sizes, size], step.longest + length), slots

    def _slid(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, slots: Any, layer: Any
    ) -> tuple[jax.Array, Slots]:
        """Looks at what is there and at the new tokens, the last of which then go over it."""
        length, size = q.shape[1], slots.size
        positions, starts = step.positions(length), step.starts[:, None]
        old, new = slots.alone(layer), slots.rounded(k, v)  # as all later tokens see them

        def attend(seen: int) -> jax.Array:
            if not seen:
                return self._attend(q, new[0], new[1], positions, positions)
            before = old.read(0, seen, q.dtype)
            keys, values = (explicit.concatenate(pair, 1) for pair in zip(new, before, strict=True))
            places = _held(starts, size)[:, :seen]
            places = jnp.where(places < 0, _NOWHERE, places)
            places = explicit.concatenate([positions, places], 1)
            return self._attend(q, keys, values, positions, places)

        sizes = [n for n in (0, *(length * _STEP**i for i in range(1, _STEPS))) if n < size]
        y = _chosen(attend, [*sizes, size], step.longest)
        ends = starts + (length if step.counts is None else step.counts[:, None])
        return y, slots.replaced(layer, old, k, v, _held(ends, size) - starts)

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, places: jax.Array
    ) -> jax.Array:
        """Queries at positions ``[B or 1, T]`` look at keys at such places, none ahead of them."""
        back = positions[:, :, None] - places[:, None, :]
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


def _held(ends: jax.Array, size: int) -> jax.Array:
    """Of ``[B, 1]`` tokens the one in each slot, the last that goes there: ``[B, S]``; or negative."""
    last = ends - 1
    return last - (last - jnp.arange(size, dtype=jnp.int32)[None, :]) % size


def _chosen(attend: Callable[[int], jax.Array], sizes: Sequence[int], needed: Any) -> jax.Array:
    """``attend`` of the first of these sizes that is enough."""
    *less, most = sizes
    if not less:
        return attend(most)
    which = sum((needed > n).astype(jnp.int32) for n in less)
    return jax.lax.switch(which, [functools.partial(attend, n) for n in sizes])


def placed(array: jax.Array, axis: int, over: explicit.Entry) -> jax.Array:
    """On a mesh with Explicit axes: with one axis split over these; elsewhere XLA sees to it."""
    mesh = explicit.mesh_of(array)
    if mesh is None:
        return array
    wanted = explicit.entries(array)
    wanted[axis] = over
    return jax.sharding.reshard(array, explicit.sharding(mesh, wanted))
