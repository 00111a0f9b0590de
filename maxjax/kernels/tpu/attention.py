"""Causal attention of many queries on TPUs: the forward pass of ``blocked_attention`` in Mosaic.

A program computes a tile of queries of the heads that share a KV head (T. Dao, arXiv:2307.08691).
Keys and values are read in place, in a cache of all layers, in the cache's dtype. Positions of
queries and keys are operands, so one kernel serves prompts without a cache, prefixes that differ in
length between sequences, rotating caches and windows. Blocks of keys that no query of a tile may
see are not read.

JAX's own kernel for TPUs (``splash_attention``) is compiled for one mask and one offset of the queries,
and takes one layer's keys and values, which would have to be copied out of the cache.

Shapes: n blocks of C queries, B sequences, K KV heads, G query heads of each, S keys, head dimension D.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..key_ranges import NO_KEY, NO_QUERY, key_ranges
from ..pallas import attention_lacks, result
from .mosaic import LANES

_FLOATS = (np.dtype("float32"), np.dtype(jnp.bfloat16))
_LOWEST = float(np.finfo(np.float32).min)
# The ranges of key blocks of all tiles are in the memory for scalars, which has 1 MiB.
_MOST_TILES = 1 << 16


class AttentionTiles(NamedTuple):
    """Sizes that the kernel is compiled for.

    Attributes:
        group: number of query heads of a program, which share a KV head.
        rows: number of queries of each head.
        block: number of keys that a program reads at a time.
        turned: whether keys and values are read transposed, as ``[D, S]``.
    """

    group: int
    rows: int
    block: int
    turned: bool


def lacks(dtype: Any, q: Any, keys: Any) -> str:
    """Why a TPU cannot compute attention of these operands, which are on one device; "" if it can.

    Args:
        dtype: dtype of scores and sums.
        q: queries ``[n, B, K, G, C, D]``.
        keys: keys of all layers ``[L, B, K, S, D]``.

    Example:
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float16)
        >>> lacks(jnp.float32, shape(1, 1, 2, 4, 64, 128), shape(1, 1, 2, 64, 128))
        'queries are float16 and keys float16'
    """
    if why := attention_lacks(dtype, q, keys, _FLOATS):
        return why
    count, batch, _, group, queries, _ = q.shape
    many = count * batch * -(-queries // tiles(group, queries, *keys.shape[3:]).rows)
    return f"there are {many:,} tiles of queries, at most {_MOST_TILES:,}" * (many > _MOST_TILES)


def tiles(group: int, queries: int, keys: int, width: int) -> AttentionTiles:
    """The tile sizes for ``group`` query heads of a KV head, and for keys of head dimension ``width``.

    Example:
        >>> tiles(4, 512, 8192, 128)
        AttentionTiles(group=4, rows=128, block=512, turned=False)
        >>> tiles(1, 40, 40, 64)
        AttentionTiles(group=1, rows=128, block=128, turned=True)
    """
    heads = max(n for n in range(1, 5) if group % n == 0)
    rows = {1: 4, 2: 2, 3: 1, 4: 1}[heads] * LANES
    whole = lambda n: -(-n // LANES) * LANES
    # For other head dimensions XLA lays out the cache with the slots last, so that no row is padded. If a
    # kernel reads another layout, XLA copies the whole cache for it.
    turned = width % LANES != 0
    return AttentionTiles(heads, min(rows, whole(queries)), min(512, whole(keys)), turned)


def kernel(
    attending: Any,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    at: jax.Array,
    key_positions: jax.Array,
    *scales: jax.Array,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The results ``[n, B, K, G, C, D]``, and the log-sum-exp of each query's scores ``[n, B, K, G, C]``.

    Args:
        attending: an ``Attending`` without repeats.
        q: queries ``[n, B, K, G, C, D]``.
        keys, values, scales: a cache ``[L, B, K, S, D]``, and for int8 its scales ``[L, B, K, S]``.
        layer: index of the layer.
        at: positions of the queries ``[n, B, C]``, ``NO_QUERY`` for padding.
        key_positions: positions of the keys ``[B, S]``, ``NO_KEY`` for a key that nobody sees.
        interpret: argument of ``pallas_call`` that runs the kernel on another platform.
    """
    count, batch, kv_heads, group, queries, _ = q.shape
    size = tiles(group, queries, *keys.shape[3:])
    pad = -queries % size.rows
    parts = (queries + pad) // size.rows
    q = jnp.pad(q, (*[(0, 0)] * 4, (0, pad), (0, 0)))
    at = jnp.pad(at, ((0, 0), (0, 0), (0, pad)), constant_values=NO_QUERY)
    beyond = (0, -key_positions.shape[1] % size.block)
    key_positions = jnp.pad(key_positions, ((0, 0), beyond), constant_values=NO_KEY)
    low, high = key_ranges(attending, size.rows, size.block, at, key_positions)
    low = jnp.minimum(low, high)
    # The last position that each query sees, and with a window also the first.
    seen = [at] if attending.window is None else [at, attending.first_seen(at)]
    seen = jnp.stack(seen, axis=2).reshape(count, batch, len(seen), parts, size.rows)
    if size.turned:
        keys, values = keys.swapaxes(3, 4), values.swapaxes(3, 4)
    # One layer's scales are copied out of the stack, as rows: they are small compared with the keys.
    of_layer = [jax.lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in scales]
    rows = [jnp.pad(a, ((0, 0), (0, 0), beyond))[:, :, None] for a in of_layer]
    out, sums = _call(attending, size, interpret)(
        layer.reshape(1), low.reshape(-1), high.reshape(-1), seen.swapaxes(2, 3),
        key_positions[:, None], q, keys, values, *rows,
    )  # fmt: skip
    sums = sums.reshape(count, batch, kv_heads, group // size.group, parts, size.group, size.rows)
    sums = sums.swapaxes(4, 5).reshape(q.shape[:-1])
    return out[..., :queries, :], sums[..., :queries]


@functools.lru_cache(maxsize=256)
def _call(attending: Any, size: AttentionTiles, interpret: Any) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import tpu

    group, rows, block, turned = size

    def call(layer: Any, low: Any, high: Any, seen: Any, key_at: Any, q: Any, *arrays: Any) -> Any:
        caches = list(arrays)
        count, batch, kv_heads, heads, queries, width = q.shape
        parts = queries // rows
        slots = caches[0].shape[4 if turned else 3]

        def number(b: Any, t: Any, j: Any, low: Any, high: Any) -> Any:
            """The index of the j-th block of keys; after the last one it stays, so that nothing is read."""
            tile = t * batch + b
            return jnp.maximum(jnp.minimum(low[tile] + j, high[tile] - 1), 0)

        def of_queries(b: Any, k: Any, g: Any, t: Any, j: Any, *_: Any) -> Any:
            return jax.lax.div(t, parts), b, k, g, jax.lax.rem(t, parts), 0

        def of_positions(b: Any, k: Any, g: Any, t: Any, j: Any, *_: Any) -> Any:
            return jax.lax.div(t, parts), b, jax.lax.rem(t, parts), 0, 0

        def of_sums(b: Any, k: Any, g: Any, t: Any, j: Any, *_: Any) -> Any:
            return jax.lax.div(t, parts), b, k, g, jax.lax.rem(t, parts), 0, 0

        def of_keys(b: Any, k: Any, g: Any, t: Any, j: Any, layer: Any, *ranges: Any) -> Any:
            place = (number(b, t, j, *ranges), 0)
            return layer[0], b, k, *(place[::-1] if turned else place)

        def of_key_positions(b: Any, k: Any, g: Any, t: Any, j: Any, _: Any, *ranges: Any) -> Any:
            return b, 0, number(b, t, j, *ranges)

        def of_scales(b: Any, k: Any, g: Any, t: Any, j: Any, _: Any, *ranges: Any) -> Any:
            return b, k, 0, number(b, t, j, *ranges)

        one = pl.squeezed
        queries_spec = pl.BlockSpec((one, one, one, group, rows, width), of_queries)
        shape = (width, block) if turned else (block, width)
        keys_spec = pl.BlockSpec((one, one, one, *shape), of_keys)
        scales_spec = pl.BlockSpec((one, one, 1, block), of_scales)
        sums_spec = pl.BlockSpec((one, one, one, one, one, 1, group * rows), of_sums)
        sums = result((count, batch, kv_heads, heads // group, parts, 1, group * rows), q)
        # As many steps as the tile with the most blocks needs; at least one, which writes the result.
        steps = jnp.maximum(jnp.max(high - low), 1)
        # Otherwise XLA may copy a small cache, with all layers, to VMEM.
        if not interpret:
            caches[:2] = [tpu.with_memory_space_constraint(a, tpu.HBM) for a in caches[:2]]
        float_rows = lambda n: tpu.VMEM((group * rows, n), jnp.float32)
        return pl.pallas_call(
            functools.partial(_program, attending, size, batch, slots),
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(batch, kv_heads, heads // group, count * parts, steps),
                in_specs=[
                    pl.BlockSpec((one, one, one, *seen.shape[3:]), of_positions),
                    pl.BlockSpec((one, 1, block), of_key_positions),
                    queries_spec, keys_spec, keys_spec, *[scales_spec] * (len(caches) - 2),
                ],
                out_specs=[queries_spec, sums_spec],
                scratch_shapes=[
                    tpu.VMEM((seen.shape[3], rows, LANES), jnp.int32),
                    float_rows(LANES), float_rows(LANES), float_rows(width),
                ],
            ),
            out_shape=(result(q.shape, q, q.dtype), sums),
            compiler_params=tpu.CompilerParams(
                dimension_semantics=("parallel",) * 4 + ("arbitrary",)
            ),
            interpret=interpret,
            name="maxjax_attention",
        )(layer, low, high, seen, key_at, q, *caches)  # fmt: skip

    return call


def _program(
    attending: Any, size: AttentionTiles, batch: int, slots: int,
    layer: Any, low: Any, high: Any, seen: Any, key_at: Any, q: Any, keys: Any, values: Any, *refs: Any,
) -> None:  # fmt: skip
    """One program: a block of keys for a tile of queries of the heads of one sequence."""
    from jax.experimental import pallas as pl

    *scales, out, sums, positions, largest, total, mixed = refs
    group, rows, block, turned = size
    row, step, width = pl.program_id(0), pl.program_id(4), q.shape[-1]
    tile = pl.program_id(3) * batch + row
    number = low[tile] + step

    @pl.when(step == 0)
    def _() -> None:
        largest[...] = jnp.full(largest.shape, _LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)
        for i in range(positions.shape[0]):  # from a row to columns
            positions[i] = jnp.broadcast_to(seen[i : i + 1], (LANES, rows)).T

    @pl.when(number < high[tile])
    def _() -> None:
        numbers = q[...].reshape(group * rows, width)
        scores = _dot(
            numbers, keys[...].astype(q.dtype), 0 if turned else 1
        )  # [group · rows, block]
        if scales:
            scores = scores * scales[0][...]
        scores = scores * jnp.float32(attending.scale)
        if attending.soft_cap is not None:
            cap = jnp.float32(attending.soft_cap)
            scores = cap * jnp.tanh(scores / cap)
        found = key_at[...]  # [1, block]
        sees = found <= _lanes(positions[0], block)
        if attending.window is not None:
            sees = sees & (found >= _lanes(positions[1], block))
        sees = jnp.broadcast_to(sees[None], (group, rows, block))
        scores = jnp.where(sees, scores.reshape(sees.shape), _LOWEST).reshape(scores.shape)
        old = largest[...]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - _lanes(new, block))
        kept = jnp.exp(old - new)
        largest[...] = new
        total[...] = total[...] * kept + jnp.sum(weights, axis=1, keepdims=True)
        if scales:
            weights = weights * scales[1][...]
        read = values[...].astype(q.dtype)
        if slots % block:  # what is read beyond the cache may be anything
            slot = number * block + jax.lax.broadcasted_iota(
                jnp.int32, read.shape, 1 if turned else 0
            )
            read = jnp.where(slot < slots, read, jnp.zeros_like(read))
        more = _dot(weights.astype(q.dtype), read, 1 if turned else 0)
        mixed[...] = mixed[...] * _lanes(kept, width) + more

    @pl.when(step == pl.num_programs(4) - 1)
    def _() -> None:
        # The total is 0 if no block was visited: then the queries see no key.
        sum_ = jnp.where(total[...] == 0, 1, total[...])
        found = mixed[...] / _lanes(sum_, width)
        out[...] = found.reshape(out.shape).astype(out.dtype)
        sums[...] = (largest[...] + jnp.log(sum_)).T[:1]


def _lanes(column: jax.Array, width: int) -> jax.Array:
    """A column, which ``[rows, 128]`` holds 128 times, as ``[rows, width]``."""
    if width <= LANES:
        return column[:, :width]
    return jnp.tile(column, (1, -(-width // LANES)))[:, :width]


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """The matmul of ``a`` with ``b``, contracted over an axis of ``b`` and summed in float32."""
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )
