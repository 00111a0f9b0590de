"""Weights on the devices of several processes, as rows on the host of the first process.

No process holds all of such a weight, and no device needs to: all processes dispatch the same program,
which gathers one piece of the weight at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...kernels.explicit import padded
from ...lockstep import Lockstep
from ...storage.boxes import Box, extents
from ..placement.arrays import on_mesh
from ..placement.device_major import DeviceMajor


class Gathering:
    """The weights that the first of several processes reads from the devices of all.

    Args:
        together: Lockstep of the call. The first process reads pieces, then calls :meth:`end`;
            meanwhile the others are in :meth:`follow`.
    """

    def __init__(self, together: Lockstep):
        self._together = together
        self._arrays: list[tuple[Any, tuple[int, ...], DeviceMajor | None]] = []

    def add(self, array: Any, index: tuple[int, ...], layout: DeviceMajor | None) -> int:
        """Adds ``array[index]``, stored in the order ``layout``; returns its number, the same in all processes."""
        self._arrays.append((array, index, layout))
        return len(self._arrays) - 1

    def read(self, number: int, box: Box) -> np.ndarray:
        """A box of what :meth:`add` added, in logical order, on the host of the first process."""
        self._together.decide({"array": number, "box": box})
        return self._read(number, box)

    def end(self) -> None:
        """Tells the other processes that nothing more is read."""
        self._together.decide({})

    def follow(self) -> None:
        """Takes part in all that the first process reads."""
        while following := self._together.decide():
            box = tuple((start, stop) for start, stop in following["box"])
            self._read(following["array"], box)

    def _read(self, number: int, box: Box) -> np.ndarray:
        array, index, layout = self._arrays[number]
        axis = 0 if layout is None else layout.axis
        rows = np.arange(*box[axis], dtype=np.int32)
        where = np.stack([rows, rows]) if layout is None else _stored(layout, rows)
        starts = np.asarray([*index, *(start for start, _ in box)], np.int32)
        bits = self._together.fetch(
            self._together.run(
                _gather, array, starts, where,
                sizes=extents(box), sharding=array.sharding, by_device=None if layout is None else axis,
            )
        )  # fmt: skip
        dtype = np.dtype(array.dtype)
        return bits.astype(f"uint{8 * dtype.itemsize}").view(dtype)


def can_gather(array: Any) -> bool:
    """Whether :class:`Gathering` can read an array: it lies on a mesh, in whole bytes."""
    whole_bytes = np.dtype(array.dtype).name not in ("int4", "uint4", "int2", "uint2")
    return isinstance(array.sharding, NamedSharding) and array.ndim > 0 and whole_bytes


def _stored(layout: DeviceMajor, rows: np.ndarray) -> np.ndarray:
    """Where logical rows are stored: ``[2, rows]``, the device of each and its row there."""
    count = sum(layout.segments)
    place = np.zeros((2, count), np.int32)
    for device in range(layout.n):
        own = np.concatenate([np.arange(*span) for span in layout.rows(device)])
        place[0, own], place[1, own] = device, np.arange(len(own))
    return place[:, rows]


@partial(jax.jit, static_argnames=("sizes", "sharding", "by_device"))
def _gather(
    array: jax.Array,
    starts: jax.Array,
    where: jax.Array,
    *,
    sizes: tuple[int, ...],
    sharding: NamedSharding,
    by_device: int | None,
) -> jax.Array:
    """The bits of a box of an array as unsigned integers, on every device.

    Each device contributes what it holds, and zeros; the sum of the bits is exact.

    Args:
        array: the array as it is stored.
        starts: an index for each leading axis, then the beginning of the box along each other one.
        where: device of each row (or column) of the box and its place there, if they are stored by device.
        sizes: extents of the box.
        sharding: sharding of the array.
        by_device: axis that is stored as in :class:`DeviceMajor`, if any.
    """
    spec = padded(sharding.spec, array.ndim)
    names = tuple(name for entry in spec for name in entry)

    ndim, lead = len(sizes), len(starts) - len(sizes)

    def local(part: jax.Array, starts: jax.Array, where: jax.Array) -> jax.Array:
        mine, axes = jnp.ones((1,) * ndim, bool), spec[lead:]
        for axis in range(lead):
            part, here = _cut(part, axis, starts[axis], 1, spec[axis])
            mine = mine & here.reshape((1,) * ndim)
        part = part.reshape(part.shape[lead:])
        if by_device is not None:
            here, at = _within(where[0], part.shape[by_device], axes[by_device])
            devices, own = part.shape[by_device : by_device + 2]
            merged = (*part.shape[:by_device], devices * own, *part.shape[by_device + 2 :])
            part = jnp.take(part.reshape(merged), at * own + where[1], axis=by_device)
            mine = mine & _along(here, by_device, ndim)
            axes = [*axes[:by_device], *axes[by_device + 1 :]]
        for axis in range(ndim):
            if axis == by_device:
                continue
            over = axes[axis]
            part, here = _cut(part, axis, starts[lead + axis], sizes[axis], over)
            mine = mine & _along(here, axis, ndim)
        bits = jnp.where(mine, _bits(part), 0)
        return jax.lax.psum(bits, names) if names else bits

    specs = [PartitionSpec(*sharding.spec), PartitionSpec(), PartitionSpec()]
    return on_mesh(local, sharding.mesh, specs, PartitionSpec())(array, starts, where)


def _within(index: jax.Array, size: int, over: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Which indices are in this device's part of an axis, and where there."""
    at = index - (jax.lax.axis_index(over) * size if over else 0)
    return (at >= 0) & (at < size), jnp.clip(at, 0, size - 1)


def _cut(
    part: jax.Array, axis: int, start: jax.Array, size: int, over: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """``size`` indices of an axis from ``start`` on, and which of them this device has."""
    if not over:
        return jax.lax.dynamic_slice_in_dim(part, start, size, axis), jnp.ones(size, bool)
    wanted = start + jnp.arange(size, dtype=jnp.int32)
    here, at = _within(wanted, part.shape[axis], over)
    return jnp.take(part, at, axis=axis), here


def _along(array: jax.Array, axis: int, ndim: int) -> jax.Array:
    return array.reshape([-1 if one == axis else 1 for one in range(ndim)])


def _bits(array: jax.Array) -> jax.Array:
    """The values' bits as unsigned integers of a width that collectives can add."""
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return bits if array.dtype.itemsize == 8 else bits.astype(jnp.uint32)
