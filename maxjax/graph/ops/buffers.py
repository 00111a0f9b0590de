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
    """The tensor in a buffer; stores that follow do not change it."""
    return x.load()


def buffer_store(destination: BufferValue, source: Any) -> None:
    """Puts a tensor into a buffer.

    Raises:
        ValueError: the dtype or the shape is another.
    """
    destination.store(source)


def buffer_store_slice(destination: BufferValue, source: Any, indices: Sequence[Any]) -> None:
    """Puts a tensor into a part of a buffer.

    Raises:
        ValueError: the dtype is another, or the shape is not that of the part.
    """
    destination.store(source, tuple(indices))
