"""The C++ product of ``kernels.matmul``: exact on every level, the same under every transformation.

What is right is what NumPy's float64 says: ``scripts/kernel_accuracy.py``.
"""

import itertools
import math
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
import maxjax.kernels.product as kernels_product
from maxjax.kernels import StackSlice, matmul, native
from scripts.kernel_accuracy import ALLOWED, TYPES, Product, campaign, error, measured, table
from scripts.sharding_product import collectives, mesh_of

LEVELS = native.levels()
PAIRS = list(itertools.product(TYPES, TYPES))
both = pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def product(tokens, rows, depth, x="float32", w="float32", seed=0):
    return Product(normal((tokens, depth), x, seed), normal((rows, depth), w, seed + 1))


def right(got, x, w):
    """Whether ``got`` is ``x @ w.T``, where ``x`` has any number of axes."""
    got, x, w = (np.asarray(a) for a in (got, x, w))
    assert got.shape == (*x.shape[:-1], w.shape[0])
    tokens = math.prod(x.shape[:-1])
    flat = Product(x.reshape(tokens, x.shape[-1]), w)
    return error(got.reshape(tokens, w.shape[0]), flat) <= ALLOWED


# --- how exact it is ----------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "w"), PAIRS)
def test_every_type_on_every_level(x, w):
    shapes = [(1, 1, 1), (1, 17, 33), (1, 40, 1000), (2, 5, 64), (3, 66, 127), (5, 16, 2048)]
    shapes += [(17, 9, 31), (130, 70, 96)]
    products = [product(*shape, x, w, seed) for seed, shape in enumerate(shapes)]
    for level, one, units in measured(products, LEVELS):
        assert units <= ALLOWED, (level, one.x.shape, one.w.shape)


def test_random_products():
    worst, wrong = campaign(25, seed=1)
    assert not wrong, "\n".join([*wrong, table(worst)])


@pytest.mark.extra
def test_many_random_products():
    """Ten thousand of them: ``scripts/kernel_accuracy.py``."""
    worst, wrong = campaign(500, seed=2)
    assert not wrong, "\n".join([*wrong, table(worst)])


WRONG = {
    "one result of 60 is five units away": lambda y: _with(y, 5 * 2.0**-23 * 4.0),
    "Inf": lambda y: _with(y, np.inf),
    "NaN": lambda y: _with(y, np.nan),
    "no result": lambda y: y * 0,
    "two results in each other's place": lambda y: y[::-1],
}


def _with(y, more):
    y = y.copy()
    y[3, 4] += np.float32(more)
    return y


@pytest.mark.parametrize("kind", WRONG)
def test_the_oracle_sees_what_is_wrong(kind):
    one = Product(np.ones((6, 4), np.float32), np.arange(40, dtype=np.float32).reshape(10, 4) / 40)
    one.w[4] = 1
    exact = (one.x @ one.w.T) * np.arange(1, 7, dtype=np.float32)[:, None]
    one = Product(one.x * np.arange(1, 7, dtype=np.float32)[:, None], one.w)
    assert error(exact, one) <= 1
    bad = WRONG[kind](exact / 4) * 4 if "five" in kind else WRONG[kind](exact)
    assert error(bad, one) > ALLOWED


def test_the_oracle_knows_infinities():
    x = np.array([[np.inf, 1, 0], [3e38, 3e38, 0], [np.nan, 0, 0], [1, 1, 1]], np.float32)
    w = np.array([[1, 1, 1], [0, 1, 1], [-1, 1, 1]], np.float32)
    inf, nan = np.inf, np.nan
    y = np.array([[inf, nan, -inf], [inf, 3e38, 0], [nan, nan, nan], [3, 2, 1]], np.float32)
    assert error(y, Product(x, w)) == 0
    for place in itertools.product(range(4), range(3)):
        bad = y.copy()
        bad[place] = 2e38
        assert error(bad, Product(x, w)) == inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_the_nearest_and_even(dtype):
    """Every number there is, and what lies a quarter, a half and three quarters of the way to the
    next: sums of two numbers, which float32 has exactly."""
    every = np.arange(2**16, dtype=np.uint16).view(TYPES[dtype])
    # Whole and half places below 2^-126 are zeros to some instructions: XLA's matter.
    least = 2.0**-14 if dtype == "float16" else 2.0**-117
    every = every[
        (np.abs(every.astype(np.float32)) >= least) & np.isfinite(every.astype(np.float32))
    ]
    digits = 10 if dtype == "float16" else 7
    unit = np.ldexp(1.0, np.frexp(every.astype(np.float64))[1] - 1 - digits).astype(TYPES[dtype])
    x, w = np.stack([every, unit], 1), np.array([[1, f] for f in (0, 0.25, 0.5, 0.75, -0.5, -0.25)])
    with np.errstate(over="ignore"):
        sums = x.astype(np.float32) @ w.T.astype(np.float32)
        wanted = sums.astype(TYPES[dtype])
    run = jax.jit(matmul)
    for level in LEVELS:
        with native.level(level):
            got = np.asarray(run(x, w.astype(TYPES[dtype])))
        assert got.tobytes() == wanted.tobytes(), level


def test_many_tokens_of_bfloat16():
    """Whole and partial tiles of tokens, rows and depth; sums that are kept in float and in double."""
    shapes = [(33, 34, 4500), (48, 16, 64), (17, 1, 4128), (64, 50, 2)]
    each = [product(*shape, "bfloat16", "bfloat16") for shape in shapes]
    given = [(one.x, np.stack([one.w, one.w + 1, -one.w])) for one in each]
    layer, dtypes = [jnp.int32(2)] * len(TYPES), [np.dtype(TYPES[name]) for name in TYPES]

    @jax.jit
    def together(given):
        return [kernels_product.products(x, [w] * len(dtypes), layer, dtypes) for x, w in given]

    for level in LEVELS[:2]:
        with native.level(level):
            results = jax.device_get(together(given))
        for one, found in zip(each, results, strict=True):
            assert all(right(y, one.x, -one.w) for y in found), (level, one.w.shape)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("x", "w"), PAIRS)
def test_numbers_below_the_least_normal_one(level, x, w, tokens):
    """They count, also where XLA has told the processor to take them as zeros; but not for the
    instructions of amx and avx512bf16, nor on the portable level, which does not know the processor."""
    pairs = (x, w) == ("bfloat16", "bfloat16") and level in ("amx", "avx512bf16")
    small = 2.0**-24 if x == "float16" else 2.0**-133
    a, b = np.full((tokens, 40), small, TYPES[x]), np.ones((18, 40), TYPES[w])
    with native.level(level):
        got = np.asarray(matmul(a, b)).astype(np.float64)
    zero = x != "float16" and (pairs or level == "portable")
    np.testing.assert_array_equal(got, np.full((tokens, 18), 0.0 if zero else 40 * small))


# --- what it takes ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(33,), (1, 33), (2, 3, 33), (2, 1, 3, 33), (0, 33), (2, 0, 33)])
def test_activations_of_any_rank(shape):
    x, w = normal(shape), normal((7, 33), seed=1)
    assert right(matmul(x, w), x, w)
    assert right(jax.jit(matmul)(x, w), x, w)


@pytest.mark.parametrize(
    ("tokens", "rows", "depth"), [(3, 0, 33), (0, 0, 33), (1, 1, 1), (1, 0, 1)]
)
def test_next_to_nothing(tokens, rows, depth):
    every = [product(tokens, rows, depth, x, w) for x, w in PAIRS]
    together = jax.jit(lambda pairs: [matmul(x, w) for x, w in pairs])
    for got, one in zip(together([(p.x, p.w) for p in every]), every, strict=True):
        assert right(got, one.x, one.w)
        assert got.dtype == (one.x.dtype if one.x.dtype == one.w.dtype else np.float32)


def test_sums_of_nothing_are_zero():
    """In a process of its own: a processor that divides by zero ends it."""
    code = """
import jax, itertools, jax.numpy as jnp, numpy as np
import maxjax
from maxjax.kernels import StackSlice, matmul, native
assert native.status() == native.levels()[0]  # no level is chosen by an empty variable
types = [jnp.dtype(name) for name in ("float32", "float16", "bfloat16")]
given = [(np.ones(shape, x), np.ones((5, 0), w), np.ones((2, 5, 0), w))
         for x, w in itertools.product(types, types) for shape in ((0,), (2, 20, 0))]
run = jax.jit(lambda many: [(matmul(a, w), matmul(a, StackSlice(s, 1))) for a, w, s in many])
for level in native.levels():
    with native.level(level):
        results = jax.device_get(run(given))
    for (a, _, _), both in zip(given, results, strict=True):
        for y in both:
            zeros = np.zeros((*a.shape[:-1], 5), np.float32)
            np.testing.assert_array_equal(y.astype(np.float32), zeros)
print("all zero")
"""
    empty = os.environ | {"MAXJAX_KERNELS": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=empty)
    assert "all zero" in done.stdout, (done.returncode, done.stderr[-500:])


def test_weights_at_any_address():
    """Layers of an odd number of elements, and rows too: only the first lies even."""
    run = jax.jit(lambda x, s: [matmul(x, StackSlice(s, i)) for i in range(4)])
    for dtype, tokens, x_dtype in itertools.product(TYPES, (1, 6), TYPES):
        stack, x = normal((4, 3, 45), dtype), normal((tokens, 45), x_dtype, seed=1)
        for level in LEVELS:
            with native.level(level):
                every = jax.device_get(run(x, stack))
            assert all(right(got, x, w) for got, w in zip(every, stack, strict=True)), level


def test_parts_of_arrays():
    """What is cut out or turned around in the same program is a product's operand all the same."""
    x, w = normal((9, 70)), normal((12, 70), seed=1)
    for part in (np.s_[1:, 1:], np.s_[2:5, 3:66], np.s_[::2, ::3], np.s_[::-1, ::-1]):
        got = jax.jit(lambda x, w, part=part: matmul(x[part], w[part]))(x, w)
        assert right(got, x[part], w[part])
    assert right(jax.jit(lambda x, w: matmul(x.T, w.T))(x, normal((9, 12))), x.T, normal((9, 12)).T)


@pytest.mark.parametrize("index", [0, 2, -1, -3, np.int64(1), jnp.uint8(2)], ids=repr)
def test_a_layer_of_a_stack_is_the_array(index):
    """Also where the number is below 0 and counts from the end."""
    s, x = StackSlice(normal((3, 5, 40)), index), normal((2, 40), seed=1)
    assert right(matmul(x, s), x, np.asarray(s))


@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["traced", "eager"])
def test_an_index_out_of_range_is_that_of_the_nearest_layer(how):
    stack, x = normal((3, 5, 40)), normal((2, 40), seed=1)
    run = how(lambda i: matmul(x, StackSlice(jnp.asarray(stack), i)))
    for index, nearest in ((3, 2), (2**31 - 1, 2), (-1, 0), (-(2**31), 0), (0, 0), (1, 1)):
        assert right(run(jnp.int32(index)), x, stack[nearest])


@pytest.mark.parametrize("index", [3, 99, -4, 2**40])
def test_a_number_out_of_range_is_an_error(index):
    """As for any array."""
    s, x = StackSlice(jnp.asarray(STACK), index), jnp.asarray(X)
    for use in (lambda: matmul(x, s), lambda: jax.jit(lambda x: matmul(x, s))(x), lambda: s + 1):
        with pytest.raises(IndexError, match=str(index)):
            use()


@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_several_weights(tokens, how):
    """Of different rows, none at all, layers of stacks among them, and of several dtypes."""
    x, stack = normal((tokens, 40)), normal((3, 5, 40), seed=1)
    plain = [normal((rows, 40), seed=rows) for rows in (70, 0, 1)]
    narrow = [normal((7, 40), "bfloat16"), normal((20, 40), "float16")]
    got = how(lambda x, stack, *w: matmul(x, (StackSlice(stack, 1), *w)))(x, stack, *plain, *narrow)
    assert isinstance(got, tuple) and all(y.dtype == np.float32 for y in got)
    for y, w in zip(got, [stack[1], *plain, *narrow], strict=True):
        assert right(y, x, w)
    assert matmul(x, []) == ()
    assert right(*matmul(x, [plain[0]]), x, plain[0])


# --- under every transformation -----------------------------------------------------------------

X, W = normal((6, 40)), normal((40, 40), seed=1)
STACK = normal((3, 40, 40), seed=2)


def _scanned(x, w):
    """Row after row, and the same weight in every step."""
    return jax.lax.scan(lambda c, row: (c, matmul(row, w)), 0.0, x)[1]


def _looped(x, w):
    step = lambda i, y: y + matmul(x, w) * jnp.where(i == 2, 1.0, 0.0)
    return jax.lax.fori_loop(0, 4, step, jnp.zeros_like(x))


def _while(x, w):
    step = lambda state: (state[0] + 1, matmul(x, w))
    return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, jnp.zeros_like(x)))[1]


def _layers(x, w):
    """A loop over the layers of a stack of which one is the weight."""
    stack = jnp.stack([w * 2, w, w * 3])
    every = jax.lax.scan(lambda c, i: (c, matmul(x, StackSlice(stack, i))), 0.0, jnp.arange(3))[1]
    return every[1]


def _without_jit(x, w):
    with jax.disable_jit():
        return jax.jit(matmul)(x, w)


def _donated(x, w):
    mine = jnp.array(x)
    y = jax.jit(matmul, donate_argnums=0)(mine, w)
    assert mine.is_deleted()
    return y


def _exported(x, w):
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
    return export.deserialize(export.export(jax.jit(matmul))(*args).serialize()).call(x, w)


# With the result of one call: the same in every bit, if it is the same kernel for the same rows.
SAME = {
    "jit": jax.jit(matmul),
    "jit in jit": jax.jit(lambda x, w: jax.jit(matmul)(x, w)),
    "a constant": lambda x, w: jax.jit(lambda x: matmul(x, w))(x),
    "fori_loop": _looped,
    "while_loop": _while,
    "a layer in scan": _layers,
    "cond": lambda x, w: jax.lax.cond(x[0, 0] < 99, matmul, lambda x, w: x, x, w),
    "disable_jit": _without_jit,
    "donated": _donated,
    "checkpoint": jax.checkpoint(matmul),
    "compiled before": lambda x, w: jax.jit(matmul).lower(x, w).compile()(x, w),
    "jvp": lambda x, w: jax.jit(lambda x, w: jax.jvp(lambda x: matmul(x, w), (x,), (x,))[0])(x, w),
    "vmap over x": lambda x, w: jax.vmap(matmul, (0, None))(x[:, None], w)[:, 0],
}
# And as near to the exact one.
NEAR = {
    "scan": _scanned,
    "exported": _exported,
    "vmap over columns": lambda x, w: jax.vmap(matmul, (1, None), 1)(x.T, w).T,
    "vmap over weights": lambda x, w: jax.vmap(matmul, (None, 0))(x, jnp.stack([w, w]))[1],
    "vmap over both": lambda x, w: jax.vmap(matmul)(jnp.stack([x, x]), jnp.stack([w * 2, w]))[1],
    "vmap over rows": lambda x, w: jax.vmap(lambda r: matmul(x, r[None])[:, 0], out_axes=1)(w),
    "nested vmap": lambda x, w: jax.vmap(
        lambda x: jax.vmap(lambda r: matmul(x, r[None])[0])(w)
    )(x),
    "vmap of scan": lambda x, w: jax.vmap(_scanned, (0, None))(x[:, None], w)[:, 0],
    "scan of vmap": lambda x, w: jax.lax.scan(
        lambda c, x: (c, jax.vmap(matmul, (0, None))(x, w)), 0.0, x.reshape(2, 3, 40)
    )[1].reshape(6, 40),
    "vmap over layers": lambda x, w: jax.vmap(
        lambda i: matmul(x, StackSlice(jnp.stack([w * 2, w]), i))
    )(jnp.arange(2))[1],
    "vmap over x and layers": lambda x, w: jax.vmap(
        lambda x, i: matmul(x, StackSlice(jnp.stack([w * 2, w]), i)), (0, None)
    )(x, 1),
    "vmap over stacks": lambda x, w: jax.vmap(lambda s: matmul(x, StackSlice(s, 1)))(
        jnp.stack([jnp.stack([w, w * 2]), jnp.stack([w * 3, w])])
    )[1],
}  # fmt: skip


@pytest.mark.parametrize("how", SAME)
def test_the_same_in_every_bit(how):
    x, w = jnp.asarray(X), jnp.asarray(W)
    assert right(got := SAME[how](x, w), X, W)
    if how not in ("jvp", "a constant"):
        np.testing.assert_array_equal(got, matmul(X, W))


@pytest.mark.parametrize("how", NEAR)
def test_as_near(how):
    run = NEAR[how] if how == "exported" else jax.jit(NEAR[how])
    assert right(run(jnp.asarray(X), jnp.asarray(W)), X, W)


@pytest.mark.parametrize("how", ["jit", "fori_loop", "vmap over x", "vmap over weights", "scan"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_under_transformations(how, dtype):
    x, w = normal((6, 40), dtype), normal((40, 40), dtype, seed=1)
    forms = (
        SAME
        | NEAR
        | {"fori_loop": lambda x, w: jax.lax.fori_loop(0, 3, lambda i, y: matmul(x, w), x)}
    )
    got = jax.jit(forms[how])(x, w)
    assert got.dtype == TYPES[dtype] and right(got, x, w)


def test_one_operation_in_a_jaxpr():
    names = lambda f, *args: [str(eqn.primitive) for eqn in jax.make_jaxpr(f)(*args).eqns]
    assert names(matmul, X, W).count("maxjax_matmul") == 1
    assert names(lambda x: matmul(x, [W, W[:3]]), X).count("maxjax_matmul") == 1
    assert names(jax.vmap(matmul, (0, None)), STACK, W).count("maxjax_matmul") == 1
    assert "maxjax_matmul" not in names(jax.grad(lambda x: matmul(x, W).sum()), X)


@pytest.mark.parametrize(("x", "w"), PAIRS)
def test_shapes_without_values(x, w):
    found = jax.eval_shape(matmul, *(jax.ShapeDtypeStruct((3, 40), TYPES[name]) for name in (x, w)))
    assert found.shape == (3, 3) and found.dtype == (TYPES[x] if x == w else np.float32)
    assert not found.weak_type


def test_the_compiled_program_calls_the_kernel():
    """Also in a loop, where a layer's weights are not copied out of the stack."""
    text = jax.jit(matmul).lower(X, W).compile().as_text()
    assert text.count('custom_call_target="maxjax_matmul"') == 1
    run = jax.jit(lambda x, stack: jax.lax.scan(
        lambda x, i: (matmul(x, StackSlice(stack, i)), None), x, jnp.arange(3))[0])  # fmt: skip
    text = run.lower(X, STACK).compile().as_text()
    assert text.count('custom_call_target="maxjax_matmul"') == 1
    assert not re.search(r"f32\[(1,)?40,40\]", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2])
def test_many_rows_of_small_weights_are_left_to_xla(monkeypatch, dtype, count):
    monkeypatch.setattr(kernels_product, "_FASTER_IN_XLA", {native.status(): (dtype,)})
    monkeypatch.setattr(kernels_product, "_SMALL_WEIGHT", 48 * 40)

    def kernels(x, *weights):
        run = jax.jit(lambda x, *w: matmul(x, list(w)))
        for got, w in zip(run(x, *weights), weights, strict=True):
            assert right(got, x, w)
        return run.lower(x, *weights).compile().as_text().count('"maxjax_matmul"')

    x, weights = normal((4, 64, 40), dtype), [normal((48, 40), dtype, k) for k in range(count)]
    wider = normal((49, 40), dtype)
    other = normal((48, 40), "float32" if dtype == "bfloat16" else "bfloat16")
    assert kernels(x, *weights) == 0
    assert kernels(x[:, :63], *weights) == 1  # few rows
    assert kernels(x, *weights[1:], wider) == 1  # a large weight
    assert kernels(x, other) == 1  # of another type
    stack = jnp.asarray(normal((3, 48, 40), dtype))
    run = jax.jit(lambda x, stack, i: matmul(x, StackSlice(stack, i)))
    assert right(run(x, stack, 1), x, stack[1])
    text = run.lower(x, stack, 1).compile().as_text()
    assert text.count('"maxjax_matmul"') == 1  # which XLA would copy out of its stack
    monkeypatch.setattr(kernels_product, "_FASTER_IN_XLA", {})
    assert kernels(x, *weights) == 1


# --- derivatives --------------------------------------------------------------------------------

C = normal((6, 40), seed=3).astype(np.float64)


def weighed(x, w):
    """A number whose derivative by ``x`` is ``C @ w``, and by ``w`` ``C.T @ x``."""
    return (matmul(x, w).astype(jnp.float32) * jnp.asarray(C, jnp.float32)).sum()


def near(got, exact, tolerance=1e-5):
    """Relative to the largest: sums of 40 normal numbers."""
    exact = np.asarray(exact, np.float64)
    assert got.shape == exact.shape
    worst = np.abs(np.asarray(got).astype(np.float64) - exact).max()
    assert worst <= tolerance * np.abs(exact).max()


@pytest.mark.sampled
@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(("x", "w"), PAIRS)
def test_gradients(x, w, how):
    x, w = X.astype(TYPES[x]), W.astype(TYPES[w])
    dx, dw = how(jax.grad(weighed, (0, 1)))(jnp.asarray(x), jnp.asarray(w))
    assert dx.dtype == x.dtype and dw.dtype == w.dtype
    # What flows back through a narrow result or operand is rounded to it.
    tolerance = max(
        [1e-5, *({"float16": 2e-3, "bfloat16": 2e-2}.get(a.dtype.name, 0) for a in (x, w))]
    )
    near(dx, C @ w.astype(np.float64), tolerance)
    near(dw, C.T @ x.astype(np.float64), tolerance)


X64, W64, STACK64 = X.astype(np.float64), W.astype(np.float64), STACK.astype(np.float64)
half = lambda x, w: (matmul(x, w) ** 2).sum() / 2


def _dots_saved(policy):
    def run(x, w):
        f = jax.checkpoint(lambda x, w: matmul(x, w), policy=policy)
        return jax.grad(lambda x, w: (f(x, w) * jnp.asarray(C, jnp.float32)).sum(), (0, 1))(x, w)

    return run


_GRADS = (C @ W64, C.T @ X64)
_HESSIAN = (X64 @ W64.T) @ W64
DERIVATIVES = {
    "jvp": (
        lambda x, w: jax.jvp(matmul, (x, w), (2 * x, 3 * w))[1],
        5 * X64 @ W64.T,
    ),
    "jvp of x alone": (lambda x, w: jax.jvp(lambda x: matmul(x, w), (x,), (2 * x,))[1], 2 * X64 @ W64.T),
    "linearize": (lambda x, w: jax.linearize(matmul, x, w)[1](2 * x, w), 3 * X64 @ W64.T),
    "vjp": (lambda x, w: jax.vjp(matmul, x, w)[1](jnp.asarray(C, jnp.float32)), _GRADS),
    "linear_transpose": (
        lambda x, w: (
            jax.linear_transpose(lambda x: matmul(x, w), x)(jnp.asarray(C, jnp.float32))[0],
            jax.linear_transpose(lambda w: matmul(x, w), w)(jnp.asarray(C, jnp.float32))[0],
        ),
        _GRADS,
    ),
    "vmap of grad": (
        lambda x, w: jax.vmap(jax.grad(lambda x, w, c: (matmul(x, w) * c).sum()), (0, None, 0))(
            x, w, jnp.asarray(C, jnp.float32)),
        C @ W64,
    ),
    "vmap of grad by w": (
        lambda x, w: jax.vmap(jax.grad(lambda w, x, c: (matmul(x, w) * c).sum()), (None, 0, 0))(
            w, x, jnp.asarray(C, jnp.float32)).sum(0),
        C.T @ X64,
    ),
    "grad of vmap": (
        lambda x, w: jax.grad(
            lambda x, w: (jax.vmap(matmul, (0, None))(x, w) * jnp.asarray(C, jnp.float32)).sum(), (0, 1)
        )(x, w),
        _GRADS,
    ),
    "checkpoint": (lambda x, w: jax.grad(jax.checkpoint(weighed), (0, 1))(x, w), _GRADS),
    "dots_saveable": (_dots_saved(jax.checkpoint_policies.dots_saveable), _GRADS),
    "nothing_saveable": (_dots_saved(jax.checkpoint_policies.nothing_saveable), _GRADS),
    "jvp of grad": (lambda x, w: jax.jvp(lambda x: jax.grad(half)(x, w), (x,), (x,))[1], _HESSIAN),
    "grad of jvp": (
        lambda x, w: jax.grad(lambda x: jax.jvp(lambda x: half(x, w), (x,), (X,))[1])(x), _HESSIAN,
    ),
    "grad of grad": (
        lambda x, w: jax.grad(lambda x: (jax.grad(half)(x, w) * X).sum())(x), _HESSIAN,
    ),
    "jacfwd": (lambda x, w: jax.jacfwd(lambda x: matmul(x, w))(x[0]), W64),
    "jacrev": (lambda x, w: jax.jacrev(lambda x: matmul(x, w))(x[0]), W64),
    "hessian": (lambda x, w: jax.hessian(half)(x[0], w), W64.T @ W64),
    "scan": (
        lambda x, w: jax.grad(
            lambda x, w: (_scanned(x, w) * jnp.asarray(C, jnp.float32)).sum(), (0, 1))(x, w),
        _GRADS,
    ),
    "a layer in scan": (
        lambda x, w: jax.grad(
            lambda x, w: (_layers(x, w) * jnp.asarray(C, jnp.float32)).sum(), (0, 1))(x, w),
        _GRADS,
    ),
    "of a stack": (
        lambda x, w: jax.grad(lambda s, i: weighed(x, StackSlice(s, i)))(jnp.stack([w, w]), 1),
        np.stack([0 * W64, C.T @ X64]),
    ),
    "of several": (
        lambda x, w: jax.grad(
            lambda x: sum((y * jnp.asarray(C, jnp.float32)).sum() for y in matmul(x, [w, 2 * w])))(x),
        3 * C @ W64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", DERIVATIVES)
def test_derivatives(how):
    function, exact = DERIVATIVES[how]
    got = jax.jit(function)(jnp.asarray(X), jnp.asarray(W))
    for one, wanted in zip(
        *((a if isinstance(a, tuple) else (a,)) for a in (got, exact)), strict=True
    ):
        near(one, wanted)


def test_a_tangent_of_an_index_is_none():
    """An integer has none: ``jax.jvp`` and ``jax.vjp`` pass float0 for it."""
    run = lambda x, i: matmul(x, StackSlice(jnp.asarray(STACK), i))
    zero = np.zeros((), jax.dtypes.float0)
    y, dy = jax.jvp(run, (jnp.asarray(X), jnp.int32(1)), (jnp.asarray(X), zero))
    np.testing.assert_allclose(y, dy)
    near(y, X64 @ STACK64[1].T)
    dx, di = jax.vjp(run, jnp.asarray(X), jnp.int32(1))[1](jnp.asarray(C, jnp.float32))
    near(dx, C @ STACK64[1])
    assert di.dtype == jax.dtypes.float0


def test_nan_is_found_in_eager_code():
    x = jnp.asarray(X).at[0, 0].set(jnp.nan)
    with jax.debug_nans(False):
        want = matmul(x, W)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.block_until_ready(matmul(x, W))
    assert jnp.isnan(want).any()


def test_the_matmul_precision_is_that_of_the_call():
    def run(x, w):
        with jax.default_matmul_precision("highest"):
            return matmul(x, w)

    for f in (run, jax.grad(lambda x, w: run(x, w).sum())):
        lowered = jax.jit(f).trace(X, W).lower(lowering_platforms=("tpu",))
        assert "precision = [HIGHEST, HIGHEST]" in lowered.as_text()
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(matmul).trace(X, W).lower(lowering_platforms=("tpu",))
    assert "precision = [HIGHEST, HIGHEST]" in lowered.as_text()


def test_saved_products_are_not_done_again():
    def count(policy):
        f = jax.checkpoint(lambda x: jnp.sin(matmul(x, jnp.asarray(W))), policy=policy)
        grad = jax.grad(lambda x: f(f(x)).sum())
        return str(jax.make_jaxpr(grad)(X)).count("= dot_general")

    policies = jax.checkpoint_policies
    assert count(policies.dots_saveable) < count(policies.nothing_saveable)


# --- exported -----------------------------------------------------------------------------------


def calls(module):
    """The targets of a module's custom calls."""
    return set(re.findall(r"custom_call @(\w+)", module))


def test_an_exported_program_needs_nothing_of_ours():
    run = jax.jit(lambda x, s, i: matmul(x, (StackSlice(s, i), s[0])))
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, STACK, np.int32(0))]
    made = export.export(run, platforms=["cpu", "cuda", "tpu"])(*args)
    again = export.deserialize(made.serialize(vjp_order=1))
    assert not calls(again.mlir_module())
    got = again.call(X, STACK, np.int32(2))
    assert right(got[0], X, STACK[2]) and right(got[1], X, STACK[0])
    near(jax.grad(lambda x: (again.call(x, STACK, np.int32(2))[0] * C.astype(np.float32)).sum())(
        jnp.asarray(X)), C @ STACK64[2])  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        (("b, 40", "40, 40"), [(6, 40, 40), (1, 40, 40), (200, 40, 40)]),
        (("6, d", "o, d"), [(6, 1, 33), (6, 7, 1)]),
        (("2*b, d", "o, d"), [(6, 3, 40)]),
    ],
)
def test_exported_with_sizes_that_are_not_known(shapes, sizes):
    args = export.symbolic_args_specs((X, W), shapes)
    program = export.deserialize(export.export(jax.jit(matmul))(*args).serialize())
    assert calls(program.mlir_module()) <= {"shape_assertion"}
    for tokens, rows, depth in sizes:
        one = product(tokens, rows, depth)
        assert right(program.call(one.x, one.w), one.x, one.w)


@both
def test_exported_from_a_mesh(explicit):
    x, w = placed(explicit, (X[:2], P("data")), (W, P("model")))
    made = export.export(jax.jit(matmul))(x, w)
    assert made.nr_devices == 8
    again = export.deserialize(made.serialize())
    assert not {name for name in calls(again.mlir_module()) if "maxjax" in name}
    assert right(jax.jit(again.call)(x, w), X[:2], W)


# --- on a mesh ----------------------------------------------------------------------------------

SIZES = {"data": 2, "model": 4}


def placed(explicit, *arrays):
    mesh = mesh_of(SIZES, explicit)
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in arrays]


def kernels_in(text):
    """The shape of the first result of each call of the kernel."""
    lines = [line for line in text.splitlines() if 'custom_call_target="maxjax_matmul"' in line]
    return [tuple(map(int, re.search(r"\w+\[([\d,]+)\]", line)[1].split(","))) for line in lines]


# Of x [8, 64] and w [128, 64]: where they are, what the devices exchange, the results of each.
PLACES = {
    "whole": (P(), P(), [], (8, 128)),
    "tokens": (P("data"), P(), [], (4, 128)),
    "tokens over two": (P(("data", "model")), P(), [], (1, 128)),
    "rows": (P(), P("model"), [], (8, 32)),
    "rows over two": (P(), P(("data", "model")), [], (8, 16)),
    "tokens and rows": (P("data"), P("model"), [], (4, 32)),
    "tokens over model, rows over data": (P("model"), P("data"), [], (2, 64)),
    "depth": (P(), P(None, "model"), ["all-reduce"], (8, 128)),
    "depth of both": (P(None, "model"), P(None, "model"), ["all-reduce"], (8, 128)),
    "depth over two": (P(), P(None, ("data", "model")), ["all-reduce"], (8, 128)),
    "tokens and depth": (P("data"), P(None, "model"), ["all-reduce"], (4, 128)),
    "tokens and depth of both": (P("data", "model"), P(None, "model"), ["all-reduce"], (4, 128)),
    "rows and depth": (P(), P("data", "model"), ["all-reduce"], (8, 64)),
    "depth and rows": (P(None, "data"), P("model", "data"), ["all-reduce"], (8, 32)),
    "depth of x": (P(None, "model"), P(), ["all-reduce"], (8, 128)),
    "depth of x, rows": (P("data", "model"), P("model"), ["all-gather"], (4, 32)),
    # Fully sharded: split over the tokens' own axis as well.
    "fully": (P("data"), P("data", "model"), ["all-gather", "all-reduce"], (4, 128)),
    "fully, rows": (P("data"), P(("model", "data")), ["all-gather"], (4, 32)),
    "fully, tokens' axis alone": (P("model"), P("model"), ["all-gather"], (2, 128)),
    "fully, depth": (P("data"), P("model", "data"), ["all-gather"], (4, 32)),
}


# Where a result goes is the same for all types; each place has both, one of them on Explicit axes.
SPLITS = [
    (where, dtype, explicit)
    for number, where in enumerate(PLACES)
    for explicit in (False, True)
    for dtype in [("float32", "bfloat16")[(number + explicit) % 2]]
]


@pytest.mark.sampled
@pytest.mark.parametrize(("where", "dtype", "explicit"), SPLITS)
def test_split_over_a_mesh(where, dtype, explicit):
    x_spec, w_spec, kinds, local = PLACES[where]
    a, b = normal((8, 64), dtype), normal((128, 64), dtype, seed=1)
    x, w = placed(explicit, (a, x_spec), (b, w_spec))
    program = jax.jit(matmul).lower(x, w).compile()
    got, text = program(x, w), program.as_text()
    assert right(got, a, b)
    assert kernels_in(text) == [local]
    exchanged = collectives(text)
    moved = {c.kind for c in exchanged}
    if "fully" in where and not explicit:  # where the weight wins, the result goes to its place
        moved -= {"all-to-all"}
    assert sorted(moved) == kinds
    assert [c.kind for c in exchanged].count("all-reduce") == kinds.count("all-reduce")
    if "fully" not in where:
        assert all(c.bytes < w.nbytes for c in exchanged if c.kind == "all-gather")
    if explicit:
        rows = [n for n in (w_spec[:1] or (None,)) if n not in (x_spec[:1] or (None,))]
        assert got.sharding.spec[0] == (x_spec[0] if len(x_spec) else None)
        assert rows or got.sharding.spec[1] is None


@both
@pytest.mark.parametrize("specs", [(P(), P("model")), (P("data"), P(None, "model"))])
def test_eagerly_on_a_mesh(specs, explicit):
    x, w = placed(explicit, (X, specs[0]), (W, specs[1]))
    assert right(matmul(x, w), X, W)


@both
@pytest.mark.parametrize("spec", [P(None, "model"), P(None, None, "model")], ids=["rows", "depth"])
def test_a_stack_on_a_mesh(spec, explicit):
    """A loop over the layers: a layer's part stays where it is, and each is summed once."""
    x, stack = placed(explicit, (X, P("data")), (STACK, spec))

    @jax.jit
    def run(x, stack):
        step = lambda y, i: (y + jnp.tanh(matmul(x, StackSlice(stack, i))), None)
        where = jax.typeof(matmul(x, StackSlice(stack, 0))).sharding
        zeros = jnp.zeros((6, 40), device=where if explicit else None)
        return jax.lax.scan(step, zeros, jnp.arange(3))[0]

    text = run.lower(x, stack).compile().as_text()
    summed = spec != P(None, "model")
    assert sorted(c.kind for c in collectives(text)) == ["all-reduce"] * summed
    assert set(kernels_in(text)) == {(3, 40 if summed else 10)}
    near(run(x, stack), sum(np.tanh(X64 @ w.T) for w in STACK64))


@both
def test_several_weights_on_a_mesh(explicit):
    """Queries, keys and values split by rows: nothing is exchanged, in one pass."""
    widths = (40, 8, 16)
    weights = [normal((rows, 40), seed=rows) for rows in widths]
    x, *w = placed(explicit, (X, P("data")), *((a, P("model")) for a in weights))
    program = jax.jit(matmul).lower(x, w).compile()
    assert not collectives(program.as_text()) and kernels_in(program.as_text()) == [(3, 10)]
    assert all(right(y, X, a) for y, a in zip(program(x, w), weights, strict=True))


@both
def test_a_pair_of_products_sums_once(explicit):
    """As an MLP: split by rows, then by depth, and one sum at the end."""
    up, down = normal((128, 40), seed=4), normal((40, 128), seed=5)
    x, u, d = placed(explicit, (X, P("data")), (up, P("model")), (down, P(None, "model")))
    program = jax.jit(lambda x, u, d: matmul(jnp.tanh(matmul(x, u)), d)).lower(x, u, d).compile()
    assert [c.kind for c in collectives(program.as_text())] == ["all-reduce"]
    near(program(x, u, d), np.tanh(X64 @ up.T) @ down.astype(np.float64).T)


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P(("data", "model"))], ids=repr)
def test_sizes_that_do_not_divide(spec):
    """XLA fills up what it splits unevenly."""
    one, mesh = product(6, 10, 33), mesh_of(SIZES, False)

    @jax.jit
    def run(x, w):
        w = jax.lax.with_sharding_constraint(w * 2, NamedSharding(mesh, spec))
        return matmul(x, w)

    x = jax.device_put(one.x, NamedSharding(mesh, P("data")))
    assert right(run(x, one.w), one.x, one.w * 2)


@pytest.mark.parametrize("spec", [P("model"), P("data", "model"), P(None, None)], ids=repr)
def test_the_result_where_it_is_wanted(spec):
    mesh = mesh_of(SIZES, False)
    x, w = placed(False, (normal((8, 64)), P("data")), (normal((128, 64)), P("model")))
    got = jax.jit(matmul, out_shardings=NamedSharding(mesh, spec))(x, w)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert right(got, x, w)


@both
@pytest.mark.parametrize("spec", [P("model"), P(None, "model")], ids=["rows", "depth"])
def test_derivatives_on_a_mesh(spec, explicit):
    x, w = placed(explicit, (X, P("data")), (W, spec))

    def value(x, w):
        return (matmul(x, w) ** 2).sum() / 2

    dx, dw = jax.jit(jax.grad(value, (0, 1)))(x, w)
    y = X64 @ W64.T
    near(dx, y @ W64)
    near(dw, y.T @ X64)


@both
def test_vmap_on_a_mesh(explicit):
    xs = normal((4, 6, 40))
    x, w = placed(explicit, (xs, P(None, "data")), (W, P("model")))
    program = jax.jit(jax.vmap(matmul, (0, None))).lower(x, w).compile()
    assert kernels_in(program.as_text()) == [(4, 3, 10)] and not collectives(program.as_text())
    assert right(program(x, w), xs, W)


@pytest.mark.sampled
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@both
def test_inside_shard_map(explicit, check):
    """Split by rows, by depth with a sum of one's own, and a whole weight for split tokens."""
    mesh = mesh_of(SIZES, explicit)
    run = lambda f, *specs, out: jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)
    )
    summed = lambda x, w: jax.lax.psum(matmul(x, w), "model")
    programs = [
        (run(matmul, P("data"), P("model"), out=P("data", "model")), P("data"), P("model")),
        (run(summed, P("data", "model"), P(None, "model"), out=P("data")), P("data", "model"), P(None, "model")),
        (run(matmul, P("data"), P(), out=P("data")), P("data"), P()),
        (run(jax.checkpoint(matmul), P("data"), P(), out=P("data")), P("data"), P()),
    ]  # fmt: skip
    for program, x_spec, w_spec in programs:
        x, w = placed(explicit, (X, x_spec), (W, w_spec))
        assert right(program(x, w), X, W)
        dx, dw = jax.jit(jax.grad(lambda x, w, p=program: (p(x, w) ** 2).sum() / 2, (0, 1)))(x, w)
        near(dx, (X64 @ W64.T) @ W64)
        near(dw, (X64 @ W64.T).T @ X64)


def test_inside_shard_map_over_some_axes():
    """The other axis stays XLA's."""
    mesh = mesh_of(SIZES, False)
    x, w = placed(False, (X, P("data")), (W, P("model")))
    program = jax.jit(
        jax.shard_map(
            matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
        )
    )
    assert right(program(x, w), X, W)


# --- many at once -------------------------------------------------------------------------------


def in_threads(count, work, seconds):
    """Runs ``work(i)`` in threads; whether all came back in time, and what they raised."""
    raised = []

    def guarded(i):
        try:
            work(i)
        except BaseException as problem:
            raised.append(problem)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert not raised, raised


def test_threads():
    run = jax.jit(matmul)
    one, few = product(1, 300, 1000), product(20, 200, 500, "bfloat16", "bfloat16")
    wanted = [np.asarray(run(p.x, p.w)) for p in (one, few)]

    def work(i):
        for n in range(60):
            p = (one, few)[(i + n) % 2]
            np.testing.assert_array_equal(run(p.x, p.w), wanted[(i + n) % 2])

    in_threads(8, work, 60)


def test_threads_that_compile():
    def work(i):
        for depth in range(1, 6):
            p = product(3, 5, 10 * i + depth)
            assert right(jax.jit(lambda x, w: matmul(x, w))(p.x, p.w), p.x, p.w)

    in_threads(4, work, 60)


@both
def test_eight_devices_at_once(explicit):
    """More handlers at a time than the pool has threads, again and again before the last is done."""
    x, w = placed(explicit, (normal((64, 256)), P("data")), (normal((256, 256)), P("model")))
    run = jax.jit(matmul)
    first = run(x, w)
    results = [run(x, w) for _ in range(50)]
    each = [jax.device_put(np.asarray(w), device) for device in jax.devices()]
    results += [
        run(jax.device_put(np.asarray(x), d), a) for d, a in zip(jax.devices(), each, strict=True)
    ]
    for result in jax.block_until_ready(results):
        np.testing.assert_allclose(result, first, rtol=1e-4, atol=1e-4)
    assert right(first, x, w)


@pytest.mark.parametrize(
    "platform, count, found",
    [("cuda", 2, "bf16"), ("cuda", 1, "f32"), ("rocm", 2, "bf16"), ("tpu", 2, "f32")],
)
def test_what_gpus_add_up_has_the_dtype_of_the_result(platform, count, found):
    split = NamedSharding(maxjax.make_mesh(model=count), P(None, "model"))
    x, w = (jax.device_put(jnp.ones(shape, jnp.bfloat16), split) for shape in ((3, 8), (5, 8)))
    lowered = jax.jit(matmul).trace(x, w).lower(lowering_platforms=(platform,))
    (product,) = re.findall(r"dot_general.* -> tensor<3x5x(\w+)>", lowered.as_text())
    assert product == found
    assert jax.eval_shape(matmul, x, w).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("platform", "count", "tokens", "groups"),
    [
        ("cuda", 1, 1, 3),
        ("cuda", 2, 1, 4),
        ("cuda", 1, 32, 3),
        ("cuda", 1, 33, 4),
        ("tpu", 1, 1, 0),
    ],
)
def test_gpus_multiply_weights_apart_that_are_no_whole_tiles(platform, count, tokens, groups):
    """Of many tokens each weight: XLA would copy those that it merges."""
    rows = NamedSharding(maxjax.make_mesh(model=count), P("model"))
    x = jnp.ones((tokens, 8))
    weights = [jax.device_put(jnp.ones((n, 8)), rows) for n in (64, 128, 32, 6)]
    run = jax.jit(lambda x, ws: kernels_product.products(x, ws, [0] * 4, [x.dtype] * 4))
    text = run.trace(x, weights).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("optimization_barrier") == groups
