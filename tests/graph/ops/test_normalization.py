"""The norms as ops against torch."""

import ml_dtypes
import numpy as np
import pytest

from maxjax.graph import ops
from tests.graph.ops.oracle import check, normal
from tests.oracles.recorded import torch

F = torch.nn.functional
X, W, B = normal(2, 5, 6), normal(6, seed=1), normal(6, seed=2)
LOOSE = {"rtol": 1e-4, "atol": 1e-5}


def test_layer_norm():
    check(
        lambda x, w, b: ops.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-5),
        X, W, B, **LOOSE,
    )  # fmt: skip


@pytest.mark.parametrize("before", [False, True])
def test_rms_norm(before):
    check(
        lambda x, w: ops.rms_norm(x, w, 1e-6, 1.0, before),
        lambda x, w: F.rms_norm(x, (6,), w + 1, 1e-6),
        X, W, **LOOSE,
    )  # fmt: skip
    check(
        lambda x, w: ops.rms_norm(x, w, epsilon=0.1),
        lambda x, w: F.rms_norm(x, (6,), w, 0.1),
        X,
        W,
        **LOOSE,
    )


def test_where_rms_norm_rounds():
    x, w = (a.astype(ml_dtypes.bfloat16) for a in (X, W))
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    late = (y * w.astype(np.float64)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ops.rms_norm(x, w, 1e-6, multiply_before_cast=True), late)
    early = (y.astype(ml_dtypes.bfloat16).astype(np.float64) * w.astype(np.float64)).astype(
        ml_dtypes.bfloat16
    )
    np.testing.assert_array_equal(ops.rms_norm(x, w, 1e-6), early)
    assert (early != late).any()


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(groups):
    check(
        lambda x, w, b: ops.group_norm(x, w, b, groups, 1e-5),
        lambda x, w, b: F.group_norm(x, groups, w, b, 1e-5),
        normal(2, 6, 3, 4), W, B, **LOOSE,
    )  # fmt: skip


def test_the_result_has_the_dtype_of_the_input():
    half = X.astype(np.float16)
    assert ops.layer_norm(half, W, B, 1e-5).dtype == np.float16
    assert ops.rms_norm(half, W, 1e-5).dtype == np.float16
    assert ops.group_norm(np.swapaxes(half, 1, 2), W, B, 2, 1e-5).dtype == np.float16


def test_weights_that_do_not_fit():
    with pytest.raises(ValueError, match=r"gamma has shape \(5,\).*\(2, 5, 6\)"):
        ops.layer_norm(X, W[:5], B, 1e-5)
    with pytest.raises(ValueError, match="beta"):
        ops.layer_norm(X, W, B[:5], 1e-5)
    with pytest.raises(ValueError, match="the weight has shape"):
        ops.rms_norm(X, W[:5], 1e-5)
    with pytest.raises(ValueError, match="4 groups"):
        ops.group_norm(normal(2, 6, 3), W, B, 4, 1e-5)
    with pytest.raises(ValueError, match="5 channels|6 channels"):
        ops.group_norm(normal(2, 6, 3), W[:5], B, 2, 1e-5)
    with pytest.raises(ValueError, match="floats"):
        ops.rms_norm(np.ones((2, 6), np.int32), W, 1e-5)
