"""What expert parallelism sends: to each device its experts' rows, and back the sums of results.

Arrays of several devices are lists in order of the devices; each result is on the device that it is
for. Sizes are those of the worst case, in which one device gets everything, because a program
cannot have sizes that depend on values.

Shapes: N tokens of a device, E features, k experts for each token, X experts, L of them on each
device; M is the sum of N · k over all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...graph.ops.collectives import placed
from .assignments import moe_create_indices


class Sorting(NamedTuple):
    """Where everything goes.

    Attributes:
        ids: ``[M]``, the expert of each choice; X where a number is no expert's.
        order: ``[M]``, the choices sorted by expert.
        starts: ``[X + 1]``, where each expert begins in that order.
        places: ``[M]``, the place of each choice in it.
        count: k.
    """

    ids: jax.Array
    order: jax.Array
    starts: jax.Array
    places: jax.Array
    count: int


def plan_of(ids: Sequence[jax.Array], experts: int) -> Sorting:
    """The plan for the choices of all devices, ``[N, k]`` each.

    Example:
        >>> plan = plan_of([jnp.array([[2, 0]]), jnp.array([[2, 1]])], 3)
        >>> plan.order.tolist(), plan.starts.tolist(), plan.places.tolist()
        ([1, 3, 0, 2], [0, 1, 2, 4], [2, 0, 3, 1])
    """
    flat, order, starts, places = _sorted(experts, [placed(one, ids[0]) for one in ids])
    return Sorting(flat, order, starts, places, int(ids[0].shape[1]))


@partial(jax.jit, static_argnums=0)
def _sorted(
    experts: int, ids: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    flat = jnp.concatenate([one.reshape(-1).astype(jnp.int32) for one in ids])
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order, starts, places, *_ = moe_create_indices(flat, experts)
    order, starts, places = (one.astype(jnp.int32) for one in (order, starts, places))
    return flat, order, starts, places


def received(
    plan: Sorting, tokens: Sequence[jax.Array], device: int, experts: range
) -> tuple[jax.Array, jax.Array]:
    """The rows that the experts of one device get, and where each expert begins among them.

    Args:
        tokens: ``[N, E]`` of each device.
        device: place of the receiving device in ``tokens``.
        experts: numbers of its experts.

    Returns:
        ``[M, E]``, of which those behind the last expert's rows are 0, and ``[L + 1]`` in int32.
    """
    like = tokens[device]
    every = [placed(one, like) for one in (plan.order, plan.starts, *tokens)]
    return _rows(plan.count, len(experts), experts.start, *every)


@partial(jax.jit, static_argnums=(0, 1))
def _rows(
    count: int, experts: int, first: Any, order: jax.Array, starts: jax.Array, *tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    starts = starts[first + jnp.arange(experts + 1)]
    number = starts[0] + jnp.arange(order.shape[0], dtype=jnp.int32)
    token = order[jnp.minimum(number, order.shape[0] - 1)] // count
    rows = jnp.concatenate(tokens)[token]
    return jnp.where((number < starts[-1])[:, None], rows, 0), starts - starts[0]


def weighed(
    plan: Sorting,
    results: Sequence[jax.Array],
    experts: Sequence[range],
    shares: jax.Array,
    first: Any,
    like: jax.Array,
) -> jax.Array:
    """For the tokens of one device, the sums of their experts' results times their shares.

    Args:
        results: ``[M, E]`` of each device, in the order of :func:`received`.
        experts: numbers of the experts of each.
        shares: ``[N, k]``.
        first: the number of choices before those of the device.
        like: an array on the device.

    Returns:
        ``[N, E]`` in float32; each device adds up what its own experts give before it sends that.
    """
    total: Any = None
    for rows, own in zip(results, experts, strict=True):
        mine = (placed(one, rows) for one in (plan.ids, plan.places, plan.starts, shares))
        part = placed(_weighed(rows, own.start, own.stop, first, *mine), like)
        total = part if total is None else total + part
    return total


@jax.jit
def _weighed(
    rows: jax.Array, start: Any, stop: Any, first: Any,
    ids: jax.Array, places: jax.Array, starts: jax.Array, shares: jax.Array,
) -> jax.Array:  # fmt: skip
    """What the experts from ``start`` to ``stop`` add to the sums of some tokens."""
    mine = first + jnp.arange(shares.shape[0] * shares.shape[1], dtype=jnp.int32)
    inside = (ids[mine] >= start) & (ids[mine] < stop)
    found = rows[jnp.where(inside, places[mine] - starts[start], 0)]
    # Rows that are another's may be no numbers, which times 0 they would stay.
    found = jnp.where(inside[:, None], found, 0).astype(jnp.float32)
    found = found.reshape(*shares.shape, rows.shape[-1])
    return jnp.sum(found * shares.astype(jnp.float32)[..., None], axis=1)
