"""Convolutions. Channels come last by default, in images and in filters.

In the names of layouts N is the batch, C the input channels, F the filters (output
channels), D H W the axes of an image and Q R S those of a filter.
"""

from __future__ import annotations

import enum
from typing import Any

import jax

from ...dtype import DType, promote
from .lift import array, lift, pair, same


class ConvInputLayout(enum.Enum):
    """Order of the axes of an image; in three dimensions D comes before H."""

    NHWC = "NHWC"
    NCHW = "NCHW"


class FilterLayout(enum.Enum):
    """Order of the axes of a filter."""

    RSCF = "RSCF"
    QRSCF = "QRSCF"
    FCRS = "FCRS"
    FCQRS = "FCQRS"
    CFRS = "CFRS"  # torch's of a transposed convolution: its inputs first


# jax.lax's letters for MAX's layouts, by the number of spatial axes.
_IMAGES = {("NHWC", 2): "NHWC", ("NCHW", 2): "NCHW", ("NHWC", 3): "NDHWC", ("NCHW", 3): "NCDHW"}
_FILTERS = {
    ("RSCF", 2): "HWIO", ("FCRS", 2): "OIHW", ("CFRS", 2): "IOHW",
    ("QRSCF", 3): "DHWIO", ("FCQRS", 3): "OIDHW",
}  # fmt: skip


@lift
def conv2d(
    x: Any,
    filter: Any,
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    groups: int = 1,
    bias: Any = None,
    input_layout: Any = ConvInputLayout.NHWC,
    filter_layout: Any = FilterLayout.RSCF,
) -> Any:
    """The two-dimensional convolution (cross-correlation, as in torch).

    Args:
        x: ``[N, H, W, C]``.
        filter: ``[R, S, C / groups, F]``.
        padding: zeros put before and after H, before and after W.
        groups: the channels are split into so many, each with its own filters.
        bias: ``[F]``, or None.
        input_layout, filter_layout: other orders of the axes; the result has the input's.

    Raises:
        ValueError: another number of axes, channels that do not fit (the message names
            both shapes), or a layout there is not.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> ops.conv2d(jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 16)), padding=(1, 1, 1, 1)).shape
        (1, 8, 8, 16)
    """
    return _convolve(
        x, filter, stride, dilation, padding, groups, bias, input_layout, filter_layout, 2
    )


@lift
def conv3d(
    x: Any,
    filter: Any,
    stride: tuple[int, int, int] = (1, 1, 1),
    dilation: tuple[int, int, int] = (1, 1, 1),
    padding: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0),
    groups: int = 1,
    bias: Any = None,
    input_layout: Any = ConvInputLayout.NHWC,
    filter_layout: Any = FilterLayout.QRSCF,
) -> Any:
    """The three-dimensional convolution of ``[N, D, H, W, C]`` with ``[Q, R, S, C / groups, F]``.

    As ``conv2d``, with three numbers for stride and dilation and six for padding.
    """
    return _convolve(
        x, filter, stride, dilation, padding, groups, bias, input_layout, filter_layout, 3
    )


def _convolve(
    x: Any, filter: Any, stride: Any, dilation: Any, padding: Any, groups: int, bias: Any,
    input_layout: Any, filter_layout: Any, axes: int,
) -> jax.Array:  # fmt: skip
    x, w = _operands(x, filter, axes)
    image, kernel = _letters(_IMAGES, input_layout, axes), _letters(_FILTERS, filter_layout, axes)
    channels = x.shape[image.index("C")]
    if not same(channels, w.shape[kernel.index("I")] * groups):
        raise ValueError(f"a convolution of {x.shape} ({channels} channels) with filters of {w.shape} in "
                         f"{groups} groups: each filter must have a group's channels")  # fmt: skip
    if w.shape[kernel.index("O")] % groups:
        raise ValueError(
            f"a convolution of {groups} groups with {w.shape[kernel.index('O')]} filters"
        )
    y = jax.lax.conv_general_dilated(
        x, w,
        window_strides=pair(stride, axes, "stride"),
        padding=_pairs(padding, axes),
        rhs_dilation=pair(dilation, axes, "dilation"),
        dimension_numbers=(image, kernel, image),
        feature_group_count=groups,
    )  # fmt: skip
    return _plus_bias(y, bias, image)


@lift
def conv2d_transpose(
    x: Any,
    filter: Any,
    stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    output_paddings: tuple[int, int] = (0, 0),
    bias: Any = None,
    input_layout: Any = ConvInputLayout.NHWC,
    filter_layout: Any = FilterLayout.RSCF,
) -> Any:
    """The transposed convolution: what the gradient of ``conv2d`` does to its input.

    Args:
        x: ``[N, H, W, C]``.
        filter: ``[R, S, F, C]``: the filter of the convolution it transposes, whose
            channels are our filters; torch's ``[C, F, R, S]`` is the layout CFRS, which says
            so, or FCRS in the names of that convolution.
        padding: taken off the result before and after H, before and after W.
        output_paddings: added to the result at the end of H and W.

    Returns:
        ``[N, (H-1)·stride - padding + dilation·(R-1) + output_padding + 1, …, F]``.

    Raises:
        ValueError: as ``conv2d``.
    """
    x, w = _operands(x, filter, 2)
    image, kernel = _letters(_IMAGES, input_layout, 2), _letters(_FILTERS, filter_layout, 2)
    if kernel != _FILTERS["CFRS", 2]:
        # The filter is that of the convolution the other way: its inputs are our outputs.
        kernel = kernel.translate(str.maketrans("IO", "OI"))
    if not same(x.shape[image.index("C")], w.shape[kernel.index("I")]):
        raise ValueError(
            f"conv2d_transpose of {x.shape} with a filter of {w.shape}: their channels differ"
        )
    dilation, extra = pair(dilation, 2, "dilation"), pair(output_paddings, 2, "output_paddings")
    where = [kernel.index(letter) for letter in "HW"]
    reach = [d * (w.shape[axis] - 1) for d, axis in zip(dilation, where, strict=True)]
    y = jax.lax.conv_general_dilated(
        x, jax.lax.rev(w, where),
        window_strides=(1, 1),
        padding=[
            (r - before, r - after + more)
            for r, (before, after), more in zip(reach, _pairs(padding, 2), extra, strict=True)
        ],
        lhs_dilation=pair(stride, 2, "stride"),
        rhs_dilation=dilation,
        dimension_numbers=(image, kernel, image),
    )  # fmt: skip
    return _plus_bias(y, bias, image)


def _operands(x: Any, filter: Any, axes: int) -> tuple[jax.Array, jax.Array]:
    x, w = array(x), array(filter)
    if x.ndim != axes + 2 or w.ndim != axes + 2:
        raise ValueError(f"a convolution over {axes} axes takes tensors of {axes + 2}, not of shapes "
                         f"{x.shape} and {w.shape}")  # fmt: skip
    dtype = promote(DType.of(x.dtype), DType.of(w.dtype)).np
    return x.astype(dtype), w.astype(dtype)


def _letters(table: dict[tuple[str, int], str], layout: Any, axes: int) -> str:
    name = str(getattr(layout, "value", layout))
    if (name, axes) not in table:
        known = ", ".join(key for key, count in table if count == axes)
        raise ValueError(f"a convolution over {axes} axes knows the layouts {known}, not {name}")
    return table[name, axes]


def _pairs(padding: Any, axes: int) -> list[tuple[Any, Any]]:
    numbers = pair(padding, 2 * axes, "padding")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _plus_bias(y: jax.Array, bias: Any, image: str) -> jax.Array:
    if bias is None:
        return y
    b, axis = array(bias), image.index("C")
    if b.ndim != 1 or not same(b.shape[0], y.shape[axis]):
        raise ValueError(f"the bias has shape {b.shape}, and there are {y.shape[axis]} filters")
    return y + b.astype(y.dtype).reshape([-1 if i == axis else 1 for i in range(y.ndim)])
