"""Conv1D, Conv2d and Conv3D: convolutions over one, two or three spatial axes.

Shapes: batch N, C input channels, O output channels; ``*places`` are the spatial axes. With
``permute`` the layouts are PyTorch's: input ``[N, C, *places]``, weight ``[O, C / groups, *kernel]``.
Without it the input is ``[N, *places, C]`` and the weight ``[*kernel, C / groups, O]``. As is usual in
deep learning, the kernel is not flipped: the layers compute a cross-correlation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType, promote
from ..elsewhere import either
from ..graph.device import DeviceRef
from ..graph.kind import as_array, on_arrays
from ..graph.operands import check_not_empty
from ..graph.weight.weight import Weight
from .layer import Module
from .layer.sharded import ReplicatedLayer

_PLACES = "DHW"
Sizes = int | Sequence[int]


class _Conv(ReplicatedLayer, Module):
    """Base class of the three layers; the length of ``kernel`` is the number of spatial axes."""

    def _build(self, kernel: tuple[int, ...], in_channels: int, out_channels: int, dtype: Any,
               stride: Sizes, padding: Sizes, dilation: Sizes, num_groups: int,
               device: DeviceRef | None, has_bias: bool, permute: bool, name: str | None) -> None:  # fmt: skip
        axes = len(kernel)
        if num_groups < 1 or in_channels % num_groups or out_channels % num_groups:
            raise ValueError(
                f"in_channels {in_channels} and out_channels {out_channels} must be multiples of "
                f"num_groups, which is {num_groups}"
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_groups, self.permute, self.device = num_groups, permute, device
        self.stride = sizes(stride, axes, "stride")
        self.dilation = sizes(dilation, axes, "dilation")
        check_positive(kernel_size=kernel, stride=self.stride, dilation=self.dilation)
        self.padding = paddings(padding, axes)
        inner = in_channels // num_groups
        shape = (out_channels, inner, *kernel) if permute else (*kernel, inner, out_channels)
        prefix, device = f"{name}." if name else "", device or DeviceRef.CPU()
        self.filter = Weight(f"{prefix}weight", dtype, shape, device)
        self.bias = Weight(f"{prefix}bias", dtype, (out_channels,), device) if has_bias else None

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[N, *places, C]``, or ``[N, C, *places]`` with ``permute`` → the same axes with O channels.

        Raises:
            ValueError: ``x`` has the wrong number of axes or channels, or is smaller than the kernel.
        """
        places = _PLACES[-len(self.stride) :]
        ends = f"NC{places}" if self.permute else f"N{places}C"
        array, kernel = same_width(checked(self, x, ends), as_array(self.filter))
        y = jax.lax.conv_general_dilated(
            array, kernel, self.stride, self.padding, rhs_dilation=self.dilation,
            dimension_numbers=(ends, f"OI{places}" if self.permute else f"{places}IO", ends),
            feature_group_count=self.num_groups,
        )  # fmt: skip
        check_not_empty(y, array, kernel, ends)
        return plus_bias(y, self.bias, ends.index("C"))

    def initializer(self, name: str) -> Any:
        """Normal weights with variance 1/fan-in; a zero bias."""
        return fan_in_normal(name, *((1, 0) if self.permute else (-2, -1)))


class Conv1D(_Conv):
    """A convolution over one axis: ``[N, L, C]``, or ``[N, C, L]`` with ``permute``.

    Args (in MAX's order):
        kernel_size: length of the kernel.
        in_channels, out_channels: numbers C and O of channels.
        dtype: dtype of weight and bias.
        stride: distance in the input between neighbouring outputs.
        padding: number of zeros before and after the input: one number or a pair.
        dilation: distance in the input between neighbouring kernel elements.
        num_groups: number of groups of channels; each group is convolved by itself.
        device: device that the weights are declared on.
        has_bias, bias: two names of one argument: whether there is a bias. By default there is none.
        permute: whether layouts are PyTorch's, channels before the spatial axes.
        name: prefix of the weights' names: ``"<name>.weight"``, ``"<name>.bias"``.

    Attributes:
        filter: Weight named ``weight``, ``[kernel, C / groups, O]`` or ``[O, C / groups, kernel]``.
        bias: Weight ``[O]``, or None.

    Example:
        >>> import jax.numpy as jnp
        >>> conv = Conv1D(2, 1, 1, "float32", permute=True)
        >>> _ = conv.load_state_dict({"weight": jnp.array([[[1.0, 10.0]]])})
        >>> print(conv(jnp.array([[[1.0, 2.0, 3.0]]])))
        [[[21. 32.]]]
    """

    def __init__(
        self,
        kernel_size: int,
        in_channels: int,
        out_channels: int,
        dtype: Any = DType.float32,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int = 1,
        num_groups: int = 1,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        permute: bool = False,
        name: str | None = None,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        self._build((kernel_size,), in_channels, out_channels, dtype, stride, padding,
                    dilation, num_groups, device, either(False, has_bias=has_bias, bias=bias),
                    permute, name)  # fmt: skip


class Conv2d(_Conv):
    """A convolution over two axes: ``[N, H, W, C]``, or ``[N, C, H, W]`` with ``permute``.

    Arguments as in Conv1D, with one number or a pair (height, width) for each size; ``padding`` may
    also be (top, bottom, left, right).
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        in_channels: int,
        out_channels: int,
        dtype: Any = DType.float32,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | tuple[int, int, int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        num_groups: int = 1,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        permute: bool = False,
        name: str | None = None,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        kernel = sizes(kernel_size, 2, "kernel_size")
        self._build(kernel, in_channels, out_channels, dtype, stride, padding,
                    dilation, num_groups, device, either(False, has_bias=has_bias, bias=bias),
                    permute, name)  # fmt: skip


class Conv3D(_Conv):
    """A convolution over three axes: ``[N, D, H, W, C]``, or ``[N, C, D, H, W]`` with ``permute``.

    Arguments as in Conv1D, with the kernel's ``depth``, ``height`` and ``width`` first, and one or
    three numbers for each size; ``padding`` may also be six numbers, before and after on each axis.
    """

    def __init__(
        self,
        depth: int,
        height: int,
        width: int,
        in_channels: int,
        out_channels: int,
        dtype: Any = DType.float32,
        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] | tuple[int, int, int, int, int, int] = 0,
        dilation: int | tuple[int, int, int] = 1,
        num_groups: int = 1,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        permute: bool = False,
        name: str | None = None,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        self._build((depth, height, width), in_channels, out_channels, dtype, stride, padding,
                    dilation, num_groups, device, either(False, has_bias=has_bias, bias=bias),
                    permute, name)  # fmt: skip


def sizes(value: Sizes, axes: int, what: str) -> tuple[int, ...]:
    """One number for each axis, from one number for all axes or one for each.

    Raises:
        ValueError: the count of numbers is neither 1 nor ``axes``.
    """
    numbers = tuple(value) if isinstance(value, Iterable) else (value,) * axes
    if isinstance(value, str) or len(numbers) != axes:
        raise ValueError(f"{what} is one number or {axes}, not {value!r}")
    return tuple(operator.index(n) for n in numbers)


def check_positive(**named: tuple[int, ...]) -> None:
    """Checks that all sizes of these names are positive.

    Raises:
        ValueError: one is not.
    """
    for name, values in named.items():
        if min(values) < 1:
            raise ValueError(f"{name} must be positive, not {values}")


def paddings(value: Sizes, axes: int) -> tuple[tuple[int, int], ...]:
    """(before, after) for each axis, from one number, one for each axis, or two for each axis."""
    if isinstance(value, list | tuple | np.ndarray) and len(value) == 2 * axes:
        return tuple((int(value[2 * i]), int(value[2 * i + 1])) for i in range(axes))
    return tuple((n, n) for n in sizes(value, axes, "padding"))


def checked(layer: Any, x: Any, axes: str) -> jax.Array:
    """The input of a convolution as an array, whose axes are checked: "C" has the layer's ``in_channels``."""
    array, channels = jnp.asarray(x), layer.in_channels
    if array.ndim != len(axes) or array.shape[axes.index("C")] != channels:
        layout = ", ".join(str(channels) if axis == "C" else axis for axis in axes)
        raise ValueError(f"{type(layer).__name__} takes [{layout}], not {array.shape}")
    return array


def same_width(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both arrays in the wider of their dtypes: ``lax.conv_general_dilated`` needs equal dtypes."""
    if x.dtype == w.dtype:
        return x, w
    dtype = promote(x.dtype, w.dtype).np
    return x.astype(dtype), w.astype(dtype)


def plus_bias(y: jax.Array, bias: Any, axis: int) -> jax.Array:
    """``y + bias`` along the channel axis, in the dtype of ``y``."""
    if bias is None:
        return y
    shape = [1] * y.ndim
    shape[axis] = -1
    return y + as_array(bias).astype(y.dtype).reshape(shape)


def fan_in_normal(name: str, in_axis: int, out_axis: int) -> Any:
    """The initializer of the Weight with that local name: zeros for a bias, otherwise LeCun normal."""
    if name.endswith("bias"):
        return jax.nn.initializers.zeros
    return jax.nn.initializers.lecun_normal(in_axis=in_axis, out_axis=out_axis)
