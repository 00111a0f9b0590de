"""Reading the tensors of a checkpoint as the arrays of a flax nnx module.

Each device reads its own part of a tensor that is stored on disk in its own shape and dtype; other
tensors are made on the host first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ...dtype import DType
from ...errors import CheckpointMismatchError
from ...graph.placement.arrays import put
from ...graph.weights import WeightData, read_all
from ...graph.weights.device_reads import assemble, boxes, is_host, memory_for, read_pieces, slices
from ...graph.weights.given import host_or_jax
from ...storage.boxes import Box, count, extents, whole
from ..layouts import BoundLayout
from ..renaming import Function
from .variables import Target


@dataclass
class Filling:
    """One Variable and the tensors that it is made of, which fit it.

    Attributes:
        target: the Variable.
        change: conversion of the tensors; None for nothing.
        sources: (name, data) of the tensor, or of each layer's tensor if layers are stacked. The
            data's dtype is the Variable's, or an integer dtype whose values are still to be checked.
    """

    target: Target
    change: BoundLayout | Function | None
    sources: list[tuple[str, WeightData]] = field(default_factory=list)

    @property
    def in_pieces(self) -> bool:
        """Whether each device can read its own part: the file holds the tensor in its own shape."""
        if isinstance(self.change, Function):
            return False
        return all(
            data.is_as_stored and data.decodes is None and data.dtype.np.itemsize
            for _, data in self.sources
        )

    # -- each device's part from disk: the interface that read_pieces uses

    def _boxes(self) -> list[Box]:
        sharding = self.target.sharding
        if sharding is None:
            return [whole(self.target.shape)]
        return list(boxes(sharding, self.target.shape))

    @property
    def is_direct(self) -> bool:
        """Whether the memory that is read into becomes the array's, without a copy."""
        sharding = self.target.sharding
        here = jax.default_backend() == "cpu" if sharding is None else is_host(sharding)
        _, data = self.sources[0]
        return here and self.change is None and data.stored_dtype == self.target.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that its pieces take while they are read."""
        return sum(self._nbytes_of(box) for box in self._boxes())

    def _nbytes_of(self, box: Box) -> int:
        return sum(count(part) * data.stored_dtype.itemsize for data, part, _ in self._reads(box))

    def empty(self) -> dict[Box, np.ndarray]:
        """Memory for the pieces, in the dtype on the disk."""
        what = f"'{self.target.name}'"
        return {box: memory_for(self._nbytes_of(box), what) for box in self._boxes()}

    def _reads(self, box: Box) -> Iterator[tuple[WeightData, Box, Box]]:
        """For a box of the array: (tensor, box of the tensor to read, box of the array it fills)."""
        if not isinstance(self.change, BoundLayout):
            yield self.sources[0][1], box, box
            return
        axis = self.change.layout.stacks
        for number in range(1) if axis is None else range(*box[axis]):
            one = box if axis is None else (*box[:axis], (number, number + 1), *box[axis + 1 :])
            yield self.sources[number][1], self.change.file_box(one), one

    def parts(self, memory: dict[Box, np.ndarray]) -> Iterator[tuple[WeightData, Box, np.ndarray]]:
        """The reads that fill the memory: (tensor, box of it, array to read into)."""
        for box, into in memory.items():
            start = 0
            for data, part, _ in self._reads(box):
                nbytes = count(part) * data.stored_dtype.itemsize
                yield data, part, into[start : start + nbytes]
                start += nbytes

    def array(self, memory: dict[Box, np.ndarray]) -> jax.Array:
        """The array, made of the memory once that is filled; ``memory`` is emptied."""
        pieces = {box: self._piece(box, memory.pop(box)) for box in list(memory)}
        target = self.target
        if target.sharding is None:
            return put(pieces[whole(target.shape)], None, target.name)
        return assemble(target.name, target.shape, target.sharding, pieces)

    def _piece(self, box: Box, memory: np.ndarray) -> np.ndarray:
        start, found = 0, []
        for data, part, one in self._reads(box):
            nbytes = count(part) * data.stored_dtype.itemsize
            read = memory[start : start + nbytes].view(data.stored_dtype).reshape(extents(part))
            read = self.converted(data.cast(read))
            found.append(
                self.change.take(read, one) if isinstance(self.change, BoundLayout) else read
            )
            start += nbytes
        return _joined(found, self.change)

    # -- on the host

    def host_array(self) -> jax.Array:
        """The array, if its tensors have to be read completely."""
        change, found = self.change, []
        for name, data in self.sources:
            # Not data.data, which would keep the value: the data may belong to the caller.
            value = (
                data.cast(read_all([data])[id(data)]) if not data.is_loaded else host_or_jax(data)
            )
            if isinstance(change, Function):
                value = self._called(change, name, value)
            elif change is None and isinstance(value, jax.Array):
                if value.dtype == self.target.dtype:  # jax.Arrays are immutable: no copy is needed
                    return put(value, self.target.sharding, self.target.name)
            value = self.converted(np.asarray(value))
            found.append(change.apply(value) if isinstance(change, BoundLayout) else value)
        return self._on_devices(_joined(found, change))

    def _called(self, change: Function, name: str, value: Any) -> Any:
        value = change.there(value)
        shape = tuple(getattr(value, "shape", ()))
        if shape != self.target.shape:
            raise CheckpointMismatchError(
                f"the table's function makes an array of another shape than '{self.target.name}'",
                tensor=name,
                expected=list(self.target.shape),
                found=list(shape),
            )
        return value

    def _on_devices(self, array: np.ndarray) -> jax.Array:
        sharding = self.target.sharding
        if sharding is None:
            return put(np.array(array, copy=True, order="C"), None, self.target.name)
        # Copied, as JAX on a CPU would share memory that the user can write to.
        pieces = {box: np.array(array[slices(box)], copy=True, order="C") for box in self._boxes()}
        return assemble(self.target.name, array.shape, sharding, pieces)

    def converted(self, array: np.ndarray) -> np.ndarray:
        """The values in the Variable's dtype.

        Raises:
            CheckpointMismatchError: an integer is out of the dtype's range.
        """
        dtype = np.dtype(self.target.dtype)
        if array.dtype == dtype:
            return array
        if dtype.kind in "iu" and array.size:
            limits, least, most = np.iinfo(dtype), int(array.min()), int(array.max())
            if least < limits.min or most > limits.max:
                raise CheckpointMismatchError(
                    f"holds integers from {least} to {most}, which do not fit {dtype}",
                    tensor=self.sources[0][0],
                )
        data = WeightData(array, self.target.name, DType.of(array.dtype), array.shape)
        return data.astype(DType.of(dtype)).data


def _joined(found: Sequence[np.ndarray], change: Any) -> np.ndarray:
    """The layers' arrays, concatenated along the axis of layers; without one, the only array."""
    axis = change.layout.stacks if isinstance(change, BoundLayout) else None
    return found[0] if axis is None else np.concatenate(found, axis=axis)


def arrays(fillings: Sequence[Filling]) -> list[jax.Array]:
    """Read all arrays; the module is not changed.

    Raises:
        CheckpointError: a file cannot be read.
        OutOfMemoryError: the host or a device cannot hold a piece.
    """
    with jax.ensure_compile_time_eval():  # concrete arrays, even inside a trace
        by_pieces: Any = (one for one in fillings if one.in_pieces)
        read = read_pieces(by_pieces)
        return [next(read) if one.in_pieces else one.host_array() for one in fillings]
