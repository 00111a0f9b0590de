"""Loading of a LayerStack: each layer's bytes go directly to their place in the stack.

On the host the stacked array is allocated once and files are read into it. Elsewhere the
array is made on the device and filled layer by layer, with a few layers in host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.shape import StaticDim
from ....graph.weight.stacked import StackedWeight
from ....graph.weights.device_reads import Destination, is_host, read_destinations
from .fit import Fit, convert, destination, read_values, source


def plan(
    fits: Sequence[Fit],
) -> tuple[list[tuple[StackedWeight, list[Fit]]], list[Fit], list[str]]:
    """The stacks that are complete with the Fits of their layers, all other values, and the problems."""
    groups: dict[int, tuple[StackedWeight, dict[int, Fit]]] = {}
    for one in fits:
        if one.weight.stored.home is not None:
            stack, place = one.weight.stored.home
            groups.setdefault(id(stack), (stack, {}))[1][place] = one
    whole, in_stacks, problems = [], set[int](), []
    for stack, group in groups.values():
        kinds = {(one.dtype, tuple(map(str, one.dims))) for one in group.values()}
        if len(kinds) == 1 and len(group) == stack.span.count and _has_sizes(group[0]):
            whole.append((stack, [group[i] for i in range(len(group))]))
            in_stacks.update(id(one) for one in group.values())
        elif kinds != {(stack.dtype, tuple(map(str, stack.dims)))}:
            one = next(iter(group.values()))
            problems.append(f"weight '{one.name}' belongs to a LayerStack, whose layers must have one shape and dtype: "
                            "load all of them alike, or unstack() first")  # fmt: skip
    single = [one for one in fits if id(one) not in in_stacks]
    return whole, single, problems


def read(
    single: Sequence[Fit], stacks: Sequence[tuple[Sequence[Fit], Any]]
) -> tuple[list[Any], list[jax.Array]]:
    """The arrays of single values and of stacks, read in parallel, converted and put on devices.

    Args:
        stacks: for each stack a Fit for each layer, and its sharding; None leaves that to the values.

    Raises:
        ValueError: an integer does not fit the 32 bits that JAX runs in.
        CheckpointError: a file cannot be read.
    """
    arrays = read_values(single)
    pairs = [(fits, _stacked(fits, sharding)) for fits, sharding in stacks]
    read = read_destinations(stack for _, stack in pairs if is_host(stack.where))
    return arrays, [
        next(read) if is_host(stack.where) else _by_layer(fits, stack) for fits, stack in pairs
    ]


def _stacked(fits: Sequence[Fit], sharding: Any) -> Destination:
    """The values of all layers as one array."""
    layer = destination(fits[0])
    return dataclasses.replace(
        layer,
        shape=(len(fits), *layer.shape),
        sources=[source(one) for one in fits],
        sharding=sharding or _committed(fits),
        axis=0,
        convert=lambda number, array: convert(fits[number], array),
    )


def _by_layer(fits: Sequence[Fit], stacked: Destination) -> jax.Array:
    """The stacked array, made on its devices and filled layer by layer."""
    stack = jnp.zeros(stacked.shape, stacked.dtype, device=stacked.sharding)
    layers = read_destinations(destination(one, stacked.sharding) for one in fits)
    for i, layer in enumerate(layers):
        stack = _insert(stack, layer, i)
    return stack


def _has_sizes(one: Fit) -> bool:
    return all(isinstance(dim, StaticDim) for dim in one.dims)


def _committed(fits: Sequence[Fit]) -> Any:
    """The common device or sharding of arrays that are committed to one; otherwise None."""
    found = [one.value.sharding if getattr(one.value, "committed", False) else None for one in fits]
    single = isinstance(found[0], jax.sharding.SingleDeviceSharding)
    return found[0] if single and all(sharding == found[0] for sharding in found) else None


@partial(jax.jit, donate_argnums=0)
def _insert(stack: jax.Array, layer: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0)
