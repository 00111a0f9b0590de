"""kernels.matmul against NumPy in float64, and which spellings of a product reach it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import maxjax
from maxjax import kernels
from maxjax.graph import DeviceRef, Weight


def _weight(shape=(5, 3), dtype=np.float32, seed=0):
    w = Weight("weight", dtype, shape, DeviceRef.CPU())
    w.value = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
    return w


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 8e-3)]
)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (7, 3), (2, 4, 3), (0, 3)])
def test_equals_float64(dtype, tolerance, shape):
    dtype = jnp.dtype(dtype)
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    w = _weight(dtype=dtype)
    got = kernels.matmul(x, w)
    exact = x.astype(np.float64) @ np.asarray(w.value).astype(np.float64).T
    assert got.dtype == dtype
    scale = np.abs(x.astype(np.float64)) @ np.abs(np.asarray(w.value).astype(np.float64)).T
    assert got.shape == exact.shape
    assert (np.abs(np.asarray(got).astype(np.float64) - exact) <= tolerance * scale + 1e-30).all()


def test_float_widths_promote():
    w = _weight()
    assert kernels.matmul(jnp.ones((2, 3), jnp.bfloat16), w).dtype == jnp.float32
    assert kernels.matmul(jnp.ones((2, 3), jnp.bfloat16), w.astype("float16")).dtype == jnp.float32


def test_half_precision_accumulates_in_float32():
    x = jnp.full((1, 4096), 1.0, jnp.bfloat16)
    w = jnp.full((1, 4096), 1.0, jnp.bfloat16)
    assert float(kernels.matmul(x, w)[0, 0]) == 4096.0


@pytest.mark.parametrize(
    "x, w", [((4, 2), (5, 3)), ((), (5, 3)), ((4, 3), (3,)), ((4, 3), (2, 5, 3))]
)
def test_shapes_that_do_not_fit(x, w):
    with pytest.raises(ValueError, match=str(w).replace("(", r"\(").replace(")", r"\)")):
        kernels.matmul(jnp.ones(x), jnp.ones(w))


@pytest.fixture
def reached(monkeypatch):
    """Counts calls of kernels.matmul."""
    calls = []
    plain = kernels.matmul

    def counting(x, w):
        calls.append((x.shape, tuple(int(d) for d in w.shape)))
        return plain(x, w)

    monkeypatch.setattr(kernels, "matmul", counting)
    return calls


def _scan(w, x):
    return jax.lax.scan(lambda carry, row: (carry, row @ w.T), 0.0, x)[1]


# Each is a function of (Weight, x [4, 3]) and gives x @ w.T or its like.
REACHING = {
    "eager": lambda w, x: x @ w.T,
    "numpy on the left": lambda w, x: np.asarray(x) @ w.T,
    "weight on the left": lambda w, x: _weight((4, 3), seed=1) @ w.T,
    "jit": lambda w, x: jax.jit(lambda w, x: x @ w.T)(w, x),
    "jit closure": lambda w, x: jax.jit(lambda x: x @ w.T)(x),
    "vmap over rows": lambda w, x: jax.vmap(lambda r: r @ w.T)(x),
    "vmap over weights": lambda w, x: jax.vmap(lambda w: x @ w.T)(
        jax.tree.map(lambda a: jnp.stack([a, a]), w)
    )[0],
    "grad": lambda w, x: jax.grad(lambda x: (x @ w.T).sum())(x),
    "grad of the weight": lambda w, x: jax.grad(lambda w: (x @ w.T).sum())(w).value,
    "jvp": lambda w, x: jax.jvp(lambda x: x @ w.T, (x,), (x,))[1],
    "scan": _scan,
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: x @ w.T)(x),
}
PASSING_BY = {
    "x @ w, with w as it lies": (
        lambda w, x: jnp.ones((4, 5)) @ w,
        lambda w, x: np.ones((4, 5)) @ w,
    ),
    "w @ y": (lambda w, x: w @ x.T, lambda w, x: w @ x.T),
    "the transposed array": (lambda w, x: x @ w.T.array(), lambda w, x: x @ w.T),
    "w.T on the left": (lambda w, x: w.T @ jnp.ones((5, 2)), lambda w, x: w.T @ np.ones((5, 2))),
}


@pytest.mark.parametrize("form", REACHING)
def test_forms_that_reach_the_kernel(form, reached):
    w, x = _weight(), jnp.asarray(np.random.default_rng(2).standard_normal((4, 3)), jnp.float32)
    got = REACHING[form](w, x)
    assert reached, "kernels.matmul was not called"
    array = np.asarray(w.value)
    wanted = {
        "grad": np.ones((4, 5)) @ array,
        "grad of the weight": np.ones((5, 4)) @ np.asarray(x),
        "weight on the left": np.asarray(_weight((4, 3), seed=1).value) @ array.T,
    }.get(form, np.asarray(x) @ array.T)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", PASSING_BY)
def test_forms_that_are_ordinary_products(form, reached):
    ours, numpy = PASSING_BY[form]
    w, x = _weight(), jnp.asarray(np.random.default_rng(2).standard_normal((4, 3)), jnp.float32)
    got = ours(w, x)
    assert not reached
    np.testing.assert_allclose(got, numpy(np.asarray(w.value), np.asarray(x)), rtol=1e-5, atol=1e-5)


def test_jnp_dot_with_the_view_raises():
    w = _weight()
    with pytest.raises(TypeError):
        jnp.dot(jnp.ones((4, 3)), w.T)
    assert w.T.array().shape == (3, 5)


def test_narrow_floats_of_ml_dtypes():
    w = _weight(dtype=ml_dtypes.float8_e4m3fn)
    assert (
        kernels.matmul(jnp.ones((2, 3), jnp.bfloat16), w.astype("bfloat16")).dtype == jnp.bfloat16
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize("rows", [5, 7, 9])
def test_a_row_has_the_same_bits_in_each_place(dtype, rows):
    """So that an answer does not depend on its place among others (``Engine(exact=True)``)."""
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(33, 96)).astype(np.float32)
    x = jnp.asarray(draw.normal(size=(1, 96)), "float32" if dtype == "q8_0" else dtype)
    if dtype == "q8_0":
        linear = maxjax.nn.Linear(96, 33)
        linear.load_state_dict({"weight": weight})
        layer, _ = maxjax.quantize(linear, "q8_0")
    else:
        layer = jnp.asarray(weight, dtype)
    call = lambda w, x: w(x) if dtype == "q8_0" else kernels.matmul(x, w)
    found = np.asarray(jax.jit(call)(layer, jnp.repeat(x, rows, axis=0)))
    assert (found == found[:1]).all()
