"""Reductions, cumsum and softmax against torch; the axis stays with length 1."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import recorded, torch

X = normal(2, 3, 4)
INTS = np.array([[-3, -2, -2], [1, 5, 2]], np.int32)


@pytest.mark.sampled
@pytest.mark.parametrize("axis", [None, 0, 1, -1, -3])
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "argmax", "argmin"])
def test_reductions(name, axis):
    oracle = {"max": torch.amax, "min": torch.amin}.get(name) or getattr(torch, name)
    options = {} if axis is None else {"axis": axis}
    check(
        lambda x: getattr(ops, name)(x, **options),
        lambda x: oracle(x, dim=-1 if axis is None else axis, keepdim=True),
        X,
        grad=not name.startswith("arg"),
    )


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min"])
def test_integers_stay_what_they_are(name):
    oracle = getattr(np, name)
    check_numpy(getattr(ops, name), lambda x: oracle(x, -1, keepdims=True).astype(x.dtype), INTS)
    check_numpy(
        getattr(ops, name),
        lambda x: oracle(x, -1, keepdims=True).astype(x.dtype),
        INTS.astype(np.int8),
    )


def test_the_mean_of_integers_is_rounded_toward_zero():
    np.testing.assert_array_equal(ops.mean(INTS), [[-2], [2]])  # -2.5
    assert ops.mean(INTS).dtype == np.int32


def test_the_first_of_equals():
    x = np.float32([[1, 3, 3], [0, 0, 0]])
    np.testing.assert_array_equal(ops.argmax(x), [[1], [0]])
    np.testing.assert_array_equal(ops.argmin(x, axis=0), [[1, 1, 1]])


def test_two_arguments_are_met_element_by_element():
    check(ops.max, torch.maximum, X, normal(3, 1, seed=1))
    check(ops.min, torch.minimum, X, normal(4, seed=1))
    check_numpy(lambda x: ops.max(x, 1), lambda x: np.maximum(x, 1), INTS)
    check_numpy(lambda x: ops.min(0.0, x), lambda x: np.minimum(x, 0), X)
    with pytest.raises(ValueError, match="takes no axis"):
        ops.max(X, X, axis=0)
    with pytest.raises(ValueError, match="unsafe cast"):
        ops.min(X[0, :2, :3], INTS)


@pytest.mark.parametrize("axis", [0, -1])
def test_cumsum(axis):
    check(lambda x: ops.cumsum(x, axis), lambda x: x.cumsum(axis), X)
    check(
        lambda x: ops.cumsum(x, axis, reverse=True),
        lambda x: x.flip(axis).cumsum(axis).flip(axis),
        X,
    )
    check_numpy(
        lambda x: ops.cumsum(x, axis, exclusive=True), lambda x: x.cumsum(axis, x.dtype) - x, INTS
    )
    check_numpy(
        lambda x: ops.cumsum(x, axis, True, True),
        lambda x: np.flip(np.flip(x, axis).cumsum(axis, x.dtype), axis) - x,
        INTS,
    )


def test_an_exclusive_sum_does_not_see_what_follows():
    np.testing.assert_array_equal(
        ops.cumsum(np.float32([1, np.inf, 2]), exclusive=True), [0, 1, np.inf]
    )


@pytest.mark.parametrize("axis", [0, -1])
def test_softmax(axis):
    check(lambda x: ops.softmax(x, axis), lambda x: x.softmax(axis), X)
    check(lambda x: ops.logsoftmax(x, axis=axis), lambda x: x.log_softmax(axis), X)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "cumsum"])
def test_sums_of_narrow_floats_are_rounded_once(name, dtype):
    x = jnp.asarray(0.75 + np.arange(63)[None] % 3 / 4, dtype)
    exact = getattr(np, name)(np.asarray(x, np.float64), -1)
    want = exact.reshape(1, -1).astype(x.dtype)
    np.testing.assert_array_equal(getattr(ops, name)(x), want)
    if name == "mean":
        np.testing.assert_array_equal(TensorValue(x).mean().value, want)
        spread = np.var(np.asarray(x, np.float64), -1, keepdims=True).astype(x.dtype)
        np.testing.assert_array_equal(TensorValue(x).var().value, spread)


def test_softmax_of_16_bits_is_rounded_once():
    x = (4 * normal(64, 128)).astype(ml_dtypes.bfloat16)
    exact = recorded(lambda: torch.tensor(x.astype(np.float64)).softmax(-1).numpy())
    np.testing.assert_array_equal(ops.softmax(x), exact.astype(ml_dtypes.bfloat16))
    exact = recorded(lambda: torch.tensor(x.astype(np.float64)).log_softmax(-1).numpy())
    np.testing.assert_array_equal(ops.logsoftmax(x), exact.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    "name",
    ["sum", "mean", "prod", "max", "min", "argmax", "argmin", "cumsum", "softmax", "logsoftmax"],
)
def test_an_axis_there_is_not(name):
    for axis in (3, -4):
        with pytest.raises(ValueError, match=f"{name}: axis {axis} .* 3 axes"):
            getattr(ops, name)(X, axis=axis)


def test_dtypes_there_is_no_result_for():
    for name in ("sum", "mean", "prod", "cumsum"):
        with pytest.raises(ValueError, match="not of booleans"):
            getattr(ops, name)(INTS > 0)
    with pytest.raises(ValueError, match="floats, not of int32"):
        ops.softmax(INTS)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "uint32", "float8_e4m3fn"])
def test_extremes_along_a_named_size(dtype):
    kinds = [TensorType(dtype, ("n", 2), DeviceRef.CPU())]
    graph = Graph("extremes", lambda x: [ops.max(x, axis=0), ops.min(x, axis=0)], input_types=kinds)
    x = np.array([[-3, 0], [-5, 0]]).astype(jnp.dtype(dtype))
    got = InferenceSession().load(graph).execute(jnp.asarray(x))
    for one, want in zip(got, (x.max(0, keepdims=True), x.min(0, keepdims=True)), strict=True):
        np.testing.assert_array_equal(one.to_numpy(), want)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
def test_means_of_narrow_integers_do_not_wrap(dtype):
    x = np.full((2, 300), 100, dtype)
    found = ops.mean(x, axis=1)
    assert found.dtype == dtype and (np.asarray(found) == 100).all()


def test_mean_of_integers_whose_sum_does_not_fit():
    high, low = 2**31 - 1, -(2**31)
    for given, mean in (
        ([high, high], high),
        ([low, low, low + 2], low + 1),
        ([high, low], 0),
        ([-7, 2], -2),
        ([7, -2], 2),
    ):
        assert ops.mean(jnp.array(given, jnp.int32)).tolist() == [mean]
    assert ops.mean(jnp.full((2, 70000), -(2**15), jnp.int16)).tolist() == [[-(2**15)]] * 2
    assert ops.mean(jnp.full((3, 2), 2**32 - 1, jnp.uint32), axis=0).tolist() == [[2**32 - 1] * 2]
    with pytest.raises(ValueError, match="which is empty"):
        ops.mean(jnp.zeros((2, 0), int))
