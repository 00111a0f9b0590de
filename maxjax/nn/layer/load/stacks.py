"""Loads a LayerStack: the bytes of each layer go directly into its slice of the stacked array.

On the host, the stacked array is allocated once and files are read into it. On other devices, the
array is allocated there and filled layer by layer, so that the host holds only a few layers at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from ....graph.placement.stacking import with_leading
from ....graph.shape import StaticDim
from ....graph.weight.stacked import StackedWeight, by_stack
from ....graph.weights.device_reads import Destination, is_host, read_destinations
from .fit import Fit, convert, destination, read_values, source


def plan(
    fits: Sequence[Fit],
) -> tuple[list[tuple[StackedWeight, list[Fit]]], list[Fit], list[str]]:
    """The stacks for which all layers have a Fit, with these Fits; all other Fits; and descriptions of problems."""
    whole, in_stacks, problems = [], set[int](), []
    for stack, group in by_stack((one.weight, one) for one in fits):
        if not isinstance(stack, StackedWeight):
            continue
        kinds = {(one.dtype, tuple(map(str, one.dims))) for one in group.values()}
        if len(kinds) == 1 and len(group) == stack.spec.count and _has_sizes(group[0]):
            whole.append((stack, [group[i] for i in range(len(group))]))
            in_stacks.update(id(one) for one in group.values())
        elif kinds != {(stack.spec.dtype, tuple(map(str, stack.spec.dims)))}:
            one = next(iter(group.values()))
            problems.append(f"weight '{one.name}' belongs to a LayerStack, whose layers must have one shape and dtype: "
                            "load all of them alike, or unstack() first")  # fmt: skip
    single = [one for one in fits if id(one) not in in_stacks]
    return whole, single, problems


def read(
    single: Sequence[Fit], stacks: Sequence[tuple[StackedWeight | None, Sequence[Fit]]]
) -> tuple[list[Any], list[jax.Array]]:
    """The arrays of single values and of stacks, read in parallel, converted and copied to devices.

    Args:
        stacks: stacks, each with a Fit for each of its Weights; None instead of a stack makes a new
            stack, whose sharding is that of the values.

    Raises:
        ValueError: an integer does not fit into the 32 bits that JAX uses by default.
        CheckpointError: a file cannot be read.
    """
    arrays = read_values(single)
    wanted = [(stack, fits, _stacked(stack, fits)) for stack, fits in stacks]
    read = read_destinations(one for _, _, one in wanted if is_host(one.where))
    return arrays, [
        next(read) if is_host(one.where) else _by_layer(stack, fits, one)
        for stack, fits, one in wanted
    ]


def _stacked(stack: StackedWeight | None, fits: Sequence[Fit]) -> Destination:
    """The description of the values of all layers as one array."""
    layer = destination(fits[0])
    lead = (len(fits),) if stack is None else stack.spec.lead
    sharding = None if stack is None else stack.spec.leaf_sharding
    sharding = sharding or with_leading(layer.sharding, len(lead)) or _committed(fits)
    return _of_several(fits, layer, lead, sharding)


def _of_several(
    fits: Sequence[Fit], one: Destination, lead: tuple[int, ...], sharding: Any
) -> Destination:
    """The description of several values, each like ``one``, as an array with leading axes ``lead``."""
    return dataclasses.replace(
        one,
        shape=(*lead, *one.shape),
        sources=[source(fit) for fit in fits],
        sharding=sharding,
        axis=0,
        levels=len(lead),
        convert=lambda number, array: convert(fits[number], array),
    )


def _by_layer(stack: StackedWeight | None, fits: Sequence[Fit], stacked: Destination) -> jax.Array:
    """The stacked array, allocated on its devices and filled layer by layer.

    If several devices have shares of the Weights, one Weight of each share is read at a time, so that no
    device receives the bytes of another device.
    """
    array = jnp.zeros(stacked.shape, stacked.dtype, device=stacked.sharding)
    shares = 1 if stack is None else stack.spec.shares
    count = stacked.shape[stacked.levels - 1] // shares  # number of weights in a share
    groups = _shares_in_turn(len(fits), shares, count)
    for numbers, part in zip(groups, read_destinations(
        _group([fits[i] for i in numbers], stack, stacked) for numbers in groups
    ), strict=True):  # fmt: skip
        place = np.array([numbers[0] // (shares * count), numbers[0] % count], np.int32)
        array = _insert(array, part, place, stacked.levels, shares)
    where = None if stack is None else stack.spec.leaf_place
    return jax.device_put(array, where) if isinstance(where, Format) else array


def _shares_in_turn(many: int, shares: int, count: int) -> list[list[int]]:
    """The indices of the Weights that are read together: one of each device's share.

    Example:
        >>> _shares_in_turn(8, 2, 2)
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    starts = range(0, many, shares * count)
    return [
        [start + share * count + i for share in range(shares)]
        for start in starts
        for i in range(count)
    ]


def _group(fits: Sequence[Fit], stack: StackedWeight | None, stacked: Destination) -> Destination:
    """One Weight of each device's share, as an array ``[shares, ...]``."""
    one, split = destination(fits[0], stacked.sharding), () if stack is None else stack.spec.split
    return _of_several(fits, one, (len(fits),), with_leading(one.sharding, 1, split))


def _has_sizes(one: Fit) -> bool:
    return all(isinstance(dim, StaticDim) for dim in one.dims)


def _committed(fits: Sequence[Fit]) -> Any:
    """The common device or sharding of arrays that are committed to one; otherwise None."""
    found = [one.value.sharding if getattr(one.value, "committed", False) else None for one in fits]
    single = isinstance(found[0], jax.sharding.SingleDeviceSharding)
    return found[0] if single and all(sharding == found[0] for sharding in found) else None


@partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _insert(stack: jax.Array, part: jax.Array, place: Any, levels: int, shares: int) -> jax.Array:
    """The stack with ``part [shares, ...]`` inserted at ``place``: (layer, index within each share)."""
    lead, rest = stack.shape[:levels], stack.shape[levels:]
    # [layers, shares, weights of a share, ...]: each device has one share.
    by_share = stack.reshape(math.prod(lead[:-1]), shares, lead[-1] // shares, *rest)
    by_share = jax.lax.dynamic_update_slice(
        by_share, part[None, :, None], (place[0], 0, place[1], *[0] * len(rest))
    )
    return by_share.reshape(stack.shape)
