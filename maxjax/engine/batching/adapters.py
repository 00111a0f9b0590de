"""Adapters: the LoRA adapters of an engine, by name, and the model with all of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from ...agreement import digest
from ...errors import UserInputError, closest
from ...lora.side_by_side import SideBySide, Updates
from ...nn.layer.observe.programs import ProgramObserver
from ..bucket import bucket

# A model has so many places for adapters, and ranks, or twice as many and so on: few programs are compiled.
_LEAST_PLACES, _LEAST_RANK = 4, 16


def updates_digest(updates: Updates) -> str:
    """A digest of the updates of an adapter."""
    rows = (
        repr((name, part.dtype.str, part.shape)).encode() + part.tobytes()
        for name, one in sorted(updates.items())
        for part in one
    )
    return digest(b"".join(rows))


class LoadedAdapter(NamedTuple):
    """An adapter that texts use.

    Attributes:
        name: its name.
        version: a number that no other adapter of the engine has had.
        place: its place among the adapters of the model.
    """

    name: str
    version: int
    place: int


class Adapters:
    """The adapters of an engine. An adapter without a name stays as long as a text uses it.

    Args:
        model: the base model.
        most: largest number of adapters.
        most_rank: largest rank of a layer's update.
    """

    def __init__(self, model: Any, most: int = 8, most_rank: int = 64):
        self._model, self.most, self.most_rank = model, most, most_rank
        self._named: dict[str, LoadedAdapter] = {}
        self._places: list[tuple[LoadedAdapter, Updates]] = []
        self._versions = itertools.count(1)
        self._layers: frozenset[str] = frozenset()
        self._rank = _LEAST_RANK
        self._together: SideBySide | None = None
        self._observer: ProgramObserver | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(self._named)

    @property
    def has_model(self) -> bool:
        """Whether there is a model with adapters."""
        return self._together is not None

    def find(self, name: str) -> LoadedAdapter:
        """The adapter of a name.

        Raises:
            UserInputError: there is none.
        """
        if (found := self._named.get(name)) is not None:
            return found
        near = closest(name, self._named)
        hint = f"did you mean {near!r}? " if near else ""
        known = ", ".join(map(repr, self._named)) or "none"
        raise UserInputError(f"there is no adapter {name!r}: {hint}The engine has {known}")

    def add(self, name: str, updates: Updates, in_use: Collection[int]) -> None:
        """Adds an adapter, or a new version of the one with this name.

        Args:
            in_use: the versions of the adapters of texts that have not ended.

        Raises:
            UserInputError: there are too many adapters, or its rank is too large.
        """
        layer = max(updates, key=lambda one: updates[one].rank)
        if (rank := updates[layer].rank) > self.most_rank:
            raise UserInputError(
                f"adapter {name!r} has rank {rank} in '{layer}', and max_adapter_rank is {self.most_rank}"
            )
        others = {one.version for key, one in self._named.items() if key != name}
        kept = others.union(in_use)
        places = list(self._places)
        place = next(
            (i for i, (one, _) in enumerate(places) if one.version not in kept), len(places)
        )
        if place == self.most:
            raise UserInputError(
                f"cannot add adapter {name!r}: max_adapters is {self.most}. There are {len(others)} others, and "
                f"answers that have not ended use {len(kept - others)} that are replaced or removed"
            )
        new = LoadedAdapter(name, next(self._versions), place)
        places[place : place + 1] = [(new, updates)]
        layers = self._layers.union(updates)
        largest = max(self._rank, rank)
        count = bucket(max(len(places), min(_LEAST_PLACES, self.most)))
        rank = min(bucket(largest), self.most_rank)
        given = [u for _, u in places]
        together = SideBySide(self._model, [*given, *[None] * (count - len(given))], rank, layers)
        self._places, self._layers, self._rank = places, layers, rank
        self._together, self._observer = together, ProgramObserver(together.model)
        self._named = {**self._named, name: new}  # other threads read it

    def remove(self, name: str, in_use: Collection[int]) -> None:
        """Removes the name of an adapter.

        Args:
            in_use: as for :meth:`add`.

        Raises:
            UserInputError: there is no such adapter.
        """
        gone = self.find(name)
        self._named = {key: one for key, one in self._named.items() if one is not gone}
        if not self._named and not in_use:
            self._places, self._together, self._observer = [], None, None

    def observer(self, rows: np.ndarray, last: np.ndarray) -> ProgramObserver:
        """What dispatches programs of the model with adapters, for rows as in ``SideBySide.set_rows``."""
        assert self._together is not None and self._observer is not None
        self._together.set_rows(rows, last)
        return self._observer
