"""top_k, bottom_k and argsort against torch and NumPy."""

import numpy as np
import pytest

from maxjax.graph import ops
from tests.graph.ops.oracle import check, check_numpy, normal

X = normal(3, 5, 4)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_top_and_bottom(axis):
    check(lambda x: ops.top_k(x, 2, axis), lambda x: tuple(x.topk(2, axis)), X)
    check(lambda x: ops.bottom_k(x, 2, axis), lambda x: tuple(x.topk(2, axis, largest=False)), X)


def test_the_first_of_equals_comes_first():
    x = np.float32([[3, 1, 3, 2], [0, 5, 4, 5]])
    values, indices = ops.top_k(x, 2)
    np.testing.assert_array_equal(values, [[3, 3], [5, 5]])
    np.testing.assert_array_equal(indices, [[0, 2], [1, 3]])
    np.testing.assert_array_equal(ops.bottom_k(x, 2)[1], [[1, 3], [0, 2]])


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_of_integers(dtype):
    x = np.array([7, 0, 255 if dtype == np.uint8 else -(2**31), 3], dtype)
    check_numpy(lambda x: ops.bottom_k(x, 2)[0], lambda x: np.sort(x)[:2], x)
    check_numpy(lambda x: ops.top_k(x, 2)[0], lambda x: np.sort(x)[::-1][:2], x)


def test_argsort():
    x = normal(9)
    check_numpy(ops.argsort, np.argsort, x)
    check_numpy(lambda x: ops.argsort(x, ascending=False), lambda x: np.argsort(-x), x)
    np.testing.assert_array_equal(ops.argsort(np.float32([3, 1, 2, 1])), [1, 3, 2, 0])
    np.testing.assert_array_equal(ops.argsort(np.float32([3, 1, 2, 1]), False), [0, 2, 1, 3])


def test_what_does_not_go():
    for op in (ops.top_k, ops.bottom_k):
        with pytest.raises(ValueError, match="9 elements of axis 2, which is 4 long"):
            op(X, 9)
        with pytest.raises(ValueError, match="-1 elements"):
            op(X, -1)
        with pytest.raises(ValueError, match="axis 3"):
            op(X, 1, 3)
    with pytest.raises(ValueError, match=r"one axis, not of shape \(3, 5, 4\)"):
        ops.argsort(X)
