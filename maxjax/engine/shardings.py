"""The shardings of what jitted programs take and return, so that the next call needs no other executable."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ..graph.placement.arrays import with_sharding
from ..graph.placement.specs import mesh_of

Shardings = tuple[NamedSharding, ...] | None
S = TypeVar("S")


def shardings_on_mesh(state: Any) -> Shardings:
    """The shardings of a pytree's arrays, as :func:`resharded` takes them; None if they are on one device."""
    where = [leaf.sharding for leaf in jax.tree.leaves(state)]
    return tuple(where) if isinstance(where[0], NamedSharding) else None


def replicated(array: jax.Array, shardings: Shardings) -> jax.Array:
    """The array, replicated if there is a mesh."""
    if shardings is None:
        return array
    return with_sharding(array, NamedSharding(shardings[0].mesh, PartitionSpec()))


def resharded(state: S, shardings: Shardings) -> S:
    """A pytree with its given shardings."""
    if shardings is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    placed = [
        with_sharding(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def sharding_of_inputs(model: Any) -> Any:
    """The sharding of a program's inputs: replicated over the model's mesh, or its single device."""
    found = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(model)]
    mesh = mesh_of(found)
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    devices = next((where.device_set for where in found if where is not None), jax.devices()[:1])
    return SingleDeviceSharding(min(devices, key=lambda device: device.id))
