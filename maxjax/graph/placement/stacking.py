"""Stacking: the arrays of n layers as one array, and the inverse.

Each direction is one compiled program, which needs no memory except for its operands and its result
and has ended when it returns: memory of operands that the caller then drops is free at once.
``jnp.stack`` and indexing dispatch an operation for each layer and would need a second copy of all
layers; on a mesh, XLA would also choose the shardings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .arrays import put
from .specs import names_in, spec_of


def stack(parts: Sequence[Any], sharding: Any, lead: tuple[int, ...] = ()) -> Any:
    """Arrays of one shape and dtype as one array ``[n, ...]``, bit for bit.

    Args:
        parts: n arrays.
        sharding: Sharding of the result; None lets JAX choose.
        lead: sizes of several leading axes of the result instead of one, whose product is n.

    Example:
        >>> stack([jnp.ones(2), jnp.zeros(2)], None).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    if not all(_is_concrete(part) for part in parts):  # tracers must stay differentiable
        made = _led(jnp.stack(parts), lead)
        return put(made, sharding) if sharding is not None else made
    devices = getattr(sharding, "device_set", None)
    direct = all(part.sharding.device_set == devices for part in parts)
    made = _stack_program(sharding if direct else None, tuple(lead))(*parts)
    if sharding is not None and not direct:
        made = put(made, sharding)
    return jax.block_until_ready(made)


def unstack(array: Any, sharding: Any, levels: int = 1) -> list[Any]:
    """The arrays ``[...]`` of an array ``[n, ...]``, bit for bit.

    Args:
        array: an array with at least one axis.
        sharding: Sharding of each result; None lets JAX choose.
        levels: number of leading axes that the results do not have.

    Example:
        >>> [part.tolist() for part in unstack(jnp.arange(4.0).reshape(2, 2), None)]
        [[0.0, 1.0], [2.0, 3.0]]
    """
    if not _is_concrete(array):
        return list(jnp.unstack(_flat(array, levels)))
    direct = array.sharding.device_set == getattr(sharding, "device_set", None)
    count = math.prod(array.shape[:levels])
    parts = _unstack_program(sharding if direct else None, count, levels)(array)
    if sharding is not None and not direct:
        parts = [put(part, sharding) for part in parts]
    return jax.block_until_ready(parts)


def with_leading(sharding: Any, levels: int, split: tuple[str, ...] = ()) -> Any:
    """The Sharding of a stack with ``levels`` leading axes, of arrays that each have ``sharding``.

    Args:
        split: mesh axes that split the last of the leading axes.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("expert", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> one = NamedSharding(mesh, PartitionSpec("model"))
        >>> tuple(with_leading(one, 2, ("expert",)).spec)
        (None, 'expert', 'model')
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    lead = spec_of([*[()] * (levels - 1), split])
    spec = PartitionSpec(*lead, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def without_leading(sharding: Any, levels: int) -> Any:
    """The Sharding of one of a stack's arrays; None if the leading axes of the stack are split.

    Example:
        >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> tuple(without_leading(NamedSharding(mesh, PartitionSpec(None, "model")), 1).spec)
        ('model',)
    """
    if not isinstance(sharding, NamedSharding):
        return sharding if isinstance(sharding, SingleDeviceSharding) else None
    if any(names_in(entry) for entry in sharding.spec[:levels]):
        return None
    spec = PartitionSpec(*sharding.spec[levels:])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _is_concrete(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, Tracer)


@functools.lru_cache(maxsize=128)
def _stack_program(sharding: Any, lead: tuple[int, ...] = ()) -> Any:
    """A jitted function for each sharding, cached: otherwise each stack would be compiled again."""

    def stack(*parts: jax.Array) -> jax.Array:
        made = _led(jnp.stack([_bits(part) for part in parts]), lead)
        return _from_bits(made, parts[0].dtype)

    return jax.jit(stack, out_shardings=sharding)


@functools.lru_cache(maxsize=128)
def _unstack_program(sharding: Any, count: int, levels: int = 1) -> Any:
    def unstack(array: jax.Array) -> list[jax.Array]:
        parts = jnp.unstack(_flat(_bits(array), levels))
        return [_from_bits(part, array.dtype) for part in parts]

    return jax.jit(unstack, out_shardings=[sharding] * count)


def _led(array: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    return array if len(lead) < 2 else array.reshape(*lead, *array.shape[1:])


def _flat(array: jax.Array, levels: int) -> jax.Array:
    if levels == 1:
        return array
    return array.reshape(math.prod(array.shape[:levels]), *array.shape[levels:])


def _bits(array: jax.Array) -> jax.Array:
    """Floats of 8 or 16 bits as unsigned integers: on CPUs, XLA would convert them to float32 and back."""
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    word = _WORDS.get(jnp.finfo(array.dtype).bits) if is_float else None
    return array if word is None else jax.lax.bitcast_convert_type(array, word)


def _from_bits(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


_WORDS: dict[int, Any] = {8: jnp.uint8, 16: jnp.uint16}
