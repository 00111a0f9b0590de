"""The check that there is enough memory for a load, before anything is read.

XLA's own error names neither the tensor nor the device, and Linux kills a process that uses too much
memory without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ....driver import free_bytes
from ....errors import OutOfMemoryError, UserInputError
from ....graph.placement.arrays import default_device
from ....graph.placement.mesh import abstract_mesh
from ....graph.placement.specs import axis_of, held_bytes, mesh_of
from ..place import plan_places
from .fit import Fit, final_shape, sharding_for

# Smaller loads are not checked.
SMALL_BYTES = 64 << 20


def check_room(module: Any, fits: Sequence[Fit]) -> None:
    """Checks that the devices of this process, and its host, have enough memory for the values to load.

    Raises:
        OutOfMemoryError: there is not enough memory. The message names the largest tensor, the bytes that are
            needed and free, and the smallest larger mesh or the narrower dtype with which the load fits.
    """
    sizes = [(_part(fit), fit) for fit in fits]
    need = sum(nbytes for nbytes, _ in sizes)
    if need < SMALL_BYTES:
        return
    devices = _devices(fits)
    on_host = [device for device in devices if device.platform == "cpu"]
    total = sum(math.prod(final_shape(fit)) * fit.dtype.np.itemsize for fit in fits)
    for device in devices:
        free = free_bytes(device)
        # CPU devices share the host's memory, which holds replicas only once.
        needed = need if device not in on_host else min(total, need * len(on_host))
        if free is not None and needed > free:
            largest = max(sizes, key=lambda item: item[0])
            raise OutOfMemoryError(_message(module, fits, device, largest, needed, free))


def _part(one: Fit) -> int:
    """The number of bytes of the weight that one device holds."""
    dims = final_shape(one)
    sharding = sharding_for(one)
    spread = isinstance(sharding, jax.sharding.NamedSharding)
    home = one.weight.home
    held = held_bytes(sharding if spread else None, dims, one.dtype.np.itemsize)
    return held if home is None else -(-held // home[0].spec.shares)


def _devices(fits: Iterable[Fit]) -> list[Any]:
    """The devices of this process that hold a shard of any of the values."""
    shardings = {sharding_for(one) for one in fits}
    found: dict[Any, None] = {}
    for sharding in shardings:
        devices = [default_device()] if sharding is None else sharding.addressable_devices
        found.update(dict.fromkeys(devices))
    return sorted(found, key=lambda device: device.id)


def _message(
    module: Any, fits: Sequence[Fit], device: Any, largest: tuple[int, Fit], need: int, free: int
) -> str:
    nbytes, one = largest
    shape = list(final_shape(one))
    sharding = sharding_for(one)
    part = shape if sharding is None else list(sharding.shard_shape(tuple(shape)))
    where = "the host" if device.platform == "cpu" else f"{device.platform}:{device.id}"
    text = (
        f"{where} has {free:,} bytes free, and the weights need {need:,}; the largest is "
        f"'{one.name}' {one.dtype.name} {shape}, of which each device holds {part}: {nbytes:,} bytes"
    )
    changes = _changes(module, fits, need, free, device.platform == "cpu")
    if not changes:
        return f"{text}. It would not fit on a larger mesh or in a narrower dtype either."
    return f"{text}. It would fit {' or '.join(changes)}."


def _changes(module: Any, fits: Sequence[Fit], need: int, free: int, on_host: bool) -> list[str]:
    """The smallest change of the mesh, and of the dtype, with which the load fits."""
    found = []
    mesh = mesh_of([sharding_for(one) for one in fits])
    if not on_host:
        shape = dict(mesh.shape) if mesh is not None else {"model": 1}
        axis = (axis_of(mesh, "model") if mesh is not None else None) or "model"
        found += _larger(module, {one.weight: one for one in fits}, shape, axis, free)
    wide = sum(_part(one) for one in fits if one.dtype.name == "float32")
    scale = need / max(sum(map(_part, fits)), 1)
    narrow = need - int(wide * scale) // 2
    if wide and narrow <= free:
        found.append(f"with dtype='bfloat16' ({narrow:,} bytes)")
    return found


def _larger(
    module: Any, fits: dict[Any, Fit], shape: dict[str, int], axis: str, free: int
) -> list[str]:
    """The smallest mesh with more devices along ``axis`` that can hold the load."""
    size = shape.get(axis, 1)
    for n in (size << power for power in range(1, 13)):
        sizes = {**shape, axis: n}
        mesh = abstract_mesh(sizes)
        try:
            places = plan_places(module, mesh)
        except (UserInputError, NotImplementedError):
            return []
        nbytes = 0
        for place in places:
            count = len(place.holder.spec.names(place.name))
            weight = place.holder if place.holder in fits else None
            dtype = fits[weight].dtype if weight is not None else place.holder.spec.dtype
            sharding = jax.sharding.NamedSharding(mesh, place.placed.spec)
            shares = math.prod(mesh.shape[name] for name in place.placed.split)
            nbytes += count * held_bytes(sharding, place.shape, dtype.np.itemsize) // shares
        if nbytes <= free:
            shown = ", ".join(f"{name}={count}" for name, count in sizes.items())
            return [f"on a mesh of {shown} ({nbytes:,} bytes for each device)"]
    return []
