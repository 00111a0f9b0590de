"""Budget: limits on the values that a template makes, checked before or as soon as they exist.

No single value may be larger than ``at_once`` in its written form, so that each step is short. The
sum of all values, kept or not, may not exceed ``left``, so that memory is bounded. The unit is a
character, plus some units for each object, so that a unit is at most four bytes. Both limits grow
with the size of the messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from itertools import chain
from typing import Any

from jinja2.runtime import Undefined

from .thread import Stopped

_AT_ONCE, _IN_ALL = 1 << 20, 1 << 25
_TEXT, _NUMBER, _OTHER = 50, 32, 512
_LIST, _ITEM, _ENTRY = 64, 16, 100
_NESTED = 100  # depth of nested lists
_CALLS = 200  # depth of calls; jinja's frames for that many are within Python's recursion limit
INT_BITS = 1 << 16
TOO_MUCH = 1 << 60


class TooMuchError(Stopped):
    """A template exceeds its limits on size or time."""


class Budget:
    """The limits of one rendering, and what is left of them."""

    def __init__(self) -> None:
        self.at_once, self.left, self.calls = _AT_ONCE, _IN_ALL, 0
        self.over: str | None = None
        self.opaque = False
        self.inputs: Any = None
        self.known: dict[int, int] = {}

    def learn(self, inputs: Any, text: str) -> None:
        """Raises the limits by the size of the template's values and source."""
        self.inputs = inputs  # kept alive, so that no new value reuses one of their ids
        weight = self._learn(inputs) + len(text)
        self.at_once += 4 * weight
        self.left += 64 * weight

    def _learn(self, value: Any) -> int:
        if type(value) is str:
            size = _TEXT + len(value)
        elif type(value) in (list, tuple):
            size = _LIST + _ITEM * len(value) + sum(map(self._learn, value))
        elif type(value) is dict:
            pairs = chain(value, value.values())
            size = _LIST + _ENTRY * len(value) + sum(map(self._learn, pairs))
        else:
            return _NUMBER
        self.known[id(value)] = size
        return size

    def stop(self, why: str) -> None:
        """Ends the rendering from another thread: the next value that is counted raises."""
        self.over = why

    def check(self) -> None:
        if self.over is not None:
            raise TooMuchError(self.over)

    def allow(self, size: int) -> None:
        if size > self.at_once:
            raise TooMuchError(f"it makes something of more than {self.at_once} characters")

    def spend(self, value: Any) -> Any:
        """Subtracts the size of what is new in a value from ``left``, and returns the value."""
        if self.over is not None:
            raise TooMuchError(self.over)
        if type(value) is str:
            new = _TEXT + len(value)
            self.allow(new)
        else:
            new = self.weigh(value)[1]
        self.left -= new
        if self.left < 0:
            raise TooMuchError("it makes too much text")
        return value

    def weigh(self, *values: Any) -> tuple[int, int]:
        """The size of the values when written out, and the part of it that is not in the inputs.

        Afterwards ``opaque`` says whether there are objects among them of unknown size.

        Raises:
            TooMuchError: a value is larger than ``at_once``, nested too deeply, or a number with too
                many digits.
        """
        total, new, todo = 0, 0, [(iter(values), 0)]
        self.opaque = False
        while todo:
            items, level = todo.pop()
            for item in items:
                size, inside = self._size(item)
                total += size
                if id(item) not in self.known:
                    new += size
                if total > self.at_once:
                    self.allow(total)
                if inside is not None:
                    if level == _NESTED:
                        raise TooMuchError(f"it makes lists in lists, more than {_NESTED} deep")
                    todo.append((inside, level + 1))
        return total, new

    def _size(self, item: Any) -> tuple[int, Iterator[Any] | None]:
        """The size of an object, and an iterator over its items if they are not counted in it."""
        if isinstance(item, (str, bytes)):
            return _TEXT + len(item), None
        if isinstance(item, int):
            bits = item.bit_length()
            if bits > INT_BITS:
                raise TooMuchError(f"it makes a number of more than {INT_BITS} bits")
            return _NUMBER + bits, None
        if item is None or isinstance(item, (float, Undefined)):
            return _NUMBER, None
        if (size := self.known.get(id(item))) is not None:
            return size, None
        if isinstance(item, Mapping):
            return _LIST + _ENTRY * len(item), chain(item, item.values())
        if isinstance(item, range):
            return _LIST, None
        if isinstance(item, (Sequence, Set, ValuesView)):
            return _LIST + _ITEM * len(item), iter(item)
        self.opaque = True
        return _OTHER, None

    def enter(self) -> None:
        """Counts the start of a call that may recurse; the caller decrements ``calls`` after it."""
        if self.calls >= _CALLS:
            raise TooMuchError(f"its calls are nested more than {_CALLS} deep")
        self.calls += 1


class _Current(threading.local):
    """The budget of the template that runs in this thread."""

    def __init__(self) -> None:
        self.budget = Budget()


_current = _Current()


def use(budget: Budget) -> None:
    """Makes ``budget`` the budget of this thread."""
    _current.budget = budget


def budget() -> Budget:
    """The budget of this thread."""
    return _current.budget
