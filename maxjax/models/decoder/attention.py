"""Self-attention of a decoder, with and without a KV cache.

There are three cases: all tokens of a sequence at once without a cache, several tokens after those
in the cache (prefill, also in chunks), and one token per sequence (a decode step,
``kernels.decode_attention``). Sliding layers have a separate, rotating cache.

Shapes: L layers, B sequences, T tokens, H query heads, K KV heads, S slots of the cache, head width
D, hidden size E.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...dtype import DType, promote
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.arrays import on_mesh
from ...graph.placement.specs import axis_of, parts, split_over
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...kernels import explicit
from ...kernels.attention import (
    NO_KEY,
    attention_weights,
    cached_rows,
    causal_attention,
    partial_attention,
    weighted_values,
)
from ...kernels.blocked_attention import Attending
from ...kernels.sinks import with_sinks
from ...nn.kv_cache.kinds import Place
from ...nn.kv_cache.layout import CacheLayout, CachePart, cache_layout
from ...nn.kv_cache.slots import Slots
from ...nn.layer import Module, is_tapped, tap
from ...nn.linear import Linear, linear_rules, linears
from ...nn.rotary_embedding import rotate
from ..parts.aliases import spelling
from .config import DecoderConfig
from .norm import norm
from .step import Cached as Cached
from .step import Step as Step
from .step import ends, numbers, own_slots, slot_positions

# What a layer's ``rope`` may be.
_ROPES = ("global", "local", "none")


class DecoderAttention(Module):
    """Self-attention with RoPE, configured by a DecoderConfig.

    A family that computes queries, keys and values differently overrides :meth:`make_projections`
    and :meth:`project`. It overrides :meth:`placed` to change queries and keys before RoPE, and
    :meth:`merged` to change the heads' results before ``o_proj``. The rest, cache included, is shared.

    Args:
        config: settings of the decoder.
        slides: whether the layer has the sliding window ``config.sliding_window``.
        dtype: dtype of the weights.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: linear layers of queries, keys, values and output.
        q_norm, k_norm: norms of each head, if ``config.qk_norm``, or of all heads together.
        num_heads, num_kv_heads, head_dim: H, K and D.
        scale, soft_cap: factor and cap of the attention scores.
        sliding_window: number of tokens, itself included, that a token attends to; None: all before it.
        rope: the RoPE of queries and keys: "global" for ``config.rope``, "local" for
            ``config.local_rope``, "none" for no RoPE.
        chunked: whether the window of a sliding layer is the chunk of ``sliding_window`` positions that
            the token is in, instead of the tokens just before it.
        sinks: Weight ``[H]`` of attention sinks, which are scores in the softmax without a value; or None.
        interleaved: whether the layer's RoPE rotates neighbouring features.
        scales_queries: whether queries are scaled by position (``config.query_scaling``).
    """

    _mx_carries = True
    chunked: bool = False
    sinks: Any = None
    # The cache group with the layer's keys and values; None: "sliding" or "full".
    cache_group: str | None = None

    def __init__(self, config: DecoderConfig, slides: bool, dtype: DType):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads, config.kv_heads, config.width
        )  # fmt: skip
        self.scale, self.soft_cap = config.query_scale, config.attn_soft_cap
        self.sliding_window = config.sliding_window if slides else None
        self.rope = "local" if slides and config.local_rope is not None else "global"
        own = config.local_rope if self.rope == "local" else config.rope
        self.interleaved = own is not None and own.interleaved
        self.scales_queries = config.query_scaling is not None
        self.softmax_dtype = promote(dtype, DType.float32)
        self.q_norm = self.k_norm = None
        self.norms_all_heads = config.qk_norm == "all"
        self.make_projections(config, dtype)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_projected" in vars(cls) and "project" not in vars(cls):
            cls.project = vars(cls)["_projected"]  # its former name

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
            counts = (self.num_heads, self.num_kv_heads) if self.norms_all_heads else (1, 1)
            self.q_norm, self.k_norm = (norm(config, dtype, count * width) for count in counts)

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """``[..., E]`` → queries ``[..., H, D]``, keys and values ``[..., K, D]``, before RoPE.

        An overriding method may return a fourth array, shaped as the queries: a gate, by whose sigmoid
        the heads' results are multiplied.
        """
        found = linears([self.q_proj, self.k_proj, self.v_proj], x)
        return self.heads(*(y.astype(x.dtype) for y in found))

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """``[..., heads · D]`` → ``[..., heads, D]``; queries and keys are normalised if there are norms."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and self.norms_all_heads:
            q, k = q_norm(q), k_norm(k)
        q, k, v = (
            y.reshape(*y.shape[:-1], y.shape[-1] // self.head_dim, self.head_dim) for y in (q, k, v)
        )
        if q_norm is not None and k_norm is not None and not self.norms_all_heads:
            q, k = q_norm(q), k_norm(k)
        return [q, k, v]

    def head_axes(self) -> tuple[str, ...]:
        """The mesh axes that the query heads are split over; the columns of ``o_proj`` are split alike."""
        return split_over(self.o_proj.weight, 1)

    def cache_layout(self, batch: int) -> CacheLayout | None:
        """How a cache of ``batch`` sequences is split over the mesh; None without a mesh."""
        sharding = self.o_proj.weight.sharding
        if not isinstance(sharding, NamedSharding):
            return None
        # Weights are gathered over the axis fsdp, so it splits no heads.
        fsdp = axis_of(sharding.mesh, "fsdp")
        over = [name for name in self.head_axes() if name != fsdp]
        count, kv_heads = self.num_heads, self.num_kv_heads
        return cache_layout(sharding.mesh, batch, count, kv_heads, over)

    def cache_place(self, batch: int) -> Place:
        """The sharding of the keys and values in a cache of ``batch`` sequences."""
        layout = self.cache_layout(batch)
        if layout is None:
            return Place(self.o_proj.weight.sharding)
        return Place(layout.sharding, layout.rows, layout.slots)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads, and the columns of ``o_proj`` between query heads."""
        width = self.head_dim
        output = ShardingStrategy.head_aware_columnwise(1, self.num_heads, width)
        rules = linear_rules(spelling(self, "o_proj"), output)
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
            cached: states of the cache by group; empty without a cache.
            layer: index of this layer, an integer scalar.

        Returns:
            The result, and the cache with these tokens.
        """
        if self.rope not in _ROPES:
            known = ", ".join(map(repr, _ROPES))
            raise UserInputError(f"rope is {self.rope!r}: it must be one of {known}")
        q, k, v, *gate = self.project(x)
        if self.sinks is not None:
            step = step._replace(sinks=jnp.asarray(self.sinks))
        q, k, step = self.placed(q, k, step)
        if cached:
            group = self.group(cached)
            slots = cached[group]
            layer = step.number(group, layer)
            if is_tapped("weights"):
                step = step._replace(capacity=cached["full"].size)
            rotating = slots.window is not None
            y, slots = self._with_cache(q, k, v, step, slots, layer, rotating)
            cached = {**cached, group: slots}
        else:
            q, k = self._rotated(step, q, k)
            key_positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
            cache = [a.swapaxes(1, 2)[None] for a in (k, v)]
            y = self._attend(q, cache, 0, step, step.positions(x.shape[1]), key_positions)
        y = self.merged(tap("heads", y), *gate)
        return self.o_proj(y).astype(x.dtype), cached

    def placed(self, q: jax.Array, k: jax.Array, step: Step) -> tuple[jax.Array, jax.Array, Step]:
        """Changes queries, keys and the step before RoPE, where that depends on positions; returns all three."""
        return (_scaled(q, step) if self.scales_queries else q), k, step

    def rotated_now(
        self, q: jax.Array, k: jax.Array, step: Step
    ) -> tuple[jax.Array, jax.Array, Step]:
        """Queries and keys ``[B, (T,) heads, D]`` after RoPE, and a step that applies no further RoPE."""
        if q.ndim == 3:
            q, k = self._rotated(step, q[:, None], k[:, None])
            q, k = q[:, 0], k[:, 0]
        else:
            q, k = self._rotated(step, q, k)
        return q, k, step._replace(rotations={})

    def merged(self, y: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """The heads' results ``[..., H, D]``, and a gate if :meth:`project` returns one → inputs of ``o_proj``."""
        if gate is not None:
            y = y * jax.nn.sigmoid(gate.reshape(y.shape)).astype(y.dtype)
        return y.reshape(*y.shape[:-2], -1)

    def group(self, cached: Cached) -> str:
        """The name of the cache group that has this layer's keys and values."""
        if self.cache_group is not None:
            return self.cache_group
        return "sliding" if self.sliding_window is not None and "sliding" in cached else "full"

    def _rotated(self, step: Step, q: jax.Array, k: Any) -> tuple[jax.Array, Any]:
        """Queries and keys ``[B, T, heads, D]`` after RoPE; unchanged in a layer without RoPE. ``k`` may be None."""
        angles = step.rotations.get(self.rope)
        if angles is None:
            return q, k
        rotated = 2 * angles[0].shape[-1]

        def turned(a: jax.Array) -> jax.Array:
            y = rotate(a[..., :rotated], *angles, interleaved=self.interleaved)
            return y if rotated == a.shape[-1] else explicit.concatenate([y, a[..., rotated:]], -1)

        return turned(q), None if k is None else turned(k)

    def _with_cache(
        self, q: jax.Array, k: Any, v: Any, step: Step, slots: Slots, layer: Any, rotating: bool,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """Writes the tokens to the cache and attends to it; ``q``, ``k``, ``v`` ``[B, (T,) heads, D]``.

        Where ``k`` and ``v`` are None, the layer attends to the keys and values that another layer wrote.
        """
        batch = q.shape[0]
        layout = self.cache_layout(batch)
        if layout is None or slots.keys.shape[1:3] == (batch, self.num_kv_heads):
            return self._with_slots(q, k, v, step, slots, layer, rotating)
        if is_tapped("weights"):
            raise UserInputError(
                "attention weights cannot be captured with a KV cache that is sharded over a mesh: call "
                "model(ids) without a cache, or use one device"
            )
        queries, whole = layout.queries(q.ndim), PartitionSpec(layout.batch)
        by_row = lambda a: whole if a.shape[0] == batch else PartitionSpec()
        step = step._replace(numbers=None)
        cache = jax.tree.map(lambda a: layout.spec_of(a.ndim), slots)
        steps = jax.tree.map(by_row, step._replace(sinks=None))
        if step.sinks is not None:
            steps = steps._replace(sinks=PartitionSpec())
        specs = (queries, whole, whole, steps, cache, PartitionSpec())
        run = functools.partial(self._on_part, layout, rotating)
        out = (layout.results(q.ndim), cache)
        run = on_mesh(run, layout.mesh, specs, out, check_vma=False)
        return run(q, k, v, step, slots, jnp.asarray(layer, jnp.int32))

    def _on_part(
        self, layout: CacheLayout, rotating: bool,
        q: jax.Array, k: Any, v: Any, step: Step, slots: Slots, layer: Any,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """:meth:`_with_cache` for one device's shard of the cache."""
        part = CachePart(layout)
        sinks = None if step.sinks is None else part.of_heads(step.sinks)
        step = jax.tree.map(part.rows, step._replace(sinks=None))._replace(sinks=sinks)
        q, (k, v) = part.queries(q), jax.tree.map(part.keys, (k, v))
        return self._with_slots(q, k, v, step, slots, layer, rotating, part)

    def _with_slots(
        self, q: jax.Array, k: Any, v: Any, step: Step, slots: Slots, layer: Any, rotating: bool,
        part: CachePart | None = None,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """:meth:`_with_cache` for a cache, or for the part of one on this device: a decode step or a prefill."""
        is_step = q.ndim == 3
        has_slots = part is None or part.slots == 1
        # The kernel cannot mask the tokens before a chunk that does not begin at the first slot.
        has_kernel = rotating or not self.chunked
        if is_step and has_slots and has_kernel and not is_tapped("weights"):
            y, slots = self._decode(q, k, v, step, slots, layer, rotating, part)
            return (y if part is None else part.results(y, None)), slots
        if is_step:  # a prefill of one token
            q, k, v = jax.tree.map(lambda a: a[:, None], (q, k, v))
        q, k = self._rotated(step, q, k)
        if rotating and not is_step:
            return self._prefill_sliding(q, k, v, step, slots, layer, part)
        y, slots = self._prefill_full(q, k, v, step, slots, layer, part, rotating)
        return (y[:, 0] if is_step else y), slots

    def _decode(
        self, q: jax.Array, k: Any, v: Any, step: Step, slots: Slots, layer: Any,
        rotating: bool, part: CachePart | None,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """One token of each sequence, by ``kernels.decode_attention``."""
        if self._heads_are_whole():
            q = resharded(q, 1, ())  # replicated, as the heads of the cache are
        rotations = step.rotations.get(self.rope)
        if rotations is not None:
            rotations = rotations[0][:, 0], rotations[1][:, 0]  # [B, R/2]
        if k is None:  # the kernel then writes the keys and values that are already in the cache
            q = self._rotated(step, q[:, None], None)[0][:, 0]
            (k, v), rotations = slots.at(layer, step.starts, q.dtype), None
        tokens = step.starts if step.tokens is None else step.tokens
        window = self.sliding_window
        if self.chunked and window is not None:
            # The slots of a rotating cache are those of one chunk, which begins at the first.
            tokens = jnp.where(tokens < 0, tokens, tokens % window)
            window, rotating = None, False
        return slots.decoded(
            q, k, v, tokens, layer=layer, rope=rotations, interleaved=self.interleaved,
            scale=self.scale, sliding_window=window, soft_cap=self.soft_cap, rotating=rotating,
            sinks=step.sinks, division=self._division(q.shape[0], True) if part is None else None,
        )  # fmt: skip

    def _prefill_full(
        self, q: jax.Array, k: Any, v: Any, step: Step, slots: Slots, layer: Any,
        part: CachePart | None, rotating: bool,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """Writes the tokens to the cache, then attends to it.

        Args:
            part: the device's shard of a cache that is sharded; None: the cache is not.
            rotating: whether the cache rotates; then there is one token, which overwrites a token
                that it does not attend to.
        """
        length, size = q.shape[1], slots.size
        positions, real = step.positions(length), step.real(length)
        slot, is_own = own_slots(part, positions, size, rotating)
        if is_own is not None:
            real = is_own if real is None else real & is_own
        slot = slot if real is None else jnp.where(real, slot, size)
        if k is not None:
            # Where slots are sharded, the slots of one device are not consecutive.
            in_turn = not rotating and is_own is None
            division = self._division(k.shape[0], True) if part is None else None
            slots = slots.written(layer, k, v, slot, consecutive=in_turn, division=division)
        if rotating:
            key_positions = slot_positions(ends(step, length), size, part)
        else:
            key_positions = numbers(part, size)[None, :]
        width = step.capacity if rotating else None
        y = self._attend(q, slots.arrays, layer, step, positions, key_positions, part, width)
        return y, slots

    def _prefill_sliding(
        self, q: jax.Array, k: Any, v: Any, step: Step, slots: Slots, layer: Any,
        part: CachePart | None,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """Attends to a rotating cache and to the new tokens, then stores the last of the new tokens."""
        length, size = q.shape[1], slots.size
        positions, starts = step.positions(length), step.starts[:, None]
        old = slots.layer_slots(layer)
        new, new_positions = slots.rounded(k, v), positions  # rounded as the cache stores them
        if part is not None and part.slots > 1:
            # Each new token is a key on one device only.
            new_positions = jnp.where(positions % part.slots == part.first, positions, NO_KEY)

        keys = (
            explicit.concatenate([a.swapaxes(1, 2), b[0]], 2)[None]
            for a, b in zip(new, old.floats(q.dtype), strict=True)
        )
        key_positions = slot_positions(starts, size, part)
        key_positions = explicit.concatenate([new_positions, key_positions], 1)
        y = self._attend(q, list(keys), 0, step, positions, key_positions, part, step.capacity)
        last = slot_positions(ends(step, length), size, part)
        source = jnp.where(last == NO_KEY, -1, last - starts)
        return y, slots.replaced(layer, old, k, v, source)

    def _attend(
        self, q: jax.Array, cache: Sequence[jax.Array], layer: Any, step: Step,
        positions: jax.Array, key_positions: jax.Array, part: CachePart | None = None,
        width: int | None = None,
    ) -> jax.Array:  # fmt: skip
        """Causal attention of queries at ``positions`` to keys at ``key_positions``, each ``[B or 1, tokens]``."""
        options: dict[str, Any] = {
            "scale": self.scale, "sliding_window": self.sliding_window, "chunked": self.chunked,
            "soft_cap": self.soft_cap, "softmax_dtype": self.softmax_dtype,
        }  # fmt: skip
        where = (q, cache, layer, positions, key_positions)
        if part is None and is_tapped("weights"):
            return self._attend_by_weights(*where, width, step.sinks, **options)
        if part is not None and part.slots > 1:
            y, sums = partial_attention(*where, **options)
            if step.sinks is not None:  # one more term of the softmax, which only one device adds
                lowest = jnp.finfo(sums.dtype).min
                scores = jnp.where(part.first == 0, step.sinks.astype(sums.dtype), lowest)
                scores = jnp.broadcast_to(scores, sums.shape)
                y, sums = with_sinks(y, sums, scores), jnp.logaddexp(sums, scores)
            return part.results(y, sums)
        # KV heads that cannot be split are replicated, and repeated for each query head.
        is_whole = part is None and self._heads_are_whole()
        division = self._division(q.shape[0])
        y = causal_attention(
            *where, **options, sinks=step.sinks, repeats=self.num_heads // self.num_kv_heads if is_whole else 1,
            strided=division is not None and bool(division.entries[1]), division=division,
        )  # fmt: skip
        return y if part is None else part.results(y, None)

    def _attend_by_weights(
        self, q: jax.Array, cache: Sequence[jax.Array], layer: Any, positions: jax.Array,
        key_positions: jax.Array, width: int | None, sinks: Any, *, scale: Any,
        sliding_window: Any, chunked: bool, soft_cap: Any, softmax_dtype: Any,
    ) -> jax.Array:  # fmt: skip
        """:meth:`_attend` by the definition of attention, which taps the weights ``[B, H, T, S]``.

        S is the number of key positions, from 0 on: of the tokens without a cache, else of the slots.
        Keys of a rotating cache are first put in the order of ``width`` positions.
        """
        repeats = self.num_heads // self.num_kv_heads if self._heads_are_whole() else 1
        keys, values = cached_rows(cache, layer, q.dtype, repeats)
        attending = Attending(scale, sliding_window, soft_cap, softmax_dtype, chunked=chunked)
        mask = attending.sees(positions[:, :, None], key_positions[:, None, :])
        weights = attention_weights(
            q, keys, jnp.broadcast_to(mask, (q.shape[0], *mask.shape[1:])),
            scale=scale, soft_cap=soft_cap, softmax_dtype=softmax_dtype, sinks=sinks,
        )  # fmt: skip
        if width is None:
            return weighted_values(tap("weights", weights), values)
        at = jnp.broadcast_to(key_positions[:, None, None, :], weights.shape)
        place = [jnp.arange(n, dtype=jnp.int32) for n in weights.shape[:3]]
        b, h, t = jnp.meshgrid(*place, indexing="ij")
        index = (b[..., None], h[..., None], t[..., None], at)
        ordered = jnp.zeros((*weights.shape[:3], width), weights.dtype)
        ordered = tap("weights", ordered.at[index].set(weights, mode="drop"))
        weights = ordered.at[index].get(mode="fill", fill_value=0)
        return weighted_values(weights, values)

    def _division(self, batch: int, of_cache: bool = False) -> explicit.Division | None:
        """How a mesh shards the queries ``[B, T, H, D]``, or a cache; None without a mesh."""
        layout = self.cache_layout(batch)
        if layout is None:
            return None
        if of_cache:
            return explicit.Division.of(layout.mesh, [(), layout.batch, layout.over, (), ()])
        axis = axis_of(layout.mesh, "seq")
        tokens = () if axis is None or layout.mesh.shape[axis] == 1 else (axis,)
        heads = layout.over if layout.splits_queries else ()
        return explicit.Division.of(layout.mesh, [layout.batch, tokens, heads, ()])

    def _heads_are_whole(self) -> bool:
        """Whether a mesh splits the query heads but cannot split the KV heads, which are replicated."""
        return bool(self.num_kv_heads % parts(self.o_proj.weight, 1))


def _scaled(q: jax.Array, step: Step) -> jax.Array:
    """Queries ``[B, (T,) H, D]`` times the factors of their positions, rounded to their dtype once."""
    factors = step.query_scales  # [B or 1, T]
    if factors is None:
        return q
    factors = factors[:, 0] if q.ndim == 3 else factors
    return (q.astype(jnp.float32) * factors[..., None, None]).astype(q.dtype)


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
