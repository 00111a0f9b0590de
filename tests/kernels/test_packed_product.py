"""The C++ products with weights in blocks: on every level, for every format, in int8 and in floats.

Activations are quantised here as the kernel says it does, in NumPy; the products are those of float64.
"""

import functools
import itertools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.kernels import QuantArray, StackSlice, matmul, native
from maxjax.kernels.blocks import DECODERS
from maxjax.kernels.packed_product import ACTIVATIONS, FORMATS
from scripts.sharding_product import collectives, mesh_of
from tests.kernels.packed_operands import blocks
from tests.kernels.test_packed import reference

LEVELS = native.levels()
UNITS = {"float32": 2.0**-21, "bfloat16": 2.0**-8, "float16": 2.0**-10}
TYPES = {name: jnp.dtype(name) for name in UNITS}
every = pytest.mark.parametrize("name", FORMATS)
needs_library = pytest.mark.skipif(not LEVELS, reason="the kernels were not built")
pytestmark = needs_library


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def quantised(x):
    """The activations after they were rounded to int8 in groups of 32."""
    depth = x.shape[-1]
    groups = np.asarray(x, np.float32).reshape(*x.shape[:-1], depth // 32, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(groups * (np.float32(127) / largest)), 0)
    scales = largest / np.float32(127)
    return (codes.astype(np.float64) * scales.astype(np.float64)).reshape(x.shape)


@functools.lru_cache(maxsize=16)
def decoded(name, raw, shape):
    """The weights of these bytes in float64."""
    return reference(name, np.frombuffer(raw, np.uint8).reshape(shape)).astype(np.float64)


def check(got, x, raw, name, activations, dtype="float32"):
    """Within some units of the sum of the absolute products."""
    w = decoded(name, np.asarray(raw).tobytes(), np.shape(raw))
    exact = np.asarray(x).astype(np.float64)
    used = quantised(x) if activations == "int8" else exact
    want, size = used @ w.T, np.abs(exact) @ np.abs(w).T
    assert got.shape == want.shape and got.dtype == TYPES[dtype]
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert (error <= UNITS[dtype] * np.maximum(size, np.abs(want))).all(), (error / size).max()


def products(name, activations):
    """One program for products with several weights of a format, by each kind of activations."""
    each = lambda x, raw: [matmul(x, QuantArray(raw, name, kind)) for kind in activations]
    return jax.jit(lambda given: [each(x, raw) for x, raw in given])


def sizes(name):
    """Rows, weights in a row, tokens: whole units and not, panels that are full and not."""
    found = [(1, 256, 1), (33, 512, 1), (7, 256, 2), (40, 768, 3), (70, 512, 5), (3, 512, 515)]
    if DECODERS[name].elements == 32:
        found += [(5, 32, 1), (9, 96, 2), (34, 352, 7), (2, 576, 1), (36, 64, 130)]
    return found


@pytest.mark.sampled
@every
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_every_format_on_every_level(name, activations):
    given = [(normal((t, depth)), blocks(name, rows, depth)) for rows, depth, t in sizes(name)]
    run = products(name, [activations])
    for level in LEVELS:
        with native.level(level):
            results = jax.device_get(run(given))
        for (x, raw), (got,) in zip(given, results, strict=True):
            check(got, x, raw, name, activations)


@pytest.mark.sampled
@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types(name, dtype):
    raw = blocks(name, 40, 512)
    given = [(normal((tokens, 512), dtype), raw) for tokens in (1, 6)]
    for (x, _), results in zip(given, products(name, ACTIVATIONS)(given), strict=True):
        for got, activations in zip(results, ACTIVATIONS, strict=True):
            check(got, x, raw, name, activations, dtype)


@pytest.mark.sampled(3)
@every
def test_random_sizes(name):
    rng = np.random.default_rng(5)
    step = DECODERS[name].elements
    given = []
    for _ in range(5):
        rows, tokens = rng.integers(1, 150), rng.integers(1, 150)
        depth = int(rng.integers(1, 1500 // step + 1)) * step
        given.append((normal((int(tokens), depth), seed=int(rows)), blocks(name, int(rows), depth)))
    for (x, raw), results in zip(given, products(name, ACTIVATIONS)(given), strict=True):
        for got, activations in zip(results, ACTIVATIONS, strict=True):
            check(got, x, raw, name, activations)


@every
def test_blocks_with_any_bits(name):
    """Scales that are infinite or NaN concern their own row only."""
    raw = np.random.default_rng(3).integers(
        0, 256, (64, 512 // DECODERS[name].elements * DECODERS[name].nbytes)
    )
    raw = raw.astype(np.uint8)
    with np.errstate(all="ignore"):
        w = reference(name, raw)
    whole = np.isfinite(w).all(-1)
    assert name == "MXFP4" or not whole.all()
    # No weight is so large that products overflow, nor so small that processors take it as zero.
    sound = whole & (np.abs(w).max(-1) < 2.0**60)
    x = normal((5, 512))
    for activations, tokens in itertools.product(ACTIVATIONS, (1, 5)):
        got = np.asarray(matmul(x[:tokens], QuantArray(raw, name, activations)))
        assert not np.isfinite(got[:, ~whole]).any()
        check(got[:, sound], x[:tokens], raw[sound], name, activations)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 6])
def test_what_is_not_finite_stays_in_its_token(activations, tokens):
    raw, x = blocks("Q4_K", 40, 512), normal((tokens + 2, 512))
    plain = np.asarray(matmul(x, QuantArray(raw, "Q4_K", activations)))
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 300] = bad
        got = np.asarray(matmul(x, QuantArray(raw, "Q4_K", activations)))
        assert not np.isfinite(got[1]).any()
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(plain, 1, 0))


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_activations_of_any_size(activations):
    raw = blocks("Q8_0", 9, 64)
    w = QuantArray(raw, "Q8_0", activations)
    for factor in (0.0, 1e-30, 1e30):
        x = (normal((3, 64)) * factor).astype(np.float32)
        check(matmul(x, w), x, raw, "Q8_0", activations)
    # Of groups whose largest number is this small the codes are zeros.
    tiny = np.asarray(matmul(normal((3, 64)) * np.float32(1e-41), w))
    assert (np.abs(tiny) < 1e-37).all()


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_activations_of_any_rank(shape):
    raw, x = blocks("Q8_0", 7, 64), normal(shape)
    results = products("Q8_0", ACTIVATIONS)([(x, raw), (x, raw[:0])])
    for activations, got, none in zip(ACTIVATIONS, *jax.device_get(results), strict=True):
        assert got.shape == (*shape[:-1], 7)
        check(got.reshape(-1, 7), x.reshape(-1, 64), raw, "Q8_0", activations)
        assert none.shape == (*shape[:-1], 0)


@every
def test_weights_at_any_address(name):
    """Layers of an odd number of bytes: only the first lies even."""
    raw = np.stack([blocks(name, 3, 256, seed) for seed in range(4)])
    shifted = np.concatenate([raw, raw[:, :1]], 1)[:, :3]
    cases = list(itertools.product((1, 6), ACTIVATIONS))
    xs = [normal((tokens, 256)) for tokens, _ in cases]
    layers = lambda x, s, kind: [
        matmul(x, QuantArray(StackSlice(s, i), name, kind)) for i in range(4)
    ]
    run = jax.jit(lambda xs, s: [layers(x, s, k) for x, (_, k) in zip(xs, cases, strict=True)])
    for level in LEVELS:
        with native.level(level):
            results = jax.device_get(run(xs, shifted))
        for x, (_, activations), found in zip(xs, cases, results, strict=True):
            for got, own in zip(found, shifted, strict=True):
                check(got, x, own, name, activations)


@pytest.mark.parametrize("tokens", [1, 6])
def test_several_weights_in_one_operation(tokens):
    """Of several formats and layers of stacks; floats beside them."""
    x = normal((tokens, 512))
    a, b, c = blocks("Q4_K", 40, 512), blocks("Q6_K", 7, 512), blocks("Q8_0", 33, 512)
    stack = np.stack([c[::-1], c])
    dense = normal((5, 512), seed=2)

    def run(x, a, b, stack, dense):
        weights = [QuantArray(a, "Q4_K", "int8"), dense, QuantArray(b, "Q6_K", "int8")]
        return matmul(x, [*weights, QuantArray(StackSlice(stack, 1), "Q8_0", "int8")])

    got = jax.jit(run)(x, a, b, stack, dense)
    check(got[0], x, a, "Q4_K", "int8")
    check(got[2], x, b, "Q6_K", "int8")
    check(got[3], x, c, "Q8_0", "int8")
    np.testing.assert_allclose(got[1], x @ dense.T, atol=1e-3)
    text = jax.jit(run).lower(x, a, b, stack, dense).compile().as_text()
    assert text.count('custom_call_target="maxjax_packed_matmul"') == 1


# --- under every transformation -----------------------------------------------------------------

X, RAW = normal((6, 512)), blocks("Q4_K", 40, 512)


def product(x, raw, activations="int8"):
    return matmul(x, QuantArray(raw, "Q4_K", activations))


def _layers(x, raw):
    stack = jnp.stack([raw[::-1], raw, raw[::-1]])
    one = lambda c, i: (c, matmul(x, QuantArray(StackSlice(stack, i), "Q4_K", "int8")))
    return jax.lax.scan(one, 0.0, jnp.arange(3))[1][1]


SAME = {
    "jit": jax.jit(product),
    "eager": product,
    "fori_loop": lambda x, w: jax.lax.fori_loop(
        0, 3, lambda i, y: product(x, w), jnp.zeros((6, 40))
    ),
    "a layer in scan": _layers,
    "cond": lambda x, w: jax.lax.cond(x[0, 0] < 99, product, lambda x, w: x[:, :40], x, w),
    "checkpoint": jax.checkpoint(product),
    "vmap over x": lambda x, w: jax.vmap(product, (0, None))(x[:, None], w)[:, 0],
}
# With the activations as they are.
FLOAT = {
    "vmap over weights": lambda x, w: jax.vmap(product, (None, 0))(x, jnp.stack([w, w]))[1],
    "exported": lambda x, w: export.deserialize(
        export.export(jax.jit(product))(
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w))
        ).serialize()
    ).call(x, w),
    "jvp": lambda x, w: jax.jvp(lambda x: product(x, w), (x,), (x,))[0],
    "vjp": lambda x, w: jax.vjp(lambda x: product(x, w), x)[0],
}  # fmt: skip


@pytest.mark.parametrize("how", SAME)
def test_the_same_kernel(how):
    got = SAME[how](jnp.asarray(X), jnp.asarray(RAW))
    np.testing.assert_array_equal(got, product(X, RAW))
    check(got, X, RAW, "Q4_K", "int8")


@pytest.mark.parametrize("how", FLOAT)
def test_the_float_form(how):
    run = FLOAT[how] if how == "exported" else jax.jit(FLOAT[how])
    check(run(jnp.asarray(X), jnp.asarray(RAW)), X, RAW, "Q4_K", "float")


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_weights_without_columns(activations):
    """Such a product was an integer division by zero, which ends the process."""
    w = QuantArray(jnp.zeros((4, 0), jnp.uint8), "Q8_0", activations)
    np.testing.assert_array_equal(matmul(jnp.ones((2, 0)), w), np.zeros((2, 4)))


def test_derivatives():
    """By the activations; of those that are not quantised."""
    c, w = normal((6, 40), seed=3).astype(np.float64), reference("Q4_K", RAW).astype(np.float64)
    weighed = lambda x: (product(x, RAW) * jnp.asarray(c, jnp.float32)).sum()
    exact = c @ w
    for run in (jax.grad(weighed), jax.jit(jax.jacfwd(weighed))):
        np.testing.assert_allclose(
            run(jnp.asarray(X)), exact, rtol=0, atol=1e-5 * np.abs(exact).max()
        )


def test_activations_are_a_part_of_the_type():
    a, b = (jax.tree.structure(QuantArray(RAW, "Q4_K", kind)) for kind in ACTIVATIONS)
    assert a != b
    traces = []
    run = jax.jit(lambda x, w: traces.append(w.activations) or matmul(x, w))
    for kind in (*ACTIVATIONS, *ACTIVATIONS):
        run(X, QuantArray(jnp.asarray(RAW), "Q4_K", kind))
    assert traces == list(ACTIVATIONS)
    with pytest.raises(ValueError, match="'int4'"):
        QuantArray(RAW, "Q4_K", "int4")


def test_no_matrix_of_floats_in_the_program():
    stack = np.stack([blocks("Q4_K", 256, 512), blocks("Q4_K", 256, 512, 1)])

    def run(x, s):
        step = lambda x, i: (
            jnp.tile(matmul(x, QuantArray(StackSlice(s, i), "Q4_K", "int8")), 2),
            None,
        )
        return jax.lax.scan(step, x, jnp.arange(2))[0]

    text = jax.jit(run).lower(X[:1], stack).compile().as_text()
    assert text.count('custom_call_target="maxjax_packed_matmul"') == 1
    assert not re.search(r"f32\[(1,)?256,512\]|u8\[(1,)?256,288\]", text)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("x", "w", "expected"),
    [
        (P("a", None), P(), []),
        (P(), P("a", None), []),
        (P(None, "a"), P(None, "a"), ["all-reduce"]),
        (P("a", None), P("b", None), []),
    ],
    ids=str,
)
def test_on_meshes(activations, explicit, x, w, expected):
    mesh = mesh_of({"a": 2, "b": 2}, explicit)
    xs = jax.device_put(X, NamedSharding(mesh, x))
    ws = jax.device_put(RAW, NamedSharding(mesh, w))
    program = jax.jit(lambda x, w: product(x, w, activations)).lower(xs, ws).compile()
    assert [one.kind for one in collectives(program.as_text())] == expected
    check(program(xs, ws), X, RAW, "Q4_K", activations)


def test_a_split_inside_a_block_is_gathered():
    """512 weights of Q4_K are two blocks: four devices cannot have whole ones."""
    mesh = mesh_of({"a": 4}, False)
    xs = jax.device_put(X, NamedSharding(mesh, P(None, "a")))
    check(jax.jit(product)(xs, RAW), X, RAW, "Q4_K", "int8")


def test_threads():
    """Programs of several threads do not share what a thread keeps."""
    wanted = np.asarray(product(X, RAW))
    wrong = []

    def work():
        for tokens in (1, 6, 3) * 10:
            got = np.asarray(product(X[:tokens], RAW))
            if not np.allclose(got, wanted[:tokens], atol=1e-4):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
