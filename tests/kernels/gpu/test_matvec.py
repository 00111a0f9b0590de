"""The Triton kernel for one token and a large weight, interpreted on a CPU, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import StackSlice, matmul
from maxjax.kernels.gpu import matvec
from tests.kernels.packed_operands import close

UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-8, "float32": 2.0**-20}
needs_triton = pytest.mark.skipif(
    jax.__version__ >= "0.11", reason="it lowers Triton only for devices it knows"
)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("depth", [256, 1536])
def test_the_kernel(dtype, depth):
    rng = np.random.default_rng(depth)
    x, w = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((1, 1, depth), (2, 12, depth)))
    exact = np.asarray(w[1], np.float64)
    for result in ("float32", dtype):
        got = matvec.kernel(result, x, w, jnp.int32(1), interpret=True)
        assert got.shape == (1, 1, 12) and got.dtype == result
        close(got[0], x[0], exact, unit=UNITS[result])
    alone = matvec.kernel(dtype, x[0, 0], w[1], jnp.int32(0), interpret=True)
    np.testing.assert_array_equal(alone, got[0, 0])


def of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_what_it_is_for():
    x, w = of(jnp.bfloat16, 1, 4096), of(jnp.bfloat16, 3, 4096, 4096)
    lacks = matvec.lacks
    assert not lacks(jnp.bfloat16, x, w) and not lacks(jnp.float32, x, w)
    assert "2 tokens" in lacks(jnp.bfloat16, of(jnp.bfloat16, 2, 4096), w)
    assert "float32" in lacks(jnp.float32, of(jnp.float32, 1, 4096), w)
    assert "weights float16" in lacks(jnp.bfloat16, x, of(jnp.float16, 4096, 4096))
    for rows, depth in [(1000, 4096), (32768, 4100)]:
        x, w = of(jnp.bfloat16, 1, depth), of(jnp.bfloat16, rows, depth)
        assert lacks(jnp.bfloat16, x, w) == f"the weight is {rows} x {depth}"


@needs_triton
def test_programs_for_one_token_on_one_nvidia_gpu_contain_it():
    """One call for each large weight; small ones, several tokens and other devices have XLA's matmul."""
    large, small = of(jnp.bfloat16, 3, 4096, 1024), of(jnp.bfloat16, 512, 1024)
    run = lambda x, a, b: matmul(x, [StackSlice(a, 1), b, StackSlice(a, 2)])

    def calls(tokens, platform):
        given = of(jnp.bfloat16, tokens, 1024), large, small
        lowered = jax.jit(run).trace(*given).lower(lowering_platforms=(platform,))
        text = lowered.as_text()
        return text.count("xla.gpu.triton"), text.count("stablehlo.dot_general")

    assert calls(1, "cuda") == (2, 1)
    assert calls(2, "cuda") == (0, 3)
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(
        of(jnp.bfloat16, 1, 1024), large, small
    )
    assert "triton" not in exported.mlir_module()
    assert calls(1, "rocm") == calls(1, "tpu") == (0, 3)
