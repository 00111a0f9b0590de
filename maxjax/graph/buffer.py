"""BufferValue: a tensor that a program can write to; its last value is an output of the program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .device import DeviceRef
from .operators import Value
from .shape import Shape
from .tensor_type import BufferType
from .value import TensorValue, unwrap


def _trace() -> Any:
    from jax.extend.core import get_opaque_trace_state  # slow to import: it imports Pallas

    return get_opaque_trace_state()


class BufferValue(Value):
    """A tensor whose elements can be replaced: ``b[i] = x``, ``ops.buffer_store(b, x)``.

    A store replaces the array of the buffer by a new array, for which XLA reuses the old memory where it can. A
    :class:`~maxjax.graph.Graph` gets a BufferValue for each input whose type is a BufferType. Its last value is an
    additional output of the program, after the others: pass it to the next call. In a function under ``jax.jit``,
    return ``b.value``.

    Args:
        value: a JAX or NumPy array, a TensorValue or another BufferValue.

    Attributes:
        value: present array of the buffer.

    Example:
        >>> buffer = BufferValue(jnp.zeros(3))
        >>> buffer[1] = 2.0
        >>> print(buffer[:2].value, buffer.type)
        [0. 2.] BufferType(dtype=float32, shape=[Dim(3)], device=cpu:0)
    """

    __iter__ = None

    def __init__(self, value: Any):
        self.value = TensorValue(value.value if isinstance(value, BufferValue) else value).value
        self._trace = _trace()

    @property
    def buffer(self) -> BufferValue:
        """This BufferValue itself."""
        return self

    @property
    def dtype(self) -> Any:
        """The element type."""
        return TensorValue(self.value).dtype

    @property
    def shape(self) -> Shape:
        """The sizes of the axes."""
        return TensorValue(self.value).shape

    @property
    def rank(self) -> int:
        """The number of axes."""
        return self.value.ndim

    @property
    def device(self) -> DeviceRef:
        """The device of the array."""
        return TensorValue(self.value).device

    @property
    def type(self) -> BufferType:
        """The dtype, shape and device."""
        return BufferType(self.dtype, self.shape, self.device)

    def load(self) -> TensorValue:
        """The present value as a tensor; later stores do not change it."""
        return TensorValue(self.value)

    def store(self, source: Any, index: Any = ...) -> None:
        """Replaces the elements at an index, by default all; a Python number is cast and broadcast.

        Raises:
            ValueError: the source has another dtype, or another shape than the elements at the index.
            NotImplementedError: the store is in a branch, a loop, a subgraph or a jitted function, and the buffer
                was made outside of it.
        """
        number = isinstance(source, bool | int | float)
        array = jnp.asarray(source, self.value.dtype) if number else TensorValue(source).value
        if array.dtype != self.value.dtype:
            raise ValueError(
                f"a buffer of {self.value.dtype} cannot store {array.dtype}; cast it first"
            )
        index = jax.tree.map(unwrap, index, is_leaf=lambda i: isinstance(i, TensorValue))
        there = jax.eval_shape(lambda x: x[index], self.value).shape
        if not number and array.shape != there:
            raise ValueError(
                f"a buffer cannot store a tensor of shape {list(array.shape)} where it has {list(there)}"
            )
        is_all = index is ... and not number
        new = array if is_all else self.value.at[index].set(array)
        if isinstance(new, Tracer) and _trace() != self._trace:
            raise NotImplementedError(
                "a buffer is written to in a branch, a loop, a subgraph or a jitted function, and belongs to the "
                "program around it: return the new value, and store it there"
            )
        self.value = new

    def __getitem__(self, index: Any) -> TensorValue:
        return TensorValue(self.value)[index]

    def __setitem__(self, index: Any, source: Any) -> None:
        self.store(source, index)

    def __repr__(self) -> str:
        return f"BufferValue(dtype={self.dtype!r}, shape={self.shape!r}, device={self.device})"


BufferValueLike = BufferValue | jax.Array
"""Type of an argument that is used as a BufferValue."""
