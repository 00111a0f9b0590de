"""Resizing: each axis whose size changes is read at fractional places, one after another."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..symbolic import to_sizes
from .lift import array, floating, lift, rounded, wide


class InterpolationMode(enum.Enum):
    """How ``resize`` reads between elements."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


# Where in the input the centre of each output element lies: (output index, sizes) → place.
_Places = Callable[[np.ndarray, int, int], np.ndarray]


def _half_pixel(i: np.ndarray, size: int, new: int) -> np.ndarray:
    return (i + 0.5) * size / new - 0.5


# MAX's numbers: half_pixel, align_corners, asymmetric, half_pixel_1D.
_COORDINATES: dict[int, _Places] = {
    0: _half_pixel,
    1: lambda i, size, new: i * (size - 1) / max(new - 1, 1),
    2: lambda i, size, new: i * size / new,
    3: lambda i, size, new: _half_pixel(i, size, new) if new > 1 else np.zeros(1),
}
# half_down, half_up, floor, ceil.
_ROUNDINGS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    0: lambda c: np.ceil(c - 0.5),
    1: lambda c: np.floor(c + 0.5),
    2: np.floor,
    3: np.ceil,
}


@lift
def resize(
    input: Any, shape: Iterable[Any], interpolation: InterpolationMode = InterpolationMode.BILINEAR
) -> Any:
    """Resizes an image ``[N, C, H, W]``.

    Args:
        shape: all four sizes of the result.
        interpolation: nearest, bilinear or bicubic, with the centres of elements at halves
            (torch's ``align_corners=False``, no antialiasing).

    Raises:
        ValueError: not four axes, or not four sizes.
    """
    x, sizes = array(input), list(shape)
    if x.ndim != 4 or len(sizes) != 4:
        raise ValueError(f"resize takes [N, C, H, W] and four sizes, not {x.shape} and {sizes}")
    return _RESIZERS[InterpolationMode(interpolation)](x, sizes)


@lift
def resize_nearest(
    input: Any, size: Iterable[Any], coordinate_transform_mode: int = 0, round_mode: int = 0
) -> Any:
    """A tensor in another size, of elements next to each place.

    Args:
        size: a size for each axis.
        coordinate_transform_mode: 0 half-pixel centres, 1 aligned corners, 2 asymmetric,
            3 as 0 but for axes of length 1.
        round_mode: 0 halves down, 1 halves up, 2 floor, 3 ceil.

    Raises:
        ValueError: not a size for each axis, or no such mode.
    """

    def along(x: jax.Array, axis: int, new: int) -> jax.Array:
        places = _choose(_ROUNDINGS, round_mode, "round_mode")(
            _place(x, axis, new, coordinate_transform_mode)
        )
        return jnp.take(x, _clamped(places, x.shape[axis]), axis)

    return _resized(array(input), size, along, "resize_nearest")


@lift
def resize_linear(
    input: Any, size: Iterable[Any], coordinate_transform_mode: int = 0, antialias: bool = False
) -> Any:
    """A tensor in another size, linear between elements.

    Args:
        size: a size for each axis.
        coordinate_transform_mode: as for ``resize_nearest``.
        antialias: an axis made shorter is averaged over what one new element covers.

    Raises:
        ValueError: not a size for each axis, or no such mode.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> print(ops.resize_linear(jnp.array([0.0, 2.0, 4.0]), [5], coordinate_transform_mode=1))
        [0. 1. 2. 3. 4.]
    """

    def along(x: jax.Array, axis: int, new: int) -> jax.Array:
        old = x.shape[axis]
        place = _place(x, axis, new, coordinate_transform_mode)
        if antialias and new < old:
            distance = np.abs(np.arange(old)[None, :] - place[:, None]) / (old / new)
            weights = np.maximum(0.0, 1.0 - distance)
            weights = jnp.asarray(weights / weights.sum(1, keepdims=True), x.dtype)  # [new, old]
            y = jnp.tensordot(x, weights, ((axis,), (1,)), precision="highest")
            return jnp.moveaxis(y, -1, axis)
        place = np.clip(place, 0, old - 1)
        low = np.floor(place)
        return _mixed(x, axis, [(low, 1 - (place - low)), (low + 1, place - low)])

    x = floating(input, "resize_linear")
    return rounded(_resized(wide(x), size, along, "resize_linear"), x.dtype)


@lift
def resize_bicubic(input: Any, size: Iterable[Any]) -> Any:
    """A tensor in another size, by Keys' cubic with ``a = -3/4``, as in torch.

    Half-pixel centres, the outermost elements repeated beyond the edge, no antialiasing
    (R. Keys, IEEE Trans. ASSP 29 (1981) 1153).

    Raises:
        ValueError: not a size for each axis.
    """

    def along(x: jax.Array, axis: int, new: int) -> jax.Array:
        place = _place(x, axis, new, 0)
        low = np.floor(place)
        return _mixed(x, axis, [(low + k, _cubic(np.abs(place - low - k))) for k in (-1, 0, 1, 2)])

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
        raise ValueError(f"{op}: a size for each of the {x.ndim} axes of {x.shape}, not {sizes}")
    for axis, new in enumerate(sizes):
        if new is x.shape[axis] or new == x.shape[axis]:
            continue
        if not isinstance(new, int) or not isinstance(x.shape[axis], int):
            raise ValueError(
                f"{op}: axis {axis} goes from {x.shape[axis]} to {new}: both must be known"
            )
        x = along(x, axis, new)
    return x


def _place(x: jax.Array, axis: int, new: int, mode: int) -> np.ndarray:
    places = _choose(_COORDINATES, mode, "coordinate_transform_mode")
    return places(np.arange(new), x.shape[axis], new)


def _choose(table: dict[int, Any], key: int, name: str) -> Any:
    if key not in table:
        raise ValueError(f"{name} is one of {', '.join(map(str, table))}, not {key!r}")
    return table[key]


def _clamped(places: np.ndarray, size: int) -> np.ndarray:
    return np.clip(places, 0, size - 1).astype(np.int32)


def _mixed(x: jax.Array, axis: int, terms: list[tuple[np.ndarray, np.ndarray]]) -> jax.Array:
    """The sum of elements at some places, each times its weight."""
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    parts = [
        jnp.take(x, _clamped(place, x.shape[axis]), axis)
        * jnp.asarray(weight, x.dtype).reshape(shape)
        for place, weight in terms
    ]
    return sum(parts[1:], start=parts[0])
