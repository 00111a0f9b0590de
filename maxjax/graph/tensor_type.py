"""TensorType and BufferType: the dtype, shape and device of a tensor without a value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Self

import jax

from ..driver import Device
from ..dtype import DType
from .device import DeviceRef
from .shape import Dim, Shape, StaticDim, SymbolicDim
from .symbolic import to_sizes


class Type:
    """Base class of TensorType and BufferType: an element type, a shape and a device.

    Args:
        dtype: a DType, or anything that converts to one.
        shape: sizes; a string is a symbolic dimension.
        device: device of the tensor, a DeviceRef or a Device of ``maxjax.driver``.

    Raises:
        TypeError: a size is negative, or the device is of another type.
    """

    __slots__ = ("_dims", "device", "dtype")

    def __init__(self, dtype: Any, shape: Iterable[Any], device: DeviceRef | Device):
        self.dtype = DType.of(dtype)
        self._dims: tuple[Dim, ...] = tuple(Shape(shape))
        if any(isinstance(dim, StaticDim) and int(dim) < 0 for dim in self._dims):
            raise TypeError(f"sizes must not be negative, but the shape is {list(self._dims)}")
        self.device = DeviceRef.from_device(device)

    @property
    def shape(self) -> Shape:
        """The sizes, a new Shape at each access."""
        return Shape(self._dims)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._dims)

    @property
    def parameters(self) -> Iterable[SymbolicDim]:
        """The symbolic dimensions in the shape."""
        return self.shape.parameters

    def num_elements(self) -> int:
        """The product of the sizes.

        Raises:
            RuntimeError: a size is symbolic.
        """
        if not self.is_static:
            raise RuntimeError(f"{self!r} has symbolic sizes, so it has no number of elements yet")
        return math.prod(map(int, self._dims))

    def cast(self, dtype: Any) -> Self:
        """The same type with another element type."""
        return type(self)(dtype, self._dims, self.device)

    def to_jax(self) -> jax.ShapeDtypeStruct:
        """The type as a ShapeDtypeStruct; symbolic dimensions must be those of the Graph being traced."""
        dtype = jax.dtypes.canonicalize_dtype(self.dtype.np)
        return jax.ShapeDtypeStruct(to_sizes(self._dims), dtype)

    @property
    def is_static(self) -> bool:
        """Whether every size is known."""
        return all(isinstance(dim, StaticDim) for dim in self._dims)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return (self.dtype, self._dims, self.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dtype={self.dtype!r}, shape={self.shape!r}, device={self.device})"


class TensorType(Type):
    """Element type, shape and device of a tensor. Hashable, compared by content.

    Args:
        dtype: a DType, or anything that converts to one.
        shape: sizes; a string is a symbolic dimension.
        device: device of the tensor.

    Example:
        >>> from maxjax.graph import DeviceRef, TensorType
        >>> TensorType("float32", ("batch", 4), DeviceRef.CPU())
        TensorType(dtype=float32, shape=[Dim('batch'), Dim(4)], device=cpu:0)
    """

    __slots__ = ()

    def as_buffer(self) -> BufferType:
        """The type of a buffer that holds such a tensor."""
        return BufferType(self.dtype, self._dims, self.device)


class BufferType(Type):
    """Type of a tensor that a Graph writes to: the input is a :class:`~maxjax.graph.buffer.BufferValue`.

    Args:
        dtype, shape, device: as for :class:`TensorType`.
    """

    __slots__ = ()

    def as_tensor(self) -> TensorType:
        """The type of the tensor in the buffer."""
        return TensorType(self.dtype, self._dims, self.device)
