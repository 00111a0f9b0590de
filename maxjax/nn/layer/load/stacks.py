"""Loading of a LayerStack: each layer's bytes go directly to their place in the stack.

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

from ....graph.placement.arrays import put
from ....graph.program import default_device
from ....graph.shape import StaticDim
from ....graph.weight.stacked import StackedWeight
from ....graph.weights import read_all
from ....graph.weights.device_reads import (
    assemble,
    boxes,
    fill,
    is_host,
    is_spread,
    memory_for,
    places,
    read_pieces,
    slices,
)
from ....graph.weights.weight_data import WeightData
from ....storage.boxes import Box, count, extents
from .fit import Fit, as_it_is, host, in_pieces, is_lazy, materialise, pieces


class StackLoad:
    """A load of the values of all layers into one stack.

    Args:
        stack: stack to load into.
        fits: one Fit for each layer.
        taken: ids of values that already have memory to be read into; this load adds its own.
    """

    def __init__(self, stack: StackedWeight, fits: Sequence[Fit], taken: set[int]):
        self.stack, self.fits = stack, fits
        first = fits[0]
        self._dtype = jax.dtypes.canonicalize_dtype(first.dtype.np)
        template = stack.template.stored
        self._layout = template.layout
        self._layer = tuple(map(int, first.dims))
        if self._layout is not None:
            self._layer = self._layout.shape(self._layer)
        self._target = stack.leaf_sharding or _committed(fits)  # None leaves the device to JAX
        self._sharding = self._target or jax.sharding.SingleDeviceSharding(default_device())
        # The sharding of one layer's weight.
        self._placed = template.leaf_sharding or self._sharding
        self._read: set[int] = set()
        self._memory: dict[Box, np.ndarray] = {}
        if not is_host(self._sharding):
            return
        for box in boxes(self._placed, self._layer):
            nbytes = len(fits) * count(box) * self._dtype.itemsize
            self._memory[box] = memory_for(
                nbytes, f"the weights '{first.name}' of {len(fits)} layers"
            )
        for i, one in enumerate(fits):
            if (
                is_lazy(one)
                and as_it_is(one)
                and one.value.is_as_stored
                and id(one.value) not in taken
            ):
                taken.add(id(one.value))
                self._read.add(i)

    def direct(self) -> Iterator[tuple[WeightData, Box, np.ndarray]]:
        """The reads from disk without conversion: data, the part of it, and the memory to read into."""
        for box, memory in self._memory.items():
            layers = np.split(memory, len(self.fits))
            for i in sorted(self._read):
                for region, place in places(self._layout, box, layers[i]):
                    yield self.fits[i].value, region, place

    def array(self) -> jax.Array:
        """The stacked array; the reads from :meth:`direct` must be complete."""
        others = [i for i in range(len(self.fits)) if i not in self._read]
        shape = (len(self.fits), *self._layer)
        if is_host(self._sharding):
            # JAX on a CPU reuses aligned memory; nobody else holds this array.
            layers = {
                box: memory.view(self._dtype).reshape(len(self.fits), *extents(box))
                for box, memory in self._memory.items()
            }
            for i in others:
                self._copy(i, layers)
            whole = {((0, len(self.fits)), *box): array for box, array in layers.items()}
            if not is_spread(self._target):
                (array,) = whole.values()
                return put(array, self._target, self.fits[0].name)
            return assemble(self.fits[0].name, shape, self._target, whole)
        stack = jnp.zeros(shape, self._dtype, device=self._target)
        for i, layer in zip(others, self._layers(others), strict=True):
            stack = _insert(stack, layer, i)
        return stack

    def _copy(self, i: int, layers: dict[Box, np.ndarray]) -> None:
        """Copies the value of a layer that needs conversion to its place in the stack."""
        one = self.fits[i]
        if in_pieces(one):
            asked = pieces(one)
            memory = asked.empty()
            fill(list(asked.parts(memory)))
            found = asked.converted(memory)
        else:
            value = one.weight.stored.arranged(host(one))
            found = {box: value[slices(box)] for box in layers}
        for box, array in layers.items():
            array[i] = found[box]

    def _layers(self, others: Sequence[int]) -> Iterator[jax.Array]:
        """The layers' arrays on their sharding, one after the other."""
        for i in others:
            one = self.fits[i]
            if in_pieces(one):
                yield from read_pieces([pieces(one)])
            else:
                where = self.stack.template.stored.leaf_sharding or self._target
                yield put(one.weight.stored.arranged(host(one)), where, one.name)

    def store(self, array: jax.Array) -> None:
        """Stores ``array`` as the value, and updates the declaration of all weights."""
        self.stack.put(array)
        template = self.stack.template.stored
        self.stack.declare(self.fits[0].weight, template.sharding, template.layout)


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
        template = stack.template.stored
        if len(kinds) == 1 and len(group) == stack.span.count and _has_sizes(group[0]):
            whole.append((stack, [group[i] for i in range(len(group))]))
            in_stacks.update(id(one) for one in group.values())
        elif kinds != {(template.dtype, tuple(map(str, template.dims)))}:
            one = next(iter(group.values()))
            problems.append(f"weight '{one.name}' belongs to a LayerStack, whose layers must have one shape and dtype: "
                            "load all of them alike, or unstack() first")  # fmt: skip
    single = [one for one in fits if id(one) not in in_stacks]
    taken = {id(one.value) for one in single}
    loads = [] if problems else [StackLoad(stack, group, taken) for stack, group in whole]
    return loads, single, problems


def read(single: Sequence[Fit], loads: Sequence[StackLoad]) -> tuple[list[Any], list[jax.Array]]:
    """The arrays of single values and of stacks, read in parallel, converted and put on devices.

    Raises:
        ValueError: an integer does not fit the 32 bits that JAX runs in.
        CheckpointError: a file cannot be read.
    """
    fill([part for load in loads for part in load.direct()])
    lazy = [one.value for one in single if is_lazy(one) and not in_pieces(one)]
    return materialise(single, read_all(lazy)), [load.array() for load in loads]


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
