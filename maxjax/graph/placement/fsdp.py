"""Matmuls and lookups that move activations between devices instead of a weight split over ``fsdp``.

Usually such a weight is gathered where it is used, which is cheaper if the activations are larger
than the weight. A lookup needs only a few rows of a large embedding table, and a decode step
multiplies few activations by a large output head: there each device computes its part of the result
for all rows of the batch, and only activations are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ...kernels import explicit
from .arrays import mesh_in_trace
from .specs import axis_of, batch_axes, split_over

_FREE = PartitionSpec.UNCONSTRAINED


def can_be_in_place(weight: Any, x: Any) -> bool:
    """Whether :func:`in_place` can use a Weight with activations or indices ``[B, ...]``.

    It is then split over ``fsdp``, and all sizes are known.
    """
    if _axis(weight) is None or not x.ndim:
        return False
    if not isinstance(x, Tracer) and not isinstance(weight.leaf, Tracer):
        return False
    mesh = mesh_in_trace(weight.sharding.mesh)
    return AxisType.Manual not in mesh.axis_types and all(isinstance(n, int) for n in x.shape)


def in_place(
    run: Callable[[Any, jax.Array], jax.Array],
    weight: Any,
    x: jax.Array,
    *,
    features: int,
    whole: bool,
) -> jax.Array:
    """``run(operand, x)`` for a Weight that is split over ``fsdp``, without gathering it.

    Args:
        run: function of the weight's operand and ``x`` whose result has the features as last axis.
        weight: Weight for which :func:`can_be_in_place` holds.
        x: activations or indices ``[B, ...]``.
        features: axis of the weight that becomes the features of the result.
        whole: whether ``x`` holds indices, and the features of the result are replicated. Otherwise
            the features replace the last axis of ``x`` and stay split as that axis of the weight
            is, over ``fsdp`` only if the batch is not.

    Returns:
        The result, with its batch axis split as that of ``x``. On meshes with Auto axes the batch
        is assumed to be split over ``data``, ``fsdp`` and ``expert``.
    """
    operand, axis = weight.operand(gathered=False), _axis(weight)
    every = split_over(weight, features)
    mesh = explicit.mesh_of(x, *jax.tree.leaves(operand))
    if mesh is None:
        sizes = weight.sharding.mesh, x.shape[0]
        given, moved = [batch_axes(*sizes)], [batch_axes(*sizes, ("data",))]
        x = _split(x, weight, moved, None)
    else:
        given = explicit.entries(x) if explicit.mesh_of(x) is not None else [()] * x.ndim
        moved = [tuple(name for name in entry if name != axis) for entry in given]
        if moved != given:
            x = jax.sharding.reshard(x, explicit.sharding(mesh, moved))
    # Features that the weight splits over fsdp stay so, unless the batch is split over it.
    last = tuple(name for name in every if name != axis or moved == given)
    last = () if whole else last

    def run_whole(operand: Any, x: jax.Array) -> jax.Array:
        y = run(operand, x)
        return _split(y, weight, moved[: y.ndim - 1], every) if axis in every else y

    if mesh is None:
        return _split(run_whole(operand, x), weight, given, last)
    tokens = given if whole else given[:-1]
    return explicit.automatic(run_whole, mesh, [*tokens, last])(operand, x)


def _split(
    array: jax.Array, weight: Any, tokens: list[explicit.Entry], last: explicit.Entry | None
) -> jax.Array:
    """``array`` with its first axes split over ``tokens`` and its last over ``last``; XLA chooses the others."""
    mesh = mesh_in_trace(weight.sharding.mesh)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    used: set[str] = set()
    entries: list[Any] = []
    for entry in [*tokens, () if last is None else last]:
        names = [name for name in entry if types[name] is AxisType.Auto and name not in used]
        used.update(names)
        entries.append(tuple(names) or None)
    *first, end = entries
    first = first[: array.ndim] if last is None else first
    free = [_FREE] * (array.ndim - len(first) - (last is not None))
    spec = PartitionSpec(*first, *free, *([end] if last is not None else []))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _axis(weight: Any) -> str | None:
    """The mesh axis ``fsdp``, if a Weight is split over it."""
    where = weight.sharding
    if not isinstance(where, NamedSharding):
        return None
    axis = axis_of(where.mesh, "fsdp")
    is_split = any(axis in split_over(weight, i) for i in range(len(where.spec)))
    return axis if is_split and where.mesh.shape[axis] > 1 else None
