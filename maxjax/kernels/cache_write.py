"""Writes tokens into slots of one layer of a cache, in place.

Shapes: L layers, B sequences, T tokens, K KV heads, S slots; N pages of P slots, M pages of each sequence
(``pages.py``); axes after the slots belong to one token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit
from .cache_read import bits, from_bits
from .decode import step
from .operation import Operation, has_static_shapes, types_of
from .pages import checked_table, places_of
from .pallas import program_device
from .stack_slice import layer_of
from .tpu import cache_write as mosaic
from .tpu.mosaic import LANES, in_order
from .tpu.mosaic import unavailable as no_mosaic


def write_tokens(
    array: jax.Array,
    new: jax.Array,
    layer: jax.Array,
    place: jax.Array,
    consecutive: bool = False,
    division: explicit.Division | None = None,
    table: jax.Array | None = None,
) -> jax.Array:
    """``array`` with tokens written to slots ``place`` of a layer.

    Args:
        array: the cache ``[L, B, K, S, ...]``; with ``table`` a pool of pages ``[L, N, K, P, ...]``.
        new: the tokens ``[B, T, K, ...]``, which are converted to the cache's dtype.
        layer: index of the layer, an int32 scalar.
        place: the slot of each token, int32 ``[B, T]``. Tokens with slots from S on are dropped; the other
            slots of a row must differ.
        consecutive: whether in each row the tokens that are not dropped come first, and their slots are
            consecutive. TPUs then write each row at once.
        division: how a mesh shards ``array``, if that is known.
        table: the pages of each sequence, integers ``[B, M]``; then ``place`` is the position of each token in its
            sequence, and token p is written to slot ``p % P`` of page ``table[b, p // P]``. Tokens with negative
            positions, with positions from M · P on, or whose page is outside 0 to N - 1, are dropped; no two
            others may have the same place. TPUs write page by page, which takes longer the more often tokens that
            follow each other are of different pages.

    Raises:
        ValueError: the table is not of this form.

    Example:
        >>> cache, new = jnp.zeros((1, 1, 1, 4)), jnp.array([[[5.0], [6.0], [7.0]]])
        >>> write_tokens(cache, new, jnp.int32(0), jnp.array([[1, 2, 4]]), True)[0, 0, 0].tolist()
        [0.0, 5.0, 6.0, 0.0]
    """
    new = new.astype(array.dtype)
    mesh = explicit.mesh_of(array, new)
    if table is not None:
        table = checked_table(table, place.shape[0])
        fits = has_static_shapes(array, place, table)
        if mesh is not None:
            division = explicit.Division.of(mesh, explicit.entries(array))
        elif division is not None:
            division = division._replace(entries=division.entries[: array.ndim])
        write: Any = (lambda *operands: _PAGES(operands, division)[0]) if fits else _scattered
        write = explicit.automatic(write, mesh, explicit.entries(array))
        return write(array, new, layer, place, table)
    if mesh is not None:
        division = explicit.Division.of(mesh, explicit.entries(array))
    elif division is not None:  # scales have one axis less than keys
        division = division._replace(entries=division.entries[: array.ndim])
    if division is not None and division.entries[3]:
        division = None  # the slots of a row are on several devices

    fits = has_static_shapes(array, place) and place.shape[1] <= array.shape[3]

    def run(*operands: jax.Array) -> jax.Array:
        return _OPERATION(operands, _Write(consecutive and fits, division))[0]

    return explicit.automatic(run, mesh, explicit.entries(array))(array, new, layer, place)


def _scattered(
    array: jax.Array,
    new: jax.Array,
    layer: jax.Array,
    place: jax.Array,
    table: jax.Array | None = None,
) -> jax.Array:
    row = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]
    if table is not None:
        row, place, _ = places_of(table, place, array.shape[1], array.shape[3])
    return _put(array, new, layer, row, place)


@jax.custom_jvp
def _put(array: jax.Array, new: jax.Array, *index: jax.Array) -> jax.Array:
    def of_bits(array: jax.Array, new: jax.Array, *index: jax.Array) -> jax.Array:
        return from_bits(_set_all_heads(bits(array), bits(new), *index), array.dtype)

    # On CPUs XLA converts a whole bfloat16 array to float32 before a scatter, and back after it, so
    # the bits are scattered there. On TPUs that bitcast would copy the array.
    return jax.lax.platform_dependent(array, new, *index, cpu=of_bits, default=_set)


@_put.defjvp
def _put_jvp(primals: Any, tangents: Any) -> Any:
    array, _, layer, row, place = primals
    changes = (tangents[0], tangents[1].astype(array.dtype))
    # A scatter has a transpose only with unique_indices, which dropped tokens must satisfy too. XLA for
    # TPUs copies the whole array for such a scatter, so only the derivative uses it.
    size, (batch, length) = array.shape[3], place.shape
    other = size + jnp.arange(batch * length, dtype=jnp.int32).reshape(batch, length)
    differing = jnp.where(place < size, place, other)
    return _put(*primals), _set(*changes, layer, row, differing, unique_indices=True)


def _set_all_heads(
    array: jax.Array, new: jax.Array, layer: jax.Array, row: jax.Array, place: jax.Array
) -> jax.Array:
    # With a slice for the heads, devices that have different heads exchange nothing.
    return array.at[layer, row, :, place].set(new, mode="drop")


def _set(
    array: jax.Array,
    new: jax.Array,
    layer: jax.Array,
    row: jax.Array,
    place: jax.Array,
    **options: Any,
) -> jax.Array:
    # The heads are an index too: with a slice for them XLA copies the whole array on TPUs.
    heads = jnp.arange(array.shape[2], dtype=jnp.int32)
    return array.at[layer, row[:, :, None], heads, place[:, :, None]].set(
        new, mode="drop", **options
    )


# -- in place on CPUs, rows at once on TPUs


class _Write(NamedTuple):
    """Static arguments: whether each row can be written at once, and how a mesh shards the array."""

    at_once: bool
    division: explicit.Division | None


def _definition(static: _Write, *operands: jax.Array) -> list[jax.Array]:
    return [_scattered(*operands)]


def _kernel(static: _Write | None, *operands: jax.Array) -> Any:
    results = types_of(operands[:1])
    call = jax.ffi.ffi_call("maxjax_write_tokens", results, input_output_aliases={0: 0})
    return call(*operands)


def _row_by_row(
    static: _Write,
    array: jax.Array,
    new: jax.Array,
    layer: jax.Array,
    place: jax.Array,
) -> list[jax.Array]:
    """The form for TPUs, which writes one row after the other: for a scatter, XLA copies a cache whose slots
    are last in memory."""
    if not static.at_once:
        return _definition(static, array, new, layer, place)
    slots, length = array.shape[3], place.shape[1]
    new = new.swapaxes(1, 2)  # [B, K, T, ...]
    zero, tail = jnp.int32(0), [jnp.int32(0)] * (array.ndim - 4)
    # T slots are written at once. Near the end of the cache, where tokens are dropped, they begin before
    # the slot of the first token, so that padding precedes it.
    before = jnp.pad(new, ((0, 0), (0, 0), (length, 0), *((0, 0),) * len(tail)))
    one = (1, *before.shape[1:2], length, *before.shape[3:])
    index = jnp.arange(length, dtype=jnp.int32)

    def write(row: jax.Array, array: jax.Array) -> jax.Array:
        at = layer_of(place, row)
        start = jnp.clip(at[0], 0, slots - length)
        skipped = jnp.clip(at[0] - start, 0, length)
        token = index - skipped
        is_new = (token >= 0) & (token < jnp.sum(at < slots, dtype=jnp.int32))
        cut = lambda a, begin, shape: jax.lax.dynamic_slice(
            a, begin, shape, allow_negative_indices=False
        )
        found = cut(before, (row, zero, length - skipped, *tail), one)[None]
        begin = (layer, row, zero, start, *tail)
        is_new = is_new.reshape(1, 1, 1, length, *(1,) * len(tail))
        found = jnp.where(is_new, found, cut(array, begin, found.shape))
        return jax.lax.dynamic_update_slice(array, found, begin, allow_negative_indices=False)

    return [jax.lax.fori_loop(0, place.shape[0], write, array)]


def _types(static: _Write | None, array: Any, *rest: Any) -> list[Any]:
    return [array]


def _shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    _, batch, heads, _, *rest = cache = [*specs[0]]
    return [cache, [batch, (), heads, *rest], [], [batch, ()]], [cache], ()


_OPERATION = Operation(
    "maxjax_write_tokens", _types, _definition, {"cpu": _kernel, "tpu": _row_by_row}, None, _shardings,
    division=lambda static: static.division if static.at_once else None,
)  # fmt: skip


# -- pages of a pool


def _pages_definition(static: explicit.Division | None, *operands: jax.Array) -> list[jax.Array]:
    return [_scattered(*operands)]


def _page_by_page(
    static: explicit.Division | None, array: jax.Array, new: jax.Array, layer: jax.Array,
    place: jax.Array, table: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    """The form for TPUs, which rewrites one page after the other: for a scatter, XLA copies a pool whose slots are
    last in memory."""
    pages, size = array.shape[1], array.shape[3]
    page, slot, exists = (a.reshape(-1) for a in places_of(table, place, pages, size))
    tokens = new.reshape(-1, *new.shape[2:])  # [N, K, ...]
    index = jnp.arange(page.size, dtype=jnp.int32)
    # The first tokens of pages. Those that are dropped are of no page, and do not end one.
    last = jax.lax.cummax(jnp.where(exists, index, -1))
    before = jnp.pad(last, (1, 0), constant_values=-1)[:-1]
    is_first = exists & ((before < 0) | (page[before] != page))
    first = jnp.sort(jnp.where(is_first, index, page.size))
    slots, zeros = jnp.arange(size, dtype=jnp.int32)[None], [jnp.int32(0)] * (array.ndim - 2)
    is_turned = array.ndim == 5 and array.shape[4] % LANES > 0 and size % LANES == 0
    turned = (lambda a: a.swapaxes(3, 4)) if is_turned else lambda a: a

    def write(i: jax.Array, array: jax.Array) -> jax.Array:
        number = layer_of(page, layer_of(first, i))
        is_here = exists & (page == number)
        source = jnp.where(is_here[:, None] & (slot[:, None] == slots), index[:, None], -1)
        source = jnp.max(source, axis=0)  # the token of each slot, [P]
        found = turned(jnp.take(tokens, source, axis=0, mode="clip").swapaxes(0, 1)[None, None])
        begin = (layer, number, *zeros)
        is_new = turned((source >= 0).reshape(1, 1, 1, size, *(1,) * (array.ndim - 4)))
        old = jax.lax.dynamic_slice(array, begin, found.shape, allow_negative_indices=False)
        found = jnp.where(is_new, found, old)
        return in_order(
            jax.lax.dynamic_update_slice(array, found, begin, allow_negative_indices=False)
        )

    count = jnp.sum(is_first, dtype=jnp.int32)
    return [turned(in_order(jax.lax.fori_loop(0, count, write, in_order(turned(array)))))]


def _pages_rule(ranks: Sequence[int]) -> Any:
    token = [f"d{i}" for i in range(ranks[0] - 4)]
    pool, new = ArrayMapping("l", "n", "h", "p", *token), ArrayMapping("b", "t", "h", *token)
    return (pool, new, ArrayMapping(), ArrayMapping("b", "t"), ArrayMapping("b", "m")), (pool,)


def _pages_shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    """Each device has all pages, tokens and tables, of its heads."""
    _, _, heads, _, *token = specs[0]
    pool = [(), (), heads, (), *token]
    return [pool, [(), (), heads, *token], [], [(), ()], [(), ()]], [pool], ()


_PAGES = Operation(
    "maxjax_write_pages", _types, _pages_definition, {"cpu": _kernel, "tpu": _page_by_page},
    _pages_rule, _pages_shardings, division=lambda static: static,
)  # fmt: skip


def write_token_of_pages(
    arrays: Sequence[jax.Array], new: Sequence[jax.Array], layer: jax.Array, place: jax.Array,
    table: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    """As :func:`write_token` for the pools on one TPU.

    Args:
        arrays: pools ``[L, N, K, P, D]``, and scales ``[L, N, K, P]``.
        new, layer: as for :func:`write_token`.
        place: the position of each token in its sequence, int32 ``[B]``; no two tokens are of the same page.
        table: the pages of each sequence, int32 ``[B, M]``.
    """
    pages, size = arrays[0].shape[1], arrays[0].shape[3]
    page, slot, _ = (a[:, 0] for a in places_of(table, place[:, None], pages, size))

    def write(
        arrays: list[jax.Array], new: list[jax.Array], layer: jax.Array, slot: jax.Array
    ) -> list[jax.Array]:
        pairs = zip(arrays, new, strict=True)
        return [_put(a, x[:, None], layer, page[:, None], slot[:, None]) for a, x in pairs]

    if no_mosaic(program_device()) or size % LANES:
        return write(list(arrays), list(new), layer, slot)
    return _by_layout(
        write, functools.partial(mosaic.write_token, row=page), arrays, new, layer, slot
    )


# -- one token of each row


class _Token(NamedTuple):
    """Static arguments: how many arrays are written, and how a mesh shards the first one."""

    count: int
    division: explicit.Division | None


def write_token(
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    layer: jax.Array,
    slot: jax.Array,
    division: explicit.Division | None = None,
) -> list[jax.Array]:
    """As ``decode.step.write_token``, but in place also where TPUs keep the slots last in memory.

    Args:
        arrays: caches ``[(L,) B, K, S, D]``, and scales without D.
        new: one token for each array, ``[B, K, D]`` and ``[B, K]``, in the dtypes of ``arrays``.
        layer: index of the layer, if there are several.
        slot: the slot of each sequence, int32 ``[B]``; tokens with slots from S on are dropped.
        division: how a mesh shards the keys, if that is known.
    """
    write_turned = functools.partial(_write_turned, division=division)
    return _by_layout(step.write_token, write_turned, arrays, new, layer, slot)


def _by_layout(
    write: Any, write_turned: Any, arrays: Sequence[jax.Array], new: Sequence[jax.Array],
    layer: jax.Array, slot: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    """``arrays`` after ``write``, or ``write_turned`` for those whose slots are last in a TPU's memory."""
    turned = [n.ndim < 3 or n.shape[2] % LANES > 0 for n in new]
    written = list(arrays)
    for kind, run in ((False, write), (True, write_turned)):
        of_kind = [i for i, one in enumerate(turned) if one == kind]
        if of_kind:
            found = run([arrays[i] for i in of_kind], [new[i] for i in of_kind], layer, slot)
            for i, array in zip(of_kind, found, strict=True):
                written[i] = array
    return written


def _write_turned(
    arrays: list[jax.Array],
    new: list[jax.Array],
    layer: jax.Array,
    slot: jax.Array,
    division: explicit.Division | None,
) -> list[jax.Array]:
    """:func:`write_token` for arrays whose slots are last in memory."""
    single = arrays[0].ndim == new[0].ndim + 1
    stacked = [a[None] for a in arrays] if single else arrays
    number = jnp.int32(0) if single else layer
    static = _Token(len(arrays), _of_layers(division, stacked[0].ndim))
    found = _TOKEN([*stacked, *new, number, slot], static)
    return [a[0] for a in found] if single else found


def _of_layers(division: explicit.Division | None, rank: int) -> explicit.Division | None:
    """The division of all layers' keys (or scales, by ``rank``), from that of the keys of all or of one."""
    if division is None or division.entries[-2]:  # the slots of a row are on several devices
        return None
    return division._replace(entries=((), *division.entries[-4:])[:rank])


def _parts(static: _Token, operands: Sequence[Any]) -> Any:
    count = static.count
    return operands[:count], operands[count : 2 * count], *operands[2 * count :]


def _token_definition(static: _Token, *operands: jax.Array) -> list[jax.Array]:
    return step.write_token(*_parts(static, operands))


def _token_on_tpu(static: _Token, *operands: jax.Array) -> list[jax.Array]:
    if no_mosaic(program_device()):
        return _token_definition(static, *operands)
    return mosaic.write_token(*_parts(static, operands))


def _token_shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    layers, batch, heads, slots, *_ = specs[0]
    count = (len(specs) - 2) // 2
    ranks = [len(spec) for spec in specs[:count]]
    caches = [[layers, batch, heads, slots, ()][:n] for n in ranks]
    new = [[batch, heads, ()][: n - 2] for n in ranks]
    return [*caches, *new, [], [batch]], caches, ()


_TOKEN = Operation(
    "maxjax_write_token", lambda static, *operands: operands[: static.count], _token_definition,
    {"tpu": _token_on_tpu}, None, _token_shardings, division=lambda static: static.division,
)  # fmt: skip
