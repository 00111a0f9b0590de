"""Resizing against torch, and against the formula where torch has no such mode."""

import numpy as np
import pytest

from maxjax.graph import ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import recorded, torch

F = torch.nn.functional
X = normal(2, 3, 5, 4)
SIZES = [(7, 9), (3, 2), (5, 8), (1, 1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
def test_resize(size):
    shape = (2, 3, *size)
    for ours, theirs in (("bilinear", "bilinear"), ("bicubic", "bicubic")):
        check(
            lambda x, m=ours: ops.resize(x, shape, ops.InterpolationMode(m)),
            lambda x, m=theirs: F.interpolate(x, size, mode=m, align_corners=False),
            X,
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
def test_resize_linear(size):
    shape = (2, 3, *size)
    for mode, options in ((1, {"align_corners": True}), (0, {"align_corners": False})):
        check(
            lambda x, m=mode: ops.resize_linear(x, shape, m),
            lambda x, o=options: F.interpolate(x, size, mode="bilinear", **o),
            X,
            rtol=1e-4,
            atol=1e-5,
        )
    check(
        lambda x: ops.resize_linear(x, shape, antialias=True),
        lambda x: F.interpolate(x, size, mode="bilinear", antialias=True),
        X,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("new", [1, 2, 5, 9])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_coordinates_and_rounding(mode, new):
    x = normal(4)

    def place(i):
        if mode == 1:
            return i * 3 / (new - 1) if new > 1 else 0.0
        if mode == 2:
            return i * 4 / new
        return 0.0 if mode == 3 and new == 1 else (i + 0.5) * 4 / new - 0.5

    places = np.array([place(i) for i in range(new)])
    check_numpy(
        lambda x: ops.resize_linear(x, [new], mode),
        lambda x: np.interp(places, range(4), x).astype(x.dtype),
        x,
    )
    nearest = [np.ceil(places - 0.5), np.floor(places + 0.5), np.floor(places), np.ceil(places)]
    for rounding, rounded in enumerate(nearest):
        check_numpy(
            lambda x, r=rounding: ops.resize_nearest(x, [new], mode, r),
            lambda x, r=rounded: x[np.clip(r, 0, 3).astype(int)],
            x,
        )


def test_nearest_as_torch_has_it():
    got = ops.resize(X, (2, 3, 10, 8), ops.InterpolationMode.NEAREST)
    np.testing.assert_array_equal(
        got,
        recorded(lambda: F.interpolate(torch.tensor(X), (10, 8), mode="nearest-exact").numpy()),
    )
    got = ops.resize_nearest(X, (2, 3, 7, 3), 2, 2)
    np.testing.assert_array_equal(
        got, recorded(lambda: F.interpolate(torch.tensor(X), (7, 3), mode="nearest").numpy())
    )


def test_integers_have_nearest_ones():
    np.testing.assert_array_equal(ops.resize_nearest(np.int32([1, 2]), [4]), [1, 1, 2, 2])


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (lambda: ops.resize(X, (4, 6)), "four sizes"),
        (lambda: ops.resize(X[0], (3, 4, 6)), "four sizes"),
        (lambda: ops.resize_linear(X, (4, 6)), "the 4 axes of"),
        (lambda: ops.resize_linear(X[0, 0, 0], [7], 4), "one of 0, 1, 2, 3, not 4"),
        (lambda: ops.resize_nearest(X[0, 0, 0], [7], 0, 9), "round_mode"),
        (lambda: ops.resize_bicubic(np.int32([1, 2]), [4]), "floats"),
    ],
)
def test_what_does_not_go(op, says):
    with pytest.raises(ValueError, match=says):
        op()
