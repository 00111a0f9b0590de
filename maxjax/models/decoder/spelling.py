"""Attributes that files of a family spell otherwise than the other decoders."""

from __future__ import annotations

from typing import Any


class Spelled(property):
    """A property that stands for an attribute of another name.

    Attributes:
        name: the attribute's name in the family's files.
    """

    name: str


def spelled(name: str) -> Any:
    """The attribute ``name`` under the name that it has in other decoders.

    The attribute, and so the tensors below it, are named as in the family's files; everything else uses
    either name.

    Example:
        >>> from maxjax.nn import Module
        >>> class Mine(Module):
        ...     o_proj = spelled("dense")
        >>> mine = Mine()
        >>> mine.o_proj = Module()
        >>> mine.dense is mine.o_proj, spelling(mine, "o_proj"), spelling(mine, "q_proj")
        (True, 'dense', 'q_proj')
    """
    found = Spelled(lambda self: getattr(self, name), lambda self, v: setattr(self, name, v))
    found.name = name
    return found


def spelling(module: Any, name: str) -> str:
    """The name in a Module's files of the attribute that other decoders call ``name``."""
    found = getattr(type(module), name, None)
    return found.name if isinstance(found, Spelled) else name
