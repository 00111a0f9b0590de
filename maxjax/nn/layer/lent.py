"""Lent: a caller's own list, watched after it was assigned to a Module.

``layers = []; self.layers = layers; layers.append(layer)`` is common Python, but
the Module keeps a LayerList and cannot see the append. An error is better than a missing layer.
"""

from __future__ import annotations

import sys
from typing import Any


class Lent:
    """A caller's own list that was assigned to a Module, which keeps a LayerList of its content.

    Items that are appended to the caller's list afterwards would be missing from the Module.
    """

    __slots__ = ("where", "theirs", "items")

    def __init__(self, where: str, theirs: list[Any]):
        self.where, self.theirs, self.items = where, theirs, tuple(theirs)

    @staticmethod
    def of(value: Any, where: str) -> tuple[Lent, ...]:
        """The lists in a value, including nested ones."""
        inner = [
            Lent.of(v, f"{where}[{i}]") for i, v in enumerate(value) if type(v) in (list, tuple)
        ]
        own = (Lent(where, value),) if type(value) is list else ()
        return own + sum(inner, ())

    @property
    def is_ours_alone(self) -> bool:
        """Whether nobody else holds a reference to the list, so that nobody can change it."""
        return sys.getrefcount(self.theirs) == 2  # this object's reference, and that of the call

    def check(self) -> None:
        """Checks that the list was not changed.

        Raises:
            TypeError: the list was changed.
        """
        theirs, items = self.theirs, self.items
        if len(theirs) != len(items) or any(a is not b for a, b in zip(theirs, items, strict=True)):
            attr = self.where.partition(".")[2]
            raise TypeError(
                f"the list that was assigned to {self.where} was changed afterwards, which the Module does not see: "
                f"append to module.{attr}, which is a LayerList, or assign the list when it is complete"
            )
