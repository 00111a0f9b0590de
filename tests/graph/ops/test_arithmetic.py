"""Ops of two operands against torch, and what may not meet."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxjax.graph import DeviceRef, TensorValue, Weight, ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import torch

A, B = normal(2, 3), np.abs(normal(2, 3, seed=1)) + 0.5
INTS = np.array([[-7, -2, 0], [3, 5, 9]], np.int32)
BITS = np.array([True, True, False, False]), np.array([True, False, True, False])


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize(
    "shapes", [((2, 3), (2, 3)), ((4, 2, 3), (3,)), ((2, 1), (1, 3)), ((2, 3), ())]
)
def test_arithmetic(name, shapes):
    a, b = normal(*shapes[0]), np.asarray(np.abs(normal(*shapes[1], seed=1)) + 0.5, np.float32)
    check(getattr(ops, name), getattr(torch, name), a, b)


def test_powers():
    check(ops.pow, torch.pow, B, A)
    check(lambda x: ops.pow(x, 2), lambda x: x**2, A)
    check(lambda x: ops.pow(x, 0.5), lambda x: x**0.5, B)
    check_numpy(lambda x: ops.pow(x, 3), lambda x: x**3, INTS)


def test_whole_division_and_remainder():
    for by in (2, -3):
        check_numpy(lambda x, d=by: ops.floor_div(x, d), lambda x, d=by: x // np.int32(d), INTS)
        check_numpy(lambda x, d=by: ops.mod(x, d), lambda x, d=by: x % np.int32(d), INTS)
    check_numpy(ops.floor_div, lambda a, b: a // b, A, B)
    check_numpy(ops.mod, lambda a, b: a % b, A, B)


def test_true_division_of_integers_is_a_float():
    check_numpy(lambda x: ops.div(x, 2), lambda x: (x / 2).astype(np.float64), INTS)


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("equal", np.equal),
        ("not_equal", np.not_equal),
        ("greater", np.greater),
        ("greater_equal", np.greater_equal),
    ],
)
def test_comparisons(name, oracle):
    check_numpy(
        getattr(ops, name), oracle, np.float32([1, 2, 3, np.nan]), np.float32([1, 3, 2, np.nan])
    )
    check_numpy(lambda x: getattr(ops, name)(x, 0), lambda x: oracle(x, 0), INTS)


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logic(name):
    check_numpy(getattr(ops, name), getattr(np, name), *BITS)
    with pytest.raises(ValueError, match=f"{name} takes a tensor of booleans, not of int32"):
        getattr(ops, name)(INTS, INTS)


def test_where():
    mask = np.array([[True, False, True]])
    check(
        lambda x, y: ops.where(mask, x, y), lambda x, y: torch.where(torch.tensor(mask), x, y), A, B
    )
    check(lambda x: ops.where(mask, x, 0), lambda x: torch.where(torch.tensor(mask), x, 0.0), A)
    check(lambda x: ops.where(x > 0, x, normal(4, 1, 1)),
          lambda x: torch.where(x > 0, x, torch.tensor(normal(4, 1, 1))), A)  # fmt: skip
    with pytest.raises(ValueError, match="condition, takes a tensor of booleans"):
        ops.where(INTS, A, A)
    with pytest.raises(ValueError, match="unsafe cast"):
        ops.where(INTS > 0, A, INTS)
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(2, 3\)"):
        ops.where(A[:, :2] > 0, A, 0.0)


def test_float_widths_meet_in_the_wider():
    half, brain = np.float16([1.5]), ml_dtypes.bfloat16(1.5) * np.ones(1, ml_dtypes.bfloat16)
    assert ops.add(half, A).dtype == np.float32
    with pytest.raises(ValueError, match="float16.*bfloat16"):
        ops.add(half, brain)
    assert ops.mul(brain, 2).dtype == ml_dtypes.bfloat16
    assert ops.mul(half, np.float64(0.5)).dtype == np.float16
    assert ops.add(np.int8([1]), INTS).dtype == np.int32


def test_arguments_by_name_are_those_by_position():
    brain, wide = TensorValue(np.ones(3, ml_dtypes.bfloat16)), np.float32([1, 2, 3])
    one, two = ops.sub(brain, wide), ops.sub(rhs=wide, lhs=brain)
    assert one.dtype == two.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(one, two)
    with pytest.raises(TypeError, match="'lhs'"):
        ops.sub(rhs=wide)


@pytest.mark.parametrize("name", ["add", "mul", "greater", "pow"])
def test_integers_and_floats_do_not_meet(name):
    with pytest.raises(ValueError, match="unsafe cast"):
        getattr(ops, name)(INTS, A)
    with pytest.raises(ValueError, match="unsafe cast"):
        getattr(ops, name)(INTS, 1.5)
    with pytest.raises(ValueError, match="300"):
        ops.add(INTS.astype(np.int8), 300)


def test_shapes_that_do_not_broadcast_are_named():
    for function in (ops.add, jax.jit(ops.add)):
        with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 2\)"):
            function(A, A[:, :2])
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        ops.add(A, normal(4, 2, 2))


def test_what_comes_out_is_what_went_in():
    w = Weight("w", "float32", (2, 3), DeviceRef.CPU())
    w.value = jnp.asarray(A)
    assert isinstance(ops.add(w, w), TensorValue)
    assert isinstance(ops.add(w, 1), TensorValue)
    assert isinstance(ops.add(w, TensorValue(jnp.asarray(B))), TensorValue)
    assert not isinstance(ops.add(w, jnp.asarray(B)), TensorValue)
    assert not isinstance(ops.add(A, 1), TensorValue)
    assert not isinstance(ops.add(1, 2), TensorValue)
    assert isinstance(ops.add(lhs=A, rhs=TensorValue(jnp.asarray(B))), TensorValue)
    np.testing.assert_array_equal(ops.mul(TensorValue(jnp.asarray(A)), w.shape[1]), A * 3)


def test_numbers_that_do_not_fit():
    for args in ((INTS.astype(np.int8), 300), (-200, INTS.astype(np.int8)), (INTS > 0, 2)):
        with pytest.raises(ValueError, match="unsafe cast: -?[0-9]+ does not fit in"):
            ops.add(*args)
    assert ops.add(INTS.astype(np.int8), 100).dtype == np.int8
    assert ops.equal(INTS > 0, 1).dtype == bool
    assert ops.mul(A, 1).dtype == np.float32


def test_what_integers_and_booleans_have_not_is_a_value_error():
    booleans = jnp.array([True, False])
    for op in (lambda: ops.sub(booleans, booleans), lambda: ops.negate(booleans)):
        with pytest.raises(ValueError, match="numbers, not of booleans"):
            op()
    with pytest.raises(ValueError, match="no power of -1"):
        ops.pow(jnp.array([1, 2]), -1)
