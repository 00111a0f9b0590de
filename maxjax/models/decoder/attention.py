"""Self-attention of a decoder, with and without a KV cache.

There are three cases: all tokens of a sequence at once without a cache, several tokens after those
in the cache (prefill, also in chunks), and one token per sequence (a decode step,
``kernels.decode_attention``). Sliding layers have a separate, rotating cache.

Shapes: L layers, B sequences, T tokens, H query heads, K KV heads, S slots of the cache, head width
D, hidden size E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from ...kernels.attention import NO_KEY, causal_attention
from ...nn.kv_cache.slots import Slots
from ...nn.layer import Module
from ...nn.linear import Linear, linear_rules, linears
from ...nn.norm import RMSNorm
from ...nn.rotary_embedding import rotate
from .config import DecoderConfig

# The slots of layers that see all tokens and those of sliding layers, as in a KVCache; empty
# without a cache.
Cached = tuple[Slots | None, ...]

# What a layer's ``rope`` may be.
_ROPES = ("global", "local", "none")


class Step(NamedTuple):
    """What every layer needs to know about the tokens of one call.

    Attributes:
        starts: position of each row's first token, ``[B]``, or ``[1]`` for all rows.
        counts: number of real tokens in each row, ``[B]``; the rest is padding. None: all are real.
        longest: the largest of the starts.
        rotations: (cos, sin) of each token's angles ``[B or 1, T, D/2]``, by the kind of RoPE.
        tokens: for a decode step, the starts ``[B]``, with -1 for rows without a token.
        numbers: index of each layer in its part of the cache, ``[L]``; None: the layer's own index.
    """

    starts: jax.Array
    counts: jax.Array | None
    longest: jax.Array
    rotations: dict[str, tuple[jax.Array, jax.Array]]
    tokens: jax.Array | None = None
    numbers: jax.Array | None = None

    def positions(self, length: int) -> jax.Array:
        """The positions of the tokens, ``[B or 1, T]``."""
        return self.starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]

    def real(self, length: int) -> jax.Array | None:
        """Which tokens are not padding, bools ``[B, T]``; None: all."""
        if self.counts is None:
            return None
        return jnp.arange(length, dtype=jnp.int32)[None, :] < self.counts[:, None]


class DecoderAttention(Module):
    """Self-attention with RoPE, configured by a DecoderConfig.

    A family that computes queries, keys and values differently overrides :meth:`make_projections`
    and :meth:`project`; everything else, the cache included, uses their results.

    Args:
        config: settings of the decoder.
        slides: whether the layer has the sliding window ``config.sliding_window``.
        dtype: dtype of the weights.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: linear layers of queries, keys, values and output.
        q_norm, k_norm: norms of each head, if ``config.qk_norm``.
        num_heads, num_kv_heads, head_dim: H, K and D.
        scale, soft_cap: factor and cap of the attention scores.
        sliding_window: number of tokens, itself included, that a token sees; None: all before it.
        rope: the RoPE of queries and keys: "global" for ``config.rope``, "local" for
            ``config.local_rope``, "none" for no RoPE.
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
            cls.project = vars(cls)["_projected"]  # its earlier name

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the layers that :meth:`project` uses, and ``o_proj``, the output projection."""
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
        """``[..., E]`` → queries ``[..., H, D]``, keys and values ``[..., K, D]``, before RoPE."""
        q, k, v = (
            y.astype(x.dtype).reshape(*y.shape[:-1], y.shape[-1] // self.head_dim, self.head_dim)
            for y in linears([self.q_proj, self.k_proj, self.v_proj], x)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return [q, k, v]

    def head_axes(self) -> tuple[str, ...]:
        """The mesh axes that the KV heads, and therefore a cache's heads, are split over.

        They are those of the columns of ``o_proj``, if they divide the KV heads evenly.
        """
        return self._axes_of(self.o_proj.weight, 1)

    def _axes_of(self, weight: Any, axis: int) -> tuple[str, ...]:
        sharding = weight.sharding
        if not isinstance(sharding, NamedSharding):
            return ()
        fsdp = axis_of(
            sharding.mesh, "fsdp"
        )  # weights are gathered over this axis: no heads are split
        over = tuple(name for name in split_over(weight, axis) if name != fsdp)
        count = math.prod(sharding.mesh.shape[name] for name in over)
        return () if self.num_kv_heads % count else over

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads; the columns of ``o_proj`` as the query heads."""
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
        """Hidden states ``[B, T, E]``, or ``[B, E]`` for one token per sequence → the same shape.

        Args:
            x: hidden states.
            step: positions of the tokens.
            cached: the cache, or ``()``.
            layer: index of this layer, an integer scalar.

        Returns:
            The result, and the cache with these tokens.
        """
        if self.rope not in _ROPES:
            known = ", ".join(map(repr, _ROPES))
            raise UserInputError(f"rope is {self.rope!r}: it must be one of {known}")
        q, k, v = self.project(x)
        rotations = step.rotations.get(self.rope)
        part = int(self._is_rotating(cached))
        if cached and step.numbers is not None:
            layer = jax.lax.dynamic_index_in_dim(step.numbers, layer, keepdims=False)
        if x.ndim == 2:
            y, slots = self._decode(q, k, v, step, cached[part], layer, bool(part))
        else:
            if rotations is not None:
                q, k = (rotate(a, *rotations, interleaved=False) for a in (q, k))
            if cached:
                prefill = self._prefill_sliding if part else self._prefill_full
                y, slots = prefill(q, k, v, step, cached[part], layer)
            else:
                key_positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
                cache = [a.swapaxes(1, 2)[None] for a in (k, v)]
                y = self._attend(q, cache, 0, step.positions(x.shape[1]), key_positions)
                slots = None
        if cached:
            cached = (slots, cached[1]) if part == 0 else (cached[0], slots)
        y = y.reshape(*x.shape[:-1], self.num_heads * self.head_dim)
        return self.o_proj(y).astype(x.dtype), cached

    def _is_rotating(self, cached: Cached) -> bool:
        """Whether this layer uses the rotating part of the cache."""
        return bool(cached) and self.sliding_window is not None and cached[1] is not None

    def _decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, slots: Any, layer: Any,
        rotating: bool,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        if self.num_kv_heads % parts(self.o_proj.weight, 1):
            q = resharded(q, 1, ())  # the cache is replicated on every device
        rotations = step.rotations.get(self.rope)
        if rotations is not None:
            rotations = rotations[0][:, 0], rotations[1][:, 0]  # [B, D/2]
        y, *new = decode_attention(
            q, k, v, slots.keys, slots.values, step.starts if step.tokens is None else step.tokens,
            layer=layer, rope=rotations,
            scale=self.scale, sliding_window=self.sliding_window, soft_cap=self.soft_cap,
            rotating=rotating, scales=slots.scales,
        )  # fmt: skip
        return y, Slots(*new)

    def _prefill_full(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, slots: Any, layer: Any
    ) -> tuple[jax.Array, Slots]:
        """Prefill of a layer that sees all tokens: writes to the cache, then attends to its first slots."""
        length, size = q.shape[1], slots.size
        positions, real = step.positions(length), step.real(length)
        slot = positions if real is None else jnp.where(real, positions, size)
        slots = slots.written(layer, k, v, slot)
        key_positions = jnp.arange(size, dtype=jnp.int32)[None, :]
        return self._attend(q, jax.tree.leaves(slots), layer, positions, key_positions), slots

    def _prefill_sliding(
        self, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, slots: Any, layer: Any
    ) -> tuple[jax.Array, Slots]:
        """Prefill of a sliding layer: attends to the cache and the new tokens, then stores the last of them."""
        length, size = q.shape[1], slots.size
        positions, starts = step.positions(length), step.starts[:, None]
        old, new = slots.layer_slots(layer), slots.rounded(k, v)  # as all later tokens see them

        keys = (
            explicit.concatenate([a.swapaxes(1, 2), b[0]], 2)[None]
            for a, b in zip(new, old.floats(q.dtype), strict=True)
        )
        key_positions = _slot_positions(starts, size)
        key_positions = jnp.where(key_positions < 0, NO_KEY, key_positions)
        key_positions = explicit.concatenate([positions, key_positions], 1)
        y = self._attend(q, list(keys), 0, positions, key_positions)
        ends = starts + (length if step.counts is None else step.counts[:, None])
        return y, slots.replaced(layer, old, k, v, _slot_positions(ends, size) - starts)

    def _attend(
        self,
        q: jax.Array,
        cache: Sequence[jax.Array],
        layer: Any,
        positions: jax.Array,
        key_positions: jax.Array,
    ) -> jax.Array:
        """Causal attention of queries at ``positions`` to keys at ``key_positions``, each ``[B or 1, tokens]``."""
        # Too few KV heads to split are on every device, and repeated for each query head.
        is_whole = self.num_kv_heads % parts(self.o_proj.weight, 1)
        return causal_attention(
            q, cache, layer, positions, key_positions, scale=self.scale,
            sliding_window=self.sliding_window, soft_cap=self.soft_cap,
            softmax_dtype=self.softmax_dtype,
            repeats=self.num_heads // self.num_kv_heads if is_whole else 1,
            strided=_splits_tokens(self.o_proj.weight.sharding),
        )  # fmt: skip


def _splits_tokens(sharding: Any) -> bool:
    """Whether a sharding's mesh has an axis for the tokens of a sequence."""
    if not isinstance(sharding, NamedSharding):
        return False
    axis = axis_of(sharding.mesh, "seq")
    return axis is not None and sharding.mesh.shape[axis] > 1


def _slot_positions(ends: jax.Array, size: int) -> jax.Array:
    """The position in each slot ``[B, S]`` of a rotating cache after ``ends`` ``[B, 1]`` tokens.

    It is negative for an empty slot.
    """
    last = ends - 1
    return last - (last - jnp.arange(size, dtype=jnp.int32)[None, :]) % size


def resharded(array: jax.Array, axis: int, over: explicit.Entry) -> jax.Array:
    """``array`` with ``axis`` split over the mesh axes ``over``, on a mesh with Explicit axes.

    Elsewhere it is returned unchanged and XLA chooses its sharding.
    """
    mesh = explicit.mesh_of(array)
    if mesh is None:
        return array
    spec = explicit.entries(array)
    spec[axis] = over
    return jax.sharding.reshard(array, explicit.sharding(mesh, spec))
