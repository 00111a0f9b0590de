"""Ops on BufferValues, the tensors that a program writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..buffer import BufferValue
from ..tensor_type import BufferType
from ..value import TensorValue


def buffer_create(type: BufferType) -> BufferValue:
    """A new buffer of a type, filled with zeros.

    Example:
        >>> from maxjax.graph import BufferType, DeviceRef
        >>> buffer = buffer_create(BufferType("int32", (2,), DeviceRef.CPU()))
        >>> buffer_store_slice(buffer, 7, [slice(1, None)])
        >>> print(buffer_load(buffer).value)
        [0 7]
    """
    kind = type.to_jax()
    return BufferValue(jnp.zeros(kind.shape, kind.dtype))


def buffer_load(x: BufferValue) -> TensorValue:
    """The present value of a buffer as a tensor; later stores do not change it."""
    return x.load()


def buffer_store(destination: BufferValue, source: Any) -> None:
    """Stores a tensor in a buffer.

    Raises:
        ValueError: the dtype or the shape differs from that of the buffer.
    """
    destination.store(source)


def buffer_store_slice(destination: BufferValue, source: Any, indices: Sequence[Any]) -> None:
    """Stores a tensor in a part of a buffer.

    Raises:
        ValueError: the dtype differs from that of the buffer, or the shape from that of the part.
    """
    destination.store(source, tuple(indices))
