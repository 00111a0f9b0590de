"""Products and parts of matrices against torch and NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxjax.graph import DeviceRef, TensorValue, Weight, ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import torch


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)),
     ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((5, 2, 3), (3,))],
)  # fmt: skip
def test_matmul(left, right):
    check(ops.matmul, torch.matmul, normal(*left), normal(*right, seed=1))


def test_matmul_of_integers_and_of_two_widths():
    a, b = np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(12, dtype=np.int32).reshape(3, 4)
    check_numpy(ops.matmul, np.matmul, a, b)
    assert ops.matmul(a.astype(np.float16), b.astype(np.float32)).dtype == np.float32


def test_16_bit_products_are_rounded_once():
    a, b = (normal(8, 512, seed=i).astype(ml_dtypes.bfloat16) for i in (0, 1))
    got = ops.matmul(a, b.T)
    assert got.dtype == ml_dtypes.bfloat16
    want = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-3)


def test_the_product_of_a_layer():
    w = Weight("w", "float32", (4, 3), DeviceRef.CPU())
    w.value = jnp.asarray(normal(4, 3))
    x = jnp.asarray(normal(2, 3, seed=1))
    want = np.asarray(x) @ np.asarray(w.value).T
    got = ops.matmul(x, w.T)
    assert not isinstance(got, TensorValue)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert isinstance(ops.matmul(TensorValue(x), w.T), TensorValue)
    np.testing.assert_allclose(ops.matmul(w, TensorValue(x).T), want.T, rtol=1e-6, atol=1e-6)
    # Through kernels.matmul: no transpose is made.
    assert "transpose" not in str(jax.make_jaxpr(lambda x: ops.matmul(x, w.T))(x))
    with pytest.raises(ValueError, match="unsafe cast"):
        ops.matmul(jnp.ones((2, 3), jnp.int32), w.T)


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [((2, 3), (2, 4), r"\(2, 3\) and \(2, 4\)"), ((2, 3), (4,), r"\(4,\)"), ((), (3,), r"\(\)"),
     ((5, 2, 3), (4, 3, 4), r"\(5,\) and \(4,\)")],
)  # fmt: skip
def test_shapes_that_do_not_fit(left, right, says):
    for function in (ops.matmul, jax.jit(ops.matmul)):
        with pytest.raises(ValueError, match=says):
            function(normal(*left), normal(*right))


def test_outer():
    check(ops.outer, torch.outer, normal(3), normal(2, seed=1))
    with pytest.raises(ValueError, match="one axis"):
        ops.outer(normal(2, 2), normal(2))


@pytest.mark.sampled
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("lower", [None, -1, 0, 1, 5])
@pytest.mark.parametrize("upper", [None, 0, 2])
def test_band_part(lower, upper, exclude):
    def oracle(x):
        i, j = np.indices(x.shape[-2:])
        band = ((lower in (None, -1)) | (i - j <= (lower or 0))) & (
            (upper is None) | (j - i <= (upper or 0))
        )
        return np.where(band ^ exclude, x, np.float32(0))

    check_numpy(lambda x: ops.band_part(x, lower, upper, exclude), oracle, normal(2, 3, 4))


def test_band_parts_there_are_not():
    with pytest.raises(ValueError, match="num_lower"):
        ops.band_part(normal(3, 3), -2, 0)
    with pytest.raises(ValueError, match="two axes"):
        ops.band_part(normal(3), 0, 0)


def test_pairs_as_complex():
    check(ops.as_interleaved_complex, lambda x: x.reshape(2, 3, 2), normal(2, 6))
    with pytest.raises(ValueError, match="pairs"):
        ops.as_interleaved_complex(normal(2, 3))


@pytest.mark.sampled
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("n", [None, 6, 7])
def test_irfft(n, norm):
    real, imaginary = normal(3, 4), normal(3, 4, seed=1)
    spectrum = real + 1j * imaginary
    want = np.fft.irfft(spectrum, n, norm=norm)
    np.testing.assert_allclose(ops.irfft(spectrum, n, normalization=norm), want, atol=1e-6)
    pairs = np.stack([real, imaginary], -1)
    got = ops.irfft(pairs, n, normalization=norm, input_is_complex=True)
    np.testing.assert_allclose(got, want, atol=1e-6)
    check_numpy(
        lambda x: ops.irfft(x, n, 0, norm),
        lambda x: np.fft.irfft(x, n, 0, norm),
        real,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_irfft_of_16_bit_floats(dtype):
    real, imaginary = (normal(3, 4, seed=seed).astype(dtype) for seed in (0, 1))
    got = ops.irfft(jnp.asarray(real))
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got.astype(jnp.float32), np.fft.irfft(real.astype(np.float32)), atol=0.01
    )
    pairs = jnp.stack([jnp.asarray(real), jnp.asarray(imaginary)], -1)
    got = ops.irfft(pairs, input_is_complex=True).astype(jnp.float32)
    spectrum = real.astype(np.float32) + 1j * imaginary.astype(np.float32)
    np.testing.assert_allclose(got, np.fft.irfft(spectrum), atol=0.01)
