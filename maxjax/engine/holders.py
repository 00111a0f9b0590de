"""Who holds arrays in this process: Weights, key-value caches, and the Modules that Weights belong to.

Nobody keeps a list of these objects, so they are looked up among all objects of the process, which takes
about 50 ms. Arrays are told apart by the memory they lie in: two objects may be views of one buffer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer

from ..graph.weight.stacked import StackedWeight
from ..graph.weight.stored import is_value
from ..graph.weight.weight import Weight
from ..kernels.stack_slice import stack_of
from ..nn.kv_cache.cache import KVCache
from ..nn.layer import Module


def live(*kinds: type) -> list[Any]:
    """The objects of this process that are instances of one of the classes."""
    found = []
    for one in gc.get_objects():
        try:
            if issubclass(type(one), kinds):
                found.append(one)
        except ReferenceError:  # a weak reference to what is gone
            continue
    return found


def arrays_in(holder: Weight | StackedWeight) -> list[jax.Array]:
    """The arrays that a Weight or a StackedWeight holds itself.

    Those of a stack are the stack's, and a part of a Weight (``shard``) has none: it would compute one.
    """
    stored = holder.stored
    if stored.home is not None or (isinstance(holder, Weight) and holder.shard_idx is not None):
        return []
    if isinstance(holder, StackedWeight) and not holder.is_whole:
        leaves: Iterable[Any] = (holder.leaf_of(i) for i in range(holder.count))
    else:
        leaves = [stack_of(stored.leaf)]
    return [leaf for leaf in leaves if is_value(leaf) and is_array(leaf)]


def is_array(leaf: Any) -> bool:
    """Whether it is an array with memory of its own."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and not leaf.is_deleted()


def buffers(array: jax.Array) -> Iterator[tuple[Any, int, int]]:
    """The device, the address and the bytes of each part of an array that this process has."""
    try:
        for shard in array.addressable_shards:
            data = shard.data
            yield shard.device, data.unsafe_buffer_pointer(), data.on_device_size_in_bytes()
    except (AttributeError, RuntimeError, NotImplementedError):  # deleted meanwhile, or random keys
        return


def owner(weight: Weight | StackedWeight) -> Any:
    """What holds the array of a Weight: itself, or the outermost stack that it is in."""
    holder: Any = weight
    while holder.stored.home is not None:
        holder = holder.stored.home[0]
    return holder


def roots(modules: list[Module]) -> list[Module]:
    """Those of the Modules that are in no other one of them."""
    inner = {
        id(child)
        for module in modules
        for child in (*module._mx_children.values(), *vars(module).get("_mx_made", {}).values())
    }
    return [module for module in modules if id(module) not in inner]


def weights_of(module: Module) -> dict[str, Weight]:
    """The Weights of a Module by name; none of one whose names contradict each other."""
    try:
        return module.raw_state_dict()
    except (ValueError, AttributeError):  # also one that is being built
        return {}


def cache_arrays() -> list[jax.Array]:
    """The arrays of all key-value caches."""
    leaves = (leaf for cache in live(KVCache) for leaf in jax.tree.leaves(cache))
    return [leaf for leaf in leaves if is_array(leaf)]
