"""Decode attention to pages on TPUs: a kernel in Mosaic.

A program attends from the new token of one sequence to a few of its pages, for some or all KV heads. Index maps
find these pages in the table, so that Pallas reads them in place, in the pool of all layers, while the program
before computes (as in the paged attention of vLLM, W. Kwon et al., arXiv:2309.06180). Pages that hold nothing that
the token attends to are not read.

Shapes: L layers, B sequences, K KV heads, G query heads of each, N pages of P tokens, M pages of a sequence,
head dimension D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..decode.step import Options, Written, mean, write_token, written
from ..pallas import result
from .mosaic import LANES

_FLOATS = (np.dtype("float32"), np.dtype(jnp.bfloat16))
_LOWEST = float(np.finfo(np.float32).min)
# Bytes of keys that a program reads, and the most pages; twice as many are in VMEM, and as many of values. A page that
# has more is read by several programs.
_BYTES, _MOST_PAGES = 1 << 20, 8
# The table is in the memory for scalars, which has 1 MiB.
_MOST_ENTRIES = 1 << 17
PAGE_SIZE = LANES
"""The number of tokens of a page on a device for which any heads, and the scales of int8 caches, are read in place."""
# The index of the slopes among the operands after the keys.
_SLOPES = 6


def takes_any_page(width: int) -> bool:
    """Whether pages of any size of floats are read in place, for heads of so many numbers."""
    return width % LANES == 0


def lacks(static: Options, q: Any, k: Any, v: Any, keys: Any, *rest: Any) -> str:
    """Why a TPU cannot run the kernel on these operands, which are on one device; "" if it can.

    The last operand is the table.

    Example:
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
        >>> options, one, table = Options(1.0, 0, 0.0, False, False), shape(1, 2, 32), shape(1, 4)
        >>> lacks(options, shape(1, 2, 4, 32), one, one, shape(9, 2, 64, 32), table)
        'pages are [64, 32], and 128 divides neither'
    """
    *_, size, width = keys.shape
    if rest[_SLOPES:-1] and rest[_SLOPES].size:
        return "scores have a bias of the distance"
    if q.dtype not in _FLOATS or keys.dtype not in (*_FLOATS, np.dtype("int8")):
        return f"queries are {q.dtype} and the cache is {keys.dtype}"
    # XLA would lay out keys, or scales, with the pages last.
    if size % LANES and (not takes_any_page(width) or keys.dtype == np.dtype("int8")):
        return f"pages are [{size}, {width}], and {LANES} divides neither"
    if not _heads_at_once(keys):
        return f"some KV heads of a page have more than {_BYTES:,} bytes of keys"
    if rest[-1].size > _MOST_ENTRIES:
        return f"the table has {rest[-1].size:,} entries, at most {_MOST_ENTRIES:,}"
    return ""


def _heads_at_once(keys: Any) -> int:
    """The number of KV heads of a page that a program reads; 0 if there is none."""
    *_, heads, size, width = keys.shape
    most = _BYTES // (size * width * keys.dtype.itemsize)
    # A part of the scales, whose heads are the rows of registers, has complete ones.
    each = 8 if keys.dtype == np.dtype("int8") else 1
    fits = lambda n: heads % n == 0 and (n == heads or n % each == 0)
    return max(filter(fits, range(1, min(heads, most) + 1)), default=0)


def kernel(
    static: Options, *operands: Any, table: jax.Array, write: Callable[..., list[jax.Array]],
    interpret: Any = False,
) -> list[jax.Array]:  # fmt: skip
    """Decode attention of the operands on one device.

    Args:
        static: the static arguments.
        operands: the same as for ``decode_attention.definition``; the caches are pools of pages.
        table: the pages of each sequence, int32 ``[B, M]``.
        write: writes the new tokens, as ``write_token`` does.
        interpret: argument of ``pallas_call`` that runs the kernel on another platform.
    """
    q, lengths, sinks = operands[0], operands[6], operands[9]
    step, top, total, mixed = sums(static, *operands, table=table, write=write, interpret=interpret)
    return step.answer(mean(top, total, mixed, sinks), lengths, q.dtype)


def sums(
    static: Options, *operands: Any, table: jax.Array,
    write: Callable[..., list[jax.Array]] = write_token, interpret: Any = False,
) -> tuple[Written, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The step after the write, and what ``mean`` takes; arguments as for :func:`kernel`."""
    q, _, _, keys, values, layer, lengths, *_ = operands
    step = written(static, *operands, write=write, table=table)
    caches = step.layers()
    is_shared = not values.ndim
    if is_shared:  # the keys and their scales, once
        caches = caches[::2]
    size, width = keys.shape[-2:]
    heads = _heads_at_once(keys) or keys.shape[-3]
    page = heads * size * width * keys.dtype.itemsize
    count = min(table.shape[1], _MOST_PAGES, max(_BYTES // page, 1))
    # 16-bit queries are rounded, as everywhere else on a TPU; the scale multiplies the scores instead.
    queries = step.q.astype(q.dtype)
    # For heads of other widths XLA lays out the pool with the slots last in memory, so that no row is padded.
    turned = width % LANES > 0
    pools = [a.swapaxes(3, 4) if turned and a.ndim == 5 else a for a in caches]
    last = jnp.clip(lengths // size, 0, table.shape[1] - 1)
    first = jnp.zeros_like(last)
    if static.window:
        first = jnp.clip((lengths + 1 - static.window) // size, 0, last)
    mixed, largest, total = _call(static, count, heads, is_shared, turned, interpret)(
        layer.reshape(1), lengths, first, last, table.reshape(-1), queries, *pools
    )
    return step, largest[..., 0], total[..., 0], mixed


@functools.lru_cache(maxsize=256)
def _call(
    static: Options, count: int, each_heads: int, is_shared: bool, turned: bool, interpret: Any
) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import tpu

    def call(
        layer: Any, lengths: Any, first: Any, last: Any, table: Any, q: Any, *given: Any
    ) -> Any:
        arrays = list(given)
        batch, heads, group, width = q.shape
        pages, each = arrays[0].shape[1], table.size // batch

        def of_page(i: int, rank: int) -> Any:
            def place(
                b: Any, h: Any, j: Any, layer: Any, lengths: Any, first: Any, last: Any, table: Any
            ) -> Any:
                # After the last page the number stays, so that nothing is read.
                entry = jnp.minimum(first[b] + j * count + i, last[b])
                page = jnp.clip(table[b * each + entry], 0, pages - 1)
                return layer[0], page, h, *(0,) * (rank - 3)

            return place

        def of_sequence(b: Any, h: Any, *_: Any) -> Any:
            return b, h, 0, 0

        one = pl.squeezed
        by_page = [
            pl.BlockSpec((one, one, each_heads, *a.shape[3:]), of_page(i, a.ndim))
            for a in arrays
            for i in range(count)
        ]
        rows = lambda n: pl.BlockSpec((one, each_heads, group, n), of_sequence)
        out = lambda n: result((batch, heads, group, n), q)
        # As many steps as the longest sequence needs.
        steps = jnp.max(last - first) // count + 1
        # Otherwise XLA may copy a small pool, with all layers, to VMEM.
        if not interpret:
            arrays = [tpu.with_memory_space_constraint(a, tpu.HBM) for a in arrays]
        return pl.pallas_call(
            functools.partial(_program, static, count, each, pages, is_shared, turned),
            grid_spec=tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                grid=(batch, heads // each_heads, steps),
                in_specs=[rows(width), *by_page],
                out_specs=[rows(width), rows(1), rows(1)],
            ),
            out_shape=[out(width), out(1), out(1)],
            compiler_params=tpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
            name="maxjax_paged_decode_attention",
        )(layer, lengths, first, last, table, q, *[a for a in arrays for _ in range(count)])

    return call


def _program(
    static: Options, count: int, each: int, pages: int, is_shared: bool, turned: bool,
    layer: Any, lengths: Any, first: Any, last: Any, table: Any, q: Any, *refs: Any,
) -> None:  # fmt: skip
    """One program: ``count`` pages of one sequence. The results of the programs before it are in the outputs."""
    from jax.experimental import pallas as pl

    *arrays, mixed, largest, total = refs
    keys, *rest = [arrays[i : i + count] for i in range(0, len(arrays), count)]
    values, *scales = [keys, *rest, *rest] if is_shared else rest
    row, step = pl.program_id(0), pl.program_id(2)
    begin, size = first[row] + step * count, keys[0].shape[2 if turned else 1]

    @pl.when(step == 0)
    def _() -> None:
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)
        largest[...] = jnp.full(largest.shape, _LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(begin <= last[row])
    def _() -> None:
        def sees(i: int, shape: tuple[int, ...], axis: int) -> Any:
            """Whether the new token attends to the tokens of page i, along an axis."""
            entry = begin + i
            page = table[row * each + jnp.minimum(entry, each - 1)]
            age = lengths[row] - entry * size - jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            # An age below 0 is also that of each token of a page after the last one.
            end = jnp.where((page >= 0) & (page < pages), static.window or 2**31 - 1, 0)
            return (age >= 0) & (age < end)

        queries, slots = q[...], 2 if turned else 1
        scores = []
        for i in range(count):
            found = _dot(
                queries, keys[i][...].astype(queries.dtype), 1 if turned else 2
            ) * jnp.float32(static.scale)
            if scales:
                found = found * scales[0][i][...][:, None]
            if static.cap:
                found = jnp.float32(static.cap) * jnp.tanh(found / jnp.float32(static.cap))
            scores.append(jnp.where(sees(i, found.shape, 2), found, -jnp.inf))
        old = largest[...]
        new = old
        for found in scores:
            new = jnp.maximum(new, jnp.max(found, axis=2, keepdims=True))
        kept = jnp.exp(old - new)
        sum_, out = total[...] * kept, mixed[...] * kept
        for i, found in enumerate(scores):
            weights = jnp.exp(found - new)
            sum_ = sum_ + jnp.sum(weights, axis=2, keepdims=True)
            if scales:
                weights = weights * scales[1][i][...][:, None]
            # Values that are not seen may be NaN.
            read = values[i][...].astype(queries.dtype)
            read = jnp.where(sees(i, read.shape, slots), read, jnp.zeros_like(read))
            out = out + _dot(weights.astype(queries.dtype), read, slots)
        largest[...], total[...], mixed[...] = new, sum_, out


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """For each KV head, the matmul of ``a`` with ``b``, contracted over an axis of ``b``, summed in float32."""
    dimensions = (((2,), (axis,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
