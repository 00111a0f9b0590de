"""The structure that a program was compiled from, which is compared when the program runs.

A program holds the Weights that its trace has met. Another layer in the model, or another attribute, would not
reach it, so that it would go on with the old ones without a word.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from ...errors import some
from ...graph.weight.epoch import EPOCH
from .definition import Cache, cache_of


class CompiledFrom:
    """The layers, Weights and attributes that calls read, of a Module at the time a program is compiled from it.

    Args:
        name: name of the program.
        module: the Module.
    """

    def __init__(self, name: str, module: Any):
        self._name, self._module = name, module
        self._epoch, self._cache = EPOCH.structure, cache_of(module)

    def check(self) -> None:
        """Compares with the Module as it is now; stacking and unstacking layers is no difference.

        Raises:
            ValueError: it has another structure, or other Weights.
        """
        if self._epoch == EPOCH.structure and not self._cache.watches:
            return
        now = cache_of(self._module)
        epoch = EPOCH.structure
        if what := _difference(self._cache, now):
            raise ValueError(
                f"'{self._name}' was compiled before its {type(self._module).__name__} was changed "
                f"({what}): compile it again"
            )
        self._epoch, self._cache = epoch, now


def _difference(before: Cache, now: Cache) -> str:
    """What differs, for the message; "" if nothing does."""
    held = (before.weights, now.weights)
    same = len(held[0]) == len(held[1]) and all(map(is_, *held))
    if same and before.definition.nodes == now.definition.nodes:
        return ""
    old, new = _weights(before), _weights(now)
    if names := [name for name in {**old, **new} if old.get(name) is not new.get(name)]:
        return f"other weights: {some(names, 3)}"
    kinds = sorted({kind.__name__ for kind, _ in _layers(before) ^ _layers(now)})
    if kinds:
        return f"layers or attributes of {some(kinds, 3)}"
    return "its layers" if same else ""  # stacked or unstacked, with the same Weights


def _weights(cache: Cache) -> dict[str, Any]:
    """All Weights by name, those of stacks too."""
    return {
        name: weight
        for full, holder in zip(cache.definition.names, cache.weights, strict=True)
        for name, weight in zip(holder.spec.names(full), holder.weights, strict=True)
    }


def _layers(cache: Cache) -> set[tuple[type, Any]]:
    """The different layers, of which a stack has one for all that are equal."""
    return {
        (n.cls, n.statics)
        for n in cache.definition.nodes
        if not (n.cls._mx_is_container or n.cls._mx_is_stack)
    }
