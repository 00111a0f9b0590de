"""Floor 4. Loading a LayerStack: each layer's bytes go straight to their place in the stack.

On the host the stacked array is allocated once and files are read into it. Elsewhere the
array is made on the device and filled layer by layer, with one layer in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...graph.binding import default_device
from ...graph.shape import StaticDim
from ...graph.stacked_weight import StackedWeight
from ...graph.weights import read_all
from ...storage.files import aligned_empty
from .values import Fit, as_it_is, host, is_lazy, materialise


class StackLoad:
    """The values of all layers for one stack.

    Args:
        stack: Which.
        fits: One for each layer.
        taken: ids of what has a place to be read to already; what this one reads is added.
    """

    def __init__(self, stack: StackedWeight, fits: Sequence[Fit], taken: set[int]):
        self.stack, self.fits = stack, fits
        first = fits[0]
        dtype = jax.dtypes.canonicalize_dtype(first.dtype.np)
        self._kind = jax.ShapeDtypeStruct((len(fits), *map(int, first.dims)), dtype)
        self._sharding = stack._sharding or _committed(fits)
        self._read: dict[int, Any] = {}
        self._memory: np.ndarray | None = None
        if not _on_host(self._sharding):
            return
        nbytes = self._kind.size * self._kind.dtype.itemsize
        try:
            self._memory = aligned_empty(nbytes)
        except MemoryError as error:
            raise MemoryError(
                f"the host has no {nbytes} bytes for the weights '{first.name}' of {len(fits)} layers"
            ) from error
        for i, one in enumerate(fits):
            if is_lazy(one) and as_it_is(one) and id(one.value) not in taken:
                taken.add(id(one.value))
                self._read[i] = one.value

    def direct(self) -> Iterator[tuple[Any, np.ndarray]]:
        """What is to be read from disk as it is: (WeightData, the memory it goes to)."""
        if self._memory is not None:
            places = np.split(self._memory, len(self.fits))
            yield from ((data, places[i]) for i, data in self._read.items())

    def array(self) -> jax.Array:
        """The stacked array, once what :meth:`direct` gave has been read."""
        others = [i for i in range(len(self.fits)) if i not in self._read]
        if self._memory is not None:
            # JAX on a CPU keeps aligned memory; nobody else has seen this.
            whole = self._memory.view(self._kind.dtype).reshape(self._kind.shape)
            for i in others:
                whole[i] = host(self.fits[i])
            return jax.device_put(whole, self._sharding)
        stack = jnp.zeros(self._kind.shape, self._kind.dtype, device=self._sharding)
        layer = self.stack.template._sharding or self._sharding
        for i in others:
            stack = _insert(stack, jax.device_put(host(self.fits[i]), layer), i)
        return stack

    def store(self, array: jax.Array) -> None:
        """Makes it the value, and what the weights were loaded as the declaration of all."""
        self.stack._put(array)
        self.stack._declare(self.fits[0].weight, self.stack.template._sharding)


def plan(fits: Sequence[Fit]) -> tuple[list[StackLoad], list[Fit], list[str]]:
    """The stacks that get a value for every layer, all other values, and what does not fit."""
    groups: dict[int, tuple[StackedWeight, dict[int, Fit]]] = {}
    for one in fits:
        if one.weight._home is not None:
            stack, place = one.weight._home
            groups.setdefault(id(stack), (stack, {}))[1][place] = one
    whole, in_stacks, problems = [], set[int](), []
    for stack, group in groups.values():
        kinds = {(one.dtype, tuple(map(str, one.dims))) for one in group.values()}
        template = stack.template
        if len(kinds) == 1 and len(group) == stack.span.count and _has_sizes(group[0]):
            whole.append((stack, [group[i] for i in range(len(group))]))
            in_stacks.update(id(one) for one in group.values())
        elif kinds != {(template._dtype, tuple(map(str, template._dims)))}:
            one = next(iter(group.values()))
            problems.append(f"weight '{one.name}' belongs to a LayerStack, whose layers must have one shape and dtype: "
                            "load all of them alike, or unstack() first")  # fmt: skip
    single = [one for one in fits if id(one) not in in_stacks]
    taken = {id(one.value) for one in single}
    loads = [] if problems else [StackLoad(stack, group, taken) for stack, group in whole]
    return loads, single, problems


def read(single: Sequence[Fit], loads: Sequence[StackLoad]) -> tuple[list[Any], list[jax.Array]]:
    """The arrays of single values and of stacks: read in parallel, converted and placed.

    Raises:
        ValueError: An integer that does not fit the 32 bits JAX runs in.
        CheckpointError: A file that cannot be read.
    """
    into = [pair for load in loads for pair in load.direct()]
    lazy = [one.value for one in single if is_lazy(one)] + [data for data, _ in into]
    fresh = read_all(lazy, {id(data): memory for data, memory in into})
    return materialise(single, fresh), [load.array() for load in loads]


def _has_sizes(one: Fit) -> bool:
    return all(isinstance(dim, StaticDim) for dim in one.dims)


def _committed(fits: Sequence[Fit]) -> Any:
    """Where arrays were put by somebody, if all of them are in one place."""
    found = [one.value.sharding if getattr(one.value, "committed", False) else None for one in fits]
    single = isinstance(found[0], jax.sharding.SingleDeviceSharding)
    return found[0] if single and all(sharding == found[0] for sharding in found) else None


def _on_host(sharding: Any) -> bool:
    """Whether the array will be in host memory that JAX takes over without a copy."""
    devices = [default_device()] if sharding is None else list(sharding.device_set)
    return len(devices) == 1 and devices[0].platform == "cpu"


@partial(jax.jit, donate_argnums=0)
def _insert(stack: jax.Array, layer: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0)
