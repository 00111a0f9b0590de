"""Resizing of images and tensors: interpolation along one axis after another."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import one_of
from ..symbolic import to_sizes
from .lift import array, floating, lift, rounded, sizing, wide


class InterpolationMode(enum.Enum):
    """The interpolation of ``resize``."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


# (output indices, input size, output size) → coordinates of the output elements in the input.
_Coordinates = Callable[[np.ndarray, int, int], np.ndarray]


def _half_pixel(i: np.ndarray, size: int, new: int) -> np.ndarray:
    return (i + 0.5) * size / new - 0.5


# Coordinate modes by MAX's numbers: half_pixel, align_corners, asymmetric, half_pixel_1D.
_COORDINATES: dict[int, _Coordinates] = {
    0: _half_pixel,
    1: lambda i, size, new: i * (size - 1) / max(new - 1, 1),
    2: lambda i, size, new: i * size / new,
    3: lambda i, size, new: _half_pixel(i, size, new) if new > 1 else np.zeros(1),
}
# Rounding modes: half_down, half_up, floor, ceil.
_ROUNDINGS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    0: lambda c: np.ceil(c - 0.5),
    1: lambda c: np.floor(c + 0.5),
    2: np.floor,
    3: np.ceil,
}


@sizing("shape")
@lift
def resize(
    input: Any, shape: Iterable[Any], interpolation: InterpolationMode = InterpolationMode.BILINEAR
) -> Any:
    """Resizes an image ``[N, C, H, W]``.

    Args:
        shape: the four sizes of the result.
        interpolation: nearest, bilinear or bicubic, with half-pixel centres (torch's
            ``align_corners=False``) and without antialiasing.

    Raises:
        ValueError: the input does not have four axes, or there are not four sizes.
    """
    x, sizes = array(input), list(shape)
    if x.ndim != 4 or len(sizes) != 4:
        raise ValueError(f"resize takes [N, C, H, W] and four sizes, not {x.shape} and {sizes}")
    return _RESIZERS[InterpolationMode(interpolation)](x, sizes)


@sizing("size")
@lift
def resize_nearest(
    input: Any, size: Iterable[Any], coordinate_transform_mode: int = 0, round_mode: int = 0
) -> Any:
    """Resizes a tensor by nearest-neighbour interpolation.

    Args:
        size: size of each axis of the result.
        coordinate_transform_mode: 0 for half-pixel centres, 1 for aligned corners, 2 for asymmetric; 3
            is like 0 except for axes of length 1.
        round_mode: rounding of coordinates: 0 for ties down, 1 for ties up, 2 for floor, 3 for ceil.

    Raises:
        ValueError: the number of sizes is wrong, or a mode is unknown.
    """

    def along(x: jax.Array, axis: int, new: int) -> jax.Array:
        coordinates = _ROUNDINGS[one_of("round_mode", round_mode, _ROUNDINGS)](
            _coordinates(x, axis, new, coordinate_transform_mode)
        )
        return jnp.take(x, _clamped(coordinates, x.shape[axis]), axis)

    return _resized(array(input), size, along, "resize_nearest")


@sizing("size")
@lift
def resize_linear(
    input: Any, size: Iterable[Any], coordinate_transform_mode: int = 0, antialias: bool = False
) -> Any:
    """Resizes a tensor by linear interpolation.

    Args:
        size: size of each axis of the result.
        coordinate_transform_mode: mode as in ``resize_nearest``.
        antialias: whether to average the elements that a new element covers where an axis shrinks.

    Raises:
        ValueError: the number of sizes is wrong, or a mode is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.resize_linear(jnp.array([0.0, 2.0, 4.0]), [5], coordinate_transform_mode=1))
        [0. 1. 2. 3. 4.]
    """

    def along(x: jax.Array, axis: int, new: int) -> jax.Array:
        old = x.shape[axis]
        coordinate = _coordinates(x, axis, new, coordinate_transform_mode)
        if antialias and new < old:
            distance = np.abs(np.arange(old)[None, :] - coordinate[:, None]) / (old / new)
            weights = np.maximum(0.0, 1.0 - distance)
            weights = jnp.asarray(weights / weights.sum(1, keepdims=True), x.dtype)  # [new, old]
            y = jnp.tensordot(x, weights, ((axis,), (1,)), precision="highest")
            return jnp.moveaxis(y, -1, axis)
        coordinate = np.clip(coordinate, 0, old - 1)
        low = np.floor(coordinate)
        return _weighted_sum(x, axis, [(low, 1 - (coordinate - low)), (low + 1, coordinate - low)])

    x = floating(input, "resize_linear")
    return rounded(_resized(wide(x), size, along, "resize_linear"), x.dtype)


@sizing("size")
@lift
def resize_bicubic(input: Any, size: Iterable[Any]) -> Any:
    """Resizes a tensor by Keys' cubic convolution with ``a = -3/4``, as in torch.

    It uses half-pixel centres, repeats the edge elements, and does no antialiasing (R. Keys, IEEE Trans.
    ASSP 29 (1981) 1153).

    Raises:
        ValueError: the number of sizes is wrong.
    """

    def along(x: jax.Array, axis: int, new: int) -> jax.Array:
        coordinate = _coordinates(x, axis, new, 0)
        low = np.floor(coordinate)
        points = [low + k for k in (-1, 0, 1, 2)]
        return _weighted_sum(x, axis, [(p, _cubic(np.abs(coordinate - p))) for p in points])

    x = floating(input, "resize_bicubic")
    return rounded(_resized(wide(x), size, along, "resize_bicubic"), x.dtype)


def _cubic(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, far)


_RESIZERS: dict[InterpolationMode, Callable[..., Any]] = {
    InterpolationMode.NEAREST: resize_nearest,
    InterpolationMode.BILINEAR: resize_linear,
    InterpolationMode.BICUBIC: resize_bicubic,
}


def _resized(
    x: jax.Array, size: Iterable[Any], along: Callable[[jax.Array, int, int], jax.Array], op: str
) -> jax.Array:
    sizes = to_sizes(size, x.shape)
    if len(sizes) != x.ndim:
        raise ValueError(f"{op}: the {x.ndim} axes of {x.shape} need {x.ndim} sizes, not {sizes}")
    for axis, new in enumerate(sizes):
        if new is x.shape[axis] or new == x.shape[axis]:
            continue
        if not isinstance(new, int) or not isinstance(x.shape[axis], int):
            raise ValueError(
                f"{op}: axis {axis} is resized from {x.shape[axis]} to {new}, but both sizes must be known"
            )
        x = along(x, axis, new)
    return x


def _coordinates(x: jax.Array, axis: int, new: int, mode: int) -> np.ndarray:
    coordinates = _COORDINATES[one_of("coordinate_transform_mode", mode, _COORDINATES)]
    return coordinates(np.arange(new), x.shape[axis], new)


def _clamped(coordinates: np.ndarray, size: int) -> np.ndarray:
    return np.clip(coordinates, 0, size - 1).astype(np.int32)


def _weighted_sum(x: jax.Array, axis: int, terms: list[tuple[np.ndarray, np.ndarray]]) -> jax.Array:
    """The weighted sum of elements at several coordinates."""
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    parts = [
        jnp.take(x, _clamped(coordinate, x.shape[axis]), axis)
        * jnp.asarray(weight, x.dtype).reshape(shape)
        for coordinate, weight in terms
    ]
    return sum(parts[1:], start=parts[0])
