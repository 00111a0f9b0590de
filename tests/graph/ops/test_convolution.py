"""Convolutions against torch, which has channels first: the oracles permute."""

import functools

import numpy as np
import pytest

from maxjax.graph import ops
from maxjax.graph.ops.convolution import ConvInputLayout, FilterLayout
from tests.graph.ops.oracle import check, normal
from tests.oracles.recorded import recorded, torch

F = torch.nn.functional
LOOSE = {"rtol": 1e-4, "atol": 1e-5}


def conv2d(x, w, padding=(0, 0, 0, 0), **options):
    """torch's, of [N, H, W, C] and [R, S, C, F], with padding before and after each axis."""
    top, bottom, left, right = padding
    x = F.pad(x.permute(0, 3, 1, 2), (left, right, top, bottom))
    return F.conv2d(x, w.permute(3, 2, 0, 1), **options).permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": (2, 1)},
        {"dilation": (1, 2), "padding": (1, 2, 0, 3)},
        {"groups": 2, "padding": (1, 1, 1, 1)},
        {"groups": 4, "stride": (2, 2)},
    ],
)
def test_conv2d(options):
    x, w = normal(2, 6, 7, 4), normal(3, 2, 4 // options.get("groups", 1), 8, seed=1)
    check(
        lambda x, w: ops.conv2d(x, w, **options),
        lambda x, w: conv2d(x, w, **options),
        x,
        w,
        **LOOSE,
    )


def test_bias():
    x, w, b = normal(1, 4, 4, 2), normal(2, 2, 2, 3, seed=1), normal(3, seed=2)
    check(
        lambda x, w, b: ops.conv2d(x, w, bias=b),
        lambda x, w, b: conv2d(x, w) + b,
        x, w, b, **LOOSE,
    )  # fmt: skip


@pytest.mark.parametrize("layouts", [(ConvInputLayout.NCHW, FilterLayout.FCRS), ("NCHW", "FCRS")])
def test_channels_first(layouts):
    x, w, b = normal(2, 4, 6, 7), normal(8, 4, 3, 2, seed=1), normal(8, seed=2)
    check(
        lambda x, w, b: ops.conv2d(x, w, bias=b, input_layout=layouts[0], filter_layout=layouts[1]),
        F.conv2d,
        x, w, b, **LOOSE,
    )  # fmt: skip


def test_the_layout_of_torchs_transposed_convolution():
    x, w = normal(2, 4, 6, 7), normal(4, 8, 3, 2, seed=1)
    for layout in (FilterLayout.CFRS, FilterLayout.FCRS):
        ours = functools.partial(
            ops.conv2d_transpose, stride=(2, 1), input_layout="NCHW", filter_layout=layout
        )
        check(ours, lambda x, w: F.conv_transpose2d(x, w, stride=(2, 1)), x, w, **LOOSE)
    check(lambda x, w: ops.conv2d(x, w, input_layout="NCHW", filter_layout="CFRS"),
          lambda x, w: F.conv2d(x, w.permute(1, 0, 2, 3)), x, w, **LOOSE)  # fmt: skip


def test_conv3d():
    x, w = normal(1, 3, 4, 5, 4), normal(2, 3, 2, 2, 6, seed=1)
    check(
        lambda x, w: ops.conv3d(x, w, (1, 2, 1), padding=(1, 1, 0, 0, 2, 2), groups=2),
        lambda x, w: F.conv3d(
            x.permute(0, 4, 1, 2, 3), w.permute(4, 3, 0, 1, 2), None, (1, 2, 1), (1, 0, 2), groups=2
        ).permute(0, 2, 3, 4, 1),
        x, w, **LOOSE,
    )  # fmt: skip
    assert ops.conv3d(x, w, groups=2).shape == (1, 2, 2, 4, 6)


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"stride": (2, 3)}, {"stride": (2, 3)}),
        ({"stride": (2, 2), "padding": (1, 1, 1, 1), "output_paddings": (1, 1)},
         {"stride": 2, "padding": 1, "output_padding": 1}),
        ({"dilation": (2, 1), "padding": (1, 1, 0, 0)}, {"dilation": (2, 1), "padding": (1, 0)}),
    ],
)  # fmt: skip
def test_conv2d_transpose(options, theirs):
    x, w, b = normal(2, 3, 4, 5), normal(3, 2, 6, 5, seed=1), normal(6, seed=2)
    check(
        lambda x, w, b: ops.conv2d_transpose(x, w, bias=b, **options),
        lambda x, w, b: F.conv_transpose2d(
            x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), b, **theirs
        ).permute(0, 2, 3, 1),
        x, w, b, **LOOSE,
    )  # fmt: skip


def test_uneven_padding_of_the_transposed():
    x, w = normal(1, 3, 3, 1), normal(3, 3, 1, 1, seed=1)
    whole = recorded(
        lambda: F.conv_transpose2d(
            torch.tensor(x[..., 0])[None], torch.tensor(w[..., 0, 0])[None, None], stride=2
        ).numpy()
    )
    got = ops.conv2d_transpose(x, w, (2, 2), padding=(1, 0, 0, 1), output_paddings=(1, 1))
    assert got.shape == (1, 7, 7, 1)
    np.testing.assert_allclose(got[0, :6, :6, 0], whole[0, 0, 1:, :6], atol=1e-5)


def test_torch_filters_of_the_transposed():
    x, w = normal(2, 5, 3, 4), normal(5, 6, 3, 2, seed=1)
    check(
        lambda x, w: ops.conv2d_transpose(x, w, (2, 2), input_layout="NCHW", filter_layout="FCRS"),
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        x, w, **LOOSE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (
            lambda: ops.conv2d(normal(1, 4, 4, 2), normal(2, 2, 3, 1)),
            r"\(1, 4, 4, 2\).*\(2, 2, 3, 1\)",
        ),
        (lambda: ops.conv2d(normal(4, 4, 2), normal(2, 2, 2, 1)), "tensors of 4"),
        (
            lambda: ops.conv2d(normal(1, 4, 4, 4), normal(2, 2, 2, 3), groups=2),
            "3 filters cannot be split into 2 groups",
        ),
        (lambda: ops.conv2d(normal(1, 4, 4, 2), normal(2, 2, 2, 1), padding=(1, 1)), "4 numbers"),
        (lambda: ops.conv2d(normal(1, 4, 4, 2), normal(2, 2, 2, 1), bias=normal(3)), "1 filters"),
        (
            lambda: ops.conv2d(normal(1, 4, 4, 2), normal(2, 2, 2, 1), filter_layout="QRSCF"),
            "QRSCF",
        ),
        (lambda: ops.conv2d_transpose(normal(1, 4, 4, 2), normal(2, 2, 2, 1)), "channels of input"),
        (lambda: ops.conv2d(normal(1, 4, 4, 2), normal(5, 2, 2, 1)), "larger than the input"),
        (lambda: ops.conv2d(normal(1, 4, 4, 2), normal(2, 2, 2, 1), (0, 1)), "2 positive numbers"),
    ],
)
def test_what_does_not_go(op, says):
    with pytest.raises(ValueError, match=says):
        op()
