"""Written for files of Modular MAX: casts of Buffers, at MAX's path.

maxjax itself does not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..driver import Buffer, Device
from ..dtype import DType


def cast_tensor_to(tensor: Buffer, new_dtype: Any, session: Any = None) -> Buffer:
    """A Buffer cast to another dtype; the Buffer itself if it already has this dtype.

    Args:
        tensor: the Buffer.
        new_dtype: DType of the result.
        session: ignored; MAX compiles a program for the cast in it.

    Example:
        >>> cast_tensor_to(Buffer.from_numpy(np.array([1.5, -2.0], np.float32)), DType.int32).to_numpy()
        array([ 1, -2], dtype=int32)
    """
    dtype = DType.of(new_dtype)
    if tensor.dtype == dtype:
        return tensor
    return Buffer.from_numpy(np.asarray(tensor).astype(dtype.np))


def cast_dlpack_to(
    raw_tensor: Any, old_dtype: Any, new_dtype: Any, device: Device, session: Any = None
) -> Buffer:
    """An array of any library, as a Buffer cast to another dtype.

    Args:
        raw_tensor: an array that supports DLPack.
        old_dtype: DType of its elements. If the array reports another dtype of the same size, its bytes are
            reinterpreted as this one.
        new_dtype: DType of the result.
        device: device of the result, which must be the host.
        session: ignored.
    """
    tensor = Buffer.from_dlpack(raw_tensor)
    if tensor.dtype != DType.of(old_dtype):
        tensor = tensor.view(old_dtype, tensor.shape)
    return cast_tensor_to(tensor.to(device), new_dtype)


def cast_tensors_to(
    tensors: Sequence[Buffer] | None, new_dtype: Any, session: Any = None
) -> list[Buffer]:
    """:func:`cast_tensor_to` of each Buffer of a list."""
    return [cast_tensor_to(one, new_dtype) for one in tensors or ()]
