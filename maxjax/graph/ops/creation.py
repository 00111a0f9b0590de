"""Ops that create tensors: constants, ranges, windows.

They always return TensorValues. ``device`` is accepted, as in MAX, but the result is not committed to it,
so it can be used with tensors on any device.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...dtype import DType
from ..operands import bounds, from_numpy, is_float, number
from ..shape import Dim, StaticDim
from ..symbolic import to_size
from ..value import TensorValue
from .lift import canonical, creator


def constant(value: Any, dtype: Any = None, device: Any = None) -> TensorValue:
    """A tensor with the given elements.

    Args:
        value: number, static Dim or nested lists of numbers, which need ``dtype`` and ``device``; or an array, which
            is copied.

    Raises:
        TypeError: a number or list is given without dtype or device, or something else is given.
        ValueError: lists have different lengths, the dtype cannot hold a number, or an array has
            another dtype.

    Example:
        >>> from maxjax.dtype import DType
        >>> from maxjax.graph import DeviceRef, ops
        >>> x = ops.constant([[1, 2], [3, 4]], DType.float32, DeviceRef.CPU())
        >>> x.dtype, x.shape
        (float32, [Dim(2), Dim(2)])
    """
    if isinstance(value, StaticDim):
        value = int(value)
    if isinstance(value, (int, float, list, tuple, builtins.range, np.generic)):
        if dtype is None or device is None:
            raise TypeError("ops.constant of a number or list needs its dtype and device: "
                            "ops.constant(1.0, DType.float32, DeviceRef.CPU())")  # fmt: skip
        return TensorValue(_made(_literal(value, DType.of(dtype))))
    if not hasattr(value, "dtype") and not hasattr(value, "__dlpack__"):
        raise TypeError(
            f"ops.constant takes a number, lists of numbers or an array, not {type(value).__name__}"
        )
    found = value
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | jax.Array | TensorValue):
        from ..weights.given import host_or_jax  # torch's arrays too, in all of its dtypes

        found = host_or_jax(value)
    kind = DType.of(found.dtype)
    if dtype is not None and DType.of(dtype) is not kind and canonical(dtype) != found.dtype:
        raise ValueError(
            f"ops.constant: the array is {kind!r}, not {DType.of(dtype)!r}; cast it first"
        )
    return TensorValue(_made(found) if isinstance(found, np.ndarray) else jnp.array(found))


def _made(array: np.ndarray) -> jax.Array:
    """A jax.Array; an array of integers stays concrete while a program is traced, as it may determine sizes."""
    known = array.ndim and array.dtype.kind in "iu"
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        return jnp.array(from_numpy(array))


def _literal(value: Any, dtype: DType) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"ops.constant: the lists in {value!r} have different lengths") from error
    if not (
        array.dtype.kind in "biufcV" or all(isinstance(x, int | float | Dim) for x in array.flat)
    ):
        raise TypeError(f"ops.constant takes numbers, not {value!r}")
    return _exact(array, dtype, "ops.constant", value)


def _exact(array: np.ndarray, dtype: Any, op: str, shown: Any) -> np.ndarray:
    """Numbers in a dtype: rounded for floats, exact for others.

    Raises:
        ValueError: a number does not fit in the dtype.
    """
    target = canonical(dtype)
    if array.dtype.kind == "c" and target.kind != "c":
        raise ValueError(
            f"unsafe cast: {op} of {shown!r}, complex numbers, does not fit in {target}"
        )
    if array.size and not is_float(target):
        low, high = (0, 1) if target == np.bool_ else bounds(target)
        if array.dtype.kind == "f" or array.min() < low or array.max() > high:
            raise ValueError(
                f"unsafe cast: {op} of {shown!r} does not fit in {target}, which holds integers from {low} to {high}"
            )
    with np.errstate(over="ignore"):  # as in MAX, what is too large for a float is infinite
        return array.astype(target)


@creator
def range(
    start: Any,
    stop: Any,
    step: Any = 1,
    out_dim: Any = None,
    *,
    dtype: Any,
    device: Any,
) -> Any:
    """``start``, ``start + step``, … up to but excluding ``stop``: ``⌈(stop - start) / step⌉`` numbers.

    Args:
        start, stop, step: numbers, Dims, or tensors of one number.
        out_dim: number of elements; required if an argument is a tensor.

    Raises:
        ValueError: the step is 0, ``out_dim`` is missing or wrong, or a number does not fit in the dtype.

    Example:
        >>> from maxjax.dtype import DType
        >>> from maxjax.graph import DeviceRef, ops
        >>> print(ops.range(0, 5, 2, dtype=DType.int32, device=DeviceRef.CPU()).value)
        [0 2 4]
    """
    ends = [to_size(x) if isinstance(x, (Dim, str)) else x for x in (start, stop, step)]
    length = None if any(isinstance(x, Tracer) for x in ends) else _length(*ends)
    if out_dim is None and (length is None or any(isinstance(x, jax.Array) for x in ends)):
        raise ValueError("ops.range of tensors, or of floats and a named size, needs out_dim, "
                         "the number of its elements")  # fmt: skip
    if out_dim is not None and (length is None or not isinstance(out_dim, str)):
        size = to_size(out_dim)
        if isinstance(size, int) and all(isinstance(x, int) for x in ends) and size != length:
            raise ValueError(
                f"ops.range from {start} to {stop} has {length} numbers, not out_dim={out_dim}"
            )
        length = size
    kind = canonical(dtype)
    if isinstance(length, int) and all(isinstance(x, (int, float)) for x in ends):
        # In NumPy with full precision, rounded once.
        numbers = ends[0] + ends[2] * np.arange(length)
        if any(isinstance(x, float) for x in ends):
            numbers = numbers.astype(np.float64)
        return jnp.asarray(_exact(numbers, kind, "ops.range", tuple(ends)))
    for end in ends:
        number(end, kind) if isinstance(end, (int, float)) else None
    first, _, by = (jnp.asarray(x).reshape(()).astype(kind) for x in ends)
    return first + by * jnp.arange(length, dtype=kind)


def _length(start: Any, stop: Any, step: Any) -> Any:
    """The number of elements; None for floats beside a symbolic size."""
    ends = [x.item() if isinstance(x, jax.Array) else x for x in (start, stop, step)]
    start, stop, step = ends
    if isinstance(step, (int, float)) and step == 0:
        raise ValueError("ops.range: the step must not be 0")
    if any(isinstance(x, float) for x in ends):
        if not all(isinstance(x, (int, float)) for x in ends):
            return None
        if not all(map(math.isfinite, ends)):
            raise ValueError(f"ops.range: the numbers must be finite, not {ends}")
        return max(0, math.ceil((stop - start) / step))
    length = -((start - stop) // step)
    return max(0, length) if isinstance(length, int) else length


def hann_window(
    window_length: int, device: Any, periodic: bool = True, dtype: Any = DType.float32
) -> TensorValue:
    """The Hann window, ``sin²(π n / N)`` for ``n`` from 0.

    Args:
        window_length: number of elements.
        periodic: whether ``N`` is the length, as for spectra; otherwise it is the length minus one,
            which makes the window symmetric.

    Raises:
        ValueError: the length is negative.
        TypeError: the length is not an integer.
    """
    length = operator.index(window_length)
    if length < 0:
        raise ValueError(f"hann_window: the length must not be negative, got {length}")
    period = max(length if periodic else length - 1, 1)
    window = np.sin(np.pi * np.arange(length) / period) ** 2 if length > 1 else np.ones(length)
    return TensorValue(jnp.asarray(window.astype(canonical(dtype))))
