"""Captures in the loop of a LayerStack: the compiled loop returns the captured values.

The loop carries a buffer for each captured place, with a row for each layer that is captured there (and one for all
others), and each layer writes its own row; so only the captured layers take memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ....kernels.operation import varying_with
from .frames import NO_LOOP, OBSERVING, Frame, Loop, active, opened
from .patches import row_of
from .plans import Key, ObserverPlan, Taps, joined


def patches_of(stack: Any) -> tuple[Any, ...]:
    """Return the values of the patches of each plan that marks a stack; None for a plan that is not active."""
    return tuple(active().get(plan) for plan, _ in stack._mx_marks)


def active_plans(stack: Any, patches: Sequence[Any]) -> dict[ObserverPlan, Any]:
    """Return the active plans of a stack, from what :func:`patches_of` returned for it outside of the loop."""
    pairs = zip(stack._mx_marks, patches, strict=True)
    return {plan: values for (plan, _), values in pairs if values is not None}


def holds_functions(stack: Any) -> bool:
    """Return whether a patch of an active plan of a stack is a function."""
    plans = active_plans(stack, patches_of(stack))
    return any(target.function is not None for plan in plans for target in plan.targets)


def hand_on(taps: Taps) -> None:
    """Add the values that a loop has recorded to the frame in which the loop ran."""
    if taps:
        OBSERVING.frames[-1].add(taps)


def frame_of_layer(
    layer: Any, patches: Mapping[ObserverPlan, Any], members: Sequence[int], number: Any
) -> AbstractContextManager[Frame]:
    """Open the frame of one layer.

    Args:
        layer: layer, which in the body of the loop represents all its ``members``; () if it runs alone.
        patches: active plans, with the values of their patches, which are operands of the loop.
        number: index of the layer that runs.
    """
    first = {plan: name for plan, name in layer._mx_marks if plan in patches}
    return opened(Frame(patches, Loop(first, members, number) if members else NO_LOOP))


def zeros(rows: int, like: Any) -> jax.Array:
    """Return zeros ``[rows, ...]`` for values with the shape, dtype and, on Explicit meshes, sharding of ``like``."""
    where = like.sharding
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec(None, *where.spec))
    return jnp.zeros((rows, *like.shape), like.dtype, device=where)


def empty_buffers(taps: Taps, members: Sequence[int], carry: Any) -> Taps:
    """Return the buffers before the first layer.

    Args:
        taps: shapes and dtypes of what one layer records.
        members: indices of the layers.
        carry: carry of the loop: inside ``shard_map``, values vary over the same mesh axes.
    """
    found = {}
    for key, values in taps.items():
        rows = len(key.layers) + (len(key.layers) < len(members))
        found[key] = varying_with(jax.tree.map(partial(zeros, rows), values), carry)
    return found


def write(buffers: Taps, taps: Taps, number: Any) -> Taps:
    """Return the buffers after one layer, which has recorded ``taps``."""
    found = dict(buffers)
    for key, values in taps.items():
        if values:
            rows = {layer: row for row, layer in enumerate(key.layers)}
            row = row_of(rows, number, len(rows))
            put = lambda all_, new, row=row: jax.lax.dynamic_update_index_in_dim(all_, new, row, 0)
            found[key] = jax.tree.map(put, buffers[key], values)
    return found


def finished(buffers: Taps) -> Taps:
    """Return the captured values after the last layer; those of a single layer have its name and no axis of layers."""
    found: Taps = {}
    for key, values in buffers.items():
        count = len(key.layers)
        values = jax.tree.map(lambda a, n=count: a[0] if n == 1 else a[:n], values)
        if count == 1:
            key = Key(key.level, key.names[0], key.site)
        found = joined(found, {key: values})
    return found
