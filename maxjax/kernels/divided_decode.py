"""Attention from one token of each sequence to those tokens of its pages that are on one of several devices.

Devices with the same KV heads divide the tokens of each page: of n devices, device j has the tokens at positions
j, j + n, j + 2n, …. Each attends to its own, in its pool of pages, and the results are merged by their log-sum-exps
(as in flash decoding, T. Dao et al., 2023).

Shapes: B sequences, H query heads, K KV heads, head dimension D; M pages of a sequence, P tokens of a page on this
device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .attention import partial_attention
from .cache_read import pages_of
from .decode import triton
from .decode.step import Options
from .gpu.triton import unavailable as no_triton
from .operation import Operation, has_static_shapes
from .pages import is_page
from .pallas import program_device, refused
from .tpu import paged_decode
from .tpu.mosaic import unavailable as no_mosaic


class Divided(NamedTuple):
    """The static arguments.

    Attributes:
        scale, window, cap: as in ``Options``; the window is a multiple of ``parts``, or 0.
        parts: number n of devices.
        is_shared: whether the keys are the values too.
        dtype: dtype of scores and sums.
    """

    scale: float
    window: int
    cap: float
    parts: int
    is_shared: bool
    dtype: str


def divided_decode(
    q: jax.Array, pool: Sequence[jax.Array], ends: jax.Array, first: jax.Array, *, layer: Any,
    table: jax.Array, static: Divided,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attends from the last token of each sequence to the tokens on this device, inside of a ``shard_map``.

    Args:
        q: queries ``[B, 1, H, D]``.
        pool: keys and values ``[L, N, K, P, D]``, or only keys; for int8 then their scales ``[L, N, K, P]``.
        ends: the number of tokens of each sequence with the new one, on all devices, int32 ``[B]``.
        first: the position j of the first token on this device, int32.
        layer: index of the layer.
        table: the pages of each sequence, int32 ``[B, M]``.
        static: the rest.

    Returns:
        The result ``[B, 1, H, D]``, and the log-sum-exp of each query's scores, ``[B, 1, H]``: those of
        ``partial_attention``. Without tokens on this device the log-sum-exp is the lowest number.
    """
    operands = [q, ends, first, jnp.asarray(layer, jnp.int32), table, *pool]
    if not has_static_shapes(*operands):
        y, sums = _definition(static, *operands)
    else:
        y, sums = _OPERATION(operands, static)
    return y, sums


def own_pages(
    pool: Sequence[jax.Array], layer: Any, table: jax.Array, numbers: jax.Array, ends: jax.Array
) -> list[jax.Array]:
    """The pages of a layer as caches ``[1, B, K, M · P, ...]``, with zeros where no token is.

    Args:
        pool: arrays ``[L, N, K, P, ...]``.
        layer, table: as for ``pages_of``.
        numbers: the positions of the tokens, ``[B or 1, M · P]``.
        ends: the number of tokens of each sequence, ``[B, 1]``.
    """
    # A page may have been that of a text whose numbers were not finite.
    _, pages, _, size, *_ = pool[0].shape
    is_own = ((numbers < ends) & jnp.repeat(is_page(table, pages), size, axis=1))[:, None]

    def own(array: jax.Array) -> jax.Array:
        mask = is_own.reshape(*is_own.shape, *(1,) * (array.ndim - 3))
        return jnp.where(mask, array, jnp.zeros_like(array))[None]

    return [own(pages_of(a, layer, table)) for a in pool]


def _definition(static: Divided, *operands: jax.Array) -> list[jax.Array]:
    q, ends, first, layer, table, *pool = operands
    size = table.shape[1] * pool[0].shape[3]
    numbers = (jnp.arange(size, dtype=jnp.int32) * static.parts + first)[None]
    cache = own_pages(pool, layer, table, numbers, ends[:, None])
    if static.is_shared:
        cache = [a for a in cache for _ in range(2)]
    y, sums = partial_attention(
        q, cache, 0, ends[:, None] - 1, numbers, scale=static.scale,
        sliding_window=static.window or None, soft_cap=static.cap or None, softmax_dtype=static.dtype,
    )  # fmt: skip
    return [y, sums]


def _types(static: Divided, q: Any, *_: Any) -> list[Any]:
    return [q, q.update(shape=q.shape[:3], dtype=jnp.dtype(static.dtype))]


def _kernel(module: Any, unavailable: Any, where: str, static: Divided, *operands: Any) -> Any:
    """The kernel of a module, or the definition where it has none for these operands."""
    q, ends, first, layer, table, *pool = operands
    batch, _, heads, width = q.shape
    kv_heads = pool[0].shape[2]
    # As for a cache with these tokens alone.
    lengths = jnp.where(ends > first, (ends - 1 - first) // static.parts, -1)
    window = static.window // static.parts
    options = Options(static.scale, window, static.cap, False, False, None, is_written=True)
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
    none, token = jnp.zeros((batch, 0)), jnp.zeros((batch, kv_heads, width), q.dtype)
    keys, *rest = pool
    new, values = (token, jnp.zeros((), q.dtype)), jnp.zeros((), keys.dtype)
    if not static.is_shared:
        new, values = (token, token), rest.pop(0)
    by_head = jnp.zeros((kv_heads, 0))
    given = [
        grouped, *new, keys, values, layer, lengths, none, none, by_head, by_head, *rest, table
    ]  # fmt: skip
    why = module.lacks(options, *given) or unavailable(program_device())
    if jnp.dtype(static.dtype) != jnp.float32:
        why = why or f"scores are in {static.dtype}"
    if refused(f"decode attention to parts of pages on a {where}", why):
        return _definition(static, *operands)
    largest, total, mixed = module.sums(options, *given[:-1], table=table)[1:]
    is_none = total == 0
    y = mixed / jnp.where(is_none, 1.0, total)[..., None]
    sums = jnp.where(is_none, jnp.finfo(jnp.float32).min, largest + jnp.log(total))
    return [y.reshape(q.shape).astype(q.dtype), sums.reshape(q.shape[:3])]


_OPERATION = Operation(
    "maxjax_divided_decode_attention", _types, _definition,
    {"cuda": functools.partial(_kernel, triton, no_triton, "GPU"),
     "tpu": functools.partial(_kernel, paged_decode, no_mosaic, "TPU")}, None, None,
)  # fmt: skip
