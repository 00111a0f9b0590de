"""Ops of one operand and activations against torch."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, TensorValue, Weight, ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import recorded, torch

X = np.linspace(-4, 4, 33, dtype=np.float32)
SAME = ["abs", "exp", "sin", "cos", "tanh", "erf", "floor", "ceil", "trunc", "relu", "sigmoid"]


@pytest.mark.parametrize("name", SAME)
def test_on_all_numbers(name):
    check(getattr(ops, name), getattr(torch, name), X + 0.01, atol=2e-6)


@pytest.mark.parametrize("name", ["log", "log1p", "sqrt", "rsqrt"])
def test_on_positive_numbers(name):
    check(getattr(ops, name), getattr(torch, name), np.abs(X) + 0.1)


@pytest.mark.parametrize("name", ["acos", "atanh"])
def test_between_minus_one_and_one(name):
    check(getattr(ops, name), getattr(torch, name), X / 5)


def test_the_rest():
    check(ops.negate, torch.neg, X)
    check(ops.silu, torch.nn.functional.silu, X)
    halves = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.6])
    check_numpy(ops.round, np.round, halves, grad=False)
    check_numpy(ops.round, np.round, normal(5))
    odd = np.float32([np.inf, -np.inf, np.nan, 1])
    check_numpy(ops.is_inf, np.isinf, odd)
    check_numpy(ops.is_nan, np.isnan, odd)
    check_numpy(ops.is_nan, np.isnan, np.int32([1, 2]))
    check_numpy(ops.logical_not, np.logical_not, np.array([True, False]))
    check_numpy(ops.abs, np.abs, np.int32([-3, 2]))
    check_numpy(ops.relu, lambda x: np.maximum(x, 0), np.int32([-3, 2]))


def test_gelu():
    F = torch.nn.functional
    check(ops.gelu, F.gelu, X)
    check(lambda x: ops.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), X)
    check(lambda x: ops.gelu(x, approximate="quick"), lambda x: x * torch.sigmoid(1.702 * x), X)
    with pytest.raises(ValueError, match="'fast'"):
        ops.gelu(X, "fast")


@pytest.mark.parametrize("name", ["relu", "silu", "sigmoid", "tanh", "gelu"])
def test_activations_of_a_weight(name):
    w = Weight("w", "float32", X.shape, DeviceRef.CPU())
    w.value = jnp.asarray(X)
    got = getattr(ops, name)(w)
    assert isinstance(got, TensorValue)
    np.testing.assert_array_equal(got, getattr(ops, name)(X))


@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid"])
def test_16_bit_activations_are_rounded_once(name):
    x = normal(4096).astype(ml_dtypes.bfloat16)
    F = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "sigmoid": torch.sigmoid,
    }
    exact = recorded(lambda: F[name](torch.tensor(x.astype(np.float64))).numpy())
    got = getattr(ops, name)(x)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, exact.astype(ml_dtypes.bfloat16))


def test_cast():
    check_numpy(lambda x: ops.cast(x, DType.int32), lambda x: np.trunc(x).astype(np.int32), X)
    check_numpy(lambda x: ops.cast(x, DType.bool), lambda x: x != 0, X)
    check(lambda x: ops.cast(ops.cast(x, "float16"), "float32"), lambda x: x.half().float(), X)
    assert ops.cast(X, DType.int64).dtype == np.int32  # without jax_enable_x64


def test_floats_only():
    for name in ("exp", "sqrt", "tanh", "floor", "sigmoid", "gelu", "silu", "round"):
        with pytest.raises(ValueError, match=f"{name} takes a tensor of floats, not of int32"):
            getattr(ops, name)(np.int32([1, 2]))
    with pytest.raises(ValueError, match="of booleans, not of float32"):
        ops.logical_not(X)
