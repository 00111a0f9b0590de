"""Floor 3. Binding: which values a compiled Graph runs with, and whether they go with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..driver import Buffer
from ..errors import some
from ..kernels.stack_slice import whole
from .graph import Entry, Graph
from .weight import EPOCH, Weight
from .weights import WeightData


class Binding:
    """The values that a compiled Graph runs with, collected anew when one has changed.

    Attributes:
        types: What each was when the Graph was compiled, a ``jax.ShapeDtypeStruct``.
    """

    def __init__(self, graph: Graph, registry: Mapping[str, Any] | None):
        self._graph = graph.name
        self._entries = graph.entries
        self._fixed = [_from_registry(entry, graph, registry) for entry in graph.entries]
        self.types = [
            jax.ShapeDtypeStruct(
                entry.shape, entry.stand_in.dtype, sharding=_placement(entry, fixed)
            )
            for entry, fixed in zip(self._entries, self._fixed, strict=True)
        ]
        self._epoch = -1
        self._values: Any = None

    def require(self, registry: Mapping[str, Any] | None, only: Sequence[Weight] | None) -> None:
        """Refuses weights, or ``only`` some of them, that have no value.

        Raises:
            ValueError: There is one; it is named.
        """
        wanted = None if only is None else set(map(id, only))
        for entry, fixed in zip(self._entries, self._fixed, strict=True):
            if fixed is not None or (wanted is not None and id(entry.weight) not in wanted):
                continue
            if (name := _lazy_name(entry)) is not None:
                raise ValueError(_missing(name, registry))

    def values(self) -> Any:
        """One array for each weight.

        Raises:
            ValueError: A weight has no value, or one that does not go with the program.
        """
        if self._epoch != EPOCH.values:
            epoch = EPOCH.values
            self._values = [
                self._value(*of) for of in zip(self._entries, self._fixed, self.types, strict=True)
            ]
            self._epoch = epoch
        return self._values

    def _value(self, entry: Entry, fixed: Any, kind: jax.ShapeDtypeStruct) -> Any:
        if fixed is not None:
            return fixed
        if (lazy := _lazy_name(entry)) is not None:
            raise ValueError(f"weight '{lazy}' has no value: '{self._graph}' is compiled, but its weights are not "
                             "loaded yet (load_state_dict(), or maxjax.init())")  # fmt: skip
        array, name = entry.weight._array(), entry.names[0]
        if not isinstance(array, jax.Array):
            array = jnp.asarray(array)
        if array.shape != kind.shape or array.dtype != kind.dtype:
            raise ValueError(f"weight '{name}' was {kind.dtype} {list(kind.shape)} when '{self._graph}' was compiled, "
                             f"and is {array.dtype} {list(array.shape)} now: compile it again")  # fmt: skip
        there = kind.sharding
        if there is not None and not getattr(array, "committed", True):
            return jax.device_put(array, there)
        if not getattr(array, "committed", False):
            return array
        if there is None:
            there = jax.sharding.SingleDeviceSharding(default_device())
        if not array.sharding.is_equivalent_to(there, array.ndim):
            raise ValueError(f"weight '{name}' was on {_shown(there)} when '{self._graph}' was compiled, and is on "
                             f"{_shown(array.sharding)} now: compile it again, or place it there")  # fmt: skip
        return array


def _missing(name: str, registry: Mapping[str, Any] | None) -> str:
    known = "" if registry is None else f"; it has {some(sorted(registry)) or 'nothing'}"
    return f"Weight '{name}' is not in the weights registry{known}"


def _shown(sharding: jax.sharding.Sharding) -> str:
    devices = list(sharding.device_set)
    return f"{devices[0].platform}:{devices[0].id}" if len(devices) == 1 else str(sharding)


def default_device() -> Any:
    """Where JAX puts what nobody placed."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def _placement(entry: Entry, fixed: Any) -> Any:
    """Where a weight is, or is to be; None where JAX is free to choose."""
    value = whole(entry.weight._leaf) if fixed is None else fixed
    return value.sharding if getattr(value, "committed", False) else _declared(entry)


def _lazy_name(entry: Entry) -> str | None:
    for name in entry.names:
        weight = entry.find(name)
        assert weight is not None
        if weight._is_missing:
            return name
    return None


def _from_registry(entry: Entry, graph: Graph, registry: Mapping[str, Any] | None) -> Any:
    """A weight's value in the registry; of a stack, those of its layers; None if it is not there."""
    if registry is None or all(registry.get(name) is None for name in entry.names):
        return None
    held = [name for other in graph.entries for name in other.names]
    values = []
    for name in entry.names:
        if held.count(name) > 1:
            raise ValueError(
                f"Graph '{graph.name}' has several weights named '{name}', so the weights registry "
                "cannot say which is meant: call state_dict() on the model first, which names them"
            )
        value = registry.get(name)
        if value is None:
            value = entry.find(name)
            if value is not None and value._is_missing:
                raise ValueError(_missing(name, registry))
        values.append(_checked(name, entry, value))
    single = isinstance(entry.weight, Weight)
    kept = [entry.template._arranged(value) for value in values]
    return jax.device_put(kept[0] if single else jnp.stack(kept), _declared(entry))


def _declared(entry: Entry) -> Any:
    """Where what is stored of a weight is to be."""
    weight = entry.weight
    return weight._leaf_sharding if isinstance(weight, Weight) else weight._sharding


def _checked(name: str, entry: Entry, value: Any) -> Any:
    array = np.asarray(value) if isinstance(value, (WeightData, Buffer)) else value
    array = array._as_array() if isinstance(array, Weight) else array
    array = array if isinstance(array, jax.Array) else np.array(array)
    wanted = entry.stand_in.dtype
    shape = entry.shape if isinstance(entry.weight, Weight) else entry.shape[1:]
    if entry.template._layout is not None:
        shape = tuple(int(d) for d in entry.template._dims)
    if tuple(array.shape) != shape or jax.dtypes.canonicalize_dtype(array.dtype) != wanted:
        raise ValueError(f"Weight '{name}' in the weights registry is {array.dtype} {tuple(array.shape)}, "
                         f"but the graph wants {wanted} {shape}")  # fmt: skip
    return array
