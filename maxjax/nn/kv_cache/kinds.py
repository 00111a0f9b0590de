"""What a layer keeps of the tokens before: the kinds of states that a ``KVCache`` holds, and their sizes.

A kind is what a model's configuration says of a layer; it makes the arrays of all layers of its name.

Shapes: L layers, batch B, K KV heads, S slots (the capacity), head dimension D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .recurrent import Recurrent
from .slots import Latent, Slots


class Place(NamedTuple):
    """Where the arrays of a state lie.

    Attributes:
        sharding: device or Sharding of arrays ``[L, B, K, S, D]``; None: the default device.
        rows, slots: the numbers of parts that devices with the same KV heads divide the sequences
            and the slots into (``layout``).
        over: mesh axes that split the heads or channels of a recurrent state, where they divide them.
    """

    sharding: Any = None
    rows: int = 1
    slots: int = 1
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of each token.

    Attributes:
        heads, width: K and D.
        window: number of tokens, itself included, that a token attends to; only these are kept.
            None: all.
    """

    heads: int
    width: int
    window: int | None = None
    slots_class: ClassVar[Any] = Slots

    def make(
        self, layers: int, batch: int, capacity: int, dtype: Any, place: Place, zeros: Any
    ) -> Any:
        """The empty state of so many layers; ``zeros`` makes an array as ``jnp.zeros`` does."""
        slots = capacity if self.window is None else min(self.window, capacity)
        heads = self.heads * place.rows * place.slots
        shape = (layers, batch // place.rows, heads, -(-slots // place.slots), self.width)
        return self.slots_class.empty(shape, dtype, place.sharding, zeros, self.window, place.slots)


@dataclass(frozen=True)
class LatentVectors(KeysValues):
    """One vector of each token that all query heads attend to, which is key and value at once."""

    slots_class: ClassVar[Any] = Latent


class State(NamedTuple):
    """One array of a layer for each sequence.

    Attributes:
        name: its name.
        shape: the shape ``[...]`` for one sequence.
        axis: the axis of these that ``Place.over`` splits; None: every device has all of it.
        dtype: dtype, as NumPy has it.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class States:
    """Arrays of a sequence that do not grow with it.

    Attributes:
        each: the arrays of one layer.

    Example:
        >>> kind = States((State("conv", (3, 8), axis=1),))
        >>> kind.make(2, 5, 64, None, Place(), jnp.zeros).arrays["conv"].shape
        (2, 5, 3, 8)
    """

    each: tuple[State, ...]

    def make(
        self, layers: int, batch: int, capacity: int, dtype: Any, place: Place, zeros: Any
    ) -> Recurrent:
        """The empty state of so many layers; ``dtype`` is that of keys and values, and not used."""
        arrays = {}
        for one in self.each:
            shape, where = (layers, batch, *one.shape), self.sharding(one, place)
            arrays[one.name] = zeros(shape, jnp.dtype(one.dtype), device=where)
        return Recurrent(arrays)

    def sharding(self, one: State, place: Place) -> Any:
        """Where the arrays ``[L, B, ...]`` of one state lie."""
        where = place.sharding
        if not isinstance(where, NamedSharding):
            return where
        count = math.prod(where.mesh.shape[name] for name in place.over)
        splits = one.axis is not None and place.over and one.shape[one.axis] % count == 0
        over = [place.over if splits and i == one.axis else None for i in range(len(one.shape))]
        rows = (*where.spec, None, None)[1]
        return NamedSharding(where.mesh, PartitionSpec(None, rows, *over))


class Shared(NamedTuple):
    """A layer that reads what another layer keeps, and keeps nothing itself.

    Attributes:
        layer: number of that layer.
    """

    layer: int


class Group(NamedTuple):
    """The layers that keep the same.

    Attributes:
        kind: what each of them keeps.
        layers: their number L.
        numbers: for each layer of the model its index in the arrays of the group; -1 for those
            that are not in it.
        first: the first layer of the model that is in the group.
    """

    kind: KeysValues | States
    layers: int
    numbers: tuple[int, ...]
    first: int


def groups_of(kept: Sequence[Mapping[str, KeysValues | States | Shared]]) -> dict[str, Group]:
    """The groups of a model's layers, from what each layer keeps by the name of a group.

    Raises:
        ValueError: two layers keep something else under one name, or a layer shares what there is not.

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
    """The index of each layer in its groups, ``[L]``; by group where they differ; None: its own index.

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
