"""ConvTranspose1d: a transposed convolution over one spatial axis, which upsamples it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..elsewhere import either
from ..graph.device import DeviceRef
from ..graph.kind import as_array, on_arrays
from ..graph.weight.weight import Weight
from .conv import check_positive, checked, fan_in_normal, plus_bias, same_width
from .layer import Module


class ConvTranspose1d(Module):
    """A transposed convolution: ``[N, L, C]`` → ``[N, L', O]``; with ``permute`` ``[N, C, L]`` → ``[N, O, L']``.

    L' = (L - 1) · stride + dilation · (kernel - 1) + 1 + output_padding - (padding before + padding after).

    Args (in MAX's order):
        length: length of the kernel.
        in_channels, out_channels: numbers C and O of channels.
        dtype: dtype of weight and bias.
        stride: distance in the result between neighbouring inputs.
        padding: number of positions removed before and after the result.
        dilation: distance in the result between neighbouring kernel elements.
        output_padding: number of positions added at the end of the result.
        device: device that the weights are declared on.
        has_bias, bias: two names of one argument: whether there is a bias. By default there is none.
        permute: whether layouts, the weight's too, are PyTorch's.
        name: prefix of the weights' names: ``"<name>.weight"``, ``"<name>.bias"``.

    As in MAX, a size may also be a pair (height, width) for an image of height 1, and ``padding`` four numbers
    (0, 0, before, after). The height must then be neutral: 1 for stride and dilation, 0 for output_padding.

    Attributes:
        weight: Weight ``[kernel, O, C]``, or ``[C, O, kernel]`` with ``permute``.
        bias: Weight ``[O]``, or None.

    Example:
        >>> conv = ConvTranspose1d(2, 1, 1, "float32", stride=2, permute=True)
        >>> _ = conv.load_state_dict({"weight": jnp.array([[[1.0, 10.0]]])})
        >>> print(conv(jnp.array([[[1.0, 2.0]]])))
        [[[ 1. 10.  2. 20.]]]
    """

    def __init__(
        self,
        length: int,
        in_channels: int,
        out_channels: int,
        dtype: Any = DType.float32,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int, int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        output_padding: int | tuple[int, int] = 0,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        permute: bool = False,
        name: str | None = None,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        has_bias = either(False, has_bias=has_bias, bias=bias)
        self.kernel_length, self.in_channels, self.permute = length, in_channels, permute
        self.stride, self.dilation = _of_width(stride, 1), _of_width(dilation, 1)
        self.output_padding = _of_width(output_padding, 0)
        check_positive(length=(length,), stride=(self.stride,), dilation=(self.dilation,))
        pad = tuple(padding) if isinstance(padding, Iterable) else (0, 0, padding, padding)
        if len(pad) != 4 or any(pad[:2]):
            raise ValueError(f"padding is one number or (0, 0, before, after), not {padding}")
        self.padding = operator.index(pad[2]), operator.index(pad[3])
        device = device or DeviceRef.CPU()
        shape = (
            (in_channels, out_channels, length) if permute else (length, out_channels, in_channels)
        )
        prefix = f"{name}." if name else ""
        self.weight = Weight(f"{prefix}weight", dtype, shape, device)
        self.bias = Weight(f"{prefix}bias", dtype, (out_channels,), device) if has_bias else None

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[N, L, C]`` → ``[N, L', O]``; with ``permute`` ``[N, C, L]`` → ``[N, O, L']``.

        Raises:
            ValueError: ``x`` has the wrong number of axes or channels.
        """
        ends = "NCL" if self.permute else "NLC"
        array, kernel = same_width(checked(self, x, ends), as_array(self.weight))
        # A transposed convolution is a convolution with the flipped kernel and zeros between the input's elements.
        kernel = jnp.flip(kernel, axis=2 if self.permute else 0)
        reach = self.dilation * (self.kernel_length - 1)
        before, after = self.padding
        y = jax.lax.conv_general_dilated(
            array, kernel, (1,), [(reach - before, reach - after + self.output_padding)],
            lhs_dilation=(self.stride,), rhs_dilation=(self.dilation,),
            dimension_numbers=(ends, "IOL" if self.permute else "LOI", ends),
        )  # fmt: skip
        y = plus_bias(y, self.bias, ends.index("C"))
        return y

    def initializer(self, name: str) -> Any:
        """Normal weights with variance 1/(input channels · kernel length); a zero bias."""
        return fan_in_normal(name, *((0, 1) if self.permute else (-1, -2)))


def _of_width(value: int | tuple[int, int], neutral: int) -> int:
    """The size along the width, given as one number or as (height, width)."""
    if not isinstance(value, Iterable):
        return operator.index(value)
    if len(value) != 2 or value[0] != neutral:
        raise ValueError(f"sizes over one axis are one number or ({neutral}, number), not {value}")
    return value[1]
