"""Slots: the arrays in which layers of a ``KVCache`` keep each token, as floats or as int8 with scales.

``Slots`` has keys and values; ``Latent`` has one array that is both, as in multi-head latent attention.

Shapes: L layers, batch B, T tokens, K KV heads, S slots, head dimension D.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ...graph.placement.rows import foreign, total
from ...kernels import decode_attention, explicit
from ...kernels.cache_read import pages_of
from ...kernels.cache_write import write_tokens
from ...kernels.int8_rows import quantised, restored
from ...rendering.rendered import Rendered, summary
from ...rendering.row import Row, bytes_text


class _Tokens(Rendered):
    """Base class of all kinds of slots; subclasses hold the arrays."""

    keys: jax.Array
    key_scales: jax.Array | None
    window: int | None
    parts: int
    # Whether the keys are also the values.
    is_shared: ClassVar[bool] = False

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], dtype: Any, sharding: Any = None, zeros: Any = jnp.zeros,
        window: int | None = None, parts: int = 1,
    ) -> Self:  # fmt: skip
        """Slots of zeros with ``shape`` (L, B, K, S, D), and with scales if ``dtype`` is int8.

        ``zeros`` is ``jnp.zeros``, or a function with its arguments that makes placeholders.
        """
        each = range(1 if cls.is_shared else 2)
        arrays = [zeros(shape, dtype, device=sharding) for _ in each]
        scales = [_scales(shape, dtype, sharding, zeros) for _ in each]
        subclass: Any = cls
        return subclass(*arrays, *scales, window, parts)

    def _mx_row(self) -> Row:
        arrays = {f.name: getattr(self, f.name) for f in _fields(self)}
        return total(type(self).__name__, arrays)

    def _mx_title(self, row: Row) -> str:
        name = type(self).__name__
        if (other := foreign(name, row, self.keys, 5)) is not None:
            return other
        layers, batch, heads, slots, width = self.keys.shape
        return (
            f"{name}({layers} layers, batch {batch}, {heads} KV heads, {slots} slots of {width}, {row.dtype}, "
            f"{bytes_text(row.nbytes)}{''.join(f', {note}' for note in row.notes)})"
        )

    def __repr__(self) -> str:
        return summary(self)

    @property
    def layers(self) -> int:
        """Number L of layers."""
        return self.keys.shape[0]

    @property
    def size(self) -> int:
        """Number S of slots."""
        return self.keys.shape[3]

    @property
    def capacity(self) -> int:
        """The number of tokens that all parts together can hold."""
        return self.size * self.parts

    @property
    def arrays(self) -> list[jax.Array]:
        """Keys and values ``[L, B, K, S, D]`` and, for int8, their scales, in the order of the kernels' arguments."""
        return jax.tree.leaves(self)

    def floats(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values in a float dtype."""
        found = self._restored(jax.tree.leaves(self), dtype)
        return found[0], found[-1]

    def _restored(self, arrays: list[jax.Array], dtype: Any) -> list[jax.Array]:
        """Stored arrays, which are followed by their scales for int8, as floats."""
        if self.key_scales is None:
            return [a.astype(dtype) for a in arrays]
        half = len(arrays) // 2
        return [restored(a, s, dtype) for a, s in zip(arrays[:half], arrays[half:], strict=True)]

    def longer(self, more: int) -> Self:
        """A copy with ``more`` further slots of zeros, on the same devices."""
        return jax.tree.map(lambda a: _longer(a, more), self)

    def grown(self, capacity: int) -> Self:
        """Slots with room for ``capacity`` tokens, or for the window if that is less."""
        # While there are fewer slots than the window, no slot has been overwritten: token t is in slot t.
        wanted = capacity if self.window is None else min(self.window, capacity)
        # This holds for a divided cache too: slot s is slot s // parts of part s % parts.
        more = -(-wanted // self.parts) - self.size
        return self.longer(more) if more > 0 else self

    def holds(self, stored: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Whether sequences of ``stored`` tokens can continue after their first ``kept``; bools ``[B]``."""
        if self.window is None:
            return np.ones(stored.shape, bool)
        # The next token attends to window - 1 stored tokens; the oldest of these may be overwritten.
        return (stored <= self.capacity) | (kept >= stored - 1) | (kept == 0)

    def rewound(self, kept: np.ndarray) -> Self:
        """These slots themselves: the slots after the first ``kept`` tokens will be overwritten."""
        return self

    def with_arrays(self, arrays: Iterable[jax.Array]) -> Self:
        """A copy with other arrays, given in the order of the pytree's leaves."""
        return jax.tree.unflatten(jax.tree.structure(self), list(arrays))

    def written(
        self, layer: Any, k: jax.Array, v: jax.Array, place: jax.Array, **options: Any
    ) -> Self:
        """A copy with ``k`` and ``v`` ``[B, T, K, D]`` written to slots ``place`` ``[B, T]`` of a layer.

        Args:
            layer, place, options: as for ``kernels.cache_write.write_tokens``. ``division`` is the keys' division. With
                ``table`` the arrays are pools of pages, and ``place`` are positions in the sequences.
        """
        layer = jnp.asarray(layer, jnp.int32)
        pairs = zip(jax.tree.leaves(self), self._stored(k, v), strict=True)
        return self.with_arrays(write_tokens(a, new, layer, place, **options) for a, new in pairs)

    def at(self, layer: Any, place: jax.Array, dtype: Any) -> list[jax.Array]:
        """The keys and values ``[B, K, D]`` in slot ``place`` ``[B]`` of each sequence of a layer, as floats."""
        batch, heads = self.keys.shape[1:3]
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        columns = jnp.arange(heads, dtype=jnp.int32)[None]
        place = jnp.clip(jnp.broadcast_to(place, (batch,)), 0, self.size - 1)[:, None]

        def run(array: jax.Array, layer: Any, place: jax.Array) -> jax.Array:
            return array[layer, rows, columns, place]

        found = [_gathered(run, a, jnp.asarray(layer, jnp.int32), place) for a in self.arrays]
        return self._restored(found, dtype)

    def decoded(
        self, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, **options: Any
    ) -> tuple[jax.Array, Self]:
        """A decode step: returns the attention's result ``[B, H, D]``, and a copy with the new token.

        Args:
            q, k, v, lengths, options: as for :func:`~maxjax.kernels.decode_attention`; with ``table`` the arrays are
                pools of pages.
        """
        keys, *scales = jax.tree.leaves(self)
        new, values = (k, None), None
        if not self.is_shared:
            new, values = (k, v), scales.pop(0)
        y, *arrays = decode_attention(
            q, *new, keys, values, lengths, scales=tuple(scales) or None, **options
        )
        return y, self.with_arrays(arrays)

    def pages(self, layer: Any, table: jax.Array) -> list[jax.Array]:
        """Return the tokens of one layer of a pool of pages, in the order of :attr:`arrays`.

        Args:
            layer, table: as for ``kernels.cache_read.pages_of``.

        Returns:
            Keys and values ``[B, K, M · P, D]`` and, for int8, their scales.
        """
        layer = jnp.asarray(layer, jnp.int32)
        return self.with_arrays(pages_of(a, layer, table) for a in jax.tree.leaves(self)).arrays

    def layer_slots(self, layer: Any) -> Self:
        """The slots of one layer."""
        return jax.tree.map(lambda a: _at(a, layer, (1, *a.shape[1:])), self)

    def replaced(
        self, layer: Any, old: Self, k: jax.Array, v: jax.Array, source: jax.Array
    ) -> Self:
        """A copy with all slots of one layer rewritten: with new tokens, or with those of ``old``.

        Args:
            old: slots of this layer only. As a separate operand they are read before the layer is written,
                so XLA does not need to copy the whole array.
            k, v: keys and values of the new tokens, ``[B, T, K, D]``.
            source: index of the token (of T) for each slot, ``[B, S]``; negative indices keep the slot of ``old``.
        """
        leaves, old_leaves = jax.tree.leaves(self), jax.tree.leaves(old)
        parts = zip(leaves, old_leaves, self._stored(k, v), strict=True)
        return self.with_arrays(_replaced(*each, layer, source) for each in parts)

    def _stored(self, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """Keys and values in their stored form, in the order of the leaves."""
        new = [k] if self.is_shared else [k, v]
        if self.key_scales is None:
            return new
        values, scales = zip(*map(quantised, new), strict=True)
        return [*values, *scales]

    def rounded(self, *new: jax.Array) -> tuple[jax.Array, ...]:
        """The values that :meth:`floats` would return for ``new [..., D]`` after it was stored, in its dtype."""
        if self.key_scales is None:
            return tuple(a.astype(self.keys.dtype).astype(a.dtype) for a in new)
        return tuple(restored(*quantised(a), a.dtype) for a in new)


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


def _fields(slots: Any) -> list[Any]:
    return [field for field in dataclasses.fields(slots) if not field.metadata.get("static")]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Slots(_Tokens):
    """Keys and values of L layers.

    Attributes:
        keys, values: arrays ``[L, B, K, S, D]``, floats or int8.
        key_scales, value_scales: scales of the rows of D numbers, float32 ``[L, B, K, S]``, for int8; otherwise None.
        window: number of tokens that the layers attend to; None means all.
        parts: number of parts into which devices with the same KV heads divide the slots (``layout``).

    Example:
        >>> slots = Slots.empty((2, 1, 1, 8, 4), jnp.int8)
        >>> k = jnp.ones((1, 3, 1, 4))
        >>> slots = slots.written(1, k, 2 * k, jnp.array([[5, 0, 8]]))
        >>> slots.layer_slots(1).floats(jnp.float32)[1][0, 0, 0, :6, 0].round(3).tolist()
        [2.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None
    window: int | None = _static(None)
    parts: int = _static(1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Latent(_Tokens):
    """One array of L layers that is keys and values at once: the latent vectors of tokens.

    In multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) all heads attend to one vector for
    each token, whose first numbers are also the token's value.

    Attributes:
        keys: array ``[L, B, 1, S, D]``, floats or int8.
        key_scales: scales of the rows of D numbers, float32 ``[L, B, 1, S]``, for int8; otherwise None.
        window, parts: as for :class:`Slots`.

    Example:
        >>> latent = Latent.empty((2, 1, 1, 8, 4), jnp.float32)
        >>> k = jnp.ones((1, 1, 1, 4))
        >>> latent = latent.written(1, k, k, jnp.array([[5]]))
        >>> len(jax.tree.leaves(latent)), latent.values is latent.keys, latent.keys.sum().item()
        (1, True, 4.0)
    """

    keys: jax.Array
    key_scales: jax.Array | None = None
    window: int | None = _static(None)
    parts: int = _static(1)
    is_shared: ClassVar[bool] = True

    @property
    def values(self) -> jax.Array:
        """The keys, which are also the values."""
        return self.keys

    @property
    def arrays(self) -> list[jax.Array]:
        """The array twice and, for int8, its scales twice, as in :attr:`Slots.arrays`."""
        return [leaf for leaf in jax.tree.leaves(self) for _ in range(2)]


def _scales(shape: tuple[int, ...], dtype: Any, sharding: Any, zeros: Any) -> Any:
    """Zeros for the scales of int8 rows; None for floats."""
    if dtype != jnp.int8:
        return None
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:4]))
    return zeros(shape[:4], jnp.float32, device=sharding)


def _longer(array: jax.Array, more: int) -> jax.Array:
    pads = ((0, 0),) * 3 + ((0, more),) + ((0, 0),) * (array.ndim - 4)
    if isinstance(array, Tracer):
        return jnp.pad(array, pads)
    return _padding(pads, array.sharding)(array)


@functools.lru_cache(maxsize=128)
def _padding(pads: tuple[tuple[int, int], ...], where: Any) -> Any:
    """A jitted program for a padding. It is cached: otherwise each growth of a cache would compile again."""
    return jax.jit(lambda a: jnp.pad(a, pads), out_shardings=where)


def _at(array: jax.Array, layer: Any, shape: tuple[int, ...]) -> jax.Array:
    """The slice of this shape that starts at a layer."""
    start = (layer, *(0,) * (array.ndim - 1))
    return jax.lax.dynamic_slice(array, start, shape, allow_negative_indices=False)


def _replaced(array: jax.Array, old: jax.Array, new: jax.Array, layer: Any, source: Any) -> Any:
    def run(array: jax.Array, old: jax.Array, new: jax.Array, layer: Any, source: Any) -> jax.Array:
        each = source.reshape(*source.shape, *(1,) * (new.ndim - 2))  # [B, S, 1, ...]
        new = jnp.take_along_axis(new.astype(array.dtype), jnp.maximum(each, 0), axis=1)
        merged = jnp.where(each < 0, old[0].swapaxes(1, 2), new).swapaxes(1, 2)
        start = (layer, *(jnp.int32(0),) * (array.ndim - 1))

        def write(array: jax.Array, merged: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(array, merged, start, allow_negative_indices=False)

        def write_apart(array: jax.Array, merged: jax.Array) -> jax.Array:
            # After the barrier all of `old` has been read. Otherwise XLA for TPUs would fuse `merged` with the
            # write, or with what the next layer reads, and copy the whole array for it.
            return write(*jax.lax.optimization_barrier((array, merged)))

        return jax.lax.platform_dependent(array, merged[None], tpu=write_apart, default=write)

    return _changed(run, array, old, new, jnp.asarray(layer, jnp.int32), source)


def _gathered(run: Any, array: jax.Array, *operands: Any) -> jax.Array:
    """``run`` of a cache's array, whose result has axes of sequences and heads ``[B, K, ...]``."""
    _, rows, heads, *_ = explicit.entries(array)
    wanted = [rows, heads, *[()] * (array.ndim - 4)]
    return explicit.automatic(run, explicit.mesh_of(array), wanted)(array, *operands)


def _changed(run: Any, array: jax.Array, *operands: Any) -> jax.Array:
    """``run`` of the operands; on a mesh with Explicit axes the result has the sharding of ``array``."""
    mesh = explicit.mesh_of(array, *operands)
    return explicit.automatic(run, mesh, explicit.entries(array))(array, *operands)
