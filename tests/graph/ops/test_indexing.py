"""gather, scatter and their kin against torch and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import TensorValue, ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import torch

X = normal(3, 4)
SPOTS = np.array([[0, 2], [3, 1]])
REDUCTIONS = {
    "scatter_add": "sum",
    "scatter_mul": "prod",
    "scatter_max": "amax",
    "scatter_min": "amin",
}


@pytest.mark.sampled
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("places", [np.array([[2, 0], [1, -1]]), np.array(1), np.zeros((0,), int)])
def test_gather(places, axis):
    check_numpy(lambda x: ops.gather(x, places, axis), lambda x: np.take(x, places, axis), X)
    check(
        lambda x: ops.gather(x, np.array([2, 0, 2]), axis),
        lambda x: x.index_select(axis, torch.tensor([2, 0, 2])),
        X,
    )


@pytest.mark.parametrize("width", [1, 2, 3])
def test_gather_nd(width):
    x, places = normal(3, 4, 5), np.random.default_rng(0).integers(0, 3, (2, 6, width))
    check(
        lambda x: ops.gather_nd(x, places), lambda x: x[tuple(torch.tensor(places).unbind(-1))], x
    )


@pytest.mark.parametrize("batch_dims", [1, 2])
def test_gather_nd_in_batches(batch_dims):
    x = normal(2, 3, 4, 5)
    places = np.random.default_rng(0).integers(-4, 4, (*x.shape[:batch_dims], 6, 1))
    places = np.clip(places, -x.shape[batch_dims], x.shape[batch_dims] - 1)

    def oracle(x):
        out = np.empty((*places.shape[:-1], *x.shape[batch_dims + 1 :]), x.dtype)
        for at in np.ndindex(*places.shape[:-1]):
            out[at] = x[at[:batch_dims]][places[at][0]]
        return out

    check_numpy(lambda x: ops.gather_nd(x, places, batch_dims), oracle, x)


def test_outside_reads_nan_and_writes_nothing():
    assert np.isnan(ops.gather(X, np.array([9]), 0)).all()
    assert np.isnan(ops.gather_nd(X, np.array([[9]]))).all()
    got = ops.scatter(X, np.float32([[1]]), np.array([[9]]), axis=0)
    np.testing.assert_array_equal(got, X)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter(axis):
    places = np.array([[0, 2], [1, 0]]) if axis == 0 else SPOTS
    check(
        lambda x, u: ops.scatter(x, u, places, axis),
        lambda x, u: x.scatter(axis, torch.tensor(places), u),
        X,
        normal(2, 2, seed=1),
    )


@pytest.mark.parametrize("name", REDUCTIONS)
def test_scatter_with_what_is_there(name):
    places = np.array([[0, 0, 3], [1, 1, 1]])
    check(
        lambda x, u: getattr(ops, name)(x, u, places),
        lambda x, u: x.scatter_reduce(-1, torch.tensor(places), u, REDUCTIONS[name]),
        X,
        normal(2, 3, seed=1),
    )


@pytest.mark.parametrize("zeros", [1, 2])
def test_gradients_of_a_product_with_zeros(zeros):
    updates = normal(2, 3, seed=1)
    updates[:, :zeros] = 0
    places = np.array([[0, 0, 3], [1, 1, 1]])
    check(
        lambda x, u: ops.scatter_mul(x, u, places),
        lambda x, u: x.scatter_reduce(-1, torch.tensor(places), u, "prod"),
        X,
        updates,
    )


def test_a_product_outside_writes_nothing():
    places = np.array([[7, 7]])
    slope = jax.grad(lambda u: ops.scatter_mul(X[:1], u, places).sum())(U)
    np.testing.assert_array_equal(slope, [[0, 0]])


def test_scatter_counts_from_the_end():
    got = ops.scatter(np.zeros(4, np.float32), np.float32([5]), np.array([-1]))
    np.testing.assert_array_equal(got, [0, 0, 0, 5])


_APPLY = {
    "scatter_nd": lambda old, new: new, "scatter_nd_add": np.add, "scatter_nd_mul": np.multiply,
    "scatter_nd_max": np.maximum, "scatter_nd_min": np.minimum,
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", _APPLY)
@pytest.mark.parametrize("width", [1, 2])
def test_scatter_nd(name, width):
    places = (
        np.array([[2, 3], [0, 1]])[:, :width]
        if name == "scatter_nd"
        else np.array([[2, 3], [2, 3]])[:, :width]
    )
    updates = normal(2, *X.shape[width:], seed=1)

    def oracle(x, u):
        out = x.copy()
        for place, update in zip(places, u, strict=True):
            out[tuple(place)] = _APPLY[name](out[tuple(place)], update)
        return out

    check_numpy(lambda x, u: getattr(ops, name)(x, u, places), oracle, X, updates)


def test_gradients_of_scatter_nd():
    places = np.array([[2, 3], [2, 3], [0, 1]])
    check(
        lambda x, u: ops.scatter_nd_add(x, u, places),
        lambda x, u: x.index_put(tuple(torch.tensor(places).unbind(-1)), u, accumulate=True),
        X,
        normal(3, seed=1),
    )


def test_masked_scatter():
    mask = X > 0
    check(
        lambda x, u: ops.masked_scatter(x, mask, u, "n"),
        lambda x, u: x.masked_scatter(torch.tensor(mask), u),
        X,
        normal(3, 4, seed=1),
    )
    row = mask[:1]
    check(
        lambda x, u: ops.masked_scatter(x, row, u, "n"),
        lambda x, u: x.masked_scatter(torch.tensor(row), u),
        X,
        normal(12, seed=1),
    )


def test_nonzero():
    x = np.array([[0, 2, 0], [3, 0, 4]])
    want = np.argwhere(x)
    np.testing.assert_array_equal(ops.nonzero(x, "n"), want)
    assert isinstance(ops.nonzero(TensorValue(jnp.asarray(x)), "n"), TensorValue)
    got = jax.jit(lambda x: ops.nonzero(x, 4))(x)
    np.testing.assert_array_equal(got, [*want.tolist(), [-1, -1]])
    with pytest.raises(ValueError, match="a number as out_dim"):
        jax.jit(lambda x: ops.nonzero(x, "n"))(x)


U = np.float32([[5, 7]])
ONE = np.array([[0, 1]])


@pytest.mark.parametrize(
    ("op", "error", "says"),
    [
        (lambda: ops.gather(X, X, 0), ValueError, "integer dtype, not float32"),
        (lambda: ops.gather(X, ONE, 2), IndexError, "axis 2"),
        (lambda: ops.gather_nd(X, np.array([[1, 1, 1]])), ValueError, r"\(1, 3\)"),
        (lambda: ops.gather_nd(X, np.zeros((2, 1), int), 1), ValueError, "must be equal"),
        (lambda: ops.gather_nd(X, np.array(1)), ValueError, r"\(\)"),
        (lambda: ops.gather_nd(X, np.zeros((2, 0), int)), ValueError, r"\(2, 0\) do not fit"),
        (lambda: ops.scatter_nd(X, U, np.zeros((2, 0), int)), ValueError, r"indices \(2, 0\)"),
        (
            lambda: ops.scatter_add(X > 0, U > 0, ONE),
            ValueError,
            "scatter_add takes a tensor of num",
        ),
        (lambda: ops.gather_nd(X, np.zeros((2, 1), int), -1), ValueError, "must not be negative"),
        (lambda: ops.scatter(X, U.astype(np.float16), ONE), ValueError, "float16.*float32"),
        (lambda: ops.scatter(X, U, U), ValueError, "integer dtype"),
        (lambda: ops.scatter(X, U, ONE[:, :1]), ValueError, r"\(1, 2\) and indices \(1, 1\)"),
        (lambda: ops.scatter(X, U[0], ONE[0]), ValueError, r"as many axes as \(3, 4\)"),
        (lambda: ops.scatter(X, U, ONE, 2), ValueError, "axis 2"),
        (lambda: ops.scatter_nd(X, U, ONE), ValueError, r"must have shape \(1,\)"),
        (lambda: ops.scatter_nd(X, U.astype(int), ONE), ValueError, "cast one"),
        (lambda: ops.masked_scatter(X, ONE, U), ValueError, "booleans"),
        (lambda: ops.masked_scatter(X, X > 0, ONE), ValueError, "cast one"),
    ],
)
def test_what_does_not_go(op, error, says):
    with pytest.raises(error, match=says):
        op()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_numbers_of_rows_do_not_wrap_in_narrow_types(dtype):
    indices = np.zeros((300, 1), dtype)
    found = ops.scatter(np.zeros((300, 4), np.float32), np.ones((300, 1), np.float32), indices)
    np.testing.assert_array_equal(np.asarray(found)[:, 0], np.ones(300))
    values = np.arange(600.0, dtype=np.float32).reshape(300, 2)
    found = ops.gather_nd(values, np.ones((300, 1), dtype), batch_dims=1)
    np.testing.assert_array_equal(found, values[:, 1])


def test_no_updates_are_enough_for_a_mask_of_nothing():
    x = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    mask = np.zeros((3, 2), bool)
    np.testing.assert_array_equal(ops.masked_scatter(x, mask, np.zeros((0, 2), np.float32)), x)
