"""``kernels.decode_attention`` against NumPy in float64: the C++ kernel on every level, and its jnp form."""

import functools
import importlib
import itertools
import math
import re
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.kernels import decode_attention, native
from scripts.sharding_product import collectives, mesh_of
from tests.kernels.decode_reference import (
    NAMES,
    OPTIONS,
    TYPES,
    by_head,
    check,
    check_int8,
    narrowed,
    one_result,
    operands,
    slots_of,
    turned,
)  # fmt: skip

# The package has the function under the module's name.
module = importlib.import_module("maxjax.kernels.decode_attention")
LEVELS = native.levels()
both = pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])


def jnp_form(
    given, scale=None, sliding_window=None, soft_cap=None, interleaved=False, rotating=False
):
    """The definition, on the same."""
    batch, _, width = given["q"].shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    static = module.Options(scale, sliding_window or 0, soft_cap or 0.0, interleaved, rotating)

    @jax.jit
    def run(given):
        cos, sin = given.get("rope") or (jnp.zeros((batch, 0)),) * 2
        q, k, v, keys, values, lengths = (given[name] for name in NAMES)
        grouped = q.reshape(batch, k.shape[1], -1, width)
        caches = keys[None], values[None]
        out, keys, values = module.definition(
            static, grouped, k, v, *caches, 0, lengths, cos, sin, *by_head(given)
        )
        return out.reshape(q.shape), keys[0], values[0]

    return run(given)


def on_every_level(given, **options):
    """Runs one program on every level."""
    run = jax.jit(functools.partial(decode_attention, **options))
    program = run.lower(**given).compile()
    assert 'custom_call_target="maxjax_decode_attention"' in program.as_text()
    for level in LEVELS:
        with native.level(level):
            yield jax.device_get(program(**given))


def all_right(given, jnp_too=True, **options):
    for got in on_every_level(given, **options):
        check(given, got, **options)
    if jnp_too:
        check(given, jnp_form(given, **options), **options)


# --- types and sizes ----------------------------------------------------------------------------

GROUPS, WIDTHS = (1, 2, 3, 4, 5, 8), (16, 33, 64, 80, 128, 256)


@pytest.mark.parametrize(("width", "group"), list(zip(WIDTHS, GROUPS, strict=True)))
@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_types_and_sizes(width, group, cache):
    q = list(TYPES)[(list(TYPES).index(cache) + group) % 3]
    given = operands((37, 3), 2 * group, 2, width, 40, q, cache, seed=width)
    all_right(given, jnp_too=cache == "bfloat16" and group % 2 == 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cache", TYPES)
@pytest.mark.parametrize("q", TYPES)
def test_every_type_and_size(q, cache):
    """A third of the sizes for each two types: all of them for each type of either operand."""
    part = (list(TYPES).index(q) + list(TYPES).index(cache)) % 3
    for (i, width), (j, group) in itertools.product(enumerate(WIDTHS), enumerate(GROUPS)):
        if (i + j) % 3 != part:
            continue
        given = operands((37, 3), 2 * group, 2, width, 40, q, cache, seed=width)
        all_right(given, jnp_too=group == 3)


@pytest.mark.parametrize("new", TYPES)
def test_new_keys_of_another_type_than_queries(new):
    all_right(operands(q="bfloat16", k=new, cache="float16"), jnp_too=new == "float32")


@pytest.mark.parametrize("width", [1, 31, 100])
def test_heads_of_any_width(width):
    all_right(operands((6, 2, 8), 3, 3, width, cache="bfloat16"), jnp_too=False)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads"), [(0, 4, 2), (2, 0, 2), (2, 0, 0), (0, 0, 0)]
)
def test_nothing_to_do(batch, heads, kv_heads):
    given = operands((3,) * batch, heads, kv_heads)
    out, keys, values = jax.jit(decode_attention)(**given)
    assert out.shape == given["q"].shape and keys.shape == given["keys"].shape
    if kv_heads and batch:
        np.testing.assert_array_equal(keys[:, :, 3], given["k"])


# --- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotating", [False, True])
@pytest.mark.parametrize("cache", ["float32", "float16"])
def test_lengths(rotating, cache):
    """Absent, empty, the last slot, and beyond it: NaN and nothing written, or slot 0 again."""
    lengths = (-1, 0, 1, 7, 8, 9, 10, 17, 18, 1000, -(2**31), 2**31 - 1)
    all_right(operands(lengths, slots=9, cache=cache), rotating=rotating)


@pytest.mark.parametrize("rotating", [False, True])
@pytest.mark.parametrize("window", [None, 1, 255, 300])
def test_lengths_around_the_parts_of_the_work(window, rotating):
    """The cache is looked at in parts of 256 slots, from the first that is seen."""
    lengths = (254, 255, 256, 257, 511, 512, 599, 600, 700, 1199)
    given = operands(lengths, 2, 1, 20, 600, cache="bfloat16")
    all_right(given, jnp_too=False, rotating=rotating, sliding_window=window)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint8, np.int32])
def test_integers_of_any_width_are_lengths(dtype):
    given = operands((5, 0))
    given["lengths"] = given["lengths"].astype(dtype)
    check(given, jax.jit(decode_attention)(**given))


def test_what_no_token_sees_does_not_matter():
    """NaN and Inf in slots that are not there yet, or out of the window."""
    given = operands((5, 2), slots=9)
    for name, value in (("keys", np.nan), ("values", np.inf)):
        given[name][0, :, 6:], given[name][1, :, 3:] = value, value
        given[name][0, :, :3] = value
        given[name][1, :, :0] = value
    all_right(given, sliding_window=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4096}, {"rotating": True}], ids=repr)
def test_long_sequences(options):
    lengths = (32767, 20000, 40000 if options.get("rotating") else 5)
    all_right(operands(lengths, 2, 1, 32, 32768, cache="bfloat16"), jnp_too=False, **options)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("which", OPTIONS)
@pytest.mark.parametrize("cache", TYPES)
def test_options(which, cache):
    pairs, options = OPTIONS[which]
    q = {"float32": "float32", "float16": "bfloat16", "bfloat16": "bfloat16"}[cache]
    lengths = (8, 3, 0, 11) if options.get("rotating") else (8, 3, 0, 9)
    all_right(operands(lengths, 6, 2, 20, 9, q, cache, pairs), **options)


def test_sinks():
    """Of heads that share a KV head, over one part of a cache and over several."""
    pairs, options = OPTIONS["all"]
    all_right(operands((8, 3, 0, 11, -1), 6, 2, 20, 9, pairs=pairs, sinks=True), **options)
    all_right(operands((299, 3, 700), 6, 3, 16, 600, "bfloat16", "bfloat16", sinks=True))
    with pytest.raises(ValueError, match="a score for each query head, not"):
        decode_attention(**operands(heads=6), sinks=np.zeros(2, np.float32))


@pytest.mark.parametrize("which", ["window", "rotating window", "wide cap", "all"])
def test_slopes(which):
    """A bias for the distance: in caches that rotate and not, over one part of a cache and over several."""
    pairs, options = OPTIONS[which]
    lengths = (8, 3, 0, 11, -1) if options.get("rotating") else (8, 3, 0, 9, -1)
    all_right(operands(lengths, 6, 2, 20, 9, pairs=pairs, slopes=True), **options)
    if which == "all":
        all_right(operands((299, 3, 700), 6, 3, 16, 600, "bfloat16", "bfloat16", slopes=True))
        given = operands((299, 3, 700), 6, 3, 16, 600, sinks=True, slopes=True)
        all_right(given, rotating=True, sliding_window=500)
        with pytest.raises(ValueError, match="a number for each query head, not"):
            decode_attention(**operands(heads=6), slopes=np.zeros(2, np.float32))


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_derivatives_of_sinks_and_slopes(name):
    given = operands((5, 0), **{name: True}) | {name: np.array([1, -1, 0.5, 2], np.float32)}
    loss = lambda one, run: (run(given | {name: one})[0] ** 2).sum()
    got = jax.jit(jax.grad(lambda s: loss(s, lambda g: decode_attention(**g))))(given[name])
    value = jax.jit(lambda s: loss(s, jnp_form))
    wanted = jax.jit(jax.grad(lambda s: loss(s, jnp_form)))(given[name])
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    step = np.array([0, 1e-2, 0, 0], np.float32)
    slope = [float(value(given[name] + s)) for s in (step, -step)]
    np.testing.assert_allclose(got[1], (slope[0] - slope[1]) / 2e-2, rtol=2e-2)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("size", [30.0, 1e4, 1e18])
def test_large_scores(size, soft_cap):
    """One key has all the weight: no exponential overflows."""
    given = operands((8, 300), 2, 1, 16, 301, seed=3)
    given["q"] *= np.float32(size)
    for got in on_every_level(given, soft_cap=soft_cap):
        out = got[0]
        assert np.isfinite(out).all()
        if soft_cap is None and size > 100:
            for b, h in itertools.product(range(2), range(2)):
                seen = got[1][b, 0, : given["lengths"][b] + 1].astype(np.float64)
                best = np.argmax(seen @ given["q"][b, h].astype(np.float64))
                np.testing.assert_array_equal(out[b, h], got[2][b, 0, best])


def test_scores_of_no_size_at_all_count_for_nothing():
    """Keys whose scores are -Inf, also where they fill a whole part, have no weight."""
    given = operands((511,), 1, 1, 16, 512)
    given["q"][:] = 1e20
    given["keys"][:] = 0
    given["k"][:] = 0
    for rows in (slice(3, 5), slice(0, 256)):
        given["keys"][0, 0, rows] = -1e20  # each product is -1e40
        rest = np.delete(np.arange(511), rows)
        wanted = np.vstack([given["values"][0, 0, rest], given["v"][0]]).astype(np.float64).mean(0)
        for got in [*on_every_level(given), jnp_form(given)]:
            np.testing.assert_allclose(got[0][0, 0], wanted, rtol=1e-4, atol=1e-5)


def test_a_key_that_is_no_number_makes_the_result_none():
    given = operands((5, 5), 2, 2)
    given["keys"][0, 1, 2, 3] = np.nan
    for out, *_ in [*on_every_level(given), jnp_form(given)]:
        assert (
            np.isnan(out[0, 1]).all() and np.isfinite(out[0, 0]).all() and np.isfinite(out[1]).all()
        )


# --- int8 ---------------------------------------------------------------------------------------


INT8 = {
    "plain": ({}, {}),
    "bfloat16": ({"q": "bfloat16", "width": 64}, {}),
    "odd": ({"width": 33, "heads": 5, "kv_heads": 1, "pairs": 16}, {"soft_cap": 3.0}),
    "window": ({"lengths": (300, 17, 600, 9), "slots": 300, "pairs": 8}, {"rotating": True, "sliding_window": 300}),
    "parts": ({"lengths": (254, 599, 255, 0), "slots": 600, "heads": 12, "width": 80}, {"sliding_window": 300}),
}  # fmt: skip


@pytest.mark.parametrize("which", INT8)
def test_int8(which):
    sizes, options = INT8[which]
    given, floats = narrowed(operands(**({"lengths": (5, 0, -1, 9)} | sizes)))
    for got in on_every_level(given, **options):
        check_int8(given, floats, got, **options)
    if which in ("odd", "window"):
        run = export.export(jax.jit(functools.partial(decode_attention, **options)))(**given)
        check_int8(given, floats, run.call(**given), **options)  # the jnp form


@both
@pytest.mark.parametrize("where", ["sequences and heads", "whole"])
def test_int8_on_a_mesh(where, explicit):
    """In place on every device, nothing exchanged."""
    spec, local = PLACES[where]
    given, floats = narrowed(operands((5, 0, -1, 9), 8, 4, pairs=8))
    there = placed(floats, explicit, spec)
    put = lambda a: jax.device_put(a, NamedSharding(mesh_of(SIZES, explicit), P(None, *spec)))
    there |= {name: put(given[name]) for name in ("keys", "values")}
    there["scales"] = tuple(map(put, given["scales"]))
    caches = {name: there.pop(name) for name in ("keys", "values", "scales")}
    run = jax.jit(lambda c, given: decode_attention(**c, **given, layer=1), donate_argnums=0)
    program = run.lower(caches, there).compile()
    assert not collectives(program.as_text()) and kernels_in(program.as_text()) == [local]
    shardings = [caches["keys"].sharding, caches["scales"][0].sharding]
    got = program(caches, there)
    assert all(
        a.sharding.is_equivalent_to(s, a.ndim)
        for a, s in zip(got[1:], [shardings[0]] * 2 + [shardings[1]] * 2, strict=True)
    )
    check_int8(given, floats, got)


def test_int8_without_its_scales():
    given, _ = narrowed(operands((5, 0)))
    scales, layer = given.pop("scales"), given.pop("layer")
    shorter, narrower = ([f(s) for s in scales] for f in (lambda s: s[..., :3], np.float16))
    for wrong in (None, scales[:1], shorter, narrower):
        with pytest.raises(ValueError, match="two arrays of scales, float32"):
            decode_attention(**given, layer=layer, scales=wrong)
    with pytest.raises(ValueError, match="cache of another dtype none"):
        decode_attention(**operands((5, 0)), scales=tuple(s[1] for s in scales))


# --- layers, steps, memory ----------------------------------------------------------------------

L, B, H, K, S, D = 3, 2, 4, 2, 8, 20


def steps_of(count, seed=0):
    """Queries, keys and values of every step, layer and sequence."""
    rng = np.random.default_rng(seed)
    shapes = [(count, L, B, n, D) for n in (H, K, K)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def over_layers(caches, given, lengths, traced):
    """One step: every layer's attention over its own cache, all in one array."""

    def one(caches, inputs):
        layer, q, k, v = inputs
        out, *caches = decode_attention(q, k, v, *caches, lengths, layer=layer)
        return tuple(caches), out

    if traced:
        return jax.lax.scan(one, caches, (jnp.arange(L), *given))
    outs = []
    for layer in range(L):
        caches, out = one(caches, (layer, *(a[layer] for a in given)))
        outs.append(out)
    return caches, jnp.stack(outs)


def zeros(dtype="float32"):
    return tuple(jnp.zeros((L, B, K, S, D), dtype) for _ in range(2))


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_steps_equal_attention_over_the_whole_sequence(traced):
    """In one program: a loop over the tokens, in it the layers, and the cache as the carry."""
    q, k, v = steps_of(5)

    def step(state, given):
        caches, lengths = state
        caches, outs = over_layers(caches, given, lengths, traced)
        return (caches, lengths + 1), outs

    state = zeros(), jnp.zeros(B, jnp.int32)
    program = jax.jit(lambda s, *x: jax.lax.scan(step, s, x)).lower(state, q, k, v).compile()
    for level in LEVELS:
        with native.level(level):
            ((keys, values), lengths), outs = jax.device_get(program(state, q, k, v))
        np.testing.assert_array_equal(lengths, [5, 5])
        np.testing.assert_array_equal(keys[:, :, :, :5], np.moveaxis(k, 0, 3))
        np.testing.assert_array_equal(values[:, :, :, 5:], 0)
        for t, layer, b, h in itertools.product(range(5), range(L), range(B), range(H)):
            seen = np.s_[: t + 1, layer, b, h // (H // K)]
            exact, allowed = one_result(q[t, layer, b, h], k[seen], v[seen], D**-0.5, None)
            assert (np.abs(outs[t, layer, b, h] - exact) <= allowed).all()


@pytest.mark.parametrize("layer", [-1, 3, 100])
def test_a_layer_out_of_range_is_the_nearest(layer):
    given = operands((5, 0))
    caches = {n: np.stack([given[n] * f for f in (1, 2, 3)]) for n in ("keys", "values")}
    nearest = 2 if layer > 0 else 0
    out, *after = jax.jit(lambda layer: decode_attention(**(given | caches), layer=layer))(layer)
    one = {name: cache[nearest] for name, cache in caches.items()}
    check(given | one, (out, *(cache[nearest] for cache in after)))


def copies(text, shape):
    """The lines of a program that copy an array of this shape, or of its only layer."""
    dims = ",".join(map(str, shape))
    found = re.compile(rf"= \(?\w+\[(1,)?{dims}\]\S* (copy|copy-start|fusion)\(")
    return [line for line in text.splitlines() if found.search(line)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["one cache", "static", "traced", "steps"])
def test_donated_caches_stay_where_they_are(how, dtype):
    q, k, v = (a.astype(TYPES[dtype]) for a in steps_of(4))
    lengths = jnp.array([2, 0], jnp.int32)
    if how == "one cache":
        shape = (B, K, S, D)
        run = lambda keys, values: decode_attention(
            q[0, 0], k[0, 0], v[0, 0], keys, values, lengths
        )
        pick = lambda result: result[1:]
    elif how == "steps":
        shape = (L, B, K, S, D)
        step = lambda caches, x: over_layers(caches, x[1:], lengths + x[0], True)
        run = lambda *caches: jax.lax.scan(step, caches, (jnp.arange(4), q, k, v))
        pick = lambda result: result[0]
    else:
        shape = (L, B, K, S, D)
        run = lambda *caches: over_layers(caches, (q[0], k[0], v[0]), lengths, how == "traced")
        pick = lambda result: result[0]
    caches = [jnp.ones(shape, dtype), jnp.full(shape, 2, dtype)]
    program = jax.jit(run, donate_argnums=(0, 1)).lower(*caches).compile()
    assert not copies(program.as_text(), shape)
    places = [a.unsafe_buffer_pointer() for a in caches]
    after = pick(program(*caches))
    assert [a.unsafe_buffer_pointer() for a in after] == places
    assert all(a.is_deleted() for a in caches)
    assert float(after[0].astype(jnp.float32)[..., 6, :].min()) == 1.0


def test_copies_are_found():
    """What is not donated is copied: the search for copies does not overlook them."""
    given = operands()
    text = jax.jit(decode_attention).lower(**given).compile().as_text()
    assert len(copies(text, given["keys"].shape)) >= 2


@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_caches_that_are_not_donated_stay_as_they_were(how):
    given = {name: jnp.asarray(a) for name, a in operands((5, 0)).items()}
    before = {name: np.array(a) for name, a in given.items()}
    check(before, how(decode_attention)(**given))
    for name, a in given.items():
        np.testing.assert_array_equal(a, before[name])


def test_one_array_as_both_caches():
    given = operands((5, 0))
    given["values"] = given["keys"]
    given = {name: jnp.asarray(a) for name, a in given.items()}
    check(jax.device_get(given), jax.jit(decode_attention)(**given))


def test_without_jit():
    given = operands((5, 0), pairs=8)
    with jax.disable_jit():
        check(given, jax.jit(decode_attention)(**given))


def test_layers_at_any_address():
    """An odd number of elements in every layer and head."""
    given = operands((5, 2, 0), 3, 3, 7, 9, cache="bfloat16")
    caches = {n: np.stack([given[n], given[n] * 2, given[n] * 3]) for n in ("keys", "values")}
    for level in LEVELS:
        with native.level(level):
            out, *after = decode_attention(**(given | caches), layer=1)
        one = given | {name: caches[name][1] for name in caches}
        check(one, (out, after[0][1], after[1][1]))
        np.testing.assert_array_equal(after[0][0], caches["keys"][0])
        np.testing.assert_array_equal(after[1][2], caches["values"][2])


# --- under every transformation -----------------------------------------------------------------


def sequences(given, *names):
    """One operand of several after the other."""
    return [given[name] for name in names]


def test_vmap():
    """Over everything, over some, and nested; each as its own call."""
    many = [operands((5, 0), seed=seed) for seed in range(3)]
    stacked = [np.stack([one[name] for one in many]) for name in NAMES]
    every = jax.jit(jax.vmap(decode_attention))(*stacked)
    for i, one in enumerate(many):
        check(one, [np.asarray(a)[i] for a in every])
    some = jax.jit(jax.vmap(decode_attention, (0, None, None, None, None, None)))
    got = some(stacked[0], *sequences(many[0], *NAMES[1:]))
    for i, one in enumerate(many):
        check(many[0] | {"q": one["q"]}, [np.asarray(a)[i] for a in got])
    nested = jax.jit(jax.vmap(jax.vmap(decode_attention)))(*(a[None] for a in stacked))
    check(many[2], [np.asarray(a)[0, 2] for a in nested])


def test_vmap_over_layers():
    given = operands((5, 0))
    caches = [np.stack([given[n], given[n] * 2]) for n in ("keys", "values")]
    run = lambda layer: decode_attention(
        *sequences(given, "q", "k", "v"), *caches, given["lengths"], layer=layer
    )
    out, keys, values = jax.device_get(jax.jit(jax.vmap(run))(np.arange(2, dtype=np.int32)))
    for i in range(2):
        one = given | {"keys": caches[0][i], "values": caches[1][i]}
        check(one, (out[i], keys[i, i], values[i, i]))


WEIGHTS = [np.random.default_rng(9).standard_normal((2, 4, 16))] + [
    np.random.default_rng(seed).standard_normal((2, 2, 9, 16)) for seed in (10, 11)
]


def weighed(form, given, options, *floats):
    """A number of all three results."""
    given = given | dict(zip(NAMES, floats, strict=False))
    results = form(given, **options)
    return sum(
        (y * jnp.asarray(w, jnp.float32)).sum() for y, w in zip(results, WEIGHTS, strict=True)
    )


def in_float64(given, floats, options):
    """The same by NumPy, for float32 caches, in which nothing is rounded."""
    q, k, v, keys, values = (a.copy() for a in floats)
    rope, cap, window = given.get("rope"), options.get("soft_cap"), options.get("sliding_window")
    interleaved = options.get("interleaved", False)
    q, k = turned(q, rope, interleaved), turned(k, rope, interleaved)
    out = np.zeros_like(q)
    for b, n in enumerate(given["lengths"].tolist()):
        keys[b, :, n], values[b, :, n] = k[b], v[b]
        seen = slots_of(n, keys.shape[2], window, False)
        for h in range(q.shape[1]):
            at = np.s_[b, h // 2, seen]
            out[b, h] = one_result(q[b, h], keys[at], values[at], 0.25, cap)[0]
    return sum((y * w).sum() for y, w in zip((out, keys, values), WEIGHTS, strict=True))


CAP_AND_WINDOW = {"soft_cap": 2.0, "sliding_window": 4}


@pytest.mark.parametrize(
    ("pairs", "options", "how"),
    [
        pytest.param(None, {}, lambda f: f, id="eager-plain"),
        pytest.param(8, CAP_AND_WINDOW, jax.jit, id="jit-cap and window"),
        pytest.param(5, {"interleaved": True}, jax.jit, id="jit-interleaved"),
        pytest.param(None, {}, jax.jit, id="jit-plain", marks=pytest.mark.extra),
        pytest.param(
            8, CAP_AND_WINDOW, lambda f: f, id="eager-cap and window", marks=pytest.mark.extra
        ),
        pytest.param(
            5, {"interleaved": True}, lambda f: f, id="eager-interleaved", marks=pytest.mark.extra
        ),
    ],
)
def test_derivatives(how, pairs, options):
    """As the definition's; along any line also as the differences that NumPy sees, and jvp's."""
    given = operands((5, 0), pairs=pairs)
    floats = sequences(given, *NAMES[:5])
    rng, step = np.random.default_rng(7), 1e-4
    line = [rng.standard_normal(a.shape).astype(np.float32) for a in floats]
    kernel = lambda given, **options: decode_attention(**given, **options)
    ours, theirs = (functools.partial(weighed, form, given, options) for form in (kernel, jnp_form))

    @how
    def run(floats, line):
        grads = [jax.grad(f, range(5))(*floats) for f in (ours, theirs)]
        return *grads, *jax.jvp(ours, floats, line)

    *grads, value, tangent = jax.device_get(run(tuple(map(jnp.asarray, floats)), tuple(line)))
    for got, wanted in zip(*grads, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)

    def along(far):
        moved = [a.astype(np.float64) + far * d for a, d in zip(floats, line, strict=True)]
        return in_float64(given, moved, options)

    slope = (along(step) - along(-step)) / (2 * step)
    by_grads = sum(float((g * d).sum()) for g, d in zip(grads[0], line, strict=True))
    np.testing.assert_allclose([by_grads, tangent], slope, rtol=1e-4)
    np.testing.assert_allclose(value, along(0), rtol=1e-4)


def test_derivatives_by_the_angles():
    given = operands((5, 0), pairs=8)
    kernel = lambda given: decode_attention(**given)
    loss = lambda form: lambda rope: form(given | {"rope": rope})[0].sum()
    run = jax.jit(lambda rope: [jax.grad(loss(form))(rope) for form in (kernel, jnp_form)])
    ours, theirs = run(given["rope"])
    for got, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        assert np.abs(np.asarray(got)).max() > 1e-3


@pytest.mark.parametrize("how", ["checkpoint", "cond", "fori_loop"])
def test_other_transformations(how):
    given = operands((5, 0), pairs=8)
    values = sequences(given, *NAMES)
    run = functools.partial(decode_attention, rope=given["rope"])
    if how == "cond":
        form = lambda q, *rest: jax.lax.cond(
            q[0, 0, 0] < 99, run, lambda *a: (a[0], *a[3:5]), q, *rest
        )
    elif how == "fori_loop":
        step = lambda i, state, q, k, v, lengths: run(q, k, v, *state[1:], lengths)
        form = lambda q, k, v, keys, cache, lengths: jax.lax.fori_loop(
            0, 3, lambda i, state: step(i, state, q, k, v, lengths), (q, keys, cache)
        )
    else:
        form = jax.checkpoint(run)
    program = jax.jit(form).lower(*values).compile()
    assert program.as_text().count('custom_call_target="maxjax_decode_attention"') == 1
    check(given, program(*values))


def test_one_operation_in_a_jaxpr():
    values = sequences(operands((5, 0)), *NAMES)
    shapes = jax.eval_shape(decode_attention, *values)
    assert [a.shape for a in shapes] == [values[i].shape for i in (0, 3, 4)]
    names = [str(eqn.primitive) for eqn in jax.make_jaxpr(decode_attention)(*values).eqns]
    assert names.count("maxjax_decode_attention") == 1


# --- exported -----------------------------------------------------------------------------------


def calls(text):
    return set(re.findall(r"custom_call @(\w+)", text))


@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_an_exported_program_needs_nothing_of_ours(cache):
    given = operands((5, 0, 9, -1), cache=cache, pairs=5)
    run = jax.jit(lambda given: decode_attention(**given, sliding_window=3))
    program = export.export(run, platforms=["cpu", "cuda"])(given)
    again = export.deserialize(program.serialize())
    assert not calls(again.mlir_module())
    check(given, again.call(given), sliding_window=3)


def test_exported_for_any_number_of_sequences_and_slots():
    given = operands((5, 0), pairs=8)
    values = sequences(given, *NAMES)
    shapes = ["b, 4, 16", "b, 2, 16", "b, 2, 16", "b, 2, s, 16", "b, 2, s, 16", "b"]
    run = jax.jit(decode_attention)
    program = export.export(run)(*export.symbolic_args_specs(values, shapes))
    again = export.deserialize(program.serialize())
    assert calls(again.mlir_module()) <= {"shape_assertion"}
    for lengths, slots in (((5, 0), 9), ((1,), 2), ((6, 3, -1, 20), 20)):
        one = operands(lengths, slots=slots)
        check(one, again.call(*sequences(one, *NAMES)))


# --- on a mesh ----------------------------------------------------------------------------------

SIZES = {"data": 2, "model": 4}
HEADS = P("data", "model")


def placed(given, explicit, spec=HEADS):
    """Sequences over data and heads over model."""
    mesh, batch = mesh_of(SIZES, explicit), P(*spec[:1])
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    found = {name: put(given[name], spec) for name in NAMES[:5]}
    found["lengths"] = put(given["lengths"], batch)
    for name in ("sinks", "slopes"):
        if name in given:
            found[name] = put(given[name], P(*spec[1:]))
    return found | (
        {"rope": tuple(put(a, batch) for a in given["rope"])} if "rope" in given else {}
    )


def kernels_in(text):
    lines = [s for s in text.splitlines() if 'custom_call_target="maxjax_decode_attention"' in s]
    return [tuple(map(int, re.search(r"\w+\[([\d,]+)\]", line)[1].split(","))) for line in lines]


PLACES = {
    "sequences and heads": (HEADS, (2, 2, 16)),
    "sequences": (P("data"), (2, 8, 16)),
    "heads": (P(None, "model"), (4, 2, 16)),
    "heads over data": (P(None, "data"), (4, 4, 16)),
    "sequences over model": (P("model"), (1, 8, 16)),
    "whole": (P(), (4, 8, 16)),
}


@both
@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", PLACES)
def test_split_over_a_mesh(where, cache, explicit):
    spec, local = PLACES[where]
    given = operands((5, 0, -1, 9), 8, 4, cache=cache, pairs=8, sinks=True, slopes=True)
    there = placed(given, explicit, spec)
    program = jax.jit(lambda given: decode_attention(**given)).lower(there).compile()
    assert not collectives(program.as_text())
    assert kernels_in(program.as_text()) == [local]
    out, keys, values = program(there)
    check(given, (out, keys, values))
    assert keys.sharding.is_equivalent_to(there["keys"].sharding, 4)
    assert out.sharding.is_equivalent_to(there["q"].sharding, 3)


@both
def test_eagerly_on_a_mesh(explicit):
    given = operands((5, 0, -1, 9), 8, 4)
    check(given, decode_attention(**placed(given, explicit)))


@both
def test_layers_on_a_mesh_in_place(explicit):
    """A loop over the layers on every device, nothing exchanged and no cache copied."""
    given = operands((5, 0, -1, 9), 8, 4)
    there, mesh = placed(given, explicit), mesh_of(SIZES, explicit)
    where = NamedSharding(mesh, P(None, *HEADS))
    caches = [jax.device_put(np.stack([given[n]] * 3), where) for n in ("keys", "values")]

    def run(keys, values, q, k, v, lengths):
        step = lambda state, layer: decode_attention(q, k, v, *state, lengths, layer=layer)
        swap = lambda out, keys, values: ((keys, values), out)
        return jax.lax.scan(lambda s, i: swap(*step(s, i)), (keys, values), jnp.arange(3))

    rest = [there[name] for name in ("q", "k", "v", "lengths")]
    program = jax.jit(run, donate_argnums=(0, 1)).lower(*caches, *rest).compile()
    assert not collectives(program.as_text())
    assert not copies(program.as_text(), (3, 2, 1, 9, 16))
    (keys, values), outs = program(*caches, *rest)
    for layer in range(3):
        check(given, (outs[layer], keys[layer], values[layer]))


def test_where_the_heads_do_not_divide():
    """Two heads of keys on four devices: XLA finds a way."""
    given = operands((5, 0, -1, 9), 8, 2)
    mesh = mesh_of(SIZES, False)
    there = placed(given, False, P("data"))
    there["q"] = jax.device_put(given["q"], NamedSharding(mesh, HEADS))
    check(given, jax.jit(decode_attention)(**there))


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@both
def test_inside_shard_map(explicit, checked):
    given = operands((5, 0, -1, 9), 8, 4, pairs=8)
    there = placed(given, explicit)
    specs = dict.fromkeys(NAMES[:5], HEADS) | {"lengths": P("data"), "rope": (P("data"),) * 2}
    run = jax.jit(
        jax.shard_map(
            lambda given: decode_attention(**given),
            mesh=mesh_of(SIZES, explicit), in_specs=(specs,), out_specs=(HEADS,) * 3, check_vma=checked,
        )
    )  # fmt: skip
    assert kernels_in(run.lower(there).compile().as_text()) == [(2, 2, 16)]
    check(given, run(there))


def test_inside_shard_map_over_some_axes():
    """The heads stay XLA's."""
    given = operands((5, 0, -1, 9), 8, 4)
    there = placed(given, False)
    specs = {name: P("data") for name in NAMES}
    run = jax.shard_map(
        lambda given: decode_attention(**given),
        mesh=mesh_of(SIZES, False), in_specs=(specs,), out_specs=(P("data"),) * 3, axis_names={"data"},
    )  # fmt: skip
    check(given, jax.jit(run)(there))


@functools.cache
def slopes_by_queries():
    given = operands((5, 0, 3, 8), 8, 4)
    return jax.jit(jax.grad(lambda q: (jnp_form(given | {"q": q})[0] ** 2).sum()))(given["q"])


@both
def test_derivatives_on_a_mesh(explicit):
    given = operands((5, 0, 3, 8), 8, 4)
    there = placed(given, explicit)
    loss = lambda q, rest: (decode_attention(q=q, **rest)[0] ** 2).sum()
    rest = lambda given: {name: a for name, a in given.items() if name != "q"}
    got = jax.jit(jax.grad(loss))(there["q"], rest(there))
    np.testing.assert_allclose(got, slopes_by_queries(), rtol=1e-4, atol=1e-5)


# --- many at once -------------------------------------------------------------------------------


def test_threads():
    run, raised = jax.jit(decode_attention), []
    many = [operands((200, 300), 4, 2, 64, 512, seed=seed) for seed in range(2)]
    wanted = [jax.device_get(run(**one)) for one in many]

    def work(i):
        try:
            for n in range(30):
                for a, b in zip(run(**many[(i + n) % 2]), wanted[(i + n) % 2], strict=True):
                    np.testing.assert_array_equal(a, b)
        except BaseException as problem:
            raised.append(problem)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not raised and not any(thread.is_alive() for thread in threads)


# --- what is refused ----------------------------------------------------------------------------

FITS = "decode_attention takes q"
WRONG = {
    "q without heads": ({"q": (2, 16)}, {}, FITS),
    "q of another batch": ({"q": (3, 4, 16)}, {}, FITS),
    "q of another width": ({"q": (2, 4, 8)}, {}, FITS),
    "heads that do not divide": ({"q": (2, 3, 16)}, {}, FITS),
    "heads of queries only": (
        {"k": (2, 0, 16), "v": (2, 0, 16), "keys": (2, 0, 9, 16), "values": (2, 0, 9, 16)}, {}, FITS,
    ),
    "k without heads": ({"k": (2, 16)}, {}, FITS),
    "k of another width": ({"k": (2, 2, 8)}, {}, FITS),
    "v of other heads": ({"v": (2, 1, 16)}, {}, FITS),
    "a cache of other heads": ({"keys": (2, 4, 9, 16), "values": (2, 4, 9, 16)}, {}, FITS),
    "a cache of another batch": ({"keys": (3, 2, 9, 16), "values": (3, 2, 9, 16)}, {}, FITS),
    "a cache of another width": ({"keys": (2, 2, 9, 8), "values": (2, 2, 9, 8)}, {}, FITS),
    "caches that differ": ({"values": (2, 2, 8, 16)}, {}, FITS),
    "no slots": ({"keys": (2, 2, 0, 16), "values": (2, 2, 0, 16)}, {}, FITS),
    "layers without layer": ({"keys": (1, 2, 2, 9, 16), "values": (1, 2, 2, 9, 16)}, {}, FITS),
    "a layer of one cache": ({}, {"layer": 0}, FITS),
    "no layers": ({"keys": (0, 2, 2, 9, 16), "values": (0, 2, 2, 9, 16)}, {"layer": 0}, FITS),
    "lengths of another batch": ({"lengths": (3,)}, {}, FITS),
    "one length": ({"lengths": ()}, {}, FITS),
    "no window": ({}, {"sliding_window": 0}, "positive, or None"),
    "a negative window": ({}, {"sliding_window": -1}, "positive, or None"),
    "no cap": ({}, {"soft_cap": 0.0}, "positive, or None"),
    "a negative cap": ({}, {"soft_cap": -1.0}, "positive, or None"),
    "a cap that is no number": ({}, {"soft_cap": math.nan}, "positive, or None"),
    "angles that differ": ({}, {"rope": ((2, 8), (2, 7))}, r"each \[2, pairs\] with at most 8"),
    "angles of another batch": ({}, {"rope": ((3, 8), (3, 8))}, r"each \[2, pairs\]"),
    "angles of every head": ({}, {"rope": ((2, 4, 8), (2, 4, 8))}, r"each \[2, pairs\]"),
    "too many angles": ({}, {"rope": ((2, 9), (2, 9))}, r"\(2, 9\) and \(2, 9\)"),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_shapes_that_do_not_fit(which):
    shapes, options, says = WRONG[which]
    given = operands() | {
        name: np.zeros(shape, np.int32 if name == "lengths" else np.float32)
        for name, shape in shapes.items()
    }
    if "rope" in options:
        options = {"rope": tuple(np.zeros(shape, np.float32) for shape in options["rope"])}
    with pytest.raises(ValueError, match=says):
        decode_attention(**given, **options)


def test_caches_of_two_types():
    given = operands()
    given["values"] = given["values"].astype(np.float16)
    with pytest.raises(ValueError, match=FITS):
        decode_attention(**given)


def test_what_the_kernel_does_not_take():
    """New keys and values of two types, or numbers of eight bits: the jnp form, and as right."""
    given = operands((5, 0))
    given["v"] = given["v"].astype(TYPES["bfloat16"])
    check(given, jax.jit(decode_attention)(**given))
    narrow = operands((5, 0))
    for name in ("keys", "values"):
        narrow[name] = narrow[name].astype(ml_dtypes.float8_e4m3fn)
    run = jax.jit(decode_attention)
    assert "maxjax" not in "".join(calls(run.lower(**narrow).as_text()))
    out, keys, _ = run(**narrow)
    assert out.dtype == np.float32 and keys.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(
        keys[0, :, 5].astype(np.float32), narrow["k"][0].astype(keys.dtype).astype(np.float32)
    )
