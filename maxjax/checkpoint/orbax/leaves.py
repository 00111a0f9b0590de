"""The leaves to restore: the tensors that each is read from, its sharding, and the reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ...graph.placement.device_major import DeviceMajor
from ...graph.program import default_device
from ...graph.weight.stacked import StackedWeight
from ...graph.weights import WeightData
from ...graph.weights.device_reads import assemble, boxes, fill, is_host, memory_for, places
from ...storage.boxes import Box, count, extents

# Host memory, in bytes, that values on their way to devices take, approximately.
_STAGED_BYTES = 64 << 20


@dataclass(slots=True)
class Target:
    """One leaf of an example, and the tensors of the checkpoint that it is restored from.

    Attributes:
        example: the leaf.
        names: name of the tensor, or of those of the layers that are stacked in the leaf.
        shape: shape of each tensor.
        dtype: dtype of each tensor, and of the leaf.
        sharding: sharding of the leaf; None leaves it to JAX.
        layout: order of the devices in which the leaf is stored, or None for logical order.
        stacked: whether the leaf has an axis of layers.
        declared: 64-bit dtype of the weight, if JAX holds the leaf in 32 bits.
        data: the tensors of the checkpoint, one for each name.
        finish: function that the restored array is passed through, or None.
    """

    example: Any
    names: list[str]
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any = None
    layout: DeviceMajor | None = None
    stacked: bool = False
    declared: Any = None
    data: list[WeightData] = field(default_factory=list)
    finish: Callable[[Any], Any] | None = None

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Shape of the leaf, as it is held in memory."""
        shape = self.shape if self.layout is None else self.layout.shape(self.shape)
        return (len(self.names), *shape) if self.stacked else tuple(shape)

    @property
    def where(self) -> Any:
        """The Sharding of the leaf, or JAX's default device."""
        return self.sharding or jax.sharding.SingleDeviceSharding(default_device())

    @property
    def stored(self) -> Any:
        """The dtype on the disk."""
        return self.data[0].stored_dtype

    @property
    def on_its_way(self) -> int:
        """Bytes of host memory that it takes until it is on its devices."""
        if is_host(self.where) and self.stored == self.dtype:
            return 0
        size = np.dtype(self.stored).itemsize
        return sum(count(box) * size for box in boxes(self.where, self.leaf_shape))

    def memory(self) -> dict[Box, np.ndarray]:
        """Memory for its parts, in the dtype on the disk."""
        size, what = np.dtype(self.stored).itemsize, f"'{self.names[0]}'"
        return {
            box: memory_for(count(box) * size, what) for box in boxes(self.where, self.leaf_shape)
        }

    def parts(self, memory: Mapping[Box, np.ndarray]) -> Iterator[tuple[WeightData, Box, Any]]:
        """The reads that fill the memory: (tensor, box of it, array to read into)."""
        for box, into in memory.items():
            if not self.stacked:
                yield from ((self.data[0], *one) for one in places(self.layout, box, into))
                continue
            (first, last), *rest = box
            for i, layer in zip(range(first, last), np.split(into, last - first), strict=True):
                yield from ((self.data[i], *one) for one in places(self.layout, tuple(rest), layer))

    def value(self, memory: dict[Box, np.ndarray]) -> Any:
        """The leaf, made of the memory once that is filled."""
        found = {}
        for box in list(memory):
            read = memory.pop(box).view(self.stored).reshape(extents(box))
            found[box] = read if self.stored == self.dtype else read.astype(self.dtype)
        name = self.names[0]
        if isinstance(self.example, (np.ndarray, np.generic)):
            (array,) = found.values()
            value = array if isinstance(self.example, np.ndarray) else array[()]
        elif self.sharding is None:
            (array,) = found.values()
            value = jax.device_put(array)
        else:
            value = assemble(name, self.leaf_shape, self.sharding, found)
        return value if self.finish is None else self.finish(value)


def read_targets(targets: Mapping[int, Target]) -> Iterator[tuple[int, Any]]:
    """Read the targets in batches, and yield each one's number and leaf.

    Raises:
        CheckpointError: a file cannot be read.
        OutOfMemoryError: the host or a device cannot hold a leaf.
    """
    for batch in _batches(targets):
        memories = {number: target.memory() for number, target in batch}
        fill([part for n, target in batch for part in target.parts(memories[n])])
        for number, target in batch:
            yield number, target.value(memories[number])


def _batches(targets: Mapping[int, Target]) -> Iterator[list[tuple[int, Target]]]:
    batch: list[tuple[int, Target]] = []
    staged = 0
    for number, target in targets.items():
        if batch and staged + target.on_its_way > _STAGED_BYTES:
            yield batch
            batch, staged = [], 0
        batch.append((number, target))
        staged += target.on_its_way
    if batch:
        yield batch


def of_holder(prefix: str, name: str, holder: Any, leaf: Any) -> Target:
    """The target for a leaf of a Module: a Weight's, or that of a stack of several layers."""
    stacked = isinstance(holder, StackedWeight)
    template = holder.template if stacked else holder
    layout = template.stored.layout
    names, shape = [name], tuple(leaf.shape)
    if stacked:
        names = [holder.span.name(name, i) for i in range(holder.span.count)]
        shape = shape[1:]
    if layout is not None:
        shape = (math.prod(shape[:2]), *shape[2:])
    declared = template.stored.dtype.np
    narrowed = declared != leaf.dtype and jax.dtypes.canonicalize_dtype(declared) == leaf.dtype
    sharding = sharding_of(leaf)
    if sharding is None and type(leaf) is jax.ShapeDtypeStruct:
        sharding = holder.stored.leaf_sharding
    return Target(
        leaf,
        [prefix + one for one in names],
        shape,
        np.dtype(leaf.dtype),
        sharding,
        layout,
        stacked,
        declared if narrowed else None,
    )


def sharding_of(leaf: Any) -> Any:
    """The sharding of a leaf; None if JAX chose the device."""
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)
