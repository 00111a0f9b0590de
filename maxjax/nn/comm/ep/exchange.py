"""The exchange of expert parallelism: each device receives the rows for its experts, and sends weighted sums back.

Arrays of several devices are lists in the order of the devices; each result is on the device that needs
it. Sizes are those of the worst case, in which one device receives all rows, because the sizes of a
compiled program cannot depend on values.

Shapes: N tokens of a device, E features, k experts for each token, X experts, L of them on each
device; M is the sum of N · k over all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....graph.placement.arrays import beside
from ...moe.assignments import moe_create_indices


class Sorting(NamedTuple):
    """The choices of all devices' tokens, sorted by expert.

    Attributes:
        ids: index of the expert of each choice, ``[M]``; X for an index that is out of range.
        order: choices sorted by expert, ``[M]``.
        starts: offsets of the experts in that order, ``[X + 1]``.
        places: position of each choice in that order, ``[M]``.
        count: number k of choices of a token.
    """

    ids: jax.Array
    order: jax.Array
    starts: jax.Array
    places: jax.Array
    count: int


def plan_of(ids: Sequence[jax.Array], experts: int) -> Sorting:
    """Sorts the choices of all devices, ``[N, k]`` for each device.

    Example:
        >>> plan = plan_of([jnp.array([[2, 0]]), jnp.array([[2, 1]])], 3)
        >>> plan.order.tolist(), plan.starts.tolist(), plan.places.tolist()
        ([1, 3, 0, 2], [0, 1, 2, 4], [2, 0, 3, 1])
    """
    flat, order, starts, places = _sorted(experts, [beside(one, ids[0]) for one in ids])
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
    """The rows for the experts of one device, and the offsets of the experts among them.

    Args:
        tokens: tokens ``[N, E]`` of each device.
        device: index of the receiving device in ``tokens``.
        experts: indices of the experts of that device.

    Returns:
        The rows ``[M, E]``, with zeros after those of the last expert, and the offsets ``[L + 1]`` in int32.
    """
    like = tokens[device]
    every = [beside(one, like) for one in (plan.order, plan.starts, *tokens)]
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
    """The weighted sums of the experts' results for the tokens of one device.

    Args:
        results: results ``[M, E]`` of each device, in the order of :func:`received`.
        experts: indices of the experts of each device.
        shares: factors of the results, ``[N, k]``.
        first: number of choices of the devices before this one.
        like: array on the device that receives the sums.

    Returns:
        ``[N, E]`` in float32; each device sums the results of its own experts before it sends them.
    """
    total: Any = None
    for rows, own in zip(results, experts, strict=True):
        mine = (beside(one, rows) for one in (plan.ids, plan.places, plan.starts, shares))
        part = beside(_weighed(rows, own.start, own.stop, first, *mine), like)
        total = part if total is None else total + part
    return total


@jax.jit
def _weighed(
    rows: jax.Array, start: Any, stop: Any, first: Any,
    ids: jax.Array, places: jax.Array, starts: jax.Array, shares: jax.Array,
) -> jax.Array:  # fmt: skip
    """The weighted sums of the results of experts from ``start`` to ``stop``, for the tokens of a device."""
    mine = first + jnp.arange(shares.shape[0] * shares.shape[1], dtype=jnp.int32)
    inside = (ids[mine] >= start) & (ids[mine] < stop)
    found = rows[jnp.where(inside, places[mine] - starts[start], 0)]
    # Zeros, not a factor 0: rows of other experts may hold NaN.
    found = jnp.where(inside[:, None], found, 0).astype(jnp.float32)
    found = found.reshape(*shares.shape, rows.shape[-1])
    return jnp.sum(found * shares.astype(jnp.float32)[..., None], axis=1)
