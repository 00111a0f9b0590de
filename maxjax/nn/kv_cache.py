"""Floor 4. KVCache: the keys and values of all tokens so far, of all layers, as one pytree.

State is an argument and a result: a model takes a cache and gives the next one, and a jitted step
that donates it works in place. Below: errors, jnp. Above: the decoders, which write into it, and
the engine, which makes and grows it.

Shapes: L layers, B sequences, K heads of keys, S slots, width D.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ..dtype import DType
from ..errors import UserInputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens of B sequences, each with a length of its own.

    Attributes:
        keys, values: ``[L, B, K, S, D]``; token t of a sequence is in slot t, keys turned by
            their position.
        lengths: int32 ``[B]``: how many tokens of each sequence are in. What later slots hold
            means nothing.

    Example:
        >>> cache = KVCache.empty(2, batch=3, num_kv_heads=1, capacity=8, head_dim=4)
        >>> cache.keys.shape, cache.capacity, cache.grow(16).capacity
        ((2, 3, 1, 8, 4), 8, 16)
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(
        cls,
        num_layers: int,
        *,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: Any = DType.float32,
        sharding: Any = None,
    ) -> KVCache:
        """A cache that holds nothing.

        Args:
            num_layers, batch, num_kv_heads, capacity, head_dim: L, B, K, S and D.
            dtype: Of keys and values; a float.
            sharding: Of keys and values, a device or a Sharding; each device makes its part.

        Raises:
            UserInputError: A size is not a positive number, or ``dtype`` is no float.
        """
        shape = tuple(
            _count(name, n)
            for name, n in [
                ("num_layers", num_layers), ("batch", batch), ("num_kv_heads", num_kv_heads),
                ("capacity", capacity), ("head_dim", head_dim),
            ]
        )  # fmt: skip
        kind = DType.of(dtype)
        if not kind.is_float():
            raise UserInputError(f"a KV cache holds floats, not {kind.name}")
        per_row = sharding
        if isinstance(sharding, NamedSharding):
            spec = (*sharding.spec, None, None)
            per_row = NamedSharding(sharding.mesh, PartitionSpec(spec[1]))
        keys, values = (jnp.zeros(shape, kind.np, device=sharding) for _ in range(2))
        return cls(keys, values, jnp.zeros(batch, jnp.int32, device=per_row))

    @property
    def num_layers(self) -> int:
        """L."""
        return self.keys.shape[0]

    @property
    def batch(self) -> int:
        """B."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """S: how many tokens a sequence may have."""
        return self.keys.shape[3]

    def grow(self, capacity: int) -> KVCache:
        """The same with more slots; lies as it lay.

        Raises:
            UserInputError: ``capacity`` is less than there is.

        Example:
            >>> cache = KVCache.empty(1, batch=1, num_kv_heads=1, capacity=4, head_dim=2)
            >>> cache.grow(2)
            Traceback (most recent call last):
            ...
            maxjax.errors.UserInputError: a cache of 4 slots cannot become one of 2
        """
        more = _count("capacity", capacity) - self.capacity
        if more < 0:
            raise UserInputError(
                f"a cache of {self.capacity} slots cannot become one of {capacity}"
            )
        if not more:
            return self
        keys, values = (_longer(a, more) for a in (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values)

    def check_room(self, counts: Any) -> None:
        """Refuses what would not fit, where the numbers are known: outside of ``jax.jit``.

        Args:
            counts: How many tokens come: a number, or integers ``[B]``.

        Raises:
            UserInputError: A sequence would be longer than the capacity.
        """
        tracers = any(isinstance(a, Tracer) for a in (self.lengths, counts))
        if tracers or not getattr(self.lengths, "is_fully_addressable", True):
            if isinstance(counts, int) and counts > self.capacity:
                raise _full(0, counts, self.capacity, None)
            return
        lengths = jax.device_get(self.lengths)
        counts = jax.device_get(counts) + 0 * lengths
        after = lengths + counts
        row = int(after.argmax()) if after.size else 0
        if after.size and after[row] > self.capacity:
            raise _full(int(lengths[row]), int(counts[row]), self.capacity, row)


def _longer(array: jax.Array, more: int) -> jax.Array:
    """With so many more slots of zeros, on the devices it is on."""
    where = None if isinstance(array, Tracer) else array.sharding
    pad = lambda a: jnp.pad(a, [(0, 0)] * 3 + [(0, more), (0, 0)])
    return jax.jit(pad, out_shardings=where)(array) if where is not None else pad(array)


def _full(length: int, count: int, capacity: int, row: int | None) -> UserInputError:
    which = "" if row is None else f" of row {row}"
    return UserInputError(
        f"the KV cache{which} holds {length} tokens and has no room for {count} more: its capacity "
        f"is {capacity}. cache.grow({length + count}) makes room"
    )


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserInputError(f"{name} of a KV cache is a positive number, not {value!r}")
    return value
