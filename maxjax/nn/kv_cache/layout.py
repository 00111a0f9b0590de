"""Layout of a KV cache on a mesh that splits the query heads over more devices than there are KV heads.

A cache may be larger than the weights, so every device holds a part of it and none holds what
another has. The KV heads are split as far as they go. The devices that would have the same heads
divide the sequences among them, or the slots of all sequences if there are too few of these.

Each device's part is then a head of its own in the arrays of the cache, so that an ordinary sharding
of the axis of heads places it.

Shapes: L layers, batch B, T tokens, H query heads, K KV heads, S slots, head dimension D; n devices
in h groups of r, so that the h groups split the KV heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...graph.placement.specs import axis_of, batch_axes, spec_of


class CacheLayout(NamedTuple):
    """How the keys and values ``[L, B, K, S, D]`` of a cache lie on a mesh; hashable.

    Arrays have the shape ``[L, B / rows, K · rows · slots, S / slots, D]``. The device with number
    ``i · r + j`` of ``over`` has the KV heads of group i: of the sequences number j of ``rows``
    equal parts, or of the slots those whose number has the remainder j.

    Attributes:
        mesh: the mesh.
        batch: the mesh axes that split the sequences.
        over: the mesh axes that split the axis of heads.
        heads: h, the number of parts of the KV heads.
        rows, slots: the number of parts of the sequences and of the slots; at most one is not 1.
        splits_queries: whether ``over`` divides the number of query heads.
    """

    mesh: Any
    batch: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    heads: int = 1
    rows: int = 1
    slots: int = 1
    splits_queries: bool = True

    def spec_of(self, rank: int) -> PartitionSpec:
        """The PartitionSpec of the cache's arrays of so many axes."""
        return spec_of([(), self.batch, self.over, (), ()][:rank])

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of keys and values."""
        return NamedSharding(self.mesh, self.spec_of(5))

    def queries(self, rank: int) -> PartitionSpec:
        """The PartitionSpec of queries ``[B, ..., H, D]`` of so many axes."""
        heads = self.over if self.splits_queries else ()
        return spec_of([self.batch, *[()] * (rank - 3), heads, ()])

    def results(self, rank: int) -> PartitionSpec:
        """The PartitionSpec of what :meth:`CachePart.results` gives, of so many axes."""
        if self.splits_queries or self.slots > 1:
            return self.queries(rank)
        return spec_of([(*self.batch, *self.over)])

    @property
    def group(self) -> int:
        """r, the number of devices with the same KV heads."""
        return self.rows * self.slots

    @property
    def parts(self) -> int:
        """The number of parts of the whole cache."""
        return self.heads * self.group * math.prod(self.mesh.shape[name] for name in self.batch)

    @property
    def sizes(self) -> str:
        """The axes of the query heads and their sizes, for messages."""
        return " and ".join(f"{name}={self.mesh.shape[name]}" for name in self.over)


def cache_layout(
    mesh: Any, batch: int, num_heads: int, num_kv_heads: int, over: Sequence[str] = ()
) -> CacheLayout:
    """The layout of a cache on a mesh.

    The sequences are split over the batch axes that divide their number. The axes of the query heads
    split, in this order of preference,

    1. the KV heads, if the axes divide their number;
    2. the KV heads as far as a divisor of both numbers goes, and for the rest the sequences. 70 B on
       ``model=64`` has 8 parts of its KV heads × 8 of the sequences;
    3. the same, and for the rest the slots.

    Args:
        mesh: the mesh, which may be abstract.
        batch, num_heads, num_kv_heads: B, H and K.
        over: the axes that split the query heads; by default the mesh's ``model`` axis.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 8), ("data", "model"))
        >>> cache_layout(mesh, 2, 8, 8)[1:]
        (('data',), ('model',), 8, 1, 1, True)
        >>> cache_layout(mesh, 4, 8, 4)[3:6], cache_layout(mesh, 2, 8, 4)[3:6]
        ((4, 2, 1), (4, 1, 2))
    """
    rows = batch_axes(mesh, batch)
    model = axis_of(mesh, "model")
    names = tuple(over) or (() if model is None else (model,))
    names = tuple(name for name in names if mesh.shape[name] > 1 and name not in rows)
    count = math.prod(mesh.shape[name] for name in names)
    # Query heads that are not split meet all KV heads on every device.
    splits_queries = num_heads % count == 0
    heads = math.gcd(num_kv_heads, count) if splits_queries else 1
    rest = count // heads
    of_batch = batch // math.prod(mesh.shape[name] for name in rows)
    parts = (rest, 1) if of_batch % rest == 0 else (1, rest)
    return CacheLayout(mesh, rows, names, heads, *parts, splits_queries)


class CachePart:
    """One device's part of a divided cache, and of what meets it: inside a ``shard_map``.

    Arguments are of all sequences of the device's batch axes.

    Args:
        layout: the layout.
    """

    def __init__(self, layout: CacheLayout):
        self.layout, self.slots = layout, layout.slots
        self._number = jax.lax.axis_index(layout.over)
        count = layout.heads * layout.group
        self._groups = [list(range(i, i + layout.group)) for i in range(0, count, layout.group)]

    @property
    def first(self) -> jax.Array:
        """The number of the device's first slot; the others follow in steps of ``slots``."""
        return self._number % self.slots

    def numbers(self, size: int) -> jax.Array:
        """The numbers, among all slots, of the device's ``size`` slots."""
        return jnp.arange(size, dtype=jnp.int32) * self.slots + self.first

    def rows(self, array: jax.Array) -> jax.Array:
        """The device's sequences of an array ``[B or 1, ...]``."""
        parts = self.layout.rows
        if parts == 1 or array.shape[0] == 1:
            return array
        size = array.shape[0] // parts
        return jax.lax.dynamic_slice_in_dim(array, self._number % parts * size, size, 0)

    def keys(self, array: jax.Array) -> jax.Array:
        """The device's sequences and heads of keys or values ``[B, ..., K, D]``."""
        size = array.shape[-2] // self.layout.heads
        first = self._number // self.layout.group * size
        return self.rows(jax.lax.dynamic_slice_in_dim(array, first, size, array.ndim - 2))

    def of_heads(self, array: jax.Array) -> jax.Array:
        """What belongs to the query heads of :meth:`queries`, of an array ``[H]``."""
        size = array.shape[0] // self.layout.heads
        return jax.lax.dynamic_slice_in_dim(array, self._number // self.layout.group * size, size)

    def queries(self, array: jax.Array) -> jax.Array:
        """The queries ``[B, ..., H, D]`` that meet the device's keys."""
        if not self.layout.splits_queries:
            return self.rows(array)
        heads = array.ndim - 2
        if self.layout.slots > 1:
            return jax.lax.all_gather(
                array, self.layout.over, axis=heads, tiled=True, axis_index_groups=self._groups
            )
        return self._exchanged(array, 0, heads)

    def results(self, array: jax.Array, sums: jax.Array | None) -> jax.Array:
        """The results of the device's queries, from those of the keys of one device.

        Args:
            array: results ``[B, ..., H, D]`` of queries and keys of one device.
            sums: logarithm of each query's sum ``[B, ..., H]``, if the slots are divided.
        """
        if sums is None:
            if self.layout.splits_queries:
                return self._exchanged(array, array.ndim - 2, 0)
            return array
        wide = jnp.concatenate([array.astype(sums.dtype), sums[..., None]], -1)
        if self.layout.splits_queries:
            found = self._exchanged(wide[None], array.ndim - 1, 0)  # [r, B, ..., H / n, D + 1]
            share = jax.nn.softmax(found[..., -1:], axis=0)
            return jnp.sum(found[..., :-1] * share, axis=0).astype(array.dtype)
        over = self.layout.over
        largest = jax.lax.pmax(jax.lax.stop_gradient(sums), over)
        share = jnp.exp(sums - largest)[..., None]
        both = jax.lax.psum(jnp.concatenate([array.astype(sums.dtype) * share, share], -1), over)
        return (both[..., :-1] / both[..., -1:]).astype(array.dtype)

    def _exchanged(self, array: jax.Array, split: int, joined: int) -> jax.Array:
        """Splits one axis over the group, and joins what the others have of another."""
        if self.layout.group == 1:
            return array
        over, groups = self.layout.over, tuple(map(tuple, self._groups))
        found: Any = _all_to_all((over, groups), array, split, joined)
        return found


# JAX has no rule that batches an all-to-all in groups; the inverse of one is its transpose.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3))
def _all_to_all(where: Any, array: jax.Array, split: int, joined: int) -> jax.Array:
    found: jax.Array = _batched_all_to_all(where, split, joined)(array)
    return found


_all_to_all.defvjp(
    lambda where, array, split, joined: (_all_to_all(where, array, split, joined), None),
    lambda where, split, joined, _, given: (_all_to_all(where, given, joined, split),),
)


def _batched_all_to_all(where: Any, split: int, joined: int) -> Any:
    over, groups = where

    @jax.custom_batching.custom_vmap
    def run(array: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(array, over, split, joined, axis_index_groups=groups, tiled=True)

    @run.def_vmap
    def _(_: int, batched: Sequence[bool], array: jax.Array) -> tuple[jax.Array, bool]:
        found: Any = _all_to_all(where, jnp.moveaxis(array, 0, -1), split, joined)
        return jnp.moveaxis(found, -1, 0), True

    return run
