"""Attention of a decode step: one new token of every sequence attends to its KV cache.

For one layer it rotates the new query and key (rope), writes key and value into the cache, and
attends to the cache. On a CPU XLA takes ten to thirty times as long for this as the kernel here,
and also copies the cache.

Shapes: L layers, B sequences, H query heads, K KV heads, S slots of the cache, head_dim D.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit, native
from .alibi import checked_slopes
from .cache_read import pages_of
from .cache_write import write_token, write_token_of_pages, write_tokens
from .decode import triton
from .decode.blocks import in_blocks
from .decode.step import Options, Written, biased, seen, written
from .gpu.triton import unavailable
from .int8_rows import restored
from .operation import Operation, abstract_device, has_static_shapes, types_of
from .pages import checked_table, is_page
from .pallas import program_device, refused
from .product import FLOATS
from .sinks import checked_sinks
from .stack_slice import layer_of
from .tpu import paged_decode
from .tpu.mosaic import unavailable as no_mosaic

# The index of the first scales of an int8 cache among the operands.
_SCALES = 11


def decode_attention(
    q: Any,
    k: Any,
    v: Any | None,
    keys: Any,
    values: Any | None,
    lengths: Any,
    *,
    layer: Any = None,
    rope: tuple[Any, Any] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interleaved: bool = False,
    rotating: bool = False,
    scales: tuple[Any, ...] | None = None,
    sinks: Any = None,
    slopes: Any = None,
    division: explicit.Division | None = None,
    table: Any = None,
    is_written: bool = False,
) -> tuple[jax.Array, ...]:
    """Writes one token of each sequence into the KV cache, and attends from it to the cache.

    Args:
        q: queries ``[B, H, D]``; H is a multiple of K, and H / K neighbouring query heads share
            one KV head.
        k, v: key and value of the new token, ``[B, K, D]`` each.
        keys, values: the cache, ``[B, K, S, D]``, or ``[L, B, K, S, D]`` with ``layer``. If ``v`` and
            ``values`` are None, keys are the values too, as in multi-head latent attention
            (DeepSeek-V2, arXiv:2405.04434).
        lengths: integers ``[B]``: the number of tokens of each sequence in the cache so far,
            which is the position of the new one. A negative number marks an unused row of the
            batch: nothing is written for it, and its result is zeros.
        layer: index of the layer, from 0; it may be traced.
        rope: ``(cos, sin)`` of the new token's position, ``[B, pairs]`` each: the first
            ``2 pairs`` numbers of every head of ``q`` and ``k`` are rotated (J. Su et al.,
            arXiv:2104.09864). None if they are rotated already, or the model has no rope.
        scale: factor of the scores, ``1/√D`` by default.
        sliding_window: number of tokens that a token attends to, itself included; None for all.
        soft_cap: cap of the scores, which become ``soft_cap · tanh(score / soft_cap)``.
        interleaved: whether numbers 0 and 1, 2 and 3, … form the pairs that are rotated; if not,
            the first half forms pairs with the second.
        rotating: whether a sequence longer than S continues in slot 0 and attends to its last S
            tokens. If not, tokens after slot S - 1 are not written, and their results are NaN.
        scales: scales of an int8 cache, ``(key scales, value scales)``: float32, the shape of the cache
            without D (``int8_rows``); only ``(key scales,)`` if the keys are the values too.
        sinks: attention sinks ``[H]``: for each query head a score that takes part in the softmax and
            has no value, so that the weights of the tokens add up to less than one (gpt-oss,
            arXiv:2508.10925). They are neither scaled nor capped. None: no sinks.
        slopes: numbers ``[H]``; each times (position of a key - position of the new token) is added to the
            head's scores, after scale and cap (ALiBi, arXiv:2108.12409). None: no such bias.
        division: how a mesh with Auto axes divides ``keys``, if that is known: XLA for TPUs needs it to
            write in place where 128 does not divide D.
        table: the pages of each sequence, integers ``[B, M]``. The caches are then pools of N pages of P tokens,
            ``[N, K, P, D]`` or ``[L, N, K, P, D]``, and S is M · P: page ``table[b, m]`` holds the tokens m · P to
            m · P + P - 1 of sequence b. Entries outside 0 to N - 1 mean no page: tokens there are not attended to,
            and a new token there is not written and gets NaN. No two sequences may write to the same page.
        is_written: whether the tokens are in the cache already, as they would be after this call.

    Returns:
        The result ``[B, H, D]`` in the dtype of ``q``, and the two caches (or the one), updated in
        place where they are donated; for an int8 cache also its scales. Scores, softmax and sums are
        computed in float32.

    Raises:
        ValueError: the shapes or scales do not fit together; a window or a cap is not positive; ``rotating`` with
            ``table``.

    With float32, float16, bfloat16 or int8, CPUs run a C++ kernel and NVIDIA GPUs one in Triton
    (``decode/triton.py``), which rounds 16-bit queries after rope, and the softmax weights, to their dtype (for
    an int8 cache weights to bfloat16). TPUs, other GPUs, slopes on GPUs, and operands that Triton does not support
    use ``decode/blocks.py``. Other dtypes, derivatives, exports for CPUs and NVIDIA GPUs use :func:`definition`.
    With ``table``, TPUs run a kernel in Mosaic (``tpu/paged_decode.py``) if 128 divides P, or D of floats. Otherwise
    they and other GPUs use :func:`paged_definition`, which copies the pages of the layer, on TPUs even the pool.

    Example:
        >>> cache = jnp.zeros((1, 2, 4, 8))
        >>> x = jnp.ones((1, 2, 8))
        >>> y, keys, values = decode_attention(x, x, x, cache, cache, jnp.array([0]))
        >>> y.shape, float(y[0, 0, 0]), float(keys.sum())
        ((1, 2, 8), 1.0, 16.0)
    """
    q, k, keys, lengths = map(jnp.asarray, (q, k, keys, lengths))
    is_shared, paged = v is None and values is None, table is not None
    if paged and rotating:
        raise ValueError("rotating must be False with a table of pages")
    if is_shared:
        _check(q, k, k, keys, keys, lengths, layer is None, sliding_window, soft_cap, paged)
        v, values = jnp.zeros((), k.dtype), jnp.zeros((), keys.dtype)
    else:
        v, values = jnp.asarray(v), jnp.asarray(values)
        _check(q, k, v, keys, values, lengths, layer is None, sliding_window, soft_cap, paged)
    batch, heads, width = q.shape
    cos, sin = (jnp.zeros((batch, 0)),) * 2 if rope is None else map(jnp.asarray, rope)
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != batch or 2 * cos.shape[1] > width:
        raise ValueError(
            f"rope is (cos, sin), each [{batch}, pairs] with at most {width // 2} pairs; "
            f"not {cos.shape} and {sin.shape}"
        )
    static = Options(
        1 / math.sqrt(width) if scale is None else float(scale),
        sliding_window or 0, float(soft_cap or 0), bool(interleaved), bool(rotating), division, is_written,
    )  # fmt: skip
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads if kv_heads else 0, width)
    numbers = [jnp.asarray(0 if layer is None else layer, jnp.int32), lengths.astype(jnp.int32)]
    angles = [cos.astype(jnp.float32), sin.astype(jnp.float32)]
    count = 1 if is_shared else 2
    more = _checked_scales(scales, keys, count)
    slopes = checked_slopes(slopes, heads)
    by_head = [checked_sinks(sinks, heads), jnp.zeros(0) if slopes is None else slopes]
    by_head = [  # [K, G], or [K, 0] without them
        a.astype(jnp.float32).reshape(kv_heads, a.size // max(kv_heads, 1)) for a in by_head
    ]
    if paged:
        more.append(checked_table(table, batch))
    operation = _PAGED if paged else _OPERATION
    operands = [grouped, k, v, keys, values, *numbers, *angles, *by_head, *more]
    out, *caches = _run(operation, static, operands, len(operands) - paged)
    if is_shared:
        del caches[1]
    return out.reshape(q.shape), *caches


def _checked_scales(scales: tuple[Any, ...] | None, keys: jax.Array, count: int) -> list[jax.Array]:
    found = [] if scales is None else list(map(jnp.asarray, scales))
    right = [(keys.shape[:-1], jnp.float32)] * count if keys.dtype == jnp.int8 else []
    if [(a.shape, a.dtype) for a in found] != right:
        raise ValueError(
            f"an int8 cache takes {'two arrays' if count > 1 else 'one array'} of scales, "
            f"float32{list(keys.shape[:-1])}, and a cache of another dtype none; this one is "
            f"{keys.dtype} with scales {[f'{a.dtype}{list(a.shape)}' for a in found]}"
        )
    return found


def _check(
    q: Any,
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    lengths: Any,
    single: bool,
    window: Any,
    cap: Any,
    paged: bool,
) -> None:
    batch, heads, width = q.shape if q.ndim == 3 else (0, 0, 0)
    kv_heads = k.shape[1] if k.ndim == 3 else 0
    if (
        q.ndim != 3
        or k.shape != (batch, kv_heads, width)
        or v.shape != k.shape
        or keys.ndim != (4 if single else 5)
        or keys.shape != values.shape
        or keys.dtype != values.dtype
        or (keys.shape[-3], keys.shape[-1]) != (kv_heads, width)
        or (keys.shape[-4] == 0 if paged else keys.shape[-4] != batch)
        or 0 in keys.shape[:-4] + keys.shape[-2:-1]
        or lengths.shape != (batch,)
        or (heads % kv_heads if kv_heads else heads)
    ):
        raise ValueError(
            "decode_attention takes q [B, H, D], k and v [B, K, D], caches [B, K, S, D] (or, with "
            "layer, [L, B, K, S, D]; with table [N, K, P, D] or [L, N, K, P, D]) and lengths [B], H a "
            "multiple of K, L, S, N and P not 0; not "
            f"{q.shape}, {k.shape}, {v.shape}, {keys.shape}, {values.shape} and {lengths.shape}"
        )
    if (window is not None and window < 1) or (cap is not None and not cap > 0):
        raise ValueError(
            f"sliding_window={window} and soft_cap={cap}: each must be positive, or None"
        )


def _run(operation: Operation, static: Options, operands: list[Any], arrays: int) -> Any:
    """The results of the operation; ``arrays`` is the number of its operands without a table."""
    floats = operands[: 3 if arrays > _SCALES else 5]
    has_kernel = all(a.dtype in FLOATS for a in floats) and has_static_shapes(*operands)
    if not has_kernel or operands[1].dtype != operands[2].dtype:
        return operation.definition(static, *operands)
    mesh = explicit.mesh_of(*operands)
    if mesh is None:
        return operation(operands, static)
    wanted = [explicit.entries(operands[i]) for i in (0, 3, 4, _SCALES, _SCALES + 1) if i < arrays]
    static = static._replace(division=explicit.Division.of(mesh, wanted[1]))
    run = lambda *a: operation(a, static)
    return explicit.automatic(run, mesh, wanted)(*operands)


def definition(static: Options, *operands: jax.Array) -> list[jax.Array]:
    """The definition of :func:`decode_attention`, in jnp; ``q`` is ``[B, K, H/K, D]`` here."""
    _, _, _, keys, _, layer, lengths, *_ = operands
    step, slots = written(static, *operands), keys.shape[-2]
    layers = [layer_of(a, layer) for a in step.layers()]
    sees = seen(static, lengths, jnp.arange(slots), slots)
    return _attention(static, step, layers, sees, *operands)


def paged_definition(static: Options, *operands: jax.Array) -> list[jax.Array]:
    """The definition of :func:`decode_attention` with a table of pages, the last operand."""
    *rest, table = operands
    _, _, _, keys, _, layer, lengths, *_ = rest
    pages, _, size, _ = keys.shape[-4:]
    slots = table.shape[1] * size
    write = functools.partial(_write_pages, table)
    step = written(static, *rest, write=write, table=table)
    layers = [pages_of(a, layer, table) for a in step.layers()]
    sees = seen(static, lengths, jnp.arange(slots), slots)
    sees &= jnp.repeat(is_page(table, pages), size, axis=1)
    return _attention(static, step, layers, sees, *rest)


def _write_each(
    arrays: Sequence[jax.Array], new: Sequence[jax.Array], layer: jax.Array, place: jax.Array,
    table: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    pairs = zip(arrays, new, strict=True)
    return [write_tokens(a, x[:, None], layer, place[:, None], table=table) for a, x in pairs]


def _write_pages(
    table: jax.Array, arrays: Sequence[jax.Array], new: Sequence[jax.Array], layer: jax.Array,
    place: jax.Array, write: Any = _write_each,
) -> list[jax.Array]:  # fmt: skip
    """Pools ``[(L,) N, K, P, ...]`` with tokens ``[B, K, ...]`` at positions ``[B]`` of the sequences."""
    single = arrays[0].ndim == new[0].ndim + 1
    found = write([a[None] for a in arrays] if single else arrays, new, layer, place, table)
    return [a[0] for a in found] if single else found


def _attention(
    static: Options, step: Written, layers: list[jax.Array], sees: jax.Array, *operands: jax.Array
) -> list[jax.Array]:
    """The attention to keys and values ``[B, K, S, D]`` where ``sees`` ``[B, S]``, and the caches."""
    q, _, _, _, _, _, lengths, _, _, sinks, slopes, *_ = operands
    seen_keys, seen_values = _floats(layers)
    slots = seen_keys.shape[2]
    scores = jnp.einsum("bkgd,bksd->bkgs", step.q * static.scale, seen_keys)
    if static.cap:
        scores = static.cap * jnp.tanh(scores / static.cap)
    scores = biased(scores, static, lengths, jnp.arange(slots), slots, slopes)
    scores = jnp.where(sees[:, None, None], scores, -jnp.inf)
    if sinks.size:
        of_all = jnp.broadcast_to(sinks[None, :, :, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, of_all], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :slots]
    out = jnp.einsum("bkgs,bksd->bkgd", weights, jnp.where(sees[:, None, :, None], seen_values, 0))
    return step.answer(out, lengths, q.dtype)


def _floats(layers: list[jax.Array]) -> list[jax.Array]:
    """The keys and values of one layer, which are followed by their scales for int8, in float32."""
    if len(layers) == 2:
        return [a.astype(jnp.float32) for a in layers]
    return [restored(n, scale) for n, scale in zip(layers[:2], layers[2:], strict=True)]


# -- as a JAX primitive


def _types(static: Options, q: Any, *rest: Any) -> list[Any]:
    return [q, rest[2], rest[3], *rest[_SCALES - 1 :]]


def _kernel(static: Options, *operands: Any, table: Sequence[Any] = ()) -> Any:
    q, _, _, keys, values, *_ = operands
    batch, kv_heads, group, width = q.shape
    flat = q.reshape(batch, kv_heads * group, width)
    changed = (keys, values, *operands[_SCALES:])
    results = types_of((flat, *changed))
    aliases = {3: 1, 4: 2} | {_SCALES + i: 3 + i for i in range(len(changed) - 2)}
    call = jax.ffi.ffi_call("maxjax_decode_attention", results, input_output_aliases=aliases)
    out, *changed = call(
        flat, *operands[1:], *table,
        scale=np.float32(static.scale), window=np.int64(static.window), cap=np.float32(static.cap),
        interleaved=static.interleaved, rotating=static.rotating,
    )  # fmt: skip
    return out.reshape(q.shape), *changed


def _on_cuda(static: Options, *operands: Any) -> Any:
    why = triton.lacks(static, *operands) or unavailable(program_device())
    if refused("decode attention on a GPU", why):
        return in_blocks(static, 1, *operands)
    return triton.kernel(static, *operands)


def _on_tpu(static: Options, devices: int, *operands: Any) -> Any:
    write = functools.partial(write_token, division=static.division)
    return in_blocks(static, devices, *operands, write=write)


def _rule(ranks: Sequence[int], rows: str = "b") -> Any:
    """Batch and KV heads may be split, alike in all operands; all other axes are replicated.

    ``rows`` is the axis of the cache before the heads.
    """
    b, h = "b", "h"
    cache = ArrayMapping(*["l"][: ranks[3] - 4], rows, h, "s", "d")
    # `v` and `values` are scalars where the keys are the values too.
    values, v = (cache, ArrayMapping(b, h, "d")) if ranks[4] else (ArrayMapping(), ArrayMapping())
    q, kv = ArrayMapping(b, h, "g", "d"), ArrayMapping(b, h, "d")
    angles = ArrayMapping(b, "p")
    scales = (ArrayMapping(*cache[:-1]),) * (len(ranks) - _SCALES)
    # Axes n and m have the query heads of a KV head, or length 0 without sinks or slopes.
    sinks, slopes = ArrayMapping(h, "n"), ArrayMapping(h, "m")
    operands = (
        q,
        kv,
        v,
        cache,
        values,
        ArrayMapping(),
        ArrayMapping(b),
        angles,
        angles,
        sinks,
        slopes,
        *scales,
    )
    return operands, (q, cache, values, *scales)


def _shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    """Batch and heads are split as they are in the cache, which is by far the largest operand."""
    *layers, batch, heads, _, _ = specs[3]
    cache, head = [*[()] * len(layers), batch, heads, (), ()], [batch, heads, ()]
    v, values = (head, cache) if specs[4] else ([], [])
    operands = [
        [batch, heads, (), ()],
        head,
        v,
        cache,
        values,
        [],
        [batch],
        [batch, ()],
        [batch, ()],
        [heads, ()],
        [heads, ()],
    ]
    scales = [cache[:-1]] * (len(specs) - _SCALES)
    return operands + scales, [[batch, heads, (), ()], cache, values, *scales], ()


_OPERATION = Operation(
    "maxjax_decode_attention", _types, definition,
    {"cpu": _kernel, "cuda": _on_cuda}, _rule, _shardings,
    forms={"rocm": in_blocks, "tpu": _on_tpu},
)  # fmt: skip


# -- with a table of pages


def _paged_kernel(static: Options, *operands: Any) -> Any:
    return _kernel(static, *operands[:-1], table=operands[-1:])


def _paged_by(
    module: Any, unavailable: Any, where: str, write: Any, static: Options, *operands: Any
) -> Any:
    """The kernel of a module, or the definition where it has none for these operands."""
    *rest, table = operands
    why = module.lacks(static, *operands) or unavailable(program_device())
    if refused(f"decode attention to pages on a {where}", why):
        return paged_definition(static, *operands)
    write = functools.partial(_write_pages, table, write=write)
    return module.kernel(static, *rest, table=table, write=write)


def copies_pages(device: Any, static: Options, *operands: Any) -> str:
    """Why decode attention copies the pages of sequences; "" if a device has a kernel that reads them in place.

    Args:
        device: a ``jax.Device``, or its ``AbstractDevice``.
        static, operands: static arguments and operands, which may be their types, of :data:`PAGED_NAME` in a jaxpr.
    """
    kind = device.device_kind
    if device.platform == "cpu":
        return "" if native.library() else "this installation has no kernels for CPUs"
    if device.platform != "tpu" and "NVIDIA" not in kind:
        return f"there is no kernel for a {kind}"
    q, k, v, keys, *rest = operands
    parts = 1
    if static.division is not None:
        parts = explicit.parts_over(static.division.mesh, static.division.entries[-3])
    part = lambda a, axis: jax.ShapeDtypeStruct(
        (*a.shape[:axis], a.shape[axis] // parts, *a.shape[axis + 1 :]), a.dtype
    )
    module, unavailable_on = (
        (paged_decode, no_mosaic) if device.platform == "tpu" else (triton, unavailable)
    )
    q, keys = part(q, 1), part(keys, keys.ndim - 3)
    return module.lacks(static, q, k, v, keys, *rest) or unavailable_on(abstract_device(device))


_paged_on_cuda = functools.partial(_paged_by, triton, unavailable, "GPU", _write_each)
_paged_on_tpu = functools.partial(_paged_by, paged_decode, no_mosaic, "TPU", write_token_of_pages)


def _paged_rule(ranks: Sequence[int]) -> Any:
    operands, results = _rule(ranks[:-1], "n")
    return (*operands, ArrayMapping("b", "m")), results


def _paged_shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    """Heads are split as they are in the pool; each device has all pages, sequences and tables."""
    specs = list(specs[:-1])
    heads = specs[3][-3] or specs[0][1]
    specs[3] = [*[()] * (len(specs[3]) - 3), heads, (), ()]
    operands, results, summed = _shardings(specs)
    return [*operands, [(), ()]], results, summed


def _of_queries(static: Options) -> explicit.Division | None:
    """The division of the queries, from that of the keys."""
    division = static.division
    return division and division._replace(entries=((), division.entries[-3], (), ()))


PAGED_NAME = "maxjax_paged_decode_attention"
"""The name, in a jaxpr, of decode attention to pages."""

_PAGED = Operation(
    PAGED_NAME, lambda static, *operands: _types(static, *operands[:-1]),
    paged_definition, {"cpu": _paged_kernel, "cuda": _paged_on_cuda, "tpu": _paged_on_tpu},
    _paged_rule, _paged_shardings, division=_of_queries,
)  # fmt: skip
