"""Attributes under a second name: that of a family's files beside that of other decoders."""

from __future__ import annotations

from typing import Any


def alias(name: str) -> Any:
    """A property that gives the attribute ``name`` the name that it is assigned to.

    Example:
        >>> class Layer:
        ...     norm = alias("ln_f")
        >>> layer = Layer()
        >>> layer.norm = 1
        >>> vars(layer)
        {'ln_f': 1}
    """
    return property(lambda self: getattr(self, name), lambda self, v: setattr(self, name, v))
