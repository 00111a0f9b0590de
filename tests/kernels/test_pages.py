"""A cache in pages does what the same cache in one piece does: decode attention, writes and reads through a table."""

import contextlib
import functools
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.kernels import decode_attention, divided_decode, native
from maxjax.kernels.cache_read import pages_of
from maxjax.kernels.cache_write import _page_by_page, _scattered, write_tokens
from maxjax.kernels.decode import triton
from maxjax.kernels.divided_decode import Divided
from maxjax.kernels.tpu import paged_decode
from maxjax.nn.kv_cache.slots import Latent, Slots
from scripts.sharding_product import mesh_of
from tests.kernels.decode_reference import TYPES, narrowed, operands

attention = sys.modules["maxjax.kernels.decode_attention"]
both = pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
# Pages of 4 slots, 5 for each sequence, in a pool of 23.
SIZE, EACH, PAGES = 4, 5, 23
CACHES = ("keys", "values")
LENGTHS = (5, 0, 19, -1)


def table_of(batch, each=EACH):
    """Pages in any order, all different."""
    pages = np.random.default_rng(0).permutation(max(PAGES, batch * each))[: batch * each]
    return pages.reshape(batch, each).astype(np.int32)


def in_pages(cache, table):
    """A cache ``[..., B, K, S, *rest]`` in pages of a pool of other numbers, as the second of two layers."""
    (batch, heads, slots, *rest), each = cache.shape, table.shape[1]
    rng, pages = np.random.default_rng(1), max(PAGES, table.max() + 1)
    pool = rng.integers(1, 99, (2, pages, heads, slots // each, *rest)).astype(cache.dtype)
    pool[1, table] = cache.reshape(batch, heads, each, -1, *rest).swapaxes(1, 2)
    return pool


def in_one(pool, table):
    """The inverse of :func:`in_pages`."""
    found = np.asarray(pool)[1, table].swapaxes(1, 2)
    return found.reshape(*found.shape[:2], -1, *found.shape[4:])


def contiguous(lengths=LENGTHS, **sizes):
    return operands(lengths, **({"slots": SIZE * EACH, "heads": 6} | sizes))


def paged(given, table):
    """The same operands with the caches, and the scales of int8, in pages."""
    one = (lambda a: a[given["layer"]]) if "layer" in given else (lambda a: a)
    found = given | {"table": table, "layer": 1}
    for name in CACHES:
        if given[name] is not None:
            found[name] = in_pages(one(given[name]), table)
    if "scales" in given:
        found["scales"] = tuple(in_pages(one(a), table) for a in given["scales"])
    return found


def arrays(given):
    """The caches and scales among operands."""
    return [given[name] for name in CACHES if given[name] is not None] + [*given.get("scales", ())]


KERNEL = 'custom_call_target="maxjax_decode_attention"'


def same(given, table=None, put=lambda given: given, **options):
    """Compares attention in pages to that in one cache, which is tested against NumPy."""
    table = table_of(len(given["lengths"])) if table is None else table
    run = jax.jit(functools.partial(decode_attention, **options))
    there = put(paged(given, table))
    program = run.lower(**there).compile()
    assert native.library() is None or KERNEL in program.as_text()
    for level in native.levels() or [None]:
        with native.level(level) if level else contextlib.nullcontext():
            compare(given, there, table, run(**given), program(**there))


def compare(given, there, table, wanted, found):
    """Compares the results of attention with one cache and with pages."""
    one, (wanted, *caches), (out, *pools) = given.get("layer"), wanted, found
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)
    for old, pool, cache in zip(arrays(there), pools, caches, strict=True):
        cache = cache if one is None else cache[one]
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (in_one(pool, table), cache)), rtol=1e-6, atol=1e-6
        )
        rest, old = np.array(pool), np.asarray(old)
        rest[1, table] = old[1, table]
        assert rest.tobytes() == old.tobytes()  # no other page was written


LATENT = {"v": None, "values": None}
CASES = {
    "float32": ({}, {}),
    "bfloat16": ({"cache": "bfloat16"}, {}),
    "float16": ({"cache": "float16", "width": 33}, {}),
    "rope": ({"pairs": 3}, {"interleaved": True, "scale": 0.4}),
    "window": ({}, {"sliding_window": 6}),
    "window of one": ({}, {"sliding_window": 1}),
    "cap and sinks": ({"sinks": True, "pairs": 8}, {"soft_cap": 3.0}),
    "slopes": ({"slopes": True}, {"sliding_window": 9}),
    "wide heads": ({"width": 128}, {}),
    "one head": ({"heads": 5, "kv_heads": 1, "lengths": (19,)}, {}),
}


@pytest.mark.parametrize("which", CASES)
def test_decode_attention(which):
    sizes, options = CASES[which]
    same(contiguous(**sizes), **options)


INTERPRETED = [
    "float32",
    "bfloat16",
    "rope",
    "window",
    "cap and sinks",
    "one head",
    "int8",
    "latent",
    "holes",
    "wide heads",
]


@pytest.mark.parametrize("kernel", [triton, paged_decode], ids=["gpu", "tpu"])
@pytest.mark.parametrize("which", INTERPRETED)
def test_kernels_of_other_platforms(which, kernel, monkeypatch):
    """Interpreted on a CPU, against the definition."""
    sizes, options = CASES.get(which, ({}, {}))
    if which == "latent":
        given = contiguous(kv_heads=1) | LATENT
    else:
        given = contiguous(**sizes)
    if which == "int8":
        given, _ = narrowed(given)
    table = table_of(len(given["lengths"]))
    if which == "holes":
        table[0, 0] = -1
        options = {"sliding_window": 2}
    there = paged(given, np.maximum(table, 0)) | {"table": table}

    def interpreted(static, *operands):
        *rest, table = operands
        write = functools.partial(attention._write_pages, table)
        return kernel.kernel(static, *rest, table=table, write=write, interpret=True)

    run = functools.partial(decode_attention, **options)
    expected = definition_of(attention.paged_definition, monkeypatch, run, there)
    found = definition_of(interpreted, monkeypatch, run, there)
    for one, other in zip(found, expected, strict=True):
        rounding = 1e-2 if one.dtype == jnp.bfloat16 else 1e-5
        arrays = (np.asarray(a, np.float32) for a in (one, other))
        np.testing.assert_allclose(*arrays, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("is_int8", [False, True], ids=["floats", "int8"])
def test_a_tpu_reads_some_heads_of_a_large_page_at_a_time(is_int8, monkeypatch):
    given = contiguous(heads=48, kv_heads=24, sinks=True)
    if is_int8:
        given, _ = narrowed(given)
    there = paged(given, table_of(4))
    keys = there["keys"]
    bytes_of_head = SIZE * keys.shape[4] * keys.dtype.itemsize
    monkeypatch.setattr(paged_decode, "_BYTES", 13 * bytes_of_head)
    # Scales of complete rows of registers, eight heads each.
    assert paged_decode._heads_at_once(keys) == (8 if is_int8 else 12)

    def interpreted(static, *operands):
        *rest, table = operands
        write = functools.partial(attention._write_pages, table)
        return paged_decode.kernel(static, *rest, table=table, write=write, interpret=True)

    expected = definition_of(attention.paged_definition, monkeypatch, decode_attention, there)
    found = definition_of(interpreted, monkeypatch, decode_attention, there)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(paged_decode, "_BYTES", bytes_of_head - 1)
    assert paged_decode._heads_at_once(keys) == 0


def definition_of(function, monkeypatch, run, given):
    """The result of attention whose operation is this function."""
    monkeypatch.setattr(
        attention, "_run", lambda _, static, operands, arrays: function(static, *operands)
    )
    return run(**given)


@pytest.mark.parametrize("size", [1, 7, 32, 48])
def test_lengths_around_pages_and_parts(size):
    """Up to 300 tokens, more than one part of the work, in pages of several sizes."""
    each, lengths = -(-300 // size), (size - 1, size, 254, 255, 256, 257, 299)
    given = contiguous(lengths, slots=each * size, cache="bfloat16", heads=3, kv_heads=1, width=32)
    table = table_of(len(lengths), each)
    same(given, table)
    same(given, table, sliding_window=77)


def test_int8():
    given, _ = narrowed(contiguous(pairs=4, sinks=True))
    same(given, sliding_window=7)


@pytest.mark.parametrize("is_int8", [False, True], ids=["floats", "int8"])
def test_latent(is_int8):
    given = contiguous(kv_heads=1, heads=7, width=40) | {"v": np.float32(0)}
    if is_int8:
        given, _ = narrowed(given)
        given["scales"] = given["scales"][:1]
    same(given | LATENT)


@pytest.mark.parametrize("lengths", [(37,), (37, -1, -1), (18, 3, -1)], ids=str)
def test_results_do_not_depend_on_other_sequences_and_pages(lengths):
    """In every bit: how the work is divided between threads does not change a sum."""
    more = (*lengths[:1], *range(39, 39 - 12, -1))
    given = contiguous(more, slots=40, heads=22, kv_heads=1, width=64)
    run = jax.jit(functools.partial(decode_attention, sliding_window=30))
    wanted, *_ = run(**paged(given, table_of(13, 10)))
    fewer = {name: a[: len(lengths)] for name, a in given.items()} | {"lengths": np.array(lengths)}
    found, *_ = run(**paged(fewer, table_of(len(lengths), 10)))
    assert np.asarray(found[0]).tobytes() == np.asarray(wanted[0]).tobytes()


def test_one_layer_without_its_axis():
    given, table = contiguous(), table_of(4)
    there = paged(given, table)
    wanted = jax.jit(decode_attention)(**there)
    del there["layer"]
    there |= {name: there[name][1] for name in CACHES}
    out, *pools = jax.jit(decode_attention)(**there)
    np.testing.assert_array_equal(out, wanted[0])
    for pool, stack in zip(pools, wanted[1:], strict=True):
        np.testing.assert_array_equal(pool, stack[1])


@pytest.mark.parametrize("form", ["kernel", "definition"])
@pytest.mark.parametrize("missing", [-1, PAGES, 2**31 - 1])
def test_tokens_without_pages(missing, form):
    """A new token without a page is not written and gets NaN; earlier ones are as if they had never been."""
    given, table = contiguous((5, 17, 20, 40, 6), heads=2), table_of(4)
    table = np.concatenate([table, table[:1]])
    table[4], table[0, 2:], table[1, 4], table[4, 1] = missing, missing, missing, 22
    there = paged(given, np.clip(table, 0, PAGES - 1)) | {"table": table}
    run = jax.jit(decode_attention)
    run = run if form == "kernel" else export.export(run)(**there).call
    out, *pools = run(**there)
    assert np.isnan(out[1:4]).all() and np.isfinite(out[0]).all() and np.isfinite(out[4]).all()
    whole = paged(given, np.clip(table, 0, PAGES - 1))
    np.testing.assert_allclose(
        out[0], jax.jit(decode_attention)(**whole)[0][0], rtol=1e-6, atol=1e-6
    )
    for name, new, pool in zip(CACHES, ("k", "v"), pools, strict=True):
        old = there[name].copy()
        old[1, table[0, 1], :, 1], old[1, 22, :, 2] = given[new][0], given[new][4]
        np.testing.assert_array_equal(pool, old)
    # The last row sees three tokens only.
    keys, values = (np.asarray(pool)[1, 22, :, :3] for pool in pools)  # [K, 3, D]
    scores = np.einsum("kd,ksd->ks", given["q"][4], keys) / 4
    weights = np.exp(scores - scores.max(1, keepdims=True))
    exact = np.einsum("ks,ksd->kd", weights / weights.sum(1, keepdims=True), values)
    np.testing.assert_allclose(out[4], exact, rtol=1e-5)


def test_missing_pages_behind_a_window():
    given, table = contiguous((18, 9)), table_of(2)
    run = jax.jit(functools.partial(decode_attention, sliding_window=5))
    wanted, *_ = run(**paged(given, table))
    holes = table.copy()
    holes[0, :3] = holes[1, :1] = -1
    there = paged(given, table) | {"table": holes}
    there["keys"][1, table[0, :3]] = np.nan  # nobody reads them
    np.testing.assert_array_equal(run(**there)[0], wanted)


def test_invalid_arguments():
    there = paged(contiguous(), table_of(4))
    table = there["table"]
    for wrong in (table[:2], table[0], table.astype(np.float32), table[:, :0]):
        with pytest.raises(ValueError, match=r"table must be integers \[4, M\]"):
            decode_attention(**there | {"table": wrong})
    with pytest.raises(ValueError, match="rotating must be False"):
        decode_attention(**there, rotating=True)
    empty = {name: there[name][:, :0] for name in CACHES}
    with pytest.raises(ValueError, match="N and P not 0"):
        decode_attention(**there | empty)
    new, place = np.zeros((4, 1, 2, 16), np.float32), np.zeros((4, 1), np.int32)
    with pytest.raises(ValueError, match="table must be integers"):
        write_tokens(jnp.asarray(there["keys"]), new, jnp.int32(0), place, table=table[:3])


def test_derivatives_and_exports():
    given = contiguous((5, 0, 19), heads=2, pairs=4)
    there, given = paged(given, table_of(3)), given
    names = ("q", "k", "v", *CACHES)

    def loss(floats, rest):
        out, *caches = decode_attention(**rest, **floats)
        return (out**2).sum() + sum((a**3).sum() for a in caches) / 99

    of = lambda g: jax.jit(jax.grad(loss))(
        {n: jnp.asarray(g[n]) for n in names}, {n: a for n, a in g.items() if n not in names}
    )
    found, wanted = of(there), of(given)
    for name in names:
        one = in_one(found[name], there["table"]) if name in CACHES else found[name]
        np.testing.assert_allclose(one, wanted[name], rtol=1e-5, atol=1e-6)
    exported = export.export(jax.jit(decode_attention))(**there)
    wanted = jax.jit(decode_attention)(**there)
    for one, other in zip(exported.call(**there), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    rows = {name: jnp.stack([there[name]] * 2) for name in CACHES}
    both = jax.vmap(
        lambda keys, values: decode_attention(**there | {"keys": keys, "values": values})[0]
    )
    np.testing.assert_allclose(both(**rows)[1], wanted[0], rtol=1e-6, atol=1e-6)


DIVIDED = {
    "floats": {},
    "bfloat16": {"dtype": "bfloat16"},
    "window": {"window": 6, "cap": 2.0},
    "int8": {"dtype": "int8"},
    "latent": {"is_shared": True, "heads": 1},
    "latent int8": {"is_shared": True, "heads": 1, "dtype": "int8"},
}


def divided(dtype="float32", heads=2, window=0, cap=0.0, is_shared=False):
    """Operands of attention to the tokens of three devices, of which the first text has one and the last none."""
    rng = np.random.default_rng(0)
    make = lambda dtype, *shape: jnp.asarray(9 * rng.standard_normal(shape), dtype)
    count = 1 if is_shared else 2
    pool = [make(dtype, L, PAGES, heads, SIZE, 16) for _ in range(count)]
    if dtype == "int8":
        pool += [make("float32", L, PAGES, heads, SIZE) / 9 for _ in range(count)]
    static = Divided(0.1, window, cap, 3, is_shared, "float32")
    q = make("bfloat16" if dtype == "bfloat16" else "float32", 5, 1, 6, 16)
    ends = jnp.array([1, 2, 14, 58, 0], jnp.int32)
    return static, q, ends, jnp.int32(1), jnp.asarray(table_of(5)), pool


@pytest.mark.parametrize("kernel", [triton, paged_decode], ids=["gpu", "tpu"])
@pytest.mark.parametrize("which", DIVIDED)
def test_parts_of_pages(which, kernel):
    """Kernels, interpreted, and the definition, for each of the devices."""
    static, q, ends, layer, table, pool = divided(**DIVIDED[which])
    module = types.SimpleNamespace(
        lacks=lambda *_: "", sums=functools.partial(kernel.sums, interpret=True)
    )
    run = functools.partial(divided_decode._kernel, module, lambda _: "", "")
    for first in range(static.parts):
        operands = q, ends, jnp.int32(first), layer, table, *pool
        found, wanted = run(static, *operands), divided_decode._definition(static, *operands)
        has_keys = np.asarray(ends) > first
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            rounding = 1e-2 if one.dtype == jnp.bfloat16 else 1e-5
            one, other = (np.asarray(a, np.float32)[has_keys] for a in (one, other))
            # A sum may cancel: its rounding goes by the size of its terms, not by its own.
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * abs(other).max())
            assert np.isfinite(one).all()
        assert (np.asarray(found[1])[~has_keys] == jnp.finfo(jnp.float32).min).all()


# --- writes and reads ---------------------------------------------------------------------------

L, B, K, T, D = 2, 4, 2, 7, 3
# Over borders of pages, beyond the end, with tokens that are dropped; and in any order.
PLACE = np.array([[*range(2, 9)], [*range(16, 23)], [-1, -5, 11, 10, 4, 40, 0], [20] * 7], np.int32)


def tokens(width, dtype):
    rng = np.random.default_rng(3)
    make = lambda *shape: (9 * rng.standard_normal(shape)).astype(TYPES.get(dtype, dtype))
    return make(B, K, SIZE * EACH, *width), make(B, T, K, *width)


@pytest.mark.parametrize("width", [(D,), ()], ids=["keys", "scales"])
@pytest.mark.parametrize("dtype", [*TYPES, "int8"])
def test_writes_and_reads(dtype, width):
    cache, new = tokens(width, dtype)
    table = table_of(B)
    table[0, 2] = PAGES  # the page of the last token of row 0
    pool = in_pages(cache, np.clip(table, 0, PAGES - 1))
    wanted = pool.copy()
    for b, t in np.ndindex(PLACE.shape):
        place = PLACE[b, t]
        if 0 <= place < SIZE * EACH and table[b, place // SIZE] < PAGES:
            wanted[1, table[b, place // SIZE], :, place % SIZE] = new[b, t]
    run = jax.jit(lambda a, *rest: write_tokens(a, *rest[:-1], table=rest[-1], consecutive=True))
    found = run(pool, new, jnp.int32(1), PLACE, table)
    assert np.asarray(found).tobytes() == wanted.tobytes()
    read = jax.jit(pages_of)(found, jnp.int32(1), table[:, ::-1])
    exact = in_one(wanted, np.clip(table[:, ::-1], 0, PAGES - 1))
    one = slice(2 * SIZE, 3 * SIZE)  # not a page
    for a in (read := np.array(read), exact):
        a[0, :, one] = 0
    assert read.tobytes() == exact.tobytes()


@pytest.mark.parametrize("width", [(D,), (), (128,)], ids=["keys", "scales", "wide"])
@pytest.mark.parametrize("dtype", [*TYPES, "int8"])
def test_pages_are_written_one_after_the_other(dtype, width):
    """As TPUs do it, where tokens of a text follow each other or are in any order."""
    cache, new = tokens(width, dtype)
    table = table_of(B)
    table[0, 2] = PAGES
    pool = in_pages(cache, np.clip(table, 0, PAGES - 1))
    # The last one has the same place for all tokens.
    place = np.where(PLACE == 20, [*range(5), -1, 19], PLACE)
    texts = np.array([0, 1, 1, 1, 1, 0, 1, 2, 2, 2, 0], np.int32)
    rows = np.array([2, 0, 1, 2, 3, 3, 5, 9, 8, -1, 1], np.int32)
    for places, table_, given in [
        (place, table, new),
        (rows[:, None], table[texts], new.reshape(B * T, 1, *new.shape[2:])[: rows.size]),
    ]:
        operands = pool, given, jnp.int32(1), places, table_
        operands = [jnp.asarray(a) for a in operands]
        found, wanted = _page_by_page(None, *operands)[0], _scattered(*operands)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_pages_whose_slots_are_last():
    """Pages of 128 tokens of heads that 128 does not divide."""
    rng = np.random.default_rng(0)
    pool, new = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 4, 2, 128, 3), (1, 200, 2, 3))
    )
    operands = (
        pool,
        new,
        jnp.int32(1),
        70 + jnp.arange(200, dtype=jnp.int32)[None],
        jnp.array([[2, 0, 3]]),
    )
    (found,) = jax.jit(functools.partial(_page_by_page, None))(*operands)
    assert np.asarray(found).tobytes() == np.asarray(_scattered(*operands)).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_derivatives_of_writes_and_reads(dtype):
    cache, new = tokens((D,), dtype)
    table = table_of(B)
    pool, factors = (
        in_pages(cache, table),
        jnp.arange(1.0, B * EACH * SIZE + 1).reshape(B, 1, -1, 1),
    )

    def loss(pool, new):
        pool = write_tokens(pool, new, jnp.int32(1), PLACE, table=table)
        return (factors * pages_of(pool, jnp.int32(1), table).astype(jnp.float32)).sum()

    of_pool, of_new = jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(pool), jnp.asarray(new))
    wanted = np.broadcast_to(np.asarray(factors, np.float32), (B, K, SIZE * EACH, D)).copy()
    for b, t in np.ndindex(PLACE.shape):
        exists = 0 <= PLACE[b, t] < SIZE * EACH
        one = wanted[b, 0, PLACE[b, t], 0] if exists else 0
        np.testing.assert_array_equal(np.asarray(of_new, np.float32)[b, t], one)
        if exists:
            wanted[b, :, PLACE[b, t]] = 0
    np.testing.assert_array_equal(in_one(of_pool, table).astype(np.float32), wanted)


def test_slots():
    """Slots and Latent pass the table on."""
    table = table_of(2)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 9, 1, 8)).astype(np.float32)
    place = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    for kind, dtype in [
        (Slots, jnp.float32),
        (Slots, jnp.int8),
        (Latent, jnp.bfloat16),
        (Latent, jnp.int8),
    ]:
        pool = kind.empty((2, PAGES, 1, SIZE, 8), dtype).written(1, k, v, place, table=table)
        one = kind.empty((2, 2, 1, SIZE * EACH, 8), dtype).written(1, k, v, place)
        shared = kind is Latent
        new = (k[:, 0], None if shared else v[:, 0])
        lengths = np.array([9, 9], np.int32)
        found, pool = pool.decoded(k[:, 1], *new, lengths, layer=1, table=table)
        wanted, one = one.decoded(k[:, 1], *new, lengths, layer=1)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
        pages = pool.pages(1, table)
        assert len(pages) == len(one.arrays)
        for a, b in zip(pages, one.arrays, strict=True):
            np.testing.assert_array_equal(a[:, :, :10], b[1, :, :, :10])


# --- memory -------------------------------------------------------------------------------------


def copies(text, pool):
    """The lines of a program that copy a pool of this shape or gather it, in any dtype, or one layer of it."""
    dims = ",".join(map(str, pool[1:]))
    operations = "copy|copy-start|convert|bitcast-convert|all-gather|all-gather-start|fusion"
    found = re.compile(rf"= \(?\w+\[(\d+,)?{dims}\]\S* ({operations})\(")
    # Scatters, which the definition makes, are in place.
    return [line for line in text.splitlines() if found.search(line) and "scatter" not in line]


def steps(pools, q, new, lengths, table, place, scales=()):
    """A loop over the layers that writes, reads and attends."""

    def layer(i, state):
        total, *pools = state
        values = pools[:2]
        values = [write_tokens(a, new, i, place, table=table) for a in values]
        out, *pools = decode_attention(
            q, new[:, 0], new[:, 1], *values, lengths, layer=i, table=table, scales=scales or None
        )
        read = pages_of(pools[1], i, table).astype(jnp.float32).sum()
        return total + out.astype(jnp.float32).sum() + read, *pools

    return jax.lax.fori_loop(0, pools[0].shape[0], layer, (jnp.float32(0), *pools))


def of_steps(dtype, put=lambda a, *_: a):
    shape = (3, 40, 4, 16, 32)
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    pools = [put(make(*shape), None, None, "model") for _ in range(2)]
    q, new = put(make(2, 8, 32), None, "model"), put(make(2, 3, 4, 32), None, None, "model")
    lengths, table = (
        jnp.array([20, 33]),
        jnp.asarray(rng.permutation(40)[:8].reshape(2, 4), jnp.int32),
    )
    place = jnp.array([[15, 16, 17], [30, 31, 32]], jnp.int32)
    return pools, q, new, *(put(a) for a in (lengths, table, place))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_donated_pools_are_not_copied(dtype):
    if dtype == "bfloat16" and native.library() is None:
        pytest.skip("XLA for CPUs copies an array of bfloat16 for a scatter")
    given = of_steps(dtype)
    shape = given[0][0].shape
    program = jax.jit(steps, donate_argnums=0).lower(*given).compile()
    assert not copies(program.as_text(), shape)
    assert program.memory_analysis().temp_size_in_bytes < given[0][0].nbytes / 3  # of a layer
    places = [a.unsafe_buffer_pointer() for a in given[0]]
    _, *after = program(*given)
    assert [a.unsafe_buffer_pointer() for a in after] == places


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_mesh(dtype, explicit):
    """Each device has its heads of all pages, in place, and exchanges nothing but the sum."""
    if dtype == "bfloat16" and native.library() is None:
        pytest.skip("XLA for CPUs copies an array of bfloat16 for a scatter")
    wanted, *pools = jax.jit(steps)(*of_steps(dtype))
    mesh = mesh_of({"model": 2}, explicit)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    given = of_steps(dtype, put)
    where = given[0][0].sharding
    program = jax.jit(steps, donate_argnums=0).lower(*given).compile()
    text = program.as_text()
    assert (
        "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
    )
    assert not copies(text, (3, 40, 2, 16, 32)) and not copies(text, (3, 40, 4, 16, 32))
    found, *after = program(*given)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for a, b in zip(after, pools, strict=True):
        assert a.sharding.is_equivalent_to(where, 5)
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6, atol=1e-6
        )


@both
def test_attention_on_a_mesh(explicit):
    mesh = mesh_of({"data": 2, "model": 2}, explicit)
    specs = {"q": P(None, "model"), "k": P(None, "model"), "v": P(None, "model"),
             "keys": P(None, None, "model"), "values": P(None, None, "model")}  # fmt: skip

    def put(given):
        at = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        found = {
            n: at(a, specs.get(n, P())) for n, a in given.items() if n not in ("scales", "layer")
        }
        if "scales" in given:
            found["scales"] = tuple(at(a, P(None, None, "model")) for a in given["scales"])
        return found | {"layer": 1}

    same(contiguous(heads=8, kv_heads=4, sinks=True, slopes=True), put=put)
    same(narrowed(contiguous(heads=8, kv_heads=4))[0], put=put)
