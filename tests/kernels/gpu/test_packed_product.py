"""Products with weights in blocks as GPUs and TPUs compute them, on a CPU, against NumPy in float64."""

import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import QuantArray, embed, matmul, packed_product
from maxjax.kernels.blocks import DECODERS
from maxjax.kernels.gpu import packed_product as gpu
from maxjax.kernels.packed_product import PackedOperand, in_chunks
from tests.kernels.packed_operands import blocks, close
from tests.kernels.test_packed import reference
from tests.xla import IS_OPTIMISED

# Rows and columns: a row that is one block of each encoding, and sizes that divide by nothing.
SIZES = [(24, 256), (7, 768), (65, 2304)]
UNITS = {"float32": 2.0**-20, "bfloat16": 2.0**-7, "float16": 2.0**-9}
needs_triton = pytest.mark.skipif(
    jax.__version__ >= "0.11", reason="it lowers Triton only for devices it knows"
)


def operands(name, size, tokens, dtype):
    """Activations, a stack of two weights, and the second of them in float64."""
    raw = np.stack([blocks(name, *size, seed) for seed in range(2)])
    x = np.random.default_rng(1).standard_normal((tokens, size[1]))
    return jnp.asarray(x, dtype), jnp.asarray(raw), reference(name, raw[1]).astype(np.float64)


@pytest.mark.sampled
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [case for case in product(UNITS, [1, 3, 11, 37]) if case[0] != "float32" or case[1] < 5],
)
def test_the_kernel(name, size, tokens, dtype):
    x, stack, exact = operands(name, size, tokens, dtype)
    assert not gpu.lacks(x.dtype, x, tokens, stack)
    got = gpu.kernel(name, x.dtype, x, stack, jnp.int32(1), interpret=True)
    assert got.dtype == dtype and got.shape == (tokens, size[0])
    close(got, x, exact, unit=UNITS[dtype])
    alone = gpu.kernel(name, x.dtype, x, stack[1], jnp.int32(0), interpret=True)
    # Optimised by XLA, the loops over blocks that interpret the kernel may add in another order.
    got, alone = np.asarray(got, np.float32), np.asarray(alone, np.float32)
    apart = 2e-6 * np.abs(alone).max() if IS_OPTIMISED else 0.0
    np.testing.assert_allclose(got, alone, rtol=0, atol=apart)


@pytest.mark.parametrize("name", DECODERS)
def test_many_tokens_in_float32_have_no_kernel(name):
    x, stack, _ = operands(name, SIZES[0], gpu.FEW + 1, "float32")
    assert "float32, more than 4" in gpu.lacks(x.dtype, x, len(x), stack)


def test_more_tokens_than_a_program_multiplies():
    x, stack, exact = operands("Q8_0", SIZES[0], 150, "bfloat16")
    got = gpu.kernel("Q8_0", x.dtype, x, stack, jnp.int32(1), interpret=True)
    close(got, x, exact, unit=UNITS["bfloat16"])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 32])
def test_groups_of_tokens_with_several_weights(name, tokens):
    """By the kernel, and by the definition that other platforms run."""
    size, owner = (40, 512), np.array([1, 0, -1, 1], np.int32)
    raw = jnp.asarray(np.stack([blocks(name, *size, seed) for seed in range(2)]))
    x = np.random.default_rng(1).standard_normal((4, tokens, size[1]))
    x = jnp.asarray(x, jnp.bfloat16)
    by_kernel = gpu.group_kernel(name, x.dtype, x, raw, jnp.asarray(owner), interpret=True)
    for got in (by_kernel, packed_product.packed_block_matmul(x, raw, jnp.asarray(owner), name)):
        assert got.shape == (4, tokens, size[0]) and got.dtype == x.dtype
        for i in (0, 1, 3):
            exact = reference(name, np.asarray(raw[owner[i]])).astype(np.float64)
            close(got[i], x[i], exact, unit=UNITS["bfloat16"])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("size", [(24, 256), (200, 256), (65, 768)])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("dtype", UNITS)
def test_chunks(name, size, devices, dtype, monkeypatch):
    monkeypatch.setattr(packed_product, "MOST_WEIGHTS", 2048)
    x, stack, exact = operands(name, size, 5, dtype)
    static = PackedOperand((name,), (x.dtype,))
    got = in_chunks(static, x, stack, jnp.int32(1), devices=devices)[0]
    assert got.dtype == dtype and got.shape == (5, size[0])
    close(got, x, exact, unit=UNITS[dtype])


def lowered(platform, f, *given):
    return jax.jit(f).trace(*given).lower(lowering_platforms=(platform,)).as_text()


def largest_float(text):
    """The number of elements of the largest float array of a program."""
    shapes = re.findall(r"tensor<([\dx]+)x(?:f32|bf16|f16)>", text)
    return max(np.prod([int(n) for n in shape.split("x")]) for shape in shapes)


@needs_triton
@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_no_program_has_a_dense_matrix(platform):
    n = 4096
    for name, tokens in (("Q4_K", 1), ("Q8_0", 64)):
        d = DECODERS[name]
        w = jax.ShapeDtypeStruct((n, n // d.elements * d.nbytes), jnp.uint8)
        x = jax.ShapeDtypeStruct((tokens, n), jnp.bfloat16)
        run = lambda x, w, name=name: matmul(x, QuantArray(w, name))
        text = lowered(platform, run, x, w)
        assert ("xla.gpu.triton" in text) == (platform == "cuda")
        assert largest_float(text) <= packed_product.MOST_WEIGHTS < n * n
        definition = jax.export.export(jax.jit(run), platforms=["cpu"])(x, w).mlir_module()
        assert largest_float(definition) == n * n


def test_lookups_have_no_dense_table():
    table = jax.ShapeDtypeStruct((32000, 144), jnp.uint8)
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    text = lowered("cuda", lambda w, ids: embed(QuantArray(w, "Q4_K"), ids), table, ids)
    assert largest_float(text) == 3 * 256
