"""Pooling and fold against torch, which has channels first: the oracles permute."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import Dim, ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import recorded, torch

F = torch.nn.functional
X = normal(2, 7, 6, 3)


def last(function):
    return lambda x: function(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@pytest.mark.sampled
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), ((2, 3), (1, 0)), (2, 1), (4, 1)])
def test_pooling(stride, padding, ceil_mode):
    options = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    check(
        lambda x: ops.max_pool2d(x, (3, 2), **options),
        last(lambda x: F.max_pool2d(x, (3, 2), **options)),
        X,
    )
    for count in (True, False):
        if count and ceil_mode:
            continue  # as in MAX, see below
        check(
            lambda x, c=count: ops.avg_pool2d(x, (3, Dim(2)), count_boundary=c, **options),
            last(lambda x, c=count: F.avg_pool2d(x, (3, 2), count_include_pad=c, **options)),
            X,
        )


def test_the_mean_of_an_incomplete_window():
    x = np.arange(30, dtype=np.float32).reshape(1, 5, 6, 1)
    options = {"stride": 2, "padding": 1, "ceil_mode": True}
    got = ops.avg_pool2d(x, (3, 3), **options)[0, :, :, 0] * 9
    # MAX 26.7's: an incomplete window is divided by 9 too; torch divides the last column by 6.
    np.testing.assert_allclose(
        got, [[14, 30, 42, 16], [75, 126, 144, 51], [86, 138, 150, 52]], rtol=1e-6
    )
    got = ops.avg_pool2d(x, (3, 3), count_boundary=False, **options)[0, 0, :, 0]
    np.testing.assert_allclose(got, [3.5, 5, 7, 8], rtol=1e-6)


def test_dilation():
    check(
        lambda x: ops.max_pool2d(x, (2, 2), dilation=(2, 3), stride=2),
        last(lambda x: F.max_pool2d(x, 2, 2, dilation=(2, 3))),
        X,
    )

    def oracle(x):
        return np.mean([x[:, i : 5 + i, j : 4 + j] for i in (0, 2) for j in (0, 2)], axis=0)

    check_numpy(lambda x: ops.avg_pool2d(x, (2, 2), dilation=2), oracle, X)


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])  # the latter has no infinity
def test_the_padding_is_never_the_maximum(dtype):
    x = jnp.arange(-8, 8).reshape(1, 4, 4, 1).astype(dtype)
    got = ops.max_pool2d(x, (2, 2), stride=2, padding=1).astype(jnp.int32)
    np.testing.assert_array_equal(got[0, :, :, 0], [[-8, -6, -5], [0, 2, 3], [4, 6, 7]])


def test_of_booleans():
    x = jnp.arange(16).reshape(1, 4, 4, 1) > 12
    got = ops.max_pool2d(x, (2, 2), stride=2, padding=1)
    np.testing.assert_array_equal(got[0, :, :, 0], [[0, 0, 0], [0, 0, 0], [0, 1, 1]])


def test_a_window_with_nan_gives_nan():
    x = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    x[0, 1, 1], x[0, 2, 2] = np.nan, np.nan
    got = ops.max_pool2d(x, (2, 2), stride=2)[0, :, :, 0]
    np.testing.assert_array_equal(got, [[np.nan, 7], [13, np.nan]])


@pytest.mark.parametrize(
    ("size", "kernel", "options"),
    [((3, 3), (2, 2), {}), ((5, 6), (3, 2), {"stride": (2, 1)}),
     ((4, 5), (2, 3), {"padding": (1, 2), "dilation": (2, 1)})],
)  # fmt: skip
def test_fold(size, kernel, options):
    windows = recorded(lambda: list(F.unfold(torch.zeros(1, 2, *size), kernel, **options).shape))
    check(
        lambda x: ops.fold(x, size, kernel, **options),
        lambda x: F.fold(x, size, kernel, **options),
        normal(2, *windows[1:]),
    )


def test_what_does_not_go():
    for op in (ops.avg_pool2d, ops.max_pool2d):
        with pytest.raises(ValueError, match=r"\[N, H, W, C\]"):
            op(X[0], (2, 2))
        with pytest.raises(ValueError, match="larger than the image"):
            op(X, (9, 9))
        with pytest.raises(ValueError, match="stride takes 2 positive numbers"):
            op(X, (2, 2), stride=0)
        with pytest.raises(ValueError, match="kernel_size takes 2 positive numbers"):
            op(X, (0, 2))
    with pytest.raises(ValueError, match="fold takes a tensor of numbers"):
        ops.fold(np.ones((1, 4, 1), bool), (2, 2), (2, 2))
    with pytest.raises(ValueError, match="floats"):
        ops.avg_pool2d(X.astype(np.int32), (2, 2))
    with pytest.raises(ValueError, match="5 windows in the last axis"):
        ops.fold(normal(1, 4, 5), (3, 3), (2, 2))
    with pytest.raises(ValueError, match=r"\(1, 3, 4\)"):
        ops.fold(normal(1, 3, 4), (3, 3), (2, 2))
    with pytest.raises(ValueError, match="larger than the image"):
        ops.fold(normal(1, 9, 1), (1, 1), (3, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_means_of_16_bits_are_rounded_once(dtype):
    x = np.random.default_rng(0).random((1, 17, 17, 1)).astype(np.float32)
    given = jnp.asarray(x).astype(dtype)
    found = ops.avg_pool2d(given, (17, 17))
    assert found.dtype == dtype
    expected = np.asarray(given).astype(np.float64).mean()
    np.testing.assert_allclose(float(found[0, 0, 0, 0]), expected, rtol=2**-8)
    large = jnp.full((1, 2, 2, 1), 60000.0, dtype)
    assert float(ops.avg_pool2d(large, (2, 2))[0, 0, 0, 0]) == float(large[0, 0, 0, 0])
