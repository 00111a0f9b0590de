"""Convolutions. Channels come last by default, in images and in filters.

In the names of layouts, N is the batch, C the input channels, F the filters (output channels); D, H and
W are the spatial axes of an image, and Q, R and S those of a filter.
"""

from __future__ import annotations

import enum
from typing import Any

import jax

from ..operands import check_not_empty, same_dtype
from .lift import array, lift, pair, same, sizing


class ConvInputLayout(enum.Enum):
    """The order of the axes of an image; for 3-D images D comes before H."""

    NHWC = "NHWC"
    NCHW = "NCHW"


class FilterLayout(enum.Enum):
    """The order of the axes of a filter."""

    RSCF = "RSCF"
    QRSCF = "QRSCF"
    FCRS = "FCRS"
    FCQRS = "FCQRS"
    CFRS = "CFRS"  # that of torch's transposed convolutions, input channels first


# jax.lax's letters for MAX's layouts, by the number of spatial axes.
_IMAGES = {("NHWC", 2): "NHWC", ("NCHW", 2): "NCHW", ("NHWC", 3): "NDHWC", ("NCHW", 3): "NCDHW"}
_FILTERS = {
    ("RSCF", 2): "HWIO", ("FCRS", 2): "OIHW", ("CFRS", 2): "IOHW",
    ("QRSCF", 3): "DHWIO", ("FCQRS", 3): "OIDHW",
}  # fmt: skip


@sizing("stride", "dilation", "padding")
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
    """2-D convolution (cross-correlation, as in torch).

    Args:
        x: ``[N, H, W, C]``.
        filter: ``[R, S, C / groups, F]``.
        padding: number of zeros before and after H, then before and after W.
        groups: number of groups that the channels are split into, each with its own filters.
        bias: ``[F]``, or None.
        input_layout, filter_layout: orders of the axes; the result has the order of the input.

    Raises:
        ValueError: the ranks or channels do not fit (the message has both shapes), or a layout is
            unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> ops.conv2d(jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 16)), padding=(1, 1, 1, 1)).shape
        (1, 8, 8, 16)
    """
    return _convolve(
        x, filter, stride, dilation, padding, groups, bias, input_layout, filter_layout, 2
    )


@sizing("stride", "dilation", "padding")
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
    """3-D convolution of ``[N, D, H, W, C]`` with ``[Q, R, S, C / groups, F]``.

    Like ``conv2d``, with three numbers for stride and dilation and six for padding.
    """
    return _convolve(
        x, filter, stride, dilation, padding, groups, bias, input_layout, filter_layout, 3
    )


def _convolve(
    x: Any, filter: Any, stride: Any, dilation: Any, padding: Any, groups: int, bias: Any,
    input_layout: Any, filter_layout: Any, axes: int,
) -> jax.Array:  # fmt: skip
    x, w = _operands(x, filter, axes)
    image = _dimension_numbers(_IMAGES, input_layout, axes)
    kernel = _dimension_numbers(_FILTERS, filter_layout, axes)
    channels = x.shape[image.index("C")]
    if not same(channels, w.shape[kernel.index("I")] * groups):
        raise ValueError(f"convolution of shape {x.shape} ({channels} channels) with filters {w.shape} in {groups} "
                         "groups: the channels of a filter must be those of a group")  # fmt: skip
    if w.shape[kernel.index("O")] % groups:
        raise ValueError(
            f"convolution: {w.shape[kernel.index('O')]} filters cannot be split into {groups} groups"
        )
    y = jax.lax.conv_general_dilated(
        x, w,
        window_strides=pair(stride, axes, "stride", positive=True),
        padding=_pairs(padding, axes),
        rhs_dilation=pair(dilation, axes, "dilation", positive=True),
        dimension_numbers=(image, kernel, image),
        feature_group_count=groups,
    )  # fmt: skip
    check_not_empty(y, x, w, image)
    return _add_bias(y, bias, image)


@sizing("stride", "dilation", "padding", "output_paddings")
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
    """2-D transposed convolution: the gradient of ``conv2d`` with respect to its input.

    Args:
        x: ``[N, H, W, C]``.
        filter: ``[R, S, F, C]``, the filter of the convolution that this one transposes, in which
            input and output channels have swapped roles. For torch's ``[C, F, R, S]`` use the layout
            CFRS, or FCRS, its name in the transposed convolution.
        padding: number of elements removed from the result before and after H, then W.
        output_paddings: number of elements added to the result at the end of H and of W.

    Returns:
        ``[N, (H-1)·stride - padding + dilation·(R-1) + output_padding + 1, …, F]``.

    Raises:
        ValueError: as ``conv2d``.
    """
    x, w = _operands(x, filter, 2)
    image = _dimension_numbers(_IMAGES, input_layout, 2)
    kernel = _dimension_numbers(_FILTERS, filter_layout, 2)
    if kernel != _FILTERS["CFRS", 2]:
        # In the convolution that this one transposes, inputs and outputs have swapped roles.
        kernel = kernel.translate(str.maketrans("IO", "OI"))
    if not same(x.shape[image.index("C")], w.shape[kernel.index("I")]):
        raise ValueError(
            f"conv2d_transpose: the channels of input {x.shape} and filter {w.shape} differ"
        )
    dilation, extra = (
        pair(dilation, 2, "dilation", positive=True),
        pair(output_paddings, 2, "output_paddings"),
    )
    spatial = [kernel.index(letter) for letter in "HW"]
    extents = [d * (w.shape[axis] - 1) for d, axis in zip(dilation, spatial, strict=True)]
    y = jax.lax.conv_general_dilated(
        x, jax.lax.rev(w, spatial),
        window_strides=(1, 1),
        padding=[
            (r - before, r - after + more)
            for r, (before, after), more in zip(extents, _pairs(padding, 2), extra, strict=True)
        ],
        lhs_dilation=pair(stride, 2, "stride", positive=True),
        rhs_dilation=dilation,
        dimension_numbers=(image, kernel, image),
    )  # fmt: skip
    return _add_bias(y, bias, image)


def _operands(x: Any, filter: Any, axes: int) -> tuple[jax.Array, jax.Array]:
    x, w = array(x), array(filter)
    if x.ndim != axes + 2 or w.ndim != axes + 2:
        raise ValueError(f"a {axes}-D convolution takes tensors of {axes + 2} axes, not of shapes {x.shape} "
                         f"and {w.shape}")  # fmt: skip
    return same_dtype(x, w)


def _dimension_numbers(table: dict[tuple[str, int], str], layout: Any, axes: int) -> str:
    name = str(getattr(layout, "value", layout))
    if (name, axes) not in table:
        known = ", ".join(key for key, count in table if count == axes)
        raise ValueError(f"a {axes}-D convolution supports the layouts {known}, not {name}")
    return table[name, axes]


def _pairs(padding: Any, axes: int) -> list[tuple[Any, Any]]:
    numbers = pair(padding, 2 * axes, "padding")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _add_bias(y: jax.Array, bias: Any, image: str) -> jax.Array:
    if bias is None:
        return y
    b, axis = array(bias), image.index("C")
    if b.ndim != 1 or not same(b.shape[0], y.shape[axis]):
        raise ValueError(f"the bias has shape {b.shape}, but there are {y.shape[axis]} filters")
    return y + b.astype(y.dtype).reshape([-1 if i == axis else 1 for i in range(y.ndim)])
