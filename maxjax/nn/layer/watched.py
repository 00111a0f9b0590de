"""What can change without an assignment to a Module: a caller's list of layers, and objects with fields.

``layers = []; self.layers = layers; layers.append(layer)`` is common Python, but the Module keeps a LayerList and
cannot see the append. It raises an error instead of silently missing a layer. Objects with fields are compared again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from operator import is_
from typing import Any

from .static import Live, freeze


class AssignedList:
    """A caller's own list that was assigned to a Module, which keeps a LayerList of its content.

    Args:
        where: ``Class.attribute`` that it was assigned to; "" if it is an item of a LayerList.
        original: the list.
        made: the LayerList.
    """

    __slots__ = ("where", "original", "items", "layers")

    def __init__(self, where: str, original: list[Any], made: Any):
        self.where, self.original, self.items = where, original, list(original)
        self.layers = made.layers

    @staticmethod
    def watch(where: str, original: list[Any] | tuple[Any, ...], made: Any) -> None:
        """Watches a list from which a LayerList was made, and the lists in it."""
        if type(original) is list:
            vars(made)["_mx_assigned"] = AssignedList(where, original, made)
        for i, inner in enumerate(original):
            if type(inner) in (list, tuple):
                AssignedList.watch(f"{where}[{i}]" if where else "", inner, made[i])

    def is_held(self, made: Any) -> bool:
        """Whether the LayerList still has all layers that it was made of.

        Otherwise its content is another, and watching the caller's list would keep replaced layers in memory.
        """
        return {id(layer) for layer in made.layers} >= {id(layer) for layer in self.layers}

    def check(self) -> None:
        """Checks that the list was not changed; every use of the Module does.

        Raises:
            TypeError: the list was changed.
        """
        if len(self.original) != len(self.items) or not all(map(is_, self.original, self.items)):
            _, _, attr = self.where.partition(".")
            name = f"module.{attr}" if attr else "the item"
            raise TypeError(
                f"the list that was assigned to {self.where or 'a LayerList'} was changed afterwards, which the Module "
                f"does not see: append to {name}, which is a LayerList, or assign the list when it is complete"
            )

    @staticmethod
    def below(modules: Iterable[Any]) -> tuple[AssignedList, ...]:
        """The watched lists of Modules, without those whose LayerList has other layers now."""
        found = []
        for module in modules:
            if (one := module._mx_assigned) is not None:
                one.check()
                if one.is_held(module):
                    found.append(one)
                else:
                    vars(module)["_mx_assigned"] = None
        return tuple(found)


class Changeable:
    """An object in static attributes that can change in place, and the key of its content."""

    __slots__ = ("value", "where", "key")

    def __init__(self, value: Any, where: str):
        self.value, self.where = value, where
        self.key: Hashable = freeze(value, where)[1]

    def has_changed(self) -> bool:
        return freeze(self.value, self.where)[1] != self.key

    @staticmethod
    def below(modules: Iterable[Any]) -> tuple[Changeable, ...]:
        """The objects in Modules that can change in place; updates the keys of the attributes that hold them."""
        found: dict[int, Changeable] = {}
        for module in modules:
            statics = module._mx_statics
            for attr in [name for name, key in statics.items() if type(key) is Live]:
                if attr not in module._mx_unread:
                    value = vars(module)[attr]
                    if id(value) not in found:
                        found[id(value)] = Changeable(value, f"{type(module).__name__}.{attr}")
                    statics[attr] = found[id(value)].key
        return tuple(found.values())
