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
    """The layers, Weights and attributes of a Module at the time a program is compiled from it.

    Args:
        name: name of the program.
        module: the Module.
    """

    def __init__(self, name: str, module: Any):
        self._name, self._module = name, module
        self._epoch, self._before = EPOCH.structure, cache_of(module)

    def check(self) -> None:
        """Compares with the Module as it is now.

        Raises:
            ValueError: it has another structure, or other Weights.
        """
        if self._epoch == EPOCH.structure:
            return
        epoch, before, now = EPOCH.structure, self._before, cache_of(self._module)
        same = len(before.weights) == len(now.weights) and all(map(is_, before.weights, now.weights))
        if not same or before.definition.nodes != now.definition.nodes:
            raise ValueError(
                f"'{self._name}' was compiled before its {type(self._module).__name__} was changed"
                f" ({_difference(before, now)}): compile it again"
            )
        self._epoch = epoch


def _difference(before: Cache, now: Cache) -> str:
    """What differs, for the message."""
    old, new = (dict(zip(c.definition.names, c.weights, strict=True)) for c in (before, now))
    if names := [name for name in {**old, **new} if old.get(name) is not new.get(name)]:
        return f"other weights: {some(names, 3)}"
    for one, other in zip(before.definition.nodes, now.definition.nodes, strict=False):
        if attrs := {name for name, _ in {*one.statics} ^ {*other.statics}}:
            return f"{one.kind.__name__}.{min(attrs)}"
    return "its layers"
