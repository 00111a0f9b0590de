"""Values that a caller gives for a weight: dtype, shape and array of a value from any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...driver import Buffer
from ...dtype import DType
from ...errors import UserInputError
from .weight_data import WeightData, from_library, is_torch


def dtype_of(value: Any) -> DType:
    """The element type of a value."""
    return DType.of(value.dtype if hasattr(value, "dtype") else np.from_dlpack(value).dtype)


def shape_of(value: Any) -> Sequence[int]:
    """The shape of a value."""
    return value.shape if hasattr(value, "shape") else np.from_dlpack(value).shape


def unreadable(value: Any) -> str:
    """What keeps the values of an array from being read, as the end of "it is …"; "" for nothing."""
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array: value.filled(number) has a value everywhere"
    if not is_torch(value):
        return ""
    if type(value).__name__.startswith("Uninitialized"):
        return "an uninitialized parameter of torch, which has no values"
    if value.is_meta:
        return "a tensor on torch's meta device, which has no values: load the torch module onto a CPU first"
    if value.is_nested:
        return "a nested tensor of torch, which has no shape"
    if str(value.layout) != "torch.strided":
        kind = str(value.layout).removeprefix("torch.").strip("_")
        return f"a {kind} tensor of torch: value.to_dense() is a dense one"
    return ""


def data_of(name: str, value: Any) -> WeightData:
    """A value as a tensor of a checkpoint; nothing is copied.

    Raises:
        UserInputError: it is not an array that can be read, or of a dtype that maxjax does not support.
    """
    if isinstance(value, WeightData):
        return value
    if problem := unreadable(value):
        raise UserInputError(f"'{name}' is {problem}")
    try:
        return WeightData(host_or_jax(value), name, dtype_of(value), tuple(shape_of(value)))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserInputError(
            f"'{name}' is a {type(value).__name__}, not an array of a dtype that maxjax supports"
        ) from error


def host_or_jax(value: Any) -> Any:
    """The value as a NumPy array if its bytes are on the host, else as a jax.Array.

    Data that is still on disk is read, but the WeightData does not keep it.
    """
    if isinstance(value, WeightData):
        if value.source is not None and not value.is_loaded:
            return value.cast(value.source.read(value.name))
        value = value.typed()
    if problem := unreadable(value):
        raise TypeError(problem)
    if isinstance(value, (np.ndarray, jax.Array)):
        return value
    if isinstance(value, (Buffer, np.generic)):
        return np.asarray(value)
    return from_library(value)
