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

from ....graph.placement.arrays import default_device
from ....graph.shape import StaticDim
from ....graph.weight.stacked import StackedWeight
from ....graph.weights.device_reads import Destination, is_host, read_destinations
from .fit import Fit, convert, destination, read_values, source


class StackLoad:
    """A load of the values of all layers into one stack.

    Args:
        stack: stack to load into.
        fits: one Fit for each layer.
    """

    def __init__(self, stack: StackedWeight, fits: Sequence[Fit]):
        self.stack, self.fits = stack, fits
        self._sharding = stack.leaf_sharding or _committed(fits)  # None leaves the device to JAX

    @property
    def is_on_host(self) -> bool:
        """Whether the devices use the host's memory."""
        return is_host(self._sharding or jax.sharding.SingleDeviceSharding(default_device()))

    @property
    def destination(self) -> Destination:
        """The stacked array."""
        layer = destination(self.fits[0])
        return dataclasses.replace(
            layer,
            shape=(len(self.fits), *layer.shape),
            sources=[source(one) for one in self.fits],
            sharding=self._sharding,
            axis=0,
            convert=lambda number, array: convert(self.fits[number], array),
        )

    def by_layer(self) -> jax.Array:
        """The stacked array, made on the devices and filled layer by layer."""
        whole = self.destination
        stack = jnp.zeros(whole.shape, whole.dtype, device=self._sharding)
        layers = read_destinations(destination(one, self._sharding) for one in self.fits)
        for i, layer in enumerate(layers):
            stack = _insert(stack, layer, i)
        return stack

    def store(self, array: jax.Array) -> None:
        """Stores ``array`` as the value, and updates the declaration of all weights."""
        self.stack.put(array)
        self.stack.declare(self.fits[0].weight, self.stack.sharding, self.stack.layout)


def plan(fits: Sequence[Fit]) -> tuple[list[StackLoad], list[Fit], list[str]]:
    """The loads of complete stacks, all other values, and the problems found."""
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
    loads = [] if problems else [StackLoad(stack, group) for stack, group in whole]
    return loads, single, problems


def read(single: Sequence[Fit], loads: Sequence[StackLoad]) -> tuple[list[Any], list[jax.Array]]:
    """The arrays of single values and of stacks, read in parallel, converted and put on devices.

    Raises:
        ValueError: an integer does not fit the 32 bits that JAX runs in.
        CheckpointError: a file cannot be read.
    """
    arrays = read_values(single)
    stacks = read_destinations(load.destination for load in loads if load.is_on_host)
    return arrays, [next(stacks) if load.is_on_host else load.by_layer() for load in loads]


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
