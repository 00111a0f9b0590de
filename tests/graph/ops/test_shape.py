"""Ops that change shapes against torch and NumPy, and shapes that do not go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import Dim, Shape, TensorValue, ops
from tests.graph.ops.oracle import check, normal
from tests.oracles.recorded import torch

X = normal(2, 3)
CUBE = normal(2, 3, 4)


@pytest.mark.parametrize(
    ("op", "oracle"),
    [
        (lambda x: ops.reshape(x, (4, -1)), lambda x: x.reshape(4, -1)),
        (lambda x: ops.reshape(x, [Dim(6), 4]), lambda x: x.reshape(6, 4)),
        (lambda x: ops.reshape(x, Shape([4, 6])), lambda x: x.reshape(4, 6)),
        (lambda x: ops.permute(x, [2, 0, -2]), lambda x: x.permute(2, 0, 1)),
        (lambda x: ops.transpose(x, 0, -1), lambda x: x.transpose(0, -1)),
        (lambda x: ops.unsqueeze(x, -1), lambda x: x.unsqueeze(-1)),
        (lambda x: ops.unsqueeze(x, 1), lambda x: x.unsqueeze(1)),
        (lambda x: ops.squeeze(x[:, :1], 1), lambda x: x[:, :1].squeeze(1)),
        (lambda x: ops.broadcast_to(x, (5, 2, 3, 4)), lambda x: x.expand(5, 2, 3, 4)),
        (lambda x: ops.broadcast_to(x[:, :1], [2, Dim(3), 4]), lambda x: x[:, :1].expand(2, 3, 4)),
        (lambda x: ops.flatten(x), torch.flatten),
        (lambda x: ops.flatten(x, 1), lambda x: x.flatten(1)),
        (lambda x: ops.flatten(x, 0, -2), lambda x: x.flatten(0, 1)),
        (lambda x: ops.rebind(x, ["a", 3, 4]), lambda x: x),
    ],
)
def test_against_torch(op, oracle):
    check(op, oracle, CUBE)


@pytest.mark.parametrize(
    ("op", "error", "says"),
    [
        (lambda x: ops.reshape(x, (-1, -1)), ValueError, "at most one"),
        (lambda x: ops.reshape(x, (4, 2)), ValueError, r"\(2, 3\).*\(4, 2\)"),
        (lambda x: ops.reshape(x, (4, -1)), ValueError, r"\(2, 3\)"),
        (lambda x: ops.permute(x, [0, 0]), ValueError, "twice"),
        (lambda x: ops.permute(x, [0]), ValueError, "1 axes are given"),
        (lambda x: ops.permute(x, [0, 5]), IndexError, "axis 5"),
        (lambda x: ops.transpose(x, 0, 5), IndexError, "axis 5"),
        (lambda x: ops.unsqueeze(x, 3), ValueError, "axis 3"),
        (lambda x: ops.squeeze(x, 0), ValueError, "2 long"),
        (lambda x: ops.squeeze(x, 5), IndexError, "axis 5"),
        (lambda x: ops.broadcast_to(x, (2, 4)), ValueError, r"\(2, 3\).*\(2, 4\)"),
        (lambda x: ops.broadcast_to(x, (3,)), ValueError, r"\(2, 3\)"),
        (lambda x: ops.broadcast_to(x, (4, -1, 3)), ValueError, r"\(2, 3\)"),
        (lambda x: ops.rebind(x, (2, 4), "hello"), ValueError, "hello"),
        (lambda x: ops.rebind(x, (2, 3, 1)), ValueError, "shape"),
        (lambda x: ops.rebind(x, ("a", 4)), ValueError, "shape"),
        (lambda x: ops.flatten(x, 1, 5), IndexError, "axis 5"),
        (lambda x: ops.flatten(x, 1, 0), ValueError, "comes after"),
        (lambda x: ops.squeeze(x, None), TypeError, "integer"),
    ],
)
def test_what_does_not_go(op, error, says):
    for function in (op, jax.jit(op)):
        with pytest.raises(error, match=says):
            function(jnp.asarray(X))


def test_shape_to_tensor():
    got = ops.shape_to_tensor(TensorValue(jnp.asarray(X)).shape)
    assert isinstance(got, TensorValue)
    np.testing.assert_array_equal(got, [2, 3])
    np.testing.assert_array_equal(ops.shape_to_tensor([2, Dim(3)]), [2, 3])
    assert ops.shape_to_tensor([]).shape == [0]


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (lambda x: ops.reshape(x, np.array([6, 4])), (6, 4)),
        (lambda x: ops.permute(x, np.array([2, 0, 1])), (4, 2, 3)),
        (lambda x: ops.broadcast_to(x, np.array([5, 2, 3, 4])), (5, 2, 3, 4)),
        (lambda x: ops.rebind(x, shape=np.array([2, 3, 4])), (2, 3, 4)),
        (lambda x: ops.pad(x, np.array([1, 0, 0, 0, 0, 2])), (3, 3, 6)),
        (lambda x: ops.tile(x, np.array([1, 2, 1])), (2, 6, 4)),
        (lambda x: ops.split(x, np.array([1, 2]), axis=1)[1], (2, 2, 4)),
        (lambda x: ops.resize_linear(x, np.array([4, 3, 4])), (4, 3, 4)),
        (
            lambda x: ops.conv2d(x[None], CUBE[None, :, :2].mT, stride=np.array([1, 2])),
            (1, 2, 1, 2),
        ),
        (
            lambda x: ops.max_pool2d(x[None], np.array([2, 2]), padding=np.array([1, 1])),
            (1, 3, 4, 4),
        ),
        (lambda x: ops.chunk(x, Dim(2))[0], (1, 3, 4)),
        (lambda x: ops.band_part(x, Dim(1), Dim(0)), (2, 3, 4)),
    ],
)
def test_sizes_in_arrays_and_dims(op, shape):
    for one in (op, jax.jit(op)):
        assert one(jnp.asarray(CUBE)).shape == shape
