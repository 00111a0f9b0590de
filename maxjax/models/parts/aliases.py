"""Attributes with a second name: one name as in a family's files, and one as in all other decoders."""

from __future__ import annotations

import operator
from typing import Any


class Alias(property):
    """A property that stands for the attribute ``name``."""

    name: str


def alias(name: str) -> Any:
    """A property that stands for the attribute ``name``, under the name that it is assigned to.

    A name with dots stands for an attribute of an attribute.

    Example:
        >>> class Layer:
        ...     norm = alias("ln_f")
        >>> layer = Layer()
        >>> layer.norm = 1
        >>> vars(layer), spelling(layer, "norm"), spelling(layer, "mlp")
        ({'ln_f': 1}, 'ln_f', 'mlp')
    """
    front, _, last = name.rpartition(".")
    owner = operator.attrgetter(front) if front else lambda self: self
    found = Alias(
        lambda self: getattr(owner(self), last), lambda self, v: setattr(owner(self), last, v)
    )
    found.name = name
    return found


def spelling(module: Any, name: str) -> str:
    """The family's own name, as in its files, of the attribute that other decoders call ``name``."""
    found = getattr(type(module), name, None)
    return found.name if isinstance(found, Alias) else name
