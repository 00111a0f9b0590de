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

from ...graph.stacked_weight import StackedWeight
from ...storage.files import aligned_empty
from .values import Fit, as_it_is, host, is_lazy


class StackLoad:
    """The values of all layers for one stack.

    Attributes:
        stack: Which.
        fits: One for each layer.
    """

    def __init__(self, stack: StackedWeight, fits: Sequence[Fit]):
        self.stack, self.fits = stack, fits
        first = fits[0]
        dtype = jax.dtypes.canonicalize_dtype(first.dtype.np)
        self._kind = jax.ShapeDtypeStruct((len(fits), *map(int, first.dims)), dtype)
        self._read: set[int] = set()
        self._memory: np.ndarray | None = None
        if _on_host(stack):
            nbytes = self._kind.size * self._kind.dtype.itemsize
            try:
                self._memory = aligned_empty(nbytes)
            except MemoryError as error:
                raise MemoryError(f"the host has no {nbytes} bytes for the weights '{first.name}' of "
                                  f"{len(fits)} layers") from error  # fmt: skip

    def direct(self) -> Iterator[tuple[Any, np.ndarray]]:
        """What can be read from disk as it is: (WeightData, the memory it goes to)."""
        if self._memory is None:
            return
        places = np.split(self._memory, len(self.fits))
        for i, (one, place) in enumerate(zip(self.fits, places, strict=True)):
            if is_lazy(one) and as_it_is(one):
                self._read.add(i)
                yield one.value, place

    def array(self) -> jax.Array:
        """The stacked array, once what :meth:`direct` gave has been read."""
        others = [i for i in range(len(self.fits)) if i not in self._read]
        sharding = self.stack._sharding
        if self._memory is not None:
            # JAX on a CPU keeps aligned memory; nobody else has seen this.
            whole = self._memory.view(self._kind.dtype).reshape(self._kind.shape)
            for i in others:
                whole[i] = host(self.fits[i])
            return jax.device_put(whole, sharding)
        stack = jnp.zeros(self._kind.shape, self._kind.dtype, device=sharding)
        for i in others:
            stack = _insert(stack, jax.device_put(host(self.fits[i]), sharding), i)
        return stack


def plan(fits: Sequence[Fit]) -> tuple[list[StackLoad], list[Fit]]:
    """The stacks that get a value for every layer, and all other values."""
    groups: dict[int, tuple[StackedWeight, dict[int, Fit]]] = {}
    for one in fits:
        if one.weight._home is not None:
            stack, place = one.weight._home
            groups.setdefault(id(stack), (stack, {}))[1][place] = one
    loads, taken = [], set[int]()
    for stack, group in groups.values():
        same = len({(one.dtype, tuple(map(str, one.dims))) for one in group.values()}) == 1
        if same and len(group) == stack.span.count:
            loads.append(StackLoad(stack, [group[i] for i in range(len(group))]))
            taken.update(id(one) for one in group.values())
    return loads, [one for one in fits if id(one) not in taken]


def _on_host(stack: StackedWeight) -> bool:
    """Whether the array will be in host memory that JAX takes over without a copy."""
    if stack._sharding is None:
        device = jnp.zeros(()).devices()
    else:
        device = stack._sharding.device_set
    return len(device) == 1 and next(iter(device)).platform == "cpu"


@partial(jax.jit, donate_argnums=0)
def _insert(stack: jax.Array, layer: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0)
