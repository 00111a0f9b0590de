"""Values that a caller gives for a weight: dtype, shape and array of a value from any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...driver import Buffer
from ...dtype import DType
from ...errors import UserInputError
from .weight_data import WeightData, from_library


def dtype_of(value: Any) -> DType:
    """The element type of a value."""
    dtype = value.dtype if hasattr(value, "dtype") else np.from_dlpack(value).dtype
    name = str(dtype)
    return DType.of(name.removeprefix("torch.")) if name.startswith("torch.") else DType.of(dtype)


def shape_of(value: Any) -> Sequence[int]:
    """The shape of a value."""
    return value.shape if hasattr(value, "shape") else np.from_dlpack(value).shape


def data_of(name: str, value: Any) -> WeightData:
    """A value as a tensor of a checkpoint; nothing is copied.

    Raises:
        UserInputError: it is not an array, or of a dtype that maxjax does not support.
    """
    if isinstance(value, WeightData):
        return value
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
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array, which does not have a value everywhere")
    if isinstance(value, (np.ndarray, jax.Array)):
        return value
    if isinstance(value, (Buffer, np.generic)):
        return np.asarray(value)
    return from_library(value)
