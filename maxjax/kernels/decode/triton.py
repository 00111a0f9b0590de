"""Decode attention on NVIDIA GPUs: a kernel in Pallas for Triton.

The kernel takes the caches of all layers and the index of a layer, so that no layer is copied out.
Of each sequence it reads only the slots that the new token attends to, in the cache's dtype. The
slots of a sequence are divided between several programs (flash decoding, T. Dao et al., 2023), whose
results are merged by their log-sum-exps, so that one sequence keeps the whole GPU busy.

Shapes: L layers, B sequences, K KV heads, G query heads of each, S slots of the cache, head_dim D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..gpu.triton import FLOATS, dot, power, too_many
from ..pallas import result
from .step import Options, Written, mean, write_token, written

# This many programs fill a GPU: four for each of the 132 multiprocessors of an H100 or H200.
PROGRAMS = 528
# The largest head dimension, and the most elements of queries and of sums that a program keeps in registers.
WIDEST, MOST_NUMBERS = 640, 1 << 14
# Up to this width a head is read as one array, padded to a power of two; wider heads are read in two parts.
_WHOLE = 256
# Bytes of the keys that a program reads at a time, at most: a GPU's shared memory holds several such blocks.
_BLOCK_BYTES = 40 << 10
# The index of the slopes among the operands after the keys.
_SLOPES = 6
_LOWEST = float(np.finfo(np.float32).min)


class DecodeTiles(NamedTuple):
    """Sizes that the kernel is compiled for.

    Attributes:
        rows: number of query heads of a program, a power of two.
        parts: number of programs between which the G query heads are divided.
        widths: one or two powers of two, whose sum is at least D: the parts that a head is read in.
        block: number of slots that a program reads at a time.
        splits: number of programs between which the slots of one KV head of one sequence are divided.
    """

    rows: int
    parts: int
    widths: tuple[int, ...]
    block: int
    splits: int

    def columns(self, width: int) -> list[tuple[int, int, bool]]:
        """For each part of a head: its first element, its size, and whether it ends past the end of the head."""
        found, start = [], 0
        for size in self.widths:
            found.append((start, size, start + size > width))
            start += size
        return found


def lacks(static: Options, q: Any, k: Any, v: Any, keys: Any, *rest: Any) -> str:
    """Why a GPU cannot run the kernel on these operands, which are on one device; "" if it can.

    Example:
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
        >>> options = Options(1.0, 0, 0.0, False, False)
        >>> one = shape(1, 2, 768)
        >>> lacks(options, shape(1, 2, 4, 768), one, one, shape(1, 2, 64, 768))
        'heads are 768 wide, at most 640'
    """
    width = q.shape[3]
    if len(rest) > _SLOPES and rest[_SLOPES].size:
        return "scores have a bias of the distance"
    if width > WIDEST:
        return f"heads are {width} wide, at most {WIDEST}"
    if q.dtype not in FLOATS or keys.dtype not in (*FLOATS, np.dtype("int8")):
        return f"queries are {q.dtype} and the cache is {keys.dtype}"
    return too_many(keys)


def kernel(
    static: Options, *operands: Any, interpret: bool = False, table: Any = None,
    write: Callable[..., list[jax.Array]] = write_token,
) -> list[jax.Array]:  # fmt: skip
    """Decode attention of the operands on one device.

    Args:
        static: the static arguments.
        operands: the same as for ``decode_attention.definition``.
        interpret: whether to run the kernel's operations one by one, on any platform.
        table: the pages of each sequence, int32 ``[B, M]``, if the caches are pools of pages.
        write: writes the new tokens, as ``write_token`` does.
    """
    q, lengths, sinks = operands[0], operands[6], operands[9]
    step, top, total, mixed = sums(static, *operands, interpret=interpret, table=table, write=write)
    return step.answer(mean(top, total, mixed, sinks), lengths, q.dtype)


def sums(
    static: Options, *operands: Any, interpret: bool = False, table: Any = None,
    write: Callable[..., list[jax.Array]] = write_token,
) -> tuple[Written, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The step after the write, and what :func:`~.step.mean` takes; arguments as for :func:`kernel`."""
    q, _, _, keys, values, layer, lengths, *_ = operands
    step = written(static, *operands, write=write, table=table)
    caches = step.layers()
    is_shared = not values.ndim
    if is_shared:  # the keys and their scales, once
        caches = caches[::2]
    batch, kv_heads, group, width = q.shape
    slots = keys.shape[-2] * (1 if table is None else table.shape[1])
    size = tiles(batch * kv_heads, group, width, slots, keys.dtype.itemsize)
    # 16-bit queries are rounded, as everywhere else on a GPU; the scale multiplies the scores instead.
    queries = step.q.astype(q.dtype)
    pads = ((0, 0), (0, 0), (0, size.parts * size.rows - group), (0, sum(size.widths) - width))
    queries = jnp.pad(queries, pads)
    # A scalar in place of no table.
    pages = jnp.zeros((), jnp.int32) if table is None else table
    mixed, largest, total = _call(static, size, group, is_shared, interpret)(
        layer.reshape(1), lengths, pages, queries, *caches
    )
    # Each program's sum is relative to its own largest score.
    top = jnp.max(largest, axis=2)  # [B, K, G]
    weights = jnp.exp(largest - top[:, :, None])  # [B, K, splits, G]
    total, mixed = jnp.sum(total * weights, axis=2), jnp.sum(mixed * weights[..., None], axis=2)
    return step, top, total, mixed


def tiles(programs: int, group: int, width: int, slots: int, itemsize: int = 2) -> DecodeTiles:
    """The tile sizes for ``programs`` KV heads of all sequences, in a cache of ``itemsize`` bytes per element.

    Example:
        >>> tiles(8, 4, 128, 8192)
        DecodeTiles(rows=16, parts=1, widths=(128,), block=64, splits=66)
        >>> tiles(600, 5, 80, 100)
        DecodeTiles(rows=16, parts=1, widths=(128,), block=64, splits=1)
        >>> tiles(1, 128, 576, 4096)
        DecodeTiles(rows=16, parts=8, widths=(512, 64), block=32, splits=66)
    """
    widths: tuple[int, ...] = (power(width),)
    if width > _WHOLE and widths[0] != width:
        first = widths[0] // 2
        widths = (first, power(width - first))
    columns = sum(widths)
    rows = power(group)
    while rows * columns > MOST_NUMBERS and rows > power(1):
        rows //= 2
    parts = -(-group // rows)
    block = min(128, max(32, 8192 // columns))
    if block * columns * itemsize > _BLOCK_BYTES:
        block = power(1)
    most = -(-slots // block)
    splits = max(1, min(most, -(-PROGRAMS // max(programs * parts, 1))))
    return DecodeTiles(rows, parts, widths, block, splits)


@functools.lru_cache(maxsize=256)
def _call(static: Options, size: DecodeTiles, group: int, is_shared: bool, interpret: bool) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    def call(layer: Any, lengths: Any, table: Any, q: Any, *caches: Any) -> Any:
        batch, kv_heads = q.shape[:2]
        _, pages, _, page_size, width = caches[0].shape
        places = (pages, page_size) if table.ndim else (0, 0)
        slots = table.shape[1] * page_size if table.ndim else page_size
        shape = (batch, kv_heads, size.splits, group)
        sums, mixed = result(shape, q), result((*shape, width), q)
        return pl.pallas_call(
            functools.partial(_program, static, size, slots, places, width, group, is_shared),
            grid=(batch, kv_heads * size.parts, size.splits),
            out_shape=(mixed, sums, sums),
            # Measured on an H200. With more stages, blocks of 16 bits leave room for fewer programs at a time.
            compiler_params=triton.CompilerParams(
                num_warps=4, num_stages=2 if caches[0].dtype.itemsize > 1 else 3
            ),
            interpret=interpret,
            name="maxjax_decode_attention",
        )(layer, lengths, table, q, *caches)

    return call


def _program(
    static: Options, size: DecodeTiles, slots: int, pages: tuple[int, int], width: int, group: int,
    is_shared: bool, layer: Any, lengths: Any, table: Any, q: Any, keys: Any, *refs: Any,
) -> None:  # fmt: skip
    """One program: a part of the slots of one KV head of one sequence, for some of its query heads."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *arrays, out, largest_out, total_out = refs
    values, scales = (keys, arrays * 2) if is_shared else (arrays[0], arrays[1:])
    row, head, split = (pl.program_id(axis) for axis in range(3))
    part = 0
    if size.parts > 1:
        head, part = jax.lax.div(head, size.parts), jax.lax.rem(head, size.parts)
    number, length = layer[0], lengths[row]
    # The number of tokens that the new token sees, and the slot of the first one.
    most = min(slots, static.window or slots)
    count = jnp.minimum(length, most - 1) + 1
    if not static.rotating:
        count = jnp.where(length < slots, count, 0)
    first = jax.lax.rem(length - count + 1, slots)
    # The tokens of this program: complete blocks of slots.
    each = (count + size.splits * size.block - 1) // (size.splits * size.block) * size.block
    start = split * each
    end = jnp.minimum(start + each, count)
    columns = size.columns(width)
    # A float32 query keeps its precision; int8 values are exact in every dtype.
    score_type = keys.dtype if keys.dtype == q.dtype else q.dtype if scales else jnp.float32
    weight_type = score_type
    if scales and q.dtype != jnp.float32:
        weight_type = jnp.bfloat16  # weights times scales leave the range of float16
    rows = part * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    places = [begin + jnp.arange(count, dtype=jnp.int32) for begin, count, _ in columns]
    queries = [
        triton.load(q.at[row, head, rows[:, None], place[None, :]]).astype(score_type)
        for place in places
    ]  # [rows, a part of D] each

    def block(i: Any, state: Any) -> Any:
        largest, total, mixed = state
        token = start + i * size.block + jnp.arange(size.block, dtype=jnp.int32)
        there = token < end
        slot = first + token
        if static.rotating:
            slot = jnp.where(slot < slots, slot, slot - slots)
        at_row: Any = row
        count_of_pages, page_size = pages
        if page_size:  # the page of each slot, and the slot in it
            entry = table.at[row, jax.lax.div(slot, page_size)]
            at_row = triton.load(entry, mask=there, other=0)
            there = there & (at_row >= 0) & (at_row < count_of_pages)
            slot = jax.lax.rem(slot, page_size)

        def read(array: Any) -> list[Any]:
            found = []
            for place, (_, _, is_past) in zip(places, columns, strict=True):
                mask = there[:, None]
                if is_past:
                    mask = mask & (place < width)[None, :]
                of_row = at_row[:, None] if page_size else at_row
                at = array.at[number, of_row, head, slot[:, None], place[None, :]]
                found.append(triton.load(at, mask=mask, other=0))  # [block, a part of D]
            return found

        found = read(keys)
        scores: Any = sum(
            dot(one, key.astype(score_type).T) for one, key in zip(queries, found, strict=True)
        )
        scores = scores * jnp.float32(static.scale)
        if scales:
            scores = scores * _scales(scales[0], number, at_row, head, slot, there)[None, :]
        if static.cap:
            scores = jnp.float32(static.cap) * jnp.tanh(scores / jnp.float32(static.cap))
        scores = jnp.where(there[None, :], scores, -jnp.inf)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new[:, None])
        kept = jnp.exp(largest - new)
        total = total * kept + jnp.sum(weights, axis=1)
        if scales:
            weights = weights * _scales(scales[1], number, at_row, head, slot, there)[None, :]
        weights = weights.astype(weight_type)
        found = found if is_shared else read(values)
        mixed = tuple(
            before * kept[:, None] + dot(weights, value.astype(weight_type))
            for before, value in zip(mixed, found, strict=True)
        )
        return new, total, mixed

    state = (
        jnp.full((size.rows,), _LOWEST, jnp.float32),
        jnp.zeros((size.rows,), jnp.float32),
        tuple(jnp.zeros((size.rows, count), jnp.float32) for _, count, _ in columns),
    )
    turns = (jnp.maximum(end - start, 0) + size.block - 1) // size.block
    largest, total, mixed = jax.lax.fori_loop(0, turns, block, state)
    inside = rows < group
    triton.store(largest_out.at[row, head, split, rows], largest, mask=inside)
    triton.store(total_out.at[row, head, split, rows], total, mask=inside)
    for place, one in zip(places, mixed, strict=True):
        at = out.at[row, head, split, rows[:, None], place[None, :]]
        triton.store(at, one, mask=inside[:, None] & (place < width)[None, :])


def _scales(array: Any, number: Any, row: Any, head: Any, slot: Any, there: Any) -> Any:
    from jax.experimental.pallas import triton

    return triton.load(array.at[number, row, head, slot], mask=there, other=0)
