"""The Division of a jax Sharding: which device holds which part of an array, for drawings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from ...kernels import explicit
from ...rendering.division import Division
from ...storage.boxes import Box
from .device_major import DeviceMajor
from .mesh import sizes_text

# With more devices, a drawing would be unreadable and slow to make.
_MOST_DEVICES = 4096


def mesh_text(mesh: Any) -> str:
    """The axes of a mesh and their sizes.

    Example:
        >>> import jax
        >>> mesh_text(jax.sharding.AbstractMesh((2, 4), ("data", "model")))
        'data=2, model=4'
    """
    return sizes_text(mesh, mesh.axis_names)


def device_text(device: Any) -> str:
    """A device as ``platform:number``."""
    return f"{device.platform}:{device.id}"


def device_count(sharding: Any) -> int:
    """The number of devices of a Sharding, which may be of an abstract mesh; 0 for anything else."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh.size
    return len(sharding.device_set) if isinstance(sharding, Sharding) else 0


def place_text(sharding: Any) -> str:
    """Where the arrays of a Sharding are: a device, or a mesh.

    Example:
        >>> import jax, maxjax
        >>> place_text(jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]))
        'cpu:0'
    """
    kind = getattr(sharding, "memory_kind", None)
    where = f" in {kind}" if kind in ("pinned_host", "unpinned_host") else ""
    if isinstance(sharding, NamedSharding):
        size = sharding.mesh.size
        return f"{size} device{'s' * (size > 1)} ({mesh_text(sharding.mesh)}){where}"
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    if len(devices) == 1:
        return f"{device_text(devices[0])}{where}"
    return f"{len(devices)} devices{where}"


def spec_text(sharding: Any) -> str:
    """How a Sharding splits the axes of an array."""
    if isinstance(sharding, NamedSharding):
        return f"{tuple(sharding.spec)} on {mesh_text(sharding.mesh)}"
    if isinstance(sharding, SingleDeviceSharding):
        return place_text(sharding)
    return f"{type(sharding).__name__} on {place_text(sharding)}"


@functools.lru_cache(1024)
def division_of(
    sharding: Any, shape: tuple[int, ...], layout: DeviceMajor | None = None
) -> Division | None:
    """Which device holds which part of an array of that shape; None if it cannot be said.

    With a layout the rows (or columns) of a device are several ranges. Devices have their own numbers; those of
    an abstract mesh are numbered from 0.

    Example:
        >>> import jax
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((2, 2), ("data", "model"))
        >>> found = division_of(NamedSharding(mesh, PartitionSpec("model")), (8, 3))
        >>> found.sentence, [held for _, held in found.parts]
        ('2 parts of [4, 3], each on 2 devices', [(0, 2), (1, 3)])
    """
    if not isinstance(sharding, Sharding):
        return None
    if isinstance(sharding, NamedSharding):
        boxes = _boxes(sharding, shape)
    elif len(sharding.device_set) <= _MOST_DEVICES:
        where = sharding.devices_indices_map(shape)
        boxes = {device.id: _box(index, shape) for device, index in where.items()}
    else:
        boxes = None
    if boxes is None:
        return None
    found = Division.of(shape, spec_text(sharding), boxes)
    if layout is None:
        return found
    axis = layout.axis
    own = shape[axis] // layout.n
    parts = (
        ((*box[:axis], span, *box[axis + 1 :]), held)
        for box, held in found.parts
        for span in layout.rows(box[axis][0] // own)
    )
    return Division(shape, found.title, tuple(sorted(parts)))


def _box(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, Box] | None:
    """The part of each device, from the spec alone: a mesh may be abstract."""
    mesh: Any = sharding.mesh
    if mesh.size > _MOST_DEVICES or len(sharding.spec) > len(shape):
        return None
    entries = explicit.padded(sharding.spec, len(shape))
    found: dict[int, Box] = {}
    for number, at in _places(mesh):
        box = []
        for size, entry in zip(shape, entries, strict=True):
            part, count = 0, 1
            for name in entry:
                part, count = part * mesh.shape[name] + at[name], count * mesh.shape[name]
            step = -(-size // count)
            box.append((min(part * step, size), min((part + 1) * step, size)))
        found[number] = tuple(box)
    return found


def _places(mesh: Any) -> Iterator[tuple[int, dict[str, int]]]:
    """For each device of a mesh its number, and its index along each axis."""
    numbers = [d.id for d in mesh.devices.flat] if isinstance(mesh, Mesh) else range(mesh.size)
    for number, place in zip(
        numbers, itertools.product(*map(range, mesh.shape.values())), strict=True
    ):
        yield number, dict(zip(mesh.shape, place, strict=True))


def labels_of(mesh: Any) -> dict[int, str]:
    """For the number of each device of a mesh, its place on the axes, a line each."""
    return {
        number: "\n".join(f"{name} {i}" for name, i in at.items()) for number, at in _places(mesh)
    }
