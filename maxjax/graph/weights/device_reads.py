"""Reads of sharded tensors: each device's piece comes directly from the disk.

A device gets only its own bytes, not by way of another device, and the host never holds a whole
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ...errors import OutOfMemoryError
from ...storage.boxes import Box, count, extents
from ...storage.files import aligned_empty
from ...storage.parts import Part
from ..placement.arrays import out_of_memory
from ..placement.device_major import DeviceMajor
from .weight_data import WeightData

# The most host memory for pieces that wait to be converted or sent to a device.
STAGED_BYTES = 32 << 20


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


def slices(box: Box) -> tuple[slice, ...]:
    """The index for a box."""
    return tuple(slice(start, stop) for start, stop in box)


def is_host(sharding: Any) -> bool:
    """Whether all devices of this process are CPUs, for which JAX reuses host memory."""
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def memory_for(nbytes: int, what: str) -> np.ndarray:
    """Host memory that JAX on a CPU can use without a copy.

    Raises:
        OutOfMemoryError: there is not so much memory.
    """
    try:
        return aligned_empty(nbytes)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"the host has no {nbytes:,} bytes for {what}. "
            "maxjax.plan(model, mesh) shows what another mesh or dtype would need."
        ) from error


def assemble(
    name: str, shape: Sequence[int], sharding: Any, pieces: Mapping[Box, np.ndarray]
) -> jax.Array:
    """The array made of pieces, one for each box, which nobody else holds.

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
    """The parts of the tensor that a stored box consists of, with the memory for each."""
    if layout is None:
        yield box, memory
        return
    (first, last), _, *rest = box
    rows = [rows for device in range(first, last) for rows in layout.rows(device)]
    width = len(memory) // max(sum(stop - start for start, stop in rows), 1)
    offset = 0
    for start, stop in rows:
        size = (stop - start) * width
        yield ((start, stop), *rest), memory[offset : offset + size]
        offset += size


class Pieces(NamedTuple):
    """A tensor of a checkpoint to read in pieces.

    Attributes:
        data: tensor, not read yet.
        name: name of the weight.
        sharding: sharding of the stored array.
        dtype: NumPy dtype of the stored array.
        convert: conversion of a piece as read, after the casts of ``data``.
        layout: order of the stored rows, if it is not the logical one.
    """

    data: WeightData
    name: str
    sharding: Any
    dtype: Any
    convert: Callable[[np.ndarray], Any]
    layout: DeviceMajor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole stored array."""
        sizes = tuple(int(size) for size in self.data.shape)
        return sizes if self.layout is None else self.layout.shape(sizes)

    @property
    def is_direct(self) -> bool:
        """Whether the devices use the memory that is read into, without conversion."""
        return self.data.stored_dtype == self.dtype and is_host(self.sharding)

    @property
    def nbytes(self) -> int:
        """The bytes that the pieces take on the host until they are on their devices."""
        itemsize = self.data.stored_dtype.itemsize
        return sum(count(box) * itemsize for box in boxes(self.sharding, self.shape))

    def empty(self) -> dict[Box, np.ndarray]:
        """Memory for the pieces in the form they have on the disk."""
        dtype = self.data.stored_dtype
        return {
            box: memory_for(count(box) * dtype.itemsize, f"weight '{self.name}'")
            for box in boxes(self.sharding, self.shape)
        }

    def parts(self, memory: dict[Box, np.ndarray]) -> Iterator[tuple[WeightData, Box, np.ndarray]]:
        """The reads that fill the memory."""
        for box, into in memory.items():
            for region, place in places(self.layout, box, into):
                yield self.data, region, place

    def array(self, memory: dict[Box, np.ndarray]) -> jax.Array:
        """The array made of the filled memory."""
        return assemble(self.name, self.shape, self.sharding, self.converted(memory))

    def converted(self, memory: dict[Box, np.ndarray]) -> dict[Box, np.ndarray]:
        """The pieces in the form the weight will have; empties ``memory``."""
        dtype, found = self.data.stored_dtype, {}
        for box in list(memory):
            read = memory.pop(box).view(dtype).reshape(extents(box))
            found[box] = np.asarray(self.convert(self.data.cast(read)))
        return found


def read_pieces(wanted: Iterable[Pieces]) -> Iterator[jax.Array]:
    """The arrays, in turn. A few are read at a time; those that need no temporary memory, all at once.

    Raises:
        CheckpointError: a file cannot be read.
        OutOfMemoryError: the host or a device cannot hold a piece.
    """
    for batch in _batches(wanted):
        memories = [one.empty() for one in batch]
        pairs = zip(batch, memories, strict=True)
        fill([part for one, memory in pairs for part in one.parts(memory)])
        for one, memory in zip(batch, memories, strict=True):
            yield one.array(memory)


def _batches(wanted: Iterable[Pieces]) -> Iterator[list[Pieces]]:
    batch: list[Pieces] = []
    staged = 0
    for one in wanted:
        nbytes = 0 if one.is_direct else one.nbytes
        if batch and staged + nbytes > STAGED_BYTES:
            yield batch
            batch, staged = [], 0
        batch.append(one)
        staged += nbytes
    if batch:
        yield batch


def fill(pieces: Sequence[tuple[WeightData, Box, np.ndarray]]) -> None:
    """Reads parts of tensors into the memory for each, in parallel for each file."""
    by_source: dict[int, tuple[Any, list[Part]]] = {}
    for data, box, memory in pieces:
        source = data.source
        parts = by_source.setdefault(id(source), (source, []))[1]
        parts.append(Part(data.name, box, memory))
    for source, parts in by_source.values():
        source.read_parts(parts)
