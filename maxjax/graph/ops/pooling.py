"""Pooling over windows of an image ``[N, H, W, C]``, and ``fold``, which sums windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..operands import ends
from ..symbolic import to_sizes
from .lift import array, floating, lift, numeric, pair, rounded, same, sizing, wide


class _Windows(NamedTuple):
    """The windows of an image, for the axes H and W."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    count: tuple[Any, ...]
    end: tuple[Any, ...]  # padding at the end, so that the last window is complete

    def pad(self, x: jax.Array, fill: Any) -> jax.Array:
        """The padded image."""
        edges = zip(self.padding, self.end, strict=True)
        widths = [(0, 0, 0), *((before, after, 0) for before, after in edges), (0, 0, 0)]
        return jax.lax.pad(x, jnp.asarray(fill, x.dtype), widths)

    def places(self) -> Iterator[tuple[slice, ...]]:
        """For each position in the kernel, where H and W of the padded image have this element of all windows."""
        for position in itertools.product(*map(range, self.kernel)):
            yield tuple(
                slice(i * d, i * d + (n - 1) * s + 1, s)
                for i, d, n, s in zip(position, self.dilation, self.count, self.stride, strict=True)
            )

    def slices(self, padded: jax.Array) -> list[jax.Array]:
        """For each position in the kernel, that element of all windows: ``[N, out_H, out_W, C]`` each."""
        return [padded[:, *place] for place in self.places()]


def _windows(
    size: Sequence[Any],
    kernel_size: Any,
    stride: Any,
    dilation: Any,
    padding: Any,
    ceil_mode: bool,
    op: str,
) -> _Windows:
    """The windows of an image of size ``(H, W)``."""
    kernel = to_sizes(pair(kernel_size, 2, "kernel_size", positive=True))
    strides = pair(stride, 2, "stride", positive=True)
    dilations = pair(dilation, 2, "dilation", positive=True)
    paddings = pair(padding, 2, "padding")
    counts, ends = [], []
    for n, k, s, d, p in zip(size, kernel, strides, dilations, paddings, strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        count = (span + (s - 1 if ceil_mode else 0)) // s + 1
        # A window that would begin in the padding at the end is left out, as in torch.
        if ceil_mode and (count - 1) * s >= n + p:
            count = count - 1
        if isinstance(count, int) and count < 1:
            raise ValueError(
                f"{op}: the kernel {kernel} is larger than the image {tuple(size)} with its padding"
            )
        counts.append(count)
        ends.append((count - 1) * s + d * (k - 1) + 1 - n - p)
    return _Windows(kernel, strides, dilations, paddings, tuple(counts), tuple(ends))


def _image(x: jax.Array, op: str) -> jax.Array:
    if x.ndim != 4:
        raise ValueError(f"{op} takes an image [N, H, W, C], not a tensor of shape {x.shape}")
    return x


@sizing("kernel_size", "stride", "dilation", "padding")
@lift
def avg_pool2d(
    input: Any,
    kernel_size: tuple[Any, Any],
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    ceil_mode: bool = False,
    count_boundary: bool = True,
) -> Any:
    """The mean of each window of ``[N, H, W, C]``.

    Args:
        padding: number of zeros on both sides of H and of W.
        ceil_mode: whether to include a last window that is incomplete.
        count_boundary: whether the mean includes the padding. If so it is the sum divided by the size of the kernel,
            also of an incomplete window, where torch leaves out what lies beyond the padding.

    Raises:
        ValueError: the input is not an image, or is smaller than the kernel.
    """
    x = _image(floating(input, "avg_pool2d"), "avg_pool2d")
    dtype, x = x.dtype, wide(x)
    windows = _windows(
        x.shape[1:3], kernel_size, stride, dilation, padding, ceil_mode, "avg_pool2d"
    )
    total = sum(windows.slices(windows.pad(x, 0)), start=jnp.zeros((), x.dtype))
    if count_boundary:
        return rounded(total / math.prod(windows.kernel), dtype)
    ones = jnp.ones((1, *x.shape[1:3], 1), x.dtype)
    count = sum(windows.slices(windows.pad(ones, 0)), start=jnp.zeros((), x.dtype))
    return rounded(total / count, dtype)


@sizing("kernel_size", "stride", "dilation", "padding")
@lift
def max_pool2d(
    input: Any,
    kernel_size: tuple[Any, Any],
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    ceil_mode: bool = False,
) -> Any:
    """The maximum of each window of ``[N, H, W, C]``, without the padding.

    Raises:
        ValueError: the input is not an image, or is smaller than the kernel.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> print(ops.max_pool2d(x, (2, 2), stride=2)[0, :, :, 0])
        [[ 5.  7.]
         [13. 15.]]
    """
    x = _image(array(input), "max_pool2d")
    windows = _windows(
        x.shape[1:3], kernel_size, stride, dilation, padding, ceil_mode, "max_pool2d"
    )
    first, *rest = windows.slices(windows.pad(x, ends(x.dtype)[0]))
    for other in rest:
        # The first of equal elements gets the gradient, as in torch; jnp.maximum would split it. NaN stays.
        first = jnp.where((other > first) | (other != other), other, first)
    return first


@sizing("output_size", "kernel_size", "stride", "dilation", "padding")
@lift
def fold(
    input: Any,
    output_size: tuple[Any, Any],
    kernel_size: tuple[Any, Any],
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> Any:
    """Builds an image from its windows, adding them where they overlap.

    Args:
        input: ``[N, C · kernel_h · kernel_w, L]`` for ``L`` windows in row-major order.
        output_size: ``(H, W)`` of the result ``[N, C, H, W]``.

    Raises:
        ValueError: the sizes do not fit.
    """
    x = numeric(input, "fold")
    size = to_sizes(pair(output_size, 2, "output_size"), x.shape)
    windows = _windows(size, kernel_size, stride, dilation, padding, False, "fold")
    kernel, counts = windows.kernel, windows.count
    area = kernel[0] * kernel[1]
    if x.ndim != 3 or not same(x.shape[1] % area, 0):
        raise ValueError(
            f"fold takes [N, C·{kernel[0]}·{kernel[1]}, L], not a tensor of shape {x.shape}"
        )
    if not same(x.shape[2], counts[0] * counts[1]):
        raise ValueError(
            f"fold: {x.shape[2]} windows in the last axis, but size {size} needs {counts[0] * counts[1]}"
        )
    parts = x.reshape((x.shape[0], x.shape[1] // area, area, *counts))
    top, left = windows.padding
    padded = (size[0] + 2 * top, size[1] + 2 * left)
    image = jnp.zeros((*parts.shape[:2], *padded), x.dtype)
    for i, place in enumerate(windows.places()):
        image = image.at[:, :, *place].add(parts[:, :, i])
    return image[:, :, top : top + size[0], left : left + size[1]]
