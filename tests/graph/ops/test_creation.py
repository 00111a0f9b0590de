"""Constants, ranges and windows against NumPy and torch; always TensorValues."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Dim, TensorValue, ops
from tests.foreign import Foreign
from tests.oracles.recorded import recorded, torch

CPU = DeviceRef.CPU()


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ((3, DType.int32, CPU), np.int32(3)),
        ((2.5, DType.bfloat16, CPU), np.float32(2.5)),
        ((True, DType.bool, CPU), np.bool_(True)),
        (([[1, 2], [3, 4]], DType.float32, CPU), np.float32([[1, 2], [3, 4]])),
        (((1.5,), DType.float16, CPU), np.float16([1.5])),
        (([], DType.float32, CPU), np.zeros(0, np.float32)),
        ((np.int8([1, 2]),), np.int8([1, 2])),
        ((np.int8([1, 2]), DType.int8), np.int8([1, 2])),
        ((np.float32(7), DType.int32, CPU), None),
        ((range(3), DType.int32, CPU), np.int32([0, 1, 2])),
        ((Dim(3), DType.int32, CPU), np.int32(3)),
        ((np.float64(7), "float32", CPU), np.float32(7)),
        ((1e10, DType.float16, CPU), np.float16(np.inf)),
    ],
)
def test_constant(args, want):
    if want is None:
        with pytest.raises(ValueError, match="unsafe cast"):
            ops.constant(*args)
        return
    got = ops.constant(*args)
    assert isinstance(got, TensorValue)
    assert len(args) == 1 or got.dtype == DType.of(args[1])
    np.testing.assert_array_equal(np.asarray(got).astype(want.dtype), want)


def test_constants_of_no_real_numbers():
    with pytest.raises(ValueError, match="unsafe cast.*complex"):
        ops.constant([1j], "float32", CPU)
    for value in ([None], ["1"], [1.0, None]):
        with pytest.raises(TypeError, match="takes numbers"):
            ops.constant(value, "float32", CPU)
    assert float(ops.constant([2**70, Dim(3)], "float32", CPU)[1]) == 3


def test_constant_of_another_library_in_bfloat16():
    theirs = Foreign(jnp.array([1.5, -2.0], jnp.bfloat16), dtype="torch.bfloat16")
    got = ops.constant(theirs, DType.bfloat16, CPU)
    assert got.dtype == DType.bfloat16
    assert np.asarray(got.value).tolist() == [1.5, -2.0]


def test_a_constant_is_a_copy():
    x = np.ones(64, np.float32)
    got = ops.constant(x)
    x[:] = 2
    assert float(got[0]) == 1


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ((3,), TypeError, "dtype and device"),
        ((3.5, DType.float32), TypeError, "dtype and device"),
        (([[1, 2], [3]], DType.float32, CPU), ValueError, "different lengths"),
        ((300, DType.uint8, CPU), ValueError, "300 does not fit in uint8"),
        ((1.5, DType.int32, CPU), ValueError, "unsafe cast"),
        (("x", DType.int32, CPU), TypeError, "not str"),
        ((np.ones(2, np.float32), DType.int32, CPU), ValueError, "is float32, not int32"),
    ],
)
def test_constants_there_are_not(args, error, says):
    with pytest.raises(error, match=says):
        ops.constant(*args)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ((0, 5, 1), "int32"),
        ((0, 5, 2), "int32"),
        ((5, -1, -2), "int32"),
        ((0, 1, 0.3), "float32"),
        ((0, 100_000, 1), "float32"),
        ((5, 0, 1), "int32"),
        ((-1.5, 2, 0.5), "float16"),
    ],
)
def test_range(numbers, dtype):
    got = ops.range(*numbers, dtype=dtype, device=CPU)
    assert isinstance(got, TensorValue)
    want = np.arange(*numbers).astype(dtype)
    np.testing.assert_array_equal(got, want)
    assert np.asarray(got).dtype == want.dtype


def test_range_of_dims_and_tensors():
    x = TensorValue(jnp.ones((2, 3)))
    np.testing.assert_array_equal(ops.range(0, x.shape[1], dtype="int32", device=CPU), [0, 1, 2])
    np.testing.assert_array_equal(ops.range(0, Dim(3), 1, dtype="int32", device=CPU), [0, 1, 2])
    end = jnp.array(4)
    got = ops.range(0, end, 1, out_dim="n", dtype="int32", device=CPU)
    np.testing.assert_array_equal(got, [0, 1, 2, 3])
    run = jax.jit(lambda s: ops.range(s, s + 6, 2, 3, dtype="int32", device=CPU).value)
    np.testing.assert_array_equal(run(5), [5, 7, 9])


def test_ranges_there_are_not():
    with pytest.raises(TypeError, match="dtype"):
        ops.range(0, 5, 1)
    with pytest.raises(ValueError, match="needs out_dim"):
        ops.range(0, jnp.array(4), dtype="int32", device=CPU)
    with pytest.raises(ValueError, match="has 3 numbers, not out_dim=2"):
        ops.range(0, 5, 2, 2, dtype="int32", device=CPU)
    with pytest.raises(ValueError, match="must not be 0"):
        ops.range(0, 5, 0, dtype="int32", device=CPU)
    with pytest.raises(ValueError, match="must be finite"):
        ops.range(0, np.inf, dtype="float32", device=CPU)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 400])
def test_hann_window(length, periodic):
    got = ops.hann_window(length, CPU, periodic)
    assert isinstance(got, TensorValue) and got.dtype == DType.float32
    expected = recorded(lambda: torch.hann_window(length, periodic=periodic).numpy())
    np.testing.assert_allclose(got, expected, atol=2e-7)


def test_windows_there_are_not():
    with pytest.raises(ValueError, match="-1"):
        ops.hann_window(-1, CPU)
    with pytest.raises(TypeError):
        ops.hann_window(2.5, CPU)
