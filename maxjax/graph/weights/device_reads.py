"""Destination: an array that is read from disk, each device's part into memory of its own.

A device receives only its own bytes, directly from the host, which never holds a whole tensor that
is split. Loading, restoring and the modules of other libraries all read through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ...dtype import DType
from ...errors import OutOfMemoryError
from ...storage.boxes import Box, count, extents, whole, within
from ...storage.files import ALIGNMENT, aligned_empty, run, run_jobs
from ...storage.parts import Part
from ..placement.arrays import default_device, out_of_memory, put
from ..placement.device_major import DeviceMajor
from .reshaped import in_file
from .weight_data import WeightData, cast_array

# Maximum host memory for values that wait to be converted or sent to a device.
STAGED_BYTES = 32 << 20
# Values that are cast at a time: they stay in the cache of a core.
_CAST_VALUES = 1 << 18


def is_spread(sharding: Any) -> bool:
    """Whether a Sharding has several devices, or devices of another process."""
    return sharding is not None and (
        len(sharding.device_set) > 1 or not sharding.is_fully_addressable
    )


def boxes(sharding: Any, shape: Sequence[int]) -> dict[Box, list[Any]]:
    """The parts that this process's devices hold: part of the array → the devices that have it.

    Example:
        >>> import jax
        >>> boxes(jax.sharding.SingleDeviceSharding(jax.devices()[0]), (2, 3))
        {((0, 2), (0, 3)): [CpuDevice(id=0)]}
    """
    found: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        found.setdefault(box_of(index, shape), []).append(device)
    return found


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box for an index into a shape, as JAX gives it for the part of a device.

    Example:
        >>> box_of((slice(None), slice(1, 2)), (4, 3))
        ((0, 4), (1, 2))
    """
    pairs = zip(index, shape, strict=True)
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in pairs)


def is_host(sharding: Any) -> bool:
    """Whether the Sharding's devices in this process are all CPUs, for which JAX uses host memory as it is."""
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def assemble(
    name: str, shape: Sequence[int], sharding: Any, pieces: Mapping[Box, np.ndarray]
) -> jax.Array:
    """The array made of pieces, one for each box; JAX may keep their memory, so nobody else may write to it.

    Raises:
        OutOfMemoryError: a device cannot hold its piece.
    """
    kind = sharding.memory_kind
    arrays, dtype = [], None
    for box, devices in boxes(sharding, shape).items():
        dtype = pieces[box].dtype
        for device in devices:
            one = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
            try:
                arrays.append(jax.device_put(pieces[box], one))
            except jax.errors.JaxRuntimeError as error:
                raise out_of_memory(error, name, shape, dtype, sharding) from error
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays, dtype=dtype)


def places(
    layout: DeviceMajor | None, box: Box, memory: np.ndarray
) -> Iterator[tuple[Box, np.ndarray]]:
    """The parts of the tensor that a stored box consists of, with the memory for each.

    In memory the parts follow each other. For a layout of columns, :func:`in_order` rearranges them afterwards.
    """
    if layout is None:
        yield box, memory
        return
    before, (first, last), after = box[: layout.axis], box[layout.axis], box[layout.axis + 2 :]
    rows = [rows for device in range(first, last) for rows in layout.rows(device)]
    width = len(memory) // max(sum(stop - start for start, stop in rows), 1)
    offset = 0
    for start, stop in rows:
        size = (stop - start) * width
        yield (*before, (start, stop), *after), memory[offset : offset + size]
        offset += size


def in_order(layout: DeviceMajor | None, read: np.ndarray, box: Box) -> np.ndarray:
    """The values of a stored box in its order, after the parts that :func:`places` lists were read."""
    if layout is None or layout.axis == 0:
        return read.reshape(extents(box))
    parts = [part.reshape(extents(one)) for one, part in places(layout, box, read)]
    return np.concatenate(parts, axis=layout.axis).reshape(extents(box))


class Order(Protocol):
    """An arrangement of the values in the file that is not that of the array."""

    def file_box(self, box: Box) -> Box:
        """The box of the tensor to read for a box of the array."""
        ...

    def take(self, read: np.ndarray, box: Box) -> np.ndarray:
        """The values of a box of the array, from what was read of :meth:`file_box`."""
        ...


# A tensor on disk, of which boxes can be read; or a function that gives all values at once,
# converted and in stored order.
Source = WeightData | Callable[[], np.ndarray]
# (tensor, box of it, memory for the box).
Read = tuple[Any, Box, np.ndarray]


@dataclass(eq=False)
class Destination:
    """An array to read from disk. :func:`read_destinations` reads many of them.

    Attributes:
        name: name of the array, for errors.
        shape: shape of the stored array.
        dtype: NumPy dtype of the stored array.
        sources: what it is read from: one source, or one for each layer along ``axis``. Layers
            along several axes are in the order of the array.
        sharding: sharding of the stored array; None for JAX's default device.
        layout: order of the stored rows, if it is not the logical one.
        axis: axis of the layers; None if there is one source.
        levels: number of axes of the layers, from ``axis`` on: 2 for a stack of stacks.
        order: arrangement of each tensor's values in the file, if it is not that of the array.
        convert: function (number of the source, values) → values of ``dtype``, applied after the casts
            of the source. It must return values that have ``dtype`` already unchanged, because these
            may be read without it. None casts the values.
        elementwise: whether ``convert`` converts each value by itself.
        pieces: parts of the array that are filled so far, by the boxes that devices hold.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: Sequence[Source]
    sharding: Any = None
    layout: DeviceMajor | None = None
    axis: int | None = None
    levels: int = 1
    order: Order | None = None
    convert: Callable[[int, np.ndarray], np.ndarray] | None = None
    elementwise: bool = False
    pieces: dict[Box, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def where(self) -> Any:
        """The sharding of the stored array, also if it is JAX's default device."""
        return self.sharding or jax.sharding.SingleDeviceSharding(default_device())

    @cached_property
    def _boxes(self) -> list[Box]:
        return list(boxes(self.where, self.shape))

    def staged(self, number: int) -> int:
        """The bytes of temporary host memory that a source takes in addition to the memory of the array."""
        data = self.sources[number]
        if not isinstance(data, WeightData) or self._is_direct(number) and is_host(self.where):
            return 0
        return sum(self._nbytes(data, part) for _, part in self._parts(number))

    def memory(self, number: int, scratch: BatchMemory) -> dict[Box, np.ndarray]:
        """Memory to read a source into: its place in a stack if the bytes need no conversion, or else new memory.

        A source that is cast value by value is read into scratch memory.
        """
        data, found = self.sources[number], {}
        if not isinstance(data, WeightData):
            return found
        in_place, is_cast = self._is_in_place(number), self._is_cast(number)
        for box, part in self._parts(number):
            if in_place:
                found[part] = self._piece(box)[within(part, box)].reshape(-1).view(np.uint8)
            elif is_cast:
                found[part] = scratch.take(self._nbytes(data, part), self._new)
            else:
                found[part] = self._new(self._nbytes(data, part))
        return found

    def reads(self, number: int, memory: Mapping[Box, np.ndarray]) -> Iterator[Read]:
        """The reads that fill the memory."""
        for part, into in memory.items():
            for box, place in places(self.layout, self._tensor_box(part), into):
                yield self.sources[number], box, place

    def store(self, number: int, memory: dict[Box, np.ndarray]) -> None:
        """Stores a source's values in the array, once the memory is filled; empties ``memory``."""
        if self._is_in_place(number) or self._is_cast(number):
            memory.clear()  # it is the stack's, or was cast
            return
        values = self._values(number, memory)
        for (box, part), found in zip(self._parts(number), values, strict=True):
            if self.axis is None:
                self.pieces[box] = found
            else:
                self._piece(box)[within(part, box)] = found

    def casts(self, number: int, memory: Mapping[Box, np.ndarray]) -> Iterator[Cast]:
        """The elementwise casts of what was read of a source into its place; several threads may run them."""
        if not self._is_cast(number):
            return
        for box, part in self._parts(number):
            values = memory[part].view(self.sources[number].stored_dtype)
            place = self._piece(box)[(*within(part, box), ...)].reshape(-1)
            for i in range(0, len(values), _CAST_VALUES):
                yield Cast(self, number, values[i : i + _CAST_VALUES], place[i : i + _CAST_VALUES])

    def array(self) -> Any:
        """The array, once all sources are stored; it takes over the memory of the pieces."""
        pieces, self.pieces = self.pieces, {}
        if self.sharding is not None:
            return assemble(self.name, self.shape, self.sharding, pieces)
        (piece,) = pieces.values()
        return put(piece, None, self.name)

    # -- which part of which tensor, and its values

    def _parts(self, number: int) -> Iterator[tuple[Box, Box]]:
        """The boxes of devices that a source contributes to, each with the part of the box that it fills."""
        axes = self._axes
        for box in self._boxes:
            layer = self._layer(box, number)
            spans = zip(layer[axes], box[axes], strict=True)
            if all(start <= index < stop for (index, _), (start, stop) in spans):
                yield box, layer

    @property
    def _axes(self) -> slice:
        """The axes of the layers; none if there is one source."""
        start = self.axis or 0
        return slice(start, start if self.axis is None else start + self.levels)

    def _layer(self, box: Box, number: int) -> Box:
        """The part of a box that a source fills, if the box has any of it."""
        axes = self._axes
        if self.axis is None:
            return box
        index = np.unravel_index(number, self.shape[axes])
        return (*box[: axes.start], *((int(i), int(i) + 1) for i in index), *box[axes.stop :])

    def _tensor_box(self, part: Box) -> Box:
        """The box of a tensor, in stored order, that a part of the array is read from."""
        if self.order is not None:
            return self.order.file_box(part)
        axes = self._axes
        return (*part[: axes.start], *part[axes.stop :])

    def _is_direct(self, number: int) -> bool:
        """Whether a source's bytes on disk are those of the array, in its order."""
        data = self.sources[number]
        if not isinstance(data, WeightData) or data.casts or data.decodes is not None:
            return False
        return self._is_ordered() and data.stored_dtype == self.dtype

    def _is_ordered(self) -> bool:
        """Whether what is read of a source has the order of the array."""
        by_columns = self.layout is not None and self.layout.axis > 0
        return self.order is None and self.axis in (None, 0) and not by_columns

    def _is_in_place(self, number: int) -> bool:
        """Whether a source is read straight into its place in a stack."""
        return self.axis is not None and self._is_direct(number)

    def _is_cast(self, number: int) -> bool:
        """Whether a source's values lie in the order of the array, and only their type changes."""
        data = self.sources[number]
        if not isinstance(data, WeightData) or data.decodes is not None:
            return False
        by_value = self.convert is None or self.elementwise
        return by_value and self._is_ordered() and not self._is_direct(number)

    def _nbytes(self, data: WeightData, part: Box) -> int:
        return count(self._tensor_box(part)) * data.stored_dtype.itemsize

    def _new(self, nbytes: int) -> np.ndarray:
        """Host memory that JAX on a CPU can use without a copy."""
        try:
            return aligned_empty(nbytes)
        except MemoryError as error:
            many = f"the weights '{self.name}' of {len(self.sources)} layers"
            what = f"weight '{self.name}'" if self.axis is None else many
            raise OutOfMemoryError(
                f"the host has no {nbytes:,} bytes for {what}. "
                "maxjax.plan(model, mesh) shows what another mesh or dtype would need."
            ) from error

    def _piece(self, box: Box) -> np.ndarray:
        """A device's part of a stack."""
        if box not in self.pieces:
            memory = self._new(count(box) * self.dtype.itemsize)
            self.pieces[box] = memory.view(self.dtype).reshape(extents(box))
        return self.pieces[box]

    def _values(self, number: int, memory: dict[Box, np.ndarray]) -> Iterator[np.ndarray]:
        """The values of a source for each part of the array that it fills."""
        source = self.sources[number]
        if isinstance(source, WeightData):
            for part in list(memory):
                read = memory.pop(part).view(source.stored_dtype)
                read = source.cast(in_order(self.layout, read, self._tensor_box(part)))
                read = np.asarray(self._converted(number, read))
                yield self.order.take(read, part) if self.order else read.reshape(extents(part))
            return
        everything = self._layer(whole(self.shape), number)
        values = source().reshape(extents(everything))
        for _, part in self._parts(number):
            found = values[within(part, everything)]
            # JAX on a CPU would share memory that the user can write to.
            yield np.array(found, copy=True, order="C") if self.axis is None else found

    def _converted(self, number: int, read: np.ndarray) -> np.ndarray:
        if self.convert is not None:
            return self.convert(number, read)
        return read if read.dtype == self.dtype else cast_array(read, DType.of(self.dtype))


class Cast(NamedTuple):
    """A cast of some values of a source into their place."""

    destination: Destination
    number: int
    values: np.ndarray
    place: np.ndarray

    def run(self) -> None:
        """Casts the values."""
        source: Any = self.destination.sources[self.number]
        self.place[...] = self.destination._converted(self.number, source.cast(self.values))


class BatchMemory:
    """Host memory that is reused for each batch, because allocating memory costs more than reading into it."""

    def __init__(self) -> None:
        self._memory, self._used = np.empty(0, np.uint8), 0

    def begin(self, nbytes: int) -> None:
        """Starts a batch of ``nbytes``; memory of the previous batch, which is no longer in use, is reused."""
        self._used, self._wanted = 0, nbytes

    def take(self, nbytes: int, new: Callable[[int], np.ndarray]) -> np.ndarray:
        """Aligned memory of ``nbytes``; ``new`` allocates more if there is not enough."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > len(self._memory):
            self._memory, start = new(max(nbytes, self._wanted)), 0
        self._used = start + nbytes
        return self._memory[start : self._used]


def read_destinations(wanted: Iterable[Destination]) -> Iterator[Any]:
    """The arrays in order. Sources are read in batches that need at most STAGED_BYTES of temporary host memory.

    Raises:
        CheckpointError: a file cannot be read.
        OutOfMemoryError: the host or a device cannot hold an array.
    """
    scratch = BatchMemory()
    for batch in _batches(wanted):
        scratch.begin(sum(one.staged(number) for one, number in batch))
        memories = [one.memory(number, scratch) for one, number in batch]
        pairs = list(zip(batch, memories, strict=True))
        _fill([read for (one, number), memory in pairs for read in one.reads(number, memory)])
        casts = [cast for (one, number), memory in pairs for cast in one.casts(number, memory)]
        run_jobs(run, casts, sum(cast.place.nbytes for cast in casts))
        for (one, number), memory in pairs:
            one.store(number, memory)
            if number == len(one.sources) - 1:
                yield one.array()


def _batches(wanted: Iterable[Destination]) -> Iterator[list[tuple[Destination, int]]]:
    """The sources of all destinations, as (destination, number), in batches of at most STAGED_BYTES."""
    batch: list[tuple[Destination, int]] = []
    staged = 0
    for one in wanted:
        for number in range(len(one.sources)):
            nbytes = one.staged(number)
            if batch and staged + nbytes > STAGED_BYTES:
                yield batch
                batch, staged = [], 0
            batch.append((one, number))
            staged += nbytes
    if batch:
        yield batch


def _fill(reads: Sequence[Read]) -> None:
    """Reads parts of tensors into the memory for each, in parallel for each file."""
    by_source: dict[int, tuple[Any, list[Part]]] = {}
    for data, box, memory in reads:
        source, part = in_file(data.source, Part(data.name, box, memory))
        by_source.setdefault(id(source), (source, []))[1].append(part)
    for source, parts in by_source.values():
        source.read_parts(parts)
