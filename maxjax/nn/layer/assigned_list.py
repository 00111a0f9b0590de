"""AssignedList: a caller's own list, watched after it was assigned to a Module.

``layers = []; self.layers = layers; layers.append(layer)`` is common Python, but the Module keeps a
LayerList and cannot see the append. It raises an error instead of silently missing a layer.
"""

from __future__ import annotations

import sys
from typing import Any


class AssignedList:
    """A caller's own list that was assigned to a Module, which keeps a LayerList of its content.

    Items that are appended to the caller's list afterwards would be missing from the Module.
    """

    __slots__ = ("where", "original", "items")

    def __init__(self, where: str, original: list[Any]):
        self.where, self.original, self.items = where, original, tuple(original)

    @staticmethod
    def of(value: Any, where: str) -> tuple[AssignedList, ...]:
        """The lists in a value, including nested ones."""
        inner = [
            AssignedList.of(v, f"{where}[{i}]")
            for i, v in enumerate(value)
            if type(v) in (list, tuple)
        ]
        own = (AssignedList(where, value),) if type(value) is list else ()
        return own + sum(inner, ())

    @property
    def is_unshared(self) -> bool:
        """Whether nobody else holds a reference to the list, so that nobody can change it."""
        return sys.getrefcount(self.original) == 2  # this object's reference, and that of the call

    def check(self) -> None:
        """Checks that the list was not changed.

        Raises:
            TypeError: the list was changed.
        """
        original, items = self.original, self.items
        if len(original) != len(items) or any(
            a is not b for a, b in zip(original, items, strict=True)
        ):
            attr = self.where.partition(".")[2]
            raise TypeError(
                f"the list that was assigned to {self.where} was changed afterwards, which the Module does not see: "
                f"append to module.{attr}, which is a LayerList, or assign the list when it is complete"
            )
