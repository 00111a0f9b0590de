"""Layout of a KV cache on a mesh that splits the query heads over more devices than there are KV heads.

A cache may be larger than the weights, so each device holds a different part of it, without replicas.
The KV heads are split as far as possible. The devices that would have the same heads divide the
sequences among them, or, if there are too few sequences, the slots of all sequences.

In the arrays of the cache, the part of each device is a separate index of the axis of heads, so that an
ordinary sharding of this axis places it.

Shapes: L layers, batch B, T tokens, H query heads, K KV heads, S slots, head dimension D; n devices
in h groups of r devices; the h groups split the KV heads.
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
from ...kernels.explicit import parts_over


class CacheLayout(NamedTuple):
    """How the keys and values ``[L, B, K, S, D]`` of a cache are placed on a mesh; hashable.

    Arrays have the shape ``[L, B / rows, K · rows · slots, S / slots, D]``. The device with index
    ``i · r + j`` along ``over`` has the KV heads of group i, and of these either part j of ``rows``
    equal parts of the sequences, or the slots whose index modulo ``slots`` is j.

    Attributes:
        mesh: mesh of the cache.
        batch: mesh axes that split the sequences.
        over: mesh axes that split the axis of heads.
        heads: number h of parts of the KV heads.
        rows, slots: numbers of parts of the sequences and of the slots; at most one is not 1.
        splits_queries: whether the number of devices along ``over`` divides the number of query heads.
    """

    mesh: Any
    batch: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    heads: int = 1
    rows: int = 1
    slots: int = 1
    splits_queries: bool = True

    def spec_of(self, rank: int) -> PartitionSpec:
        """The PartitionSpec of the cache's arrays with ``rank`` axes."""
        return spec_of([(), self.batch, self.over, (), ()][:rank])

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of keys and values."""
        return NamedSharding(self.mesh, self.spec_of(5))

    def queries(self, rank: int) -> PartitionSpec:
        """The PartitionSpec of queries ``[B, ..., H, D]`` with ``rank`` axes."""
        heads = self.over if self.splits_queries else ()
        return spec_of([self.batch, *[()] * (rank - 3), heads, ()])

    def results(self, rank: int) -> PartitionSpec:
        """The PartitionSpec of the result of :meth:`CachePart.results`, with ``rank`` axes."""
        if self.splits_queries or self.slots > 1:
            return self.queries(rank)
        return spec_of([(*self.batch, *self.over)])

    def joined(self, array: jax.Array) -> jax.Array:
        """The vectors of one KV head ``[B / rows, rows · slots, S / slots, D]`` in their order, ``[B, S, D]``.

        Example:
            >>> layout = CacheLayout(None, slots=2)
            >>> layout.joined(jnp.array([[[[0], [2]], [[1], [3]]]]))[0, :, 0].tolist()
            [0, 1, 2, 3]
        """
        (rows, _, slots, width), count = array.shape, 1
        for name in self.batch:
            count *= self.mesh.shape[name]
        # Each part of the batch axes has its own sequences, whose parts are along the axis of heads.
        parts = array.reshape(count, rows // count, self.rows, self.slots, slots, width)
        parts = jnp.transpose(parts, (0, 2, 1, 4, 3, 5))
        return parts.reshape(rows * self.rows, slots * self.slots, width)

    @property
    def group(self) -> int:
        """The number r of devices with the same KV heads."""
        return self.rows * self.slots

    @property
    def parts(self) -> int:
        """The number of parts of the whole cache."""
        return self.heads * self.group * parts_over(self.mesh, self.batch)

    @property
    def sizes(self) -> str:
        """The axes of the query heads and their sizes, for messages."""
        return " and ".join(f"{name}={self.mesh.shape[name]}" for name in self.over)


def cache_layout(
    mesh: Any, batch: int, num_heads: int, num_kv_heads: int, over: Sequence[str] = ()
) -> CacheLayout:
    """The layout of a cache on a mesh.

    The sequences are split over the batch axes that divide their number evenly. The mesh axes of the query heads
    split, in this order of preference,

    1. the KV heads, if these divide evenly over the axes;
    2. the KV heads into the greatest common divisor of both numbers, and the sequences into the remaining
       number of parts: Llama 70 B on ``model=64`` has 8 parts of its KV heads × 8 of the sequences;
    3. the KV heads in the same way, and the slots into the remaining number of parts.

    Args:
        mesh: mesh, which may be abstract.
        batch, num_heads, num_kv_heads: sizes B, H and K.
        over: mesh axes that split the query heads; by default the mesh's ``model`` axis.

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
    count = parts_over(mesh, names)
    # If the query heads are not split, every device needs all KV heads.
    splits_queries = num_heads % count == 0
    heads = math.gcd(num_kv_heads, count) if splits_queries else 1
    rest = count // heads
    of_batch = batch // parts_over(mesh, rows)
    parts = (rest, 1) if of_batch % rest == 0 else (1, rest)
    return CacheLayout(mesh, rows, names, heads, *parts, splits_queries)


def page_layout(
    mesh: Any, batch: int, num_heads: int, num_kv_heads: int, page_size: int
) -> CacheLayout | None:
    """The layout of a pool of pages, whose arrays are ``[L, N, K · slots, page_size / slots, D]``.

    The axes that split the sequences of a call split the pages too, N / parts for each part: tables have numbers
    within a part. Devices that would have the same KV heads divide the slots of each page among them.

    Args:
        mesh: mesh, which may be abstract; None: one device.
        batch: number of sequences of a call, or of those that the pool is for.
        num_heads, num_kv_heads: sizes H and K.
        page_size: number of tokens of a page.

    Returns:
        None if each device has whole pages of all sequences, with a part of the KV heads or with all.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 8), ("data", "model"))
        >>> page_layout(mesh, 4, 8, 4, 64)[1:6], page_layout(mesh, 1, 8, 8, 64)
        ((('data',), ('model',), 4, 1, 2), None)
    """
    if mesh is None:
        return None
    found = cache_layout(mesh, batch, num_heads, num_kv_heads)
    slots = found.group
    if page_size % slots:  # such a mesh keeps all KV heads on each device
        found, slots = found._replace(over=(), heads=1, splits_queries=False), 1
    return found._replace(rows=1, slots=slots) if found.batch or slots > 1 else None


class CachePart:
    """The part of a divided cache on one device, and the exchange of queries and results, inside ``shard_map``.

    The arrays that methods take have all sequences of the device's shard along the batch axes.

    Args:
        layout: layout of the cache.
    """

    def __init__(self, layout: CacheLayout):
        self.layout, self.slots = layout, layout.slots
        self._number = jax.lax.axis_index(layout.over)
        count = layout.heads * layout.group
        self._groups = [list(range(i, i + layout.group)) for i in range(0, count, layout.group)]

    @property
    def first(self) -> jax.Array:
        """The index of the device's first slot; the others follow in steps of ``slots``."""
        return self._number % self.slots

    def numbers(self, size: int) -> jax.Array:
        """The indices, among all slots, of the device's ``size`` slots."""
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
        return self.rows(self.of_heads(array, array.ndim - 2))

    def of_heads(self, array: jax.Array, axis: int = 0) -> jax.Array:
        """The part of an array along an axis of heads that belongs to the KV heads of the device."""
        size = array.shape[axis] // self.layout.heads
        first = self._number // self.layout.group * size
        return jax.lax.dynamic_slice_in_dim(array, first, size, axis)

    def queries(self, array: jax.Array) -> jax.Array:
        """The queries, from ``[B, ..., H, D]``, that attend to the device's keys."""
        if not self.layout.splits_queries:
            return self.rows(array)
        heads = array.ndim - 2
        if self.layout.slots > 1:
            return jax.lax.all_gather(
                array, self.layout.over, axis=heads, tiled=True, axis_index_groups=self._groups
            )
        return self._exchanged(array, 0, heads)

    def results(self, array: jax.Array, sums: jax.Array | None) -> jax.Array:
        """The results for the device's own query heads or sequences, after the exchange between devices.

        Args:
            array: results ``[B, ..., H, D]`` of attention to this device's keys.
            sums: logarithm of the softmax's denominator for each query, ``[B, ..., H]``, if the slots are divided.
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
        """An all-to-all in the group: splits axis ``split`` over its devices and concatenates along ``joined``."""
        if self.layout.group == 1:
            return array
        over, groups = self.layout.over, tuple(map(tuple, self._groups))
        found: Any = _all_to_all((over, groups), array, split, joined)
        return found


# JAX has no batching rule for an all-to-all with axis_index_groups. The transpose of an all-to-all is its inverse.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3))
def _all_to_all(where: Any, array: jax.Array, split: int, joined: int) -> jax.Array:
    return _batched_all_to_all(where, split, joined)(array)


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
