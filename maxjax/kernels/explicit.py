"""Meshes with Explicit axes, where an array's type includes its sharding.

On such a mesh JAX requires ``out_sharding`` of an operation whose result could be sharded in
several ways. The operations that layers use determine it with the functions here. On other
meshes, and without one, ``mesh_of`` returns None and XLA decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

# The mesh axes that one axis of an array is split over.
Entry = tuple[str, ...]


class Division(NamedTuple):
    """How an array is sharded over a mesh, where its type does not include it; hashable.

    Attributes:
        mesh: an abstract mesh, whose axes are all Auto.
        entries: the mesh axes that each axis of the array is split over.
    """

    mesh: AbstractMesh
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, mesh: Any, wanted: Sequence[Entry]) -> Division:
        """The division of an array with these entries over a mesh, whatever its axis types are."""
        kinds = (AxisType.Auto,) * len(mesh.axis_names)
        sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
        return cls(AbstractMesh(sizes, mesh.axis_names, kinds), tuple(map(tuple, wanted)))

    def divides(self, shape: Sequence[int], wanted: Sequence[Entry]) -> bool:
        """Whether an array of this shape can be split over these mesh axes into equal parts."""
        counts = [parts_over(self.mesh, entry) for entry in wanted]
        return not any(size % n for size, n in zip(shape, counts, strict=True))

    def on_parts(
        self,
        f: Callable[..., Any],
        operands: Sequence[Sequence[Entry]],
        results: Any,
        over: Iterable[str] = (),
    ) -> Callable[..., Any]:
        """``f`` in a ``shard_map``: operands and results are sharded by these entries, one list for each.

        Args:
            over: mesh axes over which each device runs ``f`` on its part, while XLA divides ``f`` over the
                others; by default all.
        """
        out = [spec_of(w) for w in results] if isinstance(results[0], list) else spec_of(results)

        def run(*arrays: Any) -> Any:
            # If another mesh is set, also one with other axis types, shard_map refuses this one.
            with jax.sharding.use_abstract_mesh(self.mesh):
                given = tuple(map(spec_of, operands))
                mapped = jax.shard_map(
                    f, mesh=self.mesh, in_specs=given, out_specs=out, check_vma=False,
                    axis_names=set(over),
                )  # fmt: skip
                return mapped(*arrays)

        return run


def mesh_of(*arrays: Any) -> Any:
    """The abstract mesh of the first array on a mesh with Explicit axes, or None.

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
    """The explicit mesh axes that each axis of an array is split over."""
    return padded(jax.typeof(array).sharding.spec, jax.numpy.ndim(array))


def parts_over(mesh: Any, names: Iterable[str]) -> int:
    """The number of parts that splitting over mesh axes of these names makes."""
    return math.prod(mesh.shape[name] for name in names)


def names_in(entry: Any) -> Entry:
    """The mesh axes that an entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def padded(spec: PartitionSpec, rank: int) -> list[Entry]:
    """The mesh axes that a PartitionSpec names for each of an array's ``rank`` axes."""
    return [*map(names_in, spec), *[()] * (rank - len(spec))]


def spec_of(wanted: Sequence[Entry]) -> PartitionSpec:
    """The PartitionSpec with these entries."""
    return PartitionSpec(*(None if not e else e[0] if len(e) == 1 else e for e in wanted))


def entries_of(sharding: Any, mesh: Any, shape: Sequence[int]) -> list[Entry]:
    """The mesh axes that each axis of an array is split over, for a sharding of any kind.

    XLA may split an axis over a part of a mesh axis, which no PartitionSpec can express, or into
    parts of unequal size; such an axis is treated as replicated.
    """
    # The sharding is asked about a shape that every mesh axis divides; the array's own may not.
    count = mesh.devices.size
    where = sharding.devices_indices_map((count,) * len(shape))
    found: list[list[tuple[int, str]]] = [[] for _ in shape]
    for axis, name in enumerate(mesh.axis_names):
        line = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.devices.shape[axis], -1)[:, 0]
        for d in range(len(shape)):
            starts = [where[device][d].indices(count)[0] for device in line]
            if len(line) > 1 and len(set(starts)) == len(line):
                found[d].append((-starts[1], name))  # the mesh axis with the longest step first
    entries = [tuple(name for _, name in sorted(axes)) for axes in found]
    parts = [parts_over(mesh, entry) for entry in entries]
    return [() if size % n else entry for size, n, entry in zip(shape, parts, entries, strict=True)]


def sharding(mesh: Any, wanted: Sequence[Entry]) -> NamedSharding:
    """The sharding with these entries; a mesh axis that is named twice is used only the first time."""
    used: set[str] = set()
    free: list[Entry] = []
    for entry in wanted:
        free.append(tuple(name for name in entry if name not in used))
        used.update(free[-1])
    return NamedSharding(mesh, spec_of(free))


def concatenate(arrays: Sequence[Any], axis: int) -> jax.Array:
    """``jnp.concatenate`` of arrays that may be sharded differently along the axis."""
    wanted = entries(arrays[0])
    wanted[axis] = ()
    run = automatic(lambda *a: jax.numpy.concatenate(a, axis), mesh_of(*arrays), wanted)
    return run(*arrays)


def automatic(f: Callable[..., Any], mesh: Any, wanted: Any) -> Callable[..., Any]:
    """``f`` with XLA deciding all shardings inside it, and the result sharded as wanted.

    Args:
        mesh: a mesh with Explicit axes, or None: then it is ``f`` itself.
        wanted: entries for the axes of the result, or a list or tuple of such lists for a list or tuple of results.
    """
    if mesh is None:
        return f
    several = bool(wanted) and isinstance(wanted[0], list)
    each = (sharding(mesh, w) for w in wanted) if several else ()
    out = type(wanted)(each) if several else sharding(mesh, wanted)
    return jax.sharding.auto_axes(f, out_sharding=out)
