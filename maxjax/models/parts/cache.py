"""What a layer sees of the tokens before it: :class:`LayerCache`, with the two operations write and attend.

An architecture passes the cache through its layers and calls :func:`~maxjax.models.parts.attend`. Whether
there is a KV cache, how its slots are arranged, how a mesh divides it and which kernel runs is decided here.

Shapes: B sequences, T tokens, H query heads, K KV heads, S slots of the cache, head width D.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ...dtype import DType, promote
from ...errors import UserInputError
from ...graph.placement.arrays import is_manual, on_mesh
from ...graph.placement.specs import axis_of, batch_axes, spec_of
from ...kernels import explicit
from ...kernels.alibi import bias_of_distance
from ...kernels.attention import (
    NO_KEY,
    attention_weights,
    cached_rows,
    causal_attention,
    partial_attention,
    weighted_values,
)
from ...kernels.blocked_attention import Attending
from ...kernels.divided_decode import Divided, divided_decode, own_pages
from ...kernels.sinks import with_sinks
from ...nn.attention.both_ways import both_ways
from ...nn.kv_cache.kinds import Place, States
from ...nn.kv_cache.layout import CacheLayout, CachePart, cache_layout, page_layout
from ...nn.kv_cache.recurrent import Recurrent
from ...nn.kv_cache.slots import Slots
from ...nn.layer import is_tapped, tap


class Mask(NamedTuple):
    """Which tokens a token attends to; ``CAUSAL``, or made by ``sliding``, ``chunked``, ``bidirectional``.

    Attributes:
        window: number of tokens of a window or a chunk; None: all tokens.
        chunked: whether the window is the chunk that the token is in, and not the tokens just before it.
        is_causal: whether a token attends only to itself and to earlier tokens.
        sees_blocks: whether a token of a block, such as a picture, attends to all its tokens, later ones too.
        cuts_blocks: whether the window also limits which earlier tokens of its block a token attends to.
    """

    window: int | None = None
    chunked: bool = False
    is_causal: bool = True
    sees_blocks: bool = False
    cuts_blocks: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """What stands in place of the embeddings of some tokens: the features of pictures.

    Attributes:
        rows: features ``[N, E]``.
        at: the row of each token, int32 ``[B, T]``; -1 for a token with an embedding of its own.
        deepstack: features ``[n, N, E]`` that are added to the hidden states after each of the first n layers, at the
            same tokens (L. Meng et al., arXiv:2406.04334); None: none are.

    Example:
        >>> features = Features(jnp.ones((1, 2)), jnp.array([[-1, 0, -1]]))
        >>> features.put(jnp.zeros((1, 3, 2)))[0, :, 0].tolist()
        [0.0, 1.0, 0.0]
    """

    rows: jax.Array
    at: jax.Array
    deepstack: jax.Array | None = None

    def put(self, x: jax.Array) -> jax.Array:
        """Return embeddings ``[B, T, E]``, or ``[B, E]`` for one token per sequence, with the features in place."""
        at = self._at(x)
        return jnp.where(at[..., None] >= 0, _rows(self.rows, at).astype(x.dtype), x)

    def added(self, x: jax.Array, layer: Any) -> jax.Array:
        """Return hidden states after a layer, of this index, with what is added there."""
        if self.deepstack is None:
            return x
        count, at = self.deepstack.shape[0], self._at(x)
        rows = jax.lax.dynamic_index_in_dim(
            self.deepstack, jnp.minimum(layer, count - 1), keepdims=False
        )
        is_added = (at >= 0) & (layer < count)
        return x + jnp.where(is_added[..., None], _rows(rows, at), 0).astype(x.dtype)

    def _at(self, x: jax.Array) -> jax.Array:
        return self.at[:, 0] if x.ndim == 2 else self.at


def _rows(rows: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.take(rows, jnp.maximum(at, 0), axis=0, mode="clip")


def blocks_of(numbers: jax.Array, starts: jax.Array) -> jax.Array:
    """Return the positions ``[B, 2, T]`` of the first and the last token of the block that each token belongs to.

    A block is a run of tokens with the same number; a token with the number -1 is by itself.

    Args:
        numbers: the number of each token's block, int32 ``[B, T]``.
        starts: position of each row's first token, int32 ``[B or 1]``.

    Example:
        >>> blocks_of(jnp.array([[-1, 0, 0, -1, 1]]), jnp.array([10]))[0].tolist()
        [[10, 11, 11, 13, 14], [10, 12, 12, 13, 14]]
    """
    place = jnp.broadcast_to(jnp.arange(numbers.shape[1], dtype=jnp.int32), numbers.shape)
    joined = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)
    edge = jnp.zeros_like(numbers[:, :1], bool)
    begins = ~jnp.concatenate([edge, joined], axis=1)
    ends = ~jnp.concatenate([joined, edge], axis=1)
    first = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, place, numbers.shape[1]), axis=1, reverse=True)
    return jnp.stack([first, last], axis=1) + starts[:, None, None]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("starts", "counts", "text_lengths", "tokens", "numbers", "table"),
        *("features", "axes", "blocks", "window_table"),
    ],
    meta_fields=[
        "length",
        "is_step",
        "capacity",
        "mesh",
        "kv_heads",
        "recurrent",
        "is_ragged",
        "parts",
    ],
)
@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """Facts about the tokens of one call, which are the same in every layer.

    Attributes:
        starts: position of each row's first token, ``[B]``, or ``[1]`` for all rows.
        counts: number of real tokens in each row, ``[B]``; the rest is padding. None: all are real.
        text_lengths: length of each text, for RoPE whose frequencies depend on it, ``[B or 1]``.
        tokens: for a decode step, the starts ``[B]``, with -1 for rows without a token.
        numbers: index of each layer in its cache group, ``[L]``, or a dict of these by group where they
            differ; None: the layer's own index.
        length: T, the number of tokens in each row.
        is_step: whether arrays have no axis of tokens: ``[B, ...]`` in place of ``[B, 1, ...]``.
        capacity: number of positions in the cache; 0 without a cache.
        mesh: the mesh of the model's weights, or None.
        kv_heads: name of each cache group with keys and values, and its number of KV heads.
        recurrent: name of each cache group with recurrent states, and what these are.
        table: the pages of each row, ``[B, M]``, for a ``PagedCache``; None for another cache.
        is_ragged: whether several rows of a decode step are tokens of one text (``PagedCache``).
        parts: number of parts into which a mesh splits a pool of pages, and the rows with it.
        features: what stands in place of the embeddings of tokens, such as pictures; None: nothing.
        axes: positions for RoPE ``[B, T, 3]``: a picture's tokens have a time, a row and a column. None: they are
            those of the tokens in their text.
        blocks: positions ``[B, 2, T]`` of the first and the last token of the block that each token belongs to, whose
            tokens see each other, such as those of a picture; for other tokens both are its own. None: there are none.
        window_table: as ``table``, for layers with a window that have pages of their own; None: no layers have.
    """

    starts: jax.Array
    counts: jax.Array | None
    text_lengths: jax.Array
    tokens: jax.Array | None
    numbers: jax.Array | Mapping[str, jax.Array] | None
    length: int
    is_step: bool
    capacity: int
    mesh: Any
    kv_heads: tuple[tuple[str, int], ...]
    recurrent: tuple[tuple[str, States], ...] = ()
    table: jax.Array | None = None
    is_ragged: bool = False
    parts: int = 1
    features: Features | None = None
    axes: jax.Array | None = None
    blocks: jax.Array | None = None
    window_table: jax.Array | None = None

    @property
    def positions(self) -> jax.Array:
        """The positions of the tokens, ``[B or 1, T]``, or ``[B]`` for a step."""
        return self.starts if self.is_step else self.rows_of_positions

    @property
    def rows_of_positions(self) -> jax.Array:
        """The positions of the tokens, ``[B or 1, T]``."""
        return self.starts[:, None] + jnp.arange(self.length, dtype=jnp.int32)[None, :]

    @property
    def real(self) -> jax.Array | None:
        """Which tokens are real, not padding, bools ``[B, T]``; None: all are."""
        if self.counts is None:
            return None
        return jnp.arange(self.length, dtype=jnp.int32)[None, :] < self.counts[:, None]

    @property
    def ends(self) -> jax.Array:
        """The number of tokens of each row after the call, ``[B, 1]``."""
        return self.starts[:, None] + (self.length if self.counts is None else self.counts[:, None])

    def number(self, group: str, layer: Any) -> Any:
        """Return the index of a layer in its cache group."""
        numbers = self.numbers[group] if isinstance(self.numbers, Mapping) else self.numbers
        if numbers is None:
            return layer
        return jax.lax.dynamic_index_in_dim(numbers, layer, keepdims=False)


class Scores(NamedTuple):
    """How the scores of attention are computed: the keywords of :func:`~maxjax.models.parts.attend`.

    Attributes:
        scale: factor of the scores.
        soft_cap: cap of the scores, which become ``cap · tanh(score / cap)``; None: no cap.
        sinks: scores ``[H]`` that take part in the softmax and have no value; None: none.
        slopes: numbers ``[H]``; each times (key position - query position) is added to scores; None: none.
        chosen: which keys, besides those that the mask excludes, a token attends to, bools ``[B, T, S]``; None: all.
        dtype: dtype of scores, softmax and sums.
    """

    scale: float
    soft_cap: float | None = None
    sinks: jax.Array | None = None
    slopes: jax.Array | None = None
    chosen: jax.Array | None = None
    dtype: Any = DType.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The tokens of one call, and what earlier calls left for one layer; a pytree.

    Layers do not change it: :meth:`write` and :meth:`attend` return another one, which the next layer gets.
    A subclass may keep keys and values otherwise, for example in pages, by overriding these two.

    Attributes:
        context: facts about the tokens, which are the same in every layer.
        states: the states of a ``KVCache`` by the names of its groups; empty without a cache.
        layer: index of the layer, an integer scalar.
        new: keys and values ``[B, (T,) K, D]`` that were written and have not been attended to yet.
    """

    # A layer returns its hidden states and the cache: captures and patches see the hidden states alone.
    _mx_is_passed_on: ClassVar[bool] = True

    context: ForwardContext
    states: Mapping[str, Any]
    layer: Any = 0
    new: tuple[jax.Array, jax.Array] | None = None

    @property
    def positions(self) -> jax.Array:
        """The positions of the tokens: ``[B or 1, T]``, or ``[B]`` for one token per sequence."""
        return self.context.positions

    def at(self, layer: Any, states: Any) -> Self:
        """Return the cache of another layer, with the states that the layer before it returned."""
        return dataclasses.replace(self, layer=layer, states=states, new=None)

    def with_inputs(
        self, features: Features | None, axes: jax.Array | None, blocks: jax.Array | None
    ) -> Self:
        """Return the cache of a call with features in place of tokens, other positions for RoPE, and blocks.

        Args:
            features, axes: as in :class:`ForwardContext`.
            blocks: the number of each token's block, int32 ``[B, T]``; -1 for none.
        """
        if features is None and axes is None and blocks is None:
            return self
        if blocks is not None:
            real = self.context.real
            blocks = blocks if real is None else jnp.where(real, blocks, -1)
            blocks = blocks_of(blocks, self.context.starts)
        context = dataclasses.replace(self.context, features=features, axes=axes, blocks=blocks)
        return dataclasses.replace(self, context=context)

    def write(self, k: jax.Array, v: jax.Array) -> Self:
        """Add the keys and values ``[B, (T,) K, D]`` of the tokens; the next :meth:`attend` stores them."""
        return dataclasses.replace(self, new=(k, v))

    def attend(
        self, q: jax.Array, mask: Mask, scores: Scores, group: str | None = None
    ) -> tuple[jax.Array, Self]:
        """Attend to the written tokens and to those of the cache: queries ``[B, (T,) H, D]`` → the same shape.

        Args:
            q: queries, after RoPE.
            mask: which tokens a token attends to.
            scores: how the scores are computed.
            group: name of the group of the cache; by default "sliding" for a mask with a window if the
                cache has such a group, else "full".

        Raises:
            UserInputError: the mask is not causal and there is a cache.
        """
        if scores.chosen is not None and (mask.window is not None or not mask.is_causal):
            raise ValueError("chosen keys are supported only for a causal mask without a window")
        if not mask.is_causal:
            return self._attend_both_ways(q, mask, scores), dataclasses.replace(self, new=None)
        if not self.states:
            return self._attend_own(q, mask, scores), dataclasses.replace(self, new=None)
        if group is None:
            group = "sliding" if mask.window is not None and "sliding" in self.states else "full"
        slots: Slots = self.states[group]
        layer = self.context.number(group, self.layer)
        k, v = (None, None) if self.new is None else self.new
        context = self.context
        if context.window_table is not None:
            table = context.table if slots.window is None else context.window_table
            context = dataclasses.replace(context, table=table, window_table=None)
        run = _Attention(context, dict(context.kv_heads)[group], q.shape[-2], mask, scores)
        y, slots = run.with_cache(q, k, v, slots, layer)
        return y, dataclasses.replace(self, states={**self.states, group: slots}, new=None)

    def remember(self, group: str, x: jax.Array) -> tuple[jax.Array, Self]:
        """Store a vector of each token, and return those of all tokens.

        Args:
            group: name of a group of the cache, whose layers keep ``LatentVectors`` of one query head.
            x: vectors ``[B, T, D]``, or ``[B, D]`` for one token per sequence.

        Returns:
            The vectors ``[B, S, D]`` of the tokens at the positions from 0 on, in the dtype of ``x``, and the
            cache. Those of later positions have no meaning. Without a cache they are ``x`` itself.
        """
        if not self.states:
            return x, self
        slots: Slots = self.states[group]
        layer = self.context.number(group, self.layer)
        run = _Attention(self.context, 1, 1, Mask(), Scores(1.0))
        found, slots = run.store(x[:, None] if x.ndim == 2 else x, slots, layer)
        return found, dataclasses.replace(self, states={**self.states, group: slots})

    def read(self, group: str) -> dict[str, jax.Array] | None:
        """Return the layer's recurrent states ``[B, ...]`` in a group, by name; None without a cache."""
        if not self.states:
            return None
        arrays, layer = self.in_place(group)
        return Recurrent(arrays).at(layer)

    def replace(self, group: str, new: Mapping[str, jax.Array]) -> Self:
        """Return the cache with the states after the tokens, for those rows that have a token.

        Args:
            group: name of the group.
            new: states ``[B, ...]`` by name, of some or all names. Without a cache they are forgotten.
        """
        if not self.states:
            return self
        arrays, layer = self.in_place(group)
        counts = self.context.counts
        found = Recurrent(arrays).replaced(layer, new, None if counts is None else counts > 0)
        return self.with_states(group, found.arrays)

    def in_place(self, group: str) -> tuple[Mapping[str, jax.Array], Any]:
        """Return the recurrent states ``[L, B, ...]`` of all layers by name, and this layer's index among them.

        They are for kernels that update them in place, whose results :meth:`with_states` takes.
        """
        return self.states[group].arrays, self.context.number(group, self.layer)

    def with_states(self, group: str, arrays: Mapping[str, jax.Array]) -> Self:
        """Return the cache with other recurrent states of all layers, with the sharding that the cache has."""
        mesh = self.context.mesh
        # Else XLA would be free to change the sharding. Explicit axes are a part of the arrays' types.
        if not (
            mesh is None
            or AxisType.Explicit in mesh.axis_types
            or any(map(is_manual, mesh.axis_names))
        ):
            kind: States = dict(self.context.recurrent)[group]
            place = recurrent_place(mesh, next(iter(arrays.values())).shape[1])
            keep = jax.lax.with_sharding_constraint
            where = {one.name: kind.sharding(one, place) for one in kind.each}
            arrays = {name: keep(array, where[name]) for name, array in arrays.items()}
        states = {**self.states, group: Recurrent(arrays)}
        return dataclasses.replace(self, states=states)

    def _attend_own(self, q: jax.Array, mask: Mask, scores: Scores) -> jax.Array:
        """Attend to the written tokens alone."""
        assert self.new is not None
        k, v = self.new
        run = _Attention(self.context, k.shape[-2], q.shape[-2], mask, scores)
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :]
        cache = [a.swapaxes(1, 2)[None] for a in (k, v)]
        return run.attend(q, cache, 0, self.context.rows_of_positions, positions)

    def _attend_both_ways(self, q: jax.Array, mask: Mask, scores: Scores) -> jax.Array:
        if self.states:
            raise UserInputError(
                "this model's attention is bidirectional ('is_causal' is false, or 'use_bidirectional_attention'): "
                "it can embed texts (maxjax.embed), but not generate them"
            )
        assert self.new is not None
        bias, at = None, jnp.arange(q.shape[1], dtype=jnp.int32)[None, :]
        if scores.slopes is not None:
            bias = bias_of_distance(scores.slopes, at, at, scores.dtype)
        return both_ways(
            q, *self.new, self.context.real, mask.window, scale=scores.scale,
            soft_cap=scores.soft_cap, softmax_dtype=scores.dtype, bias=bias,
        )  # fmt: skip


def no_cache(length: int, mesh: Any = None, counts: jax.Array | None = None) -> LayerCache:
    """Return the cache of a call with ``length`` tokens per sequence and nothing before them."""
    starts = jnp.zeros(1, jnp.int32)
    ends = starts + (length if counts is None else counts)
    return LayerCache(
        ForwardContext(starts, counts, ends, None, None, length, False, 0, mesh, ()), {}
    )


def learned_rows(cache: LayerCache, count: int) -> jax.Array:
    """Return the row of each token in a table of ``count`` learned positions, ``[B or 1, T]``, or ``[B]`` for a step.

    It is the token's position. Positions beyond the table get the last row: NaN there would reach other tokens,
    because attention multiplies masked values by zero.

    Example:
        >>> learned_rows(no_cache(4), 3).tolist()
        [[0, 1, 2, 2]]
    """
    return jnp.minimum(cache.positions, count - 1)


def recurrent_place(mesh: Any, batch: int) -> Place:
    """Return the sharding of the recurrent states of ``batch`` sequences.

    Sequences are split over the mesh's batch axes, and heads or channels over its axis ``model``.
    """
    model, rows = axis_of(mesh, "model"), batch_axes(mesh, batch)
    over = () if model is None or model in rows else (model,)
    return Place(NamedSharding(mesh, spec_of([(), rows])), over=over)


class _Attention(NamedTuple):
    """One run of causal attention, with and without a KV cache.

    There are three cases: all tokens of a sequence at once without a cache, several tokens after those in
    the cache (prefill, also in chunks), and one token per sequence (a decode step, ``kernels.decode_attention``).
    The group "sliding" of a cache is rotating: token t is in slot t modulo the number of slots.
    """

    context: ForwardContext
    kv_heads: int
    heads: int
    mask: Mask
    scores: Scores

    def layout(self, batch: int) -> CacheLayout | None:
        """How a cache of ``batch`` sequences is split over the mesh; None without a mesh."""
        mesh = self.context.mesh
        return None if mesh is None else cache_layout(mesh, batch, self.heads, self.kv_heads)

    def _division_of(self, slots: Slots, batch: int) -> CacheLayout | None:
        """How a mesh divides sequences or slots of a cache; None if at most the heads are sharded."""
        if self.context.table is not None:
            rows = batch if self.context.parts > 1 else 1
            sizes = rows, self.heads, self.kv_heads, slots.capacity
            return page_layout(self.context.mesh, *sizes)
        is_whole = slots.keys.shape[1:3] == (batch, self.kv_heads)
        return None if is_whole else self.layout(batch)

    def with_cache(
        self, q: jax.Array, k: Any, v: Any, slots: Slots, layer: Any
    ) -> tuple[jax.Array, Slots]:
        """Write the tokens to the cache and attend to it; where ``k`` is None, another layer wrote them."""
        batch = q.shape[0]
        layout = self._division_of(slots, batch)
        if layout is None:
            run = self._with_slots if self.context.table is None else self._with_pages
            return run(q, k, v, slots, layer)
        if is_tapped("weights"):
            raise UserInputError(
                "attention weights cannot be captured with a KV cache that is sharded over a mesh: call "
                "model(ids) without a cache, or use one device"
            )
        queries, whole = layout.queries(q.ndim), PartitionSpec(layout.batch)
        context, by_row = self._by_row(layout, batch)
        cache = jax.tree.map(lambda a: layout.spec_of(a.ndim), slots)
        # None, of a layer without sinks or slopes or of one that shares its keys, has no spec.
        by_head = (self.scores.sinks, self.scores.slopes)
        of_heads = jax.tree.map(lambda _: PartitionSpec(), by_head)
        keys = None if k is None else whole
        chosen = self.scores.chosen
        of_chosen = None if chosen is None else whole
        specs = (by_row, of_heads, of_chosen, queries, keys, keys, cache, PartitionSpec())
        out = (layout.results(q.ndim), cache)
        run = on_mesh(
            functools.partial(self._on_part, layout), layout.mesh, specs, out, check_vma=False
        )
        return run(context, by_head, chosen, q, k, v, slots, jnp.asarray(layer, jnp.int32))

    def _with_pages(
        self, q: jax.Array, k: Any, v: Any, pool: Slots, layer: Any, part: CachePart | None = None
    ) -> tuple[jax.Array, Slots]:
        """:meth:`with_cache` for a pool of pages, or for the part of one on this device."""
        context, mask, scores, is_step = self.context, self.mask, self.scores, q.ndim == 3
        has_kernel = not mask.chunked and scores.chosen is None and not is_tapped("weights")
        has_slots = part is None or part.slots == 1
        if is_step and k is not None and has_kernel and has_slots:
            if context.is_ragged:
                pool = self._written_to_pages(k[:, None], v[:, None], pool, layer, part)
            layout = self.layout(q.shape[0]) if part is None else None
            division = self._pool_division(q.shape[0]) if part is None else None
            if self._heads_are_whole(layout):
                q = _resharded(q, 1, ())  # replicated, as the heads of the pool are
            tokens = context.starts if context.tokens is None else context.tokens
            y, pool = pool.decoded(
                q, k, v, tokens, layer=layer, scale=scores.scale, sliding_window=mask.window,
                soft_cap=scores.soft_cap, sinks=scores.sinks, slopes=scores.slopes, table=context.table,
                division=division, is_written=context.is_ragged,
            )  # fmt: skip
            return (y if part is None else part.results(y, None)), pool
        if is_step:  # a prefill of one token
            q, k, v = jax.tree.map(lambda a: a[:, None], (q, k, v))
        if k is not None:
            pool = self._written_to_pages(k, v, pool, layer, part)
        if is_step and has_kernel and part is not None and self._is_divided_evenly(part):
            y = self._decode_divided(q, pool, layer, part)
        else:
            cache, numbers = self._pages(pool, layer, part, self._seen_pages(pool))
            y = self.attend(q, cache, 0, context.rows_of_positions, numbers, part)
        return (y[:, 0] if is_step else y), pool

    def _is_divided_evenly(self, part: CachePart) -> bool:
        """Whether each device with the same KV heads has equally many tokens of a window."""
        return part.slots > 1 and (self.mask.window or 0) % part.slots == 0

    def _decode_divided(self, q: jax.Array, pool: Slots, layer: Any, part: CachePart) -> jax.Array:
        """Attend from the new token ``[B, 1, H, D]`` to those tokens of pages that are on this device."""
        scores, table = self.scores, self.context.table
        assert table is not None
        static = Divided(
            scores.scale, self.mask.window or 0, scores.soft_cap or 0.0, part.slots, pool.is_shared,
            jnp.dtype(DType.of(scores.dtype).np).name,
        )  # fmt: skip
        y, sums = divided_decode(
            q, jax.tree.leaves(pool), self.context.ends[:, 0], part.first, layer=layer, table=table,
            static=static,
        )  # fmt: skip
        return self._merged(y, sums, part)

    def _merged(self, y: jax.Array, sums: jax.Array, part: CachePart) -> jax.Array:
        """The result of attention to the tokens of all devices, from this device's with its log-sum-exps."""
        sinks = self.scores.sinks
        if sinks is not None:  # one more term of the softmax, which only one device adds
            lowest = jnp.finfo(sums.dtype).min
            added = jnp.where(part.first == 0, sinks.astype(sums.dtype), lowest)
            added = jnp.broadcast_to(added, sums.shape)
            y, sums = with_sinks(y, sums, added), jnp.logaddexp(sums, added)
        return part.results(y, sums)

    def _written_to_pages(
        self, k: jax.Array, v: jax.Array, pool: Slots, layer: Any, part: CachePart | None
    ) -> Slots:
        """The pool with the real tokens."""
        place, is_own = _own_slots(part, self.context.rows_of_positions, pool.size, False)
        for which in (self.context.real, is_own):
            place = place if which is None else jnp.where(which, place, -1)
        division = self._pool_division(k.shape[0]) if part is None else None
        return pool.written(layer, k, v, place, table=self.context.table, division=division)

    def _pool_division(self, batch: int) -> explicit.Division | None:
        """How a mesh shards the keys of a pool, each device of which has whole pages."""
        layout = self.layout(batch)
        if layout is None:
            return None
        over = layout.over if layout.group == 1 else ()
        return explicit.Division.of(layout.mesh, [(), (), over, (), ()])

    def _seen_pages(self, pool: Slots) -> int | None:
        """The number of pages that hold what the tokens of a call see; None: those of the whole text."""
        window = self.mask.window
        # Weights are captured of all positions.
        if window is None or is_tapped("weights"):
            return None
        return (window + self.context.length - 2) // pool.capacity + 2

    def _pages(
        self, pool: Slots, layer: Any, part: CachePart | None, count: int | None = None
    ) -> tuple[list[jax.Array], jax.Array]:
        """The pages of a layer as a cache ``[1, B, K, S, D]``, and the positions ``[B or 1, S]`` in it.

        Args:
            count: number of last pages of each text; None: all.
        """
        table, ends = self.context.table, self.context.ends
        assert table is not None
        width = table.shape[1]
        if count is None or count >= width:
            numbers = _numbers(part, width * pool.size)[None]
        else:
            first = jnp.clip(-(-ends // pool.capacity) - count, 0, width - count)  # [B, 1]
            places = first + jnp.arange(count, dtype=jnp.int32)[None]
            table = jnp.take_along_axis(table, places, axis=1)
            numbers = _numbers(part, count * pool.size)[None] + first * pool.capacity
        return own_pages(pool.arrays, layer, table, numbers, ends), numbers

    def _by_row(self, layout: CacheLayout, batch: int) -> tuple[ForwardContext, Any]:
        """The context without what differs between layers, and the PartitionSpecs of its arrays."""
        context = dataclasses.replace(self.context, numbers=None, features=None, axes=None)
        rows = PartitionSpec(layout.batch)
        spec = lambda a: rows if a.shape[0] == batch else PartitionSpec()
        return context, jax.tree.map(spec, context)

    def _on_part(
        self, layout: CacheLayout, context: ForwardContext, by_head: Any, chosen: Any,
        q: jax.Array, k: Any, v: Any, slots: Slots, layer: Any,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """:meth:`with_cache` for one device's shard of the cache."""
        part = CachePart(layout)
        sinks, slopes = jax.tree.map(part.of_heads, by_head)
        table = context.table
        if chosen is not None:
            size = slots.size * (1 if table is None else table.shape[1])
            chosen = jnp.take(part.rows(chosen), part.numbers(size), axis=-1)
        run = self._replace(
            context=jax.tree.map(part.rows, context),
            scores=self.scores._replace(sinks=sinks, slopes=slopes, chosen=chosen),
        )
        q, (k, v) = part.queries(q), jax.tree.map(part.keys, (k, v))
        attend = run._with_slots if table is None else run._with_pages
        return attend(q, k, v, slots, layer, part)

    def _with_slots(
        self, q: jax.Array, k: Any, v: Any, slots: Slots, layer: Any, part: CachePart | None = None
    ) -> tuple[jax.Array, Slots]:
        """:meth:`with_cache` for a cache, or for the part of one on this device: a decode step or a prefill."""
        is_step, rotating = q.ndim == 3, slots.window is not None
        has_slots = part is None or part.slots == 1
        # The kernel cannot mask the tokens before a chunk that does not begin at the first slot.
        has_kernel = (rotating or not self.mask.chunked) and self.scores.chosen is None
        if is_step and has_slots and has_kernel and not is_tapped("weights"):
            y, slots = self._decode(q, k, v, slots, layer, rotating, part)
            return (y if part is None else part.results(y, None)), slots
        if is_step:  # a prefill of one token
            q, k, v = jax.tree.map(lambda a: a[:, None], (q, k, v))
        if rotating and not is_step:
            return self._prefill_sliding(q, k, v, slots, layer, part)
        y, slots = self._prefill_full(q, k, v, slots, layer, part, rotating)
        return (y[:, 0] if is_step else y), slots

    def _decode(
        self, q: jax.Array, k: Any, v: Any, slots: Slots, layer: Any, rotating: bool,
        part: CachePart | None,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """Run ``kernels.decode_attention``: one token of each sequence."""
        context, mask, scores = self.context, self.mask, self.scores
        layout = self.layout(q.shape[0]) if part is None else None
        if self._heads_are_whole(layout):
            q = _resharded(q, 1, ())  # replicated, as the heads of the cache are
        if k is None:  # the kernel then writes the keys and values that are already in the cache
            k, v = slots.at(layer, context.starts, q.dtype)
        tokens = context.starts if context.tokens is None else context.tokens
        window = mask.window
        if mask.chunked and window is not None:
            # The slots of a rotating cache are those of one chunk, which begins at the first.
            tokens = jnp.where(tokens < 0, tokens, tokens % window)
            window, rotating = None, False
        return slots.decoded(
            q, k, v, tokens, layer=layer, scale=scores.scale, sliding_window=window,
            soft_cap=scores.soft_cap, rotating=rotating, sinks=scores.sinks, slopes=scores.slopes,
            division=self._division(layout, of_cache=True),
        )  # fmt: skip

    def _prefill_full(
        self, q: jax.Array, k: Any, v: Any, slots: Slots, layer: Any, part: CachePart | None,
        rotating: bool,
    ) -> tuple[jax.Array, Slots]:  # fmt: skip
        """Write the tokens to the cache, then attend to it.

        Args:
            part: the device's shard of a cache that is sharded; None: the cache is not.
            rotating: whether the cache rotates; then there is one token, which overwrites a token
                that it does not attend to.
        """
        context, size = self.context, slots.size
        if k is not None:
            slots = self._written(k, v, slots, layer, part, rotating)
        positions = context.rows_of_positions
        if rotating:
            key_positions = _slot_positions(context.ends, size, part)
        else:
            key_positions = _numbers(part, size)[None, :]
        width = context.capacity if rotating else None
        return self.attend(q, slots.arrays, layer, positions, key_positions, part, width), slots

    def _written(
        self, k: jax.Array, v: jax.Array, slots: Slots, layer: Any, part: CachePart | None,
        rotating: bool = False,
    ) -> Slots:  # fmt: skip
        """Write the real tokens to the cache, or to the device's shard of it."""
        size, real = slots.size, self.context.real
        slot, is_own = _own_slots(part, self.context.rows_of_positions, size, rotating)
        if is_own is not None:
            real = is_own if real is None else real & is_own
        slot = slot if real is None else jnp.where(real, slot, size)
        # Where slots are sharded, the slots of one device are not consecutive.
        in_turn = not rotating and is_own is None
        layout = self.layout(k.shape[0]) if part is None else None
        division = self._division(layout, of_cache=True)
        return slots.written(layer, k, v, slot, consecutive=in_turn, division=division)

    def store(self, x: jax.Array, slots: Slots, layer: Any) -> tuple[jax.Array, Slots]:
        """Write vectors ``[B, T, D]`` to the cache, and return those of all positions, ``[B, S, D]``."""
        batch, k = x.shape[0], x[:, :, None, :]
        layout = self._division_of(slots, batch)
        if layout is None:
            found, slots = self._stored(k, slots, layer, x.dtype)
        else:
            context, by_row = self._by_row(layout, batch)
            cache = jax.tree.map(lambda a: layout.spec_of(a.ndim), slots)

            def on_part(context: ForwardContext, k: jax.Array, slots: Slots, layer: Any) -> Any:
                part = CachePart(layout)
                run = self._replace(context=jax.tree.map(part.rows, context))
                return run._stored(part.keys(k), slots, layer, x.dtype, part)

            specs = (by_row, PartitionSpec(layout.batch), cache, PartitionSpec())
            out = (PartitionSpec(*layout.spec_of(5)[1:]), cache)
            run = on_mesh(on_part, layout.mesh, specs, out, check_vma=False)
            # [B / rows, rows · slots, S / slots, D]
            found, slots = run(context, k, slots, jnp.asarray(layer, jnp.int32))
        if layout is None:
            return found[:, 0], slots
        mesh = layout.mesh if explicit.mesh_of(found) is not None else None
        joined = explicit.automatic(layout.joined, mesh, [layout.batch, (), ()])
        return joined(found), slots

    def _stored(
        self, k: jax.Array, slots: Slots, layer: Any, dtype: Any, part: CachePart | None = None
    ) -> tuple[jax.Array, Slots]:
        """Write vectors ``[B, T, 1, D]``, and return those of the cache ``[B, 1, S, D]``, and the cache."""
        if self.context.table is None:
            slots = self._written(k, k, slots, layer, part)
            return slots.layer_slots(layer).floats(dtype)[0][0], slots
        slots = self._written_to_pages(k, k, slots, layer, part)
        cache, _ = self._pages(slots, layer, part)
        return cached_rows(cache, 0, dtype)[0].swapaxes(1, 2), slots

    def _prefill_sliding(
        self, q: jax.Array, k: Any, v: Any, slots: Slots, layer: Any, part: CachePart | None
    ) -> tuple[jax.Array, Slots]:
        """Attend to a rotating cache and to the new tokens, then store the last of the new tokens."""
        context, size = self.context, slots.size
        positions, starts = context.rows_of_positions, context.starts[:, None]
        old = slots.layer_slots(layer)
        new, new_positions = slots.rounded(k, v), positions  # rounded as the cache stores them
        if part is not None and part.slots > 1:
            # Each new token is a key on one device only.
            new_positions = jnp.where(positions % part.slots == part.first, positions, NO_KEY)
        keys = (
            explicit.concatenate([a.swapaxes(1, 2), b[0]], 2)[None]
            for a, b in zip(new, old.floats(q.dtype), strict=True)
        )
        key_positions = _slot_positions(starts, size, part)
        key_positions = explicit.concatenate([new_positions, key_positions], 1)
        y = self.attend(q, list(keys), 0, positions, key_positions, part, context.capacity)
        last = _slot_positions(context.ends, size, part)
        source = jnp.where(last == NO_KEY, -1, last - starts)
        return y, slots.replaced(layer, old, k, v, source)

    def attend(
        self, q: jax.Array, cache: Sequence[jax.Array], layer: Any, positions: jax.Array,
        key_positions: jax.Array, part: CachePart | None = None, width: int | None = None,
    ) -> jax.Array:  # fmt: skip
        """Attend from queries at ``positions`` to keys at ``key_positions``, each ``[B or 1, tokens]``."""
        if self.mask.sees_blocks and self.context.blocks is not None:
            run, positions = self._with_blocks(positions, key_positions)
            return run.attend(q, cache, layer, positions, key_positions, part, width)
        mask, scores = self.mask, self.scores
        layout = self.layout(q.shape[0]) if part is None else None
        options: dict[str, Any] = {
            "scale": scores.scale, "sliding_window": mask.window, "chunked": mask.chunked,
            "soft_cap": scores.soft_cap, "softmax_dtype": scores.dtype, "slopes": scores.slopes,
            "chosen": scores.chosen,
        }  # fmt: skip
        where, sinks = (q, cache, layer, positions, key_positions), scores.sinks
        # KV heads that cannot be split are replicated, and repeated for each query head.
        repeats = self.heads // self.kv_heads if self._heads_are_whole(layout) else 1
        if part is None and is_tapped("weights"):
            return self._attend_by_weights(*where, width, repeats)
        if part is not None and part.slots > 1:
            return self._merged(*partial_attention(*where, **options), part)
        division = self._division(layout)
        y = causal_attention(
            *where, **options, sinks=sinks, repeats=repeats,
            strided=division is not None and bool(division.entries[1]), division=division,
        )  # fmt: skip
        return y if part is None else part.results(y, None)

    def _with_blocks(
        self, positions: jax.Array, key_positions: jax.Array
    ) -> tuple[_Attention, jax.Array]:
        """Attention in which a token of a block sees what the block's last token sees, and positions for it.

        A window begins before the token itself, or with the block if that is earlier and the mask does not cut blocks.
        """
        assert self.context.blocks is not None
        window, scores = self.mask.window, self.scores
        first, last = self.context.blocks[:, 0], self.context.blocks[:, 1]
        if window is not None:
            begin = positions - (window - 1)
            first = begin if self.mask.cuts_blocks else jnp.minimum(first, begin)
            sees = key_positions[:, None, :] >= first[..., None]  # [B, T, S]
            scores = scores._replace(chosen=sees)
        return self._replace(mask=Mask(), scores=scores), last

    def _attend_by_weights(
        self, q: jax.Array, cache: Sequence[jax.Array], layer: Any, positions: jax.Array,
        key_positions: jax.Array, width: int | None, repeats: int,
    ) -> jax.Array:  # fmt: skip
        """:meth:`attend` by the definition of attention, which taps the weights ``[B, H, T, S]``.

        S is the number of key positions, from 0 on: of the tokens without a cache, else of the slots.
        Keys of a rotating cache are first put in the order of ``width`` positions.
        """
        scores, window = self.scores, self.mask.window
        keys, values = cached_rows(cache, layer, q.dtype, repeats)
        attending = Attending(
            scores.scale, window, scores.soft_cap, scores.dtype, chunked=self.mask.chunked
        )
        sees = attending.sees(positions[:, :, None], key_positions[:, None, :])
        if scores.chosen is not None:
            sees = sees & scores.chosen
        bias = None
        if scores.slopes is not None:
            bias = bias_of_distance(scores.slopes, positions, key_positions, scores.dtype)
        weights = attention_weights(
            q, keys, jnp.broadcast_to(sees, (q.shape[0], *sees.shape[1:])),
            scale=scores.scale, soft_cap=scores.soft_cap, softmax_dtype=scores.dtype,
            sinks=scores.sinks, bias=bias,
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

    def _division(
        self, layout: CacheLayout | None, of_cache: bool = False
    ) -> explicit.Division | None:
        """How a mesh shards the queries ``[B, T, H, D]``, or a cache; None without a mesh."""
        if layout is None:
            return None
        if of_cache:
            return explicit.Division.of(layout.mesh, [(), layout.batch, layout.over, (), ()])
        axis = axis_of(layout.mesh, "seq")
        tokens = () if axis is None or layout.mesh.shape[axis] == 1 else (axis,)
        heads = layout.over if layout.splits_queries else ()
        return explicit.Division.of(layout.mesh, [layout.batch, tokens, heads, ()])

    def _heads_are_whole(self, layout: CacheLayout | None) -> bool:
        """Whether a mesh splits the query heads but cannot split the KV heads, which are replicated."""
        return layout is not None and layout.splits_queries and layout.group > 1


def scores(
    q: jax.Array, scale: float | None, soft_cap: float | None, sinks: Any, slopes: Any,
    chosen: jax.Array | None = None,
) -> Scores:  # fmt: skip
    """Return the Scores of queries ``[..., D]``; ``scale`` is ``1/√D`` if it is None."""
    factor: float = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dtype = promote(q.dtype, DType.float32)
    sinks, slopes = (None if a is None else jnp.asarray(a) for a in (sinks, slopes))
    return Scores(factor, soft_cap, sinks, slopes, chosen, dtype)


def _own_slots(
    part: CachePart | None, positions: jax.Array, size: int, rotating: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return the slots ``[B or 1, T]`` of the tokens on this device, and which tokens it holds (None: all)."""
    parts = 1 if part is None else part.slots
    slot = positions % (size * parts) if rotating else positions
    if part is None or parts == 1:
        return slot, None
    return slot // parts, slot % parts == part.first


def _numbers(part: CachePart | None, size: int) -> jax.Array:
    """Return the global indices ``[S]`` of the slots on this device."""
    return jnp.arange(size, dtype=jnp.int32) if part is None else part.numbers(size)


def _slot_positions(after: jax.Array, size: int, part: CachePart | None = None) -> jax.Array:
    """Return the position in each slot ``[B, S]`` of a rotating cache after ``after`` ``[B, 1]`` tokens.

    The position of an empty slot is ``NO_KEY``.
    """
    parts = 1 if part is None else part.slots
    last = after - 1
    found = last - (last - _numbers(part, size)[None, :]) % (size * parts)
    return jnp.where(found < 0, NO_KEY, found)


def _resharded(array: jax.Array, axis: int, over: explicit.Entry) -> jax.Array:
    """Return ``array`` with ``axis`` split over the mesh axes ``over``, on a mesh with Explicit axes.

    Elsewhere it is returned unchanged and XLA chooses its sharding.
    """
    mesh = explicit.mesh_of(array)
    if mesh is None:
        return array
    spec = explicit.entries(array)
    spec[axis] = over
    return jax.sharding.reshard(array, explicit.sharding(mesh, spec))
