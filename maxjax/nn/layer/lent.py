"""Lent: a caller's own list, watched after it was assigned to a Module.

``layers = []; self.layers = layers; layers.append(layer)`` is how Python code is written, and
the Module, which keeps a LayerList, cannot see it: better an error than a layer that is missing.
"""

from __future__ import annotations

import sys
from typing import Any


class Lent:
    """A caller's own list that was assigned to a Module, which keeps a LayerList of its content.

    What is appended to the caller's list afterwards would be missing from the Module.
    """

    __slots__ = ("where", "theirs", "items")

    def __init__(self, where: str, theirs: list[Any]):
        self.where, self.theirs, self.items = where, theirs, tuple(theirs)

    @staticmethod
    def of(value: Any, where: str) -> tuple[Lent, ...]:
        """The lists of a value, which may hold others."""
        inner = [
            Lent.of(v, f"{where}[{i}]") for i, v in enumerate(value) if type(v) in (list, tuple)
        ]
        own = (Lent(where, value),) if type(value) is list else ()
        return own + sum(inner, ())

    @property
    def is_ours_alone(self) -> bool:
        """Whether nobody else holds the list any more, so that nobody can change it."""
        return sys.getrefcount(self.theirs) == 2  # this object's, and that of the call

    def check(self) -> None:
        """Refuses to go on when the list was changed.

        Raises:
            TypeError: It was.
        """
        theirs, items = self.theirs, self.items
        if len(theirs) != len(items) or any(a is not b for a, b in zip(theirs, items, strict=True)):
            attr = self.where.partition(".")[2]
            raise TypeError(
                f"the list that was assigned to {self.where} was changed afterwards, which the Module does not see: "
                f"append to module.{attr}, which is a LayerList, or assign the list when it is complete"
            )
