"""MAX's products of float8 numbers, against NumPy in float64 with the numbers that were quantised."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import TensorValue
from maxjax.nn import kernels
from maxjax.nn.quant_config import InputScaleSpec, ScaleGranularity, ScaleOrigin, WeightScaleSpec

FLOAT8 = ml_dtypes.float8_e4m3fn


def specs(inputs, weights, block=None):
    dynamic = ScaleOrigin.DYNAMIC
    of_inputs = None if block is None else (1, block[1])
    return (
        InputScaleSpec(ScaleGranularity(inputs), dynamic, DType.float32, block_size=of_inputs),
        WeightScaleSpec(ScaleGranularity(weights), DType.float32, block),
    )


ROWS, TENSOR, BLOCKS = (
    specs("colwise", "rowwise"), specs("tensor", "tensor"), specs("block", "block", (3, 4)),
)  # fmt: skip


def given(seed=0, m=5, n=7, k=8):
    rng = np.random.default_rng(seed)
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return 10 * make(m, k), make(n, k)


@pytest.mark.parametrize("spec, group, columns", [(ROWS, 8, 5), (BLOCKS, 4, 8)])
def test_rows_and_groups_are_quantised_by_their_largest(spec, group, columns):
    x, _ = given()
    y, scales = kernels.quantize_dynamic_scaled_float8(x, *spec, scales_type=DType.float32)
    assert y.dtype == FLOAT8 and scales.shape == (8 // group, columns)
    largest = np.abs(x.reshape(5, -1, group)).max(-1)
    np.testing.assert_allclose(scales[:, :5].T, largest / 448, rtol=1e-6)
    assert not scales[:, 5:].any()
    again = np.asarray(y, np.float64) * np.repeat(np.asarray(scales)[:, :5].T, group, axis=1)
    np.testing.assert_allclose(again, x, rtol=2**-4, atol=largest.max() * 2**-9)


def test_bounds_zeros_and_powers_of_two():
    x = np.array([[3000.0, 1.0], [0.0, 0.0]], np.float32)
    y, scales = kernels.quantize_dynamic_scaled_float8(x, *ROWS, scales_type=DType.float32)
    np.testing.assert_allclose(scales, [[1200 / 448, 0]])
    assert y[0, 0] == 448 and not y[1].any()  # clipped; without a NaN
    powers = kernels.quantize_dynamic_scaled_float8(
        x, *ROWS, scales_type=DType.float8_e8m0fnu, amax_floor=1.0
    )
    assert np.asarray(powers[1], np.float32).tolist() == [[8.0, 2.0**-8]]
    assert np.asarray(powers[0], np.float32)[0].tolist() == [384.0, 0.125]


def test_scales_are_exact_powers_of_two():
    powers = np.ldexp(np.float32(1), np.arange(-32, 100))[:, None]
    for x, least in ((powers, powers), (np.nextafter(powers, np.float32(np.inf)), 2 * powers)):
        _, scales = kernels.quantize_dynamic_scaled_float8(
            448 * jnp.asarray(x), *ROWS, scales_type=DType.float8_e8m0fnu
        )
        np.testing.assert_array_equal(scales[0].astype(jnp.float32), least[:, 0])


@pytest.mark.parametrize("spec", [ROWS, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("kind", [jnp.asarray, TensorValue])
def test_products_are_those_of_the_numbers(spec, kind):
    x, w = given()
    a, a_scales = kernels.quantize_dynamic_scaled_float8(x, *spec, scales_type=DType.float32)
    b = (w * 100).astype(FLOAT8)
    if spec is ROWS:
        b_scales = np.random.default_rng(1).random((7, 1)).astype(np.float32)
        by_column, by_row = a_scales.T[:, [0] * 8], b_scales[:, [0] * 8]
    else:
        b_scales = np.random.default_rng(1).random((3, 2)).astype(np.float32)
        by_column = np.repeat(np.asarray(a_scales).T[:5], 4, axis=1)
        by_row = np.repeat(np.repeat(b_scales, 3, axis=0)[:7], 4, axis=1)
    wanted = (np.asarray(a, np.float64) * by_column) @ (b.astype(np.float64) * by_row).T

    def run(a, b, a_scales, b_scales):
        operands = map(kind, (a, b, a_scales, b_scales))
        y = kernels.dynamic_scaled_matmul(*operands, *spec, out_type=DType.float32)
        assert isinstance(y, TensorValue) == (kind is TensorValue)
        return jnp.asarray(y)

    got = jax.jit(run)(a, b, a_scales, b_scales)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_one_scale_for_each_tensor():
    x, w = given()
    a = kernels.quantize_static_scaled_float8(x, np.float32(0.5))
    np.testing.assert_array_equal(a, (x / 0.5).astype(FLOAT8))
    np.testing.assert_array_equal(
        kernels.quantize_static_scaled_float8(x, np.ones(1, np.float32), False), x.astype(FLOAT8)
    )
    b = w.astype(FLOAT8)
    y = kernels.matmul_static_scaled_float8(a, b, np.float32(0.5), np.float32(3))
    wanted = 1.5 * np.asarray(a, np.float64) @ b.astype(np.float64).T
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=2**-8, atol=1e-3)
    ones = np.ones((1, 1), np.float32)
    same = kernels.dynamic_scaled_matmul(a, b, 0.5 * ones, 3 * ones, *TENSOR)
    np.testing.assert_array_equal(y, same)


def test_what_does_not_go_together():
    x, w = given()
    a, b, one = x.astype(FLOAT8), w.astype(FLOAT8), np.ones((1, 1), np.float32)
    quantise, multiply = kernels.quantize_dynamic_scaled_float8, kernels.dynamic_scaled_matmul
    for text, run in {
        "rank 2": lambda: quantise(x[0], *ROWS),
        "out_type must be": lambda: quantise(x, *ROWS, out_type=DType.float32),
        "do not divide": lambda: quantise(x, *ROWS, group_size_or_per_token=3),
        "blockwise": lambda: quantise(x, BLOCKS[0], ROWS[1]),
        "amax_floor needs": lambda: quantise(x, *ROWS, amax_floor=1.0),
        "second dimension": lambda: multiply(a, b[:, :4], one, one, *TENSOR),
        "granularity": lambda: multiply(a, b, one, one, ROWS[0], TENSOR[1]),
        "per-token": lambda: multiply(a, b, np.ones((1, 2), np.float32), one, *ROWS),
        "too few scales": lambda: multiply(a, b, np.ones((2, 8), np.float32), np.ones((1, 2), np.float32), *BLOCKS),
        "scalar": lambda: kernels.quantize_static_scaled_float8(x, np.ones(2, np.float32)),
        "K dimension": lambda: kernels.matmul_static_scaled_float8(a, b[:, :4], 1.0, 1.0),
        "expected weight dtype": lambda: kernels.matmul_static_scaled_float8(a, w, 1.0, 1.0),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=text):
            run()
    with pytest.raises(TypeError, match="must match"):
        multiply(a, w, one, one, *TENSOR)
