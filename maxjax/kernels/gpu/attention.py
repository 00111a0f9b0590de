"""Causal attention of many queries on NVIDIA GPUs: the forward pass of ``blocked_attention`` in Triton.

A program computes a tile of queries of one head (T. Dao, arXiv:2307.08691). Keys and values are read
in place, in a cache of all layers, in the cache's dtype. Positions of queries and keys are
operands, so one kernel serves prompts without a cache, prefixes that differ in length between
sequences, rotating caches and windows. Blocks of keys that no query of a tile may see are not read.

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
from .triton import FLOATS, dot, power, too_many

_LOWEST = float(np.finfo(np.float32).min)


class AttentionTiles(NamedTuple):
    """Sizes that the kernel is compiled for.

    Attributes:
        rows: number of queries of a program.
        block: number of keys that a program reads at a time.
        width: D, rounded up to a power of two.
        warps: number of warps of a program.
        stages: number of blocks that are being read at a time.
    """

    rows: int
    block: int
    width: int
    warps: int
    stages: int


def lacks(dtype: Any, q: Any, keys: Any) -> str:
    """Why a GPU cannot compute attention of these operands, which are on one device; "" if it can.

    Args:
        dtype: dtype of scores and sums.
        q: queries ``[n, B, K, G, C, D]``.
        keys: keys of all layers ``[L, B, K, S, D]``.

    Example:
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
        >>> lacks(jnp.float64, shape(1, 1, 2, 4, 64, 128), shape(1, 1, 2, 64, 128))
        'scores are in float64'
    """
    return attention_lacks(dtype, q, keys, FLOATS) or too_many(keys)


def tiles(queries: int, width: int, wide: bool) -> AttentionTiles:
    """The tile sizes for a number of queries of head dimension ``width``; ``wide``: they are float32.

    Example:
        >>> tiles(512, 128, False)
        AttentionTiles(rows=64, block=64, width=128, warps=4, stages=3)
        >>> tiles(20, 80, False)
        AttentionTiles(rows=32, block=64, width=128, warps=4, stages=3)
    """
    columns = power(width)
    # Large float32 matmuls in full precision take long to compile.
    rows = min(64 // (2 if wide and columns > 128 else 1), power(queries))
    block = 32 if wide and columns > 64 else 64
    return AttentionTiles(rows, block, columns, 4, 2 if wide or columns > 128 else 3)


def kernel(
    attending: Any,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    at: jax.Array,
    key_positions: jax.Array,
    *scales: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The results ``[n, B, K, G, C, D]``, and the log-sum-exp of each query's scores ``[n, B, K, G, C]``.

    Args:
        attending: an ``Attending`` without repeats.
        q: queries ``[n, B, K, G, C, D]``.
        keys, values, scales: a cache ``[L, B, K, S, D]``, and for int8 its scales ``[L, B, K, S]``.
        layer: index of the layer.
        at: positions of the queries ``[n, B, C]``, ``NO_QUERY`` for padding.
        key_positions: positions of the keys ``[B, S]``, ``NO_KEY`` for a key that nobody sees.
        interpret: whether to run the kernel's operations one by one, on any platform.
    """
    size = tiles(q.shape[4], q.shape[5], q.dtype == jnp.float32)
    low, high = key_ranges(attending, size.rows, size.block, at, key_positions)
    call = _call(attending, size, interpret)
    return call(layer.reshape(1), low, high, at, key_positions, q, keys, values, *scales)


@functools.lru_cache(maxsize=256)
def _call(attending: Any, size: AttentionTiles, interpret: bool) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    def call(layer: Any, low: Any, high: Any, at: Any, key_at: Any, q: Any, *caches: Any) -> Any:
        count, batch, kv_heads, group, queries, width = q.shape
        parts = -(-queries // size.rows)
        return pl.pallas_call(
            functools.partial(_program, attending, size, parts, group, q.shape, caches[0].shape[3]),
            grid=(count * parts, kv_heads * group, batch),
            out_shape=(result(q.shape, q, q.dtype), result(q.shape[:-1], q)),
            compiler_params=triton.CompilerParams(num_warps=size.warps, num_stages=size.stages),
            interpret=interpret,
            name="maxjax_attention",
        )(layer, low, high, at, key_at, q, *caches)

    return call


def _program(
    attending: Any, size: AttentionTiles, parts: int, group: int, shape: Any, slots: int,
    layer: Any, low: Any, high: Any, at: Any, key_at: Any, q: Any, keys: Any, values: Any, *refs: Any,
) -> None:  # fmt: skip
    """One program: a tile of queries of one head of one sequence."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *scales, out, sums = refs
    *_, queries, width = shape
    tile, head, row = (pl.program_id(axis) for axis in range(3))
    number, part = jax.lax.div(tile, parts), jax.lax.rem(tile, parts)
    kv_head, member = jax.lax.div(head, group), jax.lax.rem(head, group)
    of_layer = layer[0]
    index = part * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    columns = jnp.arange(size.width, dtype=jnp.int32)
    inside = index < queries
    # No mask of columns where there is no padding, so that loads stay wide.
    padded = (columns < width)[None, :] if size.width != width else True
    own = (number, row, kv_head, member)
    numbers = triton.load(
        q.at[*own, index[:, None], columns[None, :]], mask=inside[:, None] & padded, other=0
    )
    positions = triton.load(at.at[number, row, index], mask=inside, other=NO_QUERY)

    def block(i: Any, state: Any) -> Any:
        largest, total, mixed = state
        slot = i * size.block + jnp.arange(size.block, dtype=jnp.int32)
        there = slot < slots

        def read(array: Any, scale: Any) -> Any:
            place = array.at[of_layer, row, kv_head, slot[:, None], columns[None, :]]
            found = triton.load(place, mask=there[:, None] & padded, other=0)
            if scale is not None:
                factor = triton.load(scale.at[of_layer, row, kv_head, slot], mask=there, other=0)
                found = found.astype(jnp.float32) * factor[:, None]
            return found.astype(q.dtype)  # [block, width]

        found = triton.load(key_at.at[row, slot], mask=there, other=NO_KEY)
        scores = dot(numbers, read(keys, scales[0] if scales else None).T)
        scores = scores * jnp.float32(attending.scale)
        if attending.soft_cap is not None:
            cap = jnp.float32(attending.soft_cap)
            scores = cap * jnp.tanh(scores / cap)
        sees = attending.sees(positions[:, None], found[None, :])
        scores = jnp.where(sees, scores, _LOWEST)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new[:, None])
        kept = jnp.exp(largest - new)
        total = total * kept + jnp.sum(weights, axis=1)
        more = dot(weights.astype(q.dtype), read(values, scales[1] if scales else None))
        return new, total, mixed * kept[:, None] + more

    state = (
        jnp.full((size.rows,), _LOWEST, jnp.float32),
        jnp.zeros((size.rows,), jnp.float32),
        jnp.zeros((size.rows, size.width), jnp.float32),
    )
    begin, end = low[number, part, row], high[number, part, row]
    largest, total, mixed = jax.lax.fori_loop(begin, end, block, state)
    total = jnp.where(total == 0, 1, total)  # no block was visited: the queries see no key
    place = out.at[*own, index[:, None], columns[None, :]]
    mixed = mixed / total[:, None]
    triton.store(place, mixed.astype(out.dtype), mask=inside[:, None] & padded)
    triton.store(sums.at[*own, index], largest + jnp.log(total), mask=inside)
