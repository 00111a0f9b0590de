"""The leaves of an example: what tensors they are made of, where they go, and the making."""

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
from ...storage.entry import Box, count, extents

# What is only on its way to devices takes about this much of the host's memory.
_STAGED_BYTES = 64 << 20


@dataclass(slots=True)
class Target:
    """One leaf of an example, and what the checkpoint has for it.

    Attributes:
        example: The leaf.
        names: Of the tensor, or of those of the layers that are stacked in the leaf.
        shape: Of each tensor.
        dtype: Of each tensor, and of the leaf.
        sharding: Where the leaf goes; None leaves it to JAX.
        declared: A type of 64 bits that the leaf stands for.
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
        """Of the leaf, as it is stored."""
        shape = self.shape if self.layout is None else self.layout.shape(self.shape)
        return (len(self.names), *shape) if self.stacked else tuple(shape)

    @property
    def where(self) -> Any:
        """The Sharding that its memory is made for."""
        return self.sharding or jax.sharding.SingleDeviceSharding(default_device())

    @property
    def stored(self) -> Any:
        """The dtype on the disk."""
        return self.data[0]._stored_dtype

    @property
    def on_its_way(self) -> int:
        """Bytes of the host that it takes until it is where it belongs."""
        if is_host(self.where) and self.stored == self.dtype:
            return 0
        size = np.dtype(self.stored).itemsize
        return sum(count(box) * size for box in boxes(self.where, self.leaf_shape))

    def memory(self) -> dict[Box, np.ndarray]:
        """Room for its parts, as they are on the disk."""
        size, what = np.dtype(self.stored).itemsize, f"'{self.names[0]}'"
        return {
            box: memory_for(count(box) * size, what) for box in boxes(self.where, self.leaf_shape)
        }

    def parts(self, memory: Mapping[Box, np.ndarray]) -> Iterator[tuple[WeightData, Box, Any]]:
        """What is to be read into it."""
        for box, into in memory.items():
            if not self.stacked:
                yield from ((self.data[0], *one) for one in places(self.layout, box, into))
                continue
            (first, last), *rest = box
            for i, layer in zip(range(first, last), np.split(into, last - first), strict=True):
                yield from ((self.data[i], *one) for one in places(self.layout, tuple(rest), layer))

    def value(self, memory: dict[Box, np.ndarray]) -> Any:
        """The leaf, of the memory once it is filled."""
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
    """The leaves by the numbers of their targets, read and placed.

    Raises:
        CheckpointError: A file that cannot be read.
        OutOfMemoryError: The host or a device cannot hold it.
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
    """The target for a leaf of a Module: of a Weight, or of a stack of those of several layers."""
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
    """Where a leaf lies or is to lie; None if JAX chose."""
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)
