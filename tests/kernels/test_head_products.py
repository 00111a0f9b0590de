"""Products of each head with a part of its own matrix, against NumPy in float64."""

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.kernels import StackSlice, native
from maxjax.kernels.head_products import head_products
from scripts.sharding_product import collectives, mesh_of

head_products_module = sys.modules["maxjax.kernels.head_products"]
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def operands(heads, height, depth, width, tokens, x="float32", w="float32", layers=None, seed=0):
    """Activations ``[tokens, H, width]`` and matrices ``[H · P, C]``, perhaps of several layers."""
    rng = np.random.default_rng(seed)
    shape = (heads * height, depth) if layers is None else (layers, heads * height, depth)
    normal = lambda shape, dtype: rng.standard_normal(shape).astype(np.float32).astype(TYPES[dtype])
    return normal((tokens, heads, width), x), normal(shape, w)


def check(got, x, w, heads, first, rows, transposed):
    """That it is right to the roundings of float32 and of the result's type."""
    used = w.astype(np.float64).reshape(heads, -1, w.shape[-1])[:, first : first + rows]
    equation = "bhn,hnc->bhc" if transposed else "bhc,hnc->bhn"
    wide = x.astype(np.float64)
    exact, size = (np.einsum(equation, f(wide), f(used)) for f in (np.asarray, np.abs))
    got = np.asarray(got)
    assert got.dtype == x.dtype and got.shape == exact.shape
    digits = {"float32": 24, "float16": 11, "bfloat16": 8}[x.dtype.name]
    allowed = 2.0**-20 * size + 2.0**-digits * np.abs(exact) + 1e-30
    assert (np.abs(got.astype(np.float64) - exact) <= allowed).all()


SIZES = {  # heads, height, depth, first, rows
    "as in a model": (4, 96, 64, 0, 64),
    "its values": (4, 96, 64, 64, 32),
    "odd": (3, 13, 37, 5, 7),
    "one": (1, 1, 1, 0, 1),
    "most rows": (2, 300, 33, 10, 256),
}


@pytest.mark.sampled
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("which", SIZES)
def test_on_every_level(which, transposed):
    heads, height, depth, first, rows = SIZES[which]
    for tokens in (1, 5):
        for types in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")):
            width = rows if transposed else depth
            x, w = operands(heads, height, depth, width, tokens, *types, layers=3)
            run = lambda x, w: head_products(
                x, StackSlice(w, jnp.int32(1)), heads, first, rows, transposed
            )
            program = jax.jit(run).lower(x, w).compile()
            assert 'custom_call_target="maxjax_heads"' in program.as_text()
            for level in native.levels():
                with native.level(level):
                    check(program(x, w), x, w[1], heads, first, rows, transposed)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_what_the_kernel_does_not_take(transposed):
    """Many tokens, many rows, and exported programs."""
    for tokens, rows in ((40, 7), (2, 300)):
        x, w = operands(2, 310, 24, rows if transposed else 24, tokens)
        run = jax.jit(lambda x, w, rows=rows: head_products(x, w, 2, 3, rows, transposed))
        there = "maxjax_heads" in run.lower(x, w).as_text()
        assert there == (tokens <= 16 and rows <= 256)
        check(run(x, w), x, w, 2, 3, rows, transposed)
    x, w = operands(2, 10, 24, 4 if transposed else 24, 2)
    run = jax.jit(lambda x, w: head_products(x, w, 2, 3, 4, transposed))
    check(jax.export.export(run)(x, w).call(x, w), x, w, 2, 3, 4, transposed)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_on_a_mesh(explicit):
    """Tokens over data and heads over model: nothing is exchanged."""
    mesh = mesh_of({"data": 2, "model": 4}, explicit)
    x, w = operands(8, 12, 16, 16, 4)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    run = jax.jit(lambda x, w: head_products(x, w, 8, 4, 8, False))
    there = put(x, "data", "model"), put(w, "model")
    assert not collectives(run.lower(*there).compile().as_text())
    y = run(*there)
    check(y, x, w, 8, 4, 8, False)
    assert y.sharding.is_equivalent_to(there[0].sharding, 3)


def test_derivatives():
    """As those of the product of matrices that lie apart."""
    x, w = map(jnp.asarray, operands(2, 5, 6, 6, 3))
    run = lambda x, w: jnp.sum(jnp.sin(head_products(x, w, 2, 1, 3, False)))
    apart = lambda x, w: jnp.sum(jnp.sin(jnp.einsum("bhc,hnc->bhn", x, w.reshape(2, 5, 6)[:, 1:4])))
    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (run, apart))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    batch = jax.vmap(run, (0, None))(jnp.stack([x, 2 * x]), w)
    np.testing.assert_allclose(batch, [run(x, w), run(2 * x, w)], rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_the_form_of_gpus_reads_whole_matrices(transposed):
    heads, height, depth, first, rows = SIZES["its values"]
    x, w = operands(heads, height, depth, rows if transposed else depth, 2, layers=2)
    part = head_products_module.HeadPart(first, rows, transposed)
    stack = w.reshape(2, heads, height, depth)
    (got,) = head_products_module._on_gpu(part, 1, x, stack, jnp.int32(1))
    check(got, x, w[1], heads, first, rows, transposed)
    run = lambda x, w: head_products(x, w, heads, first, rows, transposed)
    text = jax.jit(run).trace(x, w[1]).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{heads}x{rows}x{depth}xf32>" not in text
