"""Floor 1. What the reading of a pickle gives: plain values and tokens, of a size that is bounded.

Below: files. Above: pickle_reader and pickles, which read one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .limits import Limits


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A name that a pickle may ask for; it stands for itself and is never imported.

    ``value`` is what it means to the format. ``reduce`` gives what a call of it stands for:
    a function of ours, from the ``Reader`` and the arguments to a plain value.
    """

    module: str
    name: str
    value: Any = None
    reduce: Callable[[Any, tuple], Any] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def shown(value: Any) -> str:
    """A value of a pickle as short text, without looking into it.

    Example:
        >>> shown("a"), shown((1, (2, 3))), shown(None)
        ("'a'", 'a tuple of 2', 'None')
    """
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value[:80]) + ("…" if len(value) > 80 else "")
    if value is None or isinstance(value, int | float | Token):
        return str(value)
    return f"a {type(value).__name__}"


# --- the size of a value -----------------------------------------------------------------------


_CHILDREN: dict[type, Callable[[Any], Any]] = {dict: dict.values, list: iter, tuple: iter}


class _Level:
    """A container on the way down: ``values`` in it so far, and ``levels`` with its own."""

    __slots__ = ("value", "rest", "values", "levels")

    def __init__(self, value: Any):
        self.value = value
        self.rest = iter(_CHILDREN[type(value)](value))
        self.values = self.levels = 1

    def add(self, values: int, levels: int) -> None:
        self.values += values
        self.levels = max(self.levels, levels + 1)

    def next(self, known: dict[int, tuple[int, int]]) -> Any:
        """The next container in it that was not measured yet, or None."""
        for child in self.rest:
            if type(child) not in _CHILDREN:
                self.values += 1
            elif id(child) in known:
                self.add(*known[id(child)])
            else:
                return child
        return None


def measure(value: Any, limits: Limits, over: Callable[[str, str, int], Exception]) -> None:
    """Checks depth and size of a value as if each container were written out at each place.

    ``over`` makes the error from the problem, the limit's name and the value.
    """
    items, depth = limits.pickle_items, limits.pickle_depth
    known: dict[int, tuple[int, int]] = {}  # id → (values, levels)
    path = [_Level(value)] if type(value) in _CHILDREN else []
    inside = {id(value)}
    while path:
        level = path[-1]
        child = level.next(known)
        if level.values > items:
            raise over("the pickle holds too many values", "pickle_items", level.values)
        if child is not None:
            if id(child) in inside or len(path) >= depth:
                raise over("values too deep in one another", "pickle_depth", depth + 1)
            inside.add(id(child))
            path.append(_Level(child))
            continue
        if len(path) + level.levels - 1 > depth:
            raise over("values too deep in one another", "pickle_depth", depth + 1)
        path.pop()
        inside.discard(id(level.value))
        known[id(level.value)] = level.values, level.levels
        if path:
            path[-1].add(level.values, level.levels)
