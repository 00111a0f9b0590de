"""Floor 2. Arrays whose type says where they are: meshes with Explicit axes.

There JAX asks of an operation that could end up in several places where its result is to
be. The operations that our layers are made of ask here. On other meshes, and without
one, all of this is nothing: XLA decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# For one axis of an array, the axes of the mesh it is split over.
Entry = tuple[str, ...]


def mesh_of(*arrays: Any) -> Any:
    """The abstract mesh of the first array that is placed explicitly, or None.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh_of(jnp.ones(3)) is None
        True
    """
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def entries(array: Any) -> list[Entry]:
    """For each axis of an array the explicit axes of the mesh it is split over."""
    spec = tuple(jax.typeof(array).sharding.spec)
    spec += (None,) * (jax.numpy.ndim(array) - len(spec))
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]


def sharding(mesh: Any, wanted: Sequence[Entry]) -> NamedSharding:
    """The sharding of a result; an axis of the mesh counts where it is named first."""
    used: set[str] = set()
    spec: list[Any] = []
    for entry in wanted:
        free = tuple(name for name in entry if name not in used)
        used.update(free)
        spec.append(None if not free else free[0] if len(free) == 1 else free)
    return NamedSharding(mesh, PartitionSpec(*spec))


def concatenate(arrays: Sequence[Any], axis: int) -> jax.Array:
    """``jnp.concatenate`` of arrays of which one may be split along the axis and another not."""
    mesh = mesh_of(*arrays)
    if mesh is None:
        return jax.numpy.concatenate(arrays, axis)
    wanted = entries(arrays[0])
    wanted[axis] = ()
    return automatic(lambda *a: jax.numpy.concatenate(a, axis), mesh, wanted)(*arrays)


def automatic(f: Callable[..., Any], mesh: Any, wanted: Sequence[Entry]) -> Callable[..., Any]:
    """``f`` with XLA deciding about everything inside it, and a result placed as wanted."""
    return jax.sharding.auto_axes(f, out_sharding=sharding(mesh, wanted))
