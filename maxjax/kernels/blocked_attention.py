"""Attention in memory that is linear in the number of tokens.

The scores are computed for a block of queries and a block of keys at a time, with a running maximum
and a running sum (M. Milakov, N. Gimelshein, arXiv:1805.02867; T. Dao et al., arXiv:2205.14135).
Blocks of keys that no query of a block sees are neither read nor computed. The derivative computes
the scores again instead of keeping them.

Shapes: L layers, B sequences, T queries, S keys, H query heads, K KV heads (counted after ``repeats``), G = H/K,
head dimension D, n blocks of queries with C queries each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit
from .cache_read import slots_of
from .gpu import attention as gpu_attention
from .gpu.triton import unavailable as no_triton
from .int8_rows import restored
from .key_ranges import NO_KEY as NO_KEY
from .key_ranges import NO_QUERY
from .operation import Operation, varying_with
from .pallas import program_device, refused
from .tpu import attention as tpu_attention
from .tpu.mosaic import unavailable as no_mosaic

# Largest number of queries and of keys in a block.
QUERIES, KEYS = 512, 1024
# Least number of keys in a block: with fewer, the longer loop costs more than they save.
LEAST_KEYS = 128
# Largest number of queries and of keys on a CPU, where the scores of a block stay in the processor's caches.
CPU_QUERIES, CPU_KEYS = 256, 256


class Attending(NamedTuple):
    """Which keys a query attends to, and how scores are computed; hashable.

    Attributes:
        scale: factor of the scores.
        window: number of positions that a query attends to, its own included; None: all before it.
        soft_cap: bound of the scores, which become ``soft_cap · tanh(score / soft_cap)``; None: no bound.
        dtype: dtype of scores, softmax and sums.
        repeats: how many times each KV head is repeated before it meets the query heads.
        strided: whether a block consists of evenly spaced queries, instead of neighbours. Then
            a mesh axis that splits the queries splits each block, but fewer blocks are skipped.
        chunked: whether a query sees only its own chunk of ``window`` positions, counted from
            position 0 (Llama 4), instead of the ``window`` positions that end with its own.
        division: how a mesh shards the queries ``[B, T, H, D]``, or their blocks; None: not known.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    dtype: Any
    repeats: int = 1
    strided: bool = False
    chunked: bool = False
    division: explicit.Division | None = None

    def first_seen(self, positions: jax.Array) -> jax.Array:
        """The first position that queries at these positions attend to; ``window`` must not be None."""
        assert self.window is not None
        return positions - (positions % self.window if self.chunked else self.window - 1)

    def sees(self, positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Whether queries at ``positions`` attend to keys at ``key_positions``; the two are broadcast."""
        distance = positions - key_positions
        sees = distance >= 0
        if self.window is None:
            return sees
        if self.chunked:
            return sees & (key_positions >= self.first_seen(positions))
        return sees & (distance < self.window)


def blocked_attention(
    q: jax.Array,
    cache: Sequence[jax.Array],
    layer: Any,
    positions: jax.Array,
    key_positions: jax.Array,
    attending: Attending,
    slopes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention in blocks: a query attends to the keys at its own and at earlier positions.

    Args:
        q: queries ``[B, T, H, D]``; H / K neighbouring heads share one KV head.
        cache: keys and values ``[L, B, K, S, D]``, and for int8 their scales ``[L, B, K, S]``.
        layer: index of the layer, an integer scalar.
        positions: position of each query, int32 ``[B or 1, T]``, not negative.
        key_positions: position of each key, int32 ``[B or 1, S]``; the largest int32 for a key that
            nobody attends to.
        attending: which keys a query attends to, and how scores are computed.
        slopes: numbers ``[H]``; each times (key position - query position) is added to the head's scores
            (ALiBi, arXiv:2108.12409). There is no GPU or TPU kernel for them: all platforms use jnp.

    Returns:
        The result ``[B, T, H, D]`` in the dtype of ``q``, and the log-sum-exp of each query's scores
        ``[B, T, H]``, by which results for parts of the keys are merged into the result for all. A
        query that attends to no key gets finite but meaningless numbers, and a log-sum-exp near the
        lowest number of the dtype.

    It has a derivative in reverse mode only, and with an int8 cache none: a NotImplementedError.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> cache = [x.swapaxes(1, 2)[None]] * 2
        >>> at = jnp.arange(3)[None]
        >>> y, sums = blocked_attention(x, cache, 0, at, at, Attending(1.0, None, None, jnp.float32))
        >>> y.shape, jnp.exp(sums[0, 0, 0] - 4.0).item()
        ((1, 3, 2, 4), 1.0)
    """
    batch, length, heads, width = q.shape
    kv_heads = cache[0].shape[2] * attending.repeats
    count = -(-length // QUERIES)
    size = -(-length // count)  # queries in a block
    pad = count * size - length
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=NO_QUERY)
    queries = _blocks(q, count, attending.strided)  # [n, B, C, H, D]
    queries = queries.reshape(count, batch, size, kv_heads, heads // kv_heads, width)
    queries = queries.transpose(0, 1, 3, 4, 2, 5)  # [n, B, K, G, C, D]
    at = _blocks(positions, count, attending.strided)  # [n, B or 1, C]
    layer = jnp.asarray(layer, jnp.int32)
    attending = attending._replace(division=_of_blocks(attending))
    slopes = None if slopes is None else slopes.reshape(kv_heads, -1)  # [K, G]
    out, sums = _attention(attending, queries, tuple(cache), layer, at, key_positions, slopes)
    out = out.transpose(0, 1, 4, 2, 3, 5).reshape(count, batch, size, heads, width)
    sums = sums.transpose(0, 1, 4, 2, 3).reshape(count, batch, size, heads)
    out, sums = (_joined(a, attending.strided)[:, :length] for a in (out, sums))
    return out, sums


def _blocks(array: jax.Array, count: int, strided: bool) -> jax.Array:
    """``[B, T, ...]`` → ``[n, B, C, ...]``."""
    batch, length, *rest = array.shape
    if strided:
        return jnp.moveaxis(array.reshape(batch, length // count, count, *rest), 2, 0)
    return jnp.moveaxis(array.reshape(batch, count, length // count, *rest), 1, 0)


def _of_blocks(attending: Attending) -> explicit.Division | None:
    """How a mesh shards the blocks ``[n, B, K, G, C, D]`` of queries; None if it is not known."""
    if attending.division is None:
        return None
    mesh, (batch, tokens, heads, _) = attending.division
    if tokens and not attending.strided:
        return None
    return explicit.Division(mesh, ((), batch, heads, (), tokens, ()))


def _joined(blocks: jax.Array, strided: bool) -> jax.Array:
    """The inverse of :func:`_blocks`: ``[n, B, C, ...]`` → ``[B, T, ...]``."""
    count, batch, size, *rest = blocks.shape
    blocks = jnp.moveaxis(blocks, 0, 2 if strided else 1)
    return blocks.reshape(batch, count * size, *rest)


def _key_block(queries: int, keys: int) -> int:
    """Number of keys in a block."""
    return min(keys, max(LEAST_KEYS, min(KEYS, queries)))


class _Keys(NamedTuple):
    """One block of keys and values, its first slot, and which of the keys each query attends to."""

    keys: jax.Array  # [B, K, s, D]
    values: jax.Array
    sees: jax.Array  # bools [B or 1, 1, 1, C, s]
    distance: jax.Array  # key position - query position, [B or 1, 1, 1, C, s]; 0 where not seen
    start: jax.Array


def _read(
    cache: Sequence[jax.Array],
    layer: jax.Array,
    number: jax.Array,
    block: int,
    at: jax.Array,
    key_positions: jax.Array,
    attending: Attending,
    dtype: Any,
) -> _Keys:
    """The block of keys with this index, for the queries at positions ``at``, ``[B or 1, C]``."""
    number = jnp.asarray(
        number, jnp.int32
    )  # a loop that is not traced counts in JAX's default integer
    slots = key_positions.shape[1]
    # The last block ends with the last key; keys that are in the block before it too are masked.
    first = number * block
    start = jnp.minimum(first, slots - block)

    keys, values, *scales = (slots_of(array, layer, start, block) for array in cache)
    if scales:
        keys, values = restored(keys, scales[0], dtype), restored(values, scales[1], dtype)
    found = jax.lax.dynamic_slice_in_dim(
        key_positions, start, block, axis=1, allow_negative_indices=False
    )
    sees = attending.sees(at[:, :, None], found[:, None, :])
    new = start + jnp.arange(block, dtype=jnp.int32) >= first
    sees = sees & new[None, None, :]
    keys, values = (jnp.repeat(a.astype(dtype), attending.repeats, axis=1) for a in (keys, values))
    distance = jnp.where(sees, found[:, None, :] - at[:, :, None], 0)
    return _Keys(keys, values, sees[:, None, None], distance[:, None, None], start)


def _range(
    at: jax.Array, key_positions: jax.Array, block: int, attending: Attending
) -> tuple[jax.Array, jax.Array]:
    """Indices of the first block with a key that one of the queries may see, and of the one after the last."""
    last = jnp.max(at)
    seen = jnp.any(key_positions <= last, axis=0)
    if attending.window is not None:
        first = jnp.min(jnp.where(at == NO_QUERY, jnp.iinfo(jnp.int32).max, at))
        seen = seen & jnp.any(key_positions >= attending.first_seen(first), axis=0)
    number = jnp.arange(seen.shape[0], dtype=jnp.int32) // block
    low = jnp.min(jnp.where(seen, number, jnp.iinfo(jnp.int32).max))
    return low, jnp.max(jnp.where(seen, number, -1)) + 1


def _scores(
    q: jax.Array, keys: _Keys, attending: Attending, slopes: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The scores of a block ``[B, K, G, C, s]``, with the lowest number where masked; and before cap and mask."""
    raw = _product("bkgcd,bksd->bkgcs", q, keys.keys, attending) * attending.scale
    scores = raw
    if attending.soft_cap is not None:
        scores = attending.soft_cap * jnp.tanh(raw / attending.soft_cap)
    if slopes is not None:
        each = slopes.astype(attending.dtype)[None, :, :, None, None]
        scores = scores + each * keys.distance.astype(attending.dtype)
    return jnp.where(keys.sees, scores, jnp.finfo(attending.dtype).min), raw


def _product(equation: str, a: jax.Array, b: jax.Array, attending: Attending) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=attending.dtype)


def _each(count: int, run: Callable[[Any, Any], Any], carry: Any, blocks: Any) -> Any:
    """``lax.scan`` over the blocks of queries; a single block needs no loop."""
    if count > 1:
        return jax.lax.scan(run, carry, blocks)
    carry, out = run(carry, jax.tree.map(lambda a: a[0], blocks))
    return carry, jax.tree.map(lambda a: a[None], out)


def _forward(
    attending: Attending,
    queries: jax.Array,
    cache: tuple[jax.Array, ...],
    layer: jax.Array,
    at: jax.Array,
    key_positions: jax.Array,
    slopes: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The results ``[n, B, K, G, C, D]``, and the log-sum-exp of each query's scores ``[n, B, K, G, C]``."""
    # Kernels have no slopes; with repeats a device has more query heads than it has KV heads of the cache.
    if attending.repeats > 1 or slopes is not None:
        return _in_jnp(attending, queries, cache, layer, at, key_positions, slopes=slopes)
    # Positions that all sequences share lose their batch axis of length 1, which a mesh could not split.
    at = at[:, 0] if at.shape[1] == 1 else at
    key_positions = key_positions[0] if key_positions.shape[0] == 1 else key_positions
    keys, values, *scales = cache
    out, sums = _OPERATION([queries, keys, values, layer, at, key_positions, *scales], attending)
    return out, sums


def _in_jnp(
    attending: Attending,
    queries: jax.Array,
    cache: tuple[jax.Array, ...],
    layer: jax.Array,
    at: jax.Array,
    key_positions: jax.Array,
    most_keys: int = KEYS,
    slopes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The definition of :func:`_forward`, in jnp; ``most_keys`` is the largest number of keys in a block."""
    count, *_, size, width = queries.shape
    block = min(most_keys, _key_block(size, key_positions.shape[1]))
    dtype = attending.dtype

    def run(_: None, each: Any) -> tuple[None, Any]:
        q, at = each
        low, high = _range(at, key_positions, block, attending)

        def step(number: jax.Array, state: Any) -> Any:
            largest, total, mixed = state
            keys = _read(cache, layer, number, block, at, key_positions, attending, q.dtype)
            scores, _ = _scores(q, keys, attending, slopes)
            new = jnp.maximum(largest, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new[..., None])
            kept = jnp.exp(largest - new)
            total = total * kept + jnp.sum(weights, axis=-1)
            more = _product(
                "bkgcs,bksd->bkgcd", weights.astype(keys.values.dtype), keys.values, attending
            )
            return new, total, mixed * kept[..., None] + more

        rows = q.shape[:-1]
        state = (
            jnp.full(rows, jnp.finfo(dtype).min, dtype),
            jnp.zeros(rows, dtype),
            jnp.zeros((*rows, width), dtype),
        )
        state = varying_with(state, q, cache, at, key_positions, slopes)
        largest, total, mixed = jax.lax.fori_loop(low, high, step, state)
        total = jnp.where(total == 0, 1, total)  # no block was visited: the queries see no key
        return None, ((mixed / total[..., None]).astype(q.dtype), largest + jnp.log(total))

    return _each(count, run, None, (queries, at))[1]


def _with_residuals(attending: Attending, *operands: Any) -> tuple[Any, Any]:
    out, sums = _forward(attending, *operands)
    return (out, sums), (operands, out, sums)


def _backward(attending: Attending, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (queries, cache, layer, at, key_positions, slopes), out, sums = residuals
    if len(cache) > 2:
        raise NotImplementedError(
            "attention over an int8 cache has no derivatives: use a cache of floats"
        )
    count, *_, size, width = queries.shape
    block = _key_block(size, key_positions.shape[1])
    dtype = attending.dtype
    zeros = jnp.zeros(cache[0].shape[1:], dtype)
    has_slopes = slopes is not None
    of_slopes = [jnp.zeros(slopes.shape, dtype)] if has_slopes else []

    def run(carry: Any, each: Any) -> Any:
        q, at, out, sums, given, of_sums = each
        inner = jnp.sum(out.astype(dtype) * given.astype(dtype), axis=-1) - of_sums
        low, high = _range(at, key_positions, block, attending)

        def step(number: jax.Array, state: Any) -> Any:
            d_q, d_keys, d_values, *d_slopes = state
            keys = _read(cache, layer, number, block, at, key_positions, attending, q.dtype)
            scores, raw = _scores(q, keys, attending, slopes)
            weights = jnp.where(keys.sees, jnp.exp(scores - sums[..., None]), 0)
            rounded = weights.astype(given.dtype)
            more_values = _product("bkgcs,bkgcd->bksd", rounded, given, attending)
            d_weights = _product("bkgcd,bksd->bkgcs", given, keys.values, attending)
            d_scores = weights * (d_weights - inner[..., None])
            if has_slopes:
                each = jnp.sum(d_scores * keys.distance.astype(dtype), axis=(0, 3, 4))
                d_slopes = [d_slopes[0] + each]  # [K, G]
            d_scores = d_scores * attending.scale
            if attending.soft_cap is not None:
                d_scores = d_scores * (1 - jnp.tanh(raw / attending.soft_cap) ** 2)
            d_scores = d_scores.astype(q.dtype)
            d_q = d_q + _product("bkgcs,bksd->bkgcd", d_scores, keys.keys, attending)
            more = _product("bkgcs,bkgcd->bksd", d_scores, q, attending)
            d_keys, d_values = _added(d_keys, more, keys), _added(d_values, more_values, keys)
            return d_q, d_keys, d_values, *d_slopes

        state = (jnp.zeros((*q.shape[:-1], width), dtype), *carry)
        state = varying_with(state, each, cache)
        d_q, *carry = jax.lax.fori_loop(low, high, step, state)
        return tuple(carry), d_q.astype(q.dtype)

    blocks = (queries, at, out, sums, *cotangents)
    start = varying_with((zeros, zeros, *of_slopes), blocks, cache, key_positions, slopes)
    carry, d_queries = _each(count, run, start, blocks)
    d_cache = tuple(_of_layer(d, a, layer) for d, a in zip(carry[:2], cache, strict=True))
    d_slopes = carry[2].astype(slopes.dtype) if slopes is not None else None
    none = lambda a: jnp.zeros(a.shape, jax.dtypes.float0)
    return d_queries, d_cache, *map(none, (layer, at, key_positions)), d_slopes


def _added(total: jax.Array, more: jax.Array, keys: _Keys) -> jax.Array:
    """``total`` ``[B, K, S, D]`` with ``more`` ``[B, K · repeats, s, D]`` added at the slots of the block."""
    batch, kv_heads, _, width = total.shape
    more = jnp.sum(more.reshape(batch, kv_heads, -1, more.shape[2], width), axis=2)
    start = (jnp.int32(0), jnp.int32(0), keys.start, jnp.int32(0))
    old = jax.lax.dynamic_slice(total, start, more.shape, allow_negative_indices=False)
    return jax.lax.dynamic_update_slice(total, old + more, start, allow_negative_indices=False)


def _of_layer(found: jax.Array, like: jax.Array, layer: jax.Array) -> jax.Array:
    """The cotangent of a cache of which one layer was read."""
    found = found.astype(like.dtype)[None]
    if like.shape[0] == 1:
        return found
    start = (layer, *[jnp.int32(0)] * (like.ndim - 1))
    return jax.lax.dynamic_update_slice(jnp.zeros_like(like), found, start)


_attention = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_attention.defvjp(_with_residuals, _backward)


# -- the forward pass as a JAX primitive


def _types(attending: Attending, queries: Any, *rest: Any) -> list[Any]:
    sums = queries.update(shape=queries.shape[:-1], dtype=attending.dtype, weak_type=False)
    return [queries, sums]


def _definition(
    attending: Attending, q: Any, keys: Any, values: Any, layer: Any, at: Any, key_positions: Any,
    *scales: Any,
) -> Any:  # fmt: skip
    at, key_positions = _with_batch(at, key_positions)
    return _in_jnp(attending, q, (keys, values, *scales), layer, at, key_positions)


def _with_batch(at: jax.Array, key_positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions ``[n, B or 1, C]`` and ``[B or 1, S]``: those without a batch axis get one of length 1."""
    at = at if at.ndim == 3 else at[:, None]
    return at, key_positions if key_positions.ndim == 2 else key_positions[None]


def _on_cpu(attending: Attending, devices: int, *operands: Any) -> Any:
    queries, keys, values, layer, at, key_positions, *scales = operands
    count, *between, size, width = queries.shape
    parts = -(-size // CPU_QUERIES)
    if devices > 1 or size % parts:
        return _definition(attending, *operands)
    at, key_positions = _with_batch(at, key_positions)
    cut = lambda a, axis: jnp.moveaxis(
        a.reshape(*a.shape[:axis], parts, size // parts, *a.shape[axis + 1 :]), axis, 1
    ).reshape(count * parts, *a.shape[1:axis], size // parts, *a.shape[axis + 1 :])
    found = _in_jnp(
        attending, cut(queries, 4), (keys, values, *scales), layer, cut(at, 2), key_positions, CPU_KEYS
    )  # fmt: skip

    def joined(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(a.reshape(count, parts, *a.shape[1:]), 1, 4)
        return a.reshape(count, *between, size, *a.shape[6:])

    return [joined(a) for a in found]


def _on_cuda(attending: Attending, *operands: Any) -> Any:
    why = gpu_attention.lacks(attending.dtype, *operands[:2]) or no_triton(program_device())
    if refused("attention on a GPU", why):
        return _definition(attending, *operands)
    return _by_kernel(gpu_attention.kernel, attending, *operands)


def _on_tpu(attending: Attending, *operands: Any) -> Any:
    why = tpu_attention.lacks(attending.dtype, *operands[:2]) or no_mosaic(program_device())
    if refused("attention on a TPU", why):
        return _definition(attending, *operands)
    return _by_kernel(tpu_attention.kernel, attending, *operands)


def _by_kernel(kernel: Any, attending: Attending, *operands: Any, **options: Any) -> Any:
    q, keys, values, layer, *positions = operands[:6]
    at, key_positions = _with_batch(*positions)  # kernels take them per sequence
    at = jnp.broadcast_to(at, (at.shape[0], q.shape[1], at.shape[2]))
    key_positions = jnp.broadcast_to(key_positions, (q.shape[1], key_positions.shape[1]))
    given = (q, keys, values, layer, at, key_positions, *operands[6:])
    return kernel(attending._replace(division=None), *given, **options)


def _rule(ranks: Sequence[int]) -> Any:
    """Sequences, KV heads, query heads of each and queries may be split; all else is replicated."""
    q = ArrayMapping("n", "b", "k", "g", "c", "d")
    cache, scales = ArrayMapping("l", "b", "k", "s", "d"), ArrayMapping("l", "b", "k", "s")
    at = ArrayMapping("n", *["b"][: ranks[4] - 2], "c")
    keys = ArrayMapping(*["b"][: ranks[5] - 1], "s")
    operands = (q, cache, cache, ArrayMapping(), at, keys, *(scales,) * (len(ranks) - 6))
    return operands, (q, ArrayMapping(*q[:-1]))


def _shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    """All operands are split as the queries are, whose axes n and D are replicated."""
    _, batch, kv_heads, group, size, _ = specs[0]
    q = [(), batch, kv_heads, group, size, ()]
    cache = [(), batch, kv_heads, (), ()]
    at, keys = [(), *[batch][: len(specs[4]) - 2], size], [*[batch][: len(specs[5]) - 1], ()]
    operands = [q, cache, cache, [], at, keys]
    return operands + [cache[:-1]] * (len(specs) - 6), [q, q[:-1]], ()


_OPERATION = Operation(
    "maxjax_attention", _types, _definition, {"cuda": _on_cuda, "tpu": _on_tpu}, _rule, _shardings,
    forms={"cpu": _on_cpu}, division=lambda attending: attending.division,
)  # fmt: skip
