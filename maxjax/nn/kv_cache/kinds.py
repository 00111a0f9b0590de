"""The kinds of states that layers keep of earlier tokens in a ``KVCache``, and their sizes.

A kind follows from a model's configuration and describes the state of one layer; it makes the arrays of a group.

Shapes: L layers, batch B, K KV heads, S slots (the capacity), head dimension D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...kernels.explicit import parts_over
from .recurrent import Recurrent
from .slots import Latent, Slots


class Place(NamedTuple):
    """The placement of the arrays of a state.

    Attributes:
        sharding: device or Sharding of arrays ``[L, B, K, S, D]``; None means the default device.
        rows, slots: numbers of parts into which devices with the same KV heads divide the sequences
            and the slots (``layout``).
        over: mesh axes that split the heads or channels of a recurrent state, if these divide evenly.
    """

    sharding: Any = None
    rows: int = 1
    slots: int = 1
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of each token.

    Attributes:
        heads, width: numbers K of KV heads and D of features of a head.
        window: number of tokens that a token attends to, itself included; only these are kept.
            None means all.
        query_heads: number H of query heads, by which a mesh splits the cache; None: K.
    """

    heads: int
    width: int
    window: int | None = None
    query_heads: int | None = None
    slots_class: ClassVar[Any] = Slots

    def make(
        self, layers: int, batch: int, capacity: int, dtype: Any, place: Place, zeros: Any
    ) -> Any:
        """The empty state of a number of layers; ``zeros`` is ``jnp.zeros`` or makes placeholders."""
        slots = capacity if self.window is None else min(self.window, capacity)
        heads = self.heads * place.rows * place.slots
        shape = (layers, batch // place.rows, heads, -(-slots // place.slots), self.width)
        return self.slots_class.empty(shape, dtype, place.sharding, zeros, self.window, place.slots)


@dataclass(frozen=True)
class LatentVectors(KeysValues):
    """One latent vector of each token, which is key and value at once for all query heads."""

    slots_class: ClassVar[Any] = Latent


class State(NamedTuple):
    """One array of a layer for each sequence.

    Attributes:
        name: name of the array.
        shape: shape ``[...]`` for one sequence.
        axis: index in ``shape`` of the axis that ``Place.over`` splits; None means that no axis is split.
        dtype: name of the dtype.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class States:
    """Arrays of a fixed size for each sequence: the recurrent states of a layer.

    Attributes:
        each: descriptions of the arrays of one layer.

    Example:
        >>> kind = States((State("conv", (3, 8), axis=1),))
        >>> kind.make(2, 5, 64, None, Place(), jnp.zeros).arrays["conv"].shape
        (2, 5, 3, 8)
    """

    each: tuple[State, ...]

    def make(
        self, layers: int, batch: int, capacity: int, dtype: Any, place: Place, zeros: Any
    ) -> Recurrent:
        """The empty state of a number of layers; ``capacity`` and ``dtype`` are for keys and values, and ignored."""
        arrays = {}
        for one in self.each:
            shape, where = (layers, batch, *one.shape), self.sharding(one, place)
            arrays[one.name] = zeros(shape, jnp.dtype(one.dtype), device=where)
        return Recurrent(arrays)

    def sharding(self, one: State, place: Place) -> Any:
        """The sharding of the arrays ``[L, B, ...]`` of one state."""
        where = place.sharding
        if not isinstance(where, NamedSharding):
            return where
        count = parts_over(where.mesh, place.over)
        splits = one.axis is not None and place.over and one.shape[one.axis] % count == 0
        over = [place.over if splits and i == one.axis else None for i in range(len(one.shape))]
        rows = (*where.spec, None, None)[1]
        return NamedSharding(where.mesh, PartitionSpec(None, rows, *over))


class Shared(NamedTuple):
    """The kind of a layer that reads the state of another layer and keeps no state itself.

    Attributes:
        layer: index of the other layer.
    """

    layer: int


class Group(NamedTuple):
    """The layers that keep the same kind of state.

    Attributes:
        kind: kind of the state of each layer.
        layers: number L of layers that keep it.
        numbers: for each layer of the model, its index in the arrays of the group; -1 for layers
            that are not in the group.
        first: index of the first layer of the model that is in the group.
    """

    kind: KeysValues | States
    layers: int
    numbers: tuple[int, ...]
    first: int


def groups_of(kept: Sequence[Mapping[str, KeysValues | States | Shared]]) -> dict[str, Group]:
    """The groups of a model's layers; ``kept`` has for each layer the kinds of its states, by the group's name.

    Raises:
        ValueError: two layers keep different kinds under one name, or a layer shares a state that does not exist.

    Example:
        >>> far, near = KeysValues(1, 4), KeysValues(1, 4, 8)
        >>> found = groups_of([{"near": near}, {"far": far}, {"near": near}, {"near": Shared(0)}])
        >>> found["near"].layers, found["near"].numbers, found["far"].numbers
        (2, (0, -1, 1, 0), (-1, 0, -1, -1))
    """
    kinds: dict[str, KeysValues | States] = {}
    counts: dict[str, int] = {}
    numbers: dict[str, list[int]] = {}
    for i, layer in enumerate(kept):
        for name, kind in layer.items():
            places = numbers.setdefault(name, [-1] * len(kept))
            if isinstance(kind, Shared):
                if not 0 <= kind.layer < i or places[kind.layer] < 0:
                    raise ValueError(
                        f"layer {i} shares {name!r} of layer {kind.layer}, which has none"
                    )
                places[i] = places[kind.layer]
                continue
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"layer {i} keeps {kind} under {name!r}, others {kinds[name]}")
            places[i] = counts.get(name, 0)
            counts[name] = places[i] + 1
    return {
        name: Group(kind, counts[name], tuple(numbers[name]), numbers[name].index(0))
        for name, kind in kinds.items()
    }


def numbers_of(groups: Mapping[str, Group]) -> np.ndarray | dict[str, np.ndarray] | None:
    """The index of each layer in its groups, ``[L]``; a dict by group if they differ; None if it is the layer's index.

    Example:
        >>> far, near = KeysValues(1, 4), KeysValues(1, 4, 8)
        >>> numbers_of(groups_of([{"near": near}, {"far": far}, {"near": near}])).tolist()
        [0, 0, 1]
        >>> numbers_of(groups_of([{"far": far}] * 3)) is None
        True
    """
    each = [np.array(group.numbers, np.int32) for group in groups.values()]
    own = np.arange(len(each[0]), dtype=np.int32)
    if all(((found < 0) | (found == own)).all() for found in each):
        return None
    merged = np.max(each, axis=0)
    if all(((found < 0) | (found == merged)).all() for found in each):
        return np.maximum(merged, 0)
    return {name: np.maximum(found, 0) for name, found in zip(groups, each, strict=True)}
