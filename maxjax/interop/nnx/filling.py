"""The arrays of a flax nnx module, made of the tensors of a checkpoint.

What is on disk and lies there as it is read by pieces, each device's own; the rest passes
through the host.
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
from ...storage.entry import Box, count, extents, whole
from ..layouts import Turn
from ..renaming import Function
from .variables import Target


@dataclass
class Filling:
    """One Variable and the tensors that it is made of, all of which fit.

    Attributes:
        target: The Variable.
        change: What is done to the tensors; None for nothing.
        sources: (name, data) of the tensor, or of each layer's where they are stacked. Of a
            WeightData the dtype is already the Variable's, or an integer to be checked.
    """

    target: Target
    change: Turn | Function | None
    sources: list[tuple[str, WeightData]] = field(default_factory=list)

    @property
    def in_pieces(self) -> bool:
        """Whether it can be read by pieces: what is on disk lies there in its own shape."""
        if isinstance(self.change, Function):
            return False
        return all(
            data._is_as_stored and data._decodes is None and data.dtype.np.itemsize
            for _, data in self.sources
        )

    # -- by pieces: what read_pieces asks of each

    def _boxes(self) -> list[Box]:
        sharding = self.target.sharding
        if sharding is None:
            return [whole(self.target.shape)]
        return list(boxes(sharding, self.target.shape))

    @property
    def is_direct(self) -> bool:
        """Whether what is read is what the devices will have, in the same memory."""
        sharding = self.target.sharding
        here = jax.default_backend() == "cpu" if sharding is None else is_host(sharding)
        _, data = self.sources[0]
        return here and self.change is None and data._stored_dtype == self.target.dtype

    @property
    def nbytes(self) -> int:
        """What its pieces take while they are on their way."""
        return sum(self._room(box) for box in self._boxes())

    def _room(self, box: Box) -> int:
        return sum(count(part) * data._stored_dtype.itemsize for data, part, _ in self._wanted(box))

    def empty(self) -> dict[Box, np.ndarray]:
        """Memory for the pieces as they are on the disk."""
        what = f"'{self.target.name}'"
        return {box: memory_for(self._room(box), what) for box in self._boxes()}

    def _wanted(self, box: Box) -> Iterator[tuple[WeightData, Box, Box]]:
        """Of a part of the array: (data, part of it, the part of the array that this is)."""
        if not isinstance(self.change, Turn):
            yield self.sources[0][1], box, box
            return
        axis = self.change.layout.stacks
        for number in range(1) if axis is None else range(*box[axis]):
            one = box if axis is None else (*box[:axis], (number, number + 1), *box[axis + 1 :])
            yield self.sources[number][1], self.change.file_box(one), one

    def parts(self, memory: dict[Box, np.ndarray]) -> Iterator[tuple[WeightData, Box, np.ndarray]]:
        """What is to be read into the memory."""
        for box, into in memory.items():
            start = 0
            for data, part, _ in self._wanted(box):
                nbytes = count(part) * data._stored_dtype.itemsize
                yield data, part, into[start : start + nbytes]
                start += nbytes

    def array(self, memory: dict[Box, np.ndarray]) -> jax.Array:
        """The array, of the memory once it is filled; ``memory`` is taken apart on the way."""
        pieces = {box: self._piece(box, memory.pop(box)) for box in list(memory)}
        target = self.target
        if target.sharding is None:
            return put(pieces[whole(target.shape)], None, target.name)
        return assemble(target.name, target.shape, target.sharding, pieces)

    def _piece(self, box: Box, memory: np.ndarray) -> np.ndarray:
        start, found = 0, []
        for data, part, one in self._wanted(box):
            nbytes = count(part) * data._stored_dtype.itemsize
            read = memory[start : start + nbytes].view(data._stored_dtype).reshape(extents(part))
            read = self.converted(data._cast(read))
            found.append(self.change.take(read, one) if isinstance(self.change, Turn) else read)
            start += nbytes
        return _joined(found, self.change)

    # -- by way of the host

    def host_array(self) -> jax.Array:
        """The array, where it cannot be read by pieces."""
        change, found = self.change, []
        for name, data in self.sources:
            # Of what is on disk nothing is kept: the data may be somebody's who has more of it.
            value = (
                data._cast(read_all([data])[id(data)]) if not data.is_loaded else host_or_jax(data)
            )
            if isinstance(change, Function):
                value = self._called(change, name, value)
            elif change is None and isinstance(value, jax.Array):
                if value.dtype == self.target.dtype:  # it cannot be changed by anybody: no copy
                    return put(value, self.target.sharding, self.target.name)
            value = self.converted(np.asarray(value))
            found.append(change.apply(value) if isinstance(change, Turn) else value)
        return self._placed(_joined(found, change))

    def _called(self, change: Function, name: str, value: Any) -> Any:
        value = change.there(value)
        shape = tuple(getattr(value, "shape", ()))
        if shape != self.target.shape:
            raise CheckpointMismatchError(
                f"what the function of the table makes of it does not fit '{self.target.name}'",
                tensor=name,
                expected=list(self.target.shape),
                found=list(shape),
            )
        return value

    def _placed(self, array: np.ndarray) -> jax.Array:
        sharding = self.target.sharding
        if sharding is None:
            return put(np.array(array, copy=True, order="C"), None, self.target.name)
        # Copies: JAX on a CPU would share memory that the user can write to.
        pieces = {box: np.array(array[slices(box)], copy=True, order="C") for box in self._boxes()}
        return assemble(self.target.name, array.shape, sharding, pieces)

    def converted(self, array: np.ndarray) -> np.ndarray:
        """The values in the Variable's dtype.

        Raises:
            CheckpointMismatchError: An integer that does not fit.
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
    """The layers' arrays along the axis of layers; the one array where there is none."""
    axis = change.layout.stacks if isinstance(change, Turn) else None
    return found[0] if axis is None else np.concatenate(found, axis=axis)


def arrays(fillings: Sequence[Filling]) -> list[jax.Array]:
    """All arrays; nothing of a module is changed by it.

    Raises:
        CheckpointError: A file that cannot be read.
        OutOfMemoryError: The host or a device cannot hold a piece.
    """
    with jax.ensure_compile_time_eval():  # they belong to no trace that happens to run
        by_pieces: Any = (one for one in fillings if one.in_pieces)
        read = read_pieces(by_pieces)
        return [next(read) if one.in_pieces else one.host_array() for one in fillings]
